"""How ``torch.vmap`` sees the operators. Of a norm a batch dimension is more rows, for as long as
the parameters have none, and else a dimension for the decompositions to broadcast over; of a
softmax it is more rows in any case."""

import dataclasses

import torch
from torch import Tensor

from fused_norm import _decompositions, _ops


@dataclasses.dataclass(frozen=True)
class _One:
    """One tensor of a batch, as far as the operators' checks ask."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def dim(self) -> int:
        return len(self.shape)


def _one_of_each(in_dims, *tensors) -> list:
    """The tensors as the function sees them that is mapped over their batch dimensions."""
    return [
        tensor
        if tensor is None or dim is None
        else _One(tensor.shape[:dim] + tensor.shape[dim + 1 :], tensor.dtype, tensor.device)
        for tensor, dim in zip(tensors, in_dims, strict=False)
    ]


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
    options = (normalized_shape, eps, weight_offset, rms, out_dtype)
    _ops.check_norm_arguments(*_one_of_each(in_dims, input, weight, bias), *options)
    input = _with_batch(input, in_dims[0], info.batch_size)
    is_kernel = in_dims[1] is None and in_dims[2] is None
    function = _ops.norm_forward if is_kernel else _decompositions.norm_forward
    weight = _parameter(weight, in_dims[1], input.dim())
    bias = _parameter(bias, in_dims[2], input.dim())
    outputs = function(input, weight, bias, *options)
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
    options = (normalized_shape, eps, weight_offset, rms, out_dtype)
    _ops.check_norm_arguments(*_one_of_each(in_dims, input, weight, bias), *options)
    input = _with_batch(input, in_dims[0], info.batch_size)
    weight = _parameter(weight, in_dims[1], input.dim())
    bias = _parameter(bias, in_dims[2], input.dim())
    output, rstd, side, columns = _decompositions.norm_forward_listing(
        input, weight, bias, *options, room
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
    options = (normalized_shape, eps, weight_offset, rms, residual_dtype, out_dtype)
    _ops.check_add_norm_arguments(*_one_of_each(in_dims, input, residual, weight, bias), *options)
    input = _with_batch(input, in_dims[0], info.batch_size)
    residual = _with_batch(residual, in_dims[1], info.batch_size)
    is_kernel = in_dims[2] is None and in_dims[3] is None
    function = _ops.add_norm_forward if is_kernel else _decompositions.add_norm_forward
    weight = _parameter(weight, in_dims[2], input.dim())
    bias = _parameter(bias, in_dims[3], input.dim())
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
    options = (normalized_shape, eps, weight_offset, rms, residual_dtype, out_dtype)
    _ops.check_add_norm_arguments(*_one_of_each(in_dims, input, residual, weight, bias), *options)
    input = _with_batch(input, in_dims[0], info.batch_size)
    residual = _with_batch(residual, in_dims[1], info.batch_size)
    weight = _parameter(weight, in_dims[2], input.dim())
    bias = _parameter(bias, in_dims[3], input.dim())
    *outputs, side, columns = _decompositions.add_norm_forward_listing(
        input, residual, weight, bias, *options, room
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


def _softmax_dim(dim: int, ndim: int) -> int:
    """``dim`` of a tensor of ``ndim`` dimensions where a batch dimension stands before them."""
    return dim + 1 if dim >= 0 else dim + max(ndim, 1) + 1


@torch.library.register_vmap("fused_norm::softmax_forward")
def _softmax_forward(info, in_dims, input, dim, log=False, out_dtype=None):
    x = _with_batch(input, in_dims[0], info.batch_size)
    ndim = x.dim() - 1
    _ops._C.check_softmax_options(input.dtype, out_dtype or input.dtype, ndim, dim)
    rows = x if ndim else x.unsqueeze(-1)
    return _ops.softmax_forward(rows, _softmax_dim(dim, ndim), log, out_dtype).view(x.shape), 0


@torch.library.register_vmap("fused_norm::scaled_masked_softmax")
def _scaled_masked_softmax(info, in_dims, input, mask, scale=1.0, causal=False, out_dtype=None):
    x = _with_batch(input, in_dims[0], info.batch_size)
    ndim = x.dim() - 1
    mask_ndim = 0 if mask is None else mask.dim() - (in_dims[1] is not None)
    _ops._C.check_masked_softmax_options(
        input.dtype,
        None if mask is None else mask.dtype,
        out_dtype or input.dtype,
        ndim,
        scale,
        causal,
    )
    if mask_ndim > ndim:
        raise RuntimeError(
            f"mask has {mask_ndim} dimensions, which does not broadcast to input's {ndim} (without "
            "those of vmap)"
        )
    rows = x if ndim else x.unsqueeze(-1)
    mask = _parameter(mask, in_dims[1], rows.dim())
    return _ops.scaled_masked_softmax(rows, mask, scale, causal, out_dtype).view(x.shape), 0


@torch.library.register_vmap("fused_norm::softmax_backward")
def _softmax_backward(info, in_dims, dy, output, dim, log, input_dtype, scale=1.0):
    dy = _with_batch(dy, in_dims[0], info.batch_size)
    output = _with_batch(output, in_dims[1], info.batch_size)
    ndim = dy.dim() - 1
    _ops._C.check_softmax_options(input_dtype, dy.dtype, ndim, dim)
    shape = dy.shape
    if ndim == 0:
        dy, output = dy.unsqueeze(-1), output.unsqueeze(-1)
    dim = _softmax_dim(dim, ndim)
    return _ops.softmax_backward(dy, output, dim, log, input_dtype, scale).view(shape), 0
