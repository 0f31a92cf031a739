"""Every folder that includes.py knows has a row in docs/design.md, and every row is a folder: folders.py SOURCE

A folder has a row of its own, or is named in backquotes in the row of a folder that it lies in.
"""

import pathlib
import re
import sys

from includes import RULES

HEAD = re.compile(r"\|(?: in `([^`]+)`)?[^|]*\|")


def rows(text):
    """{folder: the rest of its row} of the tables of a document; a table may say `in` which folder its rows are."""
    found, inside, before = {}, "", ""
    for line in text.splitlines():
        if line.startswith("|") and not before.startswith("|"):
            inside = HEAD.match(line)[1] or ""
        elif line.startswith("| `"):
            first, rest = line[1:].split("|", 1)
            for name in re.findall(r"`([^`]+)`", first):
                found[f"{inside}/{name}".lstrip("/")] = rest
        before = line
    return found


def has_row(folder, table):
    parts = folder.split("/")
    above = [("/".join(parts[:i]), "/".join(parts[i:])) for i in range(1, len(parts))]
    return folder in table or any(f"`{name}`" in table.get(parent, "") for parent, name in above)


def main():
    root = pathlib.Path(sys.argv[1])
    table = rows((root / "docs/design.md").read_text())
    wrong = [f"{folder}: has no row in docs/design.md" for folder in sorted(RULES) if not has_row(folder, table)]
    wrong += [f"{folder}: a row in docs/design.md, but no folder" for folder in table if not (root / folder).is_dir()]
    print("\n".join(wrong) or f"all {len(RULES)} folders have a row in docs/design.md")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
