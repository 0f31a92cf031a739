"""A fixture: the ways in which XLA runs octet, by its handlers and, on a CPU, by callbacks into Python."""

import jax
import pytest
from octet.jax import _adapter

WAYS = ["handlers", "callbacks"] if jax.default_backend() == "cpu" else ["handlers"]


@pytest.fixture(params=WAYS, autouse=True)
def way(request, monkeypatch):
    """How XLA runs octet."""
    if request.param == "callbacks":
        monkeypatch.setattr(_adapter, "why_no_handlers", lambda: "a test said so")
    elif _adapter.why_no_handlers():
        pytest.skip(_adapter.why_no_handlers())
    jax.clear_caches()
    yield request.param
    jax.clear_caches()
