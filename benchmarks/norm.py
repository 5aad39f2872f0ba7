"""LayerNorm and RMSNorm, forward and backward.

Each call is the bare operator, without autograd: forward also stores the statistics that backward
needs, and backward gives dx, dweight and (LayerNorm) dbias.
"""

import argparse
import dataclasses
import itertools
import math

import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks import reference, report, timing
from benchmarks.targets import norm_target

# name: (dtype of x, dtype of the parameters)
DTYPES = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "fp32": (torch.float32, torch.float32),
    "bf16-fp32w": (torch.bfloat16, torch.float32),
}
SHAPES = [
    ((8192, 768), "bf16"),
    ((16384, 2048), "bf16"),
    ((8192, 5120), "bf16"),
    ((8192, 12288), "bf16"),
    ((1024, 32768), "bf16"),
    ((131072, 128), "bf16"),
    ((100000, 192), "bf16"),
    ((512, 4096), "bf16"),
    ((8192, 3333), "bf16"),
    ((2048, 50000), "bf16"),
    ((8192, 4096), "fp32"),
    ((8192, 4096), "bf16-fp32w"),
    ((8192, 1536), "fp16"),
]
QUICK_SHAPES = [((8192, 768), "bf16"), ((8192, 5120), "bf16"), ((512, 4096), "bf16")]


@dataclasses.dataclass(frozen=True)
class Case:
    rms: bool
    rows: int
    cols: int
    dtype: str  # a key of DTYPES
    direction: str
    eps: float = 1e-5

    @property
    def operation(self):
        return "RMSNorm" if self.rms else "LayerNorm"

    @property
    def tensors(self):
        """Tensors of M x N that must move: x in, y out; or dy and x in, dx out."""
        return 2 if self.direction == "forward" else 3

    @property
    def bytes(self):
        return self.tensors * self.rows * self.cols * DTYPES[self.dtype][0].itemsize


class Peer:
    """An implementation. bias is None for RMSNorm."""

    name: str
    directions = ("forward", "backward")
    from_output = False  # backward takes the rounded output, not x

    def forward(self, case, x, weight, bias):
        """(y, statistics...)"""
        raise NotImplementedError

    def saved(self, case, x, weight, bias):
        """What backward needs of a forward pass; not timed."""
        raise NotImplementedError

    def backward(self, case, dy, saved, weight, bias):
        """(dx, dweight, dbias or None)"""
        raise NotImplementedError


class FusedNorm(Peer):
    name = report.OURS

    def forward(self, case, x, weight, bias):
        return torch.ops.fused_norm.norm_forward(
            x, weight, bias, [case.cols], case.eps, 0.0, case.rms
        )

    def saved(self, case, x, weight, bias):
        y, mean, rstd = self.forward(case, x, weight, bias)
        if self.from_output:
            return y, None, rstd
        return x, (None if case.rms else mean), rstd

    def backward(self, case, dy, saved, weight, bias):
        return torch.ops.fused_norm.norm_backward(
            dy, *saved, weight, bias, [case.cols], 0.0, case.rms, self.from_output, dy.dtype,
            [True, True, bias is not None],
        )  # fmt: skip


class FusedNormMemoryEfficient(FusedNorm):
    """Backward from the saved output; the forward operator is the same."""

    name = f"{report.OURS} memory_efficient"
    directions = ("backward",)
    from_output = True


class Torch(Peer):
    name = "torch"

    def forward(self, case, x, weight, bias):
        if case.rms:
            return torch.ops.aten._fused_rms_norm(x, [case.cols], weight, case.eps)
        return torch.ops.aten.native_layer_norm(x, [case.cols], weight, bias, case.eps)

    def saved(self, case, x, weight, bias):
        return x, *self.forward(case, x, weight, bias)[1:]

    def backward(self, case, dy, saved, weight, bias):
        x, *statistics = saved
        if case.rms:
            aten = torch.ops.aten._fused_rms_norm_backward
            return *aten(dy, x, [case.cols], *statistics, weight, [True, True]), None
        aten = torch.ops.aten.native_layer_norm_backward
        return aten(dy, x, [case.cols], *statistics, weight, bias, [True, True, True])


@dataclasses.dataclass(frozen=True)
class Budget:
    footprint: int  # bytes read and written before an input comes again: many times the L2 cache
    seconds: float  # least length of one graph, so that the start of a replay does not count
    replays: int


def measure(peer, case, bandwidth, budget, time=timing.graph_time, device="cuda"):
    ideal = case.bytes / bandwidth
    e, c = norm_target(case.direction, case.cols, DTYPES[case.dtype][0])
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

    x_dtype, weight_dtype = DTYPES[case.dtype]
    torch.manual_seed(0)

    def random(*shape, dtype=x_dtype, mean=0.0, std=1.0):
        return torch.empty(shape, dtype=dtype, device=device).normal_(mean, std)

    weight = random(case.cols, dtype=weight_dtype, mean=1.0, std=0.1)
    bias = None if case.rms else random(case.cols, dtype=weight_dtype, std=0.1)
    xs = [random(case.rows, case.cols, mean=0.5, std=2.0) for _ in range(sets)]
    try:
        if case.direction == "forward":

            def call(x):
                return peer.forward(case, x, weight, bias)

            def error(x, output):
                return reference.forward_error(case, x, weight, bias, output[0])

            inputs = xs
        else:

            def call(given):
                return peer.backward(case, given[0], given[1], weight, bias)

            def error(given, gradients):
                dy, _, x = given
                return reference.backward_error(
                    case, x, weight, bias, dy, gradients, peer.from_output
                )

            inputs = [
                (random(case.rows, case.cols), peer.saved(case, x, weight, bias), x) for x in xs
            ]
        call(inputs[0])  # outside the clock: does the peer know this case?
    except (RuntimeError, NotImplementedError) as unsupported:
        if peer.name.startswith(report.OURS):
            raise
        return dataclasses.replace(result, note=str(unsupported).splitlines()[0][:120])

    seconds, outputs = time(call, inputs, calls, budget.replays)
    worst = max(map(error, inputs, outputs))
    return dataclasses.replace(result, seconds=seconds, error=worst)


def shape(text):
    try:
        rows, cols = (int(size) for size in text.split("x"))
    except ValueError:
        rows = cols = 0
    if rows < 1 or cols < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape; write it as 8192x768.")
    return rows, cols


def add_arguments(parser):
    parser.add_argument(
        "--shapes", nargs="+", type=shape, metavar="MxN", help="these only; new ones are welcome"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="this one only (of a new shape: default bf16)"
    )
    parser.add_argument("--direction", choices=("forward", "backward"))
    parser.add_argument("--kind", choices=("layer", "rms"))
    parser.add_argument(
        "--memory-efficient", action="store_true", help="time backward from the output as well"
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
        listed = [(size, dtype) for size, dtype in SHAPES if dtype == options.dtype]
    directions = [options.direction] if options.direction else ["forward", "backward"]
    kinds = [options.kind] if options.kind else ["layer", "rms"]
    return [
        Case(kind == "rms", *size, dtype, direction)
        for kind, direction, (size, dtype) in itertools.product(kinds, directions, listed)
    ]


def run(options):
    """Measure, print and write the tables; 1 if one of our results is wrong, else 0."""
    peers = [FusedNorm(), Torch()]
    if options.memory_efficient:
        peers.insert(1, FusedNormMemoryEfficient())
    jobs = [
        (case, peer)
        for case in select_cases(options)
        for peer in peers
        if case.direction in peer.directions
    ]
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    footprint = max(16 * l2, 2**30)
    budget = Budget(footprint, 1e-3, 7) if options.quick else Budget(footprint, 3e-3, 21)

    bandwidth = timing.copy_bandwidth()
    facts = report.environment(bandwidth)
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
    report.write(results, facts, "LayerNorm and RMSNorm", "norm", options.out)
    return 1 if any(r.peer.startswith(report.OURS) and not r.correct for r in results) else 0
