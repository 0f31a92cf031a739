"""Head dims that are no multiple of 8, which Python fills with zeros: every pass, precision and memory order."""

import exact
import ml_dtypes
import numpy as np
import octet
import pytest
from octet._views import dense_strides
from test_memory_order import along, strides

DIMS = [(1, 1), (7, 9), (59, 64), (64, 111), (111, 111), (255, 5), (96, 241)]


def arrays(dim, dim_v, dtype=np.float32, order=(0, 1, 2, 3), queries=20, keys=23):
    """q, k, v, do, tq, tk, tv"""
    shapes = [(2, 4, queries, dim), (2, 2, keys, dim), (2, 2, keys, dim_v), (2, 4, queries, dim_v)]
    return [along(shape, order, dtype, seed=i) for i, shape in enumerate([*shapes, *shapes[:3]])]


def every_pass(q, k, v, do, *tangents, **keywords):
    o, lse = octet.attention(q, k, v, return_lse=True, **keywords)
    dq, dk, dv = octet.attention_vjp(q, k, v, do, **keywords)
    to = octet.attention_jvp(q, k, v, *tangents, **keywords)[1]
    return {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv, "to": to}


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_every_pass_agrees_with_the_definition(dims, dtype):
    """The default scale is that of the true head dim."""
    x = arrays(*dims, dtype)
    q, k, v, do, *tangents = x
    seen = exact.visible(20, 23, "top_left")
    want = exact.attention(q, k, v, seen=seen, do=do, tangents=tangents)
    bound = exact.bounds(q, k, v, do=do, tangents=tangents, **exact.rounding(np.dtype(dtype)))
    for name, got in every_pass(*x, causal="top_left").items():
        exact.expect_close(got, want[name], bound[name], name)


@pytest.mark.parametrize("precision", ["int8", "int8_f16", "int8_fp8", "fp8", "fp8_raw", "sagebwd"])
def test_eight_bits_are_as_close_as_where_the_caller_fills(precision):
    """The same calls of the library, so the same bits."""
    q, k, v, do, *_ = arrays(59, 43)
    full = [np.pad(x, [(0, 0)] * 3 + [(0, -x.shape[-1] % 8)]) for x in (q, k, v, do)]
    how = {"precision": precision, "causal": "top_left"}
    scale = float(np.float32(59**-0.5))
    np.testing.assert_array_equal(
        octet.attention(q, k, v, **how), octet.attention(*full[:3], scale=scale, **how)[..., :43]
    )
    if octet.supports(q, k, v, kind="backward", **how):
        wants = octet.attention_vjp(*full, scale=scale, **how)
        for got, want in zip(octet.attention_vjp(q, k, v, do, **how), wants, strict=True):
            np.testing.assert_array_equal(got, want[..., : got.shape[-1]])


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (3, 1, 0, 2)], ids=str)
def test_memory_orders_are_kept(order):
    x = arrays(13, 21, order=order)
    plain = every_pass(*arrays(13, 21))
    for name, got in every_pass(*x).items():
        np.testing.assert_array_equal(got, plain[name])
        assert name == "lse" or strides(got) == dense_strides(got.shape, order)


def test_packed_sequences():
    cu = np.array([0, 5, 20], np.int32)
    q, k, v = (x[0, :2, :20].transpose(1, 0, 2) for x in arrays(13, 21)[:3])
    o = octet.attention_varlen(q, k, v, cu, cu)
    for first, last in ((0, 5), (5, 20)):
        one = [x[first:last].transpose(1, 0, 2)[None] for x in (q, k, v)]
        want, bound = exact.attention(*one), exact.bounds(*one, **exact.rounding("float32"))
        exact.expect_close(o[first:last].transpose(1, 0, 2)[None], want["o"], bound["o"])


def test_explain_and_supports_take_them():
    q, k, v = arrays(59, 43)[:3]
    assert octet.supports(q, k, v, kind="backward") and "forward f32" in octet.explain(q, k, v)


def test_rejections():
    """Filled tensors could not tell that their dims differ."""
    q, k, v, do, *_ = arrays(59, 43)
    with pytest.raises(octet.InvalidArgument, match="k: head dim 60, expected 59, that of q"):
        octet.attention(q, arrays(60, 43)[1], v)
    with pytest.raises(octet.InvalidArgument, match="k: head dim 64, expected 59, that of q"):
        octet.attention(q, arrays(64, 43)[1], v)
    with pytest.raises(octet.InvalidArgument, match="k: head dim 59, expected 64, that of q"):
        octet.attention(arrays(64, 43)[0], k, v)
    with pytest.raises(octet.InvalidArgument, match="do: head dim 48, expected 43, that of v"):
        octet.attention_vjp(q, k, v, arrays(59, 48)[3])
    for dim in (0, 513, 520):
        with pytest.raises(octet.InvalidArgument, match=f"q: head dim {dim}, allowed: 1 to 512"):
            octet.attention(*arrays(dim, 43)[:3])
    with pytest.raises(octet.InvalidArgument, match="v: head dim 600, allowed: 1 to 512"):
        octet.attention(*arrays(59, 600)[:3])
