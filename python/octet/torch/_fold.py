"""vmap: a mapped dimension becomes part of the batch, or of the heads where sequences are packed."""

import torch

from octet._plan import memory_order
from octet.errors import Unsupported


class Fold:
    """Folds the arguments of one call under vmap over `size` elements, and unfolds its results."""

    def __init__(self, size: int, layout: str) -> None:
        self._size = size
        self._packed = layout == "thd"

    def tensor(self, x: torch.Tensor, dim: int | None) -> torch.Tensor:
        """q, k, v or anything of their layout."""
        return self._merge(x, dim, 1 if self._packed else 0)

    def lse(self, x: torch.Tensor | None, dim: int | None) -> torch.Tensor | None:
        return None if x is None else self._merge(x, dim, 0)

    def sinks(
        self, x: torch.Tensor | None, dim: int | None, like: tuple[torch.Tensor, int | None]
    ) -> torch.Tensor | None:
        """Those of each element of the batch of q, `like`: [heads] become [batch, heads]; where packed, more heads."""
        if x is None or self._packed:
            return self.lse(x, dim)
        x = x.expand(self._size, *x.shape) if dim is None else x.movedim(dim, 0)
        x = x[:, None] if x.ndim == 2 else x
        return x.expand(-1, _batch(*like), -1).flatten(0, 1)

    def slopes(
        self, x: torch.Tensor | None, dim: int | None, like: tuple[torch.Tensor, int | None]
    ) -> torch.Tensor | None:
        """As sinks; where packed, [sequences, heads] become more heads too."""
        if x is None or not self._packed:
            return self.sinks(x, dim, like)
        return self._merge(x, dim, x.ndim - 1 - (dim is not None))

    def residual(self, x: torch.Tensor, dim: int | None) -> torch.Tensor:
        """o_residual, or the empty tensor that stands for none."""
        return self.tensor(x, dim) if x.ndim > 1 + (dim is not None) else x.new_empty(0)

    def mask(
        self, x: torch.Tensor | None, dim: int | None, like: tuple[torch.Tensor, int | None]
    ) -> torch.Tensor | None:
        """Broadcast to the four dimensions of the logits, whose batch is that of q, `like`."""
        if x is None or (dim is None and (x.ndim < 4 or x.shape[0] == 1)):
            return x
        x = x.expand(self._size, *x.shape) if dim is None else x.movedim(dim, 0)
        x = x[(slice(None), *[None] * (5 - x.ndim))]
        return x.expand(-1, _batch(*like), -1, -1, -1).flatten(0, 1)

    def lengths(self, x: torch.Tensor | None, dim: int | None) -> torch.Tensor | None:
        if dim is not None:
            raise Unsupported(
                "cu_seqlens: mapped by vmap, but all elements need the same lengths; set its in_dims to None"
            )
        return x

    def unfold(self, x: torch.Tensor, at: int) -> torch.Tensor:
        return x.unflatten(at, (self._size, x.shape[at] // self._size)).movedim(at, 0)

    def unfold_tensor(self, x: torch.Tensor) -> torch.Tensor:
        return self.unfold(x, 1 if self._packed else 0)

    def unfold_sinks(self, x: torch.Tensor, sinks: torch.Tensor | None, dim: int | None) -> torch.Tensor:
        """dsinks of `sinks`: each element's own, summed over its batch where that shares them."""
        if sinks is None:
            return self.unfold_none(x)
        x = self.unfold(x, 0)
        return x.sum(1) if x.ndim > sinks.ndim + (dim is None) else x

    def unfold_residual(self, x: torch.Tensor) -> torch.Tensor:
        return self.unfold_tensor(x) if x.ndim > 1 else self.unfold_none(x)

    def unfold_none(self, x: torch.Tensor) -> torch.Tensor:
        """x is the empty tensor that stands for none."""
        return x.expand(self._size, 0)

    def _merge(self, x: torch.Tensor, dim: int | None, at: int) -> torch.Tensor:
        """The mapped dimension becomes part of axis `at`. Where that takes a copy, the copy keeps the memory order."""
        x = x.expand(self._size, *x.shape) if dim is None else x.movedim(dim, 0)
        x = x.movedim(0, at)
        order = [axis for axis in memory_order(x.shape, x.stride()) if axis != at]
        place = order.index(at + 1)
        merged = x.permute(*order[:place], at, *order[place:]).flatten(place, place + 1)
        order = [axis - (axis > at) for axis in order]
        return merged.permute([order.index(axis) for axis in range(len(order))])


def _batch(q: torch.Tensor, dim: int | None) -> int:
    """The batch of one element of q, which is mapped over `dim`."""
    return q.shape[0] if dim is None else q.movedim(dim, 0).shape[1]
