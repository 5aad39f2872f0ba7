"""Gated RMSNorm: values and gradients against fp64, derivatives to any order, and every way in."""

import pickle

import pytest
import torch
from harness import Verdict, randn, same_bits, unwritten_is_nan
from reference import SMALLEST, compute_unit, rounding

import fused_norm
import fused_norm.functional as fn

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
each_order = pytest.mark.parametrize(
    "norm_before_gate", [True, False], ids=["norm first", "gate first"]
)
each_activation = pytest.mark.parametrize("activation", ["silu", "sigmoid"])
each_dtype = pytest.mark.parametrize("dtype", [FP64, FP32, FP16, BF16], ids=str)


def formula(
    input,
    gate,
    normalized_shape,
    weight=None,
    eps=1e-5,
    *,
    norm_before_gate=True,
    activation="silu",
    group_size=None,
    weight_offset=0.0,
):
    """The definition in fp64, differentiable."""
    x, z = input.double(), gate.double()
    act = torch.nn.functional.silu(z) if activation == "silu" else torch.sigmoid(z)
    cols = len(normalized_shape)
    rows = (x if norm_before_gate else x * act).flatten(-cols)
    groups = rows.unflatten(-1, (-1, group_size or rows.shape[-1]))
    normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
    normed = normed.reshape(x.shape)
    if weight is not None:
        wide = FP64 if input.dtype == FP64 else FP32
        normed = normed * (weight.to(wide) + weight_offset).double()
    return normed * act if norm_before_gate else normed


def limits(x, z, weight, dy, eps, norm_before_gate, activation, group_size, weight_offset):
    """How far results may be off, before they are rounded. Each path has at most 16 roundings, each
    of u of what it rounds. exp(-z) is off by u (2 + |z|), and where the gate comes first so is what
    is normalized, by the largest of the row. act' of silu is a difference of terms as large as
    1 + |z|. A sum over a row carries the errors of its terms."""
    u = compute_unit(x.dtype)
    wide = FP64 if x.dtype == FP64 else FP32
    x, z, dy = x.double(), z.double(), dy.double()
    s = torch.sigmoid(z)
    act, slope = (z * s).abs() if activation == "silu" else s, s * (1 + z.abs())
    g = 1.0 if weight is None else (weight.to(wide) + weight_offset).double()
    v = x.abs() if norm_before_gate else x.abs() * act
    shape = v.shape
    groups = v.unflatten(-1, (-1, group_size or shape[-1]))

    def over_group(values, reduce):
        reduced = reduce(values.reshape(groups.shape), -1)
        return reduced.unsqueeze(-1).expand(groups.shape).reshape(shape)

    rstd = (over_group(v.square(), torch.mean) + eps).rsqrt()
    xhat = v * rstd
    relative = u * (16 + 2 * z.abs() + 2 * over_group(z.abs(), torch.amax))
    y = xhat * abs(g) * (act if norm_before_gate else 1.0)
    of_norm = dy.abs() * (act if norm_before_gate else 1.0)
    w = of_norm * abs(g)
    dv = rstd * (w + xhat * over_group(w * xhat, torch.mean))
    largest = over_group(relative, torch.amax)
    if norm_before_gate:
        dx, dz = dv, dy.abs() * xhat * abs(g) * slope
    else:
        dx, dz = dv * act, dv * x.abs() * slope
    lead = list(range(x.dim() - 1))
    return {
        "y": relative * y,
        "dx": largest * dx,
        "dgate": largest * dz,
        "dweight": (relative * of_norm * xhat).sum(lead),
    }


def forward_backward(call, dy, **tensors):
    leaves = {k: None if t is None else t.detach().requires_grad_() for k, t in tensors.items()}
    y = call(**leaves)
    wanted = [t for t in leaves.values() if t is not None]
    return y.detach(), torch.autograd.grad(y, wanted, dy)


def check(verdict, label, x, z, weight, dy, **how):
    """One call over the last dimension, held to its limits."""
    options = {
        "eps": 1e-5,
        "norm_before_gate": True,
        "activation": "silu",
        "group_size": None,
        "weight_offset": 0.0,
        **how,
    }
    shape = (x.shape[-1],)
    sizes = [x.numel() * x.element_size(), x.numel() * z.element_size()]

    def run(function, dy):
        return forward_backward(
            lambda input, gate, weight: function(input, gate, shape, weight, **options),
            dy,
            input=x,
            gate=z,
            weight=weight,
        )

    with unwritten_is_nan(x.device, *sizes):
        y, gradients = run(fn.rms_norm_gated, dy)
    y_ref, gradients_ref = run(formula, dy.double())
    allowed = limits(x, z, weight, dy, **options)
    ratios = {}
    names = ["y", "dx", "dgate", *(["dweight"] if weight is not None else [])]
    for name, got, ref in zip(names, (y, *gradients), (y_ref, *gradients_ref), strict=True):
        ref, limit = ref.double(), allowed[name]
        limit = limit + rounding(ref.abs() + limit, got.dtype, compute_unit(x.dtype))
        # An fp64 reference of a leaf of another dtype has been rounded itself.
        limit = limit + rounding(ref, got.dtype, 0.0)
        beyond = got.isinf() & (ref.to(got.dtype) == got)
        error = torch.where(beyond, 0.0, got.double() - ref).abs()
        ratios[name] = (error / limit.clamp_min(SMALLEST[got.dtype])).nan_to_num(nan=1e9).max()
    verdict.add(label, ratios)


def draw(generator, rows, cols, dtype, gate_dtype=None, weight_dtype=None):
    x = 2 * randn(generator, rows, cols)
    z = 3 * randn(generator, rows, cols)
    weight = 1 + 0.5 * randn(generator, cols)
    dy = randn(generator, rows, cols)
    return x.to(dtype), z.to(gate_dtype or dtype), weight.to(weight_dtype or dtype), dy.to(dtype)


SHAPES = [
    (1, 1),
    (3, 5),
    (130, 64),
    (40, 128),
    (7, 264),
    (33, 520),
    (3, 1001),
    (5, 2048),
    (2, 8200),
]


@each_dtype
@each_activation
@each_order
def test_values(norm_before_gate, activation, dtype, device, generator):
    verdict = Verdict()
    how = {"norm_before_gate": norm_before_gate, "activation": activation}
    for rows, cols in SHAPES:
        x, z, weight, dy = draw(generator, rows, cols, dtype)
        check(verdict, f"{rows} x {cols}", x, z, weight, dy, **how)
        check(verdict, f"{rows} x {cols}, no weight", x, z, None, dy, **how)
    verdict.check()


@each_dtype
@each_order
def test_groups_and_offset(norm_before_gate, dtype, device, generator):
    verdict = Verdict()
    for rows, cols, size in [(1, 8, 1), (37, 24, 8), (65, 512, 128), (5, 4096, 512), (3, 30, 10)]:
        x, z, weight, dy = draw(generator, rows, cols, dtype)
        how = {"norm_before_gate": norm_before_gate, "group_size": size, "weight_offset": 0.5}
        check(verdict, f"{rows} x {cols} by {size}", x, z, weight, dy, **how)
    verdict.check()


@each_order
@pytest.mark.parametrize(
    "dtypes",
    [
        (BF16, FP32, BF16),
        (FP16, FP16, FP32),
        (FP32, FP32, BF16),
        (FP32, BF16, BF16),  # as Mamba 2's models in bf16 call it
        (FP32, FP16, FP32),
        (FP64, FP32, FP64),
    ],
)
def test_mixed_dtypes(dtypes, norm_before_gate, device, generator):
    verdict = Verdict()
    for cols in (136, 51):
        x, z, weight, dy = draw(generator, 20, cols, *dtypes)
        check(verdict, str(cols), x, z, weight, dy, norm_before_gate=norm_before_gate)
    verdict.check()


@each_order
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_strided_rows(dtype, norm_before_gate, device, generator):
    """Slices of one projection, as a Mamba layer has them, aligned and not."""
    verdict = Verdict()
    for start, cols, size in [(0, 256, None), (8, 256, 64), (1, 256, None), (3, 256, 32)]:
        wide = randn(generator, 9, 4, 3 * 264, dtype=dtype)
        x, z = wide[..., start : start + cols], wide[..., 264 + start : 264 + start + cols]
        weight = 1 + randn(generator, cols).to(dtype)
        dy = randn(generator, 9, 4, 2 * cols, dtype=dtype)[..., 1 : cols + 1]
        how = {"norm_before_gate": norm_before_gate, "group_size": size}
        check(verdict, f"from {start}, by {size}", x, z, weight, dy, **how)
    verdict.check()


@pytest.mark.cuda
@each_order
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_every_boundary_of_the_plans(dtype, norm_before_gate, generator):
    """Where threads, packs and blocks change, with rows for one block and for all."""
    middles = [2**k for k in range(3, 15)] + [3 * 2**k for k in range(3, 13)]
    verdict = Verdict()
    for cols in sorted({m + s for m in middles for s in (-8, -1, 0, 8)} - {0}):
        for rows in (3, 1 + (1 << 19) // cols):
            x, z, weight, dy = draw(generator, rows, cols, dtype)
            check(verdict, f"{rows} x {cols}", x, z, weight, dy, norm_before_gate=norm_before_gate)
    for cols, size in [(256, 8), (1024, 128), (8192, 1024), (8192, 4096), (1536, 96), (6144, 8)]:
        for rows in (1, 2, 300):
            x, z, weight, dy = draw(generator, rows, cols, dtype)
            how = {"norm_before_gate": norm_before_gate, "group_size": size}
            check(verdict, f"{rows} x {cols} by {size}", x, z, weight, dy, **how)
    verdict.check()


@each_order
@pytest.mark.parametrize(
    "cols, group_size, dtype",
    [
        (128, None, BF16),
        (2048, None, BF16),
        (1024, 128, BF16),
        (50, 10, BF16),
        (1003, None, FP32),
        (100001, None, FP32),
    ],
)
def test_bits_do_not_depend_on_other_rows(
    cols, group_size, dtype, norm_before_gate, device, generator
):
    rows = 3000 if cols < 10000 else 30
    x, z, weight, dy = draw(generator, rows, cols, dtype)
    how = {"norm_before_gate": norm_before_gate, "group_size": group_size}
    check_bits_of_few(x, z, weight, dy, **how)


def check_bits_of_few(x, z, weight, dy, **how):
    """Equal bits over two calls, and of a few rows alone."""

    def run(rows):
        return forward_backward(
            lambda input, gate: fn.rms_norm_gated(input, gate, x.shape[-1], weight, **how),
            dy[rows],
            input=x[rows],
            gate=z[rows],
        )

    whole, again = run(slice(None)), run(slice(None))
    assert same_bits(again[0], whole[0]) and all(map(same_bits, again[1], whole[1]))
    for some in (slice(0, 1), slice(17, 30), slice(len(x) - 1, len(x))):
        y_few, gradients_few = run(some)
        assert same_bits(y_few, whole[0][some]), f"y of {x.shape}, {some}"
        for of_few, gradient in zip(gradients_few, whole[1], strict=True):
            assert same_bits(of_few, gradient[some]), f"gradient of {x.shape}, {some}"


@pytest.mark.cuda
@each_order
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_many_short_rows(dtype, norm_before_gate, generator):
    """So many that lanes of a part of a warp have two packs in backward."""
    verdict = Verdict()
    for cols, size in [(56, None), (64, None), (96, None), (136, None), (272, None), (1024, 128)]:
        tensors = draw(generator, 2**23 // cols + 5, cols, dtype)
        how = {"norm_before_gate": norm_before_gate, "group_size": size}
        check(verdict, f"{cols} columns by {size}", *tensors, **how)
        check_bits_of_few(*tensors, **how)
    verdict.check()


def test_no_gradient_is_made_in_vain(generator):
    """Whichever tensors are to be differentiated, the others' gradients stay away."""
    x, z, weight, dy = draw(generator, 6, 16, FP64)
    full = torch.autograd.grad(
        fn.rms_norm_gated(*(leaves := [t.requires_grad_() for t in (x, z)]), 16, weight), leaves, dy
    )
    for i in range(2):
        tensors = [x.detach(), z.detach()]
        tensors[i].requires_grad_()
        [gradient] = torch.autograd.grad(fn.rms_norm_gated(*tensors, 16, weight), [tensors[i]], dy)
        assert same_bits(gradient, full[i])


@each_activation
@each_order
@pytest.mark.parametrize("group_size", [None, 2])
def test_derivatives(group_size, norm_before_gate, activation, device, generator):
    x, z, weight, _ = (t.to(device).requires_grad_() for t in draw(generator, 3, 6, FP64))
    how = {"norm_before_gate": norm_before_gate, "activation": activation}

    def call(x, z, weight):
        return fn.rms_norm_gated(
            x, z, 6, weight, 1e-2, group_size=group_size, weight_offset=0.5, **how
        )

    assert torch.autograd.gradcheck(call, (x, z, weight), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, (x, z, weight))
    assert torch.autograd.gradgradcheck(lambda x, z: call(x, z, weight.detach()), (x, z))
    assert torch.autograd.gradgradcheck(lambda x, z: fn.rms_norm_gated(x, z, 6), (x, z))


@each_order
def test_torch_func(norm_before_gate, generator):
    x, z, weight, dy = draw(generator, 4, 8, FP64)

    def call(x, z, weight):
        return fn.rms_norm_gated(
            x, z, 8, weight, 1e-5, norm_before_gate=norm_before_gate, group_size=4
        )

    def expected(x, z, weight):
        return formula(x, z, (8,), weight, norm_before_gate=norm_before_gate, group_size=4)

    for dims in [(0, 0, None), (0, None, None), (None, 0, None)]:
        args = [x if dims[0] == 0 else x[0], z if dims[1] == 0 else z[0], weight]
        mapped = torch.vmap(call, dims)(*args)
        torch.testing.assert_close(mapped, torch.vmap(expected, dims)(*args))
    weights = torch.stack([weight, 2 * weight, weight, -weight])
    torch.testing.assert_close(torch.vmap(call)(x, z, weights), torch.vmap(expected)(x, z, weights))

    def loss(function):
        return lambda *args: (function(*args) * dy[0]).sum()

    per_sample = torch.vmap(torch.func.grad(loss(call), (0, 1, 2)), (0, 0, None))(x, z, weight)
    wanted = torch.vmap(torch.func.grad(loss(expected), (0, 1, 2)), (0, 0, None))(x, z, weight)
    torch.testing.assert_close(per_sample, wanted)
    hessian = torch.func.hessian(loss(call))(x[0], z[0], weight)
    torch.testing.assert_close(hessian, torch.func.hessian(loss(expected))(x[0], z[0], weight))

    # Of a backward pass, which is linear in the gradient it is given.
    leaves = [t.clone().requires_grad_() for t in (x, z, weight)]
    y = call(*leaves)

    def gradients(dy):
        return torch.autograd.grad(y, leaves, dy, retain_graph=True)

    torch.testing.assert_close(torch.func.jvp(gradients, (x,), (dy,))[1], gradients(dy))


@each_order
@pytest.mark.parametrize("cols, group_size", [(64, None), (64, 16), (10, 5)])
def test_operators(cols, group_size, norm_before_gate, device, generator):
    x, z, weight, dy = draw(generator, 6, cols, FP32)
    options = ((cols,), 1e-5, 0.5, norm_before_gate, True, group_size)
    _, rstd = torch.ops.fused_norm.rms_norm_gated_forward(x, z, weight, *options)
    assert rstd.shape == (6, cols // (group_size or cols))
    leaves = [t.detach().requires_grad_() for t in (x, z, weight)]
    torch.library.opcheck(torch.ops.fused_norm.rms_norm_gated_forward.default, (*leaves, *options))
    for mask in ([True] * 3, [True, False, False], [False, True, True]):
        torch.library.opcheck(
            torch.ops.fused_norm.rms_norm_gated_backward.default,
            (dy, rstd, x, z, weight, *options, mask),
        )


@each_order
def test_compile(norm_before_gate, device, generator):
    torch._dynamo.reset()
    norm = fused_norm.RMSNormGated(32, norm_before_gate=norm_before_gate, group_size=8)
    norm = norm.to(device)

    def call(x, z):
        return norm(x, z).sin()

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (3, 5, 9):
        x, z, _, dy = draw(generator, rows, 32, FP32)
        y, (dx, dz) = forward_backward(lambda x, z: compiled(x, z), dy, x=x, z=z)
        y_ref, (dx_ref, dz_ref) = forward_backward(lambda x, z: call(x, z), dy, x=x, z=z)
        assert same_bits(y, y_ref) and same_bits(dx, dx_ref) and same_bits(dz, dz_ref)


def test_decompose(generator, monkeypatch):
    x, z, weight, _ = draw(generator, 4, 12, FP32)
    expected = fn.rms_norm_gated(x, z, 12, weight, group_size=4, norm_before_gate=False)
    monkeypatch.setattr(fused_norm.config, "decompose", True)
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(str(graph.graph))
        return graph

    @torch.compile(backend=backend, fullgraph=True)
    def call(x, z):
        return fn.rms_norm_gated(x, z, 12, weight, group_size=4, norm_before_gate=False)

    torch.testing.assert_close(call(x, z), expected)
    assert "fused_norm" not in "".join(graphs)


@pytest.mark.parametrize("in_vmap", [False, True], ids=["is_grads_batched", "vmap"])
def test_batched_gradients(in_vmap, generator):
    shapes = (4, 8), (4, 8), (8,), (3, 4, 8)
    x, z, weight, dys = (torch.randn(s, generator=generator, dtype=FP64) for s in shapes)
    leaves = [t.requires_grad_() for t in (x, z, weight)]
    y = fn.rms_norm_gated(x, z, 8, weight, group_size=4)

    def gradients(dy, is_grads_batched=False):
        options = {"is_grads_batched": is_grads_batched, "retain_graph": True}
        return torch.autograd.grad(y, leaves, dy, **options)

    ours = torch.vmap(gradients)(dys) if in_vmap else gradients(dys, is_grads_batched=True)
    one_by_one = [torch.stack(each) for each in zip(*map(gradients, dys), strict=True)]
    torch.testing.assert_close(list(ours), one_by_one)
    if in_vmap:
        assert [g.shape for g in torch.vmap(gradients)(dys[:0])] == [(0, *t.shape) for t in leaves]


@pytest.mark.parametrize("way", ["decompose", "vmap"])
@pytest.mark.parametrize(
    "change, message",
    [
        ({"gate": torch.ones(8, 4)}, r"gate must have the shape of input \[4, 8\]"),
        ({"gate": torch.ones(4, 8).double()}, "gate is Double, which does not go with"),
        ({"weight": torch.ones(4, 2)}, r"weight must have the shape of normalized_shape \[8\]"),
        ({"group_size": 3}, "group_size is 3, which does not divide the 8 elements"),
        ({"eps": -1.0}, "eps must be finite and not negative"),
    ],
)
def test_errors_where_the_operator_does_not_run(change, message, way, monkeypatch):
    arguments = {"input": torch.ones(4, 8), "gate": torch.ones(4, 8), "weight": torch.ones(8)}
    arguments |= {"group_size": None, "eps": 1e-5} | change

    def call(input):
        return fn.rms_norm_gated(**{**arguments, "input": input}, normalized_shape=8)

    x = arguments["input"]
    if way == "decompose":
        monkeypatch.setattr(fused_norm.config, "decompose", True)
        torch._dynamo.reset()
        call = torch.compile(call, backend="eager")
    else:
        call, x = torch.vmap(call), x.expand(2, 4, 8)
    with pytest.raises(RuntimeError, match=message):
        call(x)


def test_autocast(device, generator):
    """The output has input's dtype, as rms_norm's; a gate of another dtype is converted."""
    x, z, weight, _ = draw(generator, 4, 16, FP32)
    for dtype in (FP32, BF16):
        with torch.autocast(device, BF16):
            y = fn.rms_norm_gated(x.to(dtype), z.bfloat16(), 16, weight)
        expected = fn.rms_norm_gated(x.to(dtype), z.bfloat16().to(dtype), 16, weight)
        assert y.dtype == dtype and same_bits(y, expected)


def test_jagged(generator):
    x, z, weight, _ = draw(generator, 7, 16, FP32)
    nested = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 3, 7]))
    gate = torch.nested.nested_tensor_from_jagged(z, nested.offsets())
    y = fn.rms_norm_gated(nested, gate, 16, weight)
    assert same_bits(y.values(), fn.rms_norm_gated(x, z, 16, weight))


def test_no_rows(device):
    x = torch.zeros(0, 8, device=device, requires_grad=True)
    weight = torch.ones(8, device=device, requires_grad=True)
    y = fn.rms_norm_gated(x, x, 8, weight)
    y.sum().backward()
    assert y.shape == (0, 8) and x.grad.shape == (0, 8) and torch.equal(weight.grad, 0 * weight)


def test_several_dimensions(device, generator):
    x, z, weight, _ = draw(generator, 5, 24, FP32)
    y = fn.rms_norm_gated(x.view(5, 4, 6), z.view(5, 4, 6), (4, 6), weight.view(4, 6), group_size=8)
    assert same_bits(y.view(5, 24), fn.rms_norm_gated(x, z, 24, weight, group_size=8))


def test_torch_function():
    class Logged(torch.Tensor):
        calls: list = []

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            cls.calls.append((function, sorted(kwargs or {})))
            return super().__torch_function__(function, types, args, kwargs or {})

    x = torch.ones(2, 8)
    y = fn.rms_norm_gated(x, x.as_subclass(Logged), 8, activation="sigmoid")
    assert isinstance(y, Logged)
    names = ["activation", "eps", "group_size", "norm_before_gate", "weight", "weight_offset"]
    assert (fn.rms_norm_gated, names) in Logged.calls


@each_order
def test_module(norm_before_gate, generator):
    options = {"norm_before_gate": norm_before_gate, "activation": "sigmoid", "group_size": 4}
    norm = fused_norm.RMSNormGated(8, 1e-3, **options)
    assert list(norm.state_dict()) == ["weight"] and torch.equal(norm.weight, torch.ones(8))
    norm.load_state_dict(torch.nn.RMSNorm(8).state_dict())
    x, z, _, _ = draw(generator, 3, 8, FP32)
    assert same_bits(norm(x, z), fn.rms_norm_gated(x, z, 8, norm.weight, 1e-3, **options))
    copy = pickle.loads(pickle.dumps(norm))
    assert same_bits(copy(x, z), norm(x, z))
    for option in ("group_size=4", "activation='sigmoid'", f"norm_before_gate={norm_before_gate}"):
        assert option in repr(norm)
    zero_centred = fused_norm.RMSNormGated(8, weight_offset=1.0)
    assert torch.equal(zero_centred.weight, torch.zeros(8))
    assert same_bits(zero_centred(x, z), fused_norm.RMSNormGated(8)(x, z))
    without = fused_norm.RMSNormGated(8, elementwise_affine=False)
    assert not without.state_dict() and same_bits(without(x, z), fused_norm.RMSNormGated(8)(x, z))


def test_convert_leaves_it_alone():
    model = torch.nn.ModuleList([fused_norm.RMSNormGated(8)])
    assert len(fused_norm.convert(model)) == 0 and type(model[0]) is fused_norm.RMSNormGated


def test_it_has_no_memory_efficient(generator):
    """It says so where the flag is set, and a report of a model's memory counts what it saves."""
    norm = fused_norm.RMSNormGated(64)
    assert norm.memory_efficient is False
    norm.memory_efficient = False
    with pytest.raises(ValueError, match="memory_efficient is True, but a gated norm saves input"):
        norm.memory_efficient = True
    assert "memory_efficient" not in repr(norm)
    x, z, _, _ = draw(generator, 20, 64, FP32)
    [line] = fused_norm.memory_report(norm, x.requires_grad_(), z)
    assert line.saved_bytes == line.efficient_bytes == 20 * 4  # its rstd: the rest is the caller's
    assert (line.memory_efficient, line.columns, line.lost_columns) == (False, 64, 0)
    assert norm.memory_efficient is False


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"gate": torch.ones(3, 7)}, RuntimeError, r"gate must have the shape of input \[3, 8\]"),
        ({"gate": torch.ones(3, 8).double()}, RuntimeError, "gate is Double, which does not go"),
        ({"gate": 1.0}, TypeError, "gate must be a tensor"),
        ({"gate": torch.ones(3, 8).to_sparse()}, RuntimeError, "gate must be a dense strided"),
        ({"gate": torch.ones(3, 8, device="meta")}, RuntimeError, "gate is on meta"),
        ({"normalized_shape": 7}, RuntimeError, r"normalized_shape is \[7\], but input has shape"),
        ({"normalized_shape": ()}, RuntimeError, "at least one dimension"),
        ({"weight": torch.ones(7)}, RuntimeError, "weight must have the shape of normalized_shape"),
        ({"weight": torch.ones(8).double()}, RuntimeError, "weight is Double, which does not go"),
        ({"weight": None, "weight_offset": 1.0}, RuntimeError, "no weight to add it to"),
        ({"eps": -1.0}, RuntimeError, "eps must be finite and not negative, but is -1"),
        ({"group_size": 3}, RuntimeError, "group_size is 3, which does not divide the 8 elements"),
        ({"group_size": 0}, RuntimeError, "group_size must be at least 1, but is 0"),
        ({"group_size": 2.5}, TypeError, "group_size must be an int"),
        ({"activation": "gelu"}, ValueError, "must be 'silu' or 'sigmoid', but is 'gelu'"),
        ({"norm_before_gate": "yes"}, TypeError, "norm_before_gate must be a bool"),
    ],
)
def test_errors(change, error, message):
    x = torch.ones(3, 8, requires_grad=True)
    call = {"input": x, "gate": torch.ones(3, 8), "normalized_shape": 8, "weight": torch.ones(8)}
    with pytest.raises(error, match=message):
        fn.rms_norm_gated(**{**call, **change})


def test_errors_of_the_backward_operator():
    x = torch.ones(3, 8)
    options = (x, x, None, (8,), 1e-5, 0.0, True, True, None, [True] * 3)
    backward = torch.ops.fused_norm.rms_norm_gated_backward
    with pytest.raises(RuntimeError, match=r"dy must be of shape \[3, 8\]"):
        backward(x[:2], torch.ones(3, 1), *options)
    with pytest.raises(RuntimeError, match=r"rstd must be contiguous, of shape \[3, 1\]"):
        backward(x, torch.ones(3), *options)
