"""octet as the flash attention of torch's own scaled_dot_product_attention.

    from octet.integrations import torch as octet_in_torch
    octet_in_torch.register()
    torch.nn.attention.activate_flash_attention_impl("octet_bf16")

torch decides which calls of scaled_dot_product_attention are for flash attention (on a GPU those without a mask, in
f16 and bf16); they, torch.nn.attention.varlen and ring attention then run octet's kernels. `octet.patch_sdpa` has
forward-mode derivatives and a fall-back besides.

torch's operators hand o and lse from the forward to the backward pass, but 16-bit gradients without rounding bias also
need o_residual. It travels on the storage of lse (`_keep`) and lives as long as that. Where the backward pass does not
find it, it computes the forward pass again (`_recompute`).
"""

import functools
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import attention

from octet._operands import INPUTS, Operands, inputs_of, operands_of
from octet._options import Options, Precision, bottom_right, options_of
from octet._rejections import expect, expect_absent, expect_no_dropout
from octet._results import needs_residual
from octet.errors import Unsupported
from octet.integrations import NAMES
from octet.torch import _passes
from octet.torch._adapter import adapter, expect_backward


def register() -> list[str]:
    """Adds octet's implementations to torch.nn.attention; returns their names. None is active before
    `activate_flash_attention_impl`.
    """
    for name, precision in NAMES.items():
        attention.register_flash_attention_impl(name, register_fn=functools.partial(_Active, precision))
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


class _Kept:
    """The results of a forward pass beside o and lse: o_residual, or None, and the storage that o has."""

    def __init__(self, o: torch.Tensor, r: torch.Tensor | None) -> None:
        self.r = r
        self._o = StorageWeakRef(o.untyped_storage())  # while it is held, no other storage gets the same identity

    def belongs_to(self, o: torch.Tensor) -> bool:
        return o.untyped_storage()._cdata == self._o.cdata


def _keep(o: torch.Tensor, lse: torch.Tensor, r: torch.Tensor | None) -> None:
    """torch keeps the Python object of a storage, with its attributes, as long as the storage: whoever has lse finds r
    there, and with the last tensor over lse's memory r is freed too."""
    lse.untyped_storage()._octet_kept = _Kept(o, r)  # type: ignore[attr-defined]


def _kept(o: torch.Tensor, lse: torch.Tensor) -> _Kept | None:
    """Returns what was kept with o and lse if they are those that the forward pass made: not copies, as hooks of saved
    tensors make them, not merged with those of other keys, as in ring attention, and not written since."""
    kept = getattr(lse.untyped_storage(), "_octet_kept", None)
    return kept if kept and kept.belongs_to(o) and o._version == lse._version == 0 else None


def _recompute(operands: Operands, options: Options) -> tuple[torch.Tensor, Options]:
    """o_residual, and how the backward pass goes on with it.

    In rows whose lse is not that of the forward pass, o and lse are merged from several passes, as in ring attention:
    their residual is 0. There, rows of ds do not sum to 0, so that no mean may be subtracted from k: exact_delta.
    """
    _, lse, r = _passes.run("forward", inputs_of("forward", operands), options, True)
    same = lse == operands["lse"]
    rows = (same if options.layout == "bhsd" else same.transpose(-1, -2)).unsqueeze(-1)
    return torch.where(rows, r, 0), options._replace(bias_correction="exact_delta")


def _in_order(x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """x, its axes in memory in `order`."""
    y = x.permute(order)
    return x if y.is_contiguous() else torch.empty_permuted(x.shape, order, dtype=x.dtype, device=x.device).copy_(x)


def _expect(dropout_p: float, return_debug_mask: bool = False, **others: Any) -> None:
    expect_no_dropout(dropout_p)
    own = "torch.nn.attention.restore_flash_attention_impl brings back torch's own"
    expect("return_debug_mask", return_debug_mask, (False,), f"octet keeps no weights; {own}")
    for name, found in others.items():
        expect_absent(name, found, own)


def _of_backward(*tensors: torch.Tensor) -> Operands:
    """The operands of a backward pass of do, q, k, v, o and lse."""
    return dict(zip(INPUTS["backward"], tensors, strict=False))


class _Kernels:
    """The operators of aten, at a precision."""

    def __init__(self, precision: Precision | None) -> None:
        self._precision = precision

    def _options(self, q: torch.Tensor, scale: float | None, **more: Any) -> Options:
        own = adapter.dtype_name(q.dtype, "query")
        return options_of(own, precision=self._precision, scale=scale, **more)

    def _forward(
        self, operands: Operands, options: Options, lse_order: tuple[int, ...] | None = None
    ) -> tuple[Any, Any]:
        """(o, lse), o in q's memory order; with what the backward pass needs, where one may follow. Compiled code and
        checkpoints run their forward passes without gradients."""
        if torch.is_grad_enabled():
            trains = any([operands[name].requires_grad for name in ("q", "k", "v")])
            if trains:
                expect_backward(options, operands)
        else:
            trains = not torch.is_inference_mode_enabled()
        residual = trains and needs_residual(adapter, options, operands["q"])
        o, lse, r = _passes.run("forward", operands, options, residual)
        if lse_order:
            lse = _in_order(lse, lse_order)
        if trains:
            _keep(o, lse, r if residual else None)
        return o, lse

    def _backward(self, operands: Operands, options: Options) -> tuple[Any, Any, Any]:
        """Gradients in the memory orders of q, k and v, of the inputs of the pass but for o_residual."""
        q, o, lse = (operands[name] for name in ("q", "o", "lse"))
        r = q.new_empty(0)
        with torch.no_grad():
            kept = _kept(o, lse)
            if kept is None and options.precision in ("int8", "fp8"):
                raise Unsupported(
                    f"logsumexp: not of this forward pass, from which precision {options.precision!r} takes its "
                    "gradients, but a copy or merged from several passes (hooks of saved tensors, ring attention, "
                    "CUDA graphs of torch.compile), allowed there: 'octet_f32', 'octet_f16', 'octet_bf16', "
                    "'octet_sagebwd'"
                )
            if needs_residual(adapter, options, q):
                if kept is None or kept.r is None:
                    r, options = _recompute(operands, options)
                else:
                    r = kept.r
            given = operands | {"lse": lse.contiguous(), "o_residual": r}
            dq, dk, dv, *_ = _passes.run("backward", given, options)
        return dq, dk, dv

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
        """Causal masks are aligned bottom-right, as flash attention's are: scaled_dot_product_attention comes here with
        as many queries as keys, a CausalBias with any number."""
        _expect(dropout_p, return_debug_mask)
        options = self._options(query, scale, causal="bottom_right" if is_causal else False)
        o, lse = self._forward({"q": query, "k": key, "v": value}, options)
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
        options = self._options(query, scale, causal="bottom_right" if is_causal else False)
        return self._backward(_of_backward(grad_out, query, key, value, out, logsumexp), options)

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
        options = self._options(query, scale, causal="top_left" if is_causal else False)
        operands = operands_of(q=query, k=key, v=value, mask=attn_mask)
        return self._forward(operands, options, lse_order=(0, 2, 1))

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
        options = self._options(query, scale, causal="top_left" if is_causal else False)
        operands = _of_backward(grad_out, query, key, value, out, logsumexp) | operands_of(mask=attn_mask)
        return tuple([_in_order(dx, (0, 2, 1, 3)) for dx in self._backward(operands, options)])

    def _flash_options(
        self, q: torch.Tensor, cu: Any, max_q: int, max_k: int, is_causal: bool, scale: float | None, sides: Any
    ) -> Options:
        left, right = (-1 if side is None else side for side in sides)
        options = self._options(q, scale, layout="bshd", **bottom_right(is_causal, left, right))
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
        operands = operands_of(q=query, k=key, v=value, cu_seqlens_q=cum_seq_q, cu_seqlens_k=cum_seq_k)
        o, lse = self._forward(operands, options)
        return o, lse, *_no_randomness(query)

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
        operands = _of_backward(grad_out, query, key, value, out, logsumexp)
        return self._backward(operands | operands_of(cu_seqlens_q=cum_seq_q, cu_seqlens_k=cum_seq_k), options)


def _no_randomness(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns what torch's operators return about dropout, which octet has not: a seed, an offset, the weights."""
    seed, offset = (torch.empty(shape, dtype=torch.uint64, device=q.device) for shape in ((2,), ()))
    return seed, offset, q.new_empty(0)
