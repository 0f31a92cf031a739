"""_abi.py says what octet.h says: a C program prints sizes, offsets and enumerators, as its compiler sees them."""

import ctypes
import os
import pathlib
import re
import subprocess
from typing import get_args

import octet
import pytest
from octet import _abi, _library, _options, _rounding

INCLUDE = pathlib.Path(__file__).resolve().parents[2] / "include"
STRUCTS = {
    "octet_tensor": _abi.Tensor,
    "octet_quantization": _abi.Quantization,
    "octet_attention": _abi.Attention,
    "octet_rounding": _abi.Rounding,
    "octet_arguments": _abi.Arguments,
    "octet_rope": _abi.Rope,
    "octet_append_arguments": _abi.AppendArguments,
}
# prefix of the enumerators, and the names in _abi
ENUMS = {
    "OCTET_PRECISION_": _abi.PRECISIONS,
    "OCTET_ALIGNMENT_": _abi.ALIGNMENTS,
    "OCTET_BIAS_CORRECTION_": _abi.BIAS_CORRECTIONS,
    "OCTET_DELTA_FROM_": _abi.DELTAS,
    "OCTET_PER_": _abi.GRANULARITIES,
    "OCTET_OPERAND_": _abi.OPERANDS,
    "OCTET_ROPE_": _abi.ROPE_STYLES,
    "OCTET_NORM_": _abi.NORMS,
    "OCTET_STATISTIC_": {name: i for i, name in enumerate(_abi.STATISTICS)},
    "OCTET_MASK_": {"causal": _abi.MASK_CAUSAL, "window": _abi.MASK_WINDOW},
    "OCTET_DTYPE_": {"none": _abi.DTYPES["none"]},
    "OCTET_ZERO_POINT_": {name: n for name, n in _abi.ZERO_POINTS.items() if name != "symmetric"},
    "OCTET_": {
        **{name: n for name, n in _abi.DTYPES.items() if name != "none"},
        **_abi.DEVICES, **_abi.PASSES, **_abi.SWITCHES,
        "symmetric": _abi.ZERO_POINTS["symmetric"],
        "ok": _abi.STATUS_OK, "invalid_argument": _abi.STATUS_INVALID_ARGUMENT,
        "unsupported": _abi.STATUS_UNSUPPORTED, "workspace_too_small": _abi.STATUS_WORKSPACE_TOO_SMALL,
        "failure": _abi.STATUS_FAILURE,
    },
}  # fmt: skip
NOT_MIRRORED = {
    "OCTET_PRECISION_NONE",
    "OCTET_MASK_NONE",
    "OCTET_STATISTICS",
}


DEFAULT = "((octet_rounding)OCTET_ROUNDING_INIT)."


@pytest.fixture(scope="module")
def header(tmp_path_factory):
    """Sizes and offsets here are those that a C compiler finds."""
    expressions = [f"sizeof({struct})" for struct in STRUCTS]
    for struct, mirror in STRUCTS.items():
        for field, _ in mirror._fields_:
            expressions += [f"offsetof({struct}, {field})", f"sizeof((({struct}*)0)->{field})"]
    expressions += [prefix + name.upper() for prefix, names in ENUMS.items() for name in names]
    expressions += [DEFAULT + field for field, _ in _abi.Rounding._fields_]
    folder = tmp_path_factory.mktemp("abi")
    lines = "".join(f'  printf("%lld\\n", (long long)({x}));\n' for x in expressions)
    includes = "#include <octet/octet_study.h>\n#include <stdio.h>\n"
    (folder / "print.c").write_text(f"{includes}int main(void) {{\n{lines}}}\n")
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-std=c11", f"-I{INCLUDE}", "print.c", "-o", "print"], cwd=folder, check=True)
    numbers = subprocess.run([folder / "print"], capture_output=True, text=True, check=True).stdout.split()
    return dict(zip(expressions, map(int, numbers), strict=True))


@pytest.mark.parametrize("struct", STRUCTS)
def test_fields_lie_where_the_header_puts_them(struct, header):
    mirror = STRUCTS[struct]
    assert ctypes.sizeof(mirror) == header[f"sizeof({struct})"]
    for field, _ in mirror._fields_:
        place = getattr(mirror, field)
        assert place.offset == header[f"offsetof({struct}, {field})"], field
        assert place.size == header[f"sizeof((({struct}*)0)->{field})"], field


def test_a_rounding_of_nothing_is_that_of_the_header(header):
    made = _rounding.struct_of(octet.Rounding().text)
    for field, _ in _abi.Rounding._fields_:
        assert getattr(made, field) == header[DEFAULT + field], field


@pytest.mark.parametrize("prefix", ENUMS)
def test_names_have_the_numbers_of_the_header(prefix, header):
    assert {name: header[prefix + name.upper()] for name in ENUMS[prefix]} == ENUMS[prefix]


@pytest.mark.parametrize(
    "words, table",
    [(_options.BiasCorrection, _abi.BIAS_CORRECTIONS), (_options.Switch, _abi.SWITCHES)],
    ids=["bias_correction", "switch"],
)
def test_types_of_keywords_have_all_names(words, table):
    assert get_args(words) == tuple(table)


def test_no_enumerator_of_the_header_is_missing():
    text = (INCLUDE / "octet" / "octet.h").read_text()
    enums = " ".join(re.findall(r"enum[^{;]*\{([^}]*)\}", text))
    declared = set(re.findall(r"\b(OCTET_\w+)\s*=", enums))
    mirrored = {prefix + name.upper() for prefix, names in ENUMS.items() for name in names}
    assert len(declared) > 60 and declared - NOT_MIRRORED == mirrored & declared


def test_no_library_is_loaded_from_the_working_directory(monkeypatch, tmp_path):
    """The name of a library that the system's loader found has no folder, and nothing is looked for beside it."""
    (tmp_path / "liboctet_jax.so").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_library, "path", "liboctet.so.0")
    assert _library.beside("liboctet_jax.so") is None
    monkeypatch.setattr(_library, "path", str(tmp_path / "liboctet.so"))
    assert _library.beside("liboctet_jax.so") == tmp_path / "liboctet_jax.so"
    assert _library.beside("liboctet_dlpack.so") is None
