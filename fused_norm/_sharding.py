"""How DTensor shards the operators: rows stay where they are, a row is never split; of attention,
sequences and groups of heads.

A sharded dimension of rows needs no communication; the gradients of a norm's parameters are then
partial sums. An input sharded within its rows, or a sharded parameter, is gathered first, as for
torch's own operators.
"""

import functools
import sys

import torch

from fused_norm import _torch


@_torch.constant
def register_where_loaded() -> bool:
    """Registers the rules once torch.distributed.tensor is loaded, which no DTensor is without.

    It is not loaded from here: that takes a hundred times as long as loading this package.
    """
    if "torch.distributed.tensor" in sys.modules:
        _register()
    return True


@functools.cache
def _register() -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor._op_schema import OpStrategy, RuntimeSchemaInfo
    from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy
    from torch.distributed.tensor.experimental import register_sharding

    norm_forward = torch.ops.fused_norm.norm_forward.default
    norm_backward = torch.ops.fused_norm.norm_backward.default
    gated_forward = torch.ops.fused_norm.rms_norm_gated_forward.default
    gated_backward = torch.ops.fused_norm.rms_norm_gated_backward.default
    softmax_forward = torch.ops.fused_norm.softmax_forward.default
    scaled_masked_softmax = torch.ops.fused_norm.scaled_masked_softmax.default
    softmax_backward = torch.ops.fused_norm.softmax_backward.default
    attention_forward = torch.ops.fused_norm.attention_forward.default
    attention_backward = torch.ops.fused_norm.attention_backward.default
    attention_rng = torch.ops.fused_norm.attention_rng.default

    def same(tensors, placement):
        """The placement for each tensor of a list, None for what is None."""
        return [None if tensor is None else placement for tensor in tensors]

    def forward(schema):
        """By hand: register_sharding knows no operator that gives a list of tensors."""
        args = [
            arg.strategies[0].output_spec if isinstance(arg, OpStrategy) else arg
            for arg in schema.args_schema
        ]
        input, weight, bias, normalized_shape, _, *options = args + [None] * (11 - len(args))
        is_rms, residual, room = options[1], options[3], options[5]
        if room is not None:
            raise NotImplementedError("norm_forward lists no columns of a DTensor")
        rules = []
        for placement in (Replicate(), *map(Shard, range(input.ndim - len(normalized_shape)))):
            outputs = [placement] * (1 if residual is None else 2)
            # An RMSNorm's mean is an empty tensor, the same everywhere.
            outputs += [Replicate() if is_rms else placement, placement]
            inputs = [placement, *same((weight, bias), Replicate()), *same([residual], placement)]
            rules.append(outputs + inputs)
        count = 3 if residual is None else 4
        return expand_to_full_mesh_op_strategy(input.mesh, schema, rules, input_index=count)

    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.register_op_strategy(norm_forward, forward)

    @register_sharding(norm_backward)
    def backward(dy, saved, mean, rstd, weight, bias, normalized_shape, *options):
        more = options[5:]  # side and columns, which DTensors never have, and dresidual
        is_rms, mask = options[1], options[4]
        has_gradient = (mask[0], mask[1] and weight is not None, mask[2] and bias is not None)
        rows = range(dy.ndim - len(normalized_shape))
        rules = []
        for placement in (Replicate(), *map(Shard, rows)):
            summed = Partial() if isinstance(placement, Shard) else Replicate()
            outputs = [
                gradient if wanted else None
                for gradient, wanted in zip((placement, summed, summed), has_gradient, strict=True)
            ]
            inputs = [placement, placement]
            inputs += same([mean], Replicate() if is_rms else placement) + [placement]
            inputs += same((weight, bias), Replicate())
            inputs += [None] * 6 + same(more, placement)  # six arguments that are no tensors
            rules.append((outputs, inputs))
        return rules

    @register_sharding(gated_forward)
    def of_gated(input, gate, weight, normalized_shape, *options):
        rest = [*same([weight], Replicate()), *[None] * (1 + len(options))]
        rows = range(input.ndim - len(normalized_shape))
        return [([p, p], [p, p, *rest]) for p in (Replicate(), *map(Shard, rows))]

    @register_sharding(gated_backward)
    def of_gated_backward(dy, rstd, input, gate, weight, normalized_shape, *options):
        mask = options[-1]
        rules = []
        for outputs, inputs in of_gated(input, gate, weight, normalized_shape, *options):
            placement = outputs[0]
            summed = Partial() if isinstance(placement, Shard) else Replicate()
            has_gradient = (mask[0], mask[1], mask[2] and weight is not None)
            gradients = zip((placement, placement, summed), has_gradient, strict=True)
            outputs = [gradient if wanted else None for gradient, wanted in gradients]
            rules.append((outputs, [placement, placement, *inputs]))
        return rules

    def placements_beside(ndim, *dims):
        """Of a tensor that is whole along these dimensions."""
        whole = {dim % ndim for dim in dims if ndim}
        return [Replicate(), *(Shard(d) for d in range(ndim) if d not in whole)]

    @register_sharding(softmax_forward)
    def softmax(input, dim, *options):
        rest = [None] * (1 + len(options))
        return [([p], [p, *rest]) for p in placements_beside(input.ndim, dim)]

    @register_sharding(softmax_backward)
    def of_softmax(dy, output, dim, *options):
        rest = [None] * (1 + len(options))
        return [([p], [p, p, *rest]) for p in placements_beside(dy.ndim, dim)]

    @register_sharding(scaled_masked_softmax)
    def masked_softmax(input, mask, *options):
        causal = len(options) > 1 and options[1]  # a query's number tells what it may see
        rules = []
        for placement in placements_beside(input.ndim, -1, *([-2] if causal else [])):
            of_mask = Replicate()
            if mask is not None and isinstance(placement, Shard):
                dim = placement.dim - input.ndim + mask.ndim
                if dim >= 0 and mask.shape[dim] > 1:
                    of_mask = Shard(dim)
            rules.append(([placement], [placement, *same([mask], of_mask), *[None] * len(options)]))
        return rules

    def attention_splits(query, key, packed):
        """How a call may be split over its processes: none of it, by sequence, by head. Each as the
        dimension, counted over (batch, heads) of query, or None."""
        splits = [None]
        if not packed:
            splits.append(0)
        # A group of heads stays with its key head.
        kv_heads = query.shape[-2 if packed else -3]
        if key is not None:
            kv_heads = key.shape[-2 if packed else -3]
        if kv_heads % query.mesh.size() == 0:
            splits.append(1)
        return splits

    def attention_inputs(split, query, key, value, mask, slopes, sink, cu_q, cu_k, rng):
        packed = cu_q is not None

        def of_dim(tensor, dim, broadcasts=False):
            if tensor is None:
                return None
            if split is None or dim < 0 or (broadcasts and tensor.shape[dim] == 1):
                return Replicate()
            return Shard(dim)

        from_end = 4 - (split or 0) if not packed else 2
        of_slopes = -1
        if slopes is not None and split is not None:
            of_slopes = slopes.ndim - 1 if split == 1 else slopes.ndim - 2
        return [
            *(None if t is None else of_dim(t, t.ndim - from_end) for t in (query, key, value)),
            None if mask is None else of_dim(mask, mask.ndim - 4 + (split or 0), True),
            of_dim(slopes, of_slopes),
            of_dim(sink, 0 if split == 1 else -1),
            *same((cu_q, cu_k, rng), Replicate()),
        ]

    def attention_outputs(split, packed):
        """Of out and of its log-sum-exp."""
        if split is None:
            return [Replicate(), Replicate()]
        return [Shard(split), Shard(0 if packed else split)]

    @register_sharding(attention_forward)
    def of_attention(query, key, value, mask, slopes, sink, cu_q, cu_k, rng, *options):
        tensors = (query, key, value, mask, slopes, sink, cu_q, cu_k, rng)
        packed = cu_q is not None
        return [
            (
                attention_outputs(split, packed),
                attention_inputs(split, *tensors) + [None] * len(options),
            )
            for split in attention_splits(query, key, packed)
        ]

    @register_sharding(attention_backward)
    def of_attention_backward(dout, dlse, out, lse, query, key, value, mask, slopes, sink, *others):
        cu_q, cu_k, rng, *options = others
        tensors = (query, key, value, mask, slopes, sink, cu_q, cu_k, rng)
        wanted = options[-1]
        packed = cu_q is not None
        rules = []
        for split in attention_splits(query, key, packed):
            of_out, of_lse = attention_outputs(split, packed)
            inputs = attention_inputs(split, *tensors)
            gradients = []
            for is_wanted, placement in zip(wanted, [*inputs[:4], inputs[5]], strict=True):
                if not is_wanted or placement is None:
                    gradients.append(None)
                elif split is not None and placement == Replicate():  # of all processes' share
                    gradients.append(Partial())
                else:
                    gradients.append(placement)
            beside = [of_out, *same([dlse], of_lse), of_out, of_lse]
            rules.append((gradients, beside + inputs + [None] * len(options)))
        return rules

    @register_sharding(attention_rng)
    def of_attention_rng(query):
        return [([Replicate()], [p]) for p in placements_beside(query.ndim)]

    # What a rule may depend on beside the tensors. register_sharding would remember its answer for
    # every normalized_shape, output_mask, dim or causal.
    info = propagator.op_to_schema_info
    first_options = {
        norm_forward: 3,
        norm_backward: 6,
        gated_forward: 3,
        gated_backward: 5,
        softmax_forward: 1,
        scaled_masked_softmax: 2,
        softmax_backward: 2,
        attention_forward: 9,
        attention_backward: 13,
    }
    for op, first_option in first_options.items():
        info[op] = RuntimeSchemaInfo(first_option, needs_pytree=True)
