"""One of two processes of test_torch_diffusers.py: two_processes.py DEGREE PORT RANK."""

import sys

import torch
from diffusers.models import attention_dispatch as dispatch
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from octet.integrations.diffusers import register
from torch.distributed.device_mesh import init_device_mesh

BATCH, TOKENS, HEADS, DIM = 2, 24, 4, 16
# For each width: the type, the backend, and how far the parts may differ from the whole, relative: for float32 sums;
# twice what rounding to bf16 costs (2**-9), once in the parts and once where they are put together; the bar of int8.
CASES = {
    32: (torch.float32, "octet", 1e-5),
    16: (torch.bfloat16, "octet", 4 * 2.0**-9),
    8: (torch.float32, "octet_int8", 0.03),
}


def main(degree, port, rank):
    register()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"tcp://localhost:{port}", rank=rank, world_size=2)
    config = ContextParallelConfig(**{degree: 2})
    mesh = init_device_mesh("cpu", config.mesh_shape, mesh_dim_names=config.mesh_dim_names)
    config.setup(rank, 2, torch.device("cpu"), mesh)
    for bits in CASES:
        expect_the_whole(ParallelConfig(context_parallel_config=config), bits, rank)
    torch.distributed.destroy_process_group()


def expect_the_whole(parallel, bits, rank):
    dtype, backend, bar = CASES[bits]
    torch.manual_seed(0)
    *whole, do = (torch.randn(BATCH, TOKENS, HEADS, DIM).to(dtype) for _ in range(4))
    mine = slice(TOKENS // 2 * rank, TOKENS // 2 * (rank + 1))

    def run(tensors, do, **how):
        leaves = [x.clone().requires_grad_() for x in tensors]
        lse = {"return_lse": True}
        o, lse = dispatch.dispatch_attention_fn(*leaves, backend=backend, attention_kwargs=lse, **how)
        return [o, lse, *torch.autograd.grad(o, leaves, do, retain_graph=True)]

    found = run([x[:, mine] for x in whole], do[:, mine], parallel_config=parallel)
    expected = [x[:, mine] for x in run(whole, do)]
    for name, got, want in zip(("o", "lse", "dq", "dk", "dv"), found, expected, strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype, (bits, name, got.shape, want.shape)
        error = ((got - want).float().norm() / want.float().norm()).item()
        assert error <= bar, f"{bits} bits, {name}: {error:.3g}, allowed {bar:.3g}"
        print(bits, name, error)
    without = dispatch.dispatch_attention_fn(*[x[:, mine] for x in whole], backend=backend, parallel_config=parallel)
    assert ((without - found[0]).float().norm() / found[0].float().norm()).item() <= bar
    try:
        found[1].sum().backward()
    except NotImplementedError as rejection:
        assert "drops the gradient of lse" in str(rejection)
    else:
        raise AssertionError("the gradient of lse is dropped in silence")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
