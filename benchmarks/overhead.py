"""Host time of a call at a tiny size: the public functions and modules, forward and backward.

The input and the parameters need gradients. Each implementation's output and gradients are compared
with torch's. Rounds of calls alternate between the implementations; each time is the median of its
rounds. On a CPU the operator's own work is in it.
"""

import dataclasses
import functools
import statistics
import time

import torch
from rich.console import Console
from rich.progress import track

import fused_norm as fn
from benchmarks import commandline, environment, peers, report, timing
from benchmarks.peers import first_line, ours
from benchmarks.results import OURS, Result

needs_gpu = False

ROWS, COLS = 4, 256
FORWARD_LIMIT, BACKWARD_LIMIT = 1.5, 1.0  # times torch's own
# Beside torch's results, times the largest of these: sums over a row in fp32, in any order.
TOLERANCE = COLS * 2.0**-24
OPERATIONS = ("layer_norm", "rms_norm", "softmax", "log_softmax")
MODULES = {
    "layer_norm": lambda library: library.LayerNorm(COLS),
    "rms_norm": lambda library: library.RMSNorm(COLS, eps=1e-5),
    "softmax": lambda library: library.Softmax(-1),
    "log_softmax": lambda library: library.LogSoftmax(-1),
}


@dataclasses.dataclass
class Subject:
    """One implementation of one operation: `call()` gives y, whose gradients are of `leaves`."""

    operation: str
    name: str
    call: object
    leaves: tuple


def add_arguments(parser):
    parser.add_argument(
        "--peers", nargs="*", choices=peers.MODULES, default=list(peers.MODULES),
        help="what to compare with; torch always is. Default: %(default)s",
    )  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument("--calls", type=commandline.positive, default=300, help="a round")
    parser.add_argument("--rounds", type=commandline.positive, default=15)


def subjects(functions, device):
    """Functions of each implementation, then our modules and torch's."""
    x = torch.randn(ROWS, COLS, device=device).requires_grad_()
    parameters = [torch.randn(COLS, device=device).requires_grad_() for _ in range(2)]
    count = {"layer_norm": 2, "rms_norm": 1}
    found = []
    for operation in OPERATIONS:
        leaves = (x, *parameters[: count.get(operation, 0)])
        for name, of_name in functions.items():
            if operation in of_name:
                call = functools.partial(of_name[operation], *leaves)
                found.append(Subject(operation, name, call, leaves))
        for name, library in ((OURS, fn), ("torch", torch.nn)):
            module = MODULES[operation](library).to(device)
            call = functools.partial(module, x)
            found.append(Subject(f"{operation} module", name, call, (x, *module.parameters())))
    return found


def forward_seconds(subject, calls, synchronize):
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        subject.call()
    return (time.perf_counter() - start) / calls


def backward_seconds(subject, calls, synchronize):
    outputs = [subject.call() for _ in range(calls)]
    dy = torch.ones_like(outputs[0])
    synchronize()
    start = time.perf_counter()
    for y in outputs:
        torch.autograd.grad(y, subject.leaves, dy)
    return (time.perf_counter() - start) / calls


def outcome(subject):
    """[y] and [gradients], of a dy that is no constant, as softmax would take that to zero."""
    y = subject.call()
    dy = torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y)
    return [y.detach()], list(torch.autograd.grad(y, subject.leaves, dy))


def errors(found, failed):
    """{(subject's index, direction): largest difference from torch's results over the tolerance}"""
    expected = {subject.operation: outcome(subject) for subject in found if subject.name == "torch"}
    worst = {}
    for index, subject in enumerate(found):
        if index in failed:
            continue
        both = zip(outcome(subject), expected[subject.operation], strict=True)
        for direction, (results, of_torch) in zip(("forward", "backward"), both, strict=True):
            worst[index, direction] = max(
                ((a - b).abs().max() / (TOLERANCE * b.abs().max())).item()
                for a, b in zip(results, of_torch, strict=True)
            )
    return worst


def measure(found, calls, rounds, synchronize):
    """{(subject's index, direction): seconds}, and {subject's index: why it does not run}."""
    times, failed = {}, {}
    for index, subject in enumerate(found):
        try:
            backward_seconds(subject, 10, synchronize)  # warms up, compiles
        except Exception as error:
            if subject.name == OURS:
                raise
            failed[index] = first_line(error)
    running = [index for index in range(len(found)) if index not in failed]
    for number in track(range(rounds), "rounds", console=Console(stderr=True)):
        for index in timing.order(running, number):
            for direction, seconds in (
                ("forward", forward_seconds),
                ("backward", backward_seconds),
            ):
                times.setdefault((index, direction), []).append(
                    seconds(found[index], calls, synchronize)
                )
    return {key: statistics.median(values) for key, values in times.items()}, failed


def judge(found, times, failed, worst):
    """Results, ours held to torch's time of the same operation and direction."""
    torch_times = {
        (found[index].operation, direction): seconds
        for (index, direction), seconds in times.items()
        if found[index].name == "torch"
    }
    results = []
    for index, subject in enumerate(found):
        for direction, limit in (("forward", FORWARD_LIMIT), ("backward", BACKWARD_LIMIT)):
            base = Result(
                subject.operation, direction, ROWS, COLS, "fp32", subject.name, None,
                limit * torch_times[subject.operation, direction], study="host",
                note=failed.get(index, ""),
            )  # fmt: skip
            seconds = times.get((index, direction))
            error = worst.get((index, direction))
            results.append(dataclasses.replace(base, seconds=seconds, error=error))
    return results


def run(options):
    works = torch.cuda.is_available() and fn.build_info()["cuda"] is not None
    device = options.device or ("cuda" if works else "cpu")
    options.peers = list(dict.fromkeys(["torch", *options.peers]))
    functions, absent = commandline.load_peers("functions", options)
    found = subjects({OURS: ours.functions(), **functions}, device)
    threads = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(1)  # waiting for a second one is no overhead of a call
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    times, failed = measure(found, options.calls, options.rounds, synchronize)
    worst = errors(found, failed)
    torch.set_num_threads(threads)
    facts = [
        ("suite", "overhead"),
        *(environment.facts() if device == "cuda" else environment.cpu_facts()),
        *peers.facts(list(functions), absent),
    ]
    if device == "cpu":
        facts.append(("note", "on a CPU, one thread, the operator's own work is in each time"))
    for name, value in facts:
        print(f"{name}: {value}", flush=True)
    judged = judge(found, times, failed, worst)
    report.write("overhead", judged, facts, options.out)
    return 1 if any(r.ours and not r.correct for r in judged) else 0
