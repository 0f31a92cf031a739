"""tests/cases.json, the list of cases that the tests of C++ read too (tests/support/case_list.h), as numpy arrays."""

import dataclasses
import functools
import itertools
import json
import pathlib

import exact
import ml_dtypes
import numpy as np

FILE = pathlib.Path(__file__).resolve().parent.parent / "cases.json"
DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "e4m3": np.float32}


@dataclasses.dataclass(frozen=True)
class Row:
    """One case of the file; `tests/support/cases.h` says what the fields mean.

    The package has no out_dtype: results have the type of q. 8-bit inputs are QTensors, which
    test_quantize.py is about: the case e4m3 runs in float32. Sinks are [heads] here.
    """

    name: str
    note: str = ""
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    tokens_q: int = 64
    tokens_k: int = 64
    dim: int = 64
    dim_v: int = 64
    causal: bool = False
    window: list[int] | None = None
    alignment: str = ""
    mask: str = ""
    cu_seqlens_q: list[int] | None = None
    cu_seqlens_k: list[int] | None = None
    scale: float | None = None
    dtype: str = "f32"
    out_dtype: str = "f32"
    layout: str = "bhtd"
    kv_layout: str = "bhtd"
    interleaved: bool = False
    sinks: str = ""
    dlse: bool = False
    softcap: float = 0.0
    alibi: str = ""
    dropout_p: float = 0.0
    seeds: str = "shared"
    dmask: bool = False


ALLOWED = {
    "alignment": ("top_left", "bottom_right"),
    "mask": ("keys", "padding", "heads", "blind", "bias_f32", "bias_bf16", "blocks", "bias_blocks"),
    "dtype": tuple(DTYPES),
    "out_dtype": ("f32", "f16", "bf16"),
    "layout": ("bhtd", "bthd", "transposed", "padded"),
    "kv_layout": ("bhtd", "bthd", "transposed", "padded", "broadcast"),
    "sinks": ("shared", "of_batch"),
    "alibi": ("shared", "each"),
    "seeds": ("shared", "each"),
}


def once(pairs):
    """An object of JSON whose fields are there once."""
    for i, (name, _) in enumerate(pairs):
        if name in (before for before, _ in pairs[:i]):
            raise ValueError(f"tests/cases.json: two fields {name!r} in one object")
    return dict(pairs)


def read(text):
    """The rows of the file's text, in order."""
    allowed = [field.name for field in dataclasses.fields(Row)]
    rows = []
    for fields in (x for group in json.loads(text, object_pairs_hook=once).values() for x in group):
        name = fields.get("name")
        for field, value in fields.items():
            if field not in allowed:
                raise ValueError(f"tests/cases.json, {name}: found field {field}, allowed: {', '.join(allowed)}")
            if value not in ALLOWED.get(field, (value,)):
                raise ValueError(f"{name}: {field}: found {value!r}, allowed: {', '.join(ALLOWED[field])}")
        rows.append(Row(**fields))
    return rows


ROWS = read(FILE.read_text())


def lay_out(x, layout):
    """x in the memory order of that name."""
    if layout == "bthd":
        return np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    if layout == "transposed":
        return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)
    if layout == "padded":
        wide = np.full([n + 3 for n in x.shape], np.nan, x.dtype)
        view = wide[tuple(slice(1, n + 1) for n in x.shape)]
        view[...] = x
        return view
    if layout == "broadcast":
        return np.broadcast_to(x[:1], x.shape)
    return x


@dataclasses.dataclass
class Problem:
    """Arrays [batch, head, token, dim] in the row's layouts, and the keywords of a call."""

    row: Row
    arrays: dict  # q k v do tq tk tv
    keywords: dict  # of octet.attention: causal, window, ...
    more: dict  # mask, sinks, alibi_slopes and dropout_seed, as arrays
    dlse: np.ndarray | None
    tsinks: np.ndarray | None
    seen: np.ndarray
    bias: np.ndarray | None
    cu: tuple | None  # of packed sequences
    z: np.ndarray | None = None  # what dropout multiplies P by

    @functools.cached_property
    def about(self):
        """Keywords of exact.attention but for softcap, and of exact.bounds."""
        a, sinks = self.arrays, self.more.get("sinks")
        tangents = a["tq"], a["tk"], a["tv"]
        return {"bias": self.bias, "scale": self.row.scale and float(np.float32(self.row.scale)), "sinks": sinks,
                "z": self.z, "do": a["do"], "dlse": self.dlse, "tangents": tangents, "tsinks": self.tsinks}  # fmt: skip

    @functools.cached_property
    def want(self):
        a = self.arrays
        want = exact.attention(
            a["q"], a["k"], a["v"], seen=self.seen, softcap=float(np.float32(self.row.softcap)), **self.about
        )
        if self.row.dmask:
            broadcast = tuple(i for i, n in enumerate(self.more["mask"].shape) if n == 1)
            want["dmask"] = want["ds"].sum(broadcast, keepdims=True)
        return want

    def expect(self, got):
        """Every result within the bound of its precision: that of the row's dtype."""
        a = self.arrays
        mask = self.more.get("mask", np.zeros((1, 1, 1, 1)))
        how = exact.rounding(mask.dtype)
        of_mask = {"mask": mask.shape, "mask_format": how["format"] or how["unit"]}
        bound = exact.bounds(a["q"], a["k"], a["v"], **self.about, **of_mask, **exact.rounding(a["q"].dtype))
        for name, x in got.items():
            x = np.asarray(x).astype(np.float64)
            exact.expect_close(x, self.want[name], bound[name], name)

    def packed(self, x):
        """[token, head, dim], as octet.attention_varlen takes it."""
        return x[0].swapaxes(0, 1)


def of_sequences(row, shape_of_one):
    """Puts blocks [.., queries, keys] of packed sequences into the whole: nothing outside of them is seen."""
    whole = None
    ranges = [list(itertools.pairwise(cu)) for cu in (row.cu_seqlens_q, row.cu_seqlens_k)]
    for i, (q, k) in enumerate(zip(*ranges, strict=True)):
        block = shape_of_one(i, q[1] - q[0], k[1] - k[0])
        if whole is None:
            whole = np.zeros((*block.shape[:-2], row.tokens_q, row.tokens_k), block.dtype)
        whole[..., q[0] : q[1], k[0] : k[1]] = block
    return whole


def dropped_by_head(row, words, sequence, queries, keys):
    """[head, queries, keys]: what sequence number `sequence` drops."""
    words = words if words.ndim == 1 else words[sequence]
    seed, offset = (int(x) for x in words.view(np.uint64))
    offset = offset & ~(2**32 - 1) | (offset + (sequence if row.seeds == "shared" else 0)) & 2**32 - 1
    drop = lambda head: exact.dropped(row.dropout_p, seed, offset, head, queries, keys)
    return np.stack([drop(head) for head in range(row.heads)])


def draw(row, dtype=None):
    """The row's problem with random numbers, the same in each run; dtype: of all but masks, None: the row's."""
    random = np.random.default_rng(sum(map(ord, row.name)))
    dtype, wide = dtype or DTYPES[row.dtype], dtype or np.float32
    b, h, n, m = full = (row.batch, row.heads, row.tokens_q, row.tokens_k)
    shapes = {"q": (b, h, n, row.dim), "k": (b, row.kv_heads, m, row.dim), "v": (b, row.kv_heads, m, row.dim_v)}
    shapes |= {"do": (b, h, n, row.dim_v)} | {"t" + name: shapes[name] for name in "qkv"}
    arrays = {}
    for name, shape in shapes.items():
        layout = row.kv_layout if name[-1] in "kv" else row.layout
        arrays[name] = lay_out(random.standard_normal(shape).astype(dtype), layout)
    if row.interleaved:
        together = np.empty((b, n, 3, h, row.dim), dtype)
        for i, name in enumerate("qkv"):
            view = together[:, :, i].transpose(0, 2, 1, 3)
            view[...] = arrays[name]
            arrays[name] = view

    keywords = {"scale": row.scale, "softcap": row.softcap}
    alignment = row.alignment or "top_left"
    if row.causal:
        keywords["causal"] = row.alignment or True
    if row.window:
        keywords["window"] = tuple(row.window)
        if row.alignment and not row.causal:
            keywords["alignment"] = row.alignment
    see = lambda queries, keys: exact.visible(queries, keys, row.causal, row.window, alignment)
    packed = row.cu_seqlens_q is not None
    seen = of_sequences(row, lambda _, queries, keys: see(queries, keys)) if packed else see(n, m)

    more, bias = {}, None
    if row.mask:
        shapes = {
            "keys": (1, 1, 1, m),
            "padding": (b, 1, 1, m),
            "blind": full,
            "bias_f32": (1, h, n, m),
            "bias_blocks": full,
        }
        shape = shapes.get(row.mask, (b, 1, n, m))
        shown = random.random(shape) < 2 / 3
        if row.mask == "blind":
            shown[:, :, 3::7] = False
        if row.mask == "padding":
            lengths = [0 if i == 2 else m - 1 - (i + 1) * m // 5 for i in range(b)]
            shown[...] = np.arange(m) < np.array(lengths).reshape(b, 1, 1, 1)
        numbers = 2 * random.standard_normal(shape)
        if "blocks" in row.mask:
            of_batch, of_head, query, key = np.ogrid[tuple(map(slice, shape))]
            kind = (of_batch + of_head + query // 64 + 3 * (key // 128)) % 4
            hidden = (kind == 0) | (of_batch > 0) & (query // 64 == 1)
            shown = ~hidden & (shown | (kind < 3))
            numbers = np.where(kind < 3, 0, numbers)
        seen = seen & shown
        more["mask"] = shown
        if row.mask.startswith("bias"):
            dtype = DTYPES["f32" if row.mask == "bias_f32" else "bf16"]
            more["mask"] = np.where(shown, numbers, -np.inf).astype(dtype)
            bias = np.where(shown, more["mask"].astype(np.float64), 0)
    if row.sinks:
        more["sinks"] = random.normal(np.log1p(m), 2, h).astype(wide)
        if row.sinks == "shared" and h > 2:
            more["sinks"][-1] = -np.inf
    if row.alibi:
        sequences = len(row.cu_seqlens_q) - 1 if packed else b
        slopes = random.normal(0.06, 0.08, (sequences, h) if row.alibi == "each" else h).astype(wide)
        more["alibi_slopes"] = slopes
        of = np.broadcast_to(slopes.astype(np.float64).reshape(-1, h, 1, 1), (sequences, h, 1, 1))
        far = lambda queries, keys: np.abs(np.arange(queries)[:, None] + keys - queries - np.arange(keys))
        term = of_sequences(row, lambda i, *size: -of[i] * far(*size)) if packed else -of * far(n, m)
        bias = term if bias is None else bias + term
    z = None
    if row.dropout_p:
        keywords["dropout_p"] = row.dropout_p
        sequences = len(row.cu_seqlens_q) - 1 if packed else b
        shape = (sequences, 4) if row.seeds == "each" else (4,)
        more["dropout_seed"] = words = random.integers(-(2**31), 2**31, shape, np.int32)
        lost = lambda i, *size: dropped_by_head(row, words, i, *size)
        lost = of_sequences(row, lost)[None] if packed else np.stack([lost(i, n, m) for i in range(b)])
        z = np.where(lost, 0, 1 / (1 - round(row.dropout_p * 2**23) / 2**23))
    dlse = random.standard_normal((b, h, n)).astype(wide) if row.dlse else None
    tsinks = random.standard_normal(h).astype(wide) if row.sinks else None
    cu = tuple(np.array(x, np.int32) for x in (row.cu_seqlens_q, row.cu_seqlens_k)) if packed else None
    return Problem(row, arrays, keywords, more, dlse, tsinks, seen, bias, cu, z)
