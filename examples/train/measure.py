"""How far the attention gradients of a model are from float64 on the same activations, layer by layer.

    python examples/train/measure.py examples/data/gpt64_layer2.safetensors
    python examples/train/measure.py runs/bf16/step-300.safetensors --points

The first replays the step that a file holds (q, k, v and do of a causal layer, or of several) in each precision, and
prints what `of_layer` finds. The second prints which rounding of FlashAttention makes the errors what they are: those
that are left where that one is exact, the least of dq first.
"""

import argparse
import dataclasses
import json
import pathlib

import curves
import octet
import torch
from gpt import GPT, Attend
from octet import layers


def recorded(model: GPT, text: torch.Tensor, after: torch.Tensor, autocast, heads: int = 2) -> list[dict]:
    """{q, k, v, o, do, dq, dk, dv} of each layer, at the first `heads` heads of the first sequence. The gradients are
    those of the run's own backward pass; those of parameters are not touched."""
    was_training = model.training
    model.eval()
    for layer in model.layers:
        layer.record = {}
    with autocast():
        loss = model.loss(text, after)
    torch.autograd.grad(loss, list(model.parameters()))
    records = []
    for layer in model.layers:
        records.append({name: x[:1, :heads].cpu() for name, x in layer.record.items()})
        layer.record = None
    model.train(was_training)
    return records


def of_model(model: GPT, text: torch.Tensor, after: torch.Tensor, autocast) -> list[dict]:
    """An entry for each layer: {o, dq, dk, dv, kappa, delta_bias}, see `of_layer`."""
    return [of_layer(record) for record in recorded(model, text, after, autocast)]


def save(model: GPT, text: torch.Tensor, after: torch.Tensor, autocast, path: pathlib.Path) -> None:
    """Writes q, k, v and do of the first and of the last layer, as octet.layers.save does."""
    records = recorded(model, text, after, autocast)
    chosen = {f"layers.{i}": records[i] for i in (0, len(records) - 1)}
    given = [{field: x[field] for field in ("q", "k", "v", "do")} for x in chosen.values()]
    layers.save([call_of(name, x) for name, x in zip(chosen, given, strict=True)], path)


def call_of(name: str, given: dict[str, torch.Tensor]) -> layers.Call:
    return layers.Call(name, mask=None, causal=True, scale=None, **given)


def calls_of(path: pathlib.Path) -> list[layers.Call]:
    """Those of a file of octet.layers.save, or the one whose q, k, v and do a file holds."""
    from safetensors import safe_open
    from safetensors.torch import load_file

    with safe_open(path, "pt") as file:
        if "octet_calls" in (file.metadata() or {}):
            return layers.load(path)
    given = load_file(path)
    return [call_of("", {name: given[name] for name in ("q", "k", "v", "do")})]


def of_layer(got: dict[str, torch.Tensor]) -> dict[str, float]:
    """{o, dq, dk, dv: relative L2 error against float64, kappa, delta_bias} of a causal attention whose q, k, v, o, do,
    dq, dk and dv [batch, head, token, dim] are given.

    An error e_i of delta_i moves row i of dq by -scale e_i (P k)_i, and the gradient of q's projection by the sum over
    rows, in which errors cancel unless they have one sign (arXiv 2510.04212). So the error of dq along (P k)_i tells
    e_i. kappa is |sum e_i| / sum |e_i|: 0 where errors cancel, 1 where all have one sign. delta_bias is
    sum e_i / sum |delta_i|.
    """
    q, k, v, do = (got[name].double() for name in ("q", "k", "v", "do"))
    dq, dk, dv = octet.attention_vjp(q, k, v, do, causal=True)
    want = {"o": octet.attention(q, k, v, causal=True), "dq": dq, "dk": dk, "dv": dv}
    found = {name: float((got[name].double() - x).norm() / x.norm()) for name, x in want.items()}
    towards = octet.attention(q, k, k, causal=True)
    scale = q.shape[-1] ** -0.5
    error = -((got["dq"].double() - dq) * towards).sum(-1) / (scale * towards.square().sum(-1)).clamp_min(1e-300)
    size = float(error.abs().sum())
    found["kappa"] = abs(float(error.sum())) / size if size else 0.0
    found["delta_bias"] = float(error.sum() / (do * want["o"]).sum(-1).abs().sum().clamp_min(1e-300))
    return found


REPLAYED = (
    Attend("torch"),
    *(Attend("bf16", correction) for correction in ("none", "beta", "exact_delta", "gproj", "f16")),
    *(Attend(precision) for precision in ("int8", "fp8", "sagebwd")),
    Attend("int8", "none", backward_precision="bf16"),
)


def replayed(call: layers.Call, attend: Attend) -> dict[str, float]:
    """What `of_layer` finds on the activations of a call."""
    x = [y.clone().requires_grad_() for y in (call.q, call.k, call.v)]
    o = attend(*x)
    made = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, x, call.do), strict=True))
    given = {"q": call.q, "k": call.k, "v": call.v, "do": call.do, "o": o}
    return of_layer({name: y.detach() for name, y in (given | made).items()})


def print_replayed(paths: list[pathlib.Path]) -> None:
    print("| file | attention | o | dq | dk | dv | kappa | delta bias |\n| --- | --- |" + " ---: |" * 6)
    for path in paths:
        for call in calls_of(path):
            for attend in REPLAYED:
                found = " | ".join(f"{x:.2g}" for x in replayed(call, attend).values())
                name = curves.label(vars(attend) | {"rounding": ""}, [])
                print(f"| {f'{path.stem} {call.module}'.rstrip()} | {name} | {found} |", flush=True)


def roundings() -> dict[str, octet.Rounding]:
    """The roundings of FlashAttention but one, by the name of what is exact: a point in bf16, or all points in f32."""
    flash = octet.Rounding.flash()
    formats = {name: [p for p, x in dataclasses.asdict(flash).items() if x == name] for name in ("bf16", "f32")}
    found = {"": flash, "delta": octet.Rounding.flash(delta="p")}
    found |= {point: octet.Rounding.flash(**{point: "f64"}) for point in formats["bf16"]}
    return found | {", ".join(formats["f32"]): octet.Rounding.flash(**dict.fromkeys(formats["f32"], "f64"))}


def points(path: pathlib.Path) -> list[dict]:
    """{file, exact, dq, dk, dv} for each of `roundings`, the errors those of the worst call; the least of dq first."""
    found = []
    for name, rounding in roundings().items():
        worst = dict.fromkeys(("dq", "dk", "dv"), 0.0)
        for call in calls_of(path):
            q, k, v, do = (x.double() for x in (call.q, call.k, call.v, call.do))
            errors = octet.check(q, k, v, do=do, rounding=rounding, **call.keywords())
            worst = {tensor: max(x, errors[tensor].rel_l2) for tensor, x in worst.items()}
        found.append({"file": path.stem, "exact": name, **worst})
    return sorted(found, key=lambda x: x["dq"])


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE", type=pathlib.Path)
    parser.add_argument("--points", action="store_true", help="which rounding costs what, instead of each precision")
    parser.add_argument("--json", metavar="OUT", type=pathlib.Path, help="also write what --points found")
    options = parser.parse_args(words)
    if options.json and not options.points:
        parser.error("--json: found no --points, which it writes")
    if not options.points:
        print_replayed(options.files)
        return
    found = [row for path in options.files for row in points(path)]
    print("\n".join(curves.point_table(found)))
    if options.json:
        options.json.write_text("".join(f"{json.dumps(row)}\n" for row in found))


if __name__ == "__main__":
    main()
