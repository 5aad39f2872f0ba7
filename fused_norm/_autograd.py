"""The operators' Autograd kernels: who differentiates a norm.

What is recorded has C++ for its backward pass (csrc/ops/norm_autograd.cpp). Second and higher
derivatives, those of statistics, forward mode, torch.func transforms and torch.jit.trace have the
decompositions.
"""

import gc

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fused_norm import _C, _decompositions, _ops, _sharding, _torch, _tracing
from fused_norm._C import record_norm


def _overflow_message(overflows: list[tuple[int, str, int]]) -> str:
    """What the user is told of norms whose gradients are NaN for want of room, each an address of
    its weight, or of its bias if it has none, a description of it and a number of columns."""
    _tracing.compile_anew()
    norms = "; ".join(
        f"{_name_of_norm(address) or description} had no room for {columns} column(s)"
        for address, description, columns in overflows
    )
    return (
        f"memory_efficient=True: {norms} whose weight became zero, or small beside the bias, since "
        "the parameters were last looked at. The gradients of that backward pass are NaN: discard "
        "them, and repeat the step. To be seen in time, change parameters in place under "
        "torch.no_grad(), not through .data, before the forward pass; capture CUDA graphs anew; or "
        "use memory_efficient=False for this norm"
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
        if all(_torch.address(p) != address for p in norm.parameters(recurse=False)):
            continue
        names = [name for root in modules for name, m in root.named_modules() if m is norm]
        name = ".".join(part for part in max(names, key=len).split(".") if part != "_orig_mod")
        return f"{name} = {norm}" if name else str(norm)
    return None


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


def _needs_grad(*tensors) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _norm_forward_autograd(*args):
    call = _ops.NormCall(*args)
    if _torch.is_transformed():
        _ops.check_norm_arguments(*call)
        return _decompositions.norm_forward(*call)
    if not _needs_grad(call.input, call.weight, call.bias, call.residual):
        return _ops.call_below_autograd(_ops.norm_forward, *call)
    if call.room is not None and call.room <= 0:
        raise RuntimeError(f"room is {call.room}; a call that is differentiated needs room")
    if type(call.input) is not torch.Tensor:  # a DTensor, perhaps the first
        _sharding.register_where_loaded()
    return record_norm(*call)


def _norm_backward_autograd(dy, saved, mean, rstd, weight, bias, *args):
    tensors = (dy, saved, mean, rstd, weight, bias)
    if _torch.is_transformed():
        return _decompositions.norm_backward(*tensors, *args)
    options, (side, columns, dresidual) = args[:6], (*args[6:], None, None, None)[:3]
    if _needs_grad(*tensors, side, dresidual):
        return NormBackwardFunction.apply(*tensors, side, columns, dresidual, *options)
    return _ops.call_below_autograd(_ops.norm_backward, *tensors, *args)


@_torch.untraced
def _before_optimizer_step(*_) -> None:
    if _C.before_optimizer_step():
        _tracing.compile_anew()


@_torch.untraced
def _after_optimizer_step(*_) -> None:
    _C.after_optimizer_step()


# So that gradients that are NaN for want of room reach no parameter, and other changes of
# parameters are known from an optimizer's (csrc/ops/column_watch.cpp).
register_optimizer_step_pre_hook(_before_optimizer_step)
register_optimizer_step_post_hook(_after_optimizer_step)
_C.set_overflow_message(_overflow_message)

_library = torch.library.Library("fused_norm", "IMPL")
_library.impl("norm_forward", _norm_forward_autograd, "Autograd")
_library.impl("norm_backward", _norm_backward_autograd, "Autograd")
_library.impl(
    "norm_statistics_backward", _decompositions.statistics_backward, "CompositeImplicitAutograd"
)
