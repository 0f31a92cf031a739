"""The `octet` command of the wheel: the program in the package, and of Python `octet report` and `octet plan`."""

import os
import pathlib
import sys


def main() -> None:
    """Becomes the command, which never returns, or runs octet.layers."""
    if sys.argv[1:2] in (["report"], ["plan"]):
        from octet import layers

        return layers.main(sys.argv[2:], sys.argv[1])
    program = pathlib.Path(__file__).parent / "bin" / "octet"
    if not program.exists():
        sys.exit(
            f"octet: no command in {program.parent}: it was left out where this package was built, as CMake "
            "did not find CLI11, nlohmann_json and fmt; install them (libcli11-dev, nlohmann-json3-dev, libfmt-dev), "
            "then octet again"
        )
    os.execv(program, [str(program), *sys.argv[1:]])
