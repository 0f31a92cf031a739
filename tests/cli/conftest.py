"""Runs the command, writes and reads its files, and computes attention in NumPy float64: an oracle that shares no line
with the library."""

import json
import os
import struct
import subprocess

import numpy as np
import pytest

OCTET = os.environ["OCTET"]
TYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "I8": np.int8,
    "U8": np.uint8,
    "I32": np.int32,
    "BF16": np.uint16,
    "F8_E4M3": np.uint8,
}


def octet(*arguments, env=None):
    return subprocess.run([OCTET, *map(str, arguments)], capture_output=True, text=True, timeout=300, env=env)


def run_ok(*arguments):
    done = octet(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def to_bf16(x):
    """The bits of x rounded to nearest even."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def header_bytes(header):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


def write_safetensors(path, tensors, bf16=False):
    header, data = {}, b""
    names = {np.dtype(v): k for k, v in TYPES.items() if k not in ("BF16", "F8_E4M3")}
    for name, x in tensors.items():
        stored = to_bf16(x) if bf16 else np.ascontiguousarray(x)
        kind = "BF16" if bf16 else names[stored.dtype]
        header[name] = {"dtype": kind, "shape": list(x.shape), "data_offsets": [len(data), len(data) + stored.nbytes]}
        data += stored.tobytes()
    path.write_bytes(header_bytes(header) + data)
    return path


def read_header(path):
    raw = path.read_bytes()
    return json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])


def read_safetensors(path):
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    out = {}
    for name, entry in json.loads(raw[8 : 8 + length]).items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        x = np.frombuffer(raw[8 + length + first : 8 + length + last], TYPES[entry["dtype"]]).reshape(entry["shape"])
        out[name] = from_bf16(x) if entry["dtype"] == "BF16" else x
    return out


def draw(seed, b=2, hq=4, hkv=2, sq=33, sk=33, d=16, e=16, dtype=np.float32, companions=True):
    random = np.random.default_rng(seed)
    shapes = {"q": (b, hq, sq, d), "k": (b, hkv, sk, d), "v": (b, hkv, sk, e)}
    if companions:
        shapes |= {"do": (b, hq, sq, e), "tq": shapes["q"], "tk": shapes["k"], "tv": shapes["v"]}
    return {name: random.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def attention(t, seen=None, scale=None, softcap=None):
    """o, lse and, where do or tangents are there, dq, dk, dv, dsinks, to, tlse; seen[i, j]: query i sees key j. With
    sinks, tsinks and alibi_slopes, [head] or [batch, head], and dlse, [batch, head, token], if they are there."""
    q, k, v = (t[n].astype(np.float64) for n in "qkv")
    group = q.shape[1] // k.shape[1]
    scale = 1 / np.sqrt(q.shape[-1]) if scale is None else scale
    spread = lambda x: np.repeat(x, group, axis=1)
    gather = lambda x: x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(2)
    K, V = spread(k), spread(v)
    s = scale * q @ K.swapaxes(-1, -2)
    by_s = 1.0
    if softcap is not None:
        s, by_s = softcap * np.tanh(s / softcap), 1 / np.cosh(s / softcap) ** 2
    if "alibi_slopes" in t:
        n, m = s.shape[-2:]
        distance = np.abs(np.arange(n)[:, None] + (m - n) - np.arange(m))
        s = s - t["alibi_slopes"].astype(np.float64).reshape(-1, q.shape[1], 1, 1) * distance
    if seen is not None:
        s = np.where(seen, s, -np.inf)
    sinks = np.reshape(t["sinks"].astype(np.float64), (-1, q.shape[1], 1, 1)) if "sinks" in t else -np.inf
    top = np.maximum(s.max(-1, keepdims=True), sinks)
    top = np.where(np.isfinite(top), top, 0)
    w = np.exp(s - top)
    total = w.sum(-1, keepdims=True) + np.exp(sinks - top)
    p = w / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        out = {"o": p @ V, "lse": (top + np.log(total))[..., 0]}
    if "do" in t:
        do = t["do"].astype(np.float64)
        dp = do @ V.swapaxes(-1, -2)
        minus_delta = (t["dlse"].astype(np.float64)[..., None] if "dlse" in t else 0) - (p * dp).sum(-1, keepdims=True)
        ds = scale * p * (dp + minus_delta) * by_s
        out |= {"dq": ds @ K, "dk": gather(ds.swapaxes(-1, -2) @ q), "dv": gather(p.swapaxes(-1, -2) @ do)}
        if "sinks" in t:
            per_head = (np.exp(sinks - top) / total * minus_delta).sum((2, 3))
            out["dsinks"] = per_head.sum(0) if t["sinks"].ndim == 1 else per_head
    if "tq" in t:
        tq, tk, tv = (t[n].astype(np.float64) for n in ("tq", "tk", "tv"))
        ts = scale * by_s * (tq @ K.swapaxes(-1, -2) + q @ spread(tk).swapaxes(-1, -2))
        tlse = (p * ts).sum(-1, keepdims=True)
        if "tsinks" in t:
            tlse = tlse + np.exp(sinks - top) / total * t["tsinks"].astype(np.float64).reshape(-1, q.shape[1], 1, 1)
        out |= {"to": p * (ts - tlse) @ V + p @ spread(tv), "tlse": tlse[..., 0]}
    return out


def causal(sq, sk, bottom_right=False):
    i, j = np.arange(sq)[:, None], np.arange(sk)[None, :]
    return j <= i + (sk - sq if bottom_right else 0)


def window(tokens, left, right):
    distance = np.arange(tokens)[None, :] - np.arange(tokens)[:, None]
    return (distance >= -left) & (distance <= right)


def rel_l2(got, want):
    return np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want)


@pytest.fixture
def small(tmp_path):
    """A good file of small f32 tensors with all companions."""
    return write_safetensors(tmp_path / "in.safetensors", draw(7))
