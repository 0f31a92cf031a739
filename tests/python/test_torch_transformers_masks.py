"""The masks that octet gives to transformers: attention by a plan against float64 under the mask that it
stands for."""

import exact
import octet
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from hypothesis import example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from octet.integrations import _masks, transformers  # noqa: E402
from transformers import masking_utils as utils  # noqa: E402

FORWARD = transformers._implementation(None)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def padding_of(kind, batch, keys, random):
    """[batch, keys], some rows without any token where that kind can have them."""
    mask = torch.ones(batch, keys, dtype=torch.bool)
    for row in mask:
        left, right = (int(torch.randint(0, keys + 1, (), generator=random)) for _ in range(2))
        if kind in ("left", "both"):
            row[:left] = False
        if kind in ("right", "both"):
            row[max(right, 0) :] = False
        if kind == "holes":
            row[:] = torch.rand(keys, generator=random) < 0.6
    return mask


@st.composite
def problems(draw):
    causal = draw(st.booleans())
    window = draw(st.sampled_from([None, None, 1, 2, 5, 30]))
    kind = draw(st.sampled_from([None, "ones", "left", "right", "both", "holes"]))
    batch, queries = draw(st.integers(1, 3)), draw(st.integers(1, 20))
    past = draw(st.integers(0, 20)) if causal else 0
    beyond = draw(st.integers(0, 6)) if causal else 0  # of a static cache
    gone = draw(st.integers(0, past))  # of a sliding cache
    keys = past - gone + queries + beyond if causal or window else draw(st.integers(1, 20))
    return causal, window, kind, batch, queries, past, gone, keys, draw(st.integers(0, 2**32))


def mask_of(make, problem, padding, skips, device):
    causal, window, _, batch, queries, past, gone, keys, _ = problem
    if causal:
        function = utils.sliding_window_causal_mask_function(window) if window else utils.causal_mask_function
    else:
        function = (
            utils.sliding_window_bidirectional_mask_function(window) if window else utils.bidirectional_mask_function
        )
    return make(
        batch_size=batch, q_length=queries, kv_length=keys, q_offset=past, kv_offset=gone, mask_function=function,
        attention_mask=padding, local_size=window, allow_is_causal_skip=skips and causal,
        allow_is_bidirectional_skip=skips and not causal,
        use_vmap=False, dtype=torch.float32, config=None,
        device=device,
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=300, deadline=None)
@given(problem=problems())
@example(problem=(True, None, "left", 2, 1, 7, 0, 8, 0))  # a step of generation
@example(problem=(True, 1, None, 1, 1, 1, 0, 2, 0))  # one with a window, where nothing is padding
@example(problem=(True, 5, "left", 2, 6, 9, 3, 12, 0))  # a chunk of a prefill with a sliding cache
@example(problem=(False, 2, "both", 3, 12, 0, 0, 12, 1))
@example(problem=(True, None, "holes", 3, 12, 3, 0, 18, 1))
def test_a_plan_is_its_mask(device, problem):
    causal, window, kind, batch, queries, past, gone, keys, seed = problem
    random = torch.Generator().manual_seed(seed)
    seen = gone + keys if causal else keys
    padding = None if kind is None else padding_of(kind, batch, seen, random).to(device)
    built = mask_of(utils.sdpa_mask, problem, padding, skips=False, device=device)
    mask = mask_of(_masks.mask_function, problem, padding, skips=True, device=device)
    expressible = kind != "holes" or window is None or window >= keys
    if expressible or queries == 1:
        assert mask is None or isinstance(mask, _masks.Mask)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    shapes = [(batch, 4, queries, 16), (batch, 2, keys, 16), (batch, 2, keys, 16), (batch, queries, 4, 16)]
    q, k, v, do = (torch.randn(shape, generator=random).to(device, dtype) for shape in shapes)
    module = torch.nn.Module()
    module.is_causal = causal
    # Queries that are padding may see what they like: nothing here. A single query is none.
    counts = torch.ones(batch, queries, dtype=torch.bool, device=device)
    if padding is not None and queries > 1 and (causal or window):
        counts = padding[:, past : past + queries]
        counts = torch.nn.functional.pad(counts, (0, queries - counts.shape[1]))
    do = do * counts[..., None, None]
    leaves = [x.requires_grad_() for x in (q, k, v)]
    # Flash attention counts so: a causal module sees that many keys, others that many on both sides and the token.
    width = window if causal or window is None else window + 1
    o, _ = FORWARD(module, *leaves, mask, scaling=0.25, sliding_window=width)
    gradients = torch.autograd.grad(o, leaves, do)
    assert o.isfinite().all() and o.is_contiguous()

    arrays = [x.detach().float().cpu().numpy() for x in (q, k, v)]
    of_do = do.transpose(1, 2).float().cpu().numpy()
    want = exact.attention(*arrays, seen=built.cpu().numpy(), scale=0.25, do=of_do)
    bounds = exact.bounds(*arrays, scale=0.25, do=of_do, **exact.rounding(dtype))
    got = {"o": (o * counts[..., None, None]).transpose(1, 2)} | dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    want["o"] = want["o"] * counts.cpu().numpy()[:, None, :, None]
    for name, x in got.items():
        exact.expect_close(x.detach().float().cpu().numpy(), want[name], bounds[name], name)
    if padding is not None:
        hidden = ~torch.nn.functional.pad(padding, (0, max(0, gone + keys - padding.shape[1])))[:, gone : gone + keys]
        for x in gradients[1:]:  # of keys that are padding
            assert not x.transpose(1, 2)[hidden].any()


def left_padded():
    padding = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], dtype=torch.bool)
    how = {"batch_size": 2, "q_length": 5, "kv_length": 5, "attention_mask": padding}
    return _masks.mask_function(**how), utils.sdpa_mask(**how)


def test_a_mask_is_built_when_somebody_computes_with_it():
    mask, built = left_padded()
    assert isinstance(mask, _masks.Mask) and mask.shape == built.shape and mask.dtype == torch.bool and not mask.viewed
    assert mask.contiguous() is mask and mask._built is None
    for kept in (mask.detach(), mask.to("cpu"), mask.to("meta")):
        assert isinstance(kept, _masks.Mask) and kept._built is None
    assert torch.equal(mask[:, 0], built[:, 0]) and torch.equal(~mask & built, built & ~built)
    assert torch.equal(torch.where(mask, 0.0, -1.0), torch.where(built, 0.0, -1.0))
    assert torch.equal(mask + torch.zeros(5), built + torch.zeros(5))
    bits = torch.zeros_like(built)
    bits |= mask
    assert torch.equal(bits, built)


def test_a_mask_that_is_changed():
    """In place it is rejected; through a view it is the mask that counts."""
    mask, built = left_padded()
    with pytest.raises(octet.Unsupported, match="attention_mask: changed in place by .*attn_implementation='sdpa'"):
        mask &= torch.ones(5, 5, dtype=torch.bool)
    mask, built = left_padded()
    mask[1, 0, 3, 1] = False
    built[1, 0, 3, 1] = False
    q, k, v = (torch.randn(2, 2, 5, 8) for _ in range(3))
    o, _ = FORWARD(torch.nn.Module(), q, k, v, mask)
    torch.testing.assert_close(o, octet.sdpa(q, k, v, built).transpose(1, 2))


BLOCKS = torch.tensor([[-1, 0, 0, -1, 1]] * 2)
OTHERS = {
    "chunked": utils.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.long)),
    "blocks": utils.or_masks(utils.causal_mask_function, utils.blockwise_overlay(BLOCKS)),
    "of the user": lambda batch, head, q, k: (k <= q) & (k != 1),
    "of both": utils.and_masks(utils.causal_mask_function, lambda batch, head, q, k: k != 1),
    "a window of two sides in a causal mask": utils.and_masks(
        utils.causal_mask_function, utils.sliding_window_bidirectional_overlay(2)
    ),
    "a window to the left": utils.sliding_window_overlay(2),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("padded", [False, True])
def test_other_masks_are_built(name, padded):
    padding = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], dtype=torch.bool) if padded else None
    how = {"batch_size": 2, "q_length": 5, "kv_length": 5, "attention_mask": padding, "mask_function": OTHERS[name]}
    found = _masks.mask_function(**how, allow_is_causal_skip=False)
    assert type(found) is torch.Tensor and torch.equal(found, utils.sdpa_mask(**how, allow_is_causal_skip=False))
