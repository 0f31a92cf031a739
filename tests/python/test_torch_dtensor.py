"""DTensors whose batch or heads are sharded over two processes, and what is imported for them."""

import subprocess
import sys

from torch_shared import run_two_processes


def test_two_processes():
    """The tests of sharded_processes.py."""
    run_two_processes("sharded_processes.py")


def test_plain_tensors_import_no_dtensor():
    program = (
        "import sys, torch, octet, octet.torch; q = torch.rand(1, 2, 8, 16, requires_grad=True); "
        "octet.attention(q, q, q, sinks=q[0, :, 0, 0]).sum().backward(); "
        "assert 'torch.distributed.tensor' not in sys.modules"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
