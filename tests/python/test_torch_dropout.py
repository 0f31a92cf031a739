"""Dropout in torch: the same elements by the same seed in every way of calling, and by torch's generator in the
drop-ins."""

import functools

import exact
import numpy as np
import octet
import pytest

torch = pytest.importorskip("torch")
from octet.compat import flash_attn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

P = 0.25
SHAPE = 3, 4, 70, 32


def tensors(seed=0, **how):
    torch.manual_seed(seed)
    return [torch.randn(SHAPE, **how) for _ in range(3)]


def after(seed, call, *args):
    torch.manual_seed(seed)
    return call(*args)


def dropping(*args, **how):
    return octet.sdpa(*args, dropout_p=P, **how)


@pytest.mark.parametrize("precision", ["f32", "bf16", "int8"])
def test_gradients_are_those_of_the_elements_that_the_forward_pass_kept(precision):
    q, k, v = tensors(1, requires_grad=True)
    how = {"dropout_p": P, "dropout_seed": (7, 1), "precision": precision}
    o = octet.attention(q, k, v, **how)
    do = torch.randn_like(o)
    (dv,) = torch.autograd.grad(o, v, do)
    other = octet.attention(q.detach(), k.detach(), v.detach(), **how)
    assert torch.equal(o, other)
    # dv of a key is the sum over the queries that kept it, and a unit matrix as v shows which.
    p = octet.attention(q.detach(), k.detach(), torch.eye(70, 70).expand(3, 4, 70, 70), **how | {"precision": "f32"})
    want = p.transpose(-1, -2) @ do
    assert (dv - want).norm() < 0.03 * want.norm()


def test_a_seed_is_what_the_documents_say():
    q, k, _ = tensors(2)
    p = octet.attention(q, k, torch.eye(70, 72).expand(3, 4, 70, 72), dropout_p=P, dropout_seed=(2**40 + 3, 2**33 + 5))
    for b in range(3):
        for head in range(4):
            lost = exact.dropped(P, 2**40 + 3, 2**33 + 5 + b, head, 70, 70)
            np.testing.assert_array_equal(p[b, head, :, :70].numpy() == 0, lost)


def test_the_generator_decides_and_repeats():
    q, k, v = tensors(3)
    first = after(0, dropping, q, k, v)
    assert not torch.equal(dropping(q, k, v), first)
    assert torch.equal(after(0, dropping, q, k, v), first)
    state = torch.get_rng_state()
    octet.sdpa(q, k, v)
    assert torch.equal(torch.get_rng_state(), state), "a call that drops nothing draws nothing"


def test_checkpoints_replay_it():
    q, k, v = tensors(4, requires_grad=True)
    for reentrant in (False, True):
        gradients = []
        for run in (dropping, functools.partial(checkpoint, dropping, use_reentrant=reentrant)):
            o = after(5, run, q, k, v)
            o.square().sum().backward()
            gradients.append([x.grad for x in (q, k, v)])
            q.grad = k.grad = v.grad = None
        assert all(torch.equal(x, y) for x, y in zip(*gradients, strict=True))


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_vmap_draws_by_its_randomness(randomness):
    q, k, v = tensors(5)
    many = q.expand(2, *SHAPE)
    o = after(1, torch.func.vmap(lambda q: dropping(q, k, v), randomness=randomness), many)
    assert torch.equal(o[0], o[1]) == (randomness == "same")
    if randomness == "same":
        assert torch.equal(o[0], after(1, dropping, q, k, v))
    with pytest.raises(RuntimeError, match="randomness error mode"):
        torch.func.vmap(lambda q: dropping(q, k, v))(many)


@pytest.mark.parametrize("in_dims", [(0, 0), (None, 0), (0, None)])
def test_vmap_over_seeds_is_a_loop(in_dims):
    q, k, v = tensors(6)
    many = q if in_dims[0] is None else torch.stack([q, q + 1])
    seeds = torch.arange(8, dtype=torch.int32).reshape(2, 4)
    seeds = seeds if in_dims[1] == 0 else seeds[0]

    def call(q, seed):
        return octet.attention(q, k, v, dropout_p=P, dropout_seed=seed)

    found = torch.func.vmap(call, in_dims)(many, seeds)
    for i in range(2):
        want = call(many if in_dims[0] is None else many[i], seeds if in_dims[1] is None else seeds[i])
        assert torch.equal(found[i], want)


def test_seeds_of_their_own():
    q, k, v = tensors(7)
    seeds = torch.tensor([[1, 0, 9, 0], [2, 0, 9, 0], [1, 0, 10, 0]], dtype=torch.int32)
    o = octet.attention(q, k, v, dropout_p=P, dropout_seed=seeds)
    for b, (seed, _, offset, _) in enumerate(seeds.tolist()):
        one = octet.attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], dropout_p=P, dropout_seed=(seed, offset))
        assert torch.equal(o[b : b + 1], one)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_code_draws_and_trains(backend):
    q, k, v = tensors(8, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: dropping(q, k, v) * 2, fullgraph=True, backend=backend)
    first = after(2, compiled, q)
    assert torch.equal(after(2, compiled, q), first) and not torch.equal(compiled(q), first)
    (dq,) = torch.autograd.grad(first, q, torch.ones_like(first))
    assert dq.isfinite().all() and dq.norm() > 0


def test_forward_mode_has_the_elements_of_its_forward_pass():
    q, k, v = tensors(9)
    call = functools.partial(octet.attention, dropout_p=P, dropout_seed=3)
    o, to = torch.func.jvp(lambda v: call(q, k, v), (v,), (v,))
    for x in (o, to):  # o is linear in v
        assert (x - call(q, k, v)).abs().max() < 1e-5


def test_flash_attn_takes_it():
    q, k, v = (x.transpose(1, 2) for x in tensors(10))
    dropped = after(3, functools.partial(flash_attn.flash_attn_func, dropout_p=P), q, k, v)
    want = after(3, dropping, *(x.transpose(1, 2) for x in (q, k, v)))
    assert torch.equal(dropped, want.transpose(1, 2))
    qkv = torch.stack([q, k, v], 2).requires_grad_()
    stacked = after(3, functools.partial(flash_attn.flash_attn_qkvpacked_func, dropout_p=P), qkv)
    assert torch.equal(stacked, dropped)
    (gradient,) = torch.autograd.grad(stacked.sum(), qkv)
    assert gradient.shape == qkv.shape and gradient.isfinite().all()


def test_saved_programs_know_the_option():
    from octet._options import Options
    from octet.torch._text import options_from, text_of

    options = Options("bf16", dropout_p=0.1)
    assert text_of(options) == "precision=bf16 dropout_p=0.1" and options_from(text_of(options)) == options
