"""The three passes for arrays of any framework. The first call with arrays of some shapes, strides and types describes
them to the library and decides what outputs to make; that is kept, and later calls fill in addresses.

A Front is what a framework has to offer; numpy's is in _numpy.py, torch's in torch/_front.py.
"""

import math
import threading
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from octet import _abi
from octet._options import Options
from octet._plan import IN_LAYOUT, Coding, Operand, Plan, View, dense_strides, memory_order
from octet._qtensor import QTensor
from octet.errors import InvalidArgument

_KEPT = 512  # calls of each thread
_MULTIPLE, _LARGEST_DIM = 8, 256  # of head dims in the library
_OF_V = {"v", "o", "o_residual", "do_", "dv", "tv", "to"}  # have the head dim of v, all others of IN_LAYOUT that of q

# The optional inputs that every pass has besides q, k, v.
_MORE = ("mask", "cu_seqlens_q", "cu_seqlens_k", "sinks")
# The inputs of each pass, in the order in which they are handed over; those that a call has not are None.
INPUTS = {
    "forward": ("q", "k", "v", *_MORE),
    "backward": ("do_", "q", "k", "v", "o", "lse", "o_residual", *_MORE, "dlse"),
    "jvp": ("q", "k", "v", "tq", "tk", "tv", *_MORE, "tsinks"),
}


class Types(Protocol):
    """The types of one framework's arrays."""

    def dtype_name(self, dtype: Any, what: str) -> str:
        """A name of _abi.DTYPES; refuses others, with `what` as whose dtype it is."""

    def own_type(self, q: Any) -> str:
        """The name of the type that q has when it is computed with."""

    def dtype_of(self, name: str) -> Any:
        """The framework's dtype of that name."""

    def order(self, array: Any) -> tuple[int, ...]:
        """Its axes as they lie in memory, the outermost first: see _plan.memory_order."""


class Front(Types, Protocol):
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
        return tuple(q_shape)  # the call will be refused for it
    return (*q_shape[:-1], v_shape[-1])


def lse_shape(q_shape: Sequence[int], layout: str) -> tuple[int, ...]:
    """[batch, head, token], or [head, token] of packed sequences."""
    if len(q_shape) != (3 if layout == "thd" else 4):
        return tuple(q_shape)  # the call will be refused for it
    if layout == "thd":
        return q_shape[1], q_shape[0]
    return (q_shape[0], q_shape[1], q_shape[2]) if layout == "bhsd" else (q_shape[0], q_shape[2], q_shape[1])


def needs_residual(front: Types, options: Options, q: Any) -> bool:
    """Returns whether a backward pass will read o_residual: some bias corrections take delta from the un-rounded o."""
    sixteen = options.precision in ("f16", "bf16") and options.bias_correction in ("f16", "exact_delta")
    return sixteen and (options.out_dtype or front.dtype_name(q.dtype, "q")) in ("f16", "bf16", "e4m3")


def expect_sinks(name: str, x: Any, floats: bool) -> None:
    """Refuses what cannot be sinks: one float of each head. `floats`: whether x is of a float type."""
    if not floats:
        raise InvalidArgument(f"{name}: dtype {x.dtype}, allowed: a float type")
    if x.ndim != 1:
        raise InvalidArgument(f"{name}: shape {list(x.shape)}, expected [heads], those of q")


def lse_type(front: Types, options: Options) -> Any:
    """The dtype of lse, and of sinks as the library takes them."""
    return front.dtype_of("f64" if options.precision == "f64" else "f32")


def results(
    front: Types, kind: str, options: Options, q: Any, k: Any, v: Any, extra: bool = False, sinks: Any = None
) -> list[Result]:
    """Returns the results of a pass. `extra` adds what few callers need: o_residual of a forward pass, tlse of a jvp.

    Results lie in memory as what they belong to does: o and its like as q, gradients as their operands. They have its
    type too, but bfloat16 beside e4m3, which fp8_raw alone writes.
    """

    def type_beside(x: Any) -> Any:
        keeps = options.precision == "fp8_raw" or front.dtype_name(x.dtype, "q") != "e4m3"
        return x.dtype if keeps else front.dtype_of("bf16")

    def order(x: Any) -> tuple[int, ...]:
        return front.order(x.codes if isinstance(x, QTensor) else x)

    if kind == "backward":
        of = {"dq": q, "dk": k, "dv": v} | ({} if sinks is None else {"dsinks": sinks})
        return [Result(name, tuple(x.shape), type_beside(x), order(x)) for name, x in of.items()]
    dtype = front.dtype_of(options.out_dtype) if options.out_dtype else type_beside(q)
    o = Result("o", output_shape(q.shape, v.shape), dtype, order(q))
    shape = lse_shape(q.shape, options.layout)
    lse = Result("lse", shape, lse_type(front, options), tuple(range(len(shape))))
    if kind == "jvp":
        return [o, lse, o._replace(name="to"), *([lse._replace(name="tlse")] if extra else [])]
    return [o, lse, *([o._replace(name="o_residual")] if extra else [])]


def _parts(name: str, x: QTensor) -> Iterator[tuple[str, Any]]:
    """The arrays of a quantised operand, the codes first."""
    yield name, x.codes
    for part in ("scale", "zero_point", "mean"):
        if (values := getattr(x, part)) is not None:
            yield f"{name}.{part}", values


def _arrays(arrays: Sequence[Any]) -> list[Any]:
    """All arrays of a call that it has."""
    if any(type(x) is QTensor for x in arrays):
        return [y for x in arrays for _, y in (_parts("", x) if type(x) is QTensor else (("", x),)) if y is not None]
    return [x for x in arrays if x is not None]


def _key(front: Front, x: Any) -> Hashable:
    if type(x) is QTensor:
        return x.format, x.layout, x.dtype, x.coding, *[(name, front.key(y)) for name, y in _parts("", x)]
    return None if x is None else front.key(x)


def _operands(front: Front, name: str, x: Any, layout: str) -> Iterator[Operand]:
    if not isinstance(x, QTensor):
        yield name, front.view(name, x), None
        return
    if x.layout != layout:
        raise InvalidArgument(f"{name}: quantised in layout {x.layout!r}, but the call's is {layout!r}")
    for part, array in _parts(name, x):
        view = front.view(part.rpartition(".")[2], array)
        coded: Coding | None = None
        if part == name:
            view, coded = view._replace(dtype=_abi.DTYPES[x.format]), x.coding
        yield part, view, coded


def filled(operands: Sequence[Operand], options: Options) -> tuple[list[Operand], Options]:
    """Returns what the library is asked. Head dims that are no multiple of 8 are filled with zeros, which add nothing
    to any sum. The scale stays that of q's own head dim."""
    dims = {name: view.shape[-1] for name, view, _ in operands if name in IN_LAYOUT and view.shape}
    if not {"q", "v"} <= dims.keys():
        return list(operands), options  # the call will be refused for their ranks
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
        front: Front,
        kind: str,
        options: Options,
        arrays: Sequence[Any],
        extra: bool = False,
        into: Sequence[Any] | None = None,
    ) -> None:
        given = {name: x for name, x in zip(INPUTS[kind], arrays, strict=True) if x is not None}
        made = results(front, kind, options, given["q"], given["k"], given["v"], extra, given.get("sinks"))
        operands = [y for name, x in given.items() for y in _operands(front, name, x, options.layout)]
        where = next(view for name, view, _ in operands if name == "q")
        self._front = front
        all_strides = [dense_strides(x.shape, x.order) for x in made]
        if into:
            all_strides = [front.view(x.name, y).strides for x, y in zip(made, into, strict=True)]
        self._made = [(x.shape, y, x.dtype) for x, y in zip(made, all_strides, strict=True)]
        self._inputs = len(operands)
        for x, (shape, strides, dtype) in zip(made, self._made, strict=True):
            number = _abi.DTYPES[front.dtype_name(dtype, x.name)]
            operands.append((x.name, View(number, shape, strides, where.device, where.device_index), None))
        asked, options = filled(operands, options)
        self._wide = {
            i: (wide.shape, wide.strides)
            for i, ((_, view, _), (_, wide, _)) in enumerate(zip(operands, asked, strict=True))
            if wide.shape != view.shape
        }
        self.fills = bool(self._wide)  # what the plan describes are not the caller's arrays
        self.plan = Plan(kind, front.resolve(options, _arrays((given["q"],))[0]), asked)

    def __call__(self, arrays: Sequence[Any], into: Sequence[Any] | None = None) -> Sequence[Any]:
        """Runs the pass; the outputs, new arrays unless they are given."""
        front = self._front
        given = _arrays(arrays)
        like = given[0]
        made = into or [front.empty(*how, like) for how in self._made]
        used = [*given, *made]
        for i, (shape, strides) in self._wide.items():
            x, used[i] = used[i], front.empty(shape, strides, used[i].dtype, like)
            if i < self._inputs:
                used[i][..., : x.shape[-1]] = x
                used[i][..., x.shape[-1] :] = 0
        self.plan.at([front.address(x) for x in used])
        self.plan.run(lambda size: front.workspace(size, like), front.stream(like))
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
    front: Front,
    kind: str,
    options: Options,
    arrays: Sequence[Any],
    extra: bool = False,
    into: Sequence[Any] | None = None,
) -> tuple[Call, bool]:
    """The call of `run`, and whether it was there already."""
    calls = _kept.calls
    key = (kind, options, extra, front.state(), *[_key(front, x) for x in arrays])
    if into:
        key += tuple([front.key(x) for x in into])
    call = calls.get(key)
    if call is not None:
        return call, True
    if len(calls) >= _KEPT:
        calls.clear()
    call = calls[key] = Call(front, kind, options, arrays, extra, into)
    return call, False


def run(
    front: Front,
    kind: str,
    options: Options,
    arrays: Sequence[Any],
    extra: bool = False,
    into: Sequence[Any] | None = None,
) -> Sequence[Any]:
    """Runs a pass over INPUTS[kind], on the device of the first, and gives its `results`: new arrays, or `into`, which
    have their shapes and types and any strides."""
    return find(front, kind, options, arrays, extra, into)[0](arrays, into)
