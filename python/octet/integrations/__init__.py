"""octet inside other libraries, each by one call of `register()`: torch, transformers, diffusers."""

from typing import get_args

from octet._options import Precision

# The names of octet in the hosts: "octet" takes the precision of the model's own type, the others name one.
NAMES: dict[str, Precision | None] = {"octet": None, **{f"octet_{name}": name for name in get_args(Precision)}}
