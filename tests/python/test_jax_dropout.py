"""Dropout in jax: by the words of a seed, or by a key of jax.random."""

import numpy as np
import octet
import pytest
from on_jax import jax, jnp, on_the_cpu_in_64_bits  # noqa: F401

P = 0.25


def arrays(seed=0):
    random = np.random.default_rng(seed)
    return [jnp.asarray(random.standard_normal((2, 4, 70, 32), np.float32)) for _ in range(3)]


def call(q, k, v, seed):
    return octet.attention(q, k, v, dropout_p=P, dropout_seed=seed)


def test_a_seed_drops_what_it_drops_in_numpy():
    q, k, v = arrays()
    want = octet.attention(*(np.asarray(x) for x in (q, k, v)), dropout_p=P, dropout_seed=(5, 6))
    for seed in ((5, 6), jnp.array([5, 0, 6, 0], jnp.int32)):
        np.testing.assert_array_equal(call(q, k, v, seed), want)


def test_a_key_decides_and_repeats():
    q, k, v = arrays(1)
    one, other = jax.random.split(jax.random.key(0))
    o = jax.jit(call)(q, k, v, one)
    np.testing.assert_array_equal(jax.jit(call)(q, k, v, one), o)
    assert not np.array_equal(call(q, k, v, other), o)
    np.testing.assert_array_equal(call(q, k, v, one), o)


def test_gradients_keep_what_the_forward_pass_kept():
    q, k, v = arrays(2)
    key = jax.random.key(1)
    o, pull = jax.vjp(lambda v: call(q, k, v, key), v)
    (dv,) = pull(o)
    p = call(q, k, jnp.broadcast_to(jnp.eye(70, 72, dtype=jnp.float32), (2, 4, 70, 72)), key)[..., :70]
    np.testing.assert_allclose(dv, jnp.swapaxes(p, -1, -2) @ o, atol=1e-4)
    _, to = jax.jvp(lambda v: call(q, k, v, key), (v,), (v,))
    np.testing.assert_allclose(to, o, atol=1e-5)  # o is linear in v


@pytest.mark.parametrize("in_axes", [(0, 0), (None, 0), (0, None)])
def test_vmap_over_keys_is_a_loop(in_axes):
    q, k, v = arrays(3)
    many = q if in_axes[0] is None else jnp.stack([q, q + 1])
    keys = jax.random.split(jax.random.key(2), 2)
    keys = keys if in_axes[1] == 0 else keys[0]
    found = jax.vmap(lambda q, key: call(q, k, v, key), in_axes)(many, keys)
    for i in range(2):
        want = call(many if in_axes[0] is None else many[i], k, v, keys if in_axes[1] is None else keys[i])
        np.testing.assert_array_equal(found[i], want)


def test_a_key_for_each_element_of_the_batch():
    q, k, v = arrays(4)
    keys = jax.random.split(jax.random.key(3), 2)
    o = call(q, k, v, keys)
    for b in range(2):
        part = slice(b, b + 1)
        np.testing.assert_array_equal(o[part], call(q[part], k[part], v[part], keys[b]))
