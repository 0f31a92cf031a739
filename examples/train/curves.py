"""Draws the logs of runs: held-out loss, loss, error of dq and kappa by step, each run a line.

    python examples/train/curves.py runs/*/log.jsonl --out curves.svg
    python examples/train/curves.py runs/*/log.jsonl --table

Equal logs give equal bytes. --table prints final losses instead, runs that differ in their seed alone in one row.
"""

import argparse
import json
import math
import pathlib
import statistics
from html import escape

PLAIN = "", False, "float32"  # what a label leaves out
LABELS = ("precision", "bias_correction", "backward_precision", "rounding", "qk_norm", "dtype", "tokens_per_step")
COLOURS = ("#2f6fdb", "#c9510c", "#1a7f37", "#8250df", "#bf3989", "#9a6700", "#0e8a8a", "#6e7781")
STYLE = """
  text { font: 12px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
  .title { font-weight: 600; }
  .y { text-anchor: end; }
  .x { text-anchor: middle; }
  .grid { stroke: #8c959f; stroke-width: 0.5; opacity: 0.5; }
  polyline { fill: none; stroke-width: 1.6; }
  @media (prefers-color-scheme: dark) { text { fill: #e6edf3; } }
"""
WIDTH, HEIGHT, LEFT, GAP = 400, 220, 52, 44  # of a panel, its axis, and between panels


def read(path):
    """The entries of a log, the configuration first."""
    try:
        entries = [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]
    except OSError as error:
        raise SystemExit(f"{path}: {error.strerror}") from error
    except ValueError:
        entries = []
    if not entries or entries[0].get("kind") != "config":
        raise SystemExit(f"{path}: found no configuration in its first line, allowed: log.jsonl of train.py")
    return entries


def label(config, shown):
    """What tells a run from others."""
    sixteen = {"f16", "bf16"} & {config["precision"], config["backward_precision"]}
    if config["rounding"]:  # which has all that a precision says
        shown = [name for name in shown if name not in ("precision", "bias_correction", "backward_precision")]
    elif not sixteen:
        shown = [name for name in shown if name != "bias_correction"]
    words = [f"{config[name]}" if name in ("precision", "rounding") else f"{name.replace('_', ' ')} {config[name]}"
             for name in shown if config[name] not in PLAIN]  # fmt: skip
    return ", ".join(words).replace("qk norm True", "QK-norm")


def shown_names(logs):
    """The options that tell the runs apart, and the precision."""
    return [x for x in LABELS if x == "precision" or len({str(log[0][x]) for log in logs}) > 1]


def worst(entry, name):
    return max(layer[name] for layer in entry["layers"])


# title, kind of entry, its number, whether the axis is logarithmic. Losses are without the first tenth, where they fall
# so far that differences between runs would not be seen.
PANELS = (
    ("Held-out loss, nats a byte, after a tenth", "held_out", lambda x: x["loss"], False),
    ("Loss, nats a byte, after a tenth", "step", lambda x: x["loss"], False),
    ("Error of dq, relative L2, worst layer", "gradients", lambda x: worst(x, "dq"), True),
    ("kappa, worst layer", "gradients", lambda x: worst(x, "kappa"), False),
)


def ticks(low, high, logarithmic):
    if logarithmic:
        return [10.0**n for n in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    raw = (high - low) / 4 or 1.0
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * n for n in (1, 2, 5, 10) if unit * n >= raw)
    return [step * n for n in range(math.floor(low / step), math.ceil(high / step) + 1)]


def panel(title, lines, logarithmic, left, top):
    """The elements of one chart; `lines`: a list of (step, number) for each run."""
    points = [(x, y) for line in lines for x, y in line if math.isfinite(y) and (y > 0 or not logarithmic)]
    out = [f'<text class="title" x="{left}" y="{top - 12}">{escape(title)}</text>']
    if not points:
        return [*out, f'<text x="{left + LEFT}" y="{top + HEIGHT / 2:.0f}">no entries</text>']
    marks = ticks(min(y for _, y in points), max(y for _, y in points), logarithmic)
    scale = math.log10 if logarithmic else float
    low, high, last = scale(marks[0]), scale(marks[-1]), max(x for x, _ in points) or 1

    def place(x, y):
        across = left + LEFT + (WIDTH - LEFT) * x / last
        return across, top + HEIGHT * (1 - (scale(y) - low) / ((high - low) or 1))

    for y in marks:
        at = place(0, y)[1]
        out.append(f'<line class="grid" x1="{left + LEFT}" x2="{left + WIDTH}" y1="{at:.1f}" y2="{at:.1f}"/>')
        out.append(f'<text class="y" x="{left + LEFT - 6}" y="{at + 4:.1f}">{y:.3g}</text>')
    for x in (0, last):
        out.append(f'<text class="x" x="{place(x, marks[0])[0]:.1f}" y="{top + HEIGHT + 16}">{x}</text>')
    for line, colour in zip(lines, colours(len(lines)), strict=True):
        kept = [place(x, y) for x, y in line if (x, y) in points]
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in kept)
        out.append(f'<polyline stroke="{colour}" points="{text}"/>')
    return out


def colours(count):
    return [COLOURS[i % len(COLOURS)] for i in range(count)]


def drawn(logs):
    """The chart as SVG."""
    shown = shown_names(logs)
    seeds = len({log[0]["seed"] for log in logs}) > 1
    names = [label(log[0], shown) + (f", seed {log[0]['seed']}" if seeds else "") for log in logs]
    body, rows = [], (len(PANELS) + 1) // 2
    for i, (title, kind, number, logarithmic) in enumerate(PANELS):
        last = max(x.get("step", 0) for log in logs for x in log)
        first = last / 10 if "loss" in title.lower() else 0
        lines = [[(x["step"], number(x)) for x in log if x["kind"] == kind and x["step"] >= first] for log in logs]
        left, top = 8 + (i % 2) * (WIDTH + GAP), 30 + (i // 2) * (HEIGHT + GAP + 20)
        body += panel(title, lines, logarithmic, left, top)
    top = 30 + rows * (HEIGHT + GAP + 20) - 10
    for i, (name, colour) in enumerate(zip(names, colours(len(names)), strict=True)):
        at = top + 18 * i
        body.append(f'<rect fill="{colour}" x="8" y="{at - 9}" width="10" height="10"/>')
        body.append(f'<text x="24" y="{at}">{escape(name)}</text>')
    width, height = 2 * WIDTH + GAP + 16, top + 18 * len(names) + 6
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    return "\n".join([head, "<title>Training runs</title>", f"<style>{STYLE}</style>", *body, "</svg>", ""])


def table(logs):
    """Final held-out losses: mean and standard deviation over seeds."""
    rows, shown = {}, shown_names(logs)
    for log in logs:
        losses = [x["loss"] for x in log if x["kind"] == "held_out"]
        speeds = [x["tokens_per_second"] for x in log if x["kind"] == "step"]
        ended = any(x["kind"] == "end" and not x["diverged"] for x in log)
        rows.setdefault((label(log[0], shown), log[0]["card"]), []).append((losses, speeds, ended))
    lines = [
        "| attention | runs | held-out loss | spread | tokens/s | card |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for (name, card), runs in sorted(rows.items()):
        final = [losses[-1] for losses, _, ended in runs if ended and losses]
        count = f"{len(final)}" if len(final) == len(runs) else f"{len(final)} of {len(runs)} ended"
        mean = f"{statistics.mean(final):.4f}" if final else ""
        spread = f"{statistics.stdev(final):.4f}" if len(final) > 1 else ""
        speed = (
            f"{statistics.median(x for _, speeds, _ in runs for x in speeds):.0f}" if any(s for _, s, _ in runs) else ""
        )
        lines.append(f"| {name} | {count} | {mean} | {spread} | {speed} | {card} |")
    return "\n".join(lines)


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", metavar="LOG")
    parser.add_argument("--out", default="curves.svg", metavar="SVG", help="[curves.svg]")
    parser.add_argument("--table", action="store_true", help="print final losses instead")
    options = parser.parse_args(words)
    logs = [read(path) for path in options.logs]
    if options.table:
        print(table(logs))
    else:
        pathlib.Path(options.out).write_text(drawn(logs))


if __name__ == "__main__":
    main()
