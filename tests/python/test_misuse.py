"""Tests what Python rejects by itself, and that the library's own rejections come through with their message."""

import numpy as np
import octet
import pytest

Q = np.zeros((1, 2, 6, 8), np.float32)


def rejected(kind, message, *arrays, call=octet.attention, **keywords):
    with pytest.raises(kind) as raised:
        call(*(arrays or (Q, Q, Q)), **keywords)
    assert message in str(raised.value), str(raised.value)


@pytest.mark.parametrize(
    "name, advice",
    [("dropout", "use dropout_p and dropout_seed"), ("is_causal", "causal='top_left'"),
     ("attn_mask", "use mask"), ("softmax_scale", "use scale"),
     ("window_size", "use window"), ("tensor_layout", "bshd"),
     ("remedy", "use bias_correction, whose 'f16' was 'f16_inside'"), ("anything", "allowed: 'precision'")],
)  # fmt: skip
def test_unknown_keywords_are_named_with_what_to_use(name, advice):
    rejected(TypeError, f"{name}: octet has no such argument", **{name: 0})
    rejected(TypeError, advice, **{name: 0})


def test_values_are_named_with_the_choices():
    invalid = octet.InvalidArgument
    rejected(invalid, "precision: found 'int9', allowed: 'f64'", precision="int9")
    rejected(invalid, "causal: found 'left', allowed: False, True, 'top_left', 'bottom_right'", causal="left")
    rejected(invalid, "layout: found 'hsd', allowed: 'bhsd', 'bshd'", layout="hsd")
    rejected(invalid, "scale: found 0, allowed: positive", scale=0)
    rejected(invalid, "scale: found -1, allowed: positive", scale=-1)
    rejected(invalid, "window: found (1, 2, 3), allowed: (left, right)", window=(1, 2, 3))
    rejected(invalid, "bias_correction: found 'salt', allowed: 'f16'", bias_correction="salt")
    choices = "allowed: 'f16', 'none', 'beta', 'exact_delta', 'gproj'"
    for name in ("f16_inside", "project"):  # of 0.1.0
        rejected(invalid, f"bias_correction: found {name!r}, {choices}", bias_correction=name)
    rejected(
        invalid, "alignment: 'top_left' given, but causal='bottom_right'", causal="bottom_right", alignment="top_left"
    )
    rejected(invalid, "hadamard: found True, allowed: 'auto', 'on', 'off'", hadamard=True)
    rejected(invalid, 'backend: unknown name "abacus"; known: ', backend="abacus")
    rejected(invalid, "softcap: found -5, allowed: positive and finite", softcap=-5.0)


@pytest.mark.parametrize(
    "name, value",
    [(name, value) for name in ("scale", "softcap", "beta") for value in (True, np.True_, "2", np.array(True))]
    + [("window", (True, 1)), ("window", True), ("window", (np.True_, 1)), ("threads", True)],
)
def test_truth_values_and_words_are_no_numbers(name, value):
    how = {"bias_correction": "beta"} if name == "beta" else {"alignment": "top_left"} if name == "window" else {}
    rejected(octet.InvalidArgument, f"{name}: found {value!r}, allowed: ", **how, **{name: value})


@pytest.mark.parametrize(
    "name, value",
    [("block", True), ("hadamard_seed", True), ("rope_dim", True), ("rope_offset", True), ("rope_offset", 1.5),
     ("rope_base", True), ("rope_base", "3"), ("smooth", "no"), ("smooth", 2)],
)  # fmt: skip
def test_truth_values_and_words_are_no_numbers_of_a_quantizer(name, value):
    how = {"rope": "half"} if name.startswith("rope") else {"granularity": "block"} if name == "block" else {}
    rejected(
        octet.InvalidArgument,
        f"{name}: found {value!r}, allowed: ",
        Q,
        "k",
        call=octet.quantize,
        **how,
        **{name: value},
    )


def test_unequal_lengths_need_an_alignment():
    k = np.zeros((1, 2, 9, 8), np.float32)
    rejected(octet.InvalidArgument, '6 queries meet 9 keys; use causal="top_left"', Q, k, k, causal=True)
    rejected(octet.InvalidArgument, 'alignment="top_left"', Q, k, k, window=(1, 1))


def test_arrays_are_validated():
    invalid = octet.InvalidArgument
    rejected(invalid, "v: found list, allowed: numpy.ndarray", Q, Q, [1])
    rejected(invalid, "q: shape [2, 6, 8], expected [batch, head, token, dim]", Q[0], Q, Q)
    rejected(invalid, "k: shape [1, 2, 6, 16]", Q, np.zeros((1, 2, 6, 16), np.float32), Q)
    rejected(invalid, "uint16, allowed:", Q.astype(np.uint16), Q, Q)
    rejected(invalid, "ml_dtypes.bfloat16", Q.astype(np.uint16), Q, Q)
    rejected(invalid, "q: dtype >f4", Q.astype(">f4"), Q, Q)
    rejected(invalid, "q: dtype complex64", Q.astype(np.complex64), Q, Q)
    rejected(invalid, "mask: shape [1, 1, 6, 7] does not broadcast to [1, 2, 6, 6]", mask=np.ones((6, 7), bool))
    rejected(invalid, "mask: shape [1, 1, 1, 6, 6], expected at most 4", mask=np.ones((1, 1, 1, 6, 6), bool))
    rejected(invalid, "mask: dtype f64, allowed: bool, f32", mask=np.zeros((6, 6)), precision="f32")
    rejected(invalid, "v: a masked array", Q, Q, np.ma.masked_array(Q, Q == 0))
    packed = np.zeros((1, 2, 6, 8), [("x", np.float32), ("y", np.uint8)])["x"]
    rejected(invalid, "copy it with numpy.ascontiguousarray", packed, Q, Q)


def test_packed_sequences_take_no_layout_or_mask():
    cu = np.array([0, 6], np.int32)
    packed = [np.zeros((6, 2, 8), np.float32)] * 3 + [cu, cu]
    varlen = octet.attention_varlen
    rejected(octet.InvalidArgument, "layout: 'bhsd' given", *packed, call=varlen, layout="bhsd")
    rejected(TypeError, "mask: octet has no such argument", *packed, call=varlen, mask=None)
    rejected(octet.InvalidArgument, 'use causal="top_left"', *packed, call=varlen, causal=True)
    rejected(octet.InvalidArgument, "expected 0 to the 6 tokens of q", *packed[:3], cu - 1, cu, call=varlen)


def test_errors_are_of_the_kinds_that_callers_catch():
    assert issubclass(octet.InvalidArgument, ValueError) and issubclass(octet.Unsupported, NotImplementedError)
    assert issubclass(octet.Failure, RuntimeError)
    for kind in (octet.InvalidArgument, octet.Unsupported, octet.Failure):
        assert issubclass(kind, octet.Error)


def test_an_absent_backward_is_rejected_with_those_that_have_one():
    rejected(octet.Unsupported, "has no backward pass", *[Q] * 4, call=octet.attention_vjp, precision="fp8_raw")
    rejected(octet.Unsupported, "has no jvp", *[Q] * 6, call=octet.attention_jvp, precision="int8")


@pytest.mark.parametrize(
    "keyword, value, allowed",
    [("window", 2**64 + 3, "0 to 9223372036854775807 keys, -1 or None"), ("window", (0, -(2**64) + 3), "0 to"),
     ("window", -2, "0 to"), ("threads", 2**32, "0 (all) to 4096"), ("threads", 4097, "0 (all) to 4096")],
)  # fmt: skip
def test_numbers_that_would_wrap_around(keyword, value, allowed):
    """window=2**64 + 3 was 3, threads=2**32 was 0."""
    rejected(octet.InvalidArgument, f"{keyword}: found {value}, allowed: {allowed}", Q, Q, Q, **{keyword: value})


@pytest.mark.parametrize(
    "keywords",
    [{"block": 2**64 + 8, "granularity": "block"}, {"hadamard_seed": 2**64 + 1},
     {"rope_dim": 2**64 + 8, "rope": "half"}, {"rope_offset": 2**64 + 8, "rope": "half"}],
    ids=str,
)  # fmt: skip
def test_numbers_of_quantize_that_would_wrap_around(keywords):
    name = next(iter(keywords))
    with pytest.raises(octet.InvalidArgument, match=f"{name}: found {keywords[name]}, allowed: "):
        octet.quantize(Q, "q", **keywords)


def test_out_dtype_of_numpy():
    q = np.ones((1, 2, 8, 16), np.float16)
    for given in (np.float32, np.dtype(np.float32), "float32"):
        assert octet.attention(q, q, q, out_dtype=given).dtype == np.float32
    with pytest.raises(octet.InvalidArgument, match="out_dtype: found <class 'int'>, allowed: 'float64', 'float32'"):
        octet.attention(q, q, q, out_dtype=int)


def test_a_package_without_the_command_says_why(monkeypatch, tmp_path):
    from octet import _command

    monkeypatch.setattr(_command, "__file__", str(tmp_path / "_command.py"))
    with pytest.raises(
        SystemExit, match="octet: no command in .*bin: .*CMake did not find CLI11, nlohmann_json and fmt"
    ):
        _command.main()
