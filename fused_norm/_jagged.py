"""Nested tensors of the layout ``torch.jagged``: a norm, or a softmax, of dimensions that lie
within their rows is that of the tensor that holds the rows of all of them.

What reaches beyond a row is refused, and so are nested tensors of other layouts.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fused_norm import _torch


def _check(name: str, value: Tensor) -> None:
    if not value.is_nested or value.layout is not torch.jagged:
        what = f"nested of layout {value.layout}" if value.is_nested else "dense"
        raise RuntimeError(
            f"{name} must be a dense strided tensor, or nested of layout torch.jagged as all of "
            f"them, but is {what}"
        )


def of_rows(norm: Callable, normalized_shape, **tensors: Tensor):
    """What ``norm`` gives for the rows of the tensors, nested as the first one."""
    for name, tensor in tensors.items():
        _check(name, tensor)
    (first, input), *others = tensors.items()
    for name, tensor in others:
        if tensor.shape != input.shape:
            raise RuntimeError(
                f"{name} must have the shape of {first} {list(input.shape)}, but has shape "
                f"{list(tensor.shape)}"
            )
    within = input.dim() - _torch.ragged_dim(input) - 1
    if len(normalized_shape) > within:
        raise RuntimeError(
            f"normalized_shape is {list(normalized_shape)}, but {first} is nested of shape "
            f"{list(input.shape)}: only its last {within} dimension(s) can be normalized"
        )
    results = norm(*(_without_holes(tensor) for tensor in tensors.values()))
    return tuple(t if t is None else _torch.nested_as(input, t) for t in results)


def _without_holes(nested: Tensor) -> Tensor:
    """The rows of all tensors, with zeros in rows that belong to none of them: NaN there, times a
    gradient of zero, would reach the gradients of the parameters."""
    rows, lengths = nested.values(), nested.lengths()
    if lengths is None:
        return rows
    dim = _torch.ragged_dim(nested) - 1
    edges = torch.zeros(rows.shape[dim] + 1, dtype=torch.int32, device=rows.device)
    starts, one = nested.offsets()[: lengths.numel()], torch.ones_like(lengths, dtype=torch.int32)
    edges = edges.index_add(0, starts, one).index_add(0, starts + lengths, -one)
    is_hole = edges.cumsum(0)[:-1] == 0
    return rows.masked_fill(is_hole.view(-1, *[1] * (rows.dim() - dim - 1)), 0)


def of_dim(softmax: Callable, input: Tensor, dim: int) -> Tensor:
    """What ``softmax(rows, dim)`` gives for the rows of ``input``, nested as it is."""
    _check("input", input)
    ndim = input.dim()
    if not -ndim <= dim < ndim:
        raise IndexError(
            f"dim is {dim}, but input has {ndim} dimensions: dim must be in [{-ndim}, {ndim - 1}]"
        )
    dim %= ndim
    if dim in (0, _torch.ragged_dim(input)):
        raise RuntimeError(
            f"dim is {dim}, but input is nested of shape {list(input.shape)}: its dimensions 0 and "
            f"{_torch.ragged_dim(input)} are no dimensions of one tensor"
        )
    return _torch.nested_as(input, softmax(input.values(), dim - 1))
