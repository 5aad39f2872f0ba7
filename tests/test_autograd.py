"""First derivatives as autograd sees them: gradcheck, which gradients are computed."""

import pytest
import torch
import torch.nn.functional as F
from harness import bits, leaf, rand_generator, same_bits

import fused_norm.functional as fn

AFFINE = {
    "layer": ["none", "weight", "bias", "weight and bias", "weight and bias with offset"],
    "rms": ["none", "weight", "weight with offset"],
}
EVERY_FORM = [(kind, affine) for kind, forms in AFFINE.items() for affine in forms]


def parameters(generator, affine, zeros, shape=(6,)):
    """{name: leaf}; with zeros, two of the effective weights are exactly zero."""
    params = {}
    if "weight" in affine:
        weight = leaf(generator, *shape)
        if zeros:
            with torch.no_grad():
                weight.view(-1)[1::3] = -1.0 if "offset" in affine else 0.0
        params["weight"] = weight
    if "bias" in affine:
        params["bias"] = leaf(generator, *shape)
    return params


def norm(kind, affine, memory_efficient, shape=(6,)):
    """A function of (x, *params)."""

    def call(x, *params):
        named = dict(zip(names, params, strict=True))
        options = {"memory_efficient": memory_efficient}
        options["weight_offset"] = 1.0 if "offset" in affine else 0.0
        return (fn.layer_norm if kind == "layer" else fn.rms_norm)(x, shape, **named, **options)

    names = [name for name in ("weight", "bias") if name in affine]
    return call


@pytest.mark.parametrize("zeros", [False, True], ids=["", "zero weights"])
@pytest.mark.parametrize("memory_efficient", [False, True], ids=["", "memory_efficient"])
@pytest.mark.parametrize(("kind", "affine"), EVERY_FORM)
def test_gradcheck(kind, affine, memory_efficient, zeros, device, generator):
    """Numerical derivatives in fp64, and the same bits when the backward pass is repeated."""
    x, params = leaf(generator, 4, 6), parameters(generator, affine, zeros)
    call = norm(kind, affine, memory_efficient)
    assert torch.autograd.gradcheck(call, (x, *params.values()), nondet_tol=0.0)


@pytest.mark.parametrize("memory_efficient", [False, True], ids=["", "memory_efficient"])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_gradcheck_of_strided_input_and_several_dimensions(
    kind, memory_efficient, device, generator
):
    affine = AFFINE[kind][-1]
    params = parameters(generator, affine, False, (3, 2))
    base = leaf(generator, 3, 2, 2, 2)

    def call(base, *params):
        x = base.permute(1, 2, 0, 3)[:, 1:]
        return norm(kind, affine, memory_efficient, (3, 2))(x, *params)

    assert torch.autograd.gradcheck(call, (base, *params.values()), nondet_tol=0.0)


@pytest.mark.parametrize("memory_efficient", [False, True], ids=["", "memory_efficient"])
@pytest.mark.parametrize(
    "wanted", [["x"], ["weight"], ["bias"], ["x", "weight"], ["x", "bias"], ["weight", "bias"], []]
)
def test_only_the_gradients_that_are_asked_for(wanted, memory_efficient, device, generator):
    values = {
        "x": leaf(generator, 4, 6).detach(),
        **{k: v.detach() for k, v in parameters(generator, "weight and bias", True).items()},
    }

    def gradients(call):
        leaves = {k: v.clone().requires_grad_(k in wanted) for k, v in values.items()}
        y = call(leaves["x"], (6,), leaves["weight"], leaves["bias"])
        assert y.requires_grad == bool(wanted)
        if wanted:
            y.square().sum().backward()
        return {k: v.grad for k, v in leaves.items()}

    ours = gradients(lambda *args: fn.layer_norm(*args, memory_efficient=memory_efficient))
    theirs = gradients(F.layer_norm)
    for name, grad in ours.items():
        assert (grad is not None) == (name in wanted)
        if grad is not None:
            torch.testing.assert_close(grad, theirs[name])


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_gradients_add_up_over_calls(kind, device, generator):
    """One weight used twice, and backward() twice over a retained graph."""
    x, weight = leaf(generator, 4, 6), leaf(generator, 6)
    ours, theirs = (fn.layer_norm, F.layer_norm) if kind == "layer" else (fn.rms_norm, F.rms_norm)
    grads = []
    for call in (ours, theirs):
        x.grad = weight.grad = None
        y = call(call(x, (6,), weight), (6,), weight).sin().sum()
        y.backward(retain_graph=True)
        y.backward()
        grads.append((x.grad, weight.grad))
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("memory_efficient", [False, True], ids=["", "memory_efficient"])
def test_nothing_to_differentiate_gives_the_same_bits(mode, memory_efficient, device, generator):
    x, params = leaf(generator, 4, 6), parameters(generator, "weight and bias", True)
    options = {**params, "memory_efficient": memory_efficient}
    with_graph = fn.layer_norm(x, (6,), **options)
    with mode():
        without = fn.layer_norm(x, (6,), **options)
    assert not without.requires_grad
    assert with_graph.requires_grad
    assert same_bits(with_graph.detach(), without)


@pytest.mark.parametrize("memory_efficient", [False, True], ids=["", "memory_efficient"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_arguments_are_left_as_they_were(dtype, memory_efficient, device, generator):
    """Also parameters in the dtype of the arithmetic, which need no conversion and so no copy."""
    tensors = [leaf(generator, *shape, dtype=dtype) for shape in [(4, 6), (6,), (6,), (4, 6)]]
    before = [bits(t.detach()).clone() for t in tensors]
    x, weight, bias, dy = tensors
    fn.layer_norm(x, (6,), weight, bias, memory_efficient=memory_efficient).backward(dy.detach())
    fn.rms_norm(x, (6,), weight, memory_efficient=memory_efficient, weight_offset=0.5).backward(
        dy.detach()
    )
    for name, tensor, old in zip(("x", "weight", "bias", "dy"), tensors, before, strict=True):
        assert torch.equal(bits(tensor.detach()), old), f"{name} was changed"


def test_checkpointed_block(device):
    """torch.utils.checkpoint runs the forward pass again in the middle of the backward pass."""
    grads = []
    for checkpointed in (False, True):
        generator = rand_generator(device, 5)
        x, weight = leaf(generator, 4, 6), leaf(generator, 6)

        def block(x, weight=weight):
            return fn.rms_norm(x, (6,), weight, memory_efficient=True).sin()

        y = (
            torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            if checkpointed
            else block(x)
        )
        y.sum().backward()
        grads.append((x.grad, weight.grad))
    for plain, again in zip(*grads, strict=True):
        assert same_bits(plain, again)
