"""The MeanFlow step of meanflow.py in jax: jax.jvp inside jax.grad, jitted, through octet's attention.

python examples/python/meanflow_jax.py
"""

import argparse

import jax
import jax.numpy as jnp
import octet

POINTS, WIDTH, HEADS = 16, 64, 4
SIZES = {"embed": (2, WIDTH), "time": (2, WIDTH), "qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH),
         "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, 2)}  # fmt: skip


def initial(key):
    keys = jax.random.split(key, len(SIZES))
    return {
        name: jax.random.normal(k, size) / size[0] ** 0.5 for k, (name, size) in zip(keys, SIZES.items(), strict=True)
    }


def velocity(weights, z, r, t):
    x = z @ weights["embed"] + jnp.concatenate([r, t], -1) @ weights["time"]
    qkv = (x @ weights["qkv"]).reshape(*x.shape[:-1], 3, HEADS, -1)
    o = octet.attention(qkv[..., 0, :, :], qkv[..., 1, :, :], qkv[..., 2, :, :], layout="bshd")
    x = x + o.reshape(x.shape) @ weights["out"]
    return jax.nn.silu(x @ weights["up"]) @ weights["down"]


def circles(key, count):
    angle = jnp.arange(POINTS) * (2 * jnp.pi / POINTS) + jax.random.uniform(key, (count, 1)) * 2 * jnp.pi
    return jnp.stack([jnp.cos(angle), jnp.sin(angle)], -1)


def loss_of(weights, key):
    keys = jax.random.split(key, 3)
    x, noise = circles(keys[0], 64), jax.random.normal(keys[1], (64, POINTS, 2))
    r, t = jnp.sort(jax.random.uniform(keys[2], (2, 64, 1, 1)), 0)
    r, t = (jnp.broadcast_to(y, (64, POINTS, 1)) for y in (r, t))
    z, v = (1 - t) * x + t * noise, noise - x
    path = (v, jnp.zeros_like(r), jnp.ones_like(t))
    u, du = jax.jvp(lambda *at: velocity(weights, *at), (z, r, t), path)
    return ((u - jax.lax.stop_gradient(v - (t - r) * du)) ** 2).mean()


@jax.jit
def train(weights, momentum, square, step, key):
    """One step of Adam."""
    loss, gradient = jax.value_and_grad(loss_of)(weights, key)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, momentum, gradient)
    square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g * g, square, gradient)
    scale = 2e-3 * jnp.sqrt(1 - 0.999**step) / (1 - 0.9**step)
    weights = jax.tree.map(lambda w, m, s: w - scale * m / (jnp.sqrt(s) + 1e-8), weights, momentum, square)
    return weights, momentum, square, loss


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    key = jax.random.key(0)
    weights = initial(key)
    momentum = square = jax.tree.map(jnp.zeros_like, weights)
    for step in range(options.steps):
        weights, momentum, square, loss = train(weights, momentum, square, step + 1.0, jax.random.fold_in(key, step))
        if step % 50 == 0 or step == options.steps - 1:
            print(f"step {step:4}: loss {loss:.3f}")

    noise = jax.random.normal(key, (256, POINTS, 2))
    times = jnp.zeros((256, POINTS, 1)), jnp.ones((256, POINTS, 1))
    for name, points in (("noise", noise), ("one step", noise - velocity(weights, noise, *times))):
        print(f"{name:>9}: distance from the circle {jnp.abs(jnp.linalg.norm(points, axis=-1) - 1).mean():.3f}")


main()
