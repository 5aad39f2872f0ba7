"""GPU time of an operation, and the copy bandwidth it is compared with."""

import collections
import itertools
import statistics

import torch


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
