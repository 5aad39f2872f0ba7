"""torch.compile: Inductor's kernels for the operators that autograd records.

Each direction is compiled alone, from the operators that the forward or backward graph of a
compiled model holds for a norm or a softmax: the kernels are those of Inductor's default mode for
exactly this shape, and nothing of autograd is timed.
"""

import functools

import torch

from benchmarks.peers import eager, saved_by_plain_torch

VERSION = torch.__version__


class Compiled:
    """Compiles the methods of `implementation` afresh for each case."""

    name = "torch.compile"

    def __init__(self, implementation):
        self.implementation = implementation
        self.case = None

    def _call(self, method, case, *arguments):
        if case != self.case:
            # A function recompiled for many shapes would fall back to eager.
            torch.compiler.reset()
            self.case = case
            self.compiled = torch.compile(
                functools.partial(getattr(self.implementation, method), case),
                fullgraph=True,
                dynamic=False,
            )
        return self.compiled(*arguments)

    def forward(self, case, *arguments):
        return self._call("forward", case, *arguments)

    def backward(self, case, *arguments):
        return self._call("backward", case, *arguments)


class Norm(Compiled):
    def __init__(self):
        super().__init__(eager.Norm())

    def saved(self, case, x, weight, bias):
        return saved_by_plain_torch(case, x)


class Softmax(Compiled):
    def __init__(self):
        super().__init__(eager.Softmax())


def functions():
    return {
        operation: torch.compile(function, fullgraph=True, dynamic=False)
        for operation, function in eager.functions().items()
    }
