"""The references and limits that the numerics tests lean on: right themselves, and sharp enough
to catch an error."""

import pytest
import torch
import torch.nn.functional as F
from harness import Form, apply, check_call, forward_backward, randn, random_parameters
from reference import UNIT, NormCheck, dx_reference, row_stats

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_reference_agrees_with_torch(kind, generator):
    x, dy = (randn(generator, 9, 33, dtype=FP64) for _ in range(2))
    weight = randn(generator, 33, dtype=FP64)
    leaf = x.clone().requires_grad_()
    y = (F.layer_norm if kind == "layer" else F.rms_norm)(leaf, [33], weight, eps=1e-5)
    stats = row_stats(x, 1e-5, kind == "rms")
    torch.testing.assert_close(stats.xhat * weight, y.detach())
    dx = dx_reference(dy, weight, stats.xhat, stats.rstd, kind == "rms")[0]
    torch.testing.assert_close(dx, torch.autograd.grad(y, leaf, dy)[0])


def measured(form, spoil, generator):
    """Names of the measures beyond their limit once `spoil` has changed a right {y, x, weight,
    bias}."""
    weight, bias = random_parameters(generator, form, [96])
    x, dy = randn(generator, 200, 96, dtype=form.x), randn(generator, 200, 96, dtype=form.y)
    y, grads = forward_backward(apply, form, x, [96], weight, bias, dy)
    results = {"y": y, **grads}
    spoil(results)
    check = NormCheck(
        rows=200,
        rms=form.kind == "rms",
        eps=form.eps,
        x_dtype=form.x,
        y_dtype=form.y,
        weight=weight,
        bias=bias,
    )
    check.rows(x, results["y"], dy, results["x"])
    check.parameters(results["weight"], results.get("bias"))
    return {name for name, ratio in check.ratios().items() if ratio > 1}


def spoilers(dtype):
    """{measure: change it must notice}."""
    few = 64 if dtype in (FP32, FP64) else 8  # units in the last place

    def nudge(name):
        def change(results):
            largest = results[name].abs().argmax()
            results[name].view(-1)[largest] *= 1 + few * UNIT[dtype]

        return change

    def truncate(name):
        def change(results):  # loses low bits
            scale = results[name].abs().clamp_min(1e-30).log2().floor().exp2() * UNIT[dtype] * few
            results[name].copy_((results[name].double() / scale).trunc() * scale)

        return change

    def lose_last_row(results):
        results["x"][-1] = float("nan")

    return {
        "y": nudge("y"),
        "dx": lose_last_row,
        "dx max": nudge("x"),
        "dx rms": truncate("x"),
        "dweight max": nudge("weight"),
        "dweight rms": truncate("weight"),
        "dbias max": nudge("bias"),
        "dbias rms": truncate("bias"),
    }


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16, FP64], ids=str)
def test_limits_notice_errors(dtype, generator):
    form = Form("layer", dtype, dtype, weight=dtype, bias=dtype)
    assert not measured(form, lambda results: None, generator)
    for measure, spoil in spoilers(dtype).items():
        assert measure in measured(form, spoil, generator), f"{measure} lets an error pass"


def test_unwritten_output_is_noticed(generator, monkeypatch):
    """A row that a kernel forgot holds NaN, and check_call fails on it."""
    form = Form("rms", FP32, FP32)
    x, dy = randn(generator, 6, 40), randn(generator, 6, 40)

    class Forgetful(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = torch.empty_like(x)
            y[:-1] = F.rms_norm(x[:-1], [40], eps=form.eps)
            return y

        @staticmethod
        def backward(ctx, dy):
            return torch.empty_like(dy)

    monkeypatch.setattr("harness.apply", lambda form, x, *_: Forgetful.apply(x))
    ratios = check_call(form, x, None, None, dy)
    assert ratios["y"] == float("inf") and ratios["dx"] == float("inf")
