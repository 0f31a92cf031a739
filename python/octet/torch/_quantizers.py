"""octet.quantize and octet.dequantize as operators of torch, so that they compile.

Parts that a QTensor does not have are tensors without elements to an operator, which returns as many tensors whatever
it was asked for.
"""

from typing import Any

import torch

from octet import _quantizing
from octet._qtensor import Coding, QTensor
from octet._quantizing import Choices, Parts
from octet.errors import InvalidArgument
from octet.torch import _passes
from octet.torch._adapter import adapter, is_dtensor

_library = torch.library.Library("octet", "FRAGMENT")
_library.define(
    "quantize(Tensor x, Tensor? norm_weight, str operand, str format, str granularity, int block, str zero_point, "
    "bool smooth, int hadamard_seed, str rope, int rope_dim, SymInt rope_offset, float rope_base, str norm, "
    "float norm_eps, bool statistics, str layout) "
    "-> (Tensor codes, Tensor scale, Tensor zero_point, Tensor mean, Tensor statistics)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    "dequantize(Tensor codes, Tensor scale, Tensor? zero_point, Tensor? mean, str format, int operand, "
    "int granularity, int zero_point_kind, int block, int hadamard_seed, str layout, ScalarType dtype) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
_SEEDS = 2**64  # a seed has 64 bits, as integers of torch have, whose first one is a sign


def _signed(seed: int) -> int:
    return seed - _SEEDS if seed >= _SEEDS // 2 else seed


def _choices(words: tuple) -> Choices:
    choices = Choices(*words)
    return choices._replace(hadamard_seed=choices.hadamard_seed % _SEEDS)


def _groups(choices: Choices, tokens: int) -> int:
    """What octet_scale_groups says, of a number of tokens that may be unknown while a program is compiled."""
    up = lambda parts: (tokens + parts - 1) // parts
    if choices.granularity == "thread":
        return 8 * up(32) if choices.operand == "q" else 4 * up(64)
    if choices.granularity == "block":
        return up(max(choices.block, 1))
    return tokens if choices.granularity == "token" else 1


def _quantize_impl(x: torch.Tensor, norm_weight: torch.Tensor | None, *words: Any) -> tuple:
    found = _quantizing.run(adapter, x, norm_weight, _choices(words))
    return tuple([x.new_empty(0, dtype=torch.float32) if part is None else part for part in found])


def _like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_permuted(tuple(x.shape), adapter.order(x), dtype=dtype, device=x.device)


def _quantize_fake(x: torch.Tensor, norm_weight: torch.Tensor | None, *words: Any) -> tuple:
    choices = _choices(words)
    if x.dim() != 4:
        raise InvalidArgument(f"x: shape {list(x.shape)}, expected 4 dimensions, layout {choices.layout!r}")
    groups = _groups(choices, x.shape[2 if choices.layout == "bhsd" else 1])
    _, *others = _quantizing.shapes_of(choices, tuple(x.shape), groups)
    f32 = [x.new_empty((0,) if shape is None else shape, dtype=torch.float32) for shape in others]
    return _like(x, adapter.dtype_of(choices.codes_dtype())), *f32


def _dequantize_impl(codes: Any, scale: Any, zero_point: Any, mean: Any, format: str, *words: Any) -> torch.Tensor:
    operand, granularity, kind, block, seed, layout, dtype = words
    coding = Coding(operand, granularity, kind, block, seed % _SEEDS)
    x = QTensor(codes, scale, zero_point, mean, format=format, coding=coding, layout=layout, dtype=dtype)
    return _quantizing.run_back(adapter, x, dtype)


def _dequantize_fake(codes: torch.Tensor, *others: Any) -> torch.Tensor:
    return _like(codes, others[-1])


for _name, _function, _fake in (
    ("quantize", _quantize_impl, _quantize_fake),
    ("dequantize", _dequantize_impl, _dequantize_fake),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _function, _key)
    torch.library.register_fake(f"octet::{_name}", _fake, lib=_library)


def _runs_here(tensors: list) -> bool:
    """Whether no operator is needed; DTensors have none, and are rejected."""
    if _passes.nobody_listens(*tensors):
        return True
    return not torch.compiler.is_compiling() and any(is_dtensor(x) for x in tensors)


def run_quantize(x: torch.Tensor, norm_weight: torch.Tensor | None, choices: Choices) -> Parts:
    """See `octet.quantize`."""
    tensors = [x] if norm_weight is None else [x, norm_weight]
    if _runs_here(tensors):
        return _quantizing.run(adapter, x, norm_weight, choices)
    words = choices._replace(hadamard_seed=_signed(choices.hadamard_seed))
    codes, scale, zero_point, mean, statistics = torch.ops.octet.quantize(x, norm_weight, *words)
    return Parts(
        codes,
        scale,
        None if choices.zero_point == "symmetric" else zero_point,
        mean if choices.smooth else None,
        statistics if choices.statistics else None,
    )


def run_dequantize(x: QTensor, dtype: torch.dtype) -> torch.Tensor:
    """See `octet.dequantize`."""
    tensors = [part for part in (x.codes, x.scale, x.zero_point, x.mean) if part is not None]
    if _runs_here(tensors):
        return _quantizing.run_back(adapter, x, dtype)
    operand, granularity, kind, block, seed = x.coding
    words = x.format, operand, granularity, kind, block, _signed(seed), x.layout, dtype
    return torch.ops.octet.dequantize(x.codes, x.scale, x.zero_point, x.mean, *words)
