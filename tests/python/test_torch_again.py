"""Calls that are run again without torch's dispatcher: the same numbers, and only where nobody listens to operators."""

import concurrent.futures
import sys

import octet
import pytest

torch = pytest.importorskip("torch")
import octet.torch  # noqa: E402
from octet.torch import _again  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

if _again._loaded is None:
    pytest.skip("torch has no DLPack exchange API, or liboctet_dlpack.so is missing", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HIT, MISS, ORDINARY = "it ran again", "it may be kept", "the ordinary way"


@pytest.fixture
def again(monkeypatch):
    """What each look for a kept call found; other tests' calls are forgotten."""
    real, found = _again._again, []

    def counting(token, q, k, v):
        o = real(token, q, k, v)
        found.append(ORDINARY if o is None else MISS if o is False else HIT)
        return o

    monkeypatch.setattr(_again, "_again", counting)
    monkeypatch.setattr(_again, "_tokens", {})
    return found


class Listening(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.heard = [*getattr(self, "heard", []), str(function)]
        return function(*args, **(kwargs or {}))


def ordinary(*x, call=octet.attention, **keywords):
    """The same by the operator."""
    with Listening() as mode:
        o = call(*x, **keywords)
    assert "octet.forward.default" in mode.heard
    return o


def inputs(queries=20, keys=30, dim=16, dtype=torch.bfloat16, device=DEVICE):
    torch.manual_seed(0)
    return [torch.randn(2, h, n, dim).to(device, dtype) for h, n in ((4, queries), (2, keys), (2, keys))]


KEYWORDS = [{}, {"causal": "top_left", "scale": 0.5}, {"layout": "bshd"}, {"precision": "int8", "window": (3, 2),
            "alignment": "bottom_right"}]  # fmt: skip


@pytest.mark.parametrize("keywords", KEYWORDS, ids=str)
def test_it_gives_the_same_bits(again, keywords):
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
    assert again == [MISS, ORDINARY, HIT, ORDINARY, HIT, ORDINARY] * 4


def test_sdpa_too(again):
    x = inputs()
    for how in ({"enable_gqa": True}, {"enable_gqa": True, "is_causal": True, "scale": 0.5}):
        for _ in range(2):
            assert torch.equal(octet.sdpa(*x, **how), ordinary(*x, call=octet.sdpa, **how))
    assert again == [MISS, ORDINARY, HIT, ORDINARY] * 2
    for _ in range(2):  # a refusal is not kept
        with pytest.raises(octet.InvalidArgument, match="enable_gqa: False"):
            octet.sdpa(*x)
    # Batches that broadcast are other tensors than those that were handed over.
    q, k, v = (x[0], *(y[:1] for y in x[1:]))
    wide = [y.expand(2, -1, -1, -1) for y in (k, v)]
    assert torch.equal(octet.sdpa(q, k, v, enable_gqa=True), octet.sdpa(q, *wide, enable_gqa=True))


def test_dims_and_strides_that_it_leaves_to_the_ordinary_way(again):
    q, k, v = inputs()
    for _ in range(2):
        assert octet.attention(q, k, v[..., :8]).shape == (2, 4, 20, 8)  # o is not like q
        assert octet.attention(q, k, v, return_lse=True)[1].shape == (2, 4, 20)
    assert again == [ORDINARY] * 2
    with pytest.raises(octet.InvalidArgument, match="expected .batch, head, token, dim"):
        octet.attention(q[0], k[0], v[0])
    wide = torch.randn(2, 20, 4, 16, device=DEVICE).bfloat16().transpose(1, 2)
    first, second = octet.attention(wide, k, v), octet.attention(wide, k, v)
    assert torch.equal(first, second) and first.stride() == second.stride() == wide.stride() and again[-1] == HIT


def test_values_that_are_equal_but_not_alike_are_judged_each(again):
    q, _, _ = inputs()
    for _ in range(2):
        octet.attention(q, q, q, causal=True)
    with pytest.raises(octet.InvalidArgument, match="causal: found 1, allowed"):
        octet.attention(q, q, q, causal=1)
    assert again == [MISS, HIT, MISS]
    octet.attention(q, q, q, causal="top_left", window=[3, 0])  # a list cannot be looked up
    octet.attention(q, q, q, causal="top_left", window=[3, 0])
    assert len(again) == 3


def test_a_refusal_is_a_refusal_each_time(again):
    q, k, v = inputs()
    octet.attention(q, k, v)
    for _ in range(2):
        with pytest.raises(octet.InvalidArgument, match="v: shape"):
            octet.attention(q, k, v[:, :, :5])
    assert again == [MISS] * 3


def test_whoever_listens_to_operators_hears_them(again):
    q, k, v = inputs()
    for _ in range(2):
        octet.attention(q, k, v)
    assert again == [MISS, HIT]
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
    assert again[2:].count(HIT) == 1  # the last of all
    with torch.no_grad():
        assert not octet.attention(q.requires_grad_(), k, v).requires_grad
    assert again[-1] == HIT


@pytest.mark.skipif(DEVICE == "cuda", reason="no tangents on a GPU")
def test_a_tangent_is_no_ordinary_number(again):
    q, k, v = inputs()
    octet.attention(q, k, v)
    with forward_ad.dual_level():
        o = octet.attention(forward_ad.make_dual(q, q), k, v)
        assert forward_ad.unpack_dual(o).tangent is not None
    assert again == [MISS]


def test_threads_and_determinism_may_change_between_calls(again):
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
    assert again == [MISS, MISS, HIT, MISS]


def test_keywords_that_are_never_the_same_are_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr(_again, "_tokens", dict.fromkeys(range(_again._MOST_TOKENS), 0))
    q, k, v = inputs()
    assert torch.equal(octet.attention(q, k, v, scale=0.123), ordinary(q, k, v, scale=0.123))
    assert len(_again._tokens) == _again._MOST_TOKENS


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


def test_tensors_die_when_they_are_forgotten(again):
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
