"""Models of transformers whose attention gets no mask: which of it is causal, and packed sequences that only position
ids tell. Random weights; against eager attention, which takes a mask that is left out for none."""

import octet
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from octet.integrations import transformers as integration  # noqa: E402
from transformers import masking_utils  # noqa: E402

# Both in float32: sums of at most 64 terms in another order, 64 * 2**-24 in each of two layers.
EXACT = 1e-5
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
FORWARD = integration._implementation(None)


@pytest.fixture(scope="module", autouse=True)
def registered():
    integration.register()


def relative(got, want):
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


# Attention without a mask

VOCABULARY = 64
TOKENS = torch.arange(5, 14)[None] % 60
BERT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 4, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0,
    "max_position_embeddings": 32, "initializer_range": 0.5,
}  # fmt: skip
BART = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 32,
    "dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "init_std": 0.5,
}  # fmt: skip
T5 = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4,
    "dropout_rate": 0.0, "pad_token_id": 0, "decoder_start_token_id": 0,
}  # fmt: skip
WHISPER = {
    "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 16, "suppress_tokens": None,
    "begin_suppress_tokens": None,
}  # fmt: skip
GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 32, "add_cross_attention": True,
    "initializer_range": 0.5, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
MLLAMA = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "cross_attention_layers": [1], "pad_token_id": 0,
    "initializer_range": 0.5, "max_position_embeddings": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
IMAGE = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 8,
    "patch_size": 2,
}  # fmt: skip


def states(keys):
    return torch.randn(1, keys, 32, generator=torch.Generator().manual_seed(5))


# Class, configuration, what it is given.
BOTH = {"input_ids": TOKENS, "decoder_input_ids": TOKENS[:, :6]}
DECODES = {"input_ids": TOKENS, "encoder_hidden_states": states(7)}
MODELS = {
    "bart": ("BartModel", BART, BOTH),
    "marian": ("MarianModel", BART, BOTH),
    "mbart": ("MBartModel", BART, BOTH),
    "pegasus": ("PegasusModel", BART, BOTH),
    "t5": ("T5Model", T5, BOTH),
    "umt5": ("UMT5Model", T5, BOTH),
    "whisper": (
        "WhisperModel",
        BART | WHISPER,
        {"input_features": torch.linspace(-1, 1, 160).reshape(1, 8, 20), "decoder_input_ids": TOKENS},
    ),
    "gpt2": ("GPT2Model", GPT2, DECODES),
    "bert": ("BertModel", BERT | {"is_decoder": True, "add_cross_attention": True}, DECODES),
    "musicgen": (
        "MusicgenDecoderModel" if hasattr(transformers, "MusicgenDecoderModel") else "MusicgenModel",
        {
            "vocab_size": VOCABULARY, "hidden_size": 32, "ffn_dim": 32, "num_hidden_layers": 1,
            "num_attention_heads": 4, "num_codebooks": 1, "dropout": 0.0, "initializer_factor": 0.5,
        },
        DECODES,
    ),
    "mllama": ("MllamaTextModel", MLLAMA, {"input_ids": TOKENS, "cross_attention_states": states(7)}),
    "mllama of as many keys": ("MllamaTextModel", MLLAMA, {"input_ids": TOKENS, "cross_attention_states": states(9)}),
    "blip_2": (
        "Blip2QFormerModel",
        BERT | {"encoder_hidden_size": 32, "cross_attention_frequency": 1},
        {"query_embeds": states(5), "encoder_hidden_states": states(7)},
    ),
    "pix2struct": (
        "Pix2StructTextModel",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4,
         "dropout_rate": 0.0, "initializer_range": 0.5},
        DECODES,
    ),
    "clip": ("CLIPVisionModel", IMAGE, {"pixel_values": torch.linspace(-1, 1, 192).reshape(1, 3, 8, 8)}),
}  # fmt: skip


def outputs(name, implementation, device="cpu"):
    model, sizes, given = MODELS[name]
    model = getattr(transformers, model)
    torch.manual_seed(0)
    made = model._from_config(model.config_class(**sizes), attn_implementation=implementation).eval().to(device)
    with torch.no_grad():
        for parameter, x in made.named_parameters():
            if parameter.endswith("gate"):  # Mllama begins with gates of cross-attention that are 0
                x.fill_(1)
        found = made(**{name: x.to(device) for name, x in given.items()})[0]
    assert found.isfinite().all()
    return found.cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_without_masks(name, device):
    """On a GPU in float32 too."""
    assert relative(outputs(name, "octet", device), outputs(name, "eager")) < EXACT


@pytest.mark.parametrize("name", ["MarkupLMModel", "SplinterModel", "AlignTextModel", "ClapTextModel"])
def test_a_model_that_does_not_say(name):
    """These do not say either that their attention is not causal. They are rejected when they are made."""
    model = getattr(transformers, name)
    with pytest.raises(octet.Unsupported, match=f"found 'octet', but {name} declares neither"):
        model._from_config(model.config_class(), attn_implementation="octet")


class Module(torch.nn.Module):
    def __init__(self, **attributes):
        super().__init__()
        for name, x in attributes.items():
            setattr(self, name, x)


class OwnCrossAttention(Module):
    pass


def attend(module, queries, keys, **how):
    random = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, n, 8, generator=random) for n in (queries, keys, keys))
    o, _ = FORWARD(module, q, k, v, how.pop("mask", None), **how)
    full, causal = (octet.attention(q, k, v, causal=x).transpose(1, 2) for x in (False, "top_left"))
    return o, full, causal


@pytest.mark.parametrize("keys", [5, 9])
@pytest.mark.parametrize(
    "module, how",
    [
        (Module(is_causal=False), {}),
        (Module(is_cross_attention=True), {}),
        (Module(is_cross_attention=True, is_causal=True), {}),
        (OwnCrossAttention(), {}),
        (OwnCrossAttention(is_causal=True), {}),
        (Module(), {"is_causal": False}),
        (Module(is_causal=True), {"is_causal": False}),
    ],
)
def test_attention_that_is_not_causal(module, how, keys):
    o, full, _ = attend(module, 5, keys, **how)
    assert torch.equal(o, full)


def test_attention_that_is_causal():
    for module, how in ((Module(is_causal=True), {}), (Module(), {"is_causal": True})):
        o, full, causal = attend(module, 5, 5, **how)
        assert torch.equal(o, causal) and relative(full, causal) > 0.1
    o, _, causal = attend(Module(), 5, 9, is_causal=True)
    assert torch.equal(o, causal)
    for module in (Module(), Module(is_causal=True)):  # the last query sees all
        o, full, _ = attend(module, 1, 9)
        assert torch.equal(o, full)


def test_attention_that_does_not_say():
    with pytest.raises(octet.Unsupported, match="^is_causal: found None, and Module .*allowed: True, False; pass"):
        attend(Module(), 5, 5)
    for keys in (3, 9):
        with pytest.raises(octet.Unsupported, match=f"5 queries and {keys} keys of Module.*is_causal=False for cross-"):
            attend(Module(is_causal=True), 5, keys)
    with pytest.raises(octet.Unsupported, match="^is_causal: found True with 5 queries and 3 keys"):
        attend(Module(), 5, 3, is_causal=True)


# Position ids that are written in place

LLAMA = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "initializer_range": 0.3,
}  # fmt: skip
GPT_OSS = LLAMA | {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 2, "sliding_window": 20}
FIRST, SECOND = [0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 4, 0, 1]


def in_place(positions, other):
    positions.copy_(other)


def through_data(positions, other):
    positions.data[:] = other


def through_numpy(positions, other):
    positions.numpy()[:] = other.numpy()


def through_an_alias(positions, other):
    torch.from_dlpack(positions).copy_(other)


@pytest.mark.parametrize("write", [in_place, through_data, through_numpy, through_an_alias])
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("family", ["Llama", "GptOss"])  # gpt-oss does not give its masks the position ids
def test_positions_that_are_written(family, inference, write):
    """One buffer of position ids for two batches that are packed differently, with a cache, as it is by default."""
    config = getattr(transformers, f"{family}Config")(**(GPT_OSS if family == "GptOss" else LLAMA))
    model = getattr(transformers, f"{family}ForCausalLM")
    torch.manual_seed(0)
    own = model._from_config(config, attn_implementation="eager").eval()
    found = model._from_config(config, attn_implementation="octet").eval()
    found.load_state_dict(own.state_dict())
    with torch.inference_mode() if inference else torch.no_grad():
        buffer = torch.tensor([FIRST])
        for positions in (FIRST, SECOND, FIRST):
            write(buffer, torch.tensor([positions]))
            starts = [i for i, x in enumerate(positions) if x == 0] + [len(positions)]
            parts = [own(TOKENS[:, a:b]).logits for a, b in zip(starts, starts[1:], strict=False)]
            assert relative(found(TOKENS, position_ids=buffer).logits, torch.cat(parts, 1)) < EXACT


def llama(implementation="octet"):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM._from_config(
        transformers.LlamaConfig(**LLAMA), attn_implementation=implementation
    ).eval()


def test_positions_are_read_once_for_all_layers(monkeypatch):
    """Where the model gives them to its mask, no layer reads them: on a GPU it would wait for them."""
    monkeypatch.setattr(integration, "beginnings", lambda *given: pytest.fail("a layer read the position ids"))
    with torch.no_grad():
        llama()(TOKENS, position_ids=torch.tensor([SECOND]))
        llama()(TOKENS, position_ids=torch.arange(9)[None])
        llama()(TOKENS)
        llama()(TOKENS, attention_mask=torch.ones_like(TOKENS))


def test_positions_beside_padding():
    """Where there is padding, the position ids of its tokens begin nothing."""
    mask = torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1, 1]])
    positions = (mask.cumsum(1) - 1) * mask
    assert (positions[:, 1:] == 0).any()
    with torch.no_grad():
        got, want = (
            llama(name)(TOKENS, attention_mask=mask, position_ids=positions).logits for name in ("octet", "eager")
        )
    assert relative(got[mask.bool()], want[mask.bool()]) < EXACT


def test_what_masks_rely_on():
    """transformers gives the position ids and the arguments of the mask function to one function of its own."""
    own = masking_utils._preprocess_mask_arguments.__wrapped__
    assert not hasattr(own, "__wrapped__")
    config = transformers.LlamaConfig(**LLAMA)
    config._attn_implementation = "octet"
    positions = torch.tensor([SECOND])
    found = own(config, states(9), None, None, positions, 0)
    assert found[0] is False and found[3:] == (9, 9, 0, 0)
    assert type(masking_utils._preprocess_mask_arguments(config, states(9), None, None, positions, 0)[-1]) is not int
    config._attn_implementation = "sdpa"
    assert type(masking_utils._preprocess_mask_arguments(config, states(9), None, None, positions, 0)[-1]) is int
