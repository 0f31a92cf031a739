"""The operators as other programs name them: in a process that has called nothing yet."""

import subprocess
import sys

import pytest

pytest.importorskip("torch")

NAMES = "('forward', 'backward', 'jvp')"
POLICY = """
from torch.utils import checkpoint
saved = {torch.ops.octet.forward.default}
seen = []
def policy(ctx, op, *args, **keywords):
    seen.append(op)
    return checkpoint.CheckpointPolicy.MUST_SAVE if op in saved else checkpoint.CheckpointPolicy.PREFER_RECOMPUTE
contexts = lambda: checkpoint.create_selective_checkpoint_contexts(policy)
q = torch.randn(1, 2, 8, 16, requires_grad=True)
o = checkpoint.checkpoint(lambda q: octet.attention(q, q, q).sin(), q, use_reentrant=False, context_fn=contexts)
o.sum().backward()
assert torch.ops.octet.forward.default in seen
want, = torch.autograd.grad(octet.attention(q, q, q).sin().sum(), q)
assert torch.equal(q.grad, want)
"""


def run(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("order", ["import torch, octet, octet.torch", "import octet, torch, octet.torch",
                                   "import octet.torch, torch", "import torch, octet.torch, octet"])  # fmt: skip
def test_importing_octet_torch_registers_the_operators(order):
    run(f"{order}\nfor name in {NAMES}: assert getattr(torch.ops.octet, name).default")


def test_a_checkpoint_policy_names_an_operator_before_the_first_call():
    run("import torch, octet, octet.torch\n" + POLICY)


def test_a_saved_program_is_loaded_in_another_process(tmp_path):
    path = str(tmp_path / "attention.pt2")
    run(
        "import torch, octet\n"
        "class Attention(torch.nn.Module):\n"
        "    def forward(self, q): return octet.attention(q, q, q, causal=True)\n"
        f"torch.manual_seed(0); q = torch.randn(1, 2, 8, 16)\n"
        f"torch.export.save(torch.export.export(Attention(), (q,)), {path!r})\n"
    )
    run(
        f"import torch, octet.torch\nprogram = torch.export.load({path!r}).module()\n"
        "torch.manual_seed(0); q = torch.randn(1, 2, 8, 16)\n"
        "import octet\nassert torch.equal(program(q), octet.attention(q, q, q, causal=True))\n"
    )


def test_octet_imports_no_torch():
    run("import sys, octet\nassert 'torch' not in sys.modules")
