"""Attention composed of torch's operators: in fp64 it is the reference, in the input's dtype the
measure of an error (ATTENTION's contract in docs/attention.md). And the seeded sample of calls."""

import contextlib
import dataclasses
import itertools
import math
import random

import torch
from harness import rand_generator, randn, unwritten_is_nan

import fused_norm.functional as fn
from fused_norm import _C

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
UNIT = {BF16: 2**-8, FP16: 2**-11, FP32: 2**-24, FP64: 2**-53}


def band(queries, keys, left, right, top_left, device):
    """True where the window lets a query see a key."""
    shift = 0 if top_left else keys - queries
    i = torch.arange(queries, device=device)[:, None] + shift
    j = torch.arange(keys, device=device)
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if left is not None:
        seen &= j >= i - left
    if right is not None:
        seen &= j <= i + right
    return seen


def scores_of(
    query,
    key,
    *,
    attn_mask=None,
    alibi_slopes=None,
    scale=None,
    softcap=0.0,
    window=(None, None),
    top_left=False,
):
    """(B, H, Sq, Sk), in query's dtype; -inf where a key is hidden."""
    dtype, device = query.dtype, query.device
    queries, keys = query.shape[2], key.shape[2]
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        slopes = alibi_slopes if alibi_slopes.dim() == 2 else alibi_slopes[None]
        i = torch.arange(queries, device=device)[:, None]
        distance = (i + keys - queries - torch.arange(keys, device=device)).abs()
        scores = scores - (slopes.to(FP64)[..., None, None] * distance).to(dtype)
    hidden = ~band(queries, keys, *window, top_left, device)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        hidden = hidden | ~attn_mask
    elif attn_mask is not None:
        hidden = hidden | (attn_mask <= -1e38)
        scores = scores + attn_mask.to(dtype)
    return scores.masked_fill(hidden, -torch.inf)


def compose(query, key, value, *, sink=None, keep=None, **options):
    """(out, lse) of (B, H, S, D), with every score in memory and in query's dtype. ``keep``: what
    dropout multiplies the probabilities by."""
    scores, keys = scores_of(query, key, **options), key.shape[2]
    value = value.repeat_interleave(query.shape[1] // key.shape[1], 1)
    if sink is not None:
        column = sink.to(query.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    if scores.shape[-1] == 0:
        lse = scores.new_full(scores.shape[:3], -torch.inf)
    else:
        lse = scores.logsumexp(-1)
    empty = (lse == -torch.inf)[..., None]
    p = torch.softmax(scores.masked_fill(empty, 0), -1).masked_fill(empty, 0)[..., :keys]
    return (p if keep is None else p * keep.to(p.dtype)) @ value, lse


def philox(counter, key, rounds=7):
    """Philox4x32 (Salmon et al., 2011): four tensors of int64, of 32 bits each, and two numbers."""
    low, a, b, c, d = 2**32 - 1, *counter

    def product(factor, x):
        upper, lower = factor * (x >> 16), factor * (x & 0xFFFF)
        return (upper + (lower >> 16)) >> 16, (lower + ((upper & 0xFFFF) << 16)) & low

    for turn in range(rounds):
        (high0, low0), (high1, low1) = product(0xD2511F53, a), product(0xCD9E8D57, c)
        a, b = high1 ^ b ^ ((key[0] + turn * 0x9E3779B9) & low), low1
        c, d = high0 ^ d ^ ((key[1] + turn * 0xBB67AE85) & low), low0
    return torch.stack([a, b, c, d], -1)


def halves(rng, batch, heads, queries, keys, device):
    """The 16 bits that dropout draws for each probability, by the contract in docs/attention.md."""
    low, (seed, offset) = 2**32 - 1, rng
    packs = torch.arange((keys + 7) // 8, device=device).expand(batch * heads, queries, -1)
    query = torch.arange(queries, device=device)[:, None].expand_as(packs)
    row = torch.arange(batch * heads, device=device)[:, None, None].expand_as(packs)
    counter = (packs, query, row, torch.full_like(packs, offset & low))
    drawn = philox(counter, (seed & low, (seed >> 32 ^ offset >> 32) & low))
    of_rows = torch.stack([drawn & 0xFFFF, drawn >> 16], -1).flatten(2)[..., :keys]
    return of_rows.reshape(batch, heads, queries, keys)


def kept(p, *drawn_for):
    """What dropout multiplies the probabilities by, (batch, heads, queries, keys) in fp64."""
    threshold = round(p * 2**16)
    return (halves(*drawn_for) >= threshold).double() / (1 - threshold / 2**16)


def drawn_by(seed, device):
    """Sets torch's seed; the seed and the offset that a call with dropout then draws."""
    torch.manual_seed(seed)
    rng = torch.empty(2, dtype=torch.int64, device=device).random_().tolist()
    torch.manual_seed(seed)
    return rng


@dataclasses.dataclass(frozen=True)
class Case:
    """A call but for its data."""

    dtype: torch.dtype
    size: tuple  # (queries, keys)
    dims: tuple  # (head dim, value dim)
    heads: tuple  # (batch, query heads, key heads)
    band: str = "full"
    mask: str = "none"
    softcap: float = 0.0
    sink: str = "none"
    alibi: str = "none"
    layout: str = "bhsd"
    scale: float | None = None
    lse: bool = False  # its gradient too
    dropout: float = 0.0

    def __str__(self):
        parts = [str(self.dtype)[6:], *(f"{a}x{b}" for a, b in (self.size, self.dims))]
        parts += ["x".join(map(str, self.heads))]
        for field in ("band", "mask", "softcap", "sink", "alibi", "layout", "scale", "lse",
                      "dropout"):  # fmt: skip
            if getattr(self, field) != getattr(type(self), field):
                parts.append(f"{field}={getattr(self, field)}")
        return " ".join(parts)

    @property
    def window(self):
        return BANDS[self.band]

    def keep(self, device):
        """What dropout multiplies the probabilities by, or None."""
        if not self.dropout:
            return None
        rng = drawn_by(DROPOUT_SEED, device)
        return kept(self.dropout, rng, *self.heads[:2], *self.size, device)

    @property
    def factor(self):
        """How often the composed operators' error ours may be."""
        return 3 if self.softcap else 2


DROPOUT_SEED = 5
BANDS = {
    "full": (None, None),
    "causal": (None, 0),
    "left 17": (17, 0),
    "both": (5, 9),
    "right 3": (None, 3),
}
FACTORS = {
    "dtype": [BF16, FP16, FP32, FP64],
    "size": [(1, 2), (2, 9), (1, 77), (64, 64), (65, 130), (130, 65), (5, 0), (128, 257),
             (33, 512)],
    "dims": [(8, 8), (16, 40), (32, 32), (40, 40), (64, 64), (96, 96), (128, 128), (256, 256),
             (13, 13), (64, 24), (192, 128), (120, 17)],
    "heads": [(1, 1, 1), (2, 4, 4), (2, 4, 2), (1, 6, 1)],
    "band": list(BANDS),
    "mask": ["none", "bool", "bool keys", "float", "float heads", "float rows", "fp32",
             "float keys"],
    "softcap": [0.0, 5.0],
    "sink": ["none", "same", "fp32"],
    "alibi": ["none", "heads", "batch"],
    "layout": ["bhsd", "bshd", "qkv", "transposed"],
    "scale": [None, 0.3, -0.2, 0.0],
    "lse": [False, True],
    "dropout": [0.0, 0.4],
}  # fmt: skip


def covering_sample(factors=FACTORS, seed=0) -> list[Case]:
    """Cases among which every two values of different factors meet."""
    names, draw = list(factors), random.Random(seed)
    left = {
        (a, x, b, y)
        for a, b in itertools.combinations(names, 2)
        for x in factors[a]
        for y in factors[b]
    }

    def pairs(values):
        return {(a, values[a], b, values[b]) for a, b in itertools.combinations(names, 2)} & left

    cases = []
    while left:
        candidates = []
        for _ in range(20):
            values = {name: draw.choice(factors[name]) for name in names}
            a, x, b, y = min(draw.sample(sorted(left, key=str), 1))
            values |= {a: x, b: y}
            candidates.append(values)
        best = max(candidates, key=lambda values: len(pairs(values)))
        left -= pairs(best)
        cases.append(Case(**best))
    return cases


SAMPLE = covering_sample()
LONG = [
    Case(BF16, (3, 4097), (64, 64), (1, 2, 1), "causal"),
    Case(FP32, (4097, 3), (32, 32), (1, 2, 2), "causal", layout="bshd"),
    Case(FP16, (1100, 1029), (64, 64), (1, 2, 2), "left 17", sink="same"),
    Case(BF16, (330, 520), (128, 128), (1, 4, 2), "causal", dropout=0.4),
    Case(BF16, (200, 520), (96, 128), (2, 2, 1), "full", "bool keys", dropout=0.4),
    # More tiles than there are multiprocessors.
    Case(BF16, (300, 300), (64, 64), (4, 40, 40), "causal", dropout=0.4),
    Case(FP16, (300, 300), (128, 128), (4, 40, 40), "causal", dropout=0.4),
]


def laid_out(tensor, layout):
    """The same values of (B, H, S, D) in other strides."""
    if layout == "bshd":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "qkv":  # a slice of a packed tensor
        return torch.stack([tensor.transpose(1, 2)] * 3, 2)[:, :, 1].transpose(1, 2)
    if layout == "transposed":  # columns far apart
        return tensor.transpose(2, 3).contiguous().transpose(2, 3)
    return tensor.contiguous()


def tensors_of(case: Case, generator) -> dict:
    """query, key, value, attn_mask, sink, alibi_slopes, those that the case has, and gradients."""
    batch, heads, kv_heads = case.heads
    queries, keys = case.size
    d, dv = case.dims
    shapes = {
        "none": None,
        "bool": (batch, 1, queries, keys),
        "bool causal": (batch, 1, queries, keys),
        "bool keys": (batch, 1, 1, keys),
        "float": (batch, heads, queries, keys),
        "float heads": (1, heads, queries, keys),
        "float rows": (queries, 1),
        "fp32": (heads, 1, keys),
        "fp32 heads": (heads, queries, keys),
        "float keys": (batch, 1, 1, keys),
    }
    made = {}
    for name, shape in (
        ("query", (batch, heads, queries, d)),
        ("key", (batch, kv_heads, keys, d)),
        ("value", (batch, kv_heads, keys, dv)),
    ):
        made[name] = laid_out(randn(generator, *shape, dtype=case.dtype), case.layout)
    shape = shapes[case.mask]
    if shape is not None:
        dtype = FP32 if case.mask.startswith("fp32") else case.dtype
        made["attn_mask"] = randn(generator, *shape, dtype=dtype)
        if case.mask.startswith("bool"):
            made["attn_mask"] = made["attn_mask"] > -0.5
        if case.mask == "bool causal":
            made["attn_mask"] = made["attn_mask"].tril(keys - queries)
    if case.sink != "none":
        dtype = FP32 if case.sink == "fp32" else case.dtype
        made["sink"] = randn(generator, heads, dtype=dtype)
    if case.alibi != "none":
        shape = (heads,) if case.alibi == "heads" else (batch, heads)
        made["alibi_slopes"] = randn(generator, *shape).abs() / 8
    made["dout"] = randn(generator, batch, heads, queries, dv, dtype=case.dtype)
    lse_dtype = FP64 if case.dtype == FP64 else FP32
    made["dlse"] = randn(generator, batch, heads, queries, dtype=lse_dtype)
    return made


@contextlib.contextmanager
def forced(tier):
    _C.force_attention_tier(tier)
    try:
        yield
    finally:
        _C.force_attention_tier("auto")


def takes(tier, case):
    """Whether a forced tier runs the case."""
    if tier in ("cpu", "auto", "plain"):
        return True
    most = 128 if tier == "hopper" and case.dropout else 256
    fits = case.dtype in (BF16, FP16) and max(case.dims) <= most
    return fits and (tier != "hopper" or torch.cuda.get_device_capability() == (9, 0))


def takes_type(tier, dtype):
    """As above, of head dimension 64."""
    return takes(tier, Case(dtype, (1, 1), (64, 64), (1, 1, 1)))


def attend(case):
    """The case as a function of its tensors, to (out, lse)."""

    def attention(query, key, value, **options):
        if case.dropout:
            torch.manual_seed(DROPOUT_SEED)
        return fn.flash_attention(
            query,
            key,
            value,
            window=case.window,
            softcap=case.softcap,
            scale=case.scale,
            dropout_p=case.dropout,
            return_lse=True,
            **options,
        )

    return attention


LEAVES = ("query", "key", "value", "attn_mask", "sink")


def run(call, case: Case, tensors, dtype=None) -> dict:
    """out, lse and the gradients of a call of fresh leaves, converted to ``dtype`` first."""
    made = {n: t.to(dtype or t.dtype) if t.is_floating_point() else t for n, t in tensors.items()}
    dout, dlse = made.pop("dout"), made.pop("dlse")
    leaves = {}
    for name in LEAVES:
        if name in made and made[name].is_floating_point():
            leaves[name] = made[name] = made[name].detach().requires_grad_()
    out, lse = call(**made)
    results = {"out": out.detach(), "lse": lse.detach()}
    outputs, grads = [out], [dout]
    if case.lse:
        # Of a row that sees nothing the log-sum-exp is a constant.
        outputs.append(lse.masked_fill(lse == -torch.inf, 0))
        grads.append(dlse.to(lse.dtype))
    # Composed operators leave constants where there is no key.
    pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
    gradients = torch.autograd.grad(
        [o for o, _ in pairs], list(leaves.values()), [g for _, g in pairs], allow_unused=True
    )
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        results["d" + name] = torch.zeros_like(leaf) if gradient is None else gradient
    return results


def run_drawn(case: Case, device, seed) -> tuple[dict, dict]:
    """(tensors, results) of a case of random numbers, in memory that is NaN before."""
    tensors = tensors_of(case, rand_generator(device, seed))
    sizes = {t.numel() * t.element_size() for t in tensors.values()}
    with unwritten_is_nan(device, *sizes):
        return tensors, run(attend(case), case, tensors)


def check(case: Case, tensors, ours: dict, few_elements=False) -> dict:
    """{what: error / limit} of a call's results. ``few_elements``: also in fp32 an error counts as
    usual that follows from the roundings, as the composed operators' may be small by chance."""
    options = {
        "softcap": case.softcap,
        "window": case.window,
        "scale": case.scale,
    }
    keep = case.keep(tensors["query"].device)

    def composed_of(**tensors):
        return compose(**tensors, **options, keep=keep)

    exact = run(composed_of, case, tensors, FP64)
    composed = exact if case.dtype == FP64 else run(composed_of, case, tensors, case.dtype)
    rounded = roundings(case, tensors, exact, options, 1 if keep is None else keep)
    ratios = {}
    for name, value in ours.items():
        ref = exact[name]
        assert value.shape == ref.shape, (name, value.shape, ref.shape)
        if name == "lse":
            seen = ref > -torch.inf
            assert torch.equal(value == -torch.inf, ~seen), "which rows see nothing"
            error = ((value.double() - ref).abs() / (1 + ref.abs()))[seen]
            ratios[name] = _largest(error) / 2e-4
            continue
        error = _largest((value.double() - ref).abs())
        scale = _largest(ref.abs())
        if case.dtype == FP64:
            # The reference sums as many roundings: below 4000 products a result.
            limit = 64 * math.sqrt(4000) * UNIT[FP64] * scale.clamp_min(1)
            limit = limit + 2 * UNIT[value.dtype] * scale
        else:
            usual = case.factor * _largest((composed[name].double() - ref).abs())
            if case.dtype != FP32 or few_elements:
                # The composed error of a few elements may be small by chance. No more than once in
                # 10^8 draws is a sum of roundings beyond six times their root of sum of squares.
                usual = torch.maximum(usual, 6 * _largest(rounded[name]))
            limit = usual + 2 * UNIT[case.dtype] * scale
            if case.dtype == FP32:
                # Both sum the same terms in another order: where there are few elements, one draw
                # of roundings may be a small one. A score's roundings are a random walk over its
                # products; sums over rows have terms as large as dout . out.
                terms = scale
                if name in ("dsink", "dattn_mask"):
                    of_row = (tensors["dout"].double() * exact["out"]).sum(-1)
                    terms = torch.maximum(scale, _largest(of_row.abs()))
                limit = limit + 6 * UNIT[FP32] * (1 + _score_walk(case, tensors)) * terms
        assert value.isfinite().all(), f"{name} is not finite"
        # Where the exact value is 0, so is ours: of rows that see nothing.
        ratios[name] = torch.where(error == 0, 0, error / limit)
    return ratios


def roundings(case, tensors, exact, options, keep):
    """The root of the sum of squares of what a 16-bit kernel rounds on the way to each element, but
    for the element itself: probabilities, derivatives by scores, and the output in delta =
    rowsum(dout * out). Everything else is fp32. An fp32 kernel also rounds what it sums over the
    columns of value.

    A number's rounding error is uniform within half a unit of its last place: over magnitudes a
    relative 0.43 u in root mean square (u at most).
    """
    t = {n: x.double() if x.is_floating_point() else x for n, x in tensors.items()}
    group, kv_heads = case.heads[1] // case.heads[2], case.heads[2]
    query, dout, out, lse = t["query"], t["dout"], exact["out"], exact["lse"]
    key, value = (t[n].repeat_interleave(group, 1) for n in ("key", "value"))
    given = {n: t[n] for n in ("attn_mask", "alibi_slopes") if n in t}
    p = (scores_of(query, key, **given, **options) - lse[..., None]).exp().nan_to_num(0.0)
    scale = query.shape[-1] ** -0.5 if case.scale is None else case.scale
    slope = torch.ones_like(p)
    if case.softcap:
        slope -= torch.tanh(query @ key.mT * (scale / case.softcap)).square()
    delta = (dout * out).sum(-1, keepdim=True)
    if case.lse:
        delta -= t["dlse"].masked_fill(lse == -torch.inf, 0)[..., None]
    of_delta = (dout * out).square().sum(-1, keepdim=True)
    slope = p * slope * scale  # of a score by query . key, times the probability
    ds = (slope * (keep * (dout @ value.mT) - delta)).square()
    if case.dtype == FP32:
        # A sum of n products rounds n partial sums. The k-th is as large as the root of k products,
        # so their squares are n / 2 times those of the products.
        sums = value.shape[-1] / 2
        of_delta *= sums
        ds += sums * (slope * keep).square() * (dout.square() @ value.square().mT)
    kept_p = p * keep

    def of_group(squares):
        return squares.unflatten(1, (kv_heads, group)).sum(2)

    squares = {
        "out": kept_p.square() @ value.square(),
        "dvalue": of_group(kept_p.square().mT @ dout.square()),
        "dquery": of_delta * (slope @ key).square() + ds @ key.square(),
        "dkey": of_group((slope.square() * of_delta + ds).mT @ query.square()),
    }
    if "attn_mask" in t and t["attn_mask"].is_floating_point():
        shape = t["attn_mask"].shape
        weights = p.sum(-1, keepdim=True) if shape[-1] == 1 else p  # delta's error is the row's
        squares["dattn_mask"] = (weights.square() * of_delta).sum_to_size(shape)
    if "sink" in t:
        of_sink = (t["sink"][:, None] - lse).exp().square()
        squares["dsink"] = (of_sink * of_delta[..., 0]).sum((0, 2))
    return {name: 0.43 * UNIT[case.dtype] * s.sqrt() for name, s in squares.items()}


def _score_walk(case, tensors):
    """The largest sum of the products' magnitudes, over the root of their number."""
    d = case.dims[0]
    scale = d**-0.5 if case.scale is None else abs(case.scale)
    group = case.heads[1] // case.heads[2]
    key = tensors["key"].repeat_interleave(group, 1).abs()
    return _largest(tensors["query"].abs() @ key.transpose(-1, -2)) * scale / d**0.5


def _largest(tensor):
    return tensor.max() if tensor.numel() else tensor.new_zeros(())
