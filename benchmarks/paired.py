"""Of trainings in several ways: rates that are chosen by other seeds, steps to a loss, and intervals of paired seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# A training's, by names such as "way" and "split".
Key = tuple[Any, ...]


def key_of(row: Mapping[str, Any], names: Sequence[str]) -> Key:
    """Returns what a row has by these names."""
    return tuple(row[name] for name in names)


def best_rates(tuning: Iterable[Mapping[str, Any]], names: Sequence[str]) -> dict[Key, float]:
    """Returns for each key the learning rate whose loss ended lowest in the mean of the tuning seeds."""
    found: dict[Key, dict[float, list[float]]] = {}
    for row in tuning:
        losses = found.setdefault(key_of(row, names), {})
        losses.setdefault(row["rate"], []).append(math.inf if row["loss"] is None else row["loss"])
    return {
        key: min(losses, key=lambda rate: statistics.fmean(losses[rate])) for key, losses in found.items()
    }


def finite(loss: float) -> float | None:
    """Returns a loss; None for what runs that diverge come to, as JSON has no numbers for that."""
    return loss if math.isfinite(loss) else None


def median_steps(
    points: Iterable[Mapping[str, Any]], target: float, names: Sequence[str]
) -> dict[Key, float]:
    """Returns for each key the median over seeds of the steps to a loss, infinite if most runs did not come there."""
    found: dict[Key, list[float]] = {}
    for point in points:
        pairs = zip(point["steps"], point["losses"], strict=True)
        steps = next((steps for steps, loss in pairs if loss <= target), math.inf)
        found.setdefault(key_of(point, names), []).append(steps)
    return {key: statistics.median_high(values) for key, values in found.items()}


def compared(
    points: Iterable[Mapping[str, Any]], reference: str, names: Sequence[str]
) -> dict[Key, list[tuple[Mapping[str, Any], Mapping[str, Any]]]]:
    """Returns by way and key the points, each with that of the way `reference` with the same seed."""
    final = {(*key_of(p, names), p["seed"], p["way"]): p for p in points}
    found: dict[Key, list[tuple[Mapping[str, Any], Mapping[str, Any]]]] = {}
    for (*place, way), point in final.items():
        other = final.get((*place, reference))
        if other is not None:
            found.setdefault((way, *place[:-1]), []).append((point, other))
    return found


def difference(pairs: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, Any]:
    """Returns the last loss relative to that of the reference: the mean, and the 95 % t-interval of several seeds."""
    from scipy import stats

    values = [mine["losses"][-1] / its["losses"][-1] - 1 for mine, its in pairs]
    mean, count = statistics.fmean(values), len(values)
    found: dict[str, Any] = {"seeds": count, "mean": round(mean, 6)}
    if count > 1:
        half = float(stats.t.ppf(0.975, count - 1)) * statistics.stdev(values) / math.sqrt(count)
        found |= {"lower": round(mean - half, 6), "upper": round(mean + half, 6)}
    return found
