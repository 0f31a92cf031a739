"""Reads what Nsight Compute exports: ncu --import FILE --csv --page raw --print-units base."""

import csv
import io
import re

# What is compared: a label, how the values of several kernels become one ("sum", or "mean" weighted by time), how the
# value is shown, and the metrics that hold it. A metric is a regular expression; the first that a profile has is
# taken, as names differ between versions of Nsight Compute and architectures.
ROWS = [
    ("time, us", "sum", lambda x: f"{x / 1000:.1f}", [r"gpu__time_duration\.sum"]),
    ("elapsed cycles", "sum", "{:.0f}".format, [r"gpc__cycles_elapsed\.max", r"sm__cycles_elapsed\.max"]),
    ("cycles in which a multiprocessor is active", "sum", "{:.0f}".format, [r"sm__cycles_active\.avg"]),
    ("instructions of warps, millions", "sum", lambda x: f"{x / 1e6:.1f}", [r"smsp__inst_executed\.sum"]),
    ("registers of a thread", "mean", "{:.0f}".format, [r"launch__registers_per_thread"]),
    (
        "shared memory of a block, bytes",
        "mean",
        "{:.0f}".format,
        [r"launch__shared_mem_per_block", r"launch__shared_mem_per_block_dynamic"],
    ),
    ("occupancy, %", "mean", "{:.1f}".format, [r"sm__warps_active\.avg\.pct_of_peak_sustained_active"]),
    ("occupancy that the launch allows, %", "mean", "{:.1f}".format, [r"sm__maximum_warps_per_active_cycle_pct"]),
    (
        "wavefronts of shared memory, millions",
        "sum",
        lambda x: f"{x / 1e6:.1f}",
        [r"l1tex__data_pipe_lsu_wavefronts_mem_shared\.sum"],
    ),
    (
        "bank conflicts of loads",
        "sum",
        "{:.0f}".format,
        [r"l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld\.sum"],
    ),
    (
        "bank conflicts of stores",
        "sum",
        "{:.0f}".format,
        [r"l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st\.sum"],
    ),
    (
        "memory throughput, % of peak",
        "mean",
        "{:.1f}".format,
        [r"gpu__compute_memory_throughput\.avg\.pct_of_peak_sustained_elapsed"],
    ),
    (
        "DRAM throughput, % of peak",
        "mean",
        "{:.1f}".format,
        [
            r"gpu__dram_throughput\.avg\.pct_of_peak_sustained_elapsed",
            r"dram__throughput\.avg\.pct_of_peak_sustained_elapsed",
        ],
    ),
    ("SM throughput, % of peak", "mean", "{:.1f}".format, [r"sm__throughput\.avg\.pct_of_peak_sustained_elapsed"]),
    ("issue slots, % of peak", "mean", "{:.1f}".format, [r"smsp__issue_active\.avg\.pct_of_peak_sustained_active"]),
    ("FMA, % of peak", "mean", "{:.1f}".format, [r"sm__inst_executed_pipe_fma\.avg\.pct_of_peak_sustained_active"]),
    (
        "exponentials (XU), % of peak",
        "mean",
        "{:.1f}".format,
        [r"sm__inst_executed_pipe_xu\.avg\.pct_of_peak_sustained_active"],
    ),
    (
        "tensor cores, % of peak",
        "mean",
        "{:.1f}".format,
        [
            r"sm__pipe_tensor\w*_cycles_active\.avg\.pct_of_peak_sustained_active",
            r"sm__inst_executed_pipe_tensor\w*\.avg\.pct_of_peak_sustained_active",
        ],
    ),
]
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+?)(?<!_not_issued)_per_issue_active\.ratio")
STALLS = 5  # the number of reasons that are shown


class Unreadable(Exception):
    """A file is not what ncu exports; the text says what it lacks."""


def number(text):
    """A number as ncu prints it, with or without commas between thousands; None for what is none."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def read(text, name="the profile"):
    """The kernels of a CSV export, in the order of their launches: dicts of metric to number, "Kernel Name" to text."""
    # ncu prints lines of its own, which begin with ==, before the table.
    rows = list(csv.reader(io.StringIO("".join(x for x in text.splitlines(True) if not x.startswith("==")))))
    rows = [row for row in rows if row]
    if not rows or "Kernel Name" not in rows[0]:
        raise Unreadable(f"{name}: no column Kernel Name, as exports of ncu --csv --page raw have")
    header, body = rows[0], rows[1:]
    # The first row holds the units: it has no ID.
    kernels = []
    for row in body:
        if not row[0]:
            continue
        if len(row) != len(header):
            raise Unreadable(f"{name}: a row of {len(row)} columns below a header of {len(header)}")
        kernel = {key: number(value) for key, value in zip(header, row, strict=True)}
        kernel = {key: value for key, value in kernel.items() if value is not None}
        kernel["Kernel Name"] = row[header.index("Kernel Name")]
        kernels.append(kernel)
    if not kernels:
        raise Unreadable(f"{name}: no kernel")
    return kernels


def weights(kernels):
    """The share of each kernel in the time of all."""
    times = [kernel.get("gpu__time_duration.sum", 0.0) for kernel in kernels]
    return [time / sum(times) if sum(times) else 1 / len(times) for time in times]


def value(kernels, how, patterns):
    """One number for all kernels of a rung, or None where the profile lacks the metric.

    Of several metrics that one pattern matches (kinds of tensor instructions) the largest counts.
    """
    for pattern in patterns:
        found = [[x for key, x in kernel.items() if re.fullmatch(pattern, key)] for kernel in kernels]
        if all(found):
            largest = [max(each) for each in found]
            if how == "sum":
                return sum(largest)
            return sum(x * share for x, share in zip(largest, weights(kernels), strict=True))
    return None


def cycles(kernels):
    """Elapsed cycles of all kernels together, or None."""
    return next(value(kernels, how, patterns) for label, how, _, patterns in ROWS if label == "elapsed cycles")


def stalls(kernels):
    """For each reason: how many warps wait for it, on average, whenever an instruction is issued."""
    result = {}
    for kernel, share in zip(kernels, weights(kernels), strict=True):
        for key, x in kernel.items():
            match = STALL.fullmatch(key)
            # Warps that issue, or could, are not stalled.
            if match and match[1] not in ("selected", "not_selected"):
                result[match[1]] = result.get(match[1], 0.0) + x * share
    return result


def table(profiles):
    """A table in Markdown of {name: kernels}: a row a metric, a column a profile, - where there is no value."""

    def row(label, values):
        return f"| {label} | " + " | ".join(values) + " |"

    lines = [row("", profiles), row("---", ["---:"] * len(profiles))]
    lines.append(row("kernels", [str(len(kernels)) for kernels in profiles.values()]))
    for label, how, show, patterns in ROWS:
        values = [value(kernels, how, patterns) for kernels in profiles.values()]
        lines.append(row(label, ["-" if x is None else show(x) for x in values]))
    found = [stalls(kernels) for kernels in profiles.values()]
    everything = {reason for each in found for reason in each}
    reasons = sorted(everything, key=lambda r: (-max(x.get(r, 0.0) for x in found), r))
    for reason in reasons[:STALLS]:
        label = f"stalled on {reason.replace('_', ' ')}, warps per issue"
        lines.append(row(label, [f"{x[reason]:.2f}" if reason in x else "-" for x in found]))
    return "\n".join(lines)
