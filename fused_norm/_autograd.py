"""The autograd layer: what a norm saves for its backward pass, and the gradients from it.

``memory_efficient`` saves the output instead of the input. A transformer keeps that output anyway
(the next linear layer saves it), so the norm's own saved activation becomes free. The idea is that
of apex's fused layer norm; unlike there, a call whose weights do not let the input be taken back
from the output saves the input.
"""

import torch

from fused_norm import _ops


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
    rstd)``; only ``output`` is differentiable. First derivatives only: asking for a second one
    raises.
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
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.args = (normalized_shape, weight_offset, rms, from_output, input.dtype)
        return output, mean, rstd

    @staticmethod
    def backward(ctx, dy, _dmean, _drstd):
        if dy is None:
            return (None,) * 9
        saved, mean, rstd, weight, bias = ctx.saved_tensors
        args = (dy, saved, mean, rstd, weight, bias, *ctx.args, ctx.needs_input_grad[:3])
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
        return NormFunction.apply(*args, False)
    return _ops.call_below_autograd(_ops.norm_forward, *args)


def _norm_backward_autograd(dy, saved, mean, rstd, weight, bias, *args):
    if _needs_grad(dy, saved, weight, bias):
        raise RuntimeError(
            "fused_norm does not compute second derivatives of a norm yet: call backward() or "
            "torch.autograd.grad() without create_graph=True, or use torch.nn's norm in this place"
        )
    return _ops.call_below_autograd(_ops.norm_backward, dy, saved, mean, rstd, weight, bias, *args)


_library = torch.library.Library("fused_norm", "IMPL")
_library.impl("norm_forward", _norm_forward_autograd, "Autograd")
_library.impl("norm_backward", _norm_backward_autograd, "Autograd")
