"""The functions of flash-attn and SageAttention under their own names: alignment, layouts, what is rejected."""

import inspect

import exact
import numpy as np
import octet
import pytest

torch = pytest.importorskip("torch")
from octet.compat import flash_attn, sageattention  # noqa: E402


def draw(queries=20, keys=30, heads=4, kv_heads=2, dim=16):
    random = np.random.default_rng(0)
    shapes = (2, queries, heads, dim), (2, keys, kv_heads, dim), (2, keys, kv_heads, dim)
    return [torch.from_numpy(random.standard_normal(shape)) for shape in shapes]


def expect(got, lse, q, k, v, seen, scale=None):
    """`got` [batch, token, head, dim] of float64 tensors."""
    numbers = [x.transpose(1, 2).numpy() for x in (q, k, v)]
    want = exact.attention(*numbers, seen=seen, scale=scale)
    bound = exact.bounds(*numbers, scale=scale, **exact.rounding("float64"))
    exact.expect_close(got.transpose(1, 2).numpy(), want["o"], bound["o"], "o")
    exact.expect_close(lse.numpy(), want["lse"], bound["lse"], "lse")


@pytest.mark.parametrize("window", [(-1, -1), (3, 5), (3, -1), (-1, 2), (0, 0)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries", [20, 40])
def test_flash_attn_masks_are_aligned_bottom_right(queries, causal, window):
    """A window's right side is the diagonal under a causal mask."""
    q, k, v = draw(queries)
    o, lse, dropped = flash_attn.flash_attn_func(q, k, v, causal=causal, window_size=window, return_attn_probs=True)
    assert dropped is None and o.shape == q.shape
    i, j = np.arange(queries)[:, None], np.arange(30)[None, :]
    left, right = window[0], 0 if causal else window[1]
    seen = np.ones((queries, 30), bool)
    if left >= 0:
        seen &= j >= i + 30 - queries - left
    if right >= 0:
        seen &= j <= i + 30 - queries + right
    expect(o, lse, q, k, v, seen)
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, causal=causal, window_size=window), o)


def test_flash_attn_packed():
    q, k, v = (x[0] for x in draw(20, 30))
    cu_q, cu_k = torch.tensor([0, 8, 20], dtype=torch.int32), torch.tensor([0, 18, 30], dtype=torch.int32)
    o, lse, _ = flash_attn.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 12, 18, softmax_scale=0.5, causal=True, return_attn_probs=True
    )
    assert lse.shape == (4, 20)
    for a, b in ((0, 1), (1, 2)):
        of_q, of_k = slice(cu_q[a], cu_q[b]), slice(cu_k[a], cu_k[b])
        seen = exact.visible(int(cu_q[b] - cu_q[a]), int(cu_k[b] - cu_k[a]), "bottom_right")
        expect(o[None, of_q], lse[None, :, of_q], q[None, of_q], k[None, of_k], v[None, of_k], seen, 0.5)


def test_flash_attn_is_differentiable_and_takes_a_precision():
    q, k, v = (x.float().requires_grad_() for x in draw(30))
    o = flash_attn.flash_attn_func(q, k, v, causal=True, precision="int8")
    want = octet.attention(q, k, v, causal="bottom_right", precision="int8", layout="bshd")
    assert torch.equal(o, want)
    gradients = [torch.autograd.grad(x.sum(), (q, k, v)) for x in (o, want)]
    assert all(torch.equal(x, y) for x, y in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    "keywords, message",
    [({"dropout_p": 1.5}, "dropout_p: found 1.5"), ({"softcap": -20.0}, "softcap: found -20, allowed: positive"),
     ({"alibi_slopes": torch.ones(7)}, "alibi_slopes: shape .1, 7, 1, 1., expected")],
)  # fmt: skip
def test_flash_attn_rejections(keywords, message):
    q, k, v = draw()
    with pytest.raises(octet.Error, match=message):
        flash_attn.flash_attn_func(q, k, v, **keywords)
    cu = torch.tensor([0, 20], dtype=torch.int32)
    with pytest.raises(octet.Error, match=message):
        flash_attn.flash_attn_varlen_func(q[0], q[0], q[0], cu, cu, 20, 20, **keywords)
    with pytest.raises(octet.InvalidArgument, match="k: shape"):  # pages have four dimensions
        flash_attn.flash_attn_varlen_func(q[0], q[0], q[0], cu, cu, 20, 20, block_table=cu)
    with pytest.raises(TypeError, match="num_splits"):
        flash_attn.flash_attn_func(q, k, v, num_splits=2)


NAMED = {
    "sageattn": "int8",
    "sageattn_qk_int8_pv_fp16_triton": "int8_f16",
    "sageattn_qk_int8_pv_fp16_cuda": "int8_f16",
    "sageattn_qk_int8_pv_fp8_cuda": "int8_fp8",
    "sageattn_qk_int8_pv_fp8_cuda_sm90": "int8_fp8",
}


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_sageattention_is_the_named_precision(name, layout):
    q, k, v = (x.bfloat16() for x in draw())
    if layout == "HND":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o, lse = getattr(sageattention, name)(q, k, v, tensor_layout=layout, is_causal=True, sm_scale=0.3, return_lse=True)
    own = "bhsd" if layout == "HND" else "bshd"
    want = octet.attention(q, k, v, precision=NAMED[name], layout=own, causal="top_left", scale=0.3, return_lse=True)
    assert torch.equal(o, want[0]) and torch.equal(lse, want[1]) and lse.shape == (2, 4, 20)


def test_sageattention_masks_and_packed_sequences():
    q, k, v = (x.transpose(1, 2).float() for x in draw())
    mask = torch.rand(20, 30) < 0.5
    got = sageattention.sageattn_qk_int8_pv_fp16_triton(q, k, v, attn_mask=mask)
    assert torch.equal(got, octet.attention(q, k, v, mask=mask, precision="int8_f16"))
    cu = torch.tensor([0, 8, 20], dtype=torch.int32)
    x = q[0].transpose(0, 1)
    got = sageattention.sageattn_varlen(x, x, x, cu, cu, 12, 12, is_causal=True)
    assert torch.equal(got, octet.attention_varlen(x, x, x, cu, cu, causal="top_left", precision="int8"))


@pytest.mark.parametrize("name", [*NAMED, "sageattn_varlen"])
def test_sageattention_rejects_what_it_would_ignore(name):
    function = getattr(sageattention, name)
    q = torch.randn(1, 2, 20, 16)
    cu = torch.tensor([0, 20], dtype=torch.int32)
    x = (
        (q[0, 0][:, None], q[0, 0][:, None], q[0, 0][:, None], cu, cu, 20, 20)
        if name == "sageattn_varlen"
        else (q, q, q)
    )
    known = inspect.signature(function).parameters
    if "attn_mask" not in known:
        with pytest.raises(TypeError, match="attn_mask: octet has no such argument; call octet.attention with mask"):
            function(*x, attn_mask=None)
    for keyword, value in {
        "smooth_k": False,
        "smooth_v": True,
        "qk_quant_gran": "per_head",
        "pv_accum_dtype": "bf16",
    }.items():
        if keyword in known:
            with pytest.raises(octet.Unsupported, match=f"{keyword}: found {value!r}, allowed:"):
                function(*x, **{keyword: value})
    if "tensor_layout" in known:
        with pytest.raises(octet.InvalidArgument, match="tensor_layout: found 'HDN', allowed: 'HND', 'NHD'"):
            function(*x, tensor_layout="HDN")


def test_sageattention_has_gradients_or_says_that_it_has_none():
    q = torch.randn(1, 2, 20, 16, requires_grad=True)
    (gradient,) = torch.autograd.grad(sageattention.sageattn(q, q, q).sum(), q)
    assert gradient.isfinite().all() and gradient.abs().sum() > 0
    with pytest.raises(octet.Unsupported, match="no backward pass"):
        sageattention.sageattn_qk_int8_pv_fp8_cuda(q, q, q)
