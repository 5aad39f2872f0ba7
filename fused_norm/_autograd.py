"""The autograd layer: what a norm saves for its backward pass, and the gradients from it.

``memory_efficient`` saves the output instead of the input. A transformer keeps that output anyway
(the next linear layer saves it), so the norm's own saved activation becomes free. The idea is that
of apex's fused layer norm; unlike there, a call whose weights do not let the input be taken back
from the output saves the input.
"""

import torch
from torch.autograd import forward_ad

from fused_norm import _decompositions, _ops


def _must_save_input(output: torch.Tensor, weight, bias, weight_offset: float) -> bool:
    """Whether some column of ``output`` does not determine the normalized input.

    Asks the weights themselves, once a call: version counters do not see optimizers that write
    through ``.data``. On a GPU this waits for the stream; where waiting is impossible, under graph
    capture, the input is saved.
    """
    if weight is None and bias is None:
        return False
    if output.is_cuda and torch.cuda.is_current_stream_capturing():
        return True
    if output.is_meta or type(output) is not torch.Tensor:  # no values to ask, or a tracer's
        return True
    return bool(_ops.unrecoverable_columns(weight, bias, weight_offset, output.dtype).item())


class NormFunction(torch.autograd.Function):
    """LayerNorm (``rms=False``) or RMSNorm over the last dimensions.

    ``apply`` takes the operator's arguments and ``memory_efficient``, and returns ``(output, mean,
    rstd)``, all differentiable: a second derivative goes through the saved statistics, which are
    functions of the input.
    """

    @staticmethod
    def forward(
        ctx,
        input,
        weight,
        bias,
        normalized_shape,
        eps,
        weight_offset,
        rms,
        out_dtype,
        memory_efficient,
    ):
        output, mean, rstd = _ops.call_below_autograd(
            _ops.norm_forward,
            input,
            weight,
            bias,
            normalized_shape,
            eps,
            weight_offset,
            rms,
            out_dtype,
        )
        from_output = memory_efficient and not _must_save_input(output, weight, bias, weight_offset)
        if from_output:
            ctx.save_for_backward(output, None, rstd, weight, bias)
        else:
            ctx.save_for_backward(input, None if rms else mean, rstd, weight, bias)
        if rms:
            ctx.mark_non_differentiable(mean)
        ctx.set_materialize_grads(False)
        ctx.args = (normalized_shape, weight_offset, rms, from_output, input.dtype)
        return output, mean, rstd

    @staticmethod
    def backward(ctx, dy, dmean, drstd):
        saved, mean, rstd, weight, bias = ctx.saved_tensors
        gradients = (None, None, None)
        if dy is not None:
            args = (dy, saved, mean, rstd, weight, bias, *ctx.args, ctx.needs_input_grad[:3])
            if torch.is_grad_enabled() or is_transformed():  # the operator's Autograd kernel
                gradients = _ops.norm_backward(*args)
            else:
                gradients = _ops.call_below_autograd(_ops.norm_backward, *args)
        if (dmean is not None or drstd is not None) and ctx.needs_input_grad[0]:
            dx = _decompositions.statistics_backward(
                dmean, drstd, saved, mean, rstd, weight, bias, *ctx.args
            )
            gradients = (dx if gradients[0] is None else gradients[0] + dx, *gradients[1:])
        return (*gradients, None, None, None, None, None, None)


class NormBackwardFunction(torch.autograd.Function):
    """``norm_backward`` where it is to be differentiated in turn: its values are the kernels', its
    derivatives those of its decomposition, to any order."""

    @staticmethod
    def forward(ctx, dy, saved, mean, rstd, weight, bias, *options):
        ctx.save_for_backward(dy, saved, mean, rstd, weight, bias)
        ctx.set_materialize_grads(False)
        ctx.options = options
        tensors = (dy, saved, mean, rstd, weight, bias)
        return _ops.call_below_autograd(_ops.norm_backward, *tensors, *options)

    @staticmethod
    def backward(ctx, *grads):
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            # Aliases: of the tensors themselves some are functions of others, as a saved output is
            # of the weight, and a derivative is wanted in each alone.
            aliases = [None if t is None else t.view_as(t) for t in ctx.saved_tensors]
            outputs = _decompositions.norm_backward(*aliases, *ctx.options)
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
    """Whether a torch.func transform or forward-mode differentiation is at work, which no
    ``autograd.Function`` here knows: the operator's Autograd kernel then decomposes the norm."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _needs_grad(*tensors) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _norm_forward_autograd(
    input, weight, bias, normalized_shape, eps, weight_offset=0.0, rms=False, out_dtype=None
):
    args = (input, weight, bias, normalized_shape, eps, weight_offset, rms, out_dtype)
    if is_transformed():
        _ops.check_norm_arguments(*args)
        return _decompositions.norm_forward(*args)
    if _needs_grad(input, weight, bias):
        return NormFunction.apply(*args, False)
    return _ops.call_below_autograd(_ops.norm_forward, *args)


def _norm_backward_autograd(dy, saved, mean, rstd, weight, bias, *args):
    tensors = (dy, saved, mean, rstd, weight, bias)
    if is_transformed():
        return _decompositions.norm_backward(*tensors, *args)
    if _needs_grad(*tensors):
        return NormBackwardFunction.apply(*tensors, *args)
    return _ops.call_below_autograd(_ops.norm_backward, *tensors, *args)


_library = torch.library.Library("fused_norm", "IMPL")
_library.impl("norm_forward", _norm_forward_autograd, "Autograd")
_library.impl("norm_backward", _norm_backward_autograd, "Autograd")
