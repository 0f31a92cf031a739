"""Heads of q beside those of k and v: grouped heads, or a slip of layout that reads like them.

q [2, 100, 8, 64] of layout "bshd" beside k [2, 4, 100, 64] of layout "bhsd" reads as 100 heads of 8 queries over 4
heads of 100 keys, which the library computes. `enable_gqa` says whether such shapes are meant.
"""

from collections.abc import Mapping
from typing import Any

from octet._options import LAYOUTS
from octet._plan import Types
from octet.errors import InvalidArgument


def _with_axes(name: str, sizes: tuple[Any, ...], swapped: bool) -> str:
    batch, head, token, dim = sizes
    if swapped:
        head, token = token, head
    return f"{name}{' would be' if swapped else ''} [batch {batch}, head {head}, token {token}, dim {dim}]"


def expect_meant(
    adapter: Types,
    q: Any,
    k: Any,
    keywords: Mapping[str, Any],
    *,
    mask: Any | None = None,
    by_head: bool = False,
) -> None:
    """Rejects a call whose q and k seem to be of two layouts. The lengths of packed sequences settle that.

    Args:
        adapter: of the arrays.
        q, k: [token, head, dim], or of the call's layout.
        keywords: those of `octet.attention`, valid ones; layout and enable_gqa are read.
        mask: one that has a dimension of q's heads, queries or keys settles what those are.
        by_head: whether the call has sinks or slopes, which settle the heads of q.

    Raises:
        InvalidArgument: see the table in docs/python.md.
    """
    meant, rank = keywords.get("enable_gqa"), len(q.shape)
    if meant or rank != len(k.shape) or rank not in (3, 4):
        return
    layout = LAYOUTS[keywords.get("layout", "bhsd") if rank == 4 else "thd"]
    q_sizes, k_sizes = [tuple([1 if axis < 0 else x.shape[axis] for axis in layout]) for x in (q, k)]
    is_true = adapter.is_true
    (_, heads, queries, _), (_, kv_heads, keys, _) = q_sizes, k_sizes
    if is_true(heads == kv_heads):
        return
    if meant is False:
        raise InvalidArgument(f"enable_gqa: False, but q has {heads} heads and k {kv_heads}; set it to True")
    if rank == 3:
        return

    def mask_has(axis: int, size: Any) -> bool:
        return mask is not None and mask.ndim >= -axis and is_true(mask.shape[axis] == size)

    # One query is a decoder's step over any number of keys; as many queries as heads read the same either way.
    of_q = (
        is_true(heads == keys)
        and is_true(queries > 1)
        and is_true(queries != heads)
        and is_true(kv_heads > 0)
        and is_true(queries % kv_heads == 0)
        and not (by_head or mask_has(-3, heads) or mask_has(-2, queries))
    )
    of_k = (
        is_true(queries == kv_heads)
        and is_true(queries > 1)
        and is_true(keys != kv_heads)
        and is_true(keys > 0)
        and is_true(heads % keys == 0)
        and not (is_true(keys > 1) and mask_has(-1, keys))
    )
    if of_q or of_k:
        slipped, name, sizes, other = ("q", "q", q_sizes, "k") if of_q else ("k and v", "k", k_sizes, "q")
        raise InvalidArgument(
            f"q, k: heads and tokens of {slipped} seem swapped: {_with_axes('q', q_sizes, False)} meets "
            f"{_with_axes('k', k_sizes, False)}, but swapped, {_with_axes(name, sizes, True)}, as many "
            f"tokens as {other} has; give q, k and v in one layout, or, if these shapes are meant, enable_gqa=True"
        )
