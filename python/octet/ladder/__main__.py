"""python -m octet.ladder build [RUNG...] [--arch ARCH]: compiles rungs, all of them by default."""

import argparse
import sys

from octet import ladder
from octet.errors import Error


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m octet.ladder", description=__doc__)
    commands = parser.add_subparsers(required=True)
    build = commands.add_parser("build", help="compile rungs with nvcc")
    build.add_argument("rungs", nargs="*", metavar="RUNG")
    build.add_argument("--arch", default="90a", choices=ladder.ARCHITECTURES)
    options = parser.parse_args()
    try:
        # Rung 6 has instructions that only 90a has.
        able = [rung for rung in ladder.rungs() if options.arch == "90a" or not rung.startswith("6_")]
        for rung in options.rungs or able:
            print(ladder.build(rung, options.arch))
    except Error as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
