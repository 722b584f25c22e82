"""What `soak_faults` has counted: as numbers for JSON, and as a table."""

from __future__ import annotations

import fcntl
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

# What must be 0.
FAILURES = ("hangs", "crashes", "wrong", "orphans", "leftovers")
# Faults that end the process of a rank.
ENDS = ("kill", "segfault")


@dataclass
class Pace:
    """Steps of ranks, and the seconds in which they could make them; and the same of times that no fault disturbs.

    There is one for each number of living ranks, because the steps of fewer ranks take less time.
    """

    steps: int = 0
    seconds: float = 0.0
    own_steps: int = 0
    own_seconds: float = 0.0

    def add(
        self,
        ends: np.ndarray,
        begin: float,
        until: float,
        pauses: Sequence[tuple[float, float]] = (),
        disturbed: Sequence[tuple[float, float]] = (),
    ) -> None:
        """Adds what a rank has made between two times.

        Args:
            ends: Of its steps.
            begin: The first time.
            until: The second.
            pauses: In which it could make none; what it makes counts.
            disturbed: Times of faults and of what follows from them.
        """
        self.steps += int(((ends > begin) & (ends <= until)).sum())
        self.seconds += until - begin - _covered(pauses, begin, until)
        self.add_own(ends, begin, until, disturbed)

    def add_own(
        self, ends: np.ndarray, begin: float, until: float, disturbed: Sequence[tuple[float, float]] = ()
    ) -> None:
        """Adds only what it has made outside of the disturbed times."""
        undisturbed = (ends > begin) & (ends <= until)
        for first, last in disturbed:
            undisturbed &= (ends <= first) | (ends > last)
        self.own_steps += int(undisturbed.sum())
        self.own_seconds += until - begin - _covered(disturbed, begin, until)


@dataclass
class Totals:
    """What was counted in some worlds of a mode.

    Attributes:
        worlds: How many with faults.
        twins: How many of them ran a second time, without faults.
        faults: How many of each kind.
        hangs: Of ranks.
        crashes: Of ranks.
        wrong: Sums and averages.
        orphans: Processes that were left.
        leftovers: Names in /dev/shm that were left.
        raised: Operations that raised on survivors because a rank was lost.
        paces: Of living ranks, by their number; the undisturbed times are also those of the twins.
        next_step: Seconds from each loss to the next step of each survivor, by the kind of fault.
        loss_ratios: The loss of survivors relative to that of the same ranks after as many steps without faults.
        last_losses: Their loss relative to that at the start.
        moments: What ranks did when they were killed, in modes that know it.
        possible_moments: All of these.
        seconds: Of the start of worlds, their training and their end.
        problems: In words.
    """

    worlds: int = 0
    twins: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    hangs: int = 0
    crashes: int = 0
    wrong: int = 0
    orphans: int = 0
    leftovers: int = 0
    raised: int = 0
    paces: dict[int, Pace] = field(default_factory=dict)
    next_step: dict[str, list[float]] = field(default_factory=dict)
    loss_ratios: list[float] = field(default_factory=list)
    last_losses: list[float] = field(default_factory=list)
    moments: Counter[str] = field(default_factory=Counter)
    possible_moments: Sequence[str] = ()
    seconds: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    @property
    def failures(self) -> int:
        """What must be 0."""
        return sum(getattr(self, name) for name in FAILURES)


def loss_ratio(losses: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> float | None:
    """Returns the mean loss of some ranks relative to that of others, after as many steps as all of them have made.

    The mean is that of the last fifth of these steps, because one step's loss is noisy. None if there are no steps.
    """
    steps = min((len(each) for each in (*losses, *others)), default=0)
    if steps == 0:
        return None
    last = slice(steps - max(1, steps // 5), steps)
    return float(np.mean([each[last] for each in losses]) / np.mean([each[last] for each in others]))


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The least of the values that so many percent of them do not exceed; None if there are none."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(percent * len(ordered)) // 100) - 1)] if ordered else None


def result(totals: Mapping[str, Totals], ranks: int) -> dict[str, Any]:
    """What a soak has shown, for JSON."""
    modes = {}
    for mode, each in totals.items():
        modes[mode] = {
            "worlds": each.worlds,
            "twins": each.twins,
            "faults": dict(each.faults),
            **{name: getattr(each, name) for name in FAILURES},
            "operations_raised": each.raised,
            "paces": {str(living): asdict(pace) for living, pace in sorted(each.paces.items())},
            "next_step_seconds": {
                kind: [round(value, 4) for value in sorted(values)] for kind, values in each.next_step.items()
            },
            "loss_ratios": [round(value, 5) for value in sorted(each.loss_ratios)],
            "last_losses": [round(value, 5) for value in sorted(each.last_losses)],
            "moments": dict(sorted(each.moments.items())),
            "possible_moments": len(each.possible_moments),
            "missed_moments": [moment for moment in each.possible_moments if moment not in each.moments],
            "world_seconds": {name: round(value, 1) for name, value in each.seconds.items()},
            # Without stacks, which name files of this machine.
            "problems": [problem.partition("\n")[0] for problem in each.problems[:20]],
        }
    return {
        "ranks": ranks,
        "faults": sum(sum(each.faults.values()) for each in totals.values()),
        "failures": sum(each.failures for each in totals.values()),
        "modes": modes,
    }


def throughput(several: Sequence[Mapping[str, Any]]) -> float | None:
    """The steps of living ranks, relative to what they make undisturbed in the same soak; of a mode in results."""
    steps = expected = 0.0
    for pace in (pace for values in several for pace in values["paces"].values()):
        if pace["own_steps"]:
            steps += pace["steps"]
            expected += pace["seconds"] * pace["own_steps"] / pace["own_seconds"]
    return steps / expected if expected else None


def next_steps(values: Mapping[str, Any], *, ends: bool = True) -> list[float]:
    """The seconds to the next step after losses by the end of a process, or by other faults; of a mode in a result."""
    found = values["next_step_seconds"]
    return [second for kind in found if (kind in ENDS) == ends for second in found[kind]]


def table(found: Mapping[str, Any]) -> str:
    """The result as text."""
    columns = ["worlds", "faults", *FAILURES, "throughput", "loss", "next step p50", "p99", "cut: p50", "p99"]
    rows = [["mode", *columns]]
    for mode, values in found["modes"].items():
        share, ratio = throughput([values]), percentile(values["loss_ratios"], 50)
        seconds = [next_steps(values), next_steps(values, ends=False)]
        times = [percentile(each, p) for each in seconds for p in (50, 99)]
        rows.append(
            [
                mode,
                str(values["worlds"]),
                str(sum(values["faults"].values())),
                *(str(values[name]) for name in FAILURES),
                "-" if share is None else f"{100 * share:.1f} %",
                "-" if ratio is None else f"{100 * (ratio - 1):+.2f} %",
                *("-" if time is None else f"{1e3 * time:.0f} ms" for time in times),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    )


def append(path: Path, found: Mapping[str, Any]) -> None:
    """Adds a result to those of a file, {"runs": [...]}, which may not exist yet and which others may add to as well."""
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        runs = json.loads(text)["runs"] if text else []
        file.truncate(0)
        file.write(json.dumps({"runs": [*runs, found]}, indent=1) + "\n")


def _covered(spans: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """Seconds between `begin` and `end` that at least one span covers."""
    covered, reached = 0.0, begin
    for first, last in sorted(spans):
        until = min(last, end)
        if until > max(first, reached):
            covered += until - max(first, reached)
            reached = until
    return covered
