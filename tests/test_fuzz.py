"""Random calls of the norms, with and without a residual, and of the softmaxes against fp64:
shapes, strides, dtypes, dimensions, masks, options.

A small profile for CPUs; on a GPU 2000 cases of each family, or as many as the environment variable
FUZZ_CASES says (compute-sanitizer is slow). `--hypothesis-seed` chooses others.
"""

import dataclasses
import math
import os

import pytest
import softmax_harness as softmax
import torch
from harness import (
    OUTPUTS,
    PARAMETERS,
    SUMS,
    Form,
    Verdict,
    apply,
    check_add_call,
    check_call,
    fuzz,
    randn,
)
from hypothesis import given, settings
from hypothesis import strategies as st

LAYOUTS = ["contiguous", "offset", "columns", "permuted", "expanded", "strided", "2-D slice"]
CASES = {"cpu": 150, "cuda": int(os.environ.get("FUZZ_CASES", "2000"))}
MOST_ELEMENTS = {"cpu": 2**14, "cuda": 2**21}
# Around what the kernels' plans change at, and numbers of no special kind.
COLS = [1, 2, 3, 7, 8, 31, 32, 33, 64, 96, 127, 128, 255, 256, 257, 264, 511, 513, 768, 1000, 1023]
COLS += [1024, 1025, 2047, 2048, 3000, 4095, 4096, 4104, 5120, 8192, 8200, 12288, 16384, 16392]
COLS += [32768, 50257, 65536, 100000]


def laid_out(generator, shape, layout, dtype, offset):
    """Normal numbers in a tensor of this shape whose memory is laid out in one of LAYOUTS, as far
    as the shape has room for it."""
    draw = {"dtype": dtype}
    if layout == "offset":  # not on a multiple of 16 bytes
        count = math.prod(shape)
        return randn(generator, count + offset, **draw)[offset:].view(shape)
    if layout == "columns":  # a slice of a packed tensor
        wide = randn(generator, *shape[:-1], shape[-1] + 2 * offset, **draw)
        return wide[..., offset : offset + shape[-1]]
    if layout == "permuted":  # leading dimensions in the other order in memory
        return randn(generator, *shape[-2::-1], shape[-1], **draw).permute(
            *range(len(shape) - 2, -1, -1), len(shape) - 1
        )
    if layout == "expanded" and len(shape) > 1:
        return randn(generator, 1, *shape[1:], **draw).expand(shape)
    if layout == "strided":  # no two elements of a row lie together
        return randn(generator, *shape, 2, **draw)[..., 0]
    if layout == "2-D slice" and len(shape) > 2:
        longer = randn(generator, shape[0], shape[1] + offset, *shape[2:], **draw)
        return longer[:, offset:]
    return randn(generator, *shape, **draw)


@st.composite
def cases(draw, device):
    kind = draw(st.sampled_from(["layer", "rms"]))
    memory_efficient = draw(st.booleans())
    x_dtype = draw(st.sampled_from(list(OUTPUTS)))
    # With the flag, an output dtype of its own is what autocast asks of fp32 input.
    own = not memory_efficient or x_dtype == torch.float32
    y_dtype = draw(st.sampled_from(OUTPUTS[x_dtype])) if own else x_dtype
    parameter = st.none() | st.sampled_from(PARAMETERS[x_dtype])
    weight_dtype = draw(parameter)
    bias_dtype = draw(parameter) if kind == "layer" else None
    offset = draw(st.sampled_from([0.0, 1.0, -0.3])) if weight_dtype else 0.0
    # 1e-12 makes gradients of constant rows 1e6, beyond fp16.
    eps = draw(st.sampled_from([1e-5, 1e-6, 1e-3] + [1e-12] * (x_dtype != torch.float16)))
    form = Form(
        kind,
        x_dtype,
        y_dtype,
        weight_dtype,
        bias_dtype,
        eps=eps,
        weight_offset=offset,
        memory_efficient=memory_efficient,
    )
    cols = draw(st.sampled_from(COLS) | st.integers(1, 600))
    cols = min(cols, MOST_ELEMENTS[device])
    most_rows = max(1, MOST_ELEMENTS[device] // cols)
    leading = draw(st.lists(st.integers(1, 9), max_size=3))
    leading.append(draw(st.integers(1, max(1, most_rows // math.prod(leading)))))
    leading = draw(st.permutations(leading))
    # The columns as one dimension or as several.
    divisor = draw(st.sampled_from([d for d in (1, 2, 3, 4, 7, 8) if cols % d == 0]))
    normalized_shape = [cols] if divisor == 1 else [divisor, cols // divisor]
    x_layout, dy_layout = (draw(st.sampled_from(LAYOUTS)) for _ in range(2))
    if x_layout == dy_layout == "expanded":
        # Gradients all alike round alike, and their limits take roundings for random. Where dy
        # alone repeats only dbias does, for which NormCheck has a limit.
        dy_layout = "contiguous"
    return {
        "form": form,
        "leading": leading if math.prod(leading) <= most_rows else leading[:1],
        "normalized_shape": normalized_shape,
        "x_layout": x_layout,
        "dy_layout": dy_layout,
        "parameter_layout": draw(st.sampled_from(LAYOUTS[:3] + ["strided"])),
        "offset": draw(st.integers(1, 17)),
        "scale": draw(st.sampled_from([1.0, 0.01, 30.0])),
        "shift": draw(st.sampled_from([0.0, 1.0, 100.0])),
        "zero_every": draw(st.sampled_from([0, 0, 1, 5])),  # effective weights that are zero
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


@st.composite
def add_cases(draw, device):
    """As of norms, which here are of sums: x is what is normalized, y has input's dtype."""
    case = draw(cases(device))
    form = case["form"]
    if (form.x, form.y) not in SUMS:
        case["form"] = dataclasses.replace(form, y=form.x)
    layouts = st.sampled_from(LAYOUTS)
    return case | {"residual_layout": draw(layouts), "dresidual_layout": draw(layouts)}


class Tensors:
    """What a case of norms consists of."""

    def __init__(self, case, device):
        self.case, self.device = case, device
        self.generator = torch.Generator(device).manual_seed(case["seed"])
        self.shape = case["normalized_shape"]

    def rows(self, which, dtype):
        sizes = [*self.case["leading"], *self.shape]
        return laid_out(self.generator, sizes, self.case[which], dtype, self.case["offset"])

    def scaled_rows(self, which, dtype):
        x = self.rows(which, dtype)
        # In place, so that the layout stays; not twice where elements are shared.
        base = x if x._base is None else x._base
        base.mul_(self.case["scale"]).add_(self.case["scale"] * self.case["shift"])
        return x

    def _parameter(self, dtype):
        case = self.case
        return laid_out(self.generator, self.shape, case["parameter_layout"], dtype, case["offset"])

    def parameters(self):
        form, zero_every = self.case["form"], self.case["zero_every"]
        weight = bias = None
        if form.weight is not None:
            weight = self._parameter(form.weight)
            if zero_every:
                g = weight.double() + form.weight_offset
                index = torch.arange(g.numel(), device=self.device).view(self.shape)
                weight.copy_(torch.where(index % zero_every == 0, 0.0, g) - form.weight_offset)
        if form.bias is not None:
            bias = self._parameter(form.bias)
        return weight, bias


def check(case, device):
    form, tensors = case["form"], Tensors(case, device)
    x = tensors.scaled_rows("x_layout", form.x)
    weight, bias = tensors.parameters()
    dy = tensors.rows("dy_layout", form.y)
    # torch's CUDA backward has no bias without a weight for some shapes.
    with_torch = weight is not None or bias is None
    verdict = Verdict()
    verdict.add(str(form), check_call(form, x, weight, bias, dy, tensors.shape, with_torch))
    verdict.check()


def check_add(case, device):
    form, tensors = case["form"], Tensors(case, device)
    x = tensors.scaled_rows("x_layout", form.y)
    residual = tensors.scaled_rows("residual_layout", form.x)
    weight, bias = tensors.parameters()
    dy, dresidual = tensors.rows("dy_layout", form.y), tensors.rows("dresidual_layout", form.x)
    verdict = Verdict()
    ratios = check_add_call(form, x, residual, weight, bias, dy, dresidual, tensors.shape)
    verdict.add(str(form), ratios)
    verdict.check()


@st.composite
def softmax_cases(draw, device):
    x_dtype, y_dtype = draw(st.sampled_from(softmax.PAIRS))
    masked = draw(st.booleans())
    cols = min(draw(st.sampled_from(COLS) | st.integers(1, 600)), MOST_ELEMENTS[device])
    others = draw(st.lists(st.integers(1, 9), max_size=3))
    while math.prod(others) * cols > MOST_ELEMENTS[device]:
        others.pop()
    most = MOST_ELEMENTS[device] // (math.prod(others) * cols)
    others = draw(st.permutations([*others, draw(st.integers(1, most))]))
    others = others[draw(st.integers(0, len(others))) :]  # perhaps a single row
    dim = len(others) if masked else draw(st.integers(0, len(others)))
    shape = [*others[:dim], cols, *others[dim:]]
    form = softmax.Form(
        x_dtype,
        y_dtype,
        log=not masked and draw(st.booleans()),
        dim=-1 if masked else dim - draw(st.sampled_from([0, len(shape)])),
        masked=masked,
        scale=draw(st.sampled_from([1.0, 0.125, 3.0, -2.0, 0.0])) if masked else 1.0,
        causal=masked and len(shape) > 1 and draw(st.booleans()),
    )
    mask_dtype = mask_shape = None
    if masked and draw(st.booleans()):
        # An fp64 mask of a smaller input is rounded to fp32 first.
        dtypes = [torch.bool, torch.float16, torch.bfloat16, torch.float32]
        mask_dtype = draw(st.sampled_from(dtypes + [torch.float64] * (x_dtype == torch.float64)))
        mask_shape = [draw(st.sampled_from([1, size])) for size in shape]
        mask_shape = mask_shape[draw(st.integers(0, len(shape))) :]
    return {
        "form": form,
        "shape": shape,
        "x_layout": draw(st.sampled_from(LAYOUTS)),
        "dy_layout": draw(st.sampled_from(LAYOUTS)),
        "mask_dtype": mask_dtype,
        "mask_shape": mask_shape,
        "mask_layout": draw(st.sampled_from(LAYOUTS)),
        "share_masked": draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])),
        "offset": draw(st.integers(1, 17)),
        "scale": draw(st.sampled_from([1.0, 0.01, 30.0])),
        "shift": draw(st.sampled_from([0.0, 1.0, 100.0])),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


def check_softmax(case, device):
    form, shape, offset = case["form"], case["shape"], case["offset"]
    generator = torch.Generator(device).manual_seed(case["seed"])
    x = laid_out(generator, shape, case["x_layout"], form.x, offset)
    base = x if x._base is None else x._base
    base.mul_(case["scale"]).add_(case["scale"] * case["shift"])
    dy = laid_out(generator, shape, case["dy_layout"], form.y, offset)
    mask = None
    if case["mask_shape"] is not None:
        sizes, layout = case["mask_shape"], case["mask_layout"] if case["mask_shape"] else None
        number = laid_out(generator, sizes, layout, torch.float32, offset)
        # The share of normal numbers that lies below; 1.0: all.
        is_hidden = torch.special.ndtr(number) < case["share_masked"]
        mask = is_hidden if case["mask_dtype"] == torch.bool else number.to(case["mask_dtype"])
        if mask is not is_hidden:
            mask = mask.masked_fill(is_hidden, -math.inf)
        if layout == "strided":  # comparisons and conversions give dense tensors
            wide = mask.new_zeros(*mask.shape, 2)
            wide[..., 0] = mask
            mask = wide[..., 0]
    verdict = Verdict()
    verdict.add(str(form), softmax.check_call(form, x, dy, mask))
    verdict.check()


FAMILIES = {
    "norms": (cases, check),
    "added residuals": (add_cases, check_add),
    "softmaxes": (softmax_cases, check_softmax),
}


def run_family(family, device):
    draw, check_case = FAMILIES[family]
    fuzz(draw(device), lambda case: check_case(case, device), CASES[device])


@pytest.mark.parametrize("family", FAMILIES)
def test_cpu(family):
    run_family(family, "cpu")


@pytest.mark.cuda
@pytest.mark.parametrize("family", FAMILIES)
def test_cuda(family):
    run_family(family, "cuda")
    torch.cuda.synchronize()


@given(
    sizes=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    rows=st.integers(0, 3),
    form=st.sampled_from(
        [
            Form(kind, dtype, dtype, dtype, memory_efficient=flag)
            for kind in ("layer", "rms")
            for dtype in OUTPUTS
            for flag in (False, True)
        ]
    ),
)
@settings(max_examples=100, deadline=None)
def test_small_and_empty_shapes(sizes, rows, form):
    """Any number of elements, none among them: shapes, dtypes, and zeros for sums over nothing."""
    rows = min(rows, len(sizes) - 1)
    shape = sizes[rows:]
    x = torch.randn(sizes).to(form.x).requires_grad_()
    weight = torch.ones(shape).to(form.weight).requires_grad_()
    y = apply(form, x, shape, weight)
    assert y.shape == x.shape and y.dtype == x.dtype
    y.sum().backward()
    assert x.grad.shape == x.shape and weight.grad.shape == weight.shape
    if x.numel() == 0:
        assert not weight.grad.any()
