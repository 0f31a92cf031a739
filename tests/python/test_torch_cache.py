"""octet.attention_cached on tensors: eager and compiled code, operators, autocast, and what has no derivative."""

import numpy as np
import octet
import pytest
from caches import exact, in_pages

torch = pytest.importorskip("torch")

HEADS, KV_HEADS, DIM = 4, 2, 64
LENGTHS = [70, 0, 16, 33]


def tensors(page_size=16, queries=2, dtype=torch.float32):
    random = np.random.default_rng(1)
    q = random.standard_normal((len(LENGTHS), queries, HEADS, DIM)).astype(np.float32)
    keys, values = ([random.standard_normal((m, KV_HEADS, DIM)).astype(np.float32) for m in LENGTHS] for _ in "kv")
    k, table = in_pages(keys, page_size)
    v, _ = in_pages(values, page_size)
    want = np.stack([exact(*x, causal=True)[0] for x in zip(q, keys, values, strict=True)])
    given = [torch.from_numpy(x).to(dtype) for x in (q, k, v)]
    return *given, torch.tensor(LENGTHS, dtype=torch.int32), torch.from_numpy(table), torch.from_numpy(want)


def attend(q, k, v, lengths, table, **how):
    return octet.attention_cached(
        q, k, v, lengths, block_table=table, causal="bottom_right", layout="bshd", return_lse=True, **how
    )


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 2e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_eager(dtype, error):
    *given, want = tensors(dtype=dtype)
    o, lse = attend(*given)
    assert o.dtype == dtype and lse.dtype == torch.float32 and o.shape == given[0].shape
    torch.testing.assert_close(o.double(), want, rtol=error, atol=error)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for queries in (2, 5):
        *given, _ = tensors(queries=queries)
        for found, want in zip(compiled(*given), attend(*given), strict=True):
            assert torch.equal(found, want) and found.stride() == want.stride()


def test_packed_queries_compiled():
    q, k, v, lengths, table, _ = tensors(queries=3)
    starts = torch.tensor([0, 3, 6, 9, 12], dtype=torch.int32)

    def packed(q, k, v, lengths, table, starts):
        how = {"block_table": table, "cu_seqlens_q": starts, "max_seqlen_q": 3, "max_seqlen_k": 70}
        return octet.attention_cached(q, k, v, lengths, causal="bottom_right", **how)

    given = q.flatten(0, 1), k, v, lengths, table, starts
    want = attend(q, k, v, lengths, table)[0].flatten(0, 1)
    assert torch.equal(packed(*given), want)
    assert torch.equal(torch.compile(packed, fullgraph=True, backend="aot_eager")(*given), want)


def test_the_operator_is_sound():
    q, k, v, lengths, table, _ = tensors()
    given = q, k, v, False, "precision=f32 layout=bshd causal=bottom_right"
    torch.library.opcheck(
        torch.ops.octet.forward.default, given, {"seqused_k": lengths, "block_table": table, "max_seqlen_k": 70}
    )


def test_autocast():
    q, k, v, lengths, table, _ = tensors()
    with torch.autocast("cpu", torch.bfloat16):
        o, _ = attend(q, k, v, lengths, table)
    want, _ = attend(*[x.bfloat16() for x in (q, k, v)], lengths, table)
    assert torch.equal(o, want)


def test_flops():
    q, k, v, lengths, table, _ = tensors()
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        attend(q, k, v, lengths, table)
    assert counter.get_total_flops() == 2 * HEADS * 2 * sum(LENGTHS) * 2 * DIM


def test_vmap():
    q, k, v, lengths, table, _ = tensors()
    both = torch.stack([q, 2 * q])
    found = torch.func.vmap(lambda x: attend(x, k, v, lengths, table)[0])(both)
    assert torch.equal(found, torch.stack([attend(x, k, v, lengths, table)[0] for x in both]))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_there_are_no_gradients(which):
    *given, _ = tensors()
    given[which].requires_grad_()
    with pytest.raises(octet.Unsupported, match=f"^{'qkv'[which]}: requires a gradient"):
        attend(*given)
    with torch.no_grad():
        attend(*given)


def test_meta_tensors_give_shapes():
    q, k, v, lengths, table, _ = (x.to("meta") for x in tensors())
    o, lse = attend(q, k, v, lengths, table)
    assert o.shape == q.shape and lse.shape == (len(LENGTHS), HEADS, 2)


def appended(k, v, new_k, new_v, lengths, table, q):
    turned = octet.append(k, v, new_k, new_v, lengths, block_table=table, rope="half", q=q, layout="bshd")
    return octet.attention_cached(
        turned, k, v, lengths + new_k.shape[1], block_table=table, causal="bottom_right", layout="bshd"
    )


def decoding():
    q, k, v, lengths, table, _ = tensors()
    generator = torch.Generator().manual_seed(2)
    new_k, new_v = (torch.randn(len(LENGTHS), 2, KV_HEADS, DIM, generator=generator) for _ in "kv")
    k, v = (torch.cat([x, x[:4]]) for x in (k, v))
    table[1, 0], table[2, 1] = len(k) - 1, len(k) - 2
    return k, v, new_k, new_v, lengths, table, q


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_append_compiled(backend):
    eager, compiled = decoding(), decoding()
    want = appended(*eager)
    found = torch.compile(appended, fullgraph=True, backend=backend)(*compiled)
    assert torch.equal(found, want) and all(
        map(torch.equal, map(torch.nan_to_num, compiled), map(torch.nan_to_num, eager))
    )
    assert not torch.equal(compiled[0].nan_to_num(), decoding()[0].nan_to_num())


def packed_step(k, v, new_k, new_v, lengths, table, q, starts):
    """A step of a ragged batch: what is appended, and attention of its queries."""
    where = {"block_table": table}
    turned = octet.append(k, v, new_k, new_v, lengths, cu_seqlens=starts, rope="half", q=q, **where)
    used = lengths + starts.diff()
    return octet.attention_cached(
        turned, k, v, used, cu_seqlens_q=starts, causal="bottom_right", precision="f32", **where
    )


def packed_decoding(codes=None):
    k, v, new_k, new_v, lengths, table, q = decoding()
    starts = torch.tensor([0, 1, 3, 5, 8], dtype=torch.int32)
    k, v = (x.nan_to_num() for x in (k, v))
    if codes:
        k, v = (octet.quantize(x, of, format=codes, layout="bshd") for x, of in zip((k, v), "kv", strict=True))
    return k, v, *(x.flatten(0, 1) for x in (new_k, new_v)), lengths, table, q.flatten(0, 1), starts


@pytest.mark.parametrize("codes", [None, "i8", "e4m3"])
def test_append_of_packed_tokens_compiled(codes):
    eager, compiled = packed_decoding(codes), packed_decoding(codes)
    want = packed_step(*eager)
    assert torch.equal(torch.compile(packed_step, fullgraph=True, backend="aot_eager")(*compiled), want)
    for x, y, before in zip(compiled[:2], eager[:2], packed_decoding(codes)[:2], strict=True):
        for part in ("codes", "scale") if codes else ("data",):
            found = getattr(x, part).float()
            assert torch.equal(found, getattr(y, part).float()) and not torch.equal(
                found, getattr(before, part).float()
            )
    again = packed_decoding(codes)
    for _ in range(3):  # the first call, the one that is remembered, and one by memory
        assert torch.equal(packed_step(*again), want)


def static_step(k, v, new_k, new_v, used, q):
    octet.append(k, v, new_k, new_v, used, layout="bshd", rope="half")
    return octet.attention_cached(
        q, k, v, used + 1, causal="bottom_right", layout="bshd", precision="f32", return_lse=True
    )


@pytest.mark.parametrize("codes", [None, "i8", "e4m3"])
def test_a_static_cache_compiled(codes):
    """Two tokens of a batch whose caches have no pages, by one graph: lengths are read when it runs."""
    generator = torch.Generator().manual_seed(3)
    numbers = [torch.randn(2, 40, KV_HEADS, DIM, generator=generator) for _ in "kv"]

    def caches():
        pairs = zip(numbers, "kv", strict=True)
        return [octet.quantize(x, of, format=codes, layout="bshd") if codes else x.clone() for x, of in pairs]

    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(static_step, fullgraph=True, backend=count)
    eager, own = caches(), caches()
    for used in ([31, 2], [32, 3]):
        token = [torch.randn(2, 1, KV_HEADS, DIM, generator=generator) for _ in "kv"]
        given = *token, torch.tensor(used, dtype=torch.int32), torch.randn(2, 1, HEADS, DIM, generator=generator)
        for found, want in zip(compiled(*own, *given), static_step(*eager, *given), strict=True):
            assert torch.equal(found, want)
    assert len(graphs) == 1
    for x, y in zip(own, eager, strict=True):
        assert all(
            torch.equal(getattr(x, p).float(), getattr(y, p).float())
            for p in (["codes", "scale"] if codes else ["data"])
        )


def test_the_operator_of_codes_is_sound():
    k, v, _, _, lengths, table, q, _ = packed_decoding("i8")
    parts = [q.unflatten(0, (4, 2)), k.codes, k.scale, v.codes, v.scale, lengths, table]
    coding = "=1,1,0,0,0,i8,bshd,float32", "=2,1,0,0,0,i8,bshd,float32"
    names = f"q k.codes k.scale k{coding[0]} v.codes v.scale v{coding[1]} seqused_k block_table"
    assert [k.coding[:2], v.coding[:2]] == [(1, 1), (2, 1)]
    torch.library.opcheck(torch.ops.octet.forward_coded.default, (parts, names, "precision=f32 layout=bshd"))


def test_the_operator_of_append_is_sound():
    k, v, new_k, new_v, lengths, table, q = decoding()
    k, v = k.nan_to_num(), v.nan_to_num()
    given = k, v, None, None, new_k, new_v, lengths, None, table, None, None, q, "half 0 0 0.0", "bshd"
    torch.library.opcheck(torch.ops.octet.append.default, given)


def test_append_has_no_gradient():
    k, v, new_k, new_v, lengths, table, q = decoding()
    with pytest.raises(octet.Unsupported, match="^k: requires a gradient"):
        octet.append(k, v, new_k.requires_grad_(), new_v, lengths, block_table=table, layout="bshd")


@pytest.mark.parametrize("codes", ["i8", "e4m3"])
def test_codes_are_those_of_numpy(codes):
    def run(of, array):
        k, v = (
            octet.quantize(array(np.zeros((5, 16, KV_HEADS, DIM), np.float32)), x, format=codes, layout="bshd")
            for x in "kv"
        )
        random = np.random.default_rng(8)
        new = [array(random.standard_normal((2, 20, KV_HEADS, DIM)).astype(np.float32)) for _ in "kv"]
        q = array(random.standard_normal((2, 1, HEADS, DIM)).astype(np.float32))
        where = {"block_table": array(np.array([[4, 0], [1, 3]], np.int32)), "layout": "bshd"}
        octet.append(k, v, *new, array(np.zeros(2, np.int32)), rope="half", **where)
        o = octet.attention_cached(q, k, v, array(np.full(2, 20, np.int32)), precision="f32", **where)
        return [
            np.asarray(x.view(torch.uint8) if of == "torch" else x.view(np.uint8))
            for x in (k.codes, v.codes, k.scale, o)
        ]

    for found, want in zip(run("torch", torch.from_numpy), run("numpy", np.asarray), strict=True):
        assert np.array_equal(found, want)
