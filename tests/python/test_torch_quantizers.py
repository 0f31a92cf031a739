"""octet.quantize and octet.dequantize of torch as operators: in compiled programs, with numbers of tokens that are
unknown to these, and as torch checks operators."""

import octet
import pytest
from octet._quantizing import Choices
from quantizers import HOW, PARTS

torch = pytest.importorskip("torch")
import octet.torch  # noqa: E402
from octet.torch import _quantizers  # noqa: E402


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(4)).bfloat16()


def expect_same(found, want):
    for part in PARTS:
        got, wanted = getattr(found, part), getattr(want, part)
        assert (got is None) == (wanted is None), part
        if got is not None:
            assert got.stride() == wanted.stride() and got.dtype == wanted.dtype, part
            assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8)), part
    assert (found.format, found.coding, found.layout, found.dtype) == (
        want.format, want.coding, want.layout, want.dtype
    )  # fmt: skip


@pytest.mark.parametrize("how", HOW.values(), ids=list(HOW))
def test_a_compiled_program_quantizes_in_one_graph(how):
    weight = draw(16) if "norm" in how else None

    torch.compiler.reset()

    def there_and_back(x, weight):
        found = octet.quantize(x * 2, norm_weight=weight, **how)
        return found, octet.dequantize(found), octet.dequantize(found, torch.float32)

    x = draw(2, 3, 70, 16)
    found = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")(x, weight)
    want = there_and_back(x, weight)
    expect_same(found[0], want[0])
    assert torch.equal(found[1], want[1]) and found[1].dtype == torch.bfloat16
    assert torch.equal(found[2], want[2]) and found[2].dtype == torch.float32


def test_other_lengths_take_no_other_graph():
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    def codes(x, offset):
        return octet.quantize(x, "k", granularity="thread", rope="half", rope_offset=offset).scale

    compiled = torch.compile(codes, fullgraph=True, dynamic=True, backend=count)
    for tokens in (65, 130, 200):
        x = draw(1, 2, tokens, 16)
        assert torch.equal(compiled(x, tokens + 5), codes(x, tokens + 5))
    assert len(graphs) == 1


def test_attention_of_what_is_quantized_is_one_graph():
    def step(q, k, v):
        return octet.attention(q, octet.quantize(k, "k", smooth=True), octet.quantize(v, "v"), precision="int8")

    given = draw(1, 2, 40, 16), draw(1, 2, 50, 16), draw(1, 2, 50, 16)
    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(*given), step(*given))


@pytest.mark.parametrize("transposed", [False, True])
def test_the_operators_are_as_torch_has_them(transposed):
    x = draw(2, 3, 70, 16)
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if transposed else x
    words = Choices("k", "i8", "block", 32, "integer", True, -5, "half", 0, 0, 0.0, "rms", 1e-6, True, "bhsd")
    torch.library.opcheck(torch.ops.octet.quantize.default, (x, draw(16), *words))
    found = octet.quantize(x, "k", smooth=True)
    words = "i8", *found.coding, "bhsd", torch.float16
    torch.library.opcheck(torch.ops.octet.dequantize.default, (found.codes, found.scale, None, found.mean, *words))


@pytest.mark.parametrize("operand, granularity, block", [
    ("q", "tensor", 0), ("q", "token", 0), ("v", "channel", 0), ("k", "block", 48), ("q", "thread", 0),
    ("k", "thread", 0)])  # fmt: skip
@pytest.mark.parametrize("tokens", [0, 1, 31, 32, 33, 64, 65, 129])
def test_scales_are_as_many_as_the_library_says(operand, granularity, block, tokens):
    plain = False, 0, "none", 0, 0, 0.0, "none", 0.0, False, "bhsd"
    words = Choices(operand, "i8", granularity, block, "symmetric", *plain)
    x = draw(1, 2, tokens, 8)
    want = octet.quantize(x, operand, granularity=granularity, block=block).scale.shape
    assert _quantizers._quantize_fake(x, None, *words)[1].shape == want


def test_wrong_arguments_are_named_while_a_program_is_compiled():
    with pytest.raises(Exception, match="expected 4 dimensions"):
        torch.compile(lambda x: octet.quantize(x, "q").codes, fullgraph=True, backend="aot_eager")(draw(3, 8))
