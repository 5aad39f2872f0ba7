"""The softmax kernels over their whole range of sizes, in every tier: held to fp64 references,
equal bits where they are promised, streams and graphs. Limits: softmax_harness.py."""

import math

import pytest
import torch
from harness import CHUNK, Verdict, place, randn, returns_at_once, same_bits, waits_are_errors
from softmax_harness import (
    BF16,
    COLS,
    FP16,
    FP32,
    FP64,
    PAIRS,
    Form,
    apply,
    check_call,
    forced_tier,
    forms,
    forward_backward,
)

import fused_norm.functional as fn

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("give_memory_back")]

ROWS = [1, 3, 4096]
TIERS = ["auto", "warp", "block", "uncached"]
FULL_PRODUCT = 2**26  # elements up to which every form runs in every tier
each_pair = pytest.mark.parametrize("pair", PAIRS, ids=str)
each_log = pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])
each_tier = pytest.mark.parametrize("tier", TIERS)


def filled(generator, *shape, dtype):
    """Scores of a few units, drawn by chunks: the fp32 numbers they come from would be twice as
    large as the tensor."""
    out = torch.empty(shape, dtype=dtype, device="cuda")
    for part in out.view(-1).split(CHUNK):
        part.copy_(randn(generator, part.numel(), dtype=FP64 if dtype == FP64 else FP32).mul_(3))
    return out


def holds(tier, backward, cols, pair):
    """Asks the library, on one row."""
    x = torch.zeros(1, cols, dtype=pair[0], device="cuda")
    try:
        with forced_tier(tier):
            if backward:
                y = x.to(pair[1])
                torch.ops.fused_norm.softmax_backward(y, y, -1, False, pair[0])
            else:
                torch.ops.fused_norm.softmax_forward(x, -1, False, pair[1])
    except RuntimeError as error:
        assert f"tier is '{tier}', which does not hold rows of {cols}" in str(error)
        return False
    return True


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@each_pair
def test_which_rows_a_tier_holds(pair, backward):
    """From one column up to a limit: none of uncached's, at least 128 of a warp's lanes' own 16
    bytes, more of a block's. fp64 has the uncached tier alone."""
    limit = {tier: [cols for cols in COLS if holds(tier, backward, cols, pair)] for tier in TIERS}
    assert limit["auto"] == limit["uncached"] == COLS
    if pair[0] == FP64:
        assert not limit["warp"] and not limit["block"]
        return
    for tier in ("warp", "block"):
        assert limit[tier] == COLS[: len(limit[tier])]
    assert limit["warp"][-1] >= 128 * 16 // max(d.itemsize for d in pair)
    assert limit["block"][-1] >= 8192
    assert limit["block"][-1] > limit["warp"][-1]


@pytest.mark.parametrize("cols", COLS)
@each_pair
def test_every_form_at_every_size(pair, cols, generator):
    """softmax and log_softmax x rows x tiers."""
    verdict = Verdict()
    tiers = [
        tier
        for tier in TIERS
        if any(holds(tier, backward, cols, pair) for backward in (False, True))
    ]
    for rows in ROWS:
        if rows * cols > FULL_PRODUCT:
            continue
        x = randn(generator, rows, cols, dtype=pair[0]).mul_(3)
        dy = randn(generator, rows, cols, dtype=pair[1])
        for tier in tiers:
            for log in (False, True):
                form = Form(*pair, log=log, tier=tier)
                verdict.add(f"{form}, {rows} x {cols}", check_call(form, x, dy))
    verdict.check()


@pytest.mark.parametrize("cols", [c for c in COLS if c * ROWS[-1] > FULL_PRODUCT])
@each_pair
def test_larger_sizes(pair, cols, most_of_the_memory, generator):
    """Beyond the full product, with 4096 rows; a million columns have 2^32 elements then. In fp64
    and with outputs wider than their inputs the tensors of that would not fit a GPU: fewer rows."""
    rows = ROWS[-1] if pair[0] == pair[1] and pair[0] != FP64 else min(ROWS[-1], 2**31 // cols)
    x = filled(generator, rows, cols, dtype=pair[0])
    dy = filled(generator, rows, cols, dtype=pair[1])
    verdict = Verdict()
    for log in (False, True) if rows * cols < 2**30 else (bool(cols % 2),):
        form = Form(*pair, log=log)
        small = rows * cols < 2**29  # torch's own operator needs as much memory again
        verdict.add(f"{form}, {rows} x {cols}", check_call(form, x, dy, with_torch=small))
    verdict.check()


TALL = [(131072, 128), (100000, 192), (70001, 100), (300007, 33), (1000003, 8), (5000011, 1)]
TALL += [(250001, 65), (130001, 129), (70001, 257), (40001, 513), (20001, 1025)]


@each_pair
def test_many_short_rows(pair, generator):
    """Also more than the 65535 of a grid's second dimension."""
    verdict = Verdict()
    for rows, cols in TALL:
        x = randn(generator, rows, cols, dtype=pair[0]).mul_(3)
        dy = randn(generator, rows, cols, dtype=pair[1])
        for form in forms(pair):
            verdict.add(f"{form}, {rows} x {cols}", check_call(form, x, dy))
    verdict.check()


def boundaries():
    """Row lengths around every change of lanes, packs, threads, blocks and tier: powers of two and
    three halves of them, a pack of eight, four or two to each side of them, and neighbours."""
    middles = [2**k for k in range(2, 18)] + [3 * 2**k for k in range(1, 16)]
    steps = [-8, -4, -2, -1, 0, 1, 2, 4, 8]
    return sorted({m + s for m in middles for s in steps if m + s > 0} | {300001, 2**20, 2**20 + 1})


@each_log
@each_pair
def test_row_lengths_around_every_boundary(pair, log, generator):
    verdict = Verdict()
    for cols in boundaries():
        x = randn(generator, 5, cols, dtype=pair[0]).mul_(3)
        dy = randn(generator, 5, cols, dtype=pair[1])
        form = Form(*pair, log=log)
        verdict.add(f"{form}, 5 x {cols}", check_call(form, x, dy, with_torch=False))
    verdict.check()


# Columns: the sums go over a dimension that is not the last.

COLUMNS = [1, 2, 3, 7, 8, 21, 31, 32, 33, 64, 127, 255, 256, 257, 1000, 1025, 4097, 32001]
COLUMNS += [150000, 1000003]
INNER = [2, 3, 7, 8, 16, 31, 32, 64, 65, 127, 128, 256, 1000, 4096, 16385]


@pytest.mark.parametrize("cols", COLUMNS)
@each_pair
def test_columns(pair, cols, generator):
    verdict = Verdict()
    for inner in INNER:
        for outer in (1, 3, 130):
            if outer * cols * inner > 2**23:
                continue
            x = randn(generator, outer, cols, inner, dtype=pair[0]).mul_(3)
            dy = randn(generator, outer, cols, inner, dtype=pair[1])
            for log in (False, True):
                form = Form(*pair, log=log, dim=1)
                verdict.add(f"{form}, {tuple(x.shape)}", check_call(form, x, dy))
    verdict.check()


SHAPES_4D = [
    (2, 3, 5, 7),
    (4, 128, 33, 65),
    (2, 1000, 17, 16),
    (8, 21, 128, 128),
    (3, 4097, 5, 6),
    (1, 50257, 2, 3),
    (70000, 3, 2, 2),
    (2, 70000, 1, 2),
]


@pytest.mark.parametrize("shape", SHAPES_4D, ids=str)
@each_pair
def test_every_dimension_of_4d_inputs(pair, shape, generator):
    """Contiguous and with its memory in another order."""
    verdict = Verdict()
    x = randn(generator, *shape, dtype=pair[0]).mul_(3)
    dy = randn(generator, *shape, dtype=pair[1])
    inputs = {"": (x, dy)}
    inputs[", channels last"] = [t.to(memory_format=torch.channels_last) for t in (x, dy)]
    for label, (x, dy) in inputs.items():
        for dim in range(4):
            for log in (False, True):
                form = Form(*pair, log=log, dim=dim)
                verdict.add(f"{form}, {shape}{label}", check_call(form, x, dy))
    verdict.check()


# Masks, over the tiers.


@each_tier
@pytest.mark.parametrize("kind", ["causal", "boolean", "additive"])
@each_pair
def test_masked_rows(pair, kind, tier, generator):
    """Attention scores of batch x heads x queries x keys; every fourth batch sees nothing."""
    verdict = Verdict()
    for keys in (1, 5, 33, 64, 127, 512, 1000, 1024, 2049, 4096, 8193, 20000, 100352, 262145):
        for queries in (1, 7, 64) if keys <= 20000 else (3,):
            x = randn(generator, 4, 3, queries, keys, dtype=pair[0]).mul_(3)
            dy = randn(generator, 4, 3, queries, keys, dtype=pair[1])
            mask = None
            if kind != "causal":
                draw = torch.rand(4, 1, queries, keys, generator=generator, device="cuda")
                mask = draw < 0.4
                mask[3] = True
            if kind == "additive":
                mask = randn(generator, 4, 1, queries, keys, dtype=pair[0]).masked_fill(
                    mask, -math.inf
                )
            form = Form(*pair, tier=tier, masked=True, scale=0.125, causal=kind == "causal")
            label = f"{form}, {kind}, {queries} queries, {keys} keys"
            verdict.add(label, check_call(form, x, dy, mask))
    verdict.check()


# More than 2^31 elements.


@each_log
@pytest.mark.parametrize(
    ("rows", "cols"), [(2**31 // 4096 + 5, 4096), (2**31 // 513 + 3, 513), (2**31 + 7, 1)]
)
def test_more_than_2_to_the_31_elements(rows, cols, log, most_of_the_memory, generator):
    x = filled(generator, rows, cols, dtype=BF16)
    dy = filled(generator, rows, cols, dtype=BF16)
    form = Form(BF16, BF16, log=log)
    verdict = Verdict()
    verdict.add(f"{form}, {rows} x {cols}", check_call(form, x, dy, with_torch=False))
    verdict.check()


@pytest.mark.parametrize(
    "shape", [(3, 1000, 2**31 // 3000 + 17), (2**31 // 2100 + 5, 300, 7), (1, 2, 2**30 + 9)]
)
def test_more_than_2_to_the_31_elements_in_columns(shape, most_of_the_memory, generator):
    """Checked in slices: the harness would copy the whole transposed."""
    x = filled(generator, *shape, dtype=BF16)
    dy = filled(generator, *shape, dtype=BF16)
    y, dx = forward_backward(Form(BF16, BF16, dim=1), x, dy)
    for dim in (0, 2):
        for start in {0, shape[dim] // 2, max(shape[dim] - 64, 0)}:
            part = [t.narrow(dim, start, min(64, shape[dim] - start)) for t in (x, dy, y, dx)]
            if dim == 0:
                part = [t[..., -(2**16) :] for t in part]
            else:
                part = [t[-300:] for t in part]
            small_x, small_dy, small_y, small_dx = (t.contiguous() for t in part)
            expected = forward_backward(Form(BF16, BF16, dim=1), small_x, small_dy)
            assert same_bits(small_y, expected[0]) and same_bits(small_dx, expected[1])


def test_more_than_2_to_the_31_masked_elements(most_of_the_memory, generator):
    shape = (2**31 // (16 * 64 * 2048) + 3, 16, 64, 2048)
    x, dy = filled(generator, *shape, dtype=BF16), filled(generator, *shape, dtype=BF16)
    mask = torch.rand(shape[0], 1, 1, 2048, generator=generator, device="cuda") < 0.5
    form = Form(BF16, BF16, masked=True, scale=0.125, causal=True)
    verdict = Verdict()
    verdict.add(str(form), check_call(form, x, dy, mask))
    verdict.check()


@each_log
def test_rows_that_lie_2_to_the_31_elements_apart(log, most_of_the_memory, generator):
    """Few rows, far offsets: a slice of a packed tensor, and a transposed batch of it."""
    cols = 1024
    packed = torch.zeros(2**31 // (64 * cols) + 9, 64 * cols, dtype=BF16, device="cuda")
    verdict = Verdict()
    for label, x in {
        "slice": packed[:, 63 * cols :],
        "transposed": packed.view(len(packed), 64, cols).transpose(0, 1)[60:],
        "last rows": packed.view(-1, cols)[-65:],
    }.items():
        x.copy_(randn(generator, *x.shape).mul_(3))
        dy = randn(generator, *x.shape, dtype=BF16)
        form = Form(BF16, BF16, log=log)
        verdict.add(f"{form}, {label}", check_call(form, x, dy))
    verdict.check()


# Equal bits.

BIT_COLS = [1, 3, 31, 64, 96, 255, 256, 257, 768, 1000, 1023, 1025, 4095, 4096, 8192, 8193, 12288]
BIT_COLS += [32768, 50257, 131072, 262147]
ROW_INDICES = [0, 1, 2, 3, 5, 7, 8, 15, 31, 64, 127, 131, 264, 511, 767, 1023]


def bit_forms(pair, tier):
    yield Form(*pair, tier=tier)
    yield Form(*pair, tier=tier, log=True)
    yield Form(*pair, tier=tier, masked=True, scale=0.3)


def random_mask(generator, rows, cols):
    return torch.rand(rows, cols, generator=generator, device="cuda") < 0.3


@each_tier
@each_pair
def test_twenty_repeats(pair, tier, generator):
    """Also while another stream keeps the GPU busy, so that blocks run in another order."""
    noise = torch.randn(2048, 2048, device="cuda")
    side = torch.cuda.Stream()
    shapes = [(5, 7), (4097, 1000), (1000, 4096), (300, 12289), (400, 33000), (33, 50257)]
    shapes += [(3, 1000003)]
    for rows, cols in shapes:
        x = randn(generator, rows, cols, dtype=pair[0]).mul_(3)
        dy = randn(generator, rows, cols, dtype=pair[1])
        mask = random_mask(generator, rows, cols)
        calls = list(bit_forms(pair, tier))
        if tier == "auto":
            calls += [Form(*pair, dim=0), Form(*pair, dim=0, log=True)]
        for form in calls:
            given = (x, dy, mask if form.masked else None)
            first = forward_backward(form, *given)
            for repeat in range(20):
                with torch.cuda.stream(side):
                    for _ in range(repeat % 3):
                        noise @ noise
                for a, b in zip(forward_backward(form, *given), first, strict=True):
                    assert same_bits(a, b), f"{form}, {rows} x {cols}, repeat {repeat}"


@each_tier
@each_pair
def test_a_row_among_others(pair, tier, generator):
    """y and dx of a row are the same alone, among 2 to 4097 rows, and at sixteen row indices."""
    for cols in BIT_COLS:
        x = randn(generator, 1, cols, dtype=pair[0]).mul_(3)
        dy = randn(generator, 1, cols, dtype=pair[1])
        mask = random_mask(generator, 1, cols)
        for form in bit_forms(pair, tier):
            alone = forward_backward(form, x, dy, mask if form.masked else None)
            for rows in (2, 33, 4097 if cols <= 4096 else 264):
                indices = [index for index in ROW_INDICES if index < rows] + [rows - 1]
                many = randn(generator, rows, cols, dtype=pair[0])
                many_dy = randn(generator, rows, cols, dtype=pair[1])
                many[indices], many_dy[indices] = x, dy
                results = forward_backward(form, many, many_dy, mask if form.masked else None)
                for result, expected in zip(results, alone, strict=True):
                    same = same_bits(result[indices], expected.expand(len(indices), cols))
                    assert same, f"{form}, {cols} columns, among {rows}"


@each_tier
@each_pair
def test_a_row_at_any_alignment(pair, tier, generator):
    """y and dx are the same at eight base offsets of x, dy and the mask, together and each alone,
    and at any row pitch."""
    for cols in BIT_COLS:
        x = randn(generator, 5, cols, dtype=pair[0]).mul_(3)
        dy = randn(generator, 5, cols, dtype=pair[1])
        mask = random_mask(generator, 5, cols)
        for form in bit_forms(pair, tier):
            given = mask if form.masked else None
            expected = forward_backward(form, x, dy, given)
            for offset in range(8):
                pitch = torch.empty(5, cols + offset, dtype=pair[0], device="cuda")[:, offset:]
                moved = place(x, offset), place(dy, offset)
                moved_mask = place(mask, offset) if form.masked else None
                for label, arguments in {
                    "all": (*moved, moved_mask),
                    "x": (moved[0], dy, given),
                    "dy": (x, moved[1], given),
                    "mask": (x, dy, moved_mask),
                    "row pitch": (pitch.copy_(x), dy, given),
                }.items():
                    results = forward_backward(form, *arguments)
                    for result, wanted in zip(results, expected, strict=True):
                        assert same_bits(result, wanted), f"{form}, {cols}, {label} at {offset}"


@each_log
@each_pair
def test_a_column_among_others(pair, log, generator):
    """Over columns: a column's bits do not depend on how many there are, on its index or on its
    alignment."""
    for cols in (1, 3, 21, 64, 255, 1000, 4097, 30000):
        x = randn(generator, 2, cols, 40, dtype=pair[0]).mul_(3)
        dy = randn(generator, 2, cols, 40, dtype=pair[1])
        form = Form(*pair, log=log, dim=1)
        expected = forward_backward(form, x, dy)
        for first, last in [(0, 39), (1, 40), (3, 35), (0, 32), (8, 24), (5, 7)]:
            part = x[..., first:last], dy[..., first:last]
            for result, wanted in zip(forward_backward(form, *part), expected, strict=True):
                wanted = wanted[..., first:last].contiguous()
                assert same_bits(result, wanted), f"{form}, {cols}, columns {first} to {last}"
        for offset in range(1, 8):
            moved = place(x, offset), place(dy, offset)
            for result, wanted in zip(forward_backward(form, *moved), expected, strict=True):
                assert same_bits(result, wanted), f"{form}, {cols}, at {offset}"
        for result, wanted in zip(forward_backward(form, x[1:], dy[1:]), expected, strict=True):
            assert same_bits(result, wanted[1:]), f"{form}, {cols}, one batch"


@each_log
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_short_rows_by_the_ten_thousand(dtype, log, generator):
    """Rows that pass through shared memory in tiles, so many that each block fills its slots again
    and again: y and dx are those of a few of them, and the same where the rows start anywhere, or
    lie apart."""
    form = Form(dtype, dtype, log=log)
    for cols in (65, 95, 129, 257, 270, 513, 543, 1025, 1032, 1056):
        rows = 2**24 // cols + 5
        x = randn(generator, rows, cols, dtype=dtype).mul_(3)
        dy = randn(generator, rows, cols, dtype=dtype)
        x[1], x[2, 1:], x[3, -1], x[4, 0] = -math.inf, -math.inf, math.inf, math.nan
        whole = forward_backward(form, x, dy)
        for name, chosen in (("few", slice(7)), ("last", slice(-3, None))):
            part = forward_backward(form, x[chosen], dy[chosen])
            for of_part, of_whole in zip(part, whole, strict=True):
                assert same_bits(of_part, of_whole[chosen]), f"{form}, {cols} columns, {name}"
        apart = torch.empty(rows, cols + 3, dtype=dtype, device="cuda")[:, 2:-1]
        for name, moved in (
            ("misaligned", (place(x, 1), place(dy, 1))),
            ("apart", (apart.copy_(x), dy)),
        ):
            for other, of_whole in zip(forward_backward(form, *moved), whole, strict=True):
                assert same_bits(other, of_whole), f"{form}, {cols} columns, {name}"


@each_pair
def test_inference_gives_the_same_bits_as_training(pair, generator):
    for rows, cols in [(7, 96), (512, 4096), (3, 50257)]:
        x = randn(generator, rows, cols, dtype=pair[0]).mul_(3)
        for form in forms(pair):
            with torch.no_grad():
                quiet = apply(form, x)
            assert same_bits(quiet, apply(form, x.clone().requires_grad_()).detach())


# Streams, graphs, devices.

STREAM_SHAPES = [(7, 96), (600, 1000), (300, 4096), (40, 50257), (9, 300000)]
STREAM_FORMS = [
    Form(BF16, BF16),
    Form(BF16, FP32, log=True),
    Form(FP32, FP32, dim=0),
    Form(FP16, FP16, masked=True, scale=0.5, causal=True),
]
each_stream_form = pytest.mark.parametrize("form", STREAM_FORMS, ids=str)


def stream_inputs(generator, form, rows, cols):
    return (
        randn(generator, rows, cols, dtype=form.x).mul_(3),
        randn(generator, rows, cols, dtype=form.y),
        random_mask(generator, rows, cols) if form.masked else None,
    )


def assert_same_bits(results, expected, label=""):
    for name, result, wanted in zip(("y", "dx"), results, expected, strict=True):
        assert same_bits(result, wanted), f"{label} {name}"


@each_stream_form
def test_side_stream(form, generator):
    """Work queued on the current stream comes first: x is written there after a long wait, and
    read there."""
    for rows, cols in STREAM_SHAPES:
        x, dy, mask = stream_inputs(generator, form, rows, cols)
        expected = forward_backward(form, x, dy, mask)
        late_x, late_dy = torch.zeros_like(x), torch.zeros_like(dy)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)  # cycles: 25 ms or more
            late_x.copy_(x)
            late_dy.copy_(dy)
            results = forward_backward(form, late_x, late_dy, mask)
        stream.synchronize()
        assert_same_bits(results, expected, f"{rows} x {cols}")


@each_stream_form
def test_two_calls_on_two_streams(form, generator):
    inputs = [stream_inputs(generator, form, 2000, 4096) for _ in range(2)]
    expected = [forward_backward(form, *given) for given in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    for _ in range(10):
        results = []
        for stream, given in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                results.append(forward_backward(form, *given))
        torch.cuda.synchronize()
        for result, wanted in zip(results, expected, strict=True):
            assert_same_bits(result, wanted)


@each_stream_form
def test_captured_training_step(form, generator):
    """A graph of forward and backward, replayed with new data in the same memory."""
    for rows, cols in STREAM_SHAPES:
        x, dy, mask = stream_inputs(generator, form, rows, cols)
        x.requires_grad_()

        def step(x=x, dy=dy, mask=mask):
            y = apply(form, x, mask)
            return y.detach(), torch.autograd.grad(y, x, dy)[0]

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for _ in range(3):
            new_x, new_dy, _ = stream_inputs(generator, form, rows, cols)
            with torch.no_grad():
                x.copy_(new_x)
                dy.copy_(new_dy)
            graph.replay()
            assert_same_bits(captured, step(), f"{rows} x {cols}")


@each_stream_form
def test_no_wait_for_the_gpu(form, generator):
    """A step queues its work and returns: nothing stops the host."""
    x, dy, mask = stream_inputs(generator, form, 600, 1000)
    forward_backward(form, x, dy, mask)
    with waits_are_errors():
        assert returns_at_once(lambda: forward_backward(form, x, dy, mask))


@pytest.mark.multi_gpu
@each_stream_form
def test_tensors_of_a_device_that_is_not_current(form, generator):
    for rows, cols in STREAM_SHAPES:
        given = stream_inputs(generator, form, rows, cols)
        expected = forward_backward(form, *given)
        there = [None if t is None else t.to("cuda:1") for t in given]
        torch.cuda.synchronize("cuda:1")
        assert torch.cuda.current_device() == 0
        results = forward_backward(form, *there)
        assert torch.cuda.current_device() == 0
        assert all(result.device == there[0].device for result in results)
        assert_same_bits([result.to("cuda:0") for result in results], expected)


def test_mask_of_another_dtype_is_converted_as_it_is_not_as_it_is_read(generator):
    """An fp64 mask is rounded to fp32, its own elements only: no memory of the input's size."""
    x = torch.zeros(64, 64, 1, 8192, dtype=FP32, device="cuda")
    mask = randn(generator, 64, 1, 1, 8192, dtype=FP64)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = fn.scaled_masked_softmax(x, mask)
    assert torch.cuda.max_memory_allocated() - before < y.nbytes + 2 * mask.nbytes
    torch.testing.assert_close(y, torch.softmax(mask.float(), -1).expand_as(y))
