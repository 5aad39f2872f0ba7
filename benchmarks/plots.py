"""Plots of results. matplotlib is imported when a plot is drawn."""

import math

from benchmarks import results, studies
from benchmarks.peers import ranked


def draw(stem, measured, out):
    """Write the plots that these results allow; returns their paths."""
    paths = []
    draw_study = {
        "shapes": shapes,
        "random": shapes,
        "columns": columns,
        "rows": rows,
        "host": host,
    }
    for study, plot in draw_study.items():
        here = [r for r in measured if r.study == study and r.seconds is not None]
        if here:
            name = stem if study in ("shapes", "host") else f"{stem}-{study}"
            paths.append(out / f"{name}.png")
            figure = plot(here)
            figure.savefig(paths[-1], dpi=130)
    return paths


def panels(measured, width, height, across=None, title=lambda r: f"{r.operation} {r.direction}"):
    """A figure with a panel for all results of one title: (figure, [(axes, its results)])."""
    # Without pyplot: no display, no state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(map(title, measured)))
    across = across or (2 if len(kinds) > 1 else 1)
    down = math.ceil(len(kinds) / across)
    figure = Figure(figsize=(width * across, height * down), layout="constrained")
    FigureCanvasAgg(figure)
    pairs = []
    for index, kind in enumerate(kinds):
        axes = figure.add_subplot(down, across, index + 1)
        axes.set_title(kind)
        axes.spines[["top", "right"]].set_visible(False)
        pairs.append((axes, [r for r in measured if title(r) == kind]))
    return figure, pairs


def colours(measured):
    """{peer: colour}, ours first; a peer has its colour in every plot."""
    return {peer: f"C{rank % 10}" for rank, peer in ranked(r.peer for r in measured)}


def legend(figure, axes):
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)


def terabytes(result):
    return result.bytes / result.seconds / 1e12


def coordinates(points, dimensions=2):
    return list(zip(*points, strict=True)) or [[]] * dimensions


def curve(axes, points, peer, colour):
    """A peer's line through the points over the logarithm of x."""
    mine = peer == results.OURS
    style = {"markersize": 5, "linewidth": 1.6, "zorder": 3} if mine else {"markersize": 3}
    style = {"linewidth": 0.9, "zorder": 2, "color": colour, "label": peer} | style
    axes.plot(*coordinates(sorted(points)), marker=".", **style)
    axes.set_xscale("log", base=2)


def ceiling(axes, measured):
    """The copy bandwidth of the run."""
    copy = max(r.bytes / r.ideal for r in measured) / 1e12
    axes.axhline(copy, color="black", linestyle="--", linewidth=1, label="copy")
    axes.set_ylim(0, copy * 1.08)
    axes.set_ylabel("TB/s")


def shapes(measured):
    """Bandwidth at each shape, a bar a peer; wrong results are crossed out."""
    colour = colours(measured)
    figure, pairs = panels(measured, 11, 3.4, across=1)
    for axes, here in pairs:
        cases = results.by_case(here)
        ceiling(axes, here)
        width = 0.85 / len(colour)
        for index, peer in enumerate(colour):
            bars = [(i, r) for i, of_case in enumerate(cases.values()) for r in of_case]
            offset = (index - (len(colour) - 1) / 2) * width
            bars = [(i + offset, terabytes(r), r.correct) for i, r in bars if r.peer == peer]
            x, heights, _ = coordinates(bars, 3)
            axes.bar(x, heights, width, color=colour[peer], label=peer)
            wrong = [(x, height) for x, height, correct in bars if not correct]
            axes.plot(*coordinates(wrong), "x", color="black", markersize=5)
        for i, of_case in enumerate(cases.values()):
            target = of_case[0].bytes / of_case[0].target / 1e12
            label = "target" if i == 0 else None
            axes.hlines(target, i - 0.45, i + 0.45, color="grey", linewidth=1.2, label=label)
        names = [f"{rows}\nx {cols}\n{dtype}" for *_, rows, cols, dtype in cases]
        axes.set_xlim(-0.6, len(names) - 0.4)
        axes.set_xticks(range(len(names)), names, fontsize=7 if len(names) < 16 else 5)
    legend(figure, pairs[0][0])
    return figure


def columns(measured):
    """Bandwidth against N, a line a peer through its aligned N, points at the others; wrong results
    are crossed out."""
    colour = colours(measured)
    figure, pairs = panels(measured, 7, 3.6)
    for axes, here in pairs:
        ceiling(axes, here)
        for peer, shade in colour.items():
            of_peer = [r for r in here if r.peer == peer]
            points = [(r.cols, terabytes(r)) for r in of_peer if studies.aligned(r)]
            odd = [(r.cols, terabytes(r)) for r in of_peer if not studies.aligned(r)]
            wrong = [(r.cols, terabytes(r)) for r in of_peer if not r.correct]
            curve(axes, points, peer, shade)
            label = f"{peer}, odd N" if odd else None
            axes.plot(*coordinates(odd), "^", color=shade, fillstyle="none", ms=4, label=label)
            axes.plot(*coordinates(wrong), "x", color=shade, markersize=8)
        axes.set_xlabel("N")
    legend(figure, pairs[0][0])
    return figure


def rows(measured):
    """Time against M at each N, with the line through it."""
    figure, pairs = panels([r for r in measured if r.peer == results.OURS], 5.5, 3.2)
    for axes, here in pairs:
        for index, cols in enumerate(sorted({r.cols for r in here})):
            points = sorted((r.rows, r.seconds * 1e6) for r in here if r.cols == cols)
            axes.plot(*zip(*points, strict=True), "o", color=f"C{index}", markersize=4)
            fit = studies.line(points)
            if fit:
                line = [fit[0] + fit[1] * m for m, _ in points]
                axes.plot([m for m, _ in points], line, color=f"C{index}", label=f"N = {cols}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("M")
        axes.set_ylabel("us")
        axes.legend(frameon=False)
    return figure


def host(measured):
    """Microseconds of the host, a bar a peer."""
    colour = colours(measured)
    figure, pairs = panels(measured, 3.6, 2.4, across=4)
    for axes, here in pairs:
        bars = sorted(here, key=lambda r: list(colour).index(r.peer))
        names = [r.peer for r in bars]
        axes.barh(names, [r.seconds * 1e6 for r in bars], color=[colour[n] for n in names])
        own = results.own(here)
        if own is not None:
            axes.axvline(own.target * 1e6, color="grey", linewidth=1.2, label="target")
        axes.invert_yaxis()
        axes.set_xlabel("us")
    legend(figure, pairs[0][0])
    return figure
