"""The passes as operators of torch: octet::forward, octet::backward, octet::jvp.

They are opaque to autograd (_autograd.py differentiates them), have fake implementations for torch.compile, and FLOP
formulas for torch.utils.flop_counter. Results are dense and lie in memory as what they belong to.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from octet import _passes
from octet._options import LAYOUTS, Options
from octet.torch._front import front

_COMMON = "Tensor? mask, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? sinks"
# The fields of Options, in their order.
_OPTIONS = (
    "str precision, str layout, str causal, float scale, int[] window, str alignment, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, str remedy, float beta, str hadamard, str smooth_q, float softcap, bool? deterministic, "
    "int threads, str backend, str out_dtype"
)
_library = torch.library.Library("octet", "DEF")
_library.define(
    f"forward(Tensor q, Tensor k, Tensor v, {_COMMON}, bool residual, {_OPTIONS}) -> (Tensor o, Tensor lse, Tensor r)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    f"backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor r, {_COMMON}, Tensor? dlse, "
    f"{_OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    f"jvp(Tensor q, Tensor k, Tensor v, Tensor tq, Tensor tk, Tensor tv, {_COMMON}, Tensor? tsinks, "
    f"bool extra, {_OPTIONS}) -> (Tensor o, Tensor lse, Tensor to, Tensor tlse)",
    tags=torch.Tag.pt2_compliant_tag,
)


def _options(fields: tuple) -> Options:
    options = Options(*fields)
    return options._replace(window=tuple(options.window))


def _with_rest(made: Sequence[Any], count: int) -> tuple:
    """An empty tensor stands for a result that was not asked for."""
    return tuple(made) if len(made) == count else (*made, made[0].new_empty(0))


def _forward(
    q: Any, k: Any, v: Any, mask: Any, cu_q: Any, cu_k: Any, sinks: Any, residual: bool, *options: Any
) -> tuple:
    arrays = q, k, v, mask, cu_q, cu_k, sinks
    return _with_rest(_passes.run(front, "forward", _options(options), arrays, residual), 3)


def _backward(
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
    *options: Any,
) -> tuple:
    arrays = do, q, k, v, o, lse, r if r.shape == o.shape else None, mask, cu_q, cu_k, sinks, dlse
    return _with_rest(_passes.run(front, "backward", _options(options), arrays), 4)


def _jvp(
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
    *options: Any,
) -> tuple:
    arrays = q, k, v, tq, tk, tv, mask, cu_q, cu_k, sinks, tsinks
    return _with_rest(_passes.run(front, "jvp", _options(options), arrays, extra), 4)


def _shapes(kind: str, options: Sequence[Any], q: Any, k: Any, v: Any, extra: bool = False, sinks: Any = None) -> tuple:
    found = _passes.results(front, kind, Options(*options), q, k, v, extra, sinks)
    made = [torch.empty_permuted(x.shape, x.order, dtype=x.dtype, device=q.device) for x in found]
    return _with_rest(made, 3 if kind == "forward" else 4)


def _forward_fake(q: Any, k: Any, v: Any, *rest: Any) -> tuple:
    _, _, _, sinks, residual, *options = rest
    return _shapes("forward", options, q, k, v, residual, sinks)


def _backward_fake(do: Any, q: Any, k: Any, v: Any, *rest: Any) -> tuple:
    _, _, _, _, _, _, sinks, _, *options = rest
    return _shapes("backward", options, q, k, v, sinks=sinks)


def _jvp_fake(q: Any, k: Any, v: Any, *rest: Any) -> tuple:
    _, _, _, _, _, _, sinks, _, extra, *options = rest
    return _shapes("jvp", options, q, k, v, extra, sinks)


for _name, _kernel, _fake in (
    ("forward", _forward, _forward_fake),
    ("backward", _backward, _backward_fake),
    ("jvp", _jvp, _jvp_fake),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _kernel, _key)
    torch.library.register_fake(f"octet::{_name}", _fake, lib=_library)

forward = torch.ops.octet.forward.default
backward = torch.ops.octet.backward.default
jvp = torch.ops.octet.jvp.default


def nobody_listens(*tensors: Any) -> bool:
    """Returns whether nobody would notice that no operator runs: `nobody_intervenes`, and no profiler records."""
    return nobody_intervenes(*tensors) and not torch.autograd._profiler_enabled()


def nobody_intervenes(*tensors: Any) -> bool:
    """Returns whether an operator would do just what its kernel does: there is no mode, no tracing, no torch.func, no
    torch.compile, no subclass, no device without a kernel, and no view that the dispatcher resolves."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return False
    if torch._C._get_tracing_state():
        return False
    return all(x is None or (type(x) in _PLAIN and (x.is_cuda or x.is_cpu) and not x.is_neg()) for x in tensors)


_PLAIN = torch.Tensor, torch.nn.Parameter

# The operators without torch's dispatcher, which takes longer than all else here.
direct_forward, direct_backward = _forward, _backward


# FLOPs of the products alone, masks disregarded, as torch counts its own attention.


def _pairs(q: Any, k: Any, cu_q: Any, cu_k: Any, layout: str) -> int:
    """Pairs of a query and a key, over all batches and heads."""
    batch, heads, queries, _ = (1 if d < 0 else q.shape[d] for d in LAYOUTS[layout])
    if cu_q is None:
        return batch * heads * queries * k.shape[LAYOUTS[layout][2]]
    lengths = zip(cu_q.diff().tolist(), cu_k.diff().tolist(), strict=True)
    return heads * sum(n * m for n, m in lengths)


@register_flop_formula(torch.ops.octet.forward, get_raw=True)
def _forward_flop(
    q: Any, k: Any, v: Any, mask: Any, cu_q: Any, cu_k: Any, sinks: Any, residual: Any, *options: Any, **_: Any
) -> int:
    return 2 * _pairs(q, k, cu_q, cu_k, Options(*options).layout) * (q.shape[-1] + v.shape[-1])


@register_flop_formula(torch.ops.octet.backward, get_raw=True)
def _backward_flop(do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, r: Any, *rest: Any, **_: Any) -> int:
    _, cu_q, cu_k, _, _, *options = rest
    return 2 * _pairs(q, k, cu_q, cu_k, Options(*options).layout) * (3 * q.shape[-1] + 2 * v.shape[-1])


@register_flop_formula(torch.ops.octet.jvp, get_raw=True)
def _jvp_flop(q: Any, k: Any, v: Any, tq: Any, tk: Any, tv: Any, *rest: Any, **_: Any) -> int:
    _, cu_q, cu_k, _, _, _, *options = rest
    return 2 * _pairs(q, k, cu_q, cu_k, Options(*options).layout) * 3 * (q.shape[-1] + v.shape[-1])
