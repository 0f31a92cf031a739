"""The rungs of the ladder, attention kernels to learn from, as functions on torch and JAX arrays of a GPU.

They are built on request, with nvcc, from octet's sources: python -m octet.ladder build. The sources are those of the
clone that this package lies in, or of the folder that OCTET_LADDER names (it holds 1_unfused.cu).
"""

import ctypes
import functools
import os
import pathlib
import subprocess
from typing import Any

from octet.errors import Failure, InvalidArgument, Unsupported

ARCHITECTURES = ("80", "86", "89", "90a", "120")


class _Call(ctypes.Structure):
    """LadderCall of ladder/harness/c_api.cu."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("batch", "heads", "seq", "dim", "causal")),
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "o", "workspace", "stream")),
    ]


def folder() -> pathlib.Path:
    """The folder of the ladder's sources. Unsupported where there is none."""
    named = os.environ.get("OCTET_LADDER")
    path = pathlib.Path(named) if named else pathlib.Path(__file__).resolve().parents[3] / "ladder"
    if not (path / "ladder.h").is_file():
        raise Unsupported(
            f"octet.ladder: {path} holds no ladder; name the folder ladder of a clone of octet in OCTET_LADDER"
        )
    return path


def rungs() -> list[str]:
    """The names of all rungs, such as 1_unfused, the slowest first."""
    return sorted(path.stem for path in folder().glob("[1-9]_*.cu"))


def _library_path(rung: str, arch: str) -> pathlib.Path:
    return folder().parent / "build" / "ladder" / arch / f"lib{rung}.so"


def _check(name: str, found: Any, allowed: Any) -> None:
    if found not in allowed:
        raise InvalidArgument(f"{name}: found {found}, allowed: {', '.join(map(str, allowed))}")


def _find(rung: str) -> str:
    """The full name of a rung that is given by its name or number."""
    names = rungs()
    rung = next((name for name in names if rung in (name, name.split("_")[0])), rung)
    _check("rung", rung, names)
    return rung


def build(rung: str, arch: str = "90a") -> pathlib.Path:
    """Compiles one rung, by its name or number, for one of ARCHITECTURES with nvcc: the path of its library.

    InvalidArgument for another rung or architecture, Unsupported with what the compiler said where it fails.
    """
    rung = _find(rung)
    _check("arch", arch, ARCHITECTURES)
    done = subprocess.run([folder() / "build", rung, arch, "--library"], capture_output=True, text=True)
    if done.returncode:
        raise Unsupported(f"octet.ladder: {rung} for {arch} could not be built: {done.stderr.strip()}")
    return _library_path(rung, arch)


class _Rung:
    """A loaded library: what it can, and a call of it."""

    def __init__(self, path: pathlib.Path) -> None:
        if not path.is_file():
            arch = path.parent.name
            raise Unsupported(f"octet.ladder: no {path}; build it with python -m octet.ladder build --arch {arch}")
        self._lib = ctypes.CDLL(str(path))
        self._lib.ladder_describe.restype = ctypes.c_char_p
        self._lib.ladder_workspace.restype = ctypes.c_int64
        self.name, self.element, dims, kernels = self._lib.ladder_describe().decode().split("|")
        self.dims, self.kernels = [int(dim) for dim in dims.split(",")], kernels.split(",")

    def call(self, shape: tuple[int, ...], dtype: str, kernel: str | None, causal: bool) -> tuple[bytes, _Call, int]:
        """The kernel's name, a call without pointers, and the bytes of its workspace."""
        if len(shape) != 4 or min(shape) < 1:
            raise InvalidArgument(f"q: found shape {tuple(shape)}, allowed: [batch, heads, seq, dim], all at least 1")
        _check("dtype", dtype, [{"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[self.element]])
        _check(f"dim of {self.name}", shape[3], self.dims)
        _check(f"kernel of {self.name}", kernel or self.kernels[0], self.kernels)
        name, call = (kernel or self.kernels[0]).encode(), _Call(*shape, causal)
        return name, call, self._lib.ladder_workspace(name, ctypes.byref(call))

    def run(self, name: bytes, call: _Call) -> None:
        message = ctypes.create_string_buffer(512)
        if self._lib.ladder_run(name, ctypes.byref(call), message, len(message)):
            raise Unsupported(message.value.decode())

    def synchronize(self) -> None:
        if status := self._lib.ladder_synchronize():
            raise Failure(f"{self.name}: CUDA's status {status}")


@functools.cache
def _load(rung: str, arch: str) -> _Rung:
    return _Rung(_library_path(rung, arch))


def _arch(major: int, minor: int) -> str:
    return "90a" if (major, minor) == (9, 0) else f"{major}{minor}"


def _on_torch(q: Any, k: Any, v: Any, rung: str, kernel: str | None, causal: bool) -> Any:
    import torch

    for name, x in (("q", q), ("k", k), ("v", v)):
        _check(f"{name}.device.type", x.device.type, ["cuda"])
        if (x.shape, x.dtype, x.device) != (q.shape, q.dtype, q.device):
            raise InvalidArgument(
                f"{name}: found {tuple(x.shape)} {x.dtype} on {x.device}, allowed: those of q, {tuple(q.shape)} "
                f"{q.dtype} on {q.device}"
            )
    lib = _load(rung, _arch(*torch.cuda.get_device_capability(q.device)))
    which, call, workspace_bytes = lib.call(q.shape, str(q.dtype).removeprefix("torch."), kernel, causal)
    with torch.cuda.device(q.device):
        q, k, v = (x.detach().contiguous() for x in (q, k, v))
        o, workspace = torch.empty_like(q), torch.empty(workspace_bytes, dtype=torch.uint8, device=q.device)
        call.q, call.k, call.v, call.o = (x.data_ptr() for x in (q, k, v, o))
        call.workspace, call.stream = workspace.data_ptr(), torch.cuda.current_stream().cuda_stream
        lib.run(which, call)
    return o


def _on_jax(q: Any, k: Any, v: Any, rung: str, kernel: str | None, causal: bool) -> Any:
    import jax
    import jax.numpy as jnp

    for name, x in (("q", q), ("k", k), ("v", v)):
        if isinstance(x, jax.core.Tracer):
            raise Unsupported(f"{name}: the ladder runs on arrays, not inside of jax.jit, jax.grad or jax.vmap")
        if (x.shape, x.dtype) != (q.shape, q.dtype):
            raise InvalidArgument(f"{name}: found {x.shape} {x.dtype}, allowed: those of q, {q.shape} {q.dtype}")
    (device,) = q.devices()
    _check("q's platform", device.platform, ["gpu"])
    lib = _load(rung, _arch(*map(int, device.compute_capability.split("."))))
    which, call, workspace_bytes = lib.call(q.shape, str(q.dtype), kernel, causal)
    o, workspace = jnp.zeros_like(q), jnp.zeros(max(workspace_bytes, 1), dtype=jnp.uint8)
    arrays = jax.block_until_ready((q, k, v, o, workspace))
    # o is this call's own: nobody else sees the array before it is written.
    call.q, call.k, call.v, call.o, call.workspace = (x.unsafe_buffer_pointer() for x in arrays)
    lib.run(which, call)
    lib.synchronize()
    return o


def attention(q: Any, k: Any, v: Any, *, rung: str, kernel: str | None = None, causal: bool = False) -> Any:
    """softmax(q k^T / sqrt(dim)) v by one rung, without a derivative: o, of q's shape and dtype.

    q, k, v: torch tensors on a GPU, or JAX arrays on one (the first, outside of transformations; a call waits for its
    result), [batch, heads, seq, dim] in the rung's type: float32 for 1 to 3, float16 from 4 on. dim is 64 or 128; rung
    1 has more. rung: a name or its number, such as "3". kernel: of a rung with several, such as "per_block" of 5_int8.
    causal: query i sees keys 0 to i.

    InvalidArgument names the value found and the values allowed; Unsupported says what is not built, or what the GPU
    lacks.
    """
    rung = _find(rung)
    module = type(q).__module__.split(".")[0]
    if module == "torch":
        return _on_torch(q, k, v, rung, kernel, causal)
    if module in ("jax", "jaxlib"):
        return _on_jax(q, k, v, rung, kernel, causal)
    raise InvalidArgument(f"q: found {type(q).__module__}.{type(q).__qualname__}, allowed: torch.Tensor, jax.Array")
