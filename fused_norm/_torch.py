"""What this package takes of torch beside its public interfaces, each with the reason. Two modules
that are plugged into a part of torch import that part's own: _fusion.py Inductor's, _sharding.py
DTensor's."""

import inspect

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

# torch's own, also where torch.nn.functional's is replaced by ours.
attention = torch._C._nn.scaled_dot_product_attention

# torch.overrides.has_torch_function asks for modes and for arguments together.
is_function_mode_enabled = torch._C._is_torch_function_mode_enabled

suggest_memory_format = torch._prims_common.suggest_memory_format  # there is no public one


def overridden(function, arguments: dict):
    """What ``__torch_function__`` of a tensor, or a mode, gives for a call of the function with
    these arguments. Those that have no default are passed by position, as torch passes its own."""
    parameters = inspect.signature(function).parameters.values()
    values = {p.name: arguments[p.name] for p in parameters}
    relevant = tuple(values.values())
    first = [values.pop(p.name) for p in parameters if p.default is p.empty]
    return handle_torch_function(function, relevant, *first, **values)


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


def is_exporting() -> bool:
    """Not ``torch.compiler.is_exporting()``, which torch.compile too evaluates to True."""
    return torch.compiler._is_exporting_flag


def is_fake(tensor) -> bool:
    """Whether it is a tensor without data, as torch.export traces them."""
    return isinstance(tensor, torch._subclasses.FakeTensor)


def address(tensor: Tensor) -> int:
    """Of the C++ object, by which the extension names a tensor."""
    return tensor._cdata


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
