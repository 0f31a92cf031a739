"""The gradient of a mask in torch: against scaled_dot_product_attention in float64, in every way of asking for one."""

import functools

import octet
import octet.torch  # registers the operators
import pytest
from octet._options import Options
from octet.torch import _adapter
from octet.torch._text import text_of
from torch.autograd import forward_ad
from torch.func import grad, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint
from torch_shared import compiled, torch

torch.manual_seed(0)
SHAPE = 2, 4, 9, 16
X = [torch.randn(SHAPE) for _ in range(3)]
DO = torch.randn(SHAPE)
sdpa = torch.nn.functional.scaled_dot_product_attention


def masks(dtype=torch.float32):
    """One of every broadcast, and of fewer dimensions; some hide keys."""
    full = 2, 4, 9, 9
    shapes = [tuple(1 if broadcast >> i & 1 else n for i, n in enumerate(full)) for broadcast in range(16)]
    for shape in [*shapes, (9, 9), (9,), (4, 1, 9)]:
        x = torch.randn(shape, dtype=torch.float64).masked_fill(torch.rand(shape) < 0.1, -torch.inf)
        yield x.to(dtype)


def exact(mask, x=X, do=DO):
    """dmask in float64"""
    wide = mask.detach().double().requires_grad_()
    (dmask,) = torch.autograd.grad(sdpa(*(y.double() for y in x), wide), wide, do.double())
    return dmask


def loss(mask, x=X, **how):
    return (octet.attention(*x, mask=mask, **how) * DO).sum()


# Sums of some 70 terms of size 1 in float32, at most 2^-24 each time, twice for the probabilities and the sums.
F32 = {"rtol": 0, "atol": 2.0**-15}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_broadcast(dtype):
    unit = torch.finfo(dtype).eps / 2
    for mask in masks(dtype):
        leaf = mask.requires_grad_()
        (got,) = torch.autograd.grad(loss(leaf), leaf)
        assert got.dtype == dtype and got.shape == mask.shape
        want = exact(mask)
        error = (got.double() - want).abs()
        assert (error <= F32["atol"] + unit * want.abs()).all(), (mask.shape, error.max())
        assert (got[mask == -torch.inf] == 0).all()


def test_gradcheck():
    x = [y.double().requires_grad_() for y in X]
    for mask in masks(torch.float64):
        if torch.isinf(mask).any():
            mask = mask.masked_fill(torch.isinf(mask), 0)
        leaf = mask.requires_grad_()
        call = lambda m, q, k, v: octet.attention(q, k, v, mask=m, softcap=2.0)
        assert torch.autograd.gradcheck(call, (leaf, *x), fast_mode=True)


def test_views_and_expanded_masks():
    for mask in (torch.randn(9, 9, 4, 2).permute(3, 2, 1, 0), torch.randn(1, 4, 9, 9).expand(2, 4, 9, 9)):
        leaf = mask.detach().requires_grad_()
        (got,) = torch.autograd.grad(loss(leaf), leaf)
        torch.testing.assert_close(got.double(), exact(mask), **F32)
        assert got.stride() == torch.empty_like(mask).stride()


def test_a_bias_of_parameters_gets_the_sum_of_its_uses():
    """T5's table: a mask that is made of a parameter, and q, k and v without gradients."""
    table, index = torch.randn(7, 4, requires_grad=True), torch.randint(7, (9, 9))
    loss(table[index].permute(2, 0, 1)[None]).backward()
    wide = table.detach().double().requires_grad_()
    (sdpa(*(y.double() for y in X), wide[index].permute(2, 0, 1)[None]) * DO.double()).sum().backward()
    torch.testing.assert_close(table.grad.double(), wide.grad, **F32)


@pytest.mark.parametrize("precision", ["f16", "bf16", "int8", "fp8", "sagebwd"])
def test_precisions(precision):
    mask = next(masks()).requires_grad_()
    (got,) = torch.autograd.grad(loss(mask, precision=precision), mask)
    want = exact(mask)
    assert (got.double() - want).norm() < (0.01 if "16" in precision else 0.1) * want.norm()


# Ways to have the gradient of the sum of f over each of x; [3, ...].
def by_leaf(f, x, around=lambda f: f):
    x = x.clone().requires_grad_()
    around(vmap(f))(x).sum().backward()
    return x.grad


WAYS = {
    "a leaf under vmap": by_leaf,
    "grad of vmap": lambda f, x: grad(lambda y: vmap(f)(y).sum())(x),
    "vmap of grad": lambda f, x: vmap(grad(lambda y: f(y).sum()))(x),
    "vmap of grad over another axis": lambda f, x: vmap(grad(lambda y: f(y).sum()), in_dims=x.ndim - 1)(
        x.movedim(0, -1)
    ),
    "vjp of vmap": lambda f, x: vjp(lambda y: vmap(f)(y).sum(), x)[1](torch.tensor(1.0))[0],
    "jacrev": lambda f, x: torch.stack([jacrev(lambda y: f(y).sum())(y) for y in x]),
    "checkpoint": lambda f, x: by_leaf(f, x, lambda g: lambda y: checkpoint(g, y, use_reentrant=False)),
}
FUNCTIONS = {
    "attention": lambda m: octet.attention(*X, mask=m) * DO,
    "sdpa": lambda m: octet.sdpa(*X, attn_mask=m) * DO,
    "o of attention_jvp": lambda m: octet.attention_jvp(*X, *X, mask=m)[0] * DO,
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(9, 9), (1, 4, 9, 9), (2, 1, 9, 9), (9,)], ids=str)
def test_transforms(way, function, shape):
    x = torch.randn(3, *shape)
    got = WAYS[way](FUNCTIONS[function], x)
    torch.testing.assert_close(got.double(), torch.stack([exact(m) for m in x]), **F32)


def test_vmap_over_q_alone_gives_each_its_own():
    many, mask = torch.stack([X[0], 2 * X[0]]), torch.randn(1, 4, 9, 9)
    got = vmap(grad(lambda m, q: loss(m, [q, *X[1:]])), in_dims=(None, 0))(mask, many)
    torch.testing.assert_close(got.double(), torch.stack([exact(mask, [q, *X[1:]]) for q in many]), **F32)


def test_attention_vjp():
    mask = torch.randn(1, 4, 9, 9).bfloat16()
    *gradients, dmask = octet.attention_vjp(*X, DO, mask=mask, sinks=torch.zeros(4), return_dmask=True)
    assert len(gradients) == 4 and dmask.dtype == mask.dtype and dmask.shape == mask.shape
    without = octet.attention_vjp(*X, DO, mask=mask, sinks=torch.zeros(4))
    assert all(map(torch.equal, gradients, without))
    (dmask,) = octet.attention_vjp(*X, DO, mask=mask, return_dmask=True)[3:]
    torch.testing.assert_close(dmask.double(), exact(mask), rtol=2.0**-8, atol=F32["atol"])


def test_compiled_is_eager_bit_for_bit():
    mask = torch.randn(4, 9, 9)

    def call(m, q):
        o = octet.attention(q, *X[1:], mask=m, causal=True)
        return torch.autograd.grad((o * DO).sum(), (m, q))

    def step(m, q):
        return (octet.attention(q, *X[1:], mask=m, causal=True) * DO).sum()

    leaves = [mask.clone().requires_grad_(), X[0].clone().requires_grad_()]
    compiled(step)(*leaves).backward()
    want = call(*[x.detach().requires_grad_() for x in leaves])
    assert all(torch.equal(x.grad, y) for x, y in zip(leaves, want, strict=True))


def test_compiled_vmap_leaves_the_graph_where_it_hides_what_requires_a_gradient():
    x = torch.randn(3, 9, 9)
    call = lambda m: octet.attention(*X, mask=m) * DO
    torch._dynamo.reset()
    got = by_leaf(call, x, lambda f: torch.compile(f, backend="eager"))
    assert torch.equal(got, by_leaf(call, x))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="_attend_outside_the_graph"):
        torch.compile(vmap(call), backend="eager", fullgraph=True)(x.requires_grad_())
    with torch.no_grad():
        torch._dynamo.reset()
        assert torch.equal(torch.compile(vmap(call), backend="eager", fullgraph=True)(x), vmap(call)(x))


def test_opcheck():
    mask, how = torch.randn(4, 1, 9), text_of(Options("f32"))
    o, lse, r = torch.ops.octet.forward(*X, False, how, mask)
    given = (DO, *X, o, lse, r, how, mask)
    torch.library.opcheck(torch.ops.octet.backward.default, given, {"dmask": True})
    *_, dsinks, dmask = torch.ops.octet.backward(*given, dmask=True)
    assert dsinks.shape == (0,) and dmask.shape == mask.shape
    assert torch.ops.octet.backward(*given)[-1].shape == (0,)


def test_the_backward_pass_leaves_it_out_where_nobody_asks(monkeypatch):
    asked = []
    own = octet.torch._attention._ops.run
    spy = lambda kind, operands, options, extra=False: (
        asked.append((kind, extra)) or own(kind, operands, options, extra)
    )
    monkeypatch.setattr(octet.torch._attention._ops, "run", spy)
    monkeypatch.setattr(octet._api, "shortcuts", {})  # no pass runs from C
    q, mask = X[0].clone().requires_grad_(), torch.randn(9, 9)
    loss(mask, [q, *X[1:]]).backward()
    loss(mask.requires_grad_(), [q, *X[1:]]).backward()
    assert [extra for kind, extra in asked if kind == "backward"] == [False, True]


def test_what_has_no_derivative_is_rejected():
    mask = torch.randn(9, 9)
    call = lambda m: octet.attention(*X, mask=m)
    forwards = "mask: has a tangent, but octet differentiates by it backwards alone"
    for ask in (lambda: jvp(call, (mask,), (mask,)), lambda: vmap(lambda m: jvp(call, (m,), (m,))[1])(mask[None])):
        with pytest.raises(octet.Unsupported, match=forwards):
            ask()
    with forward_ad.dual_level(), pytest.raises(octet.Unsupported, match=forwards):
        call(forward_ad.make_dual(mask, mask))
    leaf = mask.requires_grad_()
    (dmask,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    with pytest.raises(octet.Unsupported, match="first derivatives only"):
        dmask.sum().backward()
    with pytest.raises(octet.InvalidArgument, match="dmask: given with a mask of bool, which has no gradient"):
        octet.attention_vjp(*X, DO, mask=mask > 0, return_dmask=True)
    codes = octet.quantize(X[0], "q")
    with pytest.raises(octet.Unsupported, match="mask: requires a gradient"):
        octet.attention(codes, *X[1:], mask=leaf, precision="int8")


def test_a_backend_without_it_says_so_before_the_forward_pass(monkeypatch):
    reason = "no backend can solve this problem"
    found = lambda adapter, kind, options, operands, extra=False: reason if extra else ""
    monkeypatch.setattr(_adapter, "unsupported_reason", found)
    _adapter._expect_backward.cache_clear()
    with pytest.raises(octet.Unsupported, match=rf"mask: requires a gradient, but {reason}; pass mask.detach\(\)"):
        loss(torch.zeros(9, 9, requires_grad=True))
    _adapter._expect_backward.cache_clear()


def test_packed_sequences_have_no_mask_and_so_no_gradient():
    keywords = functools.partial(octet.attention_varlen, mask=torch.zeros(9, 9, requires_grad=True))
    with pytest.raises(TypeError, match="mask: octet has no such argument"):
        keywords(*[x[0].swapaxes(0, 1) for x in X], *[torch.tensor([0, 9], dtype=torch.int32)] * 2)
