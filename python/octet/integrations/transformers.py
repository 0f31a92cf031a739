"""octet as an attention implementation of transformers.

    from octet.integrations import transformers
    transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="octet_int8")

"octet" is the precision of the model's own type; "octet_bf16", "octet_int8" and so on are precisions of octet. Masks
are those of "sdpa": True where a key is seen.
"""

from collections.abc import Callable
from typing import Any

import torch

from octet import _api
from octet._options import Precision
from octet._refusals import expect, expect_absent
from octet.integrations import NAMES


def register() -> list[str]:
    """Adds octet's implementations and their mask functions; returns the names."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    for name, precision in NAMES.items():
        AttentionInterface.register(name, _implementation(precision))
        AttentionMaskInterface.register(name, sdpa_mask)
    return list(NAMES)


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
        position_bias: torch.Tensor | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        output_attentions: bool | None = None,
        **rest: Any,
    ) -> tuple[torch.Tensor, None]:
        """(o [batch, token, head, dim], no weights) of query, key, value [batch, head, token, dim].

        `rest` holds what transformers passes to every implementation, positions and caches among it; sliding windows
        are in the mask.
        """
        expect("dropout", dropout or 0, (0,), "set attention_dropout=0.0 in the configuration")
        other = "use attn_implementation='eager' for this model"
        expect_absent("position_bias", position_bias, "use attn_implementation='sdpa' for this model")
        expect_absent("softcap", softcap, other)
        expect_absent("s_aux", s_aux, f"octet has no attention sinks; {other}")
        expect("output_attentions", bool(output_attentions), (False,), f"octet keeps no weights; {other}")
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        causal = query.shape[2] > 1 and attention_mask is None and causal
        o = _api.attention(
            *(x.transpose(1, 2) for x in (query, key, value)),
            mask=attention_mask,
            causal="top_left" if causal else False,
            scale=scaling,
            precision=precision,
            layout="bshd",
        )
        return o, None

    return octet_attention_forward
