"""The functions of flash-attn 2 as their own tests use them: separate and stacked, padded and packed, all head dims,
grouped heads, causal masks and windows, softcap, ALiBi, gradients, on the CPU and on a GPU. An error may be twice that
of the same attention in torch's operators in the same type."""

import itertools

import octet
import pytest
from exact import visible

torch = pytest.importorskip("torch")
from octet.compat import flash_attn  # noqa: E402

ON_GPU = torch.cuda.is_available() and any(b["device"] == "cuda" and b["available"] for b in octet.info()["backends"])
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not ON_GPU, reason="no GPU that octet computes on"))]
DIMS = [32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256]
# Queries and keys.
SIZES = {
    "cpu": [(33, 33), (17, 70), (70, 17), (1, 40), (64, 64)],
    "cuda": [(113, 203), (128, 217), (108, 256), (512, 256), (1024, 1024), (1023, 1024), (1, 339), (3, 799)],
}
MASKS = [(False, (-1, -1)), (True, (-1, -1)), (False, (5, 9)), (True, (11, 0)), (False, (-1, 4)), (False, (7, -1))]
HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}

by_device = pytest.mark.parametrize("device", DEVICES)


def in_operators(q, k, v, causal, window, scale=None, softcap=0.0, slopes=None):
    """Attention of [batch, token, head, dim] in torch's operators, each rounding to the type of q, but for the numbers
    of ALiBi, which are added in float32."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    s = torch.einsum("bqhd,bkhd->bhqk", q * (q.shape[-1] ** -0.5 if scale is None else scale), k)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    if slopes is not None:
        queries, keys = (torch.arange(x.shape[1], device=q.device) for x in (q, k))
        away = (queries[:, None] + k.shape[1] - q.shape[1] - keys).abs()
        s = s - slopes.reshape(-1, q.shape[2], 1, 1) * away
    side = [n if n >= 0 else None for n in window]
    seen = visible(q.shape[1], k.shape[1], "bottom_right" if causal else False, side, "bottom_right")
    seen = torch.from_numpy(seen).to(q.device)
    s = s.masked_fill(~seen, float("-inf"))
    p = s.softmax(-1).masked_fill(~seen, 0)  # a query that sees nothing gives 0
    return torch.einsum("bhqk,bkhd->bqhd", p.to(v.dtype), v)


def results(attend, inputs, do):
    """o and the gradients of the inputs."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    o = attend(*inputs)
    return [o.detach(), *torch.autograd.grad(o, inputs, do.to(o.dtype))]


def expect_twice_the_error(attend, reference, inputs, names):
    """`attend` errs at most twice as much as `reference` in the type of the inputs, both against float64."""
    torch.manual_seed(1)
    do = torch.randn_like(attend(*inputs))
    got, same = results(attend, inputs, do), results(reference, inputs, do)
    exact = results(reference, [x.double() for x in inputs], do)
    for name, x, y, want in zip(("o", *names), got, same, exact, strict=True):
        assert x.shape == want.shape and x.dtype is do.dtype, name
        error, allowed = ((z.double() - want).abs().max().item() for z in (x, y))
        assert error <= 2 * allowed + 1e-5, f"{name}: largest error {error:.3g}, torch's {allowed:.3g}"


def draw(*shape, device, dtype):
    return torch.randn(*shape, device=device).to(dtype)


@by_device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim, case", list(zip(DIMS, range(len(DIMS)), strict=True)))
def test_separate_and_kvpacked(device, dtype, dim, case):
    torch.manual_seed(case)
    (queries, keys), (causal, window) = SIZES[device][case % len(SIZES[device])], MASKS[case % len(MASKS)]
    for deterministic in (False, True) if device == "cuda" else (case % 2 > 0,):
        heads, kv_heads = HEADS[list(HEADS)[(case + deterministic) % 3]]
        q = draw(2, queries, heads, dim, device=device, dtype=dtype)
        kv = draw(2, keys, 2, kv_heads, dim, device=device, dtype=dtype)
        how = {"causal": causal, "window_size": window, "deterministic": deterministic}
        expect_twice_the_error(
            lambda q, k, v, how=how: flash_attn.flash_attn_func(q, k, v, **how),
            lambda q, k, v: in_operators(q, k, v, causal, window),
            (q, kv[:, :, 0], kv[:, :, 1]),
            ("dq", "dk", "dv"),
        )
        expect_twice_the_error(
            lambda q, kv, how=how: flash_attn.flash_attn_kvpacked_func(q, kv, **how),
            lambda q, kv: in_operators(q, *kv.unbind(2), causal, window),
            (q, kv),
            ("dq", "dkv"),
        )


@by_device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim, case", list(zip(DIMS, range(len(DIMS)), strict=True)))
def test_qkvpacked(device, dtype, dim, case):
    torch.manual_seed(case)
    tokens, (causal, window) = SIZES[device][case % len(SIZES[device])][0], MASKS[case % len(MASKS)]
    qkv = draw(2, tokens, 3, 3, dim, device=device, dtype=dtype)
    how = {"causal": causal, "window_size": window, "softmax_scale": 0.1 if case % 2 else None}
    expect_twice_the_error(
        lambda qkv: flash_attn.flash_attn_qkvpacked_func(qkv, **how),
        lambda qkv: in_operators(*qkv.unbind(2), causal, window, how["softmax_scale"]),
        (qkv,),
        ("dqkv",),
    )


def starts(lengths, device):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def in_turn(attend, cu_q, cu_k):
    """Attention of packed sequences, one after the other; the inputs are q, k, v or what stacks them."""

    def packed(*inputs):
        cu = [cu_q, cu_k] if len(inputs) > 1 else [cu_q]
        cu += [cu_k] * (len(inputs) - len(cu))
        made = []
        for i in range(len(cu_q) - 1):
            made.append(attend(*(x[None, c[i] : c[i + 1]] for x, c in zip(inputs, cu, strict=True)))[0])
        return torch.cat(made)

    return packed


@by_device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim, case", list(zip(DIMS, range(len(DIMS)), strict=True)))
def test_packed_sequences(device, dtype, dim, case):
    torch.manual_seed(case)
    times = 1 if device == "cpu" else 12
    causal, window = MASKS[case % len(MASKS)]
    heads, kv_heads = HEADS[list(HEADS)[case % 3]]
    lengths_q, lengths_k = [13 * times, 1, 31 * times, 8], [17 * times, 20, 31 * times, 5]
    cu_q, cu_k = starts(lengths_q, device), starts(lengths_k, device)
    q = draw(sum(lengths_q), heads, dim, device=device, dtype=dtype)
    kv = draw(sum(lengths_k), 2, kv_heads, dim, device=device, dtype=dtype)
    qkv = draw(sum(lengths_q), 3, heads, dim, device=device, dtype=dtype)
    how = {"causal": causal, "window_size": window}
    lengths = cu_q, cu_k, max(lengths_q), max(lengths_k)
    expect_twice_the_error(
        lambda q, k, v: flash_attn.flash_attn_varlen_func(q, k, v, *lengths, **how),
        in_turn(lambda q, k, v: in_operators(q, k, v, causal, window), cu_q, cu_k),
        (q, kv[:, 0], kv[:, 1]),
        ("dq", "dk", "dv"),
    )
    expect_twice_the_error(
        lambda q, kv: flash_attn.flash_attn_varlen_kvpacked_func(q, kv, *lengths, **how),
        in_turn(lambda q, kv: in_operators(q, *kv.unbind(2), causal, window), cu_q, cu_k),
        (q, kv),
        ("dq", "dkv"),
    )
    expect_twice_the_error(
        lambda qkv: flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu_q, max(lengths_q), **how),
        in_turn(lambda qkv: in_operators(*qkv.unbind(2), causal, window), cu_q, cu_q),
        (qkv,),
        ("dqkv",),
    )


@by_device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("softcap, of_slopes", [(5.0, None), (0.0, "heads"), (0.0, "batch"), (5.0, "batch")])
@pytest.mark.parametrize("dim, case", [(59, 0), (64, 1), (128, 2), (192, 3), (256, 4), (64, 5)])
def test_softcap_and_alibi(device, dtype, softcap, of_slopes, dim, case):
    """As flash-attn's tests draw them: q times the cap, slopes from 0 to 0.3. Separate and packed."""
    torch.manual_seed(case)
    (queries, keys), (causal, window) = SIZES[device][case % len(SIZES[device])], MASKS[case % len(MASKS)]
    heads, kv_heads = HEADS[list(HEADS)[case % 3]]
    q = draw(2, queries, heads, dim, device=device, dtype=dtype) * (softcap or 1)
    k, v = (draw(2, keys, kv_heads, dim, device=device, dtype=dtype) for _ in range(2))
    slopes = of_slopes and 0.3 * torch.rand(*((2,) if of_slopes == "batch" else ()), heads, device=device)
    how = {"causal": causal, "window_size": window, "softcap": softcap, "alibi_slopes": slopes}
    expect_twice_the_error(
        lambda q, k, v: flash_attn.flash_attn_func(q, k, v, **how),
        lambda q, k, v: in_operators(q, k, v, causal, window, softcap=softcap, slopes=slopes),
        (q, k, v),
        ("dq", "dk", "dv"),
    )
    lengths = starts([queries] * 2, device), starts([keys] * 2, device), queries, keys
    for one, other in zip(
        flash_attn.flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), *lengths, **how).split(queries),
        flash_attn.flash_attn_func(q, k, v, **how),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=0.01, atol=0.01)


@by_device
@pytest.mark.parametrize("dim", [16, 32, 64])
@pytest.mark.parametrize("tokens", [1, 2, 5, 17, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_large_logits_leave_gradients_finite_and_right(device, dim, tokens, causal):
    torch.manual_seed(0)
    q, k, v = (x * draw(2, tokens, 5, dim, device=device, dtype=torch.float16) for x in (5, 3, 3))
    inputs, do = (q, k, v), torch.randn_like(q)
    none = (-1, -1)
    got = results(lambda q, k, v: flash_attn.flash_attn_func(q, k, v, causal=causal), inputs, do)
    same = results(lambda q, k, v: in_operators(q, k, v, causal, none), inputs, do)
    exact = results(lambda q, k, v: in_operators(q, k, v, causal, none), [x.double() for x in inputs], do)
    for name, x, y, want in zip(("o", "dq", "dk", "dv"), got, same, exact, strict=True):
        error, allowed = ((z.double() - want).abs().max().item() for z in (x, y))
        assert error <= 2 * allowed + 1e-3, f"{name}: {error}, torch's {allowed}"


@by_device
@pytest.mark.parametrize("dim", [64, 111, 128])
def test_a_gradient_of_o_that_is_no_dense_tensor(device, dim):
    """An einsum hands over a do whose last dimension is not the one with stride 1."""
    torch.manual_seed(0)
    q, k, v = (draw(3, 97, 2, dim, device=device, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    o = flash_attn.flash_attn_func(q, k, v, causal=True)
    do = draw(3, 2, dim, 97, device=device, dtype=torch.bfloat16).permute(0, 3, 1, 2)
    assert do.stride(-1) != 1
    for x, y in zip(
        torch.autograd.grad(o, (q, k, v), do, retain_graph=True),
        torch.autograd.grad(o, (q, k, v), do.contiguous()),
        strict=True,
    ):
        assert torch.equal(x, y)


@by_device
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dim", [64, 111, 128])
@pytest.mark.parametrize("causal, window", [(False, (-1, -1)), (True, (-1, -1)), (False, (20, 9))])
def test_deterministic_calls_repeat_every_bit(device, packed, dim, causal, window):
    torch.manual_seed(0)
    how = {"causal": causal, "window_size": window, "deterministic": True}
    q = draw(200, 4, dim, device=device, dtype=torch.bfloat16).requires_grad_()
    kv = draw(239, 2, 2, dim, device=device, dtype=torch.bfloat16).requires_grad_()
    cu_q, cu_k = starts([70, 130], device), starts([9, 230], device)

    def attend():
        if packed:
            return flash_attn.flash_attn_varlen_kvpacked_func(q, kv, cu_q, cu_k, 130, 230, **how)
        return flash_attn.flash_attn_kvpacked_func(q[None], kv[None], **how)

    o = attend()
    do = torch.randn_like(o)
    first = torch.autograd.grad(o, (q, kv), do)
    for _ in range(3):
        again = attend()
        assert torch.equal(again, o)
        assert all(torch.equal(x, y) for x, y in zip(torch.autograd.grad(again, (q, kv), do), first, strict=True))


@by_device
@pytest.mark.parametrize("dim", [64])
def test_lse_of_every_form(device, dim):
    torch.manual_seed(0)
    tokens, heads = 40, 3
    qkv = draw(2, tokens, 3, heads, dim, device=device, dtype=torch.bfloat16)
    q, k, v = qkv.unbind(2)
    s = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * dim**-0.5
    hidden = torch.ones(tokens, tokens, dtype=torch.bool, device=device).triu(1)
    want = s.masked_fill(hidden, float("-inf")).logsumexp(-1)
    how = {"causal": True, "return_attn_probs": True}
    o, lse, dropped = flash_attn.flash_attn_qkvpacked_func(qkv, **how)
    assert dropped is None and lse.shape == (2, heads, tokens) and lse.dtype is torch.float32
    assert (lse - want).abs().max() < 2e-3
    for other in (
        flash_attn.flash_attn_kvpacked_func(q, qkv[:, :, 1:], **how),
        flash_attn.flash_attn_func(q, k, v, **how),
    ):
        assert torch.equal(other[0], o) and torch.equal(other[1], lse) and other[2] is None
    cu = starts([tokens, tokens], device)
    flat = qkv.reshape(2 * tokens, 3, heads, dim)
    q, k, v = flat.unbind(1)
    for other in (
        flash_attn.flash_attn_varlen_qkvpacked_func(flat, cu, tokens, **how),
        flash_attn.flash_attn_varlen_kvpacked_func(q, flat[:, 1:], cu, cu, tokens, tokens, **how),
        flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, tokens, tokens, **how),
    ):
        assert other[2] is None and other[1].shape == (heads, 2 * tokens)
        assert (other[0].view_as(o).double() - o.double()).abs().max() < 2e-2
        assert (other[1].view(heads, 2, tokens).transpose(0, 1) - want).abs().max() < 2e-3


@by_device
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("how", [{}, {"causal": True}, {"window_size": (100, 30), "softcap": 3.0}])
def test_probabilities_tell_what_is_dropped(device, packed, how):
    """Softmax in float64 is |S_dmask|, and o follows from what is not negative."""
    torch.manual_seed(0)
    heads, kv_heads, dim, dropped = 4, 2, 32, 0.2
    sizes = [(70, 300), (13, 40)] if packed else [(70, 300), (70, 300)]
    q, kv = (
        [draw(n[i], *shape, dim, device=device, dtype=torch.bfloat16) for n in sizes]
        for i, shape in ((0, (heads,)), (1, (2, kv_heads)))
    )
    more = {"dropout_p": dropped, "return_attn_probs": True, **how}
    if packed:
        cu = [starts([n[i] for n in sizes], device) for i in (0, 1)]
        o, _, p = flash_attn.flash_attn_varlen_kvpacked_func(torch.cat(q), torch.cat(kv), *cu, 70, 300, **more)
        o = o.split([n for n, _ in sizes])
    else:
        o, _, p = flash_attn.flash_attn_kvpacked_func(torch.stack(q), torch.stack(kv), **more)
    assert p.shape == (2, heads, 70, 300) and p.dtype is torch.bfloat16
    kept = 0
    for i, (queries, keys) in enumerate(sizes):
        of_i = p[i, :, :queries, :keys].double()
        assert not p[i, :, queries:].any() and not p[i, :, :, keys:].any()
        k, v = kv[i].double().repeat_interleave(heads // kv_heads, 2).unbind(1)
        unit = torch.eye(keys, dtype=torch.float64, device=device)[None, :, None].expand(-1, -1, heads, -1)
        given = how.get("causal", False), how.get("window_size", (-1, -1)), dim**-0.5, how.get("softcap", 0.0)
        want = in_operators(q[i].double()[None], k[None], unit, *given)[0].transpose(0, 1)
        assert (of_i.abs() - want).abs().max() < 4e-3
        got = torch.einsum("hqk,khd->qhd", of_i.clamp(min=0) / (1 - dropped), v)
        assert (o[i].double() - got).abs().max() < 3e-2
        kept += (of_i > 0).sum().item()
    assert abs(kept / (p != 0).sum().item() - (1 - dropped)) < 0.01


REJECTED = {
    "dropout_p": (1.5, "dropout_p: found 1.5, allowed: 0 for none"),
    "softcap": (-50.0, "softcap: found -50, allowed: positive"),
    "alibi_slopes": (torch.ones(3), r"alibi_slopes: shape \[1, 3, 1, 1\], expected \[1, 2, 1, 1\]"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_what_octet_does_not_do_is_rejected_by_every_form(name):
    value, message = REJECTED[name]
    q, kv, qkv = torch.randn(1, 8, 2, 16), torch.randn(1, 8, 2, 2, 16), torch.randn(1, 8, 3, 2, 16)
    cu = starts([8], "cpu")
    for call in (
        lambda **how: flash_attn.flash_attn_func(q, q, q, **how),
        lambda **how: flash_attn.flash_attn_kvpacked_func(q, kv, **how),
        lambda **how: flash_attn.flash_attn_qkvpacked_func(qkv, **how),
        lambda **how: flash_attn.flash_attn_varlen_func(q[0], q[0], q[0], cu, cu, 8, 8, **how),
        lambda **how: flash_attn.flash_attn_varlen_kvpacked_func(q[0], kv[0], cu, cu, 8, 8, **how),
        lambda **how: flash_attn.flash_attn_varlen_qkvpacked_func(qkv[0], cu, 8, **how),
    ):
        call()
        with pytest.raises(octet.Error, match=message):
            call(**{name: value})
        with pytest.raises(octet.InvalidArgument, match=r"window_size: found \(1, 2, 3\), allowed: \(left, right\)"):
            call(window_size=(1, 2, 3))
        with pytest.raises(octet.InvalidArgument, match=r"window_size: found \(True, 2\)"):
            call(window_size=(True, 2))
        with pytest.raises(octet.InvalidArgument, match=r"window_size: found \(1.5, 2\)"):
            call(window_size=(1.5, 2))


@pytest.mark.parametrize("shape", [(1, 8, 4, 2, 16), (8, 4, 2, 16), (8, 2, 16), (16,)])
def test_a_tensor_that_stacks_something_else(shape):
    x, q, cu = torch.randn(shape), torch.randn(1, 8, 2, 16), starts([8], "cpu")
    for call, message in (
        (lambda: flash_attn.flash_attn_qkvpacked_func(x), r"qkv: .* \[batch, token, 3, head, dim\]"),
        (lambda: flash_attn.flash_attn_kvpacked_func(q, x), r"kv: .* \[batch, token, 2, head, dim\]"),
        (lambda: flash_attn.flash_attn_varlen_qkvpacked_func(x, cu, 8), r"qkv: .* \[token, 3, head, dim\]"),
        (lambda: flash_attn.flash_attn_varlen_kvpacked_func(q[0], x, cu, cu, 8, 8), r"kv: .* \[token, 2, head, dim\]"),
        (lambda: flash_attn.flash_attn_kvpacked_func(q, [q, q]), "kv: found list, allowed: torch.Tensor"),
    ):
        with pytest.raises(octet.InvalidArgument, match=message):
            call()


def stacked_calls(device="cpu", dtype=torch.bfloat16, dim=16):
    """Returns the call of each stacked form and its inputs, of which the first is the stacked one."""
    torch.manual_seed(0)

    def leaf(*shape):
        return draw(*shape, device=device, dtype=dtype).requires_grad_()

    cu = starts([7, 13], device)
    how = {"causal": True, "return_attn_probs": True}
    kvpacked, varlen_kvpacked = flash_attn.flash_attn_kvpacked_func, flash_attn.flash_attn_varlen_kvpacked_func
    return {
        "qkv": (lambda x: flash_attn.flash_attn_qkvpacked_func(x, **how), (leaf(2, 20, 3, 2, dim),)),
        "kv": (lambda x, q: kvpacked(q, x, **how), (leaf(2, 20, 2, 2, dim), leaf(2, 20, 4, dim))),
        "varlen qkv": (
            lambda x: flash_attn.flash_attn_varlen_qkvpacked_func(x, cu, 13, **how),
            (leaf(20, 3, 2, dim),),
        ),
        "varlen kv": (
            lambda x, q: varlen_kvpacked(q, x, cu, cu, 13, 13, **how),
            (leaf(20, 2, 2, dim), leaf(20, 4, dim)),
        ),
    }


FORMS = pytest.mark.parametrize("form", list(stacked_calls()))


@by_device
@FORMS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_stacked_gradients_are_those_of_views(monkeypatch, device, form, dtype):
    """And lie in one tensor, in the memory order of what they belong to."""
    if device == "cuda" and dtype is torch.float64:
        pytest.skip("the GPU's kernels take f32, f16 and bf16")
    call, inputs = stacked_calls(device, dtype)[form]
    found = []
    for one_gradient in (True, False):
        if not one_gradient:
            monkeypatch.setattr(flash_attn._stacked, "writes_one_gradient", lambda *_: False)
        o, lse, _ = call(*inputs)
        torch.manual_seed(1)
        do, dlse = torch.randn_like(o), torch.randn_like(lse)
        found.append([
            o, lse,
            *torch.autograd.grad((o, lse), inputs, (do, dlse), retain_graph=True),
            *torch.autograd.grad(o, inputs, do, retain_graph=True),
            *torch.autograd.grad(lse, inputs, dlse),
        ])  # fmt: skip
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y) and x.stride() == y.stride()
    assert all(x.is_contiguous() for x in found[0])


@by_device
@FORMS
def test_stacked_gradients_are_not_stacked_afterwards(device, form):
    call, inputs = stacked_calls(device)[form]
    o, _, _ = call(*inputs)
    do = torch.randn_like(o)
    with torch.profiler.profile() as profile:
        gradients = torch.autograd.grad(o, inputs, do)
    names = {event.name for event in profile.events()}
    assert "aten::empty_like" in names  # the profiler saw the pass
    assert not names & {"aten::stack", "aten::cat", "aten::copy_", "aten::add_", "aten::add", "aten::zeros_like"}
    assert all(x._base is None for x in gradients)


def test_a_stacked_tensor_in_any_memory_order():
    """Packed weights as some models keep them: [token, head, 3, dim] in memory."""
    torch.manual_seed(0)
    x = torch.randn(2, 20, 4, 3, 16).transpose(2, 3)
    for qkv in (x, x[:, ::2], x[:1].expand(3, -1, -1, -1, -1)):
        leaf = qkv.detach().requires_grad_()
        (got,) = torch.autograd.grad(flash_attn.flash_attn_qkvpacked_func(leaf).sum(), leaf)
        copy = qkv.contiguous().requires_grad_()
        (want,) = torch.autograd.grad(flash_attn.flash_attn_qkvpacked_func(copy).sum(), copy)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
        assert got.stride() == torch.empty_like(leaf).stride()


@FORMS
def test_stacked_forms_under_torchs_transformations(form):
    call, inputs = stacked_calls(dtype=torch.float32)[form]
    o, lse, _ = call(*inputs)
    do = torch.randn_like(o)
    want = torch.autograd.grad(o, inputs, do, retain_graph=True)
    o_again = call(*inputs)[0]
    with pytest.raises(octet.Unsupported, match="octet computes first derivatives only"):
        first = torch.autograd.grad(o_again, inputs, do, create_graph=True)
        torch.autograd.grad(sum(x.sum() for x in first), inputs)
    several = torch.stack([do, 2 * do])
    batched = torch.autograd.grad(o, inputs, several, is_grads_batched=True, retain_graph=True)
    plain = [x.detach() for x in inputs]
    by_func = torch.func.vjp(lambda *x: call(*x)[0], *plain)[1](do)
    compiled = torch.compile(lambda *x: call(*x)[0], backend="aot_eager")
    by_compile = torch.autograd.grad(compiled(*inputs), inputs, do)
    for x, many, y, z in zip(want, batched, by_func, by_compile, strict=True):
        torch.testing.assert_close(many, torch.stack([x, 2 * x]), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(y, x, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(z, x, rtol=1e-5, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = call(*inputs)[0]
        assert mixed.dtype is torch.bfloat16
    assert torch.autograd.grad(mixed, inputs, do.bfloat16())[0].dtype is torch.float32


def test_precisions_without_a_backward_pass_are_rejected_before_the_forward_pass():
    qkv = torch.randn(1, 8, 3, 2, 16, requires_grad=True)
    with pytest.raises(octet.Unsupported, match="requires_grad: found True (.|\n)*no backward pass"):
        flash_attn.flash_attn_qkvpacked_func(qkv, precision="int8_fp8")
