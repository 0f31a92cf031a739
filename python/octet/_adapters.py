"""What a framework has to offer: numpy's in _numpy.py, torch's and jax's in their _adapter.py."""

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from octet._options import Options
from octet._views import View


class Types(Protocol):
    """The types of one framework's arrays."""

    def dtype_name(self, dtype: Any, what: str) -> str:
        """A name of _abi.DTYPES; rejects others, with `what` as whose dtype it is."""

    def own_type(self, q: Any) -> str:
        """The name of the type that q has when it is computed with."""

    def dtype_of(self, name: str) -> Any:
        """The framework's dtype of that name."""

    def is_float(self, array: Any) -> bool:
        """Whether it is of a float type that sinks may have."""

    def cast(self, array: Any, dtype: Any) -> Any:
        """The array in another type."""

    def integers(self, numbers: Sequence[int], like: Any) -> Any:
        """An int32 array of these numbers on the device of `like`."""

    def order(self, array: Any) -> tuple[int, ...]:
        """Its axes as they lie in memory, the outermost first: see _views.memory_order."""

    def is_true(self, comparison: Any) -> bool:
        """Whether a comparison of sizes holds; False where they are symbols of a program that is traced."""


class Describer(Protocol):
    """What the library has to know of arrays."""

    def view(self, name: str, array: Any) -> View: ...

    def address(self, array: Any) -> int: ...


class Adapter(Types, Describer, Protocol):
    """Arrays of one framework. `Any` is such an array."""

    def key(self, array: Any) -> Hashable:
        """All that `view` depends on: equal keys, equal views."""

    def empty(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any, like: Any) -> Any:
        """A dense array on the device of `like`; strides count elements."""

    def workspace(self, size: int, like: Any) -> tuple[object, int]:
        """`size` bytes aligned to 64 on the device of `like`, and their address."""

    def stream(self, like: Any) -> int | None:
        """The CUDA stream that the caller works on; None on the CPU."""

    def state(self) -> Hashable:
        """All that `resolve` depends on, but for its arguments."""

    def resolve(self, options: Options, like: Any) -> Options:
        """Fills in what the framework decides: threads, determinism."""
