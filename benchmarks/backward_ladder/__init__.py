"""Five ways to write LayerNorm's backward pass, and this library's, as table and bar chart.

The measuring is done by a program without torch, `main.cu` here, which writes a CSV file:
`cmake --build BUILD --target backward_ladder`.
"""

import csv
import itertools
import subprocess
import sys
from pathlib import Path

from benchmarks import result_files

needs_gpu = False

STEM = "backward_ladder"
HEADER = ("step", "", "us", "cycles", "TB/s", "times v1", "error over bound")
WHERE = {"cached": "in the L2 cache", "rotating": "out of the L2 cache"}


def cases(lines):
    """[(title, lines of the CSV file)]: a size, cached or not, with its steps in order."""
    groups = itertools.groupby(lines, key=lambda r: (int(r["rows"]), int(r["cols"]), r["buffers"]))
    return [(f"{m} x {n}, {WHERE[buffers]}", list(steps)) for (m, n, buffers), steps in groups]


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
    import matplotlib

    matplotlib.use("Agg")  # needs no display; chosen before pyplot loads
    from matplotlib import pyplot as plt

    panels = cases(lines)
    figure, axes = plt.subplots(
        1, len(panels), figsize=(4 * len(panels), 4), layout="constrained", squeeze=False
    )
    for axis, (title, steps) in zip(axes[0], panels, strict=True):
        times = [float(r["microseconds"]) for r in steps]
        colors = ["C1" if r["step"] == "fused_norm" else "C0" for r in steps]
        labels = [f"{time:.3g}" if time < 1000 else f"{time:.0f}" for time in times]
        bars = axis.bar([r["step"] for r in steps], times, color=colors)
        axis.bar_label(bars, labels)
        axis.set(title=title, yscale="log")
        axis.margins(y=0.1)
        axis.tick_params(axis="x", rotation=30)
    axes[0][0].set_ylabel("microseconds, log scale")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def write(lines, out):
    """Write backward_ladder.md and .png into `out`."""
    parts = [
        "LayerNorm's backward pass in fp32, in a CUDA graph of many calls. Time is all that a call "
        "launches,\nzeroing `dweight` and `dbias` before atomics included; cycles are time x SM "
        "clock; TB/s counts what\nmust move, `x` and `dy` in and `dx` out. Each result was "
        "compared with the CPU's, in double."
    ]
    for title, steps in cases(lines):
        parts += [f"## {title}", (HEADER, table(steps))]
    parts.append(f"![Microseconds of each step]({STEM}.png)")
    result_files.write_markdown(out / f"{STEM}.md", "The backward ladder", facts(lines), parts)
    plot(lines, out / f"{STEM}.png")
    print(f"Written: {out / STEM}.md and .png")


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
