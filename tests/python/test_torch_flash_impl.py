"""octet as the flash attention of torch's own scaled_dot_product_attention, on the CPU and on a GPU if there is one."""

import warnings
import weakref

import octet
import pytest

torch = pytest.importorskip("torch")
attention = pytest.importorskip("torch.nn.attention")
import torch.utils.checkpoint  # noqa: E402, F811
from octet._operands import RESULTS  # noqa: E402
from octet._options import options_of  # noqa: E402
from octet.integrations import torch as in_torch  # noqa: E402
from octet.torch import _ops, adapter  # noqa: E402
from torch.nn.attention import bias  # noqa: E402
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
    return o.detach(), *torch.autograd.grad(o, x, draw(o.device, o.shape, dtype=o.dtype)[0].detach())


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
    assert torch.equal(sdpa(*x), octet.attention(*x, deterministic=True))
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
        want = with_gradients(lambda *x: octet.attention(*x, causal=how), q, k, v)
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
    want = octet.attention(q, k, v, scale=0.25)
    assert torch.equal(sdpa(q, k, v, scale=0.25, enable_gqa=True), want)
    if device == "cuda":  # on the CPU torch pads nothing, and octet rejects
        x = draw(device, *[(2, 4, 40, 12)] * 3)
        padded = [torch.nn.functional.pad(y, (0, 4)) for y in x]
        want = octet.attention(*padded, scale=12**-0.5)[..., :12]
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


class Flash:
    """octet's attention, through the registry and directly."""

    def __init__(self, device, monkeypatch):
        self.device, self.recomputed = device, 0
        real = in_torch._recompute

        def recompute(*x):
            self.recomputed += 1
            return real(*x)

        monkeypatch.setattr(in_torch, "_recompute", recompute)
        attention.activate_flash_attention_impl("octet")

    def run(self, q, k, v):
        return sdpa(q, k, v, is_causal=True)

    def expect_gradients(self, call, x, recomputed):
        """Those of octet.attention, bit for bit, where dq and dk of bias_correction "none" are others. Recomputed ones
        are those of exact_delta, from the same forward pass."""
        got, want = with_gradients(call, *x), with_gradients(self.octet, *x)
        if recomputed:
            how = options_of(adapter.own_type(x[0]), causal="top_left", deterministic=True)
            plain = [y.detach() for y in x]
            operands = dict(zip("qkv", plain, strict=True))
            made = _ops.run("forward", operands, how, True)
            do = draw(self.device, SHAPE, dtype=x[0].dtype)[0].detach()
            how = how._replace(bias_correction="exact_delta")
            operands |= {"do_": do, **dict(zip(RESULTS["forward"], made, strict=True))}
            want = made[0], *_ops.run("backward", operands, how)[:3]
        expect_same(got, want)
        biased = with_gradients(lambda *x: octet.attention(*x, causal="top_left", bias_correction="none"), *x)
        assert not any(torch.equal(a, b) for a, b in zip(got[1:3], biased[1:3], strict=True))
        assert self.recomputed == recomputed

    @staticmethod
    def octet(q, k, v):
        return octet.attention(q, k, v, causal="top_left")


@pytest.fixture
def flash(device, monkeypatch):
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield Flash(device, monkeypatch)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_correction_of_rounding_bias_is_on(flash, dtype):
    flash.expect_gradients(flash.run, draw(flash.device, *[SHAPE] * 3, dtype=dtype), recomputed=0)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_correction_is_on_in_checkpoints(flash, use_reentrant):
    def call(*x):
        return torch.utils.checkpoint.checkpoint(flash.run, *x, use_reentrant=use_reentrant)

    x = draw(flash.device, *[SHAPE] * 3)
    if use_reentrant:  # torch.autograd.grad does not go with it
        o = call(*x)
        o.backward(draw(flash.device, SHAPE)[0].detach())
        expect_same([y.grad for y in x], with_gradients(flash.octet, *x)[1:])
        assert flash.recomputed == 0
    else:
        flash.expect_gradients(call, x, recomputed=0)


def test_the_correction_is_on_when_saved_tensors_are_copied(flash):
    def call(*x):
        with torch.autograd.graph.save_on_cpu():
            return flash.run(*x)

    def cloned(*x):
        with torch.autograd.graph.saved_tensors_hooks(lambda y: y.clone(), lambda y: y):
            return flash.run(*x)

    x = draw(flash.device, *[SHAPE] * 3)
    flash.expect_gradients(cloned, x, recomputed=1)
    if flash.device == "cuda":  # elsewhere nothing is copied
        flash.expect_gradients(call, x, recomputed=2)


def test_the_correction_is_on_in_compiled_code(flash):
    torch._dynamo.reset()
    compiled = torch.compile(flash.run, fullgraph=True, backend="aot_eager")
    flash.expect_gradients(compiled, draw(flash.device, *[SHAPE] * 3), recomputed=0)


def test_the_correction_is_on_in_a_second_backward_pass_and_without_gradients_of_k(flash):
    x = draw(flash.device, *[SHAPE] * 3)
    x[1].requires_grad_(False)
    o, want = flash.run(*x), flash.octet(*x)
    for _ in range(2):
        got = torch.autograd.grad(o.float().square().sum(), (x[0], x[2]), retain_graph=True)
        expect_same(got, torch.autograd.grad(want.float().square().sum(), (x[0], x[2]), retain_graph=True))
    assert flash.recomputed == 0


def operators(device):
    aten = torch.ops.aten
    if device == "cpu":
        return (
            aten._scaled_dot_product_flash_attention_for_cpu,
            aten._scaled_dot_product_flash_attention_for_cpu_backward,
        )
    return aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_backward


def test_a_residual_is_not_taken_for_that_of_another_output(flash):
    """Ring attention merges o and lse of several passes, and asks each for its gradients with the merged ones."""
    forward, backward = operators(flash.device)
    q, k, v, do = (x.detach() for x in draw(flash.device, *[SHAPE] * 4))
    halves = [(k[:, :, :20], v[:, :, :20]), (k[:, :, 20:], v[:, :, 20:])]

    def run(q, k, v):
        made = forward(q, k, v)
        return made[0], made[1], made[6:8]

    def gradients(q, k, v, o, lse, more):
        between = (0.0, False) if flash.device == "cpu" else (None, None, q.shape[2], k.shape[2], 0.0, False, *more)
        return backward(do, q, k, v, o, lse, *between)

    (o1, lse1, more), (o2, lse2, _) = (run(q.requires_grad_(), *half) for half in halves)
    q = q.detach()
    lse = torch.logaddexp(lse1, lse2).detach()
    o = sum(x.detach().double() * (y.detach() - lse).exp().unsqueeze(-1) for x, y in ((o1, lse1), (o2, lse2)))
    o = o.to(q.dtype)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    with attention.sdpa_kernel(attention.SDPBackend.MATH):
        want = torch.autograd.grad(sdpa(*exact), exact, do.double())
    for merge_in_place in (False, True):
        parts = []
        for half, first, first_lse in ((halves[0], o1, lse1), (halves[1], o2, lse2)):
            if merge_in_place:
                with torch.no_grad():
                    given = first.copy_(o), first_lse.copy_(lse)
            else:
                given = o, lse
            parts.append(gradients(q, *half, *(x.detach() for x in given), more))
        got = parts[0][0].double() + parts[1][0], *(torch.cat(x, 2) for x in zip(*(p[1:] for p in parts), strict=True))
        for a, b in zip(got, want, strict=True):
            assert (a.double() - b).norm() < 0.01 * b.norm()
    assert flash.recomputed == 4


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_precisions_that_take_gradients_from_their_own_softmax_reject_others(device, precision):
    attention.activate_flash_attention_impl(f"octet_{precision}")
    q, k, v = draw(device, *[SHAPE] * 3)
    if not (found := octet.supports(q, k, v, precision=precision, kind="backward")):
        pytest.skip(found.reason)
    with torch.autograd.graph.saved_tensors_hooks(lambda y: y.clone(), lambda y: y):
        o = sdpa(q, k, v)
    with pytest.raises(octet.Unsupported, match=f"logsumexp: not of this forward pass, .* {precision!r}"):
        o.sum().backward()
    want = with_gradients(lambda *x: octet.attention(*x, precision=precision, deterministic=True), q, k, v)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        got = with_gradients(sdpa, q, k, v)
    finally:
        torch.use_deterministic_algorithms(False)
    expect_same(got, want)


def test_the_residual_dies_with_the_graph(flash, monkeypatch):
    kept = []
    real = in_torch._Kept
    monkeypatch.setattr(in_torch, "_Kept", lambda *x: kept.append(weakref.ref(made := real(*x))) or made)
    x = draw(flash.device, *[SHAPE] * 3)
    o = flash.run(*x)
    assert kept[0]() is not None and kept[0]().r.shape == o.shape and kept[0]().r.dtype is torch.int8
    del o
    o = flash.run(*x)
    torch.autograd.grad(o.float().sum(), x)
    assert [x() for x in kept] == [None, None]  # o is still there
    with torch.no_grad():
        flash.run(*x)
    assert [x() for x in kept] == [None] * 3
    with torch.inference_mode():
        flash.run(*x)
    assert len(kept) == 3


@pytest.mark.parametrize("shape", [SHAPE, (1, 1, 40, 64)], ids=str)
def test_gradients_lie_in_memory_as_torch_promises(device, shape):
    q, k, v = (
        x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in draw(device, *[shape] * 3)
    )
    attention.activate_flash_attention_impl("octet")
    for x in ((q, k, v), [y.detach().contiguous().requires_grad_() for y in (q, k, v)]):
        got = with_gradients(sdpa, *x)
        assert got[0].stride() == torch.empty_like(x[0]).stride()
        for dx, y in zip(got[1:], x, strict=True):
            swapped = device == "cpu" or y is k
            assert dx.stride() == (torch.empty_like(k) if swapped else y).stride() or min(shape[:2]) == 1


@pytest.mark.parametrize("queries, keys", [(5, 9), (9, 5), (7, 7)])
def test_causal_biases(device, queries, keys):
    """torch gives lower-right ones of any lengths to flash attention on a GPU, as causal masks."""
    attention.activate_flash_attention_impl("octet")
    q, k, v = draw(device, (1, 2, queries, 64), (1, 2, keys, 64), (1, 2, keys, 64))
    for make, causal in ((bias.causal_upper_left, "top_left"), (bias.causal_lower_right, "bottom_right")):
        if device == "cuda" and causal == "top_left" and queries != keys:
            continue  # torch has no flash attention for these on a GPU, whoever implements it
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own gives NaN to queries that see nothing
            mask = make(queries, keys)
        want = with_gradients(lambda *x: octet.attention(*x, causal=causal), q, k, v)  # noqa: B023
        for a, b in zip(with_gradients(lambda *x: sdpa(*x, mask), q, k, v), want, strict=True):  # noqa: B023
            torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-6)


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
    how = {"causal": "bottom_right", "window": (8, -1)}
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


def test_rejections(device):
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
        with pytest.raises(octet.InvalidArgument, match="head dim 520, allowed: 1 to 512"):
            sdpa(*draw(device, *[(2, 4, 40, 520)] * 3))
