"""Warnings that show the line of the user's script, regardless of the functions of fogdist and torch in between."""

from __future__ import annotations

import sys
import warnings

_PASSED_OVER = frozenset({"fogdist", "torch", "contextlib"})


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Issues a warning at the innermost call outside of fogdist and torch."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _package(frame.f_globals) in _PASSED_OVER:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def _package(names: dict[str, object]) -> str:
    return str(names.get("__name__", "")).partition(".")[0]
