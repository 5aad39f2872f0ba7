"""What the package calls beside the operators of ``torch.ops.fused_norm``."""

from collections.abc import Callable, Sequence
from typing import Literal, TypedDict

import torch
from torch import Tensor

class _BuildInfo(TypedDict):
    version: str
    torch: str
    cuda: str | None
    arch_list: list[str]
    cxx: str

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

def softmax(
    input: Tensor,
    dim: int,
    log: bool,
    out_dtype: torch.dtype | None,
    mask: Tensor | None,
    scale: float,
    causal: bool,
) -> Tensor | None:
    """The operator softmax_forward, recorded for autograd, by a shorter way than ``torch.ops``.
    None under torch.jit.trace."""

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

def before_optimizer_step(changed_unseen: bool) -> bool:
    """Raises if gradients are NaN for want of room, which it waits to know after unseen changes of
    parameters; says whether compiled code should be compiled anew, with more."""

def after_optimizer_step() -> None:
    """Says that an optimizer changed its parameters."""

def set_overflow_message(message: Callable[[list[tuple[int, str, int]]], str]) -> None:
    """Of norms without room: an address and description of a parameter, and how many columns."""

def unrecoverable_columns(
    weight: Tensor | None, bias: Tensor | None, weight_offset: float, out_dtype: torch.dtype
) -> int:
    """How many columns of a norm with these parameters, of which one is given, cannot be taken back
    from an output of this dtype."""

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
    scale: float | None,
    softcap: float,
    window_left: int | None,
    window_right: int | None,
    top_left: bool,
    dropout_p: float,
) -> tuple[Tensor, Tensor] | None:
    """The operator attention_forward, recorded for autograd, by a shorter way than ``torch.ops``;
    None for arguments of other types."""

def check_attention(*args: Tensor | float | None) -> None:
    """The checks of a call of :func:`attention`, but for its rng."""

def force_attention_tier(name: Literal["auto", "plain", "portable", "hopper"]) -> None:
    """Which kernels run attention on CUDA, for tests and measurements; an error at the next call
    that they do not take."""

def force_softmax_tier(name: Literal["auto", "warp", "block", "uncached"]) -> None:
    """Where the kernels of softmaxes keep a row of the last dimension, likewise."""

def build_info() -> _BuildInfo: ...
