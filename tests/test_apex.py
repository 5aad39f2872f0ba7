"""fused_norm.apex: signatures, defaults, and the dtypes and values of every form."""

import copy
import inspect
import itertools
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from harness import each_flag, each_kind, held_for_backward, randn, same_bits

import fused_norm
from fused_norm import apex

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DTYPES = [BF16, FP16, FP32, FP64]
UNIT = {BF16: 2**-8, FP16: 2**-11, FP32: 2**-24, FP64: 2**-53}
SHAPE = (5, 3, 16)
REQUIRED = inspect.Parameter.empty


FUNCTIONS = {
    "fused_layer_norm_affine": ["input", "weight", "bias", "normalized_shape"],
    "fused_layer_norm": ["input", "normalized_shape"],
    "mixed_dtype_fused_layer_norm_affine": ["input", "weight", "bias", "normalized_shape"],
    "fused_rms_norm_affine": ["input", "weight", "normalized_shape"],
    "fused_rms_norm": ["input", "normalized_shape"],
    "mixed_dtype_fused_rms_norm_affine": ["input", "weight", "normalized_shape"],
}
# Each autograd Function and the function whose result it gives.
AUTOGRAD = {
    "FusedLayerNormAffineFunction": "fused_layer_norm_affine",
    "FusedLayerNormAffineMixedDtypesFunction": "mixed_dtype_fused_layer_norm_affine",
    "FusedLayerNormFunction": "fused_layer_norm",
    "FusedRMSNormAffineFunction": "fused_rms_norm_affine",
    "FusedRMSNormAffineMixedDtypesFunction": "mixed_dtype_fused_rms_norm_affine",
    "FusedRMSNormFunction": "fused_rms_norm",
}
MODULES = ["FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"]


def defaults(function):
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.default) for p in parameters if p.name not in ("self", "ctx")]


def test_every_name_is_exported():
    assert set(apex.__all__) == {*FUNCTIONS, *AUTOGRAD, *MODULES, "install"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_signatures(name):
    expected = [(argument, REQUIRED) for argument in FUNCTIONS[name]]
    expected += [("eps", 1e-6), ("memory_efficient", False)]
    assert defaults(getattr(apex, name)) == expected


@pytest.mark.parametrize("name", AUTOGRAD)
def test_autograd_function_signatures(name):
    expected = [(argument, REQUIRED) for argument in [*FUNCTIONS[AUTOGRAD[name]], "eps"]]
    function = getattr(apex, name)
    assert defaults(function.forward) == [*expected, ("memory_efficient", False)]
    # How frameworks find out whether the flag exists.
    assert "memory_efficient" in inspect.getfullargspec(function.forward).args


def test_module_signatures():
    for name in ("FusedLayerNorm", "FusedRMSNorm"):
        assert defaults(getattr(apex, name)) == [
            ("normalized_shape", REQUIRED),
            ("eps", 1e-5),
            ("elementwise_affine", True),
            ("memory_efficient", False),
        ]
    for name in ("MixedFusedLayerNorm", "MixedFusedRMSNorm"):
        signature = inspect.signature(getattr(apex, name)).parameters
        assert list(signature) == ["normalized_shape", "eps", "memory_efficient", "kwargs"]
        assert signature["eps"].default == 1e-5
        assert signature["memory_efficient"].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.parametrize("name", MODULES)
def test_modules_hold_parameters_of_the_default_dtype(name):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        module = getattr(apex, name)((3, 16))
    finally:
        torch.set_default_dtype(before)
    state = module.state_dict()
    assert list(state) == (["weight"] if "RMS" in name else ["weight", "bias"])
    assert all(t.dtype == BF16 and t.shape == (3, 16) for t in state.values())
    assert torch.equal(state["weight"], torch.ones(3, 16, dtype=BF16))
    assert module.normalized_shape == (3, 16) and module.eps == 1e-5
    base = fused_norm.RMSNorm if "RMS" in name else fused_norm.LayerNorm
    assert isinstance(module, base)


def test_modules_without_parameters(device, generator):
    x = randn(generator, *SHAPE, dtype=BF16)
    for name in ("FusedLayerNorm", "FusedRMSNorm"):
        module = getattr(apex, name)(16, 1e-3, False, True)
        assert not list(module.parameters()) and module.eps == 1e-3 and module.memory_efficient
        assert module(x).dtype == BF16


@pytest.mark.parametrize("name", ["MixedFusedLayerNorm", "MixedFusedRMSNorm"])
def test_mixed_modules_ignore_keywords_but_not_a_missing_weight(name):
    module = getattr(apex, name)(16, sequence_parallel=True, memory_efficient=True)
    assert module.memory_efficient
    with pytest.warns(UserWarning, match="elementwise_affine"):
        getattr(apex, name)(16, elementwise_affine=True)
    with pytest.raises(RuntimeError, match="elementwise_affine=False"):
        getattr(apex, name)(16, elementwise_affine=False)


def call(kind, mixed, x, weight, bias, **options):
    name = f"{'mixed_dtype_' if mixed else ''}fused_{kind}_norm_affine"
    params = (weight, bias) if kind == "layer" else (weight,)
    return getattr(apex, name)(x, *params, (x.shape[-1],), **options)


def exact(kind, x, weight, bias, eps=1e-6):
    x, weight, bias = x.double(), weight.double(), bias.double()
    if kind == "layer":
        return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rounded_to(tensor, dtype):
    """The tensor as autocast passes it on, with a gradient for the tensor itself."""
    return tensor if dtype is None or tensor.dtype == FP64 else tensor.to(dtype)


def check(kind, mixed, x_dtype, weight_dtype, expected_dtype, memory_efficient, generator, **cast):
    """``cast``: the dtypes that autocast rounds input and parameters to."""
    x = randn(generator, *SHAPE, dtype=x_dtype).requires_grad_()
    weight = (0.5 + randn(generator, 16).sigmoid()).to(weight_dtype).requires_grad_()
    bias = (0.5 * randn(generator, 16).tanh()).to(weight_dtype).requires_grad_()
    dy = randn(generator, *SHAPE, dtype=FP64)
    y = call(kind, mixed, x, weight, bias, memory_efficient=memory_efficient)
    what = f"input {x_dtype}, weight {weight_dtype}"
    assert y.dtype == expected_dtype, what
    with torch.autocast(x.device.type, enabled=False):
        rounded = [rounded_to(x, cast.get("input"))]
        rounded += [rounded_to(t, cast.get("parameters")) for t in (weight, bias)]
        reference = exact(kind, *rounded)
    # One rounding of the output, and the arithmetic's few, of numbers below 8: in fp64 those of the
    # reference too, and which they are depends on the CPU.
    unit = max(UNIT[y.dtype], 4 * UNIT[FP64 if x_dtype == FP64 else FP32])
    torch.testing.assert_close(
        y.double(), reference.detach(), rtol=2 * unit, atol=8 * unit, msg=what
    )
    leaves = [x, weight, bias] if kind == "layer" else [x, weight]
    # The gradient of the output's rounding is one; dy itself is rounded to the output's dtype.
    grads = torch.autograd.grad(y, leaves, dy.to(y.dtype))
    for leaf, passed, grad, correct in zip(
        leaves, rounded, grads, torch.autograd.grad(reference, leaves, dy), strict=False
    ):
        assert grad.dtype == leaf.dtype
        # Sums of 15 products of roundings of dy, of a saved output, and of the gradient itself.
        scale = max(unit, UNIT[leaf.dtype], UNIT[passed.dtype]) * correct.abs().max().item()
        torch.testing.assert_close(grad.double(), correct.double(), rtol=0, atol=8 * scale)


@each_flag
@each_kind
def test_output_has_the_inputs_dtype(kind, memory_efficient, device, generator):
    pairs = [(x, w) for x, w in itertools.product(DTYPES, DTYPES) if x == w or FP64 not in (x, w)]
    for x_dtype, weight_dtype in [*pairs, (FP64, FP32), (FP64, BF16)]:
        check(kind, False, x_dtype, weight_dtype, x_dtype, memory_efficient, generator)


@each_flag
@each_kind
def test_mixed_output_has_the_weights_dtype(kind, memory_efficient, device, generator):
    for x_dtype, weight_dtype in itertools.product(DTYPES, DTYPES):
        check(kind, True, x_dtype, weight_dtype, weight_dtype, memory_efficient, generator)


@each_flag
@pytest.mark.parametrize("mixed", [False, True], ids=["", "mixed"])
@pytest.mark.parametrize("autocast_dtype", [BF16, FP16], ids=str)
@each_kind
def test_autocast(kind, autocast_dtype, mixed, memory_efficient, device, generator):
    for x_dtype, weight_dtype in itertools.product(DTYPES, [BF16, FP16, FP32]):
        decides = weight_dtype if mixed else x_dtype
        expected = FP64 if decides == FP64 else autocast_dtype
        cast = {"input": autocast_dtype}
        if not memory_efficient:
            cast["parameters"] = autocast_dtype
        with torch.autocast(device, autocast_dtype):
            check(kind, mixed, x_dtype, weight_dtype, expected, memory_efficient, generator, **cast)


@each_flag
@pytest.mark.parametrize("autocast_dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_autocast_rounds_first(name, autocast_dtype, memory_efficient, device, generator):
    """The bits of a call on rounded input and parameters outside of autocast."""
    module = getattr(apex, name)(16, memory_efficient=memory_efficient).to(device)
    x, dy = randn(generator, *SHAPE).requires_grad_(), randn(generator, *SHAPE)
    with torch.no_grad():
        for parameter in module.parameters():
            # Numbers that both dtypes hold, so that the flag makes no difference.
            parameter.copy_((0.5 + randn(generator, 16).sigmoid()).to(BF16).to(FP16))
    with torch.autocast(device, autocast_dtype):
        y = module(x)
    y.backward(dy.to(y.dtype))
    other = copy.deepcopy(module).to(autocast_dtype)
    other.zero_grad()
    rounded = x.detach().to(autocast_dtype).requires_grad_()
    expected = other(rounded)
    expected.backward(dy.to(autocast_dtype))
    assert same_bits(y.detach(), expected.detach())
    assert same_bits(x.grad, rounded.grad.float())


@each_kind
def test_autocast_rounds_parameters(kind, generator):
    """As apex does; the flag's columns are known by the parameters, which it leaves as they are."""
    x = randn(generator, *SHAPE)
    weight, bias = 1 + 2**-12 + torch.zeros(16), torch.zeros(16)
    with torch.autocast("cpu", BF16):
        y = call(kind, False, x, weight, bias)
        one = call(kind, False, x, torch.ones(16), bias)
    assert same_bits(y, one)


@each_kind
def test_autocast_keeps_the_flag(kind, device, generator):
    """The output is what is saved: a 16-bit tensor, with fp32 input and parameters too."""
    x = randn(generator, 64, 256).requires_grad_()
    module = (apex.FusedLayerNorm if kind == "layer" else apex.FusedRMSNorm)(
        256, memory_efficient=True
    ).to(device)
    with torch.autocast(device, BF16):
        module(x)
        y, held = held_for_backward(lambda: module(x), *module.parameters())
    assert y.dtype == BF16 and y.nbytes <= held < 1.1 * y.nbytes


@pytest.mark.parametrize("name", AUTOGRAD)
def test_apply_is_the_function(name, device, generator):
    arguments = FUNCTIONS[AUTOGRAD[name]]
    x = randn(generator, *SHAPE, dtype=BF16).requires_grad_()
    weight, bias = (randn(generator, 16).requires_grad_() for _ in range(2))
    values = {"input": x, "weight": weight, "bias": bias, "normalized_shape": (16,)}
    values = [values[argument] for argument in arguments]
    leaves = [t for t in values if isinstance(t, torch.Tensor)]
    results = []
    for y in (
        getattr(apex, name).apply(*values, 1e-3),
        getattr(apex, name).apply(*values, 1e-3, True),
        getattr(apex, AUTOGRAD[name])(*values, 1e-3),
        getattr(apex, AUTOGRAD[name])(*values, memory_efficient=True, eps=1e-3),
    ):
        results.append([y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y))])
    for i, j in ((0, 2), (1, 3)):
        assert all(same_bits(a, b) for a, b in zip(results[i], results[j], strict=True))
    assert same_bits(results[0][0], results[1][0])


@each_flag
@pytest.mark.parametrize("name", MODULES)
def test_modules_train_and_compile(name, memory_efficient, device, generator):
    torch._dynamo.reset()
    module = getattr(apex, name)(16, memory_efficient=memory_efficient).to(device)
    x, dy = randn(generator, *SHAPE, dtype=BF16), randn(generator, *SHAPE)
    expected = FP32 if "Mixed" in name else BF16
    assert module(x).dtype == expected
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    results = []
    for forward in (module, compiled):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        y = forward(leaf)
        y.backward(dy.to(y.dtype))
        results.append([y.detach(), leaf.grad, *(p.grad.clone() for p in module.parameters())])
    assert all(same_bits(eager, traced) for eager, traced in zip(*results, strict=True))


# What apex's own tests ask of its modules: forms, shapes, strides and tolerances.
NEAR = {
    FP32: {"rtol": 1.3e-6, "atol": 1e-5},
    FP16: {"rtol": 1e-3, "atol": 1e-3},
    BF16: {"rtol": 1.6e-2, "atol": 3e-3},
}
APEX_CASES = list(itertools.product([FP32], ["no parameters", "affine", "mixed"], [16, 65536]))
APEX_CASES += [(FP16, "affine", 16), (BF16, "affine", 16)]


@each_flag
@pytest.mark.parametrize("contiguous", [True, False], ids=["", "strided"])
@pytest.mark.parametrize(("dtype", "form", "rows"), APEX_CASES, ids=str)
@each_kind
def test_modules_as_apex_tests_them(
    kind, dtype, form, rows, contiguous, memory_efficient, device, generator
):
    """Beside torch's norm in fp32, over two dimensions."""
    prefix = "MixedFused" if form == "mixed" else "Fused"
    options = {} if form == "mixed" else {"elementwise_affine": form == "affine"}
    name = f"{prefix}{'Layer' if kind == 'layer' else 'RMS'}Norm"
    shape = [32, 16]
    module = getattr(apex, name)(shape, memory_efficient=memory_efficient, **options)
    module.to(device=device, dtype=dtype)
    rows = min(rows, 65536 if device == "cuda" else 2048)
    if contiguous:
        x = randn(generator, rows, *shape, dtype=dtype)
    else:
        x = randn(generator, min(rows, 4096), 32 * 5, 16 * 3, dtype=dtype)[:, ::5, ::3]
    mine = x.detach().requires_grad_()
    theirs = x.detach().float().clone().requires_grad_()
    assert mine.is_contiguous() == contiguous
    y = module(mine)
    native = F.layer_norm if kind == "layer" else F.rms_norm
    expected = native(theirs, shape, eps=1e-5)
    dy = torch.rand(expected.shape, generator=generator, device=device).to(dtype)
    y.backward(dy)
    expected.backward(dy.float())
    torch.testing.assert_close(y, expected.to(dtype), **NEAR[dtype])
    torch.testing.assert_close(mine.grad, theirs.grad.to(dtype), **NEAR[dtype])


@each_flag
@pytest.mark.parametrize("affine", [False, True], ids=["", "affine"])
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@each_kind
def test_autocast_as_apex_tests_it(kind, dtype, affine, memory_efficient, device, generator):
    """fp32 input under autocast, beside a 16-bit norm of the rounded input: apex's tolerances."""
    shape = [32, 16]
    cls = apex.FusedLayerNorm if kind == "layer" else apex.FusedRMSNorm
    module = cls(shape, elementwise_affine=affine, memory_efficient=memory_efficient).to(device)
    x = randn(generator, 16, *shape).requires_grad_()
    rounded = x.detach().to(dtype).requires_grad_()
    native = F.layer_norm if kind == "layer" else F.rms_norm
    expected = native(rounded, shape, eps=1e-5)
    with torch.autocast(device, dtype):
        y = module(x)
    tolerance = {"rtol": 1e-3, "atol": 1e-5} if dtype == FP16 else {"rtol": 1.6e-2, "atol": 3e-4}
    torch.testing.assert_close(y, expected, **tolerance)
    dy = torch.rand_like(expected)
    y.backward(dy)
    expected.backward(dy)
    tolerance = {"rtol": 1e-3, "atol": 1e-3} if dtype == FP16 else {"rtol": 1.6e-2, "atol": 3e-3}
    torch.testing.assert_close(x.grad, rounded.grad.float(), **tolerance)


INSTALL = """
import importlib.util, sys
import torch, fused_norm
fused_norm.apex.install()
fused_norm.apex.install()
import apex
from apex.normalization import FusedRMSNorm, MixedFusedLayerNorm
from apex.normalization.fused_layer_norm import FusedLayerNormAffineFunction, fused_rms_norm_affine
import apex.normalization.fused_layer_norm as module
assert FusedRMSNorm is fused_norm.apex.FusedRMSNorm is apex.normalization.FusedRMSNorm
assert not hasattr(module, "install") and not hasattr(apex.normalization, "fused_rms_norm")
assert importlib.util.find_spec("apex") is not None
for missing in ("apex.optimizers", "apex.contrib.layer_norm.layer_norm", "apex.amp"):
    try:
        importlib.import_module(missing)
    except ImportError:
        continue
    raise AssertionError(missing)
norm = MixedFusedLayerNorm(8)
assert torch.equal(norm(torch.ones(2, 8)), torch.zeros(2, 8))
"""
REFUSE = """
import fused_norm
try:
    fused_norm.apex.install()
except RuntimeError as error:
    assert "apex is installed" in str(error)
    import apex
    assert apex.is_real
else:
    raise AssertionError
"""


@pytest.mark.parametrize("real", [False, True], ids=["installs", "refuses"])
def test_install(real, tmp_path):
    if real:
        (tmp_path / "apex.py").write_text("is_real = True")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", REFUSE if real else INSTALL],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
