"""Results of torch lie in memory as what they belong to does, also derivatives, compiled and mapped ones."""

import itertools

import numpy as np
import octet
import pytest
from octet._views import dense_strides, memory_order
from test_memory_order import BATCH, DIM, DIM_V, HEADS, KEYS, ORDERS, QUERIES, along, inputs
from torch_shared import compiled

torch = pytest.importorskip("torch")


def test_the_rule_is_that_of_torch():
    """Dense, broadcast, overlapping, with axes of one element: sizes and strides as they come."""
    random = np.random.default_rng(1)
    for _ in range(2000):
        rank = random.integers(1, 6)
        shape = tuple(int(x) for x in random.integers(1, 5, rank))
        steps = tuple(int(x) for x in random.choice([0, 1, 2, 3, 4, 8, 60], rank))
        x = torch.zeros(60 * 5 * 6).as_strided(shape, steps)
        want = torch.empty_like(x).stride()
        got = dense_strides(shape, memory_order(shape, steps))
        assert all(n == 1 or a == b for n, a, b in zip(shape, got, want, strict=True)), (shape, steps, got, want)


def tensors(orders, layout="bhsd", dtype=torch.float32):
    return [torch.from_numpy(x).to(dtype).requires_grad_() for x in inputs(orders, layout)]


def derived(function, q, k, v, do):
    """o, dq, dk, dv by autograd."""
    o = function(q, k, v)
    return o.detach(), *torch.autograd.grad(o, (q, k, v), do)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torch_keeps_every_order(dtype, layout):
    plain = tensors([range(4)] * 3, layout, dtype)

    def call(q, k, v):
        return octet.attention(q, k, v, layout=layout)

    do = torch.from_numpy(along(call(*plain).shape, (3, 1, 0, 2), seed=4)).to(dtype)
    want = derived(call, *plain, do)
    for order in ORDERS:
        orders = order, order[::-1], (*order[1:], order[0])
        q, k, v = tensors(orders, layout, dtype)
        for got, number, way in zip(derived(call, q, k, v, do), want, [order, *orders], strict=True):
            assert torch.equal(got, number) and got.stride() == dense_strides(got.shape, way)
        with torch.no_grad():
            tangents = [x.detach() for x in (q, k, v)]
            found = *octet.attention_jvp(q, k, v, *tangents, layout=layout), call(q, k, v), call(q, k, v)
            for o in (*found, torch.func.jvp(call, tuple(tangents), tuple(tangents))[1]):
                assert o.stride() == dense_strides(o.shape, order)
            for got, way in zip(octet.attention_vjp(q, k, v, do, layout=layout), orders, strict=True):
                assert got.stride() == dense_strides(got.shape, way)


def fused_projection(dtype=torch.bfloat16):
    """q, k, v as a fused projection leaves them: [batch, head, token, dim] views of [batch, token, 3, head, dim]."""
    torch.manual_seed(0)
    x = torch.randn(BATCH, QUERIES, 3, HEADS, DIM, dtype=dtype)
    return [y.detach().requires_grad_() for y in x.permute(2, 0, 3, 1, 4)]


def test_a_projection_is_taken_as_it_comes():
    """No operator of torch copies on the way: not q, k, v, not do (expanded here), no result."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Listening(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            heard.append(function.name())
            return function(*args, **(kwargs or {}))

    q, k, v = fused_projection()
    octet.attention(q, k, v, causal=True)  # asks once whether there is a backward pass
    token_major = torch.randn(BATCH, QUERIES, HEADS, DIM).bfloat16().transpose(1, 2)
    for do in (torch.ones(()).bfloat16().expand(q.shape), token_major):
        heard = []
        with Listening():
            o = octet.attention(q, k, v, causal=True)
            gradients = torch.autograd.grad(o, (q, k, v), do)
        assert set(heard) <= {"octet::forward", "octet::backward", "aten::detach"}, heard
        for x in (o, *gradients):
            assert x.stride() == dense_strides(x.shape, (0, 2, 1, 3)) and x.transpose(1, 2).is_contiguous()


def test_the_residual_lies_as_o():
    from octet._options import Options
    from octet.torch._text import text_of

    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "f16")):
        q, k, v = (x.detach() for x in fused_projection(dtype))
        o, lse, r = torch.ops.octet.forward(q, k, v, True, text_of(Options(name)))
        assert r.stride() == o.stride() == dense_strides(o.shape, (0, 2, 1, 3)) and lse.is_contiguous()
        assert r.dtype is torch.int8


def test_broadcast_operands_of_torch():
    q, k, v = (x.detach() for x in fused_projection())
    shared = k[:, :1].expand_as(k).requires_grad_()
    (dk,) = torch.autograd.grad(octet.attention(q, shared, v).sum(), shared)
    assert dk.stride() == torch.empty_like(shared).stride() == dense_strides(k.shape, range(4))


def test_packed_sequences_of_torch():
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 4, QUERIES], [0, 5, KEYS]))

    def call(q, k, v):
        return octet.attention_varlen(q, k, v, cu_q, cu_k)

    for order in itertools.permutations(range(3)):
        q, k, v = tensors([order] * 3, "thd")
        for x in derived(call, q, k, v, torch.ones(QUERIES, HEADS, DIM_V)):
            assert x.stride() == dense_strides(x.shape, order)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (3, 2, 1, 0)], ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_results_lie_as_eager_ones(order, dynamic):
    def call(q, k, v):
        return octet.attention(q, k, v)

    def pair(q, k, v):
        return octet.attention_jvp(q, k, v, q, k, v)

    q, k, v = tensors((order, order[::-1], order))
    do = torch.ones(BATCH, HEADS, QUERIES, DIM_V)
    found = [
        derived(compiled(call, dynamic=dynamic), q, k, v, do) + compiled(pair, dynamic=dynamic)(q, k, v),
        derived(call, q, k, v, do) + pair(q, k, v),
    ]
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want) and got.stride() == want.stride()


def test_compiled_results_of_a_fused_projection_lie_as_eager_ones():
    def call(q, k, v):
        return octet.attention(q, k, v)

    x = fused_projection()
    one = torch.ones(()).bfloat16().expand(x[0].shape)
    for got, want in zip(derived(compiled(call), *x, one), derived(call, *x, one), strict=True):
        assert torch.equal(got, want) and got.stride() == want.stride()


def test_a_number_of_tokens_that_only_running_tells():
    """unbacked sizes of torch.compile: a selection of tokens by their values."""

    def selected(x, chosen):
        x = x[chosen.nonzero().flatten()]
        cu = torch.stack([torch.zeros_like(chosen.sum()), chosen.sum()]).int()
        return octet.attention_varlen(x, x, x, cu, cu)

    x, chosen = torch.randn(9, 2, 8), torch.arange(9) % 2 == 0
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got, want = compiled(selected)(x, chosen), selected(x, chosen)
    assert torch.equal(got, want) and got.stride() == want.stride()


def test_elements_of_vmap_keep_their_order():
    """Mapped over a dimension of q's own, and over one that cannot become part of the batch without a copy."""
    x = torch.randn(3, BATCH, QUERIES, HEADS, DIM)
    for dim in (0, 1):
        q = x.transpose(2, 3)  # [mapped or batch, batch or mapped, head, token, dim]
        o = torch.func.vmap(lambda q: octet.attention(q, q, q), in_dims=dim)(q)
        want = torch.stack([octet.attention(*[y] * 3) for y in q.unbind(dim)])
        assert torch.equal(o, want)
        assert memory_order(o[0].shape, o[0].stride()) == (0, 2, 1, 3)
    cu = torch.tensor([0, 4, QUERIES], dtype=torch.int32)
    o = torch.func.vmap(lambda q: octet.attention_varlen(q, q, q, cu, cu))(x.flatten(0, 1))
    assert memory_order(o[0].shape, o[0].stride()) == (0, 1, 2)
