"""Every link between the documents leads to a file, and to a heading where it names one: links.py SOURCE"""

import pathlib
import re
import subprocess
import sys

root = pathlib.Path(sys.argv[1]).resolve()


def headings(path):
    """The names that links give to the headings of a document."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    lines = re.findall(r"^#+ +(.*?) *$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


def dead(document):
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, heading = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        if re.match(r"[a-z]+:", link):
            continue
        if not target.exists() or (heading and heading not in headings(target)):
            yield f"{document.relative_to(root)}: {link}"


# Names in the tree that git knows, or all where there is no git.
listed = subprocess.run(["git", "-C", root, "ls-files", "*.md"], capture_output=True, text=True).stdout.split()
documents = [root / name for name in listed] or [root / "README.md", *(root / "docs").rglob("*.md")]
missing = [link for document in documents if document.exists() for link in dead(document)]
if missing:
    sys.exit("links that lead nowhere:\n" + "\n".join(missing))
print(f"the links of {len(documents)} documents lead somewhere")
