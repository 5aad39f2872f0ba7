"""Runs one call of a softmax, forward and backward, and holds it to an fp64 reference. Shared by
the softmax tests.

References and limits work on rows, a chunk at a time, so that a tensor of any size can be checked.
`u` is the unit roundoff of the arithmetic: of fp32, or for fp64 twice its own, as the reference
errs as much as the result.
"""

import contextlib
import dataclasses
import math

import torch
import torch.nn.functional as F
from harness import CHUNK, SHORT, unwritten_is_nan
from reference import UNIT, compute_unit, rounding

import fused_norm.functional as fn
from fused_norm import _C

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

forward_op = torch.ops.fused_norm.softmax_forward.default
backward_op = torch.ops.fused_norm.softmax_backward.default

# Input and output dtypes that one kernel serves.
PAIRS = [(FP64, FP64), (FP32, FP32), (FP16, FP16), (BF16, BF16), (FP16, FP32), (BF16, FP32)]
# The lengths of the row tests: around powers of two, vocabularies, and one of a million.
COLS = [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1000, 1023, 1024, 1025]
COLS += [2047, 2048, 2049, 4095, 4096, 4097, 8191, 8192, 8193, 32000, 50257, 65536]
COLS += [100352, 128256, 262144, 1000003]

# Below the smallest normal number of fp32 the kernels' exp2 gives zero.
FLUSH = 2.0**-126


@dataclasses.dataclass(frozen=True)
class Form:
    """Everything of a call but its shape and data. `masked` is scaled_masked_softmax."""

    x: torch.dtype
    y: torch.dtype
    log: bool = False
    dim: int = -1
    tier: str = "auto"
    masked: bool = False
    scale: float = 1.0
    causal: bool = False

    def __str__(self):
        name = "masked softmax" if self.masked else "log_softmax" if self.log else "softmax"
        parts = [name, f"{SHORT[self.x]}->{SHORT[self.y]}"]
        parts += [f"dim {self.dim}"] if self.dim != -1 else []
        parts += [f"tier {self.tier}"] if self.tier != "auto" else []
        parts += [f"scale {self.scale}"] if self.scale != 1 else []
        return " ".join(parts + ["causal"] * self.causal)


def forms(pair):
    return [Form(*pair, log=log) for log in (False, True)]


def masked_op(x, mask, scale=1.0, causal=False, out=None):
    return forward_op(x, -1, False, out, mask, scale, causal)


def apply(form, x, mask=None):
    """The library's call, with a graph: functional forms, or the operator for an output dtype that
    only autocast asks for."""
    if form.masked and form.x != form.y:
        return masked_op(x, mask, form.scale, form.causal, form.y)
    if form.masked:
        return fn.scaled_masked_softmax(x, mask, form.scale, form.causal)
    call = fn.log_softmax if form.log else fn.softmax
    return call(x, form.dim, form.y)


def apply_torch(form, x, mask=None):
    """torch's operators; a fully masked row is NaN in them."""
    if not form.masked:
        return (F.log_softmax if form.log else F.softmax)(x, form.dim, dtype=form.y)
    hidden = hidden_of(form, x, mask)
    scores = x * form.scale
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask.to(scores.dtype)
    return F.softmax(scores.masked_fill(hidden, -math.inf), -1, dtype=form.y)


def hidden_of(form, x, mask):
    """True where a boolean mask or causality hides the input."""
    hidden = torch.zeros((), dtype=torch.bool, device=x.device)
    if mask is not None and mask.dtype == torch.bool:
        hidden = mask
    if form.causal:
        queries, keys = x.shape[-2:]
        later = torch.ones(queries, keys, dtype=torch.bool, device=x.device)
        hidden = hidden | later.triu(keys - queries + 1)
    return hidden.expand(x.shape)


@contextlib.contextmanager
def forced_tier(tier):
    _C.force_softmax_tier(tier)
    try:
        yield
    finally:
        _C.force_softmax_tier("auto")


def in_tier(call, tier):
    """call() in the tier, or in "auto" where it does not hold such rows in this direction."""
    try:
        with forced_tier(tier):
            return call()
    except RuntimeError as error:
        if "does not hold" not in str(error):
            raise
        return call()


def forward_backward(form, x, dy, mask=None, call=apply):
    """(y, dx). A forced tier is that of each direction in which it holds the rows; no graph."""
    if form.tier == "auto":
        leaf = x.detach().requires_grad_()
        y = call(form, leaf, mask)
        return y.detach(), torch.autograd.grad(y, leaf, dy)[0]

    ops = torch.ops.fused_norm

    def forward():
        rest = mask, form.scale, form.causal
        return ops.softmax_forward(x, form.dim, form.log, form.y, *rest)

    def backward():
        return ops.softmax_backward(dy, y, form.dim, form.log, form.x, form.scale)

    y = in_tier(forward, form.tier)
    return y, in_tier(backward, form.tier)


def reference(logits, log):
    """(result, distance to the row's maximum) in fp64."""
    t = logits - logits.amax(1, keepdim=True)
    result = t - t.exp().sum(1, keepdim=True).log() if log else t.exp() / t.exp().sum(1, True)
    return result, t.abs()


class SoftmaxCheck:
    """Feed it the rows of one call in chunks; `ratios()` maps what was measured to error / limit, a
    number that must not exceed 1 (inf for a NaN), still on the device."""

    def __init__(self, form):
        self.form, self.u = form, compute_unit(form.x)
        # The contract's 1e-6, for fp64 in the same proportion to the unit roundoff.
        self.promise = 1e-6 * self.u / UNIT[FP32]
        self.found, self.sums = {}, {}

    def _record(self, name, error, limit):
        ratio = (error.abs() / limit).nan_to_num(nan=math.inf, posinf=math.inf).max()
        self.found[name] = torch.maximum(self.found[name], ratio) if name in self.found else ratio

    def _add(self, name, value):
        square, largest = value.square().sum(), value.abs().max()
        if name in self.sums:
            square, largest = square + self.sums[name][0], largest.max(self.sums[name][1])
        self.sums[name] = (square, largest)

    def rows(self, x, y, dy=None, dx=None, torch_dx=None, hidden=None, mask=None):
        """Of shape (rows, N). hidden: masked out. mask: what is added."""
        scaled = x.double() * self.form.scale
        logits = scaled if mask is None else scaled + mask.double()
        if hidden is not None:
            logits = logits.masked_fill(hidden, -math.inf)
        empty = torch.zeros_like(logits[:, :1], dtype=torch.bool)
        if self.form.masked:
            empty = (logits == -math.inf).all(1, keepdim=True)
            logits = logits.masked_fill(empty, 0.0)
        ref, t = reference(logits, self.form.log)
        # What scale and mask round: u of each number that is formed in fp32.
        rounded = torch.zeros_like(t)
        if self.form.masked:
            rounded = scaled.abs() + (0 if mask is None else logits.abs())
            rounded = rounded.masked_fill(ref == 0, 0.0)
            ref = ref.masked_fill(empty, 0.0)
        limit = self._forward(ref, t.masked_fill(ref == 0, 0.0), rounded, y)
        if self.form.y in (FP32, FP64) and not self.form.log:
            # "Row sums, taken in fp64, 1 within 1e-6 for fp32 output"; 0 where nothing is left.
            total = y.double().sum(1, keepdim=True)
            self._record("row sum", total - (~empty).double(), torch.full_like(total, self.promise))
        if self.form.masked:
            gone = empty if hidden is None else empty | hidden
            self._record("masked y", y.double().where(gone, 0.0), torch.full_like(ref, FLUSH))
        if dx is None:
            return
        if self.form.masked:
            self._record("masked dx", dx.double().where(gone, 0.0), torch.full_like(ref, FLUSH))
        self._backward(ref, limit, y.double(), dy.double(), dx, torch_dx)

    def _forward(self, ref, t, rounded, y):
        """Returns what y may err by."""
        u = self.u
        if self.form.log:
            # The contract of log_softmax: 1e-6 max(1, |ref|).
            limit = self.promise * ref.abs().clamp_min(1)
        else:
            # exp(t) errs by 2u |t| (t = x - max is rounded, and so is its product with log2(e)),
            # its own 4u, and what scale and mask rounded. The sum has the mean of these errors. A
            # row's common factor is its sum's rounding, for which the contract of row sums has
            # 1e-6. An absolute limit alone would let rows of a million elements be anything.
            each = u * (4 * t + 2 * rounded)
            limit = ref * (each + (ref * each).sum(1, keepdim=True) + 8 * u + self.promise)
            if not self.form.masked:
                limit = limit.clamp_max(self.promise)  # the contract: 1e-6 absolute
        limit = limit + (FLUSH if self.form.x != FP64 else 0) + 1e-300
        limit = limit + rounding(ref.abs() + limit, self.form.y, u)
        self._record("y", y.double() - ref, limit)
        return limit

    def _backward(self, ref, saved, y, dy, dx, torch_dx):
        """`saved`: what the saved y may err by."""
        u, scale = self.u, self.form.scale
        if self.form.log:
            weight, exact = y.exp(), ref.exp()
            total, size = dy.sum(1, keepdim=True), dy.abs().sum(1, keepdim=True)
            from_y = scale * (dy - weight * total)
            truth = scale * (dy - exact * total)
            # exp(y) errs by 2u |y| + 4u, the sum by a few u of the sum of magnitudes.
            terms = dy.abs() + weight * (size + total.abs() * (1 + y.abs()))
            flush = FLUSH * total.abs().clamp_min(1)  # where exp(y) is zero, for sums of any size
            propagated = weight * total.abs() * saved
        else:
            total, size = (dy * y).sum(1, keepdim=True), (dy * y).abs().sum(1, keepdim=True)
            from_y = scale * (dy - total) * y
            truth = scale * (dy - (dy * ref).sum(1, keepdim=True)) * ref
            terms = y * (dy.abs() + size)
            flush = FLUSH
            propagated = (dy.abs() + size) * saved + y * (dy.abs() * saved).sum(1, keepdim=True)
        arithmetic = 16 * u * abs(scale) * terms + (flush if self.form.x != FP64 else 0) + 1e-300
        # Every element, against the gradient of the output that was really saved.
        limit = arithmetic + rounding(from_y.abs() + arithmetic, self.form.x, u)
        self._record("dx", dx.double() - from_y, limit)
        # Over the tensor, against the true gradient: 1.5 x the error of torch's own operator, or
        # what the error of y and the rounding of dx explain.
        self._add("error", dx.double() - truth)
        self._add("allowed", limit + abs(scale) * propagated)
        if torch_dx is not None:
            self._add("torch error", torch_dx.double() - truth)

    def ratios(self):
        if "error" in self.sums:
            for which, name in enumerate(("dx rms", "dx max")):
                error, limit = self.sums["error"][which], self.sums["allowed"][which]
                if which == 0:
                    error, limit = error.sqrt(), limit.sqrt()
                if "torch error" in self.sums:
                    theirs = self.sums["torch error"][which]
                    limit = limit.fmax(1.5 * (theirs.sqrt() if which == 0 else theirs))
                self._record(name, error[None], limit[None] + 1e-300)
        return self.found


def check_call(form, x, dy, mask=None, with_torch=True):
    """Runs the call forward and backward; returns {what: error / limit} on the device."""
    with unwritten_is_nan(x.device, x.numel() * form.y.itemsize, x.numel() * form.x.itemsize):
        y, dx = forward_backward(form, x, dy, mask)
    assert y.dtype == form.y and y.shape == x.shape and y.is_contiguous()
    assert dx.dtype == x.dtype and dx.shape == x.shape and dx.is_contiguous()
    torch_dx = None
    if with_torch and not form.masked:
        plain = dataclasses.replace(form, tier="auto")
        torch_dx = forward_backward(plain, x, dy, call=apply_torch)[1]

    def as_rows(t):
        if t is None:
            return None
        return t.reshape(1, -1) if t.dim() < 2 else t.movedim(form.dim, -1).flatten(0, -2)

    additive = mask is not None and mask.dtype != torch.bool
    hidden = hidden_of(form, x, mask) if form.masked else None
    added = mask.expand(x.shape) if additive else None
    tensors = [as_rows(t) for t in (x, y, dy, dx, torch_dx, hidden, added)]
    check = SoftmaxCheck(form)
    rows, cols = tensors[0].shape
    step = max(1, CHUNK // cols)
    for first in range(0, rows, step):
        check.rows(*(None if t is None else t[first : first + step] for t in tensors))
    return check.ratios()
