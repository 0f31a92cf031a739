"""The primitives of octet in jax, and how they are lowered, batched and differentiated.

forward   (q, k, v, ...) -> (o, lse, o_residual)
tangent   (q, k, v, o, lse, o_residual, ..., tq, tk, tv[, tsinks, tmask]) -> (to, tlse), linear in the tangents: the
          derivative of forward. With tmask it has a transpose alone, and is not computed
backward  (do[, dlse], q, k, v, o, lse, o_residual, ...) -> (dq, dk, dv[, dsinks, dmask]), its transpose
pair      (q, k, v, ..., tq, tk, tv[, tsinks]) -> (o, to, lse, tlse) in one pass

Parameters of each: `names` of its operands, which are those of octet_arguments, `options`, `residual`, whether
o_residual is made or just an empty array, and of backward `of_mask`, whether dmask is made. o and lse are
differentiable, and once.

All operands of a primitive vary over the same axes of a mesh, as those of jax's own primitives do: `bind` sees to it.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from octet._operands import DIFFERENTIABLE, RESULTS, with_gradient
from octet._options import LAYOUTS, Options
from octet._results import needs_residual
from octet._results import results as results_of
from octet.errors import InvalidArgument, Unsupported
from octet.jax._adapter import adapter, run
from octet.jax._fold import Fold

KINDS = {"forward": "forward", "tangent": "jvp", "backward": "backward", "pair": "jvp"}
_SAVED = RESULTS["forward"]


def _results(primitive: str, names: Sequence[str], of_mask: bool) -> tuple[str, ...]:
    if primitive == "backward":
        return tuple([f"d{name}" for name in with_gradient(names, of_mask)])
    return {"forward": _SAVED, "tangent": ("to", "tlse"), "pair": ("o", "to", "lse", "tlse")}[primitive]


def _tangents(names: Sequence[str]) -> tuple[str, ...]:
    """The tangents among the operands, which come last."""
    return tuple([f"t{name}" for name in DIFFERENTIABLE if f"t{name}" in names])


def _shapes(results: Sequence[str], of: dict[str, Any], options: Options, residual: bool) -> list[jax.ShapeDtypeStruct]:
    passes = [results_of(adapter, kind, options, of, True) for kind in RESULTS]
    made = {x.name: jax.ShapeDtypeStruct(x.shape, x.dtype) for found in passes for x in found}
    if not residual:
        made["o_residual"] = jax.ShapeDtypeStruct((0,), made["o_residual"].dtype)
    return [made[name] for name in results]


def _compute(
    primitive: str, platform: str, *arrays: Any, names: Any, options: Options, residual: bool, of_mask: bool = False
) -> list[Any]:
    """The program of a primitive: one call of octet_run."""
    if "tmask" in names:
        raise Unsupported(
            "mask: has a tangent, but octet differentiates by it backwards alone; use jax.grad or jax.vjp, or "
            "jax.lax.stop_gradient where the derivative by it may be lost"
        )
    kind = KINDS[primitive]
    wanted = _results(primitive, names, of_mask)
    # A pass writes o whether or not the primitive gives it; an empty o_residual is none.
    results = ("o", *wanted) if primitive == "tangent" else wanted
    operands = dict(zip(names, arrays, strict=True))
    shapes = dict(zip(results, _shapes(results, operands, options, residual), strict=True))
    made = [(name, x) for name, x in shapes.items() if residual or name != "o_residual"]
    if kind == "jvp":
        operands = {name: x for name, x in operands.items() if name not in _SAVED}
    if not residual:
        operands.pop("o_residual", None)
    if all(math.prod(x.shape) == 0 for _, x in made):
        found = {name: jnp.zeros(x.shape, x.dtype) for name, x in made}
    else:
        computed = run(kind, options, operands, made, platform)
        found = dict(zip((name for name, _ in made), computed, strict=True))
    if not residual and "o_residual" in shapes:
        found["o_residual"] = jnp.zeros(0, shapes["o_residual"].dtype)
    return [found[name] for name in wanted]


def _varying(x: Any) -> frozenset[Any]:
    """The axes of a mesh over which x varies, within shard_map."""
    return jax.typeof(x).mat.varying


def bind(primitive: Primitive, *arrays: Any, **how: Any) -> list[Any]:
    """The results of a primitive. What varies over fewer axes than another operand is made to vary over all of theirs;
    the transpose of that sums its gradient over the axes that it does not vary over. What explicit axes of a mesh shard
    is gathered, as XLA gathers what others shard."""
    axes = frozenset().union(*map(_varying, arrays))
    same = [jax.lax.pcast(x, tuple(axes - _varying(x)), to="varying") for x in arrays]
    return primitive.bind(*map(_gathered, same), **how)


def _gathered(x: Any) -> Any:
    return jax.sharding.reshard(x, _whole(x.ndim)) if any(jax.typeof(x).sharding.spec) else x


def result_like(operand: Any, x: Any) -> Any:
    """The abstract value of a result of x's shape and type."""
    whole = jax.sharding.NamedSharding(operand.sharding.mesh, _whole(len(x.shape)))
    return operand.update(shape=x.shape, dtype=x.dtype, weak_type=False, sharding=whole)


def _whole(dimensions: int) -> jax.sharding.PartitionSpec:
    return jax.sharding.PartitionSpec(*[None] * dimensions)


def _batch(
    kind: str,
    primitive: Primitive,
    arrays: Any,
    dims: Any,
    *,
    names: Any,
    options: Options,
    residual: bool,
    **more: bool,
) -> Any:
    if "seqused_k" in names:
        raise Unsupported(
            "octet.attention_cached: mapped by vmap, allowed: one call for the whole batch, which k and v have a "
            "dimension or a block table for"
        )
    size = next(x.shape[d] for x, d in zip(arrays, dims, strict=True) if d is not None)
    one = {
        name: jax.ShapeDtypeStruct([n for i, n in enumerate(x.shape) if i != d], x.dtype)
        for name, x, d in zip(names, arrays, dims, strict=True)
    }
    at = LAYOUTS[options.layout][0]
    of_mask = more.get("of_mask", False)
    fold = Fold(size, options.layout, 1 if at < 0 else one["q"].shape[at], of_mask or "tmask" in names)
    folded = [fold.operand(name, x, d) for name, x, d in zip(names, arrays, dims, strict=True)]
    found = bind(primitive, *folded, names=names, options=options, residual=residual, **more)
    results = _results(kind, names, of_mask)
    shapes = [x.shape for x in _shapes(results, one, options, residual)]
    return list(map(fold.result, results, found, shapes)), [0] * len(results)


def primitive_of(
    name: str, abstract: Callable[..., Any], program: Callable[..., Any], batch: Callable[..., Any]
) -> Any:
    """A new primitive.

    Args:
        abstract: the abstract values of its results, from those of its operands.
        program: of the name of a platform and the operands, gives the results.
        batch: the rule of vmap, of the primitive, its operands and their mapped dimensions.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    primitive.def_abstract_eval(abstract)
    for platform in ("cpu", "cuda"):
        lowered = mlir.lower_fun(functools.partial(program, platform), multiple_results=True)
        mlir.register_lowering(primitive, lowered, platform=platform)
    batching.primitive_batchers[primitive] = functools.partial(batch, primitive)
    return primitive


def reject_gradients(primitive: Primitive, name: str) -> None:
    """The primitive of a function of octet has no derivative."""

    def rule(primals: Any, tangents: Any, **how: Any) -> Any:
        if not all(map(_is_constant, tangents)):
            raise Unsupported(f"octet.{name}: differentiated, but it has no gradient; use jax.lax.stop_gradient")
        found = bind(primitive, *primals, **how)
        return found, [_zero(x) for x in found]

    ad.primitive_jvps[primitive] = rule


def _primitive(kind: str) -> Any:
    def abstract(*arrays: Any, names: Any, options: Options, residual: bool, of_mask: bool = False) -> list[Any]:
        if len({x.mat.varying for x in arrays}) > 1:
            axes = {name: set(x.mat.varying) for name, x in zip(names, arrays, strict=True)}
            raise InvalidArgument(f"octet_{kind}: operands vary over different axes of a mesh, {axes}")
        shapes = _shapes(_results(kind, names, of_mask), dict(zip(names, arrays, strict=True)), options, residual)
        return [result_like(arrays[0], x) for x in shapes]

    program, batch = functools.partial(_compute, kind), functools.partial(_batch, kind)
    return primitive_of(f"octet_{kind}", abstract, program, batch)


forward_p, tangent_p, backward_p, pair_p = map(_primitive, ("forward", "tangent", "backward", "pair"))


def _zero(primal: Any) -> Any:
    """The tangent of a result that is not differentiable."""
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def _is_zero(x: Any) -> bool:
    return type(x) is ad.Zero


def _is_constant(t: Any) -> bool:
    return _is_zero(t) or t.dtype == jax.dtypes.float0


def _reject(*_: Any, **__: Any) -> Any:
    raise Unsupported(
        "octet computes first derivatives only; for a second one use jax.nn.dot_product_attention, or "
        "jax.lax.stop_gradient where none is wanted"
    )


# Stands for a derivative that octet has not, in programs that may not need it: a target under stop_gradient is
# differentiated, and the result thrown away. It raises when it is computed, linearly transposed or lowered.
rejected_p = Primitive("octet_rejected")
rejected_p.multiple_results = True
rejected_p.def_impl(_reject)
rejected_p.def_abstract_eval(lambda *tangents, like: [result_like(tangents[0], x) for x in like])
for _platform in ("cpu", "cuda"):
    mlir.register_lowering(rejected_p, _reject, platform=_platform)
batching.primitive_batchers[rejected_p] = _reject
ad.primitive_jvps[rejected_p] = _reject
ad.primitive_transposes[rejected_p] = _reject


def _rejected(results: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """Tangents of the results by operands that octet differentiates no further."""
    moving = [t for t in tangents if not _is_constant(t)]
    if not moving:
        return [_zero(x) for x in results]
    return bind(rejected_p, *moving, like=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results))


def _differentiate(primals: Any, tangents: Any, names: Any, options: Options) -> tuple[list[Any], Any]:
    """forward's results with what a backward pass needs, and the tangents of o and lse, of operands q, k, v, ..."""
    along = dict(zip(names, tangents, strict=True))
    if "seqused_k" in along and not all(map(_is_constant, along.values())):
        raise Unsupported("octet.attention_cached: differentiated, but it has no gradient; use jax.lax.stop_gradient")
    of_mask = "mask" in along and not _is_constant(along["mask"])
    linear = {name: along.pop(name) for name in with_gradient(names, of_mask)}
    for name, t in along.items():
        if not _is_constant(t):
            raise Unsupported(f"{name}: differentiated, but octet gives it no gradient; use jax.lax.stop_gradient")
    for name, t in linear.items():
        x = primals[names.index(name)]
        if not _is_constant(t) and adapter.dtype_name(x.dtype, name) == "e4m3":
            raise Unsupported(
                f"{name}: a {x.dtype} array is differentiated, but jax would round its gradient to that type; use "
                "octet.attention_vjp, which gives bfloat16, or jax.lax.stop_gradient"
            )
    residual = needs_residual(adapter, options, primals[0])
    saved = bind(forward_p, *primals, names=names, options=options, residual=residual)
    if all(map(_is_zero, linear.values())):
        return saved, [_zero(x) for x in saved[:2]]
    linear = {name: t for name, t in linear.items() if not _is_zero(t)}
    moved = bind(
        tangent_p,
        *primals[:3],
        *saved,
        *primals[3:],
        *linear.values(),
        names=(*names[:3], *_SAVED, *names[3:], *[f"t{name}" for name in linear]),
        options=options,
        residual=residual,
    )
    return saved, moved


def _forward_jvp(primals: Any, tangents: Any, *, names: Any, options: Options, residual: bool) -> Any:
    (o, lse, r), moved = _differentiate(primals, tangents, names, options)
    r = r if residual else jnp.zeros(0, r.dtype)
    return [o, lse, r], [*moved, _zero(r)]


def _pair_jvp(primals: Any, tangents: Any, *, names: Any, options: Options, residual: bool) -> Any:
    """`to` and `tlse` are detached: no derivative of them, and none by the tangents."""
    _, to, _, tlse = bind(pair_p, *primals, names=names, options=options, residual=residual)
    n = len(names) - len(_tangents(names))
    (o, lse, _), (moved_o, moved_lse) = _differentiate(primals[:n], tangents[:n], names[:n], options)
    return [o, to, lse, tlse], [moved_o, _zero(to), moved_lse, _zero(tlse)]


def _tangent_jvp(primals: Any, tangents: Any, *, names: Any, **how: Any) -> Any:
    n = len(names) - len(_tangents(names))
    results = bind(tangent_p, *primals, names=names, **how)
    moved = _rejected(results, tangents[:n])
    linear = {name: t for name, t in zip(names[n:], tangents[n:], strict=True) if not _is_zero(t)}
    if linear:
        along = bind(tangent_p, *primals[:n], *linear.values(), names=(*names[:n], *linear), **how)
        moved = [a if _is_zero(b) else a + b for a, b in zip(along, moved, strict=True)]
    return results, moved


def _tangent_transpose(cotangents: Any, *operands: Any, names: Any, **how: Any) -> Any:
    do, dlse = cotangents
    n = len(names) - len(_tangents(names))
    linear = operands[n:]
    if _is_zero(do) and _is_zero(dlse):
        return [None] * n + [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in linear]
    given = {"do_": ad.instantiate_zeros(do)} | ({} if _is_zero(dlse) else {"dlse": dlse})
    of_mask = "tmask" in names
    made = bind(backward_p, *given.values(), *operands[:n], names=(*given, *names[:n]), of_mask=of_mask, **how)
    found = dict(zip(_results("backward", names[:n], of_mask), made, strict=True))
    return [None] * n + [
        found[f"d{name[1:]}"].astype(x.aval.dtype) if ad.is_undefined_primal(x) else None
        for name, x in zip(names[n:], linear, strict=True)
    ]


def _backward_jvp(primals: Any, tangents: Any, *, names: Any, **how: Any) -> Any:
    found = bind(backward_p, *primals, names=names, **how)
    return found, _rejected(found, tangents)


ad.primitive_jvps[forward_p] = _forward_jvp
ad.primitive_jvps[pair_p] = _pair_jvp
ad.primitive_jvps[tangent_p] = _tangent_jvp
ad.primitive_transposes[tangent_p] = _tangent_transpose
ad.primitive_jvps[backward_p] = _backward_jvp
