"""Softcap and the slopes of ALiBi in jax, against eager attention in float64: derivatives, vmap, jit, both ways."""

import math

import numpy as np
import octet
import pytest
from on_jax import draw, expect_vmap_is_a_loop, jax, jnp, on_the_cpu_in_64_bits, way  # noqa: F401

SHAPES = (2, 4, 9, 16), (2, 2, 11, 16), (2, 2, 11, 8)  # q, k, v
BOTH = pytest.mark.parametrize("softcap, slopes", [(1.5, None), (0.0, (4,)), (2.0, (2, 4))])


def eager(q, k, v, softcap, slopes):
    """(o, lse)"""
    group, n, m = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    s = q @ jnp.repeat(k, group, 1).swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    s = softcap * jnp.tanh(s / softcap) if softcap else s
    if slopes is not None:
        s -= slopes.reshape(-1, q.shape[1], 1, 1) * jnp.abs(jnp.arange(n)[:, None] + m - n - jnp.arange(m))
    return jax.nn.softmax(s, -1) @ jnp.repeat(v, group, 1), jax.nn.logsumexp(s, -1)


def call(q, k, v, softcap, slopes):
    return octet.attention(q, k, v, softcap=softcap, alibi_slopes=slopes, return_lse=True)


def slopes_of(shape):
    return None if shape is None else 0.1 * draw(shape, seed=7)[0]


@BOTH
def test_derivatives_are_those_of_eager_attention(softcap, slopes, way):
    x, t, slopes = draw(*SHAPES), draw(*SHAPES, seed=1), slopes_of(slopes)
    do, dlse = draw((2, 4, 9, 8), (2, 4, 9), seed=2)

    def everything(f):
        g = jax.jit(lambda q, k, v: f(q, k, v, softcap, slopes))
        results, transposed = jax.vjp(g, *x)
        return results, transposed((do, dlse)), jax.jvp(g, tuple(x), tuple(t))[1]

    for got, want in zip(*(jax.tree.leaves(everything(f)) for f in (call, eager)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-11)
    o, to = octet.attention_jvp(*x, *t, softcap=softcap, alibi_slopes=slopes)
    np.testing.assert_allclose(to, everything(eager)[2][0], rtol=1e-9, atol=1e-11)
    gradients = octet.attention_vjp(*x, do, dlse=dlse, softcap=softcap, alibi_slopes=slopes)
    for got, want in zip(gradients, everything(eager)[1], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("shape", [(4,), (2, 4)])
def test_vmap(shape, axis):
    x = [jnp.stack([a, 2 * a, -a]) for a in draw(*SHAPES)]
    slopes = slopes_of(shape)
    slopes = slopes if axis is None else jnp.stack([slopes, 2 * slopes, -slopes], axis)

    def gradients(q, k, v, s):
        loss = lambda q, k, v: sum(jnp.square(y).sum() for y in call(q, k, v, 2.0, s))
        return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)

    expect_vmap_is_a_loop(gradients, (0, 0, 0, axis), (*x, slopes))


@pytest.mark.parametrize("shape", [(4,), (3, 4)])
def test_packed_sequences(shape):
    cu_q, cu_k = (jnp.array(x, jnp.int32) for x in ([0, 9, 9, 20], [0, 11, 14, 30]))
    q, k, v = draw((20, 4, 16), (30, 2, 16), (30, 2, 8))
    slopes = slopes_of(shape)
    varlen = lambda q, k, v, s: octet.attention_varlen(q, k, v, cu_q, cu_k, softcap=2.0, alibi_slopes=s)
    o = varlen(q, k, v, slopes)
    for n in (0, 2):
        own = [jnp.swapaxes(x[a[n] : a[n + 1]], 0, 1)[None] for x, a in ((q, cu_q), (k, cu_k), (v, cu_k))]
        want, _ = eager(*own, 2.0, slopes if len(shape) == 1 else slopes[n])
        np.testing.assert_allclose(jnp.swapaxes(o[cu_q[n] : cu_q[n + 1]], 0, 1)[None], want, rtol=1e-9, atol=1e-11)
    x = [jnp.stack([a, 2 * a, -a]) for a in (q, k, v)]
    expect_vmap_is_a_loop(varlen, (0, 0, 0, 0), (*x, jnp.stack([slopes, 2 * slopes, -slopes])))


def test_slopes_have_no_gradient():
    x = draw(*SHAPES)
    with pytest.raises(octet.Unsupported, match="alibi_slopes: differentiated, but octet gives it no gradient"):
        jax.grad(lambda s: octet.attention(*x, alibi_slopes=s).sum())(slopes_of((4,)))
    with pytest.raises(octet.InvalidArgument, match="softcap: found -2, allowed: positive and finite"):
        octet.attention(*x, softcap=-2.0)
