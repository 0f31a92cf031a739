"""octet.quantize and octet.dequantize of jax arrays, by primitives that work under jit, vmap and shard_map.

octet_quantize    (x[, norm_weight]) -> the parts of a QTensor that there are, in the order of Parts
octet_dequantize  (codes, scale[, zero_point, mean]) -> x

A QTensor is a pytree, whose leaves are its arrays. Arrays have their batch first.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octet import _numpy, _quantizing
from octet._abi import Tensor
from octet._options import LAYOUTS
from octet._qtensor import QTensor
from octet._quantizing import Choices, Parts
from octet.errors import Unsupported
from octet.jax._adapter import OnPlatform, compute
from octet.jax._primitives import bind, primitive_of, reject_gradients, result_like

jax.tree_util.register_dataclass(
    QTensor,
    data_fields=["codes", "scale", "zero_point", "mean", "statistics"],
    meta_fields=["format", "coding", "layout", "dtype"],
)


def _shapes(x: Any, choices: Choices) -> Parts:
    """The parts of x quantized, without memory."""
    tokens = x.shape[LAYOUTS[choices.layout][2]]
    codes, *others = _quantizing.shapes_of(choices, tuple(x.shape), _quantizing.groups_of(choices, tokens))
    f32 = [None if shape is None else jax.ShapeDtypeStruct(shape, np.float32) for shape in others]
    return Parts(jax.ShapeDtypeStruct(codes, _numpy.adapter.dtype_of(choices.codes_dtype())), *f32)


def _given(parts: Sequence[Any]) -> list[Any]:
    return [x for x in parts if x is not None]


def _tensors_of(codes: Tensor) -> list[Tensor]:
    """Those of a QTensor in the order of its arrays."""
    how = codes.quantization.contents
    return [codes, *(x.contents for x in (how.scale, how.zero_point, how.mean) if x)]


def _quantize(platform: str, x: Any, norm_weight: Any = None, *, choices: Choices) -> Sequence[Any]:
    """The program of octet_quantize."""
    parts, given = _shapes(x, choices), _given([x, norm_weight])
    arguments = _quantizing.arguments_of(OnPlatform(platform), x, norm_weight, parts, choices)
    source, embedding, codes, statistics = arguments
    weights = [] if norm_weight is None else [embedding.norm_weight.contents]
    tensors = [source, *weights, *_tensors_of(codes), *_given([statistics])]
    by_python = functools.partial(_quantize_by_python, choices)
    return compute("octet_quantize", platform, given, _given(parts), arguments, tensors, by_python)


def _quantize_by_python(choices: Choices, *arrays: Any) -> list[np.ndarray]:
    x, norm_weight = (*map(np.asarray, arrays), None)[:2]
    return _given(_numpy.run_quantize(x, norm_weight, choices))


def _dequantize(platform: str, *arrays: Any, tree: Any, dtype: np.dtype) -> Sequence[Any]:
    """The program of octet_dequantize; tree: the QTensor that the arrays belong to."""
    x = jax.tree.unflatten(tree, arrays)
    out = jax.ShapeDtypeStruct(x.shape, dtype)
    codes, numbers = _quantizing.arguments_back(OnPlatform(platform), x, out)
    tensors = [*_tensors_of(codes), numbers]
    by_python = functools.partial(_dequantize_by_python, tree, dtype)
    return compute("octet_dequantize", platform, arrays, [out], (codes, numbers), tensors, by_python)


def _dequantize_by_python(tree: Any, dtype: np.dtype, *arrays: Any) -> list[np.ndarray]:
    return [_numpy.run_dequantize(jax.tree.unflatten(tree, map(np.asarray, arrays)), dtype)]


def _batch(primitive: Any, arrays: Any, dims: Any, **how: Any) -> Any:
    """A mapped dimension becomes part of the batch. The weights of a norm, which have none, are shared."""
    size = next(x.shape[d] for x, d in zip(arrays, dims, strict=True) if d is not None)

    def folded(x: Any, d: int | None) -> Any:
        if x.ndim - (d is not None) < 4:
            if d is not None:
                raise Unsupported("norm_weight: mapped by vmap, but all elements have the same; do not map it")
            return x
        x = jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])

    found = bind(primitive, *map(folded, arrays, dims), **how)
    return [x.reshape(size, x.shape[0] // size, *x.shape[1:]) for x in found], [0] * len(found)


quantize_p = primitive_of(
    "octet_quantize",
    lambda x, *_, choices: [result_like(x, part) for part in _given(_shapes(x, choices))],
    _quantize,
    _batch,
)
dequantize_p = primitive_of(
    "octet_dequantize",
    lambda codes, *_, tree, dtype: [result_like(codes, jax.ShapeDtypeStruct(codes.shape, dtype))],
    _dequantize,
    _batch,
)
reject_gradients(quantize_p, "quantize")
reject_gradients(dequantize_p, "dequantize")


def _of_no_batch(x: Any) -> np.ndarray:
    """An array like x that has nothing to be computed, by which the library says what it has against a call."""
    return np.empty((0, *x.shape[1:]), x.dtype)


def run_quantize(x: Any, norm_weight: Any | None, choices: Choices) -> Parts:
    """See `octet.quantize`."""
    weights = None if norm_weight is None else np.empty(norm_weight.shape, norm_weight.dtype)
    like = _numpy.run_quantize(_of_no_batch(x), weights, choices)
    found = iter(bind(quantize_p, *_given([x, norm_weight]), choices=choices))
    return Parts(*[None if part is None else next(found) for part in like])


def run_dequantize(x: QTensor, dtype: Any) -> Any:
    """See `octet.dequantize`."""
    arrays, tree = jax.tree.flatten(dataclasses.replace(x, statistics=None))
    _numpy.run_dequantize(jax.tree.unflatten(tree, map(_of_no_batch, arrays)), dtype)
    (found,) = bind(dequantize_p, *arrays, tree=tree, dtype=np.dtype(dtype))
    return found
