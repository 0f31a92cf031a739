"""transformers' generate loops with octet: the tokens that the models' own attention gives, on the CPU exactly, in
float32; on a GPU in bf16 tokens that are the best of a float32 model up to the error of its own attention in bf16."""

import octet
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from octet.integrations import _paged  # noqa: E402
from octet.integrations import transformers as integration  # noqa: E402
from transformers.generation.continuous_batching import cache as paged_cache  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
VOCABULARY = 128
NEW = 12
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3,
    "eos_token_id": None,
}  # fmt: skip
GEMMA = {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8}
# Configuration, and the attention to compare with: sdpa has no softcap and no sinks.
MODELS = {
    "Llama": ({}, "sdpa"),
    "Qwen3": ({"head_dim": 16}, "sdpa"),
    "Mistral": ({"sliding_window": 6}, "sdpa"),
    "Gemma2": (GEMMA | {"attn_logit_softcapping": 2.0}, "eager"),
    "Gemma3": (GEMMA | {"layer_types": ["sliding_attention", "full_attention"]}, "sdpa"),
    "GptOss": (
        {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 2, "sliding_window": 6},
        "eager",
    ),
}  # fmt: skip
IN_PAGES = ["Llama", "Qwen3"]  # transformers gives octet the pages of models without sliding windows
LEFT_PADDED = [[0, 0, 5, 17, 9, 4, 5, 6], [3, 4, 5, 6, 7, 5, 6, 7], [0, 0, 0, 0, 8, 9, 8, 9]]
PROMPTS = [[token for token in row if token] for row in LEFT_PADDED]


@pytest.fixture(scope="module", autouse=True)
def names():
    return integration.register()


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    """1 GB of it, which transformers cannot ask a CPU for without psutil."""
    if not torch.cuda.is_available():
        found = torch.device("cpu"), 2**30, 0, 0
        monkeypatch.setattr(paged_cache, "get_device_and_memory_breakdown", lambda *given: found)


def build(kind, implementation, device="cpu", seed=0):
    """The same weights for each implementation."""
    more, own = MODELS[kind]
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")
    made = model._from_config(model.config_class(**SIZES | more), attn_implementation=implementation or own)
    return made.eval().to(device, torch.float32 if device == "cpu" else torch.bfloat16)


def compiled(kind, implementation, device):
    config = transformers.CompileConfig(backend="aot_eager", fullgraph=False, dynamic=False, mode=None)
    config._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": config}


def assisted(kind, implementation, device):
    """By a draft model whose weights are almost the model's, so that it is right and wrong."""
    draft = build(kind, implementation, device)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for x in draft.parameters():
            x.add_(0.02 * torch.randn(x.shape, generator=random).to(x))
    return {"assistant_model": draft}


LOOPS = {
    "dynamic": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "static, compiled": compiled,
    "sliding": {"cache_implementation": "hybrid"},
    "prefill by chunks": {"prefill_chunk_size": 3},
    "beams": {"num_beams": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "draft model": assisted,
}
ONE = ["prompt lookup", "draft model"]  # of one sequence


def generated(kind, implementation, loop, device="cpu"):
    """New tokens of each prompt."""
    how = LOOPS[loop]
    how = how(kind, implementation, device) if callable(how) else how
    tokens = torch.tensor(LEFT_PADDED[1:2] if loop in ONE else LEFT_PADDED, device=device)
    given = {"attention_mask": (tokens > 0).long(), "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        made = build(kind, implementation, device).generate(tokens, **given, **how)
    return made[:, tokens.shape[1] :].tolist()


def generated_in_pages(kind, implementation, device="cpu"):
    """New tokens of each prompt by continuous batching, in pages of 16 tokens; the last prompt waits for the others."""
    size = "page_size" if hasattr(transformers.ContinuousBatchingConfig, "page_size") else "block_size"
    how = transformers.ContinuousBatchingConfig(
        **{size: 16}, num_blocks=16, max_batch_tokens=32, max_requests_per_batch=2
    )
    tokens = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    found = build(kind, implementation, device).generate_batch(
        PROMPTS, generation_config=tokens, continuous_batching_config=how, progress_bar=False
    )
    return [found[name].generated_tokens for name in sorted(found)]


def expect_the_best(kind, device, prompts, found):
    """Tokens whose logits in float32 are the largest, up to the error that the model's own attention in bf16 makes."""
    exact_model, own_model = build(kind, None), build(kind, None, device)
    for prompt, new in zip(prompts, found, strict=True):
        assert len(new) == NEW
        tokens = torch.tensor([prompt + new])
        with torch.no_grad():
            exact = exact_model(tokens).logits[0, len(prompt) - 1 : -1]
            own = own_model(tokens.to(device)).logits[0, len(prompt) - 1 : -1].float().cpu()
        chosen = exact.gather(1, torch.tensor(new)[:, None])[:, 0]
        assert (exact.amax(-1) - chosen).max() <= 4 * (own - exact).abs().max()


def runs(kind, loop):
    """Whether a model's loop is compared: not those that transformers itself cannot run, nor compile in seconds."""
    windows = "sliding_window" in MODELS[kind][0]
    if loop == "draft model" and windows and transformers.__version__.startswith("5.17."):
        return False  # 5.17 keeps more keys there than it makes a mask for, whatever the attention
    return loop != "static, compiled" or kind == "Llama"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind, loop", [(kind, loop) for kind in MODELS for loop in LOOPS if runs(kind, loop)])
def test_the_same_tokens(kind, loop, device):
    found = generated(kind, "octet", loop, device)
    if device == "cpu":
        assert found == generated(kind, None, loop)
    elif loop != "beams":  # which do not take the best token
        expect_the_best(kind, device, PROMPTS[1:2] if loop in ONE else PROMPTS, found)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", MODELS)
def test_the_same_tokens_in_pages(kind, device, monkeypatch):
    """Prompts are packed sequences; new tokens, one for each request, are appended to pages and attend over these."""
    own, in_pages = _paged.attention, []

    def attention(query, batch, *more):
        in_pages.append(batch.block_table is not None)
        return own(query, batch, *more)

    monkeypatch.setattr(_paged, "attention", attention)
    found = generated_in_pages(kind, "octet", device)
    assert any(in_pages) == (kind in IN_PAGES) and not all(in_pages)
    if device == "cpu":
        assert found == generated_in_pages(kind, "eager") == generated(kind, None, "dynamic")
    else:
        expect_the_best(kind, device, PROMPTS, found)


@pytest.mark.parametrize("precision", ["octet_bf16", "octet_int8"])
def test_precisions_in_pages(precision):
    found = generated_in_pages("Llama", precision)
    assert [len(new) for new in found] == [NEW] * 3


@pytest.mark.parametrize("size", [4, 48])
def test_pages_that_octet_does_not_read(size, monkeypatch):
    """Those of other sizes than powers of two from 16 on are gathered."""
    monkeypatch.setattr(_paged._caches, "attention_cached", lambda *given, **how: pytest.fail("attention over pages"))
    name = "page_size" if hasattr(transformers.ContinuousBatchingConfig, "page_size") else "block_size"
    how = transformers.ContinuousBatchingConfig(**{name: size}, num_blocks=16, max_batch_tokens=32)
    tokens = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    found = build("Llama", "octet").generate_batch(
        PROMPTS, generation_config=tokens, continuous_batching_config=how, progress_bar=False
    )
    assert [found[name].generated_tokens for name in sorted(found)] == generated("Llama", None, "dynamic")


def test_a_mask_beside_pages():
    module = build("Llama", "octet").model.layers[0].self_attn
    q, k = torch.randn(1, 8, 3, 8), torch.randn(1, 2, 3, 8)
    forward = transformers.AttentionInterface()["octet"]
    with pytest.raises(octet.Unsupported, match=r"attention_mask: found .* with a paged cache, allowed: None"):
        forward(module, q, k, k, torch.ones(1, 1, 3, 3, dtype=torch.bool), write_index=[torch.arange(3)])
