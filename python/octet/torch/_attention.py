"""Attention of tensors, and its derivatives: backwards, forwards, and under vmap.

Two Functions, because torch.compile takes none that declares a jvp: `_Attention` serves compiled code and plain
autograd, `_DualAttention` eager forward-mode differentiation. Gradients and tangents are Functions of their own, so
that asking for a second derivative is rejected instead of answered with zero.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch._C._functorch import _unwrap_for_grad, _wrap_for_grad
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.autograd import forward_ad

from octet._operands import (
    CONSTANTS,
    DIFFERENTIABLE,
    RESULTS,
    WITH_TANGENT,
    Operands,
    inputs_of,
    operands_of,
    with_gradient,
)
from octet._options import Options, expect_constant, expect_no_tangent, is_differentiated, reject_gradient
from octet._qtensor import QTensor
from octet._results import by_head, needs_residual
from octet.errors import Unsupported
from octet.torch import _codes, _ops
from octet.torch._adapter import adapter, cast_tensors, expect_backward
from octet.torch._fold import Fold


def _prepared(options: Options, operands: Operands) -> Operands:
    """The tensors in the types in which they go to the library."""
    for name in CONSTANTS:
        if name in operands:
            expect_constant(name, operands[name])
    return by_head(adapter, options, cast_tensors(operands))


def run_attention(options: Options, operands: Operands, return_lse: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse); without return_lse o alone is differentiable"""
    operands = _prepared(options, operands)
    quantized = [name for name in ("q", "k", "v") if isinstance(operands[name], QTensor)]
    if not quantized and "seqused_k" not in operands:
        o, lse, _ = attend(operands, options, of_lse=return_lse)
        return o, lse
    # Codes and caches have no gradient.
    for name in DIFFERENTIABLE:
        if name not in quantized:
            expect_constant(name, operands.get(name))
    made = _codes.run(options, operands) if quantized else _ops.run("forward", operands, options)
    return made[0], made[1]


def run_vjp(options: Options, operands: Operands, return_dmask: bool = False) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv), dsinks where there are sinks, and dmask where it is asked for, detached; torch.func and forward
    mode, to which detached tensors are constants, get their derivative rejected"""
    given = _prepared(options, operands)
    with torch.no_grad():
        saved = _ops.run("forward", inputs_of("forward", given), options, needs_residual(adapter, options, given["q"]))
    given = given | dict(zip(RESULTS["forward"], saved, strict=True))
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    with torch.set_grad_enabled(transformed and torch.is_grad_enabled()):
        made = dict(zip(DIFFERENTIABLE, gradients(given, options, return_dmask), strict=True))
    more = {name: made[name].to(operands[name].dtype) for name in with_gradient(operands, return_dmask)[3:]}
    return made["q"], made["k"], made["v"], *more.values()


def run_jvp(options: Options, operands: Operands, return_lse: bool = False) -> tuple[torch.Tensor, ...]:
    """(o, to), with return_lse (o, to, lse, tlse); o and lse are differentiable, their tangents detached. Where a
    gradient may follow, o and lse come from a forward pass of their own, which saves what the backward pass needs."""
    given = _prepared(options, operands)
    with torch.no_grad():
        o, lse, to, tlse = _ops.run("jvp", given, options, return_lse)
    if any([is_differentiated(given[name]) for name in DIFFERENTIABLE if name in given]):
        o, lse, _ = attend(inputs_of("forward", given), options, of_lse=return_lse)
    return (o, to, lse, tlse) if return_lse else (o, to)


def attend(operands: Operands, options: Options, *, of_lse: bool, residual: bool = False) -> tuple:
    """(o, lse, o_residual); what a backward pass will need is saved when one may follow.

    `of_lse`: lse is differentiable, not o alone. `residual`: make o_residual in any case.
    """
    compiling = torch.compiler.is_compiling()
    dual = forward_ad._current_level >= 0
    mask: Any = operands.get("mask")
    if mask is not None and dual:
        expect_no_tangent("mask", mask)
    if dual and _sees_tangents():
        along = _attend_along_in_graph if compiling else _attend_along
        return along(operands, options, of_lse, residual)
    return _attend(operands, options, of_lse, residual, dual)


def _attend(operands: Operands, options: Options, of_lse: bool, residual: bool, dual: bool) -> tuple:
    """The same where no tangent is seen; `dual`: there may be some."""
    compiling = torch.compiler.is_compiling()
    mask: Any = operands.get("mask")
    if compiling and torch.is_grad_enabled() and any([_is_mapped(operands.get(name)) for name in DIFFERENTIABLE]):
        return _attend_outside_the_graph(operands, options, of_lse, residual)
    # A dual tensor does not tell whether its primal requires a gradient.
    needing = dual or any([operands[name].requires_grad for name in DIFFERENTIABLE if name in operands])
    differentiates = needing and torch.is_grad_enabled()
    if not (differentiates or compiling or torch._C._are_functorch_transforms_active()):
        return _ops.run("forward", operands, options, residual)  # a Function costs as much again
    if dual and compiling:
        raise Unsupported(
            "forward-mode differentiation inside torch.compile through another transform of torch.func, which hides "
            "the tangents; call octet.attention_jvp there, or take the jvp outside"
        )
    of_mask = differentiates and mask is not None and mask.requires_grad
    if differentiates and (of_mask or not dual) and not compiling:
        expect_backward(options, operands, of_mask)
    residual = residual or (differentiates and needs_residual(adapter, options, operands["q"]))
    tensors = _distinct(operands.values()) if compiling else operands.values()
    flags = residual, of_lse, of_mask
    return _apply(_DualAttention if dual else _Attention, options, flags, tuple(operands), *tensors)


def _sees_tangents() -> bool:
    """Whether the tangents of tensors are seen here: there is no transform of torch.func, or the innermost is a jvp."""
    if not torch._C._is_fwd_grad_enabled():
        return False
    innermost = torch._C._functorch.peek_interpreter_stack()
    return innermost is None or innermost.key() == torch._C._functorch.TransformType.Jvp


_sees_tangents._dynamo_marked_constant = True  # type: ignore[attr-defined] # torch.compile runs it, untraced


def _attend_along(operands: Operands, options: Options, of_lse: bool, residual: bool) -> tuple:
    """The same by one pass for results and tangents, beneath the innermost jvp: a Function with a jvp takes two, and
    under torch.func ten times as long on the host."""
    given = _unpacked(operands)
    if any(map(torch._C._functorch.is_legacy_batchedtensor, given.values())):  # nothing makes dual tensors of these
        return _attend(operands, options, of_lse, residual, dual=True)
    if not torch._C._are_functorch_transforms_active():
        made = _pair(given, options, of_lse, residual)
    else:
        innermost = retrieve_current_functorch_interpreter()
        level = innermost.level()
        given = {name: _unwrap_for_grad(x, level) for name, x in given.items()}
        with innermost.lower():
            made = _pair(given, options, of_lse, residual)
        made = tuple([None if x is None else _wrap_for_grad(x, level) for x in made])
    o, lse, r, to, tlse = made
    if to is not None:
        o = forward_ad.make_dual(o, to)
    if tlse is not None and of_lse:
        lse = forward_ad.make_dual(lse, tlse)
    return o, lse, r


def _unpacked(operands: Operands) -> Operands:
    """The operands and their tangents, as far as they have any."""
    given = dict(operands)
    for name in WITH_TANGENT:
        if name in operands:
            given[name], tangent = forward_ad.unpack_dual(operands[name])
            if tangent is not None:
                given[f"t{name}"] = tangent
    return given


def _attend_along_in_graph(operands: Operands, options: Options, of_lse: bool, residual: bool) -> tuple:
    """The same in code that torch.compile traces: by operators, as it takes no Function that declares a jvp, and does
    not see beneath a jvp which tensors require gradients."""
    given = _unpacked(operands)
    if torch.is_grad_enabled():
        o, lse, r, to, tlse = _ops.run_forward_jvp(given, options, of_lse)
    else:
        o, lse, to, tlse = _ops.run("jvp", given, options, of_lse)
        r = o.new_empty(0)
    return forward_ad.make_dual(o, to), forward_ad.make_dual(lse, tlse) if of_lse else lse, r


def _pair(given: Operands, options: Options, of_lse: bool, residual: bool) -> tuple:
    """(o, lse, o_residual, to, tlse) of the inputs of a jvp, whose tangents may be missing; where there is none, to
    and tlse are None."""
    plain = inputs_of("forward", given)
    if len(plain) == len(given):
        if torch._C._are_functorch_transforms_active():
            return *attend(plain, options, of_lse=of_lse, residual=residual), None, None
        return *_attend(plain, options, of_lse, residual, dual=False), None, None
    if not any([is_differentiated(plain[name]) for name in DIFFERENTIABLE if name in plain]):
        o, lse, to, tlse = tangents_of(given, options, of_lse)
        return o, lse, o.new_empty(0), to, tlse
    *_, to, tlse = tangents_of(given, options, of_lse)
    return *attend(plain, options, of_lse=of_lse, residual=residual), to, tlse


def _is_mapped(x: Any) -> bool:
    """Whether x is a tensor of numbers that vmap maps."""
    return x is not None and x.is_floating_point() and torch._C._functorch.is_batchedtensor(x)


@torch._disable_dynamo  # torch.compiler.disable would import dynamo at once
def _attend_outside_the_graph(operands: Operands, options: Options, of_lse: bool, residual: bool) -> tuple:
    """The same in eager code: in a graph, vmap hides which gradients are asked for."""
    return attend(operands, options, of_lse=of_lse, residual=residual)


def _distinct(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, with a view in place of one that occurs a second time: torch.compile breaks the graph where a
    Function gets the same tensor twice, as cu_seqlens of self-attention are."""
    found: list[Any] = []
    for x in tensors:
        found.append(x.view_as(x) if any(x is y for y in found) else x)
    return found


def _apply(function: Any, *how_and_tensors: Any) -> Any:
    """function.apply; in eager code without its search for default arguments, which takes longer than all the rest."""
    if torch.compiler.is_compiling():
        # Where no gradient may follow, torch.compile runs `forward`, and passes *tensors wrongly.
        needing = torch.is_grad_enabled() and any([x.requires_grad for x in how_and_tensors[_HOW:]])
        return function.apply(*how_and_tensors) if needing else function.forward(*how_and_tensors)
    if torch._C._are_functorch_transforms_active():
        return function.apply(*how_and_tensors)
    return super(torch.autograd.Function, function).apply(*how_and_tensors)


def _reject_second_derivative(ctx: Any, *grad_outputs: Any) -> Any:
    raise Unsupported(
        "octet computes first derivatives only; for a second one (create_graph=True, a jvp of a gradient) use "
        "torch.nn.functional.scaled_dot_product_attention"
    )


# The Functions take the options, the flags of a pass, the names of its operands, and these.
_HOW = 3


class _Gradients(torch.autograd.Function):
    """(dq, dk, dv, dsinks, dmask)"""

    @staticmethod
    def forward(options: Options, flags: tuple[bool], names: tuple[str, ...], *tensors: Any) -> Any:
        return _ops.run("backward", dict(zip(names, tensors, strict=True)), options, *flags)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    backward = staticmethod(_reject_second_derivative)

    @staticmethod
    def vmap(info: Any, in_dims: Any, options: Options, flags: tuple, names: tuple[str, ...], *tensors: Any) -> Any:
        fold = Fold(info.batch_size, options.layout, names, tensors, in_dims[_HOW:], *flags)
        made = gradients(fold.operands(), options, *flags)
        return fold.results(RESULTS["backward"], made), (0,) * len(made)


class _DualGradients(_Gradients):
    """The same where forward-mode derivatives are taken, to reject them; torch.compile takes no Function with a jvp."""

    jvp = staticmethod(_reject_second_derivative)


def gradients(operands: Operands, options: Options, of_mask: bool = False) -> tuple:
    """(dq, dk, dv, dsinks, dmask) of the inputs of a backward pass; dmask where it is asked for."""
    dual = forward_ad._current_level >= 0
    transformed = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if torch.is_grad_enabled() or dual or transformed:
        function = _DualGradients if dual else _Gradients
        return _apply(function, options, (of_mask,), tuple(operands), *operands.values())
    return _ops.run("backward", operands, options, of_mask)


class _Tangents(torch.autograd.Function):
    """(o, lse, to, tlse), of which o and lse are constants; without `of_lse` an empty tensor for tlse"""

    @staticmethod
    def forward(options: Options, flags: tuple[bool], names: tuple[str, ...], *tensors: Any) -> Any:
        return _ops.run("jvp", dict(zip(names, tensors, strict=True)), options, *flags)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output[:2])

    backward = jvp = staticmethod(_reject_second_derivative)

    @staticmethod
    def vmap(info: Any, in_dims: Any, options: Options, flags: tuple, names: tuple[str, ...], *tensors: Any) -> Any:
        fold = Fold(info.batch_size, options.layout, names, tensors, in_dims[_HOW:])
        made = tangents_of(fold.operands(), options, *flags)
        return fold.results(RESULTS["jvp"], made), (0,) * len(made)


def tangents_of(operands: Operands, options: Options, of_lse: bool) -> tuple:
    """(o, lse, to, tlse) of the inputs of a jvp, as of _Tangents."""
    return _apply(_Tangents, options, (of_lse,), tuple(operands), *operands.values())


class _Attention(torch.autograd.Function):
    """(o, lse, o_residual)"""

    @staticmethod
    def forward(options: Options, flags: tuple[bool, bool, bool], names: tuple[str, ...], *tensors: Any) -> Any:
        return _ops.run("forward", dict(zip(names, tensors, strict=True)), options, flags[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.options, (_, ctx.of_lse, ctx.of_mask), ctx.names, *tensors = inputs
        _, lse, r = output
        ctx.mark_non_differentiable(*(() if ctx.of_lse else (lse,)), r)
        ctx.set_materialize_grads(False)  # else zeros would be written for a result that no loss reads
        ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any, _r: Any) -> Any:
        saved = dict(zip(_saved(ctx.names), ctx.saved_tensors, strict=True))
        # Compiled code has zeros for a dlse that no loss reads.
        made = gradients_of(saved, do, dlse if ctx.of_lse else None, ctx.options, ctx.of_mask)
        return None, None, None, *map(made.get, ctx.names)

    @staticmethod
    def vmap(info: Any, in_dims: Any, options: Options, flags: tuple, names: tuple[str, ...], *tensors: Any) -> Any:
        fold = Fold(info.batch_size, options.layout, names, tensors, in_dims[_HOW:])
        made = attend(fold.operands(), options, of_lse=flags[1], residual=flags[0])
        return fold.results(RESULTS["forward"], made), (0, 0, 0)


def _saved(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names of what _Attention saves, in the order of the fast path: q, k, v, the results, all other operands."""
    return *names[:3], *RESULTS["forward"], *names[3:]


def gradients_of(saved: Operands, do: Any, dlse: Any, options: Options, of_mask: bool = False) -> Operands:
    """The gradients by the names of their operands, that of the mask where asked for. `do`, `dlse`: None where a loss
    does not read o, or lse."""
    if do is None and dlse is None:
        return {}
    if do is None:
        do = torch.zeros_like(saved["o"][..., :1]).expand_as(saved["o"])
    given = {"do_": do, **saved} if dlse is None else {"do_": do, **saved, "dlse": dlse}
    made = dict(zip(DIFFERENTIABLE, gradients(given, options, of_mask), strict=True))
    return made | {"mask": made["mask"].to(saved["mask"].dtype) if of_mask else None}


def _save_for_backward(ctx: Any, inputs: Any, output: Any) -> None:
    """What octet::forward_jvp saves."""
    operands, ctx.of_lse, ctx.options = _ops.read("jvp", inputs)
    saved = inputs_of("forward", operands) | dict(zip(RESULTS["forward"], output, strict=False))
    ctx.names = tuple(saved)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*saved.values())


def _backward_of_forward_jvp(ctx: Any, do: Any, dlse: Any, _r: Any, dto: Any, dtlse: Any) -> tuple:
    if dto is not None or dtlse is not None:
        raise Unsupported(
            "octet computes first derivatives only: a tangent has no gradient; detach it inside the compiled function, "
            "which asks for gradients of all that it returns"
        )
    needs = dict(zip(_ops.ARGUMENTS["jvp"], ctx.needs_input_grad, strict=False))  # a call leaves out its last ones
    for name in CONSTANTS:
        if needs.get(name):
            reject_gradient(name)
    saved = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
    made = gradients_of(saved, do, dlse if ctx.of_lse else None, ctx.options, needs.get("mask", False))
    return tuple([made.get(name) if wanted else None for name, wanted in needs.items()])


torch.library.register_autograd("octet::forward_jvp", _backward_of_forward_jvp, setup_context=_save_for_backward)


class _DualAttention(_Attention):
    """The same with a jvp."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _Attention.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[_HOW:])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        given = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        along = dict(zip(ctx.names, tangents[_HOW:], strict=True))
        given |= operands_of(**{f"t{name}": along.get(name) for name in WITH_TANGENT})
        *_, to, tlse = tangents_of(given, ctx.options, ctx.of_lse)
        return to, tlse if ctx.of_lse else None, None
