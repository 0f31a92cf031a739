"""Every snippet of README and the documents runs as it stands there; names that it leaves open are filled in here.

Python runs with arrays of numpy, torch and jax, C++ is compiled and run, shell commands run one by one in a folder
that has the parts of the source and a file in.safetensors. What cannot run here stands in NOT_RUN with the reason. A
block in another language, or in none, fails: output, formulas and schedules are `text`.

Shell commands need OCTET, the command; OCTET_BUILD, the folder that octet is built in. CTest names both.
"""

import functools
import os
import pathlib
import re
import shutil
import subprocess
import sys
from typing import NamedTuple

import octet
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Records of experiments show what there was on their day, and the change log what there was in each version.
DATED = re.compile(r"CHANGELOG\.md|docs/experiments/.*")
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"^(import |from \w+ import |#include |octet |pip |python |scripts/|ladder/|\$ )", re.MULTILINE)
INLINE = re.compile(r"`((?:from octet|import octet|octet [a-z]+ )[^`]*)`")

BUILDS = "builds octet: minutes, and packages from a network"
OTHER_TESTS = "runs other tests"
ON_A_GPU = "needs a GPU"
FOR_A_GPU = "compiles for minutes what a GPU alone runs"
LEFT_OPEN = "names a file of the reader's, in capitals, or leaves arguments out"
# (document, command or first line of a block) -> why it is not run. * stands for all blocks of the document.
NOT_RUN = {
    ("README.md", "pip install ."): BUILDS,
    ("README.md", "scripts/demo"): BUILDS,
    ("README.md", "scripts/test"): BUILDS,
    ("CONTRIBUTING.md", "scripts/bootstrap"): BUILDS,
    ("CONTRIBUTING.md", "scripts/build release octet octet_cli"): BUILDS,
    ("CONTRIBUTING.md", "cmake --preset release -B build/cpu -DOCTET_CUDA=OFF"): BUILDS,
    ("CONTRIBUTING.md", "ctest --preset release -R misuse"): OTHER_TESTS,
    ("CONTRIBUTING.md", "build/release/tests/misuse/misuse_test --gtest_filter='Tensors.*'"): OTHER_TESTS,
    ("CONTRIBUTING.md", "python3 -m pytest tests/python -k lse"): OTHER_TESTS,
    ("CONTRIBUTING.md", "scripts/lint"): OTHER_TESTS,
    ("CONTRIBUTING.md", "scripts/test --quick"): OTHER_TESTS,
    ("docs/api.md", "*"): "signatures and docstrings, which scripts/api writes and a test of its own compares",
    ("docs/benchmarks.md", "octet bench --device cuda ..."): LEFT_OPEN,
    ("docs/benchmarks.md", "octet check FILES --backend sm90 --pass fwd,bwd"): ON_A_GPU,
    (
        "docs/numerics.md",
        "octet check FILES --causal --pass fwd,bwd --precision all --out-dtype bf16 --json",
    ): LEFT_OPEN,
    ("docs/python.md", "pip install ."): BUILDS,
    ("docs/python.md", "scripts/wheel"): BUILDS,
    (
        "docs/training.md",
        "python bench/training.py runs/large --preset 10m --dtype bfloat16 --steps 300 "
        "--tokens-per-step 32768 --log-every 20 --held-out-every 60 --measure-every 100",
    ): ON_A_GPU,
    (
        "docs/training.md",
        "python bench/training.py runs/small --preset 10m --dtype bfloat16 --steps 600 "
        "--tokens-per-step 4096 --log-every 20 --held-out-every 120 --measure-every 200",
    ): ON_A_GPU,
    ("docs/training.md", "octet plan FILE --budget 0.02"): LEFT_OPEN,
    ("docs/training.md", "octet report FILE --html report.html"): LEFT_OPEN,
    ("docs/tuning.md", "octet tune --device cuda"): ON_A_GPU,
    ("docs/tuning.md", "octet tune --shape 2,32,8,4096,4096,128 --causal --device cuda"): ON_A_GPU,
    (
        "docs/tuning.md",
        "octet bench --shape 2,32,8,4096,4096,128 --precision bf16 --pass fwd,bwd --device cuda --json > calls.json",
    ): ON_A_GPU,
    ("docs/tuning.md", "octet tune --file calls.json --device cuda"): ON_A_GPU,
    ("docs/tuning.md", "pip install ."): BUILDS,
    (
        "docs/tuning.md",
        "octet tune --precision bf16,int8_f16 --pass fwd --shape 1,24,24,4608,4608,128 --shape 1,32,8,8192,8192,128 "
        "--causal --device cuda",
    ): ON_A_GPU,
    (
        "docs/tuning.md",
        "octet explain --shape 1,24,24,4608,4608,128 --precision bf16 --causal --device cuda",
    ): ON_A_GPU,
    ("docs/use.md", "octet check in.safetensors --backend sm90 --pass fwd,bwd"): ON_A_GPU,
    ("docs/use.md", "octet tune --shape 1,8,2,4096,4096,128 --causal --device cuda"): ON_A_GPU,
    ("ladder/README.md", "ladder/build 2 90a"): FOR_A_GPU,
    ("ladder/README.md", "build/ladder/90a/2_flash"): ON_A_GPU,
    ("ladder/README.md", "ladder/profile 2"): ON_A_GPU,
    ("ladder/README.md", "python -m octet.ladder build"): FOR_A_GPU,
    ("ladder/README.md", "python examples/python/ladder_times.py --dim 128 --chart ladder.svg"): ON_A_GPU,
    ("ladder/debug.md", "for rung in 1 2 3 4 5 6; do ladder/build $rung 90a; done"): FOR_A_GPU,
    ("ladder/debug.md", "ladder/sanitize build/ladder/90a"): ON_A_GPU,
    ("ladder/debug.md", "NVCC_APPEND_FLAGS=-G ladder/build 2 90a"): FOR_A_GPU,
    (
        "ladder/debug.md",
        "cuda-gdb --args build/ladder/90a/2_flash --constant --heads 1 --seq 100 --dim 64 "
        "--no-check --warmup 0 --runs 0",
    ): ON_A_GPU,
}


class Snippet(NamedTuple):
    document: str
    line: int
    language: str
    text: str

    @property
    def name(self):
        return f"{self.document}:{self.line}"


def documents():
    """The documents of the source, not of what was built or installed in its folder."""
    for path in sorted(
        [*ROOT.glob("*.md"), *(p for d in ("docs", "examples", "ladder") for p in (ROOT / d).rglob("*.md"))]
    ):
        name = path.relative_to(ROOT).as_posix()
        if not DATED.fullmatch(name):
            yield name, path.read_text()


def commands(snippet):
    """A Snippet for each command of a block of shell commands, without comments."""
    text = snippet.text.replace("\\\n", " ")
    for line in text.splitlines():
        command = re.sub(r"(^|\s+)#.*", "", line).strip()
        if command:
            yield snippet._replace(text=command)


def read():
    found = []
    for name, text in documents():
        for match in FENCED.finditer(text):
            found.append(Snippet(name, text.count("\n", 0, match.start()) + 1, match[1], match[2]))
        prose = FENCED.sub(lambda match: re.sub(".", "", match[0]), text)  # lines keep their numbers
        for match in INLINE.finditer(prose):
            language = "sh" if match[1].startswith("octet ") else "python"
            found.append(Snippet(name, prose.count("\n", 0, match.start()) + 1, language, match[1]))
    # The example at the top of octet.hpp is a comment.
    header = (ROOT / "include/octet/octet.hpp").read_text().split("#pragma once")[0]
    found.append(
        Snippet("include/octet/octet.hpp", 4, "cpp", "\n".join(re.findall(r"^//   (.*)", header, re.MULTILINE)))
    )
    return [one for x in found for one in (commands(x) if x.language == "sh" else [x])]


SNIPPETS = read()


def key(snippet):
    """What NOT_RUN calls it, if it is there."""
    for second in ("*", snippet.text.strip().split("\n")[0]):
        if (snippet.document, second) in NOT_RUN:
            return snippet.document, second
    return None


def of(language):
    """The snippets of a language that are to run, as parameters."""
    chosen = [x for x in SNIPPETS if x.language == language and not key(x)]
    return pytest.mark.parametrize("snippet", chosen, ids=[f"{x.name} {x.text.split(chr(10))[0][:60]}" for x in chosen])


def test_each_block_is_run_or_listed():
    wrong = [f"{x.name}: ```{x.language}" for x in SNIPPETS if x.language not in ("python", "sh", "cpp", "text")]
    assert not wrong, (
        f"blocks in a language that nothing runs, allowed: python, sh, cpp, and text for what is no code: {wrong}"
    )
    code = [x.name for x in SNIPPETS if x.language == "text" and not key(x) and CODE.search(x.text)]
    assert not code, f"blocks of text that hold code: {code}"
    # Fences that FENCED does not know: indented, of tildes, with more than the name of a language.
    for name, text in documents():
        fences = re.findall(r"^\s*(?:```|~~~)", text, re.MULTILINE)
        assert len(fences) == 2 * len(FENCED.findall(text)), f"{name}: a block whose fence is no ```LANGUAGE line"
    assert len(SNIPPETS) > len(NOT_RUN)


def test_the_lists_hold_nothing_else():
    unused = NOT_RUN.keys() - {key(x) for x in SNIPPETS}
    assert not unused, f"no document has {sorted(unused)}"


# What snippets leave open, by framework: bf16 where nothing else is said, [batch, heads, tokens, dim].
ARRAYS = {
    "numpy": """
import ml_dtypes, numpy as np
random = np.random.default_rng(0)
normal = lambda *shape: random.standard_normal(shape).astype(ml_dtypes.bfloat16)
numbers, lengths = lambda *x: np.array(x, np.float32), lambda *x: np.array(x, np.int32)
""",
    "torch": """
import torch
normal = lambda *shape: torch.randn(*shape, dtype=torch.bfloat16)
numbers, lengths = lambda *x: torch.tensor(x), lambda *x: torch.tensor(x, dtype=torch.int32)
""",
    "jax": """
import jax, jax.numpy as jnp, numpy
from jax.sharding import PartitionSpec as P
random = numpy.random.default_rng(0)  # jax.random would be compiled for each shape, which takes 8 seconds
normal = lambda *shape: jnp.asarray(random.standard_normal(shape), jnp.bfloat16)
numbers, lengths = lambda *x: jnp.array(x), lambda *x: jnp.array(x, jnp.int32)
""",
}
OPEN = """
import octet
q, k, v, do, tq, tk, tv = (normal(2, 4, 32, 64) for _ in range(7))
qs = normal(3, 2, 4, 32, 64)
q_packed, k_packed, v_packed = (normal(64, 4, 64) for _ in range(3))
cu_seqlens = cu_seqlens_q = cu_seqlens_k = lengths(0, 24, 64)
mask, sinks = normal(2, 1, 32, 32), numbers(0.0, 1.0, -1.0, 0.5)
"""


def frameworks():
    """(snippet, framework): a document of one framework has its arrays, others have those of each in turn."""
    for snippet in SNIPPETS:
        if snippet.language == "python" and not key(snippet):
            one = [x for x in ARRAYS if snippet.document == f"docs/{x}.md" or re.search(rf"\b{x}\.", snippet.text)]
            one = ["torch"] if "octet.compat" in snippet.text else one
            for framework in one or ARRAYS:
                yield pytest.param(snippet, framework, id=f"{snippet.name} {framework}")


# A program that imports octet and a framework, which takes longer than most snippets, and runs snippet.py in each
# folder that it is told, in a process of its own, forked before anything else happens. It answers with the exit status.
FORKS = """
import os, runpy, signal, sys, traceback
import octet
{imports}
for line in sys.stdin:
    if not (child := os.fork()):
        os.chdir(line.rstrip("\\n"))
        printed = os.open("printed", os.O_CREAT | os.O_WRONLY)
        os.dup2(printed, 1), os.dup2(printed, 2)
        signal.alarm(300)
        status = 0
        try:
            runpy.run_path("snippet.py", run_name="__main__")
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
IMPORTS = {"numpy": "import ml_dtypes", "torch": "import torch", "jax": "import jax.numpy"}


@pytest.fixture(scope="module")
def forks():
    """Runs snippet.py in a folder, with a framework imported; gives the exit status."""
    started = {}

    def run(framework, folder):
        if framework not in started:
            command = [sys.executable, "-W", "ignore:os.fork", "-c", FORKS.format(imports=IMPORTS[framework])]
            four_devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            started[framework] = subprocess.Popen(command, env=os.environ | four_devices, **pipes)
        process = started[framework]
        print(folder, file=process.stdin, flush=True)
        return int(process.stdout.readline())

    yield run
    for process in started.values():
        process.communicate()  # closes stdin, with which the program ends


@pytest.mark.parametrize("snippet, framework", list(frameworks()))
def test_python(snippet, framework, tmp_path, forks):
    pytest.importorskip("ml_dtypes" if framework == "numpy" else framework)
    if framework == "jax" and re.search("shard_map|export", snippet.text) and octet.info()["xla_handlers"] is None:
        pytest.skip("built without jaxlib's headers")
    (tmp_path / "snippet.py").write_text(ARRAYS[framework] + OPEN + snippet.text)
    status, printed = forks(framework, tmp_path), (tmp_path / "printed").read_text()
    assert status == 0, f"{snippet.name}:\n{snippet.text}\n{printed[-3000:]}"


CPP_OPEN = """
#include <cstdint>
#include <vector>
int main() {
  const std::size_t n = 1 * 8 * 2048 * 128;
  std::vector<std::uint16_t> q_data_(n), k_data_(n), v_data_(n), o_data_(n);
  std::vector<float> lse_data_(1 * 8 * 2048);
  auto *q_data = q_data_.data(), *k_data = k_data_.data(), *v_data = v_data_.data(), *o_data = o_data_.data();
  float* lse_data = lse_data_.data();
"""


@of("cpp")
def test_cpp(snippet, tmp_path):
    if "OCTET_LIBRARY" not in os.environ:
        pytest.skip("OCTET_LIBRARY names no library to link")
    library = pathlib.Path(os.environ["OCTET_LIBRARY"])
    includes = re.findall(r"^#include .*$", snippet.text, re.MULTILINE) or ["#include <octet/octet.hpp>"]
    body = re.sub(r"^#include .*$", "", snippet.text, flags=re.MULTILINE)
    source, program = tmp_path / "snippet.cc", tmp_path / "snippet"
    source.write_text("\n".join(includes) + CPP_OPEN + "{\n" + body + "\n}\n}\n")
    compiler = [os.environ.get("CXX", "c++"), "-std=c++20", f"-I{ROOT / 'include'}", source, "-o", program]
    compiled = subprocess.run([*compiler, library, f"-Wl,-rpath,{library.parent}"], capture_output=True, text=True)
    assert compiled.returncode == 0, f"{snippet.name}:\n{compiled.stderr}"
    subprocess.run([program], check=True, timeout=300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """As a clone that was built, with a reader's file; what commands write stays out of the source."""
    if not {"OCTET", "OCTET_BUILD"} <= os.environ.keys():
        pytest.skip("OCTET and OCTET_BUILD name no command and no build")
    folder = tmp_path_factory.mktemp("clone")
    for path in ROOT.iterdir():
        if path.name not in ("build", "dist"):
            (folder / path.name).symlink_to(path)
    (folder / "build").mkdir()
    (folder / "build/release").symlink_to(os.environ["OCTET_BUILD"])
    (folder / "in.safetensors").symlink_to(ROOT / "examples/data/gpt64_layer2.safetensors")
    # The emulator is compiled once, by ladder/build or, of the same sources, by CMake.
    emulator = pathlib.Path(os.environ["OCTET_BUILD"]) / "tests/emulator/libcudart_emulated.so"
    if emulator.exists():
        (folder / "build/ladder/emulated").mkdir(parents=True)
        shutil.copy2(emulator, folder / "build/ladder/emulated")
    (folder / "bin").mkdir()
    (folder / "bin/octet").symlink_to(os.environ["OCTET"])
    python = folder / "bin/python"  # no link, which would not find the packages of a virtual environment
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return folder


@functools.cache
def ran(command, folder):
    """A command that stands in several documents runs once."""
    environment = os.environ | {"PATH": f"{folder / 'bin'}:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"}
    shell = ["bash", "-euo", "pipefail", "-c", command]
    return subprocess.run(shell, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@of("sh")
def test_shell(snippet, folder):
    if "emulated" in snippet.text and not shutil.which("nvcc"):
        pytest.skip("no nvcc")
    if snippet.document.startswith("examples/train/"):
        pytest.importorskip("torch")
        pytest.importorskip("tqdm")
    done = ran(snippet.text, folder)
    assert done.returncode == 0, f"{snippet.name}: {snippet.text}\n{done.stderr[-3000:]}"
