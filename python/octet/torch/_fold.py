"""vmap: a mapped dimension becomes part of the batch, or of the heads where sequences are packed."""

from collections.abc import Sequence

import torch

from octet._operands import KINDS, Operands
from octet._views import memory_order
from octet.errors import Unsupported


class Fold:
    """Folds the operands of one call under vmap over `size` elements, and unfolds its results."""

    def __init__(
        self,
        size: int,
        layout: str,
        names: Sequence[str],
        tensors: Sequence[torch.Tensor],
        dims: Sequence[int | None],
        of_mask: bool = False,
    ) -> None:
        """`of_mask`: each element has a gradient of the mask, and so a mask of its own."""
        self._size = size
        self._of_mask = of_mask
        self._packed = layout == "thd"
        self._given = {name: (x, dim) for name, x, dim in zip(names, tensors, dims, strict=True)}
        q, dim = self._given["q"]
        self._batch = q.shape[0] if dim is None else q.movedim(dim, 0).shape[1]  # of one element

    def operands(self) -> Operands:
        return {name: self._operand(name, *x) for name, x in self._given.items()}

    def results(self, names: Sequence[str], made: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The mapped dimension comes first."""
        return tuple([self._result(name, x) for name, x in zip(names, made, strict=True)])

    def _operand(self, name: str, x: torch.Tensor, dim: int | None) -> torch.Tensor:
        kind, rank = KINDS[name], x.ndim - (dim is not None)
        if kind == "lengths":
            if dim is not None:
                raise Unsupported(
                    "cu_seqlens: mapped by vmap, but all elements need the same lengths; set its in_dims to None"
                )
            return x
        if kind == "seed":
            return self._seeds(x, dim)
        if name == "o_residual" and rank == 1:  # the empty tensor that stands for none
            return x.new_empty(0)
        if kind == "logits":  # of the four dimensions of the logits
            is_shared = dim is None and (rank < 4 or x.shape[0] == 1) and not self._of_mask
            return x if is_shared else self._per_batch(x, dim, 4)
        if kind == "head" and not self._packed:  # [heads] become [batch, heads]
            return self._per_batch(x, dim, 2)
        if kind == "head":  # more heads, also of [sequences, heads]
            return self._merge(x, dim, rank - 1)
        return self._merge(x, dim, 1 if self._packed and kind == "layout" else 0)

    def _result(self, name: str, x: torch.Tensor) -> torch.Tensor:
        kind = KINDS[name]
        is_none = x.ndim == 1 and (kind != "head" or name[1:] not in self._given)
        if is_none:  # the empty tensor that stands for none
            return x.expand(self._size, 0)
        x = self._unfold(x, 1 if self._packed and kind == "layout" else 0)
        if kind == "logits":
            return self._of_element(x, *self._given["mask"])
        if kind != "head":
            return x
        # Summed over the batch where that shares them.
        of, dim = self._given[name[1:]]
        return x.sum(1) if x.ndim > of.ndim + (dim is None) else x

    def _of_element(self, dmask: torch.Tensor, mask: torch.Tensor, dim: int | None) -> torch.Tensor:
        """dmask [size, batch, ...], summed over the batch where the mask of an element has none."""
        shape = [n for i, n in enumerate(mask.shape) if i != dim]
        is_shared = len(shape) < 4 or shape[0] == 1
        return (dmask.sum(1) if is_shared else dmask).reshape(self._size, *shape)

    def _unfold(self, x: torch.Tensor, at: int) -> torch.Tensor:
        return x.unflatten(at, (self._size, x.shape[at] // self._size)).movedim(at, 0)

    def _per_batch(self, x: torch.Tensor, dim: int | None, rank: int) -> torch.Tensor:
        """Each element's own, [batch, ...] of `rank` dimensions, as more of the batch."""
        x = x.expand(self._size, *x.shape) if dim is None else x.movedim(dim, 0)
        x = x[(slice(None), *[None] * (rank + 1 - x.ndim))]
        return x.expand(-1, self._batch, *[-1] * (rank - 1)).flatten(0, 1)

    def _seeds(self, x: torch.Tensor, dim: int | None) -> torch.Tensor:
        """[size * batch, 4]: element n of the batch has the seed at offset + n, or its own."""
        if self._packed:
            raise Unsupported(
                "dropout_seed: vmap of packed sequences, which makes heads of its elements; call it for each"
            )
        x = x.expand(self._size, *x.shape) if dim is None else x.movedim(dim, 0)
        if x.ndim == 2:
            numbers = torch.arange(self._batch, dtype=x.dtype, device=x.device)
            x = x[:, None] + torch.nn.functional.pad(numbers[:, None], (2, 1))
        return x.flatten(0, 1)

    def _merge(self, x: torch.Tensor, dim: int | None, at: int) -> torch.Tensor:
        """The mapped dimension becomes part of axis `at`. Where that takes a copy, the copy keeps the memory order."""
        x = x.expand(self._size, *x.shape) if dim is None else x.movedim(dim, 0)
        x = x.movedim(0, at)
        order = [axis for axis in memory_order(x.shape, x.stride()) if axis != at]
        place = order.index(at + 1)
        merged = x.permute(*order[:place], at, *order[place:]).flatten(place, place + 1)
        order = [axis - (axis > at) for axis in order]
        return merged.permute([order.index(axis) for axis in range(len(order))])
