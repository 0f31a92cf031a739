"""Calls that run from C, without torch's dispatcher: the same numbers, and only where nobody listens to operators."""

import concurrent.futures
import contextlib
import functools
import sys
import unittest.mock
import weakref

import octet
import pytest

torch = pytest.importorskip("torch")
import octet.torch  # noqa: E402
import torch.utils.checkpoint  # noqa: E402, F811
from octet import _plan  # noqa: E402
from octet.torch import _passes  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

if _passes.loaded is None:
    pytest.skip("torch has no DLPack exchange API, or liboctet_dlpack.so is missing", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HIT, MISS, ORDINARY = "it ran from C", "it may be kept", "the ordinary way"
TRAINED = "it ran from C, and a gradient may follow"


@pytest.fixture
def looks(monkeypatch):
    """A list that receives what each look for a kept call finds. Calls of other tests are forgotten."""
    real, found = _passes.fast_forward, []

    def counting(token, *x):
        o = real(token, *x)
        found.append(ORDINARY if o is None else MISS if o is False else TRAINED if o is True else HIT)
        return o

    monkeypatch.setattr(_passes, "fast_forward", counting)
    monkeypatch.setattr(_passes, "tokens", {})
    return found


class Listening(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.heard = [*getattr(self, "heard", []), str(function)]
        return function(*args, **(kwargs or {}))


def without_c():
    """Operators do not run from C."""
    never = _passes._FROM_C["jvp"]
    return unittest.mock.patch.dict(_passes._FROM_C, forward=never, backward=never)


def ordinary(*x, call=octet.attention, **keywords):
    """The same by the operator."""
    with Listening() as mode, without_c():
        o = call(*x, **keywords)
    assert "octet.forward.default" in mode.heard
    return o


def inputs(queries=20, keys=30, dim=16, dtype=torch.bfloat16, device=DEVICE):
    torch.manual_seed(0)
    return [torch.randn(2, h, n, dim).to(device, dtype) for h, n in ((4, queries), (2, keys), (2, keys))]


KEYWORDS = [{}, {"causal": "top_left", "scale": 0.5}, {"layout": "bshd"}, {"precision": "int8", "window": (3, 2),
            "alignment": "bottom_right"}]  # fmt: skip


@pytest.mark.parametrize("keywords", KEYWORDS, ids=str)
def test_it_gives_the_same_bits(looks, keywords):
    """Other numbers, other addresses, the same call; then other strides, types and shapes, which are other calls."""
    for dtype in (torch.float16, torch.bfloat16):
        for shape in ((20, 30, 16), (7, 9, 24)):
            for seed in range(3):
                x = [y + seed for y in inputs(*shape, dtype)]
                if keywords.get("layout") == "bshd":
                    x = [y.transpose(1, 2) for y in x]
                got, want = (f(*x, **keywords) for f in (octet.attention, ordinary))
                assert torch.equal(got, want) and got.stride() == want.stride() == x[0].stride()
    # `ordinary` finds that somebody listens.
    assert looks == [MISS, ORDINARY, HIT, ORDINARY, HIT, ORDINARY] * 4


def test_sdpa_too(looks):
    x = inputs()
    for how in ({"enable_gqa": True}, {"enable_gqa": True, "is_causal": True, "scale": 0.5}):
        for _ in range(2):
            assert torch.equal(octet.sdpa(*x, **how), ordinary(*x, call=octet.sdpa, **how))
    assert looks == [MISS, ORDINARY, HIT, ORDINARY] * 2
    for _ in range(2):  # a rejection is not kept
        with pytest.raises(octet.InvalidArgument, match="enable_gqa: False"):
            octet.sdpa(*x)
    # Batches that broadcast are other tensors than those that were handed over.
    q, k, v = (x[0], *(y[:1] for y in x[1:]))
    wide = [y.expand(2, -1, -1, -1) for y in (k, v)]
    assert torch.equal(octet.sdpa(q, k, v, enable_gqa=True), octet.sdpa(q, *wide, enable_gqa=True))


def test_dims_and_strides_that_it_leaves_to_the_ordinary_way(looks):
    q, k, v = inputs()
    for _ in range(2):
        assert octet.attention(q, k, v[..., :8]).shape == (2, 4, 20, 8)  # o is not like q
        assert octet.attention(q, k, v, return_lse=True)[1].shape == (2, 4, 20)
    assert looks == [ORDINARY] * 2
    with pytest.raises(octet.InvalidArgument, match="expected .batch, head, token, dim"):
        octet.attention(q[0], k[0], v[0])
    wide = torch.randn(2, 20, 4, 16, device=DEVICE).bfloat16().transpose(1, 2)
    first, second = octet.attention(wide, k, v), octet.attention(wide, k, v)
    assert torch.equal(first, second) and first.stride() == second.stride() == wide.stride() and looks[-1] == HIT


def test_values_that_are_equal_but_not_alike_are_validated_each(looks):
    q, _, _ = inputs()
    for _ in range(2):
        octet.attention(q, q, q, causal=True)
    with pytest.raises(octet.InvalidArgument, match="causal: found 1, allowed"):
        octet.attention(q, q, q, causal=1)
    assert looks == [MISS, HIT, MISS]
    octet.attention(q, q, q, causal="top_left", window=[3, 0])  # a list cannot be looked up
    octet.attention(q, q, q, causal="top_left", window=[3, 0])
    assert len(looks) == 3


def test_a_rejection_is_a_rejection_each_time(looks):
    q, k, v = inputs()
    octet.attention(q, k, v)
    for _ in range(2):
        with pytest.raises(octet.InvalidArgument, match="v: shape"):
            octet.attention(q, k, v[:, :, :5])
    assert looks == [MISS] * 3


def test_whoever_listens_to_operators_hears_them(looks):
    q, k, v = inputs()
    for _ in range(2):
        octet.attention(q, k, v)
    assert looks == [MISS, HIT]
    ordinary(q, k, v)
    with torch.profiler.profile() as profile:
        octet.attention(q, k, v)
    assert "octet::forward" in {event.key for event in profile.key_averages()}
    with torch.autocast(DEVICE, dtype=torch.float16):
        assert octet.attention(q, k, v).dtype is torch.float16
    traced = torch.jit.trace(lambda x: octet.attention(x, k, v), q, check_trace=False)
    assert torch.equal(traced(q + 1), ordinary(q + 1, k, v))
    assert octet.attention(q.detach().requires_grad_(), k, v).requires_grad
    negative = torch._neg_view(k)
    assert torch.equal(octet.attention(q, negative, v), ordinary(q, -k, v))
    assert type(octet.attention(torch.nn.Parameter(k), k, v)) is torch.Tensor
    assert type(octet.attention(q, torch.nn.Parameter(k), v)) is torch.Tensor
    assert torch.equal(torch.func.vmap(octet.attention)(q[None], k[None], v[None])[0], octet.attention(q, k, v))
    assert looks[2:].count(HIT) == 1  # the last of all
    with torch.no_grad():
        assert not octet.attention(q.requires_grad_(), k, v).requires_grad
    assert looks[-1] == HIT


def test_a_tangent_is_no_ordinary_number(looks):
    q, k, v = inputs()
    octet.attention(q, k, v)
    with forward_ad.dual_level():
        o = octet.attention(forward_ad.make_dual(q, q), k, v)
        assert forward_ad.unpack_dual(o).tangent is not None
    assert looks == [MISS]


def test_threads_and_determinism_may_change_between_calls(looks):
    q, k, v = inputs()
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            octet.attention(q, k, v)
        torch.use_deterministic_algorithms(True)
        octet.attention(q, k, v)
    finally:
        torch.set_num_threads(before)
        torch.use_deterministic_algorithms(False)
    assert looks == [MISS, MISS, HIT, MISS]


def test_keywords_that_are_never_the_same_are_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr(_passes, "tokens", dict.fromkeys(range(_passes.MOST_TOKENS), 0))
    q, k, v = inputs()
    assert torch.equal(octet.attention(q, k, v, scale=0.123), ordinary(q, k, v, scale=0.123))
    assert len(_passes.tokens) == _passes.MOST_TOKENS


def test_threads_do_not_mix_their_calls():
    q, k, v = inputs(dim=24)
    scales = [0.1 + i / 100 for i in range(64)]
    want = [ordinary(q, k, v, scale=scale) for scale in scales]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            for _ in range(5):
                got = list(pool.map(lambda scale: octet.attention(q, k, v, scale=scale), scales))
                assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    finally:
        sys.setswitchinterval(before)


def test_tensors_die_when_they_are_forgotten(looks):
    """Counted references: nothing keeps an output or an input alive."""
    q, k, v = inputs()
    octet.attention(q, k, v)
    counts = [sys.getrefcount(x) for x in (q, k, v)]
    o = [octet.attention(q, k, v) for _ in range(10)]
    assert [sys.getrefcount(x) for x in (q, k, v)] == counts and sys.getrefcount(o[3]) <= 3
    for constant in (None, False):
        before = sys.getrefcount(constant)
        for _ in range(1000):
            octet.attention(q, k, v)
        assert abs(sys.getrefcount(constant) - before) < 500


# With a backward pass.


@pytest.fixture
def backwards(monkeypatch):
    """A list that receives what each look for a kept backward pass finds."""
    real, found = _passes.fast_backward, []

    def counting(*x):
        made = real(*x)
        found.append(ORDINARY if made is None else MISS if made is False else HIT)
        return made

    monkeypatch.setattr(_passes, "fast_backward", counting)
    return found


def leaves(x, needs=(True, True, True)):
    return [y.detach().requires_grad_(need) for y, need in zip(x, needs, strict=True)]


def gradients(call, x, **keywords):
    o = call(*x, **keywords)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o)
    return o, *torch.autograd.grad(o, [y for y in x if y.requires_grad], do)


def ordinary_gradients(x, call=octet.attention, **keywords):
    """The same by operators."""
    with Listening() as mode, without_c():
        made = gradients(call, x, **keywords)
    assert {"octet.forward.default", "octet.backward.default"} <= set(mode.heard)
    return made


def expect_same(got, want):
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y) and x.stride() == y.stride()


@pytest.mark.parametrize("keywords", [*KEYWORDS[:3], {"precision": "int8", "causal": "top_left"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_gradients_are_the_same_bits(looks, backwards, keywords, dtype):
    for shape in ((20, 30, 16), (7, 9, 24)):
        for order in ("bhsd", "bshd"):
            for seed in range(3):
                x = [y + seed for y in inputs(*shape, dtype, DEVICE)]
                if (order == "bshd") != (keywords.get("layout") == "bshd"):
                    x = [y.transpose(1, 2).contiguous().transpose(1, 2) for y in x]
                x = leaves(y.transpose(1, 2) if keywords.get("layout") == "bshd" else y for y in x)
                if not octet.supports(*x, kind="backward", **keywords):
                    pytest.skip("not on this machine")
                expect_same(gradients(octet.attention, x, **keywords), ordinary_gradients(x, **keywords))
    assert looks == [MISS, ORDINARY, TRAINED, ORDINARY, TRAINED, ORDINARY] * 4
    assert backwards == [MISS, HIT, HIT] * 4


def more_operands(seed):
    """Calls with operands beside q, k and v, each with numbers of its own."""
    torch.manual_seed(seed)
    lengths = torch.randint(1, 30, (2, 1, 1, 1))
    return {
        "sinks": {"sinks": torch.randn(4, device=DEVICE), "causal": "top_left", "window": (5, 0)},
        "parameter": {"sinks": torch.nn.Parameter(torch.randn(4, device=DEVICE))},
        "key mask": {"mask": (torch.arange(30) < lengths).to(DEVICE)},
        "mask": {"mask": torch.randn(4, 20, 30).bfloat16().to(DEVICE)},
        "slopes": {"alibi_slopes": torch.rand(2, 4, device=DEVICE)},
        "dropout": {"dropout_seed": torch.randint(-99, 99, (4,), dtype=torch.int32, device=DEVICE), "dropout_p": 0.3},
        "all": {
            "mask": (torch.arange(30) < lengths).to(DEVICE),
            "sinks": torch.randn(4, device=DEVICE, requires_grad=True),
            "alibi_slopes": torch.rand(4, device=DEVICE),
            "dropout_seed": torch.randint(-99, 99, (2, 4), dtype=torch.int32, device=DEVICE),
            "dropout_p": 0.2,
        },
    }


@pytest.mark.parametrize("name", more_operands(0))
def test_more_operands_give_the_same_bits(looks, backwards, name):
    """Masks, sinks, slopes and seeds; sinks have a gradient."""
    for seed in range(3):
        how, x = more_operands(seed)[name], [y + seed for y in inputs()]
        with torch.no_grad():
            assert torch.equal(octet.attention(*x, **how), ordinary(*x, **how))
        x = leaves(x)
        given = [*x, how["sinks"]] if getattr(how.get("sinks"), "requires_grad", False) else x
        call = functools.partial(octet.attention, *x, **how)
        with Listening(), without_c():
            o = call()
            want = [o, *torch.autograd.grad(o, given, torch.ones_like(o))]
        o = call()
        expect_same([o, *torch.autograd.grad(o, given, torch.ones_like(o))], want)
    looked = [x for x in looks if x != ORDINARY]
    assert looked == [MISS, MISS, HIT, TRAINED, HIT, TRAINED] and backwards == [MISS, HIT, HIT]


def test_more_operands_that_it_leaves_to_the_ordinary_way(looks):
    """Casts, gradients of masks, numbers for a seed, shapes and rejections."""
    x, how = leaves(inputs()), more_operands(0)
    octet.attention(*x, **how["mask"])
    mask = how["mask"]["mask"].requires_grad_()
    for _ in range(2):
        if DEVICE == "cpu":
            assert torch.autograd.grad(octet.attention(*x, mask=mask).sum(), mask)[0].any()
            assert looks[-1] == ORDINARY
        else:
            with pytest.raises(octet.Unsupported, match="mask: requires a gradient"):
                octet.attention(*x, mask=mask)
        with pytest.raises(octet.Unsupported, match="alibi_slopes: requires a gradient"):
            octet.attention(*x, alibi_slopes=how["slopes"]["alibi_slopes"].clone().requires_grad_())
        sinks = how["sinks"]["sinks"].bfloat16().requires_grad_()
        assert torch.autograd.grad(octet.attention(*x, sinks=sinks).sum(), sinks)[0].dtype is torch.bfloat16
        assert octet.attention(*x, dropout_p=0.1, dropout_seed=3).shape == x[0].shape and looks[-1] == ORDINARY
        with pytest.raises(octet.InvalidArgument, match="sinks: shape"):
            octet.attention(*x, sinks=torch.ones(4, 2, 1, device=DEVICE))
        with pytest.raises(octet.InvalidArgument, match="mask"):
            octet.attention(*x, mask=torch.ones(20, 31, dtype=torch.bool, device=DEVICE))
    assert not {HIT, TRAINED} & set(looks)


@pytest.mark.parametrize(
    "how", [{"dropout_p": 0.3}, {"attn_mask": True}, {"dropout_p": 0.3, "attn_mask": True}], ids=str
)
def test_sdpa_with_more_operands(looks, backwards, how):
    x, how = leaves(inputs()), {"enable_gqa": True, **how}
    if "attn_mask" in how:
        how["attn_mask"] = torch.rand(2, 1, 1, 30, device=DEVICE) < 0.7
    for _ in range(3):
        torch.manual_seed(5)
        want = ordinary_gradients(x, octet.sdpa, **how)
        torch.manual_seed(5)
        expect_same(gradients(octet.sdpa, x, **how), want)
    assert looks == [ORDINARY, MISS, ORDINARY, TRAINED, ORDINARY, TRAINED] and backwards == [MISS, HIT, HIT]


def test_gradients_of_sdpa_too(looks, backwards):
    x = leaves(inputs())
    how = {"enable_gqa": True, "is_causal": True}
    for _ in range(3):
        expect_same(gradients(octet.sdpa, x, **how), ordinary_gradients(x, octet.sdpa, **how))
    assert looks == [MISS, ORDINARY, TRAINED, ORDINARY, TRAINED, ORDINARY] and backwards == [MISS, HIT, HIT]


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, False, True)])
def test_gradients_of_some(looks, needs):
    for _ in range(3):
        x = leaves(inputs(), needs)
        expect_same(gradients(octet.attention, x), ordinary_gradients(x))
    assert looks[-2] == TRAINED


def test_training_under_autocast(looks):
    """Tensors that have autocast's type already are left as they are; others are cast, by the operator."""
    x = leaves(inputs())
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        for _ in range(2):
            got = gradients(octet.attention, x)
        assert looks == [MISS, TRAINED] and got[0].dtype is torch.bfloat16
        assert octet.attention(x[0].float(), *x[1:]).dtype is torch.bfloat16 and looks[-1] == ORDINARY
    expect_same(got, ordinary_gradients(x))
    with torch.autocast(DEVICE, dtype=torch.float16):
        assert octet.attention(*x).dtype is torch.float16 and looks[-1] == ORDINARY


def test_whoever_listens_to_a_backward_pass_hears_it(looks, backwards):
    x = leaves(inputs())
    for _ in range(3):
        want = gradients(octet.attention, x)
    do = torch.ones_like(want[0])

    def graph():
        o = octet.attention(*x)
        assert looks[-1] == TRAINED
        return o

    o = graph()
    with Listening() as mode:
        torch.autograd.grad(o, x, do)
    assert "octet.backward.default" in mode.heard and backwards[-1] == ORDINARY
    o = graph()
    with torch.profiler.profile() as profile:
        torch.autograd.grad(o, x, do)
    assert "octet::backward" in {event.key for event in profile.key_averages()}
    o = graph()
    negative = torch._neg_view(do)
    expect_same(torch.autograd.grad(o, x, negative, retain_graph=True), torch.autograd.grad(o, x, -do))
    # A vmap that no flag of torch shows.
    many = torch.stack([do, 2 * do])
    got = torch.autograd.grad(graph(), x, many, is_grads_batched=True)
    expect_same([y[1] for y in got], torch.autograd.grad(graph(), x, 2 * do))
    o = graph()
    got = torch.func.vmap(lambda y: torch.autograd.grad(o, x, y, retain_graph=True))(many)
    expect_same([y[1] for y in got], torch.autograd.grad(o, x, 2 * do))
    dq = torch.autograd.grad(graph(), x, do, create_graph=True)[0]
    with pytest.raises(octet.Unsupported, match="first derivatives only"):
        torch.autograd.grad(dq.sum(), x)
    heard = []
    o = octet.attention(*(y * 1 for y in x))
    assert looks[-1] == TRAINED
    o.register_hook(lambda y: heard.append(y.shape))
    o.backward(do)
    assert heard == [do.shape] and backwards[-1] == HIT
    with torch.autograd.detect_anomaly(check_nan=False):
        expect_same(torch.autograd.grad(graph(), x, do), torch.autograd.grad(graph(), x, do))


def test_a_tangent_of_a_gradient_is_rejected(backwards):
    x = leaves(inputs())
    for _ in range(3):
        do = gradients(octet.attention, x)[0].detach()
    o = octet.attention(*x)
    with forward_ad.dual_level(), pytest.raises(octet.Unsupported, match="first derivatives only"):
        torch.autograd.grad(o, x, forward_ad.make_dual(do, do))
    with Listening(), forward_ad.dual_level(), pytest.raises(octet.Unsupported, match="first derivatives only"):
        torch.autograd.grad(octet.attention(*x), x, forward_ad.make_dual(do, do))
    assert len(backwards) == 3


def test_functional_transforms_go_the_ordinary_way(looks):
    x = leaves(inputs())
    for _ in range(2):
        want = gradients(octet.attention, x)
    got = torch.func.vjp(octet.attention, *x)[1](torch.ones_like(want[0]))
    expect_same(got, torch.autograd.grad(octet.attention(*x), x, torch.ones_like(want[0])))
    if DEVICE == "cpu":
        with forward_ad.dual_level():
            o = octet.attention(forward_ad.make_dual(x[0], x[0]), *x[1:])
            assert forward_ad.unpack_dual(o).tangent is not None
    count = len(looks)
    torch._dynamo.reset()
    compiled = torch.compile(octet.attention, fullgraph=True, backend="aot_eager")
    expect_same(gradients(compiled, x), want)
    assert len(looks) == count


def test_a_gradient_of_a_compiled_backward_pass(looks):
    x = leaves(inputs())
    for _ in range(2):
        want = gradients(octet.attention, x)[1:]
    o = octet.attention(*x)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        o.backward(do)
    expect_same([y.grad for y in x], want)


def test_what_is_saved_may_be_packed_and_changed(looks, backwards):
    x = leaves(inputs())
    for _ in range(3):
        want = gradients(octet.attention, x)
    packed = []

    def pack(y):
        packed.append(y)
        return y.cpu(), y.device

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y[0].to(y[1]).contiguous()):
        expect_same(gradients(octet.attention, x), want)
    assert looks[-1] == TRAINED and backwards[-1] == HIT
    with torch.autograd.graph.saved_tensors_hooks(lambda y: y, lambda y: y.clone() if y.ndim < 4 else swap(y)):
        got = gradients(octet.attention, x)
    assert backwards[-1] == MISS  # other strides
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    y = x[0] * 1
    o = octet.attention(y, *x[1:])
    y += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def swap(y):
    return y.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints(looks, use_reentrant, dtype):
    """A pass that is computed again may find what the first one kept, or that somebody listens now."""
    if not octet.supports(*inputs(dtype=dtype), kind="backward"):
        pytest.skip("not on this machine")

    def call(*x):
        return torch.utils.checkpoint.checkpoint(octet.attention, *x, use_reentrant=use_reentrant)

    for listens in (False, False, True):
        x, y = leaves(inputs(dtype=dtype)), leaves(inputs(dtype=dtype))
        o = call(*x)
        with torch.profiler.profile() if listens else contextlib.nullcontext():
            o.sum().backward()
        octet.attention(*y).sum().backward()
        expect_same([z.grad for z in x], [z.grad for z in y])
    assert TRAINED in looks


def test_a_graph_may_be_used_twice(looks, backwards):
    x = leaves(inputs())
    for _ in range(2):
        want = gradients(octet.attention, x)
    o = octet.attention(*x)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o)
    for _ in range(2):
        expect_same(torch.autograd.grad(o, x, do, retain_graph=True), want[1:])
    assert backwards[-2:] == [HIT] * 2
    torch.autograd.grad(o, x, do)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(o, x, do)


def test_gradients_that_nobody_made_a_tensor_of(looks):
    """An expanded gradient, as of a sum, has strides of its own."""
    for _ in range(3):
        x, y = leaves(inputs()), leaves(inputs())
        octet.attention(*x).sum().backward()
        with Listening():
            octet.attention(*y).sum().backward()
        expect_same([z.grad for z in x], [z.grad for z in y])


def test_threads_do_not_mix_their_backward_passes():
    scales = [0.1 + i / 100 for i in range(32)]
    x = inputs(dim=24)
    want = [ordinary_gradients(leaves(x), scale=scale) for scale in scales]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            for _ in range(4):
                got = pool.map(lambda scale: gradients(octet.attention, leaves(x), scale=scale), scales)
                for a, b in zip(got, want, strict=True):
                    expect_same(a[1:], b[1:])
    finally:
        sys.setswitchinterval(before)


def test_kept_calls_are_forgotten_with_what_they_hold(looks):
    """More shapes than are kept; what is saved dies with its graph."""
    for queries in range(1, 300):
        x = leaves(inputs(queries=queries % 150 + 1, keys=8, dim=8))
        octet.attention(*x).sum().backward()
    x = leaves(inputs())
    for _ in range(3):
        o = octet.attention(*x)
        o.sum().backward()
    assert looks[-1] == TRAINED
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda y: saved.append(weakref.ref(y)) or y, lambda y: y):
        o = octet.attention(*x)
    counts = [sys.getrefcount(y) for y in x]
    for _ in range(100):
        octet.attention(*x).sum().backward()
    assert [sys.getrefcount(y) for y in x] == counts
    lse = saved[4]
    assert lse() is not None
    o.sum().backward()
    del o
    assert lse() is None


# Operators, as compiled code calls them.


@pytest.fixture
def ordinary_passes(monkeypatch):
    """The passes that go the ordinary way; other tests' are forgotten."""
    real, found = _plan.find, []

    def counting(adapter, kind, *rest):
        found.append(kind)
        return real(adapter, kind, *rest)

    monkeypatch.setattr(_plan, "find", counting)
    monkeypatch.setattr(_plan, "_kept", type(_plan._kept)())
    monkeypatch.setattr(_passes, "tokens", {})
    return found


OPERATOR_KEYWORDS = [{}, {"causal": "top_left", "scale": 0.1, "window": (3, None)}, {"layout": "bshd"},
                     {"precision": "int8", "causal": "top_left"}]  # fmt: skip


@pytest.mark.parametrize("keywords", OPERATOR_KEYWORDS, ids=str)
@pytest.mark.parametrize(
    "backend, dtype",
    [("inductor", torch.float16), ("inductor", torch.bfloat16), ("aot_eager", torch.float32)],
    ids=str,
)
def test_compiled_passes_run_from_c(ordinary_passes, keywords, backend, dtype):
    """The first time they are described, the second time kept, then run from C: the same bits and the same strides."""
    x = [y.transpose(1, 2) if keywords.get("layout") == "bshd" else y for y in inputs(dtype=dtype)]
    if not octet.supports(*x, kind="backward", **keywords):
        pytest.skip("not on this machine")
    torch._dynamo.reset()
    function = torch.compile(octet.attention, fullgraph=True, backend=backend)
    given = [leaves(z + seed for z in x) for seed in range(5)]
    got = [gradients(function, y, **keywords) for y in given]
    assert ordinary_passes == ["forward", "backward"] * 2
    with torch.no_grad():
        inferred = [function(*y, **keywords) for y in given]
    assert ordinary_passes[4:] in ([], ["forward"] * 2)  # another pass where training makes a residual
    for y, o, made in zip(given, inferred, got, strict=True):
        expect_same(made, ordinary_gradients(y, **keywords))
        with torch.no_grad():
            expect_same([o], [ordinary(*y, **keywords)])


def operator(x, text="precision=bf16", residual=True):
    return torch.ops.octet.forward(*x, residual, text)


def test_operators_are_heard_when_they_run_from_c(ordinary_passes):
    x = inputs()
    want = [operator(x) for _ in range(3)][0]
    assert ordinary_passes == ["forward"] * 2
    with Listening() as mode:
        made = operator(x)
    assert mode.heard == ["octet.forward.default"]
    expect_same(made, want)
    with torch.profiler.profile() as profile:
        made = operator(x)
    expect_same(made, want)
    assert "octet::forward" in {event.key for event in profile.key_averages()}
    many = torch.func.vmap(lambda *y: operator(y))(*(torch.stack([y, y + 1]) for y in x))
    expect_same([y[0] for y in many], want)
    expect_same(operator([torch._neg_view(-x[0]), *x[1:]]), want)
    assert ordinary_passes == ["forward"] * 2


def test_operators_keep_what_differs_apart(ordinary_passes):
    """Texts, residual or not, types, strides, threads, determinism; and what is not kept stays so."""
    q, k, v = inputs()
    swapped = [swap(y) for y in (q, k, v)]
    before = torch.get_num_threads()
    calls = {
        "plain": lambda: operator((q, k, v)),
        "without a residual": lambda: operator((q, k, v), residual=False),
        "scaled": lambda: operator((q, k, v), "precision=bf16 scale=0.1"),
        "scaled otherwise": lambda: operator((q, k, v), "precision=bf16 scale=0.10000000000000002"),
        "another type": lambda: operator([y.half() for y in (q, k, v)], "precision=f16"),
        "another order": lambda: operator(swapped),
        "a type of o": lambda: operator((q, k, v), "precision=bf16 out_dtype=f32"),
        "a dim of v": lambda: operator((q, k, v[..., :8])),
        "a filled dim": lambda: operator([y[..., :12] for y in (q, k, v)]),
        "a mask": lambda: torch.ops.octet.forward(q, k, v, True, "precision=bf16", k[0, 0, :, 0] > 0),
        "packed": lambda: torch.ops.octet.forward(
            q[0].transpose(0, 1), q[0].transpose(0, 1), q[0].transpose(0, 1), True, "precision=bf16 layout=thd",
            None, *[torch.tensor([0, 20], dtype=torch.int32, device=DEVICE)] * 2, None, 20, 20
        ),
    }  # fmt: skip
    kept = ["plain", "without a residual", "scaled", "scaled otherwise", "another type", "another order"]
    want = {name: call() for name, call in calls.items()}
    for threads in (2, 1, 2, before):
        torch.set_num_threads(threads)
        try:
            for _ in range(3):
                for name, call in calls.items():
                    expect_same(call(), want[name])
        finally:
            torch.set_num_threads(before)
    del ordinary_passes[:]
    for name, call in calls.items():
        expect_same(call(), want[name])
        assert (ordinary_passes == []) == (name in kept), name
        del ordinary_passes[:]
    assert not torch.equal(want["plain"][0], want["scaled"][0])
    torch.use_deterministic_algorithms(True)
    try:
        expect_same(calls["plain"](), want["plain"])
        assert ordinary_passes == ["forward"]
    finally:
        torch.use_deterministic_algorithms(False)
    assert want["without a residual"][2].shape == (0,) and want["plain"][2].shape == q.shape
    assert [want[name][2].dtype for name in ("plain", "another type", "a type of o")] == [
        torch.int8, torch.int8, torch.float32
    ]  # fmt: skip
    one, two = (calls["without a residual"]()[2] for _ in range(2))
    assert one is not two and one._cdata != two._cdata


def test_results_of_subclasses_are_plain(ordinary_passes):
    class Mine(torch.Tensor):
        pass

    x = inputs()
    want = [operator(x) for _ in range(3)][0]
    mine = [y.as_subclass(Mine) for y in x]
    with torch._C.DisableTorchFunctionSubclass():
        made = operator(mine)
    assert [type(y) for y in made] == [torch.Tensor] * 3
    expect_same(made, want)


def test_strides_that_stand_for_nothing_do_not_come_back(ordinary_passes):
    """Of a dim of size 1, where torch.empty_like would keep them."""
    q, k, v = (y[:, :1] for y in inputs())
    q = q[:1].as_strided((1, 1, 20, 16), (99999, 7777, 16, 1))
    k, v = k[:1], v[:1]
    want = [operator((q, k, v)) for _ in range(4)]
    assert {y[0].stride() for y in want} == {(320, 320, 16, 1)}


def test_numbers_of_passes_are_not_kept_for_ever(ordinary_passes, monkeypatch):
    x = inputs()
    monkeypatch.setattr(_passes, "tokens", dict.fromkeys(range(_passes.MOST_TOKENS), 0))
    for _ in range(4):
        made = operator(x, "precision=bf16 scale=0.123")
    expect_same(made, operator(x, "precision=bf16 scale=0.123"))
    assert len(_passes.tokens) == _passes.MOST_TOKENS and ordinary_passes == ["forward"] * 5


def test_threads_do_not_mix_their_operators():
    x = inputs(dim=24)
    texts = [f"precision=bf16 scale={0.1 + i / 100}" for i in range(64)]
    want = [operator(x, text) for text in texts]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            for a, b in zip(pool.map(lambda text: operator(x, text), texts), want, strict=True):
                expect_same(a, b)
