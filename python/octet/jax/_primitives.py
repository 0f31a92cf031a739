"""The primitives of octet in jax, and how they are lowered, batched and differentiated.

forward   (q, k, v, ...) -> (o, lse, o_residual)
tangent   (q, k, v, o, lse, o_residual, ..., tq, tk, tv) -> to, linear in the last three: the derivative of forward
backward  (do, q, k, v, o, lse, o_residual, ...) -> (dq, dk, dv), its transpose
pair      (q, k, v, ..., tq, tk, tv) -> (o, to) in one pass

Parameters of each: `names` of its operands, which are those of octet_arguments, `options`, and `residual`, whether
o_residual is made or just an empty array. o alone is differentiable, and once.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from octet import _passes
from octet._options import LAYOUTS, Options
from octet.errors import Unsupported
from octet.jax import _call
from octet.jax._fold import Fold
from octet.jax._front import front

KINDS = {"forward": "forward", "tangent": "jvp", "backward": "backward", "pair": "jvp"}
_RESULTS = {
    "forward": ("o", "lse", "o_residual"),
    "tangent": ("to",),
    "backward": ("dq", "dk", "dv"),
    "pair": ("o", "to"),
}
_SAVED = ("o", "lse", "o_residual")
_TANGENTS = ("tq", "tk", "tv")


def _shapes(results: Sequence[str], of: dict[str, Any], options: Options, residual: bool) -> list[jax.ShapeDtypeStruct]:
    qkv = of["q"], of["k"], of["v"]
    kinds = {kind: _passes.results(front, kind, options, *qkv, residual) for kind in ("forward", "backward", "jvp")}
    made = {x.name: jax.ShapeDtypeStruct(x.shape, x.dtype) for kind in kinds.values() for x in kind}
    made.setdefault("o_residual", jax.ShapeDtypeStruct((0,), of["q"].dtype))
    return [made[name] for name in results]


def _compute(primitive: str, platform: str, *arrays: Any, names: Any, options: Options, residual: bool) -> list[Any]:
    """The program of a primitive: one call of octet_run."""
    kind = KINDS[primitive]
    # A pass writes o whether or not the primitive gives it; an empty o_residual is none.
    results = ("o", "to") if kind == "jvp" else _RESULTS[primitive]
    operands = dict(zip(names, arrays, strict=True))
    shapes = _shapes(results, operands, options, residual)
    made = [pair for pair in zip(results, shapes, strict=True) if residual or pair[0] != "o_residual"]
    if kind == "jvp":
        operands = {name: x for name, x in operands.items() if name not in _SAVED}
    if not residual:
        operands.pop("o_residual", None)
    if all(math.prod(x.shape) == 0 for _, x in made):
        found = {name: jnp.zeros(x.shape, x.dtype) for name, x in made}
    else:
        computed = _call.run(kind, options, tuple(operands), tuple(operands.values()), made, platform)
        found = dict(zip((name for name, _ in made), computed, strict=True))
    if not residual:
        found["o_residual"] = jnp.zeros(0, operands["q"].dtype)
    return [found[name] for name in _RESULTS[primitive]]


def _batch(
    primitive: Primitive, kind: str, arrays: Any, dims: Any, *, names: Any, options: Options, **rest: Any
) -> Any:
    size = next(x.shape[d] for x, d in zip(arrays, dims, strict=True) if d is not None)
    q, q_dim = next((x, d) for name, x, d in zip(names, arrays, dims, strict=True) if name == "q")
    at = LAYOUTS[options.layout][0]
    shape = [n for i, n in enumerate(q.shape) if i != q_dim]
    fold = Fold(size, options.layout)
    batch = 1 if at < 0 else shape[at]
    folded = [fold.operand(name, x, d, batch) for name, x, d in zip(names, arrays, dims, strict=True)]
    found = primitive.bind(*folded, names=names, options=options, **rest)
    results = _RESULTS[kind]
    return [fold.result(name, x) for name, x in zip(results, found, strict=True)], [0] * len(results)


def _primitive(kind: str) -> Primitive:
    primitive = Primitive(f"octet_{kind}")
    primitive.multiple_results = True
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))

    def abstract(*arrays: Any, names: Any, options: Options, residual: bool) -> list[Any]:
        shapes = _shapes(_RESULTS[kind], dict(zip(names, arrays, strict=True)), options, residual)
        return [arrays[0].update(shape=x.shape, dtype=x.dtype, weak_type=False) for x in shapes]

    primitive.def_abstract_eval(abstract)
    for platform in ("cpu", "cuda"):
        program = mlir.lower_fun(functools.partial(_compute, kind, platform), multiple_results=True)
        mlir.register_lowering(primitive, program, platform=platform)
    batching.primitive_batchers[primitive] = functools.partial(_batch, primitive, kind)
    return primitive


forward_p, tangent_p, backward_p, pair_p = map(_primitive, ("forward", "tangent", "backward", "pair"))


def _zero(primal: Any) -> Any:
    """The tangent of a result that is not differentiable."""
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def _is_zero(x: Any) -> bool:
    return type(x) is ad.Zero


def _is_constant(t: Any) -> bool:
    return _is_zero(t) or t.dtype == jax.dtypes.float0


def _refuse(*_: Any, **__: Any) -> Any:
    raise Unsupported(
        "octet computes first derivatives only; for a second one use jax.nn.dot_product_attention, or "
        "jax.lax.stop_gradient where none is wanted"
    )


# Stands for a derivative that octet has not, in programs that may not need it: a target under stop_gradient is
# differentiated, and the result thrown away. It raises when it is computed, linearly transposed or lowered.
refused_p = Primitive("octet_refused")
refused_p.multiple_results = True
refused_p.def_impl(_refuse)
refused_p.def_abstract_eval(lambda *tangents, like: [tangents[0].update(shape=x.shape, dtype=x.dtype) for x in like])
for _platform in ("cpu", "cuda"):
    mlir.register_lowering(refused_p, _refuse, platform=_platform)
batching.primitive_batchers[refused_p] = _refuse
ad.primitive_jvps[refused_p] = _refuse
ad.primitive_transposes[refused_p] = _refuse


def _refused(results: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """Tangents of the results by operands that octet differentiates no further."""
    moving = [t for t in tangents if not _is_constant(t)]
    if not moving:
        return [_zero(x) for x in results]
    return refused_p.bind(*moving, like=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results))


def _differentiate(primals: Any, tangents: Any, names: Any, options: Options) -> tuple[list[Any], Any]:
    """forward's results with what a backward pass needs, and the tangent of o, of operands q, k, v, ..."""
    for name, t in zip(names[3:], tangents[3:], strict=True):
        if not _is_constant(t):
            raise Unsupported(f"{name}: differentiated, but octet gives it no gradient; use jax.lax.stop_gradient")
    residual = _passes.needs_residual(front, options, primals[0])
    saved = forward_p.bind(*primals, names=names, options=options, residual=residual)
    if all(map(_is_zero, tangents[:3])):
        return saved, _zero(saved[0])
    (to,) = tangent_p.bind(
        *primals[:3],
        *saved,
        *primals[3:],
        *map(ad.instantiate_zeros, tangents[:3]),
        names=(*names[:3], *_SAVED, *names[3:], *_TANGENTS),
        options=options,
        residual=residual,
    )
    return saved, to


def _forward_jvp(primals: Any, tangents: Any, *, names: Any, options: Options, residual: bool) -> Any:
    (o, lse, r), to = _differentiate(primals, tangents, names, options)
    r = r if residual else jnp.zeros(0, o.dtype)
    return [o, lse, r], [to, _zero(lse), _zero(r)]


def _pair_jvp(primals: Any, tangents: Any, *, names: Any, options: Options, residual: bool) -> Any:
    """`to` is detached: no derivative of it, and none by tq, tk, tv."""
    _, to = pair_p.bind(*primals, names=names, options=options, residual=residual)
    (o, _, _), tangent = _differentiate(primals[:-3], tangents[:-3], names[:-3], options)
    return [o, to], [tangent, _zero(to)]


def _tangent_jvp(primals: Any, tangents: Any, *, names: Any, **how: Any) -> Any:
    (to,) = tangent_p.bind(*primals, names=names, **how)
    (moved,) = _refused([to], tangents[:-3])
    if not all(map(_is_zero, tangents[-3:])):
        linear = map(ad.instantiate_zeros, tangents[-3:])
        (along,) = tangent_p.bind(*primals[:-3], *linear, names=names, **how)
        moved = along if _is_zero(moved) else along + moved
    return [to], [moved]


def _tangent_transpose(cotangents: Any, *operands: Any, names: Any, **how: Any) -> Any:
    (do,) = cotangents
    if _is_zero(do):
        gradients = [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in operands[-3:]]
    else:
        found = backward_p.bind(do, *operands[:-3], names=("do_", *names[:-3]), **how)
        gradients = [g if ad.is_undefined_primal(x) else None for g, x in zip(found, operands[-3:], strict=True)]
    return [None] * (len(operands) - 3) + gradients


def _backward_jvp(primals: Any, tangents: Any, *, names: Any, **how: Any) -> Any:
    found = backward_p.bind(*primals, names=names, **how)
    return found, _refused(found, tangents)


ad.primitive_jvps[forward_p] = _forward_jvp
ad.primitive_jvps[pair_p] = _pair_jvp
ad.primitive_jvps[tangent_p] = _tangent_jvp
ad.primitive_transposes[tangent_p] = _tangent_transpose
ad.primitive_jvps[backward_p] = _backward_jvp
