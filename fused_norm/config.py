"""Options of the whole process, read at each call. Compiled code is compiled anew when one changes.

>>> import fused_norm
>>> fused_norm.config.decompose = True
>>> with fused_norm.config.patch(decompose=True):
...     pass
"""

import contextlib
from collections.abc import Iterator

decompose: bool = False
"""Whether ``torch.compile`` and ``torch.export`` see norms as torch's elementary operators, to fuse
them with their neighbours, in place of one operator that runs this library's kernels. The results
then differ from eager ones in the last place, ``memory_efficient`` changes nothing but the output's
dtype under autocast, and what is kept for backward is the compiler's choice. Eager code is not
affected."""


@contextlib.contextmanager
def patch(*, decompose: bool) -> Iterator[None]:
    """Sets options for the time of a ``with`` block or of a decorated function."""
    before = globals()["decompose"]
    globals()["decompose"] = decompose
    try:
        yield
    finally:
        globals()["decompose"] = before
