"""How arguments of other packages that octet has no counterpart for are rejected: the name of the argument, what was
found, what is allowed, and what to use instead."""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from octet.errors import Unsupported, listing

# The keywords of other attention functions, each with advice on what to pass here.
ADVICE = {
    "is_causal": "use causal='top_left' (scaled_dot_product_attention) or 'bottom_right' (flash-attn)",
    "attn_mask": "use mask",
    "bias": "use mask with a float type",
    "dropout": "use dropout_p and dropout_seed",
    "softmax_scale": "use scale",
    "sm_scale": "use scale",
    "window_size": "use window",
    "tensor_layout": "use layout='bhsd' (HND) or 'bshd' (NHD)",
    "remedy": "use bias_correction, whose 'f16' was 'f16_inside', and whose 'gproj' was 'project'",
}


def expect(name: str, found: object, allowed: Collection[object], instead: str) -> None:
    """Rejects values of an argument other than those that octet computes."""
    if found not in allowed:
        raise Unsupported(f"{name}: found {found!r}, allowed: {', '.join(map(repr, allowed))}; {instead}")


def expect_absent(name: str, found: Any, instead: str) -> None:
    """Rejects an argument that is given at all."""
    if found is not None:
        what = f"an array of shape {list(found.shape)}" if hasattr(found, "shape") else repr(found)
        raise Unsupported(f"{name}: found {what}, allowed: None; {instead}")


def expect_no_dropout(probability: float) -> None:
    if probability:
        raise Unsupported(
            f"dropout_p: found {probability}, allowed: 0; here octet drops nothing, use octet.sdpa on a CPU, or drop "
            "elements of the output instead"
        )


def expect_known(function: Callable, unknown: Iterable[str], advice: Mapping[str, str] = MappingProxyType({})) -> None:
    """Rejects keywords that a function does not have."""
    for name in unknown:
        no_names = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_KEYWORD
        own = [x.name for x in inspect.signature(function).parameters.values() if x.kind not in no_names]
        raise TypeError(f"{name}: octet has no such argument; {advice.get(name, f'allowed: {listing(own)}')}")
