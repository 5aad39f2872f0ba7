"""Activation checkpointing: reentrant, without reentry, and selective."""

import contextlib
import functools

import pytest
import torch
from harness import each_flag, each_kind, module_of, randn, same_bits
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fused_norm

FORWARD = torch.ops.fused_norm.norm_forward.default


class Count(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the calls of the norm's forward operator."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func is FORWARD
        return func(*args, **(kwargs or {}))


def policy(ctx, op, *args, **kwargs):
    """Keep what the norms give, compute everything else again."""
    return CheckpointPolicy.MUST_SAVE if op is FORWARD else CheckpointPolicy.PREFER_RECOMPUTE


WAYS = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": functools.partial(create_selective_checkpoint_contexts, policy),
    },
}


@pytest.mark.parametrize("way", WAYS)
@each_flag
@each_kind
def test_gradients_have_the_same_bits(kind, memory_efficient, way, device, generator):
    """And the norms run again exactly where the policy does not keep their results."""
    torch.manual_seed(0)
    options = {"memory_efficient": memory_efficient, "device": device}
    norms = [module_of(kind, 16, **options) for _ in range(2)]
    block = nn.Sequential(norms[0], nn.Linear(16, 16, device=device), nn.GELU(), norms[1])
    x = randn(generator, 6, 16)
    results, calls = [], []
    for options in (None, WAYS[way]):
        block.zero_grad()
        leaf = x.clone().requires_grad_()
        with Count() as count:
            y = block(leaf) if options is None else checkpoint(block, leaf, **options)
            y.square().sum().backward()
        calls.append(count.calls)
        results.append([y.detach(), leaf.grad, *(p.grad.clone() for p in block.parameters())])
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    assert calls == [2, 2 if way == "selective" else 4]


@each_flag
@each_kind
def test_compiled_checkpoint(kind, memory_efficient, device, generator):
    torch._dynamo.reset()
    norm = module_of(kind, 16, memory_efficient=memory_efficient, device=device)

    def block(x):
        return norm(x * 2).sin()

    def checkpointed(x):
        return checkpoint(block, x, use_reentrant=False)

    x = randn(generator, 6, 16)
    results = []
    for call in (block, torch.compile(checkpointed, backend="aot_eager", fullgraph=True)):
        norm.zero_grad()
        leaf = x.clone().requires_grad_()
        call(leaf).square().sum().backward()
        results.append([leaf.grad, *(p.grad.clone() for p in norm.parameters())])
    for eager, traced in zip(*results, strict=True):
        limit = 16 * 2**-24 * eager.abs().max().item()  # a few roundings
        torch.testing.assert_close(traced, eager, rtol=0, atol=limit)


def add_layer_norm(norm, x):
    y, stream = fused_norm.functional.add_layer_norm(x, x, (16,), norm.weight, norm.bias)
    return (y + stream.mul_(3)).sin()


def scaled_norm(norm, x):
    return norm(x).mul_(3).sin()


def by_hooks(pack):
    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


@pytest.mark.parametrize("memory_efficient", [False, True], ids=["", "memory_efficient"])
def test_hooks_that_give_other_strides(memory_efficient, device, generator):
    x, gate = (randn(generator, 5, 16, dtype=torch.float64).requires_grad_() for _ in range(2))
    norm = fused_norm.LayerNorm(16, memory_efficient=memory_efficient, device=device).double()
    with torch.no_grad():
        norm.weight[3] = 0  # listed
    gated = fused_norm.RMSNormGated(16, device=device).double()

    def apart(tensor):
        return torch.stack((tensor, tensor), -1)[..., 0]

    def gradients(hooks):
        with hooks:
            y = norm(x) + gated(x, gate) + fused_norm.functional.softmax(x, -1)
        return torch.autograd.grad(y.sin().sum(), (x, gate, norm.weight))

    expected = gradients(contextlib.nullcontext())
    found = gradients(torch.autograd.graph.saved_tensors_hooks(lambda t: t, apart))
    for a, b in zip(expected, found, strict=True):
        # fp64: thousands of its roundings, where sums over 16 columns and 5 rows make tens.
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


HIDDEN_CHANGES = {
    "checkpoint": (contextlib.nullcontext, True),
    "kept by hooks": (lambda: by_hooks(lambda tensor: tensor), True),
    "copied by hooks": (lambda: by_hooks(torch.clone), False),
    "allowed": (torch.autograd.graph.allow_mutation_on_saved_tensors, False),
}


@pytest.mark.parametrize("way", HIDDEN_CHANGES)
@pytest.mark.parametrize("forward", [scaled_norm, add_layer_norm])
def test_saved_result_changed_in_place(forward, way, device, generator):
    """Autograd does not notice a change of what hooks keep. Norms do."""
    context, raises = HIDDEN_CHANGES[way]
    norm = fused_norm.LayerNorm(16, memory_efficient=True, device=device, dtype=torch.float64)
    x = randn(generator, 5, 16, dtype=torch.float64).requires_grad_()

    def gradient():
        with context():
            if way == "checkpoint":
                y = checkpoint(forward, norm, x, use_reentrant=False)
            else:
                y = forward(norm, x)
            return torch.autograd.grad(y.sum(), x)[0]

    if raises:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradient()
        return
    if forward is add_layer_norm:
        y = nn.functional.layer_norm(2 * x, (16,)) + 6 * x
    else:
        y = 3 * nn.functional.layer_norm(x, (16,))
    (wanted,) = torch.autograd.grad(y.sin().sum(), x)
    torch.testing.assert_close(gradient(), wanted)
