"""The attention operators as chains of torch's own, with all scores in memory, for what the kernels
do not do: second and higher derivatives, forward-mode derivatives, torch.func transforms and ONNX.

Same arguments and results as the operators of the same names, dropout's mask included. Each is
differentiable in query, key, value, attn_mask, sink, dout and dlse.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fused_norm._decompositions import accumulate_dtype, gradients
from fused_norm._ops import AttentionCall


class _Rows(NamedTuple):
    """Where each row of a tensor is: its sequence, and its place there. Packed sequences are one
    dense sequence whose rows hide each other; rows of none have the number -1."""

    sequence: Tensor
    place: Tensor
    bounds: Tensor | None = None  # of packed sequences and of one empty one more


def _rows(count, offsets: Tensor | None, like: Tensor) -> _Rows:
    place = torch.arange(count, device=like.device)
    if hasattr(like, "placements"):  # a DTensor takes no plain tensor beside it
        place = like.new_ones(count, dtype=torch.int64).cumsum(0) - 1
    if offsets is None:
        return _Rows(torch.zeros_like(place), place)
    # As kernels read them: within the tensor, in ascending order.
    ascending = offsets.long().clamp_min(0).cummax(0).values
    ends = torch.minimum(ascending, torch.full_like(ascending, count))
    bounds = torch.cat([ends, ends[-1:]])
    sequence = (torch.searchsorted(ends, place, right=True) - 1).clamp_min(0)
    inside = (place >= bounds[0]) & (place < bounds[sequence + 1])
    return _Rows(torch.where(inside, sequence, -1), place - bounds[sequence], bounds)


_WORD = 0xFFFFFFFF
_HIDING_MASK = -1e38  # kHidingMask (csrc/core/attention/params.h)


def _high(t: Tensor) -> Tensor:
    return torch.bitwise_right_shift(t, 32) & _WORD


def _draws(rng: Tensor, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The draws of Dropout (csrc/core/attention/dropout.h) for every (row, query, key), in 64-bit
    integers that wrap around."""
    seed, offset = rng.select(0, 0), rng.select(0, 1)
    c0, c1, c2, c3 = key.div(8, rounding_mode="floor"), query, row, offset & _WORD
    k0, k1 = seed & _WORD, _high(seed) ^ _high(offset)
    for _ in range(7):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = _high(product1) ^ c1 ^ k0, product1 & _WORD
        c2, c3 = _high(product0) ^ c3 ^ k1, product0 & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    lane = key % 8 // 2
    word = torch.where(lane == 0, c0, torch.where(lane == 1, c1, torch.where(lane == 2, c2, c3)))
    return torch.where(key % 2 == 0, word & 0xFFFF, torch.bitwise_right_shift(word, 16))


def _dropped(call: AttentionCall, scores: Tensor, q: _Rows, k: _Rows) -> Tensor:
    """What dropout multiplies probabilities by."""
    batch, heads = scores.shape[:2]
    device = scores.device
    if call.cu_seqlens_q is None:
        sequence = torch.arange(batch, device=device).view(-1, 1, 1, 1)
    else:
        sequence = q.sequence.clamp_min(0).view(1, 1, -1, 1)
    head = torch.arange(heads, device=device).view(-1, 1, 1)
    draws = _draws(call.rng, sequence * heads + head, q.place.unsqueeze(1), k.place)
    threshold = min(int(call.dropout_p * 2**16 + 0.5), 2**16 - 1)
    return (draws >= threshold).to(scores.dtype) * (2**16 / (2**16 - threshold))


def _alibi(call: AttentionCall, scores: Tensor, q: _Rows, distance: Tensor) -> Tensor:
    slopes = call.alibi_slopes.to(scores.dtype)[..., None, None]
    if call.cu_seqlens_q is not None and slopes.dim() == 4:
        # With a row more, for rows of no sequence where there is none.
        slopes = torch.cat([slopes, slopes.new_zeros(1, *slopes.shape[1:])])
        slopes = slopes[q.sequence.clamp_min(0)].transpose(0, 2)
    return slopes * distance


def _apart(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, each by itself."""
    if call.key is None:
        return call.query.unbind(0)
    if call.value is None:
        return call.query, *call.key.unbind(0)
    return call.query, call.key, call.value


def _grouped(tensor: Tensor, kv_heads) -> Tensor:
    """The query heads of a group beside their key head; ``flatten(1, 2)`` is the way back."""
    return tensor.unflatten(1, (kv_heads, tensor.shape[1] // (kv_heads or 1)))


def _hidden(call: AttentionCall, q: _Rows, k: _Rows, offset: Tensor, dtype) -> Tensor:
    """Of each query and key, whether the query does not see the key."""
    of_query = q.sequence.unsqueeze(1)  # DTensor has no !=
    hidden = ~(of_query == k.sequence) | (of_query < 0)
    if call.window_left is not None:
        hidden = hidden | (offset < -call.window_left)
    if call.window_right is not None:
        hidden = hidden | (offset > call.window_right)
    if call.attn_mask is not None:
        is_boolean, mask = call.attn_mask.dtype is torch.bool, call.attn_mask
        hidden = hidden | (~mask if is_boolean else mask.to(dtype) <= _HIDING_MASK)
    return hidden


def _without_unseen(hidden: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple:
    """With zeros in queries that see no key, and in keys and values that no query sees: they may
    hold a NaN, and 0 * NaN is NaN."""
    hidden = hidden[(None,) * (4 - hidden.dim())]
    of_keys = hidden.all(2)  # (B, Hq, Sk), where B and Hq may be 1
    if of_keys.shape[1] != 1:
        of_keys = _grouped(of_keys, key.shape[1]).all(2)
    of_keys = of_keys.unsqueeze(-1)
    query = query.masked_fill(hidden.all(3, keepdim=True), 0)
    return query, key.masked_fill(of_keys, 0), value.masked_fill(of_keys, 0)


def _scores(call: AttentionCall, query: Tensor, key: Tensor, q: _Rows, offset: Tensor) -> Tensor:
    """(B, Hq, Sq, Sk), those of hidden keys too."""
    keys = key.unsqueeze(2).transpose(-1, -2)
    scale = torch.sym_float(query.shape[-1]) ** -0.5 if call.scale is None else call.scale
    s = (_grouped(query, key.shape[1]) @ keys).flatten(1, 2) * scale
    if call.softcap > 0:
        s = (s / call.softcap).tanh() * call.softcap
    if call.alibi_slopes is not None:
        s = s - _alibi(call, s, q, offset.abs())
    if call.attn_mask is not None and call.attn_mask.dtype is not torch.bool:
        s = s + call.attn_mask.to(s.dtype)
    return s


def attention_forward(*args) -> tuple[Tensor, Tensor]:
    call = AttentionCall(*args)
    packed = call.cu_seqlens_q is not None
    dtype = accumulate_dtype(call.query.dtype)
    tensors = [tensor.to(dtype) for tensor in _apart(call)]
    if packed:
        tensors = [tensor.transpose(0, 1).unsqueeze(0) for tensor in tensors]
    query, key, value = tensors  # (B, heads, rows, columns)
    q = _rows(query.shape[2], call.cu_seqlens_q, query)
    k = _rows(key.shape[2], call.cu_seqlens_k, query)
    ahead = k.place - q.place.unsqueeze(1)  # j - i
    # Keys less queries, of each query's sequence.
    shift = torch.full_like(q.place, key.shape[2] - query.shape[2])
    if packed:
        shift = (k.bounds - q.bounds).diff()[q.sequence.clamp_min(0)]
    offset = ahead - shift.unsqueeze(1)
    hidden = _hidden(call, q, k, ahead if call.top_left else offset, dtype)
    if packed or not (call.attn_mask is call.window_left is call.window_right is None):
        query, key, value = _without_unseen(hidden, query, key, value)
    s = _scores(call, query, key, q, offset).masked_fill(hidden, -torch.inf)
    logits = s
    if call.sink is not None:
        logits = torch.cat([s, call.sink.to(dtype)[:, None, None].expand(*s.shape[:3], 1)], -1)
    empty = (logits == -torch.inf).all(-1, keepdim=True)
    if packed:  # rows of no sequence have no sink either
        empty = empty | (q.sequence < 0).unsqueeze(-1)
    lse = logits.masked_fill(empty, 0).logsumexp(-1, keepdim=True)
    p = (s - lse).exp().masked_fill(empty, 0)
    if call.dropout_p > 0:
        p = p * _dropped(call, p, q, k)
    out = (_grouped(p, value.shape[1]) @ value.unsqueeze(2)).flatten(1, 2)
    lse = lse.masked_fill(empty, -torch.inf).squeeze(-1)
    if packed:
        out, lse = out.squeeze(0).transpose(0, 1), lse.squeeze(0)
    return out.to(call.query.dtype), lse


def attention_backward(dout, dlse, out, lse, *args) -> tuple[Tensor | None, ...]:
    """Makes out and lse again: their own gradients are parts of those of the call's tensors."""
    *args, wanted = args
    inputs = ("query", "key", "value", "attn_mask", "sink")
    return gradients(attention_forward, AttentionCall(*args), inputs, wanted, (dout, dlse))
