"""GPU time of an operation, and the copy bandwidth it is compared with."""

import collections
import itertools
import math
import statistics
import time

import torch

from benchmarks import sensors

AHEAD = 12_000_000  # cycles that the host is given, of about 0.5 nanoseconds each


def copy_bandwidth(copies=20):
    """Bytes read plus bytes written a second by a 2 GiB device copy.

    The copy is launched, not captured: in a CUDA graph it becomes a memcpy node, which is slower.
    """
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").fill_(1)
    target = torch.empty_like(source)
    seconds = median_seconds(lambda: target.copy_(source), copies)
    return 2 * source.nbytes / seconds


def graph_time(call, inputs, calls, replays, between=None):
    """Median GPU seconds of one `call(inputs[i])`, over replays of a CUDA graph of `calls` calls.

    With `between`, that is called before each of them, and what it takes by itself is taken off.
    The calls walk through `inputs` again and again, and the results of the last `len(inputs)` calls
    stay alive, so that reads and writes both rotate through memory: choose enough inputs to leave
    the L2 cache behind. Everything that a call launches is timed. Returns (seconds, outputs) with
    outputs[i] the result for inputs[i]; `calls` must be a multiple of `len(inputs)`.
    """
    assert calls % len(inputs) == 0
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # loads kernels and libraries, which capture forbids
            call(inputs[0])
            if between:
                between()
    torch.cuda.synchronize()

    graph = torch.cuda.CUDAGraph()
    outputs = collections.deque(maxlen=len(inputs))
    with torch.cuda.graph(graph, stream=stream):
        for i in range(calls):
            if between:
                between()
            outputs.append(call(inputs[i % len(inputs)]))
    seconds = median_seconds(graph.replay, replays) / calls
    if between:
        seconds -= graph_time(lambda _: between(), [None], calls, replays)[0]
    return seconds, list(outputs)


def graph_time_apart(call, inputs, calls, replays):
    """As above, each call after a kernel of torch's on a few megabytes, as in a model: launching
    then takes as long as after any other kernel, and does not overlap the call before."""
    scratch = torch.zeros(2**20, device="cuda")
    return graph_time(call, inputs, calls, replays, lambda: scratch.add_(1))


def median_seconds(launch, repeats):
    for _ in range(3):
        launch()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        launch()
        event.record()
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) for start, end in itertools.pairwise(events)]
    return statistics.median(times) * 1e-3


def turn(call, count, sensor, samples, ahead=AHEAD):
    """(GPU seconds, host seconds) of one of so many calls; samples are taken while they run. The
    host is `ahead` cycles ahead of the GPU from the beginning, as in training."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(ahead)
    start.record()
    began = time.perf_counter()
    for _ in range(count):
        call()
    host = time.perf_counter() - began
    end.record()
    while not end.query():
        samples.append(sensor.sample())
        time.sleep(0.003)
    return start.elapsed_time(end) / count * 1e-3, host / count


def captured(call, seconds=1e-3):
    """(the replay of a CUDA graph of some calls, which take about so many seconds if launched;
    their number). Not on the default stream."""
    graph, number = torch.cuda.CUDAGraph(), math.ceil(seconds / median_seconds(call, 3))
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(number):
            call()
    return graph.replay, number


def order(names, number):
    """The names in the order of a round: who is first changes from round to round, and so does the
    direction."""
    at = number // 2 % len(names)
    return (names[at:] + names[:at])[:: -1 if number % 2 else 1]


def in_turns(calls, rounds, seconds, sensor, ahead=AHEAD):
    """{name: {quantity: number}}: the turns of the calls, of about so many seconds, alternate."""
    names = list(calls)
    once = {name: turn(call, 3, sensor, [], ahead)[0] for name, call in calls.items()}
    counts = {name: max(2, round(seconds / once[name])) for name in names}
    # The chip is warm from here on.
    turn(calls[names[0]], max(1, int(0.1 / once[names[0]])), sensor, [])
    times, samples = {name: [] for name in names}, {name: [] for name in names}
    for number in range(rounds):
        for name in order(names, number):
            times[name].append(turn(calls[name], counts[name], sensor, samples[name], ahead))
    found = {}
    for name in names:
        gpu = [pair[0] for pair in times[name]]
        quartiles = statistics.quantiles(gpu, method="inclusive") if rounds > 1 else gpu * 3
        found[name] = {
            "seconds": statistics.median(gpu),
            "quartile 1": quartiles[0],
            "quartile 3": quartiles[2],
            "host seconds": statistics.median(pair[1] for pair in times[name]),
            **(sensors.medians(samples[name]) if samples[name] else {}),
        }
        if "torch" in calls:
            ratios = (a / b[0] for a, b in zip(gpu, times["torch"], strict=True))
            found[name]["change"] = statistics.median(ratios) - 1
    return found
