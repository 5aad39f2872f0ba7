"""What a module computes, found out by running a copy of it: whether its own forward can be told
from a LayerNorm's or an RMSNorm's.

The copy shares the module's attributes and has parameters of its own, on the CPU. No constructor
runs, and nothing of the module changes.
"""

import contextlib
import inspect
import itertools
import math
import re
import warnings
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from fused_norm import _arguments, _autocast


class Form(NamedTuple):
    """What a norm computes: in which of its parameters the weight and the bias are, and its output
    dtypes, as a rule of ``output_dtype``."""

    rms: bool
    weight_name: str | None
    bias_name: str | None
    normalized_shape: tuple[int, ...]
    eps_name: str
    weight_offset: float
    output_rule: str
    autocast_rule: str  # on CUDA


def output_dtype(rule: str, input: torch.dtype, weight: torch.dtype | None) -> torch.dtype:
    """The output's dtype: ``input``'s, ``weight``'s, torch's promotion of the two, T5's (a 16-bit
    ``weight``'s, else the promotion), or fp32 (fp64 for fp64) as autocast has it."""
    if rule == "float":
        return torch.promote_types(input, torch.float32)
    if rule == "input" or weight is None:
        return input
    if rule == "weight" or (rule == "narrow weight" and weight in (_BF16, _FP16)):
        return weight
    return torch.promote_types(input, weight)


_EPS = 0.0625  # large enough that a norm that ignores or misplaces it shows
_FP64, _FP32, _BF16, _FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
_SCALES = (0.02, 0.5, 4.0, 100.0)  # of rows


class _Run(NamedTuple):
    """One call of the copy: ``results`` are the output and, where asked for, the gradients of the
    input and of the parameters."""

    x: Tensor
    parameters: dict[str, Tensor]
    eps: float | None
    dy: Tensor | None
    results: list[Tensor]

    def is_of(self, form: Form) -> bool:
        """Whether a norm of this form, computed in fp64, gives the same."""
        leaves = [t.detach().double() for t in (self.x, *self.parameters.values())]
        for leaf in leaves:
            leaf.requires_grad_(self.dy is not None)
        parameters = dict(zip(self.parameters, leaves[1:], strict=True))
        weight, bias = (parameters.get(name) for name in (form.weight_name, form.bias_name))
        weight = None if weight is None else weight + form.weight_offset
        eps = _arguments.rms_eps(self.x, self.eps)
        if form.rms:
            y = nn.functional.rms_norm(leaves[0], form.normalized_shape, weight, eps)
            y = y if bias is None else y + bias
        else:
            y = nn.functional.layer_norm(leaves[0], form.normalized_shape, weight, bias, eps)
        expected = [y]
        if self.dy is not None:
            expected += torch.autograd.grad(y, leaves, self.dy.double())
        # A few roundings on the way, to the coarser dtype, of numbers below 8. A row's gradient
        # grows with its 1 / sigma.
        u = 2**-19 if self.results[0].dtype is self.x.dtype is _FP32 else 2**-4
        return all(
            ours.shape == theirs.shape
            and bool(((ours - theirs).abs() <= u * (1 + ours.abs().amax(-1, keepdim=True))).all())
            for ours, theirs in zip(expected, self.results, strict=True)
        )


class _LikeAutocastOnCUDA(TorchFunctionMode):
    """What autocast on CUDA does to the functions that norms are written in: fp32 for these."""

    NAMES = {"__pow__", "layer_norm", "norm", "pow", "reciprocal", "rsqrt", "sum"}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func.__name__ in self.NAMES:
            args, kwargs = torch.utils._pytree.tree_map_only(
                Tensor, lambda t: _autocast.cast(t, torch.float32), (args, kwargs or {})
            )
        return func(*args, **(kwargs or {}))


def takes_one_input(cls: type) -> bool:
    """Whether forward takes the input and nothing else."""
    arguments = list(inspect.signature(cls.forward).parameters.values())
    return len(arguments) == 2 and arguments[1].kind.name.startswith("POSITIONAL_")


_EPS_NAME = re.compile("(?<![A-Za-z])(eps|EPS)|Eps")  # as in normEps, not in steps


def form_of(module: nn.Module) -> Form | str:
    """What the module computes; a string says why it is no norm of the last dimensions."""
    shapes = {name: tuple(p.shape) for name, p in module._parameters.items() if p is not None}
    if not shapes and not isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return "it has no parameter, and so no number of columns"
    normalized_shape = next(iter(shapes.values())) if shapes else tuple(module.normalized_shape)
    if len(shapes) > 2 or set(shapes.values()) - {normalized_shape} or 0 in normalized_shape:
        return "it has other parameters than a weight and a bias of one value a column"
    numbers = {n: v for n, v in vars(module).items() if v is None or isinstance(v, int | float)}
    names = [n for n, v in numbers.items() if _EPS_NAME.search(n) and not isinstance(v, bool)]
    if len(names) != 1:
        return "its epsilon was not found" + f" among {', '.join(names)}" * (len(names) > 1)
    # Outside of modes such as FakeTensorMode, which run nothing.
    with (
        _disable_current_modes(),
        torch.random.fork_rng(devices=[]),
        torch.device("cpu"),
        torch.autocast("cpu", enabled=False),
        torch.inference_mode(False),
        torch.enable_grad(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # of dtypes that a user may never pass
        try:
            return _form_of_copy(module, list(shapes), normalized_shape, names[0])
        except Exception as error:  # whatever a foreign forward raises
            return f"running it raised {type(error).__name__} for rows of its size on the CPU"


def _form_of_copy(
    module: nn.Module, names: list[str], shape: tuple[int, ...], eps_name: str
) -> Form | str:
    copy = type(module).__new__(type(module))
    for name, value in vars(module).items():
        vars(copy)[name] = value.copy() if isinstance(value, list | dict | set) else value
    generator = torch.Generator("cpu").manual_seed(0)

    def draw(*sizes, dtype=_FP32):
        return torch.randn(sizes, generator=generator, device="cpu").to(dtype)

    def run(
        rows, dtypes=(_FP32,) * 2, eps=_EPS, training=False, grads=False, cols=shape, scales=_SCALES
    ):
        # Rows of several magnitudes, and not of mean zero.
        scale = torch.tensor(scales).repeat(3)[: math.prod(rows[:2])]
        scale = scale.view(*rows[:2], *[1] * (len(rows[2:]) + len(shape)))
        x = (scale * (0.5 + draw(*rows, *cols))).to(dtypes[0]).requires_grad_(grads)
        # What forward does to its own shows, as a norm is computed of those drawn.
        parameters = {name: draw(*shape, dtype=dtypes[1]) for name in names}
        own = {name: nn.Parameter(value.clone()) for name, value in parameters.items()}
        vars(copy)["_parameters"] = dict(module._parameters) | own
        vars(copy)[eps_name], vars(copy)["training"] = eps, training
        y = type(module).forward(copy, x)
        dy = draw(*y.shape) if grads else None
        results = [y, *(torch.autograd.grad(y, (x, *own.values()), dy) if grads else ())]
        return _Run(x, parameters, eps, dy, results)

    runs = [
        run((2, 3), eps=eps, training=training, grads=True)
        for eps, training in itertools.product((_EPS, getattr(module, eps_name)), (False, True))
    ]
    runs += [run((6,)), run((2, 3, 2))]
    with contextlib.suppress(Exception):  # what a norm of these dimensions raises
        if 1 in shape:
            run((2, 3), cols=[3 if size == 1 else size for size in shape])
            return "its parameters are not of one value a column"
    taken = []
    for dtypes in ((_BF16, _BF16), (_BF16, _FP32), (_FP32, _BF16), (_FP64, _FP32)):
        with contextlib.suppress(Exception):  # not every norm takes all of them
            runs.append(run((2, 3), dtypes))
            taken.append(dtypes)
    if not any(_BF16 in dtypes for dtypes in taken):
        return "it takes no bf16"
    # Its own epsilon: None may stand for another number in each dtype. In rows this small a dtype's
    # machine epsilon shows, and no sum of squares overflows fp16.
    for dtype, scales in ((_BF16, _SCALES), (_FP16, (0.02, 0.1, 0.5)), (_FP64, (1e-9, 1e-5, 1e-3))):
        with contextlib.suppress(Exception):
            runs.append(run((2, 3), (dtype, dtype), getattr(module, eps_name), scales=scales))
    forms = [
        Form(rms, *(*order, None, None)[:2], shape, eps_name, offset, "input", "input")
        for rms, order, offset in itertools.product(
            (True, False), itertools.permutations(names), (0.0, 1.0) if names else (0.0,)
        )
    ]
    form = next((form for form in forms if all(run.is_of(form) for run in runs)), None)
    if form is None:
        return "it computes something else than a LayerNorm or an RMSNorm of its last dimensions"
    if form.rms and form.bias_name is not None:
        return "it is an RMSNorm with a bias"
    rules = ("input", "weight", "promote", "narrow weight")
    output_rule = _rule(form, runs, rules)
    with _LikeAutocastOnCUDA():
        runs = [run((2, 3), dtypes) for dtypes in taken]
    autocast_rule = _rule(form, runs, (output_rule, *rules, "float"))
    if output_rule is None or autocast_rule is None:
        return "its output has another dtype than its input or its weight"
    return form._replace(output_rule=output_rule, autocast_rule=autocast_rule)


def _rule(form: Form, runs: list[_Run], rules: tuple) -> str | None:
    """The first rule that tells the dtype of each output."""

    def holds(rule, run):
        weight = run.parameters.get(form.weight_name)
        dtype = None if weight is None else weight.dtype
        return run.results[0].dtype is output_dtype(rule, run.x.dtype, dtype)

    return next((rule for rule in rules if all(holds(rule, run) for run in runs)), None)
