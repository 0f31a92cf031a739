"""Attention by its definition in numpy float64: an oracle that shares no line with the library, and what may be
expected of arithmetic in a format."""

import numpy as np


def visible(queries, keys, causal=False, window=None, alignment="top_left"):
    """seen[i, j]: query i sees key j."""
    shift = keys - queries if "bottom_right" in (causal, alignment) else 0
    distance = np.arange(keys)[None, :] - np.arange(queries)[:, None] - shift
    seen = np.ones((queries, keys), bool)
    if causal:
        seen &= distance <= 0
    for side, sign in zip(window or (None, None), (-1, 1), strict=True):
        if side is not None and side >= 0:
            seen &= sign * distance <= side
    return seen


def default_scale(dim):
    """The scale is a float32 in octet.h, at precision f64 too."""
    return float(np.float32(1 / np.sqrt(dim)))


def philox(key, counter):
    """The four words of Philox-4x32-7 (Salmon et al., SC 2011), of integers or arrays of them."""
    low = 2**32 - 1
    x, (a, b) = [np.asarray(c, np.uint64) for c in counter], key
    for i in range(7):
        first, second = x[0] * np.uint64(0xD2511F53), x[2] * np.uint64(0xCD9E8D57)
        keys = np.uint64((a + i * 0x9E3779B9) & low), np.uint64((b + i * 0xBB67AE85) & low)
        high = first >> np.uint64(32), second >> np.uint64(32)
        x = [high[1] ^ x[1] ^ keys[0], second & np.uint64(low), high[0] ^ x[3] ^ keys[1], first & np.uint64(low)]
    return x


def dropped(p, seed, offset, head, queries, keys):
    """[queries, keys]: which elements of P a sequence drops, by docs/numerics.md."""
    low, n = 2**32 - 1, round(p * 2**23)
    i, j = np.arange(queries)[:, None], np.arange(keys)[None, :]
    group = lambda token: 4 * (token // 16) + token % 8 // 2
    counter = group(j) + 0 * i, group(i) + 0 * j, (offset >> 32) + head & low, offset & low
    words = philox((seed & low, seed >> 32), counter)
    byte = lambda word, b: words[word].astype(np.int64) >> 8 * b & 255
    common = sum((byte(word, b) >> 7) << 4 * b + word for word in range(4) for b in range(4))
    own = np.select(
        [(i // 8 % 2 * 2 + j // 8 % 2 == word) & (i % 2 * 2 + j % 2 == b) for word in range(4) for b in range(4)],
        [byte(word, b) for word in range(4) for b in range(4)],
    )
    return own % 128 < n // 65536 + (common < n % 65536)


def attention(
    q, k, v, *, seen=None, bias=None, scale=None, softcap=0, sinks=None, z=None, do=None, dlse=None, tangents=None,
    tsinks=None,
):  # fmt: skip
    """{o, lse}, and {dq, dk, dv, dsinks, ds} with do, {to, tlse} with tangents; arrays are [batch, head, token, dim].

    sinks [head]: a logit more of each query, whose value is 0. dlse [batch, head, token]: the gradient of lse.
    z [batch, head, query, key]: what dropout multiplies p by; None: 1. ds [batch, head, query, key]: the derivative by
    bias.
    """
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    batch, heads, queries, dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]

    def spread(x):
        return np.repeat(x.astype(np.float64), heads // kv_heads, axis=1)

    def gather(x):
        return x.reshape(batch, kv_heads, heads // kv_heads, keys, x.shape[-1]).sum(2)

    wide_k, wide_v = spread(k), spread(v)
    scale = default_scale(dim) if scale is None else scale
    s = scale * q @ wide_k.swapaxes(-1, -2)
    slope = scale  # of the logits, by q k
    if softcap:
        s = softcap * np.tanh(s / softcap)
        slope = scale * (1 - (s / softcap) ** 2)
    if bias is not None:
        s = s + bias.astype(np.float64)
    if seen is not None:
        s = np.where(seen, s, -np.inf)
    sink = np.full(heads, -np.inf) if sinks is None else np.asarray(sinks).astype(np.float64)
    sink = np.broadcast_to(sink[:, None, None], (batch, heads, queries, 1))
    top = np.maximum(s.max(-1, keepdims=True, initial=-np.inf), sink)
    top = np.where(np.isfinite(top), top, 0.0)
    p, p_sink = np.exp(s - top), np.exp(sink - top)
    total = p.sum(-1, keepdims=True) + p_sink
    p, p_sink = (x / np.where(total == 0, 1.0, total) for x in (p, p_sink))
    z = 1.0 if z is None else z
    with np.errstate(divide="ignore"):
        out = {"o": (p * z) @ wide_v, "lse": (top + np.log(total))[..., 0]}
    if do is not None:
        do = do.astype(np.float64)
        dp = z * (do @ wide_v.swapaxes(-1, -2))
        of_row = (p * dp).sum(-1, keepdims=True) - (0.0 if dlse is None else dlse.astype(np.float64)[..., None])
        out["ds"] = p * (dp - of_row)
        ds = slope * out["ds"]
        out["dsinks"] = -(p_sink * of_row).sum((0, 2, 3))
        out["dq"] = ds @ wide_k
        out["dk"] = gather(ds.swapaxes(-1, -2) @ q)
        out["dv"] = gather((p * z).swapaxes(-1, -2) @ do)
    if tangents is not None:
        tq, tk, tv = tangents
        ts = slope * (tq.astype(np.float64) @ wide_k.swapaxes(-1, -2) + q @ spread(tk).swapaxes(-1, -2))
        moved = 0.0 if tsinks is None else np.asarray(tsinks).astype(np.float64)[:, None, None]
        of_row = (p * ts).sum(-1, keepdims=True) + p_sink * moved
        out["tlse"] = of_row[..., 0]
        tp = p * (ts - of_row)
        out["to"] = (tp * z) @ wide_v + (p * z) @ spread(tv)
    return out


def bounds(
    q, k, v, *, unit, format=0.0, scale=None, bias=None, sinks=None, z=None, do=None, dlse=None, tangents=None,
    tsinks=None, mask=(1, 1, 1, 1), mask_format=0.0,
):  # fmt: skip
    """First-order bounds on the error of each output: sums in arithmetic of rounding `unit`, while the weights p, the
    derivatives ds and the results are rounded to `format` (0: as exact as the sums).

    With logits of sums of n products off by (n + 3) unit times the sum of their sizes, weights are off by twice that,
    relative, and every later sum of n terms adds (n + 8) unit (8: the exponential and the single operations). `mask`:
    its shape, for dmask, which is rounded to `mask_format` at the end.
    """

    def largest(x):
        return float(np.abs(x).max(initial=0.0))

    def product(x, y):
        """A bound on sum_c |x_c y_c| of any two rows."""
        size = [np.sqrt((np.asarray(z, np.float64) ** 2).sum(-1)).max(initial=0.0) for z in (x, y)]
        return float(size[0] * size[1])

    batch, heads, queries, dim = q.shape
    keys, kv_heads, dim_v = k.shape[2], k.shape[1], v.shape[3]
    scale = default_scale(dim) if scale is None else scale
    logits = scale * product(q, k) + (0.0 if bias is None else largest(bias[np.isfinite(bias)]))
    logits = max(logits, 0.0 if sinks is None else largest(sinks))
    p = 2 * (dim + 3) * unit * (logits + 1) + (keys + 8) * unit + format
    z = 1.0 if z is None else largest(z)
    out = {"o": z * (p + format + unit) * largest(v), "lse": p + (dim + 8) * unit * (logits + np.log(keys + 1))}
    users = queries * heads / max(kv_heads, 1)  # queries that share a key
    if do is not None:
        dp = z * product(do, v) + (0.0 if dlse is None else largest(dlse))
        ds = 2 * scale * dp * (2 * p + (dim_v + 2 * keys + 16) * unit + 3 * format)
        out["dq"] = ds * largest(k)
        out["dk"] = (ds + 2 * scale * dp * (users + 8) * unit) * users * largest(q)
        out["dv"] = z * (2 * p + format + (users + 8) * unit) * users * largest(do)
        rows, terms = [
            np.prod([n for n, m in zip((batch, heads, queries, keys)[:end], mask, strict=False) if m == 1])
            for end in (3, 4)
        ]
        out["dmask"] = (ds / scale + 2 * dp * ((terms + 8) * unit + mask_format)) * rows
        out["dsinks"] = (ds / scale + 2 * dp * (batch * queries + 8) * unit) * batch * queries
    if tangents is not None:
        tq, tk, tv = tangents
        ts = scale * (product(tq, k) + product(q, tk)) + (0.0 if tsinks is None else largest(tsinks))
        out["tlse"] = ts * (2 * p + (dim + 2 * keys + 16) * unit + 2 * format)
        out["to"] = 2 * ts * (2 * p + (dim + 2 * keys + 16) * unit + 2 * format) * largest(v)
        out["to"] += (2 * p + format + unit) * largest(tv)
        out["to"] *= z
    return out


def expect_close(got, want, bound, name=""):
    """Every number within `bound`, infinities where they belong."""
    got = np.asarray(got).astype(np.float64)
    assert got.shape == want.shape, f"{name}: shape {got.shape}, expected {want.shape}"
    infinite = np.isinf(want)
    np.testing.assert_array_equal(got[infinite], want[infinite], err_msg=name)
    error = np.abs(got[~infinite] - want[~infinite])
    assert not np.isnan(error).any(), f"{name}: NaN"
    worst = error.max(initial=0.0)
    assert worst <= bound, f"{name}: largest error {worst:.3g}, allowed {bound:.3g}"


UNITS = {"float64": 2.0**-53, "float32": 2.0**-24}
FORMATS = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


def rounding(dtype):
    """unit and format of `bounds` for the precision of a dtype."""
    name = str(dtype).removeprefix("torch.")
    return {"unit": UNITS.get(name, 2.0**-24), "format": FORMATS.get(name, 0.0)}
