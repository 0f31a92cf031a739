"""octet.explain, octet.tiles and octet.supports: what a call would do, without doing it."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any, Literal

from octet import _abi, _api
from octet._descriptors import Plan
from octet._operands import AttentionKeywords, split
from octet._options import look_up, with_tile_of
from octet._plan import planned
from octet._results import by_head
from octet.errors import Error

if TYPE_CHECKING:
    from typing import Unpack


@dataclasses.dataclass(frozen=True)
class Support:
    """The answer of `octet.supports`; true or false by itself."""

    supported: bool
    reason: str  # the message of the rejection, "" if supported

    def __bool__(self) -> bool:
        return self.supported


def _plan(kind: str, q: Any, k: Any, v: Any, keywords: AttentionKeywords) -> Plan:
    """Returns the plan of the call that a pass over these arrays would make."""
    look_up("kind", kind, _abi.PASSES)
    more, options = split(with_tile_of(kind, keywords))
    operands = {"q": q, "k": k, "v": v, **more}
    framework, made = _api.call_of(operands, options)
    return planned(framework.adapter, kind, made, by_head(framework.adapter, made, operands))


def explain(
    q: Any,
    k: Any,
    v: Any,
    *,
    kind: Literal["forward", "backward", "jvp"] = "forward",
    **keywords: Unpack[AttentionKeywords],
) -> str:
    """Which backend and kernel would run, and why each better one would not, a line each.

    Args:
        q, k, v, keywords: as in `octet.attention`.
        kind: the pass.

    Raises:
        InvalidArgument: the arguments contradict each other or themselves.
    """
    return _plan(kind, q, k, v, keywords).explain()


def tiles(
    q: Any,
    k: Any,
    v: Any,
    *,
    kind: Literal["forward", "backward", "jvp"] = "forward",
    **keywords: Unpack[AttentionKeywords],
) -> dict[str, Any]:
    """The kernels that can run a call, by the names of their tiles (docs/tuning.md).

    Args:
        q, k, v, keywords: as in `octet.attention`.
        kind: the pass.

    Returns:
        {"cell", "call", "card", "default": {"backend", "tile"}, "default_is", "tiles": [{"backend", "tile"}, ...]}:
        `default` is what runs where nothing was tuned, and the first of each backend its own default. default_is:
        "measured" where it was compared with all others on this card, else "predicted". cell: an opaque name of all
        calls that share what `octet tune` finds, which `call` describes. card: the GPU, or None. On a CPU there are no
        tiles to choose from.
    """
    return json.loads(_plan(kind, q, k, v, keywords).tiles())


def supports(
    q: Any,
    k: Any,
    v: Any,
    *,
    kind: Literal["forward", "backward", "jvp"] = "forward",
    **keywords: Unpack[AttentionKeywords],
) -> Support:
    """Whether `octet.attention` would compute this, or the reason why not. Nothing is computed.

    Args:
        q, k, v, keywords: as in `octet.attention`.
        kind: the pass.
    """
    try:
        _plan(kind, q, k, v, keywords).workspace_size()
    except Error as rejection:
        return Support(False, str(rejection))
    return Support(True, "")
