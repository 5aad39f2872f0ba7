"""What `attention` measured: its file, its tables and its plots."""

import collections
import dataclasses

from benchmarks import result_files

OURS = "fused_norm"


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


def by_cell(records):
    """{(group, direction): {cell: {peer: record}}} of what ran."""
    found = {}
    for r in records:
        if r.seconds:
            cells = found.setdefault((r.group, r.direction), {})
            cells.setdefault(r.cell, {})[r.peer] = r
    return found


def lead(of_cell):
    """Our speed over the fastest other's, or None."""
    rivals = [r.seconds for r in of_cell.values() if r.peer != OURS and r.error <= 1]
    return min(rivals) / of_cell[OURS].seconds if rivals and OURS in of_cell else None


def text_of(record, plain):
    if record is None:
        return "-"
    if record.group == "host":
        text = f"{record.seconds * 1e6:.1f} us"
    else:
        text = f"{record.tflops:.0f}"
    if record.group == "options" and plain:
        text += f" ({record.seconds / plain.seconds:.2f} x)"
    return text if record.error <= 1 else f"{text} WRONG ({record.error:.2g} x bound)"


def table(group, cells):
    """(header, rows of strings) of one group and direction."""
    peers = list(dict.fromkeys(peer for of_cell in cells.values() for peer in of_cell))
    rows = []
    for cell, of_cell in cells.items():
        plain = cells.get(cell.partition(" full")[0] + " full", {})
        ratio = lead(of_cell)
        row = [cell, *(text_of(of_cell.get(p), plain.get(p)) for p in peers)]
        row.append("-" if ratio is None else f"{ratio:.2f}")
        if group != "host":
            own = of_cell[OURS]
            row += [f"{v:.0f}" for v in (own.peak_bytes / 2**20, own.mhz, own.watts)]
        rows.append(row)
    header = ["D x length, mask", *peers, "ours / best other"]
    return header + ([] if group == "host" else ["peak MiB", "MHz", "W"]), rows


def sentences(records):
    for (group, direction), cells in by_cell(records).items():
        ratios = [ratio for ratio in map(lead, cells.values()) if ratio is not None]
        if ratios:
            yield (
                f"{group} {direction}: ahead of every other or within 2 % in "
                f"{sum(ratio >= 0.98 for ratio in ratios)} of {len(ratios)} cells; "
                f"{min(ratios):.2f} to {max(ratios):.2f} of the fastest."
            )


def plot(records, path):
    """TFLOP/s over the length, a panel for each head dimension, mask and direction."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = collections.defaultdict(lambda: collections.defaultdict(list))
    for r in sorted(records, key=lambda r: (r.head_dim, r.length)):
        if r.group == "lengths" and r.seconds:
            panels[r.head_dim, r.mask, r.direction][r.peer].append((r.length, r.tflops))
    if not panels:
        return []
    down = len({dim for dim, *_ in panels})
    across = -(-len(panels) // down)
    peers = list(dict.fromkeys(r.peer for r in records))
    figure = Figure(figsize=(3.6 * across, 2.6 * down), layout="constrained")
    FigureCanvasAgg(figure)
    for number, ((dim, mask, direction), lines) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(down, across, number)
        axes.set_title(f"D {dim}, {mask}, {direction}", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        for peer, points in lines.items():
            width, color = 1.8 if peer == OURS else 1, f"C{peers.index(peer)}"
            axes.plot(*zip(*points, strict=True), ".-", color=color, linewidth=width, label=peer)
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("TFLOP/s", fontsize=8)
    legend = figure.axes[0].get_legend_handles_labels()
    figure.legend(*legend, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=110)
    return [path]


def write(facts, records, out, stem="attention"):
    """The CSV file, the Markdown tables and the plot; prints how ours stands in each table."""
    result_files.write_csv(out / f"{stem}.csv", facts, Record, records)
    parts = [LEGEND, *sentences(records)]
    print(*parts[1:], sep="\n")
    for (group, direction), cells in by_cell(records).items():
        parts += [f"## {group[0].upper()}{group[1:]}, {direction}", table(group, cells)]
    parts += dict.fromkeys(f"{r.peer}: {r.note}" for r in records if r.note)
    pictures = plot(records, out / f"{stem}.png")
    parts += [f"![{picture.stem}]({picture.name})" for picture in pictures]
    result_files.write_markdown(out / f"{stem}.md", "FlashAttention", facts, parts)
    print(f"Written: {out / stem}.csv, .md" + (" and .png" if pictures else ""))


LEGEND = (
    "TFLOP/s of the pairs that the mask shows; of options also the time over that of the same\n"
    "implementation without. bf16, 16384 tokens, heads x D of 2048. Peak: of our forward and\n"
    "backward pass, beside their inputs. Our backward pass is deterministic; of the others only\n"
    "those that say so. The method: docs/benchmarks.md."
)
