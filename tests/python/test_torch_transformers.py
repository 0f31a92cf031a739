"""octet inside transformers: models of random weights against their own attention, on the CPU and, where there is one,
on a GPU."""

import ast
import pathlib
import re
import sys

import octet
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from octet.integrations import _masks  # noqa: E402
from octet.integrations import transformers as integration  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
VOCABULARY = 128
# Both in float32: sums of at most 64 terms in another order, 64 * 2**-24 in each of two layers.
EXACT = 1e-5


@pytest.fixture(scope="module", autouse=True)
def names():
    found = integration.register()
    assert {"octet", "octet_bf16", "octet_int8"} <= set(found) and found == integration.register()
    return found


def relative(got, want):
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
NO_DROPOUT = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
BART = {
    "vocab_size": VOCABULARY, "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
    "dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
# Class, configuration, the attention to compare with.
MODELS = {
    "llama": ("LlamaForCausalLM", SIZES, "sdpa"),
    "qwen2": (
        "Qwen2ForCausalLM",
        SIZES | {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1},
        "sdpa",
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        SIZES | {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 2, "sliding_window": 6},
        "eager",
    ),
    "bert": ("BertForMaskedLM", SIZES | NO_DROPOUT, "sdpa"),
    "modernbert": (
        "ModernBertForMaskedLM",
        SIZES | {"local_attention": 8, "global_attn_every_n_layers": 2, "pad_token_id": 0},
        "sdpa",
    ),
    "bart": ("BartForConditionalGeneration", BART, "sdpa"),
}
CAUSAL = ["llama", "qwen2", "gpt_oss"]  # gpt_oss: with sinks, which sdpa has not


def build(kind, implementation, device="cpu", dtype=None):
    """The same weights for each implementation."""
    name, sizes, own = MODELS[kind]
    torch.manual_seed(0)
    model = getattr(transformers, name)
    made = model._from_config(model.config_class(**sizes), attn_implementation=implementation or own)
    return made.eval().to(device, dtype or (torch.float32 if device == "cpu" else torch.bfloat16))


def batch_of(padding):
    """Tokens and mask of sequences of 20, 13, 1 and 0 tokens; "both": with padding on both sides."""
    torch.manual_seed(1)
    tokens = torch.randint(3, VOCABULARY, (4, 20))
    mask = torch.zeros(4, 20, dtype=torch.long)
    for row, length in enumerate((20, 13, 1, 0)):
        first = {"right": 0, "left": 20 - length, "both": (20 - length) // 2}[padding]
        mask[row, first : first + length] = 1
    return tokens, mask


def logits_and_gradients(model, tokens, mask):
    """Logits at the tokens, and the gradient of a loss that leaves the padding out."""
    device = next(model.parameters()).device
    tokens, mask = tokens.to(device), mask.to(device)
    labels = torch.where(mask.bool(), tokens, -100)
    how = {}
    if model.config.is_encoder_decoder:  # fewer tokens of the decoder: keys and queries differ in number
        how = {"decoder_input_ids": tokens[:, :14], "decoder_attention_mask": mask[:, :14]}
        labels, mask_of_logits = labels[:, :14].contiguous(), mask[:, :14]
    else:
        mask_of_logits = mask
    made = model(tokens, attention_mask=mask, labels=labels, **how)
    assert made.logits.isfinite().all()
    made.loss.backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return made.logits[mask_of_logits.bool()].detach().cpu(), gradients.cpu()


def expect_parity(kind, device, run):
    """`run` of a model, a tuple of tensors: with octet as with the model's own attention. On a GPU in bf16, where octet
    may err twice as much against float32 as the own attention does."""
    want = run(build(kind, None))
    if device == "cpu":
        for got, expected in zip(run(build(kind, "octet")), want, strict=True):
            assert relative(got, expected) < EXACT
        return
    own, found = run(build(kind, None, device)), run(build(kind, "octet", device))
    for got, other, expected in zip(found, own, want, strict=True):
        assert relative(got, expected) < 2 * relative(other, expected)


@pytest.fixture
def no_mask_tensors(monkeypatch):
    """octet never gets a mask tensor, without which kernels are faster."""
    own = integration._api.attention

    def attention(*args, mask=None, **options):
        assert mask is None
        return own(*args, **options)

    monkeypatch.setattr(integration._api, "attention", attention)
    monkeypatch.setattr(_masks.Mask, "dense", lambda self: pytest.fail("a mask was built"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("padding", ["left", "right", "both"])
@pytest.mark.parametrize("kind", MODELS)
def test_padded_batches(kind, padding, device, no_mask_tensors):
    expect_parity(kind, device, lambda model: logits_and_gradients(model, *batch_of(padding)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", MODELS)
def test_a_mask_that_hides_nothing(kind, device, no_mask_tensors):
    tokens, _ = batch_of("right")
    expect_parity(kind, device, lambda model: logits_and_gradients(model, tokens, torch.ones_like(tokens)))


@pytest.mark.parametrize("device", DEVICES)
def test_gemma_2_caps_its_logits(device):
    """Compares it with its eager attention, as sdpa has no softcap; on a GPU also in float32, and on the same device:
    half a unit in the last place of the weights moves these gradients by 9e-6. Layers alternate between a sliding
    window and none. Padding is on the right: eager attention gives queries that are padding other values, from which
    the first token is predicted."""
    sizes = {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 1, "initializer_range": 0.3}

    def run(implementation, softcap, where):
        torch.manual_seed(0)
        config = transformers.Gemma2Config(**SIZES | sizes, attn_logit_softcapping=softcap)
        model = transformers.Gemma2ForCausalLM._from_config(config, attn_implementation=implementation).eval()
        return logits_and_gradients(model.to(where), *batch_of("right"))

    want, found, other = run("eager", 0.5, device), run("octet", 0.5, device), run("octet", None, device)
    for got, expected, uncapped in zip(found, want, other, strict=True):
        assert relative(got, expected) < EXACT < 1e-3 < relative(uncapped, expected)


def in_bf16(query, key, value, attn_mask=None, own=torch.nn.functional.scaled_dot_product_attention, **how):
    """torch's own attention in bf16 for float32 tensors."""
    return own(query.bfloat16(), key.bfloat16(), value.bfloat16(), attn_mask, **how).float()


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_precisions(kind, monkeypatch):
    """The bound on octet_bf16 is twice the error of the same float32 model whose sdpa is computed in bf16. The bar of
    int8 is that of docs/numerics.md."""
    run = lambda name: logits_and_gradients(build(kind, name), *batch_of("left"))
    want, want_gradient = run("sdpa")
    coarse, coarse_gradient = run("octet_int8")
    assert 0 < relative(coarse, want) < 0.03 and 0 < relative(coarse_gradient, want_gradient) < 0.03
    found = run("octet_bf16")[0]
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", in_bf16)
    assert 0 < relative(found, want) < 2 * relative(run("sdpa")[0], want)


# Packed batches


LENGTHS = (7, 1, 12, 5)


def packed_batch(form):
    """Arguments of a model for LENGTHS sequences one after the other in one row, and the sequences."""
    torch.manual_seed(2)
    sequences = [torch.randint(3, VOCABULARY, (1, n)) for n in LENGTHS]
    how = {"use_cache": form.endswith("a cache")}
    if "positions" in form:
        how["position_ids"] = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    if "lengths" in form:
        cu = torch.tensor((0, *LENGTHS)).cumsum(0).int()
        longest = {"max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS)}
        how |= {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu} | longest
    return torch.cat(sequences, 1), how, sequences


def to(device, how):
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in how.items()}


FORMS = ["lengths", "lengths and positions", "positions", "positions and a cache"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", CAUSAL)
def test_packed_batches(kind, form, device, no_mask_tensors):
    """Logits and gradients are those of the sequences one by one."""
    tokens, how, sequences = packed_batch(form)

    def run(model):
        device = next(model.parameters()).device
        if model.config._attn_implementation == "octet":
            logits = model(tokens.to(device), **to(device, how)).logits
        else:
            logits = torch.cat([model(x.to(device), use_cache=False).logits for x in sequences], 1)
        weights = torch.linspace(-1, 1, logits.numel(), device=device).reshape(logits.shape)
        (logits.float() * weights).sum().backward()
        return logits.detach().cpu(), torch.cat([p.grad.flatten() for p in model.parameters()]).cpu()

    expect_parity(kind, device, run)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("kind", CAUSAL)
def test_packed_rows(kind, cached):
    """Several rows, packed differently."""
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 0, 1]])
    tokens = torch.randint(3, VOCABULARY, positions.shape)
    parts = ((0, 0, 3), (0, 3, 8), (1, 0, 6), (1, 6, 8))
    with torch.no_grad():
        got = build(kind, "octet")(tokens, position_ids=positions, use_cache=cached).logits
        own = build(kind, None)
        for row, begin, end in parts:
            want = own(tokens[row : row + 1, begin:end], use_cache=False).logits
            assert relative(got[row : row + 1, begin:end], want) < EXACT


def test_rejections_of_packed_batches():
    tokens, how, _ = packed_batch("lengths")
    model = build("llama", "octet")
    with pytest.raises(octet.Unsupported, match="cu_seq_lens_k: found None, allowed: with the other"):
        model(tokens, **how | {"cu_seq_lens_k": None})
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    with pytest.raises(octet.Unsupported, match="cu_seq_lens_q: found together with an attention_mask"):
        model(tokens, attention_mask=mask, **how)
    wrong = torch.tensor([0, 7, 12], dtype=torch.int32)
    with pytest.raises(octet.Error, match="cu_seqlens_q: runs from 0 to 12, expected 0 to the 25"):
        model(tokens, **how | {"cu_seq_lens_q": wrong, "cu_seq_lens_k": wrong})
    with pytest.raises(octet.Unsupported, match="seq_idx: found an array .* also needs cu_seq_lens_q"):
        model(tokens, seq_idx=torch.zeros_like(tokens))
    model(tokens, seq_idx=torch.zeros_like(tokens), **how)


# Generation


def generated(model, padding, **how):
    rows = {
        "left": [[0, 0, 5, 17, 9], [3, 4, 5, 6, 7], [0, 0, 0, 0, 8]],
        "between": [[5, 17, 0, 0, 9], [3, 4, 5, 6, 7], [8, 0, 4, 0, 2]],
    }
    tokens = torch.tensor(rows[padding])
    tokens = tokens.to(next(model.parameters()).device)
    how = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0} | how
    with torch.no_grad():
        return model.generate(tokens, attention_mask=(tokens > 0).long(), **how)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", [{}, {"cache_implementation": "static"}, {"prefill_chunk_size": 2}], ids=str)
@pytest.mark.parametrize("padding", ["left", "between"])
@pytest.mark.parametrize("kind", CAUSAL)
def test_greedy_generation(kind, padding, how, device, request):
    """With caches; longer than the window. Only a mask tensor can say a window over padding between tokens."""
    if padding == "left" or kind == "llama":
        request.getfixturevalue("no_mask_tensors")
    want = generated(build(kind, None), padding, **how)
    got = generated(build(kind, "octet", device), padding, **how).cpu()
    if device == "cpu":
        assert torch.equal(got, want)
        return
    # In bf16: tokens whose float32 logits are the largest, up to the error of torch's own attention in bf16.
    mask = torch.cat([got[:, :5] > 0, torch.ones(3, 10, dtype=torch.bool)], 1).long()
    with torch.no_grad():
        exact = build(kind, None)(got, attention_mask=mask).logits[:, 4:-1]
        own = build(kind, None, device)(got.to(device), attention_mask=mask.to(device)).logits[:, 4:-1].float().cpu()
    chosen = exact.gather(2, got[:, 5:, None])[..., 0]
    assert (exact.amax(-1) - chosen).max() <= 4 * (own - exact).abs().max()


def test_generation_in_8_bits():
    assert generated(build("llama", "octet_int8"), "left").shape == (3, 15)


# Masks that are tensors, and biases


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_of_four_dimensions(kind, device):
    """In float32; sdpa on the CPU."""
    torch.manual_seed(3)
    tokens = torch.randint(3, VOCABULARY, (2, 9))
    mask = (torch.rand(2, 1, 9, 9) < 0.7) | torch.eye(9, dtype=torch.bool)
    if kind == "float":
        mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    with torch.no_grad():
        want = build("llama", "sdpa")(tokens, attention_mask=mask).logits
        got = build("llama", "octet", device, torch.float32)(tokens.to(device), attention_mask=mask.to(device)).logits
    assert relative(got.cpu(), want) < EXACT


T5 = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4,
    "dropout_rate": 0.0, "pad_token_id": 0, "decoder_start_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
def test_position_bias(device):
    """T5's, which is learned, in inference. sdpa on the CPU."""
    torch.manual_seed(4)
    tokens, mask = batch_of("right")
    mask[3, 0] = 1  # transformers lets a query without keys attend to all of them, octet to none
    how = {"input_ids": tokens, "attention_mask": mask, "decoder_input_ids": tokens[:, :7]}
    results = []
    for name, where in (("sdpa", "cpu"), ("octet", device)):
        torch.manual_seed(0)
        config = transformers.T5Config(**T5)
        model = transformers.T5ForConditionalGeneration._from_config(config, attn_implementation=name).eval().to(where)
        with torch.no_grad():
            logits = model(**to(where, how)).logits
            made = model.generate(tokens.to(where), attention_mask=mask.to(where), max_new_tokens=5)
        results.append((logits.cpu(), made.cpu()))
    (want, of_sdpa), (got, of_octet) = results
    assert relative(got, want) < EXACT and torch.equal(of_octet, of_sdpa)


@pytest.mark.parametrize("device", DEVICES)
def test_position_bias_trains(device):
    """Three steps of T5 in float32 beside eager attention: the same losses, gradients of the table and weights."""
    torch.manual_seed(5)
    tokens, mask = batch_of("right")
    mask[3, 0] = 1
    how = {"input_ids": tokens, "attention_mask": mask, "labels": torch.randint(3, VOCABULARY, (tokens.shape[0], 7))}
    how = to(device, how)
    losses, tables = [], []
    for name in ("eager", "octet"):
        torch.manual_seed(0)
        config = transformers.T5Config(**T5)
        model = (
            transformers.T5ForConditionalGeneration._from_config(config, attn_implementation=name).train().to(device)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(**how).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        biases = {x: p for x, p in model.named_parameters() if "relative_attention_bias" in x}
        assert len(biases) == 2 and all(p.grad.norm() > 0 for p in biases.values())
        tables.append([x for p in biases.values() for x in (p.grad, p.detach())])
    assert losses[:3] == pytest.approx(losses[3:], rel=1e-5) and losses[2] < losses[0]
    for got, want in zip(tables[1], tables[0], strict=True):
        assert relative(got, want) < EXACT


# Keywords


FORWARD = integration._implementation(None)
CAUSAL_MODULE = torch.nn.Module()
CAUSAL_MODULE.is_causal = True
Q = torch.zeros(1, 2, 4, 8)
REJECTED = {
    "cache": object(), "indices": torch.zeros(1, 4, 2), "block_indices": torch.zeros(1, 4, 2),
    "sinks": torch.zeros(1, 2, 4, 1), "attention_bias": Q, "head_mask": torch.ones(2), "anything": True,
    "output_attentions": True, "sliding_window": 0,
}  # fmt: skip


def served():
    code = FORWARD.__code__
    return set(code.co_varnames[: code.co_argcount])


@pytest.mark.parametrize("name", REJECTED)
def test_a_keyword_that_is_rejected(name):
    with pytest.raises(octet.Unsupported, match=f"^{name}: found .*allowed: "):
        FORWARD(CAUSAL_MODULE, Q, Q, Q, None, **{name: REJECTED[name]})
    FORWARD(CAUSAL_MODULE, Q, Q, Q, None, **{name: None})


def test_keywords_that_are_harmless():
    FORWARD(CAUSAL_MODULE, Q, Q, Q, None, **dict.fromkeys(integration.HARMLESS, True))
    assert all(integration.HARMLESS.values()) and not served() & set(integration.HARMLESS)


def calls(name, text):
    """The calls of a function, without parsing all else in the file: of all models that takes ten seconds."""
    for match in re.finditer(rf"\b{name}\(", text):
        end = match.end()
        while True:
            end = text.index(")", end) + 1
            try:
                yield ast.parse(text[match.start() : end], mode="eval").body
                break
            except SyntaxError:  # a parenthesis inside of the call
                continue


def test_every_keyword_of_the_installed_version():
    """Each keyword that some model of transformers passes to its attention function is served, harmless or rejected."""
    known = served() | set(integration.HARMLESS) | set(integration._ADVICE)
    folder = pathlib.Path(transformers.__file__).parent / "models"
    found = {}
    for path in folder.glob("*/modeling_*.py"):
        for call in calls("attention_interface", path.read_text()):
            for keyword in call.keywords:
                found.setdefault(keyword.arg, set()).add(path.name)
    assert len(found) > 15 and {"scaling", "cu_seq_lens_q", "indices"} <= set(found)
    from transformers.modeling_flash_attention_utils import FlashAttentionKwargs
    from transformers.utils import TransformersKwargs

    found |= dict.fromkeys((*TransformersKwargs.__annotations__, *FlashAttentionKwargs.__annotations__), {"kwargs"})
    unknown = {name: sorted(files) for name, files in found.items() if name is not None and name not in known}
    assert not unknown


def test_a_sparse_model():
    sizes = SIZES | {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "index_n_heads": 2,
        "index_head_dim": 16, "index_topk": 2, "n_group": 1, "topk_group": 1,
    }  # fmt: skip
    config = transformers.DeepseekV32Config(**sizes)
    model = transformers.DeepseekV32ForCausalLM._from_config(config, attn_implementation="octet").eval()
    with pytest.raises(octet.Unsupported, match="^indices: found an array .*octet has no sparse attention"):
        model(torch.randint(3, VOCABULARY, (1, 9)))


DROPOUTS = {
    "BertForMaskedLM": SIZES,
    "LlamaForCausalLM": SIZES | {"attention_dropout": 0.1},
    "GPT2LMHeadModel": {"n_embd": 16, "n_layer": 1, "n_head": 2},
    "BartForConditionalGeneration": BART | {"attention_dropout": 0.1},
    "T5ForConditionalGeneration": T5 | {"dropout_rate": 0.1},
    "ViTForImageClassification": {
        "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16,
        "image_size": 8, "patch_size": 4, "attention_probs_dropout_prob": 0.1,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout_is_drawn(name):
    model = getattr(transformers, name)
    made = model._from_config(model.config_class(**DROPOUTS[name]), attn_implementation="octet").train()
    tokens = torch.ones(1, 4, dtype=torch.long)
    given = {"pixel_values": torch.zeros(1, 3, 8, 8)} if "ViT" in name else {"input_ids": tokens}
    if made.config.is_encoder_decoder:
        given["decoder_input_ids"] = tokens

    def logits(seed):
        torch.manual_seed(seed)
        return made(**given).logits

    assert torch.equal(logits(0), logits(0)) and not torch.equal(logits(0), logits(1))


@pytest.mark.parametrize("change", [False, True])
def test_a_name_that_octet_has_not(change):
    config = transformers.LlamaConfig(**SIZES)
    allowed = "attn_implementation: found 'octet_int3', allowed of octet's: 'octet', .*'octet_int8'"
    with pytest.raises(octet.InvalidArgument, match=allowed):
        if change:
            transformers.LlamaForCausalLM._from_config(config).set_attn_implementation("octet_int3")
        else:
            transformers.LlamaForCausalLM._from_config(config, attn_implementation="octet_int3")


def test_rejections_of_the_configuration():
    config = transformers.Gemma2Config(**SIZES, head_dim=8, attn_logit_softcapping=-50.0)
    model = transformers.Gemma2ForCausalLM._from_config(config, attn_implementation="octet")
    with pytest.raises(octet.InvalidArgument, match="softcap: found -50, allowed: positive and finite"):
        model(torch.zeros(1, 4, dtype=torch.long))


# Models


OWN_ATTENTION = [
    "BloomForCausalLM", "CodeGenForCausalLM", "GPTNeoXJapaneseForCausalLM", "XGLMForCausalLM", "TrOCRForCausalLM",
    "RemBertForCausalLM", "MegatronBertForMaskedLM", "LongformerForMaskedLM", "MPNetForMaskedLM", "RoFormerForMaskedLM",
    "ConvBertForMaskedLM", "BlipTextModel", "LayoutLMv3Model", "GPTJForCausalLM", "GPTNeoForCausalLM",
    "FalconForCausalLM", "MptForCausalLM",
]  # fmt: skip


def asks_for_attention(name):
    """Whether the model's module has transformers' table of attention functions: newer versions gave it to some."""
    return hasattr(sys.modules[getattr(transformers, name).__module__], "ALL_ATTENTION_FUNCTIONS")


@pytest.mark.parametrize("name", [name for name in OWN_ATTENTION if not asks_for_attention(name)])
def test_a_model_with_its_own_attention(name):
    """Its mask would be lost, or octet never called."""
    model = getattr(transformers, name)
    message = f"attn_implementation: found 'octet_int8', but {name} .*allowed: 'eager'"
    with pytest.raises(octet.Unsupported, match=message):
        model._from_config(model.config_class(), attn_implementation="octet_int8")


def test_setting_the_implementation():
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 1, "n_head": 2}
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(**sizes))
    with pytest.raises(octet.Unsupported, match="found 'octet', but BloomForCausalLM computes attention by itself"):
        bloom.set_attn_implementation("octet")
    assert bloom.config._attn_implementation == "eager"
    bloom.set_attn_implementation("eager")
    llama = build("llama", "sdpa")
    tokens = torch.randint(3, VOCABULARY, (1, 9))
    want = llama(tokens).logits
    llama.set_attn_implementation("octet_int8")
    assert 0 < relative(llama(tokens).logits, want) < 0.03


def test_setting_the_implementation_of_a_part():
    """Each part of a model of several parts is asked for its own attention."""
    tiny = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.CLIPConfig(text_config=tiny, vision_config=tiny | {"image_size": 8, "patch_size": 4})
    clip = transformers.CLIPModel(config)
    clip.set_attn_implementation({"text_config": "octet"})
    found = clip.config.text_config._attn_implementation, clip.config.vision_config._attn_implementation
    assert found == ("octet", "sdpa")
    both = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.ViTConfig(**tiny, image_size=8, patch_size=4),
        transformers.TrOCRConfig(vocab_size=99, d_model=16, decoder_layers=1, decoder_attention_heads=2),
    )
    model = transformers.VisionEncoderDecoderModel(both)
    with pytest.raises(octet.Unsupported, match="found 'octet', but TrOCRForCausalLM computes"):
        model.set_attn_implementation({"encoder": "sdpa", "decoder": "octet"})


def test_what_is_relied_on():
    """register() wraps these two methods; transformers calls the first whenever it makes a model."""
    model = transformers.PreTrainedModel
    for method in (model.get_correct_attn_implementation, model.set_attn_implementation):
        assert not hasattr(method.__wrapped__, "__wrapped__")
    assert transformers.LlamaForCausalLM._can_set_attn_implementation()


# torch.compile


@pytest.mark.parametrize("case", ["no mask", "left", "packed"])
@pytest.mark.parametrize("like_a_gpu, fullgraph", [(False, True), (True, False), (True, True)])
def test_a_compiled_model(case, like_a_gpu, fullgraph, monkeypatch, request):
    """In one graph with mask tensors; on a GPU only where it has to be one, else the mask alone is made outside."""
    if like_a_gpu:
        monkeypatch.setattr(_masks, "is_fast_with_tensors", lambda device: False)
        if not fullgraph:
            request.getfixturevalue("no_mask_tensors")
    tokens, mask = batch_of("left")
    how = {"use_cache": False} | ({"attention_mask": mask} if case == "left" else {})
    if case == "packed":
        tokens, how, _ = packed_batch("positions")
    counts = mask.bool() if case == "left" else torch.ones_like(tokens, dtype=torch.bool)

    def run(forward, model):
        model.zero_grad()
        logits = forward(tokens, **how).logits[counts]
        logits.logsumexp(-1).sum().backward()
        return logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])

    model = build("llama", "octet")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    want = run(model, model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    for got, expected in zip(run(compiled, model), want, strict=True):
        assert relative(got, expected) < EXACT
    breaks = [reason for reason in torch._dynamo.utils.counters["graph_break"] if "octet reads the mask" not in reason]
    assert not breaks
