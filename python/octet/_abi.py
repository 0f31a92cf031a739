"""include/octet/octet.h in ctypes: the same structs, field by field, and the same numbers for every name.

A test compiles a C program that prints the offset of every field and compares. Enumerators are dictionaries from the
names that the library itself uses in its messages. The first field of a struct is its size.
"""

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Literal, TypeAlias, get_args

STATUS_OK, STATUS_INVALID_ARGUMENT, STATUS_UNSUPPORTED, STATUS_WORKSPACE_TOO_SMALL, STATUS_FAILURE = range(5)

DTYPES = {
    "none": 0, "f64": 1, "f32": 2, "f16": 3, "bf16": 4, "e4m3": 5, "e5m2": 6, "i8": 7, "u8": 8, "i4": 9, "i32": 10,
    "bool": 11,
}  # fmt: skip
DEVICES = {"cpu": 0, "cuda": 1}
Precision: TypeAlias = Literal["f64", "f32", "f16", "bf16", "int8", "int8_f16", "int8_fp8", "fp8", "fp8_raw", "sagebwd"]
PRECISIONS: dict[str, int] = {name: number for number, name in enumerate(get_args(Precision), start=1)}
PASSES = {"forward": 0, "backward": 1, "jvp": 2}
MASK_CAUSAL, MASK_WINDOW = 1, 2
ALIGNMENTS = {"none": 0, "top_left": 1, "bottom_right": 2}
DELTAS = {"o": 0, "p": 1}
BIAS_CORRECTIONS = {"f16": 0, "none": 1, "beta": 2, "exact_delta": 3, "gproj": 4}
SWITCHES = {"auto": 0, "on": 1, "off": 2}
GRANULARITIES = {"tensor": 0, "token": 1, "channel": 2, "block": 3, "thread": 4}
OPERANDS = {"q": 0, "k": 1, "v": 2}
ZERO_POINTS = {"symmetric": 0, "integer": 1, "float": 2}
ROPE_STYLES = {"none": 0, "half": 1, "interleaved": 2}
NORMS = {"none": 0, "rms": 1}
STATISTICS = ("step", "norm", "bias", "outlier")


class Tensor(ctypes.Structure):
    """octet_tensor"""


class Quantization(ctypes.Structure):
    """octet_quantization"""

    _fields_ = [
        ("size", c_uint32),
        ("operand", c_uint32),
        ("granularity", c_uint32),
        ("zero_point_kind", c_uint32),
        ("block", c_int64),
        ("hadamard_seed", c_uint64),
        ("scale", POINTER(Tensor)),
        ("zero_point", POINTER(Tensor)),
        ("mean", POINTER(Tensor)),
    ]


Tensor._fields_ = [
    ("size", c_uint32),
    ("dtype", c_uint32),
    ("data", c_void_p),
    ("shape", c_int64 * 4),
    ("stride", c_int64 * 4),
    ("device", c_uint32),
    ("device_index", c_int32),
    ("quantization", POINTER(Quantization)),
]


class Rounding(ctypes.Structure):
    """octet_rounding, of octet_study.h"""

    _fields_ = [
        ("size", c_uint32),
        ("qk", c_uint32),
        ("v", c_uint32),
        ("s", c_uint32),
        ("s_scaled", c_uint32),
        ("m", c_uint32),
        ("arg", c_uint32),
        ("p", c_uint32),
        ("l_from_p", c_uint32),
        ("alpha", c_uint32),
        ("acc", c_uint32),
        ("o", c_uint32),
        ("o_saved", c_uint32),
        ("delta", c_uint32),
        ("ds", c_uint32),
        ("p_backward", c_uint32),
        ("beta", c_float),
        ("tie_epsilon", c_float),
        ("tile", c_uint32),
    ]


class Attention(ctypes.Structure):
    """octet_attention"""

    _fields_ = [
        ("size", c_uint32),
        ("precision", c_uint32),
        ("scale", c_float),
        ("mask", c_uint32),
        ("alignment", c_uint32),
        ("bias_correction", c_uint32),
        ("window_left", c_int64),
        ("window_right", c_int64),
        ("softcap", c_float),
        ("beta", c_float),
        ("hadamard", c_uint32),
        ("smooth_q", c_uint32),
        ("deterministic", c_uint32),
        ("threads", c_uint32),
        ("backend", c_char_p),
        ("rounding", POINTER(Rounding)),
        ("dropout_p", c_double),
        ("tile", c_char_p),
    ]


class Arguments(ctypes.Structure):
    """octet_arguments"""

    _fields_ = [
        ("size", c_uint32),
        ("pass", c_uint32),
        ("q", POINTER(Tensor)),
        ("k", POINTER(Tensor)),
        ("v", POINTER(Tensor)),
        ("mask", POINTER(Tensor)),
        ("sinks", POINTER(Tensor)),
        ("cu_seqlens_q", POINTER(Tensor)),
        ("cu_seqlens_k", POINTER(Tensor)),
        ("max_seqlen_q", c_int64),
        ("max_seqlen_k", c_int64),
        ("o", POINTER(Tensor)),
        ("o_residual", POINTER(Tensor)),
        ("lse", POINTER(Tensor)),
        ("do_", POINTER(Tensor)),
        ("dq", POINTER(Tensor)),
        ("dk", POINTER(Tensor)),
        ("dv", POINTER(Tensor)),
        ("tq", POINTER(Tensor)),
        ("tk", POINTER(Tensor)),
        ("tv", POINTER(Tensor)),
        ("to", POINTER(Tensor)),
        ("dlse", POINTER(Tensor)),
        ("dsinks", POINTER(Tensor)),
        ("tsinks", POINTER(Tensor)),
        ("tlse", POINTER(Tensor)),
        ("alibi_slopes", POINTER(Tensor)),
        ("dropout_seed", POINTER(Tensor)),
        ("dmask", POINTER(Tensor)),
        ("seqused_k", POINTER(Tensor)),
        ("block_table", POINTER(Tensor)),
    ]


class Rope(ctypes.Structure):
    """octet_rope"""

    _fields_ = [
        ("size", c_uint32),
        ("style", c_uint32),
        ("dim", c_int64),
        ("offset", c_int64),
        ("base", c_double),
        ("norm", c_uint32),
        ("norm_eps", c_float),
        ("norm_weight", POINTER(Tensor)),
    ]


class AppendArguments(ctypes.Structure):
    """octet_append_arguments"""

    _fields_ = [
        ("size", c_uint32),
        ("k", POINTER(Tensor)),
        ("v", POINTER(Tensor)),
        ("k_cache", POINTER(Tensor)),
        ("v_cache", POINTER(Tensor)),
        ("seqused_k", POINTER(Tensor)),
        ("block_table", POINTER(Tensor)),
        ("rope", POINTER(Rope)),
        ("rope_cos", POINTER(Tensor)),
        ("rope_sin", POINTER(Tensor)),
        ("q", POINTER(Tensor)),
        ("q_turned", POINTER(Tensor)),
        ("cu_seqlens", POINTER(Tensor)),
    ]


_status = c_uint32  # octet_status, an unsigned enum
PROTOTYPES = {
    "octet_message": (c_char_p, []),
    "octet_version": (c_char_p, []),
    "octet_workspace_size": (_status, [POINTER(Attention), POINTER(Arguments), POINTER(c_size_t)]),
    "octet_run": (_status, [POINTER(Attention), POINTER(Arguments), c_void_p, c_size_t, c_void_p]),
    "octet_explain": (_status, [POINTER(Attention), POINTER(Arguments), c_char_p, c_size_t, POINTER(c_size_t)]),
    "octet_tiles": (_status, [POINTER(Attention), POINTER(Arguments), c_char_p, c_size_t, POINTER(c_size_t)]),
    "octet_info": (_status, [c_char_p, c_size_t, POINTER(c_size_t)]),
    "octet_quantize": (_status, [POINTER(Tensor), POINTER(Rope), POINTER(Tensor), POINTER(Tensor), c_void_p]),
    "octet_dequantize": (_status, [POINTER(Tensor), POINTER(Tensor), c_void_p]),
    "octet_append": (_status, [POINTER(AppendArguments), c_void_p]),
    "octet_scale_groups": (_status, [c_uint32, c_uint32, c_int64, c_int64, POINTER(c_int64)]),
}
