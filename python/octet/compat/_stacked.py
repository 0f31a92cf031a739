"""Attention of tensors that stack q, k, v or k, v, whose gradient is one tensor too: the backward pass writes into it,
and nothing is stacked afterwards. Views, as `unbind` makes them, do the same but for those copies, and more: they serve
torch.compile, torch.func, autocast, forward mode, head dims that are filled, and modes that see torch's operators.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from octet import _api, _plan
from octet._operands import RESULTS, Operands, operands_of
from octet._options import Options, options_of
from octet._results import needs_residual, own_type
from octet.torch import _attention, _passes
from octet.torch._adapter import adapter, expect_backward


def _parts(stacked: torch.Tensor, q: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """q, k and v; q is None where it is stacked with the others."""
    return stacked.unbind(-3) if q is None else (q, *stacked.unbind(-3))


def _operands(stacked: torch.Tensor, q: torch.Tensor | None, cu: Sequence[torch.Tensor]) -> Operands:
    """`cu`: the lengths of packed sequences, if they are packed."""
    tensors = dict(zip(("q", "k", "v"), _parts(stacked, q), strict=True))
    return tensors | dict(zip(("cu_seqlens_q", "cu_seqlens_k"), cu, strict=False))


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
    options = options._replace(layout="thd" if lengths else "bshd")
    if lengths:
        options = _api.with_bounds(options, *lengths[2:])
    expect_backward(options, {"q": q, "v": stacked.select(-3, -1)})
    cu = lengths[:2] if lengths else ()
    o, lse = _Stacked.apply(stacked, None if stacked.shape[-3] == 3 else q, options, return_lse, *cu)
    return (o, lse) if return_lse else o


class _Stacked(torch.autograd.Function):
    """(o, lse)"""

    @staticmethod
    def forward(ctx: Any, stacked: Any, q: Any, options: Options, of_lse: bool, *cu: Any) -> Any:
        residual = needs_residual(adapter, options, stacked)
        made = _passes.run("forward", _operands(stacked, q, cu), options, residual)
        ctx.save_for_backward(stacked, q, *made, *cu)
        ctx.of_lse, ctx.options = of_lse, options
        ctx.set_materialize_grads(False)
        o, lse, _ = made
        if not of_lse:
            ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any) -> Any:
        if do is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        stacked, q, o, lse, r, *cu = ctx.saved_tensors
        saved = _operands(stacked, q, cu) | dict(zip(RESULTS["forward"], (o, lse, r), strict=True))
        given = [x for x in (do, dlse) if x is not None]
        if torch.is_grad_enabled() or not _passes.nobody_intervenes(*given):
            made = _attention.gradients_of(saved, do, dlse if ctx.of_lse else None, ctx.options)
            dstacked = torch.stack([made[name] for name in ("q", "k", "v")[q is not None :]], -3)
            dq = None if q is None else made["q"]
        else:
            dstacked, dq = torch.empty_like(stacked), None if q is None else torch.empty_like(q)
            do = torch.zeros_like(o[..., :1]).expand_as(o) if do is None else do
            saved = {name: x for name, x in saved.items() if name != "o_residual" or x.shape == o.shape}
            arrays = {"do_": do} | saved | operands_of(dlse=dlse)
            _plan.run(adapter, "backward", ctx.options, arrays, False, _parts(dstacked, dq))
        return dstacked, dq, *[None] * (2 + len(cu))
