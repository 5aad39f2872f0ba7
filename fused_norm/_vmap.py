"""How ``torch.vmap`` sees the norm operators: a batch dimension is more rows, for as long as the
parameters have none, and else a dimension for the decompositions to broadcast over."""

import torch
from torch import Tensor

from fused_norm import _decompositions, _ops


def _batch_first(tensor: Tensor | None, dim: int | None) -> Tensor | None:
    return tensor if tensor is None or dim is None else tensor.movedim(dim, 0)


def _with_batch(tensor: Tensor, dim: int | None, batch_size: int) -> Tensor:
    if dim is None:
        return tensor.expand(batch_size, *tensor.shape)
    return tensor.movedim(dim, 0)


def _parameter(tensor: Tensor | None, dim: int | None, input_dims: int) -> Tensor | None:
    """A parameter that broadcasts against an input of ``input_dims`` dimensions, batch first."""
    tensor = _batch_first(tensor, dim)
    if tensor is None or dim is None:
        return tensor
    between = input_dims - tensor.dim()
    return tensor.reshape(tensor.shape[0], *[1] * between, *tensor.shape[1:])


@torch.library.register_vmap("fused_norm::norm_forward")
def _norm_forward(
    info,
    in_dims,
    input,
    weight,
    bias,
    normalized_shape,
    eps,
    weight_offset=0.0,
    rms=False,
    out_dtype=None,
):
    input = _with_batch(input, in_dims[0], info.batch_size)
    is_kernel = in_dims[1] is None and in_dims[2] is None
    function = _ops.norm_forward if is_kernel else _decompositions.norm_forward
    weight = _parameter(weight, in_dims[1], input.dim())
    bias = _parameter(bias, in_dims[2], input.dim())
    outputs = function(input, weight, bias, normalized_shape, eps, weight_offset, rms, out_dtype)
    return outputs, (0, None if rms else 0, 0)


@torch.library.register_vmap("fused_norm::norm_forward_listing")
def _norm_forward_listing(
    info,
    in_dims,
    input,
    weight,
    bias,
    normalized_shape,
    eps,
    weight_offset,
    rms,
    out_dtype,
    room,
):
    """By decomposition: no list of columns serves a batch of them."""
    input = _with_batch(input, in_dims[0], info.batch_size)
    weight = _parameter(weight, in_dims[1], input.dim())
    bias = _parameter(bias, in_dims[2], input.dim())
    output, rstd, side, columns = _decompositions.norm_forward_listing(
        input, weight, bias, normalized_shape, eps, weight_offset, rms, out_dtype, room
    )
    return (output, rstd, side.view(info.batch_size, -1, room), columns), (0, 0, 0, None)


@torch.library.register_vmap("fused_norm::add_norm_forward")
def _add_norm_forward(
    info,
    in_dims,
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
    input = _with_batch(input, in_dims[0], info.batch_size)
    residual = _with_batch(residual, in_dims[1], info.batch_size)
    is_kernel = in_dims[2] is None and in_dims[3] is None
    function = _ops.add_norm_forward if is_kernel else _decompositions.add_norm_forward
    weight = _parameter(weight, in_dims[2], input.dim())
    bias = _parameter(bias, in_dims[3], input.dim())
    options = (normalized_shape, eps, weight_offset, rms, residual_dtype, out_dtype)
    outputs = function(input, residual, weight, bias, *options)
    return outputs, (0, 0, None if rms else 0, 0)


@torch.library.register_vmap("fused_norm::add_norm_forward_listing")
def _add_norm_forward_listing(
    info,
    in_dims,
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
    """By decomposition, as norm_forward_listing."""
    input = _with_batch(input, in_dims[0], info.batch_size)
    residual = _with_batch(residual, in_dims[1], info.batch_size)
    weight = _parameter(weight, in_dims[2], input.dim())
    bias = _parameter(bias, in_dims[3], input.dim())
    options = (normalized_shape, eps, weight_offset, rms, residual_dtype, out_dtype, room)
    *outputs, side, columns = _decompositions.add_norm_forward_listing(
        input, residual, weight, bias, *options
    )
    return (*outputs, side.view(info.batch_size, -1, room), columns), (0, 0, 0, 0, None)


@torch.library.register_vmap("fused_norm::norm_backward")
def _norm_backward(info, in_dims, dy, saved, mean, rstd, weight, bias, *options):
    """By decomposition: the gradients of parameters are sums within each row of the batch."""
    options, (side, columns, dresidual) = options[:6], (*options[6:], None, None, None)[:3]
    if side is not None:
        side = _with_batch(side, in_dims[12], info.batch_size)
    if dresidual is not None:
        dresidual = _with_batch(dresidual, in_dims[14], info.batch_size)
    dy = _with_batch(dy, in_dims[0], info.batch_size)
    saved = _with_batch(saved, in_dims[1], info.batch_size)
    mean, rstd = _batch_first(mean, in_dims[2]), _batch_first(rstd, in_dims[3])
    weight = _parameter(weight, in_dims[4], dy.dim())
    bias = _parameter(bias, in_dims[5], dy.dim())
    gradients = _decompositions.norm_backward(
        dy, saved, mean, rstd, weight, bias, *options, side, columns, dresidual, batch_dims=1
    )
    return gradients, tuple(None if g is None else 0 for g in gradients)
