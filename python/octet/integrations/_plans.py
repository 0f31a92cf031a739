"""How attention runs under the masks of transformers: which keys a batch element sees, as intervals of keys, without a
mask tensor."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Pattern(NamedTuple):
    """The keys that a mask function hides, apart from padding."""

    causal: bool
    window: int | None  # a query sees keys at most so far from it, on both sides unless causal
    sequences: torch.Tensor | None  # [batch, tokens]: the sequence that each token of a packed batch belongs to


class Plan(NamedTuple):
    """How attention runs: with the first `keys` keys of each batch element, or with packed sequences."""

    causal: bool
    window: int | None  # as in Pattern
    keys: int
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    index_q: torch.Tensor | None = None  # the tokens of the flattened batch that the sequences consist of; None: all
    index_k: torch.Tensor | None = None


def plan_of(
    pattern: Pattern,
    padding: torch.Tensor | None,
    batch: int,
    queries: int,
    keys: int,
    start: int,
    device: torch.device | str,
) -> Plan | None:
    """How to run attention under a pattern and a padding mask, or None if only a mask tensor can say it.

    Args:
        padding: bool [batch, keys], True: a token; None: all are.
        start: the position of the first query among the keys.

    Under a causal pattern or a window a query whose own key is padding sees nothing, unless it is the only query. All
    others see what they see under the mask.
    """
    causal, window, sequences = pattern
    if window is not None and window >= keys - 1:
        window = None
    begins = None if sequences is None else sequences.diff(dim=-1) != 0
    if begins is not None and bool(begins.any()):  # always there in compiled code, also where there is one sequence
        if padding is not None or start or queries != keys:
            return None
        return packed_plan(begins, causal, window)
    end = min(keys, start + queries) if causal else keys  # later keys are seen by none
    if (causal and end < start + queries) or (window is not None and not causal and (start or queries != keys)):
        return None
    if padding is None and causal and queries == 1 and window is not None:
        return Plan(True, window, end)
    if padding is not None:
        padding = padding & (torch.arange(keys, device=padding.device) < end)
    if causal and queries == 1:  # the last query sees all keys, or those within the window
        if window is not None and padding is not None:
            padding = padding & (torch.arange(keys, device=padding.device) >= start - window)
        causal, window = False, None
    if padding is None or bool(padding[:, :end].all()):
        return Plan(causal, window, end)
    ordered = causal or window is not None  # queries that are padding are left out
    bounds = _bounds(padding)
    if bounds is None:
        if window is not None:  # distances are those of positions, padding included
            return None
        return _gathered(padding, padding[:, start:end] if causal else None, queries, causal)
    cu_q, cu_k = [0], [0]
    for i, (first, last) in enumerate(bounds):
        q_first, q_last = (max(first - start, 0), max(last - start, 0)) if ordered else (0, queries)
        # Queries without keys; keys without queries; the tokens.
        cu_q += [i * queries + q_first, i * queries + q_first, i * queries + q_last]
        cu_k += [cu_k[-1], i * keys + first, i * keys + last]
    cu_q += [batch * queries, batch * queries]
    cu_k += [cu_k[-1], batch * keys]
    made = torch.tensor([cu_q, cu_k], dtype=torch.int32).to(device)
    return Plan(causal, window, keys, made[0], made[1])


def _bounds(seen: torch.Tensor) -> list[tuple[int, int]] | None:
    """The interval of keys that each batch element sees, or None if one has a hole."""
    keys = seen.shape[1]
    count = seen.sum(1)
    first = seen.int().argmax(1)
    last = torch.where(count > 0, keys - seen.flip(1).int().argmax(1), first)
    found = torch.stack([first, last, count], 1).tolist()
    return [(a, b) for a, b, _ in found] if all(b - a == n for a, b, n in found) else None


def _lengths(seen: torch.Tensor) -> torch.Tensor:
    """cu_seqlens of the True elements of each row."""
    return torch.nn.functional.pad(seen.sum(1).cumsum(0), (1, 0)).int()


def _gathered(seen: torch.Tensor, q_seen: torch.Tensor | None, queries: int, causal: bool) -> Plan:
    """The plan that takes the tokens out of the batch: padding lies between them."""
    index_q = None if q_seen is None else q_seen.flatten().nonzero()[:, 0]
    cu_q = (
        torch.arange(seen.shape[0] + 1, dtype=torch.int32, device=seen.device) * queries
        if q_seen is None
        else _lengths(q_seen)
    )
    return Plan(causal, None, seen.shape[1], cu_q, _lengths(seen), index_q, seen.flatten().nonzero()[:, 0])


def packed_plan(begins: torch.Tensor, causal: bool, window: int | None) -> Plan:
    """The plan of sequences one after the other. begins [batch, tokens - 1]: a sequence begins with the second token,
    the third, ..."""
    begins = torch.nn.functional.pad(begins, (1, 0), value=True)
    first = begins.flatten().nonzero()[:, 0]
    cu = torch.nn.functional.pad(first, (0, 1), value=begins.numel()).int()
    return Plan(causal, window, begins.shape[1], cu, cu)


def beginnings(position_ids: torch.Tensor, batch: int, tokens: int) -> torch.Tensor | None:
    """[batch, tokens - 1]: whether positions begin again with the second token, the third, ...; None: nowhere. The
    values are read."""
    if position_ids.ndim != 2 or position_ids.shape[1] != tokens:
        return None
    begins = position_ids[:, 1:] == position_ids[:, :1]
    return begins.expand(batch, -1) if bool(begins.any()) else None
