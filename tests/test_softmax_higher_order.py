"""The softmaxes' derivatives beyond the first, forward mode, and torch.func."""

import math

import pytest
import torch
from harness import leaf, same_bits
from softmax_harness import BF16, FP16, FP32, FP64, backward_op, forward_op, hidden_of, masked_op
from softmax_harness import Form as HarnessForm
from torch import func
from torch.autograd import forward_ad
from torch.autograd.gradcheck import gradcheck, gradgradcheck

import fused_norm.functional as fn

SHAPE = (2, 3, 4)
# Softmaxes: (logarithm, dim). Masked ones: (mask, scale, causal).
PLAIN = [(log, dim) for log in (False, True) for dim in (-1, 1, 0)]
MASKED = [
    (None, 1.0, False),
    (None, -1.5, True),
    ("boolean", 0.7, False),
    ("boolean", 0.7, True),
    ("additive", 2.0, False),
    ("additive with -inf", 2.0, True),
    ("all of a row", 0.7, False),
]
FORMS = [*PLAIN, *MASKED]
IDS = [f"{'log_' * log}softmax {dim}" for log, dim in PLAIN]
IDS += [f"masked: {mask}{' causal' * causal}" for mask, _, causal in MASKED]
each_form = pytest.mark.parametrize("form", FORMS, ids=IDS)


def mask_of(name, device):
    generator = torch.Generator().manual_seed(7)
    # Numbers that every dtype has.
    random = (torch.randn(SHAPE[1:], generator=generator, dtype=FP64) * 8).round() / 8
    return {
        None: None,
        "boolean": random < 0.3,
        "additive": random,
        "additive with -inf": random.masked_fill(random < -0.3, -math.inf),
        "all of a row": torch.tensor([False, True, False])[:, None],
    }[name]


def call_of(form, device, dtype=None):
    """The library's function of x."""
    if len(form) == 2:
        function = fn.log_softmax if form[0] else fn.softmax
        return lambda x: function(x, form[1], dtype)
    mask = mask_of(form[0], device)
    mask = mask if mask is None else mask.to(device)
    return lambda x: fn.scaled_masked_softmax(x, mask, *form[1:])


def chain_of(form, device):
    """The same in torch's elementary operators."""
    if len(form) == 2:

        def call(x):
            x = x - x.amax(form[1], keepdim=True).detach()
            total = x.exp().sum(form[1], keepdim=True)
            return x - total.log() if form[0] else x.exp() / total

        return call
    mask, scale, causal = form
    mask = mask_of(mask, device)
    mask = mask if mask is None else mask.to(device)

    def call(x):
        hidden = hidden_of(HarnessForm(x.dtype, x.dtype, causal=causal), x, mask)
        if mask is not None and mask.dtype != torch.bool:
            hidden = hidden | (mask == -math.inf)
            added = mask.masked_fill(mask == -math.inf, 0.0)
        else:
            added = 0.0
        e = (x * scale + torch.as_tensor(added).to(x)).exp().masked_fill(hidden, 0.0)
        return e / e.sum(-1, keepdim=True).clamp_min(1e-300)

    return call


@each_form
def test_gradgradcheck(form, device, generator):
    assert gradgradcheck(call_of(form, device), leaf(generator, *SHAPE), nondet_tol=0)


@each_form
def test_gradgradcheck_under_hooks_of_saved_tensors(form, device, generator):
    """Which keep an output without its node."""

    def call(x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return call_of(form, device)(x)

    assert gradgradcheck(call, leaf(generator, *SHAPE), nondet_tol=0)


@pytest.mark.parametrize("shape", [(), (5,), (3, 1)], ids=str)
def test_gradgradcheck_of_few_dimensions(shape, device, generator):
    for call in (
        lambda x: fn.softmax(x, 0),
        lambda x: fn.log_softmax(x, -1),
        lambda x: fn.scaled_masked_softmax(x, scale=0.5),
    ):
        assert gradgradcheck(call, leaf(generator, *shape), nondet_tol=0)


def test_gradgradcheck_of_strided_input_and_more_queries_than_keys(device, generator):
    """Of 5 queries over 2 keys the first three see nothing."""

    def call(base):
        x = base.permute(1, 2, 0)[:, 1:]
        return fn.softmax(x, 1), fn.scaled_masked_softmax(x, None, 0.5, True)

    assert gradgradcheck(call, leaf(generator, 2, 2, 6), nondet_tol=0)


@each_form
def test_empty(form, device):
    for shape in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        if len(form) == 3 and form[0] is not None and shape[1:] != SHAPE[1:]:
            continue
        x = torch.zeros(shape, dtype=FP64, device=device).requires_grad_()
        y = call_of(form, device)(x)
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        (ddx,) = torch.autograd.grad(dx.square().sum(), x)
        assert y.shape == dx.shape == ddx.shape == shape


@each_form
def test_gradients_have_the_same_bits_with_create_graph(form, device, generator):
    x, dy = leaf(generator, *SHAPE), leaf(generator, *SHAPE)
    y = call_of(form, device)(x)
    (plain,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    (differentiable,) = torch.autograd.grad(y, x, dy, create_graph=True)
    assert differentiable.requires_grad and same_bits(plain, differentiable.detach())


@each_form
def test_third_derivative(form, device, generator):
    def second(x):
        (first,) = torch.autograd.grad(call_of(form, device)(x).sin().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x, create_graph=True)

    assert gradcheck(second, leaf(generator, *SHAPE), nondet_tol=0)


@pytest.mark.parametrize(
    ("dtype", "out"),
    [(FP32, None), (FP16, None), (BF16, None), (FP16, FP32), (BF16, FP32)],
    ids=str,
)
@each_form
def test_gradient_penalty(form, dtype, out, device, generator):
    """The usual reason for a second derivative, at every dtype, against fp64."""

    def penalty_gradient(call, x):
        (dx,) = torch.autograd.grad(call(x).double().sin().sum(), x, create_graph=True)
        return torch.autograd.grad((dx.double().square().sum() - 1).square(), x)[0]

    x = leaf(generator, *SHAPE, dtype=dtype)
    if len(form) == 3 and out is not None:
        mask = mask_of(form[0], device)
        mask = mask if mask is None else mask.to(device)

        def ours(x):
            return masked_op(x, mask, *form[1:], out)
    else:
        ours = call_of(form, device, out)
    chain = chain_of(form, device)
    exact = penalty_gradient(chain, x.detach().double().requires_grad_())
    usual, found = penalty_gradient(chain, x), penalty_gradient(ours, x)
    assert found.dtype == dtype
    # Twice the error of the same in torch's operators at this dtype, which is itself a draw, and a
    # few roundings.
    unit = {FP32: 2**-24, FP16: 2**-11, BF16: 2**-8}[dtype]
    error, usual_error = ((t.double() - exact).norm() for t in (found, usual))
    assert error <= 2 * usual_error + 4 * unit * exact.norm()


def test_hidden_elements_have_no_part_in_it(device, generator):
    """NaN where the input is hidden reaches no derivative of the rest."""
    mask = mask_of("boolean", device).to(device)
    x = leaf(generator, *SHAPE).detach()
    results = []
    for hidden in (0.0, math.nan):
        given = x.masked_fill(mask, hidden).requires_grad_()
        y = fn.scaled_masked_softmax(given, mask)
        (dx,) = torch.autograd.grad(y.sin().sum(), given, create_graph=True)
        (ddx,) = torch.autograd.grad(dx.square().sum(), given)
        assert not dx.detach()[mask.expand_as(x)].any() and not ddx[mask.expand_as(x)].any()
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(given, torch.ones_like(x))
            tangent = forward_ad.unpack_dual(fn.scaled_masked_softmax(dual, mask)).tangent
        results.append([dx, ddx, tangent])
    torch.testing.assert_close(*results)


@each_form
def test_forward_mode(form, device, generator):
    call, x = call_of(form, device), leaf(generator, *SHAPE)
    assert gradcheck(call, x, check_forward_ad=True, check_backward_ad=False)
    # Tangents of gradients: forward over reverse.
    options = {"check_fwd_over_rev": True, "check_rev_over_rev": False}
    assert gradgradcheck(call, x, check_undefined_grad=False, **options)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_forward_mode_without_reverse(mode, device, generator):
    """Inputs that need no gradient, and the operators called directly."""
    x = leaf(generator, 4, 6).detach()
    with mode(), forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        y = forward_op(x, -1)
        for result in (
            fn.softmax(dual, -1),
            forward_op(dual, -1),
            masked_op(dual, None),
            # dy (dy - sum(dy y)) is zero for ones, and so is its derivative along ones.
            backward_op(
                forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y)), y, -1, False, FP64
            ),
        ):
            tangent = forward_ad.unpack_dual(result).tangent
            # A softmax does not see a shift.
            torch.testing.assert_close(tangent, torch.zeros_like(x))


@each_form
def test_tangent_of_the_gradient_alone(form, device, generator):
    """The graph was built before anything had a tangent. A gradient is linear in dy."""
    x = leaf(generator, *SHAPE)
    y = call_of(form, device)(x)
    dy, tangent = leaf(generator, *SHAPE).detach(), leaf(generator, *SHAPE).detach()
    (expected,) = torch.autograd.grad(y, x, tangent, retain_graph=True)
    with forward_ad.dual_level():
        (dx,) = torch.autograd.grad(y, x, forward_ad.make_dual(dy, tangent))
        torch.testing.assert_close(forward_ad.unpack_dual(dx).tangent, expected)


FUNCTIONALS = {
    "grad": lambda f: func.grad(lambda x: f(x).sin().sum()),
    "jacrev": func.jacrev,
    "jacfwd": func.jacfwd,
    "hessian": lambda f: func.hessian(lambda x: f(x).sin().sum()),
    "jvp": lambda f: lambda x: func.jvp(f, (x,), (x,)),
    "vjp": lambda f: lambda x: func.vjp(f, x)[1](x),
}


@pytest.mark.parametrize("transform", FUNCTIONALS)
@each_form
def test_torch_func(form, transform, device, generator):
    x = leaf(generator, *SHAPE).detach()
    ours, exact = (FUNCTIONALS[transform](call(form, device))(x) for call in (call_of, chain_of))
    torch.testing.assert_close(ours, exact)


@each_form
def test_vmap(form, device, generator, recwarn):
    """At several places of the batch dimension, alone and under a gradient, of tensors that need
    grad and of others."""
    for place in (0, 1, -1):
        x = leaf(generator, 5, *SHAPE).detach().movedim(0, place).requires_grad_()
        results = []
        for call in (call_of(form, device), chain_of(form, device)):
            y = func.vmap(call, place)(x)
            (dx,) = torch.autograd.grad(y.sin().sum(), x)
            per_sample = func.grad(lambda x, call=call: call(x).sin().sum())
            results.append([y, dx, func.vmap(per_sample, place)(x.detach())])
        torch.testing.assert_close(*results)
        assert same_bits(results[0][0], func.vmap(call_of(form, device), place)(x.detach()))
    assert not recwarn.list  # such as of a slow fallback


def test_vmap_of_scalars_and_masks(device, generator):
    x = leaf(generator, 5, 3, 4).detach()
    scalars, dy = x[:, 0, 0], torch.ones(5, dtype=FP64, device=device)
    assert torch.equal(func.vmap(lambda x: fn.softmax(x, 0))(scalars), dy)
    assert torch.equal(func.vmap(lambda x: fn.scaled_masked_softmax(x))(scalars), dy)
    gradient = func.vmap(lambda dy: backward_op(dy, dy, -1, False, FP64))(dy)
    assert torch.equal(gradient, torch.zeros_like(dy))
    for mask in (x[..., :1] < 0, x[:, 0] < 0, x):  # with fewer dimensions and with all
        ours = func.vmap(fn.scaled_masked_softmax)(x, mask)
        one_by_one = [fn.scaled_masked_softmax(a, b) for a, b in zip(x, mask, strict=True)]
        torch.testing.assert_close(ours, torch.stack(one_by_one))
        ours = func.vmap(fn.scaled_masked_softmax, (None, 0))(x[0], mask)
        one_by_one = [fn.scaled_masked_softmax(x[0], b) for b in mask]
        torch.testing.assert_close(ours, torch.stack(one_by_one))
    for call, error, message in (
        (lambda x: fn.softmax(x, 2), IndexError, "dim is 2, but input has 2 dimensions"),
        (lambda x: fn.softmax(x, -3), IndexError, "dim is -3, but input has 2 dimensions"),
        (lambda x: fn.scaled_masked_softmax(x[0], causal=True), RuntimeError, "has 1"),
        (lambda x: fn.scaled_masked_softmax(x[0], x), RuntimeError, r"mask has shape \[3, 4\]"),
    ):
        with pytest.raises(error, match=message):
            func.vmap(call)(x)


@pytest.mark.parametrize("create_graph", [False, True])
@each_form
def test_batched_gradients(form, create_graph, device, generator):
    """is_grads_batched runs the backward pass under vmap."""
    x = leaf(generator, *SHAPE)
    basis = torch.eye(x.numel(), dtype=FP64, device=device).view(-1, *SHAPE)
    results = []
    for call in (call_of(form, device), chain_of(form, device)):
        options = {"is_grads_batched": True, "create_graph": create_graph}
        (dx,) = torch.autograd.grad(call(x), x, basis, **options)
        results.append([dx])
        if create_graph:
            results[-1] += torch.autograd.grad(dx.sin().sum(), x)
    torch.testing.assert_close(*results)


def test_gradient_of_a_mask_under_a_transform(device, generator):
    x = leaf(generator, 3, 4).detach()
    for transform in (func.grad, func.jacrev):
        with pytest.raises(RuntimeError, match="mask requires grad"):
            transform(lambda mask: fn.scaled_masked_softmax(x, mask).sum())(x)
    with pytest.raises(RuntimeError, match="mask requires grad"):
        func.jvp(lambda mask: fn.scaled_masked_softmax(x, mask), (x,), (x,))


@each_form
def test_compiled_per_sample_gradients(form, device, generator):
    torch._dynamo.reset()
    x, call = leaf(generator, 3, *SHAPE).detach(), call_of(form, device)

    def per_sample(x):
        return func.vmap(func.grad(lambda x: call(x).sin().sum()))(x)

    compiled = torch.compile(per_sample, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), per_sample(x))


def test_second_derivative_of_compiled_code_is_an_error(device, generator):
    """torch's own: its compiler differentiates once."""
    torch._dynamo.reset()
    x = leaf(generator, 4, 6)
    y = torch.compile(lambda x: fn.softmax(x, -1), backend="aot_eager")(x)
    with pytest.raises(RuntimeError, match="double backward"):
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        torch.autograd.grad(dx.square().sum(), x)
