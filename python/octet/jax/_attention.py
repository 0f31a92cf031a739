"""Attention of jax arrays, by primitives that work under jit, grad, jvp, linearize, vmap, shard_map and export."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octet import _numpy, _plan
from octet._operands import KINDS, RESULTS, Operands, inputs_of, with_gradient
from octet._options import Options
from octet._qtensor import QTensor
from octet._results import by_head, needs_residual
from octet.errors import InvalidArgument, Unsupported
from octet.jax._adapter import adapter
from octet.jax._codes import run_coded
from octet.jax._primitives import backward_p, bind, forward_p, pair_p


def _call_of(options: Options, operands: Operands) -> tuple[Options, Operands]:
    """The options and the operands of a primitive, from the arrays of a call."""
    given = dict(operands)
    if "tsinks" in given and "sinks" not in given:
        raise InvalidArgument("tsinks: given without sinks, to which it belongs")
    given = by_head(adapter, options, given)
    if "dropout_seed" in given:
        given["dropout_seed"] = _seed_of(given["dropout_seed"])
    if "cu_seqlens_q" in given:
        _expect_lengths(options, given)
    return (options, given) if _has_codes(given) else _filled(options, given)


def _has_codes(operands: Operands) -> bool:
    return any(isinstance(x, QTensor) for x in operands.values())


def _expect_numbers(operands: Operands) -> None:
    """Rejects QTensors where there is a derivative."""
    for name, x in operands.items():
        if isinstance(x, QTensor):
            raise Unsupported(f"{name}: a QTensor, of which jax programs have no derivative; use octet.dequantize")


def _seed_of(x: Any) -> Any:
    """A seed and an offset at random by a key of jax.random, or by a key for each element of the batch."""
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    words = jax.vmap(lambda key: jax.random.bits(key, (4,), jnp.uint32))(x.reshape(-1))
    return jax.lax.bitcast_convert_type(words, jnp.int32).reshape(*x.shape, 4)


def _expect_lengths(options: Options, given: Operands) -> None:
    """Has the library check sequence lengths that are known now; on the CPU it checks others when the program runs."""
    lengths = {name: x for name, x in given.items() if KINDS[name] == "lengths"}
    known = all(not isinstance(x, jax.core.Tracer) and x.is_fully_addressable for x in lengths.values())
    if not known or any(len(given[name].shape) != 3 for name in "qk"):
        return
    # Arrays of no heads: nothing is computed.
    q, k = (np.empty((given[name].shape[0], 0, 8), np.float32) for name in ("q", "k"))
    bounds = Options("f32", "thd", max_seqlen_q=options.max_seqlen_q, max_seqlen_k=options.max_seqlen_k)
    lengths = {name: np.asarray(x) for name, x in lengths.items()}
    _numpy.run_attention(bounds, {"q": q, "k": k, "v": k, **lengths})


def _filled(options: Options, given: Operands) -> tuple[Options, Operands]:
    """Zeros after head dims that are no multiple of 8."""
    asked, options = _plan.filled([(name, adapter.view(name, x), None) for name, x in given.items()], options)

    def fill(x: Any, shape: tuple[int, ...]) -> Any:
        return x if x.shape == shape else jnp.pad(x, [(0, n - m) for m, n in zip(x.shape, shape, strict=True)])

    return options, {name: fill(given[name], view.shape) for name, view, _ in asked}


def _cut(x: Any, like: Any) -> Any:
    """x without what _filled added to the head dim of `like`."""
    return x if x.shape[-1:] == like.shape[-1:] else x[..., : like.shape[-1]]


def run_attention(options: Options, operands: Operands, return_lse: bool = False) -> tuple[Any, ...]:
    """(o, lse)"""
    options, given = _call_of(options, operands)
    if _has_codes(given):
        return run_coded(options, given)
    o, lse, _ = bind(forward_p, *given.values(), names=tuple(given), options=options, residual=False)
    return _cut(o, operands["v"]), lse


def run_vjp(options: Options, operands: Operands, return_dmask: bool = False) -> tuple[Any, ...]:
    """(dq, dk, dv), dsinks where there are sinks, and dmask where it is asked for"""
    _expect_numbers(operands)
    options, given = _call_of(options, operands)
    how = {"options": options, "residual": needs_residual(adapter, options, given["q"])}
    forward = inputs_of("forward", given)
    saved = bind(forward_p, *forward.values(), names=tuple(forward), **how)
    given |= dict(zip(RESULTS["forward"], saved, strict=True))
    found = bind(backward_p, *given.values(), names=tuple(given), of_mask=return_dmask, **how)
    gradients = dict(zip(with_gradient(operands, return_dmask), found, strict=True))
    more = {name: d.astype(operands[name].dtype) for name, d in gradients.items() if name not in ("q", "k", "v")}
    return *(_cut(gradients[name], operands[name]) for name in ("q", "k", "v")), *more.values()


def run_jvp(options: Options, operands: Operands, return_lse: bool = False) -> tuple[Any, ...]:
    """(o, to), with return_lse (o, to, lse, tlse); o and lse are differentiable, their tangents are not"""
    _expect_numbers(operands)
    options, given = _call_of(options, operands)
    forward = inputs_of("forward", given)
    given = forward | {name: x for name, x in given.items() if name not in forward}  # tangents come last
    o, to, lse, tlse = bind(pair_p, *given.values(), names=tuple(given), options=options, residual=False)
    found = _cut(o, operands["v"]), _cut(to, operands["v"])
    return (*found, lse, tlse) if return_lse else found


def to_numpy(x: Any) -> np.ndarray:
    return np.asarray(x)
