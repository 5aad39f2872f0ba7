"""How DTensor shards the operators: rows stay where they are, a row is never split.

A sharded dimension of rows needs no communication; the gradients of a norm's parameters are then
partial sums. An input sharded within its rows, or a sharded parameter, is gathered first, as for
torch's own operators.
"""

import functools
import sys

import torch


def register_where_loaded() -> bool:
    """Registers the rules once torch.distributed.tensor is loaded, which no DTensor is without.

    It is not loaded from here: that takes a hundred times as long as loading this package.
    """
    if "torch.distributed.tensor" in sys.modules:
        _register()
    return True


# torch.compiler.assume_constant_result, without loading the compiler: a tracer runs it and keeps no
# trace of it.
register_where_loaded._dynamo_marked_constant = True


@functools.cache
def _register() -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding

    norm_forward = torch.ops.fused_norm.norm_forward.default
    norm_backward = torch.ops.fused_norm.norm_backward.default
    add_norm_forward = torch.ops.fused_norm.add_norm_forward.default
    softmax_forward = torch.ops.fused_norm.softmax_forward.default
    scaled_masked_softmax = torch.ops.fused_norm.scaled_masked_softmax.default
    softmax_backward = torch.ops.fused_norm.softmax_backward.default

    def same(tensors, placement):
        """The placement for each tensor of a list, None for what is None."""
        return [None if tensor is None else placement for tensor in tensors]

    @register_sharding(norm_forward)
    def forward(input, weight, bias, normalized_shape, eps, *options):
        rest = [None] * (2 + len(options))  # arguments that are no tensors
        is_rms = len(options) > 1 and options[1]
        rows = range(input.ndim - len(normalized_shape))
        return [
            (
                # An RMSNorm's mean is an empty tensor, the same everywhere.
                [placement, Replicate() if is_rms else placement, placement],
                [placement, *same((weight, bias), Replicate()), *rest],
            )
            for placement in (Replicate(), *map(Shard, rows))
        ]

    @register_sharding(add_norm_forward)
    def add_forward(input, residual, weight, bias, normalized_shape, eps, *options):
        rules = []
        for outputs, (placement, *others) in forward(
            input, weight, bias, normalized_shape, eps, *options
        ):
            rules.append(([placement, *outputs], [placement, placement, *others]))
        return rules

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

    # What a rule may depend on beside the tensors. register_sharding would remember its answer for
    # every normalized_shape, output_mask, dim or causal.
    info = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    first_options = {
        norm_forward: 3,
        add_norm_forward: 4,
        norm_backward: 6,
        softmax_forward: 1,
        scaled_masked_softmax: 2,
        softmax_backward: 2,
    }
    for op, first_option in first_options.items():
        info[op] = RuntimeSchemaInfo(first_option, needs_pytree=True)
