"""Derivatives of lse and of sinks in jax, against the definition in float64."""

import exact
import numpy as np
import octet
import pytest
from on_jax import draw, expect_vmap_is_a_loop, jax, jnp, on_the_cpu_in_64_bits, way  # noqa: F401

from jax.test_util import check_grads  # isort: skip

P = jax.sharding.PartitionSpec
SHAPES = (2, 4, 9, 16), (2, 2, 11, 16), (2, 2, 11, 8)  # q, k, v
SEEN = exact.visible(9, 11, "bottom_right", (4, 0))


def inputs(dtype=np.float64, seed=0):
    """q, k, v, sinks"""
    q, k, v, sinks = draw(*SHAPES, (4,), dtype=dtype, seed=seed)
    return q, k, v, sinks


def cotangents(dtype=np.float64):
    """do and dlse"""
    return draw((2, 4, 9, 8), (2, 4, 9), dtype=dtype, seed=1)


def both(q, k, v, sinks=None):
    return octet.attention(q, k, v, sinks=sinks, causal="bottom_right", window=(4, 0), return_lse=True)


def definition(x, **about):
    """Returns exact results for x (q, k, v and perhaps sinks) and bounds on the error in the arithmetic of x."""
    arrays = [np.asarray(y, np.float64) for y in x[:3]]
    about |= {"sinks": np.asarray(x[3]) if len(x) > 3 else None}
    unit = exact.rounding(np.dtype(x[0].dtype))
    return exact.attention(*arrays, seen=SEEN, **about), exact.bounds(*arrays, **about, **unit)


def expect(found, names, want, bound):
    for name, x in zip(names, found, strict=True):
        exact.expect_close(x, want[name], bound[name], name)


GRADIENTS = "dq", "dk", "dv", "dsinks"


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("operands", [3, 4], ids=["without sinks", "with sinks"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_values_gradients_and_tangents_are_those_of_the_definition(dtype, operands, transform, way):
    x, (do, dlse) = inputs(dtype)[:operands], cotangents(dtype)
    t = inputs(dtype, seed=2)[:operands]
    about = {"do": np.asarray(do), "tangents": [np.asarray(y) for y in t[:3]]}
    more = {"dlse": np.asarray(dlse), "tsinks": np.asarray(t[3]) if operands > 3 else None}
    want, bound = definition(x, **about, **more)
    call = transform(both)
    results, pull = jax.vjp(call, *x)
    expect(results, ("o", "lse"), want, bound)
    expect(pull((do, dlse)), GRADIENTS[:operands], want, bound)
    expect(jax.jvp(call, x, t)[1], ("to", "tlse"), want, bound)
    expect(jax.linearize(call, *x)[1](*t), ("to", "tlse"), want, bound)
    for only in ((do, 0 * dlse), (0 * do, dlse)):
        given = {"do": np.asarray(only[0]), "dlse": np.asarray(only[1])}
        expect(pull(only), GRADIENTS[:operands], *definition(x, **given))


@pytest.mark.parametrize("operands", [3, 4], ids=["without sinks", "with sinks"])
def test_the_gradient_of_a_loss_of_lse_alone(operands):
    x = inputs()[:operands]
    zeros, ones = np.zeros((2, 4, 9, 8)), np.ones((2, 4, 9))
    got = jax.grad(lambda *x: both(*x)[1].sum(), argnums=tuple(range(operands)))(*x)
    want, bound = definition(x, do=zeros, dlse=ones)
    assert all((np.abs(want[name]) > 0.01).any() for name in ("dq", "dk"))
    expect(got, GRADIENTS[:operands], want, bound)


def test_the_z_loss():
    """A loss of both o and lse; d lse^2 = 2 lse."""
    x = inputs()
    o, lse = both(*x)

    def loss(*x):
        o, lse = both(*x)
        return (o**2).sum() + 1e-2 * (lse**2).sum()

    want, bound = definition(x, do=np.asarray(2 * o), dlse=np.asarray(2e-2 * lse))
    for got in (jax.grad(loss, range(4))(*x), jax.jit(jax.grad(loss, range(4)))(*x)):
        expect(got, GRADIENTS, want, bound)


def test_the_explicit_functions():
    x, (do, dlse), t = inputs(np.float32), cotangents(np.float32), inputs(np.float32, seed=2)
    keywords = {"causal": "bottom_right", "window": (4, 0)}
    about = {"do": np.asarray(do), "dlse": np.asarray(dlse), "tangents": [np.asarray(y) for y in t[:3]]}
    want, bound = definition(x, **about, tsinks=np.asarray(t[3]))
    got = octet.attention_vjp(*x[:3], do, sinks=x[3], dlse=dlse, **keywords)
    expect(got, GRADIENTS, want, bound)
    more = {"sinks": x[3], "tsinks": t[3], "return_lse": True}
    names = "o", "to", "lse", "tlse"
    expect(octet.attention_jvp(*x[:3], *t[:3], **more, **keywords), names, want, bound)
    still = definition(x, tangents=about["tangents"], tsinks=np.zeros(4))
    expect(octet.attention_jvp(*x[:3], *t[:3], **more | {"tsinks": None}, **keywords), names, *still)
    pair = jax.grad(lambda *x: octet.attention_jvp(*x[:3], *t[:3], sinks=x[3], return_lse=True, **keywords)[2].sum())
    np.testing.assert_array_equal(pair(*x), jax.grad(lambda *x: both(*x)[1].sum())(*x))
    halves = octet.attention_vjp(*x[:3], do, sinks=x[3].astype(jnp.bfloat16), **keywords)
    assert [y.dtype for y in halves] == [np.float32] * 3 + [jnp.bfloat16]


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_check_grads_both_ways(dtype, way):
    for call in (both, jax.jit(both)):
        check_grads(call, inputs(dtype), order=1, modes=["fwd", "rev"])
        check_grads(call, inputs(dtype)[:3], order=1, modes=["fwd", "rev"])


def test_packed_sequences():
    q, k, v, sinks = draw((9, 4, 8), (9, 2, 8), (9, 2, 8), (4,))
    cu = jnp.array([0, 4, 9], jnp.int32)

    def packed(q, k, v, sinks):
        return octet.attention_varlen(q, k, v, cu, cu, sinks=sinks, causal="top_left", return_lse=True)

    def parts(q, k, v, sinks):
        def part(first, last):
            x = [y[None, first:last] for y in (q, k, v)]
            o, lse = octet.attention(*x, sinks=sinks, causal=True, layout="bshd", return_lse=True)
            return o[0], lse[0]

        (o, lse), (p, lse_p) = part(0, 4), part(4, 9)
        return jnp.concatenate([o, p]), jnp.concatenate([lse, lse_p], 1)

    ct = tuple(draw((9, 4, 8), (4, 9), seed=1))
    for got, want in zip(jax.vjp(packed, q, k, v, sinks)[1](ct), jax.vjp(parts, q, k, v, sinks)[1](ct), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)
    check_grads(jax.jit(packed), (q, k, v, sinks), order=1, modes=["fwd", "rev"])
    many = jnp.stack([sinks, 2 * sinks])
    mapped = jax.grad(lambda s: (jax.vmap(packed, (None, None, None, 0))(q, k, v, s)[1] ** 2).sum())(many)
    for i in range(2):
        one = jax.grad(lambda s: (packed(q, k, v, s)[1] ** 2).sum())(many[i])
        np.testing.assert_allclose(mapped[i], one, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("in_axes", [(0, 0, 0, 0), (0, 0, 0, None), (None, None, None, 0), (0, None, 1, 0)])
def test_vmap_is_a_loop(in_axes):
    shapes = *SHAPES, (4,)
    x = draw(*(s if d is None else (*s[:d], 3, *s[d:]) for s, d in zip(shapes, in_axes, strict=True)))

    def gradients(*x):
        return jax.grad(lambda *y: sum((z**2).sum() for z in both(*y)), argnums=range(4))(*x)

    def tangents(*x):
        return jax.jvp(both, x, x)[1]

    def nested(*x):
        """Each element is a loop over its batch, whose sinks differ."""
        q, k, v, sinks = x
        one = lambda q, k, v, s: both(q[None], k[None], v[None], s)[1]
        each = jnp.stack([sinks, -sinks])
        return jax.grad(lambda q, s: (jax.vmap(one)(q, k, v, s) ** 2).sum(), argnums=(0, 1))(q, each)

    for function in (both, gradients, tangents, nested):
        expect_vmap_is_a_loop(function, in_axes, x)


def test_shard_map():
    """Sinks lie with the heads, and the shards of the batch share them."""
    if len(jax.devices("cpu")) < 4:
        pytest.skip("the CPU is not four devices: jax was started before this module")
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=auto, devices=jax.devices("cpu")[:4])
    where = P("x", "y")

    def losses(call):
        return lambda *x: sum((y**2).sum() for y in call(*x))

    for of_batch, of_heads in (("x", "y"), ("x", None), (None, "y"), (None, None)):
        where = P(of_batch, of_heads)
        specs = {"in_specs": (where, where, where, P(of_heads)), "out_specs": (where, where)}
        for check in (True, False):
            shard = jax.jit(jax.shard_map(both, mesh=mesh, check_vma=check, **specs))
            x = inputs()
            got = *shard(*x), *jax.grad(losses(shard), range(4))(*x)
            want = *both(*x), *jax.grad(losses(both), range(4))(*x)
            for a, b in zip(got, want, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


def test_a_loss_that_does_not_read_lse_asks_for_no_gradient_of_it():
    """A backend may lack one and still train."""
    x = inputs(np.float32)
    text = str(jax.make_jaxpr(jax.grad(lambda *x: both(*x)[0].sum()))(*x))
    assert "octet_backward" in text and "dlse" not in text
    text = str(jax.make_jaxpr(jax.grad(lambda *x: both(*x)[1].sum()))(*x))
    assert "octet_backward" in text and "dlse" in text


def test_what_cannot_be_is_rejected_by_name():
    q, k, v, sinks = inputs()
    keywords = {"causal": "bottom_right"}
    with pytest.raises(octet.InvalidArgument, match="sinks: dtype int32, allowed: a float type"):
        octet.attention(q, k, v, sinks=jnp.zeros(4, jnp.int32), **keywords)
    with pytest.raises(octet.InvalidArgument, match=r"sinks: shape \[2, 4\], expected \[heads\]"):
        octet.attention(q, k, v, sinks=jnp.zeros((2, 4)), **keywords)
    with pytest.raises(octet.InvalidArgument, match="sinks: shape .*3"):
        octet.attention(q, k, v, sinks=jnp.zeros(3), **keywords)
    with pytest.raises(octet.InvalidArgument, match="tsinks: given without sinks"):
        octet.attention_jvp(q, k, v, q, k, v, tsinks=sinks, **keywords)
    for order in (lambda f: jax.grad(lambda s: jax.grad(f)(s).sum()), jax.hessian):
        with pytest.raises(octet.Unsupported, match="octet computes first derivatives only"):
            order(lambda s: both(q, k, v, s)[1].sum())(sinks)
