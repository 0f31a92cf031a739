"""Times the backend for all GPUs (`sm80`) on this GPU against torch's flash attention (FlashAttention-2) and, in f32,
torch's memory-efficient attention: same process, same inputs, in alternating rounds, CUDA events around groups of
launches, medians. Before it times, it holds octet to float64 attention on smaller tensors.

    bench/gpu_general.py [--only flash,f32,jvp,masks,few_queries,eight_bits,eight_bit_forward] [--rounds N]
                         [--library build/release/src/liboctet.so] [--output FILE]

FLOPs are those of the two products forward, 4 b h n m d, halved under a causal mask, times 2.5 backward and 3 for a
jvp. Few queries are told in bytes of keys and values a second, beside those that torch's copy reads and writes.
"""

import argparse
import json
import pathlib

import torch
from abi import BACKWARD, BIAS_CORRECTIONS, FORWARD, JVP, Octet, load
from peers import circumstances, cudnn_name, eight_bit_peers, medians
from problems import GPU_FEW_QUERIES, GPU_GENERAL, GPU_GENERAL_EIGHT_BITS, GPU_GENERAL_F32
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = pathlib.Path(__file__).resolve().parent.parent
BACKENDS = {torch.bfloat16: SDPBackend.FLASH_ATTENTION, torch.float32: SDPBackend.EFFICIENT_ATTENTION}
NAMES = {torch.bfloat16: "bf16", torch.float32: "f32"}


def draw(shape, dtype, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


class Problem:
    """q [batch, head, query, dim], k, v [batch, kv_head, key, dim], the gradient of o, and perhaps a mask tensor."""

    def __init__(self, shape, kv_shape, dtype, causal, mask=None):
        self.q, self.k, self.v, self.do = (
            draw(x, dtype, seed) for seed, x in enumerate((shape, kv_shape, kv_shape, shape))
        )
        self.causal, self.mask = causal, mask

    def logits(self, q, k):
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        s = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if self.mask is not None:
            s = s + self.mask.double()
        if self.causal:
            s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), float("-inf"))
        return s

    def exact(self):
        """o, dq, dk, dv in float64."""
        leaves = [x.double().requires_grad_() for x in (self.q, self.k, self.v)]
        q, k, v = leaves
        o = self.logits(q, k).softmax(-1) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        return [o.detach(), *torch.autograd.grad(o, leaves, self.do.double())]


class General:
    """octet's calls on a backend, None: its own choice.

    16-bit passes keep and take the residual of o (bias correction f16), and so do those of int8.
    """

    def __init__(self, library, problem, backend=b"sm80", training=True, precision=None):
        p = problem
        nan = lambda x: torch.full_like(x, float("nan"))
        self.o, lse = nan(p.q), torch.full(tuple(p.q.shape[:3]), float("nan"), device="cuda")
        self.gradients = [nan(x) for x in (p.q, p.k, p.v)]
        more = dict(backend=backend) if backend else {}
        corrects = training and p.q.dtype != torch.float32
        if corrects:
            more["bias_correction"] = BIAS_CORRECTIONS["f16"]
        residual = dict(o_residual=torch.empty_like(p.q, dtype=torch.int8)) if corrects else {}
        mask = {} if p.mask is None else dict(mask=p.mask)
        shared = dict(q=p.q, k=p.k, v=p.v, o=self.o, lse=lse) | mask
        precision = precision or NAMES[p.q.dtype]
        call = lambda which, tensors: Octet(library, which, precision, p.causal, shared | tensors, **more)
        self.forward = call(FORWARD, {})
        if not training:
            return
        self.training = call(FORWARD, residual)
        self.backward = call(BACKWARD, dict(zip(("dq", "dk", "dv"), self.gradients, strict=True), do=p.do) | residual)
        self.training()

    def results(self):
        self.training()
        self.backward()
        return [self.o, *self.gradients]


def jvp(library, p):
    """Octet's derivative along tangents: the call and its results."""
    to, o = torch.full_like(p.q, float("nan")), torch.full_like(p.q, float("nan"))
    tangents = dict(
        tq=draw(p.q.shape, p.q.dtype, 4), tk=draw(p.k.shape, p.q.dtype, 5), tv=draw(p.v.shape, p.q.dtype, 6)
    )
    tensors = dict(q=p.q, k=p.k, v=p.v, o=o, to=to) | tangents
    return Octet(library, JVP, NAMES[p.q.dtype], p.causal, tensors, backend=b"sm80"), tangents, o, to


class Torch:
    """The same by one of torch's own kernels."""

    def __init__(self, p, training=True, backend=None):
        backend = backend or BACKENDS[p.q.dtype]
        function = lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=p.mask, is_causal=p.causal, enable_gqa=q.shape[1] != k.shape[1]
        )

        def attend(*tensors):
            with sdpa_kernel(backend):
                return function(*tensors)

        self.forward = lambda: attend(p.q, p.k, p.v)
        if training:
            leaves = [x.detach().requires_grad_() for x in (p.q, p.k, p.v)]
            o = attend(*leaves)
            self.backward = lambda: torch.autograd.grad(o, leaves, p.do, retain_graph=True)


def relative(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def check(library):
    """Relative L2 against float64 of o, dq, dk, dv, of o and its tangent: dtype -> tensor -> error."""
    found = {}
    for dtype, bar in ((torch.bfloat16, 0.02), (torch.float32, 1e-5)):
        rows = found[NAMES[dtype]] = {}
        for dim in (64, 128):
            for causal in (False, True):
                for mask in (None, draw((1, 3, 600, 600), dtype, 9)):
                    p = Problem((2, 3, 600, dim), (2, 3, 600, dim), dtype, causal, mask)
                    pairs = list(zip(("o", "dq", "dk", "dv"), General(library, p).results(), p.exact(), strict=True))
                    if mask is None:
                        call, tangents, _, to = jvp(library, p)
                        call()
                        function = lambda q, k, v, p=p: p.logits(q, k).softmax(-1) @ v
                        inputs = [x.double() for x in (p.q, p.k, p.v)]
                        along = [tangents[x].double() for x in ("tq", "tk", "tv")]
                        pairs.append(("to", to, torch.func.jvp(function, tuple(inputs), tuple(along))[1]))
                    for name, got, want in pairs:
                        error = relative(got, want)
                        if not error < bar:
                            raise RuntimeError(f"{NAMES[dtype]} d{dim}: {name} differs from float64 by {error:.3g}")
                        rows[name] = max(error, rows.get(name, 0))
        print(f"{NAMES[dtype]}: relative L2 {'  '.join(f'{k} {v:.2g}' for k, v in rows.items())}", flush=True)
    return found


def time(row, calls, options, milliseconds=4):
    """Medians of calls in turns, milliseconds: name -> time, and torch's in octet's."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    calls["octet"]()
    begin.record()
    calls["octet"]()
    end.record()
    torch.cuda.synchronize()
    repeats = max(1, int(milliseconds / begin.elapsed_time(end)))
    row["ms"] = dict(zip(calls, medians(list(calls.values()), options.rounds, repeats), strict=True))
    row["ratios"] = {name: ms / row["ms"]["octet"] for name, ms in row["ms"].items() if name != "octet"}
    return row


def describe(row, shape, dtype, which, factor, causal):
    batch, heads, tokens, dim = shape
    flops = factor * 4 * batch * heads * tokens**2 * dim * (0.5 if causal else 1)
    row |= {"pass": which, "dtype": NAMES[dtype], "batch": batch, "heads": heads, "tokens": tokens, "dim": dim}
    row |= {"causal": causal, "tflops": {name: flops / ms / 1e9 for name, ms in row["ms"].items()}}
    speeds = "  ".join(f"{name} {x:6.1f}" for name, x in row["tflops"].items())
    ratios = ", ".join(f"{name} {x:.3f}" for name, x in row["ratios"].items())
    mask = "causal" if causal else "full"
    print(
        f"{which:8} {NAMES[dtype]:4} d{dim:<4} S {tokens:<6} {mask:6}  TFLOP/s  {speeds}  ratios {ratios}", flush=True
    )
    return row


def passes(library, shapes, dtype, options):
    """Forward and backward beside torch."""
    for shape in shapes:
        for causal in (False, True):
            p = Problem(shape, shape, dtype, causal)
            ours, torchs = General(library, p), Torch(p)
            for which, factor in (("forward", 1), ("backward", 2.5)):
                calls = {"octet": getattr(ours, which), "torch": getattr(torchs, which)}
                yield describe(time({}, calls, options), shape, dtype, which, factor, causal)


def jvps(library, shapes, options):
    for shape in shapes:
        for causal in (False, True):
            p = Problem(shape, shape, torch.bfloat16, causal)
            yield describe(time({}, {"octet": jvp(library, p)[0]}, options), shape, torch.bfloat16, "jvp", 3, causal)


EIGHT_BITS = ("int8_f16", "int8", "int8_fp8", "fp8")


def error_of_o(p, o):
    """Relative L2 against float64 of every 128th row of o, whose q sees all keys."""
    q, k, v = p.q[:, :, ::128].double(), p.k.double(), p.v.double()
    return relative(o[:, :, ::128], p.logits(q, k).softmax(-1) @ v)


def eight_bit_forward(library, shapes, options):
    """Precisions of 8 bits beside bf16, by octet's own choice ("octet") and by sm80, beside torch and, without a mask,
    the peers of 8 bits. Ratios are to "octet", bf16 by octet's own choice."""
    for shape in shapes:
        for causal in (False, True):
            p = Problem(shape, shape, torch.bfloat16, causal)
            ours = {}
            for prefix, backend in (("", None), ("sm80 ", b"sm80")):
                for x in ("bf16", *EIGHT_BITS):
                    ours[prefix + x] = General(library, p, backend, training=False, precision=x)
            ours = {"octet": ours.pop("bf16")} | ours
            calls, row = {name: x.forward for name, x in ours.items()} | {"torch": Torch(p, training=False).forward}, {}
            if not causal:
                # SageAttention subtracts the mean from k in place: peers have copies.
                copies = [x.clone() for x in (p.q, p.k, p.v)]
                calls |= {name: lambda c=copies, f=f: f(*c) for name, (_, f) in eight_bit_peers().items()}
                results = {name: call() for name, call in calls.items()} | {name: x.o for name, x in ours.items()}
                row["errors"] = {name: error_of_o(p, o) for name, o in results.items()}
            yield describe(time(row, calls, options), shape, torch.bfloat16, "forward", 1, causal)


def eight_bits(library, shapes, options):
    """int8's training: its forward pass and its backward pass beside those of bf16. Ratios are to octet in bf16."""
    for shape in shapes:
        for causal in (False, True):
            p = Problem(shape, shape, torch.bfloat16, causal)
            ours, torchs, int8 = General(library, p), Torch(p), General(library, p, precision="int8")
            for which, factor in (("training", 1), ("backward", 2.5)):
                calls = {"octet": getattr(ours, which), "int8": getattr(int8, which)}
                calls |= {"torch": torchs.backward} if which == "backward" else {}
                yield describe(time({}, calls, options), shape, torch.bfloat16, which, factor, causal)


def mask_tensors(batch, heads, tokens):
    """Mask tensors by name: random numbers of all heads or of each, and masks in blocks, which models give."""
    numbers = lambda of: draw((1, of, tokens, tokens), torch.bfloat16, 9)
    yield "mask of all heads", numbers(1)
    yield "mask of each head", numbers(heads)
    lengths = torch.linspace(0.53, 0.97, batch, device="cuda").mul(tokens).int()
    yield "bool mask of padding", torch.arange(tokens, device="cuda") < lengths[:, None, None, None]
    seen = torch.ones(tokens, tokens, dtype=torch.bool, device="cuda").tril()
    zeros = torch.zeros(batch, 1, tokens, tokens, dtype=torch.bfloat16, device="cuda")
    yield "causal mask of 0 and -inf", zeros.masked_fill(~seen, -torch.inf)


def masks(library, shapes, options):
    """Mask tensors beside none, and beside cuDNN with the same; FLOPs are those of all pairs. Those of padding are for
    other backends too."""
    for shape in (x for x in shapes if x[2] <= 4096):
        batch, heads, tokens, _ = shape
        unmasked = Problem(shape, shape, torch.bfloat16, False)
        plain = {backend: General(library, unmasked, backend) for backend in (b"sm80", None)}
        for name, mask in mask_tensors(batch, heads, tokens):
            p = Problem(shape, shape, torch.bfloat16, False, mask)
            cudnn = Torch(p, backend=SDPBackend.CUDNN_ATTENTION)
            for backend, choice in ((b"sm80", ""), (None, ", octet's own choice")):
                if backend is None and mask.dtype != torch.bool:
                    continue
                calls = {"octet": General(library, p, backend), "no mask": plain[backend], "cudnn": cudnn}
                for which, factor in (("forward", 1), ("backward", 2.5)):
                    row = time({}, {label: getattr(x, which) for label, x in calls.items()}, options)
                    yield describe(row, shape, torch.bfloat16, f"{which}, {name}{choice}", factor, False)


def few_queries(library, options):
    """One to 64 queries over long keys, beside torch and, in bytes a second, beside a copy."""
    source = torch.empty(2**29, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    for batch, heads, kv_heads, queries, keys, dim in GPU_FEW_QUERIES:
        p = Problem((batch, heads, queries, dim), (batch, kv_heads, keys, dim), torch.bfloat16, False)
        ours, default = General(library, p, training=False), General(library, p, backend=None, training=False)
        ours.forward()
        error = relative(ours.o, p.exact()[0])
        if not error < 0.01:
            raise RuntimeError(f"few queries: o differs from float64 by {error:.3g}")
        calls = {"octet": ours.forward, "octet_default": default.forward, "torch": Torch(p, training=False).forward}
        row = time({}, calls | {"copy": lambda: target.copy_(source)}, options, milliseconds=1)
        size = 2 * p.k.numel() * p.k.element_size()
        row["gigabytes_per_second"] = {name: size / row["ms"][name] / 1e6 for name in calls}
        row["gigabytes_per_second"]["copy"] = 2 * source.numel() / row["ms"]["copy"] / 1e6
        row["error"] = error
        row |= dict(batch=batch, heads=heads, kv_heads=kv_heads, queries=queries, keys=keys, dim=dim)
        row["pass"] = "few queries"
        speeds = "  ".join(f"{name} {x:6.0f}" for name, x in row["gigabytes_per_second"].items())
        print(f"{batch}x{heads}/{kv_heads} {queries} queries {keys} keys d{dim}  GB/s  {speeds}", flush=True)
        yield row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="flash,jvp,masks,few_queries,f32,eight_bits", type=lambda x: x.split(","))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--library", type=pathlib.Path, default=ROOT / "build/release/src/liboctet.so")
    parser.add_argument("--output", type=pathlib.Path)
    options = parser.parse_args()
    library = load(options.library)
    found = check(library)
    parts = {
        "flash": lambda: passes(library, GPU_GENERAL, torch.bfloat16, options),
        "jvp": lambda: jvps(library, GPU_GENERAL, options),
        "masks": lambda: masks(library, GPU_GENERAL, options),
        "few_queries": lambda: few_queries(library, options),
        "eight_bit_forward": lambda: eight_bit_forward(library, GPU_GENERAL_EIGHT_BITS, options),
        "eight_bits": lambda: eight_bits(library, GPU_GENERAL_EIGHT_BITS, options),
        "f32": lambda: passes(library, GPU_GENERAL_F32, torch.float32, options),
    }
    rows = [row for part in options.only for row in parts[part]()]
    if options.output:
        peers = {
            "torch": f"torch {torch.__version__}: flash attention in bf16, memory-efficient attention in f32",
            "cudnn": cudnn_name(),
        } | {x: description for x, (description, _) in eight_bit_peers().items()}
        result = circumstances(library, options.rounds) | {"peers": peers, "errors": found, "rows": rows}
        options.output.write_text(json.dumps(result, indent=1) + "\n")


main()
