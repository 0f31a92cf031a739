"""octet.sdpa, in the place of torch.nn.functional.scaled_dot_product_attention: the same signature and semantics."""

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch

from octet import _abi, _api
from octet._options import AttentionOptions, Precision, count
from octet._refusals import expect_known, expect_no_dropout
from octet.errors import Error, InvalidArgument, listing, look_up
from octet.torch._again import again, keep


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    precision: Precision | None = None,
    **unknown: object,
) -> torch.Tensor:
    """Attention as scaled_dot_product_attention defines it.

    Args:
        query: [..., heads, queries, dim], or [queries, dim].
        key: [..., kv_heads, keys, dim]; its leading dimensions broadcast with those of query.
        value: [..., kv_heads, keys, dim_v].
        attn_mask: bool (True: takes part) or float (added to the scaled logits), broadcast to [..., heads, queries,
            keys]. Not together with is_causal. No gradient is computed for it.
        dropout_p: 0; anything else is refused.
        is_causal: query i sees keys up to i, also where the lengths differ.
        scale: None: 1 / sqrt(dim).
        enable_gqa: allows kv_heads to divide heads.
        precision: as in `octet.attention`.

    Returns:
        [..., heads, queries, dim_v] in query's type, contiguous. A query that sees no key gives 0.

    Raises:
        InvalidArgument, Unsupported: where octet cannot do what was asked; see `patch_sdpa` to fall back.
        TypeError: an unknown keyword.
    """
    expect_known(sdpa, unknown)
    how = "sdpa", is_causal, scale, enable_gqa, precision
    made = again(how, query, key, value) if attn_mask is None and not dropout_p else None
    if made is not None and made is not False:
        return made
    expect_no_dropout(dropout_p)
    if is_causal and attn_mask is not None:
        raise InvalidArgument("attn_mask: given together with is_causal; put the causal mask into attn_mask")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.is_nested or x.ndim < 2:
            found = "nested" if x.is_nested else f"{x.ndim} dimensions"
            raise InvalidArgument(
                f"{name}: found {found}, allowed: strided, [..., token, dim]; for packed sequences use "
                "octet.attention_varlen"
            )
    q, k, v, lead = query, key, value, query.shape[:1]
    if not (q.ndim == k.ndim == v.ndim == 4 and k.shape[:1] == lead == v.shape[:1]):
        lead = torch.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
        q, k, v = (_four_dimensions(x if x.ndim > 2 else x[None], lead) for x in (q, k, v))
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads != kv_heads and kv_heads != 1 and not enable_gqa:
        raise InvalidArgument(f"enable_gqa: False, but query has {heads} heads and key {kv_heads}; set it to True")
    if attn_mask is not None and attn_mask.ndim > 3:
        attn_mask = _four_dimensions(attn_mask, lead)
    keywords: AttentionOptions = {
        "causal": "top_left" if is_causal else False,
        "scale": scale,
        "precision": precision,
    }
    o, _ = _api.forward(q, k, v, attn_mask, keywords)
    if made is False and q is query and k is key and v is value:
        keep(how, q, k, v, o, keywords)
    if len(lead) == 1 and query.ndim > 2:
        return o
    return o.reshape(*lead, *((heads,) if query.ndim > 2 else ()), *o.shape[2:])


def _four_dimensions(x: torch.Tensor, lead: torch.Size) -> torch.Tensor:
    """Leading dimensions broadcast to `lead` and made one; a single one stays a view."""
    x = x.expand(*lead, *x.shape[-3:])
    return x if len(lead) == 1 else x.reshape(math.prod(lead), *x.shape[-3:])


@contextlib.contextmanager
def patch_sdpa(
    precision: Precision | None = None,
    *,
    min_seqlen: int = 0,
    fallback: Literal["error", "sdpa"] = "error",
) -> Iterator[None]:
    """While it lasts, torch.nn.functional.scaled_dot_product_attention is `octet.sdpa`.

    Args:
        precision: as in `octet.attention`.
        min_seqlen: calls with fewer keys go to torch's own.
        fallback: what to do with a call that octet refuses: "error" raises, "sdpa" warns once per reason and calls
            torch's own.

    A function that was imported by name before (from torch.nn.functional import scaled_dot_product_attention) keeps
    torch's own.
    """
    if fallback not in ("error", "sdpa"):
        raise InvalidArgument(f"fallback: found {fallback!r}, allowed: {listing(('error', 'sdpa'))}")
    if precision is not None:
        look_up("precision", precision, _abi.PRECISIONS)
    count("min_seqlen", min_seqlen, "a number of keys")
    own = torch.nn.functional.scaled_dot_product_attention
    torch.nn.functional.scaled_dot_product_attention = _patched(own, precision, min_seqlen, fallback == "sdpa")
    try:
        yield
    finally:
        torch.nn.functional.scaled_dot_product_attention = own


def _patched(own: Callable, precision: Precision | None, min_seqlen: int, falls_back: bool) -> Callable:
    warned: set[str] = set()

    @functools.wraps(sdpa)
    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        **unknown: Any,
    ) -> torch.Tensor:
        given: Any = (query, key, value, attn_mask, dropout_p, is_causal)
        if key.shape[-2] < min_seqlen:
            return own(*given, scale=scale, enable_gqa=enable_gqa)
        try:
            return sdpa(*given, scale=scale, enable_gqa=enable_gqa, precision=precision, **unknown)
        except Error as refusal:
            if not falls_back:
                raise
            if str(refusal) not in warned:
                warned.add(str(refusal))
                warnings.warn(f"octet leaves this call to torch: {refusal}", stacklevel=2)
        return own(*given, scale=scale, enable_gqa=enable_gqa)

    return scaled_dot_product_attention
