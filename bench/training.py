"""Trains the GPT of examples/train in every precision that docs/training.md compares, a seed after the other, and
leaves a log of each run in a folder.

    bench/training.py OUT [--arms NAME...] [--norms NAME...] [--seeds N] [--part I/N] [--results FOLDER]
                          [OPTIONS of train.py, for all runs]

Each run is one call of examples/train/train.py, whose line is in its log; runs of this program follow one another in
one process, so that their tokens a second are those of a GPU that computes nothing else. Runs that are there already
are left alone. --part 0/2 and 1/2, on two GPUs, share the runs among them. --results keeps the logs of runs that ended,
as bench/results/training does, and leaves alone the runs whose logs it has. Fine-tuning, as docs/training.md has it:

    bench/training.py OUT --arms bf16-f16 int8 --norms qk-norm --start-from runs/large/bf16-f16-qk-norm-0/checkpoint.pt
                          --text FOLDER --lr 0.0002 --steps 100 ...
"""

import argparse
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples" / "train"))
import train  # noqa: E402

# Each kind of run by its name, with its options of train.py.
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
NORMS = {"none": ("", []), "qk-norm": ("-qk-norm", ["--qk-norm"])}


def runs(arms, norms, seeds):
    """(name, options) of each run; those of a seed follow one another."""
    for seed in range(seeds):
        for norm, option in map(NORMS.get, norms):
            for arm in arms:
                yield f"{arm}{norm}-{seed}", [*ARMS[arm], *option, "--seed", str(seed)]


def keep(log, path):
    """Copies the log of a run that ended."""
    text = log.read_text() if log.exists() else ""
    if any(json.loads(line)["kind"] == "end" for line in text.splitlines()):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def main():
    how = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}  # --seed is one of train.py
    parser = argparse.ArgumentParser(description=__doc__, **how)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--norms", nargs="+", choices=NORMS, default=list(NORMS), help="of q and k")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--part", default="0/1", help="I/N: the runs I, I + N, I + 2 N, ...  [0/1]")
    parser.add_argument("--results", type=pathlib.Path, help="a folder of NAME.jsonl")
    options, of_all = parser.parse_known_args()
    part, parts = map(int, options.part.split("/"))
    for name, of_run in list(runs(options.arms, options.norms, options.seeds))[part::parts]:
        log = options.out / name / "log.jsonl"
        kept = options.results / f"{name}.jsonl" if options.results else None
        if kept and kept.exists():
            continue
        try:
            if not log.exists():
                train.main([str(log.parent), *of_run, *of_all])
        except (Exception, SystemExit) as error:  # a run that diverges, or that no backend can compute, ends alone
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
        if kept:
            keep(log, kept)


main()
