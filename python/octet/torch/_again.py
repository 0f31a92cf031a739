"""Eager passes run again by liboctet_dlpack.so without Python, torch's dispatcher or operators between: those cost the
host more than the kernel takes on short sequences (docs/torch.md).

The first call with tensors of some shapes, strides and types goes the ordinary way and is kept. Whatever listens to
torch's operators (modes, the profiler, torch.func, torch.compile, tracing, autocast that would cast, subclasses of
Tensor) gets the ordinary way too. Where a gradient may follow, a Function saves the same tensors as the ordinary one,
so that a checkpoint may go one way first and the other when it computes again.
"""

from collections.abc import Hashable
from typing import Any, Literal

import numpy as np
import torch
from torch.autograd import forward_ad

from octet import _api, _passes
from octet._options import AttentionOptions, Options, options_of
from octet._plan import Plan
from octet.torch import _autograd, _ops, _replay
from octet.torch._front import front

_tokens: dict[Hashable, int] = {}
_keywords: dict[int, AttentionOptions] = {}  # of each token whose call has been kept


class _Attention(torch.autograd.Function):
    """o of a kept forward pass, saving what _autograd._Attention saves."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, token: int) -> torch.Tensor:
        o, lse, r = _replay.training(token, q, k, v) or _ordinary_forward(token, q, k, v)
        ctx.save_for_backward(q, k, v, o, lse, r)
        ctx.token = token
        return o

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor) -> Any:
        saved = ctx.saved_tensors
        ordinary = torch.compiler.is_compiling() or forward_ad._current_level >= 0
        found = None if ordinary else _replay.backward(ctx.token, do, *saved)
        return found or _ordinary_backward(ctx.token, found is False, do, *saved)


_apply = super(torch.autograd.Function, _Attention).apply  # without a search for default arguments, and for torch.func


def _options(token: int, q: torch.Tensor) -> Options:
    return options_of(front.own_type(q), **_keywords[token])


def _ordinary_forward(token: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    options = _options(token, q)
    return _ops.forward(q, k, v, None, None, None, None, _passes.needs_residual(front, options, q), options)


def _ordinary_backward(token: int, may_be_kept: bool, *given: torch.Tensor) -> Any:
    options = _options(token, given[1])
    gradients = _autograd.gradients((*given, *[None] * 5), options)[:3]
    if may_be_kept:
        do, q, k, v, o, lse, r = given
        made = [torch.empty_like(x) for x in (q, k, v)]
        _keep("backward", token, options, given, made)
    return *gradients, None


_LASTING = bool, int, float, str, type(None), type, np.generic


def _lasts(value: Any) -> bool:
    """Returns whether `value` cannot change, so that what equals it now will equal it later. Tensors may be written."""
    return all(map(_lasts, value)) if isinstance(value, tuple) else isinstance(value, _LASTING)


def again(key: Hashable, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor | None | Literal[False]:
    """o, where a forward pass over such tensors has been kept under `key`; False: it may be; None: it may not."""
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return None
    try:
        token = _tokens.get(key)
    except TypeError:  # a list among the keywords, say
        return None
    if token is None:
        if not _lasts(key) or len(_tokens) >= _replay.MOST_TOKENS:
            return None
        token = _tokens.setdefault(key, next(_replay.numbers))
    o = _replay.again(token, q, k, v)
    return _apply(q, k, v, token) if o is True else o


def keep(
    key: Hashable, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, keywords: AttentionOptions
) -> None:
    """Keeps under `key` that `octet.attention` with these keywords gives tensors like o. lse is left out: who asks for
    it goes the ordinary way; so do head dims that are filled with zeros and an o that is not of q's type."""
    if q.shape[-1] % 8 or v.shape[-1] % 8 or o.dtype is not q.dtype:
        return
    token = _tokens[key]
    _keywords[token] = keywords
    options = _options(token, q)
    if not o.requires_grad:
        _keep("forward", token, options, (q, k, v), [o])
        return
    made = [torch.empty_like(q)]
    for _, shape, dtype, _ in _passes.results(front, "forward", options, q, k, v)[1:]:
        made.append(torch.empty(shape, dtype=dtype, device=q.device))
    residual = _passes.needs_residual(front, options, q)
    made.append(torch.empty_like(q) if residual else q.new_empty(0))
    _keep("training", token, options, (q, k, v), made)


_NAMES = {
    "forward": ("q", "k", "v", "o"),
    "training": ("q", "k", "v", "o", "lse", "o_residual"),
    "backward": ("do_", "q", "k", "v", "o", "lse", "o_residual", "dq", "dk", "dv"),
}


def _keep(kind: str, token: int, options: Options, inputs: tuple[torch.Tensor, ...], made: list[torch.Tensor]) -> None:
    """Keeps a pass over tensors like `inputs`, which makes tensors like `made`."""
    q = inputs[1] if kind == "backward" else inputs[0]
    given = {name: x for name, x in zip(_NAMES[kind], (*inputs, *made), strict=True) if x.shape != (0,)}
    operands = [(name, front.view(name, x), None) for name, x in given.items()]
    plan = Plan("backward" if kind == "backward" else "forward", front.resolve(options, q), operands)
    size = plan.at([x.data_ptr() for x in given.values()]).workspace_size()
    _replay.keep(kind, token, inputs, tuple(made), plan, size)


def attention(q: Any, k: Any, v: Any, keywords: AttentionOptions) -> torch.Tensor:
    """`octet.attention` without a mask and without lse."""
    key = (*keywords.items(), *map(type, keywords.values())) if keywords else ()
    o = again(key, q, k, v)
    if o is None or o is False:
        made, _ = _api.forward(q, k, v, None, keywords)
        if o is False:
            keep(key, q, k, v, made, keywords)
        return made
    return o


_api.shortcuts[torch.Tensor] = attention
