"""FlashAttention, forward and backward, in TFLOP/s beside other libraries.

TFLOP/s count the pairs of a query and a key that it sees: 4 D a pair and head forward, 2.5 times
that backward, whatever a kernel makes again. All implementations have the same tensors, of strides
(batch, row, head, column), and take turns; a time is the median of the rounds. Backward is
`torch.autograd.grad` with respect to query, key and value; ours gives the same bits every time, as
do those named deterministic.
"""

import dataclasses
import functools
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
from benchmarks.sensors import Sensors, medians

TOKENS, WIDTH = 16384, 2048  # of a batch; all heads' columns
UNIT = 2.0**-8  # of bf16
# Probabilities, the derivatives by scores and each result are rounded once, by 0.43 u in root mean
# square of what they are; sums of terms of random signs keep that ratio.
TOLERANCE = 2 * UNIT
MIXED = (8192, 4096, 2048, 1024, 512, 256, 128, 128)


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

    @property
    def heads(self):
        heads = WIDTH // self.head_dim
        return heads - heads % 2

    @property
    def name(self):
        mask = "causal" if self.causal else "full"
        mask += f" window {self.window}" if self.window is not None else ""
        gqa = f" GQA {self.group_size}" if self.group_size > 1 else ""
        packed = f" packed {len(self.lengths)}" if self.lengths else ""
        option = f" {self.option}" if self.option != "none" else ""
        return f"{self.head_dim} x {self.length} {mask}{gqa}{packed}{option}"

    @property
    def sequences(self):
        return self.lengths or (self.length,) * (TOKENS // self.length)

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
    masks = (False, True)
    found = [Cell("lengths", d, n, c) for d, c, n in itertools.product(dims, masks, lengths)]
    found += [Cell("GQA", 128, 4096, True, group_size=g) for g in (1, 4, 16)]
    for window in (512, 4096):
        found.append(Cell("windows", 128, TOKENS, True, window))
    for packed in ((2048,) * 8, MIXED):
        for d in (64, 128):
            found.append(Cell("packed", d, max(packed), True, lengths=packed))
    for d, option in itertools.product((64, 128), OPTIONS):
        found.append(Cell("options", d, 4096, False, option=option))
    return found


# What an option makes of (cell, device): arguments of flash_attention.
def _bias(cell, grad=False):
    shape = (1, cell.heads, cell.length, cell.length)
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda").requires_grad_(grad)


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
    "bias": lambda cell: {"attn_mask": _bias(cell)},
    "bias gradient": lambda cell: {"attn_mask": _bias(cell, True)},
}


class Inputs:
    """The tensors of a cell: query, key, value and dout are leaves (batch, heads, rows, D), or
    (rows, heads, D)."""

    def __init__(self, cell):
        torch.manual_seed(0)
        n, packed = len(cell.sequences), bool(cell.lengths)

        def make(heads):
            shape = (TOKENS, heads, cell.head_dim) if packed else (
                n, cell.length, heads, cell.head_dim)  # fmt: skip
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


def ours(cell, x):
    window = None if cell.window is None else (cell.window, None)
    if cell.lengths:
        return functools.partial(
            fn.flash_attention_varlen, x.query, x.key, x.value, x.offsets, x.offsets,
            cell.length, cell.length, causal=cell.causal, window=window,
        )  # fmt: skip
    return functools.partial(
        fn.flash_attention, x.query, x.key, x.value, causal=cell.causal, window=window, **x.options
    )


def of_torch(backend, takes_masks=False):
    def make(cell, x):
        mask = x.options.get("attn_mask")
        known = cell.option == "none" or (takes_masks and mask is not None)
        if cell.lengths or cell.window is not None or not known:
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

    sizes = (x.offsets, x.offsets, cell.length, cell.length)
    try:  # an argument of its own until torch 2.10
        varlen_attn(x.query, x.key, x.value, *sizes, is_causal=True)
        masks = {"is_causal": True}
    except TypeError:
        masks = {"window_size": (-1, 0)}
    return functools.partial(varlen_attn, x.query, x.key, x.value, *sizes, **masks)


def flash_attn_4(deterministic):
    def make(cell, x):
        from flash_attn import cute

        options = {"causal": cell.causal, "deterministic": deterministic}
        if cell.window is not None:
            options["window_size"] = (cell.window, 0)
        if cell.option == "softcap":
            options["softcap"] = x.options["softcap"]
        elif cell.option != "none":
            return None
        if cell.lengths:
            options |= {f"cu_seqlens_{t}": x.offsets for t in "qk"}
            options |= {f"max_seqlen_{t}": cell.length for t in "qk"}
            call = functools.partial(cute.flash_attn_varlen_func, **options)
            return lambda: call(x.query, x.key, x.value)[0]
        call = functools.partial(cute.flash_attn_func, **options)
        return lambda: call(*(t.transpose(1, 2) for t in (x.query, x.key, x.value)))[0].transpose(
            1, 2
        )

    return make


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
        bias = x.options["attn_mask"]
        score_mod = lambda s, b, h, i, j: s + bias[0, h, i, j]  # noqa: E731
    torch._dynamo.reset()
    call = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    return functools.partial(
        call, x.query, x.key, x.value, score_mod, block_mask, enable_gqa=cell.group_size > 1
    )


PEERS = {
    OURS: ours,
    "torch FLASH": of_torch(SDPBackend.FLASH_ATTENTION),
    "torch CUDNN": of_torch(SDPBackend.CUDNN_ATTENTION, takes_masks=True),
    "torch EFFICIENT": lambda cell, x: (
        of_torch(SDPBackend.EFFICIENT_ATTENTION, True)(cell, x)
        if "attn_mask" in x.options
        else None
    ),
    "torch varlen": torch_varlen,
    "flash-attn 4": flash_attn_4(False),
    "flash-attn 4 deterministic": flash_attn_4(True),
    "FlexAttention": flex,
}


def reference(cell, x):
    """fp64 results of the first key head's group in the first sequence: out, dquery, dkey, dvalue,
    block of queries after block."""
    n, group = cell.sequences[0], cell.group_size

    def part(t, heads):
        rows = t.detach()[:n].transpose(0, 1) if cell.lengths else t.detach()[0]
        return rows[:heads].double()

    query, dout, key, value = (
        part(x.query, group),
        part(x.dout, group),
        part(x.key, 1),
        part(x.value, 1),
    )
    scale, mask, cap = cell.head_dim**-0.5, x.options.get("attn_mask"), x.options.get("softcap")
    outs, dqueries, dkey, dvalue = [], [], torch.zeros_like(key), torch.zeros_like(value)
    columns = torch.arange(n, device="cuda")
    for first in range(0, n, 1024):
        q, do = query[:, first : first + 1024], dout[:, first : first + 1024]
        rows = columns[first : first + 1024, None]
        s, slope = q @ key.mT * scale, 1
        if cap:
            t = torch.tanh(s / cap)
            s, slope = t * cap, 1 - t * t
        if "alibi_slopes" in x.options:
            slopes = x.options["alibi_slopes"][:group, None, None].double()
            s = s - slopes * (rows - columns).abs()
        if mask is not None:
            here = mask.detach()[0, :group]
            here = here[:, first : first + 1024] if here.shape[1] > 1 else here
            s = s.masked_fill(~here, -torch.inf) if here.dtype == torch.bool else s + here.double()
        if cell.causal:
            reach = n if cell.window is None else cell.window
            s = s.masked_fill((columns > rows) | (columns < rows - reach), -torch.inf)
        lse = s.logsumexp(-1, keepdim=True)
        if "sink" in x.options:
            lse = torch.logaddexp(lse, x.options["sink"][:group, None, None].double())
        p = (s - lse).exp()
        out = p @ value
        ds = p * (do @ value.mT - (do * out).sum(-1, keepdim=True)) * slope * scale
        outs.append(out)
        dqueries.append(ds @ key)
        dkey += (ds.mT @ q).sum(0, keepdim=True)
        dvalue += (p.mT @ do).sum(0, keepdim=True)
    return [part, torch.cat(outs, 1), torch.cat(dqueries, 1), dkey, dvalue]


def errors(cell, x, expected, out, grads):
    """{direction: the worst root mean square error of a tensor over TOLERANCE of its own}"""
    part, *expected = expected
    of_each = []
    for ref, result in zip(expected, (out, *grads[:3]), strict=True):
        difference = part(result, ref.shape[0]) - ref
        of_each.append((difference.norm() / ref.norm() / TOLERANCE).item())
    return {"forward": of_each[0], "backward": max(of_each[1:])}


class Subject:
    """One implementation at one cell, warm: `forward()` and `backward()` are single calls."""

    def __init__(self, name, cell, x):
        self.name, self.x = name, x
        self.forward = PEERS[name](cell, x)
        if self.forward is None:
            return
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


def measure(cell, names, rounds, seconds, sensors):
    x = Inputs(cell)
    expected, found, notes = reference(cell, x), [], []
    for name in names:
        try:
            subject = Subject(name, cell, x)
            if subject.forward is not None:
                found.append((subject, errors(cell, x, expected, subject.out, subject.grads)))
        except Exception as reason:
            if name == OURS:
                raise
            notes.append((name, f"{type(reason).__name__}: {reason}".partition("\n")[0][:120]))
    times = {}
    for turn in range(rounds):
        for direction in ("forward", "backward"):
            for i in range(len(found)):
                subject = found[(i + turn) % len(found)][0]
                call = getattr(subject, direction)
                times.setdefault((subject.name, direction), []).append(
                    timed(call, seconds, sensors)
                )
    about = (cell.group, cell.name, cell.head_dim, cell.length, "causal" if cell.causal else "full")
    records = []
    for (subject, wrong), direction in itertools.product(found, ("forward", "backward")):
        median = statistics.median(t for t, _ in times[subject.name, direction])
        state = medians([sample for _, sample in times[subject.name, direction]])
        records.append(
            Record(*about, direction, subject.name, median, cell.flops(direction) / median * 1e-12,
                   wrong[direction], subject.peak, state.get("MHz", 0), state.get("watts", 0))
        )  # fmt: skip
    records += [Record(*about, "", name, 0, 0, 0, 0, 0, 0, note) for name, note in notes]
    return records


def host_times(names, calls=200, rounds=9):
    """Records of the host's time of a call, of which the GPU's is far shorter."""
    cell = Cell("host", 64, 128)
    x = Inputs(cell)
    x.query, x.key, x.value, x.dout = (t.detach()[:1, :2] for t in (*x.leaves, x.dout))
    x.leaves = [t.requires_grad_() for t in (x.query, x.key, x.value)]
    found, times = [], {}
    for name in names:
        try:
            subject = Subject(name, cell, x)
            found += [subject] if subject.forward is not None else []
        except Exception:
            continue
    for turn, direction in itertools.product(range(rounds), ("forward", "backward")):
        for i in range(len(found)):
            subject = found[(i + turn) % len(found)]
            call = getattr(subject, direction)
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            spent = (time.perf_counter() - start) / calls
            times.setdefault((subject.name, direction), []).append(spent)
    return [
        Record("host", cell.name, 64, 128, "full", direction, name, statistics.median(spent), 0, 0,
               0, 0, 0)
        for (name, direction), spent in times.items()
    ]  # fmt: skip


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
    stem = f"attention{options.part.suffix}"
    try:
        console = Console(stderr=True)
        for cell in track(options.part.of(chosen, stride=True), "attention", console=console):
            seconds = options.milliseconds * 1e-3
            here = measure(cell, names, options.rounds, seconds, sensors)
            records += here
            rates = (f"{r.peer} {r.direction} {r.tflops:.0f}" for r in here if r.seconds)
            print(f"{cell.name}: {'; '.join(rates)}", flush=True)
            torch.cuda.empty_cache()
        if options.part.k == 1 and (not options.groups or "host" in options.groups):
            records += host_times(names)
    finally:
        if records:
            attention_report.write(facts, records, options.out, stem)
    return 1 if any(r.peer == OURS and not r.error <= 1 for r in records) else 0
