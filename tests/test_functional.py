"""The functional forms as drop-ins for torch.nn.functional: signatures, shapes, empty tensors,
defaults."""

import inspect

import pytest
import torch
import torch.nn.functional as F

import fused_norm as fused
import fused_norm.functional as fn

PAIRS = {"layer": (fn.layer_norm, F.layer_norm), "rms": (fn.rms_norm, F.rms_norm)}
each_kind = pytest.mark.parametrize("kind", list(PAIRS))


SIGNATURES = [
    (
        fn.layer_norm,
        "input normalized_shape weight=None bias=None eps=1e-05"
        " * memory_efficient=False weight_offset=0.0",
    ),
    (
        fn.rms_norm,
        "input normalized_shape weight=None eps=None * memory_efficient=False weight_offset=0.0",
    ),
    (
        fn.add_layer_norm,
        "input residual normalized_shape weight=None bias=None eps=1e-05"
        " * memory_efficient=False weight_offset=0.0 residual_dtype=None",
    ),
    (
        fn.add_rms_norm,
        "input residual normalized_shape weight=None eps=None"
        " * memory_efficient=False weight_offset=0.0 residual_dtype=None",
    ),
    (
        fused.LayerNorm,
        "normalized_shape eps=1e-05 elementwise_affine=True bias=True device=None dtype=None"
        " * memory_efficient=False weight_offset=0.0",
    ),
    (
        fused.RMSNorm,
        "normalized_shape eps=None elementwise_affine=True device=None dtype=None"
        " * memory_efficient=False weight_offset=0.0",
    ),
]


@pytest.mark.parametrize(
    ("function", "signature"), SIGNATURES, ids=lambda f: getattr(f, "__name__", "")
)
def test_names_order_and_defaults(function, signature):
    """Callers may pass any argument by name or by position: both are fixed."""
    words = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        default = "" if parameter.default is parameter.empty else f"={parameter.default}"
        words.append(parameter.name + default)
    assert " ".join(words) == signature


@pytest.mark.parametrize(
    ("shape", "normalized_shape"),
    [
        ((4,), [4]),
        ((3, 4), [4]),
        ((3, 4), (3, 4)),
        ((2, 3, 4), [4]),
        ((2, 3, 4), [3, 4]),
        ((2, 3, 4), torch.Size([2, 3, 4])),
        ((5, 1), [1]),
        ((1, 7), [7]),
    ],
    ids=str,
)
@each_kind
def test_results_and_gradients_equal_torch_in_fp64(
    kind, shape, normalized_shape, device, generator
):
    ours, theirs = PAIRS[kind]
    values = [
        torch.randn(*s, generator=generator, device=device, dtype=torch.float64)
        for s in (shape, normalized_shape, shape)
    ]
    results = []
    for call in (ours, theirs):
        x, weight, dy = (v.clone().requires_grad_() for v in values)
        y = call(x, normalized_shape, weight)
        results.append([y.detach(), *torch.autograd.grad(y, [x, weight], dy)])
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other)


# M or N of zero, in the leading or the normalized dimensions.
EMPTY = [
    ((0, 4), [4]),
    ((2, 0, 4), [4]),
    ((0, 2, 4), [2, 4]),
    ((3, 0), [0]),
    ((0,), [0]),
    ((3, 2, 0), [2, 0]),
    ((3, 0, 2), [0, 2]),
    ((0, 4), [0, 4]),
    ((0, 0), [0]),
]


@pytest.mark.parametrize("memory_efficient", [False, True], ids=["", "memory_efficient"])
@pytest.mark.parametrize(("shape", "normalized_shape"), EMPTY, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_kind
def test_empty_tensors(kind, dtype, shape, normalized_shape, memory_efficient, device):
    ours, theirs = PAIRS[kind]
    results = []
    for call in (lambda *args: ours(*args, memory_efficient=memory_efficient), theirs):
        x = torch.ones(shape, dtype=dtype, device=device, requires_grad=True)
        params = [torch.ones(normalized_shape, dtype=dtype, device=device, requires_grad=True)]
        if kind == "layer":
            params.append(
                torch.ones(normalized_shape, dtype=dtype, device=device, requires_grad=True)
            )
        y = call(x, normalized_shape, *params)
        y.sum().backward()
        results.append([y, x.grad, *(p.grad for p in params)])
    for mine, other in zip(*results, strict=True):
        assert mine.dtype == other.dtype and mine.shape == other.shape
        assert torch.equal(mine, other)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str
)
def test_rms_norm_without_eps_takes_torchs(dtype, device, generator):
    """Inputs of 1e-4, whose mean square is smaller than fp32's machine epsilon, tell one eps
    from another."""
    x = (torch.randn(8, 64, generator=generator, device=device) * 1e-4).to(dtype)
    torch.testing.assert_close(fn.rms_norm(x, [64]), F.rms_norm(x, [64]))
    expected = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    assert torch.equal(fn.rms_norm(x, [64]), fn.rms_norm(x, [64], None, expected))


@each_kind
def test_output_is_contiguous_and_new(kind, device, generator):
    x = torch.randn(6, 5, 4, generator=generator, device=device).transpose(0, 1)
    y = PAIRS[kind][0](x, [4])
    assert y.is_contiguous()
    assert y.data_ptr() != x.data_ptr()


@each_kind
def test_channels_last_input(kind, device, generator):
    """The normalized dimensions are the last of the shape, however memory is laid out."""
    x = torch.randn(2, 3, 4, 5, generator=generator, device=device, dtype=torch.float64)
    ours, theirs = PAIRS[kind]
    strided = x.to(memory_format=torch.channels_last)
    torch.testing.assert_close(ours(strided, [4, 5]), theirs(x, [4, 5]))


@each_kind
def test_strided_parameters(kind, device, generator):
    x = torch.randn(6, 4, generator=generator, device=device, dtype=torch.float64)
    table = torch.randn(4, 3, generator=generator, device=device, dtype=torch.float64)
    ours, theirs = PAIRS[kind]
    results = []
    for call in (ours, theirs):
        weight = table[:, 1].detach().requires_grad_()
        y = call(x, [4], weight)
        results.append([y.detach(), *torch.autograd.grad(y.sin().sum(), weight)])
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other)
