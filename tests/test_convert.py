"""fused_norm.convert: what is replaced and what stays."""

import copy
import functools
import itertools
import pickle

import numpy as np
import pytest
import torch
from harness import each_flag
from torch import nn
from torch.nn.utils import prune

import fused_norm
from fused_norm import convert

FP64 = torch.float64


def small_net():
    return nn.Sequential(
        nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.RMSNorm(16, eps=1e-3)
    )


def state_of(module):
    return {name: t.clone() for name, t in module.state_dict().items()}


@each_flag
def test_torch_modules_keep_everything(memory_efficient):
    model = small_net().to(FP64)
    model[1].bias.requires_grad_(False)
    model[3].eval()
    norm, parameters, state = model[1], list(model.parameters()), state_of(model)
    calls = []
    norm.register_forward_hook(lambda module, args, output: calls.append(type(module)))
    norm.weight.register_post_accumulate_grad_hook(lambda p: calls.append("grad"))
    names = list(model.state_dict())

    report = convert(model, memory_efficient=memory_efficient)
    assert len(report) == 2 and not report.skipped
    assert [r.name for r in report.replaced] == ["1", "3"]
    assert [r.origin for r in report.replaced] == ["torch.LayerNorm", "torch.RMSNorm"]
    assert model[1] is norm and type(norm) is fused_norm.LayerNorm
    assert type(model[3]) is fused_norm.RMSNorm and model[3].eps == 1e-3
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert list(model.state_dict()) == names
    assert all(torch.equal(state[name], t) for name, t in model.state_dict().items())
    assert not model[1].bias.requires_grad and model[1].training and not model[3].training
    assert model[1].memory_efficient == model[3].memory_efficient == memory_efficient
    model(torch.randn(4, 8, dtype=FP64)).sum().backward()
    assert calls == [fused_norm.LayerNorm, "grad"]
    assert repr(model[1]) == repr(
        fused_norm.LayerNorm(16, dtype=FP64, memory_efficient=memory_efficient)
    )


@each_flag
def test_converted_models_can_be_copied_saved_and_loaded(memory_efficient):
    model = small_net()
    convert(model, memory_efficient=memory_efficient)
    x = torch.randn(3, 8)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), model(x))
        assert twin[1].memory_efficient == memory_efficient
    plain = small_net()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(plain(x), model(x))


def test_shared_modules_and_parameters_stay_shared():
    norm = nn.LayerNorm(8)
    tied = nn.LayerNorm(8)
    tied.weight = norm.weight
    model = nn.ModuleDict({"a": norm, "b": nn.Sequential(norm), "c": tied})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert len(convert(model)) == 2
    assert model["a"] is model["b"][0] is norm
    assert model["c"].weight is model["a"].weight is optimizer.param_groups[0]["params"][0]


def test_a_norm_alone():
    norm = nn.RMSNorm((2, 4), elementwise_affine=False)
    report = convert(norm)
    assert type(norm) is fused_norm.RMSNorm and len(report) == 1
    x = torch.randn(3, 2, 4)
    torch.testing.assert_close(norm(x), nn.RMSNorm((2, 4), elementwise_affine=False)(x))


def test_meta_device():
    with torch.device("meta"):
        model = small_net()
    assert len(convert(model)) == 2
    assert model[1].weight.is_meta
    model.to_empty(device="cpu")
    assert model(torch.randn(2, 8)).shape == (2, 16)


class ByHand(nn.Module):
    """What users write; each argument is one of the ways in which they differ."""

    def __init__(self, size, name="weight", eps=1e-6, offset=0.0, rule="promote", bias=None):
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.full((size,), 1 - offset)))
        if bias is not None:
            self.register_parameter(bias, nn.Parameter(torch.zeros(size)))
        self.names, self.layer_norm_eps, self.offset, self.rule = (name, bias), eps, offset, rule

    def _norm(self, x):
        if self.names[1] is not None:
            x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.layer_norm_eps)

    def forward(self, x):
        weight, bias = (None if n is None else getattr(self, n) for n in self.names)
        y = self._norm(x.float())
        if self.rule == "promote":
            y = y.to(x.dtype) * (weight + self.offset)
        else:
            y = (y * (weight.float() + self.offset)).to(x.dtype)
        return y if bias is None else y + bias


class Centred(ByHand):
    """A LayerNorm without a bias."""

    def _norm(self, x):
        return super()._norm(x - x.mean(-1, keepdim=True))


class OwnLayerNorm(nn.LayerNorm):
    pass


class CastsInput(nn.LayerNorm):
    """OpenAI CLIP's, whose weights stay in fp32."""

    def forward(self, x):
        return super().forward(x.float()).type(x.dtype)


class InFP32(nn.LayerNorm):
    """Its output keeps the input's dtype, also under autocast on CUDA."""

    def forward(self, x):
        weight = None if self.weight is None else self.weight.float()
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.layer_norm(
            x.float(), self.normalized_shape, weight, bias, self.eps
        ).type_as(x)


class CastsWeights(nn.LayerNorm):
    """It takes fp64 too, which autocast leaves alone."""

    def forward(self, x):
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return nn.functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


FOREIGN = {
    "promote": lambda: ByHand(16),
    "input": lambda: ByHand(16, rule="input"),
    "zero_centred": lambda: ByHand(16, offset=1.0, rule="input"),
    "other names": lambda: ByHand(16, name="scale", rule="input"),
    "LayerNorm by hand": lambda: ByHand(16, name="gamma", bias="beta", rule="input"),
    "LayerNorm without a bias": lambda: Centred(16, rule="input"),
    "eps 0": lambda: ByHand(16, eps=0.0),
    "subclass": lambda: OwnLayerNorm(16),
    "subclass without parameters": lambda: OwnLayerNorm(16, elementwise_affine=False),
    "subclass that casts its weights": lambda: CastsWeights(16),
    "subclass in fp32": lambda: InFP32(16),
    "without parameters": lambda: InFP32(16, elementwise_affine=False),
    "two dimensions": lambda: OwnLayerNorm((3, 16)),
}


def results_of(norm, x):
    x = x.detach().clone().requires_grad_()
    norm.zero_grad()
    y = norm(x)
    generator = torch.Generator().manual_seed(4)
    y.backward(torch.randn(y.shape, generator=generator).to(y.dtype))
    return [y, x.grad, *(p.grad for p in norm.parameters())]


@each_flag
@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_norms(name, memory_efficient):
    """A class is known by what it computes: parameters keep their names, and results their dtypes
    and values."""
    torch.manual_seed(0)
    norm = FOREIGN[name]()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    original = copy.deepcopy(norm)
    state, parameters = state_of(norm), list(norm.parameters())
    report = convert(norm, memory_efficient=memory_efficient)
    assert len(report) == 1, report
    assert isinstance(norm, fused_norm.LayerNorm | fused_norm.RMSNorm)
    assert list(norm.state_dict()) == list(state)
    assert all(a is b for a, b in zip(parameters, norm.parameters(), strict=True))
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(4, 3, 16).to(dtype)
        expected = results_of(original.to(dtype), x)
        results = results_of(norm.to(dtype), x)
        assert [t.dtype for t in results] == [t.dtype for t in expected]
        # A rounding of the output, and of what is recovered from it; of sums of 12 rows.
        tolerance = 2**-18 if dtype is torch.float32 else 2**-4
        for ours, theirs in zip(results, expected, strict=True):
            scale = max(1.0, theirs.abs().max().item())
            torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * scale)
    report = fused_norm.memory_report(nn.Sequential(norm), torch.randn(4, 3, 16).to(dtype))
    assert [call.memory_efficient for call in report] == [memory_efficient]
    twin = pickle.loads(pickle.dumps(norm))
    assert torch.equal(twin(x), norm(x))
    assert fused_norm.revert(norm) == 1
    assert vars(norm).keys() == vars(original).keys() and type(norm) is type(original)
    assert torch.equal(norm(x), original(x))


@pytest.mark.parametrize("name", FOREIGN)
def test_dtypes_of_foreign_norms_under_autocast(name, device):
    norm = FOREIGN[name]().to(device)
    x = torch.randn(4, 3, 16, device=device)
    dtypes = []
    for _ in range(2):
        with torch.autocast(device, torch.bfloat16):
            dtypes.append([norm(x.to(dtype)).dtype for dtype in (torch.float32, torch.bfloat16)])
        convert(norm)
    assert dtypes[0] == dtypes[1]


def test_input_cast_to_the_dtype_of_the_weights():
    norm = CastsInput(16)
    x = torch.randn(4, 16).bfloat16()
    expected = norm(x)
    assert len(convert(norm)) == 1
    torch.testing.assert_close(norm(x), expected)


class NoneEpsNorm(ByHand):
    """Where eps is None, that of a dtype: of the one it computes in, or of the input's."""

    def __init__(self, of_input):
        super().__init__(16, rule="input")
        self.layer_norm_eps, self.of_input = None, of_input

    def _norm(self, x):
        eps = torch.finfo(x.dtype).eps if self.layer_norm_eps is None else self.layer_norm_eps
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)

    def forward(self, x):
        wide = x if self.of_input else x.to(torch.promote_types(x.dtype, torch.float32))
        return (self._norm(wide) * self.weight.to(wide.dtype)).to(x.dtype)


def test_eps_of_none():
    """torch's rule is fp32's, of 16-bit rows too, and fp64's."""
    norm = NoneEpsNorm(of_input=False)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, FP64):
        converted = copy.deepcopy(norm).to(dtype)
        assert len(convert(converted)) == 1
        x = (1e-2 * torch.randn(4, 16)).to(dtype)
        torch.testing.assert_close(converted(x), copy.deepcopy(norm).to(dtype)(x))
    report = convert(NoneEpsNorm(of_input=True))
    assert len(report) == 0 and "something else" in report.skipped[0].reason, report


class InT5(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(size)), 1e-6

    def forward(self, x):
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.variance_epsilon)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            x = x.to(self.weight.dtype)
        return self.weight * x


class InGemma(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(size)), 1e-6

    def forward(self, x):
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight.float())).type_as(x)


UNLIKE = list(itertools.product((torch.bfloat16, torch.float16, torch.float32, FP64), repeat=2))


@each_flag
@pytest.mark.parametrize("make", [ByHand, InT5, InGemma])
def test_any_dtypes_of_input_and_weight(make, memory_efficient):
    """Converted, a norm takes what the class took, and gives the same dtypes."""
    for x_dtype, weight_dtype in UNLIKE:
        norm = make(16).to(weight_dtype)
        converted = copy.deepcopy(norm)
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(3)).to(x_dtype)
        expected = results_of(norm, x)
        assert len(convert(converted, memory_efficient=memory_efficient)) == 1
        results = results_of(converted, x)
        assert [t.dtype for t in results] == [t.dtype for t in expected], (x_dtype, weight_dtype)
        for ours, theirs in zip(results, expected, strict=True):
            # Some roundings of bf16, 2^-9 each: of y, of gradients and on their way.
            torch.testing.assert_close(ours, theirs, rtol=2**-5, atol=2**-5)


class ZeroAtReset(ByHand):
    def reset_parameters(self):
        nn.init.zeros_(self.weight)


class HalfAtReset(nn.LayerNorm):
    def reset_parameters(self):
        super().reset_parameters()
        nn.init.constant_(self.weight, 0.5)


@pytest.mark.parametrize(
    "make, value", [(ZeroAtReset, 0), (HalfAtReset, 0.5), (OwnLayerNorm, 1), (ByHand, 1)]
)
def test_reset_parameters_is_that_of_the_class(make, value):
    norm = make(16)
    assert len(convert(norm)) == 1
    converted = type(norm)
    nn.init.normal_(norm.weight)
    norm.reset_parameters()
    assert torch.equal(norm.weight, torch.full((16,), float(value))) and type(norm) is converted


def test_parameters_set_by_torchs_names():
    class OwnNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.gamma, self.beta = (nn.Parameter(torch.rand(8)) for _ in range(2))
            self.eps = 1e-5

        def forward(self, x):
            return nn.functional.layer_norm(x, (8,), self.gamma, self.beta, self.eps)

    norm = OwnNorm()
    convert(norm)
    assert norm.weight is norm.gamma and norm.bias is norm.beta
    norm.bias = bias = nn.Parameter(torch.rand(8))
    assert norm.beta is bias and [n for n, _ in norm.named_parameters()] == ["gamma", "beta"]
    x = torch.randn(3, 8)
    torch.testing.assert_close(norm(x), nn.functional.layer_norm(x, (8,), norm.gamma, bias))


def test_attributes_named_as_torchs_parameters():
    """Such as the flag whether there is a bias."""

    class OwnNorm(nn.Module):
        def __init__(self, rms):
            super().__init__()
            self.scale = nn.Parameter(torch.rand(8))
            self.weight, self.bias, self.eps, self.rms = "scale", False, 1e-5, rms

        def forward(self, x):
            if self.rms:
                return nn.functional.rms_norm(x, (8,), self.scale, self.eps)
            return nn.functional.layer_norm(x, (8,), self.scale, None, self.eps)

    class Weighted(OwnNorm):
        def __init__(self, rms):
            super().__init__(rms)
            del self.weight
            self.weight = self._parameters.pop("scale")

        @property
        def scale(self):
            return self.weight

    x = torch.randn(3, 8)
    for norm in (OwnNorm(True), OwnNorm(False), Weighted(True), Weighted(False)):
        expected = norm(x)
        assert len(convert(norm)) == 1
        torch.testing.assert_close(norm(x), expected)
        assert fused_norm.revert(norm) == 1 and norm.bias is False
        torch.testing.assert_close(norm(x), expected)


def test_foreign_norms_compile():
    norm = ByHand(16, name="gamma", bias="beta")
    convert(norm)
    x = torch.randn(4, 16)
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), norm(x))


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("shape", [np.prod((2, 8)), (np.int64(16),)])
def test_sizes_of_numpy_compile(norm, shape):
    module = norm(shape)
    convert(module)
    assert module.normalized_shape == (16,) and type(module.normalized_shape[0]) is int
    x = torch.randn(4, 16)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), module(x))


class DoublesIfTrue(ByHand):
    """What it computes depends on the type of an attribute."""

    def __init__(self, size, doubles):
        super().__init__(size)
        self.doubles = doubles

    def forward(self, x):
        return super().forward(x) * (2 if self.doubles is True else 1)


def test_attributes_that_are_equal_but_of_unlike_types():
    model = nn.Sequential(DoublesIfTrue(16, 1), DoublesIfTrue(16, True))
    x = torch.randn(4, 16)
    expected = model(x)
    assert [replaced.name for replaced in convert(model).replaced] == ["0"]
    torch.testing.assert_close(model(x), expected)


class Times(ByHand):
    """Each is a norm but for one thing."""

    def forward(self, x):
        return 2 * super().forward(x)


class EpsOutside(ByHand):
    def forward(self, x):
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.layer_norm_eps) * self.weight


class OfChannels(OwnLayerNorm):
    def forward(self, x):
        return super().forward(x.transpose(-1, -2)).transpose(-1, -2)


class Unbiased(ByHand):
    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.var(-1, keepdim=True) + self.layer_norm_eps) * self.weight


class InTraining(ByHand):
    def forward(self, x):
        return super().forward(x) + self.training


class Detached(ByHand):
    def forward(self, x):
        return super().forward(x.detach()) + x - x.detach()


class Gated(ByHand):
    def forward(self, x, gate=None):
        return super().forward(x if gate is None else x * gate)


class WithBuffer(ByHand):
    def __init__(self, size):
        super().__init__(size)
        self.register_buffer("count", torch.zeros(()))


class WithoutEpsilonNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, 1e-5)


class Clamped(ByHand):
    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(min=0)
        return super().forward(x)


class OfMatrices(ByHand):
    def forward(self, x):
        return x if x.dim() == 2 else super().forward(x)


class WithExtraState(ByHand):
    def get_extra_state(self):
        return 1

    def set_extra_state(self, state):
        pass


class KeepsFp32(ByHand):
    def _apply(self, fn, recurse=True):
        return self


class HalfInFp32(ByHand):
    def half(self):
        return self.float()


class CallsTwice(ByHand):
    def __call__(self, x):
        return super().__call__(super().__call__(x))


class HidesItsParameters(ByHand):
    def named_parameters(self, *args, **kwargs):
        return iter(())


class CopiesItself(ByHand):
    def __deepcopy__(self, memo):
        return self


class WithSlots(ByHand):
    __slots__ = ("cache",)


NOT_NORMS = [Times, EpsOutside, OfChannels, Unbiased, InTraining, Detached, WithoutEpsilonNorm]
NOT_NORMS += [Clamped, OfMatrices, WithExtraState, KeepsFp32, HalfInFp32, CallsTwice, WithSlots]
NOT_NORMS += [HidesItsParameters, CopiesItself]


@pytest.mark.parametrize("cls", [*NOT_NORMS, Gated, WithBuffer], ids=lambda cls: cls.__name__)
def test_what_is_no_norm_stays(cls):
    torch.manual_seed(0)
    module = cls(16)
    attributes = dict(vars(module))
    random_state = torch.get_rng_state()
    assert not len(convert(nn.Sequential(module)))
    assert type(module) is cls and vars(module) == attributes
    assert torch.equal(torch.get_rng_state(), random_state)


class BroadcastNorm(nn.Module):
    def __init__(self, shape, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))
        self.eps, self.dim = 1e-6, dim

    def forward(self, x):
        square = x.pow(2).mean(self.dim, keepdim=True)
        return x * torch.rsqrt(square + self.eps) * self.weight


@pytest.mark.parametrize("name", ["timesteps", "deepspeed_stage", "MAX_STEPS"])
def test_not_every_name_with_eps_is_an_epsilon(name):
    norm = BroadcastNorm((8,), -1)
    setattr(norm, name, 10)
    assert len(convert(nn.Sequential(norm))) == 1


def test_a_gated_norm_is_one_of_the_librarys():
    report = convert(nn.Sequential(fused_norm.RMSNormGated(8)), memory_efficient=True)
    assert [skipped.reason for skipped in report.skipped] == ["it is one of this library's"]


@pytest.mark.parametrize("shape", [(1,), (1, 8), (8, 1), (8, 1, 1)], ids=str)
def test_a_weight_that_is_broadcast_is_none_of_columns(shape):
    model = nn.Sequential(BroadcastNorm(shape, -len(shape) if shape[0] == 8 else -1))
    x = torch.randn(2, *(3 if size == 1 else size for size in shape))
    expected = model(x)
    report = convert(model)
    assert not len(report) and "one value a column" in report.skipped[0].reason
    assert torch.equal(model(x), expected)


def test_classes():
    """They are compared too, and what they have beside a norm is of no more use."""
    model = nn.Sequential(Gated(16), WithBuffer(16), Times(16))
    report = convert(model, classes=(Gated, WithBuffer, Times))
    assert [entry.name for entry in report.replaced] == ["0", "1"]
    assert [entry.name for entry in report.skipped] == ["2"]
    x = torch.randn(3, 16)
    torch.testing.assert_close(model[0](x), Gated(16)(x))
    with pytest.raises(TypeError):
        model[0](x, x)
    assert "1.count" in model.state_dict()
    with pytest.raises(TypeError, match="classes"):
        convert(model, classes=("Gated",))


def test_classes_whose_parts_differ():
    """A module's submodules and buffers are its own, whatever another of its class has."""

    class Followed(ByHand):
        def __init__(self, after, shift):
            super().__init__(16)
            self.after = after
            self.register_buffer("shift", torch.tensor(shift))

        def forward(self, x):
            return self.after(super().forward(x)) + self.shift.to(x.dtype)

    parts = ((nn.Identity(), 0.0), (nn.ReLU(), 0.0), (nn.Identity(), 1.0))
    model = nn.ModuleList(Followed(*part) for part in parts)
    report = convert(model, classes=[Followed])
    assert [entry.name for entry in report.replaced] == ["0"]
    assert [entry.name for entry in report.skipped] == ["1", "2"]


def test_calls_without_data():
    model = nn.Sequential(ByHand(16))
    assert len(convert(model)) == 1
    y = model.to("meta")(torch.ones(3, 16, device="meta", dtype=torch.bfloat16))
    assert y.is_meta and y.shape == (3, 16) and y.dtype is torch.float32  # promoted
    with pytest.raises(TypeError, match="input must be a tensor"):
        model([1.0])


def test_no_constructor_runs():
    class Once(ByHand):
        made = 0

        def __init__(self, size):
            Once.made += 1
            super().__init__(size)

    assert len(convert(nn.Sequential(Once(16), Once(16)))) == 2 and Once.made == 2


def test_meta_device_of_a_foreign_norm():
    with torch.device("meta"):
        norm = ByHand(16)
        assert len(convert(norm)) == 1
    assert norm.weight.is_meta


def test_revert():
    model = small_net()
    own = fused_norm.LayerNorm(16)
    model.append(own)
    before = [(type(m), dict(vars(m))) for m in model]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert len(convert(model)) == 2
    assert len(convert(model, memory_efficient=True)) == 3
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    weight = model[1].weight.detach().clone()
    assert fused_norm.revert(model) == 3
    assert [(type(m), dict(vars(m))) for m in model] == before
    assert torch.equal(model[1].weight, weight) and not own.memory_efficient
    assert fused_norm.revert(model) == 0
    with pytest.raises(TypeError, match="function"):
        fused_norm.revert(lambda x: x)


def hook(module):
    """As accelerate hooks a module that it dispatches or offloads."""
    module._old_forward = module.forward

    def forward(module, *args):
        return module._old_forward(*args)

    module.forward = functools.update_wrapper(
        functools.partial(forward, module), module._old_forward
    )


def unhook(module):
    module.forward = module._old_forward
    del module._old_forward


@pytest.mark.parametrize("first", ["convert", "hook", "hook and unhook"])
@pytest.mark.parametrize("name", ["LayerNorm", *FOREIGN])
def test_hooks_that_take_the_place_of_forward(name, first):
    norm = nn.LayerNorm(16) if name == "LayerNorm" else FOREIGN[name]()
    x = torch.randn(2, 3, 16, requires_grad=True)
    expected, cls = norm(x), type(norm)
    if first != "convert":
        hook(norm)
        if first == "hook and unhook":
            unhook(norm)
    assert len(convert(norm)) == 1
    assert len(convert(norm, memory_efficient=True)) == 1
    if first == "convert":
        hook(norm)
    torch.testing.assert_close(norm(x), expected)
    assert fused_norm.revert(norm) == 1
    assert type(norm) is cls and torch.equal(norm(x), expected)
    if first != "hook and unhook":
        unhook(norm)
    assert torch.equal(norm(x), expected)


def test_another_forward_keeps_a_norm_converted():
    norm = nn.LayerNorm(16)
    convert(norm)
    norm.forward = functools.partial(type(norm).forward, norm)
    with pytest.warns(UserWarning, match="its forward was replaced on the instance since"):
        assert fused_norm.revert(norm) == 0
    norm(torch.randn(3, 16))


@pytest.mark.parametrize("name", FOREIGN)
def test_revert_leaves_no_name_behind(name):
    model = nn.Sequential(FOREIGN[name]())
    before = list(model[0]._parameters), set(dir(model[0]))
    assert len(convert(model)) == fused_norm.revert(model) == 1
    assert (list(model[0]._parameters), set(dir(model[0]))) == before


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def test_parameters_in_other_hands():
    """Of a converted norm whose weight has another name: pruned, parametrized, replicated."""
    x = torch.randn(4, 16)
    pruned, parametrized, replica = (FOREIGN["other names"]() for _ in range(3))
    model = nn.Sequential(pruned, parametrized, replica)
    assert len(convert(model)) == 3
    prune.l1_unstructured(pruned, "scale", 3)
    assert (pruned(x) == 0).all(0).sum() == 3
    expected = 2 * parametrized(x)
    nn.utils.parametrize.register_parametrization(parametrized, "scale", Doubled())
    torch.testing.assert_close(parametrized(x), expected)
    scale = replica._parameters.pop("scale")
    replica.scale = scale.detach() * 3  # as nn.DataParallel and FSDP1 do
    torch.testing.assert_close(replica(x), 3 * FOREIGN["other names"]()(x))
    with pytest.warns(UserWarning, match="the norm 1 stays converted.*Parametrized"):
        assert fused_norm.revert(model) == 2
    torch.testing.assert_close(parametrized(x), expected)
    nn.utils.parametrize.remove_parametrizations(parametrized, "scale")
    assert fused_norm.revert(model) == 1 and type(parametrized) is ByHand


class WithoutBias(nn.Module):
    """Its weight is called as torch's is, but it has an attribute more."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(16)), None, 1e-6

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


@pytest.mark.parametrize("way", ["prune", "parametrize", "replicate", "set anew", "FSDP1"])
def test_a_parameter_of_torchs_name_in_other_hands(way):
    x = torch.randn(4, 16)
    results = []
    for converted in (False, True):
        norm = WithoutBias()
        if converted:
            assert len(convert(nn.Sequential(norm))) == 1
        if way == "prune":
            prune.l1_unstructured(norm, "weight", 3)
        elif way == "parametrize":
            nn.utils.parametrize.register_parametrization(norm, "weight", Doubled())
        elif way == "replicate":  # as nn.DataParallel does
            norm, original = norm._replicate_for_data_parallel(), norm
            norm.weight = original.weight * 3
        elif way == "set anew":
            del norm.weight
            assert not hasattr(norm, "weight")
            norm.weight = nn.Parameter(torch.full((16,), 2.0))
        else:  # which takes the parameter away, puts a view there, and registers it again
            del norm._parameters["weight"]
            norm.weight = torch.full((16,), 2.0)
            assert norm.weight is vars(norm)["weight"]
            del norm.weight
            norm.register_parameter("weight", nn.Parameter(torch.full((16,), 3.0)))
        results.append(norm(x))
    torch.testing.assert_close(*results)


class OwnRMSNorm(nn.Module):
    def forward(self, x):
        return x


class PreNormBlock(nn.Module):
    """Not a norm, whatever its name holds."""


def test_unknown_norms_are_listed_and_left_alone():
    model = nn.Sequential(
        OwnRMSNorm(),
        nn.BatchNorm1d(4),
        nn.GroupNorm(2, 4),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        PreNormBlock(),
        fused_norm.LayerNorm(4),
        nn.LayerNorm(4),
    )
    types = [type(m) for m in model]
    report = convert(model)
    assert [s.name for s in report.skipped] == ["0", "1", "2", "5"]
    assert all(s.reason for s in report.skipped)
    assert [r.name for r in report.replaced] == ["6"]
    types[6] = fused_norm.LayerNorm
    assert [type(m) for m in model] == types


def test_norms_that_are_not_what_their_class_says_are_left_alone():
    parametrized = nn.LayerNorm(4)
    nn.utils.parametrize.register_parametrization(parametrized, "weight", nn.Identity())
    patched = nn.LayerNorm(4)
    patched.forward = lambda x: x
    scripted = torch.jit.script(nn.LayerNorm(4))
    in_complex = nn.RMSNorm(4, dtype=torch.complex64)
    model = nn.Sequential(parametrized, patched, scripted, in_complex)
    types = [type(m) for m in model]
    report = convert(model)
    assert not len(report) and [type(m) for m in model] == types
    assert [s.name for s in report.skipped] == ["0", "1", "2", "3"]
    assert "TorchScript" in report.skipped[2].reason
    assert "complex64" in report.skipped[3].reason


@pytest.mark.parametrize("wraps", [False, True], ids=["", "wraps"])
def test_another_forward_of_torchs_class_is_kept(wraps, monkeypatch):
    forward = nn.LayerNorm.forward

    def twice(self, x):
        return 2 * forward(self, x)

    twice = functools.wraps(forward)(twice) if wraps else twice
    monkeypatch.setattr(nn.LayerNorm, "forward", twice)
    model, x = small_net(), torch.randn(3, 8)
    wanted = model(x)
    report = convert(model)
    assert [norm.name for norm in report.replaced] == ["3"]
    assert [norm.name for norm in report.skipped] == ["1"]
    torch.testing.assert_close(model(x), wanted)


def test_a_second_call_changes_nothing():
    model = small_net()
    convert(model, memory_efficient=True)
    report = convert(model)
    assert not len(report) and len(report.skipped) == 2 and model[1].memory_efficient


def test_only_modules():
    with pytest.raises(TypeError, match="function"):
        convert(lambda x: x)


def test_an_epsilon_that_is_no_number_leaves_the_norm_as_it_is():
    norm = nn.LayerNorm(8)
    norm.eps = "1e-5"
    with pytest.raises(TypeError, match="eps must be a number, but is '1e-5'"):
        convert(norm)
    assert type(norm) is nn.LayerNorm and not hasattr(norm, "_before_convert")


def test_report_names_what_happened():
    model = nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4), nn.BatchNorm1d(4))
    text = repr(convert(model, memory_efficient=True))
    assert "2 replaced, 1 skipped" in text
    assert "2 x torch.LayerNorm, memory_efficient" in text
    assert "skipped 2: torch.BatchNorm1d" in text


class Wrapper(nn.Module):
    """As peft has it for a norm that an adapter trains."""

    def __init__(self, norm):
        super().__init__()
        self.inner, self.others = norm, nn.ModuleDict()

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize(
    "net",
    [
        lambda: nn.Sequential(nn.LayerNorm(4), nn.ReLU(inplace=True)),
        lambda: nn.Sequential(nn.LayerNorm(4), nn.ReLU(inplace=1)),
        lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), nn.SiLU(True)),
        lambda: nn.Sequential(nn.LayerNorm(4), nn.Sequential(nn.Dropout(0.5, True))),
        lambda: nn.Sequential(nn.LayerNorm(4), nn.Identity(), nn.Flatten(), nn.ELU(inplace=True)),
        lambda: nn.Sequential(nn.Sequential(nn.LayerNorm(4), nn.Identity()), nn.ReLU(inplace=True)),
        # In evaluation a dropout gives back its input.
        lambda: nn.Sequential(nn.LayerNorm(4), nn.Dropout(0.1), nn.ReLU(inplace=True)).eval(),
        lambda: nn.Sequential(Wrapper(nn.LayerNorm(4)), nn.ReLU(inplace=True)),
        lambda: nn.Sequential(torch.compile(nn.LayerNorm(4), backend="eager"), nn.ReLU(True)),
    ],
)
def test_in_place_activation_after_a_norm(net):
    """Such a model trains with torch's norms, and still does."""
    model = net()
    with pytest.warns(UserWarning, match="in place"):
        report = convert(model, memory_efficient=True)
    assert len(report) == 1 and not report.replaced[0].memory_efficient
    model(torch.randn(3, 4, requires_grad=True)).sum().backward()
    model = net()
    convert(model)  # without the flag there is nothing to warn of


class Declared(nn.Module):
    """What is declared after the norm is not what its output goes to."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.act = nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU(inplace=True)

    def forward(self, x):
        return self.act(self.linear(self.norm(x)))


def test_the_order_of_declaration_is_called_so():
    """The warning says what was seen, and how to have the flag all the same."""
    model = Declared()
    with pytest.warns(UserWarning, match="declared right before act.*set memory_efficient of the"):
        convert(model, memory_efficient=True)
    model.norm.memory_efficient = True
    model(torch.randn(3, 4, requires_grad=True)).sum().backward()
    with pytest.warns(UserWarning, match="the norm 0 is followed by 1, which"):
        convert(nn.Sequential(nn.LayerNorm(4), nn.ReLU(inplace=True)), memory_efficient=True)


def test_no_warning_where_nothing_is_in_place(recwarn):
    model = nn.Sequential(nn.ReLU(inplace=True), nn.LayerNorm(4), nn.ReLU())
    assert convert(model, memory_efficient=True).replaced[0].memory_efficient
    assert not recwarn.list
