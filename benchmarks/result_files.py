"""The files of results: CSV below lines ``# name: value``, the facts of the run, and Markdown."""

import csv
import dataclasses


def write_csv(path, facts, cls, records):
    """A line for each record of the dataclass `cls`."""

    def text(value):
        return f"{value:.9g}" if isinstance(value, float) else value

    header = [field.name for field in dataclasses.fields(cls)]
    write_lines(path, facts, header, (map(text, dataclasses.astuple(r)) for r in records))


def write_lines(path, facts, header, rows):
    with path.open("w", newline="") as stream:
        stream.writelines(f"# {name}: {value}\n" for name, value in facts)
        csv.writer(stream).writerows([header, *rows])


def split(lines):
    """(facts, the lines below them)"""
    facts = []
    for number, line in enumerate(lines):
        if not line.startswith("# "):
            return facts, lines[number:]
        name, _, value = line[2:].partition(": ")
        facts.append((name, value))
    return facts, []


def read_csv(path, cls):
    """(facts, records of the dataclass `cls`) of a file that `write_csv` wrote; None if it is none
    of these, ValueError in one sentence if a line is broken."""
    try:
        facts, lines = split(path.read_text().splitlines())
    except (OSError, UnicodeDecodeError):
        return None
    header, *rows = csv.reader(lines) if lines else [[]]
    types = {field.name: field.type for field in dataclasses.fields(cls)}
    if header != list(types):
        return None
    try:
        return facts, [
            cls(*(t(text) for t, text in zip(types.values(), row, strict=True))) for row in rows
        ]
    except ValueError as error:
        raise ValueError(f"{path} has a broken line: {error}.") from None


def write_markdown(path, title, facts, parts):
    """`parts`: texts, and tables as (header, rows of strings)."""
    blocks = [f"# {title}", "\n".join(f"- {name}: {value}" for name, value in facts)]
    for part in parts:
        if not isinstance(part, str):
            header, rows = part
            part = "\n".join(f"| {' | '.join(r)} |" for r in (header, ["---"] * len(header), *rows))
        blocks.append(part)
    path.write_text("\n\n".join(blocks) + "\n")
