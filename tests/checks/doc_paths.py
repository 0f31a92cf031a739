"""Every path that a document names exists: doc_paths.py SOURCE

Reads what documents have in backquotes and in blocks of code. Paths may leave out where they begin (`fwd/config.h`,
`schedule.h`) and the suffix of a file (`attention/pack/keys`); NAME and * stand for any name.
Records of experiments name what there was on their day, and the change log what there was in each version.
"""

import fnmatch
import pathlib
import re
import subprocess
import sys

SUFFIX = re.compile(r".\.(h|hpp|c|cc|cu|py|md|txt)$")
DATED = re.compile(r"CHANGELOG\.md|docs/experiments/\d.*")
PATH = re.compile(r"(?<![\w./*@:-])[\w.*-]+(?:/[\w.*-]+)*(?![\w*-])")
FENCED = re.compile(r"^```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def paths(text, folders):
    """The paths in a document: names with the suffix of a source, and what begins with the name of a folder."""
    code = FENCED.findall(text) + re.findall(r"`([^`\n]+)`", FENCED.sub("", text))
    for path in (found.rstrip(".").replace("NAME", "*") for part in code for found in PATH.findall(part)):
        first, _, rest = path.partition("/")
        if first != "build" and (SUFFIX.search(path) or (rest and first in folders)):
            yield path


def main():
    root = pathlib.Path(sys.argv[1]).resolve()
    git = ["git", "-C", root, "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(git, capture_output=True, text=True).stdout.splitlines()
    # Without git: all files but those that are hidden or built.
    listed = listed or [
        path.relative_to(root).as_posix()
        for path in root.rglob("*")
        if not any(part.startswith(".") or part == "build" for part in path.relative_to(root).parts)
    ]
    files = ["/" + name for name in listed if (root / name).is_file()]
    folders = {part for name in files for part in name.split("/")[1:-1]}
    documents = [name for name in files if name.endswith(".md") and not DATED.fullmatch(name[1:])]
    found = {(name, path) for name in documents for path in paths((root / name[1:]).read_text(), folders)}
    wrong = []
    for name, path in sorted(found):
        ends = f"*/{path}", f"*/{path}/*", f"*/{path}.*"
        if not any(fnmatch.fnmatchcase(file, end) for file in files for end in ends):
            wrong.append(f"{name[1:]}: {path}")
    if not found:
        wrong.append("found no path in any document")
    print("\n".join(["paths that do not exist:", *wrong] if wrong else [f"the {len(found)} paths of documents exist"]))
    sys.exit(bool(wrong))


main()
