"""Attention's fast kernels at every short length, at odd long ones and at 131072; the same bits a
thousand times beside other work; and no call that waits for ever."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attention_reference import (
    BF16,
    FP16,
    Case,
    check,
    forced,
    run_drawn,
    takes_type,
)
from harness import Verdict, rand_generator, randn, same_bits

import fused_norm.functional as fn

pytestmark = pytest.mark.cuda

DIMS = (64, 96, 128, 192, 256)
GROUPS = (1, 2, 4, 8, 16)  # query heads for each key head


def cases_of(lengths):
    """A case for each length; what else there is changes with the length."""
    for number in lengths:
        keys = (number, number, number + 67, max(1, number - 67))[number % 4]
        dim, group = DIMS[number % 5], GROUPS[number // 5 % 5]
        band = ("full", "causal", "left 17")[number % 3]
        yield Case((BF16, FP16)[number // 2 % 2], (number, keys), (dim, dim), (1, group, 1), band)


@pytest.mark.parametrize("part", range(6))
def test_short_lengths(part, seed):
    verdict = Verdict()
    for case in cases_of(range(1 + part * 50, 51 + part * 50)):
        tensors, results = run_drawn(case, "cuda", seed)
        verdict.add(str(case), check(case, tensors, results))
    verdict.check()


@pytest.mark.parametrize("length", [511, 512, 513, 1000, 4095, 4096, 4097])
def test_long_lengths(length, seed):
    verdict = Verdict()
    for dim, band in ((64, "causal"), (128, "full"), (256, "causal")):
        case = Case(BF16, (length, length), (dim, dim), (1, 2, 1), band)
        tensors, results = run_drawn(case, "cuda", seed)
        verdict.add(str(case), check(case, tensors, results))
    verdict.check()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "dim, heads, kv_heads", [(64, 4, 2), (96, 9, 1), (128, 4, 2), (128, 16, 2), (256, 8, 1)]
)
def test_unlike_lengths(dim, heads, kv_heads, causal, generator):
    """Sequences of 1 to 300 tokens and one of 3000 in one call, with rows before and behind them:
    each has the bits that it has alone. Of 9 and 8 heads for a head of keys, blocks take parts."""
    lengths = [*range(1, 301, 7), 3000, *range(300, 0, -7)]
    offsets = torch.tensor([100, *lengths]).cumsum(0)
    cu = offsets.to("cuda", torch.int32)
    rows = int(offsets[-1]) + 200
    q, dout = (randn(generator, rows, heads, dim, dtype=BF16) for _ in range(2))
    k, v = (randn(generator, rows, kv_heads, dim, dtype=BF16) for _ in range(2))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = fn.flash_attention_varlen(*leaves, cu, cu, 3000, 3000, causal=causal)
    whole = [out, *torch.autograd.grad(out, leaves, dout)]
    for at, length in zip(offsets.tolist(), lengths, strict=False):
        part = slice(at, at + length)
        alone = [t.detach()[part].transpose(0, 1)[None].requires_grad_() for t in leaves]
        one = fn.flash_attention(*alone, causal=causal)
        results = [one, *torch.autograd.grad(one, alone, dout[part].transpose(0, 1)[None])]
        for name, a, b in zip(("out", "dq", "dk", "dv"), results, whole, strict=True):
            assert same_bits(a[0].transpose(0, 1), b[part]), (length, name)
    for result in whole:
        assert result[:100].eq(0).all() and result[-200:].eq(0).all()


FEW = [
    Case(BF16, (1, 5000), (128, 128), (2, 4, 4)),
    Case(FP16, (1, 5000), (128, 128), (2, 8, 2), scale=0.3),
    Case(BF16, (1, 1700), (120, 128), (1, 40, 2)),  # twenty heads share keys
    Case(BF16, (8, 9000), (128, 128), (3, 4, 2), "causal", sink="same"),
    Case(BF16, (5, 3000), (128, 128), (2, 4, 2), "left 17"),
    Case(BF16, (3, 2000), (128, 128), (2, 2, 2), "full", "bool keys"),
    Case(FP16, (1, 4097), (128, 128), (2, 4, 4), "full", "float keys", softcap=5.0),
    Case(BF16, (7, 2500), (128, 128), (2, 4, 2), "causal", dropout=0.4),
    Case(BF16, (4, 2500), (192, 128), (2, 4, 2), "causal", alibi="batch"),
    Case(BF16, (1, 20000), (256, 256), (1, 8, 1)),
    Case(BF16, (8, 1600), (64, 64), (1, 4, 2), "causal"),
    Case(BF16, (8, 3000), (64, 64), (2, 4, 2), "full", "float"),
    Case(FP16, (3, 2200), (40, 64), (2, 4, 2), "causal", softcap=5.0, sink="fp32"),
    Case(BF16, (1, 2500), (96, 96), (2, 4, 2), "full", sink="same"),
    Case(FP16, (8, 2000), (192, 256), (1, 2, 1), "causal", "bool"),
    Case(BF16, (1, 6000), (128, 128), (2, 4, 2), "left 17"),
]


@pytest.mark.parametrize("case", FEW, ids=str)
def test_few_queries(case, seed):
    """As in decoding: many keys come in parts."""
    tensors, results = run_drawn(case, "cuda", seed)
    verdict = Verdict()
    verdict.add(str(case), check(case, tensors, results))
    verdict.check()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", DIMS)
def test_bits_of_few_queries(dim, causal, generator):
    """A sequence of few queries has the bits that it has alone, beside others of few and of many;
    and so has each run."""
    queries = [1, 8, 300, 3, 1, 9, 0, 1, 2]
    keys = [5000, 9000, 300, 1025, 1024, 3000, 1700, 20000, 1]
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).to("cuda", torch.int32) for n in (queries, keys))
    q = randn(generator, sum(queries), 8, dim, dtype=BF16)
    k, v = (randn(generator, sum(keys), 2, dim, dtype=BF16) for _ in range(2))

    def packed():
        return fn.flash_attention_varlen(
            q, k, v, cu_q, cu_k, 300, 20000, causal=causal, return_lse=True
        )

    out, lse = packed()
    for _ in range(20):
        for a, b in zip((out, lse), packed(), strict=True):
            assert same_bits(a, b)
    of_q, of_k = (t.split(n) for t, n in ((q, queries), (k, keys)))
    of_v, outs, lses = v.split(keys), out.split(queries), lse.split(queries, 1)
    for i, sequence in enumerate(zip(of_q, of_k, of_v, strict=True)):
        one = [t.transpose(0, 1)[None] for t in sequence]
        for batch in (1, 5):
            many = [t.expand(batch, *t.shape[1:]) for t in one]
            alone = fn.flash_attention(*many, causal=causal, return_lse=True)
            assert same_bits(alone[0][-1].transpose(0, 1), outs[i]), (queries[i], keys[i])
            assert same_bits(alone[1][-1], lses[i])


def test_many_keys_and_no_sequence(generator):
    """Rows outside every sequence, beside keys that could come in parts."""
    q = randn(generator, 5, 2, 64, dtype=BF16)
    k, v = (randn(generator, 3000, 2, 64, dtype=BF16) for _ in range(2))
    cu_q, cu_k = (torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(2))
    out, lse = fn.flash_attention_varlen(q, k, v, cu_q, cu_k, 5, 3000, return_lse=True)
    assert out.eq(0).all() and lse.eq(-torch.inf).all()


def test_memory_of_many_short_sequences():
    """Scratch memory for parts of keys grows with the keys, not with the sequences."""
    count, keys, heads, dim = 20000, 8, 2, 64
    k, v = (torch.zeros(count * keys, heads, dim, dtype=BF16, device="cuda") for _ in range(2))
    q = k[:count]
    cu_q, cu_k = (torch.arange(count + 1, device="cuda", dtype=torch.int32) * n for n in (1, keys))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = fn.flash_attention_varlen(q, k, v, cu_q, cu_k, 1, keys)
    taken = torch.cuda.max_memory_allocated() - before - out.nbytes
    of_parts = 2 * (count * keys // 1024 + 1) * heads * 8 * (dim + 1) * 4
    lse = count * heads * 4
    # The allocator's blocks, of these and of out, may each be larger than what was asked for, by
    # less than 2 MiB. Eight rows of sums a sequence would be 83 MB.
    assert taken <= of_parts + lse + 3 * 2**21, taken


@pytest.mark.parametrize("offset", [0.0, -60.0, -3000.0])
@pytest.mark.parametrize("dim", DIMS)
def test_scores_that_grow(dim, offset, generator):
    """From key to key and back: what exponents are relative to moves little by little, at once or
    never, and lies below 0."""
    q, k, v = (randn(generator, 2, 3, 1500, dim, dtype=BF16) for _ in range(3))
    blocks = torch.arange(1500, device="cuda") // 100
    steps = (0.5, 3.0, 40.0, -0.5, -3.0, -40.0)
    for step, tier in itertools.product(steps, ("portable", "hopper")):
        if not takes_type(tier, BF16):
            continue
        q[..., 0] = 1.0
        k[..., 0] = offset + step * blocks
        options = {"scale": 0.7, "causal": True, "return_lse": True}
        exact, exact_lse = fn.flash_attention(q.double(), k.double(), v.double(), **options)
        with forced(tier):
            out, lse = fn.flash_attention(q, k, v, **options)
        # Of max |v|, which the first row has: 2^-9 for P, 2^-9 for out, and as much for exponents
        # of 3000, whose products and sums are fp32; twice that.
        assert (out.double() - exact).abs().max() <= 2**-6 * exact.abs().max(), (step, tier)
        assert ((lse - exact_lse).abs() <= 2e-4 * (1 + exact_lse.abs())).all(), (step, tier)


@pytest.mark.parametrize("dim", [64, 128])
def test_131072_tokens(dim, generator):
    """37 rows of each result against fp64; the rows' statistics are the kernel's, whose own rows
    are checked."""
    length, rows = 131072, torch.randint(131072, (32,), generator=torch.Generator().manual_seed(1))
    rows = torch.cat([rows, torch.tensor([1, 2, 127, 128, length - 1])]).cuda()
    q, k, v, dout = (randn(generator, 1, 1, length, dim, dtype=BF16) for _ in range(4))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse = fn.flash_attention(*leaves, causal=True, return_lse=True)
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)

    at = torch.arange(length, device="cuda")
    scale = dim**-0.5
    exact_q, exact_k, exact_v, exact_dout = (t.detach()[0, 0].double() for t in (q, k, v, dout))
    scores = (exact_q[rows] @ exact_k.T * scale).masked_fill(at > rows[:, None], -torch.inf)
    weights = scores.softmax(-1)
    expected = weights @ exact_v
    products = exact_dout[rows] @ exact_v.T
    delta = (exact_dout[rows] * expected).sum(-1, keepdim=True)
    of_query = weights * (products - delta) @ exact_k * scale
    close(out[0, 0, rows], expected)
    torch.testing.assert_close(lse[0, 0, rows].double(), scores.logsumexp(-1), rtol=2e-4, atol=2e-4)
    close(dq[0, 0, rows], of_query)

    scores = (exact_k[rows] @ exact_q.T * scale).masked_fill(at < rows[:, None], -torch.inf)
    weights = (scores - lse[0, 0].double()).exp()
    delta = (exact_dout * out[0, 0].double()).sum(-1)
    products = exact_v[rows] @ exact_dout.T
    close(dv[0, 0, rows], weights @ exact_dout)
    close(dk[0, 0, rows], weights * (products - delta) @ exact_q * scale)


def close(value, expected):
    """Errors are roundings of bf16: of the probabilities within the sum, and of the result."""
    error = (value.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < 2**-6, error.max()


@pytest.mark.parametrize(
    "dim, kv_heads, p",
    [
        *((dim, 10, 0.0) for dim in DIMS),
        (64, 1, 0.0),
        (128, 2, 0.0),
        (192, 1, 0.0),
        (256, 2, 0.0),
        (64, 1, 0.1),
        (128, 2, 0.1),
    ],
)
def test_a_thousand_repeats_beside_other_work(dim, kv_heads, p, seed):
    generator = rand_generator("cuda", seed)
    q, dout = (randn(generator, 2, 10, 333, dim, dtype=BF16) for _ in range(2))
    k, v = (randn(generator, 2, kv_heads, 333, dim, dtype=BF16) for _ in range(2))
    leaves = [t.requires_grad_() for t in (q, k, v)]

    def step():
        torch.manual_seed(seed)
        out, lse = fn.flash_attention(*leaves, causal=True, dropout_p=p, return_lse=True)
        return [out, lse, *torch.autograd.grad(out, leaves, dout)]

    first = [t.detach().clone() for t in step()]
    differences = torch.zeros((), dtype=torch.int64, device="cuda")
    other, matrix = torch.cuda.Stream(), torch.randn(1536, 1536, device="cuda", dtype=BF16)
    for repeat in range(1000):
        if repeat % 4 == 0:
            with torch.cuda.stream(other):
                matrix @ matrix
        for a, b in zip(step(), first, strict=True):
            differences += (a != b).any()
    assert differences.item() == 0


CALLS = """
import torch
from attention_reference import BF16, Case, attend, forced, run, tensors_of
from harness import rand_generator

for tier in ("portable", "hopper"):
    with forced(tier):
        for dim in (64, 96, 128, 192, 256):
            for size in ((1, 1), (1, 700), (700, 1), (300, 300), (129, 1025), (1025, 129)):
                for band in ("full", "causal", "left 17", "both"):
                    for more in ({}, {"mask": "bool"}, {"mask": "float", "sink": "same"},
                                 {"softcap": 5.0, "alibi": "heads", "layout": "bshd"},
                                 {"dropout": 0.4}):
                        if "dropout" in more and dim > 128: continue
                        heads = (2, 2, 1) if more else (2, 10, 2)  # the latter take parts
                        case = Case(BF16, size, (dim, dim), heads, band, **more)
                        print(tier, case, flush=True)
                        run(attend(case), case, tensors_of(case, rand_generator("cuda", 0)))
                        torch.cuda.synchronize()
print("all returned")
"""


def test_no_call_waits_for_ever():
    """The kernels wait for copies, for products and for each other. One that waits for ever would
    hang this process too, so another one runs them, and what it printed last names the call."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", CALLS],
            cwd=Path(__file__).parent,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])},
            capture_output=True,
            text=True,
            timeout=150,
        )
    except subprocess.TimeoutExpired as late:
        pytest.fail(f"hangs: {(late.stdout or b'').decode().splitlines()[-1:]}")
    assert done.returncode == 0 and done.stdout.endswith("all returned\n"), done.stderr[-2000:]
