"""A norm as ``torch.compile`` and ``torch.export`` see it: one operator, whose Autograd kernel
differentiates, or its decomposition (``config.decompose``)."""

import math

import torch

from fused_norm import _decompositions, _ops, config

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _fixed_room(cols: int) -> int:
    """The room for listed columns of a traced call; captured ones: csrc/ops/column_watch.cpp."""
    return min(cols, -(-max(16, cols // 256) // 4) * 4)


def norm_forward(
    input, weight, bias, normalized_shape, eps, weight_offset, rms, out_dtype, memory_efficient
) -> torch.Tensor:
    """The output."""
    args = (input, weight, bias, normalized_shape, eps, weight_offset, rms)
    if config.decompose:
        _ops.check_norm_arguments(*args, out_dtype)
        return _decompositions.norm_forward(*args, out_dtype)[0]
    # Not torch.compiler.is_exporting(), which torch.compile too evaluates to True.
    if not torch.compiler._is_exporting_flag:
        cols = math.prod(normalized_shape)
        # A DTensor saves its input, traced or not.
        if memory_efficient and torch.is_grad_enabled() and cols > 0 and type(input) in _PLAIN:
            return _ops.norm_forward_listing(*args, out_dtype, _fixed_room(cols))[0]
        return _ops.norm_forward(*args, out_dtype)[0]
    # Exported graphs hold no dtype among the operator's arguments: torch's ahead-of-time runtime
    # reads an optional one as its neighbour. The arithmetic is in fp32 in any case, so a
    # conversion before or after it gives the same numbers.
    if out_dtype is torch.float32:
        input = input.to(out_dtype)
    args = (input, weight, bias, normalized_shape, eps, weight_offset, rms)
    return _ops.norm_forward(*args)[0].to(out_dtype)
