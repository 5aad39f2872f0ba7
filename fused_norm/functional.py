"""Functional norms. See each function for shapes, dtypes and errors."""

import numbers
from collections.abc import Sequence

import torch
from torch import Tensor

from fused_norm import _autograd, _ops

_SIXTEEN_BIT = (torch.float16, torch.bfloat16)


def _out_dtype(input: Tensor, rms: bool, memory_efficient: bool) -> torch.dtype:
    """The output's dtype under autocast: torch's rule for the same operator, and the autocast dtype
    with ``memory_efficient``, because a saved fp32 copy would undo the saving."""
    dtype = input.dtype
    device_type = input.device.type
    if dtype is torch.float64 or device_type not in ("cuda", "cpu"):
        return dtype
    if not torch.is_autocast_enabled(device_type):
        return dtype
    if memory_efficient:
        return dtype if dtype in _SIXTEEN_BIT else torch.get_autocast_dtype(device_type)
    if device_type == "cuda" and not rms and dtype in _SIXTEEN_BIT:
        return torch.float32
    return dtype


def _norm(
    input, weight, bias, normalized_shape, eps, weight_offset, rms, memory_efficient
) -> Tensor:
    if isinstance(normalized_shape, numbers.Integral):
        normalized_shape = (int(normalized_shape),)
    args = (
        input,
        weight,
        bias,
        normalized_shape,
        eps,
        weight_offset,
        rms,
        _out_dtype(input, rms, memory_efficient),
    )
    if (
        torch.compiler.is_compiling()
    ):  # one operator in the graph; its Autograd kernel differentiates
        return _ops.norm_forward(*args)[0]
    if torch.is_grad_enabled() and (
        input.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
    ):
        return _autograd.NormFunction.apply(*args, memory_efficient)[0]
    return _ops.call_below_autograd(_ops.norm_forward, *args)[0]


def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    memory_efficient: bool = False,
) -> Tensor:
    """``(input - mean) / sqrt(var + eps) * weight + bias`` over the last dimensions.

    A drop-in for :func:`torch.nn.functional.layer_norm` (Ba et al., *Layer Normalization*, 2016).
    ``var`` is the biased variance; statistics are taken in fp32 (fp64 for fp64 input) by Welford's
    method.

    Args:
        input: ``(*, *normalized_shape)`` in fp16, bf16, fp32 or fp64. Rows may be strided: slices
            of a packed tensor and transposed batches are read in place.
        normalized_shape: the dimensions to normalize over.
        weight, bias: ``normalized_shape``, in input's dtype or fp32; fp32 input also takes 16-bit
            ones.
        eps: added to the variance; finite and not negative.
        memory_efficient: save the output, not the input, for backward (docs/memory_efficient.md).

    Returns:
        A contiguous tensor of input's shape. Its dtype is input's; under autocast on CUDA fp32, as
        torch has it, and the autocast dtype with ``memory_efficient``.

    Raises:
        RuntimeError: an argument's shape, dtype, device, layout or value does not fit; the message
            names it. Also where a second derivative is asked for.
    """
    return _norm(input, weight, bias, normalized_shape, eps, 0.0, False, memory_efficient)


def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    memory_efficient: bool = False,
    weight_offset: float = 0.0,
) -> Tensor:
    """``input / sqrt(mean(input^2) + eps) * (weight + weight_offset)`` over the last dimensions.

    A drop-in for :func:`torch.nn.functional.rms_norm` (Zhang and Sennrich, *Root Mean Square Layer
    Normalization*, 2019).

    Args:
        input: ``(*, *normalized_shape)`` in fp16, bf16, fp32 or fp64; rows may be strided.
        normalized_shape: the dimensions to normalize over.
        weight: ``normalized_shape``, in input's dtype or fp32; fp32 input also takes 16-bit ones.
        eps: finite and not negative. ``None`` is fp32's machine epsilon, fp64's for fp64 input.
        memory_efficient: save the output, not the input, for backward (docs/memory_efficient.md).
        weight_offset: added to the weight in fp32 inside the kernel; 1.0 for zero-centred
            (Gemma-style) weights.

    Returns:
        A contiguous tensor of input's shape and dtype; with ``memory_efficient`` under autocast, of
        the autocast dtype.

    Raises:
        RuntimeError: an argument's shape, dtype, device, layout or value does not fit; the message
            names it. Also where a second derivative is asked for.
    """
    if eps is None:
        eps = torch.finfo(torch.float64 if input.dtype is torch.float64 else torch.float32).eps
    return _norm(input, weight, None, normalized_shape, eps, weight_offset, True, memory_efficient)
