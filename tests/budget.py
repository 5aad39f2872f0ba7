"""How large the sources are, beside their limits and their goals: `make budget`.

A limit is today's figure wherever the goal is not reached yet, so that nothing grows. A change that
makes a figure smaller lowers its limit too. Lines and functions are counted in the sources, kernels
in the built extension: a kernel that two sources hold counts twice. Of several targets the one with
the most kernels counts.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "csrc" / "core"
# {figure: (folder, its sources, what does not count)}; subfolders do not either.
FOLDERS = {
    "lines of csrc/ops": ("csrc/ops", "*.[ch]*", None),
    "lines of csrc/cpu, attention apart": ("csrc/cpu", "*.[ch]*", "attention"),
    "lines of fused_norm": ("fused_norm", "*.py", None),
}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 80

# {figure: (limit, goal)}
BUDGET = {
    "lines of common": (2789, 2300),
    "lines of norm": (4805, 3000),
    "lines of softmax": (2549, 2000),
    "lines of gated RMSNorm": (172, 200),
    "lines of attention": (7644, 4500),
    "lines of csrc/ops": (3659, 2300),
    "lines of csrc/cpu, attention apart": (600, 600),
    "lines of fused_norm": (4209, 2300),
    "kernels of norms and softmaxes": (210, 210),
    "kernels of gated RMSNorm": (18, 24),
    "kernels of attention": (130, 130),
    f"files of more than {MAX_FILE_LINES} lines": (0, 0),
    f"functions of more than {MAX_FUNCTION_LINES} lines": (0, 0),
}


def cuda_tool(name):
    """The path of a tool of the CUDA toolkit, or of triton, which torch brings along; or None."""
    folders = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")]
    if triton := importlib.util.find_spec("triton"):
        folders.append(Path(triton.origin).parent / "backends" / "nvidia" / "bin")
    return next((str(at / name) for at in folders if (at / name).exists()), shutil.which(name))


def kernels_of_each_target(listing):
    """{target: names of its kernels} of `cuobjdump --dump-resource-usage`; of a kernel that several
    sources hold, a name for each."""
    targets, current = {}, None
    for line in listing.splitlines():
        if match := re.match(r"arch = (\S+)", line):
            # Kernels for sm_90a run on the chips of sm_90, beside those for sm_90.
            current = targets.setdefault(match[1].rstrip("a"), [])
        elif (match := re.match(r"\s*Function (\S+?):?\s*$", line)) and current is not None:
            current.append(match[1])
    return {target: names for target, names in targets.items() if names}


def kernel_counts(extension):
    """{target: {figure: count}} of a built extension; None without kernels or without cuobjdump."""
    tool = cuda_tool("cuobjdump")
    if tool is None:
        return None
    command = [tool, "--dump-resource-usage", str(extension)]
    listing = subprocess.run(command, capture_output=True, text=True).stdout
    counts = {}
    for target, names in kernels_of_each_target(listing).items():
        of_attention = sum("attention" in name for name in names)
        gated = sum("attention" not in name and "gated" in name.lower() for name in names)
        counts[target] = {
            "kernels of norms and softmaxes": len(names) - of_attention - gated,
            "kernels of gated RMSNorm": gated,
            "kernels of attention": of_attention,
        }
    return counts or None


def function_lines(source):
    """[(first line, count of lines)] of the functions of a source, methods apart: what ends with a
    brace alone, as clang-format has it, begins at the last line before that is not indented."""
    lengths, start = [], 0
    lines = source.splitlines()
    for number, line in enumerate(lines):
        if line == "}":
            lengths.append((lines[start].strip(), number - start + 1))
        elif line and line[0] not in " #/}":
            start = number
    return lengths


def sizes():
    """{figure: count}, and [what is longer than it may be]."""
    figures, long = Counter(), []
    for path in sorted(CORE.rglob("*.[ch]*")):
        text = path.read_text()
        lines = len(text.splitlines())
        part = "gated RMSNorm" if "gated" in path.name else path.relative_to(CORE).parts[0]
        figures[f"lines of {part}"] += lines
        if lines > MAX_FILE_LINES:
            figures[f"files of more than {MAX_FILE_LINES} lines"] += 1
            long.append(f"{path.relative_to(CORE)}: {lines} lines")
        for first, length in function_lines(text):
            if length > MAX_FUNCTION_LINES:
                figures[f"functions of more than {MAX_FUNCTION_LINES} lines"] += 1
                long.append(f"{path.relative_to(CORE)}: {length} lines from `{first}` on")
    for figure, (folder, sources, others) in FOLDERS.items():
        for path in (ROOT / folder).glob(sources):
            if others is None or others not in path.name:
                figures[figure] += len(path.read_text().splitlines())
    return figures, long


def main():
    figures, long = sizes()
    extension = next(iter(sorted((ROOT / "fused_norm").glob("_C*.so"))), None)
    of_targets = kernel_counts(extension) if extension else None
    for counts in (of_targets or {}).values():
        figures |= Counter(counts)
    over = []
    print(f"{'figure':34} {'now':>6} {'limit':>6} {'goal':>6}")
    for figure, (limit, goal) in BUDGET.items():
        known = of_targets is not None or not figure.startswith("kernels")
        print(f"{figure:34} {figures[figure] if known else '-':>6} {limit:>6} {goal:>6}")
        if figures[figure] > limit:
            over.append(figure)
    if of_targets is None:
        print("(kernels are not known: the extension has none, or there is no cuobjdump)")
    print("", *long, sep="\n")
    sys.exit(f"over the limit: {', '.join(over)}" if over else 0)


if __name__ == "__main__":
    main()
