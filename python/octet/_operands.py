"""The arrays of a call by their names, which are those of octet_arguments: what each is, and which a pass takes.

All layers hand on `Operands`. An optional array that comes to the library gets its name here: in the kind of shape that
it has and in the tuples that hold for it (docs/adding.md has the other files).
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, TypeAlias

from octet._adapters import Types
from octet._options import LAYOUTS, AttentionOptions
from octet.errors import InvalidArgument

Operands: TypeAlias = dict[str, Any]  # names to arrays; those that a call has not are not in it

# The kinds of shapes, and the names of each.
_NAMES = {
    "layout": "q k v o o_residual do_ dq dk dv tq tk tv to",  # the layout of the call, with a head dim
    "token": "lse dlse tlse",  # [batch, head, token], packed [head, token]
    "head": "sinks dsinks tsinks alibi_slopes",  # [heads], or [batch, heads]
    "lengths": "cu_seqlens_q cu_seqlens_k seqused_k",  # [sequences + 1], of seqused_k [sequences]
    "table": "block_table",  # [sequences, pages]
    "logits": "mask dmask tmask",  # broadcast to [batch, head, query, key]
    "seed": "dropout_seed",  # [4], or [batch, 4]
}
KINDS = {name: kind for kind, names in _NAMES.items() for name in names.split()}

# Inputs of every pass beside q, k and v, and those of one.
OPTIONAL = ("mask", "cu_seqlens_q", "cu_seqlens_k", "sinks", "alibi_slopes", "dropout_seed")
CACHE = ("seqused_k", "block_table")  # of a forward pass alone
BY_HEAD = ("sinks", "tsinks", "alibi_slopes")  # inputs that the library takes in the type of lse
BY_BATCH = ("alibi_slopes",)  # of these, those that the caller may give to each element of the batch
CONSTANTS = ("alibi_slopes",)  # may be of a float type, but have no gradient
WITH_TANGENT = ("q", "k", "v", "sinks")  # the tangent of x is tx
DIFFERENTIABLE = (*WITH_TANGENT, "mask")  # the gradient of x is dx

# The inputs of each pass, and its results.
INPUTS = {
    "forward": ("q", "k", "v", *OPTIONAL, *CACHE),
    "backward": ("do_", "q", "k", "v", "o", "lse", "o_residual", *OPTIONAL, "dlse"),
    "jvp": ("q", "k", "v", "tq", "tk", "tv", *OPTIONAL, "tsinks"),
}
RESULTS = {
    "forward": ("o", "lse", "o_residual"),
    "backward": ("dq", "dk", "dv", "dsinks", "dmask"),
    "jvp": ("o", "lse", "to", "tlse"),
}


class AttentionKeywords(AttentionOptions, total=False):
    """The keywords of functions that are asked about a call of `octet.attention`: its options and optional arrays."""

    mask: Any | None
    sinks: Any | None
    alibi_slopes: Any | None
    dropout_seed: Any | None


def operands_of(**arrays: Any) -> Operands:
    """The arrays that a call has; None: it has it not."""
    return {name: x for name, x in arrays.items() if x is not None}


def expect_given(operands: Operands, *names: str) -> None:
    """Rejects a call that lacks one of these arrays."""
    for name in names:
        if name not in operands:
            raise InvalidArgument(f"{label(name)}: found None, allowed: an array")


def split(keywords: Any) -> tuple[Operands, Any]:
    """The arrays among AttentionKeywords, and the options."""
    options = {name: x for name, x in keywords.items() if name not in KINDS}
    return operands_of(**{name: x for name, x in keywords.items() if name in KINDS}), options


def inputs_of(kind: str, operands: Operands) -> Operands:
    """The arrays of a call that are inputs of a pass, in the order of INPUTS."""
    return {name: operands[name] for name in INPUTS[kind] if name in operands}


def with_gradient(operands: Container[str], of_mask: bool) -> tuple[str, ...]:
    """The operands of which a backward pass gives gradients, in the order of its results; the mask where asked for."""
    return tuple([name for name in DIFFERENTIABLE if name in operands and (of_mask or name != "mask")])


def label(name: str) -> str:
    """The name in messages."""
    return name.rstrip("_")


_AXES = {"bhsd": "[batch, head, token, dim]", "bshd": "[batch, token, head, dim]", "thd": "[token, head, dim]"}


def dims_of(name: str, view: Any, layout: str) -> Sequence[int]:
    """Returns which dimensions of the caller's array are batch, head, token and dim of octet_arguments; -1: none is."""
    rank, kind = len(view.shape), KINDS.get(name, "")
    in_layout = LAYOUTS[layout]
    dims: tuple[int, ...]
    if kind == "layout":
        want, dims = 1 + max(in_layout), in_layout
    elif kind == "token":
        want, dims = 2 + (layout != "thd"), (0, 1, 2, -1) if layout != "thd" else (-1, 0, 1, -1)
    elif kind == "head":
        want, dims = (2, (0, 1, -1, -1)) if rank == 2 else (1, (-1, 0, -1, -1))
    elif kind == "seed":
        want, dims = (2, (0, -1, -1, 1)) if rank == 2 else (1, (-1, -1, -1, 0))
    elif kind == "table":
        want, dims = 2, (0, -1, -1, 1)
    elif kind == "lengths":
        want, dims = 1, (-1, -1, -1, 0)
    elif kind == "logits":
        want, dims = min(rank, 4), tuple(max(d, -1) for d in range(rank - 4, rank))
    else:
        want, dims = 4, (0, 1, 2, 3)  # a part of a quantized array
    if rank != want:
        at_most = "at most " if kind == "logits" else ""
        expected = _AXES[layout] if kind == "layout" else f"{at_most}{want} dimension{'s' * (want > 1)}"
        raise InvalidArgument(f"{label(name)}: shape {list(view.shape)}, expected {expected}")
    return dims


def _with_axes(name: str, sizes: tuple[Any, ...], swapped: bool) -> str:
    batch, head, token, dim = sizes
    if swapped:
        head, token = token, head
    return f"{name}{' would be' if swapped else ''} [batch {batch}, head {head}, token {token}, dim {dim}]"


def expect_meant(adapter: Types, operands: Operands, keywords: AttentionOptions) -> None:
    """Rejects a call whose q and k seem to be of two layouts: q [2, 100, 8, 64] of layout "bshd" beside
    k [2, 4, 100, 64] of layout "bhsd" reads as 100 heads of 8 queries over 4 heads of 100 keys, which the library
    computes. Packed sequences name their tokens.

    Args:
        adapter: of the arrays.
        operands: of the call; q and k are [token, head, dim], or of the call's layout. A mask that has a dimension of
            q's heads, queries or keys settles what those are, as sinks and slopes settle the heads of q.
        keywords: those of `octet.attention`, valid ones; layout and enable_gqa are read.

    Raises:
        InvalidArgument: see the table in docs/python.md.
    """
    q, k, mask = operands["q"], operands["k"], operands.get("mask")
    meant, rank = keywords.get("enable_gqa"), len(q.shape)
    if meant or rank != len(k.shape) or rank not in (3, 4):
        return
    layout, is_true = LAYOUTS[keywords.get("layout", "bhsd") if rank == 4 else "thd"], adapter.is_true
    heads, kv_heads = q.shape[layout[1]], k.shape[layout[1]]
    if is_true(heads == kv_heads):
        return
    if meant is False:
        raise InvalidArgument(f"enable_gqa: False, but q has {heads} heads and k {kv_heads}; set it to True")
    if rank == 3:
        return
    q_sizes, k_sizes = [tuple([x.shape[axis] for axis in layout]) for x in (q, k)]
    queries, keys = q_sizes[2], k_sizes[2]

    def mask_has(axis: int, size: Any) -> bool:
        return mask is not None and mask.ndim >= -axis and is_true(mask.shape[axis] == size)

    by_head = any([name in operands for name in BY_HEAD])
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
