"""Masks of transformers that are not built: what a mask function stands for, and how attention runs with it.

transformers describes a mask by a function of indices and a padding mask [batch, keys]. Causal masks, sliding windows,
padding and packed sequences are intervals of keys, which octet takes without a mask tensor. `mask_function` gives
them as a `Mask`, a bool tensor that is built only if somebody computes with it. All other masks are built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from octet.errors import Unsupported


class Pattern(NamedTuple):
    """The keys that a mask function hides, apart from padding."""

    causal: bool
    window: int | None  # a query sees keys at most so far from it, on both sides unless causal
    sequences: torch.Tensor | None  # [batch, tokens]: the sequence that each token of a packed batch belongs to


class Plan(NamedTuple):
    """How attention runs: with the first `keys` keys of each batch element, or with packed sequences."""

    causal: bool
    window: int | None  # as in Pattern
    keys: int
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    index_q: torch.Tensor | None = None  # the tokens of the flattened batch that the sequences consist of; None: all
    index_k: torch.Tensor | None = None


class Mask(torch.Tensor):
    """A bool mask [batch, 1, queries, keys], True: seen, with a plan that says the same. It is built when somebody
    computes with it."""

    plan: Plan
    viewed: bool  # a view of the built tensor exists, through which it may be changed: the plan may say less
    _build: Callable[[], torch.Tensor]
    _built: torch.Tensor | None
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], device: torch.device, plan: Plan, build: Callable) -> Mask:
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        self.plan, self.viewed, self._build, self._built = plan, False, build, None
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Mask({list(self.shape)}, {self.plan})"

    def dense(self) -> torch.Tensor:
        """The mask as an ordinary tensor."""
        if self._built is None:
            self._built = self._build().to(self.device)
        return self._built

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            (given,) = args
            return cls(given.shape, given.device, given.plan, given.dense)
        if function is torch.ops.aten._to_copy.default and kwargs.get("dtype") in (None, torch.bool):
            (given,) = args
            device = torch.device(kwargs.get("device") or given.device)
            moved = {id(x): x.to(device) for x in given.plan if isinstance(x, torch.Tensor)}
            return cls(given.shape, device, Plan(*[moved.get(id(x), x) for x in given.plan]), given.dense)
        schema = function._schema
        if schema.is_mutable and any(isinstance(x, Mask) for x in args[:1]):
            raise Unsupported(
                f"attention_mask: changed in place by {function}, which a mask of octet does not follow; use "
                "attn_implementation='sdpa' for this model"
            )
        if any(x.alias_info is not None for x in schema.arguments):
            for given in args:
                if isinstance(given, Mask):
                    given.viewed = True
        args, kwargs = pytree.tree_map_only(Mask, Mask.dense, (args, kwargs))
        return function(*args, **kwargs)


def mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **more: Any,
) -> torch.Tensor | None:
    """The mask of a model whose attention is octet's, registered with transformers' AttentionMaskInterface.

    Returns:
        None where the attention function's own `is_causal` says it all, a `Mask` where intervals of keys do, else the
        bool tensor [batch, 1, queries, keys] of "sdpa".
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask
    from transformers.utils.import_utils import is_tracing

    if mask_function is None:  # as an expression, `or` is a branch on a function, which torch 2.11 does not trace
        mask_function = causal_mask_function
    given: dict[str, Any] = {
        "batch_size": batch_size, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset,
        "kv_offset": kv_offset, "mask_function": mask_function,
        "attention_mask": attention_mask, "device": device, **more,
    }  # fmt: skip
    if is_tracing(attention_mask):  # values cannot be looked at
        allowed = {
            "allow_is_causal_skip": allow_is_causal_skip,
            "allow_is_bidirectional_skip": allow_is_bidirectional_skip,
        }
        if torch.compiler.is_compiling() and not is_fast_with_tensors(torch.device(device)) and not _is_one_graph():
            return _outside_the_graph(**given, **allowed)
        return sdpa_mask(**given, **allowed)

    def build() -> torch.Tensor:
        made = sdpa_mask(**given, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        assert made is not None  # skipping is off
        return made

    pattern = pattern_of(given["mask_function"])
    if pattern is None:
        return build()
    padding = None if attention_mask is None else _of_keys(attention_mask, kv_length, kv_offset)
    plan = plan_of(pattern, padding, batch_size, q_length, kv_length, int(q_offset) - kv_offset, device)
    if plan is None:
        return build()
    skips = allow_is_causal_skip if pattern.causal else allow_is_bidirectional_skip
    if skips and plan == Plan(plan.causal, None, kv_length) and (not plan.causal or q_length == kv_length):
        return None
    return Mask((batch_size, 1, q_length, kv_length), torch.device(device), plan, build)


_outside_the_graph = torch.compiler.disable(
    mask_function, reason="octet reads the mask, as kernels without mask tensors are faster on this device"
)


def is_fast_with_tensors(device: torch.device) -> bool:
    """Returns whether attention with a mask tensor is worth a graph of torch.compile without a break on this device."""
    return device.type == "cpu"


@torch._dynamo.assume_constant_result
def _is_one_graph() -> bool:
    """Returns whether the code that is being traced must become one graph: fullgraph=True, or torch.export."""
    from torch._dynamo import symbolic_convert

    tracer = getattr(symbolic_convert.tls, "current_tx", None)
    return tracer is None or bool(tracer.one_graph or tracer.error_on_graph_break)


def _of_keys(attention_mask: torch.Tensor, kv_length: int, kv_offset: int) -> torch.Tensor:
    """The padding mask [batch, kv_length] of these keys; keys beyond it are hidden."""
    found = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    return torch.nn.functional.pad(found, (0, kv_length - found.shape[1]))


def _variables(function: Any) -> dict[str, Any]:
    """Returns the variables that a nested function has from the function around it, by name."""
    return {
        name: cell.cell_contents
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    }


def pattern_of(function: Callable) -> Pattern | None:
    """Returns what a mask function of transformers hides, or None if it is not made of the functions known here.

    Such functions are recognised by their code: those of transformers.masking_utils return nested functions, each
    always of the same code.
    """
    from transformers import masking_utils as utils

    def code_of(example: Any) -> Any:
        return example.__code__

    both = code_of(utils.and_masks())
    left = code_of(utils.sliding_window_overlay(1))
    around = code_of(utils.sliding_window_bidirectional_overlay(1))
    nothing: Any = None
    packed = code_of(utils.packed_sequence_mask_function(nothing))
    renumbered = code_of(utils.remap_positions_for_packed_sequence(nothing, nothing))

    def parts(function: Any) -> Iterator[Any]:
        code = getattr(function, "__code__", None)
        if code is both:
            for part in _variables(function)["mask_functions"]:
                yield from parts(part)
        elif code is renumbered:
            yield function
            yield from parts(_variables(function)["mask_function"])
        else:
            yield function

    causal, windows, sequences, renumbers = False, set(), None, False
    for part in parts(function):
        code = getattr(part, "__code__", None)
        if part is utils.causal_mask_function:
            causal = True
        elif part is utils.bidirectional_mask_function:
            pass
        elif code is left:
            windows.add(("left", _variables(part)["sliding_window"] - 1))
        elif code is around:
            windows.add(("around", _variables(part)["sliding_window"]))
        elif code is packed:
            sequences = _variables(part)["packed_sequence_mask"]
        elif code is renumbered:
            renumbers = True
        else:
            return None
    # A window to the left alone is one of causal masks, one to both sides one of the others.
    if len(windows) > 1 or any((side == "left") != causal for side, _ in windows):
        return None
    if renumbers != (sequences is not None):
        return None
    return Pattern(causal, windows.pop()[1] if windows else None, sequences)


def plan_of(
    pattern: Pattern,
    padding: torch.Tensor | None,
    batch: int,
    queries: int,
    keys: int,
    start: int,
    device: torch.device | str,
) -> Plan | None:
    """How to run attention under a pattern and a padding mask, or None if only a mask tensor can say it.

    Args:
        padding: bool [batch, keys], True: a token; None: all are.
        start: the position of the first query among the keys.

    Under a causal pattern or a window a query whose own key is padding sees nothing, unless it is the only query. All
    others see what they see under the mask.
    """
    causal, window, sequences = pattern
    if window is not None and window >= keys - 1:
        window = None
    begins = None if sequences is None else sequences.diff(dim=-1) != 0
    if begins is not None and bool(begins.any()):  # always there in compiled code, also where there is one sequence
        if padding is not None or start or queries != keys:
            return None
        return packed_plan(begins, causal, window)
    end = min(keys, start + queries) if causal else keys  # later keys are seen by none
    if (causal and end < start + queries) or (window is not None and not causal and (start or queries != keys)):
        return None
    if padding is None and causal and queries == 1 and window is not None:
        padding = torch.ones(batch, keys, dtype=torch.bool, device=device)
    if padding is not None:
        padding = padding & (torch.arange(keys, device=padding.device) < end)
    if causal and queries == 1:  # the last query sees all keys, or those within the window
        if window is not None and padding is not None:
            padding = padding & (torch.arange(keys, device=padding.device) >= start - window)
        causal, window = False, None
    if padding is None or bool(padding[:, :end].all()):
        return Plan(causal, window, end)
    ordered = causal or window is not None  # queries that are padding are left out
    bounds = _bounds(padding)
    if bounds is None:
        if window is not None:  # distances are those of positions, padding included
            return None
        return _gathered(padding, padding[:, start:end] if causal else None, queries, causal)
    cu_q, cu_k = [0], [0]
    for i, (first, last) in enumerate(bounds):
        q_first, q_last = (max(first - start, 0), max(last - start, 0)) if ordered else (0, queries)
        # Queries without keys; keys without queries; the tokens.
        cu_q += [i * queries + q_first, i * queries + q_first, i * queries + q_last]
        cu_k += [cu_k[-1], i * keys + first, i * keys + last]
    cu_q += [batch * queries, batch * queries]
    cu_k += [cu_k[-1], batch * keys]
    made = torch.tensor([cu_q, cu_k], dtype=torch.int32).to(device)
    return Plan(causal, window, keys, made[0], made[1])


def _bounds(seen: torch.Tensor) -> list[tuple[int, int]] | None:
    """The interval of keys that each batch element sees, or None if one has a hole."""
    keys = seen.shape[1]
    count = seen.sum(1)
    first = seen.int().argmax(1)
    last = torch.where(count > 0, keys - seen.flip(1).int().argmax(1), first)
    found = torch.stack([first, last, count], 1).tolist()
    return [(a, b) for a, b, _ in found] if all(b - a == n for a, b, n in found) else None


def _lengths(seen: torch.Tensor) -> torch.Tensor:
    """cu_seqlens of the True elements of each row."""
    return torch.nn.functional.pad(seen.sum(1).cumsum(0), (1, 0)).int()


def _gathered(seen: torch.Tensor, q_seen: torch.Tensor | None, queries: int, causal: bool) -> Plan:
    """The plan that takes the tokens out of the batch: padding lies between them."""
    index_q = None if q_seen is None else q_seen.flatten().nonzero()[:, 0]
    cu_q = (
        torch.arange(seen.shape[0] + 1, dtype=torch.int32, device=seen.device) * queries
        if q_seen is None
        else _lengths(q_seen)
    )
    return Plan(causal, None, seen.shape[1], cu_q, _lengths(seen), index_q, seen.flatten().nonzero()[:, 0])


def packed_plan(begins: torch.Tensor, causal: bool, window: int | None) -> Plan:
    """The plan of sequences one after the other. begins [batch, tokens - 1]: a sequence begins with the second token,
    the third, ..."""
    begins = torch.nn.functional.pad(begins, (1, 0), value=True)
    first = begins.flatten().nonzero()[:, 0]
    cu = torch.nn.functional.pad(first, (0, 1), value=begins.numel()).int()
    return Plan(causal, window, begins.shape[1], cu, cu)
