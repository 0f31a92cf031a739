"""Derivatives of attention in torch: backwards, forwards, and under vmap.

Two Functions, because torch.compile takes none that declares a jvp: `_Attention` serves compiled code and plain
autograd, `_DualAttention` eager forward-mode differentiation. Gradients and tangents are Functions of their own, so
that asking for a second derivative is refused instead of answered with zero. torch.compile wants `forward` to name
its arguments one by one.
"""

import functools
from typing import Any

import torch
from torch.autograd import forward_ad

from octet import _passes
from octet._explain import supports
from octet._options import Options
from octet.errors import Unsupported
from octet.torch import _ops
from octet.torch._fold import Fold
from octet.torch._front import front


def attend(q: Any, k: Any, v: Any, mask: Any, cu_q: Any, cu_k: Any, options: Options, residual: bool = False) -> tuple:
    """(o, lse, o_residual), o differentiable; what a backward pass will need is saved when one may follow.

    `residual`: make o_residual in any case.
    """
    compiling = torch.compiler.is_compiling()
    dual = forward_ad._current_level >= 0
    # A dual tensor does not tell whether its primal requires a gradient.
    differentiates = torch.is_grad_enabled() and (dual or q.requires_grad or k.requires_grad or v.requires_grad)
    if not (differentiates or compiling or torch._C._are_functorch_transforms_active()):
        return _ops.forward(q, k, v, mask, cu_q, cu_k, residual, *options)  # a Function costs as much again
    if dual and compiling:
        raise Unsupported(
            "forward-mode differentiation inside torch.compile, which drops the tangents of a custom function; call "
            "octet.attention_jvp there, or take the jvp outside"
        )
    if differentiates and not dual and not compiling:
        expect_backward(options, q, v)
    residual = residual or (differentiates and _passes.needs_residual(front, options, q))
    return _apply(_DualAttention if dual else _Attention, q, k, v, mask, cu_q, cu_k, residual, options)


def _is_eager() -> bool:
    """No torch.compile, no torch.func."""
    return not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())


def _apply(function: Any, *args: Any) -> Any:
    """function.apply; in eager code without its search for default arguments, which takes longer than all the rest."""
    return super(torch.autograd.Function, function).apply(*args) if _is_eager() else function.apply(*args)


def expect_backward(options: Options, q: torch.Tensor, v: torch.Tensor) -> None:
    """Refuses what has no backward pass before the forward pass whose gradient would be asked for."""
    how = options.precision, options.remedy, options.backend
    _expect_backward(*how, q.dtype, q.shape[-1], v.shape[-1], q.device)


@functools.cache
def _expect_backward(
    precision: str, remedy: str, backend: str, dtype: torch.dtype, dim: int, dim_v: int, device: torch.device
) -> None:
    q, v = (torch.zeros(1, 1, 8, n, device=device, dtype=dtype) for n in (dim, dim_v))
    how: dict[str, Any] = {"precision": precision, "remedy": remedy, "backend": backend}
    if supports(q, q, v, **how) and not (found := supports(q, q, v, kind="backward", **how)):
        raise Unsupported(f"requires_grad: found True without torch.no_grad(), but {found.reason}")


def _refuse_second_derivative(ctx: Any, *grad_outputs: Any) -> Any:
    raise Unsupported(
        "octet computes first derivatives only; for a second one (create_graph=True, a jvp of a gradient) use "
        "torch.nn.functional.scaled_dot_product_attention"
    )


class _Gradients(torch.autograd.Function):
    """(dq, dk, dv)"""

    @staticmethod
    def forward(
        do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, r: Any, mask: Any, cu_q: Any, cu_k: Any, options: Options
    ) -> Any:
        return _ops.backward(do, q, k, v, o, lse, r, mask, cu_q, cu_k, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    backward = staticmethod(_refuse_second_derivative)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        fold = Fold(info.batch_size, args[-1].layout)
        do, q, k, v, o, lse, r, mask, cu_q, cu_k = zip(args[:-1], in_dims[:-1], strict=True)
        found = _Gradients.apply(
            *(fold.tensor(*x) for x in (do, q, k, v, o)),
            fold.lse(*lse),
            fold.residual(*r),
            fold.mask(*mask, like=q),
            fold.lengths(*cu_q),
            fold.lengths(*cu_k),
            args[-1],
        )
        return tuple(fold.unfold_tensor(x) for x in found), (0, 0, 0)


def gradients(given: tuple, options: Options) -> tuple:
    """(dq, dk, dv) of do and what a forward pass saved."""
    if torch.is_grad_enabled() or not _is_eager():
        return _apply(_Gradients, *given, options)
    # By the operator: is_grads_batched maps it by a vmap that nobody_listens does not see.
    return _ops.backward(*given, *options)


class _Tangent(torch.autograd.Function):
    """to"""

    @staticmethod
    def forward(
        q: Any, k: Any, v: Any, tq: Any, tk: Any, tv: Any, mask: Any, cu_q: Any, cu_k: Any, options: Options
    ) -> Any:
        return _ops.jvp(q, k, v, tq, tk, tv, mask, cu_q, cu_k, *options)[2]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    backward = staticmethod(_refuse_second_derivative)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        fold = Fold(info.batch_size, args[-1].layout)
        *tensors, mask, cu_q, cu_k = zip(args[:-1], in_dims[:-1], strict=True)
        to = _Tangent.apply(
            *(fold.tensor(*x) for x in tensors),
            fold.mask(*mask, like=tensors[0]),
            fold.lengths(*cu_q),
            fold.lengths(*cu_k),
            args[-1],
        )
        return fold.unfold_tensor(to), 0


class _Attention(torch.autograd.Function):
    """(o, lse, o_residual)"""

    @staticmethod
    def forward(q: Any, k: Any, v: Any, mask: Any, cu_q: Any, cu_k: Any, residual: bool, options: Options) -> Any:
        run = _ops.direct_forward if _ops.nobody_listens(q, k, v) else _ops.forward
        return run(q, k, v, mask, cu_q, cu_k, residual, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        q, k, v, mask, cu_q, cu_k, _, options = inputs
        o, lse, r = output
        ctx.mark_non_differentiable(lse, r)
        ctx.set_materialize_grads(False)  # else zeros would be written for lse and r
        ctx.save_for_backward(q, k, v, o, lse, r, mask, cu_q, cu_k)
        ctx.options = options

    @staticmethod
    def backward(ctx: Any, do: Any, _lse: Any, _r: Any) -> Any:
        if do is None:
            return (None,) * 8
        return *gradients((do, *ctx.saved_tensors), ctx.options), None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        fold = Fold(info.batch_size, args[-1].layout)
        q, k, v, mask, cu_q, cu_k = zip(args[:6], in_dims[:6], strict=True)
        residual, options = args[6:]
        o, lse, r = attend(
            fold.tensor(*q),
            fold.tensor(*k),
            fold.tensor(*v),
            fold.mask(*mask, like=q),
            fold.lengths(*cu_q),
            fold.lengths(*cu_k),
            options,
            residual,
        )
        return (fold.unfold_tensor(o), fold.unfold(lse, 0), fold.unfold_residual(r)), (0, 0, 0)


class _DualAttention(_Attention):
    """The same with a jvp."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _Attention.setup_context(ctx, inputs, output)
        q, k, v, mask, cu_q, cu_k, _, _ = inputs
        ctx.save_for_forward(q, k, v, mask, cu_q, cu_k)

    @staticmethod
    def jvp(ctx: Any, tq: Any, tk: Any, tv: Any, *_: Any) -> Any:
        q, k, v, mask, cu_q, cu_k = ctx.saved_tensors
        tangents = [torch.zeros_like(x) if t is None else t for x, t in ((q, tq), (k, tk), (v, tv))]
        return _Tangent.apply(q, k, v, *tangents, mask, cu_q, cu_k, ctx.options), None, None
