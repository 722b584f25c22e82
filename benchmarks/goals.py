"""What a benchmark is to reach, held against what it measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from report import Row, size_text


@dataclass(frozen=True)
class Goal:
    """A bound on a system's median: in relation to another one's, in milliseconds, or either.

    Attributes:
        operation: Of the row, as `ranks` and `size`.
        ranks: Number of ranks.
        size: In bytes.
        system: Whose median it is.
        relative_to: System.
        limit: The median should not be more than so many times that of `relative_to`,
        enough: or not more than so many milliseconds, where this is not 0.
        above: System whose median does not count in that of `system`, as nothing can be done without it; "" if all counts.
        plus: Milliseconds that may come on top of the limit.
    """

    operation: str
    ranks: int
    size: int
    system: str
    relative_to: str
    limit: float
    enough: float = 0.0
    above: str = ""
    plus: float = 0.0

    def line(self, row: Row, titles: Mapping[str, str]) -> str | None:
        """What became of it, for people; None if the row lacks a system.

        Args:
            row: The one that it is about.
            titles: Of the systems.
        """
        if not {self.system, self.relative_to, self.above or self.system} <= row.times.keys():
            return None
        floor = row.times[self.above].median if self.above else 0.0
        median, other = row.times[self.system].median - floor, row.times[self.relative_to].median
        ratio = median / other
        met = median <= self.limit * other + self.plus or median <= self.enough
        aims = [f"{self.limit:.2f}" + (f" + {self.plus} ms" if self.plus else "")] if self.limit else []
        aims += [f"{self.enough} ms"] if self.enough else []
        what = f"{titles[self.system]} / {titles[self.relative_to]}"
        if self.above:
            what = f"({titles[self.system]} - {titles[self.above]}) / {titles[self.relative_to]}"
        where = f"{self.operation}, {self.ranks} ranks, {size_text(self.size)}"
        aim = f"at most {' or '.join(aims)}"
        return f"{where:40}{what:24} {ratio:5.2f} ({median:.4f} ms)   {aim}: {'met' if met else 'missed'}"


def print_goals(goals: Sequence[Goal], rows: Sequence[Row], titles: Mapping[str, str]) -> None:
    """Prints what became of those goals that rows are about.

    Args:
        goals: In the order of the lines.
        rows: Of a whole run.
        titles: Of the systems.
    """
    by_place = {(row.operation, row.ranks, row.bytes): row for row in rows}
    lines = [
        goal.line(by_place[place], titles)
        for goal in goals
        if (place := (goal.operation, goal.ranks, goal.size)) in by_place
    ]
    if any(lines):
        print("\nGoals, for a machine of two cores")
        print("\n".join(line for line in lines if line))
