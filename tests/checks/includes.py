"""Who may include whom, as docs/design.md says: each folder includes only what its row allows."""

import pathlib
import re
import sys

# folder: the prefixes its quoted and octet/ includes may have, and the third-party headers of its tools.
RULES = {
    "include/octet": ["octet/"],
    "src/core": ["octet/", "core/"],
    "src/cpu": ["octet/", "core/", "cpu/"],
    "src/ffi": ["octet/", "xla/ffi/api/"],
    "cli": ["octet/", "CLI/", "nlohmann/", "fmt/"],
    "tests/unit": ["octet/", "core/", "cpu/", "support/", "gtest/", "gmock/", "nlohmann/"],
    "tests/cli": ["octet/", "support/", "gtest/", "gmock/", "nlohmann/"],
    "tests/fuzz": ["octet/", "fuzzer/"],
    "tests": ["octet/", "support/", "misuse/", "passes/", "laws/", "gtest/", "gmock/", "nlohmann/"],
}
# Each folder of src/cuda knows those before it.
CUDA = ["cuda/atomic", "cuda/ptx", "cudaTypedefs.h"]  # the toolkit's own headers
RULES["src/cuda/ptx"] = [*CUDA, "cuda/ptx/"]
RULES["src/cuda/tile"] = [*CUDA, "cuda/ptx/", "cuda/tile/"]
RULES["src/cuda/attn"] = [*CUDA, "cuda/ptx/", "cuda/tile/", "cuda/attn/"]
RULES["src/cuda/quant"] = [
    *CUDA,
    "octet/",
    "core/",
    "cuda/ptx/",
    "cuda/tile/",
    "cuda/attn/",
    "cuda/host/status.h",
    "cuda/host/launch.h",
    "cuda/quant/",
]
RULES["src/cuda/host"] = [*CUDA, "octet/", "core/", "cuda/attn/", "cuda/host/", "cuda/quant/"]
RULES["src/cuda/sm90"] = [*CUDA, "octet/", "core/", "cpu/rows.h", "cuda/"]  # the quantisers' constants are the CPU's
RULES["tests/gpu"] = ["octet/", "support/", "passes/", "gpu/", "gtest/"]
RULES["tests/gpu/inside"] = ["octet/", "core/", "cpu/rows.h", "cuda/", "gtest/"]
# The kernels of the CPU include core and one another, but neither the quantisers nor the reference.
RULES["src/cpu/kernels"] = [
    "octet/",
    "core/",
    "cpu/kernels/",
    "cpu/rows.h",
    "cpu/parallel.h",
    "cpu/elements.h",
    "cpu/isa.h",
]
SYSTEM = re.compile(r"[a-z_0-9]+(\.h)?|sys/[a-z_]+\.h")  # <vector>, <math.h>, <sys/mman.h>
INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]', re.MULTILINE)


def allowed(path, roots, quote, header, prefixes):
    if quote == '"' and any((root / header).is_file() for root in [path.parent, *roots]):
        return True  # its own folder
    if any(header.startswith(prefix) for prefix in prefixes):
        return True
    return quote == "<" and SYSTEM.fullmatch(header)


def main():
    root = pathlib.Path(sys.argv[1])
    strangers, files = [], 0
    for suffix in ("*.h", "*.hpp", "*.cc", "*.cu", "*.inc"):
        for path in sorted(root.glob(f"**/{suffix}")):
            relative = path.relative_to(root).as_posix()
            folder = max((f for f in RULES if relative.startswith(f + "/")), key=len, default=None)
            if folder is None:
                continue
            files += 1
            roots = [root / folder] + ([root / "cli"] if folder in ("tests/cli", "tests/fuzz") else [])
            for quote, header in INCLUDE.findall(path.read_text()):
                if not allowed(path, roots, quote, header, RULES[folder]):
                    strangers.append(f"{relative}: includes {header}; {folder} may include {', '.join(RULES[folder])}")
    print("\n".join(strangers) or f"{files} files include only what docs/design.md allows")
    if not files:
        strangers.append("no file was found")
    return 1 if strangers else 0


sys.exit(main())
