"""A cache of transformers in 8 bits: with octet's attention over its pages as with the model's own over the numbers
that the codes stand for, in float32 on the CPU exactly; and how far logits are from those without it."""

import octet
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from octet.integrations import _stored  # noqa: E402
from octet.integrations import transformers as integration  # noqa: E402
from octet.integrations._plans import Plan  # noqa: E402
from octet.integrations.quantized_cache import QuantizedPages  # noqa: E402
from test_torch_transformers_generate import (  # noqa: E402
    DEVICES,
    LEFT_PADDED,
    LOOPS,
    MODELS,
    NEW,
    ONE,
    build,
    runs,
)  # fmt: skip

integration.register()
EXACT = 1e-5
# Of values, and so of an average of values. int8: that of o on real activations (Gaussian numbers err by 0.006, as the
# largest of a head is 2.5 of their deviation). e4m3 has three digits after the first, half a step of them is 2**-4.
BARS = {"i8": 0.01, "e4m3": 2**-4}


def relative(got, want):
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


def generated(kind, implementation, loop, cache, rows=None, device="cpu"):
    how = LOOPS[loop]
    how = how(kind, implementation, device) if callable(how) else how
    tokens = torch.tensor(rows or LEFT_PADDED, device=device)
    given = {"attention_mask": (tokens > 0).long(), "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        made = build(kind, implementation, device).generate(tokens, past_key_values=cache, **given, **how)
    return made[:, tokens.shape[1] :].tolist()


WITHOUT_PADDING = [[17, 9, 4, 5, 6], [6, 7, 5, 6, 7], [7, 8, 9, 8, 9]]
KINDS = [*((kind, "i8") for kind in MODELS), ("Llama", "e4m3")]
DYNAMIC = [loop for loop in LOOPS if "static" not in loop and loop != "sliding"]


@pytest.mark.parametrize(
    "kind, format, loop",
    [(kind, format, loop) for kind, format in KINDS for loop in DYNAMIC if runs(kind, loop)],
)
def test_the_same_tokens(kind, format, loop, monkeypatch):
    windows_of_5_17 = "sliding_window" in MODELS[kind][0] and transformers.__version__.startswith("5.17.")
    rows = WITHOUT_PADDING[:1] if loop in ONE else WITHOUT_PADDING
    want = generated(kind, None, loop, QuantizedPages(format, 16), rows)
    if not windows_of_5_17:  # whose masks leave some keys of each sequence
        monkeypatch.setattr(_stored.Stored, "dense", lambda self: pytest.fail("pages became numbers"))
    assert generated(kind, "octet", loop, QuantizedPages(format, 16), rows) == want


@pytest.mark.parametrize("kind", MODELS)
def test_padding_on_the_left(kind):
    """Pages become numbers there."""
    want = generated(kind, None, "dynamic", QuantizedPages())
    assert generated(kind, "octet", "dynamic", QuantizedPages()) == want


def llama(implementation, device="cpu"):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    }  # fmt: skip
    made = transformers.LlamaForCausalLM._from_config(
        transformers.LlamaConfig(**sizes), attn_implementation=implementation
    )
    return made.eval().to(device, torch.float32 if device == "cpu" else torch.bfloat16)


def logits_by_steps(model, cache):
    """Of 24 tokens that are given one by one, and of 8 at once, after a prompt of 100."""
    device = next(model.parameters()).device
    tokens = torch.randint(512, (2, 132), generator=torch.Generator().manual_seed(1)).to(device)
    logits = []
    with torch.no_grad():
        made = model(tokens[:, :100], past_key_values=cache, use_cache=True)
        for first, last in [*((i, i + 1) for i in range(100, 124)), (124, 132)]:
            made = model(tokens[:, first:last], past_key_values=made.past_key_values, use_cache=True)
            logits.append(made.logits)
    return torch.cat(logits, 1).float().cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", BARS)
def test_logits(format, device):
    want = logits_by_steps(llama("sdpa"), transformers.DynamicCache())
    found = logits_by_steps(llama("octet", device), QuantizedPages(format, 16))
    coarse = 0.0
    if device != "cpu":  # bf16 costs what it costs with the model's own attention
        coarse = relative(logits_by_steps(llama("sdpa", device), transformers.DynamicCache()), want)
    error = relative(found, want)
    print(f"error of logits, {format}, {device}: {error:.4f}, without quantization {coarse:.4f}")
    assert 0 < error < BARS[format] + 2 * coarse


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("format", BARS)
def test_attention(format, queries, window):
    """Over pages as over the numbers in them."""
    generator = torch.Generator().manual_seed(3)
    cache = QuantizedPages(format, 16)
    cache.update(*torch.randn(2, 3, 2, 30, 8, generator=generator), 0)
    k, v = cache.update(*torch.randn(2, 3, 2, queries, 8, generator=generator), 0)
    q = torch.randn(3, 8, queries, 8, generator=generator)
    made = _stored.attention(q, k, v, Plan(True, window, 30 + queries), None, {})
    masks = {"causal": "bottom_right"} if window is None else {"causal": "bottom_right", "window": (window, -1)}
    want = octet.attention(q, k.dense(), v.dense(), **masks)
    assert relative(made.transpose(1, 2), want) < EXACT


@pytest.mark.parametrize("most_keys", [0, 40])
@pytest.mark.parametrize("format", BARS)
def test_what_a_layer_holds(format, most_keys):
    """Through growing, forgetting tokens, and choosing sequences."""
    generator = torch.Generator().manual_seed(2)
    cache = QuantizedPages(format, 16, most_keys)
    draw = lambda tokens: torch.randn(3, 2, tokens, 8, generator=generator)
    k, v = draw(10), draw(10)
    assert all(x is y for x, y in zip(cache.update(k, v, 0), (k, v), strict=True))
    for tokens in (1, 30, 1, 1):
        new = draw(tokens), draw(tokens)
        k, v = torch.cat([k, new[0]], 2), torch.cat([v, new[1]], 2)
        stored = cache.update(*new, 0)
    cache.crop(-5)
    k, v = k[:, :, :-5], v[:, :, :-5]
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    k, v = k[[2, 0, 0]], v[[2, 0, 0]]
    cache.batch_select_indices(torch.tensor([1, 2]))
    cache.batch_repeat_interleave(2)
    k, v = (x[[1, 1, 2, 2]] for x in (k, v))
    new = torch.randn(2, 4, 2, 1, 8, generator=generator)
    k, v = torch.cat([k, new[0]], 2), torch.cat([v, new[1]], 2)
    stored = cache.update(new[0], new[1], 0)
    assert cache.get_seq_length() == 39 == stored[0].shape[2] and cache.get_mask_sizes(2, 0) == (41, 0)
    for found, want, operand in zip(stored, (k, v), "kv", strict=True):
        exact = octet.dequantize(octet.quantize(want, operand, format=format))
        assert torch.equal(found.dense(), exact) and torch.equal(found + 0, exact)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.update(k, v, 0)[0] is k


def test_rejections():
    for given, message in (
        ({"format": "i4"}, "format: found 'i4', allowed: 'i8', 'e4m3'"),
        ({"page_size": 48}, "page_size: found 48, allowed: a power of two from 16 on"),
        ({"most_keys": -1}, "most_keys: found -1, allowed: a number of tokens, or 0"),
    ):
        with pytest.raises(octet.InvalidArgument, match=message):
            QuantizedPages(**given)
