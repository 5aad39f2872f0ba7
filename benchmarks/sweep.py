"""More sizes than the targets name: N at a fixed M x N, M at a fixed N, and random shapes.

Over N our operators are measured at powers of two, beside them and between them, the peers at the
powers of two alone. Over M only ours are. Random shapes come from a seeded generator and are
measured with every peer.
"""

import random

from benchmarks import commandline, measure, norm, softmax
from benchmarks.peers import ours

STUDIES = ("columns", "rows", "random")
LOW, HIGH = 64, 131072
ROW_STUDY_COLS = (768, 4096, 32768)
OPERATIONS = [(norm.Case, False), (norm.Case, True), (softmax.Case, False), (softmax.Case, True)]


def add_arguments(parser):
    commandline.add_run_arguments(parser)
    parser.add_argument(
        "--studies", nargs="+", choices=STUDIES, default=STUDIES, help="default: all three"
    )
    parser.add_argument(
        "--elements",
        type=commandline.positive,
        default=2**26,
        help="M x N of the sweep over N; default: %(default)s",
    )
    parser.add_argument(
        "--random", type=commandline.count, default=40, help="random shapes; default: %(default)s"
    )
    parser.add_argument("--seed", type=commandline.count, default=0, help="of the random shapes")


def column_sizes():
    """Each N of the sweep: powers of two, + 8 and + 128, three times them, and the odd neighbours
    of both."""
    sizes = set()
    power = LOW // 2
    while power <= HIGH:
        sizes |= {power + step for step in (-1, 0, 1, 8, 128)}
        sizes |= {3 * power + step for step in (-1, 0, 1)}
        power *= 2
    return sorted(n for n in sizes if LOW <= n <= HIGH)


def is_power(cols):
    return cols & (cols - 1) == 0


def row_sizes(cols):
    """Each M of the sweep at one N, from 2^22 to 2^27 elements, by factors of two and 1.5."""
    elements = [2**k for k in range(22, 28)] + [3 * 2**k for k in range(21, 26)]
    return [n // cols for n in sorted(elements)]


def random_shapes(count, seed):
    """[(case class, kind, rows, cols, dtype)]: the four operations by turns, M and N even in their
    logarithms, 2^20 to 2^27 elements, N any number or a multiple of 8 or of 64."""
    draw = random.Random(seed)
    shapes = []
    for index in range(count):
        multiple = draw.choice((1, 8, 64))
        cols = int(LOW * (HIGH / LOW) ** draw.random()) // multiple * multiple
        rows = max(1, int(2 ** draw.uniform(20, 27) / cols))
        dtype = draw.choice(("bf16", "bf16", "fp16", "fp32"))
        shapes.append((*OPERATIONS[index % len(OPERATIONS)], rows, cols, dtype))
    return shapes


def select_jobs(options, everyone):
    """`everyone`: {case class: (our implementation, peers...)}"""
    cols = column_sizes()
    if options.quick:
        cols = [n for n in cols if 512 <= n <= 4096]
    jobs = []
    for case, kind in OPERATIONS:
        mine = everyone[case][:1]
        for direction in ("forward", "backward"):
            if "columns" in options.studies:
                for n in cols:
                    of_n = case(kind, max(1, options.elements // n), n, "bf16", direction)
                    jobs.append(
                        measure.Job(of_n, everyone[case] if is_power(n) else mine, "columns")
                    )
            if "rows" in options.studies:
                jobs += [
                    measure.Job(case(kind, m, n, "bf16", direction), mine, "rows")
                    for n in ROW_STUDY_COLS[: 1 if options.quick else None]
                    for m in row_sizes(n)
                ]
    if "random" in options.studies:
        jobs += [
            measure.Job(case(kind, rows, cols, dtype, direction), everyone[case], "random")
            for case, kind, rows, cols, dtype in random_shapes(options.random, options.seed)
            for direction in ("forward", "backward")
        ]
    return jobs


def run(options):
    norms, absent = commandline.load_peers("Norm", options)
    softmaxes, absent_softmax = commandline.load_peers("Softmax", options)
    absent += [
        (f"{name} (softmax)", why) for name, why in absent_softmax if (name, why) not in absent
    ]
    everyone = {
        norm.Case: (ours.Norm(), *norms.values()),
        softmax.Case: (ours.Softmax(), *softmaxes.values()),
    }
    facts = [("M x N over N", options.elements), ("seed of the random shapes", options.seed)]
    return measure.run("sweep", select_jobs(options, everyone), options, absent, facts)
