"""Attention of tensors, with which `octet.attention` and the other functions of `octet` come here: operators,
derivatives, vmap, autocast."""

import torch

from octet import _api
from octet._api import attention, attention_jvp, attention_varlen, attention_vjp
from octet._caches import append, attention_cached
from octet.torch import _fast_caches, _fast_path
from octet.torch import sdpa as sdpa
from octet.torch._adapter import adapter as adapter
from octet.torch._adapter import to_numpy as to_numpy
from octet.torch._append import run_append as run_append
from octet.torch._attention import run_attention as run_attention
from octet.torch._attention import run_jvp as run_jvp
from octet.torch._attention import run_vjp as run_vjp
from octet.torch._quantizers import run_dequantize as run_dequantize
from octet.torch._quantizers import run_quantize as run_quantize

__all__ = ["append", "attention", "attention_cached", "attention_jvp", "attention_varlen", "attention_vjp"]

_api.shortcuts[torch.Tensor] = _fast_path.attention
_api.cache_shortcuts[torch.Tensor] = _fast_caches
