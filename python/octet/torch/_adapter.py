"""torch's tensors as the library sees them, and what of them is rejected."""

import functools
import sys
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch.overrides import has_torch_function

from octet import _abi
from octet._operands import KINDS, Operands, label
from octet._options import Options
from octet._plan import unsupported_reason
from octet._qtensor import QTensor
from octet._results import lse_type
from octet._versions import expect_version
from octet._views import View, memory_order
from octet.errors import InvalidArgument, Unsupported, listing, reject_dtype

expect_version("torch", torch.__version__)

_NAMES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.bool: "bool",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_NUMBERS = {dtype: _abi.DTYPES[name] for dtype, name in _NAMES.items()}


def is_causal_bias(mask: torch.Tensor | None) -> bool:
    """A torch.nn.attention.bias.CausalBias is a tensor whose memory is never written."""
    if mask is None or type(mask) is torch.Tensor:
        return False
    module = sys.modules.get("torch.nn.attention.bias")  # importing it takes a second, which only its users pay
    return module is not None and isinstance(mask, module.CausalBias)


def is_dtensor(x: Any) -> bool:
    """A torch.distributed.tensor.DTensor is a tensor whose memory is elsewhere, in its local part."""
    module = sys.modules.get("torch.distributed.tensor")  # only its users import it
    return module is not None and isinstance(x, module.DTensor)


def autocast_type(x: torch.Tensor) -> torch.dtype:
    """The type that autocast gives to x, as it does to those of scaled_dot_product_attention: its own to every float
    but float64."""
    device = x.device.type
    if device not in _abi.DEVICES or not torch.is_autocast_enabled(device):
        return x.dtype
    cast = x.is_floating_point() and x.dtype is not torch.float64
    return torch.get_autocast_dtype(device) if cast else x.dtype


def expect_plain(name: str, x: torch.Tensor) -> None:
    """Rejects tensors whose numbers are not what they stand for: subclasses with a __torch_function__ of their own."""
    if type(x) is torch.Tensor or not has_torch_function((x,)):
        return
    if is_causal_bias(x):
        raise InvalidArgument(
            f"{name}: a CausalBias, which has no numbers; use causal='top_left' (upper left) or 'bottom_right' (lower "
            "right)"
        )
    function = type(x).__torch_function__
    if function is torch._C._disabled_torch_function_impl:  # a mode made has_torch_function say so
        return
    own = getattr(function, "__func__", None)
    if own is not torch.Tensor.__torch_function__.__func__:  # type: ignore[attr-defined]
        raise InvalidArgument(
            f"{name}: found a {type(x).__module__}.{type(x).__name__}, allowed: torch.Tensor; octet.sdpa calls its "
            "__torch_function__"
        )


class TorchAdapter:
    """See _adapters.Adapter. Strided tensors on the CPU or a CUDA device, on the caller's stream."""

    def dtype_name(self, dtype: torch.dtype, what: str) -> str:
        if dtype not in _NAMES:
            reject_dtype(what, str(dtype).removeprefix("torch."))
        return _NAMES[dtype]

    def own_type(self, q: torch.Tensor) -> str:
        return self.dtype_name(autocast_type(q), "q")

    def dtype_of(self, name: str) -> torch.dtype:
        return _DTYPES[name]

    def is_float(self, x: torch.Tensor) -> bool:
        return x.is_floating_point()

    def cast(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return x.to(dtype)

    def view(self, name: str, x: torch.Tensor) -> View:
        if name == "mask":
            expect_plain(name, x)
        number, where = _NUMBERS.get(x.dtype), x.device
        if number is None:
            number = _abi.DTYPES[self.dtype_name(x.dtype, label(name))]  # rejects
        if is_dtensor(x):
            raise InvalidArgument(f"{name}: found a DTensor, allowed: torch.Tensor; pass its part, {name}.to_local()")
        if x.is_neg():  # a view of torch._neg_view that no operator has resolved
            raise InvalidArgument(f"{label(name)}: a negative view; pass it through torch.resolve_neg")
        if x.layout is not torch.strided:
            raise InvalidArgument(f"{label(name)}: layout {x.layout}, allowed: torch.strided")
        device = _abi.DEVICES.get(where.type)
        if device is None:
            raise InvalidArgument(f"{label(name)}: on device {where}, allowed: {listing(_abi.DEVICES)}")
        return View(number, x.shape, x.stride(), device, where.index or 0)

    def key(self, x: torch.Tensor) -> Hashable:
        return x.shape, x.stride(), x.dtype, x.device, x.is_neg()

    address = staticmethod(torch.Tensor.data_ptr)

    def order(self, x: torch.Tensor) -> tuple[int, ...]:
        return memory_order(x.shape, x.stride())

    def is_true(self, comparison: Any) -> bool:
        if not (torch.compiler.is_compiling() or isinstance(comparison, torch.SymBool)):
            return comparison
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # takes long to import

        return statically_known_true(comparison)  # without a guard, which would bind the program to these sizes

    def empty(
        self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, like: torch.Tensor
    ) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=like.device)

    def integers(self, numbers: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=like.device)

    def workspace(self, size: int, like: torch.Tensor) -> tuple[object, int]:
        memory = torch.empty(size, dtype=torch.uint8, device=like.device)  # torch aligns to 64 bytes or more
        return memory, memory.data_ptr()

    def stream(self, like: torch.Tensor) -> int | None:
        # torch.cuda.current_stream makes an object around it, which takes ten times as long.
        return torch._C._cuda_getCurrentRawStream(like.get_device()) if like.is_cuda else None

    def state(self) -> Hashable:
        return torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()

    def resolve(self, options: Options, like: torch.Tensor) -> Options:
        """Threads and determinism as torch is told, where the caller says nothing."""
        if options.deterministic is None:
            options = options._replace(deterministic=torch.are_deterministic_algorithms_enabled())
        if options.threads == 0 and not like.is_cuda:
            options = options._replace(threads=torch.get_num_threads())
        return options


adapter = TorchAdapter()


def cast_tensors(operands: Operands) -> Operands:
    """The tensors of a call, q, k, v and their like in the type that autocast gives them. What torch would not bring to
    the library is rejected here."""
    q = operands["q"]
    device = (q.codes if type(q) is QTensor else q).device
    for name, x in operands.items():
        if type(x) is QTensor:
            continue
        if x.device != device:
            expect_device(name, x, device)
        if KINDS[name] != "layout":
            expect_plain(name, x)
        elif x.layout is not torch.strided:
            raise InvalidArgument(f"{label(name)}: layout {x.layout}, allowed: torch.strided")
    if not torch.is_autocast_enabled(device.type if device.type in _abi.DEVICES else "cpu"):
        return operands
    is_cast = {name for name, x in operands.items() if KINDS[name] == "layout" and type(x) is not QTensor}
    return {name: x.to(autocast_type(x)) if name in is_cast else x for name, x in operands.items()}


def expect_device(name: str, x: torch.Tensor, device: torch.device, first: str = "q") -> None:
    """A tensor on another device may have torch choose another kernel, on the meta device none at all. `first`: the
    operand that is on `device`."""
    if x.device != device:
        raise InvalidArgument(
            f"{label(name)}: on {x.device}, but {first} is on {device}; all tensors of a call live on one device"
        )


def expect_backward(options: Options, operands: Operands, of_mask: bool = False) -> None:
    """Rejects what has no backward pass before the forward pass whose gradient would be asked for; `of_mask`: with that
    of the mask."""
    q, v = operands["q"], operands["v"]
    how = options.precision, options.bias_correction, options.backend, options.out_dtype
    _expect_backward(how, q.dtype, q.shape[-1], v.shape[-1], q.device, "sinks" in operands, of_mask)


@functools.cache
def _expect_backward(
    how: tuple[str, str, str, str],
    dtype: torch.dtype,
    dim: int,
    dim_v: int,
    device: torch.device,
    has_sinks: bool,
    of_mask: bool,
) -> None:
    precision, bias_correction, backend, out_dtype = how
    q, v = (torch.zeros(1, 1, 8, n, device=device, dtype=dtype) for n in (dim, dim_v))
    options = Options(precision, bias_correction=bias_correction, backend=backend, out_dtype=out_dtype)
    given = {"q": q, "k": q, "v": v}
    if has_sinks:
        given["sinks"] = torch.zeros(1, device=device, dtype=lse_type(adapter, options))
    if unsupported_reason(adapter, "forward", options, given):
        return  # the forward pass will say so
    if reason := unsupported_reason(adapter, "backward", options, given):
        raise Unsupported(f"requires_grad: found True without torch.no_grad(), but {reason}")
    given["mask"] = torch.zeros(8, 8, device=device)
    if of_mask and (reason := unsupported_reason(adapter, "backward", options, given, True)):
        raise Unsupported(
            f"mask: requires a gradient, but {reason}; pass mask.detach() where its gradient may be lost (what is "
            "learned would no longer change), or compute on a CPU"
        )


def to_numpy(x: torch.Tensor) -> Any:
    """The numbers of x; 16- and 8-bit floats become float32."""
    x = x.detach().cpu()
    return (x.float() if x.is_floating_point() and x.dtype is not torch.float64 else x).numpy()
