"""Steps to a target loss, from the points of benchmarks/results/loss.json."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any


def steps_to(point: Mapping[str, Any], target: float) -> int | None:
    """Returns the first number of steps with a loss of at most `target`; None if there was none."""
    pairs = zip(point["steps"], point["losses"], strict=True)
    return next((steps for steps, loss in pairs if loss <= target), None)


def median_steps(points: Iterable[Mapping[str, Any]], target: float) -> dict[tuple[str, int, str], float]:
    """Returns the median over seeds of the steps to the target, infinite if most runs did not come there."""
    found: dict[tuple[str, int, str], list[float]] = {}
    for p in points:
        steps = steps_to(p, target)
        key = (p["way"], p["ranks"], p["split"])
        found.setdefault(key, []).append(math.inf if steps is None else steps)
    return {key: statistics.median_high(values) for key, values in found.items()}
