"""examples/train: runs repeat and resume bit by bit, see the same text in every precision, measure gradients as
octet.check does, and int8 learns what bf16 learns."""

import contextlib
import json
import pathlib
import statistics
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
import octet
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tqdm")

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "examples" / "train"
sys.path.insert(0, str(FOLDER))
import curves  # noqa: E402
import measure  # noqa: E402
import train as program  # noqa: E402
from gpt import GPT, SIZES, Attend  # noqa: E402
from text import Text  # noqa: E402


def train(*arguments):
    program.main([*map(str, arguments), *([] if "--resume" in arguments else ["--device", "cpu"])])


def entries(folder, kind=None):
    found = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [x for x in found if kind in (None, x["kind"])]


SMALL = "--preset", "tiny", "--megabytes", 1, "--steps", 12, "--log-every", 2, "--measure-every", 6


def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(tmp_path):
    how = *SMALL, "--precision", "int8", "--qk-norm", "--dropout", 0.1, "--micro-batch", 2
    train(tmp_path / "whole", *how)
    # It stops between checkpoints once: what it did after the last one is done again.
    train(tmp_path / "parts", *how, "--stop-at", 5)
    log = (tmp_path / "parts" / "log.jsonl").read_text()
    train("--resume", tmp_path / "parts", "--stop-at", 9, "--checkpoint-every", 7)
    assert len((tmp_path / "parts" / "log.jsonl").read_text()) > len(log)
    train("--resume", tmp_path / "parts")

    def without_speed(folder):
        return [{name: x for name, x in e.items() if name != "tokens_per_second"} for e in entries(folder)[1:]]

    assert without_speed(tmp_path / "parts") == without_speed(tmp_path / "whole")
    (end,) = entries(tmp_path / "whole", "end")
    assert end["step"] == 12 and not end["diverged"]


def test_entries_after_the_checkpoint_are_dropped(tmp_path):
    """A run that was killed has logged steps that its checkpoint has not."""
    train(tmp_path, *SMALL, "--precision", "bf16", "--stop-at", 4)
    log = tmp_path / "log.jsonl"
    once = log.read_text()
    log.write_text(once + json.dumps({"kind": "step", "step": 6, "loss": 0.0}) + "\n")
    train("--resume", tmp_path, "--stop-at", 4)
    assert log.read_text() == once


def test_a_run_repeats_by_the_line_in_its_log(tmp_path):
    train(tmp_path / "one", *SMALL, "--bias-correction", "exact_delta", "--seed", 3, "--length", 32)
    (config,) = entries(tmp_path / "one", "config")
    words = config["command"].split()
    assert words[:3] == ["python", "examples/train/train.py", "RUN"]
    assert config["parameters"] > 0 and config["card"] and config["versions"]["octet"] == octet.__version__
    command = [sys.executable, FOLDER / "train.py", tmp_path / "two", *words[3:]]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and config["command"] in done.stderr, done.stderr
    assert entries(tmp_path / "two", "end") == entries(tmp_path / "one", "end")


def test_runs_of_one_seed_see_the_same_text_whatever_else_they_are(tmp_path):
    text = Text([], 1)
    assert Text([], 1).digest == text.digest
    one, other = text.batch(1, 7, 4, 32), text.batch(1, 8, 4, 32)
    torch.rand(5)  # the state of torch's generator is no part of it
    for x, y, z in zip(one, text.batch(1, 7, 4, 32), other, strict=True):
        assert torch.equal(x, y) and not torch.equal(x, z)
    assert torch.equal(one[0][:, 1:], one[1][:, :-1]) and not torch.equal(text.batch(2, 7, 4, 32)[0], one[0])
    # No sequence of held-out text is in the training text.
    everything = bytes(text.train.numpy())
    held_out, _ = text.held_out_batch(20, 64)
    assert sum(bytes(x.to(torch.uint8).numpy()) in everything for x in held_out) <= 1  # a licence, say
    digests = set()
    for precision in ("torch", "int8"):
        train(tmp_path / precision, *SMALL, "--precision", precision, "--stop-at", 1)
        digests.add(entries(tmp_path / precision, "config")[0]["digest_of_text"])
    assert digests == {text.digest}


@pytest.mark.parametrize("how", [
    ["--precision", "torch"],
    ["--precision", "int8", "--backward-precision", "bf16", "--bias-correction", "none"],
    ["--rounding", "flash,delta=p,tile=32"],
    ["--precision", "sagebwd", "--dtype", "bfloat16"],
], ids=str)  # fmt: skip
def test_every_way_of_attention_learns(tmp_path, how):
    train(tmp_path, *SMALL, *how)
    losses = [x["loss"] for x in entries(tmp_path, "held_out")]
    assert losses[0] == pytest.approx(np.log(256), abs=0.1)  # weights that know nothing
    assert losses[-1] < losses[0] - 1
    for entry in entries(tmp_path, "gradients"):
        assert len(entry["layers"]) == SIZES["tiny"].layers
        assert all(np.isfinite(x) for layer in entry["layers"] for x in layer.values())


def test_int8_learns_what_bf16_learns(tmp_path):
    """200 steps of the tiny setting. The same text and the same first weights in another precision change the held-out
    loss less than another seed does."""
    final = {}
    for precision, seed in (("bf16", 0), ("bf16", 1), ("bf16", 2), ("int8", 0)):
        folder = tmp_path / f"{precision}-{seed}"
        quick = "--measure-every", 200, "--held-out-every", 200, "--megabytes", 4
        train(folder, "--preset", "tiny", "--precision", precision, "--qk-norm", "--seed", seed, *quick)
        first, last = [x["loss"] for x in entries(folder, "held_out")]
        assert last < first / 1.7
        final[precision, seed] = last
    seeds = [final["bf16", seed] for seed in range(3)]
    assert abs(final["int8", 0] - final["bf16", 0]) < max(seeds) - min(seeds), final
    assert statistics.stdev(seeds) < 0.1, seeds


def record(attend, q, k, v, do):
    x = [y.clone().requires_grad_() for y in (q, k, v)]
    o = attend(*x)
    dq, dk, dv = torch.autograd.grad(o, x, do)
    return {"q": q, "k": k, "v": v, "do": do, "o": o.detach(), "dq": dq, "dk": dk, "dv": dv}


def test_errors_are_those_of_octet_check():
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, 2, 40, 16).bfloat16() for _ in range(4))
    for attend, how in (
        (Attend("bf16", "none"), {"bias_correction": "none"}),
        (Attend("int8"), {"precision": "int8"}),
    ):
        found = measure.of_layer(record(attend, q, k, v, do))
        want = octet.check(q, k, v, do=do, causal=True, **how)
        for name in ("o", "dq", "dk", "dv"):
            assert found[name] == pytest.approx(want[name].rel_l2, rel=1e-6)
    exact = measure.of_layer(record(Attend("torch"), *(x.double() for x in (q, k, v, do))))
    assert max(exact[name] for name in ("o", "dq", "dk", "dv", "delta_bias")) < 1e-6


def biased(rows=64, keys=64, dim=16):
    """Rows see two keys whose logits tie, and o there is always rounded towards 0, as in arXiv 2510.04212: v of the
    tied keys are 1 + 3 / 512 and 1, o their mean 1 + 3 / 1024, which bfloat16 makes 1. do has one sign. The first row,
    which sees one key, takes no part."""
    q, k = torch.zeros(1, rows, keys, dim), torch.zeros(1, rows, keys, dim)
    q[..., 0], k[..., 0] = 8.0, -16.0
    k[..., 0, 0] = k[..., 1, 0] = 8.0
    k[..., 1:] = torch.randn(1, rows, keys, dim - 1)
    v = torch.full((1, rows, keys, dim), 1.0)
    v[..., 0, :] += 3 / 512
    do = torch.rand(1, rows, keys, dim) + 0.5
    do[..., 0, :] = 0
    return q, k, v, do


def test_kappa_finds_the_sign_of_what_rounding_o_does_to_delta():
    torch.manual_seed(0)
    inputs = [x.double() for x in biased()]
    found = measure.of_layer(record(Attend("", rounding=octet.Rounding(o_saved="bf16")), *inputs))
    assert found["kappa"] == pytest.approx(1)
    assert found["delta_bias"] == pytest.approx(-3 / 1024 / (1 + 3 / 1024), rel=1e-6)
    cured = measure.of_layer(record(Attend("", rounding=octet.Rounding(o_saved="bf16", delta="p")), *inputs))
    assert abs(cured["delta_bias"]) < 1e-12
    for correction, is_biased in (("none", True), ("exact_delta", False), ("f16", False)):
        x = [x.bfloat16() for x in inputs]  # 1 + 3 / 512 becomes 1 + 1 / 128, and the mean a tie
        x[2][..., 1, :], x[2][..., 0, :] = 1, 1 + 1 / 128
        bias = measure.of_layer(record(Attend("bf16", correction), *x))["delta_bias"]
        assert (abs(bias) > 2.0**-10) == is_biased, (correction, bias)


def test_a_stored_step_is_replayed(capsys):
    pytest.importorskip("safetensors")
    measure.main([str(FOLDER.parent / "data" / "gpt64_layer5.safetensors")])
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    found = {row[1]: [float(x) for x in row[2:]] for row in rows}
    assert len(found) == len(measure.REPLAYED)
    dq = {name: x[1] for name, x in found.items()}
    # As docs/numerics.md has it of these activations: f16 is the closest, o as it is stored costs bf16 most.
    assert dq["bf16 f16"] < dq["bf16 exact_delta"] < dq["bf16 none"] and dq["bf16 f16"] < dq["int8"] < dq["fp8"]


def test_activations_are_kept_of_the_steps_asked_for(tmp_path):
    """They are those that the measurements in the log were made on, and keeping them changes no bit of the run."""
    pytest.importorskip("safetensors")
    train(tmp_path / "kept", *SMALL, "--precision", "int8", "--keep-at", 6, 12)
    train(tmp_path / "plain", *SMALL, "--precision", "int8")
    assert entries(tmp_path / "kept", "end") == entries(tmp_path / "plain", "end")
    files = sorted(path.name for path in (tmp_path / "kept").glob("*.safetensors"))
    assert files == ["step-12.safetensors", "step-6.safetensors"]
    measured = {x["step"]: x["layers"] for x in entries(tmp_path / "kept", "gradients")}
    for step in (6, 12):
        calls = measure.calls_of(tmp_path / "kept" / f"step-{step}.safetensors")
        assert [call.module for call in calls] == ["layers.0", f"layers.{SIZES['tiny'].layers - 1}"]
        for call, want in zip(calls, (measured[step][0], measured[step][-1]), strict=True):
            assert call.q.shape == (1, 2, 64, 32)
            found = measure.replayed(call, Attend("int8"))
            assert found == pytest.approx(want, rel=1e-3)


def test_points_are_those_of_octet_check(tmp_path, capsys):
    pytest.importorskip("safetensors")
    path = FOLDER.parent / "data" / "gpt64_layer5.safetensors"
    measure.main([str(path), "--points", "--json", str(tmp_path / "points.jsonl")])
    found = [json.loads(line) for line in (tmp_path / "points.jsonl").read_text().splitlines()]
    assert "\n".join(curves.point_table(found)) == capsys.readouterr().out.rstrip()
    errors = {x["exact"]: x["dq"] for x in found}
    assert len(errors) == len(found) == len(measure.roundings()) and list(errors.values()) == sorted(errors.values())
    (call,) = measure.calls_of(path)
    for name, rounding in (("", octet.Rounding.flash()), ("ds", octet.Rounding.flash(ds="f64"))):
        q, k, v, do = (x.double() for x in (call.q, call.k, call.v, call.do))
        assert errors[name] == octet.check(q, k, v, do=do, causal=True, rounding=rounding)["dq"].rel_l2
    # q, k and v are in bfloat16 in the file; what the backward pass alone rounds has no part in dq but ds.
    assert errors["qk"] == errors["v"] == errors["o"] == errors["p_backward"] == errors[""] > errors["delta"]
    table = curves.point_table(found)
    assert table[2].startswith("| nothing | ") and len(table) == 2 + len(found)


def test_measuring_changes_nothing():
    torch.manual_seed(0)
    model = GPT(SIZES["tiny"], Attend("bf16"))
    text = torch.randint(256, (1, 33))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    measure.of_model(model, text[:, :-1], text[:, 1:], contextlib.nullcontext)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(x.grad is None for x in model.parameters()) and model.training
    assert all(layer.record is None for layer in model.layers)


CONFIG = {
    "kind": "config", "precision": "bf16", "bias_correction": "none", "backward_precision": "", "rounding": "",
    "qk_norm": False, "dtype": "float32", "tokens_per_step": 512, "seed": 0, "card": "a card",
}  # fmt: skip


def written(path, losses, **config):
    biases = (-2e-5, 4e-5)
    layers = [{"dq": x, "kappa": y, "delta_bias": z} for x, y, z in zip((0.01, 0.02), (0.5, 0.25), biases, strict=True)]
    lines = [CONFIG | config]
    for step, loss in enumerate(losses):
        lines += [
            {"kind": "held_out", "step": step, "loss": loss},
            {"kind": "gradients", "step": step, "layers": layers},
        ]
        lines += [{"kind": "step", "step": step, "loss": loss, "tokens_per_second": 100}]
    lines += [{"kind": "end", "step": len(losses), "digest": "0", "diverged": bool(np.isnan(losses[-1]))}]
    path.write_text("".join(json.dumps(x) + "\n" for x in lines))
    return path


def test_curves_are_the_same_bytes_and_have_a_line_for_each_run(tmp_path):
    logs = [
        written(tmp_path / "a", [5.5, 4.0, 3.0]),
        written(tmp_path / "b", [5.5, 4.2, float("nan")], precision="int8", qk_norm=True),
    ]
    for name in ("one.svg", "two.svg"):
        curves.main([*map(str, logs), "--out", str(tmp_path / name)])
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    root = ElementTree.parse(tmp_path / "one.svg").getroot()
    lines = root.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == len(curves.PANELS) * len(logs)
    texts = [x.text for x in root.findall("{http://www.w3.org/2000/svg}text")]
    assert {"bf16 none", "int8, QK-norm"} <= set(texts)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for line in lines:
        for x, y in (map(float, point.split(",")) for point in line.attrib["points"].split()):
            assert 0 <= x <= width and 0 <= y <= height


def test_the_table_has_seeds_in_one_row(tmp_path):
    logs = [curves.read(written(tmp_path / f"{seed}", [5.5, 3.0 + seed], seed=seed)) for seed in range(3)]
    assert curves.loss_table(logs)[-1] == "| bf16 none | 3 | 4.0000 | 1.0000 |  | 100 | a card |"
    assert curves.loss_table(logs[:1])[-1] == "| bf16 none | 1 | 3.0000 |  |  | 100 | a card |"
    # The worst layer and run at the last measurement; the bias of all but the first.
    assert curves.error_table(logs)[-1] == "| bf16 none | 0.02 | 0.5 | 3.2e-05 | +1.0e-05 ± 1.3e-05 |"


def test_the_table_compares_runs_of_one_seed(tmp_path):
    """With octet's default, in what is otherwise the same run; a run that did not end has no part in it."""
    logs = []
    for seed, reference, int8 in ((0, 2.0, 2.02), (1, 4.0, 4.04), (2, 3.0, float("nan"))):
        logs += [written(tmp_path / f"f16-{seed}", [5.5, reference], seed=seed, bias_correction="f16")]
        logs += [written(tmp_path / f"int8-{seed}", [5.5, int8], seed=seed, precision="int8", card="another")]
        logs += [written(tmp_path / f"norm-{seed}", [5.5, 1.0], seed=seed, bias_correction="f16", qk_norm=True)]
        logs += [written(tmp_path / f"none-{seed}", [5.5, 1.0 + seed / 1000], seed=seed, qk_norm=True)]
    cells = [row.split(" | ") for row in curves.loss_table([curves.read(path) for path in logs])]
    rows = {first.strip("| "): others for first, *others in cells}
    assert rows["bf16 f16"][:4] == ["3", "3.0000", "1.0000", ""]
    assert rows["int8"] == ["2 of 3 ended", "3.0300", "1.4284", "+1.00 ± 0.00", "100", "another |"]
    assert rows["bf16 none, QK-norm"][3] == "+0.10 ± 0.06"
    assert list(rows)[2:] == ["bf16 f16", "int8", "bf16 f16, QK-norm", "bf16 none, QK-norm"]


def test_runs_that_differ_have_rows_of_their_own(tmp_path):
    logs = [written(tmp_path / f"log{x}", [5.5, 3.0], start_from=x, digest_of_text="same") for x in ("", "other")]
    assert [row.split(" | ")[0] for row in curves.loss_table(list(map(curves.read, logs)))[2:]] == [
        "| bf16 none", "| bf16 none, start from other",
    ]  # fmt: skip


def test_the_bench_keeps_logs_of_runs_that_ended(tmp_path):
    def bench(*words):
        how = "--preset", "tiny", "--megabytes", "1", "--device", "cpu", "--steps", "2", "--seeds", "1"
        command = [
            sys.executable,
            FOLDER.parents[1] / "bench" / "training.py",
            *words,
            "--results",
            tmp_path / "kept",
            *how,
        ]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    bench(tmp_path / "runs", "--arms", "torch", "int8", "--norms", "none", "qk-norm", "--part", "0/2")
    assert {path.stem for path in (tmp_path / "kept").iterdir()} == {"torch-0", "torch-qk-norm-0"}
    assert (tmp_path / "kept" / "torch-0.jsonl").read_text() == (
        tmp_path / "runs" / "torch-0" / "log.jsonl"
    ).read_text()
    # What is kept is not run again, and what cannot run says why and stops no other.
    printed = bench(tmp_path / "again", "--arms", "torch", "int8", "--norms", "none", "--tokens-per-step", "100")
    assert "int8-0: SystemExit: --tokens-per-step: found 100, allowed: multiples of the length 64" in printed
    assert "torch-0" not in printed and len(list((tmp_path / "kept").iterdir())) == 2


WRONG = {
    ("train",): "found a new run and --resume, or neither, allowed: one of them",
    (
        "train",
        "RUN",
        "--tokens-per-step",
        "100",
        "--preset",
        "tiny",
    ): "--tokens-per-step: found 100, allowed: multiples",
    ("train", "RUN", "--micro-batch", "3", "--preset", "tiny"): "--micro-batch: found 3, allowed: divisors of 4",
    ("train", "RUN", "--rounding", "pp=bf16", "--preset", "tiny"): "pp: a Rounding has no such point; allowed: 'qk'",
    ("train", "RUN", "--text", "/nowhere"): "--text: found /nowhere, allowed: folders",
    ("train", "--resume", "/nowhere"): "--resume: found /nowhere, allowed: a folder with a checkpoint.pt",
    ("train", "--resume", "/nowhere", "--precision", "int8"): "--resume: found --precision beside it, allowed: --check",
    ("measure", "FILE", "--json", "OUT"): "--json: found no --points, which it writes",
    ("curves", "RUN/nothing"): "No such file",
    ("curves", str(FOLDER / "README.md")): "found no configuration in its first line, allowed: log.jsonl of train.py",
}


@pytest.mark.parametrize("words", WRONG, ids=str)
def test_what_is_wrong_is_named(words, tmp_path, capsys):
    name, *arguments = [x.replace("RUN", str(tmp_path / "run")) for x in words]
    with pytest.raises((SystemExit, TypeError)) as caught:
        {"train": program, "curves": curves, "measure": measure}[name].main(arguments)
    assert WRONG[words] in f"{caught.value} {capsys.readouterr().err}"
