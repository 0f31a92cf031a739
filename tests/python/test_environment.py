"""Odd bytes in the environment and in names, and questions about tensors that no memory holds."""

import os
import shutil
import subprocess
import sys

import numpy as np
import octet
import pytest

ODD = b"caf\xe9\x1b[31m"
CALL = "import numpy, octet; q = numpy.zeros((1, 2, 8, 16), 'f4'); "


def run(program, **environment):
    return subprocess.run(
        [sys.executable, "-c", program], env=os.environ | environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("variable", ["OCTET_BACKEND", "OCTET_CPU"])
@pytest.mark.parametrize("call", ["octet.attention(q, q, q)", "octet.explain(q, q, q)", "octet.info()"])
def test_odd_bytes_are_named_as_ascii(variable, call):
    if variable == "OCTET_BACKEND" and "info" in call:
        return  # which names no backend
    done = run(CALL + call, **{variable: os.fsdecode(ODD)})
    last = done.stderr.splitlines()[-1]
    assert last.startswith("octet.errors.InvalidArgument: ") and r'"caf\xe9\x1b[31m"' in last, done.stderr


def test_a_library_at_a_path_with_odd_bytes(tmp_path):
    folder = os.fsencode(tmp_path) + b"/" + ODD[:4]
    os.mkdir(folder)
    path = os.fsdecode(folder + b"/liboctet.so")
    done = run("import octet", OCTET_LIBRARY=path)
    assert done.stderr.splitlines()[-1].startswith("ImportError: octet: cannot load ") and r"caf\udce9" in done.stderr
    shutil.copy(octet.info()["library"], path)
    done = run("import json, octet; print(json.dumps(octet.info()['library']))", OCTET_LIBRARY=path)
    assert done.returncode == 0 and r"caf\udce9/liboctet.so" in done.stdout, done.stderr


@pytest.mark.parametrize("backend", ["caf\udce9", "caf\u00e9", "cpu\0", "\ud800"])
def test_names_of_backends_are_ascii(backend):
    """A zero byte would end the name where the library reads it, and "cpu" is a backend."""
    q = np.zeros((1, 2, 8, 16), np.float32)
    with pytest.raises(octet.InvalidArgument, match="backend: found .*allowed: a name of octet.info"):
        octet.attention(q, q, q, backend=backend)


@pytest.mark.parametrize("kind", ["forward", "backward", "jvp"])
@pytest.mark.parametrize("array", ["numpy", "torch"])
def test_questions_about_tensors_that_no_memory_holds(array, kind):
    """They compute nothing, so nothing is allocated."""
    shape = (1, 1, 10**12, 64)
    if array == "torch":
        q = pytest.importorskip("torch").zeros(64).expand(shape)
    else:
        q = np.broadcast_to(np.zeros(64, np.float32), shape)
    assert "cpu: chosen, " in octet.explain(q, q, q, kind=kind)
    assert octet.supports(q, q, q, kind=kind)


def test_check_has_its_reference_whatever_the_environment_names():
    """float64 is the reference backend's, and OCTET_BACKEND is for the call that is checked."""
    done = run(CALL + "print(octet.check(q, q, q, causal=True)['o'].rel_l2)", OCTET_BACKEND="cpu")
    assert done.returncode == 0, done.stderr
