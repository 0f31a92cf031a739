"""The jax front, where `octet.attention` and the other functions of `octet` come with jax arrays.

They work under jit, grad, jvp, linearize, vmap and shard_map.
"""

from typing import Any

import numpy as np

from octet import _passes
from octet._api import attention, attention_jvp, attention_varlen, attention_vjp
from octet._options import Options
from octet._qtensor import QTensor
from octet.errors import Unsupported
from octet.jax._front import front
from octet.jax._primitives import backward_p, forward_p, pair_p

__all__ = ["attention", "attention_jvp", "attention_varlen", "attention_vjp"]


def _operands(q: Any, k: Any, v: Any, more: dict[str, Any]) -> dict[str, Any]:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if isinstance(x, QTensor):
            raise Unsupported(
                f"{name}: a QTensor, which jax programs do not take; use numpy or torch, or octet.dequantize"
            )
    return {"q": q, "k": k, "v": v} | {name: x for name, x in more.items() if x is not None}


def run_attention(
    options: Options, q: Any, k: Any, v: Any, *, return_lse: bool = False, **more: Any
) -> tuple[Any, Any]:
    """(o, lse)"""
    operands = _operands(q, k, v, more)
    o, lse, _ = forward_p.bind(*operands.values(), names=tuple(operands), options=options, residual=False)
    return o, lse


def run_vjp(options: Options, q: Any, k: Any, v: Any, do: Any, **more: Any) -> tuple[Any, Any, Any]:
    """(dq, dk, dv)"""
    operands = _operands(q, k, v, more)
    how = {"options": options, "residual": _passes.needs_residual(front, options, q)}
    saved = forward_p.bind(*operands.values(), names=tuple(operands), **how)
    operands = {"do_": do} | operands | dict(zip(("o", "lse", "o_residual"), saved, strict=True))
    return tuple(backward_p.bind(*operands.values(), names=tuple(operands), **how))


def run_jvp(
    options: Options, q: Any, k: Any, v: Any, tq: Any, tk: Any, tv: Any, *, return_lse: bool = False, **more: Any
) -> tuple[Any, Any]:
    """(o, to); o is differentiable, `to` is not"""
    operands = _operands(q, k, v, more) | {"tq": tq, "tk": tk, "tv": tv}
    return tuple(pair_p.bind(*operands.values(), names=tuple(operands), options=options, residual=False))


def to_numpy(x: Any) -> np.ndarray:
    return np.asarray(x)
