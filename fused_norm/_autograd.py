"""The autograd layer: what a norm saves for its backward pass, and the gradients from it.

``memory_efficient`` saves the output instead of the input. A transformer keeps that output anyway
(the next linear layer saves it), so the norm's own saved activation becomes free. The idea is that
of apex's fused layer norm; unlike there, the normalized input of columns that the output does not
determine is saved beside it.
"""

import gc
import math

import torch
from torch.autograd import forward_ad
from torch.optim.optimizer import register_optimizer_step_post_hook

from fused_norm import _decompositions, _ops

SAVE_INPUT = -1
_OVERFLOW_PENDING = -2
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def choose_room(input, weight, bias, normalized_shape, weight_offset, x_dtype, out_dtype) -> int:
    """How many columns a ``memory_efficient`` call should have room for, or SAVE_INPUT
    (csrc/ops/column_watch.h). ``x_dtype`` is that of what is normalized.

    Raises:
        RuntimeError: an earlier call had more such columns than room, and its gradients are NaN.
    """
    if weight is None and bias is None:
        return 0
    for tensor in (input, weight, bias):
        if tensor is not None and type(tensor) not in _PLAIN:  # a tracer's, or distributed
            return SAVE_INPUT
    try:
        cols = math.prod(normalized_shape)
        room = _ops._C.choose_room(weight, bias, weight_offset, cols, x_dtype, out_dtype)
    except TypeError:  # the operator says what is wrong
        return SAVE_INPUT
    if room == _OVERFLOW_PENDING:
        _raise_overflow()
        return SAVE_INPUT
    return room


def _raise_overflow() -> None:
    overflow = _ops._C.take_overflow()
    if overflow is None:  # another thread took it, and raises
        return
    address, description, columns = overflow
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
    modules = [
        obj
        for obj in gc.get_objects()
        if issubclass(type(obj), torch.nn.Module) and "_modules" in obj.__dict__  # initialized
    ]
    for norm in modules:
        if not isinstance(norm, (torch.nn.LayerNorm, torch.nn.RMSNorm)):
            continue
        if all(p._cdata != address for p in norm.parameters(recurse=False)):
            continue
        names = [name for root in modules for name, m in root.named_modules() if m is norm]
        name = max(names, key=len)
        return f"{name} = {norm}" if name else str(norm)
    return None


def _save(ctx, x, output, statistics, weight, bias, options, room) -> None:
    """Keeps what :func:`_gradients` needs of a call that normalized ``x``. ``statistics`` are
    (mean, rstd), or (rstd, side, columns) with ``room > 0``; ``options`` (normalized_shape,
    weight_offset, rms)."""
    rms = options[2]
    if room > 0:
        rstd, side, columns = statistics
        ctx.save_for_backward(output, None, rstd, weight, bias, side, columns)
        ctx.mark_non_differentiable(columns)
    else:
        mean, rstd = statistics
        if room == 0:
            ctx.save_for_backward(output, None, rstd, weight, bias)
        else:
            ctx.save_for_backward(x, None if rms else mean, rstd, weight, bias)
        if rms:
            ctx.mark_non_differentiable(mean)
    ctx.set_materialize_grads(False)
    ctx.args = (*options, room != SAVE_INPUT, x.dtype)


def _gradients(ctx, needs, dy, others, dresidual=None):
    """Of (x, weight, bias) as far as they are needed, from those of the output, of the statistics
    and of x itself, each of which may be None."""
    tensors = ctx.saved_tensors
    listed = tensors[5:]
    dx, dweight, dbias = dresidual if needs[0] else None, None, None
    if dy is not None:
        args = (dy, *tensors[:5], *ctx.args, needs, *listed)
        if dx is not None:  # the kernel adds it
            args = (*args, *(() if listed else (None, None)), dx)
        if torch.is_grad_enabled() or is_transformed():  # the operator's Autograd kernel
            dx, dweight, dbias = _ops.norm_backward(*args)
        else:
            dx, dweight, dbias = _ops.call_below_autograd(_ops.norm_backward, *args)
    dmean, drstd, dside = (None, *others[:2]) if listed else (*others, None)
    if needs[0] and any(d is not None for d in (dmean, drstd, dside)):
        more = _decompositions.statistics_backward(
            dmean, drstd, dside, *tensors[:5], *ctx.args, *listed
        )
        dx = more if dx is None else dx + more
    return dx, dweight, dbias


class NormFunction(torch.autograd.Function):
    """LayerNorm (``rms=False``) or RMSNorm over the last dimensions.

    ``apply(input, weight, bias, normalized_shape, eps, weight_offset, rms, out_dtype, room)`` gives
    what the operator does: ``(output, mean, rstd)``, or ``(output, rstd, side, columns)`` with
    ``room > 0``. ``room`` is SAVE_INPUT, or the room for listed columns of a call that saves its
    output. All that depends on the input is differentiable: a second derivative goes through what
    was saved.
    """

    @staticmethod
    def forward(
        ctx, input, weight, bias, normalized_shape, eps, weight_offset, rms, out_dtype, room
    ):
        args = (input, weight, bias, normalized_shape, eps, weight_offset, rms, out_dtype)
        if room > 0:
            results = _ops.call_below_autograd(_ops.norm_forward_listing, *args, room)
        else:
            results = _ops.call_below_autograd(_ops.norm_forward, *args)
        output, *statistics = results
        options = (normalized_shape, weight_offset, rms)
        _save(ctx, input, output, statistics, weight, bias, options, room)
        return results

    @staticmethod
    def backward(ctx, dy, *others):
        gradients = _gradients(ctx, ctx.needs_input_grad[:3], dy, others)
        return (*gradients, None, None, None, None, None, None)


class AddNormFunction(torch.autograd.Function):
    """A norm of ``input + residual``.

    ``apply(input, residual, weight, bias, normalized_shape, eps, weight_offset, rms,
    residual_dtype, out_dtype, room)`` gives ``(output, residual_out, mean, rstd)``, or ``(output,
    residual_out, rstd, side, columns)`` with ``room > 0``; otherwise as :class:`NormFunction`.
    """

    @staticmethod
    def forward(ctx, input, residual, weight, bias, normalized_shape, eps, weight_offset, rms,
                residual_dtype, out_dtype, room):  # fmt: skip
        args = (input, residual, weight, bias, normalized_shape, eps, weight_offset, rms,
                residual_dtype, out_dtype)  # fmt: skip
        if room > 0:
            results = _ops.call_below_autograd(_ops.add_norm_forward_listing, *args, room)
        else:
            results = _ops.call_below_autograd(_ops.add_norm_forward, *args)
        output, residual_out, *statistics = results
        options = (normalized_shape, weight_offset, rms)
        _save(ctx, residual_out, output, statistics, weight, bias, options, room)
        ctx.dtypes = (input.dtype, residual.dtype)
        return results

    @staticmethod
    def backward(ctx, dy, dresidual, *others):
        wanted = ctx.needs_input_grad
        needs = (wanted[0] or wanted[1], wanted[2], wanted[3])
        dx, dweight, dbias = _gradients(ctx, needs, dy, others, dresidual)
        # One tensor for both where their dtypes agree.
        of_terms = [
            dx.to(dtype) if dx is not None and wanted[i] else None
            for i, dtype in enumerate(ctx.dtypes)
        ]
        return (*of_terms, dweight, dbias, None, None, None, None, None, None, None)


class NormBackwardFunction(torch.autograd.Function):
    """``norm_backward`` where it is to be differentiated in turn: its values are the kernels', its
    derivatives those of its decomposition, to any order."""

    @staticmethod
    def forward(ctx, dy, saved, mean, rstd, weight, bias, side, columns, dresidual, *options):
        tensors, more = (dy, saved, mean, rstd, weight, bias), (side, columns, dresidual)
        ctx.save_for_backward(*tensors, *more)
        ctx.set_materialize_grads(False)
        ctx.options = options
        return _ops.call_below_autograd(_ops.norm_backward, *tensors, *options, *more)

    @staticmethod
    def backward(ctx, *grads):
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            # Aliases: of the tensors themselves some are functions of others, as a saved output is
            # of the weight, and a derivative is wanted in each alone.
            aliases = [None if t is None else t.view_as(t) for t in ctx.saved_tensors]
            outputs = _decompositions.norm_backward(*aliases[:6], *ctx.options, *aliases[6:])
        pairs = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=True)
            if grad is not None and output.requires_grad
        ]
        results: list = [None] * (len(aliases) + len(ctx.options))
        wanted = [i for i in range(len(aliases)) if ctx.needs_input_grad[i]]
        if pairs:
            outputs, grads = zip(*pairs, strict=True)
            inputs = [aliases[i] for i in wanted]
            gradients = torch.autograd.grad(
                outputs, inputs, grads, create_graph=create_graph, allow_unused=True
            )
            for i, gradient in zip(wanted, gradients, strict=True):
                results[i] = gradient
        return tuple(results)


def is_transformed() -> bool:
    """Whether a torch.func transform, forward-mode differentiation or torch.jit.trace is at work,
    which no ``autograd.Function`` here knows: the operator's Autograd kernel is then to
    differentiate."""
    return (
        torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._is_tracing()
    )


def _needs_grad(*tensors) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _check_has_room(room: int) -> None:
    if room <= 0:
        raise RuntimeError(f"room is {room}; a call that is differentiated needs room")


def _norm_forward_autograd(
    input, weight, bias, normalized_shape, eps, weight_offset=0.0, rms=False, out_dtype=None
):
    args = (input, weight, bias, normalized_shape, eps, weight_offset, rms, out_dtype)
    if is_transformed():
        _ops.check_norm_arguments(*args)
        return _decompositions.norm_forward(*args)
    if _needs_grad(input, weight, bias):
        return NormFunction.apply(*args, SAVE_INPUT)
    return _ops.call_below_autograd(_ops.norm_forward, *args)


def _norm_forward_listing_autograd(
    input, weight, bias, normalized_shape, eps, weight_offset, rms, out_dtype, room
):
    args = (input, weight, bias, normalized_shape, eps, weight_offset, rms, out_dtype)
    if is_transformed():
        _ops.check_norm_arguments(*args)
        return _decompositions.norm_forward_listing(*args, room)
    if _needs_grad(input, weight, bias):
        _check_has_room(room)
        return NormFunction.apply(*args, room)
    return _ops.call_below_autograd(_ops.norm_forward_listing, *args, room)


def _add_norm_forward_autograd(
    input,
    residual,
    weight,
    bias,
    normalized_shape,
    eps,
    weight_offset=0.0,
    rms=False,
    residual_dtype=None,
    out_dtype=None,
):
    args = (input, residual, weight, bias, normalized_shape, eps, weight_offset, rms,
            residual_dtype, out_dtype)  # fmt: skip
    if is_transformed():
        _ops.check_add_norm_arguments(*args)
        return _decompositions.add_norm_forward(*args)
    if _needs_grad(input, residual, weight, bias):
        return AddNormFunction.apply(*args, SAVE_INPUT)
    return _ops.call_below_autograd(_ops.add_norm_forward, *args)


def _add_norm_forward_listing_autograd(
    input,
    residual,
    weight,
    bias,
    normalized_shape,
    eps,
    weight_offset,
    rms,
    residual_dtype,
    out_dtype,
    room,
):
    args = (input, residual, weight, bias, normalized_shape, eps, weight_offset, rms,
            residual_dtype, out_dtype)  # fmt: skip
    if is_transformed():
        _ops.check_add_norm_arguments(*args)
        return _decompositions.add_norm_forward_listing(*args, room)
    if _needs_grad(input, residual, weight, bias):
        _check_has_room(room)
        return AddNormFunction.apply(*args, room)
    return _ops.call_below_autograd(_ops.add_norm_forward_listing, *args, room)


def _norm_backward_autograd(dy, saved, mean, rstd, weight, bias, *args):
    tensors = (dy, saved, mean, rstd, weight, bias)
    if is_transformed():
        return _decompositions.norm_backward(*tensors, *args)
    options, (side, columns, dresidual) = args[:6], (*args[6:], None, None, None)[:3]
    if _needs_grad(*tensors, side, dresidual):
        return NormBackwardFunction.apply(*tensors, side, columns, dresidual, *options)
    return _ops.call_below_autograd(_ops.norm_backward, *tensors, *args)


def _after_optimizer_step(*_) -> None:
    _ops._C.note_optimizer_step()


# torch.compiler.disable, without loading the compiler: a compiled step calls it, and does not try
# to trace it.
_after_optimizer_step._torchdynamo_disable = True

# So that other changes of parameters are known from an optimizer's (csrc/ops/column_watch.cpp).
register_optimizer_step_post_hook(_after_optimizer_step)

_library = torch.library.Library("fused_norm", "IMPL")
_library.impl("norm_forward", _norm_forward_autograd, "Autograd")
_library.impl("norm_forward_listing", _norm_forward_listing_autograd, "Autograd")
_library.impl("norm_backward", _norm_backward_autograd, "Autograd")
_library.impl("add_norm_forward", _add_norm_forward_autograd, "Autograd")
_library.impl("add_norm_forward_listing", _add_norm_forward_listing_autograd, "Autograd")
