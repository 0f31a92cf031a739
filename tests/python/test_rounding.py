"""octet.Rounding: each point does what docs/numerics.md says, against float64 formulas that share no line with the
library; torch and jax get the same numbers; `octet study` finds the same errors."""

import dataclasses
import json
import os
import pathlib
import subprocess

import exact
import numpy as np
import octet
import pytest
from octet import Rounding

ROOT = pathlib.Path(__file__).resolve().parents[2]
# The bits behind the leading one, and the exponent of the smallest number.
FORMATS = {"f32": (23, -149), "f16": (10, -24), "bf16": (7, -133), "e4m3": (3, -9), "e5m2": (2, -16)}
POINTS = [field.name for field in dataclasses.fields(Rounding) if field.type is Rounding.__annotations__["qk"]]
UNIT = exact.rounding("float64")
CAUSAL = {"causal": "bottom_right"}


def rounded(format, x):
    """x to nearest, ties to even, in a format whose range it is in."""
    if format == "f64":
        return x
    bits, least = FORMATS[format]
    unit = 2.0 ** np.maximum(np.frexp(x)[1] - 1 - bits, least)
    return np.rint(x / unit) * unit


def formulas(q, k, v, do, r, seen):
    """{o, lse, dq, dk, dv} of heads of their own, tile after tile of keys."""
    scale = exact.default_scale(q.shape[-1])
    q, k, v = rounded(r.qk, q), rounded(r.qk, k), rounded(r.v, v)
    unit = 1.0 if r.s_scaled else scale
    s = np.where(seen, rounded(r.s, (scale if r.s_scaled else 1.0) * q @ k.swapaxes(-1, -2)), -np.inf)
    rows = (*s.shape[:-1], 1)
    m = top = np.full(rows, -np.inf)
    total, acc = np.zeros(rows), np.zeros((*rows[:-1], v.shape[-1]))
    for first in range(0, s.shape[-1], r.tile or s.shape[-1]):
        part = slice(first, first + (r.tile or s.shape[-1]))
        tile = s[..., part]
        largest = tile.max(-1, keepdims=True)
        if r.beta:
            least = unit * np.maximum(largest, top) - r.tie_epsilon
            ties = (unit * tile >= least).sum(-1, keepdims=True)
            moved = np.minimum(np.where(largest > 0, r.beta * largest, 0), largest + 40 / unit)
            largest_or_moved = np.where((ties > 0) & (ties + (unit * top >= least) > 1), moved, largest)
        else:
            largest_or_moved = largest
        now = np.maximum(m, np.where(np.isfinite(largest), rounded(r.m, largest_or_moved), -np.inf))
        origin = np.where(np.isfinite(now), now, 0.0)
        alpha = rounded(r.alpha, np.exp(unit * (m - origin)))
        argument = np.where(seen[..., part], unit * (tile - origin), 0)
        p = np.where(seen[..., part], np.exp(rounded(r.arg, argument)), 0)
        sent = rounded(r.p, p)
        total = alpha * total + (sent if r.l_from_p else p).sum(-1, keepdims=True)
        acc = rounded(r.acc, alpha * acc + sent @ v[..., part, :])
        m, top = now, np.maximum(top, largest)
    lse = unit * m + np.log(total)
    p = np.where(seen, np.minimum(np.exp(np.where(seen, unit * s, 0) - lse), 1), 0)
    dp = do @ v.swapaxes(-1, -2)
    of_o, of_p = (do * rounded(r.o_saved, acc / total)).sum(-1, keepdims=True), (p * dp).sum(-1, keepdims=True)
    delta = of_o if r.delta == "o" else of_p / p.sum(-1, keepdims=True)
    ds = scale * rounded(r.ds, p * (dp - delta))
    dv = rounded(r.p_backward, p).swapaxes(-1, -2) @ do
    return {"o": rounded(r.o, acc / total), "lse": lse[..., 0], "dq": ds @ k, "dk": ds.swapaxes(-1, -2) @ q, "dv": dv}


def inputs(tied=False):
    """150 keys: two tiles and a part of one. `tied`: each key occurs three times, so that every row has ties."""
    random = np.random.default_rng(3)
    q, k, v, do = (2 * random.standard_normal((2, 2, 150, 8)) for _ in range(4))
    if tied:
        q, k = rounded("bf16", q), rounded("bf16", k)
        k[..., 50:100, :] = k[..., 100:, :] = k[..., :50, :]
    return q, k, v, do


def results(q, k, v, do, **options):
    o, lse = octet.attention(q, k, v, return_lse=True, **options)
    dq, dk, dv = octet.attention_vjp(q, k, v, do, **options)
    return {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


CASES = [
    *[{point: "bf16"} for point in POINTS if point != "m"],
    {"m": "bf16", "p": "bf16"},  # alone it only moves the origin of exp
    *[{"p": format, "ds": format} for format in ("f32", "f16", "e4m3", "e5m2")],
    {"s": "bf16", "s_scaled": True},
    {"s": "f16", "m": "bf16"},
    {"l_from_p": False, "p": "bf16"},
    {"o_saved": "bf16", "o": "e4m3"},
    {"delta": "p", "o_saved": "e4m3", "ds": "bf16"},
    {"tile": 0, "p": "bf16"},
    {"acc": "bf16", "tile": 16},
    {"beta": 3.0, "p": "bf16", "l_from_p": False},
    {"beta": 2.0, "tie_epsilon": 0.25, "p": "bf16", "tile": 100},
]


@pytest.mark.parametrize("points", CASES, ids=str)
def test_each_point_is_that_of_the_formulas(points):
    r = Rounding(**points)
    q, k, v, do = inputs(tied=r.beta > 0)
    seen = np.broadcast_to(exact.visible(150, 150, True), (2, 2, 150, 150))
    got = results(q, k, v, do, rounding=r, **CAUSAL)
    want, bound = formulas(q, k, v, do, r, seen), exact.bounds(q, k, v, do=do, **UNIT)
    for name, x in want.items():
        exact.expect_close(got[name], x, bound[name], name)
    first, *others = points
    without = results(q, k, v, do, rounding=Rounding(**{name: points[name] for name in others}), **CAUSAL)
    assert any(np.abs(got[name] - without[name]).max() > 1000 * bound[name] for name in want), f"{first} does nothing"


def test_nothing_is_rounded_unless_named():
    q, k, v, do = inputs()
    unrounded = results(q, k, v, do)
    bound = exact.bounds(q, k, v, do=do, **UNIT)
    for name, x in results(q, k, v, do, rounding=Rounding()).items():  # but in tiles, whose sums have another order
        exact.expect_close(x, unrounded[name], bound[name], name)
    for name, x in results(q, k, v, do, rounding=None).items():
        np.testing.assert_array_equal(x, unrounded[name], name)


@pytest.mark.parametrize("points", [{}, {"delta": "p"}, {"o": "f64", "o_saved": "e4m3"}], ids=str)
def test_torch_and_jax_get_the_same_numbers(points):
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    r = Rounding.flash(**points)
    *x, do = inputs()

    def attend(q, k, v):
        return octet.attention(q, k, v, rounding=r, **CAUSAL)

    want = [attend(*x), *octet.attention_vjp(*x, do, rounding=r, **CAUSAL)]
    tensors = [torch.tensor(y, requires_grad=True) for y in x]
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for function in (attend, attend, attend, compiled):  # later calls come from C
        o = function(*tensors)
        got = [o, *torch.autograd.grad(o, tensors, torch.tensor(do))]
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a.detach().numpy(), b)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        arrays = list(map(jax.numpy.asarray, x))
        for function in (attend, jax.jit(attend)):
            o, pull = jax.vjp(function, *arrays)
            for a, b in zip([o, *pull(jax.numpy.asarray(do))], want, strict=True):
                np.testing.assert_array_equal(a, b)
        dq = jax.grad(lambda q: (attend(q, *arrays[1:]) * do).sum())(arrays[0])
        np.testing.assert_array_equal(dq, want[1])


def test_float32_arrays_get_the_same_roundings():
    """o and gradients are stored in float32, and nothing else differs: not what delta reads."""
    r = Rounding.flash(o="bf16", o_saved="f64")
    x = [y.astype(np.float32) for y in inputs()]
    got, want = results(*x, rounding=r), results(*(y.astype(np.float64) for y in x), rounding=r)
    for name in ("o", "dq", "dk", "dv"):
        assert got[name].dtype == np.float32
        # delta reads o + o_residual, which in float32 errs by 2^-48 of o.
        error = 2.0**-24 * np.abs(want[name]) + 2.0**-40 * np.abs(want[name]).max()
        assert (np.abs(got[name] - want[name]) <= error).all(), name


def test_programs_of_jax_keep_no_address():
    """The program names the points, so that another process can run it."""
    jax = pytest.importorskip("jax")
    if octet.info()["xla_handlers"] is None:
        pytest.skip("built without jaxlib's headers")
    with jax.default_device(jax.devices("cpu")[0]):
        q = jax.numpy.ones((1, 1, 8, 8), np.float32)
        texts = {
            jax.jit(lambda x, r=r: octet.attention(x, x, x, rounding=r)).lower(q).as_text()
            for r in (Rounding(p="bf16"), Rounding(p="bf16"), Rounding(p="f16"))
        }
    assert len(texts) == 2


def test_check_takes_one():
    q, k, v, do = inputs()
    errors = octet.check(q, k, v, do=do, rounding=Rounding(p_backward="bf16"))
    assert errors["dv"].rel_l2 > 2.0**-10 and max(errors["dq"].rel_l2, errors["o"].rel_l2) < 2.0**-40


@pytest.mark.parametrize("words, r", [
    ("flash", Rounding.flash()),
    ("flash,delta=p,l=p,tile=128", Rounding.flash(delta="p", l_from_p=True, tile=128)),
    ("p=bf16,s=f32,scaled=after,m=f32,arg=f32,beta=3,tie_epsilon=0.5,o_saved=bf16",
     Rounding(p="bf16", s="f32", s_scaled=True, m="f32", arg="f32", beta=3, tie_epsilon=0.5, o_saved="bf16")),
])  # fmt: skip
def test_the_command_finds_the_same_errors(words, r):
    if "OCTET" not in os.environ:
        pytest.skip("OCTET names no command")
    torch = pytest.importorskip("torch")
    tensors = pytest.importorskip("safetensors.torch").load_file(ROOT / "examples/data/gpt64_layer2.safetensors")
    q, k, v, do = (tensors[name].double() for name in ("q", "k", "v", "do"))
    command = [os.environ["OCTET"], "study", ROOT / "examples/data/gpt64_layer2.safetensors", "--round", words]
    done = subprocess.run([*command, "--causal", "--json"], capture_output=True, text=True, check=True)
    (row,) = json.loads(done.stdout)
    found = octet.check(q, k, v, do=do, rounding=r, causal=True)
    assert torch.is_tensor(q) and row["rel_l2"].keys() == {"o", "dq", "dk", "dv"}
    for name, error in row["rel_l2"].items():
        assert found[name].rel_l2 == pytest.approx(error, rel=1e-9), name  # sums of the norms in another order


Q = np.zeros((1, 1, 8, 8))
WRONG = {
    "Rounding(p='bf17')": "rounding: p: found 'bf17', allowed: 'f64', 'f32', 'f16', 'bf16', 'e4m3', 'e5m2'",
    "Rounding(qk=['bf16'])": "rounding: qk: found ['bf16'], allowed: 'f64', 'f32', 'f16', 'bf16', 'e4m3', 'e5m2'",
    "Rounding(delta='bf16')": "rounding: delta: found 'bf16', allowed: 'o', 'p'",
    "Rounding(l_from_p=1)": "rounding: l_from_p: found 1, allowed: False, True",
    "Rounding(tile=-1)": "rounding: tile: found -1, allowed: keys of a tile, or 0 for all in one",
    "Rounding(tile=2**32)": "rounding: tile: found 4294967296, allowed: keys of a tile, or 0 for all in one",
    "Rounding(beta='3')": "rounding: beta: found '3', allowed: a number",
    "Rounding(pp='bf16')": "pp: a Rounding has no such point; allowed: 'qk', 'v', 's',",
    "Rounding.flash(pp='bf16')": "pp: a Rounding has no such point; allowed: 'qk', 'v', 's',",
    "octet.attention(Q, Q, Q, rounding=Rounding(beta=9))": "rounding: beta: found 9, allowed: above 1, at most 8, or 0",
    "octet.attention(Q, Q, Q, rounding=Rounding(tie_epsilon=-1))": "rounding: tie_epsilon: found -1, allowed: finite",
    "octet.attention(Q, Q, Q, rounding='flash')": "rounding: found 'flash', allowed: an octet.Rounding, None",
    "octet.attention(Q, Q, Q, rounding=Rounding(), out_dtype='float16')": "rounding: o would be f16, allowed: f32, f64",
    "octet.attention(*[Q.astype('f4')] * 3, rounding=Rounding(), precision='f32')":
        "rounding: given with precision f32; it belongs to precision f64",
    "octet.attention_jvp(*[Q] * 6, rounding=Rounding())": "rounding: octet_rounding has no points for the jvp",
    "octet.attention(Q, Q, Q, rounding=Rounding(), backend='cpu')": "cpu: precision f64 is the reference backend's",
}  # fmt: skip


@pytest.mark.parametrize("call", WRONG)
def test_what_is_wrong_is_named(call):
    with pytest.raises((octet.Error, TypeError)) as caught:
        eval(call)
    assert WRONG[call] in str(caught.value)


def test_a_rounding_is_a_value():
    assert Rounding.flash() == Rounding.flash() and hash(Rounding.flash()) == hash(Rounding.flash())
    assert Rounding.flash(p="f16") == dataclasses.replace(Rounding.flash(), p="f16")
    assert "p='f16'" in repr(Rounding(p="f16"))
