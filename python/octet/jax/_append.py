"""octet.append of jax arrays: a primitive from caches to caches, which are written in place where they are
donated."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octet import _appending, _numpy
from octet._appending import Rope
from octet._operands import Operands
from octet.errors import Unsupported
from octet.jax._adapter import compute, view_on
from octet.jax._primitives import bind, primitive_of, reject_gradients, result_like

# These are written: the caches (of a QTensor its codes and its scales) and the queries, turned by RoPE.
_WRITTEN = ("k_cache", "v_cache", "k_scale", "v_scale")


def _results(names: Sequence[str]) -> list[str]:
    """The operands that a result is like."""
    return [name for name in (*_WRITTEN, "q") if name in names]


def _compute(platform: str, *arrays: Any, names: tuple[str, ...], rope: Rope, layout: str) -> Sequence[Any]:
    given = dict(zip(names, arrays, strict=True))
    made = {name: jax.ShapeDtypeStruct(given[name].shape, given[name].dtype) for name in _results(names)}
    describe = lambda name, x: _appending.described(name, view_on(name, x, platform), layout)
    operands = {name: describe(name, x) for name, x in given.items()}
    results = {"q_turned" if name == "q" else name: describe(name, x) for name, x in made.items()}
    tensors = [*operands.values(), *results.values()]
    arguments = _appending.arguments_of(operands | results, rope)
    by_python = functools.partial(_by_python, names, rope, layout)
    in_place = {names.index(name): i for i, name in enumerate(made) if name in _WRITTEN}
    return compute("octet_append", platform, arrays, list(made.values()), [arguments], tensors, by_python, in_place)


def _by_python(names: tuple[str, ...], rope: Rope, layout: str, *arrays: Any) -> list[np.ndarray]:
    given = {name: np.array(x) if name in _WRITTEN else np.asarray(x) for name, x in zip(names, arrays, strict=True)}
    turned = _appending.run(_numpy.adapter, given, rope, layout)
    return [turned if name == "q" else given[name] for name in _results(names)]


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


def run_append(operands: Operands, rope: Rope, layout: str) -> Operands:
    """The caches, with their scales, and with q the queries turned, by their names; see `octet.append`."""
    for name, x in operands.items():
        _appending.described(name, view_on(name, x, "cpu"), layout)  # rejects other ranks
    given = {name: jnp.asarray(x) for name, x in operands.items()}
    found = bind(append_p, *given.values(), names=tuple(given), rope=rope, layout=layout)
    return dict(zip(_results(tuple(given)), found, strict=True))
