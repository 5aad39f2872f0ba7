"""flash-attn 2.8's functions, all but ``flash_attn_with_kvcache``, by this library's attention.

``from fused_norm.flash_attn import flash_attn_func`` in place of ``from flash_attn import ...``
(Dao-AILab/flash-attention): the same signatures, shapes, defaults and bottom-right alignment.

``deterministic`` is accepted and always true. With ``return_attn_probs=True`` the result is
``(out, softmax_lse, None)``: probabilities are never in memory.

The options, which all functions take after their tensors, by position or by name: ``dropout_p``;
``softmax_scale``, ``None`` for 1 / sqrt(head dim); ``causal``; ``window_size`` ``(left, right)``,
-1 for no limit; ``softcap``, 0 or less for none; ``alibi_slopes`` fp32 ``(heads,)`` or
``(batch, heads)``; ``deterministic``; ``return_attn_probs``.
"""

import re
from typing import Any

import torch
from torch import Tensor

from fused_norm import _arguments, _attention, _torch

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
]

# A tensor, or (out, softmax_lse, None). Those of flash-attn have no types either.
_Result = Any


def _limits(window_size, causal) -> tuple:
    """(left, right), None for no limit. Without a right limit of its own causal has 0."""
    try:
        left, right = window_size
        left = None if left < 0 else _arguments.integer("window_size", left)
        right = None if right < 0 else _arguments.integer("window_size", right)
    except (TypeError, ValueError):
        raise TypeError(
            f"window_size must be (left, right), each an int, but is {window_size!r:.80}"
        ) from None
    return left, 0 if _arguments.flag("causal", causal) else right


def _operand(name: str, tensor: Tensor, is_dense: bool) -> Tensor:
    """In the operator's order of dimensions: ``(batch, heads, rows, head_dim)``, or packed
    ``(rows, heads, head_dim)``; tensors that are packed into one are first."""
    _arguments.tensor(name, tensor, nested=False)
    count = len(name)  # of the tensors in one: qkv
    if tensor.dim() != 3 + is_dense + (count > 1) or (count > 1 and tensor.shape[-3] != count):
        dims = "batch, " * is_dense + "rows, " + f"{count}, " * (count > 1) + "heads, head_dim"
        raise RuntimeError(f"{name} must be ({dims}), but has shape {list(tensor.shape)}")
    if is_dense and name in ("q", "qkv") and tensor.layout is torch.strided:
        # Strides that say no order of the output's.
        is_expanded = any(_torch.is_known(stride == 0) for stride in tensor.stride())
        tensor = tensor.contiguous() if is_expanded or tensor.stride(-1) != 1 else tensor
    if count == 1:
        return tensor.transpose(1, 2) if is_dense else tensor
    return tensor.permute(2, 0, 3, 1, 4) if is_dense else tensor.transpose(0, 1)


def _renamed(error: RuntimeError, names: list) -> RuntimeError:
    """The operator's error about an argument, with the names that arguments have here."""
    if not re.match("query|key|value|scale|alibi_slopes|cu_seqlens", str(error)):
        return error
    theirs = {"query": names[0], "key": names[:2][-1], "value": names[-1], "scale": "softmax_scale"}
    return RuntimeError(re.sub(r"\b[a-z]+\b", lambda m: theirs.get(m[0], m[0]), str(error)))


def _run(
    tensors: dict, offsets: dict, max_seqlens: dict, dropout_p, softmax_scale, causal, window_size,
    softcap, alibi_slopes, return_attn_probs,
) -> _Result:  # fmt: skip
    """A call: by name its tensors, and of packed sequences their offsets and longest lengths; and
    the options."""
    operands = [_operand(name, tensor, not offsets) for name, tensor in tensors.items()]
    operands += [None] * (3 - len(operands))
    for name, tensor in offsets.items():
        _arguments.tensor(name, tensor, nested=False)
    _arguments.optional_tensor("alibi_slopes", alibi_slopes, nested=False)
    return_attn_probs = _arguments.flag("return_attn_probs", return_attn_probs)
    longest = [_arguments.integer(name, length) for name, length in max_seqlens.items()]
    # One of queries and keys, where there are not two.
    cu_seqlens = ((list(offsets.values()) or [None]) * 2)[:2]
    longest = ((longest or [0]) * 2)[:2]
    options = {
        "scale": _arguments.optional_number("softmax_scale", softmax_scale),
        "softcap": max(_arguments.number("softcap", softcap), 0.0),
        "window": _limits(window_size, causal),
        "dropout_p": _arguments.number("dropout_p", dropout_p),
    }
    all_tensors = (*operands, None, alibi_slopes, None, *cu_seqlens)
    try:
        out, lse = _attention.attention(all_tensors, longest, **options)
    except RuntimeError as error:
        raise _renamed(error, list(tensors)) from None
    if not offsets:
        out = out.transpose(1, 2)
    return (out, lse, None) if return_attn_probs else out


@_torch.overridable
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> _Result:  # fmt: skip
    """Attention of q ``(B, Sq, Hq, D)``, k and v ``(B, Sk, Hk, D)``.

    Returns ``(B, Sq, Hq, D)``; with ``return_attn_probs`` ``(out, softmax_lse (B, Hq, Sq), None)``.
    """
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return _run({"q": q, "k": k, "v": v}, {}, {}, *options, return_attn_probs)


@_torch.overridable
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> _Result:  # fmt: skip
    """:func:`flash_attn_func` of kv ``(B, Sk, 2, Hk, D)``, whose gradient is one tensor."""
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return _run({"q": q, "kv": kv}, {}, {}, *options, return_attn_probs)


@_torch.overridable
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> _Result:  # fmt: skip
    """:func:`flash_attn_func` of qkv ``(B, S, 3, H, D)``, whose gradient is one tensor."""
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return _run({"qkv": qkv}, {}, {}, *options, return_attn_probs)


@_torch.overridable
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> _Result:  # fmt: skip
    """Attention of packed sequences: q ``(Tq, Hq, D)``, k and v ``(Tk, Hk, D)``, offsets int32
    ``(B + 1,)`` on their device.

    Returns ``(Tq, Hq, D)``; with ``return_attn_probs`` ``(out, softmax_lse (Hq, Tq), None)``. A
    ``block_table`` (paged keys) is not supported.
    """
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    if block_table is not None:
        _arguments.tensor("block_table", block_table)
        raise NotImplementedError(
            "block_table must be None, as paged keys are not supported, but has shape "
            f"{list(block_table.shape)}"
        )
    offsets = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    longest = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    return _run({"q": q, "k": k, "v": v}, offsets, longest, *options, return_attn_probs)


@_torch.overridable
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> _Result:  # fmt: skip
    """:func:`flash_attn_varlen_func` of kv ``(Tk, 2, Hk, D)``, whose gradient is one tensor."""
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    offsets = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    longest = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    return _run({"q": q, "kv": kv}, offsets, longest, *options, return_attn_probs)


@_torch.overridable
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> _Result:  # fmt: skip
    """:func:`flash_attn_varlen_func` of qkv ``(T, 3, H, D)``, whose gradient is one tensor."""
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    offsets, longest = {"cu_seqlens": cu_seqlens}, {"max_seqlen": max_seqlen}
    return _run({"qkv": qkv}, offsets, longest, *options, return_attn_probs)
