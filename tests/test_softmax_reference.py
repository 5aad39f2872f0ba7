"""The limits that the softmax tests lean on are sharp enough to catch an error."""

import pytest
import torch
from harness import randn
from reference import UNIT
from softmax_harness import BF16, FP16, FP32, FP64, PAIRS, Form, SoftmaxCheck, check_call
from softmax_harness import forward_backward as run

each_pair = pytest.mark.parametrize("pair", PAIRS, ids=str)
each_log = pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])


def measured(form, spoil, generator, cols=500):
    """Names of the measures beyond their limit once `spoil` has changed a right (y, dx)."""
    x = randn(generator, 60, cols, dtype=form.x).mul_(3)
    dy = randn(generator, 60, cols, dtype=form.y)
    y, dx = run(form, x, dy)
    spoil(y, dx)
    check = SoftmaxCheck(form)
    check.rows(x, y, dy, dx, hidden=torch.zeros_like(x, dtype=torch.bool))
    return {name for name, ratio in check.ratios().items() if ratio > 1}


def nudge(tensor, units, at):
    tensor.view(-1)[at] *= 1 + units * UNIT[tensor.dtype]


def units(dtype, of_sum=False):
    """A change that no one could call a rounding: the limits of fp32 and fp64 are some tens of u,
    for a gradient with the sum of 500 numbers in it of their magnitudes' sum."""
    return (4000 if of_sum else 200) if dtype in (FP32, FP64) else 8


@each_log
@each_pair
def test_errors_are_noticed(pair, log, generator):
    form = Form(*pair, log=log)
    assert not measured(form, lambda y, dx: None, generator)
    # The largest element, and one of middling size: an absolute limit would not see it.
    for rank in (0, 60 * 250):

        def spoil_y(y, dx, rank=rank):
            nudge(y, units(pair[1]), y.abs().flatten().argsort(descending=True)[rank])

        assert "y" in measured(form, spoil_y, generator), f"rank {rank}"

    def spoil_dx(y, dx):
        nudge(dx, units(pair[0], of_sum=log), dx.abs().argmax())

    assert "dx" in measured(form, spoil_dx, generator)


@each_pair
def test_a_wrong_sum_is_noticed(pair, generator):
    """Every element of a row off by the same small factor."""

    def spoil(y, dx):
        y[7] *= 1 + max(3e-6 if pair[0] != FP64 else 3e-14, 2 * UNIT[pair[1]])

    found = measured(Form(*pair), spoil, generator)
    assert "y" in found
    assert ("row sum" in found) == (pair[1] in (FP32, FP64))


@each_log
@each_pair
def test_an_unwritten_row_is_noticed(pair, log, generator):
    def spoil(y, dx):
        y[-1], dx[-1] = float("nan"), float("nan")

    assert {"y", "dx"} <= measured(Form(*pair, log=log), spoil, generator)


def test_a_mask_that_is_ignored_is_noticed(generator, monkeypatch):
    x = randn(generator, 4, 30)
    mask = torch.zeros(4, 30, dtype=torch.bool)
    mask[2, 5] = True
    form = Form(FP32, FP32, masked=True)
    assert all(ratio <= 1 for ratio in check_call(form, x, x, mask).values())
    without = run(form, x, x)
    monkeypatch.setattr("softmax_harness.forward_backward", lambda *_, **__: without)
    ratios = check_call(form, x, x, mask)
    assert ratios["y"] > 1 and ratios["masked y"] > 1 and ratios["masked dx"] > 1
    assert ratios["row sum"] <= 1


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_scale_in_16_bit_is_noticed(dtype, generator):
    """A product rounded to 16 bit errs far more than fp32's."""
    form = Form(dtype, FP32, masked=True, scale=0.3)
    x = randn(generator, 20, 300, dtype=dtype).mul_(3)
    dy = torch.ones(20, 300)
    y, dx = run(form, (x * 0.3), dy, call=lambda form, x, mask: torch.softmax(x.float(), -1))
    check = SoftmaxCheck(form)
    check.rows(x, y, hidden=torch.zeros_like(x, dtype=torch.bool))
    assert check.ratios()["y"] > 1
