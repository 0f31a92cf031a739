"""The torch front: operators, derivatives, vmap, autocast. `octet.attention` and the other functions of `octet` come
here with tensors."""

from typing import Any

import torch

from octet import _passes
from octet._abi import DEVICES
from octet._api import attention, attention_jvp, attention_varlen, attention_vjp
from octet._options import Options
from octet._qtensor import QTensor
from octet.errors import InvalidArgument, Unsupported
from octet.torch import _again as _again
from octet.torch import _ops
from octet.torch._autograd import attend
from octet.torch._front import autocast_type
from octet.torch._front import front as front
from octet.torch._front import to_numpy as to_numpy

__all__ = ["attention", "attention_jvp", "attention_varlen", "attention_vjp"]


def _tensors(names: tuple[str, ...], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors in the type that autocast gives them. What torch would not bring to the library is refused here."""
    device = tensors[0].device
    for name, x in zip(names, tensors, strict=True):
        if x.layout is not torch.strided:
            raise InvalidArgument(f"{name}: layout {x.layout}, allowed: torch.strided")
        _expect_device(name, x, device)
    if not torch.is_autocast_enabled(device.type if device.type in DEVICES else "cpu"):
        return tensors
    return tuple([x.to(autocast_type(x)) for x in tensors])


def _expect_device(name: str, x: torch.Tensor, device: torch.device) -> None:
    """A tensor on another device may have torch choose another kernel, on the meta device none at all."""
    if x.device != device:
        raise InvalidArgument(f"{name}: on {x.device}, but q is on {device}; all tensors of a call live on one device")


def _expect_no_gradient(name: str, x: torch.Tensor | None) -> None:
    if x is not None and x.requires_grad and torch.is_grad_enabled():
        raise Unsupported(f"{name}: requires a gradient, which octet does not compute for it; pass {name}.detach()")


def run_attention(
    options: Options,
    q: Any,
    k: Any,
    v: Any,
    mask: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse)"""
    more = mask, cu_seqlens_q, cu_seqlens_k
    _expect_no_gradient("mask", mask)
    for name, x in zip(("mask", "cu_seqlens_q", "cu_seqlens_k"), more, strict=True):
        if x is not None:
            _expect_device(name, x, (q.codes if isinstance(q, QTensor) else q).device)
    if isinstance(q, QTensor) or isinstance(k, QTensor) or isinstance(v, QTensor):
        return _quantised(options, q, k, v, *more)
    q, k, v = _tensors(("q", "k", "v"), q, k, v)
    o, lse, _ = attend(q, k, v, *more, options)
    return o, lse


def _quantised(options: Options, q: Any, k: Any, v: Any, *more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes have no gradient, and no operator: torch.compile leaves them to eager code."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, QTensor):
            _expect_no_gradient(name, x)
    o, lse = _passes.run(front, "forward", options, (q, k, v, *more))
    return o, lse


def run_vjp(
    options: Options, q: Any, k: Any, v: Any, do: torch.Tensor, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv), detached"""
    q, k, v, do = _tensors(("q", "k", "v", "do"), q, k, v, do)
    if mask is not None:
        _expect_device("mask", mask, q.device)
    with torch.no_grad():
        residual = _passes.needs_residual(front, options, q)
        o, lse, r = _ops.forward(q, k, v, mask, None, None, residual, *options)
        return _ops.backward(do, q, k, v, o, lse, r, mask, None, None, *options)


def run_jvp(
    options: Options,
    q: Any,
    k: Any,
    v: Any,
    tq: torch.Tensor,
    tk: torch.Tensor,
    tv: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, to); o is differentiable, `to` is detached. Where a gradient may follow, o comes from a forward pass of its
    own, which saves what the backward pass needs."""
    _expect_no_gradient("mask", mask)
    q, k, v, tq, tk, tv = _tensors(("q", "k", "v", "tq", "tk", "tv"), q, k, v, tq, tk, tv)
    if mask is not None:
        _expect_device("mask", mask, q.device)
    with torch.no_grad():
        o, _, to = _ops.jvp(q, k, v, tq, tk, tv, mask, None, None, *options)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        o = attend(q, k, v, mask, None, None, options)[0]
    return o, to
