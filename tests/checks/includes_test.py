"""includes.py reports what no rule allows: a header of another folder, and a folder that has no rule."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

INCLUDES = pathlib.Path(__file__).with_name("includes.py")


def failures(files):
    with tempfile.TemporaryDirectory() as name:
        for path, text in {"src/core/a.h": "#include <vector>\n", **files}.items():
            file = pathlib.Path(name) / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        done = subprocess.run([sys.executable, INCLUDES, name], capture_output=True, text=True)
        return done.stdout if done.returncode else ""


class Includes(unittest.TestCase):
    def test_what_the_rules_allow_passes(self):
        self.assertEqual(failures({"src/core/b.h": '#include "core/quant/c.h"\n#include "a.h"\n'}), "")

    def test_an_arrow_upward_fails(self):
        for path, header in (
            ("src/core/b.cc", "cpu/isa.h"),
            ("src/cpu/gemm/b.h", "cpu/attention/pack/a.h"),
            ("src/cpu/attention/pack/b.h", "cpu/attention/softmax/a.h"),
            ("src/cpu/attention/fwd/b.h", "cpu/attention/bwd/a.h"),
            ("src/cpu/reference/b.cc", "cpu/attention/job.h"),
        ):
            self.assertIn(f"includes {header}", failures({path: f'#include "{header}"\n'}))

    def test_a_folder_without_a_rule_fails(self):
        for path in ("src/cpu/attention/new/a.h", "src/new/a.cc", "tests/unit/new/a.cc", "examples/new/a.c"):
            self.assertIn("has no row in RULES", failures({path: "#include <vector>\n"}))


unittest.main()
