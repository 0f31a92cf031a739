"""A precision is named in few source files, those that docs/adding.md lists: int8_f16 stands for all of them.

precision.py ROOT
"""

import pathlib
import re
import sys

MOST = 8
FOLDERS = "src", "include", "python", "cli"
SUFFIXES = {".h", ".hpp", ".cc", ".cu", ".py"}
LISTED = re.compile(r"^- `([^`]+)`: ", re.MULTILINE)


def main():
    root = pathlib.Path(sys.argv[1])
    files = [path for folder in FOLDERS for path in root.joinpath(folder).rglob("*") if path.suffix in SUFFIXES]
    found = {path.relative_to(root).as_posix() for path in files if "int8_f16" in path.read_text().lower()}
    section = (root / "docs/adding.md").read_text().partition("## A precision\n")[2].partition("\n## ")[0]
    listed = set(LISTED.findall(section))
    wrong = [f"{name}: names int8_f16, but docs/adding.md does not list it" for name in sorted(found - listed)]
    wrong += [f"{name}: listed in docs/adding.md, but it does not name int8_f16" for name in sorted(listed - found)]
    if not 0 < len(found) <= MOST:
        wrong.append(f"{len(found)} files name int8_f16, allowed: {MOST}; a precision is data of core/recipe.cc")
    print("\n".join(wrong) or f"{len(found)} files name a precision: {', '.join(sorted(found))}")
    sys.exit(bool(wrong))


main()
