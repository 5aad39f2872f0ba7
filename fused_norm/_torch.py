"""``__torch_function__`` of the public functions; and what this package takes of torch beside its
public interfaces, each with the reason. Two modules that are plugged into a part of torch import
that part's own: _fusion.py Inductor's, _sharding.py DTensor's."""

import functools
import importlib.machinery
import inspect
import operator
import sys
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._python_dispatch import _disable_current_modes

# torch's own, also where torch.nn.functional's or torch's are replaced by ours.
attention = torch._C._nn.scaled_dot_product_attention
softmax, log_softmax = torch.ops.aten.softmax.int, torch.ops.aten.log_softmax.int

suggest_memory_format = torch._prims_common.suggest_memory_format  # there is no public one
no_modes = _disable_current_modes  # hides a check from tracers; there is no public one
# Lets requires_grad_() be called where a transform of torch.func is at work; as above.
allow_requires_grad = torch._functorch.eager_transforms.enable_inplace_requires_grad
in_functorch = torch._C._functorch.maybe_current_level  # None where no transform is at work
FakeTensor = torch._subclasses.FakeTensor  # without data, as torch.export traces them
address = operator.attrgetter("_cdata")  # of the C++ object, by which the extension names a tensor

_Function = TypeVar("_Function", bound=Callable)


def overridable(function: _Function) -> _Function:
    """Lets ``__torch_function__`` of an argument, or a mode, take the calls of a function. Not in
    compiled code, where subclasses and modes see the operators; nor where a tensor is nested, as
    nested tensors know torch's own functions alone, unless there is a mode.

    Like torch, it passes on by position what has no default, and the rest by name.
    """

    @functools.wraps(function)
    def public(*args, **kwargs):
        if has_torch_function(args) or (kwargs and has_torch_function(tuple(kwargs.values()))):
            if is_overridden(*args, *kwargs.values()):
                return overridden(public, *args, **kwargs)
        return function(*args, **kwargs)

    public.__signature__ = inspect.signature(function)  # getfullargspec looks at no __wrapped__
    # A code of its own: Dynamo compiles the same one a few times only.
    public.__code__ = public.__code__.replace(co_name=function.__name__)
    return public


def is_overridden(*values) -> bool:
    """After ``has_torch_function`` said yes, of an argument or a mode: whether the call is handed
    over. Not in compiled code, and not for nested tensors alone."""
    if torch.compiler.is_compiling():
        return False
    nested = any(isinstance(t, Tensor) and t.is_nested for t in values)
    return not nested or torch._C._is_torch_function_mode_enabled()


def overridden(function: Callable, *args, **kwargs):
    """What ``__torch_function__`` of an argument, or a mode, gives for the call."""
    signature = inspect.signature(function)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    values = bound.arguments
    mask = values.get("attn_mask")
    dense = dense_mask(mask, values.get("query"))
    if dense is not mask:  # its __torch_function__ knows torch's own function alone
        values["attn_mask"] = dense
        return function(*bound.args, **bound.kwargs)
    relevant, parameters = tuple(values.values()), signature.parameters.values()
    first = [values.pop(p.name) for p in parameters if p.default is p.empty]
    return handle_torch_function(function, relevant, *first, **values)


def dense_mask(mask, query):
    """What a CausalBias of torch.nn.attention.bias, whose own data is never set, stands for; others
    as they are. The module is not loaded from here."""
    bias = sys.modules.get("torch.nn.attention.bias")
    if bias is None or not isinstance(mask, bias.CausalBias):
        return mask
    return mask._materialize(getattr(query, "device", None))


def constant(function):
    """``torch.compiler.assume_constant_result``, without loading the compiler: a tracer runs the
    function and keeps no trace of it."""
    function._dynamo_marked_constant = True
    return function


def untraced(function):
    """``torch.compiler.disable``, without loading the compiler: compiled code calls the function,
    and does not try to trace it."""
    function._torchdynamo_disable = True
    return function


def after_import(name: str, function: Callable) -> None:
    """Calls ``function(module)`` as soon as something imports the module of this name. To import
    it here would take as long as all of this package, or a hundred times as long."""

    class Finder:
        @staticmethod
        def find_spec(wanted, path, target=None):
            spec = importlib.machinery.PathFinder.find_spec(name, path) if wanted == name else None
            if spec is not None:
                load = spec.loader.exec_module
                spec.loader.exec_module = lambda module: (load(module), function(module))
            return spec

    if sys.modules.get(name):  # import_module() waits for a thread that is importing it
        function(importlib.import_module(name))
    else:
        sys.meta_path.insert(0, Finder)


def is_exporting() -> bool:
    """Not ``torch.compiler.is_exporting()``, which torch.compile too evaluates to True."""
    return torch.compiler._is_exporting_flag


def is_known(condition) -> bool:
    """Whether it holds. False where it is about sizes that a tracer does not know."""
    if torch.compiler.is_compiling():
        return torch.fx.experimental.symbolic_shapes.guard_or_false(condition)
    return bool(condition)


def shard_version(parameter: Tensor) -> int:
    """How often a DTensor and its shard were changed; 0 of others. No public name says it."""
    shard = getattr(parameter, "_local_tensor", None)
    return 0 if shard is None else parameter._version + shard._version


def ragged_dim(nested: Tensor) -> int:
    """The dimension of a nested tensor of layout torch.jagged whose size differs."""
    return nested._ragged_idx


def nested_as(nested: Tensor, values: Tensor) -> Tensor:
    """A tensor with the rows ``values``, nested as ``nested``: of the same symbolic shape, which
    needs the bounds of its sizes where they are known, and no wait where they are not."""
    return torch.nested.nested_tensor_from_jagged(
        values,
        nested.offsets(),
        lengths=nested.lengths(),
        jagged_dim=nested._ragged_idx,
        min_seqlen=nested._maybe_min_seqlen,
        max_seqlen=nested._maybe_max_seqlen,
    )
