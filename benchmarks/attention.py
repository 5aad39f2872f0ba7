"""FlashAttention, forward and backward, in TFLOP/s beside other libraries.

TFLOP/s count the pairs of a query and a key that it sees: 4 D a pair and head forward, 2.5 times
that backward, whatever a kernel makes again. All implementations have the same tensors, of strides
(batch, row, head, column), and take turns; a time is the median of the rounds. Backward is
`torch.autograd.grad` with respect to query, key and value; ours gives the same bits every time, as
do those named deterministic.
"""

import dataclasses
import functools
import inspect
import itertools
import statistics
import time

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from torch.nn.attention import SDPBackend, sdpa_kernel

import fused_norm.functional as fn
from benchmarks import attention_report, commandline, environment
from benchmarks.attention_report import OURS, Record
from benchmarks.peers import first_line
from benchmarks.sensors import Sensors, medians

UNIT = 2.0**-8  # of bf16
# Probabilities, the derivatives by scores and each result are rounded once, by 0.43 u in root mean
# square of what they are; sums of terms of random signs keep that ratio.
TOLERANCE = 2 * UNIT
MIXED = (8192, 4096, 2048, 1024, 512, 256, 128, 128)
DIRECTIONS = ("forward", "backward")


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

    @property
    def heads(self):
        heads = self.width // self.head_dim
        return heads - heads % 2

    @property
    def mask(self):
        return "causal" if self.causal else "full"

    @property
    def name(self):
        mask = self.mask + (f" window {self.window}" if self.window is not None else "")
        gqa = f" GQA {self.group_size}" if self.group_size > 1 else ""
        packed = f" packed {len(self.lengths)}" if self.lengths else ""
        option = f" {self.option}" if self.option != "none" else ""
        return f"{self.head_dim} x {self.length} {mask}{gqa}{packed}{option}"

    @property
    def sequences(self):
        return self.lengths or (self.length,) * (self.tokens // self.length)

    def flops(self, direction):
        pairs = 0
        for n in self.sequences:
            width = n if self.window is None else min(n, self.window + 1)
            # Query i sees min(i + 1, width) keys.
            pairs += width * (width + 1) // 2 + (n - width) * width if self.causal else n * n
        return 4 * pairs * self.heads * self.head_dim * (1 if direction == "forward" else 2.5)


def cells(quick):
    lengths = (2048, 16384) if quick else (512, 1024, 2048, 4096, 8192, 16384)
    dims = (64, 128) if quick else (64, 96, 128, 192, 256)
    found = [Cell("lengths", d, n, c) for d in dims for c in (False, True) for n in lengths]
    found += [Cell("GQA", 128, 4096, True, group_size=g) for g in (1, 4, 16)]
    found += [Cell("windows", 128, 16384, True, window) for window in (512, 4096)]
    for packed, d in itertools.product(((2048,) * 8, MIXED), (64, 128)):
        found.append(Cell("packed", d, max(packed), True, lengths=packed))
    found += [Cell("options", d, 4096, option=o) for d in (64, 128) for o in OPTIONS]
    # The last one's work is so little that its time is the host's.
    return [*found, Cell("host", 64, 128, tokens=128, width=128)]


def bias(cell, grad=False):
    shape = (1, cell.heads, cell.length, cell.length)
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda").requires_grad_(grad)


# What an option makes of a cell: arguments of flash_attention.
OPTIONS = {
    "none": lambda cell: {},
    "softcap": lambda cell: {"softcap": 30.0},
    "sink": lambda cell: {"sink": torch.randn(cell.heads, device="cuda")},
    "alibi": lambda cell: {"alibi_slopes": torch.rand(cell.heads, device="cuda") / 64},
    "padding": lambda cell: {
        "attn_mask": torch.arange(cell.length, device="cuda")
        < torch.full((len(cell.sequences), 1, 1, 1), cell.length - 5, device="cuda")
    },
    "boolean": lambda cell: {
        "attn_mask": torch.rand(1, 1, cell.length, cell.length, device="cuda") > 0.25
    },
    "bias": lambda cell: {"attn_mask": bias(cell)},
    "bias gradient": lambda cell: {"attn_mask": bias(cell, True)},
}


class Inputs:
    """The tensors of a cell: query, key, value and dout are leaves (batch, heads, rows, D), or
    (rows, heads, D)."""

    def __init__(self, cell):
        torch.manual_seed(0)
        n, d, packed = len(cell.sequences), cell.head_dim, bool(cell.lengths)

        def make(heads):
            shape = (cell.tokens, heads, d) if packed else (n, cell.length, heads, d)
            made = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
            return (made if packed else made.transpose(1, 2)).requires_grad_()

        kv_heads = cell.heads // cell.group_size
        self.query, self.key, self.value = make(cell.heads), make(kv_heads), make(kv_heads)
        self.dout = make(cell.heads).detach()
        ends = torch.tensor((0, *itertools.accumulate(cell.sequences)), device="cuda")
        self.offsets = ends.int() if packed else None
        self.options = OPTIONS[cell.option](cell)
        self.leaves = [self.query, self.key, self.value]
        self.leaves += [t for t in self.options.values() if getattr(t, "requires_grad", False)]

    @property
    def packed(self):
        return self.query, self.key, self.value, self.offsets, self.offsets


def ours(cell, x):
    masks = {"causal": cell.causal}
    if cell.window is not None:
        masks["window"] = (cell.window, None)
    if cell.lengths:
        call, sizes = fn.flash_attention_varlen, (cell.length, cell.length)
        return functools.partial(call, *x.packed, *sizes, **masks)
    return functools.partial(fn.flash_attention, x.query, x.key, x.value, **masks, **x.options)


def of_torch(backend, masks):
    """`masks`: whether it is to be seen with a mask, without, or both."""

    def make(cell, x):
        mask = x.options.get("attn_mask")
        known = cell.option == "none" or mask is not None
        if cell.lengths or cell.window is not None or not known or (mask is not None) not in masks:
            return None

        def call():
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(
                    x.query, x.key, x.value, mask, is_causal=cell.causal, enable_gqa=True
                )

        return call

    return make


def torch_varlen(cell, x):
    if not cell.lengths:
        return None
    from torch.nn.attention.varlen import varlen_attn

    masks = {"is_causal": True}  # until torch 2.10
    if "window_size" in inspect.signature(varlen_attn).parameters:
        masks = {"window_size": (-1, 0)}
    return functools.partial(varlen_attn, *x.packed, cell.length, cell.length, **masks)


def flash_attn_4(cell, x, deterministic):
    from flash_attn import cute

    options = {"causal": cell.causal, "deterministic": deterministic}
    if cell.window is not None:
        options["window_size"] = (cell.window, 0)
    if cell.option == "softcap":
        options["softcap"] = x.options["softcap"]
    elif cell.option != "none":
        return None
    if cell.lengths:
        for side in "qk":
            options |= {f"cu_seqlens_{side}": x.offsets, f"max_seqlen_{side}": cell.length}
        return lambda: cute.flash_attn_varlen_func(x.query, x.key, x.value, **options)[0]
    rows_first = [t.transpose(1, 2) for t in (x.query, x.key, x.value)]
    return lambda: cute.flash_attn_func(*rows_first, **options)[0].transpose(1, 2)


def flex(cell, x):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if cell.lengths or cell.option not in ("none", "softcap", "bias"):
        return None
    block_mask = score_mod = None
    if cell.causal:
        reach = cell.length if cell.window is None else cell.window

        def sees(b, h, i, j):
            return (i >= j) & (i - j <= reach)

        block_mask = create_block_mask(sees, None, None, cell.length, cell.length)
    if cell.option == "softcap":
        cap = x.options["softcap"]
        score_mod = lambda s, b, h, i, j: cap * torch.tanh(s / cap)  # noqa: E731
    elif cell.option == "bias":
        added = x.options["attn_mask"]
        score_mod = lambda s, b, h, i, j: s + added[0, h, i, j]  # noqa: E731
    torch._dynamo.reset()
    call = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    return functools.partial(
        call, x.query, x.key, x.value, score_mod, block_mask, enable_gqa=cell.group_size > 1
    )


PEERS = {
    OURS: ours,
    "torch FLASH": of_torch(SDPBackend.FLASH_ATTENTION, (False,)),
    "torch CUDNN": of_torch(SDPBackend.CUDNN_ATTENTION, (False, True)),
    "torch EFFICIENT": of_torch(SDPBackend.EFFICIENT_ATTENTION, (True,)),
    "torch varlen": torch_varlen,
    "flash-attn 4": functools.partial(flash_attn_4, deterministic=False),
    "flash-attn 4 deterministic": functools.partial(flash_attn_4, deterministic=True),
    "FlexAttention": flex,
}


def part(cell, tensor, heads):
    """The first sequence of the first heads, in fp64, as a leaf."""
    rows = tensor.detach()[: cell.length].transpose(0, 1) if cell.lengths else tensor.detach()[0]
    return rows[:heads].double().requires_grad_()


def reference(cell, x):
    """out, dquery, dkey and dvalue by the formula in fp64, of the first sequence, the first head of
    keys and its heads of queries; block of queries after block."""
    group, options = cell.group_size, x.options
    query, dout = part(cell, x.query, group), part(cell, x.dout, group).detach()
    key, value = part(cell, x.key, 1), part(cell, x.value, 1)
    columns, outs = torch.arange(query.shape[1], device="cuda"), []
    for rows in columns.split(1024):
        distance = rows[:, None] - columns
        scores = query[:, rows] @ key.mT * cell.head_dim**-0.5
        if "softcap" in options:
            scores = options["softcap"] * torch.tanh(scores / options["softcap"])
        if "alibi_slopes" in options:
            scores = scores - options["alibi_slopes"][:group, None, None] * distance.abs()
        if "attn_mask" in options:
            mask = options["attn_mask"].detach()[0, :group]
            mask = mask[:, rows] if mask.shape[1] > 1 else mask
            scores = scores.where(mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        if cell.causal:
            reach = cell.length if cell.window is None else cell.window
            scores = scores.where((distance >= 0) & (distance <= reach), -torch.inf)
        if "sink" in options:
            sink = options["sink"][:group, None, None].double().expand(-1, len(rows), 1)
            scores = torch.cat((scores, sink), -1)
        out = scores.softmax(-1)[..., : len(columns)] @ value
        out.backward(dout[:, rows])
        outs.append(out.detach())
    return [torch.cat(outs, 1), query.grad, key.grad, value.grad]


def errors(cell, expected, out, grads):
    """{direction: the worst root mean square error of a tensor over TOLERANCE of its own}"""
    of_each = []
    for ref, result in zip(expected, (out, *grads[:3]), strict=True):
        difference = part(cell, result, len(ref)).detach() - ref
        of_each.append((difference.norm() / ref.norm() / TOLERANCE).item())
    return dict(zip(DIRECTIONS, (of_each[0], max(of_each[1:])), strict=True))


class Subject:
    """One implementation at one cell, warm: `forward()` and `backward()` are single calls."""

    def __init__(self, name, forward, x):
        self.name, self.forward, self.x = name, forward, x
        for _ in range(2):
            self.out = self.forward()
            self.backward()
        torch.cuda.synchronize()
        self.out = None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.out = self.forward()
        self.grads = self.backward()
        self.peak = torch.cuda.max_memory_allocated() - before

    def backward(self):
        return torch.autograd.grad(self.out, self.x.leaves, self.x.dout, retain_graph=True)


def timed(call, seconds, sensors):
    """(seconds of a call, what the GPU says of itself meanwhile), over about `seconds`."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    events[0].record()
    call()
    events[1].record()
    torch.cuda.synchronize()
    calls = max(2, round(seconds * 1e3 / events[0].elapsed_time(events[1])))
    events[1].record()
    for _ in range(calls):
        call()
    events[2].record()
    sample = sensors.sample()
    torch.cuda.synchronize()
    return events[1].elapsed_time(events[2]) * 1e-3 / calls, sample


def timed_on_the_host(call, _, sensors, calls=200):
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls, sensors.sample()


def measure(cell, names, rounds, seconds, sensors):
    x = Inputs(cell)
    expected, found, records = reference(cell, x), [], []
    about = (cell.group, cell.name, cell.head_dim, cell.length, cell.mask)
    for name in names:
        try:
            forward = PEERS[name](cell, x)
            if forward is not None:
                subject = Subject(name, forward, x)
                found.append((subject, errors(cell, expected, subject.out, subject.grads)))
        except Exception as reason:
            if name == OURS:
                raise
            records.append(Record(*about, "", name, 0, 0, 0, 0, 0, 0, first_line(reason)))
    clock = timed_on_the_host if cell.group == "host" else timed
    turns = {(subject.name, direction): [] for subject, _ in found for direction in DIRECTIONS}
    for turn, direction in itertools.product(range(rounds), DIRECTIONS):
        for i in range(len(found)):
            subject = found[(i + turn) % len(found)][0]
            call = getattr(subject, direction)
            turns[subject.name, direction].append(clock(call, seconds, sensors))
    for (subject, wrong), direction in itertools.product(found, DIRECTIONS):
        times, samples = zip(*turns[subject.name, direction], strict=True)
        median, state = statistics.median(times), medians(samples)
        rate = cell.flops(direction) / median * 1e-12
        state = state.get("MHz", 0), state.get("watts", 0)
        own = (subject.name, median, rate, wrong[direction], subject.peak, *state)
        records.append(Record(*about, direction, *own))
    return records


def add_arguments(parser):
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--groups", nargs="*", help="of cells, these only")
    parser.add_argument("--part", type=commandline.part, default=commandline.Part(), metavar="K/N",
                        help="this part only; see `merge`")  # fmt: skip
    parser.add_argument("--rounds", type=commandline.positive, default=5)
    parser.add_argument(
        "--milliseconds", type=commandline.positive, default=15, help="of a turn; default: 15"
    )
    parser.add_argument("--quick", action="store_true", help="fewer cells")


def run(options):
    """Measure, print and write; 1 if one of our results is wrong, else 0. What was measured is
    written, also when the run is interrupted."""
    names = [n for n in PEERS if n in options.peers or n == OURS]
    chosen = [c for c in cells(options.quick) if not options.groups or c.group in options.groups]
    facts, records, sensors = [("suite", "attention"), *environment.facts()], [], Sensors()
    console, seconds = Console(stderr=True), options.milliseconds * 1e-3
    try:
        for cell in track(options.part.of(chosen, stride=True), "attention", console=console):
            here = measure(cell, names, options.rounds, seconds, sensors)
            records += here
            rates = (f"{r.peer} {r.direction} {r.tflops:.0f}" for r in here if r.seconds)
            print(f"{cell.name}: {'; '.join(rates)}", flush=True)
            torch.cuda.empty_cache()
    finally:
        if records:
            attention_report.write(facts, records, options.out, f"attention{options.part.suffix}")
    return 1 if any(r.peer == OURS and not r.error <= 1 for r in records) else 0
