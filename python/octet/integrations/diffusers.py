"""octet as an attention backend of diffusers.

    from octet.integrations import diffusers
    diffusers.register()
    pipe.transformer.set_attention_backend("octet_int8")

"octet" is the precision of the model's own type; "octet_bf16", "octet_int8" and so on are precisions of octet.
diffusers keeps its backends in a closed enumeration, which `register` extends; a test pins what it relies on.
"""

from collections.abc import Callable
from typing import Any

import torch

from octet._options import Precision
from octet._refusals import expect, expect_absent
from octet.integrations import NAMES
from octet.torch.sdpa import sdpa


def register() -> list[str]:
    """Adds octet's backends; returns their names."""
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    for name, precision in NAMES.items():
        member = _member(AttentionBackendName, name)
        _AttentionBackendRegistry.register(member)(_backend(precision))
    return list(NAMES)


def _member(names: Any, value: str) -> Any:
    """The member of the enumeration with this value, made if it is not there."""
    if value not in names._value2member_map_:
        member = str.__new__(names, value)
        member._name_, member._value_ = value.upper(), value
        names._member_map_[member._name_] = names._value2member_map_[value] = member
        names._member_names_.append(member._name_)
    return names(value)


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
    ) -> torch.Tensor:
        """o of query, key, value, all [batch, token, head, dim]; a mask [batch, keys] is one for each batch element."""
        expect("return_lse", return_lse, (False,), "call octet.attention with return_lse")
        expect_absent("_parallel_config", _parallel_config, "use the backend 'native' for context parallelism")
        if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
            attn_mask = attn_mask[:, None, None]
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        o = sdpa(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa, precision=precision)
        return o.transpose(1, 2)

    return octet_attention
