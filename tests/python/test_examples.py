"""Every program of examples/python runs; the long ones for a few steps."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "examples" / "python"
NEEDS = {
    "numpy_first_steps": [],
    "shared_prefix": ["torch"],
    "swap_transformers": ["torch", "transformers"],
    "train_gpt": ["torch"],
    "meanflow": ["torch"],
    "meanflow_jax": ["jax"],
    "ladder_times": ["torch"],
}


def test_none_is_forgotten():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(NEEDS)


@pytest.mark.parametrize("name", NEEDS)
def test_it_runs(name):
    for module in NEEDS[name]:
        pytest.importorskip(module)
    source = FOLDER / f"{name}.py"
    steps = ["--steps", "3"] if "--steps" in source.read_text() else []
    command = [sys.executable, source, *steps]
    on_cpu = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=on_cpu, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert not re.search(r"\bnan\b", done.stdout) and done.stdout.count("\n") >= 2
