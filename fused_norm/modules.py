"""Modules: torch's own norms and softmaxes, run by this library."""

import math

import torch
from torch import Tensor

from fused_norm import _arguments, _gated, functional


class _Norm:
    """What the norms add to torch's."""

    # Of the class too, for a module that became one of these by a change of its class.
    memory_efficient: bool = False
    weight_offset: float = 0.0
    # The parameters' names, which convert() sets for norms that have others. None: no parameter.
    weight_name: str | None = "weight"
    bias_name: str | None = None

    def _weight_and_bias(self) -> list[Tensor | None]:
        """The parameters, or what pruning, a parametrization or FSDP put in their place."""
        own, names = self._parameters, (self.weight_name, self.bias_name)
        return [own[n] if n in own else n and getattr(self, n) for n in names]

    def __init__(self, normalized_shape, eps, affine, *others, memory_efficient, weight_offset):
        shape = _arguments.shape(normalized_shape)
        if not shape or min(shape) < 0:
            raise RuntimeError(f"normalized_shape must have sizes from 0 on, but is {list(shape)}")
        if eps is not None or isinstance(self, torch.nn.LayerNorm):
            eps = _arguments.finite("eps", eps, least=0)
        offset = _arguments.finite("weight_offset", weight_offset)
        if offset != 0 and not affine:
            raise ValueError(
                f"weight_offset is {offset}, but with elementwise_affine=False there is no weight "
                "to add it to"
            )
        flag = _arguments.flag("memory_efficient", memory_efficient)
        *_, dtype = others
        if dtype is not None:
            _arguments.floating_dtype(dtype)
        # reset_parameters(), called by the base class, needs it; a float may be set before
        # Module.__init__.
        self.weight_offset = offset
        super().__init__(shape, eps, affine, *others)
        self.memory_efficient = flag

    def reset_parameters(self) -> None:
        """Sets the effective weight, ``weight + weight_offset``, to one and a bias to zero."""
        super().reset_parameters()
        if self.elementwise_affine and self.weight_offset:
            torch.nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def extra_repr(self) -> str:
        return (
            super().extra_repr()
            + (", memory_efficient=True" if self.memory_efficient else "")
            + (f", weight_offset={self.weight_offset}" if self.weight_offset else "")
        )


class LayerNorm(_Norm, torch.nn.LayerNorm):
    """A :class:`torch.nn.LayerNorm` with the same constructor and ``state_dict``, on this library's
    kernels.

    Args:
        memory_efficient: save the output, not the input, for backward (docs/memory_efficient.md).
        weight_offset: added to the weight in fp32 inside the kernel; 1.0 for zero-centred weights,
            which then start at zero. ``torch.nn.TransformerEncoderLayer`` ignores it in inference,
            unless ``torch.backends.mha.set_fastpath_enabled(False)``.

    The other arguments are torch's. Shapes, dtypes and errors:
    :func:`fused_norm.functional.layer_norm`.
    """

    bias_name = "bias"

    def __init__(
        self, normalized_shape, eps: float = 1e-5, elementwise_affine: bool = True,
        bias: bool = True, device=None, dtype=None, *, memory_efficient: bool = False,
        weight_offset: float = 0.0,
    ) -> None:  # fmt: skip
        options = {"memory_efficient": memory_efficient, "weight_offset": weight_offset}
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype, **options)

    def forward(self, input: Tensor) -> Tensor:
        return functional.layer_norm(
            input, self.normalized_shape, self.weight, self.bias, self.eps,
            memory_efficient=self.memory_efficient, weight_offset=self.weight_offset,
        )  # fmt: skip


class RMSNorm(_Norm, torch.nn.RMSNorm):
    """A :class:`torch.nn.RMSNorm` with the same constructor and ``state_dict``, on this library's
    kernels. The keyword arguments are those of :class:`LayerNorm`. Shapes, dtypes and errors:
    :func:`fused_norm.functional.rms_norm`.
    """

    def __init__(
        self, normalized_shape, eps: float | None = None, elementwise_affine: bool = True,
        device=None, dtype=None, *, memory_efficient: bool = False, weight_offset: float = 0.0,
    ) -> None:  # fmt: skip
        options = {"memory_efficient": memory_efficient, "weight_offset": weight_offset}
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype, **options)

    def forward(self, x: Tensor) -> Tensor:  # torch's name
        return functional.rms_norm(
            x, self.normalized_shape, self.weight, self.eps,
            memory_efficient=self.memory_efficient, weight_offset=self.weight_offset,
        )  # fmt: skip


class RMSNormGated(_Norm, torch.nn.RMSNorm):
    """An RMSNorm with a gate: ``norm(input, gate)`` is ``rms_norm(input) * act(gate)``, or
    ``rms_norm(input * act(gate))``. Its ``state_dict`` is that of :class:`torch.nn.RMSNorm`.

    The first arguments are :class:`torch.nn.RMSNorm`'s, ``weight_offset`` is :class:`LayerNorm`'s.
    The others, shapes, dtypes and errors: :func:`fused_norm.functional.rms_norm_gated`.
    """

    def __init__(
        self, normalized_shape, eps: float | None = None, elementwise_affine: bool = True,
        device=None, dtype=None, *, norm_before_gate: bool = True, activation: str = "silu",
        group_size: int | None = None, weight_offset: float = 0.0,
    ) -> None:  # fmt: skip
        options = {"memory_efficient": False, "weight_offset": weight_offset}
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype, **options)
        self.norm_before_gate = _arguments.flag("norm_before_gate", norm_before_gate)
        self.activation = _gated.activation_of(activation)
        if group_size is not None:
            cols = math.prod(self.normalized_shape)
            group_size = _arguments.integer("group_size", group_size)
            if group_size < 1 or cols % group_size:
                raise RuntimeError(
                    f"group_size must divide the {cols} columns, but is {group_size}"
                )
        self.group_size = group_size

    @property
    def memory_efficient(self) -> bool:
        """False: backward needs the input and the gate."""
        return False

    @memory_efficient.setter
    def memory_efficient(self, value) -> None:
        if _arguments.flag("memory_efficient", value):
            raise ValueError("memory_efficient is True, but a gated norm saves input and gate")

    def forward(self, input: Tensor, gate: Tensor) -> Tensor:
        return functional.rms_norm_gated(
            input, gate, self.normalized_shape, self.weight, self.eps,
            norm_before_gate=self.norm_before_gate, activation=self.activation,
            group_size=self.group_size, weight_offset=self.weight_offset,
        )  # fmt: skip

    def extra_repr(self) -> str:
        options = f", norm_before_gate={self.norm_before_gate}, activation={self.activation!r}"
        if self.group_size is not None:
            options += f", group_size={self.group_size}"
        return super().extra_repr() + options


class Softmax(torch.nn.Softmax):
    """A :class:`torch.nn.Softmax` (same constructor) on this library's kernels.

    Shapes, dtypes and errors: :func:`fused_norm.functional.softmax`.
    """

    def forward(self, input: Tensor) -> Tensor:
        return functional._softmax(input, self.dim, None, False, stacklevel=5)


class LogSoftmax(torch.nn.LogSoftmax):
    """A :class:`torch.nn.LogSoftmax` (same constructor) on this library's kernels.

    Shapes, dtypes and errors: :func:`fused_norm.functional.log_softmax`.
    """

    def forward(self, input: Tensor) -> Tensor:
        return functional._softmax(input, self.dim, None, True, stacklevel=5)
