"""Attention of numpy arrays against the definition: shapes, strides, layouts, masks, every pass."""

import re

import exact
import ml_dtypes
import numpy as np
import octet
import pytest
from cases import cases
from hypothesis import given, settings
from hypothesis import strategies as st


def back(x, layout):
    return x if layout == "bhsd" else x.transpose(0, 2, 1, 3)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_every_pass_agrees_with_the_definition(dtype):
    @settings(max_examples=150, deadline=None)
    @given(cases(dtype))
    def holds(case):
        x = {name: case.in_layout(name) for name in case.arrays}
        a = case.arrays
        keywords = case.keywords | {"mask": case.mask, "layout": case.layout}
        tangents = a["tq"], a["tk"], a["tv"]
        want = exact.attention(a["q"], a["k"], a["v"], seen=case.seen, do=a["do"], tangents=tangents, **case.exact())
        bound = exact.bounds(
            a["q"], a["k"], a["v"], do=a["do"], tangents=tangents, **case.exact(), **exact.rounding(np.dtype(dtype))
        )
        o, lse = octet.attention(x["q"], x["k"], x["v"], return_lse=True, **keywords)
        assert o.dtype == dtype and lse.dtype == dtype
        got = {"o": back(o, case.layout), "lse": lse}
        gradients = octet.attention_vjp(x["q"], x["k"], x["v"], x["do"], **keywords)
        got |= {name: back(g, case.layout) for name, g in zip(("dq", "dk", "dv"), gradients, strict=True)}
        o, to = octet.attention_jvp(x["q"], x["k"], x["v"], x["tq"], x["tk"], x["tv"], **keywords)
        got |= {"to": back(to, case.layout)}
        for name in got:
            exact.expect_close(got[name], want[name], bound[name], name)
        exact.expect_close(back(o, case.layout), want["o"], bound["o"], "o of the jvp")

    holds()


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_sinks_and_derivatives_of_lse_agree_with_the_definition(dtype):
    @settings(max_examples=60, deadline=None)
    @given(cases(dtype), st.booleans())
    def holds(case, has_sinks):
        x = {name: case.in_layout(name) for name in case.arrays}
        a = case.arrays
        batch, heads, queries, _ = a["q"].shape
        random = np.random.default_rng(queries)
        dlse = random.standard_normal((batch, heads, queries)).astype(dtype)
        sinks, tsinks = (random.standard_normal((2, heads)).astype(dtype)) if has_sinks else (None, None)
        about = {"do": a["do"], "dlse": dlse, "tangents": (a["tq"], a["tk"], a["tv"]), "sinks": sinks, "tsinks": tsinks}
        want = exact.attention(a["q"], a["k"], a["v"], seen=case.seen, **about, **case.exact())
        bound = exact.bounds(a["q"], a["k"], a["v"], **about, **case.exact(), **exact.rounding(np.dtype(dtype)))
        keywords = case.keywords | {"mask": case.mask, "layout": case.layout, "sinks": sinks}
        o, lse = octet.attention(x["q"], x["k"], x["v"], return_lse=True, **keywords)
        got = {"o": back(o, case.layout), "lse": lse}
        gradients = octet.attention_vjp(x["q"], x["k"], x["v"], x["do"], dlse=dlse, **keywords)
        assert len(gradients) == 3 + has_sinks
        got |= dict(zip(("dq", "dk", "dv"), (back(g, case.layout) for g in gradients[:3]), strict=True))
        got |= {"dsinks": gradients[3]} if has_sinks else {}
        tangents = x["tq"], x["tk"], x["tv"]
        o, to, lse, tlse = octet.attention_jvp(
            x["q"], x["k"], x["v"], *tangents, tsinks=tsinks, return_lse=True, **keywords
        )
        got |= {"to": back(to, case.layout), "tlse": tlse}
        for name in got:
            exact.expect_close(got[name], want[name], bound[name], name)
        exact.expect_close(lse, want["lse"], bound["lse"], "lse of the jvp")

    holds()


def test_sinks_of_any_float_type():
    random = np.random.default_rng(0)
    q, k, v, do = (random.standard_normal((1, 4, 9, 8)).astype(np.float32) for _ in range(4))
    sinks = random.standard_normal(4).astype(ml_dtypes.bfloat16)
    wide = sinks.astype(np.float32)
    np.testing.assert_array_equal(octet.attention(q, k, v, sinks=sinks), octet.attention(q, k, v, sinks=wide))
    *_, narrow = octet.attention_vjp(q, k, v, do, sinks=sinks)
    assert narrow.dtype == sinks.dtype and octet.attention_vjp(q, k, v, do, sinks=wide)[3].dtype == np.float32
    for wrong, words in ((wide.astype(int), "sinks: dtype int64, allowed: a float type"),
                         (wide[None], r"sinks: shape \[1, 4\], expected \[heads\]"),
                         (wide[:3], r"sinks: shape \[1, 3, 1, 1\], expected \[1, 4, 1, 1\]")):  # fmt: skip
        with pytest.raises(octet.InvalidArgument, match=words):
            octet.attention(q, k, v, sinks=wrong)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_sixteen_bits(dtype):
    random = np.random.default_rng(1)
    q, k, v, do, tq, tk, tv = (random.standard_normal((2, 4, 50, 32)).astype(dtype) for _ in range(7))
    tangents = (tq, tk, tv)
    seen = exact.visible(50, 50, True)
    want = exact.attention(q, k, v, seen=seen, do=do, tangents=tangents)
    bound = exact.bounds(q, k, v, do=do, tangents=tangents, **exact.rounding(np.dtype(dtype)))
    o, lse = octet.attention(q, k, v, causal=True, return_lse=True)
    dq, dk, dv = octet.attention_vjp(q, k, v, do, causal=True)
    _, to = octet.attention_jvp(q, k, v, *tangents, causal=True)
    for name, got in {"o": o, "dq": dq, "dk": dk, "dv": dv, "to": to}.items():
        assert got.dtype == dtype
        exact.expect_close(got, want[name], bound[name], name)
    exact.expect_close(lse, want["lse"], bound["lse"], "lse")


def test_packed_sequences_are_separate():
    random = np.random.default_rng(2)
    lengths = [(5, 9), (0, 3), (17, 17), (1, 0), (30, 64)]
    cu_q, cu_k = (np.cumsum([0] + [pair[i] for pair in lengths]).astype(np.int32) for i in (0, 1))
    q, k, v = (random.standard_normal((n, h, 16)) for n, h in ((cu_q[-1], 4), (cu_k[-1], 2), (cu_k[-1], 2)))
    o, lse = octet.attention_varlen(
        q, k, v, cu_q, cu_k, max_seqlen_q=30, max_seqlen_k=64, causal="bottom_right", return_lse=True
    )
    assert o.shape == q.shape and lse.shape == (4, cu_q[-1])
    for i, (n, m) in enumerate(lengths):
        of_q, of_k = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        one = [x[None].transpose(0, 2, 1, 3) for x in (q[of_q], k[of_k], v[of_k])]
        want = exact.attention(*one, seen=exact.visible(n, m, "bottom_right"))
        bound = exact.bounds(*one, **exact.rounding("float64"))
        exact.expect_close(o[of_q].transpose(1, 0, 2)[None], want["o"], bound["o"], f"o of sequence {i}")
        exact.expect_close(lse[:, of_q][None], want["lse"], bound["lse"], f"lse of sequence {i}")


def test_calls_from_many_threads_do_not_mix():
    from concurrent.futures import ThreadPoolExecutor

    random = np.random.default_rng(3)
    inputs = [[random.standard_normal((1, 2, 40, 16)).astype(np.float32) for _ in range(3)] for _ in range(64)]
    alone = [octet.attention(*x, threads=1) for x in inputs]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda x: octet.attention(*x, threads=1), inputs * 8))
    for i, o in enumerate(together):
        np.testing.assert_array_equal(o, alone[i % len(alone)])


def test_check_measures_what_it_says():
    random = np.random.default_rng(4)
    q, k, v, do, tq, tk, tv = (random.standard_normal((1, 2, 64, 32)).astype(np.float32) for _ in range(7))
    found = octet.check(q, k, v, do=do, tangents=(tq, tk, tv), precision="bf16", causal=True)
    want = exact.attention(q, k, v, seen=exact.visible(64, 64, True), do=do, tangents=(tq, tk, tv))
    got = {"o": octet.attention(q, k, v, precision="bf16", causal=True)}
    got |= dict(zip(("dq", "dk", "dv"), octet.attention_vjp(q, k, v, do, precision="bf16", causal=True), strict=True))
    got |= {"to": octet.attention_jvp(q, k, v, tq, tk, tv, precision="bf16", causal=True)[1]}
    assert set(found) == set(got) | {"lse"}
    for name, x in got.items():
        error = x - want[name]
        assert found[name].rel_l2 == pytest.approx(np.linalg.norm(error) / np.linalg.norm(want[name]), rel=1e-9)
        assert found[name].rel_l1 == pytest.approx(np.abs(error).sum() / np.abs(want[name]).sum(), rel=1e-9)
        assert found[name].max_abs == pytest.approx(np.abs(error).max(), rel=1e-9)
        assert found[name].nan == 0 and 1 - 1e-3 < found[name].cos < 1


def test_info_names_the_backends_and_the_library():
    info = octet.info()
    assert {backend["name"] for backend in info["backends"]} >= {"cpu", "reference"}
    assert info["version"] == octet.__version__ and "liboctet.so" in info["library"]


def test_explain_and_supports_agree_with_the_call():
    q = np.zeros((1, 2, 16, 8), np.float32)
    assert "forward int8" in octet.explain(q, q, q, precision="int8")
    for kind in ("forward", "backward", "jvp"):
        assert octet.supports(q, q, q, kind=kind)
        assert octet.supports(q.astype(ml_dtypes.bfloat16), *2 * [q.astype(ml_dtypes.bfloat16)], kind=kind)
    rejected = octet.supports(q, q, q, kind="jvp", precision="int8")
    with pytest.raises(octet.Unsupported) as raised:
        octet.attention_jvp(q, q, q, q, q, q, precision="int8")
    assert not rejected and rejected.reason == str(raised.value)
    assert not octet.supports(q, q[:, :, :9], q[:, :, :9], causal=True)


@pytest.mark.parametrize("kind", ["forward", "backward", "jvp"])
def test_explain_and_supports_say_why_a_backend_of_gpus_does_not_compute(kind):
    """Arrays of numpy are on the CPU, and a machine may have no GPU at all."""
    q = np.zeros((1, 2, 16, 8), np.float32)
    lines = octet.explain(q, q, q, kind=kind).splitlines()
    backends = octet.info()["backends"]
    assert [line.split(":")[0] for line in lines] == [backend["name"] for backend in backends]
    for backend, line in zip(backends, lines, strict=True):
        if backend["device"] == "cpu":
            continue
        reason = f"{backend['name']}: {backend['reason'] or 'the tensors are on cpu; it works on cuda tensors'}"
        assert line == reason.replace(": ", ": no, ", 1)
        assert octet.supports(q, q, q, kind=kind, backend=backend["name"]).reason.splitlines()[-1].strip() == reason


@pytest.mark.parametrize(
    "precision, option, changes",
    [("bf16", {"bias_correction": "none"}, "dq"), ("bf16", {"bias_correction": "exact_delta"}, "dq"),
     ("bf16", {"bias_correction": "gproj"}, "dq"), ("int8", {"hadamard": "off"}, "o"),
     ("int8", {"backend": "reference", "smooth_q": "on"}, "o")],
)  # fmt: skip
def test_options_of_the_recipe_reach_the_library(precision, option, changes):
    random = np.random.default_rng(5)
    q, k, v, do = (random.standard_normal((1, 2, 64, 32)).astype(ml_dtypes.bfloat16) for _ in range(4))
    with_it = {"precision": precision} | option
    without = {name: x for name, x in with_it.items() if name not in ("bias_correction", "hadamard", "smooth_q")}
    call = octet.attention if changes == "o" else lambda *x, **y: octet.attention_vjp(*x, do, **y)[0]
    assert (call(q, k, v, **with_it) != call(q, k, v, **without)).any()


def test_beta_threads_and_backend_reach_the_library():
    q = np.zeros((2, 2, 256, 8), np.float32)
    with pytest.raises(octet.InvalidArgument, match="beta: found 9, allowed: 2 to 8"):
        octet.attention(q, q, q, precision="bf16", bias_correction="beta", beta=9)
    assert ", 1 threads" in octet.explain(q, q, q, threads=1)
    assert "unfused float64" in octet.explain(q, q, q, backend="reference")


def test_tiles_reach_the_pass_that_they_are_of():
    """Kernels of CPUs have none, which each pass says of the tile that it is given."""
    q = np.zeros((1, 2, 16, 8), np.float32)
    reason = 'cpu, reference: it has no tile "64x32", as its kernels have none to choose from'
    found = octet.tiles(q, q, q, precision="bf16", causal=True)
    assert found["tiles"] == [] and found["default"] is None and found["card"] is None
    assert found["default_is"] is None
    assert re.fullmatch("[0-9a-f]{16}", found["cell"]) and "forward bf16, head dims 8 and 8" in found["call"]
    assert found["cell"] != octet.tiles(q, q, q, precision="bf16", causal=True, kind="backward")["cell"]

    for tile in ("64x32", {"forward": "64x32"}):
        assert reason in octet.supports(q, q, q, tile=tile).reason
        with pytest.raises(octet.Unsupported, match=re.escape(reason)):
            octet.attention(q, q, q, tile=tile)
    octet.attention(q, q, q, tile={"backward": "64x32"})
    octet.attention_vjp(q, q, q, q, tile={"jvp": "64x32"})
    for kind, tile in (("backward", "64x32"), ("backward", {"backward": "64x32"}), ("jvp", "64x32")):
        assert reason in octet.supports(q, q, q, kind=kind, tile=tile).reason
    with pytest.raises(octet.Unsupported, match=re.escape(reason)):
        octet.attention_vjp(q, q, q, q, tile="64x32")
    with pytest.raises(octet.Unsupported, match=re.escape(reason)):
        octet.attention_jvp(q, q, q, q, q, q, tile="64x32")
    with pytest.raises(octet.InvalidArgument, match="tile: found {'sideways': '64x32'}, allowed: "):
        octet.attention(q, q, q, tile={"sideways": "64x32"})
