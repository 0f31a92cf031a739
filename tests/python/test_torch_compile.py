"""The operators of octet in torch: opcheck, torch.compile, torch.export, the text of their options, FLOPs."""

import subprocess
import sys

import octet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_shared import compiled

torch = pytest.importorskip("torch")
import octet.torch  # noqa: E402  # registers the operators
from octet._options import Options  # noqa: E402
from octet.torch._text import options_from, text_of  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402


def inputs(dtype=torch.float32, queries=33, keys=33, heads=4, kv_heads=2, dim=16):
    torch.manual_seed(0)
    shapes = (heads, queries, dim), (kv_heads, keys, dim), (kv_heads, keys, dim)
    return [torch.randn(2, *shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize(
    "options", [Options("f32"), Options("bf16", causal="top_left"), Options("int8", layout="bshd")], ids=str
)
def test_opcheck(options):
    q, k, v = (x if options.layout == "bhsd" else x.transpose(1, 2).detach().requires_grad_() for x in inputs(dim=8))
    mask = torch.rand(33, 33) < 0.8
    q, k, v = ((x.bfloat16() if options.precision == "bf16" else x).detach().requires_grad_() for x in (q, k, v))
    residual = options.precision == "bf16"
    given, how = (mask, None, None, None), text_of(options)
    o, lse, r = (x.detach() for x in torch.ops.octet.forward(q, k, v, residual, how, *given))
    torch.library.opcheck(torch.ops.octet.forward.default, (q, k, v, residual, how, *given))
    torch.library.opcheck(torch.ops.octet.backward.default, (o, q, k, v, o, lse, r, how, *given))
    if options.precision != "int8":
        torch.library.opcheck(torch.ops.octet.jvp.default, (q, k, v, q, k, v, True, how, *given))


def test_opcheck_of_packed_sequences():
    cu = torch.tensor([0, 5, 12], dtype=torch.int32)
    q = torch.randn(12, 2, 8, requires_grad=True)
    options = Options("f32", layout="thd", causal="top_left", window=(3, -1))
    torch.library.opcheck(torch.ops.octet.forward.default, (q, q, q, False, text_of(options), None, cu, cu))


def with_gradients(function, *x):
    o = function(*x)
    return o.detach(), *torch.autograd.grad(o.sum(), x)


@pytest.mark.parametrize(
    "dtype, precision", [("float32", None), ("bfloat16", None), ("bfloat16", "int8"), ("float64", None)]
)
def test_compiled_is_eager_bit_for_bit(dtype, precision):
    """aot_eager runs the captured graph with torch's own kernels: nothing but octet's plumbing differs."""
    q, k, v = inputs(getattr(torch, dtype))
    mask = torch.rand(33, 33) < 0.8

    def block(q, k, v):
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
        return octet.attention(2 * q, k, v, causal=True, mask=mask, precision=precision).sin()

    for x, y in zip(with_gradients(compiled(block), q, k, v), with_gradients(block, q, k, v), strict=True):
        assert torch.equal(x, y) and x.stride() == y.stride()


@pytest.mark.parametrize("imports", ["import torch, octet", "import octet, torch"])
def test_the_first_call_of_a_process_compiles(imports):
    """Nothing of octet.torch is imported yet when torch.compile traces the call."""
    program = f"""{imports}
q = torch.randn(1, 2, 16, 64, requires_grad=True)
attend = torch.compile(lambda q: octet.attention(q, q, q, causal="top_left"), backend="aot_eager", fullgraph=True)
torch._dynamo.config.error_on_recompile = True
for _ in range(2):
    attend(q).sum().backward()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600)


def test_inductor():
    q, k, v = inputs()

    def block(q, k, v):
        return octet.attention((q * 2).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), layout="bshd").relu()

    got, want = (with_gradients(f, q, k, v) for f in (compiled(block, backend="inductor"), block))
    # Generated code may fuse 2 q differently; attention of the same numbers is the same.
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_dynamic_shapes_compile_once():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    def call(q, k, v):
        return octet.attention(q, k, v, causal="top_left")

    function = compiled(call, backend=backend, dynamic=True)
    for queries in (9, 17, 33):
        x = [y.detach() for y in inputs(queries=queries, keys=queries + 2)]
        assert torch.equal(function(*x), call(*x))
    assert len(graphs) == 1


def test_one_tensor_in_two_places_compiles():
    """Self-attention hands over the same cu_seqlens twice; keys may also be the values."""
    cu = torch.tensor([0, 5, 12], dtype=torch.int32)
    q, k, v = (torch.randn(12, 2, 8, requires_grad=True) for _ in range(3))

    def packed(q, k, v):
        return octet.attention_varlen(q, k, v, cu, cu, causal="top_left")

    def shared(q, k):
        return octet.attention(q[None], k, k)

    for call, leaves in ((packed, (q, k, v)), (shared, (q, k[None].detach().requires_grad_()))):
        for x, y in zip(with_gradients(compiled(call), *leaves), with_gradients(call, *leaves), strict=True):
            assert torch.equal(x, y)
        inference = [x.detach() for x in leaves]
        assert torch.equal(compiled(call)(*inference), call(*inference))


def test_pairs_packed_sequences_sdpa_and_autocast_compile():
    q, k, v = (x.detach() for x in inputs())
    pair = compiled(lambda q, k, v: octet.attention_jvp(q, k, v, q, k, v))
    assert all(torch.equal(x, y) for x, y in zip(pair(q, k, v), octet.attention_jvp(q, k, v, q, k, v), strict=True))
    cu = torch.tensor([0, 5, 12], dtype=torch.int32)
    packed = [torch.randn(12, 2, 8) for _ in range(3)]

    def varlen(q, k, v, cu):
        return octet.attention_varlen(q, k, v, cu, cu, causal="top_left", max_seqlen_q=7)

    assert torch.equal(compiled(varlen)(*packed, cu), varlen(*packed, cu))

    def sdpa(q, k, v):
        return octet.sdpa(q, k, v, is_causal=True, enable_gqa=True)

    assert torch.equal(compiled(sdpa)(q, k, v), sdpa(q, k, v))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(compiled(sdpa)(q, k, v), sdpa(q, k, v))
    with octet.patch_sdpa("int8"):
        attend = compiled(lambda q: torch.nn.functional.scaled_dot_product_attention(q, q, q))
        assert torch.equal(attend(q), octet.attention(q, q, q, precision="int8"))


def tangents(f, primals, directions):
    """What f gives, and its derivative along the directions, which has no gradient."""
    made, along = torch.func.jvp(f, primals, directions)
    return (*made, *(x.detach() for x in along)) if isinstance(made, tuple) else (made, along.detach())


COMPILED_JVPS = {
    "of all": lambda q, k, v, s, t: tangents(octet.attention, (q, k, v), (t, t[:, :2], -t[:, 2:])),
    "of lse": lambda q, k, v, s, t: tangents(
        lambda *x: octet.attention(*x, causal="top_left", return_lse=True), (q, k, v), (t, t[:, :2], -t[:, 2:])
    ),
    "of q": lambda q, k, v, s, t: tangents(lambda q: octet.attention(q, k, v), (q,), (t,)),
    "of v": lambda q, k, v, s, t: tangents(lambda v: octet.attention(q, k, v), (v,), (t[:, :2],)),
    "of one tensor": lambda q, k, v, s, t: tangents(lambda q: octet.attention(q, q, q), (q,), (t,)),
    "of what is beside it": lambda q, k, v, s, t: tangents(lambda x: x * octet.attention(q, k, v), (q,), (t,)),
    "of sinks": lambda q, k, v, s, t: tangents(lambda q, s: octet.attention(q, k, v, sinks=s), (q, s), (t, s.detach())),
    "with a mask": lambda q, k, v, s, t: tangents(
        lambda q: octet.attention(q, k, v, mask=t[:1, :1, :, :1] > 0), (q,), (t,)
    ),
    "with dropout": lambda q, k, v, s, t: tangents(
        lambda q: octet.attention(q, k, v, dropout_p=0.5, dropout_seed=torch.arange(4, dtype=torch.int32)), (q,), (t,)
    ),
}


@pytest.mark.parametrize("name", COMPILED_JVPS)
def test_a_jvp_inside_compiled_code_and_its_gradients(name):
    """As eager code has them, bit for bit, in one graph."""
    q, k, v = inputs()
    sinks, direction = torch.randn(q.shape[1]).requires_grad_(), torch.randn(q.shape)
    results = []
    for how in (lambda f: f, compiled):
        given = [x.detach().clone().requires_grad_() for x in (q, k, v, sinks)]
        made = how(COMPILED_JVPS[name])(*given, direction)
        sum(x.square().sum() for x in made if x.requires_grad).backward()
        results.append([*made, *(x.grad for x in given)])
        torch._dynamo.reset()
    for want, got in zip(*results, strict=True):
        assert (want is None and got is None) or torch.equal(want, got)
    assert results[0][0].abs().sum() > 0 and results[0][-4].abs().sum() > 0


def test_a_jvp_inside_compiled_code_gives_the_gradient_of_a_mask():
    q, k, v = inputs()
    results, direction = [], torch.randn(q.shape)
    start = torch.randn(1, q.shape[1], q.shape[2], k.shape[2])
    for how in (lambda f: f, compiled):
        mask = start.clone().requires_grad_()
        call = lambda q, k, v, mask: tangents(lambda q: octet.attention(q, k, v, mask=mask), (q,), (direction,))
        how(call)(q, k, v, mask)[0].square().sum().backward()
        results.append(mask.grad)
        torch._dynamo.reset()
    assert results[0].abs().sum() > 0 and torch.equal(*results)


def test_a_jvp_inside_compiled_code_rejects_the_gradient_of_slopes():
    q, k, v = (x.detach() for x in inputs())
    slopes = torch.ones(q.shape[1]).requires_grad_()
    call = lambda q, slopes: tangents(lambda q: octet.attention(q, k, v, alibi_slopes=slopes), (q,), (q,))
    for how in (lambda f: f, compiled):
        with pytest.raises(Exception, match="alibi_slopes: requires a gradient"):
            how(call)(q, slopes)


def test_a_compiled_jvp_without_gradients():
    q, k, v = inputs()
    with torch.no_grad():
        call = lambda *x: torch.func.jvp(octet.attention, x, x)
        for got, want in zip(compiled(call)(q, k, v), call(q, k, v), strict=True):
            assert torch.equal(got, want)


def test_a_compiled_jvp_has_no_gradient_of_its_tangent():
    q, k, v = inputs()
    with pytest.raises(Exception, match="a tangent has no gradient; detach it inside the compiled function"):
        compiled(lambda *x: torch.func.jvp(octet.attention, x, x))(q, k, v)


def test_a_compiled_jvp_beneath_another_transform_is_rejected():
    """A transform between the jvp and the call hides the tangents, which must not be lost."""
    q, k, v = (x.detach() for x in inputs())
    gradient = torch.func.grad(lambda q: octet.attention(q, k, v).sum())
    with pytest.raises(Exception, match="through another transform of torch.func"):
        compiled(lambda q: torch.func.jvp(gradient, (q,), (q,)))(q)


@pytest.mark.parametrize("mapped", ["q", "kv", "qkv"])
def test_compiled_vmap_keeps_gradients(mapped):
    q, k, v = inputs()
    in_dims = tuple(0 if name in mapped else None for name in "qkv")
    given = [x if dim == 0 else x[0].detach().requires_grad_() for x, dim in zip((q, k, v), in_dims, strict=True)]

    def call(*x):
        one = lambda *y: octet.attention(*(z[None] for z in y), enable_gqa=True)[0]
        return torch.func.vmap(one, in_dims)(*x)

    torch._dynamo.reset()
    in_parts = torch.compile(call, backend="aot_eager")  # it leaves the graph, where vmap hides what needs a gradient
    for got, want in zip(with_gradients(in_parts, *given), with_gradients(call, *given), strict=True):
        assert torch.equal(got, want)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="_attend_outside_the_graph"):
        compiled(call)(*given)


def test_meta_tensors_give_shapes():
    q = torch.empty(2, 4, 33, 16, device="meta", dtype=torch.bfloat16)
    o, lse = octet.attention(q, q, q, return_lse=True)
    assert o.device.type == "meta" and o.shape == q.shape and lse.dtype is torch.float32


def test_flops_are_those_of_the_products():
    """Forward 4 b h n m d, backward 2.5 times that, jvp 3 times: masks disregarded, as torch counts."""
    q, k, v = inputs()
    forward = 4 * 2 * 4 * 33 * 33 * 16
    with FlopCounterMode(display=False) as counter:
        octet.attention(q, k, v, causal=True).sum().backward()
    assert counter.get_total_flops() == 3.5 * forward
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        octet.attention_jvp(q, k, v, q, k, v)
    assert counter.get_total_flops() == 3 * forward
    cu = torch.tensor([0, 5, 12], dtype=torch.int32)
    packed = torch.randn(12, 2, 8)
    with FlopCounterMode(display=False) as counter:
        octet.attention_varlen(packed, packed, packed, cu, cu)
    assert counter.get_total_flops() == 2 * 2 * (5 * 5 + 7 * 7) * (8 + 8)


# The text of options.

FULL = Options(
    "bf16", "bshd", "no", 0.1, (3, -1), "top_left", 0, 0, "beta", 2.5, "on", "off", 0.0, False, 4, "my cpu", "f32"
)
TEXTS = {
    "precision=f32": Options("f32"),
    "precision=bf16 causal=top_left scale=0.1 window=3,-1 deterministic=yes": Options(
        "bf16", causal="top_left", scale=0.1, window=(3, -1), deterministic=True
    ),
    "precision=bf16 layout=bshd scale=0.1 window=3,-1 alignment=top_left bias_correction=beta beta=2.5 hadamard=on "
    "smooth_q=off deterministic=no threads=4 out_dtype=f32 backend=my cpu": FULL,
}


@pytest.mark.parametrize("text", TEXTS)
def test_the_text_of_options_stays(text):
    """Graphs are saved with it."""
    assert text_of(TEXTS[text]) == text and options_from(text) == TEXTS[text]


def test_each_option_has_a_text():
    for name, value in FULL._asdict().items():
        if name.startswith("max_seqlen"):
            continue
        value = {"softcap": 7.5, "dropout_p": 0.1, "rounding": octet.Rounding(p="bf16").text}.get(name, value)
        value = "forward:64x32;backward:64x64" if name == "tile" else value
        options = Options("f32")._replace(**{name: value})
        assert options_from(text_of(options)) == options and (name == "causal" or options != Options("f32"))


@settings(max_examples=200, deadline=None)
@given(
    st.floats(2.0**-126, 2.0**127),
    st.floats(allow_nan=False),
    st.lists(st.integers(-1, 2**63 - 1), min_size=2, max_size=2) | st.just([]),
    st.text(st.characters(codec="utf-8")),
)
def test_numbers_and_names_survive_as_text(scale, beta, window, backend):
    options = Options("bf16", scale=scale, beta=beta, window=tuple(window), backend=backend)
    assert options_from(text_of(options)) == options


@pytest.mark.parametrize(
    "text",
    ["", "f32", "scale=0.1", "precision=f32 scale", "precision=f32 scale=a", "precision=f32 window=3",
     "precision=f32  ", "precision=f32 max_seqlen_q=3", "precision=f32 deterministic=True", "precision=f32 drop=0.1"],
)  # fmt: skip
def test_what_is_no_text_of_options_is_rejected(text):
    q = torch.randn(1, 1, 8, 8)
    with pytest.raises(octet.InvalidArgument) as error:
        torch.ops.octet.forward(q, q, q, False, text)
    assert f"options: found {text!r}, allowed: precision=... layout=..." in str(error.value)


NUMBERS = {
    "scale": lambda i: {"scale": 0.1 + i / 3},
    "beta": lambda i: {"beta": 2.1 + i / 3, "bias_correction": "beta", "precision": "bf16"},
    "an integer for beta": lambda i: {"beta": 2 + i, "bias_correction": "beta", "precision": "bf16"},
    "window": lambda i: {"window": (3 + i, None), "alignment": "bottom_right"},
    "one number for window": lambda i: {"window": i + 1, "alignment": "top_left"},
    "threads": lambda i: {"threads": 1 + i, "deterministic": True},
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("dynamic", [None, True, False])
def test_options_reach_compiled_operators_as_they_are(name, dynamic):
    """Also those that torch.compile has symbols for, when it meets the second number."""
    seen = []

    def backend(graph, _):
        def run(*x):
            seen.extend(node.args[4] for node in graph.graph.nodes if node.target is torch.ops.octet.forward.default)
            return graph(*x)

        return run

    def call(q, keywords):
        return octet.attention(q, q, q, **keywords)

    function, q = compiled(call, backend=backend, dynamic=dynamic), torch.randn(2, 2, 24, 16)
    for i in (0, 1, 2, 1):
        keywords = NUMBERS[name](i)
        assert torch.equal(function(q, keywords), call(q, keywords))
        assert seen.pop() == text_of(octet._options.options_of("f32", **keywords)) and not seen


def test_numbers_of_shapes_reach_compiled_operators():
    def call(q, k):
        return octet.attention(q, k, k, scale=1 / q.shape[2], window=(k.shape[2] // 2, 0), alignment="bottom_right")

    function = compiled(call, dynamic=True)
    for n in (9, 17, 33):
        q, k, _ = (x.detach() for x in inputs(queries=n, keys=n + 2))
        assert torch.equal(function(q, k), call(q, k))


class Attend(torch.nn.Module):
    def forward(self, q, k, v):
        return octet.attention(q, k, v, causal="bottom_right", scale=0.1, window=(7, None))


class AttendPacked(torch.nn.Module):
    def forward(self, q, k, v, cu):
        n = q.shape[0]
        return octet.attention_varlen(q, k, v, cu, cu, causal="top_left", max_seqlen_q=n, max_seqlen_k=n, scale=0.1)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_run_in_other_processes(strict, tmp_path):
    tokens = torch.export.Dim("tokens", min=8, max=1024)
    cu = torch.tensor([0, 5, 12], dtype=torch.int32)
    dense = [x.detach() for x in inputs(keys=33)]
    packed = [torch.randn(12, 2, 8) for _ in range(3)]
    for name, module, x, shapes in (
        ("dense", Attend(), dense, [{2: tokens}] * 3),
        ("packed", AttendPacked(), [*packed, cu], [*[{0: tokens}] * 3, {}]),
    ):
        program = torch.export.export(module, tuple(x), dynamic_shapes=tuple(shapes), strict=strict)
        (call,) = (node for node in program.graph.nodes if node.target is torch.ops.octet.forward.default)
        assert call.args[4].startswith("precision=f32 ") and "scale=0.1" in call.args[4]
        torch.export.save(program, tmp_path / f"{name}.pt2")
        torch.save((x, module(*x)), tmp_path / f"{name}.pt")
    other = [x[:, :, :20].contiguous() for x in dense]
    torch.save((other, Attend()(*other)), tmp_path / "other.pt")
    program = f"""import torch, octet.torch
for name, data in (("dense", "dense"), ("packed", "packed"), ("dense", "other")):
    x, want = torch.load("{tmp_path}/" + data + ".pt")
    assert torch.equal(torch.export.load("{tmp_path}/" + name + ".pt2").module()(*x), want)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600)
