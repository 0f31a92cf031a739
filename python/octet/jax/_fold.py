"""vmap: a mapped dimension becomes part of the batch, or of the heads where sequences are packed."""

from typing import Any

import jax.numpy as jnp

from octet._operands import KINDS
from octet.errors import Unsupported


class Fold:
    """Folds the operands of one call under vmap over `size` elements, and unfolds its results; `batch` is of one.
    `of_mask`: each element has a gradient or tangent of the mask, and so a mask of its own."""

    def __init__(self, size: int, layout: str, batch: int, of_mask: bool) -> None:
        self._size = size
        self._of_mask = of_mask
        self._batch = batch
        self._packed = layout == "thd"

    def operand(self, name: str, x: Any, dim: int | None) -> Any:
        if KINDS[name] == "lengths":
            if dim is not None:
                raise Unsupported(f"{name}: mapped by vmap, but all elements need the same lengths; do not map it")
            return x
        if KINDS[name] == "seed":
            return self._seeds(x, dim)
        is_shared = dim is None and (x.ndim < 4 or x.shape[0] == 1) and not self._of_mask
        if KINDS[name] == "logits" and is_shared:
            return x
        if name == "o_residual" and x.ndim - (dim is not None) == 1:
            return jnp.empty(0, x.dtype)  # stands for none
        x = jnp.broadcast_to(x, (self._size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        if KINDS[name] == "logits":
            return self._per_batch(x.reshape(self._size, *(1,) * (5 - x.ndim), *x.shape[1:]))
        if KINDS[name] == "head" and not self._packed:  # [heads], or [batch, heads]
            return self._per_batch(x if x.ndim == 3 else x[:, None])
        at = x.ndim - 2 if KINDS[name] == "head" else self._at(name)
        x = jnp.moveaxis(x, 0, at)
        return x.reshape(*x.shape[:at], x.shape[at] * x.shape[at + 1], *x.shape[at + 2 :])

    def result(self, name: str, x: Any, shape: tuple[int, ...]) -> Any:
        """The mapped dimension comes first; `shape` is that of one element."""
        if name == "o_residual" and len(shape) == 1:
            return jnp.empty((self._size, 0), x.dtype)
        if name == "dmask":  # summed over the batch where the mask of an element has none
            x = x.reshape(self._size, self._batch, *x.shape[1:])
            return (x.sum(1) if len(shape) < 4 or shape[0] == 1 else x).reshape(self._size, *shape)
        if name == "dsinks" and not self._packed:
            x = x.reshape(self._size, self._batch, shape[-1])
            return x if len(shape) == 2 else x.sum(1)
        at = self._at(name)
        return jnp.moveaxis(x.reshape(*shape[:at], self._size, *shape[at:]), at, 0)

    def _at(self, name: str) -> int:
        """Returns the place that the mapped dimension gets among the dimensions of one element."""
        heads_first = KINDS[name] in ("token", "head")
        return 1 if self._packed and not heads_first else 0

    def _seeds(self, x: Any, dim: int | None) -> Any:
        """[size * batch, 4]: element n of the batch has the seed at offset + n, or its own."""
        if self._packed:
            raise Unsupported(
                "dropout_seed: vmap of packed sequences, which makes heads of its elements; call it for each"
            )
        x = jnp.broadcast_to(x, (self._size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        if x.ndim == 2:
            x = x[:, None] + jnp.pad(jnp.arange(self._batch, dtype=x.dtype)[:, None], ((0, 0), (2, 1)))
        return x.reshape(-1, 4)

    def _per_batch(self, x: Any) -> Any:
        """[size, 1 or batch, ...] -> [size * batch, ...]"""
        x = jnp.broadcast_to(x, (self._size, self._batch, *x.shape[2:]))
        return x.reshape(self._size * self._batch, *x.shape[2:])
