"""fused_norm.memory_report: what each norm saves, and which columns are at risk."""

import gc
import weakref

import pytest
import torch
from torch import nn

import fused_norm as fn

ROWS, COLS = 20, 64


def chain(device, **flags):
    """norm, linear, norm, linear, norm: the last output is kept by nobody else."""
    return nn.Sequential(
        fn.LayerNorm(COLS, **flags),
        nn.Linear(COLS, COLS),
        fn.RMSNorm(COLS, **flags),
        nn.Linear(COLS, COLS),
        fn.RMSNorm(COLS, **flags),
    ).to(device)


@pytest.mark.parametrize("flag", [False, True], ids=["", "memory_efficient"])
def test_bytes(flag, device, generator):
    model = chain(device, memory_efficient=flag)
    x = torch.randn(ROWS, COLS, generator=generator, device=device)
    report = fn.memory_report(model, x)
    activation, row = ROWS * COLS * 4, ROWS * 4
    # The first norm's input is the caller's; the last norm keeps its output alone.
    off = [2 * row, activation + row, activation + row]
    on = [row, row, activation + row]
    assert [norm.name for norm in report] == ["0", "2", "4"]
    assert [norm.efficient_bytes for norm in report] == on
    assert [norm.saved_bytes for norm in report] == (on if flag else off)
    assert all(norm.memory_efficient == flag for norm in report)
    assert report.saved_bytes == sum(on if flag else off)
    assert report.efficient_bytes == sum(on) and len(report) == 3
    assert all(m.memory_efficient == flag for m in model if not isinstance(m, nn.Linear))
    for word in ("0", f"{activation + row:,}", "on" if flag else "off"):
        assert word in str(report)


def test_columns_at_risk(device, generator):
    model = chain(device)
    with torch.no_grad():
        model[0].weight[:3] = 0
        model[0].weight[3:5] = 1e-6  # |b / g| is 1.5 times the limit of 2^18, and 2^10
        model[0].bias[3] = 1e-6 * 2**18 * 1.5
        model[0].bias[4] = 1e-6 * 2**10
        model[2].weight[7] = torch.finfo(torch.float32).smallest_normal * 1.5
    report = fn.memory_report(model, torch.randn(ROWS, COLS, generator=generator, device=device))
    assert [norm.lost_columns for norm in report] == [4, 0, 0]
    assert [norm.columns_at_risk for norm in report] == [4, 1, 0]
    assert report.at_risk == ("0", "2")
    room = 8  # some to spare
    assert report.norms[0].efficient_bytes == ROWS * 4 + ROWS * room * 4 + (1 + room) * 4


def test_leaves_the_model_as_it_was(device, generator):
    model = nn.Sequential(
        fn.LayerNorm(COLS), nn.BatchNorm1d(COLS), nn.Dropout(), nn.Linear(COLS, 3)
    ).to(device)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    report = fn.memory_report(model, torch.randn(ROWS, COLS, generator=generator, device=device))
    assert len(report) == 1
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_puts_back_buffers_that_forward_replaces(device):
    class Cache(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = fn.LayerNorm(COLS)
            self.register_buffer("seen", torch.zeros(0, COLS))

        def forward(self, x):
            self.seen = torch.cat([self.seen, x])
            return self.norm(self.seen)

    model = Cache().to(device)
    seen = model.seen
    report = fn.memory_report(model, torch.ones(ROWS, COLS, device=device))
    assert len(report) == 1 and model.seen is seen and seen.shape == (0, COLS)


@pytest.mark.parametrize("flag", [False, True], ids=["", "memory_efficient"])
def test_frees_what_it_ran(flag, device, generator):
    """Nodes that keep their own output are no cycle with what the report looked at."""
    model = nn.Sequential(nn.Linear(COLS, COLS), nn.Tanh(), chain(device, memory_efficient=flag))
    parameters = [weakref.ref(parameter) for parameter in model.to(device).parameters()]
    fn.memory_report(model, torch.randn(ROWS, COLS, generator=generator, device=device))
    del model
    gc.collect()
    assert not any(parameter() is not None for parameter in parameters)


def test_keyword_arguments_and_a_model_without_norms(device):
    class Model(nn.Linear):
        def forward(self, input, scale):
            return super().forward(input) * scale

    model = Model(4, 4).to(device)
    report = fn.memory_report(model, torch.ones(2, 4, device=device), scale=2)
    assert len(report) == 0 and report.saved_bytes == 0 and report.at_risk == ()


@pytest.mark.parametrize("compiles", [torch.compile, nn.Module.compile], ids=["", "in place"])
def test_compiled_models(compiles, device, generator):
    """Their norms are called from compiled code, which runs no hooks and saves for all at once."""
    model = chain(device)
    x = torch.randn(ROWS, COLS, generator=generator, device=device)
    expected = fn.memory_report(model, x)
    compiled = compiles(model, backend="aot_eager") or model
    compiled(x)
    report = fn.memory_report(compiled, x)
    assert [(n.saved_bytes, n.efficient_bytes) for n in report] == [
        (n.saved_bytes, n.efficient_bytes) for n in expected
    ]


def test_a_model_without_norms_of_this_library():
    report = fn.memory_report(torch.nn.LayerNorm(4), torch.ones(2, 4))
    assert len(report) == 0 and "no norm of this library was called" in str(report)


def test_what_stands_around_a_norm(device):
    """Lazy layers behind it, a hook that puts its output into a tuple, nested rows."""
    norm = fn.LayerNorm(COLS, device=device)
    lazy = nn.Sequential(norm, nn.LazyLinear(4, device=device), nn.LazyBatchNorm1d(device=device))
    x = torch.ones(ROWS, COLS, device=device)
    assert len(fn.memory_report(lazy, x)) == 1
    handle = norm.register_forward_hook(lambda module, inputs, output: (output, None))
    assert len(fn.memory_report(norm, x)) == 1
    handle.remove()
    nested = torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged)
    (call,), (dense,) = (fn.memory_report(norm, rows) for rows in (nested, nested.values()))
    assert call == dense and call.saved_bytes == 2 * 4 * (ROWS + 2)  # mean and rstd


def test_a_norm_that_raises(device):
    """The model takes another."""

    class Tries(nn.Module):
        def __init__(self):
            super().__init__()
            self.small, self.fits = (
                fn.LayerNorm(16, device=device),
                fn.LayerNorm(COLS, device=device),
            )

        def forward(self, x):
            try:
                x = self.small(x)
            except RuntimeError:
                x = self.fits(x)
            return x

    report = fn.memory_report(Tries(), torch.ones(ROWS, COLS, device=device))
    assert [norm.name for norm in report] == ["fits"]


def test_sparse_tensors_of_other_layers(device):
    class Graph(nn.Sequential):
        def forward(self, x):
            edges = torch.eye(ROWS, device=device).to_sparse()
            return torch.sparse.mm(edges, super().forward(x))

    model = Graph(fn.LayerNorm(COLS), nn.Linear(COLS, COLS, bias=False)).to(device)
    x = torch.ones(ROWS, COLS, device=device)
    expected = fn.memory_report(nn.Sequential(*model), x)
    assert fn.memory_report(model, x) == expected


def test_a_part_that_is_traced_by_torchscript(device):
    x = torch.ones(ROWS, COLS, device=device)
    linear = torch.jit.trace(nn.Linear(COLS, COLS, device=device), x)
    report = fn.memory_report(nn.Sequential(fn.LayerNorm(COLS, device=device), linear), x)
    assert [norm.name for norm in report] == ["0"]


def test_inference_mode(device):
    model, x = chain(device), torch.ones(ROWS, COLS, device=device)
    expected = fn.memory_report(model, x)
    with torch.inference_mode():
        assert fn.memory_report(model, x) == expected


def test_bad_models():
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, but is function"):
        fn.memory_report(lambda x: x, torch.ones(2, 4))
    model = chain("meta")
    with pytest.raises(RuntimeError, match="0 is fake or on the meta device"):
        fn.memory_report(model, torch.ones(2, COLS, device="meta"))
    with torch._subclasses.FakeTensorMode():
        with pytest.raises(RuntimeError, match="0 is fake or on the meta device"):
            model = torch.nn.Sequential(fn.LayerNorm(COLS))
            fn.memory_report(model, torch.ones(2, COLS))
