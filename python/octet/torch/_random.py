"""Dropout by torch's generators."""

from typing import Any

import torch


def dropout(probability: Any, q: torch.Tensor) -> dict[str, Any]:
    """The keywords of `octet.attention` for a dropout, none for that of 0.

    Seed and offset are drawn by the generator of q's device, as torch.randint draws: torch.manual_seed repeats them,
    checkpoints that keep its state replay them, and vmap draws by its `randomness`.
    """
    if not probability:
        return {}
    seed = torch.randint(-(2**31), 2**31, (4,), dtype=torch.int32, device=q.device)
    return {"dropout_p": probability, "dropout_seed": seed}
