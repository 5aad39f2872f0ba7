"""What autograd in C++ (csrc/ops/autograd.h) asks of Python: the operators' decompositions, and the
message of norms whose gradients are NaN; and the hooks of optimizers' steps."""

import gc

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fused_norm import _C, _attention_decomposition, _decompositions, _torch, _tracing


def _overflow_message(overflows: list[tuple[int, str, int]]) -> str:
    """What the user is told of norms whose gradients are NaN for want of room, each an address of
    its weight, or of its bias if it has none, a description of it and a number of columns."""
    _tracing.compile_anew()
    norms = "; ".join(
        f"{_name_of_norm(address) or description} had no room for {columns} column(s)"
        for address, description, columns in overflows
    )
    return (
        f"memory_efficient=True: {norms}. Of these columns the weight is zero, or small beside the "
        "bias, and there are more of them than the call had room for. The gradients of that "
        "backward pass are NaN: discard them, and repeat the step. Compiled code is compiled anew "
        "then, with more room. A CUDA graph must be captured anew. An exported program keeps its "
        "room: export it with memory_efficient=False for this norm. Eager code has enough room if "
        "parameters are changed in place under torch.no_grad(), not through .data"
    )


def _name_of_norm(address: int) -> str | None:
    """The norm that owns the parameter, by its longest name in any module; for a message."""
    modules = [
        obj
        for obj in gc.get_objects()
        if issubclass(type(obj), torch.nn.Module) and "_modules" in obj.__dict__  # initialized
    ]
    for norm in modules:
        if not isinstance(norm, (torch.nn.LayerNorm, torch.nn.RMSNorm)):
            continue
        if all(_torch.address(p) != address for p in norm.parameters(recurse=False)):
            continue
        names = [name for root in modules for name, m in root.named_modules() if m is norm]
        name = ".".join(part for part in max(names, key=len).split(".") if part != "_orig_mod")
        return f"{name} = {norm}" if name else str(norm)
    return None


_SHARDS = "_fused_norm_shards"  # of an optimizer: their version after its last step


def _version_of_shards(optimizer) -> int:
    """How often vectors were changed that fully_shard gathers parameters of norms from."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return sum(_torch.shard_version(p) for p in parameters if p.dim() == 1)


@_torch.untraced
def _before_optimizer_step(optimizer, *_) -> None:
    version = _version_of_shards(optimizer)
    if _C.before_optimizer_step(vars(optimizer).get(_SHARDS, version) != version):
        _tracing.compile_anew()


@_torch.untraced
def _after_optimizer_step(optimizer, *_) -> None:
    vars(optimizer)[_SHARDS] = _version_of_shards(optimizer)
    _C.after_optimizer_step()


# So that gradients that are NaN for want of room reach no parameter, and other changes of
# parameters are known from an optimizer's (csrc/ops/column_watch.cpp).
register_optimizer_step_pre_hook(_before_optimizer_step)
register_optimizer_step_post_hook(_after_optimizer_step)
_C.set_overflow_message(_overflow_message)

_library = torch.library.Library("fused_norm", "IMPL")
for _name in ("norm", "rms_norm_gated", "softmax", "attention"):
    _module = _attention_decomposition if _name == "attention" else _decompositions
    for _operator in (f"{_name}_forward", f"{_name}_backward"):
        _function = getattr(_module, _operator)
        _library.impl(f"decomposed_{_operator}", _function, "CompositeImplicitAutograd")
# torch.vmap: torch's own rules for the decompositions. Those of the others are in _vmap.py.
for _operator in ("norm_backward", "rms_norm_gated_backward", "softmax_backward"):
    _library.impl(_operator, getattr(_decompositions, _operator), "FuncTorchBatched")
for _key in ("CompositeImplicitAutograd", "FuncTorchBatched"):
    _library.impl("norm_statistics_backward", _decompositions.statistics_backward, _key)
