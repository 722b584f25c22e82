"""What `fog doctor` finds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        area: "versions", "machine" or "self-test".
        name: What was looked at.
        state: "ok"; "bad": one host does not work; "note": one host works, something else may not.
        text: What was found.
        advice: What to do; "" where nothing is to be done.
    """

    area: str
    name: str
    state: str
    text: str
    advice: str = ""
