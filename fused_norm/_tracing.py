"""A norm or softmax as ``torch.compile`` and ``torch.export`` see it: one operator, whose Autograd
kernel differentiates, or its decomposition (``config.decompose``, and for ONNX)."""

import math

import torch

from fused_norm import _C, _arguments, _decompositions, _ops, _torch, config

PLAIN = (torch.Tensor, torch.nn.Parameter)  # what no subclass has changed


@_torch.constant
def is_onnx_export() -> bool:
    """Whether an export to ONNX is at work, by torch.export or by torch.jit.trace."""
    return (_torch.is_exporting() or torch.jit.is_tracing()) and torch.onnx.is_in_onnx_export()


def decomposes() -> bool:
    """Whether a norm is traced as torch's elementary operators: where the user asks for it, and in
    an export to ONNX, whose operators are the only ones there."""
    return (config.decompose and torch.compiler.is_compiling()) or is_onnx_export()


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


# What compiled code was compiled for. Dynamo guards on it wherever a room was chosen, so that a
# change compiles all such code anew, and each norm is looked at again. A string: of a number that
# changes Dynamo would make a symbol.
_generation = "0"


def compile_anew() -> None:
    """With more room for listed columns, where they are needed (csrc/core/norm/room.h)."""
    global _generation
    _generation = str(int(_generation) + 1)


@_torch.constant  # called with the parameters themselves
def _look(weight, bias, weight_offset, x_dtype, y_dtype, generation) -> int:
    """The room for listed columns, or -1 to save the input, from the parameters as they are.
    Without a generation they are not looked at: 0, or -1 if code is no longer compiled anew. Under
    torch.func nothing can be looked at."""
    if _torch.in_functorch() or not all(
        param is None or type(param) in PLAIN for param in (weight, bias)
    ):
        return -1
    args = (weight, bias, weight_offset, x_dtype, y_dtype)
    return _C.traced_room(*args, int(generation or _generation), generation is not None)


def _is_parameter(tensor) -> bool:
    """Whether the next call finds the same tensor: not one that is computed in each call."""
    return (
        tensor is None
        or isinstance(tensor, torch.nn.Parameter)
        or (tensor.is_leaf and tensor.requires_grad)
    )


def _room(call) -> int | None:
    """The room for listed columns of a memory_efficient call; None if it has no list."""
    if not torch.is_grad_enabled() or 0 in call.normalized_shape:
        return None
    if _torch.is_exporting():  # nobody can look at the parameters
        cols = math.prod(call.normalized_shape)
        is_plain = type(call.input) in PLAIN or isinstance(call.input, _torch.FakeTensor)
        return min(cols, -(-max(16, cols // 256) // 4) * 4) if is_plain else None
    wanted = [t.requires_grad for t in (*call[:3], call.residual) if t is not None]
    # A DTensor saves its input, traced or not; and what has no gradient saves nothing.
    if type(call.input) not in PLAIN or not any(wanted):
        return None
    weight, bias = call.weight, call.bias
    if weight is None and bias is None:
        return 1  # without parameters no column is lost
    if not (_is_parameter(weight) and _is_parameter(bias)):
        return None
    x_dtype = call.input.dtype if call.residual is None else call.residual_dtype
    args = (weight, bias, *numbers(call.weight_offset), x_dtype, call.out_dtype)
    if _look(*args, None) < 0:  # whatever the generation: it is not to be guarded on
        return None
    room = _look(*args, _generation)
    # A weight that is no Parameter may have fewer columns in the next call.
    return min(room, math.prod(call.normalized_shape)) if room > 0 else None


def numbers(*values) -> list:
    """For checks that need numbers: Dynamo makes a symbol of a float that changed between calls."""
    from torch.fx.experimental.symbolic_shapes import guard_scalar  # slow to load, but loaded then

    return [guard_scalar(value) for value in values]


def norm_forward(*args, memory_efficient) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(output, residual_out); the arguments are the operator's, with memory_efficient for room."""
    call = _ops.NormCall(*args)
    if call.residual is not None:
        call = call._replace(residual_dtype=call.residual_dtype or call.residual.dtype)
    if decomposes():
        eps, weight_offset = numbers(call.eps, call.weight_offset)
        call = call._replace(eps=eps, weight_offset=weight_offset)
        _ops.check_rows(_ops.norm_forward, call)
        return _outputs(call, _decompositions.norm_forward(*call))
    room = _room(call) if memory_efficient else None
    if not _torch.is_exporting():
        return _outputs(call, _ops.norm_forward(*call._replace(room=room)))
    # Without dtypes among the arguments: see softmax().
    _ops.check_rows(_ops.norm_forward, call)
    input, residual, out_dtype = call.input, call.residual, call.out_dtype
    residual_out = None
    if residual is not None and out_dtype is not input.dtype:
        input = residual_out = _decompositions.add(input, residual, call.residual_dtype)
        residual = None
    if residual is not None:
        residual = residual.to(call.residual_dtype)
    elif out_dtype is torch.float32:
        input = input.to(out_dtype)
    without_dtypes = {"out_dtype": None, "residual_dtype": None}
    call = call._replace(input=input, residual=residual, room=room, **without_dtypes)
    output, added = _outputs(call, _ops.norm_forward(*call))
    return output.to(out_dtype), added if residual_out is None else residual_out


def _outputs(call, results) -> tuple:
    return results[0], None if call.residual is None else results[1]


def softmax(input, dim, log, out_dtype, *options) -> torch.Tensor:
    """The arguments are the operator's."""
    if out_dtype is not None and _torch.is_exporting():
        # torch's ahead-of-time runtime reads an optional dtype as its neighbour. The arithmetic is
        # in fp32 in any case: a conversion before it or after it gives the same numbers.
        input, out_dtype = input.to(out_dtype), None
    functions = _decompositions if is_onnx_export() else _ops
    return functions.softmax_forward(input, dim, log, out_dtype, *options)
