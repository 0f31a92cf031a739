"""Results lie in memory as what they belong to does: o and its like as q, gradients as their operands."""

import itertools

import numpy as np
import octet
import pytest
from octet._views import dense_strides

BATCH, HEADS, KV_HEADS, QUERIES, KEYS, DIM, DIM_V = 2, 4, 2, 9, 7, 16, 8
SHAPES = {
    "bhsd": ((BATCH, HEADS, QUERIES, DIM), (BATCH, KV_HEADS, KEYS, DIM), (BATCH, KV_HEADS, KEYS, DIM_V)),
    "bshd": ((BATCH, QUERIES, HEADS, DIM), (BATCH, KEYS, KV_HEADS, DIM), (BATCH, KEYS, KV_HEADS, DIM_V)),
    "thd": ((QUERIES, HEADS, DIM), (KEYS, KV_HEADS, DIM), (KEYS, KV_HEADS, DIM_V)),
}
ORDERS = [*itertools.permutations(range(4))]


def along(shape, order, dtype=np.float32, seed=0):
    """Random numbers, the same for every order, whose axes lie in memory in `order`."""
    numbers = np.random.default_rng(seed).standard_normal(shape).astype(dtype)
    return np.ascontiguousarray(numbers.transpose(order)).transpose(np.argsort(order))


def inputs(orders, layout="bhsd"):
    return [along(shape, order, seed=i) for i, (shape, order) in enumerate(zip(SHAPES[layout], orders, strict=True))]


def strides(x):
    return tuple(s // x.itemsize for s in x.strides)


def call_all(q, k, v, do, layout="bhsd"):
    """Every result of the numpy with what it belongs to, and the numbers that it should be."""
    tangents = [x + 1 for x in (q, k, v)]
    o, to = octet.attention_jvp(q, k, v, *tangents, layout=layout)
    gradients = octet.attention_vjp(q, k, v, do, layout=layout)
    found = octet.attention(q, k, v, layout=layout), o, to, *gradients
    return list(zip(found, (q, q, q, q, k, v), strict=True))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_numpy_keeps_every_order(layout):
    plain = inputs([range(4)] * 3, layout)
    o = octet.attention(*plain, layout=layout)
    do = along(o.shape, (3, 1, 0, 2), seed=4)
    want = [x for x, _ in call_all(*plain, do, layout)]
    for order in ORDERS:
        orders = order, order[::-1], (*order[1:], order[0])
        found = call_all(*inputs(orders, layout), do, layout)
        for (got, of), number, way in zip(found, want, [order] * 3 + [*orders], strict=True):
            np.testing.assert_array_equal(got, number)
            assert strides(got) == dense_strides(got.shape, way)
            assert got.shape != of.shape or got.strides == of.strides


def test_numpy_slices_reversed_and_broadcast_arrays():
    fused = np.random.default_rng(0).standard_normal((BATCH, 9, 3, HEADS, DIM)).astype(np.float32)
    q, k, v = (fused[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
    token_major = dense_strides(q.shape, (0, 2, 1, 3))
    assert all(strides(x) == token_major for x, _ in call_all(q, k, v, q))
    assert strides(octet.attention(q[:, :, ::-1], k, v)) == token_major
    shared = np.broadcast_to(q[:, :1], q.shape)  # heads of stride 0
    for found in (octet.attention(shared, k, v), octet.attention_vjp(q, shared, v, q)[1]):
        assert strides(found) == dense_strides(q.shape, range(4))


def test_numpy_packed_sequences_and_quantized_operands():
    cu_q, cu_k = np.array([0, 4, QUERIES], np.int32), np.array([0, 5, KEYS], np.int32)
    for order in itertools.permutations(range(3)):
        q, k, v = inputs([order] * 3, "thd")
        o = octet.attention_varlen(q, k, v, cu_q, cu_k)
        assert strides(o) == dense_strides(o.shape, order)
    q, k, v = inputs([(0, 2, 1, 3)] * 3)
    codes = [octet.quantize(x, name) for x, name in zip((q, k, v), "qkv", strict=True)]
    for x, c in zip((q, k, v), codes, strict=True):
        assert strides(c.codes) == strides(octet.dequantize(c)) == strides(x)
    o = octet.attention(*codes, precision="int8")
    assert strides(o) == dense_strides(o.shape, (0, 2, 1, 3))
