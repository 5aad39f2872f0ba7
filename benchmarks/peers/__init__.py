"""The implementations that are compared, a module each.

A module may define

- `VERSION`: text;
- `Norm` and `Softmax`: classes whose objects are measured bare, without autograd. Their methods are
  those of `ours.Norm` and `ours.Softmax`. They raise `Unsupported` for what they lack;
- `LACKS`: {"Norm" or "Softmax": why there is no such class};
- `functions()`: {operation: function that a user calls}, differentiable, for the time of the host.
"""

import importlib
import re

from benchmarks.results import OURS

MODULES = {
    "torch": "eager",
    "torch.compile": "compiled",
    "liger": "liger",
    "quack": "quack",
    "cudnn": "cudnn",
    "apex": "apex",
}


def ranked(names):
    """[(rank, name)]: ours first, then the peers as listed above, each always of the same rank."""
    ranks = {name: rank for rank, name in enumerate([OURS, *MODULES])}
    return sorted((ranks.get(name, len(ranks)), name) for name in set(names))


class Unsupported(Exception):
    """This implementation does not have this operation, direction, size or dtype."""


def saved_by_plain_torch(case, x):
    """(x, statistics...) for a backward pass, from no norm's operator: of any pair of dtypes."""
    wide = x.float()
    statistics = []
    if not case.rms:
        statistics = [wide.mean(-1, keepdim=True)]
        wide = wide - statistics[0]
    return x, *statistics, (wide.square().mean(-1, keepdim=True) + case.eps).rsqrt()


class SavesInput:
    """A norm whose backward takes x and the statistics that `forward` gives after y."""

    def saved(self, case, x, weight, bias):
        return x, *self.forward(case, x, weight, bias)[1:]


def only_softmax(case):
    """For implementations that have softmax alone, with the input's dtype."""
    if case.log:
        raise Unsupported("has no log_softmax")
    if case.x_dtype != case.y_dtype:
        raise Unsupported("the output has the dtype of the input")


def first_line(error, limit=120):
    """An error in a few words: its first line, or its name if it has no text."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()  # without colours
    return (text or type(error).__name__).splitlines()[0][:limit]


def load(kind, names=tuple(MODULES)):
    """Peers of a kind, "Norm", "Softmax" or "functions": ({name: peer}, [(name, why absent)]).

    A broken installation is absent like a missing one, and its error is told.
    """
    present, absent = {}, []
    for name in names:
        try:
            module = importlib.import_module(f"benchmarks.peers.{MODULES[name]}")
            make = getattr(module, kind, None)
            if make is None:
                lacks = getattr(module, "LACKS", {})
                absent.append((name, lacks.get(kind, "has no such operation")))
                continue
            present[name] = make()
        except ImportError as error:
            absent.append((name, f"not importable: {first_line(error)}"))
        except Exception as error:  # whatever a foreign package's import or set-up may raise
            absent.append((name, f"{type(error).__name__}: {first_line(error)}"))
    return present, absent


def facts(present, absent):
    """Versions of the peers that are there, and the names of those that are not."""
    modules = {
        name: importlib.import_module(f"benchmarks.peers.{MODULES[name]}") for name in present
    }
    found = ", ".join(f"{name} {module.VERSION}" for name, module in modules.items())
    missing = ", ".join(f"{name} ({why})" for name, why in absent)
    return [("peers", found or "none")] + ([("absent", missing)] if missing else [])
