"""The autograd layer: what a norm saves for its backward pass, and the gradients from it.

``memory_efficient`` saves the output instead of the input. A transformer keeps that output anyway
(the next linear layer saves it), so the norm's own saved activation becomes free. The idea is that
of apex's fused layer norm; unlike there, the normalized input of columns that the output does not
determine is saved beside it.
"""

import gc

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fused_norm import _ops

SAVE_INPUT = -1
_OVERFLOW_PENDING = -2
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def choose_room(input, weight, bias, normalized_shape, weight_offset, out_dtype) -> int:
    """How many columns a ``memory_efficient`` call should have room for, or SAVE_INPUT
    (csrc/ops/column_watch.h).

    Raises:
        RuntimeError: an earlier call had more such columns than room, and its gradients are NaN.
    """
    if weight is None and bias is None:
        return 0
    for tensor in (input, weight, bias):
        if tensor is not None and type(tensor) not in _PLAIN:  # a tracer's, or distributed
            return SAVE_INPUT
    cols = 1
    for size in normalized_shape:
        cols *= size
    room = _ops._C.choose_room(
        weight, bias, weight_offset, cols, input.dtype, out_dtype or input.dtype
    )
    if room == _OVERFLOW_PENDING:
        _raise_overflow()
    return room


def _raise_overflow():
    address, description, columns = _ops._C.take_overflow()
    name = _name_of_norm(address) or description
    raise RuntimeError(
        f"{name}: memory_efficient=True had no room for {columns} column(s) whose weight became "
        "zero, or small beside the bias, since the parameters were last looked at. The gradients "
        "of that backward pass are NaN: discard them. Change parameters in place under "
        "torch.no_grad() rather than through .data, and capture or compile anew after it, or use "
        "memory_efficient=False for this norm"
    )


def _name_of_norm(address: int) -> str | None:
    """The norm that owns the parameter, by its longest name in any module; for a message."""
    modules = [obj for obj in gc.get_objects() if issubclass(type(obj), torch.nn.Module)]
    for norm in modules:
        if not isinstance(norm, (torch.nn.LayerNorm, torch.nn.RMSNorm)):
            continue
        if all(p._cdata != address for p in norm.parameters(recurse=False)):
            continue
        names = [name for root in modules for name, m in root.named_modules() if m is norm]
        name = max(names, key=len)
        return f"{name} = {norm}" if name else str(norm)
    return None


class NormFunction(torch.autograd.Function):
    """LayerNorm (``rms=False``) or RMSNorm over the last dimensions.

    ``apply(input, weight, bias, normalized_shape, eps, weight_offset, rms, out_dtype, room)`` gives
    what the operator does: ``(output, mean, rstd)``, or ``(output, rstd, side, columns)`` with
    ``room > 0``; only ``output`` is differentiable. ``room`` is SAVE_INPUT, or the room for listed
    columns of a call that saves its output. First derivatives only: asking for a second one raises.
    """

    @staticmethod
    def forward(
        ctx, input, weight, bias, normalized_shape, eps, weight_offset, rms, out_dtype, room
    ):
        args = (input, weight, bias, normalized_shape, eps, weight_offset, rms, out_dtype)
        if room > 0:
            results = _ops.call_below_autograd(_ops.norm_forward_listing, *args, room)
            output, rstd, side, columns = results
            ctx.save_for_backward(output, None, rstd, weight, bias, side, columns)
        else:
            results = _ops.call_below_autograd(_ops.norm_forward, *args)
            output, mean, rstd = results
            if room == 0:
                ctx.save_for_backward(output, None, rstd, weight, bias)
            else:
                ctx.save_for_backward(input, None if rms else mean, rstd, weight, bias)
        ctx.mark_non_differentiable(*results[1:])
        ctx.set_materialize_grads(False)
        ctx.args = (normalized_shape, weight_offset, rms, room != SAVE_INPUT, input.dtype)
        return results

    @staticmethod
    def backward(ctx, dy, *_):
        if dy is None:
            return (None,) * 9
        tensors = ctx.saved_tensors
        args = (dy, *tensors[:5], *ctx.args, ctx.needs_input_grad[:3], *tensors[5:])
        if torch.is_grad_enabled():  # create_graph=True: the operator's Autograd kernel decides
            gradients = _ops.norm_backward(*args)
        else:
            gradients = _ops.call_below_autograd(_ops.norm_backward, *args)
        return (*gradients, None, None, None, None, None, None)


def _needs_grad(*tensors) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _norm_forward_autograd(
    input, weight, bias, normalized_shape, eps, weight_offset=0.0, rms=False, out_dtype=None
):
    args = (input, weight, bias, normalized_shape, eps, weight_offset, rms, out_dtype)
    if _needs_grad(input, weight, bias):
        return NormFunction.apply(*args, SAVE_INPUT)
    return _ops.call_below_autograd(_ops.norm_forward, *args)


def _norm_forward_listing_autograd(
    input, weight, bias, normalized_shape, eps, weight_offset, rms, out_dtype, room
):
    args = (input, weight, bias, normalized_shape, eps, weight_offset, rms, out_dtype)
    if room > 0 and _needs_grad(input, weight, bias):
        return NormFunction.apply(*args, room)
    if _needs_grad(input, weight, bias):
        raise RuntimeError(f"room is {room}; a call that is differentiated needs room")
    return _ops.call_below_autograd(_ops.norm_forward_listing, *args, room)


def _norm_backward_autograd(dy, saved, mean, rstd, weight, bias, *args):
    if _needs_grad(dy, saved, weight, bias):
        raise RuntimeError(
            "fused_norm does not compute second derivatives of a norm yet: call backward() or "
            "torch.autograd.grad() without create_graph=True, or use torch.nn's norm in this place"
        )
    return _ops.call_below_autograd(_ops.norm_backward, dy, saved, mean, rstd, weight, bias, *args)


# So that other changes of parameters are known from an optimizer's (csrc/ops/column_watch.cpp).
register_optimizer_step_post_hook(lambda *_: _ops._C.note_optimizer_step())

_library = torch.library.Library("fused_norm", "IMPL")
_library.impl("norm_forward", _norm_forward_autograd, "Autograd")
_library.impl("norm_forward_listing", _norm_forward_listing_autograd, "Autograd")
_library.impl("norm_backward", _norm_backward_autograd, "Autograd")
