"""The operators of ``torch.ops.fused_norm`` as Python sees them: handles, and the checks of a
norm's arguments for where the operator does not run.

Schemas and kernels are registered in C++ when ``_C`` loads (csrc/ops), with which _load.py
begins.
"""

import collections
import math

import torch

from fused_norm import _C, _sharding, _torch

norm_forward = torch.ops.fused_norm.norm_forward.default
norm_backward = torch.ops.fused_norm.norm_backward.default
unrecoverable_columns = torch.ops.fused_norm.unrecoverable_columns.default
rms_norm_gated_forward = torch.ops.fused_norm.rms_norm_gated_forward.default
rms_norm_gated_backward = torch.ops.fused_norm.rms_norm_gated_backward.default
softmax_forward = torch.ops.fused_norm.softmax_forward.default
scaled_masked_softmax = torch.ops.fused_norm.scaled_masked_softmax.default
softmax_backward = torch.ops.fused_norm.softmax_backward.default
attention_forward = torch.ops.fused_norm.attention_forward.default
attention_backward = torch.ops.fused_norm.attention_backward.default
attention_rng = torch.ops.fused_norm.attention_rng.default


@_torch.constant
def _check_norm_options(*options) -> bool:
    _C.check_norm_options(*options)
    return True


def dtype_of(tensor) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def call_type(op):
    """A named tuple of the operator's arguments, with their defaults."""
    arguments = op._schema.arguments
    defaults = [arg.default_value for arg in arguments if arg.has_default_value()]
    return collections.namedtuple("Call", [arg.name for arg in arguments], defaults=defaults)


NormCall = call_type(norm_forward)
GatedCall = call_type(rms_norm_gated_forward)
AttentionCall = call_type(attention_forward)


def _check_shapes(call, like_input: str) -> None:
    """Of a call's tensors, one of which is to have the shape of the input."""
    input, shape = call.input, list(call.normalized_shape)
    if not shape:
        raise RuntimeError("normalized_shape must have at least one dimension, but is []")
    if input.dim() < len(shape) or list(input.shape[input.dim() - len(shape) :]) != shape:
        raise RuntimeError(
            f"normalized_shape is {shape}, but input has shape {list(input.shape)}, whose last "
            "dimensions differ from it"
        )
    of_input, of_norm = ("input", list(input.shape)), ("normalized_shape", shape)
    tensors = {like_input: of_input, "weight": of_norm, "bias": of_norm}
    for name, (other, expected) in tensors.items():
        tensor = getattr(call, name, None)
        if tensor is None:
            continue
        if list(tensor.shape) != expected:
            raise RuntimeError(
                f"{name} must have the shape of {other} {expected}, but has shape "
                f"{list(tensor.shape)}"
            )
        if tensor.device != input.device:
            raise RuntimeError(f"{name} is on {tensor.device}, but input is on {input.device}")


def check_norm_arguments(*args) -> None:
    """The operator's own checks, for where it does not run."""
    call = NormCall(*args)
    dtype, bias = call.input.dtype, call.bias
    dtypes = (dtype, dtype_of(call.weight), dtype_of(bias), call.out_dtype or dtype)
    residuals = (dtype_of(call.residual), call.residual_dtype)
    _check_norm_options(*dtypes, call.eps, call.weight_offset, *residuals)
    _check_shapes(call, "residual")
    if call.rms and bias is not None:
        raise RuntimeError(f"bias must be None with rms=True, but has shape {list(bias.shape)}")


def check_gated_arguments(*args) -> None:
    """As ``check_norm_arguments``, of gated RMSNorm."""
    call = GatedCall(*args)
    dtype, gate, group = call.input.dtype, call.gate.dtype, call.group_size
    options = (call.eps, call.weight_offset, None, None)
    _check_norm_options(dtype, dtype_of(call.weight), None, dtype, *options)
    if gate not in (dtype, torch.float32):
        raise RuntimeError(
            f"gate is {gate}, which does not go with {dtype} input: it must have the input's "
            "dtype, or be float32"
        )
    _check_shapes(call, "gate")
    shape = list(call.normalized_shape)
    cols = math.prod(shape)
    if group is not None and group < 1:
        raise RuntimeError(f"group_size must be at least 1, but is {group}")
    if group is not None and cols % group != 0:
        raise RuntimeError(
            f"group_size is {group}, which does not divide the {cols} elements of "
            f"normalized_shape {shape}"
        )


_sharding.register_where_loaded()
