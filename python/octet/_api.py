"""The public functions of attention: each works out what was asked for and hands it to the framework of the arrays.

This is the one place where calls are dispatched by the kind of their arrays, and where torch and jax are imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from octet import _numpy
from octet._operands import Operands, expect_given, expect_meant, label, operands_of
from octet._options import AttentionOptions, Options, count, options_of, truth, with_tile_of
from octet._qtensor import QTensor
from octet._results import own_type
from octet.errors import InvalidArgument

if TYPE_CHECKING:
    from typing import Unpack

# Functions of q, k, v, keywords and further operands that give o of `attention` faster than `forward` does, by the type
# of q; None: the call has to go by `forward`.
shortcuts: dict[type, Callable[[Any, Any, Any, AttentionOptions, Operands], Any]] = {}
# The same of octet.attention_cached and octet.append, by the type of seqused_k: a module like torch/_fast_caches.py.
cache_shortcuts: dict[type, Any] = {}


def is_traced() -> bool:
    """Whether torch.compile traces the call. It guards what a call reads, and so must not read shortcuts: tracing may
    import octet.torch, which enters one."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()


def _kind_of(name: str, array: Any) -> str:
    array = array.codes if isinstance(array, QTensor) else array
    if isinstance(array, np.ndarray):
        return "numpy"
    if "torch" in sys.modules and isinstance(array, sys.modules["torch"].Tensor):
        return "torch"
    if "jax" in sys.modules and isinstance(array, sys.modules["jax"].Array):
        return "jax"
    allowed = "numpy.ndarray, torch.Tensor, jax.Array, or octet.QTensor"
    raise InvalidArgument(f"{label(name)}: found {type(array).__name__}, allowed: {allowed}")


def load(kind: str) -> Any:
    """The module that computes with arrays of a kind. It has run_attention, run_vjp, run_jvp, to_numpy and an
    adapter, see _adapters.py. Those of torch and jax, which may be missing, are imported here when they are needed, and
    nowhere else."""
    if kind == "torch":
        import octet.torch

        return octet.torch
    if kind == "jax":
        import octet.jax

        return octet.jax
    return _numpy


def framework_of(operands: Operands) -> Any:
    """The module that computes with all the arrays, which are of one kind."""
    kind = ""
    for name, array in operands.items():
        found = _kind_of(name, array)
        if found != (kind := kind or found):
            first = next(iter(operands))
            raise InvalidArgument(
                f"{label(name)}: a {found} array, but {first} is one of {kind}; all arrays of a call are of one kind"
            )
    return load(kind)


def _seed_words(seed: Any) -> list[int] | None:
    """The words of a dropout_seed in numbers, as the library takes them; None: it is an array."""
    numbers = seed if isinstance(seed, tuple) else (seed, 0)
    if len(numbers) == 2 and all(isinstance(x, (int, np.integer)) and not isinstance(x, bool) for x in numbers):
        allowed = "an integer from 0 to 2^64 - 1, (seed, offset), two of these, or int32 [4] or [batch, 4]"
        found = [count("dropout_seed", x, allowed, most=2**64 - 1) for x in numbers]
        words = [x >> shift & 0xFFFFFFFF for x in found for shift in (0, 32)]
        return [x - (x >> 31 << 32) for x in words]
    return None


def call_of(operands: Operands, keywords: AttentionOptions) -> tuple[Any, Options]:
    """The module that computes a call over these arrays, whose shapes are those of one layout, and its options. A
    dropout_seed in numbers becomes an array among the operands."""
    expect_given(operands, "q", "k", "v")
    if (words := _seed_words(operands.get("dropout_seed"))) is not None:
        q = operands["q"]
        of_q = load(_kind_of("q", q)).adapter
        operands["dropout_seed"] = of_q.integers(words, q.codes if isinstance(q, QTensor) else q)
    framework = framework_of(operands)
    options = options_of(own_type(framework.adapter, operands["q"]), **keywords)
    expect_meant(framework.adapter, operands, keywords)
    return framework, options


def expect_no_layout(layout: str | None) -> None:
    """Rejects a layout of packed sequences."""
    if layout is not None:
        raise InvalidArgument(f"layout: {layout!r} given, but packed sequences are [token, head, dim]; leave it out")


def with_bounds(options: Options, max_seqlen_q: int, max_seqlen_k: int) -> Options:
    """The options with bounds on the lengths of sequences."""
    allowed = "a bound on the lengths, or 0 if unknown"
    return options._replace(
        max_seqlen_q=count("max_seqlen_q", max_seqlen_q, allowed),
        max_seqlen_k=count("max_seqlen_k", max_seqlen_k, allowed),
    )


def forward(operands: Operands, keywords: AttentionOptions, return_lse: bool = False) -> tuple[Any, Any]:
    """(o, lse) of `attention`"""
    framework, options = call_of(operands, keywords)
    return framework.run_attention(options, operands, truth("return_lse", return_lse))


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Any | None = None,
    sinks: Any | None = None,
    alibi_slopes: Any | None = None,
    dropout_seed: Any | None = None,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Any:
    """softmax(scale * q k^T + mask) v, with softcap and ALiBi where asked for

    Args:
        q: [batch, heads, queries, dim], or with layout "bshd" [batch, queries, heads, dim]: a numpy, torch or jax array
            of float32, float16, bfloat16 or float64, or a `QTensor`; any strides. dim is 1 to 512; one that is no
            multiple of 8 costs a copy, filled with zeros, as does such a dim_v.
        k: [batch, kv_heads, keys, dim]; heads is a multiple of kv_heads, and head h of q meets head
            h // (heads / kv_heads) of k and v.
        v: [batch, kv_heads, keys, dim_v].
        mask: bool (True: seen) or float32, float16, bfloat16, at precision "f64" float64 (added to the logits; -inf
            hides), broadcast to [batch, heads, queries, keys] whatever the layout. One that is added has a gradient,
            in torch where it requires one, summed over what it broadcasts; on GPUs in f32, f16 and bf16.
        sinks: [heads], a float type: one more logit of every query of a head, whose value is 0. It enters the sum of
            the weights, and so lse, and nothing else. Computed in float32 (float64 at precision "f64").
        alibi_slopes: [heads] or [batch, heads], a float type: slope * |i + (keys - queries) - j| is subtracted from the
            logit of query i and key j. The last query is at the last key, as in flash-attn, whatever the alignment of
            a causal mask or window. Any numbers; one that is inf or NaN makes its head NaN. They get no gradient, and
            are computed in float32 (float64 at precision "f64"). On GPUs at precisions "f32", "f16" and "bf16".
        dropout_seed: with dropout_p: an integer of 64 bits, the seed; (seed, offset), two of these; or int32 [4], the
            words of both, low words first, or [batch, 4]. Which elements are dropped is a function of it and of their
            place (docs/numerics.md, Dropout): the same seed and offset give the same o and, in a backward pass, its
            gradients. Element n of the batch takes offset + n, but with [batch, 4] that of its own.
        return_lse: also return the log-sum-exp of the logits, the sink's among them.

    Keywords:
        precision: the recipe (docs/numerics.md), "f64", "f32", "f16", "bf16", "int8", "int8_f16", "int8_fp8", "fp8",
            "fp8_raw" or "sagebwd"; None: that of q's own type.
        causal: True: query i sees keys up to i, rejected unless there are as many queries as keys. "top_left" says that
            for any lengths; "bottom_right": the last query sees all keys.
        scale: None: 1 / sqrt(dim). Positive.
        window: (left, right): keys that a query sees left and right of the diagonal; None or -1 for all of a side.
        alignment: "top_left" or "bottom_right", the diagonal that a window without `causal` is about.
        layout: of q, k, v, o and their derivatives, "bhsd" or "bshd": what the dimensions mean, not where they lie.
        bias_correction: how 16-bit training keeps rounding bias out of its gradients (docs/numerics.md), "f16"
            (default), "none", "beta", "exact_delta" or "gproj". With "beta", `beta` is 2 to 8 or 0 for 3.
        hadamard, smooth_q: "auto", "on" or "off": rotate q and k, subtract the mean of each 128 queries, before int8.
        softcap: a positive number: logits become softcap * tanh(logit / softcap) before mask and ALiBi, as in Gemma 2;
            0: none. A logit that is inf or NaN makes its query NaN. On GPUs at precisions "f32", "f16" and "bf16".
        dropout_p: the probability that a weight, after the softmax, is dropped; the others are divided by 1 -
            dropout_p. 0: none; else 2^-23 to 1 - 2^-23. lse does not change. GPUs have it in f32, f16,
            bf16 and int8_f16.
        deterministic: bitwise repeatable; None: as torch.use_deterministic_algorithms says, False elsewhere.
        threads: of the CPU; 0: torch.get_num_threads() in torch, all elsewhere.
        backend: by name, as in `octet.info()["backends"]`; None: the best that can.
        tile: the kernel of the forward pass (of `attention_jvp`: of its pass), by the name of its tile in
            `octet.tiles`; or a dict of such names by pass, {"forward": ..., "backward": ...}; None: what `octet tune`
            found, or the default.
        out_dtype: of o, a dtype or its name, "float32", "float16", "bfloat16", "float64" (at precision "f64") or
            "float8_e4m3fn" (at "fp8_raw"); None: see below.
        enable_gqa: None: heads of q may be a multiple of kv_heads, but shapes that read as tensors of two layouts are
            rejected (docs/python.md); True: any multiple is meant; False: as many heads as kv_heads.
        rounding: an `octet.Rounding`: attention in float64 that rounds where it says, forward and backward, on the CPU.
            The precision is then "f64", and o float32 or float64. There is no jvp.

    Returns:
        o, [batch, heads, queries, dim_v] in q's memory order and in out_dtype, without it q's type (of e4m3: bfloat16,
        in fp8_raw e4m3); with return_lse (o, lse), lse natural, float32 (float64 at precision "f64"), [batch, heads,
        queries] whatever the layout. A query that sees no key gives o = 0, lse = -inf (with a sink: the sink). Torch
        and jax differentiate o and lse by q, k, v and sinks, backwards and forwards, and by mask backwards, on a CPU.
        Gradients have the memory order of q, k and v.

        Memory order, in numpy and torch: a result is dense, and its axes lie in memory as those of its operand do, as
        in torch.empty_like; an axis of stride 0 keeps its place. So views [batch, heads, tokens, dim] of memory
        [batch, tokens, heads, dim] give such o, dq, dk and dv, and nothing is copied.

    Raises:
        InvalidArgument: an argument has a value that is not allowed; the message says which are.
        Unsupported: no backend computes it; the message gives each backend's reason.
        TypeError: an unknown keyword; the message says what to use instead.
    """
    more = operands_of(mask=mask, sinks=sinks, alibi_slopes=alibi_slopes, dropout_seed=dropout_seed)
    if return_lse is False and not is_traced() and (shortcut := shortcuts.get(type(q))):
        o = shortcut(q, k, v, options, more)
        if o is not None:
            return o
    given = operands_of(q=q, k=k, v=v) | more
    o, lse = forward(given, options, return_lse)
    return (o, lse) if return_lse else o


def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    sinks: Any | None = None,
    alibi_slopes: Any | None = None,
    dropout_seed: Any | None = None,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Any:
    """Attention within each of many sequences that lie one after the other.

    Args:
        q: [total queries, heads, dim].
        k, v: [total keys, kv_heads, dim or dim_v].
        cu_seqlens_q: int32 [sequences + 1]: the first token of each sequence, and the total. It starts at 0, never
            falls, and ends at the number of queries. The CPU rejects other values. On a GPU nobody checks them, because
            reading them would wait for the GPU: with other values the kernels read and write outside of the tensors.
            Only jax arrays that are known when the call is made are checked there too, and waited for.
        cu_seqlens_k: the same for k and v.
        max_seqlen_q, max_seqlen_k: bounds on the lengths, 0: unknown. The CPU rejects longer sequences.
        sinks: [heads], as in `octet.attention`.
        alibi_slopes: [heads], or [sequences, heads]. Queries and keys of a distance are those of the sequence.
        dropout_seed: as in `octet.attention`, with sequences in the place of the batch.
        return_lse: also return lse, [heads, total queries].
        options: the keywords of `octet.attention`, but for `layout`. A causal mask or a window needs an alignment.

    Returns:
        o, [total queries, heads, dim_v], or (o, lse).

    Raises:
        As `octet.attention`.
    """
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    more = {"sinks": sinks, "alibi_slopes": alibi_slopes, "dropout_seed": dropout_seed}
    given = operands_of(q=q, k=k, v=v, **lengths, **more)
    expect_given(given, *lengths)
    framework, made = call_of(given, options)
    expect_no_layout(options.get("layout"))
    made = with_bounds(made._replace(layout="thd"), max_seqlen_q, max_seqlen_k)
    o, lse = framework.run_attention(made, given, truth("return_lse", return_lse))
    return (o, lse) if return_lse else o


def attention_vjp(
    q: Any,
    k: Any,
    v: Any,
    do: Any,
    *,
    mask: Any | None = None,
    sinks: Any | None = None,
    alibi_slopes: Any | None = None,
    dropout_seed: Any | None = None,
    dlse: Any | None = None,
    return_dmask: bool = False,
    **options: Unpack[AttentionOptions],
) -> tuple[Any, ...]:
    """The gradients of sum(o * do) + sum(lse * dlse) for (o, lse) = attention(q, k, v), for arrays that no framework
    differentiates.

    Args:
        q, k, v, mask, sinks, alibi_slopes, dropout_seed, options: as in `octet.attention`.
        do: of the shape of o.
        dlse: of the shape and type of lse; None: 0.
        return_dmask: also return the gradient of the mask, which is of a float type.

    Returns:
        (dq, dk, dv), of the shapes, types and memory orders of q, k and v; with sinks (dq, dk, dv, dsinks), dsinks of
        the shape and type of sinks. With return_dmask dmask comes last, of the shape, type and memory order of the
        mask: summed in float32 (float64 at precision "f64") over what the mask broadcasts, 0 where the mask is -inf or
        no query sees the key. In torch all are detached, and torch.func and forward mode get a derivative of them
        rejected.

    Raises:
        As `octet.attention`; Unsupported for precisions without a backward pass.
    """
    more = {"mask": mask, "sinks": sinks, "alibi_slopes": alibi_slopes, "dropout_seed": dropout_seed}
    given = operands_of(q=q, k=k, v=v, do_=do, **more, dlse=dlse)
    framework, made = call_of(given, with_tile_of("backward", options))
    if truth("return_dmask", return_dmask) and mask is None:
        raise InvalidArgument("return_dmask: True, but there is no mask; pass mask, or leave it out")
    return framework.run_vjp(made, given, return_dmask)


def attention_jvp(
    q: Any,
    k: Any,
    v: Any,
    tq: Any | None,
    tk: Any | None,
    tv: Any | None,
    *,
    mask: Any | None = None,
    sinks: Any | None = None,
    alibi_slopes: Any | None = None,
    dropout_seed: Any | None = None,
    tsinks: Any | None = None,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> tuple[Any, ...]:
    """Attention and its derivative along (tq, tk, tv), in one pass over the keys.

    Args:
        q, k, v, mask, sinks, alibi_slopes, dropout_seed, options: as in `octet.attention`.
        tq, tk, tv: tangents, of the shapes of q, k and v; None: 0, whose products are left out.
        tsinks: the tangent of sinks, of their shape; None: 0.
        return_lse: also return lse and its tangent.

    Returns:
        (o, to): to = d/de attention(q + e tq, k + e tk, v + e tv) at e = 0; with return_lse (o, to, lse, tlse). In
        torch and jax, o and lse are differentiable and their tangents are detached, as training by MeanFlow or
        consistency targets wants it.

    Raises:
        As `octet.attention`; Unsupported for precisions without a jvp.
    """
    more = {"mask": mask, "sinks": sinks, "tsinks": tsinks, "alibi_slopes": alibi_slopes, "dropout_seed": dropout_seed}
    given = operands_of(q=q, k=k, v=v, tq=tq, tk=tk, tv=tv, **more)
    framework, made = call_of(given, options)
    return framework.run_jvp(made, given, truth("return_lse", return_lse))
