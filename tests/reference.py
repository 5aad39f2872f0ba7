"""fp64 references of the norms and their gradients, and the limits that derive from the arithmetic.

Everything works on rows of N columns, one chunk of rows at a time, so that a tensor of any size can
be checked. `u` is the unit roundoff. Row quantities have shape (rows, 1), column quantities (N,).
"""

import dataclasses
import math

import torch

UNIT = {
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float32: 2.0**-24,
    torch.float64: 2.0**-53,
}
# Spacing of the subnormal numbers, and the smallest normal number.
SMALLEST = {
    torch.bfloat16: 2.0**-133,
    torch.float16: 2.0**-24,
    torch.float32: 2.0**-149,
    torch.float64: 2.0**-1074,
}


def compute_unit(x_dtype):
    """u of the arithmetic: fp64 for fp64 input, else fp32. An fp64 result is held to an fp64
    reference, which errs as much as the result does: twice the unit."""
    return 2 * UNIT[torch.float64] if x_dtype == torch.float64 else UNIT[torch.float32]


def rounding(value, dtype, unit):
    """Largest error of rounding `value` to dtype once; none but underflow where the arithmetic
    itself, of unit roundoff `unit`, is no finer than dtype: its bound has that rounding in it
    already."""
    relative = UNIT[dtype] if UNIT[dtype] > unit else 0.0
    return relative * value.abs() + SMALLEST[dtype]


def sum_error(result, ref, dtype):
    """The error of a sum over rows. One beyond dtype's largest number, as 25746 times 2.6 is in
    fp16, is right as an infinity."""
    result = result.reshape(-1).double()
    beyond = ref.to(dtype).isinf() & (result == ref.to(dtype))
    return torch.where(beyond, 0.0, result - ref)


def rms_rounding_factor(count):
    """The rms of one rounding, over the tensor, in u rms(value). The errors are uniform in +-u
    2^e with 2^e <= |value|: at most 1 / sqrt(3); few elements may draw worse ones and keep the
    largest, 1. `count`, a tensor, is how many elements make up the sum of squares."""
    return torch.where(count >= 4096, 1 / math.sqrt(3), 1.0)


@dataclasses.dataclass
class Stats:
    """Statistics of a chunk of rows in fp64."""

    xhat: torch.Tensor
    mean: torch.Tensor
    rstd: torch.Tensor

    @property
    def shift(self):
        """|mean| rstd: how much larger x is than its centred part. The mean is a rounded fp32
        number, so every xhat of the row carries u |mean| rstd."""
        return self.mean.abs() * self.rstd

    @property
    def scale(self):
        """max|xhat| + |mean| rstd; an xhat computed in fp32 errs by a few u times this."""
        return self.xhat.abs().amax(1, keepdim=True) + self.shift


def row_stats(x, eps, rms_norm):
    x = x.double()
    if rms_norm:
        mean = torch.zeros_like(x[:, :1])
        rstd = (x.square().mean(1, keepdim=True) + eps).rsqrt()
        return Stats(x * rstd, mean, rstd)
    mean = x.mean(1, keepdim=True)
    # On a GPU that is a product with the rounded 1 / N, off in one direction in every row: a sum
    # over rows would add that up.
    mean = mean + (x - mean).mean(1, keepdim=True)
    centred = x - mean
    rstd = (centred.square().mean(1, keepdim=True) + eps).rsqrt()
    return Stats(centred * rstd, mean, rstd)


def effective_weight(weight, weight_offset, x_dtype):
    """g = weight + weight_offset, added in fp32 (fp64 for fp64 input): that sum is what the
    contract calls g."""
    return (
        weight.to(torch.float64 if x_dtype == torch.float64 else torch.float32) + weight_offset
    ).double()


def dx_reference(dy, g, xhat, rstd, rms_norm):
    """dx = rstd (w - mean(w) - xhat mean(w xhat)) with w = g dy; no mean(w) for RMSNorm."""
    w = dy * g
    c2 = (w * xhat).mean(1, keepdim=True)
    c1 = torch.zeros_like(c2) if rms_norm else w.mean(1, keepdim=True)
    return rstd * (w - c1 - xhat * c2), w, c1, c2


def recoverable(g, bias, y_dtype):
    """Columns whose xhat can be had back from the output: g a normal number of y's dtype, u_y |b
    / g| <= 2^-6."""
    info = torch.finfo(y_dtype)
    normal = g.isfinite() & (g.abs() >= info.smallest_normal) & (g.abs() <= info.max)
    return normal & (UNIT[y_dtype] * (bias / g).abs() <= 2.0**-6)


def precise(g, bias, y_dtype):
    """Columns whose xhat is had back from the output where others can be listed: recoverable, and
    |b / g| <= 2^12."""
    return recoverable(g, bias, y_dtype) & ((bias / g).abs() <= 2.0**12)


class NormCheck:
    """Holds one forward and backward call to its fp64 reference.

    Feed it the rows (in chunks, if they are many), then the parameter gradients; `ratios()` maps
    what was measured to error / limit, a number that must not exceed 1 (inf for a NaN), still on
    the device. With `from_output` the limits of the gradients grow by what the xhat that precise
    columns recover from the rounded output propagates, exactly as it does there. `dy_repeats`: rows
    of dy come again, as in an expanded tensor.
    """

    def __init__(
        self,
        *,
        rows,
        rms,
        eps,
        x_dtype,
        y_dtype,
        weight=None,
        bias=None,
        weight_offset=0.0,
        from_output=False,
        dy_repeats=False,
    ):
        self.dy_repeats = dy_repeats
        self.total_rows, self.rms_norm, self.eps, self.from_output = rows, rms, eps, from_output
        self.x_dtype, self.y_dtype, self.u = x_dtype, y_dtype, compute_unit(x_dtype)
        self.weight = None if weight is None else weight.detach().reshape(-1)
        self.bias = None if bias is None else bias.detach().reshape(-1)
        self.g = 1.0 if weight is None else effective_weight(self.weight, weight_offset, x_dtype)
        self.b = 0.0 if bias is None else self.bias.double()
        self.found = {}
        self.sums = {}

    def _record(self, name, error, limit):
        """error / limit where a tensor's every element has its own limit."""
        if error.numel() == 0:
            return
        ratio = (error.abs() / limit.clamp_min(1e-300)).nan_to_num(nan=math.inf, posinf=math.inf)
        largest = ratio.max()
        self.found[name] = (
            torch.maximum(self.found[name], largest) if name in self.found else largest
        )

    def _add(self, name, value):
        """Sums and maxima over chunks: the pieces of tensor-wide measures."""
        square, largest = value.square().sum(), value.abs().max()
        if name in self.sums:
            old_square, old_largest, count = self.sums[name]
            square, largest = square + old_square, torch.maximum(largest, old_largest)
            self.sums[name] = (square, largest, count + value.numel())
        else:
            self.sums[name] = (square, largest, value.numel())

    def _measures(self, name):
        square, largest, count = self.sums[name]
        return (square / count).sqrt(), largest

    def _compare(self, name, dtype):
        """The rms over the tensor and its largest error: at most what the arithmetic and one
        rounding to dtype explain, or 1.5 times the error of torch's own operator; plus what the
        xhat recovered from the output propagates."""
        errors = self._measures(f"{name} error")
        limit_rms, limit_max = self._measures(f"{name} arithmetic")
        ref_rms, ref_max = self._measures(f"{name} reference")
        unit = UNIT[dtype] if UNIT[dtype] > self.u else 0.0
        # As many elements as the largest as would give the sum: a few may outweigh all others.
        outweighing = self.sums[f"{name} error"][2] * (ref_rms / ref_max.clamp_min(1e-300)) ** 2
        limit_rms = limit_rms + unit * rms_rounding_factor(outweighing) * ref_rms
        # Where the error is largest, twice as many roundings may have come out at their worst and
        # with one sign.
        limit_max = 2 * limit_max + unit * ref_max
        limits = [limit_rms, limit_max]
        if f"torch {name} error" in self.sums:
            torch_errors = self._measures(f"torch {name} error")
            limits = [
                own.fmax(1.5 * theirs) for own, theirs in zip(limits, torch_errors, strict=True)
            ]
        if f"{name} propagated" in self.sums:
            propagated = self._measures(f"{name} propagated")
            limits = [
                limit + (1 + unit) * more for limit, more in zip(limits, propagated, strict=True)
            ]
        for measure, error, limit in zip(("rms", "max"), errors, limits, strict=True):
            self._record(f"{name} {measure}", error[None], limit[None] + SMALLEST[dtype])

    def _forward(self, stats, y):
        ref = self.g * stats.xhat + self.b
        # The contract of the norms: |y - ref| <= 4u (|g| (max|xhat| + |mean| rstd) + |b|), plus one
        # rounding at 16 bit.
        limit = 4 * self.u * (abs(self.g) * stats.scale + abs(self.b))
        self._record(
            "y", y.double() - ref, limit + rounding(ref.abs() + limit, self.y_dtype, self.u)
        )

    def _recovered_xhat(self, stats, y):
        """xhat as the backward pass can know it from the output that was really written."""
        g = torch.as_tensor(self.g, dtype=torch.float64, device=y.device).expand(y.shape[1])
        b = torch.as_tensor(self.b, dtype=torch.float64, device=y.device).expand(y.shape[1])
        return torch.where(precise(g, b, self.y_dtype), (y.double() - b) / g, stats.xhat)

    def _shift_error(self):
        """What the xhat of a precise column may be off by, alike in every row, where it is had back
        from 16 bits: kernels multiply y by 1 / g and add the rounded -bias / g."""
        if not self.from_output or self.bias is None or self.y_dtype.itemsize != 2:
            return 0.0
        g = torch.as_tensor(self.g, dtype=torch.float64, device=self.b.device)
        return torch.where(precise(g, self.b, self.y_dtype), self.u * (self.b / g).abs(), 0.0)

    def _dx(self, stats, xhat, dy, dx, torch_dx, dresidual):
        rstd, shift, scale = stats.rstd, stats.shift, stats.scale
        norm_dx, w, c1, c2 = dx_reference(dy, self.g, stats.xhat, rstd, self.rms_norm)
        ref = norm_dx + dresidual
        self._add("dx reference", ref)
        self._add("dx error", dx.double() - ref)
        if torch_dx is not None:
            self._add("torch dx error", torch_dx.double() - ref)
        propagated = 0.0
        if xhat is not stats.xhat:
            propagated = (dx_reference(dy, self.g, xhat, rstd, self.rms_norm)[0] - norm_dx).abs()
            off = self._shift_error()
            mean_off = (w.abs() * off).mean(1, keepdim=True)
            propagated = propagated + rstd * (off * c2.abs() + stats.xhat.abs() * mean_off)
            self._add("dx propagated", propagated)
        # Every element: rounded sums, products and rstd cost a few u of each term of dx; an xhat
        # off by 4u scale moves mean(w xhat) by 4u scale mean|w| and xhat mean(w xhat) by 4u scale
        # |mean(w xhat)|.
        mean_w = w.abs().mean(1, keepdim=True)
        limit = (
            8
            * self.u
            * rstd
            * (w.abs() + mean_w * (1 + scale * stats.xhat.abs()) + scale * c2.abs())
        )
        # What is added to dx costs one rounding of the sum.
        sum_rounding = self.u * ref.abs() if torch.is_tensor(dresidual) else 0.0
        limit = limit + propagated + sum_rounding
        self._record(
            "dx", dx.double() - ref, limit + rounding(ref.abs() + limit, self.x_dtype, self.u)
        )
        # Over the tensor: errors are u of what they belong to, not of the row's largest; xhat
        # carries u (|xhat| + |mean| rstd) and the mean of w xhat carries u |mean(w)| |mean| rstd.
        # Four roundings lie on any path to dx.
        terms = (
            w.abs()
            + c1.abs()
            + (stats.xhat * c2).abs()
            + shift * (c2.abs() + (stats.xhat * c1).abs())
        )
        self._add("dx arithmetic", 4 * self.u * rstd * terms + sum_rounding)

    def rows(self, x, y=None, dy=None, dx=None, torch_dx=None, dresidual=0.0):
        """One chunk of rows: x, y, dy, dx of shape (rows, N); y alone, or the gradients with it.
        ``dresidual`` is a gradient of x that is added to dx."""
        stats = row_stats(x, self.eps, self.rms_norm)
        if y is not None:
            self._forward(stats, y)
        if dy is None:
            return
        dy = dy.double()
        xhat = self._recovered_xhat(stats, y) if self.from_output else stats.xhat
        if dx is not None:
            self._dx(stats, xhat, dy, dx, torch_dx, dresidual)
        if self.weight is not None:
            self._sum("dweight reference", dy * stats.xhat)
            terms = dy * (torch.maximum(xhat.abs(), stats.xhat.abs()) + stats.shift)
            self._sum("dweight squares", terms.square())
            self._sum("dweight scale", (dy * stats.scale).square())
            if self.dy_repeats:
                self._sum("dweight magnitudes", (dy * stats.xhat).abs())
            if self.from_output:
                self._sum("dweight propagated", dy * (xhat - stats.xhat))
        if self.bias is not None:
            self._sum("dbias reference", dy)
            self._sum("dbias squares", dy.square())
            if self.dy_repeats:
                self._sum("dbias magnitudes", dy.abs())

    def _sum(self, name, value):
        total = value.sum(0)
        self.sums[name] = self.sums[name] + total if name in self.sums else total

    def parameters(self, dweight=None, dbias=None, torch_dweight=None, torch_dbias=None):
        """The parameter gradients, once all rows were seen."""
        if dweight is not None:
            self._parameter("dweight", dweight, self.weight.dtype, torch_dweight)
        if dbias is not None:
            self._parameter("dbias", dbias, self.bias.dtype, torch_dbias)

    def _parameter(self, name, gradient, dtype, torch_gradient):
        ref = self.sums.pop(f"{name} reference")
        root = self.sums.pop(f"{name} squares").sqrt()
        propagated = self.sums.pop(f"{name} propagated", None)
        error = sum_error(gradient, ref, dtype)
        # A column sums M products. Each carries a few u of itself, with random sign: 4u sqrt(sum
        # p^2). A block that adds L rows one after the other also rounds its growing sum L times:
        # 0.4 u sqrt(L) sqrt(sum p^2) as a random walk. The limit is that of 128 blocks which share
        # the rows; where fewer do, in clusters, no sequence is longer than 128, and they are held
        # to it all the same. What a drift of the sum costs is u |sum|.
        chain = math.sqrt(self.total_rows / 128)
        total = ref.abs() if propagated is None else ref.abs() + propagated.abs()
        arithmetic = self.u * ((4 + 0.5 * chain) * root + 4 * total)
        if self.dy_repeats:
            # A thread that adds one number again and again rounds alike while its sum stays within
            # a power of two, and other threads do the same: nothing averages out. What holds for
            # any numbers is u h sum |p|, with h the additions on the longest way to the result:
            # the rows of a block, and 32 for up to 17 partial rows a warp of stage 2 and 10 levels
            # of trees. In practice 0.15 u L of the sum for a sequence of L. The products of dweight
            # mostly differ, as xhat does, but are much alike where x has a mean that RMSNorm keeps.
            magnitudes = self.sums.pop(f"{name} magnitudes")
            alike = (ref.abs() > 0.9 * magnitudes) | (name == "dbias")
            additions = 32 + self.total_rows / 128
            arithmetic = arithmetic + torch.where(alike, self.u * additions * magnitudes, 0.0)
        # An element alone may have the worst xhat, off by 4u scale, in every row.
        scale = self.sums.pop(f"{name} scale").sqrt() if name == "dweight" else root
        limit = 2 * (arithmetic + 4 * self.u * scale)
        if propagated is not None:
            propagated = propagated.abs()
            if "dbias reference" in self.sums:
                propagated = propagated + self._shift_error() * self.sums["dbias reference"].abs()
            limit = limit + propagated
            self._add(f"{name} propagated", propagated)
        self._record(name, error, limit + rounding(ref.abs() + limit, dtype, self.u))
        self._add(f"{name} reference", ref)
        self._add(f"{name} error", error)
        self._add(f"{name} arithmetic", arithmetic)
        if torch_gradient is not None:
            self._add(f"torch {name} error", sum_error(torch_gradient, ref, dtype))
        self._compare(name, dtype)

    def ratios(self):
        """{what: error / limit}, each a number on the device."""
        if "dx error" in self.sums:
            self._compare("dx", self.x_dtype)
            self.sums.pop("dx error")
        return self.found
