"""The passes as operators of torch: octet::forward, octet::backward, octet::jvp.

They are opaque to autograd (_autograd.py differentiates them), have fake implementations for torch.compile, and FLOP
formulas for torch.utils.flop_counter. Results are dense and lie in memory as what they belong to.
"""

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from octet import _passes
from octet._options import LAYOUTS, Options
from octet.torch._front import front

_COMMON = "Tensor? mask, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"
# The fields of Options, in their order.
_OPTIONS = (
    "str precision, str layout, str causal, float scale, int[] window, str alignment, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, str remedy, float beta, str hadamard, str smooth_q, float softcap, bool? deterministic, "
    "int threads, str backend"
)
_library = torch.library.Library("octet", "DEF")
_library.define(
    f"forward(Tensor q, Tensor k, Tensor v, {_COMMON}, bool residual, {_OPTIONS}) -> (Tensor o, Tensor lse, Tensor r)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    f"backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor r, {_COMMON}, {_OPTIONS}) "
    "-> (Tensor dq, Tensor dk, Tensor dv)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    f"jvp(Tensor q, Tensor k, Tensor v, Tensor tq, Tensor tk, Tensor tv, {_COMMON}, {_OPTIONS}) "
    "-> (Tensor o, Tensor lse, Tensor to)",
    tags=torch.Tag.pt2_compliant_tag,
)


def _options(fields: tuple) -> Options:
    options = Options(*fields)
    return options._replace(window=tuple(options.window))


def _forward(q: Any, k: Any, v: Any, mask: Any, cu_q: Any, cu_k: Any, residual: bool, *options: Any) -> tuple:
    made = _passes.run(front, "forward", _options(options), (q, k, v, mask, cu_q, cu_k), residual)
    return tuple(made) if residual else (*made, q.new_empty(0))


def _backward(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, r: Any, mask: Any, cu_q: Any, cu_k: Any, *options: Any
) -> tuple:
    r = r if r.shape == o.shape else None
    return tuple(_passes.run(front, "backward", _options(options), (do, q, k, v, o, lse, r, mask, cu_q, cu_k)))


def _jvp(q: Any, k: Any, v: Any, tq: Any, tk: Any, tv: Any, mask: Any, cu_q: Any, cu_k: Any, *options: Any) -> tuple:
    return tuple(_passes.run(front, "jvp", _options(options), (q, k, v, tq, tk, tv, mask, cu_q, cu_k)))


def _shapes(kind: str, options: tuple, q: Any, k: Any, v: Any, residual: bool = False) -> tuple:
    made = _passes.results(front, kind, Options(*options), q, k, v, residual)
    return tuple([torch.empty_permuted(x.shape, x.order, dtype=x.dtype, device=q.device) for x in made])


def _forward_fake(q: Any, k: Any, v: Any, mask: Any, cu_q: Any, cu_k: Any, residual: bool, *options: Any) -> tuple:
    made = _shapes("forward", options, q, k, v, residual)
    return made if residual else (*made, q.new_empty(0))


def _backward_fake(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, r: Any, mask: Any, cu_q: Any, cu_k: Any, *options: Any
) -> tuple:
    return _shapes("backward", options, q, k, v)


def _jvp_fake(
    q: Any, k: Any, v: Any, tq: Any, tk: Any, tv: Any, mask: Any, cu_q: Any, cu_k: Any, *options: Any
) -> tuple:
    return _shapes("jvp", options, q, k, v)


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
    """Whether nobody would notice that no operator runs: no mode, no profiler, no tracing, no torch.func, no
    torch.compile, no subclass, no device without a kernel, no view that the dispatcher resolves."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return False
    if torch.autograd._profiler_enabled() or torch._C._get_tracing_state():
        return False
    return all(type(x) in _PLAIN and (x.is_cuda or x.is_cpu) and not x.is_neg() for x in tensors)


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
    q: Any, k: Any, v: Any, mask: Any, cu_q: Any, cu_k: Any, residual: Any, *options: Any, **_: Any
) -> int:
    return 2 * _pairs(q, k, cu_q, cu_k, Options(*options).layout) * (q.shape[-1] + v.shape[-1])


@register_flop_formula(torch.ops.octet.backward, get_raw=True)
def _backward_flop(
    do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, r: Any, mask: Any, cu_q: Any, cu_k: Any, *options: Any, **_: Any
) -> int:
    return 2 * _pairs(q, k, cu_q, cu_k, Options(*options).layout) * (3 * q.shape[-1] + 2 * v.shape[-1])


@register_flop_formula(torch.ops.octet.jvp, get_raw=True)
def _jvp_flop(
    q: Any, k: Any, v: Any, tq: Any, tk: Any, tv: Any, mask: Any, cu_q: Any, cu_k: Any, *options: Any, **_: Any
) -> int:
    return 2 * _pairs(q, k, cu_q, cu_k, Options(*options).layout) * 3 * (q.shape[-1] + v.shape[-1])
