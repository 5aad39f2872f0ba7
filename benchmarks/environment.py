"""What a run was made on: facts as (name, value)."""

import datetime
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

import fused_norm as fn


def command():
    return [
        ("date", datetime.datetime.now().isoformat(" ", "minutes")),
        ("command", f"python -m benchmarks {' '.join(sys.argv[1:])}"),
    ]


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
            f"{fn.__version__}, built for {built_for}, torch {build['torch']}",
        ),
    ]


def facts(bandwidth=None):
    """Of the current GPU, with its clocks at this moment."""
    device = torch.cuda.get_device_properties(0)
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
