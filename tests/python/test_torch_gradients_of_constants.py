"""What octet gives no gradient (slopes, numbers) is rejected where one is asked for, by whatever transform."""

import octet
import pytest

torch = pytest.importorskip("torch")
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap  # noqa: E402

torch.manual_seed(0)
X = [torch.randn(1, 2, 8, 16) for _ in range(3)]


def by_mask(m):
    return octet.attention(*X, mask=m)


def by_slopes(s):
    return octet.attention(*X, alibi_slopes=s)


def by_mask_of_jvp(m):
    return octet.attention_jvp(*X, *X, mask=m)[0]


def by_slopes_of_jvp(s):
    return octet.attention_jvp(*X, *X, alibi_slopes=s)[0]


# A function of what has no gradient, three of its arguments, and the name in the message.
CONSTANTS = {
    "slopes": (by_slopes, torch.rand(3, 2), "alibi_slopes"),
    "slopes of attention_jvp": (by_slopes_of_jvp, torch.rand(3, 2), "alibi_slopes"),
    **{
        name: (lambda x, name=name: octet.attention(*X, **{name: x}), torch.full((3,), 2.0), name)
        for name in ("scale", "softcap")
    },
}
# Masks have a gradient.
MASKS = {
    "mask": (by_mask, torch.randn(3, 8, 8), "mask"),
    "mask of attention_jvp": (by_mask_of_jvp, torch.randn(3, 8, 8), "mask"),
}
# Ways to ask for a derivative of f by each of x.
WAYS = {
    "a leaf under vmap": lambda f, x: vmap(f)(x.requires_grad_()),
    "a leaf under two vmaps": lambda f, x: vmap(vmap(f))(x.requires_grad_().expand(2, *x.shape)),
    "a leaf": lambda f, x: f(x.requires_grad_()[0]),
    "grad of vmap": lambda f, x: grad(lambda y: vmap(f)(y).sum())(x),
    "vmap of grad": lambda f, x: vmap(grad(lambda y: f(y).sum()))(x),
    "vjp of vmap": lambda f, x: vjp(vmap(f), x),
    "jvp of vmap": lambda f, x: jvp(vmap(f), (x,), (x,)),
    "vmap of jvp": lambda f, x: vmap(lambda y: jvp(f, (y,), (y,))[1])(x),
    "jacrev": lambda f, x: jacrev(lambda y: f(y).sum())(x[0]),
    "jacfwd": lambda f, x: jacfwd(lambda y: f(y).sum())(x[0]),
    "beside vmap": lambda f, x: vmap(lambda _: f(x[0]))(torch.ones(3)) if x.requires_grad_() is not None else None,
    "checkpoint": lambda f, x: torch.utils.checkpoint.checkpoint(vmap(f), x.requires_grad_(), use_reentrant=False),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("constant", CONSTANTS)
def test_a_derivative_by_a_constant_is_rejected(constant, way):
    function, x, name = CONSTANTS[constant]
    with pytest.raises(octet.Unsupported, match=f"{name}: requires a gradient.*detach"):
        WAYS[way](function, x.clone())


def test_compiled_vmap_is_rejected_where_it_hides_what_requires_a_gradient():
    function, x, name = CONSTANTS["slopes"]
    torch._dynamo.reset()
    with pytest.raises(octet.Unsupported, match=f"{name}: requires a gradient"):
        torch.compile(vmap(function), backend="eager")(x.clone().requires_grad_())
    with torch.no_grad():
        found = torch.compile(vmap(function), backend="eager")(x.clone().requires_grad_())
    assert torch.equal(found, vmap(function)(x))


@pytest.mark.parametrize("constant", ["mask", "slopes", "mask of attention_jvp"])
def test_without_gradients_the_same_calls_are_served(constant):
    function, x, _ = (CONSTANTS | MASKS)[constant]
    want = torch.stack([function(y) for y in x])
    assert torch.equal(vmap(function)(x), want)
    with torch.no_grad():
        assert torch.equal(vmap(function)(x.clone().requires_grad_()), want)


@pytest.mark.parametrize("name", ["q", "k", "v", "sinks"])
def test_o_of_the_pair_under_vmap_is_differentiable(name):
    """attention_jvp's o has the gradient of attention's, though vmap's tensors do not tell that one is asked for."""
    q, k, v = X
    given = {"q": q, "k": k, "v": v, "sinks": torch.zeros(2)}
    many = torch.stack([given[name], 2 * given[name] + 1])

    def pair(x):
        now = given | {name: x}
        return octet.attention_jvp(now["q"], now["k"], now["v"], q, k, v, sinks=now["sinks"])[0]

    def alone(x):
        now = given | {name: x}
        return octet.attention(now["q"], now["k"], now["v"], sinks=now["sinks"])

    do = torch.randn(2, *q.shape)
    found, want = ([], [])
    for function, into in ((pair, found), (alone, want)):
        leaf = many.clone().requires_grad_()
        into.extend(torch.autograd.grad((vmap(function)(leaf) * do).sum(), leaf))
    assert want[0].any()
    assert torch.equal(found[0], want[0])
