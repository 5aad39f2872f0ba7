"""Options in whatever type they come: a number is a number, and the flag is never lost."""

import numpy as np
import pytest
import torch
from harness import held_for_backward
from torch import nn

import fused_norm
import fused_norm.functional as fn
from fused_norm import apex

ROWS, COLS = 64, 256

# Options of a call that must all save the output.
FLAGS = {
    "bool": {},
    "int": {"memory_efficient": 1},
    "numpy bool": {"memory_efficient": np.True_},
    "numpy int": {"memory_efficient": np.int64(1)},
    "eps: int": {"eps": 1},
    "eps: bool": {"eps": True},
    "eps: np.float32": {"eps": np.float32(1e-5)},
    "eps: np.float64": {"eps": np.float64(1e-5)},
    "eps: np.int64": {"eps": np.int64(1)},
    "eps: tensor": {"eps": torch.tensor(1e-5)},
    "shape: int": {"normalized_shape": COLS},
    "shape: list": {"normalized_shape": [COLS]},
    "shape: np.int64": {"normalized_shape": np.int64(COLS)},
    "shape: tuple of np.int64": {"normalized_shape": (np.int64(COLS),)},
    "shape: tensor": {"normalized_shape": [torch.tensor(COLS)]},
}
OFFSETS = {
    "offset: int": {"weight_offset": 1},
    "offset: bool": {"weight_offset": True},
    "offset: np.float32": {"weight_offset": np.float32(1)},
    "offset: np.int64": {"weight_offset": np.int64(1)},
    "offset: tensor": {"weight_offset": torch.tensor(1.0)},
}
# What a compiler takes for a tensor, whose value it does not know.
NOT_WHEN_TRACED = {
    name for name in FLAGS | OFFSETS if "np." in name or "numpy" in name or "tensor" in name
}


class Call(nn.Module):
    """A function of functional form as a module."""

    def __init__(self, function, takes, options):
        super().__init__()
        options = dict(options)
        shape = options.pop("normalized_shape", (COLS,))
        self.weight = nn.Parameter(torch.ones(COLS))
        self.bias = nn.Parameter(torch.zeros(COLS))
        self.function, self.takes, self.shape, self.options = function, takes, shape, options

    def forward(self, x):
        known = {"x": x, "shape": self.shape, "weight": self.weight, "bias": self.bias}
        result = self.function(*(known[name] for name in self.takes.split()), **self.options)
        return result if isinstance(result, torch.Tensor) else result[0]


class Applied(Call):
    """The same by position, as an autograd.Function is called."""

    def forward(self, x):
        known = {"x": x, "shape": self.shape, "weight": self.weight, "bias": self.bias}
        options = self.options.get("eps", 1e-5), self.options["memory_efficient"]
        return self.function(*(known[name] for name in self.takes.split()), *options)


def of_module(cls):
    def make(options):
        options = dict(options)
        return cls(options.pop("normalized_shape", COLS), **options)

    return make


def set_later(options):
    """A module whose attributes are assigned."""
    module = fused_norm.RMSNorm(COLS)
    for name, value in options.items():
        setattr(module, name, value)
    return module


def converted(options):
    """By convert(), of a torch module with the same options."""
    options = dict(options)
    flag = options.pop("memory_efficient")
    module = nn.LayerNorm(options.pop("normalized_shape", COLS), **options)
    fused_norm.convert(module, memory_efficient=flag)
    return module


def converted_later(options):
    options = dict(options)
    flag = options.pop("memory_efficient")
    module = nn.RMSNorm(options.pop("normalized_shape", COLS), **options)
    assert len(fused_norm.convert(module)) == 1
    fused_norm.convert(module, memory_efficient=flag)
    return module


def call(function, takes, cls=Call):
    return lambda options: cls(function, takes, options)


# name: (maker of a module from options, whether it takes weight_offset)
ENTRIES = {
    "LayerNorm": (of_module(fused_norm.LayerNorm), True),
    "RMSNorm": (of_module(fused_norm.RMSNorm), True),
    "attributes": (set_later, True),
    "layer_norm": (call(fn.layer_norm, "x shape weight bias"), True),
    "rms_norm": (call(fn.rms_norm, "x shape weight"), True),
    "add_layer_norm": (call(fn.add_layer_norm, "x x shape weight bias"), True),
    "add_rms_norm": (call(fn.add_rms_norm, "x x shape weight"), True),
    "apex module": (of_module(apex.FusedLayerNorm), False),
    "apex mixed module": (of_module(apex.MixedFusedRMSNorm), False),
    "apex function": (call(apex.fused_rms_norm_affine, "x weight shape"), False),
    "apex apply": (
        call(apex.FusedLayerNormAffineFunction.apply, "x weight bias shape", Applied),
        False,
    ),
    "convert": (converted, False),
    "convert again": (converted_later, False),
}


def traced(module, how, x):
    if how == "eager":
        return module
    if how == "export":
        return torch.export.export(module, (x,)).module()
    torch._dynamo.reset()
    return torch.compile(module, backend="aot_eager", fullgraph=True)


CASES = [
    (entry, options, how)
    for entry, (_, takes_offset) in ENTRIES.items()
    for options in (FLAGS | OFFSETS if takes_offset else FLAGS)
    for how in ("eager", "compile", "export")
    # Attributes, as arguments, have any type; constructors normalize theirs.
    if not (how != "eager" and options in NOT_WHEN_TRACED)
    and not (entry in ("attributes", "apex apply") and "shape" in options)
]


@pytest.mark.parametrize(("entry", "options", "how"), CASES)
def test_the_output_is_saved(entry, options, how):
    x = torch.randn(ROWS, COLS, requires_grad=True)
    kept = {}
    for flag in (False, True):
        given = {"memory_efficient": flag, **(FLAGS | OFFSETS)[options]}
        if not flag:
            given["memory_efficient"] = type(given["memory_efficient"])(0)
        module = ENTRIES[entry][0](given)
        run = traced(module, how, x)
        run(x)
        (y, kept[flag]) = held_for_backward(lambda run=run: run(x), x, *module.parameters())
        y.sum().backward()
    # Without the flag x is saved, or what add_* gives as the sum; statistics and lists are less
    # than a tenth of it.
    sums = x.nbytes if entry.startswith("add_") else 0
    assert sums <= kept[False] < sums + x.nbytes / 10
    assert x.nbytes <= kept[True] < 1.1 * x.nbytes


def test_numpy_numbers_in_compiled_modules():
    """A constructor makes floats of them, which a compiler knows."""
    module = fused_norm.LayerNorm(COLS, eps=np.float32(1e-3), weight_offset=np.int64(1))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    x = torch.randn(ROWS, COLS)
    assert torch.equal(compiled(x), module(x))
    assert type(module.eps) is float and type(module.weight_offset) is float


def test_the_value_counts(generator):
    x, weight = (torch.randn(*s, generator=generator) for s in ((ROWS, COLS), (COLS,)))
    expected = fn.layer_norm(x, COLS, weight, None, 0.5, weight_offset=2.0)
    for half, two in (
        (np.float32(0.5), np.int32(2)),
        (torch.tensor(0.5), torch.tensor(2)),
        (0.5, 2),
    ):
        y = fn.layer_norm(x, COLS, weight, None, half, weight_offset=two)
        assert torch.equal(y, expected)


def test_second_convert_sets_the_flag():
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), apex.FusedRMSNorm(8))
    assert len(fused_norm.convert(model)) == 1
    report = fused_norm.convert(model, memory_efficient=True)
    assert [entry.name for entry in report.replaced] == ["0", "2"]
    assert all(entry.memory_efficient for entry in report.replaced)
    assert model[0].memory_efficient and model[2].memory_efficient
    assert len(fused_norm.convert(model, memory_efficient=True)) == 0
    fused_norm.convert(model)  # asks for nothing
    assert model[0].memory_efficient


def test_second_convert_leaves_alone_what_works_in_place():
    model = nn.Sequential(nn.LayerNorm(8), nn.ReLU(inplace=True))
    fused_norm.convert(model)
    report = fused_norm.convert(model, memory_efficient=True)
    assert len(report) == 0 and "in place" in report.skipped[0].reason
    assert not model[0].memory_efficient
