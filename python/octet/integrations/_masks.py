"""Masks of transformers that are not built: what a mask function stands for, and how attention runs with it.

transformers describes a mask by a function of indices and a padding mask [batch, keys]. Causal masks, sliding windows,
padding and packed sequences are intervals of keys, which octet takes without a mask tensor. `mask_function` gives
them as a `Mask`, a bool tensor that is built only if somebody computes with it. All other masks are built.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from octet.errors import Unsupported
from octet.integrations import NAMES
from octet.integrations._plans import Pattern, Plan, beginnings, plan_of


class Mask(torch.Tensor):
    """A bool mask [batch, 1, queries, keys], True: seen, with a plan that says the same. It is built when somebody
    computes with it."""

    plan: Plan
    viewed: bool  # a view of the built tensor exists, through which it may be changed: the plan may say less
    follows_positions: bool  # whoever made it knew the position ids: the plan has the sequences that they tell
    _build: Callable[[], torch.Tensor]
    _built: torch.Tensor | None
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, shape: tuple[int, ...], device: torch.device, plan: Plan, build: Callable, follows_positions: bool
    ) -> Mask:
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        self.plan, self.follows_positions = plan, follows_positions
        self.viewed, self._build, self._built = False, build, None
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
            return cls(given.shape, given.device, given.plan, given.dense, given.follows_positions)
        if function is torch.ops.aten._to_copy.default and kwargs.get("dtype") in (None, torch.bool):
            (given,) = args
            device = torch.device(kwargs.get("device") or given.device)
            moved = {id(x): x.to(device) for x in given.plan if isinstance(x, torch.Tensor)}
            plan = Plan(*[moved.get(id(x), x) for x in given.plan])
            return cls(given.shape, device, plan, given.dense, given.follows_positions)
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


class Offset(int):
    """The kv_offset of one mask, with the position ids [batch, tokens], which transformers leaves out of account where
    there is a cache or an attention mask. It is an int, and transformers hands it on to the mask function as it is."""

    position_ids: torch.Tensor

    def begins(self, batch: int, tokens: int) -> torch.Tensor | None:
        """[batch, tokens - 1]: a sequence begins with the second token, the third, ...; None: the whole is one."""
        return beginnings(self.position_ids, batch, tokens)


def hand_over_positions(preprocess: Callable) -> Callable:
    """Returns transformers' `_preprocess_mask_arguments`, the one place that every causal mask passes and that knows
    the position ids, changed so that for models that use octet its kv_offset is an `Offset` in eager code."""

    @functools.wraps(preprocess)
    def _preprocess_mask_arguments(
        config: Any,
        inputs_embeds: Any,
        attention_mask: Any,
        past_key_values: Any,
        position_ids: Any,
        *more: Any,
        **how: Any,
    ) -> tuple:
        found = preprocess(config, inputs_embeds, attention_mask, past_key_values, position_ids, *more, **how)
        early_exit, *others, kv_offset = found
        if early_exit or position_ids is None or config._attn_implementation not in NAMES or type(kv_offset) is not int:
            return found
        if torch.compiler.is_compiling():
            return found
        offset = Offset(kv_offset)
        offset.position_ids = position_ids
        return early_exit, *others, offset

    return _preprocess_mask_arguments


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
        A `Mask` where intervals of keys say it all, else the bool tensor [batch, 1, queries, keys] of "sdpa". In
        compiled code None, where it is allowed and the attention function's own `is_causal` says it all.
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
            # The layers take a causal mask that is left out for one of as many keys as queries.
            "allow_is_causal_skip": allow_is_causal_skip and (q_length == 1 or q_length == kv_length),
            "allow_is_bidirectional_skip": allow_is_bidirectional_skip,
        }
        if torch.compiler.is_compiling() and not is_fast_with_tensors(torch.device(device)) and not _is_one_graph():
            return _outside_the_graph(given, allowed)
        return sdpa_mask(**given, **allowed)
    return _mask(**given)


@functools.partial(
    torch.compiler.disable, reason="octet reads the mask, as kernels without mask tensors are faster on this device"
)
def _outside_the_graph(given: dict[str, Any], allowed: dict[str, bool]) -> torch.Tensor | None:
    """The mask, None where it says no more than `is_causal`: a graph may then serve other lengths too."""
    mask = _mask(**given)
    if not isinstance(mask, Mask):
        return mask
    skips = allowed["allow_is_causal_skip" if mask.plan.causal else "allow_is_bidirectional_skip"]
    return None if skips and mask.plan == Plan(mask.plan.causal, None, mask.shape[-1]) else mask


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor,
    kv_offset: int,
    mask_function: Callable,
    attention_mask: torch.Tensor | None,
    device: torch.device | str,
    **more: Any,
) -> torch.Tensor:
    """What `mask_function` returns where values can be looked at."""
    from transformers.masking_utils import and_masks, packed_sequence_mask_function, sdpa_mask

    pattern = pattern_of(mask_function)
    padding = None if attention_mask is None else _of_keys(attention_mask, kv_length, kv_offset)
    start = int(q_offset) - kv_offset
    if pattern is not None and pattern.causal and pattern.sequences is None and isinstance(kv_offset, Offset):
        begins = kv_offset.begins(batch_size, q_length) if q_length == kv_length and start == 0 else None
        if begins is not None and (padding is None or bool(padding.all())):
            sequences = torch.nn.functional.pad(begins.cumsum(-1), (1, 0)).to(device)
            mask_function = and_masks(mask_function, packed_sequence_mask_function(sequences))
            pattern, padding, attention_mask = pattern._replace(sequences=sequences), None, None

    def build() -> torch.Tensor:
        made = sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, device=device, **more,
            allow_is_causal_skip=False, allow_is_bidirectional_skip=False,
        )  # fmt: skip
        assert made is not None  # skipping is off
        return made

    plan = None if pattern is None else plan_of(pattern, padding, batch_size, q_length, kv_length, start, device)
    if pattern is None or plan is None:
        return build()
    follows = pattern.sequences is not None or isinstance(kv_offset, Offset)
    return Mask((batch_size, 1, q_length, kv_length), torch.device(device), plan, build, follows)


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
    renumber = getattr(utils, "remap_positions_for_packed_sequence", None)  # transformers 5.17 has no such function
    renumbered = code_of(renumber(nothing, nothing)) if renumber else None

    def parts(function: Any) -> Iterator[Any]:
        code = getattr(function, "__code__", None)
        if code is None:
            yield function
        elif code is both:
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
    if renumbers and sequences is None:  # within a sequence distances are the same by either number
        return None
    return Pattern(causal, windows.pop()[1] if windows else None, sequences)
