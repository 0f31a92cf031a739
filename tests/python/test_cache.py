"""octet.attention_cached on numpy's arrays: batches of one length, pages in any order, packed queries."""

import itertools

import numpy as np
import octet
import pytest
from caches import exact, in_pages

HEADS, KV_HEADS, DIM = 4, 2, 40
LENGTHS = [70, 0, 16, 33]


def problem(queries=3, seed=0):
    random = np.random.default_rng(seed)
    q = random.standard_normal((len(LENGTHS), queries, HEADS, DIM)).astype(np.float32)
    keys, values = ([random.standard_normal((m, KV_HEADS, DIM)).astype(np.float32) for m in LENGTHS] for _ in "kv")
    return q, keys, values


def lengths():
    return np.array(LENGTHS, np.int32)


def wanted(q, keys, values, **how):
    pairs = [exact(*x, **how) for x in zip(q, keys, values, strict=True)]
    return np.stack([o for o, _ in pairs]), np.stack([lse for _, lse in pairs])


def expect_close(found, want):
    for x, y in zip(found, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_lengths_of_a_batch(layout):
    q, keys, values = problem()
    cache = [np.full((len(LENGTHS), 80, KV_HEADS, DIM), np.nan, np.float32) for _ in "kv"]
    for of, tensors in zip(cache, (keys, values), strict=True):
        for s, x in enumerate(tensors):
            of[s, : len(x)] = x
    given = [x.swapaxes(1, 2) if layout == "bhsd" else x for x in (q, *cache)]
    o, lse = octet.attention_cached(*given, lengths(), causal="bottom_right", return_lse=True, layout=layout)
    expect_close((o.swapaxes(1, 2) if layout == "bhsd" else o, lse), wanted(q, keys, values, causal=True))


@pytest.mark.parametrize("page_size", [16, 64])
def test_pages(page_size):
    q, keys, values = problem()
    k, table = in_pages(keys, page_size)
    v, _ = in_pages(values, page_size)
    how = {"softcap": 3.0, "sinks": np.array([0.5, -1, 2, 0], np.float32)}
    slopes = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
    found = octet.attention_cached(
        q, k, v, lengths(), block_table=table, window=(20, 0), alignment="bottom_right", alibi_slopes=slopes,
        layout="bshd", return_lse=True, max_seqlen_k=70, **how,
    )  # fmt: skip
    expect_close(found, wanted(q, keys, values, window=(20, 0), slopes=slopes, **how))


def test_packed_queries():
    q, keys, values = problem(queries=6)
    k, table = in_pages(keys, 16)
    v, _ = in_pages(values, 16)
    counts = [1, 4, 0, 6]
    rows = [x[:n] for x, n in zip(q, counts, strict=True)]
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    o, lse = octet.attention_cached(
        np.concatenate(rows), k, v, lengths(), block_table=table, cu_seqlens_q=starts, max_seqlen_q=6,
        causal="bottom_right", return_lse=True,
    )  # fmt: skip
    pairs = [exact(*x, causal=True) for x in zip(rows, keys, values, strict=True)]
    expect_close((o, lse), (np.concatenate([x for x, _ in pairs]), np.concatenate([x for _, x in pairs], 1)))


def test_caches_in_another_order():
    """A page for each sequence, of any number of tokens: the batch elements of a cache by their numbers."""
    q, keys, values = problem()
    k, v = (np.stack([np.pad(x, ((0, 71 - len(x)), (0, 0), (0, 0))) for x in tensors]) for tensors in (keys, values))
    place = np.array([2, 3, 0, 1], np.int32)
    found = octet.attention_cached(
        q, k[place], v[place], lengths(), block_table=np.argsort(place).astype(np.int32)[:, None], layout="bshd",
        return_lse=True,
    )  # fmt: skip
    expect_close(found, wanted(q, keys, values))


def test_rejections():
    q, keys, values = problem()
    k, table = in_pages(keys, 16)
    v, _ = in_pages(values, 16)

    def call(*args, **keywords):
        return octet.attention_cached(*args, layout="bshd", **keywords)

    with pytest.raises(octet.InvalidArgument, match="seqused_k: 81 keys of sequence 0, allowed: 0 to 80"):
        call(q, k, v, lengths() + np.int32([11, 0, 0, 0]), block_table=table[:, :5])
    with pytest.raises(octet.InvalidArgument, match="block_table: page -1 in column 5 of sequence 0"):
        call(q, k, v, lengths() + np.int32([20, 0, 0, 0]), block_table=table)
    with pytest.raises(octet.InvalidArgument, match=r"block_table: shape \[6\], expected 2 dimensions"):
        call(q, k, v, lengths(), block_table=table[0])
    with pytest.raises(octet.InvalidArgument, match="alignment: unspecified, but seqused_k has the lengths of k"):
        call(q, k, v, lengths(), block_table=table, causal=True)
    with pytest.raises(octet.InvalidArgument, match=r"q: shape \[4, 3, 4, 40\], expected \[token, head, dim\]"):
        octet.attention_cached(q, k, v, lengths(), block_table=table, cu_seqlens_q=np.zeros(5, np.int32))
    with pytest.raises(octet.InvalidArgument, match="layout: 'bshd' given, but packed sequences"):
        call(q[0], k, v, lengths(), block_table=table, cu_seqlens_q=np.zeros(5, np.int32))


def turned(x, positions, base=10000.0, interleaved=False):
    """x [tokens, heads, dim] by RoPE at positions, in float64."""
    x, half = np.asarray(x, np.float64), x.shape[-1] // 2
    angles = (positions[:, None] * base ** (-np.arange(half) / half))[:, None]
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    pair = a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)
    return np.stack(pair, -1).reshape(x.shape) if interleaved else np.concatenate(pair, -1)


@pytest.mark.parametrize("rope", ["none", "half", "interleaved"])
@pytest.mark.parametrize("by_tables", [False, True])
def test_append(rope, by_tables):
    """Two steps of a decoder: what is appended is what the next attention reads."""
    random = np.random.default_rng(4)
    tokens = [random.standard_normal((m + 3, KV_HEADS, DIM)).astype(np.float32) for m in LENGTHS]
    more = [random.standard_normal((m + 3, KV_HEADS, DIM)).astype(np.float32) for m in LENGTHS]
    k, table = in_pages([x[:m] for x, m in zip(tokens, LENGTHS, strict=True)], 16)
    v, _ = in_pages([x[:m] for x, m in zip(more, LENGTHS, strict=True)], 16)
    k, v, table = np.concatenate([k, k[:4] * np.nan]), np.concatenate([v, v[:4] * np.nan]), table.copy()
    free = iter(range(len(k) - 4, len(k)))
    for s, m in enumerate(LENGTHS):  # room for three more tokens of each
        if -(-m // 16) != -(-(m + 3) // 16):
            table[s, -(-m // 16)] = next(free)
    new_k, new_v = (np.stack([x[m:] for x, m in zip(of, LENGTHS, strict=True)]) for of in (tokens, more))
    q = random.standard_normal((len(LENGTHS), 3, HEADS, DIM)).astype(np.float32)
    how = {}
    if rope != "none":
        how = {"rope": rope, "q": q}
        if by_tables:
            angles = np.arange(100)[:, None] * 10000.0 ** (-np.arange(DIM // 2) / (DIM // 2))
            how |= {"rope_cos": np.cos(angles).astype(np.float32), "rope_sin": np.sin(angles).astype(np.float32)}
    found = octet.append(k, v, new_k, new_v, lengths(), block_table=table, layout="bshd", **how)
    positions = [np.arange(m, m + 3) for m in LENGTHS]
    if rope != "none":
        interleaved = rope == "interleaved"
        for x, m, at in zip(tokens, LENGTHS, positions, strict=True):
            x[m:] = turned(x[m:], at, interleaved=interleaved)
        want_q = np.stack([turned(x, at, interleaved=interleaved) for x, at in zip(q, positions, strict=True)])
        np.testing.assert_allclose(found, want_q, rtol=1e-5, atol=1e-5)
        q = found
    else:
        assert found is None
    all_lengths = lengths() + np.int32(3)
    made = octet.attention_cached(
        q, k, v, all_lengths, block_table=table, causal="bottom_right", layout="bshd", return_lse=True
    )
    expect_close(made, wanted(q, tokens, more, causal=True))


@pytest.mark.parametrize("codes", [None, "i8"])
def test_append_of_packed_tokens(codes):
    """A batch whose sequences have any number of new tokens: the bits of sequences that are appended one by one, and
    what the next attention reads."""
    random = np.random.default_rng(9)
    counts, table = [1, 4, 0, 20], np.random.default_rng(1).permutation(24).reshape(4, 6).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    tokens, more = (
        [
            random.standard_normal((m + n, KV_HEADS, DIM)).astype(np.float32)
            for m, n in zip(LENGTHS, counts, strict=True)
        ]
        for _ in "kv"
    )
    q = random.standard_normal((sum(counts), HEADS, DIM)).astype(np.float32)

    def caches():
        pages = np.zeros((24, 16, KV_HEADS, DIM), np.float32)
        return [octet.quantize(pages, x, format=codes, layout="bshd") if codes else pages.copy() for x in "kv"]

    one_by_one, packed = caches(), caches()
    turned_one_by_one = []
    for s, (m, n) in enumerate(zip(LENGTHS, counts, strict=True)):
        at = {"block_table": table[s : s + 1], "layout": "bshd"}
        for cache in one_by_one, packed:
            octet.append(*cache, tokens[s][None, :m], more[s][None, :m], np.zeros(1, np.int32), rope="half", **at)
        new = tokens[s][None, m:], more[s][None, m:], np.array([m], np.int32)
        rows = q[None, starts[s] : starts[s] + n]
        turned_one_by_one.append(octet.append(*one_by_one, *new, rope="half", q=rows, **at)[0])
    new = (np.concatenate([x[m:] for x, m in zip(of, LENGTHS, strict=True)]) for of in (tokens, more))
    found = octet.append(*packed, *new, lengths(), cu_seqlens=starts, block_table=table, rope="half", q=q)
    np.testing.assert_array_equal(found, np.concatenate(turned_one_by_one))
    for x, y in zip(packed, one_by_one, strict=True):
        for part in ("codes", "scale") if codes else ("data",):
            np.testing.assert_array_equal(getattr(x, part), getattr(y, part))
    o = octet.attention_cached(
        found, *packed, lengths() + np.int32(counts), block_table=table, cu_seqlens_q=starts, causal="bottom_right",
        precision="f32",
    )  # fmt: skip
    tokens = [turned(x, np.arange(len(x))) for x in tokens]
    rows = [found[a:b] for a, b in itertools.pairwise(starts)]
    want = np.concatenate([exact(*x, causal=True)[0] for x in zip(rows, tokens, more, strict=True)])
    np.testing.assert_allclose(o, want, rtol=0, atol=0.05 if codes else 2e-5)


def test_rejections_of_packed_tokens():
    cache, new = np.zeros((2, 8, KV_HEADS, DIM), np.float32), np.zeros((5, KV_HEADS, DIM), np.float32)

    def call(k=new, v=new, seqused_k=(0, 3), cu_seqlens=(0, 2, 5), **keywords):
        starts, used = (np.array(x, np.int32) for x in (cu_seqlens, seqused_k))
        octet.append(cache, cache.copy(), k, v, used, cu_seqlens=starts, **keywords)

    call()
    with pytest.raises(
        octet.InvalidArgument, match=r"k: shape \[1, 5, 2, 40\], expected \[token, head, dim\], as cu_seq"
    ):
        call(k=new[None])
    with pytest.raises(octet.InvalidArgument, match="layout: 'bshd' given, but packed sequences"):
        call(layout="bshd")
    with pytest.raises(octet.InvalidArgument, match="cu_seqlens: runs from 0 to 4, expected 0 to the 5 tokens of k"):
        call(cu_seqlens=(0, 2, 4))
    with pytest.raises(octet.InvalidArgument, match="cu_seqlens: falls from 6 to 5 at sequence 1; must ascend"):
        call(cu_seqlens=(0, 6, 5))
    with pytest.raises(octet.InvalidArgument, match="seqused_k: 6 keys of sequence 1 and 3 new ones, allowed: 0 to 8"):
        call(seqused_k=(0, 6))
    with pytest.raises(
        octet.InvalidArgument, match=r"k_cache: shape \[2, 2, 8, 40\], expected \[3, 2, 8, 40\] \(sequences"
    ):
        call(cu_seqlens=(0, 2, 3, 5))
    with pytest.raises(octet.InvalidArgument, match="cu_seqlens: dtype int64, allowed: 'int32'"):
        octet.append(cache, cache, new, new, np.zeros(2, np.int32), cu_seqlens=np.array([0, 2, 5]))


def test_append_rejections():
    _, keys, values = problem()
    k, table = in_pages(keys, 16)
    v, _ = in_pages(values, 16)
    new = np.zeros((len(LENGTHS), 1, KV_HEADS, DIM), np.float32)

    def call(**keywords):
        given = {"k_cache": k, "v_cache": v, "k": new, "v": new, "seqused_k": lengths(), "block_table": table}
        return octet.append(**given | {"layout": "bshd"} | keywords)

    before = k.tobytes()
    with pytest.raises(octet.InvalidArgument, match="block_table: page -1 in column 0 of sequence 1, allowed: 0 to"):
        call()
    with pytest.raises(
        octet.InvalidArgument, match="seqused_k: 96 keys of sequence 0 and 1 new ones, allowed: 0 to 96"
    ):
        call(seqused_k=np.array([96, 0, 0, 0], np.int32))
    with pytest.raises(octet.InvalidArgument, match="rope_cos, rope_sin: only one of them given"):
        call(rope="half", rope_cos=np.ones((100, DIM // 2), np.float32))
    with pytest.raises(octet.InvalidArgument, match="q: given without a rope"):
        call(q=new)
    with pytest.raises(octet.InvalidArgument, match="k_cache: dtype f64, allowed: f32, f16, bf16, e4m3"):
        call(k_cache=k.astype(np.float64))
    with pytest.raises(octet.InvalidArgument, match="v: shape"):
        call(v=new[:, :, :1])
    k.flags.writeable = False
    with pytest.raises(octet.InvalidArgument, match="k_cache: read-only"):
        call()
    with pytest.raises(TypeError, match="rotary: octet has no such argument"):
        call(rotary=1)
    assert k.tobytes() == before


@pytest.mark.parametrize("codes", ["i8", "e4m3"])
@pytest.mark.parametrize("in_pages_of", [0, 16])
def test_caches_in_8_bits(codes, in_pages_of):
    """Codes that octet.append writes are those that octet.quantize gives, and attention reads what they stand for."""
    random = np.random.default_rng(6)
    tokens = 37
    q = random.standard_normal((2, 3, HEADS, DIM)).astype(np.float32)
    new = [random.standard_normal((2, tokens, KV_HEADS, DIM)).astype(np.float32) for _ in "kv"]
    shape = (7, 16, KV_HEADS, DIM) if in_pages_of else (2, 50, KV_HEADS, DIM)
    k, v = (octet.quantize(np.zeros(shape, np.float32), of, format=codes, layout="bshd") for of in "kv")
    where = {"layout": "bshd"}
    if in_pages_of:
        where["block_table"] = np.array([[6, 0, 3], [5, 1, 2]], np.int32)
    none = np.zeros(2, np.int32)
    assert octet.append(k, v, *new, none, **where) is None
    numbers = [
        octet.dequantize(octet.quantize(x, of, format=codes, layout="bshd")) for x, of in zip(new, "kv", strict=True)
    ]
    o, lse = octet.attention_cached(
        q, k, v, none + np.int32(tokens), causal="bottom_right", precision="f32", return_lse=True, **where
    )
    expect_close((o, lse), wanted(q, *numbers, causal=True))
    with pytest.raises(octet.InvalidArgument, match="k_cache: of layout 'bshd', but the call's is 'bhsd'"):
        octet.append(k, v, *new, none, **where | {"layout": "bhsd"})
    by_block = octet.quantize(np.zeros(shape, np.float32), "k", granularity="tensor", layout="bshd")
    with pytest.raises(octet.InvalidArgument, match=r"k_cache: a QTensor of Coding\(operand=1, granularity=0"):
        octet.append(by_block, v, *new, none, **where)
    if in_pages_of:
        with pytest.raises(octet.InvalidArgument, match="k: quantized per tensor; allowed with block_table: per token"):
            octet.attention_cached(q, by_block, v, none, precision="f32", **where)


def test_check_measures_a_call_with_a_cache():
    q, keys, values = problem()
    cache = [np.zeros((len(LENGTHS), 80, KV_HEADS, DIM), np.float32) for _ in "kv"]
    for of, tensors in zip(cache, (keys, values), strict=True):
        for s, x in enumerate(tensors):
            of[s, : len(x)] = x
    how = {"seqused_k": lengths(), "layout": "bshd"}
    assert octet.check(q, *cache, precision="f64", **how)["o"].rel_l2 < 2**-24  # o is rounded to float32
    found = octet.check(q, *cache, precision="bf16", **how)
    assert list(found) == ["o", "lse"] and 0 < found["o"].rel_l2 < 2**-7
    q_heads = q.transpose(0, 2, 1, 3)
    k_heads, v_heads = (x.transpose(0, 2, 1, 3).copy() for x in cache)
    given = {"seqused_k": lengths(), "block_table": np.arange(len(LENGTHS), dtype=np.int32)[:, None]}
    of_pages = octet.check(q_heads, k_heads, v_heads, precision="bf16", **given)
    assert of_pages["o"].rel_l2 == pytest.approx(found["o"].rel_l2, rel=1e-6)
    for name, more in (("do", {"do": q}), ("tangents", {"tangents": (q, *cache)})):
        with pytest.raises(octet.Unsupported, match=f"{name}: given with seqused_k, but KV caches have forward passes"):
            octet.check(q, *cache, precision="bf16", **how, **more)
