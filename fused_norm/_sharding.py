"""How DTensor shards the operators: rows stay where they are, a row is never split; of attention,
sequences and groups of heads. Loaded when torch.distributed.tensor is (_ops.py).

A sharded dimension of rows needs no communication; the gradients of a norm's parameters are then
partial sums. An input sharded within its rows, or a sharded parameter, is gathered first, as for
torch's own operators.

Each rule gives, for every way to split a call, the placements of its results, None for what is no
tensor, and those of its tensors by name. A tensor without a name there is whole everywhere.
"""

import math

from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._op_schema import OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

from fused_norm import _ops


def _beside(tensor, *dims) -> list:
    """Placements of a tensor that is whole along these dimensions."""
    whole = {dim % tensor.ndim for dim in dims if tensor.ndim}
    return [Replicate(), *(Shard(d) for d in range(tensor.ndim) if d not in whole)]


def _of_rows(call) -> list:
    """Placements of a norm's first argument, whose last dimensions are a row."""
    return _beside(call[0], *range(-len(call.normalized_shape), 0))


def _summed(placement):
    """Of a sum over what is so placed."""
    return Partial() if isinstance(placement, Shard) else Replicate()


def _of_gradients(call, names, placements) -> list:
    """None for a gradient that is not wanted, or of no tensor."""
    cases = zip(call.output_mask, names, placements, strict=True)
    return [p if wanted and getattr(call, name) is not None else None for wanted, name, p in cases]


def _norm(call):
    if call.room is not None:
        raise NotImplementedError("norm_forward lists no columns of a DTensor")
    for p in _of_rows(call):
        outputs = [p] if call.residual is None else [p, p]
        # An RMSNorm's mean is an empty tensor, the same everywhere.
        yield [*outputs, Replicate() if call.rms else p, p], {"input": p, "residual": p}


def _norm_backward(call):
    for p in _of_rows(call):
        outputs = _of_gradients(call, ("dy", "weight", "bias"), (p, _summed(p), _summed(p)))
        inputs = dict.fromkeys(("dy", "saved", "rstd", "dresidual"), p)
        yield outputs, inputs | {"mean": Replicate() if call.rms else p}


def _gated(call):
    for p in _of_rows(call):
        yield [p, p], {"input": p, "gate": p}


def _gated_backward(call):
    for (p, _), inputs in _gated(call):
        outputs = _of_gradients(call, ("input", "gate", "weight"), (p, p, _summed(p)))
        yield outputs, inputs | {"dy": p, "rstd": p}


def _softmax(call):
    input, mask = call.input, call.mask
    # A query's number tells what it may see.
    for p in _beside(input, call.dim, *([-2] if call.causal else [])):
        of_mask = Replicate()
        if mask is not None and isinstance(p, Shard):
            dim = p.dim - input.ndim + mask.ndim
            if dim >= 0 and mask.shape[dim] > 1:
                of_mask = Shard(dim)
        yield [p], {"input": p, "mask": of_mask}


def _softmax_backward(call):
    for p in _beside(call.dy, call.dim):
        yield [p], {"dy": p, "output": p}


def _keeps_groups(call, tensors) -> bool:
    """Of attention: whether a group of query heads is where its key head is."""
    name = "query" if call.key is None else "key"
    keys, spec = getattr(call, name), tensors[name]  # in torch 2.9 this has placements alone
    heads = keys.ndim - _ops.head_dims(call)["query"]
    n = math.prod(spec.mesh.size(i) for i, p in enumerate(spec.placements) if p.is_shard(heads))
    return keys.shape[heads] % n == 0


def _attention(call):
    """A call is split over the processes by sequences, by heads, or not at all."""
    packed = call.cu_seqlens_q is not None
    yield [Replicate()] * 2, {}
    for split in [1] if packed else [0, 1]:  # the dimension of (batch, heads)
        inputs = {}
        for name, heads_at in _ops.head_dims(call).items():
            tensor = getattr(call, name)
            dim = tensor.ndim - heads_at - (1 - split)
            if dim >= 0 and not (name == "attn_mask" and tensor.shape[dim] == 1):
                inputs[name] = Shard(dim)
        yield [Shard(split), Shard(0 if packed else split)], inputs


def _attention_backward(call):
    names = ("query", "key", "value", "attn_mask", "sink")
    for (of_out, _), inputs in _attention(call):
        # What every process has whole got its share of the gradient from its own part.
        placements = [inputs.get(name, _summed(of_out)) for name in names]
        yield _of_gradients(call, names, placements), inputs


def _attention_rng(call):
    for p in _beside(call.query):
        yield [Replicate()], {"query": p}


def _register(op, rule) -> None:
    """A rule is for each dimension of the mesh. Not by torch's register_sharding, which knows no
    operator that gives a list of tensors, and remembers its answer for every normalized_shape,
    output_mask, dim or causal."""
    call_type, arguments = _ops.call_type(op), op._schema.arguments
    options = [i for i, argument in enumerate(arguments) if "Tensor" not in str(argument.type)]

    def strategy(schema):
        specs = {  # of the tensors
            name: argument.strategies[0].output_spec
            for name, argument in zip(call_type._fields, schema.args_schema, strict=False)
            if isinstance(argument, OpStrategy)
        }
        call = call_type(*schema.args_schema)._replace(**specs)
        rules = list(rule(call))
        placements = [
            [*outputs, *(inputs.get(name, Replicate()) for name in specs)]
            for outputs, inputs in rules
        ]
        count, mesh = len(rules[0][0]), call[0].mesh
        ways = expand_to_full_mesh_op_strategy(mesh, schema, placements, input_index=count)
        if rule in (_attention, _attention_backward):
            ways.strategies = [
                way
                for way in ways.strategies
                if _keeps_groups(call, dict(zip(specs, way.input_specs, strict=True)))
            ]
        return ways

    # On what comes after the tensors a rule may depend.
    info = RuntimeSchemaInfo(min(options, default=len(arguments)), needs_pytree=True)
    DTensor._op_dispatcher.sharding_propagator.register_op_strategy(op, strategy, info)


for _op, _rule in {
    _ops.norm_forward: _norm,
    _ops.norm_backward: _norm_backward,
    _ops.rms_norm_gated_forward: _gated,
    _ops.rms_norm_gated_backward: _gated_backward,
    _ops.softmax_forward: _softmax,
    _ops.softmax_backward: _softmax_backward,
    _ops.attention_forward: _attention,
    _ops.attention_backward: _attention_backward,
    _ops.attention_rng: _attention_rng,
}.items():
    _register(_op, _rule)
