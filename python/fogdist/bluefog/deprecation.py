"""Warnings about renamed functions, issued once per process so that they do not fill the output of a training loop."""

from __future__ import annotations

import warnings
from functools import cache


@cache
def warn_once(message: str) -> None:
    """Issues a DeprecationWarning, unless the same one was issued before."""
    warnings.warn(message, DeprecationWarning, stacklevel=3)
