"""octet.quantize and octet.dequantize: arrays to 8-bit codes and back (docs/quantizers.md)."""

import ctypes
from typing import Any, Literal

from octet import _abi, _api
from octet._adapters import Adapter
from octet._descriptors import quantization_of, struct, tensor_of
from octet._library import check, lib
from octet._options import LAYOUTS, Layout, count, expect_constant, look_up, number
from octet._qtensor import Coding, QTensor
from octet._rejections import expect_known
from octet._views import contiguous_strides, dense_strides
from octet.errors import InvalidArgument, Unsupported

_FORMATS = {name: _abi.DTYPES[name] for name in ("i8", "u8", "i4", "e4m3", "e5m2")}
_LAYOUTS = {"bhsd": 0, "bshd": 1}


def _adapter_of(x: Any, **others: Any) -> Adapter:
    given = {"x": x} | {name: y for name, y in others.items() if y is not None}
    framework = _api.framework_of(given)
    if framework.__name__ == "octet.jax":
        raise Unsupported("x: a jax array; quantize numpy.asarray(x), as jax programs take no codes")
    if framework.__name__ == "octet.torch" and not isinstance(x, QTensor):
        for name, y in given.items():
            expect_constant(name, y)
    return framework.adapter


def _described(adapter: Adapter, name: str, array: Any, layout: str = "bhsd") -> _abi.Tensor:
    view = adapter.view(name, array)
    if len(view.shape) != 4:
        raise InvalidArgument(f"{name}: shape {list(view.shape)}, expected 4 dimensions, layout {layout!r}")
    tensor = tensor_of(view, LAYOUTS[layout])
    tensor.data = adapter.address(array)
    return tensor


def _weights(adapter: Adapter, weights: Any) -> _abi.Tensor:
    """The weights of a norm, [dim] or [heads, dim]."""
    view = adapter.view("norm_weight", weights)
    if len(view.shape) not in (1, 2):
        raise InvalidArgument(f"norm_weight: shape {list(view.shape)}, expected [dim] or [heads, dim]")
    tensor = tensor_of(view, (-1, -1, -1, 0) if len(view.shape) == 1 else (-1, 0, -1, 1))
    tensor.data = adapter.address(weights)
    return tensor


def _empty_like(adapter: Adapter, x: Any, dtype: Any) -> Any:
    shape = tuple(x.shape)
    return adapter.empty(shape, dense_strides(shape, adapter.order(x)), dtype, x)


def _coded(adapter: Adapter, x: QTensor) -> _abi.Tensor:
    """The codes of x with their quantization."""
    how = quantization_of(x.coding)
    for part in ("scale", "zero_point", "mean"):
        if (values := getattr(x, part)) is not None:
            setattr(how, part, ctypes.pointer(_described(adapter, part, values)))
    tensor = _described(adapter, "codes", x.codes, x.layout)
    tensor.dtype = _abi.DTYPES[x.format]
    tensor.quantization = ctypes.pointer(how)
    return tensor


def quantize(
    x: Any,
    operand: Literal["q", "k", "v"],
    *,
    format: Literal["i8", "u8", "i4", "e4m3", "e5m2"] = "i8",
    granularity: Literal["tensor", "token", "channel", "block", "thread"] = "token",
    block: int = 0,
    zero_point: Literal["symmetric", "integer", "float"] = "symmetric",
    smooth: bool = False,
    hadamard_seed: int = 0,
    rope: Literal["none", "half", "interleaved"] = "none",
    rope_dim: int = 0,
    rope_offset: int = 0,
    rope_base: float = 0.0,
    norm: Literal["none", "rms"] = "none",
    norm_weight: Any | None = None,
    norm_eps: float = 0.0,
    statistics: bool = False,
    layout: Layout = "bhsd",
    **unknown: object,
) -> QTensor:
    """Codes and scales of x: codes = round(rotate(rope(norm(x)) - mean) / scale).

    Args:
        x: [batch, head, token, dim] of float64, float32, float16 or bfloat16, in `layout`; numpy, or torch on the CPU
            or a CUDA device, which give the same codes.
        operand: which operand of attention x is; granularities depend on it.
        format: of the codes. "i4" has a code per byte, which numpy and torch hold as int8.
        granularity: what shares a scale: a (batch, head), a token, a channel (v only), `block` tokens, or the tokens of
            one thread's fragments (q and k only).
        zero_point: "symmetric" for none; "integer" and "float" for i8 and u8. Symmetric u8 holds no negative numbers:
            they are rejected, and on a CUDA device come back as NaN.
        smooth: subtract the mean over tokens first.
        hadamard_seed: rotate each row by a random-sign Hadamard matrix; 0: do not.
        rope: rotary embedding of the first rope_dim channels (0: all), after a norm and before all else, at positions
            token + rope_offset, with base rope_base (0: 10000).
        norm: "rms" normalises each row before all else, in float32: x / sqrt(mean of x^2 + norm_eps) * norm_weight, as
            models with QK-norm do.
        norm_weight: [dim], or [heads, dim], of float32, float16 or bfloat16; None: 1. Of Gemma pass 1 + weight.
        norm_eps: 0 or more; with 0 a row of zeros becomes NaN.
        statistics: also measure the rounding error and the outliers of each (batch, head), which reads x several times.

    Returns:
        A QTensor on the device of x. Its codes are dense and lie in memory as x does.

    Raises:
        InvalidArgument: with the choices.
        TypeError: an unknown keyword.
    """
    expect_known(quantize, unknown)
    adapter = _adapter_of(x, norm_weight=norm_weight)
    look_up("format", format, _FORMATS)
    look_up("layout", layout, _LAYOUTS)
    coding = Coding(
        operand=look_up("operand", operand, _abi.OPERANDS),
        granularity=look_up("granularity", granularity, _abi.GRANULARITIES),
        zero_point_kind=look_up("zero_point", zero_point, _abi.ZERO_POINTS),
        block=count("block", block, "a number of tokens"),
        hadamard_seed=count("hadamard_seed", hadamard_seed, "1 to 2**64 - 1, or 0 for no rotation", most=2**64 - 1),
    )
    for name, value in (("smooth", smooth), ("statistics", statistics)):
        if not isinstance(value, bool):
            raise InvalidArgument(f"{name}: found {value!r}, allowed: False, True")
    embedding = struct(
        _abi.Rope,
        style=look_up("rope", rope, _abi.ROPE_STYLES),
        dim=count("rope_dim", rope_dim, "an even number of channels, or 0 for all"),
        offset=count("rope_offset", rope_offset, "-2**63 to 2**63 - 1", least=-(2**63)),
        base=number("rope_base", rope_base, "finite and at least 1e-300, or 0 for 10000"),
        norm=look_up("norm", norm, _abi.NORMS),
        norm_eps=number("norm_eps", norm_eps, "finite and 0 or more"),
    )
    if norm_weight is not None:
        embedding.norm_weight = ctypes.pointer(_weights(adapter, norm_weight))
    source = _described(adapter, "x", x, layout)
    batch, heads, tokens, dim = source.shape
    groups = ctypes.c_int64()
    check(lib.octet_scale_groups(coding.operand, coding.granularity, block, tokens, ctypes.byref(groups)))

    def parameter(*shape: int) -> Any:
        full = (batch, heads, *shape)
        return adapter.empty(full, contiguous_strides(full), adapter.dtype_of("f32"), x)

    scales = (1, dim) if granularity == "channel" else (groups.value, 1)
    out = QTensor(
        codes=_empty_like(adapter, x, adapter.dtype_of("i8" if format == "i4" else format)),
        scale=parameter(*scales),
        zero_point=None if zero_point == "symmetric" else parameter(*scales),
        mean=parameter(1, dim) if smooth else None,
        format=format,
        coding=coding,
        layout=layout,
        dtype=x.dtype,
        statistics=parameter(1, len(_abi.STATISTICS)) if statistics else None,
    )
    measured = _described(adapter, "statistics", out.statistics) if statistics else None
    check(lib.octet_quantize(source, embedding, _coded(adapter, out), measured, adapter.stream(x)))
    return out


def dequantize(x: QTensor, dtype: Any | None = None, **unknown: object) -> Any:
    """The numbers that the codes stand for: scale * codes, rotated back, plus mean. RoPE is not undone.

    Args:
        x: from `octet.quantize`.
        dtype: of the result, a float type of the framework; None: that of what was quantized.

    Returns:
        An array of the shape, layout and memory order of x.codes.

    Raises:
        InvalidArgument: with the choices.
        TypeError: an unknown keyword.
    """
    expect_known(dequantize, unknown)
    if not isinstance(x, QTensor):
        raise InvalidArgument(f"x: found {type(x).__name__}, allowed: octet.QTensor, which octet.quantize gives")
    adapter = _adapter_of(x)
    out = _empty_like(adapter, x.codes, x.dtype if dtype is None else dtype)
    check(lib.octet_dequantize(_coded(adapter, x), _described(adapter, "x", out, x.layout), adapter.stream(x.codes)))
    return out
