"""NVIDIA apex: the extension behind its fused norms, and its functions."""

import fused_layer_norm_cuda as extension
from apex import normalization

from benchmarks.peers import SavesInput, Unsupported

VERSION = "unversioned"
LACKS = {"Softmax": "has softmax with a mask and a scale only"}


class Norm(SavesInput):
    name = "apex"

    def forward(self, case, x, weight, bias):
        self._check(case)
        if case.rms:
            return extension.rms_forward_affine(x, (case.cols,), weight, case.eps)
        return extension.forward_affine(x, (case.cols,), weight, bias, case.eps)

    def backward(self, case, dy, saved, weight, bias):
        x, *statistics = saved
        if case.rms:
            return *extension.rms_backward_affine(
                dy, *statistics, x, (case.cols,), weight, case.eps, False
            ), None  # fmt: skip
        return extension.backward_affine(
            dy, *statistics, x, (case.cols,), weight, bias, case.eps, False
        )

    def _check(self, case):
        if case.x_dtype != case.weight_dtype:
            raise Unsupported("the output has the dtype of the weights")


def functions():
    return {
        "layer_norm": lambda x, weight, bias: (
            normalization.fused_layer_norm.fused_layer_norm_affine(
                x, weight, bias, weight.shape, 1e-5
            )
        ),
        "rms_norm": lambda x, weight: normalization.fused_layer_norm.fused_rms_norm_affine(
            x, weight, weight.shape, 1e-5
        ),
    }
