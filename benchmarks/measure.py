"""Measures implementations at cases: the same inputs for all, one after the other.

A case tells what to do: `operation`, `direction`, `rows`, `cols`, `dtype` and `bytes`; `target()`;
`inputs(sets, device)`; `bind(peer, inputs)`, a call and its argument for each set of inputs; and
`error(peer, inputs, index, output)`, the error of a result over its bound.
"""

import dataclasses
import math
import os
import subprocess
import sys
import time

import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks import environment, peers, report, timing
from benchmarks.peers import Unsupported, first_line
from benchmarks.results import OURS, Result

COMPILE_SECONDS = 240  # the most that compiling ahead may take


@dataclasses.dataclass(frozen=True)
class Budget:
    footprint: int  # bytes read and written before an input comes again: many times the L2 cache
    seconds: float  # least length of one graph, so that the start of a replay does not count
    replays: int


@dataclasses.dataclass(frozen=True)
class Job:
    case: object
    peers: tuple
    study: str = "shapes"


def measure(job, bandwidth, budget, time=timing.graph_time, device="cuda"):
    """Yields a result for each peer that has the case's direction."""
    case = job.case
    ideal = case.bytes / bandwidth
    e, c = case.target()
    sets = max(2, math.ceil(budget.footprint / case.bytes))
    calls = sets * math.ceil(budget.seconds / (ideal * sets))
    torch.manual_seed(0)
    inputs = case.inputs(sets, device)
    for peer in job.peers:
        if case.direction not in getattr(peer, "directions", (case.direction,)):
            continue
        result = Result(
            case.operation, case.direction, case.rows, case.cols, case.dtype, peer.name, ideal,
            ideal / e + c, study=job.study, bytes=case.bytes,
        )  # fmt: skip
        try:
            seconds, error = measure_peer(peer, case, inputs, calls, budget.replays, time)
            yield dataclasses.replace(result, seconds=seconds, error=error)
        except Exception as reason:
            if peer.name.startswith(OURS) and not isinstance(reason, Unsupported):
                raise
            yield dataclasses.replace(result, note=first_line(reason))


def measure_peer(peer, case, inputs, calls, replays, time):
    """(seconds, error over its bound) of what the timed graph computed from the first inputs, or of
    a first call where an implementation overwrites its inputs."""
    call, arguments = case.bind(peer, inputs)
    first = call(arguments[0])  # outside the clock: compiles; does the peer know this case?
    if overwrites(peer, case):
        error = case.error(peer, inputs, 0, first)
        return time(call, arguments, calls, replays)[0], error
    del first
    seconds, outputs = time(call, arguments, calls, replays)
    return seconds, case.error(peer, inputs, 0, outputs[0])


def turned(job, index):
    """The job with its peers in another order at each index: none is always measured first."""
    first = index % len(job.peers)
    return dataclasses.replace(job, peers=job.peers[first:] + job.peers[:first])


def overwrites(peer, case):
    """Whether a backward pass writes dx over dy."""
    return hasattr(peer, "overwrites_dy") and peer.overwrites_dy(case)


def budget(quick):
    footprint = max(16 * torch.cuda.get_device_properties(0).L2_cache_size, 2**30)
    return Budget(footprint, 1e-3, 7) if quick else Budget(footprint, 2.5e-3, 15)


def run(suite, jobs, options, absent, more_facts=()):
    """Measure, print and write; 1 if one of our results is wrong, else 0.

    Whatever was measured is written, also when the run is interrupted.
    """
    jobs = options.part.of(jobs)
    if options.compile_only:
        return compile_jobs(options.compile_only.of(jobs, stride=True))
    if options.jobs:
        compile_ahead(options.jobs)

    bandwidth = timing.copy_bandwidth()
    present = {peer.name for job in jobs for peer in job.peers if not peer.name.startswith(OURS)}
    facts = [
        ("suite", suite),
        *environment.facts(bandwidth),
        *peers.facts([name for name in peers.MODULES if name in present], absent),
        *more_facts,
    ]
    for name, value in facts:
        print(f"{name}: {value}", flush=True)
    results, patience = [], budget(options.quick)
    apart = getattr(options, "apart", False)  # of suites that have the option
    clock = timing.graph_time_apart if apart else timing.graph_time
    try:
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("", total=len(jobs))
            for index, job in enumerate(jobs):
                case = job.case
                what = f"{case.operation} {case.direction} {case.rows} x {case.cols} {case.dtype}"
                progress.update(task, description=what)
                here = list(measure(turned(job, index), bandwidth, patience, clock))
                results += here
                cells = "; ".join(f"{r.peer} {report.cell(r)}" for r in here)
                progress.console.print(f"{what}: {cells}", highlight=False, markup=False)
                progress.advance(task)
    finally:
        report.write(suite, results, facts, options.out, options.part.suffix)
    ours = [r for r in results if r.ours and r.seconds is not None]
    return 1 if any(not r.correct for r in ours) else 0


def compile_ahead(processes):
    """Fill the peers' caches on disk by processes of this same command, all at a time.

    They only compile: what a peer finds by timing, it finds when it is measured.
    """
    command = [sys.executable, "-m", "benchmarks", *sys.argv[1:], "--compile-only"]
    environ = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    started = time.monotonic()
    children = [
        subprocess.Popen(
            [*command, f"{k}/{processes}"], env=environ, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for k in range(1, processes + 1)
    ]  # fmt: skip
    late = 0
    for child in children:
        try:
            child.wait(max(0, COMPILE_SECONDS - (time.monotonic() - started)))
        except subprocess.TimeoutExpired:
            child.kill()
            late += 1
    seconds = time.monotonic() - started
    print(f"compiled ahead in {seconds:.0f} s by {processes} processes, {late} stopped", flush=True)


def compile_jobs(jobs):
    """Call each peer once a case."""
    from torch._inductor import config

    config.autotune_local_cache = False  # choices timed beside other processes are not to be kept
    for job in jobs:
        for peer in job.peers:
            if peer.name.startswith(OURS) or peer.name in ("torch", "cudnn"):
                continue  # they keep nothing on disk
            try:
                call, arguments = job.case.bind(peer, job.case.inputs(1, "cuda"))
                call(arguments[0])
            except Exception:
                continue  # told when it is measured
    return 0
