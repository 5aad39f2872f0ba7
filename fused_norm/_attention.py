"""Attention as functions of ``torch.ops.fused_norm.attention_*``: see each for shapes, dtypes and
errors. ``fused_norm.functional`` and ``fused_norm.flash_attn`` hold what is public."""

import numbers

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from fused_norm import _C, _ops, _sharding, _torch


def _are_plain(tensors) -> bool:
    for tensor in tensors:
        if tensor is not None and type(tensor) is not Tensor:
            return False
    return True


def _check_tensors(**tensors) -> None:
    """Of arguments that are no plain tensors, for what Python cannot pass on to the operator's own
    checks."""
    for name, value in tensors.items():
        if value is not None and type(value) is not Tensor and not isinstance(value, Tensor):
            kind = type(value).__name__
            raise TypeError(f"{name} must be a tensor, but is {value!r:.80} of type {kind}")
    _sharding.register_where_loaded()  # one may be the first DTensor


def _check_number(name: str, value) -> None:
    if isinstance(value, Tensor):
        raise TypeError(
            f"{name} must be a number, through which no gradient flows, but is a tensor of shape "
            f"{list(value.shape)}"
        )


def _autocast_dtype(query: Tensor) -> torch.dtype | None:
    # A device makes an object; is_cuda takes a sixth of the time.
    device = "cuda" if query.is_cuda else query.device.type
    if device not in ("cuda", "cpu") or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def _cast(tensor: Tensor | None, dtype: torch.dtype, *others: torch.dtype) -> Tensor | None:
    """As torch's autocast casts: what is floating, but not fp64. Or in one of ``others``."""
    if tensor is None or not tensor.is_floating_point():
        return tensor
    return tensor if tensor.dtype in (torch.float64, *others) else tensor.to(dtype)


def _limits(causal, window) -> tuple:
    """(left, right), None for no limit."""
    left, right = (None, None) if window is None else _pair(window)
    if causal:
        right = 0
    return left, right


def _pair(window) -> tuple:
    is_pair = isinstance(window, (tuple, list)) and len(window) == 2
    # Of torch.SymInt too, as a compiler passes it.
    kinds = (numbers.Integral, torch.SymInt, type(None))
    if not is_pair or not all(isinstance(limit, kinds) for limit in window):
        raise TypeError(
            "window must be None or (left, right), each an int or None for no limit, but is "
            f"{window!r:.80}"
        )
    for limit in window:
        if limit is not None and limit < 0:
            raise ValueError(f"window's limits must not be negative, but it is {tuple(window)}")
    return tuple(window)


def attention(
    query,
    key,
    value,
    attn_mask=None,
    alibi_slopes=None,
    sink=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=0,
    max_seqlen_k=0,
    scale=None,
    softcap=0.0,
    window=(None, None),
    top_left=False,
    dropout_p=0.0,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of the operator, whose arguments these are; ``scale=None`` is 1 / sqrt(D)."""
    dtype = _autocast_dtype(query)
    if dtype is not None:
        query, key, value = (_cast(t, dtype) for t in (query, key, value))
        # These may stay in fp32.
        attn_mask, sink = (_cast(t, dtype, torch.float32) for t in (attn_mask, sink))
    if scale is None:
        scale = query.shape[-1] ** -0.5 if query.shape[-1] else 1.0
    rng = _ops.attention_rng(query) if dropout_p > 0 else None
    args = (
        query,
        key,
        value,
        attn_mask,
        alibi_slopes,
        sink,
        cu_seqlens_q,
        cu_seqlens_k,
        rng,
        max_seqlen_q,
        max_seqlen_k,
        scale,
        softcap,
        *window,
        top_left,
        dropout_p,
    )
    if not torch.compiler.is_compiling():
        results = _C.attention(*args)
        if results is not None:
            return results
    return _ops.attention_forward(*args)  # which says which argument is of a wrong type


def _broadcast(sizes, names) -> torch.Size:
    try:
        return torch.broadcast_shapes(*sizes)
    except RuntimeError as error:
        shapes = ", ".join(f"{n} {list(s)}" for n, s in zip(names, sizes, strict=True))
        raise RuntimeError(f"batch dimensions must broadcast, but are {shapes}") from error


def _heads(query, key, value, enable_gqa) -> tuple:
    """The tensors with numbers of heads that go together, of four or more dimensions."""
    q, k, v = query.shape[-3], key.shape[-3], value.shape[-3]
    if q == k == v:
        return query, key, value
    if enable_gqa:
        if k == 0 or v == 0 or q % k or q % v:
            raise RuntimeError(
                f"query has {q} heads, which with enable_gqa must be a multiple of key's {k} and "
                f"value's {v}"
            )
        if k != v:  # which shares neither
            key = key.repeat_interleave(q // k, -3)
            value = value.repeat_interleave(q // v, -3)
        return query, key, value
    heads = max(q, k, v) if 0 not in (q, k, v) else 0
    if any(count not in (1, heads) for count in (q, k, v)):
        raise RuntimeError(
            f"query has {q} heads, key {k} and value {v}: they must be alike or 1, unless with "
            "enable_gqa=True"
        )
    if q != heads:
        query = query.expand(*query.shape[:-3], heads, *query.shape[-2:])
    if k != v:  # else one key head serves all
        key = key.expand(*key.shape[:-3], heads, *key.shape[-2:])
        value = value.expand(*value.shape[:-3], heads, *value.shape[-2:])
    return query, key, value


def _mask_of_four_dims(mask: Tensor, batch) -> Tensor:
    if mask.dim() <= 3 or len(batch) == 1:
        return mask
    while mask.dim() < len(batch) + 3:
        mask = mask.unsqueeze(0)
    own = mask.shape[:-3]
    if all(size == 1 for size in own):
        return mask.reshape(1, *mask.shape[-3:])
    return mask.expand(*batch, *mask.shape[-3:]).reshape(-1, *mask.shape[-3:])


def _of_four_dims(query, key, value, mask, enable_gqa) -> tuple:
    """The arguments as (batch, heads, rows, columns) with batch sizes and heads that go together,
    and the shape of torch's result."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 2:
            raise RuntimeError(
                f"{name} must have at least 2 dimensions, but has shape {list(tensor.shape)}"
            )
    dims = max(query.dim(), key.dim(), value.dim())
    query, key, value = (
        t
        if t.dim() >= 4 and t.dim() == dims
        else t.reshape(*[1] * (max(dims, 4) - t.dim()), *t.shape)
        for t in (query, key, value)
    )
    query, key, value = _heads(query, key, value, enable_gqa)
    sizes = [t.shape[:-3] for t in (query, key, value)]
    batch = sizes[0]
    if not batch == sizes[1] == sizes[2]:
        batch = _broadcast(sizes, ("query", "key", "value"))
    shape = [*batch, query.shape[-3], query.shape[-2], value.shape[-1]]
    if mask is not None:
        mask = _mask_of_four_dims(mask, batch)

    def of_four(tensor):
        if tensor.shape[:-3] != batch:
            tensor = tensor.expand(*batch, *tensor.shape[-3:])
        return tensor if len(batch) == 1 else tensor.reshape(-1, *tensor.shape[-3:])

    return of_four(query), of_four(key), of_four(value), mask, shape[len(shape) - dims :]


_UNLIMITED, _TOP_LEFT = (None, None), (None, 0)  # windows


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``softmax(query key^T * scale + attn_mask) value``: torch's function, by these kernels.

    A drop-in for :func:`torch.nn.functional.scaled_dot_product_attention`, which may be replaced by
    it (Dao et al., *FlashAttention*, 2022; Dao, *FlashAttention-2*, 2023). Scores are never in
    memory, forward or backward, and the same call gives the same bits each time.

    Args:
        query: ``(..., Hq, Sq, D)`` in fp16, bf16, fp32 or fp64; of 2 or 3 dimensions as in torch.
        key: ``(..., Hk, Sk, D)``. Batch dimensions broadcast.
        value: ``(..., Hk, Sk, Dv)``.
        attn_mask: broadcasts to ``(..., Hq, Sq, Sk)``. Boolean: ``True`` takes part. Of query's
            dtype or fp32: added to the scores; differentiable. It is read as it is, never expanded
            (but for one that broadcasts over some of several batch dimensions).
        dropout_p: the probability with which an attention probability is dropped. The function does
            not know whether a module trains: pass 0.0 for evaluation.
        is_causal: query ``i`` sees keys ``j <= i`` (aligned at the **top left**, as torch has it).
            Not with ``attn_mask``.
        scale: ``None`` is ``1 / sqrt(D)``.
        enable_gqa: ``Hq`` may be a multiple of ``Hk``.

    Returns:
        ``(..., Hq, Sq, Dv)`` of query's dtype, in query's own order of strides. A row that sees
        nothing is zero. Under autocast the inputs are cast first, as torch does. Jagged nested
        tensors are passed on to torch's function.

    Raises:
        RuntimeError: an argument's shape, dtype, device, layout or value does not fit; the message
            names it.
    """
    tensors = (query, key, value, attn_mask)
    if not _are_plain(tensors):
        if has_torch_function(tensors) and not (isinstance(query, Tensor) and query.is_nested):
            return handle_torch_function(
                scaled_dot_product_attention,
                tensors,
                *tensors,
                dropout_p=dropout_p,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        _check_tensors(query=query, key=key, value=value, attn_mask=attn_mask)
    if query.is_nested or key.is_nested or value.is_nested or dropout_p == 1:
        return _torch.attention(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    if is_causal and attn_mask is not None:
        raise RuntimeError(
            f"attn_mask of shape {list(attn_mask.shape)} cannot be combined with is_causal=True: "
            "hide later keys in the mask"
        )
    shape = None
    q, k, v = query.shape, key.shape, value.shape
    if not (len(q) == len(k) == len(v) == 4 and q[0] == k[0] == v[0] and q[1] == k[1] == v[1]):
        query, key, value, attn_mask, shape = _of_four_dims(
            query, key, value, attn_mask, enable_gqa
        )
    out, _ = attention(
        query,
        key,
        value,
        attn_mask,
        scale=scale,
        window=_TOP_LEFT if is_causal else _UNLIMITED,
        top_left=True,
        dropout_p=dropout_p,
    )
    return out if shape is None else out.reshape(shape)


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    attn_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention in O(S) memory, with all options.

    The score of query ``i`` and key ``j`` is, in this order::

        s = (query . key) * scale
        s = softcap * tanh(s / softcap)                    with softcap > 0
        s -= alibi_slopes * |i + Sk - Sq - j|              with alibi_slopes
        s += attn_mask, or the key is hidden where it is False

    and the output the softmax of the scores that are not hidden, times value.

    Args:
        query: ``(B, Hq, Sq, D)`` in fp16, bf16, fp32 or fp64. Any strides with a contiguous last
            dimension; others cost a copy.
        key: ``(B, Hk, Sk, D)``; Hq is a multiple of Hk, whose heads are shared without copies.
        value: ``(B, Hk, Sk, Dv)``.
        causal: a query sees no later key; the last query sees the last key (aligned at the **bottom
            right**).
        window: ``(left, right)``: query ``i`` sees keys from ``i + Sk - Sq - left`` to
            ``i + Sk - Sq + right``. ``None``: no limit on that side.
        softcap: finite; 0 for none.
        sink: ``(Hq,)`` in query's dtype or fp32: a logit a head that takes part in the softmax and
            has no value. Differentiable.
        attn_mask: broadcasts to ``(B, Hq, Sq, Sk)``, never expanded in memory. Boolean: ``True``
            takes part. Of query's dtype or fp32: added; differentiable.
        alibi_slopes: fp32 ``(Hq,)`` or ``(B, Hq)`` (Press et al., *Train Short, Test Long*, 2022).
        dropout_p: the probability with which an attention probability is dropped; the rest is
            scaled by ``1 / (1 - dropout_p)``. At least 0 and below 1.
        scale: finite; ``None`` is ``1 / sqrt(D)``.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        ``(B, Hq, Sq, Dv)`` of query's dtype in query's own order of strides. With ``return_lse``
        also ``(B, Hq, Sq)`` in fp32 (fp64 for fp64): the logarithm of the softmax's denominator,
        the sink included, dropout not; differentiable. A row that sees nothing has output 0 and a
        log-sum-exp of -inf, or its sink.

    Raises:
        RuntimeError: an argument's shape, dtype, device, layout or value does not fit; the message
            names it.
        TypeError, ValueError: of ``window``, and of what should be a number.
    """
    tensors = (query, key, value, sink, attn_mask, alibi_slopes)
    if not _are_plain(tensors):
        options = {
            "causal": causal,
            "window": window,
            "softcap": softcap,
            "sink": sink,
            "attn_mask": attn_mask,
            "alibi_slopes": alibi_slopes,
            "dropout_p": dropout_p,
            "scale": scale,
            "return_lse": return_lse,
        }
        if has_torch_function(tensors):
            return handle_torch_function(flash_attention, tensors, query, key, value, **options)
        _check_tensors(
            query=query,
            key=key,
            value=value,
            sink=sink,
            attn_mask=attn_mask,
            alibi_slopes=alibi_slopes,
        )
    _check_numbers(softcap, dropout_p, scale)
    out, lse = attention(
        query,
        key,
        value,
        attn_mask,
        alibi_slopes,
        sink,
        scale=scale,
        softcap=softcap,
        window=_limits(causal, window),
        dropout_p=dropout_p,
    )
    return (out, lse) if return_lse else out


def _check_numbers(softcap, dropout_p, scale) -> None:
    for name, value in (("softcap", softcap), ("dropout_p", dropout_p), ("scale", scale)):
        if type(value) is not float:
            _check_number(name, value)


def flash_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`flash_attention` of sequences that lie one after another, without padding.

    Args:
        query: ``(Tq, Hq, D)``, the rows of all sequences.
        key: ``(Tk, Hk, D)``.
        value: ``(Tk, Hk, Dv)``.
        cu_seqlens_q, cu_seqlens_k: int32 ``(B + 1,)`` on query's device: sequence ``b`` has the
            rows from ``cu_seqlens[b]`` to ``cu_seqlens[b + 1]``. A sequence may be empty. The
            values are not looked at on the host; outside ``[0, T]`` they are clamped.
        max_seqlen_q, max_seqlen_k: the longest sequence. A hint: no result depends on it.

        The other arguments are those of :func:`flash_attention`; ``alibi_slopes`` is ``(Hq,)`` or
        ``(B, Hq)``.

    Returns:
        ``(Tq, Hq, Dv)`` of query's dtype; rows outside every sequence are zeros. With
        ``return_lse`` also the log-sum-exp ``(Hq, Tq)``.

    Raises:
        As :func:`flash_attention`.
    """
    tensors = (query, key, value, cu_seqlens_q, cu_seqlens_k, sink, alibi_slopes)
    sizes = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if not _are_plain(tensors):
        if has_torch_function(tensors):
            return handle_torch_function(
                flash_attention_varlen,
                tensors,
                query,
                key,
                value,
                *sizes,
                causal=causal,
                window=window,
                softcap=softcap,
                sink=sink,
                alibi_slopes=alibi_slopes,
                dropout_p=dropout_p,
                scale=scale,
                return_lse=return_lse,
            )
        _check_tensors(
            query=query,
            key=key,
            value=value,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            sink=sink,
            alibi_slopes=alibi_slopes,
        )
    for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if offsets is None:
            raise TypeError(f"{name} must be a tensor, but is None")
    _check_numbers(softcap, dropout_p, scale)
    out, lse = attention(
        query,
        key,
        value,
        None,
        alibi_slopes,
        sink,
        *sizes,
        scale=scale,
        softcap=softcap,
        window=_limits(causal, window),
        dropout_p=dropout_p,
    )
    return (out, lse) if return_lse else out
