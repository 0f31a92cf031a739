"""jax's arrays as the library sees them, and a call of octet_run from a jax program.

The adapter is the part of _adapters.Adapter that explain, supports and primitives need. Nothing is computed by it, so
arrays may be abstract, and the rest of an adapter, addresses and memory, is XLA's business.

Where liboctet_jax.so lies beside the library and was built for an interface that jax has, XLA calls its handlers, on
the stream that XLA works on. Otherwise XLA calls back into Python, on one CPU device alone. The call is checked when
the program is lowered, so rejections come before it runs.
"""

import ctypes
import functools
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octet import _abi, _library, _numpy
from octet._descriptors import Plan
from octet._operands import label
from octet._options import Options, dtype_name, dtype_of
from octet._rounding import struct_of
from octet._versions import expect_version
from octet._views import View, contiguous_strides
from octet.errors import Unsupported

expect_version("jax", jax.__version__)

_TARGET = "octet"
APPEND_TARGET = "octet_append"
_ALIGNMENT = 64  # of a workspace


def platform_of(x: Any) -> str:
    """The name in _abi.DEVICES of where x lies, or where an abstract array would by default."""
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
        platform = next(iter(x.devices())).platform
    else:
        default: Any = getattr(jax.config, "jax_default_device", None)
        platform = getattr(default, "platform", default) or jax.default_backend()
    return "cpu" if platform == "cpu" else "cuda"


def view_on(name: str, x: Any, platform: str) -> View:
    number = _abi.DTYPES[dtype_name(x.dtype, label(name))]
    return View(number, tuple(x.shape), contiguous_strides(x.shape), _abi.DEVICES[platform])


class JaxAdapter:
    """Arrays, tracers and ShapeDtypeStructs; contiguous, on the CPU or a CUDA device."""

    dtype_name = staticmethod(dtype_name)
    dtype_of = staticmethod(dtype_of)
    is_true = staticmethod(bool)

    def own_type(self, q: Any) -> str:
        return dtype_name(q.dtype, "q")

    def is_float(self, x: Any) -> bool:
        return jnp.issubdtype(x.dtype, jnp.floating)

    def cast(self, x: Any, dtype: Any) -> Any:
        return x.astype(dtype)

    def view(self, name: str, x: Any) -> View:
        return view_on(name, x, platform_of(x))

    def integers(self, numbers: Sequence[int], like: Any) -> jax.Array:
        return jnp.array(numbers, jnp.int32)

    def order(self, x: Any) -> tuple[int, ...]:
        return tuple(range(x.ndim))

    def resolve(self, options: Options, like: Any) -> Options:
        return options


adapter = JaxAdapter()


def _interface_of_jax() -> tuple[int, int] | None:
    """The version of XLA's interface that this jax has, as its header says; None if it has no such header."""
    header = pathlib.Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h"
    if not header.exists():
        return None
    found = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header.read_text()))
    return int(found["MAJOR"]), int(found["MINOR"])


@functools.cache
def why_no_handlers() -> str:
    """Registers the XLA handlers; the reason where they cannot be, "" where they are.

    jax would find handlers of a later interface than its own only when it starts a device, and then fail to start it.
    """
    path = _library.beside("liboctet_jax.so")
    if path is None:
        return f"there is no liboctet_jax.so beside {_library.path}: it was built without the headers of jaxlib"
    try:
        handlers = ctypes.CDLL(str(path))
        major, minor = (ctypes.c_int32 * 2).in_dll(handlers, "octet_jax_interface")
    except (OSError, ValueError) as error:
        return f"{path} cannot be loaded: {error}"
    offered = _interface_of_jax()
    if offered is None or offered[0] != major or offered[1] < minor:
        shown = "unknown" if offered is None else f"{offered[0]}.{offered[1]}"
        return (
            f"{path} was built for version {major}.{minor} of XLA's interface, which jax {jax.__version__} does not "
            f"have: its version is {shown}; build octet with the headers of an older jaxlib, or take a newer jax"
        )
    for target, name in ((_TARGET, "octet_jax"), (APPEND_TARGET, "octet_jax_append")):
        for platform in ("cpu", "cuda"):
            handler = jax.ffi.pycapsule(getattr(handlers, f"{name}_{platform}"))
            jax.ffi.register_ffi_target(target, handler, platform="CUDA" if platform == "cuda" else platform)
    return ""


def has_handlers() -> bool:
    return not why_no_handlers()


def expect_one_device() -> None:
    """Rejects a mesh of several devices where XLA calls back into Python."""
    if jax.sharding.get_abstract_mesh().size > 1:
        raise Unsupported(
            f"several devices of the CPU need XLA handlers of octet, but {why_no_handlers()}; callbacks into Python, "
            "which serve one device, could wait for each other forever"
        )


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
    plan = Plan(kind, options, [(name, view_on(name, x, platform), None) for name, x in described]).anywhere()
    size = plan.workspace_size()  # raises what the library has against the call
    shapes = [x for _, x in results]
    if has_handlers():
        # On the CPU the handler allocates: how much depends on the threads that it may use.
        memory = [jax.ShapeDtypeStruct((size + _ALIGNMENT,), np.uint8)] if platform == "cuda" else []
        found = _by_xla(plan, options, [name for name, _ in described], arrays, shapes + memory)
        return found[: len(shapes)]
    if platform != "cpu":
        raise Unsupported(f"jax on {platform} needs XLA handlers of octet, but {why_no_handlers()}")
    expect_one_device()
    callback = functools.partial(_by_python, kind, options, tuple(name for name, _ in described), tuple(shapes))
    return jax.pure_callback(callback, shapes, *arrays)


def _by_xla(plan: Plan, options: Options, names: Sequence[str], arrays: Any, shapes: Any) -> Sequence[jax.Array]:
    # Addresses of this process stay out of the program, which may be kept or exported: backend and tile travel by name,
    # a rounding behind octet_attention.
    tile = (plan.attention.tile or b"").decode()
    plan.attention.backend = plan.attention.tile = plan.attention.rounding = None
    rounding = bytes(struct_of(options.rounding)) if options.rounding else b""
    for name in names:
        setattr(plan.arguments, name, None)
    return jax.ffi.ffi_call(_TARGET, shapes)(
        *arrays,
        attention=np.frombuffer(bytes(plan.attention) + rounding, np.uint8),
        arguments=np.frombuffer(bytes(plan.arguments), np.uint8),
        tensors=np.frombuffer(b"".join(map(bytes, plan.tensors)), np.uint8),
        offsets=np.array([getattr(_abi.Arguments, name).offset for name in names], np.int64),
        backend=options.backend,
        tile=tile,
    )


def _by_python(kind: str, options: Options, names: Any, shapes: Any, *arrays: Any) -> list[np.ndarray]:
    numpy = _numpy.adapter
    made = [np.empty(x.shape, x.dtype) for x in shapes]
    operands = [np.asarray(x) for x in arrays] + made
    plan = Plan(kind, options, [(name, numpy.view(name, x), None) for name, x in zip(names, operands, strict=True)])
    plan.at(numpy.address(x) for x in operands).run(lambda size: numpy.workspace(size, None), None)
    return made
