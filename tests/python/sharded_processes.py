"""One of two processes of test_torch_dtensor.py: sharded_processes.py PORT RANK.

Parts compute what the whole does: a head of an element of the batch takes the same arithmetic in either, so o, lse and
gradients are the same bits, but where a gradient is a sum of two parts."""

import functools
import sys

import octet
import octet.torch
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

BATCH, HEADS, TOKENS, DIM = 4, 4, 10, 16
SUM = 8 * 2.0**-23  # what a sum of two parts in float32 may err by, relative: each part and the sum are rounded
R = Replicate()


class Problem:
    """The leaves and constants of a call, each with its placement; `keywords`, of octet.attention."""

    def __init__(self, layout="bhsd", kv_heads=HEADS, dtype=torch.float32, **keywords):
        torch.manual_seed(0)
        self.keywords = {"layout": layout, **keywords}
        self.function = octet.attention

        def made(heads):
            x = torch.randn(BATCH, heads, TOKENS, DIM).to(dtype)
            return x if layout == "bhsd" else x.transpose(1, 2).contiguous()

        self.leaves = {"q": made(HEADS), "k": made(kv_heads), "v": made(kv_heads)}
        self.constants = {}
        self.places = {}

    def place(self, **places):
        self.places |= places
        return self

    def run(self, part):
        """o, lse and the gradients by the leaves; `part`: of tensors that part(name, x) makes."""
        leaves = {name: part(name, x).requires_grad_() for name, x in self.leaves.items()}
        constants = {name: part(name, x) for name, x in self.constants.items()}
        o, lse = self.function(**leaves, **constants, **self.keywords, return_lse=True)
        torch.manual_seed(1)
        weights = torch.randn(o.shape).to(o.dtype), torch.randn(lse.shape)
        do, dlse = (part("do", x) for x in weights)
        gradients = torch.autograd.grad([o, lse], [*leaves.values()], [do, dlse])
        return dict(zip(("o", "lse", *(f"d{name}" for name in leaves)), (o, lse, *gradients), strict=True))


def expect_the_whole(mesh, problem, sums=(), **placements):
    """The results of the sharded problem are those of the whole, and have the placements that are named."""
    expected = problem.run(lambda _, x: x.clone())

    def part(name, x):
        places = problem.places.get(name, R)
        return distribute_tensor(x.clone(), mesh, [places] if mesh.ndim == 1 else places)

    found = problem.run(part)
    for name, want in expected.items():
        got = found[name]
        assert isinstance(got, DTensor), name
        assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride()), name
        if name in placements:
            assert got.placements == (placements[name],), (name, got.placements)
        full = got.full_tensor()
        if name in sums:
            error = ((full - want).norm() / want.norm()).item()
            assert error <= SUM, f"{name}: {error:.3g}, allowed {SUM:.3g}"
        else:
            assert torch.equal(full, want), name


def batch(mesh):
    axis = Shard(0)
    expect_the_whole(mesh, Problem().place(q=axis, k=axis, v=axis), o=axis, lse=axis, dq=axis, dk=axis)
    expect_the_whole(mesh, Problem(dtype=torch.bfloat16, causal=True).place(q=axis, k=axis, v=axis), o=axis)
    expect_the_whole(mesh, Problem(layout="bshd").place(q=axis), o=axis, lse=axis, dk=axis)  # k and v are sliced


def batch_with_the_rest(mesh):
    axis = Shard(0)
    problem = Problem(kv_heads=2).place(q=axis, k=axis, v=axis, mask=axis)
    problem.leaves["sinks"] = torch.randn(HEADS)
    problem.constants |= {"mask": torch.rand(BATCH, 1, TOKENS, TOKENS) > 0.3, "alibi_slopes": torch.rand(BATCH, HEADS)}
    expect_the_whole(mesh, problem, sums=["dsinks"], o=axis, dsinks=Partial())
    del problem.constants["mask"]
    problem.leaves["mask"] = torch.randn(1, HEADS, TOKENS, TOKENS)  # of the whole batch, so its gradient is a sum
    expect_the_whole(mesh, problem.place(mask=R), sums=["dsinks", "dmask"], o=axis, dmask=Partial())
    problem.leaves["mask"] = torch.randn(BATCH, 1, TOKENS, TOKENS)
    expect_the_whole(mesh, problem.place(mask=axis), sums=["dsinks"], o=axis, dmask=axis)


def heads(mesh):
    # The same shard of the same shapes is the heads of one layout and the tokens of the other.
    for layout, axis in (("bhsd", Shard(1)), ("bshd", Shard(2))):
        for kv_heads in (HEADS, 2):
            problem = Problem(layout, kv_heads).place(q=axis, k=axis, v=axis)
            expect_the_whole(mesh, problem, o=axis, lse=Shard(1), dq=axis, dk=axis, dv=axis)


def heads_with_the_rest(mesh):
    axis = Shard(1)
    problem = Problem(kv_heads=2).place(q=axis, k=axis, v=axis, sinks=Shard(0), mask=axis)
    problem.leaves["sinks"] = torch.randn(HEADS)
    problem.constants |= {"mask": torch.randn(1, HEADS, 1, TOKENS), "alibi_slopes": torch.rand(HEADS)}
    expect_the_whole(mesh, problem, o=axis, dsinks=Shard(0))
    problem.leaves["mask"] = problem.constants.pop("mask")
    expect_the_whole(mesh, problem, o=axis, dmask=axis)
    del problem.leaves["mask"]
    problem.constants["mask"] = torch.rand(TOKENS, TOKENS) > 0.3
    expect_the_whole(mesh, problem.place(mask=R), o=axis)


def one_head_of_k(mesh):
    """It is replicated, and its gradients are the sums of what each process finds."""
    problem = Problem(kv_heads=1).place(q=Shard(1))
    expect_the_whole(mesh, problem, sums=["dk", "dv"], o=Shard(1), dq=Shard(1), dk=Partial(), dv=Partial())


def packed(mesh):
    lengths = torch.tensor([0, 4, 10], dtype=torch.int32)
    problem = Problem().place(q=Shard(1), k=Shard(1), v=Shard(1))
    problem.function = octet.attention_varlen
    problem.keywords = {"causal": "bottom_right", "max_seqlen_q": 6}
    problem.leaves = {name: torch.randn(10, n, DIM) for name, n in (("q", HEADS), ("k", 2), ("v", 2))}
    problem.constants |= {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths}
    expect_the_whole(mesh, problem, o=Shard(1), lse=Shard(0), dk=Shard(1))


def both(mesh):
    """The batch over one dimension of the mesh, the heads over the other."""
    two = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    places = Shard(0), Shard(1)
    expect_the_whole(two, Problem(kv_heads=1).place(q=places, k=(Shard(0), R), v=(Shard(0), R), do=places))
    twice = Shard(0), Shard(0)
    expect_the_whole(two, Problem().place(q=twice, k=twice, v=twice, do=twice))


def nothing_is_sent(mesh):
    q, k, v = (distribute_tensor(torch.randn(BATCH, HEADS, TOKENS, DIM), mesh, [Shard(1)]) for _ in range(3))
    do = q.clone()
    with CommDebugMode() as messages:
        leaves = [x.requires_grad_() for x in (q, k, v)]
        torch.autograd.grad(octet.attention(*leaves, causal=True), leaves, do)
    assert messages.get_total_counts() == 0, messages.get_comm_counts()
    with CommDebugMode() as messages:
        q.redistribute(placements=[Shard(0)])
    assert messages.get_total_counts() > 0  # it counts


def compiled(mesh):
    attention = torch.compile(octet.attention, fullgraph=True, backend="aot_eager")
    results = []
    for function in (attention, octet.attention):
        torch.manual_seed(0)
        whole = [torch.randn(BATCH, HEADS, TOKENS, DIM) for _ in range(3)]
        leaves = [distribute_tensor(x, mesh, [Shard(1)]).requires_grad_() for x in whole]
        o = function(*leaves, causal=True)
        results.append([o, *torch.autograd.grad(o, leaves, o.detach())])
    for got, want in zip(*results, strict=True):
        assert got.placements == want.placements == (Shard(1),) and torch.equal(got.to_local(), want.to_local())


def other_ways(mesh):
    """octet.sdpa, attention_jvp, attention_vjp, and autograd that brings a gradient sharded by tokens."""
    whole = [torch.randn(BATCH, HEADS, TOKENS, DIM) for _ in range(6)]
    parts = [distribute_tensor(x, mesh, [Shard(1)]) for x in whole]
    assert torch.equal(octet.sdpa(*parts[:3], is_causal=True).full_tensor(), octet.sdpa(*whole[:3], is_causal=True))
    for function, count in ((octet.attention_jvp, 6), (octet.attention_vjp, 4)):
        for got, want in zip(function(*parts[:count]), function(*whole[:count]), strict=True):
            assert got.placements == (Shard(1),) and torch.equal(got.full_tensor(), want), function
    do = distribute_tensor(whole[3], mesh, [Shard(2)])
    for got, want in zip(octet.attention_vjp(*parts[:3], do), octet.attention_vjp(*whole[:4]), strict=True):
        assert torch.equal(got.full_tensor(), want)


def expect_rejected(kind, words, function):
    try:
        function()
    except kind as rejection:
        for word in words:
            assert word in str(rejection), f"{word!r} is not in: {rejection}"
    else:
        raise AssertionError(f"not rejected: {words}")


def rejections(mesh):
    def made(placement, heads=HEADS, tokens=TOKENS):
        return distribute_tensor(torch.randn(BATCH, heads, tokens, DIM), mesh, [placement])

    reject = functools.partial(expect_rejected, octet.Unsupported)
    for layout, shard in (("bhsd", 2), ("bshd", 1)):
        tokens = [made(Shard(shard)) for _ in range(3)]
        words = f"q: S({shard})", "tokens", f"allowed: Shard(0) (batch), Shard({3 - shard}) (heads)", "redistribute"
        reject(words, lambda x=tokens, layout=layout: octet.attention(*x, layout=layout))
    q, k = made(Shard(0)), made(Shard(0))
    reject(["dropout_seed: given with DTensors"], lambda: octet.attention(q, k, k, dropout_p=0.1, dropout_seed=1))
    reject(["dropout_seed: given with DTensors"], lambda: octet.sdpa(q, k, k, dropout_p=0.1))
    reject(["k: S(2)", "tokens"], lambda: octet.attention(q, made(Shard(2)), made(Shard(2))))
    reject(["v: S(3)", "head dim"], lambda: octet.attention(q, k, made(Shard(3))))
    reject(["k: S(1)", "the heads", "but q the batch"], lambda: octet.attention(q, made(Shard(1)), k))
    partial = DTensor.from_local(torch.randn(BATCH, HEADS, TOKENS, DIM), mesh, [Partial()])
    reject(["q: P", "allowed: Shard(0) (batch)"], lambda: octet.attention(partial, k, k))
    grouped = made(Shard(1)), made(R, 3), made(R, 3)
    reject(["k: 3 heads over 2 processes"], lambda: octet.attention(*grouped))
    odd = [made(Shard(1), 3) for _ in range(3)]
    reject(["q: 3 heads over 2 processes"], lambda: octet.attention(*odd))
    mask = distribute_tensor(torch.ones(TOKENS, TOKENS, dtype=torch.bool), mesh, [Shard(0)])
    reject(["mask: S(0)", "q, k and v shard batch"], lambda: octet.attention(q, k, k, mask=mask))
    packed = [distribute_tensor(torch.randn(10, HEADS, DIM), mesh, [Shard(0)]) for _ in range(3)]
    lengths = [distribute_tensor(torch.tensor([0, 10], dtype=torch.int32), mesh, [R]) for _ in range(2)]
    reject(["q: S(0)", "tokens", "allowed: Shard(1) (heads)"], lambda: octet.attention_varlen(*packed, *lengths))
    plain = torch.randn(BATCH, HEADS, TOKENS, DIM)
    for name, given in (("q", (plain, k, k)), ("v", (q, k, plain))):
        words = [f"{name}: found a tensor that is no DTensor", "distribute_tensor"]
        expect_rejected(octet.InvalidArgument, words, lambda x=given: octet.attention(*x))
        expect_rejected(octet.InvalidArgument, words, lambda x=given: octet.sdpa(*x))
    expect_rejected(octet.InvalidArgument, ["x: found a DTensor", "to_local"], lambda: octet.quantize(q, "q"))


TESTS = (
    compiled,
    nothing_is_sent,
    batch,
    batch_with_the_rest,
    heads,
    heads_with_the_rest,
    one_head_of_k,
    packed,
    both,
    other_ways,
    rejections,
)


def main(port, rank):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"tcp://localhost:{port}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("part",))
    for test in TESTS:
        print(test.__name__, flush=True)
        test(mesh)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
