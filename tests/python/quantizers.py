"""What the tests of octet.quantize in programs share: the arrays of a QTensor, and ways to quantize an x of bfloat16
[2, 3, 70, 16]."""

PARTS = "codes", "scale", "zero_point", "mean", "statistics"
HOW = {
    "token": dict(operand="q"),
    "bshd": dict(operand="k", layout="bshd"),
    "tensor": dict(operand="q", granularity="tensor"),
    "block": dict(operand="k", granularity="block", block=48),
    "threads of q": dict(operand="q", granularity="thread"),
    "threads of k": dict(operand="k", granularity="thread", smooth=True),
    "channel": dict(operand="v", granularity="channel", format="e4m3", statistics=True),
    "zero points": dict(operand="v", format="u8", zero_point="integer"),
    "float zero points": dict(operand="k", zero_point="float"),
    "rotated": dict(operand="k", hadamard_seed=2**64 - 3, format="i4"),
    "embedded": dict(operand="q", rope="half", rope_dim=8, rope_offset=-3, rope_base=500.0, norm="rms", norm_eps=1e-6),
}
