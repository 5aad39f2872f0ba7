"""torch's own operators."""

import torch
import torch.nn.functional as F

from benchmarks.peers import SavesInput

VERSION = torch.__version__


class Norm(SavesInput):
    name = "torch"

    def forward(self, case, x, weight, bias):
        if case.rms:
            return torch.ops.aten._fused_rms_norm(x, [case.cols], weight, case.eps)
        return torch.ops.aten.native_layer_norm(x, [case.cols], weight, bias, case.eps)

    def backward(self, case, dy, saved, weight, bias):
        x, *statistics = saved
        if case.rms:
            aten = torch.ops.aten._fused_rms_norm_backward
            return *aten(dy, x, [case.cols], *statistics, weight, [True, True]), None
        aten = torch.ops.aten.native_layer_norm_backward
        return aten(dy, x, [case.cols], *statistics, weight, bias, [True, True, True])


class Softmax:
    name = "torch"
    rounds_product = True  # in backward, dy * y to the output's dtype, before the sum

    def forward(self, case, x):
        aten = torch.ops.aten._log_softmax if case.log else torch.ops.aten._softmax
        if case.x_dtype == case.y_dtype:
            return aten(x, -1, False)
        if x.device.type == "cuda" and x.dtype == torch.float16:
            return aten(x, -1, True)  # the one conversion that torch fuses
        return aten(x.to(case.y_dtype), -1, False)

    def backward(self, case, dy, y):
        aten = torch.ops.aten
        aten = aten._log_softmax_backward_data if case.log else aten._softmax_backward_data
        return aten(dy, y, -1, y.dtype).to(case.x_dtype)


def functions():
    return {
        "layer_norm": lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias),
        "rms_norm": lambda x, weight: F.rms_norm(x, weight.shape, weight, 1e-5),
        "softmax": lambda x: F.softmax(x, -1),
        "log_softmax": lambda x: F.log_softmax(x, -1),
    }
