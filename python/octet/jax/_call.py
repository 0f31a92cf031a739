"""A call of octet_run from a jax program.

Where liboctet_jax.so lies beside the library, XLA calls its handlers, on the stream that XLA works on. Otherwise XLA
calls back into Python, on the CPU alone. The call is judged when the program is lowered, so refusals come before it
runs.
"""

import ctypes
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from octet import _abi, _library, _numpy
from octet._options import Options
from octet._plan import Plan, View, contiguous_strides
from octet.errors import Unsupported

_HANDLERS = pathlib.Path(_library.path).parent / "liboctet_jax.so"
_TARGET = "octet"
_ALIGNMENT = 64  # of a workspace


@functools.cache
def has_handlers() -> bool:
    """Registers the XLA handlers, if they were built."""
    if not _HANDLERS.exists():
        return False
    handlers = ctypes.CDLL(str(_HANDLERS))
    jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(handlers.octet_jax_cpu), platform="cpu")
    jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(handlers.octet_jax_cuda), platform="CUDA")
    return True


def _judged(kind: str, options: Options, views: Sequence[tuple[str, View]]) -> tuple[Plan, int]:
    """The descriptors of the call and the size of its workspace; raises what the library has against it."""
    plan = Plan(kind, options, [(name, view, None) for name, view in views]).anywhere()
    return plan, plan.workspace_size()


def run(
    kind: str,
    options: Options,
    names: Sequence[str],
    arrays: Sequence[jax.Array],
    results: Sequence[tuple[str, jax.ShapeDtypeStruct]],
    platform: str,
) -> Sequence[jax.Array]:
    """The results, in a program for `platform`, "cpu" or "cuda"."""
    described: list[tuple[str, Any]] = [*zip(names, arrays, strict=True), *results]
    views = [
        (
            name,
            View(
                _abi.DTYPES[_numpy.dtype_name(x.dtype, name)],
                x.shape,
                contiguous_strides(x.shape),
                _abi.DEVICES[platform],
            ),
        )
        for name, x in described
    ]
    plan, size = _judged(kind, options, views)
    shapes = [x for _, x in results]
    if has_handlers():
        # On the CPU the handler allocates: how much depends on the threads that it may use.
        memory = [jax.ShapeDtypeStruct((size + _ALIGNMENT,), np.uint8)] if platform == "cuda" else []
        found = _by_xla(plan, options, [name for name, _ in described], arrays, shapes + memory)
        return found[: len(shapes)]
    if platform != "cpu":
        raise Unsupported(
            f"jax on {platform} needs liboctet_jax.so beside {_library.path}; build octet where jaxlib is installed"
        )
    callback = functools.partial(_by_python, kind, options, tuple(name for name, _ in described), tuple(shapes))
    return jax.pure_callback(callback, shapes, *arrays)


def _by_xla(plan: Plan, options: Options, names: Sequence[str], arrays: Any, shapes: Any) -> Sequence[jax.Array]:
    plan.attention.backend = None  # travels by its name
    return jax.ffi.ffi_call(_TARGET, shapes)(
        *arrays,
        attention=np.frombuffer(bytes(plan.attention), np.uint8),
        arguments=np.frombuffer(bytes(plan.arguments), np.uint8),
        tensors=np.frombuffer(b"".join(map(bytes, plan.tensors)), np.uint8),
        offsets=np.array([getattr(_abi.Arguments, name).offset for name in names], np.int64),
        backend=options.backend,
    )


def _by_python(kind: str, options: Options, names: Any, shapes: Any, *arrays: Any) -> list[np.ndarray]:
    front = _numpy.front
    made = [np.empty(x.shape, x.dtype) for x in shapes]
    operands = [np.asarray(x) for x in arrays] + made
    plan = Plan(kind, options, [(name, front.view(name, x), None) for name, x in zip(names, operands, strict=True)])
    plan.at(front.address(x) for x in operands).run(lambda size: front.workspace(size, None), None)
    return made
