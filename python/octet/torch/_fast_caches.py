"""The fast path of KV caches: eager calls that came before with such arguments and tensors go to their plans at once,
which costs the host a third of reading the arguments again (docs/torch.md).

The same listeners as those of _fast_path.py, autocast and gradients get the ordinary way.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.autograd import forward_ad

from octet import _appending, _plan
from octet._appending import Rope
from octet._operands import BY_HEAD, Operands
from octet._options import Options
from octet._qtensor import QTensor
from octet.torch import _passes
from octet.torch._adapter import adapter
from octet.torch._fast_path import lasts

_options: dict[Hashable, Options] = {}  # of the arguments of calls that have been valid
_ropes: dict[Hashable, tuple[Rope, str]] = {}


def _has_no_listener(tensors: list[Any]) -> bool:
    if not all([isinstance(x, torch.Tensor) for x in tensors]):  # the ordinary way rejects others
        return False
    if forward_ad._current_level >= 0 or torch._C._is_any_autocast_enabled():
        return False
    if torch.is_grad_enabled() and any([x.requires_grad for x in tensors]):
        return False
    return _passes.nobody_listens(*tensors)


def _remember(found: dict, how: tuple, type_of_q: Hashable, value: Any) -> None:
    if len(found) < _passes.MOST_TOKENS and lasts(how):
        found[how, type_of_q] = value


def _get(found: dict, how: tuple, type_of_q: Hashable) -> Any:
    try:
        return found.get((how, type_of_q))
    except TypeError:  # a list among the keywords, say
        return None


def _type_of(q: Any) -> Hashable:
    """On which the options of a call depend."""
    return (q.dtype, q.format) if type(q) is QTensor else q.dtype


def attention(how: tuple, operands: Operands) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(o, lse) of a call that came before with the arguments `how` and with such tensors; None: it has to go the
    ordinary way."""
    q = operands.get("q")
    options = _get(_options, how, _type_of(q)) if isinstance(q, (torch.Tensor, QTensor)) else None
    if options is None:
        return None
    tensors: list[Any] = []
    for name, x in operands.items():
        if type(x) is QTensor:
            tensors += (x.codes, x.scale)
        elif name in BY_HEAD and getattr(x, "dtype", None) is not torch.float32:
            return None
        else:
            tensors.append(x)
    if not _has_no_listener(tensors):
        return None
    call = _plan.known(adapter, "forward", options, operands)
    if call is None:
        return None
    o, lse = call(operands)
    return o, lse


def remember_attention(how: tuple, operands: Operands, options: Options) -> None:
    """Remembers valid arguments."""
    _remember(_options, how, _type_of(operands["q"]), options)


def append(how: tuple, operands: Operands) -> Callable[[Operands], Any] | None:
    """The call of octet.append that came before with such arguments and tensors, or None."""
    found = _get(_ropes, how, None)
    if found is None or not _has_no_listener(list(operands.values())):
        return None
    return _appending.known(adapter, operands, *found)[1]


def remember_append(how: tuple, rope: Rope, layout: str) -> None:
    """Remembers valid arguments."""
    _remember(_ropes, how, None, (rope, layout))
