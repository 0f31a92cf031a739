"""A pass over arrays of any framework, from its description to its run, and the plans of passes, which are kept.

The first call with arrays of some shapes, strides and types describes them to the library, as [batch, head, token, dim]
by their strides, and decides what outputs to make; that is kept, and later calls fill in addresses. An Adapter is what
a framework has to offer; numpy's is in _numpy.py, torch's in torch/_adapter.py.
"""

import ctypes
import math
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from octet import _abi
from octet._library import check, lib, text_of
from octet._options import LAYOUTS, Options
from octet._qtensor import Coding, QTensor
from octet.errors import Error, InvalidArgument, reject_dtype

_KEPT = 512  # calls of each thread
_MULTIPLE, _LARGEST_DIM = 8, 256  # of head dims in the library
_OF_V = {"v", "o", "o_residual", "do_", "dv", "tv", "to"}  # have the head dim of v, all others of IN_LAYOUT that of q

# The optional inputs that every pass has besides q, k, v.
_MORE = ("mask", "cu_seqlens_q", "cu_seqlens_k", "sinks")
# The inputs of each pass, in the order in which they are handed over; those that a call has not are None, and may be
# left out at the end.
INPUTS = {
    "forward": ("q", "k", "v", *_MORE, "alibi_slopes"),
    "backward": ("do_", "q", "k", "v", "o", "lse", "o_residual", *_MORE, "dlse", "alibi_slopes"),
    "jvp": ("q", "k", "v", "tq", "tk", "tv", *_MORE, "tsinks", "alibi_slopes"),
}


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
    return struct(_abi.Quantization, **coding._asdict())


def dims_of(name: str, view: Any, layout: str) -> Sequence[int]:
    """Returns which dimensions of the caller's array are batch, head, token and dim of octet_arguments; -1: none is."""
    rank = len(view.shape)
    in_layout = LAYOUTS[layout]
    dims: tuple[int, ...]
    if name in IN_LAYOUT:
        want, dims = 1 + max(in_layout), in_layout
    elif name in ("lse", "dlse", "tlse"):
        want, dims = 2 + (layout != "thd"), (0, 1, 2, -1) if layout != "thd" else (-1, 0, 1, -1)
    elif name in ("sinks", "dsinks", "tsinks", "alibi_slopes"):  # [heads], or [batch, heads]
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


def attention_of(options: Options) -> _abi.Attention:
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
    )


class Plan:
    """The descriptors of one call. Not to be shared between threads: addresses are written into it."""

    def __init__(self, kind: str, options: Options, operands: Iterable[Operand]) -> None:
        self.attention = attention_of(options)
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
        self._size: int | None = None  # of the workspace, when last asked for

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


class Types(Protocol):
    """The types of one framework's arrays."""

    def dtype_name(self, dtype: Any, what: str) -> str:
        """A name of _abi.DTYPES; rejects others, with `what` as whose dtype it is."""

    def own_type(self, q: Any) -> str:
        """The name of the type that q has when it is computed with."""

    def dtype_of(self, name: str) -> Any:
        """The framework's dtype of that name."""

    def order(self, array: Any) -> tuple[int, ...]:
        """Its axes as they lie in memory, the outermost first: see _plan.memory_order."""

    def is_true(self, comparison: Any) -> bool:
        """Whether a comparison of sizes holds; False where they are symbols of a program that is traced."""


class Adapter(Types, Protocol):
    """Arrays of one framework. `Any` is such an array."""

    def view(self, name: str, array: Any) -> View: ...

    def key(self, array: Any) -> Hashable:
        """All that `view` depends on: equal keys, equal views."""

    def address(self, array: Any) -> int: ...

    def empty(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any, like: Any) -> Any:
        """A dense array on the device of `like`; strides count elements."""

    def workspace(self, size: int, like: Any) -> tuple[object, int]:
        """`size` bytes aligned to 64 on the device of `like`, and their address."""

    def stream(self, like: Any) -> int | None:
        """The CUDA stream that the caller works on; None on the CPU."""

    def state(self) -> Hashable:
        """All that `resolve` depends on, but for its arguments."""

    def resolve(self, options: Options, like: Any) -> Options:
        """Fills in what the framework decides: threads, determinism."""


class Result(NamedTuple):
    """An output to be made."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    order: tuple[int, ...]  # of its axes in memory, the outermost first


def output_shape(q_shape: Sequence[int], v_shape: Sequence[int]) -> tuple[int, ...]:
    if not q_shape or not v_shape:
        return tuple(q_shape)  # the call will be rejected for it
    return (*q_shape[:-1], v_shape[-1])


def lse_shape(q_shape: Sequence[int], layout: str) -> tuple[int, ...]:
    """[batch, head, token], or [head, token] of packed sequences."""
    if len(q_shape) != (3 if layout == "thd" else 4):
        return tuple(q_shape)  # the call will be rejected for it
    if layout == "thd":
        return q_shape[1], q_shape[0]
    return (q_shape[0], q_shape[1], q_shape[2]) if layout == "bhsd" else (q_shape[0], q_shape[2], q_shape[1])


def own_type(adapter: Types, q: Any) -> str:
    """The type that precision None stands for."""
    if isinstance(q, QTensor):
        return q.format
    found = adapter.own_type(q)
    if found not in ("f64", "f32", "f16", "bf16", "e4m3"):
        reject_dtype("q", str(q.dtype).removeprefix("torch."), "; codes come as the QTensor of octet.quantize")
    return found


_ROUNDED = ("f16", "bf16", "e4m3")  # types to which o is rounded: o_residual keeps the eight bits that follow


def needs_residual(adapter: Types, options: Options, q: Any) -> bool:
    """Returns whether a backward pass will read o_residual: some bias corrections take delta from the un-rounded o."""
    sixteen = options.precision in ("f16", "bf16") and options.bias_correction in ("f16", "exact_delta")
    return sixteen and (options.out_dtype or adapter.dtype_name(q.dtype, "q")) in _ROUNDED


def expect_by_head(name: str, x: Any, floats: bool) -> None:
    """Rejects what cannot be sinks: one float of each head; slopes may be of each element of the batch too. `floats`:
    whether x is of a float type."""
    if not floats:
        raise InvalidArgument(f"{name}: dtype {x.dtype}, allowed: a float type")
    slopes = name == "alibi_slopes"
    if x.ndim != 1 and not (slopes and x.ndim == 2):
        batch = " or [batch, heads]" if slopes else ""
        raise InvalidArgument(f"{name}: shape {list(x.shape)}, expected [heads]{batch}, those of q")


def lse_type(adapter: Types, options: Options) -> Any:
    """The dtype of lse, and of sinks and slopes as the library takes them."""
    return adapter.dtype_of("f64" if options.precision == "f64" else "f32")


def results(
    adapter: Types, kind: str, options: Options, q: Any, k: Any, v: Any, extra: bool = False, sinks: Any = None
) -> list[Result]:
    """Returns the results of a pass. `extra` adds what few callers need: o_residual of a forward pass, tlse of a jvp.

    Results lie in memory as what they belong to does: o and its like as q, gradients as their operands. They have its
    type too, but bfloat16 beside e4m3, which fp8_raw alone writes, and o_residual is int8 beside a rounded o.
    """

    def type_beside(x: Any) -> Any:
        keeps = options.precision == "fp8_raw" or adapter.dtype_name(x.dtype, "q") != "e4m3"
        return x.dtype if keeps else adapter.dtype_of("bf16")

    def order(x: Any) -> tuple[int, ...]:
        return adapter.order(x.codes if isinstance(x, QTensor) else x)

    if kind == "backward":
        of = {"dq": q, "dk": k, "dv": v} | ({} if sinks is None else {"dsinks": sinks})
        return [Result(name, tuple(x.shape), type_beside(x), order(x)) for name, x in of.items()]
    dtype = adapter.dtype_of(options.out_dtype) if options.out_dtype else type_beside(q)
    o = Result("o", output_shape(q.shape, v.shape), dtype, order(q))
    shape = lse_shape(q.shape, options.layout)
    lse = Result("lse", shape, lse_type(adapter, options), tuple(range(len(shape))))
    if kind == "jvp":
        return [o, lse, o._replace(name="to"), *([lse._replace(name="tlse")] if extra else [])]
    if not extra:
        return [o, lse]
    rounded = adapter.dtype_name(dtype, "o") in _ROUNDED
    return [o, lse, o._replace(name="o_residual", dtype=adapter.dtype_of("i8") if rounded else dtype)]


def _parts(name: str, x: QTensor) -> Iterator[tuple[str, Any]]:
    """The arrays of a quantized operand, the codes first."""
    yield name, x.codes
    for part in ("scale", "zero_point", "mean"):
        if (values := getattr(x, part)) is not None:
            yield f"{name}.{part}", values


def _arrays(arrays: Sequence[Any]) -> list[Any]:
    """All arrays of a call that it has."""
    if any(type(x) is QTensor for x in arrays):
        return [y for x in arrays for _, y in (_parts("", x) if type(x) is QTensor else (("", x),)) if y is not None]
    return [x for x in arrays if x is not None]


def _key(adapter: Adapter, x: Any) -> Hashable:
    if type(x) is QTensor:
        return x.format, x.layout, x.dtype, x.coding, *[(name, adapter.key(y)) for name, y in _parts("", x)]
    return None if x is None else adapter.key(x)


def _operands(adapter: Adapter, name: str, x: Any, layout: str, where: View) -> Iterator[Operand]:
    """`where`: on whose device a Result lies, an array that was not made."""
    if isinstance(x, Result):
        number = _abi.DTYPES[adapter.dtype_name(x.dtype, name)]
        strides = dense_strides(x.shape, x.order)
        yield name, View(number, x.shape, strides, where.device, where.device_index), None
        return
    if not isinstance(x, QTensor):
        yield name, adapter.view(name, x), None
        return
    if x.layout != layout:
        raise InvalidArgument(f"{name}: quantized in layout {x.layout!r}, but the call's is {layout!r}")
    for part, array in _parts(name, x):
        view = adapter.view(part.rpartition(".")[2], array)
        coded: Coding | None = None
        if part == name:
            view, coded = view._replace(dtype=_abi.DTYPES[x.format]), x.coding
        yield part, view, coded


def filled(operands: Sequence[Operand], options: Options) -> tuple[list[Operand], Options]:
    """Returns what the library is asked. Head dims that are no multiple of 8 are filled with zeros, which add nothing
    to any sum. The scale stays that of q's own head dim."""
    dims = {name: view.shape[-1] for name, view, _ in operands if name in IN_LAYOUT and view.shape}
    if not {"q", "v"} <= dims.keys():
        return list(operands), options  # the call will be rejected for their ranks
    for name, dim in dims.items():
        owner = "v" if name in _OF_V else "q"
        if not 1 <= dim <= _LARGEST_DIM:
            raise InvalidArgument(f"{name.rstrip('_')}: head dim {dim}, allowed: 1 to {_LARGEST_DIM}")
        if (dim % _MULTIPLE or dims[owner] % _MULTIPLE) and dim != dims[owner]:
            raise InvalidArgument(f"{name.rstrip('_')}: head dim {dim}, expected {dims[owner]}, that of {owner}")

    def fill(operand: Operand) -> Operand:
        name, view, coding = operand
        if coding or not dims.get(name, 0) % _MULTIPLE:
            return operand
        shape = *view.shape[:-1], dims[name] + -dims[name] % _MULTIPLE
        strides = dense_strides(shape, memory_order(view.shape, view.strides))
        return name, view._replace(shape=shape, strides=strides), None

    if dims["q"] % _MULTIPLE:
        options = options._replace(scale=options.scale or 1 / math.sqrt(dims["q"]))
    return [fill(x) for x in operands], options


class Call:
    """One pass over such arrays. Not to be shared between threads: addresses are written into its plan."""

    def __init__(
        self,
        adapter: Adapter,
        kind: str,
        options: Options,
        arrays: Sequence[Any],
        extra: bool = False,
        into: Sequence[Any] | None = None,
    ) -> None:
        given = {name: x for name, x in zip(INPUTS[kind], arrays, strict=False) if x is not None}
        made = results(adapter, kind, options, given["q"], given["k"], given["v"], extra, given.get("sinks"))
        q = given["q"]
        where = adapter.view("q", q.codes if isinstance(q, QTensor) else q)
        operands = [y for name, x in given.items() for y in _operands(adapter, name, x, options.layout, where)]
        self._adapter = adapter
        all_strides = [dense_strides(x.shape, x.order) for x in made]
        if into:
            all_strides = [adapter.view(x.name, y).strides for x, y in zip(made, into, strict=True)]
        self._made = [(x.shape, y, x.dtype) for x, y in zip(made, all_strides, strict=True)]
        self._inputs = len(operands)
        for x, (shape, strides, dtype) in zip(made, self._made, strict=True):
            number = _abi.DTYPES[adapter.dtype_name(dtype, x.name)]
            operands.append((x.name, View(number, shape, strides, where.device, where.device_index), None))
        asked, options = filled(operands, options)
        self._wide = {
            i: (wide.shape, wide.strides)
            for i, ((_, view, _), (_, wide, _)) in enumerate(zip(operands, asked, strict=True))
            if wide.shape != view.shape
        }
        self.fills = bool(self._wide)  # what the plan describes are not the caller's arrays
        self.plan = Plan(kind, adapter.resolve(options, _arrays((given["q"],))[0]), asked)

    def __call__(self, arrays: Sequence[Any], into: Sequence[Any] | None = None) -> Sequence[Any]:
        """Runs the pass; the outputs, new arrays unless they are given."""
        adapter = self._adapter
        given = _arrays(arrays)
        like = given[0]
        made = into or [adapter.empty(*how, like) for how in self._made]
        used = [*given, *made]
        for i, (shape, strides) in self._wide.items():
            x, used[i] = used[i], adapter.empty(shape, strides, used[i].dtype, like)
            if i < self._inputs:
                used[i][..., : x.shape[-1]] = x
                used[i][..., x.shape[-1] :] = 0
        self.plan.at([adapter.address(x) for x in used])
        self.plan.run(lambda size: adapter.workspace(size, like), adapter.stream(like))
        for i in self._wide:
            if i >= self._inputs:
                x = made[i - self._inputs]
                x[...] = used[i][..., : x.shape[-1]]
        return made


class _Kept(threading.local):
    def __init__(self) -> None:
        self.calls: dict[Hashable, Call] = {}


_kept = _Kept()


def find(
    adapter: Adapter,
    kind: str,
    options: Options,
    arrays: Sequence[Any],
    extra: bool = False,
    into: Sequence[Any] | None = None,
) -> tuple[Call, bool]:
    """The call of `run`, and whether it was there already."""
    calls = _kept.calls
    key = (kind, options, extra, adapter.state(), *[_key(adapter, x) for x in arrays])
    if into:
        key += tuple([adapter.key(x) for x in into])
    call = calls.get(key)
    if call is not None:
        return call, True
    if len(calls) >= _KEPT:
        calls.clear()
    call = calls[key] = Call(adapter, kind, options, arrays, extra, into)
    return call, False


def run(
    adapter: Adapter,
    kind: str,
    options: Options,
    arrays: Sequence[Any],
    extra: bool = False,
    into: Sequence[Any] | None = None,
) -> Sequence[Any]:
    """Runs a pass over INPUTS[kind], on the device of the first, and gives its `results`: new arrays, or `into`, which
    have their shapes and types and any strides."""
    return find(adapter, kind, options, arrays, extra, into)[0](arrays, into)


def planned(
    adapter: Adapter,
    kind: str,
    options: Options,
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    sinks: Any = None,
    slopes: Any = None,
) -> Plan:
    """Returns the plan of a pass over such arrays, at pretended addresses. Sinks and slopes are of the type of lse."""
    more = (mask, None, None, sinks)
    arrays: tuple[Any, ...]
    if kind == "jvp":
        arrays = (q, k, v, q, k, v, *more, None, slopes)
    elif kind == "forward":
        arrays = (q, k, v, *more, slopes)
    else:
        residual = needs_residual(adapter, options, q)
        saved = results(adapter, "forward", options, q, k, v, residual)
        o, lse, o_residual = saved if residual else (*saved, None)
        arrays = (o, q, k, v, o, lse, o_residual, *more, None, slopes)
    return Call(adapter, kind, options, arrays).plan.anywhere()


def unsupported_reason(adapter: Adapter, kind: str, options: Options, *arrays: Any) -> str:
    """Returns why no backend computes the pass of `planned`, or what is wrong with its arguments, or ""."""
    try:
        planned(adapter, kind, options, *arrays).workspace_size()
    except Error as rejection:
        return str(rejection)
    return ""
