"""Liger Kernel: Triton operators.

RMSNorm in the mode that computes in fp32 and rounds once, and with dx written over dy as its module
does; LayerNorm has one mode.
"""

from importlib.metadata import version

from liger_kernel import ops
from liger_kernel.ops import softmax as softmax_ops
from liger_kernel.ops.utils import calculate_settings

from benchmarks.peers import SavesInput, only_softmax

VERSION = version("liger-kernel")
# The backward function takes the mode as the number that the forward function makes of its name.
CASTING_MODE, CASTING_MODE_NUMBER = "gemma", 1


class Norm(SavesInput):
    name = "liger"

    def overwrites_dy(self, case):
        return case.rms

    def forward(self, case, x, weight, bias):
        if case.rms:
            y, _, rstd, *_ = ops.rms_norm_forward(x, weight, case.eps, 0.0, CASTING_MODE, None)
            return y, rstd
        y, _, mean, rstd, *_ = ops.layer_norm_forward(x, weight, bias, case.eps)
        return y, mean, rstd

    def backward(self, case, dy, saved, weight, bias):
        x, *statistics = saved
        if case.rms:
            return *ops.rms_norm_backward(
                dy, x, weight, *statistics, 0.0, CASTING_MODE_NUMBER,
                *calculate_settings(case.cols), True, None,
            ), None  # fmt: skip
        return ops.layer_norm_backward(dy, x, weight, bias, *statistics)


class Softmax:
    name = "liger"
    rounds_product = True

    def forward(self, case, x):
        only_softmax(case)
        return ops.LigerSoftmaxFunction.apply(x)

    def backward(self, case, dy, y):
        only_softmax(case)
        block, warps = calculate_settings(case.cols)
        return softmax_ops._softmax_backward(dy, y, block, warps, case.cols > block)


def functions():
    return {
        "layer_norm": lambda x, w, b: ops.LigerLayerNormFunction.apply(x, w, b, 1e-5),
        "rms_norm": lambda x, w: ops.LigerRMSNormFunction.apply(x, w, 1e-5, 0.0, CASTING_MODE),
        "softmax": ops.LigerSoftmaxFunction.apply,
    }
