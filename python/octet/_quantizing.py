"""octet_quantize and octet_dequantize over arrays of any framework that have memory."""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

from octet import _abi
from octet._adapters import Adapter, Describer
from octet._descriptors import quantization_of, struct, tensor_of
from octet._library import check, lib
from octet._options import LAYOUTS
from octet._qtensor import Coding, QTensor
from octet._views import contiguous_strides, dense_strides
from octet.errors import InvalidArgument


class Choices(NamedTuple):
    """What `quantize` was asked for beside its arrays, in the words of its caller."""

    operand: str
    format: str
    granularity: str
    block: int
    zero_point: str
    smooth: bool
    hadamard_seed: int
    rope: str
    rope_dim: int
    rope_offset: int
    rope_base: float
    norm: str
    norm_eps: float
    statistics: bool
    layout: str

    def coding(self) -> Coding:
        """The same as numbers of the library."""
        return Coding(
            operand=_abi.OPERANDS[self.operand],
            granularity=_abi.GRANULARITIES[self.granularity],
            zero_point_kind=_abi.ZERO_POINTS[self.zero_point],
            block=self.block,
            hadamard_seed=self.hadamard_seed,
        )

    def codes_dtype(self) -> str:
        """The name of the type in which arrays hold the codes."""
        return "i8" if self.format == "i4" else self.format


class Parts(NamedTuple):
    """The arrays of a QTensor."""

    codes: Any
    scale: Any
    zero_point: Any | None
    mean: Any | None
    statistics: Any | None


def shapes_of(choices: Choices, shape: Sequence[int], groups: int) -> Parts:
    """The shapes of all parts for an x of this shape, whose tokens have so many scales; None: there is no such part."""
    batch, first, second, dim = shape
    heads = first if choices.layout == "bhsd" else second
    scales = (batch, heads, *((1, dim) if choices.granularity == "channel" else (groups, 1)))
    return Parts(
        codes=tuple(shape),
        scale=scales,
        zero_point=None if choices.zero_point == "symmetric" else scales,
        mean=(batch, heads, 1, dim) if choices.smooth else None,
        statistics=(batch, heads, 1, len(_abi.STATISTICS)) if choices.statistics else None,
    )


def _described(adapter: Describer, name: str, array: Any, layout: str = "bhsd") -> _abi.Tensor:
    view = adapter.view(name, array)
    if len(view.shape) != 4:
        raise InvalidArgument(f"{name}: shape {list(view.shape)}, expected 4 dimensions, layout {layout!r}")
    tensor = tensor_of(view, LAYOUTS[layout])
    tensor.data = adapter.address(array)
    return tensor


def _weights(adapter: Describer, weights: Any) -> _abi.Tensor:
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


def _coded(adapter: Describer, x: QTensor) -> _abi.Tensor:
    """The codes of x with their quantization."""
    how = quantization_of(x.coding)
    for part in ("scale", "zero_point", "mean"):
        if (values := getattr(x, part)) is not None:
            setattr(how, part, ctypes.pointer(_described(adapter, part, values)))
    tensor = _described(adapter, "codes", x.codes, x.layout)
    tensor.dtype = _abi.DTYPES[x.format]
    tensor.quantization = ctypes.pointer(how)
    return tensor


def groups_of(choices: Choices, tokens: int) -> int:
    """How many scales so many tokens of a (batch, head) have."""
    coding, groups = choices.coding(), ctypes.c_int64()
    check(lib.octet_scale_groups(coding.operand, coding.granularity, coding.block, tokens, ctypes.byref(groups)))
    return groups.value


def arguments_of(
    adapter: Describer, x: Any, norm_weight: Any | None, parts: Parts, choices: Choices
) -> tuple[_abi.Tensor, _abi.Rope, _abi.Tensor, _abi.Tensor | None]:
    """Those of octet_quantize, but for the stream."""
    embedding = struct(
        _abi.Rope,
        style=_abi.ROPE_STYLES[choices.rope],
        dim=choices.rope_dim,
        offset=choices.rope_offset,
        base=choices.rope_base,
        norm=_abi.NORMS[choices.norm],
        norm_eps=choices.norm_eps,
    )
    if norm_weight is not None:
        embedding.norm_weight = ctypes.pointer(_weights(adapter, norm_weight))
    out = QTensor(
        **parts._asdict(), format=choices.format, coding=choices.coding(), layout=choices.layout, dtype=x.dtype
    )
    measured = None if parts.statistics is None else _described(adapter, "statistics", parts.statistics)
    return _described(adapter, "x", x, choices.layout), embedding, _coded(adapter, out), measured


def arguments_back(adapter: Describer, x: QTensor, out: Any) -> tuple[_abi.Tensor, _abi.Tensor]:
    """Those of octet_dequantize, but for the stream."""
    return _coded(adapter, x), _described(adapter, "x", out, x.layout)


def run(adapter: Adapter, x: Any, norm_weight: Any | None, choices: Choices) -> Parts:
    """Quantizes arrays that have memory."""
    groups = groups_of(choices, _described(adapter, "x", x, choices.layout).shape[2])
    _, *others = shapes_of(choices, tuple(x.shape), groups)
    f32 = adapter.dtype_of("f32")
    parts = Parts(
        _empty_like(adapter, x, adapter.dtype_of(choices.codes_dtype())),
        *[None if shape is None else adapter.empty(shape, contiguous_strides(shape), f32, x) for shape in others],
    )
    check(lib.octet_quantize(*arguments_of(adapter, x, norm_weight, parts, choices), adapter.stream(x)))
    return parts


def run_back(adapter: Adapter, x: QTensor, dtype: Any) -> Any:
    """Dequantizes arrays that have memory."""
    out = _empty_like(adapter, x.codes, dtype)
    check(lib.octet_dequantize(*arguments_back(adapter, x, out), adapter.stream(x.codes)))
    return out
