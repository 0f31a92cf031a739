"""Who may include whom, as docs/design.md says: each folder includes only what its row allows."""

import pathlib
import re
import sys

# Each folder with sources has a row of its own: the prefixes that its quoted and octet/ includes may have, and the
# third-party headers of its tools. A folder without a row fails, so that a new one is thought about.
CLI = ["octet/", "CLI/", "nlohmann/", "fmt/"]
CABI_TESTS = ["octet/", "support/", "misuse/", "passes/", "laws/", "gtest/", "gmock/", "nlohmann/"]
UNIT_TESTS = ["octet/", "core/", "cpu/", "support/", "gtest/", "gmock/", "nlohmann/"]
RULES = {
    "include/octet": ["octet/"],
    "src/core": ["octet/", "core/"],
    "src/core/quant": ["octet/", "core/quant/"],
    "src/cpu": ["octet/", "core/", "cpu/attention/job.h", "cpu/isa.h", "cpu/parallel.h"],
    "src/cpu/quantize": ["octet/", "core/", "cpu/parallel.h", "cpu/quantize/"],
    "src/cpu/reference": ["octet/", "core/", "cpu/parallel.h", "cpu/sinks.h", "cpu/reference/", "sanitizer/"],
    "src/ffi": ["octet/", "xla/ffi/api/"],
    "cli": CLI,
    "cli/commands": CLI,
    "cli/io": CLI,
    "tests/abi": ["octet/", "gtest/"],
    "tests/checks": ["octet/"],
    "tests/cli": ["octet/", "support/", "gtest/", "gmock/", "nlohmann/"],
    "tests/emulator": [],  # the standard library, the toolkit and zstd
    "tests/fuzz": ["octet/", "fuzzer/"],
    "tests/gpu": ["octet/", "support/", "passes/", "gpu/", "gtest/"],
    "tests/gpu/inside": ["octet/", "core/", "cuda/", "gtest/", "nlohmann/"],
    "tests/install/outside": ["octet/"],
    "tests/laws": CABI_TESTS,
    "tests/misuse": CABI_TESTS,
    "tests/passes": CABI_TESTS,
    "tests/support": CABI_TESTS,
    "tests/unit": UNIT_TESTS,
    "tests/unit/core": UNIT_TESTS,
    "tests/unit/cpu": UNIT_TESTS,
}
# Each folder of the CPU's kernels knows those before it.
GEMM = ["cpu/gemm/"]
PACK = [*GEMM, "core/", "octet/", "cpu/attention/job.h", "cpu/attention/numerics.h", "cpu/attention/pack/"]
SOFTMAX = [*PACK, "cpu/attention/softmax/"]
PASS = [*SOFTMAX, "cpu/parallel.h", "cpu/sinks.h"]
RULES["src/cpu/gemm"] = GEMM
RULES["src/cpu/attention/pack"] = PACK
RULES["src/cpu/attention/softmax"] = SOFTMAX
RULES["src/cpu/attention/fwd"] = [*PASS, "cpu/attention/fwd/"]
RULES["src/cpu/attention/bwd"] = [*PASS, "cpu/attention/bwd/"]
RULES["src/cpu/attention/jvp"] = [*PASS, "cpu/attention/jvp/"]
RULES["src/cpu/attention"] = ["octet/", "core/", "cpu/attention/"]
# Each folder of src/cuda knows those before it.
CUDA = ["cuda/atomic", "cuda/ptx", "cudaTypedefs.h"]  # the toolkit's own headers
RULES["src/cuda/ptx"] = [*CUDA, "cuda/ptx/"]
RULES["src/cuda/fragment"] = [*CUDA, "core/dropout.h", "cuda/ptx/", "cuda/fragment/"]
RULES["src/cuda/host"] = [*CUDA, "octet/", "core/", "cuda/host/", "nlohmann/"]
RULES["src/cuda/scheduler"] = [*CUDA, "octet/", "core/", "cuda/ptx/", "cuda/fragment/", "cuda/host/", "cuda/scheduler/"]
OPERANDS = [*CUDA, "octet/", "core/", "cuda/ptx/", "cuda/fragment/", "cuda/host/", "cuda/operands/"]
RULES["src/cuda/operands"] = RULES["src/cuda/operands/quantize"] = OPERANDS
RULES["src/cuda/quantizers"] = [*CUDA, "octet/", "core/", "cuda/host/", "cuda/quantizers/"]
RULES["src/cuda/fwd"] = [*OPERANDS, "cuda/scheduler/", "cuda/fwd/"]
RULES["src/cuda/bwd"] = [*OPERANDS, "cuda/scheduler/", "cuda/bwd/"]
# The backends: what each pass of one may include of what lies beside it. No pass knows another.
SHARED = {
    "sm90": ["head_dims", "smem", "mma", "pipeline", "kernels", "launch", "passes", "seen_tiles"],
    "sm80": [
        "kinds",
        "smem",
        "mma",
        "transposed_bytes",
        "logits",
        "mask_tile",
        "mask_classes",
        "f16_halves",
        "key_factors",
        "passes",
    ],
}
for backend, passes in (("sm90", ("fwd", "bwd", "jvp")), ("sm80", ("fwd", "bwd", "jvp"))):
    RULES[f"src/cuda/{backend}"] = [*RULES["src/cuda/bwd"], "cuda/fwd/", f"cuda/{backend}/"]
    for one in passes:
        shared = [f"cuda/{backend}/{name}.h" for name in SHARED[backend]]
        half = RULES.get(f"src/cuda/{one}", OPERANDS + ["cuda/scheduler/"])  # without architecture
        RULES[f"src/cuda/{backend}/{one}"] = [*half, *shared, f"cuda/{backend}/{one}/"]
SYSTEM = re.compile(r"[a-z_0-9]+(\.h)?|sys/[a-z_]+\.h")  # <vector>, <math.h>, <sys/mman.h>
INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]', re.MULTILINE)


# Where headers that are named from a root of their own are found.
ROOTS = {"cli": ["cli"], "cli/commands": ["cli"], "cli/io": ["cli"], "tests/cli": ["cli"], "tests/fuzz": ["cli"]}


def sources(root):
    for top in ("include", "src", "cli", "tests", "examples", "bench"):
        for path in sorted((root / top).rglob("*")):
            if path.suffix in (".h", ".hpp", ".c", ".cc", ".cu", ".inc"):
                yield path


def allowed(path, roots, quote, header, prefixes):
    if quote == '"' and any((root / header).is_file() for root in [path.parent, *roots]):
        return True
    if any(header.startswith(prefix) for prefix in prefixes):
        return True
    return quote == "<" and SYSTEM.fullmatch(header)


def main():
    root = pathlib.Path(sys.argv[1])
    strangers, files = [], 0
    for path in sources(root):
        relative, folder = path.relative_to(root).as_posix(), path.parent.relative_to(root).as_posix()
        if folder not in RULES:
            strangers.append(f"{relative}: {folder} has no row in RULES of tests/checks/includes.py; allowed: add one")
            continue
        files += 1
        roots = [root / name for name in ROOTS.get(folder, [])]
        for quote, header in INCLUDE.findall(path.read_text()):
            if not allowed(path, roots, quote, header, RULES[folder]):
                strangers.append(f"{relative}: includes {header}; {folder} may include {', '.join(RULES[folder])}")
    print("\n".join(strangers) or f"{files} files include only what docs/design.md allows")
    if not files:
        strangers.append("no file was found")
    return 1 if strangers else 0


if __name__ == "__main__":
    sys.exit(main())
