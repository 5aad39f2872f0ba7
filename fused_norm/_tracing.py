"""A norm as ``torch.compile`` and ``torch.export`` see it: one operator, whose Autograd kernel
differentiates, or its decomposition (``config.decompose``)."""

import torch

from fused_norm import _C, _decompositions, _ops, config

PLAIN = (torch.Tensor, torch.nn.Parameter)  # what no subclass has changed


class _Rooms:
    """What compiled code was compiled for. Dynamo guards on ``generation`` wherever a room was
    chosen, so that a change compiles all such code anew, and each norm is looked at again. A
    string: of a number that changes Dynamo would make a symbol."""

    generation = "0"


_rooms = _Rooms()


def compile_anew() -> None:
    """With more room for listed columns, where they are needed (csrc/core/norm/room.h)."""
    _rooms.generation = str(int(_rooms.generation) + 1)


def _look(weight, bias, weight_offset, x_dtype, y_dtype, generation) -> int:
    """The room for listed columns, or -1 to save the input, from the parameters as they are. 0, or
    -1 for good, where no generation is given."""
    if not all(param is None or type(param) in PLAIN for param in (weight, bias)):
        return -1
    args = (weight, bias, weight_offset, x_dtype, y_dtype)
    return _C.traced_room(*args, int(generation or _rooms.generation), generation is not None)


# torch.compiler.assume_constant_result, without loading the compiler: a tracer runs it, with the
# parameters themselves, and keeps no trace of it.
_look._dynamo_marked_constant = True


def _is_parameter(tensor) -> bool:
    """Whether the next call finds the same tensor: not one that is computed in each call."""
    return (
        tensor is None
        or isinstance(tensor, torch.nn.Parameter)
        or (tensor.is_leaf and tensor.requires_grad)
    )


def _room(input, weight, bias, normalized_shape, weight_offset, x_dtype, y_dtype) -> int:
    """The room for listed columns of a memory_efficient call; 0 or less: it has no list."""
    # A DTensor saves its input, traced or not.
    if not torch.is_grad_enabled() or type(input) not in PLAIN or 0 in normalized_shape:
        return -1
    if weight is None and bias is None:
        return 1  # without parameters no column is lost
    if not (_is_parameter(weight) and _is_parameter(bias)):
        return -1
    (weight_offset,) = _numbers(weight_offset)
    args = (weight, bias, weight_offset, x_dtype, y_dtype)
    if _look(*args, None) < 0:  # whatever the generation: it is not to be guarded on
        return -1
    return _look(*args, _rooms.generation)


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
    # Not torch.compiler.is_exporting(), which torch.compile too evaluates to True.
    if not torch.compiler._is_exporting_flag:
        if memory_efficient:
            room = _room(
                input, weight, bias, normalized_shape, weight_offset, input.dtype, out_dtype
            )
            if room > 0:
                return _ops.norm_forward_listing(*args, out_dtype, room)[0]
        return _ops.norm_forward(*args, out_dtype)[0]
    # Exported graphs hold no dtype among the operator's arguments: torch's ahead-of-time runtime
    # reads an optional one as its neighbour. The arithmetic is in fp32 in any case, so a
    # conversion before or after it gives the same numbers.
    if out_dtype is torch.float32:
        input = input.to(out_dtype)
    args = (input, weight, bias, normalized_shape, eps, weight_offset, rms)
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
    if not torch.compiler._is_exporting_flag:
        if memory_efficient:
            room = _room(
                input, weight, bias, normalized_shape, weight_offset, residual_dtype, out_dtype
            )
            if room > 0:
                return _ops.add_norm_forward_listing(*args, room)[:2]
        return _ops.add_norm_forward(*args)[:2]
    _ops.check_add_norm_arguments(*args)
    if out_dtype is input.dtype:  # both dtypes are the operator's defaults
        return _ops.add_norm_forward(input, residual.to(residual_dtype), *options)[:2]
    residual_out = _decompositions.add(input, residual, residual_dtype)
    return norm_forward(residual_out, *options, out_dtype, False), residual_out
