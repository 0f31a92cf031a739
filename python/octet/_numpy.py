"""Attention of numpy's arrays, which lie in host memory. bfloat16 and 8-bit floats are those of ml_dtypes."""

from collections.abc import Hashable
from typing import Any

import numpy as np

from octet import _abi, _plan
from octet._options import Options, dtype_name, dtype_of
from octet._plan import View, memory_order
from octet.errors import InvalidArgument

_ALIGNMENT = 64


class NumpyAdapter:
    """See _plan.Adapter."""

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

    is_true = staticmethod(bool)

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


adapter = NumpyAdapter()


def by_head(name: str, x: Any, options: Options) -> Any:
    """Sinks, their tangent or slopes in the type that the library takes."""
    if x is None:
        return None
    _plan.expect_by_head(name, x, x.dtype.name in ("float64", "float32", "float16", "bfloat16"))
    return x.astype(_plan.lse_type(adapter, options), copy=False)


def run_attention(
    options: Options,
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    sinks: Any = None,
    alibi_slopes: Any = None,
    return_lse: bool = False,
) -> tuple[Any, Any]:
    """(o, lse)"""
    more = mask, cu_seqlens_q, cu_seqlens_k, by_head("sinks", sinks, options)
    slopes = by_head("alibi_slopes", alibi_slopes, options)
    o, lse = _plan.run(adapter, "forward", options, (q, k, v, *more, slopes))
    return o, lse


def run_vjp(
    options: Options,
    q: Any,
    k: Any,
    v: Any,
    do: Any,
    mask: Any = None,
    sinks: Any = None,
    dlse: Any = None,
    alibi_slopes: Any = None,
) -> tuple[Any, ...]:
    """(dq, dk, dv), and dsinks where there are sinks"""
    residual = _plan.needs_residual(adapter, options, q)
    more = mask, None, None, by_head("sinks", sinks, options)
    slopes = by_head("alibi_slopes", alibi_slopes, options)
    o, lse, *r = _plan.run(adapter, "forward", options, (q, k, v, *more, slopes), residual)
    saved = o, lse, r[0] if r else None
    dq, dk, dv, *dsinks = _plan.run(adapter, "backward", options, (do, q, k, v, *saved, *more, dlse, slopes))
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
    alibi_slopes: Any = None,
    return_lse: bool = False,
) -> tuple[Any, ...]:
    """(o, to), with return_lse (o, to, lse, tlse)"""
    more = mask, None, None, by_head("sinks", sinks, options), by_head("tsinks", tsinks, options)
    slopes = by_head("alibi_slopes", alibi_slopes, options)
    o, lse, to, *tlse = _plan.run(adapter, "jvp", options, (q, k, v, tq, tk, tv, *more, slopes), return_lse)
    return (o, to, lse, *tlse) if return_lse else (o, to)


def to_numpy(array: np.ndarray) -> np.ndarray:
    return array
