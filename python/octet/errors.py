"""The exceptions of octet. The text is the library's own: the value found and the values allowed."""

from collections.abc import Iterable


class Error(Exception):
    """Anything that octet refuses or fails at."""


class InvalidArgument(Error, ValueError):
    """The arguments contradict each other or themselves."""


class Unsupported(Error, NotImplementedError):
    """The arguments make sense, but no backend on this machine computes them."""


class Failure(Error, RuntimeError):
    """The system failed: no memory, no thread, a CUDA error."""


def look_up(what: str, found: object, allowed: dict[str, int]) -> int:
    """allowed[found], or InvalidArgument that names the choices."""
    if isinstance(found, str) and found in allowed:
        return allowed[found]
    raise InvalidArgument(f"{what}: found {found!r}, allowed: {listing(allowed)}")


def listing(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
