"""LayerNorm and RMSNorm as torch.nn modules: everything that a training script does with
torch's."""

import copy
import inspect
import io
import pickle

import numpy as np
import pytest
import torch
from harness import through_torch_save

import fused_norm as fn

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
PAIRS = {"LayerNorm": (fn.LayerNorm, torch.nn.LayerNorm), "RMSNorm": (fn.RMSNorm, torch.nn.RMSNorm)}
each_pair = pytest.mark.parametrize(("ours", "theirs"), PAIRS.values(), ids=list(PAIRS))

CONSTRUCTIONS = [
    (fn.LayerNorm, torch.nn.LayerNorm, (8,), {}),
    (fn.LayerNorm, torch.nn.LayerNorm, ([2, 4],), {}),
    (fn.LayerNorm, torch.nn.LayerNorm, (torch.Size([2, 4]), 1e-3), {}),
    (fn.LayerNorm, torch.nn.LayerNorm, (8, 1e-6, False), {}),
    (fn.LayerNorm, torch.nn.LayerNorm, (8, 1e-5, True, False), {}),
    (fn.LayerNorm, torch.nn.LayerNorm, (8, 1e-5, True, True, "cpu", FP64), {}),
    (fn.LayerNorm, torch.nn.LayerNorm, (), {"normalized_shape": 8, "bias": False, "dtype": BF16}),
    (fn.RMSNorm, torch.nn.RMSNorm, (8,), {}),
    (fn.RMSNorm, torch.nn.RMSNorm, ([2, 4], 1e-3), {}),
    (fn.RMSNorm, torch.nn.RMSNorm, (8, None, False), {}),
    (fn.RMSNorm, torch.nn.RMSNorm, (8, 1e-5, True, "cpu", BF16), {}),
    (fn.RMSNorm, torch.nn.RMSNorm, (), {"normalized_shape": (8,), "elementwise_affine": False}),
]


def randomize(module, generator):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


@pytest.mark.parametrize(("ours", "theirs", "args", "kwargs"), CONSTRUCTIONS, ids=str)
def test_constructed_like_torchs(ours, theirs, args, kwargs, generator):
    mine, other = ours(*args, **kwargs), theirs(*args, **kwargs)
    assert isinstance(mine, theirs)
    assert repr(mine) == repr(other)
    assert mine.normalized_shape == other.normalized_shape and mine.eps == other.eps
    assert mine.elementwise_affine == other.elementwise_affine
    expected = {k: (v.dtype, v.shape, v.requires_grad) for k, v in other.named_parameters()}
    assert {k: (v.dtype, v.shape, v.requires_grad) for k, v in mine.named_parameters()} == expected
    for name, parameter in mine.named_parameters():
        assert torch.equal(parameter, getattr(other, name))

    # And computes what torch's does. 16-bit outputs are roundings of nearly equal numbers: one unit
    # of bf16, 2^-7.
    randomize(mine, generator)
    other.load_state_dict(mine.state_dict())
    dtype = next((p.dtype for p in mine.parameters()), FP32)
    x = torch.randn(5, *mine.normalized_shape, generator=generator).to(dtype)
    tolerance = {"rtol": 2**-7, "atol": 2**-7} if dtype == BF16 else {}
    torch.testing.assert_close(mine(x), other(x), **tolerance)


NAN = float("nan")
OF_EVERY_NORM = [
    ((-8,), {"elementwise_affine": False}, RuntimeError, r"normalized_shape must .* but is \[-8\]"),
    (((),), {}, RuntimeError, r"normalized_shape must .* but is \[\]"),
    ((8,), {"eps": -1}, RuntimeError, "eps must be finite and not negative, but is -1"),
    ((8,), {"eps": NAN}, RuntimeError, "eps must be finite and not negative, but is nan"),
    ((8,), {"eps": "1e-5"}, TypeError, "eps must be a number, but is '1e-5'"),
    ((8,), {"weight_offset": NAN}, RuntimeError, "weight_offset must be finite, but is nan"),
    ((8,), {"dtype": "float16"}, TypeError, "dtype must be a torch.dtype, but is 'float16'"),
    ((8,), {"dtype": torch.int32}, RuntimeError, "dtype must be float16, .* but is torch.int32"),
]
OF_GATED = [
    ((8,), {"group_size": 0}, RuntimeError, "group_size must divide the 8 columns, but is 0"),
    ((8,), {"group_size": 3}, RuntimeError, "group_size must divide the 8 columns, but is 3"),
    ((8,), {"group_size": 2.5}, TypeError, "group_size must be an int, but is 2.5"),
]


@pytest.mark.parametrize(
    "shape",
    [lambda: np.array([4, 8]), lambda: np.array(8), lambda: range(4, 6), lambda: iter([4, 8])],
    ids=["array", "number", "range", "iterator"],
)
def test_shapes_as_numpy_and_iterators_give_them(shape):
    norm = fn.LayerNorm(shape())
    assert all(type(size) is int for size in norm.normalized_shape)
    assert norm.weight.shape == norm.normalized_shape


@pytest.mark.parametrize(
    ("norm", "args", "kwargs", "error", "message"),
    [
        (norm, *case)
        for norm in (fn.LayerNorm, fn.RMSNorm, fn.RMSNormGated)
        for case in OF_EVERY_NORM + (OF_GATED if norm is fn.RMSNormGated else [])
    ],
)
def test_constructors_check_their_options(norm, args, kwargs, error, message):
    with pytest.raises(error, match=message):
        norm(*args, **kwargs)


def test_repr_shows_what_is_not_torchs():
    assert "memory_efficient=True" in repr(fn.LayerNorm(8, memory_efficient=True))
    norm = fn.RMSNorm(8, memory_efficient=True, weight_offset=1.0)
    assert "memory_efficient=True" in repr(norm) and "weight_offset=1.0" in repr(norm)


@each_pair
def test_input_by_name(ours, theirs):
    """Which is another in torch's LayerNorm and RMSNorm."""
    x = torch.randn(3, 8)
    [_, name] = inspect.signature(theirs.forward).parameters
    torch.testing.assert_close(ours(8)(**{name: x}), theirs(8)(**{name: x}))


@each_pair
def test_state_dict_both_ways(ours, theirs, generator):
    for source, target in ((ours, theirs), (theirs, ours)):
        saved = randomize(source(8), generator).state_dict()
        loaded = target(8)
        loaded.load_state_dict(saved, strict=True)
        assert list(loaded.state_dict()) == list(saved)
        assert all(torch.equal(loaded.state_dict()[key], saved[key]) for key in saved)


def options_of(cls):
    return {"memory_efficient": True, **({"weight_offset": 1.0} if cls is fn.RMSNorm else {})}


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), through_torch_save],
    ids=["deepcopy", "pickle", "torch.save"],
)
@each_pair
def test_copies_behave_like_the_original(ours, theirs, copied, generator):
    module = randomize(ours(8, **options_of(ours)), generator)
    other = copied(module)
    assert type(other) is ours and repr(other) == repr(module)
    x = torch.randn(3, 8, generator=generator)
    assert torch.equal(module(x), other(x))
    with torch.no_grad():
        other.weight.add_(1)
    assert not torch.equal(module(x), other(x))


@pytest.mark.parametrize("options", [False, True], ids=["", "options"])
@each_pair
def test_meta_device_then_memory_then_values(ours, theirs, options, device):
    """How large models are built: on the meta device, then to_empty(), then reset_parameters()."""
    module = ours(8, device="meta", **(options_of(ours) if options else {}))
    assert module.weight.is_meta
    output = module(torch.empty(3, 8, device="meta"))
    assert output.is_meta and output.shape == (3, 8)
    module.to_empty(device=device)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(float("nan"))
    module.reset_parameters()
    x = torch.randn(3, 8, device=device)
    torch.testing.assert_close(module(x), theirs(8, device=device)(x))


def test_weight_offset_starts_at_an_effective_weight_of_one(generator):
    module = fn.RMSNorm(8, weight_offset=1.0)
    assert torch.equal(module.weight, torch.zeros(8))
    x = torch.randn(3, 8, generator=generator)
    torch.testing.assert_close(module(x), torch.nn.RMSNorm(8)(x))


@pytest.mark.parametrize("dtype", [FP64, torch.float16, BF16], ids=str)
@each_pair
def test_converted_to_another_dtype(ours, theirs, dtype, device, generator):
    module = ours(8, device=device, memory_efficient=True).to(dtype)
    assert all(p.dtype == dtype for p in module.parameters())
    x = torch.randn(3, 8, generator=generator, device=device).to(dtype).requires_grad_()
    y = module(x)
    y.sum().backward()
    assert y.dtype == dtype
    assert x.grad.dtype == dtype and module.weight.grad.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
@each_pair
def test_fp32_parameters_with_16_bit_input(ours, theirs, dtype, device, generator):
    """The usual mixed set-up: the output keeps the input's dtype, the gradients have their
    parameter's."""
    module = ours(8, device=device)
    x = torch.randn(3, 8, generator=generator, device=device).to(dtype).requires_grad_()
    y = module(x)
    y.sum().backward()
    assert y.dtype == dtype and x.grad.dtype == dtype and module.weight.grad.dtype == FP32


@pytest.mark.parametrize("dtype", [FP32, FP64, torch.float16, BF16], ids=str)
def test_rms_norm_without_eps_follows_the_input(dtype, device, generator):
    x = (torch.randn(8, 64, generator=generator, device=device) * 1e-4).to(dtype)
    ours, theirs = (cls(64, device=device, dtype=dtype) for cls in (fn.RMSNorm, torch.nn.RMSNorm))
    torch.testing.assert_close(ours(x), theirs(x))


@each_pair
def test_trains_like_torchs(ours, theirs, device):
    """A small network, some steps of Adam: the same losses with torch's norm, with ours, and
    memory-efficient."""

    def losses(make):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            make(16), torch.nn.Linear(16, 16), torch.nn.GELU(), make(16), torch.nn.Linear(16, 1)
        ).to(device, FP64)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        x = torch.randn(32, 16, dtype=FP64).to(device)
        found = []
        for _ in range(10):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return torch.tensor(found)

    expected = losses(theirs)
    # fp64 roundings of 2^-53 grow over ten steps; far below 1e-9.
    torch.testing.assert_close(losses(ours), expected, rtol=1e-9, atol=0)
    efficient = losses(lambda n: ours(n, memory_efficient=True))
    torch.testing.assert_close(efficient, expected, rtol=1e-9, atol=0)
    assert expected[-1] < 0.9 * expected[0]


@each_pair
def test_parameters_may_be_replaced(ours, theirs, generator):
    """Weight tying, pruning and parametrizations assign to .weight."""
    module = ours(8)
    shared = torch.nn.Parameter(torch.randn(8, generator=generator))
    module.weight = shared
    x = torch.randn(3, 8, generator=generator)
    module(x).sum().backward()
    assert shared.grad is not None
    module.weight = None
    torch.testing.assert_close(module(x), theirs(8)(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("memory_efficient", [False, True], ids=["", "memory_efficient"])
@each_pair
def test_traced_saved_and_loaded(ours, theirs, memory_efficient, device, generator):
    """By torch.jit.trace, gradients included."""
    module = ours(8, device=device, memory_efficient=memory_efficient)
    x = torch.randn(4, 8, generator=generator, device=device, requires_grad=True)
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(module, x), file)
    file.seek(0)
    loaded = torch.jit.load(file)
    assert torch.equal(loaded(x), module(x))
    dy = torch.randn(4, 8, generator=generator, device=device)
    grads = torch.autograd.grad(loaded(x), [x, *loaded.parameters()], dy)
    expected = torch.autograd.grad(module(x), [x, *module.parameters()], dy)
    for grad, correct in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, correct)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_jit_script_says_that_it_cannot():
    with pytest.raises(torch.jit.frontend.NotSupportedError, match="keyword-only"):
        torch.jit.script(fn.LayerNorm(4))
