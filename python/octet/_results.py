"""The results of a pass, and the types that follow from its options."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from octet._adapters import Types
from octet._operands import BY_BATCH, BY_HEAD, Operands, with_gradient
from octet._options import Options
from octet._qtensor import QTensor
from octet.errors import InvalidArgument, reject_dtype


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
    """Returns whether a backward pass will read o_residual: some bias corrections take delta from the un-rounded o,
    and a Rounding from one that has been rounded in its own way. At int8 it also asks a GPU's forward pass for the o
    and lse of its backward pass, whatever the type of o."""
    if options.rounding or options.precision == "int8":
        return True
    sixteen = options.precision in ("f16", "bf16") and options.bias_correction in ("f16", "exact_delta")
    return sixteen and (options.out_dtype or adapter.dtype_name(q.dtype, "q")) in _ROUNDED


def lse_type(adapter: Types, options: Options) -> Any:
    """The dtype of lse, and of sinks and slopes as the library takes them."""
    return adapter.dtype_of("f64" if options.precision == "f64" else "f32")


def by_head(adapter: Types, options: Options, operands: Operands) -> Operands:
    """The arrays of a call, sinks, their tangent and slopes in the type that the library takes.

    Raises:
        InvalidArgument: one of these is not one float of each head, or, of slopes, of each head and element of the
            batch.
    """
    for name in BY_HEAD:
        if name not in operands:
            continue
        x = operands[name]
        if not adapter.is_float(x):
            raise InvalidArgument(f"{name}: dtype {x.dtype}, allowed: a float type")
        if x.ndim != 1 and not (x.ndim == 2 and name in BY_BATCH):
            batch = " or [batch, heads]" if name in BY_BATCH else ""
            raise InvalidArgument(f"{name}: shape {list(x.shape)}, expected [heads]{batch}, those of q")
        operands = operands | {name: adapter.cast(x, lse_type(adapter, options))}
    return operands


def results(adapter: Types, kind: str, options: Options, operands: Operands, extra: bool = False) -> list[Result]:
    """Returns the results of a pass. `extra` adds what few callers need: o_residual of a forward pass, dmask of a
    backward pass, tlse of a jvp.

    Results lie in memory as what they belong to does: o and its like as q, gradients as their operands. They have its
    type too, but bfloat16 beside e4m3, which fp8_raw alone writes; o_residual is int8 beside a rounded o, and dmask has
    the type of lse.
    """

    def type_beside(x: Any) -> Any:
        keeps = options.precision == "fp8_raw" or adapter.dtype_name(x.dtype, "q") != "e4m3"
        return x.dtype if keeps else adapter.dtype_of("bf16")

    def order(x: Any) -> tuple[int, ...]:
        return adapter.order(x.codes if isinstance(x, QTensor) else x)

    if kind == "backward":
        made = []
        for name in with_gradient(operands, extra):
            x = operands[name]
            dtype = lse_type(adapter, options) if name == "mask" else type_beside(x)
            made.append(Result(f"d{name}", tuple(x.shape), dtype, order(x)))
        return made
    q, v = operands["q"], operands["v"]
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
