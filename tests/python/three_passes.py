"""Forward, backward and jvp of an installed octet: with numpy, and with torch and jax where they are installed."""

import importlib.util
import platform

import numpy as np
import octet


def with_numpy(arrays):
    q, k, v, do = arrays
    errors = octet.check(q, k, v, do=do, tangents=(q, k, v), causal=True)
    assert set(errors) == {"o", "lse", "dq", "dk", "dv", "to"}
    assert all(error.rel_l2 < 1e-5 for error in errors.values()), errors
    o = octet.attention(q, k, v, causal=True)
    _, to = octet.attention_jvp(q, k, v, q, k, v, causal=True)
    return [o, *octet.attention_vjp(q, k, v, do, causal=True), to]


def with_torch(arrays):
    import torch

    q, k, v, do = map(torch.from_numpy, arrays)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = octet.attention(*leaves, causal=True)
    to = torch.func.jvp(lambda *x: octet.attention(*x, causal=True), (q, k, v), (q, k, v))[1]
    return [x.detach().numpy() for x in (o, *torch.autograd.grad(o, leaves, do), to)]


def with_jax(arrays):
    import jax

    q, k, v, do = map(jax.numpy.asarray, arrays)

    def call(*x):
        return octet.attention(*x, causal=True)

    o, pull = jax.vjp(jax.jit(call), q, k, v)
    return [np.asarray(x) for x in (o, *pull(do), jax.jvp(call, (q, k, v), (q, k, v))[1])]


def main():
    assert "site-packages" in octet.info()["library"], octet.info()
    random = np.random.default_rng(0)
    arrays = [random.standard_normal((1, 2, 64, 16)).astype(np.float32) for _ in range(4)]
    want = with_numpy(arrays)
    ran = [f"numpy {np.__version__}"]
    for name, call in {"torch": with_torch, "jax": with_jax}.items():
        if importlib.util.find_spec(name):
            for x, y in zip(call(arrays), want, strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
            ran.append(f"{name} {importlib.import_module(name).__version__}")
    print(f"Python {platform.python_version()}: forward, backward and jvp with {', '.join(ran)}")


main()
