"""octet.append and octet.attention_cached: KV caches, written and read."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from octet import _abi, _api
from octet._appending import Rope
from octet._operands import expect_given, operands_of
from octet._options import AttentionOptions, Layout, count, look_up, number, truth
from octet._qtensor import QTensor
from octet._rejections import expect_known
from octet.errors import InvalidArgument

if TYPE_CHECKING:
    from typing import Unpack

_LAYOUTS = {"bhsd": 0, "bshd": 1}


def _shortcut(seqused_k: Any) -> Any:
    """See `_api.cache_shortcuts`."""
    return None if _api.is_traced() else _api.cache_shortcuts.get(type(seqused_k))


def _in_one_batch_element(name: str, x: Any) -> Any:
    """Packed tokens, [token, head, dim], as those of one batch element."""
    if x is None:
        return None
    if len(x.shape) != 3:
        raise InvalidArgument(f"{name}: shape {list(x.shape)}, expected [token, head, dim], as cu_seqlens is given")
    return x[None]


def _of_tokens(made: Any, packed: bool, *caches: Any) -> Any:
    """What an append returns, with packed queries as they came; of jax arrays new caches, QTensors as the old ones."""
    if not isinstance(made, dict):
        return made[0] if packed and made is not None else made
    new: list[Any] = []
    for name, cache in zip("kv", caches, strict=True):
        codes = made[f"{name}_cache"]
        is_coded = isinstance(cache, QTensor)
        new.append(dataclasses.replace(cache, codes=codes, scale=made[f"{name}_scale"]) if is_coded else codes)
    return *new, *(made[name][0] if packed else made[name] for name in made if name == "q")


def append(
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    seqused_k: Any,
    *,
    block_table: Any | None = None,
    cu_seqlens: Any | None = None,
    rope: Literal["none", "half", "interleaved"] = "none",
    rope_dim: int = 0,
    rope_offset: int = 0,
    rope_base: float = 0.0,
    rope_cos: Any | None = None,
    rope_sin: Any | None = None,
    q: Any | None = None,
    layout: Layout | None = None,
    **unknown: object,
) -> Any:
    """Writes new keys and values into a KV cache, for `octet.attention_cached`. Lengths do not change: add the new
    tokens to seqused_k afterwards.

    Args:
        k_cache: [batch, kv_heads, most keys, dim] in `layout`, with block_table [pages, kv_heads, page_size, dim] in
            `layout`, with cu_seqlens in layout "bshd": float32, float16, bfloat16 or float8_e4m3fn (as cast), which is
            written in place; or a QTensor of formats "i8" and "e4m3", symmetric with a scale for each token, whose
            codes and scales are written.
        v_cache: as k_cache, with dim_v.
        k, v: [batch, kv_heads, new tokens, dim or dim_v] in `layout`, with cu_seqlens [total new tokens, kv_heads, dim
            or dim_v]; float32, float16 or bfloat16.
        seqused_k: int32 [batch]: the keys of each sequence before. Token i of sequence n becomes key seqused_k[n] + i.
        block_table: int32 [batch, pages of the longest], as in `octet.attention_cached`.
        cu_seqlens: int32 [batch + 1]: where the new tokens of each sequence begin, and the total. Sequences have any
            number of new tokens then, which lie one after the other, as the queries of `octet.attention_cached` do with
            cu_seqlens_q.
        rope: turns k, and q, by position seqused_k[n] + i + rope_offset first, in float32: the first rope_dim channels
            (0: all), channel c with c + rope_dim / 2 ("half") or 2 c with 2 c + 1 ("interleaved").
        rope_base: of the angles, 0: 10000.
        rope_cos, rope_sin: [positions, rope_dim / 2]: cosines and sines of the angles of each position, in the place of
            rope_base.
        q: [batch, heads, new tokens, dim] in `layout`, with cu_seqlens [total new tokens, heads, dim]: queries to be
            turned too.
        layout: "bhsd", if it is not given, or "bshd"; not with cu_seqlens.

    The CPU rejects lengths and entries of the table that are outside of the cache, and a cu_seqlens that does not
    ascend from 0 to the new tokens. On a GPU nobody checks them: tokens for which there is no room, or behind the last
    sequence, are not appended, and with other entries the kernel writes outside of the cache.

    Returns:
        None, or with q the queries turned, a new array of its type and memory order. Of jax arrays (k_cache, v_cache),
        with q (k_cache, v_cache, q): new arrays, which lie where the old ones did if `jax.jit` was told to donate them.

    Raises:
        InvalidArgument: with the choices.
        Unsupported: a derivative or vmap of jax arrays.
        TypeError: an unknown keyword.
    """
    if unknown:
        expect_known(append, unknown)
    packed = cu_seqlens is not None
    if packed:
        _api.expect_no_layout(layout)
        k, v, q = (_in_one_batch_element(name, x) for name, x in (("k", k), ("v", v), ("q", q)))
    if layout is None:
        layout = "bshd" if packed else "bhsd"
    scales: dict[str, Any] = {}
    codings: list[Any] = []
    for name, cache in (("k", k_cache), ("v", v_cache)):
        if isinstance(cache, QTensor):
            codings += (name, cache.layout, cache.coding, cache.zero_point is None, cache.mean is None)
            scales[f"{name}_scale"] = cache.scale
    given = operands_of(
        k_cache=k_cache.codes if isinstance(k_cache, QTensor) else k_cache,
        v_cache=v_cache.codes if isinstance(v_cache, QTensor) else v_cache,
        k=k,
        v=v,
        seqused_k=seqused_k,
        cu_seqlens=cu_seqlens,
        block_table=block_table,
        rope_cos=rope_cos,
        rope_sin=rope_sin,
        q=q,
        **scales,
    )
    words = rope, rope_dim, rope_offset, rope_base, layout
    fast, arguments = _shortcut(seqused_k), (*words, *map(type, words), *codings)
    if fast and (call := fast.append(arguments, given)):
        return _of_tokens(call(given), packed)
    look_up("rope", rope, _abi.ROPE_STYLES)
    look_up("layout", layout, _LAYOUTS)
    how = Rope(
        rope,
        count("rope_dim", rope_dim, "an even number of channels, or 0 for all"),
        count("rope_offset", rope_offset, "-2**63 to 2**63 - 1", least=-(2**63)),
        float(number("rope_base", rope_base, "finite and at least 1e-300, or 0 for 10000")),
    )
    if how.style == "none" and how != Rope():
        raise InvalidArgument(f"rope_dim, rope_offset, rope_base: {how[1:]} given with rope 'none'; leave them out")
    for name, cache in (("k", k_cache), ("v", v_cache)):
        if isinstance(cache, QTensor):
            if cache.layout != layout:
                raise InvalidArgument(f"{name}_cache: of layout {cache.layout!r}, but the call's is {layout!r}")
            if cache.zero_point is not None or cache.mean is not None or cache.coding[1:] != (1, 0, 0, 0):
                raise InvalidArgument(
                    f"{name}_cache: a QTensor of {cache.coding}, allowed: granularity 1 (token), symmetric, without a "
                    "mean or a rotation"
                )
    expect_given(given, "k_cache", "v_cache", "k", "v", "seqused_k")
    framework = _api.framework_of(given)
    turned = framework.run_append(given, how, layout)
    if fast:
        fast.remember_append(arguments, how, layout)
    return _of_tokens(turned, packed, k_cache, v_cache)


def attention_cached(
    q: Any,
    k: Any,
    v: Any,
    seqused_k: Any,
    *,
    block_table: Any | None = None,
    cu_seqlens_q: Any | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    sinks: Any | None = None,
    alibi_slopes: Any | None = None,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Any:
    """Attention over a KV cache, of as many keys as each sequence has so far. `octet.append` adds keys to it.

    Args:
        q: [batch, heads, queries, dim] in `layout`; with cu_seqlens_q [total queries, heads, dim].
        k: [batch, kv_heads, most keys, dim] in `layout`. With block_table it lies in pages, [pages, kv_heads,
            page_size, dim] in `layout`, with cu_seqlens_q [pages, page_size, kv_heads, dim]. page_size is a power of
            two from 16 on, or any number where a sequence has one page. Any strides. A GPU copies pages that it
            cannot read as they lie, with many queries all that are used.
        v: as k, with dim_v.
        seqused_k: int32 [batch]: the keys of each sequence. What k and v hold behind them is not read. It is read when
            the kernels run, so that nothing waits for a GPU and a CUDA graph may be replayed with other lengths.
        block_table: int32 [batch, pages of the longest]: key j of sequence n is token j % page_size of page
            block_table[n, j // page_size]. Sequences may share pages. Entries behind the last key are not read.
        cu_seqlens_q: int32 [sequences + 1], with block_table: where the queries of each sequence begin, and the total.
            seqused_k and block_table have a row for each sequence then.
        max_seqlen_q, max_seqlen_k: bounds on the lengths, 0: unknown. That of the keys saves workspace on a GPU.
        sinks: [heads], as in `octet.attention`.
        alibi_slopes: [heads], or [batch, heads], as in `octet.attention`; the last query is at the last key.
        return_lse: also return lse, [batch, heads, queries], with cu_seqlens_q [heads, total queries].
        options: the keywords of `octet.attention`; without dropout. A causal mask or a window needs an alignment:
            "bottom_right" puts the last query at the last key of its sequence.

    The CPU rejects lengths and entries of the table that are outside of k and v. On a GPU nobody checks them, because
    reading them would wait for the GPU: with others the kernels read outside of the tensors.

    Returns:
        o, of the shape of q with dim_v, or (o, lse). There are no derivatives: tensors that require a gradient are
        rejected, as are derivatives and vmap of jax arrays.

    Raises:
        As `octet.attention`.
    """
    cache = {"seqused_k": seqused_k, "block_table": block_table}
    given = operands_of(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, sinks=sinks, alibi_slopes=alibi_slopes, **cache)
    packed = cu_seqlens_q is not None
    if packed:
        _api.expect_no_layout(options.get("layout"))
        if len(q.shape) != 3:
            raise InvalidArgument(f"q: shape {list(q.shape)}, expected [token, head, dim], as cu_seqlens_q is given")
        given["q"] = q[None]
        options["layout"] = "bshd"
    if options.get("enable_gqa") is None:  # of pages, shapes do not tell heads from tokens
        options["enable_gqa"] = True
    values = *options.values(), max_seqlen_q, max_seqlen_k, return_lse
    fast, arguments = _shortcut(seqused_k), (*options, *values, *map(type, values))
    found = fast.attention(arguments, given) if fast else None
    if found is None:
        expect_given(given, "seqused_k")
        framework, made = _api.call_of(given, options)
        made = _api.with_bounds(made, max_seqlen_q, max_seqlen_k)
        found = framework.run_attention(made, given, truth("return_lse", return_lse))
        if fast and options["enable_gqa"] is True:
            fast.remember_attention(arguments, given, made)
    o, lse = found
    if packed:
        o, lse = o[0], lse[0]
    return (o, lse) if return_lse else o
