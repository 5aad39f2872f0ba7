"""Attention's kernels of one tile: short dense sequences, all gradients in one kernel.
And the gradient of a mask of few tiles that many sequences share, in parts."""

import random

import pytest
import torch
from attention_reference import (
    BANDS,
    BF16,
    FP16,
    FP32,
    Case,
    attend,
    check,
    covering_sample,
    forced,
    run,
    run_drawn,
    takes,
)
from harness import Verdict, kernels_of, rand_generator, randn, same_bits

import fused_norm.functional as fn

pytestmark = pytest.mark.cuda

FACTORS = {
    "dtype": [BF16, FP16],
    "size": [(1, 1), (1, 64), (64, 1), (7, 49), (49, 49), (64, 64), (33, 17), (50, 64), (8, 8),
             (16, 16), (24, 24), (64, 16)],
    "dims": [(8, 8), (32, 32), (24, 16), (16, 32), (13, 29), (64, 64), (40, 64), (48, 16)],
    "heads": [(1, 1, 1), (5, 3, 3), (40, 4, 4), (300, 3, 3), (1100, 2, 2)],
    "band": list(BANDS),
    "mask": ["none", "bool", "bool keys", "float", "float heads", "float rows", "fp32",
             "fp32 heads", "float keys"],
    "layout": ["bhsd", "bshd", "qkv", "transposed"],
    "scale": [None, 0.3],
    "lse": [False, True],
}  # fmt: skip
# Masks of few tiles that many sequences share: of 64 columns and of 128 on Hopper, of one head and
# of all; and in the plain tier.
IN_PARTS = [
    Case(BF16, (49, 150), (40, 40), (300, 3, 3), "full", "float heads"),
    Case(FP16, (144, 130), (32, 32), (70, 2, 2), "causal", "float heads"),
    Case(BF16, (130, 257), (128, 128), (40, 4, 2), "full", "float heads"),
    Case(BF16, (70, 70), (32, 32), (40, 4, 2), "full", "fp32"),
    Case(FP32, (49, 49), (32, 32), (150, 2, 2), "full", "float heads"),
]


@pytest.mark.parametrize("part", range(4))
def test_sample(part, seed):
    verdict = Verdict()
    for case in covering_sample(FACTORS)[part::4]:
        tensors, results = run_drawn(case, "cuda", seed)
        verdict.add(str(case), check(case, tensors, results))
    verdict.check()


@pytest.mark.parametrize("case", IN_PARTS, ids=str)
@pytest.mark.parametrize("tier", ["plain", "portable", "hopper"])
def test_gradient_of_a_mask_in_parts(tier, case, seed):
    if not takes(tier, case):
        pytest.skip(f"no kernel of the {tier} tier")
    with forced(tier):
        tensors, results = run_drawn(case, "cuda", seed)
        names = kernels_of([lambda: run(attend(case), case, tensors)])
    verdict = Verdict()
    verdict.add(str(case), check(case, tensors, results))
    verdict.check()
    assert any("attention_last_sums" in name for name in names)


@pytest.mark.parametrize("shape", [(1, 1), (6, 1), (1, 3), (6, 3)], ids=str)
@pytest.mark.parametrize("dim", [32, 64, 80])
def test_one_mask_for_some(dim, shape, generator):
    """A mask of one sequence or head for all, or of each: its gradient is of its own shape."""
    q, k, v, dout = (randn(generator, 6, 3, 49, dim, dtype=torch.float64) for _ in range(4))
    mask = randn(generator, *shape, 49, 49, dtype=torch.float64)

    def gradient(dtype):
        leaf = mask.to(dtype).requires_grad_()
        out = fn.flash_attention(q.to(dtype), k.to(dtype), v.to(dtype), attn_mask=leaf)
        return torch.autograd.grad(out, leaf, dout.to(dtype))[0]

    exact = gradient(torch.float64)
    error = (gradient(BF16).double() - exact).abs().max()
    assert error <= 2**-6 * exact.abs().max()


def short(generator, batch, heads, length, dim=32):
    tensors = [randn(generator, batch, heads, length, dim, dtype=BF16) for _ in range(4)]
    return [t.requires_grad_(i < 3) for i, t in enumerate(tensors)]


@pytest.mark.parametrize("masked", [True, False], ids=["mask", "none"])
@pytest.mark.parametrize("length, dim", [(49, 32), (64, 32), (49, 64), (16, 64), (17, 40)])
def test_bits(length, dim, masked, generator):
    """A sequence alone and among 700 has the same bits, and so has each run."""
    q, k, v, dout = short(generator, 700, 3, length, dim)
    mask = randn(generator, 1, 3, length, length, dtype=BF16).requires_grad_() if masked else None

    def results(at):
        leaves = [t[at].detach().requires_grad_() for t in (q, k, v)]
        out, lse = fn.flash_attention(*leaves, attn_mask=mask, return_lse=True)
        inputs = leaves + [mask] * masked
        return [
            out,
            lse,
            *torch.autograd.grad((out, lse), inputs, (dout[at], torch.ones_like(lse))),
        ]

    whole = results(slice(None))
    for _ in range(20):
        for a, b in zip(whole, results(slice(None)), strict=True):
            assert same_bits(a, b)
    for i in (0, 1, 350, 699):
        for a, b in zip(whole[:5], results(slice(i, i + 1))[:5], strict=True):
            assert same_bits(a[i : i + 1], b)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("hides", [False, float("-inf"), -3e38], ids=str)
def test_hidden_keys_may_hold_anything(hides, poison, generator):
    q, k, v, dout = short(generator, 9, 3, 49)
    mask = randn(generator, 1, 3, 49, 49, dtype=BF16)
    if hides is False:
        mask = mask > -1
    mask[..., 11] = hides
    clean = None
    for value in (0.0, poison):
        kk, vv = k.detach().clone(), v.detach().clone()
        kk[:, :, 11] = vv[:, :, 11] = value
        leaves = [q, kk.requires_grad_(), vv.requires_grad_()]
        out, lse = fn.flash_attention(*leaves, attn_mask=mask, return_lse=True)
        results = [out, lse, *torch.autograd.grad(out, leaves, dout)]
        if clean is None:
            clean = results
        for a, b in zip(clean, results, strict=True):
            assert same_bits(a, b)


@pytest.mark.parametrize("length", [12, 40])
def test_keys_outside_the_window_may_hold_anything(length, generator):
    """Without a mask: the first keys are hidden from every query by the window."""
    q, dout = (randn(generator, 9, 3, length, 32, dtype=BF16).requires_grad_() for _ in range(2))
    k, v = (randn(generator, 9, 3, 60, 32, dtype=BF16) for _ in range(2))
    results = []
    for value in (0.0, torch.nan):
        for t in (k, v):
            t[:, :, : 60 - length - 5] = value
        leaves = [q, *(t.clone().requires_grad_() for t in (k, v))]
        out, lse = fn.flash_attention(*leaves, window=(5, 0), return_lse=True)
        results.append([out, lse, *torch.autograd.grad(out, leaves, dout)])
    for a, b in zip(*results, strict=True):
        assert same_bits(a, b)


def test_queries_that_see_nothing(generator):
    """The first queries of a causal call with fewer keys; what they hold reaches nobody."""
    q, dout = (randn(generator, 5, 2, 60, 32, dtype=BF16) for _ in range(2))
    k, v = (randn(generator, 5, 2, 40, 32, dtype=BF16).requires_grad_() for _ in range(2))
    mask = randn(generator, 1, 2, 60, 40, dtype=BF16)
    q[:, :, :20] = dout[:, :, :20] = float("nan")
    q.requires_grad_()
    out, lse = fn.flash_attention(q, k, v, attn_mask=mask, causal=True, return_lse=True)
    assert (out[:, :, :20] == 0).all() and (lse[:, :, :20] == -torch.inf).all()
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    assert (gradients[0][:, :, :20] == 0).all()
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("tier", ["portable", "hopper"])
def test_packed_sequences_have_the_bits_of_dense_ones(tier, dtype, seed):
    """Without a mask, as packed calls have none: output and log-sum-exp, of other kernels."""
    generator, draw = rand_generator("cuda", seed), random.Random(seed)
    for _ in range(60):
        heads, dim, value_dim = (
            draw.choice([1, 3]),
            draw.choice([8, 24, 32, 64]),
            draw.choice([8, 64]),
        )
        sizes = [(draw.randint(1, 64), draw.randint(1, 64)) for _ in range(8)] + [(200, 200)]
        large = draw.choice([0.1, 1.0, 4.0])
        q, k, v = (
            large * randn(generator, sum(n[of_keys] for n in sizes), heads, columns, dtype=dtype)
            for of_keys, columns in ((0, dim), (1, dim), (1, value_dim))
        )
        cu_q, cu_k = (
            torch.tensor([0, *(n[i] for n in sizes)]).cumsum(0).to("cuda", torch.int32)
            for i in (0, 1)
        )
        options = {"causal": draw.random() < 0.5, "scale": draw.choice([None, 0.3, 2.0])}
        options |= {"window": draw.choice([None, (5, 9), (17, 0)]), "return_lse": True}
        with forced(tier):
            out, lse = fn.flash_attention_varlen(q, k, v, cu_q, cu_k, 200, 200, **options)
            for i, (queries, keys) in enumerate(sizes):
                parts = [
                    t[cu[i] : cu[i + 1]].transpose(0, 1)[None]
                    for t, cu in ((q, cu_q), (k, cu_k), (v, cu_k))
                ]
                one, one_lse = fn.flash_attention(*parts, **options)
                assert same_bits(one[0].transpose(0, 1), out[cu_q[i] : cu_q[i + 1]]), (
                    queries,
                    keys,
                )
                assert same_bits(one_lse[0], lse[:, cu_q[i] : cu_q[i + 1]])


@pytest.mark.parametrize("layout", ["odd offset", "transposed", "every other", "expanded"])
def test_masks_are_read_in_place(layout, generator):
    q, k, v, dout = short(generator, 9, 3, 49)
    mask = randn(generator, 1, 3, 49, 49, dtype=BF16)
    laid_out = {
        "odd offset": lambda: randn(generator, mask.numel() + 1, dtype=BF16)[1:].view_as(mask),
        "transposed": lambda: torch.empty_like(mask).mT,
        "every other": lambda: torch.empty(1, 3, 49, 98, dtype=BF16, device="cuda")[..., ::2],
        "expanded": lambda: torch.empty_like(mask),
    }[layout]().copy_(mask)
    if layout == "expanded":
        laid_out = laid_out.expand(9, 3, 49, 49)

    def results(mask):
        out, lse = fn.flash_attention(q, k, v, attn_mask=mask, return_lse=True)
        return [out, lse, *torch.autograd.grad(out, (q, k, v), dout)]

    for a, b in zip(results(mask), results(laid_out), strict=True):
        assert same_bits(a, b)


def test_single_queries_of_heads_that_share_keys(generator):
    """With a mask of keys and few of them: each head as alone."""
    q = randn(generator, 3, 8, 1, 32, dtype=BF16)
    k, v = (randn(generator, 3, 2, 50, 32, dtype=BF16) for _ in range(2))
    seen = randn(generator, 3, 1, 1, 50) > -0.5
    out, lse = fn.flash_attention(q, k, v, attn_mask=seen, return_lse=True)
    for head in range(8):
        of_head, of_keys = slice(head, head + 1), slice(head // 4, head // 4 + 1)
        alone = fn.flash_attention(
            q[:, of_head], k[:, of_keys], v[:, of_keys], attn_mask=seen, return_lse=True
        )
        assert same_bits(alone[0], out[:, of_head]) and same_bits(alone[1], lse[:, of_head])


def test_which_kernels_run(generator):
    """One kernel forward and one backward, and one that adds up the mask's gradient."""
    q, k, v, dout = short(generator, 700, 3, 49)
    bias = randn(generator, 1, 3, 49, 49, dtype=BF16).requires_grad_()

    def step(mask=None, **options):
        out = fn.flash_attention(q, k, v, attn_mask=mask, **options)
        torch.autograd.grad(out, (q, k, v) if mask is None else (q, k, v, mask), dout)

    for tier in ("auto", "portable"):
        with forced(tier):
            names = kernels_of([lambda: step(bias)])
            assert sum("attention_one_tile" in name for name in names) == 2
            assert sum("attention_last_sums" in name for name in names) == 1
            names = kernels_of([step])
            assert sum("attention_one_tile" in name for name in names) == 2
            assert len([name for name in names if "attention" in name]) == 2
            capped = kernels_of([lambda: step(bias, softcap=5.0)])
            assert not any("attention_one_tile" in name for name in capped)
