"""What limits our kernels at the shapes of `norm` and `softmax`, as Nsight Compute counts it.

Every kernel of a call runs alone and from cold caches, so that times add up to more than the
suites'. Takes `ncu` on PATH, and a machine that lets it read the GPU's counters.
"""

import argparse
import csv
import dataclasses
import math
import re
import shutil
import subprocess
import sys

import torch

from benchmarks import environment, norm, report, result_files, softmax
from benchmarks.peers import ours

STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = (
    "barrier", "branch_resolving", "dispatch_stall", "drain", "imc_miss", "lg_throttle",
    "long_scoreboard", "math_pipe_throttle", "membar", "mio_throttle", "no_instruction",
    "not_selected", "short_scoreboard", "sleeping", "wait",
)  # fmt: skip
# field of Limit: metric
METRICS = {
    "nanoseconds": "gpu__time_duration.sum",
    "dram": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "l2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l1": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "issue": "smsp__issue_active.avg.per_cycle_active",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
    "waves": "launch__waves_per_multiprocessor",
    "load_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "load_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "store_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
    "store_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
}
# Also norms whose kernels those shapes leave out: rows in tiles, and by the warps of a cluster.
MORE_SHAPES = {norm: [((2**20, 65), "bf16"), ((2**18, 257), "bf16"), ((8191, 8193), "bf16")]}
SECOND_STAGE, MOST_OF_BACKWARD = "sum_partials", 0.03
RANGE = "case"  # the name of the ranges in which kernels are counted, before the case's number

HEADER = [
    "operation", "M x N", "dtype", "kernel", "us", "DRAM", "L2", "L1", "issue", "warps",
    "registers", "waves", "sectors", "stalls",
]  # fmt: skip
TEXT = """\
DRAM, L2, L1: throughput in per cent of the peak. issue: cycles in which a scheduler issued an
instruction, warps: those resident, both in per cent. waves: how often the grid fills the chip.
sectors: 32-byte sectors a request of a warp, loads / stores (bulk copies and `cp.async` are not
among them). stalls: the three largest, as warps that wait for each one that issues: *long
scoreboard* is global memory, *short scoreboard* shared memory, *no instruction* the instruction
cache, *not selected* another warp's turn."""


@dataclasses.dataclass(frozen=True)
class Limit:
    """A kernel of a case, and what was counted."""

    operation: str
    direction: str
    rows: int
    cols: int
    dtype: str
    kernel: str
    nanoseconds: float
    dram: float
    l2: float
    l1: float
    issue: float
    warps: float
    registers: float
    waves: float
    load_requests: float
    load_sectors: float
    store_requests: float
    store_sectors: float
    stalls: str

    def row(self):
        def per_request(sectors, requests):
            return f"{sectors / requests:.1f}" if requests else "-"

        return [
            f"{self.operation} {self.direction}",
            f"{self.rows} x {self.cols}",
            self.dtype,
            self.kernel,
            f"{self.nanoseconds / 1e3:.1f}",
            f"{self.dram:.0f}",
            f"{self.l2:.0f}",
            f"{self.l1:.0f}",
            f"{100 * self.issue:.0f}",
            f"{self.warps:.0f}",
            f"{self.registers:.0f}",
            f"{self.waves:.2f}" if math.isfinite(self.waves) else "-",
            f"{per_request(self.load_sectors, self.load_requests)} / "
            f"{per_request(self.store_sectors, self.store_requests)}",
            self.stalls,
        ]


def add_arguments(parser):
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument("--profiled", action="store_true", help=argparse.SUPPRESS)


def cases(quick):
    return [
        (suite, suite.Case(second, *shape, dtype, direction))
        for suite in (norm, softmax)
        for second in suite.KINDS.values()
        for direction in ("forward", "backward")
        for shape, dtype in suite.LISTS[quick] + ([] if quick else MORE_SHAPES.get(suite, []))
    ]


def run_cases(quick):
    """What ncu watches: each case once, in a range of its own."""
    for number, (suite, case) in enumerate(cases(quick)):
        peer = ours.Norm() if suite is norm else ours.Softmax()
        call, arguments = case.bind(peer, case.inputs(1, "cuda"))
        torch.cuda.nvtx.range_push(f"{RANGE} {number}")
        call(arguments[0])
        torch.cuda.nvtx.range_pop()
    torch.cuda.synchronize()
    return 0


def command(quick):
    metrics = [*METRICS.values(), *map(STALL.format, STALLS)]
    return [
        "ncu", "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none",
        "--nvtx", "--nvtx-include", f"regex:{RANGE}/", "--metrics", ",".join(metrics),
        sys.executable, "-m", "benchmarks", "limits", "--profiled", *["--quick"] * quick,
    ]  # fmt: skip


def second_stage(limits):
    """[(case, its part of the kernels' time)] where the target holds it to 3 %."""
    parts = {}
    for limit in limits:
        if (
            limit.direction == "backward"
            and limit.rows * limit.cols >= 2**25
            and limit.cols <= 2**14
        ):
            name = f"{limit.operation} {limit.rows} x {limit.cols} {limit.dtype}"
            parts.setdefault(name, []).append(limit)
    return [
        (name, here[1].nanoseconds / sum(limit.nanoseconds for limit in here))
        for name, here in parts.items()
        if [limit.kernel == SECOND_STAGE for limit in here] == [False, True]
    ]


def text(limits):
    """What the table's columns are, and the verdict on backward's second stage."""
    parts = second_stage(limits)
    if not parts:
        return TEXT
    met = sum(part <= MOST_OF_BACKWARD for _, part in parts)
    listed = "\n".join(f"- {name}: {part:.1%}" for name, part in parts)
    return (
        f"{TEXT}\n\nThe second stage of a norm's backward ({SECOND_STAGE}) is to take at most "
        f"{MOST_OF_BACKWARD:.0%} of it from 2^25 elements\non, up to 16384 columns. Of the times "
        f"below, each kernel's alone and from cold caches, its part is as follows\n({met} of "
        f"{len(parts)} met; in a call it begins while the first stage ends, and finds the partial "
        f"sums in the L2 cache,\nwhich these times do not show):\n\n{listed}"
    )


def number(text):
    return float(text.replace(",", ""))


def parse(lines, all_cases):
    """[Limit] of ncu's table, a row a kernel below its header and units."""
    header, _, *table = csv.reader(line for line in lines if line.startswith('"'))
    found = []
    for values in table:
        of = dict(zip(header, values, strict=True))
        ranges = " ".join(text for name, text in of.items() if "Push/Pop_Range" in name)
        _, case = all_cases[int(re.search(rf":{RANGE} (\d+):", ranges)[1])]
        stalls = sorted(((number(of[STALL.format(name)]), name) for name in STALLS), reverse=True)
        found.append(
            Limit(
                case.operation, case.direction, case.rows, case.cols, case.dtype,
                re.search(r"(\w+)[<(]", of["Kernel Name"])[1],
                **{field: number(of[metric]) for field, metric in METRICS.items()},
                stalls=", ".join(f"{name.replace('_', ' ')} {v:.1f}" for v, name in stalls[:3]),
            )
        )  # fmt: skip
    return found


def run(options):
    if options.profiled:
        return run_cases(options.quick)
    if not shutil.which("ncu"):
        print("python -m benchmarks limits: ncu (Nsight Compute) is not on PATH.", file=sys.stderr)
        return 2
    facts = environment.facts()
    process = subprocess.run(command(options.quick), capture_output=True, text=True)
    lines = process.stdout.splitlines()
    if process.returncode or not any(line.startswith('"') for line in lines):
        print(f"ncu failed:\n{process.stdout[-2000:]}{process.stderr[-2000:]}", file=sys.stderr)
        return 1
    limits = parse(lines, cases(options.quick))
    options.out.mkdir(parents=True, exist_ok=True)
    rows = [limit.row() for limit in limits]
    result_files.write_csv(options.out / "limits.csv", facts, Limit, limits)
    report.publish(options.out / "limits", "Limits", facts, [text(limits), (HEADER, rows)])
    return 0
