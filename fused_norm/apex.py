"""The names, signatures and dtype rules of apex's fused norms, on this library's operators.

>>> from fused_norm.apex import FusedLayerNorm  # was: from apex.normalization import FusedLayerNorm

What callers of apex rely on is kept:

- ``eps`` defaults to 1e-5 in the modules and to 1e-6 in the functions; ``memory_efficient`` comes
  last.
- The modules create parameters of torch's default dtype, named ``weight`` and ``bias``.
- The output has the input's dtype; in the *Mixed* forms, the weight's.
- Under autocast input and parameters are rounded to the autocast dtype, which the output then has.
  fp64 tensors are left as they are.
- ``X.apply(...)`` takes positional arguments, and ``memory_efficient`` is among
  ``inspect.getfullargspec(X.forward).args``.

What differs: parameters that are equal to zero, or small beside their bias, have right gradients
with ``memory_efficient``, and under autocast are not rounded with it, as what is known of their
columns goes with them; 16-bit input takes fp32 weights in every form.
"""

import importlib.machinery
import importlib.util
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fused_norm import _arguments, _autocast, _torch, functional, modules

__all__ = [
    "FusedLayerNorm",
    "FusedLayerNormAffineFunction",
    "FusedLayerNormAffineMixedDtypesFunction",
    "FusedLayerNormFunction",
    "FusedRMSNorm",
    "FusedRMSNormAffineFunction",
    "FusedRMSNormAffineMixedDtypesFunction",
    "FusedRMSNormFunction",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "fused_layer_norm",
    "fused_layer_norm_affine",
    "fused_rms_norm",
    "fused_rms_norm_affine",
    "install",
    "mixed_dtype_fused_layer_norm_affine",
    "mixed_dtype_fused_rms_norm_affine",
]

_Shape = int | Sequence[int]


def _norm(
    input, weight, bias, normalized_shape, eps, memory_efficient, *, rms=False, mixed=False
) -> Tensor:
    _arguments.tensor("input", input)
    if weight is not None or mixed:
        _arguments.tensor("weight", weight)
    _arguments.optional_tensor("bias", bias)
    eps = _arguments.number("eps", eps)
    memory_efficient = _arguments.flag("memory_efficient", memory_efficient)
    autocast = _autocast.dtype_for(input)
    if autocast is not None:
        input = _autocast.cast(input, autocast)
        if not memory_efficient:
            weight, bias = (_autocast.cast(t, autocast) for t in (weight, bias))
    out_dtype = weight.dtype if mixed and weight.is_floating_point() else input.dtype
    if autocast is not None and out_dtype is not torch.float64:
        out_dtype = autocast
    options = (normalized_shape, eps, 0.0, rms, memory_efficient)
    return functional._norm_to(out_dtype, input, weight, bias, *options)


@_torch.overridable
def fused_layer_norm_affine(
    input: Tensor, weight: Tensor, bias: Tensor, normalized_shape: _Shape, eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:  # fmt: skip
    """LayerNorm with weight and bias; the output has the input's dtype, and under autocast the
    autocast dtype, but for fp64.

    Arguments, result and errors are otherwise those of :func:`fused_norm.functional.layer_norm`.
    ``weight`` and ``bias`` are each in input's dtype, fp32, fp16 or bf16; ``bias`` may be ``None``.
    Anything else in the place of a tensor raises a TypeError.
    """
    return _norm(input, weight, bias, normalized_shape, eps, memory_efficient)


@_torch.overridable
def fused_layer_norm(
    input: Tensor, normalized_shape: _Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """:func:`fused_layer_norm_affine` without weight and bias."""
    return _norm(input, None, None, normalized_shape, eps, memory_efficient)


@_torch.overridable
def mixed_dtype_fused_layer_norm_affine(
    input: Tensor, weight: Tensor, bias: Tensor, normalized_shape: _Shape, eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:  # fmt: skip
    """:func:`fused_layer_norm_affine` whose output has the weight's dtype.

    Under autocast it has the autocast dtype, unless the weight is fp64, which it may be beside any
    input. Without a weight it is an error.
    """
    return _norm(input, weight, bias, normalized_shape, eps, memory_efficient, mixed=True)


@_torch.overridable
def fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: _Shape, eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:  # fmt: skip
    """RMSNorm with weight; the output has the input's dtype.

    As :func:`fused_layer_norm_affine`, computed as by :func:`fused_norm.functional.rms_norm`;
    ``eps`` is added to the mean square.
    """
    return _norm(input, weight, None, normalized_shape, eps, memory_efficient, rms=True)


@_torch.overridable
def fused_rms_norm(
    input: Tensor, normalized_shape: _Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """:func:`fused_rms_norm_affine` without a weight."""
    return _norm(input, None, None, normalized_shape, eps, memory_efficient, rms=True)


@_torch.overridable
def mixed_dtype_fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: _Shape, eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:  # fmt: skip
    """:func:`fused_rms_norm_affine` whose output has the weight's dtype, with the exceptions of
    :func:`mixed_dtype_fused_layer_norm_affine`."""
    return _norm(input, weight, None, normalized_shape, eps, memory_efficient, rms=True, mixed=True)


class _Function:
    """What frameworks use of apex's ``torch.autograd.Function`` subclasses: ``X.apply(...)``, which
    is the function by position, and the argument names of ``X.forward``, where ``eps`` has no
    default. Autograd is the operator's own, so ``forward`` has no use for its ``ctx``."""

    apply: Callable[..., Tensor]
    forward: Callable[..., Tensor]


def _applied(name: str, function: Callable[..., Tensor]) -> type[_Function]:
    def forward(ctx, *args) -> Tensor:
        return function(*args)

    parameters = dict(inspect.signature(function).parameters)
    parameters["eps"] = parameters["eps"].replace(default=inspect.Parameter.empty)
    ctx = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    forward.__signature__ = inspect.Signature([ctx, *parameters.values()])
    names = {"forward": staticmethod(forward), "apply": staticmethod(function)}
    names |= {"__doc__": f"``apply`` is :func:`{function.__name__}`.", "__module__": __name__}
    return type(name, (_Function,), names)


FusedLayerNormAffineFunction = _applied("FusedLayerNormAffineFunction", fused_layer_norm_affine)
FusedLayerNormAffineMixedDtypesFunction = _applied(
    "FusedLayerNormAffineMixedDtypesFunction", mixed_dtype_fused_layer_norm_affine
)
FusedLayerNormFunction = _applied("FusedLayerNormFunction", fused_layer_norm)
FusedRMSNormAffineFunction = _applied("FusedRMSNormAffineFunction", fused_rms_norm_affine)
FusedRMSNormAffineMixedDtypesFunction = _applied(
    "FusedRMSNormAffineMixedDtypesFunction", mixed_dtype_fused_rms_norm_affine
)
FusedRMSNormFunction = _applied("FusedRMSNormFunction", fused_rms_norm)


class _Fused:
    """The constructor of apex's modules."""

    def __init__(
        self, normalized_shape: _Shape, eps: float = 1e-5, elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            normalized_shape, eps, elementwise_affine, memory_efficient=memory_efficient
        )


class FusedLayerNorm(_Fused, modules.LayerNorm):
    """LayerNorm over the last dimensions, with parameters unless ``elementwise_affine=False``.
    The output has the input's dtype, under autocast the autocast dtype."""

    _affine = staticmethod(fused_layer_norm_affine)

    def forward(self, input: Tensor) -> Tensor:
        options = self.normalized_shape, self.eps, self.memory_efficient
        if not self.elementwise_affine:
            return fused_layer_norm(input, *options)
        return self._affine(input, self.weight, self.bias, *options)


class FusedRMSNorm(_Fused, modules.RMSNorm):
    """RMSNorm over the last dimensions, with a weight unless ``elementwise_affine=False``.
    The output has the input's dtype, under autocast the autocast dtype."""

    _affine = staticmethod(fused_rms_norm_affine)

    def forward(self, input: Tensor) -> Tensor:
        options = self.normalized_shape, self.eps, self.memory_efficient
        if not self.elementwise_affine:
            return fused_rms_norm(input, *options)
        return self._affine(input, self.weight, *options)


class _Mixed:
    """The constructor of the *Mixed* forms."""

    def __init__(
        self, normalized_shape: _Shape, eps: float = 1e-5, *, memory_efficient: bool = False,
        **kwargs,
    ) -> None:  # fmt: skip
        if "elementwise_affine" in kwargs:
            name = type(self).__name__
            if not kwargs["elementwise_affine"]:
                raise RuntimeError(
                    f"{name} does not support elementwise_affine=False: its output has the "
                    "weight's dtype"
                )
            warnings.warn(f"{name} does not support the elementwise_affine argument", stacklevel=2)
        super().__init__(normalized_shape, eps, memory_efficient=memory_efficient)


class MixedFusedLayerNorm(_Mixed, FusedLayerNorm):
    """:class:`FusedLayerNorm` whose output has the weight's dtype. Unknown keywords are ignored."""

    _affine = staticmethod(mixed_dtype_fused_layer_norm_affine)


class MixedFusedRMSNorm(_Mixed, FusedRMSNorm):
    """:class:`FusedRMSNorm` whose output has the weight's dtype. Unknown keywords are ignored."""

    _affine = staticmethod(mixed_dtype_fused_rms_norm_affine)


def install() -> None:
    """Makes these names importable as apex's, for code that cannot be changed: in
    ``apex.normalization`` and ``apex.normalization.fused_layer_norm``. What else apex has stays
    missing.

    Call it before that code is imported: timm and Megatron-LM look for apex once.

    Raises:
        RuntimeError: apex itself is installed.
    """
    if isinstance(sys.modules.get("apex"), _StandIn):
        return
    if "apex" in sys.modules or importlib.util.find_spec("apex") is not None:
        raise RuntimeError(
            "apex is installed; fused_norm.apex.install() is for environments without it "
            "(pip uninstall apex, or import from fused_norm.apex)"
        )
    functions = {name: globals()[name] for name in __all__ if name != "install"}
    modules_of_apex = {name: n for name, n in functions.items() if isinstance(n, type)}
    normalization = _StandIn("apex.normalization", modules_of_apex)
    normalization.fused_layer_norm = _StandIn("apex.normalization.fused_layer_norm", functions)
    package = _StandIn("apex", {"normalization": normalization})
    for module in (package, normalization, normalization.fused_layer_norm):
        sys.modules[module.__name__] = module


class _StandIn(types.ModuleType):
    """A module of apex's name. It has a spec, by which others find out whether it is installed."""

    def __init__(self, name: str, names: dict) -> None:
        super().__init__(name, "fused_norm.apex under apex's name.")
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        self.__path__ = []  # so that its other modules are missing, not no package's
        vars(self).update(names)
