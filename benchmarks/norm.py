"""LayerNorm and RMSNorm, forward and backward.

Each call is the bare operator, without autograd: forward also stores the statistics that backward
needs, and backward gives dx, dweight and (LayerNorm) dbias.
"""

import dataclasses

import torch

from benchmarks import commandline, measure, reference
from benchmarks.peers import ours
from benchmarks.targets import norm_target

# name: (dtype of x, dtype of the parameters)
DTYPES = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "fp32": (torch.float32, torch.float32),
    "bf16-fp32w": (torch.bfloat16, torch.float32),
}
SHAPES = [
    ((8192, 768), "bf16"),
    ((16384, 2048), "bf16"),
    ((8192, 5120), "bf16"),
    ((8192, 12288), "bf16"),
    ((1024, 32768), "bf16"),
    ((131072, 128), "bf16"),
    ((100000, 192), "bf16"),
    ((512, 4096), "bf16"),
    ((8192, 3333), "bf16"),
    ((2048, 50000), "bf16"),
    ((8192, 4096), "fp32"),
    ((8192, 4096), "bf16-fp32w"),
    ((8192, 1536), "fp16"),
]
QUICK_SHAPES = [((8192, 768), "bf16"), ((8192, 5120), "bf16"), ((512, 4096), "bf16")]
LISTS = SHAPES, QUICK_SHAPES


@dataclasses.dataclass(frozen=True)
class Case:
    rms: bool
    rows: int
    cols: int
    dtype: str  # a key of DTYPES
    direction: str
    eps: float = 1e-5

    @property
    def operation(self):
        return "RMSNorm" if self.rms else "LayerNorm"

    @property
    def x_dtype(self):
        return DTYPES[self.dtype][0]

    @property
    def weight_dtype(self):
        return DTYPES[self.dtype][1]

    @property
    def bytes(self):
        """What must move: x in, y out; or dy and x in, dx out."""
        tensors = 2 if self.direction == "forward" else 3
        return tensors * self.rows * self.cols * self.x_dtype.itemsize

    def target(self):
        return norm_target(self.direction, self.cols, self.x_dtype)

    def inputs(self, sets, device):
        def random(*shape, dtype=self.x_dtype, mean=0.0, std=1.0):
            return torch.empty(shape, dtype=dtype, device=device).normal_(mean, std)

        matrix = (self.rows, self.cols)
        return Inputs(
            weight=random(self.cols, dtype=self.weight_dtype, mean=1.0, std=0.1),
            bias=None if self.rms else random(self.cols, dtype=self.weight_dtype, std=0.1),
            x=[random(*matrix, mean=0.5, std=2.0) for _ in range(sets)],
            dy=[random(*matrix) for _ in range(sets if self.direction == "backward" else 0)],
        )

    def bind(self, peer, given):
        parameters = given.weight, given.bias
        if self.direction == "forward":
            return (lambda x: peer.forward(self, x, *parameters)), given.x
        saved = [peer.saved(self, x, *parameters) for x in given.x]
        dys = given.dy
        if measure.overwrites(peer, self):
            dys = [dy.clone() for dy in dys]
        return (
            lambda pair: peer.backward(self, *pair, *parameters),
            list(zip(dys, saved, strict=True)),
        )

    def error(self, peer, given, index, output):
        x, parameters = given.x[index], (given.weight, given.bias)
        roundings = reference.roundings(peer)
        if self.direction == "forward":
            return reference.forward_error(self, x, *parameters, output[0], roundings)
        from_output = getattr(peer, "from_output", False)
        return reference.backward_error(
            self, x, *parameters, given.dy[index], output, from_output, roundings
        )


@dataclasses.dataclass(frozen=True)
class Inputs:
    weight: torch.Tensor
    bias: torch.Tensor | None
    x: list
    dy: list


KINDS = {"layer": False, "rms": True}


def add_arguments(parser):
    commandline.add_case_arguments(parser, DTYPES, KINDS)
    parser.add_argument(
        "--memory-efficient", action="store_true", help="time backward from the output as well"
    )


def run(options):
    present, absent = commandline.load_peers("Norm", options)
    efficient = [ours.NormMemoryEfficient()] if options.memory_efficient else []
    everyone = (ours.Norm(), *efficient, *present.values())
    jobs = [measure.Job(case, everyone) for case in commandline.cases(options, Case, KINDS, *LISTS)]
    return measure.run("norm" + "-apart" * options.apart, jobs, options, absent)
