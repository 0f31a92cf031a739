"""octet inside diffusers: its backends against the native one, alone, on a GPU if there is one, and over two
processes."""

import octet
import pytest
from torch_shared import run_two_processes

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
from diffusers.models import attention_dispatch as dispatch  # noqa: E402
from octet.integrations.diffusers import register  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


@pytest.fixture(scope="module", autouse=True)
def registered():
    assert register() == register()


def relative(got, want):
    return ((got - want).norm() / want.norm()).item()


def tensors(*tokens, requires_grad=True):
    torch.manual_seed(0)
    return [torch.randn(2, n, 4, 16, requires_grad=requires_grad) for n in tokens]


def test_the_backends_are_members():
    assert dispatch.AttentionBackendName("octet_int8").value == "octet_int8"
    assert "octet" in {x.value for x in dispatch.AttentionBackendName.__members__.values()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("mask", [None, (2, 9), (2, 1, 5, 9)])
def test_it_is_the_native_backend(mask, kind, device):
    """The native one on the CPU."""
    x = tensors(5, 9, 9)
    mask = None if mask is None else torch.rand(mask) < 0.7
    mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf) if mask is not None and kind == "float" else mask
    attend = dispatch.dispatch_attention_fn
    results = []
    for name, where in (("native", "cpu"), ("octet", device)):
        leaves = [y.detach().to(where).requires_grad_() for y in x]
        o = attend(*leaves, attn_mask=None if mask is None else mask.to(where), backend=name)
        results.append([y.cpu() for y in (o.detach(), *torch.autograd.grad(o.sum(), leaves))])
    torch.testing.assert_close(*results)
    if device == "cpu":
        assert 0 < relative(attend(*x, attn_mask=mask, backend="octet_int8"), results[0][0]) < 0.03


@pytest.mark.parametrize("mask", [None, (2, 9), (2, 1, 5, 9)])
def test_lse(mask):
    """[batch, token, head], as diffusers' context parallelism has it."""
    q, k, v = tensors(5, 9, 9)
    mask = None if mask is None else torch.rand(mask) < 0.7
    o, lse = dispatch.dispatch_attention_fn(
        q, k, v, attn_mask=mask, scale=0.3, backend="octet", attention_kwargs={"return_lse": True}
    )
    logits = torch.einsum("bqhd,bkhd->bqhk", q.double(), k.double()) * 0.3
    if mask is not None:
        seen = mask[:, None, None] if mask.ndim == 2 else mask.transpose(1, 2)
        logits = logits.masked_fill(~seen, -torch.inf)
    torch.testing.assert_close(lse, logits.logsumexp(-1).float())
    want = torch.einsum("bqhk,bkhd->bqhd", logits.softmax(-1).nan_to_num(), v.double()).float()
    torch.testing.assert_close(o, want)
    causal, _ = dispatch.dispatch_attention_fn(
        q, k, v, is_causal=True, backend="octet", attention_kwargs={"return_lse": True}
    )
    torch.testing.assert_close(causal, dispatch.dispatch_attention_fn(q, k, v, is_causal=True, backend="native"))


def flux():
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    return FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip


def test_a_model_takes_it():
    model = flux()
    how = {
        "hidden_states": torch.randn(1, 16, 4), "encoder_hidden_states": torch.randn(1, 8, 32),
        "pooled_projections": torch.randn(1, 32), "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(8, 3),
    }  # fmt: skip
    with torch.no_grad():
        want = model(**how).sample
        model.set_attention_backend("octet")
        got = model(**how).sample
        model.set_attention_backend("octet_int8")
        coarse = model(**how).sample
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert 0 < relative(coarse, want) < 0.03


@pytest.mark.parametrize("model", ["UNet2DConditionModel", "SD3Transformer2DModel"])
def test_a_model_that_would_pass_over_it(model):
    import diffusers

    sizes = {
        "UNet2DConditionModel": {
            "block_out_channels": (8, 8), "layers_per_block": 1, "norm_num_groups": 4, "cross_attention_dim": 8,
            "attention_head_dim": 2, "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        },
        "SD3Transformer2DModel": {
            "sample_size": 8, "num_layers": 1, "attention_head_dim": 8, "num_attention_heads": 2,
            "caption_projection_dim": 16, "joint_attention_dim": 8, "pooled_projection_dim": 8,
        },
    }  # fmt: skip
    made = getattr(diffusers, model)(**sizes[model])
    with pytest.raises(octet.Unsupported, match=f"found 'octet_int8', but no attention of {model} .*octet.patch_sdpa"):
        made.set_attention_backend("octet_int8")
    made.set_attention_backend("native")


def test_a_name_that_octet_has_not():
    with pytest.raises(octet.InvalidArgument, match="backend: found 'octet_int3', allowed of octet's: .*'octet_int8'"):
        flux().set_attention_backend("octet_int3")


def test_a_model_that_follows_in_part():
    model = flux()

    class Own(torch.nn.Module):
        pass

    model.transformer_blocks[0].attn.processor = Own()
    with pytest.warns(UserWarning, match="1 of 2 attention modules of FluxTransformer2DModel .*processors: 'Own'"):
        model.set_attention_backend("octet")


class Config:
    def __init__(self, **degrees):
        from diffusers.models._modeling_parallel import ContextParallelConfig

        self.context_parallel_config = ContextParallelConfig(**degrees)


def test_rejections():
    q, k, v = tensors(5, 5, 5)
    attend = dispatch.dispatch_attention_fn
    with_lse = {"attention_kwargs": {"return_lse": True}}
    for how in ({}, with_lse):
        with pytest.raises(octet.Error, match="dropout_p: found 1.5"):
            attend(q, k, v, dropout_p=1.5, backend="octet", **how)
        with pytest.raises(octet.InvalidArgument, match="enable_gqa: .*False"):
            attend(q, k[:, :, :2], v[:, :, :2], backend="octet", **how)
        with pytest.raises(octet.InvalidArgument, match="attn_mask: given together with is_causal"):
            attend(q, k, v, is_causal=True, attn_mask=torch.ones(5, 5, dtype=torch.bool), backend="octet", **how)
    with pytest.raises(octet.Unsupported, match="attn_mask: found .*with ring attention, allowed: None"):
        mask = torch.ones(2, 5, dtype=torch.bool)
        attend(q, k, v, attn_mask=mask, backend="octet", parallel_config=Config(ring_degree=2))
    with pytest.raises(ValueError, match="Causal attention is not yet supported"):  # by diffusers
        attend(q, k, v, is_causal=True, backend="octet", parallel_config=Config(ring_degree=2))


@pytest.mark.parametrize("degree", ["ulysses_degree", "ring_degree"])
def test_two_processes(degree):
    """Each computes its half of the tokens; results and gradients are those of one process."""
    run_two_processes("two_processes.py", degree)
