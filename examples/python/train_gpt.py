"""Trains a small GPT from scratch on the text of this repository's documentation, with attention in the precision
asked for.

python examples/python/train_gpt.py --precision int8
"""

import argparse
import pathlib

import octet
import torch
from torch import nn
from torch.nn import functional

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
CONTEXT, WIDTH, HEADS, LAYERS = 64, 128, 4, 2


class Block(nn.Module):
    def __init__(self, precision):
        super().__init__()
        self.precision = precision
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        o = octet.attention(q, k, v, precision=self.precision, causal=True, layout="bshd")
        x = x + self.out(o.flatten(-2))
        return x + self.mlp(self.norm2(x))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default="int8", help="as octet.attention takes it")
    parser.add_argument("--device", default="cpu", help="cuda trains in f16 and bf16")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    torch.manual_seed(0)
    torch.set_default_device(options.device)
    text = torch.tensor(list(b"".join(path.read_bytes() for path in sorted(DOCS.glob("*.md")))))
    embed, place = nn.Embedding(256, WIDTH), nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
    blocks = nn.Sequential(*(Block(options.precision) for _ in range(LAYERS)), nn.LayerNorm(WIDTH))
    head = nn.Linear(WIDTH, 256)
    parameters = [place, *embed.parameters(), *blocks.parameters(), *head.parameters()]
    optimiser = torch.optim.AdamW(parameters, lr=3e-3)
    for step in range(options.steps):
        starts = torch.randint(len(text) - CONTEXT - 1, (16, 1)) + torch.arange(CONTEXT)
        logits = head(blocks(embed(text[starts]) + place))
        loss = functional.cross_entropy(logits.flatten(0, 1), text[starts + 1].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 20 == 0 or step == options.steps - 1:
            print(f"step {step:4}: {loss.item():.3f} nats a byte")


main()
