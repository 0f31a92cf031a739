"""Attention of jax arrays of which some are QTensors, by a primitive without derivatives.

octet_forward_coded  (the arrays of the operands, which `tree` puts together) -> (o, lse)
"""

import dataclasses
from typing import Any

import jax

from octet._operands import Operands
from octet._options import Options
from octet._qtensor import QTensor
from octet._results import results
from octet.errors import Unsupported
from octet.jax._adapter import adapter, run
from octet.jax._fold import Fold
from octet.jax._primitives import bind, primitive_of, reject_gradients, result_like


def _shapes(options: Options, operands: Operands) -> list[tuple[str, jax.ShapeDtypeStruct]]:
    """The names of o and lse, and what they are like."""
    made = results(adapter, "forward", options, operands)
    return [(x.name, jax.ShapeDtypeStruct(x.shape, x.dtype)) for x in made]


def _abstract(*arrays: Any, tree: Any, options: Options) -> list[Any]:
    return [result_like(arrays[0], x) for _, x in _shapes(options, jax.tree.unflatten(tree, arrays))]


def _compute(platform: str, *arrays: Any, tree: Any, options: Options) -> Any:
    operands = jax.tree.unflatten(tree, arrays)
    return run("forward", options, operands, _shapes(options, operands), platform)


def _batch(primitive: Any, arrays: Any, dims: Any, *, tree: Any, options: Options) -> Any:
    """As that of other attention; all parts of a QTensor begin with its batch, as dense operands do."""
    names = [path[0].key for path, _ in jax.tree.leaves_with_path(jax.tree.unflatten(tree, arrays))]
    if "seqused_k" in names:
        raise Unsupported("octet.attention_cached: mapped by vmap, allowed: one call for the whole batch")
    size = next(x.shape[d] for x, d in zip(arrays, dims, strict=True) if d is not None)
    one = [
        jax.ShapeDtypeStruct([n for i, n in enumerate(x.shape) if i != d], x.dtype)
        for x, d in zip(arrays, dims, strict=True)
    ]
    operands = jax.tree.unflatten(tree, one)
    fold = Fold(size, options.layout, operands["q"].shape[0], False)
    folded = [fold.operand(name, x, d) for name, x, d in zip(names, arrays, dims, strict=True)]
    found = bind(primitive, *folded, tree=tree, options=options)
    made = [fold.result(name, x, like.shape) for x, (name, like) in zip(found, _shapes(options, operands), strict=True)]
    return made, [0] * len(made)


coded_p = primitive_of("octet_forward_coded", _abstract, _compute, _batch)
reject_gradients(coded_p, "attention of a QTensor")


def run_coded(options: Options, operands: Operands) -> tuple[Any, ...]:
    """(o, lse); statistics of a QTensor stay outside."""
    parts = {
        name: dataclasses.replace(x, statistics=None) if isinstance(x, QTensor) else x for name, x in operands.items()
    }
    arrays, tree = jax.tree.flatten(parts)
    return tuple(bind(coded_p, *arrays, tree=tree, options=options))
