"""Checks of results against fp64 references, in row chunks so that the references stay small.

Each function returns the largest error over its bound: a result is right when that is at most 1.
The bounds follow the roundings: u is the unit roundoff of fp32, in which all implementations
compute, and the store adds one rounding of its own dtype. The forward bound is twice what the
library promises, so that peers with another order of summation pass too; and a peer may round
`roundings` times to the dtype it stores, where this library rounds once.
"""

import torch

from benchmarks.results import OURS

U = 2.0**-24
CHUNK = 2**24  # elements: 128 MiB in fp64


def roundings(peer):
    """How often an implementation may round on the way to its result.

    Three: of the normalized row, or of exp(x - max); of its product or quotient; of the sum.
    """
    return 1 if peer.name.startswith(OURS) else 3


def forward_error(case, x, weight, bias, y, roundings=1):
    g, b = _parameters(weight, bias)
    worst = 0.0
    for rows in _chunks(x):
        xhat, mean, rstd = _normalize(case, x[rows])
        ref = xhat * g + b
        scale = g.abs() * (xhat.abs().amax(1, keepdim=True) + mean.abs() * rstd) + b.abs()
        worst = max(worst, _worst(y[rows], ref, 8 * U * scale, roundings))
    return worst


def backward_error(case, x, weight, bias, dy, gradients, from_output=False, roundings=1):
    """`gradients` is (dx, dweight, dbias); `from_output`: backward saw the rounded y, and no x."""
    dx, dweight, dbias = gradients
    g, b = _parameters(weight, bias)
    rows_total = x.shape[0]
    sums = dict.fromkeys(("dweight", "dweight2", "dbias", "dbias2", "delta2"), 0.0)
    worst = 0.0
    for rows in _chunks(x):
        xhat, mean, rstd = _normalize(case, x[rows])
        dy64 = dy[rows].double()
        gdy = g * dy64
        c1 = 0.0 if case.rms else gdy.mean(1, keepdim=True)
        c2 = (gdy * xhat).mean(1, keepdim=True)
        ref = rstd * (gdy - c1 - xhat * c2)
        # xhat carries an error of u times its largest element and of the mean it was centred by.
        terms = (
            gdy.abs()
            + gdy.abs().mean(1, keepdim=True)
            + xhat.abs() * (gdy * xhat).abs().mean(1, keepdim=True)
        )
        bound = 4 * U * rstd * terms * (1 + xhat.abs().amax(1, keepdim=True) + mean.abs() * rstd)
        if from_output:
            # The rounding of y comes back as delta in xhat, which dx uses in two places.
            delta = _unit_roundoff(x) * (xhat.abs() + (b / g).abs())
            bound += rstd * (
                delta * c2.abs() + xhat.abs() * (gdy.abs() * delta).mean(1, keepdim=True)
            )
            sums["delta2"] += (dy64 * delta).square().sum(0)
        worst = max(worst, _worst(dx[rows], ref, bound, roundings))
        product = dy64 * xhat
        sums["dweight"] += product.sum(0)
        sums["dweight2"] += product.square().sum(0)
        sums["dbias"] += dy64.sum(0)
        sums["dbias2"] += dy64.square().sum(0)

    # The deltas are independent of dy: they add up like a random walk, here six sigma of it.
    bound = _sum_bound(dweight, rows_total, sums["dweight2"]) + 6 * sums["delta2"] ** 0.5
    worst = max(worst, _worst(dweight, sums["dweight"], bound))
    if dbias is not None:
        bound = _sum_bound(dbias, rows_total, sums["dbias2"])
        worst = max(worst, _worst(dbias, sums["dbias"], bound))
    return worst


def _sum_bound(gradient, rows, squares):
    """Of the sum over the rows of terms with these sums of squares, before its last rounding.

    Let s be the size of a term, s sqrt(M) the norm of all. A sequential sum in fp32 rounds partial
    sums of size s sqrt(k), k = 1..M, by U each: U s M / sqrt(2) in all, here times 6. An
    implementation may also keep the sums of groups of rows in the gradient's dtype before it adds
    these in fp32, as torch does beyond 64 Ki rows: P sums of size s sqrt(M / P), each rounded by
    u / sqrt(3) in the mean, add up like a random walk to u s sqrt(M / 3), whatever P; here times 7.
    """
    return 4 * (U * rows**0.5 + _unit_roundoff(gradient)) * squares**0.5


def softmax_forward_error(case, x, y, roundings=1):
    worst = 0.0
    for rows in _chunks(x):
        t = x[rows].double()
        t = t - t.amax(1, keepdim=True)
        ref = t - t.exp().sum(1, keepdim=True).log()
        if case.log:
            bound = 2e-6 * ref.abs().clamp_min(1)
        else:
            # exp errs by a few u of t and of one; the sum by what the library promises of it, 1e-6.
            ref = ref.exp()
            each = U * (8 * t.abs() + 16)
            bound = ref * (each + (ref * each).sum(1, keepdim=True) + 2e-6)
        worst = max(worst, _worst(y[rows], ref, bound, roundings))
    return worst


def softmax_backward_error(case, dy, y, dx, product_dtype=None, roundings=1):
    """Of the gradient of the output `y` as it is, rounded or not. `product_dtype`: what the
    implementation rounds dy * y to before it sums, if not to fp32."""
    rounded = U if product_dtype is None else torch.finfo(product_dtype).eps / 2
    worst = 0.0
    for rows in _chunks(dy):
        y64, dy64 = y[rows].double(), dy[rows].double()
        if case.log:
            total, size = dy64.sum(1, keepdim=True), dy64.abs().sum(1, keepdim=True)
            ref = dy64 - y64.exp() * total
            terms = dy64.abs() + y64.exp() * (size + total.abs() * (1 + y64.abs()))
        else:
            product = dy64 * y64
            ref = (dy64 - product.sum(1, keepdim=True)) * y64
            size = product.abs().sum(1, keepdim=True)
            terms = y64 * (dy64.abs() + size) + rounded / (32 * U) * (product.abs() + y64 * size)
        worst = max(worst, _worst(dx[rows], ref, 32 * U * terms, roundings))
    return worst


def _parameters(weight, bias):
    return weight.double(), 0.0 * weight.double() if bias is None else bias.double()


def _normalize(case, x):
    x = x.double()
    mean = torch.zeros_like(x[:, :1]) if case.rms else x.mean(1, keepdim=True)
    rstd = ((x - mean).square().mean(1, keepdim=True) + case.eps).rsqrt()
    return (x - mean) * rstd, mean, rstd


def _chunks(x):
    rows, cols = x.shape
    step = max(1, CHUNK // cols)
    return [slice(start, start + step) for start in range(0, rows, step)]


def _unit_roundoff(tensor):
    return torch.finfo(tensor.dtype).eps / 2


def _worst(result, ref, bound, roundings=1):
    """Largest |result - ref| over (bound + the roundings to its dtype); infinite for NaN."""
    smallest = torch.finfo(
        result.dtype
    ).smallest_normal  # below it the rounding no longer shrinks with the value
    allowed = bound + roundings * _unit_roundoff(result) * (ref.abs() + bound + smallest)
    ratio = ((result.double() - ref).abs() / allowed).max().item()
    return ratio if ratio == ratio else float("inf")
