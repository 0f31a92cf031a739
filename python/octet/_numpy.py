"""The numpy front: arrays in host memory. bfloat16 and 8-bit floats are those of ml_dtypes."""

import importlib
from collections.abc import Hashable
from typing import Any

import numpy as np

from octet import _abi, _passes
from octet._options import Options
from octet._plan import View, memory_order
from octet.errors import InvalidArgument, refuse_dtype

_DTYPES = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2", "int8": "i8", "uint8": "u8", "int4": "i4", "int32": "i32", "bool": "bool",
}  # fmt: skip
_ALIGNMENT = 64


def dtype_name(dtype: Any, what: str) -> str:
    """The name in _abi.DTYPES of a numpy dtype; `what` is whose dtype it is."""
    found = np.dtype(dtype)
    if found.name not in _DTYPES or not found.isnative:
        if not found.isnative:
            refuse_dtype(what, found.str, " in the byte order of this machine")
        hint = "; bfloat16 arrays have the dtype ml_dtypes.bfloat16" if found.name == "uint16" else ""
        refuse_dtype(what, found.name, hint)
    return _DTYPES[found.name]


def dtype_of(name: str) -> np.dtype:
    """The numpy dtype of a name in _abi.DTYPES."""
    (np_name,) = [key for key, value in _DTYPES.items() if value == name]
    try:
        return np.dtype(np_name)
    except TypeError:
        try:
            return np.dtype(getattr(importlib.import_module("ml_dtypes"), np_name))
        except ImportError as error:
            raise InvalidArgument(f"dtype {name} needs ml_dtypes in numpy: pip install ml_dtypes") from error


class NumpyFront:
    """See _passes.Front."""

    def view(self, name: str, array: np.ndarray) -> View:
        label, item = name.rstrip("_"), array.dtype.itemsize
        if isinstance(array, np.ma.MaskedArray):
            raise InvalidArgument(
                f"{label}: a masked array, whose mask octet would not see; pass mask to octet.attention"
            )
        number = _abi.DTYPES[dtype_name(array.dtype, label)]
        if any(stride % item for stride in array.strides):
            raise InvalidArgument(
                f"{label}: strides of {array.strides} bytes, expected multiples of its elements of {item} bytes; "
                "copy it with numpy.ascontiguousarray"
            )
        return View(number, array.shape, tuple([stride // item for stride in array.strides]))

    def key(self, array: np.ndarray) -> Hashable:
        return type(array), array.shape, array.strides, array.dtype

    def address(self, array: np.ndarray) -> int:
        return array.ctypes.data

    def order(self, array: np.ndarray) -> tuple[int, ...]:
        return memory_order(array.shape, array.strides)

    def empty(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any, like: Any) -> np.ndarray:
        size = np.dtype(dtype).itemsize
        return np.ndarray(shape, dtype, strides=[size * stride for stride in strides])

    dtype_name = staticmethod(dtype_name)

    def own_type(self, q: np.ndarray) -> str:
        return dtype_name(q.dtype, "q")

    dtype_of = staticmethod(dtype_of)

    def workspace(self, size: int, like: Any) -> tuple[object, int]:
        memory = np.empty(size + _ALIGNMENT, np.uint8)
        return memory, -(-memory.ctypes.data // _ALIGNMENT) * _ALIGNMENT

    def stream(self, like: Any) -> None:
        return None

    def state(self) -> None:
        return None

    def resolve(self, options: Options, like: Any) -> Options:
        return options


front = NumpyFront()


def sinks_of(name: str, x: Any, options: Options) -> Any:
    """Sinks or their tangent in the type that the library takes."""
    if x is None:
        return None
    _passes.expect_sinks(name, x, _DTYPES.get(x.dtype.name) in ("f64", "f32", "f16", "bf16"))
    return x.astype(_passes.lse_type(front, options), copy=False)


def run_attention(
    options: Options,
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    sinks: Any = None,
    return_lse: bool = False,
) -> tuple[Any, Any]:
    """(o, lse)"""
    more = mask, cu_seqlens_q, cu_seqlens_k, sinks_of("sinks", sinks, options)
    o, lse = _passes.run(front, "forward", options, (q, k, v, *more))
    return o, lse


def run_vjp(
    options: Options, q: Any, k: Any, v: Any, do: Any, mask: Any = None, sinks: Any = None, dlse: Any = None
) -> tuple[Any, ...]:
    """(dq, dk, dv), and dsinks where there are sinks"""
    residual = _passes.needs_residual(front, options, q)
    more = mask, None, None, sinks_of("sinks", sinks, options)
    o, lse, *r = _passes.run(front, "forward", options, (q, k, v, *more), residual)
    saved = o, lse, r[0] if r else None
    dq, dk, dv, *dsinks = _passes.run(front, "backward", options, (do, q, k, v, *saved, *more, dlse))
    return dq, dk, dv, *(x.astype(sinks.dtype, copy=False) for x in dsinks)


def run_jvp(
    options: Options,
    q: Any,
    k: Any,
    v: Any,
    tq: Any,
    tk: Any,
    tv: Any,
    mask: Any = None,
    sinks: Any = None,
    tsinks: Any = None,
    return_lse: bool = False,
) -> tuple[Any, ...]:
    """(o, to), with return_lse (o, to, lse, tlse)"""
    more = mask, None, None, sinks_of("sinks", sinks, options), sinks_of("tsinks", tsinks, options)
    o, lse, to, *tlse = _passes.run(front, "jvp", options, (q, k, v, tq, tk, tv, *more), return_lse)
    return (o, to, lse, *tlse) if return_lse else (o, to)


def to_numpy(array: np.ndarray) -> np.ndarray:
    return array
