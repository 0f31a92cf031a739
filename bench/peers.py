"""The benchmarks of a GPU share this: the peers, rounds of timing, and records of where and when they ran."""

import datetime
import importlib
import importlib.metadata
import statistics
import subprocess

import torch
from abi import revision
from torch.nn.attention import SDPBackend, sdpa_kernel


def cudnn(q, k, v, causal):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def cudnn_version():
    version = torch.backends.cudnn.version()
    return f"cuDNN {version // 10000}.{version // 100 % 100}.{version % 100}"


def cudnn_name():
    return f"{cudnn_version()} through torch {torch.__version__}"


def gpu_peers():
    """Returns the peers that can be imported here: name -> (description, function of q, k, v and causal)."""
    found = {"cudnn": (cudnn_name(), cudnn)}
    for name, title, path in (
        ("fa3", "FlashAttention-3", "flash_attn_interface"),
        ("fa4", "FlashAttention-4", "flash_attn.cute"),
    ):
        try:
            module = importlib.import_module(path)
        except ImportError:
            continue
        found[name] = (f"{title} {_version(module, path)}", _flash(module.flash_attn_func))
    return found


def eight_bit_peers():
    """The peers of 8 bits that can be imported here, without a mask: name -> (description, function of q, k, v)."""
    found = {}
    for name, title, path, function in (
        ("sage", "SageAttention", "sageattention", "sageattn"),
        ("comfy", "comfy-kitchen", "comfy_kitchen.sage_attention", "int8_attention"),
    ):
        try:
            module = importlib.import_module(path)
        except ImportError:
            continue
        found[name] = (f"{title} {_version(module, path)}", getattr(module, function))
    return found


def _flash(function):
    """FlashAttention takes [batch, token, head, dim]: the same memory, transposed views."""

    def call(q, k, v, causal):
        out = function(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return call


def _version(module, path):
    packages = importlib.metadata.packages_distributions().get(path.split(".")[0], [])
    return importlib.metadata.version(packages[0]) if packages else getattr(module, "__version__", "of unknown version")


def medians(calls, rounds, repeats):
    """Median milliseconds of each call, in turns. Each round begins with another call, as the first of a round meets a
    GPU that has just been idle."""
    for call in calls:
        for _ in range(2):
            call()
    events = [[] for _ in calls]
    for i in range(rounds):
        turns = list(zip(calls, events, strict=True))
        first = i % len(turns)
        for call, marks in turns[first:] + turns[:first]:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(repeats):
                call()
            end.record()
            marks.append((begin, end))
        torch.cuda.synchronize()
    return [statistics.median(b.elapsed_time(e) / repeats for b, e in marks) for marks in events]


def circumstances(library, rounds):
    """Returns the fields that every stored result begins with: the GPU, its driver, the date, octet's version."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": subprocess.run(query, capture_output=True, text=True).stdout.strip(),
        "date": datetime.date.today().isoformat(),
        "octet": f"{library.octet_version().decode()} ({revision()})",
        "rounds": rounds,
    }
