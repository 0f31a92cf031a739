"""Options as one line of text: "precision=bf16 causal=top_left scale=0.1 window=3,-1".

Operators carry this text and exported graphs are saved with it, so the meaning of a text never changes. It leaves out
fields that have their default, and the bounds on lengths, which may be symbols. A backend may have any name, also one
with spaces, so its name comes last.
"""

import functools
import operator
from typing import Any

from octet._options import Options
from octet.errors import InvalidArgument


def _pair(text: str) -> tuple[int, ...]:
    left, right = text.split(",")
    return int(left), int(right)


# Functions that read the fields that are not words.
_READ: dict[str, Any] = {
    "scale": float,
    "window": _pair,
    "beta": float,
    "softcap": float,
    "dropout_p": float,
    "deterministic": {"yes": True, "no": False}.__getitem__,
    "threads": int,
}
_LAST = "backend"
_WORDS = [name for name in Options._fields if name not in ("max_seqlen_q", "max_seqlen_k", _LAST)]
_DEFAULTS = [(name, Options._field_defaults[name]) for name in (*_WORDS[1:], _LAST)]


def text_of(options: Options) -> str:
    """Returns the text of `options`. torch.compile traces this function: `float` and `index` make constants of the
    symbols that it has for numbers."""
    text = f"precision={options.precision}"
    for name, default in _DEFAULTS:
        value = getattr(options, name)
        if value == default:
            continue
        if name == "window":
            text += f" {name}={operator.index(value[0])},{operator.index(value[1])}"
        elif name == "deterministic":
            text += f" {name}={'yes' if value else 'no'}"
        elif name == "threads":
            text += f" {name}={operator.index(value)}"
        elif name in _READ:
            text += f" {name}={float(value)}"
        else:
            text += f" {name}={value}"
    return text


@functools.lru_cache(4096)
def options_from(text: str) -> Options:
    """Returns the options of a text that `text_of` has written.

    Raises:
        InvalidArgument: `text` is no such text.
    """
    words, _, backend = text.partition(f" {_LAST}=")
    try:
        fields = dict(word.split("=") for word in words.split(" "))
        if not {"precision"} <= fields.keys() <= set(_WORDS):
            raise KeyError
        found: Any = {name: _READ[name](x) if name in _READ else x for name, x in fields.items()}
    except (ValueError, KeyError):
        allowed = " ".join([f"{name}=..." for name in (*_WORDS, _LAST)])
        raise InvalidArgument(f"options: found {text!r}, allowed: {allowed}, all but precision optional") from None
    return Options(**found, backend=backend)
