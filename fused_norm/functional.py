"""Functional norms, softmaxes and attention. See each function for shapes, dtypes and errors."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.overrides import has_torch_function_variadic

from fused_norm import _C, _arguments, _autocast, _jagged, _torch, _tracing
from fused_norm import _autograd as _autograd  # registers the operators' derivatives
from fused_norm import _flops as _flops  # and what they count as
from fused_norm._attention import (
    flash_attention,
    flash_attention_varlen,
    scaled_dot_product_attention,
)
from fused_norm._gated import rms_norm_gated

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "flash_attention",
    "flash_attention_varlen",
    "layer_norm",
    "log_softmax",
    "rms_norm",
    "rms_norm_gated",
    "scaled_dot_product_attention",
    "scaled_masked_softmax",
    "softmax",
]


def _out_dtype(input: Tensor, rms: bool, memory_efficient: bool) -> torch.dtype:
    """The output's dtype under autocast: torch's rule for the same operator, and the autocast dtype
    with ``memory_efficient``, because a saved fp32 copy would undo the saving."""
    dtype = input.dtype
    autocast = _autocast.dtype_for(input)
    if autocast is None or dtype is torch.float64:
        return dtype
    if dtype in _autocast.SIXTEEN_BIT:
        to_fp32 = input.is_cuda and not rms and not memory_efficient
        return torch.float32 if to_fp32 else dtype
    return autocast if memory_efficient else dtype


def _norm(
    input, weight, bias, normalized_shape, eps, weight_offset, rms, memory_efficient,
    out_dtype=None, residual=None, residual_dtype=None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(output, residual_out)"""
    if type(input) is not Tensor:
        _arguments.tensor("input", input)
    is_compiling = torch.compiler.is_compiling()
    if type(normalized_shape) is not tuple or is_compiling:  # a wrong element is found below
        normalized_shape = _arguments.shape(normalized_shape)
    if type(eps) is not float:
        eps = _arguments.rms_eps(input, eps) if rms else _arguments.number("eps", eps)
    if type(weight_offset) is not float or type(memory_efficient) is not bool:
        weight_offset = _arguments.number("weight_offset", weight_offset)
        memory_efficient = _arguments.flag("memory_efficient", memory_efficient)
    if input.is_nested or (residual is not None and residual.is_nested):
        options = (normalized_shape, eps, weight_offset, rms, memory_efficient, out_dtype)
        return _jagged.of_rows(
            lambda x, r=None: _norm(x, weight, bias, *options, r, residual_dtype),
            normalized_shape,
            input=input,
            **({} if residual is None else {"residual": residual}),
        )
    out_dtype = out_dtype or _out_dtype(input, rms, memory_efficient)
    options = (normalized_shape, eps, weight_offset, rms, out_dtype, residual, residual_dtype)
    if not is_compiling:
        try:
            outputs = _C.norm(input, weight, bias, *options, memory_efficient)
        except ValueError:  # of an int of more than 64 bits, which does not say where
            _arguments.shape(normalized_shape)
            raise
        if outputs is not None:
            return outputs
    # A tracer is to record an operator; or an argument is of a type that the extension has not.
    _arguments.optional_tensor("weight", weight)
    _arguments.optional_tensor("bias", bias)
    args = (input, weight, bias, _arguments.shape(normalized_shape), *options[1:])
    if not (is_compiling or torch.jit.is_tracing()):
        return _C.norm(*args, memory_efficient)
    outputs = _tracing.norm_forward(*args, memory_efficient=memory_efficient and is_compiling)
    if is_compiling and rms and residual is None and input.dim() in (4, 5):
        format = _torch.suggest_memory_format(input)
        return outputs[0].contiguous(memory_format=format), None
    return outputs


def _norm_to(out_dtype, input, weight, bias, *options) -> Tensor:
    """The output of :func:`_norm` in any dtype, of parameters of any dtype. The kernel's store
    converts to and from fp32; elsewhere a wider input or a second rounding does."""
    dtypes = {input.dtype, out_dtype}
    if torch.float64 in dtypes:
        input = input.to(torch.float64)
    elif len(dtypes) > 1 and torch.float32 not in dtypes:
        input = input.to(torch.float32)
    stored = torch.float64 if torch.float64 in dtypes else out_dtype
    # 16-bit parameters that no operator takes beside this input come in fp32, which holds them all.
    refused = () if input.dtype is torch.float32 else {*_autocast.SIXTEEN_BIT} - {input.dtype}
    weight, bias = (
        p.to(torch.float32) if p is not None and p.dtype in refused else p for p in (weight, bias)
    )
    return _norm(input, weight, bias, *options, stored)[0].to(out_dtype)


@_torch.overridable
def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    memory_efficient: bool = False,
    weight_offset: float = 0.0,
) -> Tensor:
    """``(input - mean) / sqrt(var + eps) * (weight + weight_offset) + bias`` over the last
    dimensions.

    A drop-in for :func:`torch.nn.functional.layer_norm` (Ba et al., *Layer Normalization*, 2016).
    ``var``, in fp32 (fp64 for fp64 input), is the mean of squared distances to the mean, merged by
    Chan's form of Welford's update.

    Args:
        input: ``(*, *normalized_shape)`` in fp16, bf16, fp32 or fp64. Slices and transposed batches
            are read in place; CUDA copies rows of whole multiples of 16 bytes that start elsewhere.
        normalized_shape: the dimensions to normalize over.
        weight, bias: ``normalized_shape``, in input's dtype or fp32; fp32 input also takes 16-bit
            ones.
        eps: added to the variance; finite and not negative.
        memory_efficient: save the output, not the input, for backward (docs/memory_efficient.md).
        weight_offset: added to the weight in fp32 inside the kernel; 1.0 for zero-centred weights
            (Megatron's ``layernorm_zero_centered_gamma``). Without a weight it must be 0.

    Returns:
        A contiguous tensor of input's shape. Its dtype is input's; under autocast on CUDA fp32 for
        16-bit input, as torch has it, and with ``memory_efficient`` the autocast dtype for fp32.

    Raises:
        RuntimeError: an argument's shape, dtype, device, layout or value does not fit; the message
            names it.
    """
    options = (normalized_shape, eps, weight_offset, False, memory_efficient)
    return _norm(input, weight, bias, *options)[0]


@_torch.overridable
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
    Normalization*, 2019). Arguments and errors are those of :func:`layer_norm`, but ``eps`` may be
    ``None``: fp32's machine epsilon, fp64's for fp64 input.

    Returns:
        A tensor of input's shape, contiguous, or ``channels_last`` where the input is. Its dtype is
        input's, but for fp32 under autocast with ``memory_efficient``: then the autocast dtype.
    """
    options = (normalized_shape, eps, weight_offset, True, memory_efficient)
    return _norm(input, weight, None, *options)[0]


def _add_norm(input, residual, weight, bias, residual_dtype, *options) -> tuple[Tensor, Tensor]:
    _arguments.tensor("input", input)
    _arguments.tensor("residual", residual)
    _arguments.optional_dtype("residual_dtype", residual_dtype)
    return _norm(input, weight, bias, *options, None, residual, residual_dtype)


@_torch.overridable
def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    memory_efficient: bool = False,
    weight_offset: float = 0.0,
    residual_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """``residual_out = input + residual; output = layer_norm(residual_out)`` in one kernel.

    What a transformer does between two layers: the sum goes on as the residual of the next
    addition, and its norm into the next layer. The gradient that comes back for ``residual_out`` is
    added inside the backward kernel. Errors, and arguments that are not named here, are those of
    :func:`layer_norm`.

    Args:
        residual: of input's shape, in input's dtype or ``residual_dtype``; rows may be strided.
        weight, bias: ``normalized_shape``, in fp32 or the dtype of ``residual_out``; an fp32
            ``residual_out`` also takes 16-bit ones.
        memory_efficient: save the output, not ``residual_out``, for backward.
        residual_dtype: of ``residual_out``: input's, or fp32 with 16-bit input, for a residual
            stream in fp32. ``None``: that of ``residual``.

    Returns:
        ``(output, residual_out)``, both contiguous and of input's shape. The sum is taken in fp32
        (fp64 for fp64) and rounded to ``residual_dtype`` before it is normalized. The output's
        dtype is that of :func:`layer_norm` of the input: input's, also where ``residual_out`` is
        fp32, but under autocast.

        Without ``memory_efficient`` backward needs ``residual_out``, with it ``output``: changing
        that one in place is an error.
    """
    options = (normalized_shape, eps, weight_offset, False, memory_efficient)
    return _add_norm(input, residual, weight, bias, residual_dtype, *options)


@_torch.overridable
def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    memory_efficient: bool = False,
    weight_offset: float = 0.0,
    residual_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """``residual_out = input + residual; output = rms_norm(residual_out)`` in one kernel.

    As :func:`add_layer_norm`, with ``eps`` and the output's dtype those of :func:`rms_norm`.
    """
    options = (normalized_shape, eps, weight_offset, True, memory_efficient)
    return _add_norm(input, residual, weight, None, residual_dtype, *options)


@_torch.constant
def _softmax_dim(name: str, ndim: int, stacklevel: int) -> int:
    """torch's rule, and its warning, for a dimension that is not given."""
    return torch.nn.functional._get_softmax_dim(name, ndim, stacklevel + 1)


def _softmax_out_dtype(input: Tensor) -> torch.dtype | None:
    """The output's dtype where the call does not name one: None for the input's, and fp32 for
    16-bit input under autocast on CUDA, where torch runs its softmaxes in fp32."""
    if input.dtype in _autocast.SIXTEEN_BIT and input.is_cuda and torch.is_autocast_enabled("cuda"):
        return torch.float32
    return None


def _softmax(input, dim, dtype, log, stacklevel) -> Tensor:
    if type(stacklevel) is not int:  # by position torch has _stacklevel before dtype
        dtype, stacklevel = stacklevel, dtype
    if has_torch_function_variadic(input) and _torch.is_overridden(input):
        return _torch.overridden(log_softmax if log else softmax, input, dim, dtype)
    if type(input) is not Tensor:
        _arguments.tensor("input", input)
    if dim is None:
        dim = _softmax_dim("log_softmax" if log else "softmax", input.dim(), stacklevel + 1)
    else:
        dim = _arguments.integer("dim", dim)
    if type(input) is not Tensor and input.is_nested:
        return _jagged.of_dim(
            lambda rows, dim: _softmax(rows, dim, dtype, log, stacklevel), input, dim
        )
    if dtype is None:
        dtype = _softmax_out_dtype(input)
    elif dtype is not torch.float32 or input.dtype not in _autocast.SIXTEEN_BIT:
        # No kernel converts these: first the conversion, if it is one, as torch has it.
        input, dtype = input.to(_arguments.floating_dtype(dtype)), None
    return _softmax_of(input, dim, log, dtype, None, 1.0, False)


def _softmax_of(*args) -> Tensor:
    """By the shorter way where there is one. The arguments are the operator's."""
    if not torch.compiler.is_compiling() and type(args[0]) in _tracing.PLAIN:
        output = _C.softmax(*args)
        if output is not None:  # as in torch.jit.trace
            return output
    return _tracing.softmax(*args)


def softmax(
    input: Tensor, dim: int | None = None, dtype: torch.dtype | None = None, _stacklevel: int = 3
) -> Tensor:
    """``exp(input) / sum(exp(input))`` over ``dim``, computed from ``input - max(input)``.

    A drop-in for :func:`torch.nn.functional.softmax`, in one pass over the input where a row fits
    on chip, and with an online maximum and sum (Milakov and Gimelshein, *Online normalizer
    calculation for softmax*, 2018) where it does not.

    Args:
        input: any shape, in fp16, bf16, fp32 or fp64. Rows may be strided; along another dimension
            than the last a tensor that is not contiguous is copied.
        dim: the dimension to sum over. ``None`` is torch's deprecated rule, with its warning: 0 for
            0, 1 or 3 dimensions, else 1.
        dtype: of the output; the arithmetic is in fp32 or better. fp32 from 16-bit input is
            converted inside the kernel. Every other change of dtype converts the input first, as in
            torch; only so can the input be of integers.

    Returns:
        A contiguous tensor of input's shape. Its dtype is ``dtype``, else input's, and for 16-bit
        input under autocast on CUDA fp32, as torch has it. A row whose maximum is infinite,
        ``-inf`` included, gives NaN, as in torch.

    Raises:
        IndexError: input has no dimension ``dim``.
        RuntimeError: input's dtype, layout or size does not fit; the message names it.
        TypeError: input is no tensor, or ``dtype`` no dtype.
    """
    return _softmax(input, dim, dtype, False, _stacklevel)


def log_softmax(
    input: Tensor, dim: int | None = None, dtype: torch.dtype | None = None, _stacklevel: int = 3
) -> Tensor:
    """``log(softmax(input))`` over ``dim``: ``input - max - log(sum(exp(input - max)))``.

    A drop-in for :func:`torch.nn.functional.log_softmax`. Arguments, result and errors are those of
    :func:`softmax`.
    """
    return _softmax(input, dim, dtype, True, _stacklevel)


@_torch.overridable
def scaled_masked_softmax(
    input: Tensor, mask: Tensor | None = None, scale: float = 1.0, causal: bool = False
) -> Tensor:
    """Softmax of ``scale * input`` over the last dimension, without what is masked.

    The softmax of attention scores, in one kernel (after that of Megatron-LM): the scale is applied
    in fp32 (fp64 for fp64 input), and the mask is read as it is, never expanded in memory.

    Args:
        input: ``(*, queries, keys)``, or any shape without ``causal``, in fp16, bf16, fp32 or fp64.
            Rows may be strided.
        mask: broadcasts to input's shape. Boolean: **True hides**, as in
            :meth:`torch.Tensor.masked_fill`, whatever the input holds there; **in the mask of**
            :func:`torch.nn.functional.scaled_dot_product_attention` **True shows**. fp16, bf16,
            fp32 or fp64: added to ``scale * input``; it is not differentiated, and fp64 is rounded
            to fp32 unless the input is fp64.
        scale: finite; multiplies the input.
        causal: key ``j`` is masked for query ``i`` where ``j > i + keys - queries``: the last query
            sees every key. May be combined with ``mask``.

    Returns:
        A contiguous tensor of input's shape and dtype; 16-bit input gives fp32 under autocast on
        CUDA, as :func:`softmax` does. **A row with every element masked (or ``-inf``) gives
        zeros**, and so is its gradient, where :func:`softmax` of ``-inf`` gives NaN. Without a mask
        and ``causal`` it is NaN here too.

    Raises:
        RuntimeError: an argument's shape, dtype, device, layout or value does not fit; the message
            names it. Also where ``mask`` requires grad.
    """
    if type(input) is not Tensor:
        _arguments.tensor("input", input, nested=False)
    if mask is not None and type(mask) is not Tensor:
        _arguments.optional_tensor("mask", mask, nested=False)
    if type(scale) is not float or type(causal) is not bool:
        scale, causal = _arguments.number("scale", scale), _arguments.flag("causal", causal)
    return _softmax_of(input, -1, False, _softmax_out_dtype(input), mask, scale, causal)
