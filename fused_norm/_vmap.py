"""How ``torch.vmap`` sees the operators. Of a norm a batch dimension is more rows, for as long as
the parameters have none, and else a dimension for the decompositions to broadcast over; of a
softmax it is more rows in any case. Of attention it is more heads: mask, sinks and slopes may have
it too."""

import dataclasses

import torch
from torch import Tensor

from fused_norm import _decompositions, _ops


@dataclasses.dataclass(frozen=True)
class _One:
    """One tensor of a batch, as far as the operators' checks ask."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def dim(self) -> int:
        return len(self.shape)


def _one_of_each(in_dims, *tensors) -> list:
    """The tensors as the function sees them that is mapped over their batch dimensions."""
    return [
        tensor
        if tensor is None or dim is None
        else _One(tensor.shape[:dim] + tensor.shape[dim + 1 :], tensor.dtype, tensor.device)
        for tensor, dim in zip(tensors, in_dims, strict=False)
    ]


def _batch_first(tensor: Tensor | None, dim: int | None) -> Tensor | None:
    return tensor if tensor is None or dim is None else tensor.movedim(dim, 0)


def _with_batch(tensor: Tensor, dim: int | None, batch_size: int) -> Tensor:
    if dim is None:
        return tensor.expand(batch_size, *tensor.shape)
    return tensor.movedim(dim, 0)


def _parameter(tensor: Tensor | None, dim: int | None, input_dims: int) -> Tensor | None:
    """A parameter that broadcasts against an input of ``input_dims`` dimensions, batch first."""
    tensor = _batch_first(tensor, dim)
    if tensor is None or dim is None:
        return tensor
    between = input_dims - tensor.dim()
    return tensor.reshape(tensor.shape[0], *[1] * between, *tensor.shape[1:])


@torch.library.register_vmap("fused_norm::norm_forward")
def _norm_forward(info, in_dims, *args):
    call = _ops.NormCall(*args)
    dims = dict(enumerate(in_dims))
    names = {0: "input", 1: "weight", 2: "bias", 8: "residual"}
    of_one = _one_of_each([dims.get(at) for at in names], *(call[at] for at in names))
    _ops.check_norm_arguments(*call._replace(**dict(zip(names.values(), of_one, strict=True))))
    x = _with_batch(call.input, dims[0], info.batch_size)
    residual = call.residual
    if residual is not None:
        residual = _with_batch(residual, dims[8], info.batch_size)
    weight, bias = (_parameter(call[at], dims[at], x.dim()) for at in (1, 2))
    # No list of columns serves a batch of them.
    is_kernel = dims[1] is None and dims[2] is None and call.room is None
    function = _ops.norm_forward if is_kernel else _decompositions.norm_forward
    results = function(*call._replace(input=x, weight=weight, bias=bias, residual=residual))
    if call.room is None:
        return results, [0] * (len(results) - 2) + [None if call.rms else 0, 0]
    results[-2] = results[-2].view(info.batch_size, -1, call.room)
    return results, [0] * (len(results) - 1) + [None]


@torch.library.register_vmap("fused_norm::norm_backward")
def _norm_backward(info, in_dims, dy, saved, mean, rstd, weight, bias, *options):
    """By decomposition: the gradients of parameters are sums within each row of the batch."""
    options, (side, columns, dresidual) = options[:6], (*options[6:], None, None, None)[:3]
    if side is not None:
        side = _with_batch(side, in_dims[12], info.batch_size)
    if dresidual is not None:
        dresidual = _with_batch(dresidual, in_dims[14], info.batch_size)
    dy = _with_batch(dy, in_dims[0], info.batch_size)
    saved = _with_batch(saved, in_dims[1], info.batch_size)
    mean, rstd = _batch_first(mean, in_dims[2]), _batch_first(rstd, in_dims[3])
    weight = _parameter(weight, in_dims[4], dy.dim())
    bias = _parameter(bias, in_dims[5], dy.dim())
    gradients = _decompositions.norm_backward(
        dy, saved, mean, rstd, weight, bias, *options, side, columns, dresidual, batch_dims=1
    )
    return gradients, tuple(None if g is None else 0 for g in gradients)


def _softmax_dim(dim: int, ndim: int) -> int:
    """``dim`` of a tensor of ``ndim`` dimensions where a batch dimension stands before them."""
    return dim + 1 if dim >= 0 else dim + max(ndim, 1) + 1


@torch.library.register_vmap("fused_norm::softmax_forward")
def _softmax_forward(info, in_dims, input, dim, log=False, out_dtype=None):
    x = _with_batch(input, in_dims[0], info.batch_size)
    ndim = x.dim() - 1
    _ops._C.check_softmax_options(input.dtype, out_dtype or input.dtype, ndim, dim)
    rows = x if ndim else x.unsqueeze(-1)
    return _ops.softmax_forward(rows, _softmax_dim(dim, ndim), log, out_dtype).view(x.shape), 0


@torch.library.register_vmap("fused_norm::scaled_masked_softmax")
def _scaled_masked_softmax(info, in_dims, input, mask, scale=1.0, causal=False, out_dtype=None):
    x = _with_batch(input, in_dims[0], info.batch_size)
    ndim = x.dim() - 1
    mask_ndim = 0 if mask is None else mask.dim() - (in_dims[1] is not None)
    _ops._C.check_masked_softmax_options(
        input.dtype,
        None if mask is None else mask.dtype,
        out_dtype or input.dtype,
        ndim,
        scale,
        causal,
    )
    if mask_ndim > ndim:
        raise RuntimeError(
            f"mask has {mask_ndim} dimensions, which does not broadcast to input's {ndim} (without "
            "those of vmap)"
        )
    rows = x if ndim else x.unsqueeze(-1)
    mask = _parameter(mask, in_dims[1], rows.dim())
    return _ops.scaled_masked_softmax(rows, mask, scale, causal, out_dtype).view(x.shape), 0


@torch.library.register_vmap("fused_norm::softmax_backward")
def _softmax_backward(info, in_dims, dy, output, dim, log, input_dtype, scale=1.0):
    dy = _with_batch(dy, in_dims[0], info.batch_size)
    output = _with_batch(output, in_dims[1], info.batch_size)
    ndim = dy.dim() - 1
    _ops._C.check_softmax_options(input_dtype, dy.dtype, ndim, dim)
    shape = dy.shape
    if ndim == 0:
        dy, output = dy.unsqueeze(-1), output.unsqueeze(-1)
    dim = _softmax_dim(dim, ndim)
    return _ops.softmax_backward(dy, output, dim, log, input_dtype, scale).view(shape), 0


def _into_dim(tensor, dim, batch_size, at) -> Tensor | None:
    """The batch dimension within dimension ``at`` of the tensor, before what was there."""
    if tensor is None:
        return None
    return _with_batch(tensor, dim, batch_size).movedim(0, at).flatten(at, at + 1)


def _out_of_dim(tensor, batch_size, at) -> Tensor | None:
    return None if tensor is None else tensor.unflatten(at, (batch_size, -1)).movedim(at, 0)


def _mask_with_heads(mask, dim, batch_size, heads, for_gradient) -> Tensor | None:
    """The mask with the batch within its heads; whole there if it has to be."""
    if mask is None:
        return None
    ndim = mask.dim() - (dim is not None)
    if ndim > 4:
        raise RuntimeError(
            f"attn_mask has {ndim} dimensions, which does not broadcast to (batch, heads, queries, "
            "keys) (without those of vmap)"
        )
    if dim is None and not for_gradient and (ndim < 3 or mask.shape[-3] == 1):
        return mask
    mask = _with_batch(mask, dim, batch_size)
    mask = mask.reshape(batch_size, *[1] * (4 - ndim), *mask.shape[1:])
    mask = mask.expand(batch_size, mask.shape[1], heads, *mask.shape[3:])
    return mask.movedim(0, 1).flatten(1, 2)


class _AttentionHeads:
    """The arguments of an attention operator, from query on, with the batch within their heads."""

    def __init__(self, info, in_dims, args, for_gradient=False):
        self.size = info.batch_size
        dims = dict(enumerate(in_dims))
        query, key, value, mask, slopes, sink, cu_q, cu_k, rng, *options = args
        self.options = options
        for name, at in (("cu_seqlens_q", 6), ("cu_seqlens_k", 7), ("rng", 8)):
            if args[at] is not None and dims[at] is not None:
                raise RuntimeError(f"{name} must not have a dimension of vmap: it is of all calls")
        self.packed = cu_q is not None
        plain = 3 if self.packed else 4

        def extra(tensor, at):  # dimensions before those of a tensor by itself
            return tensor.dim() - (dims[at] is not None) - plain

        self.heads_at = [
            None if tensor is None else 1 + extra(tensor, at)
            for at, tensor in enumerate((query, key, value))
        ]
        self.heads = _batch_first(query, dims[0]).shape[self.heads_at[0] + (dims[0] is not None)]
        qkv = [
            _into_dim(tensor, dims[at], self.size, self.heads_at[at])
            for at, tensor in enumerate((query, key, value))
        ]
        self.mask_shape = None
        if mask is not None:
            self.mask_shape = _batch_first(mask, dims[3]).shape[(dims[3] is not None) :]
        mask = _mask_with_heads(mask, dims[3], self.size, self.heads, for_gradient)
        if slopes is not None:
            of_heads = slopes.dim() - (dims[4] is not None) - 1
            slopes = _into_dim(slopes, dims[4], self.size, of_heads)
        sink = _into_dim(sink, dims[5], self.size, 0)
        self.args = (*qkv, mask, slopes, sink, cu_q, cu_k, rng, *options)

    @property
    def row_heads_at(self) -> int:
        """Of log-sum-exps."""
        return 0 if self.packed else 1


@torch.library.register_vmap("fused_norm::attention_forward")
def _attention_forward(info, in_dims, *args):
    call = _AttentionHeads(info, in_dims, args)
    out, lse = _ops.attention_forward(*call.args)
    lse = _out_of_dim(lse, call.size, call.row_heads_at)
    return (_out_of_dim(out, call.size, 1), lse), (0, 0)


def _each_backward(info, in_dims, args) -> tuple:
    """One call after another: dropout's mask is that of forward, which counted its own heads."""
    results = []
    for i in range(info.batch_size):
        one = [
            arg.select(dim, i) if isinstance(dim, int) else arg
            for arg, dim in zip(args, in_dims, strict=True)
        ]
        results.append(_ops.attention_backward(*one))
    stacked = tuple(
        None if each[0] is None else torch.stack(each) for each in zip(*results, strict=True)
    )
    return stacked, tuple(None if t is None else 0 for t in stacked)


@torch.library.register_vmap("fused_norm::attention_backward")
def _attention_backward(info, in_dims, dout, dlse, out, lse, *args):
    *args, wanted = args
    if args[-1] > 0:
        return _each_backward(info, in_dims, (dout, dlse, out, lse, *args, wanted))
    call = _AttentionHeads(info, in_dims[4:], args, for_gradient=wanted[3])
    size, rows_at = call.size, call.row_heads_at
    gradients = _ops.attention_backward(
        _into_dim(dout, in_dims[0], size, 1),
        _into_dim(dlse, in_dims[1], size, rows_at),
        _into_dim(out, in_dims[2], size, 1),
        _into_dim(lse, in_dims[3], size, rows_at),
        *call.args,
        wanted,
    )
    of_qkv = [
        _out_of_dim(gradient, size, at)
        for gradient, at in zip(gradients[:3], call.heads_at, strict=True)
    ]
    dmask = _out_of_dim(gradients[3], size, 1)  # (vmap, batch, heads, queries, keys)
    if dmask is not None:
        dmask = _sum_to(dmask, call.mask_shape)
    results = (*of_qkv, dmask, _out_of_dim(gradients[4], size, 0))
    return results, tuple(None if t is None else 0 for t in results)


def _sum_to(gradient: Tensor, shape) -> Tensor:
    """Of each mask of the batch, summed over the heads that it was expanded to."""
    if len(shape) < 3 or shape[-3] == 1:
        dtype = gradient.dtype
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        gradient = gradient.sum(2, keepdim=True, dtype=wide).to(dtype)
    return gradient.reshape(gradient.shape[0], *shape)


@torch.library.register_vmap("fused_norm::attention_rng")
def _attention_rng(info, in_dims, query):
    if info.randomness != "different":
        raise RuntimeError(
            f"vmap's randomness is '{info.randomness}', but dropout in attention drops other "
            "probabilities for each element: use randomness='different', or dropout_p=0"
        )
    return _ops.attention_rng(_batch_first(query, in_dims[0])), None
