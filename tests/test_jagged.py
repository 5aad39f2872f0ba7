"""Nested tensors of layout torch.jagged, as torch's own norms and softmaxes take them."""

import pytest
import torch
import torch.nn.functional as F

import fused_norm
import fused_norm.functional as fn
from fused_norm import apex
from fused_norm.flash_attn import flash_attn_func

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def nested(generator, *row, lengths=(2, 5, 3)):
    """Tensors of shape (length, *row)."""
    parts = [torch.randn(n, *row, generator=generator, device=generator.device) for n in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged).requires_grad_()


def with_holes(generator):
    """Of each row of a padded tensor a part: values that belong to none of the tensors."""
    padded = torch.randn(3, 6, 8, generator=generator, device=generator.device)
    starts, lengths = (torch.tensor(n, device=generator.device) for n in ([0, 1, 2], [3, 2, 4]))
    return torch.nested.narrow(padded, 1, starts, lengths, layout=torch.jagged)


CALLS = {
    "layer_norm": (
        lambda x, w: fn.layer_norm(x, (8,), w, w),
        lambda x, w: F.layer_norm(x, (8,), w, w),
    ),
    "rms_norm": (
        lambda x, w: fn.rms_norm(x, (8,), w),
        lambda x, w: F.rms_norm(x, (8,), w),
    ),
    "memory_efficient": (
        lambda x, w: fn.layer_norm(x, 8, w, w, memory_efficient=True),
        lambda x, w: F.layer_norm(x, (8,), w, w),
    ),
    "apex": (
        lambda x, w: apex.fused_layer_norm_affine(x, w, w, 8, 1e-5),
        lambda x, w: F.layer_norm(x, (8,), w, w),
    ),
    "softmax": (
        lambda x, w: fn.softmax(x * w, -1),
        lambda x, w: F.softmax(x * w, -1),
    ),
    "log_softmax": (
        lambda x, w: fn.log_softmax(x * w, 2),
        # torch's own has no backward pass.
        lambda x, w: torch.nested.nested_tensor_from_jagged(
            F.log_softmax((x * w).values(), 1), x.offsets()
        ),
    ),
}


@pytest.mark.parametrize("compiles", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_are_torchs(name, compiles, device, generator):
    ours, theirs = CALLS[name]
    if compiles:
        torch._dynamo.reset()
        ours = torch.compile(ours, backend="aot_eager", fullgraph=True)
    x = nested(generator, 8)
    weight = (torch.rand(8, generator=generator, device=device) + 0.5).requires_grad_()
    y, expected = ours(x, weight), theirs(x, weight)
    assert y.is_nested and y.shape == x.shape
    torch.testing.assert_close(y.values(), expected.values())
    dy = torch.randn(y.values().shape, generator=generator, device=device)
    grads = torch.autograd.grad(y.values(), [x, weight], dy)
    others = torch.autograd.grad(expected.values(), [x, weight], dy)
    torch.testing.assert_close(grads[0].values(), others[0].values(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grads[1], others[1], rtol=1e-4, atol=1e-5)


def test_modules_in_a_residual_block(device, generator):
    for norm in (fused_norm.LayerNorm, fused_norm.RMSNorm):
        x = nested(generator, 8)
        y = x + norm(8, device=device)(x)
        y.values().sum().backward()
        assert y.shape == x.shape


def test_add_norm(device, generator):
    x = nested(generator, 8)
    residual = torch.nested.nested_tensor_from_jagged(
        torch.randn(10, 8, generator=generator, device=device), x.offsets()
    )
    for call, kind in ((fn.add_layer_norm, fn.layer_norm), (fn.add_rms_norm, fn.rms_norm)):
        y, total = call(x, residual, 8)
        assert y.shape == total.shape == x.shape
        assert torch.equal(total.values(), x.values() + residual.values())
        torch.testing.assert_close(y.values(), kind(total.values(), 8))


def test_several_dimensions(device, generator):
    x = nested(generator, 4, 8)
    y = fn.rms_norm(x, (4, 8))
    torch.testing.assert_close(y.values(), F.rms_norm(x.values(), (4, 8)))
    torch.testing.assert_close(fn.softmax(x, 2).values(), F.softmax(x.values(), 1))


def test_holes_stay(device, generator):
    x = with_holes(generator)
    y, expected = fn.layer_norm(x, 8), F.layer_norm(x, [8])
    for mine, other in zip(y.unbind(), expected.unbind(), strict=True):
        torch.testing.assert_close(mine, other)


def test_holes_reach_no_gradient(device, generator):
    x = with_holes(generator)
    values = torch.full_like(x.values(), float("nan"))
    for row, start, length in zip(x.unbind(), x.offsets(), x.lengths(), strict=False):
        values[start : start + length] = row
    x = torch.nested.nested_tensor_from_jagged(values, x.offsets(), lengths=x.lengths())
    weight, bias = (torch.ones(8, device=device, requires_grad=True) for _ in range(2))
    total = sum(y.square().sum() for y in fn.layer_norm(x, 8, weight, bias).unbind())
    expected = sum(F.layer_norm(row, [8], weight, bias).square().sum() for row in x.unbind())
    grads, expected = (torch.autograd.grad(t, [weight, bias]) for t in (total, expected))
    torch.testing.assert_close(grads, expected)


@pytest.mark.parametrize("memory_efficient", [False, True], ids=["", "memory_efficient"])
def test_errors(memory_efficient, device, generator):
    x = nested(generator, 4, 8)
    dense = torch.ones(10, 4, 8, device=device)
    other = nested(generator, 4, 8)
    option = {"memory_efficient": memory_efficient}
    for call, error, words in (
        (lambda: fn.layer_norm(x, (3, 4, 8), **option), RuntimeError, "normalized_shape"),
        (lambda: fn.rms_norm(x, (2, 3, 4, 8), **option), RuntimeError, "normalized_shape"),
        (lambda: fn.rms_norm(x, 7, **option), RuntimeError, "normalized_shape"),
        (lambda: fn.add_rms_norm(x, dense, 8, **option), RuntimeError, "residual"),
        (lambda: fn.add_rms_norm(dense, x, 8, **option), RuntimeError, "input"),
        (lambda: fn.add_rms_norm(x, other, 8, **option), RuntimeError, "residual"),
        (lambda: fn.softmax(x, 0), RuntimeError, "dim is 0"),
        (lambda: fn.log_softmax(x, 1), RuntimeError, "dim is 1"),
        (lambda: fn.softmax(x, 4), IndexError, "dim is 4"),
        (lambda: fn.scaled_masked_softmax(x), RuntimeError, "input must be .* nested"),
        (lambda: fn.layer_norm(dense, 8, x, **option), RuntimeError, "weight must be .* nested"),
        # Without a graph the operators are not asked.
        (lambda: fn.scaled_masked_softmax(x.detach()), RuntimeError, "input must be .* nested"),
        (lambda: fn.scaled_masked_softmax(dense, x), RuntimeError, "mask must be .* nested"),
        (lambda: fn.flash_attention(*[x.detach()] * 3), RuntimeError, "query must be .* nested"),
        (lambda: flash_attn_func(*[x.detach()] * 3), RuntimeError, "q must be .* nested"),
    ):
        with pytest.raises(error, match=words):
            call()
