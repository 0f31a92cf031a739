"""octet.quantize and octet.dequantize: arrays to 8-bit codes and back (docs/quantizers.md)."""

from typing import Any, Literal

from octet import _abi, _api
from octet._options import Layout, count, expect_constant, look_up, number
from octet._qtensor import QTensor
from octet._quantizing import Choices
from octet._rejections import expect_known
from octet.errors import InvalidArgument

_FORMATS = {name: _abi.DTYPES[name] for name in ("i8", "u8", "i4", "e4m3", "e5m2")}
_LAYOUTS = {"bhsd": 0, "bshd": 1}


def _framework_of(x: Any, **others: Any) -> Any:
    given = {"x": x} | {name: y for name, y in others.items() if y is not None}
    framework = _api.framework_of(given)
    if framework.__name__ == "octet.torch" and not isinstance(x, QTensor):
        for name, y in given.items():
            expect_constant(name, y)
    return framework


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
        x: [batch, head, token, dim] of float64, float32, float16 or bfloat16, in `layout`; numpy, torch or
            jax, on the CPU or a CUDA device, which give the same codes.
        operand: which operand of attention x is; granularities depend on it.
        format: of the codes. "i4" has a code per byte, which arrays hold as int8.
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
        Unsupported: a derivative of jax arrays; octet has none.
        TypeError: an unknown keyword.
    """
    expect_known(quantize, unknown)
    framework = _framework_of(x, norm_weight=norm_weight)
    for name, value in (("smooth", smooth), ("statistics", statistics)):
        if not isinstance(value, bool):
            raise InvalidArgument(f"{name}: found {value!r}, allowed: False, True")
    for what, found, allowed in (
        ("format", format, _FORMATS),
        ("operand", operand, _abi.OPERANDS),
        ("granularity", granularity, _abi.GRANULARITIES),
        ("zero_point", zero_point, _abi.ZERO_POINTS),
        ("rope", rope, _abi.ROPE_STYLES),
        ("norm", norm, _abi.NORMS),
        ("layout", layout, _LAYOUTS),
    ):
        look_up(what, found, allowed)
    choices = Choices(
        operand=operand,
        format=format,
        granularity=granularity,
        block=count("block", block, "a number of tokens"),
        zero_point=zero_point,
        smooth=smooth,
        hadamard_seed=count("hadamard_seed", hadamard_seed, "1 to 2**64 - 1, or 0 for no rotation", most=2**64 - 1),
        rope=rope,
        rope_dim=count("rope_dim", rope_dim, "an even number of channels, or 0 for all"),
        rope_offset=count("rope_offset", rope_offset, "-2**63 to 2**63 - 1", least=-(2**63)),
        rope_base=number("rope_base", rope_base, "finite and at least 1e-300, or 0 for 10000"),
        norm=norm,
        norm_eps=number("norm_eps", norm_eps, "finite and 0 or more"),
        statistics=statistics,
        layout=layout,
    )
    parts = framework.run_quantize(x, norm_weight, choices)
    return QTensor(**parts._asdict(), format=format, coding=choices.coding(), layout=layout, dtype=x.dtype)


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
    return _framework_of(x).run_dequantize(x, x.dtype if dtype is None else dtype)
