"""A KV cache of transformers in 8 bits.

    from octet.integrations import transformers
    from octet.integrations.quantized_cache import QuantizedPages
    transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="octet")
    model.generate(**inputs, past_key_values=QuantizedPages())

New keys and values are quantized by `octet.append`, with a scale for each token of a head, and read by
`octet.attention_cached`. docs/drop-ins.md says what that costs and saves.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from octet import _abi, _caches
from octet._qtensor import Coding, QTensor
from octet.errors import InvalidArgument
from octet.integrations._stored import Stored

_FORMATS = {"i8": torch.int8, "e4m3": torch.float8_e4m3fn}


def _is_page_size(size: object) -> bool:
    return isinstance(size, int) and size >= 16 and size & (size - 1) == 0


class QuantizedPages(Cache):
    """A cache that grows, in pages of 8 bits. It works with every attention implementation; octet's read its pages, for
    others, and for masks that hide keys, it becomes numbers in each step.

    Args:
        format: "i8" or "e4m3".
        page_size: tokens of a page, a power of two from 16 on.
        most_keys: makes pages for so many tokens of each sequence at once; 0: more are made as they are needed.
    """

    def __init__(self, format: Literal["i8", "e4m3"] = "i8", page_size: int = 256, most_keys: int = 0) -> None:
        if format not in _FORMATS:
            raise InvalidArgument(f"format: found {format!r}, allowed: {', '.join(map(repr, _FORMATS))}")
        if not _is_page_size(page_size):
            raise InvalidArgument(f"page_size: found {page_size!r}, allowed: a power of two from 16 on")
        if not isinstance(most_keys, int) or most_keys < 0:
            raise InvalidArgument(f"most_keys: found {most_keys!r}, allowed: a number of tokens, or 0")
        layer: Any = lambda: _Layer(format, page_size, most_keys)
        super().__init__(layer_class_to_replicate=layer)


class _Layer(CacheLayerMixin):
    """The pages of a layer, in layout "bhsd"; those of a sequence are a row of the block table."""

    is_croppable = True
    is_sliding = False

    def __init__(self, format: str, page_size: int, most_keys: int) -> None:
        super().__init__()
        self.format, self.page_size, self.most_keys, self.length = format, page_size, most_keys, 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device, batch = key_states.dtype, key_states.device, key_states.shape[0]
        self.pages = tuple([self._pages_of(name, x) for name, x in (("k", key_states), ("v", value_states))])
        self.table = torch.empty(batch, 0, dtype=torch.int32, device=self.device)
        self.used = torch.zeros(batch, dtype=torch.int32, device=self.device)
        self.is_initialized = True

    def _pages_of(self, operand: str, x: torch.Tensor) -> QTensor:
        """None yet, of the heads and dim of x."""
        _, heads, _, dim = x.shape
        codes = torch.empty(0, heads, self.page_size, dim, dtype=_FORMATS[self.format], device=x.device)
        scale = torch.empty(0, heads, self.page_size, 1, dtype=torch.float32, device=x.device)
        coding = Coding(_abi.OPERANDS[operand], _abi.GRANULARITIES["token"])
        return QTensor(codes, scale, None, None, self.format, coding, "bhsd", x.dtype)

    def _reserve(self, keys: int) -> None:
        """Has pages for so many keys of each sequence; makes twice as many as there are."""
        batch, there = self.table.shape
        needed = -(-max(keys, self.most_keys) // self.page_size)
        if needed <= there:
            return
        more = max(needed, 2 * there if self.length else 0) - there
        names = torch.arange(batch * there, batch * (there + more), dtype=torch.int32, device=self.device)
        self.table = torch.cat([self.table, names.view(batch, more)], 1)

        def grown(x: torch.Tensor) -> torch.Tensor:
            made = x.new_zeros(batch * (there + more), *x.shape[1:])
            made[: x.shape[0]] = x
            return made

        self._change(grown)

    def _change(self, function: Any) -> None:
        """Replaces codes and scales by what a function makes of them."""
        self.pages = tuple(
            [dataclasses.replace(x, codes=function(x.codes), scale=function(x.scale)) for x in self.pages]
        )

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values so far: the first ones as they are, later `Stored` ones."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        is_first, new = self.length == 0, key_states.shape[2]
        self._reserve(self.length + new)
        k_pages, v_pages = self.pages
        _caches.append(k_pages, v_pages, key_states, value_states, self.used, block_table=self.table)
        self.used, self.length = self.used + new, self.length + new
        if is_first:
            return key_states, value_states
        k, v = (Stored(x, self.table, self.used, self.length) for x in self.pages)
        return k, v

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.is_initialized, self.length = False, 0

    def offload(self) -> None:
        raise NotImplementedError("QuantizedPages: offloading; allowed: a cache on the device of the model")

    prefetch = offload

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last -tokens_to_remove tokens. transformers 5.17 may give the number to keep instead."""
        keep = min(tokens_to_remove, self.length) if tokens_to_remove > 0 else self.length + tokens_to_remove
        if self.is_initialized:
            self.used, self.length = self.used - (self.length - keep), keep

    def _take(self, rows: torch.Tensor) -> None:
        """Has the sequences of these rows, each in pages of its own."""
        if self.is_initialized:
            rows = rows.to(self.device)
            pages = self.table[rows].flatten()
            self._change(lambda x: x[pages])
            self.table = torch.arange(pages.shape[0], dtype=torch.int32, device=self.device).view(rows.shape[0], -1)
            self.used = self.used[rows]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._take(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._take(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self._take(torch.arange(self.table.shape[0]).repeat_interleave(repeats))
