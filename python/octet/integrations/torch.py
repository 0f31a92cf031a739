"""octet as the flash attention of torch's own scaled_dot_product_attention.

    from octet.integrations import torch as octet_in_torch
    octet_in_torch.register()
    torch.nn.attention.activate_flash_attention_impl("octet_bf16")

torch decides which calls of scaled_dot_product_attention are for flash attention (on a GPU those without a mask, in
f16 and bf16); they, torch.nn.attention.varlen and ring attention then run octet's kernels. There is no place for the
un-rounded output between torch's forward and backward pass, so 16-bit gradients are those of remedy "none";
`octet.patch_sdpa` has the others, forward-mode derivatives and a fall-back.
"""

import functools
from typing import Any

import torch

from octet._options import Options, Precision, Remedy, options_of
from octet._refusals import expect, expect_absent, expect_no_dropout
from octet.errors import Unsupported
from octet.integrations import NAMES
from octet.torch import _ops
from octet.torch._autograd import expect_backward
from octet.torch._front import front


def register() -> list[str]:
    """Adds octet's implementations to torch.nn.attention; returns their names. None is active before
    `activate_flash_attention_impl`.

    Raises:
        Unsupported: this torch has no such registry (2.11 has).
    """
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError:
        raise Unsupported(
            f"torch {torch.__version__} has no torch.nn.attention.register_flash_attention_impl, allowed: 2.11 or "
            "later; use octet.patch_sdpa"
        ) from None
    for name, precision in NAMES.items():
        register_flash_attention_impl(name, register_fn=functools.partial(_Active, precision))
    return list(NAMES)


class _Active:
    """octet in the place of torch's kernels, until `remove`."""

    def __init__(self, precision: Precision | None) -> None:
        kernels = _Kernels(precision)
        self._library = torch.library.Library("aten", "IMPL")
        for name, kernel, where in (
            ("_scaled_dot_product_flash_attention", kernels.sdpa, "CUDA"),
            ("_scaled_dot_product_flash_attention_backward", kernels.sdpa_backward, "CUDA"),
            ("_flash_attention_forward", kernels.flash, "CUDA"),
            ("_flash_attention_backward", kernels.flash_backward, "CUDA"),
            ("_scaled_dot_product_flash_attention_for_cpu", kernels.cpu, "CPU"),
            ("_scaled_dot_product_flash_attention_for_cpu_backward", kernels.cpu_backward, "CPU"),
        ):
            self._library.impl(name, kernel, where, allow_override=True)

    def remove(self) -> None:
        self._library._destroy()


def _swap(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """[batch, head, token, dim] and [batch, token, head, dim], one for the other."""
    return tuple([x.transpose(1, 2) for x in tensors])


def _like(x: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """x with the strides that torch promises: those of empty_like(model)."""
    if x.stride() == model.stride():
        return x
    promised = torch.empty_like(model)
    return x if x.stride() == promised.stride() else promised.copy_(x)


def _expect(dropout_p: float, return_debug_mask: bool = False, **others: Any) -> None:
    expect_no_dropout(dropout_p)
    own = "torch.nn.attention.restore_flash_attention_impl brings back torch's own"
    expect("return_debug_mask", return_debug_mask, (False,), f"octet keeps no weights; {own}")
    for name, found in others.items():
        expect_absent(name, found, own)


class _Kernels:
    """The operators of aten, at a precision."""

    def __init__(self, precision: Precision | None) -> None:
        self._precision = precision

    def _options(self, q: torch.Tensor, causal: Any, scale: float | None, layout: Any, **more: Any) -> Options:
        own = front.dtype_name(q.dtype, "query")
        remedy: Remedy = "none" if (self._precision or own) in ("f16", "bf16") else "f16_inside"
        return options_of(
            own, precision=self._precision, causal=causal, scale=scale, layout=layout, remedy=remedy, **more
        )

    def _forward(self, q: Any, k: Any, v: Any, mask: Any, cu_q: Any, cu_k: Any, options: Options) -> tuple[Any, Any]:
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            expect_backward(options, q, v)
        o, lse, _ = _ops.direct_forward(q, k, v, mask, cu_q, cu_k, False, *options)
        return o, lse

    def _backward(
        self, do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, mask: Any, cu_q: Any, cu_k: Any, options: Options
    ) -> tuple[Any, Any, Any]:
        none = q.new_empty(0)
        dq, dk, dv = _ops.direct_backward(do, q, k, v, o, lse.contiguous(), none, mask, cu_q, cu_k, *options)
        return dq, dk, dv

    def _dense(self, q: Any, k: Any, v: Any, mask: Any, causal: Any, scale: float | None) -> tuple[Any, Any]:
        """(o, lse) of [batch, head, token, dim]; o in the layout of q."""
        if q.is_contiguous() or not q.transpose(1, 2).is_contiguous():
            o, lse = self._forward(q, k, v, mask, None, None, self._options(q, causal, scale, "bhsd"))
        else:
            q_, k_, v_ = _swap(q, k, v)
            o, lse = self._forward(q_, k_, v_, mask, None, None, self._options(q, causal, scale, "bshd"))
            (o,) = _swap(o)
        return _like(o, q), lse

    def sdpa(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        _expect(dropout_p, return_debug_mask)
        o, lse = self._dense(query, key, value, None, "top_left" if is_causal else False, scale)
        seed, offset, weights = _no_randomness(query)
        return o, lse, None, None, query.shape[2], key.shape[2], seed, offset, weights

    def sdpa_backward(
        self,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        cum_seq_q: Any,
        cum_seq_k: Any,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        philox_seed: Any,
        philox_offset: Any,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        options = self._options(query, "top_left" if is_causal else False, scale, "bhsd")
        found = self._backward(grad_out, query, key, value, out, logsumexp, None, None, None, options)
        return tuple([_like(x, y) for x, y in zip(found, (query, key, value), strict=True)])

    def cpu(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        attn_mask: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Any, Any]:
        """lse lies in memory as [batch, token, head], as torch's own."""
        _expect(dropout_p)
        o, lse = self._dense(query, key, value, attn_mask, "top_left" if is_causal else False, scale)
        return o, lse.transpose(1, 2).contiguous().transpose(1, 2)

    def cpu_backward(
        self,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        dropout_p: float,
        is_causal: bool,
        *,
        attn_mask: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        """Gradients lie in memory as [batch, token, head, dim], as torch's own."""
        options = self._options(query, "top_left" if is_causal else False, scale, "bshd")
        do, q, k, v, o = _swap(grad_out, query, key, value, out)
        return _swap(*self._backward(do, q, k, v, o, logsumexp, attn_mask, None, None, options))

    def _flash_options(
        self, q: torch.Tensor, cu: Any, max_q: int, max_k: int, is_causal: bool, scale: float | None, sides: Any
    ) -> Options:
        """Causal masks and windows are aligned bottom-right; a window's right side is the diagonal of a causal mask."""
        left, right = (-1 if side is None else side for side in sides)
        window = (left, -1 if is_causal else right)
        windowed = window != (-1, -1)
        options = self._options(
            q,
            "bottom_right" if is_causal else False,
            scale,
            "bshd",
            window=window if windowed else None,
            alignment="bottom_right" if windowed and not is_causal else None,
        )
        return options if cu is None else options._replace(layout="thd", max_seqlen_q=max_q, max_seqlen_k=max_k)

    def flash(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cum_seq_q: torch.Tensor | None,
        cum_seq_k: torch.Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        num_splits: int | None = None,
        **others: Any,
    ) -> tuple[Any, ...]:
        """[batch, token, head, dim], or packed [token, head, dim]. num_splits says how, not what."""
        _expect(dropout_p, return_debug_mask, **others)
        sides = window_size_left, window_size_right
        options = self._flash_options(query, cum_seq_q, max_q, max_k, is_causal, scale, sides)
        o, lse = self._forward(query, key, value, None, cum_seq_q, cum_seq_k, options)
        return _like(o, query), lse, *_no_randomness(query)

    def flash_backward(
        self,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        cum_seq_q: torch.Tensor | None,
        cum_seq_k: torch.Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        rng_state: Any,
        unused: Any,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
    ) -> tuple[Any, ...]:
        sides = window_size_left, window_size_right
        options = self._flash_options(query, cum_seq_q, max_q, max_k, is_causal, scale, sides)
        x = grad_out, query, key, value, out, logsumexp
        found = self._backward(*x, None, cum_seq_q, cum_seq_k, options)
        return tuple([_like(x, y) for x, y in zip(found, (query, key, value), strict=True)])


def _no_randomness(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What torch wants to know of dropout: a seed, an offset, the weights."""
    seed, offset = (torch.empty(shape, dtype=torch.uint64, device=q.device) for shape in ((2,), ()))
    return seed, offset, q.new_empty(0)
