"""The tests of jax on the CPU share this: four devices, 64 bits, and both ways into the library."""

import os
import tempfile

# Of a test's time most is XLA's, which compiles each operator; what it makes of them is small.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from octet.jax import _adapter  # noqa: E402

# Nor is an operator compiled again whenever a test clears jax's own caches.
COMPILED = tempfile.TemporaryDirectory()
jax.config.update("jax_compilation_cache_dir", COMPILED.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(autouse=True, scope="module")
def on_the_cpu_in_64_bits():
    """Whatever else this machine has; test_jax_cuda.py is about GPUs."""
    before = jax.config.jax_default_device, jax.config.jax_enable_x64
    jax.config.update("jax_default_device", jax.devices("cpu")[0])
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_default_device", before[0])
    jax.config.update("jax_enable_x64", before[1])


@pytest.fixture(params=["handlers", "callback"])
def way(request, monkeypatch):
    """Both ways into the library."""
    if request.param == "handlers" and not _adapter.has_handlers():
        pytest.skip("built without jaxlib's headers")
    monkeypatch.setattr(_adapter, "has_handlers", lambda: request.param == "handlers")
    jax.clear_caches()
    yield
    jax.clear_caches()


def draw(*shapes, dtype=np.float64, seed=0):
    random = np.random.default_rng(seed)
    return [jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes]


def expect_vmap_is_a_loop(function, in_axes, x):
    """jax.vmap of a float64 function over three elements of x gives what the function gives of each element."""
    got = jax.vmap(function, in_axes=in_axes)(*x)
    for i in range(3):
        one = function(*(y if d is None else jnp.take(y, i, d) for y, d in zip(x, in_axes, strict=True)))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(one), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-12, atol=1e-13)
