"""The scripts of the ladder: what they read of ncu's exports, and what they say where something is missing."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

LADDER = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(LADDER))
import ncu  # noqa: E402

TIME, CYCLES, REGISTERS = "gpu__time_duration.sum", "gpc__cycles_elapsed.max", "launch__registers_per_thread"
TENSOR = "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active"
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
HEADER = ["ID", "Process Name", "Kernel Name", TIME, CYCLES, REGISTERS, TENSOR]
HEADER += [STALL.format(x) for x in ("barrier", "selected", "long_scoreboard", "barrier_not_issued")]
UNITS = ["", "", "", "ns", "cycle", "register/thread", "%", "inst", "inst", "inst", "inst"]


def export(*kernels):
    """The table of some kernels, in the form in which ncu prints it."""
    lines = [
        "==PROF== Connected to process 17",
        *(",".join(f'"{x}"' for x in row) for row in (HEADER, UNITS, *kernels)),
    ]
    return "\n".join(lines) + "\n"


SCORES = ["0", "1_unfused", "scores(const float *, int)", "1,500,000", "3,000", "40", "0", "2", "1", "4.5", "9"]
SOFTMAX = ["1", "1_unfused", "softmax(float *, int)", "500000", "1000", "24", "0", "6", "1", "0.5", "9"]
FLASH = ["0", "2_flash", "flash<64>", "250000", "500", "128", "62.5", "1", "1", "0.25", "9"]


def script(name, *arguments, path=None):
    """Runs a script of the ladder; PATH is where it finds ncu."""
    environment = {**os.environ, **({"PATH": f"{path}:{os.environ['PATH']}"} if path else {})}
    command = [sys.executable, LADDER / name, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


class Read(unittest.TestCase):
    def test_kernels_with_their_numbers(self):
        scores, softmax = ncu.read(export(SCORES, SOFTMAX))
        self.assertEqual(scores["Kernel Name"], "scores(const float *, int)")
        self.assertEqual((scores[TIME], softmax[REGISTERS]), (1.5e6, 24))
        self.assertNotIn("Process Name", scores)

    def test_what_is_no_export_is_rejected(self):
        for text, reason in (
            ("", "no column Kernel Name"),
            ("==ERROR== no kernels\n", "no column Kernel Name"),
            ("a,b\n1,2\n", "no column Kernel Name"),
            (export(), "no kernel"),
            (export(SCORES[:-1]), "a row of 10 columns below a header of 11"),
        ):
            with self.assertRaisesRegex(ncu.Unreadable, f"x.csv: {reason}"):
                ncu.read(text, "x.csv")

    def test_several_kernels_become_one_number(self):
        kernels = ncu.read(export(SCORES, SOFTMAX))
        self.assertEqual(ncu.cycles(kernels), 4000)
        self.assertEqual(ncu.value(kernels, "mean", [REGISTERS]), 0.75 * 40 + 0.25 * 24)  # weighted by time
        self.assertIsNone(ncu.value(kernels, "sum", ["dram__bytes.sum"]))

    def test_stalls_leave_out_warps_that_issue(self):
        self.assertEqual(ncu.stalls(ncu.read(export(SCORES, SOFTMAX))), {"barrier": 3.0, "long_scoreboard": 3.5})

    def test_the_first_metric_that_is_there_counts(self):
        kernels = ncu.read(export(FLASH))
        self.assertEqual(ncu.value(kernels, "mean", ["dram__bytes.sum", REGISTERS, TIME]), 128)


class Compare(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.a, self.b = self.folder / "a.csv", self.folder / "b.csv"
        self.a.write_text(export(SCORES, SOFTMAX))
        self.b.write_text(export(FLASH))

    def test_a_column_for_each_profile(self):
        done = script("compare", self.a, self.b)
        self.assertEqual(done.returncode, 0, done.stderr)
        for line in (
            "|  | a | b |",
            "| kernels | 2 | 1 |",
            "| time, us | 2000.0 | 250.0 |",
            "| elapsed cycles | 4000 | 500 |",
            "| registers of a thread | 36 | 128 |",
            "| occupancy, % | - | - |",
            "| tensor cores, % of peak | 0.0 | 62.5 |",
            "| stalled on long scoreboard, warps per issue | 3.50 | 0.25 |",
        ):
            self.assertIn(line, done.stdout.splitlines())

    def test_one_kernel_of_several(self):
        done = script("compare", f"{self.a}:softmax", self.b)
        self.assertEqual(done.returncode, 0, done.stderr)
        for line in ("|  | a:softmax | b |", "| kernels | 1 | 1 |", "| elapsed cycles | 1000 | 500 |"):
            self.assertIn(line, done.stdout.splitlines())
        done = script("compare", f"{self.a}:product", self.b)
        self.assertEqual(done.returncode, 1)
        self.assertIn("found no kernel with product in its name, allowed: scores(const float *, int), s", done.stderr)

    def test_equal_stalls_are_in_the_order_of_their_names(self):
        kernel = {"Kernel Name": "x"}
        for reason in ("wait", "barrier", "membar", "drain", "sleeping", "misc"):
            kernel[f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio"] = 1.0
        rows = [line for line in ncu.table({"a": [kernel]}).splitlines() if "stalled on" in line]
        self.assertEqual([row.split()[3] for row in rows], ["barrier,", "drain,", "membar,", "misc,", "sleeping,"])

    def test_what_is_missing_is_named(self):
        self.assertIn("found 1 names, allowed: 2 or more", script("compare", self.a).stderr)
        self.assertIn("no profile 9_none", script("compare", self.a, "9_none").stderr)
        self.b.write_text("a,b\n")
        self.assertIn("no column Kernel Name", script("compare", self.a, self.b).stderr)


class Profile(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "3_warps").touch()

    def with_ncu(self, text, *arguments):
        """Runs ladder/profile with a shell script in the place of ncu."""
        fake = self.folder / "ncu"
        fake.write_text(f"#!/bin/sh\n{text}\n")
        fake.chmod(0o755)
        return script("profile", *arguments, "--programs", self.folder, "--out", self.folder, path=self.folder)

    def test_exports_and_cycles_in_one_line(self):
        (self.folder / "table").write_text(export(FLASH))
        fake = f"""
case "$*" in
  *--export*--no-check*) echo "$*" > {self.folder}/flags; touch {self.folder}/3_warps-dim128-causal.ncu-rep ;;
  *--csv*) cat {self.folder}/table ;;
  *) echo details ;;
esac"""
        done = self.with_ncu(fake, "3", "--dim=128", "--causal")
        self.assertEqual(done.returncode, 0, done.stderr)
        name = self.folder / "3_warps-dim128-causal"
        self.assertEqual(done.stdout, f"{name.name}: 500 elapsed cycles in 1 kernels; {name}.ncu-rep, .txt, .csv\n")
        self.assertEqual(
            (name.with_suffix(".csv").read_text(), name.with_suffix(".txt").read_text()), (export(FLASH), "details\n")
        )
        flags = (self.folder / "flags").read_text()
        for flag in ("--set full", "--import-source yes", "--dim=128", "--seq=4096", "--causal"):
            self.assertIn(flag, flags)

    def test_counters_that_the_driver_keeps_are_explained(self):
        done = self.with_ncu("echo '==ERROR== ERR_NVGPUCTRPERM - no permission'", "3")
        self.assertEqual(done.returncode, 1)
        self.assertIn("NVreg_RestrictProfilingToAdminUsers=0", done.stderr)

    def test_other_failures_show_what_ncu_said(self):
        done = self.with_ncu("echo '==ERROR== unknown metric' >&2; exit 3", "3_warps")
        self.assertIn("exit status 3:\n==ERROR== unknown metric", done.stderr)

    def test_unknown_rungs_and_missing_programs(self):
        done = self.with_ncu("exit 0", "7")
        self.assertRegex(done.stderr, "RUNG: found 7, allowed: 1_unfused 2_flash 3_warps")
        self.assertIn("no program", self.with_ncu("exit 0", "2").stderr)


class Build(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        # A copy, as build writes beside the folder.
        self.ladder = self.folder / "copy"
        shutil.copytree(LADDER, self.ladder, ignore=shutil.ignore_patterns("profiles", "__pycache__"))

    def build(self, *arguments, nvcc="exit 0", **environment):
        """Runs ladder/build with a shell script in the place of nvcc."""
        fake = self.folder / "nvcc"
        fake.write_text(f"#!/bin/bash\n{nvcc}\n")
        fake.chmod(0o755)
        command = [self.ladder / "build", *arguments]
        environment = {**os.environ, "CUDACXX": str(fake), **environment}
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    def test_the_script_compare_is_not_taken_for_the_header(self):
        # An empty entry of CPATH is the folder in which the compiler runs. No flag may name that of the rungs either.
        compiler = shutil.which("c++")
        if not compiler:
            self.skipTest("no C++ compiler")
        includes = """
folders=(); for x in "$@"; do case $x in -I*|-isystem*) folders+=("$x") ;; esac; done
echo '#include <compare>' | COMPILER -std=c++20 -fsyntax-only "${folders[@]}" -x c++ -""".replace("COMPILER", compiler)
        for arguments in (("1", "80"), ("1", "80", "--library")):
            done = self.build(*arguments, nvcc=includes, CPATH=f":{self.folder}")
            self.assertEqual(done.returncode, 0, done.stderr)

    def test_arguments_that_are_not_known_are_named(self):
        for arguments, reason in (
            (("2",), "found 1 arguments (2), allowed: KERNEL ARCH"),
            (("7", "80"), "KERNEL: found 7, allowed: 1_unfused 2_flash"),
            ((".*", "80"), "KERNEL: found .*, allowed: 1_unfused"),
            (("2", "70"), "ARCH: found 70, allowed: 80 86 89 90a 120"),
            (("2", ""), "ARCH: found , allowed: 80 86"),
            (("6", "80"), "found 80 with 6_hopper, allowed: 90a"),
            (("5", "emulated"), "found emulated with 5_int8, allowed: the programs of rungs 1 to 4"),
            (("2", "emulated", "--library"), "found emulated with 2_flash --library, allowed: the programs of rungs"),
        ):
            done = self.build(*arguments)
            self.assertEqual(done.returncode, 2, arguments)
            self.assertIn(reason, done.stderr)

    def test_what_is_not_installed_is_named(self):
        done = self.build("2", "80", CUDACXX="no-such-nvcc")
        self.assertEqual(done.returncode, 2)
        self.assertIn("CUDACXX: found no-such-nvcc, allowed: a program", done.stderr)
        done = self.build("2", "80", nvcc="echo 'fatal error: CLI/CLI.hpp: No such file or directory' >&2; exit 1")
        self.assertEqual(done.returncode, 2)
        self.assertIn("no CLI11 was found (CLI/CLI.hpp); it is the package libcli11-dev", done.stderr)

    def test_a_failure_of_the_compiler_is_one_of_build(self):
        self.assertEqual(self.build("2", "80", nvcc="exit 3").returncode, 3)


class Bench(unittest.TestCase):
    def test_where_nothing_can_be_measured_nothing_is_stored(self):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            program, output = folder / "2_flash", folder / "h200.json"
            program.write_text(
                "#!/bin/sh\ncase $1 in --help) echo '--kernel TEXT:(flash)' ;; *) echo no GPU >&2; exit 77 ;; esac\n"
            )
            program.chmod(0o755)
            output.write_text("of last week")
            done = script("bench", folder, output)
            self.assertEqual(done.returncode, 1)
            self.assertIn(
                "nothing could be measured, hence nothing is stored:\n2_flash flash dim 64: no GPU", done.stderr
            )
            self.assertEqual(output.read_text(), "of last week")


if __name__ == "__main__":
    unittest.main()
