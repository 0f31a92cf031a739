"""Grouped heads, and tensors of one layout beside those of the other: what is taken, and what is rejected as a slip."""

import importlib.util
import itertools

import numpy as np
import octet
import pytest

RANDOM = np.random.default_rng(5)
SIGNS = ("swapped", "enable_gqa=True")


def draw(*shape):
    return RANDOM.standard_normal(shape).astype(np.float32)


def numpy_array(x):
    return x


def torch_array(x):
    return pytest.importorskip("torch").from_numpy(x)


def jax_array(x):
    return pytest.importorskip("jax").numpy.asarray(x)


ARRAYS = pytest.mark.parametrize("array", [numpy_array, torch_array, jax_array])
# (q, k) where q has its heads and tokens swapped beside k, and the reverse.
Q_SWAPPED = [((2, 100, 8, 64), (2, 4, 100, 64)), ((1, 64, 8, 16), (1, 8, 64, 16)), ((1, 24, 6, 8), (1, 1, 24, 8))]
K_SWAPPED = [((1, 32, 16, 8), (1, 16, 8, 8)), ((2, 12, 6, 8), (2, 6, 3, 8))]
SLIPS = pytest.mark.parametrize("q_shape, k_shape", Q_SWAPPED + K_SWAPPED)


def rejected(call, *parts):
    with pytest.raises(octet.errors.InvalidArgument) as caught:
        call()
    for part in (*SIGNS, *parts):
        assert part in str(caught.value), str(caught.value)
    return str(caught.value)


@ARRAYS
@SLIPS
def test_one_layout_beside_the_other_is_rejected(array, q_shape, k_shape):
    q, k, v = array(draw(*q_shape)), array(draw(*k_shape)), array(draw(*k_shape))
    b, h, t, d = q_shape
    as_given = f"q [batch {b}, head {h}, token {t}, dim {d}]"
    rejected(lambda: octet.attention(q, k, v), as_given)
    rejected(lambda: octet.attention(q, k, v, causal="bottom_right"), as_given)
    rejected(lambda: octet.attention_vjp(q, k, v, q), as_given)
    rejected(lambda: octet.attention_jvp(q, k, v, q, k, v), as_given)
    rejected(lambda: octet.check(q, k, v), as_given)
    rejected(lambda: octet.explain(q, k, v), as_given)
    support = octet.supports(q, k, v)
    assert not support and as_given in support.reason
    swap = lambda x: x.swapaxes(1, 2)  # the same slip of a call in the other layout
    rejected(lambda: octet.attention(swap(q), swap(k), swap(v), layout="bshd"), as_given)


@ARRAYS
@SLIPS
def test_shapes_that_are_meant_are_computed(array, q_shape, k_shape):
    plain = draw(*q_shape), draw(*k_shape), draw(*k_shape)
    q, k, v = map(array, plain)
    group = q_shape[1] // k_shape[1]
    repeated = [np.repeat(x, group, axis=1) for x in plain[1:]]
    want = octet.attention(plain[0], *repeated, precision="f64")
    got = np.asarray(octet.attention(q, k, v, enable_gqa=True))
    assert np.linalg.norm(got - want) < 1e-2 * np.linalg.norm(want)  # f32 errs by 0.002 (README), a wrong head by 1
    assert octet.supports(q, k, v, enable_gqa=True)
    found = octet.check(q, k, v, do=q, enable_gqa=True)
    assert found["o"].rel_l2 < 1e-2


def test_both_readings_are_shown():
    q, k = draw(2, 100, 8, 64), draw(2, 4, 100, 64)
    message = rejected(lambda: octet.attention(q, k, k))
    assert "k [batch 2, head 4, token 100, dim 64]" in message
    assert "q would be [batch 2, head 8, token 100, dim 64]" in message
    q, k = draw(1, 32, 16, 8), draw(1, 16, 8, 8)
    message = rejected(lambda: octet.attention(q, k, k))
    assert "k would be [batch 1, head 8, token 16, dim 8]" in message


def test_enable_gqa_false_wants_as_many_heads():
    q, k = draw(1, 4, 5, 8), draw(1, 2, 5, 8)
    octet.attention(q, q, q, enable_gqa=False)
    octet.attention(q, k, k)
    with pytest.raises(octet.errors.InvalidArgument, match="enable_gqa: False, but q has 4 heads and k 2"):
        octet.attention(q, k, k, enable_gqa=False)
    cu = np.array([0, 5], np.int32)
    packed = [x[0].swapaxes(0, 1) for x in (q, k, k)]
    with pytest.raises(octet.errors.InvalidArgument, match="enable_gqa: False, but q has 4 heads and k 2"):
        octet.attention_varlen(*packed, cu, cu, enable_gqa=False)
    with pytest.raises(octet.errors.InvalidArgument, match="enable_gqa: found 2"):
        octet.attention(q, k, k, enable_gqa=2)


def test_operands_that_name_the_sizes_settle_them():
    """Sinks and slopes have the heads of q, a mask has its queries and keys, and lengths have the tokens."""
    q, k = draw(1, 24, 6, 8), draw(1, 2, 24, 8)
    rejected(lambda: octet.attention(q, k, k))
    octet.attention(q, k, k, sinks=draw(24))
    octet.attention(q, k, k, alibi_slopes=draw(24))
    octet.attention(q, k, k, mask=np.ones((6, 24), bool))
    rejected(lambda: octet.attention(q, k, k, mask=np.ones((1, 24), bool)))  # so far also of 24 queries
    cu = np.array([0, 6], np.int32), np.array([0, 24], np.int32)
    packed = [x[0].swapaxes(0, 1) for x in (q, k, k)]
    octet.attention_varlen(*packed, *cu)
    q, k = draw(2, 12, 6, 8), draw(2, 6, 3, 8)
    rejected(lambda: octet.attention(q, k, k, sinks=draw(12)))  # q is right in both readings
    octet.attention(q, k, k, mask=np.ones((6, 3), bool))


# Heads and heads of k and v of models: Llama 2 70B, 3 8B, 3.2 1B and 3B, 3 405B; Mistral 7B, Qwen 2.5 0.5B, 1.5B, 7B,
# 32B; Gemma 2B, 2 9B, 2 27B, 3 1B, 3 27B; Phi 3 medium; gpt-oss; Falcon 7B and 40B; StarCoder 2; GLM 4; Granite.
MODELS = [
    *[(64, 8), (32, 8), (24, 8), (128, 8), (14, 2), (12, 2), (28, 4), (40, 8), (8, 1), (16, 8), (32, 16), (4, 1)],
    *[(40, 10), (71, 1), (128, 8), (36, 4), (48, 4), (32, 2), (96, 8), (16, 2), (8, 4), (8, 2), (32, 4)],
]
COUNTS = [*range(1, 41), 47, 48, 49, 63, 64, 65, 71, 72, 96, 127, 128, 129, 256, 1000, 4096]


def is_accepted(heads, kv_heads, queries, keys):
    q = np.lib.stride_tricks.as_strided(np.zeros(8, np.float32), (1, heads, queries, 8), (0, 0, 0, 4))
    k = np.lib.stride_tricks.as_strided(np.zeros(8, np.float32), (1, kv_heads, keys, 8), (0, 0, 0, 4))
    support = octet.supports(q, k, k)
    assert support or "swapped" in support.reason, support.reason
    return bool(support)


@pytest.mark.parametrize("heads, kv_heads", MODELS)
def test_models_decode_and_prefill(heads, kv_heads):
    """A prompt, and one token at a time over any number of keys, those that equal a number of heads among them."""
    for tokens in COUNTS:
        assert is_accepted(heads, kv_heads, tokens, tokens), tokens
        assert is_accepted(heads, kv_heads, 1, tokens), tokens


@pytest.mark.parametrize("heads, kv_heads", [(32, 8), (64, 8), (14, 2), (8, 1)])
def test_several_queries_over_more_keys_are_rejected_as_documented(heads, kv_heads):
    """docs/python.md states these shapes: as many keys as q has heads and queries in a multiple of kv_heads, or as many
    queries as kv_heads and keys that divide heads."""
    for queries, keys in itertools.product(COUNTS[1:], COUNTS):
        if queries == keys:
            continue
        q_swapped = keys == heads and queries % kv_heads == 0 and queries != heads
        k_swapped = queries == kv_heads and heads % keys == 0
        assert is_accepted(heads, kv_heads, queries, keys) == (not (q_swapped or k_swapped)), (queries, keys)


torch_only = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


@torch_only
def test_sdpa_takes_enable_gqa_as_meant_and_says_more_without():
    q, k = torch_array(draw(2, 100, 8, 64)), torch_array(draw(2, 4, 100, 64))
    with pytest.raises(octet.errors.InvalidArgument, match=r"100 heads.*4.*\[..., head, token, dim\]"):
        octet.sdpa(q, k, k)
    assert octet.sdpa(q, k, k, enable_gqa=True).shape == q.shape
    q, k = torch_array(draw(1, 24, 6, 8)), torch_array(draw(1, 1, 24, 8))  # single heads broadcast, as torch has it
    assert octet.sdpa(q, k, k).shape == q.shape


@torch_only
def test_drop_ins_whose_layout_is_fixed_mean_their_shapes():
    from octet.compat.flash_attn import flash_attn_func
    from octet.compat.sageattention import sageattn

    q, k = torch_array(draw(1, 64, 16, 64)), torch_array(draw(1, 8, 64, 64))
    assert sageattn(q, k, k).shape == q.shape
    q, k = (x.transpose(1, 2).contiguous() for x in (q, k))
    assert flash_attn_func(q, k, k).shape == q.shape


@torch_only
def test_compiled_and_differentiated_calls_reject_the_slip_and_take_what_is_meant():
    torch = pytest.importorskip("torch")
    q, k = torch_array(draw(2, 100, 8, 16)).requires_grad_(), torch_array(draw(2, 4, 100, 16))
    rejected(lambda: octet.attention(q, k, k))
    octet.attention(q, k, k, enable_gqa=True).sum().backward()
    assert q.grad is not None and torch.isfinite(q.grad).all()
    compiled = torch.compile(lambda q, k, meant: octet.attention(q, k, k, enable_gqa=meant), backend="aot_eager")
    with pytest.raises(Exception, match="swapped"):
        compiled(q.detach(), k, None)
    assert compiled(q.detach(), k, True).shape == q.shape


@torch_only
def test_symbolic_sizes_are_not_compared():
    """A comparison would be a guard: the program would be compiled again for as many keys as heads."""
    torch = pytest.importorskip("torch")
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k: octet.attention(q, k, k), backend="eager", dynamic=True, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for queries, keys in ((6, 23), (10, 19), (6, 24), (20, 24)):
            q, k = torch_array(draw(3, 24, queries, 16)), torch_array(draw(3, 2, keys, 16))
            torch._dynamo.maybe_mark_dynamic(q, 2)
            assert compiled(q, k).shape == q.shape


def test_jax_programs_reject_the_slip_and_take_what_is_meant():
    jax = pytest.importorskip("jax")
    q, k = jax_array(draw(2, 100, 8, 16)), jax_array(draw(2, 4, 100, 16))
    rejected(lambda: jax.jit(octet.attention)(q, k, k))
    meant = lambda q: octet.attention(q, k, k, enable_gqa=True).sum()
    assert jax.jit(jax.grad(meant))(q).shape == q.shape
