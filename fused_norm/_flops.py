"""The floating-point operations of attention, for torch.utils.flop_counter: as many as torch counts
for its own, causal or not."""

import functools

from fused_norm import _ops, _torch


def _count(counter, call_type, products, *args, out_val=None, **kwargs) -> int:
    """Of a call with so many matrix products over the head dimensions of keys and of values.
    Offsets without data stand for sequences as long as the longest."""
    call = call_type(*args, **kwargs)
    query = key = value = call.query.shape[call.key is None :]
    if call.key is not None:
        key = value = call.key.shape[call.value is None :]
    if call.value is not None:
        value = call.value.shape
    if call.cu_seqlens_q is None:
        pairs = query[0] * query[2] * key[2]
    else:
        lengths = counter._offsets_to_lengths
        queries = lengths(call.cu_seqlens_q, call.max_seqlen_q or query[0])
        keys = lengths(call.cu_seqlens_k, call.max_seqlen_k or key[0])
        pairs = sum(q * k for q, k in zip(queries, keys, strict=True))
    return 2 * query[1] * pairs * (products[0] * query[-1] + products[1] * value[-1])


def _register(counter) -> None:
    for op, products in ((_ops.attention_forward, (1, 1)), (_ops.attention_backward, (3, 2))):
        formula = functools.partial(_count, counter, _ops.call_type(op), products)
        counter.register_flop_formula(op.overloadpacket, get_raw=True)(formula)


_torch.after_import("torch.utils.flop_counter", _register)
