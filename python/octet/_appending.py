"""octet_append over arrays of any framework."""

import ctypes
from typing import Any, NamedTuple

from octet import _abi
from octet._adapters import Adapter
from octet._descriptors import quantization_of, struct, tensor_of
from octet._library import check, lib
from octet._operands import Operands
from octet._options import LAYOUTS
from octet._qtensor import Coding
from octet._views import dense_strides
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
    "block_table": (0, -1, -1, 1),
    "rope_cos": (-1, -1, 0, 1),
    "rope_sin": (-1, -1, 0, 1),
    "k_scale": (0, 1, 2, 3),
    "v_scale": (0, 1, 2, 3),
}
_AXES = {4: "4 dimensions", 2: "2 dimensions", 1: "1 dimension"}


def run(adapter: Adapter, operands: Operands, rope: Rope, layout: str) -> Any:
    """Appends k and v to k_cache and v_cache, whose scales are k_scale and v_scale. Returns q, where it is given,
    turned: an array of its own."""
    if "q" in operands:
        q = operands["q"]
        shape = tuple(q.shape)
        turned = adapter.empty(shape, dense_strides(shape, adapter.order(q)), q.dtype, q)
        operands = operands | {"q_turned": turned}
    described = {}
    for name, array in operands.items():
        view, dims = adapter.view(name, array), _DIMS.get(name, LAYOUTS[layout])
        if len(view.shape) != (rank := max(dims) + 1):
            raise InvalidArgument(f"{name}: shape {list(view.shape)}, expected {_AXES[rank]}")
        described[name] = tensor_of(view, dims)
        described[name].data = adapter.address(array)
    for name, operand in (("k", "k"), ("v", "v")):
        if f"{name}_scale" in described:
            coding = Coding(_abi.OPERANDS[operand], _abi.GRANULARITIES["token"])
            how = quantization_of(coding)
            how.scale = ctypes.pointer(described.pop(f"{name}_scale"))
            described[f"{name}_cache"].quantization = ctypes.pointer(how)
    arguments = struct(_abi.AppendArguments, **{name: ctypes.pointer(x) for name, x in described.items()})
    if rope.style != "none":
        turn = struct(_abi.Rope, style=_abi.ROPE_STYLES[rope.style], dim=rope.dim, offset=rope.offset, base=rope.base)
        arguments.rope = ctypes.pointer(turn)
    check(lib.octet_append(ctypes.byref(arguments), adapter.stream(operands["k"])))
    return operands.get("q_turned")
