"""skips.py finds every skip in the logs of CTest, and fails on those that are not allowed."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

SKIPS = pathlib.Path(__file__).with_name("skips.py")
CTEST = "The following tests did not run:\n\t  2 - gpu_test (Skipped)\n\t 11 - laws_test.amx (Skipped)\n"
GTEST = "tests/a_test.cc:5: Skipped\none GPU\n[  SKIPPED ] T.one (0 ms)\n[  SKIPPED ] 1 test, listed below:\n"
PYTEST = "SKIPPED [2] ../test_x.py:3: no GPU\n1 passed, 2 skipped, 1 warning in 2.63s\n"
KINDS = ["any ctest gpu_test", "any ctest *.amx", "any gtest a_test.cc: one GPU", "any pytest test_*.py: no GPU"]


def status(allowed, ctest=CTEST, tests=GTEST + PYTEST):
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "Testing/Temporary").mkdir(parents=True)
        (folder / "Testing/Temporary/LastTest.log").write_text(tests)
        (folder / "ctest.log").write_text(ctest)
        (folder / "allowed.txt").write_text("# a comment\n\n" + "\n".join(allowed))
        command = [sys.executable, SKIPS, folder / "allowed.txt", folder]
        return subprocess.run(command, capture_output=True).returncode


class Skips(unittest.TestCase):
    def test_all_are_allowed(self):
        self.assertEqual(status(KINDS), 0)
        self.assertEqual(status([], ctest="", tests="3 passed in 1.00s\n"), 0)

    def test_each_that_is_not_allowed_fails(self):
        for kind in KINDS:
            self.assertEqual(status([x for x in KINDS if x != kind]), 1, kind)

    def test_a_package_that_is_there_allows_nothing(self):
        for package, expected in ("sys", 1), ("no_such_package", 0):
            self.assertEqual(status([f"no-{package} {KINDS[0].removeprefix('any ')}", *KINDS[1:]]), expected)

    def test_a_log_that_is_read_in_part_fails(self):
        for text in (GTEST.replace(": Skipped", ": skipped"), PYTEST.replace("SKIPPED [2]", "SKIPPED [1]")):
            self.assertEqual(status(KINDS, tests=text), 1, text)
        self.assertEqual(status(KINDS, ctest=CTEST.replace("(Skipped)", "skipped")), 1)

    def test_a_line_that_says_nothing_fails(self):
        self.assertEqual(status([*KINDS, "sometimes ctest gpu_test"]), 1)


unittest.main()
