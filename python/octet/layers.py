"""Which layer of a model can take which precision: record its attention, measure each precision on it, choose.

    from octet import layers
    with layers.capture(model) as calls:
        loss(model(batch)).backward()
    found = layers.errors(calls)
    plan = layers.plan(found, budget=0.02)
    layers.apply(model, plan)

`python -m octet.layers FILE` does the same with calls that `save` has written. All need torch, files safetensors.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import pathlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from octet import _abi, _api, _report
from octet._options import Precision, look_up
from octet.errors import InvalidArgument, Unsupported
from octet.torch.sdpa import patch_sdpa

PRECISIONS = ("f32", "bf16", "int8", "fp8")  # what `errors` tries
TENSORS = ("o", "dq", "dk", "dv")


@dataclasses.dataclass
class Call:
    """A sample of one call of attention: some heads of the first element of the batch, and the first tokens."""

    module: str  # the name of the module that called
    q: torch.Tensor  # [1, heads, queries, dim], on the CPU
    k: torch.Tensor  # [1, kv_heads, keys, dim]
    v: torch.Tensor  # [1, kv_heads, keys, dim_v]
    mask: torch.Tensor | None
    causal: bool
    scale: float | None
    do: torch.Tensor | None = None  # the gradient of o; None: none was computed

    def keywords(self) -> dict[str, Any]:
        """Those of octet.attention."""
        causal = "top_left" if self.causal else False
        return {"mask": self.mask, "causal": causal, "scale": self.scale, "enable_gqa": True}


class _Listener(TorchFunctionMode):
    def __init__(self, calls: list[Call], running: list[str], heads: int, tokens: int, most: int) -> None:
        super().__init__()
        self._calls, self._running, self._heads, self._tokens, self._most = calls, running, heads, tokens, most

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = functional.scaled_dot_product_attention
        if function is own:
            return self._noted(own, *args, **(kwargs or {}))
        if function is not functional.multi_head_attention_forward:
            return function(*args, **(kwargs or {}))
        functional.scaled_dot_product_attention = functools.partial(self._noted, own)  # no mode sees its calls
        try:
            return function(*args, **(kwargs or {}))
        finally:
            functional.scaled_dot_product_attention = own

    def _noted(self, own: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
        o = own(*args, **kwargs)
        self._note(o, *args, **kwargs)
        return o

    def _note(self, o, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        module = self._running[-1] if self._running else ""
        if query.ndim != 4 or sum(x.module == module for x in self._calls) >= self._most:
            return
        groups = min(self._heads, key.shape[1])
        heads = groups * (query.shape[1] // key.shape[1])

        def kept(x: torch.Tensor, heads: int) -> torch.Tensor:
            return x.detach()[:1, :heads, : self._tokens].to("cpu", copy=True)

        mask = None
        if attn_mask is not None:
            mask = attn_mask.detach()[(None,) * (4 - attn_mask.ndim)][..., : self._tokens, : self._tokens]
            mask = mask[:1, :heads].to("cpu", copy=True)
        call = Call(module, kept(query, heads), kept(key, groups), kept(value, groups), mask, is_causal, scale)
        self._calls.append(call)
        if o.requires_grad:
            o.register_hook(lambda do: setattr(call, "do", kept(do, heads)))


@contextlib.contextmanager
def capture(model: torch.nn.Module, *, heads: int = 2, tokens: int = 512, calls: int = 1) -> Iterator[list[Call]]:
    """Records what scaled_dot_product_attention is called with inside of a model, while the context lasts.

    Args:
        model: any torch module. Those of transformers and diffusers call scaled_dot_product_attention unless another
            implementation of attention was set.
        heads: of k and v, the most to keep, with the heads of q that they serve.
        tokens: the first ones, the most to keep. What is kept is heads * tokens * dim numbers a tensor.
        calls: of each module, the most to keep.

    Returns:
        A context whose value is the list of Calls. Gradients come into it where the backward pass runs in the context.

    Raises:
        Unsupported: the model has called no scaled_dot_product_attention.
    """
    found: list[Call] = []
    running: list[str] = []
    hooks = []

    def leave(*_: Any) -> None:
        running.pop()

    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: running.append(name)))
        hooks.append(module.register_forward_hook(leave, always_call=True))
    try:
        with _Listener(found, running, heads, tokens, calls):
            yield found
    finally:
        for hook in hooks:
            hook.remove()
    if not found:
        raise Unsupported(
            f"model: {type(model).__name__} called no scaled_dot_product_attention of [batch, head, token, dim] in the "
            "context; of transformers set attn_implementation='sdpa'"
        )


def save(calls: Sequence[Call], path: Any) -> None:
    """Writes calls to a file of safetensors."""
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    about = []
    for i, call in enumerate(calls):
        given = {field.name: getattr(call, field.name) for field in dataclasses.fields(call)}
        tensors |= {f"{i}.{name}": x.contiguous() for name, x in given.items() if isinstance(x, torch.Tensor)}
        about.append({name: x for name, x in given.items() if x is not None and not isinstance(x, torch.Tensor)})
    save_file(tensors, path, {"octet_calls": json.dumps(about)})


def load(path: Any) -> list[Call]:
    """The calls of a file that `save` has written."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        about = (file.metadata() or {}).get("octet_calls")
        if about is None:
            raise InvalidArgument(f"{path}: found no calls of attention, allowed: a file of octet.layers.save")
        found = [Call(**{"q": None, "k": None, "v": None, "mask": None, "scale": None, **x}) for x in json.loads(about)]
        for name in file.keys():
            i, _, field = name.partition(".")
            setattr(found[int(i)], field, file.get_tensor(name))
    return found


def _seconds(call: Call, q: Any, k: Any, v: Any, do: Any, how: dict[str, Any], repeats: int) -> float:
    """The median time of the passes that a call has, once its plan is there."""

    def run() -> float:
        start = time.perf_counter()
        if do is None:
            _api.attention(q, k, v, **how)
        else:
            _api.attention_vjp(q, k, v, do, **how)
        if q.is_cuda:
            torch.cuda.synchronize(q.device)
        return time.perf_counter() - start

    run()
    return statistics.median(run() for _ in range(repeats))


def errors(
    calls: Sequence[Call],
    precisions: Iterable[str] = PRECISIONS,
    *,
    device: Any = "cpu",
    repeats: int = 3,
    **options: Any,
) -> list[dict[str, Any]]:
    """What each precision costs each module, on what was recorded of it.

    Args:
        calls: of `capture` or `load`.
        precisions: of octet.attention.
        device: where the precisions run; float64 runs on the CPU.
        repeats: of which the time is the median.
        options: more keywords of octet.attention, as bias_correction.

    Returns:
        A row for each module and precision: {"module", "precision", "o", "dq", "dk", "dv" (relative L2 errors against
        float64, the worst of the module's calls; those of gradients where all calls have one), "seconds" (of the
        sample: the forward pass, with gradients both passes)}, or {"module", "precision", "reason"} where no backend
        computes it.
    """
    rows = []
    for module in dict.fromkeys(call.module for call in calls):
        own = [call for call in calls if call.module == module]
        for precision in precisions:
            row: dict[str, Any] = {"module": module, "precision": precision}
            try:
                rows.append(row | _measured(own, precision, device, repeats, options))
            except Unsupported as rejection:
                rows.append(row | {"reason": str(rejection)})
    return rows


def _measured(
    calls: list[Call], precision: str, device: Any, repeats: int, options: dict[str, Any]
) -> dict[str, float]:
    trains = all(call.do is not None for call in calls)
    found: dict[str, float] = dict.fromkeys(TENSORS if trains else TENSORS[:1], 0.0) | {"seconds": 0.0}
    for call in calls:
        how = call.keywords() | options | {"precision": precision}
        q, k, v, do, how["mask"] = (
            x if x is None else x.to(device) for x in (call.q, call.k, call.v, call.do if trains else None, call.mask)
        )
        checked = _report.check(q, k, v, do=do, **how)
        for name in found.keys() - {"seconds"}:
            error = checked[name].rel_l2
            found[name] = error if math.isnan(error) else max(found[name], error)
        found["seconds"] += _seconds(call, q, k, v, do, how, repeats)
    return found


def _worst(row: dict[str, Any]) -> float:
    return max([row[name] if not math.isnan(row[name]) else math.inf for name in TENSORS if name in row])


def plan(found: Sequence[dict[str, Any]], budget: float) -> dict[str, Any]:
    """The fastest precision of each module whose errors are all within a budget.

    Args:
        found: the rows of `errors`.
        budget: the largest relative L2 error of o and, where it was measured, of dq, dk and dv.

    Returns:
        {"budget", "modules": {name: {"precision", "error", "seconds"}}}, which json can write.

    Raises:
        InvalidArgument: no precision of a module is within the budget; the message has the least error.
    """
    modules: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(row["module"] for row in found):
        rows = [row for row in found if row["module"] == name and "reason" not in row]
        within = [row for row in rows if _worst(row) <= budget]
        if not within:
            least = min(rows, key=_worst, default=None)
            best = f"{_worst(least):.2g} of precision {least['precision']}" if least else "no precision that runs"
            raise InvalidArgument(f"budget: found {budget}, allowed for {name!r}: at least {best}")
        row = min(within, key=lambda row: row["seconds"])
        modules[name] = {"precision": row["precision"], "error": _worst(row), "seconds": row["seconds"]}
    return {"budget": budget, "modules": modules}


def apply(model: torch.nn.Module, plan: dict[str, Any]) -> None:
    """Has each module of a plan compute scaled_dot_product_attention by octet, in its precision. What an earlier plan
    did to the model is undone first, so that a plan without modules gives the model back.

    Args:
        model: any torch module, as `capture` takes it.
        plan: of `plan`; names are those of the model that `capture` was given.

    Raises:
        InvalidArgument: the model has no such module, or octet no such precision.
    """
    parts: dict[str, Any] = dict(model.named_modules())
    for name, entry in plan["modules"].items():
        if name not in parts:
            raise InvalidArgument(f"plan: found module {name!r}, allowed: those of {type(model).__name__}")
        look_up(f"plan: precision of {name!r}", entry["precision"], _abi.PRECISIONS)
    for module in parts.values():
        if hasattr(module.forward, "octet_own"):
            module.forward = module.forward.octet_own
    for name, entry in plan["modules"].items():
        parts[name].forward = _within(parts[name].forward, entry["precision"])


def _within(own: Callable, precision: Precision) -> Callable:
    @functools.wraps(own)
    def forward(*args: Any, **keywords: Any) -> Any:
        with patch_sdpa(precision):
            return own(*args, **keywords)

    forward.octet_own = own  # type: ignore[attr-defined]
    return forward


_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Attention by layer</title><style>
:root { color-scheme: light dark; }
body { font: 14px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; margin: 1em; }
h1 { font-size: 1.4em; }
h2 { font-size: 1.1em; margin: 1.5em 0 0.4em; }
div { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 6px; text-align: right; white-space: nowrap; }
th:first-child {
  text-align: left; white-space: normal; overflow-wrap: anywhere; min-width: 6em;
  position: sticky; left: 0; background: Canvas; font-weight: normal;
}
@media (max-width: 500px) { table { font-size: 12px; } }
</style></head><body>
<h1>Attention by layer</h1>
<p>Errors of the recorded sample against float64: red from 0.1 on, green up to 0.0001. Each precision has a column.</p>
"""


def report(found: Sequence[dict[str, Any]]) -> str:
    """One page of HTML without links: a table of each tensor and one of times, modules by precisions, in which red
    stands for errors of 0.1 and above, green for 0.0001 and below. `found`: the rows of `errors`."""
    modules, precisions = (list(dict.fromkeys(row[name] for row in found)) for name in ("module", "precision"))
    rows = {(row["module"], row["precision"]): row for row in found}
    titles = {name: f"Relative L2 error of {name}" for name in TENSORS} | {"seconds": "Milliseconds of the sample"}
    page = [_PAGE]
    for name, title in titles.items():
        if not any(name in row for row in found):
            continue
        page.append(f"<h2>{title}</h2><div><table><tr><th>module</th>")
        page += [f"<th>{escape(x)}</th>" for x in precisions]
        for module in modules:
            name_in_parts = escape(module).replace(".", ".<wbr>") or "the model"  # narrow screens break it there
            page.append(f"</tr>\n<tr><th>{name_in_parts}</th>")
            page += [_cell(name, rows.get((module, precision), {})) for precision in precisions]
        page.append("</tr></table></div>\n")
    for reason in dict.fromkeys(row["reason"] for row in found if "reason" in row):
        page.append(f"<p>none: {escape(reason)}</p>\n")
    return "".join([*page, "</body></html>\n"])


def _cell(name: str, row: dict[str, Any]) -> str:
    if name not in row:
        return f'<td title="{escape(row.get("reason", "not measured"))}">none</td>'
    if name == "seconds":
        return f"<td>{1000 * row[name]:.3g}</td>"
    size = 1.0 if math.isnan(row[name]) else min(max((math.log10(row[name] or 1e-300) + 4) / 3, 0.0), 1.0)
    return f'<td style="background: hsl({120 - 120 * size:.0f} 80% 50% / 0.4)">{row[name]:.2g}</td>'


def main(words: Sequence[str] | None = None, command: str = "") -> None:
    """`command`: the one of octet, "report" or "plan"; else python -m octet.layers."""
    name = f"octet {command}" if command else "python -m octet.layers"
    parser = argparse.ArgumentParser(name, description="Which layer can take which precision.")
    parser.add_argument("file", help="calls that octet.layers.save has written")
    parser.add_argument("--precisions", default=",".join(PRECISIONS), help=f"[{','.join(PRECISIONS)}]")
    parser.add_argument("--device", default="cpu", help="where the precisions run  [cpu]")
    parser.add_argument(
        "--budget",
        type=float,
        required=command == "plan",
        help="print the plan within this error as JSON, not all errors",
    )
    parser.add_argument("--html", help="write the errors to this file")
    given = parser.parse_args(words)
    found = errors(load(given.file), given.precisions.split(","), device=given.device)
    if given.html:
        pathlib.Path(given.html).write_text(report(found))
    print(json.dumps(plan(found, given.budget) if given.budget else found, indent=1))


if __name__ == "__main__":
    main()
