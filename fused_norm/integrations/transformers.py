"""Hugging Face transformers: attention by name, and norms for its ``kernels`` package.

>>> from fused_norm.integrations import transformers as fused
>>> fused.register(memory_efficient=True)
>>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fused_norm")
>>> model.set_use_kernels(True)  # with the package kernels; fused_norm.convert(model) without it
"""

import dataclasses
import functools

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations import hub_kernels
from transformers.masking_utils import sdpa_mask
from transformers.utils.import_utils import is_kernels_available

from fused_norm import _arguments, _convert, _probe, functional

__all__ = ["attention", "mask", "register", "unregister"]

NAME = "fused_norm"
LAYERS = ("RMSNorm", "RMSNormZeroCentered", "RMSNormGated")
DEVICES = ("cpu", "cuda")


def register(memory_efficient: bool = False) -> None:
    """Makes ``attn_implementation="fused_norm"`` known to transformers and, where its package
    ``kernels`` is installed, has ``model.set_use_kernels(True)`` run RMSNorms by this library's
    kernels, for training and inference, compiled or not.

    The norms take the place of those that transformers itself would load for "RMSNorm",
    "RMSNormZeroCentered" and "RMSNormGated" (of gated delta nets); a ``KernelConfig`` that names
    others has the last word. A second call replaces the first.

    Args:
        memory_efficient: of the norms without a gate (docs/memory_efficient.md).
    """
    memory_efficient = _arguments.flag("memory_efficient", memory_efficient)
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    if is_kernels_available():
        from kernels import Mode

        # This mode serves inference and eager code too, where nothing else is registered.
        mode = Mode.TRAINING | Mode.TORCH_COMPILE
        repositories = {name: {mode: _Repository(name, memory_efficient)} for name in LAYERS}
        _set_layers({name: dict.fromkeys(DEVICES, r) for name, r in repositories.items()})


def unregister() -> None:
    """Takes back what :func:`register` did. Models that use it go on with it."""
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(NAME, None)
    if is_kernels_available():
        _set_layers(_theirs)
        _theirs.clear()


_theirs: dict = {}  # what transformers' mapping had, or nothing: {layer: {device: repositories}}


def _set_layers(mapping: dict) -> None:
    """``set_use_kernels`` registers transformers' own mapping each time: so that one changes."""
    from kernels import register_kernel_mapping

    own = hub_kernels.get_kernel_mapping_transformers()
    for name, repositories in mapping.items():
        devices = own.setdefault(name, {})
        _theirs.setdefault(name, {device: devices.get(device, {}) for device in repositories})
        devices.update(repositories)
    register_kernel_mapping(mapping)


@dataclasses.dataclass(frozen=True)
class _Repository:
    """Where ``kernels`` finds a layer. It compares and copies these."""

    layer_name: str
    memory_efficient: bool = False

    def load(self) -> type[nn.Module]:
        return _layer(self.layer_name, self.memory_efficient)

    def __str__(self) -> str:
        return f"`fused_norm`, memory_efficient={self.memory_efficient}"


@functools.cache
def _layer(layer_name: str, memory_efficient: bool) -> type[nn.Module]:
    """What kernels allows a layer to have, and no more."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        form = _form(type(self))
        if form is None:
            return type(self).forward(self, hidden_states)
        eps_name, is_zero_centred, *rules = form
        weight, offset = self.weight, 1.0 if is_zero_centred else 0.0
        options = (getattr(self, eps_name), offset, True, memory_efficient, *rules)
        return _convert.converted_norm(hidden_states, weight, None, tuple(weight.shape), *options)

    def gated(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        if gate is None or not _is_gated_norm(type(self), self.activation):
            return type(self).forward(self, hidden_states, gate)
        return _gated_norm(self, hidden_states, gate)

    names = {"forward": gated if layer_name == "RMSNormGated" else forward}
    names |= {"can_torch_compile": True, "has_backward": True}
    return type(layer_name, (nn.Module,), names)


def _gated_norm(norm: nn.Module, hidden_states: Tensor, gate: Tensor) -> Tensor:
    shape, eps = tuple(norm.weight.shape), norm.variance_epsilon
    return functional.rms_norm_gated(
        hidden_states, gate, shape, norm.weight, eps, activation=norm.activation
    )


@functools.cache
def _gated_norm_is(cls: type, activation: str) -> bool:
    if activation not in ("silu", "sigmoid"):
        return False
    norm = cls.__new__(cls)
    nn.Module.__init__(norm)
    generator = torch.Generator().manual_seed(0)
    with torch.device("cpu"), torch.no_grad():
        x, gate, weight = torch.randn(3, 16, 16, generator=generator)
        norm.weight = nn.Parameter(weight[0])
        norm.variance_epsilon, norm.activation = 0.25, activation
        try:
            theirs = cls.forward(norm, x, gate)
        except AttributeError:  # it has more than these
            return False
        return torch.allclose(theirs, _gated_norm(norm, x, gate), rtol=1e-5, atol=1e-6)


@torch.compiler.assume_constant_result
def _is_gated_norm(cls: type, activation: str) -> bool:
    """Whether a class computes the norm before such a gate, from a weight and an epsilon alone."""
    return _gated_norm_is(cls, activation)


_forms: dict[type, tuple | None] = {}


@torch.compiler.assume_constant_result
def _form(cls: type) -> tuple[str, bool, str, str] | None:
    """What a class of RMSNorms computes, if it has a weight and an epsilon and nothing else: the
    epsilon's name, whether its weight is around zero, and the two rules of output dtypes."""
    if cls not in _forms:
        found = [_form_with(cls, eps_name) for eps_name in ("variance_epsilon", "eps")]
        _forms[cls] = next((form for form in found if form is not None), None)
    return _forms[cls]


def _form_with(cls: type, eps_name: str) -> tuple[str, bool, str, str] | None:
    norm = cls.__new__(cls)
    nn.Module.__init__(norm)
    with torch.device("cpu"):
        norm.weight = nn.Parameter(torch.ones(16))
    setattr(norm, eps_name, 1e-6)
    form = _probe.form_of(norm)
    if isinstance(form, str) or not form.rms:
        return None
    return eps_name, form.weight_offset == 1.0, form.output_rule, form.autocast_rule


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset=0,
    kv_offset=0,
    *,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    config=None,
    device="cpu",
    **options,
) -> Tensor | None:
    """The mask that :func:`attention` takes: transformers' for ``sdpa``, ``None`` for plain causal
    attention, and where a sliding window is all that there is to hide, a tensor without elements
    whose last dimension is the window."""
    is_window = (
        local_size is not None
        and allow_is_causal_skip
        and q_length == kv_length
        and isinstance(q_offset, int)
        and q_offset == kv_offset
        and getattr(config, "sliding_window", None) == local_size
        and getattr(config, "attention_chunk_size", None) is None
    )
    made = sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        local_size=None if is_window else local_size,
        allow_is_causal_skip=allow_is_causal_skip,
        device=device,
        **options,
    )
    if made is None and is_window:
        return torch.empty(1, 1, 0, local_size, dtype=torch.bool, device=device)
    return made


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cache=None,
    **options,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it, by :func:`fused_norm.functional.flash_attention`.

    Args:
        module: has ``is_causal``, where the call does not say.
        query: ``(B, Hq, Sq, D)``; key ``(B, Hk, Sk, D)`` and value ``(B, Hk, Sk, Dv)``, whose heads
            are shared without copies.
        attention_mask: of :func:`mask`, or any that ``sdpa`` takes.
        s_aux: attention sinks.
        position_bias: added to the scores; differentiable.

    Returns:
        ``(B, Sq, Hq, Dv)``, and ``None`` for the probabilities, which are never in memory.
    """
    if cache is not None:
        raise ValueError("fused_norm's attention has no paged cache: use sdpa for that")
    if options.get("output_attentions"):
        raise ValueError("fused_norm's attention has no probabilities to give: use eager for that")
    rows, columns = query.shape[2], key.shape[2]
    left = None
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    is_causal = rows > 1 and attention_mask is None and is_causal
    if attention_mask is not None and attention_mask.dim() == 4 and attention_mask.shape[2] == 0:
        if rows != columns:
            raise ValueError(
                f"a mask of a sliding window alone is for as many keys as queries, but there are "
                f"{rows} queries and {columns} keys"
            )
        is_causal, left, attention_mask = True, attention_mask.shape[3] - 1, None
    if is_causal and columns > rows:  # a static cache whose other columns are not filled yet
        key, value, columns = key[:, :, :rows], value[:, :, :rows], rows
        if position_bias is not None:
            position_bias = position_bias[..., :rows]
    if position_bias is not None:
        if attention_mask is None:
            attention_mask = position_bias
        elif attention_mask.dtype is torch.bool:
            attention_mask = torch.where(attention_mask, position_bias, float("-inf"))
        else:
            attention_mask = attention_mask + position_bias
    if attention_mask is not None and attention_mask.dtype not in (torch.bool, torch.float32):
        attention_mask = attention_mask.to(query.dtype)
    if s_aux is not None and s_aux.dtype is not torch.float32:
        s_aux = s_aux.to(query.dtype)
    out = functional.flash_attention(
        query,
        key,
        value,
        window=(left, rows - columns if is_causal else None),  # aligned at the top left
        softcap=0.0 if softcap is None else softcap,
        sink=s_aux,
        attn_mask=attention_mask,
        dropout_p=dropout,
        scale=scaling,
    )
    return out.transpose(1, 2).contiguous(), None
