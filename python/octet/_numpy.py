"""Attention of numpy's arrays, which lie in host memory. bfloat16 and 8-bit floats are those of ml_dtypes."""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from octet import _abi, _appending, _plan, _quantizing
from octet._appending import Rope
from octet._operands import RESULTS, Operands, inputs_of, label, with_gradient
from octet._options import Options, dtype_name, dtype_of
from octet._qtensor import QTensor
from octet._results import by_head, needs_residual
from octet._views import View, memory_order
from octet.errors import InvalidArgument

_ALIGNMENT = 64


class NumpyAdapter:
    """See _adapters.Adapter."""

    def view(self, name: str, array: np.ndarray) -> View:
        item = array.dtype.itemsize
        if isinstance(array, np.ma.MaskedArray):
            raise InvalidArgument(
                f"{label(name)}: a masked array, whose mask octet would not see; pass mask to octet.attention"
            )
        number = _abi.DTYPES[dtype_name(array.dtype, label(name))]
        if any(stride % item for stride in array.strides):
            raise InvalidArgument(
                f"{label(name)}: strides of {array.strides} bytes, expected multiples of its elements of {item} bytes; "
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

    def is_float(self, array: np.ndarray) -> bool:
        return array.dtype.name in ("float64", "float32", "float16", "bfloat16")

    def cast(self, array: np.ndarray, dtype: Any) -> np.ndarray:
        return array.astype(dtype, copy=False)

    def integers(self, numbers: Sequence[int], like: Any) -> np.ndarray:
        return np.array(numbers, np.int32)

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


def run_attention(options: Options, operands: Operands, return_lse: bool = False) -> tuple[Any, ...]:
    """(o, lse)"""
    return tuple(_plan.run(adapter, "forward", options, by_head(adapter, options, operands)))


def run_vjp(options: Options, operands: Operands, return_dmask: bool = False) -> tuple[Any, ...]:
    """(dq, dk, dv), dsinks where there are sinks, and dmask where it is asked for"""
    given = by_head(adapter, options, operands)
    residual = needs_residual(adapter, options, given["q"])
    saved = _plan.run(adapter, "forward", options, inputs_of("forward", given), residual)
    given = given | dict(zip(RESULTS["forward"], saved, strict=False))
    dq, dk, dv, *more = _plan.run(adapter, "backward", options, inputs_of("backward", given), return_dmask)
    of = with_gradient(given, return_dmask)[3:]
    return dq, dk, dv, *(d.astype(operands[name].dtype, copy=False) for name, d in zip(of, more, strict=True))


def run_jvp(options: Options, operands: Operands, return_lse: bool = False) -> tuple[Any, ...]:
    """(o, to), with return_lse (o, to, lse, tlse)"""
    o, lse, to, *tlse = _plan.run(adapter, "jvp", options, by_head(adapter, options, operands), return_lse)
    return (o, to, lse, *tlse) if return_lse else (o, to)


def run_quantize(x: Any, norm_weight: Any | None, choices: _quantizing.Choices) -> _quantizing.Parts:
    """See `octet.quantize`."""
    return _quantizing.run(adapter, x, norm_weight, choices)


def run_dequantize(x: QTensor, dtype: Any) -> Any:
    """See `octet.dequantize`."""
    return _quantizing.run_back(adapter, x, dtype)


def run_append(operands: Operands, rope: Rope, layout: str) -> Any:
    """See `octet.append`."""
    for name in ("k_cache", "v_cache", "k_scale", "v_scale"):
        if name in operands and not operands[name].flags.writeable:
            raise InvalidArgument(f"{name}: read-only, allowed: an array that may be written")
    return _appending.run(adapter, operands, rope, layout)


def to_numpy(array: np.ndarray) -> np.ndarray:
    return array
