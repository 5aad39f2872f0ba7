"""torch.compile, torch.export and AOTInductor: the same operators, the same bits."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import each_flag, each_kind, held_for_backward, module_of, randn, same_bits
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

import fused_norm
import fused_norm.functional as fn
from fused_norm import _convert

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def functional_of(kind, memory_efficient):
    if kind == "layer":
        return lambda x, w: fn.layer_norm(x, (16,), w, w, memory_efficient=memory_efficient)
    return lambda x, w: fn.rms_norm(x, 16, w, memory_efficient=memory_efficient, weight_offset=0.5)


def step(call, x, dy, leaves):
    """[output, gradients of x and leaves] of one training step."""
    x = x.clone().requires_grad_()
    y = call(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *leaves], dy.to(y.dtype))]


def agree(eager, traced):
    assert all(same_bits(a, b) for a, b in zip(eager, traced, strict=True))


@each_flag
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@each_kind
def test_one_dynamic_graph_with_the_bits_of_eager(kind, dtype, memory_efficient, device, generator):
    """The second batch size makes the graph dynamic; no later one is compiled again."""
    module = module_of(kind, 16, device=device, dtype=dtype, memory_efficient=memory_efficient)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * randn(generator, 16).to(dtype))
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    for rows in (6, 9, 2, 31, 64):
        x, dy = randn(generator, rows, 16, dtype=dtype), randn(generator, rows, 16, dtype=dtype)
        eager, traced = (step(f, x, dy, module.parameters()) for f in (module, compiled))
        agree(eager, traced)
    assert counter.frame_count == 2


@each_flag
@each_kind
def test_functional_form_is_one_graph(kind, memory_efficient, device, generator):
    call = functional_of(kind, memory_efficient)
    weight = (1 + 0.1 * randn(generator, 16)).requires_grad_()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, backend=counter, fullgraph=True)
    for rows in (6, 9, 2):
        x, dy = randn(generator, rows, 3, 16), randn(generator, rows, 3, 16)
        eager, traced = (
            step(lambda x, f=f: f(x, weight), x, dy, [weight]) for f in (call, compiled)
        )
        agree(eager, traced)
    assert counter.frame_count == 2


def test_functions_that_are_compiled_themselves(device, generator):
    """They share no code, which Dynamo would compile a few times only."""
    x, weight = randn(generator, 2, 3, 16), randn(generator, 16)
    calls = [(fn.layer_norm, x, (16,), weight), (fn.rms_norm, x, (16,), weight)]
    calls += [(fn.add_rms_norm, x, x, (16,), weight), (fn.scaled_masked_softmax, x)]
    with torch._dynamo.config.patch(recompile_limit=1):
        for function, *args in calls:
            torch.compile(function, backend="eager", fullgraph=True)(*args)


def graphs_of(module, x):
    """Operators of the forward and of the backward graph of a compiled training step."""
    seen = []

    def keep(graph, _):
        seen.append([str(n.target) for n in graph.graph.nodes if n.op == "call_function"])
        return graph

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    compiled(x).float().sum().backward()
    return seen


@each_flag
@each_kind
def test_graphs_hold_the_librarys_operators(kind, memory_efficient, device, generator):
    module = module_of(kind, 16, device=device, memory_efficient=memory_efficient)
    forward, backward = graphs_of(module, randn(generator, 4, 16))
    assert sum("fused_norm.norm_forward" in name for name in forward) == 1
    assert sum("fused_norm.norm_backward" in name for name in backward) == 1
    assert not any("native_layer_norm" in name or "rsqrt" in name for name in forward + backward)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@each_kind
def test_compiled_code_keeps_the_output_alone(kind, backend, device, generator):
    """Partitioned into forward and backward, it keeps one tensor for a norm and the linear layer
    after it, and without the flag two."""
    rows, cols = 64, 512
    kept = []
    for memory_efficient in (False, True):
        layers = []
        for _ in range(3):
            norm = module_of(kind, cols, memory_efficient=memory_efficient)
            layers += [norm, nn.Linear(cols, cols)]
        model = nn.Sequential(*layers).to(device)
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        x = randn(generator, rows, cols).requires_grad_()
        y, held = held_for_backward(lambda f=compiled, x=x: f(x), *model.parameters())
        kept.append(held // x.nbytes)  # statistics and lists are less than one
        y.sum().backward()
    assert kept == [6, 3]


@each_kind
def test_the_kernel_converts_its_output(kind, device, generator):
    """Under autocast too the norm is one operator, not one and a conversion."""
    module = module_of(kind, 16, device=device, memory_efficient=True)
    with torch.autocast(device, BF16):
        forward, _ = graphs_of(module, randn(generator, 4, 16))
    assert not any("copy" in name or "convert" in name for name in forward), forward


@each_flag
@each_kind
def test_decompose_lowers_to_torchs_operators(kind, memory_efficient, device, generator):
    module = module_of(kind, 16, device=device, memory_efficient=memory_efficient)
    x, dy = randn(generator, 4, 16), randn(generator, 4, 16)
    with fused_norm.config.patch(decompose=True):
        forward, backward = graphs_of(module, x)
        assert not any("fused_norm" in name for name in forward + backward)
        assert any("rsqrt" in name for name in forward)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True)
    with fused_norm.config.patch(decompose=True):
        traced = step(compiled, x, dy, module.parameters())
        eager = step(module, x, dy, module.parameters())
    for a, b in zip(traced, eager, strict=True):  # a few roundings of the largest value
        torch.testing.assert_close(a, b, rtol=0, atol=16 * 2**-24 * b.abs().max().item())
    # Without the switch the same compiled module is the operator again.
    assert not fused_norm.config.decompose
    assert same_bits(step(compiled, x, dy, module.parameters())[0], eager[0])


@pytest.mark.parametrize("autocast_dtype", [None, BF16, FP16], ids=str)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16, FP64], ids=str)
@each_kind
def test_decompose_keeps_dtypes(kind, dtype, autocast_dtype, device, generator):
    options = {"device": device, "dtype": FP64 if dtype == FP64 else FP32}
    module = module_of(kind, 16, **options)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    x = randn(generator, 4, 16, dtype=dtype).requires_grad_()
    with (
        fused_norm.config.patch(decompose=True),
        torch.autocast(device, autocast_dtype or BF16, enabled=autocast_dtype is not None),
    ):
        expected, y = module(x), compiled(x)
    assert y.dtype == expected.dtype
    y.sum().backward()
    assert x.grad.dtype == dtype and module.weight.grad.dtype == options["dtype"]


def test_decompose_checks_what_the_operator_checks(device, generator):
    x = randn(generator, 4, 16)
    for shape, weight in (
        ((16,), randn(generator, 1)),
        ((16,), randn(generator, 16, dtype=FP64)),
        ((4, 4), None),
        ((), None),
    ):

        def call(x, weight, shape=shape):
            return fn.layer_norm(x, shape, weight)

        match = "normalized_shape" if weight is None else "weight"
        with pytest.raises(Exception, match=match) as eager:
            call(x, weight)
        torch._dynamo.reset()
        with fused_norm.config.patch(decompose=True), pytest.raises(Exception, match=match) as e:
            torch.compile(call, backend="aot_eager")(x, weight)
        assert str(eager.value).split(",")[0].split("\n")[0] in str(e.value)


@pytest.mark.parametrize("of_a_sum", [False, True], ids=["", "add"])
def test_decompose_takes_options_that_change(of_a_sum, device, generator):
    """Dynamo makes a symbol of a float once it has seen two values."""

    def call(x, eps):
        if of_a_sum:
            return fn.add_rms_norm(x, x, 16, x[0], eps, weight_offset=eps)[0]
        return fn.layer_norm(x, 16, None, None, eps)

    torch._dynamo.reset()
    x = randn(generator, 4, 16)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    with fused_norm.config.patch(decompose=True):
        for eps in (1e-5, 1e-2, 1.0):
            torch.testing.assert_close(compiled(x, eps), call(x, eps))


@pytest.mark.parametrize("decompose", [False, True], ids=["", "decompose"])
@pytest.mark.parametrize("dynamic", [None, True], ids=["", "dynamic"])
@pytest.mark.parametrize(
    "call",
    [
        lambda x, w: fn.add_layer_norm(x, x.sin(), 16, w)[0],
        lambda x, w: fn.rms_norm(x, 16),
        lambda x, w: fn.rms_norm_gated(x, x, 16, w, group_size=4),
        lambda x, w: fn.softmax(x, 0),
        lambda x, w: fn.scaled_masked_softmax(x, x > 1, causal=True),
        lambda x, w: fn.scaled_dot_product_attention(x[None], x[None], w.expand(x.shape)[None]),
    ],
    ids=["norm of a sum", "norm", "gated norm", "softmax", "masked softmax", "attention"],
)
def test_vmap(call, dynamic, decompose, device, generator):
    """Within compiled code, and its derivative."""
    x, w = randn(generator, 3, 5, 16), randn(generator, 3, 16)

    def gradients(x, w):
        return torch.func.grad(lambda x: torch.vmap(call)(x, w).sin().sum())(x)

    for function in (torch.vmap(call), gradients):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        with fused_norm.config.patch(decompose=decompose):
            torch.testing.assert_close(compiled(x, w), function(x, w))


@pytest.mark.parametrize("mask_columns", [16, 1])
def test_mask_of_a_size_that_depends_on_data(mask_columns, device, generator):
    def call(x):
        chosen = x[x[:, 0] > 0]
        return fn.scaled_masked_softmax(chosen, chosen[:, :mask_columns] > 0.5)

    torch._dynamo.reset()
    x = randn(generator, 32, 16)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), call(x))


@each_flag
@pytest.mark.parametrize("autocast_dtype", [BF16, FP16], ids=str)
@each_kind
def test_autocast(kind, autocast_dtype, memory_efficient, device, generator):
    """Dtypes and bits of eager, with autocast around the compiled module and within it."""
    module = module_of(kind, 16, device=device, memory_efficient=memory_efficient)

    def inside(x):
        with torch.autocast(device, autocast_dtype):
            return module(x)

    def around(x):
        with torch.autocast(device, autocast_dtype):
            return compiled(x)

    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    compiled_inside = torch.compile(inside, backend="aot_eager", fullgraph=True)
    for dtype in (FP32, BF16, FP16):
        x, dy = randn(generator, 4, 16, dtype=dtype), randn(generator, 4, 16)
        eager = step(inside, x, dy, module.parameters())
        for call in (around, compiled_inside):
            traced = step(call, x, dy, module.parameters())
            assert [t.dtype for t in eager] == [t.dtype for t in traced]
            agree(eager, traced)


@each_flag
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@each_kind
def test_grad_scaler(kind, compiles, memory_efficient, device, generator):
    """fp16 autocast with loss scaling: it trains, and a step with overflow is skipped."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), module_of(kind, 16, memory_efficient=memory_efficient), nn.Linear(16, 1)
    ).to(device)
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiles else model
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10)
    x, target = randn(generator, 32, 8), randn(generator, 32, 1)

    def train(factor=1.0):
        with torch.autocast(device, FP16):
            loss = (call(x).float() - target).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    losses = [train() for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0] and scaler.get_scale() == 2.0**10
    before = [p.detach().clone() for p in model.parameters()]
    train(1e30)
    assert scaler.get_scale() == 2.0**9
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


class AddNorm(nn.Module):
    def forward(self, x):
        output, residual = fn.add_rms_norm(x, x.sin(), x.shape[-1:], eps=1e-5)
        return output + residual


def exported_model(device):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16),
        fused_norm.LayerNorm(16),
        fused_norm.RMSNorm(16, memory_efficient=True, weight_offset=1.0),
        nn.Linear(16, 16),
        AddNorm(),
        fused_norm.apex.MixedFusedLayerNorm(16),
    ).to(device)


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_export(strict, device, generator, tmp_path):
    model = exported_model(device)
    batch = {0: torch.export.Dim("batch")}
    program = torch.export.export(
        model, (randn(generator, 3, 8),), dynamic_shapes=(batch,), strict=strict
    )
    op = torch.ops.fused_norm.norm_forward.default
    norms = [node.args for node in program.graph.nodes if node.target is op]
    adding = [args for args in norms if len(args) > 8 and args[8] is not None]
    assert len(norms) == 4 and len(adding) == 1
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for rows in (1, 7):
        x = randn(generator, rows, 8)
        assert same_bits(model(x).detach(), program.module()(x).detach())
        assert same_bits(model(x).detach(), loaded(x).detach())
    program.module()(x).sum().backward()  # an exported program trains


class Softmaxes(nn.Module):
    def forward(self, x):
        return fn.softmax(x, 0) + fn.log_softmax(x, -1) + fn.scaled_masked_softmax(x, causal=True)


def test_symbolic_trace(device, generator):
    """A norm or softmax is one node, as torch's are."""
    model = exported_model(device).append(fused_norm.Softmax(-1)).append(Softmaxes())
    converted = _convert.ConvertedRMSNorm(16, eps=1e-5, device=device, memory_efficient=True)
    converted.output_rule = "promote"
    model.append(converted)
    traced = torch.fx.symbolic_trace(model)
    names = [getattr(node.target, "__name__", "") for node in traced.graph.nodes]
    ours = [name for name in names if "norm" in name or "softmax" in name]
    assert sorted(ours) == sorted(
        ["layer_norm", "rms_norm", "add_rms_norm", "mixed_dtype_fused_layer_norm_affine"]
        + ["converted_norm", "softmax", "softmax", "log_softmax", "scaled_masked_softmax"]
    )
    x = randn(generator, 5, 8)
    assert same_bits(traced(x).detach(), model(x).detach())


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@each_kind
def test_export_under_autocast(kind, dtype, device, generator):
    for options in ({}, {"memory_efficient": True}):
        module = module_of(kind, 16, device=device, **options)
        for x in (randn(generator, 3, 16), randn(generator, 3, 16, dtype=dtype)):
            with torch.autocast(device, dtype):
                program = torch.export.export(module, (x,))
                assert same_bits(module(x).detach(), program.module()(x).detach())


class WithSoftmaxesToFp32(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        rounded = x.to(BF16)
        y = fn.softmax(rounded, -1, FP32) + fn.log_softmax(rounded, 0, dtype=FP32)
        return torch.cat([self.model(x), y], -1)


AOT_INDUCTOR = """
import sys, torch
sys.path[:0] = sys.argv[3:]
from test_compile import WithSoftmaxesToFp32, exported_model

device, folder = sys.argv[1:3]
is_control = folder.endswith("control")
model = torch.nn.Linear(8, 16).to(device)
if not is_control:
    model = WithSoftmaxesToFp32(exported_model(device)).eval()
batch = {0: torch.export.Dim("batch", max=64)}
program = torch.export.export(model, (torch.randn(3, 8, device=device),), dynamic_shapes=(batch,))
path = torch._inductor.aoti_compile_and_package(program, package_path=folder + ".pt2")
compiled = torch._inductor.aoti_load_package(path)
for rows in (1, 7, 33):
    x = torch.randn(rows, 8, device=device).bfloat16().float()  # Inductor may not round
    torch.testing.assert_close(compiled(x), model(x).detach())
"""


def test_aot_inductor(device, tmp_path):
    """Packaged, loaded and run in a process of its own."""

    def run(name):
        paths = [str(Path(__file__).parent), str(Path(fused_norm.__file__).parents[1])]
        command = [sys.executable, "-c", AOT_INDUCTOR, device, str(tmp_path / name), *paths]
        return subprocess.run(command, capture_output=True, text=True)

    done = run("model")
    if done.returncode != 0 and run("control").returncode != 0:
        pytest.skip("AOTInductor does not run a linear layer alone here")
    assert done.returncode == 0, done.stderr[-4000:]


def test_columns_that_change(device, generator):
    """The room for listed columns is not that of the first call."""
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def norm(x, weight):
        return fn.rms_norm(x, weight.shape, weight, memory_efficient=True)

    for cols in (64, 32, 24, 8, 3):
        x = randn(generator, 5, cols, dtype=FP64).requires_grad_()
        weight = randn(generator, cols, dtype=FP64).requires_grad_()
        ours, wanted = norm(x, weight), nn.functional.rms_norm(x, (cols,), weight)
        torch.testing.assert_close(ours, wanted)
        grads = (torch.autograd.grad(y.sin().sum(), (x, weight)) for y in (ours, wanted))
        torch.testing.assert_close(*grads)


@pytest.mark.cuda
@each_flag
@each_kind
def test_reduce_overhead(kind, memory_efficient, seed):
    """mode="reduce-overhead" replays CUDA graphs: the steps of eager, on changing inputs."""
    generator = torch.Generator("cuda").manual_seed(seed)
    torch.manual_seed(0)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(
            nn.Sequential(
                module_of(kind, 256, memory_efficient=memory_efficient),
                nn.Linear(256, 256),
                module_of(kind, 256, memory_efficient=memory_efficient),
            ).cuda()
        )
    eager, traced = models
    compiled = torch.compile(traced, mode="reduce-overhead", fullgraph=True)
    optimizers = [torch.optim.SGD(m.parameters(), 0.01) for m in models]
    for _ in range(8):
        x, dy = randn(generator, 64, 256), randn(generator, 64, 256)
        outputs = []
        for call, optimizer in zip((eager, compiled), optimizers, strict=True):
            torch.compiler.cudagraph_mark_step_begin()
            optimizer.zero_grad()
            y = call(x)
            y.backward(dy)
            outputs.append(y.detach().clone())
            optimizer.step()
        # The matrix products may run in another order; steps add up what they round.
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)
    for a, b in zip(eager.parameters(), traced.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, r, w: fn.layer_norm(x, (16,), w, w, memory_efficient=True),
        lambda x, r, w: sum(fn.add_rms_norm(x, r, 16, w)),
        lambda x, r, w: fn.rms_norm_gated(x, r, 16, w),
        lambda x, r, w: fn.log_softmax(x * w, -1),
        lambda x, r, w: fn.scaled_dot_product_attention(x, r, x * w),
    ],
    ids=["norm", "add and norm", "gated", "softmax", "attention"],
)
def test_compiled_autograd(call, device, generator):
    """The compiler traces the backward pass of eager calls."""
    x, r, w = (randn(generator, *shape) for shape in [(1, 2, 6, 16), (1, 2, 6, 16), (16,)])
    w[:2] = 0
    gradients = []
    for traced in (False, True):
        leaves = [t.clone().requires_grad_() for t in (x, r, w)]
        loss = call(*leaves).sin().sum()
        if traced:
            with torch._dynamo.config.patch(compiled_autograd=True):
                torch.compile(lambda: loss.backward(), backend="aot_eager")()  # noqa: B023
        else:
            loss.backward()
        gradients.append([leaf.grad for leaf in leaves if leaf.grad is not None])
    torch.testing.assert_close(*gradients)


def test_compiled_optimizer_step(device, generator, recwarn):
    """As without this library, which is told of optimizers' steps: the compiler has no complaint,
    and steps are those of eager code."""
    torch._dynamo.utils.warn_once_cache.clear()
    x = randn(generator, 6, 16)
    weights = []
    for compiles in (False, True):
        module = fused_norm.LayerNorm(16, device=device, memory_efficient=True)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        step = torch.compile(optimizer.step, backend="eager") if compiles else optimizer.step
        for _ in range(3):
            module(x).sin().sum().backward()
            step()
        weights.append(module.weight.detach())
    torch.testing.assert_close(*weights)
    assert not [w for w in recwarn.list if "optimizer_step" in str(w.message)]


@pytest.mark.cuda
@each_flag
@each_kind
def test_captured_training_step(kind, memory_efficient, seed):
    """A whole training step in a CUDA graph, replayed on changing inputs, equals eager steps."""
    generator = torch.Generator("cuda").manual_seed(seed)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(
            nn.Sequential(
                module_of(kind, 256, memory_efficient=memory_efficient), nn.Linear(256, 256)
            ).cuda()
        )
    eager, captured = models
    static_x, static_dy = torch.zeros(64, 256, device="cuda"), torch.zeros(64, 256, device="cuda")
    optimizer = torch.optim.SGD(captured.parameters(), 0.01)

    def train():
        optimizer.zero_grad(set_to_none=False)
        captured(static_x).backward(static_dy)
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # zero inputs and gradients: the parameters stay
            train()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train()
    eager_optimizer = torch.optim.SGD(eager.parameters(), 0.01)
    for _ in range(4):
        x, dy = randn(generator, 64, 256), randn(generator, 64, 256)
        static_x.copy_(x)
        static_dy.copy_(dy)
        graph.replay()
        eager_optimizer.zero_grad()
        eager(x).backward(dy)
        eager_optimizer.step()
    for a, b in zip(eager.parameters(), captured.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
