"""octet.quantize and octet.dequantize on CUDA tensors: the codes of the CPU, on the caller's stream and device. Skipped
without a GPU."""

import dataclasses

import octet
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

GROUPINGS = [("q", "tensor", 0), ("q", "token", 0), ("v", "channel", 0), ("k", "block", 48), ("k", "thread", 0)]


def draw(dtype, *shape):
    generator = torch.Generator().manual_seed(3)
    return (torch.randn(shape, generator=generator) + torch.randn(shape[-1], generator=generator)).to(dtype)


def same(cpu, cuda):
    """Bit by bit, but for NaNs."""
    if cpu is None or cuda is None:
        return cpu is cuda
    assert cuda.device.type == "cuda" and cuda.dtype == cpu.dtype and cuda.stride() == cpu.stride()
    cuda = cuda.cpu()
    if cpu.is_floating_point() and cpu.itemsize > 1:
        return torch.equal(torch.nan_to_num(cpu, nan=-7), torch.nan_to_num(cuda, nan=-7))
    return torch.equal(cpu.view(torch.uint8), cuda.view(torch.uint8))


def expect_same(cpu, cuda):
    for part in ("codes", "scale", "zero_point", "mean", "statistics"):
        assert same(getattr(cpu, part), getattr(cuda, part)), part


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", ["i8", "u8", "i4", "e4m3", "e5m2"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_codes_and_numbers_are_those_of_the_cpu(dtype, format, layout):
    x = draw(dtype, 2, 3, 300, 64)
    x = x if layout == "bhsd" else x.transpose(1, 2)
    for operand, granularity, block in GROUPINGS:
        how = dict(format=format, granularity=granularity, block=block, layout=layout, smooth=True, hadamard_seed=5)
        how["statistics"] = layout == "bhsd"
        if format == "u8":
            how["zero_point"] = "integer"
        if operand != "v":
            how |= dict(rope="half", rope_offset=1000)
        cpu, cuda = octet.quantize(x, operand, **how), octet.quantize(x.cuda(), operand, **how)
        expect_same(cpu, cuda)
        weight = draw(torch.bfloat16, 64)
        how |= dict(norm="rms", norm_eps=1e-6)
        cpu = octet.quantize(x, operand, norm_weight=weight, **how)
        cuda = octet.quantize(x.cuda(), operand, norm_weight=weight.cuda(), **how)
        expect_same(cpu, cuda)
        assert same(octet.dequantize(cpu), octet.dequantize(cuda))
        assert same(octet.dequantize(cpu, torch.float32), octet.dequantize(cuda, torch.float32))


def test_long_sequences_have_the_means_of_the_cpu():
    x = draw(torch.bfloat16, 1, 2, 20000, 128)
    how = dict(granularity="thread", smooth=True, hadamard_seed=1)
    expect_same(octet.quantize(x, "k", **how), octet.quantize(x.cuda(), "k", **how))


def test_the_stream_of_the_caller_and_graphs():
    x = draw(torch.float16, 1, 2, 200, 64)
    want = octet.quantize(x, "k", smooth=True)
    given = torch.zeros_like(x, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**7)
        given.copy_(x, non_blocking=True)
        found = octet.quantize(given, "k", smooth=True)
    stream.synchronize()
    expect_same(want, found)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = octet.quantize(given, "k", smooth=True)
        back = octet.dequantize(captured)
    given.copy_(2 * x)
    graph.replay()
    torch.cuda.synchronize()
    expect_same(octet.quantize(2 * x, "k", smooth=True), captured)
    assert same(octet.dequantize(octet.quantize(2 * x, "k", smooth=True)), back)


def test_negative_numbers_make_symmetric_u8_nan():
    x = draw(torch.float32, 1, 1, 20, 16).abs()
    x[0, 0, 7, 3] = -1
    found = octet.dequantize(octet.quantize(x.cuda(), "q", format="u8"))
    assert found[0, 0, 7].isnan().all() and found.isnan().sum() == 16
    with pytest.raises(octet.InvalidArgument, match="symmetric u8 codes hold x >= 0 only"):
        octet.quantize(x, "q", format="u8")


def test_rejections():
    x = draw(torch.float32, 1, 1, 4, 2048)
    with pytest.raises(octet.Unsupported, match="x: head dim 2048 on cuda:0, allowed there: up to 1024"):
        octet.quantize(x.cuda(), "q")
    found = octet.quantize(x[..., :64].cuda(), "q")
    with pytest.raises(octet.InvalidArgument, match="scale: on cpu:0, but its codes are on cuda:0"):
        octet.dequantize(dataclasses.replace(found, scale=found.scale.cpu()))
