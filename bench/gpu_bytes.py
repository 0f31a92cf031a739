"""Times octet's 8-bit forward passes on this GPU against cuDNN in bf16 through torch and, where JAX is installed, cuDNN
in fp8: same process, same inputs, in alternating rounds, CUDA events around groups of launches, medians. Before it times,
it prints the error of every precision against float64 attention.

    bench/gpu_bytes.py [--rounds N] [--library build/release/src/liboctet.so] [--no-jax] [--output FILE]

Times are of whole calls: bf16 in, bf16 out, quantisation counted; "kernel" is the attention kernel alone, from the
profiler. fp8 from e4m3 takes e4m3 tensors, as fp8_raw does. FLOPs are those of the two products, halved under a causal mask.
"""

import argparse
import datetime
import json
import pathlib
import statistics
import traceback

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from abi import FORWARD, Octet, load, revision

ROOT = pathlib.Path(__file__).resolve().parent.parent
# batch, heads, tokens, dim
SHAPES = [(4, 16, 4096, 128), (1, 16, 16384, 128), (4, 32, 4096, 64), (1, 32, 16384, 64), (1, 16, 2560, 64)]
# label: precision, dtype of the inputs, dtype of o
CALLS = {
    "int8": ("int8", torch.bfloat16, torch.bfloat16),
    "int8_fp8": ("int8_fp8", torch.bfloat16, torch.bfloat16),
    "fp8": ("fp8", torch.bfloat16, torch.bfloat16),
    "fp8 from e4m3": ("fp8", torch.float8_e4m3fn, torch.bfloat16),
    "fp8_raw": ("fp8_raw", torch.float8_e4m3fn, torch.float8_e4m3fn),
}


def cudnn(q, k, v, causal):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def exact(q, k, v, causal):
    """o and lse in float64, a head at a time."""
    outputs = []
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            s = q[b, h].double() @ k[b, h].double().T / q.shape[-1] ** 0.5
            if causal:
                s = s.masked_fill(torch.ones(s.shape, dtype=torch.bool, device=s.device).triu(1), float("-inf"))
            outputs.append((s.softmax(-1) @ v[b, h].double(), s.logsumexp(-1)))
    return [torch.stack(x).unflatten(0, q.shape[:2]) for x in zip(*outputs)]


def prepare(library, label, q, k, v, causal, lse=False):
    precision, dtype, out = CALLS[label]
    tensors = dict(q=q.to(dtype), k=k.to(dtype), v=v.to(dtype), o=torch.empty(q.shape, dtype=out, device=q.device))
    if lse:
        tensors["lse"] = torch.full(q.shape[:3], float("nan"), device=q.device)
    return Octet(library, FORWARD, precision, causal, tensors)


def relative(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def errors(library):
    """Relative L2 of o of every precision: the worst of the files of examples/data, and on normal numbers."""
    from safetensors.torch import load_file

    sets = {}
    for path in sorted(ROOT.glob("examples/data/*.safetensors")):
        data = load_file(path)
        sets[path.stem] = [data[name].cuda().bfloat16() for name in ("q", "k", "v")], True
    generator = torch.Generator("cuda").manual_seed(3)
    for dim in (64, 128):
        sets[f"normal {dim}"] = [torch.randn((2, 3, 1500, dim), generator=generator, device="cuda").bfloat16() for _ in range(3)], False
    found = {}
    for name, ((q, k, v), causal) in sets.items():
        for label, (_, dtype, _) in CALLS.items():
            call = prepare(library, label, q, k, v, causal, lse=True)
            call()
            want, lse = exact(*(call.tensors[x].bfloat16() for x in "qkv"), causal)
            found.setdefault(label, {})[name] = relative(call.tensors["o"], want)
            off = (call.tensors["lse"].double() - lse).abs().max().item()
            print(f"{label:14} {name:16} o {found[label][name]:.4f}  lse off by at most {off:.4f}", flush=True)
    return found


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


def kernels(call):
    """Milliseconds of each kernel of a call, by the first word of its name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            call()
        torch.cuda.synchronize()
    times = {}
    for event in profile.key_averages():
        for name in ("byte_forward", "survey", "finish", "quantise", "fill", "count_blocks"):
            if name in event.key:
                times[name] = times.get(name, 0) + event.device_time_total / 5000
    return times


def cudnn_fp8(q, k, v, causal):
    """A call of cuDNN's fp8 forward through JAX that returns milliseconds, or None."""
    import jax
    import jax.numpy as jnp
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    one = jnp.ones((1, 1, 1, 1), jnp.float32)
    names = "amax_dQ amax_dK amax_dV amax_dP descale_q descale_k descale_v descale_s scale_s scale_o descale_o descale_dO descale_dP scale_dQ scale_dK scale_dV scale_dP"
    parameters = {name: one for name in names.split()}
    tensors = [jnp.asarray(x.transpose(1, 2).contiguous().float().cpu().numpy()).astype(jnp.float8_e4m3fn) for x in (q, k, v)]
    run = jax.jit(
        lambda q, k, v: dot_product_attention(
            q, k, v, scale=q.shape[-1] ** -0.5, mask_type=MaskType.CAUSAL if causal else MaskType.NO_MASK, use_fp8=True, fp8_params=parameters
        )
    )
    run(*tensors)[0].block_until_ready()

    def time():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(5):
                out = run(*tensors)
            out[0].block_until_ready()
        events = [e for e in profile.key_averages() if "cudnn" in e.key or "sdpa" in e.key]
        return sum(e.device_time_total for e in events) / 5000

    return time


def measure(library, options):
    rows = []
    for batch, heads, tokens, dim in SHAPES:
        for causal in (False, True):
            generator = torch.Generator("cuda").manual_seed(1)
            q, k, v = (torch.randn((batch, heads, tokens, dim), generator=generator, device="cuda").bfloat16() for _ in range(3))
            flops = 4 * batch * heads * tokens * tokens * dim * (0.5 if causal else 1)
            calls = {"cudnn": lambda: cudnn(q, k, v, causal)} | {label: prepare(library, label, q, k, v, causal) for label in CALLS}
            times = dict(zip(calls, medians(list(calls.values()), options.rounds, max(1, int(1e12 // flops)))))
            parts = {label: kernels(calls[label]) for label in CALLS}
            row = {"shape": [batch, heads, tokens, dim], "causal": causal, "ms": times, "tflops": {n: flops / t / 1e9 for n, t in times.items()}, "kernels": parts}
            if options.jax and batch * heads * dim > 1024:
                try:
                    row["ms"]["cudnn fp8"] = cudnn_fp8(q, k, v, causal)()
                    row["tflops"]["cudnn fp8"] = flops / row["ms"]["cudnn fp8"] / 1e9
                except Exception as error:
                    print("cuDNN fp8:", traceback.format_exception_only(error)[-1][:300])
                    options.jax = False
            rows.append(row)
            print(f"d{dim} S {tokens} {'causal' if causal else 'full'}: " + ", ".join(f"{n} {x:.0f} ({times['cudnn'] / times[n]:.2f})" for n, x in row["tflops"].items()))
            for label, part in parts.items():
                text = ", ".join(f"{n} {1000 * t:.0f}" for n, t in part.items())
                print(f"    {label:14} us: {text}; kernel {flops / part['byte_forward'] / 1e9 if 'byte_forward' in part else 0:.0f} TFLOP/s", flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--library", type=pathlib.Path, default=ROOT / "build/release/src/liboctet.so")
    parser.add_argument("--no-jax", dest="jax", action="store_false")
    parser.add_argument("--output", type=pathlib.Path)
    options = parser.parse_args()
    library = load(options.library)
    found = errors(library)
    rows = measure(library, options)
    if not options.output:
        return
    version = torch.backends.cudnn.version()
    result = {
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "octet": f"{library.octet_version().decode()} ({revision()})",
        "peer": f"cuDNN {version // 10000}.{version // 100 % 100}.{version % 100} through torch {torch.__version__}",
        "rounds": options.rounds,
        "errors": found,
        "rows": rows,
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n")


main()
