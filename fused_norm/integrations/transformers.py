"""Hugging Face transformers: attention by name, and norms for its ``kernels`` package.

>>> from fused_norm.integrations import transformers as fused
>>> fused.register(memory_efficient=True)
>>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fused_norm")
>>> model.set_use_kernels(True)  # with the package kernels; fused_norm.convert(model) without it
"""

import dataclasses
import functools
import inspect

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations import hub_kernels
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    eager_mask,
    sdpa_mask,
    sliding_window_bidirectional_overlay,
)
from transformers.utils.import_utils import is_kernels_available, is_tracing

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
    """Takes back what :func:`register` did. Norms that run by it go on with it. A model whose
    attention does is to be switched before: ``model.set_attn_implementation("sdpa")``."""
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
    """The mask that :func:`attention` takes:

    - ``None`` for plain causal attention;
    - a tensor without elements for a sliding window: ``(1, 1, 0, 1 + window)``, or, of as many keys
      on both sides, ``(1, 2, 0, 2 + keys on a side)``;
    - for causal attention in a padded batch, or in rows that hold several sequences: int32 places
      ``(N, B, 1, 1)``, counted over all tokens of the batch, where a sequence or a stretch of
      padding begins, and the number of tokens. With a window the last dimension is 1 + the window;
    - for a window on both sides in a padded batch: such places ``(N, B, 3, 2 + keys on a side)``;
    - for full attention to a padded batch, from its own tokens or from others: int32 places
      ``(2 B + 1, 1, 2, Sk)`` of queries and of keys, where what belongs together begins and ends:
      all queries of a row, and its keys without the padding;
    - transformers' mask for ``sdpa`` for anything else, in code that is traced, and for models that
      may look at the mask themselves;
    - its mask for ``eager`` for models that take neither ``sdpa`` nor this attention.
    """
    takes_ours, never_looks, cuts_queries = _masks_of(type(config))
    if not takes_ours:
        options["allow_is_bidirectional_skip"] = False  # attention() would take None for causal
        return eager_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, device=device, **options
        )
    if cuts_queries and getattr(config, "num_kv_shared_layers", 0):
        never_looks = allow_is_causal_skip = False  # None, and our own masks, cannot be cut
    is_whole = q_length == kv_length and isinstance(q_offset, int) and q_offset == kv_offset
    slides = (
        local_size is not None
        and getattr(config, "sliding_window", None) == local_size
        and getattr(config, "attention_chunk_size", None) is None
    )
    padding, mask_function = options.get("attention_mask"), options.get("mask_function")
    starts, kind, last = None, 1, 1 if local_size is None else 1 + local_size
    if never_looks and not is_tracing(padding):
        may_skip = options.get("allow_is_bidirectional_skip")
        side = _keys_on_a_side(mask_function) if may_skip else None
        if may_skip and mask_function is bidirectional_mask_function:
            is_padded = padding is not None and padding.shape == (batch_size, kv_length)
            places = _places_of_tokens(padding, q_length) if is_padded and q_length > 1 else None
            if places is not None:
                return places
        elif side is not None and is_whole:
            kind, last = 3, 2 + side
            if padding is not None:
                starts = _padding_starts(padding, needs_padding=side >= kv_length)
            elif side < kv_length:
                return torch.empty(1, 2, 0, last, dtype=torch.bool, device=device)
        elif is_whole and (local_size is None or slides):
            if not allow_is_causal_skip:
                starts = _packed_starts(mask_function, slides)
            elif padding is not None and (slides or mask_function is causal_mask_function):
                starts = _padding_starts(padding)
    if starts is not None and starts.shape == (batch_size, q_length):
        places = nn.functional.pad(starts.flatten(), (0, 1), value=True).nonzero().to(torch.int32)
        return places[..., None, None].expand(-1, batch_size, kind, last)
    is_window = never_looks and is_whole and slides and allow_is_causal_skip
    is_window = is_window and kv_length >= local_size
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
        return torch.empty(1, 1, 0, 1 + local_size, dtype=torch.bool, device=device)
    return made


@torch.compiler.assume_constant_result
def _masks_of(config_class: type) -> tuple[bool, bool, bool]:
    """Whether models of such a config take this attention with the masks of ``sdpa``, whether they
    never look at the mask themselves, as those that take flash attention do not, and whether they
    cut queries and masks to the last rows before layers that share keys, as Gemma 4 does."""
    return _masks(config_class)


@functools.cache
def _masks(config_class: type) -> tuple[bool, bool, bool]:
    classes, models = [PreTrainedModel], []
    while classes:
        model = classes.pop()
        classes += model.__subclasses__()
        if model.config_class is config_class:
            models.append(model)
    flash = [m._supports_flash_attn and m._can_set_attn_implementation() for m in models]
    takes_ours = [
        m._supports_sdpa or (m._supports_flash_attn and m._supports_attention_backend)
        for m in models
    ]
    cuts_queries = any(hasattr(m, "_maybe_slice_kv_shared_inputs") for m in models)
    return not models or any(takes_ours), all(flash), cuts_queries


def _padding_starts(shown: Tensor, needs_padding: bool = True) -> Tensor | None:
    """Where stretches of tokens and of padding begin in rows ``(B, S)``. ``None`` if padding has
    tokens on both sides, which see each other; also, with ``needs_padding``, if there is none.
    Waits for the GPU."""
    starts = shown != nn.functional.pad(shown, (1, -1))
    has_holes = ((starts & shown).sum(1) > 1).any()
    if bool(has_holes | shown.all() if needs_padding else has_holes):
        return None
    starts[:, :1] = True
    return starts


def _places_of_tokens(shown: Tensor, q_length: int) -> Tensor | None:
    """:func:`mask` of full attention to the tokens of rows ``(B, Sk)``: each row is a sequence, and
    the padding between the tokens of two rows is one without queries. ``None`` where
    :func:`_padding_starts` gives ``None``."""
    if _padding_starts(shown) is None:
        return None
    rows, begin = torch.arange(len(shown), device=shown.device), shown.int().argmax(1)
    keys = torch.stack((begin, begin + shown.sum(1)), 1) + rows[:, None] * shown.shape[1]
    queries = torch.stack((rows, rows + 1), 1) * q_length
    places = torch.stack((queries, keys)).flatten(1)
    # 2 B + 1, so that one with its rows repeated or chosen from is no such mask
    places = torch.cat((places, places[:, -1:]), 1).to(torch.int32)
    return places.T[:, None, :, None].expand(-1, -1, -1, shown.shape[1])


def _inside(function) -> dict:
    return inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}


def _keys_on_a_side(mask_function) -> int | None:
    """How many keys a query sees on either side, if the function is of such a window alone."""
    window, whole = _inside(mask_function).get("mask_functions", (None, None))[:2]
    code = sliding_window_bidirectional_overlay(0).__code__
    if whole is bidirectional_mask_function and getattr(window, "__code__", None) is code:
        return _inside(window)["sliding_window"]
    return None


def _packed_starts(mask_function, slides: bool) -> Tensor | None:
    """Where the sequences begin that transformers found in rows by their positions; ``None`` if the
    function is not of causal attention, or of the window, within them alone."""

    functions = _inside(mask_function).get("mask_functions", ())
    if len(functions) != 2:
        return None
    whole, within = functions
    if "packed_sequence_mask" in _inside(whole):  # in transformers 5.23
        whole, within = within, whole
    whole = _inside(whole).get("mask_function", whole)  # of positions, since 5.23
    if slides:
        window, whole = _inside(whole).get("mask_functions", (None, None))[:2]
        if "sliding_window" not in _inside(window):
            return None
    numbers = _inside(within).get("packed_sequence_mask")
    if whole is not causal_mask_function or numbers is None:
        return None
    return numbers != nn.functional.pad(numbers, (1, -1), value=-1)


def _showing(attention_mask: Tensor | None, shown: Tensor) -> Tensor:
    """The mask, hiding what is not shown as well."""
    if attention_mask is None:
        return shown
    if attention_mask.dtype is torch.bool:
        return attention_mask & shown
    return attention_mask.masked_fill(~shown, float("-inf"))


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
    indices: Tensor | None = None,
    cache=None,
    **options,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it, by :func:`fused_norm.functional.flash_attention`.

    Args:
        module: has ``is_causal``, where the call does not say.
        query: ``(B, Hq, Sq, D)``; key ``(B, Hk, Sk, D)`` and value ``(B, Hk, Sk, Dv)``, whose heads
            are shared without copies. A batch of one broadcasts.
        attention_mask: of :func:`mask`, or any that ``sdpa`` takes.
        s_aux: attention sinks.
        position_bias: added to the scores; differentiable.
        indices: ``(B, Sq, K)``, the keys that each query sees of those that the mask shows.
        options: ``cu_seq_lens_q`` and ``cu_seq_lens_k``, ``(sequences + 1,)``: where the sequences
            of one packed row begin, and its end.

    Returns:
        ``(B, Sq, Hq, Dv)``, and ``None`` for the probabilities, which are never in memory.
    """
    if cache is not None:
        raise ValueError("fused_norm's attention has no paged cache: use sdpa for that")
    for name in ("block_indices", "sinks"):  # of keys; of each query
        if options.get(name) is not None:
            raise ValueError(
                f"fused_norm's attention does not take the {name} of {type(module).__name__}: use "
                "eager for that"
            )
    if options.get("output_attentions"):
        raise ValueError("fused_norm's attention has no probabilities to give: use eager for that")
    if query.shape[0] != key.shape[0] and 1 in (query.shape[0], key.shape[0]):  # learned queries
        batch = max(query.shape[0], key.shape[0])
        query, key, value = (t.expand(batch, -1, -1, -1) for t in (query, key, value))
    batch, _, rows, _ = query.shape
    columns, places, left, right = key.shape[2], None, None, None
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    is_causal = rows > 1 and attention_mask is None and is_causal
    is_ours = attention_mask is not None and attention_mask.dim() == 4
    if is_ours and (attention_mask.dtype is torch.int32 or attention_mask.shape[2] == 0):
        count, made_for, kind, last = attention_mask.shape
        fits = rows == columns and (kind == 0 or (kind < 4 and made_for == batch))
        if not ((count, last) == (2 * batch + 1, columns) if kind == 2 else fits):
            raise ValueError(
                f"the mask {tuple(attention_mask.shape)} of sequences or of a window alone is not "
                f"for query {tuple(query.shape)} and key {tuple(key.shape)}"
            )
        left = last - 2 if kind != 2 and last > 1 else None
        is_causal_window = kind == 1 or (kind == 0 and made_for == 1)
        right = 0 if is_causal_window else left
        if kind > 0:
            places = [attention_mask[:, 0, i, 0].contiguous() for i in (0, -1)]
        attention_mask = None
    if is_causal and columns > rows:  # a static cache whose other columns are not filled yet
        key, value, columns = key[:, :, :rows], value[:, :, :rows], rows
        if position_bias is not None:
            position_bias = position_bias[..., :rows]
    packed = [options.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k")]
    if places is None and all(offsets is not None for offsets in packed):
        if batch != 1 or rows != columns:
            raise ValueError(
                "cu_seq_lens_q and cu_seq_lens_k are of one row with all of its keys, but query "
                f"has shape {tuple(query.shape)} and key {tuple(key.shape)}"
            )
        places = [offsets.to(torch.int32) for offsets in packed]
    if is_causal:
        right = rows - columns  # aligned at the top left
    is_alone = attention_mask is None and position_bias is None and indices is None
    if places is not None and not is_alone:
        of_queries, of_keys = (
            torch.bucketize(torch.arange(batch * n, device=at.device).int(), at, right=True)
            for n, at in zip((rows, columns), places, strict=True)
        )
        shown = of_queries.view(batch, 1, -1, 1) == of_keys.view(batch, 1, 1, -1)
        attention_mask = _showing(attention_mask, shown)
        places = None
    if position_bias is not None:
        if attention_mask is None:
            attention_mask = position_bias
        elif attention_mask.dtype is torch.bool:
            attention_mask = torch.where(attention_mask, position_bias, float("-inf"))
        else:
            attention_mask = attention_mask + position_bias
    if indices is not None:
        shown = torch.zeros(batch, 1, rows, columns, dtype=torch.bool, device=query.device)
        shown.scatter_(-1, indices[:, None].long(), True)
        attention_mask = _showing(attention_mask, shown)
    if attention_mask is not None and attention_mask.dtype not in (torch.bool, torch.float32):
        if not attention_mask.is_floating_point():
            raise ValueError(
                f"attention_mask must be of bool or floating numbers, but is {attention_mask.dtype}"
            )
        attention_mask = attention_mask.to(query.dtype)
    if s_aux is not None and s_aux.dtype is not torch.float32:
        s_aux = s_aux.to(query.dtype)
    scores = {
        "window": (left, right),
        "softcap": 0.0 if softcap is None else softcap,
        "sink": s_aux,
        "dropout_p": dropout,
        "scale": scaling,
    }
    if places is not None:
        tokens = [t.transpose(1, 2).flatten(0, 1) for t in (query, key, value)]
        out = functional.flash_attention_varlen(*tokens, *places, rows, columns, **scores)
        return out.unflatten(0, (batch, rows)), None
    out = functional.flash_attention(query, key, value, attn_mask=attention_mask, **scores)
    return out.transpose(1, 2).contiguous(), None
