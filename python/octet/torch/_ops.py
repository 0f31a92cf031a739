"""The passes as operators of torch: octet::forward, octet::backward, octet::jvp; and octet::forward_jvp, two of them.

They are opaque to autograd (_attention.py differentiates them), have fake implementations for torch.compile, and FLOP
formulas for torch.utils.flop_counter. Results are dense and lie in memory as what they belong to.

What an operator costs the host grows with its arguments: the options are one of them, a string, and those that most
calls leave out come last. Their kernels run the passes of _passes.py, once whoever listens has heard of the operator.

Here alone arrays have an order, that of the schemas, to which saved programs hold: a new argument comes last.
"""

import functools
import sys
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from octet._operands import Operands, inputs_of, operands_of
from octet._options import LAYOUTS, Options
from octet._results import needs_residual, results
from octet.torch import _passes, _sharding
from octet.torch._adapter import adapter
from octet.torch._text import options_from, text_of

_MORE = "Tensor? mask=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? sinks=None"
_LAST = (
    "SymInt max_seqlen_q=0, SymInt max_seqlen_k=0, Tensor? alibi_slopes=None, Tensor? dropout_seed=None"  # came later
)
_SCHEMAS = {
    "forward": f"(Tensor q, Tensor k, Tensor v, bool residual, str options, {_MORE}, {_LAST}, "
    "Tensor? seqused_k=None, Tensor? block_table=None) "
    "-> (Tensor o, Tensor lse, Tensor r)",
    "backward": "(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor r, str options, "
    f"{_MORE}, Tensor? dlse=None, {_LAST}, bool dmask=False) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks, Tensor dmask)",
    "jvp": "(Tensor q, Tensor k, Tensor v, Tensor? tq, Tensor? tk, Tensor? tv, bool extra, str options, "
    f"{_MORE}, Tensor? tsinks=None, {_LAST}) -> (Tensor o, Tensor lse, Tensor to, Tensor tlse)",
}
_LENGTHS, _FLAGS = ("max_seqlen_q", "max_seqlen_k"), ("residual", "extra", "dmask")

_FORWARD_JVP = _SCHEMAS["jvp"].replace("Tensor lse,", "Tensor lse, Tensor r,")
_library = torch.library.Library("octet", "DEF")
for _kind, _schema in _SCHEMAS.items():
    _library.define(_kind + _schema, tags=torch.Tag.pt2_compliant_tag)
_library.define("forward_jvp" + _FORWARD_JVP, tags=torch.Tag.pt2_compliant_tag)
_OPERATORS = {kind: getattr(torch.ops.octet, kind).default for kind in _SCHEMAS}
# The arguments of each operator by the names of octet_arguments: before the options, and after them.
ARGUMENTS = {kind: _sharding.names_of(operator) for kind, operator in _OPERATORS.items()}
_FIRST = {kind: names[: names.index("options")] for kind, names in ARGUMENTS.items()}
_OPTIONAL = {kind: names[names.index("options") + 1 :] for kind, names in ARGUMENTS.items()}
_TENSORS = {kind: tuple([x for x in names if x not in _FLAGS]) for kind, names in _FIRST.items()}


def _complete(kind: str, operands: Operands, text: str, more: tuple) -> Options:
    """Adds the arguments that came after the options to the operands, and returns the options with the lengths."""
    for name, x in zip(_OPTIONAL[kind], more, strict=False):
        if x is not None:
            operands[name] = x
    lengths = {name: operands.pop(name) for name in _LENGTHS if name in operands}
    options = options_from(text)
    return options._replace(**lengths) if any(lengths.values()) else options


def _forward(q: Any, k: Any, v: Any, residual: bool, text: str, *more: Any) -> tuple:
    operands = {"q": q, "k": k, "v": v}
    if not more:
        return _passes.run("forward", operands, options_from(text), residual, (text, residual))
    return _passes.run("forward", operands, _complete("forward", operands, text, more), residual)


def _backward(*args: Any) -> tuple:
    if len(args) == 8:
        text = args[7]
        given = dict(zip(_FIRST["backward"], args, strict=False))
        return _passes.run("backward", given, options_from(text), False, (text, False))
    operands, of_mask, options = read("backward", args)
    return _passes.run("backward", operands, options, of_mask)


def _jvp(*args: Any) -> tuple:
    operands, extra, options = read("jvp", args)
    return _passes.run("jvp", operands, options, extra)


def _forward_jvp(*args: Any) -> tuple:
    """(o, lse, o_residual, to, tlse): the tangents of a jvp, and all that a forward pass gives to its backward pass."""
    operands, of_lse, options = read("jvp", args)
    *_, to, tlse = run("jvp", operands, options, of_lse)
    given = inputs_of("forward", operands)
    return *run("forward", given, options, needs_residual(adapter, options, given["q"])), to, tlse


def read(kind: str, args: tuple) -> tuple[Operands, bool, Options]:
    """The operands of an operator, its flag (False: it has none), and its options."""
    n = len(_FIRST[kind])
    operands: Operands = operands_of(**dict(zip(_FIRST[kind], args, strict=False)))
    options = _complete(kind, operands, args[n], args[n + 1 :])
    return operands, any([operands.pop(flag, False) for flag in _FLAGS]), options


def _fake(kind: str, *args: Any) -> tuple:
    n = ARGUMENTS[kind].index(_LENGTHS[0])  # these may be symbols, and no shape depends on them
    operands, extra, options = read(kind, args[:n])
    operands |= {name: x for name, x in zip(ARGUMENTS[kind][n + 2 :], args[n + 2 :], strict=False) if x is not None}
    extra |= operands.pop("dmask", False)
    asked = results(adapter, kind, options, operands, extra)
    device = operands["q"].device
    made = [torch.empty_permuted(x.shape, x.order, dtype=x.dtype, device=device) for x in asked]
    return _passes.with_rest([x.name for x in asked], made, kind)


for _kind, _kernel in (("forward", _forward), ("backward", _backward), ("jvp", _jvp)):
    for _key in ("CPU", "CUDA"):
        _library.impl(_kind, _kernel, _key)
    torch.library.register_fake(f"octet::{_kind}", functools.partial(_fake, _kind), lib=_library)
_library.impl("forward_jvp", _forward_jvp, "CompositeExplicitAutograd")
_sharding.register(_library)


def _register_dtensors() -> bool:
    return _sharding.register(_library)


_register_dtensors._dynamo_marked_constant = True  # type: ignore[attr-defined] # torch.compile runs it, untraced

_remembered = functools.lru_cache(4096)(text_of)


def run(kind: str, operands: Operands, options: Options, extra: bool = False) -> tuple:
    """What _passes.run gives: by an operator, which costs as much again, where somebody would miss it."""
    if _passes.nobody_listens(*operands.values()):
        return _passes.run(kind, operands, options, extra)
    if "torch.distributed.tensor" in sys.modules:
        _register_dtensors()
    first, more = _arguments(kind, operands, options, extra)
    return _OPERATORS[kind](*first, **more)


def run_forward_jvp(operands: Operands, options: Options, of_lse: bool) -> tuple:
    """What _forward_jvp gives, by its operator, whose derivative _attention.py registers."""
    first, more = _arguments("jvp", operands, options, of_lse)
    return torch.ops.octet.forward_jvp.default(*first, **more)


def _arguments(kind: str, operands: Operands, options: Options, extra: bool) -> tuple[list, dict[str, Any]]:
    """The arguments of the operator of a pass, by their places and by their names."""
    more = dict(operands)
    first = [more.pop(name, None) for name in _TENSORS[kind]]  # a tangent may be absent
    if options.layout == "thd" or "seqused_k" in operands:  # bounds are no part of the text, and may be symbols
        more |= {"max_seqlen_q": options.max_seqlen_q, "max_seqlen_k": options.max_seqlen_k}
        options = options._replace(max_seqlen_q=0, max_seqlen_k=0)
    text = text_of(options) if torch.compiler.is_compiling() else _remembered(options)
    flag = () if kind == "backward" else (extra,)
    if kind == "backward" and extra:
        more["dmask"] = True
    return [*first, *flag, text], more


# FLOPs of the products alone, masks disregarded, as torch counts its own attention.


def _pairs_and_dims(kind: str, args: tuple) -> tuple[int, int, int]:
    """Pairs of a query and a key, over all batches and heads, and the head dims of q and v."""
    operands, _, options = read(kind, args)
    q, k, v = operands["q"], operands["k"], operands["v"]
    layout = LAYOUTS[options.layout]
    batch, heads, queries, _ = (1 if d < 0 else q.shape[d] for d in layout)
    if "seqused_k" in operands:
        keys = operands["seqused_k"].tolist()
        of_each = operands["cu_seqlens_q"].diff().tolist() if "cu_seqlens_q" in operands else [queries] * batch
        return heads * sum(n * m for n, m in zip(of_each, keys, strict=True)), q.shape[-1], v.shape[-1]
    if "cu_seqlens_q" not in operands:
        return batch * heads * queries * k.shape[layout[2]], q.shape[-1], v.shape[-1]
    lengths = zip(*(operands[name].diff().tolist() for name in ("cu_seqlens_q", "cu_seqlens_k")), strict=True)
    return heads * sum(n * m for n, m in lengths), q.shape[-1], v.shape[-1]


@register_flop_formula(torch.ops.octet.forward, get_raw=True)
def _forward_flop(*args: Any, **_: Any) -> int:
    pairs, dim, dim_v = _pairs_and_dims("forward", args)
    return 2 * pairs * (dim + dim_v)


@register_flop_formula(torch.ops.octet.backward, get_raw=True)
def _backward_flop(*args: Any, **_: Any) -> int:
    pairs, dim, dim_v = _pairs_and_dims("backward", args)
    return 2 * pairs * (3 * dim + 2 * dim_v)


@register_flop_formula(torch.ops.octet.jvp, get_raw=True)
def _jvp_flop(*args: Any, **_: Any) -> int:
    pairs, dim, dim_v = _pairs_and_dims("jvp", args)
    operands = read("jvp", args)[0]
    of_q, of_k, of_v = ["tq" in operands, "tk" in operands, "tv" in operands]
    return 2 * pairs * ((1 + of_q + of_k) * dim + (1 + (of_q or of_k) + of_v) * dim_v)
