"""Arrays as the library sees them: shapes and strides."""

from collections.abc import Sequence
from typing import NamedTuple


class View(NamedTuple):
    """An array as the library sees it, but for its address. Strides count elements."""

    dtype: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: int = 0
    device_index: int = 0


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """In elements, row-major."""
    return dense_strides(shape, range(len(shape)))


def dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """In elements, of an array whose axes lie in memory in `order`, the outermost first."""
    strides, step = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis] = step
        step *= max(shape[axis], 1)
    return tuple(strides)


def memory_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The axes of an array in the order in which they lie in memory, the outermost first.

    The rule is that of torch.empty_like: the larger stride is outside, among equal strides the larger axis, and an axis
    of stride 0 keeps its place.
    """
    steps = [abs(stride) for stride in strides]
    moving = [axis for axis, step in enumerate(steps) if step != 0]
    places = iter(sorted(moving, key=lambda axis: (steps[axis], shape[axis]), reverse=True))
    return tuple([next(places) if step != 0 else axis for axis, step in enumerate(steps)])
