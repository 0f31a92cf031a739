"""octet.quantize and octet.dequantize from numpy, and quantized operands in attention."""

import exact
import ml_dtypes
import numpy as np
import octet
import pytest

TOP = {"i8": 127, "u8": 255, "i4": 7, "e4m3": 448, "e5m2": 57344}


@pytest.fixture
def x():
    return np.random.default_rng(5).standard_normal((2, 3, 70, 16)).astype(np.float32)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_int8_per_token_is_amax_over_127(x, layout):
    given = x if layout == "bhsd" else x.transpose(0, 2, 1, 3)
    found = octet.quantize(given, "q", layout=layout)
    step = np.abs(x).max(-1, keepdims=True) / 127
    assert found.codes.dtype == np.int8 and found.codes.shape == given.shape and found.scale.shape == (2, 3, 70, 1)
    np.testing.assert_allclose(found.scale, step, rtol=2e-7)
    back = octet.dequantize(found)
    assert back.dtype == np.float32
    back = back if layout == "bhsd" else back.transpose(0, 2, 1, 3)
    assert (np.abs(back - x) <= step * 0.5001).all()


@pytest.mark.parametrize("format", TOP)
@pytest.mark.parametrize(
    "operand, granularity, scales",
    [("q", "tensor", (1, 1)), ("k", "token", (70, 1)), ("v", "channel", (1, 16)), ("v", "block", (3, 1)),
     ("q", "thread", (24, 1)), ("k", "thread", (8, 1))],
)  # fmt: skip
def test_every_format_and_granularity_comes_back(x, format, operand, granularity, scales):
    block = 32 if granularity == "block" else 0
    x = np.abs(x) if format == "u8" else x
    found = octet.quantize(x, operand, format=format, granularity=granularity, block=block)
    assert found.scale.shape == (2, 3, *scales) and found.statistics is None
    back = octet.dequantize(found, np.float64)
    # A code of an integer format is off by half a step at most; an fp8 one by half a unit of its last place
    # (2^-4, 2^-3) or of its subnormal numbers, for which the top of the scale stands in.
    step = found.scale.max()
    allowed = 0.501 * step if format[0] in "iu" else np.abs(x) * {"e4m3": 2**-4, "e5m2": 2**-3}[format] + step
    assert (np.abs(back - x) <= allowed).all()


@pytest.mark.parametrize("zero_point", ["integer", "float"])
def test_zero_points_serve_numbers_of_one_sign(x, zero_point):
    shifted = x + 10
    without = octet.quantize(shifted, "v", granularity="channel")
    found = octet.quantize(shifted, "v", granularity="channel", format="u8", zero_point=zero_point)
    assert without.zero_point is None and found.zero_point.shape == found.scale.shape
    worst = [np.abs(octet.dequantize(y) - shifted).max() for y in (without, found)]
    assert worst[1] < worst[0]


def test_smoothing_and_rotation_are_undone(x):
    found = octet.quantize(x + 3, "k", smooth=True, hadamard_seed=7)
    np.testing.assert_allclose(found.mean, (x + 3).mean(2, keepdims=True), rtol=1e-6)
    # Orthogonal: a row is off by half a step of each of its 16 channels at most.
    off = np.linalg.norm(octet.dequantize(found) - (x + 3), axis=-1, keepdims=True)
    assert (off <= 0.501 * found.scale * 4 + 1e-6).all()
    assert found.coding.hadamard_seed == 7


def test_rope_turns_pairs_of_channels(x):
    style, offset = "interleaved", 5
    found = octet.dequantize(octet.quantize(x, "q", rope=style, rope_offset=offset))
    angle = (np.arange(70) + offset)[:, None] * 10000.0 ** (-2 * np.arange(8) / 16)
    turned = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)
    want = np.stack([turned.real, turned.imag], -1).reshape(x.shape)
    step = np.abs(want).max(-1, keepdims=True) / 127
    assert (np.abs(found - want) <= 0.502 * step).all()


@pytest.mark.parametrize("of_heads", [False, True])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_norm_comes_before_rope(x, of_heads, layout):
    weight = np.random.default_rng(3).standard_normal((3, 16) if of_heads else 16).astype(np.float32)
    given = x if layout == "bhsd" else x.transpose(0, 2, 1, 3)
    found = octet.quantize(given, "q", layout=layout, rope="half", norm="rms", norm_weight=weight, norm_eps=0.1)
    rms = np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + np.float32(0.1))
    normalised = (x / rms * (weight[:, None] if of_heads else weight)).astype(np.float32)
    want = octet.dequantize(octet.quantize(normalised, "q", rope="half"))
    got = octet.dequantize(found)
    # A code is another where the rounding of the norm moves a number over a tie.
    step = found.scale * 1.0001
    assert (np.abs((got if layout == "bhsd" else got.transpose(0, 2, 1, 3)) - want) <= step).all()
    plain = octet.quantize(x, "q", norm="rms")
    np.testing.assert_allclose((octet.dequantize(plain) ** 2).mean(-1), 1, atol=0.03)


def test_norms_are_rejected_by_name(x):
    weight = np.ones(16, np.float32)
    for message, how in [
        ("norm: found 'layer', allowed: 'none', 'rms'", dict(norm="layer")),
        ("norm_weight: given with norm none; choose rms", dict(norm_weight=weight)),
        ("norm_eps: 1e-06 given with norm none; choose rms", dict(norm_eps=1e-6)),
        ("norm_eps: found -1, allowed: finite and 0 or more", dict(norm="rms", norm_eps=-1.0)),
        (r"norm_weight: shape \[1, 16, 1\], expected \[dim\] or \[heads, dim\]",
         dict(norm="rms", norm_weight=weight[None, :, None])),
        (r"norm_weight: shape \[1, 2, 1, 16\], expected \[1, 3, 1, 16\]",
         dict(norm="rms", norm_weight=np.ones((2, 16), np.float32))),
        ("norm_weight: dtype f64, allowed: f32, f16, bf16", dict(norm="rms", norm_weight=np.ones(16))),
    ]:  # fmt: skip
        with pytest.raises(octet.InvalidArgument, match=message):
            octet.quantize(x, "q", **how)
    torch = pytest.importorskip("torch")
    with pytest.raises(octet.InvalidArgument, match="norm_weight: a torch array, but x is one of numpy"):
        octet.quantize(x, "q", norm="rms", norm_weight=torch.ones(16))
    with pytest.raises(octet.Unsupported, match="norm_weight: requires a gradient"):
        octet.quantize(torch.ones(1, 1, 4, 16), "q", norm="rms", norm_weight=torch.ones(16, requires_grad=True))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_codes_are_operands_of_attention(x, layout):
    q, k, v = (octet.quantize(x.copy(), name) for name in "qkv")
    numbers = [octet.dequantize(y, np.float64) for y in (q, k, v)]
    want = exact.attention(*numbers, seen=exact.visible(70, 70, True))
    if layout == "bshd":
        q, k, v = (octet.quantize(x.transpose(0, 2, 1, 3), name, layout=layout) for name in "qkv")
    got = octet.attention(q, k, v, precision="f32", causal=True, layout=layout)
    assert got.dtype == np.float32
    got = got if layout == "bhsd" else got.transpose(0, 2, 1, 3)
    exact.expect_close(got, want["o"], exact.bounds(*numbers, **exact.rounding("float32"))["o"], "o")


def test_rejections(x):
    with pytest.raises(octet.InvalidArgument, match="granularity: channel.*for v"):
        octet.quantize(x, "k", granularity="channel")
    with pytest.raises(octet.InvalidArgument, match="operand: found 'o', allowed: 'q', 'k', 'v'"):
        octet.quantize(x, "o")
    with pytest.raises(octet.InvalidArgument, match="format: found 'int8', allowed: 'i8'"):
        octet.quantize(x, "q", format="int8")
    with pytest.raises(octet.InvalidArgument, match="x: shape .*expected 4 dimensions"):
        octet.quantize(x[0], "q")
    with pytest.raises(octet.InvalidArgument, match="q: quantized in layout 'bhsd', but the call's is 'bshd'"):
        octet.attention(*(octet.quantize(x, name) for name in "qkv"), precision="int8", layout="bshd")
    with pytest.raises(octet.InvalidArgument, match="precision: None stands for the type of q.*i8; name one of"):
        octet.attention(*(octet.quantize(x, name) for name in "qkv"))
    with pytest.raises(octet.InvalidArgument, match="k: quantized as operand q"):
        octet.attention(octet.quantize(x, "q"), octet.quantize(x, "q"), x, precision="int8")


def test_fp8_codes_are_ml_dtypes(x):
    for format, name in (("e4m3", "float8_e4m3fn"), ("e5m2", "float8_e5m2")):
        assert octet.quantize(x, "q", format=format).codes.dtype == getattr(ml_dtypes, name)


def test_statistics_predict_the_step(x):
    found = octet.quantize(x, "q", statistics=True)
    assert found.statistics.shape == (2, 3, 1, 4)
    np.testing.assert_allclose(found.statistics[..., 0, 0], np.sqrt((found.scale**2).mean((2, 3)) / 12), rtol=1e-5)
