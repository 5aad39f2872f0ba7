"""Each argument of each function with values of wrong types: one error that names it, and nothing
of how the library is made."""

import re

import pytest
import torch

import fused_norm
import fused_norm.functional as fn
from fused_norm import apex, flash_attn

X = torch.ones(3, 8)
WEIGHT = torch.ones(8)
Q = torch.ones(1, 2, 3, 8)  # (batch, heads, rows, head dim)
OFFSETS = torch.tensor([0, 2], dtype=torch.int32)

NOT_A_TENSOR = [None, 1.0, "x", [1.0] * 8]
NOT_OPTIONAL = NOT_A_TENSOR[1:]
NOT_A_SHAPE = [None, 8.0, "8", b"8", [8.0], ["8"], (None,), {8}, torch.tensor([8]), object()]
NOT_A_SHAPE += [2**64, (2**63,)]
NOT_A_NUMBER = ["1e-5", [1e-5], 1j, object(), torch.ones(2), torch.ones((), requires_grad=True)]
NOT_A_FLAG = ["yes", None, 1.0, [True], object(), torch.ones(2)]
NOT_A_DTYPE = ["float32", 3, int]
WRONG = {
    "input": NOT_A_TENSOR,
    "residual": NOT_A_TENSOR,
    "weight": NOT_OPTIONAL,
    "bias": NOT_OPTIONAL,
    "mask": NOT_OPTIONAL,
    "normalized_shape": NOT_A_SHAPE,
    "eps": NOT_A_NUMBER,
    "weight_offset": [None, *NOT_A_NUMBER],
    "memory_efficient": NOT_A_FLAG,
    "residual_dtype": NOT_A_DTYPE,
    "dtype": NOT_A_DTYPE + [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn],
    "dim": [1.5, "a", [0], object(), 2, -3, 2**64],
    "scale": [None, *NOT_A_NUMBER],
    "causal": NOT_A_FLAG,
    "gate": NOT_A_TENSOR,
    "norm_before_gate": NOT_A_FLAG,
    "group_size": [1.5, "a", [0], object(), 3, 0, 2**64],
    **dict.fromkeys(("query", "key", "value", "q", "k", "v", "qkv", "kv"), NOT_A_TENSOR),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens"), NOT_A_TENSOR),
    **dict.fromkeys(("attn_mask", "alibi_slopes", "sink", "block_table"), NOT_OPTIONAL),
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_k", "max_seqlen"), [None, 3.0, "3", [3], -1]),
    **dict.fromkeys(("is_causal", "enable_gqa", "return_lse", "return_attn_probs"), NOT_A_FLAG),
    **dict.fromkeys(("dropout_p", "softcap"), [None, *NOT_A_NUMBER]),
    "softmax_scale": NOT_A_NUMBER,
    "window": [3, "left", (1,), (1.5, 0), ("1", 0), (1, 2, 3)],
    "window_size": [3, None, (1,), (1.5, 0), ("1", 0), (1, 2, 3), (None, None)],
}
NORM = {"normalized_shape": (8,), "weight": WEIGHT, "eps": 1e-5, "memory_efficient": False}
OF_FUNCTIONS = {
    fn.layer_norm: {"input": X, **NORM, "bias": WEIGHT, "weight_offset": 0.0},
    fn.rms_norm: {"input": X, **NORM, "weight_offset": 0.0},
    fn.add_layer_norm: {
        **{"input": X, "residual": X, **NORM, "bias": WEIGHT, "weight_offset": 0.0},
        "residual_dtype": torch.float32,
    },
    fn.add_rms_norm: {
        **{"input": X, "residual": X, **NORM, "weight_offset": 0.0},
        "residual_dtype": torch.float32,
    },
    fn.rms_norm_gated: {
        **{"input": X, "gate": X, "normalized_shape": (8,), "weight": WEIGHT, "eps": 1e-5},
        **{"norm_before_gate": True, "group_size": 4, "weight_offset": 0.0},
    },
    fn.softmax: {"input": X, "dim": -1, "dtype": None},
    fn.log_softmax: {"input": X, "dim": -1, "dtype": None},
    fn.scaled_masked_softmax: {"input": X, "mask": X > 2, "scale": 1.0, "causal": False},
    apex.fused_layer_norm_affine: {"input": X, **NORM, "bias": WEIGHT},
    apex.mixed_dtype_fused_layer_norm_affine: {"input": X, **NORM, "bias": WEIGHT},
    apex.fused_rms_norm_affine: {"input": X, **NORM},
    apex.mixed_dtype_fused_rms_norm_affine: {"input": X, **NORM},
    apex.fused_rms_norm: {
        "input": X,
        **{"normalized_shape": (8,), "eps": 1e-5, "memory_efficient": False},
    },
    fused_norm.LayerNorm: {
        **{"normalized_shape": (8,), "eps": 1e-5, "memory_efficient": False},
        "weight_offset": 0.0,
    },
    fused_norm.RMSNorm: {
        **{"normalized_shape": (8,), "eps": 1e-5, "memory_efficient": False},
        "weight_offset": 0.0,
    },
    apex.FusedLayerNorm: {"normalized_shape": (8,), "eps": 1e-5, "memory_efficient": False},
    apex.MixedFusedRMSNorm: {"normalized_shape": (8,), "eps": 1e-5, "memory_efficient": False},
}
ATTENTION = {"causal": True, "dropout_p": 0.0, "softcap": 0.0, "alibi_slopes": None}
FLASH = {**ATTENTION, "window": None, "sink": None, "return_lse": False}
FLASH_ATTN = {**ATTENTION, "softmax_scale": 1.0, "window_size": (-1, -1)}
FLASH_ATTN["return_attn_probs"] = False
OF_QUERIES, OF_KEYS = ({f"cu_seqlens_{x}": OFFSETS, f"max_seqlen_{x}": 2} for x in ("q", "k"))
OF_FUNCTIONS |= {
    fn.scaled_dot_product_attention: {
        **{"query": Q, "key": Q, "value": Q, "attn_mask": None, "dropout_p": 0.0},
        **{"is_causal": False, "scale": None, "enable_gqa": False},
    },
    fn.flash_attention: {
        **{"query": Q, "key": Q, "value": Q, "attn_mask": None, "scale": None, **FLASH}
    },
    fn.flash_attention_varlen: {
        **{"query": Q[0], "key": Q[0], "value": Q[0], "scale": None},
        **{**OF_QUERIES, **OF_KEYS, **FLASH},
    },
    flash_attn.flash_attn_func: {"q": Q, "k": Q, "v": Q, **FLASH_ATTN},
    flash_attn.flash_attn_kvpacked_func: {"q": Q, "kv": torch.stack([Q, Q], 2), **FLASH_ATTN},
    flash_attn.flash_attn_varlen_func: {
        **{"q": Q[0], "k": Q[0], "v": Q[0], **OF_QUERIES, **OF_KEYS, **FLASH_ATTN},
        "block_table": None,
    },
    flash_attn.flash_attn_varlen_qkvpacked_func: {
        **{"qkv": torch.stack([Q[0]] * 3, 1), "cu_seqlens": OFFSETS, "max_seqlen": 2},
        **FLASH_ATTN,
    },
}
# Of attention None is 1 / sqrt(head dim).
NONE_IS_RIGHT = {(fn.scaled_dot_product_attention, "scale"), (fn.flash_attention, "scale")}
NONE_IS_RIGHT |= {(fn.flash_attention_varlen, "scale")}
CASES = [
    pytest.param(function, name, value, id=f"{function.__name__} {name} {i} {type(value).__name__}")
    for function, arguments in OF_FUNCTIONS.items()
    for name in arguments
    for i, value in enumerate(WRONG[name])
    if not (value is None and (function, name) in NONE_IS_RIGHT)
]
# What says how the library is made: schemas, overloads, types of C++.
INSIDES = r"Expected a value of type|incompatible function arguments|Declaration:|fused_norm::|_C\."


def check(call, name):
    with pytest.raises((TypeError, ValueError, RuntimeError, IndexError)) as raised:
        call()
    message = str(raised.value)
    assert re.search(rf"\b{name}\b", message), message
    assert not re.search(INSIDES, message) and "\n" not in message, message
    return raised.value


@pytest.mark.parametrize(("function", "name", "value"), CASES)
def test_wrong_argument(function, name, value):
    arguments = OF_FUNCTIONS[function]
    function(**arguments)  # the rest is right
    error = check(lambda: function(**{**arguments, name: value}), name)
    of_type = not isinstance(value, (int, torch.dtype, torch.Tensor)) or isinstance(value, bool)
    if of_type and value != (2**63,):
        assert isinstance(error, TypeError), error


@pytest.mark.parametrize("name", ["memory_efficient", "eps", "weight_offset"])
@pytest.mark.parametrize("cls", [fused_norm.LayerNorm, fused_norm.RMSNorm])
def test_wrong_attribute(cls, name):
    """Of a module, at its next call."""
    module = cls(8)
    setattr(module, name, "wrong")
    check(lambda: module(X), name)


@pytest.mark.parametrize("argument", [None, "x", [1.0]], ids=repr)
def test_wrong_input_of_a_module(argument):
    for module in (fused_norm.LayerNorm(8), fused_norm.RMSNorm(8), fused_norm.Softmax(-1)):
        check(lambda module=module: module(argument), "input")


@pytest.mark.parametrize("dim", ["a", 1.5, [0]], ids=repr)
def test_wrong_dim_of_a_module(dim):
    check(lambda: fused_norm.Softmax(dim)(X), "dim")


def test_wrong_argument_of_convert():
    check(
        lambda: fused_norm.convert(torch.nn.LayerNorm(8), memory_efficient="yes"),
        "memory_efficient",
    )
    check(lambda: fused_norm.convert(X), "model")


def test_apex_knows_no_default_of_eps():
    for function in (apex.fused_layer_norm, apex.fused_rms_norm):
        check(lambda function=function: function(X, 8, None), "eps")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_of_other_kinds():
    nested = [torch.nested.nested_tensor([X], layout=at) for at in (torch.strided, torch.jagged)]
    flash, varlen, func = fn.flash_attention, fn.flash_attention_varlen, flash_attn.flash_attn_func
    check(lambda: flash(X.sum(), Q, Q), "query")
    check(lambda: varlen(X.sum(), Q, Q, OFFSETS, OFFSETS, 2, 2), "query")
    for tensor in nested:
        check(lambda t=tensor: func(t, Q, Q), "q")
        check(lambda t=tensor: flash_attn.flash_attn_qkvpacked_func(t), "qkv")
        check(lambda t=tensor: func(Q, Q, Q, alibi_slopes=t), "alibi_slopes")
    for function in (apex.fused_rms_norm_affine, apex.mixed_dtype_fused_rms_norm_affine):
        for x, dtype in ((X, torch.int64), (X.bfloat16(), torch.int64), (X.half(), torch.cfloat)):
            check(lambda f=function, x=x, d=dtype: f(x, WEIGHT.to(d), 8), "weight")


def test_residual_that_does_not_go_with_the_input():
    """The residual is to blame where no residual_dtype was passed."""
    error = check(lambda: fn.add_layer_norm(X, X.bfloat16(), 8), "residual")
    assert "residual_dtype" not in str(error)


@pytest.mark.parametrize("compiles", [False, True], ids=["", "compiled"])
def test_offset_without_a_weight(compiles):
    for call in (fn.layer_norm, fn.rms_norm, lambda *a, **k: fn.add_rms_norm(a[0], *a, **k)):
        if compiles:
            call = torch.compile(call, backend="eager")
        for memory_efficient in (False, True):
            with pytest.raises(Exception, match="weight_offset is 1, but there is no weight"):
                call(X, 8, weight_offset=1.0, memory_efficient=memory_efficient)
    for cls in (fused_norm.LayerNorm, fused_norm.RMSNorm):
        with pytest.raises(ValueError, match="weight_offset is 1.0.* no weight to add it to"):
            cls(8, elementwise_affine=False, weight_offset=1)


@pytest.mark.parametrize("name", ["eps", "weight_offset", "memory_efficient", "weight"])
def test_compiled(name):
    """The same error, of Dynamo's class."""
    torch._dynamo.reset()
    arguments = {**OF_FUNCTIONS[fn.rms_norm], name: "wrong"}
    with pytest.raises(TypeError, match=rf"\b{name} must be"):
        torch.compile(lambda: fn.rms_norm(**arguments), backend="eager")()
