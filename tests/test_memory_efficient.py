"""memory_efficient: gradients right for any weights, memory saved where it can be, never a silent
wrong number.

Its gradients may differ from the flag-off limits by what the xhat recovered from the rounded output
propagates, and by no more: reference.py works that out from the output that was really written.
"""

import dataclasses
import math
import weakref

import pytest
import torch
from harness import (
    OUTPUTS,
    Form,
    Verdict,
    address,
    apply,
    check_call,
    each_kind,
    forms,
    full_form,
    module_of,
    randn,
    random_input,
    random_parameters,
    saved_storages,
)
from reference import UNIT, compute_unit, precise, recoverable

from fused_norm import _C, functional

DTYPES = list(OUTPUTS)
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def efficient_forms(kind, dtype):
    """Every affine form, and every output dtype that the flag can give: the input's, and under
    autocast a 16-bit one for fp32 input."""
    for form in forms(kind, dtype):
        if form.y == form.x or form.x == FP32:
            yield dataclasses.replace(form, memory_efficient=True)
            if form.weight:
                yield dataclasses.replace(form, memory_efficient=True, weight_offset=1.0)


def seventh_zero(g):
    return torch.where(torch.arange(len(g), device=g.device) % 7 == 3, 0.0, g)


# What training does to effective weights, and worse.
WEIGHTS = {
    "all recoverable": lambda g: g,
    "negative too": lambda g: (
        g * torch.where(torch.arange(len(g), device=g.device) % 2 == 0, 1.0, -1.0)
    ),
    "a seventh exactly zero": seventh_zero,
    "all zero": torch.zeros_like,
    "one zero": lambda g: torch.where(torch.arange(len(g), device=g.device) == len(g) // 2, 0.0, g),
    "tiny": lambda g: g * 1e-3,
    "of every size": lambda g: g * 10.0 ** -(torch.arange(len(g), device=g.device) % 12).float(),
    "underflowing fp16": lambda g: g * 1e-6,
}


SIZES = {"cpu": [(1, 1), (33, 40), (60, 264), (2, 1027)]}
SIZES["cuda"] = [*SIZES["cpu"], (4097, 96), (513, 4096), (33, 12288), (7, 50257)]


@each_dtype
@each_kind
@pytest.mark.parametrize("weights", WEIGHTS)
def test_gradients_for_any_weights(weights, kind, dtype, device, generator):
    verdict = Verdict()
    for form in efficient_forms(kind, dtype):
        for rows, cols in SIZES[device]:
            weight, bias = random_parameters(generator, form, [cols], recoverable=True)
            if weight is not None:
                g = WEIGHTS[weights](weight.double() + form.weight_offset)
                weight = (g - form.weight_offset).to(form.weight)
            x, dy = (
                random_input(generator, rows, cols, dtype),
                randn(generator, rows, cols, dtype=form.y),
            )
            verdict.add(f"{form}, {rows} x {cols}", check_call(form, x, weight, bias, dy))
    verdict.check()


@each_dtype
@each_kind
def test_gradients_when_dy_is_parallel_to_the_normalized_input(kind, dtype, device, generator):
    """dx is then the small difference of large terms: what the rounded output lost shows most."""
    verdict = Verdict()
    form = full_form(kind, dtype, memory_efficient=True)
    x = random_input(generator, 64, 264, dtype)
    weight, bias = random_parameters(generator, form, [264], recoverable=True)
    with torch.no_grad():
        dy = (apply(dataclasses.replace(form, weight=None, bias=None), x, [264]) / weight).to(dtype)
    verdict.add(str(form), check_call(form, x, weight, bias, dy))
    verdict.check()


@each_dtype
def test_gradients_when_the_bias_dwarfs_the_weight(dtype, device, generator):
    verdict = Verdict()
    form = Form("layer", dtype, dtype, weight=dtype, bias=dtype, memory_efficient=True)
    # u |b / g| from far below the threshold 2^-6 to far above it.
    for power in range(-12, 3):
        x, dy = random_input(generator, 20, 264, dtype), randn(generator, 20, 264, dtype=dtype)
        weight, bias = random_parameters(generator, form, [264], recoverable=True)
        weight = torch.ldexp(
            weight.sign(), torch.tensor(-6 if dtype == FP16 else 0, device=x.device)
        ).to(dtype)
        bias = (bias * weight.abs() * 2.0**power / UNIT[dtype]).to(dtype)
        verdict.add(f"{form}, u |b / g| up to 2^{power}", check_call(form, x, weight, bias, dy))
    verdict.check()


RATIOS = [0, 1e-3, 0.5, 1, 3.5, 4, 4.5, 30, 33, 1e3, 4e3, 5e3, 2.6e5, 2.7e5, 1e6]


def every_weight_and_bias(dtype, device):
    """(weight, bias) in fp32 or fp64: |g| from the largest to the smallest subnormal number of
    dtype, |b / g| of RATIOS, as far as the output stays finite."""
    info = torch.finfo(dtype)
    smallest = {BF16: -133, FP16: -24, FP32: -149, FP64: -1074}[dtype]
    largest = int(math.log2(info.max))
    powers = torch.arange(smallest, largest + 1, dtype=FP64)[:: 1 if dtype == FP16 else 3]
    size = torch.ldexp(torch.ones(()), powers).double()[:, None].expand(-1, len(RATIOS))
    ratio = torch.tensor(RATIOS, dtype=FP64)
    keep = size * (4 + ratio) < info.max
    signs = torch.tensor([1.0, -1.0], dtype=FP64)[torch.arange(int(keep.sum())) % 2]
    weight, bias = size[keep], (size * ratio)[keep]
    store = FP64 if dtype == FP64 else FP32
    return (t.to(device, store) for t in (weight * signs, bias))


@each_dtype
def test_recovered_inputs_stay_within_their_bound(dtype, device, generator):
    """|error of xhat| <= u max(|xhat + b / g|, s / |g|), with s the smallest normal number, and
    what a few operations in the precision of the arithmetic add; from the whole range of weights
    and biases. With one row and dy = 1 the weight's gradient is xhat."""
    weight, bias = every_weight_and_bias(dtype, device)
    cols = len(weight)
    x = randn(generator, 1, cols, dtype=dtype)
    leaf = weight.clone().requires_grad_()
    y = functional.layer_norm(x, [cols], leaf, bias, memory_efficient=True)
    y.backward(torch.ones_like(y))
    xhat = (x.double() - x.double().mean()) / (x.double().var(correction=0) + 1e-5).sqrt()
    xhat, g, b = xhat[0], weight.double(), bias.double()
    bound = UNIT[dtype] * torch.maximum(
        (xhat + b / g).abs(), torch.finfo(dtype).smallest_normal / g.abs()
    )
    recovered = precise(g, b, dtype)
    bound = torch.where(recovered, bound, 0)
    scale = xhat.abs().max() + torch.where(recovered, (b / g).abs(), 0)
    error = (leaf.grad.double() - xhat).abs()
    worst = (error / (bound + 8 * compute_unit(dtype) * scale)).max()
    assert worst <= 1, f"{worst:.3g} times the bound"


@each_dtype
def test_gradients_over_the_whole_range(dtype, device, generator):
    """Weights down to the smallest subnormal number, biases up to 1e6 times as large, and dy
    nearly parallel to the normalized input."""
    verdict = Verdict()
    store = FP64 if dtype == FP64 else FP32
    form = Form("layer", dtype, dtype, weight=store, bias=store, memory_efficient=True)
    weight, bias = every_weight_and_bias(dtype, device)
    middle = (weight.abs() > 2.0**-8) & (weight.abs() < 2.0**4)
    for name, chosen in (("all", weight.abs() < 2.0**200), ("of middle size", middle)):
        g, b = weight[chosen], bias[chosen]
        for kept in (1, 5):  # many lost columns: the input is saved; few: they are listed
            lost = ~recoverable(g.double(), b.double(), dtype)
            keep = ~lost | (torch.arange(len(g), device=device) % kept == 0)
            g_kept, b_kept = g[keep], b[keep]
            x = random_input(generator, 20, len(g_kept), dtype)
            dy = randn(generator, 20, len(g_kept), dtype=dtype)
            verdict.add(f"{name}, {kept}", check_call(form, x, g_kept, b_kept, dy))
            if name == "all":
                continue
            plain = dataclasses.replace(form, weight=None, bias=None, memory_efficient=False)
            parallel = (apply(plain, x, [len(g_kept)]) / g_kept).to(dtype)
            verdict.add(f"parallel, {kept}", check_call(form, x, g_kept, b_kept, parallel))
    verdict.check()


@pytest.mark.parametrize("offset", [0.1, 1.0, -1 / 3])
def test_a_weight_that_cancels_the_offset_in_fp32(offset, device, generator):
    """The kernel adds in fp32. A weight of exactly fp32(-offset) is an effective weight of 0,
    though in fp64 the sum is not: gradients must be right, not a division by zero."""
    form = Form("rms", FP32, FP32, weight=FP32, weight_offset=offset, memory_efficient=True)
    x, dy = random_input(generator, 20, 64, FP32), randn(generator, 20, 64)
    weight = random_parameters(generator, form, [64], recoverable=True)[0]
    weight[::5] = -offset
    verdict = Verdict()
    verdict.add(str(form), check_call(form, x, weight, None, dy))
    verdict.check()


@each_kind
def test_weights_that_cross_zero_while_training(kind, generator, device):
    """Weights change between steps in every way optimizers write them, .data included; each
    step's gradients are those of the same module without the flag."""
    plain, efficient = (
        module_of(kind, 24, device=device, dtype=FP64, **flag)
        for flag in ({}, {"memory_efficient": True})
    )
    zeros = torch.zeros(24, dtype=FP64, device=device)
    writes = [
        lambda w: w.data.mul_(0.5),
        lambda w: w.data.__setitem__(slice(0, 24, 7), 0.0),
        lambda w: w.data.copy_(zeros),
        lambda w: torch.nn.init.ones_(w),
        lambda w: setattr(w, "data", zeros.clone()),
        lambda w: setattr(w, "data", zeros + 2),
        lambda w: w.detach().view(-1)[3:4].zero_(),
    ]
    for step, write in enumerate(writes):
        grads = []
        x, dy = randn(generator, 10, 24, dtype=FP64), randn(generator, 10, 24, dtype=FP64)
        for module in (plain, efficient):
            write(module.weight)
            module.zero_grad()
            leaf = x.clone().requires_grad_()
            module(leaf).backward(dy)
            grads.append([leaf.grad, *(p.grad for p in module.parameters())])
        for ours, expected in zip(*reversed(grads), strict=True):
            torch.testing.assert_close(ours, expected, msg=f"step {step}")


@each_dtype
@each_kind
def test_saves_the_output_one_number_a_row_and_the_parameters(kind, dtype, device, generator):
    rows, cols = 30, 48
    for form in efficient_forms(kind, dtype):
        weight, bias = random_parameters(generator, form, [cols], recoverable=True)
        leaves = [t.requires_grad_() for t in (weight, bias) if t is not None]
        x = random_input(generator, rows, cols, dtype).requires_grad_()
        y, saved = saved_storages(lambda x=x, f=form, w=weight, b=bias: apply(f, x, [cols], w, b))
        assert address(x) not in saved, f"{form} saves the input"
        assert address(y) in saved, f"{form} does not save the output"
        others = {
            key: t for key, t in saved.items() if key not in {address(t) for t in (y, *leaves)}
        }
        sizes = [t.numel() for t in others.values()]
        assert sizes == [rows], (
            f"{form}: beside output and parameters it saves tensors of {sizes} elements"
        )


@each_dtype
@each_kind
def test_saves_the_input_when_a_column_is_lost_and_only_that(kind, dtype, device, generator):
    rows, cols = 30, 48
    for form in efficient_forms(kind, dtype):
        if form.weight is None:
            continue
        weight, bias = random_parameters(generator, form, [cols], recoverable=True)
        weight[5] = -form.weight_offset
        x = random_input(generator, rows, cols, dtype).requires_grad_()
        weight.requires_grad_()
        y, saved = saved_storages(lambda x=x, f=form, w=weight, b=bias: apply(f, x, [cols], w, b))
        big = sum(t.nbytes for t in saved.values() if t.numel() >= rows * cols)
        # Memory in proportion to the lost columns, up to the whole input; not output and input
        # both.
        assert big <= x.nbytes, (
            f"{form} saves {big} bytes of activations for an input of {x.nbytes}"
        )


@each_kind
def test_flag_off_saves_the_input(kind, device, generator):
    """And so leaves the output free to be changed in place, as torch does."""
    form = Form(kind, FP32, FP32, weight=FP32)
    weight, _ = random_parameters(generator, form, [48])
    x = random_input(generator, 30, 48, FP32).requires_grad_()
    y, saved = saved_storages(lambda: apply(form, x, [48], weight))
    assert address(x) in saved and address(y) not in saved
    y.add_(1)
    y.sum().backward()


@pytest.mark.parametrize("adds", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("memory_efficient", [False, True], ids=["", "memory_efficient"])
@each_kind
def test_hooks_that_keep_what_is_saved(kind, memory_efficient, adds, device, generator):
    """They keep no graph alive, and second derivatives are right with them."""
    weight = torch.ones(16, device=device)
    weight[:3] = 0  # listed
    tensors = [randn(generator, 4, 16).requires_grad_() for _ in range(1 + adds)]
    function = getattr(functional, f"add_{kind}_norm" if adds else f"{kind}_norm")

    def call():
        results = function(*tensors, (16,), weight, memory_efficient=memory_efficient)
        return results if adds else [results]

    def derivatives(results):
        grads = torch.autograd.grad([t.sin().sum() for t in results], tensors, create_graph=True)
        return grads + torch.autograd.grad(sum(g.sin().sum() for g in grads), tensors)

    expected = derivatives(call())
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        results, others = call(), call()
    for ours, theirs in zip(derivatives(results), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    mark = torch.nn.Module()
    others[0].grad_fn.metadata["mark"] = mark
    mark = weakref.ref(mark)
    del others
    assert mark() is None


@each_kind
def test_changing_the_output_in_place_is_an_error(kind, device, generator):
    for change in (lambda y: y.add_(1), torch.relu_, lambda y: y[0].zero_()):
        form = Form(kind, FP32, FP32, weight=FP32, memory_efficient=True)
        weight, _ = random_parameters(generator, form, [48], recoverable=True)
        y = apply(form, random_input(generator, 30, 48, FP32).requires_grad_(), [48], weight)
        change(y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("zeros", [0, 5], ids=["", "with zeros"])
@pytest.mark.parametrize("memory_efficient", [False, True], ids=["", "memory_efficient"])
@each_kind
def test_changing_a_parameter_in_place_is_an_error(
    kind, memory_efficient, zeros, device, generator
):
    """Between forward and backward: gradients would mix the old numbers and the new."""
    form = full_form(kind, FP32, memory_efficient=memory_efficient)
    for changed in ("weight", "bias") if form.bias else ("weight",):
        weight, bias = random_parameters(generator, form, [48], recoverable=True)
        weight[:zeros] = 0
        parameters = {"weight": weight, "bias": bias}
        leaves = [p.requires_grad_() for p in parameters.values() if p is not None]
        y = apply(form, random_input(generator, 30, 48, FP32), [48], weight, bias)
        torch.autograd.grad(y.sum(), leaves, retain_graph=True)
        with torch.no_grad():
            parameters[changed].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(y.sum(), leaves)


@pytest.mark.cuda
@each_kind
def test_gpu_memory_of_a_chain_of_norms_and_linears(kind):
    """A linear layer after a norm saves the norm's output anyway: with the flag the norm's input
    is free to go."""
    rows, cols, layers = 4096, 2048, 4

    def bytes_for_backward(memory_efficient):
        torch.manual_seed(0)
        steps = []
        for _ in range(layers):
            steps += [
                module_of(kind, cols, device="cuda", dtype=BF16, memory_efficient=memory_efficient),
                torch.nn.Linear(cols, cols, device="cuda", dtype=BF16),
            ]
        model = torch.nn.Sequential(*steps)
        x = torch.randn(rows, cols, device="cuda", dtype=BF16, requires_grad=True)
        before = torch.cuda.memory_allocated()
        loss = model(x).sum()
        used = torch.cuda.memory_allocated() - before
        loss.backward()
        return used

    bytes_for_backward(False)  # the matrix library takes its workspace at the first use
    activation = rows * cols * 2
    saved = bytes_for_backward(False) - bytes_for_backward(True)
    # The first norm's input is the caller's own. Means add rows * 4 bytes each for LayerNorm;
    # blocks are of 512 bytes.
    assert abs(saved - (layers - 1) * activation) <= layers * (rows * 4 + 512)


def lost(weight, bias, offset, dtype):
    return _C.unrecoverable_columns(weight, bias, offset, dtype)


@each_dtype
def test_recoverable_columns(dtype, device):
    """Effective weight a normal number of the output's dtype, and u |b / g| at most 2^-6."""
    info = torch.finfo(dtype)
    limit = 2.0**-6 / UNIT[dtype]  # a power of two: b / g is exact
    cases = [  # weight, bias, lost
        (1.0, 0.0, False),
        (-1.0, 0.5, False),
        (0.0, 0.0, True),
        (-0.0, 1.0, True),
        (info.smallest_normal, 0.0, False),
        (-info.smallest_normal, 0.0, False),
        (info.smallest_normal / 2, 0.0, True),
        (info.max, 1.0, False),
        (float("inf"), 0.0, True),
        (float("nan"), 0.0, True),
        (1.0, limit, False),
        (1.0, -limit, False),
        (1.0, limit * 1.25, True),
        (-2.0, limit * 2, False),
        (-2.0, limit * 2.5, True),
        (1.0, float("inf"), True),
        (1.0, float("nan"), True),
    ]
    for weight, bias, expected in cases:
        g, b = (torch.tensor([v], dtype=dtype, device=device) for v in (weight, bias))
        assert lost(g, b, 0.0, dtype) == expected, f"weight {weight}, bias {bias}"
        assert bool(recoverable(g.double(), b.double(), dtype)) != expected
    # Without a weight it is 1, without a bias 0.
    ones = torch.ones(3, dtype=dtype, device=device)
    assert lost(None, ones * limit, 0.0, dtype) == 0
    assert lost(None, ones * limit * 1.25, 0.0, dtype) == 3
    assert lost(ones, None, 0.0, dtype) == 0
    assert lost(ones, None, -1.0, dtype) == 3
    assert lost(ones * 0, None, 1.0, dtype) == 0


def test_fp32_weight_too_small_or_large_for_a_16_bit_output(device):
    weight = torch.tensor([1.0, 1e-6, 1e5, 1e-30], device=device)
    assert lost(weight, None, 0.0, FP32) == 0
    assert lost(weight, None, 0.0, BF16) == 0
    assert lost(weight, None, 0.0, FP16) == 3


@each_kind
def test_an_output_that_overflows_gives_no_plausible_gradient(kind, device, generator):
    """fp16: the row's dx and the column's dweight are not finite, everything else is right."""
    x = randn(generator, 6, 16, dtype=FP16) * 0.25
    x[:, 5] = 0
    x[2, 5] = 2.0  # the one xhat above 65504 / 40000
    dy = randn(generator, 6, 16, dtype=FP16) * 2**-10
    grads = []
    for flag in (False, True):
        leaf = x.clone().requires_grad_()
        weight = torch.full((16,), 2.0, device=device, dtype=FP16)
        weight[5] = 40000.0
        weight.requires_grad_()
        call = functional.layer_norm if kind == "layer" else functional.rms_norm
        y = call(leaf, [16], weight, memory_efficient=flag)
        assert y.isinf().nonzero().tolist() == [[2, 5]]
        y.backward(dy)
        grads.append([leaf.grad.double(), weight.grad.double()])
    (dx, dweight), (efficient_dx, efficient_dweight) = grads
    assert dx.isfinite().all() and dweight.isfinite().all()
    rows, columns = torch.arange(6) != 2, torch.arange(16) != 5
    assert not efficient_dx[2].isfinite().any() and not efficient_dweight[5].isfinite()
    # Four roundings: of the output, which enters dx twice, and of both gradients; of terms that may
    # be twice the largest gradient. 2**-11 is half a unit of fp16. Seen over 200 seeds: a quarter.
    for ours, expected in (
        (efficient_dx[rows], dx[rows]),
        (efficient_dweight[columns], dweight[columns]),
    ):
        limit = 8 * 2**-11 * expected.abs().max().item()
        torch.testing.assert_close(ours, expected, rtol=0, atol=limit)


@each_kind
def test_compiled_gradients_follow_weights_that_become_zero(kind, device, generator):
    """No decision is baked into the compiled graph."""
    module = module_of(kind, 24, device=device, dtype=FP64, memory_efficient=True)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for weight in (1.0, 0.0):
        with torch.no_grad():
            module.weight[::7] = weight
        x, dy = randn(generator, 10, 24, dtype=FP64), randn(generator, 10, 24, dtype=FP64)
        grads = []
        for call in (module, compiled):
            module.zero_grad()
            leaf = x.clone().requires_grad_()
            call(leaf).backward(dy)
            grads.append([leaf.grad, *(p.grad.clone() for p in module.parameters())])
        for compiled_grad, eager_grad in zip(*reversed(grads), strict=True):
            torch.testing.assert_close(compiled_grad, eager_grad)


@pytest.mark.parametrize("shape", [(6, 16), (600, 768), (40, 1024)], ids=str)
def test_a_listed_column_needs_no_finite_output(shape, device, generator):
    """fp16, where a bias beyond 65504 makes a column's output infinite."""
    x, dy = (randn(generator, *shape, dtype=FP16) for _ in range(2))
    grads = []
    for flag in (False, True):
        leaf = x.clone().requires_grad_()
        weight, bias = (torch.full(shape[1:], v, device=device) for v in (1.0, 0.0))
        bias[5] = 1e5
        weight.requires_grad_(), bias.requires_grad_()
        y = functional.layer_norm(leaf, shape[1:], weight, bias, memory_efficient=flag)
        assert y[:, 5].isinf().all() and y.isinf().sum() == len(x)
        y.backward(dy)
        grads.append([t.grad.double() for t in (leaf, weight, bias)])
    for ours, expected in zip(*grads[::-1], strict=True):
        # As above. The errors of a sum's terms add up as the terms do, at most.
        limit = 8 * 2**-11 * expected.abs().max().item()
        torch.testing.assert_close(ours, expected, rtol=0, atol=limit)
