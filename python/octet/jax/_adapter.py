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
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octet import _abi, _library, _numpy
from octet._descriptors import Plan
from octet._operands import Operands, label
from octet._options import Options, dtype_name, dtype_of
from octet._plan import described
from octet._qtensor import QTensor
from octet._versions import expect_version
from octet._views import View, contiguous_strides
from octet.errors import Unsupported

expect_version("jax", jax.__version__)

_TARGETS = ("octet", "octet_append", "octet_quantize", "octet_dequantize")
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
    for target in _TARGETS:
        for platform in ("cpu", "cuda"):
            handler = jax.ffi.pycapsule(getattr(handlers, f"{target.replace('octet', 'octet_jax', 1)}_{platform}"))
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


class OnPlatform(JaxAdapter):
    """Arrays in a program for a platform, "cpu" or "cuda"; XLA knows their addresses when the program runs."""

    def __init__(self, platform: str) -> None:
        self._platform = platform

    def view(self, name: str, x: Any) -> View:
        return view_on(name, x, self._platform)

    def address(self, x: Any) -> int:
        return 0


def _without_addresses(
    arguments: Sequence[ctypes.Structure | None], tensors: Sequence[_abi.Tensor]
) -> dict[str, np.ndarray]:
    """The arguments of a function as src/ffi/octet_jax.cc puts them together again. Addresses of this process stay out
    of the program, which may be kept or exported."""
    memory = bytearray()
    places: dict[int, int] = {}
    pointers: list[int] = []

    def place_text(text: bytes) -> int:
        place = len(memory)
        memory.extend(text.ljust((len(text) + 8) // 8 * 8, b"\0"))
        return place

    def place_of(x: Any) -> int:
        """Where a struct lies in the memory, which gets it and all that it points to."""
        if (known := places.get(ctypes.addressof(x))) is not None:
            return known
        place = places[ctypes.addressof(x)] = place_text(bytes(x))
        copy = type(x).from_buffer_copy(x)
        for name, kind in x._fields_:
            found = getattr(x, name)
            is_pointer = hasattr(kind, "contents")
            if not is_pointer and kind not in (ctypes.c_char_p, ctypes.c_void_p):
                continue
            setattr(copy, name, None)
            if found and kind is not ctypes.c_void_p:  # that of an array, which XLA fills in
                to = place_of(found.contents) if is_pointer else place_text(found)
                pointers.extend((place + getattr(type(x), name).offset, to))
        memory[place : place + ctypes.sizeof(x)] = bytes(copy)
        return place

    roots = [-1 if x is None else place_of(x) for x in arguments]
    return {
        "tensors": np.array([place_of(x) for x in tensors], np.int64),
        "structs": np.frombuffer(bytes(memory), np.uint8),
        "pointers": np.array(pointers, np.int64),
        "arguments": np.array(roots, np.int64),
    }


def compute(
    target: str,
    platform: str,
    arrays: Sequence[Any],
    results: Sequence[jax.ShapeDtypeStruct],
    arguments: Sequence[ctypes.Structure | None],
    tensors: Sequence[_abi.Tensor],
    by_python: Callable[..., Any],
    aliases: dict[int, int] | None = None,
) -> Sequence[jax.Array]:
    """The results of a function of octet.h in a program for `platform`, "cpu" or "cuda".

    Args:
        target: the name of the handler.
        arguments: of the function, which lead to the tensors.
        tensors: those of arrays, then those of results, of which there may be more.
        by_python: what gives the results of numpy arrays where there are no handlers.
        aliases: from numbers of arrays to those of results that lie in their place.
    """
    if has_handlers():
        how = _without_addresses(arguments, tensors)
        return jax.ffi.ffi_call(target, results, input_output_aliases=aliases or {})(*arrays, **how)
    if platform != "cpu":
        raise Unsupported(f"jax on {platform} needs XLA handlers of octet, but {why_no_handlers()}")
    expect_one_device()
    return jax.pure_callback(by_python, results, *arrays)


def run(
    kind: str,
    options: Options,
    operands: Operands,
    results: Sequence[tuple[str, jax.ShapeDtypeStruct]],
    platform: str,
) -> Sequence[jax.Array]:
    """The results, in a program for `platform`, "cpu" or "cuda"."""
    arrays, tree = jax.tree.flatten(operands)
    shapes = [x for _, x in results]
    plan = _plan_of(OnPlatform(platform), kind, options, jax.tree.unflatten(tree, arrays), results).anywhere()
    size = plan.workspace_size()  # raises what the library has against the call
    names = tuple(name for name, _ in results)
    by_python = functools.partial(_by_python, kind, options, tree, names, tuple(shapes))
    # On the CPU the handler allocates: how much depends on the threads that it may use.
    memory = [jax.ShapeDtypeStruct((size + _ALIGNMENT,), np.uint8)] if platform == "cuda" else []
    arguments = plan.attention, plan.arguments
    found = compute("octet", platform, arrays, shapes + memory, arguments, plan.tensors, by_python)
    return found[: len(shapes)]


def _plan_of(adapter: Any, kind: str, options: Options, operands: Operands, results: Sequence[tuple[str, Any]]) -> Plan:
    """The plan of operands, QTensors with their parts, and results in these orders."""
    where = adapter.view("q", operands["q"].codes if isinstance(operands["q"], QTensor) else operands["q"])
    given = [y for name, x in operands.items() for y in described(adapter, name, x, options.layout, where)]
    return Plan(kind, options, [*given, *((name, adapter.view(name, x), None) for name, x in results)])


def _by_python(kind: str, options: Options, tree: Any, names: Any, shapes: Any, *arrays: Any) -> list[np.ndarray]:
    numpy = _numpy.adapter
    made = [np.empty(x.shape, x.dtype) for x in shapes]
    given = [np.asarray(x) for x in arrays]
    plan = _plan_of(numpy, kind, options, jax.tree.unflatten(tree, given), list(zip(names, made, strict=True)))
    plan.at(map(numpy.address, [*given, *made])).run(lambda size: numpy.workspace(size, None), None)
    return made
