"""octet.ladder: what it rejects everywhere; on a GPU, where its rungs are built, each of them against float64."""

import ctypes
import pathlib
import subprocess
import sys

import numpy
import octet
import pytest
from octet import ladder

SOURCES = pathlib.Path(__file__).resolve().parents[2] / "ladder"


@pytest.fixture(autouse=True)
def sources(monkeypatch):
    monkeypatch.setenv("OCTET_LADDER", str(SOURCES))


def test_every_file_is_a_rung():
    assert ladder.rungs() == [
        f"{i}_{name}" for i, name in enumerate(("unfused", "flash", "warps", "tensor_cores", "int8", "hopper"), 1)
    ]


def test_a_call_is_laid_out_as_in_c():
    assert ctypes.sizeof(ladder._Call) == 5 * 4 + 4 + 6 * 8 and ladder._Call.q.offset == 24


def test_rejections_name_the_value_and_the_values_allowed(monkeypatch, tmp_path):
    x = numpy.zeros((1, 1, 8, 64), numpy.float32)
    with pytest.raises(octet.InvalidArgument, match="rung: found 7, allowed: 1_unfused, 2_flash, 3_warps"):
        ladder.attention(x, x, x, rung="7")
    with pytest.raises(octet.InvalidArgument, match="q: found numpy.ndarray, allowed: torch.Tensor, jax.Array"):
        ladder.attention(x, x, x, rung="1")
    with pytest.raises(octet.InvalidArgument, match="arch: found 70, allowed: 80, 86, 89, 90a, 120"):
        ladder.build("1", "70")
    with pytest.raises(octet.Unsupported, match="no .*libnone.so; build it with .* build --arch 90a"):
        ladder._load("none", "90a")
    monkeypatch.setenv("OCTET_LADDER", str(tmp_path))
    with pytest.raises(octet.Unsupported, match=f"{tmp_path} holds no ladder; name the folder"):
        ladder.attention(x, x, x, rung="1")


def test_torch_tensors_must_be_on_a_gpu_and_alike():
    torch = pytest.importorskip("torch")
    x = torch.zeros(1, 1, 8, 64)
    with pytest.raises(octet.InvalidArgument, match="q.device.type: found cpu, allowed: cuda"):
        ladder.attention(x, x, x, rung="1")


def test_jax_arrays_must_be_on_a_gpu_and_outside_of_transformations():
    jax = pytest.importorskip("jax")
    x = jax.numpy.zeros((1, 1, 8, 64))
    with pytest.raises(octet.Unsupported, match="not inside of jax.jit"):
        jax.jit(lambda x: ladder.attention(x, x, x, rung="1"))(x)
    with pytest.raises(octet.InvalidArgument, match=r"v: found \(1, 1, 8, 32\) float32, allowed: those of q"):
        ladder.attention(x, x, x[..., :32], rung="1")
    if x.devices().pop().platform == "cpu":
        with pytest.raises(octet.InvalidArgument, match="q's platform: found cpu, allowed: gpu"):
            ladder.attention(x, x, x, rung="1")


def test_the_command_says_what_it_builds():
    done = subprocess.run([sys.executable, "-m", "octet.ladder", "build", "7"], capture_output=True, text=True)
    assert done.returncode == 1 and "rung: found 7, allowed: 1_unfused" in done.stderr


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rung", ["1", "2", "3", "4", "5", "6"])
def test_torch_on_a_gpu(rung, causal):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    dtype = torch.float32 if rung in "123" else torch.float16
    q, k, v = (torch.randn(2, 3, 100, 64, device="cuda", dtype=dtype) for _ in range(3))
    try:
        o = ladder.attention(q, k, v, rung=rung, causal=causal)
    except octet.Unsupported as error:
        pytest.skip(f"not built: {error}")
    expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal)
    error = ((o.double() - expected).norm() / expected.norm()).item()
    # What the type costs, twice; of int8 the 8 bits of q and k.
    assert error < (1e-5 if dtype == torch.float32 else 0.05 if rung == "5" else 2**-9), error
