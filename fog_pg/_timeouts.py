"""Timeouts that torch can carry: it counts them in microseconds, for which the largest timedeltas are too large."""

from __future__ import annotations

from datetime import timedelta

__all__ = ["LONGEST", "within_reach"]

# Longer than any program runs, and small enough to be added to a time in nanoseconds.
LONGEST = timedelta(days=36_500)


def within_reach(timeout: timedelta) -> timedelta:
    """The timeout, or `LONGEST` if it is longer, or has become what nobody gives: torch's overflow is negative."""
    return timeout if -LONGEST < timeout < LONGEST else LONGEST
