"""octet as the flash attention of torch's own scaled_dot_product_attention, on the CPU and on a GPU if there is one."""

import octet
import pytest

torch = pytest.importorskip("torch")
attention = pytest.importorskip("torch.nn.attention")
if not hasattr(attention, "register_flash_attention_impl"):
    pytest.skip("this torch has no register_flash_attention_impl", allow_module_level=True)
from octet.integrations import torch as in_torch  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as sdpa  # noqa: E402

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def device(request):
    """torch prefers cuDNN to flash attention on some GPUs."""
    in_torch.register()
    with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
        yield request.param
    if attention.current_flash_attention_impl():
        attention.restore_flash_attention_impl()


def draw(device, *shapes, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return [torch.randn(shape).to(device, dtype).requires_grad_() for shape in shapes]


SHAPE = (2, 4, 40, 64)


def with_gradients(call, *x):
    o = call(*x)
    return o.detach(), *torch.autograd.grad(o.float().square().sum(), x)


def expect_same(got, want):
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)


def test_registering_changes_nothing_and_restoring_ends_it(device):
    x = draw(device, *[SHAPE] * 3)
    own = sdpa(*x)
    names = in_torch.register()
    assert {"octet", "octet_bf16", "octet_int8"} <= set(names) <= set(attention.list_flash_attention_impls())
    assert torch.equal(sdpa(*x), own) and attention.current_flash_attention_impl() is None
    attention.activate_flash_attention_impl("octet")
    assert attention.current_flash_attention_impl() == "octet"
    assert torch.equal(sdpa(*x), octet.attention(*x, remedy="none", deterministic=True))
    attention.restore_flash_attention_impl()
    assert torch.equal(sdpa(*x), own)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "mixed"])
def test_it_is_octets_attention_and_its_gradients(device, layout, dtype, causal):
    q, k, v = draw(device, *[SHAPE] * 3, dtype=dtype)
    swapped = {"bhsd": (), "bshd": "qkv", "mixed": "k"}[layout]
    q, k, v = (
        x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() if name in swapped else x
        for name, x in zip("qkv", (q, k, v), strict=True)
    )
    how = "top_left" if causal else False
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        want = with_gradients(lambda *x: octet.attention(*x, causal=how, remedy="none"), q, k, v)
        attention.activate_flash_attention_impl("octet")
        got = with_gradients(lambda *x: sdpa(*x, is_causal=causal), q, k, v)
    finally:
        torch.use_deterministic_algorithms(False)
    expect_same(got, want)
    assert got[0].stride() == q.stride()


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_a_precision_by_name(device, precision):
    x = [y.detach() for y in draw(device, *[SHAPE] * 3)]
    if not (found := octet.supports(*x, precision=precision)):
        pytest.skip(found.reason)
    attention.activate_flash_attention_impl(f"octet_{precision}")
    assert torch.equal(sdpa(*x, is_causal=True), octet.attention(*x, causal=True, precision=precision))


def test_grouped_heads_dims_that_torch_pads_and_scales(device):
    attention.activate_flash_attention_impl("octet")
    q, k, v = draw(device, (2, 4, 40, 64), (2, 2, 40, 64), (2, 2, 40, 64))
    want = octet.attention(q, k, v, scale=0.25, remedy="none")
    assert torch.equal(sdpa(q, k, v, scale=0.25, enable_gqa=True), want)
    if device == "cuda":  # on the CPU torch pads nothing, and octet refuses
        x = draw(device, *[(2, 4, 40, 12)] * 3)
        padded = [torch.nn.functional.pad(y, (0, 4)) for y in x]
        want = octet.attention(*padded, scale=12**-0.5, remedy="none")[..., :12]
        torch.testing.assert_close(sdpa(*x), want, rtol=2**-7, atol=2**-7)


def test_masks_on_the_cpu():
    in_torch.register()
    x = draw("cpu", *[SHAPE] * 3, dtype=torch.float32)
    mask = torch.rand(40, 40) < 0.7
    want = with_gradients(lambda *y: octet.attention(*y, mask=mask), *x)
    attention.activate_flash_attention_impl("octet")
    try:
        got = with_gradients(lambda *y: sdpa(*y, mask), *x)
    finally:
        attention.restore_flash_attention_impl()
    for a, b in zip(got, want, strict=True):  # torch hands over a float mask
        torch.testing.assert_close(a, b)


def test_compiled(device):
    x = draw(device, *[SHAPE] * 3)
    attention.activate_flash_attention_impl("octet")
    torch._dynamo.reset()
    # Through backward too, whose strides inductor asserts; on the CPU it takes a minute to compile.
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(lambda q, k, v: sdpa(q, k, v, is_causal=True) * 2, fullgraph=True, backend=backend)
    got, want = (with_gradients(f, *x) for f in (compiled, lambda q, k, v: sdpa(q, k, v, is_causal=True) * 2))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-6)


@pytest.mark.skipif("cuda" not in DEVICES, reason="torch has these operators on a GPU alone")
def test_packed_sequences():
    in_torch.register()
    q, k, v, do = draw("cuda", (50, 4, 64), (70, 2, 64), (70, 2, 64), (50, 4, 64))
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 20, 50], [0, 30, 70]))
    how = {"causal": "bottom_right", "window": (8, -1), "remedy": "none"}
    torch.use_deterministic_algorithms(True, warn_only=True)
    attention.activate_flash_attention_impl("octet")
    try:
        o = octet.attention_varlen(q, k, v, cu_q, cu_k, max_seqlen_q=30, max_seqlen_k=40, **how)
        want = o.detach(), *torch.autograd.grad(o, (q, k, v), do)
        o = torch.ops.aten._flash_attention_forward(
            q, k, v, cu_q, cu_k, 30, 40, 0.0, True, False, window_size_left=8, window_size_right=0
        )[0]
        expect_same((o.detach(), *torch.autograd.grad(o, (q, k, v), do)), want)
    finally:
        attention.restore_flash_attention_impl()
        torch.use_deterministic_algorithms(False)


def test_refusals(device):
    q, k, v = draw(device, *[SHAPE] * 3)
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    flash = flash if device == "cuda" else torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    attention.activate_flash_attention_impl("octet")
    with pytest.raises(octet.Unsupported, match="dropout_p: found 0.5, allowed: 0; .*drop elements of the output"):
        flash(q, k, v, 0.5)
    attention.activate_flash_attention_impl("octet_fp8_raw")
    with pytest.raises(octet.Unsupported, match="requires_grad: found True without torch.no_grad"):
        flash(q, k, v)
    if device == "cuda":
        with pytest.raises(octet.Unsupported, match="return_debug_mask: found True"):
            flash(q, k, v, 0.0, False, True)
        dense = [x.detach() for x in (q, k, v)]
        with pytest.raises(octet.Unsupported, match="alibi_slopes: found an array of shape .40., allowed: None"):
            torch.ops.aten._flash_attention_forward(
                *dense, None, None, 4, 4, 0.0, False, False, alibi_slopes=torch.ones(40, device=device)
            )
    else:
        with pytest.raises(octet.InvalidArgument, match="head dim 12, allowed: a multiple of 8"):
            sdpa(*draw(device, *[(2, 4, 40, 12)] * 3))


def test_an_older_torch_is_told_what_to_use(monkeypatch):
    monkeypatch.delattr(attention, "register_flash_attention_impl")
    with pytest.raises(octet.Unsupported, match="no torch.nn.attention.register_flash_attention_impl.*patch_sdpa"):
        in_torch.register()
