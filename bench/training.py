"""Trains the GPT of examples/train in every precision that docs/training.md compares, a seed after the other, and
leaves a log of each run in a folder.

    bench/training.py OUT [--arms NAME...] [--seeds N] [--part I/N] [OPTIONS of train.py, for all runs]

Each run is one call of examples/train/train.py, whose line is in its log; runs of this program follow one another in
one process, so that their tokens a second are those of a GPU that computes nothing else. Runs that are there already
are left alone. --part 0/2 and 1/2, on two GPUs, share the runs among them.
"""

import argparse
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples" / "train"))
import train  # noqa: E402

# What a run is called, and what makes it so.
ARMS = {
    "torch": ["--precision", "torch"],
    "bf16-none": ["--precision", "bf16", "--bias-correction", "none"],
    "bf16-beta": ["--precision", "bf16", "--bias-correction", "beta"],
    "bf16-exact_delta": ["--precision", "bf16", "--bias-correction", "exact_delta"],
    "bf16-f16": ["--precision", "bf16"],
    "int8": ["--precision", "int8"],
    "int8-backward-bf16": ["--precision", "int8", "--backward-precision", "bf16", "--bias-correction", "none"],
    "fp8-backward-bf16": ["--precision", "fp8", "--backward-precision", "bf16", "--bias-correction", "none"],
    "sagebwd": ["--precision", "sagebwd"],
}
NORMS = {"": [], "-qk-norm": ["--qk-norm"]}


def runs(arms, seeds):
    """(name, options) of each run; those of a seed follow one another."""
    for seed in range(seeds):
        for norm, option in NORMS.items():
            for arm in arms:
                yield f"{arm}{norm}-{seed}", [*ARMS[arm], *option, "--seed", str(seed)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--part", default="0/1", help="I/N: the runs I, I + N, I + 2 N, ...  [0/1]")
    options, of_all = parser.parse_known_args()
    part, parts = map(int, options.part.split("/"))
    for name, how in list(runs(options.arms, options.seeds))[part::parts]:
        folder = options.out / name
        if (folder / "log.jsonl").exists():
            continue
        try:
            train.main([str(folder), *how, *of_all])
        except (Exception, SystemExit) as error:  # a run that diverges, or that no backend can compute, ends alone
            print(f"{name}: {type(error).__name__}: {error}", flush=True)


main()
