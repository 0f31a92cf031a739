"""The problems that the programs of this folder time. One more is one row here."""

# The table of the field on GPUs: this many tokens in all sequences together, and channels in all heads.
TOKENS, CHANNELS = 16384, 2048


def shape(dim, tokens):
    """Batch, heads, tokens and dim of a row of that table; a sequence that is longer stands alone."""
    return max(1, TOKENS // tokens), CHANNELS // dim, tokens, dim


# batch, heads, tokens, dim: the table, and heads and tokens that fill no GPU evenly
GPU = [shape(dim, tokens) for dim in (64, 128, 256) for tokens in (1024, 4096, 16384)] + [(5, 13, 2500, 128)]
# Sequences for which time must grow with the square of the tokens, and memory with the tokens.
GPU_LONG = [shape(128, tokens) for tokens in (16384, 65536, 131072)]
# batch, heads, tokens, dim: 8 bits on GPUs, rows of the table, and a length that is no power of two
GPU_BYTES = [shape(128, 4096), shape(128, 16384), shape(64, 4096), shape(64, 16384), (1, 16, 2560, 64)]
# The backend for all GPUs: rows of the table at 16 bits and at f32; of few queries over long keys batch, heads,
# kv_heads, queries, keys, dim
GPU_GENERAL = [shape(dim, tokens) for dim in (64, 128) for tokens in (4096, 16384)]
GPU_GENERAL_EIGHT_BITS = [*GPU_GENERAL, (1, 12, 32760, 128), (1, 24, 4608, 128)]
GPU_GENERAL_F32 = [shape(dim, 4096) for dim in (64, 128)]
GPU_FEW_QUERIES = [
    (1, 32, 8, 1, 32768, 128),
    (1, 32, 8, 16, 32768, 128),
    (4, 32, 8, 1, 8192, 128),
    (1, 32, 32, 1, 32768, 64),
]
# What a call costs beside its kernels: kernels so short that they take no time.
HOST = {"cuda": (1, 8, 512, 64), "cpu": (1, 1, 8, 64)}
# On CPUs, full and causal.
CPU = [(1, 8, 2048, 64), (1, 8, 2048, 128)]
