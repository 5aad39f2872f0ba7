"""Equal bits: over repeats, and for a row whatever comes with it, wherever it lies."""

import dataclasses

import pytest
import torch
from harness import (
    apply,
    each_kind,
    forward_backward,
    full_form,
    place,
    randn,
    random_input,
    random_parameters,
    same_bits,
)

import fused_norm as fn

pytestmark = pytest.mark.cuda

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
# Short rows, a warp, a block, odd lengths, the longest a block holds, and rows that are streamed.
COLS = [1, 3, 31, 64, 96, 126, 255, 256, 257, 758, 768, 1000, 1023, 1025, 3334, 4095, 4096, 8192]
COLS += [8193, 12288, 16386, 20002, 32768, 32769, 50257, 65536, 65537, 98304, 131072]
ROW_INDICES = [0, 1, 2, 3, 5, 7, 8, 15, 31, 64, 127, 131, 264, 511, 767, 1023]
OFFSETS = range(8)


@pytest.mark.parametrize("memory_efficient", [False, True], ids=["", "memory_efficient"])
@pytest.mark.parametrize("dtype", [BF16, FP32, FP64], ids=str)
@each_kind
def test_twenty_repeats(kind, dtype, memory_efficient, generator):
    """Also while another stream keeps the GPU busy, so that blocks run in another order."""
    form = full_form(kind, dtype, memory_efficient=memory_efficient)
    noise = torch.randn(2048, 2048, device="cuda")
    side = torch.cuda.Stream()
    shapes = [
        (5, 7),
        (4096, 96),
        (4097, 1000),
        (1000, 4096),
        (300, 12289),
        (33, 50257),
        (50, 65536),
        (300, 8193),
        (90, 65537),
        (30, 98304),
        (500, 40000),
        (200, 4096),
        (100003, 64),
        (3, 1000003),
    ]
    for rows, cols in shapes:
        weight, bias = random_parameters(generator, form, [cols], recoverable=True)
        x, dy = (
            random_input(generator, rows, cols, dtype),
            randn(generator, rows, cols, dtype=dtype),
        )
        first = forward_backward(apply, form, x, [cols], weight, bias, dy)
        for repeat in range(20):
            with torch.cuda.stream(side):
                for _ in range(repeat % 3):
                    noise @ noise
            y, grads = forward_backward(apply, form, x, [cols], weight, bias, dy)
            assert same_bits(y, first[0]), f"{rows} x {cols}, repeat {repeat}: y"
            for name, grad in grads.items():
                assert same_bits(grad, first[1][name]), f"{rows} x {cols}, repeat {repeat}: d{name}"


@pytest.mark.parametrize("memory_efficient", [False, True], ids=["", "memory_efficient"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64], ids=str)
@each_kind
def test_a_row_among_others(kind, dtype, memory_efficient, generator):
    """y and dx of a row are the same alone, among 2 to 4097 rows, and at sixteen row indices."""
    form = full_form(kind, dtype, memory_efficient=memory_efficient)
    for cols in COLS:
        weight, bias = random_parameters(generator, form, [cols], recoverable=True)
        x, dy = random_input(generator, 1, cols, dtype), randn(generator, 1, cols, dtype=dtype)
        alone, alone_grads = forward_backward(apply, form, x, [cols], weight, bias, dy)
        for rows in (2, 33, 1024, 4097 if cols <= 12288 else 1024):
            indices = [index for index in ROW_INDICES if index < rows] + [rows - 1]
            many, many_dy = (
                randn(generator, rows, cols, dtype=dtype),
                randn(generator, rows, cols, dtype=dtype),
            )
            many[indices], many_dy[indices] = x, dy
            y, grads = forward_backward(apply, form, many, [cols], weight, bias, many_dy)
            for index in indices:
                where = f"{form}, {cols} columns, row {index} of {rows}"
                assert same_bits(y[index], alone[0]), f"{where}: y"
                assert same_bits(grads["x"][index], alone_grads["x"][0]), f"{where}: dx"


@pytest.mark.parametrize(
    ("x_dtype", "y_dtype", "weight_dtype"),
    [(FP16, FP32, FP16), (BF16, BF16, FP32), (FP32, BF16, FP32), (FP32, FP32, None)],
    ids=str,
)
@each_kind
def test_a_row_among_others_in_other_forms(kind, x_dtype, y_dtype, weight_dtype, generator):
    """Dtypes of their own for output and parameters: forward, whose threads the number of rows
    chooses."""
    rms = kind == "rms"
    for cols in (520, 776, 1000, 1026, 3333, 4096):
        x = randn(generator, 3000, cols, dtype=x_dtype)
        weight = bias = None
        if weight_dtype is not None:
            weight = randn(generator, cols, dtype=weight_dtype)
            bias = None if rms else randn(generator, cols, dtype=weight_dtype)
        many, alone = (
            torch.ops.fused_norm.norm_forward(rows, weight, bias, [cols], 1e-5, 0.0, rms, y_dtype)
            for rows in (x, x[-1:])
        )
        for of_many, of_one in zip(many, alone, strict=True):  # y, mean, rstd
            if of_one.numel() > 0:
                assert same_bits(of_many[-1:], of_one), f"{cols} columns"


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@each_kind
def test_rows_by_the_thousand(kind, dtype, generator):
    """Forward: so many that other lanes share a row than of a few, and of rows that lie across
    pack boundaries, or that tiles of them (of the longest, slices) are normalized in place; among
    them rows of zeros, of -0, of one value, far from zero, with Inf."""
    rms = kind == "rms"
    whole_packs = (64, 104, 128, 192, 232, 256, 400, 512)
    others = (9, 23, 33, 65, 70, 97, 126, 129, 255, 257, 258, 333, 513, 1022, 1023, 1025, 2047)
    others += (4097, 8193, 16386, 32769, 65537)
    for cols in (*whole_packs, *others):
        rows = min(80001 if cols > 60 else 300005, 2**27 // cols)
        x = randn(generator, rows, cols, dtype=dtype)
        x[1], x[2], x[3], x[4], x[5, -1] = 0.0, -0.0, 0.1, x[4] + 1000, float("inf")
        weight, bias = randn(generator, cols, dtype=dtype), randn(generator, cols, dtype=dtype)
        call = weight, None if rms else bias, [cols], 1e-5, 0.0, rms, dtype
        whole = torch.ops.fused_norm.norm_forward(x, *call)
        for name, some, chosen in (
            ("few", x[:7], slice(7)),
            ("last", x[-3:], slice(-3, None)),
            ("misaligned", place(x, 1), slice(None)),
        ):
            part = torch.ops.fused_norm.norm_forward(some, *call)
            for of_whole, of_part in zip(whole, part, strict=True):  # y, mean, rstd
                if of_part.numel() > 0:
                    assert same_bits(of_whole[chosen], of_part), f"{cols} columns, {name}"


@pytest.mark.parametrize("memory_efficient", [False, True], ids=["", "memory_efficient"])
@pytest.mark.parametrize(
    ("dtype", "y_dtype"), [(BF16, BF16), (FP16, FP16), (FP32, FP32), (FP32, BF16)], ids=str
)
@each_kind
def test_gradients_of_short_rows_by_the_ten_thousand(
    kind, dtype, y_dtype, memory_efficient, generator
):
    """Backward of rows that lanes share, so many that each has one after the other: dx is that of a
    few of them, and everything is the same where the rows start anywhere, or lie apart."""
    form = dataclasses.replace(full_form(kind, dtype, memory_efficient=memory_efficient), y=y_dtype)
    whole_packs = (56, 64, 72, 96, 128, 144, 192, 256, 272, 320, 384, 400, 544)
    for cols in (*whole_packs, 17, 33, 65, 126, 129, 161, 225, 257, 300, 333, 513):
        rows = 2**24 // cols + 5
        x = random_input(generator, rows, cols, dtype)
        dy = randn(generator, rows, cols, dtype=y_dtype)
        weight, bias = random_parameters(generator, form, [cols], recoverable=True)
        whole = forward_backward(apply, form, x, [cols], weight, bias, dy)[1]
        for name, chosen in (("few", slice(7)), ("last", slice(-3, None))):
            part = forward_backward(apply, form, x[chosen], [cols], weight, bias, dy[chosen])[1]
            assert same_bits(part["x"], whole["x"][chosen]), f"{cols} columns, {name}"
        apart = torch.empty(rows, cols + 3, dtype=dtype, device="cuda")[:, 2:-1]
        for name, moved in (
            ("misaligned", (place(x, 1), place(dy, 1))),
            ("apart", (apart.copy_(x), dy)),
        ):
            other = forward_backward(apply, form, moved[0], [cols], weight, bias, moved[1])[1]
            for what, grad in whole.items():
                assert same_bits(other[what], grad), f"{cols} columns, {name}: {what}"


@pytest.mark.parametrize(("dtype", "y_dtype"), [(BF16, BF16), (FP32, FP32), (FP32, BF16)], ids=str)
@each_kind
def test_gradients_of_many_short_rows_with_listed_columns(kind, dtype, y_dtype, generator):
    """Backward from the output of so many rows that each lane has several packs of whole ones."""
    rms = kind == "rms"
    for cols in (64, 96, 128, 192, 272, 384):
        rows = 2**23 // cols + 1
        x, dy = (randn(generator, rows, cols, dtype=d) for d in (dtype, y_dtype))
        weight = randn(generator, cols, dtype=dtype).abs() + 0.5
        weight[::7] = 0
        bias = None if rms else randn(generator, cols, dtype=dtype)
        y, rstd, side, columns = torch.ops.fused_norm.norm_forward(
            x, weight, bias, [cols], 1e-5, 0.0, rms, y_dtype, room=cols
        )
        whole, part = (
            torch.ops.fused_norm.norm_backward(
                dy[:rows], y[:rows], None, rstd[:rows], weight, bias, [cols], 0.0, rms, True,
                dtype, [True, True, not rms], side[:rows], columns,
            )[0]
            for rows in (len(x), 7)
        )  # fmt: skip
        assert part.isfinite().all() and same_bits(whole[:7], part), f"{cols} columns"


@pytest.mark.parametrize("memory_efficient", [False, True], ids=["", "memory_efficient"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64], ids=str)
@each_kind
def test_a_row_at_any_alignment(kind, dtype, memory_efficient, generator):
    """y and dx are the same at eight base offsets of x, dy and the parameters, at any row pitch,
    and with each offset of its own."""
    form = full_form(kind, dtype, memory_efficient=memory_efficient)
    for cols in COLS:
        weight, bias = random_parameters(generator, form, [cols], recoverable=True)
        x, dy = random_input(generator, 5, cols, dtype), randn(generator, 5, cols, dtype=dtype)
        y, grads = forward_backward(apply, form, x, [cols], weight, bias, dy)

        def check(label, x, weight, bias, dy, y=y, dx=grads["x"], cols=cols):
            other, other_grads = forward_backward(apply, form, x, [cols], weight, bias, dy)
            assert same_bits(other, y), f"{form}, {cols} columns, {label}: y"
            assert same_bits(other_grads["x"], dx), f"{form}, {cols} columns, {label}: dx"

        for offset in OFFSETS:
            moved = [None if t is None else place(t, offset) for t in (x, weight, bias, dy)]
            check(f"all at {offset}", *moved)
            check(f"x at {offset}", moved[0], weight, bias, dy)
            check(f"dy at {offset}", x, weight, bias, moved[3])
            check(f"weight at {offset}", x, moved[1], bias, dy)
            pitch = torch.empty(5, cols + offset, dtype=dtype, device="cuda")[:, offset:].copy_(x)
            check(f"row pitch {cols + offset}", pitch, weight, bias, dy)


def test_the_sign_of_zero_at_any_alignment(generator):
    """-0 stays -0 in RMSNorm, as in torch, wherever a row lies."""
    for cols in (64, 1000, 1001, 4096):
        x = randn(generator, 3, cols, dtype=BF16)
        x[:, ::3] = -0.0
        for weight in (None, randn(generator, cols, dtype=BF16).abs() + 0.5):
            y = fn.functional.rms_norm(x, (cols,), weight)
            assert y[:, ::3].signbit().all() and (y[:, ::3] == 0).all()
            for offset in OFFSETS:
                assert same_bits(fn.functional.rms_norm(place(x, offset), (cols,), weight), y)


@pytest.mark.parametrize("memory_efficient", [False, True], ids=["", "memory_efficient"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@each_kind
def test_many_rows_at_any_alignment(kind, dtype, memory_efficient, generator):
    """Rows so many that a block's stages in shared memory are filled again and again; dweight and
    dbias are the same too, as the grid is."""
    form = full_form(kind, dtype, memory_efficient=memory_efficient)
    shapes = [
        (3300, 1025),
        (1700, 3333),
        (1700, 3334),
        (3000, 5120),
        (1700, 12288),
        (700, 20000),
        (500, 34000),
    ]
    shapes += [(500, 40000)]
    for rows, cols in shapes:
        weight, bias = random_parameters(generator, form, [cols], recoverable=True)
        x, dy = (
            random_input(generator, rows, cols, dtype),
            randn(generator, rows, cols, dtype=dtype),
        )
        y, grads = forward_backward(apply, form, x, [cols], weight, bias, dy)
        for offset in (1, 4, 6):
            moved = place(x, offset), place(dy, offset)
            pitch = torch.empty(rows, cols + offset, dtype=dtype, device="cuda")[:, offset:]
            for label, *tensors in [
                ("both", *moved),
                ("dy", x, moved[1]),
                ("row pitch", pitch.copy_(x), dy),
            ]:
                other, other_grads = forward_backward(
                    apply, form, tensors[0], [cols], weight, bias, tensors[1]
                )
                where = f"{form}, {rows} x {cols}, {label} at {offset}"
                assert same_bits(other, y), f"{where}: y"
                for name, grad in grads.items():
                    assert same_bits(other_grads[name], grad), f"{where}: d{name}"


@each_kind
def test_two_calls_on_two_streams(kind, generator):
    """Calls that overlap share no scratch memory."""
    form = full_form(kind, BF16)
    cols = 4096
    weight, bias = random_parameters(generator, form, [cols])
    inputs = [
        (random_input(generator, 2000, cols, BF16), randn(generator, 2000, cols, dtype=BF16))
        for _ in range(2)
    ]
    expected = [forward_backward(apply, form, x, [cols], weight, bias, dy) for x, dy in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    for _ in range(10):
        results = []
        for stream, (x, dy) in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                results.append(forward_backward(apply, form, x, [cols], weight, bias, dy))
        torch.cuda.synchronize()
        for (y, grads), (expected_y, expected_grads) in zip(results, expected, strict=True):
            assert same_bits(y, expected_y)
            assert all(same_bits(grads[name], expected_grads[name]) for name in grads)
