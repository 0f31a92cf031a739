"""Files and functions are short enough to be read: length.py SOURCE

A file of src, include, python and cli has at most 400 lines, a function at most 120 from its brace or `def` to its end.
"""

import ast
import pathlib
import re
import sys

FOLDERS = ("src", "include", "python", "cli")
CPP, PYTHON = (".h", ".hpp", ".c", ".cc", ".cu"), (".py",)
MOST_OF_FILE, MOST_OF_FUNCTION = 400, 120
# Comments, literals and preprocessor lines, which may hold braces of their own. An apostrophe within a number separates
# its digits.
HIDDEN = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])+\''
    r"|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*",
    re.DOTALL | re.MULTILINE,
)
SCOPE = re.compile(r"\b(namespace|struct|class|union|enum|extern)\b")
ANGLES = re.compile(r"<[^<>;{}]*>")


def without_hidden(text):
    """The code alone, with the lines that it has in `text`."""
    return HIDDEN.sub(lambda found: "\n" * found[0].count("\n") or " ", text)


def without_angles(head):
    """The head of a declaration without its lists of template parameters, which may name a class."""
    while (shorter := ANGLES.sub(" ", head)) != head:
        head = shorter
    return head


def is_initializer(head):
    """Whether a brace after `head` is a value in the head of a function: of a parameter or in a constructor's list."""
    return head.count("(") > head.count(")") or re.search(r"\)[\w\s]*:[^:].*[\w>]$", head, re.DOTALL) is not None


def cpp_functions(text):
    """(line, lines) of each function body: of each brace that follows parentheses and lies in no other function."""
    code, scopes, start = without_hidden(text), [], 0
    for brace in re.finditer(r"[{};]", code):
        at, head = brace.start(), without_angles(code[start : brace.start()])
        if brace[0] == "{":
            values = is_initializer(head)
            scope = SCOPE.search(head.split("(")[0]) is not None or "(" not in head
            scopes.append((at, values or scope, start if values else None))
            start = at + 1
        elif brace[0] == "}" and scopes:
            opened, scope, kept = scopes.pop()
            if not scope and all(outer for _, outer, _ in scopes):
                yield code.count("\n", 0, opened) + 1, code.count("\n", opened, at) + 1
            start = at + 1 if kept is None else kept
        else:
            start = at + 1


def python_functions(text):
    """(line, lines) of each function."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.end_lineno - node.lineno + 1


def main():
    root = pathlib.Path(sys.argv[1])
    wrong, files, functions = [], 0, 0
    for path in sorted(path for folder in FOLDERS for path in (root / folder).rglob("*")):
        if path.suffix not in CPP + PYTHON:
            continue
        files += 1
        name, text = path.relative_to(root), path.read_text()
        if (lines := text.count("\n")) > MOST_OF_FILE:
            wrong.append(f"{name}: {lines} lines; allowed: {MOST_OF_FILE}")
        for line, lines in python_functions(text) if path.suffix in PYTHON else cpp_functions(text):
            functions += 1
            if lines > MOST_OF_FUNCTION:
                wrong.append(f"{name}:{line}: a function of {lines} lines; allowed: {MOST_OF_FUNCTION}")
    if not functions:
        wrong.append("no function was found")
    print("\n".join(wrong) or f"{files} files and {functions} functions are no longer than allowed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
