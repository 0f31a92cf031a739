"""The fast path: eager passes that run from C, without Python, torch's dispatcher or operators between. Those cost the
host more than the kernel takes on short sequences (docs/torch.md).

The first call with tensors of some shapes, strides and types runs by its plan, which is kept. Whatever listens to
torch's operators (modes, the profiler, torch.func, torch.compile, tracing, autocast that would cast, subclasses of
Tensor) gets the ordinary way. Where a gradient may follow, a Function saves the same tensors as the ordinary one, so
that a checkpoint may go one way first and the other when it computes again.
"""

from collections.abc import Hashable
from typing import Any, Literal

import numpy as np
import torch
from torch.autograd import forward_ad

from octet import _plan
from octet._operands import INPUTS, RESULTS, Operands, expect_meant
from octet._options import AttentionOptions, Options, options_of
from octet._results import needs_residual, own_type, results
from octet.torch import _attention, _passes
from octet.torch._adapter import adapter, expect_backward, expect_device

_keywords: dict[int, AttentionOptions] = {}  # of each token whose call has been valid


class _Attention(torch.autograd.Function):
    """o of a forward pass from C, saving what _attention._Attention saves."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, token: int) -> torch.Tensor:
        o, lse, r = _passes.fast_training(token, q, k, v) or _planned_forward(token, q, k, v)
        ctx.save_for_backward(q, k, v, o, lse, r)
        ctx.token = token
        return o

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor) -> Any:
        saved = ctx.saved_tensors
        ordinary = torch.compiler.is_compiling() or forward_ad._current_level >= 0
        found = None if ordinary else _passes.fast_backward(ctx.token, do, *saved)
        return found or _ordinary_backward(ctx.token, found is False, do, *saved)


_apply = super(torch.autograd.Function, _Attention).apply  # without a search for default arguments, and for torch.func


def _options(token: int, q: torch.Tensor) -> Options:
    return options_of(own_type(adapter, q), **_keywords[token])


def _run_and_keep(kind: str, token: int, options: Options, operands: Operands, made: tuple[torch.Tensor, ...]) -> None:
    """Runs a pass into `made`, tensors as C makes them; an empty one stands for an o_residual that there is not."""
    there, into = ({name: x for name, x in operands.items() if x.shape != (0,)}, [x for x in made if x.shape != (0,)])
    name = "backward" if kind == "backward" else "forward"
    call, _ = _plan.find(adapter, name, options, there, len(into) == len(RESULTS["forward"]), into)
    call(there, into)
    _passes.keep(kind, token, tuple(operands.values()), made, call.plan)


def _planned_forward(token: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    options, operands = _options(token, q), {"q": q, "k": k, "v": v}
    _, lse, *r = results(adapter, "forward", options, operands, needs_residual(adapter, options, q))
    made = (
        torch.empty_like(q),
        torch.empty(lse.shape, dtype=lse.dtype, device=q.device),
        torch.empty_like(q, dtype=r[0].dtype) if r else q.new_empty(0),
    )
    _run_and_keep("training", token, options, operands, made)
    return made


def _ordinary_backward(token: int, may_be_kept: bool, *given: torch.Tensor) -> Any:
    options, operands = _options(token, given[1]), dict(zip(INPUTS["backward"], given, strict=False))
    if not may_be_kept:
        return *_attention.gradients(operands, options)[:3], None
    made = tuple([torch.empty_like(operands[name]) for name in ("q", "k", "v")])
    _run_and_keep("backward", token, options, operands, made)
    return *made, None


_LASTING = bool, int, float, str, type(None), type, np.generic


def _lasts(value: Any) -> bool:
    """Returns whether `value` cannot change, so that what equals it now will equal it later. Tensors may be written."""
    return all(map(_lasts, value)) if isinstance(value, tuple) else isinstance(value, _LASTING)


def find(key: Hashable, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor | None | Literal[False]:
    """o, where a forward pass over such tensors has been kept under `key`; False: it may be, by `first`; None: it may
    not."""
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return None
    try:
        token = _passes.tokens.get(key)
    except TypeError:  # a list among the keywords, say
        return None
    if token is None:
        token = _passes.token_of(key) if _lasts(key) else None
        if token is None:
            return None
    o = _passes.fast_forward(token, q, k, v)
    return _apply(q, k, v, token) if o is True else o


def first(
    key: Hashable, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keywords: AttentionOptions
) -> torch.Tensor | None:
    """o of `octet.attention` with these keywords, whose pass is kept under `key`, after `find` gave False; None where
    it cannot be: an o that is not of q's type."""
    options = options_of(own_type(adapter, q), **keywords)
    operands = {"q": q, "k": k, "v": v}
    if results(adapter, "forward", options, operands)[0].dtype is not q.dtype:
        return None
    expect_device("k", k, q.device)
    expect_device("v", v, q.device)
    expect_meant(adapter, operands, keywords)
    token = _passes.tokens[key]
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        expect_backward(options, operands)
        _keywords[token] = keywords
        return _apply(q, k, v, token)
    o = torch.empty_like(q)
    _run_and_keep("forward", token, options, operands, (o,))
    _keywords[token] = keywords
    return o


def attention(q: Any, k: Any, v: Any, keywords: AttentionOptions) -> torch.Tensor | None:
    """`octet.attention` without a mask and without lse; None: the call has to go the ordinary way."""
    key = (*keywords.items(), *map(type, keywords.values())) if keywords else ()
    o = find(key, q, k, v)
    return first(key, q, k, v, keywords) if o is False else o
