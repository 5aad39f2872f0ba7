"""What a run was made on: facts as (name, value)."""

import datetime
import hashlib
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

import fused_norm as fn

ROOT = Path(__file__).resolve().parents[1]
SOURCES = "csrc"


def command():
    """When, and by which command; where it wrote its results is left out."""
    words = sys.argv[1:]
    if "--out" in words:
        at = words.index("--out")
        words = words[:at] + words[at + 2 :]
    return [
        ("date", datetime.datetime.now().isoformat(" ", "minutes")),
        ("command", " ".join(["python -m benchmarks", *words])),
    ]


def git_hash(path):
    """What git calls a file or folder of these contents, as 20 bytes: `git rev-parse COMMIT:PATH`
    tells it of a commit, and this of a copy that has no repository."""
    if path.is_dir():
        kind, entries = b"tree", []
        for child in path.iterdir():
            mode = (
                "40000" if child.is_dir() else "100755" if os.access(child, os.X_OK) else "100644"
            )
            order = child.name + "/" * child.is_dir()
            entries.append((order.encode(), f"{mode} {child.name}".encode(), git_hash(child)))
        body = b"".join(entry + b"\0" + digest for _, entry, digest in sorted(entries))
    else:
        kind, body = b"blob", path.read_bytes()
    return hashlib.sha1(kind + b" %d\0" % len(body) + body).digest()


def versions():
    build = fn.build_info()
    built_for = "the CPU"
    if build["cuda"]:
        built_for = f"{', '.join(build['arch_list'])} with CUDA {build['cuda']}"
    return [
        (
            "versions",
            f"Python {platform.python_version()}, torch {torch.__version__}, "
            f"CUDA {torch.version.cuda}",
        ),
        (
            "fused_norm",
            f"{fn.__version__}, built for {built_for}, torch {build['torch']}; "
            f"{SOURCES} is git tree {git_hash(ROOT / SOURCES).hex()[:12]}",
        ),
    ]


def keep_busy(seconds=1.5, size=2**30):
    """Launch copies that take about so long."""
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    for _ in range(int(seconds * 4e12 / (2 * size))):
        target.copy_(source)


def facts(bandwidth=None):
    """Of the current GPU, with its clocks while it works."""
    device = torch.cuda.get_device_properties(0)
    keep_busy()
    query = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.limit"
    try:
        call = [
            "nvidia-smi",
            f"--id=GPU-{device.uuid}",
            f"--query-gpu={query}",
            "--format=csv,noheader",
        ]
        answer = subprocess.run(call, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError) as error:
        answer = f"nvidia-smi failed: {error}"
    torch.cuda.synchronize()
    clocks = dict(zip(query.split(","), answer.strip().split(", "), strict=False))
    copy = f"{(bandwidth or 0) / 1e12:.3f} TB/s (read + written, 2 GiB device copy)"
    return [
        *command(),
        ("GPU", f"{device.name}, {device.L2_cache_size / 1e6:.0f} MB L2"),
        *((name.replace("_", " "), value) for name, value in clocks.items()),
        *([("copy bandwidth", copy)] if bandwidth else []),
        *versions(),
    ]


def cpu_name():
    """As Linux tells it, else what the platform module knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def cpu_facts():
    return [*command(), ("CPU", f"{cpu_name()}, {os.cpu_count()} cores"), *versions()]
