"""Continuous batching of transformers (`generate_batch`): attention over its paged cache.

A batch is one row of tokens, those of all requests one after the other. Where each request has one new token,
transformers hands over the pages with a block table; octet appends to them and attends over them as they lie. Elsewhere
(prompts, sliding windows) transformers gathers the keys of each request, and octet computes packed sequences.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from octet import _api, _caches
from octet._options import AttentionOptions, bottom_right
from octet.errors import Unsupported
from octet.integrations import NAMES

# The keywords that continuous batching passes to an attention function, beside those that every caller passes.
KEYWORDS = {
    "cache", "block_table", "k_cache", "v_cache", "read_index", "write_index", "logits_indices",
    "logits_processor_args", "max_seqlen_q", "max_seqlen_k",
}  # fmt: skip
PREFIX = "paged|"  # of the names that transformers 5.17 switches to


class Batch(NamedTuple):
    """The lengths of a batch, and where the keys are: in pages, or else gathered into key and value."""

    key: torch.Tensor  # [1, heads, tokens, dim]
    value: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    k_cache: torch.Tensor | None = None  # [pages, page_size, heads, dim]
    v_cache: torch.Tensor | None = None
    block_table: torch.Tensor | None = None


def batch_of(
    module: torch.nn.Module,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_lens_q: Any,
    cu_seq_lens_k: Any,
    max_length_q: Any,
    max_length_k: Any,
    given: dict[str, Any],
) -> Batch:
    """The batch of a layer, from the keywords that transformers gives to attention functions.

    Later versions have put the layer's keys into the cache before; 5.17 leaves that, and the choice of the layer's
    lengths, to attention functions.
    """
    cache = given.get("cache")
    if cache is None:
        batch = Batch(key, value, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
        return batch if given.get("block_table") is None else batch._replace(**_pages(given))
    layer = "sliding_attention" if getattr(module, "sliding_window", None) else "full_attention"
    longest = given["max_seqlen_k"]
    if isinstance(cu_seq_lens_k, dict):
        cu_seq_lens_k, longest = cu_seq_lens_k[layer], longest[layer]
    batch = Batch(key, value, cu_seq_lens_q, cu_seq_lens_k, given["max_seqlen_q"], longest)
    index: Any = module.layer_idx
    if given["block_table"] is None:
        k, v = cache.update(key, value, index, given["read_index"], given["write_index"])
        return batch._replace(key=k.transpose(0, 1)[None], value=v.transpose(0, 1)[None])
    group, i = cache.layer_index_to_group_indices[index]
    shape = -1, cache.block_size, cache.num_key_value_heads, cache.head_dim
    k, v = (x[i].view(shape) for x in (cache.key_cache, cache.value_cache))
    return batch._replace(k_cache=k, v_cache=v, block_table=given["block_table"][group])


def _pages(given: dict[str, Any]) -> dict[str, Any]:
    """The pages of a layer. Pages of keys and of values take turns in one tensor, and both views that transformers
    makes of it have all of them: those with an even number are keys in the one and values in the other."""
    k, v, table = (given[name] for name in ("k_cache", "v_cache", "block_table"))
    if k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr():
        k, v, table = k[::2], v[::2], table >> 1
    return {"k_cache": k, "v_cache": v, "block_table": table}


def attention(
    query: torch.Tensor, batch: Batch, sinks: torch.Tensor | None, window: int | None, options: AttentionOptions
) -> torch.Tensor:
    """o [1, token, head, dim] of query [1, head, token, dim]. Each query sees the keys of its request up to itself."""
    side = -1 if window is None else window - 1
    options = {**options, **bottom_right(True, side, side)}
    cu_q, cu_k = batch.cu_seqlens_q.to(torch.int32), batch.cu_seqlens_k.to(torch.int32)
    if batch.block_table is None:
        q, k, v = (x[0].transpose(0, 1) for x in (query, batch.key, batch.value))
        o = _api.attention_varlen(
            q, k, v, cu_q, cu_k, sinks=sinks,
            max_seqlen_q=batch.max_seqlen_q, max_seqlen_k=batch.max_seqlen_k, **options,
        )  # fmt: skip
        return o[None]
    lengths = cu_k.diff()  # 0 for requests that fill up the batch of a CUDA graph: nothing is appended for these
    where: dict[str, Any] = {"block_table": batch.block_table, "layout": "bshd"}
    q, k, v = (x.permute(2, 0, 1, 3) for x in (query, batch.key, batch.value))
    _caches.append(batch.k_cache, batch.v_cache, k, v, lengths - 1, **where)
    o = _caches.attention_cached(q, batch.k_cache, batch.v_cache, lengths, sinks=sinks, **where, **options)
    return o.transpose(0, 1)


def _is_octet(name: str | None) -> bool:
    return name is not None and name.removeprefix(PREFIX) in NAMES


def join_continuous_batching(register: Callable[[str, str], None]) -> None:
    """Has continuous batching treat octet's names as those of flash attention: it builds no masks, and hands over block
    tables where it can. `register(new, name)` gives the attention function of a name a second name."""
    from transformers import AttentionInterface
    from transformers.generation.continuous_batching import cache, continuous_api, initialization

    if f"{PREFIX}sdpa" in AttentionInterface():
        for name in NAMES:
            register(PREFIX + name, name)
    if hasattr(initialization.ensure_decode_fast_path_is_available, "__wrapped__"):
        return
    for module in (cache, continuous_api, initialization):
        module.is_flash_attention_requested = _as_flash(module.is_flash_attention_requested)
    initialization.ensure_decode_fast_path_is_available = _with_block_tables(
        initialization.ensure_decode_fast_path_is_available
    )


def _as_flash(asked: Callable) -> Callable:
    @functools.wraps(asked)
    def is_flash_attention_requested(
        config: Any = None, requested_attention_implementation: str | None = None, version: Any = None
    ) -> bool:
        name = requested_attention_implementation if config is None else config._attn_implementation
        if _is_octet(name):
            return version is None
        return asked(config, requested_attention_implementation, version)

    return is_flash_attention_requested


def _with_block_tables(ensure: Callable) -> Callable:
    @functools.wraps(ensure)
    def ensure_decode_fast_path_is_available(config: Any, cb_config: Any, user_requested: bool) -> None:
        if not _is_octet(config._attn_implementation):
            ensure(config, cb_config, user_requested)
        elif not _reads_pages(config, cb_config):
            cb_config.max_blocks_per_request = 0

    return ensure_decode_fast_path_is_available


def _reads_pages(config: Any, cb_config: Any) -> bool:
    """Returns whether octet reads the pages of such a cache. transformers keeps those of sliding windows in another
    order."""
    layers = getattr(config, "layer_types", None)
    slides = getattr(config, "sliding_window", None) is not None if layers is None else "sliding_attention" in layers
    size = getattr(cb_config, "page_size", None) or cb_config.block_size
    return not slides and size >= 16 and size & (size - 1) == 0


def expect_no_mask(mask: torch.Tensor | None) -> None:
    """A mask would say what the lengths say."""
    if mask is not None:
        raise Unsupported(
            f"attention_mask: found a tensor of shape {list(mask.shape)} with a paged cache, allowed: None; call "
            "octet.integrations.transformers.register() before continuous batching starts"
        )
