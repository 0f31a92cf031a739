"""The answers of check, bench, study, explain, info and quantize: their keys, and figures that NumPy can verify."""

import json
import os
import pathlib
import re
import subprocess

import numpy as np
import pytest
from conftest import (
    OCTET,
    attention,
    causal,
    draw,
    from_bf16,
    octet,
    read_safetensors,
    rel_l2,
    run_ok,
    to_bf16,
    write_safetensors,
)

ROOT = pathlib.Path(__file__).parents[2]
CHECK_KEYS = [
    "file",
    "precision",
    "pass",
    "tensor",
    "cos",
    "rel_l1",
    "rel_l2",
    "max_abs",
    "worst_head_rel_l2",
    "nan",
    "seconds",
    "runs",
    "backend",
]
BENCH_KEYS = [
    "shape",
    "precision",
    "pass",
    "causal",
    "backend",
    "median_seconds",
    "min_seconds",
    "kernel_seconds",
    "tflops",
    "runs",
]


def test_check_reports_the_figures_that_numpy_finds(tmp_path):
    t = {name: from_bf16(to_bf16(x)) for name, x in draw(11, sq=64, sk=64).items()}
    source = write_safetensors(tmp_path / "in.safetensors", t, bf16=True)
    want, got = attention(t, causal(64, 64)), {}
    for option in (
        ["--backward"],
        [],
    ):  # last the forward alone: one that saves the residual of o for a backward may round otherwise
        run_ok("run", source, tmp_path / "out.safetensors", "--precision", "bf16", "--causal", *option)
        got |= read_safetensors(tmp_path / "out.safetensors")
    rows = json.loads(run_ok("check", source, "--json", "--causal", "--precision", "bf16", "--pass", "fwd,bwd"))
    assert [(r["pass"], r["tensor"]) for r in rows] == [
        ("fwd", "o"),
        ("fwd", "lse"),
        ("bwd", "dq"),
        ("bwd", "dk"),
        ("bwd", "dv"),
    ]
    for row in rows:
        assert list(row) == CHECK_KEYS
        a, b = got[row["tensor"]].astype(np.float64), want[row["tensor"]]
        if row["tensor"] == "lse":
            a, b = a[..., None], b[..., None]
        heads = np.sqrt(((a - b) ** 2).sum((2, 3)) / (b**2).sum((2, 3)))
        figures = {
            "cos": (a * b).sum() / np.sqrt((a**2).sum() * (b**2).sum()),
            "rel_l1": np.abs(a - b).sum() / np.abs(b).sum(),
            "rel_l2": rel_l2(a, b),
            "max_abs": np.abs(a - b).max(),
            "worst_head_rel_l2": heads.max(),
        }
        for key, figure in figures.items():
            assert row[key] == pytest.approx(figure, rel=1e-6), (row["tensor"], key)
        assert (
            row["nan"] == 0
            and row["backend"] == "cpu"
            and row["file"] == str(source)
            and row["seconds"] > 0
            and row["runs"] == 5
        )


def test_check_of_all_precisions_leaves_out_passes_that_do_not_exist(tmp_path, small):
    rows = json.loads(
        run_ok("check", small, "--json", "--precision", "all", "--pass", "fwd,bwd,jvp", "--backend", "reference")
    )
    found = {p: sorted({r["precision"] for r in rows if r["pass"] == p}) for p in ("fwd", "bwd", "jvp")}
    assert found["fwd"] == sorted(["f32", "f16", "bf16", "int8", "int8_f16", "int8_fp8", "fp8", "fp8_raw", "sagebwd"])
    assert found["bwd"] == sorted(["f32", "f16", "bf16", "int8", "fp8", "sagebwd"])
    assert found["jvp"] == sorted(["f32", "f16", "bf16"])


def test_check_draws_what_is_absent_repeatably_and_says_so(tmp_path):
    source = write_safetensors(tmp_path / "in.safetensors", draw(12, companions=False))
    done = [octet("check", source, "--json", "--precision", "f32", "--pass", "bwd,jvp") for _ in range(2)]
    assert "has no do, tq, tk, tv; drawn from N(0, 1) with a fixed seed" in done[0].stderr
    without_time = [[{k: v for k, v in r.items() if k != "seconds"} for r in json.loads(d.stdout)] for d in done]
    assert without_time[0] == without_time[1]
    assert "drawn" in run_ok("check", source, "--precision", "f32", "--pass", "bwd")


def test_check_counts_nan(tmp_path):
    t = draw(13, companions=False)
    t["q"][0, 0, 5, 0] = np.nan
    rows = json.loads(
        run_ok("check", write_safetensors(tmp_path / "in.safetensors", t), "--json", "--precision", "f32")
    )
    assert rows[0]["nan"] == 16 and rows[0]["rel_l2"] < 1e-5  # float64 has the same row of NaN


@pytest.mark.parametrize("command", ["check", "study"])
def test_a_file_name_that_is_no_utf8(tmp_path, command):
    """In JSON its bytes are escaped, in text they stay."""
    write_safetensors(tmp_path / "in.safetensors", draw(14))
    source = os.fsencode(tmp_path) + b"/caf\xe9 \xe2\x82\xac.safetensors"
    os.rename(tmp_path / "in.safetensors", source)
    arguments = [OCTET, command, source, *(["--precision", "f32"] if command == "check" else [])]
    rows = json.loads(subprocess.run([*arguments, "--json"], capture_output=True, check=True).stdout.decode())
    assert rows[0]["file" if command == "check" else "input"] == f"{tmp_path}/caf\\xe9 \u20ac.safetensors"
    assert b"caf\xe9 \xe2\x82\xac.safetensors" in subprocess.run(arguments, capture_output=True, check=True).stdout


def test_tables_print_nan_without_a_sign(tmp_path):
    t = draw(13, companions=False)
    t["k"][0, 0, 5, 0] = 3e38
    text = run_ok(
        "check", write_safetensors(tmp_path / "in.safetensors", t), "--precision", "all", "--pass", "fwd,bwd,jvp"
    )
    assert " nan " in text and "-nan" not in text and "+nan" not in text


def test_check_fails_above_a_bound(tmp_path, small):
    """Status 1, with the answer as ever, and what failed."""
    arguments = ["check", small, "--precision", "f32,bf16", "--pass", "fwd,bwd"]
    table = run_ok(*arguments)
    rows = json.loads(run_ok(*arguments, "--json"))
    largest = {(r["pass"], r["precision"], r["tensor"]): r["rel_l2"] for r in rows}
    assert run_ok(*arguments, "--fail-above", 1.01 * max(largest.values())).count("\n") == table.count("\n")
    bound = sorted(largest.values())[-3]
    for form in ([], ["--json"]):
        done = octet(*arguments, *form, "--fail-above", bound)
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and done.stdout
        failed = sorted(largest, key=largest.get)[-2:]
        for key, error in largest.items():
            assert (f"{small}: {' '.join(key)}: rel L2 {error:.5f}" in done.stderr) == (key in failed)
    assert octet(*arguments, "--fail-above", 0).returncode == 1


def test_check_fails_on_nan_whatever_the_bound(tmp_path):
    t = draw(13, companions=False)
    t["q"][0, 0, 5, 0] = np.nan
    done = octet("check", write_safetensors(tmp_path / "in.safetensors", t), "--precision", "f32", "--fail-above", 100)
    assert done.returncode == 1 and "fwd f32 o: 16 NaN; " in done.stderr and "fwd f32 lse: 1 NaN" in done.stderr


def test_check_table_ends_with_the_worst_of_several_files(tmp_path, small):
    other = write_safetensors(tmp_path / "other.safetensors", draw(14))
    text = run_ok("check", small, other, "--precision", "f32,bf16")
    assert "worst of 2 files" in text and "\033" not in text


@pytest.mark.parametrize(
    "mask, pairs",
    [([], 64 * 80), (["--causal=top-left"], 64 * 65 / 2), (["--causal=bottom-right"], 64 * 65 / 2 + 64 * 16)],
)
def test_bench_counts_what_the_mask_leaves(mask, pairs):
    rows = json.loads(
        run_ok(
            "bench",
            "--shape",
            "2,4,2,64,80,16",
            "--json",
            "--precision",
            "f32,int8",
            "--runs",
            "3",
            "--warmup",
            "0",
            *mask,
        )
    )
    for row in rows:
        assert list(row) == BENCH_KEYS
        assert (
            row["shape"] == [2, 4, 2, 64, 80, 16]
            and row["runs"] == 3
            and row["causal"] == bool(mask)
            and row["pass"] == "fwd"
        )
        assert 0 < row["min_seconds"] <= row["median_seconds"]
        assert row["tflops"] * row["median_seconds"] * 1e12 == pytest.approx(4 * 8 * pairs * 16)
    assert rows[0]["kernel_seconds"] == rows[0]["median_seconds"]
    assert rows[1]["kernel_seconds"] > 0


def test_bench_of_a_file(small):
    rows = json.loads(
        run_ok(
            "bench",
            "--file",
            small,
            "--json",
            "--precision",
            "f32",
            "--pass",
            "fwd,bwd,jvp",
            "--runs",
            "1",
            "--backend",
            "reference",
        )
    )
    assert [(r["pass"], r["shape"]) for r in rows] == [(p, [2, 4, 2, 33, 33, 16]) for p in ("fwd", "bwd", "jvp")]
    flops = [r["tflops"] * r["median_seconds"] for r in rows]
    assert flops[1] / flops[0] == pytest.approx(2.5) and flops[2] / flops[0] == pytest.approx(3)


def bias(*arguments):
    return {r["input"]: r for r in json.loads(run_ok("study", "--bias", "--json", *arguments))}


def test_study_shows_the_bias_of_bf16_and_its_cure():
    flash = bias()
    assert (
        flash["S8"]["kappa"] > 0.5 and flash["S8"]["t"] > 50
    )  # tied keys smaller than the rest: FlashAttention is biased
    assert flash["S7"]["kappa"] < 0.1 and abs(flash["S7"]["t"]) < 4
    coarse = bias("--round", "flash,acc=bf16,tile=0")  # the accumulator rounded before the division
    assert coarse["S7"]["kappa"] > 0.5 and coarse["S7"]["t"] > 50
    exact = bias("--round", "flash,o_saved=f64")
    assert abs(exact["S8"]["delta_mean_error"]) < 1e-3 * abs(flash["S8"]["delta_mean_error"])


def test_study_sweep_finds_what_was_made_worst(small):
    rows = json.loads(run_ok("study", small, "--json", "--sweep", "--round", "flash,s=e4m3"))
    assert rows[0]["lifted"] is None and set(rows[0]["rel_l2"]) == {"o", "dq", "dk", "dv"}
    assert rows[1]["lifted"] == "s" and rows[1]["cost"] > 0.5
    costs = [r["cost"] for r in rows[1:]]
    assert costs == sorted(costs, reverse=True)


def test_study_of_exact_arithmetic_finds_nothing(small):
    row = json.loads(run_ok("study", small, "--json", "--round", "p=f64"))[0]
    assert max(row["rel_l2"].values()) < 1e-12


def test_explain_names_the_backend_that_runs():
    assert "cpu: chosen" in run_ok("explain", "--shape", "1,8,2,1000,2000,64", "--precision", "bf16")
    assert "reference: chosen" in run_ok(
        "explain", "--shape", "1,8,2,1000,2000,64", "--precision", "f64", "--pass", "bwd"
    )


def test_explain_names_why_each_faster_backend_declined():
    """Of tensors on the CPU: those of GPUs, which are asked first, want others, or find no GPU."""
    backends = json.loads(run_ok("info", "--json"))["backends"]
    arguments = ["--shape", "1,8,2,1000,2000,64", "--precision", "f32,bf16,int8", "--pass", "fwd,bwd", "--json"]
    rows = json.loads(run_ok("explain", *arguments))
    assert len(rows) == 6
    for row in rows:
        assert row["backend"] == "cpu" and [a["backend"] for a in row["answers"]] == [b["name"] for b in backends]
        for answer, backend in zip(row["answers"], backends, strict=True):
            if backend["device"] == "cuda":
                wants = "the tensors are on cpu; it works on cuda tensors"
                assert (answer["answer"], answer["detail"]) == ("no", backend["reason"] or wants)
        assert [(a["answer"], a["detail"]) for a in row["answers"][-2:]] == [
            ("chosen", row["kernel"]),
            ("no", "it could, but runs only when asked for by name"),
        ]


def test_explain_as_json():
    (row,) = json.loads(
        run_ok("explain", "--shape", "1,8,2,1000,2000,64", "--precision", "int8", "--backend", "cpu", "--json")
    )
    kernel = (
        run_ok("explain", "--shape", "1,8,2,1000,2000,64", "--precision", "int8", "--backend", "cpu")
        .split("chosen, ")[1]
        .strip()
    )
    assert row == {
        "shape": [1, 8, 2, 1000, 2000, 64],
        "precision": "int8",
        "pass": "fwd",
        "dtype": "bf16",
        "backend": "cpu",
        "kernel": kernel,
        "answers": [{"backend": "cpu", "answer": "chosen", "detail": kernel}],
        "eight_bits": None,
    }
    both = ["--precision", "bf16,fp8_raw", "--pass", "fwd,bwd"]
    done = octet("explain", "--shape", "1,2,2,64,64,64", *both, "--backend", "cpu", "--json")
    assert done.returncode == 1, done
    rows = json.loads(done.stdout)
    assert [(r["precision"], r["pass"], r["backend"]) for r in rows] == [
        ("bf16", "fwd", "cpu"),
        ("bf16", "bwd", "cpu"),
        ("fp8_raw", "fwd", "cpu"),
        ("fp8_raw", "bwd", None),
    ]
    assert rows[3]["kernel"] is None and rows[3]["answers"][0]["answer"] == "no"
    assert rows[3]["answers"][0]["detail"].startswith(
        "precision fp8_raw has no backward pass; those that have: f64, f32"
    )


def about_8_bits(card, shape, *arguments):
    """The line of octet explain on 8 bits, and what it is as JSON."""
    asked = "explain", "--card", card, "--shape", shape, *arguments
    (found,) = json.loads(run_ok(*asked, "--json"))
    return run_ok(*asked).splitlines()[-1].removeprefix("  8 bits: "), found["eight_bits"]


def measured_rows():
    """Forward passes of 8 bits, with the result that each belongs to."""
    for path in sorted(ROOT.glob("bench/results/forward-in-8-bits-*.json")):
        result = json.loads(path.read_text())
        yield from ((result, r) for r in result["rows"])


def test_explain_has_the_speeds_of_8_bits_that_were_measured():
    """Of the shape itself where octet's own choice was measured there."""
    rows = {(x["gpu"], r["dim"], r["tokens"], r["causal"]): (x, r) for x, r in measured_rows()}
    assert len(rows) == len(list(measured_rows())) > 0
    for (gpu, dim, tokens, masked), (_, asked) in rows.items():
        shape = f"{asked['batch']},{asked['heads']},{asked['heads']},{tokens},{tokens},{dim}"
        line, found = about_8_bits(gpu, shape, *["--causal"] * masked)
        key = gpu, found["dim"], found["tokens"], found["causal"]
        if "octet" in asked["ms"]:
            assert key == (gpu, dim, tokens, masked) and found["backend"] == "sm90"
        result, r = rows[key]
        prefix = "sm80 " if found["backend"] == "sm80" else ""
        bf16 = r["ms"][f"{prefix}bf16" if prefix else "octet"]
        times = {x: bf16 / r["ms"][prefix + x] for x in ("int8_f16", "int8", "int8_fp8", "fp8")}
        assert found["times_as_fast_as_bf16"] == {x: pytest.approx(y, abs=0.0051) for x, y in times.items()}
        assert (found["card"], found["measured"]) == (gpu, result["date"])
        assert f"measured on {gpu}, {result['date']}, with {found['backend']} at head dim {found['dim']}" in line
        assert line.endswith(f" and {found['tokens']} tokens, {'causal' if found['causal'] else 'no mask'}")


def test_explain_has_the_speeds_of_8_bits_that_are_predicted():
    """Those of the table of predictions, of which it says that nobody has measured them."""
    text = (ROOT / "docs/kernels/general_8bit.md").read_text()
    for card, row in (("RTX 3090", "3090"), ("NVIDIA GeForce RTX 4090", "4090"), ("4090", "4090")):
        numbers = re.search(rf"\| RTX {row} \|(.*)\|", text).group(1).split("|")
        for dim, of_dim in ((64, numbers[:3]), (100, numbers[3:])):
            line, found = about_8_bits(card, f"1,8,8,9000,9000,{dim}", "--causal")
            assert found["times_as_fast_as_bf16"] == dict(
                sorted(zip(("int8_f16", "int8", "int8_fp8"), map(float, of_dim), strict=True), key=lambda x: -x[1])
            )
            assert found["measured"] is None and not found["causal"]
            assert "predicted for RTX " in line and "where nobody has measured it" in line and "no mask" in line


def test_explain_says_where_nothing_is_known_of_8_bits():
    for shape in ("1,8,8,9000,9000,256", "1,8,8,1,9000,128", "1,8,8,500,500,64"):
        line, found = about_8_bits("A100", shape)
        assert line == "neither measured nor predicted for this shape on A100" and found is None
    plain = run_ok("explain", "--shape", "1,8,8,9000,9000,64")
    backward = run_ok("explain", "--shape", "1,8,8,9000,9000,64", "--pass", "bwd", "--card", "A100")
    assert "8 bits" not in plain + backward
    done = octet("explain", "--shape", "1,8,8,9000,9000,64", "--card", "Arc A770")
    assert done.returncode == 2 and '--card: found "Arc A770", allowed: ' in done.stderr and "A100" in done.stderr


@pytest.mark.parametrize(
    "precision, dtypes",
    [
        ("bf16", ["f32", "f16", "bf16", "e4m3"]),
        ("fp8", ["f32", "f16", "bf16", "e4m3"]),
        ("f64", ["f64", "f32", "f16", "bf16", "e4m3"]),
    ],
)
@pytest.mark.parametrize("passes", ["fwd", "bwd"])
def test_every_type_that_explain_names_is_taken(precision, dtypes, passes):
    for dtype in dtypes:
        assert ": chosen, " in run_ok(
            "explain", "--shape", "1,2,2,64,64,64", "--precision", precision, "--dtype", dtype, "--pass", passes
        )
    done = octet("explain", "--shape", "1,2,2,64,64,64", "--precision", precision, "--dtype", "f128")
    assert f"allowed with precision {precision}: {', '.join(dtypes)}" in done.stderr


def test_info_says_in_one_line_what_will_run():
    info = json.loads(run_ok("info", "--json"))
    first = run_ok("info").splitlines()[0]
    assert first == f"This machine: {info['summary']}"
    assert info["summary"].startswith(f"CPU kernels {info['cpu']['instruction_set']}; ")
    gpu = [b for b in info["backends"] if b["device"] == "cuda"]
    available = [b["name"] for b in gpu if b["available"]]
    if available:
        assert f"; GPU kernels {'; '.join(available)}; " in info["summary"]
    else:
        reasons = "; ".join(f"{b['name']}: {b['reason']}" for b in gpu) or info["cuda"]
        assert f"; no GPU kernels ({reasons}); " in info["summary"]
    assert info["summary"].endswith(("; XLA handlers for jax", "; no XLA handlers, jax calls Python"))


def test_info():
    info = json.loads(run_ok("info", "--json"))
    assert {"version", "compiler", "cuda", "cpu", "gpus", "backends"} <= set(info)
    gpu_backends = ["sm90", "sm80"] if info["cuda"].startswith("CUDA with") else []
    assert [b["name"] for b in info["backends"]] == [*gpu_backends, "cpu", "reference"]
    text = run_ok("info")
    assert info["version"] in text and info["cuda"] in text
    assert octet("--version").stdout.strip() == info["version"]


@pytest.mark.parametrize(
    "options", [[], ["--smooth"], ["--granularity", "block", "--block", "16"], ["--granularity", "tensor"]]
)
def test_quantize_writes_codes_that_numpy_can_decode(tmp_path, options):
    t = draw(15, sq=64, sk=64)
    out = tmp_path / "out.safetensors"
    text = run_ok("quantize", write_safetensors(tmp_path / "in.safetensors", t), out, "--operand", "k", *options)
    assert "logit error" in text
    got = read_safetensors(out)
    tokens = 64 // got["k_scale"].shape[2]
    x = got["k"] * np.repeat(got["k_scale"], tokens, axis=2) + got.get("k_mean", 0)
    # Half a step of the largest number of a group: 1 / 254 of it.
    assert np.abs(x - t["k"]).max() <= np.abs(t["k"]).max() * 1.3 / 254
    assert np.abs(got["k"]).max() == 127


def test_quantize_normalises_first(tmp_path):
    t = draw(15, sq=64, sk=64)
    dim = t["k"].shape[-1]
    for weight in (np.linspace(0.5, 2, dim), np.linspace(0.5, 2, dim * t["k"].shape[1]).reshape(-1, dim)):
        given = write_safetensors(tmp_path / "in.safetensors", t | {"k_norm": weight.astype(np.float32)})
        out = tmp_path / "out.safetensors"
        how = ("--norm", "rms", "--norm-eps", "0.01", "--norm-weight", "k_norm")
        text = run_ok("quantize", given, out, "--operand", "k", *how)
        assert "logit error" not in text  # q has weights of its own
        got = read_safetensors(out)
        x = t["k"].astype(np.float64)
        want = x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.01) * weight.reshape(-1, 1, dim)
        # Half a step, and what the norm rounds.
        assert (np.abs(got["k"] * got["k_scale"] - want) <= 0.501 * got["k_scale"]).all()
    rejected = octet("quantize", given, out, "--operand", "k", *how[2:])
    assert rejected.returncode == 2 and "--norm-eps, --norm-weight: given without --norm" in rejected.stderr
    t["k_norm"] = np.ones((1, 1, 1, dim), np.float32)
    given = write_safetensors(tmp_path / "in.safetensors", t)
    rejected = octet("quantize", given, out, "--operand", "k", *how)
    assert rejected.returncode == 2 and "k_norm has the shape [1, 1, 1, " in rejected.stderr


def test_quantize_of_a_single_npy(tmp_path):
    np.save(tmp_path / "x.npy", draw(16)["v"])
    run_ok(
        "quantize",
        tmp_path / "x.npy",
        tmp_path / "out",
        "--operand",
        "v",
        "--format",
        "uint8",
        "--zero-point",
        "float",
        "--granularity",
        "channel",
    )
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["v.npy", "v_scale.npy", "v_zero_point.npy"]
    codes, scale, zero = (np.load(tmp_path / "out" / f"v{s}.npy") for s in ("", "_scale", "_zero_point"))
    assert rel_l2(codes * scale + zero, draw(16)["v"]) < 0.01


def test_check_and_study_fit_a_terminal(tmp_path, small):
    """At most 80 columns, whatever the numbers: with NaN and saturated elements, and with long names of files."""
    t = draw(13)
    t["q"][0, 0, 5, 0] = np.nan
    t["v"][1] *= 1e6  # more than float16 can hold
    hard = write_safetensors(tmp_path / ("a_long_name_" * 8 + ".safetensors"), t)
    every = ["--precision", "all", "--pass", "fwd,bwd,jvp"]
    text = run_ok("check", small, hard, *every, "--out-dtype", "f16")
    assert " saturated" in text and " nan" in text and "no such pass: " in text and "worst of 2 files" in text
    text += run_ok("study", small, "--sweep").partition("\n")[2]  # after the roundings, which --round takes as they are
    wide = [line for line in text.splitlines() if len(line) > 80 and not line.endswith(".safetensors")]
    assert not wide, wide
    assert {line.split("  ")[0] for line in text.splitlines()} >= {"fwd", "bwd", "jvp"}
    for name, shape in (("q", "head 4, token 33"), ("k", "head 2, token 33"), ("v", "head 2, token 33")):
        assert f"\n{name} [batch 2, {shape}, dim 16] f32\n" in text


@pytest.mark.parametrize("command", ["check", "study"])
def test_help_explains_the_columns(small, command):
    heading = {"check": "cos ", "study": "outward ulps"}[command]
    options = {"check": ["--pass", "fwd"], "study": ["--sweep"]}[command]
    explained = run_ok(command, "--help").split("Columns:\n")[1]
    assert all(len(line) <= 80 for line in explained.splitlines())
    lines = [line for line in run_ok(command, small, *options).splitlines() if heading in line]
    titles = [title for title in lines[0].split("  ") if title]
    assert len(titles) > 4
    for title in titles:
        title = title.strip()
        assert title in ("precision", "tensor") or title.removeprefix("o ").removeprefix("dq ") in explained, title


def on_a_terminal(*arguments):
    """What the command writes to a terminal that is its standard error."""
    ours, theirs = os.openpty()
    with subprocess.Popen([OCTET, *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=theirs) as process:
        os.close(theirs)
        written = b""
        try:
            while some := os.read(ours, 4096):
                written += some
        except OSError:  # the end of a terminal whose other side is closed
            pass
    os.close(ours)
    assert process.returncode == 0, written
    return written.decode()


@pytest.mark.parametrize("command", ["check", "bench", "study"])
def test_progress_is_shown_at_once(small, command):
    """Before the file is read, and while float64 is computed, which takes longest."""
    arguments = {"check": [small, "--precision", "f32"], "study": [small], "bench": ["--shape", "1,1,1,16,16,16"]}
    shown = on_a_terminal(command, *arguments[command]).split("\r\033[K")[1:]
    first = {"check": f"[0/1] reading {small}", "study": f"[0/1] float64 of {small}", "bench": "[1/9] 1,1,1,16,16,16"}
    assert shown[0].startswith(first[command]) and shown[-1] == ""
    if command == "check":
        assert any(line.endswith("forward pass in float64") for line in shown)


def test_explain_of_more_tokens_than_there_is_memory():
    """It computes nothing, so nothing is allocated."""
    shape = ["--shape", "1,1,1,1000000000000,1000000000000,64"]
    for each in ("fwd", "bwd", "jvp"):
        assert "cpu: chosen, " in run_ok("explain", *shape, "--pass", each)


def test_explain_exits_with_1_where_no_backend_computes():
    shape = ["--shape", "1,2,2,64,64,64"]
    done = octet("explain", *shape, "--precision", "bf16,fp8_raw", "--pass", "fwd,bwd")
    assert done.returncode == 1 and done.stderr == "octet: no backend computes bwd fp8_raw bf16\n"
    assert "fwd bf16 bf16, shape" in done.stdout and "bwd fp8_raw bf16, shape" in done.stdout
    done = octet("explain", *shape, "--precision", "fp8_raw", "--pass", "bwd", "--json")
    assert done.returncode == 1 and json.loads(done.stdout)[0]["backend"] is None
    run_ok("explain", *shape, "--precision", "all", "--pass", "bwd,jvp")  # all that there are


def test_explain_and_bench_take_any_head_dim():
    assert "shape 1,2,2,64,64,12, its head dim as 16" in run_ok("explain", "--shape", "1,2,2,64,64,12")
    (row,) = json.loads(
        run_ok("bench", "--shape", "1,2,2,64,64,12", "--precision", "bf16", "--json", "--layout", "bshd")
    )
    assert row["shape"] == [1, 2, 2, 64, 64, 12]
    assert row["tflops"] * row["median_seconds"] * 1e12 == pytest.approx(2 * 2 * 64 * 64 * 24)
    assert "layout bshd: [batch, token, head, dim]" in run_ok(
        "bench", "--shape", "1,2,2,64,64,16", "--precision", "f32", "--layout", "bshd"
    )


@pytest.mark.parametrize("dims", [{}, {"d": 12, "e": 20}])
def test_check_finds_the_same_errors_in_either_layout(tmp_path, dims):
    t = draw(21, **dims)
    by_head = write_safetensors(tmp_path / "by_head.safetensors", t)
    by_token = write_safetensors(tmp_path / "by_token.safetensors", {n: x.swapaxes(1, 2) for n, x in t.items()})
    options = ["--precision", "f32,bf16", "--pass", "fwd,bwd,jvp", "--json"]
    want, got = (
        [{k: v for k, v in row.items() if k not in ("file", "seconds")} for row in json.loads(text)]
        for text in (run_ok("check", by_head, *options), run_ok("check", by_token, *options, "--layout", "bshd"))
    )
    assert [[row[k] for k in ("pass", "precision", "tensor", "nan")] for row in want] == [
        [row[k] for k in ("pass", "precision", "tensor", "nan")] for row in got
    ]
    for a, b in zip(want, got, strict=True):
        for figure in ("cos", "rel_l1", "rel_l2", "max_abs", "worst_head_rel_l2"):
            assert a[figure] == pytest.approx(b[figure], rel=1e-6)  # sums of float64 in another order
    text = run_ok("check", by_token, "--precision", "f32", "--layout", "bshd")
    assert f"q [batch 2, token 33, head 4, dim {dims.get('d', 16)}] f32" in text
    study = json.loads(run_ok("study", by_head, "--json"))[0]["rel_l2"]
    assert set(study) == {"o", "dq", "dk", "dv"} and max(study.values()) < 0.02
