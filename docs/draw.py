"""Draws the README's two pictures and writes its headlines, its table of times and
where others are ahead: `python docs/draw.py`.

memory_efficient.svg shows what a norm and the linear layer behind it keep; the rest is made of
benchmarks/results. Needs no package.
"""

import csv
import itertools
import textwrap
from pathlib import Path

DOCS = Path(__file__).resolve().parent
README = DOCS.parent / "README.md"
RESULTS = DOCS.parent / "benchmarks" / "results"
OURS = "fused_norm"
AHEAD = 1.02  # a library is ahead when it is faster by more than this
PEERS = {  # name in the results: (name in the picture, colour)
    "torch": ("torch eager", "#d55e00"),
    "torch.compile": ("torch.compile", "#e69f00"),
    "liger": ("Liger", "#009e73"),
    "quack": ("QuACK", "#0072b2"),
    "cudnn": ("cuDNN", "#cc79a7"),
}
NORM_SHAPES = ((131072, 128), (8192, 768), (16384, 2048), (8192, 5120), (8192, 12288))
CHART = [
    *(("LayerNorm", *shape) for shape in NORM_SHAPES),
    *(("RMSNorm", *shape) for shape in NORM_SHAPES),
    *(("softmax", *shape) for shape in ((16384, 1024), (8192, 8192), (2048, 151936))),
]
TABLE = [
    ("LayerNorm", 8192, 768),
    ("LayerNorm", 16384, 2048),
    ("RMSNorm", 16384, 2048),
    ("RMSNorm", 8192, 5120),
    ("softmax", 8192, 8192),
]
MARK = "<!-- written by docs/draw.py -->"
GREY, INK = "#d0d7de", "#1f2328"


def gpu_of(suite):
    """The GPU that a suite's results are of, without its maker."""
    with (RESULTS / f"{suite}.csv").open() as stream:
        facts = dict(line[2:].split(": ", 1) for line in stream if line.startswith("# "))
    return facts["GPU"].split(",")[0].split()[1]


def rows_of(suite):
    """The lines of a suite's results, as {column: text}."""
    with (RESULTS / f"{suite}.csv").open(newline="") as stream:
        yield from csv.DictReader(line for line in stream if not line.startswith("# "))


def times():
    """{(operation, rows, columns): {implementation: microseconds}} of forward and backward in bf16,
    of those that have both and compute both right."""
    parts = {}
    for suite in ("norm", "softmax"):
        for row in rows_of(suite):
            if row["dtype"] != "bf16" or not row["microseconds"]:
                continue
            if float(row["error_over_bound"]) <= 1:
                case = (row["operation"], int(row["rows"]), int(row["cols"]))
                of_case = parts.setdefault(case, {}).setdefault(row["implementation"], {})
                of_case[row["direction"]] = float(row["microseconds"])
    return {
        case: {name: sum(d.values()) for name, d in found.items() if len(d) == 2}
        for case, found in parts.items()
    }


def text(x, y, words, anchor="start", size=13, colour=INK, weight="normal"):
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="{colour}" '
        f'font-weight="{weight}">{words}</text>'
    )


def line(x1, y1, x2, y2, colour=GREY, more=""):
    return f'<path d="M{x1:g} {y1:g} L{x2:g} {y2:g}" stroke="{colour}" fill="none"{more}/>'


def box(x, y, width, height, fill, stroke=INK, more=""):
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" fill="{fill}" '
        f'stroke="{stroke}"{more}/>'
    )


def page(width, height, label, parts):
    """On a white card, so that it is the same on a dark page."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{label}" '
        'font-family="system-ui, sans-serif">'
    )
    return "\n".join(
        [head, box(0.5, 0.5, width - 1, height - 1, "#ffffff", GREY), *parts, "</svg>\n"]
    )


def speed_chart(found):
    left, right, top, row = 190, 700, 84, 24
    most = 8.0
    bottom = top + row * len(CHART)

    def across(ratio):
        return left + (right - left) * (min(ratio, most) - 1) / (most - 1)

    title = f"Time beside fused_norm, forward and backward, bf16, one {gpu_of('norm')}"
    parts = [text(20, 28, title, size=15)]
    x = 20
    for name, colour in PEERS.values():
        parts += [f'<circle cx="{x + 5}" cy="50" r="5" fill="{colour}"/>', text(x + 15, 54.5, name)]
        x += 110
    for tick in range(1, 9):
        words = "1 = fused_norm" if tick == 1 else f"{tick}x"
        parts.append(line(across(tick), top - 6, across(tick), bottom, INK if tick == 1 else GREY))
        parts.append(text(across(tick), bottom + 18, words, "middle", 12))
    for index, case in enumerate(CHART):
        y = top + row * (index + 0.5)
        operation, rows, cols = case
        if index and CHART[index - 1][0] != operation:
            parts.append(line(20, y - row / 2, right, y - row / 2))
        parts.append(text(left - 12, y + 4.5, f"{operation} {rows} x {cols}", "end", 12))
        ratios = {
            name: found[case][name] / found[case][OURS] for name in PEERS if name in found[case]
        }
        for name, ratio in sorted(ratios.items(), key=lambda pair: -pair[1]):
            dot = f'<circle cx="{across(ratio):.1f}" cy="{y:g}" r="5" fill="{PEERS[name][1]}"/>'
            parts.append(dot)
            if ratio > most:
                parts.append(text(right + 10, y + 4.5, f"{ratio:.0f}x", size=12))
    label = "Time of each library over that of fused_norm at thirteen shapes"
    return page(750, bottom + 34, label, parts)


def idea():
    blue, pale = "#9ecae9", "#ffffff"
    parts = [
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>'
    ]
    arrow = ' marker-end="url(#tip)"'
    panels = (
        (20, "memory_efficient=False", True, "the norm keeps x, the linear layer keeps y"),
        (400, "memory_efficient=True", False, "y serves both: x is freed"),
    )
    for left, title, keeps_x, words in panels:
        parts.append(text(left + 170, 30, title, "middle", 15, weight="bold"))
        places = {
            "x": left,
            "norm": left + 70,
            "y": left + 150,
            "linear": left + 220,
            "z": left + 310,
        }
        for name, x in places.items():
            if name in ("norm", "linear"):
                parts += [box(x, 60, 60, 40, "#f0f0f0"), text(x + 30, 85, name, "middle", 14)]
                continue
            kept = name == "y" or (name == "x" and keeps_x)
            dashed = "" if kept else ' stroke-dasharray="3 3"'
            parts += [
                box(x, 60, 40, 40, blue if kept else pale, more=dashed),
                text(x + 20, 85, name, "middle", 14),
            ]
        order = list(places.items())
        for (name, x), (_, after) in itertools.pairwise(order):
            width = 60 if name in ("norm", "linear") else 40
            parts.append(line(x + width + 2, 80, after - 2, 80, INK, arrow))
        # What each layer's backward pass reads, from below.
        source = places["x"] if keeps_x else places["y"]
        for layer, tensor in (("norm", source), ("linear", places["y"])):
            middle, from_x = places[layer] + 30, tensor + 20
            shift = 6 if layer == "linear" else -6
            start = from_x + (shift if not keeps_x else 0)
            curve = f"M{start} 102 C{start} 140, {middle} 140, {middle} 104"
            parts.append(f'<path d="{curve}" stroke="{INK}" fill="none"{arrow}/>')
        parts.append(text(left + 170, 160, words, "middle", 13))
    parts += [
        box(190, 180, 16, 16, blue),
        text(214, 193, "kept until the backward pass, whose reads are the curved arrows", size=12),
    ]
    label = "What a norm and the linear layer behind it keep, with the flag off and on"
    return page(770, 212, label, parts)


def table(found):
    names = {OURS: OURS, **{name: words for name, (words, _) in PEERS.items()}}
    first = f"forward + backward, microseconds on one {gpu_of('norm')}"
    lines = [f"| {first} | {' | '.join(names.values())} |"]
    lines.append("|---" * (len(names) + 1) + "|")
    for case in TABLE:
        operation, rows, cols = case
        cells = (f"{found[case][n]:.0f}" if n in found[case] else "-" for n in names)
        lines.append(f"| {operation}, {rows} x {cols} | {' | '.join(cells)} |")
    return "\n".join(lines)


def attention_speeds():
    """{implementation: [its time over ours, forward and backward, of each cell of the lengths]}"""
    cells = {}
    for row in rows_of("attention"):
        if row["group"] == "lengths" and float(row["seconds"]):
            of_cell = cells.setdefault(row["cell"], {}).setdefault(row["peer"], [])
            of_cell.append(float(row["seconds"]))
    speeds = {}
    for of_cell in cells.values():
        sums = {name: sum(both) for name, both in of_cell.items() if len(both) == 2}
        for name in sums:
            speeds.setdefault(name, []).append(sums[name] / sums[OURS])
    return speeds


def headlines(found):
    of_norm = found["LayerNorm", 16384, 2048]
    ours, torchs = of_norm[OURS], of_norm["torch"]
    held = {
        row["variant"]: int(row["held_bytes"])
        for row in rows_of("memory")
        if row["preset"] == "llama-7b" and row.get("mode", "eager") == "eager"
    }
    freed = held["fused"] - held["fused, memory_efficient"]
    speeds = attention_speeds()
    flash, cudnn, flash_4 = (
        f"{min(speeds[name]):.1f} to {max(speeds[name]):.1f} times"
        for name in ("torch FLASH", "torch CUDNN", "flash-attn 4")
    )
    return bullets(
        f"""**Norms {torchs / ours:.1f} times as fast as torch's**: LayerNorm of 16384 x 2048 in
        bf16 takes {ours:.0f} microseconds in place of {torchs:.0f}, forward and backward, on an
        {gpu_of("norm")} ([norm.md](benchmarks/results/norm.md)).""",
        f"""**{freed / 1e9:.1f} GB less memory** for a training step of a 7B LLaMA over 4096 tokens,
        by one flag ([memory.md](benchmarks/results/memory.md)).""",
        f"""**Attention {flash} as fast as torch's FlashAttention**, forward and backward, {cudnn}
        as fast as cuDNN's and {flash_4} as fast as flash-attn 4's (2048 and 16384 tokens), with the
        same bits on every run, on an {gpu_of("attention")}
        ([attention.md](benchmarks/results/attention.md)).""",
    )


def bullets(*texts):
    wrapper = textwrap.TextWrapper(115, subsequent_indent="  ")
    wrapper.break_on_hyphens = wrapper.break_long_words = False
    return "\n".join(wrapper.fill("- " + " ".join(text.split())) for text in texts)


def rivals(suite, study):
    """[(our time over the fastest other's, its name, the case)] of a study, the worst last."""
    cases = {}
    for row in rows_of(suite):
        if row["study"] == study and row["microseconds"] and float(row["error_over_bound"]) <= 1:
            name = "{operation} {direction} of {rows} x {cols}, {dtype}".format(**row)
            cases.setdefault(name, {})[row["implementation"]] = float(row["microseconds"])
    found = []
    for name, of_case in cases.items():
        others = {peer: t for peer, t in of_case.items() if not peer.startswith(OURS)}
        if OURS in of_case and others:
            best = min(others, key=others.get)
            found.append((of_case[OURS] / others[best], PEERS.get(best, (best,))[0], name))
    return sorted(found)


def where_slower():
    lines = ["- **Where it is slower.** Another library is ahead by more than 2 % in"]
    for suite, study in (
        ("norm", "shapes"),
        ("softmax", "shapes"),
        ("sweep", "random"),
    ):
        found = rivals(suite, study)
        ratio, peer, case = found[-1]
        ahead = sum(r > AHEAD for r, *_ in found)
        line = f"  {ahead} of {len(found)} cases of [{suite}.md](benchmarks/results/{suite}.md)"
        line += f" at random shapes, on an {gpu_of(suite)}" * (study == "random")
        if ahead:
            line += f", {'at most ' * (ahead > 1)}by {100 * (ratio - 1):.2g} % ({peer}, {case})"
        lines.append(line + ";")
    return "\n".join(lines)[:-1] + "."


def products():
    """{path: content}"""
    found = times()
    parts = README.read_text().split(MARK)
    parts[1::2] = [f"\n{text}\n" for text in (headlines(found), table(found), where_slower())]
    return {
        DOCS / "speed.svg": speed_chart(found),
        DOCS / "memory_efficient.svg": idea(),
        README: MARK.join(parts),
    }


if __name__ == "__main__":
    for path, content in products().items():
        path.write_text(content)
        print(f"written: {path.relative_to(DOCS.parent)}")
