"""octet: attention in 16 and 8 bits, to train with and to trust.

    import octet
    o = octet.attention(q, k, v, precision="int8", causal=True)

q, k and v are numpy, torch or jax arrays, and o is what they are. A call is either right or rejected, with the value
found and the values allowed.
"""

from typing import TYPE_CHECKING, Any

from octet import _api
from octet._api import attention, attention_jvp, attention_varlen, attention_vjp
from octet._caches import append, attention_cached
from octet._explain import Support, explain, supports, tiles
from octet._library import version as __version__
from octet._qtensor import QTensor
from octet._quantize import dequantize, quantize
from octet._report import Errors, check, info
from octet._rounding import Rounding
from octet.errors import Error, Failure, InvalidArgument, Unsupported

if TYPE_CHECKING:
    from octet.torch.sdpa import patch_sdpa, sdpa


def __getattr__(name: str) -> Any:
    """sdpa and patch_sdpa, which import torch when first asked for."""
    if name not in ("sdpa", "patch_sdpa"):
        raise AttributeError(f"module 'octet' has no attribute {name!r}")
    return getattr(_api.load("torch").sdpa, name)


__all__ = [
    "Error",
    "Errors",
    "Failure",
    "InvalidArgument",
    "QTensor",
    "Rounding",
    "Support",
    "Unsupported",
    "__version__",
    "append",
    "attention",
    "attention_cached",
    "attention_jvp",
    "attention_varlen",
    "attention_vjp",
    "check",
    "dequantize",
    "explain",
    "info",
    "patch_sdpa",
    "quantize",
    "sdpa",
    "supports",
    "tiles",
]
