"""What the library cannot do is an error that names the argument and its value, before any kernel
runs.

Every case runs on the CPU, on the meta device, which has no kernels, and on CUDA.
"""

import contextlib
import functools

import pytest
import torch
from harness import check_raises, kernels_of, maker_of_ones

import fused_norm
import fused_norm.functional as fn

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
INF, NAN = float("inf"), float("nan")
ERRORS = (RuntimeError, TypeError, ValueError)


# name: (call with a maker of tensors, patterns the message must have)
CASES = {
    "normalized_shape does not match": (
        lambda make: fn.layer_norm(make(3, 48), [37]),
        ["normalized_shape", "37", "input", "3, 48"],
    ),
    "normalized_shape does not match, rms": (
        lambda make: fn.rms_norm(make(3, 48), [37]),
        ["normalized_shape", "37", "input", "3, 48"],
    ),
    "normalized_shape matches the wrong dimension": (
        lambda make: fn.layer_norm(make(37, 48), [37]),
        ["normalized_shape", "37", "input", "37, 48"],
    ),
    "normalized_shape longer than the input": (
        lambda make: fn.layer_norm(make(48), [5, 48]),
        ["normalized_shape", "5, 48", "input", "48"],
    ),
    "input without dimensions": (
        lambda make: fn.layer_norm(make(), [1]),
        ["normalized_shape", "1", "input"],
    ),
    "empty normalized_shape": (lambda make: fn.layer_norm(make(3, 48), []), ["normalized_shape"]),
    "empty normalized_shape, rms": (
        lambda make: fn.rms_norm(make(3, 48), ()),
        ["normalized_shape"],
    ),
    "weight of another shape": (
        lambda make: fn.layer_norm(make(3, 48), [48], make(37)),
        ["weight", "48", "37"],
    ),
    "weight of another number of dimensions": (
        lambda make: fn.rms_norm(make(3, 4, 12), [4, 12], make(48)),
        ["weight", "4, 12", "48"],
    ),
    "bias of another shape": (
        lambda make: fn.layer_norm(make(3, 48), [48], None, make(37)),
        ["bias", "48", "37"],
    ),
    "weight of another 16-bit dtype": (
        lambda make: fn.layer_norm(make(3, 48, dtype=BF16), [48], make(48, dtype=FP16)),
        ["weight", "Half|float16", "BFloat16|bfloat16"],
    ),
    "fp64 weight": (
        lambda make: fn.rms_norm(make(3, 48), [48], make(48, dtype=FP64)),
        ["weight", "Double|float64", "Float|float32"],
    ),
    "fp64 weight that sets the output's dtype": (
        lambda make: torch.ops.fused_norm.norm_forward(
            make(3, 48), make(48, dtype=FP64), None, [48], 1e-5, 0.0, False, FP64
        ),
        ["weight is", "Double|float64", "Float|float32"],
    ),
    "16-bit bias with fp64 input": (
        lambda make: fn.layer_norm(make(3, 48, dtype=FP64), [48], None, make(48, dtype=BF16)),
        ["bias", "BFloat16|bfloat16", "Double|float64"],
    ),
    "integer weight": (
        lambda make: fn.layer_norm(make(3, 48), [48], make(48, dtype=torch.int32)),
        ["weight", "Int|int32"],
    ),
    "integer input": (
        lambda make: fn.layer_norm(make(3, 48, dtype=torch.int64), [48]),
        ["input", "Long|int64"],
    ),
    "integer input, rms": (
        lambda make: fn.rms_norm(make(3, 48, dtype=torch.int32), [48]),
        ["input", "Int|int32"],
    ),
    "integer input, memory_efficient": (
        lambda make: fn.rms_norm(
            make(3, 48, dtype=torch.int32), [48], make(48).requires_grad_(), memory_efficient=True
        ),
        ["input", "Int|int32"],
    ),
    "bool input": (
        lambda make: fn.layer_norm(make(3, 48, dtype=torch.bool), [48]),
        ["input", "Bool|bool"],
    ),
    "complex input": (
        lambda make: fn.layer_norm(make(3, 48, dtype=torch.complex64), [48]),
        ["input", "[Cc]omplex"],
    ),
    "8-bit input": (
        lambda make: fn.layer_norm(make(3, 48, dtype=torch.float8_e4m3fn), [48]),
        ["input", "[Ff]loat8_e4m3fn"],
    ),
    "negative eps": (lambda make: fn.layer_norm(make(3, 48), [48], eps=-0.25), ["eps", "-0.25"]),
    "negative eps, rms": (lambda make: fn.rms_norm(make(3, 48), [48], eps=-0.25), ["eps", "-0.25"]),
    "NaN eps": (lambda make: fn.layer_norm(make(3, 48), [48], eps=NAN), ["eps", "nan"]),
    "infinite eps": (lambda make: fn.rms_norm(make(3, 48), [48], eps=INF), ["eps", "inf"]),
    "NaN weight_offset": (
        lambda make: fn.rms_norm(make(3, 48), [48], make(48), weight_offset=NAN),
        ["weight_offset", "nan"],
    ),
    "infinite weight_offset": (
        lambda make: fn.rms_norm(make(3, 48), [48], make(48), weight_offset=-INF),
        ["weight_offset", "-inf"],
    ),
    "output dtype that does not go with the input": (
        lambda make: torch.ops.fused_norm.norm_forward(
            make(3, 48, dtype=FP16), None, None, [48], 1e-5, 0.0, False, BF16
        ),
        ["out_dtype", "BFloat16|bfloat16", "Half|float16"],
    ),
    "integer output dtype": (
        lambda make: torch.ops.fused_norm.norm_forward(
            make(3, 48), None, None, [48], 1e-5, 0.0, False, torch.int32
        ),
        ["out_dtype", "Int|int32"],
    ),
    "residual of another shape": (
        lambda make: fn.add_layer_norm(make(3, 48), make(48), [48]),
        ["residual", "3, 48", r"\[48\]"],
    ),
    "residual of another shape, rms": (
        lambda make: fn.add_rms_norm(make(3, 48), make(2, 48), [48]),
        ["residual", "3, 48", "2, 48"],
    ),
    "residual of another 16-bit dtype": (
        lambda make: fn.add_rms_norm(make(3, 48, dtype=BF16), make(3, 48, dtype=FP16), [48]),
        ["residual", "Half|float16", "BFloat16|bfloat16"],
    ),
    "16-bit residual with fp32 input": (
        lambda make: fn.add_layer_norm(make(3, 48), make(3, 48, dtype=BF16), [48]),
        ["residual", "BFloat16|bfloat16", "Float|float32"],
    ),
    "fp64 residual with fp32 input": (
        lambda make: fn.add_layer_norm(make(3, 48), make(3, 48, dtype=FP64), [48]),
        ["residual", "Double|float64", "Float|float32"],
    ),
    "integer residual": (
        lambda make: fn.add_rms_norm(make(3, 48), make(3, 48, dtype=torch.int64), [48]),
        ["residual", "Long|int64"],
    ),
    "residual_dtype narrower than the residual": (
        lambda make: fn.add_rms_norm(
            make(3, 48, dtype=BF16), make(3, 48), [48], residual_dtype=BF16
        ),
        ["residual is", "Float|float32", "BFloat16|bfloat16"],
    ),
    "residual_dtype that does not go with the input": (
        lambda make: fn.add_layer_norm(make(3, 48), make(3, 48), [48], residual_dtype=FP16),
        ["residual_dtype", "Half|float16", "Float|float32"],
    ),
    "fp64 residual_dtype": (
        lambda make: fn.add_layer_norm(
            make(3, 48, dtype=BF16), make(3, 48, dtype=BF16), [48], residual_dtype=FP64
        ),
        ["residual_dtype", "Double|float64"],
    ),
    "integer input, with a residual": (
        lambda make: fn.add_layer_norm(
            make(3, 48, dtype=torch.int32), make(3, 48, dtype=torch.int32), [48]
        ),
        ["input", "Int|int32"],
    ),
    "weight that does not go with the sum": (
        lambda make: fn.add_layer_norm(
            make(3, 48, dtype=BF16), make(3, 48, dtype=BF16), [48], make(48, dtype=FP16)
        ),
        ["weight", "Half|float16", "BFloat16|bfloat16", "residual_out"],
    ),
    "weight of another shape, with a residual": (
        lambda make: fn.add_rms_norm(make(3, 48), make(3, 48), [48], make(37)),
        ["weight", "48", "37"],
    ),
    "normalized_shape does not match, with a residual": (
        lambda make: fn.add_rms_norm(make(3, 48), make(3, 48), [37]),
        ["normalized_shape", "37", "input", "3, 48"],
    ),
    "negative eps, with a residual": (
        lambda make: fn.add_layer_norm(make(3, 48), make(3, 48), [48], eps=-0.25),
        ["eps", "-0.25"],
    ),
    "infinite weight_offset, with a residual": (
        lambda make: fn.add_rms_norm(make(3, 48), make(3, 48), [48], weight_offset=INF),
        ["weight_offset", "inf"],
    ),
    "normalized_shape as a tensor": (
        lambda make: fn.layer_norm(make(3, 48), torch.tensor([48])),
        ["normalized_shape", "tensor"],
    ),
    "normalized_shape as text, memory_efficient": (
        lambda make: fn.layer_norm(make(3, 48), "48", make(48), memory_efficient=True),
        ["normalized_shape", "'48' of type str"],
    ),
    "normalized_shape of floats, memory_efficient": (
        lambda make: fn.layer_norm(make(3, 48), [48.0], make(48), memory_efficient=True),
        ["normalized_shape", "48.0"],
    ),
    "weight_offset as text, memory_efficient": (
        lambda make: fn.rms_norm(
            make(3, 48), 48, make(48), memory_efficient=True, weight_offset="1"
        ),
        ["weight_offset", "str"],
    ),
    # Operators would take the numbers, and leave the parameters without gradients.
    "eps that requires grad": (
        lambda make: fn.layer_norm(make(3, 48), 48, eps=torch.ones((), requires_grad=True)),
        ["eps", "requires_grad=True"],
    ),
    "weight_offset that requires grad": (
        lambda make: fn.add_rms_norm(
            make(3, 48), make(3, 48), 48, weight_offset=torch.ones((), requires_grad=True)
        ),
        ["weight_offset", "requires_grad=True"],
    ),
    "scale that requires grad": (
        lambda make: fn.scaled_masked_softmax(
            make(3, 48), scale=torch.ones((), requires_grad=True)
        ),
        ["scale", "requires_grad=True"],
    ),
}

# What a function that is mapped over a batch sees of its arguments has to fit as well.
CASES |= {
    "vmap: residual of another shape": (
        lambda make: torch.vmap(lambda x, r, w: fn.add_rms_norm(x, r, 48, w))(
            make(4, 4, 48), make(4, 48), make(4, 48)
        ),
        ["residual", r"\[4, 48\]", r"\[48\]"],
    ),
    "vmap: normalized_shape does not match": (
        lambda make: torch.vmap(lambda x, w: fn.layer_norm(x, 37, w))(make(4, 3, 48), make(4, 48)),
        ["normalized_shape", "37", "3, 48"],
    ),
    "vmap: normalized_shape reaches into the batch": (
        lambda make: torch.vmap(lambda x: fn.rms_norm(x, [4, 3, 48]))(make(4, 3, 48)),
        ["normalized_shape", "4, 3, 48", r"\[3, 48\]"],
    ),
    "vmap: weight of another shape": (
        lambda make: torch.vmap(lambda x, w: fn.layer_norm(x, 48, w))(make(4, 3, 48), make(4, 1)),
        ["weight", "48", r"\[1\]"],
    ),
    "vmap: fp64 weight": (
        lambda make: torch.vmap(lambda x, w: fn.rms_norm(x, 48, w), (1, 1))(
            make(3, 4, 48), make(48, 4, dtype=FP64)
        ),
        ["weight", "Double|float64"],
    ),
    "vmap: integer input": (
        lambda make: torch.vmap(lambda x, w: fn.rms_norm(x, 48, w))(
            make(4, 3, 48, dtype=torch.int32), make(4, 48)
        ),
        ["input", "Int|int32"],
    ),
    "vmap: negative eps": (
        lambda make: torch.vmap(lambda x, w: fn.layer_norm(x, 48, w, eps=-0.5))(
            make(4, 3, 48), make(4, 48)
        ),
        ["eps", "-0.5"],
    ),
    "vmap: normalized_shape does not match, listing columns": (
        lambda make: torch.vmap(
            lambda x, w: torch.ops.fused_norm.norm_forward(x, w, None, [37], 1e-5, room=4)
        )(make(4, 3, 48), make(4, 48)),
        ["normalized_shape", "37", "3, 48"],
    ),
    "vmap: residual of another shape, listing columns": (
        lambda make: torch.vmap(
            lambda x, r, w: torch.ops.fused_norm.norm_forward(
                x, w, None, [48], 1e-5, residual=r, room=4
            )
        )(make(4, 4, 48), make(4, 48), make(4, 48)),
        ["residual", r"\[4, 48\]", r"\[48\]"],
    ),
}


@pytest.mark.parametrize("grad", [False, True], ids=["", "with grad"])
@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("case", CASES)
def test_message(case, device, grad):
    call, patterns = CASES[case]
    make = maker_of_ones(device)

    def make_leaf(*shape, dtype=FP32):
        tensor = make(*shape, dtype=dtype)
        return tensor.requires_grad_(grad and tensor.dtype in (BF16, FP16, FP32, FP64))

    check_raises(lambda: call(make_leaf), patterns)


def test_module_given_another_width(device):
    module = fused_norm.LayerNorm(37, device=device)
    check_raises(
        lambda: module(torch.ones(3, 48, device=device)),
        ["normalized_shape", "37", "input", "3, 48"],
    )


def test_row_too_long(device):
    """Columns are counted in 32 bits; the expanded input takes no memory."""
    cols = 2**30 + 1
    x = torch.ones(1, device=device).expand(cols)
    check_raises(lambda: fn.layer_norm(x, [cols]), ["normalized_shape", str(cols)])


class Matrices:
    """Four by four, in every layout."""

    def __init__(self, device):
        self.dense = torch.eye(4, device=device)
        self.sparse, self.sparse_csr = self.dense.to_sparse(), self.dense.to_sparse_csr()
        self.sparse_row = self.dense[0].to_sparse()


LAYOUTS = {
    "sparse input": (lambda m: fn.layer_norm(m.sparse, [4]), ["input", "[Ss]parse"]),
    "sparse CSR input": (lambda m: fn.rms_norm(m.sparse_csr, [4]), ["input", "[Ss]parse"]),
    "sparse residual": (
        lambda m: fn.add_layer_norm(m.dense, m.sparse, [4]),
        ["residual", "[Ss]parse"],
    ),
    "sparse input and residual": (
        lambda m: fn.add_rms_norm(m.sparse, m.sparse, [4]),
        ["input", "[Ss]parse"],
    ),
    "sparse weight": (
        lambda m: fn.layer_norm(m.dense, [4], m.sparse_row),
        ["weight", "[Ss]parse"],
    ),
    "sparse bias": (
        lambda m: fn.layer_norm(m.dense, [4], None, m.sparse_row),
        ["bias", "[Ss]parse"],
    ),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_layout(case, device):
    call, patterns = LAYOUTS[case]
    check_raises(lambda: call(Matrices(device)), patterns)


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize(
    ("of_input", "of_parameter"),
    [
        ("cpu", "meta"),
        ("meta", "cpu"),
        pytest.param("cuda", "cpu", marks=pytest.mark.cuda),
        pytest.param("cpu", "cuda", marks=pytest.mark.cuda),
        pytest.param("cuda:0", "cuda:1", marks=pytest.mark.multi_gpu),
    ],
)
def test_parameter_on_another_device(of_input, of_parameter, name):
    x, parameter = torch.ones(3, 4, device=of_input), torch.ones(4, device=of_parameter)
    check_raises(lambda: fn.layer_norm(x, [4], **{name: parameter}), [name, of_input, of_parameter])


@pytest.mark.parametrize(
    ("of_input", "of_residual"),
    [("cpu", "meta"), ("meta", "cpu"), pytest.param("cuda", "cpu", marks=pytest.mark.cuda)],
)
def test_residual_on_another_device(of_input, of_residual):
    x, residual = torch.ones(3, 4, device=of_input), torch.ones(3, 4, device=of_residual)
    check_raises(lambda: fn.add_rms_norm(x, residual, [4]), ["residual", of_input, of_residual])


@pytest.mark.parametrize("grad_mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("argument", [None, [[1.0]]], ids=["None", "list"])
def test_argument_that_is_no_tensor(argument, grad_mode):
    kind = type(argument).__name__
    x = torch.ones(1, 1)
    with grad_mode():
        for call in (fn.layer_norm, fn.rms_norm, fused_norm.apex.fused_rms_norm):
            check_raises(lambda call=call: call(argument, [1]), [r"\binput\b", kind])
        for call in (fn.add_layer_norm, fn.add_rms_norm):
            check_raises(lambda call=call: call(argument, x, [1]), ["input", kind])
            check_raises(lambda call=call: call(x, argument, [1]), ["residual", kind])
        for module in (fused_norm.LayerNorm(1), fused_norm.RMSNorm(1)):
            check_raises(lambda module=module: module(argument), ["input", kind])


@pytest.mark.parametrize("grad_mode", [torch.enable_grad, torch.no_grad])
def test_parameter_that_is_no_tensor(grad_mode):
    x = torch.ones(2, 4)
    with grad_mode():
        for call in (fn.layer_norm, functools.partial(fn.add_layer_norm, x)):
            check_raises(lambda call=call: call(x, [4], [1.0] * 4), ["weight", "list"])
            check_raises(lambda call=call: call(x, [4], torch.ones(4), 0.5), ["bias", "float"])


def test_apex_parameter_that_is_no_tensor():
    x, apex = torch.ones(2, 4), fused_norm.apex
    check_raises(lambda: apex.fused_rms_norm_affine(x, [1.0] * 4, [4]), ["weight", "list"])
    check_raises(
        lambda: apex.fused_layer_norm_affine(x, torch.ones(4), 0.5, [4]), ["bias", "float"]
    )


def test_mixed_forms_need_a_weight():
    x = torch.ones(2, 4)
    for call in (
        lambda: fused_norm.apex.mixed_dtype_fused_rms_norm_affine(x, None, [4]),
        lambda: fused_norm.apex.mixed_dtype_fused_layer_norm_affine(x, None, None, [4]),
    ):
        check_raises(call, ["weight must be a tensor", "None"])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("grad", [False, True], ids=["", "with grad"])
def test_nested_tensors(grad):
    """Of the layout that torch no longer recommends. Others: tests/test_jagged.py."""
    x = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.strided)
    x = x.requires_grad_(grad)
    weight = torch.ones(4, requires_grad=grad)
    for call in (
        lambda: fn.layer_norm(x, [4], weight, weight),
        lambda: fn.rms_norm(x, [4], weight, memory_efficient=True),
        lambda: fn.add_rms_norm(x, x, [4], weight),
        lambda: fn.softmax(x, -1),
        lambda: fn.log_softmax(x, -1),
        lambda: fn.scaled_masked_softmax(x),
    ):
        check_raises(call, ["input", "nested"])
    x, nested = torch.ones(2, 4, requires_grad=grad), torch.nested.nested_tensor([torch.ones(4)])
    for options in ({}, {"memory_efficient": True}):
        call = functools.partial(fn.rms_norm, x, [4], nested, **options)
        check_raises(call, ["weight", "nested"])
        call = functools.partial(fn.layer_norm, x, [4], weight, nested, **options)
        check_raises(call, ["bias", "nested"])


@pytest.mark.filterwarnings("ignore:.*quantize.*")
def test_quantized_tensors():
    x = torch.quantize_per_tensor(torch.ones(2, 4), 0.1, 0, torch.quint8)
    for call in (
        lambda: fn.layer_norm(x, [4]),
        lambda: fn.rms_norm(x, [4]),
        lambda: fn.softmax(x, -1),
        lambda: fn.scaled_masked_softmax(x),
    ):
        check_raises(call, ["input", "QUInt8"])


# The operators can be called directly, so they check what their caller might get wrong.
def forward_for_backward(device, dtype=FP32):
    x = torch.ones(3, 48, device=device, dtype=dtype)
    weight = torch.ones(48, device=device, dtype=dtype)
    _, mean, rstd = torch.ops.fused_norm.norm_forward(x, weight, None, [48], 1e-5)
    return {
        "dy": x,
        "saved": x,
        "mean": mean,
        "rstd": rstd,
        "weight": weight,
        "bias": None,
        "normalized_shape": [48],
        "weight_offset": 0.0,
        "rms": False,
        "from_output": False,
        "input_dtype": dtype,
        "output_mask": [True, True, True],
        "side": None,
        "columns": None,
        "dresidual": None,
    }


BACKWARD_CASES = {
    "saved of another shape": ({"saved": (2, 48)}, ["saved", "3, 48", "2, 48"]),
    "saved of another dtype": ({"saved": (3, 48, BF16)}, ["saved", "BFloat16", "Float"]),
    "dy of another width": ({"dy": (3, 37)}, ["dy", "3, 37", "48"]),
    "integer dy": ({"dy": (3, 48, torch.int32)}, ["dy", "Int"]),
    "dy of a dtype that no forward gives": ({"dy": (3, 48, FP64)}, ["Double", "Float"]),
    "rstd of another length": ({"rstd": (4, 1)}, ["rstd", "3", "4, 1"]),
    "rstd of another dtype": ({"rstd": (3, 1, FP64)}, ["rstd", "Double", "Float"]),
    "mean of another length": ({"mean": (2, 1)}, ["mean", "3", "2, 1"]),
    "weight of another shape": ({"weight": (37,)}, ["weight", "37", "48"]),
    "bias of another shape": ({"bias": (37,)}, ["bias", "37", "48"]),
    "dresidual of another shape": ({"dresidual": (2, 48)}, ["dresidual", "3, 48", "2, 48"]),
    "dresidual of another dtype": ({"dresidual": (3, 48, BF16)}, ["dresidual", "BFloat16"]),
}


def backward_arguments(case, device):
    arguments = forward_for_backward(device)
    for name, (*shape, last) in BACKWARD_CASES[case][0].items():
        dtype = last if isinstance(last, torch.dtype) else FP32
        shape = shape if isinstance(last, torch.dtype) else [*shape, last]
        arguments[name] = torch.ones(shape, device=device).to(dtype)
    return arguments.values()


@pytest.mark.parametrize("case", BACKWARD_CASES)
def test_backward_operator(case, device):
    arguments = backward_arguments(case, device)
    check_raises(lambda: torch.ops.fused_norm.norm_backward(*arguments), BACKWARD_CASES[case][1])


@pytest.mark.parametrize("case", [c for c in BACKWARD_CASES if not c.startswith(("rstd", "mean"))])
def test_backward_operator_of_meta_tensors(case):
    """They have no statistics to check."""
    arguments = backward_arguments(case, "meta")
    check_raises(lambda: torch.ops.fused_norm.norm_backward(*arguments), BACKWARD_CASES[case][1])


def test_backward_operator_without_a_mean(device):
    arguments = {**forward_for_backward(device), "mean": None}
    check_raises(lambda: torch.ops.fused_norm.norm_backward(*arguments.values()), ["mean", "None"])


def test_backward_operator_with_a_part_of_the_listed_columns(device):
    arguments = {**forward_for_backward(device), "from_output": True}
    arguments["side"] = torch.ones(3, 4, device=device)
    patterns = ["side is given", "columns is None", "from_output is True"]
    check_raises(lambda: torch.ops.fused_norm.norm_backward(*arguments.values()), patterns)


@pytest.mark.parametrize("col", [-1, 48])
def test_backward_operator_with_a_listed_column_that_is_none(col):
    """On the CPU, where looking at it is no wait."""
    arguments = {**forward_for_backward("cpu"), "mean": None, "from_output": True}
    arguments["side"] = torch.ones(3, 4)
    arguments["columns"] = torch.tensor([1, col, 0, 0, 0], dtype=torch.int32)
    patterns = ["columns", "0 to 47", f"holds {col}"]
    check_raises(lambda: torch.ops.fused_norm.norm_backward(*arguments.values()), patterns)


def failing_calls(device, other):
    """Every call of this file that must fail, its tensors made; `other` is another device."""
    make, matrices = maker_of_ones(device), Matrices(device)
    for call, _ in CASES.values():
        with contextlib.suppress(*ERRORS):
            call(make)
        yield functools.partial(call, make)
    for call, _ in LAYOUTS.values():
        yield functools.partial(call, matrices)
    for case in BACKWARD_CASES:
        arguments = backward_arguments(case, device)
        yield functools.partial(torch.ops.fused_norm.norm_backward, *arguments)
    here, there = ((torch.ones(3, 4, device=d), torch.ones(4, device=d)) for d in (device, other))
    for (x, _), (residual, parameter) in ((here, there), (there, here)):
        for name in ("weight", "bias"):
            yield functools.partial(fn.layer_norm, x, [4], **{name: parameter})
        yield functools.partial(fn.add_rms_norm, x, residual, [4])


@pytest.mark.cuda
def test_no_error_launches_a_kernel():
    calls = list(failing_calls("cuda", "cpu"))
    kernels_of(calls, ERRORS)
    x = torch.ones(3, 48, device="cuda")
    assert kernels_of([lambda: fn.layer_norm(x, [48])]), "the profiler sees no kernels"
    assert not kernels_of(calls, ERRORS)


@pytest.mark.parametrize("direction", ["forward", "backward", "fake"])
def test_a_bias_does_not_go_with_rms(direction):
    x, weight = torch.randn(3, 8), torch.ones(8)
    rstd = torch.ones(3, 1)
    with pytest.raises(RuntimeError, match=r"bias must be None with rms=True, but has shape \[8\]"):
        if direction == "forward":
            torch.ops.fused_norm.norm_forward(x, weight, weight, [8], 1e-5, 0.0, True)
        elif direction == "backward":
            torch.ops.fused_norm.norm_backward(
                x, x, None, rstd, weight, weight, [8], 0.0, True, False, x.dtype, [True] * 3
            )
        else:
            x, weight = x.to("meta"), weight.to("meta")
            torch.ops.fused_norm.norm_forward(x, weight, weight, [8], 1e-5, 0.0, True)


@pytest.mark.parametrize("room", [-1, 2**24 + 1])
def test_room_for_listed_columns(room):
    """Kernels keep places in the list as fp32, so that it ends before many columns do."""
    cols = 2**25
    x = torch.empty(1).expand(1, cols)  # takes no memory
    check_raises(
        lambda: torch.ops.fused_norm.norm_forward(x, x[0], None, [cols], 1e-5, room=room),
        ["room", str(room), "16777216", str(cols)],
    )
