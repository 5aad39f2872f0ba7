"""What memory_efficient costs: a norm's forward and backward pass with the flag off, with no column
listed, and with one in a hundred listed (docs/memory_efficient.md).

Eager calls are launched one after the other; captured and compiled ones are replayed from a CUDA
graph. The three variants take turns, so that the chip's clocks are the same for all; each time is
the median of its rounds. Inputs rotate through more memory than the L2 cache holds.
"""

import dataclasses
import itertools
import math

import torch
from rich.console import Console
from rich.progress import track

import fused_norm as fn
from benchmarks import environment, report, result_files, sensors, timing

ELEMENTS = 2**26
COLUMNS = tuple(2**power for power in range(8, 17))
SHAPES = (*((ELEMENTS // cols, cols) for cols in COLUMNS), (256, 4096))
NORMS = {"RMSNorm": fn.RMSNorm, "LayerNorm": fn.LayerNorm}
MODES = ("eager", "captured", "compiled")
VARIANTS = ("off", "none listed", "1 % listed")
DIRECTIONS = ("forward", "backward")
# With the flag at most so many times the time without it, and so much more.
LIMITS = {"none listed": (1.02, 1.5e-6), "1 % listed": (1.10, 2e-6)}
SECONDS = 0.004  # of a turn
FOOTPRINT = 2**28  # bytes before an input comes again
# Beside the flag off, by norms: four roundings to bf16, of the output, which enters twice, and of
# both gradients.
TOLERANCE = 4 * 2.0**-8


@dataclasses.dataclass(frozen=True)
class Record:
    norm: str
    rows: int
    cols: int
    mode: str
    direction: str
    seconds_off: float
    seconds_none: float
    seconds_listed: float
    error: float  # of the gradients, over TOLERANCE

    def seconds(self, variant):
        times = (self.seconds_off, self.seconds_none, self.seconds_listed)
        return times[VARIANTS.index(variant)]

    def verdict(self, variant):
        if not self.error <= 1:
            return "WRONG"
        factor, more = LIMITS[variant]
        over = self.seconds(variant) - (self.seconds_off * factor + more)
        return "met" if over <= 0 else f"{over * 1e6:.1f} us over"


class Subject:
    """A norm in one variant and mode: `forward()` and `backward()` run one call for each input."""

    def __init__(self, norm, cols, mode, variant, inputs, backend):
        self.norm = NORMS[norm](cols, device="cuda", dtype=torch.bfloat16,
                                memory_efficient=variant != "off")  # fmt: skip
        with torch.no_grad():  # off too, so that gradients are the same
            self.norm.weight[::100] = 0
        if variant == "none listed":
            torch.nn.init.ones_(self.norm.weight)
        self.call = self.norm
        if mode == "compiled":
            torch._dynamo.reset()
            self.call = torch.compile(self.norm, backend=backend, fullgraph=True, dynamic=False)
        # Leaves of its own: else what one subject captures waits for the streams of the others.
        self.inputs = inputs = [(x.detach().requires_grad_(), dy) for x, dy in inputs]
        for x, dy in inputs[:2] * 2:  # looks at the weights, loads kernels, compiles
            self.grads(self.call(x), x, dy)
        self.outputs = self.graphs = None
        if mode != "eager":
            self.capture()

    def grads(self, y, x, dy):
        return torch.autograd.grad(y, [x, *self.norm.parameters()], dy, retain_graph=True)

    def capture(self):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for x, dy in self.inputs[:1] * 3:
                self.grads(self.call(x), x, dy)
        torch.cuda.synchronize()
        graphs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
        with torch.cuda.graph(graphs[0], stream=stream):
            self.run_forward()
        with torch.cuda.graph(graphs[1], stream=stream):
            self.run_backward()
        self.graphs = graphs

    def run_forward(self):
        self.outputs = [self.call(x) for x, _ in self.inputs]

    def run_backward(self):
        for y, (x, dy) in zip(self.outputs, self.inputs, strict=True):
            self.results = self.grads(y, x, dy)

    def forward(self):
        self.graphs[0].replay() if self.graphs else self.run_forward()

    def backward(self):
        self.graphs[1].replay() if self.graphs else self.run_backward()


def error(norm, cols, variant, x, dy):
    """The largest error of gradients beside those with the flag off."""
    results = []
    for flag in (False, True):
        module = NORMS[norm](cols, device="cuda", dtype=torch.bfloat16, memory_efficient=flag)
        if variant == "1 % listed":
            with torch.no_grad():
                module.weight[::100] = 0
        for _ in range(2):
            y = module(x)
            results.append(torch.autograd.grad(y, [x, *module.parameters()], dy))
    worst = 0.0
    for ours, expected in zip(results[-1], results[0], strict=True):
        difference = (ours.float() - expected.float()).norm() / expected.float().norm()
        worst = max(worst, difference.item() / TOLERANCE)
    return worst if math.isfinite(worst) else math.inf


def measure(norm, rows, cols, mode, rounds, backend):
    torch.manual_seed(0)
    sets = max(2, min(64, FOOTPRINT // (4 * rows * cols)))
    inputs = []
    for _ in range(sets):
        x, dy = (torch.randn(rows, cols, device="cuda").bfloat16() for _ in range(2))
        inputs.append((x.requires_grad_(), dy))
    worst = max(error(norm, cols, variant, *inputs[0]) for variant in VARIANTS[1:])
    subjects = {v: Subject(norm, cols, mode, v, inputs, backend) for v in VARIANTS}
    costs = []
    for direction in DIRECTIONS:
        calls = {variant: getattr(subject, direction) for variant, subject in subjects.items()}
        found = timing.in_turns(calls, rounds, SECONDS, sensors.Sensors(), ahead=0)
        times = (found[variant]["seconds"] / sets for variant in VARIANTS)
        costs.append(Record(norm, rows, cols, mode, direction, *times, worst))
    return costs


def write(facts, costs, out):
    result_files.write_csv(out / "flag.csv", facts, Record, costs)
    header = ["norm", "M x N", "mode", "direction", "off, us"]
    header += [f"{variant}, us" for variant in VARIANTS[1:]] + list(VARIANTS[1:])
    rows = [
        [
            c.norm,
            f"{c.rows} x {c.cols}",
            c.mode,
            c.direction,
            *(f"{c.seconds(variant) * 1e6:.1f}" for variant in VARIANTS),
            *(c.verdict(variant) for variant in VARIANTS[1:]),
        ]
        for c in costs
    ]
    limits = ", ".join(
        f"{variant}: {factor - 1:.0%} and {more * 1e6:.1f} us"
        for variant, (factor, more) in LIMITS.items()
    )
    text = (
        "GPU time of a call, bf16; of eager calls the host's where that is longer. At most so much "
        f"more than with the flag off: {limits}."
    )
    report.publish(out / "flag", "What memory_efficient costs", facts, [text, (header, rows)])


def add_arguments(parser):
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--columns", nargs="+", type=int, default=None, metavar="N")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")


def run(options):
    """Measure, print and write; 1 if a limit is missed or a gradient is wrong, else 0."""
    shapes = [s for s in SHAPES if options.columns is None or s[1] in options.columns]
    cases = list(itertools.product(NORMS, shapes, options.modes))
    costs = []
    for norm, (rows, cols), mode in track(cases, "norms", console=Console(stderr=True)):
        costs += measure(norm, rows, cols, mode, options.rounds, options.backend)
        torch.cuda.empty_cache()
    write([("suite", "flag"), *environment.facts()], costs, options.out)
    verdicts = [c.verdict(variant) for c in costs for variant in VARIANTS[1:]]
    print(f"{verdicts.count('met')} of {len(verdicts)} within their limits")
    return 0 if verdicts.count("met") == len(verdicts) else 1
