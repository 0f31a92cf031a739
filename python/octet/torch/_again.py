"""Eager forward passes that need no gradient, run again by liboctet_dlpack.so without Python, torch's dispatcher or
autograd between: those cost the host more than the kernel takes on short sequences (docs/torch.md).

The first call with tensors of some shapes, strides and types goes the ordinary way and is kept. Whatever listens to
torch's operators (modes, the profiler, torch.func, torch.compile, tracing, autocast, subclasses of Tensor) gets the
ordinary way too.
"""

import ctypes
import itertools
import pathlib
from collections.abc import Callable, Hashable
from typing import Any, Literal

import torch
from torch.autograd import forward_ad

from octet import _abi, _api, _library
from octet._options import AttentionOptions, options_of
from octet._plan import Plan
from octet.torch._front import front

_PATH = pathlib.Path(_library.path).parent / "liboctet_dlpack.so"
_MOST_TOKENS = 512  # different keywords that are remembered

# True: somebody would miss the operator.
_LISTENERS = (
    torch._C._are_functorch_transforms_active,
    torch._C._len_torch_dispatch_stack,
    torch._C._len_torch_function_stack,
    torch._C._is_any_autocast_enabled,
    torch._C._get_tracing_state,
    torch.autograd._profiler_enabled,
)
# What TorchFront.state is made of.
_STATES = torch._C._get_deterministic_algorithms, torch.get_num_threads

Again = Callable[[int, Any, Any, Any], Any]


def _load() -> tuple[Any, Again] | None:
    """The library and its function, where it and torch's exchange API are there."""
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if exchange is None or not _PATH.exists():
        return None
    lib = ctypes.PyDLL(str(_PATH))  # holds the GIL, as objects of Python are handed over
    any_object: Any = ctypes.py_object
    lib.octet_again_open.restype = any_object
    lib.octet_again_open.argtypes = [ctypes.c_void_p, *[any_object] * 6]
    pointers: list[Any] = [ctypes.POINTER(_abi.Attention), ctypes.POINTER(_abi.Arguments), ctypes.c_size_t]
    lib.octet_again_keep.restype = None
    lib.octet_again_keep.argtypes = [ctypes.c_int64, *[any_object] * 3, *pointers]
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, [any_object, ctypes.c_char_p]
    again = lib.octet_again_open(
        address(exchange, b"dlpack_exchange_api"),
        torch.Tensor,
        _LISTENERS,
        _STATES,
        torch.is_grad_enabled,
        torch.empty_like,
        {"memory_format": torch.preserve_format},
    )
    return (lib, again) if again else None


_loaded = _load()
_again: Again = _loaded[1] if _loaded else lambda token, q, k, v: None
_tokens: dict[Hashable, int] = {}
_numbers = itertools.count()  # two threads never get the same one


def again(key: Hashable, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor | None | Literal[False]:
    """o, where a forward pass over such tensors has been kept under `key`; False: it may be; None: it may not."""
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return None
    try:
        token = _tokens.get(key)
    except TypeError:  # a list among the keywords, say
        return None
    if token is None:
        if len(_tokens) >= _MOST_TOKENS:
            return None
        token = _tokens.setdefault(key, next(_numbers))
    return _again(token, q, k, v)


def keep(
    key: Hashable, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, keywords: AttentionOptions
) -> None:
    """Keeps under `key` that `octet.attention` with these keywords gives tensors like o. lse is left out: who asks for
    it goes the ordinary way."""
    arrays = {"q": q, "k": k, "v": v, "o": o}
    options = front.resolve(options_of(front.own_type(q), **keywords), q)
    plan = Plan("forward", options, [(name, front.view(name, x), None) for name, x in arrays.items()])
    size = plan.at([x.data_ptr() for x in arrays.values()]).workspace_size()
    assert _loaded
    _loaded[0].octet_again_keep(_tokens[key], q, k, v, plan.attention, plan.arguments, size)


def attention(q: Any, k: Any, v: Any, keywords: AttentionOptions) -> torch.Tensor:
    """`octet.attention` without a mask and without lse."""
    key = (*keywords.items(), *map(type, keywords.values())) if keywords else ()
    o = again(key, q, k, v)
    if o is None or o is False:
        made, _ = _api.forward(q, k, v, None, keywords)
        if o is False:
            keep(key, q, k, v, made, keywords)
        return made
    return o


_api.shortcuts[torch.Tensor] = attention
