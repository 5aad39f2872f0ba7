"""fused_norm.convert: what is replaced and what stays."""

import copy
import pickle

import pytest
import torch
from torch import nn

import fused_norm
from fused_norm import convert

FP64 = torch.float64

each_flag = pytest.mark.parametrize("memory_efficient", [False, True], ids=["", "memory_efficient"])


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


class OwnRMSNorm(nn.Module):
    def forward(self, x):
        return x


class OwnLayerNorm(nn.LayerNorm):
    pass


class Scaled(nn.RMSNorm):
    pass


class PreNormBlock(nn.Module):
    """Not a norm, whatever its name holds."""


def test_unknown_norms_are_listed_and_left_alone():
    model = nn.Sequential(
        OwnRMSNorm(),
        OwnLayerNorm(4),
        nn.BatchNorm1d(4),
        nn.GroupNorm(2, 4),
        nn.Linear(4, 4),
        PreNormBlock(),
        fused_norm.LayerNorm(4),
        nn.LayerNorm(4),
        Scaled(4),
    )
    types = [type(m) for m in model]
    report = convert(model)
    assert [s.name for s in report.skipped] == ["0", "1", "2", "3", "6", "8"]
    assert all(s.reason for s in report.skipped)
    assert [r.name for r in report.replaced] == ["7"]
    types[7] = fused_norm.LayerNorm
    assert [type(m) for m in model] == types


def test_norms_that_are_not_what_their_class_says_are_left_alone():
    parametrized = nn.LayerNorm(4)
    nn.utils.parametrize.register_parametrization(parametrized, "weight", nn.Identity())
    patched = nn.LayerNorm(4)
    patched.forward = lambda x: x
    scripted = torch.jit.script(nn.LayerNorm(4))
    model = nn.Sequential(parametrized, patched, scripted)
    types = [type(m) for m in model]
    report = convert(model)
    assert not len(report) and [type(m) for m in model] == types
    assert [s.name for s in report.skipped] == ["0", "1", "2"]
    assert "TorchScript" in report.skipped[2].reason


def test_a_second_call_changes_nothing():
    model = small_net()
    convert(model, memory_efficient=True)
    report = convert(model)
    assert not len(report) and len(report.skipped) == 2 and model[1].memory_efficient


def test_only_modules():
    with pytest.raises(TypeError, match="function"):
        convert(lambda x: x)


def test_report_names_what_happened():
    model = nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4), nn.BatchNorm1d(4))
    text = repr(convert(model, memory_efficient=True))
    assert "2 replaced, 1 skipped" in text
    assert "2 x torch.LayerNorm, memory_efficient" in text
    assert "skipped 2: torch.BatchNorm1d" in text


@pytest.mark.parametrize(
    "net",
    [
        lambda: nn.Sequential(nn.LayerNorm(4), nn.ReLU(inplace=True)),
        lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), nn.SiLU(True)),
        lambda: nn.Sequential(nn.LayerNorm(4), nn.Sequential(nn.Dropout(0.5, True))),
        lambda: nn.Sequential(nn.LayerNorm(4), nn.Identity(), nn.Flatten(), nn.ELU(inplace=True)),
        lambda: nn.Sequential(nn.Sequential(nn.LayerNorm(4), nn.Identity()), nn.ReLU(inplace=True)),
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


def test_no_warning_where_nothing_is_in_place(recwarn):
    model = nn.Sequential(nn.ReLU(inplace=True), nn.LayerNorm(4), nn.ReLU())
    assert convert(model, memory_efficient=True).replaced[0].memory_efficient
    assert not recwarn.list
