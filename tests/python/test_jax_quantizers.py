"""octet.quantize, octet.dequantize and attention of QTensors in jax programs: codes of numpy, on CPUs and GPUs."""

import dataclasses
import functools

import numpy as np
import octet
import pytest
from quantizers import HOW, PARTS

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
import octet.jax  # noqa: E402
from ways_of_xla import way  # noqa: E402, F401

ON_CPU = jax.default_backend() == "cpu"


def draw(*shape, dtype=jnp.bfloat16, seed=4):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def of_numpy(x):
    return jax.tree.map(np.asarray, x)


def expect_same(found, want):
    for part in PARTS:
        got, wanted = getattr(found, part), getattr(want, part)
        assert (got is None) == (wanted is None), part
        if got is not None:
            assert isinstance(got, jax.Array) and got.dtype == wanted.dtype, part
            np.testing.assert_array_equal(np.asarray(got).view(np.uint8), wanted.view(np.uint8), part)
    others = "format", "coding", "layout", "dtype"
    assert [getattr(found, name) for name in others] == [getattr(want, name) for name in others]


CASES = [(how, jnp.bfloat16) for how in HOW] + [("embedded", jnp.float32), ("embedded", jnp.float16)]


@pytest.mark.parametrize("case, dtype", CASES)
def test_a_program_has_the_codes_of_numpy(case, dtype):
    how = HOW[case]
    weight = draw(16) if "norm" in how else None

    def there_and_back(x, weight):
        found = octet.quantize(x * 2, norm_weight=weight, **how)
        return found, octet.dequantize(found), octet.dequantize(found, jnp.float32)

    x = draw(2, 3, 70, 16, dtype=dtype)
    found = jax.jit(there_and_back)(x, weight)
    want = there_and_back(of_numpy(x), of_numpy(weight))
    expect_same(found[0], want[0])
    for got, wanted in zip(found[1:], want[1:], strict=True):
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(np.asarray(got), wanted)


@pytest.mark.parametrize("shape", [(2, 3, 70, 16), (0, 3, 70, 16), (2, 3, 0, 16)])
def test_eager_calls(shape):
    x = draw(*shape)
    found, want = octet.quantize(x, "k", smooth=True), octet.quantize(of_numpy(x), "k", smooth=True)
    expect_same(found, want)
    np.testing.assert_array_equal(np.asarray(octet.dequantize(found)), octet.dequantize(want))


@pytest.mark.parametrize("axes", [0, 2, -1])
def test_vmap_is_a_loop(axes):
    """Over x and over all of a QTensor, with parts that all elements share."""
    x = draw(*np.insert((2, 3, 40, 16), axes if axes >= 0 else 4, 3))
    weight = draw(3, 16)

    def codes(x):
        return octet.quantize(x, "k", smooth=True, zero_point="integer", norm="rms", norm_eps=1e-6, norm_weight=weight)

    mapped = jax.vmap(codes, in_axes=axes)(x)
    numbers = jax.vmap(octet.dequantize)(mapped)
    shared = dataclasses.replace(codes(jnp.take(x, 0, axes)), scale=mapped.scale)
    in_axes = dataclasses.replace(shared, codes=None, zero_point=None, mean=None, scale=0)
    scaled = jax.vmap(octet.dequantize, in_axes=(in_axes,))(shared)
    for i in range(3):
        one = octet.quantize(
            of_numpy(jnp.take(x, i, axes)), "k", smooth=True, zero_point="integer", norm="rms", norm_eps=1e-6,
            norm_weight=of_numpy(weight),
        )  # fmt: skip
        expect_same(jax.tree.map(lambda y: y[i], mapped), one)  # noqa: B023
        np.testing.assert_array_equal(np.asarray(numbers[i]), octet.dequantize(one))
        with_scale = dataclasses.replace(of_numpy(shared), scale=np.asarray(mapped.scale[i]))
        np.testing.assert_array_equal(np.asarray(scaled[i]), octet.dequantize(with_scale))


def attend(q, k, v, precision, **how):
    k, v = octet.quantize(k, "k", smooth=True), octet.quantize(v, "v", zero_point="integer")
    return octet.attention(q, k, v, precision=precision, return_lse=True, **how)


def expect_close(found, want):
    """The bits of numpy on a CPU; a GPU's result and that of numpy each err by up to 0.013 (docs/numerics.md)."""
    for x, y in zip(found, want, strict=True):
        assert x.dtype == y.dtype
        x, y = np.asarray(x).astype(np.float64), y.astype(np.float64)
        if ON_CPU:
            np.testing.assert_array_equal(x, y)
        else:
            assert np.linalg.norm(x - y) < 2 * 0.013 * np.linalg.norm(y)


@pytest.mark.parametrize("precision", ["int8", "int8_f16", "bf16"])
def test_attention_of_codes(precision):
    """Quantized in the program and before it, mapped, in a loop; o has the type of q."""
    q, k, v = draw(2, 4, 40, 16), draw(2, 2, 50, 16), draw(2, 2, 50, 16)
    call = functools.partial(attend, precision=precision, causal="bottom_right")
    want = call(*of_numpy((q, k, v)))
    expect_close(jax.jit(call)(q, k, v), want)
    coded = octet.quantize(k, "k", smooth=True), octet.quantize(v, "v", zero_point="integer")
    how = {"precision": precision, "causal": "bottom_right", "return_lse": True}
    again = jax.jit(lambda q, k, v: octet.attention(q, k, v, **how))
    expect_close(again(q, *coded), want)
    mapped = jax.vmap(lambda q, k, v: octet.attention(q, k, v, **how), in_axes=(0, None, None))(
        jnp.stack([q, 2 * q]), *coded
    )
    expect_close([x[0] for x in mapped], want)
    expect_close([x[1] for x in mapped], call(*of_numpy((2 * q, k, v))))
    _, steps = jax.lax.scan(lambda kept, q: (kept, octet.attention(q, *kept, **how)), coded, q[None])
    expect_close([x[0] for x in steps], want)


def test_queries_that_are_quantized_with_a_mask_and_sinks():
    q, k, v = draw(2, 4, 40, 16), draw(2, 2, 50, 16), draw(2, 2, 50, 16)
    mask, sinks = draw(40, 50) > 0, draw(4, dtype=jnp.float32)

    def call(q, k, v, mask, sinks):
        coded = octet.quantize(q, "q", hadamard_seed=7), octet.quantize(k, "k", hadamard_seed=7)
        return octet.attention(
            *coded, v, mask=mask, sinks=sinks, precision="int8", out_dtype="float32", return_lse=True
        )

    given = q, k, v, mask, sinks
    expect_close(jax.jit(call)(*given), call(*of_numpy(given)))
    mapped = jax.vmap(call, in_axes=(0, 0, 0, None, None))(*(x[None] for x in given[:3]), *given[3:])
    expect_close([x[0] for x in mapped], call(*of_numpy(given)))


@pytest.mark.parametrize("format", ["i8", "e4m3"])
def test_attention_over_a_cache_of_codes(format):
    """In pages; keys behind the last are not read."""
    q, pages = draw(2, 3, 4, 16), draw(5, 2, 16, 16)
    used, table = jnp.array([20, 7], jnp.int32), jnp.array([[4, 1], [0, 3]], jnp.int32)

    def call(q, pages, used, table):
        cache = [octet.quantize(pages.swapaxes(1, 2), name, format=format, layout="bshd") for name in "kv"]
        return octet.attention_cached(
            q, *cache, used, block_table=table, causal="bottom_right", layout="bshd", return_lse=True
        )

    given = q, pages, used, table
    expect_close(jax.jit(call)(*given), call(*of_numpy(given)))


def test_what_is_supported():
    q, x = draw(1, 2, 40, 16), draw(1, 2, 50, 16)
    coded = octet.quantize(x, "k"), octet.quantize(x, "v")
    assert octet.supports(q, *coded, precision="int8") and ": chosen, " in octet.explain(q, *coded, precision="int8")
    assert not octet.supports(q, *coded, kind="jvp", precision="f32")


def test_rejections():
    x = draw(1, 2, 40, 16, dtype=jnp.float32)
    coded = octet.quantize(x, "k")
    for message, call in (
        ("octet.quantize: differentiated", lambda x: octet.quantize(x, "k").scale.sum()),
        ("octet.dequantize: differentiated", lambda x: octet.dequantize(dataclasses.replace(coded, scale=x)).sum()),
        ("a QTensor: differentiated", lambda x: octet.attention(x, coded, coded, precision="int8").sum()),
    ):
        with pytest.raises(octet.Unsupported, match=message):
            jax.grad(call)(coded.scale if "dequantize" in message else x)
    kept = jax.grad(lambda x: octet.dequantize(octet.quantize(jax.lax.stop_gradient(x), "k")).sum() + x.sum())(x)
    np.testing.assert_array_equal(np.asarray(kept), np.ones(x.shape))
    with pytest.raises(octet.Unsupported, match="q: a QTensor, of which jax programs have no derivative"):
        octet.attention_vjp(octet.quantize(x, "q"), x, x, x, precision="int8")
    with pytest.raises(octet.Unsupported, match="norm_weight: mapped by vmap"):
        jax.vmap(lambda w: octet.quantize(x, "q", norm="rms", norm_weight=w).codes)(jnp.ones((3, 16)))
    trace = lambda x, **how: jax.jit(lambda x: octet.quantize(x, "q", **how).codes).lower(x)
    for message, call in (
        ("expected 4 dimensions", lambda: trace(x[0])),
        ("granularity", lambda: trace(x, granularity="channel")),
        ("x: dtype", lambda: trace(x.astype(jnp.int32))),
        (
            "x: a jax array, but|norm_weight: a numpy array, but",
            lambda: octet.quantize(x, "q", norm_weight=np.ones(16)),
        ),
        ("quantized in layout 'bhsd'", lambda: octet.attention(x, coded, coded, precision="int8", layout="bshd")),
    ):
        with pytest.raises(octet.InvalidArgument, match=message):
            call()


@pytest.mark.parametrize("way", ["handlers"], indirect=True)
def test_the_program_holds_no_addresses(way):
    """Two of one function, with descriptors of their own. Callbacks are addresses."""
    programs, x = [], draw(2, 2, 40, 16)
    for _ in range(2):
        jax.clear_caches()
        programs.append(jax.jit(lambda x: attend(x, x, x, "int8")[0]).lower(x).as_text())
    assert programs[0] == programs[1] and "octet_quantize" in programs[0]
