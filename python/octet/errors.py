"""The exceptions of octet. The text is the library's own: the value found and the values allowed."""

from collections.abc import Iterable
from typing import NoReturn


class Error(Exception):
    """Anything that octet rejects or fails at."""


class InvalidArgument(Error, ValueError):
    """The arguments contradict each other or themselves."""


class Unsupported(Error, NotImplementedError):
    """The arguments make sense, but no backend on this machine computes them."""


class Failure(Error, RuntimeError):
    """The system failed: no memory, no thread, a CUDA error."""


def listing(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)


_FLOATS = ("float64", "float32", "float16", "bfloat16")


def reject_dtype(what: str, found: str, hint: str = "") -> NoReturn:
    """Raises InvalidArgument: the array `what` of a call is of no type that it may have."""
    if what == "mask":
        allowed: tuple[str, ...] = ("bool", *_FLOATS)
    elif what.startswith("cu_seqlens"):
        allowed = ("int32",)
    else:
        allowed = (*_FLOATS, "float8_e4m3fn") if what in ("q", "k", "v", "x") else _FLOATS
    choices = listing(allowed)
    if what != "x":  # of octet.quantize
        choices = choices.replace("'float64'", "'float64' (at precision 'f64')")
    raise InvalidArgument(f"{what}: dtype {found}, allowed: {choices}{hint}")
