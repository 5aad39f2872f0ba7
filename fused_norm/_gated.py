"""Gated RMSNorm, ``functional.rms_norm_gated``: its arguments, and the two ways to trace it."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fused_norm import _arguments, _autocast, _decompositions, _jagged, _ops, _torch, _tracing

ACTIVATIONS = ("silu", "sigmoid")


def activation_of(value) -> str:
    """``value`` if it is the name of an activation."""
    if value not in ACTIVATIONS:
        raise ValueError(f"activation must be 'silu' or 'sigmoid', but is {value!r:.80}")
    return value


@_torch.overridable
def rms_norm_gated(
    input: Tensor,
    gate: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    norm_before_gate: bool = True,
    activation: Literal["silu", "sigmoid"] = "silu",
    group_size: int | None = None,
    weight_offset: float = 0.0,
) -> Tensor:
    """``rms_norm(input) * act(gate)`` over the last dimensions, in one kernel, or
    ``rms_norm(input * act(gate))``.

    The norm before the gate is that of gated delta nets (Yang et al., *Gated Delta Networks*, 2024)
    and Qwen3-Next; the gate before the norm that of Mamba 2 (Dao and Gu, *Transformers are SSMs*,
    2024). All is computed in fp32 (fp64 for fp64 input) and rounded once. Input, gate and weight
    are differentiated, from input and gate. Errors, and arguments that are not named here, are
    those of :func:`rms_norm`.

    Args:
        input: ``(*, *normalized_shape)`` in fp16, bf16, fp32 or fp64; rows may be strided.
        gate: of input's shape, in input's dtype or fp32; rows may be strided. Any other dtype is
            converted to input's under autocast, and a 16-bit one beside fp32 input.
        norm_before_gate: the norm comes first; ``False``: the gate does.
        activation: ``"silu"``, ``gate * sigmoid(gate)``, or ``"sigmoid"``.
        group_size: each so many elements that follow each other in a row are normalized by
            themselves; divides the number of elements of ``normalized_shape``. ``None``: all.

    Returns:
        A contiguous tensor of input's shape and dtype.

    Raises:
        ValueError: ``activation`` is no activation.
    """
    _arguments.tensor("input", input)
    _arguments.tensor("gate", gate)
    _arguments.optional_tensor("weight", weight)
    shape = _arguments.shape(normalized_shape)
    options = (
        _arguments.rms_eps(input, eps),
        _arguments.number("weight_offset", weight_offset),
        _arguments.flag("norm_before_gate", norm_before_gate),
        activation_of(activation) == "silu",
        group_size if group_size is None else _arguments.integer("group_size", group_size),
    )
    exact = input.dtype is torch.float32 and gate.dtype in (torch.float16, torch.bfloat16)
    if exact or (gate.dtype not in (input.dtype, torch.float32) and _autocast.dtype_for(input)):
        gate = gate.to(input.dtype)
    if input.is_nested:
        [output] = _jagged.of_rows(
            lambda x, z: _ops.rms_norm_gated_forward(x, z, weight, shape, *options)[:1],
            shape,
            input=input,
            gate=gate,
        )
        return output
    if not _tracing.decomposes():
        return _ops.rms_norm_gated_forward(input, gate, weight, shape, *options)[0]
    args = (input, gate, weight, shape, *_tracing.numbers(*options[:2]), *options[2:])
    _ops.check_rows(_ops.rms_norm_gated_forward, _ops.GatedCall(*args))
    return _decompositions.rms_norm_gated_forward(*args)[0]
