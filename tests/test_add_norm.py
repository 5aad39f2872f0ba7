"""add_layer_norm and add_rms_norm: the residual addition within the norm, forward and backward.

The reference is residual_out = input + residual, rounded, and then the norm of that.
"""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from harness import (
    SUMS,
    Form,
    Verdict,
    add_forward_backward,
    address,
    apply_add,
    check_add_call,
    each_flag,
    each_kind,
    leaf,
    randn,
    random_input,
    random_parameters,
    same_bits,
    saved_storages,
)
from torch import func
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.gradcheck import gradcheck, gradgradcheck

import fused_norm
import fused_norm.functional as fn

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
each_sum = pytest.mark.parametrize("sums", SUMS, ids=lambda s: f"{s[1]} to {s[0]}")
forward_op = torch.ops.fused_norm.norm_forward.default
backward_op = torch.ops.fused_norm.norm_backward.default

SIZES = {"cpu": [(1, 1), (33, 40), (60, 264), (2, 1027)]}
SIZES["cuda"] = [*SIZES["cpu"], (4097, 96), (513, 4096), (33, 12288), (7, 50257), (3, 140000)]


def forms(kind, sums, memory_efficient):
    """Affine forms with the parameters' dtypes in turn."""
    dtypes = {FP64: [FP64, FP32], FP32: [FP32, BF16, FP16]}.get(sums[0], [sums[0], FP32])
    for dtype in dtypes:
        form = Form(kind, *sums, weight=dtype, memory_efficient=memory_efficient)
        yield form
        if kind == "layer":
            form = dataclasses.replace(form, bias=dtype)
            yield form
        yield dataclasses.replace(form, weight_offset=1.0)
    yield Form(kind, *sums, memory_efficient=memory_efficient)


def tensors(generator, form, rows, cols):
    """(input, residual, dy, dresidual)"""
    return (
        random_input(generator, rows, cols, form.y),
        random_input(generator, rows, cols, form.x),
        randn(generator, rows, cols, dtype=form.y),
        randn(generator, rows, cols, dtype=form.x),
    )


@pytest.mark.parametrize("zeros", [0, 7, 1], ids=["", "some weights zero", "all weights zero"])
@each_flag
@each_sum
@each_kind
def test_values_and_gradients(kind, sums, memory_efficient, zeros, device, generator):
    verdict = Verdict()
    for form in forms(kind, sums, memory_efficient):
        for rows, cols in SIZES[device]:
            x, residual, dy, dresidual = tensors(generator, form, rows, cols)
            weight, bias = random_parameters(generator, form, [cols], recoverable=True)
            if zeros and weight is not None:
                weight[::zeros] = -form.weight_offset
            ratios = check_add_call(form, x, residual, weight, bias, dy, dresidual)
            verdict.add(f"{form}, {rows} x {cols}", ratios)
    verdict.check()


@each_flag
@each_kind
def test_the_start_of_an_fp32_stream(kind, memory_efficient, device, generator):
    """A 16-bit residual and residual_dtype=fp32: as that residual in fp32, gradient rounded."""
    for dtype in (BF16, FP16):
        form = Form(kind, FP32, dtype, weight=FP32, memory_efficient=memory_efficient)
        x, residual, dy, dresidual = tensors(generator, form, 33, 40)
        residual = residual.to(dtype)
        weight, _ = random_parameters(generator, form, [40], recoverable=True)
        of_16, of_32 = (
            add_forward_backward(form, x, r, [40], weight, None, dy, dresidual)
            for r in (residual, residual.float())
        )
        # Not the same kernel: what is added has to be the same, the rest about that.
        assert same_bits(of_16[1], of_32[1])
        unit = {BF16: 2**-7, FP16: 2**-10}[dtype]
        torch.testing.assert_close(of_16[0], of_32[0], rtol=unit, atol=1e-6)
        for name, gradient in of_16[2].items():
            expected = of_32[2][name]
            if name == "residual":
                expected = expected.to(dtype)
            assert gradient.dtype == expected.dtype
            torch.testing.assert_close(gradient, expected, rtol=2 * unit, atol=1e-5)


@each_kind
def test_equal_to_torch_in_fp64(kind, device, generator):
    for shape, normalized in (((5, 8), (8,)), ((2, 3, 4, 2), (4, 2)), ((8,), (8,))):
        values = [randn(generator, *s, dtype=FP64) for s in (shape, shape, normalized)]
        ours = getattr(fn, f"add_{kind}_norm")(*values[:2], normalized, values[2])
        norm = F.layer_norm if kind == "layer" else F.rms_norm
        torch.testing.assert_close(ours[1], values[0] + values[1])
        torch.testing.assert_close(ours[0], norm(values[0] + values[1], normalized, values[2]))


def laid_out(values, layout):
    """A copy of (rows, columns) whose memory is laid out otherwise, rows an even number."""
    rows, cols = values.shape
    if layout == "offset":
        buffer = torch.empty(values.numel() + 3, dtype=values.dtype, device=values.device)
        return buffer[3:].view(rows, cols).copy_(values)
    if layout == "slice":
        return values.new_empty(rows, cols + 5)[:, 5:].copy_(values)
    if layout == "strided":
        return values.new_empty(rows, cols, 2)[..., 1].copy_(values)
    halves = values.view(2, rows // 2, cols)
    return halves.transpose(0, 1).contiguous().transpose(0, 1)  # "transposed": two strides


@each_flag
@each_sum
@each_kind
def test_any_layout_gives_the_same_bits(kind, sums, memory_efficient, device, generator):
    """Each of input, residual and both incoming gradients in each layout, alone and all at once."""
    for cols in (40, 41, 1000) if device == "cpu" else (40, 41, 1000, 4096, 4099, 20000):
        form = Form(kind, *sums, weight=sums[0], memory_efficient=memory_efficient)
        contiguous = tensors(generator, form, 6, cols)
        weight, _ = random_parameters(generator, form, [cols], recoverable=True)

        def run(parts, layout, form=form, weight=weight, cols=cols):
            shape = (2, 3, cols) if layout == "transposed" else (6, cols)
            x, residual, dy, dresidual = (t.view(shape) if t.is_contiguous() else t for t in parts)
            y, total, grads = add_forward_backward(
                form, x, residual, [cols], weight, None, dy, dresidual
            )
            return [t.reshape(-1) for t in (y, total, *grads.values())]

        for layout in ("offset", "slice", "strided", "transposed"):
            expected = run(contiguous, layout)
            moved = [laid_out(t, layout) for t in contiguous]
            for which in range(5):
                parts = [
                    there if which in (i, 4) else here
                    for i, (here, there) in enumerate(zip(contiguous, moved, strict=True))
                ]
                for a, b in zip(run(parts, layout), expected, strict=True):
                    assert same_bits(a, b), f"{form}, {cols} columns, tensor {which} {layout}"


def leaves_of(kind, generator, shape=(6,), zeros=False):
    """[input, residual, weight] and a bias for LayerNorm, in fp64."""
    weight = 0.5 + leaf(generator, *shape).detach().sigmoid()
    if zeros:
        weight.view(-1)[1::3] = 0
    leaves = [leaf(generator, 4, *shape), leaf(generator, 4, *shape), weight.requires_grad_()]
    return [*leaves, leaf(generator, *shape)] if kind == "layer" else leaves


def call_of(kind, memory_efficient, shape=(6,)):
    function = fn.add_layer_norm if kind == "layer" else fn.add_rms_norm

    def call(x, residual, *params):
        return function(x, residual, shape, *params, memory_efficient=memory_efficient)

    return call


def written_out(kind, shape=(6,)):
    norm = fn.layer_norm if kind == "layer" else fn.rms_norm

    def call(x, residual, *params):
        return norm(x + residual, shape, *params), x + residual

    return call


@pytest.mark.parametrize("zeros", [False, True], ids=["", "zero weights"])
@each_flag
@each_kind
def test_gradcheck(kind, memory_efficient, zeros, device, generator):
    """Of both outputs together and of each alone."""
    leaves, call = leaves_of(kind, generator, zeros=zeros), call_of(kind, memory_efficient)
    assert gradcheck(call, leaves, nondet_tol=0)
    assert gradcheck(lambda *args: call(*args)[0], leaves, nondet_tol=0)
    assert gradcheck(lambda *args: call(*args)[1], leaves[:2] + leaves[2:], nondet_tol=0)
    shape = (3, 2)
    several = leaves_of(kind, generator, shape, zeros)
    assert gradcheck(call_of(kind, memory_efficient, shape), several, nondet_tol=0)


@pytest.mark.parametrize("zeros", [False, True], ids=["", "zero weights"])
@each_flag
@each_kind
def test_second_derivatives(kind, memory_efficient, zeros, device, generator):
    leaves, call = leaves_of(kind, generator, zeros=zeros), call_of(kind, memory_efficient)
    gradients = [leaf(generator, 4, 6) for _ in range(2)]
    results = []
    for function in (call, written_out(kind)):
        outputs = function(*leaves)
        first = torch.autograd.grad(outputs, leaves, gradients, create_graph=True)
        second = torch.autograd.grad(
            sum(g.sin().sum() for g in first),
            [*leaves, *gradients],
            allow_unused=True,
            materialize_grads=True,
        )
        results.append([*first, *second])
    torch.testing.assert_close(*results)
    if not zeros:
        assert gradgradcheck(call, leaves, nondet_tol=0)


@each_flag
@each_kind
def test_gradients_have_the_same_bits_with_create_graph(kind, memory_efficient, device, generator):
    leaves, gradients = leaves_of(kind, generator), [leaf(generator, 4, 6) for _ in range(2)]
    outputs = call_of(kind, memory_efficient)(*leaves)
    plain = torch.autograd.grad(outputs, leaves, gradients, retain_graph=True)
    differentiable = torch.autograd.grad(outputs, leaves, gradients, create_graph=True)
    for a, b in zip(plain, differentiable, strict=True):
        assert same_bits(a, b.detach())


@each_flag
def test_only_the_gradients_that_are_asked_for(memory_efficient, device, generator):
    values = [t.detach() for t in leaves_of("layer", generator)]
    for mask in range(1, 16):
        results = []
        for function in (call_of("layer", memory_efficient), written_out("layer")):
            leaves = [t.clone().requires_grad_(bool(mask >> i & 1)) for i, t in enumerate(values)]
            output, residual_out = function(*leaves)
            (output.sin().sum() + residual_out.square().sum()).backward()
            results.append([t.grad for t in leaves])
        for ours, theirs in zip(*results, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                torch.testing.assert_close(ours, theirs)


@each_flag
@each_kind
def test_the_sum_is_no_function_of_the_parameters(kind, memory_efficient, device, generator):
    """It requires grad where a term does, as that of torch, and second derivatives are right."""
    leaves = leaves_of(kind, generator)
    for mask in range(2 ** len(leaves)):
        values = [t.detach().requires_grad_(bool(mask >> i & 1)) for i, t in enumerate(leaves)]
        results = []
        for function in (call_of(kind, memory_efficient), written_out(kind)):
            output, residual_out = function(*values)
            assert output.requires_grad == bool(mask)
            assert residual_out.requires_grad == bool(mask & 3)
            wanted = [t for t in values if t.requires_grad]
            if wanted:
                loss = output.sin().sum() + residual_out.square().sum()
                first = torch.autograd.grad(loss, wanted, create_graph=True)
                second = sum(g.square().sum() for g in first)
                results.append(torch.autograd.grad(second, wanted, allow_unused=True))
        for ours, theirs in zip(*results, strict=True) if results else ():
            if theirs is not None:
                torch.testing.assert_close(ours, theirs)


@each_flag
@each_sum
@each_kind
def test_gradient_of_the_sum_alone_passes_through(kind, sums, memory_efficient, device, generator):
    form = Form(kind, *sums, weight=sums[0], memory_efficient=memory_efficient)
    x, residual, _, dresidual = tensors(generator, form, 6, 40)
    weight, _ = random_parameters(generator, form, [40], recoverable=True)
    leaves = [t.requires_grad_() for t in (x, residual, weight)]
    _, total = apply_add(form, x, residual, [40], weight)
    grads = torch.autograd.grad(total, leaves, dresidual, allow_unused=True)
    assert same_bits(grads[0], dresidual.to(x.dtype)) and same_bits(grads[1], dresidual)
    assert grads[2] is None


@each_kind
def test_gradients_do_not_share_memory_with_each_other(kind, device, generator):
    x, residual = leaf(generator, 4, 6), leaf(generator, 4, 6)
    for outputs in (slice(0, 1), slice(1, 2), slice(0, 2)):
        x.grad = residual.grad = None
        sum(t.sum() for t in call_of(kind, False)(x, residual)[outputs]).backward()
        before = residual.grad.clone()
        x.grad.zero_()
        assert torch.equal(residual.grad, before)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@each_flag
@each_kind
def test_nothing_to_differentiate_gives_the_same_bits(
    kind, mode, memory_efficient, device, generator
):
    leaves, call = leaves_of(kind, generator, zeros=True), call_of(kind, memory_efficient)
    with_graph = call(*leaves)
    with mode():
        without = call(*leaves)
    for a, b in zip(with_graph, without, strict=True):
        assert a.requires_grad and not b.requires_grad and same_bits(a.detach(), b)


@each_sum
@each_kind
def test_what_is_saved(kind, sums, device, generator):
    """residual_out and the statistics; memory_efficient: the output and one number a row. Neither
    of the terms, and nothing twice."""
    rows, cols = 30, 48
    for memory_efficient in (False, True):
        form = Form(kind, *sums, weight=sums[0], memory_efficient=memory_efficient)
        x, residual, _, _ = tensors(generator, form, rows, cols)
        weight, _ = random_parameters(generator, form, [cols], recoverable=True)
        leaves = [t.requires_grad_() for t in (x, residual, weight)]
        (y, total), saved = saved_storages(
            lambda form=form, leaves=leaves: apply_add(form, *leaves[:2], [cols], leaves[2])
        )
        kept = y if memory_efficient else total
        saved.pop(address(weight))
        assert address(kept) in saved
        of_rows = 2 if kind == "layer" and not memory_efficient else 1
        assert sorted(t.numel() for t in saved.values()) == [rows] * of_rows + [rows * cols]


@each_kind
def test_columns_that_are_lost_cost_their_share(kind, device, generator):
    rows, cols = 30, 480
    form = Form(kind, BF16, BF16, weight=BF16, memory_efficient=True)
    x, residual, _, _ = (t.requires_grad_() for t in tensors(generator, form, rows, cols))
    weight, _ = random_parameters(generator, form, [cols], recoverable=True)
    weight[5] = 0
    (y, _), saved = saved_storages(lambda: apply_add(form, x, residual, [cols], weight))
    big = sum(t.nbytes for t in saved.values() if t.numel() >= rows)
    assert big < 1.2 * y.nbytes


@each_kind
def test_changes_in_place(kind, device, generator):
    """Of what is saved they are an error, of the other output they are not."""
    for memory_efficient in (False, True):
        for which in (0, 1):
            leaves = leaves_of(kind, generator)
            outputs = call_of(kind, memory_efficient)(*leaves)
            outputs[which].mul_(2)
            if (which == 0) == memory_efficient:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    outputs[0].sum().backward()
            else:
                outputs[0].sum().backward()


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16, FP64], ids=str)
@pytest.mark.parametrize("autocast_dtype", [BF16, FP16], ids=lambda d: f"to {d}")
@each_flag
@each_kind
def test_autocast(kind, memory_efficient, autocast_dtype, dtype, device, generator):
    """The output has the dtype of the norm of the input, and residual_out its own."""
    x = randn(generator, 4, 16, dtype=dtype).requires_grad_()
    weight = torch.ones(16, device=device, dtype=FP64 if dtype == FP64 else FP32)
    norm = fn.layer_norm if kind == "layer" else fn.rms_norm
    add_norm = fn.add_layer_norm if kind == "layer" else fn.add_rms_norm
    for residual_dtype in {dtype, FP32 if dtype in (BF16, FP16) else dtype}:
        residual = randn(generator, 4, 16, dtype=residual_dtype).requires_grad_()
        with torch.autocast(device, autocast_dtype):
            expected = norm(x, [16], weight, memory_efficient=memory_efficient)
            y, total = add_norm(x, residual, [16], weight, memory_efficient=memory_efficient)
        assert y.dtype == expected.dtype and total.dtype == residual_dtype
        (y.float().sum() + total.float().sum()).backward()
        assert x.grad.dtype == dtype and residual.grad.dtype == residual_dtype
        with torch.no_grad():
            exact = norm(x.double() + residual.double(), [16], weight.double(), eps=1e-5)
        limit = max({BF16: 2**-6, FP16: 2**-8}.get(t.dtype, 1e-5) for t in (y, total))
        torch.testing.assert_close(y.double(), exact, rtol=limit, atol=limit)


@each_flag
@each_kind
@pytest.mark.parametrize("normalized", [[4], [2, 4], [0], [2, 0]], ids=str)
def test_empty_tensors(kind, memory_efficient, normalized, device):
    leading = [0] if 0 not in normalized else [3]
    leaves = [torch.ones(*leading, *normalized, device=device).requires_grad_() for _ in range(2)]
    weight = torch.ones(normalized, device=device, requires_grad=True)
    results = []
    for function in (call_of(kind, memory_efficient, normalized), written_out(kind, normalized)):
        y, total = function(*leaves, weight)
        grads = torch.autograd.grad(y.sum() + total.sum(), [*leaves, weight])
        results.append([y, total, *grads])
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


# (shape, normalized_shape, input, residual, parameters, residual_dtype, out_dtype)
SAMPLES = [
    ((5, 8), [8], FP32, FP32, FP32, None, None),
    ((2, 3, 4, 2), [4, 2], FP64, FP64, FP64, None, None),
    ((5, 8), [8], BF16, FP32, FP32, None, None),
    ((5, 8), [8], BF16, BF16, FP32, FP32, FP32),
    ((5, 8), [8], FP16, FP16, None, None, FP32),
    ((0, 8), [8], FP32, FP32, FP32, None, None),
    ((3, 0), [0], BF16, FP32, FP32, None, None),
]
each_sample = pytest.mark.parametrize("sample", SAMPLES, ids=str)


def arguments(sample, kind, generator, requires_grad=False):
    shape, normalized, dtype, residual_dtype, parameter, sum_dtype, out_dtype = sample
    x, residual = randn(generator, *shape, dtype=dtype), randn(generator, *shape)
    weight = bias = None
    if parameter is not None:
        weight = randn(generator, *normalized).sigmoid().to(parameter)
        bias = randn(generator, *normalized).to(parameter) if kind == "layer" else None
    leaves = [x, residual.to(residual_dtype), weight, bias]
    x, residual, *params = (t if t is None else t.requires_grad_(requires_grad) for t in leaves)
    return [x, *params, normalized, 1e-5, 0.0, kind == "rms", out_dtype, residual, sum_dtype]


@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "needs grad"])
@each_sample
@each_kind
def test_opcheck(kind, sample, requires_grad, device, generator):
    torch.library.opcheck(forward_op, arguments(sample, kind, generator, requires_grad))


@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "needs grad"])
@pytest.mark.parametrize("sample", [s for s in SAMPLES if s[4] and s[1] != [0]], ids=str)
@each_kind
def test_opcheck_listing(kind, sample, requires_grad, device, generator):
    args = arguments(sample, kind, generator)
    args[1].view(-1)[:3] = 0
    if args[2] is not None:  # one that dwarfs the weight would lose more columns
        args[2].mul_(0.1)
    for at in (0, 1, 2, 8):
        args[at] = args[at] if args[at] is None else args[at].requires_grad_(requires_grad)
    torch.library.opcheck(forward_op, (*args, 3))


@pytest.mark.parametrize("mask", [[True, True, True], [True, False, False]], ids=str)
@pytest.mark.parametrize("from_output", [False, True], ids=["", "from output"])
@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "needs grad"])
@each_sample
@each_kind
def test_opcheck_backward(kind, sample, requires_grad, from_output, mask, device, generator):
    args = arguments(sample, kind, generator)
    if from_output and args[2] is not None:  # a bias that dwarfs the weight would give NaN
        args[2].zero_()
    y, total, mean, rstd = forward_op(*args)
    x, weight, bias, normalized, _, offset, rms, *_ = args
    dy, dresidual = (randn(generator, *x.shape).to(t.dtype) for t in (y, total))
    saved = (y if from_output else total).detach()
    options = (normalized, offset, rms, from_output, total.dtype, mask, None, None)
    dresidual.requires_grad_(requires_grad)
    mean = None if rms or from_output else mean
    torch.library.opcheck(backward_op, (dy, saved, mean, rstd, weight, bias, *options, dresidual))


@each_sample
@each_kind
def test_fake_tensors_describe_the_real_ones(kind, sample, device, generator):
    args = arguments(sample, kind, generator)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
        fake = forward_op(*fakes)
    for a, b in zip(forward_op(*args), fake, strict=True):
        assert (a.shape, a.dtype, a.device, a.stride()) == (b.shape, b.dtype, b.device, b.stride())


@each_kind
def test_calling_the_operator_differentiates(kind, device, generator):
    leaves = leaves_of(kind, generator)
    gradients = [leaf(generator, 4, 6).detach() for _ in range(2)]
    eps = 1e-5 if kind == "layer" else torch.finfo(FP64).eps
    x, residual, weight, bias = (*leaves, None)[:4]
    direct = forward_op(x, weight, bias, [6], eps, 0.0, kind == "rms", residual=residual)[:2]
    for a, b in zip(
        torch.autograd.grad(direct, leaves, gradients),
        torch.autograd.grad(call_of(kind, False)(*leaves), leaves, gradients),
        strict=True,
    ):
        assert same_bits(a, b)


TRANSFORMS = {
    "grad": lambda f, n: func.grad(lambda *a: sum(t.sin().sum() for t in f(*a)), tuple(range(n))),
    "jacrev": lambda f, n: func.jacrev(f, tuple(range(n))),
    "jacfwd": lambda f, n: func.jacfwd(f, tuple(range(n))),
    "jvp": lambda f, n: lambda *a: func.jvp(f, a, a),
    "vmap": lambda f, n: func.vmap(f, (0, 0, *[None] * (n - 2))),
    "vmap over the residual": lambda f, n: func.vmap(f, (None, 0, *[None] * (n - 2))),
    "vmap over the weight": lambda f, n: func.vmap(f, (None, None, 0, *[None] * (n - 3))),
    "per-sample gradients": lambda f, n: func.vmap(
        func.grad(lambda *a: sum(t.sin().sum() for t in f(*a)), tuple(range(n))),
        (0, 0, *[None] * (n - 2)),
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@each_flag
@each_kind
def test_torch_func(kind, memory_efficient, transform, device, generator):
    arguments = [t.detach() for t in leaves_of(kind, generator)]
    if transform == "vmap over the residual":
        arguments[0] = arguments[0][0]
    if transform == "vmap over the weight":
        arguments[2] = torch.stack([arguments[2], arguments[2] + 1])
    apply = TRANSFORMS[transform]
    ours = apply(call_of(kind, memory_efficient), len(arguments))(*arguments)
    exact = apply(written_out(kind), len(arguments))(*arguments)
    torch.testing.assert_close(ours, exact)


@each_flag
@each_kind
def test_batched_gradients(kind, memory_efficient, device, generator):
    leaves = leaves_of(kind, generator, zeros=True)
    basis = torch.eye(24, dtype=FP64, device=device).view(24, 4, 6)
    results = []
    for call in (call_of(kind, memory_efficient), written_out(kind)):
        results.append(
            torch.autograd.grad(call(*leaves), leaves, (basis, basis * 2), is_grads_batched=True)
        )
    torch.testing.assert_close(*results)


class Block(torch.nn.Module):
    """Two additions of a pre-norm transformer, with an fp32 residual stream."""

    def __init__(self, kind, memory_efficient, device, dtype=BF16):
        super().__init__()
        self.kind, self.memory_efficient, self.dtype = kind, memory_efficient, dtype
        self.weight = torch.nn.Parameter(torch.rand(16, device=device, dtype=dtype) + 0.5)

    def forward(self, x):
        add_norm = fn.add_layer_norm if self.kind == "layer" else fn.add_rms_norm
        options = {"memory_efficient": self.memory_efficient}
        y, residual = add_norm(x, x.sin(), 16, self.weight, residual_dtype=FP32, **options)
        y, residual = add_norm(y.sin(), residual, 16, self.weight, **options)
        return y, residual


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@each_flag
@each_kind
def test_compiled(kind, memory_efficient, backend, device, generator):
    """One graph for every number of rows, of the library's operators, with eager bits."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    block = Block(kind, memory_efficient, device)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(block, backend=counter, fullgraph=True)
    for rows in (6, 9, 2, 31):
        x, dy = randn(generator, rows, 16, dtype=BF16), randn(generator, rows, 16)
        results = []
        for call in (block, compiled):
            input = x.clone().requires_grad_()
            outputs = call(input)
            grads = torch.autograd.grad(outputs, [input, block.weight], [dy.to(BF16), dy])
            results.append([*(t.detach() for t in outputs), *grads])
        for i, (eager, traced) in enumerate(zip(*results, strict=True)):
            if i < 2 and backend == "aot_eager":
                assert same_bits(eager, traced)
            # Inductor does not round between sin and what follows.
            torch.testing.assert_close(eager, traced, rtol=2**-5, atol=2**-5 * rows)
    assert counter.frame_count == 2


@each_flag
@each_kind
def test_decomposed_when_compiled(kind, memory_efficient, device, generator):
    torch._dynamo.reset()
    block = Block(kind, memory_efficient, device)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    x = randn(generator, 6, 16, dtype=BF16)
    with fused_norm.config.patch(decompose=True):
        for ours, exact in zip(compiled(x), block(x), strict=True):
            assert ours.dtype == exact.dtype
            torch.testing.assert_close(ours, exact, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@each_flag
@each_kind
def test_export(kind, memory_efficient, autocast, device, generator):
    block = Block(kind, memory_efficient, device)
    x = randn(generator, 6, 16, dtype=BF16)
    with torch.autocast(device, BF16, enabled=autocast):
        program = torch.export.export(block, (x,))
        for ours, exact in zip(program.module()(x), block(x), strict=True):
            assert ours.dtype == exact.dtype
            torch.testing.assert_close(ours, exact, rtol=2**-6, atol=2**-6)


def test_export_of_sizes_that_depend_on_data():
    """input and residual have the same number of rows, under two names."""

    class Model(torch.nn.Module):
        def forward(self, x, residual, keep):
            return fn.add_rms_norm(x[keep], residual[keep], (8,))

    args = torch.randn(3, 8), torch.randn(3, 8), torch.tensor([True, False, True])
    exported = torch.export.export(Model(), args).module()
    for ours, exact in zip(exported(*args), Model()(*args), strict=True):
        assert same_bits(ours, exact)


@each_flag
@each_kind
def test_a_deep_stack_keeps_one_activation_a_norm(kind, memory_efficient, device, generator):
    """Gradients through a chain of additions equal those of the chain in torch's operators."""
    weights = [(1 + 0.1 * randn(generator, 32, dtype=FP64)).requires_grad_() for _ in range(4)]
    matrices = [randn(generator, 32, 32, dtype=FP64) / 6 for _ in range(4)]
    x = leaf(generator, 5, 32)

    def stack(add_norm):
        hidden, residual = x, x.cos()
        for weight, matrix in zip(weights, matrices, strict=True):
            hidden, residual = add_norm(hidden, residual, (32,), weight)
            hidden = hidden @ matrix
        return hidden + residual

    ours = getattr(fn, f"add_{kind}_norm")
    norm = F.layer_norm if kind == "layer" else F.rms_norm
    results = []
    for add_norm in (
        lambda *args: ours(*args, memory_efficient=memory_efficient),
        lambda h, r, *args: (norm(h + r, *args), h + r),
    ):
        out = stack(add_norm)
        results.append([out, *torch.autograd.grad(out.sin().sum(), [x, *weights])])
    torch.testing.assert_close(*results)
