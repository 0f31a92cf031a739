"""octet.sdpa, in the place of torch.nn.functional.scaled_dot_product_attention: the same signature and semantics."""

import contextlib
import functools
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch.overrides import handle_torch_function, has_torch_function

from octet import _abi, _api
from octet._operands import operands_of
from octet._options import AttentionOptions, Causal, Precision, count, look_up
from octet._rejections import expect_known
from octet.errors import Error, InvalidArgument, listing
from octet.torch import _fast_path
from octet.torch._adapter import is_causal_bias
from octet.torch._random import dropout


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    precision: Precision | None = None,
    **unknown: object,
) -> torch.Tensor:
    """Attention as scaled_dot_product_attention defines it.

    Args:
        query: [..., heads, queries, dim], or [queries, dim].
        key: [..., kv_heads, keys, dim]; its leading dimensions broadcast with those of query and value, heads too.
        value: [..., kv_heads, keys, dim_v].
        attn_mask: bool (True: takes part) or float (added to the scaled logits), broadcast to [..., heads, queries,
            keys], or a torch.nn.attention.bias.CausalBias. Not together with is_causal. A float one has
            a gradient on CPUs; on a GPU it must require none.
        dropout_p: the probability that a weight is dropped, below 1, drawn by the generator of query's device; other
            than 0 on CPUs alone.
        is_causal: query i sees keys up to i, also where the lengths differ.
        scale: None: 1 / sqrt(dim).
        enable_gqa: allows the heads of key and of value to divide those of query.
        precision: as in `octet.attention`.

    Returns:
        [..., heads, queries, dim_v] in query's type; given four dimensions, in its memory order. A query that sees no
        key gives 0.

    Raises:
        InvalidArgument, Unsupported: where octet cannot do what was asked; see `patch_sdpa` to fall back.
        TypeError: an unknown keyword.

    A subclass of Tensor with a __torch_function__ of its own and a TorchFunctionMode are called with this function.
    """
    expect_known(sdpa, unknown)
    how = "sdpa", is_causal, scale, enable_gqa, precision
    made = _fast_path.find(how, query, key, value) if attn_mask is None and not dropout_p else None
    if made is not None and made is not False:
        return made
    tensors = _overriding(query, key, value, attn_mask)
    if has_torch_function(tensors):
        arguments: Any = (query, key, value, attn_mask, dropout_p, is_causal)
        keywords_given: Any = {"scale": scale, "enable_gqa": enable_gqa, "precision": precision}
        return handle_torch_function(sdpa, tensors, *arguments, **keywords_given)
    if is_causal and attn_mask is not None:
        raise InvalidArgument("attn_mask: given together with is_causal; put the causal mask into attn_mask")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.is_nested or x.ndim < 2:
            found = "nested" if x.is_nested else f"{x.ndim} dimensions"
            raise InvalidArgument(
                f"{name}: found {found}, allowed: strided, [..., token, dim]; for packed sequences use "
                "octet.attention_varlen"
            )
    causal: Causal = "top_left" if is_causal else False
    if is_causal_bias(attn_mask):
        causal, attn_mask = _causal_of(attn_mask, query.shape[-2], key.shape[-2]), None
    q, k, v, lead = query, key, value, query.shape[:1]
    if not (q.ndim == k.ndim == v.ndim == 4 and k.shape[:1] == lead == v.shape[:1]):
        lead = torch.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
        q, k, v = (_four_dimensions(x if x.ndim > 2 else x[None], lead) for x in (q, k, v))
    if not q.shape[1] == k.shape[1] == v.shape[1]:
        q, k, v = _match_heads(q, k, v, enable_gqa)
    if attn_mask is not None and attn_mask.ndim > 3:
        attn_mask = _four_dimensions(attn_mask, lead)
    keywords: AttentionOptions = {"causal": causal, "scale": scale, "precision": precision, "enable_gqa": True}
    o = None
    if made is False and q is query and k is key and v is value:
        o = _fast_path.first(how, q, k, v, keywords, {})
    if o is None:
        dropped: Any = dropout(dropout_p, q)
        more = operands_of(mask=attn_mask, dropout_seed=dropped.pop("dropout_seed", None))
        given: Any = {**keywords, **dropped}
        o = _fast_path.attention(q, k, v, given, more) if more else None
        if o is None:
            o, _ = _api.forward(operands_of(q=q, k=k, v=v) | more, given)
    has_heads = max(query.ndim, key.ndim, value.ndim) > 2
    if len(lead) == 1 and has_heads:
        return o
    return o.reshape(*lead, *o.shape[1:] if has_heads else o.shape[2:])


def _overriding(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """The tensors whose __torch_function__ decides about a call; None stands for those that octet checks itself:
    CausalBias, which it obeys, and nested tensors, which it rejects."""
    return tuple([None if x is None or x.is_nested or is_causal_bias(x) else x for x in tensors])


def _causal_of(bias: Any, queries: int, keys: int) -> Causal:
    """A CausalBias has no numbers: its memory is never written."""
    if (bias.seq_len_q, bias.seq_len_kv) != (queries, keys):
        raise InvalidArgument(
            f"attn_mask: a CausalBias of {bias.seq_len_q} queries and {bias.seq_len_kv} keys, but query has {queries} "
            f"and key {keys}"
        )
    return "top_left" if bias.variant.name == "UPPER_LEFT" else "bottom_right"


def _four_dimensions(x: torch.Tensor, lead: torch.Size) -> torch.Tensor:
    """Leading dimensions broadcast to `lead` and made one; a single one stays a view."""
    x = x.expand(*lead, *x.shape[-3:])
    return x if len(lead) == 1 else x.reshape(math.prod(lead), *x.shape[-3:])


def _match_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, enable_gqa: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same attention with as many heads in v as in k, and a multiple of them in q, where torch allows the call:
    single heads broadcast; with enable_gqa the heads of k and of v divide those of q. Else the library rejects."""
    heads, kv_heads = q.shape[1], math.lcm(k.shape[1], v.shape[1])
    if enable_gqa:
        divides = kv_heads and heads % kv_heads == 0
        return (q, _repeat_heads(k, kv_heads), _repeat_heads(v, kv_heads)) if divides else (q, k, v)
    for name, x in (("key", k), ("value", v)):
        if heads != 1 != x.shape[1] != heads:
            raise InvalidArgument(
                f"enable_gqa: False, but query has {heads} heads and {name} {x.shape[1]}; set it to True, or, where "
                "heads and tokens are swapped, transpose: all are [..., head, token, dim]"
            )
    if 1 != k.shape[1] != v.shape[1] != 1:
        raise InvalidArgument(f"value: {v.shape[1]} heads, but key has {k.shape[1]}, allowed: as many, or 1")
    return _repeat_heads(q, max(heads, kv_heads)), _repeat_heads(k, kv_heads), _repeat_heads(v, kv_heads)


def _repeat_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """A view where x has one head."""
    if x.shape[1] == heads:
        return x
    return x.expand(-1, heads, -1, -1) if x.shape[1] == 1 else x.repeat_interleave(heads // x.shape[1], 1)


@contextlib.contextmanager
def patch_sdpa(
    precision: Precision | None = None,
    *,
    min_seqlen: int = 0,
    fallback: Literal["error", "sdpa"] = "error",
) -> Iterator[None]:
    """While it lasts, torch.nn.functional.scaled_dot_product_attention is `octet.sdpa`.

    Args:
        precision: as in `octet.attention`.
        min_seqlen: calls with fewer keys go to torch's own.
        fallback: what to do with a call that octet rejects: "error" raises, "sdpa" warns once per reason and calls
            torch's own.

    It lasts for all threads. Contexts may end in any order; a function that was taken from torch.nn.functional while
    one lasted calls torch's own when it has ended. A function that was imported by name before (from
    torch.nn.functional import scaled_dot_product_attention) keeps torch's own.

    Subclasses of Tensor with a __torch_function__ of their own and TorchFunctionModes get the calls first, as they get
    those of torch's own, with the patched function as `func`.
    """
    if fallback not in ("error", "sdpa"):
        raise InvalidArgument(f"fallback: found {fallback!r}, allowed: {listing(('error', 'sdpa'))}")
    if precision is not None:
        look_up("precision", precision, _abi.PRECISIONS)
    count("min_seqlen", min_seqlen, "a number of keys")
    patch = _Patch(precision, min_seqlen, fallback == "sdpa")
    patch.enter()
    try:
        yield
    finally:
        patch.leave()


class _Patch:
    """torch.nn.functional.scaled_dot_product_attention as octet.sdpa, between `enter` and `leave`."""

    _lock = threading.Lock()
    _entered: "list[_Patch]" = []

    def __init__(self, precision: Precision | None, min_seqlen: int, falls_back: bool) -> None:
        self._precision = precision
        self._min_seqlen = min_seqlen
        self._falls_back = falls_back
        self._lasts = True
        self._own: Callable = torch.nn.functional.scaled_dot_product_attention  # what it stands in place of
        self._warned: set[str] = set()
        self._function = self._make()

    def enter(self) -> None:
        with self._lock:
            self._own = torch.nn.functional.scaled_dot_product_attention
            torch.nn.functional.scaled_dot_product_attention = self._function
            self._entered.append(self)

    def leave(self) -> None:
        """Ends this patch. Patches that were put over it stay, and then call what this one had replaced."""
        with self._lock:
            self._lasts = False
            self._entered.remove(self)
            if torch.nn.functional.scaled_dot_product_attention is self._function:
                torch.nn.functional.scaled_dot_product_attention = self._own
            for other in self._entered:
                if other._own is self._function:
                    other._own = self._own

    def _make(self) -> Callable:
        @functools.wraps(sdpa)
        def scaled_dot_product_attention(
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attn_mask: torch.Tensor | None = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            *,
            scale: float | None = None,
            enable_gqa: bool = False,
            **unknown: Any,
        ) -> torch.Tensor:
            given: Any = (query, key, value, attn_mask, dropout_p, is_causal)
            own: Any = {"scale": scale, "enable_gqa": enable_gqa, **unknown}
            if not self._lasts:
                return self._own(*given, **own)
            tensors = _overriding(query, key, value, attn_mask)
            if has_torch_function(tensors):
                return handle_torch_function(scaled_dot_product_attention, tensors, *given, **own)
            if not key.is_nested and key.ndim > 1 and key.shape[-2] < self._min_seqlen:
                return self._own(*given, **own)
            try:
                return sdpa(*given, precision=self._precision, **own)
            except Error as rejection:
                if not self._falls_back:
                    raise
                if str(rejection) not in self._warned:
                    self._warned.add(str(rejection))
                    warnings.warn(f"octet leaves this call to torch: {rejection}", stacklevel=2)
            return self._own(*given, **own)

        return scaled_dot_product_attention
