"""octet.explain and octet.supports: what a call would do, without doing it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from octet import _abi, _api, _passes
from octet._options import AttentionOptions, options_of
from octet._plan import Plan, dense_strides
from octet._qtensor import QTensor
from octet.errors import Error, look_up

if TYPE_CHECKING:
    from typing import Unpack


@dataclasses.dataclass(frozen=True)
class Support:
    """The answer of `octet.supports`; true or false by itself."""

    supported: bool
    reason: str  # the message of the refusal, "" if supported

    def __bool__(self) -> bool:
        return self.supported


def _plan(kind: str, q: Any, k: Any, v: Any, mask: Any, sinks: Any, keywords: Any) -> Plan:
    """Returns the plan of the call that a pass over these arrays would make."""
    look_up("kind", kind, _abi.PASSES)
    module = _api.front_of(q=q, k=k, v=v, mask=mask, sinks=sinks)
    front, options = module.front, options_of(_api.own_type(module, q), **keywords)
    more = (mask, None, None, None if sinks is None else module.sinks_of("sinks", sinks, options))
    arrays: tuple[Any, ...]
    if kind == "jvp":
        arrays = (q, k, v, q, k, v, *more, None)
    elif kind == "forward":
        arrays = (q, k, v, *more)
    else:
        residual = _passes.needs_residual(front, options, q)
        like = q.codes if isinstance(q, QTensor) else q
        made = _passes.results(front, "forward", options, q, k, v, residual)
        saved = [front.empty(x.shape, dense_strides(x.shape, x.order), x.dtype, like) for x in made]
        o, lse, o_residual = saved if residual else (*saved, None)
        arrays = (o, q, k, v, o, lse, o_residual, *more, None)
    return _passes.Call(front, kind, options, arrays).plan.anywhere()


def explain(
    q: Any,
    k: Any,
    v: Any,
    *,
    kind: Literal["forward", "backward", "jvp"] = "forward",
    mask: Any | None = None,
    sinks: Any | None = None,
    **options: Unpack[AttentionOptions],
) -> str:
    """Which backend and kernel would run, and why each better one would not, a line each.

    Args:
        q, k, v, mask, sinks, options: as in `octet.attention`.
        kind: the pass.

    Raises:
        InvalidArgument: the arguments contradict each other or themselves.
    """
    return _plan(kind, q, k, v, mask, sinks, options).explain()


def supports(
    q: Any,
    k: Any,
    v: Any,
    *,
    kind: Literal["forward", "backward", "jvp"] = "forward",
    mask: Any | None = None,
    sinks: Any | None = None,
    **options: Unpack[AttentionOptions],
) -> Support:
    """Whether `octet.attention` would compute this, or the reason why not. Nothing is computed.

    Args:
        q, k, v, mask, sinks, options: as in `octet.attention`.
        kind: the pass.
    """
    try:
        _plan(kind, q, k, v, mask, sinks, options).workspace_size()
    except Error as refusal:
        return Support(False, str(refusal))
    return Support(True, "")
