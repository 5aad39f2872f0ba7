"""Derivatives beyond the first, forward mode, and torch.func."""

import pytest
import torch
import torch.nn.functional as F
from harness import each_flag, each_kind, leaf, same_bits
from torch import func
from torch.autograd import forward_ad
from torch.autograd.gradcheck import gradcheck, gradgradcheck

import fused_norm.functional as fn

FP64 = torch.float64
FORMS = [
    ("layer", "none"),
    ("layer", "weight"),
    ("layer", "bias"),
    ("layer", "weight and bias"),
    ("rms", "none"),
    ("rms", "weight"),
    ("rms", "weight with offset"),
]
each_form = pytest.mark.parametrize("kind, affine", FORMS, ids=[f"{k} {a}" for k, a in FORMS])


def parameters(generator, affine, shape=(6,), dtype=FP64):
    """{name: leaf}, with effective weights away from 0 as the flag wants them."""
    params = {}
    if "weight" in affine:
        weight = 0.5 + leaf(generator, *shape).detach().sigmoid()
        weight = weight - 1 if "offset" in affine else weight
        params["weight"] = weight.to(dtype).requires_grad_()
    if "bias" in affine:
        params["bias"] = leaf(generator, *shape, dtype=dtype)
    return params


def norm_of(kind, affine, memory_efficient=False, shape=(6,)):
    """A function of (x, *parameters)."""
    names = [name for name in ("weight", "bias") if name in affine]
    options = {"memory_efficient": memory_efficient}
    if "offset" in affine:
        options["weight_offset"] = 1.0
    function = fn.layer_norm if kind == "layer" else fn.rms_norm

    def call(x, *params):
        return function(x, shape, **dict(zip(names, params, strict=True)), **options)

    return call


def chain(kind, affine, shape=(6,), eps=None):
    """The same function written in torch's elementary operators."""
    dims = tuple(range(-len(shape), 0))
    if eps is None:
        eps = 1e-5 if kind == "layer" else torch.finfo(FP64).eps

    def call(x, *params):
        params = list(params)
        centred = x if kind == "rms" else x - x.mean(dims, keepdim=True)
        y = centred * torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)
        if "weight" in affine:
            y = y * (params.pop(0) + (1.0 if "offset" in affine else 0.0))
        return y + params.pop(0) if "bias" in affine else y

    return call


@each_flag
@each_form
def test_gradgradcheck(kind, affine, memory_efficient, device, generator):
    leaves = [leaf(generator, 4, 6), *parameters(generator, affine).values()]
    assert gradgradcheck(norm_of(kind, affine, memory_efficient), leaves, nondet_tol=0)


@each_flag
@each_kind
def test_gradgradcheck_of_several_dimensions(kind, memory_efficient, device, generator):
    shape = (3, 2)
    for size in ((2, 2, *shape), shape):  # with no rows' dimension at all
        leaves = [leaf(generator, *size), *parameters(generator, "weight", shape).values()]
        call = norm_of(kind, "weight", memory_efficient, shape)
        assert gradgradcheck(call, leaves, nondet_tol=0)


@each_flag
@each_form
def test_gradients_have_the_same_bits_with_create_graph(
    kind, affine, memory_efficient, device, generator
):
    leaves = [leaf(generator, 4, 6), *parameters(generator, affine).values()]
    y, dy = norm_of(kind, affine, memory_efficient)(*leaves), leaf(generator, 4, 6)
    plain = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    differentiable = torch.autograd.grad(y, leaves, dy, create_graph=True)
    for a, b in zip(plain, differentiable, strict=True):
        assert b.requires_grad and same_bits(a, b.detach())


@each_kind
def test_listed_columns(kind, device, generator):
    """With memory_efficient, columns whose weight is zero are saved beside the output, and second
    and third derivatives go through them: those of the norm without the flag."""
    affine = "weight and bias" if kind == "layer" else "weight"
    for shape in ((6,), (3, 2)):
        leaves = [leaf(generator, 2, 4, *shape), *parameters(generator, affine, shape).values()]
        with torch.no_grad():
            leaves[1].view(-1)[1::3] = 0.0
        dy = leaf(generator, 2, 4, *shape)
        results = []
        for flag in (True, False):
            y = norm_of(kind, affine, flag, shape)(*leaves)
            first = torch.autograd.grad(y, leaves, dy, create_graph=True)
            unused = {"allow_unused": True, "materialize_grads": True}  # the bias, which adds
            second = torch.autograd.grad(
                sum(g.sin().sum() for g in first), [*leaves, dy], create_graph=True, **unused
            )
            third = torch.autograd.grad(sum(g.sin().sum() for g in second), [*leaves, dy], **unused)
            results.append([*first, *second, *third])
        torch.testing.assert_close(*results)
        basis = torch.eye(dy.numel(), dtype=FP64, device=device).view(-1, *dy.shape)
        batched = [
            torch.autograd.grad(
                norm_of(kind, affine, flag, shape)(*leaves), leaves, basis, is_grads_batched=True
            )
            for flag in (True, False)
        ]
        torch.testing.assert_close(*batched)


@each_flag
@each_kind
def test_third_derivative(kind, memory_efficient, device, generator):
    leaves = [leaf(generator, 3, 4), *parameters(generator, "weight", (4,)).values()]
    call = norm_of(kind, "weight", memory_efficient, (4,))

    def second(*leaves):
        first = torch.autograd.grad(call(*leaves).sin().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves, create_graph=True)

    assert gradcheck(second, leaves)


@each_flag
@each_kind
def test_gradient_penalty(kind, memory_efficient, device, generator):
    """The usual reason for a second derivative, in fp32 and bf16, against fp64."""
    affine = "weight and bias" if kind == "layer" else "weight"

    def penalty_gradients(call, leaves):
        grad = torch.autograd.grad(call(*leaves).double().sin().sum(), leaves[0], create_graph=True)
        return torch.autograd.grad((grad[0].double().square().sum() - 1).square(), leaves)

    eps = 1e-5 if kind == "layer" else torch.finfo(torch.float32).eps
    written_out = chain(kind, affine, eps=eps)
    for dtype, unit in ((torch.float32, 2**-24), (torch.bfloat16, 2**-8)):
        leaves = [leaf(generator, 64, 6, dtype=dtype)]
        leaves += parameters(generator, affine, dtype=dtype).values()
        doubles = [t.detach().double().requires_grad_() for t in leaves]
        exact = penalty_gradients(written_out, doubles)
        usual = penalty_gradients(written_out, leaves)
        ours = penalty_gradients(norm_of(kind, affine, memory_efficient), leaves)
        for our, other, right in zip(ours, usual, exact, strict=True):
            # Twice the error of the same chain in torch's operators at this dtype, which is itself
            # a draw, and a few roundings.
            error, usual_error = ((t.double() - right).norm().item() for t in (our, other))
            assert error <= 2 * usual_error + 4 * unit * right.norm().item()


@each_form
def test_forward_mode(kind, affine, device, generator):
    leaves = [leaf(generator, 4, 6), *parameters(generator, affine).values()]
    options = {"check_forward_ad": True, "check_backward_ad": False}
    assert gradcheck(norm_of(kind, affine), leaves, **options)
    assert gradcheck(norm_of(kind, affine, memory_efficient=True), leaves, **options)
    # Tangents of gradients: forward over reverse.
    options = {"check_fwd_over_rev": True, "check_rev_over_rev": False}
    assert gradgradcheck(norm_of(kind, affine), leaves, check_undefined_grad=False, **options)


def test_forward_mode_without_reverse(device, generator):
    """Inputs that need no gradient, and the operator called directly."""
    x = leaf(generator, 4, 6).detach()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        for y in (
            fn.layer_norm(dual, (6,)),
            torch.ops.fused_norm.norm_forward(dual, None, None, [6], 1e-5)[0],
        ):
            tangent = forward_ad.unpack_dual(y).tangent
            # A norm does not see a shift.
            torch.testing.assert_close(tangent, torch.zeros_like(x))


@each_kind
def test_tangent_of_the_gradient_alone(kind, device, generator):
    """The graph was built before anything had a tangent. A gradient is linear in dy."""
    leaves = [leaf(generator, 4, 6), *parameters(generator, "weight").values()]
    y = norm_of(kind, "weight")(*leaves)
    dy, tangent = leaf(generator, 4, 6).detach(), leaf(generator, 4, 6).detach()
    expected = torch.autograd.grad(y, leaves, tangent, retain_graph=True)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(dy, tangent)
        for gradient, correct in zip(torch.autograd.grad(y, leaves, dual), expected, strict=True):
            torch.testing.assert_close(forward_ad.unpack_dual(gradient).tangent, correct)


def test_tangent_of_a_later_gradient_alone(device, generator):
    """Of the sum's gradient beside a norm's, and of the log-sum-exp's beside attention's."""
    leaves = {"add": [leaf(generator, 4, 6) for _ in range(2)]}
    leaves["attention"] = [leaf(generator, 1, 3, 2, 8) for _ in range(3)]
    results = {
        "add": fn.add_rms_norm(*leaves["add"], (6,)),
        "attention": fn.flash_attention(*leaves["attention"], return_lse=True),
    }
    for name, outputs in results.items():
        dy, dlater, tangent = (leaf(generator, *outputs[i].shape).detach() for i in (0, 1, 1))
        expected = torch.autograd.grad(outputs[1], leaves[name][0], tangent, retain_graph=True)[0]
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(dlater, tangent)
            for gradients in ([dy, dual], [None, dual]):
                wanted = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None]
                dx, *_ = torch.autograd.grad(
                    [o for o, _ in wanted],
                    leaves[name][0],
                    [g for _, g in wanted],
                    retain_graph=True,
                )
                torch.testing.assert_close(forward_ad.unpack_dual(dx).tangent, expected)


@pytest.mark.filterwarnings("error")
@each_kind
def test_vmap_over_second_derivatives(kind, device, generator):
    """Of a gradient that the statistics have too: by torch's rules, without its loop."""
    leaves = [leaf(generator, 4, 6), *parameters(generator, "weight").values()]
    y = norm_of(kind, "weight")(*leaves)
    (g,) = torch.autograd.grad(y.sin().sum(), leaves[0], create_graph=True)
    directions = leaf(generator, 3, *g.shape).detach()

    def product(v):
        return torch.autograd.grad(g, leaves[0], v, retain_graph=True)[0]

    expected = torch.stack([product(v) for v in directions])
    torch.testing.assert_close(func.vmap(product)(directions), expected)


FUNCTIONALS = {
    "grad": lambda f, n: func.grad(lambda *a: f(*a).sin().sum(), argnums=tuple(range(n))),
    "jacrev": lambda f, n: func.jacrev(f, argnums=tuple(range(n))),
    "jacfwd": lambda f, n: func.jacfwd(f, argnums=tuple(range(n))),
    "hessian": lambda f, n: func.hessian(lambda *a: f(*a).sin().sum(), argnums=tuple(range(n))),
    "jvp": lambda f, n: lambda *a: func.jvp(f, a, a),
    "vjp": lambda f, n: lambda *a: func.vjp(f, *a)[1](a[0]),
    "per-sample gradients": lambda f, n: func.vmap(
        func.grad(lambda *a: f(*a).sin().sum(), argnums=tuple(range(n))),
        in_dims=(0, *[None] * (n - 1)),
    ),
}


@pytest.mark.parametrize("transform", FUNCTIONALS)
@each_flag
@each_form
def test_torch_func(kind, affine, memory_efficient, transform, device, generator):
    arguments = [leaf(generator, 4, 6), *parameters(generator, affine).values()]
    arguments = [t.detach() for t in arguments]
    transform = FUNCTIONALS[transform]
    ours = transform(norm_of(kind, affine, memory_efficient), len(arguments))(*arguments)
    exact = transform(chain(kind, affine), len(arguments))(*arguments)
    torch.testing.assert_close(ours, exact)


@each_form
def test_vmap(kind, affine, device, generator, recwarn):
    """Over every choice of batched arguments, at several places of the batch dimension."""
    call, exact = norm_of(kind, affine), chain(kind, affine)
    shapes = [(4, 6), *[(6,)] * len(parameters(generator, affine))]
    for batched in range(1, 2 ** len(shapes)):
        for place in (0, -1):
            in_dims = tuple(place if batched >> i & 1 else None for i in range(len(shapes)))
            arguments = []
            for dim, shape in zip(in_dims, shapes, strict=True):
                tensor = leaf(generator, *([5] if dim is not None else []), *shape).detach()
                arguments.append(tensor if dim is None else tensor.movedim(0, dim))
            ours = func.vmap(call, in_dims)(*arguments)
            torch.testing.assert_close(ours, func.vmap(exact, in_dims)(*arguments))
    assert not recwarn.list  # such as of a slow fallback


def test_vmap_of_channels_last(device, generator):
    x = torch.randn(3, 2, 5, 8, 6, generator=generator, device=device).permute(0, 1, 4, 2, 3)
    ours, theirs = (func.vmap(lambda t, f=f: f(t, (8,)))(x) for f in (fn.rms_norm, F.rms_norm))
    torch.testing.assert_close(ours, theirs)


@each_flag
@each_kind
def test_batched_gradients(kind, memory_efficient, device, generator):
    """is_grads_batched runs the backward pass under vmap."""
    leaves = [leaf(generator, 4, 6), *parameters(generator, "weight").values()]
    basis = torch.eye(24, dtype=FP64, device=device).view(24, 4, 6)
    ours, exact = (
        torch.autograd.grad(call(*leaves), leaves, basis, is_grads_batched=True)
        for call in (norm_of(kind, "weight", memory_efficient), chain(kind, "weight"))
    )
    torch.testing.assert_close(ours, exact)


@each_flag
@each_kind
def test_compiled_per_sample_gradients(kind, memory_efficient, device, generator):
    torch._dynamo.reset()
    x, weight = leaf(generator, 4, 6).detach(), leaf(generator, 6).detach()

    def per_sample(x, weight):
        call = norm_of(kind, "weight", memory_efficient)
        return func.vmap(func.grad(lambda *a: call(*a).sin().sum(), (0, 1)), (0, None))(x, weight)

    compiled = torch.compile(per_sample, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, weight), per_sample(x, weight))


@each_flag
@each_kind
def test_second_derivative_of_compiled_code_is_an_error(kind, memory_efficient, device, generator):
    """torch's own: its compiler differentiates once."""
    torch._dynamo.reset()
    leaves = [leaf(generator, 4, 6), *parameters(generator, "weight").values()]
    call = norm_of(kind, "weight", memory_efficient)
    y = torch.compile(call, backend="aot_eager", fullgraph=True)(*leaves)
    with pytest.raises(RuntimeError, match="double backward"):
        (dx,) = torch.autograd.grad(y.square().sum(), leaves[0], create_graph=True)
        torch.autograd.grad(dx.square().sum(), leaves[0])
