"""FlashAttention, forward and backward, in TFLOP/s beside other libraries.

TFLOP/s count the pairs of a query and a key that it sees: 2 (D + Dv) a pair and head forward,
2 (3 D + 2 Dv) backward, whatever a kernel makes again. All implementations have the same tensors,
of strides (batch, row, head, column), and take turns; a time is the median of the rounds. Backward
is `torch.autograd.grad` with respect to query, key and value; ours gives the same bits every time,
as do those named deterministic.
"""

import dataclasses
import functools
import importlib
import inspect
import itertools

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from torch.nn.attention import SDPBackend, sdpa_kernel

import fused_norm.functional as fn
from benchmarks import attention_report, commandline, environment, timing
from benchmarks.attention_report import OURS, Record
from benchmarks.peers import first_line
from benchmarks.sensors import Sensors

# Probabilities, the derivatives by scores and each result are rounded to bf16 once, by 0.43 u in
# root mean square of what they are; sums of terms of random signs keep that ratio.
TOLERANCE = 2 * 2.0**-8
MIXED = (8192, 4096, 2048, 1024, 512, 256, 128, 128)
DIRECTIONS, STATE = ("forward", "backward"), ("MHz", "watts")


@dataclasses.dataclass(frozen=True)
class Cell:
    group: str
    head_dim: int
    length: int  # of a sequence; of the longest one where they are packed
    causal: bool = False
    window: int | None = None  # keys before a query that it sees
    group_size: int = 1  # query heads of a key head
    option: str = "none"
    lengths: tuple = ()  # packed
    tokens: int = 16384  # of a batch
    width: int = 2048  # all heads' columns
    model: str = ""  # whose shape it is
    keys: int = 0  # of a sequence, where they are not as many as queries
    value_dim: int = 0  # where it is not head_dim

    def __post_init__(self):
        object.__setattr__(self, "keys", self.keys or self.length)
        object.__setattr__(self, "value_dim", self.value_dim or self.head_dim)

    @property
    def heads(self):
        return self.width // self.head_dim // 2 * 2

    @property
    def mask(self):
        return "causal" if self.causal else "full"

    @property
    def name(self):
        words = [f"{self.head_dim} x {self.length} {self.mask}"]
        if self.model:
            words = [f"{self.model}: {len(self.sequences)} x {self.heads} x {self.length}"]
            words += [f"({self.keys} keys)"] * (self.keys != self.length)
            words += [f"D {self.head_dim}"]
            words += [f"({self.value_dim})"] * (self.value_dim != self.head_dim)
            words += ["causal"] * self.causal
        words += [f"window {self.window}"] * (self.window is not None)
        words += [f"GQA {self.group_size}"] * (self.group_size > 1)
        if self.group == "GQA" and self.tokens == self.length:
            words.append(f"one sequence, {self.heads} heads")
        words += [f"packed {len(self.lengths)}"] * bool(self.lengths)
        return " ".join(words + [self.option] * (self.option != "none"))

    @property
    def reach(self):
        """Keys before a query of a causal cell that it sees, beside its own."""
        return self.length if self.window is None else self.window

    @property
    def sequences(self):
        return self.lengths or (self.length,) * (self.tokens // self.length)

    def flops(self, direction):
        pairs = sum(n * n for n in self.sequences) * self.keys // self.length
        if self.causal or self.option == "causal mask":
            pairs = sum(min(i, self.reach) + 1 for n in self.sequences for i in range(n))
        of_keys, of_values = (1, 1) if direction == "forward" else (3, 2)
        columns = of_keys * self.head_dim + of_values * self.value_dim
        return 2 * pairs * self.heads * columns


# Shapes of models: sequences, heads, heads of a key head, queries, keys, D, Dv, causal, option.
MODELS = {
    "GPT-2": (16, 12, 1, 1024, 1024, 64, 64, True, "none"),
    "Llama 3 8B": (1, 32, 4, 8192, 8192, 128, 128, True, "none"),
    "Llama 3 8B, decoding": (32, 32, 4, 1, 4096, 128, 128, False, "none"),
    "Llama 3 8B, decoding one": (1, 32, 4, 1, 8192, 128, 128, False, "none"),
    "Gemma 2 9B": (2, 16, 2, 4096, 4096, 256, 256, True, "none"),
    "Gemma 2B": (1, 8, 8, 8192, 8192, 256, 256, True, "none"),
    "DeepSeek-V3, 16 heads": (1, 16, 1, 4096, 4096, 192, 128, True, "none"),
    "BERT large": (32, 16, 1, 512, 512, 64, 64, False, "none"),
    "BERT base": (256, 12, 1, 128, 128, 64, 64, False, "none"),
    "BERT base, short": (512, 12, 1, 64, 64, 64, 64, False, "padding"),
    "BERT large, training": (32, 16, 1, 512, 512, 64, 64, False, "dropout"),
    "GPT-2, training": (16, 12, 1, 1024, 1024, 64, 64, True, "dropout"),
    "T5 base": (16, 12, 1, 512, 512, 64, 64, False, "bias gradient"),
    "ViT-B/16": (64, 12, 1, 197, 197, 64, 64, False, "none"),
    "CLIP ViT-B/32": (256, 12, 1, 50, 50, 64, 64, False, "none"),
    "ViT-H/14": (64, 16, 1, 257, 257, 80, 80, False, "none"),
    "SigLIP so400m": (32, 16, 1, 729, 729, 72, 72, False, "none"),
    "Swin-T, windows": (2048, 6, 1, 49, 49, 32, 32, False, "none"),
    "Whisper large": (8, 20, 1, 1500, 1500, 64, 64, False, "none"),
    "Whisper large, cross": (8, 20, 1, 448, 1500, 64, 64, False, "none"),
    "Stable Diffusion 1.5": (8, 8, 1, 4096, 4096, 40, 40, False, "none"),
    "Stable Diffusion 1.5, text": (8, 8, 1, 4096, 77, 40, 40, False, "none"),
    "SDXL": (4, 10, 1, 4096, 4096, 64, 64, False, "none"),
    "CogVideoX, 24 heads": (1, 24, 1, 17776, 17776, 64, 64, False, "none"),
    "Wan 1.3B": (1, 12, 1, 32760, 32760, 128, 128, False, "none"),
    "video, 16 frames": (4096, 8, 1, 16, 16, 64, 64, False, "none"),
    "AlphaFold, rows": (128, 4, 1, 384, 384, 32, 32, False, "bias gradient"),
    "BEiT-B/16": (64, 12, 1, 197, 197, 64, 64, False, "bias gradient"),
    "Swin-T, windows with a bias": (2048, 6, 1, 49, 49, 32, 32, False, "bias gradient"),
    "Swin-T, shifted windows": (2048, 6, 1, 49, 49, 32, 32, False, "own bias gradient"),
    "Swin-B, 384 pixels": (512, 8, 1, 144, 144, 32, 32, False, "bias gradient"),
}


def of_models():
    for model, (
        count,
        heads,
        group,
        queries,
        keys,
        dim,
        value_dim,
        causal,
        option,
    ) in MODELS.items():
        shape = {"tokens": count * queries, "width": heads * dim, "group_size": group}
        shape |= {"keys": keys, "value_dim": value_dim, "option": option, "model": model}
        yield Cell("models", dim, queries, causal, **shape)


def cells(quick):
    lengths = (2048, 16384) if quick else (512, 1024, 2048, 4096, 8192, 16384)
    dims = (64, 128) if quick else (64, 96, 128, 192, 256)
    found = [Cell("lengths", d, n, c) for d in dims for c in (False, True) for n in lengths]
    found += [Cell("GQA", 128, 4096, True, group_size=g) for g in (1, 4, 8, 16)]
    # What one of eight GPUs has of a model whose heads are spread over them.
    found.append(Cell("GQA", 128, 8192, True, group_size=8, tokens=8192, width=1024))
    found += [Cell("windows", 128, 16384, True, window) for window in (512, 4096)]
    for packed, d in itertools.product(((2048,) * 8, MIXED), (64, 128)):
        found.append(Cell("packed", d, max(packed), True, lengths=packed))
    found += [
        Cell("options", d, 4096, option=o) for d in (64, 128) for o in OPTIONS if "own" not in o
    ]
    found += of_models()
    # The last one's work is so little that its time is the host's.
    return [*found, Cell("host", 64, 128, tokens=128, width=128)]


# What an option makes of a cell: arguments of flash_attention. On the device that is the default.
OPTIONS = {
    "none": lambda c: {},
    "softcap": lambda c: {"softcap": 30.0},
    "sink": lambda c: {"sink": torch.randn(c.heads)},
    "alibi": lambda c: {"alibi_slopes": torch.rand(c.heads) / 64},
    "padding": lambda c: {
        "attn_mask": torch.arange(c.length) < torch.full((len(c.sequences), 1, 1, 1), c.length - 5)
    },
    "causal mask": lambda c: {
        "attn_mask": OPTIONS["padding"](c)["attn_mask"]
        & torch.ones(c.length, c.length).tril().bool()
    },
    "dropout": lambda c: {"dropout_p": 0.1},
    "boolean": lambda c: {"attn_mask": torch.rand(1, 1, c.length, c.keys) > 0.25},
    "bias": lambda c: {"attn_mask": torch.randn(1, c.heads, c.length, c.keys).bfloat16()},
    "bias gradient": lambda c: {"attn_mask": OPTIONS["bias"](c)["attn_mask"].requires_grad_()},
    # A bias for each sequence.
    "own bias gradient": lambda c: {
        "attn_mask": torch.randn(len(c.sequences), c.heads, c.length, c.keys)
        .bfloat16()
        .requires_grad_()
    },
}


class Inputs:
    """The tensors of a cell: query, key, value and dout are leaves (batch, heads, rows, D), or
    (rows, heads, D)."""

    def __init__(self, cell, device="cuda"):
        torch.manual_seed(0)

        def make(heads, length, dim):
            rows = (cell.tokens,) if cell.lengths else (len(cell.sequences), length)
            made = torch.randn(*rows, heads, dim, dtype=torch.bfloat16)
            return (made if cell.lengths else made.transpose(1, 2)).requires_grad_()

        with torch.device(device):
            kv_heads = cell.heads // cell.group_size
            self.qkv = [
                make(cell.heads, cell.length, cell.head_dim),
                make(kv_heads, cell.keys, cell.head_dim),
                make(kv_heads, cell.keys, cell.value_dim),
            ]
            self.dout = make(cell.heads, cell.length, cell.value_dim).detach()
            offsets = torch.tensor((0, *itertools.accumulate(cell.sequences))).int()
            self.sizes = (offsets, offsets, cell.length, cell.length)  # of packed sequences
            self.options = OPTIONS[cell.option](cell)
        self.mask = self.options.get("attn_mask")
        self.leaves = [*self.qkv]
        self.leaves += [self.mask] * (self.mask is not None and self.mask.requires_grad)


def ours(cell, x):
    masks = {"causal": cell.causal, "window": None if cell.window is None else (cell.window, None)}
    if cell.lengths:
        return functools.partial(fn.flash_attention_varlen, *x.qkv, *x.sizes, **masks)
    return functools.partial(fn.flash_attention, *x.qkv, **masks, **x.options)


def of_torch(backend, masks, cell, x):
    """`masks`: whether it is to be seen with a mask, without, or both."""
    known = cell.option in ("none", "dropout") or x.mask is not None
    if cell.lengths or cell.window is not None or not known or (x.mask is not None) not in masks:
        return None
    options = {"attn_mask": x.mask, "is_causal": cell.causal, "enable_gqa": True}
    options["dropout_p"] = x.options.get("dropout_p", 0.0)
    call = functools.partial(F.scaled_dot_product_attention, *x.qkv, **options)
    return sdpa_kernel(backend)(call)


def torch_varlen(cell, x):
    if not cell.lengths:
        return None
    from torch.nn.attention.varlen import varlen_attn

    masks = {"is_causal": True}  # until torch 2.10
    if "window_size" in inspect.signature(varlen_attn).parameters:
        masks = {"window_size": (-1, 0)}
    return functools.partial(varlen_attn, *x.qkv, *x.sizes, **masks)


def flash_attn(module, deterministic, cell, x):
    """Of flash-attn 3 or 4, whose arguments have the same names."""
    if cell.option not in ("none", "softcap"):
        return None
    library = importlib.import_module(module)
    options = {"causal": cell.causal, "deterministic": deterministic, **x.options}
    if cell.window is not None:
        options["window_size"] = (cell.window, 0)
    if not cell.lengths:
        inputs = [t.transpose(1, 2) for t in x.qkv]
        return lambda: output(library.flash_attn_func(*inputs, **options)).transpose(1, 2)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    options |= zip(names, x.sizes, strict=True)
    return lambda: output(library.flash_attn_varlen_func(*x.qkv, **options))


def output(results):
    """Without the log-sum-exp, which some versions return too."""
    return results[0] if isinstance(results, tuple) else results


def flex(cell, x):
    """Compiled for the cell's shape alone."""
    if cell.lengths or cell.option not in ("none", "softcap", "bias"):
        return None
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    block_mask, length, reach = None, cell.length, cell.reach
    if cell.causal:
        sees = lambda b, h, i, j: (i >= j) & (i - j <= reach)  # noqa: E731
        block_mask = create_block_mask(sees, None, None, length, length, x.dout.device)
    cap, added = x.options.get("softcap"), x.mask
    score_mod = {
        "none": None,
        "softcap": lambda s, b, h, i, j: cap * torch.tanh(s / cap),
        "bias": lambda s, b, h, i, j: s + added[0, h, i, j],
    }[cell.option]
    torch._dynamo.reset()
    call = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    return functools.partial(call, *x.qkv, score_mod, block_mask, enable_gqa=cell.group_size > 1)


PEERS = {
    OURS: ours,
    "torch FLASH": functools.partial(of_torch, SDPBackend.FLASH_ATTENTION, (False,)),
    "torch CUDNN": functools.partial(of_torch, SDPBackend.CUDNN_ATTENTION, (False, True)),
    "torch EFFICIENT": functools.partial(of_torch, SDPBackend.EFFICIENT_ATTENTION, (True,)),
    "torch varlen": torch_varlen,
    "flash-attn 3": functools.partial(flash_attn, "flash_attn_interface", False),
    "flash-attn 3 deterministic": functools.partial(flash_attn, "flash_attn_interface", True),
    "flash-attn 4": functools.partial(flash_attn, "flash_attn.cute", False),
    "flash-attn 4 deterministic": functools.partial(flash_attn, "flash_attn.cute", True),
    "FlexAttention": flex,
}


def part(cell, tensor, heads):
    """The first sequence of the first heads, in fp64, as a leaf."""
    rows = tensor.detach()[: cell.length].transpose(0, 1) if cell.lengths else tensor.detach()[0]
    return rows[:heads].double().requires_grad_()


def reference(cell, x):
    """out, dquery, dkey and dvalue by the formula in fp64, of the first sequence, the first head of
    keys and its heads of queries."""
    group, options, device = cell.group_size, x.options, x.dout.device
    query, key, value = map(part, [cell] * 3, x.qkv, (group, 1, 1))
    distance = torch.arange(cell.length, device=device)[:, None] - torch.arange(
        cell.keys, device=device
    )
    scores = query @ key.mT * cell.head_dim**-0.5
    if cap := options.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    if "alibi_slopes" in options:
        scores = scores - options["alibi_slopes"][:group, None, None] * distance.abs()
    if x.mask is not None:
        mask = x.mask.detach()[0, :group]
        scores = scores.where(mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if cell.causal:
        scores = scores.where((distance >= 0) & (distance <= cell.reach), -torch.inf)
    if "sink" in options:
        sink = options["sink"][:group, None, None].double().expand(-1, cell.length, 1)
        scores = torch.cat((scores, sink), -1)
    out = scores.softmax(-1)[..., : cell.keys] @ value
    dout = part(cell, x.dout, group).detach()
    return [out.detach(), *torch.autograd.grad(out, (query, key, value), dout)]


def errors(cell, expected, out, grads):
    """{direction: the worst root mean square error of a tensor over TOLERANCE of its own}. Dropout
    changes a sum of independent numbers by sqrt(p / (1 - p)) = 1 / 3 of itself: with it, how far
    from that the difference to the results without is, over 1 / 6."""
    of_each = []
    for ref, result in zip(expected, (out, *grads[:3]), strict=True):
        difference = part(cell, result, len(ref)).detach() - ref
        error = (difference.norm() / ref.norm()).item()
        drops = cell.option == "dropout"
        of_each.append(abs(error - 1 / 3) * 6 if drops else error / TOLERANCE)
    return dict(zip(DIRECTIONS, (of_each[0], max(of_each[1:])), strict=True))


class Subject:
    """One implementation at one cell, warm. `turns`: for each direction what a turn launches, and
    how many calls that is."""

    def __init__(self, cell, x, forward, expected):
        self.forward, self.x = forward, x
        for _ in range(3):
            self.out = None
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self.out = self.forward()
            grads = self.backward()
            self.peak = torch.cuda.max_memory_allocated() - before
        self.errors = errors(cell, expected, self.out, grads)
        of_host = cell.group == "host"
        calls = {direction: getattr(self, direction) for direction in DIRECTIONS}
        self.turns = {d: (c, 1) if of_host else timing.captured(c) for d, c in calls.items()}

    def backward(self):
        return torch.autograd.grad(self.out, self.x.leaves, self.x.dout, retain_graph=True)


def measure(cell, names, rounds, seconds, sensors):
    x, subjects, records = Inputs(cell), {}, []
    expected, clock = reference(cell, x), "host seconds" if cell.group == "host" else "seconds"
    about = (cell.group, cell.name, cell.head_dim, cell.length, cell.mask)
    for name in names:
        try:
            if forward := PEERS[name](cell, x):
                subjects[name] = Subject(cell, x, forward, expected)
        except Exception as reason:
            if name == OURS:
                raise
            records.append(Record(*about, "", name, note=first_line(reason)))
    for direction in DIRECTIONS:
        turns = {name: subject.turns[direction] for name, subject in subjects.items()}
        launched = {name: launch for name, (launch, _) in turns.items()}
        for name, found in timing.in_turns(launched, rounds, seconds, sensors, ahead=0).items():
            time, own = found[clock] / turns[name][1], subjects[name]
            rate, state = cell.flops(direction) / time * 1e-12, (found.get(q, 0) for q in STATE)
            own = (time, rate, own.errors[direction], own.peak)
            records.append(Record(*about, direction, name, *own, *state))
    return records


def add_arguments(parser):
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--groups", nargs="*", help="of cells, these only")
    parser.add_argument("--dims", nargs="*", type=commandline.count, help="cells of these only")
    parser.add_argument("--lengths", nargs="*", type=commandline.count, help="cells of these only")
    parser.add_argument("--part", type=commandline.part, default=commandline.Part(), metavar="K/N",
                        help="this part only; see `merge`")  # fmt: skip
    parser.add_argument("--rounds", type=commandline.positive, default=5)
    parser.add_argument("--milliseconds", type=commandline.positive, default=15, help="of a turn")
    parser.add_argument("--quick", action="store_true", help="fewer cells")


def run(options):
    """Measure, print and write; 1 if one of our results is wrong, else 0. What was measured is
    written, also when the run is interrupted."""
    names = [n for n in PEERS if n in options.peers or n == OURS]
    asked = {"group": options.groups, "head_dim": options.dims, "length": options.lengths}
    asked = {field: these for field, these in asked.items() if these}
    chosen = [c for c in cells(options.quick) if all(getattr(c, f) in asked[f] for f in asked)]
    facts, records, sensors = [("suite", "attention"), *environment.facts()], [], Sensors()
    todo = track(options.part.of(chosen, stride=True), "attention", console=Console(stderr=True))
    stream = torch.cuda.Stream() if torch.cuda.is_available() else None
    try:
        for cell in todo:
            with torch.cuda.stream(stream):  # what is captured must not be of the default stream
                here = measure(cell, names, options.rounds, options.milliseconds * 1e-3, sensors)
            records += here
            rates = (f"{r.peer} {r.direction} {r.tflops:.0f}" for r in here if r.seconds)
            print(f"{cell.name}: {'; '.join(rates)}", flush=True)
            torch.cuda.empty_cache()
    finally:
        if records:
            attention_report.write(facts, records, options.out, f"attention{options.part.suffix}")
    return 1 if any(r.peer == OURS and not r.error <= 1 for r in records) else 0
