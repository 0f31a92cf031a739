"""Draws the logs of runs: held-out loss, loss, error of dq and kappa by step, each run a line.

    python examples/train/curves.py runs/*/log.jsonl --out curves.svg
    python examples/train/curves.py runs/*/log.jsonl --table

Equal logs give equal bytes. --table prints final losses and errors of gradients instead, runs that differ in their
seed alone in one row.
"""

import argparse
import json
import math
import pathlib
import statistics
from html import escape

PLAIN = "", False, "float32", None  # what a label leaves out
ATTENTION = ("precision", "bias_correction", "backward_precision", "rounding")
LABELS = (
    *ATTENTION, "qk_norm", "dtype", "preset", "length", "tokens_per_step", "steps", "lr", "dropout", "start_from",
    "text", "digest_of_text",
)  # fmt: skip
# octet's default, with which a table compares runs of the same seed and of the same options but those of ATTENTION.
REFERENCE = dict(zip(ATTENTION, ("bf16", "f16", "", ""), strict=True))
COLOURS = ("#2f6fdb", "#c9510c", "#1a7f37", "#8250df", "#bf3989", "#9a6700", "#0e8a8a", "#6e7781")
STYLE = """
  text { font: 12px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
  .title { font-weight: 600; }
  .y { text-anchor: end; }
  .x { text-anchor: middle; }
  .grid { stroke: #8c959f; stroke-width: 0.5; opacity: 0.5; }
  polyline { fill: none; stroke-width: 1.6; }
  @media (prefers-color-scheme: dark) { text { fill: #e6edf3; } polyline, rect { filter: brightness(1.4); } }
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
    """What tells a run from others: what computes attention, then the other options of `shown`."""

    def precision(name):  # those of 16 bits with their bias correction
        return f"{config[name]} {config['bias_correction']}" if config[name] in ("f16", "bf16") else config[name]

    words = [f"rounding {config['rounding']}" if config["rounding"] else precision("precision")]
    if config["backward_precision"]:
        words.append(f"backward {precision('backward_precision')}")
    others = {name: config.get(name) for name in shown if name not in ATTENTION}
    words += [f"{name.replace('_', ' ')} {x}" for name, x in others.items() if x not in PLAIN]
    return ", ".join(words).replace("qk norm True", "QK-norm")


def shown_names(logs):
    """The options that tell the runs apart."""
    return [x for x in LABELS if len({str(log[0].get(x)) for log in logs}) > 1]


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
    width, height = 2 * WIDTH + GAP + 24, top + 18 * len(names) + 6
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    return "\n".join([head, "<title>Training runs</title>", f"<style>{STYLE}</style>", *body, "</svg>", ""])


def of_kind(log, kind):
    return [x for x in log if x["kind"] == kind]


def final(log):
    """The last held-out loss of a run, nan if it diverged or did not end."""
    ended = any(not x["diverged"] for x in of_kind(log, "end"))
    return of_kind(log, "held_out")[-1]["loss"] if ended else math.nan


def grouped(logs):
    """Label -> the logs of runs that differ in their seed alone; those with QK-norm come last."""
    shown, found = shown_names(logs), {}
    for log in sorted(logs, key=lambda log: (log[0]["qk_norm"], label(log[0], shown), log[0]["seed"])):
        found.setdefault(label(log[0], shown), []).append(log)
    return found


def mean_and_error(numbers, form):
    """Their mean as text, with its standard error where there are two or more."""
    error = f" ± {statistics.stdev(numbers) / len(numbers) ** 0.5:{form}}" if len(numbers) > 1 else ""
    return f"{statistics.mean(numbers):+{form}}{error}"


def partner_key(log, attention):
    others = [str(log[0].get(name)) for name in (*LABELS, "seed") if name not in ATTENTION]
    return tuple([*attention, *others])


def differences(logs, all_logs):
    """How far the final losses of runs are from those of REFERENCE, run by run, as parts of the latter."""
    ends = {partner_key(log, [log[0][x] for x in ATTENTION]): final(log) for log in all_logs}
    references = [(final(log), ends.get(partner_key(log, REFERENCE.values()), math.nan)) for log in logs]
    return [own / other - 1 for own, other in references if math.isfinite(own) and math.isfinite(other)]


def speeds(logs):
    """Card -> tokens a second, the median of what its runs logged, to three digits."""
    found = {}
    for log in logs:
        found.setdefault(log[0]["card"], []).extend(x["tokens_per_second"] for x in of_kind(log, "step"))
    medians = {card: statistics.median(x) for card, x in found.items() if x}
    return {card: f"{round(x, 3 - len(str(int(x)))):.0f}" for card, x in medians.items()}


def lines_of(heads, rows):
    return ["| " + " | ".join(x) + " |" for x in (heads, ["---", *["---:"] * (len(heads) - 1)], *rows)]


def loss_table(logs):
    """Final held-out losses: mean and standard deviation over seeds, and the difference to REFERENCE in percent with
    its standard error, seed by seed."""
    rows = []
    for name, runs in grouped(logs).items():
        losses = [x for x in map(final, runs) if math.isfinite(x)]
        beside = [] if is_reference(runs) else differences(runs, logs)
        cells = [f"{statistics.mean(losses):.4f}" if losses else ""]
        cells.append(f"{statistics.stdev(losses):.4f}" if len(losses) > 1 else "")
        cells.append(mean_and_error([100 * x for x in beside], ".2f") if beside else "")
        count = f"{len(losses)}" if len(losses) == len(runs) else f"{len(losses)} of {len(runs)} ended"
        fast = speeds(runs)
        rows.append([name, count, *cells, "; ".join(fast.values()), "; ".join(fast)])
    heads = ["attention", "runs", "held-out loss", "spread", "difference to bf16 f16, %", "tokens/s", "card"]
    return lines_of(heads, rows)


def is_reference(runs):
    return {name: runs[0][0][name] for name in ATTENTION} == REFERENCE


def error_table(logs):
    """What rounding does to gradients, of runs that ended: error of dq and kappa of the worst layer and run at the last
    measurement; bias of delta, of all layers and runs at all measurements but the first: its size, and its mean."""
    rows = []
    for name, runs in grouped(logs).items():
        measured = [of_kind(log, "gradients") for log in runs if math.isfinite(final(log))]
        biases = [layer["delta_bias"] for log in measured for x in log[1:] for layer in x["layers"]]
        if biases:
            ends = [f"{max(worst(log[-1], x) for log in measured):.2g}" for x in ("dq", "kappa")]
            size = statistics.mean(x * x for x in biases) ** 0.5
            rows.append([name, *ends, f"{size:.1e}", mean_and_error(biases, ".1e")])
    heads = ["attention", "error of dq", "kappa", "bias of delta, rms", "bias of delta, mean"]
    return lines_of(heads, rows)


def point_table(found):
    """What `points` of measure.py finds: errors of dq/dk/dv, a column for each file. The first row is that of all
    roundings, the others come as in the last file."""
    files = list(dict.fromkeys(x["file"] for x in found))
    errors = {(x["file"], x["exact"]): "/".join(f"{x[name]:.2g}" for name in ("dq", "dk", "dv")) for x in found}
    order = ["", *(x["exact"] for x in found if x["file"] == files[-1] and x["exact"])]
    rows = [[name or "nothing", *(errors[file, name] for file in files)] for name in order]
    return lines_of(["what is exact", *files], rows)


def table(logs):
    return "\n".join([*loss_table(logs), "", *error_table(logs)])


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", metavar="LOG")
    parser.add_argument("--out", default="curves.svg", metavar="SVG", help="[curves.svg]")
    parser.add_argument("--table", action="store_true", help="print final losses and errors instead")
    options = parser.parse_args(words)
    logs = [read(path) for path in options.logs]
    if options.table:
        print(table(logs))
    else:
        pathlib.Path(options.out).write_text(drawn(logs))


if __name__ == "__main__":
    main()
