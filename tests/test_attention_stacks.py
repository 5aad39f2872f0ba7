"""What attention is built into: derivatives, opcheck, torch.compile, export, fx, checkpointing,
autocast, vmap and torch.func, Hugging Face models, and every error."""

import copy
import re
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from attention_reference import BF16, FP16, FP32, FP64
from harness import randn, same_bits
from torch.func import grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import fused_norm.functional as fn
from fused_norm import flash_attn

forward_op = torch.ops.fused_norm.attention_forward.default
backward_op = torch.ops.fused_norm.attention_backward.default
rng_op = torch.ops.fused_norm.attention_rng.default


def leaves(generator, *shapes, dtype=FP64):
    return [randn(generator, *shape, dtype=dtype).requires_grad_() for shape in shapes]


def offsets(device, *values):
    return torch.tensor(values, dtype=torch.int32, device=device)


def options(call, device, generator):
    """(differentiable arguments, function of those) of a call in fp64."""
    q, k, v = (1, 4, 3, 5), (1, 2, 4, 5), (1, 2, 4, 3)
    slopes = torch.tensor([0.1, 0.3, 0.2, 0.5], device=device)
    rng = torch.tensor([5, 7], device=device)
    if call == "all":
        return leaves(
            generator, q, k, v, (4, 3, 1), (4,)
        ), lambda q, k, v, mask, sink: fn.flash_attention(
            q,
            k,
            v,
            attn_mask=mask,
            sink=sink,
            alibi_slopes=slopes,
            softcap=2.0,
            window=(2, 1),
            return_lse=True,
        )
    if call == "causal":
        return leaves(generator, q, k, v), lambda *qkv: fn.flash_attention(*qkv, causal=True)
    if call == "nothing seen":
        mask = torch.ones(3, 4, dtype=torch.bool, device=device)
        mask[1] = False
        return leaves(generator, q, k, v), lambda *qkv: fn.flash_attention(*qkv, attn_mask=mask)
    if call == "dropout":
        return leaves(generator, q, k, v, (3, 4)), lambda q, k, v, mask: forward_op(
            q, k, v, mask, *[None] * 4, rng, 0, 0, 0.4, 0.0, None, None, False, 0.4
        )
    cu_q, cu_k = offsets(device, 0, 2, 2, 5), offsets(device, 1, 2, 4, 5)
    if call == "packed":

        def packed(q, k, v, sink):
            of_each = slopes.expand(3, 4).contiguous()
            out, lse = forward_op(
                q, k, v, None, of_each, sink, cu_q, cu_k, rng, 3, 3, 0.4, 3.0, None, 0, False, 0.4
            )
            return out, lse.masked_fill(lse == -torch.inf, 0)

        return leaves(generator, (6, 4, 3), (6, 2, 3), (6, 2, 2), (4,)), packed
    assert call == "stacked"
    return leaves(generator, (1, 4, 3, 2, 3)), lambda qkv: flash_attn.flash_attn_qkvpacked_func(
        qkv, causal=True, return_attn_probs=True
    )[:2]


each_call = pytest.mark.parametrize(
    "call", ["all", "causal", "nothing seen", "dropout", "packed", "stacked"]
)


@each_call
def test_gradcheck(call, device, generator):
    inputs, function = options(call, device, generator)
    assert torch.autograd.gradcheck(function, inputs, nondet_tol=0)
    assert torch.autograd.gradgradcheck(function, inputs, nondet_tol=0)


@pytest.mark.parametrize("of", range(3), ids=["query", "key", "value"])
def test_second_derivatives_in_one_tensor(of, device, generator):
    inputs = leaves(generator, (1, 4, 3, 5), (1, 2, 4, 5), (1, 2, 4, 3))

    def function(tensor):
        tensors = [tensor if i == of else t.detach() for i, t in enumerate(inputs)]
        return fn.flash_attention(*tensors, return_lse=True)

    assert torch.autograd.gradgradcheck(function, inputs[of : of + 1], nondet_tol=0)


@each_call
def test_transforms_agree(call, device, generator):
    """torch.func's gradient and forward mode are those of autograd."""
    inputs, function = options(call, device, generator)

    def total(*args):
        results = function(*args)
        results = results if isinstance(results, tuple) else (results,)
        return sum(r.sin().sum() for r in results)

    wanted = torch.autograd.grad(total(*inputs), inputs)
    plain = [t.detach() for t in inputs]
    ours = grad(total, argnums=tuple(range(len(plain))))(*plain)
    for a, b in zip(ours, wanted, strict=True):
        torch.testing.assert_close(a, b)
    tangents = [torch.randn_like(t) for t in plain]
    _, along = jvp(total, tuple(plain), tuple(tangents))
    expected = sum((g * t).sum() for g, t in zip(wanted, tangents, strict=True))
    torch.testing.assert_close(along, expected)


@each_call
def test_transforms_of_a_backward_pass(call, device, generator):
    """It is linear in the gradients it is given: its derivative is the pass itself."""
    inputs, function = options(call, device, generator)
    results = function(*inputs)
    results = results if isinstance(results, tuple) else (results,)

    def gradients(*given):
        return torch.autograd.grad(results, inputs, given, retain_graph=True, create_graph=True)

    def total(*given):
        return sum(g.sum() for g in gradients(*given))

    given, tangents = (tuple(torch.randn_like(r.detach()) for r in results) for _ in range(2))
    for a, b in zip(jvp(gradients, given, tangents)[1], gradients(*tangents), strict=True):
        torch.testing.assert_close(a, b)
    leaves = [g.clone().requires_grad_() for g in given]
    wanted = torch.autograd.grad(total(*leaves), leaves)
    for a, b in zip(grad(total, tuple(range(len(given))))(*given), wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("call", ["bool", "float", "lowest", "window", "packed"])
def test_what_is_hidden_may_hold_anything(call, device, generator):
    """In second derivatives and torch.func too: keys and values that no query sees, queries that
    see no key, and rows of no sequence."""
    cu = offsets(device, 1, 3, 5)
    mask = torch.ones(7, 7, dtype=torch.bool, device=device)
    mask[:, 5:], mask[0] = False, False
    given = {
        "bool": {"attn_mask": mask},
        "float": {"attn_mask": mask.float().log()},
        "lowest": {"attn_mask": mask.float().log().nan_to_num()},
    }
    if call == "packed":
        sizes, rows = [(7, 4, 8), (7, 2, 8), (7, 2, 8)], 0
    else:
        sizes, rows = [(2, 4, 7, 8), (2, 2, 7, 8), (2, 2, 7, 8)], 2

    def total(*qkv):
        if call == "packed":
            return fn.flash_attention_varlen(*qkv, cu, cu, 2, 2).sin().sum()
        if call == "window":
            q, k, v = qkv
            out = fn.scaled_dot_product_attention(
                q[:, :, 1:6], k, v, is_causal=True, enable_gqa=True
            )
            return out.sin().sum()
        return fn.flash_attention(*qkv, **given[call]).sin().sum()

    def derivatives(*qkv):
        first = grad(total, argnums=(0, 1, 2))(*qkv)
        qkv = [t.clone().requires_grad_() for t in qkv]
        again = torch.autograd.grad(total(*qkv), qkv, create_graph=True)
        return *first, *torch.autograd.grad(sum(g.sin().sum() for g in again), qkv)

    tensors = [randn(generator, *size) for size in sizes]
    wanted = derivatives(*tensors)
    for t, unseen in zip(tensors, ([0], [5, 6], [5, 6]), strict=True):
        if t is not tensors[0] or call in ("window", "packed") or device == "cpu":
            t.index_fill_(rows, torch.tensor(unseen, device=device), torch.nan)
    for a, b in zip(derivatives(*tensors), wanted, strict=True):
        assert same_bits(a, b)


def opcheck_arguments(call, device, generator, dtype):
    def tensors(*shapes):
        return [randn(generator, *shape, dtype=dtype) for shape in shapes]

    last = (0, 0, 0.3, 0.0, None, 0, False, 0.0)
    if call == "dense":
        q, k, v = tensors((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 16))
        return [q, k, v, *[None] * 6, *last]
    if call == "all":
        q, k, v, mask, sink = tensors((2, 5, 4, 8), (2, 2, 7, 8), (2, 2, 7, 8), (4, 5, 1), (4,))
        slopes = torch.rand(4, device=device)
        rng = torch.tensor([1, 2], device=device)
        options = (0, 0, 0.3, 2.0, 3, 1, True, 0.2)
        return [q.transpose(1, 2), k, v, mask, slopes, sink, None, None, rng, *options]
    if call == "packed":
        q, k, v = tensors((9, 4, 8), (9, 2, 8), (9, 2, 8))
        cu = offsets(device, 0, 4, 9)
        return [q, k, v, None, None, None, cu, cu, None, 5, 5, *last[2:]]
    qkv, kv = tensors((2, 5, 3, 4, 8), (2, 5, 2, 2, 8))
    if call == "stacked":
        return [qkv.permute(2, 0, 3, 1, 4), *[None] * 8, *last]
    return [qkv[:, :, 0].transpose(1, 2), kv.permute(2, 0, 3, 1, 4), *[None] * 7, *last]


@pytest.mark.parametrize(
    ("dtype", "requires_grad"), [(FP64, True), (BF16, False)], ids=["needs grad", ""]
)
@pytest.mark.parametrize("call", ["dense", "all", "packed", "stacked", "two stacked"])
def test_opcheck(call, dtype, requires_grad, device, generator):
    args = opcheck_arguments(call, device, generator, dtype)
    out, lse = forward_op(*args)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    for i in (0, 1, 2, 3, 5):
        if args[i] is not None:
            args[i] = args[i].detach().requires_grad_(requires_grad)
    torch.library.opcheck(forward_op, args)
    for wanted in ([True, True, True, True, True], [False, True, False, False, False]):
        torch.library.opcheck(backward_op, (dout, dlse, out, lse, *args, wanted))


def test_opcheck_rng(device):
    torch.library.opcheck(
        rng_op,
        (torch.randn(2, 2, device=device),),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
    assert torch.Tag.nondeterministic_seeded in rng_op.tags


def test_fake_tensors_have_the_layouts(device, generator):
    """Shapes, dtypes and strides, of every form."""
    for call in ("dense", "all", "packed", "stacked", "two stacked"):
        args = opcheck_arguments(call, device, generator, BF16)
        wanted = [True] * 5
        out, lse = forward_op(*args)
        real = [out, lse, *backward_op(out, lse, out, lse, *args, wanted)]
        meta = [t.to("meta") if isinstance(t, torch.Tensor) else t for t in args]
        out, lse = forward_op(*meta)
        fake = [out, lse, *backward_op(out, lse, out, lse, *meta, wanted)]
        for a, b in zip(real, fake, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def run_both(ours, theirs, inputs):
    """Outputs and gradients of two functions of the same leaves."""
    results = []
    for function in (ours, theirs):
        outputs = function(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        total = sum(output.float().square().sum() for output in outputs)
        results.append([*outputs, *torch.autograd.grad(total, inputs)])
    return results


class TestCompile:
    @pytest.mark.parametrize("dynamic", [False, True, None])
    def test_all_options(self, dynamic, device, generator):
        torch._dynamo.reset()

        def attention(q, k, v, mask, sink):
            return fn.flash_attention(
                q, k, v, attn_mask=mask, sink=sink, window=(q.shape[2] // 2, 0), return_lse=True
            )

        compiled = torch.compile(attention, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for n in (5, 7, 9):
            shapes = (2, 4, n, 8), (2, 2, n, 8), (2, 2, n, 8), (4, n, n), (4,)
            for a, b in zip(
                *run_both(compiled, attention, leaves(generator, *shapes, dtype=FP32)), strict=True
            ):
                assert same_bits(a, b) and a.stride() == b.stride()

    @pytest.mark.parametrize("dynamic", [False, True])
    def test_scaled_dot_product_attention(self, dynamic, device, generator):
        """By Inductor, in a permuted layout."""
        torch._dynamo.reset()

        def attention(x):
            q = x.transpose(1, 2) * 2
            return (
                fn.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
            )

        compiled = torch.compile(attention, fullgraph=True, dynamic=dynamic)
        for n in (5, 6):
            x = leaves(generator, (2, n, 4, 8), dtype=FP32)
            for a, b in zip(*run_both(compiled, attention, x), strict=True):
                torch.testing.assert_close(a, b)

    def test_dropout(self, device):
        """One graph; other masks each call, the same in both directions."""
        torch._dynamo.reset()

        def attention(q, v):
            return fn.scaled_dot_product_attention(q, q, v, dropout_p=0.5)

        compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
        q = torch.zeros(1, 2, 16, 16, device=device)
        v = torch.eye(16, device=device).expand(1, 2, 16, 16).contiguous().requires_grad_()
        out = compiled(q, v)
        # out is the mask times 1/8, and dv its transpose times dout.
        (dv,) = torch.autograd.grad(out, v, torch.eye(16, device=device).expand_as(out))
        torch.testing.assert_close(dv, out.transpose(-1, -2))
        assert not torch.equal(out, compiled(q, v))

    @pytest.mark.parametrize(
        "scale", [lambda q: 1 / np.sqrt(q.size(-1)), lambda q: np.float64(0.3)]
    )
    def test_scale_of_numpy(self, scale, device, generator):
        torch._dynamo.reset()

        def attention(q):
            first = fn.scaled_dot_product_attention(q, q, q, scale=scale(q))
            return flash_attn.flash_attn_func(first, q, q, softmax_scale=scale(q))

        compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
        for head_dim in (8, 16):
            q = leaves(generator, (1, 2, 5, head_dim), dtype=FP32)
            for a, b in zip(*run_both(compiled, attention, q), strict=True):
                assert same_bits(a, b)

    def test_varlen(self, device, generator):
        torch._dynamo.reset()
        compiled = torch.compile(
            fn.flash_attention_varlen, fullgraph=True, backend="aot_eager", dynamic=True
        )
        for cut, total in ((3, 7), (4, 9)):
            cu = offsets(device, 0, cut, total)
            inputs = leaves(generator, *[(total, 2, 8)] * 3, dtype=FP32)
            for a, b in zip(
                *run_both(
                    lambda *x: compiled(*x, cu, cu, total, total, causal=True),  # noqa: B023
                    lambda *x: fn.flash_attention_varlen(*x, cu, cu, 9, 9, causal=True),  # noqa: B023
                    inputs,
                ),
                strict=True,
            ):
                assert same_bits(a, b)

    def test_options_of_numpy(self, device, generator):
        torch._dynamo.reset()

        def attention(q, p, cap):
            out = fn.scaled_dot_product_attention(q, q, q, dropout_p=p)
            return fn.flash_attention(out, q, q, softcap=cap)

        compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
        q = randn(generator, 1, 2, 5, 8, dtype=FP32)
        numbers = np.float64(0.0), np.float64(5.0)
        assert same_bits(compiled(q, *numbers), attention(q, *numbers))

    def test_ints_of_numpy(self, device, generator):
        torch._dynamo.reset()
        q = randn(generator, 5, 2, 8, dtype=FP32)
        cu = offsets(device, 0, 2, 5)

        def attention(q, cu, n):
            return fn.flash_attention_varlen(q, q, q, cu, cu, n, n, window=(n, None))

        compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
        for n in np.int64(2), np.int32(1):
            assert same_bits(compiled(q, cu, n), attention(q, cu, n))

    def test_longest_sequence_as_a_tensor(self, device, generator):
        """Its value is not known to the compiler, which breaks the graph for it."""
        torch._dynamo.reset()
        q = randn(generator, 5, 2, 8, dtype=FP32)
        cu = torch.tensor([0, 2, 5], dtype=torch.int32, device=device)

        def attention(q, cu):
            return fn.flash_attention_varlen(q, q, q, cu, cu, cu.diff().max(), 5)

        assert same_bits(torch.compile(attention, backend="eager")(q, cu), attention(q, cu))

    def test_flash_attn(self, device, generator):
        torch._dynamo.reset()
        compiled = torch.compile(
            flash_attn.flash_attn_qkvpacked_func, fullgraph=True, backend="aot_eager"
        )
        inputs = leaves(generator, (2, 5, 3, 4, 8), dtype=FP32)
        for a, b in zip(
            *run_both(compiled, flash_attn.flash_attn_qkvpacked_func, inputs), strict=True
        ):
            assert same_bits(a, b)

    def test_flash_attn_of_an_expanded_query(self, device, generator):
        torch._dynamo.reset()
        q = randn(generator, 2, 1, 4, 8, dtype=FP32).expand(-1, 5, -1, -1)
        k = randn(generator, 2, 5, 4, 8, dtype=FP32)
        compiled = torch.compile(flash_attn.flash_attn_func, fullgraph=True, backend="aot_eager")
        out = compiled(q, k, k)
        assert out.is_contiguous() and same_bits(out, flash_attn.flash_attn_func(q, k, k))

    @pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit")
    def test_jit_trace(self, device, generator):
        """Where sizes are tensors: as a window's limit."""
        q = randn(generator, 2, 4, 5, 8, dtype=FP64)

        def attention(q):
            return fn.flash_attention(q, q, q, window=(q.size(2) - 3, 0))

        traced = torch.jit.trace(attention, (q,))
        assert same_bits(traced(q), attention(q))
        wider = randn(generator, 2, 4, 5, 16, dtype=FP64)
        assert same_bits(traced(wider), attention(wider))

    @pytest.mark.parametrize("way", ["dense", "packed"])
    def test_any_head_dim_takes_one_program(self, way, device, generator):
        """Compiled and exported: 1 / sqrt(D) is no number of the program."""
        torch._dynamo.reset()
        cu = offsets(device, 0, 2, 5)

        class Model(torch.nn.Module):
            def forward(self, q):
                if way == "packed":
                    return fn.flash_attention_varlen(q, q, q, cu, cu, 3, 3)
                return fn.scaled_dot_product_attention(q, q, q)

        def call(dim):
            return randn(generator, *((5, 3) if way == "packed" else (2, 3, 5)), dim)

        compiled = torch.compile(Model(), fullgraph=True, backend="aot_eager", dynamic=True)
        dims = {call(8).dim() - 1: torch.export.Dim("dim", min=2, max=256)}
        exported = torch.export.export(Model(), (call(8),), dynamic_shapes=(dims,)).module()
        with torch._dynamo.config.patch(error_on_recompile=True):
            for dim in range(8, 96, 8):
                q = call(dim)
                expected = Model()(q)
                assert same_bits(compiled(q), expected) and same_bits(exported(q), expected)

    def test_export(self, device):
        class Model(torch.nn.Module):
            def forward(self, q, k):
                return fn.scaled_dot_product_attention(q, k, k, is_causal=True)

        q, k = (torch.randn(2, 4, n, 8, device=device) for n in (5, 6))
        rows = {2: torch.export.Dim("queries")}, {2: torch.export.Dim("keys")}
        exported = torch.export.export(Model(), (q, k), dynamic_shapes=rows).module()
        q, k = (torch.randn(2, 4, n, 8, device=device) for n in (9, 3))
        assert same_bits(exported(q, k), Model()(q, k))

    def test_export_of_a_flag_that_depends_on_a_shape(self, device):
        class Model(torch.nn.Module):
            def forward(self, q):
                return fn.scaled_dot_product_attention(q, q, q, is_causal=q.shape[2] > 1)

        q = torch.randn(1, 2, 6, 8, device=device)
        rows = ({2: torch.export.Dim("rows", min=2)},)
        for strict in (False, True):
            exported = torch.export.export(Model(), (q,), dynamic_shapes=rows, strict=strict)
            assert same_bits(exported.module()(q), Model()(q))

    @pytest.mark.parametrize("option", ["none", "batched mask", "slopes", "sink"])
    def test_sizes_that_depend_on_data(self, option):
        """Batches of three and five dimensions; slopes and sinks of as many heads."""

        class Model(torch.nn.Module):
            def forward(self, x, seen, keep):
                i = keep.nonzero()[:, 0]
                if option == "none":
                    return fn.scaled_dot_product_attention(x[i], x[i], x[i], is_causal=True)
                if option == "batched mask":
                    q = x[i][:, None, None]
                    return fn.scaled_dot_product_attention(q, q, q, seen[i])
                q = x[i][None]
                if option == "slopes":
                    return fn.flash_attention(q, q, q, alibi_slopes=seen[i, 0, 0, 0, 0].float())
                return fn.flash_attention(q, q, q, sink=seen[i, 0, 0, 0, 0].float())

        model = Model()
        args = torch.randn(3, 5, 8), torch.ones(3, 1, 1, 5, 5).tril().bool()
        exported = torch.export.export(model, (*args, torch.tensor([True, False, True]))).module()
        torch._dynamo.reset()
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
            for keep in ([True, False, True], [True, True, True]):
                expected = model(*args, torch.tensor(keep))
                for made in (exported, compiled):
                    assert same_bits(made(*args, torch.tensor(keep)), expected)

    def test_make_fx_of_a_scale_that_depends_on_a_shape(self):
        def attention(q):
            return fn.scaled_dot_product_attention(q, q, q, scale=q.size(-1) ** -0.25)

        q = torch.randn(2, 4, 5, 8)
        traced = make_fx(attention, tracing_mode="symbolic")(q)
        assert same_bits(traced(q[:, :, :3]), attention(q[:, :, :3]))

    def test_fx(self):
        class Model(torch.nn.Module):
            def forward(self, q):
                q = fn.scaled_dot_product_attention(q, q, q)
                return fn.flash_attention(q, q, q, causal=True)

        graph = torch.fx.symbolic_trace(Model())
        targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        assert targets == [fn.scaled_dot_product_attention, fn.flash_attention]
        q = torch.randn(1, 2, 5, 8)
        assert same_bits(graph(q), Model()(q))


class TestFlops:
    """torch.utils.flop_counter's formulas: 2 operations a product, 5 products back for 2 forth."""

    def counts(self, function, *tensors):
        from torch.utils.flop_counter import FlopCounterMode

        tensors = [t.requires_grad_() if t.is_floating_point() else t for t in tensors]
        with FlopCounterMode(display=False) as forward:
            out = function(*tensors)
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
        return forward.get_total_flops(), backward.get_total_flops()

    def test_dense(self, device):
        q, k = torch.zeros(2, 4, 6, 8, device=device), torch.zeros(2, 2, 9, 8, device=device)
        v = k[..., :5].clone()
        heads, pairs = 2 * 4, 6 * 9
        wanted = tuple(2 * heads * pairs * columns for columns in (8 + 5, 3 * 8 + 2 * 5))
        assert self.counts(fn.flash_attention, q, k, v) == wanted

    def test_stacked(self, device):
        qkv = torch.zeros(2, 6, 3, 4, 8, device=device)
        wanted = tuple(2 * 2 * 4 * 36 * products * 8 for products in (2, 5))
        assert self.counts(flash_attn.flash_attn_qkvpacked_func, qkv) == wanted
        of_kv = flash_attn.flash_attn_kvpacked_func
        assert self.counts(of_kv, qkv[:, :, 0].detach(), qkv[:, :, 1:].detach()) == wanted

    def test_packed(self, device):
        def packed(qkv, cu_seqlens):
            return flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, 4)

        qkv, cu = torch.zeros(6, 3, 4, 8, device=device), offsets(device, 0, 2, 6)
        pairs = 2 * 2 + 4 * 4
        assert self.counts(packed, qkv, cu) == (4 * 4 * pairs * 8, 10 * 4 * pairs * 8)
        # Offsets without data: two sequences of the longest length.
        pairs = 2 * 4 * 4
        meta = (qkv.detach().to("meta"), cu.to("meta"))
        assert self.counts(packed, *meta) == (4 * 4 * pairs * 8, 10 * 4 * pairs * 8)

    @pytest.mark.parametrize("counter_is_first", [False, True])
    def test_order_of_imports(self, counter_is_first):
        lines = ["import fused_norm", "from torch.utils.flop_counter import FlopCounterMode"]
        code = "import torch\n" + "\n".join(lines[::-1] if counter_is_first else lines)
        code += "\nwith FlopCounterMode(display=False) as counter:\n"
        code += "    fused_norm.functional.flash_attention(*torch.zeros(3, 1, 1, 4, 8))\n"
        code += "print(counter.get_total_flops())"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout.split() == [str(4 * 4 * 4 * 8)], done.stderr

    def test_while_another_thread_imports_the_counter(self):
        code = """
import importlib.machinery, sys, threading, time
import torch
started = threading.Event()
class Slow:
    @staticmethod
    def find_spec(name, path, target=None):
        if name != "torch.utils.flop_counter":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (started.set(), time.sleep(1), load(module))
        return spec
sys.meta_path.insert(0, Slow)
threading.Thread(target=importlib.import_module, args=["torch.utils.flop_counter"]).start()
started.wait()
import fused_norm
from torch.utils.flop_counter import flop_registry
print(torch.ops.fused_norm.attention_forward in flop_registry)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout.split() == ["True"], done.stderr


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant, device, generator):
    """Made again in backward, with the same dropout."""
    q, k, v = leaves(generator, *[(2, 2, 20, 8)] * 3, dtype=FP32)
    results = []
    for run in (lambda f, *x: f(*x), lambda f, *x: checkpoint(f, *x, use_reentrant=reentrant)):
        torch.manual_seed(4)
        out = run(lambda q, k, v: fn.flash_attention(q, k, v, causal=True, dropout_p=0.3), q, k, v)
        total = out.square().sum()
        if reentrant:
            for t in (q, k, v):
                t.grad = None
            total.backward()
            results.append([out, *(t.grad.clone() for t in (q, k, v))])
        else:
            results.append([out, *torch.autograd.grad(total, (q, k, v))])
    for a, b in zip(*results, strict=True):
        assert same_bits(a, b)


def test_autocast_of_transforms(device, generator):
    """Scores are not rounded before their softmax."""
    q, k, v = (10 * randn(generator, 2, 2, 33, 16, dtype=BF16) for _ in range(3))

    def call(q):
        return fn.scaled_dot_product_attention(q, k, v, scale=1.0)

    with torch.autocast(device, BF16):
        wanted, ours = call(q), torch.func.vjp(call, q)[0]
    assert ours.dtype == BF16
    torch.testing.assert_close(ours, wanted, rtol=2e-2, atol=0.2)


@pytest.mark.parametrize("way", ["second derivative", "forward mode", "compiled"])
def test_autocast_rounds_nothing_within(way, device, generator):
    """Where the decomposition runs: the numbers of inputs that were cast before."""
    q, k, v = (8 * randn(generator, 1, 2, 33, 16) for _ in range(3))

    def results(autocast):
        tensors = [t if autocast else t.to(BF16).float() for t in (q, k, v)]

        def call(q):
            cast = [t if autocast else t.to(BF16) for t in (q, *tensors[1:])]
            return fn.flash_attention(*cast).float()

        with torch.autocast(device, BF16, enabled=autocast):
            if way == "second derivative":
                leaf = tensors[0].requires_grad_()
                (dq,) = torch.autograd.grad(call(leaf).sin().sum(), leaf, create_graph=True)
                return [dq, *torch.autograd.grad(dq.square().sum(), leaf)]
            if way == "forward mode":
                with torch.autograd.forward_ad.dual_level():
                    dual = torch.autograd.forward_ad.make_dual(tensors[0], v)
                    return list(torch.autograd.forward_ad.unpack_dual(call(dual)))
            torch._dynamo.reset()
            grad = torch.func.grad(lambda q: call(q).sin().sum())
            return [torch.compile(grad, backend="aot_eager", fullgraph=True)(tensors[0])]

    for ours, wanted in zip(results(True), results(False), strict=True):
        if way == "compiled":  # torch's own backward pass, where autocast rounds both factors
            error = (ours - wanted).double().norm() / wanted.double().norm()
            assert error < 2 * 2**-8, error
        else:
            assert same_bits(ours, wanted)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16, FP64], ids=str)
@pytest.mark.parametrize("autocast", [BF16, FP16], ids=str)
def test_autocast(dtype, autocast, device, generator):
    """As torch's function, its inputs and mask are cast; the gradients have the leaves' dtypes."""
    q, k, v = leaves(generator, *[(1, 2, 9, 8)] * 3, dtype=dtype)
    mask = randn(generator, 9, 9, dtype=FP32 if dtype != FP64 else FP64)
    with torch.autocast(device, autocast):
        ours = [
            fn.scaled_dot_product_attention(q, k, v, mask),
            fn.flash_attention(q, k, v),
            flash_attn.flash_attn_func(q, k, v),
        ]
        theirs = F.scaled_dot_product_attention(q, k, v, mask)
    for out in ours:
        assert out.dtype == theirs.dtype
    torch.testing.assert_close(ours[0], theirs, rtol=2**-6, atol=2**-6)
    grads = torch.autograd.grad(ours[0].float().sum(), (q, k, v))
    assert all(g.dtype == dtype for g in grads)


def over(function, in_dims, args, size=3):
    """What vmap is to give."""
    results = []
    for i in range(size):
        one = [a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True)]
        results.append(function(*one))
    return [torch.stack(r) for r in zip(*results, strict=True)]


class TestVmap:
    @pytest.mark.parametrize(
        "in_dims",
        [(0, 0, 0, 0, 0), (2, 1, 0, None, None), (0, None, None, 0, None), (None, 0, 0, None, 0),
         (None, None, None, None, 1)],
        ids=str,
    )  # fmt: skip
    @pytest.mark.parametrize("mask", [(4, 5, 6), (5, 1), (2, 1, 1, 6)], ids=str)
    def test_dense(self, in_dims, mask, device, generator):
        shapes = (2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8), mask, (4,)

        def attention(q, k, v, mask, sink):
            return fn.flash_attention(
                q, k, v, attn_mask=mask, sink=sink, causal=True, return_lse=True
            )

        def total(*args):
            return sum(r.sin().sum() for r in attention(*args))

        def of_all(*args):
            return grad(total, argnums=(0, 1, 2, 3, 4))(*args)

        args = []
        for shape, d in zip(shapes, in_dims, strict=True):
            tensor = randn(generator, 3, *shape, dtype=FP64)
            args.append(tensor[0] if d is None else tensor.movedim(0, d))
        for function in (attention, of_all):
            ours = vmap(function, in_dims)(*args)
            for a, b in zip(ours, over(function, in_dims, args), strict=True):
                torch.testing.assert_close(a, b)
        args = [a.requires_grad_() for a in args]
        ours, theirs = vmap(attention, in_dims)(*args), over(attention, in_dims, args)
        douts = [torch.randn_like(o) for o in ours]
        for a, b in zip(
            torch.autograd.grad(ours, args, douts),
            torch.autograd.grad(theirs, args, douts),
            strict=True,
        ):
            torch.testing.assert_close(a, b)

    def test_no_sequence_with_slopes_of_each(self, device, generator):
        cu = torch.zeros(1, dtype=torch.int32, device=device)
        slopes = torch.rand(0, 2, device=device)

        def attention(x):
            return fn.flash_attention_varlen(x, x, x, cu, cu, 0, 0, alibi_slopes=slopes)

        x = randn(generator, 5, 2, 4, dtype=FP32)
        out, tangent = jvp(attention, (x,), (x,))
        assert not out.any() and not tangent.any()

    @pytest.mark.parametrize("dropout_p", [0.0, 0.4])
    def test_batched_gradients(self, dropout_p, device, generator):
        """The backward operator under vmap, with a mask that no batch dimension has."""
        inputs = leaves(generator, (2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8), (5, 1), (4,))
        q, k, v, mask, sink = inputs
        outputs = fn.flash_attention(
            q, k, v, attn_mask=mask, sink=sink, dropout_p=dropout_p, return_lse=True
        )
        douts = [randn(generator, 3, *o.shape, dtype=FP64) for o in outputs]
        ours = torch.autograd.grad(outputs, inputs, douts, is_grads_batched=True, retain_graph=True)
        theirs = [
            torch.autograd.grad(outputs, inputs, [d[i] for d in douts], retain_graph=True)
            for i in range(3)
        ]
        for a, b in zip(ours, zip(*theirs, strict=True), strict=True):
            torch.testing.assert_close(a, torch.stack(b))

    def test_gradients_within_vmap(self, device, generator):
        """Unlike is_grads_batched it takes the backward operator's own rule."""
        inputs = leaves(generator, (2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8), (5, 1), (4,))
        q, k, v, mask, sink = inputs
        output = fn.flash_attention(q, k, v, attn_mask=mask, sink=sink)

        def gradients(dout):
            return torch.autograd.grad(output, inputs, dout, retain_graph=True)

        douts = randn(generator, 3, *output.shape, dtype=FP64)
        ours, theirs = vmap(gradients)(douts), over(gradients, (0,), (douts,))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)

    def test_gradients_of_each_sample_take_one_call(self, device, generator):
        """Without a mask: the samples are heads of one call of the backward operator."""
        inputs = leaves(generator, (2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8), (4,))
        q, k, v, sink = inputs
        outputs = fn.flash_attention(q, k, v, sink=sink, causal=True, return_lse=True)

        def gradients(*douts):
            return torch.autograd.grad(outputs, inputs, douts, retain_graph=True)

        douts = tuple(randn(generator, 3, *o.shape, dtype=FP64) for o in outputs)
        with torch.profiler.profile() as profile:
            ours = vmap(gradients)(*douts)
        calls = {event.key: event.count for event in profile.key_averages()}
        assert calls["fused_norm::attention_backward"] <= 2  # vmap's own entry, and one call
        for a, b in zip(ours, over(gradients, (0, 0), douts), strict=True):
            torch.testing.assert_close(a, b)

    @pytest.mark.parametrize("shape", [(0, 5, 8), (0, 4, 5, 8), (0, 2, 4, 5, 8)])
    def test_an_empty_batch(self, device, generator, shape):
        q = randn(generator, *shape, dtype=FP64).requires_grad_()
        out = vmap(fn.scaled_dot_product_attention)(q, q, q)
        assert out.shape == q.shape
        assert torch.autograd.grad(out.sum(), q)[0].shape == q.shape

    def test_packed_and_stacked(self, device, generator):
        cu = offsets(device, 0, 2, 5)
        q, k = randn(generator, 3, 5, 4, 8), randn(generator, 3, 5, 2, 8)

        def packed(q, k):
            return fn.flash_attention_varlen(q, k, k, cu, cu, 3, 3, causal=True, return_lse=True)

        def stacked(qkv):
            return flash_attn.flash_attn_qkvpacked_func(qkv, return_attn_probs=True)[:2]

        qkv = randn(generator, 3, 1, 5, 3, 2, 8)
        for function, args in ((packed, (q, k)), (stacked, (qkv,))):
            ours = vmap(function)(*args)
            for a, b in zip(ours, over(function, (0,) * len(args), args), strict=True):
                torch.testing.assert_close(a, b)

    def test_errors_tell_of_one_element(self, device):
        q = torch.zeros(3, 1, 4, 5, 8, device=device)
        for heads, mask_shape, message in (
            (3, (4, 5, 5), "query has 4 heads.* key's 3$"),
            (4, (2, 5, 5), r"attn_mask has shape \[2, 5, 5\].* = \(1, 4, 5, 5\)"),
            (4, (1, 1, 1, 5, 5), r"attn_mask has shape \[1, 1, 1, 5, 5\]"),
        ):
            mask = torch.zeros(3, *mask_shape, device=device)
            with pytest.raises(RuntimeError, match=message):
                vmap(lambda q, k, m: fn.flash_attention(q, k, k, attn_mask=m))(
                    q, q[:, :, :heads], mask
                )

    def test_dropout(self, device):
        q = torch.zeros(3, 1, 2, 16, 8, device=device)
        v = torch.eye(16, device=device).expand(1, 2, 16, 16)

        def attention(q):
            return fn.flash_attention(q, q, v, dropout_p=0.5)

        def of_keys(k):  # which alone have a batch
            return fn.flash_attention(q[0], k, v, dropout_p=0.5)

        def of_a_mask(m):  # of no dimension
            return fn.flash_attention(q[0], q[0], v, attn_mask=m.sum(), dropout_p=0.5)

        for function in (attention, of_keys, of_a_mask):
            out = vmap(function, randomness="different")(q)
            assert not torch.equal(out[0], out[1])
            for randomness in ("error", "same"):
                with pytest.raises(RuntimeError, match=f"randomness is '{randomness}'"):
                    vmap(function, randomness=randomness)(q)

    @pytest.mark.parametrize("is_shared", [False, True], ids=["", "query without a batch"])
    def test_dropout_in_gradients_of_each(self, is_shared, device, generator):
        """Each has a mask of its own, the same in both directions."""
        q, v = (randn(generator, 1, 2, 16, 8, dtype=FP64) for _ in range(2))

        def energy(v, k):
            out = fn.flash_attention(q if is_shared else k, k, v, dropout_p=0.5)
            return out.square().sum() / 2, out

        k, v = (t.expand(3, *t.shape) for t in (q, v))
        dv, out = vmap(grad(energy, has_aux=True), randomness="different")(v, k)
        assert not torch.equal(out[0], out[1]) and not torch.equal(out[1], out[2])
        torch.testing.assert_close((dv * v).flatten(1).sum(1), out.square().flatten(1).sum(1))


class TestHuggingFace:
    """Small models with torch's attention replaced by ours."""

    CONFIGS = {
        "llama": ("LlamaForCausalLM", "LlamaConfig"),
        "gpt2": ("GPT2LMHeadModel", "GPT2Config"),
        "bert": ("BertForMaskedLM", "BertConfig"),
        "vit": ("ViTForImageClassification", "ViTConfig"),
    }

    @pytest.mark.parametrize("mode", ["fp32", "bf16", "padded"])
    @pytest.mark.parametrize("name", CONFIGS)
    def test_model(self, name, mode, device, monkeypatch):
        pytest.importorskip("transformers")
        import test_hugging_face as models

        model = models.make(name, BF16 if mode == "bf16" else FP32, device)
        model.set_attn_implementation("sdpa")
        if name == "vit" and mode == "padded":
            pytest.skip("images have no padding")

        def results(model):
            model.zero_grad()
            inputs = models.batch(name, model)
            if mode == "padded":
                inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
                inputs["attention_mask"][0, 8:] = 0
            output = model(**inputs)
            output.loss.backward()
            found = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
            found["logits"] = output.logits.detach().double()
            return found

        exact = results(copy.deepcopy(model).double())
        before = results(model)
        called = []

        def ours(*args, **kwargs):
            called.append(1)
            return fn.scaled_dot_product_attention(*args, **kwargs)

        monkeypatch.setattr(F, "scaled_dot_product_attention", ours)
        after = results(model)
        assert called
        errors, usual = models.error(after, exact), models.error(before, exact)
        for what in errors:
            # Two draws of the same roundings; 2^-22 where hardly any are made.
            assert errors[what] <= 1.3 * usual[what] + 2**-22, (what, errors, usual)


def tensor(*shape, dtype=FP32, device="cpu"):
    return torch.zeros(*shape, dtype=dtype, device=device)


def refuse(message, function, *args, **kwargs):
    with pytest.raises((RuntimeError, TypeError, ValueError)) as error:
        function(*args, **kwargs)
    text = str(error.value).split("\n")[0]
    assert re.search(message, text), f"{text!r} does not say {message!r}"


class TestErrors:
    """One sentence that names the argument and its value, before anything runs."""

    def make(self, device, **shapes):
        shapes = {"q": (2, 4, 5, 8), "k": (2, 2, 7, 8), "v": (2, 2, 7, 8)} | shapes
        return [torch.zeros(shape, device=device) for shape in shapes.values()]

    @pytest.mark.parametrize(
        ("shapes", "message"),
        [
            ({"k": (2, 3, 7, 8), "v": (2, 3, 7, 8)}, "query has 4 heads.*multiple of key's 3"),
            ({"k": (2, 0, 7, 8), "v": (2, 0, 7, 8)}, "query has 4 heads.*multiple of key's 0"),
            ({"v": (2, 4, 7, 8)}, "value has 4 heads, but key has 2"),
            ({"v": (2, 2, 6, 8)}, "value has 6 rows, but key has 7"),
            ({"k": (2, 2, 7, 9)}, "key has head dim 9, but query has 8"),
            ({"k": (1, 2, 7, 8)}, "key has batch size 1, but query has 2"),
            ({"q": (4, 5, 8)}, r"query must be \(batch, heads, rows, head dim\).*\[4, 5, 8\]"),
            ({"q": (2, 4, 5, 0), "k": (2, 2, 7, 0)}, "query must have a head dim of at least 1"),
        ],
        ids=str,
    )
    def test_shapes(self, shapes, message, device):
        refuse(message, fn.flash_attention, *self.make(device, **shapes))

    def test_dtypes_and_devices(self, device):
        q, k, v = self.make(device)
        attention = fn.flash_attention
        refuse("key is Half.*query is Float", attention, q, k.half(), v)
        refuse("query must be float16.*Int", attention, q.int(), k.int(), v.int())
        refuse("attn_mask must be bool.*Double", attention, q, k, v, attn_mask=tensor(
            5, 7, dtype=FP64, device=device))  # fmt: skip
        refuse("sink must be float32 or.*Half", attention, q, k, v, sink=tensor(
            4, dtype=FP16, device=device))  # fmt: skip
        refuse("alibi_slopes must be float32.*Half", attention, q, k, v, alibi_slopes=tensor(
            4, dtype=FP16, device=device))  # fmt: skip
        refuse("key must be a tensor.*'str'|key must be a tensor", attention, q, "no", v)
        refuse("query must be a dense strided", attention, q.to_sparse(), k, v)
        sdpa = fn.scaled_dot_product_attention
        refuse("key must be a dense strided", sdpa, q[0, 0], k[0, 0].to_sparse_csr(), v[0, 0])
        if device == "cuda":
            refuse("key is on cpu, but query is on cuda", attention, q, k.cpu(), v)
            refuse("sink is on cpu", attention, q, k, v, sink=torch.zeros(4))
            wide = torch.zeros(1, 1, 2, 520, device=device)
            refuse("head dim 520.*at most 512", attention, wide, wide, wide)

    @pytest.mark.parametrize("shape", [(5, 6), (3, 5, 7), (2, 4, 5, 2), (1, 2, 4, 5, 7)], ids=str)
    def test_masks(self, shape, device):
        q, k, v = self.make(device)
        mask = torch.zeros(shape, device=device)
        refuse("attn_mask has shape.*does not broadcast.*2, 4, 5, 7", fn.flash_attention, q, k, v,
               attn_mask=mask)  # fmt: skip

    @pytest.mark.parametrize(
        "shape", [(5, 6), (3, 2, 4, 5, 7), (1, 1, 1, 1, 1, 7), (1, 2, 4, 5, 6)], ids=str
    )
    def test_masks_of_several_batch_dimensions(self, shape, device):
        q, k = (torch.zeros(1, 2, 4, rows, 8, device=device) for rows in (5, 7))
        says = f"attn_mask has shape {list(shape)}, which does not broadcast to [1, 2, 4, 5, 7]"
        refuse(re.escape(says), fn.scaled_dot_product_attention, q, k, k,
               torch.zeros(shape, device=device))  # fmt: skip

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    def test_a_nested_stack(self, device):
        q = torch.zeros(1, 1, 2, 8, device=device)
        stack = torch.nested.nested_tensor([q, q])
        arguments = (q, stack, *[None] * 7, 0, 0, None, 0.0, None, None, False, 0.0)
        refuse("key must be a dense strided tensor, but is nested",
               torch.ops.fused_norm.attention_forward, *arguments)  # fmt: skip

    def test_a_boolean_mask_has_no_gradient(self, device, generator):
        q = torch.randn(1, 2, 5, 8, generator=generator, device=device)
        mask = torch.ones(5, 5, dtype=torch.bool, device=device)
        arguments = (q, q, q, mask, None, None, None, None, None, 0, 0, None, 0.0, None, None)
        out, lse = torch.ops.fused_norm.attention_forward(*arguments, False, 0.0)
        gradients = torch.ops.fused_norm.attention_backward(
            q, None, out, lse, *arguments, False, 0.0, [False] * 3 + [True, False]
        )
        assert all(gradient is None for gradient in gradients)

    def test_options(self, device):
        q, k, v = self.make(device)
        attention = fn.flash_attention
        refuse("window's left limit.* must not be negative.*-1", attention, q, k, v, window=(-1, 2))
        refuse("window must be None or", attention, q, k, v, window=3)
        refuse("window must be None or", attention, q, k, v, window=(1.5, 2))
        refuse(f"window must be.* 64 bits.*{2**70}", attention, q, k, v, window=(2**70, 0))
        refuse("softcap must be finite.*-1", attention, q, k, v, softcap=-1.0)
        refuse("softcap must be finite.*inf", attention, q, k, v, softcap=float("inf"))
        refuse("scale must be finite.*nan", attention, q, k, v, scale=float("nan"))
        refuse("dropout_p must be.*1.5", attention, q, k, v, dropout_p=1.5)
        refuse("dropout_p must be.*-0.5", attention, q, k, v, dropout_p=-0.5)
        refuse("softcap must fit into.*1000", attention, q, k, v, softcap=10**400)
        refuse("scale must be a number", attention, q, k, v, scale=torch.ones(2))
        refuse(r"sink must be \(heads,\) = \(4,\).*\[3\]", attention, q, k, v,
               sink=tensor(3, device=device))  # fmt: skip
        refuse(r"alibi_slopes must be.*\[3, 4\]", attention, q, k, v,
               alibi_slopes=tensor(3, 4, device=device))  # fmt: skip
        refuse("alibi_slopes requires grad", attention, q, k, v,
               alibi_slopes=tensor(4, device=device).requires_grad_())  # fmt: skip

    def test_hooks_that_keep_what_is_saved(self, device):
        """They keep no graph alive."""
        q, k, v = (t.requires_grad_() for t in self.make(device))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            results = fn.flash_attention(q, k, v), fn.softmax(q, -1)
        for at in (0, 1):
            mark = torch.nn.Module()
            results[at].grad_fn.metadata["mark"] = mark
            mark = weakref.ref(mark)
            results = (None, results[1]) if at == 0 else None
            assert mark() is None

    def test_a_refused_call_draws_no_seed(self, device):
        q, k, v = self.make(device)
        torch.manual_seed(0)
        wanted = torch.rand(3, device=device)
        torch.manual_seed(0)
        slopes = torch.zeros(4, device=device, requires_grad=True)
        wrong = {"dropout_p": 1.5, "softcap": -1.0, "attn_mask": q, "return_lse": "yes",
                 "alibi_slopes": slopes}  # fmt: skip
        for options in ({name: value} for name, value in wrong.items()):
            refuse(next(iter(options)), fn.flash_attention, q, k, v, **{"dropout_p": 0.5} | options)
        assert same_bits(torch.rand(3, device=device), wanted)

    def test_offsets(self, device):
        q = torch.zeros(5, 4, 8, device=device)
        cu = offsets(device, 0, 5)

        def attention(cu_q, cu_k, *lengths):
            return fn.flash_attention_varlen(q, q, q, cu_q, cu_k, *(lengths or (5, 5)))

        refuse("cu_seqlens_q must be int32.*Long", attention, cu.long(), cu)
        refuse(r"cu_seqlens_k must have one dimension.*\[1, 2\]", attention, cu, cu[None])
        refuse("cu_seqlens_q must hold", attention, cu[:0], cu[:0])
        refuse("cu_seqlens_k has 1 elements, but cu_seqlens_q has 2", attention, cu, cu[:1])
        refuse("max_seqlen_q must not be negative.*-1", attention, cu, cu, -1, 5)
        refuse(f"max_seqlen_k must be.*{2**70}", attention, cu, cu, 5, 2**70)
        refuse("cu_seqlens_k must be a tensor, but is None", attention, cu, None)
        refuse(r"cu_seqlens_q must be a tensor, but is \[0, 5\]", attention, [0, 5], cu)
        refuse(r"query must be \(rows, heads, head dim\)", fn.flash_attention_varlen, q[None], q, q,
               cu, cu, 5, 5)  # fmt: skip
        if device == "cuda":
            refuse("cu_seqlens_q is on cpu", attention, cu.cpu(), cu)

    def test_torchs_function(self, device):
        q, k, v = self.make(device)
        attention = fn.scaled_dot_product_attention
        refuse("attn_mask of shape.*is_causal", attention, q, q, q, tensor(5, 5, device=device),
               is_causal=True)  # fmt: skip
        for wrong in (1.5, -0.5, float("nan")):
            refuse(f"^dropout_p must be at least 0 and at most 1, but is {wrong}$", attention, q, q,
                   q, dropout_p=wrong)  # fmt: skip
        refuse("query has 4 heads, key 2.*enable_gqa", attention, q, k, v)
        nested = torch.nested.nested_tensor([q[0, 0]], layout=torch.jagged)
        refuse("attn_mask must be a dense strided tensor, but is nested", attention, q, q, q,
               nested)  # fmt: skip
        refuse("multiple of key's 3", attention, q, *[tensor(2, 3, 7, 8, device=device)] * 2,
               enable_gqa=True)  # fmt: skip
        refuse(
            r"query must be a dense strided tensor of at least 2 dimensions.*\[8\]",
            attention,
            q[0, 0, 0],
            k,
            v,
        )
        refuse("batch dimensions must broadcast", attention, *self.make(
            device, q=(3, 2, 5, 8)))  # fmt: skip

    def test_flash_attn(self, device):
        q = torch.zeros(2, 5, 4, 8, device=device)
        refuse(
            r"q must be \(batch, rows, heads, head_dim\)", flash_attn.flash_attn_func, q[0], q, q
        )
        refuse(r"qkv must be \(batch, rows, 3, heads", flash_attn.flash_attn_qkvpacked_func,
               torch.zeros(2, 5, 2, 4, 8, device=device))  # fmt: skip
        refuse("k must be a tensor.*NoneType", flash_attn.flash_attn_func, q, None, q)
        refuse(r"window_size must be \(left, right\).*is 3", flash_attn.flash_attn_func, q, q, q,
               window_size=3)  # fmt: skip
        refuse(f"window_size must be.* 64 bits.*{2**70}", flash_attn.flash_attn_func, q, q, q,
               window_size=(2**70, 0))  # fmt: skip
        refuse("softcap must be a number.*'a'", flash_attn.flash_attn_func, q, q, q, softcap="a")
        refuse(r"flash_attn_func\(\) got an unexpected.*'dropout'", flash_attn.flash_attn_func,
               q, q, q, dropout=0.0)  # fmt: skip
        dense, of_kv = flash_attn.flash_attn_func, flash_attn.flash_attn_kvpacked_func
        refuse("^q has 4 heads, which is no multiple of k's 3", dense, q, *[q[:, :, :3]] * 2)
        refuse("^k is Double, but q is Float", dense, q, q.double(), q)
        refuse(
            "^q must be a dense strided tensor, but has layout Sparse", dense, q.to_sparse(), q, q
        )
        refuse("^v has 4 rows, but k has 5", dense, q, q, q[:, :4])
        refuse("^softmax_scale must be finite, but is nan", dense, q, q, q, softmax_scale=np.nan)
        refuse("^alibi_slopes is on meta, but q is on", dense, q, q, q,
               alibi_slopes=torch.zeros(4, device="meta"))  # fmt: skip
        kv = torch.zeros(2, 5, 2, 4, 6, device=device)
        refuse("^kv has head dim 6, but q has 8", of_kv, q, kv)
        refuse("^qkv must be float16.*is Int", flash_attn.flash_attn_qkvpacked_func,
               torch.zeros(2, 5, 3, 4, 8, device=device, dtype=torch.int32))  # fmt: skip
        cu = offsets(device, 0, 5)
        packed = torch.zeros(5, 3, 4, 8, device=device)
        of_packed = flash_attn.flash_attn_varlen_qkvpacked_func
        refuse("^cu_seqlens must be int32, but is Long", of_packed, packed, cu.long(), 5)
        refuse("^max_seqlen must not be negative, but is -1", of_packed, packed, cu, -1)
        refuse("block_table must be None", flash_attn.flash_attn_varlen_func, q[0], q[0], q[0], cu,
               cu, 5, 5, block_table=cu[None])  # fmt: skip

    def test_operators(self, device):
        q, k, v = self.make(device)
        last = (0, 0, 0.3, 0.0, None, None, False)
        refuse("rng must hold a seed.*None", forward_op, q, k, v, *[None] * 6, *last, 0.5)
        refuse("rng must be int64", forward_op, q, k, v, *[None] * 5, tensor(3, device=device),
               *last, 0.5)  # fmt: skip
        refuse("query must hold 3 tensors", forward_op, q, *[None] * 8, *last, 0.0)
        refuse("there is no key", forward_op, q, None, v, *[None] * 6, *last, 0.0)
        cu = offsets(device, 0, 5)
        p = torch.zeros(5, 4, 8, device=device)
        refuse("attn_mask.*cannot be combined with cu_seqlens", forward_op, p, p, p,
               tensor(5, 5, device=device), None, None, cu, cu, None, *last, 0.0)  # fmt: skip
        refuse("must both be given, but cu_seqlens_k is None", forward_op, p, p, p, None, None,
               None, cu, None, None, *last, 0.0)  # fmt: skip
