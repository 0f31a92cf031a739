"""Every source of the library, command, ladder and tests is compiled: compiled.py SOURCE compile_commands.json"""

import json
import pathlib
import re
import sys

root = pathlib.Path(sys.argv[1]).resolve()
compiled = {pathlib.Path(entry["file"]).resolve() for entry in json.loads(pathlib.Path(sys.argv[2]).read_text())}
# CMake's files of several sources include them.
for source in [source for source in compiled if source.name.startswith("unity_")]:
    compiled.update(pathlib.Path(name).resolve() for name in re.findall(r'#include "(.*)"', source.read_text()))
# By clang, by an outside project, where there is CUDA, where there is jaxlib.
elsewhere = [
    "tests/fuzz",
    "tests/install",
    "src/cuda",
    "cli/gpu_place.cc",
    "tests/gpu",
    "tests/emulator",
    "src/ffi",
    "ladder/harness/main.cc",
]
forgotten = [
    source.relative_to(root)
    for folder in ("src", "cli", "ladder", "tests")
    for source in sorted((root / folder).rglob("*.cc"))
    if source not in compiled and not any(source.is_relative_to(root / other) for other in elsewhere)
]
if forgotten:
    sys.exit("no CMakeLists.txt compiles " + ", ".join(map(str, forgotten)))
