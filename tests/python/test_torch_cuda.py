"""octet on CUDA tensors: against the definition and torch's own attention, on the caller's stream, in torch's memory,
compiled, and in CUDA graphs. Skipped without a GPU that octet has kernels for."""

import exact
import numpy as np
import octet
import pytest
from cases import cases
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)
from octet._options import Options  # noqa: E402
from octet._views import dense_strides, memory_order  # noqa: E402
from octet.torch._text import text_of  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as own  # noqa: E402

_X = torch.zeros(1, 1, 8, 64, device="cuda", dtype=torch.bfloat16)
if not (_found := octet.supports(_X, _X, _X)):
    pytest.skip(_found.reason, allow_module_level=True)

DTYPES = [torch.float16, torch.bfloat16]
WITH_F32 = [*DTYPES, torch.float32]
LAID_OUT = ("contiguous", "transposed", "every second", "broadcast heads")


def draw(*shapes, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes]


def lay_out(x, how):
    """x with other strides."""
    if how == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "every second":
        wide = torch.full((*x.shape[:2], 2 * x.shape[2], x.shape[3]), torch.nan, dtype=x.dtype, device=x.device)
        wide[:, :, ::2] = x
        return wide[:, :, ::2]
    return x[:, :1].expand_as(x) if how == "broadcast heads" else x


def wide(x):
    return x.detach().double().cpu().numpy()


@pytest.mark.parametrize("dtype", WITH_F32, ids=str)
def test_every_derivative_agrees_with_the_definition(dtype):
    """o, lse, gradients and tangents, of every mask."""

    @settings(max_examples=60, deadline=None)
    @given(cases(np.float32), st.data())
    def holds(case, data):
        x = {
            name: lay_out(torch.from_numpy(a.copy()).cuda().to(dtype), data.draw(st.sampled_from(LAID_OUT)))
            for name, a in case.arrays.items()
        }
        keywords = case.keywords
        if case.mask is not None:
            keywords = keywords | {"mask": torch.from_numpy(case.mask).cuda()}
        a = {name: wide(y) for name, y in x.items()}
        if case.layout == "bshd":
            x = {name: y.transpose(1, 2) for name, y in x.items()}
        leaves = [x[name].detach().requires_grad_() for name in "qkv"]
        o, lse = octet.attention(*leaves, layout=case.layout, return_lse=True, **keywords)
        assert o.dtype == dtype and o.device == x["q"].device and lse.requires_grad
        got = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, leaves, x["do"]), strict=True)) | {"o": o}
        along = [x[name] for name in ("q", "k", "v", "tq", "tk", "tv")]
        _, got["to"] = octet.attention_jvp(*along, layout=case.layout, **keywords)
        about = {"do": a["do"], "tangents": tuple(a[name] for name in ("tq", "tk", "tv"))} | case.exact()
        want = exact.attention(a["q"], a["k"], a["v"], seen=case.seen, **about)
        bound = exact.bounds(a["q"], a["k"], a["v"], **about, **exact.rounding(dtype))
        for name, found in got.items():
            of = x["q" if name in ("o", "to") else name[1]]
            if name != "to":
                assert found.stride() == dense_strides(found.shape, memory_order(of.shape, of.stride()))
            found = found if case.layout == "bhsd" else found.transpose(1, 2)
            exact.expect_close(wide(found), want[name], bound[name], name)
        exact.expect_close(wide(lse), want["lse"], bound["lse"], "lse")

    holds()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_sdpa_is_torchs_own(data):
    """Against torch's unfused attention in float64 on the same numbers, with masks of every kind."""
    pick = data.draw
    lead = pick(st.sampled_from([(2,), (2, 3), (1, 2)]))
    kv_heads, group = pick(st.integers(1, 3)), pick(st.integers(1, 3))
    queries, keys = pick(st.integers(1, 300)), pick(st.integers(1, 300))
    dim, dim_v = (8 * pick(st.integers(1, 16)) for _ in range(2))
    dtype, kind = pick(st.sampled_from(WITH_F32)), pick(st.sampled_from(["none", "causal", "bool", "float"]))
    shapes = (kv_heads * group, queries, dim), (kv_heads, keys, dim), (kv_heads, keys, dim_v)
    x = [y.requires_grad_() for y in draw(*((*lead, *shape) for shape in shapes), dtype=dtype)]
    how = {"is_causal": kind == "causal", "scale": 0.25, "enable_gqa": group > 1}
    mask = None
    if kind in ("bool", "float"):
        shape = [n if pick(st.booleans()) else 1 for n in (*lead, kv_heads * group, queries, keys)]
        mask = torch.rand(shape, device="cuda") < 0.7
        mask = torch.randn(shape, device="cuda").to(dtype).masked_fill(~mask, -torch.inf) if kind == "float" else mask
    o = octet.sdpa(*x, mask, **how)
    twin = [y.detach().double().requires_grad_() for y in x]
    bias = mask.double() if kind == "float" else mask
    want = own(*twin, bias, **how)
    do = torch.randn_like(o)
    got = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, x, do), strict=True)) | {"o": o}
    expected = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(want, twin, do.double()), strict=True)) | {"o": want}
    numbers = [wide(y).reshape(-1, *y.shape[-3:]) for y in x]
    about = {"do": wide(do).reshape(-1, *do.shape[-3:]), "bias": wide(bias) if kind == "float" else None}
    bound = exact.bounds(*numbers, **about, scale=0.25, **exact.rounding(dtype))
    for name in got:
        exact.expect_close(wide(got[name]), wide(expected[name]), bound[name], name)


def test_packed_sequences_are_separate():
    cu = torch.tensor([0, 5, 5, 170, 400], dtype=torch.int32, device="cuda")
    q, k, v, do = draw((400, 4, 64), (400, 2, 64), (400, 2, 64), (400, 4, 64))
    x = [y.requires_grad_() for y in (q, k, v)]
    o, lse = octet.attention_varlen(*x, cu, cu, causal="bottom_right", return_lse=True)
    assert lse.shape == (4, 400)
    got = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, x, do), strict=True)) | {"o": o}
    for first, last in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        one = [wide(y[first:last])[None].transpose(0, 2, 1, 3) for y in (q, k, v, do)]
        want = exact.attention(*one[:3], seen=exact.visible(last - first, last - first, "bottom_right"), do=one[3])
        bound = exact.bounds(*one[:3], do=one[3], **exact.rounding("bfloat16"))
        for name, found in got.items():
            exact.expect_close(wide(found[first:last])[None].transpose(0, 2, 1, 3), want[name], bound[name], name)


def step(q, k, v, do):
    """o, dq, dk, dv, all repeatable."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = octet.attention(*leaves, causal=True, deterministic=True)
    return o.detach(), *torch.autograd.grad(o, leaves, do)


def expect_same(got, want):
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y) and x.stride() == y.stride() and x.isfinite().all()


SHAPE = (2, 4, 300, 64)


def test_work_goes_to_the_callers_stream_and_nothing_waits():
    inputs = draw(*[SHAPE] * 4)
    want = step(*inputs)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        static = [torch.zeros_like(x) for x in inputs]
        torch.cuda._sleep(200_000_000)  # a tenth of a second: what does not wait for it sees zeros
        for x, y in zip(static, inputs, strict=True):
            x.copy_(y)
        got = step(*static)
        assert not side.query()
    assert torch.cuda.current_stream().query()
    side.synchronize()
    expect_same(got, want)


def test_calls_from_c_are_on_the_callers_stream_and_record():
    """Those of _fast_path.py, which pass torch's dispatcher by."""
    inputs = draw(*[SHAPE] * 3)
    want = octet.attention(*inputs)
    static = [torch.zeros_like(x) for x in inputs]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        for x, y in zip(static, inputs, strict=True):
            x.copy_(y)
        got = octet.attention(*static)
        assert not side.query()
    side.synchronize()
    assert torch.equal(got, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = octet.attention(*static)
    for seed in range(1, 4):
        other = draw(*[SHAPE] * 3, seed=seed)
        for x, y in zip(static, other, strict=True):
            x.copy_(y)
        found.fill_(torch.nan)
        graph.replay()
        assert torch.equal(found, octet.attention(*other))


def test_memory_is_torchs_own():
    inputs = draw(*[SHAPE] * 4)
    step(*inputs)
    torch.cuda.synchronize()

    def outside():
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()

    before, kept, allocated = outside(), [], []
    for _ in range(3):
        kept.append(step(*inputs))
        allocated.append(torch.cuda.memory_allocated())
    torch.cuda.synchronize()
    assert outside() == before
    outputs = sum(x.nbytes for x in kept[0])  # multiples of 512 bytes; no workspace is kept
    assert [y - x for x, y in zip(allocated[:-1], allocated[1:], strict=True)] == [outputs, outputs]


@pytest.mark.parametrize("sliced", [False, True], ids=["separate", "slices of one tensor"])
def test_a_training_step_copies_nothing(sliced):
    """q, k and v are [batch, token, head, dim] in memory, or slices of [batch, token, 3, head, dim]: no kernel of
    torch's or octet's copies them, o or a gradient."""
    b, s, h, d = 2, 256, 4, 64
    whole, weight = draw((b, s, 3, h, d), (b, s, h * d))
    parts = whole.unbind(2) if sliced else [x.contiguous() for x in whole.unbind(2)]
    leaves = [x.detach().requires_grad_() for x in parts]

    def step():
        o = octet.attention(*(x.transpose(1, 2) for x in leaves), causal=True)
        loss = o.transpose(1, 2).reshape(b, s, h * d).mul(weight).sum()
        return torch.autograd.grad(loss, leaves)

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        gradients = step()
        torch.cuda.synchronize()
    kernels = [event.key for event in profile.key_averages() if event.self_device_time_total > 0]
    assert any("octet" in name for name in kernels), kernels
    assert not [name for name in kernels if "copy" in name.lower() or "memcpy" in name.lower()], kernels
    assert all(x.is_contiguous() for x in gradients)  # as [batch, token, head, dim]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_graph_replays_what_eager_code_computes(dtype):
    static = draw(*[SHAPE] * 4, dtype=dtype)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(*static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(*static)
    for seed in range(1, 4):
        inputs = draw(*[SHAPE] * 4, dtype=dtype, seed=seed)
        for x, y in zip(static, inputs, strict=True):
            x.copy_(y)
        for x in found:
            x.fill_(torch.nan)
        graph.replay()
        expect_same(found, step(*inputs))


def test_a_graph_of_packed_sequences_reads_their_lengths_when_it_replays():
    packed = draw(*[(400, 2, 64)] * 3)
    cu = torch.tensor([0, 100, 400], dtype=torch.int32, device="cuda")

    def call():
        return octet.attention_varlen(*packed, cu, cu, causal="top_left")

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    cu.copy_(torch.tensor([0, 250, 400], dtype=torch.int32))
    graph.replay()
    assert torch.equal(found, call())


@pytest.mark.parametrize("dtype", WITH_F32, ids=str)
def test_dropout_drops_what_the_documents_say(dtype):
    q, k = (x.requires_grad_() for x in draw((2, 4, 100, 64), (2, 2, 64, 64), dtype=dtype))
    v = torch.eye(64, device="cuda", dtype=dtype).expand(2, 2, 64, 64).requires_grad_()
    seed, offset, p = 2**40 + 3, 2**33 + 5, 0.25
    o = octet.attention(q, k, v, dropout_p=p, dropout_seed=(seed, offset), enable_gqa=True)
    lost = np.array([[exact.dropped(p, seed, offset + b, h, 100, 64) for h in range(4)] for b in range(2)])
    np.testing.assert_array_equal(wide(o) == 0, lost)
    do = torch.randn_like(o)
    gradients = torch.autograd.grad(o, (q, k, v), do)
    z = np.where(lost, 0, 1 / (1 - p))
    want = exact.attention(*map(wide, (q, k, v)), z=z, do=wide(do))
    for name, found in zip(("dq", "dk", "dv"), gradients, strict=True):
        error = np.linalg.norm(wide(found) - want[name]) / np.linalg.norm(want[name])
        assert error < (1e-5 if dtype == torch.float32 else 0.01), name


def test_a_graph_draws_anew_what_it_drops():
    q, k, v = draw(*[SHAPE] * 3)
    octet.sdpa(q, k, v, dropout_p=0.5)
    torch.cuda.manual_seed(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = octet.sdpa(q, k, v, dropout_p=0.5)
    graph.replay()
    first = o.clone()
    graph.replay()
    assert not torch.equal(o, first)
    torch.cuda.manual_seed(0)
    graph.replay()
    assert torch.equal(o, first)


def block(q, k, v):
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    return octet.attention(q, k, v, causal=True, deterministic=True)


@pytest.mark.parametrize("how", [{"backend": "aot_eager"}, {}, {"mode": "reduce-overhead"}], ids=str)
def test_compiled_is_eager_bit_for_bit(how):
    q, k, v, do = draw(*[SHAPE] * 4)
    x = [y.requires_grad_() for y in (q, k, v)]

    def both(function):
        o = function(*x)
        return o.detach().clone(), *[y.clone() for y in torch.autograd.grad(o, x, do)]

    want = both(block)
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, **how)
    for _ in range(3):  # the third replays a recorded graph
        expect_same(both(compiled), want)


@pytest.mark.parametrize("precision, layout", [("bf16", "bhsd"), ("f16", "bshd")])
def test_opcheck(precision, layout):
    options = Options(precision, layout=layout, causal="top_left", deterministic=True)
    q, k, v = (x.requires_grad_() for x in draw(*[(2, 33, 33, 16)] * 3))
    how = text_of(options)
    o, lse, r = (x.detach() for x in torch.ops.octet.forward(q, k, v, True, how))
    torch.library.opcheck(torch.ops.octet.forward.default, (q, k, v, True, how))
    torch.library.opcheck(torch.ops.octet.backward.default, (o, q, k, v, o, lse, r, how))


def test_vmap_is_a_loop():
    x = draw((3, 2, 4, 33, 16), (2, 4, 33, 16), (2, 3, 4, 33, 16))

    def call(q, k, v):
        return octet.attention(q, k, v, causal=True, deterministic=True)

    def gradient(q, k, v):
        return torch.func.grad(lambda *y: call(*y).square().sum(), argnums=(0, 1, 2))(q, k, v)

    got, gradients = (torch.func.vmap(f, in_dims=(0, None, 1))(*x) for f in (call, gradient))
    for i in range(3):
        one = x[0][i], x[1], x[2][:, i]
        assert torch.equal(got[i], call(*one))
        for a, b in zip(gradients, gradient(*one), strict=True):
            # k without a mapped dimension is smoothed for all elements of the batch alike: equal up to rounding.
            torch.testing.assert_close(a[i], b, rtol=2**-7, atol=2**-7)


def test_autocast_and_determinism_are_those_of_torch():
    x = [y.requires_grad_() for y in draw(*[SHAPE] * 3, dtype=torch.float32)]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        o = octet.attention(*x)
    assert o.dtype is torch.bfloat16 and torch.autograd.grad(o.float().sum(), x)[0].dtype is torch.float32
    half = [y.detach().bfloat16() for y in x]
    torch.use_deterministic_algorithms(True)
    try:
        first = octet.attention_vjp(*half, half[0])
        for _ in range(3):
            expect_same(octet.attention_vjp(*half, half[0]), first)
    finally:
        torch.use_deterministic_algorithms(False)


def test_tensors_on_several_devices_are_named():
    q = _X
    cu = torch.tensor([0, 8], dtype=torch.int32)
    packed = [q[0].transpose(0, 1)] * 3
    with pytest.raises(octet.InvalidArgument, match="k: on cpu, but q is on cuda:0; all tensors of a call live on one"):
        octet.attention(q, q.cpu(), q)
    with pytest.raises(octet.InvalidArgument, match="do: on cpu, but q is on cuda:0"):
        octet.attention_vjp(q, q, q, q.cpu())
    with pytest.raises(octet.InvalidArgument, match="mask: on cpu, but q is on cuda:0"):
        octet.attention(q, q, q, mask=torch.ones(8, 8, dtype=torch.bool))
    with pytest.raises(octet.InvalidArgument, match="cu_seqlens_q: on cpu, but q is on cuda:0"):
        octet.attention_varlen(*packed, cu, cu)


@pytest.mark.parametrize("kind", ["forward", "backward", "jvp"])
@pytest.mark.parametrize("precision", ["f64", "f32", "f16", "bf16", "int8", "fp8", "sagebwd"])
def test_what_no_kernel_computes_is_rejected_with_the_reason(kind, precision):
    """A call does what `supports` says. On a GPU nothing falls back to the CPU."""
    q = draw((1, 2, 64, 64))[0].double() if precision == "f64" else draw((1, 2, 64, 64))[0]
    calls = {
        "forward": lambda: octet.attention(q, q, q, precision=precision),
        "backward": lambda: octet.attention_vjp(q, q, q, q, precision=precision),
        "jvp": lambda: octet.attention_jvp(q, q, q, q, q, q, precision=precision),
    }
    found = octet.supports(q, q, q, kind=kind, precision=precision)
    if found:
        calls[kind]()
        return
    assert "the tensors are on" in found.reason or "has no" in found.reason
    with pytest.raises(octet.Unsupported):
        calls[kind]()
    if kind == "backward" and octet.supports(q, q, q, precision=precision):
        with pytest.raises(octet.Unsupported, match="requires_grad: found True without torch.no_grad"):
            octet.attention(q.requires_grad_(), q, q, precision=precision)


@pytest.mark.parametrize("dtype", WITH_F32, ids=str)
def test_every_way_to_a_tangent_is_the_same(dtype):
    x, t = (draw(*[(2, 2, 100, 64)] * 3, dtype=dtype, seed=seed) for seed in (0, 1))

    def call(*y):
        return octet.attention(*y, causal=True)

    o, to = octet.attention_jvp(*x, *t, causal=True)
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(call(*(forward_ad.make_dual(a, b) for a, b in zip(x, t, strict=True))))
    for primal, tangent in (torch.func.jvp(call, tuple(x), tuple(t)), (dual.primal, dual.tangent)):
        assert torch.equal(tangent, to)
        torch.testing.assert_close(primal, o, rtol=2**-7, atol=2**-7)  # of another kernel


def test_codes_are_served_or_rejected():
    q = _X
    try:
        codes = octet.quantize(q, "k")
    except octet.Unsupported as rejection:
        assert "cuda" in str(rejection)
    else:
        assert octet.dequantize(codes).shape == q.shape


def test_reports():
    x = draw(*[(1, 2, 64, 64)] * 4)
    errors = octet.check(*x[:3], do=x[3], causal=True)
    assert set(errors) == {"o", "lse", "dq", "dk", "dv"} and 0 < errors["dq"].rel_l2 < 0.01
    found = {backend["name"]: backend["available"] for backend in octet.info()["backends"]}
    assert found["sm80"] and found["sm90"] == (torch.cuda.get_device_capability() == (9, 0))
    assert chosen(*x[:3])[0] == ("sm90" if found["sm90"] else "sm80")


ON_HOPPER = pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="no GPU of compute capability 9.0")


def chosen(*arrays, **how):
    """The backend that runs, and why a better one does not."""
    lines = [line.split(": ", 1) for line in octet.explain(*arrays, **how).splitlines()]
    at = next(i for i, (_, what) in enumerate(lines) if what.startswith("chosen"))
    return lines[at][0], [what for _, what in lines[:at]]


@ON_HOPPER
@pytest.mark.parametrize(
    "how, dtype, reason",
    [
        ({"softcap": 2.0}, torch.bfloat16, "no, it has no softcap"),
        (
            {"alibi_slopes": torch.ones(4), "bias_correction": "beta"},
            torch.bfloat16,
            "no, it has no alibi_slopes with bias_correction beta",
        ),
        ({"mask": torch.ones(64, 64)}, torch.float16, "no, its mask tensor is f32; it takes bool and f16 ones"),
        ({}, torch.float32, "no, it has no f32; "),
    ],
    ids=["softcap", "alibi_slopes", "mask", "f32"],
)
def test_what_sm90_lacks_is_computed_by_sm80(how, dtype, reason):
    x = draw(*[(1, 4, 64, 64)] * 3, dtype=dtype)
    how = {name: y.cuda() if isinstance(y, torch.Tensor) else y for name, y in how.items()}
    name, reasons = chosen(*x, **how)
    assert name == "sm80" and len(reasons) == 1 and reasons[0].startswith(reason), reasons


@ON_HOPPER
@pytest.mark.parametrize("precision", ["bf16", "f16", "int8", "int8_f16", "int8_fp8", "fp8", "fp8_raw"])
def test_a_key_mask_leaves_what_its_keys_alone_give(precision):
    """A batch with a bool mask errs no more than its elements with the keys that they see; hidden keys hold NaN."""
    q, k, v = draw((3, 4, 300, 64), (3, 2, 200, 64), (3, 2, 200, 64))
    mask = torch.rand(3, 1, 1, 200, generator=torch.Generator("cuda").manual_seed(1), device="cuda") < 0.7
    mask[1] = torch.arange(200, device="cuda") < 120
    mask[2] = False
    for x in (k, v):
        x.masked_fill_(~mask.mT, torch.nan)
    assert chosen(q, k, v, mask=mask, precision=precision)[0] == "sm90"
    o = octet.attention(q, k, v, mask=mask, precision=precision)
    assert not o[2].any()
    for i in (0, 1):
        seen = [q[i : i + 1], *(x[i : i + 1, :, mask[i].flatten()] for x in (k, v))]
        want = own(*(x.double() for x in seen), enable_gqa=True)
        error = lambda found, want=want: ((found - want).norm() / want.norm()).item()
        assert error(o[i : i + 1]) <= 1.1 * error(octet.attention(*seen, precision=precision))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gproj_is_left_to_the_cpu(dtype):
    x = draw(*[(1, 2, 64, 64)] * 4, dtype=dtype)
    with pytest.raises(octet.Unsupported, match="no bias_correction gproj, which the cpu computes; it has: f16, none"):
        octet.attention_vjp(*x, bias_correction="gproj")


@ON_HOPPER
def test_a_few_queries_over_many_keys_are_left_to_sm80():
    """But for gradients, whose forward pass keeps the un-rounded o, and where sm90 is asked for by name."""
    q, k = draw((1, 32, 4, 64), (1, 8, 4096, 64))
    few = "no, it could, but sm80 is faster for 4 queries over 4096 keys, which it splits"
    name, reasons = chosen(q, k, k)
    assert name == "sm80" and reasons == [few]
    assert chosen(q, k, k, backend="sm90") == ("sm90", [])
    assert chosen(q, k[:, :, :256], k[:, :, :256])[0] == "sm90"
    assert chosen(q.repeat(4, 1, 1, 1), *[k.repeat(4, 1, 1, 1)] * 2)[0] == "sm80"
    assert chosen(q.repeat(4, 1, 1, 1), *[k[:, :, :512].repeat(4, 4, 1, 1)] * 2)[0] == "sm90"
    o, lse = octet.attention(q, k, k, return_lse=True)
    numbers = [wide(x) for x in (q, k, k)]
    want, bound = exact.attention(*numbers), exact.bounds(*numbers, **exact.rounding("bfloat16"))
    exact.expect_close(wide(o), want["o"], bound["o"], "o")
    exact.expect_close(wide(lse), want["lse"], bound["lse"], "lse")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["forward", "backward", "jvp"])
def test_sm80_is_chosen_by_name(kind, dtype):
    q = _X.to(dtype)
    assert octet.supports(q, q, q, kind=kind, softcap=2.0, backend="sm80")
    assert octet.explain(q, q, q, kind=kind, backend="sm80").startswith(f"sm80: chosen, {kind} ")
    found = octet.supports(q, q, q, kind=kind, precision="f64", backend="sm80")
    have = "f32, f16, bf16, int8, int8_f16, int8_fp8, fp8, fp8_raw, sagebwd"
    assert not found and f"sm80: it has no f64; it has: {have}" in found.reason


def test_other_packages_functions():
    from octet.compat import flash_attn

    q, k, v = draw((2, 100, 4, 64), (2, 140, 2, 64), (2, 140, 2, 64))
    o, lse, _ = flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(50, 0), return_attn_probs=True)
    numbers = [wide(x.transpose(1, 2)) for x in (q, k, v)]
    want = exact.attention(*numbers, seen=exact.visible(100, 140, "bottom_right", (50, None), "bottom_right"))
    bound = exact.bounds(*numbers, **exact.rounding("bfloat16"))
    exact.expect_close(wide(o.transpose(1, 2)), want["o"], bound["o"], "o")
    exact.expect_close(wide(lse), want["lse"], bound["lse"], "lse")


@pytest.mark.parametrize("backend", ["", "sm80"], ids=["best", "sm80"])
@pytest.mark.parametrize("dim", [64, 72, 128])
def test_functions_of_sageattention(dim, backend, monkeypatch):
    """Each runs on every GPU, with all arguments that it has: sm80 is there wherever there is one."""
    from octet.compat import sageattention as sage

    monkeypatch.setenv("OCTET_BACKEND", backend)
    q, k, v = draw((2, 4, 130, dim), (2, 2, 150, dim), (2, 2, 150, dim))
    how = {"is_causal": True, "sm_scale": 0.1, "smooth_k": True, "return_lse": True}
    mask = torch.rand((2, 4, 130, 150), device="cuda") < 0.5
    of_threads = how | {"qk_quant_gran": "per_thread", "smooth_v": False}
    calls = [
        ("int8", sage.sageattn, {name: how[name] for name in how if name != "smooth_k"}, {}),
        ("int8_f16", sage.sageattn_qk_int8_pv_fp16_triton, how | {"quantization_backend": "cuda"}, {}),
        ("int8_f16", sage.sageattn_qk_int8_pv_fp16_triton, how | {"attn_mask": mask}, {"mask": mask}),
        ("int8_f16", sage.sageattn_qk_int8_pv_fp16_cuda, of_threads | {"pv_accum_dtype": "fp16+fp32"}, {}),
        ("int8_fp8", sage.sageattn_qk_int8_pv_fp8_cuda, of_threads | {"pv_accum_dtype": "fp32+fp16"}, {}),
        ("int8_fp8", sage.sageattn_qk_int8_pv_fp8_cuda_sm90, how | {"qk_quant_gran": "per_warp"}, {}),
    ]
    for precision, function, arguments, more in calls:
        o, lse = function(q, k, v, **arguments)
        same = dict(precision=precision, causal="top_left", scale=0.1, enable_gqa=True, **more)
        want = octet.attention(q, k, v, return_lse=True, **same)
        assert torch.equal(o, want[0]) and torch.equal(lse, want[1]), function.__name__
        errors = []
        for place in ("cpu", "cuda"):
            there = {name: x.to(place) if name == "mask" else x for name, x in same.items()}
            monkeypatch.setenv("OCTET_BACKEND", backend if place == "cuda" else "")
            errors.append(octet.check(*[x.to(place) for x in (q, k, v)], **there)["o"].rel_l2)
        assert errors[1] <= 2 * errors[0], function.__name__
    cu = torch.tensor([0, 50, 130], dtype=torch.int32, device="cuda")
    packed = [x[0].transpose(0, 1)[:130] for x in (q, k, v)]
    o = sage.sageattn_varlen(*packed, cu, cu, 80, 80, is_causal=True, sm_scale=0.1, smooth_k=True)
    same = dict(precision="int8", causal="top_left", scale=0.1, max_seqlen_q=80, max_seqlen_k=80)
    assert torch.equal(o, octet.attention_varlen(*packed, cu, cu, **same))


def test_a_transformers_model():
    transformers = pytest.importorskip("transformers")
    from octet.integrations.transformers import register

    register()

    def logits(implementation, dtype):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=128, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, attn_implementation=implementation,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).eval().cuda().to(dtype)
        with torch.no_grad():
            return model(torch.arange(120, device="cuda").reshape(2, 60)).logits.double()

    want = logits("sdpa", torch.float64)
    distance = {name: (logits(name, torch.bfloat16) - want).norm() for name in ("sdpa", "octet")}
    assert 0 < distance["octet"] < 2 * distance["sdpa"]


def test_a_transformers_model_of_wide_heads_trains():
    """Head dim 512 is that of Gemma 4's global layers."""
    transformers = pytest.importorskip("transformers")
    from octet.integrations.transformers import register

    register()

    def gradients(implementation, dtype):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=128, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=512, attn_implementation=implementation,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).cuda().to(dtype)
        tokens = torch.arange(120, device="cuda").reshape(2, 60)
        model(tokens, labels=tokens).loss.backward()
        return torch.cat([x.grad.double().flatten() for x in model.parameters()])

    want = gradients("sdpa", torch.float64)
    distance = {name: (gradients(name, torch.bfloat16) - want).norm() for name in ("sdpa", "octet")}
    assert 0 < distance["octet"] < 2 * distance["sdpa"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (59, 111), (320, 24), (512, 512)], ids=str)
def test_gradients_of_lse_and_sinks_of_a_projection(dtype, has_sinks, dims):
    """q, k, v, do and the results are [batch, head, token, dim] views of [batch, token, head, dim] memory."""
    dim, dim_v = dims
    shapes = (2, 200, 4, dim), (2, 200, 2, dim), (2, 200, 2, dim_v), (2, 200, 4, dim_v)
    q, k, v, do = (x.transpose(1, 2) for x in draw(*shapes, dtype=dtype))
    sinks, dlse = draw((4,), (2, 4, 200), dtype=torch.float32, seed=1)
    leaves = [x.detach().requires_grad_() for x in ((q, k, v, sinks) if has_sinks else (q, k, v))]
    if not (found := octet.supports(*leaves[:3], sinks=leaves[3] if has_sinks else None, kind="backward", causal=True)):
        pytest.skip(found.reason)
    o, lse = octet.attention(*leaves[:3], sinks=leaves[3] if has_sinks else None, causal=True, return_lse=True)
    got = {"o": o, "lse": lse}
    got |= dict(zip(("dq", "dk", "dv", "dsinks"), torch.autograd.grad((o, lse), leaves, (do, dlse)), strict=False))
    numbers = [wide(x) for x in (q, k, v)]
    about = {"do": wide(do), "dlse": wide(dlse), "sinks": wide(sinks) if has_sinks else None}
    want = exact.attention(*numbers, seen=exact.visible(200, 200, True), **about)
    bound = exact.bounds(*numbers, **about, **exact.rounding(dtype))
    for name, x in got.items():
        exact.expect_close(wide(x), want[name], bound[name], name)
        assert x.ndim < 4 or x.transpose(1, 2).is_contiguous()


def test_nothing_falls_back_to_the_cpu():
    q = torch.zeros(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16)
    found = octet.supports(q, q, q, precision="f64")
    assert not found and "cpu, reference: the tensors are on cuda; it works on cpu tensors" in found.reason
    with pytest.raises(octet.Unsupported):
        octet.attention(q, q, q, precision="f64")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_softcap_and_slopes_agree_with_the_definition(data):
    pick = data.draw
    dtype, causal = pick(st.sampled_from(WITH_F32)), pick(st.sampled_from([False, "top_left", "bottom_right"]))
    heads, kv_heads = pick(st.sampled_from([(1, 1), (4, 2), (6, 1)]))
    queries, keys, dim = pick(st.integers(1, 200)), pick(st.integers(1, 200)), 8 * pick(st.integers(1, 16))
    softcap = pick(st.sampled_from([0.0, 1.0, 4.0]))
    of_q, of_k = (2, heads, queries, dim), (2, kv_heads, keys, dim)
    q, k, v, do, tq, tk, tv = draw(of_q, of_k, of_k, of_q, of_q, of_k, of_k, dtype=dtype)
    slopes = pick(st.sampled_from([None, (heads,), (2, heads)]))
    away = np.abs(np.arange(queries)[:, None] + keys - queries - np.arange(keys))
    bias = None
    if slopes is not None:
        slopes = 0.1 * torch.rand(slopes, device="cuda")
        bias = -wide(slopes).reshape(-1, heads, 1, 1) * away
    how = {"causal": causal, "softcap": softcap, "alibi_slopes": slopes}
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o, lse = octet.attention(*leaves, return_lse=True, **how)
    got = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, leaves, do), strict=True)) | {"o": o, "lse": lse}
    _, got["to"] = torch.func.jvp(lambda *x: octet.attention(*x, **how), (q, k, v), (tq, tk, tv))
    about = {"do": wide(do), "bias": bias, "tangents": tuple(wide(x) for x in (tq, tk, tv))}
    numbers = [wide(x) for x in (q, k, v)]
    seen = exact.visible(queries, keys, causal)
    want = exact.attention(*numbers, seen=seen, softcap=softcap, **about)
    bound = exact.bounds(*numbers, **about, **exact.rounding(dtype))
    for name, x in got.items():
        exact.expect_close(wide(x), want[name], bound[name], name)
