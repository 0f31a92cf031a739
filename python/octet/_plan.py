"""The three passes over arrays of any framework: the plan of each, which is kept, and its run.

The first call with arrays of some shapes, strides and types describes them to the library, as [batch, head, token, dim]
by their strides, and decides what outputs to make; that is kept, and later calls fill in addresses.
"""

import math
import threading
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from octet import _abi
from octet._adapters import Adapter
from octet._descriptors import Operand, Plan
from octet._operands import KINDS, Operands, label
from octet._options import Options
from octet._qtensor import Coding, QTensor
from octet._results import Result, needs_residual, results
from octet._views import View, dense_strides, memory_order
from octet.errors import Error, InvalidArgument

_KEPT = 512  # calls of each thread
_MULTIPLE, _LARGEST_DIM = 8, 512  # of head dims in the library
_OF_V = {"v", "o", "o_residual", "do_", "dv", "tv", "to"}  # have the head dim of v, all others in the layout that of q


def _parts(name: str, x: QTensor) -> Iterator[tuple[str, Any]]:
    """The arrays of a quantized operand, the codes first."""
    yield name, x.codes
    for part in ("scale", "zero_point", "mean"):
        if (values := getattr(x, part)) is not None:
            yield f"{name}.{part}", values


def _first(x: Any) -> Any:
    """An array of a framework: that of the codes, if x is quantized."""
    return x.codes if isinstance(x, QTensor) else x


def _coded_key(adapter: Adapter, x: QTensor) -> Hashable:
    return x.format, x.layout, x.dtype, x.coding, *[(name, adapter.key(y)) for name, y in _parts("", x)]


def described(adapter: Adapter, name: str, x: Any, layout: str, where: View) -> Iterator[Operand]:
    """An operand of a call as a plan has it: one array, or the parts of a QTensor. `where`: on whose device a Result
    lies, an array that was not made."""
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
    dims = {name: view.shape[-1] for name, view, _ in operands if KINDS.get(name) == "layout" and view.shape}
    if not {"q", "v"} <= dims.keys():
        return list(operands), options  # the call will be rejected for their ranks
    for name, dim in dims.items():
        owner = "v" if name in _OF_V else "q"
        if not 1 <= dim <= _LARGEST_DIM:
            raise InvalidArgument(f"{label(name)}: head dim {dim}, allowed: 1 to {_LARGEST_DIM}")
        if (dim % _MULTIPLE or dims[owner] % _MULTIPLE) and dim != dims[owner]:
            raise InvalidArgument(f"{label(name)}: head dim {dim}, expected {dims[owner]}, that of {owner}")

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
        arrays: Operands,
        extra: bool = False,
        into: Sequence[Any] | None = None,
    ) -> None:
        made = results(adapter, kind, options, arrays, extra)
        where = adapter.view("q", _first(arrays["q"]))
        operands = [y for name, x in arrays.items() for y in described(adapter, name, x, options.layout, where)]
        self._adapter = adapter
        all_strides = [dense_strides(x.shape, x.order) for x in made]
        if into:
            made = made[: len(into)]
            all_strides = [adapter.view(x.name, y).strides for x, y in zip(made, into, strict=True)]
        self.results = tuple([x.name for x in made])
        self._made = [(x.shape, y, x.dtype) for x, y in zip(made, all_strides, strict=True)]
        self._inputs = len(operands)
        self._has_codes = any([type(x) is QTensor for x in arrays.values()])
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
        self.plan = Plan(kind, adapter.resolve(options, _first(arrays["q"])), asked)

    def __call__(self, arrays: Operands, into: Sequence[Any] | None = None) -> Sequence[Any]:
        """Runs the pass; the outputs, new arrays unless they are given."""
        adapter = self._adapter
        given = list(arrays.values())
        if self._has_codes:
            given = [y for x in given for _, y in (_parts("", x) if type(x) is QTensor else (("", x),))]
        like = given[0]
        made = into or [adapter.empty(*how, like) for how in self._made]
        used = [*given, *made]
        for i, (shape, strides) in self._wide.items():
            x, used[i] = used[i], adapter.empty(shape, strides, used[i].dtype, like)
            if i < self._inputs:
                used[i][..., : x.shape[-1]] = x
                used[i][..., x.shape[-1] :] = 0
        self.plan.at(map(adapter.address, used))
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


def _key(adapter: Adapter, kind: str, options: Options, arrays: Operands, extra: bool) -> tuple[Hashable, ...]:
    key_of = adapter.key
    keys = [_coded_key(adapter, x) if type(x) is QTensor else key_of(x) for x in arrays.values()]
    return (kind, options, extra, adapter.state(), *arrays, *keys)


def known(adapter: Adapter, kind: str, options: Options, arrays: Operands) -> Call | None:
    """The call of `run`, if it is there already."""
    return _kept.calls.get(_key(adapter, kind, options, arrays, False))


def find(
    adapter: Adapter,
    kind: str,
    options: Options,
    arrays: Operands,
    extra: bool = False,
    into: Sequence[Any] | None = None,
) -> tuple[Call, bool]:
    """The call of `run`, and whether it was there already."""
    calls = _kept.calls
    key = _key(adapter, kind, options, arrays, extra)
    if into:
        key += tuple(map(adapter.key, into))
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
    arrays: Operands,
    extra: bool = False,
    into: Sequence[Any] | None = None,
) -> Sequence[Any]:
    """Runs a pass over arrays of INPUTS[kind], on the device of the first. It gives its `results`: new arrays, or
    `into`, the first of them or all, which have their shapes and types and any strides."""
    return find(adapter, kind, options, arrays, extra, into)[0](arrays, into)


def planned(adapter: Adapter, kind: str, options: Options, operands: Operands, extra: bool = False) -> Plan:
    """Returns the plan of a pass over such arrays, at pretended addresses. Inputs of the pass that `operands`, those of
    a forward pass, has not are made up. Sinks and slopes are of the type of lse. `extra`: as of `results`."""
    given = dict(operands)
    if kind == "jvp":
        given |= {f"t{name}": operands[name] for name in ("q", "k", "v")}
    elif kind == "backward":
        made = results(adapter, "forward", options, operands, needs_residual(adapter, options, operands["q"]))
        given |= {x.name: x for x in made}
        given["do_"] = given["o"]
    return Call(adapter, kind, options, given, extra).plan.anywhere()


def unsupported_reason(adapter: Adapter, kind: str, options: Options, operands: Operands, extra: bool = False) -> str:
    """Returns why no backend computes the pass of `planned`, or what is wrong with its arguments, or ""."""
    try:
        planned(adapter, kind, options, operands, extra).workspace_size()
    except Error as rejection:
        return str(rejection)
    return ""
