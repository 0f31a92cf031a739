"""octet.append of jax arrays: a primitive from caches to caches, which are written in place where they are
donated."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from octet import _abi, _appending, _numpy
from octet._appending import Rope
from octet._descriptors import struct
from octet._operands import Operands
from octet.errors import Unsupported
from octet.jax._adapter import APPEND_TARGET, expect_one_device, has_handlers, view_on, why_no_handlers
from octet.jax._primitives import bind, result_like

_CACHES = ("k_cache", "v_cache")


def _results(names: Sequence[str]) -> tuple[str, ...]:
    """The operands that a result is like."""
    return (*_CACHES, "q") if "q" in names else _CACHES


def _compute(platform: str, *arrays: Any, names: tuple[str, ...], rope: Rope, layout: str) -> Sequence[Any]:
    given = dict(zip(names, arrays, strict=True))
    shapes = [jax.ShapeDtypeStruct(given[name].shape, given[name].dtype) for name in _results(names)]
    if not has_handlers():
        if platform != "cpu":
            raise Unsupported(f"jax on {platform} needs XLA handlers of octet, but {why_no_handlers()}")
        expect_one_device()
        return jax.pure_callback(functools.partial(_by_python, names, rope, layout), shapes, *arrays)
    more = {"k_cache": given["k_cache"], "v_cache": given["v_cache"]} | (
        {"q_turned": given["q"]} if "q" in given else {}
    )
    described = [*given.items(), *more.items()]
    tensors = [_appending.described(name, view_on(name, x, platform), layout) for name, x in described]
    turn = bytes(_appending.rope_of(rope)) if rope.style != "none" else b""
    return jax.ffi.ffi_call(
        APPEND_TARGET, shapes, input_output_aliases={names.index(name): i for i, name in enumerate(_CACHES)}
    )(
        *arrays,
        arguments=np.frombuffer(bytes(struct(_abi.AppendArguments)), np.uint8),
        rope=np.frombuffer(turn, np.uint8),
        tensors=np.frombuffer(b"".join(map(bytes, tensors)), np.uint8),
        offsets=np.array([getattr(_abi.AppendArguments, name).offset for name, _ in described], np.int64),
    )


def _by_python(names: tuple[str, ...], rope: Rope, layout: str, *arrays: Any) -> list[np.ndarray]:
    given = {name: np.array(x) if name in _CACHES else np.asarray(x) for name, x in zip(names, arrays, strict=True)}
    turned = _appending.run(_numpy.adapter, given, rope, layout)
    return [given["k_cache"], given["v_cache"], *([] if turned is None else [turned])]


def _reject(what: str, *_: Any, **__: Any) -> Any:
    raise Unsupported(f"octet.append: {what}")


append_p = Primitive("octet_append")
append_p.multiple_results = True
append_p.def_impl(functools.partial(xla.apply_primitive, append_p))
append_p.def_abstract_eval(
    lambda *arrays, names, **_: [result_like(arrays[0], arrays[names.index(name)]) for name in _results(names)]
)
for _platform in ("cpu", "cuda"):
    mlir.register_lowering(
        append_p, mlir.lower_fun(functools.partial(_compute, _platform), multiple_results=True), platform=_platform
    )
batching.primitive_batchers[append_p] = functools.partial(
    _reject, "mapped by vmap, allowed: one call for the whole batch, whose caches have a dimension for it"
)
ad.primitive_jvps[append_p] = functools.partial(
    _reject, "differentiated, but caches have no gradient; use jax.lax.stop_gradient"
)


def run_append(operands: Operands, rope: Rope, layout: str) -> tuple[Any, ...]:
    """(k_cache, v_cache), and with q the queries turned; see `octet.append`."""
    for name, x in operands.items():
        _appending.described(name, view_on(name, x, "cpu"), layout)  # rejects other ranks
    given = {name: jnp.asarray(x) for name, x in operands.items()}
    return tuple(bind(append_p, *given.values(), names=tuple(given), rope=rope, layout=layout))
