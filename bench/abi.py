"""liboctet through its C ABI, for benchmarks: torch tensors in, prepared calls out."""

import ctypes
import pathlib
import subprocess

import torch

DTYPES = {torch.float32: 2, torch.float16: 3, torch.bfloat16: 4, torch.int32: 10}
PRECISIONS = {"f32": 2, "f16": 3, "bf16": 4, "int8": 5}
REMEDIES = {"f16_inside": 0, "none": 1, "beta": 2, "exact_delta": 3, "project": 4}
FORWARD, BACKWARD = 0, 1
CAUSAL = 1
BOTTOM_RIGHT = 2


class Tensor(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_uint32),
        ("dtype", ctypes.c_uint32),
        ("data", ctypes.c_void_p),
        ("shape", ctypes.c_int64 * 4),
        ("stride", ctypes.c_int64 * 4),
        ("device", ctypes.c_uint32),
        ("device_index", ctypes.c_int32),
        ("quantization", ctypes.c_void_p),
    ]


class Attention(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_uint32),
        ("precision", ctypes.c_uint32),
        ("scale", ctypes.c_float),
        ("mask", ctypes.c_uint32),
        ("alignment", ctypes.c_uint32),
        ("remedy", ctypes.c_uint32),
        ("window_left", ctypes.c_int64),
        ("window_right", ctypes.c_int64),
        ("softcap", ctypes.c_float),
        ("beta", ctypes.c_float),
        ("hadamard", ctypes.c_uint32),
        ("smooth_q", ctypes.c_uint32),
        ("deterministic", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("backend", ctypes.c_char_p),
        ("rounding", ctypes.c_void_p),
    ]


OPERANDS = ["q", "k", "v", "mask", "sinks", "cu_seqlens_q", "cu_seqlens_k"]
RESULTS = ["o", "o_residual", "lse", "do", "dq", "dk", "dv", "tq", "tk", "tv", "to"]


class Arguments(ctypes.Structure):
    _fields_ = (
        [("size", ctypes.c_uint32), ("which", ctypes.c_uint32)]
        + [(name, ctypes.POINTER(Tensor)) for name in OPERANDS]
        + [("max_seqlen_q", ctypes.c_int64), ("max_seqlen_k", ctypes.c_int64)]
        + [(name, ctypes.POINTER(Tensor)) for name in RESULTS]
    )


class Octet:
    """One prepared call of liboctet. `options` are fields of octet_attention."""

    def __init__(self, library, which, precision, causal, tensors, **options):
        self.library, self.tensors = library, tensors
        self.attention = Attention(size=ctypes.sizeof(Attention), precision=PRECISIONS[precision], **options)
        self.attention.mask = CAUSAL if causal else 0
        self.views = {name: self.view(x) for name, x in tensors.items()}
        pointers = {name: ctypes.pointer(view) for name, view in self.views.items()}
        self.arguments = Arguments(size=ctypes.sizeof(Arguments), which=which, **pointers)
        bytes_needed = ctypes.c_size_t()
        self.check(library.octet_workspace_size(ctypes.byref(self.attention), ctypes.byref(self.arguments), ctypes.byref(bytes_needed)))
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
        return Tensor(
            ctypes.sizeof(Tensor), DTYPES[x.dtype], x.data_ptr(), array(*shape), array(*stride), on_gpu, x.device.index or 0 if on_gpu else 0, None
        )

    def check(self, status):
        if status:
            raise RuntimeError(self.library.octet_message().decode())

    def __call__(self):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream) if self.device.type == "cuda" else None
        self.check(
            self.library.octet_run(
                ctypes.byref(self.attention), ctypes.byref(self.arguments), ctypes.c_void_p(self.workspace), ctypes.c_size_t(self.bytes), stream
            )
        )


def load(path):
    library = ctypes.CDLL(str(path.resolve()))
    library.octet_message.restype = ctypes.c_char_p
    library.octet_version.restype = ctypes.c_char_p
    return library


def revision():
    """The commit that is measured, "-dirty" if anything but results differs from it."""
    git = ["git", "-C", str(pathlib.Path(__file__).resolve().parent.parent)]
    run = lambda *arguments: subprocess.run(git + list(arguments), capture_output=True, text=True).stdout.strip()
    changed = run("status", "--porcelain", "--", ".", ":!bench/results", ":!README.md")
    return run("describe", "--always") + ("-dirty" if changed else "")
