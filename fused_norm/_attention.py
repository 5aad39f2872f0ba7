"""Attention as functions of ``torch.ops.fused_norm.attention_*``: see each for shapes, dtypes and
errors. ``fused_norm.functional`` and ``fused_norm.flash_attn`` hold what is public."""

import torch
from torch import Tensor

from fused_norm import _C, _arguments, _attention_decomposition, _autocast, _ops, _torch, _tracing

_TENSORS = "query key value attn_mask alibi_slopes sink cu_seqlens_q cu_seqlens_k".split()


def _check_tensors(*tensors, nested=False) -> None:
    for index, value in enumerate(tensors):
        if type(value) is not Tensor and (value is not None or index < 3):
            check = _arguments.tensor if index < 3 else _arguments.optional_tensor
            check(_TENSORS[index], value, nested)


def _limits(causal, window) -> tuple:
    """(left, right), None for no limit."""
    try:
        left, right = (None, None) if window is None else window
        left, right = (n if n is None else _arguments.integer("window", n) for n in (left, right))
    except (TypeError, ValueError):
        raise TypeError(
            "window must be None or (left, right), each an int or None for no limit, but is "
            f"{window!r:.80}"
        ) from None
    return left, 0 if _arguments.flag("causal", causal) else right


def attention(
    tensors, max_seqlens=(0, 0), *, scale, softcap=0.0, window, top_left=False, dropout_p
) -> tuple[Tensor, Tensor]:
    """(out, lse) of the operator, whose arguments these are: its tensors, from query to
    cu_seqlens_k, and the options."""
    query = tensors[0]
    dtype = _autocast.dtype_for(query)
    if dtype is not None:
        query, key, value, attn_mask, alibi_slopes, sink, *offsets = tensors
        query, key, value = (_autocast.cast(t, dtype) for t in (query, key, value))
        # These may stay in fp32.
        attn_mask, sink = (_autocast.cast(t, dtype, torch.float32) for t in (attn_mask, sink))
        tensors = (query, key, value, attn_mask, alibi_slopes, sink, *offsets)
        compiles = torch.compiler.is_compiling() and not _torch.is_exporting()
        if compiles or torch.jit.is_tracing() or _torch.in_functorch():
            # Else autocast rounds within the decomposition, scores before their softmax too.
            with torch.autocast(query.device.type, enabled=False):
                return attention(
                    tensors, max_seqlens, scale=scale, softcap=softcap, window=window,
                    top_left=top_left, dropout_p=dropout_p,
                )  # fmt: skip
    (max_q, max_k), (left, right) = max_seqlens, window
    args = tensors + (None, max_q, max_k, scale, softcap, left, right, top_left, dropout_p)
    if dropout_p > 0:
        drawn_for = query
        if not torch.compiler.is_compiling():
            _C.check_attention(*args)  # a call that is refused draws no seed
            # An empty sum over all tensors has a batch dimension of vmap's if one of them has it.
            if _torch.in_functorch():
                drawn_for = sum(t.detach()[None][..., :0].sum() for t in tensors if t is not None)
        args = (*tensors, _ops.attention_rng(drawn_for), *args[9:])
    if not (torch.compiler.is_compiling() or torch.jit.is_tracing()):
        results = _C.attention(*args)
        if results is not None:
            return results
    if _tracing.is_onnx_export():
        return _attention_decomposition.attention_forward(*args)
    return _ops.attention_forward(*args)  # which says which argument is of a wrong type


def _with_ndim(tensor: Tensor, ndim: int) -> Tensor:
    """With dimensions of one element before those that it has."""
    missing = ndim - tensor.dim()
    return tensor[(None,) * missing] if missing else tensor


def _of_four_dims(query, key, value, mask, enable_gqa) -> tuple:
    """The arguments as (batch, heads, rows, columns) with batch sizes and heads that go together,
    and the shape of torch's result."""
    for name, tensor in zip(_TENSORS[:3], (query, key, value), strict=True):
        if tensor.layout is not torch.strided or tensor.dim() < 2:
            raise RuntimeError(
                f"{name} must be a dense strided tensor of at least 2 dimensions, but has layout "
                f"{tensor.layout} and shape {list(tensor.shape)}"
            )
    dims = max(query.dim(), key.dim(), value.dim())
    query, key, value = tensors = [_with_ndim(t, max(dims, 4)) for t in (query, key, value)]
    q, k, v = heads = [t.size(-3) for t in tensors]
    if enable_gqa and not q == k == v:
        if k == 0 or v == 0 or q % k or q % v:
            raise RuntimeError(
                f"query has {q} heads, which with enable_gqa must be a multiple of key's {k} and "
                f"value's {v}"
            )
        if k != v:  # unlike key and value share no heads
            key, value = (t.repeat_interleave(q // t.size(-3), -3) for t in (key, value))
            k = q
    elif not q == k == v:
        q = max(heads) if 0 not in heads else 0
        if any(count not in (1, q) for count in heads):
            raise RuntimeError(
                f"query has {heads[0]} heads, key {k} and value {v}: they must be alike or 1, "
                "unless with enable_gqa=True"
            )
        k = k if k == v else q  # one key head may serve all
    sizes = [t.shape[:-3] for t in tensors]
    batch = sizes[0]
    if not batch == sizes[1] == sizes[2]:
        try:
            batch = torch.broadcast_shapes(*sizes)
        except RuntimeError as error:
            shapes = "query {}, key {}, value {}".format(*map(list, sizes))
            raise RuntimeError(f"batch dimensions must broadcast, but are {shapes}") from error
    if mask is not None and len(batch) > 1:
        full = [*batch, q, query.size(-2), key.size(-2)]
        try:
            mask.expand(full)
        except RuntimeError as error:
            shapes = f"{list(mask.shape)}, which does not broadcast to {full}"
            raise RuntimeError(f"attn_mask has shape {shapes}") from error
        mask = _with_ndim(mask, len(full))
        if not all(_torch.is_known(size == 1) for size in mask.shape[:-3]):
            mask = mask.expand(*batch, -1, -1, -1)
        mask = mask.flatten(0, -4)

    def of_four(tensor, heads):
        if tensor.shape[:-2] != (*batch, heads):
            tensor = tensor.expand(*batch, heads, -1, -1)
        return tensor if len(batch) == 1 else tensor.flatten(0, -4)

    shape = [*batch, q, query.size(-2), value.size(-1)]
    return of_four(query, q), of_four(key, k), of_four(value, k), mask, shape[len(shape) - dims :]


@_torch.overridable
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
        attn_mask: broadcasts to ``(..., Hq, Sq, Sk)``; when it is copied: docs/attention.md.
            Boolean: ``True`` takes part. Of query's dtype or fp32: added to the scores;
            differentiable; at most -1e38 hides the key, as -inf does.
        dropout_p: the probability with which an attention probability is dropped, at least 0 and
            at most 1, to a multiple of 2^-16. Pass 0.0 for evaluation: it is not known here.
        is_causal: query ``i`` sees keys ``j <= i`` (aligned at the **top left**, as torch has it).
            Not with ``attn_mask``.
        scale: finite; ``None`` is ``1 / sqrt(D)``.
        enable_gqa: ``Hq`` may be a multiple of ``Hk``.

    Returns:
        ``(..., Hq, Sq, Dv)`` of query's dtype, in query's own order of strides. A row that sees
        nothing is zero. Under autocast the inputs are cast first, as torch does. Jagged nested
        tensors are passed on to torch's function.

    Raises:
        RuntimeError: an argument's shape, dtype, device, layout or value does not fit; the message
            names it.
    """
    _check_tensors(query, key, value, attn_mask, nested=True)  # for torch
    attn_mask = _torch.dense_mask(attn_mask, query)
    dropout_p = _arguments.number("dropout_p", dropout_p)
    if not 0 <= dropout_p <= 1:
        raise RuntimeError(f"dropout_p must be at least 0 and at most 1, but is {dropout_p}")
    scale = _arguments.optional_number("scale", scale)
    is_causal = _arguments.flag("is_causal", is_causal)
    enable_gqa = _arguments.flag("enable_gqa", enable_gqa)
    if query.is_nested or key.is_nested or value.is_nested or dropout_p == 1:
        options = {"scale": scale, "enable_gqa": enable_gqa and query.dim() > 2}
        return _torch.attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    _arguments.optional_tensor("attn_mask", attn_mask, nested=False)
    if is_causal and attn_mask is not None:
        raise RuntimeError(
            f"attn_mask of shape {list(attn_mask.shape)} cannot be combined with is_causal=True: "
            "hide later keys in the mask"
        )
    tensors, shape = (query, key, value, attn_mask), None
    q, k, v = query.shape, key.shape, value.shape
    if not (len(q) == len(k) == len(v) == 4 and q[0] == k[0] == v[0] and q[1] == k[1] == v[1]):
        *tensors, shape = _of_four_dims(*tensors, enable_gqa)
    out, _ = attention(
        (*tensors, None, None, None, None),
        scale=scale,
        window=(None, 0 if is_causal else None),
        top_left=True,
        dropout_p=dropout_p,
    )
    return out if shape is None else out.reshape(shape)


@_torch.overridable
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
        attn_mask: broadcasts to ``(B, Hq, Sq, Sk)``; as :func:`scaled_dot_product_attention`'s.
        alibi_slopes: fp32 ``(Hq,)`` or ``(B, Hq)`` (Press et al., *Train Short, Test Long*, 2022).
        dropout_p: the probability with which an attention probability is dropped; the rest is
            scaled by ``1 / (1 - dropout_p)``. At least 0 and below 1, to a multiple of 2^-16.
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
        TypeError: of ``window``, and of what should be a number.
    """
    attn_mask = _torch.dense_mask(attn_mask, query)
    tensors = (query, key, value, attn_mask, alibi_slopes, sink, None, None)
    _check_tensors(*tensors)
    return _flash(tensors, (0, 0), causal, window, softcap, dropout_p, scale, return_lse)


def _flash(tensors, max_seqlens, causal, window, softcap, dropout_p, scale, return_lse):
    return_lse = _arguments.flag("return_lse", return_lse)
    out, lse = attention(
        tensors,
        max_seqlens,
        scale=_arguments.optional_number("scale", scale),
        softcap=_arguments.number("softcap", softcap),
        window=_limits(causal, window),
        dropout_p=_arguments.number("dropout_p", dropout_p),
    )
    return (out, lse) if return_lse else out


@_torch.overridable
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

        The other arguments, and errors, are those of :func:`flash_attention`; ``alibi_slopes`` is
        ``(Hq,)`` or ``(B, Hq)``.

    Returns:
        ``(Tq, Hq, Dv)`` of query's dtype; rows outside every sequence are zeros. With
        ``return_lse`` also the log-sum-exp ``(Hq, Tq)``.
    """
    tensors = (query, key, value, None, alibi_slopes, sink, cu_seqlens_q, cu_seqlens_k)
    _arguments.tensor("cu_seqlens_q", cu_seqlens_q)
    _arguments.tensor("cu_seqlens_k", cu_seqlens_k)
    _check_tensors(*tensors)
    max_seqlen_q = _arguments.integer("max_seqlen_q", max_seqlen_q)
    max_seqlen_k = _arguments.integer("max_seqlen_k", max_seqlen_k)
    max_seqlens = (max_seqlen_q, max_seqlen_k)
    return _flash(tensors, max_seqlens, causal, window, softcap, dropout_p, scale, return_lse)
