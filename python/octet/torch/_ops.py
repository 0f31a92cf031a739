"""The passes as operators of torch: octet::forward, octet::backward, octet::jvp.

They are opaque to autograd (_attention.py differentiates them), have fake implementations for torch.compile, and FLOP
formulas for torch.utils.flop_counter. Results are dense and lie in memory as what they belong to.

What an operator costs the host grows with its arguments: the options are one of them, a string, and those that most
calls leave out come last. Their kernels run the passes of _passes.py, once whoever listens has heard of the operator.
"""

import functools
import sys
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from octet import _plan
from octet._options import LAYOUTS, Options
from octet.torch import _passes, _sharding
from octet.torch._adapter import adapter
from octet.torch._text import options_from, text_of

_MORE = "Tensor? mask=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? sinks=None"
_LAST = "SymInt max_seqlen_q=0, SymInt max_seqlen_k=0, Tensor? alibi_slopes=None"  # came after the others
_library = torch.library.Library("octet", "DEF")
_library.define(
    f"forward(Tensor q, Tensor k, Tensor v, bool residual, str options, {_MORE}, {_LAST}) "
    "-> (Tensor o, Tensor lse, Tensor r)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    "backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor r, str options, "
    f"{_MORE}, Tensor? dlse=None, {_LAST}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    "jvp(Tensor q, Tensor k, Tensor v, Tensor tq, Tensor tk, Tensor tv, bool extra, str options, "
    f"{_MORE}, Tensor? tsinks=None, {_LAST}) -> (Tensor o, Tensor lse, Tensor to, Tensor tlse)",
    tags=torch.Tag.pt2_compliant_tag,
)

# The operators' kernels.


def _options(text: str, max_q: int, max_k: int) -> Options:
    options = options_from(text)
    return options._replace(max_seqlen_q=max_q, max_seqlen_k=max_k) if max_q or max_k else options


def _forward(
    q: Any,
    k: Any,
    v: Any,
    residual: bool,
    text: str,
    mask: Any = None,
    cu_q: Any = None,
    cu_k: Any = None,
    sinks: Any = None,
    max_q: int = 0,
    max_k: int = 0,
    slopes: Any = None,
) -> tuple:
    options = _options(text, max_q, max_k)
    return _passes.forward(q, k, v, mask, cu_q, cu_k, sinks, residual, options, (text, residual), slopes)


def _backward(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    r: Any,
    text: str,
    mask: Any = None,
    cu_q: Any = None,
    cu_k: Any = None,
    sinks: Any = None,
    dlse: Any = None,
    max_q: int = 0,
    max_k: int = 0,
    slopes: Any = None,
) -> tuple:
    options = _options(text, max_q, max_k)
    return _passes.backward(do, q, k, v, o, lse, r, mask, cu_q, cu_k, sinks, dlse, options, (text, False), slopes)


def _jvp(
    q: Any,
    k: Any,
    v: Any,
    tq: Any,
    tk: Any,
    tv: Any,
    extra: bool,
    text: str,
    mask: Any = None,
    cu_q: Any = None,
    cu_k: Any = None,
    sinks: Any = None,
    tsinks: Any = None,
    max_q: int = 0,
    max_k: int = 0,
    slopes: Any = None,
) -> tuple:
    options = _options(text, max_q, max_k)
    return _passes.jvp(q, k, v, tq, tk, tv, mask, cu_q, cu_k, sinks, tsinks, extra, options, slopes)


def _shapes(kind: str, text: str, q: Any, k: Any, v: Any, extra: bool = False, sinks: Any = None) -> tuple:
    found = _plan.results(adapter, kind, options_from(text), q, k, v, extra, sinks)
    made = [torch.empty_permuted(x.shape, x.order, dtype=x.dtype, device=q.device) for x in found]
    return _passes.with_rest(made, 3 if kind == "forward" else 4)


def _sinks(_mask: Any = None, _cu_q: Any = None, _cu_k: Any = None, sinks: Any = None, *_: Any) -> Any:
    return sinks


def _forward_fake(q: Any, k: Any, v: Any, residual: bool, text: str, *more: Any) -> tuple:
    return _shapes("forward", text, q, k, v, residual)


def _backward_fake(do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, r: Any, text: str, *more: Any) -> tuple:
    return _shapes("backward", text, q, k, v, sinks=_sinks(*more))


def _jvp_fake(q: Any, k: Any, v: Any, tq: Any, tk: Any, tv: Any, extra: bool, text: str, *more: Any) -> tuple:
    return _shapes("jvp", text, q, k, v, extra)


for _name, _kernel, _fake in (
    ("forward", _forward, _forward_fake),
    ("backward", _backward, _backward_fake),
    ("jvp", _jvp, _jvp_fake),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _kernel, _key)
    torch.library.register_fake(f"octet::{_name}", _fake, lib=_library)
_sharding.register(_library)


def _register_dtensors() -> bool:
    return _sharding.register(_library)


_register_dtensors._dynamo_marked_constant = True  # type: ignore[attr-defined] # torch.compile runs it, untraced

# The operators, of Options.

_FORWARD = torch.ops.octet.forward.default
_BACKWARD = torch.ops.octet.backward.default
_JVP = torch.ops.octet.jvp.default
_remembered = functools.lru_cache(4096)(text_of)


def _arguments(options: Options, *more: Any) -> tuple:
    """Returns the last arguments of an operator, from `options` on."""
    if "torch.distributed.tensor" in sys.modules:
        _register_dtensors()
    lengths = options.max_seqlen_q, options.max_seqlen_k
    if torch.compiler.is_compiling():
        return text_of(options), *more, *lengths
    if options.layout == "thd":  # its lengths are no part of the text, and may be symbols
        options = options._replace(max_seqlen_q=0, max_seqlen_k=0)
    return _remembered(options), *more, *lengths


def _given(slopes: Any) -> tuple:
    """The argument after the lengths, which most calls leave out."""
    return () if slopes is None else (slopes,)


def forward(
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    cu_q: Any,
    cu_k: Any,
    sinks: Any,
    residual: bool,
    options: Options,
    slopes: Any = None,
) -> tuple:
    more = _arguments(options, mask, cu_q, cu_k, sinks)
    return _FORWARD(q, k, v, residual, *more, *_given(slopes))


def backward(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    r: Any,
    mask: Any,
    cu_q: Any,
    cu_k: Any,
    sinks: Any,
    dlse: Any,
    options: Options,
    slopes: Any = None,
) -> tuple:
    more = _arguments(options, mask, cu_q, cu_k, sinks, dlse)
    return _BACKWARD(do, q, k, v, o, lse, r, *more, *_given(slopes))


def jvp(
    q: Any,
    k: Any,
    v: Any,
    tq: Any,
    tk: Any,
    tv: Any,
    mask: Any,
    cu_q: Any,
    cu_k: Any,
    sinks: Any,
    tsinks: Any,
    extra: bool,
    options: Options,
    slopes: Any = None,
) -> tuple:
    more = _arguments(options, mask, cu_q, cu_k, sinks, tsinks)
    return _JVP(q, k, v, tq, tk, tv, extra, *more, *_given(slopes))


# FLOPs of the products alone, masks disregarded, as torch counts its own attention.


def _pairs(q: Any, k: Any, text: str, _mask: Any = None, cu_q: Any = None, cu_k: Any = None, *rest: Any) -> int:
    """Pairs of a query and a key, over all batches and heads."""
    layout = LAYOUTS[options_from(text).layout]
    batch, heads, queries, _ = (1 if d < 0 else q.shape[d] for d in layout)
    if cu_q is None:
        return batch * heads * queries * k.shape[layout[2]]
    lengths = zip(cu_q.diff().tolist(), cu_k.diff().tolist(), strict=True)
    return heads * sum(n * m for n, m in lengths)


@register_flop_formula(torch.ops.octet.forward, get_raw=True)
def _forward_flop(q: Any, k: Any, v: Any, residual: Any, *options: Any, **_: Any) -> int:
    return 2 * _pairs(q, k, *options) * (q.shape[-1] + v.shape[-1])


@register_flop_formula(torch.ops.octet.backward, get_raw=True)
def _backward_flop(do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, r: Any, *options: Any, **_: Any) -> int:
    return 2 * _pairs(q, k, *options) * (3 * q.shape[-1] + 2 * v.shape[-1])


@register_flop_formula(torch.ops.octet.jvp, get_raw=True)
def _jvp_flop(q: Any, k: Any, v: Any, tq: Any, tk: Any, tv: Any, extra: Any, *options: Any, **_: Any) -> int:
    return 2 * _pairs(q, k, *options) * 3 * (q.shape[-1] + v.shape[-1])
