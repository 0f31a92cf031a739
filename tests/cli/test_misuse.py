"""Whatever is wrong: one clear line on standard error, exit status 2, no output file, nothing left behind."""

import json
import os
import re
import signal
import subprocess

import numpy as np
import pytest
from conftest import draw, header_bytes, octet, read_safetensors, run_ok, write_safetensors

QKV = {n: {"dtype": "F32", "shape": [1, 1, 2, 8], "data_offsets": [64 * i, 64 * i + 64]} for i, n in enumerate("qkv")}

NAMES = [backend["name"] for backend in json.loads(run_ok("info", "--json"))["backends"]]
BACKENDS = ", ".join(NAMES)


def with_q(**changes):
    return header_bytes(QKV | {"q": QKV["q"] | changes}) + bytes(192)


def rejected(done, message):
    assert done.returncode == 2, done
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("octet: "), done.stderr
    assert message in lines[0]


FILES = {
    "a truncated header": (header_bytes(QKV)[:60], "truncated: header of"),
    "nothing": (b"", "too few for a safetensors header"),
    "a header of 2^60 bytes": ((1 << 60).to_bytes(8, "little") + b"{}", "header of 1152921504606846976 bytes"),
    "deeply nested JSON": (header_bytes(b'{"q":' + b"[" * 500000), 'found an array in "q"'),
    "nested metadata": (header_bytes(b'{"__metadata__":{"a":' + b'{"a":' * 500000), "found an object"),
    "overlapping offsets": (
        header_bytes(QKV | {"k": QKV["k"] | {"data_offsets": [32, 96]}}) + bytes(192),
        "inside another tensor",
    ),
    "negative offsets": (with_q(data_offsets=[-64, 0]), "negative offset -64"),
    "offsets beyond the end": (header_bytes(QKV) + bytes(191), "ends at byte 192, but the file holds 191"),
    "a shape whose product overflows": (with_q(shape=[1 << 32, 1 << 32, 2, 8]), "more elements than memory can hold"),
    "an unknown dtype": (with_q(dtype="F13"), 'unknown dtype "F13", allowed: F64'),
    "a missing tensor": (header_bytes({n: QKV[n] for n in "qk"}) + bytes(128), 'no tensor "v"; found: k, q'),
    "shapes that disagree": (with_q(shape=[1, 1, 1, 16]), "k: shape [1, 1, 2, 8], expected [1, 1, 2, 16]"),
    "two dimensions": (with_q(shape=[2, 8]), "q: shape [2, 8], expected [batch, head, token, dim]"),
    "a head dim of 4 beside 8": (with_q(shape=[1, 1, 4, 4]), "k: head dim 8, expected 4, that of q"),
    "integers": (with_q(dtype="I32"), "q: dtype int32, allowed: f64, f32, f16, bf16, e4m3"),
    "a dtype that is not read": (
        with_q(dtype="U32"),
        'tensor "q" has dtype U32, allowed: F64, F32, F16, BF16, F8_E4M3',
    ),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("command", ["run", "check"])
def test_bad_files(tmp_path, name, command):
    content, message = FILES[name]
    source = tmp_path / "in.safetensors"
    source.write_bytes(content)
    if command == "check" and name == "integers":
        message = "q: dtype i32, allowed: f32, f16, bf16, e4m3"
    rejected(octet(command, source, *([tmp_path / "out.safetensors"] if command == "run" else [])), message)
    assert [p.name for p in tmp_path.iterdir()] == ["in.safetensors"]


ARGUMENTS = {
    "NaN scale": (["--scale", "nan"], "scale: found nan, allowed: positive and finite"),
    "zero scale": (["--scale", "0"], "scale: found 0, allowed: positive and finite"),
    "infinite scale": (["--scale", "inf"], "scale: found inf"),
    "a scale that is no number": (["--scale", "1.2.3"], '--scale: found "1.2.3", expected a number'),
    "unknown precision": (["--precision", "int7"], '--precision: found "int7", allowed: f64, f32, f16, bf16, int8'),
    "a list of precisions": (["--precision", "f32,bf16"], '--precision: found "f32,bf16"'),
    "unknown alignment": (["--causal=left"], '--causal: found "left", allowed: top-left, bottom-right'),
    "unknown backend": (["--backend", "abacus"], f'unknown name "abacus"; known: {BACKENDS}'),
    "unknown bias correction": (
        ["--precision", "bf16", "--bias-correction", "hope"],
        '--bias-correction: found "hope", allowed: f16, none, beta',
    ),
    "the bias correction's name of 0.1.0": (
        ["--precision", "bf16", "--remedy", "none"],
        "--remedy: octet has no such option; use --bias-correction, whose f16 was f16_inside",
    ),
    "a bias correction's value of 0.1.0": (
        ["--precision", "bf16", "--bias-correction", "f16_inside"],
        '--bias-correction: found "f16_inside", allowed: f16, none, beta, exact_delta, gproj',
    ),
    "a bias correction for f32": (["--bias-correction", "beta"], "bias corrections are for f16 and bf16"),
    "unknown output type": (
        ["--out-dtype", "f128"],
        '--out-dtype: found "f128", allowed with precision f32: f32, f16, bf16',
    ),
    "an output type without room": (
        ["--out-dtype", "int8"],
        '--out-dtype: found "int8", allowed with precision f32: f32, f16, bf16',
    ),
    "an output type of fp8_raw": (
        ["--out-dtype", "e4m3"],
        '--out-dtype: found "e4m3", allowed with precision f32: f32, f16, bf16',
    ),
    "an output type of f64": (
        ["--out-dtype", "f64"],
        '--out-dtype: found "f64", allowed with precision f32: f32, f16, bf16',
    ),
    "an output type of none": (
        ["--precision", "fp8_raw", "--out-dtype", "e5m2"],
        "allowed with precision fp8_raw: f32, f16, bf16, e4m3",
    ),
    "a scale below float32": (
        ["--scale", "1e-46"],
        "--scale: found 1e-46, beyond float32; allowed: sizes from 1.2e-38 to 3.4e38",
    ),
    "a scale above float32": (["--scale", "1e39"], "--scale: found 1e39, beyond float32"),
    "a beta below float32": (
        ["--precision", "bf16", "--bias-correction", "beta", "--beta", "1e-46"],
        "--beta: found 1e-46, beyond float32",
    ),
    "half a window": (["--window", "3"], '--window: found "3", expected LEFT,RIGHT'),
    "a window below -1": (["--window", "-2,0"], "window: found -2, 0"),
    "an unknown option": (["--fast"], "--fast"),
    "a backward of a forward-only precision": (["--precision", "fp8_raw", "--backward"], "fp8_raw"),
    "hadamard for f32": (["--hadamard", "on"], "hadamard: given with precision f32"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_bad_arguments(tmp_path, small, name):
    arguments, message = ARGUMENTS[name]
    rejected(octet("run", small, tmp_path / "out.safetensors", *arguments), message)
    assert [p.name for p in tmp_path.iterdir()] == ["in.safetensors"]


NO_GPU = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
# Why a backend of GPUs has none: there is no driver, or it shows no GPU. A build for CPUs has no such backend.
NO_GPU_REASON = re.compile("no NVIDIA driver|no usable GPU: [^;,]*")
OF_GPUS = [name for name in NAMES if name not in ("cpu", "reference")]


@pytest.mark.parametrize(
    "precisions, option, value, message",
    [
        ("f32,int8", "--bias-correction", "none", "belongs to precisions f16 and bf16, and neither is asked for"),
        ("f32", "--beta", "3", "belongs to precisions f16 and bf16, and neither is asked for"),
        ("bf16,fp8", "--hadamard", "off", "belongs to precisions int8, int8_f16 and int8_fp8, and none is asked for"),
        ("sagebwd", "--smooth-q", "on", "belongs to precisions int8, int8_f16 and int8_fp8, and none is asked for"),
    ],
)
def test_an_option_for_none_of_the_precisions(small, precisions, option, value, message):
    rejected(octet("check", small, "--precision", precisions, option, value), f"{option}: {message}")


@pytest.mark.parametrize(
    "where", [["--backend", "sm90"], ["--backend", "sm80"], ["--device", "cuda"], ["--device", "cuda:1"]]
)
@pytest.mark.parametrize("command", ["run", "check", "bench"])
@pytest.mark.parametrize("options", [[], ["backward"]])
def test_a_gpu_that_is_not_there(tmp_path, small, command, where, options):
    out = tmp_path / "out.safetensors"
    arguments = {"run": [small, out], "check": [small], "bench": ["--shape", "1,1,1,64,64,64"]}[command]
    backward = ["--backward"] if command == "run" else ["--pass", "bwd"]
    done = octet(command, *arguments, *where, *(backward if options else []), env=NO_GPU)
    if OF_GPUS and (where[0] == "--device" or where[1] in OF_GPUS):
        [reason] = NO_GPU_REASON.findall(done.stderr)  # it is told once
        rejected(done, f"no backend can compute on cuda tensors here: {', '.join(OF_GPUS)}: {reason}")
    elif where[0] == "--backend":
        rejected(done, f'unknown name "{where[1]}"; known: {BACKENDS}')
    else:
        rejected(done, "no backend can compute on cuda tensors here: CPU only: ")
    assert [p.name for p in tmp_path.iterdir()] == ["in.safetensors"]


def test_explain_and_info_without_a_gpu():
    """Every backend declines every problem on a GPU, with its own reason, in the order in which they are asked."""
    info = json.loads(octet("info", "--json", env=NO_GPU).stdout)
    assert info["gpus"] == [] and all(b["available"] == (b["device"] == "cpu") for b in info["backends"])
    reasons = [(b["name"], b["reason"]) for b in info["backends"] if b["device"] == "cuda"]
    assert [name for name, _ in reasons] == OF_GPUS and all(NO_GPU_REASON.match(reason) for _, reason in reasons)
    on_cpu = "the tensors are on cuda; it works on cpu tensors"
    arguments = [
        "--shape",
        "1,2,2,64,64,64",
        "--precision",
        "all",
        "--pass",
        "fwd,bwd,jvp",
        "--device",
        "cuda",
        "--json",
    ]
    done = octet("explain", *arguments, env=NO_GPU)
    assert done.returncode == 1 and "no backend computes fwd f32 f32, " in done.stderr
    rows = json.loads(done.stdout)
    assert len(rows) == 3 * len({row["precision"] for row in rows}) > 20
    for row in rows:
        assert row["backend"] is None and row["kernel"] is None
        answers = [(a["backend"], a["detail"]) for a in row["answers"] if a["answer"] == "no"]
        assert answers == [*reasons, ("cpu", on_cpu), ("reference", on_cpu)]
    for name, reason in reasons:
        done = octet("explain", "--shape", "1,2,2,64,64,64", "--backend", name, env=NO_GPU)
        assert done.returncode == 1 and done.stdout.splitlines()[1:] == [f"  {name}: no, {reason}"]


@pytest.mark.parametrize(
    "device, message",
    [
        ("tpu", 'found "tpu", allowed: cpu, cuda'),
        ("cuda:", 'found "", expected a whole number'),
        ("cuda:x", 'found "x"'),
        ("cuda:-1", "expected cuda:0 to cuda:255"),
        ("cpu:1", "expected cpu, cuda or cuda:N"),
        ("cuda:1:2", "expected cpu, cuda"),
    ],
)
@pytest.mark.parametrize("command", ["run", "explain"])
def test_bad_devices(tmp_path, small, command, device, message):
    arguments = [small, tmp_path / "out.safetensors"] if command == "run" else ["--shape", "1,2,2,64,64,64"]
    rejected(octet(command, *arguments, "--device", device), message)


def test_a_missing_file(tmp_path):
    rejected(
        octet("run", tmp_path / "none.safetensors", tmp_path / "out.safetensors"),
        "none.safetensors: cannot open: No such file or directory",
    )
    assert list(tmp_path.iterdir()) == []


def test_a_head_count_that_does_not_divide(tmp_path):
    source = write_safetensors(tmp_path / "in.safetensors", draw(1, hq=3, hkv=2))
    rejected(
        octet("run", source, tmp_path / "out.safetensors"),
        "q: 3 heads, which is not a multiple of the 2 heads of k and v",
    )


def test_causal_with_lengths_that_differ_asks_for_the_diagonal(tmp_path):
    source = write_safetensors(tmp_path / "in.safetensors", draw(1, sq=8, sk=9))
    done = octet("run", source, tmp_path / "out.safetensors", "--causal")
    rejected(done, "top-left")
    rejected(done, "bottom-right")


def test_companions_that_run_needs(tmp_path):
    source = write_safetensors(tmp_path / "in.safetensors", draw(1, companions=False))
    rejected(octet("run", source, tmp_path / "out.safetensors", "--backward"), 'no tensor "do"')
    rejected(octet("run", source, tmp_path / "out.safetensors", "--jvp"), 'no tensor "tq"')


@pytest.mark.parametrize(
    "out",
    ["none/out.safetensors", "none/out", "folder.safetensors", "in.safetensors", "/proc/out.safetensors", "out.npy"],
)
def test_an_unwritable_output(tmp_path, small, out):
    (tmp_path / "folder.safetensors").mkdir()
    before = small.read_bytes()
    done = octet("run", small, tmp_path / out)
    rejected(done, out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder.safetensors", "in.safetensors"]
    assert small.read_bytes() == before


def test_a_full_disk_leaves_nothing(tmp_path, small):
    limited = [
        "bash",
        "-c",
        'trap "" XFSZ; ulimit -f 1; exec "$@"',
        "-",
        os.environ["OCTET"],
        "run",
        str(small),
        str(tmp_path / "out.safetensors"),
    ]
    rejected(subprocess.run(limited, capture_output=True, text=True), "cannot write: File too large")
    assert [p.name for p in tmp_path.iterdir()] == ["in.safetensors"]


@pytest.mark.parametrize("operand", ["q", "k"])
def test_quantizing_per_channel_what_is_summed_over_channels(tmp_path, small, operand):
    done = octet(
        "quantize",
        small,
        tmp_path / "out.safetensors",
        "--operand",
        operand,
        "--format",
        "int8",
        "--granularity",
        "channel",
    )
    rejected(done, "granularity: channel")
    assert [p.name for p in tmp_path.iterdir()] == ["in.safetensors"]


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "too few"),
        (b"\x93NUMPY\x01\x00\xff\xff{", "too few"),
        (b"\x93NUMPY\x09\x00\x02\x00{}", "version 9.0"),
        (b"hello hello", "not a .npy file"),
    ],
)
def test_bad_npy(tmp_path, content, message):
    folder = tmp_path / "in"
    folder.mkdir()
    for name, x in draw(2, companions=False).items():
        np.save(folder / f"{name}.npy", x)
    (folder / "k.npy").write_bytes(content)
    rejected(octet("run", folder, tmp_path / "out"), message)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_fortran_order_is_rejected_with_the_cure(tmp_path):
    for name, x in draw(2, companions=False).items():
        np.save(tmp_path / f"{name}.npy", np.asfortranarray(x))
    rejected(octet("run", tmp_path, tmp_path / "out"), "ascontiguousarray")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "subcommand"),
        (["dance"], "dance"),
        (["check"], "FILE"),
        (["study"], "give a file or --bias"),
        (["study", "--bias", "--round", "x=bf16"], 'unknown point "x"'),
        (["study", "--bias", "--round", "p=bf17"], '--round p: found "bf17"'),
        (["bench", "--shape", "1,2,3"], "expected b,hq,hkv,sq,sk,d"),
        (["bench", "--runs", "0"], "at least 1 run"),
        (["explain", "--shape", "1,8,8,9223372036854775807,64,64"], "memory can hold"),
        (["explain"], "--shape"),
        (
            ["explain", "--shape", "1,2,2,64,64,64", "--dtype", "int8"],
            '--dtype: found "int8", allowed with precision bf16: f32, f16, bf16, e4m3',
        ),
        (["check", "x", "--fail-above", "nan"], "--fail-above: found nan, allowed: a relative L2 error, 0 or more"),
        (["check", "x", "--fail-above", "-1"], "--fail-above: found -1"),
        (["check", "x", "--fail-above", "small"], '--fail-above: found "small", expected a number'),
        (["check", "x", "--pass", "sideways"], '--pass: found "sideways", allowed: fwd, bwd, jvp'),
    ],
)
def test_bad_commands(arguments, message):
    rejected(octet(*arguments), message)


def test_check_prints_no_half_of_a_json_answer(tmp_path, small):
    rejected(octet("check", small, tmp_path / "none.safetensors", "--json", "--precision", "f32"), "cannot open")


COMMANDS = {
    "help": ["--help"],
    "version": ["--version"],
    "info": ["info"],
    "info --json": ["info", "--json"],
    "run": ["run", "IN", "OUT"],
    "check": ["check", "IN", "--precision", "f32"],
    "check --json": ["check", "IN", "--precision", "f32", "--json"],
    "bench": ["bench", "--shape", "1,1,1,16,16,16", "--precision", "f32", "--runs", "1"],
    "study": ["study", "IN"],
    "explain": ["explain", "--shape", "1,1,1,16,16,16"],
    "quantize": ["quantize", "IN", "OUT", "--operand", "k"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("stdout", [">/dev/full", ">&-"])
def test_an_answer_that_cannot_be_printed(tmp_path, small, command, stdout):
    places = {"IN": str(small), "OUT": str(tmp_path / "out.safetensors")}
    arguments = [os.environ["OCTET"], *(places.get(x, x) for x in COMMANDS[command])]
    done = subprocess.run(["bash", "-c", f'"$@" {stdout}', "-", *arguments], capture_output=True, text=True)
    reason = "No space left on device" if "full" in stdout else "Bad file descriptor"
    assert (done.returncode, done.stderr) == (2, f"octet: standard output: cannot write: {reason}\n")
    if (tmp_path / "out.safetensors").exists():
        read_safetensors(tmp_path / "out.safetensors")  # nothing was printed into it


def test_closed_streams_do_not_become_files(tmp_path, small):
    out = tmp_path / "out.safetensors"
    done = subprocess.run(
        ["bash", "-c", '"$@" <&- >&- 2>&-', "-", os.environ["OCTET"], "run", str(small), str(out), "--quiet"]
    )
    assert done.returncode == 0 and sorted(read_safetensors(out)) == ["lse", "o"]


def interrupted(folder, out, signal_number, **how):
    """The command, stopped by a signal while it writes its output."""
    random = np.random.default_rng(0)
    large = {"q": (1, 4096, 16, 256), "k": (1, 1, 8, 256), "v": (1, 1, 8, 256)}
    source = folder / "large.safetensors"
    if not source.exists():
        write_safetensors(source, {name: random.standard_normal(shape, np.float32) for name, shape in large.items()})
    for _ in range(20):
        process = subprocess.Popen(
            [os.environ["OCTET"], "run", source, out], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how
        )
        while process.poll() is None:
            try:
                unfinished = [p for p in folder.rglob(".*") if p.stat().st_size > 0]
            except OSError:  # gone meanwhile
                continue
            if unfinished:
                process.send_signal(signal.SIGSTOP)
                if all(p.exists() for p in unfinished):
                    process.send_signal(signal_number)
                    process.send_signal(signal.SIGCONT)
                    return process.communicate(timeout=60), process.returncode
                process.send_signal(signal.SIGCONT)
        process.communicate()
        assert process.returncode == 0
    pytest.fail("the command was never seen to write")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("out", ["out.safetensors", "out"])
def test_a_signal_leaves_nothing_behind(tmp_path, out, number):
    _, status = interrupted(tmp_path, tmp_path / out, number)
    assert status == -number  # of which a shell makes 128 + number
    assert [p.name for p in tmp_path.iterdir()] == ["large.safetensors"]


def test_an_ignored_signal_stays_ignored(tmp_path):
    """nohup has a process ignore SIGHUP, and then the command finishes."""
    _, status = interrupted(
        tmp_path,
        tmp_path / "out.safetensors",
        signal.SIGHUP,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    assert status == 0 and sorted(p.name for p in tmp_path.iterdir()) == ["large.safetensors", "out.safetensors"]


def test_a_shell_sees_128_and_the_signal(tmp_path):
    script = '"$@" & sleep 0.3; kill -TERM $!; wait $!; echo $?'
    bench = [
        os.environ["OCTET"],
        "bench",
        "--shape",
        "8,16,16,4096,4096,128",
        "--precision",
        "f32",
        "--backend",
        "reference",
    ]
    done = subprocess.run(["bash", "-c", script, "-", *bench], capture_output=True, text=True, timeout=60)
    assert done.stdout == "143\n"


@pytest.mark.parametrize("out", [".", "linked"])
@pytest.mark.parametrize("smooth", [[], ["--smooth"]])
def test_a_file_of_the_input_is_not_replaced_by_an_output(tmp_path, out, smooth):
    x = draw(1)["k"]
    name = "k_mean" if smooth else "k"  # of the last file that is written
    np.save(tmp_path / f"{name}.npy", x)
    (tmp_path / "linked").symlink_to(tmp_path, target_is_directory=True)
    before = (tmp_path / f"{name}.npy").read_bytes()
    done = octet("quantize", tmp_path / f"{name}.npy", tmp_path / out, "--operand", "k", *smooth)
    rejected(done, f"{name}.npy: is an input; name another output")
    assert (tmp_path / f"{name}.npy").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.npy", "linked"]


@pytest.mark.parametrize("command", [["run"], ["quantize", "--operand", "q"]])
def test_no_output_replaces_what_a_directory_links_to(tmp_path, command):
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    for name, x in draw(1, companions=False).items():
        np.save(tmp_path / "in" / f"{name}.npy", x)
    written = "o" if command == ["run"] else "q_scale"
    (tmp_path / "in" / "q.npy").rename(tmp_path / "out" / f"{written}.npy")
    (tmp_path / "in" / "q.npy").symlink_to(tmp_path / "out" / f"{written}.npy")
    rejected(octet(*command, tmp_path / "in", tmp_path / "out"), f"{written}.npy: is an input; name another output")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [f"{written}.npy"]


@pytest.mark.parametrize("variable", ["OCTET_BACKEND", "OCTET_CPU"])
@pytest.mark.parametrize("command", ["run", "check", "bench", "explain", "info"])
def test_odd_bytes_in_the_environment(tmp_path, small, variable, command):
    """They are named as ASCII: the message is UTF-8, and a terminal obeys nothing in it."""
    if command == "info" and variable == "OCTET_BACKEND":
        return  # which names no backend
    out = tmp_path / "out.safetensors"
    shape = ["--shape", "1,2,2,64,64,64"]
    arguments = {"run": [small, out], "check": [small], "bench": shape, "explain": shape, "info": ["--json"]}[command]
    done = octet(command, *arguments, env=os.environ | {variable: os.fsdecode(b"caf\xe9\x1b[31m")})
    assert "caf\\xe9\\x1b[31m" in done.stderr and done.stderr.isascii(), done.stderr
    rejected(done, variable if variable == "OCTET_CPU" else "backend: unknown name")


def test_reasons_begin_with_the_backends_of_the_device_and_come_once(small, tmp_path):
    run = ["run", small, tmp_path / "out.safetensors", "--precision", "fp8_raw", "--jvp", "--device", "cpu"]
    done = octet(*run, env=NO_GPU)
    reason = "precision fp8_raw has no jvp; those that have: "
    rejected(done, f"no backend can solve this problem: cpu, reference: {reason}")
    assert done.stderr.count(reason) == 1 and len(NO_GPU_REASON.findall(done.stderr)) == bool(OF_GPUS)


@pytest.mark.parametrize("command", ["run", "check", "bench"])
def test_layouts_have_names(tmp_path, small, command):
    arguments = {"run": [small, tmp_path / "out.safetensors"], "check": [small], "bench": ["--file", small]}[command]
    rejected(octet(command, *arguments, "--layout", "sbhd"), '--layout: found "sbhd", allowed: bhsd, bshd')


def test_head_dims_that_disagree_or_are_too_large(tmp_path):
    for dims, message in [
        ({"d": 0}, "q: head dim 0, allowed: 1 to 256"),
        ({"d": 264}, "q: head dim 264, allowed: 1 to 256"),
        ({"e": 257}, "v: head dim 257, allowed"),
    ]:
        source = write_safetensors(tmp_path / "in.safetensors", draw(3, sq=4, sk=4, **dims))
        rejected(octet("run", source, tmp_path / "out.safetensors"), message)
    t = draw(3, d=12)
    t["do"] = t["do"][..., :13]
    source = write_safetensors(tmp_path / "in.safetensors", t)
    rejected(
        octet("run", source, tmp_path / "out.safetensors", "--backward"), "do: head dim 13, expected 16, that of v"
    )


@pytest.mark.parametrize("name", ["mask", "cu_seqlens_q", "cu_seqlens_k"])
def test_tensors_of_problems_that_the_command_does_not_compute(tmp_path, name):
    t = draw(3, companions=False) | {name: np.zeros(3, np.float32)}
    source, out = write_safetensors(tmp_path / "in.safetensors", t), tmp_path / "out.safetensors"
    for command in (["run", source, out], ["check", source], ["bench", "--file", source]):
        rejected(octet(*command), f"{name}: found in the file, but the command takes no mask tensors")
    assert not out.exists()
