"""A pass as the library is asked for it: the structs of octet.h."""

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias, TypeVar

from octet import _abi
from octet._library import check, lib, text_of
from octet._operands import dims_of
from octet._options import Options, tile_of
from octet._qtensor import Coding
from octet._rounding import struct_of
from octet._views import View

# A name of octet_arguments, its array's view, and how it is coded, if it is: then "<name>.scale", "<name>.zero_point"
# and "<name>.mean" are operands too.
Operand: TypeAlias = tuple[str, View, Coding | None]


_Struct = TypeVar("_Struct", bound=ctypes.Structure)


def struct(kind: type[_Struct], **fields: object) -> _Struct:
    """A struct of octet.h, whose first field is its size."""
    return kind(ctypes.sizeof(kind), **fields)


def tensor_of(view: View, dims: Sequence[int]) -> _abi.Tensor:
    """The four-dimensional view whose dimension i is dims[i] of the array, or 1 where that is -1."""
    shape = [1 if d < 0 else view.shape[d] for d in dims]
    strides = [0 if d < 0 else view.strides[d] for d in dims]
    return struct(
        _abi.Tensor,
        dtype=view.dtype,
        shape=(ctypes.c_int64 * 4)(*shape),
        stride=(ctypes.c_int64 * 4)(*strides),
        device=view.device,
        device_index=view.device_index,
    )


def quantization_of(coding: Coding) -> _abi.Quantization:
    return struct(_abi.Quantization, **coding._asdict())


def attention_of(kind: str, options: Options) -> _abi.Attention:
    mask = (_abi.MASK_CAUSAL if options.causal != "no" else 0) | (_abi.MASK_WINDOW if options.window else 0)
    alignment = options.causal if options.causal in _abi.ALIGNMENTS else options.alignment
    left, right = options.window or (0, 0)
    return struct(
        _abi.Attention,
        precision=_abi.PRECISIONS[options.precision],
        scale=options.scale,
        mask=mask,
        alignment=_abi.ALIGNMENTS[alignment],
        bias_correction=_abi.BIAS_CORRECTIONS[options.bias_correction],
        window_left=left,
        window_right=right,
        softcap=options.softcap,
        beta=options.beta,
        hadamard=_abi.SWITCHES[options.hadamard],
        smooth_q=_abi.SWITCHES[options.smooth_q],
        deterministic=bool(options.deterministic),
        threads=options.threads,
        backend=options.backend.encode() or None,
        dropout_p=options.dropout_p,
        tile=tile_of(options, kind).encode() or None,
        rounding=ctypes.pointer(struct_of(options.rounding)) if options.rounding else None,
    )


class Plan:
    """The descriptors of one call. Not to be shared between threads: addresses are written into it."""

    def __init__(self, kind: str, options: Options, operands: Iterable[Operand]) -> None:
        self.attention = attention_of(kind, options)
        self.arguments = struct(_abi.Arguments, max_seqlen_q=options.max_seqlen_q, max_seqlen_k=options.max_seqlen_k)
        setattr(self.arguments, "pass", _abi.PASSES[kind])
        self.tensors: list[_abi.Tensor] = []
        self._codings: dict[str, _abi.Quantization] = {}
        for name, view, coding in operands:
            tensor = tensor_of(view, dims_of(name, view, options.layout))
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
        self._size: int | None = None

    def at(self, addresses: Iterable[int]) -> "Plan":
        """This plan with the addresses of a call's operands, in their order."""
        for tensor, address in zip(self.tensors, addresses, strict=True):
            tensor.data = address
        return self

    def anywhere(self) -> "Plan":
        """This plan at pretended addresses, to be asked about: each tensor has all the room that the library allows."""
        return self.at((i + 1) << 49 for i in range(len(self.tensors)))

    def workspace_size(self) -> int:
        size = ctypes.c_size_t()
        if status := lib.octet_workspace_size(*self._references, ctypes.byref(size)):
            check(status)
        self._size = size.value
        return size.value

    def size(self) -> int:
        """The size of the workspace, when last asked for."""
        return self.workspace_size() if self._size is None else self._size

    def run(self, workspace: Callable[[int], tuple[object, int]], stream: int | None) -> None:
        """`workspace(bytes)` gives the memory, which is held during the call, and its address."""
        size = self.size()
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

    def tiles(self) -> str:
        return text_of(lambda text, capacity, length: lib.octet_tiles(*self._references, text, capacity, length))
