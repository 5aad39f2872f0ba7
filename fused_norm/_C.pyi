"""The operators of ``torch.ops.fused_norm`` without the dispatcher; they do not differentiate. And
what ``fused_norm.functional`` calls."""

from collections.abc import Callable, Sequence
from typing import Literal, TypedDict

import torch
from torch import Tensor

_Tier = Literal["auto", "warp", "block", "uncached"]

class _BuildInfo(TypedDict):
    version: str
    torch: str
    cuda: str | None
    arch_list: list[str]
    cxx: str

def norm_forward(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: Sequence[int],
    eps: float,
    weight_offset: float = 0.0,
    rms: bool = False,
    out_dtype: torch.dtype | None = None,
    residual: Tensor | None = None,
    residual_dtype: torch.dtype | None = None,
    room: int | None = None,
) -> list[Tensor]:
    """Returns [output, mean, rstd], where mean is empty with ``rms``; with a residual [output,
    residual_out, mean, rstd], where ``residual_out`` is ``input + residual``. With ``room`` for
    listed columns it is [rstd, side, columns] in place of [mean, rstd]."""

def norm_backward(
    dy: Tensor,
    saved: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: Sequence[int],
    weight_offset: float,
    rms: bool,
    from_output: bool,
    input_dtype: torch.dtype,
    output_mask: Sequence[bool],
    side: Tensor | None = None,
    columns: Tensor | None = None,
    dresidual: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns (dx, dweight, dbias), None where ``output_mask`` is false. ``dresidual`` is added to
    dx.

    ``saved`` is the input, with its ``mean`` unless ``rms``, or the output with ``from_output``,
    then perhaps with the ``side`` and ``columns`` of :func:`norm_forward`.
    """

def unrecoverable_columns(
    weight: Tensor | None, bias: Tensor | None, weight_offset: float, out_dtype: torch.dtype
) -> Tensor:
    """Counts the columns whose normalized input an output of ``out_dtype`` does not determine."""

def softmax_forward(
    input: Tensor,
    dim: int,
    log: bool = False,
    out_dtype: torch.dtype | None = None,
    tier: _Tier = "auto",
) -> Tensor:
    """Softmax over ``dim``, or its logarithm.

    ``tier`` forces where the kernels keep a row, for measurements; an error where it does not hold
    one.
    """

def scaled_masked_softmax(
    input: Tensor,
    mask: Tensor | None,
    scale: float = 1.0,
    causal: bool = False,
    out_dtype: torch.dtype | None = None,
    tier: _Tier = "auto",
) -> Tensor:
    """Softmax of ``scale * input`` over the last dimension, without what is masked."""

def softmax_backward(
    dy: Tensor,
    output: Tensor,
    dim: int,
    log: bool,
    input_dtype: torch.dtype,
    scale: float = 1.0,
    tier: _Tier = "auto",
) -> Tensor:
    """The gradient of the input of either of the above, from its output."""

def norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: Sequence[int],
    eps: float,
    weight_offset: float,
    rms: bool,
    out_dtype: torch.dtype | None,
    residual: Tensor | None,
    residual_dtype: torch.dtype | None,
    memory_efficient: bool,
) -> tuple[Tensor, Tensor | None] | None:
    """(output, residual_out) of a norm, recorded for autograd where it is to be differentiated.
    None for arguments of other types, and under torch.jit.trace."""

def softmax(input: Tensor, dim: int, log: bool, out_dtype: torch.dtype | None) -> Tensor | None:
    """The operator softmax_forward, recorded for autograd, by a shorter way than ``torch.ops``.
    None under torch.jit.trace."""

def record_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: Sequence[int],
    eps: float,
    weight_offset: float,
    rms: bool,
    out_dtype: torch.dtype | None,
    residual: Tensor | None,
    residual_dtype: torch.dtype | None,
    room: int | None,
) -> list[Tensor]:
    """The results of :func:`norm_forward`, recorded. With ``room`` it is the output that is
    saved."""

def traced_room(
    weight: Tensor | None,
    bias: Tensor | None,
    weight_offset: float,
    x_dtype: torch.dtype,
    y_dtype: torch.dtype,
    generation: int,
    looks: bool,
) -> int:
    """The room for listed columns of a call that is traced, or -1 if it is to save its input, from
    a look at the parameters, for which it waits; without a look 0, or -1 for good."""

def before_optimizer_step() -> bool:
    """Raises if gradients are NaN for want of room; says whether compiled code should be compiled
    anew, with more."""

def after_optimizer_step() -> None:
    """Says that an optimizer changed its parameters."""

def set_overflow_message(message: Callable[[list[tuple[int, str, int]]], str]) -> None:
    """Of norms without room: an address and description of a parameter, and how many columns."""

def check_norm_options(
    input: torch.dtype,
    weight: torch.dtype | None,
    bias: torch.dtype | None,
    out: torch.dtype,
    eps: float,
    weight_offset: float,
) -> None:
    """Raises what :func:`norm_forward` raises for these dtypes and numbers, for where no kernel
    runs. So do the next three."""

def check_add_norm_options(
    input: torch.dtype,
    residual: torch.dtype,
    residual_out: torch.dtype,
    weight: torch.dtype | None,
    bias: torch.dtype | None,
    out: torch.dtype,
    eps: float,
    weight_offset: float,
) -> None: ...
def check_softmax_options(input: torch.dtype, out: torch.dtype, ndim: int, dim: int) -> None: ...
def check_masked_softmax_options(
    input: torch.dtype,
    mask: torch.dtype | None,
    out: torch.dtype,
    ndim: int,
    scale: float,
    causal: bool,
) -> None: ...
def attention(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    attn_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    rng: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    softcap: float,
    window_left: int | None,
    window_right: int | None,
    top_left: bool,
    dropout_p: float,
) -> tuple[Tensor, Tensor] | None:
    """The operator attention_forward, recorded for autograd, by a shorter way than ``torch.ops``;
    None for arguments of other types."""

def force_attention_tier(name: Literal["auto", "plain", "portable", "hopper"]) -> None:
    """Which kernels run attention on CUDA, for tests and measurements; an error at the next call
    that they do not take."""

def build_info() -> _BuildInfo: ...
