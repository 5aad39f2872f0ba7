"""What the sweeps ask: are there cliffs over N, and does time grow evenly with M?"""

import collections

from benchmarks.results import OURS

ALIGNED_FLOOR, ODD_FLOOR = 0.85, 0.80
GROWTH_TOLERANCE = 0.05
ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


def series(measured, peer=OURS):
    """{(operation, direction, dtype): that peer's results}"""
    found = collections.defaultdict(list)
    for r in measured:
        if r.peer == peer and r.seconds is not None:
            found[(r.operation, r.direction, r.dtype)].append(r)
    return dict(found)


def power_neighbours(cols):
    """The nearest powers of two below and above, neither of them `cols` itself."""
    below = 1 << (cols.bit_length() - 1)
    if below == cols:
        return below // 2, below * 2
    return below, below * 2


def aligned(result):
    """Whether rows are a multiple of 16 bytes long."""
    return result.cols * ITEM_BYTES[result.dtype] % 16 == 0


def cliffs(of_series):
    """[(cols, fraction over the better power-of-two neighbour's, least allowed)] by cols.

    Rows whose length is a multiple of 16 bytes are aligned and must keep 0.85 of it, others 0.80.
    """
    fractions = {r.cols: r.fraction for r in of_series}
    found = []
    for r in sorted(of_series, key=lambda r: r.cols):
        known = [fractions[n] for n in power_neighbours(r.cols) if n in fractions]
        if known:
            floor = ALIGNED_FLOOR if aligned(r) else ODD_FLOOR
            found.append((r.cols, r.fraction / max(known), floor))
    return found


def cliff_table(measured):
    header = ["operation", "dtype", "N", "worst aligned", "worst odd", "below the rule", "verdict"]
    rows = []
    for (operation, direction, dtype), of_series in series(measured).items():
        found = cliffs(of_series)
        kinds = [[c for c in found if c[2] == floor] for floor in (ALIGNED_FLOOR, ODD_FLOOR)]
        worst = [min(kind, key=lambda c: c[1], default=None) for kind in kinds]
        below = [f"{cols}: {ratio:.2f}" for cols, ratio, floor in found if ratio < floor]
        rows.append(
            [
                f"{operation} {direction}",
                dtype,
                str(len(found)),
                *("-" if w is None else f"{w[1]:.2f} at {w[0]}" for w in worst),
                ", ".join(below) or "none",
                "-" if not found else "cliff" if below else "no cliff",
            ]
        )
    return header, rows


def line(points):
    """(a, b, worst deviation) of the line a + b m through [(m, t)] with the least sum of squared
    relative deviations; None for fewer than three points."""
    if len({m for m, _ in points}) < 3:
        return None
    # Weights 1 / t^2 turn absolute into relative deviations.
    sums = [sum(m**power / t**2 for m, t in points) for power in range(3)]
    t0, t1 = (sum(m**power / t for m, t in points) for power in range(2))
    determinant = sums[0] * sums[2] - sums[1] ** 2
    a = (sums[2] * t0 - sums[1] * t1) / determinant
    b = (sums[0] * t1 - sums[1] * t0) / determinant
    return a, b, max(abs((a + b * m) / t - 1) for m, t in points)


def growth_table(measured):
    header = ["operation", "dtype", "N", "M", "a us", "b ns", "worst deviation", "verdict"]
    rows = []
    for (operation, direction, dtype), of_series in series(measured).items():
        for cols in sorted({r.cols for r in of_series}):
            points = sorted((r.rows, r.seconds) for r in of_series if r.cols == cols)
            fit = line(points)
            head = [f"{operation} {direction}", dtype, str(cols)]
            head.append(f"{len(points)}: {points[0][0]} to {points[-1][0]}")
            if fit is None:
                rows.append([*head, "-", "-", "-", "-"])
                continue
            a, b, worst = fit
            verdict = "even" if worst <= GROWTH_TOLERANCE else "uneven"
            rows.append([*head, f"{a * 1e6:.2f}", f"{b * 1e9:.3f}", f"{worst:.1%}", verdict])
    return header, rows
