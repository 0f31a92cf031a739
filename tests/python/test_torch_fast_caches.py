"""KV caches on the fast path: calls that came before, the same bits, and only where nobody listens to operators."""

import numpy as np
import octet
import pytest

torch = pytest.importorskip("torch")
import octet.torch  # noqa: E402
from octet.torch import _fast_caches  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, HEADS, DIM, PAGE = 2, 2, 16, 16


class Listening(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.heard = [*getattr(self, "heard", []), str(function)]
        return function(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def looks(monkeypatch):
    """A list that receives whether each look for a call found one. Calls of other tests are forgotten."""
    found = []

    def counting(real):
        def look(how, operands):
            made = real(how, operands)
            found.append(made is not None)
            return made

        return look

    for name in ("attention", "append"):
        monkeypatch.setattr(_fast_caches, name, counting(getattr(_fast_caches, name)))
    for name in ("_options", "_ropes"):
        monkeypatch.setattr(_fast_caches, name, {})
    monkeypatch.setattr(octet._plan._kept, "calls", {})
    monkeypatch.setattr(octet._appending._kept, "calls", {})
    return found


def cache(format=None, seed=0):
    """k_cache, v_cache, block_table, seqused_k, q, and k and v of one new token."""
    random = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=random).to(DEVICE)
    pages = [draw(5, HEADS, PAGE, DIM) for _ in "kv"]
    if format:
        pages = [octet.quantize(x, name, format=format) for x, name in zip(pages, "kv", strict=True)]
    table = torch.tensor([[4, 1], [0, 3]], dtype=torch.int32, device=DEVICE)
    used = torch.tensor([17, 3], dtype=torch.int32, device=DEVICE)
    return *pages, table, used, draw(BATCH, 2 * HEADS, 1, DIM), draw(BATCH, HEADS, 1, DIM), draw(BATCH, HEADS, 1, DIM)


def step(given, **how):
    """All that a step of decoding changes or gives."""
    k_cache, v_cache, table, used, q, k, v = given
    turned = octet.append(k_cache, v_cache, k, v, used, block_table=table, rope="half", q=q)
    o = octet.attention_cached(turned, k_cache, v_cache, used + 1, block_table=table, causal="bottom_right", **how)
    parts = [y for x in (k_cache, v_cache) for y in ((x.codes, x.scale) if isinstance(x, octet.QTensor) else (x,))]
    return [x.clone() for x in (*parts, turned, *(o if isinstance(o, tuple) else (o,)))]


def same(found, want):
    raw = lambda x: x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn else x
    return all(torch.equal(raw(x), raw(y)) for x, y in zip(found, want, strict=True))


@pytest.mark.parametrize("how", [{}, {"return_lse": True}, {"window": (4, -1)}, {"precision": "bf16"}], ids=str)
@pytest.mark.parametrize("format", [None, "i8", "e4m3"])
def test_the_same_bits(format, how, looks):
    first = step(cache(format), **how)
    assert looks == [False, False]
    assert same(step(cache(format), **how), first) and looks[2:] == [True, True]
    other = step(cache(format, seed=1), **how)
    assert looks[4:] == [True, True] and not same(other, first)
    octet._plan._kept.calls.clear(), octet._appending._kept.calls.clear()
    assert same(step(cache(format, seed=1), **how), other) and looks[6:] == [False, False]


def test_other_arguments(looks):
    """What equals an argument that was valid, but is none, is rejected still."""
    given = cache()
    step(given), step(given)
    k_cache, v_cache, table, used, q, k, v = given
    attend = lambda **how: octet.attention_cached(q, k_cache, v_cache, used, block_table=table, **how)
    assert attend(return_lse=False).shape == attend(return_lse=False).shape == q.shape
    for how, message in (
        ({"return_lse": 0}, "return_lse: found 0"),
        ({"window": [1, 2, 3]}, "window"),
        ({"enable_gqa": 1}, "enable_gqa: found 1"),
    ):
        with pytest.raises(octet.InvalidArgument, match=message):
            attend(**how)
    with pytest.raises(octet.InvalidArgument, match="enable_gqa: False, but q has 4 heads"):
        attend(enable_gqa=False)
    with pytest.raises(octet.InvalidArgument, match="layout: found 'sbhd'"):
        octet.append(k_cache, v_cache, k, v, used, block_table=table, layout="sbhd")
    with pytest.raises(TypeError):
        octet.append(k_cache, v_cache, k, v, used, block_table=table, ropes="half")


def test_other_tensors(looks):
    """Each kind of tensor has a call of its own."""
    k_cache, v_cache, table, used, q, k, v = cache()
    for x in (q, q.bfloat16(), q.half()):
        keys, values = k_cache.to(x.dtype), v_cache.to(x.dtype)
        for times in range(2):
            o = octet.attention_cached(x, keys, values, used, block_table=table)
            assert o.dtype is x.dtype and looks[-1] == bool(times)
    views = [x.transpose(1, 2) for x in (q, k_cache, v_cache)]
    want = octet.attention_cached(q, k_cache, v_cache, used, block_table=table)
    for _ in range(2):
        found = octet.attention_cached(*views, used, block_table=table, layout="bshd")
        assert torch.equal(found.transpose(1, 2), want)


def test_lengths_are_checked_on_the_cpu():
    if DEVICE != "cpu":
        pytest.skip("nobody checks them there")
    given = list(cache())
    step(given)
    given[3] = torch.tensor([40, 3], dtype=torch.int32)
    with pytest.raises(octet.InvalidArgument, match="seqused_k"):
        step(given)


def test_sinks(looks):
    k_cache, v_cache, table, used, q, *_ = cache()
    run = lambda sinks: octet.attention_cached(q, k_cache, v_cache, used, block_table=table, sinks=sinks)
    sinks = torch.linspace(-1, 1, 2 * HEADS, device=DEVICE)
    want = run(sinks)
    assert torch.equal(run(sinks), want) and looks == [False, True]
    assert torch.equal(run(sinks.double()), want) and looks[2:] == [False]


def test_modes_hear_of_it(looks):
    step(cache())
    with Listening() as mode:
        step(cache())
    assert looks[2:] == [False, False] and {"octet.append.default", "octet.forward.default"} <= set(mode.heard)


def test_the_profiler_hears_of_it():
    step(cache())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(cache())
    assert {"octet::append", "octet::forward"} <= {x.key for x in profile.key_averages()}


def test_autocast(looks):
    k_cache, v_cache, table, used, q, *_ = cache()
    run = lambda *x: octet.attention_cached(*x, used, block_table=table)
    want = run(*[x.bfloat16() for x in (q, k_cache, v_cache)])
    for _ in range(2):
        run(q, k_cache, v_cache)
        with torch.autocast(DEVICE, torch.bfloat16):
            assert torch.equal(run(q, k_cache, v_cache), want) and looks[-1] is False


def test_gradients_are_rejected(looks):
    k_cache, v_cache, table, used, q, k, v = cache()
    attend = lambda: octet.attention_cached(q, k_cache, v_cache, used, block_table=table)
    add = lambda: octet.append(k_cache, v_cache, k, v, used, block_table=table)
    attend(), add()
    q.requires_grad_(), k.requires_grad_()
    with torch.no_grad():
        attend(), add()
    assert looks[2:] == [True, True]
    for call, name in ((attend, "q"), (add, "k")):
        with pytest.raises(octet.Unsupported, match=f"{name}: requires a gradient"):
            call()
    q.requires_grad_(False)
    with forward_ad.dual_level():
        q = forward_ad.make_dual(q, q)
        with pytest.raises(octet.Unsupported, match="q: requires a gradient"):
            attend()


def test_vmap(looks):
    k_cache, v_cache, table, used, q, *_ = cache()
    run = lambda x: octet.attention_cached(x, k_cache, v_cache, used, block_table=table)
    want = torch.stack([run(q), run(2 * q)])
    assert torch.equal(torch.func.vmap(run)(torch.stack([q, 2 * q])), want)


def test_determinism_is_part_of_a_call(looks):
    step(cache())
    torch.use_deterministic_algorithms(True)
    try:
        step(cache())
    finally:
        torch.use_deterministic_algorithms(False)
    assert looks == [False, False, True, False]


def test_packed_queries(looks):
    k_cache, v_cache, table, used, q, *_ = cache()
    pages = [x.transpose(1, 2) for x in (k_cache, v_cache)]
    starts = torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE)
    run = lambda x: octet.attention_cached(x, *pages, used, block_table=table, cu_seqlens_q=starts, max_seqlen_q=1)
    want = run(q[:, :, 0])
    assert torch.equal(run(q[:, :, 0]), want) and looks == [False, True]


def test_numpy_keeps_calls_too():
    pages = np.zeros((2, 3, HEADS, PAGE, DIM), np.float32)
    new, used = np.ones((2, 1, HEADS, 1, DIM), np.float32), np.array([3], np.int32)
    for i in range(3):
        octet.append(*pages, *(i * new), used + i, block_table=np.array([[1]], np.int32))
    assert len(octet._appending._kept.calls) == 1
    assert (pages[:, 1, :, 3:6] == np.arange(3)[:, None]).all() and not pages[:, [0, 2]].any()


@pytest.mark.parametrize("remembered", [False, True])
def test_what_is_no_tensor_of_the_device_is_rejected(remembered):
    """In the same words, whether such a call came before or not; nothing is appended."""
    k_cache, v_cache, table, used, q, k, v = cache()
    if remembered:
        step(cache())
        octet.append(*cache()[:2], k, v, used, block_table=table)
        octet.attention_cached(q, k_cache, v_cache, used, block_table=table)
    before = k_cache.clone()
    on_cpu = lambda x: x.detach().cpu().numpy()
    for wrong, message in ((on_cpu(k), "a numpy array"), (k.tolist(), "list"), (k.to("meta"), "on meta, but k_cache")):
        with pytest.raises((octet.InvalidArgument, TypeError), match=message):
            octet.append(k_cache, v_cache, wrong, v, used, block_table=table)
    assert torch.equal(k_cache, before)
    for wrong, message in ((on_cpu(q), "a torch array"), (q.tolist(), "list")):
        with pytest.raises((octet.InvalidArgument, TypeError), match=message):
            octet.attention_cached(wrong, k_cache, v_cache, used, block_table=table)
    for name in ("q", "k", "v", "seqused_k"):
        given = dict(q=q, k=k_cache, v=v_cache, seqused_k=used, block_table=table) | {name: None}
        with pytest.raises(octet.InvalidArgument, match=f"{name}: found None, allowed: an array"):
            octet.attention_cached(**given)
    for name in ("k_cache", "v_cache", "k", "v", "seqused_k"):
        given = dict(k_cache=k_cache, v_cache=v_cache, k=k, v=v, seqused_k=used, block_table=table) | {name: None}
        with pytest.raises(octet.InvalidArgument, match=f"{name}: found None, allowed: an array"):
            octet.append(**given)
    with pytest.raises((octet.InvalidArgument, TypeError), match="block_table"):
        octet.attention_cached(q, k_cache, v_cache, used, block_table=on_cpu(table))
    with pytest.raises((octet.InvalidArgument, TypeError), match="sinks"):
        octet.attention_cached(q, k_cache, v_cache, used, block_table=table, sinks=[0.0] * 2 * HEADS)
