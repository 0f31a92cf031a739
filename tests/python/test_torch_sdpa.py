"""octet.sdpa against torch's own scaled_dot_product_attention in float64, case by case and at random."""

import concurrent.futures
import contextlib
import inspect
import itertools
import threading
import warnings
from unittest import mock

import octet
import pytest
from exact import bounds, expect_close, rounding
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
import torch.nn.attention.bias  # noqa: E402, F811
from torch.nn.functional import scaled_dot_product_attention as own  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

SCALE = 0.25  # the same in float32 and float64


def agree(q, k, v, mask=None, **keywords):
    """octet.sdpa, and torch's own in float64, on the same tensors; returns octet's."""
    keywords = {"scale": SCALE} | keywords
    bias = mask.double() if mask is not None and mask.is_floating_point() else mask
    got, want = octet.sdpa(q, k, v, mask, **keywords), own(q.double(), k.double(), v.double(), bias, **keywords)
    assert got.dtype == q.dtype
    numbers = [x.detach().double().reshape(1, -1, *x.shape[-2:]).numpy() for x in (q, k, v)]
    bias = bias.numpy() if mask is not None and mask.is_floating_point() else None
    about = {"scale": keywords["scale"], "bias": bias}
    bound = sum(bounds(*numbers, **rounding(dtype), **about)["o"] for dtype in (q.dtype, "float64"))
    expect_close(got.detach().double().numpy(), want.detach().numpy(), bound, "sdpa")
    return got


def draw(*shapes):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def test_the_signature_is_torchs_own_and_precision():
    """torch's is a builtin, whose signature stands in its docstring."""
    found = inspect.signature(octet.sdpa)
    names = ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa", "precision",
             "unknown"]  # fmt: skip
    assert list(found.parameters) == names
    stated = " ".join(own.__doc__.split())
    assert "attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False" in stated
    kinds = [p.kind for p in found.parameters.values()]
    assert kinds[:6] == [inspect.Parameter.POSITIONAL_OR_KEYWORD] * 6
    assert kinds[6:] == [inspect.Parameter.KEYWORD_ONLY] * 3 + [inspect.Parameter.VAR_KEYWORD]  # to be rejected
    defaults = {name: p.default for name, p in found.parameters.items() if p.default is not p.empty}
    assert defaults == {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False,
                        "precision": None}  # fmt: skip


@pytest.mark.parametrize("queries, keys", [(7, 7), (5, 9), (9, 5), (1, 6)])
def test_causal_is_top_left_for_all_lengths(queries, keys):
    q, k, v = draw((2, 3, queries, 16), (2, 3, keys, 16), (2, 3, keys, 16))
    agree(q, k, v, is_causal=True)


@pytest.mark.parametrize(
    "shape", [(5, 7), (1, 7), (5, 1), (3, 5, 7), (3, 1, 7), (2, 1, 5, 7), (2, 3, 5, 7), (1, 1, 1, 7)]
)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_broadcast(shape, kind):
    q, k, v = draw((2, 3, 5, 16), (2, 3, 7, 16), (2, 3, 7, 8))
    mask = torch.rand(shape) < 0.6
    if kind == "float":
        mask = torch.randn(shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    agree(q, k, v, mask)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_query_that_sees_nothing_gives_zero_and_no_gradient(kind):
    q, k, v = (x.requires_grad_() for x in draw((1, 2, 4, 16), (1, 2, 6, 16), (1, 2, 6, 16)))
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[2] = False
    if kind == "float":
        mask = torch.zeros(4, 6, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    o = agree(q, k, v, mask)
    assert (o[:, :, 2] == 0).all() and (o[:, :, 1] != 0).any()
    (dq,) = torch.autograd.grad(o.sum(), q)
    assert (dq[:, :, 2] == 0).all() and dq.isfinite().all()


def test_grouped_heads_need_enable_gqa():
    q, k, v = draw((2, 6, 5, 16), (2, 2, 5, 16), (2, 2, 5, 16))
    agree(q, k, v, enable_gqa=True)
    with pytest.raises(octet.InvalidArgument, match="enable_gqa: False, but query has 6 heads and key 2"):
        octet.sdpa(q, k, v)
    with pytest.raises(octet.InvalidArgument, match="6 heads, which is not a multiple of the 4 heads"):
        octet.sdpa(q, *draw((2, 4, 5, 16), (2, 4, 5, 16)), enable_gqa=True)


@pytest.mark.parametrize(
    "q, k",
    [((5, 16), (7, 16)), ((3, 5, 16), (3, 7, 16)), ((2, 2, 3, 5, 16), (2, 2, 3, 7, 16)), ((2, 3, 5, 16), (1, 3, 7, 16)),
     ((4, 2, 3, 5, 16), (2, 3, 7, 16)), ((2, 3, 5, 16), (2, 1, 7, 16))],
)  # fmt: skip
def test_any_number_of_leading_dimensions(q, k):
    agree(*draw(q, k, k))


def test_leading_dimensions_of_masks():
    q, k = (4, 2, 3, 5, 16), (4, 2, 3, 7, 16)
    for shape in ((5, 7), (3, 5, 7), (2, 1, 5, 7), (4, 1, 3, 1, 7)):
        agree(*draw(q, k, k), torch.rand(shape) < 0.6)


@pytest.mark.parametrize(
    "q, k", [((0, 3, 5, 16), (0, 3, 7, 16)), ((2, 3, 0, 16), (2, 3, 7, 16)), ((0, 2, 3, 5, 16), (0, 2, 3, 7, 16))]
)
def test_empty(q, k):
    q, k = draw(q, k)
    assert octet.sdpa(q, k, k).shape == q.shape


def test_no_keys_give_zero():
    q, k = draw((2, 3, 4, 16), (2, 3, 0, 16))
    assert (octet.sdpa(q, k, k) == 0).all()


def test_strides_and_value_dims():
    q, k, v = (x.transpose(1, 2) for x in draw((2, 9, 3, 16), (2, 9, 3, 16), (2, 9, 3, 24)))
    o = agree(q, k, v, is_causal=True)
    assert o.shape == (2, 3, 9, 24) and o.transpose(1, 2).is_contiguous()


def test_the_default_scale_is_one_over_the_root_of_dim():
    q, k, v = draw((1, 2, 5, 64), (1, 2, 7, 64), (1, 2, 7, 64))
    assert torch.equal(octet.sdpa(q, k, v), octet.sdpa(q, k, v, scale=0.125))
    torch.testing.assert_close(octet.sdpa(q, k, v), own(q, k, v))


@pytest.mark.parametrize("dtype, precision", [("float32", None), ("float16", None), ("bfloat16", None)])
def test_other_types_are_within_their_rounding(dtype, precision):
    q, k, v = (x.to(getattr(torch, dtype)) for x in draw((2, 3, 33, 64), (2, 3, 40, 64), (2, 3, 40, 64)))
    want = own(q.double(), k.double(), v.double(), is_causal=True)
    numbers = [x.double().numpy() for x in (q, k, v)]
    got = octet.sdpa(q, k, v, is_causal=True, precision=precision)
    assert got.dtype == q.dtype
    expect_close(got.double().numpy(), want.numpy(), bounds(*numbers, **rounding(dtype))["o"], dtype)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_cases(data):
    draw_ = data.draw
    lead = draw_(st.sampled_from([(), (2,), (2, 3), (1, 2)]))
    kv_heads, group = draw_(st.integers(1, 3)), draw_(st.integers(1, 3))
    queries, keys = draw_(st.integers(1, 40)), draw_(st.integers(1, 40))
    dim, dim_v = (8 * draw_(st.integers(1, 4)) for _ in range(2))
    torch.manual_seed(draw_(st.integers(0, 2**31)))
    dtype = draw_(st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]))
    heads = (kv_heads * group, queries, dim), (kv_heads, keys, dim), (kv_heads, keys, dim_v)
    q, k, v = (torch.randn(*lead, *shape).to(dtype) for shape in heads)
    if draw_(st.booleans()):  # as a projection of [..., token, heads, dim] leaves them
        q, k, v = (x.transpose(-2, -3).contiguous().transpose(-2, -3) for x in (q, k, v))
    mask, causal = None, False
    kind = draw_(st.sampled_from(["none", "causal", "bool", "float"]))
    if kind == "causal":
        causal = True
    elif kind != "none":
        full = (*lead, kv_heads * group, queries, keys)
        shape = tuple(n if draw_(st.booleans()) else 1 for n in full)[draw_(st.integers(0, len(full) - 2)) :]
        mask = torch.rand(shape) < 0.6
        if kind == "float":
            mask = torch.randn(shape).masked_fill(~mask, -torch.inf)
    agree(q, k, v, mask, is_causal=causal, enable_gqa=group > 1)


def test_what_octet_does_not_do_is_rejected():
    q = torch.randn(1, 2, 5, 16)
    with pytest.raises(octet.InvalidArgument, match="dropout_p: found 1, allowed: 0 for none, or "):
        octet.sdpa(q, q, q, dropout_p=1)
    with pytest.raises(octet.InvalidArgument, match="attn_mask: given together with is_causal"):
        octet.sdpa(q, q, q, torch.ones(5, 5, dtype=torch.bool), is_causal=True)
    with pytest.raises(octet.InvalidArgument, match="query: found nested"):
        nested = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(2, 16)], layout=torch.jagged)
        octet.sdpa(nested, nested, nested)
    with pytest.raises(octet.InvalidArgument, match="head dim 513, allowed: 1 to 512"):
        octet.sdpa(*[torch.randn(1, 2, 5, 513)] * 3)
    with pytest.raises(octet.InvalidArgument, match="key: found 1 dimensions"):
        octet.sdpa(q, q[0, 0, 0], q)


def test_patch_sdpa_lasts_as_long_as_its_context():
    q = torch.randn(1, 2, 64, 16)
    functional = torch.nn.functional
    with octet.patch_sdpa("int8"):
        assert torch.equal(functional.scaled_dot_product_attention(q, q, q), octet.attention(q, q, q, precision="int8"))
    assert functional.scaled_dot_product_attention is own
    with pytest.raises(RuntimeError, match="inside"), octet.patch_sdpa():
        raise RuntimeError("inside")
    assert functional.scaled_dot_product_attention is own


def test_patch_sdpa_falls_back_only_when_told_and_warns_once_per_reason():
    q, odd = torch.randn(1, 2, 64, 16), torch.randn(1, 2, 64, 520)
    attend = torch.nn.functional
    with octet.patch_sdpa(), pytest.raises(octet.InvalidArgument, match="dropout_p"):
        attend.scaled_dot_product_attention(q, q, q, dropout_p=1.0)
    with warnings.catch_warnings(record=True) as caught, octet.patch_sdpa(fallback="sdpa"):
        warnings.simplefilter("always")
        for _ in range(3):
            assert torch.equal(attend.scaled_dot_product_attention(odd, odd, odd), own(odd, odd, odd))
            attend.scaled_dot_product_attention(q, q, q, dropout_p=1.0)
    assert len(caught) == 2 and "octet leaves this call to torch: q: head dim 520" in str(caught[0].message)
    with octet.patch_sdpa("int8", min_seqlen=65):
        assert torch.equal(attend.scaled_dot_product_attention(q, q, q), own(q, q, q))
    with pytest.raises(octet.InvalidArgument, match="fallback: found 'none', allowed: 'error', 'sdpa'"):
        with octet.patch_sdpa(fallback="none"):
            pass


def test_a_model_trains_under_patch_sdpa():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    x = torch.randn(2, 24, 32)

    def gradients():
        layer.zero_grad()
        layer(x).square().sum().backward()
        return [p.grad.clone() for p in layer.parameters()]

    want = gradients()
    with octet.patch_sdpa("f32"):
        functional, name = torch.nn.functional, "scaled_dot_product_attention"
        with mock.patch.object(functional, name, side_effect=getattr(functional, name)) as patched:
            got = gradients()
    assert patched.called
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "q, k, v",
    [((5, 16), (1, 7, 16), (1, 7, 16)), ((5, 16), (7, 16), (1, 7, 16)), ((1, 5, 16), (7, 16), (7, 16)),
     ((5, 16), (3, 7, 16), (3, 7, 16)), ((5, 16), (2, 3, 7, 16), (7, 16))],
)  # fmt: skip
def test_the_result_has_the_dimensions_of_the_widest(q, k, v):
    x = draw(q, k, v)
    assert agree(*x).shape == own(*x).shape


@pytest.mark.parametrize("enable_gqa", [False, True])
@pytest.mark.parametrize("heads", [*itertools.product([1, 2, 4, 8], repeat=3)], ids=str)
def test_heads_broadcast_where_torch_has_them_broadcast(heads, enable_gqa):
    """All that torch computes, with its gradients; all that it rejects."""
    q, k, v = (x.requires_grad_() for x in draw(*[(2, h, n, 16) for h, n in zip(heads, (5, 7, 7), strict=True)]))
    try:
        want = own(q, k, v, scale=SCALE, enable_gqa=enable_gqa)
    except RuntimeError:
        with pytest.raises(octet.InvalidArgument, match="heads"):
            octet.sdpa(q, k, v, enable_gqa=enable_gqa)
        return
    got = agree(q, k, v, enable_gqa=enable_gqa)
    do = torch.randn_like(want)
    for x, y in zip(*(torch.autograd.grad(o, (q, k, v), do) for o in (got, want)), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_masks_of_broadcast_heads():
    q, k, v = draw((2, 1, 5, 16), (2, 4, 7, 16), (2, 1, 7, 16))
    for shape in ((5, 7), (4, 5, 7), (2, 1, 5, 7), (2, 4, 1, 7)):
        agree(q, k, v, torch.rand(shape) < 0.6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
def test_a_position_bias_for_each_head(dtype, batch):
    """As T5 gives it: an expanded view of [queries, keys, heads] in the type of q, the padding at the type's lowest
    number, no scale."""
    q, k, v = (x.to(dtype) for x in draw((2, 3, 5, 16), (2, 3, 7, 16), (2, 3, 7, 16)))
    bias = torch.randn(5, 7, 3).permute(2, 0, 1)[None].expand(batch, -1, -1, -1).to(dtype)
    padding = torch.zeros(batch, 1, 1, 7, dtype=dtype)
    padding[-1, ..., 5:] = torch.finfo(dtype).min
    for mask in (bias, bias + padding):
        agree(q, k, v, mask, scale=1.0)


BIASES = [("causal_upper_left", "top_left"), ("causal_lower_right", "bottom_right")]


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("queries, keys", [(7, 7), (5, 9), (9, 5)])
@pytest.mark.parametrize("name, alignment", BIASES)
def test_causal_biases_are_obeyed(name, alignment, queries, keys, patched):
    """The memory of a CausalBias is never written; torch materialises the mask."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own gives NaN to queries that see nothing
        bias = getattr(torch.nn.attention.bias, name)(queries, keys)
    q, k, v = (x.requires_grad_() for x in draw((2, 3, queries, 16), (2, 3, keys, 16), (2, 3, keys, 16)))
    with octet.patch_sdpa() if patched else contextlib.nullcontext():
        attend = torch.nn.functional.scaled_dot_product_attention if patched else octet.sdpa
        got = attend(q, k, v, bias)
        with pytest.raises(octet.InvalidArgument, match="attn_mask: given together with is_causal"):
            attend(q, k, v, bias, is_causal=True)
        with pytest.raises(octet.InvalidArgument, match=f"a CausalBias of {queries} queries and {keys} keys, but .* 1"):
            attend(q[:, :, :1], k, v, bias)
    assert torch.equal(got, octet.attention(q, k, v, causal=alignment))
    want = octet.attention(q, k, v, mask=bias._materialize())
    do = torch.randn_like(want)
    for x, y in zip(*(torch.autograd.grad(o, (q, k, v), do) for o in (got, want)), strict=True):
        torch.testing.assert_close(x, y)


def test_other_functions_reject_a_causal_bias():
    q = torch.randn(1, 2, 7, 16).requires_grad_()
    bias, x = torch.nn.attention.bias.causal_lower_right(7, 7), [q.detach()] * 3
    for call in (
        lambda: octet.attention(q, q, q, mask=bias),
        lambda: octet.attention(*x, mask=bias),
        lambda: octet.attention_vjp(*x, x[0], mask=bias),
        lambda: octet.attention_jvp(*x, *x, mask=bias),
    ):
        with pytest.raises(octet.InvalidArgument, match="mask: a CausalBias, which has no numbers; use causal="):
            call()


class Listening(torch.Tensor):
    """A subclass that answers for scaled_dot_product_attention."""

    heard: list = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (octet.sdpa, torch.nn.functional.scaled_dot_product_attention):
            cls.heard.append((func, args, kwargs))
            return "its own"
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("patched", [False, True])
def test_a_subclass_with_a_torch_function_is_asked(patched, which):
    given = [*draw((2, 3, 5, 16), (2, 3, 5, 16), (2, 3, 5, 16)), torch.zeros(5, 5)]
    given[which] = given[which].as_subclass(Listening)
    Listening.heard.clear()
    with octet.patch_sdpa() if patched else contextlib.nullcontext():
        attend = torch.nn.functional.scaled_dot_product_attention if patched else octet.sdpa
        assert attend(*given, scale=0.5) == "its own"
    ((function, args, kwargs),) = Listening.heard
    assert function is attend and all(x is y for x, y in zip(args, given, strict=False)) and kwargs["scale"] == 0.5


@pytest.mark.parametrize("patched", [False, True])
def test_modes_of_functions_are_asked(patched):
    class Counting(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            heard.append(func)
            return func(*args, **(kwargs or {}))

    heard = []
    x = [y.float() for y in draw(*[(2, 3, 5, 16)] * 3)]
    with octet.patch_sdpa("int8") if patched else contextlib.nullcontext():
        attend = torch.nn.functional.scaled_dot_product_attention if patched else octet.sdpa
        for _ in range(2):
            with Counting():
                o = attend(*x)
            assert heard.count(attend) == 1 and torch.equal(o, attend(*x))
            heard.clear()
        with torch.device("cpu"):  # a mode too, as torch.set_default_device is
            assert torch.equal(attend(*x), o)


def test_modes_of_operators_hear_octets():
    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            heard.append(str(func))
            return func(*args, **(kwargs or {}))

    heard = []
    q = torch.randn(1, 2, 64, 16)
    with octet.patch_sdpa("int8"):
        for _ in range(2):
            want = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        with Counting():
            got = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert torch.equal(got, want)
    assert heard == ["octet.forward.default"]


def test_contexts_of_patch_sdpa_may_end_in_any_order():
    q = torch.randn(1, 2, 64, 16)
    functional = torch.nn.functional

    def precision_now():
        o = functional.scaled_dot_product_attention(q, q, q)
        same = [p for p in ("f32", "int8") if torch.equal(o, octet.attention(q, q, q, precision=p))]
        return same[0] if same else "own" if torch.equal(o, own(q, q, q)) else None

    for order in itertools.permutations(range(3)):
        last = ["f32", "int8", "f32"]
        contexts = [octet.patch_sdpa(precision) for precision in last]
        for context in contexts:
            context.__enter__()
        taken = functional.scaled_dot_product_attention
        for i in order:
            contexts[i].__exit__(None, None, None)
            last[i] = None
            assert precision_now() == next((p for p in reversed(last) if p), "own")
        assert functional.scaled_dot_product_attention is own
        assert torch.equal(taken(q, q, q), own(q, q, q))  # a function that outlives its context


def test_threads_may_leave_patch_sdpa_crosswise():
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))

    def first():
        with octet.patch_sdpa("int8"):
            first_is_in.set()
            assert second_is_in.wait(30)
        first_is_out.set()

    def second():
        assert first_is_in.wait(30)
        with octet.patch_sdpa("f32"):
            second_is_in.set()
            assert first_is_out.wait(30)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(first), pool.submit(second)]:
            done.result()
    assert torch.nn.functional.scaled_dot_product_attention is own


def test_another_patch_over_this_one_stays():
    q = torch.randn(1, 2, 64, 16)
    functional, calls = torch.nn.functional, []
    context = octet.patch_sdpa("int8")
    context.__enter__()
    below = functional.scaled_dot_product_attention
    with mock.patch.object(functional, "scaled_dot_product_attention", lambda *x: calls.append(1) or below(*x)):
        context.__exit__(None, None, None)
        assert torch.equal(functional.scaled_dot_product_attention(q, q, q), own(q, q, q)) and calls
    functional.scaled_dot_product_attention = own


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_fall_back(layout):
    nested = torch.nested.nested_tensor([torch.randn(2, n, 16) for n in (3, 5)])
    if layout is torch.jagged:
        parts = [x.transpose(0, 1) for x in nested.unbind()]
        nested = torch.nested.nested_tensor(parts, layout=layout).transpose(1, 2)
    want = own(nested, nested, nested)
    with octet.patch_sdpa(min_seqlen=4), pytest.raises(octet.InvalidArgument, match="query: found nested"):
        torch.nn.functional.scaled_dot_product_attention(nested, nested, nested)
    with octet.patch_sdpa(min_seqlen=4, fallback="sdpa"), pytest.warns(UserWarning, match="query: found nested"):
        got = torch.nn.functional.scaled_dot_product_attention(nested, nested, nested)
    for x, y in zip(got.unbind(), want.unbind(), strict=True):
        assert torch.equal(x, y)


def test_compiled_under_patch_sdpa():
    """With a CausalBias too: what a call is about is known when it is compiled."""
    x = [y.float() for y in draw(*[(1, 2, 64, 16)] * 3)]
    bias = torch.nn.attention.bias.causal_lower_right(64, 64)
    with octet.patch_sdpa("int8"):
        call = lambda *x: torch.nn.functional.scaled_dot_product_attention(*x) + 1
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        for mask in (None, bias):
            assert torch.equal(compiled(*x, mask), call(*x, mask))
