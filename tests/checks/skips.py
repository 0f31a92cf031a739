"""Every test that was skipped is one that tests/allowed_skips.txt allows here.

    skips.py ALLOWED BUILD...

Reads what CTest left in each build folder: ctest.log, its own output, and
Testing/Temporary/LastTest.log, that of the tests.
"""

import fnmatch
import importlib.util
import pathlib
import re
import sys


def is_absent(name):
    """Whether this machine lacks a GPU, or this Python a package, or the oldest versions of some."""
    if name == "gpu":
        return not list(pathlib.Path("/dev").glob("nvidia[0-9]*"))
    if name == "oldest":
        return not (pathlib.Path(sys.prefix) / "oldest").is_dir()
    return importlib.util.find_spec(name) is None


def allowed_here(lines):
    """The patterns of the lines that hold on this machine."""
    for line in lines:
        where, _, pattern = line.partition(" ")
        if where == "any" or (where.startswith("no-") and is_absent(where.removeprefix("no-"))):
            yield pattern.strip()
        elif not where.startswith("no-"):
            raise ValueError(f'allowed skips: found "{line}", allowed: any or no-NAME, then what may be skipped')


def skipped(ctest, tests):
    """What was skipped: entries of CTest, and files of GoogleTest and pytest with the reason."""
    entries = re.findall(r"^\s*\d+ - (\S+) \((?:Skipped|Disabled)\)$", ctest, re.MULTILINE)
    if "The following tests did not run:" in ctest and not entries:
        raise ValueError("CTest skipped tests, and their names were not found")
    cases = re.findall(r"^(?:.*/)?(\w+\.cc):\d+: Skipped\n(.*)$", tests, re.MULTILINE)
    modules = re.findall(r"^SKIPPED \[(\d+)\] (?:.*/)?(\w+\.py)(?::\d+)?: (.*)$", tests, re.MULTILINE)
    # Each with its reason, or what is read here is not all.
    named = len(cases), sum(int(n) for n, *_ in modules)
    counts = (
        re.findall(r"^\[  SKIPPED \] (\d+) tests?,", tests, re.MULTILINE),
        re.findall(r"\b(\d+) skipped\b.* in [\d.]+s", tests),
    )
    for program, found, expected in zip(("GoogleTest", "pytest"), named, counts, strict=True):
        if found != sum(map(int, expected)):
            raise ValueError(f"{program} skipped {sum(map(int, expected))} tests, and {found} have a reason")
    yield from (f"ctest {name}" for name in entries)
    yield from (f"gtest {file}: {reason}" for file, reason in cases)
    yield from (f"pytest {file}: {reason}" for _, file, reason in modules)


def main():
    lines = [line.strip() for line in pathlib.Path(sys.argv[1]).read_text().splitlines()]
    wrong, count = [], 0
    try:
        allowed = list(allowed_here(line for line in lines if line and not line.startswith("#")))
        for folder in map(pathlib.Path, sys.argv[2:]):
            logs = folder / "ctest.log", folder / "Testing/Temporary/LastTest.log"
            found = sorted(set(skipped(*(log.read_text(errors="replace") for log in logs))))
            wrong += [f"{folder}: {skip}" for skip in found if not any(fnmatch.fnmatchcase(skip, x) for x in allowed)]
            count += len(found)
    except ValueError as error:
        sys.exit(f"skips: {error}")
    print("\n".join(f"skipped, and not allowed: {skip}" for skip in wrong) or f"skips: {count} kinds, all allowed")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
