"""octet.append as an operator of torch, octet::append, which writes into its first arguments."""

from typing import Any

import torch

from octet import _appending
from octet._appending import Rope
from octet._operands import Operands, operands_of
from octet._options import expect_constant
from octet.torch import _passes
from octet.torch._adapter import adapter, expect_device

_SCHEMA = (
    "append(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!)? k_scale, Tensor(d!)? v_scale, Tensor k, Tensor v, "
    "Tensor seqused_k, Tensor? cu_seqlens, Tensor? block_table, Tensor? rope_cos, Tensor? rope_sin, Tensor? q, "
    "str rope, str layout) -> Tensor"
)
_NAMES = (
    "k_cache", "v_cache", "k_scale", "v_scale", "k", "v", "seqused_k", "cu_seqlens", "block_table", "rope_cos",
    "rope_sin", "q"
)  # fmt: skip

_library = torch.library.Library("octet", "FRAGMENT")
_library.define(_SCHEMA, tags=torch.Tag.pt2_compliant_tag)


def _text_of(rope: Rope) -> str:
    return f"{rope.style} {rope.dim} {rope.offset} {rope.base!r}"


def _append(*args: Any) -> torch.Tensor:
    """The operator; an empty tensor stands for a q that there is not."""
    *tensors, text, layout = args
    style, dim, offset, base = text.split(" ")
    operands = operands_of(**dict(zip(_NAMES, tensors, strict=True)))
    turned = _appending.run(adapter, operands, Rope(style, int(dim), int(offset), float(base)), layout)
    return operands["k"].new_empty(0) if turned is None else turned


def _fake(*args: Any) -> torch.Tensor:
    k, q = (args[_NAMES.index(name)] for name in "kq")
    if q is None:
        return k.new_empty(0)
    return torch.empty_permuted(tuple(q.shape), adapter.order(q), dtype=q.dtype, device=q.device)


for _key in ("CPU", "CUDA"):
    _library.impl("append", _append, _key)
torch.library.register_fake("octet::append", _fake, lib=_library)


def run_append(operands: Operands, rope: Rope, layout: str) -> torch.Tensor | None:
    """See `octet.append`."""
    for name, x in operands.items():
        expect_device(name, x, operands["k_cache"].device, "k_cache")
        if x.is_floating_point():
            expect_constant(name, x)
    if _passes.nobody_listens(*operands.values()):
        return _appending.run(adapter, operands, rope, layout)
    turned = torch.ops.octet.append(*[operands.get(name) for name in _NAMES], _text_of(rope), layout)
    return turned if "q" in operands else None
