"""octet run against NumPy."""

import json

import numpy as np
import pytest
from conftest import (
    attention,
    causal,
    draw,
    header_bytes,
    octet,
    read_header,
    read_safetensors,
    rel_l2,
    run_ok,
    window,
    write_safetensors,
)

# The error that float32 sums of a few dozen terms make, with an order of magnitude to spare.
F32 = 2e-6


def check(outputs, want, names):
    assert sorted(outputs) == sorted(names)
    for name in names:
        assert outputs[name].shape == want[name].shape, name
        assert rel_l2(outputs[name], want[name]) < F32, name


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(
    "options, names",
    [
        ([], ["o", "lse"]),
        (["--backward"], ["o", "lse", "dq", "dk", "dv"]),
        (["--jvp"], ["o", "lse", "to", "tlse"]),
        (["--backward", "--jvp"], ["o", "lse", "dq", "dk", "dv", "to", "tlse"]),
    ],
)
def test_passes_in_f32_agree_with_numpy(tmp_path, small, options, names, backend):
    out = tmp_path / "out.safetensors"
    run_ok("run", small, out, "--precision", "f32", "--backend", backend, *options)
    check(read_safetensors(out), attention(draw(7)), names)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("shape", [(4,), (2, 4)])
@pytest.mark.parametrize("moved", [False, True])
def test_sinks_their_tangents_and_dlse_are_read_where_they_are(tmp_path, shape, backend, moved):
    t, random = draw(8, sq=40, sk=57), np.random.default_rng(9)
    t |= {
        "sinks": (4 + random.standard_normal(shape)).astype(np.float32),
        "dlse": random.standard_normal((2, 4, 40)).astype(np.float32),
    }
    t |= {"tsinks": random.standard_normal(shape).astype(np.float32)} if moved else {}
    out = tmp_path / "out.safetensors"
    run_ok("run", write_safetensors(tmp_path / "in.safetensors", t), out, "--backward", "--jvp", "--backend", backend)
    check(read_safetensors(out), attention(t), ["o", "lse", "dq", "dk", "dv", "dsinks", "to", "tlse"])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("shape", [(4,), (2, 4)])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_softcap_and_slopes_follow_their_formula(tmp_path, shape, backend, softcap):
    t, random = draw(8, sq=40, sk=57), np.random.default_rng(9)
    t |= {
        "alibi_slopes": (0.1 * random.standard_normal(shape)).astype(np.float32),
        "sinks": (4 + random.standard_normal(shape)).astype(np.float32),
    }
    out = tmp_path / "out.safetensors"
    options = ["--softcap", str(softcap)] if softcap else []
    file = write_safetensors(tmp_path / "in.safetensors", t)
    run_ok("run", file, out, "--backward", "--jvp", "--backend", backend, "--causal=bottom-right", *options)
    want = attention(t, causal(40, 57, bottom_right=True), softcap=softcap)
    check(read_safetensors(out), want, ["o", "lse", "dq", "dk", "dv", "dsinks", "to", "tlse"])


def test_check_caps_what_it_compares_with(tmp_path):
    t = draw(8) | {"alibi_slopes": np.full(4, 0.1, np.float32)}
    file = write_safetensors(tmp_path / "in.safetensors", t)
    rows = json.loads(run_ok("check", file, "--precision", "f32", "--pass", "fwd,bwd,jvp", "--softcap", "2", "--json"))
    assert [row["rel_l2"] < F32 for row in rows] == [True] * len(rows)


def test_dropout_drops_by_its_seed(tmp_path):
    t = draw(8, sq=48, sk=48, e=48)
    t["v"] = np.broadcast_to(np.eye(48, dtype=np.float32), (2, 2, 48, 48)).copy()  # so that o is P
    file = write_safetensors(tmp_path / "in.safetensors", t)

    def dropped(seed):
        out = tmp_path / "out.safetensors"
        run_ok("run", file, out, "--backward", "--dropout", "0.25", "--dropout-seed", seed)
        return read_safetensors(out)

    found, p = dropped("7,1"), attention(t)["o"]
    kept = found["o"] != 0
    assert 0.72 < kept.mean() < 0.78  # 18432 elements: seven standard deviations
    np.testing.assert_allclose(found["o"], np.where(kept, p / 0.75, 0), rtol=1e-4)
    dv = (found["o"].swapaxes(-1, -2) @ t["do"]).reshape(2, 2, 2, 48, 48).sum(2)
    np.testing.assert_allclose(found["dv"], dv, atol=1e-4)
    np.testing.assert_array_equal(dropped("7,1")["o"], found["o"])
    assert (dropped("7,3")["o"] != found["o"]).any() and (dropped("8,1")["o"] != found["o"]).any()
    # A sequence takes one offset, so the first of this call is the second of that one.
    np.testing.assert_array_equal(dropped("7,2")["o"][0] != 0, kept[1])
    arguments = ["--precision", "f32", "--pass", "fwd,bwd,jvp", "--dropout", "0.5", "--json"]
    assert all(row["rel_l2"] < F32 for row in json.loads(run_ok("check", file, *arguments)))


@pytest.mark.parametrize(
    "options, message",
    [
        (["--dropout", "1"], "dropout_p: found 1, allowed: 0 for none, or "),
        (["--dropout-seed", "3"], "--dropout-seed: belongs to --dropout, which drops nothing"),
        (["--dropout", ".1", "--dropout-seed", "1,2,3"], '--dropout-seed: found "1,2,3", expected SEED or SEED,OFFSET'),
    ],
)
def test_dropouts_that_are_none_are_rejected(tmp_path, small, options, message):
    done = octet("run", small, tmp_path / "out.safetensors", *options)
    assert done.returncode == 2 and message in done.stderr


def test_softcaps_that_are_none_are_rejected(tmp_path, small):
    done = octet("run", small, tmp_path / "out.safetensors", "--softcap", "-3")
    assert done.returncode == 2 and "softcap: found -3, allowed: positive and finite" in done.stderr


@pytest.mark.parametrize(
    "name, shape, message",
    [
        ("alibi_slopes", (3,), "alibi_slopes: shape [1, 3, 1, 1], expected [1, 4, 1, 1]"),
        ("alibi_slopes", (1, 4, 1, 1), "alibi_slopes: shape [1, 4, 1, 1], expected [head] or [batch, head]"),
        ("sinks", (3,), "sinks: shape [1, 3, 1, 1], expected [1, 4, 1, 1]"),
        ("sinks", (1, 4, 1, 1), "sinks: shape [1, 4, 1, 1], expected [head] or [batch, head]"),
        ("tsinks", (3,), "tsinks: shape [1, 3, 1, 1], expected"),
        ("tsinks", (1, 4, 1, 1), "tsinks: shape [1, 4, 1, 1], expected [head] or [batch, head]"),
        ("tsinks", (4,), "tsinks: given without sinks"),
        (
            "dlse",
            (2, 4, 33, 1),
            "dlse: shape [2, 4, 33, 1], expected the dimensions of q, shape [2, 4, 33, 16], but the last",
        ),
        ("dlse", (2, 4, 32), "dlse: shape [2, 4, 32, 1], expected [2, 4, 33, 1]"),
    ],
)
def test_sinks_their_tangents_and_dlse_of_another_shape_are_rejected(tmp_path, name, shape, message):
    t = draw(8) | {name: np.zeros(shape, np.float32)}
    if name == "tsinks" and "without" not in message:
        t["sinks"] = np.zeros(4, np.float32)
    file = write_safetensors(tmp_path / "in.safetensors", t)
    done = octet("run", file, tmp_path / "out.safetensors", "--backward", "--jvp")
    assert done.returncode != 0 and message in done.stderr


def test_check_compares_dsinks(tmp_path):
    t = draw(8) | {"sinks": np.full(4, 3, np.float32)}
    rows = json.loads(
        run_ok(
            "check", write_safetensors(tmp_path / "in.safetensors", t), "--precision", "f32", "--pass", "bwd", "--json"
        )
    )
    assert [row["rel_l2"] < F32 for row in rows if row["tensor"] == "dsinks"] == [True]


@pytest.mark.parametrize(
    "option, sq, sk, seen",
    [
        (["--causal"], 40, 40, causal(40, 40)),
        (["--causal=top-left"], 40, 57, causal(40, 57)),
        (["--causal=bottom-right"], 40, 57, causal(40, 57, True)),
        (["--window", "5,2"], 40, 40, window(40, 5, 2)),
    ],
)
def test_masks_agree_with_numpy(tmp_path, option, sq, sk, seen):
    t = draw(3, sq=sq, sk=sk)
    out = tmp_path / "out.safetensors"
    run_ok("run", write_safetensors(tmp_path / "in.safetensors", t), out, "--backward", "--jvp", *option)
    check(read_safetensors(out), attention(t, seen), ["o", "lse", "dq", "dk", "dv", "to", "tlse"])


def test_scale_and_a_head_dim_of_v_that_differs(tmp_path):
    t = draw(4, d=24, e=40)
    out = tmp_path / "out.safetensors"
    run_ok("run", write_safetensors(tmp_path / "in.safetensors", t), out, "--scale", "0.5", "--backward")
    check(read_safetensors(out), attention(t, scale=0.5), ["o", "lse", "dq", "dk", "dv"])


def test_three_dimensions_are_one_batch_and_stay_three(tmp_path):
    t = {name: x[0] for name, x in draw(5).items()}
    out = tmp_path / "out.safetensors"
    run_ok("run", write_safetensors(tmp_path / "in.safetensors", t), out, "--backward")
    want = {name: x[0] for name, x in attention({name: x[None] for name, x in t.items()}).items()}
    check(read_safetensors(out), want, ["o", "lse", "dq", "dk", "dv"])


def test_npy_in_and_out(tmp_path):
    t = draw(6)
    (tmp_path / "in").mkdir()
    for name, x in t.items():
        np.save(tmp_path / "in" / f"{name}.npy", x)
    run_ok("run", tmp_path / "in", tmp_path / "out", "--backward", "--jvp")
    names = ["o", "lse", "dq", "dk", "dv", "to", "tlse"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(f"{n}.npy" for n in names)
    check({n: np.load(tmp_path / "out" / f"{n}.npy") for n in names}, attention(t), names)


@pytest.mark.parametrize(
    "in_type, option, out_type",
    [
        ("f32", [], "F32"),
        ("f16", [], "F16"),
        ("bf16", [], "BF16"),
        ("f32", ["--out-dtype", "bf16"], "BF16"),
        ("bf16", ["--out-dtype", "f32"], "F32"),
        ("f64", [], "F64"),
    ],
)
def test_outputs_have_the_type_of_inputs_unless_asked_otherwise(tmp_path, in_type, option, out_type):
    t = draw(8, dtype={"f16": np.float16, "f64": np.float64}.get(in_type, np.float32))
    source = write_safetensors(tmp_path / "in.safetensors", t, bf16=in_type == "bf16")
    out = tmp_path / "out.safetensors"
    run_ok("run", source, out, "--backward", *option)
    assert {name: entry["dtype"] for name, entry in read_header(out).items()} == {
        "o": out_type,
        "dq": out_type,
        "dk": out_type,
        "dv": out_type,
        "lse": "F32",
    }


@pytest.mark.parametrize("precision", ["f16", "bf16", "int8", "int8_f16", "int8_fp8", "fp8", "sagebwd"])
def test_every_precision_runs_and_is_near(tmp_path, precision):
    t = draw(9, sq=128, sk=128, d=64, e=64)
    out = tmp_path / "out.safetensors"
    run_ok("run", write_safetensors(tmp_path / "in.safetensors", t), out, "--precision", precision)
    assert rel_l2(read_safetensors(out)["o"], attention(t)["o"]) < 0.1


def test_run_tells_what_it_wrote_and_which_kernels_ran(tmp_path, small):
    out = tmp_path / "out.safetensors"
    kernel = (
        run_ok("explain", "--shape", "2,4,2,33,33,16", "--precision", "bf16").split("cpu: chosen, ")[1].splitlines()[0]
    )
    told = run_ok("run", small, out, "--precision", "bf16", "--out-dtype", "f16")
    assert told == f"{out}: o f16, lse f32; precision bf16, fwd by cpu ({kernel})\n"
    told = run_ok("run", small, out, "--backward", "--jvp")
    assert (
        told.startswith(f"{out}: o f32, lse f32, dq f32, dk f32, dv f32, to f32, tlse f32; precision f32, jvp by cpu (")
        and "), bwd by cpu (" in told
    )
    assert run_ok("run", small, out, "--quiet") == ""


@pytest.mark.parametrize(
    "precision, out_type",
    [
        ([], "BF16"),
        (["--precision", "bf16"], "BF16"),
        (["--precision", "fp8_raw"], "F8_E4M3"),
        (["--out-dtype", "f32"], "F32"),
    ],
)
def test_e4m3_in_needs_no_output_type(tmp_path, precision, out_type):
    t = draw(17, sq=64, sk=64, companions=False)
    codes, values = np.arange(0x7F, dtype=np.uint8), []
    for code in codes:  # sign, 4 bits of exponent, 3 of mantissa
        exponent, mantissa = code >> 3, (code & 7) / 8
        values.append(mantissa * 2.0**-6 if exponent == 0 else (1 + mantissa) * 2.0 ** (int(exponent) - 7))
    header, data = {}, b""
    for name, x in t.items():
        nearest = np.abs(np.abs(x)[..., None] - values).argmin(-1).astype(np.uint8)
        t[name] = np.copysign(np.array(values)[nearest], x).astype(np.float32)
        header[name] = {"dtype": "F8_E4M3", "shape": list(x.shape), "data_offsets": [len(data), len(data) + x.size]}
        data += (nearest | (np.signbit(x).astype(np.uint8) << 7)).tobytes()
    source, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    source.write_bytes(header_bytes(header) + data)
    run_ok("run", source, out, *precision)
    assert read_header(out)["o"]["dtype"] == out_type
    if out_type != "F8_E4M3":
        assert rel_l2(read_safetensors(out)["o"], attention(t)["o"]) < 0.1


def test_the_output_is_readable_by_others_as_the_umask_says(tmp_path, small):
    out = tmp_path / "out.safetensors"
    run_ok("run", small, out)
    assert out.stat().st_mode & 0o777 == small.stat().st_mode & 0o777


def test_an_old_output_is_replaced(tmp_path, small):
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"old")
    run_ok("run", small, out)
    assert "o" in read_safetensors(out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.safetensors", "out.safetensors"]


RESULTS = ["o", "lse", "dq", "dk", "dv", "to", "tlse"]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("d, e", [(12, 12), (1, 3), (16, 20), (255, 8)])
def test_any_head_dim(tmp_path, backend, d, e):
    """Results have the head dims that were given, and the default scale is that of q's."""
    t = draw(31, d=d, e=e)
    out = tmp_path / "out.safetensors"
    run_ok("run", write_safetensors(tmp_path / "in.safetensors", t), out, "--backward", "--jvp", "--backend", backend)
    check(read_safetensors(out), attention(t), RESULTS)


@pytest.mark.parametrize("batch", [True, False])
@pytest.mark.parametrize("d, e", [(16, 16), (12, 20)])
def test_either_layout(tmp_path, batch, d, e):
    """[batch, token, head, dim] in, the same out; lse is [batch, head, token] in both."""
    t = draw(32, b=2 if batch else 1, sk=45, d=d, e=e)
    want = attention(t, causal(33, 45, bottom_right=True))
    swapped = {name: x.swapaxes(1, 2) for name, x in t.items()}
    source = write_safetensors(tmp_path / "in.safetensors", swapped if batch else {n: x[0] for n, x in swapped.items()})
    out = tmp_path / "out.safetensors"
    run_ok("run", source, out, "--backward", "--jvp", "--layout", "bshd", "--causal=bottom-right")
    want = {name: x if x.ndim < 4 else x.swapaxes(1, 2) for name, x in want.items()}
    check(read_safetensors(out), want if batch else {n: x[0] for n, x in want.items()}, RESULTS)
