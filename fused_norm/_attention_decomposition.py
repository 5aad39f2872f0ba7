"""The attention operators as chains of torch's own, with all scores in memory, for what the kernels
do not do: second and higher derivatives, forward-mode derivatives, torch.func transforms and ONNX.

Same arguments and results as the operators of the same names, dropout's mask included. Each is
differentiable in query, key, value, attn_mask, sink, dout and dlse.
"""

import ctypes
import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from fused_norm._decompositions import accumulate_dtype
from fused_norm._ops import AttentionCall


class _Rows(NamedTuple):
    """Where each row of a tensor is: its sequence, and its place there. Packed sequences are one
    dense sequence whose rows hide each other; rows of none have the number -1."""

    sequence: Tensor
    place: Tensor
    bounds: Tensor | None = None  # of packed sequences and of one empty one more

    def lengths(self, of: "_Rows") -> Tensor:
        """Of the sequence of each row, how many rows it has in another tensor."""
        sequence = self.sequence.clamp_min(0)
        return of.bounds[sequence + 1] - of.bounds[sequence]


def _rows(count, offsets: Tensor | None, device: torch.device) -> _Rows:
    place = torch.arange(count, device=device)
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
    c0, c1, c2, c3 = key.div(4, rounding_mode="floor"), query, row, offset & _WORD
    k0, k1 = seed & _WORD, _high(seed) ^ _high(offset)
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = _high(product1) ^ c1 ^ k0, product1 & _WORD
        c2, c3 = _high(product0) ^ c3 ^ k1, product0 & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    lane = key % 4
    return torch.where(lane == 0, c0, torch.where(lane == 1, c1, torch.where(lane == 2, c2, c3)))


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
    # Dropout's, of a float.
    threshold = min(int(ctypes.c_float(call.dropout_p).value * 2.0**32), _WORD)
    return (draws >= threshold).to(scores.dtype) / (1 - call.dropout_p)


def _alibi(call: AttentionCall, scores: Tensor, q: _Rows, distance: Tensor) -> Tensor:
    slopes = call.alibi_slopes.to(scores.dtype)[..., None, None]
    if call.cu_seqlens_q is not None and slopes.dim() == 4:
        # With a row more, for rows of no sequence where there is none.
        slopes = torch.cat([slopes, torch.zeros_like(slopes[:1])])
        slopes = slopes[q.sequence.clamp_min(0)].transpose(0, 2)
    return slopes * distance


def _apart(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, each by itself."""
    if call.key is None:
        return call.query.unbind(0)
    if call.value is None:
        return call.query, *call.key.unbind(0)
    return call.query, call.key, call.value


def _as_dense(tensor: Tensor, packed: bool) -> Tensor:
    return tensor.transpose(0, 1).unsqueeze(0) if packed else tensor


def _from_dense(tensor: Tensor, packed: bool) -> Tensor:
    return tensor.squeeze(0).transpose(0, 1) if packed else tensor


def _grouped(tensor: Tensor, kv_heads) -> Tensor:
    """The query heads of a group beside their key head; `flatten(1, 2)` is the way back."""
    return tensor.unflatten(1, (kv_heads, tensor.shape[1] // kv_heads))


@dataclasses.dataclass
class _Probabilities:
    """What both directions need, in the precision of sums and of four dimensions."""

    query: Tensor  # (B, Hq, Sq, D)
    key: Tensor  # (B, Hk, 1, Sk, D)
    value: Tensor  # (B, Hk, 1, Sk, Dv)
    all: Tensor  # (B, Hq, Sq, Sk)
    lse: Tensor  # (B, Hq, Sq)
    capped: Tensor | None  # tanh of the scores, with softcap
    of_sink: Tensor | None  # (B, Hq, Sq)
    kept: Tensor | None  # what dropout multiplies `all` by

    @property
    def kept_part(self) -> Tensor:
        return self.all if self.kept is None else self.all * self.kept

    @property
    def output(self) -> Tensor:
        return (_grouped(self.kept_part, self.key.shape[1]) @ self.value).flatten(1, 2)


def _hidden(call: AttentionCall, q: _Rows, k: _Rows, offset: Tensor, dtype) -> Tensor:
    """Of each query and key, whether the query does not see the key."""
    hidden = (q.sequence.unsqueeze(1) != k.sequence) | (q.sequence.unsqueeze(1) < 0)
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


def _probabilities(call: AttentionCall) -> _Probabilities:
    packed = call.cu_seqlens_q is not None
    dtype, device = accumulate_dtype(call.query.dtype), call.query.device
    query, key, value = (_as_dense(tensor, packed).to(dtype) for tensor in _apart(call))
    queries, keys = query.shape[2], key.shape[2]
    q = _rows(queries, call.cu_seqlens_q, device)
    k = _rows(keys, call.cu_seqlens_k, device)
    # Keys less queries, of each query's sequence.
    shift = q.lengths(k) - q.lengths(q) if packed else torch.full_like(q.place, keys - queries)
    shift = shift.unsqueeze(1)
    ahead = k.place - q.place.unsqueeze(1)  # j - i
    hidden = _hidden(call, q, k, ahead if call.top_left else ahead - shift, dtype)
    if packed or not (call.attn_mask is call.window_left is call.window_right is None):
        query, key, value = _without_unseen(hidden, query, key, value)
    key, value = key.unsqueeze(2), value.unsqueeze(2)
    s = (_grouped(query, key.shape[1]) @ key.transpose(-1, -2)).flatten(1, 2) * call.scale
    capped = None
    if call.softcap > 0:
        capped = (s / call.softcap).tanh()
        s = capped * call.softcap
    if call.alibi_slopes is not None:
        s = s - _alibi(call, s, q, (ahead - shift).abs())
    if call.attn_mask is not None and call.attn_mask.dtype is not torch.bool:
        s = s + call.attn_mask.to(dtype)
    s = s.masked_fill(hidden, -torch.inf)
    sink, logits = None, s
    if call.sink is not None:
        sink = call.sink.to(dtype)[:, None, None].expand(*s.shape[:3], 1)
        logits = torch.cat([s, sink], -1)
    empty = (logits == -torch.inf).all(-1, keepdim=True)
    if packed:  # rows of no sequence have no sink either
        empty = empty | (q.sequence < 0).unsqueeze(-1)
    lse = logits.masked_fill(empty, 0).logsumexp(-1, keepdim=True)
    all_ = (s - lse).exp().masked_fill(empty, 0)
    of_sink = None if sink is None else (sink - lse).exp().masked_fill(empty, 0).squeeze(-1)
    lse = lse.masked_fill(empty, -torch.inf).squeeze(-1)
    kept = _dropped(call, all_, q, k) if call.dropout_p > 0 else None
    return _Probabilities(query, key, value, all_, lse, capped, of_sink, kept)


def attention_forward(*args) -> tuple[Tensor, Tensor]:
    call = AttentionCall(*args)
    packed = call.cu_seqlens_q is not None
    p = _probabilities(call)
    out = _from_dense(p.output, packed).to(call.query.dtype)
    return out, p.lse.squeeze(0) if packed else p.lse


def attention_backward(dout, dlse, out, lse, *args) -> tuple[Tensor | None, ...]:
    """Makes out and lse again: their own gradients are parts of those of the call's tensors."""
    *args, wanted = args
    call = AttentionCall(*args)
    packed = call.cu_seqlens_q is not None
    p = _probabilities(call)
    kv_heads = p.key.shape[1]
    d_out = _as_dense(dout, packed).to(p.all.dtype)
    of_row = (d_out * p.output).sum(-1)
    if dlse is not None:
        of_row = of_row - (dlse.unsqueeze(0) if packed else dlse)
    dp = (_grouped(d_out, kv_heads) @ p.value.transpose(-1, -2)).flatten(1, 2)
    if p.kept is not None:
        dp = dp * p.kept
    of_scores = p.all * (dp - of_row.unsqueeze(-1))
    ds = of_scores * call.scale
    if p.capped is not None:
        ds = ds * (1 - p.capped * p.capped)

    def finished(tensor):
        return _from_dense(tensor, packed).to(call.query.dtype)

    def of_keys(weights, rows):  # weights^T rows, summed over the heads of a group
        weights, rows = _grouped(weights, kv_heads), _grouped(rows, kv_heads)
        return finished((weights.transpose(-1, -2) @ rows).sum(2))

    of_key = wanted[0 if call.key is None else 1]
    of_value = of_key if call.value is None else wanted[2]
    dquery = dkey = dvalue = dmask = dsink = None
    if wanted[0]:
        dquery = finished((_grouped(ds, kv_heads) @ p.key).flatten(1, 2))
    if of_key:
        dkey = of_keys(ds, p.query)
    if of_value:
        dvalue = of_keys(p.kept_part, d_out)
    if call.key is None and wanted[0]:
        dquery, dkey, dvalue = torch.stack([dquery, dkey, dvalue]), None, None
    elif call.value is None and of_key:
        dkey, dvalue = torch.stack([dkey, dvalue]), None
    if wanted[3] and call.attn_mask is not None:
        dmask = of_scores.sum_to_size(call.attn_mask.shape).to(call.attn_mask.dtype)
    if wanted[4] and call.sink is not None:
        dsink = -(p.of_sink * of_row).sum((0, 2)).to(call.sink.dtype)
    return dquery, dkey, dvalue, dmask, dsink
