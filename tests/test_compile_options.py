"""``torch.compile(model, options=fused_norm.compile_options())``: additions of a residual, and of
its gradient, become parts of the norms' operators, and the numbers stay."""

import collections
import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from harness import each_kind, held_for_backward, module_of, randn, same_bits
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import fused_norm
import fused_norm.functional as fn

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
COLS = 32
each_flag = pytest.mark.parametrize("flag", [False, True], ids=["", "memory_efficient"])


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def make_norm(kind, flag=False, **options):
    return module_of(kind, COLS, eps=1e-5, memory_efficient=flag, **options)


class Block(nn.Module):
    """Of a transformer: two residual branches, each behind a norm."""

    def __init__(self, kind, flag, **options):
        super().__init__()
        self.norms = nn.ModuleList(make_norm(kind, flag, **options) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(COLS, COLS, bias=False, **options) for _ in range(2))

    def forward(self, x):
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return x


class Stack(nn.Module):
    def __init__(self, kind, flag=False, blocks=2, **options):
        super().__init__()
        self.blocks = nn.Sequential(*(Block(kind, flag, **options) for _ in range(blocks)))
        self.norm = make_norm(kind, flag, **options)

    def forward(self, x):
        return self.norm(self.blocks(x))


def name_of(node):
    """The operator's, and of a norm also whether it adds and whether it lists columns."""
    name = getattr(node.target, "_overloadpacket", node.target)
    name = getattr(name, "__name__", str(name))
    if name != "norm_forward":
        return name
    residual, _, room = (*node.args[8:], None, None, None)[:3]
    return ("add_" if residual else "") + name + ("_listing" if room is not None else "")


class Graphs:
    """A backend: the compiler's graphs with the pass, run by torch's operators. It has Inductor's
    decompositions, but generates no code, which on a CPU takes long."""

    def __init__(self, **options):
        self.seen = []
        self.run = fused_norm.compile_options(**options).get("post_grad_custom_pre_pass")
        compiler = {"fw_compiler": self.compile, "bw_compiler": self.compile}
        self.backend = aot_autograd(**compiler, decompositions=select_decomp_table())

    def compile(self, module, inputs):
        if self.run:
            self.run(module.graph)
            module.graph.lint()
            module.recompile()
        calls = (node for node in module.graph.nodes if node.op == "call_function")
        self.seen.append(collections.Counter(map(name_of, calls)))

        def call(arguments):
            return module(*arguments)

        call._boxed_call = True
        return call

    def counts(self, *names):
        """For each graph, how often it has the operators."""
        return [tuple(graph[name] for name in names) for graph in self.seen]

    def __call__(self, module, inputs):
        return self.backend(module, inputs)


def compiled(call, **options):
    graphs = Graphs(**options)
    return torch.compile(call, backend=graphs, fullgraph=True), graphs


def step(call, inputs, parameters, dy):
    """Outputs and gradients; of several outputs each has a gradient of its own."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs = call(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    dys = [(number + 1) * dy.to(y.dtype) for number, y in enumerate(outputs)]
    gradients = torch.autograd.grad(outputs, [*leaves, *parameters], dys)
    return [y.detach() for y in outputs], list(gradients)


def agree(call, traced, inputs, parameters, dy, tolerance=1e-12):
    """The same bits forward; the sums of gradients are rounded once in place of twice."""
    parameters = list(parameters)
    outputs, gradients = step(call, inputs, parameters, dy)
    traced_outputs, traced_gradients = step(traced, inputs, parameters, dy)
    assert all(same_bits(a, b) for a, b in zip(outputs, traced_outputs, strict=True))
    for a, b in zip(gradients, traced_gradients, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * a.abs().max().item())


@each_flag
@each_kind
def test_a_stack_has_no_addition_left(kind, flag, device, generator):
    model = Stack(kind, flag, device=device, dtype=FP64)
    traced, graphs = compiled(model)
    for rows in (6, 9, 2, 31):  # the second batch size makes the graphs dynamic
        x, dy = (randn(generator, rows, 3, COLS, dtype=FP64) for _ in range(2))
        agree(model, traced, [x], model.parameters(), dy)
    plain, adding = ("norm_forward", "add_norm_forward")
    if flag:
        plain, adding = (f"{name}_listing" for name in (plain, adding))
    forward, backward = (1, 4, 0, 0), (0, 0, 5, 0)
    assert graphs.counts(plain, adding, "norm_backward", "add") == [forward, backward] * 2


@each_flag
@each_kind
def test_off(kind, flag, device, generator):
    model = Stack(kind, flag, device=device)
    traced, graphs = compiled(model, fuse_residuals=False)
    traced(randn(generator, 6, COLS)).sum().backward()
    assert graphs.counts("add") == [(4,), (3,)]  # the first norm's dx is not asked for
    assert fused_norm.compile_options(fuse_residuals=False) == {}


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@each_kind
def test_each_dtype(kind, dtype, device, generator):
    model = Stack(kind, device=device, dtype=dtype)
    traced, graphs = compiled(model)
    x, dy = (randn(generator, 6, COLS, dtype=dtype) for _ in range(2))
    # 4 sums, each rounded once more or once less, and what follows of that in the layers behind.
    agree(model, traced, [x], model.parameters(), dy, tolerance=16 * torch.finfo(dtype).eps)
    assert graphs.counts("add") == [(0,), (0,)]


@each_flag
@each_kind
def test_evaluation(kind, flag, device, generator):
    model = Stack(kind, flag, device=device)
    traced, graphs = compiled(model)
    x = randn(generator, 6, COLS)
    with torch.no_grad():
        assert same_bits(model(x), traced(x))
    assert graphs.counts("norm_forward", "add_norm_forward", "add") == [(1, 4, 0)]


@pytest.mark.parametrize("converts", ["promoted", "converted"])
@each_kind
def test_residual_in_fp32(kind, converts, device, generator):
    """Under autocast the branch is 16-bit, the sum fp32, and the output 16-bit with the flag."""
    norm = make_norm(kind, True, device=device)
    layer = nn.Linear(COLS, COLS, bias=False, device=device)

    def call(x, residual):
        with torch.autocast(device, BF16):
            branch = layer(x)
            total = residual + (branch.float() if converts == "converted" else branch)
            return norm(total), total

    traced, graphs = compiled(call)
    inputs = [randn(generator, 6, COLS) for _ in range(2)]
    parameters = [*norm.parameters(), layer.weight]
    agree(call, traced, inputs, parameters, randn(generator, 6, COLS), tolerance=2**-6)
    assert graphs.counts("add_norm_forward_listing", "add", "_to_copy")[0][:2] == (1, 0)
    assert graphs.counts("norm_backward", "add")[1] == (1, 0)


@each_kind
def test_lost_columns_keep_their_room(kind, device, generator):
    """Weights that are zero: what backward cannot recover is listed by the fused operator too."""
    model = Stack(kind, True, device=device, dtype=FP64)
    with torch.no_grad():
        for block in model.blocks:
            for norm in block.norms:
                norm.weight[::2] = 0
    plain = Stack(kind, False, device=device, dtype=FP64)
    plain.load_state_dict(model.state_dict())
    traced, graphs = compiled(model)
    x, dy = (randn(generator, 6, COLS, dtype=FP64) for _ in range(2))
    _, expected = step(plain, [x], plain.parameters(), dy)
    _, gradients = step(traced, [x], model.parameters(), dy)
    torch.testing.assert_close(gradients, expected, rtol=1e-8, atol=1e-10)
    assert sum(sum(graph.values()) for graph in graphs.seen) > 0 and graphs.counts("add")[1] == (0,)


def of_norm(make, kind="layer"):
    """A function of (x, residual) that normalizes the sum that ``make`` makes of them, behind a
    matrix product, and gives the sum too."""

    def build(device):
        norm = make_norm(kind, device=device, dtype=FP64)
        layer = nn.Linear(COLS, COLS, bias=False, device=device, dtype=FP64)

        def call(x, residual):
            total = make(layer(x), residual, norm)
            return norm(total), total

        return call, [*norm.parameters(), layer.weight]

    return build


STAYS = {
    "a factor": lambda x, r, norm: torch.add(x, r, alpha=2),
    "a scalar": lambda x, r, norm: x + 1.5,
    "broadcast": lambda x, r, norm: x + r[:1],
    "a computed operand": lambda x, r, norm: x + r.sin(),
    "dropout": lambda x, r, norm: F.dropout(x, 0.5) + r,
    "three operands": lambda x, r, norm: x + r + r.flip(0),
    "transposed": lambda x, r, norm: (x.transpose(0, 1) + r.transpose(0, 1)).transpose(0, 1),
}


@pytest.mark.parametrize("name", STAYS)
def test_additions_that_stay(name, device, generator):
    """Where no operator is that sum, or Inductor computes an operand where it is added."""
    call, parameters = of_norm(STAYS[name])(device)
    traced, graphs = compiled(call)
    inputs = [randn(generator, 6, 5, COLS, dtype=FP64) for _ in range(2)]
    dy = randn(generator, 6, 5, COLS, dtype=FP64)
    if name == "dropout":
        traced(*(x.requires_grad_() for x in inputs))
    elif name == "a scalar":
        traced(inputs[0].requires_grad_(), inputs[1])[0].backward(dy)
    else:
        agree(call, traced, inputs, parameters, dy)
    assert graphs.counts("norm_forward", "add_norm_forward")[0] == (1, 0)


TAKEN = {
    "in place": lambda x, r, norm: norm(r).add_(x),
    "with itself": lambda x, r, norm: x + x,
    "a slice": lambda x, r, norm: x + torch.cat([r, r])[: len(r)],
    "of a norm": lambda x, r, norm: norm(x) + r,
    "no dropout": lambda x, r, norm: F.dropout(x, 0.5, training=False) + r,
    "reshaped": lambda x, r, norm: (x.flatten() + r.flatten()).view_as(x),
}


@pytest.mark.parametrize("name", TAKEN)
def test_sums_of_other_kinds(name, device, generator):
    """Whatever the pass makes of them: the numbers are those of eager code."""
    call, parameters = of_norm(TAKEN[name])(device)
    traced, graphs = compiled(call)
    inputs = [randn(generator, 6, 5, COLS, dtype=FP64) for _ in range(2)]
    if name == "with itself":
        call_, call = call, lambda x, r: (*call_(x, r), r.sin())
        traced, graphs = compiled(call)
    agree(call, traced, inputs, parameters, randn(generator, 6, 5, COLS, dtype=FP64))
    taken = name in ("in place", "with itself", "of a norm", "no dropout")
    assert (graphs.counts("add_norm_forward")[0] == (1,)) == taken


@each_flag
def test_mutated_input(flag, device, generator):
    """The stream is changed in place, in the caller's tensor."""
    norm = make_norm("layer", flag, device=device)

    def call(stream, x):
        stream += x
        return norm(stream)

    traced, graphs = compiled(call)
    x, stream = (randn(generator, 6, COLS) for _ in range(2))
    streams = [stream.clone(), stream.clone()]
    outputs = [f(s, x) for f, s in zip((call, traced), streams, strict=True)]
    assert same_bits(*(y.detach() for y in outputs)) and same_bits(*streams)
    assert not same_bits(streams[0], stream)
    for y in outputs:
        y.sum().backward()


def test_two_norms_of_one_sum(device, generator):
    """As before parallel branches: the first norm adds, and both gradients reach the sum."""
    norms = nn.ModuleList(make_norm(kind, device=device, dtype=FP64) for kind in ("layer", "rms"))

    def call(x, residual):
        total = x + residual
        return norms[0](total), norms[1](total), total

    traced, graphs = compiled(call)
    inputs = [randn(generator, 6, COLS, dtype=FP64) for _ in range(2)]
    agree(call, traced, inputs, norms.parameters(), randn(generator, 6, COLS, dtype=FP64))
    assert graphs.counts("norm_forward", "add_norm_forward", "add")[0] == (1, 1, 0)
    assert graphs.counts("norm_backward", "add")[1] == (2, 0)


def test_parameters_that_depend_on_the_sum(device, generator):
    def call(x, residual):
        total = x + residual
        weight = total.detach()[0].tanh()
        return fn.layer_norm(total, COLS, weight), total

    traced, graphs = compiled(call)
    inputs = [randn(generator, 6, COLS, dtype=FP64) for _ in range(2)]
    agree(call, traced, inputs, [], randn(generator, 6, COLS, dtype=FP64))
    assert graphs.counts("norm_forward", "add_norm_forward")[0] == (1, 0)


def test_a_gradient_that_depends_on_the_norm(device, generator):
    """What is added to dx is computed from dweight, which comes with dx."""
    norm = make_norm("layer", device=device, dtype=FP64)

    def call(x):
        x = x.detach().requires_grad_()
        dx, dweight = torch.autograd.grad(norm(x).sin().sum(), [x, norm.weight])
        return dx + torch.mm(dweight.expand_as(dx), torch.eye(COLS, dtype=FP64, device=device))

    x = randn(generator, 6, COLS, dtype=FP64)
    expected, traced = call(x), make_fx(call)(x)
    fused_norm.compile_options()["post_grad_custom_pre_pass"](traced.graph)
    traced.graph.lint()
    traced.recompile()
    names = [str(node.target) for node in traced.graph.nodes]
    assert sum("norm_backward" in name for name in names) == names.count("aten.add.Tensor") == 1
    torch.testing.assert_close(traced(x), expected)


def test_a_copy_of_the_gradient_is_not_changed(device, generator):
    norm = make_norm("layer", device=device, dtype=FP64)

    def call(x, g):
        dx = torch.autograd.grad(norm(x).sin().sum(), [x])[0].clone()
        return dx + g, dx

    inputs = [randn(generator, 6, COLS, dtype=FP64).requires_grad_() for _ in range(2)]
    traced = make_fx(call)(*inputs)
    fused_norm.compile_options()["post_grad_custom_pre_pass"](traced.graph)
    traced.recompile()
    for own, other in zip(traced(*inputs), call(*inputs), strict=True):
        torch.testing.assert_close(own, other)


class Branches(nn.Module):
    """A norm that layers read side by side, as attention's projections, and one after it."""

    def __init__(self, count, **options):
        super().__init__()
        self.norms = nn.ModuleList(make_norm("rms", **options) for _ in range(2))
        linear = {"bias": False, **options}
        self.layers = nn.ModuleList(nn.Linear(COLS, COLS, **linear) for _ in range(count))

    def forward(self, x):
        for norm in self.norms:
            y = norm(x)
            for layer in self.layers:
                x = x + layer(y).tanh()
        return x


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_sums_of_products(count, device, generator):
    """What norm_backward is given is added up by the matrix products themselves."""
    model = Branches(count, device=device, dtype=FP64)
    traced, graphs = compiled(model)
    for rows in (6, 9, 2):
        x, dy = (randn(generator, rows, 3, COLS, dtype=FP64) for _ in range(2))
        agree(model, traced, [x], model.parameters(), dy)
    # The additions that are left are those of gradients of the weights, which are used twice.
    assert graphs.counts("addmm_", "add")[1::2] == [(2 * (count - 1), count)] * 2


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_sums_of_products_with_inductor(dtype, device, generator):
    """The sum's memory is not another's while it is read."""
    model = nn.Sequential(*(Branches(3, device=device, dtype=dtype) for _ in range(2)))
    reference = copy.deepcopy(model).to(FP64)
    seen = []
    hook = {"post_grad_custom_post_pass": lambda graph: seen.append(str(graph))}
    options = fused_norm.compile_options() | hook
    traced = torch.compile(model, fullgraph=True, options=options)
    for rows in (6, 11):
        x, dy = (randn(generator, rows, 3, COLS, dtype=dtype) for _ in range(2))
        outputs, gradients = step(reference, [x.to(FP64)], reference.parameters(), dy)
        both = [step(call, [x], model.parameters(), dy) for call in (model, traced)]
        for wanted, *found in zip(outputs + gradients, *(a + b for a, b in both), strict=True):
            eager, own = ((y - wanted).norm().item() for y in found)
            assert own <= 2 * eager
    assert seen[1].count("aten.addmm_.default]") == 2 * 2 * 2


SUMS = {  # of matrix products: (dy, what is read beside it), and how many become one of another
    "of two": (lambda p, a, b: (p @ a + p @ b, p), 1),
    "of three": (lambda p, a, b: (p @ a + (p @ b + b @ a), p), 2),
    "of two sums": (lambda p, a, b: ((p @ a + p @ b) + (a @ b + b @ a), p), 2),
    "of views": (lambda p, a, b: (((p @ a).view(4, -1) + (p @ b).view(4, -1)).view_as(p), p), 1),
    "of other views": (lambda p, a, b: (((p @ a).t() + (p @ b).t()).t(), p), 0),
    "of a transpose": (lambda p, a, b: (p @ a + p @ b.t(), p), 0),
    "with a factor": (lambda p, a, b: (torch.add(p @ a, p @ b, alpha=2), p), 0),
    "with itself": (lambda p, a, b: ((c := p @ a) + c, p), 0),
    "with one of it": (lambda p, a, b: ((c := p @ a) + c @ b, p), 0),
    "with no product": (lambda p, a, b: (p @ a + b, p), 0),
    "a product read elsewhere": (lambda p, a, b: ((c := p @ a) + p @ b, c), 0),
    "a copy": (lambda p, a, b: (p @ a + (p @ b).clone(), p), 1),
    "two copies": (lambda p, a, b: ((p @ a).clone() + (p @ b).clone(), p), 1),
    "a copy read elsewhere": (lambda p, a, b: ((c := (p @ a).clone()) + p @ b, c), 0),
    "of unlike dtypes": (lambda p, a, b: (p @ a + p.float() @ b.float(), p), 0),
}


@pytest.mark.parametrize("name", SUMS)
def test_kinds_of_sums_of_products(name, device, generator):
    norm = make_norm("layer", device=device, dtype=FP64)
    make, expected = SUMS[name]

    def call(x, *matrices):
        dy, beside = make(*matrices)
        x = x.detach().requires_grad_()
        return *torch.autograd.grad(norm(x), [x, norm.weight], dy), beside.clone()

    inputs = [randn(generator, COLS, COLS, dtype=FP64) for _ in range(4)]
    wanted, traced = call(*inputs), make_fx(call)(*inputs)
    fused_norm.compile_options()["post_grad_custom_pre_pass"](traced.graph)
    traced.graph.lint()
    traced.recompile()
    names = [str(node.target) for node in traced.graph.nodes]
    assert names.count("aten.addmm_.default") == expected
    for own, other in zip(traced(*inputs), wanted, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)


@each_flag
def test_checkpointing(flag, device, generator):
    """The forward pass is computed anew within the backward graph."""
    model = Stack("rms", flag, device=device, dtype=FP64)

    def call(x):
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return model.norm(x)

    traced, graphs = compiled(call)
    x, dy = (randn(generator, 6, COLS, dtype=FP64) for _ in range(2))
    agree(call, traced, [x], model.parameters(), dy)


@each_flag
@each_kind
def test_inductor(kind, flag, device, generator):
    """The whole way, with code that Inductor generates; and what is kept for backward. (Without the
    pass Inductor adds by itself, on some CPUs with another last bit than eager code.)"""
    model = Stack(kind, flag, device=device, dtype=FP64)
    x, dy = (randn(generator, 6, COLS, dtype=FP64) for _ in range(2))
    held = []
    for options in ({}, fused_norm.compile_options()):
        torch._dynamo.reset()
        traced = torch.compile(model, fullgraph=True, options=options)
        if options:
            agree(model, traced, [x], model.parameters(), dy)
        leaf = x.clone().requires_grad_()
        held.append(held_for_backward(lambda f=traced, x=leaf: f(x), *model.parameters())[1])
    assert held[0] == held[1]


def test_inductor_with_other_operations(device, generator):
    """Biases, an activation, dropout that does nothing, 16 bit, and a second batch size."""
    torch.manual_seed(0)

    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList(make_norm("layer", dtype=BF16) for _ in range(3))
            self.layers = nn.ModuleList(nn.Linear(COLS, COLS, dtype=BF16) for _ in range(3))

        def forward(self, x):
            for norm, layer in zip(self.norms, self.layers, strict=True):
                x = x + F.dropout(F.gelu(layer(norm(x))), 0.1, self.training) * 0.5
                x = x + layer(norm(x))
            return x

    model = Mlp().to(device).eval()
    traced = torch.compile(model, fullgraph=True, options=fused_norm.compile_options())
    for rows in (6, 11):
        x, dy = (randn(generator, rows, COLS, dtype=BF16) for _ in range(2))
        outputs, gradients = step(model, [x], model.parameters(), dy)
        traced_outputs, traced_gradients = step(traced, [x], model.parameters(), dy)
        # Inductor keeps in fp32 what eager code rounds: a few roundings of the largest value.
        for a, b in zip(outputs + gradients, traced_outputs + traced_gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=16 * 2**-8 * a.abs().max().item())


def test_options_merge_with_others(device, generator):
    seen = []
    options = {
        "max_autotune": False,
        **fused_norm.compile_options(),
        "post_grad_custom_post_pass": lambda graph: seen.append(
            {name_of(node) for node in graph.nodes}
        ),
    }
    model = Stack("rms", device=device)
    traced = torch.compile(model, fullgraph=True, options=options)
    traced(randn(generator, 6, COLS)).sum().backward()
    assert "add_norm_forward" in seen[0] and len(seen) == 2


def test_another_dict_compiles_nothing_anew(device, generator):
    model = make_norm("rms", device=device)
    x = randn(generator, 6, COLS)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            torch.compile(model, options=fused_norm.compile_options())(x)


def test_wrong_arguments():
    with pytest.raises(TypeError, match="fuse_residuals must be"):
        fused_norm.compile_options("yes")


IN_A_PROCESS = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from test_compile_options import Stack, fused_norm
from torch._dynamo.utils import counters

model = Stack("rms")
with torch.no_grad():
    for p in model.parameters():
        p.fill_(0.5)
traced = torch.compile(model, fullgraph=True, options=fused_norm.compile_options())
with torch.no_grad():  # it leaves no code to generate for a CPU, which would take a minute
    y = traced(torch.arange(64.0).view(2, 32))
hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
print("hits", hits, "sum", y.sum().item())
"""


def test_cached_across_processes(tmp_path):
    """A second process finds the code of the first one."""

    def run():
        done = subprocess.run(
            [sys.executable, "-c", IN_A_PROCESS, str(Path(__file__).parent)],
            env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        _, hits, _, total = done.stdout.split()
        return int(hits) > 0, total

    (first, a), (second, b) = run(), run()
    assert (first, second, a) == (False, True, b)
