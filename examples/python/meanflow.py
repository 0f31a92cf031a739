"""MeanFlow (arXiv 2505.13447) on sets of points: training needs the derivative of a transformer along a direction,
which is torch.func.jvp through octet's attention.

    python examples/python/meanflow.py

A sample is 16 points on a circle. u(z, r, t) is the mean velocity from time r to t, z_t = (1 - t) x + t noise; then
u = v - (t - r) du/dt along the path (dz/dt, dr/dt, dt/dt) = (v, 0, 1), and one step u(noise, 0, 1) gives a sample.
"""

import argparse

import octet
import torch
from torch import nn

POINTS, WIDTH, HEADS = 16, 64, 4


class Velocity(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.time = nn.Linear(2, WIDTH), nn.Linear(2, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, 2))

    def forward(self, z, r, t):
        x = self.embed(z) + self.time(torch.cat([r, t], -1))
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        x = x + self.out(octet.attention(q, k, v, layout="bshd").flatten(-2))
        return self.mlp(x)


def circles(count):
    """Points at equal angles of a circle, turned at random."""
    angle = torch.arange(POINTS) * (2 * torch.pi / POINTS) + torch.rand(count, 1) * 2 * torch.pi
    return torch.stack([angle.cos(), angle.sin()], -1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    torch.manual_seed(0)
    model = Velocity()
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(options.steps):
        x, noise = circles(64), torch.randn(64, POINTS, 2)
        r, t = torch.rand(2, 64, 1, 1).sort(0).values.repeat(1, 1, POINTS, 1)
        z, v = (1 - t) * x + t * noise, noise - x
        u, du = torch.func.jvp(model, (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))
        target = (v - (t - r) * du).detach()
        loss = (u - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 50 == 0 or step == options.steps - 1:
            print(f"step {step:4}: loss {loss.item():.3f}")

    noise = torch.randn(256, POINTS, 2)
    with torch.no_grad():
        sample = noise - model(noise, torch.zeros(256, POINTS, 1), torch.ones(256, POINTS, 1))
    for name, points in (("noise", noise), ("one step", sample)):
        print(f"{name:>9}: distance from the circle {(points.norm(dim=-1) - 1).abs().mean():.3f}")


main()
