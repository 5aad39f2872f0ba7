"""Whether two runs agree: the CSV files of the first and of the second, each case within 2 %.

The exit code is 1 where one of this library's cases does not.
"""

import collections
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import results

needs_gpu = False
writes = False

TOLERANCE = 0.02


def add_arguments(parser):
    parser.add_argument("first", type=Path, metavar="A.csv")
    parser.add_argument("second", type=Path, metavar="B.csv")


def pairs(first, second):
    """[(result of the first run, of the second)] of each case and implementation in both."""
    known = {(r.case, r.peer): r for r in second if r.seconds is not None}
    return [
        (r, known[r.case, r.peer])
        for r in first
        if r.seconds is not None and (r.case, r.peer) in known
    ]


def change(a, b):
    return b.seconds / a.seconds - 1


def run(options):
    _, first = results.read(options.first)
    _, second = results.read(options.second)
    both = pairs(first, second)
    if not both:
        raise ValueError(f"{options.first} and {options.second} have no case in common.")
    apart = [(a, b) for a, b in both if abs(change(a, b)) > TOLERANCE]
    counts = collections.Counter(a.peer for a, _ in both)
    far = collections.Counter(a.peer for a, _ in apart)
    console = Console(soft_wrap=True)
    table = Table(title="Two runs")
    for name in ("implementation", "cases in both", "within 2 %", "largest change"):
        table.add_column(name, justify="left" if name == "implementation" else "right")
    for peer, total in counts.items():
        largest = max((change(a, b) for a, b in both if a.peer == peer), key=abs)
        table.add_row(peer, str(total), str(total - far[peer]), f"{largest:+.1%}")
    console.print(table)
    for a, b in apart:
        times = f"{a.seconds * 1e6:.2f} us, then {b.seconds * 1e6:.2f} us ({change(a, b):+.1%})"
        console.print(f"{results.name(a.case)}, {a.peer}: {times}", highlight=False)
    ours = results.by_case(first), results.by_case(second)
    for case in ours[0]:
        verdicts = [results.verdict(by.get(case, [])) for by in ours]
        if "-" not in verdicts and verdicts[0] != verdicts[1]:
            console.print(
                f"{results.name(case)}: {verdicts[0]}, then {verdicts[1]}", highlight=False
            )
    return 1 if any(a.ours for a, _ in apart) else 0
