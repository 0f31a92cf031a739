"""Attention of jax arrays, with which `octet.attention` and the other functions of `octet` come here.

They work under jit, grad, jvp, linearize, vmap, shard_map and export.
"""

from octet._api import attention, attention_jvp, attention_varlen, attention_vjp
from octet._caches import append, attention_cached
from octet._quantize import dequantize, quantize
from octet.jax import _adapter
from octet.jax._adapter import adapter as adapter
from octet.jax._append import run_append as run_append
from octet.jax._attention import run_attention as run_attention
from octet.jax._attention import run_jvp as run_jvp
from octet.jax._attention import run_vjp as run_vjp
from octet.jax._attention import to_numpy as to_numpy
from octet.jax._quantizers import run_dequantize as run_dequantize
from octet.jax._quantizers import run_quantize as run_quantize

__all__ = [
    "append",
    "attention",
    "attention_cached",
    "attention_jvp",
    "attention_varlen",
    "attention_vjp",
    "dequantize",
    "quantize",
]

_adapter.has_handlers()  # so that a program which was exported finds them
