"""octet.attention on torch tensors, and its derivatives by autograd and by dual numbers, against the definition."""

import exact
import numpy as np
import octet
import pytest
from cases import cases
from hypothesis import given, settings

torch = pytest.importorskip("torch")


def tensor(x):
    """With x's strides where torch can have them (not negative ones)."""
    return torch.from_numpy(x if all(s >= 0 for s in x.strides) and x.flags.writeable else x.copy())


def derivatives(call, q, k, v, do, tangents):
    """o, dq, dk, dv by autograd, to by torch.func.jvp."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = call(*leaves)
    found = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, leaves, do), strict=True))
    return found | {"o": o.detach(), "to": torch.func.jvp(call, (q, k, v), tangents)[1]}


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_every_derivative_agrees_with_the_definition(dtype):
    @settings(max_examples=100, deadline=None)
    @given(cases(dtype))
    def holds(case):
        a = case.arrays
        x = {name: tensor(case.in_layout(name)) for name in a}
        mask = None if case.mask is None else tensor(case.mask)

        def call(q, k, v):
            return octet.attention(q, k, v, mask=mask, layout=case.layout, **case.keywords)

        got = derivatives(call, x["q"], x["k"], x["v"], x["do"], (x["tq"], x["tk"], x["tv"]))
        assert got["o"].dtype == x["q"].dtype
        about = {"do": a["do"], "tangents": (a["tq"], a["tk"], a["tv"])} | case.exact()
        want = exact.attention(a["q"], a["k"], a["v"], seen=case.seen, **about)
        bound = exact.bounds(a["q"], a["k"], a["v"], **about, **exact.rounding(np.dtype(dtype)))
        for name, found in got.items():
            found = found if case.layout == "bhsd" else found.transpose(1, 2)
            exact.expect_close(found.numpy(), want[name], bound[name], name)

    holds()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bits(dtype):
    random = np.random.default_rng(1)
    arrays = [random.standard_normal((2, 4, 50, 32)) for _ in range(7)]
    q, k, v, do, *tangents = (torch.from_numpy(x).to(getattr(torch, dtype)) for x in arrays)
    got = derivatives(lambda *x: octet.attention(*x, causal=True), q, k, v, do, tuple(tangents))
    q, k, v, do, *tangents = (x.double().numpy() for x in (q, k, v, do, *tangents))
    want = exact.attention(q, k, v, seen=exact.visible(50, 50, True), do=do, tangents=tangents)
    bound = exact.bounds(q, k, v, do=do, tangents=tangents, **exact.rounding(dtype))
    for name, found in got.items():
        assert str(found.dtype) == f"torch.{dtype}"
        exact.expect_close(found.double().numpy(), want[name], bound[name], name)


@pytest.mark.parametrize("precision", ["f32", "bf16", "int8", "fp8", "sagebwd"])
def test_every_trainable_precision_gives_what_numpy_gives(precision):
    """The same library, so the same bits: what torch adds is plumbing."""
    random = np.random.default_rng(2)
    q, k, v, do = (random.standard_normal((2, 2, 40, 16)).astype(np.float32) for _ in range(4))
    keywords = {"precision": precision, "causal": True, "threads": 1}
    want = octet.attention(q, k, v, **keywords), *octet.attention_vjp(q, k, v, do, **keywords)
    leaves = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    o = octet.attention(*leaves, **keywords)
    got = o.detach(), *torch.autograd.grad(o, leaves, torch.from_numpy(do))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x.numpy(), y)
    for x, y in zip(octet.attention_vjp(*leaves, torch.from_numpy(do), **keywords), want[1:], strict=True):
        assert not x.requires_grad
        np.testing.assert_array_equal(x.numpy(), y)


def test_what_the_backward_pass_needs_is_saved_when_a_gradient_may_follow():
    """A bf16 gradient takes delta from the un-rounded output: without it, it would be another number."""
    random = np.random.default_rng(3)
    q, k, v, do = (torch.from_numpy(random.standard_normal((1, 2, 64, 32))).bfloat16() for _ in range(4))
    want = octet.attention_vjp(q, k, v, do, causal=True)
    plain = octet.attention_vjp(q, k, v, do, causal=True, bias_correction="none")

    def gradients(q, k, v):
        return torch.autograd.grad(octet.attention(q, k, v, causal=True), (q, k, v), do)

    got = gradients(*(x.clone().requires_grad_() for x in (q, k, v)))
    _, pull = torch.func.vjp(lambda *x: octet.attention(*x, causal=True), q, k, v)
    batched = torch.func.vmap(lambda *x: octet.attention(*x, causal=True))
    _, pull_batched = torch.func.vjp(lambda *x: batched(*(y[None] for y in x))[0], q, k, v)
    inside = torch.func.vmap(torch.func.grad(lambda *x: (octet.attention(*x, causal=True) * do).sum(), (0, 1, 2)))
    got_inside = [x[0] for x in inside(*(y[None] for y in (q, k, v)))]
    for found in (got, pull(do), pull_batched(do), got_inside):
        assert all(torch.equal(x, y) for x, y in zip(found, want, strict=True))
    assert not torch.equal(got[0], plain[0])


def what_is_kept(call, *x):
    """o, and the tensors that are saved for its gradient."""
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda y: kept.setdefault(y.data_ptr(), y), lambda y: y):
        return call(*x), kept.values()


@pytest.mark.parametrize(
    "call",
    [
        octet.attention,
        lambda *x: octet.attention(*x, return_lse=True)[0],
        lambda *x: octet.attention_varlen(*(y[0].transpose(0, 1) for y in x), *[torch.tensor([0, 9, 24]).int()] * 2),
    ],
    ids=["plain", "with lse", "packed"],
)
@pytest.mark.parametrize("dtype, more", [(torch.float32, 0), (torch.float16, 1), (torch.bfloat16, 1)], ids=str)
def test_a_gradient_keeps_one_byte_beside_each_16_bit_number_of_o(call, dtype, more):
    q, k, v = (torch.randn(1, heads, 24, 16).to(dtype).requires_grad_() for heads in (4, 2, 2))
    for _ in range(3):  # by its plan, kept, from C
        o, kept = what_is_kept(call, q, k, v)
        lse = 4 * o.numel() // o.shape[-1]
        found = sum(x.nbytes for x in kept if x.dtype is not torch.int32)  # without the lengths of sequences
        assert found == q.nbytes + k.nbytes + v.nbytes + o.nbytes + lse + more * o.numel()


def test_packed_sequences_are_separate():
    random = np.random.default_rng(4)
    cu = torch.tensor([0, 5, 5, 22, 52], dtype=torch.int32)
    q, k, v, do, *tangents = (torch.from_numpy(random.standard_normal((52, h, 16))) for h in (4, 2, 2, 4, 4, 2, 2))

    def call(q, k, v):
        return octet.attention_varlen(q, k, v, cu, cu, causal="bottom_right")

    got = derivatives(call, q, k, v, do, tuple(tangents))
    lse = octet.attention_varlen(q, k, v, cu, cu, causal="bottom_right", return_lse=True)[1]
    assert lse.shape == (4, 52) and lse.dtype == torch.float64
    for first, last in zip(cu[:-1], cu[1:], strict=True):
        one = [x[first:last].numpy()[None].transpose(0, 2, 1, 3) for x in (q, k, v, do, *tangents)]
        seen = exact.visible(int(last - first), int(last - first), "bottom_right")
        want = exact.attention(*one[:3], seen=seen, do=one[3], tangents=one[4:])
        bound = exact.bounds(*one[:3], do=one[3], tangents=one[4:], **exact.rounding("float64"))
        for name, found in got.items():
            found = found[first:last].numpy()[None].transpose(0, 2, 1, 3)
            exact.expect_close(found, want[name], bound[name], name)


def test_quantized_operands():
    x = torch.randn(1, 2, 40, 16)
    codes = [octet.quantize(x, name) for name in "qkv"]
    assert codes[0].codes.dtype is torch.int8 and codes[0].scale.shape == (1, 2, 40, 1)
    assert octet.quantize(x, "k", format="e4m3").codes.dtype is torch.float8_e4m3fn
    numbers = [octet.dequantize(y).double() for y in codes]
    got = octet.attention(*codes, precision="f32", causal=True)
    want = exact.attention(*(y.numpy() for y in numbers), seen=exact.visible(40, 40, True))
    bound = exact.bounds(*(y.numpy() for y in numbers), **exact.rounding("float32"))
    exact.expect_close(got.numpy(), want["o"], bound["o"], "o")
    with pytest.raises(octet.Unsupported, match="v: requires a gradient"):
        octet.attention(codes[0], codes[1], x.requires_grad_(), precision="int8")


def test_check_explain_and_supports_take_tensors():
    q = torch.randn(1, 2, 40, 16).bfloat16()
    assert octet.check(q, q, q, do=q, causal=True)["dq"].rel_l2 < 0.01
    assert "forward int8" in octet.explain(q, q, q, precision="int8")
    assert not octet.supports(q, q, q, kind="backward", precision="fp8_raw")


def test_autocast_casts_as_it_does_for_sdpa():
    q = torch.randn(1, 2, 40, 16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = octet.attention(q, q, q)
        assert o.dtype is torch.bfloat16
        assert octet.attention(q, q, q, precision="f32").dtype is torch.bfloat16
        assert octet.attention(q.double(), q.double(), q.double()).dtype is torch.float64
        o1, to = octet.attention_jvp(q, q, q, q, q, q)
    assert torch.equal(o, octet.attention(*[q.bfloat16()] * 3)) and torch.equal(o1, o) and to.dtype is torch.bfloat16
    (gradient,) = torch.autograd.grad(o.float().sum(), q)
    assert gradient.dtype is torch.float32 and gradient.isfinite().all()


def test_threads_and_determinism_are_those_of_torch():
    from octet._options import Options
    from octet.torch import adapter

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        found = adapter.resolve(Options("f32"), torch.zeros(1))
        assert found.threads == 1 and found.deterministic is True
        found = adapter.resolve(Options("f32", threads=3, deterministic=False), torch.zeros(1))
        assert found.threads == 3 and found.deterministic is False
        assert ", 1 threads" in octet.explain(*[torch.zeros(2, 2, 256, 8)] * 3)
    finally:
        torch.set_num_threads(before)
        torch.use_deterministic_algorithms(False)


def test_rejections():
    q = torch.zeros(1, 2, 8, 8)
    with pytest.raises(octet.InvalidArgument, match="k: a numpy array, but q is one of torch"):
        octet.attention(q, q.numpy(), q)
    with pytest.raises(octet.InvalidArgument, match="q: dtype int64, allowed: 'float64'"):
        octet.attention(q.long(), q, q)
    with pytest.raises(octet.InvalidArgument, match="q: layout torch.sparse_coo, allowed: torch.strided"):
        octet.attention(q.to_sparse(), q, q, precision="f32")
    negative = torch._neg_view(q + 1)
    assert torch.equal(octet.attention(negative, q, negative), octet.attention(-q - 1, q, -q - 1))
    found, want = octet.quantize(negative, "q"), octet.quantize(-q - 1, "q")
    assert torch.equal(found.codes, want.codes) and torch.equal(found.scale, want.scale)
    with pytest.raises(octet.InvalidArgument, match="k: on meta, but q is on cpu"):
        octet.attention(q, q.to("meta"), q)
    with pytest.raises(octet.InvalidArgument, match="k: on device meta, allowed: 'cpu', 'cuda'"):
        octet.explain(q, q.to("meta"), q)
    with pytest.raises(
        octet.Unsupported, match=r"requires_grad: found True without torch.no_grad.., but (.|\n)*no backward pass"
    ):
        octet.attention(q.clone().requires_grad_(), q, q, precision="int8_fp8")


@pytest.mark.parametrize("precision", ["fp8", "bf16", "int8", "fp8_raw"])
def test_e4m3_tensors_give_bfloat16_but_in_fp8_raw(precision):
    """The type of q is no type that o can have there."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 64, 32).to(torch.float8_e4m3fn) for _ in range(3))
    o, lse = octet.attention(q, k, v, precision=precision, causal=True, return_lse=True)
    assert o.dtype is (torch.float8_e4m3fn if precision == "fp8_raw" else torch.bfloat16)
    want = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    assert (o.double() - want).norm() < 0.1 * want.norm()
    if precision != "fp8_raw":
        do = torch.randn(1, 2, 64, 32).bfloat16()
        leaves = [x.double().requires_grad_() for x in (q, k, v)]
        exact = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
        exact = torch.autograd.grad(exact, leaves, do.double())
        for x, y in zip(octet.attention_vjp(q, k, v, do, precision=precision, causal=True), exact, strict=True):
            assert x.dtype is torch.bfloat16 and (x.double() - y).norm() < 0.15 * y.norm()
