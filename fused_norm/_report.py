"""What each norm of a model saves for its backward pass."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator

import torch
from torch.nn.parameter import UninitializedTensorMixin
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from fused_norm import _C, _arguments, _torch
from fused_norm.modules import LayerNorm, RMSNorm, RMSNormGated


@dataclasses.dataclass(frozen=True)
class NormMemory:
    """One call of a norm. Bytes are those that the norm alone keeps: what another layer, or the
    caller, keeps too costs the norm nothing."""

    name: str
    memory_efficient: bool
    saved_bytes: int  # with the flag as it is
    efficient_bytes: int  # with memory_efficient=True, which an RMSNormGated does not have
    columns: int
    lost_columns: int  # not recoverable: they are saved beside the output, or the input is
    columns_at_risk: int  # these, and those within a factor two of it


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """``norms`` in the order of their calls. ``print()`` shows it as a table."""

    norms: tuple[NormMemory, ...]

    @property
    def saved_bytes(self) -> int:
        return sum(norm.saved_bytes for norm in self.norms)

    @property
    def efficient_bytes(self) -> int:
        return sum(norm.efficient_bytes for norm in self.norms)

    @property
    def at_risk(self) -> tuple[str, ...]:
        """Names of the norms with columns at risk."""
        return tuple(dict.fromkeys(norm.name for norm in self.norms if norm.columns_at_risk))

    def __len__(self) -> int:
        return len(self.norms)

    def __iter__(self) -> Iterator[NormMemory]:
        return iter(self.norms)

    def __str__(self) -> str:
        if not self.norms:
            return "no norm of this library was called; fused_norm.convert(model) makes some"
        rows = [("norm", "flag", "saved bytes", "with the flag on", "columns", "lost", "at risk")]
        for norm in self.norms:
            name, flag, *counts = dataclasses.astuple(norm)
            rows.append((name, "on" if flag else "off", *(f"{count:,}" for count in counts)))
        rows.append(("all", "", f"{self.saved_bytes:,}", f"{self.efficient_bytes:,}", "", "", ""))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if index < 2 else cell.rjust(width)
                for index, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        )


def memory_report(model: torch.nn.Module, *example_inputs, **keywords) -> MemoryReport:
    """What each norm of this library in ``model`` saves for backward, with its ``memory_efficient``
    flag as it is and with the flag on, and which have columns at risk (docs/memory_efficient.md).

    Runs ``model(*example_inputs, **keywords)`` twice with gradients enabled, and no backward pass.
    Buffers, random states and flags are afterwards as they were; parameters and gradients too, if
    the forward leaves them so. What ``torch.compile`` wraps is run eagerly, which saves the same.

    >>> model = torch.nn.Sequential(LayerNorm(8), torch.nn.Linear(8, 8))
    >>> report = memory_report(model, torch.ones(4, 8))
    >>> len(report), report.at_risk
    (1, ())

    Args:
        model: any module; norms of other libraries are left out.
        example_inputs, keywords: what the model's forward takes, of any shapes and dtypes; bytes
            are those of a call with these.

    Returns:
        A :class:`MemoryReport`: a :class:`NormMemory` for each call of a norm, and their sums;
        ``print()`` shows a table.

    Raises:
        TypeError: ``model`` is not a module.
        RuntimeError: a norm is fake, or on the meta device, as accelerate's offloaded ones are
            between calls; or the two runs called different norms.
    """
    _arguments.module("model", model)
    classes = (LayerNorm, RMSNorm, RMSNormGated)
    norms = {name: m for name, m in model.named_modules() if isinstance(m, classes)}
    for name, module in norms.items():
        if any(p.is_meta or isinstance(p, _torch.FakeTensor) for p in module.parameters()):
            raise RuntimeError(f"{name or 'model'} is fake or on the meta device: it lacks weights")
    flags = {name: module.memory_efficient for name, module in norms.items()}
    as_it_is = _run(model, norms, example_inputs, keywords)
    try:
        for module in norms.values():
            module.memory_efficient = not isinstance(module, RMSNormGated)
        efficient = _run(model, norms, example_inputs, keywords)
    finally:
        for name, module in norms.items():
            module.memory_efficient = flags[name]
    if [name for name, *_ in as_it_is] != [name for name, *_ in efficient]:
        raise RuntimeError("memory_report ran the model twice, and it called other norms each time")
    calls = []
    for (name, saved, dtype), (_, saved_efficiently, _) in zip(as_it_is, efficient, strict=True):
        lost, at_risk = _columns(norms[name], dtype)
        columns = (math.prod(norms[name].normalized_shape), lost, at_risk)
        calls.append(NormMemory(name, flags[name], saved, saved_efficiently, *columns))
    return MemoryReport(tuple(calls))


def _columns(module, out_dtype) -> tuple[int, int]:
    """How many columns are not recoverable, and how many are or nearly so."""
    if isinstance(module, RMSNormGated):  # it saves its input
        return 0, 0
    parameters = module._weight_and_bias()
    weight, bias = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in parameters)
    if weight is None and bias is None:
        return 0, 0
    with torch.no_grad():
        lost = _C.unrecoverable_columns(weight, bias, module.weight_offset, out_dtype)
        g = torch.ones_like(bias) if weight is None else weight
        g = g.to(torch.promote_types(g.dtype, torch.float32)) + module.weight_offset
        near = _C.unrecoverable_columns(g / 2, bias, 0.0, out_dtype)
    return lost, max(lost, near)


def _storages(*values) -> dict[int, int]:
    """{storage: bytes} of what tensors of any kind are made of, but sparse ones. Not by the address
    of the data, which fully_shard frees while the storage stays."""
    found = {}
    for value in values:
        if not isinstance(value, torch.Tensor) or isinstance(value, UninitializedTensorMixin):
            continue
        if is_traceable_wrapper_subclass(value):  # a DTensor, nested, quantized, ...
            found |= _storages(*(getattr(value, name) for name in value.__tensor_flatten__()[0]))
        elif value.layout is torch.strided:
            storage = value.untyped_storage()
            found[_torch.address(storage)] = storage.nbytes()
    return found


def _run(model, norms, inputs, keywords) -> list[tuple[str, int, torch.dtype]]:
    """[(name, bytes that it alone keeps, output dtype)] of the calls of norms."""
    names = {module: name for name, module in norms.items()}
    calls = []  # [name, {storage: bytes}, output dtype]
    inside = []
    cells = []  # a node that held its own output, and not by way of these, would never be freed
    theirs = (*model.parameters(), *model.buffers(), *tree_leaves((inputs, keywords)))
    kept_by_others = set(_storages(*theirs))

    def pack(tensor):
        (calls[inside[-1]][1] if inside else kept_by_others).update(_storages(tensor))
        cells.append([tensor])
        return cells[-1]

    def enter(module, _inputs):
        kept_by_others.update(_storages(*module.parameters()))  # as fully_shard gathered them
        inside.append(len(calls))
        calls.append([names[module], {}, None])

    def leave(_module, _inputs, output):
        # Another hook may have put more around it. A call that raised has none.
        leaves = (leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))
        calls[inside.pop()][2] = next((leaf.dtype for leaf in leaves), None)

    try:
        with (
            contextlib.ExitStack() as hooks,
            _as_it_was(model),
            torch.compiler.set_stance("force_eager"),  # a compiled model calls no hooks of norms
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda cell: cell[0]),
        ):
            for module in norms.values():
                hooks.enter_context(module.register_forward_pre_hook(enter))
                hooks.enter_context(module.register_forward_hook(leave, always_call=True))
            output = model(*inputs, **keywords)  # keeps the storages alive: none comes twice
    finally:
        for cell in cells:
            cell.clear()
    del output
    counted = set(kept_by_others)
    result = []
    for name, storages, dtype in (call for call in calls if call[-1] is not None):
        result.append((name, sum(n for s, n in storages.items() if s not in counted), dtype))
        counted.update(storages)
    return result


@contextlib.contextmanager
def _as_it_was(model):
    """Puts back the buffers, outside of TorchScript also where forward put other tensors in their
    place, and the state of the random number generators."""
    modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
    of_modules = [(module, module._buffers.copy()) for module in modules]
    initialized = [b for b in model.buffers() if not isinstance(b, UninitializedTensorMixin)]
    buffers = [(buffer, buffer.detach().clone()) for buffer in initialized]
    devices = {p.device.index for p in model.parameters() if p.is_cuda}
    try:
        with torch.random.fork_rng(devices=sorted(devices)):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for module, named in of_modules:
            module._buffers.clear()
            module._buffers.update(named)
