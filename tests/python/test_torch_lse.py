"""The gradient of lse, and sinks, in torch: against the definition, eager, compiled, mapped, forwards and backwards."""

import exact
import numpy as np
import octet
import pytest
from cases import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_shared import compiled

torch = pytest.importorskip("torch")
import octet.torch  # noqa: E402  # registers the operators
from torch.autograd import gradcheck  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

CHECKS = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": True}


def inputs(*, heads=4, kv_heads=2, queries=5, keys=7, dim=8, dtype=torch.float64, seed=0):
    """q, k, v, sinks"""
    torch.manual_seed(seed)
    shapes = (2, heads, queries, dim), (2, kv_heads, keys, dim), (2, kv_heads, keys, dim), (heads,)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def definition(q, k, v, sinks=None, seen=None):
    """(o, lse) by torch's own products, differentiable as often as one likes."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q @ k.transpose(-1, -2) * exact.default_scale(q.shape[-1])
    s = s if seen is None else s.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks[:, None, None].expand(*s.shape[:-1], 1)], -1)
    return s.softmax(-1)[..., : k.shape[2]] @ v, s.logsumexp(-1)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_every_derivative_agrees_with_the_definition(dtype):
    @settings(max_examples=60, deadline=None)
    @given(cases(dtype), st.booleans(), st.booleans(), st.data())
    def holds(case, has_sinks, of_o, data):
        a = dict(case.arrays)
        random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
        batch, heads, queries, _ = a["q"].shape
        a["dlse"] = random.standard_normal((batch, heads, queries)).astype(dtype)
        a["sinks"], a["tsinks"] = random.standard_normal((2, heads)).astype(dtype) if has_sinks else (None, None)
        x = {name: None if y is None else torch.from_numpy(y.copy()) for name, y in a.items()}
        for name in ("q", "k", "v", "do", "tq", "tk", "tv"):
            x[name] = x[name] if case.layout == "bhsd" else x[name].transpose(1, 2)
        mask = None if case.mask is None else torch.from_numpy(case.mask)
        how = {"mask": mask, "layout": case.layout, "return_lse": True} | case.keywords

        def call(q, k, v, *sinks):
            return octet.attention(q, k, v, sinks=sinks[0] if sinks else None, **how)

        names = ("q", "k", "v", "sinks") if has_sinks else ("q", "k", "v")
        leaves = [x[name].clone().requires_grad_() for name in names]
        o, lse = call(*leaves)
        outputs, cotangents = ((o, lse), (x["do"], x["dlse"])) if of_o else ((lse,), (x["dlse"],))
        gradients = torch.autograd.grad(outputs, leaves, cotangents)
        got = dict(zip([f"d{name}" for name in names], gradients, strict=True))
        _, (got["to"], got["tlse"]) = torch.func.jvp(
            call, tuple(x[name] for name in names), tuple(x[f"t{name}"] for name in names)
        )
        got |= {"o": o.detach(), "lse": lse.detach()}
        do = a["do"] if of_o else np.zeros_like(a["do"])
        about = {"sinks": a["sinks"], "do": do, "dlse": a["dlse"], "tangents": (a["tq"], a["tk"], a["tv"])}
        about |= {"tsinks": a["tsinks"]} | case.exact()
        want = exact.attention(a["q"], a["k"], a["v"], seen=case.seen, **about)
        bound = exact.bounds(a["q"], a["k"], a["v"], **about, **exact.rounding(np.dtype(dtype)))
        for name, found in got.items():
            found = found.transpose(1, 2) if found.ndim == 4 and case.layout == "bshd" else found
            exact.expect_close(found.numpy(), want[name], bound[name], name)

    holds()


@pytest.mark.parametrize(
    "keywords",
    [{"causal": "bottom_right"}, {"layout": "bshd", "scale": 0.5}, {"mask": True}],
    ids=str,
)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_gradcheck(keywords, has_sinks):
    if "mask" in keywords:
        keywords = {"mask": torch.rand(2, 1, 5, 7) < 0.6}
    *qkv, sinks = inputs(heads=2, kv_heads=1)
    if keywords.get("layout") == "bshd":
        qkv = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in qkv]

    def call(q, k, v, sinks=None):
        o, lse = octet.attention(q, k, v, sinks=sinks, return_lse=True, **keywords)
        return o, torch.where(lse.isfinite(), lse, 0.0)  # a query that sees nothing has no derivative

    assert gradcheck(call, (*qkv, sinks) if has_sinks else qkv, **CHECKS)


def test_gradcheck_in_float32():
    """By differences of 0.01: they are off by its square times a third derivative, some 1e-4, and by the rounding of o
    and lse, some 1e-6, divided by 0.02."""
    x = inputs(heads=2, kv_heads=1, dtype=torch.float32)

    def call(q, k, v, sinks):
        return octet.attention(q, k, v, sinks=sinks, return_lse=True, causal="bottom_right")

    assert gradcheck(call, x, eps=1e-2, atol=5e-4, rtol=5e-4, check_forward_ad=True)


def test_gradcheck_of_packed_sequences():
    torch.manual_seed(0)
    cu = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    q, k, v = (torch.randn(8, h, 8, dtype=torch.float64, requires_grad=True) for h in (2, 1, 1))
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def call(q, k, v, sinks):
        return octet.attention_varlen(q, k, v, cu, cu, causal="top_left", sinks=sinks, return_lse=True)

    assert gradcheck(call, (q, k, v, sinks), **CHECKS)


def test_the_gradient_of_a_loss_that_reads_lse_is_whole():
    """The z-loss of training: without the gradient of lse it was off by .18."""
    q, k, v, _ = inputs(queries=33, keys=33, dim=16)

    def loss(attention):
        o, lse = attention(q, k, v)
        return o.square().sum() + 0.1 * lse.square().sum()

    got = torch.autograd.grad(loss(lambda *x: octet.attention(*x, return_lse=True)), (q, k, v))
    want = torch.autograd.grad(loss(definition), (q, k, v))
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13)


def test_halves_of_the_keys_merge_to_the_whole():
    """Ring attention: partial results are added by their lse, and so are their gradients."""
    *x, sinks = inputs(queries=6, keys=10)

    def merged(q, k, v, sinks):
        parts = [
            octet.attention(q, k[:, :, half], v[:, :, half], sinks=s, return_lse=True, enable_gqa=True)
            for half, s in ((slice(0, 4), None), (slice(4, 10), sinks))
        ]
        lse = torch.logaddexp(parts[0][1], parts[1][1])
        return sum(o * (part - lse).exp()[..., None] for o, part in parts), lse

    def whole(q, k, v, sinks):
        return octet.attention(q, k, v, sinks=sinks, return_lse=True)

    results = [f(*x, sinks) for f in (merged, whole)]
    weights = [torch.randn_like(y) for y in results[0]]
    gradients = [torch.autograd.grad(y, (*x, sinks), weights) for y in results]
    for found in (results, gradients):
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sinks_of_any_float_type(dtype):
    """Computed in float32; the gradient is of the type of the sinks."""
    q, k, v, sinks = (x.detach().float() for x in inputs(queries=9, keys=9))
    sinks = sinks.to(dtype).requires_grad_()
    o, lse = octet.attention(q, k, v, sinks=sinks, return_lse=True)
    got = torch.autograd.grad((o, lse), sinks, (o.detach(), lse.detach()))[0]
    wide = sinks.detach().float().requires_grad_()
    want_o, want_lse = octet.attention(q, k, v, sinks=wide, return_lse=True)
    (want,) = torch.autograd.grad((want_o, want_lse), wide, (o.detach(), lse.detach()))
    assert torch.equal(o, want_o) and torch.equal(lse, want_lse) and lse.dtype is torch.float32
    assert got.dtype is dtype and torch.equal(got, want.to(dtype))
    *_, dsinks = octet.attention_vjp(q, k, v, o.detach(), sinks=sinks, dlse=lse.detach())
    assert not dsinks.requires_grad and torch.equal(dsinks, got)


def test_the_functions_for_arrays_agree_with_autograd():
    q, k, v, sinks = inputs()
    do, dlse = torch.randn(2, 4, 5, 8, dtype=torch.float64), torch.randn(2, 4, 5, dtype=torch.float64)
    tangents, tsinks = [torch.randn_like(x) for x in (q, k, v)], torch.randn_like(sinks)

    def call(q, k, v, sinks):
        return octet.attention(q, k, v, sinks=sinks, return_lse=True)

    o, lse = call(q, k, v, sinks)
    want = torch.autograd.grad((o, lse), (q, k, v, sinks), (do, dlse))
    got = octet.attention_vjp(q, k, v, do, sinks=sinks, dlse=dlse)
    assert len(got) == 4 and all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    assert len(octet.attention_vjp(q, k, v, do, dlse=dlse)) == 3
    _, (to, tlse) = torch.func.jvp(call, (q, k, v, sinks), (*tangents, tsinks))
    got = octet.attention_jvp(q, k, v, *tangents, sinks=sinks, tsinks=tsinks, return_lse=True)
    assert all(torch.equal(x, y) for x, y in zip(got, (o, to, lse, tlse), strict=True))
    assert got[0].requires_grad and got[2].requires_grad and not got[1].requires_grad and not got[3].requires_grad
    fixed = octet.attention_jvp(q, k, v, *tangents, sinks=sinks)
    moved = octet.attention_jvp(q, k, v, *tangents, sinks=sinks, tsinks=torch.zeros_like(tsinks))
    assert len(fixed) == 2 and torch.equal(fixed[1], moved[1])
    of_pair, of_call = (torch.autograd.grad(y.sum(), (q, k, v, sinks)) for y in (got[2], call(q, k, v, sinks)[1]))
    assert all(torch.equal(x, y) for x, y in zip(of_pair, of_call, strict=True))


def test_a_query_that_sees_nothing_has_its_sink():
    q, k, v, sinks = inputs()
    mask = torch.zeros(5, 7, dtype=torch.bool)
    mask[1:] = True
    o, lse = octet.attention(q, k, v, sinks=sinks, mask=mask, return_lse=True)
    assert (o[:, :, 0] == 0).all() and torch.equal(lse[:, :, 0], sinks.expand(2, 4))
    dq, dk, dv, dsinks = torch.autograd.grad(lse[:, :, 0].sum(), (q, k, v, sinks))
    assert not dq.any() and not dk.any() and not dv.any() and torch.equal(dsinks, torch.full_like(sinks, 2))
    o, lse = octet.attention(q, k, v, mask=mask, return_lse=True)
    gradients = torch.autograd.grad((o, lse), (q, k, v), (torch.ones_like(o), torch.ones_like(lse)))
    assert all(x.isfinite().all() for x in gradients) and not gradients[0][:, :, 0].any()


class Listening(TorchDispatchMode):
    """Which of the arguments after v of octet::backward were given, and all names; defaults are left out."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.heard = [*getattr(self, "heard", []), function.name()]
        if function.name() == "octet::backward":
            _, self.sinks, self.dlse = (*args, *[None] * 5)[10:13]
        return function(*args, **(kwargs or {}))


def test_what_no_loss_reads_costs_nothing():
    q, k, v, sinks = inputs()
    octet.attention(q, k, v)  # asks once whether there is a backward pass
    for call in (lambda: octet.attention(q, k, v), lambda: octet.attention(q, k, v, return_lse=True)[0]):
        with Listening() as mode:
            torch.autograd.grad(call().sum(), (q, k, v))
        assert mode.dlse is None and mode.sinks is None
        assert {name for name in mode.heard if "octet" in name} == {"octet::forward", "octet::backward"}
    with Listening() as mode:
        torch.autograd.grad(octet.attention(q, k, v, return_lse=True)[1].sum(), (q, k, v))
    assert mode.dlse is not None


def test_without_return_lse_compiled_code_hands_over_no_gradient_of_it():
    from torch._dynamo.backends.common import aot_autograd

    seen = []

    def backward(graph, _):
        seen.extend(x.args for x in graph.graph.nodes if x.target is torch.ops.octet.backward.default)
        return graph

    backend = aot_autograd(fw_compiler=lambda graph, _: graph, bw_compiler=backward)
    q, k, v, _ = inputs()
    for of_lse in (False, True):
        function = compiled(lambda *x, how=of_lse: octet.attention(*x, return_lse=how), backend=backend)
        found = function(q, k, v)
        torch.autograd.grad(sum(x.sum() for x in (found if of_lse else (found,))), (q, k, v))
    assert [(*args, *[None] * 5)[12] is not None for args in seen] == [False, True]  # graphs leave defaults out


RESULTS = {
    "o": lambda q, k, v, sinks: (octet.attention(q, k, v),),
    "o and lse": lambda q, k, v, sinks: octet.attention(q, k, v, return_lse=True),
    "lse": lambda q, k, v, sinks: octet.attention(q, k, v, return_lse=True)[1:],
    "o with sinks": lambda q, k, v, sinks: (octet.attention(q, k, v, sinks=sinks),),
    "all": lambda q, k, v, sinks: octet.attention(q, k, v, sinks=sinks.bfloat16(), return_lse=True, causal="top_left"),
}


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_compiled_is_eager_bit_for_bit(name, dtype):
    x = inputs(dtype=dtype)

    def with_gradients(function):
        found = function(*x)
        loss = sum((y * y).sum() for y in found)
        return *(y.detach() for y in found), *torch.autograd.grad(loss, x, allow_unused=True)

    for got, want in zip(with_gradients(compiled(RESULTS[name])), with_gradients(RESULTS[name]), strict=True):
        assert (got is None and want is None) or (torch.equal(got, want) and got.stride() == want.stride())


@pytest.mark.parametrize("options", ["f64", "f32"])
def test_opcheck(options):
    from octet._options import Options
    from octet.torch._text import text_of

    how = text_of(Options(options))
    q, k, v, sinks = inputs(dtype=torch.float64 if options == "f64" else torch.float32)
    more = None, None, None, sinks.detach()
    o, lse, r = (x.detach() for x in torch.ops.octet.forward(q, k, v, False, how, *more))
    torch.library.opcheck(torch.ops.octet.forward.default, (q, k, v, False, how, *more))
    torch.library.opcheck(torch.ops.octet.backward.default, (o, q, k, v, o, lse, r, how, *more, lse))
    torch.library.opcheck(torch.ops.octet.jvp.default, (q, k, v, q, k, v, True, how, *more, sinks.detach()))


@pytest.mark.parametrize("in_dims", [(0, 0, 0, 0), (0, None, None, None), (None, None, None, 0), (3, 1, 2, 1)])
def test_vmap_is_a_loop(in_dims):
    torch.manual_seed(1)
    shapes = (2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8), (4,)
    x = [
        torch.randn(shape if d is None else (*shape[:d], 3, *shape[d:]), dtype=torch.float64)
        for shape, d in zip(shapes, in_dims, strict=True)
    ]

    def output(q, k, v, sinks):
        return octet.attention(q, k, v, sinks=sinks, return_lse=True)

    def loss(*x):
        o, lse = output(*x)
        return o.square().sum() + lse.square().sum()

    def tangent(*x):
        return torch.func.jvp(output, x, x)[1]

    for function in (output, torch.func.grad(loss, argnums=(0, 1, 2, 3)), tangent):
        got = torch.func.vmap(function, in_dims=in_dims)(*x)
        for i in range(3):
            one = function(*(y if d is None else y.select(d, i) for y, d in zip(x, in_dims, strict=True)))
            torch.testing.assert_close([y[i] for y in got], list(one), rtol=1e-12, atol=1e-13)


def test_vmap_of_vmap_and_of_packed_sequences():
    torch.manual_seed(2)
    q, sinks = torch.randn(3, 2, 2, 4, 5, 8, dtype=torch.float64), torch.randn(3, 2, 4, dtype=torch.float64)

    def gradients(q, sinks):
        return torch.func.grad(lambda *x: octet.attention(x[0], q, q, sinks=x[1]).square().sum(), (0, 1))(q, sinks)

    got = torch.func.vmap(torch.func.vmap(gradients))(q, sinks)
    for i, j in ((0, 0), (2, 1)):
        for x, y in zip(got, gradients(q[i, j], sinks[i, j]), strict=True):
            torch.testing.assert_close(x[i, j], y, rtol=1e-12, atol=1e-13)
    cu = torch.tensor([0, 2, 5], dtype=torch.int32)
    packed = torch.randn(3, 5, 4, 8, dtype=torch.float64)

    def of_packed(q, sinks):
        def loss(x, s):
            return sum(y.square().sum() for y in octet.attention_varlen(x, q, q, cu, cu, sinks=s, return_lse=True))

        return torch.func.grad(loss, (0, 1))(q, sinks)

    for dims in ((0, 0), (0, None), (None, 0)):
        x = (packed if dims[0] == 0 else packed[0], sinks[:, 0] if dims[1] == 0 else sinks[0, 0])
        got = torch.func.vmap(of_packed, in_dims=dims)(*x)
        want = of_packed(*(y if d is None else y[1] for y, d in zip(x, dims, strict=True)))
        for y, z in zip(got, want, strict=True):
            torch.testing.assert_close(y[1], z, rtol=1e-12, atol=1e-13)


def test_jacobians_both_ways_agree():
    x = [y.detach() for y in inputs(heads=2, kv_heads=1, queries=3, keys=4)]

    def call(*x):
        return octet.attention(*x[:3], sinks=x[3], return_lse=True)

    back, forth = (f(call, argnums=(0, 1, 2, 3))(*x) for f in (torch.func.jacrev, torch.func.jacfwd))
    for a, b in zip(back, forth, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_second_derivatives_are_rejected_in_octets_words():
    q, k, v, sinks = inputs()

    def call(q, sinks):
        return octet.attention(q, k, v, sinks=sinks, return_lse=True)[1].sum()

    for leaf in (0, 1):
        gradient = torch.autograd.grad(call(q, sinks), (q, sinks)[leaf], create_graph=True)[0]
        with pytest.raises(octet.Unsupported, match="first derivatives only"):
            torch.autograd.grad(gradient.square().sum(), q)

    def of_q(q):
        return octet.attention(q, k.detach(), v.detach()).square().sum()

    x = q.detach()
    with pytest.raises(octet.Unsupported, match="first derivatives only"):
        torch.func.jvp(torch.func.grad(of_q), (x,), (x,))
    with pytest.raises(octet.Unsupported, match="first derivatives only"):
        torch.func.jvp(lambda y: torch.func.jvp(of_q, (y,), (x,))[1], (x,), (x,))
    with pytest.raises(octet.Unsupported, match="first derivatives only"):
        torch.func.hessian(of_q)(x)


def test_rejections():
    q, k, v, sinks = (x.detach() for x in inputs())
    cases = [
        (sinks.long(), "sinks: dtype torch.int64, allowed: a float type"),
        (sinks[None], r"sinks: shape \[1, 4\], expected \[heads\], those of q"),
        (sinks[:3], r"sinks: shape \[1, 3, 1, 1\], expected \[1, 4, 1, 1\]"),
        (sinks.to("meta"), "sinks: on (device )?meta"),
        (sinks.numpy(), "sinks: a numpy array, but q is one of torch"),
    ]
    for wrong, words in cases:
        for call in (octet.attention, octet.explain):
            with pytest.raises(octet.InvalidArgument, match=words):
                call(q, k, v, sinks=wrong)
    with pytest.raises(octet.InvalidArgument, match="tsinks: given without sinks"):
        octet.attention_jvp(q, k, v, q, k, v, tsinks=sinks)
    with pytest.raises(octet.InvalidArgument, match=r"dlse: shape \[2, 4, 5, 8\], expected 3 dimensions"):
        octet.attention_vjp(q, k, v, q, dlse=q)
    codes = [octet.quantize(x.float(), name) for x, name in zip((q, k, v), "qkv", strict=True)]
    with pytest.raises(octet.Unsupported, match="sinks: requires a gradient"):
        octet.attention(*codes, precision="f32", sinks=sinks.requires_grad_())


def test_check_and_supports_take_sinks():
    q, k, v, sinks = (x.detach().float() for x in inputs(queries=7))
    found = octet.check(q, k, v, sinks=sinks, do=q, tangents=(q, k, v))
    assert set(found) == {"o", "lse", "dq", "dk", "dv", "dsinks", "to"}
    assert all(x.rel_l2 < 1e-2 for x in found.values())
    assert octet.supports(q, k, v, sinks=sinks, kind="backward")
