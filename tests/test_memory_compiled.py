"""memory_efficient in compiled code, and when room does not suffice: gradients are those of eager
code whatever the weights, no parameter ever becomes NaN, and the error names every layer."""

import pytest
import torch
from harness import each_kind, module_of, randn
from torch.nn.utils import prune

from fused_norm import _tracing

FP32, FP64 = torch.float32, torch.float64
each_way = pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
NO_ROOM = "had no room for"
COLS = 296  # of no other test, as compiled norms of one length share what is known of their room
LEAST = 16  # room of a compiled call that knows of no column at risk


def make(kind, cols=COLS, memory_efficient=True, dtype=FP64, **options):
    return module_of(kind, cols, dtype=dtype, memory_efficient=memory_efficient, **options)


class Block(torch.nn.Module):
    def __init__(self, kind, memory_efficient, cols=COLS):
        super().__init__()
        self.norm = make(kind, cols, memory_efficient)
        self.linear = torch.nn.Linear(cols, cols, dtype=FP64)

    def forward(self, x):
        return x + self.linear(self.norm(x)).sin()


def model_of(kind, memory_efficient, device, cols=COLS):
    torch.manual_seed(0)
    blocks = [Block(kind, memory_efficient, cols) for _ in range(2)]
    return torch.nn.Sequential(*blocks).to(device)


def compiled(model):
    torch._dynamo.reset()
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def train(call, model, generator, steps, between=lambda step: None, x=None, lr=1e-2):
    """Parameters are finite after each step, whatever it raised; returns what was raised. Each step
    has an input of its own, or ``x``."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    errors, given = [], x
    for step in range(steps):
        between(step)
        if given is None:
            x = randn(generator, 12, model[0].norm.weight.numel(), dtype=FP64)
        optimizer.zero_grad()
        try:
            call(x).square().mean().backward()
            optimizer.step()
        except RuntimeError as error:
            errors.append(str(error))
        assert all(p.isfinite().all() for p in model.parameters()), f"step {step}"
    return errors


STARTS = {
    "all zero": lambda w: w.zero_(),
    "half zero": lambda w: w[::2].zero_(),
    "pruned": lambda w: w[w.numel() // 3 :].zero_(),
    "some zero": lambda w: w[3:11].zero_(),
    "small": lambda w: w.fill_(1e-2),
    "ones": lambda w: w.fill_(1),
}


@pytest.mark.parametrize("start", STARTS)
@each_kind
def test_training_equals_eager_training(kind, start, device, seed):
    results = []
    for flag, compiles in ((False, False), (True, True)):
        model = model_of(kind, flag, device)
        with torch.no_grad():
            for block in model:
                STARTS[start](block.norm.weight)
        call = compiled(model) if compiles else model
        assert train(call, model, torch.Generator(device).manual_seed(seed), 12) == []
        results.append([p.detach() for p in model.parameters()])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


@each_kind
def test_pruning_between_compiled_steps(kind, device, generator):
    """torch's own pruning computes the weight anew at each call."""
    model = model_of(kind, True, device)
    call = compiled(model)
    assert train(call, model, generator, 2) == []
    for block in model:
        prune.l1_unstructured(block.norm, "weight", amount=0.5)
    assert train(call, model, generator, 3) == []


CHANGES = {
    "under no_grad": lambda w: w.detach().zero_(),
    "one after the other": lambda w: [w.detach()[i : i + 1].zero_() for i in range(100)],
    "copied": lambda w: w.detach().copy_(torch.zeros_like(w)),
    "new data": lambda w: setattr(w, "data", torch.zeros_like(w)),
}


@pytest.mark.parametrize("change", CHANGES)
@each_way
@each_kind
def test_weights_zeroed_in_mid_training(kind, compiles, change, device, generator):
    """No parameter becomes NaN. Compiled code may say once that it lacked room; then it has it."""
    # A weight with new data is not known to have been traced: later norms have room for it.
    cols = COLS + (change == "new data") * (8 if kind == "layer" else 16)
    model = model_of(kind, True, device, cols)
    call = compiled(model) if compiles else model

    def between(step):
        if step == 6:
            with torch.no_grad():
                CHANGES[change](model[1].norm.weight)

    errors = train(call, model, generator, 12, between)
    assert len(errors) <= (1 if compiles else 0), errors
    for error in errors:
        assert "1.norm = " in error and NO_ROOM in error


@each_kind
def test_the_error_names_every_layer(kind, device, generator):
    model = model_of(kind, True, device)
    call = compiled(model)
    assert train(call, model, generator, 4) == []
    with torch.no_grad():
        for block in model:
            block.norm.weight[: LEAST + 5] = 0
            if kind == "layer":
                block.norm.bias[: LEAST + 5] = 1e300
    (error,) = train(call, model, generator, 1)
    assert f"1.norm = {model[1].norm} {NO_ROOM} 5 column(s)" in error
    if device == "cuda":  # on a CPU the first one stops the backward pass
        assert f"0.norm = {model[0].norm} {NO_ROOM} 5 column(s)" in error
    with torch.no_grad():
        for block in model:
            block.norm.weight.fill_(1)
    assert train(call, model, generator, 3) == []


@each_kind
def test_room_follows_the_weights(kind, device, generator):
    """Columns become zero a few at a time: the code is compiled anew before they are too many, but
    a few times only."""
    model = model_of(kind, True, device)
    for block in model:  # zeros stay zero
        block.norm.weight.register_hook(lambda grad: grad * 0)
    traces = []

    def backend(graph, inputs):
        traces.append(graph)
        return graph.forward

    torch._dynamo.reset()
    call = torch.compile(model, backend=backend, fullgraph=True)

    def between(step):
        with torch.no_grad():
            for block in model:
                block.norm.weight[: 3 * step] = 0

    assert train(call, model, generator, 60, between) == []
    assert 1 < len(traces) <= 6


@pytest.mark.parametrize("zeros", [LEAST - 2, 100])
@each_kind
def test_code_that_norms_share(kind, zeros, device, generator):
    """Blocks that are compiled one by one run in code for which the first was traced."""
    cols = 300 + zeros + (kind == "rms")  # of no other test: later norms have room for these
    model = torch.nn.Sequential(*[Block(kind, True, cols) for _ in range(3)]).to(device)
    with torch.no_grad():
        model[2].norm.weight[:zeros] = 0
    traces = []

    def backend(graph, inputs):
        traces.append(graph)
        return graph.forward

    torch._dynamo.reset()
    call = torch.nn.Sequential(*[torch.compile(block, backend=backend) for block in model])
    x = randn(generator, 12, cols, dtype=FP64).requires_grad_()
    errors = train(call, model, generator, 8, x=x, lr=0)  # which leaves the weights at zero
    assert len(errors) <= (zeros > LEAST) and 1 < len(traces) <= 3
    expected = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


@each_kind
def test_backward_on_a_cpu_raises_at_once(kind, generator):
    if generator.device.type != "cpu":
        pytest.skip("on a GPU the optimizer's step does")
    norm = make(kind)
    call = compiled(norm)
    x = randn(generator, 6, COLS, dtype=FP64).requires_grad_()
    call(x).sum().backward()
    with torch.no_grad():
        norm.weight[: LEAST + 1] = 0
    y = call(x)
    with pytest.raises(RuntimeError, match=rf"Norm\(.* {NO_ROOM} 1 column"):
        y.sum().backward()
    call(x).sum().backward()
    assert norm.weight.grad.isfinite().all()


@each_kind
def test_an_exported_program_has_the_same_room_always(kind, device, generator):
    """The error says what helps there."""
    cols = COLS + 24  # of no compiled norm, which would have more room afterwards
    norm = make(kind, cols).to(device)
    x = randn(generator, 6, cols, dtype=FP64)
    program = torch.export.export(norm, (x,)).module()
    with torch.no_grad():
        program.weight[:LEAST] = 0
    program(x).sum().backward()
    assert program.weight.grad.isfinite().all()
    with torch.no_grad():
        program.weight[: LEAST + 1] = 0
    optimizer = torch.optim.SGD(program.parameters(), lr=1e-2)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"{NO_ROOM} 1 column.*memory_efficient=False for"):
            program(x).sum().backward()
            optimizer.step()
        assert program.weight.isfinite().all()


@pytest.mark.cuda
@each_kind
def test_compiled_evaluation_raises(kind, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    norm = make(kind, device="cuda")
    call = compiled(norm)
    x = randn(generator, 6, COLS, dtype=FP64)
    call(x).sum().backward()
    with torch.no_grad():
        assert call(x).isfinite().all()
        norm.weight[: LEAST + 1] = 0
    call(x).sum().backward()
    with torch.no_grad(), pytest.raises(RuntimeError, match=NO_ROOM):
        torch.cuda.synchronize()
        call(x)
    with torch.no_grad():
        assert call(x).isfinite().all()


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda t: f(t).sin().sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](x)[0],
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,))[1],
    "jacrev": lambda f, x: torch.func.jacrev(lambda t: f(t).sum(0))(x),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda t: f(t).sin().sum()))(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@each_kind
def test_transforms_within_compiled_code(kind, transform, device, generator):
    norm, transforms = make(kind, device=device), TRANSFORMS[transform]
    x = randn(generator, 6, COLS, dtype=FP64)
    torch._dynamo.reset()
    call = torch.compile(lambda x: transforms(norm, x), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(call(x), transforms(norm, x))


@each_kind
def test_a_norm_without_parameters_saves_its_output(kind, device, generator):
    norm = make(kind, elementwise_affine=False, device=device)
    call = compiled(norm)
    x = randn(generator, 6, COLS, dtype=FP64).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = call(x)
    addresses = [t.untyped_storage().data_ptr() for t in saved]
    assert y.untyped_storage().data_ptr() in addresses
    assert x.untyped_storage().data_ptr() not in addresses
    (grad,) = torch.autograd.grad(y.sin().sum(), x)
    (expected,) = torch.autograd.grad(
        make(kind, memory_efficient=False, elementwise_affine=False)(x).sin().sum(), x
    )
    torch.testing.assert_close(grad, expected)


@each_kind
def test_nothing_is_compiled_anew_without_need(kind, device, generator):
    model = model_of(kind, True, device)
    call = compiled(model)
    assert train(call, model, generator, 2) == []
    generation = _tracing._generation
    assert train(call, model, generator, 20) == []
    other = make(kind, device=device)  # eager, with columns at risk all the time
    with torch.no_grad():
        other.weight[::40] = 0
    optimizer = torch.optim.SGD(other.parameters(), lr=1e-3)
    for _ in range(5):
        other(randn(generator, 6, COLS, dtype=FP64)).sin().sum().backward()
        optimizer.step()
    assert _tracing._generation == generation


@each_kind
@pytest.mark.parametrize("of_input", [False, True])
def test_a_list_is_made_only_for_a_gradient(kind, of_input, device, generator):
    norm = make(kind, device=device).requires_grad_(False)
    graphs = []
    torch._dynamo.reset()
    call = torch.compile(norm, backend=lambda graph, _: graphs.append(graph) or graph)
    x = randn(generator, 6, COLS, dtype=FP64).requires_grad_(of_input)
    torch.testing.assert_close(call(x), norm(x), rtol=0, atol=0)
    operator = torch.ops.fused_norm.norm_forward.default
    [node] = [node for node in graphs[0].graph.nodes if node.target is operator]
    assert (node.args[-1] is not None) == of_input
