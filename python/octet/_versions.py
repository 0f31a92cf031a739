"""The versions of other packages that octet works with. pyproject.toml, docs/drop-ins.md and requirements-oldest.txt
repeat them, and a test compares."""

import re
from typing import NamedTuple

from octet.errors import Unsupported


class Range(NamedTuple):
    """Series of releases, each (major, minor)."""

    oldest: tuple[int, int]
    newest: tuple[int, int]  # the newest one that octet is tested with
    closed: bool  # whether later ones are rejected

    def __str__(self) -> str:
        oldest, newest = (".".join(map(str, x)) for x in (self.oldest, self.newest))
        return f"{oldest} to {newest}" if self.closed else f"{oldest} or later (tested: up to {newest})"


# Inside transformers and diffusers octet relies on what is theirs alone and changes with any release; what it takes of
# torch and jax is public.
SUPPORTED = {
    "torch": Range((2, 11), (2, 13), closed=False),
    "jax": Range((0, 10), (0, 12), closed=False),
    "transformers": Range((5, 17), (5, 24), closed=True),
    "diffusers": Range((0, 40), (0, 42), closed=True),
}


def expect_version(package: str, found: str) -> None:
    """Rejects a version of a package that octet does not work with.

    Raises:
        Unsupported: the package is older than allowed, or newer where `SUPPORTED` is closed.
    """
    allowed = SUPPORTED[package]
    numbers = re.match(r"(\d+)\.(\d+)", found)
    series = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if series < allowed.oldest or (allowed.closed and series > allowed.newest):
        raise Unsupported(f"{package}: found version {found}, allowed: {allowed}")
