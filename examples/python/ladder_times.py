"""Times the rungs of the ladder beside torch's scaled_dot_product_attention and jax.nn.dot_product_attention.

    python -m octet.ladder build
    python examples/python/ladder_times.py --dim 128 --chart ladder.svg

Prints the time and the error of each, and draws what ladder/README.md shows of an H200. Rungs that are not built for
this GPU, and JAX where it is missing or sees no GPU, are left out and named.
"""

import argparse
import importlib.util
import itertools
import statistics
from importlib.machinery import SourceFileLoader

import octet
import torch
from octet import ladder


def time_torch(run, runs):
    """The median time in ms of launches that stand back to back."""
    for _ in range(3):
        run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def time_jax(q, k, v, causal, runs):
    """The mean time in ms of jax.nn.dot_product_attention with cuDNN, of calls that are in flight together."""
    import time

    import jax

    q, k, v = (
        jax.device_put(x.transpose(1, 2).float().cpu().numpy().astype("float16"), jax.devices("gpu")[0])
        for x in (q, k, v)
    )
    run = jax.jit(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn"))
    for _ in range(3):
        jax.block_until_ready(run(q, k, v))
    began = time.perf_counter()
    jax.block_until_ready([run(q, k, v) for _ in range(runs)])
    return (time.perf_counter() - began) / runs * 1e3


def report():
    """ladder/report, a script without .py, as a module: it draws the chart."""
    loader = SourceFileLoader("report", str(ladder.folder() / "report"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("report", loader))
    loader.exec_module(module)
    return module


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--chart", help="an SVG file to write")
    options = parser.parse_args()
    print("rungs:", ", ".join(ladder.rungs()))
    if not torch.cuda.is_available():
        print("There is no GPU here, hence nothing to time.")
        return

    shape = (1, options.heads, options.seq, options.dim)
    x = [torch.randn(shape, device="cuda") for _ in range(3)]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    expected = sdpa(*(each.double() for each in x), is_causal=options.causal)
    records = []

    def add(name, element, ms, o=None):
        pairs = options.seq * ((options.seq + 1) / 2 if options.causal else options.seq)
        tflops = 4 * options.heads * pairs * options.dim / ms * 1e-9
        error = "" if o is None else f", error {((o.double() - expected).norm() / expected.norm()).item():.1e}"
        print(f"{name:28} {ms:9.4f} ms {tflops:8.2f} TFLOP/s{error}")
        record = {"batch": 1, "heads": options.heads, "seq": options.seq, "dim": options.dim}
        times = {"median_ms": ms, "tflops": tflops}
        records.append({**record, "rung": name, "kernel": "", "element": element, "time": times})

    for rung in ladder.rungs():
        element = "f32" if rung[0] in "123" else "f16"
        inputs = [each.to(torch.float32 if element == "f32" else torch.float16) for each in x]
        run = lambda: ladder.attention(*inputs, rung=rung, causal=options.causal)  # noqa: B023  # called at once
        try:
            o = run()
        except octet.Unsupported as error:
            print(f"{rung}: left out, {error}")
            continue
        add(rung, element, time_torch(run, options.runs), o)
    inputs = [each.half() for each in x]
    run = lambda: sdpa(*inputs, is_causal=options.causal)
    add("torch sdpa", "f16", time_torch(run, options.runs), run())
    try:
        add("jax attention", "f16", time_jax(*x, options.causal, options.runs))
    except Exception as error:  # no JAX, or none with a GPU and cuDNN
        print(f"jax.nn.dot_product_attention: left out, {type(error).__name__}: {str(error).splitlines()[0]}")
    if options.chart:
        with open(options.chart, "w") as file:
            file.write(report().chart(records, torch.cuda.get_device_name()))


if __name__ == "__main__":
    main()
