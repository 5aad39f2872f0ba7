"""Attention's values, on the CPU and by the CUDA kernels: against fp64, rows that see nothing, what
is hidden, what is the same to the bit, packed sequences, torch's and flash-attn's functions."""

import dataclasses
import itertools

import pytest
import torch
import torch.nn.attention.bias
import torch.nn.functional as F
from attention_reference import (
    BF16,
    FP16,
    FP32,
    FP64,
    LONG,
    SAMPLE,
    UNIT,
    Case,
    attend,
    check,
    compose,
    drawn_by,
    forced,
    halves,
    kept,
    laid_out,
    run,
    run_drawn,
    takes,
    takes_type,
    tensors_of,
)
from harness import (
    Verdict,
    held_for_backward,
    kernels_of,
    rand_generator,
    randn,
    same_bits,
    unwritten_is_nan,
)

import fused_norm.functional as fn
from fused_norm import flash_attn

cuda = pytest.mark.cuda


each_tier = pytest.mark.parametrize(
    "tier", ["cpu", *(pytest.param(t, marks=cuda) for t in ("auto", "plain", "portable", "hopper"))]
)


def run_case(case, tier, seed):
    """(tensors, results)."""
    if tier == "cpu":
        return run_drawn(case, "cpu", seed)
    with forced(tier):
        return run_drawn(case, "cuda", seed)


PARTS = 8  # of the sample, so that processes share it


@pytest.mark.parametrize("part", range(PARTS))
@each_tier
def test_sample(tier, part, seed):
    """Every two of the sample's factors meet in one of these calls."""
    verdict = Verdict()
    for number, case in enumerate(SAMPLE[part::PARTS]):
        if takes(tier, case):
            tensors, results = run_case(case, tier, seed + number)
            verdict.add(str(case), check(case, tensors, results))
    verdict.check()


@pytest.mark.parametrize("case", LONG, ids=str)
@each_tier
def test_long(tier, case, seed):
    if not takes(tier, case):
        pytest.skip("the tier does not take it")
    tensors, results = run_case(case, tier, seed)
    verdict = Verdict()
    verdict.add(str(case), check(case, tensors, results))
    verdict.check()


@pytest.mark.parametrize("dtype", [FP32, BF16, FP64], ids=str)
@each_tier
def test_layouts(tier, dtype, seed):
    """out and the gradients are in their inputs' order of strides; values do not depend on it."""
    if not takes_type(tier, dtype):
        pytest.skip("the tier does not take it")
    results = {}
    for layout in ("bhsd", "bshd", "qkv", "transposed"):
        case = Case(dtype, (70, 90), (64, 64), (2, 4, 2), "causal", layout=layout)
        tensors, results[layout] = run_case(case, tier, seed)
        for name in ("out", "dquery", "dkey", "dvalue"):
            result = results[layout][name]
            source = tensors[name.removeprefix("d") if name != "out" else "query"]
            rows = source if source.stride(-1) == 1 else source.contiguous()
            assert result.stride() == torch.empty_like(rows).stride(), (layout, name)
    for layout in ("bshd", "qkv", "transposed"):
        for name, value in results["bhsd"].items():
            assert same_bits(value, results[layout][name]), (layout, name)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@each_tier
def test_one_query_of_heads_that_share_keys(tier, dtype, generator):
    """As in decoding. Such heads may be computed together: each has the bits that it has alone, on
    the CPU those of its group."""
    if not takes_type(tier, dtype):
        pytest.skip("the tier does not take it")
    q = randn(generator, 3, 1, 8, 64, dtype=dtype).transpose(1, 2)
    k, v = (randn(generator, 3, 2, 300, 64, dtype=dtype) for _ in range(2))
    k[1, :, 290:], v[1, :, 290:] = torch.nan, torch.nan
    seen = torch.ones(3, 1, 1, 300, dtype=torch.bool, device=q.device)
    seen[1, ..., 290:] = False
    for options in (
        {"attn_mask": seen},
        {"attn_mask": randn(generator, 3, 8, 1, 300, dtype=dtype).masked_fill(~seen, -torch.inf)},
        {"attn_mask": seen.expand(3, 8, 1, 300), "causal": True, "softcap": 4.0},
        {"attn_mask": seen, "window": (100, None)},
        {"attn_mask": seen, "sink": randn(generator, 8, dtype=dtype)},
        {"attn_mask": seen, "alibi_slopes": randn(generator, 3, 8).abs()},
    ):
        with forced("auto" if tier == "cpu" else tier), unwritten_is_nan(q.device, q.numel()):
            out, lse = fn.flash_attention(q, k, v, return_lse=True, **options)
        assert out.isfinite().all()
        of_head = dict(options)
        step = 4 if tier == "cpu" else 1
        for head in range(0, 8, step):
            at, of = slice(head, head + step), slice(head // 4, head // 4 + 1)
            for name in ("attn_mask", "alibi_slopes"):
                if name in options and options[name].size(1) == 8:
                    of_head[name] = options[name][:, at]
            if "sink" in options:
                of_head["sink"] = options["sink"][at]
            with forced("auto" if tier == "cpu" else tier):
                alone = fn.flash_attention(q[:, at], k[:, of], v[:, of], return_lse=True, **of_head)
            assert same_bits(out[:, at], alone[0]), (head, options)
            assert same_bits(lse[:, at], alone[1]), (head, options)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@each_tier
def test_expanded_tensors(tier, dtype, generator):
    """Strides of 0, over the batch and over rows, are read as they are."""
    if not takes_type(tier, dtype):
        pytest.skip("the tier does not take it")
    q = randn(generator, 3, 4, 70, 64, dtype=dtype)
    k = randn(generator, 1, 2, 90, 64, dtype=dtype).expand(3, 2, 90, 64)
    v = randn(generator, 3, 2, 1, 64, dtype=dtype).expand(3, 2, 90, 64)
    with forced("auto" if tier == "cpu" else tier):
        for a, b, c in ((q, k, v), (q[:1].expand(3, 4, 70, 64), k, v)):
            copies = [t.clone(memory_format=torch.contiguous_format) for t in (a, b, c)]
            out = fn.flash_attention(a, b, c, causal=True)
            assert same_bits(out, fn.flash_attention(*copies, causal=True))
            dout = randn(generator, 1, 4, 1, 64, dtype=dtype).expand(3, 4, 70, 64)
            gradients = []
            for tensors, of_out in ((a, b, c), dout), (copies, dout.contiguous()):
                leaves = [t.detach().requires_grad_() for t in tensors]
                result = fn.flash_attention(*leaves, causal=True)
                gradients.append(torch.autograd.grad(result, leaves, of_out))
            for strided, copied in zip(*gradients, strict=True):
                assert same_bits(strided, copied)


def mask_layouts(mask):
    """The same mask at other addresses and strides."""
    wide = mask.new_empty(*mask.shape[:3], mask.size(3) + 3)
    wide[..., 1:-2] = mask
    return {
        "rows in packs": torch.nn.functional.pad(mask, (0, -mask.size(3) % 16))[
            ..., : mask.size(3)
        ],
        "slices": wide[..., 1:-2],
        "transposed": mask.mT.contiguous().mT,
        "every other": mask.repeat_interleave(2, 3)[..., ::2],
        "expanded": mask.expand(2, 4, -1, -1),
    }


@pytest.mark.parametrize("dtype", [torch.bool, FP32, BF16], ids=str)
@pytest.mark.parametrize("keys", [90, 301])
@each_tier
def test_layouts_of_a_mask(tier, keys, dtype, generator):
    """Results do not depend on a mask's strides, and the mask is as before."""
    if not takes_type(tier, BF16):
        pytest.skip("the tier does not take it")
    shapes = ((4, 70), (2, keys), (2, keys), (4, 70))
    q, k, v, dout = (randn(generator, 2, h, rows, 64, dtype=BF16) for h, rows in shapes)
    for heads in (1, 4):
        mask = randn(generator, 1, heads, 70, keys, dtype=FP32)
        mask = mask > -1 if dtype == torch.bool else mask.to(dtype)
        results = {}
        with forced("auto" if tier == "cpu" else tier):
            for name, layout in {"contiguous": mask, **mask_layouts(mask)}.items():
                leaves = [t.detach().requires_grad_() for t in (q, k, v)]
                out = fn.flash_attention(*leaves, attn_mask=layout)
                results[name] = (out, *torch.autograd.grad(out, leaves, dout))
                assert torch.equal(layout, mask.expand_as(layout)), name
        for name, result in results.items():
            for one, other in zip(result, results["contiguous"], strict=True):
                assert same_bits(one, other), (name, heads)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@each_tier
def test_rows_that_overlap(tier, dtype, generator):
    """Windows over a signal, of fewer rows than columns: results have their columns in order."""
    if not takes_type(tier, dtype):
        pytest.skip("the tier does not take it")
    signal = randn(generator, 84, dtype=dtype)
    case, results = Case(dtype, (21, 21), (64, 64), (1, 1, 1)), []
    for x in (signal.unfold(0, 64, 1), signal.unfold(0, 64, 1).contiguous()):
        tensors = dict.fromkeys(("query", "key", "value", "dout"), x[None, None])
        tensors["dlse"] = x.new_zeros(1, 1, 21, dtype=FP32)
        with forced("auto" if tier == "cpu" else tier):
            results.append(run(attend(case), case, tensors))
    for name, value in results[0].items():
        assert same_bits(value, results[1][name]), name
        assert value.stride() == results[1][name].stride(), name


@each_tier
def test_batch_invariance(tier, generator):
    """A sequence alone, in a batch, beside other heads, and packed: the same bits. Repeats too."""
    device = "cpu" if tier == "cpu" else "cuda"
    for dtype in (FP32, BF16):
        if not takes_type(tier, dtype):
            continue
        q, dout = (randn(generator, 3, 4, 70, 64, dtype=dtype) for _ in range(2))
        k, v = (randn(generator, 3, 2, 90, 64, dtype=dtype) for _ in range(2))

        def results(*tensors, dout, function=fn.flash_attention):
            leaves = [t.detach().clone().requires_grad_() for t in tensors]
            out, lse = function(*leaves, causal=True, return_lse=True)
            return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)]

        with forced("auto" if tier == "cpu" else tier):
            whole = results(q, k, v, dout=dout)
            for _ in range(50 if tier != "cpu" else 10):
                for a, b in zip(results(q, k, v, dout=dout), whole, strict=True):
                    assert same_bits(a, b)
            for b in range(3):
                one = slice(b, b + 1)
                alone = results(q[one], k[one], v[one], dout=dout[one])
                for a, of_batch in zip(alone, whole, strict=True):
                    assert same_bits(a, of_batch[one])
            group = results(q[:, 2:], k[:, 1:], v[:, 1:], dout=dout[:, 2:])
            heads = [slice(2, None), slice(2, None), slice(2, None), slice(1, None), slice(1, None)]
            for a, of_all, part in zip(group, whole, heads, strict=True):
                assert same_bits(a, of_all[:, part])
            # Packed, behind another sequence and a row of none.
            pack = [
                torch.cat([t[2, :, :9].transpose(0, 1), t[0].transpose(0, 1)]) for t in (q, k, v)
            ]
            cu_q, cu_k = (
                torch.tensor([1, 9, 9 + n], dtype=torch.int32, device=device) for n in (70, 90)
            )

            def varlen(*leaves, cu_q=cu_q, cu_k=cu_k, **options):
                return fn.flash_attention_varlen(*leaves, cu_q, cu_k, 90, 90, **options)

            douts = torch.cat([dout[2, :, :9].transpose(0, 1), dout[0].transpose(0, 1)])
            packed = results(*pack, dout=douts, function=varlen)
            packed[1] = packed[1].transpose(0, 1)
            for name, a, of_all in zip(
                ("out", "lse", "dq", "dk", "dv"), packed, whole, strict=True
            ):
                of_sequence = a[9:].transpose(0, 1)
                assert same_bits(of_sequence, of_all[0]), name
            assert packed[0][0].eq(0).all() and packed[1][0].eq(-torch.inf).all()
            assert all(t[0].eq(0).all() for t in packed[2:])


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_do_not_matter_within_a_sequence(threads, seed):
    """Each block of queries is one thread's work."""
    case = Case(FP32, (150, 150), (64, 64), (1, 1, 1))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        _, alone = run_case(case, "cpu", seed)
        tensors = tensors_of(case, rand_generator("cpu", seed))
        twice = {n: torch.cat([t, t]) for n, t in tensors.items()}
        both = run(attend(case), case, twice)
    finally:
        torch.set_num_threads(before)
    for name, value in alone.items():
        assert same_bits(value, both[name][:1]) and same_bits(value, both[name][1:]), name


@cuda
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs compute capability 9.0",
)
def test_which_tier_makes_gradients(generator):
    """Hopper's kernels, whatever the sizes, unless a mask does not fit."""

    def tiers(dim, batch=1, length=70, **options):
        tensors = (randn(generator, batch, 2, length, dim, dtype=BF16) for _ in range(3))
        leaves = [t.requires_grad_() for t in tensors]
        out = fn.flash_attention(*leaves, **options)
        names = kernels_of([lambda: torch.autograd.grad(out, leaves, torch.ones_like(out))])
        return {tier for tier in ("hopper", "portable") if any(tier in name for name in names)}

    for dim in (64, 72, 128, 160, 256):
        assert tiers(dim) == tiers(dim, 3, 1000) == {"hopper"}
        assert tiers(dim, causal=True) == tiers(dim, window=(9, 0)) == {"hopper"}
        assert tiers(dim, softcap=30.0, alibi_slopes=torch.ones(2, device="cuda")) == {"hopper"}
        of_mask = {"hopper" if dim <= 192 else "portable"}
        assert tiers(dim, attn_mask=randn(generator, 70, 70, dtype=BF16)) == of_mask
        assert tiers(dim, attn_mask=randn(generator, 70, 70) > 0) == of_mask
        assert tiers(dim, attn_mask=randn(generator, 70, 70)) == {"portable"}
        of_dropout = {"hopper" if dim <= 128 else "portable"}
        assert tiers(dim, dropout_p=0.5) == tiers(dim, dropout_p=0.5, softcap=9.0) == of_dropout

    def of_forward(**options):
        names = kernels_of([lambda: fn.flash_attention(*tensors, dropout_p=0.5, **options)])
        return {tier for tier in ("hopper", "portable") if any(tier in name for name in names)}

    for dim in (64, 72, 128, 160):
        tensors = [randn(generator, 2, 2, 70, dim, dtype=BF16) for _ in range(3)]
        seen = randn(generator, 2, 1, 70, 70) > 0
        of_dropout = {"hopper" if dim <= 128 else "portable"}
        assert of_forward() == of_forward(attn_mask=seen[..., :1, :]) == of_dropout
        assert of_forward(attn_mask=seen) == {"portable"}


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 1, 1, 512), (2, 1, 512, 1)], ids=str)
def test_gradient_of_a_mask_that_serves_many_scores_on_the_cpu(shape, generator):
    """Up to two million of them, most of one sign."""
    q, k, v, dout = (randn(generator, 2, 4, 512, 16) + n for n in (0, 0, 1, 0.5))
    sink, gradients = torch.full((4,), 6.0), []
    for function, dtype in ((fn.flash_attention, FP32), (compose, FP64)):
        tensors = [t.to(dtype) for t in (q, k, v)]
        mask = torch.zeros(shape, dtype=dtype, requires_grad=True)
        options = {"attn_mask": mask, "sink": sink.to(dtype), "window": (None, 0)}
        out = function(*tensors, **options)
        out = out[0] if isinstance(out, tuple) else out
        gradients += torch.autograd.grad(out, mask, dout.to(dtype))
    error = (gradients[0].double() - gradients[1]).abs().max()
    assert error <= 6 * 2**-24 * gradients[1].abs().max()


@each_tier
def test_rows_that_see_nothing(tier, seed):
    """Before the first key, behind a mask, without keys: 0, and -inf or the sink; no gradients."""
    device = "cpu" if tier == "cpu" else "cuda"
    for dtype in (FP32, BF16):
        if not takes_type(tier, dtype):
            continue
        for sink in ("none", "same"):
            case = Case(dtype, (40, 24), (64, 64), (2, 2, 2), "causal", "bool", sink=sink, lse=True)
            tensors = tensors_of(case, rand_generator(device, seed))
            tensors["attn_mask"][1, :, 30] = False
            tensors["attn_mask"][0, :, :, 5] = False
            with forced("auto" if tier == "cpu" else tier):
                results = run(attend(case), case, tensors)
            for batch, row in ((0, 0), (0, 15), (1, 30)):
                assert results["out"][batch, :, row].eq(0).all()
                expected = tensors["sink"].float() if sink == "same" else -torch.inf
                lse = results["lse"][batch, :, row].float()
                assert torch.allclose(lse, torch.as_tensor(expected, device=device)), (
                    lse,
                    expected,
                )
                assert results["dquery"][batch, :, row].eq(0).all()
            assert results["dkey"][0, :, 5].eq(0).all() and results["dvalue"][0, :, 5].eq(0).all()
            ratios = check(case, tensors, results)
            assert all(ratio <= 1 for ratio in ratios.values()), ratios


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@each_tier
def test_the_lowest_sink(tier, dtype, generator):
    """As one that is switched off: its gradient is a number, also where a query sees nothing, whose
    log-sum-exp is the sink."""
    if not takes_type(tier, dtype):
        pytest.skip("the tier does not take it")
    case = Case(dtype, (300, 24), (64, 64), (40, 2, 2), "causal", sink="same", lse=True)
    tensors = tensors_of(case, generator)
    tensors["sink"].fill_(torch.finfo(tensors["sink"].dtype).min)
    with forced("auto" if tier == "cpu" else tier):
        results = run(attend(case), case, tensors)
    for name in ("out", "dquery", "dkey", "dvalue", "dsink"):
        assert results[name].isfinite().all(), name
    lse = results["lse"][:, :, : 300 - 24]  # before the first key
    assert torch.allclose(lse, torch.full_like(lse, tensors["sink"][0].item())), lse


@each_tier
def test_exponents_beyond_fp32(tier, generator):
    """A score whose exponent of 2 is beyond fp32 gives the value of its key, or NaN: not 0. Other
    rows are as they were."""
    device = "cpu" if tier == "cpu" else "cuda"
    if not takes_type(tier, BF16):
        pytest.skip("the tier does not take it")
    q, k, v = (randn(generator, 1, 1, 200, 64, dtype=BF16) for _ in range(3))
    with forced("auto" if tier == "cpu" else tier):
        for key in (3, 150):  # its tile is the last or the first that the kernels see
            large_q, large_k = q.clone(), k.clone()
            large_q[..., 0], large_k[..., 0] = 0.0, 0.0
            expected = fn.flash_attention(large_q, large_k, v, scale=1.0)
            large_q[..., 77, :], large_k[..., key, 0] = 0.0, 2.0**63
            large_q[..., 77, 0] = 1.75 * 2.0**64  # 3.0e38, and 4.3e38 as an exponent of 2
            out = fn.flash_attention(large_q, large_k, v, scale=1.0)
            row = out[..., 77, :]
            assert row.isnan().all() or same_bits(row, v[..., key, :].contiguous()), row
            others = torch.arange(200, device=device) != 77
            assert same_bits(out[..., others, :], expected[..., others, :])


@each_tier
def test_dropout_that_keeps_little_in_fp16(tier, generator):
    """Probabilities times 1 / (1 - p) may be beyond fp16."""
    device = "cpu" if tier == "cpu" else "cuda"
    if not takes_type(tier, FP16):
        pytest.skip("the tier does not take it")
    q, k, v = (randn(generator, 2, 4, 300, 64, dtype=FP16) for _ in range(3))
    # Scores grow with the keys: exponents are up to 8 larger than what they are relative to.
    q[..., 0], k[..., 0] = 1.0, torch.arange(300, device=device) * 0.25
    with forced("auto" if tier == "cpu" else tier):
        out = fn.flash_attention(q, k, v, dropout_p=0.999)
    assert out.isfinite().all()


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@each_tier
def test_one_key(tier, dtype, seed):
    """Its probability is 1: out is the value, and scores have no gradient."""
    case = Case(dtype, (1, 1), (64, 64), (2, 4, 4))
    if not takes(tier, case):
        pytest.skip("the tier does not take it")
    tensors, results = run_case(case, tier, seed)
    assert same_bits(results["out"], tensors["value"].contiguous())
    assert same_bits(results["dvalue"], tensors["dout"])
    # dout . value less dout . out, each a sum of 64 products: roundings alone.
    products = (tensors["dout"].double() * tensors["value"].double()).abs().sum(-1)
    limit = 8 * 2**-24 * products.max() * tensors["key"].abs().max()
    assert results["dquery"].abs().max() <= limit


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("batch", [0, 2])
def test_empty(sizes, batch, device):
    q, k, v = (
        torch.randn(batch, 2, n, 8, device=device, requires_grad=True)
        for n in (sizes[0], sizes[1], sizes[1])
    )
    sink = torch.randn(2, device=device, requires_grad=True)
    out, lse = fn.flash_attention(q, k, v, sink=sink, return_lse=True)
    assert out.shape == q.shape and lse.shape == q.shape[:3] and out.eq(0).all()
    grads = torch.autograd.grad(out, (q, k, v, sink), torch.ones_like(out))
    for gradient, leaf in zip(grads, (q, k, v, sink), strict=True):
        assert gradient.shape == leaf.shape and gradient.eq(0).all()


def test_gradient_of_the_lse_of_one_key_beside_large_values():
    """P (D - delta) is the lse's gradient alone then, however large D and its sum are. On a CPU:
    CUDA's kernels have one fp32 number for the sum and the lse's gradient."""
    generator = rand_generator("cpu", 1)
    q, k, v, dout = (randn(generator, 1, 8, 1, 64, dtype=FP32) for _ in range(4))
    dlse = randn(generator, 1, 8, 1, dtype=FP32)
    q.requires_grad_()
    results = fn.flash_attention(q, k, 1e6 * v, return_lse=True)
    [dquery] = torch.autograd.grad(results, q, (dout, dlse))
    # Two products, rounded to fp32: 1.2e-7 each.
    torch.testing.assert_close(dquery, dlse[..., None] * k / 8, rtol=2.4e-7, atol=0)


@pytest.mark.parametrize("shape", [(0, 5, 8), (2, 0, 5, 8)], ids=str)  # of three, the batch is 0
def test_no_heads(shape, device):
    q = torch.zeros(shape, device=device, requires_grad=True)
    for causal in (False, True):
        out = fn.scaled_dot_product_attention(q, q, q, is_causal=causal)
        assert out.shape == shape and torch.autograd.grad(out.sum(), q)[0].shape == shape

        def of_query(x, causal=causal):
            return fn.scaled_dot_product_attention(x, q, q, is_causal=causal).sum()

        assert torch.func.grad(of_query)(q.detach()).shape == shape
        [first] = torch.autograd.grad(of_query(q), q, create_graph=True)
        assert torch.autograd.grad(first.sum(), q)[0].shape == shape


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@each_tier
def test_hidden_keys_may_hold_anything(tier, poison, seed):
    """Padding, keys that no row sees, and a neighbour in a packed tensor."""
    device = "cpu" if tier == "cpu" else "cuda"
    for dtype, softcap in itertools.product((FP32, BF16, FP16), (0.0, 4.0)):
        case = Case(dtype, (70, 90), (64, 64), (2, 4, 2), "both", "bool keys", softcap=softcap)
        if not takes(tier, case):
            continue
        tensors = tensors_of(case, rand_generator(device, seed))
        tensors["attn_mask"][:, ..., 60:] = False
        poisoned = {n: t.clone() for n, t in tensors.items()}
        for name in ("key", "value"):
            poisoned[name][:, :, 60:] = poison
            poisoned[name][:, :, :15] = poison  # more than 5 before the first query's place
        with forced("auto" if tier == "cpu" else tier):
            clean, dirty = (run(attend(case), case, t) for t in (tensors, poisoned))
            for name, value in clean.items():
                assert same_bits(value, dirty[name]), name
            q, k, v = (
                tensors[n][0].transpose(0, 1).contiguous() for n in ("query", "key", "value")
            )
            cu_q = torch.tensor([0, 30, 70], dtype=torch.int32, device=device)
            cu_k = torch.tensor([0, 45, 90], dtype=torch.int32, device=device)
            results = []
            for fill in (0.0, poison):
                leaves = [t.clone() for t in (q, k, v)]
                leaves[1][45:], leaves[2][45:] = fill, fill
                leaves = [t.requires_grad_() for t in leaves]
                out = fn.flash_attention_varlen(*leaves, cu_q, cu_k, 40, 45)
                grads = torch.autograd.grad(out[:30], leaves, torch.ones_like(out[:30]))
                results.append([out[:30].detach(), grads[0][:30], grads[1][:45], grads[2][:45]])
            for a, b in zip(*results, strict=True):
                assert same_bits(a, b)


@pytest.mark.parametrize("hides", ["tiles", "rows", "all"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("mask", ["float", "fp32"])
@each_tier
def test_the_lowest_number_hides_as_minus_infinity(tier, mask, dtype, hides, generator):
    """Whole tiles of keys from some rows, some rows whole, and all rows; keys hidden from all rows
    hold a NaN."""
    if not takes_type(tier, dtype):
        pytest.skip("the tier does not take it")
    case = Case(dtype, (200, 330), (64, 64), (2, 4, 2), "causal", "float", lse=True)
    tensors = tensors_of(case, generator)
    given = tensors["attn_mask"] = tensors["attn_mask"].to(FP32 if mask == "fp32" else dtype)
    hidden = torch.zeros_like(given, dtype=torch.bool)
    hidden[:, :, 20:90, 64:256] = True
    hidden[:, :, :, 128:192] = True
    hidden[:, :, 100:170] |= hides == "rows"
    hidden |= hides == "all"
    with forced("auto" if tier == "cpu" else tier):
        given[hidden] = -torch.inf
        expected = run(attend(case), case, tensors)
        given[hidden] = torch.finfo(given.dtype).min
        results = run(attend(case), case, tensors)
        ratios = check(case, tensors, results)
        assert all(ratio <= 1 for ratio in ratios.values()), ratios
        for name in ("key", "value"):
            tensors[name][:, :, 128:192] = torch.nan
        poisoned = run(attend(case), case, tensors)
    for name, value in results.items():
        assert same_bits(value, expected[name]), name
        assert same_bits(value, poisoned[name]), name
        if hides == "all":
            assert value.eq(-torch.inf if name == "lse" else 0).all(), name


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("mask", ["bool", "float", "float keys", "fp32"])
@pytest.mark.parametrize("tier", [pytest.param(t, marks=cuda) for t in ("portable", "hopper")])
def test_masks_of_several_tiles(tier, mask, dim, seed):
    """Values; the same bits wherever the mask lies, and whatever a key holds that it hides."""
    for size in ((300, 331), (390, 400)):
        case = Case(BF16, size, (dim, dim), (2, 4, 2), "causal", mask, softcap=5.0 * (dim == 96))
        tensors = tensors_of(case, rand_generator("cuda", seed))
        given = tensors["attn_mask"]
        hidden = slice(20, 290)  # whole tiles and parts
        given[..., hidden] = False if mask == "bool" else -torch.inf
        with forced(tier), unwritten_is_nan("cuda", tensors["query"].numel() * 2):
            results = run(attend(case), case, tensors)
            verdict = Verdict()
            verdict.add(str(case), check(case, tensors, results))
            verdict.check()
            padded = F.pad(given, (3, 5, 1, 0))[..., 1:, 3:-5]
            for other in (padded, given.mT.contiguous().mT):
                for name, value in run(attend(case), case, tensors | {"attn_mask": other}).items():
                    assert same_bits(value, results[name]), name
            for name in ("key", "value"):
                tensors[name][:, :, hidden] = float("nan")
            for name, value in run(attend(case), case, tensors).items():
                assert same_bits(value, results[name]), name


@pytest.mark.parametrize("dim", [64, 128, 192])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=cuda)])
def test_nans_that_a_mask_hides_in_some_of_many_tiles(device, dim, generator):
    """A block has several tiles of queries, and does some of them again, the last one too."""
    heads = 600 if device == "cuda" else 6
    query, key, value = (
        randn(generator, 1, heads, rows, dim, dtype=BF16) for rows in (70, 150, 150)
    )
    mask = randn(generator, 1, heads, 70, 150, dtype=BF16)
    mask[..., 20:60] = -torch.inf
    expected = fn.flash_attention(query, key, value, attn_mask=mask, return_lse=True)
    key[:, ::3, 20:60] = torch.nan
    value[:, -2:, 20:60] = torch.inf
    for result, clean in zip(
        fn.flash_attention(query, key, value, attn_mask=mask, return_lse=True),
        expected,
        strict=True,
    ):
        assert same_bits(result, clean)


@pytest.mark.parametrize("dim", [40, 96, 128])
@pytest.mark.parametrize("tier", [pytest.param(t, marks=cuda) for t in ("portable", "hopper")])
def test_gradients_of_masks(tier, dim, generator):
    """Of several tiles, each of which sums over the sequences and heads that it serves."""
    for dtype, size, band, of_mask in (
        (BF16, (300, 331), "full", (1, 4)),
        (FP16, (150, 400), "causal", (3, 1)),
        (BF16, (400, 150), "left 17", (1, 1)),
        (BF16, (257, 264), "both", (3, 4)),
    ):
        options = {"softcap": 5.0, "alibi": "batch"} if band == "both" else {"lse": True}
        case = Case(dtype, size, (dim, dim - 8), (3, 4, 2), band, "float", **options)
        tensors = tensors_of(case, generator)
        tensors["attn_mask"] = mask = randn(generator, *of_mask, *size, dtype=dtype)
        mask[..., 20:35] = -torch.inf
        with forced(tier), unwritten_is_nan("cuda", mask.numel() * 2):
            results = run(attend(case), case, tensors)
            verdict = Verdict()
            verdict.add(str(case), check(case, tensors, results))
            verdict.check()
            for name in ("key", "value"):
                tensors[name][:, :, 20:35] = float("nan")
            spoiled = run(attend(case), case, tensors)["dattn_mask"]
        assert same_bits(spoiled, results["dattn_mask"])
    mask = randn(generator, 1, 1, 70, 70, dtype=BF16).requires_grad_()
    none = torch.ones(0, 2, 70, 64, device="cuda", dtype=BF16, requires_grad=True)
    with forced(tier):
        out = fn.flash_attention(none, none, none, attn_mask=mask)
        assert torch.autograd.grad(out, mask, torch.ones_like(out))[0].eq(0).all()


def mask_of(generator, seen, dtype, has_numbers, infinite=False):
    """`seen` as a mask of the dtype: of numbers, or 0 without them, and the lowest one, or -inf,
    where it is False."""
    if dtype == torch.bool:
        return seen
    numbers = randn(generator, *seen.shape, dtype=dtype) * has_numbers
    return numbers.masked_fill(~seen, -torch.inf if infinite else torch.finfo(dtype).min)


def masks_of_keys(generator, batch, heads, keys):
    """{name: (batch, 1 or heads, 1, keys), True where a key takes part}."""
    at = torch.arange(keys, device=generator.device)
    length = (at.new_tensor([keys - 5, 130, keys])[:, None] * 9 // 10).view(batch, 1, 1, 1)
    one = torch.ones(batch, 1, 1, keys, dtype=torch.bool, device=generator.device)
    one[1] = False
    return {
        "behind": at < length,
        "before": at >= length - 100,
        "a gap of tiles": ((at < 60) | (at > 400)).expand(batch, 1, 1, keys),
        "holes": randn(generator, batch, 1, 1, keys) > 0,
        "of heads": (randn(generator, batch, heads, 1, keys) > 0) & (at > 200),
        "a whole sequence": one,
    }


@pytest.mark.parametrize("band", ["full", "causal", "both"])
@pytest.mark.parametrize("dim", [64, 96, 128, 192])
@pytest.mark.parametrize("dtype", [torch.bool, BF16, FP32], ids=str)
@pytest.mark.parametrize("tier", [pytest.param(t, marks=cuda) for t in ("portable", "hopper")])
def test_masks_of_keys(tier, dtype, dim, band, generator):
    """Values, twice the same bits, whatever a hidden key holds."""
    for heads in (4, 2):
        case = Case(BF16, (300, 700), (dim, dim), (3, 4, heads), band, "bool keys")
        tensors = tensors_of(case, generator)
        for name, seen in masks_of_keys(generator, 3, 4, 700).items():
            has_numbers = name in ("holes", "of heads")
            mask = mask_of(generator, seen, dtype, has_numbers, infinite=name == "before")
            given = tensors | {"attn_mask": mask}
            verdict = Verdict()
            with forced(tier), unwritten_is_nan("cuda", tensors["query"].numel() * 2):
                results = run(attend(case), case, given)
                verdict.add(f"{case} {name}", check(case, given, results))
                verdict.check()
                hidden = ~seen.any(1, keepdim=True).mT
                for poisoned in ("key", "value"):
                    given[poisoned] = given[poisoned].masked_fill(hidden, float("nan"))
                for what, value in run(attend(case), case, given).items():
                    assert same_bits(value, results[what]), (name, what)


def masks_of_pairs(generator, batch, queries, keys):
    """{name: (1 or batch, 1, queries, keys), True where a query sees a key}."""
    i = torch.arange(queries, device=generator.device)[:, None]
    j = torch.arange(keys, device=generator.device)
    length = j.new_tensor([keys - 5, 130, keys]).view(batch, 1, 1, 1)
    causal = (j <= i + keys - queries)[None, None]
    documents = (i + keys - queries) // 190 == j // 190
    return {
        "causal": causal,
        "causal, padded behind": causal & (j < length),
        "causal, padded before": causal & (j >= keys - length),
        "documents": documents & causal,
        "a window": (causal & (j > i + keys - queries - 70)).expand(batch, 1, queries, keys),
        "a prefix": (causal | (j < 200)) & (j < length),
        "a gap of queries": causal & ((i < 100) | (i > 230)),
        "holes": (randn(generator, batch, 1, queries, keys) > 0) & (j > 140),
        "blocks": blocks(generator, batch, queries, keys),
    }


def blocks(generator, batch, queries, keys, shown=0.5):
    """A mask of random blocks, 64 queries by 128 keys, so that whole tiles are hidden: those of a
    row of tiles, and of a column, have gaps."""
    shape = (batch, 1, -(-queries // 64), -(-keys // 128))
    seen = torch.rand(shape, generator=generator, device=generator.device) < shown
    return seen.repeat_interleave(64, 2).repeat_interleave(128, 3)[..., :queries, :keys]


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bool, BF16, FP32], ids=str)
@pytest.mark.parametrize("tier", [pytest.param(t, marks=cuda) for t in ("portable", "hopper")])
def test_masks_that_heads_share(tier, dtype, dim, generator):
    """Values, and the same bits as with the mask repeated for each head, whatever a key holds that
    no query sees."""
    for size, heads in (((700, 700), 4), ((300, 701), 2)):
        case = Case(
            BF16, size, (dim, dim), (3, 4, heads), "full", "bool", softcap=9.0 * (heads > 2)
        )
        tensors = tensors_of(case, generator)
        for name, seen in masks_of_pairs(generator, 3, *size).items():
            mask = mask_of(generator, seen, dtype, name in ("holes", "documents"))
            given = tensors | {"attn_mask": mask}
            verdict = Verdict()
            with forced(tier), unwritten_is_nan("cuda", tensors["query"].numel() * 2):
                results = run(attend(case), case, given)
                verdict.add(f"{case} {name}", check(case, given, results))
                verdict.check()
                hidden = ~seen.any(2, keepdim=True).mT
                for poisoned in ("key", "value"):
                    given[poisoned] = given[poisoned].masked_fill(hidden, float("nan"))
                given["attn_mask"] = mask.expand(-1, 4, -1, -1).contiguous()
                for what, value in run(attend(case), case, given).items():
                    if what != "dattn_mask":
                        assert same_bits(value, results[what]), (name, what)


@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("tier", [pytest.param(t, marks=cuda) for t in ("portable", "hopper")])
def test_tiles_that_a_mask_hides_keep_the_order_of_the_sums(tier, dim, generator):
    """Values, and 50 times the same bits: on Hopper a block waits for the tiles of keys before its
    own that the mask shows, whichever lie between them."""
    case = Case(BF16, (2048, 2048), (dim, dim), (2, 8, 8), "full", "bool")
    mask = blocks(generator, 2, 2048, 2048, shown=0.3)
    tensors = tensors_of(case, generator) | {"attn_mask": mask}
    verdict = Verdict()
    with forced(tier), unwritten_is_nan("cuda", tensors["query"].numel() * 2):
        results = run(attend(case), case, tensors)
        verdict.add(str(case), check(case, tensors, results))
        verdict.check()
        for _ in range(49):
            for what, value in run(attend(case), case, tensors).items():
                assert same_bits(value, results[what]), what


@pytest.mark.parametrize("dim", [64, 128, 192])
@pytest.mark.parametrize("mask", ["shows all", "holes", "added"])
@pytest.mark.parametrize("tier", [pytest.param(t, marks=cuda) for t in ("portable", "hopper")])
def test_a_nan_of_dout_stays_in_its_row(tier, mask, dim, generator):
    """In calls of many tiles for each multiprocessor, of which each is done a second time."""
    q, k, v, dout = (randn(generator, 64, 16, 128, dim, dtype=BF16) for _ in range(4))
    seen = randn(generator, 64, 1, 128, 128) > (-9 if mask == "shows all" else 0)
    given = randn(generator, 64, 1, 128, 128, dtype=BF16) if mask == "added" else seen
    q.requires_grad_()
    found = []
    for spoiled in (0.0, float("nan")):
        dout[:, :, 5] = spoiled
        with forced(tier):
            out = fn.flash_attention(q, k, v, attn_mask=given)
            (dq,) = torch.autograd.grad(out, q, dout)
        found.append(torch.cat((dq[:, :, :5], dq[:, :, 6:]), 2))
    assert same_bits(*found)


def unpacked(tensor, offsets, b):
    return tensor[offsets[b] : offsets[b + 1]].transpose(0, 1)[None]


@pytest.mark.parametrize("dtype", [FP32, BF16, FP64], ids=str)
@each_tier
def test_packed_sequences(tier, dtype, generator):
    """Each as it is by itself: empty ones, more queries than keys and the reverse, all options."""
    if not takes_type(tier, dtype):
        pytest.skip("the tier does not take it")
    device = "cpu" if tier == "cpu" else "cuda"
    at_q, at_k = [2, 2, 35, 40, 170, 171], [0, 20, 20, 60, 61, 200]
    cu_q, cu_k = (torch.tensor(c, dtype=torch.int32, device=device) for c in (at_q, at_k))
    q, dout = (randn(generator, 175, 4, 64, dtype=dtype).requires_grad_() for _ in range(2))
    k, v = (randn(generator, 203, 2, 64, dtype=dtype).requires_grad_() for _ in range(2))
    sink = randn(generator, 4, dtype=dtype).requires_grad_()
    slopes = randn(generator, 5, 4).abs() / 8
    options = {"causal": True, "window": (50, None), "softcap": 4.0, "return_lse": True}
    with forced("auto" if tier == "cpu" else tier), unwritten_is_nan(device, q.numel() * 2):
        out, lse = fn.flash_attention_varlen(
            q, k, v, cu_q, cu_k, 3, 5, sink=sink, alibi_slopes=slopes, **options
        )  # the hints are too small
        grads = torch.autograd.grad(out, (q, k, v, sink), dout)
        dsink = torch.zeros(4, dtype=FP64, device=device)
        for b in range(5):
            parts = [unpacked(t, at, b) for t, at in ((q, at_q), (k, at_k), (v, at_k))]
            parts = [t.detach().requires_grad_() for t in parts]
            of_sink = sink.detach().double().requires_grad_()
            one, one_lse = fn.flash_attention(
                *parts, sink=of_sink.to(dtype), alibi_slopes=slopes[b], **options
            )
            assert same_bits(one, unpacked(out, at_q, b))
            assert same_bits(one_lse[0], lse[:, at_q[b] : at_q[b + 1]])
            *of_parts, of_this_sink = torch.autograd.grad(
                one, (*parts, of_sink), unpacked(dout, at_q, b)
            )
            for gradient, whole, at in zip(of_parts, grads, (at_q, at_k, at_k), strict=False):
                assert same_bits(gradient, unpacked(whole, at, b))
            dsink += of_this_sink
    # Each sequence's share is rounded to the dtype here, and not in the packed call.
    u = {FP32: 2**-24, BF16: 2**-8, FP64: 2**-53}[dtype]
    assert (dsink - grads[3].double()).abs().max() <= 64 * u * (1 + dsink.abs().max())
    for tensor, at in ((out, at_q), (grads[0], at_q), (grads[1], at_k), (grads[2], at_k)):
        assert tensor[: at[0]].eq(0).all() and tensor[at[-1] :].eq(0).all()
    assert lse[:, :2].eq(-torch.inf).all() and lse[:, 171:].eq(-torch.inf).all()


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@each_tier
def test_many_keys_without_queries(tier, dtype, generator):
    """Keys of a sequence without queries, and outside every sequence, have gradients of zero."""
    if not takes_type(tier, dtype):
        pytest.skip("the tier does not take it")
    device = "cpu" if tier == "cpu" else "cuda"
    at_q, at_k = [0, 5, 5, 10], [300, 350, 700, 750]
    cu_q, cu_k = (torch.tensor(c, dtype=torch.int32, device=device) for c in (at_q, at_k))
    q = randn(generator, 10, 4, 64, dtype=dtype).requires_grad_()
    k, v = (randn(generator, 1050, 2, 64, dtype=dtype).requires_grad_() for _ in range(2))
    with forced("auto" if tier == "cpu" else tier), unwritten_is_nan(device, k.numel() * 2):
        out = fn.flash_attention_varlen(q, k, v, cu_q, cu_k, 5, 350)
        gradients = torch.autograd.grad(out, (k, v), torch.ones_like(out))
    seen = torch.zeros(1050, dtype=torch.bool, device=device)
    seen[300:350] = seen[700:750] = True
    for gradient in gradients:
        assert gradient[~seen].eq(0).all()
        assert gradient[seen].isfinite().all() and gradient[seen].ne(0).any()


def test_offsets_are_clamped(device, generator):
    """They are not looked at on the host: what is wrong reads no memory of others."""
    q, k, v = (randn(generator, 10, 2, 8) for _ in range(3))
    wrong = torch.tensor([-3, 4, 99], dtype=torch.int32, device=device)
    right = torch.tensor([0, 4, 10], dtype=torch.int32, device=device)
    results = [fn.flash_attention_varlen(q, k, v, cu, cu, 10, 10) for cu in (wrong, right)]
    assert same_bits(*results)
    descending = torch.tensor([8, 2, -5, 12], dtype=torch.int32, device=device)
    offsets = descending, right[[0, 1, 2, 2]]
    assert fn.flash_attention_varlen(q, k, v, *offsets, 10, 10).isfinite().all()


@cuda
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_sequences_that_overlap_hang_nothing(dim, generator):
    """What they give is not defined. The backward pass waits for counts of a sequence's tiles."""
    q, k, v = (randn(generator, 640, 2, dim, dtype=BF16).requires_grad_() for _ in range(3))
    offsets = torch.tensor([0, 512, 128, 640], dtype=torch.int32, device=q.device)
    out = fn.flash_attention_varlen(q, k, v, offsets, offsets, 640, 640)
    torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    torch.cuda.synchronize()


@each_tier
@pytest.mark.parametrize("dim", [64, 96, 128, 192])
def test_a_query_that_sees_nothing_has_any_gradient(tier, dim, generator):
    """Causal with more queries than keys: a NaN in dout of a row before the first key is in no
    gradient."""
    q, dout = (randn(generator, 1, 2, 200, dim, dtype=BF16) for _ in range(2))
    k, v = (randn(generator, 1, 2, 100, dim, dtype=BF16) for _ in range(2))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    with forced("auto" if tier == "cpu" else tier):
        out = fn.flash_attention(*leaves, causal=True)
        expected = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        dout[:, :, [3, 30, 70, 99]] = torch.nan
        for a, b in zip(torch.autograd.grad(out, leaves, dout), expected, strict=True):
            assert same_bits(a, b)


@pytest.mark.parametrize("sink", ["none", "same"])
@pytest.mark.parametrize("softcap", [0.0, 4.0])
def test_a_query_that_sees_nothing_may_hold_anything_on_the_cpu(sink, softcap, generator):
    """And with softcap keys that are hidden from all."""
    case = Case(FP32, (70, 90), (64, 64), (2, 4, 2), "causal", "bool", softcap, sink)
    tensors = tensors_of(case, generator)
    tensors["attn_mask"][:, :, 30], tensors["attn_mask"][..., 60:] = False, False
    expected = run(attend(case), case, tensors)
    for name in ("query", "dout"):
        tensors[name][:, :, 30] = torch.nan
    for name in ("key", "value"):
        tensors[name][:, :, 60:] = torch.nan
    for name, value in run(attend(case), case, tensors).items():
        assert same_bits(value, expected[name]), name


@each_tier
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("options", [{}, {"softcap": 4.0}], ids=["plain", "softcap"])
def test_what_is_not_finite_stays_in_its_sequence(tier, packed, options, generator):
    """Tiles of a sequence reach into the next sequence or head, which has NaN everywhere."""
    rows, spoiled = (205, slice(70, 75)) if packed else (70, 1)
    size = (rows, 2, 64) if packed else (3, 2, rows, 64)
    q, k, v, dout = (randn(generator, *size, dtype=BF16) for _ in range(4))
    offsets = torch.tensor([0, 70, 75, 205], dtype=torch.int32, device=q.device)

    def run():
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        with forced("auto" if tier == "cpu" else tier):
            if packed:
                sizes = (offsets, offsets, 130, 130)
                out = fn.flash_attention_varlen(*leaves, *sizes, **options)
            else:
                out = fn.flash_attention(*leaves, **options)
            return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    expected = run()
    for t in (q, k, v, dout):
        t[spoiled] = torch.nan
    for a, b in zip(run(), expected, strict=True):
        assert a[spoiled].isnan().all()
        a[spoiled] = b[spoiled]
        assert same_bits(a, b)


class TestTorchsFunction:
    """scaled_dot_product_attention is torch's."""

    SHAPES = [
        ((5, 8), (7, 8), (7, 6)),
        ((3, 5, 8), (3, 7, 8), (3, 7, 6)),
        ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
        ((2, 4, 3, 5, 8), (2, 4, 3, 7, 8), (2, 4, 3, 7, 8)),
        ((2, 3, 5, 8), (1, 3, 7, 8), (1, 3, 7, 8)),
        ((1, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
        ((2, 3, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8)),
        ((2, 1, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
        ((2, 3, 5, 8), (3, 7, 8), (3, 7, 8)),
        ((3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
        ((2, 1, 3, 5, 8), (1, 4, 3, 7, 8), (4, 3, 7, 8)),
    ]

    @pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
    @pytest.mark.parametrize("shapes", SHAPES, ids=str)
    def test_shapes(self, shapes, causal, device, generator):
        q, k, v = (randn(generator, *s, dtype=FP64).requires_grad_() for s in shapes)
        ours, theirs = (
            f(q, k, v, is_causal=causal)
            for f in (fn.scaled_dot_product_attention, F.scaled_dot_product_attention)
        )
        assert ours.shape == theirs.shape
        dout = torch.randn_like(ours)
        torch.testing.assert_close(ours, theirs)
        for a, b in zip(
            torch.autograd.grad(ours, (q, k, v), dout),
            torch.autograd.grad(theirs, (q, k, v), dout),
            strict=True,
        ):
            torch.testing.assert_close(a, b)

    @pytest.mark.parametrize(
        "mask", [(5, 7), (1, 7), (5, 1), (4, 5, 7), (1, 5, 7), (2, 4, 5, 7), (2, 1, 1, 7), (7,)]
    )
    @pytest.mark.parametrize("boolean", [False, True], ids=["float", "bool"])
    def test_masks(self, mask, boolean, device, generator):
        q, k, v = (randn(generator, 2, 4, n, 8, dtype=FP64) for n in (5, 7, 7))
        mask = randn(generator, *mask, dtype=FP64)
        mask = mask > -1 if boolean else mask.requires_grad_()
        results = []
        for f in (fn.scaled_dot_product_attention, F.scaled_dot_product_attention):
            out = f(q, k, v, mask if mask.dim() > 1 else mask.expand(5, 7), scale=0.7)
            results.append([out])
            if not boolean:
                results[-1] += torch.autograd.grad(out.square().sum(), mask)
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)

    @pytest.mark.parametrize("mask", [(5, 7), (4, 5, 7), (3, 1, 5, 7), (2, 1, 1, 5, 7)], ids=str)
    def test_masks_of_more_dimensions(self, mask, device, generator):
        q, k, v = (randn(generator, 2, 3, 4, n, 8, dtype=FP64) for n in (5, 7, 7))
        mask = randn(generator, *mask, dtype=FP64)
        torch.testing.assert_close(
            fn.scaled_dot_product_attention(q, k, v, mask),
            F.scaled_dot_product_attention(q, k, v, mask),
        )

    @pytest.mark.parametrize("kv", [(2, 2), (1, 1), (2, 1), (4, 2)], ids=str)
    def test_enable_gqa(self, kv, device, generator):
        q = randn(generator, 2, 4, 5, 8, dtype=FP64)
        k, v = (randn(generator, 2, heads, 7, 8, dtype=FP64) for heads in kv)
        torch.testing.assert_close(
            fn.scaled_dot_product_attention(q, k, v, enable_gqa=True),
            F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        )

    @pytest.mark.parametrize("compiles", [False, True], ids=["", "compiled"])
    @pytest.mark.parametrize("bias", ["causal_upper_left", "causal_lower_right"])
    def test_causal_bias(self, bias, compiles, device, generator):
        torch._dynamo.reset()
        q, k, v = (randn(generator, 2, 4, n, 8) for n in (5, 7, 7))
        mask = getattr(torch.nn.attention.bias, bias)(5, 7)
        wanted = F.scaled_dot_product_attention(q, k, v, mask)
        for function in (fn.scaled_dot_product_attention, fn.flash_attention):
            if compiles:
                function = torch.compile(function, fullgraph=True, backend="aot_eager")
            torch.testing.assert_close(function(q, k, v, attn_mask=mask), wanted)

    def test_jagged_tensors_are_passed_on(self):
        rows = [torch.randn(n, 2, 8) for n in (3, 5)]
        jagged = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
        out = fn.scaled_dot_product_attention(jagged, jagged, jagged)
        assert out.is_nested
        for one, row in zip(out.transpose(1, 2).unbind(), rows, strict=True):
            row = row.transpose(0, 1)
            torch.testing.assert_close(
                one.transpose(0, 1), F.scaled_dot_product_attention(row, row, row)
            )

    def test_replacing_it(self, monkeypatch, generator):
        """In nn.MultiheadAttention, and ours does not call itself."""
        x = torch.randn(2, 5, 16)
        attention = torch.nn.MultiheadAttention(16, 2, batch_first=True).train()
        usual = attention(x, x, x, need_weights=False)[0]
        monkeypatch.setattr(F, "scaled_dot_product_attention", fn.scaled_dot_product_attention)
        torch.testing.assert_close(attention(x, x, x, need_weights=False)[0], usual)
        TestTorchsFunction().test_jagged_tensors_are_passed_on()

    def test_torch_function(self):
        """Tensor subclasses and modes see the call."""
        seen = []

        class Logged(torch.Tensor):
            @classmethod
            def __torch_function__(cls, func, types, args=(), kwargs=None):
                seen.append(func)
                return super().__torch_function__(func, types, args, kwargs or {})

        q = torch.randn(1, 2, 5, 8)
        mask = torch.ones(5, 5, dtype=torch.bool)
        logged = q.as_subclass(Logged)
        out = fn.scaled_dot_product_attention(logged, q, q, mask)
        assert isinstance(out, Logged) and fn.scaled_dot_product_attention in seen
        torch.testing.assert_close(
            torch.Tensor(out), fn.scaled_dot_product_attention(q, q, q, mask)
        )
        assert isinstance(fn.flash_attention(q, logged, q), Logged)
        packed, cu = torch.randn(5, 2, 8), torch.tensor([0, 5], dtype=torch.int32)
        function = fn.flash_attention_varlen
        assert isinstance(
            function(packed.as_subclass(Logged), packed, packed, cu, cu, 5, 5), Logged
        )


class TestDropout:
    def tensors(self, generator, dtype=FP32, heads=3):
        return [randn(generator, 2, heads, n, 16, dtype=dtype) for n in (30, 41, 41)]

    def test_seeded(self, device, generator):
        q, k, v = self.tensors(generator)
        results = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            results.append(fn.flash_attention(q, k, v, dropout_p=0.3))
        assert same_bits(results[0], results[1]) and not torch.equal(results[1], results[2])
        assert not torch.equal(results[1], fn.flash_attention(q, k, v, dropout_p=0.3))

    def test_mask(self, device, generator):
        """Identity values show the probabilities: about p of them dropped, the rest scaled."""
        q = randn(generator, 2, 3, 64, 16)
        k = randn(generator, 2, 3, 64, 16)
        v = torch.eye(64, device=device).expand(2, 3, 64, 64)
        torch.manual_seed(3)
        p, lse = fn.flash_attention(q, k, v, dropout_p=0.25, return_lse=True)
        full, full_lse = fn.flash_attention(q, k, v, return_lse=True)
        assert same_bits(lse, full_lse)
        dropped = p == 0
        torch.testing.assert_close(p[~dropped], full[~dropped] / 0.75)
        count = p.numel()
        # A binomial number; 5 standard deviations.
        assert abs(dropped.float().mean().item() - 0.25) < 5 * (0.25 * 0.75 / count) ** 0.5
        assert not torch.equal(dropped[0, 0], dropped[0, 1])
        assert not torch.equal(dropped[0, 0], dropped[1, 0])

    @pytest.mark.parametrize("place", [0.0, 0.3, 0.5, 0.7, 1.0])
    @each_tier
    def test_probability_to_the_bit(self, tier, place):
        """A probability is dropped where its 16 bits are below p, and kept where they are p."""
        device, dtype = ("cpu", FP32) if tier == "cpu" else ("cuda", BF16)
        if not takes_type(tier, dtype):
            pytest.skip("the tier does not take it")
        q = torch.zeros(2, 3, 64, 64, device=device, dtype=dtype)
        k = torch.zeros(2, 3, 320, 64, device=device, dtype=dtype)
        v = torch.eye(64, device=device, dtype=dtype).repeat(5, 1).expand(2, 3, 320, 64)
        rng = drawn_by(11, device)
        drawn = halves(rng, 2, 3, 64, 320, device)
        in_order = drawn.unique()
        half = in_order[round(place * (len(in_order) - 2))].item()
        for draws in (max(half, 1), half + 1):
            drawn_by(11, device)
            with forced("auto" if tier == "cpu" else tier):
                out = fn.flash_attention(q, k, v, dropout_p=draws / 2**16)
            keep = kept(draws / 2**16, rng, 2, 3, 64, 320, device)
            assert ((keep != 0) == (drawn >= draws)).all()
            torch.testing.assert_close(out, (keep @ v.double() / 320).to(dtype))

    def test_none_where_p_is_far_below_a_draw(self, device, generator):
        q, k, v = self.tensors(generator)
        assert same_bits(fn.flash_attention(q, k, v, dropout_p=1e-6), fn.flash_attention(q, k, v))

    @pytest.mark.parametrize("p", [0.4, 0.9])
    @pytest.mark.parametrize("dim", [64, 128])
    @each_tier
    def test_packed(self, tier, dim, p, seed):
        """A draw is of the sequence's number, and of places in the sequence."""
        device, dtype = ("cpu", FP32) if tier == "cpu" else ("cuda", BF16)
        if not takes_type(tier, dtype):
            pytest.skip("the tier does not take it")
        generator, lengths = rand_generator(device, seed), (9, 0, 300, 70)
        offsets = (1, *itertools.accumulate(lengths, initial=1))[1:]  # the first row is outside
        cu = torch.tensor(offsets, dtype=torch.int32, device=device)
        q, k, v = (randn(generator, offsets[-1], 2, dim, dtype=dtype) for _ in range(3))
        leaves = [t.requires_grad_() for t in (q, k, v)]
        dout = randn(generator, *q.shape, dtype=dtype)
        rng = drawn_by(11, device)
        with forced("auto" if tier == "cpu" else tier):
            out = fn.flash_attention_varlen(*leaves, cu, cu, 300, 300, causal=True, dropout_p=p)
            results = [out, *torch.autograd.grad(out, leaves, dout)]
        for number, (begin, length) in enumerate(zip(offsets, lengths, strict=False)):
            part = [t.detach()[begin : begin + length].double() for t in (q, k, v, dout)]
            *inputs, of_out = (t.transpose(0, 1)[None] for t in part)
            inputs = [t.requires_grad_() for t in inputs]
            keep = kept(p, rng, 4, 2, length, length, device)[number : number + 1]
            exact, _ = compose(*inputs, window=(None, 0), keep=keep)
            wanted = [exact, *torch.autograd.grad(exact, inputs, of_out)]
            for result, expected in zip(results, wanted, strict=True):
                error = result[begin : begin + length].transpose(0, 1)[None].double() - expected
                roundings = 64 if dtype == FP32 else 8  # of scores; of what is 16 bits
                assert error.norm() <= roundings * UNIT[dtype] * expected.norm()

    @each_tier
    def test_gradients_use_the_same_mask(self, tier, seed):
        dtype = BF16 if tier in ("portable", "hopper") else FP32
        if not takes_type(tier, dtype):
            pytest.skip("the tier does not take it")
        device = "cpu" if tier == "cpu" else "cuda"
        generator = rand_generator(device, seed)
        q, k, v = (t.requires_grad_() for t in self.tensors(generator, dtype))
        rng = torch.tensor([5, 9], device=device)

        def ours(q, k, v):
            options = (0, 0, 0.25, 0.0, None, 0, False, 0.4)
            nones = [None] * 5
            return torch.ops.fused_norm.attention_forward(q, k, v, *nones, rng, *options)

        # Which are kept, from the same operator with values that show it.
        eye = torch.eye(48, device=device, dtype=dtype)[:41].expand(2, 3, 41, 48)
        with forced("auto" if tier == "cpu" else tier):
            seen = ours(torch.zeros_like(q), torch.zeros_like(k), eye)[0][..., :41]
            out, _ = ours(q, k, v)
            dout = randn(generator, *out.shape, dtype=dtype)
            grads = torch.autograd.grad(out, (q, k, v), dout)
        p = round(0.4 * 2**16) / 2**16
        keep = (seen != 0).to(FP64) / (1 - p)
        leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
        exact, _ = compose(*leaves, scale=0.25, window=(None, 0), keep=keep)
        exact_grads = torch.autograd.grad(exact, leaves, dout.double())
        # A few roundings of terms below 10.
        limit = 40 * (2**-8 if dtype == BF16 else 2**-24)
        for a, b in zip((out, *grads), (exact, *exact_grads), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=limit, atol=limit)

    @cuda
    def test_every_device_and_tier_drops_the_same(self):
        generator = rand_generator("cpu", 0)
        q, k, v = self.tensors(generator, BF16)
        rng = torch.tensor([2**62 + 12345, 2**40 + 7])
        masks = []
        for tier in ("cpu", "plain", "portable", "auto"):
            device = "cpu" if tier == "cpu" else "cuda"
            eye = torch.eye(48, dtype=BF16, device=device)[:41].expand(2, 3, 41, 48)
            with forced("auto" if tier == "cpu" else tier):
                out, _ = torch.ops.fused_norm.attention_forward(
                    q.to(device) * 0, k.to(device), eye, *[None] * 5, rng.to(device), 0, 0, 1.0,
                    0.0, None, None, False, 0.5,
                )  # fmt: skip
            masks.append((out != 0).cpu())
        assert all(torch.equal(mask, masks[0]) for mask in masks)


class TestFlashAttn:
    """flash-attn's functions: their layouts, defaults and results."""

    def test_signatures(self):
        import inspect

        shared = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic"
        shared = [*shared.split(), "return_attn_probs"]
        first = {
            "flash_attn_func": ["q", "k", "v"],
            "flash_attn_kvpacked_func": ["q", "kv"],
            "flash_attn_qkvpacked_func": ["qkv"],
            "flash_attn_varlen_func": ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k",
                                       "max_seqlen_q", "max_seqlen_k"],
            "flash_attn_varlen_kvpacked_func": ["q", "kv", "cu_seqlens_q", "cu_seqlens_k",
                                                "max_seqlen_q", "max_seqlen_k"],
            "flash_attn_varlen_qkvpacked_func": ["qkv", "cu_seqlens", "max_seqlen"],
        }  # fmt: skip
        defaults = (0.0, None, False, (-1, -1), 0.0, None, False, False)
        for name, names in first.items():
            parameters = inspect.signature(getattr(flash_attn, name)).parameters
            last = ["block_table"] if name == "flash_attn_varlen_func" else []
            assert list(parameters) == names + shared + last
            values = [parameters[n].default for n in shared]
            assert tuple(values) == defaults

    @pytest.mark.parametrize("dtype", [FP64, BF16], ids=str)
    def test_dense(self, dtype, device, generator):
        qkv = randn(generator, 2, 20, 3, 4, 16, dtype=dtype).requires_grad_()
        q, k, v = qkv.unbind(2)
        options = {"causal": True, "window_size": (9, -1), "softcap": 3.0}
        wanted = fn.flash_attention(
            *(t.transpose(1, 2) for t in (q, k, v)),
            causal=True,
            window=(9, None),
            softcap=3.0,
            return_lse=True,
        )
        dout = torch.randn_like(q)
        of_all = torch.autograd.grad(wanted[0], qkv, dout.transpose(1, 2))[0]
        for call, leaf in (
            (lambda: flash_attn.flash_attn_func(q, k, v, **options, return_attn_probs=True), qkv),
            (
                lambda: flash_attn.flash_attn_kvpacked_func(
                    q, qkv[:, :, 1:], **options, return_attn_probs=True
                ),
                qkv,
            ),
            (
                lambda: flash_attn.flash_attn_qkvpacked_func(
                    qkv, **options, return_attn_probs=True
                ),
                qkv,
            ),
        ):
            out, lse, probabilities = call()
            assert probabilities is None and out.is_contiguous()
            assert same_bits(out, wanted[0].transpose(1, 2)) and same_bits(lse, wanted[1])
            assert same_bits(torch.autograd.grad(out, leaf, dout)[0], of_all)

    @pytest.mark.parametrize("sizes", [(1, 6, 4, 8), (2, 1, 4, 8), (2, 6, 1, 8), (2, 6, 4, 1)])
    def test_output_of_an_expanded_query_is_contiguous(self, sizes, device, generator):
        k = randn(generator, 2, 6, 4, 8)
        leaf = randn(generator, *sizes).requires_grad_()
        out = flash_attn.flash_attn_func(leaf.expand(2, 6, 4, 8), k, k)
        assert out.is_contiguous()
        wanted = flash_attn.flash_attn_func(leaf.expand(2, 6, 4, 8).clone(), k, k)
        assert same_bits(out, wanted)
        assert same_bits(*(torch.autograd.grad(o.sin().sum(), leaf)[0] for o in (out, wanted)))
        columns = randn(generator, 2, 6, 4, 16)[..., ::2]
        assert flash_attn.flash_attn_func(columns, k, k).is_contiguous()

    def test_output_of_packed_tensors_is_contiguous(self, device, generator):
        qkv = randn(generator, 2, 5, 4, 8, 3).permute(0, 1, 4, 2, 3)
        expanded = randn(generator, 2, 5, 3, 1, 8).expand(-1, -1, -1, 4, -1)
        for packed in (qkv, expanded):
            out = flash_attn.flash_attn_qkvpacked_func(packed)
            assert out.is_contiguous()
            assert same_bits(out, flash_attn.flash_attn_qkvpacked_func(packed.contiguous()))

    def test_packed_gradient_is_written_in_place(self, device, generator):
        """One tensor of qkv's layout, and no copy beside it."""
        qkv = randn(generator, 2, 64, 3, 4, 32).requires_grad_()
        out = flash_attn.flash_attn_qkvpacked_func(qkv)
        gradients = []
        out.grad_fn  # noqa: B018
        handle = qkv.register_hook(lambda g: gradients.append(g))
        out.backward(torch.ones_like(out))
        handle.remove()
        assert gradients[0].stride() == qkv.stride()
        assert gradients[0].untyped_storage().nbytes() == qkv.numel() * 4

    @pytest.mark.parametrize("dtype", [FP64, BF16], ids=str)
    def test_varlen(self, dtype, device, generator):
        qkv = randn(generator, 20, 3, 4, 16, dtype=dtype).requires_grad_()
        cu = torch.tensor([0, 7, 7, 20], dtype=torch.int32, device=device)
        q, k, v = qkv.unbind(1)
        wanted = fn.flash_attention_varlen(q, k, v, cu, cu, 13, 13, causal=True, return_lse=True)
        dout = torch.randn_like(q)
        of_all = torch.autograd.grad(wanted[0], qkv, dout)[0]
        options = {"causal": True, "return_attn_probs": True}
        for call in (
            lambda: flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, 13, 13, **options),
            lambda: flash_attn.flash_attn_varlen_kvpacked_func(
                q, qkv[:, 1:], cu, cu, 13, 13, **options
            ),
            lambda: flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu, 13, **options),
        ):
            out, lse, probabilities = call()
            assert probabilities is None
            assert same_bits(out, wanted[0]) and same_bits(lse, wanted[1])
            assert same_bits(torch.autograd.grad(out, qkv, dout)[0], of_all)


def test_memory(device, generator):
    """Kept for backward: the inputs, out and lse. No score is."""
    q, k, v = (randn(generator, 1, 4, 512, 32).requires_grad_() for _ in range(3))
    _, kept = held_for_backward(lambda: fn.flash_attention(q, k, v, causal=True), q, k, v)
    assert kept == q.numel() * 4 + 4 * 512 * 4  # out and lse


@cuda
def test_more_than_2_31_elements():
    """Offsets of 64 bits: rows at both ends of a tensor of 4.5 GB."""
    torch.cuda.empty_cache()
    batch, heads, rows, dim = 1, 2, 2**31 // (2 * 64) + 4096, 64
    base = torch.zeros(batch, rows, heads, dim, dtype=BF16, device="cuda")
    generator = rand_generator("cuda", 0)
    base[:, -256:] = randn(generator, batch, 256, heads, dim, dtype=BF16)
    whole = base.transpose(1, 2)
    small = whole[:, :, -256:].contiguous()  # the last 128 rows see these alone
    last = small[:, :, -128:]
    expected = fn.flash_attention(last, small, small, window=(127, 0))
    assert same_bits(fn.flash_attention(last, whole, whole, window=(127, 0)), expected)
    out = fn.flash_attention(whole, small, small, window=(127, 0))
    assert same_bits(out[:, :, -128:].contiguous(), expected.contiguous())


@cuda
def test_cuda_graph():
    """Captured with dropout: replays differ, by what the generator gives."""
    q, k, v = (torch.randn(2, 4, 100, 64, device="cuda", dtype=BF16) for _ in range(3))

    def step():
        return fn.flash_attention(q, k, v, causal=True, dropout_p=0.2), fn.flash_attention(q, k, v)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dropped, plain = step()
    results = []
    for _ in range(2):
        graph.replay()
        results.append((dropped.clone(), plain.clone()))
    assert same_bits(results[0][1], results[1][1]) and not torch.equal(results[0][0], results[1][0])
    assert same_bits(results[0][1], fn.flash_attention(q, k, v))


@cuda
def test_streams_and_no_wait():
    from harness import waits_are_errors

    q, k, v = (torch.randn(1, 2, 70, 64, device="cuda", requires_grad=True) for _ in range(3))
    cu = torch.tensor([0, 30, 70], dtype=torch.int32, device="cuda")
    p, bias = torch.randn(70, 2, 64, device="cuda"), torch.randn(70, 70, device="cuda")
    fn.flash_attention(q, k, v, attn_mask=bias, dropout_p=0.1).sum().backward()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with waits_are_errors(), torch.cuda.stream(stream):
        fn.flash_attention(q, k, v, attn_mask=bias, dropout_p=0.1).sum().backward()
        fn.flash_attention_varlen(p, p, p, cu, cu, 40, 40)
    stream.synchronize()


def test_laid_out_keeps_values(generator):
    tensor = randn(generator, 2, 3, 5, 8)
    for layout in ("bhsd", "bshd", "qkv", "transposed"):
        assert torch.equal(laid_out(tensor, layout), tensor)
    assert len(SAMPLE) > 80 and dataclasses.is_dataclass(SAMPLE[0])
