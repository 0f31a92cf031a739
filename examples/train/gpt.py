"""A GPT over bytes: rotary positions, RMSNorm before each branch, and attention as `Attend` says."""

import dataclasses
from typing import NamedTuple

import octet
import octet.torch
import torch
from torch import nn
from torch.nn import functional


class Size(NamedTuple):
    layers: int
    width: int
    heads: int


SIZES = {
    "tiny": Size(2, 64, 2),
    "10m": Size(6, 384, 6),
    "30m": Size(10, 512, 8),
    "85m": Size(12, 768, 12),
    "120m": Size(12, 896, 7),
}


@dataclasses.dataclass(frozen=True)
class Attend:
    """Causal attention of q, k and v [batch, head, token, dim], as a run asks for it."""

    precision: str  # of octet.attention, or "torch": torch's own scaled_dot_product_attention
    bias_correction: str = "f16"
    backward_precision: str = ""  # "": that of the forward pass
    rounding: octet.Rounding | None = None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.precision == "torch":
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.rounding:
            o = octet.attention(q.double(), k.double(), v.double(), causal=True, rounding=self.rounding)
            return o.to(q.dtype)
        if self.backward_precision:
            return _TwoPrecisions.apply(q, k, v, self)
        return octet.attention(q, k, v, causal=True, precision=self.precision, bias_correction=self.bias_correction)


class _TwoPrecisions(torch.autograd.Function):
    """A forward pass in one precision, a backward pass in another, which reads the o and lse of the first. Where that
    is a 16-bit precision, it computes s from q and k as they are given, and not from those that the forward pass has
    quantized (arXiv 2603.00040)."""

    @staticmethod
    def forward(ctx, q, k, v, how):
        o, lse, residual = torch.ops.octet.forward(q, k, v, True, f"precision={how.precision} causal=top_left")
        ctx.save_for_backward(q, k, v, o, lse, residual)
        ctx.options = f"precision={how.backward_precision} causal=top_left bias_correction={how.bias_correction}"
        return o

    @staticmethod
    def backward(ctx, do):
        dq, dk, dv, *_ = torch.ops.octet.backward(do, *ctx.saved_tensors, ctx.options)
        return dq, dk, dv, None


def rotated(x: torch.Tensor) -> torch.Tensor:
    """x [batch, head, token, dim] with rotary positions."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * rates
    a, b = x.float().split(half, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, size: Size, attend: Attend, qk_norm: bool, dropout: float):
        super().__init__()
        self.heads, self.attend = size.heads, attend
        self.norm1, self.norm2 = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.qkv, self.out = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.up, self.down = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)
        dim = size.width // size.heads
        self.q_norm, self.k_norm = (nn.RMSNorm(dim) if qk_norm else nn.Identity() for _ in range(2))
        self.drop = nn.Dropout(dropout)
        self.record: dict[str, torch.Tensor] | None = None  # where not None, a pass leaves q, k, v, o and gradients

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = rotated(self.q_norm(q).to(v.dtype)), rotated(self.k_norm(k).to(v.dtype))
        o = self.attend(q, k, v)
        if self.record is not None:
            self._keep(q=q, k=k, v=v, o=o)
        x = x + self.drop(self.out(o.transpose(1, 2).flatten(-2)))
        return x + self.drop(self.down(functional.gelu(self.up(self.norm2(x)))))

    def _keep(self, **tensors: torch.Tensor) -> None:
        record = self.record
        for name, x in tensors.items():
            record[name] = x.detach()
            x.register_hook(lambda gradient, name=name: record.__setitem__(f"d{name}", gradient))


class GPT(nn.Module):
    def __init__(self, size: Size, attend: Attend, qk_norm: bool = False, dropout: float = 0.0):
        super().__init__()
        self.embed = nn.Embedding(256, size.width)
        self.layers = nn.ModuleList(Layer(size, attend, qk_norm, dropout) for _ in range(size.layers))
        self.norm, self.head = nn.RMSNorm(size.width), nn.Linear(size.width, 256, bias=False)
        for name, x in self.named_parameters():
            if x.ndim == 2:
                deep = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(x, std=0.02 / (2 * size.layers) ** 0.5 if deep else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(x)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Logits [batch, token, 256] of the byte after each of text [batch, token]."""
        x = self.embed(text)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def loss(self, text: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """Nats a byte."""
        return functional.cross_entropy(self(text).float().flatten(0, 1), after.flatten())
