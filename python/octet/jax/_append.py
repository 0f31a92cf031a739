"""octet.append of jax arrays: a primitive from caches to caches, which are written in place where they are
donated."""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octet import _abi, _appending, _numpy
from octet._appending import Rope
from octet._descriptors import struct
from octet._operands import Operands
from octet.errors import Unsupported
from octet.jax._adapter import compute, view_on
from octet.jax._primitives import bind, primitive_of, reject_gradients, result_like

_CACHES = ("k_cache", "v_cache")


def _results(names: Sequence[str]) -> tuple[str, ...]:
    """The operands that a result is like."""
    return (*_CACHES, "q") if "q" in names else _CACHES


def _compute(platform: str, *arrays: Any, names: tuple[str, ...], rope: Rope, layout: str) -> Sequence[Any]:
    given = dict(zip(names, arrays, strict=True))
    shapes = [jax.ShapeDtypeStruct(given[name].shape, given[name].dtype) for name in _results(names)]
    more = {"k_cache": given["k_cache"], "v_cache": given["v_cache"]} | (
        {"q_turned": given["q"]} if "q" in given else {}
    )
    described = [*given.items(), *more.items()]
    tensors = [_appending.described(name, view_on(name, x, platform), layout) for name, x in described]
    arguments = struct(_abi.AppendArguments)
    for (name, _), tensor in zip(described, tensors, strict=True):  # a cache is the result
        setattr(arguments, name, ctypes.pointer(tensor))
    if rope.style != "none":
        arguments.rope = ctypes.pointer(_appending.rope_of(rope))
    by_python = functools.partial(_by_python, names, rope, layout)
    in_place = {names.index(name): i for i, name in enumerate(_CACHES)}
    return compute("octet_append", platform, arrays, shapes, [arguments], tensors, by_python, in_place)


def _by_python(names: tuple[str, ...], rope: Rope, layout: str, *arrays: Any) -> list[np.ndarray]:
    given = {name: np.array(x) if name in _CACHES else np.asarray(x) for name, x in zip(names, arrays, strict=True)}
    turned = _appending.run(_numpy.adapter, given, rope, layout)
    return [given["k_cache"], given["v_cache"], *([] if turned is None else [turned])]


def _batch(*_: Any, **__: Any) -> Any:
    raise Unsupported(
        "octet.append: mapped by vmap, allowed: one call for the whole batch, whose caches have a dimension for it"
    )


append_p = primitive_of(
    "octet_append",
    lambda *arrays, names, **_: [result_like(arrays[0], arrays[names.index(name)]) for name in _results(names)],
    _compute,
    _batch,
)
reject_gradients(append_p, "append")


def run_append(operands: Operands, rope: Rope, layout: str) -> tuple[Any, ...]:
    """(k_cache, v_cache), and with q the queries turned; see `octet.append`."""
    for name, x in operands.items():
        _appending.described(name, view_on(name, x, "cpu"), layout)  # rejects other ranks
    given = {name: jnp.asarray(x) for name, x in operands.items()}
    return tuple(bind(append_p, *given.values(), names=tuple(given), rope=rope, layout=layout))
