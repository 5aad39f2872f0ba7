"""Random calls of attention against fp64: sizes, head dimensions, heads, masks, windows, options
and strides that nobody chose. And random packed sequences: each has the bits that it has alone,
and its output those of a dense call.

A small profile for CPUs; on a GPU 1000 cases of each, or as many as the environment variable
FUZZ_CASES says. `--hypothesis-seed` chooses others.
"""

import dataclasses
import math
import os

import pytest
import torch
from attention_reference import (
    BF16,
    FACTORS,
    FP16,
    FP32,
    FP64,
    Case,
    attend,
    check,
    forced,
    run,
    takes,
    tensors_of,
)
from harness import Verdict, fuzz, rand_generator, randn, same_bits, unwritten_is_nan
from hypothesis import strategies as st

import fused_norm.functional as fn

CASES = {"cpu": 60, "cuda": int(os.environ.get("FUZZ_CASES", "1000"))}
MOST_SCORES = {"cpu": 2**14, "cuda": 2**20}
TIERS = {"cpu": ["auto"], "cuda": ["auto", "auto", "auto", "hopper", "portable", "plain"]}
SEEDS = st.integers(0, 2**32 - 1)
LENGTHS = st.integers(1, 80) | st.integers(1, 700) | st.sampled_from([64, 128, 129, 256, 512])
DIMS = st.sampled_from([32, 40, 64, 80, 96, 128, 192, 256]) | st.integers(1, 256)
REACHES = st.sampled_from([None, None, 0, 1]) | st.integers(0, 300)


@dataclasses.dataclass(frozen=True)
class RandomCase(Case):
    """With any window, and a mask that also hides a rectangle of rows and columns."""

    left: int | None = None
    right: int | None = None
    hidden: tuple | None = None  # (first row, end, first column, end)
    hides_by_least: bool = False  # its dtype's lowest number, not -inf. fp16's hides nothing.
    tier: str = "auto"
    seed: int = 0

    @property
    def window(self):
        return self.left, self.right

    def tensors(self, device):
        made = tensors_of(self, rand_generator(device, self.seed))
        mask = made.get("attn_mask")
        if self.hidden is not None and mask is not None:
            top, bottom, first, end = self.hidden
            by = -math.inf
            if mask.dtype == torch.bool:
                by = False
            elif self.hides_by_least and mask.dtype != FP16:
                by = torch.finfo(mask.dtype).min
            mask[..., top:bottom, first:end] = by
        return made


@st.composite
def cases(draw, device):
    dtypes = [BF16, BF16, FP16, FP32] + [FP64] * (device == "cpu")
    batch, kv_heads, group = (draw(st.integers(1, most)) for most in (4, 4, 8))
    queries, keys = draw(LENGTHS), draw(LENGTHS)
    if draw(st.integers(0, 5)) == 0:  # decoding
        queries, keys = 1, draw(st.integers(1, 5000))
    if draw(st.integers(0, 3)) == 0:
        keys = queries
    most = MOST_SCORES[device]
    queries, keys = min(queries, most // 8), min(keys, most // 8)
    while batch * kv_heads * group * queries * keys > most:
        batch, kv_heads, group = (max(n // 2, 1) for n in (batch, kv_heads, group))
        if batch * kv_heads * group == 1:
            queries = max(min(queries, most // keys), 1)
    d = draw(DIMS)
    rows, columns = (sorted(draw(st.integers(0, n)) for _ in range(2)) for n in (queries, keys))
    return RandomCase(
        dtype=draw(st.sampled_from(dtypes)),
        size=(queries, keys),
        dims=(d, draw(st.just(d) | st.just(d) | DIMS)),
        heads=(batch, kv_heads * group, kv_heads),
        mask=draw(st.just("none") | st.sampled_from([*FACTORS["mask"], "fp32 heads"])),
        softcap=draw(st.sampled_from([0.0, 0.0, 0.0, 5.0])),
        sink=draw(st.sampled_from(["none", "none", "same", "fp32"])),
        alibi=draw(st.sampled_from(["none", "none", "heads", "batch"])),
        layout=draw(st.sampled_from(FACTORS["layout"])),
        scale=draw(st.sampled_from([None, None, 0.3, -0.2])),
        lse=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.0, 0.0, 0.4])),
        left=draw(REACHES),
        right=draw(REACHES),
        hidden=draw(st.none() | st.just((*rows, *columns))),
        hides_by_least=draw(st.booleans()),
        tier=draw(st.sampled_from(TIERS[device])),
        seed=draw(SEEDS),
    )


def check_case(case, device):
    tier = case.tier if takes(case.tier, case) else "auto"
    tensors = case.tensors(device)
    sizes = {t.numel() * t.element_size() for t in tensors.values()}
    with forced(tier), unwritten_is_nan(device, *sizes):
        ours = run(attend(case), case, tensors)
    verdict = Verdict()
    verdict.add(str(case), check(case, tensors, ours, few_elements=True))
    verdict.check()


@st.composite
def packed_cases(draw, device):
    most = 40 if device == "cpu" else 300
    lengths = st.sampled_from([0, 1, 16, 64]) | st.integers(0, most)
    sequences = draw(st.lists(st.tuples(lengths, lengths), min_size=1, max_size=8))
    same = draw(st.booleans())  # of queries and keys
    return {
        "lengths": [(q, q if same else k) for q, k in sequences],
        "before": draw(st.integers(0, 3)),  # rows outside of every sequence
        "dtype": draw(st.sampled_from([BF16, BF16, FP16, FP32])),
        "dim": draw(DIMS),
        "kv_heads": draw(st.integers(1, 3)),
        "group": draw(st.integers(1, 4)),
        "window": (draw(REACHES), draw(REACHES)),
        "softcap": draw(st.sampled_from([0.0, 0.0, 4.0])),
        "sink": draw(st.booleans()),
        "seed": draw(SEEDS),
    }


def check_packed(case, device):
    generator, dtype, dim = rand_generator(device, case["seed"]), case["dtype"], case["dim"]
    heads, before = case["kv_heads"] * case["group"], case["before"]
    at = [[before + sum(pair[i] for pair in case["lengths"][:n])
           for n in range(len(case["lengths"]) + 1)] for i in (0, 1)]  # fmt: skip
    at_q, at_k = at
    offsets = [torch.tensor(a, dtype=torch.int32, device=device) for a in at]
    longest = [max(lengths) for lengths in zip(*case["lengths"], strict=True)]
    q, dout = (randn(generator, at_q[-1] + 2, heads, dim, dtype=dtype) for _ in range(2))
    k, v = (randn(generator, at_k[-1] + 1, case["kv_heads"], dim, dtype=dtype) for _ in range(2))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    options = {"window": case["window"], "softcap": case["softcap"], "return_lse": True}
    if case["sink"]:
        options["sink"] = randn(generator, heads, dtype=dtype)
    with unwritten_is_nan(device, q.numel() * q.element_size(), k.numel() * k.element_size()):
        out, lse = fn.flash_attention_varlen(*leaves, *offsets, *longest, **options)
        grads = torch.autograd.grad(out, leaves, dout)
    for tensor, a in zip((out, *grads), (at_q, at_q, at_k, at_k), strict=True):
        assert not tensor[: a[0]].any() and not tensor[a[-1] :].any(), "outside of every sequence"
    for n, (queries, keys) in enumerate(case["lengths"]):
        if queries == 0 and keys == 0:
            continue
        parts = [t.detach()[a[n] : a[n + 1]].requires_grad_()
                 for t, a in ((q, at_q), (k, at_k), (v, at_k))]  # fmt: skip
        of_q, of_k = slice(at_q[n], at_q[n + 1]), slice(at_k[n], at_k[n + 1])
        ends = [torch.tensor([0, m], dtype=torch.int32, device=device) for m in (queries, keys)]
        alone, alone_lse = fn.flash_attention_varlen(*parts, *ends, queries, keys, **options)
        gradients = torch.autograd.grad(alone, parts, dout[of_q])
        dense = [t.detach().transpose(0, 1)[None] for t in parts]
        out_of_dense, lse_of_dense = fn.flash_attention(*dense, **options)
        pairs = {
            "out": (out[of_q], alone),
            "lse": (lse[:, of_q], alone_lse),
            "dquery": (grads[0][of_q], gradients[0]),
            "dkey": (grads[1][of_k], gradients[1]),
            "dvalue": (grads[2][of_k], gradients[2]),
            "out of a dense call": (out[of_q], out_of_dense[0].transpose(0, 1)),
            "lse of a dense call": (lse[:, of_q], lse_of_dense[0]),
        }
        for name, (a, b) in pairs.items():
            assert same_bits(a, b), f"{name}, sequence {n}"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize(
    ("draw", "check_drawn"), [(cases, check_case), (packed_cases, check_packed)],
    ids=["dense", "packed"],
)  # fmt: skip
def test_random_calls(draw, check_drawn, device):
    fuzz(draw(device), lambda case: check_drawn(case, device), CASES[device])
