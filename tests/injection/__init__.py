"""Libraries between fog and the system, by which a test refuses or observes fog's requests to the system."""

from __future__ import annotations

from pathlib import Path

from device_double import build

_HERE = Path(__file__).resolve().parent


def refusals() -> Path:
    """Compiles the library for ``LD_PRELOAD`` that refuses memory and threads; see refusals.cpp.

    Returns:
        The path of the library.
    """
    return build(
        "librefusals", ["refusals.cpp"], flags=["-O2", "-fvisibility=default"], library=True, where=_HERE
    )
