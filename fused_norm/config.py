"""Options of the whole process, read at each call. Compiled code is compiled anew when one changes.

>>> fused_norm.config.decompose = True
>>> with fused_norm.config.patch(decompose=True):
...     pass
"""

import contextlib
import sys
import types
from collections.abc import Iterator

from fused_norm import _arguments

decompose: bool = False
"""Whether ``torch.compile`` and ``torch.export`` see norms as torch's elementary operators, to fuse
them with their neighbours, in place of one operator that runs this library's kernels. What
changes with that: docs/stacks.md, "torch.compile". Eager code is not affected."""


@contextlib.contextmanager
def patch(*, decompose: bool) -> Iterator[None]:
    """Sets options for the time of a ``with`` block or of a decorated function."""
    module = sys.modules[__name__]
    before = module.decompose
    module.decompose = decompose
    try:
        yield
    finally:
        module.decompose = before


class _Options(types.ModuleType):
    """A module of flags that has no others."""

    def __setattr__(self, name: str, value) -> None:
        if name in self.__annotations__:
            value = _arguments.flag(f"fused_norm.config.{name}", value)
        elif not name.startswith("__"):
            known = ", ".join(self.__annotations__)
            raise AttributeError(f"fused_norm.config has no option {name!r}; it has: {known}")
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Options
