"""What explain and supports need of jax: see _passes.Front. Arrays are abstract here, so nothing has an address."""

import itertools
from typing import Any

import jax

from octet import _abi, _numpy
from octet._options import Options
from octet._plan import View, contiguous_strides

_SPACING = 1 << 44  # bytes between pretended addresses


class JaxFront:
    """Arrays, tracers and ShapeDtypeStructs; contiguous, on the CPU or a CUDA device."""

    def __init__(self) -> None:
        self._addresses = itertools.cycle(range(_SPACING, 1 << 50, _SPACING))

    def dtype_name(self, dtype: Any, what: str) -> str:
        return _numpy.dtype_name(dtype, what)

    def own_type(self, q: Any) -> str:
        return self.dtype_name(q.dtype, "q")

    def dtype_of(self, name: str) -> Any:
        return _numpy.dtype_of(name)

    def view(self, name: str, x: Any) -> View:
        number = _abi.DTYPES[self.dtype_name(x.dtype, name.rstrip("_"))]
        device = _abi.DEVICES["cpu" if jax.default_backend() == "cpu" else "cuda"]
        return View(number, tuple(x.shape), contiguous_strides(x.shape), device)

    def address(self, x: Any) -> int:
        return next(self._addresses)

    def empty(self, shape: tuple[int, ...], dtype: Any, like: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def workspace(self, size: int, like: Any) -> tuple[object, int]:
        raise AssertionError("XLA gives the workspace")

    def stream(self, like: Any) -> None:
        return None

    def resolve(self, options: Options, like: Any) -> Options:
        return options


front = JaxFront()
