"""octet inside transformers and diffusers: models of random weights against their own attention."""

import octet
import pytest

torch = pytest.importorskip("torch")


def relative(got, want):
    return ((got - want).norm() / want.norm()).item()


def in_bf16(query, key, value, attn_mask=None, own=torch.nn.functional.scaled_dot_product_attention, **how):
    """torch's own attention in bf16 for float32 tensors."""
    return own(query.bfloat16(), key.bfloat16(), value.bfloat16(), attn_mask, **how).float()


class TestTransformers:
    """The bound on the logits of a float32 model with octet_bf16 is twice the error of the same model whose sdpa is
    computed in bf16. int8's bar is that of docs/numerics.md."""

    @pytest.fixture(scope="class")
    def transformers(self):
        transformers = pytest.importorskip("transformers")
        from octet.integrations.transformers import register

        assert {"octet", "octet_bf16", "octet_int8"} <= set(register())
        return transformers

    def llama(self, transformers, implementation):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8,
            num_key_value_heads=2, attn_implementation=implementation,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config).eval()

    def bert(self, transformers, implementation):
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            attn_implementation=implementation,
        )  # fmt: skip
        return transformers.BertForMaskedLM(config).eval()

    def logits(self, model, side, sdpa=torch.nn.functional.scaled_dot_product_attention):
        """Of three sequences of lengths 20, 13, 1, padded on a side; the padded places do not count."""
        torch.manual_seed(1)
        tokens = torch.randint(0, 128, (3, 20))
        mask = torch.ones(3, 20, dtype=torch.long)
        for row, length in enumerate((20, 13, 1)):
            mask[row, length:] = 0
        mask = mask.flip(1) if side == "left" else mask
        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.functional, "scaled_dot_product_attention", sdpa)
            return model(tokens, attention_mask=mask).logits[mask.bool()]

    @pytest.mark.parametrize("side", ["left", "right"])
    @pytest.mark.parametrize("kind", ["llama", "bert"])
    def test_logits_are_those_of_sdpa(self, transformers, kind, side):
        build = getattr(self, kind)
        want = self.logits(build(transformers, "sdpa"), side)
        half = self.logits(build(transformers, "sdpa"), side, in_bf16)
        allowed = 2 * relative(half, want)
        assert relative(self.logits(build(transformers, "octet"), side), want) < 1e-5
        found = {name: self.logits(build(transformers, name), side) for name in ("octet_bf16", "octet_int8")}
        assert 0 < relative(found["octet_bf16"], want) < allowed
        assert 0 < relative(found["octet_int8"], want) < 0.03
        model = build(transformers, "octet").bfloat16()
        own = relative(self.logits(build(transformers, "sdpa").bfloat16(), side).float(), want)
        assert relative(self.logits(model, side).float(), want) < 2 * own

    def test_greedy_generation(self, transformers):
        """With a cache: queries of one token against many keys, after a causal prefill, left-padded."""
        tokens = torch.tensor([[0, 0, 5, 17, 9], [3, 4, 5, 6, 7]])
        how = {"attention_mask": (tokens > 0).long(), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        want = self.llama(transformers, "sdpa").generate(tokens, **how)
        assert torch.equal(self.llama(transformers, "octet").generate(tokens, **how), want)
        assert self.llama(transformers, "octet_int8").generate(tokens, **how).shape == want.shape

    def test_training(self, transformers):
        tokens = torch.randint(0, 128, (2, 20))

        def gradients(implementation):
            model = self.llama(transformers, implementation).train()
            model(tokens, labels=tokens).loss.backward()
            return torch.cat([p.grad.flatten() for p in model.parameters()])

        want = gradients("sdpa")
        assert relative(gradients("octet"), want) < 1e-5
        assert relative(gradients("octet_int8"), want) < 0.03

    def test_refusals(self, transformers):
        model = self.bert(transformers, "octet").train()  # attention_probs_dropout_prob is 0.1
        with pytest.raises(octet.Unsupported, match="dropout: found 0.1, .*attention_dropout=0.0"):
            model(torch.zeros(1, 4, dtype=torch.long))
        forward = transformers.AttentionInterface()["octet"]
        q = torch.randn(1, 2, 4, 8)
        for name, value in {"softcap": 30.0, "s_aux": torch.zeros(2), "position_bias": torch.zeros(1, 2, 4, 4)}.items():
            with pytest.raises(octet.Unsupported, match=f"{name}: found .*use attn_implementation"):
                forward(torch.nn.Module(), q, q, q, None, **{name: value})


class TestDiffusers:
    @pytest.fixture(scope="class")
    def dispatch(self):
        pytest.importorskip("diffusers")
        from diffusers.models import attention_dispatch
        from octet.integrations.diffusers import register

        assert register() == register()
        return attention_dispatch

    def test_the_backends_are_members(self, dispatch):
        assert dispatch.AttentionBackendName("octet_int8").value == "octet_int8"
        assert "octet" in {x.value for x in dispatch.AttentionBackendName.__members__.values()}

    @pytest.mark.parametrize("mask", [None, (2, 9), (2, 1, 5, 9)])
    def test_it_is_the_native_backend(self, dispatch, mask):
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, n, 4, 16, requires_grad=True) for n in (5, 9, 9))
        mask = None if mask is None else torch.rand(mask) < 0.7
        attend = dispatch.dispatch_attention_fn
        want, got = (attend(q, k, v, attn_mask=mask, backend=name) for name in ("native", "octet"))
        torch.testing.assert_close(got, want)
        gradients = [torch.autograd.grad(o.sum(), (q, k, v)) for o in (want, got)]
        torch.testing.assert_close(gradients[1], gradients[0])
        assert 0 < relative(attend(q, k, v, attn_mask=mask, backend="octet_int8"), want) < 0.03

    def test_a_model_takes_it(self, dispatch):
        from diffusers import FluxTransformer2DModel

        torch.manual_seed(0)
        model = FluxTransformer2DModel(
            in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
        )  # fmt: skip
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

    def test_refusals(self, dispatch):
        q = torch.randn(1, 5, 2, 16)
        for keyword in ({"dropout_p": 0.1}, {"attention_kwargs": {"return_lse": True}}, {"parallel_config": object()}):
            with pytest.raises(octet.Unsupported, match="dropout_p|return_lse|_parallel_config"):
                dispatch.dispatch_attention_fn(q, q, q, backend="octet", **keyword)
