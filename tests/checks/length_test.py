"""length.py measures functions of C++ and Python, and fails on what is too long."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

import length

CHECK = pathlib.Path(__file__).with_name("length.py")
HEADS = (
    "void f() {",
    "template <class T, std::array<int, 2> x>\n__device__ inline auto S<T>::f(int a,\n  int b) const -> Result<T> {",
    "S::S(int a) : a_(a), b_(f(a)) {",
    "S::S(int a) noexcept : a_{a}, b_{} {",
    "struct S {\n  bool operator()(int x) const noexcept {",
    'extern "C" {\nint f(void) {',
    "enum class E { a, b };\nnamespace a::b {\nvoid g() {}\nE f(E e = E{}) {",
)
HIDDEN = ("// {", "/* {\n{ */", 'f("{");', "c = '{';", 'R"({)";', "n = 1'000;", "#define X {", "if (x) { y(); }")


def long_functions(text):
    return [lines for _, lines in length.cpp_functions(text) if lines > 3]


def failures(files):
    with tempfile.TemporaryDirectory() as name:
        for path, text in files.items():
            (pathlib.Path(name) / path).parent.mkdir(parents=True, exist_ok=True)
            (pathlib.Path(name) / path).write_text(text)
        ran = subprocess.run([sys.executable, CHECK, name], capture_output=True, text=True)
        return ran.stdout if ran.returncode else ""


class Length(unittest.TestCase):
    def test_a_function_is_found_after_every_head(self):
        for head in HEADS:
            for body in HIDDEN:
                opened = head.count("{") - head.count("}") - 1
                text = f"{head}\n{body}\n\n\n}}\n" + "}\n" * opened + "void after() {\n}\n"
                self.assertEqual(long_functions(text), [5 + body.count("\n")], text)

    def test_what_encloses_functions_is_none(self):
        self.assertEqual(long_functions("namespace a {\nstruct alignas(8) S {\n\n\n  int x[2] = {1, 2};\n};\n}\n"), [])

    def test_what_is_within_a_function_counts_once(self):
        text = "void f() {\n  const auto g = [&](int x) {\n\n\n  };\n  struct R {\n    int h() {\n\n\n    }\n  };\n}\n"
        self.assertEqual(long_functions(text), [12])

    def test_what_is_too_long_fails_and_what_is_not_passes(self):
        for name, head, line, end in (
            ("src/a.cu", "void f() {", "  f();", "}"),
            ("python/octet/a.py", "def f():", "    f()", "    return"),
        ):
            for lines, expected in ((120, ""), (121, f"{name}:1: a function of 121 lines; allowed: 120\n")):
                self.assertEqual(failures({name: "\n".join([head, *[line] * (lines - 2), end, ""])}), expected)
        for lines, expected in ((400, ""), (401, "cli/b.h: 401 lines; allowed: 400\n")):
            text = "void f() {}\n" + "\n" * (lines - 1)
            self.assertEqual(failures({"cli/b.h": text}), expected)

    def test_no_function_fails(self):
        self.assertIn("no function was found", failures({"src/a.h": "int x;\n"}))


unittest.main()
