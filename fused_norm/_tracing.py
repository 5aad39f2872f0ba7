"""A norm or softmax as ``torch.compile`` and ``torch.export`` see it: one operator, whose Autograd
kernel differentiates, or its decomposition (``config.decompose``, and for ONNX)."""

import math

import torch

from fused_norm import _C, _arguments, _decompositions, _ops, _torch, config

PLAIN = (torch.Tensor, torch.nn.Parameter)  # what no subclass has changed


@_torch.constant
def _is_onnx_export() -> bool:
    """Whether an export to ONNX is at work, by torch.export or by torch.jit.trace."""
    is_tracing = _torch.is_exporting() or torch.jit.is_tracing()
    return is_tracing and torch.onnx.is_in_onnx_export()


def decomposes() -> bool:
    """Whether a norm is traced as torch's elementary operators: where the user asks for it, and in
    an export to ONNX, whose operators are the only ones there."""
    return config.decompose or _is_onnx_export()


def compile_options(fuse_residuals: bool = True) -> dict:
    """Options for ``torch.compile(model, options=...)``, for Inductor:

    >>> compiled = torch.compile(model, options=fused_norm.compile_options())

    Args:
        fuse_residuals: an addition before a norm becomes a part of the norm's kernel, as in
            :func:`fused_norm.functional.add_layer_norm`, and so does, in the backward pass, the
            addition of the residual's gradient. Where a norm's backward is given the sum of matrix
            products, these add it up themselves. The model's code stays as it is. The forward pass
            gives the same bits; a gradient is rounded once where it was twice.

    Returns:
        A new dict, to be merged with other options. It takes Inductor's hook
        ``post_grad_custom_pre_pass``.
    """
    if not _arguments.flag("fuse_residuals", fuse_residuals):
        return {}
    from fused_norm._fusion import FuseResiduals  # loads the compiler

    return {"post_grad_custom_pre_pass": FuseResiduals()}


def _exported_room(input, normalized_shape) -> int | None:
    """As :func:`_room`, of an exported call, whose parameters nobody can look at."""
    cols = math.prod(normalized_shape)
    is_plain = type(input) in PLAIN or _torch.is_fake(input)
    if not torch.is_grad_enabled() or cols == 0 or not is_plain:
        return None
    return min(cols, -(-max(16, cols // 256) // 4) * 4)


class _Rooms:
    """What compiled code was compiled for. Dynamo guards on ``generation`` wherever a room was
    chosen, so that a change compiles all such code anew, and each norm is looked at again. A
    string: of a number that changes Dynamo would make a symbol."""

    generation = "0"


_rooms = _Rooms()


def compile_anew() -> None:
    """With more room for listed columns, where they are needed (csrc/core/norm/room.h)."""
    _rooms.generation = str(int(_rooms.generation) + 1)


@_torch.constant  # called with the parameters themselves
def _look(weight, bias, weight_offset, x_dtype, y_dtype, generation) -> int:
    """The room for listed columns, or -1 to save the input, from the parameters as they are. 0, or
    -1 for good, where no generation is given. Under torch.func nothing can be looked at."""
    if _torch.in_functorch() or not all(
        param is None or type(param) in PLAIN for param in (weight, bias)
    ):
        return -1
    args = (weight, bias, weight_offset, x_dtype, y_dtype)
    return _C.traced_room(*args, int(generation or _rooms.generation), generation is not None)


def _is_parameter(tensor) -> bool:
    """Whether the next call finds the same tensor: not one that is computed in each call."""
    return (
        tensor is None
        or isinstance(tensor, torch.nn.Parameter)
        or (tensor.is_leaf and tensor.requires_grad)
    )


def _room(input, weight, bias, normalized_shape, weight_offset, x_dtype, y_dtype) -> int | None:
    """The room for listed columns of a memory_efficient call; None if it has no list."""
    # A DTensor saves its input, traced or not.
    if not torch.is_grad_enabled() or type(input) not in PLAIN or 0 in normalized_shape:
        return None
    if weight is None and bias is None:
        return 1  # without parameters no column is lost
    if not (_is_parameter(weight) and _is_parameter(bias)):
        return None
    (weight_offset,) = numbers(weight_offset)
    args = (weight, bias, weight_offset, x_dtype, y_dtype)
    if _look(*args, None) < 0:  # whatever the generation: it is not to be guarded on
        return None
    room = _look(*args, _rooms.generation)
    return room if room > 0 else None


def numbers(*values) -> list:
    """For checks that need numbers: Dynamo makes a symbol of a float that changed between calls."""
    from torch.fx.experimental.symbolic_shapes import guard_scalar  # slow to load, but loaded then

    return [guard_scalar(value) for value in values]


def _outputs(results, residual) -> tuple:
    return results[0], None if residual is None else results[1]


def norm_forward(
    input, weight, bias, normalized_shape, eps, weight_offset, rms, out_dtype, residual,
    residual_dtype, memory_efficient,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """(output, residual_out); the arguments are the operator's, with memory_efficient for room."""
    if decomposes():
        eps, weight_offset = numbers(eps, weight_offset)
    options = (normalized_shape, eps, weight_offset, rms)
    if residual is not None:
        residual_dtype = residual_dtype or residual.dtype
    args = (input, weight, bias, *options, out_dtype, residual, residual_dtype)
    if decomposes():
        _ops.check_rows(_ops.norm_forward, _ops.NormCall(*args))
        return _outputs(_decompositions.norm_forward(*args), residual)
    if not _torch.is_exporting():
        room = None
        if memory_efficient:
            x_dtype = input.dtype if residual is None else residual_dtype
            room = _room(input, weight, bias, normalized_shape, weight_offset, x_dtype, out_dtype)
        return _outputs(_ops.norm_forward(*args, room), residual)
    # Exported graphs hold no dtype among the operator's arguments: torch's ahead-of-time runtime
    # reads an optional one as its neighbour. The arithmetic is in fp32 in any case, so a
    # conversion before or after it gives the same numbers.
    _ops.check_rows(_ops.norm_forward, _ops.NormCall(*args))
    residual_out = None
    if residual is not None and out_dtype is not input.dtype:
        input = residual_out = _decompositions.add(input, residual, residual_dtype)
        residual = None
    if residual is not None:
        residual = residual.to(residual_dtype)
    elif out_dtype is torch.float32:
        input = input.to(out_dtype)
    room = _exported_room(input, normalized_shape) if memory_efficient else None
    results = _ops.norm_forward(input, weight, bias, *options, None, residual, None, room)
    if residual is not None:
        residual_out = results[1]
    return results[0].to(out_dtype), residual_out


def recorded_norm(*args) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As ``torch.jit.trace`` is to record it: without ``memory_efficient``."""
    op = _ops.norm_forward
    if _is_onnx_export():
        _ops.check_rows(_ops.norm_forward, _ops.NormCall(*args))
        op = _decompositions.norm_forward
    return _outputs(op(*args), args[8])


def softmaxes():
    """The module whose ``softmax_forward`` and ``scaled_masked_softmax`` are to be called."""
    return _decompositions if _is_onnx_export() else _ops
