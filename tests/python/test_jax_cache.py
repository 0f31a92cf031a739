"""octet.append and octet.attention_cached of jax arrays: numpy's numbers, in programs, and in place where caches are
donated."""

import dataclasses
import functools

import numpy as np
import octet
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from ways_of_xla import way  # noqa: E402, F401

BATCH, HEADS, KV_HEADS, DIM, PAGE = 2, 4, 2, 16, 16
ROOM = 2 * PAGE


def given(paged, dtype=np.float32, new=3, layout="bshd"):
    """k_cache, v_cache, seqused_k, q, k, v and what says where: numpy arrays."""
    random = np.random.default_rng(5)

    def draw(first, tokens, heads):
        shape = (first, tokens, heads, DIM) if layout == "bshd" else (first, heads, tokens, DIM)
        return np.asarray(jnp.asarray(random.standard_normal(shape), dtype))

    caches = [draw(6, PAGE, KV_HEADS) if paged else draw(BATCH, ROOM, KV_HEADS) for _ in "kv"]
    where = {"block_table": np.array([[4, 1], [0, 3]], np.int32)} if paged else {}
    used = np.array([15, 2], np.int32)
    return *caches, used, draw(BATCH, new, HEADS), draw(BATCH, new, KV_HEADS), draw(BATCH, new, KV_HEADS), where


def step(k_cache, v_cache, used, q, k, v, where, layout="bshd", **how):
    """A step of decoding of jax arrays: (caches, o)."""
    k_cache, v_cache, q = octet.append(k_cache, v_cache, k, v, used, rope="half", q=q, layout=layout, **where)
    new = k.shape[1 if layout == "bshd" else 2]
    o = octet.attention_cached(q, k_cache, v_cache, used + new, causal="bottom_right", layout=layout, **where, **how)
    return (k_cache, v_cache), o


def step_of_numpy(k_cache, v_cache, used, q, k, v, where, layout="bshd", **how):
    k_cache, v_cache = k_cache.copy(), v_cache.copy()
    q = octet.append(k_cache, v_cache, k, v, used, rope="half", q=q, layout=layout, **where)
    new = k.shape[1 if layout == "bshd" else 2]
    o = octet.attention_cached(
        q, k_cache, v_cache, used + np.int32(new), causal="bottom_right", layout=layout, **where, **how
    )
    return (k_cache, v_cache), o


def equal(found, want):
    """The same bits; on a GPU, beside numpy on the CPU, the same up to units in the last place of the coarsest type."""
    types = [x.dtype for x in jax.tree.leaves(want) if jnp.issubdtype(x.dtype, jnp.floating)]
    unit = max([float(jnp.finfo(x).eps) for x in types], default=0.0)

    def are_equal(x, y):
        x, y = np.asarray(x), np.asarray(y)
        if jax.default_backend() == "cpu":
            return np.array_equal(x, y)
        return np.allclose(np.float64(x), np.float64(y), rtol=4 * unit, atol=4 * unit)

    return all(map(are_equal, jax.tree.leaves(found), jax.tree.leaves(want)))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_as_numpy(paged, layout, compiled, dtype):
    arrays = given(paged, dtype, layout=layout)
    want = step_of_numpy(*arrays, layout=layout, return_lse=True)
    run = functools.partial(step, layout=layout, return_lse=True)
    found = (jax.jit(run) if compiled else run)(*jax.tree.map(jnp.asarray, arrays))
    assert equal(found, want) and not equal(found[0], arrays[:2])


def test_without_rope():
    k_cache, v_cache, used, _, k, v, where = jax.tree.map(jnp.asarray, given(True))
    made = jax.jit(functools.partial(octet.append, layout="bshd"))(k_cache, v_cache, k, v, used, **where)
    k_want, v_want = np.array(k_cache), np.array(v_cache)
    octet.append(
        k_want, v_want, *map(np.asarray, (k, v, used)), layout="bshd", block_table=np.asarray(where["block_table"])
    )
    assert equal(made, (k_want, v_want))


def test_packed_queries():
    k_cache, v_cache, used, q, _, _, where = given(True)
    how = {"cu_seqlens_q": np.array([0, 1, 3], np.int32), "causal": "bottom_right"}
    want = octet.attention_cached(q[0], k_cache, v_cache, used, **where, **how)
    arrays = jax.tree.map(jnp.asarray, (q[0], k_cache, v_cache, used, where | {"cu_seqlens_q": how["cu_seqlens_q"]}))
    run = jax.jit(lambda q, k, v, used, more: octet.attention_cached(q, k, v, used, causal="bottom_right", **more))
    assert equal(run(*arrays), want)


def test_append_of_packed_tokens():
    k_cache, v_cache, used, q, k, v, where = given(True)
    used, where = np.array([10, 2], np.int32), where | {"cu_seqlens": np.array([0, 5, 6], np.int32)}
    new = [x.reshape(6, -1, DIM) for x in (k, v)]
    caches = k_cache.copy(), v_cache.copy()
    turned = octet.append(*caches, *new, used, rope="half", q=q.reshape(6, HEADS, DIM), **where)
    arrays = jax.tree.map(jnp.asarray, (k_cache, v_cache, *new, used, q.reshape(6, HEADS, DIM), where))
    run = jax.jit(lambda *x: octet.append(*x[:5], rope="half", q=x[5], **x[6]))
    assert equal(run(*arrays), (*caches, turned))


@pytest.mark.parametrize("format", ["i8", "e4m3"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("paged", [False, True])
def test_caches_of_codes(paged, layout, format, way):
    """QTensors in and out, with the codes of numpy; codes and scales of those that are donated are written in place."""
    k_cache, v_cache, used, q, k, v, where = given(paged, layout=layout)
    how = {"format": format, "layout": layout}
    coded = [octet.quantize(x, name, **how) for x, name in ((k_cache, "k"), (v_cache, "v"))]
    arrays = jax.tree.map(jnp.asarray, (*coded, used, q, k, v, where))
    copies = [dataclasses.replace(x, codes=x.codes.copy(), scale=x.scale.copy()) for x in coded]
    turned = octet.append(*copies, k, v, used, rope="half", q=q, layout=layout, **where)
    run = functools.partial(step, layout=layout)
    (k_found, v_found), o = run(*arrays)
    assert isinstance(k_found, octet.QTensor) and equal(jax.tree.leaves((k_found, v_found)), jax.tree.leaves(copies))
    assert not equal(jax.tree.leaves(copies), jax.tree.leaves(coded))
    new = np.int32(k.shape[1 if layout == "bshd" else 2])
    want = octet.attention_cached(turned, *copies, used + new, causal="bottom_right", layout=layout, **where)
    assert equal(o, want)
    addresses = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(arrays[:2])]
    found, _ = jax.jit(run, donate_argnums=(0, 1))(*arrays)
    assert equal(jax.tree.leaves(found), jax.tree.leaves(copies))
    if way == "handlers":
        assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(found)] == addresses


def test_donated_caches_are_written_in_place(way):
    """XLA keeps the memory; that of the callbacks into Python is new."""
    arrays = jax.tree.map(jnp.asarray, given(True))
    addresses = [x.unsafe_buffer_pointer() for x in arrays[:2]]
    run = jax.jit(step, donate_argnums=(0, 1))
    (k_cache, v_cache), _ = run(*arrays)
    assert all(x.is_deleted() for x in arrays[:2])
    if way == "handlers":
        assert [x.unsafe_buffer_pointer() for x in (k_cache, v_cache)] == addresses
    assert equal((k_cache, v_cache), step_of_numpy(*given(True))[0])


def test_caches_that_are_kept_do_not_change():
    arrays = jax.tree.map(jnp.asarray, given(True))
    jax.jit(step)(*arrays)
    assert equal(arrays, given(True))


def test_a_loop():
    """Tokens one by one, within a program."""
    k_cache, v_cache, used, q, k, v, where = given(True, new=5)
    tokens = [x.swapaxes(0, 1)[:, :, None] for x in (q, k, v)]

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def run(k_cache, v_cache, used, tokens, where):
        def body(carry, token):
            caches, used = carry
            caches, o = step(*caches, used, *token, where)
            return (caches, used + 1), o

        return jax.lax.scan(body, ((k_cache, v_cache), used), tokens)

    (caches, _), found = run(*jax.tree.map(jnp.asarray, (k_cache, v_cache, used, tokens, where)))
    for i, token in enumerate(zip(*tokens, strict=True)):
        (k_cache, v_cache), o = step_of_numpy(k_cache, v_cache, used + np.int32(i), *token, where)
        assert equal(found[i], o)
    assert equal(caches, (k_cache, v_cache))


def test_rejections():
    k_cache, v_cache, used, q, k, v, where = jax.tree.map(jnp.asarray, given(True))
    attend = lambda q: octet.attention_cached(q, k_cache, v_cache, used, layout="bshd", **where)
    add = lambda k: octet.append(k_cache, v_cache, k, v, used, layout="bshd", **where)[0]
    for call, x, name in ((attend, q, "attention_cached"), (add, k, "append")):
        with pytest.raises(octet.Unsupported, match=f"octet.{name}: differentiated"):
            jax.grad(lambda x, call=call: call(x).sum())(x)
        with pytest.raises(octet.Unsupported, match=f"octet.{name}: mapped by vmap"):
            jax.vmap(call)(x[None])
        call(x)
    with pytest.raises(octet.InvalidArgument, match="k: shape .* expected 4 dimensions"):
        add(k[0])
    with pytest.raises(octet.InvalidArgument, match="seqused_k: a numpy array, but"):
        octet.append(k_cache, v_cache, k, v, np.asarray(used), layout="bshd", **where)
    numbers = np.zeros((6, KV_HEADS, PAGE, DIM), np.float32)
    coded = [octet.quantize(numbers, name) for name in "kv"]
    with pytest.raises(octet.InvalidArgument, match="k: a jax array, but k_cache is one of numpy"):
        octet.append(*coded, k, v, used, **where)
    smoothed = [octet.quantize(jnp.asarray(numbers), name, smooth=True) for name in "kv"]
    with pytest.raises(octet.InvalidArgument, match="k_cache: a QTensor of .* without a mean"):
        octet.append(*smoothed, k, v, used, **where)


def test_lengths_are_checked_on_the_cpu():
    if jax.default_backend() != "cpu":
        pytest.skip("nobody checks them there")
    arrays = list(jax.tree.map(jnp.asarray, given(True)))
    arrays[2] = jnp.array([40, 2], jnp.int32)
    with pytest.raises(Exception, match="seqused_k"):
        jax.block_until_ready(step(*arrays))
