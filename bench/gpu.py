"""Times octet on this GPU against cuDNN through torch and, where `flash_attn_interface` can be imported, against
FlashAttention-3: same process, same inputs, in alternating rounds, CUDA events around groups of launches, medians.
Before it times, it holds all of them to float64 attention, on random inputs and on the real ones of examples/data.

    bench/gpu.py [--pass forward,backward] [--rounds N] [--library build/release/src/liboctet.so] [--output FILE]

FLOPs are those of the two products forward, 4 b h n m d, halved under a causal mask, times 2.5 backward.
"""

import argparse
import importlib
import importlib.metadata
import json
import pathlib

import torch
from abi import BACKWARD, BIAS_CORRECTIONS, FORWARD, Octet, load
from peers import circumstances, cudnn, cudnn_name, medians
from problems import CHANNELS, GPU, TOKENS, shape

ROOT = pathlib.Path(__file__).resolve().parent.parent
TENSORS = ["o", "dq", "dk", "dv"]


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
    """octet's calls: `forward` as for inference, `training` keeps what a backward pass needs, `backward`, and
    `deterministic` where dq is summed in order. None where it has no such kernel."""

    def __init__(self, library, problem, options):
        p = problem
        precision = "bf16" if p.q.dtype == torch.bfloat16 else "f16"
        nan = lambda x: torch.full_like(x, float("nan"))
        self.o, o_residual, lse = nan(p.q), nan(p.q), torch.full(tuple(p.q.shape[:3]), float("nan"), device="cuda")
        self.gradients = [nan(x) for x in (p.q, p.k, p.v)]

        def call(which, tensors, **more):
            try:
                return Octet(
                    library,
                    which,
                    precision,
                    p.causal,
                    dict(q=p.q, k=p.k, v=p.v, o=self.o, lse=lse) | tensors,
                    bias_correction=BIAS_CORRECTIONS[options.bias_correction],
                    **more,
                )
            except RuntimeError as error:
                if "no backend can solve" not in str(error):
                    raise

        residual = {} if options.bias_correction == "none" else dict(o_residual=o_residual)
        kept = dict(zip(("dq", "dk", "dv"), self.gradients, strict=True)) | dict(do=p.do) | residual
        self.forward = call(FORWARD, {})
        self.training = call(FORWARD, residual)
        self.backward = call(BACKWARD, kept)
        self.deterministic = call(BACKWARD, kept, deterministic=1)

    def results(self, backward):
        """o, and with `backward` dq, dk, dv."""
        if not (backward and self.backward):
            self.forward()
            return [self.o]
        self.training()
        self.backward()
        return [self.o, *self.gradients]


class Peer:
    """Attention by `function(q, k, v, causal)` and its backward pass by torch, which runs that pass alone."""

    def __init__(self, function, problem):
        p = problem
        self.forward = lambda: function(p.q, p.k, p.v, p.causal)
        leaves = [x.detach().requires_grad_() for x in (p.q, p.k, p.v)]
        o = function(*leaves, p.causal)
        self.backward = lambda: torch.autograd.grad(o, leaves, p.do, retain_graph=True)

    def results(self, backward):
        return [self.forward(), *(self.backward() if backward else [])]


def others_here():
    """Returns the other programs that can be imported here: name -> (description, function)."""
    found = {"cudnn": (cudnn_name(), cudnn)}
    try:
        module = importlib.import_module("flash_attn_interface")
    except ImportError:
        return found

    def fa3(q, k, v, causal):
        # It takes [batch, token, head, dim]: the same memory, transposed views.
        out = module.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    packages = importlib.metadata.packages_distributions().get("flash_attn_interface", [])
    version = (
        importlib.metadata.version(packages[0]) if packages else getattr(module, "__version__", "of unknown version")
    )
    return found | {"fa3": (f"FlashAttention-3 {version}", fa3)}


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

    backward = "backward" in options.passes
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


def calls_of(which, programs):
    """Returns the calls that are timed for one pass: name -> call."""
    ours = programs["octet"]
    mine = (
        {"octet": ours.forward, "octet_training": ours.training}
        if which == "forward"
        else {"octet": ours.backward, "octet_deterministic": ours.deterministic}
    )
    theirs = {name: getattr(x, which) for name, x in programs.items() if name != "octet"}
    return {name: call for name, call in (theirs | mine).items() if call}


def measure(programs_of, options):
    rows = []
    for dim, tokens in GPU:
        for causal in (False, True):
            problem = Problem.draw(shape(dim, tokens), options.dtype, causal)
            programs = programs_of(problem)
            programs["octet"].training()  # what the backward pass reads
            products = 4 * TOKENS * tokens * CHANNELS * (0.5 if causal else 1)
            for which in options.passes:
                calls = calls_of(which, programs)
                if "octet" not in calls:
                    continue
                times = dict(
                    zip(
                        calls, medians(list(calls.values()), options.rounds, max(1, int(2e12 // products))), strict=True
                    )
                )
                rate = {name: products * (2.5 if which == "backward" else 1) / ms / 1e9 for name, ms in times.items()}
                ratios = {name: times[name] / times["octet"] for name in times if not name.startswith("octet")}
                rows.append(
                    {
                        "pass": which,
                        "dim": dim,
                        "tokens": tokens,
                        "causal": causal,
                        "ms": times,
                        "tflops": rate,
                        "ratios": ratios,
                    }
                )
                text = (
                    "  ".join(f"{name} {x:6.1f}" for name, x in rate.items())
                    + "  times faster than "
                    + ", ".join(f"{name} {x:.3f}" for name, x in ratios.items())
                )
                print(
                    f"{which:8} d{dim:<4} S {tokens:<6} {'causal' if causal else 'full':6}  TFLOP/s  {text}", flush=True
                )
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pass", dest="passes", default="forward,backward", type=lambda x: x.split(","))
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "f16"])
    parser.add_argument("--bias-correction", default="f16", choices=BIAS_CORRECTIONS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--library", type=pathlib.Path, default=ROOT / "build/release/src/liboctet.so")
    parser.add_argument("--output", type=pathlib.Path)
    options = parser.parse_args()
    options.dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[options.dtype]

    library = load(options.library)
    others = others_here()
    programs_of = lambda problem: (
        {"octet": Ours(library, problem, options)}
        | {name: Peer(function, problem) for name, (_, function) in others.items()}
    )
    for name, (description, _) in others.items():
        print(f"{name}: {description}", flush=True)
    found = check(programs_of, options)
    rows = measure(programs_of, options)
    if not options.output:
        return
    result = circumstances(library, options.rounds) | {
        "bias_correction": options.bias_correction,
        "dtype": str(options.dtype).removeprefix("torch."),
        "peers": {name: description for name, (description, _) in others.items()},
        "errors": found,
        "rows": rows,
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n")


main()
