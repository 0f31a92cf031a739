"""flash_attn_with_kvcache and the block_table of flash_attn_varlen_func against float64."""

import itertools

import numpy as np
import octet
import pytest
from caches import exact, in_pages

torch = pytest.importorskip("torch")

from octet.compat import flash_attn  # noqa: E402

HEADS, DIM = 6, 64
LENGTHS = [100, 0, 37, 64]
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
ERRORS = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def turned(x, positions, cos, sin, interleaved):
    """x [tokens, heads, dim] with the first channels turned, in float64."""
    x, half = np.asarray(x, np.float64), cos.shape[1]
    c, s = (np.asarray(t, np.float64)[positions][:, None] for t in (cos, sin))
    a, b = (
        (x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]) if interleaved else (x[..., :half], x[..., half : 2 * half])
    )
    pair = a * c - b * s, a * s + b * c
    first = np.stack(pair, -1).reshape(*x.shape[:2], 2 * half) if interleaved else np.concatenate(pair, -1)
    return np.concatenate([first, x[..., 2 * half :]], -1)


class Problem:
    """Caches of sequences, what is appended, and what comes out, in numbers of a type."""

    def __init__(
        self, dtype, queries, new, kv_heads, page_size=None, batch_idx=False, rotary=0.0, lengths=LENGTHS, dim=DIM,
        room=128, leftpad=(), **how,
    ):  # fmt: skip
        self.random = np.random.default_rng(3)
        self.new, self.how, self.sequences, self.lengths = new, how, len(lengths), lengths

        def numbers(*shape):
            return torch.from_numpy(self.random.standard_normal(shape)).to(dtype)

        keys, values = ([numbers(m, kv_heads, dim) for m in lengths] for _ in "kv")
        self.q = numbers(self.sequences, queries, HEADS, dim)
        self.k, self.v = (numbers(self.sequences, new, kv_heads, dim) for _ in "kv") if new else (None, None)
        self.more = {"cache_seqlens": torch.tensor(lengths, dtype=torch.int32)}
        if page_size:
            longer = [torch.cat([x, torch.zeros(new, kv_heads, dim, dtype=dtype)]).float().numpy() for x in keys]
            _, table = in_pages(longer, page_size)
            caches = []
            for of in (keys, values):
                pages = torch.full((table.max() + 2, page_size, kv_heads, dim), torch.nan, dtype=dtype)
                for s, x in enumerate(of):
                    for column, part in enumerate(x.split(page_size)):
                        pages[table[s, column], : len(part)] = part
                caches.append(pages)
            self.more["block_table"] = torch.from_numpy(table)
        else:
            place = (
                self.random.permutation(self.sequences + 2)[: self.sequences] if batch_idx else range(self.sequences)
            )
            caches = [
                torch.full((self.sequences + 2 * batch_idx, room, kv_heads, dim), torch.nan, dtype=dtype) for _ in "kv"
            ]
            for cache, of in zip(caches, (keys, values), strict=True):
                for s, x in zip(place, of, strict=True):
                    cache[s, : len(x)] = x
            if batch_idx:
                self.more["cache_batch_idx"] = torch.tensor(np.asarray(place), dtype=torch.int32)
        self.caches = caches
        if rotary:
            pairs = int(rotary * dim) // 16 * 8
            angles = torch.rand(max(lengths) + max(queries, new), pairs, generator=torch.Generator().manual_seed(5)) * 6
            self.more |= {"rotary_cos": angles.cos().to(dtype), "rotary_sin": angles.sin().to(dtype)}
        self.keys, self.values = keys, values
        self.leftpad = leftpad or [0] * self.sequences
        if leftpad:
            self.more["cache_leftpad"] = torch.tensor(leftpad, dtype=torch.int32)
            for cache in caches:  # what does not count may hold anything
                for s, pad in zip(place, leftpad, strict=True):
                    cache[s, :pad] = torch.nan

    def run(self, device="cpu", **how):
        given = self.more | self.how | {name: x for name, x in (("k", self.k), ("v", self.v)) if x is not None}
        given = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
        tensors = [x.to(device) for x in (self.q, *self.caches)]
        return flash_attn.flash_attn_with_kvcache(*tensors, **given, **how)

    def exact(self):
        how = {name: x for name, x in self.how.items() if name not in ("rotary_interleaved", "alibi_slopes")}
        how["window"] = how.pop("window_size", (-1, -1))
        by_position = how.get("causal") or how["window"] != (-1, -1)
        found = []
        for s, m in enumerate(self.lengths):
            q, keys, values = (x.double().numpy() for x in (self.q[s], self.keys[s], self.values[s]))
            if self.k is not None:
                new = self.k[s].double().numpy()
                if "rotary_cos" in self.more:
                    tables = [self.more[f"rotary_{x}"].double().numpy() for x in ("cos", "sin")]
                    tables.append(self.how.get("rotary_interleaved", True))
                    new = turned(new, np.arange(m, m + self.new), *tables)
                    q = turned(q, m + np.arange(len(q)) * bool(by_position), *tables)
                keys, values = np.concatenate([keys, new]), np.concatenate([values, self.v[s].double().numpy()])
            keys, values = (x[self.leftpad[s] :] for x in (keys, values))
            slopes = self.how.get("alibi_slopes")
            slopes = slopes if slopes is None else (slopes if slopes.ndim == 1 else slopes[s]).numpy()
            found.append(exact(q, keys, values, slopes=slopes, **how))
        return np.stack([o for o, _ in found]), np.stack([lse for _, lse in found])


def expect_right(problem, **more):
    want, want_lse = problem.exact()
    error = ERRORS[problem.q.dtype]
    for device in DEVICES:
        o, lse = problem.run(device, return_softmax_lse=True, **more)
        np.testing.assert_allclose(o.double().cpu().numpy(), want, rtol=error, atol=error)
        np.testing.assert_allclose(lse.double().cpu().numpy(), want_lse, rtol=error, atol=error)


KINDS = list(itertools.product((None, 16, 64), (0, 3), (1, 3)))


@pytest.mark.parametrize(("page_size", "new", "queries"), KINDS)
@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize(
    "masked", [{}, {"causal": True}, {"causal": True, "window_size": (20, -1)}, {"window_size": (9, 4)}]
)
def test_lengths_and_pages(dtype, page_size, new, queries, masked):
    for kv_heads in (1, 2, 6):
        expect_right(Problem(dtype, queries, new, kv_heads, page_size, **masked))


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [0.5, 1.0])
@pytest.mark.parametrize("causal", [False, True])
def test_rotary(page_size, interleaved, rotary, causal):
    how = {"rotary": rotary, "rotary_interleaved": interleaved, "causal": causal}
    for dtype in ERRORS:
        expect_right(Problem(dtype, 3, 3, 2, page_size, **how))


def grid(count):
    """Samples of what flash-attention's own test of this function combines (test_flash_attn_kvcache of 2.8), by their
    numbers; of a leftpad where the cache has no pages, as there."""
    draw = np.random.default_rng(11)
    either = (False, True)
    for i in range(count):
        queries, most = [(1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (16, 2000), (128, 128)][i % 8]
        new_kv, paged = draw.choice(either), draw.choice(either)
        how = {"causal": bool(draw.choice(either)), "num_splits": int(draw.integers(2))}
        if draw.choice(either):
            how["window_size"] = tuple(draw.integers(0, most, 2).tolist())
        if draw.choice(either):
            how["alibi_slopes"] = torch.rand(2, HEADS, generator=torch.Generator().manual_seed(i)) * 0.3
        new = (queries if draw.choice(either) else int(draw.integers(1, queries + 1))) if new_kv else 0
        if new:
            how |= {"rotary": float(draw.choice([0.0, 0.5, 1.0])), "rotary_interleaved": bool(draw.choice(either))}
        yield pytest.param(
            queries, new, most, int(draw.choice([1, 3, 6])), int(draw.choice([32, 59, 64, 80, 96, 128, 160, 192, 256])),
            256 if paged else None, bool(not paged and draw.choice(either)), how, i % 3 == 0 and not paged, id=str(i),
        )  # fmt: skip


@pytest.mark.parametrize("queries, new, most, kv_heads, dim, page_size, batch_idx, how, leftpad", list(grid(64)))
def test_what_flash_attention_combines(queries, new, most, kv_heads, dim, page_size, batch_idx, how, leftpad):
    draw = np.random.default_rng(most)
    lengths = draw.integers(0, most - max(queries, new) + 1, 2).tolist()
    if leftpad:
        how = how | {"leftpad": [int(draw.integers(0, n + 1)) for n in lengths]}
    splits, how = {"num_splits": how["num_splits"]}, {name: x for name, x in how.items() if name != "num_splits"}
    for dtype in (torch.bfloat16, torch.float16):
        problem = Problem(
            dtype, queries, new, kv_heads, page_size, batch_idx, lengths=lengths, dim=dim, room=most, **how
        )
        expect_right(problem, **splits)


def test_batch_index_slopes_and_softcap():
    slopes = torch.rand(len(LENGTHS), HEADS, generator=torch.Generator().manual_seed(1))
    for each in (slopes, slopes[0]):
        expect_right(Problem(torch.float32, 2, 2, 2, batch_idx=True, causal=True, softcap=3.0, alibi_slopes=each))
    expect_right(Problem(torch.float32, 2, 0, 2, batch_idx=True))


def test_a_number_of_keys_and_the_whole_cache():
    q, k = torch.randn(2, 3, 2, 16), torch.randn(2, 40, 2, 16)
    whole = flash_attn.flash_attn_func(q, k, k)
    assert torch.equal(flash_attn.flash_attn_with_kvcache(q, k, k), whole)
    assert torch.equal(flash_attn.flash_attn_with_kvcache(q, k, k, cache_seqlens=40, num_splits=7), whole)
    part = flash_attn.flash_attn_with_kvcache(q, k, k, cache_seqlens=11, causal=True)
    assert torch.equal(part, flash_attn.flash_attn_func(q, k[:, :11], k[:, :11], causal=True))


def test_compiled():
    eager, compiled = (Problem(torch.float32, 2, 2, 2, 16, rotary=1.0, causal=True) for _ in range(2))
    call = torch.compile(flash_attn.flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    more = compiled.more | compiled.how | {"k": compiled.k, "v": compiled.v}
    assert torch.equal(call(compiled.q, *compiled.caches, **more), eager.run())
    for found, want in zip(compiled.caches, eager.caches, strict=True):
        assert torch.equal(found.nan_to_num(), want.nan_to_num())


def test_varlen_in_pages():
    problem = Problem(torch.float32, 3, 0, 2, 16, causal=True)
    starts = torch.tensor([0, 3, 6, 9, 12], dtype=torch.int32)
    keys = torch.tensor([0, *np.cumsum(LENGTHS)], dtype=torch.int32)
    o, lse, _ = flash_attn.flash_attn_varlen_func(
        problem.q.flatten(0, 1), *problem.caches, starts, keys, 3, 100, causal=True, return_attn_probs=True,
        block_table=problem.more["block_table"],
    )  # fmt: skip
    want, want_lse = problem.exact()
    np.testing.assert_allclose(o.unflatten(0, (4, 3)).numpy(), want, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(lse.unflatten(1, (4, 3)).numpy(), want_lse.transpose(1, 0, 2), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"v": None}, "k, v: only one of them given"),
        ({"cache_seqlens": None}, "cache_seqlens: None, but it is needed with k and v"),
        ({"k": None, "v": None, "rotary_cos": torch.ones(200, 32)}, "rotary_cos, rotary_sin: given without k and v"),
        ({"rotary_cos": torch.ones(200, 32)}, "rope_cos, rope_sin: only one of them given"),
        ({"rotary_cos": torch.ones(9, 32), "rotary_sin": torch.ones(9, 32)}, "rope_cos: 9 positions, but those of"),
        ({"cache_leftpad": torch.zeros(4, dtype=torch.int32)}, "cache_leftpad: given with block_table"),
        (
            {"cache_leftpad": torch.zeros(4), "block_table": None},
            r"found torch.float32 \[4\], allowed: torch.int32 \[4\]",
        ),
        ({"cache_batch_idx": torch.zeros(4, dtype=torch.int32)}, "cache_batch_idx: given with block_table"),
        ({"cache_seqlens": torch.full((4,), 1000, dtype=torch.int32)}, "seqused_k: 1000 keys of sequence 0 and 3 new"),
        ({"cache_seqlens": 1.5}, "cache_seqlens: found 1.5"),
    ],
)
def test_rejections(wrong, message):
    problem = Problem(torch.float32, 3, 3, 2, 16)
    given = problem.more | {"k": problem.k, "v": problem.v} | wrong
    before = [x.nan_to_num() for x in problem.caches]
    with pytest.raises(octet.Error, match=message):
        flash_attn.flash_attn_with_kvcache(problem.q, *problem.caches, **given)
    assert all(torch.equal(x, y.nan_to_num()) for x, y in zip(before, problem.caches, strict=True))


def test_gradients_are_rejected():
    problem = Problem(torch.float32, 1, 0, 2)
    problem.q.requires_grad_()
    with pytest.raises(octet.Unsupported, match="^q: requires a gradient"):
        problem.run()
