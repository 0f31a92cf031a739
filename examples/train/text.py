"""Bytes to train on: Python sources that lie on this machine. Nothing is downloaded."""

import hashlib
import os
import pathlib
import sysconfig
from collections.abc import Iterator

import torch

HELD_OUT = 50  # one file of so many is kept from training


class Text:
    """The sources of some folders, cut into training and held-out files.

    Files come in an order that their paths decide, and so do those that are held out: neither the seed nor the options
    of a run change them. Files that occur twice count once. `digest` names the bytes: runs are comparable where theirs
    are equal.

    Args:
        folders: where to look for *.py; none: the standard library of the Python that runs this.
        megabytes: of training text, the most to take.
    """

    def __init__(self, folders: list[str], megabytes: float):
        roots = [pathlib.Path(x) for x in folders or [sysconfig.get_paths()["stdlib"]]]
        for root in roots:
            if not root.is_dir():
                raise SystemExit(f"--text: found {root}, allowed: folders")
        parts: dict[bool, list[bytes]] = {False: [], True: []}
        seen, room = set(), int(megabytes * 1e6)
        for order, path in sorted(_files(roots)):
            content = path.read_bytes()
            found = hashlib.sha256(content).digest()
            if found in seen or not content:
                continue
            seen.add(found)
            parts[order[0] % HELD_OUT == 0].append(content)
            room -= 0 if order[0] % HELD_OUT == 0 else len(content)
            if room <= 0:
                break
        train, held_out = (b"".join(parts[x]) for x in (False, True))
        if not train or not held_out:
            raise SystemExit(f"--text: found {len(seen)} files under {[*map(str, roots)]}, too few to hold some out")
        self.digest = hashlib.sha256(train + held_out).hexdigest()[:16]
        self.train, self.held_out = (torch.frombuffer(bytearray(x), dtype=torch.uint8) for x in (train, held_out))

    def batch(self, seed: int, step: int, count: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`count` sequences of training text and the bytes after each of theirs. They depend on these numbers alone, so
        that runs of one seed see the same text whatever their precision, and whether or not they were interrupted."""
        _expect(self.train, length, "training")
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(self.train) - length, (count, 1), generator=generator)
        return _cut(self.train, starts, length)

    def held_out_batch(self, count: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`count` sequences of held-out text, evenly spread, the same for all runs."""
        _expect(self.held_out, length, "held-out")
        starts = torch.linspace(0, len(self.held_out) - length - 1, count).long()[:, None]
        return _cut(self.held_out, starts, length)


def _expect(text: torch.Tensor, length: int, what: str) -> None:
    if len(text) <= length:
        raise SystemExit(f"--length: found {length}, allowed: less than the {len(text)} bytes of {what} text")


def _files(roots: list[pathlib.Path]) -> Iterator[tuple[bytes, pathlib.Path]]:
    for root in roots:
        for folder, inside, names in os.walk(root):
            inside[:] = [name for name in inside if name != "site-packages"]  # those of a standard library's folder
            for path in (pathlib.Path(folder, name) for name in names if name.endswith(".py")):
                yield hashlib.sha256(path.relative_to(root).as_posix().encode()).digest(), path


def _cut(text: torch.Tensor, starts: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    at = starts + torch.arange(length + 1)
    found = text[at].long()
    return found[:, :-1], found[:, 1:]
