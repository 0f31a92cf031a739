"""The problems that the programs of this folder time. One more is one row here."""

# The table of the field on GPUs: this many tokens in all sequences together, and channels in all heads.
TOKENS, CHANNELS = 16384, 2048
# dim, tokens of a sequence
GPU = [(64, 4096), (64, 16384), (128, 1024), (128, 4096), (128, 16384), (256, 4096), (256, 16384)]


def shape(dim, tokens):
    """Batch, heads, tokens and dim of a row of that table."""
    return TOKENS // tokens, CHANNELS // dim, tokens, dim


# batch, heads, tokens, dim: 8 bits on GPUs, rows of the table, and a length that is no power of two
GPU_BYTES = [shape(128, 4096), shape(128, 16384), shape(64, 4096), shape(64, 16384), (1, 16, 2560, 64)]
# What a call costs beside its kernels: kernels so short that they take no time.
HOST = {"cuda": (1, 8, 512, 64), "cpu": (1, 1, 8, 64)}
# On CPUs, full and causal.
CPU = [(1, 8, 2048, 64), (1, 8, 2048, 128)]
