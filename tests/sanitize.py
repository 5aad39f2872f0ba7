"""compute-sanitizer over sanitizer_set.py, which it takes in parts, several at a time.

    python tests/sanitize.py [--tool memcheck] [--jobs N] [FAMILY K/N ...]

Without arguments every part of every family, under memcheck: some minutes on a data centre's GPU.
racecheck takes far longer: `--tool racecheck norm 13/16 stages 1/5` are two parts for it. A line
for each part, and the exit code is 1 unless all of them are clean.
"""

import argparse
import concurrent.futures
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

SET = Path(__file__).with_name("sanitizer_set.py")
PARTS = {"norm": 16, "add": 8, "gated": 4, "softmax": 6, "attention": 6, "stages": 5}
# initcheck does not see what bulk stores (TMA) write to global memory. This kernel reads the sums
# that they made; tests/test_attention.py runs it on memory that held NaN before. What an excluded
# kernel writes counts as never written: parts that copy such a gradient still have reports. And so
# have those whose mask is copied to rows of whole packs: nothing depends on what follows the keys.
OPTIONS = {
    "initcheck": ["--kernel-name-exclude", "kernel_substring=attention_query_gradient_hopper"]
}
CLEAN = re.compile(r"ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards displayed")


def check(tool, family, part):
    """(whether the part is clean, what to say of it)"""
    command = ["compute-sanitizer", "--tool", tool, *OPTIONS.get(tool, ()), "--error-exitcode", "1"]
    done = subprocess.run(
        [*command, sys.executable, SET, family, part],
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(SET.parents[1])},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    clean = done.returncode == 0 and CLEAN.search(done.stdout) is not None
    lines = done.stdout.strip().splitlines()
    said = [line for line in lines if "SUMMARY" in line] if clean else lines[-40:]
    return clean, f"{tool} {family} {part}: " + "\n".join(said)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tool", choices=("memcheck", "racecheck", "initcheck", "synccheck"),
                        default="memcheck")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("parts", nargs="*", metavar="FAMILY K/N")
    options = parser.parse_args(arguments)
    if len(options.parts) % 2:
        parser.error(f"parts are pairs such as norm 13/16, not {' '.join(options.parts)}")
    if not shutil.which("compute-sanitizer"):
        parser.error("compute-sanitizer, of the CUDA toolkit, is not on PATH")
    parts = list(zip(options.parts[::2], options.parts[1::2], strict=True)) or [
        (family, f"{k}/{n}") for family, n in PARTS.items() for k in range(1, n + 1)
    ]
    clean = 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        running = [pool.submit(check, options.tool, *part) for part in parts]
        for done in concurrent.futures.as_completed(running):
            is_clean, words = done.result()
            clean += is_clean
            print(words, flush=True)
    print(f"{clean} of {len(parts)} clean under {options.tool}")
    return 0 if clean == len(parts) else 1


if __name__ == "__main__":
    sys.exit(main())
