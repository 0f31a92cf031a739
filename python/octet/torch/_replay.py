"""Functions of liboctet_dlpack.so that run passes again without Python between. A pass over tensors of some shapes,
strides and types is kept under a number, and is found by that number and such tensors.

Eager calls (_again.py) and the operators (_ops.py) keep their passes here.
"""

import ctypes
import itertools
from typing import Any

import torch

from octet import _abi, _library
from octet._plan import Plan
from octet.torch._front import autocast_type

_PATH = _library.beside("liboctet_dlpack.so")
MOST_TOKENS = 512  # different options that are remembered

# True: somebody would miss the operator.
_LISTENERS = (
    torch._C._are_functorch_transforms_active,
    torch._C._len_torch_dispatch_stack,
    torch._C._len_torch_function_stack,
    torch._C._get_tracing_state,
    torch.autograd._profiler_enabled,
)
# What TorchFront.state is made of.
_STATES = torch._C._get_deterministic_algorithms, torch.get_num_threads
_KINDS = {"forward": 0, "training": 1, "backward": 2}  # as in octet_dlpack.cc


def _casts(*tensors: torch.Tensor) -> bool:
    """Returns whether autocast would hand tensors of another type to the operator."""
    return any([autocast_type(x) is not x.dtype for x in tensors])


def _load() -> tuple[Any, ...] | None:
    """Returns the library and its functions, or None where it or torch's exchange API is missing."""
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if exchange is None or _PATH is None:
        return None
    lib = ctypes.PyDLL(str(_PATH))  # holds the GIL, as objects of Python are handed over
    if not hasattr(lib, "octet_fast_functions"):  # an older one
        return None
    any_object: Any = ctypes.py_object
    lib.octet_fast_functions.restype = any_object
    lib.octet_fast_functions.argtypes = [ctypes.c_void_p, any_object]
    pointers: list[Any] = [ctypes.POINTER(_abi.Attention), ctypes.POINTER(_abi.Arguments), ctypes.c_size_t]
    lib.octet_fast_keep.restype = None
    lib.octet_fast_keep.argtypes = [ctypes.c_int64, ctypes.c_int64, *[any_object] * 3, *pointers]
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, [any_object, ctypes.c_char_p]
    functions = lib.octet_fast_functions(
        address(exchange, b"dlpack_exchange_api"),
        (
            torch.Tensor,
            _LISTENERS,
            _casts,
            torch._C._is_any_autocast_enabled,
            _STATES,
            torch.is_grad_enabled,
            torch._C._functorch.is_legacy_batchedtensor,  # is_grads_batched maps so
            torch.empty_like,
            torch.empty,
        ),
    )
    return (lib, *functions) if functions else None


loaded = _load()
# octet_dlpack.cc says what they take and give.
again, training, gradients, backward = loaded[1:] if loaded else [lambda *x: None] * 4
numbers = itertools.count()  # to keep passes under; two threads never get the same one


def keep(
    kind: str, number: int, inputs: tuple[torch.Tensor, ...], made: tuple[torch.Tensor, ...], plan: Plan, size: int
) -> None:
    """Keeps the pass of `plan`, over tensors like `inputs`, which makes tensors like `made` and takes a workspace of
    `size` bytes. Where it makes no o_residual, an empty tensor stands for that and is handed out each time."""
    lse = ((tuple(made[1].shape),), {"dtype": made[1].dtype, "device": made[1].device}) if kind == "training" else None
    assert loaded
    loaded[0].octet_fast_keep(_KINDS[kind], number, inputs, made, lse, plan.attention, plan.arguments, size)
