"""The speed each operation is held to: ``time <= ideal / e + c``.

`ideal` is the least bytes the operation must move over the copy bandwidth measured in the same
process, e the part of that bandwidth to reach, c what launching, ramping up and draining cost.
"""

import torch


def norm_target(direction, cols, dtype):
    """(e, c in seconds) of a norm's "forward" or "backward" over rows of `cols` elements."""
    forward = direction == "forward"
    if dtype == torch.float32:
        e = 0.99 if forward else 0.98
    else:
        e = 0.97 if forward else 0.96
    if not forward and cols <= 256:
        e = min(e, 0.90)
    if cols > 32 * 1024:
        e = min(e, 0.94 if forward else 0.92)
    if cols * dtype.itemsize % 16:
        e = min(e, 0.90 if forward else 0.85)
    return e, (1.3e-6 if forward else 2.5e-6)


def softmax_target(direction, cols, dtype):
    """(e, c in seconds) of softmax or log_softmax over rows of `cols` elements."""
    forward = direction == "forward"
    e = 0.97 if forward else 1.0
    if cols > 32 * 1024:
        e = min(e, 0.94)
    if cols * dtype.itemsize % 16:
        e = min(e, 0.93 if forward else 0.95)
    return e, 1.3e-6
