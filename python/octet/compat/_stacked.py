"""Attention of tensors that stack q, k, v or k, v, whose gradient is one tensor too: the backward pass writes into it,
and nothing is stacked afterwards. Views, as `unbind` makes them, do the same but for those copies, and more: they serve
torch.compile, torch.func, autocast, forward mode, head dims that are filled, and modes that see torch's operators.
"""

import types
from typing import Any

import torch
from torch.autograd import forward_ad

from octet import _api, _plan
from octet._options import Options, options_of
from octet._plan import own_type
from octet.torch import _attention, _passes
from octet.torch._adapter import adapter, expect_backward

# A tensor of the vmap behind is_grads_batched, which no other test sees.
_is_batched = torch._C._functorch.is_legacy_batchedtensor


def _parts(stacked: torch.Tensor, q: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """q, k and v; q is None where it is stacked with the others."""
    return stacked.unbind(-3) if q is None else (q, *stacked.unbind(-3))


def writes_one_gradient(stacked: torch.Tensor, q: torch.Tensor) -> bool:
    """Whether `attend` serves the call: a gradient may follow, and views could do no more."""
    if not (torch.is_grad_enabled() and (stacked.requires_grad or q.requires_grad)):
        return False
    if forward_ad._current_level >= 0 or not _passes.nobody_intervenes(stacked, q):
        return False
    return not torch.is_autocast_enabled(stacked.device.type) and stacked.shape[-1] % 8 == 0


def attend(stacked: torch.Tensor, q: torch.Tensor, lengths: Any, return_lse: bool, keywords: dict[str, Any]) -> Any:
    """o, or (o, lse). q is a view of `stacked` if that has three parts; lengths: of packed sequences, else None."""
    options = options_of(own_type(adapter, q), **keywords)
    options = _api._packed(options, None, *lengths[2:]) if lengths else options._replace(layout="bshd")
    expect_backward(options, q, stacked.select(-3, -1))
    cu = lengths[:2] if lengths else (None, None)
    o, lse = _Stacked.apply(stacked, None if stacked.shape[-3] == 3 else q, *cu, options, return_lse)
    return (o, lse) if return_lse else o


class _Stacked(torch.autograd.Function):
    """(o, lse)"""

    @staticmethod
    def forward(ctx: Any, stacked: Any, q: Any, cu_q: Any, cu_k: Any, options: Options, of_lse: bool) -> Any:
        residual = _plan.needs_residual(adapter, options, stacked)
        given: Any = *_parts(stacked, q), None, cu_q, cu_k, None, residual, options
        made = _passes.forward(*given)
        ctx.save_for_backward(stacked, q, *made, cu_q, cu_k)
        ctx.of_lse, ctx.options = of_lse, options
        ctx.set_materialize_grads(False)
        o, lse, _ = made
        if not of_lse:
            ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any) -> Any:
        if do is None and dlse is None:
            return (None,) * 6
        stacked, q, o, lse, r, cu_q, cu_k = ctx.saved_tensors
        inputs, given = _parts(stacked, q), [x for x in (do, dlse) if x is not None]
        if torch.is_grad_enabled() or not _passes.nobody_intervenes(*given) or any(map(_is_batched, given)):
            saved = *inputs, o, lse, r, None, cu_q, cu_k, None, None
            like = types.SimpleNamespace(saved_tensors=saved, of_lse=ctx.of_lse, options=ctx.options)
            dq, dk, dv = _attention._Attention.backward(like, do, dlse, None)[:3]
            dstacked = torch.stack((dq, dk, dv) if q is None else (dk, dv), -3)
            dq = None if q is None else dq
        else:
            dstacked, dq = torch.empty_like(stacked), None if q is None else torch.empty_like(q)
            do = torch.zeros_like(o[..., :1]).expand_as(o) if do is None else do
            arrays = do, *inputs, o, lse, r if r.shape == o.shape else None, None, cu_q, cu_k, None, dlse
            _plan.run(adapter, "backward", ctx.options, arrays, False, _parts(dstacked, dq))
        return dstacked, dq, None, None, None, None
