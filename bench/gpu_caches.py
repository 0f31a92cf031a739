"""Times decoding over KV caches on this GPU, as torch programs call it: octet over a cache in place, in pages, in 8
bits, and behind the mask of a static cache, beside octet and torch without a cache and a copy: same process, same
numbers, in alternating rounds, medians. Before it times, it holds every call to float64 attention.

    bench/gpu_caches.py [--rounds N] [--output FILE]

The caches have room for twice the keys that they hold. octet is imported as a package.
"""

import argparse
import json
import pathlib

import octet
import torch
from abi import load
from peers import circumstances, medians
from torch.nn.attention import SDPBackend, sdpa_kernel

# batch, heads, kv_heads, queries, keys, dim
PROBLEMS = [
    (1, 32, 8, 1, 32768, 128),
    (64, 32, 8, 1, 4096, 128),
    (16, 32, 8, 1, 4096, 128),
    (64, 32, 8, 8, 4096, 128),
    (16, 32, 8, 1, 32768, 128),
]


def exact(q, k, v):
    """o of the first batch element and head in float64."""
    q, k, v = (x[:1, :1].double() for x in (q, k, v))
    return (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1) @ v


def in_pages(x, page_size, table):
    """x [batch, kv_heads, keys, dim] in shuffled pages [pages, kv_heads, page_size, dim] that `table` names."""
    batch, heads, keys, dim = x.shape
    pages = torch.empty(table.numel(), heads, page_size, dim, dtype=x.dtype, device=x.device)
    pages[table.flatten().long()] = x.unflatten(2, (keys // page_size, page_size)).transpose(1, 2).flatten(0, 1)
    return pages


def calls_of(q, k, v, keys):
    """Functions without arguments, by name. k and v have room for twice `keys`."""
    batch, most = k.shape[0], k.shape[2]
    used = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    own_k, own_v = k[:, :, :keys].contiguous(), v[:, :, :keys].contiguous()
    mask = (torch.arange(most, device="cuda") < keys).expand(batch, 1, 1, most).contiguous()

    def torchs(*tensors, **keywords):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, *tensors, enable_gqa=True, **keywords)

    calls = {
        "no cache": lambda: octet.attention(q, own_k, own_v, enable_gqa=True),
        "torch": lambda: torchs(own_k, own_v),
        "static cache, mask": lambda: octet.attention(q, k, v, mask=mask, enable_gqa=True),
        "torch, mask": lambda: torchs(k, v, attn_mask=mask),
        "cache": lambda: octet.attention_cached(q, k, v, used),
    }
    for page_size in (16, 256):
        table = torch.randperm(batch * most // page_size, dtype=torch.int32, device="cuda").view(batch, -1)
        pages = [in_pages(x, page_size, table) for x in (k, v)]
        calls[f"pages of {page_size}"] = lambda p=pages, t=table: octet.attention_cached(q, *p, used, block_table=t)
    coded = [octet.quantize(x, name, format="i8") for x, name in zip(pages, "kv", strict=True)]
    calls["int8 pages of 256"] = lambda: octet.attention_cached(q, *coded, used, block_table=table)
    return calls, own_k, own_v


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--output", type=pathlib.Path)
    options = parser.parse_args()
    generator = torch.Generator("cuda").manual_seed(0)
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    rows = []
    for batch, heads, kv_heads, queries, keys, dim in PROBLEMS:
        draw = lambda *shape: torch.randn(shape, generator=generator, device="cuda").bfloat16()
        q, k, v = draw(batch, heads, queries, dim), *(draw(batch, kv_heads, 2 * keys, dim) for _ in "kv")
        calls, own_k, own_v = calls_of(q, k, v, keys)
        want = exact(q, own_k, own_v)
        with torch.no_grad():
            errors = {}
            for name, call in list(calls.items()):
                try:
                    o = call()
                except (octet.Error, RuntimeError) as error:
                    print(f"{name}: {str(error).splitlines()[0][:150]}")
                    del calls[name]
                    continue
                errors[name] = ((o[:1, :1].double() - want).norm() / want.norm()).item()
                if not errors[name] < 0.03:
                    raise RuntimeError(f"{name}: o differs from float64 by {errors[name]:.3g}")
            timed = calls | {"copy": lambda: target.copy_(source)}
            ms = dict(zip(timed, medians(list(timed.values()), options.rounds, 4), strict=True))
        size = own_k.numel() * own_k.element_size() * 2
        copied = 2 * source.numel() / ms.pop("copy") / 1e6
        rows.append(dict(batch=batch, heads=heads, kv_heads=kv_heads, queries=queries, keys=keys, dim=dim))
        rows[-1] |= dict(ms=ms, errors=errors, copy_gigabytes_per_second=copied)
        print(
            f"batch {batch}, {heads}/{kv_heads} heads, {queries} queries, {keys} keys, d{dim}; a copy {copied:.0f} GB/s"
        )
        for name, x in ms.items():
            rate = size / x / 1e6 / (2 if "int8" in name else 1)
            print(f"    {name:20} {1000 * x:7.0f} us  {rate:5.0f} GB/s  error {errors[name]:.4f}", flush=True)
        del calls, timed, k, v, own_k, own_v
    if options.output:
        from octet import _library

        library = load(pathlib.Path(_library.lib._name))
        options.output.write_text(json.dumps(circumstances(library, options.rounds) | {"rows": rows}, indent=1) + "\n")


main()
