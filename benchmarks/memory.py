"""Memory that a transformer's training step takes with torch's norms and with ours, and its time.

Random weights and tokens; attention stores no scores. The gradients are freed before the measured
step, and the optimizer's step, which is the same for all, is left out. The variants share the
parameters, and their steps alternate.
"""

import collections
import copy
import dataclasses
import functools
import gc
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

import fused_norm as fn
from benchmarks import commandline, environment, plots, report, result_files, timing

needs_gpu = False

MIB = 2**20
VARIANTS = ("torch", "fused", "fused, memory_efficient", "fused, memory_efficient, attention")
MODES = ("eager", "compiled")
COMPILED_LAYERS = 8  # more are compiled block by block: as a whole that takes minutes
KINDS = ("norms", "linear layers", "attention", "activations", "embeddings and loss")


@dataclasses.dataclass(frozen=True)
class Preset:
    llama: bool  # RMSNorm, rotary positions, SwiGLU, no biases; else GPT-2: LayerNorm, GELU, biases
    layers: int
    hidden: int
    ffn: int
    heads: int
    vocabulary: int
    context: int
    batch: int
    dtype: torch.dtype
    padded: bool = False  # padding comes before a sequence's tokens, and attention has a mask

    @property
    def norms(self):
        return 2 * self.layers + 1

    @property
    def rows(self):
        return self.batch * self.context


PRESETS = {
    "llama-7b": Preset(True, 32, 4096, 11008, 32, 32000, 4096, 1, torch.bfloat16),
    "llama-7b-4-layers": Preset(True, 4, 4096, 11008, 32, 32000, 4096, 1, torch.bfloat16),
    "gpt2-xl": Preset(False, 48, 1600, 6400, 25, 50257, 1024, 8, torch.bfloat16),
    "llama-padded": Preset(True, 12, 2048, 5504, 16, 32000, 4096, 4, torch.bfloat16, padded=True),
    "llama-tiny": Preset(True, 4, 256, 704, 4, 512, 128, 2, torch.float32),
    "gpt2-tiny": Preset(False, 4, 256, 1024, 4, 512, 128, 2, torch.float32),
}


class Attention(nn.Module):
    def __init__(self, preset):
        super().__init__()
        self.heads, bias = preset.heads, not preset.llama
        self.qkv = nn.Linear(preset.hidden, 3 * preset.hidden, bias=bias)
        self.out = nn.Linear(preset.hidden, preset.hidden, bias=bias)
        self.core = AttentionCore()

    def forward(self, x, rotation):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(self.core(q, k, v, rotation).transpose(1, 2).flatten(2))


class AttentionCore(nn.Module):
    ours = False

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", None)  # None: causal

    def forward(self, q, k, v, rotation):
        if rotation is not None:
            q, k = (rotate(t, *rotation) for t in (q, k))
        attention = fn.functional if self.ours else F
        causal = self.mask is None
        return attention.scaled_dot_product_attention(q, k, v, self.mask, is_causal=causal)


def padded_causal(preset):
    """A mask of sequences of 5/8 to all of the context. Padding before them sees itself alone."""
    at = torch.arange(preset.context)
    length = torch.linspace(5 / 8, 1, preset.batch).view(-1, 1, 1, 1) * preset.context
    is_token = at >= preset.context - length.long()
    return (at <= at[:, None]) & (is_token | (at == at[:, None]))


def rotate(x, cos, sin):
    """Rotate the pairs (x[..., i], x[..., i + head_dim / 2]) (Su et al. 2021)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class SwiGLU(nn.Module):
    def __init__(self, preset):
        super().__init__()
        self.gate = nn.Linear(preset.hidden, preset.ffn, bias=False)
        self.up = nn.Linear(preset.hidden, preset.ffn, bias=False)
        self.down = nn.Linear(preset.ffn, preset.hidden, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, preset, make_norm):
        super().__init__()
        self.norm1, self.norm2 = make_norm(preset.hidden), make_norm(preset.hidden)
        self.attention = Attention(preset)
        if preset.llama:
            self.mlp = SwiGLU(preset)
        else:
            self.mlp = nn.Sequential(
                nn.Linear(preset.hidden, preset.ffn),
                nn.GELU(approximate="tanh"),
                nn.Linear(preset.ffn, preset.hidden),
            )

    def forward(self, x, rotation):
        x = x + self.attention(self.norm1(x), rotation)
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Tokens (batch, context) and those to predict -> loss."""

    def __init__(self, preset, make_norm):
        super().__init__()
        self.embedding = nn.Embedding(preset.vocabulary, preset.hidden)
        self.positions = None
        if not preset.llama:
            self.positions = nn.Parameter(torch.randn(preset.context, preset.hidden))
        self.blocks = nn.ModuleList(Block(preset, make_norm) for _ in range(preset.layers))
        self.norm = make_norm(preset.hidden)
        self.head = nn.Linear(preset.hidden, preset.vocabulary, bias=False)
        head_dim = preset.hidden // preset.heads
        frequency = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
        angle = torch.outer(torch.arange(preset.context), frequency)
        if preset.padded:
            mask = padded_causal(preset)
            for block in self.blocks:
                block.attention.core.mask = mask
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        rotation = (self.cos, self.sin) if self.positions is None else None
        if self.positions is not None:
            x = x + self.positions
        for block in self.blocks:
            x = block(x, rotation)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def kind_of(module):
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return "norms"
    if isinstance(module, nn.Linear):
        return "linear layers"
    if isinstance(module, AttentionCore):
        return "attention"
    if isinstance(module, (SwiGLU, nn.GELU)):
        return "activations"
    return "embeddings and loss"


def saved_by_kind(model, compute_loss):
    """{kind of layer: bytes that autograd keeps for it}: distinct storages, parameters and buffers
    left out. What a norm and another layer both keep is the other's."""
    skipped = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    owners = {}
    stack = ["embeddings and loss"]

    def pack(tensor):
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in skipped and (address not in owners or owners[address][0] == "norms"):
            owners[address] = (stack[-1], storage.nbytes())
        return tensor.detach()  # a node that kept its own output as it is would never be freed

    hooks = []
    for module in model.modules():
        push = functools.partial(lambda kind, *_: stack.append(kind), kind_of(module))
        hooks.append(module.register_forward_pre_hook(push))
        hooks.append(module.register_forward_hook(lambda *_: stack.pop() and None))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = compute_loss()  # its graph keeps the storages alive: no address comes twice
    for hook in hooks:
        hook.remove()
    del loss
    sizes = collections.Counter(dict.fromkeys(KINDS, 0))
    for kind, size in owners.values():
        sizes[kind] += size
    return dict(sizes)


@dataclasses.dataclass(frozen=True)
class Result:
    preset: str
    mode: str
    variant: str
    saved: dict | None  # kind of layer: bytes; None of compiled code, which keeps what it likes
    held: int | None  # bytes that the forward pass leaves allocated; None on a CPU
    peak: int | None  # most bytes over forward and backward, beyond parameters; None on a CPU
    seconds: float  # of forward and backward
    change: float  # against torch's in the same mode: the median of the turns' ratios, less 1

    @property
    def all_saved(self):
        return sum(self.saved.values())


def variant_of(model, variant):
    """The model with other norms and attention, and the same parameters."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    made = copy.deepcopy(model, shared)
    if variant != "torch":
        fn.convert(made, memory_efficient="memory_efficient" in variant)
    for module in made.modules():
        if isinstance(module, AttentionCore):
            module.ours = "attention" in variant
    return made


def compiled(model, variant):
    """The variant of the model, compiled: as a whole, or many layers each by itself."""
    made = variant_of(model, variant)
    options = {"fullgraph": True, "dynamic": False}
    options["options"] = {} if variant == "torch" else fn.compile_options()
    whole = len(made.blocks) <= COMPILED_LAYERS
    for module in (made,) if whole else made.blocks:
        module.compile(**options)
    return made


def measure_step(model, call, device):
    """(bytes held after forward, peak bytes, seconds)"""
    model.zero_grad(set_to_none=True)
    before = held = peak = None
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    loss = call()
    if device == "cuda":
        held = torch.cuda.memory_allocated() - before
    loss.backward()
    if device == "cuda":
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    return held, peak, time.perf_counter() - start


def measure(name, modes, device, rounds):
    """Results of all variants: a first round warms up and compiles, then their steps alternate, and
    who is first changes from round to round."""
    preset = PRESETS[name]
    gc.collect()  # nothing of the run before counts
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 1000  # the variants are modules of the same classes
    torch.manual_seed(0)
    with torch.device(device):
        default = torch.get_default_dtype()
        torch.set_default_dtype(preset.dtype)
        try:
            model = Transformer(preset, nn.RMSNorm if preset.llama else nn.LayerNorm)
        finally:
            torch.set_default_dtype(default)
        tokens = torch.randint(preset.vocabulary, (preset.batch, preset.context + 1))
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    variants = {variant: variant_of(model, variant) for variant in VARIANTS}
    calls = {}
    for variant, module in variants.items():
        calls["eager", variant] = functools.partial(module, *batch)
        if "compiled" in modes:
            calls["compiled", variant] = functools.partial(compiled(model, variant), *batch)
    keys = [(mode, variant) for mode in MODES if mode in modes for variant in VARIANTS]
    steps = {key: [] for key in keys}
    for number in range(rounds + 1):
        for key in timing.order(keys, number):
            steps[key].append(measure_step(model, calls[key], device))
    results = []
    for mode, variant in keys:
        held, peak, _ = steps[mode, variant][-1]
        own, torchs = ([s[2] for s in steps[mode, v][1:]] for v in (variant, "torch"))
        change = statistics.median(a / b for a, b in zip(own, torchs, strict=True)) - 1
        saved = None
        if mode == "eager":
            model.zero_grad(set_to_none=True)
            saved = saved_by_kind(variants[variant], calls[mode, variant])
        seconds = statistics.median(own)
        results.append(Result(name, mode, variant, saved, held, peak, seconds, change))
    return results


def predicted_saving(preset):
    """Bytes that memory_efficient frees: every norm's input, as the residual stream is read by
    additions otherwise, which keep nothing, and the fp32 mean of each of a LayerNorm's rows."""
    mean = 0 if preset.llama else 4
    return preset.norms * preset.rows * (preset.hidden * preset.dtype.itemsize + mean)


def mib(size):
    return "-" if size is None else f"{size / MIB:,.1f}"


def savings(results):
    """(preset, what, predicted, measured) of memory_efficient against fused without it."""
    for name, mode in dict.fromkeys((r.preset, r.mode) for r in results):
        fused, efficient = (
            next(r for r in results if (r.preset, r.mode, r.variant) == (name, mode, variant))
            for variant in VARIANTS[1:3]
        )
        predicted = predicted_saving(PRESETS[name])
        if fused.saved is None:
            continue
        yield name, "saved for backward", predicted, fused.all_saved - efficient.all_saved
        if fused.held is not None:
            yield name, "held after forward", predicted, fused.held - efficient.held
            yield name, "peak", predicted, fused.peak - efficient.peak


def tables(results):
    """Of the results and of the savings: (header, rows of strings) each."""
    header = ["preset", "mode", "norms", "held after forward", "peak", *KINDS, "saved in all"]
    header += ["ms a step", "against torch"]
    rows = [
        [
            r.preset,
            r.mode,
            r.variant,
            mib(r.held),
            mib(r.peak),
            *(mib(r.saved and r.saved[kind]) for kind in KINDS),
            mib(r.saved and r.all_saved),
            f"{r.seconds * 1e3:.1f}",
            f"{r.change:+.1%}",
        ]
        for r in results
    ]
    saving_rows = [
        [name, what, mib(predicted), mib(measured), f"{measured / predicted:.2%}"]
        for name, what, predicted, measured in savings(results)
    ]
    return (header, rows), (["preset", "saving", "predicted", "measured", "of it"], saving_rows)


def plot(results, path):
    """Stacked bars of what each kind of layer keeps for backward."""
    results = [r for r in results if r.saved is not None]
    if not results:
        return []
    names = {r.preset for r in results}
    figure, panels = plots.panels(results, 4.5, 5, len(names), title=lambda r: r.preset)
    for axes, here in panels:
        unit, scale = ("GiB", 2**30) if here[0].all_saved > 2**30 else ("MiB", MIB)
        labels = [r.variant.replace(", ", ",\n") for r in here]
        bottom = [0.0] * len(here)
        for kind in KINDS:
            heights = [r.saved[kind] / scale for r in here]
            axes.bar(labels, heights, bottom=bottom, label=kind)
            bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
        for label, height in zip(labels, bottom, strict=True):
            axes.annotate(f"{height:.2f}", (label, height), ha="center", va="bottom")
        axes.set_ylabel(f"saved for backward ({unit})")
        axes.margins(y=0.1)
    plots.legend(figure, axes)
    figure.savefig(path, dpi=120)
    return [path]


def write(results, facts, out):
    header = ["preset", "mode", "variant", "held_bytes", "peak_bytes", *KINDS, "saved_bytes"]
    rows = []
    for r in results:
        kinds = [r.saved and r.saved[kind] for kind in KINDS] + [r.saved and r.all_saved]
        times = [f"{r.seconds:.6f}", f"{r.change:.6f}"]
        rows.append([r.preset, r.mode, r.variant, r.held, r.peak, *kinds, *times])
    result_files.write_lines(out / "memory.csv", facts, [*header, "seconds", "change"], rows)
    pictures = plot(results, out / "memory.png")
    title, parts = "Memory of a training step", [TEXT, *tables(results)]
    report.publish(out / "memory", title, facts, parts, pictures)


TEXT = (
    "MiB. Held after forward: what the forward pass leaves allocated. Peak: over forward "
    "and backward,\nbeyond the parameters, with the gradients. By kind of layer: distinct "
    "tensors that autograd keeps; what\na norm and another layer both keep is the other's. "
    "The optimizer's step is left out. Against torch:\nmedian of the steps' ratios to "
    "torch's in the same turn. Compiled with `options=fused_norm.compile_options()`,\n"
    f"but for torch's norms; more than {COMPILED_LAYERS} layers each by itself, so that no norm "
    "takes in the addition\nof the layer before."
)


def add_arguments(parser):
    parser.add_argument(
        "--preset",
        nargs="+",
        choices=PRESETS,
        help="default: the large ones on a GPU, else the tiny ones",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=["eager"],
        help=f"compiled: more than {COMPILED_LAYERS} layers each by itself. Default: eager",
    )  # fmt: skip
    parser.add_argument("--layers", type=commandline.positive, help="so many of the presets' alone")
    parser.add_argument("--rounds", type=commandline.positive, help="default: 7, on a CPU 3")


def run(options):
    """Measure, print and write; 1 if a saving is more than 3 % off its prediction, else 0."""
    works = torch.cuda.is_available() and fn.build_info()["cuda"] is not None
    device = options.device or ("cuda" if works else "cpu")
    defaults = [name for name in PRESETS if ("tiny" in name) == (device == "cpu")]
    results = []
    for name in options.preset or defaults:
        if options.layers:
            shorter = dataclasses.replace(PRESETS[name], layers=options.layers)
            name = f"{name}, {options.layers} layer{'s' * (options.layers > 1)}"
            PRESETS[name] = shorter
        print(name, flush=True)
        rounds = options.rounds or (7 if device == "cuda" else 3)
        results += measure(name, options.modes, device, rounds)
    write(
        results, environment.facts() if device == "cuda" else environment.cpu_facts(), options.out
    )
    off = [s for s in savings(results) if s[1] != "peak" and abs(s[3] / s[2] - 1) > 0.03]
    for name, what, predicted, measured in off:
        print(f"{name}, {what}: {mib(measured)} MiB freed, {mib(predicted)} predicted")
    return 1 if off else 0
