"""softmax, log_softmax and scaled_masked_softmax against fp64 references, torch's own, and what is
promised beyond torch's, on either device.

Limits are derived in softmax_harness.py. The GPU's full range of sizes is in test_cuda_softmax.py.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from harness import Verdict, bits, randn, same_bits
from softmax_harness import (
    BF16,
    COLS,
    FP16,
    FP32,
    FP64,
    PAIRS,
    Form,
    apply,
    apply_torch,
    check_call,
    forms,
    forward_backward,
)

import fused_norm.functional as fn

INF, NAN = math.inf, math.nan
DTYPES = [FP64, FP32, FP16, BF16]
each_pair = pytest.mark.parametrize("pair", PAIRS, ids=str)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_log = pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])
FUNCTIONS = {False: (fn.softmax, F.softmax), True: (fn.log_softmax, F.log_softmax)}


def measure(verdict, generator, form, x, label, dy=None, **options):
    dy = randn(generator, *x.shape, dtype=form.y) if dy is None else dy
    verdict.add(f"{form}, {label}", check_call(form, x, dy, **options))


def logits(generator, *shape, dtype):
    """Scores of a few units, as those of attention or of a classifier."""
    return randn(generator, *shape, dtype=dtype).mul_(3)


@each_pair
def test_row_lengths(pair, device, generator):
    verdict = Verdict()
    for form in forms(pair):
        for cols in COLS:
            if cols > 300_000 and form.x != FP32:  # a million columns once
                continue
            for rows in (1, 3) if cols <= 70_000 else (1,):
                x = logits(generator, rows, cols, dtype=form.x)
                measure(verdict, generator, form, x, f"{rows} x {cols}")
    verdict.check()


@each_pair
def test_many_rows(pair, device, generator):
    verdict = Verdict()
    for form in forms(pair):
        for cols in (1, 2, 33, 128, 129):
            x = logits(generator, 4096, cols, dtype=form.x)
            measure(verdict, generator, form, x, f"4096 x {cols}")
    verdict.check()


@each_pair
def test_every_dimension(pair, device, generator):
    """Of tensors of one to five dimensions, some of them ones."""
    verdict = Verdict()
    shapes = [(7,), (5, 9), (9, 1), (1, 9), (3, 4, 65), (2, 130, 5, 7), (3, 4, 5, 6), (2, 6, 1, 1)]
    shapes += [(2, 3, 1, 300), (2, 1000, 3, 5), (2, 3, 2, 3, 2)]
    for shape in shapes:
        x = logits(generator, *shape, dtype=pair[0])
        for dim in range(-len(shape), len(shape)):
            for log in (False, True):
                measure(verdict, generator, Form(*pair, log=log, dim=dim), x, f"{shape}")
    verdict.check()


def strided(generator, dtype):
    """(label, tensor) of inputs whose rows do not simply follow each other."""
    cols = 40
    packed = randn(generator, 6, 5, 3 * cols, dtype=dtype)
    heads = randn(generator, 3, 7, 4, cols, dtype=dtype)
    yield "slice of a packed tensor", packed[..., cols : 2 * cols]
    yield "odd offset and pitch", randn(generator, 6, 43, dtype=dtype)[:, 3:]
    yield "heads before sequence", heads.transpose(1, 2)
    yield "three row strides", heads.permute(2, 0, 1, 3)[:, :2]
    yield "every other row", randn(generator, 12, cols, dtype=dtype)[::2]
    yield "expanded rows", randn(generator, 1, cols, dtype=dtype).expand(8, cols)
    yield "strided columns", randn(generator, 10, 2 * cols, dtype=dtype)[:, ::2]
    yield "transposed matrix", randn(generator, cols, 10, dtype=dtype).t()
    yield "expanded columns", randn(generator, 10, 1, dtype=dtype).expand(10, cols)
    nchw = randn(generator, 2, 8, 5, 6, dtype=dtype)
    yield "channels last", nchw.to(memory_format=torch.channels_last)


@each_log
@each_pair
def test_strides(pair, log, device, generator):
    verdict = Verdict()
    for label, x in strided(generator, pair[0]):
        for dim in range(x.dim()):
            measure(verdict, generator, Form(*pair, log=log, dim=dim), x, label)
    for label, dy in strided(generator, pair[1]):
        x = logits(generator, *dy.shape, dtype=pair[0])
        for dim in range(dy.dim()):
            measure(verdict, generator, Form(*pair, log=log, dim=dim), x, f"dy: {label}", dy)
    verdict.check()


@each_log
@each_pair
def test_misaligned_memory(pair, log, device, generator):
    verdict = Verdict()
    for shape in [(9, 64), (5, 37), (2, 2048), (2, 40, 9)]:
        for offset in range(8):

            def shifted(dtype, shape=shape, offset=offset):
                count = math.prod(shape)
                return randn(generator, count + offset, dtype=dtype)[offset:].view(shape)

            x, dy = shifted(pair[0]), shifted(pair[1])
            for dim in (-1, -2):
                measure(
                    verdict, generator, Form(*pair, log=log, dim=dim), x, f"{shape} at {offset}", dy
                )
    verdict.check()


@each_log
@each_dtype
def test_0d(dtype, log, device):
    ours, theirs = FUNCTIONS[log]
    for value in (0.5, INF, -INF, NAN):
        x = torch.tensor(value, dtype=dtype, device=device, requires_grad=True)
        for dim in (0, -1):
            y = ours(x, dim)
            torch.testing.assert_close(y, theirs(x, dim), rtol=0, atol=0, equal_nan=True)
            (dx,) = torch.autograd.grad(y, x)
            assert dx.shape == () and (dx == 0 or not math.isfinite(value))


@each_log
@each_pair
def test_empty(pair, log, device):
    for shape in [(0,), (0, 3), (3, 0), (2, 0, 3), (0, 0), (2, 3, 0)]:
        for dim in range(len(shape)):
            results = []
            for call in FUNCTIONS[log]:
                x = torch.ones(shape, dtype=pair[0], device=device, requires_grad=True)
                y = call(x, dim, dtype=pair[1])
                y.sum().backward()
                results.append((y, x.grad))
            (y, dx), (expected, expected_dx) = results
            assert y.shape == expected.shape and y.dtype == expected.dtype
            assert dx.shape == expected_dx.shape and dx.dtype == expected_dx.dtype


@each_log
@each_dtype
def test_large_values(dtype, log, device, generator):
    """Logits that no exp can take, alone and among small ones."""
    verdict = Verdict()
    for size in (1e4, 1e8, 1e30):
        if size > torch.finfo(dtype).max:
            continue
        for cols in (5, 64, 1000, 5000, 40000):
            noise = randn(generator, 6, cols, dtype=FP64)
            for dim in (1, 0) if cols <= 5000 else (1,):
                form = Form(dtype, dtype, log=log, dim=dim)
                for label, x in {
                    "plus noise": noise + size,
                    "times noise": noise * size,
                    "negative": noise - size,
                }.items():
                    most = torch.finfo(dtype).max / 2  # so that differences are numbers, too
                    x = x.clamp(-most, most).to(dtype)
                    measure(verdict, generator, form, x, f"{label}, {size:g}, {cols} columns")
    verdict.check()


@each_log
@pytest.mark.parametrize("cols", [3, 64, 777, 5000, 40000])
def test_shift_invariance(cols, log, device, generator):
    """Numbers that stay exact when shifted give the same result: not a bit of difference, as
    x - max is the same."""
    for dtype in DTYPES:
        x = (torch.randint(-64, 64, (8, cols), generator=generator, device=device) / 8).to(dtype)
        shift = {FP64: 2.0**20, FP32: 2.0**12, FP16: 16.0, BF16: 1.0}[dtype]
        if dtype == BF16:
            x = (x / 2).round() * 2  # eight bits: even numbers up to 8, shifted by 2
            shift = 2.0
        for dim in (1, 0):
            ours = FUNCTIONS[log][0]
            for s in (shift, -shift):
                assert torch.equal((x + s).double(), x.double() + s), "the shift itself rounds"
                assert same_bits(ours(x, dim), ours(x + s, dim)), f"{dtype}, dim {dim}, by {s}"


def special_rows(generator, dtype, cols):
    """Rows with NaN and infinities here and there."""
    x = randn(generator, 12, cols, dtype=dtype)
    for row, values in enumerate([(NAN,), (INF,), (-INF,), (INF, -INF), (INF, INF), (NAN, INF)]):
        x[2 * row, 1 : 1 + len(values)] = torch.tensor(values, dtype=dtype, device=x.device)
    x[1] = -INF
    x[3, 2:] = -INF
    x[5, :-1] = -INF
    return x


def same_kinds_of_numbers(ours, theirs):
    return (
        torch.equal(ours.isnan(), theirs.isnan())
        and torch.equal(ours == INF, theirs == INF)
        and torch.equal(ours == -INF, theirs == -INF)
        and torch.equal(ours == 0, theirs == 0)
    )


@each_log
@each_pair
def test_infinities_and_nan_are_as_torchs(pair, log, device, generator):
    for cols in (3, 5, 33, 256, 1500, 5000, 40000):
        x = special_rows(generator, pair[0], cols)
        for dim, x in ((1, x), (0, x.t().contiguous())):  # noqa: B020
            form = Form(*pair, log=log, dim=dim)
            dy = randn(generator, *x.shape, dtype=pair[1])
            y, dx = forward_backward(form, x, dy)
            wide = Form(FP64, FP64, log=log, dim=dim)
            expected = forward_backward(wide, x.double().cpu(), dy.double().cpu(), call=apply_torch)
            where = f"{cols} columns, dim {dim}"
            # fp64's smaller numbers are zeros here.
            zeros = expected[0].abs() < 2.0**-24 if pair[1] == FP16 else expected[0].abs() < 1e-30
            zeros &= expected[0] != 0
            keep = ~zeros
            assert same_kinds_of_numbers(y.cpu()[keep], expected[0][keep]), where
            assert torch.equal(dx.cpu().isnan(), expected[1].isnan()), where


@each_log
@each_pair
def test_a_row_without_nan_is_untouched_by_its_neighbours(pair, log, device, generator):
    for cols in (3, 37, 256, 5000):
        for dim in (1, 0):
            shape = (12, cols) if dim == 1 else (cols, 12)
            form = Form(*pair, log=log, dim=dim)
            x, dy = randn(generator, *shape, dtype=pair[0]), randn(generator, *shape, dtype=pair[1])
            spoiled = x.clone()
            spoiled.movedim(dim, -1)[::2] = NAN
            clean, dirty = forward_backward(form, x, dy), forward_backward(form, spoiled, dy)
            for a, b in zip(clean, dirty, strict=True):
                a, b = a.movedim(dim, -1), b.movedim(dim, -1)
                assert same_bits(a[1::2], b[1::2]), f"{cols} columns, dim {dim}"
                assert b[::2].isnan().all()


@each_log
@each_dtype
def test_equal_numbers_give_equal_parts(dtype, log, device):
    for cols in (1, 2, 4, 64, 512, 4096, 2**17):
        x = torch.full((3, cols), 0.75, dtype=dtype, device=device)
        y = FUNCTIONS[log][0](x, -1).double()
        if log:
            torch.testing.assert_close(y.to(dtype), torch.full_like(y, -math.log(cols)).to(dtype))
        else:
            assert (y == 1 / cols).all(), f"{cols} columns"


# Masks and causality.

# (shape of the input, shapes that broadcast to it)
MASKED_SHAPES = [
    ((7, 33), [(7, 33), (33,), (1, 33), (7, 1), (1,), ()]),
    ((2, 3, 5, 40), [(2, 3, 5, 40), (2, 1, 1, 40), (2, 1, 5, 40), (1, 3, 1, 40), (5, 40)]),
    ((2, 3, 5, 40), [(2, 1, 5, 1), (3, 1, 40), (2, 3, 1, 1), (1, 1, 5, 40), (1, 3, 5, 40)]),
    ((2, 2, 3, 2, 3, 9), [(2, 1, 3, 1, 3, 9), (2, 1, 3, 1, 1, 9)]),
    ((3, 4, 1000), [(3, 1, 1000), (4, 1000), (4, 1)]),
    ((2, 3, 4099), [(2, 1, 4099), (1,)]),
]


def random_mask(generator, kind, shape):
    """Boolean: half of it True. A dtype: numbers, a third of them -inf."""
    draw = torch.rand(shape, generator=generator, device=generator.device)
    if kind == torch.bool:
        return draw < 0.5
    return randn(generator, *shape, dtype=kind).masked_fill(draw < 0.33, -INF)


@pytest.mark.parametrize("kind", [torch.bool, *DTYPES], ids=str)
@each_pair
def test_masks_that_broadcast(pair, kind, device, generator):
    verdict = Verdict()
    for shape, mask_shapes in MASKED_SHAPES:
        x = logits(generator, *shape, dtype=pair[0])
        for mask_shape in mask_shapes:
            mask = random_mask(generator, kind, mask_shape)
            for causal in (False, True):
                form = Form(*pair, masked=True, scale=0.3, causal=causal)
                # An fp64 mask of a smaller input is rounded to fp32 first.
                rounded = mask.float() if kind == FP64 and pair[0] != FP64 else mask
                dy = randn(generator, *shape, dtype=pair[1])
                label = f"{shape}, {kind} mask of {mask_shape}"
                verdict.add(f"{form}, {label}", check_call(form, x, dy, rounded))
                if rounded is not mask:
                    assert same_bits(apply(form, x, mask), apply(form, x, rounded))
    verdict.check()


@pytest.mark.parametrize("kind", [torch.bool, FP32], ids=str)
def test_mask_in_any_layout(kind, device, generator):
    x = logits(generator, 2, 4, 6, 40, dtype=FP32)
    form = Form(FP32, FP32, masked=True, scale=0.5)
    dy = torch.ones_like(x)
    masks = {
        "transposed": random_mask(generator, kind, (40, 6)).t(),
        "permuted": random_mask(generator, kind, (6, 2, 4, 40)).permute(1, 2, 0, 3),
        "sliced columns": random_mask(generator, kind, (6, 80))[:, ::2],
        "odd offset": random_mask(generator, kind, (6, 43))[:, 3:],
        "expanded": random_mask(generator, kind, (2, 1, 1, 40)).expand(2, 4, 6, 40),
        "expanded columns": random_mask(generator, kind, (2, 1, 6, 1)).expand(2, 4, 6, 40),
    }
    for label, mask in masks.items():
        expected = forward_backward(form, x, dy, mask.expand(x.shape).contiguous())
        for ours, theirs in zip(forward_backward(form, x, dy, mask), expected, strict=True):
            assert same_bits(ours, theirs), label


@each_pair
def test_causal(pair, device, generator):
    """Bottom-right aligned, where queries and keys differ in number too."""
    verdict = Verdict()
    for queries, keys in [
        (1, 1),
        (5, 5),
        (3, 70),
        (70, 3),
        (1, 9),
        (64, 64),
        (20, 1025),
        (2, 5000),
    ]:
        x = logits(generator, 2, 3, queries, keys, dtype=pair[0])
        for scale in (1.0, 0.125, -2.0):
            form = Form(*pair, masked=True, scale=scale, causal=True)
            measure(verdict, generator, form, x, f"{queries} queries, {keys} keys")
    verdict.check()


def test_causal_by_hand(device):
    """Two queries and three keys: the last query sees all of them."""
    x = torch.zeros(2, 3, device=device)
    expected = torch.tensor([[1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3]], device=device)
    torch.testing.assert_close(fn.scaled_masked_softmax(x, causal=True), expected)
    # Three queries and two keys: the first query sees none.
    expected = torch.tensor([[0, 0], [1, 0], [1 / 2, 1 / 2]], device=device)
    torch.testing.assert_close(fn.scaled_masked_softmax(x.view(3, 2), causal=True), expected)


@each_dtype
def test_agrees_with_the_composition_in_torch(dtype, device, generator):
    """masked_fill and softmax, as attention is written without this function."""
    x = logits(generator, 2, 3, 6, 40, dtype=dtype)
    mask = random_mask(generator, torch.bool, (2, 1, 6, 40))
    mask[..., 0] = False
    form = Form(dtype, dtype, masked=True, scale=0.25, causal=True)
    dy = randn(generator, *x.shape, dtype=dtype)
    for ours, theirs in zip(
        forward_backward(form, x, dy, mask),
        forward_backward(form, x, dy, mask, call=apply_torch),
        strict=True,
    ):
        # torch rounds x * scale (exact here, a power of two) and dx at each of its operators.
        tolerance = {FP16: 2.0**-9, BF16: 2.0**-6}.get(dtype, 1e-6)
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", [torch.bool, FP32], ids=str)
@each_pair
def test_fully_masked_rows_are_zero(pair, kind, device, generator):
    """Output and gradient, not NaN; every other row is what it is without them."""
    for cols in (1, 5, 64, 300, 2000, 9000, 70_000):
        x = logits(generator, 6, cols, dtype=pair[0])
        dy = randn(generator, 6, cols, dtype=pair[1])
        mask = random_mask(generator, kind, (6, cols))
        mask[:, 0] = 0
        form = Form(*pair, masked=True)
        y, dx = forward_backward(form, x, dy, mask)
        mask[1::2] = True if kind == torch.bool else -INF
        gone_y, gone_dx = forward_backward(form, x, dy, mask)
        assert (gone_y[1::2] == 0).all() and (gone_dx[1::2] == 0).all(), f"{cols} columns"
        assert same_bits(gone_y[::2], y[::2]) and same_bits(gone_dx[::2], dx[::2])


@each_dtype
def test_without_a_mask_it_is_softmax(dtype, device, generator):
    """NaN included, as no row is masked: nor is one that is only scaled."""
    for cols in (3, 37, 256, 5000, 40000, 300_000):
        x = special_rows(generator, dtype, cols)
        for scale in (1.0, 0.5):
            y = fn.scaled_masked_softmax(x, scale=scale)
            assert torch.equal(y.isnan(), fn.softmax(x * scale, -1).isnan()), f"{cols}, {scale}"
        x = logits(generator, 5, cols, dtype=dtype)
        torch.testing.assert_close(fn.scaled_masked_softmax(x), fn.softmax(x, -1))


@each_dtype
def test_what_is_masked_is_not_looked_at(dtype, device, generator):
    """NaN and infinity under a boolean mask or beyond the diagonal change nothing."""
    for cols in (5, 64, 300, 5000):
        x = logits(generator, 4, cols, dtype=dtype)
        mask = random_mask(generator, torch.bool, (4, cols))
        mask[:, 0] = False
        expected = fn.scaled_masked_softmax(x, mask)
        for value in (NAN, INF, -INF):
            assert same_bits(fn.scaled_masked_softmax(x.masked_fill(mask, value), mask), expected)
        later = torch.ones_like(mask).triu(cols - 4 + 1)
        expected = fn.scaled_masked_softmax(x, causal=True)
        for value in (NAN, INF):
            spoiled = x.masked_fill(later, value)
            assert same_bits(fn.scaled_masked_softmax(spoiled, causal=True), expected)


def test_nan_that_is_not_masked_shows(device, generator):
    """Also in a row whose other elements are all masked."""
    for cols in (5, 64, 300, 5000):
        x = logits(generator, 3, cols, dtype=FP32)
        x[1, 2] = NAN
        mask = torch.zeros(3, cols, dtype=torch.bool, device=device)
        mask[1] = True
        mask[1, 2] = False
        y = fn.scaled_masked_softmax(x, mask)
        assert y[1, 2].isnan() and y[[0, 2]].isfinite().all()


@each_pair
def test_scale(pair, device, generator):
    verdict = Verdict()
    for cols in (7, 64, 1000, 4097):
        x = randn(generator, 5, cols, dtype=pair[0])
        for scale in (1 / math.sqrt(80), 0.0, -1.5, 40.0):
            measure(verdict, generator, Form(*pair, masked=True, scale=scale), x, f"5 x {cols}")
    verdict.check()


def test_scale_is_applied_in_fp32(device, generator):
    """Not rounded to 16 bit: as the fp32 product gives, to a few of fp32's roundings."""
    x = logits(generator, 8, 512, dtype=BF16)
    scale = 1 / math.sqrt(80)
    y = torch.ops.fused_norm.softmax_forward(x, -1, False, FP32, None, scale)
    torch.testing.assert_close(y, F.softmax(x.float() * scale, -1), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("mask_dtype", [torch.bool, FP16], ids=str)
def test_the_mask_is_not_expanded(mask_dtype, device):
    """A mask of 32 Ki elements for an input of 32 Mi: no memory of the input's size but the
    output's."""
    x = torch.zeros(32, 32, 1, 32768, dtype=FP16, device=device)
    mask = torch.zeros(32, 1, 1, 32768, device=device).to(mask_dtype)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = fn.scaled_masked_softmax(x, mask)
        assert torch.cuda.max_memory_allocated() - before < y.nbytes + 2**20
        return
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profiler:
        y = fn.scaled_masked_softmax(x, mask)
    allocated = sum(e.self_cpu_memory_usage for e in profiler.events() if e.cpu_memory_usage > 0)
    assert y.nbytes <= allocated < y.nbytes + 2**20


@pytest.mark.parametrize("function", ["softmax", "log_softmax", "scaled_masked_softmax"])
def test_only_the_output_is_saved(function, device, generator):
    """Nothing else of the input's size: neither it nor a mask."""
    x = randn(generator, 64, 96, dtype=BF16).requires_grad_()
    mask = random_mask(generator, torch.bool, (64, 96))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = getattr(fn, function)(x, mask if "mask" in function else -1)
    assert [t.data_ptr() for t in saved] == [y.data_ptr()]
    y.sum().backward()


@pytest.mark.parametrize("dtype", [FP64, FP32, BF16], ids=str)
def test_arguments_are_left_as_they_were(dtype, device, generator):
    x, dy, mask = (randn(generator, 6, 40, dtype=dtype) for _ in range(3))
    before = [bits(t).clone() for t in (x, dy, mask)]
    for log in (False, True):
        for dim in (0, 1):
            forward_backward(Form(dtype, dtype, log=log, dim=dim), x, dy)
    forward_backward(Form(dtype, dtype, masked=True, scale=0.5, causal=True), x, dy, mask)
    for name, tensor, old in zip(("x", "dy", "mask"), (x, dy, mask), before, strict=True):
        assert torch.equal(bits(tensor), old), f"{name} was changed"


@each_log
@each_dtype
def test_output_is_contiguous_and_new(dtype, log, device, generator):
    x = randn(generator, 6, 5, 4, dtype=dtype).transpose(0, 1)
    for dim in range(3):
        y = FUNCTIONS[log][0](x, dim)
        assert y.is_contiguous() and y.data_ptr() != x.data_ptr()


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
@each_log
def test_memory_of_a_long_column(log):
    """On the CPU: that of the tensors and of a copy of them in fp32, however few columns."""
    x = torch.randn(2**16, 2, requires_grad=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the profiler sees this one's
    try:
        with torch.profiler.profile(profile_memory=True) as profiled:
            y = FUNCTIONS[log][0](x, 0)
            y.backward(y.detach())
    finally:
        torch.set_num_threads(threads)
    largest = max(event.cpu_memory_usage for event in profiled.events())
    assert x.nbytes <= largest <= 4 * x.nbytes
