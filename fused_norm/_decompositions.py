"""The norm operators as chains of torch's own, for what the kernels do not do: second and higher
derivatives, forward-mode derivatives, torch.func transforms, and compilers that are to fuse a norm
with its neighbours.

Same arguments and results as the operators of the same names; arithmetic and dtypes as in the
kernels, roundings in the last place aside. Every function is differentiable in every tensor.
"""

import torch
from torch import Tensor


def _accumulate_dtype(input_dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if input_dtype is torch.float64 else torch.float32


def _row_dims(normalized_shape) -> list[int]:
    return list(range(-len(normalized_shape), 0))


def _affine(weight, bias, weight_offset, dtype):
    g = None if weight is None else weight.to(dtype) + weight_offset
    return g, None if bias is None else bias.to(dtype)


def norm_forward(
    input, weight, bias, normalized_shape, eps, weight_offset=0.0, rms=False, out_dtype=None
) -> tuple[Tensor, Tensor, Tensor]:
    """(output, mean, rstd); mean is empty with ``rms``."""
    dtype = _accumulate_dtype(input.dtype)
    dims = _row_dims(normalized_shape)
    x = input.to(dtype)
    if rms:
        mean = x.new_empty([0])
    else:
        mean = x.mean(dims, keepdim=True)
        x = x - mean
    rstd = torch.rsqrt((x * x).mean(dims, keepdim=True) + eps)
    output = x * rstd
    g, b = _affine(weight, bias, weight_offset, dtype)
    if g is not None:
        output = output * g
    if b is not None:
        output = output + b
    return output.to(out_dtype or input.dtype), mean, rstd


def _listed(columns, cols):
    """Where listed columns lie; unused places are that of a column past the end."""
    places = torch.arange(columns.numel() - 1, device=columns.device)
    return torch.where(places < columns[0], columns[1:].long(), cols)


def _with_listed(rows, columns, values):
    """``rows`` (M, N) with the listed columns from ``values`` (M, room)."""
    room_past_end = rows.new_zeros(rows.shape[0], 1)
    index = _listed(columns, rows.shape[1])
    return torch.cat([rows, room_past_end], 1).index_copy(1, index, values)[:, :-1]


def _xhat(
    saved,
    mean,
    rstd,
    weight,
    bias,
    normalized_shape,
    weight_offset,
    rms,
    from_output,
    side=None,
    columns=None,
):
    dtype = rstd.dtype
    if not from_output:
        x = saved.to(dtype)
        return (x if rms else x - mean) * rstd
    g, b = _affine(weight, bias, weight_offset, dtype)
    xhat = saved.to(dtype)
    if b is not None:
        xhat = xhat - b
    if g is not None:
        xhat = xhat / g
    if side is not None:
        rows = xhat.reshape(side.shape[0], -1)
        xhat = _with_listed(rows, columns, side).reshape(xhat.shape)
    return xhat


def norm_backward(
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
    *,
    batch_dims=0,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dweight, dbias), None where ``output_mask`` is false. The parameters' gradients keep the
    first ``batch_dims`` dimensions.

    A function of ``rstd`` and ``mean`` as well: they are functions of the input, and their own
    derivatives are :func:`statistics_backward`.
    """
    dtype = rstd.dtype
    dims = _row_dims(normalized_shape)
    leading = list(range(batch_dims, dy.dim() - len(normalized_shape)))
    dy = dy.to(dtype)
    options = (normalized_shape, weight_offset, rms, from_output, side, columns)
    xhat = _xhat(saved, mean, rstd, weight, bias, *options)
    dx = dweight = dbias = None
    if output_mask[0]:
        g, _ = _affine(weight, None, weight_offset, dtype)
        h = dy if g is None else dy * g
        dx = h - xhat * (h * xhat).mean(dims, keepdim=True)
        if not rms:
            dx = dx - h.mean(dims, keepdim=True)
        dx = (rstd * dx).to(input_dtype)
    # A sum over no dimensions would be one over all.
    if output_mask[1] and weight is not None:
        dweight = dy * xhat
        dweight = (dweight.sum(leading) if leading else dweight).to(weight.dtype)
    if output_mask[2] and bias is not None:
        dbias = (dy.sum(leading) if leading else dy).to(bias.dtype)
    return dx, dweight, dbias


def statistics_backward(
    dmean,
    drstd,
    dside,
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
    side=None,
    columns=None,
) -> Tensor:
    """The input's gradient from those of the statistics and of the listed columns' ``xhat``, any of
    which may be None:

    d rstd / d x = -rstd^2 xhat / N,    d mean / d x = 1 / N,
    d xhat_c / d x_j = rstd (delta_cj - 1 / N - xhat_c xhat_j / N)    (RMSNorm: without 1 / N)
    """
    cols = 1
    for size in normalized_shape:
        cols = cols * size
    dims = _row_dims(normalized_shape)
    options = (normalized_shape, weight_offset, rms, from_output, side, columns)
    xhat = _xhat(saved, mean, rstd, weight, bias, *options)
    dx = torch.zeros_like(saved, dtype=rstd.dtype)
    if drstd is not None:
        dx = dx - drstd * rstd.square() * xhat / cols
    if dmean is not None:
        dx = dx + dmean / cols
    if dside is not None:
        dxhat = _with_listed(dx.new_zeros(dside.shape[0], cols), columns, dside).reshape(dx.shape)
        term = dxhat - xhat * (dxhat * xhat).mean(dims, keepdim=True)
        dx = dx + rstd * (term if rms else term - dxhat.mean(dims, keepdim=True))
    return dx.to(input_dtype)
