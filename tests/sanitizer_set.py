"""A reduced set of calls for compute-sanitizer: every kernel family, odd sizes, misaligned and
strided memory.

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/sanitizer_set.py

Without torch's caching allocator every tensor is an allocation of its own, so that a read or write
past its end is seen. The tools racecheck, initcheck and synccheck take the same command.
"""

import itertools
import sys

import torch
from harness import OUTPUTS, Form, apply, forward_backward, randn, random_parameters

COLS = [1, 3, 33, 96, 250, 1000, 1025, 4097, 9001, 40000]
ROWS = [1, 7, 150]


def forms():
    """A form for each pair of dtypes, with parameters of another dtype where the pair allows
    one."""
    for kind, (x, outputs) in itertools.product(("layer", "rms"), OUTPUTS.items()):
        for y in outputs:
            weight = torch.float32 if x != y else x
            bias = x if kind == "layer" else None
            yield Form(kind, x, y, weight=weight, bias=bias)
        yield Form(kind, x, x)
        yield Form(kind, x, x, weight=x, bias=bias, memory_efficient=True)


def main():
    generator = torch.Generator("cuda").manual_seed(0)
    every_form = list(forms())
    for number, form in enumerate(every_form):
        print(f"{number + 1}/{len(every_form)} {form}", file=sys.stderr, flush=True)
        for rows, cols in itertools.product(ROWS, COLS):
            weight, bias = random_parameters(generator, form, [cols], recoverable=True)
            packed = randn(generator, rows, cols + 3, dtype=form.x)
            dy = randn(generator, rows, cols, dtype=form.y)
            for x in (packed[:, 3:], packed[:, 1 : cols + 1].contiguous()):
                forward_backward(apply, form, x, [cols], weight, bias, dy)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
