"""The tables of docs/drop-ins.md: which passes of which case of scaled_dot_product_attention each backend computes, as
calls of octet.sdpa show. Backends that this machine has not are left out."""

import pathlib

import octet
import pytest

torch = pytest.importorskip("torch")
from torch.nn.attention.bias import causal_lower_right  # noqa: E402

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "drop-ins.md"
OTHERS = "every call that no row names"
PASSES = ("forward", "backward", "jvp")
DEVICES = {"cpu": "cpu", "reference": "cpu", "sm90": "cuda", "sm80": "cuda"}


def rows(head):
    """The rows of a table of the page, and its heads: {first cell: {head: cell}}."""
    lines = [x.strip().strip("|") for x in PAGE.read_text().splitlines()]
    cells = [[cell.strip() for cell in x.split("|")] for x in lines]
    start = next(i for i, row in enumerate(cells) if row[0] == head)
    end = next(i for i, row in enumerate(cells) if i > start and len(row) != len(cells[start]))
    return {row[0]: dict(zip(cells[start][1:], row[1:], strict=True)) for row in cells[start + 2 : end]}


def table():
    """{case: {backend: passes}}, of the calls that no other row names and of those that are exceptions."""
    some = {case: {name: row[name] for name in DEVICES} for case, row in rows("case").items()}
    return some | {case: dict.fromkeys(DEVICES, "rejected") for case in rows("rejected on every backend")}


def tensors(q, k=None, v=None, dtype=torch.bfloat16):
    k = q if k is None else k
    return [torch.zeros(shape, dtype=dtype) + 0.25 for shape in (q, k, k if v is None else v)]


Q = (2, 4, 8, 16)
MASK = torch.tensor([[True] * 8] * 7 + [[False] * 8])
NESTED = torch.nested.nested_tensor([torch.zeros(3, 16), torch.zeros(2, 16)], layout=torch.jagged)
A_MASK = "bool or float mask that is no mask of keys"
INT8 = '`precision="int8"`, with or without a mask of keys'
# A call for each case: tensors and keywords. Those that a table names have the name of its row.
CALLS = {
    "no mask": (tensors(Q), {}),
    "`is_causal`, equal lengths": (tensors(Q), {"is_causal": True}),
    "`is_causal`, unequal lengths": (tensors(Q, (2, 4, 5, 16)), {"is_causal": True}),
    A_MASK: (tensors(Q), {"attn_mask": MASK[:, :1]}),
    "a mask of keys":
        (tensors(Q), {"attn_mask": MASK[6:8, None, None]}),
    "a float mask": (tensors(Q), {"attn_mask": torch.zeros(4, 1, 8)}),
    "`CausalBias` of torch.nn.attention.bias": (tensors(Q, (2, 4, 9, 16)), {"attn_mask": causal_lower_right(8, 9)}),
    "a query that sees nothing": (tensors(Q), {"attn_mask": MASK}),
    "`enable_gqa`": (tensors(Q, (2, 2, 8, 16)), {"enable_gqa": True}),
    "single heads of query, key or value beside more of the others":
        (tensors((2, 1, 8, 16), Q, (2, 1, 8, 16)), {}),
    "no heads dimension, several batch dimensions, batches that broadcast":
        (tensors((3, 1, 4, 8, 16), (2, 4, 8, 16)), {}),
    "empty batch, no queries": (tensors((0, 4, 8, 16)), {}),
    "no keys": (tensors(Q, (2, 4, 0, 16)), {}),
    "dims of value unlike those of query": (tensors(Q, Q, (2, 4, 8, 24)), {}),
    "head dims up to 512": (tensors((1, 1, 8, 512)), {}),
    "head dims that are no multiple of 8": (tensors((1, 1, 8, 12)), {}),
    "head dims above 512": (tensors((1, 1, 8, 520)), {}),
    "`scale`, positive": (tensors(Q), {"scale": 0.5}),
    "`scale`, 0 or negative": (tensors(Q), {"scale": 0.0}),
    "float16": (tensors(Q, dtype=torch.float16), {}),
    "float32": (tensors(Q, dtype=torch.float32), {}),
    "float64": (tensors(Q, dtype=torch.float64), {}),
    INT8: (tensors(Q), {"precision": "int8"}),
    "int8 with a mask of keys": (tensors(Q), {"precision": "int8", "attn_mask": MASK[:1]}),
    "`precision=\"int8_f16\"`": (tensors(Q), {"precision": "int8_f16"}),
    "`precision=\"fp8\"`": (tensors(Q), {"precision": "fp8"}),
    "unequal heads without `enable_gqa`": (tensors(Q, (2, 2, 8, 16)), {}),
    "`is_causal` with `attn_mask`": (tensors(Q), {"attn_mask": MASK, "is_causal": True}),
    "`dropout_p` other than 0": (tensors(Q), {"dropout_p": 0.1}),
    "a float mask that requires a gradient": (tensors(Q), {"attn_mask": torch.zeros(8, 8, requires_grad=True)}),
    "nested tensors": ([NESTED] * 3, {}),
}  # fmt: skip
ROWS = {"a float mask": A_MASK, "a query that sees nothing": A_MASK, "int8 with a mask of keys": INT8}


def expected(case, backend):
    """What the page says."""
    found = table()
    return found.get(ROWS.get(case, case), found[OTHERS])[backend]


def served(x, keywords, device):
    """The passes that octet.sdpa computes."""
    x = [y.to(device) for y in x]
    keywords = {name: y.to(device) if type(y) is torch.Tensor else y for name, y in keywords.items()}
    if (mask := keywords.get("attn_mask")) is not None and not mask.is_leaf:
        keywords["attn_mask"] = mask.detach().requires_grad_()
    plain = [y.detach() for y in x]

    def call(*y):
        return octet.sdpa(*y, **keywords)

    def backward():
        leaves = [y.clone().requires_grad_() for y in plain]
        return torch.autograd.grad(call(*leaves), leaves, torch.ones_like(call(*plain)))

    found = []
    passes = lambda: call(*plain), backward, lambda: torch.func.jvp(call, tuple(plain), tuple(plain))
    for name, run in zip(PASSES, passes, strict=True):
        if x[0].is_nested and name != "forward":  # torch itself has no such tangents
            continue
        try:
            run()
        except octet.Error:
            continue
        found.append(name)
    return ", ".join(found) or "rejected"


def test_the_tables_have_these_backends_and_only_exceptions():
    found = table()
    assert set(found) - {OTHERS} <= {ROWS.get(case, case) for case in CALLS}
    assert all(row != found[OTHERS] for case, row in found.items() if case != OTHERS)
    assert set(rows("case")[OTHERS]) == {"octet.sdpa", *DEVICES}
    assert {backend["name"] for backend in octet.info()["backends"]} <= set(DEVICES)


@pytest.mark.parametrize("backend", DEVICES)
def test_each_cell(backend, monkeypatch):
    known = {x["name"]: x for x in octet.info()["backends"]}
    if backend not in known or not known[backend]["available"]:
        pytest.skip(f"no {backend} here")
    monkeypatch.setenv("OCTET_BACKEND", backend)
    found = {case: served(*call, DEVICES[backend]) for case, call in CALLS.items()}
    assert found == {case: expected(case, backend) for case in CALLS}
