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
from octet._operands import INPUTS, RESULTS, Operands, expect_meant, with_gradient
from octet._options import AttentionOptions, Options, options_of
from octet._results import by_head, needs_residual, own_type, results
from octet.torch import _attention, _passes
from octet.torch._adapter import adapter, expect_backward, expect_device

# The keywords of each token whose call has been valid, and which operands it has beside q, k and v.
_calls: dict[int, tuple[AttentionOptions, tuple[str, ...]]] = {}


class _Attention(torch.autograd.Function):
    """o of a forward pass from C, saving what _attention._Attention saves."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, token: int, *more: torch.Tensor
    ) -> torch.Tensor:
        o, lse, r = _passes.fast_training(token, q, k, v, *more) or _planned_forward(token, q, k, v, *more)
        ctx.save_for_backward(q, k, v, o, lse, r, *more)
        ctx.token = token
        return o

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor) -> Any:
        saved = ctx.saved_tensors
        ordinary = torch.compiler.is_compiling() or forward_ad._current_level >= 0
        found = None if ordinary else _passes.fast_backward(ctx.token, do, *saved)
        return found or _ordinary_backward(ctx.token, found is False, do, *saved)


_apply = super(torch.autograd.Function, _Attention).apply  # without a search for default arguments, and for torch.func


def _call(kind: str, token: int, tensors: tuple[torch.Tensor, ...]) -> tuple[Options, Operands]:
    """The options of a token, and the operands of a pass by their names."""
    keywords, more = _calls[token]
    first = INPUTS[kind][: len(tensors) - len(more)]
    operands = dict(zip((*first, *more), tensors, strict=True))
    return options_of(own_type(adapter, operands["q"]), **keywords), operands


def _run_and_keep(kind: str, token: int, options: Options, operands: Operands, made: tuple[torch.Tensor, ...]) -> None:
    """Runs a pass into `made`, tensors as C makes them; an empty one stands for an o_residual that there is not."""
    there, into = ({name: x for name, x in operands.items() if x.shape != (0,)}, [x for x in made if x.shape != (0,)])
    name = "backward" if kind == "backward" else "forward"
    extra = name == "forward" and len(into) == len(RESULTS["forward"])
    call, _ = _plan.find(adapter, name, options, there, extra, into)
    call(there, into)
    more = [x for x in operands if x in _passes.MORE]
    _passes.keep(kind, token, tuple(operands.values()), made, call.plan, more)


def _planned_forward(token: int, *tensors: torch.Tensor) -> Any:
    options, operands = _call("forward", token, tensors)
    q = operands["q"]
    _, lse, *r = results(adapter, "forward", options, operands, needs_residual(adapter, options, q))
    made = (
        torch.empty_like(q),
        torch.empty(lse.shape, dtype=lse.dtype, device=q.device),
        torch.empty_like(q, dtype=r[0].dtype) if r else q.new_empty(0),
    )
    _run_and_keep("training", token, options, operands, made)
    return made


def _ordinary_backward(token: int, may_be_kept: bool, *given: torch.Tensor) -> Any:
    options, operands = _call("backward", token, given)
    names = with_gradient(operands, False)
    if may_be_kept:
        found = tuple([torch.empty_like(operands[name]) for name in names])
        _run_and_keep("backward", token, options, operands, found)
    else:
        found = _attention.gradients(operands, options)[: len(names)]
    made = dict(zip(names, found, strict=True))
    return made["q"], made["k"], made["v"], None, *map(made.get, _calls[token][1])


_LASTING = bool, int, float, str, type(None), type, np.generic


def lasts(value: Any) -> bool:
    """Returns whether `value` cannot change, so that what equals it now will equal it later. Tensors may be written."""
    return all(map(lasts, value)) if isinstance(value, tuple) else isinstance(value, _LASTING)


def find(
    key: Hashable, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: Any
) -> torch.Tensor | None | Literal[False]:
    """o, where a forward pass over such tensors has been kept under `key`, which says what `more` are; False: it may
    be, by `first`; None: it may not."""
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return None
    try:
        token = _passes.tokens.get(key)
    except TypeError:  # a list among the keywords, say
        return None
    if token is None:
        token = _passes.token_of(key) if lasts(key) else None
        if token is None:
            return None
    o = _passes.fast_forward(token, q, k, v, *more)
    return _apply(q, k, v, token, *more) if o is True else o


def first(
    key: Hashable, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keywords: AttentionOptions, more: Operands
) -> torch.Tensor | None:
    """o of `octet.attention` with these keywords and more operands, whose pass is kept under `key`, after `find` gave
    False; None where it cannot be: an o that is not of q's type, operands that are cast or require a gradient that C
    does not compute."""
    options = options_of(own_type(adapter, q), **keywords)
    operands = {"q": q, "k": k, "v": v, **more}
    if results(adapter, "forward", options, operands)[0].dtype is not q.dtype:
        return None
    for name, x in operands.items():
        expect_device(name, x, q.device)
    training = torch.is_grad_enabled() and any([x.requires_grad for x in operands.values()])
    if training and any([x.requires_grad for name, x in more.items() if name != "sinks"]):
        return None
    prepared = by_head(adapter, options, operands)
    if any([prepared[name] is not x for name, x in more.items()]):
        return None
    expect_meant(adapter, operands, keywords)
    token = _passes.tokens[key]
    if training:
        expect_backward(options, operands)
        _calls[token] = keywords, tuple(more)
        return _apply(q, k, v, token, *more.values())
    o = torch.empty_like(q)
    _run_and_keep("forward", token, options, operands, (o,))
    _calls[token] = keywords, tuple(more)
    return o


def attention(q: Any, k: Any, v: Any, keywords: AttentionOptions, more: Operands) -> torch.Tensor | None:
    """`octet.attention` without lse, `more`: its operands beside q, k and v; None: the call has to go the ordinary
    way."""
    key = (*keywords.items(), *map(type, keywords.values()), *more) if keywords or more else ()
    o = find(key, q, k, v, *more.values())
    return first(key, q, k, v, keywords, more) if o is False else o
