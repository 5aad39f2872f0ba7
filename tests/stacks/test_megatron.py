"""fused_norm.integrations.megatron beside megatron-core: a tiny GPT of its local spec."""

import contextlib
import os

import pytest
import torch

os.environ["TORCH_COMPILE_DISABLE"] = "1"  # Megatron compiles small functions at import
from megatron.core import parallel_state
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import TransformerConfig
from stacks_harness import relative_error

import fused_norm
from fused_norm.integrations import megatron


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory):
    store = tmp_path_factory.mktemp("megatron") / "store"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """Megatron makes buffers and random states on the current GPU."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(CudaRNGStatesTracker, "fork", lambda self: contextlib.nullcontext())


@pytest.fixture
def patched():
    megatron.patch()
    yield
    megatron.unpatch()


def config_of(**options):
    usual = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "ffn_hidden_size": 48,
        "use_cpu_initialization": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
    }
    return TransformerConfig(**{**usual, **options})


def make(qk_layernorm=False, **options):
    config = config_of(qk_layernorm=qk_layernorm, **options)
    spec = gpt_layer_specs.get_gpt_layer_local_spec(
        qk_layernorm=qk_layernorm, normalization=config.normalization
    )
    torch.manual_seed(0)
    model = GPTModel(config, spec, vocab_size=64, max_sequence_length=16)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def run(model):
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(64, (2, 12), generator=generator)
    positions = torch.arange(12).expand(2, -1)
    mask = torch.ones(12, 12, dtype=torch.bool).triu(1)[None, None]
    model.zero_grad()
    losses = model(tokens, positions, mask, labels=tokens)
    losses.mean().backward()
    results = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return results | {"losses": losses.detach()}


@pytest.mark.parametrize("memory_efficient", [False, True], ids=["", "memory_efficient"])
@pytest.mark.parametrize("qk_layernorm", [False, True], ids=["", "qk"])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_local_spec(normalization, qk_layernorm, memory_efficient, calls):
    options = {"normalization": normalization, "qk_layernorm": qk_layernorm}
    original = make(**options)
    expected = run(original)
    megatron.patch()
    try:
        model = make(**options, memory_efficient_layer_norm=memory_efficient)
    finally:
        megatron.unpatch()
    results = {}
    counted = calls(lambda: results.update(run(model)), "norm_forward")
    assert counted == (9 if qk_layernorm else 5)  # two a layer, of query and key, and the last
    assert relative_error(results, expected) < 2e-6
    assert list(model.state_dict()) == list(original.state_dict())
    norms = [m for m in model.modules() if isinstance(m, fused_norm.LayerNorm | fused_norm.RMSNorm)]
    assert {norm.memory_efficient for norm in norms} == {memory_efficient}
    assert relative_error(run(make(**options)), expected) == 0  # the patch is undone


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_zero_centred_gamma(normalization, patched):
    """Megatron's own torch norm refuses it; the model of the same weights, plus one, is there."""
    centred = make(normalization=normalization, layernorm_zero_centered_gamma=True)
    plain = make(normalization=normalization)
    norms = [n for n in plain.state_dict() if "layernorm" in n and n.endswith("weight")]
    assert len(norms) == 5
    with torch.no_grad():
        for name in norms:
            plain.get_parameter(name).copy_(centred.get_parameter(name) + 1)
    assert relative_error(run(centred), run(plain)) < 2e-6
    fresh = megatron.FusedNorm(config=centred.config, hidden_size=8, eps=1e-5)
    assert not fresh.weight.any()


def test_parameters_are_marked_for_sequence_parallelism():
    for normalization in ("LayerNorm", "RMSNorm"):
        for sequence_parallel in (False, True):
            config = config_of(
                normalization=normalization,
                sequence_parallel=sequence_parallel,
                tensor_model_parallel_size=2,
            )
            norm = megatron.FusedNorm(config=config, hidden_size=32, eps=1e-3)
            assert norm.eps == 1e-3
            assert [p.sequence_parallel for p in norm.parameters()] == [sequence_parallel] * len(
                list(norm.parameters())
            )


def test_other_normalizations_are_an_error():
    with pytest.raises(ValueError, match="L2Norm"):
        megatron.FusedNorm(config=config_of(normalization="L2Norm"), hidden_size=32)


def test_subclasses_are_their_own(patched):
    class Twice(megatron.FusedLayerNorm):
        def __init__(self, config, hidden_size, *args):
            torch.nn.Module.__init__(self)  # apex is not there
            self.norm = torch.nn.LayerNorm(hidden_size)

        def forward(self, x):
            return 2 * self.norm(x)

    twice = Twice(config_of(), 32)
    assert type(twice) is Twice
    x = torch.randn(4, 32)
    torch.testing.assert_close(twice(x), 2 * torch.nn.functional.layer_norm(x, (32,)))


@pytest.mark.parametrize("cls", ["FusedLayerNorm", "WrappedTorchNorm"])
def test_arguments_by_place(cls, patched):
    """As both of Megatron's norms take them."""
    norm = getattr(megatron, cls)(config_of(normalization="LayerNorm"), 32, 1e-3, False, False)
    assert type(norm) is fused_norm.LayerNorm and norm.eps == 1e-3
