"""What only the CPU path needs: threads, and a bound against gross slowness."""

import time

import pytest
import softmax_harness as softmax
import torch
import torch.nn.functional as F
from harness import Form, Verdict, apply, apply_torch, forward_backward, randn, same_bits

import fused_norm.functional as fn

FORMS = [(kind, efficient) for kind in ("layer", "rms") for efficient in (False, True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "memory_efficient"), FORMS)
def test_same_bits_on_any_number_of_threads(kind, memory_efficient, dtype, generator):
    form = Form(kind, dtype, dtype, weight=dtype, memory_efficient=memory_efficient)
    x, dy = randn(generator, 700, 300, dtype=dtype), randn(generator, 700, 300, dtype=dtype)
    weight = randn(generator, 300).abs().add(0.5).to(dtype)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            y, grads = forward_backward(apply, form, x, [300], weight, None, dy)
            results.append([y, *grads.values()])
    finally:
        torch.set_num_threads(threads)
    for first, second, third in zip(*results, strict=True):
        assert same_bits(first, second) and same_bits(first, third)


@pytest.mark.parametrize("memory_efficient", [False, True])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_squares_that_overflow_fp32(kind, memory_efficient, generator):
    """A row of 1e20 gives what the same row of 1 gives, and its gradient is 1e-20 of that one's."""
    form = Form(kind, torch.float32, torch.float32, eps=0.0, memory_efficient=memory_efficient)
    x, dy = randn(generator, 6, 300), randn(generator, 6, 300)
    y, grads = forward_backward(apply, form, x, [300], None, None, dy)
    large_y, large_grads = forward_backward(apply, form, x * 1e20, [300], None, None, dy)
    torch.testing.assert_close(large_y, y)
    torch.testing.assert_close(large_grads["x"] * 1e20, grads["x"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])
def test_softmax_over_columns_has_the_bits_of_rows(log, dtype, generator):
    """However many columns lie side by side."""
    form = softmax.Form(dtype, dtype, log=log, dim=0)
    x, dy = randn(generator, 700, 130, dtype=dtype), randn(generator, 700, 130, dtype=dtype)
    expected = softmax.forward_backward(form, x, dy)
    for first, last in [(0, 1), (5, 6), (64, 67), (100, 130), (1, 130)]:
        part = slice(first, last)
        results = softmax.forward_backward(form, x[:, part], dy[:, part])
        for ours, whole in zip(results, expected, strict=True):
            assert same_bits(ours, whole[:, part])


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])
def test_fp64_softmax_of_equal_numbers(log, dim, generator):
    """Whose sums round alike, term for term."""
    form = softmax.Form(torch.float64, torch.float64, log=log, dim=dim)
    verdict = Verdict()
    for size in (511, 3000, 50000):
        numbers = [randn(generator, 1, 3, dtype=torch.float64).expand(size, 3) for _ in range(2)]
        x, dy = (n if dim == 0 else n.T for n in numbers)
        verdict.add(f"{form} of {size}", softmax.check_call(form, x, dy))
    verdict.check()


def fastest(call, repeats=7):
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_not_grossly_slower_than_torch(dtype, generator):
    """A backstop, five times looser than the 1.5 and 3 x that `python -m benchmarks cpu`
    measures: machines that run tests are busy. The fastest of seven, and one thread, as a crowded
    machine punishes waiting for a second one."""
    x, dy = randn(generator, 1024, 1024, dtype=dtype), randn(generator, 1024, 1024, dtype=dtype)
    weight, bias = torch.ones(1024, dtype=dtype), torch.zeros(1024, dtype=dtype)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for efficient, limit in ((False, 7.5), (True, 15)):
            form = Form("layer", dtype, dtype, memory_efficient=efficient)
            ours = fastest(lambda f=form: forward_backward(apply, f, x, [1024], weight, bias, dy))
            theirs = fastest(
                lambda f=form: forward_backward(apply_torch, f, x, [1024], weight, bias, dy)
            )
            assert ours <= limit * theirs
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_softmax_same_bits_on_any_number_of_threads(dtype, generator):
    x, dy = randn(generator, 70, 300, 10, dtype=dtype), randn(generator, 70, 300, 10, dtype=dtype)
    calls = [lambda x, dim=dim: fn.softmax(x, dim) for dim in range(3)]
    calls += [lambda x, dim=dim: fn.log_softmax(x, dim) for dim in range(3)]
    calls.append(lambda x: fn.scaled_masked_softmax(x, x[0].detach() > 0, 0.5, True))
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            leaf = x.clone().requires_grad_()
            outputs = [call(leaf) for call in calls]
            grads = [torch.autograd.grad(y, leaf, dy)[0] for y in outputs]
            results.append([y.detach() for y in outputs] + grads)
    finally:
        torch.set_num_threads(threads)
    for first, second, third in zip(*results, strict=True):
        assert same_bits(first, second) and same_bits(first, third)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_not_grossly_slower_than_torch(name, dtype, generator):
    """A backstop, three times looser than the 1.5 x torch's that it keeps on a quiet machine."""
    x = randn(generator, 1024, 1024, dtype=dtype)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ours = fastest(lambda: getattr(fn, name)(x, -1))
        theirs = fastest(lambda: getattr(F, name)(x, -1))
        assert ours <= 4.5 * theirs
    finally:
        torch.set_num_threads(threads)
