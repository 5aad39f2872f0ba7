"""The softmaxes as a user of torch meets them: signatures, modules, autograd, autocast, opcheck,
torch.compile, and errors that name the argument and its value."""

import copy
import functools
import inspect
import pickle
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from harness import (
    check_raises,
    kernels_of,
    leaf,
    maker_of_ones,
    randn,
    same_bits,
    through_torch_save,
)
from softmax_harness import (
    BF16,
    FP16,
    FP32,
    FP64,
    PAIRS,
    backward_op,
    forced_tier,
    forward_op,
    masked_op,
)
from torch._subclasses.fake_tensor import FakeTensorMode

import fused_norm
import fused_norm.functional as fn
from fused_norm import _C

INF, NAN = float("inf"), float("nan")
DTYPES = [FP64, FP32, FP16, BF16]
FUNCTIONS = {"softmax": (fn.softmax, F.softmax), "log_softmax": (fn.log_softmax, F.log_softmax)}
MODULES = {
    "softmax": (fused_norm.Softmax, torch.nn.Softmax),
    "log_softmax": (fused_norm.LogSoftmax, torch.nn.LogSoftmax),
}
each_function = pytest.mark.parametrize("name", list(FUNCTIONS))
each_module = pytest.mark.parametrize(("ours", "theirs"), MODULES.values(), ids=list(MODULES))
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


# Signatures, defaults, dtypes.


@pytest.mark.parametrize(
    ("function", "signature"),
    [
        (fn.softmax, "input dim=None dtype=None _stacklevel=3"),
        (fn.log_softmax, "input dim=None dtype=None _stacklevel=3"),
        (fn.scaled_masked_softmax, "input mask=None scale=1.0 causal=False"),
        (fused_norm.Softmax, "dim=None"),
        (fused_norm.LogSoftmax, "dim=None"),
    ],
    ids=lambda f: getattr(f, "__name__", ""),
)
def test_names_order_and_defaults(function, signature):
    words = [
        p.name + ("" if p.default is p.empty else f"={p.default}")
        for p in inspect.signature(function).parameters.values()
    ]
    assert " ".join(words) == signature


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_in_place_of_torchs(name, monkeypatch):
    """torch's modules pass _stacklevel."""
    monkeypatch.setattr(torch.nn.functional, name, getattr(fn, name))
    module = {"softmax": torch.nn.Softmax, "log_softmax": torch.nn.LogSoftmax}[name]
    x = torch.randn(3, 4)
    torch.testing.assert_close(module(-1)(x), getattr(torch, name)(x, -1))
    with pytest.warns(UserWarning, match="Implicit dimension choice"):
        module(None)(x)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_arguments_by_position(name):
    """torch.softmax has dtype as the third, torch.nn.functional.softmax as the fourth."""
    x = torch.randn(3, 4)
    for rest in ((), (FP64,), (3, FP64), (3, None)):
        theirs = getattr(torch.nn.functional if 3 in rest else torch, name)(x, -1, *rest)
        torch.testing.assert_close(getattr(fn, name)(x, -1, *rest), theirs)


@each_function
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (2, 3, 4, 5)], ids=str)
def test_no_dim_is_torchs_rule_and_warning(shape, name, device, generator):
    """The warning points at the caller, from the function and from the module."""
    x = randn(generator, *shape)
    function, theirs = FUNCTIONS[name]
    for call in (function, MODULES[name][0]()):
        with pytest.warns(UserWarning, match=f"Implicit dimension choice for {name} ") as caught:
            y = call(x)
        assert [w.filename for w in caught] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.testing.assert_close(y, theirs(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        function(x, -1)


@each_function
@pytest.mark.parametrize("out", DTYPES, ids=str)
@pytest.mark.parametrize(
    "dtype", [*DTYPES, torch.int32, torch.uint8, torch.bool, torch.float8_e4m3fn], ids=str
)
def test_dtype(dtype, out, name, device, generator):
    """Every dtype to every other, as torch has it: the input is converted first, inside the kernel
    where one exists. The gradient has the input's dtype."""
    x = (randn(generator, 4, 40) * 2).to(dtype)
    function, theirs = FUNCTIONS[name]
    tolerance = {BF16: 2**-7, FP16: 2**-10}.get(out, 1e-5)
    for dim in (0, 1):
        y, expected = function(x, dim, dtype=out), theirs(x, dim, dtype=out)
        assert y.dtype == expected.dtype == out
        torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)
    if dtype in DTYPES:
        x.requires_grad_()
        dy = randn(generator, 4, 40, dtype=out)
        grads = [torch.autograd.grad(f(x, -1, dtype=out), x, dy)[0] for f in (function, theirs)]
        assert grads[0].dtype == dtype
        # Terms of size |dy|, at most 4, of which each of the two errs by a few roundings.
        tolerance = 16 * max({BF16: 2**-8, FP16: 2**-11}.get(d, 1e-6) for d in (dtype, out))
        torch.testing.assert_close(*grads, rtol=tolerance, atol=tolerance)


@each_function
def test_fused_conversion_makes_no_copy(name, device):
    """bf16 in, fp32 out: no memory but the output's, neither forward nor, but for dx, backward. On
    a CPU each thread has a block of rows beside it: one is counted."""
    x = torch.zeros(1024, 1024, dtype=BF16, device=device)
    y = FUNCTIONS[name][0](x, -1, dtype=FP32)
    dy = torch.zeros_like(y)
    for call, made in (
        (lambda: FUNCTIONS[name][0](x, -1, dtype=FP32), y.nbytes),
        (lambda: backward_op(dy, y, -1, name == "log_softmax", BF16), x.nbytes),
    ):
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            call()
            allocated = torch.cuda.max_memory_allocated() - before
        else:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            with torch.profiler.profile(profile_memory=True, acc_events=True) as profiler:
                result = call()
            torch.set_num_threads(threads)
            allocated = sum(max(e.self_cpu_memory_usage, 0) for e in profiler.events())
            del result
        assert made <= allocated < made + 2**18


# Modules.


@pytest.mark.parametrize("args", [(), (1,), (-1,), (None,)], ids=str)
@each_module
def test_constructed_like_torchs(ours, theirs, args, generator):
    mine, other = ours(*args), theirs(*args)
    assert isinstance(mine, theirs)
    assert repr(mine) == repr(other) and mine.dim == other.dim
    assert not mine.state_dict() and not list(mine.parameters())
    x = randn(generator, 5, 7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(mine(x), other(x))


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), through_torch_save],
    ids=["deepcopy", "pickle", "torch.save"],
)
@each_module
def test_copies_behave_like_the_original(ours, theirs, copied, generator):
    module = ours(dim=1)
    other = copied(module)
    assert type(other) is ours and repr(other) == repr(module)
    x = randn(generator, 3, 8)
    assert torch.equal(module(x), other(x))


@each_module
def test_trains_like_torchs(ours, theirs, device):
    """A classifier with attention over its features: the same losses as with torch's module."""

    def losses(make):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), make(dim=1), torch.nn.Linear(16, 5), make(dim=-1)
        ).to(device, FP64)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        x = torch.randn(32, 8, dtype=FP64).to(device)
        found = []
        for _ in range(10):
            loss = model(x)[:, 0].sub(1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return torch.tensor(found)

    # fp64 roundings of 2^-53 grow over ten steps; far below 1e-9.
    torch.testing.assert_close(losses(ours), losses(theirs), rtol=1e-9, atol=0)


# Derivatives.


@pytest.mark.parametrize(
    ("shape", "dim"), [((4, 6), -1), ((4, 6), 0), ((2, 3, 4), 1), ((3, 1), 1), ((5,), 0), ((), 0)]
)
@each_function
def test_gradcheck(name, shape, dim, device, generator):
    """Numerical derivatives in fp64, and the same bits when the backward pass is repeated."""
    x = leaf(generator, *shape)
    assert torch.autograd.gradcheck(lambda x: FUNCTIONS[name][0](x, dim), x, nondet_tol=0.0)


@each_function
def test_gradcheck_of_strided_input(name, device, generator):
    base = leaf(generator, 3, 2, 4, 2)

    def call(base):
        x = base.permute(1, 2, 0, 3)[:, 1:]
        return FUNCTIONS[name][0](x, 2), FUNCTIONS[name][0](x, -1)

    assert torch.autograd.gradcheck(call, base, nondet_tol=0.0)


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("mask", ["none", "boolean", "additive", "all"])
def test_gradcheck_masked(mask, causal, device, generator):
    x = leaf(generator, 2, 3, 4)
    masks = {
        "none": None,
        "boolean": torch.rand(3, 4, generator=generator, device=device) < 0.4,
        "additive": randn(generator, 2, 1, 4, dtype=FP64),
        "all": torch.tensor([False, True, False], device=device)[:, None],
    }

    def call(x):
        return fn.scaled_masked_softmax(x, masks[mask], 0.7, causal)

    assert torch.autograd.gradcheck(call, x, nondet_tol=0.0)


def calls_on(x):
    mask = torch.zeros(x.shape[-1], dtype=torch.bool, device=x.device)
    return {
        "softmax": lambda x: fn.softmax(x, -1),
        "log_softmax over columns": lambda x: fn.log_softmax(x, 0),
        "scaled_masked_softmax": lambda x: fn.scaled_masked_softmax(x, mask, 2.0, True),
        "the operator": lambda x: forward_op(x, -1),
        "the masked operator": lambda x: masked_op(x, mask),
    }


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("which", range(5))
def test_nothing_to_differentiate_gives_the_same_bits(which, mode, device, generator):
    x = leaf(generator, 4, 6)
    call = list(calls_on(x).values())[which]
    with_graph = call(x)
    with mode():
        without = call(x)
    assert with_graph.requires_grad and not without.requires_grad
    assert not call(x.detach()).requires_grad
    assert same_bits(with_graph.detach(), without)


@each_function
def test_changing_the_output_in_place_is_noticed(name, device, generator):
    """As with torch's: the output is what backward needs."""
    x = leaf(generator, 4, 6)
    y = FUNCTIONS[name][0](x, -1)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@each_function
def test_gradients_add_up_over_calls(name, device, generator):
    x, grads = leaf(generator, 4, 6), []
    for call in FUNCTIONS[name]:
        x.grad = None
        y = call(call(x, 0), 1).sin().sum()
        y.backward(retain_graph=True)
        y.backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


def test_mask_that_needs_grad(device, generator):
    x = leaf(generator, 4, 6)
    mask = leaf(generator, 6)
    for call in (fn.scaled_masked_softmax, masked_op):
        for given in (x, x.detach()):
            with pytest.raises(RuntimeError, match="mask requires grad"):
                call(given, mask)
        call(x, mask.detach())
        with torch.no_grad():
            call(x, mask)


# Autocast.


@pytest.mark.parametrize("out", [None, *DTYPES], ids=str)
@pytest.mark.parametrize("autocast_dtype", [BF16, FP16], ids=lambda d: f"to {d}")
@each_dtype
@each_function
def test_output_dtype_under_autocast_is_torchs(name, dtype, autocast_dtype, out, device, generator):
    x = randn(generator, 4, 16, dtype=dtype)
    with torch.autocast(device, autocast_dtype):
        ours, theirs = (call(x, -1, dtype=out) for call in FUNCTIONS[name])
        module = MODULES[name][0](-1)(x)
    assert ours.dtype == theirs.dtype
    assert module.dtype == (theirs.dtype if out is None else module.dtype)
    tolerance = {BF16: 2**-7, FP16: 2**-10}.get(ours.dtype, 1e-5)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@each_dtype
def test_masked_output_dtype_under_autocast(dtype, device, generator):
    """As torch.softmax of the masked scores."""
    x = randn(generator, 4, 16, dtype=dtype).requires_grad_()
    with torch.autocast(device, BF16):
        y = fn.scaled_masked_softmax(x, causal=True, scale=0.5)
        assert y.dtype == torch.softmax(x, -1).dtype
    y.sum().backward()
    assert x.grad.dtype == dtype
    with torch.autocast(device, BF16), torch.autocast(device, enabled=False):
        assert fn.scaled_masked_softmax(x).dtype == fn.softmax(x, -1).dtype == dtype


# Operators.

SHAPES = [((5, 8), -1), ((5, 8), 0), ((2, 3, 4), 1), ((), 0), ((0, 8), 1), ((3, 0), 1), ((3, 1), 1)]
each_shape = pytest.mark.parametrize(("shape", "dim"), SHAPES, ids=str)
each_pair = pytest.mark.parametrize("pair", PAIRS, ids=str)
each_log = pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])


@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "needs grad"])
@each_shape
@each_log
@each_pair
def test_opcheck_forward_and_backward(pair, log, shape, dim, requires_grad, device, generator):
    x = randn(generator, *shape, dtype=pair[0]).requires_grad_(requires_grad)
    torch.library.opcheck(forward_op, (x, dim, log, pair[1]))
    y = forward_op(x.detach(), dim, log, pair[1])
    dy, y = torch.ones_like(y).requires_grad_(requires_grad), y.requires_grad_(requires_grad)
    torch.library.opcheck(backward_op, (dy, y, dim, log, pair[0]))


def masks_of(generator, shape):
    return {
        "none": None,
        "boolean": torch.rand(shape[-1:], generator=generator, device=generator.device) < 0.5,
        "additive": randn(generator, *shape, dtype=FP16)[:1],
    }


@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "needs grad"])
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("which", ["none", "boolean", "additive"])
@each_pair
def test_opcheck_masked(pair, which, causal, requires_grad, device, generator):
    for shape in [(5, 8), (2, 3, 4), (0, 8), (3, 0)]:
        x = randn(generator, *shape, dtype=pair[0]).requires_grad_(requires_grad)
        mask = masks_of(generator, shape)[which]
        torch.library.opcheck(forward_op, (x, -1, False, pair[1], mask, 0.5, causal))


@each_shape
@each_log
@each_pair
def test_fake_tensors_describe_the_real_ones(pair, log, shape, dim, device, generator):
    x = randn(generator, *shape, dtype=pair[0])
    real = forward_op(x, dim, log, pair[1])
    real = [real, masked_op(x, None), backward_op(real, real, dim, log, pair[0])]
    with FakeTensorMode() as mode:
        fake_x = mode.from_tensor(x)
        fake = forward_op(fake_x, dim, log, pair[1])
        fake = [fake, masked_op(fake_x, None), backward_op(fake, fake, dim, log, pair[0])]
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.dtype, a.device, a.stride()) == (b.shape, b.dtype, b.device, b.stride())


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_training_step_equals_eager(backend, device, generator):
    """One graph (fullgraph), forward and backward, and again with other numbers of rows."""
    torch._dynamo.reset()
    softmax, log_softmax = fused_norm.Softmax(dim=-1), fused_norm.LogSoftmax(dim=1)
    mask = torch.rand(16, generator=generator, device=device) < 0.3

    def block(x):
        a = softmax(x * 2) + log_softmax(x).sin()
        a = a + fn.softmax(x, 0) + fn.softmax(x.bfloat16(), -1, dtype=FP32)
        return a + fn.scaled_masked_softmax(x, mask, 0.5, True).cos()

    compiled = torch.compile(block, fullgraph=True, backend=backend, dynamic=True)
    for rows in (6, 9):
        x = randn(generator, 2, rows, 16)
        results = []
        for call in (block, compiled):
            leaf = x.clone().requires_grad_()
            y = call(leaf)
            y.square().sum().backward()
            results.append([y.detach(), leaf.grad])
        for eager, traced in zip(*results, strict=True):
            torch.testing.assert_close(traced, eager)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled_without_a_dim(name, device, generator):
    """One graph, as with torch's, and its warning where the code is compiled."""
    for call in (FUNCTIONS[name][0], MODULES[name][0]()):
        torch._dynamo.reset()
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        for shape, dim in (((6, 16), 1), ((2, 6, 16), 0)):
            x = randn(generator, *shape)
            with pytest.warns(UserWarning, match="Implicit dimension choice"):
                y = compiled(x)
            torch.testing.assert_close(y, FUNCTIONS[name][1](x, dim))


def test_compiled_under_autocast(device, generator):
    torch._dynamo.reset()
    softmax = fused_norm.Softmax(dim=-1)
    compiled = torch.compile(softmax, fullgraph=True, backend="aot_eager")
    x = randn(generator, 6, 16, dtype=BF16)
    with torch.autocast(device, BF16):
        assert compiled(x).dtype == softmax(x).dtype


# Errors.


# name: (call with a maker of tensors, type of the error, patterns the message must have)
CASES = {
    "dim too large": (
        lambda make: fn.softmax(make(3, 48), 2),
        IndexError,
        ["dim is 2", "2 dimensions", r"\[-2, 1\]"],
    ),
    "dim too small": (
        lambda make: fn.log_softmax(make(3, 48), -3),
        IndexError,
        ["dim is -3", "2 dimensions"],
    ),
    "dim of a scalar": (lambda make: fn.softmax(make(), 1), IndexError, ["dim is 1", "0 dim"]),
    "integer input": (
        lambda make: fn.softmax(make(3, 48, dtype=torch.int64), -1),
        RuntimeError,
        ["input", "Long"],
    ),
    "bool input": (
        lambda make: fn.log_softmax(make(3, 48, dtype=torch.bool), -1),
        RuntimeError,
        ["input", "Bool"],
    ),
    "integer scores": (
        lambda make: fn.scaled_masked_softmax(make(3, 48, dtype=torch.int32)),
        RuntimeError,
        ["input", "Int"],
    ),
    "complex input": (
        lambda make: fn.softmax(make(3, 48, dtype=torch.complex64), -1),
        RuntimeError,
        ["input", "[Cc]omplex"],
    ),
    "8-bit input": (
        lambda make: fn.softmax(make(3, 48, dtype=torch.float8_e4m3fn), -1),
        RuntimeError,
        ["input", "[Ff]loat8_e4m3fn"],
    ),
    "integer dtype": (
        lambda make: fn.softmax(make(3, 48), -1, dtype=torch.int32),
        RuntimeError,
        ["dtype must be", "int32"],
    ),
    "output dtype that no kernel gives": (
        lambda make: forward_op(make(3, 48), -1, False, BF16),
        RuntimeError,
        ["out_dtype", "BFloat16", "Float"],
    ),
    "mask beside another dimension than the last": (
        lambda make: forward_op(make(3, 48), 0, False, None, make(48, dtype=torch.bool)),
        RuntimeError,
        ["mask, scale and causal", "dim is 0"],
    ),
    "scale of a logarithm": (
        lambda make: forward_op(make(3, 48), -1, True, None, None, 0.5),
        RuntimeError,
        ["mask, scale and causal", "log is True"],
    ),
    "mask of another length": (
        lambda make: fn.scaled_masked_softmax(make(3, 48), make(37, dtype=torch.bool)),
        RuntimeError,
        ["mask", "37", "broadcast", "3, 48"],
    ),
    "mask that would enlarge the input": (
        lambda make: fn.scaled_masked_softmax(make(1, 48), make(3, 48, dtype=torch.bool)),
        RuntimeError,
        ["mask", "3, 48", "broadcast", "1, 48"],
    ),
    "mask of more dimensions": (
        lambda make: fn.scaled_masked_softmax(make(3, 48), make(1, 3, 48)),
        RuntimeError,
        ["mask", "1, 3, 48", "broadcast"],
    ),
    "integer mask": (
        lambda make: fn.scaled_masked_softmax(make(3, 48), make(48, dtype=torch.uint8)),
        RuntimeError,
        ["mask", "bool", "Byte"],
    ),
    "complex mask": (
        lambda make: fn.scaled_masked_softmax(make(3, 48), make(48, dtype=torch.complex64)),
        RuntimeError,
        ["mask", "[Cc]omplex"],
    ),
    "NaN scale": (
        lambda make: fn.scaled_masked_softmax(make(3, 48), scale=NAN),
        RuntimeError,
        ["scale", "nan"],
    ),
    "infinite scale": (
        lambda make: fn.scaled_masked_softmax(make(3, 48), scale=-INF),
        RuntimeError,
        ["scale", "-inf"],
    ),
    "causal without queries": (
        lambda make: fn.scaled_masked_softmax(make(48), causal=True),
        RuntimeError,
        ["causal", "2 dimensions", "has 1"],
    ),
}
BACKWARD_CASES = {
    "dim too large": (
        lambda make: (make(3, 48), make(3, 48), 2, False, FP32),
        ["dim is 2", "2 dimensions"],
    ),
    "output of another shape": (
        lambda make: (make(3, 48), make(2, 48), -1, False, FP32),
        ["output", "3, 48", "2, 48"],
    ),
    "output of another dtype": (
        lambda make: (make(3, 48), make(3, 48, dtype=BF16), -1, False, FP32),
        ["output", "BFloat16", "Float"],
    ),
    "integer dy": (
        lambda make: (make(3, 48, dtype=torch.int32), make(3, 48), -1, False, FP32),
        ["dy", "Int"],
    ),
    "input dtype that gives no such output": (
        lambda make: (make(3, 48), make(3, 48), -1, False, FP64),
        ["Float", "Double"],
    ),
    "scale over columns": (
        lambda make: (make(3, 48), make(3, 48), 0, False, FP32, 2.0),
        ["scale is 2", "dim is 0"],
    ),
    "NaN scale": (
        lambda make: (make(3, 48), make(3, 48), 1, False, FP32, NAN),
        ["scale", "nan"],
    ),
}


@pytest.mark.parametrize("grad", [False, True], ids=["", "with grad"])
@pytest.mark.parametrize("on", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("case", CASES)
def test_message(case, on, grad):
    call, error, patterns = CASES[case]
    make = maker_of_ones(on)

    def make_leaf(*shape, dtype=FP32):
        tensor = make(*shape, dtype=dtype)
        if len(shape) == 1 or shape == (1, 3, 48):  # a mask
            return tensor
        return tensor.requires_grad_(grad and tensor.dtype in DTYPES)

    check_raises(lambda: call(make_leaf), patterns, error)


@pytest.mark.parametrize("case", BACKWARD_CASES)
def test_backward_operator(case, device):
    arguments, patterns = BACKWARD_CASES[case]
    arguments = arguments(maker_of_ones(device))
    check_raises(lambda: backward_op(*arguments), patterns, (RuntimeError, IndexError))


def test_layout(device):
    eye = torch.eye(4, device=device)
    for call in (
        lambda: fn.softmax(eye.to_sparse(), -1),
        lambda: fn.log_softmax(eye.to_sparse_csr(), -1),
        lambda: fn.scaled_masked_softmax(eye.to_sparse()),
    ):
        check_raises(call, ["input", "[Ss]parse"], RuntimeError)
    call = functools.partial(fn.scaled_masked_softmax, eye, eye.to_sparse())
    check_raises(call, ["mask", "[Ss]parse"], RuntimeError)


@pytest.mark.parametrize(
    ("of_input", "of_mask"),
    [
        ("cpu", "meta"),
        ("meta", "cpu"),
        pytest.param("cuda", "cpu", marks=pytest.mark.cuda),
        pytest.param("cpu", "cuda", marks=pytest.mark.cuda),
        pytest.param("cuda:0", "cuda:1", marks=pytest.mark.multi_gpu),
    ],
)
def test_mask_on_another_device(of_input, of_mask):
    x, mask = torch.ones(3, 4, device=of_input), torch.ones(4, device=of_mask)
    call = functools.partial(fn.scaled_masked_softmax, x, mask)
    check_raises(call, ["mask", of_input, of_mask], RuntimeError)


def test_row_too_long(device):
    """Columns are counted in 32 bits; the expanded input takes no memory."""
    cols = 2**30 + 1
    x = torch.ones(1, device=device).expand(cols)
    for call in (lambda: fn.softmax(x, 0), lambda: fn.scaled_masked_softmax(x)):
        check_raises(call, ["dim", str(cols)], RuntimeError)


def test_tier(device):
    x = torch.ones(3, 48, device=device)
    long = torch.ones(1, 2**20, device=device)
    with pytest.raises(ValueError, match="tier must be .* but is 'fast'"):
        _C.force_softmax_tier("fast")

    def check(tier, call, words):
        with forced_tier(tier):
            check_raises(call, ["tier", *words], RuntimeError)

    if device == "cpu":
        check("warp", lambda: forward_op(x, -1), ["cpu"])
        check("block", lambda: masked_op(x, None), ["cpu"])
        check("uncached", lambda: backward_op(x, x, -1, False, FP32), ["cpu"])
    else:
        check("warp", lambda: forward_op(x, 0), ["dim is 0"])
        for tier in ("warp", "block"):
            check(tier, lambda: forward_op(long, -1), [tier, str(2**20)])


@pytest.mark.cuda
def test_no_error_launches_a_kernel():
    make = maker_of_ones("cuda")
    # torch itself converts the input before the call that names an impossible dtype.
    calls = [lambda c=c: c[0](make) for c in CASES.values()]
    calls += [lambda c=c: backward_op(*c[0](make)) for c in BACKWARD_CASES.values()]
    errors = RuntimeError, IndexError
    kernels_of(calls, errors)  # makes the tensors
    assert kernels_of([lambda: fn.softmax(make(3, 48), -1)]), "the profiler sees no kernels"
    assert not kernels_of(calls, errors)


@pytest.mark.parametrize("function", [fn.softmax, fn.log_softmax, fn.scaled_masked_softmax])
@pytest.mark.parametrize("argument", [None, [[1.0]]], ids=["None", "list"])
def test_input_that_is_no_tensor(function, argument):
    with pytest.raises(TypeError, match=f"input must be a tensor, .*{type(argument).__name__}"):
        function(argument)


@each_function
def test_dtype_that_is_no_dtype(name, generator):
    x = randn(generator, 3, 5, dtype=FP32)
    for dtype in ("fp32", "cpu", torch.device("cpu"), 6, int):
        with pytest.raises(TypeError, match=rf"dtype must be .* but is {re.escape(repr(dtype))}"):
            FUNCTIONS[name][0](x, -1, dtype=dtype)
    assert FUNCTIONS[name][0](x, -1, dtype=float).dtype is FP64  # as torch has it
