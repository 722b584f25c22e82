"""Limits timeouts to the range of torch, which counts microseconds: the largest timedeltas would overflow."""

from __future__ import annotations

from datetime import timedelta

__all__ = ["LONGEST", "within_reach"]

# Longer than any program runs, and small enough to be added to a time in nanoseconds without an overflow.
LONGEST = timedelta(days=36_500)


def within_reach(timeout: timedelta) -> timedelta:
    """Returns the timeout, or `LONGEST` if it is longer or has overflowed in torch, which makes it negative."""
    return timeout if -LONGEST < timeout < LONGEST else LONGEST
