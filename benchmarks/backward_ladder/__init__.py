"""Five ways to write LayerNorm's backward pass, and this library's, as table and bar chart.

The measuring is done by a program without torch, `main.cu` here, which writes a CSV file:
`cmake --build BUILD --target backward_ladder`.
"""

import csv
import itertools
import subprocess
import sys
from pathlib import Path

from benchmarks import plots, report

needs_gpu = False

STEM = "backward_ladder"
HEADER = ("step", "", "us", "cycles", "TB/s", "times v1", "error over bound")
WHERE = {"cached": "in the L2 cache", "rotating": "out of the L2 cache"}


def title(line):
    return f"{line['rows']} x {line['cols']}, {WHERE[line['buffers']]}"


def cases(lines):
    """[(title, lines of the CSV file)]: a size, cached or not, with its steps in order."""
    return [(name, list(steps)) for name, steps in itertools.groupby(lines, key=title)]


def table(steps):
    """Rows of strings under HEADER."""
    first = float(steps[0]["microseconds"])
    rows = []
    for r in steps:
        us, error = float(r["microseconds"]), float(r["error_over_bound"])
        rows.append(
            (
                r["step"],
                r["how"],
                f"{us:.1f}",
                f"{int(r['cycles']):,}".replace(",", " "),
                f"{float(r['terabytes_per_second']):.2f}",
                f"{first / us:.1f}",
                f"{error:.2g}" if error <= 1 else f"WRONG: {error:.2g}",
            )
        )
    return rows


def facts(lines):
    clocks = sorted({int(r["clock_mhz"]) for r in lines})
    first = lines[0]
    return [
        ("date", first["date"]),
        ("GPU", first["gpu"]),
        ("SM clock", f"{' to '.join(map(str, clocks[:1] + clocks[1:][-1:]))} MHz, read each time"),
        ("CUDA", f"{first['runtime_cuda']}; the driver supports {first['driver_cuda']}"),
    ]


def plot(lines, path):
    """Microseconds of each step, a panel a case."""
    figure, panels = plots.panels(lines, 4, 4, len(cases(lines)), title)
    for axes, steps in panels:
        times = [float(r["microseconds"]) for r in steps]
        colors = ["C1" if r["step"] == "fused_norm" else "C0" for r in steps]
        labels = [f"{time:.3g}" if time < 1000 else f"{time:.0f}" for time in times]
        axes.bar_label(axes.bar([r["step"] for r in steps], times, color=colors), labels)
        axes.set(yscale="log", ylabel="microseconds, log scale")
        axes.margins(y=0.1)
        axes.tick_params(axis="x", rotation=30)
    figure.savefig(path, dpi=120)
    return [path]


def write(lines, out):
    """Write backward_ladder.md and .png into `out`."""
    parts = [TEXT]
    for name, steps in cases(lines):
        parts += [f"## {name}", (HEADER, table(steps))]
    pictures = plot(lines, out / f"{STEM}.png")
    report.publish(out / STEM, "The backward ladder", facts(lines), parts, pictures)


TEXT = (
    "LayerNorm's backward pass in fp32, in a CUDA graph of many calls. Time is all that a call "
    "launches,\nzeroing `dweight` and `dbias` before atomics included; cycles are time x SM clock; "
    "TB/s counts what\nmust move, `x` and `dy` in and `dx` out. Each result was compared with the "
    "CPU's, in double."
)


def add_arguments(parser):
    parser.add_argument(
        "--program",
        type=Path,
        help="run this build of backward_ladder first; else the CSV file in --out is shown",
    )


def run(options):
    """Measure, if asked to, and write; the program's exit code if it fails, 2 without results."""
    source = options.out / f"{STEM}.csv"
    if options.program:
        try:
            done = subprocess.run([options.program.resolve(), "--csv", source])
        except OSError as error:
            return fail(f"--program {options.program} cannot be run: {error.strerror}.")
        if done.returncode:
            return done.returncode
    try:
        with source.open(newline="") as stream:
            lines = list(csv.DictReader(stream))
    except OSError as error:
        return fail(f"{source} cannot be read: {error.strerror}; --program makes one.")
    if not lines:
        return fail(f"{source} holds no results.")
    write(lines, options.out)
    return 0


def fail(message):
    print(f"python -m benchmarks ladder: {message}", file=sys.stderr)
    return 2
