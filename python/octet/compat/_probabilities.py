"""S_dmask, which tells flash-attn's tests what was dropped. Of a unit matrix as v, attention is its probabilities."""

from collections.abc import Callable
from typing import Any

import torch

COLUMNS = 256  # of a unit matrix: the most channels that every backend has for v
Lengths = tuple[torch.Tensor, torch.Tensor, int, int]  # cu_seqlens of queries and keys, and bounds of the lengths


def _unpacked(rows: torch.Tensor, cu_seqlens: torch.Tensor, longest: int) -> torch.Tensor:
    """Rows [total tokens, ...] as [sequences, longest, ...], with zeros behind each sequence."""
    lengths = cu_seqlens.diff().long()
    sequence = torch.arange(len(lengths), device=rows.device).repeat_interleave(lengths)
    token = torch.arange(len(rows), device=rows.device) - cu_seqlens[:-1].long()[sequence]
    made = rows.new_zeros(len(lengths), longest, *rows.shape[1:])
    made[sequence, token] = rows
    return made


def signed(
    attend: Callable[[torch.Tensor, dict[str, Any]], torch.Tensor],
    k: torch.Tensor,
    lengths: Lengths | None,
    keywords: dict[str, Any],
) -> torch.Tensor:
    """The probabilities [batch, head, query, key] in the type of q, negative where dropout drops them.

    `attend` computes attention for other v and keywords; k is [batch, key, head, dim], or packed.
    """
    keys = torch.arange(k.shape[-3], device=k.device)
    if lengths is not None:
        keys = keys - lengths[1][:-1].long().repeat_interleave(lengths[1].diff().long())
    most = len(keys) if lengths is None else lengths[3]
    whole = {name: value for name, value in keywords.items() if name not in ("dropout_p", "dropout_seed")}
    parts = []
    with torch.no_grad():
        for first in range(0, most, COLUMNS):
            unit = (keys[:, None] - first == torch.arange(COLUMNS, device=k.device)).to(k.dtype)
            v = unit[:, None].expand(*k.shape[:-1], COLUMNS)
            p = attend(v, whole)
            parts.append(p.where(attend(v, keywords) != 0, -p))
        made = torch.cat(parts, -1)[..., :most]
    if lengths is not None:
        made = _unpacked(made, lengths[0], lengths[2])
    return made.transpose(1, 2)
