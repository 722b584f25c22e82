"""The findings that `fog doctor` reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        area: "versions", "machine" or "self-test".
        name: The part that was checked.
        state: "ok", "bad" if ranks of a single host do not work, or "note" if only other features may fail.
        text: The result of the check.
        advice: How to fix it; "" if nothing needs to be fixed.
    """

    area: str
    name: str
    state: str
    text: str
    advice: str = ""
