"""The tests of octet with torch share this."""

import pytest

torch = pytest.importorskip("torch")


def compiled(function, **how):
    """With torch's own kernels (aot_eager): nothing but octet's plumbing differs from eager code."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, **({"backend": "aot_eager"} | how))
