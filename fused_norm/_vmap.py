"""How ``torch.vmap`` sees the operators. Of a norm a batch dimension is more rows, for as long as
the parameters have none, and else a dimension for the decompositions to broadcast over; of a
softmax it is more rows in any case. Of attention it is more heads: mask, sinks and slopes may have
it too."""

import torch
from torch import Tensor

from fused_norm import _decompositions, _ops


def _shape_of_one(tensor: Tensor, dim: int | None) -> torch.Size:
    """Of the tensor as the function sees it that is mapped over its batch dimension."""
    return tensor.shape if dim is None else tensor.shape[:dim] + tensor.shape[dim + 1 :]


def _check(op, in_dims, args) -> None:
    """The operator's own checks, of one element of the batch."""
    pairs = zip(args, in_dims, strict=True)
    _ops.check(
        op, *((_shape_of_one(a, d), a.dtype) if isinstance(a, Tensor) else a for a, d in pairs)
    )


def _with_batch(tensor: Tensor | None, dim: int | None, batch_size: int) -> Tensor | None:
    """The tensor with its batch dimension first, whether or not it has one."""
    if tensor is None:
        return None
    return tensor.expand(batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _broadcasting(tensor: Tensor | None, dim: int | None, ndim: int) -> Tensor | None:
    """The tensor as it broadcasts against one of ``ndim`` dimensions, the batch first."""
    if tensor is None or dim is None:
        return tensor
    tensor = tensor.movedim(dim, 0)
    return tensor.reshape(tensor.shape[0], *[1] * (ndim - tensor.dim()), *tensor.shape[1:])


def _of_rows(name, info, in_dims, args) -> tuple:
    """The call of a norm's operator with the batch in its rows, and its results."""
    op, decomposition = getattr(_ops, name), getattr(_decompositions, name)
    _check(op, in_dims, args)
    call, dims = (_ops.call_type(op)(*values)._asdict() for values in (args, in_dims))
    for name in {"input", "residual", "gate"} & set(call):
        call[name] = _with_batch(call[name], dims[name], info.batch_size)
    parameters = {"weight", "bias"} & set(call)
    for name in parameters:
        call[name] = _broadcasting(call[name], dims[name], call["input"].dim())
    # No list of columns serves a batch of them.
    is_kernel = all(dims[name] is None for name in parameters) and call.get("room") is None
    return call, (op if is_kernel else decomposition)(*call.values())


@torch.library.register_vmap("fused_norm::norm_forward")
def _norm_forward(info, in_dims, *args):
    call, results = _of_rows("norm_forward", info, in_dims, args)
    if call["room"] is None:
        return results, [0] * (len(results) - 2) + [None if call["rms"] else 0, 0]
    results[-2] = results[-2].view(info.batch_size, -1, call["room"])
    return results, [0] * (len(results) - 1) + [None]


@torch.library.register_vmap("fused_norm::rms_norm_gated_forward")
def _gated_forward(info, in_dims, *args):
    return _of_rows("rms_norm_gated_forward", info, in_dims, args)[1], (0, 0)


@torch.library.register_vmap("fused_norm::softmax_forward")
def _softmax_forward(info, in_dims, *args):
    _check(_ops.softmax_forward, in_dims, args)
    call, dims = _ops.SoftmaxCall(*args), _ops.SoftmaxCall(*in_dims)
    x = _with_batch(call.input, dims.input, info.batch_size)
    rows = x if x.dim() > 1 else x.unsqueeze(-1)  # a dimension beside that of the batch
    call = call._replace(
        input=rows,
        dim=call.dim if call.dim < 0 else min(call.dim - x.dim() + 1, -1),  # from the end
        mask=_broadcasting(call.mask, dims.mask, rows.dim()),
    )
    return _ops.softmax_forward(*call).view(x.shape), 0


def _into_heads(tensor, dim, batch_size, heads_at) -> Tensor:
    """The batch within the heads, which are ``heads_at`` from the end, before what was there."""
    tensor = _with_batch(tensor, dim, batch_size).movedim(0, -heads_at - 1)
    return tensor.flatten(-heads_at - 1, -heads_at)


def _out_of_heads(tensor, size, at, heads=-1) -> Tensor | None:
    return None if tensor is None else tensor.unflatten(-at, (size, heads)).movedim(-at - 1, 0)


def _mask_with_heads(mask, dim, batch_size, heads) -> Tensor:
    """The mask with the batch within its heads; as it is if it has neither."""
    shape = _shape_of_one(mask, dim)
    if dim is None and (len(shape) < 3 or shape[-3] == 1):
        return mask
    mask = _with_batch(mask, dim, batch_size)
    mask = mask.reshape(batch_size, *[1] * (4 - len(shape)), *shape)
    return _into_heads(mask.expand(-1, -1, heads, -1, -1), 0, batch_size, 3)


def _with_heads(call, dims, batch_size):
    """A call of an attention operator with the batch within the heads of its tensors."""
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        if getattr(call, name) is not None and getattr(dims, name) is not None:
            raise RuntimeError(f"{name} must not have a dimension of vmap: it is of all calls")
    if dims.rng is not None:  # one seed is enough where heads differ in number
        call = call._replace(rng=call.rng.select(dims.rng, 0))
    places = _ops.head_dims(call)
    heads = _shape_of_one(call.query, dims.query)[-places["query"]]
    tensors = {}
    for name, heads_at in places.items():
        tensor, dim = getattr(call, name), getattr(dims, name)
        if name == "attn_mask":
            tensors[name] = _mask_with_heads(tensor, dim, batch_size, heads)
        else:
            tensors[name] = _into_heads(tensor, dim, batch_size, heads_at)
    return call._replace(**tensors)


@torch.library.register_vmap("fused_norm::attention_forward")
def _attention_forward(info, in_dims, *args):
    _check(_ops.attention_forward, in_dims, args)
    call, dims, size = _ops.AttentionCall(*args), _ops.AttentionCall(*in_dims), info.batch_size
    out, lse = _ops.attention_forward(*_with_heads(call, dims, size))
    at = _ops.head_dims(call)["query"]
    heads = _shape_of_one(call.query, dims.query)[-at]  # an empty batch does not tell them
    return (_out_of_heads(out, size, at, heads), _out_of_heads(lse, size, 2, heads)), (0, 0)


def _one_after_another(op, size, in_dims, args) -> list[Tensor | None]:
    """The results of a call for each element of the batch, or of one of zeros if it has none."""

    def element(arg, dim, i):
        if not isinstance(dim, int):
            return arg
        return arg.select(dim, i) if size else arg.new_zeros(_shape_of_one(arg, dim))

    results = []
    for i in range(max(size, 1)):
        pairs = zip(args, in_dims, strict=True)
        results.append(op(*(element(arg, dim, i) for arg, dim in pairs)))
    return [
        None if each[0] is None else torch.stack(each)[:size] for each in zip(*results, strict=True)
    ]


_Backward = _ops.call_type(_ops.attention_backward)


@torch.library.register_vmap("fused_norm::attention_backward")
def _attention_backward(info, in_dims, *args):
    call, dims, size = _Backward(*args), _Backward(*in_dims), info.batch_size
    # A mask's gradient is of each call, and dropout's mask is that of forward, which counted its
    # own heads. Without a batch there are no heads.
    if call.dropout_p > 0 or call.output_mask[3] or size == 0:
        results = _one_after_another(_ops.attention_backward, size, in_dims, args)
    else:
        at = _ops.head_dims(call)["query"]
        *of_qkv, _, dsink = _ops.attention_backward(*_with_heads(call, dims, size))
        results = [_out_of_heads(gradient, size, at) for gradient in of_qkv]
        results += [None, _out_of_heads(dsink, size, 1)]
    return tuple(results), tuple(None if result is None else 0 for result in results)


@torch.library.register_vmap("fused_norm::attention_rng")
def _attention_rng(info, in_dims, query):
    if info.randomness != "different":
        raise RuntimeError(
            f"vmap's randomness is '{info.randomness}', but dropout in attention drops other "
            "probabilities for each element: use randomness='different', or dropout_p=0"
        )
    rng = _ops.attention_rng(query.movedim(in_dims[0], 0))
    # A decomposition within vmap counts the heads of one element: each has a seed of its own.
    return rng + torch.arange(2 * info.batch_size, device=rng.device).view(-1, 2), 0
