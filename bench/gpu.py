"""Times octet on this GPU against cuDNN through torch and, where they can be imported, FlashAttention-3
(`flash_attn_interface`) and FlashAttention-4 (`flash_attn.cute`): same process, same inputs, in alternating rounds,
CUDA events around groups of launches, medians. Before it times, it holds all of them to float64 attention, on random
inputs and on the real ones of examples/data.

    bench/gpu.py [--pass pair,forward,backward] [--long] [--rounds N] [--library build/release/src/liboctet.so]
                 [--output FILE]

A pair is what a training step calls: the forward pass that keeps what a backward pass needs, and that pass. FLOPs are
those of the two products forward, 4 b h n m d, halved under a causal mask, times 2.5 backward and 3.5 for a pair.
Joules of a pair of 4096 tokens are counted by NVML, where pynvml can be imported, in a second of calls of each program.
"""

import argparse
import json
import pathlib
import statistics
import time

import torch
from abi import BACKWARD, BIAS_CORRECTIONS, FORWARD, Octet, load
from peers import circumstances, gpu_peers, medians
from problems import GPU, GPU_LONG

try:
    import pynvml
except ImportError:
    pynvml = None

ROOT = pathlib.Path(__file__).resolve().parent.parent
TENSORS = ["o", "dq", "dk", "dv"]
FACTORS = {"forward": 1, "backward": 2.5, "pair": 3.5}  # FLOPs, in those of a forward pass


class Problem:
    """q, k, v and the gradient of o, [batch, head, token, dim]."""

    def __init__(self, tensors, causal):
        self.q, self.k, self.v, self.do = tensors
        self.causal = causal

    @classmethod
    def draw(cls, shape, dtype, causal, seed=1):
        generator = torch.Generator("cuda").manual_seed(seed)
        return cls([torch.randn(shape, generator=generator, device="cuda").to(dtype) for _ in range(4)], causal)

    def exact(self):
        """o, dq, dk, dv in float64."""
        leaves = [x.double().requires_grad_() for x in (self.q, self.k, self.v)]
        s = leaves[0] @ leaves[1].transpose(-1, -2) / self.q.shape[-1] ** 0.5
        if self.causal:
            s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), float("-inf"))
        o = s.softmax(-1) @ leaves[2]
        return [o.detach(), *torch.autograd.grad(o, leaves, self.do.double())]


class Ours:
    """octet with one bias correction: `forward` as for inference, `training`, which keeps what a backward pass needs,
    `backward`, `deterministic`, where dq is summed in order, and `pair`, a training step's two passes. None where octet
    has no such kernel."""

    def __init__(self, library, problem, bias_correction):
        p = problem
        precision = "bf16" if p.q.dtype == torch.bfloat16 else "f16"
        nan = lambda x: torch.full_like(x, float("nan"))
        self.o, lse = nan(p.q), torch.full(tuple(p.q.shape[:3]), float("nan"), device="cuda")
        self.gradients = [nan(x) for x in (p.q, p.k, p.v)]

        def call(which, tensors, **more):
            try:
                return Octet(
                    library,
                    which,
                    precision,
                    p.causal,
                    dict(q=p.q, k=p.k, v=p.v, o=self.o, lse=lse) | tensors,
                    bias_correction=BIAS_CORRECTIONS[bias_correction],
                    **more,
                )
            except RuntimeError as error:
                if "no backend can solve" not in str(error):
                    raise

        reads_residual = bias_correction in ("f16", "exact_delta")
        residual = dict(o_residual=torch.empty_like(p.q, dtype=torch.int8)) if reads_residual else {}
        kept = dict(zip(("dq", "dk", "dv"), self.gradients, strict=True)) | dict(do=p.do) | residual
        self.forward = call(FORWARD, {})
        self.training = call(FORWARD, residual)
        self.backward = call(BACKWARD, kept)
        self.deterministic = call(BACKWARD, kept, deterministic=1)
        self.pair = self.backward and (lambda: (self.training(), self.backward()))
        self.workspace_bytes = max(x.bytes for x in (self.training, self.backward) if x)
        self.training()  # what the backward pass reads

    def results(self, backward):
        """o, and with `backward` dq, dk, dv."""
        if not (backward and self.backward):
            self.forward()
            return [self.o]
        self.pair()
        return [self.o, *self.gradients]

    def calls(self, which, name):
        """What is timed of a pass: name -> call."""
        others = {"forward": ("training",), "backward": ("deterministic",), "pair": ()}[which]
        found = {name: getattr(self, which)} | {f"{name}_{other}": getattr(self, other) for other in others}
        return {name: call for name, call in found.items() if call}


class Peer:
    """Attention by `function(q, k, v, causal)`, and its backward pass by torch, which runs that pass alone."""

    def __init__(self, function, problem):
        p = problem
        self.forward = lambda: function(p.q, p.k, p.v, p.causal)
        leaves = [x.detach().requires_grad_() for x in (p.q, p.k, p.v)]
        o = function(*leaves, p.causal)
        self.backward = lambda: torch.autograd.grad(o, leaves, p.do, retain_graph=True)
        self.pair = lambda: torch.autograd.grad(function(*leaves, p.causal), leaves, p.do)

    def results(self, backward):
        return [self.forward(), *(self.backward() if backward else [])]

    def calls(self, which, name):
        return {name: getattr(self, which)}


def errors(problem, programs, backward):
    """Relative L2 against float64: tensor -> program -> error. Whoever errs by a twentieth solves another problem."""
    want = problem.exact()
    found = {}
    for program, results in ((name, x.results(backward)) for name, x in programs.items()):
        for tensor, got, exact in zip(TENSORS, results, want, strict=False):
            error = ((got.double() - exact).norm() / exact.norm()).item()
            if not error < 0.05:
                raise RuntimeError(
                    f"{program}: {tensor} differs from float64 by {error:.3g} in relative L2: not the same problem"
                )
            found.setdefault(tensor, {})[program] = error
    return found


def text_of(found):
    return "   ".join(
        f"{tensor} " + " ".join(f"{program} {error:.5f}" for program, error in programs.items())
        for tensor, programs in found.items()
    )


def check(programs_of, options):
    """Random inputs, then the worst of the files of examples/data: causal, outputs in the inputs' type."""
    from safetensors.torch import load_file

    backward = options.passes != ["forward"]
    for dim in (64, 128, 256):
        for causal in (False, True):
            problem = Problem.draw((2, 3, 1500, dim), options.dtype, causal, seed=dim)
            found = text_of(errors(problem, programs_of(problem), backward))
            print(f"random d{dim:<4} {'causal' if causal else 'full':6} {found}", flush=True)
    worst = {}
    for path in sorted(ROOT.glob("examples/data/*.safetensors")):
        data = load_file(path)
        problem = Problem([data[name].cuda().to(options.dtype) for name in ("q", "k", "v", "do")], causal=True)
        for tensor, programs in errors(problem, programs_of(problem), backward).items():
            for program, error in programs.items():
                worst.setdefault(tensor, {})[program] = max(error, worst.get(tensor, {}).get(program, 0))
    print(f"real, worst        {text_of(worst)}", flush=True)
    return worst


def joules(call, repeats):
    """Joules and clock cycles of a call, measured over a second of calls; nothing without NVML."""
    if not pynvml:
        return None
    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
    torch.cuda.synchronize()
    calls, clocks = 0, []
    begin, spent = time.monotonic(), pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
    while time.monotonic() < begin + 1:
        for _ in range(repeats):
            call()
        calls += repeats
        clocks.append(pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM))
        torch.cuda.synchronize()
    seconds, spent = time.monotonic() - begin, pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) - spent
    return {"joules": spent / 1e3 / calls, "cycles": seconds / calls * statistics.median(clocks) * 1e6}


def measure(which, shape, causal, programs_of, options):
    """One row: a pass of one problem by all programs."""
    batch, heads, tokens, dim = shape
    programs = programs_of(Problem.draw(shape, options.dtype, causal))
    calls = {}
    for name, program in programs.items():
        calls |= program.calls(which, name)
    if "octet" not in calls:
        return None
    flops = FACTORS[which] * 4 * batch * heads * tokens**2 * dim * (0.5 if causal else 1)
    repeats = max(1, int(2e12 // flops))
    times = dict(zip(calls, medians(list(calls.values()), options.rounds, repeats), strict=True))
    row = {"pass": which, "batch": batch, "heads": heads, "tokens": tokens, "dim": dim, "causal": causal, "ms": times}
    row["tflops"] = {name: flops / ms / 1e9 for name, ms in times.items()}
    row["ratios"] = {name: times[name] / times["octet"] for name in times if not name.startswith("octet")}
    row["workspace_bytes"] = programs["octet"].workspace_bytes
    if which == "pair" and tokens == 4096:
        row["energy"] = {name: joules(call, repeats) for name, call in calls.items()}
    text = "  ".join(f"{name} {x:6.1f}" for name, x in row["tflops"].items())
    ratios = ", ".join(f"{name} {x:.3f}" for name, x in row["ratios"].items())
    mask = "causal" if causal else "full"
    print(
        f"{which:8} {batch}x{heads} d{dim:<4} S {tokens:<6} {mask:6}  TFLOP/s  {text}  times faster than {ratios}",
        flush=True,
    )
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pass", dest="passes", default="pair,forward,backward", type=lambda x: x.split(","))
    parser.add_argument("--long", action="store_true", help="sequences up to 131072 tokens instead of the table")
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "f16"])
    parser.add_argument(
        "--bias-corrections",
        default=["f16", "exact_delta", "beta", "none"],
        type=lambda x: x.split(","),
        help="the first is called octet, each other one octet_NAME",
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--library", type=pathlib.Path, default=ROOT / "build/release/src/liboctet.so")
    parser.add_argument("--output", type=pathlib.Path)
    options = parser.parse_args()
    options.dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[options.dtype]

    library = load(options.library)
    peers = gpu_peers()
    names = {"octet" if i == 0 else f"octet_{name}": name for i, name in enumerate(options.bias_corrections)}
    programs_of = lambda problem: (
        {name: Ours(library, problem, bias_correction) for name, bias_correction in names.items()}
        | {name: Peer(function, problem) for name, (_, function) in peers.items()}
    )
    for name, (description, _) in peers.items():
        print(f"{name}: {description}", flush=True)
    found = check(programs_of, options)
    shapes = GPU_LONG if options.long else GPU
    problems = [(which, shape, causal) for which in options.passes for shape in shapes for causal in (False, True)]
    rows = [row for problem in problems if (row := measure(*problem, programs_of, options))]
    if not options.output:
        return
    result = circumstances(library, options.rounds) | {
        "bias_corrections": names,
        "dtype": str(options.dtype).removeprefix("torch."),
        "peers": {name: description for name, (description, _) in peers.items()},
        "errors": found,
        "rows": rows,
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n")


main()
