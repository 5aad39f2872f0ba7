"""What torch's own norms and softmaxes do at the edges: overriding, changes of class, strides."""

import inspect
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from harness import held_for_backward
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fused_norm
import fused_norm.functional as fn
from fused_norm import _convert, apex

X, WEIGHT = torch.randn(3, 8), torch.randn(8)
# name: a call of a public function with the tensors it is given
CALLS = {
    "layer_norm": lambda x, w: fn.layer_norm(x, 8, w, w, 1e-3, memory_efficient=True),
    "rms_norm": lambda x, w: fn.rms_norm(x, 8, w, weight_offset=1.0),
    "add_layer_norm": lambda x, w: fn.add_layer_norm(x, x, 8, w, w, weight_offset=0.5),
    "add_rms_norm": lambda x, w: fn.add_rms_norm(x, x, 8, w, residual_dtype=torch.float32),
    "rms_norm_gated": lambda x, w: fn.rms_norm_gated(x, x, 8, w, norm_before_gate=False),
    "softmax": lambda x, w: fn.softmax(x, -1, torch.float64),
    "log_softmax": lambda x, w: fn.log_softmax(x, 0),
    "scaled_masked_softmax": lambda x, w: fn.scaled_masked_softmax(x, x > 0, 2.0, causal=True),
    "fused_layer_norm_affine": lambda x, w: apex.fused_layer_norm_affine(x, w, w, 8, 1e-3, True),
    "fused_layer_norm": lambda x, w: apex.fused_layer_norm(x, 8),
    "fused_rms_norm_affine": lambda x, w: apex.fused_rms_norm_affine(x, w, 8),
    "fused_rms_norm": lambda x, w: apex.fused_rms_norm(x, 8, memory_efficient=True),
    "mixed_dtype_fused_layer_norm_affine": lambda x, w: apex.mixed_dtype_fused_layer_norm_affine(
        x, w, w, 8
    ),
    "mixed_dtype_fused_rms_norm_affine": lambda x, w: apex.mixed_dtype_fused_rms_norm_affine(
        x, w, 8
    ),
}
each_call = pytest.mark.parametrize("name", CALLS)


def function_of(name):
    return getattr(fn, name, None) or getattr(apex, name)


def results(outcome):
    return outcome if isinstance(outcome, tuple) else (outcome,)


class Plain(torch.Tensor):
    """A subclass that overrides nothing."""


class Overriding(torch.Tensor):
    seen = None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Overriding.seen = func
        return super().__torch_function__(func, types, args, kwargs or {})


class Other:
    """No tensor, but it speaks the protocol."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func, args, kwargs


class Recording(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@each_call
def test_subclass_keeps_its_type(name):
    expected = results(CALLS[name](X, WEIGHT))
    got = results(CALLS[name](X.as_subclass(Plain), WEIGHT))
    assert all(type(y) is Plain for y in got)
    assert all(torch.equal(y, e) for y, e in zip(got, expected, strict=True))
    if "softmax" not in name and name not in ("fused_layer_norm", "fused_rms_norm"):
        got = results(CALLS[name](X, WEIGHT.as_subclass(Plain)))
        assert all(type(y) is Plain for y in got)


@each_call
def test_override_sees_the_function(name):
    got = results(CALLS[name](X.as_subclass(Overriding), WEIGHT))
    assert all(type(y) is Overriding for y in got)
    seen, args, kwargs = CALLS[name](Other(), WEIGHT)
    assert seen is function_of(name)
    if name not in ("scaled_masked_softmax",):  # whose mask is not one of Other's
        # What was passed on gives the same result.
        again = results(seen(X, *(X if isinstance(a, Other) else a for a in args[1:]), **kwargs))
        expected = results(CALLS[name](X, WEIGHT))
        assert all(torch.equal(a, e) for a, e in zip(again, expected, strict=True))


# Comparisons of Other, for the mask of the last one.
Other.__gt__ = lambda self, other: None


@each_call
def test_mode_sees_the_function(name):
    expected = results(CALLS[name](X, WEIGHT))
    with Recording() as mode:
        got = results(CALLS[name](X, WEIGHT))
    assert function_of(name) in mode.seen
    assert all(torch.equal(y, e) for y, e in zip(got, expected, strict=True))


@each_call
def test_signature_is_known_to_inspect(name):
    """Frameworks look for arguments, some by getfullargspec."""
    function = function_of(name)
    spec = inspect.getfullargspec(function)
    assert spec.args + spec.kwonlyargs == list(inspect.signature(function).parameters)
    assert spec.args[0] == "input" and spec.varargs is spec.varkw is None


def test_mode_sees_what_modules_call():
    modules = {
        fn.layer_norm: fused_norm.LayerNorm(8),
        fn.rms_norm: fused_norm.RMSNorm(8),
        fn.softmax: fused_norm.Softmax(-1),
        fn.log_softmax: fused_norm.LogSoftmax(-1),
        apex.fused_layer_norm_affine: apex.FusedLayerNorm(8),
        apex.fused_rms_norm: apex.FusedRMSNorm(8, elementwise_affine=False),
        apex.mixed_dtype_fused_layer_norm_affine: apex.MixedFusedLayerNorm(8),
    }
    for function, module in modules.items():
        with Recording() as mode:
            module(X)
        assert function in mode.seen
        assert type(module(X.as_subclass(Plain))) is Plain


def test_mode_sees_a_converted_norm():
    """With all that decides the output's dtype."""
    norm = _convert.ConvertedRMSNorm(8)
    norm.output_rule = "promote"
    with Recording() as mode:
        y = norm(X.bfloat16())
    assert _convert.converted_norm in mode.seen and y.dtype is torch.float32
    assert type(norm(X.as_subclass(Plain))) is Plain


def test_gradient_of_a_subclass():
    x = X.clone().as_subclass(Plain).requires_grad_()
    plain = X.clone().requires_grad_()
    weight = WEIGHT.clone().requires_grad_()
    got = torch.autograd.grad(fn.layer_norm(x, 8, weight).square().sum(), [x, weight])
    expected = torch.autograd.grad(fn.layer_norm(plain, 8, weight).square().sum(), [plain, weight])
    for g, e in zip(got, expected, strict=True):
        assert torch.equal(g.as_subclass(torch.Tensor), e)


def test_default_device_is_a_mode():
    """torch.device as a context, also in compiled code."""
    compiled = torch.compile(
        lambda x: fn.softmax(fn.rms_norm(x, 8), -1), backend="eager", fullgraph=True
    )
    expected = compiled(X)
    with torch.device("cpu"):
        assert torch.equal(fn.softmax(fn.rms_norm(X, 8), -1), expected)
        assert torch.equal(compiled(X), expected)


def test_compiled_subclass():
    compiled = torch.compile(lambda x: fn.layer_norm(x, 8), backend="eager", fullgraph=True)
    y = compiled(X.as_subclass(Plain))
    assert type(y) is Plain and torch.equal(y.as_subclass(torch.Tensor), fn.layer_norm(X, 8))


def test_memory_efficient_channels_last_saves_a_copy():
    """Kernels read rows that are contiguous."""
    x = torch.randn(2, 3, 4, 8).to(memory_format=torch.channels_last).requires_grad_()
    weight = torch.ones(8, requires_grad=True)
    y, held = held_for_backward(lambda: fn.rms_norm(x, 8, weight, memory_efficient=True), x, weight)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert y.nbytes <= held < 2 * y.nbytes


def test_proxy_of_a_name_taken_from_the_module():
    """torch.fx's proxies speak the protocol: no torch.fx.wrap is needed for one node a call."""
    from fused_norm.functional import layer_norm

    class Model(torch.nn.Module):
        def forward(self, x):
            return layer_norm(x, (8,))

    traced = torch.fx.symbolic_trace(Model())
    assert [n.target for n in traced.graph.nodes if n.op == "call_function"] == [layer_norm]
    assert torch.equal(traced(X), layer_norm(X, 8))


PAIRS = [
    (torch.nn.LayerNorm, fused_norm.LayerNorm),
    (torch.nn.RMSNorm, fused_norm.RMSNorm),
    (torch.nn.LayerNorm, apex.FusedLayerNorm),
    (torch.nn.RMSNorm, apex.FusedRMSNorm),
    (torch.nn.RMSNorm, _convert.ConvertedRMSNorm),
]


@pytest.mark.parametrize(("theirs", "ours"), PAIRS, ids=lambda cls: cls.__module__)
def test_change_of_class(theirs, ours):
    module = theirs(8, eps=1e-3)
    expected = module(X)
    module.__class__ = ours
    torch.testing.assert_close(module(X), expected)
    assert "LayerNorm" in repr(module) or "RMSNorm" in repr(module)
    assert module.memory_efficient is False and module.weight_offset == 0
    module.reset_parameters()
    assert torch.equal(module.weight, torch.ones(8))


@pytest.mark.parametrize(("theirs", "ours"), PAIRS, ids=lambda cls: cls.__module__)
def test_saved_before_an_attribute_existed(theirs, ours):
    module = ours(8)
    for name in ("memory_efficient", "weight_offset", "output_rule"):
        module.__dict__.pop(name, None)
    loaded = pickle.loads(pickle.dumps(module))
    assert torch.equal(loaded(X), ours(8)(X))
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(X), ours(8)(X))


def test_weight_offset_of_layer_norm(generator):
    """Zero-centred: what Megatron calls layernorm_zero_centered_gamma."""
    x, weight, bias, dy = (
        torch.randn(*s, generator=generator) for s in ((3, 8), (8,), (8,), (3, 8))
    )
    for add in (False, True):
        got = []
        for shift, options in ((0.0, {"weight_offset": 1.0}), (1.0, {})):
            leaves = [t.clone().requires_grad_() for t in (x, weight + shift, bias)]
            for memory_efficient in (False, True):
                options["memory_efficient"] = memory_efficient
                if add:
                    y = fn.add_layer_norm(leaves[0], x, 8, *leaves[1:], **options)[0]
                else:
                    y = fn.layer_norm(leaves[0], 8, *leaves[1:], **options)
                got.append([y, *torch.autograd.grad(y, leaves, dy)])
        for other in got[1:]:
            for a, b in zip(got[0], other, strict=True):
                # A rounding of weight + 1 and those of a handful of sums of eight.
                torch.testing.assert_close(a, b, rtol=2**-18, atol=2**-18)
    module = fused_norm.LayerNorm(8, weight_offset=1.0)
    assert torch.equal(module.weight, torch.zeros(8)) and torch.equal(module.bias, torch.zeros(8))
    assert "weight_offset=1.0" in repr(module)
    torch.testing.assert_close(module(x), F.layer_norm(x, [8]))


def test_steps_of_an_optimizer_that_cannot_be_hashed():
    """A class with __eq__ and no __hash__, as a dataclass is."""

    class Comparable(torch.optim.SGD):
        def __eq__(self, other):
            return self is other

    module = torch.nn.Linear(2, 2)
    module(torch.ones(2)).sum().backward()
    before = module.bias.detach().clone()
    Comparable(module.parameters(), lr=0.5).step()
    assert torch.equal(module.bias, before - 0.5)


def test_config_refuses_names_it_does_not_know():
    with pytest.raises(AttributeError, match="no option 'decomposse'.*decompose"):
        fused_norm.config.decomposse = True
    with pytest.raises(TypeError, match="unknown"), fused_norm.config.patch(unknown=True):
        pass
    with pytest.raises(TypeError, match="decompose must be a bool, but is 'yes'"):
        fused_norm.config.decompose = "yes"
    assert fused_norm.config.decompose is False
    with fused_norm.config.patch(decompose=True):
        assert fused_norm.config.decompose is True


def test_names_of_autograds_nodes():
    """As profiles show them."""
    x = X.clone().requires_grad_()
    outputs = [
        fn.layer_norm(x, 8),
        fn.softmax(x, -1),
        torch.autograd.grad(fn.softmax(x, -1).sum(), x, create_graph=True)[0],
    ]
    names = [y.grad_fn.name() for y in outputs]
    for name, part in zip(names, ("Norm", "Softmax", "Backward"), strict=True):
        assert part in name and "anonymous" not in name and "fused_norm" in name


STRIDED = {
    "channels_last": lambda g: torch.randn(2, 3, 4, 8, generator=g).to(
        memory_format=torch.channels_last
    ),
    "channels_last, sliced": lambda g: torch.randn(2, 3, 5, 8, generator=g).to(
        memory_format=torch.channels_last
    )[:, :, 1:],
    "channels_last_3d": lambda g: torch.randn(2, 3, 4, 5, 8, generator=g).to(
        memory_format=torch.channels_last_3d
    ),
    "contiguous": lambda g: torch.randn(2, 3, 4, 8, generator=g),
    "permuted": lambda g: torch.randn(2, 3, 4, 8, generator=g).permute(0, 2, 1, 3),
}


@pytest.mark.parametrize("compiles", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize("memory_efficient", [False, True], ids=["", "memory_efficient"])
@pytest.mark.parametrize("strided", STRIDED)
def test_strides_are_torchs(strided, memory_efficient, compiles, device, generator):
    """torch's RMSNorm keeps channels_last, its LayerNorm does not."""
    base = STRIDED[strided](torch.Generator().manual_seed(0)).to(device)
    weight = torch.rand(8, generator=generator, device=device) + 0.5
    for ours, theirs in ((fn.rms_norm, F.rms_norm), (fn.layer_norm, F.layer_norm)):
        if compiles:
            torch._dynamo.reset()
            ours = torch.compile(ours, backend="aot_eager", fullgraph=True)
        x, y = (base.detach().requires_grad_() for _ in range(2))
        w, v = (weight.clone().requires_grad_() for _ in range(2))
        mine, other = ours(x, (8,), w, memory_efficient=memory_efficient), theirs(y, (8,), v)
        if strided != "permuted":  # which torch's RMSNorm keeps by chance, on the CPU alone
            assert mine.stride() == other.stride()
        torch.testing.assert_close(mine, other)
        dy = torch.randn_like(base)
        grads = torch.autograd.grad(mine, [x, w], dy), torch.autograd.grad(other, [y, v], dy)
        for grad, expected in zip(*grads, strict=True):
            torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm", [fused_norm.LayerNorm, fused_norm.RMSNorm])
def test_fake_tensors_of_real_modules(norm):
    """No look at the parameters meets the mode."""
    norm, x = norm(8, memory_efficient=True), torch.randn(5, 8)
    with FakeTensorMode(allow_non_fake_inputs=True):
        out = norm(x)
    assert isinstance(out, FakeTensor) and out.shape == x.shape


def test_a_mode_sees_no_look_at_the_parameters():
    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.name())
            return func(*args, **(kwargs or {}))

    seen = {}
    for flag in (False, True):
        names = seen[flag] = []
        norm, x = fused_norm.LayerNorm(8, memory_efficient=flag), torch.zeros(5, 8)
        x.requires_grad_()  # else the node has one result, and torch detaches what it saves of that
        with Names():
            norm(x)
    assert seen[True] == seen[False] and seen[True][0] == "fused_norm::norm_forward"


def test_softmax_in_place_of_torchs(monkeypatch):
    x = torch.randn(4, 8, dtype=torch.float64)
    names = "softmax", "log_softmax"

    def hessians():
        functions = [getattr(torch, name) for name in names]
        return [torch.func.hessian(lambda x, f=f: f(x, -1).sin().sum())(x) for f in functions]

    wanted = hessians()
    for name in names:
        monkeypatch.setattr(torch, name, getattr(fn, name))
    torch.testing.assert_close(hessians(), wanted)
