"""octet_append over arrays of any framework: the plan of a call, which is kept, and its run."""

import ctypes
import threading
from collections.abc import Hashable
from typing import Any, NamedTuple

from octet import _abi
from octet._adapters import Adapter
from octet._descriptors import quantization_of, struct, tensor_of
from octet._library import check, lib
from octet._operands import Operands
from octet._options import LAYOUTS
from octet._qtensor import Coding
from octet._views import View, dense_strides
from octet.errors import InvalidArgument


class Rope(NamedTuple):
    """octet_rope"""

    style: str = "none"
    dim: int = 0
    offset: int = 0
    base: float = 0.0


# Which dimensions of the caller's array are batch, head, token and dim of octet_append_arguments; else they are those
# of the layout.
_DIMS = {
    "seqused_k": (-1, -1, -1, 0),
    "cu_seqlens": (-1, -1, -1, 0),
    "block_table": (0, -1, -1, 1),
    "rope_cos": (-1, -1, 0, 1),
    "rope_sin": (-1, -1, 0, 1),
    "k_scale": (0, 1, 2, 3),
    "v_scale": (0, 1, 2, 3),
}
_AXES = {4: "4 dimensions", 2: "2 dimensions", 1: "1 dimension"}
_KEPT = 512  # calls of each thread


def described(name: str, view: View, layout: str) -> _abi.Tensor:
    """An array as octet_append takes it, without an address."""
    dims = _DIMS.get(name, LAYOUTS[layout])
    if len(view.shape) != (rank := max(dims) + 1):
        raise InvalidArgument(f"{name}: shape {list(view.shape)}, expected {_AXES[rank]}")
    return tensor_of(view, dims)


def rope_of(rope: Rope) -> _abi.Rope:
    """octet_rope"""
    return struct(_abi.Rope, style=_abi.ROPE_STYLES[rope.style], dim=rope.dim, offset=rope.offset, base=rope.base)


def arguments_of(tensors: dict[str, _abi.Tensor], rope: Rope) -> _abi.AppendArguments:
    """octet_append_arguments of described arrays; k_scale and v_scale are those of the caches."""
    given = dict(tensors)
    for name in ("k", "v"):
        if f"{name}_scale" in given:
            how = quantization_of(Coding(_abi.OPERANDS[name], _abi.GRANULARITIES["token"]))
            how.scale = ctypes.pointer(given.pop(f"{name}_scale"))
            given[f"{name}_cache"].quantization = ctypes.pointer(how)
    arguments = struct(_abi.AppendArguments, **{name: ctypes.pointer(x) for name, x in given.items()})
    if rope.style != "none":
        arguments.rope = ctypes.pointer(rope_of(rope))
    return arguments


class Call:
    """An append of such arrays. Not to be shared between threads: addresses are written into it."""

    def __init__(self, adapter: Adapter, operands: Operands, rope: Rope, layout: str) -> None:
        self._adapter = adapter
        self._turned = None
        if "q" in operands:
            q = operands["q"]
            shape = tuple(q.shape)
            self._turned = shape, dense_strides(shape, adapter.order(q)), q.dtype
        tensors = {
            name: described(name, adapter.view(name, x), layout) for name, x in self._with_turned(operands).items()
        }
        self._tensors = list(tensors.values())
        self._arguments = arguments_of(tensors, rope)
        self._reference = ctypes.byref(self._arguments)

    def _with_turned(self, operands: Operands) -> Operands:
        if not self._turned:
            return operands
        return operands | {"q_turned": self._adapter.empty(*self._turned, operands["q"])}

    def __call__(self, operands: Operands) -> Any:
        """Appends k and v to k_cache and v_cache, whose scales are k_scale and v_scale. Returns q, where it is given,
        turned: an array of its own."""
        address = self._adapter.address
        operands = self._with_turned(operands)
        for tensor, array in zip(self._tensors, operands.values(), strict=True):
            tensor.data = address(array)
        if status := lib.octet_append(self._reference, self._adapter.stream(operands["k"])):
            check(status)
        return operands.get("q_turned")


class _Kept(threading.local):
    def __init__(self) -> None:
        self.calls: dict[Hashable, Call] = {}


_kept = _Kept()


def known(adapter: Adapter, operands: Operands, rope: Rope, layout: str) -> tuple[Hashable, Call | None]:
    """The key of a call, and the call where it is kept."""
    key = (rope, layout, *operands, *map(adapter.key, operands.values()))
    return key, _kept.calls.get(key)


def run(adapter: Adapter, operands: Operands, rope: Rope, layout: str) -> Any:
    """See Call."""
    key, call = known(adapter, operands, rope, layout)
    if call is None:
        calls = _kept.calls
        if len(calls) >= _KEPT:
            calls.clear()
        call = calls[key] = Call(adapter, operands, rope, layout)
    return call(operands)
