"""fused_norm.apex.install() for packages that look for apex when they are imported: each in a
process of its own."""

import subprocess
import sys

import pytest

COMMON = """
import torch
import fused_norm
fused_norm.apex.install()

def count(function, name):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    counts = {event.key: event.count for event in profile.key_averages()}
    return counts.get(f"fused_norm::{name}", 0)
"""
TIMM = """
import timm.layers
timm.layers.set_fast_norm(True)
torch.manual_seed(0)
x = torch.randn(4, 32)
for norm, function in (
    (timm.layers.LayerNorm(32), torch.nn.functional.layer_norm),
    (timm.layers.RmsNorm(32), torch.nn.functional.rms_norm),
):
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(32))
    assert count(lambda: norm(x), "norm_forward") == 1
    torch.testing.assert_close(norm(x), function(x, (32,), *norm.parameters(), eps=norm.eps))
"""
MEGATRON = """
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import TransformerConfig
assert gpt_layer_specs.LNImpl is FusedLayerNorm
config = TransformerConfig(
    num_layers=1, hidden_size=32, num_attention_heads=4, layernorm_zero_centered_gamma=True,
    memory_efficient_layer_norm=True, persist_layer_norm=False, use_cpu_initialization=True,
)
norm = FusedLayerNorm(config, 32)
x = torch.randn(4, 32)
assert count(lambda: norm(x), "norm_forward") == 1
torch.testing.assert_close(norm(x), torch.nn.functional.layer_norm(x, (32,)))
"""
TRAINER = """
import transformers
transformers.Trainer, transformers.TrainingArguments
"""


@pytest.mark.parametrize(
    "code",
    [
        TIMM,
        pytest.param(
            MEGATRON,
            marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="needs megatron-core"),
        ),
        TRAINER,
    ],
    ids=["timm", "megatron", "trainer"],
)
def test_install(code):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMMON + code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
