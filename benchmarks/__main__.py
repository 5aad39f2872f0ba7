"""Entry point of ``python -m benchmarks COMMAND``.

A command is a module with `add_arguments(parser)` and `run(options)`, which returns the exit code;
`needs_gpu = False` says that it runs on a CPU too, `writes = False` that it writes no files.
"""

import argparse
import sys
from pathlib import Path

import torch

import benchmarks
import fused_norm as fn
from benchmarks import (
    attention,
    backward_ladder,
    compare,
    cpu,
    everything,
    flag,
    limits,
    memory,
    merge,
    model,
    norm,
    overhead,
    softmax,
    sweep,
)

COMMANDS = {
    "norm": norm,
    "softmax": softmax,
    "attention": attention,
    "sweep": sweep,
    "overhead": overhead,
    "flag": flag,
    "all": everything,
    "merge": merge,
    "compare": compare,
    "memory": memory,
    "limits": limits,
    "model": model,
    "cpu": cpu,
    "ladder": backward_ladder,
}


class Parser(argparse.ArgumentParser):
    def error(self, message):
        """One sentence and exit code 2, without argparse's usage text."""
        sys.exit(fail(message))


def fail(message):
    print(f"python -m benchmarks: {message}", file=sys.stderr)
    return 2


def parse(arguments):
    parser = Parser(prog="python -m benchmarks", description=benchmarks.__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        summary = module.__doc__.partition("\n")[0].replace("%", "%%")
        command = commands.add_parser(name, help=summary)
        module.add_arguments(command)
        if getattr(module, "writes", True):
            command.add_argument(
                "--out",
                type=Path,
                default=Path("build/benchmarks"),
                help="folder for the tables; default: %(default)s",
            )
    return parser.parse_args(arguments)


def main(arguments=None):
    options = parse(arguments)
    module = COMMANDS[options.command]
    needs_gpu = getattr(module, "needs_gpu", True) or getattr(options, "device", None) == "cuda"
    if needs_gpu and not torch.cuda.is_available():
        return fail("a CUDA GPU is needed, and torch sees none.")
    if needs_gpu and fn.build_info()["cuda"] is None:
        return fail(
            "this build of fused_norm is CPU-only; rebuild it on a machine with a CUDA toolkit."
        )
    if getattr(module, "writes", True):
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return fail(f"--out {options.out} cannot be used: {error.strerror}.")
    try:
        return module.run(options)
    except ValueError as error:
        if module in (merge, compare):
            return fail(str(error))
        raise


if __name__ == "__main__":
    sys.exit(main())
