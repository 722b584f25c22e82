"""The detection of ranks that hang, are stopped or cut off; docs/hangs.md explains it.

The backend does it (`lost_ranks`, `suspect_ranks` and `lost_after` of its object, and ``FOG_LOST_AFTER``). Here is what
a program says about itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fog_pg import _extension


@contextlib.contextmanager
def suspend_detection() -> Iterator[None]:
    """Tells other ranks that this one makes no calls of fogdist for a while, which is no hang.

    For an evaluation on one rank, a checkpoint, or a long compilation. Nobody declares this rank lost within it unless
    its whole process is stopped or cut off, and this rank declares nobody lost. It takes a microsecond, costs no
    message, may be nested, and has no effect unless the detection is on.

    Example:
        with fogdist.suspend_detection():
            evaluate(model)
    """
    extension = _extension.load()
    extension.suspend_detection(True)
    try:
        yield
    finally:
        extension.suspend_detection(False)
