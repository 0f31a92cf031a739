"""octet.explain and octet.supports: what a call would do, without doing it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from octet import _abi, _api
from octet._options import AttentionOptions, look_up
from octet._plan import Plan, planned
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


def _plan(kind: str, q: Any, k: Any, v: Any, mask: Any, sinks: Any, alibi_slopes: Any, keywords: Any) -> Plan:
    """Returns the plan of the call that a pass over these arrays would make."""
    look_up("kind", kind, _abi.PASSES)
    framework = _api.framework_of(q=q, k=k, v=v, mask=mask, sinks=sinks, alibi_slopes=alibi_slopes)
    options = _api.options_for(framework, q, k, keywords, mask, sinks, alibi_slopes)
    sinks = framework.by_head("sinks", sinks, options)
    slopes = framework.by_head("alibi_slopes", alibi_slopes, options)
    return planned(framework.adapter, kind, options, q, k, v, mask, sinks, slopes)


def explain(
    q: Any,
    k: Any,
    v: Any,
    *,
    kind: Literal["forward", "backward", "jvp"] = "forward",
    mask: Any | None = None,
    sinks: Any | None = None,
    alibi_slopes: Any | None = None,
    **options: Unpack[AttentionOptions],
) -> str:
    """Which backend and kernel would run, and why each better one would not, a line each.

    Args:
        q, k, v, mask, sinks, alibi_slopes, options: as in `octet.attention`.
        kind: the pass.

    Raises:
        InvalidArgument: the arguments contradict each other or themselves.
    """
    return _plan(kind, q, k, v, mask, sinks, alibi_slopes, options).explain()


def supports(
    q: Any,
    k: Any,
    v: Any,
    *,
    kind: Literal["forward", "backward", "jvp"] = "forward",
    mask: Any | None = None,
    sinks: Any | None = None,
    alibi_slopes: Any | None = None,
    **options: Unpack[AttentionOptions],
) -> Support:
    """Whether `octet.attention` would compute this, or the reason why not. Nothing is computed.

    Args:
        q, k, v, mask, sinks, alibi_slopes, options: as in `octet.attention`.
        kind: the pass.
    """
    try:
        _plan(kind, q, k, v, mask, sinks, alibi_slopes, options).workspace_size()
    except Error as rejection:
        return Support(False, str(rejection))
    return Support(True, "")
