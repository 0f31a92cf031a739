"""Problems of every size up to 1300 tokens, drawn at random, row by row against float64 on the same device: what no
list of cases thinks of, a key too many, a block left out, a stride mistaken, shows in the rows that it spoils.

A row that sees n keys moves by about 1 / sqrt(n) of itself where one of them is lost. Rounding moves it by what the
precision errs on normal numbers (docs/numerics.md), the worst of many thousand rows by several times that."""

import functools
import itertools
import math
import random

import octet
import pytest

torch = pytest.importorskip("torch")

# Relative L2 on normal numbers.
ERRORS = {"f16": 0.0005, "bf16": 0.0025, "int8": 0.0145, "int8_f16": 0.0106, "int8_fp8": 0.04, "fp8": 0.055}
WORST_ROW = 8
EDGES = [n + m for n in (64, 96, 128, 192, 256, 384, 512, 640, 1024) for m in (-1, 0, 1)]
DEVICES = {"cpu": (200, 160), "cuda": (1000, 1300)}  # how many problems, and tokens


class Problem:
    """Drawn from a seed: `whole` and `packed` solve it, `exact` says what should have come out."""

    def __init__(self, seed, device, most):
        self.pick, self.device, self.most = random.Random(seed), device, most
        torch.manual_seed(seed)
        pick = self.pick
        self.precision = pick.choice(["bf16", "bf16", *ERRORS])
        self.dtype = torch.float16 if self.precision == "f16" else torch.bfloat16
        self.kv_heads = pick.randint(1, 3)
        self.heads = self.kv_heads * pick.choice([1, 1, 2, 3, 4])
        self.dim = pick.choice([64, 128, 256, 8 * pick.randint(1, 32)])
        self.dim_v = pick.choice([self.dim, self.dim, 8 * pick.randint(1, 32)])
        self.causal = pick.choice([False, False, "top_left", "bottom_right"])
        self.alignment = self.causal or pick.choice(["top_left", "bottom_right"])
        self.options = {"precision": self.precision, "causal": self.causal}
        if pick.random() < 0.3:
            left, right = (pick.choice([None, 0, 1, 17, 64, 100, 128, 300]) for _ in range(2))
            self.options["window"] = (left, 0 if self.causal else right)
            self.options |= {} if self.causal else {"alignment": self.alignment}
        self.gradients = self.precision in ("bf16", "f16")
        if self.gradients and pick.random() < 0.2:
            self.options["deterministic"] = True

    def length(self):
        if self.pick.random() < 0.3:
            return min(self.pick.choice([1, 2, 7, *EDGES]), self.most)
        return int(math.exp(self.pick.uniform(0, math.log(self.most))))

    def normal(self, *shape):
        return torch.randn(shape, device=self.device)

    def lay_out(self, x):
        """x [batch, head, token, dim] with some strides; what lies between is NaN."""
        batch, heads, tokens, dim = x.shape
        how = self.pick.choice(["as is", "as is", "transposed", "every second", "wide rows", "odd address", "one head"])
        if how == "transposed":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if how == "one head":
            return x[:, :1].expand_as(x)
        shapes = {"every second": (2 * tokens, dim), "wide rows": (tokens, dim + 8), "odd address": (tokens, dim + 3)}
        if how not in shapes:
            return x
        room = torch.full((batch, heads, *shapes[how]), math.nan, dtype=x.dtype, device=x.device)
        views = {"every second": room[:, :, ::2], "wide rows": room[..., :dim], "odd address": room[..., 1 : 1 + dim]}
        return views[how].copy_(x)

    def run(self, attend, q, k, v, do):
        """o, lse, gradients."""
        if not self.gradients:
            return *attend(q, k, v), ()
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        o, lse = attend(*leaves)
        return o.detach(), lse, torch.autograd.grad(o, leaves, do)

    def whole(self):
        """One sequence per batch element: [((o, lse, gradients), (q, k, v, do))]."""
        pick, queries, keys = self.pick, self.length(), self.length()
        keys = queries if pick.random() < 0.4 else keys
        batch, offset = pick.randint(1, 3), pick.choice([0, 0, 4]) * self.normal(1, self.kv_heads, 1, self.dim)
        q, k = self.normal(batch, self.heads, queries, self.dim), self.normal(batch, self.kv_heads, keys, self.dim)
        v, do = self.normal(batch, self.kv_heads, keys, self.dim_v), self.normal(batch, self.heads, queries, self.dim_v)
        inputs = [self.lay_out(x.to(self.dtype)) for x in (q, k + offset, v, do)]
        return [
            (
                self.run(lambda *x: octet.attention(*x, return_lse=True, enable_gqa=True, **self.options), *inputs),
                inputs,
            )
        ]

    def packed(self):
        """The same of each of some sequences that lie one after the other, empty ones among them."""
        pick = self.pick
        lengths = [(self.length() // 2, self.length() // 2) for _ in range(pick.randint(1, 4))]
        lengths = [pick.choice([(n, m), (n, n), (0, m), (n, 0)]) for n, m in lengths] + [(1, 1)]
        ends_q, ends_k = ([0, *itertools.accumulate(x)] for x in zip(*lengths, strict=True))
        cu = [torch.tensor(x, dtype=torch.int32, device=self.device) for x in (ends_q, ends_k)]
        inputs = [
            self.normal(tokens, heads, dim).to(self.dtype)
            for tokens, heads, dim in (
                (ends_q[-1], self.heads, self.dim),
                (ends_k[-1], self.kv_heads, self.dim),
                (ends_k[-1], self.kv_heads, self.dim_v),
                (ends_q[-1], self.heads, self.dim_v),
            )
        ]
        attend = functools.partial(octet.attention_varlen, return_lse=True, **self.options)
        o, lse, gradients = self.run(lambda *x: attend(*x, *cu), *inputs)
        of_q = [slice(*x) for x in itertools.pairwise(ends_q)]
        of_k = [slice(*x) for x in itertools.pairwise(ends_k)]

        def one(x, tokens):
            return x[tokens].transpose(0, 1)[None]

        return [
            (
                (one(o, i), lse[:, i][None], [one(x, at) for x, at in zip(gradients, (i, j, j), strict=False)]),
                [one(x, at) for x, at in zip(inputs, (i, j, j, i), strict=True)],
            )
            for i, j in zip(of_q, of_k, strict=True)
        ]

    def seen(self, queries, keys):
        distance = torch.arange(keys, device=self.device) - torch.arange(queries, device=self.device)[:, None]
        distance -= keys - queries if self.alignment == "bottom_right" else 0
        seen = distance <= (0 if self.causal else keys + queries)
        left, right = self.options.get("window", (None, None))
        seen &= distance >= -left if left is not None else seen
        return seen & (distance <= right) if right is not None else seen

    def exact(self, q, k, v, do):
        def attend(q, k, v):
            group = self.heads // self.kv_heads
            s = q @ k.repeat_interleave(group, 1).transpose(-1, -2) / self.dim**0.5
            s = s.masked_fill(~self.seen(q.shape[2], k.shape[2]), -math.inf)
            lse = s.logsumexp(-1)
            p = torch.exp(s - lse.masked_fill(lse.isinf(), 0)[..., None])
            return p @ v.repeat_interleave(group, 1), lse.detach()

        return self.run(attend, *(x.detach().double() for x in (q, k, v, do)))

    def sizes(self, q, k, v, do):
        """The least that errors of rows are measured by: what rows of dq and dk are sums of, as these may cancel."""

        def row(x):
            return x.detach().double().norm() / max(1, x.numel() // x.shape[-1]) ** 0.5

        ds = row(do) * row(v) / (self.dim * self.dim_v) ** 0.5
        return {"o": 0, "dq": ds * row(k), "dk": ds * row(q), "dv": 0}


def expect_rows(name, got, want, least, allowed):
    assert got.shape == want.shape and got.isfinite().all(), name
    if not want.numel():
        return
    rows = want.norm(dim=-1)
    size = torch.clamp(rows, min=max(rows.square().mean().sqrt().item(), float(least), 1e-30))
    worst = ((got.double() - want).norm(dim=-1) / size).max().item()
    assert worst <= allowed, f"{name}: a row errs by {worst:.3g} of itself, allowed {allowed:.3g}"


def expect_right(problem, parts):
    allowed = WORST_ROW * ERRORS[problem.precision]
    for (o, lse, gradients), inputs in parts:
        want_o, want_lse, want_gradients = problem.exact(*inputs)
        least = problem.sizes(*inputs)
        expect_rows("o", o, want_o, least["o"], allowed)
        names = ("dq", "dk", "dv") if problem.gradients else ()
        for name, got, want in zip(names, gradients, want_gradients, strict=True):
            expect_rows(name, got, want, least[name], allowed)
        nothing = want_lse.isinf()
        assert torch.equal(lse.isinf(), nothing), "lse: -inf where a query sees a key, or the other way round"
        error = (lse.double() - want_lse).masked_fill(nothing, 0).abs().max().item() if lse.numel() else 0
        # That of a logit: of unit size, and more with an offset of k, which smoothing takes away in 8 bits.
        assert error <= 4 * allowed, f"lse errs by {error:.3g}, allowed {4 * allowed:.3g}"


@pytest.mark.parametrize("device", DEVICES)
def test_problems_of_every_size(device):
    if device == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no GPU")
        x = torch.zeros(1, 1, 8, 64, device=device, dtype=torch.bfloat16)
        if not (found := octet.supports(x, x, x)):
            pytest.skip(found.reason)
    problems, most = DEVICES[device]
    for seed in range(problems):
        problem = Problem(seed, device, most)
        solve = problem.packed if problem.pick.random() < 0.2 else problem.whole
        parts = solve()
        try:
            expect_right(problem, parts)
        except AssertionError as error:
            shapes = [[tuple(x.shape) for x in inputs] for _, inputs in parts]
            raise AssertionError(f"seed {seed}: {error}; {problem.options}, shapes {shapes}") from error
