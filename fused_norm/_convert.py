"""``convert``: a model's norms become this library's, in place.

A module is replaced by changing its class. The object stays, and with it its parameters, buffers,
hooks, mode, device, and whatever else refers to it: a second place in the model, an optimizer, a
list.
"""

import collections
import dataclasses
import re
import types
import warnings
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fused_norm import _arguments, _autocast, _probe, _torch, functional, modules

__all__ = ["ConvertReport", "Replaced", "Skipped", "convert", "revert"]


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


@dataclasses.dataclass(repr=False, eq=False)
class ConvertReport:
    """What :func:`convert` did. ``len(report)`` is the number of modules replaced, those among them
    that were this library's and got the flag."""

    replaced: list[Replaced]
    skipped: list[Skipped]

    def __len__(self) -> int:
        return len(self.replaced)

    def __bool__(self) -> bool:
        return True  # a report of nothing replaced is no error

    def __repr__(self) -> str:
        lines = [f"ConvertReport: {len(self.replaced)} replaced, {len(self.skipped)} skipped"]
        counts = collections.Counter(
            origin + (", memory_efficient" if flag else "") for _, origin, flag in self.replaced
        )
        lines += [f"  {number:>4} x {entry}" for entry, number in counts.items()]
        lines += [f"  skipped {name or '(model)'}: {o}: {why}" for name, o, why in self.skipped]
        return "\n".join(lines)


class _Converted:
    """A norm that was converted from another class. Its parameters keep the names that they have
    there, and its output the dtype, by the rules of :func:`fused_norm._probe.output_dtype`.

    Under autocast with ``memory_efficient`` the output is 16-bit, as that of every norm.
    """

    output_rule: str = "input"
    autocast_rule: str = "input"  # on CUDA

    def __getattr__(self, name: str):
        """The parameters by torch's names too, where the module has nothing else of these."""
        if name in ("weight", "bias") and getattr(self, f"{name}_name") != name:
            return self._weight_and_bias()[name == "bias"]
        return super().__getattr__(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name in ("weight", "bias"):  # torch's names, as in __getattr__
            name = getattr(self, f"{name}_name") or name
            self._parameters.setdefault(name, None)
        super().register_parameter(name, param)

    def forward(self, input: Tensor) -> Tensor:
        return converted_norm(
            input, *self._weight_and_bias(), self.normalized_shape, self.eps, self.weight_offset,
            isinstance(self, modules.RMSNorm), self.memory_efficient, self.output_rule,
            self.autocast_rule,
        )  # fmt: skip

    def reset_parameters(self) -> None:
        """What the other class does, if it can."""
        converted, former = type(self), vars(self).get("_before_convert", (object,))[0]
        if not hasattr(former, "reset_parameters") or "parametrizations" in self._modules:
            return super().reset_parameters()
        self.__class__ = former
        try:
            self.reset_parameters()
        finally:
            self.__class__ = converted


class ConvertedRMSNorm(_Converted, modules.RMSNorm):
    """An RMSNorm that was converted from another class."""


class ConvertedLayerNorm(_Converted, modules.LayerNorm):
    """A LayerNorm that was converted from another class."""


# [rms]: the class of torch's own norms once converted, and that of others.
_CLASSES = ((modules.LayerNorm, ConvertedLayerNorm), (modules.RMSNorm, ConvertedRMSNorm))


@_torch.overridable
def converted_norm(
    input, weight, bias, normalized_shape, eps, weight_offset, rms, memory_efficient,
    output_rule, autocast_rule,
) -> Tensor:  # fmt: skip
    _arguments.tensor("input", input)
    autocast = _autocast.dtype_for(input) is not None
    weight_dtype = None if weight is None else weight.dtype
    if autocast and memory_efficient:
        out_dtype = functional._out_dtype(input, rms, memory_efficient)
    else:
        rule = autocast_rule if autocast and input.is_cuda else output_rule
        out_dtype = _probe.output_dtype(rule, input.dtype, weight_dtype)
    if weight_dtype is torch.float64:  # torch's promotion, as the other class has it
        input = input.to(weight_dtype)
    options = (normalized_shape, eps, weight_offset, rms, memory_efficient)
    return functional._norm_to(out_dtype, input, weight, bias, *options)


def _why_not(module: nn.Module, cls: type) -> str | None:
    """What makes any module unfit for a change of class."""
    parameters = [p for p in module._parameters.values() if p is not None]
    dtypes = {p.dtype for p in parameters} - set(_arguments.FLOATING)
    if "forward" in vars(module) and not _own_forwards(module):
        return "its forward was replaced on the instance"
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in parameters):
        return "its parameters are not initialized"
    if any(base.__name__ == "FSDPModule" for base in cls.__mro__):
        return "fully_shard wraps it: convert first"
    if any(hasattr(p, "placements") for p in parameters):
        return "its parameters are DTensors: convert first"
    if dtypes:
        return f"it has parameters of {dtypes.pop()}"
    return None


def _own_forwards(module: nn.Module) -> list[str]:
    """Attributes that hold the forward of the module's class. accelerate's hooks keep it as
    ``_old_forward``, and put it back as ``forward`` when they are removed."""
    own = types.MethodType(type(module).forward, module)
    return [name for name in ("forward", "_old_forward") if vars(module).get(name) == own]


def _change_class(module: nn.Module, cls: type) -> None:
    forwards = _own_forwards(module)
    module.__class__ = cls
    vars(module).update(dict.fromkeys(forwards, types.MethodType(cls.forward, module)))


def _form_of_torchs(module: nn.Module) -> _probe.Form | None:
    """What one of torch's own norms computes."""
    cls = type(module)
    scope = getattr(cls.forward, "__globals__", None)  # another forward has another one
    if cls not in (nn.LayerNorm, nn.RMSNorm) or scope is not vars(nn.modules.normalization):
        return None
    rms, affine = isinstance(module, nn.RMSNorm), module.elementwise_affine
    shape, rules = module.normalized_shape, ("input", "input" if rms else "float")
    return _probe.Form(rms, "weight" if affine else None, "bias", shape, "eps", 0.0, *rules)


def _why_not_foreign(module: nn.Module, cls: type) -> str | None:
    """What makes a module of another library unfit, unless its class is named to ``convert``."""
    if isinstance(module, modules.RMSNormGated):
        return "it is one of this library's"
    if module._modules:
        return "it has submodules"
    if any(buffer is not None for buffer in module._buffers.values()):
        return "it has buffers"
    if not _probe.takes_one_input(cls):
        return "its forward takes more than the input"
    for name in [*vars(nn.Module), *_OF_OBJECT]:
        theirs, plain = (getattr(c, name, None) for c in (cls, nn.Module))
        if theirs is not plain and callable(theirs) and name not in _MAY_OVERRIDE:
            return f"its class overrides {name}, which would be lost"
    return None


_OF_OBJECT = "__getstate__ __copy__ __deepcopy__ __reduce__ __reduce_ex__".split()
_MAY_OVERRIDE = "__init__ forward extra_repr __repr__ __dir__ _get_name".split()

_ADDED = "autocast_rule bias_name elementwise_affine eps memory_efficient".split()
_ADDED += "normalized_shape output_rule weight_name weight_offset".split()


def _remember(module: nn.Module) -> None:
    """Keeps what :func:`revert` puts back: the class, and the attributes that a conversion sets."""
    attributes = {name: vars(module)[name] for name in _ADDED if name in vars(module)}
    vars(module).setdefault("_before_convert", (type(module), attributes))


def _set_flag(module: nn.Module) -> str | None:
    """Sets ``memory_efficient`` of a norm of this library, or says why not."""
    if module.memory_efficient:
        return "it is one of this library's"
    if not type(module).forward.__module__.startswith("fused_norm."):
        return "it is a subclass of this library's with a forward of its own"
    _remember(module)
    module.memory_efficient = True
    return None


def _to_form(module: nn.Module, form: _probe.Form, memory_efficient: bool) -> str | None:
    """Changes the class of another library's norm, or says why it cannot. What torch's constructor
    sets is set here; the module's own attributes stay, as model code may read its
    ``variance_epsilon``."""
    eps = _arguments.optional_number("eps", getattr(module, form.eps_name))
    rules = (form.output_rule, form.autocast_rule)
    is_torchs = type(module) in (nn.LayerNorm, nn.RMSNorm)
    is_plain = is_torchs and rules == ("input", "input" if form.rms else "float")
    _remember(module)
    plain, converted = _CLASSES[form.rms]
    try:
        _change_class(module, plain if is_plain else converted)
    except TypeError:
        del vars(module)["_before_convert"]
        return "its objects have another layout than those of torch's modules (__slots__)"
    if not is_plain:
        module.weight_name, module.bias_name = form.weight_name, form.bias_name
        module.output_rule, module.autocast_rule = rules
    module.normalized_shape = _arguments.shape(form.normalized_shape)
    module.eps = eps
    module.elementwise_affine = form.weight_name is not None
    module.weight_offset = form.weight_offset
    module.memory_efficient = memory_efficient
    return None


def revert(model: nn.Module) -> int:
    """Undoes :func:`convert`: each module that it changed has its former class and attributes
    again, and a norm of this library its former flag. Parameters, buffers and hooks stay as they
    are. A module whose class something else changed since, as ``fully_shard`` and parametrizations
    do, or whose forward, stays as it is, and a warning names it.

    Returns:
        The number of modules that were changed back.

    Raises:
        TypeError: ``model`` is not a module.
    """
    _arguments.module("model", model)
    count = 0
    for name, module in model.named_modules():
        if "_before_convert" not in vars(module):
            continue
        cls, attributes = vars(module)["_before_convert"]
        since = None
        if type(module) is not cls and not type(module).__module__.startswith("fused_norm."):
            since = f"it has become a {type(module).__name__}"
        elif "forward" in vars(module) and not _own_forwards(module):
            since = "its forward was replaced on the instance"
        if since is not None:
            warnings.warn(
                f"the norm {name or 'model'} stays converted, as {since} since: undo that first",
                stacklevel=2,
            )
            continue
        _change_class(module, cls)
        del vars(module)["_before_convert"]
        for name in _ADDED:
            vars(module).pop(name, None)
        vars(module).update(attributes)
        count += 1
    return count


_NOT_OF_FORM = {*vars(nn.Module()), "forward", "_old_forward", "_hf_hook"}


def _form_of(module: nn.Module, known: dict) -> _probe.Form | str:
    """The module's form, or why it has none. Like modules are probed once."""
    own = {**module._buffers, **module._modules}  # which compare by identity
    own |= {k: v for k, v in vars(module).items() if k not in _NOT_OF_FORM}
    shapes = [(k, None if p is None else p.shape) for k, p in module._parameters.items()]
    key = (type(module), tuple(shapes), tuple((k, type(v), v) for k, v in own.items()))
    try:
        if key not in known:
            known[key] = _probe.form_of(module)
        return known[key]
    except TypeError:  # an attribute that cannot be hashed
        return _probe.form_of(module)


def _qualified(cls: type) -> str:
    return f"{cls.__module__.partition('.')[0]}.{cls.__qualname__}"


def _is_name_of_a_norm(name: str) -> bool:
    """By its last words: not that of a block that contains a norm, nor of a parametrization."""
    ends = r"(?<!weight)(?<!spectral)norm(alization)?(gated|[123]d)?$"
    return re.search(ends, name.lower()) is not None


# They give back their input, or a view of it; dropouts in evaluation.
_PASS_ON = (nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout, nn.Dropout1d, nn.Dropout2d)
_PASS_ON += (nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def _leaves(module: nn.Module) -> list[nn.Module]:
    """The modules that run one after the other, without those that may pass their input on."""
    if isinstance(module, nn.Sequential):
        return [leaf for child in module for leaf in _leaves(child)]
    passes = isinstance(module, _PASS_ON) and getattr(module, "inplace", False) not in (True,)
    return [] if passes else [module]


def _norms_of(module: nn.Module) -> list[nn.Module]:
    """The module; or the norms in a wrapper of norms alone, such as those of peft and
    torch.compile."""
    inner = [m for m in module.modules() if m._parameters]
    is_wrapper = all(_is_name_of_a_norm(type(m).__name__) for m in inner)
    return [module, *inner] if is_wrapper else [module]


def _before_in_place(model: nn.Module) -> dict[nn.Module, str]:
    """{module: "followed by" or "declared right before", and the name of the in-place module after
    it}. Parents hold their children in the order of calls if they are nn.Sequential; elsewhere
    that is a guess."""
    found = {}
    for parent_name, parent in model.named_modules():
        before, is_called_so = None, isinstance(parent, nn.Sequential)
        for name, child in parent._modules.items():
            leaves = [] if child is None else _leaves(child)
            if not leaves:
                continue
            if before is not None and getattr(leaves[0], "inplace", False) in (True,):
                relation = "followed by " if is_called_so else "declared right before "
                relation += f"{parent_name}.{name}".lstrip(".")
                found |= dict.fromkeys(_norms_of(before), relation)
            before = leaves[-1]
    return found


def convert(
    model: nn.Module, *, memory_efficient: bool = False, classes: Sequence[type] = ()
) -> ConvertReport:
    """Makes the norms of ``model`` this library's, in place, and reports what it did.

    Replaced are torch's :class:`torch.nn.LayerNorm` and :class:`torch.nn.RMSNorm`, and every module
    of another class that computes the same: of a copy forward is run on the CPU, and its output,
    gradients and dtypes are compared with a norm's (docs/stacks.md). Parameters stay the same
    objects under the same names; dtype, device, hooks, training mode and modules shared between
    places stay as they are. Output dtypes do too, except that with ``memory_efficient`` under
    autocast the output has the autocast dtype. What else is called a norm is left alone, and
    ``report.skipped`` has the reason. :func:`revert` undoes it.

    Args:
        model: any module, also a single norm. Convert before ``fully_shard``, DDP or
            ``torch.compile`` wrap it.
        memory_efficient: set on the replaced modules (docs/memory_efficient.md), and on norms of
            this library that do not have it yet: these count as replaced too. False leaves the flag
            of this library's norms as it is. A norm that is followed by a module that changes its
            input in place, such as ``ReLU(inplace=True)``, or declared right before one, is
            converted without the flag, and a warning names the two.
        classes: classes of norms whose instances are compared although they have submodules,
            buffers, or arguments of forward with defaults. These are of no use afterwards: forward
            then takes the input alone.

    Returns:
        A :class:`ConvertReport`, whose repr is a table.

    Raises:
        TypeError: ``model`` is not a module, ``memory_efficient`` no bool, or an entry of
            ``classes`` no subclass of ``torch.nn.Module``.
    """
    _arguments.module("model", model)
    memory_efficient = _arguments.flag("memory_efficient", memory_efficient)
    classes = tuple(classes) if isinstance(classes, Iterable) else (classes,)
    for cls in classes:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise TypeError(f"classes must hold subclasses of torch.nn.Module, but has {cls!r:.80}")
    in_place = _before_in_place(model) if memory_efficient else {}
    report, forms = ConvertReport([], []), {}
    for name, module in list(model.named_modules()):
        cls = type(module)
        if isinstance(module, torch.jit.ScriptModule):
            original = getattr(module, "original_name", "")
            if _is_name_of_a_norm(original):
                reason = "it is compiled by TorchScript"
                report.skipped.append(Skipped(name, f"torch.jit.{original}", reason))
            continue
        flag = memory_efficient and module not in in_place
        named, reason = isinstance(module, classes), _why_not(module, cls)
        if isinstance(module, modules.LayerNorm | modules.RMSNorm):
            if not memory_efficient:
                reason = "it is one of this library's"
            elif reason is None and not flag:
                reason = f"it is {in_place[module]}, which changes its input in place"
            reason = reason or _set_flag(module)
        elif reason is None:
            form = _form_of_torchs(module) or (None if named else _why_not_foreign(module, cls))
            form = form or _form_of(module, forms)
            reason = form if isinstance(form, str) else _to_form(module, form, flag)
        if reason is not None:
            is_torchs = isinstance(module, (nn.LayerNorm, nn.RMSNorm))
            if named or is_torchs or _is_name_of_a_norm(cls.__name__):
                report.skipped.append(Skipped(name, _qualified(cls), reason))
            continue
        report.replaced.append(Replaced(name, _qualified(cls), flag))
        if memory_efficient and not flag:
            warnings.warn(
                f"the norm {name or 'model'} is {in_place[module]}, which changes its input in "
                "place: memory_efficient stays off there, as backward needs the norm's output "
                "unchanged. Pass inplace=False to that module to have both; if its input is not "
                "the norm's output, set memory_efficient of the norm to True",
                stacklevel=2,
            )
    return report
