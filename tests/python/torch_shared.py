"""The tests of octet with torch share this."""

import pathlib
import socket
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")


def run_two_processes(script, *arguments):
    """Runs a program of this folder as two processes that meet at a port: SCRIPT ARGUMENTS... PORT RANK. Both end with
    0, or the test fails with what one of them printed; where torch has no processes it is skipped."""
    if not torch.distributed.is_available():
        pytest.skip("torch.distributed is not available")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(pathlib.Path(__file__).with_name(script)), *arguments, str(port)]
    processes = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for rank in range(2)
    ]
    try:
        for process in processes:
            out, _ = process.communicate(timeout=300)
            assert process.returncode == 0, out.decode()
    finally:
        for process in processes:
            process.kill()


def compiled(function, **how):
    """With torch's own kernels (aot_eager): nothing but octet's plumbing differs from eager code."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, **({"backend": "aot_eager"} | how))
