"""Loads the extension, or says in a sentence why it cannot be loaded.

A C++ extension works with the torch that it was compiled against. Another one lacks its symbols, or
worse, has them and lays out its objects differently: so the versions are compared before the file
is loaded.
"""

import importlib.util
import re
from pathlib import Path

import torch

AGAIN = "install fused_norm again: pip install --no-build-isolation --force-reinstall --no-deps ."


def _torch_of(binary: bytes) -> str | None:
    """The torch version that an extension was compiled against (csrc/ops/bindings.cpp)."""
    match = re.search(rb"fused_norm was built with torch ([\w.]+)", binary)
    return match.group(1).decode() if match else None


def _load() -> None:
    found = importlib.util.find_spec("fused_norm._C")
    if found is None:
        raise ImportError(
            f"fused_norm in {Path(__file__).parent} is not compiled for this Python. If these are "
            "the sources, run `make build` there, or start Python elsewhere to use an installed "
            "fused_norm."
        )
    built = _torch_of(Path(found.origin).read_bytes())
    if built is not None and built != torch.__version__.split("+")[0]:
        raise ImportError(
            f"fused_norm was built with torch {built}, but torch {torch.__version__} is "
            f"installed: pip install torch=={built} goes with this build, or, with its sources at "
            f"hand, {AGAIN}"
        )
    try:
        from fused_norm import _C  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"fused_norm's extension does not load into torch {torch.__version__} ({error}); after "
            f"a change of torch, {AGAIN}"
        ) from error


_load()
