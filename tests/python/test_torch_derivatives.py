"""torch's own checks of derivatives: gradcheck backwards, forwards, batched; functional transforms; rejections."""

import octet
import pytest

torch = pytest.importorskip("torch")
from octet.torch import _passes  # noqa: E402
from torch.autograd import forward_ad, gradcheck  # noqa: E402


def inputs(*, heads=4, kv_heads=2, queries=5, keys=7, dim=8, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    shapes = (heads, queries, dim), (kv_heads, keys, dim), (kv_heads, keys, dim)
    return [torch.randn(2, *shape, dtype=dtype, requires_grad=True) for shape in shapes]


def call(q, k, v):
    return octet.attention(q, k, v, causal="bottom_right")


@pytest.mark.parametrize(
    "keywords",
    [{}, {"causal": "top_left"}, {"window": (2, 1), "alignment": "top_left"}, {"layout": "bshd", "scale": 0.5},
     {"mask": True}],
    ids=str,
)  # fmt: skip
def test_gradcheck(keywords):
    if "mask" in keywords:
        keywords = {"mask": torch.rand(2, 1, 5, 7) < 0.6}
    q, k, v = inputs()
    if keywords.get("layout") == "bshd":
        q, k, v = (x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v))
    checks = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": True}
    assert gradcheck(lambda *x: octet.attention(*x, **keywords), (q, k, v), **checks)


def test_gradcheck_of_packed_sequences():
    torch.manual_seed(0)
    cu = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    q, k, v = (torch.randn(8, h, 8, dtype=torch.float64, requires_grad=True) for h in (2, 1, 1))
    checks = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": True}
    assert gradcheck(lambda *x: octet.attention_varlen(*x, cu, cu, causal="top_left"), (q, k, v), **checks)


# What kernels for jvps are tested with elsewhere (jvp_flash_attention, rcm): short sequences, masks of both kinds, a
# scale of its own, other numbers of keys than of queries.
DIRECTIONS = {
    "32 tokens": ({"queries": 32, "keys": 32, "dim": 16}, {}),
    "causal": ({"queries": 32, "keys": 32, "dim": 32}, {"causal": True}),
    "bool": ({"queries": 32, "keys": 32, "dim": 16}, {"mask": "bool"}),
    "additive": ({"queries": 64, "keys": 64, "dim": 16}, {"mask": "additive"}),
    "scale": ({"queries": 40, "keys": 33, "dim": 8}, {"scale": 0.5}),
    "one head": ({"heads": 1, "kv_heads": 1, "queries": 33, "keys": 130, "dim": 64}, {}),
}


@pytest.mark.parametrize("case", DIRECTIONS)
def test_gradcheck_along_directions(case):
    sizes, keywords = DIRECTIONS[case]
    x = inputs(**sizes)
    if "mask" in keywords:
        hidden = torch.rand(2, 1, sizes["queries"], sizes["keys"]) < 0.5
        additive = torch.randn(hidden.shape, dtype=torch.float64).masked_fill(hidden, float("-inf"))
        keywords = {"mask": ~hidden if keywords["mask"] == "bool" else additive}
    checks = {"check_forward_ad": True, "fast_mode": True}
    assert gradcheck(lambda *y: octet.attention(*y, **keywords), tuple(x), **checks)


def test_dual_numbers_and_functional_jvp_agree_with_the_pair():
    q, k, v = (x.detach() for x in inputs())
    tq, tk, tv = (torch.randn_like(x) for x in (q, k, v))
    o, to = octet.attention_jvp(q, k, v, tq, tk, tv, causal="bottom_right")
    for_q_alone = octet.attention_jvp(q, k, v, tq, *(torch.zeros_like(x) for x in (k, v)), causal="bottom_right")[1]
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(call(*map(forward_ad.make_dual, (q, k, v), (tq, tk, tv))))
        alone = forward_ad.unpack_dual(call(forward_ad.make_dual(q, tq), k, v))
        assert torch.equal(found.primal, o) and torch.equal(found.tangent, to)
        assert torch.equal(alone.tangent, for_q_alone)
    primal, tangent = torch.func.jvp(call, (q, k, v), (tq, tk, tv))
    assert torch.equal(primal, o) and torch.equal(tangent, to)


def test_jacobians_both_ways_agree():
    x = [y.detach() for y in inputs(heads=2, kv_heads=1)]
    back = torch.func.jacrev(call, argnums=(0, 1, 2))(*x)
    forth = torch.func.jacfwd(call, argnums=(0, 1, 2))(*x)
    for a, b in zip(back, forth, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    "in_dims", [(0, 0, 0), (0, None, None), (None, 1, 2), (3, 0, None), (0, 0, 0, 0), (None, 0, 0, 1)]
)
def test_vmap_is_a_loop(in_dims):
    torch.manual_seed(1)
    shapes = (2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8), (2, 4, 5, 7)
    x = [
        torch.randn(shape if d is None else (*shape[:d], 3, *shape[d:]), dtype=torch.float64)
        for shape, d in zip(shapes, in_dims, strict=False)
    ]
    if len(x) > 3:
        x[3] = x[3] > 0.5

    def loss(q, k, v, mask=None):
        return octet.attention(q, k, v, mask=mask).square().sum()

    def output(q, k, v, mask=None):
        return octet.attention(q, k, v, mask=mask, return_lse=True)

    def tangent(q, k, v, mask=None):
        return torch.func.jvp(lambda *y: octet.attention(*y, mask=mask), (q, k, v), (q, k, v))[1]

    for function in (output, tangent, torch.func.grad(loss, argnums=(0, 1, 2))):
        got = torch.func.vmap(function, in_dims=in_dims)(*x)
        for i in range(3):
            one = function(*(y if d is None else y.select(d, i) for y, d in zip(x, in_dims, strict=True)))
            got_i = [y[i] for y in got] if isinstance(got, tuple) else got[i]
            torch.testing.assert_close(got_i, list(one) if isinstance(one, tuple) else one, rtol=1e-12, atol=1e-13)


def test_vmap_of_broadcast_masks_and_packed_sequences():
    torch.manual_seed(2)
    q = torch.randn(3, 2, 4, 5, 8, dtype=torch.float64)
    for shape in ((5, 5), (1, 4, 5, 5), (2, 1, 1, 5)):
        mask = torch.rand(3, *shape) < 0.6
        got = torch.func.vmap(lambda q, m: octet.attention(q, q, q, mask=m))(q, mask)
        torch.testing.assert_close(got[1], octet.attention(*[q[1]] * 3, mask=mask[1]))
        shared = torch.func.vmap(lambda q, m=mask[0]: octet.attention(q, q, q, mask=m))(q)
        torch.testing.assert_close(shared[1], octet.attention(*[q[1]] * 3, mask=mask[0]))
    cu = torch.tensor([0, 2, 5], dtype=torch.int32)
    packed = torch.randn(3, 5, 2, 8, dtype=torch.float64)
    got, lse = torch.func.vmap(lambda q: octet.attention_varlen(q, q, q, cu, cu, return_lse=True))(packed)
    want, want_lse = octet.attention_varlen(*[packed[1]] * 3, cu, cu, return_lse=True)
    torch.testing.assert_close((got[1], lse[1]), (want, want_lse))
    with pytest.raises(octet.Unsupported, match="cu_seqlens: mapped by vmap"):
        torch.func.vmap(lambda c: octet.attention_varlen(*[packed[0]] * 3, c, c))(cu.expand(3, -1))


def test_the_pair_is_differentiable_in_o_alone():
    """What MeanFlow and consistency training need: a target without gradient beside an output with one."""
    q, k, v = inputs(queries=7)
    o, to = octet.attention_jvp(q, k, v, *(torch.ones_like(x) for x in (q, k, v)))
    assert o.requires_grad and not to.requires_grad
    got = torch.autograd.grad(o.sum(), (q, k, v))
    want = octet.attention_vjp(q, k, v, torch.ones_like(o))
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    with torch.no_grad():
        assert not octet.attention_jvp(q, k, v, q, k, v)[0].requires_grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_primal_under_jvp_has_its_gradient(dtype):
    """The training step of MeanFlow: torch.func.jvp of a model, whose primal output the loss differentiates."""
    q, k, v = (x.detach() for x in inputs(dtype=dtype, queries=7))
    weight = torch.ones(8, dtype=dtype, requires_grad=True)

    def model(z):
        return octet.attention(z * weight, k, v, causal=True)

    u, du = torch.func.jvp(model, (q,), (torch.ones_like(q),))
    (got,) = torch.autograd.grad((u - du.detach()).sum(), weight)
    (want,) = torch.autograd.grad(model(q).sum(), weight)
    assert torch.equal(got, want) and (got != 0).any()


def passes_of(function, monkeypatch):
    """The passes that the library runs meanwhile."""
    ran, run = [], _passes.run
    monkeypatch.setattr(_passes, "run", lambda kind, *how: ran.append(kind) or run(kind, *how))
    function()
    monkeypatch.undo()
    return ran


@pytest.mark.parametrize("way", ["torch.func", "dual numbers", "nothing moves"])
def test_a_jvp_is_one_pass(monkeypatch, way):
    """o comes with its tangent; where a gradient may follow, from a forward pass that saves what that needs."""
    x = [y.detach() for y in inputs()]

    def dual():
        with forward_ad.dual_level():
            call(*map(forward_ad.make_dual, x, x))

    def beside():
        return torch.func.jvp(lambda y: y * call(*x).sum(), (x[0],), (x[0],))

    ways = {"torch.func": lambda: torch.func.jvp(call, tuple(x), tuple(x)), "dual numbers": dual}
    assert passes_of(ways.get(way, beside), monkeypatch) == ["jvp" if way in ways else "forward"]
    x[1].requires_grad_()
    assert sorted(passes_of(ways.get(way, beside), monkeypatch)) == (["forward", "jvp"] if way in ways else ["forward"])


@pytest.mark.parametrize("names", ["q", "k", "v", "qk", "kv"])
def test_tangents_that_are_absent_are_left_out(monkeypatch, names):
    """What no direction moves comes to the library without a tangent, whichever way the direction comes."""
    x, t = ([y.detach() for y in inputs(seed=seed)] for seed in (0, 1))
    along = [b if name in names else None for name, b in zip("qkv", t, strict=True)]
    zeros = [torch.zeros_like(a) if b is None else b for a, b in zip(x, along, strict=True)]
    want = octet.attention_jvp(*x, *zeros, causal="bottom_right")

    def with_moving(moving):
        given = iter(moving)
        return call(*(a if b is None else next(given) for a, b in zip(x, along, strict=True)))

    moving = tuple(a for a, b in zip(x, along, strict=True) if b is not None)
    directions = tuple(b for b in along if b is not None)

    def dual():
        with forward_ad.dual_level():
            return tuple(forward_ad.unpack_dual(with_moving(map(forward_ad.make_dual, moving, directions))))

    ways = {
        "explicit": lambda: octet.attention_jvp(*x, *along, causal="bottom_right"),
        "torch.func": lambda: torch.func.jvp(lambda *y: with_moving(y), moving, directions),
        "dual numbers": dual,
    }
    came, run_pass = [], _passes.run
    monkeypatch.setattr(_passes, "run", lambda kind, given, *how: came.append(given) or run_pass(kind, given, *how))
    for way, run in ways.items():
        came.clear()
        found = run()
        tangents = [{name for name in given if name in ("tq", "tk", "tv")} for given in came]
        assert tangents == [{f"t{name}" for name in names}], way
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True)), way


def test_a_compiled_pair_with_absent_tangents():
    """One graph: o with its gradient, and a detached tangent, by which no gradient can be taken."""
    q, k, v = inputs(queries=7)

    def step(q, k, v):
        o, to = octet.attention_jvp(q, k, v, torch.ones_like(q), None, None)
        return (o - to).square().sum(), to

    torch._dynamo.reset()
    (loss, to), (want, want_to) = torch.compile(step, backend="aot_eager", fullgraph=True)(q, k, v), step(q, k, v)
    for a, b in zip(*(torch.autograd.grad(x, (q, k, v)) for x in (loss, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(to, want_to, rtol=1e-12, atol=1e-13)
    assert not to.requires_grad and not want_to.requires_grad


def test_jvp_meets_other_transforms():
    x = [y.detach() for y in inputs()]
    many = [torch.stack([y, 2 * y, -y]) for y in x]
    t = [torch.randn_like(y) for y in many]
    want = [
        torch.func.jvp(call, *map(tuple, given))
        for given in zip(zip(*many, strict=True), zip(*t, strict=True), strict=True)
    ]

    def at(*y):
        return torch.func.jvp(call, y[:3], y[3:])

    for got in (torch.func.vmap(at)(*many, *t), torch.func.jvp(torch.func.vmap(call), tuple(many), tuple(t))):
        for found, each in zip(got, zip(*want, strict=True), strict=True):
            torch.testing.assert_close(found, torch.stack(each), rtol=1e-12, atol=1e-13)

    def loss(q):
        return torch.func.jvp(lambda y: call(y, *x[1:]), (q,), (q,))[0].sum()

    assert torch.equal(torch.func.grad(loss)(x[0]), torch.func.grad(lambda q: call(q, *x[1:]).sum())(x[0]))
    with pytest.raises(octet.Unsupported, match="first derivatives only"):
        torch.func.grad(lambda q: torch.func.jvp(lambda y: call(y, *x[1:]), (q,), (q,))[1].sum())(x[0])
    with pytest.raises(octet.Unsupported, match="first derivatives only"):
        torch.func.jvp(lambda q: torch.func.jvp(lambda y: call(y, *x[1:]), (q,), (q,))[1], (x[0],), (x[0],))


def test_lse_has_its_tangent_under_jvp():
    x = tuple([y.detach() for y in inputs()])
    t = tuple([torch.randn_like(y) for y in x])
    found = torch.func.jvp(lambda *y: octet.attention(*y, return_lse=True), x, t)
    o, to, lse, tlse = octet.attention_jvp(*x, *t, return_lse=True)
    for got, want in zip((*found[0], *found[1]), (o, lse, to, tlse), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("compiling", [False, True])
def test_a_step_with_a_detached_tangent(compiling):
    """MeanFlow's: the loss reads o and a detached tangent. Compiled code leaves torch.func.jvp to eager code."""
    q, k, v = (x.detach() for x in inputs())
    weight = torch.ones(8, dtype=q.dtype, requires_grad=True)

    def step(z):
        u, du = torch.func.jvp(lambda y: octet.attention(y * weight, k, v), (z,), (torch.ones_like(z),))
        return (u - du.detach()).square().sum()

    def split(z):
        u = octet.attention(z * weight, k, v)
        du = octet.attention_jvp((z * weight).detach(), k, v, weight.detach().expand_as(z), 0 * k, 0 * v)[1]
        return (u - du).square().sum()

    torch._dynamo.reset()
    made = torch.compile(step, backend="aot_eager") if compiling else step
    (got,), (want,) = (torch.autograd.grad(f(q), weight) for f in (made, split))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


def test_a_second_derivative_is_rejected():
    q, k, v = inputs()
    (gradient,) = torch.autograd.grad(call(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(octet.Unsupported, match="first derivatives only"):
        torch.autograd.grad(gradient.square().sum(), q)
    _, tangent = torch.func.jvp(lambda y: call(y, k, v), (q,), (torch.ones_like(q),))
    with pytest.raises(octet.Unsupported, match="first derivatives only"):
        torch.autograd.grad(tangent.square().sum(), q)
    with pytest.raises(octet.Unsupported, match="first derivatives only"):
        torch.func.hessian(lambda y: call(y, k, v).square().sum())(q.detach())


SECOND = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(f))(torch.stack([x, x])),
    "grad of vmap": lambda f, x: torch.func.grad(lambda y: torch.func.vmap(f)(torch.stack([y, y])).sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
}


@pytest.mark.parametrize("name", ["q", "k", "v", "do", "mask", "sinks", "dlse"])
@pytest.mark.parametrize("way", SECOND)
def test_a_derivative_of_attention_vjp_is_rejected(way, name):
    q, k, v = (x.detach() for x in inputs())
    given = {"q": q, "k": k, "v": v, "do": torch.randn_like(q), "mask": torch.randn(5, 7, dtype=q.dtype)}
    given |= {"sinks": torch.randn(4, dtype=q.dtype), "dlse": torch.randn(2, 4, 5, dtype=q.dtype)}

    def of(x):
        return sum(d.sum() for d in octet.attention_vjp(**given | {name: x}))

    with pytest.raises(octet.Unsupported, match="first derivatives only"):
        SECOND[way](of, given[name])


def test_gradients_of_attention_vjp_are_detached():
    q, k, v = inputs()
    for how in (torch.enable_grad, torch.no_grad):
        with how():
            assert not any(d.requires_grad for d in octet.attention_vjp(q, k, v, q))
