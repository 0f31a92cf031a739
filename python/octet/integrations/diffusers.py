"""octet as an attention backend of diffusers.

    from octet.integrations import diffusers
    diffusers.register()
    pipe.transformer.set_attention_backend("octet_int8")

"octet" is the precision of the model's own type; "octet_bf16", "octet_int8" and so on are precisions of octet.
diffusers keeps its backends in a closed enumeration, which `register` extends; a test pins what it relies on.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from octet import _api
from octet._options import AttentionOptions, Precision
from octet._rejections import expect_no_dropout
from octet._versions import expect_version
from octet.errors import InvalidArgument, Unsupported, listing
from octet.integrations import NAMES, expect_name
from octet.torch.sdpa import sdpa


def register() -> list[str]:
    """Adds octet's backends; returns their names.

    From then on `set_attention_backend` of a model rejects these names where none of the model's attention asks for
    its backend, and warns where only a part does.

    Raises:
        Unsupported: this version of diffusers is none of those that octet works with.
    """
    import diffusers

    expect_version("diffusers", diffusers.__version__)
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    for name, precision in NAMES.items():
        member = _member(AttentionBackendName, name)
        _AttentionBackendRegistry.register(member, supports_context_parallel=True)(_backend(precision))
    _check_models()
    return list(NAMES)


def _member(names: Any, value: str) -> Any:
    """The member of the enumeration with this value, made if it is not there."""
    if value not in names._value2member_map_:
        member = str.__new__(names, value)
        member._name_, member._value_ = value.upper(), value
        names._member_map_[member._name_] = names._value2member_map_[value] = member
        names._member_names_.append(member._name_)
    return names(value)


def _check_models() -> None:
    """Has `set_attention_backend` say which attention modules will not follow it: it passes over them in silence."""
    from diffusers import ModelMixin
    from diffusers.models.attention import AttentionModuleMixin
    from diffusers.models.attention_processor import Attention, MochiAttention

    own = ModelMixin.set_attention_backend
    if hasattr(own, "__wrapped__"):
        return

    @functools.wraps(own)
    def set_attention_backend(self: Any, backend: str) -> None:
        expect_name("backend", backend.lower())
        if backend.lower() in NAMES:
            modules = [x for x in self.modules() if isinstance(x, (Attention, MochiAttention, AttentionModuleMixin))]
            others = [x for x in modules if not hasattr(x.processor, "_attention_backend")]
            names = listing(sorted({type(x.processor).__name__ for x in others}))
            instead = "call the model inside octet.patch_sdpa() instead"
            if len(others) == len(modules):
                raise Unsupported(
                    f"backend: found {backend!r}, but no attention of {type(self).__name__} asks for its backend "
                    f"(processors: {names or 'none'}); {instead}"
                )
            if others:
                warnings.warn(
                    f"{len(others)} of {len(modules)} attention modules of {type(self).__name__} do not follow the "
                    f"backend {backend!r} (processors: {names}); for these {instead}",
                    stacklevel=2,
                )
        own(self, backend)

    ModelMixin.set_attention_backend = set_attention_backend


def _backend(precision: Precision | None) -> Callable:
    def octet_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: Any | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """o of query, key, value, all [batch, token, head, dim]; with return_lse (o, lse [batch, token, head]).

        A mask [batch, keys] is one for each batch element. With _parallel_config the tokens are spread over the
        processes of its mesh, as diffusers' context parallelism does it; lse then has no gradient.
        """
        given = query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse
        if _parallel_config is not None:
            return _in_parallel(precision, given, _parallel_config)
        if return_lse:
            return _with_lse(precision, given[:3], given[3:8])
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        mask = _mask(attn_mask, query, key)
        o = sdpa(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa, precision=precision)
        return o.transpose(1, 2)

    return octet_attention


def _mask(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    return mask[:, None, None] if mask is not None and mask.shape == (query.shape[0], key.shape[1]) else mask


def _with_lse(
    precision: Precision | None,
    tensors: Sequence[torch.Tensor],
    how: tuple[torch.Tensor | None, float, bool, float | None, bool],
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o [batch, token, head, dim], lse [batch, token, head]) of query, key, value and the arguments that follow."""
    query, key, value = tensors
    attn_mask, dropout_p, is_causal, scale, enable_gqa = how
    expect_no_dropout(dropout_p)
    if is_causal and attn_mask is not None:
        raise InvalidArgument("attn_mask: given together with is_causal; put the causal mask into attn_mask")
    if query.shape[2] != key.shape[2] and not enable_gqa:
        raise InvalidArgument(
            f"enable_gqa: found False with {query.shape[2]} heads of query and {key.shape[2]} of key, allowed: True"
        )
    options: AttentionOptions = {
        "causal": "top_left" if is_causal else False,
        "scale": scale,
        "precision": precision,
        "layout": "bshd",
        "enable_gqa": True,
    }
    o, lse = _api.attention(query, key, value, mask=_mask(attn_mask, query, key), return_lse=True, **options)
    return o, lse.transpose(1, 2)


def _in_parallel(precision: Precision | None, given: tuple, config: Any) -> Any:
    """Attention of tokens that are spread over processes; diffusers exchanges them, octet computes."""
    from diffusers.models.attention_dispatch import _templated_context_parallel_attention

    query, key, _, attn_mask, *_, return_lse = given
    if attn_mask is not None and config.context_parallel_config.ring_degree > 1:
        raise Unsupported(
            f"attn_mask: found an array of shape {list(attn_mask.shape)} with ring attention, allowed: None; diffusers "
            "would apply it to the keys of every process alike; use ulysses_degree"
        )
    found = _templated_context_parallel_attention(
        *given,
        forward_op=functools.partial(_forward_op, precision),
        backward_op=functools.partial(_backward_op, precision),
        _parallel_config=config,
    )
    if return_lse and found[1].requires_grad:
        found[1].register_hook(_reject_gradient_of_lse)
    return found


def _reject_gradient_of_lse(gradient: torch.Tensor | None) -> None:
    if gradient is not None and bool(gradient.any()):
        raise Unsupported("return_lse: diffusers' context parallelism drops the gradient of lse; detach lse")


def _forward_op(
    precision: Precision | None,
    ctx: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _save_ctx: bool = True,
    _parallel_config: Any | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The forward pass that diffusers' templates call. It keeps octet's graph for the backward pass, but in ring
    attention, which asks again for each part of the keys, only the operands."""
    how = attn_mask, dropout_p, is_causal, scale, enable_gqa
    ring = _parallel_config is not None and _parallel_config.context_parallel_config.ring_degree > 1
    differentiates = _save_ctx and any(ctx.needs_input_grad)
    if differentiates:
        ctx.save_for_backward(query, key, value)
        ctx.octet_how, ctx.octet_graph = how, None
    with torch.set_grad_enabled(differentiates and not ring):
        leaves = [x.detach().requires_grad_(torch.is_grad_enabled()) for x in (query, key, value)]
        o, lse = _with_lse(precision, leaves, how)
    if o.requires_grad:
        ctx.octet_graph = leaves, o
    return (o.detach(), lse.detach()) if return_lse else o.detach()


def _backward_op(
    precision: Precision | None,
    ctx: Any,
    grad_out: torch.Tensor,
    *args: Any,
    query: torch.Tensor | None = None,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    **unknown: Any,
) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv) for what `_forward_op` saved; with `out` and `lse`, those of all keys, the part that a part of the
    keys contributes to them.

    With o_part and lse_part of those keys alone, out = sum over parts of w o_part with w = exp(lse_part - lse). So the
    gradient of o_part is w do, and that of lse_part is w do (o_part - out).
    """
    if out is None or lse is None:
        leaves, o = ctx.octet_graph
        return torch.autograd.grad(o, leaves, grad_out)
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]  # type: ignore[union-attr]
        o_part, lse_part = _with_lse(precision, leaves, ctx.octet_how)
    do_part = grad_out * (lse_part.detach() - lse).exp()[..., None].to(grad_out.dtype)
    dlse_part = (do_part.float() * (o_part.detach().float() - out.float())).sum(-1)
    return torch.autograd.grad((o_part, lse_part), leaves, (do_part, dlse_part))
