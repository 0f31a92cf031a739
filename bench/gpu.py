"""Times octet against cuDNN through torch on this GPU: same process, same inputs, in alternating rounds, CUDA events
around groups of launches, medians. Before it times, it holds both to float64 attention on smaller inputs.

    bench/gpu.py [--pass forward,backward] [--rounds N] [--library build/release/src/liboctet.so] [--output FILE]

FLOPs are those of the two products forward, 4 b h n m d, halved under a causal mask, times 2.5 backward.
"""

import argparse
import datetime
import json
import pathlib
import statistics
import subprocess

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from abi import BACKWARD, FORWARD, REMEDIES, Octet, load, revision

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOKENS, CHANNELS = 16384, 2048  # of all sequences; of all heads
# dim, tokens of a sequence
CASES = [(64, 4096), (64, 16384), (128, 1024), (128, 4096), (128, 16384), (256, 4096), (256, 16384)]


def cudnn(q, k, v, causal):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def exact(q, k, v, causal, do):
    """o, dq, dk, dv in float64."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    s = leaves[0] @ leaves[1].transpose(-1, -2) / q.shape[-1] ** 0.5
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), float("-inf"))
    o = s.softmax(-1) @ leaves[2]
    return [o.detach(), *torch.autograd.grad(o, leaves, do.double())]


def draw(shape, dtype, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(shape, generator=generator, device="cuda").to(dtype) for _ in range(4)]


def optional(*arguments, **options):
    """A call, or None where octet has no such kernel."""
    try:
        return Octet(*arguments, **options)
    except RuntimeError:
        return None


class Calls:
    """octet's forward and backward and cuDNN's on the same tensors."""

    def __init__(self, library, shape, dtype, causal, options, seed=1, tensors=None):
        self.q, self.k, self.v, self.do = q, k, v, do = tensors or draw(shape, dtype, seed)
        precision = "bf16" if dtype == torch.bfloat16 else "f16"
        nan = lambda x: torch.full_like(x, float("nan"))
        self.o, self.o_residual, self.lse = nan(q), nan(q), torch.full(tuple(shape[:3]), float("nan"), device="cuda")
        self.dq, self.dk, self.dv = nan(q), nan(k), nan(v)
        inputs = dict(q=q, k=k, v=v)
        remedy = REMEDIES[options.remedy]
        self.forward = Octet(library, FORWARD, precision, causal, inputs | dict(o=self.o, lse=self.lse), remedy=remedy)
        self.training = Octet(
            library, FORWARD, precision, causal, inputs | dict(o=self.o, lse=self.lse, o_residual=self.o_residual), remedy=remedy
        )
        if "backward" in options.passes:
            gradients = dict(dq=self.dq, dk=self.dk, dv=self.dv)
            kept = dict(o=self.o, lse=self.lse, do=do) | ({} if options.remedy == "none" else dict(o_residual=self.o_residual))
            self.backward = optional(library, BACKWARD, precision, causal, inputs | kept | gradients, remedy=remedy)
            self.deterministic = optional(library, BACKWARD, precision, causal, inputs | kept | gradients, remedy=remedy, deterministic=1)
        self.causal = causal

    def peer_forward(self):
        return cudnn(self.q, self.k, self.v, self.causal)

    def peer_backward(self):
        """A call that runs cuDNN's backward alone."""
        leaves = [x.clone().requires_grad_() for x in (self.q, self.k, self.v)]
        o = cudnn(*leaves, self.causal)
        return lambda: torch.autograd.grad(o, leaves, self.do, retain_graph=True)


def relative(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def check_files(library, options):
    """The worst error over the files of examples/data: real activations, causal, outputs in bf16."""
    from safetensors.torch import load_file

    worst = {}
    for path in sorted(ROOT.glob("examples/data/*.safetensors")):
        data = {name: x.cuda().to(options.dtype) for name, x in load_file(path).items()}
        calls = Calls(library, data["q"].shape, options.dtype, True, options, tensors=[data[name] for name in ("q", "k", "v", "do")])
        want = exact(calls.q, calls.k, calls.v, True, calls.do)
        calls.training()
        calls.backward()
        peers = [calls.peer_forward(), *calls.peer_backward()()]
        for name, got, peer, w in zip(("o", "dq", "dk", "dv"), (calls.o, calls.dq, calls.dk, calls.dv), peers, want):
            before = worst.get(name, (0, 0))
            worst[name] = max(before[0], relative(got, w)), max(before[1], relative(peer, w))
    print("real activations, worst: " + ", ".join(f"{name} {a:.5f} (cuDNN {b:.5f})" for name, (a, b) in worst.items()), flush=True)
    return {name: {"octet": a, "cudnn": b} for name, (a, b) in worst.items()}


def check(library, options):
    for dim in (64, 128, 256):
        for causal in (False, True):
            calls = Calls(library, (2, 3, 1500, dim), options.dtype, causal, options, seed=dim)
            want = exact(calls.q, calls.k, calls.v, causal, calls.do)
            calls.forward()
            line = f"d{dim:<4} {'causal' if causal else 'full':6} o {relative(calls.o, want[0]):.5f} (cuDNN {relative(calls.peer_forward(), want[0]):.5f})"
            calls.training()
            line += f", un-rounded {relative(calls.o.double() + calls.o_residual.double(), want[0]):.5f}"
            if "backward" in options.passes and calls.backward:
                calls.backward()
                peers = calls.peer_backward()()
                for name, got, peer, w in zip(("dq", "dk", "dv"), (calls.dq, calls.dk, calls.dv), peers, want[1:]):
                    line += f", {name} {relative(got, w):.5f} (cuDNN {relative(peer, w):.5f})"
            print(line, flush=True)


def medians(calls, rounds, repeats):
    """Median milliseconds of each call, in turns."""
    for call in calls:
        for _ in range(2):
            call()
    events = [[] for _ in calls]
    for _ in range(rounds):
        for call, marks in zip(calls, events):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(repeats):
                call()
            end.record()
            marks.append((begin, end))
        torch.cuda.synchronize()
    return [statistics.median(b.elapsed_time(e) / repeats for b, e in marks) for marks in events]


def measure(library, options):
    rows = []
    for dim, tokens in CASES:
        for causal in (False, True):
            shape = (TOKENS // tokens, CHANNELS // dim, tokens, dim)
            calls = Calls(library, shape, options.dtype, causal, options)
            flops = 4 * TOKENS * tokens * CHANNELS * (0.5 if causal else 1)
            run = {"forward": [calls.peer_forward, calls.forward, calls.training]}
            names = {"forward": ["cudnn", "octet", "octet_training"]}
            if "backward" in options.passes and calls.backward:
                calls.training()
                candidates = {"cudnn": calls.peer_backward(), "octet": calls.backward, "octet_deterministic": calls.deterministic}
                candidates = {name: call for name, call in candidates.items() if call}
                run["backward"], names["backward"] = list(candidates.values()), list(candidates)
            for which in run:
                if which not in options.passes:
                    continue
                repeats = max(1, int(2e12 // flops))
                times = dict(zip(names[which], medians(run[which], options.rounds, repeats)))
                rate = {name: flops * (2.5 if which == "backward" else 1) / ms / 1e9 for name, ms in times.items()}
                rows.append({"pass": which, "dim": dim, "tokens": tokens, "causal": causal, "ms": times, "tflops": rate, "ratio": times["cudnn"] / times["octet"]})
                text = "  ".join(f"{name} {x:6.1f}" for name, x in rate.items())
                print(f"{which:8} d{dim:<4} S {tokens:<6} {'causal' if causal else 'full':6}  {text}  ratio {rows[-1]['ratio']:.3f}", flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pass", dest="passes", default="forward,backward", type=lambda x: x.split(","))
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "f16"])
    parser.add_argument("--remedy", default="f16_inside", choices=REMEDIES)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--library", type=pathlib.Path, default=ROOT / "build/release/src/liboctet.so")
    parser.add_argument("--output", type=pathlib.Path)
    options = parser.parse_args()
    options.dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[options.dtype]

    library = load(options.library)
    check(library, options)
    errors = check_files(library, options) if "backward" in options.passes else None
    rows = measure(library, options)
    if not options.output:
        return
    version = torch.backends.cudnn.version()
    result = {
        "gpu": torch.cuda.get_device_name(),
        "driver": subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True).stdout.strip(),
        "date": datetime.date.today().isoformat(),
        "octet": f"{library.octet_version().decode()} ({revision()})",
        "remedy": options.remedy,
        "dtype": str(options.dtype).removeprefix("torch."),
        "peer": f"cuDNN {version // 10000}.{version // 100 % 100}.{version % 100} through torch {torch.__version__}",
        "rounds": options.rounds,
        "errors": errors,
        "rows": rows,
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n")


main()
