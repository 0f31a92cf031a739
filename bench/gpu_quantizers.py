"""Times octet's quantizers on this GPU beside a copy: same process, same tensor, in alternating rounds, CUDA events,
medians. Before it times, it holds the codes to those of the CPU.

    bench/gpu_quantizers.py [--rounds N] [--library build/release/src/liboctet.so] [--output FILE]

GB/s count the bytes of x that are read and those of the codes and scales that are written, once each, and for a copy
both ways.
"""

import argparse
import ctypes
import json
import pathlib

import torch
from abi import Octet, abi, load, struct
from peers import circumstances, medians

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHAPE = 4, 32, 8192, 128
# Each quantizer by its name: format, operand, granularity, block, smoothing, seed of the rotation, RoPE, norm.
HOW = {
    "int8 per token": ("i8", "q", "token", 0, False, 0, "none"),
    "int8 per block of 64": ("i8", "k", "block", 64, False, 0, "none"),
    "int8 per thread group": ("i8", "k", "thread", 0, False, 0, "none"),
    "int8 per token, smoothed": ("i8", "k", "token", 0, True, 0, "none"),
    "int8 per token, Hadamard": ("i8", "q", "token", 0, False, 1, "none"),
    "RoPE, int8 per token": ("i8", "q", "token", 0, False, 0, "half"),
    "norm, RoPE, int8 per token": ("i8", "q", "token", 0, False, 0, "half", "rms"),
    "norm, RoPE, e4m3 per token": ("e4m3", "q", "token", 0, False, 0, "half", "rms"),
    "e4m3 per channel": ("e4m3", "v", "channel", 0, False, 0, "none"),
    "e4m3 per token": ("e4m3", "q", "token", 0, False, 0, "none"),
}


class Rope:
    """octet_rope, with a norm of random weights where `norm` is one."""

    def __init__(self, x, style, norm):
        dim = x.shape[-1]
        self.weight = (1 + torch.randn(dim, generator=torch.Generator().manual_seed(1)) / 8).bfloat16().to(x.device)
        self.view = Octet.view(self.weight.view(1, 1, 1, dim))
        self.rope = struct(abi.Rope, style=abi.ROPE_STYLES[style])
        if norm != "none":
            self.rope.norm, self.rope.norm_eps = abi.NORMS[norm], 1e-6
            self.rope.norm_weight = ctypes.pointer(self.view)


class Quantizer:
    """A prepared call of octet_quantize."""

    def __init__(self, library, x, format, operand, granularity, block, smooth, seed, rope, norm="none"):
        self.library = library
        batch, heads, tokens, dim = x.shape
        groups = ctypes.c_int64()
        operand, granularity = abi.OPERANDS[operand], abi.GRANULARITIES[granularity]
        library.octet_scale_groups(
            operand, granularity, ctypes.c_int64(block), ctypes.c_int64(tokens), ctypes.byref(groups)
        )
        per_channel = granularity == abi.GRANULARITIES["channel"]
        scale = torch.full(
            (batch, heads, *((1, dim) if per_channel else (groups.value, 1))), torch.nan, device=x.device
        )
        self.codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
        self.mean = torch.empty((batch, heads, 1, dim), device=x.device) if smooth else None
        self.scale = scale
        views = {"scale": Octet.view(scale)} | ({"mean": Octet.view(self.mean)} if smooth else {})
        pointers = {name: ctypes.pointer(view) for name, view in views.items()}
        self.how = struct(
            abi.Quantization, operand=operand, granularity=granularity, block=block, hadamard_seed=seed, **pointers
        )
        self.out = Octet.view(self.codes)
        self.out.dtype, self.out.quantization = abi.DTYPES[format], ctypes.pointer(self.how)
        self.x, self.rope = Octet.view(x), Rope(x, rope, norm)
        self.bytes = x.numel() * x.element_size() + self.codes.numel() + 4 * scale.numel()
        self.cuda = x.is_cuda

    def __call__(self):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream) if self.cuda else None
        by = ctypes.byref
        if self.library.octet_quantize(by(self.x), by(self.rope.rope), by(self.out), None, stream):
            raise RuntimeError(self.library.octet_message().decode())


class Turn:
    """RoPE, perhaps after a norm, x to y of its type."""

    def __init__(self, library, x, norm="none"):
        self.library, self.y = library, torch.empty_like(x)
        self.views = Octet.view(x), Octet.view(self.y)
        self.rope = Rope(x, "half", norm)
        self.bytes = 2 * x.numel() * x.element_size()

    def __call__(self):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        x, y = (ctypes.byref(view) for view in self.views)
        if self.library.octet_apply_rope(ctypes.byref(self.rope.rope), x, ctypes.c_uint32(0), y, stream):
            raise RuntimeError(self.library.octet_message().decode())


def check(library):
    """The codes and scales of the CPU, bit by bit."""
    x = torch.randn((1, 2, 1000, 128), generator=torch.Generator().manual_seed(0)).bfloat16()
    for name, how in HOW.items():
        cpu, cuda = Quantizer(library, x, *how), Quantizer(library, x.cuda(), *how)
        cpu()
        cuda()
        if not (torch.equal(cpu.codes, cuda.codes.cpu()) and torch.equal(cpu.scale, cuda.scale.cpu())):
            raise RuntimeError(f"{name}: the codes differ from those of the CPU")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--library", type=pathlib.Path, default=ROOT / "build/release/src/liboctet.so")
    parser.add_argument("--output", type=pathlib.Path)
    options = parser.parse_args()
    library = load(options.library)
    check(library)
    x = torch.randn(SHAPE, generator=torch.Generator("cuda").manual_seed(0), device="cuda").bfloat16()
    target = torch.empty_like(x)
    calls = {name: Quantizer(library, x, *how) for name, how in HOW.items()} | {
        "RoPE": Turn(library, x),
        "norm, RoPE": Turn(library, x, "rms"),
    }
    sizes = {name: call.bytes for name, call in calls.items()} | {"copy": 2 * x.numel() * x.element_size()}
    calls["copy"] = lambda: target.copy_(x)
    ms = dict(zip(calls, medians(list(calls.values()), options.rounds, 4), strict=True))
    rate = {name: sizes[name] / ms[name] / 1e6 for name in calls}
    for name in calls:
        print(
            f"{name:28} {ms[name]:.3f} ms  {rate[name]:5.0f} GB/s  {rate[name] / rate['copy']:.2f} of a copy",
            flush=True,
        )
    for name in ("RoPE, int8 per token", "norm, RoPE, int8 per token", "norm, RoPE"):
        print(f"{name}: {ms[name] / ms['RoPE']:.2f} of RoPE alone")
    if options.output:
        result = circumstances(library, options.rounds) | {
            "shape": SHAPE,
            "dtype": "bf16",
            "ms": ms,
            "gigabytes_per_second": rate,
        }
        options.output.write_text(json.dumps(result, indent=1) + "\n")


main()
