"""What callers pass as options, as the operators take it: a number as a float, a flag as a bool, a
shape as ints. Each function raises a TypeError that names the argument where that cannot be."""

import math
import numbers
import operator
from collections.abc import Iterator, Sequence
from typing import NoReturn

import torch
from torch import Tensor


def _refuse(name: str, expected: str, value) -> NoReturn:
    # A tracer has no repr, and an array's has lines.
    shown = "" if torch.compiler.is_compiling() else " ".join(f"{value!r:.80}".split()) + " "
    raise TypeError(f"{name} must be {expected}, but is {shown}of type {_kind(value)}")


def _kind(value) -> str:
    return type(value).__name__


def tensor(name: str, value, nested: bool = True) -> None:
    """Checks that ``value`` is a tensor, ``nested`` or not."""
    if type(value) is not Tensor or value.is_nested:
        if not isinstance(value, Tensor):
            _refuse(name, "a tensor", value)
        optional_tensor(name, value, nested)


def optional_tensor(name: str, value, nested: bool = True) -> None:
    """Checks that ``value`` is a tensor or None."""
    if value is not None and not isinstance(value, Tensor):
        _refuse(name, "a tensor or None", value)
    if not nested and value is not None and value.is_nested:
        raise RuntimeError(f"{name} must be a dense strided tensor, but is nested")


def optional_dtype(name: str, value) -> None:
    """Checks that ``value`` is a dtype or None."""
    if value is not None and not isinstance(value, torch.dtype):
        _refuse(name, "a torch.dtype or None", value)


def module(name: str, value) -> None:
    """Checks that ``value`` is a module."""
    if not isinstance(value, torch.nn.Module):
        raise TypeError(f"{name} must be a torch.nn.Module, but is {_kind(value)}")


def number(name: str, value) -> float:
    """An int, bool, float, number of numpy (to Dynamo an array), or tensor without dimensions."""
    if type(value) is float:
        return value
    if isinstance(value, Tensor):
        # The number alone would leave the tensor without its gradient.
        if value.requires_grad or value.dim() > 0:
            raise TypeError(
                f"{name} must be a number, through which no gradient flows, but is a tensor of "
                f"shape {list(value.shape)} with requires_grad={value.requires_grad}"
            )
        return float(value)
    if isinstance(value, (torch.SymInt, torch.SymFloat)):  # a tracer's
        return value if torch.compiler.is_compiling() else float(value)
    if _kind(value) == "ndarray" and torch.compiler.is_compiling() and value.ndim == 0:
        return float(value)
    try:
        if isinstance(value, numbers.Real):
            return float(value)
    except OverflowError:
        raise RuntimeError(f"{name} must fit into a double, but is {value!r:.80}") from None
    return _refuse(name, "a number", value)


def finite(name: str, value, least: float = -math.inf) -> float:
    """As :func:`number`, but finite and at least ``least``, which is 0 or no limit."""
    value = number(name, value)
    if not (math.isfinite(value) and value >= least):
        limit = " and not negative" if least == 0 else ""
        raise RuntimeError(f"{name} must be finite{limit}, but is {value}")
    return value


def optional_number(name: str, value) -> float | None:
    """As :func:`number`, or None."""
    return None if value is None else number(name, value)


_FP32_EPS, _FP64_EPS = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps


def rms_eps(input: Tensor, eps) -> float:
    """An RMSNorm's epsilon, where it is None that of torch's rule."""
    if eps is None:
        return _FP64_EPS if input.dtype is torch.float64 else _FP32_EPS
    return number("eps", eps)


def flag(name: str, value) -> bool:
    """A bool or an int, of numpy too."""
    if type(value) is bool:
        return value
    if isinstance(value, (numbers.Integral, torch.SymBool)) or _kind(value) in ("bool", "bool_"):
        return bool(value)  # numpy's and a tracer's among them
    return _refuse(name, "a bool", value)


def integer(name: str, value) -> int:
    """An int of 64 bits, or what has its value. The operator checks what a tracer passes."""
    if torch.compiler.is_compiling():
        return value.item() if isinstance(value, Tensor) or _kind(value) == "ndarray" else value
    try:
        value = operator.index(value)
    except TypeError:
        return _refuse(name, "an int", value)
    if not -(2**63) <= value < 2**63:
        raise RuntimeError(f"{name} must be an int of 64 bits, but is {value}")
    return value


FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def floating_dtype(value) -> torch.dtype:
    """The dtype that parameters or an output are asked for in. torch takes float for fp64."""
    if value is float:
        return torch.float64
    if not isinstance(value, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, but is {value!r:.80}")
    if value not in FLOATING:
        raise RuntimeError(f"dtype must be float16, bfloat16, float32 or float64, but is {value}")
    return value


def shape(value) -> tuple:
    """``normalized_shape``: an int or ints, of numpy too. (Dynamo of torch 2.9 knows no unions.)"""
    value = value.tolist() if _kind(value) == "ndarray" else value
    if isinstance(value, (numbers.Integral, torch.SymInt)):
        value = (value,)
    if not isinstance(value, (Sequence, Iterator)) or isinstance(value, (str, bytes)):
        return _refuse("normalized_shape", "an int or a sequence of ints", value)
    return tuple([n if type(n) is torch.SymInt else integer("normalized_shape", n) for n in value])
