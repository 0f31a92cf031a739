"""A program that uses the package sees its hints; scripts/lint holds the package itself to them."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]

WRONG = {
    'octet.attention(q, q, q, precision="int9")': "typeddict-item|arg-type",
    "octet.attention(q, q, q, dropout=0.1)": "call-arg",
    'octet.quantize(q, "o")': "arg-type",
    'octet.supports(q, q, q).reason + 1': "operator",
    'octet.check(q, q, q)["o"].cosine': "attr-defined",
}  # fmt: skip


def mypy(*arguments):
    command = [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    return done.stdout + done.stderr


def test_a_program_is_checked(tmp_path):
    pytest.importorskip("mypy")
    assert (ROOT / "python" / "octet" / "py.typed").exists()
    lines = ["import numpy as np", "import octet", "q = np.zeros((1, 1, 8, 8), np.float32)"]
    right = ['octet.attention(q, q, q, precision="int8", causal=True, window=(3, None)).shape', "octet.info()['gpus']"]
    program = tmp_path / "program.py"
    program.write_text("\n".join([*lines, *right, *WRONG]) + "\n")
    # pyproject.toml names the package to check; a file on the command line takes its place.
    found = mypy("--cache-dir=build/lint/mypy", program)  # where scripts/lint has checked what octet imports
    first = len(lines) + len(right) + 1
    for number, kinds in enumerate(WRONG.values(), first):
        assert any(f"program.py:{number}: error" in line and any(f"[{kind}]" in line for kind in kinds.split("|"))
                   for line in found.splitlines()), found  # fmt: skip
    assert f"Found {len(WRONG)} errors" in found, found
