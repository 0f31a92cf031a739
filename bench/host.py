"""Measures what a call costs the host, with a shape whose kernels take less time than that. octet and torch's own
attention run in one process, in alternating rounds; the result is the median of the rounds' means, in microseconds.

    bench/host.py [--device cuda|cpu] [--rounds N] [--output FILE]     with the package importable

On a GPU the calls of a round are enqueued without waiting, in rounds so short that the queue does not fill.
A call inside a CUDA graph costs what it adds, recorded, to a replay. On a CPU the kernels run on the host too: the
shape is so small that they take little, and the parts say how much.
"""

import argparse
import datetime
import json
import pathlib
import statistics
import time

import octet
import torch
from abi import revision
from octet import _plan
from octet._operands import INPUTS
from octet._options import options_of
from octet.torch import _ops, adapter
from problems import HOST
from torch.nn.functional import scaled_dot_product_attention

CALLS = 50  # of a round
REPLAYS = 5  # of a round, of a graph of many calls
RECORDED = 100  # calls in such a graph


def medians(calls, rounds, synchronize, count=CALLS):
    """Microseconds of host time of each call, `count` of them in a round."""
    found = {name: [] for name in calls}
    for _ in range(rounds + 2):
        for name, call in calls.items():
            synchronize()
            start = time.perf_counter()
            for _ in range(count):
                call()
            found[name].append((time.perf_counter() - start) / count * 1e6)
    synchronize()
    return {name: statistics.median(times[2:]) for name, times in found.items()}


def minimal_operator(device):
    """An operator defined in Python that does nothing but return tensors of the shapes of attention's."""
    library = torch.library.Library("octet_bench", "DEF")
    library.define("nothing(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)")
    library.impl("nothing", lambda q, k, v: (torch.empty_like(q), q.new_empty(q.shape[:-1])), device.upper())
    return library, torch.ops.octet_bench.nothing.default


class Nothing(torch.autograd.Function):
    """A Function in Python that only saves and makes tensors of the shapes of attention's, whose cost is measured."""

    @staticmethod
    def forward(ctx, q, k, v):
        o, r = torch.empty_like(q), torch.empty_like(q)
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        ctx.save_for_backward(q, k, v, o, lse, r)
        return o

    @staticmethod
    def backward(ctx, do):
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


def calls_of(device, dtype):
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(HOST[device], device=device).to(dtype) for _ in range(4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def backward(function):
        torch.autograd.grad(function(*leaves), leaves, do)

    library, nothing = minimal_operator(device)
    o, lse = octet.attention(q, k, v, return_lse=True)
    arrays = {"q": q, "k": k, "v": v}
    _, _, r = _ops.run("forward", arrays, options_of("bf16"), True)
    plan = _plan.Call(adapter, "forward", options_of("bf16"), arrays).plan.at([x.data_ptr() for x in (q, k, v, o, lse)])
    saved = do, q, k, v, o, lse, r
    given = dict(zip(INPUTS["backward"], saved, strict=False))
    back = _plan.Call(adapter, "backward", options_of("bf16"), given).plan
    made = [torch.empty_like(x) for x in (q, k, v)]
    back.at([x.data_ptr() for x in (*saved, *made)])
    memory = torch.empty(max(plan.workspace_size(), back.workspace_size()) + 64, dtype=torch.uint8, device=device)
    address = (memory.data_ptr() + 63) // 64 * 64
    stream = torch.cuda.current_stream().cuda_stream if device == "cuda" else None
    calls = {
        "scaled_dot_product_attention": lambda: scaled_dot_product_attention(q, k, v),
        "octet.attention": lambda: octet.attention(q, k, v),
        "octet.sdpa": lambda: octet.sdpa(q, k, v),
        "scaled_dot_product_attention, saving for backward": lambda: scaled_dot_product_attention(*leaves),
        "octet.attention, saving for backward": lambda: octet.attention(*leaves),
        "scaled_dot_product_attention, with backward": lambda: backward(scaled_dot_product_attention),
        "octet.attention, with backward": lambda: backward(octet.attention),
        "octet.sdpa, with backward": lambda: backward(octet.sdpa),
        "part, with backward: a Function in Python that only allocates": lambda: backward(Nothing.apply),
        "part: an operator in Python that only allocates": lambda: nothing(q, k, v),
        "part: torch.ops.octet.forward": lambda: torch.ops.octet.forward(q, k, v, False, "precision=bf16"),
        "part: octet_run": lambda: plan.run(lambda size: (memory, address), stream),
        "part: octet_run of the backward pass": lambda: back.run(lambda size: (memory, address), stream),
        "part: octet_workspace_size": lambda: plan.workspace_size(),
    }
    return calls | calls_of_caches(device, dtype), (library, memory, saved, made)


def calls_of_caches(device, dtype):
    """A step of decoding over pages, and the library's part of it."""
    _, heads, _, dim = HOST[device]
    pages = [torch.zeros(4, heads, 16, dim, device=device, dtype=dtype) for _ in "kv"]
    q, k, v = (torch.randn(1, heads, 1, dim, device=device).to(dtype) for _ in range(3))
    where = {"block_table": torch.tensor([[1, 3]], dtype=torch.int32, device=device)}
    used = torch.tensor([8], dtype=torch.int32, device=device)
    options = options_of("bf16", causal="bottom_right", enable_gqa=True)
    operands = {"q": q, "k": pages[0], "v": pages[1], "seqused_k": used, **where}
    call = _plan.Call(adapter, "forward", options, operands)
    o, lse = call(operands)
    plan = call.plan.at([x.data_ptr() for x in (*operands.values(), o, lse)])
    memory = torch.empty(plan.workspace_size() + 64, dtype=torch.uint8, device=device)
    address = (memory.data_ptr() + 63) // 64 * 64
    stream = torch.cuda.current_stream().cuda_stream if device == "cuda" else None
    kept = o, lse, memory
    return {
        "octet.attention_cached": lambda: octet.attention_cached(q, *pages, used, causal="bottom_right", **where),
        "octet.append": lambda: octet.append(*pages, k, v, used, **where),
        "octet.append with rope and q": lambda: octet.append(*pages, k, v, used, rope="half", q=q, **where),
        "part of attention_cached: octet_run": lambda: (plan.run(lambda size: (memory, address), stream), kept)[0],
    }


def graph_of(call, count):
    """A CUDA graph of `count` calls."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return graph


def cost_in_a_graph(calls, rounds):
    """Microseconds of host time that a recorded call adds to a replay."""
    names = "scaled_dot_product_attention", "octet.attention"
    graphs = {(name, count): graph_of(calls[name], count) for name in names for count in (1, 1 + RECORDED)}
    found = medians({key: graph.replay for key, graph in graphs.items()}, rounds, torch.cuda.synchronize, REPLAYS)
    added = {name: (found[name, 1 + RECORDED] - found[name, 1]) / RECORDED for name in names}
    return {f"{name}, in a CUDA graph": x for name, x in added.items()} | {
        f"replay of a CUDA graph of one {name}": found[name, 1] for name in names
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--output", type=pathlib.Path)
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)  # else waking others takes longer than the rest
    calls, kept = calls_of(options.device, torch.bfloat16)
    synchronize = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    trains = {name: call for name, call in calls.items() if "for backward" in name or "with backward" in name}
    with torch.no_grad():
        plain = {name: call for name, call in calls.items() if name not in trains}
        found = medians(plain, options.rounds, synchronize)
        if options.device == "cuda":
            found |= cost_in_a_graph(calls, options.rounds)
    found |= medians(trains, options.rounds, synchronize)
    del kept
    pair = "{}, with backward".format
    ratio = found[pair("octet.attention")] / found[pair("scaled_dot_product_attention")]
    for name, microseconds in found.items():
        print(f"{name:62} {microseconds:8.2f} us")
    print(f"{'forward and backward, times scaled_dot_product_attention':62} {ratio:8.2f}")
    if options.output:
        machine = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
        result = {
            "machine": machine,
            "date": datetime.date.today().isoformat(),
            "octet": f"{octet.__version__} ({revision()})",
            "torch": torch.__version__,
            "shape": HOST[options.device],
            "dtype": "bfloat16",
            "forward and backward, times scaled_dot_product_attention": round(ratio, 2),
            "microseconds": {name: round(x, 2) for name, x in found.items()},
        }
        options.output.write_text(json.dumps(result, indent=1) + "\n")


main()
