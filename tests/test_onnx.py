"""torch.onnx.export writes every module in ONNX's own operators, and onnxruntime computes the
same."""

import io
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fused_norm
import fused_norm.functional as fn
from fused_norm import _convert, apex

if "CI" not in os.environ:  # where they are installed
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name)

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


class AddNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.rand(16)) for _ in range(2))

    def forward(self, x):
        y, total = fn.add_layer_norm(x, 2 * x, 16, self.weight, self.bias)
        z, total = fn.add_rms_norm(y, total, 16, self.weight, memory_efficient=True)
        return z + total


class Masked(nn.Module):
    def forward(self, x):
        additive = fn.scaled_masked_softmax(x, x.sin(), 0.5)
        return fn.scaled_masked_softmax(x, x > 1, causal=True) + additive


class Attention(nn.Module):
    def forward(self, x):
        q, k = x[None], x[None, :1]
        causal = fn.scaled_dot_product_attention(q, q, q, is_causal=True)
        masked = fn.scaled_dot_product_attention(q, k, k, x[:, :, 4:8] > 0.9)
        options = {"causal": True, "window": (1, None), "softcap": 3.0, "sink": x[:, 0, 0]}
        return causal + masked + fn.flash_attention(q, k, k, attn_mask=x[:, :, :4], **options)


def converted():
    module = nn.Sequential(nn.LayerNorm(16), nn.RMSNorm(16))
    fused_norm.convert(module, memory_efficient=True)
    return module


MODULES = {
    "LayerNorm": lambda: fused_norm.LayerNorm(16),
    "LayerNorm, options": lambda: fused_norm.LayerNorm(
        (4, 16), eps=1e-3, bias=False, memory_efficient=True, weight_offset=1.0
    ),
    "LayerNorm, no weight": lambda: fused_norm.LayerNorm(16, elementwise_affine=False),
    "RMSNorm": lambda: fused_norm.RMSNorm(16),
    "RMSNorm, options": lambda: fused_norm.RMSNorm(16, memory_efficient=True, weight_offset=1.0),
    "Softmax": lambda: fused_norm.Softmax(-1),
    "Softmax, dim": lambda: fused_norm.Softmax(0),
    "LogSoftmax": lambda: fused_norm.LogSoftmax(1),
    "converted": converted,
    "ConvertedRMSNorm": lambda: _convert.ConvertedRMSNorm(16, eps=1e-6),
    "add": AddNorm,
    "scaled_masked_softmax": Masked,
    "attention": Attention,
    "FusedLayerNorm": lambda: apex.FusedLayerNorm(16),
    "FusedRMSNorm": lambda: apex.FusedRMSNorm(16, elementwise_affine=False),
    "MixedFusedLayerNorm": lambda: apex.MixedFusedLayerNorm(16),
    "MixedFusedRMSNorm": lambda: apex.MixedFusedRMSNorm(16, memory_efficient=True),
}


def exported(module, x, dynamo, **options):
    file = io.BytesIO()
    if dynamo:
        torch.onnx.export(module, (x,), dynamo=True, verbose=False, **options).save(file)
    else:
        torch.onnx.export(module, (x,), file, dynamo=False, **options)
    return file.getvalue()


def run(model, x):
    import onnxruntime

    session = onnxruntime.InferenceSession(model)
    (output,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    return torch.from_numpy(output)


@pytest.mark.parametrize("dynamo", [True, False], ids=["", "TorchScript"])
@pytest.mark.parametrize("name", MODULES)
def test_runs_in_onnxruntime(name, dynamo, generator):
    import onnx

    module = MODULES[name]()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    x = torch.randn(3, 4, 16, generator=generator)
    model = exported(module, x, dynamo)
    graph = onnx.load_from_string(model).graph
    assert {node.domain for node in graph.node} == {""}  # ONNX's own
    if "orm" in name:
        assert any(n.op_type in ("ReduceMean", "LayerNormalization") for n in graph.node)
    # fp32 numbers below 8 and a few roundings of each.
    torch.testing.assert_close(run(model, x), module(x).detach(), rtol=1e-5, atol=4e-6)


@pytest.mark.parametrize("cls", [fused_norm.LayerNorm, fused_norm.RMSNorm, fused_norm.Softmax])
def test_dynamic_batch(cls, generator):
    module = cls(-1) if cls is fused_norm.Softmax else cls(16)
    batch = ({0: torch.export.Dim("batch")},)
    model = exported(module, torch.randn(3, 16), True, dynamic_shapes=batch)
    x = torch.randn(7, 16, generator=generator)
    torch.testing.assert_close(run(model, x), module(x).detach(), rtol=1e-5, atol=4e-6)


def test_statistics_of_16_bit_input_are_fp32(generator):
    """Numbers whose squares fp16 does not hold."""
    x = (300 * torch.randn(4, 64, generator=generator)).half()
    module = fused_norm.RMSNorm(64, dtype=torch.float16)
    output = run(exported(module, x, True), x)
    torch.testing.assert_close(output.float(), F.rms_norm(x.float(), (64,)), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dynamo", [True, False], ids=["", "TorchScript"])
def test_attention_under_autocast(dynamo):
    """Through TorchScript its products stay in fp32; torch's other exporter rounds them."""
    import onnx

    with torch.autocast("cpu", torch.bfloat16):
        model = exported(Attention(), torch.randn(3, 4, 16), dynamo)
    products = [
        node for node in onnx.load_from_string(model).graph.node if node.op_type == "MatMul"
    ]
    assert products
    if not dynamo:
        casts = [node for node in onnx.load_from_string(model).graph.node if node.op_type == "Cast"]
        to = {name: cast.attribute[0].i for cast in casts for name in cast.output}
        kinds = {to.get(name, onnx.TensorProto.FLOAT) for node in products for name in node.input}
        assert kinds == {onnx.TensorProto.FLOAT}


def test_other_exports_keep_the_operators():
    program = torch.export.export(fused_norm.LayerNorm(16), (torch.randn(3, 16),))
    assert any("fused_norm.norm_forward" in str(node.target) for node in program.graph.nodes)


def test_a_program_exported_before_is_refused():
    """It holds this library's operators."""
    x = torch.randn(3, 16)
    program = torch.export.export(fused_norm.LayerNorm(16), (x,))
    with pytest.raises(torch.onnx.OnnxExporterError, match="fused_norm"):
        torch.onnx.export(program, (x,), dynamo=True, verbose=False)
