"""Results and gradients against fp64 references: dtypes, affine forms, layouts and awkward values,
on either device.

The limits are derived in reference.py. The GPU's full range of sizes is in test_cuda_numerics.py.
"""

import dataclasses

import pytest
import torch
from harness import (
    OUTPUTS,
    Form,
    Verdict,
    apply,
    apply_torch,
    check_call,
    each_kind,
    forms,
    forward_backward,
    full_form,
    randn,
    random_input,
    random_parameters,
    same_bits,
    unwritten_is_nan,
)

# Rows of a warp and of a block, and so long that sums over them need care; on the GPU those of each
# other tier: backward by a ring, a cluster forward, and, the longest, streaming.
COLS = {"cpu": [33, 520, 5000, 300000]}
COLS["cuda"] = [*COLS["cpu"], 20000, 50257]
DTYPES = list(OUTPUTS)
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def measure(verdict, generator, form, x, label, normalized_shape=None, dy=None):
    shape = list(x.shape[-1:]) if normalized_shape is None else normalized_shape
    weight, bias = random_parameters(generator, form, shape)
    dy = randn(generator, *x.shape, dtype=form.y) if dy is None else dy
    verdict.add(f"{form}, {label}", check_call(form, x, weight, bias, dy, shape))


@each_dtype
@each_kind
def test_every_form(kind, dtype, device, generator):
    verdict = Verdict()
    for form in forms(kind, dtype):
        for rows, cols in [(1, 1), (7, 2), (5, 33), (130, 96), (3, 1000), (2, 4097)]:
            x = random_input(generator, rows, cols, dtype)
            measure(verdict, generator, form, x, f"{rows} x {cols}")
    verdict.check()


@each_dtype
def test_weight_and_bias_of_different_dtypes(dtype, device, generator):
    verdict = Verdict()
    other = {BF16: FP32, FP16: FP32, FP32: BF16, FP64: FP32}[dtype]
    for weight, bias in [(dtype, other), (other, dtype)]:
        form = Form("layer", dtype, dtype, weight=weight, bias=bias)
        measure(verdict, generator, form, random_input(generator, 40, 264, dtype), "40 x 264")
    verdict.check()


@each_dtype
@pytest.mark.parametrize("offset", [1.0, -0.3])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_weight_offset(kind, offset, dtype, device, generator):
    verdict = Verdict()
    bias = dtype if kind == "layer" else None
    for y_dtype in OUTPUTS[dtype]:
        form = Form(kind, dtype, y_dtype, weight=dtype, bias=bias, weight_offset=offset)
        measure(verdict, generator, form, random_input(generator, 40, 264, dtype), "40 x 264")
    verdict.check()


def strided_rows(generator, dtype):
    """(label, tensor) of inputs whose rows do not simply follow each other."""
    cols = 40
    packed = randn(generator, 6, 5, 3 * cols, dtype=dtype)
    heads = randn(generator, 3, 7, 4, cols, dtype=dtype)
    yield "slice of a packed QKV", packed[..., cols : 2 * cols]
    yield "transposed batch", randn(generator, 9, 4, cols, dtype=dtype).transpose(0, 1)
    yield "heads before sequence", heads.transpose(1, 2)
    yield "three row strides", heads.permute(2, 0, 1, 3)[:, :2]
    yield "every other row", randn(generator, 12, cols, dtype=dtype)[::2]
    yield (
        "rows reversed and flipped",
        randn(generator, 12, cols, dtype=dtype).flip(0).unflatten(0, (3, 4)).mT.mT,
    )
    yield "expanded rows", randn(generator, 1, cols, dtype=dtype).expand(8, cols)
    yield "expanded batch", randn(generator, 4, 1, cols, dtype=dtype).expand(4, 6, cols)
    yield "strided columns", randn(generator, 10, 2 * cols, dtype=dtype)[:, ::2]
    yield "transposed matrix", randn(generator, cols, 10, dtype=dtype).t()
    yield "expanded columns", randn(generator, 10, 1, dtype=dtype).expand(10, cols)
    yield (
        "a slice, odd offset and pitch",
        randn(generator, 10, 2 * cols + 1, dtype=dtype)[:, 3 : 3 + cols],
    )


@each_dtype
@each_kind
def test_strided_input(kind, dtype, device, generator):
    verdict = Verdict()
    for label, x in strided_rows(generator, dtype):
        measure(verdict, generator, full_form(kind, dtype), x, label)
    verdict.check()


@each_dtype
@each_kind
def test_strided_output_gradient(kind, dtype, device, generator):
    """sum().backward() gives a dy whose strides are all zero; a transposed consumer, a
    transposed dy."""
    verdict = Verdict()
    for label, dy in strided_rows(generator, dtype):
        x = random_input(generator, dy.shape[:-1].numel(), dy.shape[-1], dtype).view(dy.shape)
        measure(verdict, generator, full_form(kind, dtype), x, f"dy: {label}", dy=dy)
    one = torch.ones((), dtype=dtype, device=generator.device).expand(6, 40)
    measure(
        verdict,
        generator,
        full_form(kind, dtype),
        random_input(generator, 6, 40, dtype),
        "dy: expanded",
        dy=one,
    )
    verdict.check()


@each_dtype
@each_kind
def test_several_normalized_dimensions(kind, dtype, device, generator):
    verdict = Verdict()
    for lead, shape in [
        ((5,), [3, 7]),
        ((2, 3), [4, 1, 6]),
        ((), [33]),
        ((), [4, 5]),
        ((4, 1, 2), [1]),
    ]:
        x = randn(generator, *lead, *shape, dtype=dtype)
        measure(verdict, generator, full_form(kind, dtype), x, f"{lead} of {shape}", shape)
    # The row's own dimensions transposed: not consecutive in memory.
    x = randn(generator, 5, 7, 3, dtype=dtype).transpose(1, 2)
    measure(verdict, generator, full_form(kind, dtype), x, "transposed within the row", [3, 7])
    verdict.check()


@each_dtype
@each_kind
def test_misaligned_memory(kind, dtype, device, generator):
    """x, dy and the parameters may start on any element."""
    verdict = Verdict()
    form = full_form(kind, dtype)
    for rows, cols in [(9, 64), (5, 37), (2, 2048)]:
        for offset in range(8):

            def shifted(*shape, offset=offset):
                count = torch.Size(shape).numel()
                return randn(generator, count + offset, dtype=dtype)[offset:].view(shape)

            x, dy = shifted(rows, cols), shifted(rows, cols)
            weight = shifted(cols)
            bias = shifted(cols) if kind == "layer" else None
            verdict.add(
                f"{form}, {rows} x {cols} at {offset}", check_call(form, x, weight, bias, dy)
            )
    verdict.check()


@each_dtype
@each_kind
def test_awkward_values(kind, dtype, device, generator):
    """A mean that dwarfs the spread, numbers whose squares underflow, rows of wildly different
    size, eps of 0."""
    verdict = Verdict()
    form = full_form(kind, dtype)
    for cols in COLS[device]:
        rows = 64 if cols <= 5000 else 12
        noise = random_input(generator, rows, cols, dtype)
        sizes = 10.0 ** torch.linspace(-4, 4, rows, device=device)[:, None]
        inputs = {
            "1e4 + noise": (noise.float() + 1e4).to(dtype),
            "1e4 + 1e-2 noise": (noise.double() * 1e-2 + 1e4).to(dtype),
            "1e-30 noise": (noise.double() * 1e-30).to(dtype),
            "subnormal": noise[:4] * torch.finfo(dtype).smallest_normal,
            "rows of all sizes": (noise.float() * 0.3 * sizes).to(dtype),
            "one large column": torch.where(
                torch.arange(cols, device=device) == 77 % cols, 3e3, noise
            ).to(dtype),
        }
        for label, x in inputs.items():
            measure(verdict, generator, form, x, f"{label}, {cols} columns")
        for eps in (0.0, 10.0):
            label = f"eps of {eps:.0f}, {cols} columns"
            measure(verdict, generator, dataclasses.replace(form, eps=eps), noise, label)
    verdict.check()


@each_dtype
def test_constant_rows_give_the_bias_exactly(dtype, device, generator):
    constants = torch.tensor(
        [0.0, 1.0, -3.7, 1 / 3, 1e4, -777.7, 1e-3, 6e4], device=generator.device
    ).to(dtype)
    for cols in [1, 2, 31, 96, 1000, 1536, 4097, 20000, 50000, 70001]:
        bias = randn(generator, cols, dtype=dtype)
        for weight in (None, randn(generator, cols, dtype=dtype)):
            x = constants[:, None].expand(-1, cols).contiguous()
            form = Form("layer", dtype, dtype, eps=1e-5)
            y = apply(form, x, [cols], weight, bias)
            wrong = (y != bias).any(1)
            assert not wrong.any(), f"{cols} columns: not the bias for {constants[wrong].tolist()}"


def non_finite_rows(generator, dtype, cols):
    x = randn(generator, 12, cols, dtype=dtype)
    nan, inf = float("nan"), float("inf")
    for row, values in enumerate([(nan,), (inf,), (-inf,), (inf, -inf), (inf, inf), (nan, inf)]):
        x[2 * row, 1 : 1 + len(values)] = torch.tensor(values, dtype=dtype, device=x.device)
    return x


def same_kinds_of_numbers(ours, theirs):
    return (
        torch.equal(ours.isnan(), theirs.isnan())
        and torch.equal(ours == float("inf"), theirs == float("inf"))
        and torch.equal(ours == -float("inf"), theirs == -float("inf"))
    )


@each_dtype
@each_kind
@pytest.mark.parametrize("where", ["x", "dy", "weight"])
def test_nan_and_inf_propagate_as_in_torch(where, kind, dtype, device, generator):
    form = full_form(kind, dtype)
    for cols in [5, 256, *COLS[device]]:
        weight, bias = random_parameters(generator, form, [cols])
        x, dy = randn(generator, 12, cols, dtype=dtype), randn(generator, 12, cols, dtype=dtype)
        if where == "x":
            x = non_finite_rows(generator, dtype, cols)
        elif where == "dy":
            dy = non_finite_rows(generator, dtype, cols)
        else:
            weight = non_finite_rows(generator, dtype, cols)[8]
        with unwritten_is_nan(x.device):
            y, grads = forward_backward(apply, form, x, [cols], weight, bias, dy)
        # torch in fp64 on the CPU: what the formulas give, with no overflow of a smaller dtype's
        # own.
        double = [None if t is None else t.double().cpu() for t in (x, weight, bias, dy)]
        ref_y, ref_grads = forward_backward(
            apply_torch, full_form(kind, FP64), double[0], [cols], *double[1:]
        )
        assert same_kinds_of_numbers(y.cpu(), ref_y), f"{cols} columns: y"
        # Whether Inf - Inf or Inf comes out depends on the order of terms, whether a gradient is
        # finite does not.
        for name in grads:
            assert torch.equal(grads[name].isfinite().cpu(), ref_grads[name].isfinite()), (
                f"{cols} columns: d{name}"
            )


@each_dtype
@each_kind
def test_a_row_without_nan_is_untouched_by_its_neighbours(kind, dtype, device, generator):
    form = full_form(kind, dtype)
    for cols in [3, 256, *COLS[device]]:
        x, dy = randn(generator, 12, cols, dtype=dtype), randn(generator, 12, cols, dtype=dtype)
        spoiled = x.clone()
        spoiled[::2] = float("nan")
        weight, bias = random_parameters(generator, form, [cols])
        y, grads = forward_backward(apply, form, x, [cols], weight, bias, dy)
        spoiled_y, spoiled_grads = forward_backward(apply, form, spoiled, [cols], weight, bias, dy)
        assert same_bits(y[1::2], spoiled_y[1::2]), f"{cols} columns: y"
        assert same_bits(grads["x"][1::2], spoiled_grads["x"][1::2]), f"{cols} columns: dx"
        assert spoiled_y[::2].isnan().all()
