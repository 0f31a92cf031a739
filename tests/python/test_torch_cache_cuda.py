"""octet.append and octet.attention_cached on CUDA tensors in a graph, which reads lengths and block table when it
replays. Skipped without a GPU."""

import octet
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

BATCH, HEADS, KV_HEADS, DIM, PAGE = 3, 8, 2, 128, 16


@pytest.mark.parametrize("queries", [1, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_graph_of_a_step_replays_with_other_lengths(dtype, queries):
    generator = torch.Generator("cuda").manual_seed(1)

    def numbers(*shape):
        return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)

    pages = [numbers(120, PAGE, KV_HEADS, DIM) for _ in "kv"]
    table = torch.randperm(120, generator=generator, device="cuda", dtype=torch.int32).view(BATCH, 40)
    given = numbers(BATCH, queries, HEADS, DIM), *[numbers(BATCH, queries, KV_HEADS, DIM) for _ in "kv"]
    lengths = torch.tensor([0, 17, 300], dtype=torch.int32, device="cuda")

    def step(k_cache, v_cache, table, lengths):
        q, k, v = given
        where = {"block_table": table, "layout": "bshd"}
        q = octet.append(k_cache, v_cache, k, v, lengths, rope="half", q=q, **where)
        return octet.attention_cached(q, k_cache, v_cache, lengths + queries, causal="bottom_right", **where)

    step(*pages, table, lengths)  # warm
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = step(*pages, table, lengths)
    for these in ([0, 17, 300], [400, 1, 16], [5, 5, 5]):
        lengths.copy_(torch.tensor(these))
        table.copy_(table.flip(1))
        eager = [x.clone() for x in pages]
        want = step(*eager, table, lengths)
        graph.replay()
        assert torch.equal(o, want) and all(map(torch.equal, pages, eager))
        on_cpu = [x.cpu() for x in (*eager, table, lengths)]
        cpu = octet.attention_cached(
            octet.append(*[x.clone() for x in on_cpu[:2]], *[x.cpu() for x in given[1:]], on_cpu[3], rope="half",
                         q=given[0].cpu(), block_table=on_cpu[2], layout="bshd"),
            *on_cpu[:2], on_cpu[3] + queries, block_table=on_cpu[2], layout="bshd", causal="bottom_right",
        )  # fmt: skip
        torch.testing.assert_close(o.cpu(), cpu, rtol=3e-2, atol=3e-2)
