"""The GPU's kernels held to fp64 references over their whole range of sizes. Limits:
reference.py."""

import pytest
import torch
from harness import (
    CHUNK,
    OUTPUTS,
    Verdict,
    apply,
    check_call,
    each_kind,
    forms,
    full_form,
    randn,
    random_input,
    random_parameters,
    unwritten_is_nan,
)
from reference import NormCheck

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("give_memory_back")]

COLS = [1, 2, 31, 32, 33, 96, 126, 255, 256, 768, 1000, 1023, 1025, 3333, 3334, 4095, 4096, 4097]
COLS += [5120, 8192, 8193, 12288, 16384, 16386, 20000, 32769, 40000, 50257, 65536, 65537, 131072]
COLS += [1000003]
ROWS = [1, 7, 512, 4097]
FULL_PRODUCT = 2**26  # elements up to which every form runs
DTYPES = list(OUTPUTS)
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
KINDS = ["layer", "rms"]


@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_kind
def test_every_form_at_every_size(kind, dtype, cols, generator):
    """Outputs x affine forms x parameter dtypes x rows, one input a size."""
    verdict = Verdict()
    for rows in ROWS:
        if rows * cols > FULL_PRODUCT:
            continue
        x = random_input(generator, rows, cols, dtype)
        dy = randn(generator, rows, cols, dtype=dtype)
        for form in forms(kind, dtype):
            weight, bias = random_parameters(generator, form, [cols])
            verdict.add(
                f"{form}, {rows} x {cols}", check_call(form, x, weight, bias, dy.to(form.y))
            )
    verdict.check()


@pytest.mark.parametrize("cols", [c for c in COLS if c * ROWS[-1] > FULL_PRODUCT])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_larger_sizes(dtype, cols, most_of_the_memory, generator):
    """Beyond the full product: the affine form of both kinds. A million columns by 4097 rows has
    2^31.9 elements; in fp64 the four tensors of that would not fit a GPU, so fp64 stops at 512
    rows of it."""
    verdict = Verdict()
    for rows in ROWS:
        if rows * cols <= FULL_PRODUCT or (dtype == FP64 and rows * cols > 2**31):
            continue
        for kind in KINDS:
            form = full_form(kind, dtype)
            x, dy = (
                randn(generator, rows, cols, dtype=dtype),
                randn(generator, rows, cols, dtype=dtype),
            )
            weight, bias = random_parameters(generator, form, [cols])
            small = rows * cols < 2**29  # torch's own operator needs as much memory again
            verdict.add(
                f"{form}, {rows} x {cols}", check_call(form, x, weight, bias, dy, with_torch=small)
            )
            del x, dy
    verdict.check()


# Rows so many that blocks walk hundreds of them, and more than the 65535 of a grid's second
# dimension.
TALL = [
    (131072, 128),
    (100000, 192),
    (70001, 100),
    (300007, 33),
    (1000003, 8),
    (5000011, 1),
    (1000003, 64),
    (250001, 65),
    (90001, 144),
    (70001, 257),
    (40001, 513),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_kind
def test_many_short_rows(kind, dtype, generator):
    verdict = Verdict()
    for rows, cols in TALL:
        x = random_input(generator, rows, cols, dtype)
        for efficient in (False, True):
            form = full_form(kind, dtype, memory_efficient=efficient)
            weight, bias = random_parameters(generator, form, [cols], recoverable=efficient)
            dy = randn(generator, rows, cols, dtype=form.y)
            verdict.add(f"{form}, {rows} x {cols}", check_call(form, x, weight, bias, dy))
    verdict.check()


# Row lengths around every change of threads, packs and tier: powers of two and three halves of
# them, a pack of eight, four or two elements to each side of them, and their neighbours.
def boundaries():
    middles = [2**k for k in range(2, 18)] + [3 * 2**k for k in range(1, 16)]
    steps = [-8, -4, -2, -1, 0, 1, 2, 4, 8]
    return sorted(
        {m + s for m in middles for s in steps if m + s > 0} | {2**20, 2**20 + 1, 3000001}
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_kind
def test_row_lengths_around_every_boundary(kind, dtype, generator):
    verdict = Verdict()
    for cols in boundaries():
        x, dy = randn(generator, 5, cols, dtype=dtype), randn(generator, 5, cols, dtype=dtype)
        for efficient in (False, True):
            form = full_form(kind, dtype, memory_efficient=efficient)
            weight, bias = random_parameters(generator, form, [cols], recoverable=efficient)
            verdict.add(f"{form}, 5 x {cols}", check_call(form, x, weight, bias, dy))
    verdict.check()


def test_rows_whose_squares_overflow(generator):
    """Elements of 1e35 have a mean in fp32, but no variance: the bias, and not NaN, as in torch."""
    for cols in (300, 1000, 8192, 20000, 50000):
        bias = randn(generator, cols, dtype=BF16)
        for huge in (slice(0, 256), slice(-256, None)):
            x = torch.zeros(3, cols, dtype=BF16, device="cuda")
            x[:, huge] = 1e35
            y = torch.ops.fused_norm.norm_forward(x, None, bias, [cols], 1e-5, 0.0, False)[0]
            assert torch.equal(y, bias.expand_as(y)), f"{cols} columns"


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("cols", [96, 1000, 4097, 12288, 50257])
@each_kind
def test_gradients_asked_for_one_by_one(kind, cols, dtype, generator):
    """Each gradient alone and each pair: the kernels leave work out, the numbers stay right."""
    form = full_form(kind, dtype)
    verdict = Verdict()
    for rows in (7, 700):
        x, dy = (
            random_input(generator, rows, cols, dtype),
            randn(generator, rows, cols, dtype=dtype),
        )
        weight, bias = random_parameters(generator, form, [cols])
        for mask in range(1, 8 if kind == "layer" else 4):
            wanted = [bool(mask & 1), bool(mask & 2), bool(mask & 4)]
            y, mean, rstd = torch.ops.fused_norm.norm_forward(
                x, weight, bias, [cols], form.eps, 0.0, kind == "rms"
            )
            with unwritten_is_nan("cuda", x.nbytes, cols * 4):
                grads = torch.ops.fused_norm.norm_backward(
                    dy,
                    x,
                    mean,
                    rstd,
                    weight,
                    bias,
                    [cols],
                    0.0,
                    kind == "rms",
                    False,
                    dtype,
                    wanted,
                )
            assert [g is not None for g in grads] == wanted
            check = NormCheck(
                rows=rows,
                rms=kind == "rms",
                eps=form.eps,
                x_dtype=dtype,
                y_dtype=dtype,
                weight=weight,
                bias=bias,
            )
            check.rows(x, y, dy, grads[0])
            check.parameters(grads[1], grads[2])
            verdict.add(f"{form}, {rows} x {cols}, gradients {wanted}", check.ratios())
    verdict.check()


def rows_of(generator, rows, cols, dtype):
    """randn by chunks: the fp32 numbers it is drawn from would be twice as large as the tensor."""
    out = torch.empty(rows, cols, dtype=dtype, device="cuda")
    step = max(1, CHUNK // cols)
    for first in range(0, rows, step):
        part = out[first : first + step]
        part.copy_(randn(generator, *part.shape))
    return out


@each_kind
@pytest.mark.parametrize(
    ("rows", "cols"), [(2**31 // 4096 + 5, 4096), (2**31 // 513 + 3, 513), (2**31 + 7, 1)]
)
def test_more_than_2_to_the_31_elements(rows, cols, kind, most_of_the_memory, generator):
    form = full_form(kind, BF16)
    x, dy = rows_of(generator, rows, cols, BF16), rows_of(generator, rows, cols, BF16)
    weight, bias = random_parameters(generator, form, [cols])
    verdict = Verdict()
    verdict.add(f"{form}, {rows} x {cols}", check_call(form, x, weight, bias, dy, with_torch=False))
    verdict.check()


@each_kind
def test_rows_that_lie_2_to_the_31_elements_apart(kind, most_of_the_memory, generator):
    """Few rows, far offsets: a slice of a packed tensor, and a transposed batch of it."""
    cols = 1024
    form = full_form(kind, BF16)
    packed = torch.zeros(2**31 // (64 * cols) + 9, 64 * cols, dtype=BF16, device="cuda")
    verdict = Verdict()
    for label, x in {
        "slice": packed[:, 63 * cols :],
        "transposed": packed.view(len(packed), 64, cols).transpose(0, 1)[60:],
        "last rows": packed.view(-1, cols)[-65:],
    }.items():
        x.copy_(randn(generator, *x.shape))
        weight, bias = random_parameters(generator, form, [cols])
        dy = randn(generator, *x.shape, dtype=BF16)
        verdict.add(f"{form}, {label}", check_call(form, x, weight, bias, dy))
    verdict.check()


@each_kind
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inference_gives_the_same_bits_as_training(kind, dtype, generator):
    form = full_form(kind, dtype)
    for rows, cols in [(7, 96), (512, 4096), (3, 50257)]:
        x = random_input(generator, rows, cols, dtype)
        weight, bias = random_parameters(generator, form, [cols])
        with torch.no_grad():
            quiet = apply(form, x, [cols], weight, bias)
        assert torch.equal(quiet, apply(form, x.requires_grad_(), [cols], weight, bias))
