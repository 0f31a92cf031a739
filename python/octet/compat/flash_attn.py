"""The functions of flash-attn 2, computed by octet. Tensors are [batch, token, head, dim] or packed [token, head, dim];
causal masks and windows are aligned bottom-right; lse is natural, [batch, head, token] or [head, token].

`precision` is octet's own keyword, as in `octet.attention`.
"""

from typing import Any

import torch

from octet import _api
from octet._options import Precision
from octet._refusals import expect, expect_absent, expect_known, expect_no_dropout


def _keywords(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Any,
    deterministic: bool,
    precision: Precision | None,
) -> dict[str, Any]:
    """The same in the keywords of octet.attention."""
    expect_no_dropout(dropout_p)
    expect_absent("alibi_slopes", alibi_slopes, "add slope * distance to the logits by octet.attention(mask=...)")
    expect("softcap", softcap, (0.0,), "octet does not cap logits; use flash-attn itself for this model")
    left, right = window_size
    # A causal mask ends at the diagonal, whatever the window's right side.
    window = (left, -1 if causal else right)
    windowed = window != (-1, -1)
    return {
        "scale": softmax_scale,
        "causal": "bottom_right" if causal else False,
        "window": window if windowed else None,
        "alignment": "bottom_right" if windowed and not causal else None,
        "deterministic": deterministic or None,  # False leaves it to torch, as ever
        "precision": precision,
    }


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    precision: Precision | None = None,
    **unknown: object,
) -> Any:
    """Attention of q [batch, queries, heads, dim] over k, v [batch, keys, kv_heads, dim].

    Returns:
        o [batch, queries, heads, dim]; with return_attn_probs (o, lse, None), as nothing is dropped.

    Raises:
        Unsupported: dropout_p, softcap, alibi_slopes other than their defaults.
        TypeError: an unknown keyword.
    """
    expect_known(flash_attn_func, unknown)
    keywords = _keywords(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, precision)
    o, lse = _api.attention(q, k, v, layout="bshd", return_lse=True, **keywords)
    return (o, lse, None) if return_attn_probs else o


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    precision: Precision | None = None,
    **unknown: object,
) -> Any:
    """Attention within packed sequences: q [total queries, heads, dim], k, v [total keys, kv_heads, dim].

    Returns:
        o [total queries, heads, dim]; with return_attn_probs (o, lse, None).

    Raises:
        Unsupported: dropout_p, softcap, alibi_slopes, block_table other than their defaults.
        TypeError: an unknown keyword.
    """
    expect_known(flash_attn_varlen_func, unknown)
    expect_absent("block_table", block_table, "octet reads no paged cache; gather the pages first")
    keywords = _keywords(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, precision)
    o, lse = _api.attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        return_lse=True,
        **keywords,
    )
    return (o, lse, None) if return_attn_probs else o
