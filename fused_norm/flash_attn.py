"""flash-attn 2.8's functions under their own names, by this library's attention.

``from fused_norm.flash_attn import flash_attn_func`` in place of ``from flash_attn import ...``
(Dao-AILab/flash-attention): the same signatures, shapes, defaults and bottom-right alignment.

``deterministic`` is accepted and always true. With ``return_attn_probs=True`` the result is
``(out, softmax_lse, None)``: probabilities are never in memory.

The options, which all functions take after their tensors, by position or by name: ``dropout_p``;
``softmax_scale``, ``None`` for 1 / sqrt(head dim); ``causal``; ``window_size`` ``(left, right)``,
-1 for no limit; ``softcap``, 0 or less for none; ``alibi_slopes`` fp32 ``(heads,)`` or
``(batch, heads)``; ``deterministic``; ``return_attn_probs``.
"""

import functools
import inspect

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from fused_norm import _attention, _sharding

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
]


def _limits(window_size, causal) -> tuple:
    """(left, right), None for no limit. Without a right limit of its own causal has 0."""
    left, right = (None if limit < 0 else limit for limit in window_size)
    return left, 0 if causal else right


def _run(
    query,
    key,
    value,
    sizes,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
):
    """Of tensors of the operator's order of dimensions; sizes: both offsets and both lengths."""
    offsets, max_seqlens = sizes[:2], sizes[2:]
    if block_table is not None:
        raise NotImplementedError(
            f"block_table must be None, as paged keys are not supported, but has shape "
            f"{list(block_table.shape)}"
        )
    if type(query) is not Tensor:
        _sharding.register_where_loaded()
    out, lse = _attention.attention(
        (query, key, value, None, alibi_slopes, None, *offsets),
        max_seqlens,
        scale=softmax_scale,
        softcap=max(softcap, 0.0),
        window=_limits(window_size, causal),
        dropout_p=dropout_p,
    )
    if offsets[0] is None:
        out = out.transpose(1, 2)
    return (out, lse, None) if return_attn_probs else out


_DENSE = (None, None, 0, 0)
_OPTIONS = list(inspect.signature(_run).parameters.values())[4:]


def _with_options(function):
    """The function with the options of :func:`_run` in its signature, honouring __torch_function__
    of its tensors. flash-attn has ``block_table`` in one function alone."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if has_torch_function(tensors):
            return handle_torch_function(call, tensors, *args, **kwargs)
        return function(*args, **kwargs)

    own = inspect.signature(function).parameters.values()
    first = [p for p in own if p.kind is p.POSITIONAL_OR_KEYWORD]
    options = _OPTIONS if function.__name__ == "flash_attn_varlen_func" else _OPTIONS[:-1]
    call.__signature__ = inspect.Signature([*first, *options])
    return call


def _check_dims(name: str, tensor: Tensor, dims: str, stacked: int = 0) -> None:
    """Of tensors whose dimensions are put in another order before the operator sees them."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, but is of type {type(tensor).__name__}")
    names = dims.split()
    if tensor.dim() != len(names) or (stacked and tensor.shape[-3] != stacked):
        raise RuntimeError(
            f"{name} must be ({', '.join(names)}), but has shape {list(tensor.shape)}"
        )


@_with_options
def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *options, **named):
    """Attention of q ``(B, Sq, Hq, D)``, k and v ``(B, Sk, Hk, D)``.

    Returns ``(B, Sq, Hq, D)``; with ``return_attn_probs`` ``(out, softmax_lse (B, Hq, Sq), None)``.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_dims(name, tensor, "batch rows heads head_dim")
    tensors = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return _run(*tensors, _DENSE, *options, **named)


@_with_options
def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *options, **named):
    """:func:`flash_attn_func` of kv ``(B, Sk, 2, Hk, D)``, whose gradient is one tensor."""
    _check_dims("q", q, "batch rows heads head_dim")
    _check_dims("kv", kv, "batch rows 2 heads head_dim", stacked=2)
    return _run(q.transpose(1, 2), kv.permute(2, 0, 3, 1, 4), None, _DENSE, *options, **named)


@_with_options
def flash_attn_qkvpacked_func(qkv: Tensor, *options, **named):
    """:func:`flash_attn_func` of qkv ``(B, S, 3, H, D)``, whose gradient is one tensor."""
    _check_dims("qkv", qkv, "batch rows 3 heads head_dim", stacked=3)
    return _run(qkv.permute(2, 0, 3, 1, 4), None, None, _DENSE, *options, **named)


@_with_options
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *options,
    **named,
):
    """Attention of packed sequences: q ``(Tq, Hq, D)``, k and v ``(Tk, Hk, D)``, offsets int32
    ``(B + 1,)`` on their device.

    Returns ``(Tq, Hq, D)``; with ``return_attn_probs`` ``(out, softmax_lse (Hq, Tq), None)``. A
    ``block_table`` (paged keys) is not supported.
    """
    sizes = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _run(q, k, v, sizes, *options, **named)


@_with_options
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *options,
    **named,
):
    """:func:`flash_attn_varlen_func` of kv ``(Tk, 2, Hk, D)``, whose gradient is one tensor."""
    _check_dims("kv", kv, "rows 2 heads head_dim", stacked=2)
    sizes = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _run(q, kv.transpose(0, 1), None, sizes, *options, **named)


@_with_options
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *options, **named
):
    """:func:`flash_attn_varlen_func` of qkv ``(T, 3, H, D)``, whose gradient is one tensor."""
    _check_dims("qkv", qkv, "rows 3 heads head_dim", stacked=3)
    sizes = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return _run(qkv.transpose(0, 1), None, None, sizes, *options, **named)
