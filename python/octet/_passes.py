"""The three passes for arrays of any framework: lists the operands, allocates the outputs, runs.

A Front is what a framework has to offer; numpy's is in _numpy.py, torch's in torch/_front.py.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from octet import _abi, _plan
from octet._options import Options
from octet._plan import Operand, View
from octet._qtensor import QTensor
from octet.errors import InvalidArgument

# What to do with a call: _plan.run, or to ask about it.
Act: TypeAlias = Callable[[str, Options, Sequence[Operand], Callable[[int], tuple[object, int]], int | None], None]


class Front(Protocol):
    """Arrays of one framework. `Any` is such an array."""

    def view(self, name: str, array: Any) -> View: ...

    def address(self, array: Any) -> int: ...

    def empty(self, shape: tuple[int, ...], dtype: Any, like: Any) -> Any:
        """A contiguous array on the device of `like`."""

    def dtype_name(self, dtype: Any, what: str) -> str:
        """A name of _abi.DTYPES; refuses others, with `what` as whose dtype it is."""

    def own_type(self, q: Any) -> str:
        """The name of the type that q has when it is computed with."""

    def dtype_of(self, name: str) -> Any:
        """The framework's dtype of that name."""

    def workspace(self, size: int, like: Any) -> tuple[object, int]:
        """`size` bytes aligned to 64 on the device of `like`, and their address."""

    def stream(self, like: Any) -> int | None:
        """The CUDA stream that the caller works on; None on the CPU."""

    def resolve(self, options: Options, like: Any) -> Options:
        """Fills in what the framework decides: threads, determinism."""


def operands_of(front: Front, layout: str, **arrays: Any) -> list[Operand]:
    """The operands of a call from its arrays by name; None: absent."""
    operands: list[Operand] = []
    for name, array in arrays.items():
        if isinstance(array, QTensor):
            if array.layout != layout:
                raise InvalidArgument(f"{name}: quantised in layout {array.layout!r}, but the call's is {layout!r}")
            view = front.view(name, array.codes)._replace(dtype=_abi.DTYPES[array.format])
            operands.append((name, view, front.address(array.codes), array.coding))
            for part in ("scale", "zero_point", "mean"):
                if (values := getattr(array, part)) is not None:
                    operands.append((f"{name}.{part}", front.view(part, values), front.address(values), None))
        elif array is not None:
            operands.append((name, front.view(name, array), front.address(array), None))
    return operands


def needs_residual(front: Front, options: Options, q: Any) -> bool:
    """Whether a backward pass will read o_residual: these remedies take delta from the un-rounded output."""
    sixteen = options.precision in ("f16", "bf16") and options.remedy in ("f16_inside", "exact_delta")
    return sixteen and front.dtype_name(q.dtype, "q") in ("f16", "bf16")


def _like(q: Any) -> Any:
    return q.codes if isinstance(q, QTensor) else q


def output_shape(q_shape: Sequence[int], v_shape: Sequence[int]) -> tuple[int, ...]:
    return (*q_shape[:-1], *v_shape[-1:])


def lse_shape(q_shape: Sequence[int], layout: str) -> tuple[int, ...]:
    """[batch, head, token], or [head, token] of packed sequences."""
    if len(q_shape) != (3 if layout == "thd" else 4):
        return tuple(q_shape)  # the call will be refused for it
    if layout == "thd":
        return q_shape[1], q_shape[0]
    return (q_shape[0], q_shape[1], q_shape[2]) if layout == "bhsd" else (q_shape[0], q_shape[2], q_shape[1])


def outputs(front: Front, options: Options, q: Any, v: Any, residual: bool) -> tuple:
    """New arrays for (o, lse, o_residual or None)."""
    shape = output_shape(q.shape, v.shape)
    lse_type = front.dtype_of("f64" if options.precision == "f64" else "f32")
    o, o_residual = (front.empty(shape, q.dtype, _like(q)) if wanted else None for wanted in (True, residual))
    return o, front.empty(lse_shape(q.shape, options.layout), lse_type, _like(q)), o_residual


def _call(front: Front, act: Act, kind: str, options: Options, q: Any, **arrays: Any) -> None:
    operands = operands_of(front, options.layout, q=q, **arrays)
    like = _like(q)
    act(kind, front.resolve(options, like), operands, lambda size: front.workspace(size, like), front.stream(like))


def forward(
    front: Front, options: Options, q: Any, k: Any, v: Any, *, residual: bool, act: Act = _plan.run, **more: Any
) -> tuple:
    """(o, lse, o_residual or None); `more`: mask, cu_seqlens_q, cu_seqlens_k."""
    o, lse, o_residual = outputs(front, options, q, v, residual)
    _call(front, act, "forward", options, q, k=k, v=v, o=o, lse=lse, o_residual=o_residual, **more)
    return o, lse, o_residual


def backward(
    front: Front,
    options: Options,
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    o_residual: Any,
    *,
    act: Act = _plan.run,
    **more: Any,
) -> tuple:
    """(dq, dk, dv)"""
    dq, dk, dv = (front.empty(tuple(x.shape), x.dtype, _like(x)) for x in (q, k, v))
    saved = {"o": o, "lse": lse, "o_residual": o_residual}
    _call(front, act, "backward", options, q, k=k, v=v, do_=do, **saved, dq=dq, dk=dk, dv=dv, **more)
    return dq, dk, dv


def jvp(
    front: Front,
    options: Options,
    q: Any,
    k: Any,
    v: Any,
    tq: Any,
    tk: Any,
    tv: Any,
    *,
    act: Act = _plan.run,
    **more: Any,
) -> tuple:
    """(o, lse, to)"""
    o, lse, to = outputs(front, options, q, v, True)
    _call(front, act, "jvp", options, q, k=k, v=v, tq=tq, tk=tk, tv=tv, o=o, lse=lse, to=to, **more)
    return o, lse, to
