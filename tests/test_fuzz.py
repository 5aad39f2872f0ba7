"""Random calls of the norms against fp64: shapes, strides, dtypes, normalized dimensions, options.

A small profile for CPUs; 2000 cases on a GPU. `--hypothesis-seed` chooses other ones.
"""

import math

import pytest
import torch
from harness import OUTPUTS, PARAMETERS, Form, Verdict, apply, check_call, randn
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

LAYOUTS = ["contiguous", "offset", "columns", "permuted", "expanded", "strided", "2-D slice"]
CASES = {"cpu": 150, "cuda": 2000}
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
    offset = draw(st.sampled_from([0.0, 1.0, -0.3])) if kind == "rms" and weight_dtype else 0.0
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


def check(case, device):
    form, shape = case["form"], case["normalized_shape"]
    generator = torch.Generator(device).manual_seed(case["seed"])
    full = [*case["leading"], *shape]

    def tensor(sizes, layout, dtype):
        return laid_out(generator, sizes, layout, dtype, case["offset"])

    x = tensor(full, case["x_layout"], form.x)
    with torch.no_grad():  # in place, so that the layout stays; not twice where elements are shared
        base = x if x._base is None else x._base
        base.mul_(case["scale"]).add_(case["scale"] * case["shift"])
    weight = bias = None
    if form.weight is not None:
        weight = tensor(shape, case["parameter_layout"], form.weight)
        if case["zero_every"]:
            g = weight.double() + form.weight_offset
            index = torch.arange(g.numel(), device=device).view(shape)
            g = torch.where(index % case["zero_every"] == 0, 0.0, g)
            weight.copy_(g - form.weight_offset)
    if form.bias is not None:
        bias = tensor(shape, case["parameter_layout"], form.bias)
    dy = tensor(full, case["dy_layout"], form.y)
    # torch's CUDA backward has no bias without a weight for some shapes.
    with_torch = weight is not None or bias is None
    verdict = Verdict()
    verdict.add(str(form), check_call(form, x, weight, bias, dy, shape, with_torch))
    verdict.check()


def fuzz(device):
    @settings(
        max_examples=CASES[device],
        deadline=None,
        derandomize=False,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases(device))
    def run(case):
        note(str(case))
        check(case, device)

    return run


def test_cpu():
    fuzz("cpu")()


@pytest.mark.cuda
def test_cuda():
    fuzz("cuda")()
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
