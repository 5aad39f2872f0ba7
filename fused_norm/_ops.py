"""The operators of ``torch.ops.fused_norm`` as Python sees them: fake kernels, and calls without
autograd.

Schemas and kernels are registered in C++ when ``_C`` loads (csrc/ops/bindings.cpp).
"""

import importlib.util
import math
from pathlib import Path
from typing import Any

import torch

try:
    from fused_norm import _C  # loading the extension registers the operators
except ImportError as error:
    if importlib.util.find_spec("fused_norm._C") is None:
        raise ImportError(
            f"fused_norm in {Path(__file__).parent} is not compiled. These are the sources: run "
            "`make build` there, or start Python elsewhere to use an installed fused_norm."
        ) from None
    raise ImportError(
        f"fused_norm's extension does not load: {error}. After a change of torch, install "
        "fused_norm again."
    ) from error

norm_forward = torch.ops.fused_norm.norm_forward.default
norm_forward_listing = torch.ops.fused_norm.norm_forward_listing.default
norm_backward = torch.ops.fused_norm.norm_backward.default
unrecoverable_columns = torch.ops.fused_norm.unrecoverable_columns.default


def call_below_autograd(op, *args) -> Any:
    """Calls ``op`` past its Autograd kernel, which would build the graph a second time."""
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


def _stats_shape(shape, row_dims: int) -> list:
    return [*shape[: len(shape) - row_dims], *([1] * row_dims)]


@torch.library.register_fake("fused_norm::norm_forward")
def _norm_forward_fake(
    input, weight, bias, normalized_shape, eps, weight_offset=0.0, rms=False, out_dtype=None
):
    _C.check_norm_options(
        input.dtype,
        None if weight is None else weight.dtype,
        None if bias is None else bias.dtype,
        out_dtype or input.dtype,
        eps,
        weight_offset,
    )
    row_dims = len(normalized_shape)
    torch._check(
        row_dims > 0, lambda: "normalized_shape must have at least one dimension, but is []"
    )
    torch._check(
        input.dim() >= row_dims
        and list(input.shape[input.dim() - row_dims :]) == list(normalized_shape),
        lambda: (
            f"normalized_shape is {list(normalized_shape)}, but input has shape "
            f"{list(input.shape)}, whose last dimensions differ from it"
        ),
    )
    for name, param in (("weight", weight), ("bias", bias)):
        if param is None:
            continue
        torch._check(
            list(param.shape) == list(normalized_shape),
            lambda name=name, param=param: (
                f"{name} must have the shape of normalized_shape "
                f"{list(normalized_shape)}, but has shape {list(param.shape)}"
            ),
        )
        torch._check(
            param.device == input.device,
            lambda name=name, param=param: (
                f"{name} is on {param.device}, but input is on {input.device}"
            ),
        )
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
):
    dx = dy.new_empty(dy.shape, dtype=input_dtype) if output_mask[0] else None
    dweight = weight.new_empty(weight.shape) if output_mask[1] and weight is not None else None
    dbias = bias.new_empty(bias.shape) if output_mask[2] and bias is not None else None
    return dx, dweight, dbias


@torch.library.register_fake("fused_norm::unrecoverable_columns")
def _unrecoverable_columns_fake(weight, bias, weight_offset, out_dtype):
    param = weight if weight is not None else bias
    return param.new_empty([], dtype=torch.int64)
