"""Times octet's 8-bit forward passes on this GPU against cuDNN in bf16 through torch and, where JAX is installed,
cuDNN in fp8: same process, same inputs, in alternating rounds, CUDA events around groups of launches, medians. Before
it times, it holds every precision to float64 attention, on random inputs and on the real ones of examples/data.

    bench/gpu_bytes.py [--rounds N] [--library build/release/src/liboctet.so] [--output FILE]

"whole" is bf16 in, bf16 out, quantization counted, against cuDNN in bf16; "kernel" is the attention kernel alone, from
the profiler, against cuDNN in fp8, which takes e4m3 and gives e4m3. "fp8 from e4m3" and fp8_raw take e4m3 tensors too.
FLOPs are those of the two products, 4 b h n m d, halved under a causal mask.
"""

import argparse
import functools
import json
import pathlib
import re

import torch
from abi import FORWARD, Octet, load
from peers import circumstances, cudnn, cudnn_name, cudnn_version, medians
from problems import GPU_BYTES

ROOT = pathlib.Path(__file__).resolve().parent.parent
# label: precision, dtype of the inputs, dtype of o
CALLS = {
    "int8": ("int8", torch.bfloat16, torch.bfloat16),
    "int8_f16": ("int8_f16", torch.bfloat16, torch.bfloat16),
    "int8_fp8": ("int8_fp8", torch.bfloat16, torch.bfloat16),
    "fp8": ("fp8", torch.bfloat16, torch.bfloat16),
    "fp8 from e4m3": ("fp8", torch.float8_e4m3fn, torch.bfloat16),
    "fp8_raw": ("fp8_raw", torch.float8_e4m3fn, torch.float8_e4m3fn),
}


def exact(q, k, v, causal):
    """o and lse in float64, a head at a time."""
    outputs = []
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            s = q[b, h].double() @ k[b, h].double().T / q.shape[-1] ** 0.5
            if causal:
                s = s.masked_fill(torch.ones(s.shape, dtype=torch.bool, device=s.device).triu(1), float("-inf"))
            outputs.append((s.softmax(-1) @ v[b, h].double(), s.logsumexp(-1)))
    return [torch.stack(x).unflatten(0, q.shape[:2]) for x in zip(*outputs, strict=True)]


def prepare(library, label, q, k, v, causal, lse=False):
    """A call, or None where the library has no such kernel."""
    precision, dtype, out = CALLS[label]
    tensors = dict(
        q=q.to(dtype), k=k.to(dtype), v=v.to(dtype), o=torch.full(q.shape, float("nan"), device=q.device).to(out)
    )
    if lse:
        tensors["lse"] = torch.full(q.shape[:3], float("nan"), device=q.device)
    try:
        return Octet(library, FORWARD, precision, causal, tensors)
    except RuntimeError as error:
        if "no backend can solve" not in str(error):
            raise


def relative(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def errors(library):
    """Relative L2 of o, and what lse is off by at most, of every precision: label -> inputs -> error."""
    from safetensors.torch import load_file

    sets = {}
    for path in sorted(ROOT.glob("examples/data/*.safetensors")):
        data = load_file(path)
        sets[path.stem] = [data[name].cuda().bfloat16() for name in ("q", "k", "v")], True
    generator = torch.Generator("cuda").manual_seed(3)
    for dim in (64, 128):
        sets[f"normal {dim}"] = (
            [torch.randn((2, 3, 1500, dim), generator=generator, device="cuda").bfloat16() for _ in range(3)],
            False,
        )
    found = {}
    for name, ((q, k, v), causal) in sets.items():
        for label in CALLS:
            call = prepare(library, label, q, k, v, causal, lse=True)
            if not call:
                continue
            call()
            want, lse = exact(*(call.tensors[x].bfloat16() for x in "qkv"), causal)
            error, off = relative(call.tensors["o"], want), (call.tensors["lse"].double() - lse).abs().max().item()
            if not error < 0.1:
                raise RuntimeError(
                    f"{label}, {name}: o differs from float64 by {error:.3g} in relative L2: not the same problem"
                )
            found.setdefault(label, {})[name] = {"o": error, "lse": off, "real": causal}
            print(f"{label:14} {name:16} o {error:.4f}  lse off by at most {off:.4f}", flush=True)
    return found


def kernels(call):
    """Milliseconds of each of octet's kernels in a call, by name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            call()
        torch.cuda.synchronize()
    times = {}
    for event in profile.key_averages():
        name = re.search(r"octet::cuda::[\w:]*?(\w+)[<(]", event.key.replace("(anonymous namespace)::", ""))
        if name:
            times[name[1]] = times.get(name[1], 0) + event.device_time_total / 5000
    return times


def cudnn_fp8(q, k, v, causal):
    """Milliseconds of the kernel of cuDNN's fp8 forward pass, through JAX."""
    import jax
    import jax.numpy as jnp
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    one = jnp.ones((1, 1, 1, 1), jnp.float32)
    names = "amax_dQ amax_dK amax_dV amax_dP descale_q descale_k descale_v descale_s scale_s scale_o descale_o "
    names += "descale_dO descale_dP scale_dQ scale_dK scale_dV scale_dP"
    parameters = {name: one for name in names.split()}
    tensors = [
        jnp.asarray(x.transpose(1, 2).contiguous().float().cpu().numpy()).astype(jnp.float8_e4m3fn) for x in (q, k, v)
    ]
    run = jax.jit(
        lambda q, k, v: dot_product_attention(
            q,
            k,
            v,
            scale=q.shape[-1] ** -0.5,
            mask_type=MaskType.CAUSAL if causal else MaskType.NO_MASK,
            use_fp8=True,
            fp8_params=parameters,
        )
    )
    run(*tensors)[0].block_until_ready()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(10):
            out = run(*tensors)
        out[0].block_until_ready()
    return sum(e.device_time_total for e in profile.key_averages() if "cudnn" in e.key or "sdpa" in e.key) / 10000


def attention_kernel(parts):
    return next(ms for name, ms in parts.items() if name.endswith("forward"))


def measure(library, fp8, options):
    rows = []
    for batch, heads, tokens, dim in GPU_BYTES:
        for causal in (False, True):
            generator = torch.Generator("cuda").manual_seed(1)
            q, k, v = (
                torch.randn((batch, heads, tokens, dim), generator=generator, device="cuda").bfloat16()
                for _ in range(3)
            )
            flops = 4 * batch * heads * tokens * tokens * dim * (0.5 if causal else 1)
            ours = {label: call for label in CALLS if (call := prepare(library, label, q, k, v, causal))}
            calls = {"cudnn": functools.partial(cudnn, q, k, v, causal)} | ours
            times = dict(
                zip(calls, medians(list(calls.values()), options.rounds, max(1, int(1e12 // flops))), strict=True)
            )
            parts = {label: kernels(call) for label, call in ours.items()}
            kernel = {label: attention_kernel(x) for label, x in parts.items()}
            if fp8:
                kernel["cudnn_fp8"] = cudnn_fp8(q, k, v, causal)
            row = {
                "batch": batch,
                "heads": heads,
                "tokens": tokens,
                "dim": dim,
                "causal": causal,
                "ms": times,
                "kernels_ms": parts,
            }
            row["tflops"] = {label: flops / ms / 1e9 for label, ms in times.items()}
            row["kernel_tflops"] = {label: flops / ms / 1e9 for label, ms in kernel.items()}
            row["ratios"] = {label: times["cudnn"] / times[label] for label in ours}
            row["kernel_ratios"] = {label: kernel["cudnn_fp8"] / kernel[label] for label in ours} if fp8 else {}
            rows.append(row)
            print(
                f"d{dim} S {tokens} {'causal' if causal else 'full'}: cudnn {row['tflops']['cudnn']:.0f}, "
                f"fp8 {row['kernel_tflops'].get('cudnn_fp8', 0):.0f} TFLOP/s"
            )
            for label, part in parts.items():
                text = ", ".join(f"{name} {1000 * ms:.0f}" for name, ms in part.items())
                print(
                    f"    {label:14} {row['tflops'][label]:5.0f} ({row['ratios'][label]:.2f}x)  "
                    f"kernel {row['kernel_tflops'][label]:5.0f} ({row['kernel_ratios'].get(label, 0):.2f}x)   "
                    f"us: {text}",
                    flush=True,
                )
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--library", type=pathlib.Path, default=ROOT / "build/release/src/liboctet.so")
    parser.add_argument("--output", type=pathlib.Path)
    options = parser.parse_args()
    try:
        import jax

        fp8 = f"{cudnn_version()} in fp8 through JAX {jax.__version__}"
    except ImportError:
        fp8 = None
    library = load(options.library)
    found = errors(library)
    rows = measure(library, fp8, options)
    if not options.output:
        return
    result = circumstances(library, options.rounds) | {
        "peers": {"cudnn": f"{cudnn_name()} in bfloat16"} | ({"cudnn_fp8": fp8} if fp8 else {}),
        "errors": found,
        "rows": rows,
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n")


main()
