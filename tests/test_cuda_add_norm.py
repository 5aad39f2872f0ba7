"""The kernels that add a residual: every boundary of their plan, many rows, and equal bits."""

import pytest
import torch
from harness import (
    SUMS,
    Form,
    Verdict,
    add_forward_backward,
    apply_add,
    check_add_call,
    each_flag,
    each_kind,
    place,
    randn,
    random_input,
    random_parameters,
    same_bits,
)

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("give_memory_back")]

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
each_sum = pytest.mark.parametrize("sums", SUMS, ids=lambda s: f"{s[1]} to {s[0]}")
# Where threads, packs and tier of the forward plan change, at four and at eight elements a pack.
MIDDLES = [2**k for k in range(2, 18)] + [3 * 2**k for k in range(4, 16)]
COLS = sorted({m + s for m in MIDDLES for s in (-4, -1, 0, 1, 8)} - {0})
SHAPES = [
    (4096, 96),
    (4097, 1000),
    (1000, 4096),
    (300, 12289),
    (33, 50257),
    (100003, 64),
    (3, 2**18),
]


def full_form(kind, sums, memory_efficient=False):
    bias = sums[0] if kind == "layer" else None
    return Form(kind, *sums, weight=sums[0], bias=bias, memory_efficient=memory_efficient)


def draw(generator, form, rows, cols):
    """(input, residual, weight, bias, dy, dresidual)"""
    return (
        random_input(generator, rows, cols, form.y),
        random_input(generator, rows, cols, form.x),
        *random_parameters(generator, form, [cols], recoverable=True),
        randn(generator, rows, cols, dtype=form.y),
        randn(generator, rows, cols, dtype=form.x),
    )


def run(form, x, residual, weight, bias, dy, dresidual):
    """{what: tensor} of one call, forward and backward."""
    y, total, grads = add_forward_backward(
        form, x, residual, [x.shape[-1]], weight, bias, dy, dresidual
    )
    return {"y": y, "residual_out": total} | grads


@each_sum
@each_kind
def test_row_lengths_around_every_boundary(kind, sums, generator):
    verdict = Verdict()
    for cols in COLS:
        for memory_efficient in (False, True):
            form = full_form(kind, sums, memory_efficient)
            ratios = check_add_call(form, *draw(generator, form, 5, cols))
            verdict.add(f"{form}, 5 x {cols}", ratios)
    verdict.check()


@each_sum
@each_kind
def test_many_rows(kind, sums, generator):
    verdict = Verdict()
    for rows, cols in [
        *SHAPES,
        (1000003, 8),
        (300007, 33),
        (70001, 100),
        (2000011, 1),
        (150001, 65),
        (20001, 513),
    ]:
        form = full_form(kind, sums)
        verdict.add(
            f"{form}, {rows} x {cols}", check_add_call(form, *draw(generator, form, rows, cols))
        )
    verdict.check()


@each_flag
@pytest.mark.parametrize("sums", [(BF16, BF16), (FP32, BF16), (FP32, FP32)], ids=str)
@each_kind
def test_repeats(kind, sums, memory_efficient, generator):
    """Also while another stream keeps the GPU busy, so that blocks run in another order."""
    form = full_form(kind, sums, memory_efficient)
    noise = torch.randn(2048, 2048, device="cuda")
    side = torch.cuda.Stream()
    for rows, cols in SHAPES:
        arguments = draw(generator, form, rows, cols)
        first = run(form, *arguments)
        for repeat in range(8):
            with torch.cuda.stream(side):
                for _ in range(repeat % 3):
                    noise @ noise
            for name, tensor in run(form, *arguments).items():
                assert same_bits(tensor, first[name]), f"{rows} x {cols}, repeat {repeat}: {name}"


ROW_COLS = [1, 3, 31, 64, 96, 257, 768, 1000, 1025, 4095, 4096, 8193, 12288, 32768, 50257, 140000]
OF_A_ROW = ("y", "residual_out", "input", "residual")


@each_flag
@each_sum
@each_kind
def test_a_row_among_others(kind, sums, memory_efficient, generator):
    form = full_form(kind, sums, memory_efficient)
    for cols in ROW_COLS:
        weight, bias = random_parameters(generator, form, [cols], recoverable=True)
        dtypes = (form.y, form.x, form.y, form.x)
        row = [random_input(generator, 1, cols, dtype) for dtype in dtypes]
        alone = run(form, *row[:2], weight, bias, *row[2:])
        for rows in (2, 33, 1024 if cols <= 12288 else 300):
            indices = [i for i in (0, 1, 3, 7, 31, 131, 264, 767) if i < rows] + [rows - 1]
            many = [randn(generator, rows, cols, dtype=dtype) for dtype in dtypes]
            for whole, part in zip(many, row, strict=True):
                whole[indices] = part
            results = run(form, *many[:2], weight, bias, *many[2:])
            for name in OF_A_ROW:
                for index in indices:
                    assert same_bits(results[name][index], alone[name][0]), (
                        f"{form}, {cols} columns, row {index} of {rows}: {name}"
                    )


@each_flag
@each_sum
@each_kind
def test_a_row_at_any_alignment(kind, sums, memory_efficient, generator):
    """At eight base offsets, of all tensors and of each alone, and at any row pitch."""
    form = full_form(kind, sums, memory_efficient)
    for cols in ROW_COLS:
        arguments = draw(generator, form, 5, cols)
        expected = run(form, *arguments)
        for offset in range(1, 8):
            moved = [None if t is None else place(t, offset) for t in arguments]
            choices = {"all": moved}
            for i, name in enumerate(("input", "residual", "weight", "bias", "dy", "dresidual")):
                one = list(arguments)
                one[i] = moved[i]
                choices[name] = one
            for i, name in enumerate(("input", "residual")):
                pitched = list(arguments)
                wide = torch.empty(5, cols + offset, dtype=arguments[i].dtype, device="cuda")
                pitched[i] = wide[:, offset:].copy_(arguments[i])
                choices[f"pitch of {name}"] = pitched
            for label, parts in choices.items():
                results = run(form, *parts)
                for name in OF_A_ROW:
                    assert same_bits(results[name], expected[name]), (
                        f"{form}, {cols} columns, {label} at {offset}: {name}"
                    )


@each_kind
def test_more_than_2_to_the_31_elements(kind, generator):
    """Of one row again and again, which takes little memory to read: each gives what it gives
    alone."""
    form = full_form(kind, (BF16, BF16))
    cols = 4096
    x, residual, weight, bias, dy, dresidual = draw(generator, form, 1, cols)
    alone = run(form, x, residual, weight, bias, dy, dresidual)
    rows = 2**31 // cols + 5
    many = [t.expand(rows, cols) for t in (x, residual)]
    args = [weight, bias, [cols], form.eps, 0.0, kind == "rms", None]
    with torch.no_grad():
        y, total, mean, rstd = torch.ops.fused_norm.norm_forward(many[0], *args, many[1])
        for name, tensor in (("y", y), ("residual_out", total)):
            assert bool((tensor == alone[name]).all()), name
        del y
        saved_mean = None if kind == "rms" else mean
        options = ([cols], 0.0, kind == "rms", False, BF16, [True, False, False], None, None)
        dx, _, _ = torch.ops.fused_norm.norm_backward(
            dy.expand(rows, cols), total, saved_mean, rstd, weight, bias, *options, total
        )
        (expected, _, _) = torch.ops.fused_norm.norm_backward(
            dy, alone["residual_out"], *(t if t is None else t[:1] for t in (saved_mean, rstd)),
            weight, bias, *options, alone["residual_out"],
        )  # fmt: skip
        assert bool((dx == expected).all())


@each_flag
@each_kind
def test_captured_training_step(kind, memory_efficient, generator):
    """Forward and backward in a CUDA graph, replayed on other numbers."""
    form = full_form(kind, (FP32, BF16), memory_efficient)
    static = draw(generator, form, 64, 256)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run(form, *static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run(form, *static)
    for _ in range(3):
        numbers = draw(generator, form, 64, 256)
        for to, values in zip(static, numbers, strict=True):
            if to is not None:
                to.copy_(values)
        graph.replay()
        torch.cuda.synchronize()
        expected = run(form, *numbers)
        for name, tensor in results.items():
            # A captured call that knows nothing of the weights may save the sum.
            tolerance = 2**-6 if memory_efficient else 0
            scale = expected[name].abs().max().item()
            torch.testing.assert_close(
                tensor, expected[name], rtol=tolerance, atol=tolerance * scale
            )


def test_two_calls_on_two_streams(generator):
    form = full_form("rms", (BF16, BF16))
    calls = [draw(generator, form, 2000, 4096) for _ in range(2)]
    expected = [run(form, *arguments) for arguments in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    for _ in range(10):
        results = []
        for stream, arguments in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                results.append(run(form, *arguments))
        torch.cuda.synchronize()
        for ours, right in zip(results, expected, strict=True):
            assert all(same_bits(ours[name], right[name]) for name in right)


@each_sum
@each_kind
def test_inference_gives_the_same_bits_as_training(kind, sums, generator):
    form = full_form(kind, sums)
    for rows, cols in [(7, 96), (512, 4096), (3, 50257)]:
        x, residual, weight, bias, dy, dresidual = draw(generator, form, rows, cols)
        with torch.no_grad():
            quiet = apply_add(form, x, residual, [cols], weight, bias)
        results = run(form, x, residual, weight, bias, dy, dresidual)
        assert same_bits(quiet[0], results["y"]) and same_bits(quiet[1], results["residual_out"])


@each_kind
def test_one_kernel_forward_and_none_more_backward(kind, generator):
    """No addition of its own, in either direction."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    form = full_form(kind, (FP32, BF16))
    arguments = draw(generator, form, 512, 4096)

    def kernels(call):
        call()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            call()
            torch.cuda.synchronize()
        return [e.name for e in profiler.events() if e.device_type == DeviceType.CUDA]

    names = kernels(lambda: run(form, *arguments))
    assert sum("norm_forward" in name for name in names) == 1
    # The gradient of the 16-bit input is a copy in its dtype; torch adds nothing.
    assert not any("add" in name.lower() and "norm_forward" not in name for name in names), names
