"""The registered operators and what builds on them: opcheck, meta tensors, torch.compile."""

import math

import pytest
import torch
from harness import each_kind, module_of, randn, same_bits
from torch._subclasses.fake_tensor import FakeTensorMode

import fused_norm.functional as fn

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
forward_op = torch.ops.fused_norm.norm_forward.default
backward_op = torch.ops.fused_norm.norm_backward.default

# (input shape, normalized_shape, input dtype, parameter dtype, output dtype)
SAMPLES = [
    ((5, 8), [8], FP32, FP32, None),
    ((2, 3, 4, 2), [4, 2], FP64, FP64, None),
    ((5, 8), [8], BF16, FP32, FP32),
    ((5, 8), [8], FP32, FP16, BF16),
    ((5, 8), [8], FP16, None, None),
    ((0, 8), [8], FP32, FP32, None),
    ((3, 0), [0], FP32, FP32, None),
]
each_sample = pytest.mark.parametrize("sample", SAMPLES, ids=str)


def arguments(sample, kind, generator, requires_grad):
    shape, normalized_shape, dtype, parameter, out_dtype = sample
    x = randn(generator, *shape, dtype=dtype).requires_grad_(requires_grad)
    weight = bias = None
    if parameter is not None:
        weight = randn(generator, *normalized_shape, dtype=parameter).requires_grad_(requires_grad)
        if kind == "layer":
            bias = randn(generator, *normalized_shape, dtype=parameter).requires_grad_(
                requires_grad
            )
    return x, weight, bias, normalized_shape, 1e-5, 0.0, kind == "rms", out_dtype


@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "needs grad"])
@each_sample
@each_kind
def test_opcheck_forward(kind, sample, requires_grad, device, generator):
    torch.library.opcheck(forward_op, arguments(sample, kind, generator, requires_grad))


@pytest.mark.parametrize("from_output", [False, True], ids=["", "from output"])
@pytest.mark.parametrize(
    "mask", [[True, True, True], [True, False, False], [False, True, True]], ids=str
)
@each_sample
@each_kind
def test_opcheck_backward(kind, sample, mask, from_output, device, generator):
    args = arguments(sample, kind, generator, False)
    x, weight, bias, normalized_shape, _, offset, rms, _ = args
    if from_output and bias is not None:  # a bias that dwarfs the weight would give NaN
        bias.copysign_(weight).clamp_(-weight.abs(), weight.abs())
    y, mean, rstd = forward_op(*args)
    dy = randn(generator, *y.shape, dtype=y.dtype)
    saved = y if from_output else x
    mean = None if rms or from_output else mean
    torch.library.opcheck(
        backward_op,
        (
            dy,
            saved,
            mean,
            rstd,
            weight,
            bias,
            normalized_shape,
            offset,
            rms,
            from_output,
            x.dtype,
            mask,
        ),
    )


@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "needs grad"])
@pytest.mark.parametrize("room", [1, 5])
@pytest.mark.parametrize("sample", [s for s in SAMPLES if s[3] and math.prod(s[1])], ids=str)
@each_kind
def test_opcheck_forward_listing(kind, sample, room, requires_grad, device, generator):
    """As many columns are listed as there is room for: what lies beyond them is not written."""
    args = list(arguments(sample, kind, generator, False))
    args[1].fill_(4).view(-1)[:room] = 0
    args[:3] = [t if t is None else t.requires_grad_(requires_grad) for t in args[:3]]
    torch.library.opcheck(forward_op, (*args, None, None, room))


def test_the_list_holds_the_normalized_input_of_lost_columns(device, generator):
    x = randn(generator, 3, 40, dtype=BF16)
    weight = torch.ones(40, dtype=BF16, device=device)
    weight[[4, 17, 30]] = 0
    xhat = (x.double() - x.double().mean(1, keepdim=True)) / x.double().std(
        1, keepdim=True, correction=0
    )
    for room in (1, 2, 3, 40):
        y, rstd, side, columns = forward_op(x, weight, None, [40], 0.0, room=room)
        listed = [4, 17, 30][:room]
        assert columns.tolist()[: 1 + len(listed)] == [3, *listed]
        assert side.shape == (3, room) and side.dtype == FP32
        torch.testing.assert_close(
            side[:, : len(listed)].double(), xhat[:, listed], rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("dtype", [FP64, FP32, FP16, BF16], ids=str)
@each_kind
def test_calling_the_operator_differentiates(kind, dtype, device, generator):
    """A direct torch.ops call is no dead end for gradients: the same as the functional form's."""
    x, weight, bias = arguments(((5, 8), [8], dtype, dtype, None), kind, generator, True)[:3]
    leaves = [t for t in (x, weight, bias) if t is not None]
    dy = randn(generator, 5, 8, dtype=dtype)
    results = []
    for call in (
        lambda: forward_op(x, weight, bias, [8], 1e-5, 0.0, kind == "rms")[0],
        lambda: (
            fn.layer_norm(x, [8], weight, bias)
            if bias is not None
            else fn.rms_norm(x, [8], weight, 1e-5)
        ),
    ):
        y = call()
        results.append([y.detach(), *torch.autograd.grad(y, leaves, dy)])
    for direct, functional in zip(*results, strict=True):
        assert same_bits(direct, functional)


@each_kind
def test_statistics_of_the_operator_differentiate(kind, device, generator):
    x, weight, bias = arguments(((5, 8), [8], FP64, FP64, None), kind, generator, True)[:3]

    def statistics(x):
        output, mean, rstd = forward_op(x, weight, bias, [8], 1e-5, 0.0, kind == "rms")
        return rstd if kind == "rms" else (mean, rstd)

    torch.autograd.gradcheck(statistics, x, nondet_tol=0)
    torch.autograd.gradgradcheck(statistics, x, nondet_tol=0)


@each_sample
@each_kind
def test_statistics(kind, sample, device, generator):
    """mean and rstd have one number a row, broadcast against the input, and are in fp32 or fp64."""
    args = arguments(sample, kind, generator, False)
    x, normalized_shape, eps = args[0], args[3], args[4]
    y, mean, rstd = forward_op(*args)
    dims = tuple(range(-len(normalized_shape), 0))
    shape = (*x.shape[: len(dims) * -1], *[1] * len(dims))
    stats_dtype = FP64 if x.dtype == FP64 else FP32
    assert rstd.shape == shape and rstd.dtype == stats_dtype
    assert mean.shape == ((0,) if kind == "rms" else shape) and mean.dtype == stats_dtype
    if x.numel():
        double = x.double()
        centre = 0.0 if kind == "rms" else double.mean(dims, keepdim=True)
        variance = (double - centre).square().mean(dims, keepdim=True)
        torch.testing.assert_close(rstd.double(), (variance + eps).rsqrt(), rtol=1e-6, atol=0)
        if kind == "layer":  # a few roundings of numbers of about 1
            torch.testing.assert_close(mean.double(), centre, rtol=0, atol=1e-6)


@each_sample
@each_kind
def test_fake_tensors_describe_the_real_ones(kind, sample, device, generator):
    args = arguments(sample, kind, generator, False)
    real = forward_op(*args)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
        fake = forward_op(*fakes)
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.dtype, a.device, a.stride()) == (b.shape, b.dtype, b.device, b.stride())


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("memory_efficient", [False, True], ids=["", "memory_efficient"])
@each_kind
def test_compiled_training_step_equals_eager(kind, memory_efficient, backend, device, generator):
    """One graph (fullgraph), forward and backward, and again with another number of rows."""
    torch._dynamo.reset()
    norm = module_of(kind, 16, device=device, memory_efficient=memory_efficient)

    def block(x):
        return norm(x * 2).sin()

    compiled = torch.compile(block, fullgraph=True, backend=backend, dynamic=True)
    for rows in (6, 9):
        x = randn(generator, rows, 16)
        results = []
        for call in (block, compiled):
            leaf = x.clone().requires_grad_()
            norm.zero_grad()
            y = call(leaf)
            y.square().sum().backward()
            results.append([y.detach(), leaf.grad, *(p.grad for p in norm.parameters())])
        for eager, traced in zip(*results, strict=True):
            torch.testing.assert_close(traced, eager)


@each_kind
def test_compiled_under_autocast(kind, device, generator):
    torch._dynamo.reset()
    norm = module_of(kind, 16, device=device)
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    x = randn(generator, 6, 16, dtype=BF16)
    with torch.autocast(device, BF16):
        assert compiled(x).dtype == norm(x).dtype
