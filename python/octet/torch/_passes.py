"""The passes over tensors, without torch's dispatcher, operators or derivatives.

A pass runs from C where it can: functions of liboctet_dlpack.so run it again without Python between, once a pass over
tensors of the same shapes, strides and types has been kept under the same token. All others, and those that come for
the first time, run by the plans of _plan.py.

The eager fast path (_fast_path.py) and the operators (_ops.py) keep their passes here too.
"""

import ctypes
import itertools
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
_TO_GRADIENTS = INPUTS["backward"][:7]  # what every backward pass has
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
            _LISTENING,
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
fast_forward, fast_training, fast_gradients, fast_backward = loaded[1:] if loaded else [lambda *x: None] * 4

tokens: dict[Hashable, int] = {}  # under which passes are kept
_numbers = itertools.count()  # two threads never get the same one


def token_of(key: Hashable) -> int | None:
    """Returns the token of a key, which says how passes are done, or None where there are too many others."""
    token = tokens.get(key)
    if token is None and len(tokens) < MOST_TOKENS:
        token = tokens.setdefault(key, next(_numbers))
    return token


def keep(kind: str, token: int, inputs: tuple[torch.Tensor, ...], made: tuple[torch.Tensor, ...], plan: Plan) -> None:
    """Keeps a copy of a plan that has run, over tensors like `inputs`, which makes tensors like `made`. Where it makes
    no o_residual, an empty tensor stands for that and is handed out each time."""
    how = None
    if kind == "training":
        _, lse, r = made
        how = (tuple(lse.shape),), {"dtype": lse.dtype, "device": lse.device}, {"dtype": r.dtype}
    assert loaded
    loaded[0].octet_fast_keep(_KINDS[kind], token, inputs, made, how, plan.attention, plan.arguments, plan.size())


def with_rest(made: Sequence[Any], kind: str) -> tuple:
    """An empty tensor stands for a result that was not asked for."""
    return tuple(made) if len(made) == len(RESULTS[kind]) else (*made, made[0].new_empty(0))


def _are_alike(call: _plan.Call, made: tuple, of: tuple) -> bool:
    """Returns whether torch.empty_like makes such tensors as the call: it makes them when a pass runs from C."""

    def kind(x: Any) -> tuple:
        return x.shape, x.stride(), x.dtype

    return not call.fills and all([kind(x) == kind(torch.empty_like(y)) for x, y in zip(made, of, strict=True)])


def _token_of(operands: Operands, least: int, options: Options, key: Hashable) -> int | None:
    """Returns the token of a pass, which may run from C if it has the least number of operands."""
    if len(operands) != least or options.max_seqlen_q or options.max_seqlen_k:
        return None
    return token_of(key)


def forward(operands: Operands, residual: bool, options: Options, key: Hashable = None) -> tuple:
    """(o, lse, o_residual), without `residual` an empty tensor for that. Passes are kept under `key`; None: options."""
    q, k, v = operands["q"], operands["k"], operands["v"]
    token = _token_of(operands, 3, options, key or (options, residual))
    made = None if token is None else fast_training(token, q, k, v)
    if made:
        o, lse, r = made
        return o, lse, r if residual else q.new_empty(0)
    call, is_known = _plan.find(adapter, "forward", options, operands, residual)
    o, lse, r = with_rest(call(operands), "forward")
    if token is not None and made is False and is_known and _are_alike(call, (o,), (q,)):
        made = o, lse, r if residual else q.new_empty(0)
        keep("training", token, (q, k, v), made, call.plan)
    return o, lse, r


def backward(operands: Operands, options: Options, key: Hashable = None) -> tuple:
    """(dq, dk, dv, dsinks), without sinks an empty tensor for dsinks. Where there is no o_residual, an empty tensor
    stands for it. `key`: as in `forward`."""
    token, made, given = _token_of(operands, len(_TO_GRADIENTS), options, key or (options, False)), None, ()
    if token is not None:
        given = tuple([operands[name] for name in _TO_GRADIENTS])
        made = fast_gradients(token, *given)
    if made:
        dq, dk, dv, _ = made
        return dq, dk, dv, dq.new_empty(0)
    if operands["o_residual"].shape != operands["o"].shape:
        operands = dict(operands)
        del operands["o_residual"]
    call, is_known = _plan.find(adapter, "backward", options, operands)
    found = with_rest(call(operands), "backward")
    if token is not None and made is False and is_known and _are_alike(call, found[:3], given[1:4]):
        keep("backward", token, given, found[:3], call.plan)
    return found


def jvp(operands: Operands, extra: bool, options: Options) -> tuple:
    """(o, lse, to, tlse), without `extra` an empty tensor for tlse."""
    return with_rest(_plan.run(adapter, "jvp", options, operands, extra), "jvp")


def nobody_listens(*tensors: Any) -> bool:
    """Returns whether nobody would notice that no operator runs: `nobody_intervenes`, and no profiler records."""
    return _is_nobody(_LISTENING, tensors)


def nobody_intervenes(*tensors: Any) -> bool:
    """Returns whether an operator would do just what its kernel does: there is no mode, no tracing, no torch.func, no
    torch.compile, no subclass, no device without a kernel, and no view that the dispatcher resolves."""
    return _is_nobody(_INTERVENING, tensors)


def _is_nobody(there: Sequence[Callable[[], Any]], tensors: Sequence[Any]) -> bool:
    if torch.compiler.is_compiling():
        return False
    for is_there in there:
        if is_there():
            return False
    for x in tensors:
        if not (type(x) in _PLAIN and (x.is_cuda or x.is_cpu) and not x.is_neg()):
            return False
    return True


_PLAIN = torch.Tensor, torch.nn.Parameter
