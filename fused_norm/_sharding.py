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

    register_strategy = DTensor._op_dispatcher.sharding_propagator.register_op_strategy

    def rules_of(name, first_option):
        """Registers a function from the operator's arguments to its rules, each a list of the
        outputs' placements and one of the tensor arguments'. Not by torch's register_sharding,
        which knows no operator that gives a list of tensors, and remembers its answer for every
        normalized_shape, output_mask, dim or causal: on the arguments from ``first_option`` on a
        rule may depend."""

        def register(function):
            def strategy(schema):
                args = [
                    arg.strategies[0].output_spec if isinstance(arg, OpStrategy) else arg
                    for arg in schema.args_schema
                ]
                rules = function(*args)
                placements = [outputs + inputs for outputs, inputs in rules]
                count = len(rules[0][0])
                mesh = args[0].mesh
                return expand_to_full_mesh_op_strategy(mesh, schema, placements, input_index=count)

            op = getattr(torch.ops.fused_norm, name).default
            register_strategy(op, strategy, RuntimeSchemaInfo(first_option, needs_pytree=True))
            return function

        return register

    def of_rows(tensor, normalized_shape):
        return [Replicate(), *map(Shard, range(tensor.ndim - len(normalized_shape)))]

    def beside(ndim, *dims):
        """Placements of a tensor that is whole along these dimensions."""
        whole = {dim % ndim for dim in dims if ndim}
        return [Replicate(), *(Shard(d) for d in range(ndim) if d not in whole)]

    def each(tensors, placement):
        """The placement for each tensor of a list, None for what is None."""
        return [None if tensor is None else placement for tensor in tensors]

    def summed(placement):
        """Of a sum over what is so placed."""
        return Partial() if isinstance(placement, Shard) else Replicate()

    def of_gradients(wanted, tensors, placements):
        """None for a gradient that is not wanted, or of no tensor."""
        cases = zip(wanted, tensors, placements, strict=True)
        return [p if is_wanted and t is not None else None for is_wanted, t, p in cases]

    @rules_of("norm_forward", 3)
    def norm(input, weight, bias, normalized_shape, _, *options):
        _, is_rms, _, residual, _, room = (*options, *[None] * (6 - len(options)))
        if room is not None:
            raise NotImplementedError("norm_forward lists no columns of a DTensor")
        rules = []
        for p in of_rows(input, normalized_shape):
            outputs = [p] if residual is None else [p, p]
            # An RMSNorm's mean is an empty tensor, the same everywhere.
            outputs += [Replicate() if is_rms else p, p]
            rules.append((outputs, [p, *each((weight, bias), Replicate()), *each([residual], p)]))
        return rules

    @rules_of("norm_backward", 6)
    def norm_backward(dy, saved, mean, rstd, weight, bias, normalized_shape, *options):
        # more: side and columns, which DTensors never have, and dresidual
        _, is_rms, _, _, mask, *more = options
        rules = []
        for p in of_rows(dy, normalized_shape):
            outputs = of_gradients(mask, (dy, weight, bias), (p, summed(p), summed(p)))
            inputs = [p, p, *each([mean], Replicate() if is_rms else p), p]
            inputs += each((weight, bias), Replicate())
            rules.append((outputs, inputs + each(more, p)))
        return rules

    @rules_of("rms_norm_gated_forward", 3)
    def gated(input, gate, weight, normalized_shape, *_):
        placements = of_rows(input, normalized_shape)
        return [([p, p], [p, p, *each([weight], Replicate())]) for p in placements]

    @rules_of("rms_norm_gated_backward", 5)
    def gated_backward(dy, rstd, *args):
        input, gate, weight, *_, mask = args
        rules = []
        for (p, _), inputs in gated(*args):
            outputs = of_gradients(mask, (input, gate, weight), (p, p, summed(p)))
            rules.append((outputs, [p, p, *inputs]))
        return rules

    @rules_of("softmax_forward", 1)
    def softmax(input, dim, *_):
        return [([p], [p]) for p in beside(input.ndim, dim)]

    @rules_of("softmax_backward", 2)
    def softmax_backward(dy, output, dim, *_):
        return [([p], [p, p]) for p in beside(dy.ndim, dim)]

    @rules_of("scaled_masked_softmax", 2)
    def masked_softmax(input, mask, *options):
        causal = len(options) > 1 and options[1]  # a query's number tells what it may see
        rules = []
        for placement in beside(input.ndim, -1, *([-2] if causal else [])):
            of_mask = Replicate()
            if mask is not None and isinstance(placement, Shard):
                dim = placement.dim - input.ndim + mask.ndim
                if dim >= 0 and mask.shape[dim] > 1:
                    of_mask = Shard(dim)
            rules.append(([placement], [placement, *each([mask], of_mask)]))
        return rules

    @rules_of("attention_forward", 9)
    def attention(query, key, value, mask, slopes, sink, cu_q, cu_k, rng, *_):
        """A call is split over the processes by sequences, by heads, or not at all."""
        packed = cu_q is not None
        heads_at = 2 if packed else 3  # from the end

        def placement(split, tensor, heads_at, broadcasts=False):
            if tensor is None:
                return None
            dim = -1 if split is None else tensor.ndim - heads_at - (1 - split)
            whole = dim < 0 or (broadcasts and tensor.shape[dim] == 1)
            return Replicate() if whole else Shard(dim)

        splits = [None] if packed else [None, 0]  # the dimension of (batch, heads)
        # A group of heads stays with its key head.
        kv_heads = (query if key is None else key).shape[-heads_at]
        if kv_heads % query.mesh.size() == 0:
            splits.append(1)
        rules = []
        for split in splits:
            inputs = [placement(split, tensor, heads_at) for tensor in (query, key, value)]
            inputs.append(placement(split, mask, 3, broadcasts=True))
            inputs += [placement(split, slopes, 1), placement(split, sink, 1)]
            inputs += each((cu_q, cu_k, rng), Replicate())
            outputs = [Replicate()] * 2
            if split is not None:
                outputs = [Shard(split), Shard(0 if packed else split)]
            rules.append((outputs, inputs))
        return rules

    @rules_of("attention_backward", 13)
    def attention_backward(dout, dlse, out, lse, *args):
        rules = []
        for (of_out, of_lse), inputs in attention(*args):
            of_leaves = [*inputs[:4], inputs[5]]
            # What every process has whole got its share of the gradient from its own part.
            is_split = isinstance(of_out, Shard)
            placements = [Partial() if is_split and p == Replicate() else p for p in of_leaves]
            gradients = of_gradients(args[-1], of_leaves, placements)
            rules.append((gradients, [of_out, *each([dlse], of_lse), of_out, of_lse, *inputs]))
        return rules

    @rules_of("attention_rng", 1)
    def attention_rng(query):
        return [([Replicate()], [p]) for p in beside(query.ndim)]
