"""Training steps whose loss has the derivative of a diffusion transformer along a direction: MeanFlow (arXiv
2505.13447) and a continuous-time consistency model, sCM (arXiv 2410.11081). Both on sets of points, as in meanflow.py.

    python examples/python/dit_steps.py [--objective meanflow scm] [--steps N]

With --time it times a step of each objective, o's backward pass included, with octet's attention beside torch's math
attention, as it is and compiled, and rcm's Triton kernel (github.com/NVlabs/rcm) where that can be imported:

    python examples/python/dit_steps.py --time [--attention octet octet-compiled math math-compiled rcm]
                                        [--sizes 4096x1 256x256] [--width 512] [--depth 4] [--rounds 7]
                                        [--output FILE.json]

Sizes are tokens x batch. On a GPU the model is in bf16. The file is what bench/results keeps.
"""

import argparse
import datetime
import json
import math
import pathlib
import statistics
import time

import octet
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

POINTS, HEAD_DIM, SIGMA = 16, 64, 0.5**0.5  # SIGMA: the deviation of the coordinates of points on a circle


def math_attention(q, k, v):
    with sdpa_kernel(SDPBackend.MATH):
        return nn.functional.scaled_dot_product_attention(q, k, v)


def math_attention_in_graph(q, k, v):
    """The same for torch.compile, which leaves the graph at sdpa_kernel and would compile nothing."""
    return (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1) @ v


def rcm_attention():
    """rcm's kernel on dual numbers; it takes tangents beside their primals, of the same strides."""
    try:
        from rcm.utils.flash_attention_jvp_triton import _attention
    except ImportError as error:
        allowed = ", ".join(ATTENTION)
        raise SystemExit(f"--attention: rcm, but {error}; allowed without github.com/NVlabs/rcm: {allowed}") from error

    def attend(*operands):
        primals, tangents = zip(*map(forward_ad.unpack_dual, operands), strict=True)
        zeros = (torch.zeros_like(x) if t is None else t for x, t in zip(primals, tangents, strict=True))
        o, to = _attention.apply(*(x.contiguous() for x in primals), *(t.contiguous() for t in zeros))
        return forward_ad.make_dual(o, to.detach())

    return attend


ATTENTION = {
    "octet": octet.attention,
    "octet-compiled": octet.attention,
    "math": math_attention,
    "math-compiled": math_attention_in_graph,
}


def norm(x):
    """LayerNorm in float32: the tangent that torch's has in bf16 is of float32 on a GPU, which products reject."""
    return nn.functional.layer_norm(x.float(), x.shape[-1:]).to(x.dtype)


class Block(nn.Module):
    """Attention and an MLP, both scaled, shifted and gated by the times (adaLN)."""

    def __init__(self, width, attention):
        super().__init__()
        self.attention, self.heads = attention, max(width // HEAD_DIM, 2)
        self.modulation = nn.Linear(width, 6 * width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))

    def forward(self, x, times):
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = self.modulation(times).unsqueeze(-2).chunk(6, -1)
        q, k, v = self.qkv(norm(x) * (1 + scale) + shift).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        o = self.attention(*(y.transpose(-3, -2) for y in (q, k, v))).transpose(-3, -2)
        x = x + gate * self.out(o.flatten(-2))
        return x + gate_mlp * self.mlp(norm(x) * (1 + scale_mlp) + shift_mlp)


class Transformer(nn.Module):
    """F(x, r, t) of x [batch, token, 2] and the times r and t [batch, 1]."""

    def __init__(self, width, depth, attention):
        super().__init__()
        self.embed, self.unembed = nn.Linear(2, width), nn.Linear(width, 2)
        self.times = nn.Sequential(nn.Linear(2, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.blocks = nn.ModuleList(Block(width, attention) for _ in range(depth))

    def forward(self, x, r, t):
        x, times = self.embed(x), self.times(torch.cat([r, t], -1))
        for block in self.blocks:
            x = block(x, times)
        return self.unembed(x)


def along(model, at, direction):
    """The model's output, which has its gradient, and its derivative along a direction."""
    if getattr(model, "by_dual_numbers", False):
        with forward_ad.dual_level():
            return tuple(forward_ad.unpack_dual(model(*map(forward_ad.make_dual, at, direction))))
    return torch.func.jvp(model, at, direction)


def meanflow(model, x, noise, _):
    """u(z, r, t) is the mean velocity from r to t on z = (1 - t) x + t noise: u = v - (t - r) du/dt along (v, 0, 1)."""
    r, t = torch.rand(2, len(x), 1, device=x.device, dtype=x.dtype).sort(0).values
    z, v = (1 - t[..., None]) * x + t[..., None] * noise, noise - x
    u, du = along(model, (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))
    target = (v - (t - r)[..., None] * du).detach()
    return (u - target).square().mean()


def consistency(model, x, noise, progress):
    """f(z, t) = cos t z - sin t s F(z / s, t) is the same all along z = cos t x + sin t s noise; s: the deviation of x.
    g is cos t df/dt, rearranged and bounded as the paper does; its part with dF/dt warms up."""
    t = torch.atan(torch.exp(1.4 * torch.randn(len(x), 1, device=x.device, dtype=x.dtype) - 1) / SIGMA)
    cos, sin = t.cos()[..., None], t.sin()[..., None]
    z, dz = cos * x + sin * SIGMA * noise, cos * SIGMA * noise - sin * x
    zero = torch.zeros_like(t)
    direction = (cos * sin * dz / SIGMA, zero, (cos * sin)[..., 0])
    f, df = along(model, (z / SIGMA, zero, t), direction)
    f_fixed, df = f.detach(), df.detach()
    g = -(cos**2) * (SIGMA * f_fixed - dz) - min(1.0, 2 * progress) * (cos * sin * z + SIGMA * df)
    g = g / (g.flatten(1).norm(dim=1)[:, None, None] / math.sqrt(g[0].numel()) + 0.1)
    return (f - f_fixed - g).square().mean()


def meanflow_sample(model, noise):
    return noise - model(noise, noise.new_zeros(len(noise), 1), noise.new_ones(len(noise), 1))


def consistency_sample(model, noise):
    times = noise.new_zeros(len(noise), 1), noise.new_full((len(noise), 1), math.pi / 2)
    return -SIGMA * model(noise, *times)


OBJECTIVES = {"meanflow": (meanflow, meanflow_sample), "scm": (consistency, consistency_sample)}


def circles(count):
    """Points at equal angles of a circle, turned at random."""
    angle = torch.arange(POINTS) * (2 * torch.pi / POINTS) + torch.rand(count, 1) * 2 * torch.pi
    return torch.stack([angle.cos(), angle.sin()], -1)


def train(name, steps):
    objective, sample = OBJECTIVES[name]
    torch.manual_seed(0)
    model = Transformer(64, 2, octet.attention)
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(steps):
        loss = objective(model, circles(64), torch.randn(64, POINTS, 2), step / steps)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"{name} step {step:4}: loss {loss.item():.3f}")
    noise = torch.randn(256, POINTS, 2)
    with torch.no_grad():
        found = {"noise": noise, "one step": sample(model, noise)}
    for what, points in found.items():
        print(f"{name} {what}: distance from the circle {(points.norm(dim=-1) - 1).abs().mean():.3f}")


def step_of(name, attention, tokens, batch, options):
    """A function that runs one step, and the device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    model = Transformer(options.width, options.depth, ATTENTION.get(attention) or rcm_attention()).to(device, dtype)
    model.by_dual_numbers = attention == "rcm"
    x, noise = (torch.randn(batch, tokens, 2, device=device, dtype=dtype) for _ in range(2))
    loss_of = OBJECTIVES[name][0]
    loss_of = torch.compile(loss_of, dynamic=False, fullgraph=True) if attention.endswith("-compiled") else loss_of

    def step():
        model.zero_grad()
        loss_of(model, x, noise, 1.0).backward()

    return step, device


def milliseconds(step, device):
    if device == "cpu":
        start = time.perf_counter()
        step()
        return 1000 * (time.perf_counter() - start)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    step()
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1])


def time_steps(options):
    rows = []
    for name in options.objective:
        for size in options.sizes:
            tokens, batch = map(int, size.split("x"))
            steps = {arm: step_of(name, arm, tokens, batch, options) for arm in options.attention}
            for step, device in steps.values():  # compiles, and tunes Triton's kernels
                milliseconds(step, device)
            times: dict[str, list[float]] = {arm: [] for arm in steps}
            for _ in range(options.rounds):
                for arm, (step, device) in steps.items():
                    times[arm].append(milliseconds(step, device))
            ms = {arm: round(statistics.median(x), 3) for arm, x in times.items()}
            rows.append({"objective": name, "tokens": tokens, "batch": batch, "ms": ms})
            print(f"{name}, {tokens} tokens x {batch}: " + ", ".join(f"{arm} {x} ms" for arm, x in ms.items()))
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "octet": octet.__version__,
        "what": f"milliseconds of a training step with a jvp, forward and backward, of a DiT of width {options.width}, "
        f"depth {options.depth} and head dim {HEAD_DIM}; medians of {options.rounds} rounds in turns, in one process",
        "rows": rows,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objective", nargs="+", choices=OBJECTIVES, default=list(OBJECTIVES))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--attention", nargs="+", choices=[*ATTENTION, "rcm"], default=list(ATTENTION))
    parser.add_argument("--sizes", nargs="+", default=["4096x1", "256x256"])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=pathlib.Path)
    options = parser.parse_args()
    if not options.time:
        for name in options.objective:
            train(name, options.steps)
        return
    found = time_steps(options)
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")


main()
