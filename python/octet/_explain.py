"""octet.explain and octet.supports: what a call would do, without doing it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from octet import _abi, _api, _passes
from octet._options import AttentionOptions, Options, options_of
from octet._plan import Operand, Plan, plan_of
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


def _ask(kind: str, question: Callable[[Plan], Any], q: Any, k: Any, v: Any, mask: Any, keywords: Any) -> Any:
    """question(plan) of the call that a pass over these arrays would make."""
    answers: list[Any] = []

    def act(kind: str, options: Options, operands: Sequence[Operand], workspace: object, stream: object) -> None:
        answers.append(question(plan_of(kind, options, operands)))

    look_up("kind", kind, _abi.PASSES)
    module = _api.front_of(q=q, k=k, v=v, mask=mask)
    front, options = module.front, options_of(_api.own_type(module, q), **keywords)
    if kind == "jvp":
        _passes.jvp(front, options, q, k, v, q, k, v, mask=mask, act=act)
    elif kind == "forward":
        _passes.forward(front, options, q, k, v, residual=False, mask=mask, act=act)
    else:
        o, lse, o_residual = _passes.outputs(front, options, q, v, _passes.needs_residual(front, options, q))
        _passes.backward(front, options, o, q, k, v, o, lse, o_residual, mask=mask, act=act)
    return answers[0]


def explain(
    q: Any,
    k: Any,
    v: Any,
    *,
    kind: Literal["forward", "backward", "jvp"] = "forward",
    mask: Any | None = None,
    **options: Unpack[AttentionOptions],
) -> str:
    """Which backend and kernel would run, and why each better one would not, a line each.

    Args:
        q, k, v, mask, options: as in `octet.attention`.
        kind: the pass.

    Raises:
        InvalidArgument: the arguments contradict each other or themselves.
    """
    return _ask(kind, Plan.explain, q, k, v, mask, options)


def supports(
    q: Any,
    k: Any,
    v: Any,
    *,
    kind: Literal["forward", "backward", "jvp"] = "forward",
    mask: Any | None = None,
    **options: Unpack[AttentionOptions],
) -> Support:
    """Whether `octet.attention` would compute this, or the reason why not. Nothing is computed.

    Args:
        q, k, v, mask, options: as in `octet.attention`.
        kind: the pass.
    """
    try:
        _ask(kind, Plan.workspace_size, q, k, v, mask, options)
    except Error as refusal:
        return Support(False, str(refusal))
    return Support(True, "")
