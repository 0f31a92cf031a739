"""The versions of other packages that octet works with: said alike everywhere, others rejected by name."""

import pathlib
import re
import subprocess
import sys

import octet
import pytest
from octet._versions import SUPPORTED, expect_version

SOURCE = pathlib.Path(__file__).parents[2]
ADAPTERS = {"torch": "import octet.torch", "jax": "import octet.jax"}
HOSTS = {
    name: f"from octet.integrations import {name} as host; host.register()" for name in ("transformers", "diffusers")
}


def text(series):
    return ".".join(map(str, series))


def after(series):
    return f"{series[0]}.{series[1] + 1}.0"


@pytest.mark.parametrize("package", SUPPORTED)
def test_versions(package):
    allowed = SUPPORTED[package]
    oldest, newest = text(allowed.oldest), text(allowed.newest)
    for found in (oldest, f"{oldest}.0+cu130", f"{newest}.9", f"{newest}.0.dev1"):
        expect_version(package, found)
    for found in (text((allowed.oldest[0], allowed.oldest[1] - 1)) + ".3", f"{allowed.oldest[0] - 1}.99", "unknown"):
        with pytest.raises(
            octet.Unsupported, match=f"^{package}: found version {re.escape(found)}, allowed: {oldest} "
        ):
            expect_version(package, found)
    if allowed.closed:
        with pytest.raises(octet.Unsupported, match=f"allowed: {oldest} to {newest}$"):
            expect_version(package, after(allowed.newest))
    else:
        expect_version(package, after(allowed.newest))


@pytest.mark.parametrize("package", {**ADAPTERS, **HOSTS})
def test_others_are_rejected_where_they_are_loaded(package):
    """In a process of its own, where the package says that it is another version."""
    pytest.importorskip(package)
    program = f"""
import {package}, octet
{package}.__version__ = "0.0.1"
try:
    {(ADAPTERS | HOSTS)[package]}
except octet.Unsupported as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert found.startswith(f"{package}: found version 0.0.1, allowed: {text(SUPPORTED[package].oldest)} ")


@pytest.mark.parametrize("package", SUPPORTED)
def test_the_installed_one_is_supported(package):
    expect_version(package, pytest.importorskip(package).__version__)


@pytest.mark.skipif(not (SOURCE / "pyproject.toml").exists(), reason="no sources here")
@pytest.mark.parametrize("package", SUPPORTED)
def test_they_are_said_alike_everywhere(package):
    allowed = SUPPORTED[package]
    oldest, newest = text(allowed.oldest), text(allowed.newest)
    bounds = f"{package}>={oldest}" + (
        f",<{text((allowed.newest[0], allowed.newest[1] + 1))}" if allowed.closed else ""
    )
    assert f'{package} = ["{bounds}"]' in (SOURCE / "pyproject.toml").read_text()
    assert f"| {package} | {oldest} | {newest} |" in (SOURCE / "docs/drop-ins.md").read_text()
    pins = (SOURCE / "requirements-frameworks.txt").read_text()
    pinned = re.search(rf"^{package}==(\d+\.\d+)", pins, re.MULTILINE)[1]
    if package in HOSTS:
        assert pinned == newest
        assert re.search(
            rf"^{package}=={re.escape(oldest)}\.", (SOURCE / "requirements-oldest.txt").read_text(), re.MULTILINE
        )
