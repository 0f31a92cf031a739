"""octet.Rounding: attention in float64 that rounds at chosen points, the octet_rounding of octet_study.h."""

import ctypes
import dataclasses
import functools
import json
from typing import Any, Literal, TypeAlias, get_args

from octet import _abi
from octet.errors import InvalidArgument, listing

Format: TypeAlias = Literal["f64", "f32", "f16", "bf16", "e4m3", "e5m2"]
Delta: TypeAlias = Literal["o", "p"]

_FLASH = dict.fromkeys(("qk", "v", "p", "o", "o_saved", "ds", "p_backward"), "bf16") | dict.fromkeys(
    ("s", "m", "arg", "alpha", "acc"), "f32"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounding:
    """Where attention rounds, and to which format: one field for each point of `octet_rounding` (octet_study.h,
    docs/numerics.md), by its name there. "f64" rounds nothing, so `Rounding()` is exact, and `Rounding(p="bf16")`
    shows what the rounding of P alone costs. `octet.attention(..., rounding=...)` takes one.

    Formats are "f64", "f32", "f16", "bf16", "e4m3" and "e5m2". s = scale q k^T, P = exp(s - m), l the row sum.

    Args:
        qk, v: inputs q and k, input v, forward and backward.
        s, s_scaled: logits; True: after they were multiplied by the scale, False: before.
        m: the running maximum, in units of the rounded s.
        arg: (s - m) * scale, of which exp is taken.
        p: the P that meets v.
        l_from_p: True: l adds the rounded P, False: the un-rounded one.
        alpha: the factor that rescales sums where a later tile has a larger maximum.
        acc: the sum P v after each tile.
        o: the output.
        o_saved: the output that delta = rowsum(do * o) reads.
        delta: "o": delta is taken from the saved output; "p": sum_j P_ij dP_ij, consistent with the P of the backward
            pass.
        ds, p_backward: the ds that meets k and q, the P that meets do.
        beta: above 1, at most 8: where keys tie, the maximum of a row moves to beta times itself (arXiv 2510.04212);
            0: it does not.
        tie_epsilon: logits within this of the maximum tie. At least 0.
        tile: keys of a tile; 0: all keys in one.

    Raises:
        InvalidArgument: a point has a value that is not allowed; the message says which are. Ranges of numbers are
            those of the library, which rejects the call.
        TypeError: a name that is no point; the message lists them.
    """

    qk: Format = "f64"
    v: Format = "f64"
    s: Format = "f64"
    s_scaled: bool = False
    m: Format = "f64"
    arg: Format = "f64"
    p: Format = "f64"
    l_from_p: bool = True
    alpha: Format = "f64"
    acc: Format = "f64"
    o: Format = "f64"
    o_saved: Format = "f64"
    delta: Delta = "o"
    ds: Format = "f64"
    p_backward: Format = "f64"
    beta: float = 0.0
    tie_epsilon: float = 0.0
    tile: int = 64
    text = ""  # the points in JSON without spaces, as options carry them

    def __new__(cls, **points: Any) -> "Rounding":
        names = [field.name for field in dataclasses.fields(cls)]
        for name in points.keys() - names:
            raise TypeError(f"{name}: a Rounding has no such point; allowed: {listing(names)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            choices = (False, True) if field.type is bool else get_args(field.type)
            if choices:
                valid, allowed = type(value) in (bool, str) and value in choices, ", ".join(map(repr, choices))
            elif field.type is int:
                valid, allowed = type(value) is int and 0 <= value < 2**32, "keys of a tile, or 0 for all in one"
            else:
                valid, allowed = type(value) in (int, float), "a number"
            if not valid:
                raise InvalidArgument(f"rounding: {name}: found {value!r}, allowed: {allowed}")
        object.__setattr__(self, "text", json.dumps(dataclasses.asdict(self), separators=(",", ":")))

    @classmethod
    def flash(cls, **points: Any) -> "Rounding":
        """The roundings of FlashAttention in bfloat16, from which `octet study` starts too, but for the points named:
        operands, o, P and ds in bfloat16, sums in float32, l from the un-rounded P, tiles of 64 keys."""
        return cls(**{**_FLASH, "s_scaled": True, "l_from_p": False, **points})


def text_of(rounding: object) -> str:
    """The text of a Rounding."""
    if not isinstance(rounding, Rounding):
        raise InvalidArgument(f"rounding: found {rounding!r}, allowed: an octet.Rounding, None")
    return rounding.text


@functools.cache  # never dropped, as the plans that are kept point to it
def struct_of(text: str) -> _abi.Rounding:
    """The octet_rounding of a text."""
    numbers: dict[Any, int] = {**_abi.DTYPES, **_abi.DELTAS}
    points = dataclasses.asdict(Rounding(**json.loads(text)))
    fields = {name: numbers.get(value, value) for name, value in points.items()}
    return _abi.Rounding(ctypes.sizeof(_abi.Rounding), **fields)
