"""Output dtypes under autocast: torch's own for the same operator and device, and the autocast
dtype to save memory."""

import pytest
import torch
import torch.nn.functional as F
from harness import each_kind, randn

import fused_norm
import fused_norm.functional as fn

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

autocast_to = pytest.mark.parametrize("autocast_dtype", [BF16, FP16], ids=lambda d: f"to {d}")
each_dtype = pytest.mark.parametrize("dtype", [FP32, FP64, BF16, FP16], ids=str)


def modules(kind, device, dtype=FP32, **options):
    name = "LayerNorm" if kind == "layer" else "RMSNorm"
    ours = getattr(fused_norm, name)(16, device=device, dtype=dtype, **options)
    return ours, getattr(torch.nn, name)(16, device=device, dtype=dtype)


@pytest.mark.parametrize("affine", [False, True], ids=["", "affine"])
@autocast_to
@each_dtype
@each_kind
def test_functional_output_dtype_is_torchs(kind, dtype, autocast_dtype, affine, device, generator):
    x = randn(generator, 4, 16, dtype=dtype)
    weight = torch.ones(16, dtype=dtype, device=device) if affine else None
    with torch.autocast(device, autocast_dtype):
        if kind == "layer":
            ours, theirs = (
                fn.layer_norm(x, [16], weight, weight),
                F.layer_norm(x, [16], weight, weight),
            )
        else:
            ours, theirs = fn.rms_norm(x, [16], weight), F.rms_norm(x, [16], weight)
    assert ours.dtype == theirs.dtype
    # Nearly equal numbers, rounded: one unit in the last place of a 16-bit output.
    tolerance = {BF16: 2**-7, FP16: 2**-10}.get(ours.dtype)
    torch.testing.assert_close(
        ours, theirs, **({"rtol": tolerance, "atol": tolerance} if tolerance else {})
    )


@autocast_to
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@each_kind
def test_module_with_fp32_parameters(kind, dtype, autocast_dtype, device, generator):
    """The usual set-up of mixed precision. torch's RMSNorm is asked with parameters of the
    input's dtype, as with fp32 ones its answer is that of a chain of small operators and changes
    from version to version."""
    x = randn(generator, 4, 16, dtype=dtype).requires_grad_()
    ours, theirs = modules(kind, device)
    with torch.autocast(device, autocast_dtype):
        y = ours(x)
        expected = theirs(x) if kind == "layer" else F.rms_norm(x, [16], theirs.weight.to(dtype))
    assert y.dtype == expected.dtype
    y.sum().backward()
    assert x.grad.dtype == dtype and ours.weight.grad.dtype == FP32


@autocast_to
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@each_kind
def test_memory_efficient_output_is_16_bit(kind, dtype, autocast_dtype, device, generator):
    """A saved fp32 output would undo the saving. fp32 input gives the autocast dtype, 16-bit
    input keeps its own."""
    x = randn(generator, 4, 16, dtype=dtype).requires_grad_()
    ours, _ = modules(kind, device, memory_efficient=True)
    saved = []
    with (
        torch.autocast(device, autocast_dtype),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        y = ours(x)
    assert y.dtype == (autocast_dtype if dtype == FP32 else dtype)
    activations = [t for t in saved if t.numel() == x.numel()]
    assert [t.data_ptr() for t in activations] == [y.data_ptr()]
    y.sum().backward()
    assert x.grad.dtype == dtype and ours.weight.grad.dtype == FP32


@each_kind
def test_fp64_is_left_alone(kind, device, generator):
    for options in ({}, {"memory_efficient": True}):
        ours, theirs = modules(kind, device, FP64, **options)
        x = randn(generator, 4, 16, dtype=FP64)
        with torch.autocast(device, BF16):
            assert ours(x).dtype == theirs(x).dtype == FP64


@each_kind
def test_disabled_autocast_changes_nothing(kind, device, generator):
    ours, _ = modules(kind, device, memory_efficient=True)
    x = randn(generator, 4, 16)
    with torch.autocast(device, BF16), torch.autocast(device, enabled=False):
        assert ours(x).dtype == FP32


@each_kind
def test_training_step_under_autocast(kind, device, generator):
    """norm - linear - norm - linear with a loss in fp32; gradients near those of the same step
    with torch's norms."""
    x = randn(generator, 32, 16)
    results = []
    for namespace in (fused_norm, torch.nn):
        torch.manual_seed(3)
        make = getattr(namespace, "LayerNorm" if kind == "layer" else "RMSNorm")
        model = torch.nn.Sequential(
            make(16), torch.nn.Linear(16, 16), make(16), torch.nn.Linear(16, 4)
        ).to(device)
        with torch.autocast(device, BF16):
            loss = model(x).float().square().mean()
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for ours, theirs in zip(*results, strict=True):
        # Every value passes through a handful of bf16 roundings of 2^-8: a few of them, of the
        # tensor's largest.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=8 * 2**-8 * theirs.abs().max().item())
