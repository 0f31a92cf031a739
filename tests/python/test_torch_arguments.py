"""Arguments whose meaning depends on torch: numbers that are tensors, masks that are no plain tensors, types of o."""

import numpy as np
import octet
import pytest
from torch_shared import compiled

torch = pytest.importorskip("torch")
from octet.compat.flash_attn import flash_attn_func, flash_attn_varlen_func  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.nn.attention.bias import causal_lower_right, causal_upper_left  # noqa: E402

torch.manual_seed(0)
Q, K = torch.randn(1, 4, 8, 16), torch.randn(1, 4, 9, 16)


@pytest.mark.parametrize("keyword, values", [("scale", (0.5, 0.25)), ("window", (1, 5))])
def test_a_number_that_is_a_tensor_is_read_in_each_call(keyword, values):
    """It is written between the calls, as a learnt temperature is."""
    value = torch.tensor(values[0])
    for number in values:
        value.fill_(number)
        for given in (value, value.numpy(), (value, 0)) if keyword == "window" else (value, value.numpy()):
            plain = (number, 0) if isinstance(given, tuple) else number
            how = {"alignment": "top_left"} if keyword == "window" else {}
            for _ in range(2):
                got = octet.attention(Q, Q, Q, **{keyword: given}, **how)
                assert torch.equal(got, octet.attention(Q, Q, Q, **{keyword: plain}, **how))


def test_a_scale_that_requires_a_gradient_is_rejected():
    scale = torch.tensor(0.5, requires_grad=True)
    for call in (octet.attention, octet.sdpa):
        with pytest.raises(
            octet.Unsupported, match=r"scale: requires a gradient.*; pass scale.detach\(\) .*may be lost"
        ):
            call(Q, Q, Q, scale=scale)
    with pytest.raises(octet.Unsupported, match="scale: requires a gradient"):
        torch.func.grad(lambda s: octet.attention(Q, Q, Q, scale=s).sum())(scale.detach())
    with forward_ad.dual_level(), pytest.raises(octet.Unsupported, match="scale: requires a gradient"):
        octet.attention(Q, Q, Q, scale=forward_ad.make_dual(scale.detach(), torch.ones(())))
    with torch.no_grad():
        assert torch.equal(octet.attention(Q, Q, Q, scale=scale), octet.attention(Q, Q, Q, scale=0.5))
    with pytest.raises(octet.InvalidArgument, match="scale: found tensor"):
        octet.attention(Q, Q, Q, scale=torch.ones(2))


class Overriding(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right], ids=lambda f: f.__name__)
def test_a_causal_bias_is_rejected_by_name(make):
    """Its memory was read as a mask, which nothing has written."""
    for function in (octet.attention, octet.explain, octet.check):
        with pytest.raises(octet.InvalidArgument, match="mask: a CausalBias, .*; use causal='top_left'"):
            function(Q, K, K, mask=make(8, 9))
    for arrays, function in (((Q, K, K, Q), octet.attention_vjp), ((Q, K, K, Q, K, K), octet.attention_jvp)):
        with pytest.raises(octet.InvalidArgument, match="mask: a CausalBias"):
            function(*arrays, mask=make(8, 9))
    assert not octet.supports(Q, K, K, mask=make(8, 9))


def test_masks_of_other_subclasses():
    mask = torch.rand(8, 9) < 0.7
    with pytest.raises(octet.InvalidArgument, match="mask: found a test_torch_arguments.Overriding"):
        octet.attention(Q, K, K, mask=mask.as_subclass(Overriding))
    assert torch.equal(octet.attention(Q, K, K, mask=mask.as_subclass(Subclass)), octet.attention(Q, K, K, mask=mask))


def test_quantize_rejects_what_requires_a_gradient():
    x = Q.clone().requires_grad_()
    with pytest.raises(octet.Unsupported, match=r"x: requires a gradient.*pass x.detach\(\)"):
        octet.quantize(x, "q")
    with torch.no_grad():
        octet.quantize(x, "q")
    with forward_ad.dual_level(), pytest.raises(octet.Unsupported, match="x: requires a gradient"):
        octet.quantize(forward_ad.make_dual(Q, Q), "q")


@pytest.mark.parametrize(
    "heads, words",
    [((1, 4, 4), "q: 1 heads, .*4 heads of k and v; use q.expand, or octet.sdpa"),
     ((4, 4, 1), r"v: shape \[1, 1, 8, 16\], expected \[1, 4, 8, 16\]")],
)  # fmt: skip
def test_single_heads_do_not_broadcast(heads, words):
    with pytest.raises(octet.InvalidArgument, match=words):
        octet.attention(*(torch.zeros(1, n, 8, 16) for n in heads))


@pytest.mark.parametrize(
    "cu, message",
    [
        ([0, 5, 13], "runs from 0 to 13, expected 0 to the 12 tokens of {}"),
        ([1, 5, 12], "runs from 1 to 12, expected 0 to the 12 tokens of {}"),
        ([0, 13, 12], "falls from 13 to 12 at sequence 1; must ascend"),
    ],
)
def test_wrong_lengths_are_named(cu, message):
    """Eager code and compiled code, in inference and where a gradient may follow."""
    x = torch.randn(12, 2, 8)
    wrong, right = (torch.tensor(y, dtype=torch.int32) for y in (cu, [0, 5, 12]))
    for side, lengths in (("q", (wrong, right)), ("k", (right, wrong))):
        for call in (octet.attention_varlen, compiled(octet.attention_varlen)):
            for q in (x, x.clone().requires_grad_()):
                with pytest.raises(octet.InvalidArgument, match=f"cu_seqlens_{side}: {message.format(side)}"):
                    call(q, x, x, *lengths)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_out_dtype(name):
    dtype = getattr(torch, name)
    q = Q.bfloat16()
    want = octet.attention(q, q, q, precision="f32", out_dtype=torch.float32)
    for given in (name, dtype):
        o = octet.attention(q, q, q, precision="f32", out_dtype=given)
        assert o.dtype is dtype and torch.equal(o, want.to(dtype))
        assert torch.equal(octet.attention(q, q, q, precision="f32", out_dtype=given), o)
    function = compiled(lambda q: octet.attention(q, q, q, precision="f32", out_dtype=dtype))
    assert torch.equal(function(q), o)
    cu = torch.tensor([0, 8], dtype=torch.int32)
    packed = octet.attention_varlen(*[q[0].transpose(0, 1)] * 3, cu, cu, precision="f32", out_dtype=dtype)
    assert packed.dtype is dtype and torch.equal(packed.transpose(0, 1)[None], o)


def test_out_dtype_of_eight_bit_floats():
    """The type of q is none that precision fp8 writes: o is of another."""
    x = [y.to(torch.float8_e4m3fn) for y in (Q, Q, Q)]
    with pytest.raises(octet.InvalidArgument, match="o: dtype e4m3, allowed: f32, f16, bf16"):
        octet.attention(*x, precision="fp8", out_dtype="float8_e4m3fn")
    want = octet.attention(*(y.float() for y in x), precision="f32")
    for given in (torch.float32, torch.float16):
        for precision in ("fp8", "fp8_raw"):
            o = octet.attention(*x, precision=precision, out_dtype=given)
            assert o.dtype is given and (o.float() - want).norm() < 0.1 * want.norm()


def test_gradients_through_out_dtype():
    q = Q.bfloat16().requires_grad_()
    o = octet.attention(q, q, q, out_dtype=torch.float32)
    (got,) = torch.autograd.grad(o.square().sum(), q)
    wide = Q.bfloat16().double().requires_grad_()
    (want,) = torch.autograd.grad(octet.attention(wide, wide, wide).square().sum(), wide)
    assert o.dtype is torch.float32 and got.dtype is torch.bfloat16
    assert (got - want).norm() < 0.02 * want.norm()


def test_messages_use_the_words_of_python():
    """The function takes what a message says to pass."""
    words = 'use causal="top_left" .*"bottom_right" .*alignment="top_left"'
    for keywords in ({"causal": True}, {"window": 3}):
        with pytest.raises(octet.InvalidArgument, match=words):
            octet.attention(Q, K, K, **keywords)
        assert 'causal="top_left"' in octet.supports(Q, K, K, **keywords).reason
    octet.attention(Q, K, K, causal="top_left")
    octet.attention(Q, K, K, window=3, alignment="bottom_right")
    with pytest.raises(octet.InvalidArgument, match='alignment: "top_left" given'):
        octet.attention(Q, Q, Q, alignment="top_left")
    cu = torch.tensor([0, 8], dtype=torch.int32)
    packed = Q[0].transpose(0, 1)
    with pytest.raises(octet.InvalidArgument, match='the sequences are packed; use causal="top_left"'):
        octet.attention_varlen(packed, packed, packed, cu, cu, causal=True)
    with pytest.raises(octet.InvalidArgument, match="octet.quantize"):
        octet.attention(*[Q.to(torch.int8)] * 3, precision="int8")


@pytest.mark.parametrize("four", [torch.tensor(4), torch.tensor([4], dtype=torch.int32), np.int64(4), np.array([4])])
def test_numbers_may_be_arrays_of_one_element(four):
    torch.manual_seed(0)
    x, cu = torch.randn(6, 2, 8), torch.tensor([0, 2, 6], dtype=torch.int32)
    lengths = {"max_seqlen_q": 4, "max_seqlen_k": 4}
    want = octet.attention_varlen(x, x, x, cu, cu, **lengths)
    assert torch.equal(octet.attention_varlen(x, x, x, cu, cu, **dict.fromkeys(lengths, four)), want)
    assert torch.equal(flash_attn_varlen_func(x, x, x, cu, cu, four, four), want)
    for name, keywords in (("threads", {}), ("window", {"alignment": "top_left"}), ("scale", {}), ("softcap", {})):
        found, want = (octet.attention(x[None], x[None], x[None], **{name: n}, **keywords) for n in (four, 4))
        assert torch.equal(found, want), name
    found, want = (flash_attn_func(*[x[None]] * 3, window_size=(n, n)) for n in (four, 4))
    assert torch.equal(found, want)


@pytest.mark.parametrize("found", [torch.tensor(4.0), torch.tensor([4, 4]), np.array([4, 4]), 4.0, "4"])
def test_other_arrays_are_no_lengths(found):
    x, cu = torch.randn(6, 2, 8), torch.tensor([0, 2, 6], dtype=torch.int32)
    with pytest.raises(octet.InvalidArgument, match="max_seqlen_q: found"):
        octet.attention_varlen(x, x, x, cu, cu, max_seqlen_q=found)
    with pytest.raises(octet.InvalidArgument, match="threads: found"):
        octet.attention(x[None], x[None], x[None], threads=found)
