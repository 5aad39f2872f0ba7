"""fused_norm.integrations.torchtitan: overrides of a tree of configurations. torchtitan's trainer
and models need a newer torch than its components."""

from dataclasses import dataclass, field

import pytest
import torch
from stacks_harness import relative_error
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.nn_modules import LayerNorm, RMSNorm
from torchtitan.protocols.module import Module

import fused_norm

MODULE = "fused_norm.integrations.torchtitan"


class Centred(RMSNorm):
    """A norm that is no RMSNorm, by a configuration that is one."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        pass

    def forward(self, x):
        return super().forward(x) + 1


class Block(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        norms: list = field(
            default_factory=lambda: [
                RMSNorm.Config(normalized_shape=32, eps=1e-3),
                LayerNorm.Config(normalized_shape=32),
                Centred.Config(normalized_shape=32),
            ]
        )
        attention: Module.Config = field(default_factory=ScaledDotProductAttention.Config)

    def __init__(self, config):
        super().__init__()
        self.norms = torch.nn.ModuleList([norm.build() for norm in config.norms])
        self.attention = config.attention.build()
        self.linear = torch.nn.Linear(32, 32)

    def forward(self, x):
        for norm in self.norms:
            x = x + self.linear(norm(x))
        heads = x.unflatten(-1, (4, 8))
        keys = heads[:, :, :2]
        return x + self.attention(heads, keys, keys, enable_gqa=True).flatten(2)


def build(*imports):
    config = Block.Config()
    replaced = apply_overrides(OverrideConfig(imports=list(imports)), config) if imports else []
    torch.manual_seed(0)
    model = config.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape))
    return model, replaced


def run(model):
    torch.manual_seed(1)
    y = model(torch.randn(2, 6, 32))
    y.backward(torch.randn(2, 6, 32))
    return {n: p.grad for n, p in model.named_parameters()} | {"y": y.detach()}


@pytest.mark.parametrize("memory_efficient", [False, True], ids=["", "memory_efficient"])
def test_overrides(memory_efficient, calls):
    original, _ = build()
    expected = run(original)
    flag = {"memory_efficient": memory_efficient}
    model, replaced = build(
        (f"{MODULE}.rms_norm", flag), (f"{MODULE}.layer_norm", flag), f"{MODULE}.sdpa"
    )
    assert len(replaced) == 3
    results = {}
    assert calls(lambda: results.update(run(model)), "norm_forward") == 2
    assert calls(lambda: run(build(f"{MODULE}.sdpa")[0]), "attention_forward") == 1
    assert relative_error(results, expected) < 2e-6
    assert list(model.state_dict()) == list(original.state_dict())
    assert isinstance(model.norms[0], RMSNorm) and isinstance(model.norms[1], LayerNorm)
    report = fused_norm.memory_report(model, torch.randn(2, 6, 32))
    assert [norm.memory_efficient for norm in report] == [memory_efficient] * 2
    assert type(model.norms[2]) is Centred


def test_without_the_override_nothing_changes():
    expected = run(build()[0])
    run(build(f"{MODULE}.rms_norm")[0])
    model, _ = build()
    assert type(model.norms[0]) is RMSNorm
    assert relative_error(run(model), expected) == 0


def test_masks_are_refused():
    model, _ = build(f"{MODULE}.sdpa")
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match="attention_masks"):
        model.attention(q, q, q, attention_masks=object())
