"""KV caches for tests: attention over them in float64, and pages that lie in any order."""

import numpy as np


def exact(q, keys, values, *, causal=False, window=(-1, -1), softcap=0.0, slopes=None, sinks=None, scale=None):
    """(o, lse) in float64 of one sequence, q [n, heads, dim], keys and values [m, kv_heads, dim]; masks are aligned
    bottom-right, and -1 is all of a side."""
    q, keys, values = (np.asarray(x, np.float64) for x in (q, keys, values))
    (n, heads, dim), m = q.shape, len(keys)
    group = heads // keys.shape[1] if keys.shape[1] else 1
    keys, values = (np.repeat(x, group, 1) for x in (keys, values))
    logits = np.einsum("ihd,jhd->hij", q, keys) * (dim**-0.5 if scale is None else scale)
    if softcap:
        logits = softcap * np.tanh(logits / softcap)
    distance = np.arange(m)[None] - (np.arange(n)[:, None] + m - n)  # of a key from the diagonal
    if slopes is not None:
        logits = logits - np.asarray(slopes, np.float64)[:, None, None] * np.abs(distance)
    left, right = window
    hidden = np.zeros((n, m), bool)
    if causal:
        right = 0
    if right >= 0:
        hidden |= distance > right
    if left >= 0:
        hidden |= distance < -left
    logits[:, hidden] = -np.inf
    columns = [logits] if sinks is None else [logits, np.broadcast_to(np.asarray(sinks)[:, None, None], (heads, n, 1))]
    rows = np.concatenate(columns, 2)
    top = rows.max(2, keepdims=True, initial=-np.inf)
    weights = np.exp(rows - np.where(np.isfinite(top), top, 0))
    total = weights.sum(2)
    o = np.einsum("hij,jhd->ihd", weights[:, :, :m] / np.where(total > 0, total, 1)[..., None], values)
    with np.errstate(divide="ignore"):
        return o, np.log(total) + np.where(np.isfinite(top), top, 0)[..., 0]


def in_pages(tensors, page_size, seed=0, spare=2):
    """Pages of the tokens of sequences, [tokens, heads, dim] each, in an order drawn from a seed, and the block table.
    What no query may read is NaN, and -1 in the table."""
    random = np.random.default_rng(seed)
    columns = max(1, *(-(-len(x) // page_size) + 1 for x in tensors))
    used = [-(-len(x) // page_size) for x in tensors]
    order = list(random.permutation(sum(used) + spare))
    pages = np.full((len(order), page_size, *tensors[0].shape[1:]), np.nan, np.float32)
    table = np.full((len(tensors), columns), -1, np.int32)
    for s, x in enumerate(tensors):
        for column in range(used[s]):
            table[s, column] = order.pop()
            part = x[column * page_size : (column + 1) * page_size]
            pages[table[s, column], : len(part)] = part
    return pages, table
