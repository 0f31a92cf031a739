"""Softcap and the slopes of ALiBi in numpy: their formula in float64, every pass, packed sequences, bad input."""

import ml_dtypes
import numpy as np
import octet
import pytest

random = np.random.default_rng(5)
B, H, G, N, M, D, E = 2, 4, 2, 37, 50, 16, 24


def draw(*shape):
    return random.standard_normal(shape).astype(np.float32)


Q, K, V, DO = draw(B, H, N, D), draw(B, G, M, D), draw(B, G, M, E), draw(B, H, N, E)
TQ, TK, TV = draw(B, H, N, D), draw(B, G, M, D), draw(B, G, M, E)
SLOPES = {"heads": 0.1 * draw(H), "batch": 0.1 * draw(B, H)}
ERROR = {
    "f32": 2e-6,
    "f16": 3e-3,
    "bf16": 0.02,
    "int8": 0.04,
    "int8_f16": 0.03,
    "int8_fp8": 0.07,
    "fp8": 0.12,
    "sagebwd": 0.06,
}


def formula(q, k, v, softcap, slopes, seen=None):
    """o and lse; all in float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    s = q @ np.repeat(k, group, 1).swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if softcap:
        s = softcap * np.tanh(s / softcap)
    if slopes is not None:
        n, m = s.shape[-2:]
        distance = np.abs(np.arange(n)[:, None] + m - n - np.arange(m))
        s = s - slopes.astype(np.float64).reshape(-1, q.shape[1], 1, 1) * distance
    if seen is not None:
        s = np.where(seen, s, -np.inf)
    lse = np.log(np.exp(s).sum(-1))
    return np.exp(s - lse[..., None]) @ np.repeat(v, group, 1), lse


def relative(got, want):
    return np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("precision", ERROR)
@pytest.mark.parametrize("softcap, slopes", [(2.0, None), (0.0, "heads"), (1.5, "batch")])
def test_o_and_lse_follow_the_formula(precision, softcap, slopes, backend):
    slopes = SLOPES.get(slopes)
    seen = np.tril(np.ones((N, M), bool), M - N)
    keywords = {"softcap": softcap, "alibi_slopes": slopes, "causal": "bottom_right"}
    o, lse = octet.attention(Q, K, V, precision=precision, backend=backend, return_lse=True, **keywords)
    want_o, want_lse = formula(Q, K, V, softcap, slopes, seen)
    assert relative(o, want_o) < ERROR[precision]
    assert relative(lse, want_lse) < ERROR[precision]


@pytest.mark.parametrize("slopes", SLOPES)
def test_derivatives_are_those_of_differences(slopes):
    keywords = {"softcap": 1.5, "alibi_slopes": SLOPES[slopes].astype(np.float64), "precision": "f64"}
    q, k, v, do, tq, tk, tv = (x.astype(np.float64) for x in (Q, K, V, DO, TQ, TK, TV))
    h = 1e-5
    difference = [octet.attention(q + s * tq, k + s * tk, v + s * tv, return_lse=True, **keywords) for s in (h, -h)]
    to, tlse = ((a - b) / (2 * h) for a, b in zip(*difference, strict=True))
    found = octet.attention_jvp(q, k, v, tq, tk, tv, return_lse=True, **keywords)
    assert relative(found[1], to) < 1e-8 and relative(found[3], tlse) < 1e-8
    dlse = random.standard_normal(tlse.shape)
    gradients = octet.attention_vjp(q, k, v, do, dlse=dlse, **keywords)
    want = np.sum(do * to) + np.sum(dlse * tlse)
    assert abs(sum(np.sum(g * t) for g, t in zip(gradients, (tq, tk, tv), strict=True)) - want) < 1e-7 * abs(want)
    plain = octet.attention_vjp(q, k, v, do, dlse=dlse, precision="f64")
    assert relative(plain[0], gradients[0]) > 0.1  # the options do something
    for precision, bias_corrections in {
        "f32": ["f16"],
        "bf16": ["f16", "none", "beta", "exact_delta", "gproj"],
    }.items():
        for bias_correction in bias_corrections:
            how = {"softcap": 1.5, "alibi_slopes": SLOPES[slopes], "precision": precision}
            got = octet.attention_vjp(Q, K, V, DO, dlse=dlse.astype(np.float32), bias_correction=bias_correction, **how)
            for a, b in zip(got, gradients, strict=True):
                assert relative(a, b) < ERROR[precision]


def test_packed_sequences_have_distances_of_their_own():
    cu_q, cu_k = np.array([0, 20, 20, 61], np.int32), np.array([0, 31, 45, 80], np.int32)
    q, k, v = draw(61, H, D), draw(80, G, D), draw(80, G, E)
    for slopes in (SLOPES["heads"], 0.1 * draw(3, H)):
        o = octet.attention_varlen(q, k, v, cu_q, cu_k, softcap=2.0, alibi_slopes=slopes)
        for n in (0, 2):
            own = [x[a[n] : a[n + 1]].swapaxes(0, 1)[None] for x, a in ((q, cu_q), (k, cu_k), (v, cu_k))]
            want, _ = formula(*own, 2.0, slopes if slopes.ndim == 1 else slopes[n])
            assert relative(o[cu_q[n] : cu_q[n + 1]].swapaxes(0, 1), want[0]) < ERROR["f32"]


def test_slopes_of_any_float_type_are_taken():
    exact = (SLOPES["heads"] * 64).round() / 64
    want = octet.attention(Q, K, V, alibi_slopes=exact)
    for dtype in (np.float64, np.float16, ml_dtypes.bfloat16):
        assert np.array_equal(octet.attention(Q, K, V, alibi_slopes=exact.astype(dtype)), want)


def test_check_caps_and_subtracts_in_its_exact_result():
    found = octet.check(Q, K, V, do=DO, tangents=(TQ, TK, TV), softcap=2.0, alibi_slopes=SLOPES["batch"])
    assert len(found) == 6 and all(x.rel_l2 < 1e-5 for x in found.values())


@pytest.mark.parametrize(
    "keywords, message",
    [
        ({"softcap": -1.0}, "softcap: found -1, allowed: positive and finite"),
        ({"softcap": float("nan")}, "softcap: found nan, allowed: positive and finite"),
        ({"softcap": "wide"}, "softcap: found 'wide', allowed: a number"),
        ({"alibi_slopes": np.ones(3, np.float32)}, "alibi_slopes: shape [1, 3, 1, 1], expected [1, 4, 1, 1]"),
        ({"alibi_slopes": np.ones((3, 4), np.float32)}, "alibi_slopes: shape [3, 4, 1, 1], expected [2, 4, 1, 1]"),
        ({"alibi_slopes": np.ones((2, 4, 1), np.float32)}, "alibi_slopes: shape [2, 4, 1], expected [heads] or [batch"),
        ({"alibi_slopes": np.ones(4, np.int32)}, "alibi_slopes: dtype int32, allowed: a float type"),
        ({"alibi_slopes": [1.0] * 4}, "alibi_slopes: found list, allowed: numpy.ndarray"),
    ],
)
def test_bad_input_is_rejected(keywords, message):
    for call in (octet.attention, octet.check, octet.explain):
        with pytest.raises(octet.InvalidArgument) as raised:
            call(Q, K, V, **keywords)
        assert message in str(raised.value)
    assert message in octet.supports(Q, K, V, **keywords).reason
