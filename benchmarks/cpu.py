"""Norms on a CPU against torch's own: forward plus backward at 4096 x 1024.

Rounds of torch's norm and of ours with memory_efficient off and on alternate, so that what else the
machine does meets all three. A round is the fastest of five calls, a time the median of its rounds.
"""

import dataclasses
import statistics
import time

import torch
from rich.console import Console
from rich.progress import track

import fused_norm as fn
from benchmarks import commandline, environment, report, result_files

needs_gpu = False

ROWS, COLS = 4096, 1024
CALLS = 5  # a round
NORMS = ("LayerNorm", "RMSNorm")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LIMITS = {"off": 1.5, "on": 3.0}  # times torch's own


@dataclasses.dataclass(frozen=True)
class Cost:
    norm: str
    dtype: str
    memory_efficient: str  # a key of LIMITS
    seconds_torch: float
    seconds: float

    @property
    def ratio(self):
        return self.seconds / self.seconds_torch

    @property
    def missed(self):
        return self.ratio > LIMITS[self.memory_efficient]


def add_arguments(parser):
    parser.add_argument("--rounds", type=commandline.positive, default=31)
    parser.add_argument("--threads", type=commandline.positive, help="default: as torch chooses")


def seconds_of(module, x, dy):
    """Of the fastest forward plus backward pass of a round."""
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        torch.autograd.grad(module(x), (x, *module.parameters()), dy)
        times.append(time.perf_counter() - start)
    return min(times)


def measure(norm, dtype, rounds):
    """Costs with the flag off and on."""
    options = {"dtype": DTYPES[dtype]}
    modules = [getattr(torch.nn, norm)(COLS, **options)]
    modules += [getattr(fn, norm)(COLS, **options, memory_efficient=on) for on in (False, True)]
    x = torch.randn(ROWS, COLS, **options).requires_grad_()
    dy = torch.randn(ROWS, COLS, **options)
    for module in modules:  # the allocator has its memory, the threads run
        seconds_of(module, x, dy)
    times = [[] for _ in modules]
    for turn in range(rounds):
        for which in (0, 1, 2) if turn % 2 else (2, 1, 0):
            times[which].append(seconds_of(modules[which], x, dy))
    of_torch, *ours = map(statistics.median, times)
    return [
        Cost(norm, dtype, flag, of_torch, seconds)
        for flag, seconds in zip(LIMITS, ours, strict=True)
    ]


def write(costs, facts, out):
    header = ["norm", "dtype", "memory_efficient", "torch, ms", "fused_norm, ms", "ratio", "limit"]
    rows = [
        [c.norm, c.dtype, c.memory_efficient]
        + [f"{c.seconds_torch * 1e3:.2f}", f"{c.seconds * 1e3:.2f}", f"{c.ratio:.2f}"]
        + [f"{LIMITS[c.memory_efficient]:.1f}" + (", missed" if c.missed else "")]
        for c in costs
    ]
    text = f"Forward plus backward at {ROWS} x {COLS}, all gradients."
    result_files.write_csv(out / "cpu.csv", facts, Cost, costs)
    report.publish(out / "cpu", "Norms on a CPU", facts, [text, (header, rows)])


def run(options):
    """Measure, print and write; 1 if a time is more than its limit times torch's, else 0."""
    if options.threads:
        torch.set_num_threads(options.threads)
    cases = [(norm, dtype) for norm in NORMS for dtype in DTYPES]
    costs = []
    for norm, dtype in track(cases, "norms", console=Console(stderr=True)):
        costs += measure(norm, dtype, options.rounds)
    facts = [*environment.cpu_facts(), ("threads", torch.get_num_threads())]
    write(costs, facts, options.out)
    return 1 if any(c.missed for c in costs) else 0
