"""Attention of tensors, and its derivatives: backwards, forwards, and under vmap.

Two Functions, because torch.compile takes none that declares a jvp: `_Attention` serves compiled code and plain
autograd, `_DualAttention` eager forward-mode differentiation. Gradients and tangents are Functions of their own, so
that asking for a second derivative is rejected instead of answered with zero. torch.compile wants `forward` to name
its arguments one by one.
"""

from typing import Any

import torch
from torch.autograd import forward_ad

from octet import _plan
from octet._options import Options, expect_constant, is_differentiated
from octet._qtensor import QTensor
from octet.errors import Unsupported
from octet.torch import _ops, _passes
from octet.torch._adapter import adapter, cast_tensors, expect_backward, expect_devices
from octet.torch._fold import Fold


def by_head(name: str, x: torch.Tensor | None, options: Options) -> torch.Tensor | None:
    """Sinks, their tangent or slopes in the type that the library takes."""
    if x is None:
        return None
    _plan.expect_by_head(name, x, x.is_floating_point())
    return x.to(_plan.lse_type(adapter, options))


def _slopes(options: Options, device: torch.device, x: torch.Tensor | None) -> torch.Tensor | None:
    """Slopes of ALiBi, which have no gradient."""
    if x is None:
        return None
    expect_constant("alibi_slopes", x)
    expect_devices(device, alibi_slopes=x)
    return by_head("alibi_slopes", x, options)


def run_attention(
    options: Options,
    q: Any,
    k: Any,
    v: Any,
    mask: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse); without return_lse o alone is differentiable"""
    expect_constant("mask", mask)
    device = (q.codes if isinstance(q, QTensor) else q).device
    expect_devices(device, mask=mask, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, sinks=sinks)
    more = mask, cu_seqlens_q, cu_seqlens_k, by_head("sinks", sinks, options)
    slopes = _slopes(options, device, alibi_slopes)
    if isinstance(q, QTensor) or isinstance(k, QTensor) or isinstance(v, QTensor):
        return _quantized(options, q, k, v, *more, slopes)
    q, k, v = cast_tensors(("q", "k", "v"), q, k, v)
    o, lse, _ = attend(q, k, v, *more, options, of_lse=return_lse, slopes=slopes)
    return o, lse


def _quantized(options: Options, q: Any, k: Any, v: Any, *more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes have no gradient, and no operator: torch.compile leaves them to eager code."""
    for name, x in (("q", q), ("k", k), ("v", v), ("sinks", more[3])):
        if not isinstance(x, QTensor):
            expect_constant(name, x)
    o, lse = _plan.run(adapter, "forward", options, (q, k, v, *more))
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
    alibi_slopes: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv), and dsinks where there are sinks, detached; torch.func and forward mode, to which detached tensors
    are constants, get their derivative rejected"""
    q, k, v, do = cast_tensors(("q", "k", "v", "do"), q, k, v, do)
    expect_devices(q.device, mask=mask, sinks=sinks, dlse=dlse)
    more = mask, None, None, by_head("sinks", sinks, options)
    slopes = _slopes(options, q.device, alibi_slopes)
    with torch.no_grad():
        saved = _ops.forward(q, k, v, *more, _plan.needs_residual(adapter, options, q), options, slopes)
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    with torch.set_grad_enabled(transformed and torch.is_grad_enabled()):
        *made, dsinks = gradients((do, q, k, v, *saved, *more, slopes, dlse), options)
    return tuple(made) if sinks is None else (*made, dsinks.to(sinks.dtype))


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
    alibi_slopes: torch.Tensor | None = None,
    return_lse: bool = False,
) -> tuple[torch.Tensor, ...]:
    """(o, to), with return_lse (o, to, lse, tlse); o and lse are differentiable, their tangents detached. Where a
    gradient may follow, o and lse come from a forward pass of their own, which saves what the backward pass needs."""
    expect_constant("mask", mask)
    q, k, v, tq, tk, tv = cast_tensors(("q", "k", "v", "tq", "tk", "tv"), q, k, v, tq, tk, tv)
    expect_devices(q.device, mask=mask, sinks=sinks, tsinks=tsinks)
    more = mask, None, None, by_head("sinks", sinks, options)
    along = by_head("tsinks", tsinks, options)
    slopes = _slopes(options, q.device, alibi_slopes)
    with torch.no_grad():
        o, lse, to, tlse = _ops.jvp(q, k, v, tq, tk, tv, *more, along, return_lse, options, slopes)
    if any([is_differentiated(x) for x in (q, k, v, sinks) if x is not None]):
        o, lse, _ = attend(q, k, v, *more, options, of_lse=return_lse, slopes=slopes)
    return (o, to, lse, tlse) if return_lse else (o, to)


def attend(
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    cu_q: Any,
    cu_k: Any,
    sinks: Any,
    options: Options,
    *,
    of_lse: bool,
    residual: bool = False,
    slopes: Any = None,
) -> tuple:
    """(o, lse, o_residual); what a backward pass will need is saved when one may follow.

    `of_lse`: lse is differentiable, not o alone. `residual`: make o_residual in any case.
    """
    compiling = torch.compiler.is_compiling()
    dual = forward_ad._current_level >= 0
    # A dual tensor does not tell whether its primal requires a gradient.
    needing = dual or q.requires_grad or k.requires_grad or v.requires_grad
    needing = needing or (sinks is not None and sinks.requires_grad)
    differentiates = torch.is_grad_enabled() and needing
    given = q, k, v, mask, cu_q, cu_k, sinks, slopes
    if not (differentiates or compiling or torch._C._are_functorch_transforms_active()):
        # A Function costs as much again, and so does an operator.
        run = _passes.forward if _passes.nobody_listens(q, k, v, mask, sinks, slopes) else _ops.forward
        return run(*given[:7], residual, options, slopes=slopes)
    if dual and compiling:
        raise Unsupported(
            "forward-mode differentiation inside torch.compile, which drops the tangents of a custom function; call "
            "octet.attention_jvp there, or take the jvp outside"
        )
    if differentiates and not dual and not compiling:
        expect_backward(options, q, v, sinks)
    residual = residual or (differentiates and _plan.needs_residual(adapter, options, q))
    operands: tuple[Any, ...] = _distinct(given) if compiling else given
    return _apply(_DualAttention if dual else _Attention, *operands, residual, of_lse, options)


def _distinct(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """The tensors, with a view in place of one that occurs a second time: torch.compile breaks the graph where a
    Function gets the same tensor twice, as cu_seqlens of self-attention are."""
    found: list[Any] = []
    for x in tensors:
        found.append(x.view_as(x) if x is not None and any(x is y for y in found) else x)
    return tuple(found)


def _is_eager() -> bool:
    """No torch.compile, no torch.func."""
    return not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())


def _apply(function: Any, *args: Any) -> Any:
    """function.apply; in eager code without its search for default arguments, which takes longer than all the rest."""
    return super(torch.autograd.Function, function).apply(*args) if _is_eager() else function.apply(*args)


def _reject_second_derivative(ctx: Any, *grad_outputs: Any) -> Any:
    raise Unsupported(
        "octet computes first derivatives only; for a second one (create_graph=True, a jvp of a gradient) use "
        "torch.nn.functional.scaled_dot_product_attention"
    )


class _Gradients(torch.autograd.Function):
    """(dq, dk, dv, dsinks)"""

    @staticmethod
    def forward(
        do: Any,
        q: Any,
        k: Any,
        v: Any,
        o: Any,
        lse: Any,
        r: Any,
        mask: Any,
        cu_q: Any,
        cu_k: Any,
        sinks: Any,
        slopes: Any,
        dlse: Any,
        options: Options,
    ) -> Any:
        return _ops.backward(do, q, k, v, o, lse, r, mask, cu_q, cu_k, sinks, dlse, options, slopes)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    backward = staticmethod(_reject_second_derivative)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        fold = Fold(info.batch_size, args[-1].layout)
        do, q, k, v, o, lse, r, mask, cu_q, cu_k, sinks, slopes, dlse = zip(args[:-1], in_dims[:-1], strict=True)
        *gradients, dsinks = _gradients(
            *(fold.tensor(*x) for x in (do, q, k, v, o)),
            fold.lse(*lse),
            fold.residual(*r),
            fold.mask(*mask, like=q),
            fold.lengths(*cu_q),
            fold.lengths(*cu_k),
            fold.sinks(*sinks, like=q),
            fold.slopes(*slopes, like=q),
            fold.lse(*dlse),
            args[-1],
        )
        return (*map(fold.unfold_tensor, gradients), fold.unfold_sinks(dsinks, *sinks)), (0, 0, 0, 0)


class _DualGradients(_Gradients):
    """The same where forward-mode derivatives are taken, to reject them; torch.compile takes no Function with a jvp."""

    jvp = staticmethod(_reject_second_derivative)


def _gradients(*args: Any) -> Any:
    return _apply(_DualGradients if forward_ad._current_level >= 0 else _Gradients, *args)


def gradients(given: tuple, options: Options) -> tuple:
    """(dq, dk, dv, dsinks) of do, what a forward pass saved, the slopes, and dlse."""
    if torch.is_grad_enabled() or forward_ad._current_level >= 0 or not _is_eager():
        return _gradients(*given, options)
    # By the operator: is_grads_batched maps it by a vmap that nobody_listens does not see.
    *saved, slopes, dlse = given
    arguments: Any = *saved, dlse, options, slopes
    return _ops.backward(*arguments)


class _Tangent(torch.autograd.Function):
    """(to, tlse), without `of_lse` an empty tensor for tlse"""

    @staticmethod
    def forward(
        q: Any,
        k: Any,
        v: Any,
        tq: Any,
        tk: Any,
        tv: Any,
        mask: Any,
        cu_q: Any,
        cu_k: Any,
        sinks: Any,
        slopes: Any,
        tsinks: Any,
        of_lse: bool,
        options: Options,
    ) -> Any:
        return _ops.jvp(q, k, v, tq, tk, tv, mask, cu_q, cu_k, sinks, tsinks, of_lse, options, slopes)[2:]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    backward = jvp = staticmethod(_reject_second_derivative)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        of_lse, options = args[-2:]
        fold = Fold(info.batch_size, options.layout)
        *tensors, mask, cu_q, cu_k, sinks, slopes, tsinks = zip(args[:-2], in_dims[:-2], strict=True)
        to, tlse = _Tangent.apply(
            *(fold.tensor(*x) for x in tensors),
            fold.mask(*mask, like=tensors[0]),
            fold.lengths(*cu_q),
            fold.lengths(*cu_k),
            fold.sinks(*sinks, like=tensors[0]),
            fold.slopes(*slopes, like=tensors[0]),
            fold.sinks(*tsinks, like=tensors[0]),
            of_lse,
            options,
        )
        return (fold.unfold_tensor(to), fold.unfold(tlse, 0) if of_lse else fold.unfold_none(tlse)), (0, 0)


class _Attention(torch.autograd.Function):
    """(o, lse, o_residual)"""

    @staticmethod
    def forward(
        q: Any,
        k: Any,
        v: Any,
        mask: Any,
        cu_q: Any,
        cu_k: Any,
        sinks: Any,
        slopes: Any,
        residual: bool,
        of_lse: bool,
        options: Options,
    ) -> Any:
        run = _passes.forward if _passes.nobody_listens(q, k, v, mask, sinks, slopes) else _ops.forward
        return run(q, k, v, mask, cu_q, cu_k, sinks, residual, options, slopes=slopes)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        q, k, v, mask, cu_q, cu_k, sinks, slopes, _, of_lse, options = inputs
        o, lse, r = output
        ctx.mark_non_differentiable(*(() if of_lse else (lse,)), r)
        ctx.set_materialize_grads(False)  # else zeros would be written for a result that no loss reads
        ctx.save_for_backward(q, k, v, o, lse, r, mask, cu_q, cu_k, sinks, slopes)
        ctx.of_lse, ctx.options = of_lse, options

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any, _r: Any) -> Any:
        dlse = dlse if ctx.of_lse else None  # compiled code has zeros for it
        if do is None and dlse is None:
            return (None,) * 11
        saved = ctx.saved_tensors
        sinks = saved[-2]
        if do is None:
            do = torch.zeros_like(saved[3][..., :1]).expand_as(saved[3])
        dq, dk, dv, dsinks = gradients((do, *saved, dlse), ctx.options)
        return dq, dk, dv, None, None, None, None if sinks is None else dsinks, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        fold = Fold(info.batch_size, args[-1].layout)
        q, k, v, mask, cu_q, cu_k, sinks, slopes = zip(args[:8], in_dims[:8], strict=True)
        residual, of_lse, options = args[8:]
        o, lse, r = attend(
            fold.tensor(*q),
            fold.tensor(*k),
            fold.tensor(*v),
            fold.mask(*mask, like=q),
            fold.lengths(*cu_q),
            fold.lengths(*cu_k),
            fold.sinks(*sinks, like=q),
            options,
            of_lse=of_lse,
            residual=residual,
            slopes=fold.slopes(*slopes, like=q),
        )
        return (fold.unfold_tensor(o), fold.unfold(lse, 0), fold.unfold_residual(r)), (0, 0, 0)


class _DualAttention(_Attention):
    """The same with a jvp."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _Attention.setup_context(ctx, inputs, output)
        q, k, v, mask, cu_q, cu_k, sinks, slopes, _, _, _ = inputs
        ctx.save_for_forward(q, k, v, mask, cu_q, cu_k, sinks, slopes)

    @staticmethod
    def jvp(ctx: Any, tq: Any, tk: Any, tv: Any, _mask: Any, _cu_q: Any, _cu_k: Any, tsinks: Any, *_: Any) -> Any:
        q, k, v, mask, cu_q, cu_k, sinks, slopes = ctx.saved_tensors
        tangents = [torch.zeros_like(x) if t is None else t for x, t in ((q, tq), (k, tk), (v, tv))]
        to, tlse = _Tangent.apply(q, k, v, *tangents, mask, cu_q, cu_k, sinks, slopes, tsinks, ctx.of_lse, ctx.options)
        return to, tlse if ctx.of_lse else None, None
