"""Every case of tests/cases.json through numpy against the definition in float64, and what the file may hold."""

import case_list
import numpy as np
import octet
import pytest


@pytest.mark.parametrize("row", case_list.ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("dtype", [None, np.float64], ids=["own_dtype", "float64"])
def test_every_pass_in_numpy(row, dtype):
    problem = case_list.draw(row, dtype)
    a, keywords = problem.arrays, problem.keywords | problem.more
    q, k, v = (a[name] for name in "qkv")
    if problem.cu:
        o, lse = octet.attention_varlen(*map(problem.packed, (q, k, v)), *problem.cu, return_lse=True, **keywords)
        problem.expect({"o": o.swapaxes(0, 1)[None], "lse": lse[None]})
        return
    o, lse = octet.attention(q, k, v, return_lse=True, **keywords)
    gradients = octet.attention_vjp(q, k, v, a["do"], dlse=problem.dlse, return_dmask=row.dmask, **keywords)
    names = ["dq", "dk", "dv", *["dsinks"] * bool(row.sinks), *["dmask"] * row.dmask]
    got = {"o": o, "lse": lse} | dict(zip(names, gradients, strict=True))
    tangents = a["tq"], a["tk"], a["tv"]
    found = octet.attention_jvp(q, k, v, *tangents, tsinks=problem.tsinks, return_lse=True, **keywords)
    problem.expect(got | {"to": found[1], "tlse": found[3]})


def test_names_are_unique():
    names = [row.name for row in case_list.ROWS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"G": [{"name": "x", "tokens": 3}]}', "x: found field tokens, allowed: name, note, batch"),
        ('{"G": [{"name": "x", "dtype": "f8"}]}', "x: dtype: found 'f8', allowed: f32, f16, bf16, e4m3"),
        ('{"G": [{"name": "x", "dim": 8, "dim": 16}]}', "two fields 'dim' in one object"),
    ],
)
def test_the_file_may_hold_nothing_else(text, message):
    with pytest.raises(ValueError, match=message):
        case_list.read(text)
