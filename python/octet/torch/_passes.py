"""The passes over tensors, without torch's dispatcher, operators or derivatives.

A pass runs from C where it can: functions of liboctet_dlpack.so run it again without Python between, once a pass over
tensors of the same shapes, strides and types has been kept under the same token. All others, and those that come for
the first time, run by the plans of _plan.py.

The eager fast path (_fast_path.py) and the operators (_ops.py) keep their passes here too.
"""

import ctypes
import itertools
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from octet import _abi, _library, _plan
from octet._descriptors import Plan
from octet._operands import INPUTS, RESULTS, Operands
from octet._options import Options
from octet.torch._adapter import adapter, autocast_type

_PATH = _library.beside("liboctet_dlpack.so")
MOST_TOKENS = 1024  # different options that are remembered

# True: an operator would do something else than its kernel: a mode, tracing or torch.func is there.
_INTERVENING = (
    torch._C._are_functorch_transforms_active,
    torch._C._len_torch_dispatch_stack,
    torch._C._len_torch_function_stack,
    torch._C._get_tracing_state,
)
# True: somebody would miss the operator.
_LISTENING = (*_INTERVENING, torch.autograd._profiler_enabled)
# What TorchAdapter.state is made of.
_STATES = torch._C._get_deterministic_algorithms, torch.get_num_threads
_PLAIN = torch.Tensor, torch.nn.Parameter
_is_batched = torch._C._functorch.is_legacy_batchedtensor  # is_grads_batched maps so
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # also after torch.func.vjp, which is active no more
_KINDS = {"forward": 0, "training": 1, "backward": 2}  # as in octet_dlpack.cc, and so are these
MORE = {"mask": 0, "sinks": 1, "alibi_slopes": 2, "dropout_seed": 3}


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
    lib.octet_fast_keep.argtypes = [ctypes.c_int64, *[any_object] * 5, *pointers]
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, [any_object, ctypes.c_char_p]
    functions = lib.octet_fast_functions(
        address(exchange, b"dlpack_exchange_api"),
        (
            torch.Tensor,
            torch.nn.Parameter,
            _LISTENING,
            _casts,
            torch._C._is_any_autocast_enabled,
            _STATES,
            torch.is_grad_enabled,
            _is_batched,
            torch.empty_like,
            torch.empty,
        ),
    )
    return (lib, *functions) if functions else None


loaded = _load()
# octet_dlpack.cc says what they take and give.
fast_forward, fast_training, fast_gradients, fast_backward = loaded[1:] if loaded else [lambda *x: None] * 4

tokens: dict[Hashable, int] = {}  # under which passes are kept
_numbers = itertools.count()  # two threads never get the same one


def token_of(key: Hashable) -> int | None:
    """Returns the token of a key, which says how passes are done, or None where there are too many others."""
    token = tokens.get(key)
    if token is None and len(tokens) < MOST_TOKENS:
        token = tokens.setdefault(key, next(_numbers))
    return token


def keep(
    kind: str,
    token: int,
    inputs: tuple[torch.Tensor, ...],
    made: tuple[torch.Tensor, ...],
    plan: Plan,
    more: Sequence[str] = (),
) -> None:
    """Keeps a copy of a plan that has run, over tensors like `inputs`, of which the last are `more`; it makes tensors
    like `made`. Where it makes no o_residual, an empty tensor stands for that and is handed out each time."""
    how = None
    if kind == "training":
        _, lse, r = made
        how = (tuple(lse.shape),), {"dtype": lse.dtype, "device": lse.device}, {"dtype": r.dtype}
    assert loaded
    others = tuple([MORE[name] for name in more])
    described = plan.attention, plan.arguments, plan.size()
    loaded[0].octet_fast_keep(_KINDS[kind], token, inputs, made, how, others, *described)


def with_rest(names: Sequence[str], made: Sequence[Any], kind: str) -> tuple:
    """RESULTS[kind] of those that were made, by their names; an empty tensor stands for one that was not asked for."""
    found = dict(zip(names, made, strict=True))
    return tuple([found[name] if name in found else made[0].new_empty(0) for name in RESULTS[kind]])


def _are_alike(call: _plan.Call, made: Sequence[Any], of: Sequence[Any]) -> bool:
    """Returns whether torch.empty_like makes such tensors as the call: it makes them when a pass runs from C."""

    def kind(x: Any) -> tuple:
        return x.shape, x.stride(), x.dtype

    return not call.fills and all([kind(x) == kind(torch.empty_like(y)) for x, y in zip(made, of, strict=True)])


# The passes that run from C where they have no further operands: how many they have then, which, and the function.
_FROM_C: dict[str, tuple[int, Any, Any]] = {
    "forward": (3, operator.itemgetter(*INPUTS["forward"][:3]), fast_training),
    "backward": (7, operator.itemgetter(*INPUTS["backward"][:7]), fast_gradients),
    "jvp": (0, None, None),
}


def run(kind: str, operands: Operands, options: Options, extra: bool = False, key: Hashable = None) -> tuple:
    """RESULTS[kind]; an empty tensor stands for dsinks without sinks and, without `extra`, for o_residual, dmask and
    tlse, and among the operands for an o_residual that there is not. A pass that may run from C is kept under `key`;
    None: under its options."""
    token = made = None
    count, inputs, run_again = _FROM_C[kind]
    if len(operands) == count:
        given, token = inputs(operands), token_of(key or (options, extra))
        if token is not None and (made := run_again(token, *given)):
            return made if extra else with_rest(RESULTS[kind][: len(made) - 1], made[:-1], kind)
    if kind == "backward" and operands["o_residual"].shape != operands["o"].shape:
        operands = {name: x for name, x in operands.items() if name != "o_residual"}
    call, is_known = _plan.find(adapter, kind, options, operands, extra)
    found = with_rest(call.results, call(operands), kind)
    if token is not None and made is False and is_known:
        if kind == "forward" and _are_alike(call, found[:1], given[:1]):
            keep("training", token, given, found if extra else (*found[:-1], found[0].new_empty(0)), call.plan)
        if kind == "backward" and _are_alike(call, found[:3], given[1:4]):
            keep("backward", token, given, found[:3], call.plan)
    return found


def nobody_listens(*tensors: Any) -> bool:
    """Returns whether nobody would notice that no operator runs: `nobody_intervenes`, and no profiler records."""
    return _is_nobody(_LISTENING, tensors)


def nobody_intervenes(*tensors: Any) -> bool:
    """Returns whether an operator would do just what its kernel does: there is no mode, no tracing, no torch.func, no
    torch.compile, no tensor that one of them or is_grads_batched wraps, no subclass, no device without a kernel, and no
    view that the dispatcher resolves."""
    return _is_nobody(_INTERVENING, tensors)


def _is_nobody(there: Sequence[Callable[[], Any]], tensors: Sequence[Any]) -> bool:
    if torch.compiler.is_compiling():
        return False
    for is_there in there:
        if is_there():
            return False
    for x in tensors:
        if type(x) not in _PLAIN or x.is_neg() or _is_batched(x) or _is_wrapped(x) or not (x.is_cuda or x.is_cpu):
            return False
    return True
