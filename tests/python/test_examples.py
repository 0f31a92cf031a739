"""Every program of examples/python runs; the long ones for a few steps."""

import json
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
    "dit_steps": ["torch"],
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


def test_steps_with_a_jvp_are_timed(tmp_path):
    """And what cannot be imported is rejected by name."""
    pytest.importorskip("torch")
    command = [sys.executable, FOLDER / "dit_steps.py", "--time", "--rounds", "1", "--sizes", "24x2", "--width", "64"]
    made = tmp_path / "times.json"
    more = ["--depth", "1", "--attention", "octet", "math", "--output", made]
    done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    rows = json.loads(made.read_text())["rows"]
    assert [(row["objective"], row["tokens"], row["batch"]) for row in rows] == [("meanflow", 24, 2), ("scm", 24, 2)]
    assert all(set(row["ms"]) == {"octet", "math"} and min(row["ms"].values()) > 0 for row in rows)
    done = subprocess.run([*command, "--attention", "rcm"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 1 and "--attention: rcm, but No module named" in done.stderr
