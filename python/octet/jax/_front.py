"""The part of _passes.Front that explain, supports and the primitives need. Nothing is computed here, so arrays may be
abstract, and the rest of a front, addresses and memory, is XLA's business."""

from typing import Any

import jax

from octet import _abi, _numpy
from octet._options import Options
from octet._plan import View, contiguous_strides


def platform_of(x: Any) -> str:
    """The name in _abi.DEVICES of where x lies, or where an abstract array would by default."""
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
        platform = next(iter(x.devices())).platform
    else:
        default: Any = getattr(jax.config, "jax_default_device", None)
        platform = getattr(default, "platform", default) or jax.default_backend()
    return "cpu" if platform == "cpu" else "cuda"


class JaxFront:
    """Arrays, tracers and ShapeDtypeStructs; contiguous, on the CPU or a CUDA device."""

    def dtype_name(self, dtype: Any, what: str) -> str:
        return _numpy.dtype_name(dtype, what)

    def own_type(self, q: Any) -> str:
        return self.dtype_name(q.dtype, "q")

    def dtype_of(self, name: str) -> Any:
        return _numpy.dtype_of(name)

    def view(self, name: str, x: Any) -> View:
        number = _abi.DTYPES[self.dtype_name(x.dtype, name.rstrip("_"))]
        return View(number, tuple(x.shape), contiguous_strides(x.shape), _abi.DEVICES[platform_of(x)])

    def order(self, x: Any) -> tuple[int, ...]:
        return tuple(range(x.ndim))

    def empty(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any, like: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def resolve(self, options: Options, like: Any) -> Options:
        return options


front = JaxFront()
