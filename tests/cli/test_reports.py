"""The answers of check, bench, study, explain, info and quantize: their keys, and figures that NumPy can verify."""

import json
import os
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
        assert row["nan"] == 0 and row["backend"] == "cpu" and row["file"] == str(source) and row["seconds"] > 0


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
    }
    rows = json.loads(
        run_ok(
            "explain",
            "--shape",
            "1,2,2,64,64,64",
            "--precision",
            "bf16,fp8_raw",
            "--pass",
            "fwd,bwd",
            "--backend",
            "cpu",
            "--json",
        )
    )
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
