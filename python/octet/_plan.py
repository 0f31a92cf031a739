"""The descriptors of one call of octet_run: octet_attention, octet_arguments and their tensors.

Arrays arrive in the caller's layout and are described to the library as [batch, head, token, dim] by their strides.
"""

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from octet import _abi
from octet._library import check, lib, text_of
from octet._options import LAYOUTS, Options, attention_of
from octet.errors import InvalidArgument

# Arrays that follow the layout of the call, with a head dim. The others have shapes of their own.
IN_LAYOUT = {"q", "k", "v", "o", "o_residual", "do_", "dq", "dk", "dv", "tq", "tk", "tv", "to"}
_AXES = {"bhsd": "[batch, head, token, dim]", "bshd": "[batch, token, head, dim]", "thd": "[token, head, dim]"}


class View(NamedTuple):
    """An array as the library sees it, but for its address. Strides count elements."""

    dtype: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: int = 0
    device_index: int = 0


class Coding(NamedTuple):
    """How the codes of an operand stand for numbers: octet_quantization without its arrays."""

    operand: int
    granularity: int
    zero_point_kind: int = 0
    block: int = 0
    hadamard_seed: int = 0


# A name of octet_arguments, its array's view, and how it is coded, if it is: then "<name>.scale", "<name>.zero_point"
# and "<name>.mean" are operands too.
Operand: TypeAlias = tuple[str, View, Coding | None]


def tensor_of(view: View, dims: Sequence[int]) -> _abi.Tensor:
    """The four-dimensional view whose dimension i is dims[i] of the array, or 1 where that is -1."""
    shape = [1 if d < 0 else view.shape[d] for d in dims]
    strides = [0 if d < 0 else view.strides[d] for d in dims]
    return _abi.Tensor(
        dtype=view.dtype,
        shape=(ctypes.c_int64 * 4)(*shape),
        stride=(ctypes.c_int64 * 4)(*strides),
        device=view.device,
        device_index=view.device_index,
    )


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """In elements, row-major."""
    return dense_strides(shape, range(len(shape)))


def dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """In elements, of an array whose axes lie in memory in `order`, the outermost first."""
    strides, step = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis] = step
        step *= max(shape[axis], 1)
    return tuple(strides)


def memory_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The axes of an array in the order in which they lie in memory, the outermost first.

    The rule is that of torch.empty_like: the larger stride is outside, among equal strides the larger axis, and an axis
    of stride 0 keeps its place.
    """
    steps = [abs(stride) for stride in strides]
    moving = [axis for axis, step in enumerate(steps) if step != 0]
    places = iter(sorted(moving, key=lambda axis: (steps[axis], shape[axis]), reverse=True))
    return tuple([next(places) if step != 0 else axis for axis, step in enumerate(steps)])


def quantization_of(coding: Coding) -> _abi.Quantization:
    return _abi.Quantization(**coding._asdict())


def _dims(name: str, view: View, layout: str) -> Sequence[int]:
    """Returns which dimensions of the caller's array are batch, head, token and dim of octet_arguments; -1: none is."""
    rank = len(view.shape)
    in_layout = LAYOUTS[layout]
    dims: tuple[int, ...]
    if name in IN_LAYOUT:
        want, dims = 1 + max(in_layout), in_layout
    elif name in ("lse", "dlse", "tlse"):
        want, dims = 2 + (layout != "thd"), (0, 1, 2, -1) if layout != "thd" else (-1, 0, 1, -1)
    elif name in ("sinks", "dsinks", "tsinks"):  # [heads], or [batch, heads]
        want, dims = (2, (0, 1, -1, -1)) if rank == 2 else (1, (-1, 0, -1, -1))
    elif name.startswith("cu_seqlens"):
        want, dims = 1, (-1, -1, -1, 0)
    elif name == "mask":
        want, dims = min(rank, 4), tuple(max(d, -1) for d in range(rank - 4, rank))
    else:
        want, dims = 4, (0, 1, 2, 3)
    if rank != want:
        at_most = "at most " if name == "mask" else ""
        expected = _AXES[layout] if name in IN_LAYOUT else f"{at_most}{want} dimension{'s' * (want > 1)}"
        raise InvalidArgument(f"{name.rstrip('_')}: shape {list(view.shape)}, expected {expected}")
    return dims


class Plan:
    """The descriptors of one call. Not to be shared between threads: addresses are written into it."""

    def __init__(self, kind: str, options: Options, operands: Iterable[Operand]) -> None:
        self.attention = attention_of(options)
        self.arguments = _abi.Arguments(max_seqlen_q=options.max_seqlen_q, max_seqlen_k=options.max_seqlen_k)
        setattr(self.arguments, "pass", _abi.PASSES[kind])
        self.tensors: list[_abi.Tensor] = []
        self._codings: dict[str, _abi.Quantization] = {}
        for name, view, coding in operands:
            tensor = tensor_of(view, _dims(name, view, options.layout))
            self.tensors.append(tensor)
            owner, _, part = name.partition(".")
            if part:
                setattr(self._codings[owner], part, ctypes.pointer(tensor))
                continue
            setattr(self.arguments, name, ctypes.pointer(tensor))
            if coding:
                self._codings[name] = quantization_of(coding)
                tensor.quantization = ctypes.pointer(self._codings[name])
        self._references = ctypes.byref(self.attention), ctypes.byref(self.arguments)
        self._size: int | None = None  # of the workspace, when last asked for

    def at(self, addresses: Iterable[int]) -> "Plan":
        """This plan with the addresses of a call's operands, in their order."""
        for tensor, address in zip(self.tensors, addresses, strict=True):
            tensor.data = address
        return self

    def anywhere(self) -> "Plan":
        """This plan at pretended addresses, to be asked about."""
        return self.at((i + 1) << 44 for i in range(len(self.tensors)))

    def workspace_size(self) -> int:
        size = ctypes.c_size_t()
        check(lib.octet_workspace_size(*self._references, ctypes.byref(size)))
        self._size = size.value
        return size.value

    def run(self, workspace: Callable[[int], tuple[object, int]], stream: int | None) -> None:
        """`workspace(bytes)` gives the memory, which is held during the call, and its address."""
        size = self.workspace_size() if self._size is None else self._size
        memory, address = workspace(size)
        status = lib.octet_run(*self._references, address, size, stream)
        if status == _abi.STATUS_WORKSPACE_TOO_SMALL:  # this thread may use more processors than before
            size = self.workspace_size()
            memory, address = workspace(size)
            status = lib.octet_run(*self._references, address, size, stream)
        if status:
            check(status)
        del memory

    def explain(self) -> str:
        return text_of(lambda text, capacity, length: lib.octet_explain(*self._references, text, capacity, length))
