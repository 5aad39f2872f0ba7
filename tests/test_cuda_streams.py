"""Streams, graph capture and devices: the library runs where torch says, in torch's order."""

import os
import threading
import time

import pytest
import torch
from harness import (
    apply,
    each_kind,
    forward_backward,
    full_form,
    randn,
    random_input,
    random_parameters,
    returns_at_once,
    same_bits,
    waits_are_errors,
)

pytestmark = pytest.mark.cuda

BF16, FP32 = torch.bfloat16, torch.float32
KINDS = ["layer", "rms"]
SHAPES = [(7, 96), (600, 1000), (300, 4096), (40, 50257), (600, 40000)]


def assert_same_bits(results, expected):
    (y, grads), (expected_y, expected_grads) = results, expected
    assert same_bits(y, expected_y)
    for name in expected_grads:
        assert same_bits(grads[name], expected_grads[name]), f"d{name}"


@each_kind
def test_side_stream(kind, generator):
    """Work queued on the current stream comes first: x is written there after a long wait, and
    read there."""
    for rows, cols in SHAPES:
        form = full_form(kind, BF16)
        weight, bias = random_parameters(generator, form, [cols])
        x, dy = random_input(generator, rows, cols, BF16), randn(generator, rows, cols, dtype=BF16)
        expected = forward_backward(apply, form, x, [cols], weight, bias, dy)
        late_x, late_dy = torch.zeros_like(x), torch.zeros_like(dy)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)  # cycles: 25 ms or more
            late_x.copy_(x)
            late_dy.copy_(dy)
            results = forward_backward(apply, form, late_x, [cols], weight, bias, late_dy)
        stream.synchronize()
        assert_same_bits(results, expected)


@each_kind
def test_captured_training_step(kind, generator):
    """A graph of forward and backward, replayed with new data in the same memory."""
    for rows, cols in SHAPES:
        form = full_form(kind, BF16)
        parameters = random_parameters(generator, form, [cols])
        leaves = [p.requires_grad_() for p in parameters if p is not None]
        x = random_input(generator, rows, cols, BF16).requires_grad_()
        dy = randn(generator, rows, cols, dtype=BF16)

        def step(x=x, dy=dy, cols=cols, leaves=leaves, parameters=parameters, form=form):
            y = apply(form, x, [cols], *parameters)
            return y, torch.autograd.grad(y, [x, *leaves], dy)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, grads = step()
        for _ in range(3):
            with torch.no_grad():
                x.copy_(random_input(generator, rows, cols, BF16))
                dy.copy_(randn(generator, rows, cols, dtype=BF16))
            graph.replay()
            expected_y, expected_grads = step()
            assert same_bits(y.detach(), expected_y.detach()), f"{rows} x {cols}: y"
            for ours, eager in zip(grads, expected_grads, strict=True):
                assert same_bits(ours, eager), f"{rows} x {cols}: gradients"


@each_kind
def test_no_wait_for_the_gpu(kind, generator):
    """A step with the flag off queues its work and returns: nothing stops the host."""
    form = full_form(kind, BF16)
    weight, bias = random_parameters(generator, form, [1000])
    x, dy = random_input(generator, 600, 1000, BF16), randn(generator, 600, 1000, dtype=BF16)
    forward_backward(apply, form, x, [1000], weight, bias, dy)
    with waits_are_errors():
        assert returns_at_once(lambda: forward_backward(apply, form, x, [1000], weight, bias, dy))


@pytest.mark.parametrize("memory_efficient", [False, True], ids=["", "memory_efficient"])
def test_threads_with_different_batch_sizes(memory_efficient, generator):
    """Each on a stream of its own. The plan, and with it the shared memory that a kernel is given,
    depends on the number of rows; FUSED_NORM_TEST_SECONDS says how long."""
    seconds = float(os.environ.get("FUSED_NORM_TEST_SECONDS", 3))
    cases = []
    for kind in KINDS:
        for cols in (1000, 4096, 8192, 16384, 40000):
            form = full_form(kind, BF16, memory_efficient=memory_efficient)
            parameters = random_parameters(generator, form, [cols], recoverable=True)
            for rows in (7, 96, 700, 3000):
                data = (
                    random_input(generator, rows, cols, BF16),
                    randn(generator, rows, cols).to(BF16),
                )
                cases.append((form, cols, parameters, *data))
    end, failures = time.monotonic() + seconds, []

    def work(number):
        try:
            expected = {}
            with torch.cuda.stream(torch.cuda.Stream()):
                for turn in range(10**9):
                    at = (turn * (2 * number + 1) + number) % len(cases)
                    form, cols, (weight, bias), x, dy = cases[at]
                    results = forward_backward(apply, form, x, [cols], weight, bias, dy)
                    if at in expected:
                        assert_same_bits(results, expected[at])
                    expected.setdefault(at, results)
                    if time.monotonic() > end:
                        break
        except Exception as error:
            failures.append(error)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    torch.cuda.synchronize()


def test_errors_of_others_are_left_alone(generator):
    """An error of CUDA that somebody else has not asked for yet."""
    form = full_form("layer", BF16)
    weight, bias = random_parameters(generator, form, [1000])
    x, dy = random_input(generator, 600, 1000, BF16), randn(generator, 600, 1000, dtype=BF16)
    forward_backward(apply, form, x, [1000], weight, bias, dy)
    runtime = torch.cuda.cudart()
    assert int(runtime.cudaHostUnregister(dy.data_ptr())) != 0  # which is no host memory
    apply(form, x, [1000], weight, bias)
    with pytest.raises(RuntimeError, match="CUDA"):  # torch's kernels ask for it
        torch.ones(3, device="cuda").mul_(2)
    torch.ones(3, device="cuda").mul_(2)


@pytest.mark.multi_gpu
@pytest.mark.parametrize(
    ("memory_efficient", "zero_every"),
    [(False, None), (True, None), (True, 7)],
    ids=["", "memory_efficient", "memory_efficient, some weights zero"],
)
@each_kind
def test_tensors_of_a_device_that_is_not_current(kind, memory_efficient, zero_every, generator):
    for rows, cols in SHAPES:
        form = full_form(kind, BF16, memory_efficient=memory_efficient)
        weight, bias = random_parameters(generator, form, [cols], recoverable=True)
        if zero_every:
            weight[::zero_every] = 0
        x, dy = random_input(generator, rows, cols, BF16), randn(generator, rows, cols, dtype=BF16)
        expected = forward_backward(apply, form, x, [cols], weight, bias, dy)
        there = [None if t is None else t.to("cuda:1") for t in (x, weight, bias, dy)]
        torch.cuda.synchronize("cuda:1")
        assert torch.cuda.current_device() == 0
        y, grads = forward_backward(apply, form, there[0], [cols], *there[1:])
        assert torch.cuda.current_device() == 0
        assert y.device == there[0].device
        home = {name: grad.to("cuda:0") for name, grad in grads.items()}
        assert_same_bits((y.to("cuda:0"), home), expected)


@pytest.mark.multi_gpu
@each_kind
def test_the_stream_of_the_tensors_device(kind, generator):
    """The stream that is current on the tensor's device orders the work, not that of the current
    device."""
    form = full_form(kind, FP32)
    weight, bias = random_parameters(generator, form, [1000])
    x, dy = random_input(generator, 600, 1000, FP32), randn(generator, 600, 1000)
    expected = forward_backward(apply, form, x, [1000], weight, bias, dy)
    there = [None if t is None else t.to("cuda:1") for t in (x, weight, bias, dy)]
    late = torch.zeros_like(there[0])
    torch.cuda.synchronize("cuda:1")
    stream = torch.cuda.Stream("cuda:1")
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(there[0])
        with torch.cuda.device(0):
            y, grads = forward_backward(apply, form, late, [1000], *there[1:])
    stream.synchronize()
    assert_same_bits((y.to("cuda:0"), {n: g.to("cuda:0") for n, g in grads.items()}), expected)
