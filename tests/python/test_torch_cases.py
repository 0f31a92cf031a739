"""Every case of tests/cases.json through torch's autograd against the definition in float64."""

import case_list
import ml_dtypes
import numpy as np
import octet
import pytest
from torch_shared import torch


def tensor(x):
    """x with its strides."""
    if x is None:
        return None
    if not x.flags.writeable:  # a broadcast batch
        return tensor(x[:1].copy()).expand(x.shape)
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


@pytest.mark.parametrize("row", case_list.ROWS, ids=lambda row: row.name)
def test_every_pass_in_torch(row):
    problem = case_list.draw(row)
    a = {name: tensor(x) for name, x in problem.arrays.items()}
    more = {name: tensor(x) for name, x in problem.more.items()}
    leaves = {name: a[name].requires_grad_() for name in "qkv"}
    if row.sinks:
        leaves["sinks"] = more["sinks"] = more["sinks"].requires_grad_()
    if row.dmask:
        leaves["mask"] = more["mask"] = more["mask"].requires_grad_()
    keywords = problem.keywords | more
    q, k, v = (a[name] for name in "qkv")
    if problem.cu:
        o, lse = octet.attention_varlen(
            *map(problem.packed, (q, k, v)), *map(tensor, problem.cu), return_lse=True, **keywords
        )
        o, lse = o.swapaxes(0, 1)[None], lse[None]
    else:
        o, lse = octet.attention(q, k, v, return_lse=True, **keywords)
    results, derivatives = ((o, lse), (a["do"], tensor(problem.dlse))) if row.dlse else ((o,), (a["do"],))
    gradients = torch.autograd.grad(results, tuple(leaves.values()), derivatives)
    got = {"o": o, "lse": lse} | {"d" + name: x for name, x in zip(leaves, gradients, strict=True)}
    if not problem.cu:
        found = octet.attention_jvp(
            q, k, v, a["tq"], a["tk"], a["tv"], tsinks=tensor(problem.tsinks), return_lse=True, **keywords
        )
        got |= {"to": found[1], "tlse": found[3]}
    problem.expect({name: x.detach().double().numpy() for name, x in got.items()})
