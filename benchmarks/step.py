"""Step time of a transformer block with memory_efficient on and off, eager and replayed.

Forward and backward of one LLaMA-style (RMSNorm) and one GPT-2-style (LayerNorm) block at each
hidden size, bf16, gradients accumulated. Steps with the flag off and on alternate, so that the
chip's clocks are the same for both; each time is the median.
"""

import dataclasses
import statistics
import time

import torch
from rich.console import Console
from rich.progress import track

from benchmarks import environment, memory, report

HIDDEN = (1024, 2048, 3072, 4096, 5120, 6144, 8192)
STYLES = {"RMSNorm": True, "LayerNorm": False}  # norm: LLaMA-style
MODES = ("eager", "replayed")
TOKENS = 8192
LIMIT = 0.03  # a step with the flag takes at most so much longer


@dataclasses.dataclass(frozen=True)
class Cost:
    norm: str
    hidden: int
    mode: str
    seconds_off: float  # a step
    seconds_on: float

    @property
    def more(self):
        return self.seconds_on / self.seconds_off - 1


class Step:
    """One step of a block: `eager()` runs it, `replayed()` replays it from a CUDA graph."""

    def __init__(self, norm, hidden, memory_efficient):
        llama = STYLES[norm]
        preset = memory.Preset(
            llama, 1, hidden, (8 * hidden // 3 + 255) // 256 * 256 if llama else 4 * hidden,
            hidden // 128, 0, TOKENS // 4, 4, torch.bfloat16, True,
        )  # fmt: skip
        variant = memory.VARIANTS[2 if memory_efficient else 1]
        torch.manual_seed(0)
        self.block = memory.Block(preset, memory.make_norm_of(preset, variant))
        self.block.to("cuda", torch.bfloat16)
        self.rotation = None
        if llama:
            self.rotation = torch.ones(2, preset.context, 64, device="cuda").bfloat16().unbind()
        self.x = torch.randn(4, TOKENS // 4, hidden, device="cuda").bfloat16().requires_grad_()
        self.dy = torch.randn_like(self.x)
        self.graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(4):  # the gradients are there, and the parameters known
                self.eager()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, stream=stream):
            self.eager()
        self.replayed = self.graph.replay

    def eager(self):
        self.block(self.x, self.rotation).backward(self.dy)


def seconds_of(call, steps):
    """Wall time of one of so many steps, launched one after the other."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def measure(norm, hidden, rounds):
    steps = [Step(norm, hidden, flag) for flag in (False, True)]
    costs = []
    for mode in MODES:
        calls = [getattr(step, mode) for step in steps]
        times = [[], []]
        count = max(2, int(0.03 / seconds_of(calls[0], 3)))
        for turn in range(2 * rounds):  # off, on, on, off
            which = (turn + turn // 2) % 2
            times[which].append(seconds_of(calls[which], count))
        costs.append(Cost(norm, hidden, mode, *map(statistics.median, times)))
    return costs


def write(costs, facts, out):
    header = ["block", "hidden", "mode", "off, ms", "on, ms", "more", f"at most {LIMIT:.0%}"]
    rows = [
        [
            c.norm,
            str(c.hidden),
            c.mode,
            f"{c.seconds_off * 1e3:.3f}",
            f"{c.seconds_on * 1e3:.3f}",
            f"{c.more:+.1%}",
            "missed" if c.more > LIMIT else "met",
        ]
        for c in costs
    ]
    report.write_simple(
        out / "step",
        "Step time with memory_efficient",
        f"Forward and backward of one transformer block, bf16, {TOKENS} tokens; the optimizer is "
        "left out.",
        facts,
        header,
        rows,
        costs,
    )


def add_arguments(parser):
    parser.add_argument("--hidden", nargs="+", type=int, default=list(HIDDEN), metavar="N")
    parser.add_argument("--rounds", type=int, default=9)


def run(options):
    """Measure, print and write; 1 if a step takes more than 3 % longer with the flag, else 0."""
    cases = [(norm, hidden) for norm in STYLES for hidden in options.hidden]
    costs = []
    for norm, hidden in track(cases, "blocks", console=Console(stderr=True)):
        costs += measure(norm, hidden, options.rounds)
    write(costs, environment.facts(), options.out)
    over = [c for c in costs if c.more > LIMIT]
    for c in over:
        print(f"{c.norm} {c.hidden}, {c.mode}: {c.more:+.1%}")
    return 1 if over else 0
