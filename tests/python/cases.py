"""Problems of all kinds for hypothesis: shapes, layouts, strides, masks, and what the exact answer has to know."""

import dataclasses

import numpy as np
from exact import visible
from hypothesis import strategies as st

# How an array of the right shape may lie in memory.
STRIDES = ("contiguous", "reversed", "every second", "broadcast heads")


@dataclasses.dataclass
class Case:
    """Arrays are [batch, head, token, dim]; `keywords` are those of octet.attention, but for mask and layout."""

    arrays: dict  # q k v do tq tk tv
    mask: np.ndarray | None
    layout: str
    keywords: dict
    seen: np.ndarray  # of `mask` and keywords together
    bias: np.ndarray | None

    def exact(self):
        """Keywords of exact.attention and exact.bounds."""
        return {"bias": self.bias, "scale": self.keywords.get("scale")}

    def in_layout(self, name):
        """The array as the call takes it."""
        x = self.arrays[name]
        return x if self.layout == "bhsd" else x.transpose(0, 2, 1, 3)


def lay_out(x, how):
    """x with other strides."""
    if how == "reversed":
        return np.ascontiguousarray(x[:, :, ::-1])[:, :, ::-1]
    if how == "every second":
        wide = np.full((*x.shape[:2], 2 * x.shape[2], x.shape[3]), np.nan, x.dtype)
        wide[:, :, ::2] = x
        return wide[:, :, ::2]
    if how == "broadcast heads":
        return np.broadcast_to(x[:, :1], x.shape)
    return x


@st.composite
def cases(draw, dtype=np.float64, masks=True):
    batch, kv_heads, group = draw(st.integers(0, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    queries, keys = draw(st.integers(0, 70)), draw(st.integers(0, 70))
    dim, dim_v = (8 * draw(st.integers(1, 4)) for _ in range(2))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    q, k, v = (batch, kv_heads * group, queries, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, dim_v)
    shapes = {"q": q, "k": k, "v": v, "do": (*q[:3], dim_v), "tq": q, "tk": k, "tv": v}
    arrays = {
        name: lay_out(random.standard_normal(shape).astype(dtype), draw(st.sampled_from(STRIDES)))
        for name, shape in shapes.items()
    }

    keywords = {"enable_gqa": True}  # small numbers of heads and tokens read as tensors of two layouts
    if draw(st.booleans()):
        keywords["scale"] = draw(st.floats(2.0**-7, 2.0, width=32))
    causal = draw(st.sampled_from([False, False, True, "top_left", "bottom_right"]))
    causal = "top_left" if causal is True and queries != keys else causal
    if causal:
        keywords["causal"] = causal
    if draw(st.integers(0, 2)) == 0:
        side = st.one_of(st.none(), st.integers(0, 80))
        keywords["window"] = (draw(side), 0 if causal else draw(side))
        if not isinstance(causal, str):
            keywords["alignment"] = draw(st.sampled_from(["top_left", "bottom_right"]))
    seen = visible(queries, keys, causal, keywords.get("window"), keywords.get("alignment", "top_left"))

    mask, bias = None, None
    kind = draw(st.sampled_from(["none", "none", "bool", "float"])) if masks else "none"
    if kind != "none":
        full = (batch, q[1], queries, keys)
        kept = draw(st.integers(0, 4))
        shape = tuple(n if draw(st.booleans()) else 1 for n in full)[kept:]
        shown = np.asarray(random.random(shape) < 0.7)
        mask = shown
        if kind == "float":
            mask = np.where(shown, random.standard_normal(shape), -np.inf).astype(np.float32)
            bias = np.where(shown, mask, 0)
        seen = seen & shown
    return Case(arrays, mask, draw(st.sampled_from(["bhsd", "bshd"])), keywords, seen, bias)
