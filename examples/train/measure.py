"""How far the attention gradients of a model are from float64 on the same activations, layer by layer.

    python examples/train/measure.py examples/data/gpt64_layer2.safetensors

replays the step that a file holds (q, k, v and do of a causal layer) in each precision, and prints what `of_layer`
finds.
"""

import argparse
import pathlib

import octet
import torch
from gpt import GPT, Attend


def of_model(model: GPT, text: torch.Tensor, after: torch.Tensor, autocast, heads: int = 2) -> list[dict]:
    """An entry for each layer: {o, dq, dk, dv, kappa, delta_bias}, see `of_layer`. The gradients are those of the run's
    own backward pass, at the first `heads` heads of the first sequence. Gradients of parameters are not touched."""
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
    return [of_layer(record) for record in records]


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


def replayed(path: str, attend: Attend) -> dict[str, float]:
    """What `of_layer` finds on the activations of a file."""
    from safetensors.torch import load_file

    given = load_file(path)
    x = [given[name].requires_grad_() for name in ("q", "k", "v")]
    o = attend(*x)
    made = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, x, given["do"]), strict=True))
    return of_layer({name: y.detach() for name, y in (given | made | {"o": o}).items()})


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE")
    print("| file | attention | o | dq | dk | dv | kappa | delta bias |\n| --- | --- |" + " ---: |" * 6)
    for path in parser.parse_args(words).files:
        for attend in REPLAYED:
            name = attend.precision + (f", {attend.bias_correction}" if attend.precision == "bf16" else "")
            name += f", backward {attend.backward_precision} {attend.bias_correction}" * bool(attend.backward_precision)
            found = " | ".join(f"{x:.2g}" for x in replayed(path, attend).values())
            print(f"| {pathlib.Path(path).stem} | {name} | {found} |", flush=True)


if __name__ == "__main__":
    main()
