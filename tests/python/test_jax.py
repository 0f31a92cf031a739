"""octet.attention on jax arrays: derivatives, transformations, and both ways of calling the library."""

import functools
import pathlib
import re
import subprocess
import sys

import exact
import numpy as np
import octet
import pytest
from cases import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from on_jax import draw, expect_vmap_is_a_loop, jax, jnp, on_the_cpu_in_64_bits, way  # noqa: F401

from jax.test_util import check_grads  # isort: skip
import octet.jax  # isort: skip
from octet.jax import _adapter  # isort: skip


def inputs(dtype=np.float64):
    return draw((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8), dtype=dtype)


def call(q, k, v):
    return octet.jax.attention(q, k, v, causal="bottom_right")


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_every_derivative_agrees_with_the_definition(dtype):
    @settings(max_examples=25, deadline=None)  # each compiles
    @given(cases(dtype))
    def holds(case):
        a = case.arrays
        x = {name: jnp.asarray(case.in_layout(name)) for name in a}
        mask = None if case.mask is None else jnp.asarray(case.mask)

        def attend(q, k, v):
            return octet.attention(q, k, v, mask=mask, layout=case.layout, **case.keywords)

        o, pull = jax.vjp(attend, x["q"], x["k"], x["v"])
        got = dict(zip(("dq", "dk", "dv"), pull(x["do"]), strict=True)) | {"o": o}
        got["to"] = jax.jvp(attend, (x["q"], x["k"], x["v"]), (x["tq"], x["tk"], x["tv"]))[1]
        about = {"do": a["do"], "tangents": (a["tq"], a["tk"], a["tv"])} | case.exact()
        want = exact.attention(a["q"], a["k"], a["v"], seen=case.seen, **about)
        bound = exact.bounds(a["q"], a["k"], a["v"], **about, **exact.rounding(np.dtype(dtype)))
        for name, found in got.items():
            assert found.dtype == dtype
            found = found if case.layout == "bhsd" else found.transpose(0, 2, 1, 3)
            exact.expect_close(found, want[name], bound[name], name)

    holds()


def test_check_grads_both_ways(way):
    check_grads(call, inputs(), order=1, modes=["fwd", "rev"])
    check_grads(jax.jit(call), inputs(), order=1, modes=["fwd", "rev"])


@pytest.mark.parametrize("precision", ["f32", "bf16", "int8", "fp8", "sagebwd"])
def test_every_trainable_precision_gives_what_numpy_gives(precision, way):
    """The same library, so the same bits."""
    q, k, v, do = draw(*[(2, 2, 40, 16)] * 4, dtype=np.float32)
    keywords = {"precision": precision, "causal": True}
    arrays = [np.asarray(x) for x in (q, k, v, do)]
    want = octet.attention(*arrays[:3], **keywords), *octet.attention_vjp(*arrays, **keywords)
    o, pull = jax.vjp(jax.jit(lambda *x: octet.attention(*x, **keywords)), q, k, v)
    for x, y in zip((o, *pull(do)), want, strict=True):
        np.testing.assert_array_equal(x, y)
    for x, y in zip(octet.attention_vjp(q, k, v, do, **keywords), want[1:], strict=True):
        np.testing.assert_array_equal(x, y)


def test_bf16_gradients_take_the_unrounded_output():
    q, k, v, do = draw(*[(1, 2, 64, 32)] * 4, dtype=jnp.bfloat16)
    want = octet.attention_vjp(*(np.asarray(x) for x in (q, k, v, do)))
    _, pull = jax.vjp(octet.attention, q, k, v)
    batched = jax.vjp(jax.vmap(octet.attention), q[None], k[None], v[None])[1](do[None])
    for x, y, z in zip(pull(do), want, batched, strict=True):
        np.testing.assert_array_equal(x, y)
        np.testing.assert_array_equal(z[0], y)


@pytest.mark.parametrize("dtype, more", [(jnp.float32, 0), (jnp.float16, 1), (jnp.bfloat16, 1)])
def test_a_gradient_keeps_one_byte_beside_each_16_bit_number_of_o(dtype, more):
    q, k, v = draw((2, 4, 24, 16), (2, 2, 30, 16), (2, 2, 30, 16), dtype=dtype)
    o, pull = jax.vjp(octet.attention, q, k, v)
    kept = sum(x.nbytes for x in jax.tree.leaves(pull))
    assert kept == q.nbytes + k.nbytes + v.nbytes + o.nbytes + 4 * o.size // o.shape[-1] + more * o.size


def test_what_bf16_gradients_keep_passes_through_transformations():
    """The digits of the un-rounded output are integers, whose tangents jax gives a type of their own."""
    q, k, v, do = draw(*[(1, 2, 24, 16)] * 4, dtype=jnp.bfloat16)

    def gradients(*x, function=octet.attention):
        return jax.vjp(function, *x[:3])[1](x[3])

    def in_a_loop(*x):
        return jax.lax.scan(lambda none, y: (none, octet.attention(*y)), None, tuple(y[None] for y in x))[1][0]

    want = gradients(q, k, v, do)
    _, along = jax.linearize(octet.attention, q, k, v)
    mapped = jax.jit(jax.vmap(gradients, in_axes=(None, 0, None, 0)))(q, k[None], v, do[None])
    for found in (
        [x[0] for x in mapped],
        jax.jit(lambda *x: gradients(*x, function=jax.checkpoint(octet.attention)))(q, k, v, do),
        jax.jit(lambda *x: gradients(*x, function=in_a_loop))(q, k, v, do),
        jax.linear_transpose(along, q, k, v)(do),
    ):
        for x, y in zip(found, want, strict=True):
            np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(along(q, k, v), jax.jvp(octet.attention, (q, k, v), (q, k, v))[1])


@pytest.mark.parametrize("in_axes", [(0, 0, 0), (0, None, None), (None, 1, 2), (0, 0, 0, 0), (None, 0, 0, 1)])
def test_vmap_is_a_loop(in_axes):
    shapes = (2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8), (2, 4, 5, 7)
    x = draw(*(s if d is None else (*s[:d], 3, *s[d:]) for s, d in zip(shapes, in_axes, strict=False)))
    if len(x) > 3:
        x[3] = x[3] > 0

    def output(q, k, v, mask=None):
        return octet.attention(q, k, v, mask=mask, return_lse=True)

    def tangent(q, k, v, mask=None):
        return jax.jvp(lambda *y: octet.attention(*y, mask=mask), (q, k, v), (q, k, v))[1]

    def gradient(q, k, v, mask=None):
        return jax.grad(lambda *y: (octet.attention(*y, mask=mask) ** 2).sum(), argnums=(0, 1, 2))(q, k, v)

    for function in (output, tangent, gradient):
        expect_vmap_is_a_loop(function, in_axes, x)


def test_jacobians_both_ways_agree():
    for a, b in zip(jax.jacrev(call, (0, 1, 2))(*inputs()), jax.jacfwd(call, (0, 1, 2))(*inputs()), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


def test_packed_sequences(way):
    (q,) = draw((12, 2, 8))
    cu = jnp.array([0, 5, 12], jnp.int32)
    call = jax.jit(lambda q: octet.attention_varlen(q, q, q, cu, cu, causal="top_left", return_lse=True))
    for got, want in zip(
        call(q),
        octet.attention_varlen(*[np.asarray(q)] * 3, *[np.asarray(cu)] * 2, causal="top_left", return_lse=True),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)
    check_grads(lambda q: call(q)[0], (q,), order=1, modes=["fwd", "rev"])
    many = jnp.stack([q, 2 * q])
    np.testing.assert_array_equal(jax.vmap(call)(many)[0][1], call(2 * q)[0])
    with pytest.raises(octet.Unsupported, match="cu_seqlens_q: mapped by vmap"):
        jax.vmap(lambda c: octet.attention_varlen(q, q, q, c, c))(jnp.stack([cu, cu]))


@settings(max_examples=20, deadline=None)  # each compiles
@given(st.data())
def test_it_is_jax_nn_dot_product_attention(data):
    """jax's is in float64, but for its logits in float32. Every query sees a key: jax gives others the mean."""
    pick = data.draw
    batch, kv_heads, group = pick(st.integers(1, 2)), pick(st.integers(1, 2)), pick(st.integers(1, 3))
    queries, dim = pick(st.integers(1, 40)), 8 * pick(st.integers(1, 4))
    kind = pick(st.sampled_from(["none", "bool", "float", "causal", "bool and causal", "window"]))
    keys = queries + pick(st.integers(0, 9)) if kind == "window" else pick(st.integers(1, 40))
    dtype = pick(st.sampled_from([np.float64, np.float32, np.float16, jnp.bfloat16]))
    seed = pick(st.integers(0, 2**31))
    heads = (queries, kv_heads * group), (keys, kv_heads), (keys, kv_heads)
    q, k, v = draw(*((batch, *shape, dim) for shape in heads), dtype=dtype, seed=seed)
    random = np.random.default_rng(seed)
    full = (batch, kv_heads * group, queries, keys)
    shape = tuple(n if pick(st.booleans()) else 1 for n in full)
    # Some of these shapes read as tensors of two layouts, unless it is said that they are meant.
    ours, theirs, bias = {"layout": "bshd", "scale": 0.25, "enable_gqa": True}, {"scale": 0.25}, None
    if "bool" in kind:
        mask = random.random(shape) < 0.7
        mask[..., 0] = True
        ours["mask"] = theirs["mask"] = jnp.asarray(mask)
        theirs["mask"] = jnp.broadcast_to(theirs["mask"], full)
    if "causal" in kind:
        ours["causal"], theirs["is_causal"] = "top_left", True
    if kind == "float":
        bias = random.standard_normal(shape).astype(np.float32)
        ours["mask"], theirs["bias"] = jnp.asarray(bias), jnp.asarray(bias, np.float64)
    if kind == "window":
        window = pick(st.integers(0, 9)), pick(st.integers(0, 9))
        ours |= {"window": window, "alignment": "top_left"}
        theirs["local_window_size"] = window
    # Compiled as one program: by itself each of its operations would be compiled for these shapes.
    their_attention = jax.jit(functools.partial(jax.nn.dot_product_attention, **theirs))
    want = their_attention(*(x.astype(np.float64) for x in (q, k, v)))
    got = octet.attention(q, k, v, **ours)
    assert got.dtype == dtype and got.shape == q.shape
    numbers = [np.asarray(x, np.float64).transpose(0, 2, 1, 3) for x in (q, k, v)]
    units = exact.rounding(np.dtype(dtype)), exact.rounding("float32")
    bound = sum(exact.bounds(*numbers, scale=0.25, bias=bias, **unit)["o"] for unit in units)
    exact.expect_close(got, np.asarray(want), bound, kind)


def test_the_pair_is_differentiable_in_o_alone():
    q, k, v = inputs()
    o, to = octet.attention_jvp(q, k, v, q, k, v)
    want_o, want_to = jax.jvp(octet.attention, (q, k, v), (q, k, v))
    np.testing.assert_allclose(o, want_o, rtol=1e-13, atol=1e-14)
    np.testing.assert_array_equal(to, want_to)
    got = jax.grad(lambda q: octet.attention_jvp(q, k, v, q, k, v)[0].sum())(q)
    np.testing.assert_array_equal(got, jax.grad(lambda q: octet.attention(q, k, v).sum())(q))
    assert (jax.grad(lambda q: octet.attention_jvp(q, k, v, q, k, v)[1].sum())(q) == 0).all()


def tangents_of_program(function, *x):
    """Which tangents the passes of a program take, those of programs within it too."""
    found = []

    def visit(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name in ("octet_pair", "octet_tangent"):
                found.append({name for name in equation.params["names"] if name in ("tq", "tk", "tv")})
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                visit(inner)

    visit(jax.make_jaxpr(function)(*x).jaxpr)
    return found


@pytest.mark.parametrize("names", ["q", "v", "qk"])
def test_tangents_that_are_absent_are_left_out(names):
    x = dict(zip("qkv", inputs(), strict=True))
    t = dict(zip("qkv", draw(*(y.shape for y in x.values()), seed=1), strict=True))
    along = {name: t[name] if name in names else None for name in x}
    zeros = [jnp.zeros_like(x[name]) if along[name] is None else along[name] for name in x]
    want = octet.attention_jvp(*x.values(), *zeros, causal="bottom_right")
    moving, directions = [tuple(y[name] for name in names) for y in (x, t)]

    def with_moving(*y):
        return call(**x | dict(zip(names, y, strict=True)))

    def tangent(*y):
        return jax.jvp(with_moving, y, directions)

    def linear(*y):
        o, along_directions = jax.linearize(jax.jit(with_moving), *y)
        return o, along_directions(*directions)

    def mapped(*y):
        o, to = jax.vmap(tangent)(*(jnp.stack([z, z]) for z in y))
        return o[1], to[1]

    def explicit():
        return octet.attention_jvp(*x.values(), *along.values(), causal="bottom_right")

    assert tangents_of_program(explicit) == [{f"t{name}" for name in names}]
    ways = {"jvp": tangent, "jit": jax.jit(tangent), "linearize": linear, "vmap": mapped}
    for way_of, run in ways.items():
        assert tangents_of_program(run, *moving) == [{f"t{name}" for name in names}], way_of
    for way_of, found in {"explicit": explicit(), **{a: run(*moving) for a, run in ways.items()}}.items():
        for a, b in zip(found, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13, err_msg=way_of)
    # Backwards the same program gives the gradients that are asked for, and no other.
    got = jax.jit(jax.grad(lambda *y: with_moving(*y).sum(), argnums=tuple(range(len(names)))))(*moving)
    every = dict(zip("qkv", jax.grad(lambda *y: call(*y).sum(), argnums=(0, 1, 2))(*x.values()), strict=True))
    for name, a in zip(names, got, strict=True):
        np.testing.assert_allclose(a, every[name], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_a_second_derivative_that_is_not_used_is_not_rejected(transform):
    """The loss of MeanFlow: a target made of a tangent, under stop_gradient."""
    q, k, v = inputs()

    def loss(q):
        o, to = jax.jvp(octet.attention, (q, k, v), (q, k, v))
        return ((o - jax.lax.stop_gradient(to)) ** 2).sum()

    o, to = jax.jvp(octet.attention, (q, k, v), (q, k, v))
    want = octet.attention_vjp(q, k, v, 2 * (o - to))[0]
    np.testing.assert_allclose(transform(jax.grad(loss))(q), want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("in_axes", [(0, 0, 0), (0, None, None), (None, 0, 0)])
def test_vmap_over_nothing_gives_nothing(in_axes):
    shapes = (2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)
    x = draw(*(s if d is None else (0, *s) for s, d in zip(shapes, in_axes, strict=True)))

    def everything(q, k, v):
        (o, lse), pull = jax.vjp(lambda *y: octet.attention(*y, return_lse=True), q, k, v)
        return o, lse, *pull((o, lse)), *octet.attention_jvp(q, k, v, q, k, v)

    got = jax.vmap(everything, in_axes)(*x)
    o, lse = (2, 4, 5, 8), (2, 4, 5)
    assert [y.shape for y in got] == [(0, *shape) for shape in (o, lse, *shapes, o, o)]
    cu = jnp.array([0, 2, 5], jnp.int32)
    packed = jax.vmap(lambda q: octet.attention_varlen(q, q, q, cu, cu, return_lse=True))(jnp.zeros((0, 5, 2, 8)))
    assert [y.shape for y in packed] == [(0, 5, 2, 8), (0, 2, 5)]


@pytest.mark.parametrize(
    "cu, longest, message",
    [
        ([0, 5, 11], 0, "cu_seqlens_q: runs from 0 to 11, expected 0 to the 12 tokens of q"),
        ([0, 13, 12], 0, "cu_seqlens_q: falls from 13 to 12 at sequence 1; must ascend"),
        ([0, 3, 12], 8, "max_seqlen_q: 8, but sequence 1 has 9 tokens"),
    ],
)
def test_wrong_lengths_are_named(cu, longest, message, way):
    """When the call is made, where they are known; else in the error of the program."""
    q, cu = draw((12, 2, 8))[0], jnp.array(cu, jnp.int32)
    right = jnp.array([0, 5, 12], jnp.int32)

    def call(q, cu):
        return octet.attention_varlen(q, q, q, cu, right, max_seqlen_q=longest, causal="top_left")

    for known in (call, jax.jit(lambda q, _: call(q, cu)), jax.grad(lambda q, cu: call(q, cu).sum())):
        with pytest.raises(octet.InvalidArgument, match=message):
            known(q, cu)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.jit(call)(q, cu).block_until_ready()


@pytest.mark.parametrize("dim, dim_v", [(1, 3), (7, 8), (8, 13), (59, 111), (255, 256)])
def test_head_dims_that_are_no_multiple_of_8(dim, dim_v):
    shapes = (2, 4, 5, dim), (2, 2, 7, dim), (2, 2, 7, dim_v)
    x, t = draw(*shapes), draw(*shapes, seed=1)
    do, dlse = draw((2, 4, 5, dim_v), (2, 4, 5), seed=2)
    arrays = [np.asarray(y) for y in x]
    about = {"do": np.asarray(do), "dlse": np.asarray(dlse), "tangents": [np.asarray(y) for y in t]}
    want = exact.attention(*arrays, **about)
    bound = exact.bounds(*arrays, **about, **exact.rounding("float64"))

    def both(q, k, v):
        return octet.attention(q, k, v, return_lse=True)

    (o, lse), pull = jax.vjp(jax.jit(both), *x)
    to, tlse = jax.jvp(both, x, t)[1]
    got = dict(zip(("dq", "dk", "dv"), pull((do, dlse)), strict=True)) | {"o": o, "lse": lse, "to": to, "tlse": tlse}
    for name, found in got.items():
        exact.expect_close(found, want[name], bound[name], name)
    explicit = octet.attention_vjp(*x, do, dlse=dlse)
    for name, found in zip(("dq", "dk", "dv"), explicit, strict=True):
        np.testing.assert_array_equal(found, got[name])
    np.testing.assert_array_equal(octet.attention_jvp(*x, *t)[1], to)


def test_head_dims_that_are_filled_count_in_the_scale_as_they_are():
    """And at every precision zeros are zeros."""
    q, k, v = draw(*[(1, 2, 40, 20)] * 3, dtype=np.float32)
    filled = [jnp.pad(x, [(0, 0)] * 3 + [(0, 4)]) for x in (q, k, v)]
    for precision in ("f32", "bf16", "int8", "fp8", "sagebwd"):
        want = octet.attention(*filled, precision=precision, scale=20**-0.5)[..., :20]
        np.testing.assert_array_equal(octet.attention(q, k, v, precision=precision), want)


@pytest.mark.parametrize("name, dims", [("q", (513, 513, 8)), ("v", (8, 8, 520)), ("q", (0, 0, 8))])
def test_head_dims_that_no_kernel_has(name, dims):
    x = [jnp.zeros((1, 2, 5, dim)) for dim in dims]
    with pytest.raises(octet.InvalidArgument, match=f"{name}: head dim {dims['qkv'.index(name)]}, allowed: 1 to 512"):
        octet.attention(*x)


def test_head_dims_that_differ_are_not_filled_to_the_same():
    with pytest.raises(octet.InvalidArgument, match="k: head dim 6, expected 7, that of q"):
        octet.attention(*(jnp.zeros((1, 2, 5, dim)) for dim in (7, 6, 7)))
    q = jnp.zeros((1, 2, 5, 7))
    with pytest.raises(octet.InvalidArgument, match="do: head dim 6, expected 7, that of v"):
        octet.attention_vjp(q, q, q, q[..., :6])


def test_nothing_is_transposed_or_copied_between_projections_and_the_call():
    """Arrays of XLA lie row-major, so [batch, token, head, dim] of a projection is what layout "bshd" computes on."""
    x, w = draw((2, 16, 32), (32, 96), dtype=np.float32)

    def loss(x, w):
        q, k, v = (y.reshape(2, 16, 4, 8) for y in jnp.split(x @ w, 3, axis=-1))
        return (octet.attention(q, k, v, causal=True, layout="bshd").reshape(2, 16, 32) ** 2).sum()

    text = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(x, w).compile().as_text()
    assert text.count('custom_call_target="octet"') == 2
    moved = [line for line in text.splitlines() if re.search(r"= f32\[2,16,4,8\]\S* (copy|transpose)\(", line)]
    assert not moved, moved
    assert not re.search(r"f32\[2,4,16,8\]", text)
    assert set(re.findall(r"f32\[2,16,4,8\](\{[\d,]*)", text)) == {"{3,2,1,0"}


def test_programs_on_four_devices_and_in_other_processes():
    if not _adapter.has_handlers():
        pytest.skip("built without jaxlib's headers")
    pytest.importorskip("flatbuffers")
    program = pathlib.Path(__file__).parent / "jax_programs.py"
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr


def test_callbacks_are_rejected_on_several_devices(monkeypatch):
    """Callbacks of several devices once waited for each other forever."""
    if len(jax.devices("cpu")) < 2:
        pytest.skip("the CPU is one device: jax was started before this module")
    monkeypatch.setattr(_adapter, "has_handlers", lambda: False)
    jax.clear_caches()
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:2])
    where = jax.sharding.PartitionSpec("x")
    shard = jax.jit(jax.shard_map(octet.attention, mesh=mesh, in_specs=where, out_specs=where))
    with pytest.raises(octet.Unsupported, match="several devices of the CPU need XLA handlers of octet"):
        shard(*inputs())
    jax.clear_caches()


def test_handlers_for_another_interface_are_not_taken(monkeypatch):
    """jax would take them at first, and then fail to start its devices."""
    if not _adapter.has_handlers():
        pytest.skip("built without jaxlib's headers")
    monkeypatch.setattr(_adapter, "why_no_handlers", _adapter.why_no_handlers.__wrapped__)
    for offered, shown in (((0, 1), "its version is 0.1"), ((1, 9), "its version is 1.9"), (None, "unknown")):
        monkeypatch.setattr(_adapter, "_interface_of_jax", lambda: offered)  # noqa: B023
        reason = _adapter.why_no_handlers()
        assert "was built for version 0." in reason and shown in reason
        assert not _adapter.has_handlers()
        assert octet.info()["xla_handlers"] is None
        assert octet.info()["jax"] == f"{jax.__version__}, callbacks into Python on one CPU device: {reason}"
    monkeypatch.undo()
    assert octet.info()["jax"] == f"{jax.__version__}, XLA handlers"
    assert octet.info()["xla_handlers"].endswith("liboctet_jax.so")


def test_explain_supports_and_check_take_jax_arrays():
    q = jnp.zeros((1, 2, 16, 8), jnp.bfloat16)
    assert "forward int8" in octet.explain(q, q, q, precision="int8")
    assert not octet.supports(q, q, q, kind="jvp", precision="int8")
    (x,) = draw((1, 2, 40, 16), dtype=jnp.bfloat16)
    assert 0 < octet.check(x, x, x)["o"].rel_l2 < 0.01


def test_rejections_come_before_the_program_runs(way):
    q, k, v = inputs()
    with pytest.raises(octet.InvalidArgument, match="alignment: unspecified"):
        jax.jit(lambda *x: octet.attention(*x, causal=True)).lower(q, k, v)
    with pytest.raises(octet.Unsupported, match="has no backward pass"):
        x = q.astype(jnp.float32)
        jax.grad(lambda x: octet.attention(x, x, x, precision="int8_fp8").sum())(x)
    with pytest.raises(octet.Unsupported, match="has no jvp"):
        x = q.astype(jnp.float32)
        jax.jvp(lambda x: octet.attention(x, x, x, precision="int8"), (x,), (x,))
    with pytest.raises(octet.Unsupported, match="alibi_slopes: differentiated"):
        slopes = jnp.ones(q.shape[1], jnp.float32)
        jax.grad(lambda slopes: octet.attention(q, k, v, alibi_slopes=slopes).sum())(slopes)
    with pytest.raises(octet.Unsupported, match="octet computes first derivatives only"):
        jax.hessian(lambda q: octet.attention(q, k, v).sum())(q)
    with pytest.raises(octet.Unsupported, match="octet computes first derivatives only"):
        jax.grad(lambda q: jax.jvp(octet.attention, (q, k, v), (q, k, v))[1].sum())(q)
    with pytest.raises(octet.InvalidArgument, match="k: a numpy array, but q is one of jax"):
        octet.attention(q, np.asarray(k), v)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "of_q, precision", [("bfloat16", "f32"), ("float8_e4m3fn", "fp8"), ("float8_e4m3fn", "fp8_raw")]
)
def test_out_dtype(of_q, precision, name, way):
    """Results equal those of numpy arrays: eager, compiled, dense, packed and mapped; head dim 12 is padded to 16."""
    q, k, v = (x.astype(of_q) for x in draw(*[(1, 2, 12, 12)] * 3))
    packed, cu = [x[0].transpose(1, 0, 2) for x in (q, k, v)], jnp.array([0, 5, 12], jnp.int32)
    for out_dtype in (name, jnp.dtype(name)):
        how = {"precision": precision, "out_dtype": out_dtype}
        want = octet.attention(*map(np.asarray, (q, k, v)), **how)
        for run in (jax.jit, jax.vmap, lambda f: f):
            x = [y[None] for y in (q, k, v)] if run is jax.vmap else (q, k, v)
            o = run(functools.partial(octet.attention, **how))(*x)
            assert o.dtype == name
            np.testing.assert_array_equal(o.reshape(want.shape), want)
        want = octet.attention_varlen(*map(np.asarray, (*packed, cu, cu)), **how)
        for run in (jax.jit, lambda f: f):
            varlen = functools.partial(octet.attention_varlen, cu_seqlens_q=cu, cu_seqlens_k=cu, **how)
            np.testing.assert_array_equal(run(varlen)(*packed), want)


def test_derivatives_through_out_dtype(way):
    q, k, v, do = draw(*[(1, 2, 12, 16)] * 4, dtype=jnp.bfloat16)
    how = {"precision": "f32", "out_dtype": "float32"}
    do = do.astype(jnp.float32)
    o, pull = jax.vjp(jax.jit(lambda *x: octet.attention(*x, **how)), q, k, v)
    arrays = [np.asarray(x) for x in (q, k, v, do)]
    assert o.dtype == jnp.float32
    for got in (pull(do), octet.attention_vjp(q, k, v, do, **how)):
        for x, y in zip(got, octet.attention_vjp(*arrays, **how), strict=True):
            np.testing.assert_array_equal(x, y)
    o, to = jax.jvp(lambda *x: octet.attention(*x, **how), (q, k, v), (q, k, v))
    assert o.dtype == to.dtype == jnp.float32
    np.testing.assert_array_equal(o, octet.attention(*arrays[:3], **how))
    # The forward pass has o here, which numpy's jvp finds with `to`: on some CPUs float32 rounds the two otherwise.
    want = octet.attention_jvp(*arrays[:3], *arrays[:3], **how)[1]
    np.testing.assert_allclose(to, want, rtol=0, atol=2**-20 * np.abs(want).max())


def test_eight_bit_floats_have_results_of_bfloat16_and_no_gradient_in_programs(way):
    """Results equal those of numpy arrays. Gradients are rejected, because jax would round them to 8 bits."""
    q, k, v, do = (x.astype(jnp.float8_e4m3fn) for x in draw(*[(1, 2, 12, 16)] * 4))
    do = do.astype(jnp.bfloat16)
    arrays = [np.asarray(x) for x in (q, k, v, do)]
    o, want = (octet.attention(*x, precision="fp8") for x in ((q, k, v), arrays[:3]))
    assert o.dtype == jnp.bfloat16
    np.testing.assert_array_equal(o, want)
    gradients = octet.attention_vjp(q, k, v, do, precision="fp8")
    for x, y in zip(gradients, octet.attention_vjp(*arrays, precision="fp8"), strict=True):
        assert x.dtype == jnp.bfloat16
        np.testing.assert_array_equal(x, y)
    for name, index in (("q", 0), ("v", 2)):
        with pytest.raises(octet.Unsupported, match=f"{name}: a float8_e4m3fn array is differentiated"):
            jax.jit(jax.grad(lambda *x: octet.attention(*x, precision="fp8").sum(), index))(q, k, v)
    with pytest.raises(octet.InvalidArgument, match="o: dtype e4m3, allowed: f32, f16, bf16"):
        octet.attention(q, k, v, precision="fp8", out_dtype="float8_e4m3fn")
    gradient = jax.grad(lambda x: octet.attention(x, k, v, precision="fp8").sum())(q.astype(jnp.bfloat16))
    assert gradient.dtype == jnp.bfloat16 and jnp.isfinite(gradient).all() and gradient.any()


def test_subnormal_numbers_count(way):
    """XLA has its threads read subnormal floats as 0, through which f16 numbers below 6e-5 are read."""
    q, k, v = draw(*[(1, 2, 12, 16)] * 3, dtype=np.float32)
    x = [y.astype(jnp.float16) for y in (q, k, v * 1e-6)]
    want = octet.attention(*map(np.asarray, x), precision="f32")
    assert want.any()
    np.testing.assert_array_equal(octet.attention(*x, precision="f32"), want)


@pytest.mark.parametrize("name", ["scale", "softcap", "beta", "threads", "window", "causal", "deterministic"])
def test_a_traced_number_is_rejected_with_what_to_do(name):
    x = jnp.ones((1, 2, 8, 8))
    with pytest.raises(octet.InvalidArgument, match=f"{name}: traced by jax.*static_argnames='{name}'"):
        jax.jit(lambda number: octet.attention(x, x, x, **{name: number}))(2)
    cu = jnp.array([0, 8], dtype=jnp.int32)
    with pytest.raises(octet.InvalidArgument, match="max_seqlen_q: traced by jax"):
        jax.jit(lambda n: octet.attention_varlen(*[jnp.ones((8, 2, 8))] * 3, cu, cu, max_seqlen_q=n))(8)
