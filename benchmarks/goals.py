"""Goals of a benchmark, compared with its measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from report import Row, size_text


@dataclass(frozen=True)
class Goal:
    """A bound on a system's median: relative to another system's, in milliseconds, or either.

    Attributes:
        operation: Operation of the row.
        ranks: Number of ranks.
        size: Size in bytes.
        system: The system to which the bound applies.
        relative_to: The system to which it is compared.
        limit: The median may be at most this many times that of `relative_to`,
        enough: or at most this many milliseconds, if this is not 0.
        above: System whose median is subtracted from that of `system`, because it cannot be avoided; "" for none.
        plus: Milliseconds that are added to the limit.
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
        """Returns the outcome as text; None if the row lacks a system.

        Args:
            row: The row to which the goal applies.
            titles: Titles of the systems.
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
    """Prints the outcome of the goals for which there are rows.

    Args:
        goals: In the order of the printed lines.
        rows: Rows of a whole run.
        titles: Titles of the systems.
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
