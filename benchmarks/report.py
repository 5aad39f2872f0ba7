"""A suite's results as tables on the terminal, CSV, Markdown and plots."""

import sys

from rich.console import Console
from rich.table import Table

from benchmarks import plots, result_files, results, studies
from benchmarks.peers import ranked

TITLES = {
    "norm": "LayerNorm and RMSNorm",
    "norm-apart": "LayerNorm and RMSNorm, each call after another kernel",
    "softmax": "softmax and log_softmax",
    "softmax-apart": "softmax and log_softmax, each call after another kernel",
    "sweep": "Sweeps over sizes",
    "overhead": "Host time of a call",
}


def cell(result):
    """ "time (fraction)", or why there is none."""
    if result is None or result.seconds is None:
        return "-"
    time = f"{result.seconds * 1e6:.1f}"
    if result.ideal:
        time += f" ({result.fraction:.2f})"
    return time if result.correct else f"{time} WRONG ({result.error:.2g} x bound)"


def wide_table(measured):
    """(header, rows of strings): a row a case, a column a peer."""
    peers = [peer for _, peer in ranked(r.peer for r in measured)]
    header = ["operation", "M x N", "dtype", "ideal us", "target us", *peers, "target"]
    rows = []
    for of_case in results.by_case(measured).values():
        here = {r.peer: r for r in of_case}
        first = of_case[0]
        rows.append(
            [
                f"{first.operation} {first.direction}",
                f"{first.rows} x {first.cols}",
                first.dtype,
                f"{first.ideal * 1e6:.1f}" if first.ideal else "-",
                f"{first.target * 1e6:.1f}",
                *(cell(here.get(peer)) for peer in peers),
                results.verdict(of_case),
            ]
        )
    return header, rows


def notes(measured):
    """Why a peer has no time, once for all the cases of an operation and dtype."""
    cases = {}
    for r in measured:
        if r.note:
            key = (r.peer, f"{r.operation} {r.direction}", r.dtype, r.note)
            cases.setdefault(key, []).append(r.cols)
    return [
        f"{peer}, {operation}, {dtype}, N = {listed(cols)}: {note}"
        for (peer, operation, dtype, note), cols in cases.items()
    ]


def listed(numbers, most=8):
    """A few of the distinct numbers."""
    distinct = sorted(set(numbers))
    text = ", ".join(str(number) for number in distinct[:most])
    return text + (f" and {len(distinct) - most} more" if len(distinct) > most else "")


def sections(measured):
    """[(title, (header, rows))] of each study."""
    tables = []
    for study in dict.fromkeys(r.study for r in measured):
        here = [r for r in measured if r.study == study]
        if study == "columns":
            tables.append(("No cliffs over N", studies.cliff_table(here)))
        elif study == "rows":
            tables.append(("Growth in M: t = a + b M", studies.growth_table(here)))
        else:
            names = {"random": "Random shapes", "host": "Microseconds of the host"}
            tables.append((names.get(study, "Shapes"), wide_table(here)))
    return tables


def write(suite, measured, facts, out, suffix=""):
    """Print the tables and write `out`/`suite``suffix`.csv, .md and the plots."""
    title, stem = TITLES.get(suite, suite), f"{suite}{suffix}"
    results.write(out / f"{stem}.csv", facts, measured)
    tables, sentences, remarks = sections(measured), results.summary(measured), notes(measured)
    pictures = plots.draw(stem, measured, out)

    absent = [f"absent: {value}" for name, value in facts if name == "absent"]
    print(*remarks, *absent, *sentences, sep="\n")
    parts = [LEGEND, *(sentence.strip() for sentence in sentences)]
    for heading, table in tables:
        parts += [f"## {heading}", table]
    publish(out / stem, title, facts, [*parts, *remarks], pictures)


def publish(path, title, facts, parts, pictures=()):
    """Print the tables among `parts`, texts and (header, rows of strings), and write all of them to
    `path`.md below the facts, the pictures last. `path`.csv and the pictures are there already."""
    # Wide enough for a row a case even where the output is no terminal.
    console, heading = Console(**{} if sys.stdout.isatty() else {"width": 200}), title
    for part in parts:
        if not isinstance(part, str):
            console.print(rich_table(heading, *part))
        elif part.startswith("## "):
            heading = f"{title}: {part[3:]}"
    parts = [*parts, *(f"![{picture.stem}]({picture.name})" for picture in pictures)]
    result_files.write_markdown(path.with_name(f"{path.name}.md"), title, facts, parts)
    print("Written:", ", ".join(map(str, (f"{path}.csv", f"{path}.md", *pictures))))


def rich_table(title, header, rows):
    """Of strings; columns of numbers are justified to the right."""
    table = Table(title=title)
    for index, name in enumerate(header):
        numbers = all(row[index][:1] in "+-.0123456789" for row in rows)
        table.add_column(name, justify="right" if numbers else "left")
    for row in rows:
        table.add_row(*row)
    return table


LEGEND = (
    "Microseconds; in brackets, ideal over measured. Target: whether fused_norm meets it, and the\n"
    "fastest peer where that is ahead by more than 2 %. The method: docs/benchmarks.md."
)
