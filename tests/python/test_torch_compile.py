"""The operators of octet in torch: opcheck, torch.compile, FLOPs."""

import subprocess
import sys

import octet
import pytest
from torch_front import compiled

torch = pytest.importorskip("torch")
import octet.torch  # noqa: E402  # registers the operators
from octet._options import Options  # noqa: E402
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
    given = (mask, None, None, None)
    o, lse, r = (x.detach() for x in torch.ops.octet.forward(q, k, v, *given, residual, *options))
    torch.library.opcheck(torch.ops.octet.forward.default, (q, k, v, *given, residual, *options))
    torch.library.opcheck(torch.ops.octet.backward.default, (o, q, k, v, o, lse, r, *given, None, *options))
    if options.precision != "int8":
        torch.library.opcheck(torch.ops.octet.jvp.default, (q, k, v, q, k, v, *given, None, True, *options))


def test_opcheck_of_packed_sequences():
    cu = torch.tensor([0, 5, 12], dtype=torch.int32)
    q = torch.randn(12, 2, 8, requires_grad=True)
    options = Options("f32", layout="thd", causal="top_left", window=(3, -1))
    torch.library.opcheck(torch.ops.octet.forward.default, (q, q, q, None, cu, cu, None, False, *options))


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
    """Nothing of octet's torch front is imported yet when torch.compile traces the call."""
    program = f"""{imports}
q = torch.randn(1, 2, 16, 64, requires_grad=True)
attend = torch.compile(lambda q: octet.attention(q, q, q, causal="top_left"), backend="aot_eager", fullgraph=True)
torch._dynamo.config.error_on_recompile = True
for _ in range(2):
    attend(q).sum().backward()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


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


def test_a_compiled_jvp_is_refused_or_right_but_never_zero():
    """torch.compile drops the tangents of a custom Function; octet notices while it traces."""
    q, k, v = (x.detach() for x in inputs())

    def tangent(q, k, v):
        return torch.func.jvp(lambda *x: octet.attention(*x), (q, k, v), (q, k, v))[1]

    with pytest.raises(Exception, match="forward-mode differentiation inside torch.compile"):
        compiled(tangent)(q, k, v)
    torch._dynamo.reset()
    with_breaks = torch.compile(tangent, backend="aot_eager")
    torch.testing.assert_close(with_breaks(q, k, v), tangent(q, k, v))


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
