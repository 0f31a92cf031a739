"""The functions of flash-attn 2, computed by octet, with the signatures of its versions 2.6 to 2.8.

Tensors are [batch, token, head, dim] or packed sequences [token, head, dim]; causal masks and windows are aligned
bottom-right; lse is natural, [batch, head, token] or [head, token], and differentiable. `qkv` and `kv` stack q, k, v or
k, v before the head dimension; their gradients are one tensor each.

With return_attn_probs and dropout, S_dmask [batch, head, query, key] has the probabilities, negative where they are
dropped; it takes their memory and two calls for each 256 keys. Without dropout, where flash-attn's is an empty tensor,
it is None.
`precision` is octet's own keyword, as in `octet.attention`.
"""

import operator
from typing import Any

import torch

from octet import _api, _caches
from octet._operands import KINDS
from octet._options import Precision, bottom_right, count, integer
from octet._rejections import expect_known
from octet.compat import _probabilities, _stacked
from octet.errors import InvalidArgument, Unsupported
from octet.torch._random import dropout


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
    try:
        sides = [integer(side) for side in window_size]
        if any(isinstance(side, bool) for side in sides):
            raise TypeError
        left, right = map(operator.index, sides)
    except (TypeError, ValueError):
        allowed = "(left, right), whole numbers of keys, -1: all of a side"
        raise InvalidArgument(f"window_size: found {window_size!r}, allowed: {allowed}") from None
    return {
        "scale": softmax_scale,
        "softcap": softcap,
        **bottom_right(causal, left, right),
        "deterministic": deterministic or None,  # False leaves it to torch, as ever
        "precision": precision,
        **({"dropout_p": dropout_p} if dropout_p else {}),
        **({} if alibi_slopes is None else {"alibi_slopes": alibi_slopes}),
    }


def _unstacked(name: str, x: torch.Tensor, count: int, shape: str) -> tuple[torch.Tensor, ...]:
    """The `count` tensors that x stacks before its last two dimensions, as views."""
    if not isinstance(x, torch.Tensor):
        raise InvalidArgument(f"{name}: found {type(x).__name__}, allowed: torch.Tensor")
    if x.ndim != shape.count(",") + 1 or x.shape[-3] != count:
        raise InvalidArgument(f"{name}: shape {list(x.shape)}, expected {shape}")
    return x.unbind(-3)


def _attend(
    tensors: tuple[torch.Tensor, ...],
    lse: bool,
    keywords: dict[str, Any],
    stacked: torch.Tensor | None = None,
    lengths: tuple[torch.Tensor, torch.Tensor, int, int] | None = None,
) -> Any:
    """Attention of q, k and v. `stacked`: the tensor that k and v, or all of them, are views of; `lengths`: cu_seqlens
    and their bounds, of packed sequences."""
    q, k, v = tensors
    keywords |= dropout(keywords.get("dropout_p"), q)

    def attend(v: torch.Tensor, keywords: dict[str, Any], lse: bool = False) -> Any:
        if lengths is None:
            return _api.attention(q, k, v, layout="bshd", return_lse=lse, enable_gqa=True, **keywords)
        bounds: dict[str, Any] = {"max_seqlen_q": lengths[2], "max_seqlen_k": lengths[3]}
        return _api.attention_varlen(q, k, v, lengths[0], lengths[1], return_lse=lse, **bounds, **keywords)

    if stacked is not None and KINDS.keys().isdisjoint(keywords) and _stacked.writes_one_gradient(stacked, q):
        made = _stacked.attend(stacked, q, lengths, lse, keywords)
    else:
        made = attend(v, keywords, lse)
    if not lse:
        return made
    return (*made, _probabilities.signed(attend, k, lengths, keywords) if "dropout_p" in keywords else None)


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
        o [batch, queries, heads, dim]; with return_attn_probs (o, lse, S_dmask), lse float32 [batch, heads, queries].

    Raises:
        Unsupported: on a GPU, in some precisions of 8 bits, a dropout_p other than 0.
        InvalidArgument: shapes and types as `octet.attention` rejects them.
        TypeError: an unknown keyword.
    """
    expect_known(flash_attn_func, unknown)
    keywords = _keywords(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, precision)
    return _attend((q, k, v), return_attn_probs, keywords)


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
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
    """`flash_attn_func` of q [batch, queries, heads, dim] and kv [batch, keys, 2, kv_heads, dim], k before v.

    Returns and raises what `flash_attn_func` does. The gradient of kv is one tensor of its shape.
    """
    expect_known(flash_attn_kvpacked_func, unknown)
    keywords = _keywords(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, precision)
    tensors = q, *_unstacked("kv", kv, 2, "[batch, token, 2, head, dim]")
    return _attend(tensors, return_attn_probs, keywords, kv)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
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
    """`flash_attn_func` of qkv [batch, tokens, 3, heads, dim], q, k, v in this order.

    Returns and raises what `flash_attn_func` does. The gradient of qkv is one tensor of its shape.
    """
    expect_known(flash_attn_qkvpacked_func, unknown)
    keywords = _keywords(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, precision)
    tensors = _unstacked("qkv", qkv, 3, "[batch, token, 3, head, dim]")
    return _attend(tensors, return_attn_probs, keywords, qkv)


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

    Args:
        cu_seqlens_q, cu_seqlens_k: int32 [sequences + 1], where each sequence begins, and the total. Their values are
            checked on the CPU, and on a GPU not: see `octet.attention_varlen`.
        max_seqlen_q, max_seqlen_k: bounds on the lengths.
        block_table: int32 [sequences, pages of the longest]: k and v lie in pages, [pages, page_size, kv_heads, dim],
            where page_size is a power of two from 16 on; cu_seqlens_k has the lengths alone.

    Returns:
        o [total queries, heads, dim]; with return_attn_probs (o, lse, S_dmask), lse float32 [heads, total queries],
        S_dmask with zeros behind each sequence.

    Raises:
        Unsupported: with a block_table, dropout and tensors that require a gradient; on a GPU, in some precisions of 8
            bits, a dropout_p other than 0.
        InvalidArgument: shapes and types as `octet.attention_varlen` rejects them.
        TypeError: an unknown keyword.
    """
    expect_known(flash_attn_varlen_func, unknown)
    keywords = _keywords(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, precision)
    if block_table is not None:
        if dropout_p:
            raise Unsupported(
                f"dropout_p: found {dropout_p} with a block_table, allowed: 0; there is no dropout in caches"
            )
        keywords |= {"block_table": block_table, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
        how: dict[str, Any] = {"cu_seqlens_q": cu_seqlens_q, "return_lse": return_attn_probs}
        made = _caches.attention_cached(q, k, v, cu_seqlens_k.diff(), **how, **keywords)
        return (*made, None) if return_attn_probs else made
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return _attend((q, k, v), return_attn_probs, keywords, lengths=lengths)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
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
    *,
    precision: Precision | None = None,
    **unknown: object,
) -> Any:
    """`flash_attn_varlen_func` of q [total queries, heads, dim] and kv [total keys, 2, kv_heads, dim], k before v.

    Returns and raises what `flash_attn_varlen_func` does. The gradient of kv is one tensor of its shape.
    """
    expect_known(flash_attn_varlen_kvpacked_func, unknown)
    keywords = _keywords(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, precision)
    tensors = q, *_unstacked("kv", kv, 2, "[token, 2, head, dim]")
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return _attend(tensors, return_attn_probs, keywords, kv, lengths)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
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
    """`flash_attn_varlen_func` of qkv [total tokens, 3, heads, dim], q, k, v in this order.

    Returns and raises what `flash_attn_varlen_func` does. The gradient of qkv is one tensor of its shape.
    """
    expect_known(flash_attn_varlen_qkvpacked_func, unknown)
    keywords = _keywords(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, precision)
    tensors = _unstacked("qkv", qkv, 3, "[token, 3, head, dim]")
    lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return _attend(tensors, return_attn_probs, keywords, qkv, lengths)


def _behind(cache: torch.Tensor, leftpad: torch.Tensor, elements: torch.Tensor | None) -> torch.Tensor:
    """The tokens of each sequence from its leftpad on, and behind them any."""
    tokens = torch.arange(cache.shape[1], device=cache.device) + leftpad[:, None]
    if elements is None:
        elements = torch.arange(len(leftpad), device=cache.device)
    return cache[elements[:, None], tokens.clamp(max=cache.shape[1] - 1)]


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    precision: Precision | None = None,
    **unknown: object,
) -> Any:
    """Attention over a KV cache, to which k and v are appended first.

    Args:
        q: [batch, queries, heads, dim].
        k_cache, v_cache: [batch of the cache, most keys, kv_heads, dim], or with block_table [pages, page_size,
            kv_heads, dim], written in place; page_size is a power of two from 16 on.
        k, v: [batch, new keys, kv_heads, dim], appended behind cache_seqlens keys; None: nothing is.
        rotary_cos, rotary_sin: [positions, half of the channels that are turned]: k, and q, are turned by position
            first. With a causal mask or a window query i has position cache_seqlens + i, without these all have
            cache_seqlens.
        cache_seqlens: int32 [batch], or a number for all: the keys that the cache has. None: all of it.
        cache_batch_idx: int32 [batch]: the batch elements of the cache, where they are others than those of q.
        cache_leftpad: int32 [batch], without block_table: the keys of each sequence that do not count, from its first
            token on. Keys behind them are copied side by side first, room for all of a sequence.
        block_table: int32 [batch, pages of the longest].
        rotary_interleaved: pairs of channels are 2 c and 2 c + 1, else c and c + half of them.
        num_splits: disregarded, as it changes no result: octet divides keys by itself.

    Returns:
        o [batch, queries, heads, dim]; with return_softmax_lse (o, lse), lse float32 [batch, heads, queries]. Masks are
        aligned bottom-right at the last key, new ones included. There are no gradients.

    Raises:
        Unsupported: a tensor that requires a gradient.
        InvalidArgument: shapes, types and, on the CPU, lengths and pages as `octet.append` and `octet.attention_cached`
            reject them.
        TypeError: an unknown keyword.
    """
    expect_known(flash_attn_with_kvcache, unknown)
    keywords = _keywords(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, False, precision)
    if (k is None) != (v is None):
        raise InvalidArgument("k, v: only one of them given; what is appended needs both")
    if (rotary_cos is not None or rotary_sin is not None) and k is None:
        raise InvalidArgument("rotary_cos, rotary_sin: given without k and v, allowed: None; q alone is not turned")
    if cache_leftpad is not None:
        if block_table is not None:
            raise InvalidArgument("cache_leftpad: given with block_table, allowed: None, as with flash-attn")
        if cache_leftpad.shape != q.shape[:1] or cache_leftpad.dtype != torch.int32:
            found = f"{cache_leftpad.dtype} {list(cache_leftpad.shape)}"
            raise InvalidArgument(f"cache_leftpad: found {found}, allowed: torch.int32 {list(q.shape[:1])}")
    if cache_batch_idx is not None:
        if block_table is not None:
            raise InvalidArgument("cache_batch_idx: given with block_table, which has the pages of each sequence")
        block_table = cache_batch_idx[:, None]
    if cache_seqlens is None:
        if k is not None or (block_table is not None and cache_batch_idx is None):
            given = "k and v, which are appended behind them" if k is not None else "block_table"
            raise InvalidArgument(f"cache_seqlens: None, but it is needed with {given}")
        cache_seqlens = k_cache.shape[1]
    if not isinstance(cache_seqlens, torch.Tensor):
        length = count("cache_seqlens", cache_seqlens, "int32 [batch], or a number of keys")
        cache_seqlens = torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)
    if k is not None:
        how: dict[str, Any] = {"block_table": block_table, "layout": "bshd"}
        if rotary_cos is not None or rotary_sin is not None:
            by_position = bool(keywords.get("causal")) or "window" in keywords
            how |= {
                "rope": "interleaved" if rotary_interleaved else "half",
                "rope_dim": 0 if rotary_cos is None else 2 * rotary_cos.shape[-1],
                "rope_cos": rotary_cos,
                "rope_sin": rotary_sin,
                "q": q if by_position else q.flatten(1, 2)[:, None],  # queries of one position are heads of a token
            }
        turned = _caches.append(k_cache, v_cache, k, v, cache_seqlens, **how)
        if turned is not None:
            q = turned.reshape(q.shape)
        cache_seqlens = cache_seqlens + k.shape[1]
    if cache_leftpad is not None:
        k_cache, v_cache = (_behind(x, cache_leftpad, cache_batch_idx) for x in (k_cache, v_cache))
        block_table, cache_seqlens = None, cache_seqlens - cache_leftpad
    return _caches.attention_cached(
        q,
        k_cache,
        v_cache,
        cache_seqlens,
        block_table=block_table,
        layout="bshd",
        return_lse=return_softmax_lse,
        **keywords,
    )
