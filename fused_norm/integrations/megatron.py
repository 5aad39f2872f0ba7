"""Megatron-LM: the norms of its local layer specs, and the final norm, by this library.

>>> from fused_norm.integrations import megatron
>>> megatron.patch()  # before the model is built with transformer_impl="local"

``FusedNorm`` is for a spec of one's own: ``ModuleSpec(..., input_layernorm=megatron.FusedNorm)``.
"""

import torch
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from fused_norm import modules

__all__ = ["FusedNorm", "patch", "unpatch"]


class FusedNorm:
    """Makes a LayerNorm or an RMSNorm, as ``config.normalization`` says.

    Of ``config`` these count too: ``layernorm_zero_centered_gamma``, for either norm;
    ``memory_efficient_layer_norm`` (docs/memory_efficient.md); and ``sequence_parallel``, which the
    parameters are marked with, so that Megatron sums their gradients over the ranks.

    Args:
        config: a ``TransformerConfig``.
        hidden_size: the columns.
        eps: added to the variance, or the mean square.
        args, kwargs: further arguments of Megatron's norms; not read, as ``config`` says it all.

    Returns:
        A :class:`fused_norm.LayerNorm` or a :class:`fused_norm.RMSNorm`.

    Raises:
        ValueError: the normalization is another one.
    """

    def __new__(
        cls, config, hidden_size: int, eps: float = 1e-5, *args, **kwargs
    ) -> torch.nn.Module:
        norms = {"LayerNorm": modules.LayerNorm, "RMSNorm": modules.RMSNorm}
        if config.normalization not in norms:
            raise ValueError(
                f"normalization is {config.normalization!r}; fused_norm has LayerNorm and RMSNorm"
            )
        norm = norms[config.normalization](
            hidden_size,
            eps,
            memory_efficient=config.memory_efficient_layer_norm,
            weight_offset=1.0 if config.layernorm_zero_centered_gamma else 0.0,
        )
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


def patch() -> None:
    """Has Megatron's two norms of its local specs, apex's and torch's, make a :class:`FusedNorm`:
    in layers, of queries and keys, and at the end. Models that exist stay as they are, and so do
    Transformer Engine's specs, and subclasses of the two."""
    for norm, own in _OWN.items():
        norm.__new__ = _maker(norm, own)


def _maker(norm: type, own):
    def new(cls, *args, **kwargs):
        return FusedNorm(*args, **kwargs) if cls is norm else own(cls, *args, **kwargs)

    return new


def unpatch() -> None:
    """Takes :func:`patch` back, for models that are built from now on."""
    for cls, new in _OWN.items():
        cls.__new__ = new


# A class that once had a __new__ keeps needing one.
_OWN = {
    WrappedTorchNorm: WrappedTorchNorm.__new__,
    FusedLayerNorm: lambda cls, *args, **kwargs: object.__new__(cls),
}
