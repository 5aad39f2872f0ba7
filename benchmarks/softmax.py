"""softmax and log_softmax over rows, forward and backward.

Each call is the bare operator, without autograd; backward takes the saved output. `--tier` forces
where our kernels keep a row.
"""

import dataclasses

import torch

from benchmarks import commandline, measure, reference
from benchmarks.peers import eager, ours
from benchmarks.targets import softmax_target

# name: (dtype of x, dtype of y)
DTYPES = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "fp32": (torch.float32, torch.float32),
    "bf16-fp32": (torch.bfloat16, torch.float32),
}
SHAPES = [
    ((32768, 128), "bf16"),
    ((32768, 512), "bf16"),
    ((16384, 1024), "bf16"),
    ((32768, 777), "bf16"),
    ((8192, 8192), "bf16"),
    ((4096, 32000), "bf16"),
    ((4096, 32001), "bf16"),
    ((2048, 100352), "bf16"),
    ((2048, 151936), "bf16"),
    ((512, 200000), "bf16"),
    ((8192, 8192), "fp32"),
]
QUICK_SHAPES = [((32768, 128), "bf16"), ((16384, 1024), "bf16"), ((4096, 32000), "bf16")]
LISTS = SHAPES, QUICK_SHAPES
TIERS = ("auto", "warp", "block", "uncached")


@dataclasses.dataclass(frozen=True)
class Case:
    log: bool
    rows: int
    cols: int
    dtype: str  # a key of DTYPES
    direction: str

    @property
    def operation(self):
        return "log_softmax" if self.log else "softmax"

    @property
    def x_dtype(self):
        return DTYPES[self.dtype][0]

    @property
    def y_dtype(self):
        return DTYPES[self.dtype][1]

    @property
    def bytes(self):
        """What must move: x in, y out; or dy and y in, dx out."""
        x, y = self.x_dtype.itemsize, self.y_dtype.itemsize
        return self.rows * self.cols * (x + y if self.direction == "forward" else x + 2 * y)

    def target(self):
        return softmax_target(self.direction, self.cols, self.x_dtype)

    def inputs(self, sets, device):
        """A list of x, or of (dy, y): every peer takes the same output, rounded as torch would."""

        def random(dtype, std=1.0):
            empty = torch.empty(self.rows, self.cols, dtype=dtype, device=device)
            return empty.normal_(0.0, std)

        xs = [random(self.x_dtype, std=3.0) for _ in range(sets)]
        if self.direction == "forward":
            return xs
        torch_forward = eager.Softmax().forward
        return [(random(self.y_dtype), torch_forward(self, x).to(self.y_dtype)) for x in xs]

    def bind(self, peer, inputs):
        if self.direction == "forward":
            return (lambda x: peer.forward(self, x)), inputs
        return (lambda pair: peer.backward(self, *pair)), inputs

    def error(self, peer, inputs, index, output):
        roundings = reference.roundings(peer)
        if self.direction == "forward":
            return reference.softmax_forward_error(self, inputs[index], output, roundings)
        rounds_product = getattr(peer, "rounds_product", False)
        return reference.softmax_backward_error(
            self, *inputs[index], output, self.y_dtype if rounds_product else None, roundings
        )


KINDS = {"softmax": False, "log_softmax": True}


def add_arguments(parser):
    commandline.add_case_arguments(parser, DTYPES, KINDS)
    parser.add_argument(
        "--tier", choices=TIERS, default="auto", help="where our kernels keep a row; default: auto"
    )


def run(options):
    present, absent = commandline.load_peers("Softmax", options)
    everyone = (ours.Softmax(options.tier), *present.values())
    jobs = [measure.Job(case, everyone) for case in commandline.cases(options, Case, KINDS, *LISTS)]
    suite = "softmax" if options.tier == "auto" else f"softmax-{options.tier}"
    suite += "-apart" * options.apart
    return measure.run(suite, jobs, options, absent, [("tier", options.tier)])
