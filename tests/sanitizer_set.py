"""A reduced set of calls for compute-sanitizer: every kernel family, in every tier, with
regular and irregular rows and every kind of parameters, at the smallest sizes that make the loops
go round.

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/sanitizer_set.py
    [norm] [add] [gated] [softmax] [attention] [stages] [K/N]

K/N takes every N-th pair of dtypes and kind, or call of attention, from the K-th on. Without
torch's caching allocator every tensor is an allocation of its own, so that a read or write past its
end is seen. The tools racecheck, initcheck and synccheck take the same command; sanitize.py runs
every part. Inputs are drawn on the CPU, so that hardly a kernel runs but the library's own. Where
fused_norm is compiled in the tree and not installed, PYTHONPATH must hold the repository's root.
"""

import dataclasses
import itertools
import math
import sys
import time

import softmax_harness as softmax
import torch
from attention_reference import BF16, FP32, SAMPLE, Case, attend, forced, takes, tensors_of
from attention_reference import run as run_case
from harness import OUTPUTS, SHORT, SUMS

from fused_norm.functional import rms_norm_gated

# Columns, and rows for backward. The columns lie in each tier of each pack size: from one lane a
# row to a cluster of sixteen blocks and to streaming. Where backward's rows need a barrier, they
# are in one shape of each tier as many as give a persistent block three rounds on a chip of 132
# multiprocessors, as the slots of two rounds alternate, and where they pass through a ring of up
# to six stages more, so that stages are filled again and read. None: backward has no other tier
# there.
SHAPES = [
    (1, 1),
    (3, 7),
    (33, 34000),
    (91, 37),
    (250, 150),
    (301, 64),
    (597, 3200),
    (598, 700),
    (997, 3200),
    (1025, 2000),
    (3001, 800),
    (3002, 280),
    (4097, 2200),
    (9001, 1200),
    (17001, 600),
    (28001, None),
    (28002, None),
    (33001, 400),
    (60001, 50),
    (66001, 150),
    (94001, 50),
    (131081, None),
    (262153, None),
]
FORWARD_ROWS = 150, 5  # short rows, of which a block takes up to 128 at once, and longer ones
# TILED, of 16 bit: rows so many that those who normalize tiles in place fill their slots again, on
# 132 multiprocessors. BACKWARD_SHORT: that lanes and warps take three rows, and that lanes have two
# or three packs of whole ones. SOFTMAX_TILED: as TILED.
TILED = [
    (7, 1216520),
    (33, 202777),
    (65, 101385),
    (81, 101385),
    (257, 25351),
    (258, 25351),
    (513, 9509),
    (1025, 4757),
    (2049, 2381),
    (4097, 1191),
    (8193, 1585),
]
BACKWARD_SHORT = [(9, 150001), (65, 34001), (66, 34001), (128, 65601), (144, 58401), (257, 12801)]
BACKWARD_SHORT += [(513, 4801)]
SOFTMAX_TILED = [(65, 140001), (513, 32001), (1025, 16001)]
LISTED = {"regular": 97, "offset": 7}  # a column in so many is listed: few of a row, and many
FEW_ROWS = 6  # for the calls that differ from these in parameters or layout alone
ALL = (True, True, True)
MASKS = [(True, False, False), (False, True, True), (True, True, False), (True, False, True)]
POOL = 2**24  # random numbers from which all tensors are cut


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
    """Each shape with regular and irregular rows, and with parameters of either kernel form; the
    other parameters and gradients in turn, which `turn` starts."""
    others = [(x_dtype, None, 0.0), (None, None, 0.0), (torch.float32, x_dtype, 1.0),
              (None, x_dtype, 0.0), (x_dtype, x_dtype, 0.0)]  # fmt: skip
    numbers = itertools.count(turn)
    for cols, backward_rows in SHAPES:
        even = -(-cols // 8) * 8
        forward_rows = FORWARD_ROWS[cols > 1100]
        yield Call(forward_rows, even, "regular", torch.float32, torch.float32, 0.0, None)
        yield Call(forward_rows, cols, "odd", *others[next(numbers) % len(others)], None)
        rows, mask = (backward_rows, ALL) if backward_rows else (FEW_ROWS, None)
        yield Call(rows, even, "regular", x_dtype, x_dtype, 0.0, mask)
        if backward_rows:
            yield Call(rows, cols, "odd", *others[next(numbers) % len(others)], mask)
        for layout, columns in (("regular", even), ("offset", cols), ("offset", even)):
            number = next(numbers)
            parameters = others[number % len(others)]
            mask = MASKS[number % len(MASKS)] if backward_rows else None
            yield Call(min(rows, FEW_ROWS), columns, layout, *parameters, mask)
    if x_dtype.itemsize == 2:
        for cols, rows in TILED:
            yield Call(rows, cols, "odd", x_dtype, x_dtype, 0.0, None)
    if x_dtype.itemsize < 8:
        for cols, rows in BACKWARD_SHORT:
            layout = "odd" if cols % 8 else "regular"
            yield Call(rows, cols, layout, x_dtype, x_dtype, 0.0, ALL)


def tensor(pool, rows, cols, layout):
    """Numbers of `pool` on the GPU. Offset rows start 3 elements into each stretch of memory, and
    where their number is even have two strides."""

    def cut(*shape):
        return pool[: math.prod(shape)].view(shape).cuda()

    if layout != "offset":
        return cut(rows, cols)
    outer = 2 if rows % 2 == 0 else 1
    return cut(outer, rows // outer, cols + 3)[..., 3:].transpose(0, 1)


def parameters(call, pools, rms):
    """(weight, bias) with every column recoverable at any dtype, |bias / g| being at most 4: a
    backward pass from the output that meets another column makes the next call raise."""
    weight = bias = None
    if call.weight is not None:
        weight = (pools[call.weight][: call.cols].abs() + 2 - call.weight_offset).cuda()
    if call.bias is not None and not rms:
        bias = (pools[call.bias][: call.cols] / 2).cuda()
    return weight, bias


def run(call, pools, x_dtype, y_dtype, rms):
    """One forward pass, and backward from the input and from the output where the call has it."""
    x = tensor(pools[x_dtype], call.rows, call.cols, call.layout)
    weight, bias = parameters(call, pools, rms)
    shape = [call.cols]
    y, mean, rstd = torch.ops.fused_norm.norm_forward(
        x, weight, bias, shape, 1e-5, call.weight_offset, rms, y_dtype
    )
    if call.output_mask is None:
        return
    dy = tensor(pools[y_dtype], call.rows, call.cols, call.layout)
    for saved, saved_mean, from_output in ((x, None if rms else mean, False), (y, None, True)):
        torch.ops.fused_norm.norm_backward(
            dy, saved, saved_mean, rstd, weight, bias, shape, call.weight_offset, rms, from_output,
            x_dtype, call.output_mask,
        )  # fmt: skip
    if weight is not None and call.layout != "odd":
        weight[:: LISTED[call.layout]] = -call.weight_offset
        y, rstd, side, columns = torch.ops.fused_norm.norm_forward(
            x, weight, bias, shape, 1e-5, call.weight_offset, rms, y_dtype, room=call.cols
        )
        torch.ops.fused_norm.norm_backward(
            dy, y, None, rstd, weight, bias, shape, call.weight_offset, rms, True,
            x_dtype, call.output_mask, side, columns,
        )  # fmt: skip


def run_add(call, pools, x_dtype, y_dtype, rms):
    """The same of a forward pass that adds a residual, and with the gradient of the sum."""
    size = (call.rows, call.cols)
    residual, x = (tensor(pools[dtype], *size, call.layout) for dtype in (x_dtype, y_dtype))
    weight, bias = parameters(call, pools, rms)
    shape = [call.cols]
    y, total, mean, rstd = torch.ops.fused_norm.norm_forward(
        x, weight, bias, shape, 1e-5, call.weight_offset, rms, residual=residual
    )
    if call.output_mask is None or not call.output_mask[0]:
        return
    for saved, saved_mean, from_output in ((total, None if rms else mean, False), (y, None, True)):
        torch.ops.fused_norm.norm_backward(
            x, saved, saved_mean, rstd, weight, bias, shape, call.weight_offset, rms, from_output,
            x_dtype, call.output_mask, None, None, residual,
        )  # fmt: skip
    if weight is not None and call.layout != "odd":
        weight[:: LISTED[call.layout]] = -call.weight_offset
        y, total, rstd, side, columns = torch.ops.fused_norm.norm_forward(
            x, weight, bias, shape, 1e-5, call.weight_offset, rms, y_dtype, residual, x_dtype,
            call.cols,
        )  # fmt: skip
        torch.ops.fused_norm.norm_backward(
            x, y, None, rstd, weight, bias, shape, call.weight_offset, rms, True,
            x_dtype, call.output_mask, side, columns, residual,
        )  # fmt: skip


# Of gated norms: rows of every tier, odd and even, some by groups; and rows so many that lanes have
# two packs in backward.
GATED = [(5, 1, None), (37, 24, 8), (150, 250, None), (40, 1024, 128), (270, 2048, None)]
GATED += [(6, 3001, None), (30, 8200, None), (131073, 64, None), (61683, 136, None)]


def run_gated(pools, chosen, report):
    forms = [(BF16, BF16, BF16), (torch.float16, FP32, FP32), (FP32, FP32, None)]
    forms += [(torch.float64, torch.float64, torch.float64)]
    for number, (form, norm_first) in chosen(itertools.product(forms, (True, False))):
        x_dtype, gate_dtype, weight_dtype = form
        for rows, cols, size in GATED:
            for layout in ("odd", "offset") if rows < 1000 else ("regular",):
                x, gate, dy = (
                    tensor(pools[dtype], rows, cols, layout)
                    for dtype in (x_dtype, gate_dtype, x_dtype)
                )
                leaves = [x.requires_grad_(), gate.requires_grad_()]
                weight = None
                if weight_dtype is not None:
                    weight = pools[weight_dtype][:cols].cuda().requires_grad_()
                    leaves.append(weight)
                y = rms_norm_gated(
                    x, gate, cols, weight, norm_before_gate=norm_first, group_size=size
                )
                torch.autograd.grad(y, leaves, dy)
        report(f"gated {number + 1}/{2 * len(forms)}", (x_dtype, gate_dtype))


# Rows of every tier of softmax, odd and even, and tensors of either kernel over columns.
SOFTMAX_COLS = [1, 3, 33, 96, 250, 1000, 1025, 2049, 4097, 9001, 40000, 150001]
# Rows that pass through a ring: more than there are clusters on a chip of 132 multiprocessors, of
# one block and of two; and not of whole packs (forward: of no ring).
RING_SHAPES = [(270, 33000, "offset"), (150, 66000, "regular"), (31, 270001, "odd")]
SOFTMAX_COLUMNS = [(2, 3, 5), (1, 33, 64), (3, 1000, 7), (2, 4097, 8), (1, 40000, 3)]


def softmax_calls(pools, pair):
    """(form, x, dy, mask) of softmax, log_softmax and masked softmax."""

    def tensors(rows, cols, layout):
        return (tensor(pools[dtype], rows, cols, layout) for dtype in pair)

    tiers = ("auto", "warp", "block", "uncached")
    for tier, cols, layout in itertools.product(tiers, SOFTMAX_COLS, ("odd", "offset")):
        x, dy = tensors(FEW_ROWS, cols, layout)
        for log in (False, True):
            yield softmax.Form(*pair, log=log, tier=tier), x, dy, None
        form = softmax.Form(*pair, tier=tier, masked=True, scale=0.5, causal=True)
        yield form, x, dy, None
        form = dataclasses.replace(form, causal=False)
        rows = tensor(pools[torch.float32], 1, cols, "offset")
        yield form, x, dy, (pools[torch.float32][: cols + 1] < 0).cuda()[1:]
        yield form, x, dy, rows.view(cols)
        yield form, x, dy, tensor(pools[pair[0]], x.shape[-2], 1, "regular")
    tiled = [(rows, cols, "odd") for cols, rows in SOFTMAX_TILED if pair[0].itemsize == 2]
    for rows, cols, layout in RING_SHAPES + tiled:
        x, dy = tensors(rows, cols, layout)
        for log in (False, True):
            yield softmax.Form(*pair, log=log), x, dy, None
    for outer, cols, inner in SOFTMAX_COLUMNS:
        x, dy = (t.view(outer, cols, inner) for t in tensors(outer, cols * inner, "regular"))
        for log in (False, True):
            yield softmax.Form(*pair, log=log, dim=1), x, dy, None


def run_softmax(pools, chosen, report):
    for number, pair in chosen(softmax.PAIRS):
        for form, *tensors in softmax_calls(pools, pair):
            softmax.forward_backward(form, *tensors)
        report(f"softmax {number + 1}/{len(softmax.PAIRS)}", pair)


def run_norm(pools, chosen, report):
    pairs = [(x, y) for x, outputs in OUTPUTS.items() for y in outputs]
    for turn, ((x, y), rms) in chosen(itertools.product(pairs, (False, True))):
        for call in calls(x, turn):
            run(call, pools, x, y, rms)
        report(f"norm {turn + 1}/{2 * len(pairs)} {'rms' if rms else 'layer'}", (x, y))


def run_adds(pools, chosen, report):
    for turn, ((x, y), rms) in chosen(itertools.product(SUMS, (False, True))):
        for call in calls(x, turn):
            run_add(call, pools, x, y, rms)
        report(f"add {turn + 1}/{2 * len(SUMS)} {'rms' if rms else 'layer'}", (x, y))


# Of attention, for racecheck: the fewest calls in which every buffer of shared memory is filled
# again, in each form of the kernels.
STAGES = [
    Case(BF16, (70, 520), (64, 64), (1, 6, 1), "causal"),
    Case(BF16, (70, 520), (64, 64), (1, 1, 1), "full", "float", softcap=5.0),
    Case(BF16, (70, 520), (128, 128), (1, 1, 1), "causal"),
    Case(BF16, (70, 520), (128, 128), (1, 1, 1), "both", "bool keys"),
    Case(BF16, (330, 200), (128, 128), (1, 1, 1), "causal", "float"),
    Case(BF16, (150, 330), (192, 192), (1, 1, 1), "full", "bool"),
    Case(BF16, (300, 200), (192, 128), (1, 1, 1), "causal"),
    Case(BF16, (150, 330), (256, 256), (1, 1, 1), "causal"),
    Case(BF16, (150, 330), (256, 256), (1, 1, 1), "full", "fp32"),
    Case(FP32, (70, 150), (40, 40), (1, 2, 1), "causal", "float rows"),
    # As many heads as multiprocessors: forward on Hopper takes three warpgroups.
    Case(BF16, (190, 300), (64, 64), (1, 132, 1), "causal"),
    # With a mask, forward: more tiles of queries than multiprocessors have room for, thrice.
    Case(BF16, (60, 150), (64, 64), (1, 300, 1), "full", "float"),
    # Of a mask that heads share, as by causality, whole tiles are left out.
    Case(BF16, (520, 520), (64, 64), (2, 2, 1), "full", "bool causal"),
    Case(BF16, (330, 520), (128, 128), (1, 2, 1), "full", "bool causal"),
    Case(BF16, (70, 520), (64, 64), (1, 1, 1), "causal", "bool keys"),
    # A mask's gradient on Hopper: more tiles of the mask than multiprocessors.
    Case(BF16, (150, 330), (64, 64), (3, 24, 24), "causal", "float heads"),
    Case(BF16, (150, 330), (128, 128), (3, 12, 12), "full", "float heads"),
    Case(BF16, (70, 520), (64, 64), (1, 1, 1), "causal", dropout=0.4),
    Case(BF16, (70, 520), (128, 128), (1, 1, 1), "causal", dropout=0.4),
    Case(BF16, (330, 520), (128, 128), (1, 1, 1), "both", "bool keys", dropout=0.4),
    Case(BF16, (330, 200), (128, 128), (1, 1, 1), "full", "float", dropout=0.4),
    # Few queries, whose keys come in parts.
    Case(BF16, (1, 2500), (128, 128), (1, 4, 2)),
    Case(BF16, (5, 2500), (64, 64), (2, 2, 2), "full", "bool keys"),
    Case(BF16, (4, 2500), (128, 128), (1, 2, 1), "causal", "float"),
    # Short sequences, of one tile: more pairs than two for each block, of one mask, many and none.
    # And a mask's gradient in parts on Hopper. There are two tiles of keys, as racecheck takes no
    # notice of bar.arrive, by which a warp gives the dquery of a single tile back. And no block has
    # five tiles, as it takes none of an arrival behind __syncwarp(), by which that warp leaves one.
    Case(BF16, (49, 49), (32, 32), (300, 3, 3), "causal", "float heads"),
    Case(BF16, (40, 64), (24, 64), (600, 2, 2), "full", "bool"),
    Case(BF16, (16, 30), (64, 64), (700, 2, 2)),
    Case(BF16, (49, 150), (40, 40), (40, 3, 3), "full", "float heads"),
]


def run_attention(pools, chosen, report, sample=SAMPLE):
    """The tests' own sample, in each tier that takes a call."""
    generator = torch.Generator().manual_seed(0)
    tiers = ("plain", "portable", "hopper")
    wanted = [(case, tier) for case, tier in itertools.product(sample, tiers) if takes(tier, case)]
    for number, (case, tier) in chosen(wanted):
        tensors = {name: t.cuda() for name, t in tensors_of(case, generator).items()}
        with forced(tier):
            run_case(attend(case), case, tensors)
        report(f"attention {number + 1}/{len(wanted)} {tier}", (case.dtype,))


def run_stages(pools, chosen, report):
    run_attention(pools, chosen, report, STAGES)


def main():
    begin = time.monotonic()
    numbers = torch.randn(POOL, generator=torch.Generator().manual_seed(0))
    pools = {dtype: numbers.to(dtype) for dtype in OUTPUTS}

    def report(what, pair):
        torch.cuda.synchronize()
        dtypes = "->".join(SHORT[dtype] for dtype in pair)
        print(f"{what} {dtypes}, {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)

    families = {
        "norm": run_norm,
        "add": run_adds,
        "gated": run_gated,
        "softmax": run_softmax,
        "attention": run_attention,
        "stages": run_stages,
    }
    parts = [argument for argument in sys.argv[1:] if "/" in argument]
    first, step = (int(number) for number in (parts or ["1/1"])[0].split("/"))

    def chosen(forms):
        return itertools.islice(enumerate(forms), first - 1, None, step)

    for name in [argument for argument in sys.argv[1:] if argument not in parts] or families:
        families[name](pools, chosen, report)

    # The thread of autograd may still hold tensors of the last call. Where it lets go of them while
    # Python ends, it asks for the interpreter's lock, and the process is terminated. It has let go
    # of them when it makes another gradient.
    last = torch.ones((), device="cuda", requires_grad=True)
    total = last.sum()
    total.backward()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
