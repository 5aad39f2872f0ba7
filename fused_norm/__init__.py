"""Fused LayerNorm, RMSNorm, softmax and attention for PyTorch: drop-in modules and CUDA kernels.

>>> import fused_norm as fn
>>> norm = fn.LayerNorm(4096, memory_efficient=True)  # a torch.nn.LayerNorm
"""

from fused_norm import _load, _vmap, apex, config, flash_attn, functional  # noqa: F401
from fused_norm._C import build_info as _build_info
from fused_norm._convert import ConvertReport, convert, revert
from fused_norm._report import memory_report
from fused_norm._tracing import compile_options
from fused_norm.modules import LayerNorm, LogSoftmax, RMSNorm, RMSNormGated, Softmax

__version__: str = _build_info()["version"]
__all__ = [
    "ConvertReport",
    "LayerNorm",
    "LogSoftmax",
    "RMSNorm",
    "RMSNormGated",
    "Softmax",
    "__version__",
    "apex",
    "build_info",
    "compile_options",
    "config",
    "convert",
    "flash_attn",
    "functional",
    "memory_report",
    "revert",
]


def build_info() -> dict:
    """What this build is: ``version``, the ``torch`` and ``cuda`` (None in a CPU-only build) it was
    built against, ``arch_list`` of compute capabilities, and the C++ compiler ``cxx``."""
    return _build_info()
