"""The `octet` command of the wheel: the program in the package."""

import os
import pathlib
import sys


def main() -> None:
    """Becomes the command; never returns."""
    program = pathlib.Path(__file__).parent / "bin" / "octet"
    if not program.exists():
        sys.exit(
            f"octet: no command in {program.parent}: it was left out where this package was built, as CMake "
            "did not find CLI11, nlohmann_json and fmt; install them (libcli11-dev, nlohmann-json3-dev, libfmt-dev), "
            "then octet again"
        )
    os.execv(program, [str(program), *sys.argv[1:]])
