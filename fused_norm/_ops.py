"""The operators of ``torch.ops.fused_norm`` as Python sees them: handles, and the checks of a
norm's arguments for where the operator does not run.

Schemas and kernels are registered in C++ when ``_C`` loads (csrc/ops), with which _load.py
begins.
"""

import collections
import importlib

import torch

from fused_norm import _torch

norm_forward = torch.ops.fused_norm.norm_forward.default
norm_backward = torch.ops.fused_norm.norm_backward.default
rms_norm_gated_forward = torch.ops.fused_norm.rms_norm_gated_forward.default
rms_norm_gated_backward = torch.ops.fused_norm.rms_norm_gated_backward.default
softmax_forward = torch.ops.fused_norm.softmax_forward.default
softmax_backward = torch.ops.fused_norm.softmax_backward.default
attention_forward = torch.ops.fused_norm.attention_forward.default
attention_backward = torch.ops.fused_norm.attention_backward.default
attention_rng = torch.ops.fused_norm.attention_rng.default


def call_type(op):
    """A named tuple of the operator's arguments, with their defaults."""
    arguments = op._schema.arguments
    defaults = [arg.default_value for arg in arguments if arg.has_default_value()]
    return collections.namedtuple("Call", [arg.name for arg in arguments], defaults=defaults)


NormCall = call_type(norm_forward)
GatedCall = call_type(rms_norm_gated_forward)
SoftmaxCall = call_type(softmax_forward)
AttentionCall = call_type(attention_forward)


def head_dims(call) -> dict[str, int]:
    """Of a call of attention: where the heads of each of its tensors are, from the end."""
    rows = 3 if call.cu_seqlens_q is None else 2
    dims = dict.fromkeys(("query", "key", "value", "dout", "out"), rows)
    dims |= {"attn_mask": 3, "alibi_slopes": 1, "sink": 1, "dlse": 2, "lse": 2}
    return {name: dim for name, dim in dims.items() if getattr(call, name, None) is not None}


def check(op, *args) -> None:
    """Raises what the operator raises for these arguments, each tensor a (shape, dtype): for where
    the operator does not see them."""

    def without_data(arg):
        is_tensor = isinstance(arg, tuple) and len(arg) == 2 and isinstance(arg[1], torch.dtype)
        return torch.empty(arg[0], dtype=arg[1], device="meta") if is_tensor else arg

    op(*map(without_data, args))


@_torch.constant
def _check_unrecorded(*args) -> bool:
    with _torch.no_modes():
        check(*args)
    return True


def check_rows(op, call) -> None:
    """:func:`check` of a norm's call. Where the shapes fit, one row alone is checked, as the number
    of rows may be a tracer's symbol."""
    shape, whole = tuple(call.normalized_shape), tuple(call.input.shape)
    tensors = {n: t for n, t in call._asdict().items() if isinstance(t, torch.Tensor)}
    rows = tensors.keys() - {"weight", "bias"}
    fits = whole[-len(shape) :] == shape and all(
        len(tensors[n].shape) == len(whole)
        and not any(_torch.is_known(a != b) for a, b in zip(tensors[n].shape, whole, strict=True))
        for n in rows
    )
    args = {
        name: (shape if fits and name in rows else tuple(tensor.shape), tensor.dtype)
        for name, tensor in tensors.items()
    }
    _check_unrecorded(op, *call._replace(**args))


_torch.after_import(
    "torch.distributed.tensor", lambda _: importlib.import_module("fused_norm._sharding")
)
