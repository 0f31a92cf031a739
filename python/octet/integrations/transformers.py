"""octet as an attention implementation of transformers.

    from octet.integrations import transformers
    transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="octet_int8")

"octet" is the precision of the model's own type; "octet_bf16", "octet_int8" and so on are precisions of octet. Padded
and packed batches go through octet.attention_varlen; docs/drop-ins.md says what happens to every mask and keyword.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from octet import _api
from octet._options import AttentionOptions, Precision, bottom_right
from octet._rejections import expect, expect_absent
from octet._versions import expect_version
from octet.errors import Unsupported
from octet.integrations import NAMES, _paged, expect_name
from octet.integrations._masks import Mask, hand_over_positions, mask_function
from octet.integrations._plans import Plan, beginnings, packed_plan
from octet.integrations._stored import Stored
from octet.integrations._stored import attention as attention_stored
from octet.torch._random import dropout as drawn_dropout

# Keywords that transformers passes to every attention implementation and that change nothing here, and why.
HARMLESS = {
    "logits_to_keep": "of the head of the model",
    "num_items_in_batch": "of the loss",
    "output_hidden_states": "of the model's outputs",
    "output_router_logits": "of the model's outputs",
    "past_key_values": "the module has put its keys and values into key and value",
    "position_embeddings": "the module has rotated query and key",
    "return_dict": "of the model's outputs",
    "use_cache": "the module keeps the cache",
}

# Others that are rejected, and what to do; keywords in neither are rejected too.
_ADVICE = {
    "indices": "octet has no sparse attention",
    "block_indices": "octet has no sparse attention",
    "sinks": "octet takes one sink for each head, as s_aux",
}


def register() -> list[str]:
    """Adds octet's implementations and their mask functions; returns the names.

    From then on a model that does not compute its attention through transformers' AttentionInterface rejects these
    names when it is made and in set_attn_implementation: transformers checks that for its own implementations only.

    Raises:
        Unsupported: this version of transformers is none of those that octet works with.
    """
    import transformers

    expect_version("transformers", transformers.__version__)
    from transformers import AttentionInterface, AttentionMaskInterface

    for name, precision in NAMES.items():
        AttentionInterface.register(name, _implementation(precision))
        AttentionMaskInterface.register(name, mask_function)
    _check_models()
    _paged.join_continuous_batching(lambda new, name: AttentionInterface.register(new, AttentionInterface()[name]))
    return list(NAMES)


def _check_models() -> None:
    """Has transformers ask `_expect_interface` wherever it decides on the implementation of a model, and hand the
    position ids to octet's masks."""
    from transformers import PreTrainedModel, masking_utils

    chosen, changed = PreTrainedModel.get_correct_attn_implementation, PreTrainedModel.set_attn_implementation
    if hasattr(chosen, "__wrapped__"):
        return

    @functools.wraps(chosen)
    def get_correct_attn_implementation(self: Any, requested_attention: Any, *args: Any, **keywords: Any) -> Any:
        _expect_interface(type(self), requested_attention)
        return chosen(self, requested_attention, *args, **keywords)

    @functools.wraps(changed)
    def set_attn_implementation(self: Any, attn_implementation: Any, *args: Any, **keywords: Any) -> None:
        requested = dict(_requested(self.config, attn_implementation))
        for model in self.modules():
            if isinstance(model, PreTrainedModel):
                _expect_interface(type(model), requested.get(id(model.config)))
        changed(self, attn_implementation, *args, **keywords)

    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation
    PreTrainedModel.set_attn_implementation = set_attn_implementation
    masking_utils._preprocess_mask_arguments = hand_over_positions(masking_utils._preprocess_mask_arguments)


def _requested(config: Any, implementation: Any) -> Iterator[tuple[int, Any]]:
    """The implementation that is asked for each configuration, by its id. A dict names those of the parts, "" the
    whole's."""
    named = isinstance(implementation, dict)
    yield id(config), implementation.get("") if named else implementation
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            yield from _requested(part, implementation.get(name) if named else implementation)


def _expect_interface(model: Any, implementation: Any) -> None:
    """Rejects models that would pass over octet and, with it, over the masks made for it."""
    if isinstance(implementation, str):
        expect_name("attn_implementation", implementation)
    if implementation not in NAMES:
        return
    found = f"attn_implementation: found {implementation!r}, but {model.__name__}"
    own = "'eager' or 'sdpa'" if model._supports_sdpa else "'eager'"
    if not model._can_set_attn_implementation():
        raise Unsupported(
            f"{found} computes attention by itself, not through transformers' AttentionInterface; allowed: {own} (of a "
            "model with several parts, name those that use octet by a dict)"
        )
    if not (model._supports_sdpa or model._supports_attention_backend or _has_no_attention(model)):
        raise Unsupported(
            f"{found} declares neither _supports_sdpa nor _supports_attention_backend: not all of its attention goes "
            f"through transformers' AttentionInterface; allowed: {own}"
        )


def _has_no_attention(model: Any) -> bool:
    """Returns whether a model has no attention of its own, like ResNet and models that are made of other models."""
    return not any("attention" in name.lower() for name in vars(sys.modules[model.__module__]))


def _implementation(precision: Precision | None) -> Callable:
    def octet_attention_forward(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        position_bias: torch.Tensor | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        output_attentions: bool | None = None,
        position_ids: torch.Tensor | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        cu_seq_lens_k: torch.Tensor | None = None,
        max_length_q: int | torch.Tensor | None = None,
        max_length_k: int | torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        deterministic: bool | None = None,
        **rest: Any,
    ) -> tuple[torch.Tensor, None]:
        """(o [batch, token, head, dim], no weights) of query, key, value [batch, head, token, dim].

        `rest` may hold the keywords of HARMLESS. Any other that is not None is rejected.
        """
        other = "use attn_implementation='eager' for this model"
        expect("output_attentions", bool(output_attentions), (False,), f"octet keeps no weights; {other}")
        is_paged = rest.get("write_index") is not None  # which continuous batching gives to all layers
        for name, x in rest.items():
            if name not in HARMLESS and not (is_paged and name in _paged.KEYWORDS):
                expect_absent(name, x, f"{_ADVICE.get(name, 'octet does not know this keyword')}; {other}")
        dropped: Any = drawn_dropout(dropout, query)
        options: AttentionOptions = {
            "scale": scaling, "precision": precision, "deterministic": deterministic, **dropped
        }  # fmt: skip
        if softcap is not None:
            options["softcap"] = softcap
        if s_aux is not None and s_aux.shape != query.shape[1:2]:
            raise Unsupported(
                f"s_aux: found an array of shape {list(s_aux.shape)}, "
                f"allowed: [{query.shape[1]}], one sink for each head"
            )

        if is_paged:
            _paged.expect_no_mask(attention_mask)
            batch = _paged.batch_of(module, key, value, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, rest)
            return _paged.attention(query, batch, s_aux, sliding_window, options).contiguous(), None
        dense: AttentionOptions = {**options, "layout": "bshd", "enable_gqa": True}
        if isinstance(attention_mask, Mask) and attention_mask.viewed:
            attention_mask = attention_mask.dense()
        plan = _plan(module, attention_mask, is_causal, query, key, position_ids)
        if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
            plan = _packed(plan, cu_seq_lens_q, cu_seq_lens_k, query, key)
        if plan is not None and sliding_window is not None:
            plan = _within(plan, sliding_window, query, key)
        if seq_idx is not None and (plan is None or plan.cu_seqlens_q is None):
            expect_absent("seq_idx", seq_idx, "a packed batch also needs cu_seq_lens_q and cu_seq_lens_k")
        if position_bias is not None:
            attention_mask, plan = _with_bias(position_bias, attention_mask, plan, query, key), None
        if isinstance(key, Stored) and isinstance(value, Stored):
            stored = attention_stored(query, key, value, plan, s_aux, options)
            if stored is not None:
                return stored.contiguous(), None
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        if plan is None:
            o = _api.attention(q, k, v, mask=attention_mask, sinks=s_aux, **dense)
        elif plan.cu_seqlens_q is not None:
            bounds = [n if isinstance(n, int) else 0 for n in (max_length_q, max_length_k)]
            o = _varlen(q, k, v, s_aux, plan, bounds, options)
        else:
            k, v = k[:, : plan.keys], v[:, : plan.keys]
            o = _api.attention(q, k, v, sinks=s_aux, **_positions(plan, dense))
        return o.contiguous(), None

    return octet_attention_forward


def _plan(
    module: torch.nn.Module,
    mask: torch.Tensor | None,
    is_causal: bool | None,
    query: torch.Tensor,
    key: torch.Tensor,
    position_ids: torch.Tensor | None,
) -> Plan | None:
    """How to run attention; None: with the mask as a tensor."""
    queries, keys = query.shape[2], key.shape[2]
    if isinstance(mask, Mask):
        if mask.shape[-1] != keys:
            raise Unsupported(f"attention_mask: found {mask.shape[-1]} keys, allowed: the {keys} of key")
        plan = mask.plan
    elif mask is not None:
        return None
    elif queries > 1 and _is_causal(module, is_causal, queries, keys):
        plan = Plan(True, None, queries)  # what transformers means by it: keys by their number from the first
    else:
        plan = Plan(False, None, keys)
    if isinstance(mask, Mask) and mask.follows_positions:
        return plan
    if plan.causal and plan.cu_seqlens_q is None and plan.keys == queries == keys and position_ids is not None:
        # transformers looks for packed sequences when it makes the mask, but some models do not give it the positions
        # (gpt-oss). Nothing of it is kept: a tensor may be written in ways that leave no trace.
        begins = None if torch.compiler.is_compiling() else beginnings(position_ids, query.shape[0], queries)
        if begins is not None:
            plan = packed_plan(begins, True, plan.window)
    return plan


def _is_causal(module: torch.nn.Module, is_causal: bool | None, queries: int, keys: int) -> bool:
    """Returns whether attention without a mask is causal: as the caller says, else as the module. A causal mask is left
    out only where there are as many keys as queries."""
    name = type(module).__name__
    if is_causal is not None:
        if is_causal and keys < queries:
            raise Unsupported(
                f"is_causal: found True with {queries} queries and {keys} keys, allowed: False, or at least as many "
                "keys as queries"
            )
        return is_causal
    if getattr(module, "is_cross_attention", False) or "CrossAttention" in name:
        return False
    own = getattr(module, "is_causal", None)
    if own is None:
        raise Unsupported(
            f"is_causal: found None, and {name} has no attribute is_causal, which would say how to attend without an "
            "attention_mask, allowed: True, False; pass is_causal or an attention_mask to the attention function, or "
            "set the attribute is_causal of the module"
        )
    if own and keys != queries:
        raise Unsupported(
            f"attention_mask: found None with {queries} queries and {keys} keys of {name}, a causal module, allowed: "
            "as many keys as queries, or an attention_mask; pass is_causal=False for cross-attention, is_causal=True "
            "if query i sees the keys up to i"
        )
    return bool(own)


def _packed(plan: Plan | None, cu_q: Any, cu_k: Any, query: torch.Tensor, key: torch.Tensor) -> Plan:
    """The plan of sequences whose lengths the caller names, in a batch that is one long row of tokens."""
    for name, x in (("cu_seq_lens_q", cu_q), ("cu_seq_lens_k", cu_k)):
        if x is None:
            raise Unsupported(
                f"{name}: found None, allowed: with the other of cu_seq_lens_q and cu_seq_lens_k, a tensor"
            )
    if plan is None or plan.cu_seqlens_q is not plan.cu_seqlens_k:
        raise Unsupported(
            "cu_seq_lens_q: found together with an attention_mask that hides tokens, allowed: one of the two; the "
            "tokens of a packed batch have no padding"
        )
    cu_q, cu_k = (x.to(query.device, torch.int32) for x in (cu_q, cu_k))
    return Plan(plan.causal, plan.window, key.shape[2], cu_q, cu_k)


def _within(plan: Plan, sliding_window: int, query: torch.Tensor, key: torch.Tensor) -> Plan:
    """The plan with the module's window, which the mask of the model usually has too."""
    if sliding_window < 1:
        raise Unsupported(f"sliding_window: found {sliding_window}, allowed: at least 1, or None")
    window = sliding_window - 1 if plan.window is None else min(plan.window, sliding_window - 1)
    if window >= key.shape[2] - 1 or window == plan.window:
        return plan
    if plan.index_k is not None and query.shape[2] > 1:
        raise Unsupported(
            f"sliding_window: found {sliding_window} with a mask that has no window and hides tokens between others, "
            "allowed: None; pad on one side only"
        )
    return plan._replace(window=window)


def _with_bias(
    bias: torch.Tensor, mask: torch.Tensor | None, plan: Plan | None, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor:
    """The float mask that adds a bias [batch or 1, heads or 1, queries, keys] to the logits, under the other mask."""
    queries, keys = query.shape[2], key.shape[2]
    if plan is not None and (plan.window is not None or (plan.cu_seqlens_q is not None and not isinstance(mask, Mask))):
        raise Unsupported(
            "position_bias: found together with a window or packed sequences, allowed: None there; use "
            "attn_implementation='sdpa' for this model"
        )
    bias = bias[..., :keys]
    if isinstance(mask, Mask):
        mask = None if mask.plan == Plan(False, None, keys) else mask.dense()
    elif mask is None and plan is not None and plan.causal:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril()
    if mask is None:
        return bias
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else bias + mask


def _positions(plan: Plan, options: AttentionOptions) -> AttentionOptions:
    """The options with those of the plan; the last query is aligned with the last key."""
    side = -1 if plan.window is None else plan.window
    return {**options, **bottom_right(plan.causal, side, side)}


def _varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    plan: Plan,
    bounds: list[int],
    options: AttentionOptions,
) -> torch.Tensor:
    """o [batch, token, head, dim] of tensors likewise, zero for queries that the plan leaves out."""

    def tokens(x: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
        return x.flatten(0, 1) if index is None else x.flatten(0, 1).index_select(0, index)

    cu_q, cu_k = plan.cu_seqlens_q, plan.cu_seqlens_k
    if cu_k is not None and cu_k is cu_q:
        cu_k = cu_k[:]  # torch.compile breaks its graph at a function that is given a tensor twice
    o = _api.attention_varlen(
        tokens(q, plan.index_q),
        tokens(k, plan.index_k),
        tokens(v, plan.index_k),
        cu_q,
        cu_k,
        sinks=sinks,
        max_seqlen_q=bounds[0],
        max_seqlen_k=bounds[1],
        **_positions(plan, options),
    )
    if plan.index_q is not None:
        o = o.new_zeros(q.shape[0] * q.shape[1], *o.shape[1:]).index_copy(0, plan.index_q, o)
    return o.unflatten(0, q.shape[:2])
