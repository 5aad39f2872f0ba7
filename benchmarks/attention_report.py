"""What `attention` measured: its file, its tables and its plots."""

import collections
import csv
import dataclasses
import io

OURS = "fused_norm"
DETERMINISTIC = (OURS, "flash-attn 4 deterministic")


@dataclasses.dataclass(frozen=True)
class Record:
    group: str
    cell: str
    head_dim: int
    length: int
    mask: str
    direction: str  # none where an implementation does not run the cell: `note` says why
    peer: str
    seconds: float
    tflops: float
    error: float  # over its bound
    peak_bytes: int  # of a forward and a backward pass, beside their inputs
    mhz: float
    watts: float
    note: str = ""


FIELDS = dataclasses.fields(Record)


def read_records(path):
    """(facts, records) of a file that `write` wrote, or None if it is none."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError):
        return None
    with io.StringIO(text, newline="") as stream:
        facts, line = [], stream.readline()
        while line.startswith("# "):
            name, _, value = line[2:].rstrip("\n").partition(": ")
            facts.append((name, value))
            line = stream.readline()
        if line.strip().split(",") != [field.name for field in FIELDS]:
            return None
        rows = csv.reader(stream)
        return facts, [
            Record(*(field.type(text) for field, text in zip(FIELDS, row, strict=True)))
            for row in rows
        ]


def by_cell(records):
    """{(group, cell, direction): {peer: record}} of what ran."""
    found = collections.defaultdict(dict)
    for r in records:
        if r.seconds:
            found[r.group, r.cell, r.direction][r.peer] = r
    return dict(found)


def lead(of_cell):
    """Our speed over the fastest other's, or None."""
    rivals = [r.seconds for r in of_cell.values() if r.peer != OURS and r.error <= 1]
    return min(rivals) / of_cell[OURS].seconds if rivals and OURS in of_cell else None


def text_of(record, plain):
    if record is None:
        return "-"
    if record.group == "host":
        return f"{record.seconds * 1e6:.1f} us"
    text = f"{record.tflops:.0f}"
    if record.group == "options" and plain:
        text += f" ({record.seconds / plain.seconds:.2f} x)"
    return text if record.error <= 1 else f"{text} WRONG ({record.error:.2g} x bound)"


def tables(records):
    """[(title, header, rows of strings)], a table a group and direction."""
    cells = by_cell(records)
    found = []
    for group, direction in dict.fromkeys((g, d) for g, _, d in cells):
        here = {cell: r for (g, cell, d), r in cells.items() if (g, d) == (group, direction)}
        peers = list(dict.fromkeys(peer for of_cell in here.values() for peer in of_cell))
        rows = []
        for cell, of_cell in here.items():
            plain = here.get(cell.partition(" full")[0] + " full", {})
            ratio = lead(of_cell)
            row = [cell, *(text_of(of_cell.get(p), plain.get(p)) for p in peers)]
            row.append("-" if ratio is None else f"{ratio:.2f}")
            if group != "host":
                megabytes = of_cell[OURS].peak_bytes / 2**20
                row += [
                    f"{megabytes:.0f}",
                    f"{of_cell[OURS].mhz:.0f}",
                    f"{of_cell[OURS].watts:.0f}",
                ]
            rows.append(row)
        header = ["D x length, mask", *peers, "ours / best other"]
        header += [] if group == "host" else ["peak MiB", "MHz", "W"]
        found.append((f"{group}, {direction}", header, rows))
    return found


def plot(records, path):
    """TFLOP/s over the length, a panel for each head dimension, mask and direction."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    here = [r for r in records if r.group == "lengths" and r.seconds]
    down = sorted({r.head_dim for r in here})
    across = list(dict.fromkeys((r.direction, r.mask) for r in here))
    if not down:
        return []
    figure = Figure(figsize=(3.6 * len(across), 2.6 * len(down)), layout="constrained")
    FigureCanvasAgg(figure)
    peers = list(dict.fromkeys(r.peer for r in here))
    for i, (dim, (direction, mask)) in enumerate((d, a) for d in down for a in across):
        axes = figure.add_subplot(len(down), len(across), i + 1)
        axes.set_title(f"D {dim}, {mask}, {direction}", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        for number, peer in enumerate(peers):
            points = sorted(
                (r.length, r.tflops)
                for r in here
                if (r.peer, r.head_dim, r.mask, r.direction) == (peer, dim, mask, direction)
            )
            width = 1.8 if peer == OURS else 1
            axes.plot(*zip(*points), ".-", color=f"C{number}", linewidth=width, label=peer)  # noqa: B905
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("TFLOP/s", fontsize=8)
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4,
        frameon=False,
    )  # fmt: skip
    figure.savefig(path, dpi=110)
    return [path]


def write(facts, records, out, stem="attention"):
    """The CSV file, the Markdown tables and the plot; prints how ours stands in each table."""
    with (out / f"{stem}.csv").open("w", newline="") as stream:
        stream.writelines(f"# {name}: {value}\n" for name, value in facts)
        lines = csv.writer(stream)
        lines.writerow([field.name for field in FIELDS])
        lines.writerows(dataclasses.astuple(r) for r in records)
    pictures = plot(records, out / f"{stem}.png")
    leads = collections.defaultdict(list)
    for (group, _, direction), of_cell in by_cell(records).items():
        ratio = lead(of_cell)
        if ratio is not None:
            leads[group, direction].append(ratio)
    sentences = [
        f"{group} {direction}: ahead of every other or within 2 % in "
        f"{sum(ratio >= 0.98 for ratio in ratios)} of {len(ratios)} cells; "
        f"{min(ratios):.2f} to {max(ratios):.2f} of the fastest."
        for (group, direction), ratios in leads.items()
    ]
    notes = dict.fromkeys((r.peer, r.note) for r in records if r.note)
    with (out / f"{stem}.md").open("w") as stream:
        print("# FlashAttention\n", file=stream)
        for name, value in facts:
            print(f"- {name}: {value}", file=stream)
        print(f"\n{LEGEND}", file=stream)
        for sentence in sentences:
            print(f"\n{sentence}", file=stream)
        for title, header, rows in tables(records):
            print(f"\n## {title[0].upper()}{title[1:]}\n", file=stream)
            for row in (header, ["---"] * len(header), *rows):
                print(f"| {' | '.join(row)} |", file=stream)
        for peer, note in notes:
            print(f"\n{peer}: {note}", file=stream)
        for picture in pictures:
            print(f"\n![{picture.stem}]({picture.name})", file=stream)
    print("\n".join(sentences))
    print(f"Written: {out / stem}.csv, .md" + (" and .png" if pictures else ""))


LEGEND = (
    "TFLOP/s of the pairs that the mask shows; of options also the time over that of the same\n"
    "implementation without. bf16, 16384 tokens, heads x D of 2048. Peak: of our forward and\n"
    "backward pass, beside their inputs. Our backward pass is deterministic; of the others only\n"
    "those that say so. The method: docs/benchmarks.md."
)
