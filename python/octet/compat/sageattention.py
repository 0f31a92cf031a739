"""The functions of SageAttention, computed by octet.

"HND" is [batch, head, token, dim], "NHD" [batch, token, head, dim]; causal masks are aligned top-left; lse is natural,
[batch, head, token]. `sageattn` is precision "int8" here, which also trains; the named kernels are "int8_f16" and
"int8_fp8". All have a scale per token, finer than "per_warp" and "per_thread", and add in float32, which serves every
`pv_accum_dtype`; k is always smoothed and v never. Unlike the originals, an unknown keyword raises.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from octet import _api
from octet._options import Layout, Precision
from octet._rejections import ADVICE, expect, expect_known
from octet.errors import InvalidArgument, listing

_LAYOUTS: dict[str, Layout] = {"HND": "bhsd", "NHD": "bshd"}
_ADVICE = ADVICE | {"attn_mask": "call octet.attention with mask"}
_INSTEAD = "leave it out, or call octet.attention with another precision"
# The settings that octet computes with in any case, and therefore accepts.
_SETTINGS = {"smooth_k": (True,), "smooth_v": (False,), "qk_quant_gran": ("per_warp", "per_thread")}


def _expect(function: Callable, unknown: Mapping[str, Any], **settings: Any) -> None:
    """Rejects unknown keywords, and settings that octet would have to ignore."""
    expect_known(function, unknown, _ADVICE)
    for name, found in settings.items():
        expect(name, found, _SETTINGS[name], _INSTEAD)


def _attention(
    precision: Precision,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str,
    is_causal: bool,
    sm_scale: float | None,
    return_lse: bool,
    mask: torch.Tensor | None = None,
) -> Any:
    if tensor_layout not in _LAYOUTS:
        raise InvalidArgument(f"tensor_layout: found {tensor_layout!r}, allowed: {listing(_LAYOUTS)}")
    return _api.attention(
        q,
        k,
        v,
        precision=precision,
        layout=_LAYOUTS[tensor_layout],
        causal="top_left" if is_causal else False,
        scale=sm_scale,
        mask=mask,
        return_lse=return_lse,
        enable_gqa=True,  # sageattn has no such argument
    )


def sageattn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    return_lse: bool = False,
    **unknown: Any,
) -> Any:
    """o in the layout of q, or (o, lse), at precision "int8"."""
    _expect(sageattn, unknown)
    return _attention("int8", q, k, v, tensor_layout, is_causal, sm_scale, return_lse)


def sageattn_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool = False,
    sm_scale: float | None = None,
    smooth_k: bool = True,
    **unknown: Any,
) -> torch.Tensor:
    """Packed sequences [token, head, dim] at precision "int8"."""
    _expect(sageattn_varlen, unknown, smooth_k=smooth_k)
    return _api.attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        precision="int8",
        causal="top_left" if is_causal else False,
        scale=sm_scale,
    )


def sageattn_qk_int8_pv_fp16_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    quantization_backend: str = "triton",
    is_causal: bool = False,
    attn_mask: torch.Tensor | None = None,
    sm_scale: float | None = None,
    smooth_k: bool = True,
    return_lse: bool = False,
    **unknown: Any,
) -> Any:
    """Precision "int8_f16"; attn_mask as `mask` of `octet.attention`."""
    _expect(sageattn_qk_int8_pv_fp16_triton, unknown, smooth_k=smooth_k)
    expect("quantization_backend", quantization_backend, ("triton", "cuda"), _INSTEAD)
    return _attention("int8_f16", q, k, v, tensor_layout, is_causal, sm_scale, return_lse, attn_mask)


def sageattn_qk_int8_pv_fp16_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    qk_quant_gran: str = "per_thread",
    sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32",
    smooth_k: bool = True,
    smooth_v: bool = False,
    return_lse: bool = False,
    **unknown: Any,
) -> Any:
    """Precision "int8_f16"."""
    _expect(sageattn_qk_int8_pv_fp16_cuda, unknown, qk_quant_gran=qk_quant_gran, smooth_k=smooth_k, smooth_v=smooth_v)
    expect("pv_accum_dtype", pv_accum_dtype, ("fp16", "fp16+fp32", "fp32"), _INSTEAD)
    return _attention("int8_f16", q, k, v, tensor_layout, is_causal, sm_scale, return_lse)


def sageattn_qk_int8_pv_fp8_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    qk_quant_gran: str = "per_thread",
    sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32+fp16",
    smooth_k: bool = True,
    smooth_v: bool = False,
    return_lse: bool = False,
    **unknown: Any,
) -> Any:
    """Precision "int8_fp8"."""
    _expect(sageattn_qk_int8_pv_fp8_cuda, unknown, qk_quant_gran=qk_quant_gran, smooth_k=smooth_k, smooth_v=smooth_v)
    expect("pv_accum_dtype", pv_accum_dtype, ("fp32", "fp32+fp32", "fp32+fp16"), _INSTEAD)
    return _attention("int8_fp8", q, k, v, tensor_layout, is_causal, sm_scale, return_lse)


def sageattn_qk_int8_pv_fp8_cuda_sm90(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    qk_quant_gran: str = "per_thread",
    sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32+fp32",
    smooth_k: bool = True,
    return_lse: bool = False,
    **unknown: Any,
) -> Any:
    """Precision "int8_fp8"."""
    _expect(sageattn_qk_int8_pv_fp8_cuda_sm90, unknown, qk_quant_gran=qk_quant_gran, smooth_k=smooth_k)
    expect("pv_accum_dtype", pv_accum_dtype, ("fp32", "fp32+fp32"), _INSTEAD)
    return _attention("int8_fp8", q, k, v, tensor_layout, is_causal, sm_scale, return_lse)
