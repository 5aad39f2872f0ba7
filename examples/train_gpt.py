"""Train a small byte-level transformer three times and compare its norm layers.

    python examples/train_gpt.py --norm rms      # LLaMA-style: RMSNorm, SwiGLU, rotary positions
    python examples/train_gpt.py --norm layer    # GPT-2-style: LayerNorm, GELU, learned positions

The three runs share seed, first weights and batches and differ only in the norm class: torch's,
fused_norm's, and fused_norm's with ``memory_efficient=True``. With ``--attention fused`` the last
two have fused_norm's attention too. A table compares losses, speed and
memory, and the losses are plotted to a PNG file. The text is the source code of Python's standard
library unless ``--text`` names a file or a folder.

On a CPU in fp32 the exit code is 1 if a loss strays from torch's, or if the memory saved is not
the predicted one. Bad options end with one sentence and exit code 2.
"""

import argparse
import dataclasses
import functools
import gc
import math
import os
import sys
import sysconfig
import time
from pathlib import Path

# How often OpenMP's threads look for work before they sleep; read when torch loads. By default they
# spin so long that a CPU run is several times slower where other programs use the same cores.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")

import matplotlib
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from tqdm import tqdm

import fused_norm as fn

matplotlib.use("Agg")  # needs no display; chosen before pyplot loads
from matplotlib import pyplot as plt


@dataclasses.dataclass(frozen=True)
class Preset:
    dim: int
    layers: int
    heads: int
    context: int  # bytes a sequence
    batch: int  # sequences a step
    steps: int
    learning_rate: float
    bf16: bool  # autocast to bf16; weights and residual stream stay fp32


PRESETS = {
    # At 1e-3 attention sharpens until one rounding of a norm moves a loss by 1e-3.
    "tiny": Preset(128, 4, 4, context=128, batch=8, steps=120, learning_rate=5e-4, bf16=False),
    "gpu": Preset(1024, 12, 16, context=1024, batch=8, steps=200, learning_rate=3e-4, bf16=True),
}
MAX_TEXT_BYTES = 64 * 2**20  # far more than a run reads; a large folder is not read to its end
MAX_LOSS_DIFFERENCE = 1e-4  # fp32 rounding, about 1e-7 a step, grows along the training path


class Attention(nn.Module):
    def __init__(self, dim, heads, bias, attend):
        super().__init__()
        self.heads, self.attend = heads, attend
        # No bias: that of the keys shifts all scores of a query alike, so its gradient is nothing
        # but rounding noise, which Adam would scale up to full steps.
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=bias)

    def forward(self, x, rotation=None):
        # (batch, time, 3 * dim) -> three tensors (batch, heads, time, dim / heads)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        y = self.attend(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def rotary_angles(context, head_dim):
    """cos and sin of position times frequency, each (context, head_dim / 2) (Su et al. 2021)."""
    frequency = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angle = torch.outer(torch.arange(context), frequency)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """Rotate the pairs (x[..., i], x[..., i + head_dim / 2])."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class SwiGLU(nn.Module):
    def __init__(self, dim):
        super().__init__()
        hidden = math.ceil(8 * dim / 3 / 64) * 64
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Pre-norm block. `llama` chooses SwiGLU and no biases, else GELU and biases."""

    def __init__(self, dim, heads, make_norm, llama, attend):
        super().__init__()
        self.norm1, self.norm2 = make_norm(dim), make_norm(dim)
        self.attention = Attention(dim, heads, bias=not llama, attend=attend)
        if llama:
            self.mlp = SwiGLU(dim)
        else:
            self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x, rotation=None):
        x = x + self.attention(self.norm1(x), rotation)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Bytes (batch, time) -> logits (batch, time, 256). `make_norm(dim)` builds each norm layer;
    `attend` is a scaled_dot_product_attention."""

    def __init__(self, preset, make_norm, llama, attend=F.scaled_dot_product_attention):
        super().__init__()
        self.embedding = nn.Embedding(256, preset.dim)
        self.positions = None if llama else nn.Embedding(preset.context, preset.dim)
        self.blocks = nn.ModuleList(
            Block(preset.dim, preset.heads, make_norm, llama, attend) for _ in range(preset.layers)
        )
        self.norm = make_norm(preset.dim)
        self.head = nn.Linear(preset.dim, 256, bias=False)
        if llama:
            cos, sin = rotary_angles(preset.context, preset.dim // preset.heads)
            self.register_buffer("cos", cos)
            self.register_buffer("sin", sin)
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module):
        # Embeddings keep torch's standard deviation of 1: a norm divides by that of its input, so
        # after smaller ones the differences in rounding between two runs would grow with training.
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens):
        x = self.embedding(tokens)
        if self.positions is None:
            rotation = (self.cos, self.sin)
        else:
            rotation = None
            x = x + self.positions.weight
        for block in self.blocks:
            x = block(x, rotation)
        return self.head(self.norm(x))


def norm_classes(kind):
    """The three norm layers to compare, by the name shown in the table."""
    torch_norm, fused = (nn.RMSNorm, fn.RMSNorm) if kind == "rms" else (nn.LayerNorm, fn.LayerNorm)
    return {
        "torch": torch_norm,
        "fused_norm": fused,
        "memory_efficient": functools.partial(fused, memory_efficient=True),
    }


def bytes_saved_for_backward(model, compute_loss):
    """Bytes that autograd keeps from forward to backward: unique storages, parameters excluded."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # a node that kept its own output as it is would never be freed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = compute_loss()  # its graph keeps the storages alive: no address comes twice
    del loss
    return sum(size for address, size in storages.items() if address not in parameters)


def predicted_saving(preset, kind):
    """Bytes that memory_efficient must free.

    The two norms of each block and the last norm read the residual stream, each of them another
    (batch, context, dim) fp32 tensor that nobody else keeps: its other users are additions, whose
    gradients need no operand. The norm's output is kept in any case, by the linear layer that
    follows. So a norm that works from its output frees its whole input, and a LayerNorm also the
    fp32 mean of each row, while the reciprocal standard deviation of each row stays.
    """
    norms = 2 * preset.layers + 1
    rows = preset.batch * preset.context
    floats_a_row = preset.dim + (1 if kind == "layer" else 0)
    return norms * rows * floats_a_row * 4


@dataclasses.dataclass(frozen=True)
class Result:
    losses: list
    tokens_per_second: float
    saved_bytes: int
    peak_bytes: int | None  # GPU memory; None on a CPU


def train(name, make_norm, text, preset, options):
    device = options.device
    torch.manual_seed(options.seed)
    attend = F.scaled_dot_product_attention
    if options.attention == "fused" and name != "torch":
        attend = fn.functional.scaled_dot_product_attention
    model = GPT(preset, make_norm, llama=options.norm == "rms", attend=attend).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=preset.learning_rate, betas=(0.9, 0.95))
    warm_up = max(1, options.steps // 10)
    batches = torch.Generator().manual_seed(options.seed)

    def next_batch():
        start = torch.randint(len(text) - preset.context, (preset.batch, 1), generator=batches)
        return text[start + torch.arange(preset.context + 1)].long().to(device)

    def compute_loss(tokens):
        with torch.autocast(device.type, torch.bfloat16, enabled=preset.bf16):
            logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    if device.type == "cuda":
        gc.collect()  # nothing of the run before counts
        torch.cuda.reset_peak_memory_stats(device)
    losses = []
    started = now(device)
    with tqdm(total=options.steps, desc=f"{name:>16}", unit="step") as bar:
        for step in range(options.steps):
            if step == warm_up:  # the first steps also pay for allocations and library start-up
                started = now(device)
            for group in optimizer.param_groups:
                group["lr"] = preset.learning_rate * min(1, (step + 1) / warm_up)
            loss = compute_loss(next_batch())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            if step % 10 == 0 or step == options.steps - 1:  # seldom, as item() waits for the GPU
                bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
            bar.update()
    seconds = now(device) - started
    timed_steps = options.steps - (warm_up if options.steps > warm_up else 0)
    return Result(
        losses=torch.stack(losses).tolist(),
        tokens_per_second=timed_steps * preset.batch * preset.context / seconds,
        peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        saved_bytes=bytes_saved_for_backward(model, lambda: compute_loss(next_batch())),
    )


def now(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def differences(result, reference):
    return [abs(a - b) for a, b in zip(result.losses, reference.losses, strict=True)]


def largest_difference(result, reference):
    apart = differences(result, reference)
    return math.nan if any(map(math.isnan, apart)) else max(apart)


def print_table(results, title):
    on_gpu = results["torch"].peak_bytes is not None
    table = Table(title=title)
    table.add_column("norm layers", no_wrap=True)
    columns = ["first loss", "last loss", "largest difference", "tokens/s", "saved for backward"]
    for column in columns + (["peak GPU memory"] if on_gpu else []):
        table.add_column(column, justify="right", min_width=8)
    for name, result in results.items():
        row = [
            name,
            f"{result.losses[0]:.4f}",
            f"{result.losses[-1]:.4f}",
            "-" if name == "torch" else f"{largest_difference(result, results['torch']):.1e}",
            f"{result.tokens_per_second:,.0f}",
            f"{result.saved_bytes / 2**20:,.2f} MiB",
        ]
        table.add_row(*row, *([f"{result.peak_bytes / 2**20:,.0f} MiB"] if on_gpu else []))
    Console().print(table)


def plot_losses(results, title, path):
    figure, (top, bottom) = plt.subplots(
        2, 1, sharex=True, figsize=(8, 6), height_ratios=(2, 1), layout="constrained"
    )
    for (name, result), style in zip(results.items(), ("C0-", "C1--", "C2:"), strict=True):
        top.plot(result.losses, style, label=name, linewidth=2)
        if name != "torch":
            # A zero has no place on a logarithmic axis; fp32 losses are multiples of about 1e-7.
            apart = [max(d, 1e-8) for d in differences(result, results["torch"])]
            bottom.plot(apart, style, label=name)
    top.set(title=title, ylabel="loss (nats a byte)")
    top.legend()
    bottom.set(xlabel="step", ylabel="difference to torch", yscale="log")
    bottom.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def failures(results, predicted):
    """What is wrong with a CPU run in fp32, a sentence each."""
    for name, result in results.items():
        difference = largest_difference(result, results["torch"])
        if not difference <= MAX_LOSS_DIFFERENCE:  # also true of NaN
            yield f"{name}: a loss is {difference:.1e} off torch's, over {MAX_LOSS_DIFFERENCE:.0e}."
    freed = results["fused_norm"].saved_bytes - results["memory_efficient"].saved_bytes
    if freed != predicted:
        yield f"memory_efficient frees {freed:,} bytes, but {predicted:,} were predicted."


class Parser(argparse.ArgumentParser):
    def error(self, message):
        """One sentence and exit code 2, without argparse's usage text."""
        sys.exit(fail(message))


def fail(message):
    print(f"train_gpt.py: {message}", file=sys.stderr)
    return 2


def read_text(path):
    """The bytes of a file, or of all files in a folder but the hidden ones, as a uint8 tensor."""
    if path is None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    elif path.is_dir():
        hidden = set(path.rglob(".*"))
        files = sorted(
            file
            for file in path.rglob("*")
            if file.is_file() and hidden.isdisjoint([file, *file.parents])
        )
    else:
        files = [path]
    text = bytearray()
    for file in files:
        with file.open("rb") as stream:
            text += stream.read(MAX_TEXT_BYTES - len(text))
    return torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def parse_options(arguments):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--norm", choices=("rms", "layer"), default="rms", help="default: rms")
    parser.add_argument(
        "--attention",
        choices=("torch", "fused"),
        default="torch",
        help="of the runs with fused_norm's norms; default: torch",
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE_OR_FOLDER", help="default: Python's standard library"
    )
    parser.add_argument("--preset", choices=tuple(PRESETS), help="default: gpu on a GPU, else tiny")
    parser.add_argument("--steps", type=int, help="default: the preset's")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--device", help="cpu, cuda or cuda:N; default: cuda if there is one")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/demo"),
        help="folder of the plot; default: build/demo",
    )
    options = parser.parse_args(arguments)

    cuda_works = torch.cuda.is_available() and fn.build_info()["cuda"] is not None
    try:
        options.device = torch.device(options.device or ("cuda" if cuda_works else "cpu"))
    except RuntimeError:
        parser.error(f"--device {options.device} is not a device; use cpu, cuda or cuda:N.")
    if options.device.type not in ("cpu", "cuda"):
        parser.error(f"--device {options.device} is not supported; use cpu, cuda or cuda:N.")
    if options.device.type == "cuda":
        if fn.build_info()["cuda"] is None:
            parser.error(f"--device {options.device}: this build of fused_norm is CPU-only.")
        gpus = torch.cuda.device_count()
        if (options.device.index or 0) >= gpus:
            parser.error(f"--device {options.device} is not there; torch sees {gpus} GPUs.")
    options.preset = options.preset or ("gpu" if options.device.type == "cuda" else "tiny")
    if options.steps is None:
        options.steps = PRESETS[options.preset].steps
    if options.steps < 1:
        parser.error(f"--steps {options.steps} is too few; give at least 1.")
    if not -(2**63) <= options.seed < 2**64:
        parser.error(f"--seed {options.seed} does not fit into 64 bits.")
    if options.text is not None and not options.text.exists():
        parser.error(f"--text {options.text} does not exist.")
    return options


def main(arguments=None):
    options = parse_options(arguments)
    preset = PRESETS[options.preset]
    source = options.text or "Python's standard library"
    plot = options.out / f"loss_{options.norm}.png"
    try:
        text = read_text(options.text)
        options.out.mkdir(parents=True, exist_ok=True)
        plot.touch()  # says now, not after the training, that the folder cannot be written
    except OSError as error:
        return fail(f"{error.filename} cannot be used: {error.strerror}.")
    if len(text) <= preset.context:
        needed = preset.context + 1
        return fail(f"the text of {source} has {len(text)} bytes, but needs at least {needed}.")

    style = "LLaMA-style, RMSNorm" if options.norm == "rms" else "GPT-2-style, LayerNorm"
    title = f"{style}: {options.preset} preset, {options.steps} steps on {options.device}"
    print(f"{title}, reading {len(text):,} bytes of {source}", flush=True)
    results = {
        name: train(name, make_norm, text, preset, options)
        for name, make_norm in norm_classes(options.norm).items()
    }
    print_table(results, title)

    freed = results["fused_norm"].saved_bytes - results["memory_efficient"].saved_bytes
    predicted = predicted_saving(preset, options.norm)
    print(f"memory_efficient frees {freed:,} bytes a step; predicted: {predicted:,}.")
    plot_losses(results, title, plot)
    print(f"Losses are plotted in {plot}")

    wrong = [
        f"{name}: a loss is not finite."
        for name, result in results.items()
        if not all(map(math.isfinite, result.losses))
    ]
    # Elsewhere rounding and the order of additions on a GPU leave too wide a margin to judge.
    if options.device.type == "cpu" and not preset.bf16:
        wrong += failures(results, predicted)
    for sentence in wrong:
        print(f"FAILED: {sentence}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
