"""Times octet against torch's scaled_dot_product_attention on this CPU: same process, same inputs, same number of
threads, in alternating rounds, so that a slow minute of the machine slows both. Needs torch.

    bench/cpu.py [--threads N] [--rounds N] [--library build/release/src/liboctet.so]

Stores every median and the ratios in bench/results/cpu-<model>.json.
"""

import argparse
import datetime
import json
import math
import os
import pathlib
import re
import statistics
import time

import torch
from abi import BACKWARD, FORWARD, Octet, load, revision
from problems import CPU

ROOT = pathlib.Path(__file__).resolve().parent.parent
# pass, octet's precision, type of the inputs of both, ratio that is asked for
CASES = [
    ("forward", "f32", torch.float32, 1.2),
    ("forward", "bf16", torch.bfloat16, 1.3),
    ("forward", "int8", torch.bfloat16, 2.0),
    ("backward", "f32", torch.float32, 1.2),
]


def prepare(library, which, precision, dtype, causal, shape, threads):
    """The two calls to time, torch's and octet's, after a look that they agree."""
    generator = torch.Generator().manual_seed(1)
    q, k, v, do = (torch.randn(shape, generator=generator).to(dtype) for _ in range(4))
    attention = torch.nn.functional.scaled_dot_product_attention
    o, lse = torch.empty_like(q), torch.empty(shape[:3])
    run = Octet(library, FORWARD, precision, causal, dict(q=q, k=k, v=v, o=o, lse=lse), threads=threads)
    run()
    want = attention(q, k, v, is_causal=causal)
    expect_close("o", o, want)
    if which == "forward":
        return lambda: attention(q, k, v, is_causal=causal), run

    grads = {f"d{name}": torch.empty_like(x) for name, x in zip("qkv", (q, k, v), strict=True)}
    backward = Octet(
        library, BACKWARD, precision, causal, dict(q=q, k=k, v=v, o=o, lse=lse, do=do, **grads), threads=threads
    )
    backward()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, is_causal=causal)
    reference = lambda: torch.autograd.grad(out, leaves, do, retain_graph=True)
    for (name, got), expected in zip(grads.items(), reference(), strict=True):
        expect_close(name, got, expected)
    return reference, backward


def expect_close(name, got, want):
    error = ((got.double() - want.double()).norm() / want.double().norm()).item()
    if not error < 0.05:
        raise RuntimeError(f"{name} differs from torch's by {error:.3g} in relative L2: not the same problem")


PAUSE = 0.02  # seconds; torch's threads spin for a while after a call and would take a core from whoever comes next


def medians(calls, rounds):
    """Median seconds of each call, one of each per round, in turns."""
    for call in calls:
        call()
    seconds = [[] for _ in calls]
    for _ in range(rounds):
        for call, samples in zip(calls, seconds, strict=True):
            time.sleep(PAUSE)
            start = time.perf_counter()
            call()
            samples.append(time.perf_counter() - start)
    return [statistics.median(samples) for samples in seconds]


def cpu_model():
    """The model name, with what the system calls family and model, as virtual machines hide the name."""
    text = pathlib.Path("/proc/cpuinfo").read_text()
    field = lambda name: re.search(rf"^{name}\s*: (.*)$", text, re.MULTILINE).group(1)
    return f"{field('model name')} (family {field('cpu family')}, model {field('model')})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--library", type=pathlib.Path, default=ROOT / "build/release/src/liboctet.so")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    library = load(options.library)
    rows = []
    for shape in CPU:
        batch, heads, tokens, dim = shape
        for causal in (False, True):
            for which, precision, dtype, asked in CASES:
                calls = prepare(library, which, precision, dtype, causal, shape, options.threads)
                torch_seconds, octet_seconds = medians(calls, options.rounds)
                flops = (
                    4
                    * batch
                    * heads
                    * tokens
                    * tokens
                    * dim
                    * (0.5 if causal else 1)
                    * (2.5 if which == "backward" else 1)
                )
                rows.append(
                    {
                        "pass": which,
                        "precision": precision,
                        "shape": {"batch": batch, "heads": heads, "tokens": tokens, "dim": dim},
                        "causal": causal,
                        "octet_seconds": octet_seconds,
                        "octet_gflops": flops / octet_seconds / 1e9,
                        "torch_dtype": str(dtype).removeprefix("torch."),
                        "torch_seconds": torch_seconds,
                        "torch_gflops": flops / torch_seconds / 1e9,
                        "ratio": torch_seconds / octet_seconds,
                        "asked": asked,
                    }
                )
                r = rows[-1]
                print(
                    f"d{dim:<4} {'causal' if causal else 'full':6} {which:8} {precision:5} "
                    f"octet {r['octet_gflops']:7.1f} GFLOP/s, torch {r['torch_dtype']:8} {r['torch_gflops']:7.1f}, "
                    f"ratio {r['ratio']:.2f} (asked {asked})",
                    flush=True,
                )

    model = cpu_model()
    result = {
        "cpu": model,
        "threads": options.threads,
        "date": datetime.date.today().isoformat(),
        "octet": f"{library.octet_version().decode()} ({revision()})",
        "peer": f"torch {torch.__version__} scaled_dot_product_attention, {torch.backends.cpu.get_cpu_capability()}",
        "rounds": options.rounds,
        "geometric_mean_ratio": math.exp(statistics.fmean(math.log(r["ratio"]) for r in rows)),
        "rows": rows,
    }
    name = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
    target = ROOT / "bench/results" / f"cpu-{name}.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(result, indent=1) + "\n")
    print(f"stored in {target.relative_to(ROOT)}")


main()
