"""Attention of QTensors as an operator of torch, octet::forward_coded, so that it compiles.

Its arguments are the tensors that the operands consist of, and a text that says of which each is and how codes stand
for numbers. Saved programs hold to both, as those of _ops.py do.
"""

import operator
from typing import Any

import torch

from octet import _plan
from octet._operands import Operands
from octet._options import Options
from octet._qtensor import Coding, QTensor
from octet._results import results
from octet.torch import _passes
from octet.torch._adapter import adapter
from octet.torch._text import options_from, text_of

_PARTS = ("codes", "scale", "zero_point", "mean")

_library = torch.library.Library("octet", "FRAGMENT")
_library.define(
    "forward_coded(Tensor[] tensors, str names, str options, SymInt max_seqlen_q=0, SymInt max_seqlen_k=0) "
    "-> (Tensor o, Tensor lse)",
    tags=torch.Tag.pt2_compliant_tag,
)


def _taken_apart(operands: Operands) -> tuple[list[torch.Tensor], str]:
    """The tensors, and their names: "q k.codes k.scale k=1,1,0,0,0,i8,bshd,float32"."""
    tensors: list[torch.Tensor] = []
    words = []
    for name, x in operands.items():
        if not isinstance(x, QTensor):
            tensors.append(x)
            words.append(name)
            continue
        for part in _PARTS:
            if getattr(x, part) is not None:
                tensors.append(getattr(x, part))
                words.append(f"{name}.{part}")
        numbers = [str(operator.index(n)) for n in x.coding]
        words.append(f"{name}={','.join([*numbers, x.format, x.layout, str(x.dtype).removeprefix('torch.')])}")
    return tensors, " ".join(words)


def _put_together(tensors: list[torch.Tensor], text: str) -> Operands:
    operands: Operands = {}
    parts: dict[str, Any] = {}
    left = iter(tensors)
    for word in text.split(" "):
        name, is_coding, how = word.partition("=")
        if not is_coding:
            found, _, part = name.partition(".")
            if part:
                parts[part] = next(left)
            else:
                operands[found] = next(left)
            continue
        *numbers, format, layout, dtype = how.split(",")
        given = {part: parts.pop(part, None) for part in _PARTS}
        coding = Coding(*map(int, numbers))
        operands[name] = QTensor(**given, format=format, coding=coding, layout=layout, dtype=getattr(torch, dtype))
    return operands


def _forward(tensors: list, names: str, text: str, max_seqlen_q: int = 0, max_seqlen_k: int = 0) -> tuple:
    options = options_from(text)._replace(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    o, lse, *_ = _plan.run(adapter, "forward", options, _put_together(tensors, names))
    return o, lse


def _fake(tensors: list, names: str, text: str, max_seqlen_q: int = 0, max_seqlen_k: int = 0) -> tuple:
    asked = results(adapter, "forward", options_from(text), _put_together(tensors, names), False)
    o, lse, *_ = [torch.empty_permuted(x.shape, x.order, dtype=x.dtype, device=tensors[0].device) for x in asked]
    return o, lse


for _key in ("CPU", "CUDA"):
    _library.impl("forward_coded", _forward, _key)
torch.library.register_fake("octet::forward_coded", _fake, lib=_library)


def run(options: Options, operands: Operands) -> Any:
    """(o, lse) of operands of which some are QTensors."""
    tensors, names = _taken_apart(operands)
    if _passes.nobody_listens(*tensors):
        return _plan.run(adapter, "forward", options, operands)
    bounds = options.max_seqlen_q, options.max_seqlen_k
    text = text_of(options._replace(max_seqlen_q=0, max_seqlen_k=0))
    return torch.ops.octet.forward_coded(tensors, names, text, *bounds)
