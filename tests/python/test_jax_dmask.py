"""The gradient of a mask in jax, against eager attention in float64: jit, vmap, grad, both ways into the library."""

import math

import numpy as np
import octet
import pytest
from on_jax import draw, jax, jnp, on_the_cpu_in_64_bits, way  # noqa: F401

FULL = 2, 4, 9, 11
SHAPES = (2, 4, 9, 16), (2, 2, 11, 16), (2, 2, 11, 8)  # q, k, v
DO = (2, 4, 9, 8)
BROADCASTS = [tuple(1 if broadcast >> i & 1 else n for i, n in enumerate(FULL)) for broadcast in range(16)]


def eager(q, k, v, mask):
    k, v = (jnp.repeat(x, 2, 1) for x in (k, v))
    return jax.nn.softmax(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1]) + mask, -1) @ v


def call(q, k, v, mask):
    return octet.attention(q, k, v, mask=mask)


def gradients(f, do):
    return jax.grad(lambda *x: (f(*x) * do).sum(), (0, 1, 2, 3))


def expect_close(got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("shape", [*BROADCASTS[::5], (4, 9, 11), (11,)], ids=str)
def test_gradients_are_those_of_eager_attention(shape, way):
    x, (do,) = draw(*SHAPES, shape), draw(DO, seed=2)
    expect_close(jax.jit(gradients(call, do))(*x), gradients(eager, do)(*x))
    found = octet.attention_vjp(*x[:3], do, mask=x[3], return_dmask=True)
    expect_close(found, gradients(eager, do)(*x))


def test_every_broadcast_has_the_sum_of_its_elements():
    x, (do,), (mask,) = draw(*SHAPES), draw(DO, seed=2), draw(FULL, seed=3)
    for shape in BROADCASTS:
        own = mask[tuple(slice(n) for n in shape)]
        whole = jnp.broadcast_to(own, FULL)
        of_whole = octet.attention_vjp(*x, do, mask=whole, return_dmask=True)[3]
        broadcast = tuple(i for i, n in enumerate(shape) if n == 1)
        dmask = octet.attention_vjp(*x, do, mask=own, return_dmask=True)[3]
        expect_close(dmask, of_whole.sum(broadcast, keepdims=True))


@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("shape", [(9, 11), (1, 4, 9, 11), (2, 1, 1, 11)], ids=str)
def test_vmap(shape, axis):
    q, k, v, mask = draw(*SHAPES, shape)
    (do,) = draw(DO, seed=2)
    many = [jnp.stack([q, 2 * q]), jnp.stack([k, -k]), jnp.stack([v, v])]
    mask = mask if axis is None else jnp.stack([mask, 2 * mask], axis)
    axes = (0, 0, 0, axis)
    expect_close(jax.vmap(gradients(call, do), axes)(*many, mask), jax.vmap(gradients(eager, do), axes)(*many, mask))

    def of_all(f):
        return jax.grad(lambda *x: (jax.vmap(f, axes)(*x) * do).sum(), (0, 3))(*many, mask)

    expect_close(of_all(call), of_all(eager))


def test_a_mask_of_16_bits_has_a_gradient_of_16_bits():
    q, k, v, mask = (x.astype(jnp.bfloat16) for x in draw(*SHAPES, (4, 9, 11)))
    (do,) = draw(DO, seed=2)
    got = gradients(call, do.astype(jnp.bfloat16))(q, k, v, mask)[3]
    want = gradients(eager, do)(*(x.astype(jnp.float64) for x in (q, k, v, mask)))[3]
    assert got.dtype == jnp.bfloat16 and got.shape == mask.shape
    assert np.linalg.norm(got.astype(jnp.float64) - want) < 0.02 * np.linalg.norm(want)


def test_what_has_no_derivative_is_rejected():
    q, k, v, mask = draw(*SHAPES, (4, 9, 11))
    by_mask = lambda m: call(q, k, v, m)
    with pytest.raises(octet.Unsupported, match="mask: has a tangent, but octet differentiates by it backwards alone"):
        jax.jvp(by_mask, (mask,), (mask,))
    with pytest.raises(octet.Unsupported, match="first derivatives only"):
        jax.grad(lambda m: jax.grad(lambda n: by_mask(n).sum())(m).sum())(mask)
    with pytest.raises(octet.InvalidArgument, match="return_dmask: True, but there is no mask"):
        octet.attention_vjp(q, k, v, draw(DO)[0], return_dmask=True)
    # A mask that nothing differentiates costs nothing: the program asks for no dmask.
    program = str(jax.make_jaxpr(jax.grad(lambda q: call(q, k, v, mask).sum()))(q))
    assert "of_mask=False" in program and "of_mask=True" not in program
