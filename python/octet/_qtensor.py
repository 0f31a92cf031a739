"""A quantized array: codes and what they stand for."""

import dataclasses
from typing import Any, NamedTuple


class Coding(NamedTuple):
    """How the codes of an operand stand for numbers: octet_quantization without its arrays."""

    operand: int
    granularity: int
    zero_point_kind: int = 0
    block: int = 0
    hadamard_seed: int = 0


@dataclasses.dataclass(frozen=True)
class QTensor:
    """Codes with their scales, made by `octet.quantize`; an operand of attention wherever q, k or v is.

    x = scale * codes (symmetric), rotated back if `coding.hadamard_seed`, plus `mean`. All arrays are of one framework.
    Of jax arrays it is a pytree.
    """

    codes: Any  # of x's shape
    scale: Any  # f32 [batch, head, groups, 1], per channel [batch, head, 1, dim], whatever the layout
    zero_point: Any | None  # as scale; None: symmetric
    mean: Any | None  # f32 [batch, head, 1, dim]; None: not smoothed
    format: str  # of the codes: "i8", "u8", "i4" (a code per byte), "e4m3" or "e5m2"
    coding: Coding  # the numbers of octet_quantization
    layout: str  # of codes: "bhsd" or "bshd"
    dtype: Any  # of what was quantized, and of outputs computed from it
    statistics: Any | None = None  # f32 [batch, head, 1, 4] (docs/quantizers.md); None: not asked for

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the codes."""
        return tuple(self.codes.shape)
