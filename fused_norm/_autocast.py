"""What autocast asks for on a tensor's device, and how it casts."""

import torch
from torch import Tensor

SIXTEEN_BIT = (torch.float16, torch.bfloat16)


def dtype_for(tensor: Tensor) -> torch.dtype | None:
    """The autocast dtype of the tensor's device; None outside of autocast."""
    # A device makes an object; is_cuda takes a sixth of the time.
    device_type = "cuda" if tensor.is_cuda else tensor.device.type
    if device_type not in ("cuda", "cpu") or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def cast(tensor: Tensor | None, dtype: torch.dtype, *others: torch.dtype) -> Tensor | None:
    """As autocast casts an argument: what is floating, but not fp64, nor of one of ``others``."""
    if tensor is None or not tensor.is_floating_point():
        return tensor
    return tensor if tensor.dtype in (torch.float64, *others) else tensor.to(dtype)
