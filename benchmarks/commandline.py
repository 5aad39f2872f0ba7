"""Arguments that commands share."""

import argparse
import dataclasses
import itertools
import os

from benchmarks import peers


@dataclasses.dataclass(frozen=True)
class Part:
    """The k-th of n parts of a list; the parts together are the list."""

    k: int = 1
    n: int = 1

    def of(self, items, stride=False):
        """A run of neighbours, or with `stride` every n-th."""
        if stride:
            return items[self.k - 1 :: self.n]
        return items[len(items) * (self.k - 1) // self.n : len(items) * self.k // self.n]

    @property
    def suffix(self):
        return f"-{self.k}of{self.n}" if self.n > 1 else ""


def part(text):
    try:
        k, n = (int(number) for number in text.split("/"))
    except ValueError:
        k = n = 0
    if not 1 <= k <= n:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a part; write the first of three as 1/3."
        )
    return Part(k, n)


def shape(text):
    try:
        rows, cols = (int(size) for size in text.split("x"))
    except ValueError:
        rows = cols = 0
    if rows < 1 or cols < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape; write it as 8192x768.")
    return rows, cols


def count(text):
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a count; write it as 40.")
    return int(text)


def positive(text):
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive count; write it as 40.")
    return int(text)


def add_run_arguments(parser):
    """What every command that measures on a GPU takes."""
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=peers.MODULES,
        default=list(peers.MODULES),
        help="what to compare with; `--peers` alone: nothing. Default: %(default)s",
    )
    parser.add_argument(
        "--part", type=part, default=Part(), metavar="K/N", help="this part only; see `merge`"
    )
    parser.add_argument(
        "--jobs",
        type=count,
        default=max(0, min(12, (os.cpu_count() or 1) - 2)),
        help="processes that compile the peers' kernels ahead; default: %(default)s",
    )
    parser.add_argument("--quick", action="store_true", help="fewer cases, and less patience")
    parser.add_argument("--compile-only", type=part, help=argparse.SUPPRESS)


def add_case_arguments(parser, dtypes, kinds):
    add_run_arguments(parser)
    parser.add_argument(
        "--shapes", nargs="+", type=shape, metavar="MxN", help="these only; new ones are welcome"
    )
    parser.add_argument(
        "--dtype", choices=dtypes, help="this one only (of a new shape: default bf16)"
    )
    parser.add_argument("--direction", choices=("forward", "backward"))
    parser.add_argument(
        "--apart", action="store_true",
        help="each call after a kernel of torch's, whose own time is taken off",
    )  # fmt: skip
    parser.add_argument("--kind", choices=kinds)


def listed_shapes(options, shapes, quick_shapes):
    """[((rows, cols), dtype)] that --shapes, --dtype and --quick choose."""
    if options.shapes:
        known = {
            size: [dtype for s, dtype in shapes if s == size] or ["bf16"] for size in options.shapes
        }
        return [
            (size, dtype)
            for size in known
            for dtype in ([options.dtype] if options.dtype else known[size])
        ]
    listed = quick_shapes if options.quick else shapes
    if options.dtype:
        same = [(size, dtype) for size, dtype in listed if dtype == options.dtype]
        return same or [(size, options.dtype) for size, _ in quick_shapes]
    return listed


def cases(options, make, kinds, shapes, quick_shapes):
    """Cases that the options choose, direction after direction of each kind."""
    listed = listed_shapes(options, shapes, quick_shapes)
    directions = [options.direction] if options.direction else ["forward", "backward"]
    chosen = [options.kind] if options.kind else list(kinds)
    return [
        make(kinds[kind], *size, dtype, direction)
        for kind, direction, (size, dtype) in itertools.product(chosen, directions, listed)
    ]


def load_peers(kind, options):
    """(peers by name, [(name, why absent)]); what was not asked for is absent too."""
    present, absent = peers.load(kind, options.peers)
    skipped = [(name, "not asked for") for name in peers.MODULES if name not in options.peers]
    return present, absent + skipped
