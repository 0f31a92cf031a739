"""What a precision or a bias correction rounds is decided in files named choose alone: choose.py SOURCE

They turn the recipe of a problem into a kernel and what the kernel asks of its launch; all other files of src/cuda read
their answer, and neither compare a precision or a bias correction nor read a recipe.
"""

import pathlib
import re
import sys

FIELD = r"\b(precision|bias_correction)\b"
DECIDES = re.compile(
    rf"OCTET_(PRECISION|BIAS_CORRECTION)_\w+|\brecipe_of\b|\b(Backward|Logit|P|Tile)?Recipe\b"
    rf"|{FIELD}\s*[!=<>]=|[!=<>]=\s*[\w.>-]*{FIELD}|switch\s*\([^)]*{FIELD}|has\([^)]*{FIELD}"
)
COMMENT = re.compile(r"//.*")


def main():
    folder = pathlib.Path(sys.argv[1]) / "src/cuda"
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".h", ".cc", ".cu"))
    wrong, deciding = [], 0
    for path in files:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found = DECIDES.search(COMMENT.sub("", line))
            if found and path.stem == "choose":
                deciding += 1
            elif found:
                name = path.relative_to(folder.parent.parent)
                wrong.append(f"{name}:{number}: {found[0]}; only choose decides by it")
    if not deciding:
        wrong.append("no file named choose reads a recipe")
    print("\n".join(wrong) or f"of {len(files)} files of src/cuda only those named choose read recipes")
    sys.exit(bool(wrong))


main()
