"""Softcap and the slopes of ALiBi in torch, against eager attention in float64: every kind of derivative, vmap,
torch.compile, operators, flash-attn's signature."""

import math

import octet
import pytest

torch = pytest.importorskip("torch")
import octet.torch  # noqa: E402
from octet.compat import flash_attn  # noqa: E402

B, H, G, N, M, D, E = 2, 4, 2, 21, 30, 16, 24
SLOPES = {"none": None, "heads": (H,), "batch": (B, H)}
BOTH = pytest.mark.parametrize("softcap, slopes", [(1.5, "none"), (0.0, "heads"), (2.0, "batch")])


def draw(seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, H, N, D), (B, G, M, D), (B, G, M, E)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def slopes_of(name, dtype=torch.float64):
    generator = torch.Generator().manual_seed(9)
    return None if SLOPES[name] is None else 0.1 * torch.randn(SLOPES[name], generator=generator, dtype=dtype)


def eager(q, k, v, softcap, slopes, causal=True):
    """(o, lse), causal aligned bottom-right; in q's type."""
    group, n, m = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    s = q @ k.repeat_interleave(group, 1).mT / math.sqrt(q.shape[-1])
    s = softcap * torch.tanh(s / softcap) if softcap else s
    away = torch.arange(n)[:, None] + (m - n) - torch.arange(m)
    if slopes is not None:
        s = s - slopes.reshape(-1, q.shape[1], 1, 1) * away.abs()
    if causal:
        s = s.masked_fill(away < 0, -math.inf)
    return s.softmax(-1) @ v.repeat_interleave(group, 1), s.logsumexp(-1)


def call(q, k, v, softcap, slopes):
    return octet.attention(q, k, v, causal="bottom_right", softcap=softcap, alibi_slopes=slopes, return_lse=True)


def close(got, want, tolerance=1e-10):
    assert got.shape == want.shape and (got.double() - want).norm() < tolerance * want.norm()


@BOTH
def test_derivatives_are_those_of_eager_attention(softcap, slopes):
    slopes = slopes_of(slopes)
    q, k, v = (x.requires_grad_() for x in draw(1))
    do, dlse = torch.randn(B, H, N, E, dtype=q.dtype), torch.randn(B, H, N, dtype=q.dtype)
    results = [f(q, k, v, softcap, slopes) for f in (call, eager)]
    gradients = [torch.autograd.grad((o * do).sum() + (lse * dlse).sum(), (q, k, v)) for o, lse in results]
    for got, want in zip(*results, strict=True):
        close(got, want)
    for got, want in zip(*gradients, strict=True):
        close(got, want)
    tangents = tuple(draw(2))
    found = [
        torch.func.jvp(lambda *x, f=f: f(*x, softcap, slopes), tuple(x.detach() for x in (q, k, v)), tangents)[1]
        for f in (call, eager)
    ]
    for got, want in zip(*found, strict=True):
        close(got, want)
    along = octet.attention_jvp(
        *(x.detach() for x in (q, k, v)), *tangents, causal="bottom_right", softcap=softcap, alibi_slopes=slopes
    )
    close(along[1], found[1][0])


@BOTH
def test_gradcheck(softcap, slopes):
    q, k, v = (x[:, :, :5, :8].contiguous().requires_grad_() for x in draw(3))
    slopes = slopes_of(slopes)
    function = lambda *x: octet.attention(*x, softcap=softcap, alibi_slopes=slopes, return_lse=True)
    assert torch.autograd.gradcheck(function, (q, k, v), check_forward_ad=True)


@pytest.mark.parametrize("in_dim", [None, 0, 1])
@pytest.mark.parametrize("name", ["heads", "batch"])
def test_vmap(name, in_dim):
    """Slopes that are mapped, and slopes that are not; with gradients under the map."""
    xs = [torch.stack([x, x + 1, 2 * x]) for x in draw(4)]
    slopes = slopes_of(name)
    if in_dim is not None:
        slopes = torch.stack([slopes, 2 * slopes, -slopes], in_dim)

    def loss(f):
        return lambda q, k, v, s: f(q, k, v, 2.0, s)[0].square().sum()

    def mapped(f):
        gradient = torch.func.grad_and_value(loss(f), (0, 1, 2))
        return torch.func.vmap(gradient, in_dims=(0, 0, 0, in_dim))(*xs, slopes)

    (got, got_value), (want, want_value) = mapped(call), mapped(eager)
    close(got_value, want_value)
    for g, w in zip(got, want, strict=True):
        close(g, w)


@pytest.mark.parametrize("shape", [(H,), (3, H)])
def test_packed_sequences(shape):
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 9, 9, 30], [0, 12, 20, 45]))
    q, k, v = torch.randn(30, H, D), torch.randn(45, G, D), torch.randn(45, G, E)
    slopes = 0.1 * torch.randn(shape)
    how = {"softcap": 2.0, "alibi_slopes": slopes, "causal": "bottom_right"}
    o = octet.attention_varlen(q, k, v, cu_q, cu_k, **how)
    for n in (0, 2):
        own = [x[a[n] : a[n + 1]].double().transpose(0, 1)[None] for x, a in ((q, cu_q), (k, cu_k), (v, cu_k))]
        want, _ = eager(*own, 2.0, (slopes if len(shape) == 1 else slopes[n]).double())
        close(o[cu_q[n] : cu_q[n + 1]].transpose(0, 1)[None], want, 1e-5)
    stacked = [torch.stack([x, 2 * x]) for x in (q, k, v)]
    both = torch.func.vmap(lambda q, k, v, s: octet.attention_varlen(q, k, v, cu_q, cu_k, **how | {"alibi_slopes": s}))(
        *stacked, torch.stack([slopes, -slopes])
    )
    assert torch.equal(both[0], o)
    want = octet.attention_varlen(2 * q, 2 * k, 2 * v, cu_q, cu_k, **how | {"alibi_slopes": -slopes})
    assert torch.equal(both[1], want)


def test_compiled_code_and_operators():
    q, k, v = (x.float().requires_grad_() for x in draw(5))
    slopes = slopes_of("batch", torch.float32)

    def loss(q, k, v):
        o, lse = call(q, k, v, 2.0, slopes)
        return o.square().sum() + lse.sum()

    compiled = torch.compile(loss, fullgraph=True)
    want = torch.autograd.grad(loss(q, k, v), (q, k, v))
    got = torch.autograd.grad(compiled(q, k, v), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    q, k, v = (x.detach() for x in (q, k, v))
    given = q, k, v, False, "precision=f32 softcap=2.0", None, None, None, None, 0, 0, slopes
    torch.library.opcheck(torch.ops.octet.forward.default, given)
    o, lse, _ = torch.ops.octet.forward(*given)
    want = octet.attention(q, k, v, softcap=2.0, alibi_slopes=slopes, return_lse=True)
    assert torch.equal(o, want[0]) and torch.equal(lse, want[1])
    on_meta = torch.ops.octet.forward(*(x.to("meta") if isinstance(x, torch.Tensor) else x for x in given))
    assert on_meta[0].shape == o.shape


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_training_in_16_bits(dtype):
    q, k, v = (x.to(dtype).requires_grad_() for x in draw(6))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    slopes = slopes_of("heads", torch.float32)
    got = torch.autograd.grad(call(q, k, v, 1.0, slopes)[0].sum(), (q, k, v))
    want = torch.autograd.grad(eager(*exact, 1.0, slopes.double())[0].sum(), exact)
    for g, w in zip(got, want, strict=True):
        close(g, w, 0.02)


def test_slopes_have_no_gradient():
    q, k, v = draw(7)
    slopes = slopes_of("heads").requires_grad_()
    with pytest.raises(octet.Unsupported, match=r"alibi_slopes: requires a gradient.*pass alibi_slopes.detach\(\)"):
        octet.attention(q, k, v, alibi_slopes=slopes)
    with torch.no_grad():
        octet.attention(q, k, v, alibi_slopes=slopes)
    q.requires_grad_()
    (g,) = torch.autograd.grad(octet.attention(q, k, v, softcap=2.0).sum(), q, create_graph=True)
    with pytest.raises(octet.Unsupported, match="first derivatives only"):
        torch.autograd.grad(g.sum(), q)


def test_a_second_call_with_another_cap_is_another():
    q, k, v = (x.float() for x in draw(8))
    found = [octet.attention(q, k, v, softcap=c) for c in (1.0, 2.0, 0.0, 1.0)]
    assert torch.equal(found[0], found[3])
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])


@pytest.mark.parametrize("name", ["heads", "batch"])
def test_flash_attn_takes_both(name):
    q, k, v = (x.transpose(1, 2).float() for x in draw(9))
    v = v[..., :D].contiguous()
    slopes = slopes_of(name, torch.float32)
    want, _ = eager(*(x.transpose(1, 2).double() for x in (q, k, v)), 2.0, slopes.double())
    o = flash_attn.flash_attn_func(q, k, v, causal=True, softcap=2.0, alibi_slopes=slopes)
    close(o.transpose(1, 2), want, 1e-5)
    qkv = torch.stack([k.repeat_interleave(2, 2)] * 3, 2).requires_grad_()
    o = flash_attn.flash_attn_qkvpacked_func(qkv, softcap=2.0, alibi_slopes=slopes)
    x = qkv.detach().double().requires_grad_()
    want, _ = eager(*(y.transpose(1, 2) for y in x.unbind(2)), 2.0, slopes.double(), causal=False)
    close(o.transpose(1, 2), want.detach(), 1e-5)
    close(torch.autograd.grad(o.sum(), qkv)[0], torch.autograd.grad(want.sum(), x)[0], 1e-4)
    o = flash_attn.flash_attn_qkvpacked_func(qkv, softcap=2.0)
    want, _ = eager(*(y.transpose(1, 2) for y in x.unbind(2)), 2.0, None, causal=False)
    close(torch.autograd.grad(o.sum(), qkv)[0], torch.autograd.grad(want.sum(), x)[0], 1e-4)
