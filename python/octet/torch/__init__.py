"""The torch front: operators, derivatives, vmap, autocast. `octet.attention` and the other functions of `octet` come
here with tensors."""

from typing import Any

import torch
from torch.autograd import forward_ad

from octet import _passes
from octet._abi import DEVICES
from octet._api import attention, attention_jvp, attention_varlen, attention_vjp
from octet._options import Options
from octet._qtensor import QTensor
from octet.errors import InvalidArgument, Unsupported
from octet.torch import _again as _again
from octet.torch import _ops
from octet.torch._autograd import attend
from octet.torch._front import autocast_type, expect_plain
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


def _expect_devices(device: torch.device, **tensors: torch.Tensor | None) -> None:
    for name, x in tensors.items():
        if x is not None:
            _expect_device(name, x, device)
            expect_plain(name, x)


def sinks_of(name: str, x: torch.Tensor | None, options: Options) -> torch.Tensor | None:
    """Sinks or their tangent in the type that the library takes."""
    if x is None:
        return None
    _passes.expect_sinks(name, x, x.is_floating_point())
    return x.to(_passes.lse_type(front, options))


def expect_constant(name: str, x: torch.Tensor | None) -> None:
    """Refuses what a derivative is asked for, which octet does not compute."""
    if x is None:
        return
    is_dual = forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None
    if is_dual or (x.requires_grad and torch.is_grad_enabled()):
        raise Unsupported(f"{name}: requires a gradient, which octet does not compute for it; pass {name}.detach()")


def run_attention(
    options: Options,
    q: Any,
    k: Any,
    v: Any,
    mask: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse); without return_lse o alone is differentiable"""
    expect_constant("mask", mask)
    device = (q.codes if isinstance(q, QTensor) else q).device
    _expect_devices(device, mask=mask, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, sinks=sinks)
    more = mask, cu_seqlens_q, cu_seqlens_k, sinks_of("sinks", sinks, options)
    if isinstance(q, QTensor) or isinstance(k, QTensor) or isinstance(v, QTensor):
        return _quantised(options, q, k, v, *more)
    q, k, v = _tensors(("q", "k", "v"), q, k, v)
    o, lse, _ = attend(q, k, v, *more, options, of_lse=return_lse)
    return o, lse


def _quantised(options: Options, q: Any, k: Any, v: Any, *more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes have no gradient, and no operator: torch.compile leaves them to eager code."""
    for name, x in (("q", q), ("k", k), ("v", v), ("sinks", more[-1])):
        if not isinstance(x, QTensor):
            expect_constant(name, x)
    o, lse = _passes.run(front, "forward", options, (q, k, v, *more))
    return o, lse


def run_vjp(
    options: Options,
    q: Any,
    k: Any,
    v: Any,
    do: torch.Tensor,
    mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dlse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv), and dsinks where there are sinks, detached"""
    q, k, v, do = _tensors(("q", "k", "v", "do"), q, k, v, do)
    _expect_devices(q.device, mask=mask, sinks=sinks, dlse=dlse)
    with torch.no_grad():
        residual = _passes.needs_residual(front, options, q)
        more = mask, None, None, sinks_of("sinks", sinks, options)
        o, lse, r = _ops.forward(q, k, v, *more, residual, options)
        *gradients, dsinks = _ops.backward(do, q, k, v, o, lse, r, *more, dlse, options)
    return tuple(gradients) if sinks is None else (*gradients, dsinks.to(sinks.dtype))


def run_jvp(
    options: Options,
    q: Any,
    k: Any,
    v: Any,
    tq: torch.Tensor,
    tk: torch.Tensor,
    tv: torch.Tensor,
    mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    tsinks: torch.Tensor | None = None,
    return_lse: bool = False,
) -> tuple[torch.Tensor, ...]:
    """(o, to), with return_lse (o, to, lse, tlse); o and lse are differentiable, their tangents detached. Where a
    gradient may follow, o and lse come from a forward pass of their own, which saves what the backward pass needs."""
    expect_constant("mask", mask)
    q, k, v, tq, tk, tv = _tensors(("q", "k", "v", "tq", "tk", "tv"), q, k, v, tq, tk, tv)
    _expect_devices(q.device, mask=mask, sinks=sinks, tsinks=tsinks)
    more = mask, None, None, sinks_of("sinks", sinks, options)
    along = sinks_of("tsinks", tsinks, options)
    with torch.no_grad():
        o, lse, to, tlse = _ops.jvp(q, k, v, tq, tk, tv, *more, along, return_lse, options)
    needing = any(x is not None and x.requires_grad for x in (q, k, v, sinks))
    if torch.is_grad_enabled() and needing:
        o, lse, _ = attend(q, k, v, *more, options, of_lse=return_lse)
    return (o, to, lse, tlse) if return_lse else (o, to)
