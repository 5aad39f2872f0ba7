"""Tables of results: on the terminal and in Markdown a row a case, in CSV a line a result."""

import csv
import dataclasses
import datetime
import platform
import subprocess
import sys

import torch
from rich.console import Console
from rich.table import Table

import fused_norm as fn

OURS = "fused_norm"


@dataclasses.dataclass(frozen=True)
class Result:
    """One implementation at one case. Times in seconds.

    `seconds` is None where the implementation cannot run the case; `note` says why.
    """

    operation: str
    direction: str
    rows: int
    cols: int
    dtype: str
    peer: str
    ideal: float
    target: float
    seconds: float | None = None
    error: float | None = None  # largest error over its bound
    note: str = ""

    @property
    def case(self):
        return (self.operation, self.direction, self.rows, self.cols, self.dtype)

    @property
    def correct(self):
        return self.error is not None and self.error <= 1

    @property
    def fraction(self):
        return self.ideal / self.seconds


def environment(bandwidth):
    """What the figures depend on, as (name, value) pairs. Ask after some load: clocks fall idle."""
    device = torch.cuda.get_device_properties(0)
    query = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.limit"
    try:
        command = [
            "nvidia-smi",
            f"--id=GPU-{device.uuid}",
            f"--query-gpu={query}",
            "--format=csv,noheader",
        ]
        answer = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=30
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        answer = f"nvidia-smi failed: {error}"
    clocks = dict(zip(query.split(","), answer.strip().split(", "), strict=False))
    build = fn.build_info()
    return [
        ("date", datetime.datetime.now().isoformat(" ", "minutes")),
        ("command", f"python -m benchmarks {' '.join(sys.argv[1:])}"),
        ("GPU", f"{device.name}, {device.L2_cache_size / 1e6:.0f} MB L2"),
        *((name.replace("_", " "), value) for name, value in clocks.items()),
        ("copy bandwidth", f"{bandwidth / 1e12:.3f} TB/s (read + written, 2 GiB device copy)"),
        (
            "versions",
            f"Python {platform.python_version()}, torch {torch.__version__}, "
            f"CUDA {torch.version.cuda}",
        ),
        (
            "fused_norm",
            f"{fn.__version__}, built for {', '.join(build['arch_list'])} with CUDA "
            f"{build['cuda']}, torch {build['torch']}",
        ),
    ]


def verdict(results):
    """Our result against its target and against the peers; `results` are those of one case."""
    ours = next((r for r in results if r.peer == OURS), None)
    if ours is None or ours.seconds is None:
        return "-"
    if not ours.correct:
        return "WRONG"
    over = ours.seconds / ours.target - 1
    words = ["met" if over <= 0 else f"{over:.0%} over" if over >= 0.005 else "<1% over"]
    rivals = [
        r for r in results if not r.peer.startswith(OURS) and r.seconds is not None and r.correct
    ]
    best = min(rivals, key=lambda r: r.seconds, default=None)
    if best is not None and best.seconds * 1.02 < ours.seconds:
        words.append(f"{best.peer} ahead")
    return ", ".join(words)


def cell(result):
    """ "time (fraction)", or why there is none."""
    if result is None or result.seconds is None:
        return "-"
    if not result.correct:
        return f"WRONG ({result.error:.2g} x bound)"
    return f"{result.seconds * 1e6:.1f} ({result.fraction:.2f})"


def wide_table(results):
    """(header, rows of strings): a row a case, a column a peer."""
    peers = sorted(dict.fromkeys(r.peer for r in results), key=lambda p: not p.startswith(OURS))
    header = [
        "operation",
        "M x N",
        "dtype",
        "ideal us",
        "target us",
        *(f"{p} us" for p in peers),
        "target",
    ]
    rows = []
    for case in dict.fromkeys(r.case for r in results):
        here = {r.peer: r for r in results if r.case == case}
        first = next(iter(here.values()))
        rows.append(
            [
                f"{first.operation} {first.direction}",
                f"{first.rows} x {first.cols}",
                first.dtype,
                f"{first.ideal * 1e6:.1f}",
                f"{first.target * 1e6:.1f}",
                *(cell(here.get(peer)) for peer in peers),
                verdict(here.values()),
            ]
        )
    return header, rows


def notes(results):
    return list(
        dict.fromkeys(
            f"{r.peer}, {r.operation} {r.direction}, {r.dtype}: {r.note}" for r in results if r.note
        )
    )


def write(results, facts, title, stem, out):
    """Print the table and write `out`/`stem`.csv and .md."""
    header, rows = wide_table(results)
    # Wide enough for a row a case even where the output is no terminal.
    console = Console() if sys.stdout.isatty() else Console(width=160)
    table = Table(title=title)
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index in (0, 2, len(header) - 1) else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for note in notes(results):
        console.print(note, markup=False, highlight=False)

    with (out / f"{stem}.csv").open("w", newline="") as stream:
        lines = csv.writer(stream)
        lines.writerow(
            [
                "operation",
                "direction",
                "rows",
                "cols",
                "dtype",
                "implementation",
                "microseconds",
                "ideal_us",
                "target_us",
                "fraction",
                "error_over_bound",
                "note",
            ]
        )
        for r in results:
            known = r.seconds is not None
            lines.writerow(
                [
                    *r.case,
                    r.peer,
                    f"{r.seconds * 1e6:.3f}" if known else "",
                    f"{r.ideal * 1e6:.3f}",
                    f"{r.target * 1e6:.3f}",
                    f"{r.fraction:.4f}" if known else "",
                    f"{r.error:.3g}" if r.error is not None else "",
                    r.note,
                ]
            )

    with (out / f"{stem}.md").open("w") as stream:
        print(f"# {title}\n", file=stream)
        for name, value in facts:
            print(f"- {name}: {value}", file=stream)
        print("\nGPU time in microseconds; in brackets, ideal over measured.\n", file=stream)
        for row in (header, ["---"] * len(header), *rows):
            print(f"| {' | '.join(row)} |", file=stream)
        for note in notes(results):
            print(f"\n{note}", file=stream)
    console.print(f"Written: {out / stem}.csv and {out / stem}.md", highlight=False)
