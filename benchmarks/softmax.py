"""softmax and log_softmax over rows, forward and backward.

Each call is the bare operator, without autograd; backward takes the saved output. `--tier` forces
where our kernels keep a row.
"""

import dataclasses
import itertools
import math

import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks import reference, report, timing
from benchmarks.norm import Budget, shape
from benchmarks.targets import softmax_target
from fused_norm import _C

# name: (dtype of x, dtype of y)
DTYPES = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "fp32": (torch.float32, torch.float32),
    "bf16-fp32": (torch.bfloat16, torch.float32),
}
SHAPES = [
    ((32768, 128), "bf16"),
    ((32768, 512), "bf16"),
    ((16384, 1024), "bf16"),
    ((32768, 777), "bf16"),
    ((8192, 8192), "bf16"),
    ((4096, 32000), "bf16"),
    ((4096, 32001), "bf16"),
    ((2048, 100352), "bf16"),
    ((2048, 151936), "bf16"),
    ((512, 200000), "bf16"),
    ((8192, 8192), "fp32"),
]
QUICK_SHAPES = [((32768, 128), "bf16"), ((16384, 1024), "bf16"), ((4096, 32000), "bf16")]
TIERS = ("auto", "warp", "block", "uncached")


@dataclasses.dataclass(frozen=True)
class Case:
    log: bool
    rows: int
    cols: int
    dtype: str  # a key of DTYPES
    direction: str

    @property
    def operation(self):
        return "log_softmax" if self.log else "softmax"

    @property
    def bytes(self):
        """What must move: x in, y out; or dy and y in, dx out."""
        x, y = (dtype.itemsize for dtype in DTYPES[self.dtype])
        return self.rows * self.cols * (x + y if self.direction == "forward" else x + 2 * y)


class FusedNorm:
    name = report.OURS
    rounds_product = False  # in backward, dy * y to the output's dtype, before the sum

    def __init__(self, tier="auto"):
        self.tier = tier

    def forward(self, case, x):
        out_dtype = DTYPES[case.dtype][1]
        if self.tier == "auto":
            return torch.ops.fused_norm.softmax_forward(x, -1, case.log, out_dtype)
        return _C.softmax_forward(x, -1, case.log, out_dtype, self.tier)

    def backward(self, case, dy, y):
        input_dtype = DTYPES[case.dtype][0]
        if self.tier == "auto":
            return torch.ops.fused_norm.softmax_backward(dy, y, -1, case.log, input_dtype)
        return _C.softmax_backward(dy, y, -1, case.log, input_dtype, 1.0, self.tier)


class Torch:
    name = "torch"
    rounds_product = True

    def forward(self, case, x):
        aten = torch.ops.aten._log_softmax if case.log else torch.ops.aten._softmax
        if len(set(DTYPES[case.dtype])) == 1:
            return aten(x, -1, False)
        if x.device.type == "cuda" and x.dtype == torch.float16:
            return aten(x, -1, True)  # the one conversion that torch fuses
        return aten(x.to(DTYPES[case.dtype][1]), -1, False)

    def backward(self, case, dy, y):
        aten = torch.ops.aten
        aten = aten._log_softmax_backward_data if case.log else aten._softmax_backward_data
        x_dtype = DTYPES[case.dtype][0]
        return aten(dy, y, -1, y.dtype).to(x_dtype)


def measure(peer, case, bandwidth, budget, time=timing.graph_time, device="cuda"):
    x_dtype, y_dtype = DTYPES[case.dtype]
    ideal = case.bytes / bandwidth
    e, c = softmax_target(case.direction, case.cols, x_dtype)
    result = report.Result(
        case.operation,
        case.direction,
        case.rows,
        case.cols,
        case.dtype,
        peer.name,
        ideal,
        ideal / e + c,
    )
    sets = max(2, math.ceil(budget.footprint / case.bytes))
    calls = sets * math.ceil(budget.seconds / (ideal * sets))
    torch.manual_seed(0)

    def random(dtype, std=1.0):
        return torch.empty(case.rows, case.cols, dtype=dtype, device=device).normal_(0.0, std)

    xs = [random(x_dtype, std=3.0) for _ in range(sets)]
    try:
        if case.direction == "forward":
            inputs = xs

            def call(x):
                return peer.forward(case, x)

            def error(x, y):
                return reference.softmax_forward_error(case, x, y)

        else:
            # Every implementation takes the same output, its logarithm rounded as torch would.
            inputs = [(random(y_dtype), Torch().forward(case, x).to(y_dtype)) for x in xs]
            del xs

            def call(given):
                return peer.backward(case, *given)

            def error(given, dx):
                product_dtype = y_dtype if peer.rounds_product else None
                return reference.softmax_backward_error(case, *given, dx, product_dtype)

        call(inputs[0])  # outside the clock: does the peer know this case?
    except (RuntimeError, NotImplementedError) as unsupported:
        if peer.name == report.OURS and "does not hold" not in str(unsupported):
            raise
        return dataclasses.replace(result, note=str(unsupported).splitlines()[0][:120])

    seconds, outputs = time(call, inputs, calls, budget.replays)
    worst = max(map(error, inputs, outputs))
    return dataclasses.replace(result, seconds=seconds, error=worst)


def add_arguments(parser):
    parser.add_argument(
        "--shapes", nargs="+", type=shape, metavar="MxN", help="these only; new ones are welcome"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="this one only (of a new shape: default bf16)"
    )
    parser.add_argument("--direction", choices=("forward", "backward"))
    parser.add_argument("--kind", choices=("softmax", "log_softmax"))
    parser.add_argument(
        "--tier", choices=TIERS, default="auto", help="where our kernels keep a row; default: auto"
    )
    parser.add_argument("--quick", action="store_true", help="three shapes, and less patience")


def select_cases(options):
    listed = QUICK_SHAPES if options.quick else SHAPES
    if options.shapes:
        known = {
            size: [dtype for s, dtype in SHAPES if s == size] or ["bf16"] for size in options.shapes
        }
        listed = [
            (size, dtype)
            for size in known
            for dtype in ([options.dtype] if options.dtype else known[size])
        ]
    elif options.dtype:
        same = [(size, dtype) for size, dtype in SHAPES if dtype == options.dtype]
        listed = same or [(size, options.dtype) for size, _ in QUICK_SHAPES]
    directions = [options.direction] if options.direction else ["forward", "backward"]
    kinds = [options.kind] if options.kind else ["softmax", "log_softmax"]
    return [
        Case(kind == "log_softmax", *size, dtype, direction)
        for kind, direction, (size, dtype) in itertools.product(kinds, directions, listed)
    ]


def run(options):
    """Measure, print and write the tables; 1 if one of our results is wrong, else 0."""
    peers = [FusedNorm(options.tier), Torch()]
    jobs = list(itertools.product(select_cases(options), peers))
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    footprint = max(16 * l2, 2**30)
    budget = Budget(footprint, 1e-3, 7) if options.quick else Budget(footprint, 3e-3, 21)

    bandwidth = timing.copy_bandwidth()
    facts = [*report.environment(bandwidth), ("tier", options.tier)]
    for name, value in facts:
        print(f"{name}: {value}", flush=True)
    results = []
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(jobs))
        for case, peer in jobs:
            what = f"{case.operation} {case.direction} {case.rows} x {case.cols} {case.dtype}"
            progress.update(task, description=f"{what}, {peer.name}")
            results.append(measure(peer, case, bandwidth, budget))
            line = f"{what}, {peer.name}: {report.cell(results[-1])}"
            progress.console.print(line, highlight=False)
            progress.advance(task)
    stem = "softmax" if options.tier == "auto" else f"softmax-{options.tier}"
    report.write(results, facts, "softmax and log_softmax", stem, options.out)
    ours = [r for r in results if r.peer == report.OURS and r.seconds is not None]
    return 1 if any(not r.correct for r in ours) else 0
