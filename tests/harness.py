"""Runs one call of a norm, forward and backward, and holds it to the reference; and what else
several test files share."""

import contextlib
import dataclasses
import functools
import io
import math
import re

import pytest
import torch
import torch.nn.functional as F
from reference import NormCheck

import fused_norm
import fused_norm.functional as fn

each_kind = pytest.mark.parametrize("kind", ["layer", "rms"])
each_flag = pytest.mark.parametrize("memory_efficient", [False, True], ids=["", "memory_efficient"])

CHUNK = 2**25  # elements of a row chunk of the reference: 256 MiB for each fp64 intermediate

SHORT = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    None: "-",
}


@dataclasses.dataclass(frozen=True)
class Form:
    """Everything of a call but its shape and data."""

    kind: str  # "layer" or "rms"
    x: torch.dtype
    y: torch.dtype
    weight: torch.dtype | None = None
    bias: torch.dtype | None = None
    eps: float = 1e-5
    weight_offset: float = 0.0
    memory_efficient: bool = False

    def __str__(self):
        parts = [
            self.kind,
            f"{SHORT[self.x]}->{SHORT[self.y]}",
            f"weight {SHORT[self.weight]}",
            f"bias {SHORT[self.bias]}",
        ]
        if self.weight_offset:
            parts.append(f"offset {self.weight_offset}")
        if self.memory_efficient:
            parts.append("memory_efficient")
        return " ".join(parts)

    @property
    def in_torch(self):
        """torch's own operator has this form on every device: one dtype throughout and no
        offset."""
        dtypes = {self.x, self.y, self.weight or self.x, self.bias or self.x}
        return len(dtypes) == 1 and not self.weight_offset


def full_form(kind, dtype, **options):
    """The usual form: one dtype, every parameter the kind has."""
    return Form(
        kind, dtype, dtype, weight=dtype, bias=dtype if kind == "layer" else None, **options
    )


def module_of(kind, *args, **options):
    return (fused_norm.LayerNorm if kind == "layer" else fused_norm.RMSNorm)(*args, **options)


def through_torch_save(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def place(values, offset):
    """A copy of a matrix that starts `offset` elements into an allocation."""
    buffer = torch.empty(values.numel() + offset, dtype=values.dtype, device=values.device)
    return buffer[offset:].view(values.shape).copy_(values)


# Pairs of input and output dtype, and the parameter dtypes that go with an input dtype.
OUTPUTS = {
    torch.float64: [torch.float64],
    torch.float32: [torch.float32, torch.float16, torch.bfloat16],
    torch.float16: [torch.float16, torch.float32],
    torch.bfloat16: [torch.bfloat16, torch.float32],
}
PARAMETERS = {
    torch.float64: [torch.float64, torch.float32],
    torch.float32: [torch.float32, torch.float16, torch.bfloat16],
    torch.float16: [torch.float16, torch.float32],
    torch.bfloat16: [torch.bfloat16, torch.float32],
}


def forms(kind, x_dtype):
    """Every form of a kind and input dtype: outputs x affine parameters x their dtypes."""
    for y_dtype in OUTPUTS[x_dtype]:
        yield Form(kind, x_dtype, y_dtype)
        for dtype in PARAMETERS[x_dtype]:
            yield Form(kind, x_dtype, y_dtype, weight=dtype)
            if kind == "layer":
                yield Form(kind, x_dtype, y_dtype, bias=dtype)
                yield Form(kind, x_dtype, y_dtype, weight=dtype, bias=dtype)


# Pairs (residual_out, input and output) of what is added and normalized.
SUMS = [(dtype, dtype) for dtype in OUTPUTS]
SUMS += [(torch.float32, torch.bfloat16), (torch.float32, torch.float16)]


def apply(form, x, normalized_shape, weight=None, bias=None):
    """The library's call: the functional form, or the operator where the output dtype is its own.

    With memory_efficient an output dtype of its own is what autocast asks for.
    """
    if form.y != form.x and form.memory_efficient:
        with torch.autocast(x.device.type, form.y):
            return _apply(form, x, normalized_shape, weight, bias)
    if form.y != form.x:
        return torch.ops.fused_norm.norm_forward(
            x,
            weight,
            bias,
            normalized_shape,
            form.eps,
            form.weight_offset,
            form.kind == "rms",
            form.y,
        )[0]
    return _apply(form, x, normalized_shape, weight, bias)


def _apply(form, x, normalized_shape, weight, bias):
    options = {"memory_efficient": form.memory_efficient, "weight_offset": form.weight_offset}
    if form.kind == "layer":
        return fn.layer_norm(x, normalized_shape, weight, bias, form.eps, **options)
    return fn.rms_norm(x, normalized_shape, weight, form.eps, **options)


def apply_torch(form, x, normalized_shape, weight=None, bias=None):
    if form.kind == "layer":
        return F.layer_norm(x, normalized_shape, weight, bias, form.eps)
    return F.rms_norm(x, normalized_shape, weight, form.eps)


@contextlib.contextmanager
def unwritten_is_nan(device, *sizes):
    """Inside, memory that the library allocates and does not write reads as NaN: torch fills
    what torch.empty returns, and on CUDA the caching allocator's free blocks of `sizes` bytes
    hold NaN (all bits set is a NaN in every dtype)."""
    if torch.device(device).type == "cuda":
        blocks = [torch.full((size,), 255, dtype=torch.uint8, device=device) for size in sizes]
        del blocks
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def rand_generator(device, seed):
    return torch.Generator(device).manual_seed(seed)


def randn(generator, *shape, dtype=torch.float32):
    """Normal numbers, drawn in fp32 unless fp64 is asked for, on the generator's device."""
    draw = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.randn(shape, generator=generator, device=generator.device, dtype=draw).to(dtype)


def leaf(generator, *shape, dtype=torch.float64):
    return randn(generator, *shape, dtype=dtype).requires_grad_()


def random_input(generator, rows, cols, dtype):
    """Rows that differ in mean."""
    shift = randn(generator, rows, 1, dtype=dtype)
    return randn(generator, rows, cols, dtype=dtype).mul_(2).add_(shift)


def random_parameters(generator, form, normalized_shape, recoverable=False):
    """(weight, bias) around 1 and 0 or None, as the form has them. Recoverable: the effective
    weight in [0.5, 1.5] and the bias in [-1, 1], so that memory_efficient can save the output at
    any dtype."""
    weight, bias = randn(generator, *normalized_shape), randn(generator, *normalized_shape)
    if recoverable:
        weight, bias = 0.5 + weight.sigmoid(), bias.tanh()
    else:
        weight, bias = 1 + 0.5 * weight, 0.5 * bias
    return (
        None if form.weight is None else (weight - form.weight_offset).to(form.weight),
        None if form.bias is None else bias.to(form.bias),
    )


def forward_backward(call, form, x, normalized_shape, weight, bias, dy):
    """(y, {argument: gradient}) of a call on fresh leaves."""
    leaves = {"x": x, "weight": weight, "bias": bias}
    leaves = {name: t.detach().requires_grad_() for name, t in leaves.items() if t is not None}
    y = call(form, leaves["x"], normalized_shape, leaves.get("weight"), leaves.get("bias"))
    grads = torch.autograd.grad(y, list(leaves.values()), dy)
    return y.detach(), dict(zip(leaves, grads, strict=True))


def rows_repeat(tensor, normalized_shape):
    """Whether it is expanded, so that rows come again."""
    leading = range(tensor.dim() - len(normalized_shape))
    return any(tensor.stride(d) == 0 and tensor.size(d) > 1 for d in leading)


def check_call(form, x, weight, bias, dy, normalized_shape=None, with_torch=True):
    """Runs the call forward and backward; returns {what: error / limit} on the device."""
    normalized_shape = list(x.shape[-1:]) if normalized_shape is None else normalized_shape
    cols = math.prod(normalized_shape)
    rows = x.numel() // cols
    sizes = [
        x.numel() * form.y.itemsize,
        x.numel() * form.x.itemsize,
        rows * 4,
        rows * 4,
        cols * 4,
        cols * 4,
    ]
    with unwritten_is_nan(x.device, *sizes):
        y, grads = forward_backward(apply, form, x, normalized_shape, weight, bias, dy)
    assert y.dtype == form.y and y.shape == x.shape and y.is_contiguous()
    assert grads["x"].dtype == x.dtype and grads["x"].shape == x.shape
    theirs = {}
    if with_torch and form.in_torch:
        # Over one dimension: for some shapes of several torch's CUDA backward gives dweight as one
        # dimension, which autograd refuses.
        flat = [t if t is None else t.flatten() for t in (weight, bias)]
        flat_x, flat_dy = (t.flatten(-len(normalized_shape)) for t in (x, dy))
        theirs = forward_backward(apply_torch, form, flat_x, [cols], *flat, flat_dy)[1]

    check = NormCheck(
        rows=rows,
        rms=form.kind == "rms",
        eps=form.eps,
        x_dtype=form.x,
        y_dtype=form.y,
        weight=weight,
        bias=bias,
        weight_offset=form.weight_offset,
        from_output=form.memory_efficient,
        dy_repeats=rows_repeat(dy, normalized_shape),
    )
    x, y, dy, dx = (t.reshape(rows, cols) for t in (x, y, dy, grads["x"]))
    torch_dx = theirs["x"].reshape(rows, cols) if theirs else None
    step = max(1, CHUNK // cols)
    for first in range(0, rows, step):
        part = slice(first, first + step)
        check.rows(
            x[part], y[part], dy[part], dx[part], None if torch_dx is None else torch_dx[part]
        )
    check.parameters(
        grads.get("weight"), grads.get("bias"), theirs.get("weight"), theirs.get("bias")
    )
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            assert grads[name].dtype == parameter.dtype and grads[name].shape == parameter.shape
    return check.ratios()


def apply_add(form, input, residual, normalized_shape, weight=None, bias=None):
    """(output, residual_out) of the library's call. The form's x is residual_out, its y has input's
    dtype."""
    options = {"memory_efficient": form.memory_efficient, "residual_dtype": form.x}
    options["weight_offset"] = form.weight_offset
    if form.kind == "layer":
        return fn.add_layer_norm(
            input, residual, normalized_shape, weight, bias, form.eps, **options
        )
    return fn.add_rms_norm(input, residual, normalized_shape, weight, form.eps, **options)


def add_forward_backward(form, input, residual, normalized_shape, weight, bias, dy, dresidual):
    """(output, residual_out, {argument: gradient}) of a call on fresh leaves."""
    leaves = {"input": input, "residual": residual, "weight": weight, "bias": bias}
    leaves = {name: t.detach().requires_grad_() for name, t in leaves.items() if t is not None}
    y, residual_out = apply_add(
        form,
        leaves["input"],
        leaves["residual"],
        normalized_shape,
        leaves.get("weight"),
        leaves.get("bias"),
    )
    grads = torch.autograd.grad([y, residual_out], list(leaves.values()), [dy, dresidual])
    return y.detach(), residual_out.detach(), dict(zip(leaves, grads, strict=True))


def check_add_call(form, input, residual, weight, bias, dy, dresidual, normalized_shape=None):
    """As check_call, of a norm of input + residual, the residual in the dtype of the sum."""
    normalized_shape = list(input.shape[-1:]) if normalized_shape is None else normalized_shape
    cols = math.prod(normalized_shape)
    rows = input.numel() // cols
    sizes = [input.numel() * t.itemsize for t in (form.y, form.x)] + [rows * 4, cols * 4] * 2
    with unwritten_is_nan(input.device, *sizes):
        y, residual_out, grads = add_forward_backward(
            form, input, residual, normalized_shape, weight, bias, dy, dresidual
        )
    for output, dtype in ((y, form.y), (residual_out, form.x)):
        assert output.dtype == dtype and output.shape == input.shape and output.is_contiguous()
    wide = torch.float64 if form.x == torch.float64 else torch.float32
    assert same_bits(residual_out, (input.to(wide) + residual.to(wide)).to(form.x))
    assert same_bits(grads["input"], grads["residual"].to(input.dtype))

    check = NormCheck(
        rows=rows,
        rms=form.kind == "rms",
        eps=form.eps,
        x_dtype=form.x,
        y_dtype=form.y,
        weight=weight,
        bias=bias,
        weight_offset=form.weight_offset,
        from_output=form.memory_efficient,
        dy_repeats=rows_repeat(dy, normalized_shape),
    )
    tensors = (residual_out, y, dy, grads["residual"], dresidual)
    x, y, dy, dx, dresidual = (t.reshape(rows, cols) for t in tensors)
    step = max(1, CHUNK // cols)
    for first in range(0, rows, step):
        part = slice(first, first + step)
        check.rows(x[part], y[part], dy[part], dx[part], dresidual=dresidual[part].double())
    check.parameters(grads.get("weight"), grads.get("bias"))
    return check.ratios()


def held_for_backward(call, *others):
    """(what call() returns, bytes of the distinct storages that autograd keeps for it), the
    storages of the tensors `others` not counted."""
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = call()  # which keeps the storages alive: no address comes twice
    for tensor in others:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return result, sum(storages.values())


def address(tensor):
    return tensor.untyped_storage().data_ptr()


def saved_storages(call):
    """(result, {storage address: largest saved tensor on it}) of what autograd keeps for the
    backward pass of call()."""
    saved = {}

    def pack(tensor):
        key = address(tensor)
        if key not in saved or saved[key].numel() < tensor.numel():
            saved[key] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = call()
    return result, saved


@contextlib.contextmanager
def waits_are_errors():
    """Inside, torch raises where it waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def returns_at_once(call):
    """Whether call() queues its work behind a sleeping GPU and returns. What it runs must have run
    before: to load a kernel is a wait, and to take memory from the driver may be one."""
    slept = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # cycles: one second
    slept.record()
    call()
    return not slept.query()


class Verdict:
    """Collects error / limit of many calls and fails once, naming those beyond their limit. One
    wait on the device."""

    def __init__(self):
        self.names, self.values = [], []

    def add(self, label, ratios):
        for name, value in ratios.items():
            self.names.append(f"{label}: {name}")
            self.values.append(value.reshape(()))

    def check(self):
        assert self.values, "nothing was measured"
        ratios = torch.stack(self.values).tolist()
        wrong = [
            f"{name} is {ratio:.3g} x its limit"
            for name, ratio in zip(self.names, ratios, strict=True)
            if ratio > 1
        ]
        assert not wrong, f"{len(wrong)} of {len(ratios)} measures:\n" + "\n".join(wrong[:20])


def fuzz(cases, check, examples):
    """Calls check(case) with so many random cases of a strategy of hypothesis."""
    from hypothesis import HealthCheck, given, note, settings

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=False,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def run(case):
        note(str(case))
        check(case)

    run()


def bits(tensor):
    """The tensor's bits as integers, so that equal means equal bits (NaN and -0 too)."""
    return tensor.contiguous().view(
        {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    )


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def kernels_of(calls, errors=()):
    """Names of all that occupies the GPU while the calls run, each of which may raise `errors`."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for call in calls:
            with contextlib.suppress(*errors):
                call()
        torch.cuda.synchronize()
    return [e.name for e in profiler.events() if e.device_type == DeviceType.CUDA]


def maker_of_ones(device):
    """make(*shape, dtype): ones on a device, the same tensor at every call."""

    @functools.cache
    def make(*shape, dtype=torch.float32):
        return torch.ones(shape, device=device).to(dtype)

    return make


def check_raises(call, patterns, errors=(RuntimeError, TypeError, ValueError)):
    with pytest.raises(errors) as raised:
        call()
    for pattern in patterns:
        assert re.search(pattern, str(raised.value)), f"{pattern!r} is not in {str(raised.value)!r}"
