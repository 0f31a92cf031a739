"""jax programs of an octet with XLA handlers: on four devices of the CPU at once, and exported to another process.

Run by itself, as the tests and scripts/wheel do; with an argument it is the other process, which runs that program.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import octet.jax  # brings the handlers, which an exported program only names
from jax import export


def inputs():
    random = np.random.default_rng(0)
    return [jnp.asarray(random.standard_normal((4, 2, 64, 16)), jnp.float32) for _ in range(4)]


def step(q, k, v, do):
    o, pull = jax.vjp(lambda *x: octet.attention(*x, causal=True), q, k, v)
    return o, *pull(do)


def expect_same(got, want):
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def on_four_devices():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    where = jax.sharding.PartitionSpec("x")
    shard = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=where, out_specs=where))
    x, want = inputs(), step(*inputs())
    for _ in range(20):  # callbacks into Python waited for each other within a few
        got = shard(*x)
    expect_same(got, want)


def export_to_another_process():
    allowed = [export.DisabledSafetyCheck.custom_call("octet")]
    program = export.export(jax.jit(step), platforms=["cpu"], disabled_checks=allowed)(*inputs())
    again = export.export(jax.jit(step), platforms=["cpu"], disabled_checks=allowed)(*inputs())
    assert program.mlir_module() == again.mlir_module(), "the program depends on where its descriptors lay in memory"
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "program"
        file.write_bytes(program.serialize())
        subprocess.run([sys.executable, __file__, str(file)], check=True, timeout=300)


if len(sys.argv) > 1:
    stored = export.deserialize(bytearray(pathlib.Path(sys.argv[1]).read_bytes()))
    expect_same(stored.call(*inputs()), step(*inputs()))
else:
    assert octet.info()["xla_handlers"], octet.info()["jax"]
    on_four_devices()
    export_to_another_process()
    print(f"jax {octet.info()['jax']}: on four devices, exported to another process")
