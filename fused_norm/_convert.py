"""``convert``: a model's norms become this library's, in place.

A module is replaced by changing its class. The object stays, and with it its parameters, buffers,
hooks, mode, device, and whatever else refers to it: a second place in the model, an optimizer, a
list.
"""

import functools
import inspect
import re
import warnings
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_variadic
from torch.utils._python_dispatch import _disable_current_modes

from fused_norm import _arguments, functional, modules

__all__ = ["ConvertReport", "Replaced", "Skipped", "convert"]


class Replaced(NamedTuple):
    """A module that ``convert`` changed: its name in the model, its former class, and whether the
    flag was set."""

    name: str
    origin: str
    memory_efficient: bool


class Skipped(NamedTuple):
    """A module that looks like a norm and was left as it is: its name, its class, and why."""

    name: str
    origin: str
    reason: str


class ConvertReport:
    """What :func:`convert` did. ``len(report)`` is the number of modules replaced, those among them
    that were this library's and got the flag."""

    def __init__(self, replaced: list[Replaced], skipped: list[Skipped]) -> None:
        self.replaced = replaced
        self.skipped = skipped

    def __len__(self) -> int:
        return len(self.replaced)

    def __bool__(self) -> bool:
        return True  # a report of nothing replaced is no error

    def __repr__(self) -> str:
        def count(entries):
            counts: dict[str, int] = {}
            for entry in entries:
                counts[entry] = counts.get(entry, 0) + 1
            return [f"  {number:>4} x {entry}" for entry, number in counts.items()]

        lines = [f"ConvertReport: {len(self.replaced)} replaced, {len(self.skipped)} skipped"]
        lines += count(
            origin + (", memory_efficient" if flag else "") for _, origin, flag in self.replaced
        )
        lines += [f"  skipped {name or '(model)'}: {o}: {why}" for name, o, why in self.skipped]
        return "\n".join(lines)


class ConvertedRMSNorm(modules.RMSNorm):
    """An RMSNorm whose output dtype is the rule of the class that it was converted from.

    ``output_rule``: ``"input"``, ``"weight"``, or ``"promote"`` for torch's promotion of the two.
    Under autocast with ``memory_efficient`` the output is 16-bit, as that of every norm.
    """

    output_rule: str = "input"

    def forward(self, input: Tensor) -> Tensor:
        return _rms_norm(
            input,
            self.weight,
            self.normalized_shape,
            self.eps,
            self.weight_offset,
            self.memory_efficient,
            self.output_rule,
        )


def _rms_norm(
    input, weight, normalized_shape, eps, weight_offset, memory_efficient, output_rule
) -> Tensor:
    if has_torch_function_variadic(input, weight) and functional._is_overridden(input, weight):
        args = (weight, normalized_shape, eps, weight_offset, memory_efficient, output_rule)
        return handle_torch_function(_rms_norm, (input, weight), input, *args)
    saves_autocast = memory_efficient and torch.is_autocast_enabled(input.device.type)
    return functional._norm(
        input,
        weight,
        None,
        normalized_shape,
        functional._rms_eps(input, eps),
        weight_offset,
        True,
        memory_efficient,
        out_dtype=None if saves_autocast else _output_dtype(output_rule, input, weight),
    )


def _output_dtype(rule: str, input: Tensor, weight: Tensor) -> torch.dtype:
    if rule == "weight":
        return weight.dtype
    if rule == "promote":
        return torch.promote_types(input.dtype, weight.dtype)
    return input.dtype


class _RMSForm(NamedTuple):
    """What an RMSNorm class of another library computes, as its probe showed."""

    weight_offset: float
    output_rule: str
    eps_name: str
    attributes: dict  # of an instance of PROBE_SIZE


PROBE_SIZE = 11  # no likely value of an attribute that is not the size
PROBE_EPS = 0.0625  # large enough that a norm that ignores or misplaces it shows

# Shape, input and weight dtype of the probe, and how near the result must be: a few roundings of
# numbers below 8 to the coarser dtype on the way. More than two dimensions, as a norm over another
# one or over several would show.
_PROBES = [
    ((2, 3, PROBE_SIZE), torch.float32, torch.float32, 2**-20),
    ((2, 3, PROBE_SIZE), torch.bfloat16, torch.bfloat16, 2**-4),
    ((2, 3, PROBE_SIZE), torch.bfloat16, torch.float32, 2**-4),
    ((2, 3, 2, PROBE_SIZE), torch.float32, torch.bfloat16, 2**-4),
]


@functools.cache
def _probe(cls: type) -> _RMSForm | str:
    """Finds out what an RMSNorm class computes by running a small instance on the CPU; a string
    says why it is not one that can be replaced.

    Runs the class as it is, so that a version of it that computes something else is not replaced.
    """
    arguments = list(inspect.signature(cls.forward).parameters.values())
    if len(arguments) != 2 or arguments[1].kind not in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    ):
        return "its forward takes more than the input"
    # Outside of modes such as FakeTensorMode, which run nothing.
    with _disable_current_modes(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
        return _probe_an_instance(cls)


def _probe_an_instance(cls: type) -> _RMSForm | str:
    try:
        instance = cls(PROBE_SIZE)
    except Exception as error:  # whatever a foreign constructor raises
        return f"it cannot be made from a size alone ({type(error).__name__})"
    if not _has_only_a_weight(instance) or instance.weight.shape != (PROBE_SIZE,):
        return "it has other parameters or buffers than one weight a column"
    eps_names = [n for n in ("variance_epsilon", "eps", "epsilon") if n in vars(instance)]
    if len(eps_names) != 1 or not isinstance(getattr(instance, eps_names[0]), float):
        return "its epsilon was not found"
    attributes = _attributes(instance)
    setattr(instance, eps_names[0], PROBE_EPS)
    for offset in (0.0, 1.0):
        for rule in ("input", "weight", "promote"):
            if _computes(instance, offset, rule):
                return _RMSForm(offset, rule, eps_names[0], attributes)
    return "it computes something else than an RMSNorm of fp32 statistics"


def _computes(instance: nn.Module, offset: float, rule: str) -> bool:
    generator = torch.Generator("cpu").manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator, device="cpu")
    for shape, x_dtype, weight_dtype, tolerance in _PROBES:
        x = (3 * draw(shape)).to(x_dtype)
        instance.weight.data = draw(PROBE_SIZE).to(weight_dtype)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            try:
                y = type(instance).forward(instance, x)
            except Exception:  # whatever a foreign forward raises
                return False
            expected = torch.nn.functional.rms_norm(x.float(), (PROBE_SIZE,), eps=PROBE_EPS)
            expected *= instance.weight.float() + offset
        if not isinstance(y, Tensor) or y.dtype != _output_dtype(rule, x, instance.weight):
            return False
        if not torch.allclose(y.float(), expected, rtol=tolerance, atol=tolerance):
            return False
    return True


def _has_only_a_weight(module: nn.Module) -> bool:
    return (
        list(module._parameters) == ["weight"]
        and module.weight is not None
        and not module._buffers
        and not module._modules
    )


def _attributes(module: nn.Module) -> dict:
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and name != "training"
    }


def _why_not(module: nn.Module) -> str | None:
    """What makes any module unfit for a change of class."""
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module._parameters.values()):
        return "its parameters are not initialized"
    return None


def _set_flag(module: nn.Module) -> str | None:
    """Sets ``memory_efficient`` of a norm of this library, or says why not."""
    if module.memory_efficient:
        return "it is one of this library's"
    if not type(module).forward.__module__.startswith("fused_norm."):
        return "it is a subclass of this library's with a forward of its own"
    module.memory_efficient = True
    return None


def _to_torch_subclass(module: nn.Module, memory_efficient: bool) -> None:
    if isinstance(module, nn.RMSNorm):
        module.__class__ = modules.RMSNorm
        module.weight_offset = 0.0
    else:
        module.__class__ = modules.LayerNorm
    module.eps = _arguments.optional_number("eps", module.eps)
    module.memory_efficient = memory_efficient


def _to_rms_norm(module: nn.Module, memory_efficient: bool) -> str | None:
    """Changes the class of another library's RMSNorm, or says why not."""
    form = _probe(type(module))
    if isinstance(form, str):
        return form
    if not _has_only_a_weight(module) or module.weight.dim() != 1:
        return "it has other parameters or buffers than one weight a column"
    size = module.weight.shape[0]
    for name, value in _attributes(module).items():
        if name == form.eps_name:
            continue
        if name not in form.attributes:
            return f"it has an attribute {name} that a fresh instance lacks"
        usual = form.attributes[name]
        if value != usual and not (usual == PROBE_SIZE and value == size):
            return f"its attribute {name} has a value other than the usual"
    eps = float(getattr(module, form.eps_name))
    if form.output_rule == "input":
        module.__class__ = modules.RMSNorm
    else:
        module.__class__ = ConvertedRMSNorm
        module.output_rule = form.output_rule
    # What torch.nn.RMSNorm's constructor sets. The module's own attributes stay: model code may
    # read its variance_epsilon.
    module.normalized_shape = (size,)
    module.eps = eps
    module.elementwise_affine = True
    module.weight_offset = form.weight_offset
    module.memory_efficient = memory_efficient
    return None


def _qualified(cls: type) -> str:
    prefix = cls.__module__.split(".")
    return f"{prefix[0]}.{cls.__qualname__}"


def _looks_like_a_norm(cls: type) -> bool:
    """By its base class, or the last words of its name: not a block that contains one, such as
    PreNormBlock."""
    return issubclass(cls, (nn.LayerNorm, nn.RMSNorm)) or _is_name_of_a_norm(cls.__name__)


def _is_name_of_a_norm(name: str) -> bool:
    return re.search(r"(norm(alization)?(gated)?|norm[123]d)$", name.lower()) is not None


def _leaves(module: nn.Module) -> list[nn.Module]:
    """Of an nn.Sequential the modules that it calls one after the other, else the module; without
    those that give back their input, or a view of it."""
    if isinstance(module, nn.Sequential):
        return [leaf for child in module for leaf in _leaves(child)]
    return [] if isinstance(module, nn.Identity | nn.Flatten | nn.Unflatten) else [module]


def _followed_by_in_place(model: nn.Module) -> dict[nn.Module, str]:
    """{module: name of the in-place module after it}, in the order in which parents hold their
    children: the order of calls within nn.Sequential, and a guess elsewhere."""
    found = {}
    for parent_name, parent in model.named_modules():
        before = None
        for name, child in parent._modules.items():
            leaves = [] if child is None else _leaves(child)
            if not leaves:
                continue
            if before is not None and getattr(leaves[0], "inplace", False) is True:
                found[before] = f"{parent_name}.{name}".lstrip(".")
            before = leaves[-1]
    return found


def convert(model: nn.Module, *, memory_efficient: bool = False) -> ConvertReport:
    """Makes the norms of ``model`` this library's, in place, and reports what it did.

    Replaced are modules of exactly the classes :class:`torch.nn.LayerNorm` and
    :class:`torch.nn.RMSNorm`, and the RMSNorm classes of Hugging Face transformers: LLaMA, Qwen,
    Mistral, Gemma (whose weights are around zero), OLMo 2, T5 and those like them. What such a
    class computes is found by running a small instance of it; one that does not compute an RMSNorm
    is skipped. Parameters stay the same objects; dtype, device, hooks, training mode and modules
    shared between places stay as they are. Output dtypes do too, except that with
    ``memory_efficient`` under autocast the output has the autocast dtype.

    Everything else that is called a norm, or is a subclass of one, is left alone and listed in
    ``report.skipped`` with the reason.

    Args:
        model: any module, also a single norm. Convert before ``fully_shard``, DDP or
            ``torch.compile`` wrap it.
        memory_efficient: set on the replaced modules (docs/memory_efficient.md), and on norms of
            this library that do not have it yet, such as those of an earlier call: these count as
            replaced too. False leaves the flag of this library's norms as it is. A norm that is
            followed by a module that changes its input in place, such as ``ReLU(inplace=True)``,
            is converted without the flag, and a warning names the two.

    Returns:
        A :class:`ConvertReport`, whose repr is a table.

    Raises:
        TypeError: ``model`` is not a module, or ``memory_efficient`` no bool.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, but is {type(model).__name__}")
    memory_efficient = _arguments.flag("memory_efficient", memory_efficient)
    in_place = _followed_by_in_place(model) if memory_efficient else {}
    report = ConvertReport([], [])
    for name, module in list(model.named_modules()):
        cls = type(module)
        if isinstance(module, torch.jit.ScriptModule):
            original = getattr(module, "original_name", "")
            if _is_name_of_a_norm(original):
                reason = "it is compiled by TorchScript"
                report.skipped.append(Skipped(name, f"torch.jit.{original}", reason))
            continue
        known = cls in (nn.LayerNorm, nn.RMSNorm)
        foreign = cls.__module__.startswith("transformers.") and _looks_like_a_norm(cls)
        ours = isinstance(module, modules.LayerNorm | modules.RMSNorm)
        if ours and not memory_efficient:
            report.skipped.append(Skipped(name, _qualified(cls), "it is one of this library's"))
            continue
        if not known and not foreign and not ours:
            if _looks_like_a_norm(cls):
                report.skipped.append(Skipped(name, _qualified(cls), "its class is not known"))
            continue
        flag = memory_efficient and module not in in_place
        reason = _why_not(module)
        if reason is None and ours and not flag:
            reason = f"it is followed by {in_place[module]}, which changes its input in place"
        elif reason is None and ours:
            reason = _set_flag(module)
        elif reason is None and known:
            _to_torch_subclass(module, flag)
        elif reason is None:
            reason = _to_rms_norm(module, flag)
        if reason is not None:
            report.skipped.append(Skipped(name, _qualified(cls), reason))
            continue
        report.replaced.append(Replaced(name, _qualified(cls), flag))
        if memory_efficient and not flag:
            warnings.warn(
                f"{name or 'the model'} is followed by {in_place[module]}, which changes its input "
                "in place: memory_efficient stays off there, as backward needs the norm's output "
                "unchanged (pass inplace=False to the module that follows to have both)",
                stacklevel=2,
            )
    return report
