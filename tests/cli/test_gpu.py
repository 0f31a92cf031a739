"""The command on a GPU, against NumPy and against its own answers on the CPU; skipped where no GPU can compute."""

import json

import pytest
from conftest import (
    attention,
    causal,
    draw,
    from_bf16,
    octet,
    read_header,
    read_safetensors,
    rel_l2,
    run_ok,
    to_bf16,
    write_safetensors,
)

GPU = [b["name"] for b in json.loads(run_ok("info", "--json"))["backends"] if b["device"] == "cuda" and b["available"]]
pytestmark = pytest.mark.skipif(not GPU, reason="no GPU that octet computes on")

# Three times what rounding a result to bf16 costs.
BF16 = 3 * 2**-9


@pytest.fixture
def bf16_file(tmp_path):
    t = {name: from_bf16(to_bf16(x)) for name, x in draw(21, sq=200, sk=200, d=64, e=64).items()}
    return write_safetensors(tmp_path / "in.safetensors", t, bf16=True), t


@pytest.mark.parametrize(
    "where",
    [*(["--backend", name] for name in GPU), ["--device", "cuda"], ["--device", "cuda:0", "--deterministic"]],
)
def test_run_agrees_with_numpy(tmp_path, bf16_file, where):
    source, t = bf16_file
    run_ok("run", source, tmp_path / "out.safetensors", "--causal", "--backward", *where)
    got, want = read_safetensors(tmp_path / "out.safetensors"), attention(t, causal(200, 200))
    assert sorted(got) == ["dk", "dq", "dv", "lse", "o"]
    assert {entry["dtype"] for name, entry in read_header(tmp_path / "out.safetensors").items() if name != "lse"} == {
        "BF16"
    }
    for name, x in got.items():
        assert rel_l2(x, want[name]) < BF16, name


def test_check_finds_the_same_errors_as_on_the_cpu(bf16_file):
    arguments = ["check", bf16_file[0], "--json", "--causal", "--precision", "bf16,f16", "--pass", "fwd,bwd"]
    on_gpu, on_cpu = (json.loads(run_ok(*arguments, *where)) for where in (["--backend", "sm90"], []))
    assert [r["backend"] for r in on_gpu] == ["sm90"] * 10 and [r["backend"] for r in on_cpu] == ["cpu"] * 10
    for a, b in zip(on_gpu, on_cpu, strict=True):
        assert (a["pass"], a["precision"], a["tensor"]) == (b["pass"], b["precision"], b["tensor"])
        if a["tensor"] != "lse":  # f32 on both: as near as its sums
            assert a["rel_l2"] < 1.5 * b["rel_l2"], a
        assert a["nan"] == 0 and a["seconds"] > 0


def test_bench_times_more_work_as_longer(tmp_path):
    shapes = [option for tokens in (1024, 8192) for option in ("--shape", f"1,8,8,{tokens},{tokens},128")]
    rows = json.loads(
        run_ok("bench", *shapes, "--backend", "sm90", "--precision", "bf16", "--pass", "fwd,bwd", "--json")
    )
    assert [r["backend"] for r in rows] == ["sm90"] * 4 and all(r["min_seconds"] <= r["median_seconds"] for r in rows)
    small, large = rows[:2], rows[2:]
    for a, b in zip(small, large, strict=True):
        assert a["pass"] == b["pass"] and 4 * a["median_seconds"] < b["median_seconds"] < 1e-2
        assert 1 < b["tflops"] < 2000


def test_bench_of_all_precisions_leaves_out_what_the_gpu_has_not():
    found = {
        r["precision"] for r in json.loads(run_ok("bench", "--shape", "1,2,2,256,256,64", "--device", "cuda", "--json"))
    }
    assert {"f32", "f16", "bf16"} <= found and not {"f64"} & found


def test_what_sm90_lacks_runs_on_sm80(bf16_file):
    arguments = ["--precision", "f32,bf16", "--pass", "fwd,bwd,jvp", "--softcap", "2", "--device", "cuda"]
    rows = json.loads(run_ok("check", bf16_file[0], "--json", *arguments))
    assert {r["backend"] for r in rows} == {"sm80"} and {r["pass"] for r in rows} == {"fwd", "bwd", "jvp"}
    assert all(r["rel_l2"] < BF16 and r["nan"] == 0 for r in rows), rows


def test_explain_chooses_the_gpu_for_tensors_there():
    text = run_ok("explain", "--shape", "1,8,8,4096,4096,128", "--device", "cuda")
    assert f"{GPU[0]}: chosen" in text and "cpu: no, the tensors are on cuda" in text


@pytest.mark.parametrize("name", GPU)
def test_explain_names_the_kernel_of_a_backend_or_what_it_lacks(name):
    arguments = ["--shape", "1,8,8,512,512,64", "--precision", "f64,f32,bf16,int8,sagebwd", "--pass", "fwd,bwd,jvp"]
    rows = json.loads(run_ok("explain", *arguments, "--backend", name, "--json"))
    found = {(row["precision"], row["pass"]): row["kernel"] or row["answers"][0]["detail"] for row in rows}
    has = {
        "sm90": "f16, bf16, int8, int8_f16, int8_fp8, fp8, fp8_raw",
        "sm80": "f32, f16, bf16, int8, int8_f16, int8_fp8, fp8, fp8_raw, sagebwd",
    }[name]
    assert found["bf16", "fwd"].startswith("forward bf16") and found["bf16", "bwd"].startswith("backward in f16")
    assert found["f64", "fwd"] == f"it has no f64; it has: {has}"
    if name == "sm80":
        assert found["f32", "fwd"].startswith("forward f32 in two f16 halves, mma.sync")
        assert found["bf16", "jvp"].startswith("jvp") and found["f32", "jvp"].startswith("jvp")
        assert found["int8", "fwd"].startswith("forward int8, mma.sync")
        assert found["int8", "jvp"] == "it has no int8 jvp pass; it has: forward, backward"
        assert found["sagebwd", "fwd"].startswith("forward sagebwd, mma.sync")
    else:
        assert found["sagebwd", "fwd"] == f"it has no sagebwd; it has: {has}"
        assert found["f32", "fwd"] == f"it has no f32; it has: {has}"
        assert found["bf16", "jvp"] == "it has no jvp pass; it has: forward, backward"
        assert found["int8", "bwd"] == "it has no int8 backward pass; it has: forward"


def test_what_the_gpu_cannot_do_is_rejected_in_one_line(tmp_path, bf16_file):
    for arguments, message in [
        (["--precision", "f32"], "sm90: it has no f32"),
        (["--device", "cuda:200"], "cuda:200: invalid device ordinal"),
        (["--device", "cpu"], "the tensors are on cpu; it works on cuda tensors"),
        (["--jvp"], "sm90: it has no jvp pass"),
    ]:
        done = octet("run", bf16_file[0], tmp_path / "out.safetensors", "--backend", "sm90", *arguments)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and message in done.stderr, done.stderr
    done = octet("run", bf16_file[0], tmp_path / "out.safetensors", "--backend", "sm80", "--precision", "f64")
    assert done.returncode == 2 and "sm80: it has no f64; it has: f32, f16, bf16, int8" in done.stderr, done.stderr
    assert not (tmp_path / "out.safetensors").exists()
