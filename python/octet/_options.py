"""The options of a call, hashable, in the words of the user; `_plan.attention_of` puts them into octet_attention."""

import importlib
import operator
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias, TypedDict

import numpy as np

from octet import _abi
from octet._abi import Precision as Precision
from octet._rejections import ADVICE, expect_known
from octet._rounding import Rounding, text_of
from octet.errors import InvalidArgument, Unsupported, listing, reject_dtype

Layout: TypeAlias = Literal["bhsd", "bshd"]
Causal: TypeAlias = bool | Literal["top_left", "bottom_right"]
Window: TypeAlias = tuple[int | None, int | None] | int | None
BiasCorrection: TypeAlias = Literal["f16", "none", "beta", "exact_delta", "gproj"]
Switch: TypeAlias = Literal["auto", "on", "off"]
Tile: TypeAlias = str | dict[str, str] | None

# For each layout, the dimensions of the caller's array that are batch, head, token, dim. -1: it has none, 1 is taken.
LAYOUTS = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "thd": (-1, 1, 0, 2)}
_CAUSAL = {False: "no", True: "unaligned", "top_left": "top_left", "bottom_right": "bottom_right"}


class AttentionOptions(TypedDict, total=False):
    """The keywords that every function of attention takes; `octet.attention` describes them."""

    precision: Precision | None
    causal: Causal
    scale: float | None
    window: Window
    alignment: Literal["top_left", "bottom_right"] | None
    layout: Layout
    bias_correction: BiasCorrection
    beta: float
    hadamard: Switch
    smooth_q: Switch
    softcap: float
    dropout_p: float
    deterministic: bool | None
    threads: int
    backend: str | None
    tile: Tile
    out_dtype: Any
    enable_gqa: bool | None
    rounding: Rounding | None


class Options(NamedTuple):
    """The options of a call, apart from its data. Each field that is no word has a place in `octet.torch._text` too."""

    precision: str
    layout: str = "bhsd"  # or "bshd", or "thd" for packed sequences
    causal: str = "no"  # a value of _CAUSAL
    scale: float = 0.0  # 0: 1 / sqrt(dim)
    window: tuple[int, ...] = ()  # keys left and right of the diagonal, -1: all; empty: no window
    alignment: str = "none"  # of a window without a causal mask
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    bias_correction: str = "f16"
    beta: float = 0.0
    hadamard: str = "auto"
    smooth_q: str = "auto"
    softcap: float = 0.0
    deterministic: bool | None = None  # None: as the framework says
    threads: int = 0  # 0: as the framework says, else all
    backend: str = ""  # "": the best that can
    out_dtype: str = ""  # of o; "": that of q
    rounding: str = ""  # the text of a Rounding; "": that of the precision
    dropout_p: float = 0.0
    tile: str = ""  # "64x32": of passes that are not backward; or by pass, "forward:64x32;backward:64x64"


def tile_text(tile: Tile) -> str:
    """A tile as `Options` has it."""
    if tile is None:
        return ""
    named = {"forward": tile} if isinstance(tile, str) else tile
    if not isinstance(named, Mapping) or not all(
        kind in _abi.PASSES and isinstance(name, str) and re.fullmatch("[0-9a-z-]+", name)
        for kind, name in named.items()
    ):
        raise InvalidArgument(
            f"tile: found {tile!r}, allowed: a name of octet.tiles, a dict of such names by pass "
            f"({listing(_abi.PASSES)}), or None"
        )
    if isinstance(tile, str):
        return tile
    return ";".join(f"{kind}:{named[kind]}" for kind in _abi.PASSES if kind in named)


def with_tile_of(kind: str, keywords: Any) -> Any:
    """The keywords of a function that runs one pass, whose tile a bare name is."""
    tile = keywords.get("tile")
    return keywords | {"tile": {kind: tile}} if isinstance(tile, str) else keywords


def tile_of(options: Options, kind: str) -> str:
    """The tile that a pass shall have, or ""."""
    if ":" not in options.tile:
        return options.tile if kind != "backward" else ""
    return dict(word.split(":") for word in options.tile.split(";")).get(kind, "")


def causal_name(causal: Causal) -> str:
    expect_not_traced("causal", causal)
    if isinstance(causal, (bool, str)) and causal in _CAUSAL:
        return _CAUSAL[causal]
    raise InvalidArgument(f"causal: found {causal!r}, allowed: False, True, 'top_left', 'bottom_right'")


def window_pair(window: Window) -> tuple[int, ...]:
    """(left, right) with -1 for all; a number is both sides; empty for no window."""
    if window is None:
        return ()
    for side in window if isinstance(window, (tuple, list)) else (window,):
        expect_not_traced("window", side)
    sides = tuple(map(integer, window if isinstance(window, (tuple, list)) else (window, window)))
    if len(sides) != 2 or not all(side is None or _is_index(side) for side in sides):
        raise InvalidArgument(f"window: found {window!r}, allowed: (left, right), one number for both, or None")
    found = tuple(-1 if side is None else int(side) for side in sides)
    if not all(-1 <= side <= _MOST for side in found):
        raise InvalidArgument(f"window: found {window!r}, allowed: 0 to {_MOST} keys, -1 or None for all")
    return found


def bottom_right(causal: bool, left: int, right: int) -> Any:
    """The keywords of a causal mask and a window as flash-attn means them: -1 is all of a side, and a causal mask ends
    at the diagonal, whatever the right side."""
    window = (left, -1 if causal else right)
    if window == (-1, -1):
        return {"causal": "bottom_right" if causal else False}
    return {"window": window, "causal": "bottom_right"} if causal else {"window": window, "alignment": "bottom_right"}


def look_up(what: str, found: object, allowed: dict[str, int]) -> int:
    """allowed[found], or InvalidArgument that names the choices."""
    if isinstance(found, str) and found in allowed:
        return allowed[found]
    raise InvalidArgument(f"{what}: found {found!r}, allowed: {listing(allowed)}")


def _layers(x: Any) -> Iterator[Any]:
    """x, a tensor of torch, and the tensors that it wraps: each transform of torch.func puts a wrapper around those it
    maps or differentiates, and a wrapper of vmap does not tell whether what it wraps requires a gradient."""
    functorch = sys.modules["torch"]._C._functorch
    yield x
    while functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
        yield x


def _has_tangent(x: Any) -> bool:
    torch = sys.modules["torch"]
    forward_ad = torch.autograd.forward_ad
    if forward_ad._current_level < 0 or torch._C._functorch.is_batchedtensor(x):
        return False
    return forward_ad.unpack_dual(x).tangent is not None


def is_differentiated(x: Any) -> bool:
    """Returns whether a derivative by x, a tensor of torch, is asked for, backward or forward, by whatever transform of
    torch.func the call is in. Inside of torch.compile nobody sees what vmap maps: there it may be."""
    torch = sys.modules["torch"]
    if torch.compiler.is_compiling():
        hidden = torch._C._functorch.is_batchedtensor(x) and x.is_floating_point()
        return _has_tangent(x) or (torch.is_grad_enabled() and (x.requires_grad or hidden))
    by_gradients = torch.is_grad_enabled()
    return any([(by_gradients and layer.requires_grad) or _has_tangent(layer) for layer in _layers(x)])


def expect_constant(name: str, x: Any) -> None:
    """Rejects a tensor of torch that a derivative is asked for, which octet does not compute; x may be None."""
    if x is None or not is_differentiated(x):
        return
    hidden = ""
    if sys.modules["torch"]._C._functorch.is_batchedtensor(x):
        hidden = "; inside of torch.compile vmap hides whether it does, so call it there under torch.no_grad()"
    reject_gradient(name, hidden)


def reject_gradient(name: str, more: str = "") -> NoReturn:
    """Rejects the gradient of a tensor of torch, which octet does not compute."""
    raise Unsupported(
        f"{name}: requires a gradient, which octet does not compute for it; pass {name}.detach() where its gradient "
        f"may be lost (what is learned would no longer change){more}"
    )


def expect_no_tangent(name: str, x: Any) -> None:
    """Rejects a tensor of torch that a derivative forwards is asked for, where octet computes it backwards alone."""
    if any(map(_has_tangent, [x] if sys.modules["torch"].compiler.is_compiling() else _layers(x))):
        raise Unsupported(
            f"{name}: has a tangent, but octet differentiates by it backwards alone; use torch.func.vjp or backward(), "
            f"or pass {name}.detach() where the derivative by it may be lost"
        )


def number(name: str, value: Any, allowed: str = "a number") -> float:
    """A number of Python, or what an array of one element holds; truth values and words are none."""
    if isinstance(value, (float, int)) and not isinstance(value, bool):  # also what torch.compile makes of a number
        return value
    if "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor):
        expect_constant(name, value)
    expect_not_traced(name, value)
    try:
        found = value.item() if hasattr(value, "shape") else value
        if not isinstance(found, (bool, str, bytes)):
            return float(found)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise InvalidArgument(f"{name}: found {value!r}, allowed: {allowed}")


def expect_not_traced(name: str, value: Any) -> None:
    """Rejects a number that jax traces."""
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(value, jax.core.Tracer):
        raise InvalidArgument(
            f"{name}: traced by jax, but octet needs its number when the program is made; make it static: "
            f"jax.jit(..., static_argnames={name!r}), or close over a number of Python"
        )


def truth(name: str, value: Any, none: bool = False) -> Any:
    """A truth value as it is, of Python or numpy; no number or word counts as one. `none`: whether None is allowed."""
    expect_not_traced(name, value)
    if not isinstance(value, (bool, np.bool_)) and not (none and value is None):
        raise InvalidArgument(f"{name}: found {value!r}, allowed: True, False{', None' if none else ''}")
    return value


def _is_index(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (hasattr(value, "__index__") and not hasattr(value, "shape"))


def integer(value: Any) -> Any:
    """The integer of an array of one element of any framework; one on a GPU is waited for. Other values as they are."""
    if isinstance(value, int) or not hasattr(value, "shape"):  # also what torch.compile makes of one
        return value
    try:
        found = value.item()
        return found if isinstance(found, bool) else operator.index(found)
    except (TypeError, ValueError, RuntimeError):  # no integer, or several
        return value


_MOST = 2**63 - 1  # of the integers that the library takes


def count(name: str, value: Any, allowed: str, most: int = _MOST, least: int = 0) -> int:
    """A whole number from `least` to `most`, from whatever stands for one."""
    expect_not_traced(name, value)
    found = integer(value)
    if not _is_index(found) or not least <= found <= most:
        raise InvalidArgument(f"{name}: found {value!r}, allowed: {allowed}")
    return found


# The names of numpy's dtypes, and of the float types of every framework.
_DTYPES = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2", "int8": "i8", "uint8": "u8", "int4": "i4", "int32": "i32", "bool": "bool",
}  # fmt: skip
_OF_O = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn")  # what o may be


def dtype_name(dtype: Any, what: str) -> str:
    """The name in _abi.DTYPES of a numpy dtype; `what` is whose dtype it is."""
    found = np.dtype(dtype)
    if found.name not in _DTYPES or not found.isnative:
        if not found.isnative:
            reject_dtype(what, found.str, " in the byte order of this machine")
        hint = "; bfloat16 arrays have the dtype ml_dtypes.bfloat16" if found.name == "uint16" else ""
        reject_dtype(what, found.name, hint)
    return _DTYPES[found.name]


def dtype_of(name: str) -> np.dtype:
    """The numpy dtype of a name in _abi.DTYPES."""
    (np_name,) = [key for key, value in _DTYPES.items() if value == name]
    try:
        return np.dtype(np_name)
    except TypeError:
        try:
            return np.dtype(getattr(importlib.import_module("ml_dtypes"), np_name))
        except ImportError as error:
            raise InvalidArgument(f"dtype {name} needs ml_dtypes in numpy: pip install ml_dtypes") from error


def type_name(dtype: Any) -> str:
    """The name in _abi.DTYPES of a float type of any framework, or of its name; "" for None."""
    if dtype is None:
        return ""
    try:
        name = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
        name = name if name in _OF_O else np.dtype(dtype).name
    except TypeError:
        pass
    if name not in _OF_O:
        raise InvalidArgument(f"out_dtype: found {dtype!r}, allowed: {listing(_OF_O)}, None for that of q")
    return _DTYPES[name]


def scale_number(scale: float | None) -> float:
    """0 stands for the default in octet.h, so a scale of 0 cannot be passed on."""
    if scale is None:
        return 0.0
    allowed = "positive and finite, 1.17549e-38 to 3.40282e+38, or None for 1/sqrt(dim)"
    found = number("scale", scale, allowed)
    if not 2.0**-126 <= found < 2.0**128 - 2.0**103:  # the normal numbers of float32, to which it is rounded
        raise InvalidArgument(f"scale: found {scale}, allowed: {allowed}")
    return float(found)


def options_of(
    type_of_q: str,
    /,
    *,
    precision: Precision | None = None,
    causal: Causal = False,
    scale: float | None = None,
    window: Window = None,
    alignment: Literal["top_left", "bottom_right"] | None = None,
    layout: Layout = "bhsd",
    bias_correction: BiasCorrection = "f16",
    beta: float = 0.0,
    hadamard: Switch = "auto",
    smooth_q: Switch = "auto",
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    deterministic: bool | None = None,
    threads: int = 0,
    backend: str | None = None,
    tile: Tile = None,
    out_dtype: Any = None,
    enable_gqa: bool | None = None,
    rounding: Rounding | None = None,
    **unknown: object,
) -> Options:
    """Options from the keywords of `octet.attention`; `type_of_q` is a name of _abi.DTYPES. `enable_gqa` is about
    the shapes, see `expect_meant`, and no option of a pass."""
    if unknown:
        expect_known(options_of, unknown, ADVICE)
    points, type_of_o = "" if rounding is None else text_of(rounding), type_name(out_dtype)
    if points:
        precision = precision or "f64"
        if (type_of_o or type_of_q) not in ("f32", "f64"):
            raise InvalidArgument(
                f"rounding: o would be {type_of_o or type_of_q}, allowed: f32, f64, so that nothing is rounded "
                "that the rounding does not name; cast q, k and v, or name an out_dtype"
            )
    if precision is None and type_of_q not in ("f64", "f32", "f16", "bf16"):
        raise InvalidArgument(
            f"precision: None stands for the type of q, but several recipes take {type_of_q}; name one of "
            f"{listing(_abi.PRECISIONS)}"
        )
    if layout not in ("bhsd", "bshd"):
        raise InvalidArgument(f"layout: found {layout!r}, allowed: 'bhsd', 'bshd'")
    if alignment is not None and isinstance(causal, str):
        raise InvalidArgument(f"alignment: {alignment!r} given, but causal={causal!r} names one; give one of them")
    look_up("precision", precision or type_of_q, _abi.PRECISIONS)
    look_up("bias_correction", bias_correction, _abi.BIAS_CORRECTIONS)
    look_up("hadamard", hadamard, _abi.SWITCHES)
    look_up("smooth_q", smooth_q, _abi.SWITCHES)
    if alignment not in (None, "top_left", "bottom_right"):
        raise InvalidArgument(f"alignment: found {alignment!r}, allowed: 'top_left', 'bottom_right', None")
    truth("enable_gqa", enable_gqa, none=True)
    if backend is not None and not (isinstance(backend, str) and backend.isascii() and "\0" not in backend):
        raise InvalidArgument(f"backend: found {backend!r}, allowed: a name of octet.info()['backends'], or None")
    return Options(
        precision=precision or type_of_q,
        layout=layout,
        causal=causal_name(causal),
        scale=scale_number(scale),
        window=window_pair(window),
        alignment=alignment or "none",
        bias_correction=bias_correction,
        beta=number("beta", beta),
        hadamard=hadamard,
        smooth_q=smooth_q,
        softcap=number("softcap", softcap),
        dropout_p=number("dropout_p", dropout_p),
        deterministic=truth("deterministic", deterministic, none=True),
        threads=count("threads", threads, "0 (all) to 4096", most=4096),
        backend=backend or "",
        tile=tile_text(tile),
        out_dtype=type_of_o,
        rounding=points,
    )
