"""Finds liboctet.so, loads it, and turns its statuses into exceptions.

Looked for, in this order: the file that OCTET_LIBRARY names, liboctet.so beside this file (a wheel), and what the
system's loader knows (an octet installed by CMake).
"""

import ctypes
import os
import pathlib
from collections.abc import Callable

from octet import _abi
from octet.errors import Failure, InvalidArgument, Unsupported

_EXCEPTIONS = {_abi.STATUS_INVALID_ARGUMENT: InvalidArgument, _abi.STATUS_UNSUPPORTED: Unsupported}


def _load() -> tuple[ctypes.CDLL, str]:
    bundled = pathlib.Path(__file__).parent / "liboctet.so"
    named = os.environ.get("OCTET_LIBRARY")
    path = named or (str(bundled) if bundled.exists() else "liboctet.so.0")
    try:
        lib = ctypes.CDLL(path)
    except (OSError, UnicodeDecodeError) as error:
        # ctypes reads the loader's message as UTF-8, which a path in it may not be.
        why = error if isinstance(error, OSError) else "no such library, or one that cannot be loaded"
        raise ImportError(
            f"octet: cannot load {path} ({why}). Install the package (pip install .), or name a built library: "
            "OCTET_LIBRARY=build/release/src/liboctet.so"
        ) from error
    for name, (result, arguments) in _abi.PROTOTYPES.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib, path


lib, path = _load()
version: str = lib.octet_version().decode()


def beside(name: str) -> pathlib.Path | None:
    """The file of that name beside the library, if there is one; None where the system's loader found the library."""
    found = pathlib.Path(path).parent / name
    return found if os.sep in path and found.exists() else None


# The words of the library's messages, each with the words that stand for it in Python.
_WORDS = {
    "name the diagonal of the mask: top-left (query i sees key i) or bottom-right (the last query sees the last key)":
        'use causal="top_left" (query i sees keys up to i) or "bottom_right" (the last query sees all keys), with a '
        'window alone alignment="top_left" or "bottom_right"',
    "top-left": '"top_left"',
    "bottom-right": '"bottom_right"',
    " heads of k and v": " heads of k and v; use q.expand, or octet.sdpa, where single heads broadcast",
    "octet_quantize": "octet.quantize",
    "leave it NULL": "leave it out",
    "pass NULL": "leave it out",
}  # fmt: skip


def _message() -> str:
    text = lib.octet_message().decode()
    for theirs, ours in _WORDS.items():
        text = text.replace(theirs, ours)
    return text


def check(status: int) -> None:
    """Raises what `status` stands for, with the library's message, unless it is OK."""
    if status != _abi.STATUS_OK:
        raise _EXCEPTIONS.get(status, Failure)(_message())


def text_of(write: Callable[[ctypes.Array | None, int, object], int]) -> str:
    """The text of a function that writes at most `capacity` bytes and tells the full length."""
    length = ctypes.c_size_t()
    check(write(None, 0, ctypes.byref(length)))
    text = ctypes.create_string_buffer(length.value + 1)
    check(write(text, len(text), ctypes.byref(length)))
    return text.value.decode()
