"""A reduced set of calls for compute-sanitizer: every kernel family, odd sizes, misaligned and
strided memory.

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/sanitizer_set.py
    [norm] [softmax]

Without torch's caching allocator every tensor is an allocation of its own, so that a read or write
past its end is seen. The tools racecheck, initcheck and synccheck take the same command.
"""

import itertools
import sys

import softmax_harness as softmax
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


# Rows of every tier, odd and even; columns of either kernel form.
SOFTMAX_COLS = [1, 3, 33, 96, 250, 1000, 1025, 2049, 4097, 9001, 40000, 150001]
SOFTMAX_COLUMNS = [(2, 3, 5), (1, 33, 64), (3, 1000, 7), (2, 4097, 8), (1, 40000, 3)]


def softmax_calls(generator):
    """(form, x, dy, mask) of softmax, log_softmax and masked softmax."""
    tiers = ("auto", "warp", "block", "uncached")
    rows = 5
    for pair, tier, cols in itertools.product(softmax.PAIRS, tiers, SOFTMAX_COLS):
        x = randn(generator, rows, cols + 3, dtype=pair[0])[:, 3:]
        dy = randn(generator, rows, cols + 1, dtype=pair[1])[:, 1:]
        for log in (False, True):
            yield softmax.Form(*pair, log=log, tier=tier), x, dy, None
        form = softmax.Form(*pair, tier=tier, masked=True, scale=0.5, causal=True)
        yield form, x, dy, randn(generator, 1, cols + 1)[:, 1:] < 0
        yield form, x, dy, randn(generator, rows, cols, dtype=pair[0])
        yield form, x, dy, randn(generator, rows, 1)
    for pair, shape in itertools.product(softmax.PAIRS, SOFTMAX_COLUMNS):
        x, dy = (randn(generator, *shape, dtype=dtype) for dtype in pair)
        for log in (False, True):
            yield softmax.Form(*pair, log=log, dim=1), x, dy, None


def run_softmax(generator):
    label = None
    for form, *tensors in softmax_calls(generator):
        if str(form) != label:
            label = str(form)
            print(label, file=sys.stderr, flush=True)
        softmax.forward_backward(form, *tensors)


def run_norm(generator):
    every_form = list(forms())
    for number, form in enumerate(every_form):
        print(f"{number + 1}/{len(every_form)} {form}", file=sys.stderr, flush=True)
        for rows, cols in itertools.product(ROWS, COLS):
            weight, bias = random_parameters(generator, form, [cols], recoverable=True)
            packed = randn(generator, rows, cols + 3, dtype=form.x)
            dy = randn(generator, rows, cols, dtype=form.y)
            for x in (packed[:, 3:], packed[:, 1 : cols + 1].contiguous()):
                forward_backward(apply, form, x, [cols], weight, bias, dy)


def main():
    generator = torch.Generator("cuda").manual_seed(0)
    families = {"softmax": run_softmax, "norm": run_norm}
    for name in sys.argv[1:] or families:
        families[name](generator)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
