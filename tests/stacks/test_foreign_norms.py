"""fused_norm.convert on tiny random models of timm and diffusers, whose norms are their own."""

import copy

import diffusers
import pytest
import timm
import torch
from stacks_harness import relative_error
from timm.models.convnext import ConvNeXt
from timm.models.vision_transformer import VisionTransformer

import fused_norm

VIT = {
    "img_size": 16,
    "patch_size": 4,
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 4,
    "num_classes": 10,
}


def vit(**options):
    return VisionTransformer(**VIT, **options), {"x": torch.randn(2, 3, 16, 16)}


def convnext():
    model = ConvNeXt(num_classes=10, depths=(1, 1, 1, 1), dims=(8, 16, 24, 32))
    return model, {"x": torch.randn(2, 3, 32, 32)}


def flux():
    model = diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    inputs = {
        "hidden_states": torch.randn(1, 16, 4),
        "encoder_hidden_states": torch.randn(1, 6, 32),
        "pooled_projections": torch.randn(1, 32),
        "timestep": torch.tensor([1.0]),
        "img_ids": torch.randn(16, 3),
        "txt_ids": torch.zeros(6, 3),
    }
    return model, inputs


def wan():
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=1,
        cross_attn_norm=True,
        rope_max_seq_len=32,
    )
    inputs = {
        "hidden_states": torch.randn(1, 4, 2, 8, 8),
        "timestep": torch.tensor([1]),
        "encoder_hidden_states": torch.randn(1, 6, 16),
    }
    return model, inputs


# What makes the model, how many of its norms are replaced, and classes that are left.
MODELS = {
    "vit": (vit, 5, set()),
    "vit with RmsNorm": (
        lambda: vit(norm_layer=timm.layers.RmsNorm, qk_norm=True),
        9,
        set(),
    ),
    "vit in fp32": (lambda: vit(norm_layer=timm.layers.LayerNormFp32), 5, set()),
    "convnext": (convnext, 4, {"timm.LayerNorm2d"}),
    "flux": (flux, 12, set()),
    "wan": (wan, 8, set()),
}


def run(model, inputs):
    model.zero_grad()
    output = model(**inputs)
    output = output if isinstance(output, torch.Tensor) else output.sample
    generator = torch.Generator().manual_seed(3)
    output.backward(torch.randn(output.shape, generator=generator))
    results = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return results | {"output": output.detach()}


@pytest.mark.parametrize("memory_efficient", [False, True], ids=["", "memory_efficient"])
@pytest.mark.parametrize("name", MODELS)
def test_converted_model(name, memory_efficient, calls):
    make, norms, left = MODELS[name]
    torch.manual_seed(0)
    original, inputs = make()
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    expected = run(original.eval(), inputs)
    model = copy.deepcopy(original)
    report = fused_norm.convert(model, memory_efficient=memory_efficient)
    results = {}
    counted = calls(lambda: results.update(run(model, inputs)), "norm_forward")
    assert counted == len(report) == norms, report
    assert {origin for _, origin, reason in report.skipped if reason} >= left
    assert relative_error(results, expected) < 2e-6
    assert list(model.state_dict()) == list(original.state_dict())
    assert fused_norm.revert(model) == norms
    assert [type(m) for m in model.modules()] == [type(m) for m in original.modules()]
    assert relative_error(run(model, inputs), expected) == 0
