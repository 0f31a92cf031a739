"""octet.check, the error of a precision on given data, and octet.info, the machine and the build."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import platform
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from octet import _api, _library, _numpy
from octet._operands import CACHE, KINDS, RESULTS, AttentionKeywords, Operands, operands_of, split
from octet._options import options_of
from octet._qtensor import QTensor
from octet._quantize import dequantize
from octet.errors import Unsupported

if TYPE_CHECKING:
    from typing import Unpack

_EXACT = {
    "causal",
    "scale",
    "window",
    "alignment",
    "layout",
    "softcap",
    "dropout_p",
}  # options that the exact result has too

_INTEGERS = ("seed", "lengths", "table")  # kinds of operands that are not numbers of the call


@dataclasses.dataclass(frozen=True)
class Errors:
    """Distances of a result from float64, over all elements."""

    cos: float  # cosine similarity; says little alone
    rel_l1: float  # sum |error| / sum |exact|
    rel_l2: float  # ||error|| / ||exact||
    max_abs: float
    nan: int  # elements that are NaN


def _distance(got: np.ndarray, want: np.ndarray) -> Errors:
    got, want = np.ravel(got), np.ravel(want)
    with np.errstate(invalid="ignore"):
        error = np.where(got == want, 0.0, got - want)  # equal infinities do not count
    finite = np.where(np.isfinite(want), want, 0.0)

    def ratio(a: float, b: float) -> float:
        return 0.0 if a == 0 else float(np.divide(a, b))

    with np.errstate(divide="ignore", invalid="ignore"):
        aligned = float(got @ want / np.sqrt((got @ got) * (want @ want))) if error.any() else 1.0
        return Errors(
            cos=aligned,
            rel_l1=ratio(float(np.abs(error).sum()), float(np.abs(finite).sum())),
            rel_l2=ratio(float(np.linalg.norm(error)), float(np.linalg.norm(finite))),
            max_abs=float(np.abs(error).max(initial=0.0)),
            nan=int(np.isnan(got).sum()),
        )


def check(
    q: Any,
    k: Any,
    v: Any,
    *,
    do: Any | None = None,
    tangents: tuple[Any, Any, Any] | None = None,
    **keywords: Unpack[AttentionKeywords],
) -> dict[str, Errors]:
    """How far each result lies from attention in float64 on the same data.

    Args:
        q, k, v, keywords: as in `octet.attention`; with seqused_k, and perhaps block_table, the lengths of KV caches.
        do: also check the gradients dq, dk, dv and, with sinks, dsinks; not of KV caches.
        tangents: (tq, tk, tv); also check the tangent `to`; not of KV caches.

    Returns:
        {"o": Errors, "lse": Errors, "dq": ..., "dk": ..., "dv": ..., "dsinks": ..., "to": ...}, those that were asked
        for. float64 is the unfused reference, on the CPU.
    """
    more, options = split(keywords)
    call = {"q": q, "k": k, "v": v, **more}
    for name, given in (("do", do), ("tangents", tangents)):
        if given is not None and (found := [x for x in CACHE if more.get(x) is not None]):
            raise Unsupported(f"{name}: given with {found[0]}, but KV caches have forward passes alone; leave it out")
    along = {} if tangents is None else dict(zip(("tq", "tk", "tv"), tangents, strict=True))
    all_operands = call | operands_of(do_=do) | along
    framework, made = _api.call_of(all_operands, options)
    call = {name: all_operands[name] for name in call}
    positions: Any = {name: value for name, value in options.items() if name in _EXACT}
    exact = options_of("f64", precision="f64", backend="reference", **positions)  # whatever OCTET_BACKEND names

    def wide(name: str, x: Any) -> np.ndarray:
        x = framework.to_numpy(dequantize(x) if isinstance(x, QTensor) else x)
        return x if KINDS[name] in ("logits", *_INTEGERS) else x.astype(np.float64)

    pairs: dict[str, tuple[Any, np.ndarray]] = {}

    def compare(names: tuple[str, ...], run: str, beside: Operands) -> None:
        given = call | beside
        got = getattr(framework, run)(made, given)
        want = getattr(_numpy, run)(exact, {name: wide(name, x) for name, x in given.items()})
        for name, pair in zip(names, zip(got, want, strict=True), strict=False):
            pairs.setdefault(name, pair)

    compare(("o", "lse"), "run_attention", {})
    if do is not None:
        compare(RESULTS["backward"], "run_vjp", {"do_": do})
    if tangents is not None:
        compare(("o", "to"), "run_jvp", along)
    return {name: _distance(wide(name, got), want) for name, (got, want) in pairs.items()}


def _way_of_jax() -> tuple[str, str | None]:
    """Describes what jax programs call, and returns the path of its handlers, or None where there are none."""
    if importlib.util.find_spec("jax") is None:
        return "not installed", None
    try:
        found = _api.load("jax")
    except Exception as error:  # a version that octet does not know
        return f"cannot be used: {type(error).__name__}: {error}", None
    version = sys.modules["jax"].__version__
    if reason := found._adapter.why_no_handlers():
        return f"{version}, callbacks into Python on one CPU device: {reason}", None
    return f"{version}, XLA handlers", str(_library.beside("liboctet_jax.so"))


def info() -> dict[str, Any]:
    """The machine and the build: version, compiler, cuda, cpu, gpus, backends (each with its reason if unavailable),
    where the library lies, jax (whether its programs call XLA handlers, on any devices, or come back into Python, on
    one CPU device, and why), and xla_handlers, where those lie (None: callbacks). Imports jax."""
    found = json.loads(_library.text_of(_library.lib.octet_info))
    jax, handlers = _way_of_jax()
    return found | {
        "library": _library.path,
        "jax": jax,
        "xla_handlers": handlers,
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
