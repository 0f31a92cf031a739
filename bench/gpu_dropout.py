"""Times the passes of a training step with dropout and without it on this GPU, beside those of cuDNN and
FlashAttention-2 through torch: same process, same inputs, in turns, medians. Before it times, it holds o and the
gradients of octet to float64 attention whose dropped elements are those that a unit matrix as v shows.

    bench/gpu_dropout.py [--p 0.1] [--rounds N] [--library build/release/src/liboctet.so] [--output FILE]
"""

import argparse
import json
import pathlib

import torch
import torch.nn.functional as F
from abi import BACKWARD, BIAS_CORRECTIONS, FORWARD, ROOT, Octet, load
from peers import circumstances, medians
from torch.nn.attention import SDPBackend, sdpa_kernel

# batch, heads, tokens, head dim, mask: BERT, GPT-2, and language models of head dim 128. Padded batches have a mask of
# keys.
PROBLEMS = [
    (32, 12, 512, 64, "full"),
    (32, 12, 512, 64, "padded"),
    (16, 12, 1024, 64, "causal"),
    (4, 16, 4096, 64, "full"),
    (4, 16, 2048, 128, "causal"),
    (4, 16, 4096, 128, "full"),
    (8, 16, 2048, 128, "padded"),
    (8, 16, 2048, 128, "padded left"),
    (1, 16, 16384, 128, "causal"),
]
CHECKED = [
    (2, 2, 192, 64, "full"),
    (2, 2, 256, 64, "causal"),
    (2, 2, 192, 128, "causal"),
    (2, 2, 192, 64, "padded"),
    (2, 2, 256, 128, "padded left"),
]
PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


class Ours:
    """octet's passes over q, k, v and do, with probability `p` of dropout."""

    def __init__(self, library, tensors, mask, p, bias_correction="f16"):
        q, k, v, do = tensors
        causal, keys = mask == "causal", seen_keys(mask, k)
        self.o, lse = torch.empty_like(q), torch.empty(q.shape[:3], device="cuda")
        self.gradients = [torch.empty_like(x) for x in (q, k, v)]
        options = dict(bias_correction=BIAS_CORRECTIONS[bias_correction], dropout_p=p)
        both = dict(q=q, k=k, v=v, o=self.o, lse=lse) | ({} if keys is None else dict(mask=keys))
        if p:
            both["dropout_seed"] = torch.tensor([[[[1, 2, 3, 4]]]], dtype=torch.int32, device="cuda")
        kept = both | dict(o_residual=torch.empty_like(q, dtype=torch.int8))
        gradients = dict(zip(("dq", "dk", "dv"), self.gradients, strict=True)) | dict(do=do)
        self.inference = Octet(library, FORWARD, "bf16", causal, both, **options)
        self.forward = Octet(library, FORWARD, "bf16", causal, kept, **options)
        self.backward = Octet(library, BACKWARD, "bf16", causal, kept | gradients, **options)
        self.forward()


class Peer:
    """Attention of torch, and its backward pass alone."""

    def __init__(self, backend, tensors, mask, p):
        q, k, v, do = tensors
        causal, keys = mask == "causal", seen_keys(mask, k)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]

        def attend(*inputs):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*inputs, attn_mask=keys, is_causal=causal, dropout_p=p)

        o = attend(*leaves)
        self.forward = lambda: attend(*leaves)
        self.backward = lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)


def draw(shape, seed=1):
    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(shape, generator=generator, device="cuda").bfloat16() for _ in range(4)]


def seen_keys(mask, k):
    """The keys that are seen, [batch, 1, 1, key], of batches padded to one length; else None."""
    if not mask.startswith("padded"):
        return None
    batch, tokens = k.shape[0], k.shape[2]
    lengths = torch.linspace(tokens / 4, tokens, batch, device=k.device).long()
    token = torch.arange(tokens, device=k.device)
    return ((token.flip(0) if mask == "padded left" else token) < lengths[:, None])[:, None, None].contiguous()


def check(library, p):
    for batch, heads, tokens, dim, mask in CHECKED:
        q, k, v, do = draw((batch, heads, tokens, dim))
        kept = torch.cat([kept_of(library, q, k, first, mask, p) for first in range(0, tokens, dim)], -1)[..., :tokens]
        leaves = [x.double().requires_grad_() for x in (q, k, v)]
        s = leaves[0] @ leaves[1].transpose(-1, -2) / dim**0.5
        if (keys := seen_keys(mask, k)) is not None:
            s = s.masked_fill(~keys, float("-inf"))
        if mask == "causal":
            s = s.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool, device="cuda").triu(1), float("-inf"))
        o = (s.softmax(-1) * kept / (1 - p)) @ leaves[2]
        want = [o.detach(), *torch.autograd.grad(o, leaves, do.double())]
        ours = Ours(library, (q, k, v, do), mask, p)
        ours.backward()
        found = [(x.double() - y).norm() / y.norm() for x, y in zip([ours.o, *ours.gradients], want, strict=True)]
        if not all(x < 0.01 for x in found):
            raise RuntimeError(f"{batch}x{heads}x{tokens}x{dim} {mask}: o, dq, dk, dv differ from float64 by {found}")


def kept_of(library, q, k, first, mask, p):
    """What is kept of the columns of P from `first` on, as many as v has channels."""
    batch, heads, tokens, dim = q.shape
    unit = torch.eye(tokens, device="cuda", dtype=q.dtype)[:, first : first + dim]
    unit = F.pad(unit, (0, dim - unit.shape[1])).expand(batch, heads, tokens, dim).contiguous()
    return Ours(library, (q, k, unit, q), mask, p).o != 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--p", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--library", type=pathlib.Path, default=ROOT / "build/release/src/liboctet.so")
    parser.add_argument("--output", type=pathlib.Path)
    options = parser.parse_args()
    library = load(options.library)
    check(library, options.p)
    rows = []
    for batch, heads, tokens, dim, mask in PROBLEMS:
        tensors = draw((batch, heads, tokens, dim))
        programs = {}
        for name, p in (("with", options.p), ("without", 0.0)):
            programs[f"octet {name}"] = Ours(library, tensors, mask, p)
            programs[f"octet exact_delta {name}"] = Ours(library, tensors, mask, p, "exact_delta")
            for peer, backend in PEERS.items():
                try:
                    programs[f"{peer} {name}"] = Peer(backend, tensors, mask, p)
                except RuntimeError as error:
                    print(f"{peer} {name}: {str(error).splitlines()[0][:120]}")
        repeats = max(1, int(2e12 // (4 * batch * heads * tokens**2 * dim)))
        ms = {}
        for which in ("inference", "forward", "backward"):
            calls = {name: call for name, x in programs.items() if (call := getattr(x, which, None))}
            ms[which] = dict(zip(calls, medians(list(calls.values()), options.rounds, repeats), strict=True))
        rows.append(dict(batch=batch, heads=heads, tokens=tokens, dim=dim, mask=mask, ms=ms))
        print(f"{batch} x {heads}, {tokens} tokens, d{dim}, {mask}")
        for which, times in ms.items():
            costs = {
                name.removesuffix(" with"): (times[name], times[name + "out"])
                for name in times
                if name.endswith(" with") and name + "out" in times
            }
            text = "   ".join(f"{name} {x:.3f} / {y:.3f} ms = {x / y:.3f}" for name, (x, y) in costs.items())
            print(f"    {which:10} {text}", flush=True)
    if options.output:
        found = circumstances(library, options.rounds) | {"p": options.p, "torch": torch.__version__, "rows": rows}
        options.output.write_text(json.dumps(found, indent=1) + "\n")


main()
