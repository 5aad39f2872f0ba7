"""What `attention` measured: its file, its tables and its plot."""

import dataclasses
import itertools

from benchmarks import plots, report, result_files
from benchmarks.results import AHEAD, OURS


@dataclasses.dataclass(frozen=True)
class Record:
    group: str
    cell: str
    head_dim: int
    length: int
    mask: str
    direction: str  # none where an implementation does not run the cell: `note` says why
    peer: str
    seconds: float = 0
    tflops: float = 0
    error: float = 0  # over its bound
    peak_bytes: int = 0  # of a forward and a backward pass, beside their inputs
    mhz: float = 0
    watts: float = 0
    note: str = ""


def by_cell(records):
    """{(group, direction): {cell: {peer: record}}} of what ran."""
    found = {}
    for r in records:
        if r.seconds:
            found.setdefault((r.group, r.direction), {}).setdefault(r.cell, {})[r.peer] = r
    return found


def lead(of_cell):
    """Our speed over the fastest other's, or None."""
    rivals = [r.seconds for r in of_cell.values() if r.peer != OURS and r.error <= 1]
    return min(rivals) / of_cell[OURS].seconds if rivals and OURS in of_cell else None


def text_of(r, plain):
    if r is None:
        return "-"
    text = f"{r.seconds * 1e6:.1f} us" if r.group == "host" else f"{r.tflops:.0f}"
    if r.group == "options" and plain:
        text += f" ({r.seconds / plain.seconds:.2f} x)"
    return text if r.error <= 1 else f"{text} WRONG ({r.error:.2g} x bound)"


def table(cells):
    """(header, rows of strings) of one group and direction."""
    peers = list(dict.fromkeys(itertools.chain(*cells.values())))
    rows = []
    for cell, of_cell in cells.items():
        plain, ratio = cells.get(cell.partition(" full")[0] + " full", {}), lead(of_cell)
        own = of_cell[OURS]
        state = (own.peak_bytes / 2**20, own.mhz, own.watts)
        more = [f"{v:.0f}" if v else "-" for v in state]
        texts = [text_of(of_cell.get(p), plain.get(p)) for p in peers]
        rows.append([cell, *texts, f"{ratio:.2f}" if ratio else "-", *more])
    return ["D x length, mask", *peers, "ours / best other", "peak MiB", "MHz", "W"], rows


def sentences(tables):
    for (group, direction), cells in tables.items():
        ratios = [ratio for ratio in map(lead, cells.values()) if ratio is not None]
        if ratios:
            yield (
                f"{group} {direction}: ahead of every other or within 2 % in "
                f"{sum(ratio * AHEAD >= 1 for ratio in ratios)} of {len(ratios)} cells; "
                f"{min(ratios):.2f} to {max(ratios):.2f} of the fastest."
            )


def plot(records, path):
    """TFLOP/s over the length, a panel for each head dimension, mask and direction."""
    lengths = [r for r in records if r.group == "lengths" and r.seconds]
    if not lengths:
        return []
    figure, panels = plots.panels(
        lengths, 3.6, 2.6, 4, lambda r: f"D {r.head_dim}, {r.mask}, {r.direction}"
    )
    for axes, here in panels:
        for number, peer in enumerate(dict.fromkeys(r.peer for r in lengths)):
            points = [(r.length, r.tflops) for r in here if r.peer == peer]
            plots.curve(axes, points, peer, f"C{number}")
        axes.set_ylim(bottom=0)
        axes.set_ylabel("TFLOP/s")
    plots.legend(figure, axes)
    figure.savefig(path, dpi=110)
    return [path]


def write(facts, records, out, stem="attention"):
    """The CSV file, the Markdown tables and the plot; prints how ours stands in each table."""
    result_files.write_csv(out / f"{stem}.csv", facts, Record, records)
    tables = by_cell(records)
    verdicts = list(sentences(tables))
    parts = [LEGEND, *verdicts]
    for (group, direction), cells in tables.items():
        parts += [f"## {group[0].upper()}{group[1:]}, {direction}", table(cells)]
    parts += dict.fromkeys(f"{r.peer}: {r.note}" for r in records if r.note)
    report.publish(out / stem, "FlashAttention", facts, parts, plot(records, out / f"{stem}.png"))
    print(*verdicts, sep="\n")


LEGEND = (
    "TFLOP/s of the pairs that the mask shows; of options also the time over that of the same\n"
    "implementation without. bf16, 16384 tokens, heads x D of 2048 (1920 at D 96 and 192); models\n"
    "have their own shapes: sequences x heads x queries. Peak: of our forward and backward pass,\n"
    "beside their inputs. Our backward pass is deterministic; of the others those that say so.\n"
    "The method: docs/benchmarks.md."
)
