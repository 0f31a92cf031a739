"""octet on the CUDA arrays of jax: the XLA handlers, derivatives, command buffers. Skipped without a GPU."""

import json
import os
import pathlib
import re
import subprocess
import sys

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import exact
import numpy as np
import octet
import pytest
from cases import cases
from hypothesis import given, settings

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
import octet.jax  # noqa: E402

if jax.default_backend() != "gpu":
    pytest.skip("jax has no GPU", allow_module_level=True)
_X = jax.device_put(jnp.zeros((1, 1, 8, 64), jnp.bfloat16), jax.devices()[0])
if not (_found := octet.supports(_X, _X, _X)):
    pytest.skip(_found.reason, allow_module_level=True)


def draw(*shapes, dtype=jnp.bfloat16, seed=0):
    random = np.random.default_rng(seed)
    return [jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes]


def wide(x):
    return np.asarray(x).astype(np.float64)


def call(q, k, v):
    return octet.attention(q, k, v, causal=True, deterministic=True)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_every_derivative_agrees_with_the_definition(dtype):
    """o, gradients and tangents, of every mask."""

    @settings(max_examples=20, deadline=None)  # each compiles
    @given(cases(np.float32))
    def holds(case):
        x = {name: jnp.asarray(case.in_layout(name), dtype) for name in case.arrays}
        a = {name: wide(y) if case.layout == "bhsd" else wide(y).transpose(0, 2, 1, 3) for name, y in x.items()}

        mask = None if case.mask is None else jnp.asarray(case.mask)

        def attend(q, k, v):
            return octet.attention(q, k, v, mask=mask, layout=case.layout, **case.keywords)

        o, pull = jax.vjp(jax.jit(attend), x["q"], x["k"], x["v"])
        got = dict(zip(("dq", "dk", "dv"), pull(x["do"]), strict=True)) | {"o": o}
        along = [tuple(x[name] for name in names) for names in (("q", "k", "v"), ("tq", "tk", "tv"))]
        _, got["to"] = jax.jvp(jax.jit(attend), *along)
        about = {"do": a["do"], "tangents": tuple(a[name] for name in ("tq", "tk", "tv"))} | case.exact()
        want = exact.attention(a["q"], a["k"], a["v"], seen=case.seen, **about)
        bound = exact.bounds(a["q"], a["k"], a["v"], **about, **exact.rounding(np.dtype(dtype)))
        for name, found in got.items():
            assert found.dtype == dtype
            found = wide(found) if case.layout == "bhsd" else wide(found).transpose(0, 2, 1, 3)
            exact.expect_close(found, want[name], bound[name], name)

    holds()


def test_vmap_jit_and_shard_map_are_the_call_itself():
    q, k, v = draw(*[(2, 4, 100, 64)] * 3)
    want = call(q, k, v)
    np.testing.assert_array_equal(wide(jax.jit(call)(q, k, v)), wide(want))
    batched = jax.vmap(call, in_axes=(0, None, None))(jnp.stack([q, 2 * q]), k, v)
    np.testing.assert_array_equal(wide(batched[0]), wide(want))
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    where = jax.sharding.PartitionSpec("x")
    shard = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=where, out_specs=where))
    np.testing.assert_array_equal(wide(shard(q, k, v)), wide(want))


def test_packed_sequences():
    (q,) = draw((400, 2, 64))
    cu = jnp.array([0, 150, 400], jnp.int32)
    o = jax.jit(lambda q, cu: octet.attention_varlen(q, q, q, cu, cu, causal="top_left"))(q, cu)
    for first, last in ((0, 150), (150, 400)):
        one = wide(q[first:last]).transpose(1, 0, 2)[None]
        want = exact.attention(one, one, one, seen=exact.visible(last - first, last - first, True))
        bound = exact.bounds(one, one, one, **exact.rounding("bfloat16"))
        exact.expect_close(wide(o[first:last]).transpose(1, 0, 2)[None], want["o"], bound["o"], "o")


def test_gradients_of_lse_and_sinks():
    """Against the definition; a loss that reads o and lse, of q, k, v and sinks, also within a shard."""
    shapes = (2, 4, 100, 64), (2, 2, 130, 64), (2, 2, 130, 64)
    q, k, v, do = draw(*shapes, shapes[0])
    sinks, dlse = draw((4,), shapes[0][:3], dtype=jnp.float32, seed=1)
    arrays = [wide(x) for x in (q, k, v)]
    about = {"do": wide(do), "dlse": wide(dlse), "sinks": wide(sinks)}
    seen = exact.visible(100, 130, "bottom_right")
    want = exact.attention(*arrays, seen=seen, **about)
    bound = exact.bounds(*arrays, **about, **exact.rounding("bfloat16"))
    names = "o", "lse", "dq", "dk", "dv", "dsinks"

    def both(q, k, v, sinks):
        return octet.attention(q, k, v, sinks=sinks, causal="bottom_right", return_lse=True)

    def everything(call):
        results, pull = jax.vjp(jax.jit(call), q, k, v, sinks)
        return *results, *pull((do, dlse))

    spec = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    shard = jax.shard_map(both, mesh=mesh, in_specs=(spec("x"), spec("x"), spec("x"), spec()), out_specs=spec("x"))
    for call in (both, shard):
        for name, found in zip(names, everything(call), strict=True):
            exact.expect_close(wide(found), want[name], bound[name], name)
    alone = jax.grad(lambda *x: both(*x)[1].sum(), argnums=range(4))(q, k, v, sinks)
    about |= {"do": np.zeros(shapes[0]), "dlse": np.ones(shapes[0][:3])}
    want = exact.attention(*arrays, seen=seen, **about)
    bound = exact.bounds(*arrays, **about, **exact.rounding("bfloat16"))
    for name, found in zip(names[2:], alone, strict=True):
        exact.expect_close(wide(found), want[name], bound[name], name)


def test_what_varies_less_is_shared_by_the_shards():
    """k and v for all shards of q: their gradients are sums over the mesh."""
    q, k, v = draw((1, 4, 100, 64), (1, 1, 100, 64), (1, 1, 100, 64))
    spec = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    heads = spec(None, "x")
    shard = jax.shard_map(call, mesh=mesh, in_specs=(heads, spec(), spec()), out_specs=heads)

    def gradients(f):
        return jax.jit(jax.grad(lambda *x: (f(*x).astype(jnp.float32) ** 2).sum(), argnums=range(3)))(q, k, v)

    for a, b in zip(gradients(shard), gradients(call), strict=True):
        np.testing.assert_array_equal(wide(a), wide(b))
    with pytest.raises(ValueError, match="out_specs which require replication"):
        jax.shard_map(call, mesh=mesh, in_specs=(spec(), spec("x"), spec("x")), out_specs=spec())(q, k, v)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("softcap, slopes", [(2.0, None), (0.0, (4,)), (2.0, (2, 4))])
def test_softcap_and_slopes(dtype, softcap, slopes):
    shapes = (2, 4, 100, 64), (2, 2, 130, 64), (2, 2, 130, 64)
    q, k, v, do = draw(*shapes, shapes[0], dtype=dtype)
    tangents = tuple(draw(*shapes, dtype=dtype, seed=1))
    slopes = None if slopes is None else 0.1 * jnp.abs(draw(slopes, dtype=jnp.float32, seed=2)[0])

    def call(q, k, v):
        return octet.attention(q, k, v, causal="bottom_right", softcap=softcap, alibi_slopes=slopes)

    o, pull = jax.vjp(jax.jit(call), q, k, v)
    _, to = jax.jvp(jax.jit(call), (q, k, v), tangents)
    away = np.abs(np.arange(100)[:, None] + 30 - np.arange(130))
    bias = None if slopes is None else -wide(slopes).reshape(-1, 4, 1, 1) * away
    about = {"do": wide(do), "tangents": tuple(wide(x) for x in tangents), "bias": bias}
    arrays = [wide(x) for x in (q, k, v)]
    want = exact.attention(*arrays, seen=exact.visible(100, 130, "bottom_right"), softcap=softcap, **about)
    bound = exact.bounds(*arrays, **about, **exact.rounding(np.dtype(dtype)))
    for name, found in zip(("o", "dq", "dk", "dv", "to"), (o, *pull(do), to), strict=True):
        exact.expect_close(wide(found), want[name], bound[name], name)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("shape", [(1, 4, 100, 136), (2, 1, 100, 136), (2, 4, 100, 136), (1, 4, 1, 136)], ids=str)
def test_gradients_of_a_mask(shape, dtype):
    shapes = (2, 4, 100, 64), (2, 2, 136, 64), (2, 2, 136, 64)
    q, k, v, do = draw(*shapes, shapes[0], dtype=dtype)
    (mask,) = draw(shape, dtype=dtype, seed=3)
    pull = jax.vjp(jax.jit(lambda *x: octet.attention(*x[:3], mask=x[3], causal="bottom_right")), q, k, v, mask)[1]
    arrays, about = (
        [wide(x) for x in (q, k, v)],
        {"do": wide(do), "bias": np.broadcast_to(wide(mask), (2, 4, 100, 136))},
    )
    want = exact.attention(*arrays, seen=exact.visible(100, 136, "bottom_right"), **about)
    want["dmask"] = want["ds"].sum(tuple(i for i, n in enumerate(shape) if n == 1), keepdims=True)
    how = exact.rounding(np.dtype(dtype))
    bound = exact.bounds(*arrays, **about, mask=shape, mask_format=how["format"] or how["unit"], **how)
    for name, found in zip(("dq", "dk", "dv", "dmask"), pull(do), strict=True):
        exact.expect_close(wide(found), want[name], bound[name], name)


@pytest.mark.parametrize("dim", [59, 111, 200])
def test_head_dims_that_are_no_multiple_of_8(dim):
    q, k, v, do = draw(*[(1, 2, 100, dim)] * 4)
    arrays = [wide(x) for x in (q, k, v)]
    want = exact.attention(*arrays, do=wide(do))
    bound = exact.bounds(*arrays, do=wide(do), **exact.rounding("bfloat16"))
    o, pull = jax.vjp(jax.jit(octet.attention), q, k, v)
    for name, found in zip(("o", "dq", "dk", "dv"), (o, *pull(do)), strict=True):
        exact.expect_close(wide(found), want[name], bound[name], name)


def test_nothing_is_transposed_or_copied_between_projections_and_the_call():
    """XLA may choose the order of its own products; those of q, k and v of "bshd" are row-major as they come."""
    x, w = draw((2, 256, 256), (256, 768))

    def loss(x, w):
        q, k, v = (y.reshape(2, 256, 4, 64) for y in jnp.split(x @ w, 3, axis=-1))
        o = octet.attention(q, k, v, causal=True, layout="bshd").reshape(2, 256, 256)
        return (o.astype(jnp.float32) ** 2).sum()

    text = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(x, w).compile().as_text()
    orders = {y for y in re.findall(r"bf16\[2,256,4,64\]\{([\d,]*)", text)}
    assert orders == {"3,2,1,0"}, orders
    moved = [y for y in text.splitlines() if re.search(r"= bf16\[2,256,4,64\]\S* (copy|transpose)\(", y)]
    assert not moved and "bf16[2,4,256,64]" not in text, moved


# Runs under XLA flags that put every custom call into a command buffer, and prints o, dq, dk, dv of several inputs.
PROGRAM = """
import json, jax, jax.numpy as jnp, numpy as np, octet
call = lambda q, k, v: octet.attention(q, k, v, causal=True, deterministic=True)
@jax.jit
def step(q, k, v, do):
    o, pull = jax.vjp(call, jnp.sin(q), k, v)
    return o, *pull(do)
found = []
for seed in range(4):
    random = np.random.default_rng(seed)
    x = [jnp.asarray(random.standard_normal((2, 2, 100, 64)), jnp.bfloat16) for _ in range(4)]
    found.append([np.asarray(y, np.float64).ravel()[::97].tolist() for y in step(*x)])
print(json.dumps(found))
"""


def test_command_buffers_compute_what_plain_streams_do():
    """A CUDA graph is recorded on the first run and replayed, with new addresses, on the others."""
    found = []
    for types in ("", "FUSION,CUSTOM_CALL"):
        flags = f"--xla_gpu_enable_command_buffer={types} --xla_gpu_graph_min_graph_size=1"
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=os.environ | {"XLA_FLAGS": flags},
            cwd=pathlib.Path(__file__).parent,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert found[0] == found[1] and np.isfinite(found[0]).all() and found[0][0] != found[0][1]


@pytest.mark.parametrize("kind", ["forward", "backward", "jvp"])
@pytest.mark.parametrize("precision", ["f32", "bf16", "int8"])
def test_what_no_kernel_computes_is_rejected_before_the_program_runs(kind, precision):
    q = _X
    calls = {
        "forward": lambda q: octet.attention(q, q, q, precision=precision),
        "backward": lambda q: octet.attention_vjp(q, q, q, q, precision=precision),
        "jvp": lambda q: octet.attention_jvp(q, q, q, q, q, q, precision=precision),
    }
    lower = jax.jit(calls[kind]).lower
    if octet.supports(q, q, q, kind=kind, precision=precision):
        lower(q).compile()
    else:
        with pytest.raises(octet.Unsupported, match="sm90(, sm80)?: "):
            lower(q)


def test_arrays_on_the_cpu_stay_there():
    q = jax.device_put(jnp.ones((1, 1, 8, 64), jnp.float32), jax.devices("cpu")[0])
    assert octet.supports(q, q, q)  # f32, which the CPU computes
    assert next(iter(octet.attention(q, q, q).devices())).platform == "cpu"
    with pytest.raises(ValueError, match="[Dd]evice"):
        octet.attention(q, _X.astype(jnp.float32), q)
