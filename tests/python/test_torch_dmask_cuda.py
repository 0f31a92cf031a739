"""The gradient of a mask on CUDA tensors: against scaled_dot_product_attention in float64, compiled, in CUDA graphs,
and the same bits each time. Skipped without a GPU that octet has kernels for."""

import octet
import octet.torch  # registers the operators
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)
from octet._options import Options  # noqa: E402
from octet.torch._text import text_of  # noqa: E402

_X = torch.zeros(1, 1, 8, 64, device="cuda")
if not (_found := octet.supports(_X, _X, _X, mask=_X[..., :8])):
    pytest.skip(_found.reason, allow_module_level=True)

sdpa = torch.nn.functional.scaled_dot_product_attention
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FULL = 3, 4, 150, 264  # rows of a mask of every type start at multiples of 16 bytes


def draw(*shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes]


def problem(dtype, dim=64, full=FULL):
    b, h, n, m = full
    return draw((b, h, n, dim), (b, h, m, dim), (b, h, m, dim), (b, h, n, dim), dtype=dtype)


def bias(shape, dtype):
    """A mask of which a tenth hides its key."""
    x, chance = draw(shape, shape, seed=7)
    return x.masked_fill(chance > 1.28, -torch.inf).to(dtype)


def exact(x, do, mask, **how):
    """dmask in float64"""
    wide = mask.detach().double().requires_grad_()
    return torch.autograd.grad(sdpa(*(y.double() for y in x), wide, **how), wide, do.double())[0]


def gradients(x, do, mask, **how):
    leaves = [y.clone().requires_grad_() for y in (*x, mask)]
    return torch.autograd.grad(octet.attention(*leaves[:3], mask=leaves[3], **how), leaves, do)


def error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def bar(dtype):
    """Twice what rounding the result errs; in float32, of sums of some hundred numbers."""
    return 2.0**-16 if dtype == torch.float32 else torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 128, 200])
def test_every_broadcast_of_queries_heads_and_batch(dim, dtype):
    *x, do = problem(dtype, dim)
    for broadcast in range(8):
        mask = bias([1 if broadcast >> i & 1 else n for i, n in enumerate(FULL)], dtype)
        dmask = gradients(x, do, mask)[3]
        assert dmask.dtype == dtype and dmask.shape == mask.shape and (dmask[mask == -torch.inf] == 0).all()
        assert error(dmask, exact(x, do, mask)) < bar(dtype), mask.shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mask_that_is_the_same_for_all_keys_has_the_sums_of_its_rows(dtype):
    """They are 0 but for rounding, so they are held to the elements that they sum. Both calls share a forward pass, and
    have the logits of one row, below 16, to 2^-20 in float32, twice."""
    *x, do = problem(dtype)
    how = text_of(Options({torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]))
    for broadcast in range(8, 16):
        shape = [1 if broadcast >> i & 1 else n for i, n in enumerate(FULL)]
        (mask,) = draw(shape)
        expanded = mask.expand(FULL).contiguous()
        forward = torch.ops.octet.forward(*x, True, how, expanded)
        rows, whole = (torch.ops.octet.backward(do, *x, *forward, how, m, dmask=True)[4] for m in (mask, expanded))
        over = [i for i, n in enumerate(shape) if n == 1]
        apart = (rows - whole.double().sum(over, keepdim=True)).abs()
        assert (apart <= 2.0**-18 * whole.double().abs().sum(over, keepdim=True)).all(), shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_bits_each_time_and_no_others_of_q_k_and_v(dtype):
    *x, do = problem(dtype)
    for shape in ((1, 4, 150, 264), (1, 1, 150, 264), (3, 4, 150, 264), (1, 4, 1, 264)):
        mask = bias(shape, dtype)
        first = gradients(x, do, mask, deterministic=True)
        for _ in range(3):
            assert all(map(torch.equal, first, gradients(x, do, mask, deterministic=True)))
        assert torch.equal(first[3], gradients(x, do, mask)[3])
        leaves = [y.clone().requires_grad_() for y in x]
        without = torch.autograd.grad(octet.attention(*leaves, mask=mask, deterministic=True), leaves, do)
        assert all(map(torch.equal, first, without))


def test_back_to_back_on_a_stream():
    """Calls that follow each other without waiting, as those of layers do, whose workspaces are one memory."""
    *x, do = problem(torch.bfloat16, full=(16, 12, 512, 512))
    mask = bias((1, 12, 512, 512), torch.bfloat16)
    want = gradients(x, do, mask, deterministic=True)
    made = [gradients(x, do, mask, deterministic=True) for _ in range(20)]
    torch.cuda.synchronize()
    assert all(torch.equal(*pair) for each in made for pair in zip(each, want, strict=True))
    assert error(want[3], exact(x, do, mask)) < bar(torch.bfloat16)


def test_sdpa_and_patched_sdpa():
    *x, do = problem(torch.bfloat16)
    mask = bias((1, 4, 150, 264), torch.bfloat16)
    want = exact(x, do, mask)
    leaf = mask.clone().requires_grad_()
    assert error(torch.autograd.grad(octet.sdpa(*x, attn_mask=leaf), leaf, do)[0], want) < bar(torch.bfloat16)
    with octet.patch_sdpa():
        o = torch.nn.functional.scaled_dot_product_attention(*x, attn_mask=leaf)
    assert error(torch.autograd.grad(o, leaf, do)[0], want) < bar(torch.bfloat16)


def test_terms_together():
    """Causal, a softcap, sinks and the gradient of lse, beside the same call on the CPU."""
    *x, do = problem(torch.float32, full=(2, 4, 90, 120))
    mask, sinks, dlse = bias((1, 4, 90, 120), torch.float32), *draw((4,), (2, 4, 90))
    how = {"causal": "bottom_right", "softcap": 2.0, "return_dmask": True}
    found = octet.attention_vjp(*x, do, mask=mask, sinks=sinks, dlse=dlse, **how)
    on_cpu = octet.attention_vjp(
        *(y.cpu() for y in x), do.cpu(), mask=mask.cpu(), sinks=sinks.cpu(), dlse=dlse.cpu(), **how
    )
    for got, want in zip(found, on_cpu, strict=True):
        assert error(got.cpu(), want.double()) < 1e-5


def test_compiled_is_eager_bit_for_bit():
    *x, do = problem(torch.bfloat16)
    mask = bias((1, 4, 150, 264), torch.bfloat16)

    def step(m, q):
        return (octet.attention(q, *x[1:], mask=m, deterministic=True) * do).sum()

    results = []
    for call in (step, torch.compile(step, fullgraph=True)):
        leaves = [mask.clone().requires_grad_(), x[0].clone().requires_grad_()]
        call(*leaves).backward()
        results.append([y.grad for y in leaves])
    assert all(map(torch.equal, *results))


def test_opcheck():
    *x, do = problem(torch.bfloat16, full=(2, 4, 40, 48))
    mask, how = bias((4, 1, 48), torch.bfloat16), text_of(Options("bf16"))
    o, lse, r = torch.ops.octet.forward(*x, True, how, mask)
    torch.library.opcheck(torch.ops.octet.backward.default, (do, *x, o, lse, r, how, mask), {"dmask": True})


def test_in_a_cuda_graph():
    *x, do = problem(torch.bfloat16)
    mask = bias((1, 4, 150, 264), torch.bfloat16)
    want = gradients(x, do, mask, deterministic=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gradients(x, do, mask, deterministic=True)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = gradients(x, do, mask, deterministic=True)
    for _ in range(2):
        graph.replay()
        assert all(map(torch.equal, made, want))


def test_8_bits_have_none():
    *x, _ = problem(torch.bfloat16)
    mask = bias((1, 4, 150, 264), torch.bfloat16).requires_grad_()
    with pytest.raises(octet.Unsupported, match=r"(?s)no gradient of masks in int8; it has: f32, f16, bf16"):
        octet.attention(*x, mask=mask, precision="int8")
