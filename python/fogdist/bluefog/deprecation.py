"""How the door says what is called otherwise now: once a process, so that a training loop is not full of it."""

from __future__ import annotations

import warnings
from functools import cache


@cache
def warn_once(message: str) -> None:
    """Gives a DeprecationWarning, if it has not been given before."""
    warnings.warn(message, DeprecationWarning, stacklevel=3)
