"""Cases measured on a CPU, and made-up results, for the tests of the benchmarks."""

from benchmarks import measure, results

BUDGET = measure.Budget(footprint=1, seconds=1e-9, replays=1)


def one_call_each(call, inputs, calls, replays):
    """Stands in for the GPU timer."""
    assert calls % len(inputs) == 0
    return 1e-5, [call(given) for given in inputs]


def measured(case, *implementations):
    """A result for each implementation, right or not; its time means nothing."""
    job = measure.Job(case, implementations)
    return list(measure.measure(job, 4e12, BUDGET, time=one_call_each, device="cpu"))


def result(peer, seconds, **changes):
    fields = dict(operation="LayerNorm", direction="forward", rows=8, cols=16, dtype="bf16")
    fields |= dict(peer=peer, ideal=9e-6, target=10e-6, seconds=seconds, error=0.5, bytes=36)
    return results.Result(**fields | changes)
