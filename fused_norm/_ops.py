"""The operators of ``torch.ops.fused_norm`` as Python sees them: fake kernels, and calls without
autograd.

Schemas and kernels are registered in C++ when ``_C`` loads (csrc/ops/bindings.cpp), with which
_load.py begins.
"""

import math
from typing import Any

import torch

from fused_norm import _C, _sharding

norm_forward = torch.ops.fused_norm.norm_forward.default
norm_forward_listing = torch.ops.fused_norm.norm_forward_listing.default
norm_backward = torch.ops.fused_norm.norm_backward.default
add_norm_forward = torch.ops.fused_norm.add_norm_forward.default
add_norm_forward_listing = torch.ops.fused_norm.add_norm_forward_listing.default
unrecoverable_columns = torch.ops.fused_norm.unrecoverable_columns.default
softmax_forward = torch.ops.fused_norm.softmax_forward.default
scaled_masked_softmax = torch.ops.fused_norm.scaled_masked_softmax.default
softmax_backward = torch.ops.fused_norm.softmax_backward.default
attention_forward = torch.ops.fused_norm.attention_forward.default
attention_backward = torch.ops.fused_norm.attention_backward.default
attention_rng = torch.ops.fused_norm.attention_rng.default


def call_below_autograd(op, *args) -> Any:
    """Calls ``op`` past its Autograd kernel, which would build the graph a second time."""
    if type(args[0]) is not torch.Tensor:  # a DTensor, perhaps the first
        _sharding.register_where_loaded()
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


def _stats_shape(shape, row_dims: int) -> list:
    return [*shape[: len(shape) - row_dims], *([1] * row_dims)]


def _check_norm_options(input, weight, bias, out, eps, weight_offset) -> bool:
    _C.check_norm_options(input, weight, bias, out, eps, weight_offset)
    return True


# torch.compiler.assume_constant_result, without loading the compiler: a tracer runs it and keeps no
# trace of it.
_check_norm_options._dynamo_marked_constant = True


def _check_add_norm_options(input, residual, residual_out, *options) -> bool:
    _C.check_add_norm_options(input, residual, residual_out, *options)
    return True


_check_add_norm_options._dynamo_marked_constant = True


def _dtype_of(tensor) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def check_norm_arguments(
    input, weight, bias, normalized_shape, eps, weight_offset=0.0, rms=False, out_dtype=None
) -> None:
    """The operator's own checks, for where it does not run."""
    options = (_dtype_of(weight), _dtype_of(bias), out_dtype or input.dtype, eps, weight_offset)
    _check_norm_options(input.dtype, *options)
    _check_shapes(input, weight, bias, normalized_shape, rms)


def check_add_norm_arguments(
    input,
    residual,
    weight,
    bias,
    normalized_shape,
    eps,
    weight_offset=0.0,
    rms=False,
    residual_dtype=None,
    out_dtype=None,
) -> None:
    """The same of ``add_norm_forward``."""
    options = (_dtype_of(weight), _dtype_of(bias), out_dtype or input.dtype, eps, weight_offset)
    residual_dtype = residual_dtype or residual.dtype
    _check_add_norm_options(input.dtype, residual.dtype, residual_dtype, *options)
    if residual.shape != input.shape:
        raise RuntimeError(
            f"residual must have the shape of input {list(input.shape)}, but has shape "
            f"{list(residual.shape)}"
        )
    if residual.device != input.device:
        raise RuntimeError(f"residual is on {residual.device}, but input is on {input.device}")
    _check_shapes(input, weight, bias, normalized_shape, rms)


def _check_shapes(input, weight, bias, normalized_shape, rms) -> None:
    shape = list(normalized_shape)
    if not shape:
        raise RuntimeError("normalized_shape must have at least one dimension, but is []")
    if input.dim() < len(shape) or list(input.shape[input.dim() - len(shape) :]) != shape:
        raise RuntimeError(
            f"normalized_shape is {shape}, but input has shape {list(input.shape)}, whose last "
            "dimensions differ from it"
        )
    if rms and bias is not None:
        raise RuntimeError(f"bias must be None with rms=True, but has shape {list(bias.shape)}")
    for name, param in (("weight", weight), ("bias", bias)):
        if param is None:
            continue
        if list(param.shape) != shape:
            raise RuntimeError(
                f"{name} must have the shape of normalized_shape {shape}, but has shape "
                f"{list(param.shape)}"
            )
        if param.device != input.device:
            raise RuntimeError(f"{name} is on {param.device}, but input is on {input.device}")


@torch.library.register_fake("fused_norm::norm_forward")
def _norm_forward_fake(
    input, weight, bias, normalized_shape, eps, weight_offset=0.0, rms=False, out_dtype=None
):
    check_norm_arguments(input, weight, bias, normalized_shape, eps, weight_offset, rms, out_dtype)
    row_dims = len(normalized_shape)
    stats_dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
    output = input.new_empty(input.shape, dtype=out_dtype or input.dtype)
    rstd = input.new_empty(_stats_shape(input.shape, row_dims), dtype=stats_dtype)
    mean = rstd.new_empty([0]) if rms else torch.empty_like(rstd)
    return output, mean, rstd


@torch.library.register_fake("fused_norm::norm_forward_listing")
def _norm_forward_listing_fake(
    input, weight, bias, normalized_shape, eps, weight_offset, rms, out_dtype, room
):
    output, _, rstd = _norm_forward_fake(
        input, weight, bias, normalized_shape, eps, weight_offset, rms, out_dtype
    )
    side = rstd.new_empty([math.prod(input.shape[: input.dim() - len(normalized_shape)]), room])
    return output, rstd, side, rstd.new_empty([1 + room], dtype=torch.int32)


@torch.library.register_fake("fused_norm::norm_backward")
def _norm_backward_fake(
    dy,
    saved,
    mean,
    rstd,
    weight,
    bias,
    normalized_shape,
    weight_offset,
    rms,
    from_output,
    input_dtype,
    output_mask,
    side=None,
    columns=None,
    dresidual=None,
):
    dx = dy.new_empty(dy.shape, dtype=input_dtype) if output_mask[0] else None
    dweight = weight.new_empty(weight.shape) if output_mask[1] and weight is not None else None
    dbias = bias.new_empty(bias.shape) if output_mask[2] and bias is not None else None
    return dx, dweight, dbias


@torch.library.register_fake("fused_norm::add_norm_forward")
def _add_norm_forward_fake(
    input,
    residual,
    weight,
    bias,
    normalized_shape,
    eps,
    weight_offset=0.0,
    rms=False,
    residual_dtype=None,
    out_dtype=None,
):
    options = (weight, bias, normalized_shape, eps, weight_offset, rms)
    check_add_norm_arguments(input, residual, *options, residual_dtype, out_dtype)
    residual_out = input.new_empty(input.shape, dtype=residual_dtype or residual.dtype)
    output, mean, rstd = _norm_forward_fake(residual_out, *options, out_dtype or input.dtype)
    return output, residual_out, mean, rstd


@torch.library.register_fake("fused_norm::add_norm_forward_listing")
def _add_norm_forward_listing_fake(
    input,
    residual,
    weight,
    bias,
    normalized_shape,
    eps,
    weight_offset,
    rms,
    residual_dtype,
    out_dtype,
    room,
):
    options = (weight, bias, normalized_shape, eps, weight_offset, rms)
    check_add_norm_arguments(input, residual, *options, residual_dtype, out_dtype)
    residual_out = input.new_empty(input.shape, dtype=residual_dtype or residual.dtype)
    out_dtype = out_dtype or input.dtype
    output, *others = _norm_forward_listing_fake(residual_out, *options, out_dtype, room)
    return output, residual_out, *others


@torch.library.register_fake("fused_norm::unrecoverable_columns")
def _unrecoverable_columns_fake(weight, bias, weight_offset, out_dtype):
    param = weight if weight is not None else bias
    return param.new_empty([], dtype=torch.int64)


@torch.library.register_fake("fused_norm::softmax_forward")
def _softmax_forward_fake(input, dim, log=False, out_dtype=None):
    dtype = out_dtype or input.dtype
    _C.check_softmax_options(input.dtype, dtype, input.dim(), dim)
    return input.new_empty(input.shape, dtype=dtype)


@torch.library.register_fake("fused_norm::scaled_masked_softmax")
def _scaled_masked_softmax_fake(input, mask, scale=1.0, causal=False, out_dtype=None):
    dtype = out_dtype or input.dtype
    _C.check_masked_softmax_options(
        input.dtype, None if mask is None else mask.dtype, dtype, input.dim(), scale, causal
    )
    if mask is not None:
        torch._check(
            mask.device == input.device,
            lambda: f"mask is on {mask.device}, but input is on {input.device}",
        )
        lead = input.dim() - mask.dim()
        # Of a size that depends on data it is known that it is the input's, not that it is not 1.
        torch._check(
            lead >= 0
            and all(
                (isinstance(size, int) and size == 1) or size == of_input or size == 1
                for size, of_input in zip(mask.shape, input.shape[lead:], strict=True)
            ),
            lambda: (
                f"mask has shape {list(mask.shape)}, which does not broadcast to input's shape "
                f"{list(input.shape)}"
            ),
        )
    return input.new_empty(input.shape, dtype=dtype)


@torch.library.register_fake("fused_norm::softmax_backward")
def _softmax_backward_fake(dy, output, dim, log, input_dtype, scale=1.0):
    _C.check_softmax_options(input_dtype, dy.dtype, dy.dim(), dim)
    return dy.new_empty(dy.shape, dtype=input_dtype)


_sharding.register_where_loaded()
