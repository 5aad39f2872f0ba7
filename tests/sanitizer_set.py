"""A reduced set of calls for compute-sanitizer: every kernel of the norms, in every tier, with
regular and irregular rows and every kind of parameters, at the smallest sizes that make the loops
go round.

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/sanitizer_set.py

Without torch's caching allocator every tensor is an allocation of its own, so that a read or write
past its end is seen. The tools racecheck, initcheck and synccheck take the same command. Inputs are
drawn on the CPU, so that hardly a kernel runs but the library's own.
"""

import dataclasses
import itertools
import sys
import time

import torch
from harness import OUTPUTS, SHORT

# Rows x columns. The columns lie in each tier of each pack size: from one lane a row to a cluster
# of eight blocks and to streaming. The rows are as many as give a persistent block of backward
# three rounds on a chip of 132 multiprocessors: the slots of two rounds alternate.
SHAPES = [
    (1, 1),
    (7, 3),
    (34000, 33),
    (37, 91),
    (150, 250),
    (64, 301),
    (37, 997),
    (1330, 1025),
    (530, 3001),
    (270, 4097),
    (140, 9001),
    (64, 17001),
    (32, 33001),
    (34, 66001),
    (3, 131081),
]
BACKWARD_COLS = 100_000  # more are no other tier of backward
FEW_ROWS = 6  # for the calls that differ from these in parameters or layout alone
ALL = (True, True, True)
MASKS = [(True, False, False), (False, True, True), (True, True, False), (True, False, True)]


@dataclasses.dataclass(frozen=True)
class Call:
    rows: int
    cols: int
    layout: str  # "regular", "odd": contiguous, "offset": a slice of a transposed batch
    weight: torch.dtype | None
    bias: torch.dtype | None
    weight_offset: float
    output_mask: tuple | None  # None: forward only


def calls(x_dtype, turn):
    """Each shape with regular rows and parameters of either kernel form, and with regular and
    irregular rows and the other parameters and gradients in turn, which `turn` starts."""
    others = [(x_dtype, None, 0.0), (None, None, 0.0), (torch.float32, x_dtype, 1.0),
              (None, x_dtype, 0.0), (x_dtype, x_dtype, 0.0)]  # fmt: skip
    numbers = itertools.count(turn)
    for rows, cols in SHAPES:
        even = -(-cols // 8) * 8
        few = min(rows, FEW_ROWS)
        yield Call(rows, even, "regular", x_dtype, x_dtype, 0.0, ALL)
        if x_dtype != torch.float32:  # backward makes no difference
            yield Call(few, even, "regular", torch.float32, torch.float32, 0.0, None)
        for layout in ("regular", "odd", "offset"):
            number = next(numbers)
            parameters, mask = others[number % len(others)], MASKS[number % len(MASKS)]
            if layout == "odd":
                yield Call(rows, cols, layout, *parameters, ALL)
            else:
                yield Call(few, even if layout == "regular" else cols, layout, *parameters, mask)


def tensor(generator, rows, cols, layout, dtype):
    """Normal numbers on the GPU. Offset rows start 3 elements into each stretch of memory, and
    where their number is even have two strides."""

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(dtype).cuda()

    if layout != "offset":
        return draw(rows, cols)
    outer = 2 if rows % 2 == 0 else 1
    return draw(outer, rows // outer, cols + 3)[..., 3:].transpose(0, 1)


def run(call, generator, x_dtype, y_dtype, rms):
    """One forward pass, and backward from the input and from the output where the call has it."""
    x = tensor(generator, call.rows, call.cols, call.layout, x_dtype)
    dy = tensor(generator, call.rows, call.cols, call.layout, y_dtype)
    weight, bias = (
        None if dtype is None else torch.rand(call.cols, generator=generator).add(0.5).to(dtype)
        for dtype in (call.weight, None if rms else call.bias)
    )
    weight, bias = (None if t is None else t.cuda() for t in (weight, bias))
    shape = [call.cols]
    y, mean, rstd = torch.ops.fused_norm.norm_forward(
        x, weight, bias, shape, 1e-5, call.weight_offset, rms, y_dtype
    )
    if call.output_mask is None or call.cols > BACKWARD_COLS:
        return
    for saved, saved_mean, from_output in ((x, None if rms else mean, False), (y, None, True)):
        torch.ops.fused_norm.norm_backward(
            dy, saved, saved_mean, rstd, weight, bias, shape, call.weight_offset, rms, from_output,
            x_dtype, call.output_mask,
        )  # fmt: skip


def main():
    generator = torch.Generator().manual_seed(0)
    begin = time.monotonic()
    pairs = [(x, y) for x, outputs in OUTPUTS.items() for y in outputs]
    for turn, ((x, y), rms) in enumerate(itertools.product(pairs, (False, True))):
        for call in calls(x, turn):
            run(call, generator, x, y, rms)
        torch.cuda.synchronize()
        name = f"{'rms' if rms else 'layer'} {SHORT[x]}->{SHORT[y]}"
        done = f"{turn + 1}/{2 * len(pairs)} {name}, {time.monotonic() - begin:.0f} s"
        print(done, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
