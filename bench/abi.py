"""liboctet through its C ABI, for benchmarks: torch tensors in, prepared calls out."""

import ctypes
import importlib.util
import pathlib
import subprocess

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent

# The structs of octet.h, from the Python package, but without the library that the package would load.
_spec = importlib.util.spec_from_file_location("octet_abi", ROOT / "python/octet/_abi.py")
abi = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(abi)

DTYPES = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.float8_e4m3fn: "e4m3",
    torch.bool: "bool",
}
BIAS_CORRECTIONS = abi.BIAS_CORRECTIONS
FORWARD, BACKWARD, JVP = abi.PASSES["forward"], abi.PASSES["backward"], abi.PASSES["jvp"]


def struct(kind, **fields):
    """A struct of octet.h, whose first field is its size."""
    return kind(ctypes.sizeof(kind), **fields)


class Octet:
    """One prepared call of liboctet. `options` are fields of octet_attention."""

    def __init__(self, library, which, precision, causal, tensors, **options):
        self.library, self.tensors = library, tensors
        mask = abi.MASK_CAUSAL if causal else 0
        self.attention = struct(abi.Attention, precision=abi.PRECISIONS[precision], mask=mask, **options)
        self.views = {"do_" if name == "do" else name: self.view(x) for name, x in tensors.items()}
        pointers = {name: ctypes.pointer(view) for name, view in self.views.items()}
        self.arguments = struct(abi.Arguments, **{"pass": which}, **pointers)
        bytes_needed = ctypes.c_size_t()
        self.check(
            library.octet_workspace_size(
                ctypes.byref(self.attention), ctypes.byref(self.arguments), ctypes.byref(bytes_needed)
            )
        )
        self.bytes = bytes_needed.value
        self.device = tensors["q"].device
        self.memory = torch.empty(self.bytes + 64, dtype=torch.uint8, device=self.device)
        self.workspace = (self.memory.data_ptr() + 63) // 64 * 64

    @staticmethod
    def view(x):
        shape = list(x.shape) + [1] * (4 - x.dim())
        stride = list(x.stride()) + [1] * (4 - x.dim())
        array = ctypes.c_int64 * 4
        on_gpu = x.device.type == "cuda"
        return struct(
            abi.Tensor,
            dtype=abi.DTYPES[DTYPES[x.dtype]],
            data=x.data_ptr(),
            shape=array(*shape),
            stride=array(*stride),
            device=abi.DEVICES[x.device.type],
            device_index=x.device.index or 0 if on_gpu else 0,
        )

    def check(self, status):
        if status:
            raise RuntimeError(self.library.octet_message().decode())

    def __call__(self):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream) if self.device.type == "cuda" else None
        self.check(
            self.library.octet_run(
                ctypes.byref(self.attention),
                ctypes.byref(self.arguments),
                ctypes.c_void_p(self.workspace),
                ctypes.c_size_t(self.bytes),
                stream,
            )
        )


def load(path):
    library = ctypes.CDLL(str(path.resolve()))
    library.octet_message.restype = ctypes.c_char_p
    library.octet_version.restype = ctypes.c_char_p
    return library


def revision():
    """The commit that is measured, "-dirty" if anything but results differs from it."""
    git = ["git", "-C", str(ROOT)]
    run = lambda *arguments: subprocess.run(git + list(arguments), capture_output=True, text=True).stdout.strip()
    changed = run(
        "status",
        "--porcelain",
        "--",
        ".",
        ":!bench/results",
        ":!README.md",
        ":!docs/benchmarks.md",
        ":!docs/training.md",
        ":!docs/speed.svg",
    )
    return run("describe", "--always") + ("-dirty" if changed else "")
