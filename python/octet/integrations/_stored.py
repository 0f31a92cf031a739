"""Keys and values of a cache in 8 bits (quantized_cache.py), as transformers hands them to attention functions."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from octet import _caches, _quantize
from octet._options import AttentionOptions, bottom_right
from octet._qtensor import QTensor
from octet.integrations._plans import Plan


class Stored(torch.Tensor):
    """Keys or values [batch, heads, keys, dim] of a cache in 8 bits, for the attention function. It becomes numbers
    when somebody computes with it."""

    pages: QTensor
    table: torch.Tensor
    used: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, pages: QTensor, table: torch.Tensor, used: torch.Tensor, length: int) -> Stored:
        shape = table.shape[0], pages.codes.shape[1], length, pages.codes.shape[3]
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=pages.dtype, device=pages.codes.device)
        self.pages, self.table, self.used = pages, table, used
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Stored({list(self.shape)}, {self.pages.format})"

    def dense(self) -> torch.Tensor:
        """The numbers."""
        x = _quantize.dequantize(self.pages)
        return x[self.table].transpose(1, 2).flatten(2, 3)[:, :, : self.shape[2]]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(Stored, Stored.dense, (args, kwargs or {}))
        return function(*args, **kwargs)


def attention(
    query: torch.Tensor,
    key: Stored,
    value: Stored,
    plan: Plan | None,
    sinks: torch.Tensor | None,
    options: AttentionOptions,
) -> torch.Tensor | None:
    """o [batch, token, head, dim] of query [batch, head, token, dim]; None: the plan hides keys of some sequences, or
    there is none."""
    if plan is None or plan.cu_seqlens_q is not None or plan.keys != key.shape[2]:
        return None
    side = -1 if plan.window is None else plan.window
    return _caches.attention_cached(
        query, key.pages, value.pages, key.used, block_table=key.table, max_seqlen_k=key.shape[2], sinks=sinks,
        **{**options, **bottom_right(plan.causal, side, side)},
    ).transpose(1, 2)  # fmt: skip
