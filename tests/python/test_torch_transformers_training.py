"""Models of transformers that train with octet as with their own attention: 20 steps from the same random weights, on
the CPU and, where there is one, on a GPU."""

import functools
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from octet.compat import flash_attn  # noqa: E402
from octet.integrations import NAMES  # noqa: E402
from octet.integrations import transformers as integration  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
STEPS = 20


@pytest.fixture(scope="module", autouse=True)
def registered():
    integration.register()


# Models


class Sizes(NamedTuple):
    hidden: int
    heads: int
    dim: int  # of a head
    latent_dims: tuple[int, int, int]  # of a head of latent attention: q and k without and with positions, v
    rows: int
    tokens: int
    window: int
    vocabulary: int
    image: tuple[int, int, int]  # pixels of a side, of a patch's side; patches of a window's side
    init: float  # standard deviation of weights
    rate: float


# Small ones on the CPU; on a GPU such as its fast kernels take.
SIZES = {
    "cpu": Sizes(32, 4, 8, (8, 4, 8), 4, 20, 6, 64, (16, 2, 4), 0.1, 2e-3),
    "cuda": Sizes(256, 4, 64, (128, 64, 128), 8, 384, 128, 512, (128, 4, 16), 0.05, 5e-4),
}


def bert(s, dropout):
    return {
        "vocab_size": s.vocabulary, "hidden_size": s.hidden, "intermediate_size": 2 * s.hidden, "num_hidden_layers": 2,
        "num_attention_heads": s.heads, "max_position_embeddings": s.tokens, "initializer_range": s.init,
        "attention_probs_dropout_prob": dropout, "hidden_dropout_prob": dropout,
    }  # fmt: skip


def gpt2(s, dropout):
    return {
        "vocab_size": s.vocabulary, "n_embd": s.hidden, "n_layer": 2, "n_head": s.heads, "n_positions": s.tokens,
        "initializer_range": s.init, "attn_pdrop": dropout, "resid_pdrop": dropout, "embd_pdrop": dropout,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def t5(s, dropout):
    """Of version 1.1, whose activation has no kink: where a value changes its sign, rounding would change gradients."""
    return {
        "vocab_size": s.vocabulary, "d_model": s.hidden, "d_kv": s.dim, "d_ff": 2 * s.hidden, "num_layers": 2,
        "num_heads": s.heads, "feed_forward_proj": "gated-gelu", "dropout_rate": dropout, "pad_token_id": 0,
        "decoder_start_token_id": 0,
    }  # fmt: skip


def swin(s, dropout):
    """A stage of two layers, the second of shifted windows, and one of one window."""
    image, patch, window = s.image
    return {
        "image_size": image, "patch_size": patch, "window_size": window, "embed_dim": s.hidden, "depths": [2, 1],
        "num_heads": [s.heads, 2 * s.heads], "mlp_ratio": 2.0, "num_labels": 10, "initializer_range": s.init,
        "attention_probs_dropout_prob": dropout, "hidden_dropout_prob": dropout, "drop_path_rate": dropout,
    }  # fmt: skip


def llama(s, dropout):
    return {
        "vocab_size": s.vocabulary, "hidden_size": s.hidden, "intermediate_size": 2 * s.hidden, "num_hidden_layers": 2,
        "num_attention_heads": s.heads, "num_key_value_heads": s.heads // 2, "head_dim": s.dim, "pad_token_id": 0,
        "max_position_embeddings": s.tokens, "initializer_range": s.init, "attention_dropout": dropout,
    }  # fmt: skip


def gemma2(s, dropout):
    sizes = {"query_pre_attn_scalar": s.dim, "attn_logit_softcapping": 1.0, "sliding_window": s.window}
    return llama(s, dropout) | sizes


def gpt_oss(s, dropout):
    """Every token goes to all experts, as does one of deepseek to its only one: rounding chooses none."""
    return llama(s, dropout) | {"num_local_experts": 2, "num_experts_per_tok": 2, "sliding_window": s.window}


def deepseek(s, dropout):
    nope, rope, value = s.latent_dims
    return llama(s, dropout) | {
        "q_lora_rank": s.hidden // 2, "kv_lora_rank": s.hidden // 2, "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope, "v_head_dim": value, "head_dim": rope, "num_key_value_heads": s.heads,
        "first_k_dense_replace": 2,
    }  # fmt: skip


def mpt(s, dropout):
    """Without dropout, of which its configuration takes whole numbers alone."""
    return {
        "vocab_size": s.vocabulary, "d_model": s.hidden, "n_heads": s.heads, "n_layers": 2, "expansion_ratio": 2,
        "max_seq_len": s.tokens, "initializer_range": s.init,
    }  # fmt: skip


# Class, configuration, the attention to compare with: sdpa has neither softcap nor sinks.
MODELS = {
    "bert": ("BertForMaskedLM", bert, "sdpa"),
    "gpt2": ("GPT2LMHeadModel", gpt2, "sdpa"),
    "t5": ("T5ForConditionalGeneration", t5, "sdpa"),
    "swin": ("SwinForImageClassification", swin, "sdpa"),
    "llama": ("LlamaForCausalLM", llama, "sdpa"),
    "gemma2": ("Gemma2ForCausalLM", gemma2, "eager"),
    "gpt_oss": ("GptOssForCausalLM", gpt_oss, "eager"),
    "deepseek": ("DeepseekV3ForCausalLM", deepseek, "sdpa"),
    "mpt": ("MptForCausalLM", mpt, "eager"),
}


def alibi_attention(self, precision, states, position_bias, **_):
    """The forward pass of MPT's attention, which has no other way to octet than flash_attn_func. Padding on the right
    needs no mask: causal queries that are tokens do not see it."""
    q, k, v = (x.unflatten(2, (self.n_heads, -1)) for x in self.Wqkv(states).chunk(3, dim=2))
    slopes = position_bias[:, 0, -1] - position_bias[:, 0, -2]
    how = {"causal": True, "alibi_slopes": slopes, "precision": precision}
    o = flash_attn.flash_attn_func(q, k, v, self.attn_dropout_p, self.softmax_scale, **how)
    return self.out_proj(o.flatten(2)), None


def build(kind, implementation, device, dropout):
    """A model in training, of the same weights for each implementation."""
    name, configure, own = MODELS[kind]
    model = getattr(transformers, name)
    torch.manual_seed(0)
    config = model.config_class(**configure(SIZES[device], dropout))
    if kind != "mpt":
        return model._from_config(config, attn_implementation=implementation or own).train().to(device)
    made = model._from_config(config, attn_implementation=own).train().to(device)
    for block in made.transformer.blocks:
        block.attn.attn_dropout_p = block.resid_attn_dropout.p = block.ffn.hidden_dropout = dropout
        if implementation:
            block.attn.forward = functools.partial(alibi_attention, block.attn, NAMES[implementation])
    return made


def batch_of(kind, device):
    """Sequences of different lengths, padded on the right, or images."""
    s = SIZES[device]
    random = torch.Generator().manual_seed(1)
    if kind == "swin":
        images = torch.randn(s.rows, 3, s.image[0], s.image[0], generator=random)
        return {"pixel_values": images, "labels": torch.arange(s.rows)}
    tokens = torch.randint(3, s.vocabulary, (s.rows, s.tokens), generator=random)
    lengths = torch.linspace(s.tokens, s.tokens // 2, s.rows).long()
    mask = torch.arange(s.tokens) < lengths[:, None]
    labels = torch.where(mask, tokens, -100)
    if kind == "bert":  # each token is to tell the one before
        labels = torch.where(mask, tokens.roll(1, 1), -100)
    if kind == "t5":  # fewer tokens of the decoder: queries and keys differ in number
        labels = labels[:, : 3 * s.tokens // 4].contiguous()
    return {"input_ids": torch.where(mask, tokens, 0), "attention_mask": mask.long(), "labels": labels}


def losses(kind, implementation, device, how=None, dropout=0.0, seed=2, prepare=lambda model: None):
    """The losses of the steps, in float64, on one batch. `how`: None, all in float32; or a name of BF16."""
    model = build(kind, implementation, device, dropout)
    prepare(model)
    dtype = torch.bfloat16 if how == "weights" else torch.float32
    model = model.to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=SIZES[device].rate)
    given = {name: x.to(device, dtype if x.is_floating_point() else None) for name, x in batch_of(kind, device).items()}
    found = []
    torch.manual_seed(seed)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=how == "autocast"):
            loss = model(**given).loss
        loss.backward()
        optimizer.step()
        found.append(loss.detach().double())
    found = torch.stack(found).cpu()
    assert found.isfinite().all() and found[-1] < found[0]
    return found


# Without dropout


def excess(found, want, others, dtype, roundings):
    """By how much losses are further from `want` than they may: twice the largest distance of others over all steps,
    and half a unit in the last place of the loss for each of the two that is rounded to that type."""
    spread = max((x - want).abs().max() for x in others)
    half_a_unit = torch.finfo(dtype).eps / 2 * 2 ** want.log2().floor()
    return ((found - want).abs() - 2 * spread - roundings * half_a_unit).max().item()


def nudge(seed, model):
    """Moves every weight to one of its neighbours in float32."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for x in model.parameters():
            up = torch.randint(0, 2, x.shape, generator=random, dtype=torch.bool)
            x.copy_(torch.nextafter(x, torch.where(up, torch.inf, -torch.inf)))


@pytest.mark.parametrize("kind", MODELS)
def test_float32(kind):
    """Octet's losses are those of the model's own attention, up to the distance of those of the same attention from
    weights that are moved by a unit in the last place: rounding, carried through 20 steps. Attention in bf16 is further
    from them, so that bound sees errors of that size."""
    want = losses(kind, None, "cpu")
    others = [losses(kind, None, "cpu", prepare=functools.partial(nudge, seed)) for seed in range(4)]
    assert excess(losses(kind, "octet", "cpu"), want, others, torch.float32, 2) <= 0
    assert excess(losses(kind, "octet_bf16", "cpu"), want, others, torch.float32, 2) > 0


BF16 = ["weights", "autocast"]  # everything in bf16, or weights in float32 under torch.autocast


# On a CPU rounding at bf16 is that of torch's other operators, which test_float32 has not.
@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("how", BF16)
@pytest.mark.parametrize("kind", MODELS)
def test_bf16(kind, how, device):
    """Octet's losses are at most twice as far from those in float32, from the same weights, as those of the model's own
    attention."""

    def round_weights(model):
        if how == "weights":
            model.bfloat16().float()

    want = losses(kind, None, device, prepare=round_weights)
    own, found = (losses(kind, implementation, device, how) for implementation in (None, "octet"))
    assert excess(found, want, [own], torch.bfloat16, 1) <= 0


# With dropout


@pytest.fixture
def repeatable():
    """Of torch's own operators; octet's follow."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", MODELS)
def test_dropout(kind, device, repeatable):
    """Of weights of attention and of what the model drops besides. A seed repeats the losses bit for bit."""
    how = None if device == "cpu" else "weights"
    first, again, other = (losses(kind, "octet", device, how, dropout=0.1, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)
