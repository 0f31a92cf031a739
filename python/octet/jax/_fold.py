"""vmap: a mapped dimension becomes part of the batch, or of the heads where sequences are packed."""

from typing import Any

import jax.numpy as jnp

from octet.errors import Unsupported


class Fold:
    """Folds the operands of one call under vmap over `size` elements, and unfolds its results."""

    def __init__(self, size: int, layout: str) -> None:
        self._size = size
        self._packed = layout == "thd"

    def operand(self, name: str, x: Any, dim: int | None, batch: int) -> Any:
        """`batch`: of one element."""
        if name.startswith("cu_seqlens"):
            if dim is not None:
                raise Unsupported(f"{name}: mapped by vmap, but all elements need the same lengths; do not map it")
            return x
        if name == "mask":
            return self._mask(x, dim, batch)
        if name == "o_residual" and x.ndim - (dim is not None) == 1:
            return jnp.empty(0, x.dtype)  # stands for none
        return self._merge(x, dim, self._at(name))

    def result(self, name: str, x: Any) -> Any:
        """The mapped dimension comes first."""
        if name == "o_residual" and x.ndim == 1:
            return jnp.empty((self._size, 0), x.dtype)
        at = self._at(name)
        shape = (*x.shape[:at], self._size, x.shape[at] // self._size, *x.shape[at + 1 :])
        return jnp.moveaxis(x.reshape(shape), at, 0)

    def _at(self, name: str) -> int:
        return 1 if self._packed and name != "lse" else 0

    def _merge(self, x: Any, dim: int | None, at: int) -> Any:
        x = jnp.broadcast_to(x, (self._size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        x = jnp.moveaxis(x, 0, at)
        return x.reshape(*x.shape[:at], x.shape[at] * x.shape[at + 1], *x.shape[at + 2 :])

    def _mask(self, x: Any, dim: int | None, batch: int) -> Any:
        """Broadcast to the four dimensions of the logits."""
        if dim is None and (x.ndim < 4 or x.shape[0] == 1):
            return x
        x = jnp.broadcast_to(x, (self._size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        x = x.reshape(self._size, *(1,) * (5 - x.ndim), *x.shape[1:])
        x = jnp.broadcast_to(x, (self._size, batch, *x.shape[2:]))
        return x.reshape(self._size * batch, *x.shape[2:])
