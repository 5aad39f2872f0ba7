"""What one process of `python -m benchmarks model` measures: steps of a block, by turns.

A block is taken from the middle of a stack: the residual stream and what the block before adds to
it come in, the stream and what this block adds to it go out. So a step has two additions, two
norms, attention and an MLP, forward and backward; the gradients are new ones, as after
`zero_grad()`. The variants share the other layers' parameters, the inputs and the memory of their
CUDA graphs: only the norms differ.
"""

import dataclasses
import gc
import logging
import math
import re
import statistics
import traceback

import torch
from torch import nn

import fused_norm as fn
from benchmarks import memory, sensors, timing
from benchmarks.peers import first_line

MODES = ("replayed", "compiled", "zeros")  # zeros: replayed again, all numbers 0
PASSES = ("fused, pass", "fused, flag and pass")  # compiled with fused_norm.compile_options()
VARIANTS = ("torch", "fused", "fused, flag", "fused, residual inside", *PASSES, "liger")
EPS = 1e-5
CONTEXT = 2048
# Blocks in bf16 that differ in the norm alone: each of some ten roundings of 2^-8 between the two
# results, which add up like a random walk, and as much again for sums in another order.
TOLERANCE = 2 * math.sqrt(10) * 2**-8
MATMUL = re.compile("nvjet|gemm|cutlass|xmma|flash|fmha|cudnn", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Case:
    norm: str  # LayerNorm: a block like GPT-2's; RMSNorm: one like LLaMA's
    hidden: int
    tokens: int

    @property
    def name(self):
        return f"{self.norm}:{self.hidden}x{self.tokens}"

    def preset(self):
        llama = self.norm == "RMSNorm"
        ffn = (8 * self.hidden // 3 + 255) // 256 * 256 if llama else 4 * self.hidden
        context = min(CONTEXT, self.tokens)
        return memory.Preset(
            llama, 1, self.hidden, ffn, max(1, self.hidden // 128), 0, context,
            self.tokens // context, torch.bfloat16,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Record:
    """One number: `quantity` is what the step as a whole gave, or a kind of kernel."""

    process: int
    norm: str
    hidden: int
    tokens: int
    mode: str
    variant: str
    quantity: str
    value: float

    @property
    def case(self):
        return Case(self.norm, self.hidden, self.tokens)


class AddThenNorm(nn.Module):
    """What was added before, the stream -> the norm of their sum, and the sum."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, added, stream):
        stream = stream + added
        return self.norm(stream), stream

    def alone(self, _, stream):
        """The outputs of the norm, and the inputs that they depend on."""
        return (self.norm(stream),), (stream,)


class AddInNorm(AddThenNorm):
    def forward(self, added, stream):
        norm, flag = self.norm, {"memory_efficient": self.norm.memory_efficient}
        if isinstance(norm, nn.RMSNorm):
            return fn.functional.add_rms_norm(
                added, stream, norm.normalized_shape, norm.weight, norm.eps, **flag
            )
        return fn.functional.add_layer_norm(
            added, stream, norm.normalized_shape, norm.weight, norm.bias, norm.eps, **flag
        )

    def alone(self, added, stream):
        return self(added, stream), (added, stream)


class LigerNorm(nn.Module):
    def __init__(self, like):
        super().__init__()
        from benchmarks.peers import liger

        rms = isinstance(like, nn.RMSNorm)
        self.function = liger.functions()["rms_norm" if rms else "layer_norm"]
        self.weight = nn.Parameter(torch.empty_like(like.weight))
        if not rms:
            self.bias = nn.Parameter(torch.empty_like(like.bias))

    def forward(self, x):
        return self.function(x, *self.parameters())


def make_norm(variant, like):
    """A norm of the variant, behind an addition, with the parameters of torch's norm `like`."""
    options = {"device": like.weight.device, "dtype": like.weight.dtype, "eps": like.eps}
    if variant == "torch":
        norm = like
    elif variant == "liger":
        norm = LigerNorm(like)
    else:
        kind = fn.RMSNorm if isinstance(like, nn.RMSNorm) else fn.LayerNorm
        norm = kind(like.normalized_shape, memory_efficient="flag" in variant, **options)
    norm.load_state_dict(like.state_dict())
    return (AddInNorm if variant == "fused, residual inside" else AddThenNorm)(norm)


class MiddleBlock(nn.Module):
    def __init__(self, block, variant):
        super().__init__()
        self.norm1, self.norm2 = (make_norm(variant, n) for n in (block.norm1, block.norm2))
        self.attention, self.mlp = block.attention, block.mlp

    def forward(self, added, stream, rotation):
        y, stream = self.norm1(added, stream)
        y, stream = self.norm2(self.attention(y, rotation), stream)
        return self.mlp(y), stream


class Source(torch.autograd.Function):
    """The tensors, as if earlier layers had computed them: their gradients are computed, and then
    nothing is done with them."""

    @staticmethod
    def forward(ctx, anchor, *tensors):
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx, *gradients):
        return None, *(None for _ in gradients)


class Bench:
    """All variants of one case, on one set of inputs."""

    def __init__(self, case, variants, device="cuda"):
        self.case, preset = case, case.preset()
        torch.manual_seed(0)
        with torch.device(device):
            default = torch.get_default_dtype()
            torch.set_default_dtype(preset.dtype)
            try:
                kind = nn.RMSNorm if preset.llama else nn.LayerNorm
                block = memory.Block(preset, lambda hidden: kind(hidden, eps=EPS))
                for norm in (block.norm1, block.norm2):
                    nn.init.normal_(norm.weight, 1, 0.1)
                    if not preset.llama:
                        nn.init.normal_(norm.bias, 0, 0.1)
                shape = (preset.batch, preset.context, case.hidden)
                self.inputs = [torch.randn(shape) for _ in range(2)]
                self.gradients = [torch.randn(shape) for _ in range(2)]
                self.anchor = torch.zeros((), requires_grad=True)
                self.rotation = None
                if preset.llama:
                    angle = torch.rand(preset.context, case.hidden // preset.heads // 2)
                    self.rotation = (angle.cos(), angle.sin())
            finally:
                torch.set_default_dtype(default)
        self.blocks, self.absent = {}, {}
        for variant in variants:
            try:
                self.blocks[variant] = MiddleBlock(block, variant)
            except ImportError as error:
                self.absent[variant] = str(error)
        self.parameters = list({p for b in self.blocks.values() for p in b.parameters()})
        self.calls = {"replayed": {}, "compiled": {}}  # {mode: {variant: what makes a step}}

    def step(self, block):
        outputs = block(*Source.apply(self.anchor, *self.inputs), self.rotation)
        torch.autograd.backward(outputs, self.gradients)
        for parameter in self.parameters:
            parameter.grad = None

    def results(self, variant, call=None):
        """Outputs, and gradients of the inputs, the norms' parameters and a linear layer, of the
        variant's block or of what was compiled from it."""
        block = self.blocks[variant]
        call = block if call is None else call
        leaves = [t.detach().requires_grad_() for t in self.inputs]
        outputs = call(*leaves, self.rotation)
        wanted = [*leaves, *block.norm1.parameters(), *block.norm2.parameters()]
        wanted.append(block.attention.qkv.weight)
        return [*outputs, *torch.autograd.grad(outputs, wanted, self.gradients)]

    def check(self, variant, call=None):
        """ValueError where results are not those of torch's norms."""
        for mine, other in zip(self.results(variant, call), self.results("torch"), strict=True):
            error = ((mine.float() - other.float()).norm() / other.float().norm()).item()
            if not error <= TOLERANCE:
                raise ValueError(f"{self.case.name}, {variant}: results are off by {error:.2g}")

    def zero(self):
        """Make every number 0, in the memory that captured graphs read."""
        with torch.no_grad():
            for tensor in (*self.parameters, *self.inputs, *self.gradients):
                tensor.zero_()

    def prepare(self, variant, mode, pool):
        """Compile or capture a variant's step; one that cannot is left out, with its reason."""
        if variant not in self.blocks or (variant in PASSES and mode != "compiled"):
            return
        block = self.blocks[variant]
        try:
            self.check(variant)
            if mode == "compiled":
                options = fn.compile_options() if variant in PASSES else {}
                compiled = torch.compile(block, dynamic=False, fullgraph=True, options=options)
                self.check(variant, compiled)
                for _ in range(3):
                    self.step(compiled)
                self.calls[mode][variant] = lambda: self.step(compiled)
            else:
                self.calls[mode][variant] = captured(lambda: self.step(block), pool)[0].replay
        except Exception as error:
            traceback.print_exc()
            self.absent[f"{variant}, {mode}"] = first_line(error)


def captured(call, pool=None, warm_up=3):
    """(CUDA graph of a call, what the call returned)"""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_up):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, pool=pool):
        result = call()
    torch.cuda.synchronize()
    return graph, result


@dataclasses.dataclass(frozen=True)
class Kernel:
    name: str
    seconds: float
    gap: float  # before the next one starts; below 0 where the two overlap


PROFILED = (3, 3)  # calls in a turn, turns


def profiled(launches, repeats=PROFILED[0], rounds=PROFILED[1]):
    """For each of the launches the kernels of its calls, turn by turn, in order. ValueError
    where the profiler lost some of the launches.

    One profile for all, as to begin one takes long; a kernel of another name tells the launches
    apart. Pauses would not: where other processes share the GPU, there are some within a launch
    too. They alternate as the turns do, since a cool chip is faster; a first round warms it, and
    does not count.
    """
    everyone = list(range(len(launches)))
    order = everyone * 2
    for number in range(rounds):
        order += timing.order(everyone, number)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for index in order:
            torch.cuda._sleep(1)
            for _ in range(repeats):
                launches[index]()
            torch.cuda.synchronize()
    groups = divided(
        (e.time_range.start * 1e-6, e.time_range.end * 1e-6, e.name)
        for e in profile.events()
        if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation
    )
    if len(groups) != len(order):
        raise ValueError(f"{len(groups)} groups of kernels of {len(order)} launches")
    kernels = [[] for _ in launches]
    for index, group in list(zip(order, groups, strict=True))[2 * len(everyone) :]:
        kernels[index] += of_group(group)
    return kernels


def divided(events):
    """Groups of (start, end, name) in order, each without the kernel of torch.cuda._sleep that is
    before it."""
    groups = []
    for event in sorted(events):
        if "spin_kernel" in event[2]:
            groups.append([])
        elif groups:
            groups[-1].append(event)
    return groups


def of_group(events):
    """Kernels of (start, end, name) in order."""
    ends = [start for start, *_ in events[1:]] + [end for _, end, _ in events[-1:]]
    return [
        Kernel(name, end - start, after - end)
        for (start, end, name), after in zip(events, ends, strict=True)
    ]


def averaged(kernels, calls):
    """Of the kernels of so many equal calls: those of one call, each one's median."""
    period, rest = divmod(len(kernels), calls)
    names = [k.name for k in kernels]
    if not kernels or rest or names != names[:period] * calls:
        raise ValueError(f"{len(kernels)} kernels are not those of {calls} equal calls")
    return [
        Kernel(
            kernels[at].name,
            statistics.median(k.seconds for k in kernels[at::period]),
            statistics.median(k.gap for k in kernels[at::period]),
        )
        for at in range(period)
    ]


class Alone:
    """A norm by itself, on enough rotating inputs to leave the cache behind: CUDA graphs of all its
    forward calls, and of them with all its backward calls after them."""

    # Small inputs fill less than the footprint: the profiler takes some 50 microseconds of the host
    # for each kernel that it sees, and sees each graph 15 times.
    MOST_SETS = 128

    def __init__(self, norm, like, footprint=2**30):
        self.sets = min(self.MOST_SETS, max(4, math.ceil(footprint / like.nbytes)))
        inputs = [[like.clone().requires_grad_() for _ in range(2)] for _ in range(self.sets)]
        gradients = [torch.randn_like(like) for _ in range(2 * self.sets)]

        def forward():
            return [norm.alone(*pair) for pair in inputs]

        def both():
            results = []
            for index, (outputs, leaves) in enumerate(forward()):
                dys = gradients[2 * index : 2 * index + len(outputs)]
                wanted = [*leaves, *norm.parameters()]
                results.append(torch.autograd.grad(outputs, wanted, dys))
            return results

        self.seconds, self.kept = [], [inputs, gradients]
        for call in (forward, both):
            self.graph, results = captured(call, warm_up=1)
            self.seconds.append(timing.median_seconds(self.graph.replay, 11) / self.sets)
            self.kept.append(results)  # their memory is not written twice

    def call_seconds(self):
        forward, both = self.seconds
        return {"forward": forward, "backward": both - forward}

    def patterns(self, kernels):
        """{direction: kernels of a call} from those of the second graph."""
        for count in range(1, len(kernels) // self.sets):
            try:
                return {
                    "forward": averaged(kernels[: count * self.sets], self.sets),
                    "backward": averaged(kernels[count * self.sets :], self.sets),
                }
            except ValueError:
                continue
        raise ValueError("calls of the norm alone differ in their kernels")


def places(kernels, pattern):
    """Where the pattern's kernels come one after the other."""
    names, wanted = [k.name for k in kernels], [k.name for k in pattern]
    return [
        at
        for at in range(len(names) - len(wanted) + 1)
        if wanted and names[at : at + len(wanted)] == wanted
    ]


def by_kind(kernels, patterns):
    """{kind: seconds in a step}: the norms' kernels by direction, what comes right behind them, the
    matrix products with attention, all others, and the gaps between kernels."""
    kinds = ["matmul" if MATMUL.search(k.name) else "others" for k in kernels]
    behind = set()
    for direction, pattern in patterns.items():
        for at in places(kernels, pattern):
            after = at + len(pattern)
            kinds[at:after] = [direction] * len(pattern)
            behind.add(after)
    found = dict.fromkeys(["forward", "backward", "matmul", "others"], 0.0)
    for kind, kernel in zip(kinds, kernels, strict=True):
        found[kind] += kernel.seconds
    found["behind"] = sum(kernels[at].seconds for at in behind if at < len(kernels))
    found["gaps"] = sum(k.gap for k in kernels[:-1])
    return found


def kernel_numbers(bench):
    """Yields (mode, variant, quantity, seconds) of the kernels in the step and alone."""
    norms, like = {}, bench.inputs[0].flatten(0, 1)
    for variant, block in bench.blocks.items():
        norm = block.norm1
        if variant in PASSES:  # its kernels once the pass has put the addition inside
            norm = AddInNorm(norm.norm)
        try:
            norms[variant] = Alone(norm, like)
        except Exception as error:
            traceback.print_exc()
            bench.absent[f"{variant}, alone"] = first_line(error)
    launches = {("alone", variant): norm.graph.replay for variant, norm in norms.items()}
    for mode, calls in bench.calls.items():
        launches |= {(mode, variant): calls[variant] for variant in norms if variant in calls}
    found = dict(zip(launches, profiled(list(launches.values())), strict=True))

    def kernels_of(key):
        return averaged(found[key], PROFILED[0] * PROFILED[1])

    for variant, norm in norms.items():
        try:
            patterns = norm.patterns(kernels_of(("alone", variant)))
            steps = {m: kernels_of((m, variant)) for m in bench.calls if (m, variant) in found}
        except ValueError as error:  # the other variants' are good
            bench.absent[f"{variant}, kernels"] = str(error)
            continue
        for direction, seconds in norm.call_seconds().items():
            yield "alone", variant, direction, sum(k.seconds for k in patterns[direction])
            yield "alone", variant, f"{direction}, call", seconds
        for mode, kernels in steps.items():
            for kind, value in by_kind(kernels, patterns).items():
                yield mode, variant, kind, value
            yield mode, variant, "norms", len(places(kernels, patterns["forward"]))


def measure(cases, modes, variants, process, rounds, seconds, profile, begin):
    """(records, {what: why it is absent}); `begin()` is called when all is compiled and captured.

    Processes that start together begin their preparations at different cases, so that each compiles
    another part, and finds the rest in the cache on disk. Zeros, whose times hardly differ, are
    measured by the first process alone.
    """
    torch._dynamo.config.recompile_limit = 1000
    torch._dynamo.config.accumulated_recompile_limit = 1000
    # Where Inductor cannot analyse a kernel of Liger's, it tells so at great length.
    logging.getLogger("torch._higher_order_ops.triton_kernel_wrap").setLevel(logging.ERROR)
    benches = [Bench(case, variants) for case in cases]
    pool = torch.cuda.graph_pool_handle()
    wanted = [mode for mode in ("replayed", "compiled") if mode in modes]
    if "zeros" in modes and process == 1 and "replayed" not in modes:
        wanted.append("replayed")
    todo = [(b, mode, variant) for b in benches for mode in wanted for variant in b.blocks]
    turned = len(todo) * (process % 5) // 5
    todo = todo[turned:] + todo[:turned]
    # Liger's last: a compilation that fails may spoil the next one.
    for bench, mode, variant in sorted(todo, key=lambda one: one[2] == "liger"):
        bench.prepare(variant, mode, pool)
        gc.collect()
        torch.cuda.empty_cache()  # five processes share the memory
    torch.cuda.synchronize()
    begin()
    gc.disable()
    sensor, records, absent = sensors.Sensors(), [], {}

    def keep(bench, mode, variant, quantity, value):
        identity = dataclasses.astuple(bench.case)
        records.append(Record(process, *identity, mode, variant, quantity, value))

    def time_steps(bench, mode, calls):
        calls = {variant: calls[variant] for variant in variants if variant in calls}
        if not calls:
            return
        for variant, numbers in timing.in_turns(calls, rounds, seconds, sensor).items():
            for quantity, value in numbers.items():
                keep(bench, mode, variant, quantity, value)

    for bench in benches:
        for mode in modes:
            if mode != "zeros":
                time_steps(bench, mode, bench.calls[mode])
        if profile:
            try:
                for mode, variant, quantity, value in kernel_numbers(bench):
                    keep(bench, mode, variant, f"kernels, {quantity}", value)
            except ValueError as error:
                absent[f"{bench.case.name}, kernels"] = str(error)
            torch.cuda.empty_cache()
        if "zeros" in modes and process == 1:
            bench.zero()
            time_steps(bench, "zeros", bench.calls["replayed"])
        absent |= {f"{bench.case.name}, {what}": why for what, why in bench.absent.items()}
    gc.enable()
    return records, absent
