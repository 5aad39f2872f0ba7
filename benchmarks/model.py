"""Step time of transformer blocks with torch's norms, ours and Liger's, and of the kernels in it.

Forward and backward of one block of a stack in bf16: replayed from a CUDA graph of eager code, and
under torch.compile. The variants' steps alternate within a process; several processes measure one
after the other, while those that wait are idle. The figures are medians over the processes of each
process's median.
"""

import argparse
import dataclasses
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import commandline, environment, peers, report, result_files
from benchmarks.model_steps import MODES, PASSES, VARIANTS, Case, Record

BLOCKS = (
    Case("LayerNorm", 768, 32768),
    Case("LayerNorm", 1024, 16384),
    Case("RMSNorm", 2048, 16384),
    Case("RMSNorm", 4096, 4096),
    Case("RMSNorm", 8192, 4096),
)
FLAG_LIMIT = 0.015  # a step with the flag takes at most so much longer than without


def block(text):
    try:
        norm, _, size = text.partition(":")
        hidden, tokens = commandline.shape(size)
        if norm not in ("LayerNorm", "RMSNorm") or hidden % 64:
            raise argparse.ArgumentTypeError("")
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a block; write it as RMSNorm:2048x16384 (hidden size, a multiple of "
            "64, and tokens)."
        ) from None
    return Case(norm, hidden, tokens)


def limit(case, mode):
    """The most that a step of ours may take, as a part of the step with torch's norms, less 1. None
    for zeros."""
    if mode == "zeros":
        return None
    if case.norm == "LayerNorm" and case.hidden <= 1024:
        return -0.035 if mode == "replayed" else -0.01
    if mode == "replayed":
        return -0.01 if case.hidden <= 2048 else 0.0
    return 0.01


def add_arguments(parser):
    parser.add_argument(
        "--blocks", nargs="+", type=block, default=list(BLOCKS), metavar="NORM:HIDDENxTOKENS",
        help="default: " + " ".join(case.name for case in BLOCKS),
    )  # fmt: skip
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--processes", type=commandline.positive, default=5)
    parser.add_argument("--rounds", type=commandline.positive, default=9, help="turns of a variant")
    parser.add_argument("--seconds", type=float, default=0.05, help="of a turn; default: 0.05")
    parser.add_argument(
        "--no-kernels", action="store_true", help="steps only; else the first process profiles"
    )
    parser.add_argument("--child", type=commandline.count, help=argparse.SUPPRESS)


def joined(many):
    """The records of several runs, each process with a number of its own."""
    numbers, found = {}, []
    for run, records in enumerate(many):
        for record in records:
            number = numbers.setdefault((run, record.process), len(numbers) + 1)
            found.append(dataclasses.replace(record, process=number))
    return found


def child(options):
    """One process: prepare, say so, wait for the word, measure, print the records."""
    from benchmarks import model_steps

    def begin():
        print("ready", flush=True)
        sys.stdin.readline()

    records, absent = model_steps.measure(
        options.blocks, options.modes, options.variants, options.child, options.rounds,
        options.seconds, options.child == 1 and not options.no_kernels, begin,
    )  # fmt: skip
    path = options.out / f"{options.child}.csv"
    result_files.write_csv(path, list(absent.items()), Record, records)
    os._exit(0)  # at once: the next process waits, and to take all of this down takes seconds


def measure(options):
    """(records, [(what, why it is absent)]) of processes that this one starts."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*sys.argv[1:], "--out", folder, "--child"]
        # The compiler's helpers share the cores with the other processes.
        threads = str(max(1, (os.cpu_count() or 1) // options.processes))
        environ = {"TORCHINDUCTOR_COMPILE_THREADS": threads} | os.environ
        children = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks", *words, str(number)], env=environ, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )
            for number in range(1, options.processes + 1)
        ]  # fmt: skip
        records, absent = [], {}
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        try:
            ready = [process.stdout.readline().strip() == "ready" for process in children]
            for number, process in enumerate(children, 1):
                print(f"process {number} of {len(children)}", file=sys.stderr, flush=True)
                process.communicate("go\n" if ready[number - 1] else None)
                if process.returncode == 0:
                    why, found = result_files.read_csv(Path(folder) / f"{number}.csv", Record)
                    records += found
                    absent |= why
                else:
                    absent[f"process {number}"] = f"ended with exit code {process.returncode}"
        except (KeyboardInterrupt, SystemExit):  # what was measured is written
            absent["the other processes"] = "interrupted"
        finally:
            for process in children:
                process.kill()
        return records, list(absent.items())


class Numbers:
    """The records, to be asked for."""

    def __init__(self, records):
        self.values = {}
        for r in records:
            key = (r.case, r.mode, r.variant, r.quantity)
            self.values.setdefault(key, {})[r.process] = r.value
        self.cases = list(dict.fromkeys(r.case for r in records))
        self.variants = [v for v in VARIANTS if any(r.variant == v for r in records)]

    def all(self, *key):
        return list(self.values.get(key, {}).values())

    def median(self, *key):
        values = self.all(*key)
        return statistics.median(values) if values else None

    def flag(self, case, mode, on="fused, flag", off="fused"):
        """What the flag adds to a step, in each process that measured both."""
        on = self.values.get((case, mode, on, "change"), {})
        off = self.values.get((case, mode, off, "change"), {})
        return [(1 + on[p]) / (1 + off[p]) - 1 for p in on if p in off]

    def flags(self, case, mode):
        """The same without and with the pass."""
        return [self.flag(case, mode), self.flag(case, mode, *reversed(PASSES))]

    def rows(self):
        return [(c, m) for c in self.cases for m in MODES if self.all(c, m, "torch", "seconds")]


def spread(values):
    """Median and quartiles of changes, in per cent."""
    if not values:
        return "-"
    low, middle, high = (
        statistics.quantiles(values, method="inclusive") if len(values) > 1 else values * 3
    )
    return f"{middle:+.1%} ({low * 100:+.1f}, {high * 100:+.1f})"


def cell(value, scale, digits):
    return "-" if value is None else f"{value * scale:,.{digits}f}"


def step_table(numbers):
    changed = numbers.variants[1:]
    header = ["block", "mode", "torch, ms", *changed]
    header += ["flag over fused", "with the pass", "target"]
    rows = []
    for case, mode in numbers.rows():
        judged = PASSES[0] if mode == "compiled" and PASSES[0] in changed else "fused"
        changes = numbers.all(case, mode, judged, "change")
        most = limit(case, mode)
        target = "-"
        if changes and most is not None:
            verdict = "met" if statistics.median(changes) <= most else "missed"
            target = f"{most:+.1%}: {verdict}"
        rows.append(
            [
                case.name,
                mode,
                cell(numbers.median(case, mode, "torch", "seconds"), 1e3, 3),
                *(spread(numbers.all(case, mode, v, "change")) for v in changed),
                *(spread(more) for more in numbers.flags(case, mode)),
                target,
            ]
        )
    return header, rows


def kernel_table(numbers):
    header = ["block", "mode", "variant", "norms forward", "backward", "the next kernels", "matmul"]
    header += ["others", "gaps", "kernels"]
    rows = []
    kinds = ("forward", "backward", "behind", "matmul", "others", "gaps")
    for case in numbers.cases:
        for mode in MODES:
            for variant in numbers.variants:
                found = [numbers.median(case, mode, variant, f"kernels, {k}") for k in kinds]
                if None in found:
                    continue
                forward, backward, _, matmul, others, _ = found
                busy = forward + backward + matmul + others
                parts = [cell(value, 1e6, 0) for value in found]
                if not forward:  # torch.compile's norms are in kernels with other things
                    parts[:3] = ["-", "-", "-"]
                rows.append([case.name, mode, variant, *parts, cell(busy, 1e6, 0)])
    return header, rows


def alone_table(numbers):
    header = ["block", "variant", "direction", "a call alone", "its kernels alone"]
    header += [f"kernels in the step, {mode}" for mode in MODES[:2]]
    rows = []
    for case in numbers.cases:
        for variant in numbers.variants:
            for direction in ("forward", "backward"):
                name = f"kernels, {direction}"
                call = numbers.median(case, "alone", variant, f"{name}, call")
                if call is None:
                    continue
                kernels = numbers.median(case, "alone", variant, name)
                inside = []
                for mode in MODES[:2]:
                    norms = numbers.median(case, mode, variant, "kernels, norms")
                    value = numbers.median(case, mode, variant, name)
                    inside.append(cell(value / norms if norms else None, 1e6, 1))
                rows.append(
                    [case.name, variant, direction, cell(call, 1e6, 1), cell(kernels, 1e6, 1)]
                    + inside
                )
    return header, rows


def sensor_table(numbers):
    header = ["block", "mode", *(f"{v}: MHz, W" for v in numbers.variants)]
    rows = []
    for case, mode in numbers.rows():
        cells = []
        for variant in numbers.variants:
            clock, watts = (numbers.median(case, mode, variant, q) for q in ("MHz", "watts"))
            cells.append(f"{cell(clock, 1, 0)}, {cell(watts, 1, 0)}")
        rows.append([case.name, mode, *cells])
    return header, rows


TEXTS = {
    "Steps": "Time with torch's norms, and what the others take more (+) or less (-) than that: "
    "median and\nquartiles over the processes. *Fused*: this library; *flag*: "
    "`memory_efficient=True`; *residual inside*:\n`add_layer_norm` and `add_rms_norm` in place of "
    "an addition and a norm; *pass*: compiled with\n`options=fused_norm.compile_options()`, which "
    "puts additions inside by itself. *Zeros*: replayed, all numbers\n0, so that the chip stays "
    "below its power limit (first process only). *Target*: of fused; compiled, of fused\nwith the "
    "pass.",
    "Kernels of a step, microseconds": "From the profiler (CUPTI), first process. *The next "
    "kernels*: those right behind the norms' kernels,\ncounted under *matmul* (matrix products and "
    "attention) or *others* too. *Gaps*: between kernels,\nthe profiler's own included. Inductor "
    "fuses torch's norms with other work: then they are among the others.",
    "The norms' kernels in the step and alone, microseconds": "Of one norm. *A call alone*: as in "
    "norm.md, on inputs that are not in the cache; *its kernels\nalone*: the same by the profiler. "
    "With the residual inside, the addition is in each of these times.",
    "Clock and power": "While steps run: medians of samples.",
}


def write(facts, records, out):
    """Print and write; 1 if the flag makes a step more than 1.5 % longer, else 0."""
    numbers, parts, code = Numbers(records), [], 0
    makers = (step_table, kernel_table, alone_table, sensor_table)
    for (title, text), make in zip(TEXTS.items(), makers, strict=True):
        table = make(numbers)
        if table[1]:
            parts += [f"## {title}", text, table]
    result_files.write_csv(out / "model.csv", facts, Record, records)
    report.publish(out / "model", "Step time of transformer blocks", facts, parts)
    for case, mode in numbers.rows():
        for more in numbers.flags(case, mode):
            if more and statistics.median(more) > FLAG_LIMIT:
                print(f"{case.name}, {mode}: the flag adds {statistics.median(more):+.1%}")
                code = 1
    return code


def run(options):
    """Measure, print and write; 1 if the flag costs a step too much, or something of ours was not
    measured."""
    if options.child is not None:
        return child(options)
    records, absent = measure(options)
    if not records:
        print("nothing was measured: " + ", ".join(f"{what} {why}" for what, why in absent))
        return 1
    present = ["liger"] if any(r.variant == "liger" for r in records) else []
    facts = [("suite", "model"), *environment.facts(), *peers.facts(present, absent)]
    lost = [what for what, _ in absent if "fused" in what]
    return max(write(facts, records, options.out), bool(lost))
