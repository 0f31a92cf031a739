"""DTensors whose batch or heads are sharded over two processes, and what is imported for them."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")


def test_two_processes():
    """The tests of sharded_processes.py."""
    if not torch.distributed.is_available():
        pytest.skip("torch.distributed is not available")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    script = pathlib.Path(__file__).with_name("sharded_processes.py")
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(port), str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(os.environ),
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            out, _ = process.communicate(timeout=300)
            assert process.returncode == 0, out.decode()
    finally:
        for process in processes:
            process.kill()


def test_plain_tensors_import_no_dtensor():
    program = (
        "import sys, torch, octet, octet.torch; q = torch.rand(1, 2, 8, 16, requires_grad=True); "
        "octet.attention(q, q, q, sinks=q[0, :, 0, 0]).sum().backward(); "
        "assert 'torch.distributed.tensor' not in sys.modules"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
