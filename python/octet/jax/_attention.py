"""Attention of jax arrays, by primitives that work under jit, grad, jvp, linearize, vmap, shard_map and export."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octet import _numpy, _plan
from octet._options import Options
from octet._qtensor import QTensor
from octet.errors import InvalidArgument, Unsupported
from octet.jax._adapter import adapter
from octet.jax._primitives import backward_p, bind, forward_p, pair_p


def _call_of(options: Options, **arrays: Any) -> tuple[Options, dict[str, Any]]:
    """The options and the operands of a primitive, from the arrays of a call; None: absent."""
    given = {name: x for name, x in arrays.items() if x is not None}
    for name, x in given.items():
        if isinstance(x, QTensor):
            raise Unsupported(
                f"{name}: a QTensor, which jax programs do not take; use numpy or torch, or octet.dequantize"
            )
    if "tsinks" in given and "sinks" not in given:
        raise InvalidArgument("tsinks: given without sinks, to which it belongs")
    if "tq" in given and "sinks" in given:
        given.setdefault("tsinks", jnp.zeros_like(given["sinks"]))
    for name in ("sinks", "tsinks", "alibi_slopes"):
        if name in given:
            given[name] = by_head(name, given[name], options)
    if "cu_seqlens_q" in given:
        _expect_lengths(options, given)
    return _filled(options, given)


def by_head(name: str, x: Any, options: Options) -> Any:
    """Sinks, their tangent or slopes in the type that the library takes."""
    if x is None:
        return None
    _plan.expect_by_head(name, x, jnp.issubdtype(x.dtype, jnp.floating))
    return x.astype(_plan.lse_type(adapter, options))


def _expect_lengths(options: Options, given: dict[str, Any]) -> None:
    """Has the library check sequence lengths that are known now; on the CPU it checks others when the program runs."""
    lengths = [given["cu_seqlens_q"], given["cu_seqlens_k"]]
    known = all(not isinstance(x, jax.core.Tracer) and x.is_fully_addressable for x in lengths)
    if not known or given["q"].ndim != 3 or given["k"].ndim != 3:
        return
    # Arrays of no heads: nothing is computed.
    q, k = (np.empty((given[name].shape[0], 0, 8), np.float32) for name in ("q", "k"))
    bounds = Options("f32", "thd", max_seqlen_q=options.max_seqlen_q, max_seqlen_k=options.max_seqlen_k)
    _numpy.run_attention(bounds, q, k, k, cu_seqlens_q=np.asarray(lengths[0]), cu_seqlens_k=np.asarray(lengths[1]))


def _filled(options: Options, given: dict[str, Any]) -> tuple[Options, dict[str, Any]]:
    """Zeros after head dims that are no multiple of 8."""
    asked, options = _plan.filled([(name, adapter.view(name, x), None) for name, x in given.items()], options)

    def fill(x: Any, shape: tuple[int, ...]) -> Any:
        return x if x.shape == shape else jnp.pad(x, [(0, n - m) for m, n in zip(x.shape, shape, strict=True)])

    return options, {name: fill(given[name], view.shape) for name, view, _ in asked}


def _cut(x: Any, like: Any) -> Any:
    """x without what _filled added to the head dim of `like`."""
    return x if x.shape[-1:] == like.shape[-1:] else x[..., : like.shape[-1]]


def run_attention(
    options: Options, q: Any, k: Any, v: Any, *, return_lse: bool = False, **more: Any
) -> tuple[Any, Any]:
    """(o, lse)"""
    options, operands = _call_of(options, q=q, k=k, v=v, **more)
    o, lse, _ = bind(forward_p, *operands.values(), names=tuple(operands), options=options, residual=False)
    return _cut(o, v), lse


def run_vjp(options: Options, q: Any, k: Any, v: Any, do: Any, dlse: Any = None, **more: Any) -> tuple[Any, ...]:
    """(dq, dk, dv), and dsinks where there are sinks"""
    options, operands = _call_of(options, q=q, k=k, v=v, **more, do_=do)
    do = operands.pop("do_")
    how = {"options": options, "residual": _plan.needs_residual(adapter, options, q)}
    saved = bind(forward_p, *operands.values(), names=tuple(operands), **how)
    given = {"do_": do} | ({} if dlse is None else {"dlse": dlse})
    operands = given | operands | dict(zip(("o", "lse", "o_residual"), saved, strict=True))
    found = bind(backward_p, *operands.values(), names=tuple(operands), **how)
    gradients = [_cut(d, x) for d, x in zip(found, (q, k, v), strict=False)]
    return *gradients, *(d.astype(more["sinks"].dtype) for d in found[3:])


def run_jvp(
    options: Options,
    q: Any,
    k: Any,
    v: Any,
    tq: Any,
    tk: Any,
    tv: Any,
    *,
    tsinks: Any = None,
    return_lse: bool = False,
    **more: Any,
) -> tuple[Any, ...]:
    """(o, to), with return_lse (o, to, lse, tlse); o and lse are differentiable, their tangents are not"""
    options, operands = _call_of(options, q=q, k=k, v=v, **more, tq=tq, tk=tk, tv=tv, tsinks=tsinks)
    o, to, lse, tlse = bind(pair_p, *operands.values(), names=tuple(operands), options=options, residual=False)
    found = _cut(o, v), _cut(to, v)
    return (*found, lse, tlse) if return_lse else found


def to_numpy(x: Any) -> np.ndarray:
    return np.asarray(x)
