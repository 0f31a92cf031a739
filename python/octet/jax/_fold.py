"""vmap: a mapped dimension becomes part of the batch, or of the heads where sequences are packed."""

from typing import Any

import jax.numpy as jnp

from octet._operands import KINDS
from octet.errors import Unsupported


class Fold:
    """Folds the operands of one call under vmap over `size` elements, and unfolds its results; `batch` is of one."""

    def __init__(self, size: int, layout: str, batch: int) -> None:
        self._size = size
        self._batch = batch
        self._packed = layout == "thd"

    def operand(self, name: str, x: Any, dim: int | None) -> Any:
        if KINDS[name] == "lengths":
            if dim is not None:
                raise Unsupported(f"{name}: mapped by vmap, but all elements need the same lengths; do not map it")
            return x
        if KINDS[name] == "logits" and dim is None and (x.ndim < 4 or x.shape[0] == 1):
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
        if name == "dsinks" and not self._packed:
            x = x.reshape(self._size, self._batch, shape[-1])
            return x if len(shape) == 2 else x.sum(1)
        at = self._at(name)
        return jnp.moveaxis(x.reshape(*shape[:at], self._size, *shape[at:]), at, 0)

    def _at(self, name: str) -> int:
        """Returns the place that the mapped dimension gets among the dimensions of one element."""
        heads_first = KINDS[name] in ("token", "head")
        return 1 if self._packed and not heads_first else 0

    def _per_batch(self, x: Any) -> Any:
        """[size, 1 or batch, ...] -> [size * batch, ...]"""
        x = jnp.broadcast_to(x, (self._size, self._batch, *x.shape[2:]))
        return x.reshape(self._size * self._batch, *x.shape[2:])
