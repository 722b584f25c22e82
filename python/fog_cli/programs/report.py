"""How the programs of `fog doctor` tell it what they have done: lines of JSON on standard output."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any


def tell(**values: Any) -> None:
    """Prints one line, at once: this process may never come to its end."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def step(name: str, action: Callable[[], Any]) -> bool:
    """Does something and tells `begin`, then `text` (what it returned) or `error`; returns whether it went well."""
    tell(name=name, begin=True)
    try:
        text = action()
    except (Exception, SystemExit) as error:
        lines = str(error).strip().splitlines() or [""]
        tell(name=name, error=f"{type(error).__name__}: {lines[0]}")
        return False
    tell(name=name, text="" if text is None else str(text))
    return True
