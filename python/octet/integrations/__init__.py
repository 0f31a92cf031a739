"""octet inside other libraries, each by one call of `register()`: torch, transformers, diffusers."""

from typing import get_args

from octet._options import Precision
from octet.errors import InvalidArgument, listing

# The names of octet in the hosts: "octet" takes the precision of the model's own type, the others name one.
NAMES: dict[str, Precision | None] = {"octet": None, **{f"octet_{name}": name for name in get_args(Precision)}}


def expect_name(argument: str, found: str) -> None:
    """Rejects a name that begins as octet's do and is none of them. Hosts that find a name unknown list their own.

    Raises:
        InvalidArgument: with octet's names.
    """
    if found.startswith("octet") and found not in NAMES:
        raise InvalidArgument(f"{argument}: found {found!r}, allowed of octet's: {listing(NAMES)}")
