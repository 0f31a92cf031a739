"""octet.attention under shard_map, where operands may vary over different axes of a mesh."""

import numpy as np
import octet
import pytest
from on_jax import draw, jax, jnp, on_the_cpu_in_64_bits  # noqa: F401

P = jax.sharding.PartitionSpec


@pytest.fixture(scope="module")
def mesh():
    """2 x 2 devices."""
    devices = jax.devices("cpu")
    if len(devices) < 4:
        pytest.skip("the CPU is not four devices: jax was started before this module")
    return jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=devices[:4])


def attend(q, k, v):
    return octet.attention(q, k, v, causal="bottom_right", return_lse=True)[0]


def whole(q, k, v):
    """On one device; what has batch 1 serves all batches, as it does on a mesh where it is not sharded."""
    batch = max(x.shape[0] for x in (q, k, v))
    return attend(*(jnp.broadcast_to(x, (batch, *x.shape[1:])) for x in (q, k, v)))


def gradients(call):
    return jax.grad(lambda *x: (call(*x) ** 2).sum(), argnums=tuple(range(3)))


def expect_same(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


# Batch and heads of q, k, v; how q, k, v and o lie on the mesh.
CASES = {
    "all by batch": ((2, 2), (2, 2), (2, 2), *[P("x")] * 4),
    "all by heads": ((1, 4), (1, 2), (1, 2), *[P(None, "y")] * 4),
    "all by batch and heads": ((2, 4), (2, 2), (2, 2), *[P("x", "y")] * 4),
    "one head of k and v": ((1, 4), (1, 1), (1, 1), P(None, ("x", "y")), P(), P(), P(None, ("x", "y"))),
    "one head of k and v in each batch": ((2, 4), (2, 1), (2, 1), P("x", "y"), P("x"), P("x"), P("x", "y")),
    "one k and v": ((4, 2), (1, 2), (1, 2), P(("x", "y")), P(), P(), P(("x", "y"))),
    "one q": ((1, 2), (4, 2), (4, 2), P(), P(("y", "x")), P(("y", "x")), P(("y", "x"))),
    "one v": ((2, 2), (2, 2), (1, 2), P("x"), P("x"), P(), P("x")),
    "one k": ((2, 2), (1, 2), (2, 2), P("x"), P(), P("x"), P("x")),
    "nothing by the mesh": ((2, 2), (2, 2), (2, 2), *[P()] * 4),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("case", CASES)
def test_shards_are_parts_of_the_whole(mesh, case, transform, check_vma):
    *shapes, of_q, of_k, of_v, of_o = CASES[case]
    x = draw(*((*shape, tokens, 8) for shape, tokens in zip(shapes, (6, 7, 7), strict=True)))
    shard = transform(
        jax.shard_map(attend, mesh=mesh, in_specs=(of_q, of_k, of_v), out_specs=of_o, check_vma=check_vma)
    )
    expect_same(shard(*x), whole(*x))
    expect_same(gradients(shard)(*x), gradients(whole)(*x))


def test_operands_of_different_axes(mesh):
    """Every q meets every k: the result varies over both axes, the gradients over one each."""
    q, k, v = draw((2, 2, 6, 8), (2, 2, 7, 8), (2, 2, 7, 8))
    where = P("x"), P("y"), P("y")
    shard = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=where, out_specs=P(("x", "y"))))

    def pairs(q, k, v):
        return attend(jnp.repeat(q, 2, 0), jnp.tile(k, (2, 1, 1, 1)), jnp.tile(v, (2, 1, 1, 1)))

    expect_same(shard(q, k, v), pairs(q, k, v))
    expect_same(gradients(shard)(q, k, v), gradients(pairs)(q, k, v))


@pytest.mark.parametrize("varying", range(3))
def test_a_result_that_varies_is_not_taken_for_one_that_does_not(mesh, varying):
    x = draw(*(((2 if i == varying else 1), 2, 6, 8) for i in range(3)))
    specs = tuple(P("x") if i == varying else P() for i in range(3))
    with pytest.raises(ValueError, match="out_specs which require replication"):
        jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=P())(*x)


def test_gradients_are_taken_inside_a_shard_too(mesh):
    """k and v are one for all, so their gradients are sums over the mesh, and do not vary."""
    x = draw((4, 2, 6, 8), (1, 2, 7, 8), (1, 2, 7, 8))
    where = P(("x", "y")), P(), P()
    inside = jax.shard_map(gradients(attend), mesh=mesh, in_specs=where, out_specs=where)
    expect_same(inside(*x), gradients(whole)(*x))
    expect_same(jax.jit(inside)(*x), gradients(whole)(*x))
    outside = jax.shard_map(
        lambda q, k, v, do: octet.attention_vjp(q, k, v, do, causal="bottom_right"),
        mesh=mesh,
        in_specs=(*where, where[0]),
        out_specs=(where[0],) * 3,
    )
    do = 2 * whole(*x)
    dq, dk, dv = outside(*x, do)
    expect_same((dq, dk.sum(0)[None], dv.sum(0)[None]), gradients(whole)(*x))


def test_a_mask_and_lengths_that_do_not_vary(mesh):
    q, k, v = draw((2, 4, 6, 8), (2, 2, 7, 8), (2, 2, 7, 8))
    mask = jnp.asarray(np.random.default_rng(0).random((2, 1, 6, 7)) < 0.7)

    def masked(q, k, v, mask):
        return octet.attention(q, k, v, mask=mask)

    for of_mask in (P(), P("x")):
        m = mask if of_mask else mask[:1]
        shard = jax.shard_map(masked, mesh=mesh, in_specs=(P("x", "y"),) * 3 + (of_mask,), out_specs=P("x", "y"))
        expect_same(shard(q, k, v, m), masked(q, k, v, m))
        expect_same(gradients(shard)(q, k, v, m), gradients(masked)(q, k, v, m))
    cu = jnp.array([0, 2, 6], jnp.int32)
    packed = [x[0, :2].swapaxes(0, 1) for x in draw(*[(1, 2, 6, 8)] * 3, seed=1)]

    def varlen(q, k, v, cu):
        return octet.attention_varlen(q, k, v, cu, cu, causal="top_left")

    shard = jax.shard_map(varlen, mesh=mesh, in_specs=(P(None, "x"),) * 3 + (P(),), out_specs=P(None, "x"))
    expect_same(shard(*packed, cu), varlen(*packed, cu))
    expect_same(gradients(shard)(*packed, cu), gradients(varlen)(*packed, cu))


def test_vmap_inside_and_outside_of_a_shard(mesh):
    q, k, v = draw((3, 2, 2, 6, 8), (1, 2, 7, 8), (1, 2, 7, 8))
    where = P(None, "x"), P(), P()
    over_q = (0, None, None)
    want = jax.vmap(whole, over_q)(q, k, v)
    inside = jax.shard_map(jax.vmap(attend, over_q), mesh=mesh, in_specs=where, out_specs=P(None, "x"))
    expect_same(inside(q, k, v), want)
    outside = jax.vmap(jax.shard_map(attend, mesh=mesh, in_specs=(P("x"), P(), P()), out_specs=P("x")), over_q)
    expect_same(outside(q, k, v), want)
    expect_same(gradients(inside)(q, k, v), gradients(jax.vmap(whole, over_q))(q, k, v))
    expect_same(gradients(outside)(q, k, v), gradients(jax.vmap(whole, over_q))(q, k, v))


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("of_q", [P("x"), P(None, "x"), P(None, None, "x"), P(None, None, None, "x")])
def test_explicit_axes_are_gathered(of_q, transform):
    """Arrays sharded over explicit axes are gathered, as those are that XLA shards; only shard_map divides the work."""
    devices = jax.devices("cpu")
    if len(devices) < 4:
        pytest.skip("the CPU is not four devices: jax was started before this module")
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,), devices=devices[:2])
    q, k, v = draw((2, 4, 6, 8), (2, 1, 7, 8), (2, 1, 7, 8))
    want, want_gradients = attend(q, k, v), gradients(attend)(q, k, v)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(q, jax.sharding.NamedSharding(mesh, of_q))
        expect_same(transform(attend)(sharded, k, v), want)
        found = transform(gradients(attend))(sharded, k, v)
        assert jax.typeof(found[0]).sharding.spec == jax.typeof(sharded).sharding.spec
        expect_same(found, want_gradients)
