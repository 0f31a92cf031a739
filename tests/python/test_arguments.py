"""Every argument of every public function and every drop-in, with a value that octet does not compute: the message
begins with the argument's name and says what to do. No argument may be left out of these tables."""

import inspect
import re

import numpy as np
import octet
import pytest
from octet._operands import AttentionKeywords
from octet._options import AttentionOptions

torch = pytest.importorskip("torch")
from octet.compat import flash_attn, sageattention  # noqa: E402

SAYS_WHAT_TO_DO = (
    r"allowed|expected|use |leave|pass |drop elements|add slope|those that have|needs|live on|of one kind|known: "
    r"|name one|belongs"
)


def reject(name, call, kind=(octet.Error, TypeError)):
    with pytest.raises(kind) as rejection:
        call()
        pytest.fail(f"{name} is not rejected")
    message = str(rejection.value)
    assert re.match(rf"{name.replace('_', '[_ ]')}\b", message) and re.search(SAYS_WHAT_TO_DO, message), message


def parameters(function):
    kinds = inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL
    return [x.name for x in inspect.signature(function).parameters.values() if x.kind not in kinds]


Q = torch.zeros(1, 2, 8, 16)
PACKED = torch.zeros(8, 2, 16)
CU = torch.tensor([0, 8], dtype=torch.int32)
ARRAYS = {
    octet.attention: {"q": Q, "k": Q, "v": Q},
    octet.attention_varlen: {"q": PACKED, "k": PACKED, "v": PACKED, "cu_seqlens_q": CU, "cu_seqlens_k": CU},
    octet.attention_vjp: {"q": Q, "k": Q, "v": Q, "do": Q},
    octet.attention_jvp: {"q": Q, "k": Q, "v": Q, "tq": Q, "tk": Q, "tv": Q},
    octet.check: {"q": Q, "k": Q, "v": Q},
    octet.explain: {"q": Q, "k": Q, "v": Q},
}
ASKED = octet.check, octet.explain
FUNCTIONS = pytest.mark.parametrize("function", ARRAYS, ids=lambda f: f.__name__)

# Values that no function takes.
OPTIONS = {
    "precision": "int9", "causal": "left", "scale": "wide", "window": "all", "alignment": "middle", "layout": "hsd",
    "bias_correction": "salt", "beta": "large", "hadamard": True, "smooth_q": "maybe", "softcap": -5.0,
    "dropout_p": "often", "deterministic": "yes", "threads": -1, "backend": 3, "tile": "64 x 64", "out_dtype": "float5",
    "enable_gqa": "yes", "rounding": "flash",
}  # fmt: skip
MORE = {
    octet.attention: {"mask": [1], "sinks": Q, "alibi_slopes": Q, "dropout_seed": -1, "return_lse": "no"},
    octet.attention_varlen: {"dropout_seed": True, "max_seqlen_q": -1, "max_seqlen_k": "long"}
    | {"sinks": CU, "alibi_slopes": CU, "return_lse": "no"},
    octet.attention_vjp: {"mask": [1], "sinks": [1], "alibi_slopes": [1], "dropout_seed": (1, 2, 3), "dlse": Q}
    | {"return_dmask": True},
    octet.attention_jvp: {"mask": [1], "sinks": Q, "alibi_slopes": Q, "dropout_seed": Q, "tsinks": torch.zeros(2)}
    | {"return_lse": "no"},
    octet.check: {"mask": [1], "sinks": Q, "alibi_slopes": Q, "dropout_seed": "x", "do": [1], "tangents": ([1], Q, Q)},
    octet.explain: {"mask": [1], "sinks": Q, "alibi_slopes": Q, "dropout_seed": 2**64, "kind": "sideways"},
}
NAMED_OTHERWISE = {"tangents": "tq"}  # whose parts have names


@FUNCTIONS
def test_every_option(function):
    assert set(OPTIONS) == set(AttentionOptions.__annotations__)
    # Functions that are asked about a call take its arrays among the keywords.
    keywords = set(AttentionKeywords.__annotations__) - set(OPTIONS) if function in ASKED else set()
    assert set(parameters(function)) | keywords == set(ARRAYS[function]) | set(MORE[function])
    for name, value in (OPTIONS | MORE[function]).items():
        call = lambda name=name, value=value: function(**ARRAYS[function], **{name: value})
        reject(NAMED_OTHERWISE.get(name, name), call)
    reject("dropout", lambda: function(**ARRAYS[function], dropout=0.1), TypeError)
    reject("anything", lambda: function(**ARRAYS[function], anything=1), TypeError)


def test_supports_gives_the_same_reasons():
    for name, value in OPTIONS.items():
        found = octet.supports(Q, Q, Q, **{name: value})
        assert not found and re.match(rf"{name}\b", found.reason)
    reject("dropout", lambda: octet.supports(Q, Q, Q, dropout=0.1), TypeError)


@FUNCTIONS
def test_every_array(function):
    """An argument may be of no framework, of another, of another device, of a type or a rank that has no meaning."""
    arrays = ARRAYS[function]
    for name, x in arrays.items():
        for wrong in (None if name == "q" else [1.0], "a tensor", x.to(torch.complex64), x[None, None]):
            if wrong is not None:
                reject(name, lambda name=name, wrong=wrong: function(**(arrays | {name: wrong})))
        if name != "q":
            reject(name, lambda name=name, x=x: function(**(arrays | {name: x.numpy()})))
            reject(name, lambda name=name, x=x: function(**(arrays | {name: x.to("meta")})))
            if torch.cuda.is_available():
                reject(name, lambda name=name, x=x: function(**(arrays | {name: x.cuda()})))


@FUNCTIONS
def test_a_mask_on_another_device(function):
    if "mask" in parameters(function):
        mask = torch.ones(8, 8, dtype=torch.bool, device="meta")
        reject("mask", lambda: function(**ARRAYS[function], mask=mask))


@pytest.mark.parametrize("precision", ["int8_f16", "int8_fp8", "fp8_raw"])
def test_a_gradient_that_does_not_exist(precision):
    needing = {"q": Q.clone().requires_grad_(), "k": Q, "v": Q, "precision": precision}
    reject("requires_grad", lambda: octet.attention(**needing), octet.Unsupported)
    packed = ARRAYS[octet.attention_varlen] | {"v": PACKED.clone().requires_grad_(), "precision": precision}
    reject("requires_grad", lambda: octet.attention_varlen(**packed), octet.Unsupported)
    with torch.no_grad():
        octet.attention(**needing)
    mask = torch.zeros(8, 8, requires_grad=True)
    reject("requires_grad", lambda: octet.attention(Q, Q, Q, mask=mask, precision=precision), octet.Unsupported)


def test_quantize():
    x, codes = Q + 1, octet.quantize(Q + 1, "k")
    wrong = {
        "x": [1], "operand": "o", "format": "i2", "granularity": "row", "block": -1, "zero_point": "near",
        "smooth": None, "hadamard_seed": -1, "rope": "spiral", "rope_dim": 7, "rope_offset": None, "rope_base": -1.0,
        "statistics": "all", "layout": "hsd", "norm": "layer", "norm_weight": torch.ones(7), "norm_eps": -1.0,
    }  # fmt: skip
    assert set(wrong) == set(parameters(octet.quantize))
    any_value = {"smooth", "rope_offset"}  # a truth; any position
    for name in set(wrong) - any_value:
        other = {"rope": "half"} if name.startswith("rope_") else {"norm": "rms"} if name.startswith("norm_") else {}
        given = {"x": x, "operand": "k"} | other | {name: wrong[name]}
        reject(name, lambda given=given: octet.quantize(**given))
    reject("bits", lambda: octet.quantize(x, "k", bits=8), TypeError)
    reject("x", lambda: octet.dequantize(Q))
    reject("x: dtype", lambda: octet.dequantize(codes, torch.int64))
    reject("scale", lambda: octet.dequantize(codes, scale=2.0), TypeError)


def test_arrays_that_are_missing():
    """None is no array: lengths that are missing would make one sequence of all."""
    cu = np.array([0, 8], np.int32)
    packed = {"q": np.ones((8, 2, 16), np.float32), "k": np.ones((8, 2, 16), np.float32)}
    packed |= {"v": packed["k"], "cu_seqlens_q": cu, "cu_seqlens_k": cu}
    octet.attention_varlen(**packed)
    for name in packed:
        given = packed | {name: None}
        reject(f"{name}: found None, allowed: an array", lambda given=given: octet.attention_varlen(**given))


SERVED = None
ATTENTION = {
    "query": SERVED, "key": SERVED, "value": SERVED, "attn_mask": SERVED, "dropout_p": 1.5, "is_causal": SERVED,
    "scale": "wide", "enable_gqa": SERVED, "precision": "int9",
}  # fmt: skip
FLASH = {
    "q": SERVED, "k": SERVED, "v": SERVED, "dropout_p": 1.5, "softmax_scale": ("scale", "wide"), "causal": SERVED,
    "window_size": [1, 2, 3], "softcap": -5.0, "alibi_slopes": torch.ones(7), "deterministic": SERVED,
    "return_attn_probs": SERVED, "precision": "int9",
}  # fmt: skip
LENGTHS = {"cu_seqlens_q": SERVED, "cu_seqlens_k": SERVED, "max_seqlen_q": -1, "max_seqlen_k": -1}
KV_STACKED = {name: value for name, value in FLASH.items() if name not in "kv"} | {"kv": Q[0]}
QKV_STACKED = {name: value for name, value in KV_STACKED.items() if name not in ("q", "kv")} | {"qkv": Q[0]}
SAGE = {
    "q": SERVED, "k": SERVED, "v": SERVED, "tensor_layout": "HDN", "is_causal": SERVED, "sm_scale": ("scale", "wide"),
    "return_lse": SERVED,
}  # fmt: skip
SMOOTH, GRANULARITY = {"smooth_k": False}, {"qk_quant_gran": "per_head"}
SUMS, VALUES = {"pv_accum_dtype": "bf16"}, {"smooth_v": True}
NO_LAYOUT = {name: value for name, value in SAGE.items() if name not in ("tensor_layout", "return_lse")}
# For each drop-in, each argument of its host: SERVED, or a value and, if another argument's name rejects it, that.
HOSTS = {
    octet.sdpa: ATTENTION,
    flash_attn.flash_attn_func: FLASH,
    flash_attn.flash_attn_kvpacked_func: KV_STACKED,
    flash_attn.flash_attn_qkvpacked_func: QKV_STACKED,
    flash_attn.flash_attn_varlen_func: FLASH | LENGTHS | {"block_table": ("k", CU)},
    flash_attn.flash_attn_varlen_kvpacked_func: KV_STACKED | LENGTHS,
    flash_attn.flash_attn_varlen_qkvpacked_func: QKV_STACKED
    | {"cu_seqlens": SERVED, "max_seqlen": ("max_seqlen_q", -1)},
    sageattention.sageattn: SAGE,
    sageattention.sageattn_varlen: NO_LAYOUT | LENGTHS | SMOOTH,
    sageattention.sageattn_qk_int8_pv_fp16_triton: SAGE
    | SMOOTH
    | {"attn_mask": SERVED, "quantization_backend": "metal"},
    sageattention.sageattn_qk_int8_pv_fp16_cuda: SAGE | SMOOTH | GRANULARITY | SUMS | VALUES,
    sageattention.sageattn_qk_int8_pv_fp8_cuda: SAGE | SMOOTH | GRANULARITY | SUMS | VALUES,
    sageattention.sageattn_qk_int8_pv_fp8_cuda_sm90: SAGE | SMOOTH | GRANULARITY | SUMS,
}


def causal_module():
    """A module of a host that says, as transformers' do, whether it is causal."""
    module = torch.nn.Module()
    module.is_causal = True
    return module


def of_transformers():
    from octet.integrations.transformers import _implementation

    lengths = ["cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"]
    served = ["module", "query", "key", "value", "attention_mask", "is_causal", "position_ids", "position_bias"]
    rejected = {
        "dropout": ("dropout_p", 1.5),
        "scaling": ("scale", "wide"),
        "sliding_window": 0,
        "softcap": -30.0,
        "s_aux": Q[0, :1, 0, 0],
        "seq_idx": CU,
        "deterministic": "yes",
        "output_attentions": True,
    }
    return _implementation(None), dict.fromkeys(served + lengths, SERVED) | rejected


def of_diffusers():
    from octet.integrations.diffusers import _backend

    served = dict.fromkeys(["return_lse", "_parallel_config"], SERVED)
    return _backend(None), {name: value for name, value in ATTENTION.items() if name != "precision"} | served


def given(function):
    """Arguments of a call that works."""
    names = parameters(function)
    found = {"module": causal_module(), "attention_mask": None}
    for name in ("q", "k", "v", "query", "key", "value"):
        found[name] = PACKED if "cu_seqlens_q" in names or "cu_seqlens" in names else Q
    x = found["q"]
    found |= {"kv": torch.stack([x, x], -3), "qkv": torch.stack([x, x, x], -3)}
    found |= {"cu_seqlens": CU, "cu_seqlens_q": CU, "cu_seqlens_k": CU}
    found |= {"max_seqlen": 8, "max_seqlen_q": 8, "max_seqlen_k": 8}
    return {name: found[name] for name in names if name in found}


@pytest.mark.parametrize("function", [*HOSTS, of_transformers, of_diffusers], ids=lambda f: f.__name__)
def test_every_argument_of_a_host(function):
    table = HOSTS.get(function)
    strict = table is not None  # transformers and diffusers hand over more than they document
    if table is None:
        function, table = function()
    assert set(parameters(function)) == set(table)
    function(**given(function))
    for name, wrong in table.items():
        if wrong is SERVED:
            continue
        named, value = wrong if isinstance(wrong, tuple) else (name, wrong)
        reject(named, lambda name=name, value=value: function(**(given(function) | {name: value})))
    if strict:
        reject("anything", lambda: function(**given(function), anything=1), TypeError)


def test_patch_sdpa():
    for name, value in {"precision": "int9", "min_seqlen": "long", "fallback": "none"}.items():
        assert name in parameters(octet.patch_sdpa)

        def call(name=name, value=value):
            with octet.patch_sdpa(**{name: value}):
                torch.nn.functional.scaled_dot_product_attention(Q, Q, Q)

        reject(name, call)
    with octet.patch_sdpa(fallback="sdpa"):
        reject("anything", lambda: torch.nn.functional.scaled_dot_product_attention(Q, Q, Q, anything=1), TypeError)


def test_arrays_of_numpy_too():
    q = np.zeros((1, 2, 8, 16), np.float32)
    for function in (octet.attention, octet.attention_vjp, octet.attention_jvp):
        arrays = dict.fromkeys(ARRAYS[function], q)
        for name in arrays:
            reject(
                name,
                lambda function=function, name=name, arrays=arrays: function(**(arrays | {name: q.astype(complex)})),
            )


FLOATS = ["float64", "float32", "float16", "bfloat16"]
TYPES = {
    "q": [*FLOATS, "float8_e4m3fn"], "k": [*FLOATS, "float8_e4m3fn"], "v": [*FLOATS, "float8_e4m3fn"], "do": FLOATS,
    "tq": FLOATS, "tk": FLOATS, "tv": FLOATS, "mask": ["bool", *FLOATS], "cu_seqlens_q": ["int32"],
    "cu_seqlens_k": ["int32"], "x": [*FLOATS, "float8_e4m3fn"],
}  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
def test_a_rejected_type_is_answered_with_those_that_are_taken(name):
    """No type is named that is rejected next; and types that only the library rejects are so with its own list."""
    makes = {"do": octet.attention_vjp, "x": octet.quantize, "mask": octet.attention}
    makes |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), octet.attention_varlen)
    makes |= dict.fromkeys(("tq", "tk", "tv"), octet.attention_jvp)
    function = makes.get(name, octet.attention)
    arrays = ARRAYS.get(function, {"x": Q, "operand": "k"}) | ({"mask": torch.zeros(8, 8)} if name == "mask" else {})

    def call(dtype):
        exact = {"precision": "f64"} if dtype is torch.float64 and name != "x" else {}
        return function(**(arrays | {name: arrays[name].to(dtype)}), **exact)

    with pytest.raises(octet.InvalidArgument, match=f"^{name}: dtype complex64, allowed: ") as rejection:
        call(torch.complex64)
    listed = re.findall(r"'(\w+)'(?! *\))", str(rejection.value))
    assert listed == TYPES[name]
    if name == "x":
        assert "at precision" not in str(rejection.value)
    for dtype in listed:
        if (name, dtype) == ("q", "float8_e4m3fn"):
            continue  # of several precisions, one is to be named
        call(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.uint8, torch.bool])
def test_integers_are_no_q(dtype):
    for precision in (None, "bf16"):
        reject("q: dtype", lambda precision=precision: octet.attention(Q.to(dtype), Q, Q, precision=precision))
    with pytest.raises(
        octet.InvalidArgument, match="^k: dtype .*(allowed: f32, f16, bf16, e4m3|give f32, f16 or bf16)$"
    ):
        octet.attention(Q, Q.to(dtype), Q)
    with pytest.raises(octet.InvalidArgument, match="codes come as the QTensor of octet.quantize"):
        octet.attention(Q.to(dtype), Q, Q)
