"""Head dims that are no multiple of 8 in torch: derivatives, compiled, mapped, run again."""

import numpy as np
import octet
import pytest
from test_head_dims import arrays
from torch_shared import compiled

torch = pytest.importorskip("torch")
from torch.autograd import gradcheck  # noqa: E402

CHECKS = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": True}


def tensors(dim, dim_v, dtype=torch.float32, order=(0, 1, 2, 3)):
    return [torch.from_numpy(x).to(dtype).requires_grad_() for x in arrays(dim, dim_v, order=order)[:3]]


def derived(function, x):
    o = function(*x)
    return o.detach(), *torch.autograd.grad(o.square().sum(), x)


def test_gradcheck():
    x = [y.detach()[:1, :2, :4].double().requires_grad_() for y in tensors(3, 5)]
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda q, k, v, s: octet.attention(q, k, v, sinks=s, return_lse=True), (*x, sinks), **CHECKS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)], ids=str)
def test_eager_and_compiled_give_what_numpy_gives(dtype, order):
    x = tensors(59, 43, dtype, order)

    def call(q, k, v):
        return octet.attention(q, k, v, threads=1)

    got = derived(call, x)
    for y, z in zip(got, derived(compiled(call), x), strict=True):
        assert torch.equal(y, z) and y.stride() == z.stride()
    for y, of in zip(got, (x[0], *x), strict=True):
        assert np.argsort(y.stride())[::-1].tolist() == list(order) and y.dtype is of.dtype
    if dtype is torch.float32:
        numbers = [y.detach().numpy() for y in x]
        np.testing.assert_array_equal(got[0].numpy(), octet.attention(*numbers, threads=1))
        for y, z in zip(got[1:], octet.attention_vjp(*numbers, 2 * got[0].numpy(), threads=1), strict=True):
            np.testing.assert_array_equal(y.numpy(), z)


def test_calls_without_a_gradient_may_be_repeated():
    """Not by the shortcut that runs described calls again, which hands tensors over as they are."""
    q, k, v = (x.detach() for x in tensors(59, 59))
    first = octet.attention(q, k, v)
    assert all(torch.equal(octet.attention(q, k, v), first) for _ in range(3)) and first.shape == q.shape


def test_eight_bit_floats():
    q, k, v = (x.detach().to(torch.float8_e4m3fn) for x in tensors(59, 59))
    o = octet.attention(q, k, v, precision="fp8_raw")
    full = [torch.nn.functional.pad(x.float(), (0, 5)).to(torch.float8_e4m3fn) for x in (q, k, v)]
    want = octet.attention(*full, precision="fp8_raw", scale=59**-0.5)[..., :59]
    assert torch.equal(o.float(), want.float())


def test_vmap():
    x = [y.detach() for y in tensors(13, 21)]
    got = torch.func.vmap(octet.attention)(*(torch.stack([y, -y]) for y in x))
    assert torch.equal(got[1], octet.attention(*(-y for y in x)))
