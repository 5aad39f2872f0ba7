"""This library's operators."""

import torch

import fused_norm as fn
from benchmarks.peers import Unsupported
from benchmarks.results import OURS
from fused_norm import _C

VERSION = fn.__version__


class Norm:
    """LayerNorm and RMSNorm; bias is None for RMSNorm."""

    name = OURS
    directions = ("forward", "backward")
    from_output = False  # backward takes the rounded output, not x

    def forward(self, case, x, weight, bias):
        """(y, statistics...)"""
        return torch.ops.fused_norm.norm_forward(
            x, weight, bias, [case.cols], case.eps, 0.0, case.rms
        )

    def saved(self, case, x, weight, bias):
        """What backward needs of a forward pass; not timed."""
        y, mean, rstd = self.forward(case, x, weight, bias)
        if self.from_output:
            return y, None, rstd
        return x, (None if case.rms else mean), rstd

    def backward(self, case, dy, saved, weight, bias):
        """(dx, dweight, dbias or None)"""
        return torch.ops.fused_norm.norm_backward(
            dy, *saved, weight, bias, [case.cols], 0.0, case.rms, self.from_output, dy.dtype,
            [True, True, bias is not None],
        )  # fmt: skip


class NormMemoryEfficient(Norm):
    """Backward from the saved output; the forward operator is the same."""

    name = f"{OURS} memory_efficient"
    directions = ("backward",)
    from_output = True


class Softmax:
    """softmax and log_softmax; `tier` forces where our kernels keep a row."""

    name = OURS
    directions = ("forward", "backward")

    def __init__(self, tier="auto"):
        self.tier = tier

    def forward(self, case, x):
        return self._forced(torch.ops.fused_norm.softmax_forward, x, -1, case.log, case.y_dtype)

    def backward(self, case, dy, y):
        return self._forced(
            torch.ops.fused_norm.softmax_backward, dy, y, -1, case.log, case.x_dtype
        )

    def _forced(self, operator, *arguments):
        if self.tier == "auto":
            return operator(*arguments)
        _C.force_softmax_tier(self.tier)
        try:
            return operator(*arguments)
        except RuntimeError as error:
            if "does not hold" in str(error):
                raise Unsupported(str(error)) from None
            raise
        finally:
            _C.force_softmax_tier("auto")


def functions():
    f = fn.functional
    return {
        "layer_norm": lambda x, weight, bias: f.layer_norm(x, weight.shape, weight, bias),
        "rms_norm": lambda x, weight: f.rms_norm(x, weight.shape, weight, 1e-5),
        "softmax": lambda x: f.softmax(x, -1),
        "log_softmax": lambda x: f.log_softmax(x, -1),
    }
