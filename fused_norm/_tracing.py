"""A norm as ``torch.compile`` and ``torch.export`` see it: one operator, whose Autograd kernel
differentiates, or its decomposition (``config.decompose``)."""

import math

import torch

from fused_norm import _decompositions, _ops, config

PLAIN = (torch.Tensor, torch.nn.Parameter)  # what no subclass has changed


def _fixed_room(cols: int) -> int:
    """The room for listed columns of a traced call; captured ones: csrc/ops/column_watch.cpp."""
    return min(cols, -(-max(16, cols // 256) // 4) * 4)


def _can_list(input, normalized_shape) -> bool:
    # A DTensor saves its input, traced or not. torch.export traces fake tensors.
    is_plain = type(input) in PLAIN or isinstance(input, torch._subclasses.FakeTensor)
    return torch.is_grad_enabled() and math.prod(normalized_shape) > 0 and is_plain


def _numbers(*values) -> list:
    """For checks that need numbers: Dynamo makes a symbol of a float that changed between calls."""
    from torch.fx.experimental.symbolic_shapes import guard_scalar  # slow to load, but loaded then

    return [guard_scalar(value) for value in values]


def norm_forward(
    input, weight, bias, normalized_shape, eps, weight_offset, rms, out_dtype, memory_efficient
) -> torch.Tensor:
    """The output."""
    if config.decompose:
        args = (input, weight, bias, normalized_shape, *_numbers(eps, weight_offset), rms)
        _ops.check_norm_arguments(*args, out_dtype)
        return _decompositions.norm_forward(*args, out_dtype)[0]
    args = (input, weight, bias, normalized_shape, eps, weight_offset, rms)
    lists = memory_efficient and _can_list(input, normalized_shape)
    # Not torch.compiler.is_exporting(), which torch.compile too evaluates to True.
    if not torch.compiler._is_exporting_flag:
        if lists:
            room = _fixed_room(math.prod(normalized_shape))
            return _ops.norm_forward_listing(*args, out_dtype, room)[0]
        return _ops.norm_forward(*args, out_dtype)[0]
    # Exported graphs hold no dtype among the operator's arguments: torch's ahead-of-time runtime
    # reads an optional one as its neighbour. The arithmetic is in fp32 in any case, so a
    # conversion before or after it gives the same numbers.
    if out_dtype is torch.float32:
        input = input.to(out_dtype)
    args = (input, weight, bias, normalized_shape, eps, weight_offset, rms)
    if lists:
        room = _fixed_room(math.prod(normalized_shape))
        return _ops.norm_forward_listing(*args, None, room)[0].to(out_dtype)
    return _ops.norm_forward(*args)[0].to(out_dtype)


def add_norm_forward(
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
    memory_efficient,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, residual_out)."""
    if config.decompose:
        eps, weight_offset = _numbers(eps, weight_offset)
    options = (weight, bias, normalized_shape, eps, weight_offset, rms)
    args = (input, residual, *options, residual_dtype, out_dtype)
    if config.decompose:
        _ops.check_add_norm_arguments(*args)
        return _decompositions.add_norm_forward(*args)[:2]
    lists = memory_efficient and _can_list(input, normalized_shape)
    if not torch.compiler._is_exporting_flag:
        if lists:
            room = _fixed_room(math.prod(normalized_shape))
            return _ops.add_norm_forward_listing(*args, room)[:2]
        return _ops.add_norm_forward(*args)[:2]
    _ops.check_add_norm_arguments(*args)
    if out_dtype is input.dtype:  # both dtypes are the operator's defaults
        args = (input, residual.to(residual_dtype), *options)
        if lists:
            room = _fixed_room(math.prod(normalized_shape))
            return _ops.add_norm_forward_listing(*args, None, None, room)[:2]
        return _ops.add_norm_forward(*args)[:2]
    residual_out = _decompositions.add(input, residual, residual_dtype)
    output = norm_forward(residual_out, *options, out_dtype, memory_efficient)
    return output, residual_out
