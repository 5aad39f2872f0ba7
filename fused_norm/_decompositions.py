"""The operators of norms, gated norms and softmaxes as chains of torch's own, for what the kernels
do not do: second and higher derivatives, forward-mode derivatives, torch.func transforms, compilers
that are to fuse a norm with its neighbours, and ONNX. Attention's: _attention_decomposition.py.

Same arguments and results as the operators of the same names; arithmetic and dtypes as in the
kernels, roundings in the last place aside. Every function is differentiable in every tensor.
"""

import torch
from torch import Tensor

from fused_norm import _ops, _torch


def accumulate_dtype(input_dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if input_dtype is torch.float64 else torch.float32


def _row_dims(normalized_shape) -> list[int]:
    return list(range(-len(normalized_shape), 0))


def _effective_weight(call, dtype: torch.dtype) -> Tensor | None:
    return None if call.weight is None else call.weight.to(dtype) + call.weight_offset


def add(input: Tensor, residual: Tensor, dtype: torch.dtype) -> Tensor:
    """``input + residual`` as it is normalized: rounded to ``dtype`` once."""
    accumulate = accumulate_dtype(dtype)
    return (input.to(accumulate) + residual.to(accumulate)).to(dtype)


def norm_forward(*args) -> list[Tensor]:
    """With room no column is listed: the chain is its own backward pass."""
    call = _ops.NormCall(*args)
    input, residual, room, sums = call.input, call.residual, call.room, []
    out_dtype = call.out_dtype or input.dtype
    if residual is not None:
        input = add(input, residual, call.residual_dtype or residual.dtype)
        sums = [input]
    dtype = accumulate_dtype(input.dtype)
    dims = _row_dims(call.normalized_shape)
    x = input.to(dtype)
    if call.rms:
        mean = x.new_empty([0])
    else:
        mean = x.mean(dims, keepdim=True)
        x = x - mean
    rstd = torch.rsqrt((x * x).mean(dims, keepdim=True) + call.eps)
    output = x * rstd
    if call.weight is not None:
        output = output * _effective_weight(call, dtype)
    if call.bias is not None:
        output = output + call.bias.to(dtype)
    output = output.to(out_dtype)
    if room is None:
        return [output, *sums, mean, rstd]
    columns = torch.zeros(room + 1, dtype=torch.int32, device=input.device)
    return [output, *sums, rstd, rstd.new_zeros(rstd.numel(), room), columns]


def softmax_forward(
    input, dim, log=False, out_dtype=None, mask=None, scale=1.0, causal=False
) -> Tensor:
    """As torch's, in the precision of the kernels; rows that are hidden altogether give zeros."""
    x = input.to(accumulate_dtype(input.dtype))
    if scale != 1:
        x = x * scale
    if mask is not None:
        hides = mask.dtype is torch.bool
        x = x.masked_fill(mask, -torch.inf) if hides else x + mask.to(x.dtype)
    if causal:
        queries, keys = x.shape[-2:]
        later = torch.ones(queries, keys, dtype=torch.bool, device=x.device)
        x = x.masked_fill(later.triu(keys - queries + 1), -torch.inf)
    if mask is not None or causal:
        empty = (x == -torch.inf).all(-1, keepdim=True)
        y = _torch.softmax(x.masked_fill(empty, 0), -1).masked_fill(empty, 0)
    else:
        y = _torch.log_softmax(x, dim) if log else _torch.softmax(x, dim)
    return y.to(out_dtype or input.dtype)


def softmax_backward(dy, output, dim, log, input_dtype, scale=1.0) -> Tensor:
    """dx = scale (dy - sum(dy p)) p, and of the logarithm scale (dy - p sum(dy)), p the softmax."""
    dtype = accumulate_dtype(input_dtype)
    dy, y = dy.to(dtype), output.to(dtype)
    if log:
        dx = dy - y.exp() * dy.sum(dim, keepdim=True)
    else:
        dx = (dy - (dy * y).sum(dim, keepdim=True)) * y
    return (dx * scale).to(input_dtype)


def _listed_slots(columns: Tensor, cols: int) -> Tensor:
    """The column of each slot of `side`; `cols`, one past the last, for slots that are empty."""
    slots = torch.arange(columns.numel() - 1, device=columns.device)
    return torch.where(slots < columns[0], columns[1:].long(), cols)


def _xhat(call) -> Tensor:
    """Of a call of one of the backward operators."""
    saved, rstd, side, columns = call.saved, call.rstd, call.side, call.columns
    dtype = rstd.dtype
    if not call.from_output:
        x = saved.to(dtype)
        return (x if call.rms else x - call.mean) * rstd
    g, y = _effective_weight(call, dtype), saved.to(dtype)
    b = None if call.bias is None else call.bias.to(dtype)
    if side is None or columns.numel() == 1:
        xhat = y if b is None else y - b
        return xhat if g is None else xhat / g
    # Listed columns: a division by 1 in place of one by 0, whose derivative would be NaN times 0.
    # Then what was saved of them, and a last column for the slots that are empty.
    lead = y.shape[: y.dim() - len(call.normalized_shape)]
    cols = y.shape[len(lead) :].numel()
    index = _listed_slots(columns, cols)
    is_listed = torch.zeros(cols + 1, dtype=torch.bool, device=y.device)
    is_listed = is_listed.index_fill(0, index, True)[:cols].view(y.shape[len(lead) :])
    xhat = y if b is None else y - torch.where(is_listed, 0, b)
    xhat = xhat if g is None else xhat / torch.where(is_listed, 1, g)
    flat = torch.nn.functional.pad(xhat.reshape(*lead, cols), (0, 1))
    flat = flat.index_copy(-1, index, side.reshape(*lead, side.shape[-1]))
    # More columns than room: the operator's gradients are NaN.
    flat = torch.where(columns[0] < columns.numel(), flat, torch.nan)
    return flat[..., :cols].reshape(y.shape)


def _project(dxhat, xhat, rstd, dims, rms):
    """The input's gradient from that of the normalized input."""
    dx = dxhat - xhat * (dxhat * xhat).mean(dims, keepdim=True)
    if not rms:
        dx = dx - dxhat.mean(dims, keepdim=True)
    return rstd * dx


_Backward = _ops.call_type(_ops.norm_backward)


def norm_backward(*args) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dweight, dbias), None where ``output_mask`` is false.

    A function of ``rstd`` and ``mean`` as well: they are functions of the input, and their own
    derivatives are :func:`statistics_backward`.
    """
    call = _Backward(*args)
    weight, bias, dtype = call.weight, call.bias, call.rstd.dtype
    dims = _row_dims(call.normalized_shape)
    dy, xhat = call.dy.to(dtype), _xhat(call)
    dx = dweight = dbias = None
    if call.output_mask[0]:
        g = _effective_weight(call, dtype)
        dx = _project(dy if g is None else dy * g, xhat, call.rstd, dims, call.rms)
        dx = dx if call.dresidual is None else dx + call.dresidual.to(dtype)
        dx = dx.to(call.input_dtype)
    if call.output_mask[1] and weight is not None:
        dweight = (dy * xhat).sum_to_size(weight.shape).to(weight.dtype)
    if call.output_mask[2] and bias is not None:
        dbias = dy.sum_to_size(bias.shape).to(bias.dtype)
    return dx, dweight, dbias


_Statistics = _ops.call_type(torch.ops.fused_norm.norm_statistics_backward.default)


def statistics_backward(*args) -> Tensor:
    """The input's gradient from those of what was saved beside it, each of which may be None:

    d rstd / d x = -rstd^2 xhat / N,    d mean / d x = 1 / N,    side: some columns of xhat
    """
    call = _Statistics(*args)
    saved, rstd, dside = call.saved, call.rstd, call.dside
    dims = _row_dims(call.normalized_shape)
    cols = saved.shape[saved.dim() - len(dims) :].numel()
    dx = torch.zeros_like(saved, dtype=rstd.dtype)
    if call.drstd is not None or dside is not None:
        xhat = _xhat(call)
    if call.drstd is not None:
        dx = dx - call.drstd * rstd.square() * xhat / cols
    if call.dmean is not None:
        dx = dx + call.dmean / cols
    if dside is not None:
        dxhat = dside.new_zeros(dside.shape[0], cols + 1)
        dxhat = dxhat.index_add(1, _listed_slots(call.columns, cols), dside)
        dxhat = dxhat[:, :cols].reshape(saved.shape)
        dx = dx + _project(dxhat, xhat, rstd, dims, call.rms)
    return dx.to(call.input_dtype)


def rms_norm_gated_forward(*args) -> tuple[Tensor, Tensor]:
    call = _ops.GatedCall(*args)
    input, group = call.input, call.group_size
    dtype = accumulate_dtype(input.dtype)
    lead = input.shape[: input.dim() - len(call.normalized_shape)]
    cols = input.shape[len(lead) :].numel()
    groups = [1, cols] if group is None else [cols // group, group]
    x, gate = (t.to(dtype).reshape(*lead, *groups) for t in (input, call.gate))
    act = torch.sigmoid(gate) * gate if call.silu else torch.sigmoid(gate)
    x = x if call.norm_before_gate else x * act
    rstd = torch.rsqrt((x * x).mean(-1, keepdim=True) + call.eps)
    y = x * rstd
    if call.weight is not None:
        g = _effective_weight(call, dtype)
        y = y * g.reshape(*g.shape[: -len(call.normalized_shape)], *groups)
    y = y * act if call.norm_before_gate else y
    return y.reshape(input.shape).to(input.dtype), rstd.squeeze(-1)


def gradients(forward, call, inputs, wanted, of_results) -> tuple[Tensor | None, ...]:
    """The gradients of the call's tensors that ``inputs`` names, from those of the results of
    ``forward``, each of which may be None. None where ``wanted`` is false, or there is no tensor.
    """
    pairs = [(n, getattr(call, n)) for n, w in zip(inputs, wanted, strict=True) if w]
    differentiates = torch.is_grad_enabled()
    # Not by torch.func, which does not work within an operator that it transforms.
    with torch.enable_grad(), _torch.allow_requires_grad(True):
        tensors = {n: t.view_as(t).requires_grad_() for n, t in pairs if t is not None}
        if not tensors:
            return (None,) * len(inputs)
        results = forward(*call._replace(**tensors))
    pairs = zip(results, of_results, strict=True)  # attention's lse is no function of value
    made, given = zip(*((r, g) for r, g in pairs if g is not None and r.requires_grad), strict=True)
    found = torch.autograd.grad(made, [*tensors.values()], given, create_graph=differentiates)
    return tuple(map(dict(zip(tensors, found, strict=True)).get, inputs))


def rms_norm_gated_backward(dy, rstd, *args) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Makes rstd again: its own gradient is a part of the input's."""
    *args, wanted = args
    inputs = ("input", "gate", "weight")
    return gradients(rms_norm_gated_forward, _ops.GatedCall(*args), inputs, wanted, (dy, None))
