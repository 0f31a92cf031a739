"""octet tune on a GPU, or an emulated one: what it times, the file that it keeps, and what later processes do with
it."""

import json
import os
import subprocess

import pytest
from conftest import OCTET, octet

NO_TUNING = os.environ | {"OCTET_TUNE": "off"}
INFO = json.loads(octet("info", "--json", env=NO_TUNING).stdout)
pytestmark = pytest.mark.skipif(
    not any(b["device"] == "cuda" and b["available"] for b in INFO["backends"]), reason="no GPU that octet computes on"
)
# bf16, head dim 64: two kernels for queries, of which half as many in a tile suit 20, and one that splits keys.
SHAPE = "1,1,1,20,40,64"
TUNE = "tune", "--shape", SHAPE, "--pass", "fwd", "--backend", "sm80", "--json"
EXPLAIN = "explain", "--shape", SHAPE, "--backend", "sm80", "--json"


@pytest.fixture
def kept(tmp_path):
    """The file, and the environment that names it."""
    path = tmp_path / "cache/octet/tune.json"
    return path, os.environ | {"OCTET_TUNE": str(path)}


def ok(*arguments, env):
    done = octet(*arguments, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def tuning(env):
    return ok("info", "--json", env=env)["tuning"]


def write(path, found, cell="0123456789abcdef", kernels=None, tile="64x64"):
    """A file with one cell of this card, as if it had been found."""
    card = found["card"]
    entry = {
        "cell": cell,
        "call": "",
        "backend": "sm80",
        "tile": tile,
        "seconds": 1,
        "default": "",
        "default_seconds": 2,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"octet": "0", "kernels": kernels or INFO["tuning"]["kernels"], "cards": {card: [entry]}}
    path.write_text(json.dumps(content))


def test_all_kernels_of_a_call_are_timed_and_the_file_is_small(kept):
    path, env = kept
    (found,) = ok(*TUNE, env=env)
    assert {tile["backend"] for tile in found["tiles"]} == {"sm80"}
    assert {"128x64", "64x64"} <= {tile["tile"].removesuffix("-split") for tile in found["tiles"]}
    assert all(len(tile["round_seconds"]) == 3 and min(tile["round_seconds"]) > 0 for tile in found["tiles"])
    content = json.loads(path.read_text())
    assert content["kernels"] == INFO["tuning"]["kernels"] and list(content["cards"]) == [found["card"]]
    # Three rounds, in each of which the kept one was faster by 3 %, or none was kept.
    times = {f"{tile['backend']} {tile['tile']}": tile["round_seconds"] for tile in found["tiles"]}
    default, *others = times.values()
    faster = [name for name, x in times.items() if all(a * 1.03 <= b for a, b in zip(x, default, strict=True))]
    assert (found["kept"] in faster) if faster else found["kept"] is None
    assert [f"{x['backend']} {x['tile']}" for x in content["cards"][found["card"]]] == (
        [found["kept"]] if faster else []
    )
    assert path.stat().st_size < 20 * 1024 / 12 and others


def test_a_call_of_one_kernel_is_not_timed(kept):
    path, env = kept
    done = octet("tune", "--shape", SHAPE, "--pass", "jvp", "--backend", "sm80", env=env)
    assert done.returncode == 0 and "the only one" in done.stdout and f"kept in {path}" in done.stdout
    assert [cells for cells in json.loads(path.read_text())["cards"].values()] == [[]]


def test_what_was_found_runs_in_later_processes(kept):
    path, env = kept
    (found,) = ok(*TUNE, env=env)
    tiles = [tile["tile"] for tile in found["tiles"]]
    for tile in tiles:
        write(path, found, found["cell"], tile=tile)
        (answer,) = ok(*EXPLAIN, env=env)
        assert answer["kernel"].endswith(f", tile {tile} found by octet tune")
        assert tuning(env) | {"path": str(path), "cells": 1, "reason": None} == tuning(env)
    # A call of a size of its own, a tile that its kernels do not have, and a file that is not read.
    (other,) = ok("explain", "--shape", "1,1,1,400,40,64", "--backend", "sm80", "--json", env=env)
    write(path, found, found["cell"], tile="3x5")
    (unknown,), (off,) = ok(*EXPLAIN, env=env), ok(*EXPLAIN, env=NO_TUNING)
    assert not any("octet tune" in x["kernel"] for x in (other, unknown, off))
    assert tuning(NO_TUNING) | {"path": None, "cells": 0, "reason": "OCTET_TUNE is off"} == tuning(NO_TUNING)


def test_a_tile_is_asked_for_by_name():
    (found,) = ok(*EXPLAIN, "--tile", "64x64", env=NO_TUNING)
    assert found["kernel"].endswith("64 x 64 tiles, tile 64x64 as asked for")
    done = octet(*EXPLAIN, "--tile", "3x5", env=NO_TUNING)
    (found,) = json.loads(done.stdout)
    assert done.returncode == 1 and found["backend"] is None
    assert 'it has no tile "3x5"; it has: ' in found["answers"][0]["detail"]
    assert "128x64" in found["answers"][0]["detail"]


def test_a_file_is_read_or_why_not_is_told(kept):
    path, env = kept
    assert tuning(env)["reason"] == "there is no such file; octet tune writes it"
    found = {"card": "some card"}
    write(path, found)
    assert tuning(env) | {"cells": 0, "reason": None} == tuning(env)  # no cell of this card
    write(path, found, kernels="0" * 16)
    assert "it was made for the kernels 0000000000000000 of octet 0, these are " in tuning(env)["reason"]
    write(path, found, cell="xyz")
    assert tuning(env)["reason"]
    for text in ("", "{", "[]", '{"kernels": 3}', "\0" * 100, '{"octet": "0"}'):
        path.write_text(text)
        assert tuning(env)["reason"] and tuning(env)["cells"] == 0
    path.unlink()
    path.mkdir()
    assert tuning(env)["reason"] == "it is no file"


def test_what_is_damaged_or_stale_is_replaced_and_the_rest_is_kept(kept):
    path, env = kept
    (found,) = ok(*TUNE, env=env)
    write(path, found)
    ok(*TUNE, env=env)
    assert "0123456789abcdef" in [x["cell"] for x in json.loads(path.read_text())["cards"][found["card"]]]
    for spoil in (lambda: path.write_text("{"), lambda: write(path, found, kernels="0" * 16)):
        spoil()
        ok(*TUNE, env=env)
        assert "0123456789abcdef" not in path.read_text() and tuning(env)["reason"] is None


def test_two_processes_lose_nothing(kept):
    path, env = kept
    (found,) = ok(*TUNE, env=env)
    write(path, found)
    both = [
        subprocess.Popen([OCTET, "tune", "--shape", shape, *TUNE[3:]], env=env, stdout=subprocess.PIPE)
        for shape in ("1,2,2,8,20,64", "1,8,2,8,20,64")  # of two cells: what both time, the later one decides
    ]
    kept_by_both = [x for one in both for x in json.loads(one.communicate()[0]) if x["kept"]]
    assert [one.returncode for one in both] == [0, 0]
    cells = [x["cell"] for x in json.loads(path.read_text())["cards"][found["card"]]]
    assert len(set(cells)) == len(cells)
    assert {"0123456789abcdef", *(x["cell"] for x in kept_by_both)} <= set(cells)


def test_a_place_that_is_no_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    done = octet(*TUNE, env=os.environ | {"OCTET_TUNE": str(tmp_path / "file/tune.json")})
    assert done.returncode == 2 and f"{tmp_path}/file" in done.stderr and "octet: " in done.stderr


@pytest.mark.parametrize(
    "arguments, env, message",
    [
        (["--seconds", "0"], {}, "--seconds: found 0, allowed: above 0"),
        (["--device", "cpu"], {}, "--device: found cpu, allowed: a GPU, cuda or cuda:N"),
        ([], {"OCTET_TUNE": "off"}, "there is no file to keep results in: OCTET_TUNE is off"),
        (["--file", "calls.json", "--shape", SHAPE], {}, "--file: gives the shapes; leave out --shape"),
        (
            ["--shape", SHAPE, "--tile", "64x64"],
            {},
            'tile: found "64x64", allowed: NULL, as all tiles are listed',
        ),
        (["--file", "nowhere.json"], {}, "nowhere.json: cannot read"),
    ],
)
def test_wrong_arguments(arguments, env, message, kept):
    where = [] if "--device" in arguments else ["--device", "cuda"]
    done = octet("tune", *where, *arguments, env=kept[1] | env)
    assert done.returncode == 2 and message in done.stderr


def test_a_pass_that_a_precision_lacks_is_left_out(kept):
    path, env = kept
    forward, backward = ok(
        *TUNE[:3], "--precision", "int8_f16", "--pass", "fwd,bwd", "--backend", "sm80", "--json", env=env
    )
    assert forward["tiles"] and not backward["tiles"] and backward["kept"] is None
    shown = octet(*TUNE[:3], "--precision", "int8_f16", "--pass", "bwd", "--backend", "sm80", env=env)
    assert shown.returncode == 0 and "no kernel computes it" in shown.stdout


def test_calls_of_a_file(kept, tmp_path):
    calls = [{"shape": [1, 2, 2, 8, 20, 64], "precision": "bf16", "pass": p, "causal": True} for p in ("fwd", "fwd")]
    (tmp_path / "calls.json").write_text(json.dumps(calls))
    (found,) = ok("tune", "--file", tmp_path / "calls.json", "--backend", "sm80", "--json", env=kept[1])
    assert ", causal, " in found["call"]  # both are of one cell
    (tmp_path / "calls.json").write_text('[{"shape": 3}]')
    done = octet("tune", "--file", tmp_path / "calls.json", "--device", "cuda", env=kept[1])
    assert done.returncode == 2 and "expected an array of {shape, precision, pass, causal}" in done.stderr
