"""The output of a benchmark: a table with ratios, and JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interleaved import Times


@dataclass(frozen=True)
class Row:
    """One operation at one size.

    Attributes:
        operation: Name of the operation.
        ranks: Number of ranks.
        dtype: Dtype of the tensors.
        elements: Number of elements of a rank's larger buffer.
        bytes: Size of that buffer in bytes.
        bytes_moved: Bytes that all ranks together must at least read and write.
        iterations: Number of iterations, whose medians the row has.
        times: Times of each system.
    """

    operation: str
    ranks: int
    dtype: str
    elements: int
    bytes: int
    bytes_moved: int
    iterations: int
    times: dict[str, Times]

    def ratio(self, numerator: str, denominator: str) -> float | None:
        """Returns the ratio of two systems' medians, if the row has both."""
        if numerator not in self.times or denominator not in self.times:
            return None
        return self.times[numerator].median / self.times[denominator].median


def size_text(count: int) -> str:
    """Returns a number of bytes as text, such as "4 KiB"."""
    for power, unit in ((20, "MiB"), (10, "KiB")):
        if count >= 1 << power:
            return f"{count / (1 << power):g} {unit}"
    return f"{count} B"


def parse_size(text: str) -> int:
    """Returns the number of bytes of a command line's size: "4K", "64M" or a number."""
    units = {"K": 10, "M": 20, "G": 30}
    suffix = text[-1:].upper()
    count = int(text[:-1]) << units[suffix] if suffix in units else int(text)
    if count < 0:
        raise ValueError(f"a size must not be negative: {text}")
    return count


@dataclass(frozen=True)
class Table:
    """Formats rows as text.

    Attributes:
        systems: Heading of each system's column, by the names in `Row.times`.
        ratios: Numerator and denominator of each column of ratios.
    """

    systems: Mapping[str, str]
    ratios: Sequence[tuple[str, str]]

    def heading(self) -> str:
        """Returns the first line."""
        words = [f"{title:>{width}}" for title, width in self._columns()]
        return f"{'operation':21}{'size':>9}" + "".join(words)

    def line(self, row: Row) -> str:
        """Returns the line of a row, with a dash if a system does not have the operation."""
        label = row.operation if row.dtype == "float32" else f"{row.operation} {row.dtype}"
        size = size_text(row.bytes) if row.elements else ""
        medians = [row.times[system].median if system in row.times else None for system in self.systems]
        words = ["-" if median is None else f"{median:.4f}" for median in medians]
        words += ["-" if ratio is None else f"{ratio:.2f}" for ratio in (row.ratio(*r) for r in self.ratios)]
        columns = zip(words, self._columns(), strict=True)
        return f"{label:21}{size:>9}" + "".join(f"{word:>{width}}" for word, (_, width) in columns)

    def _columns(self) -> list[tuple[str, int]]:
        """Returns title and width of each column."""
        titles = [f"{self.systems[a]} / {self.systems[b]}" for a, b in self.ratios]
        columns = [(title, max(11, len(title) + 2)) for title in self.systems.values()]
        return columns + [(title, max(15, len(title) + 2)) for title in titles]


def write_json(path: Path, facts: Mapping[str, object], rows: Sequence[Row]) -> None:
    """Writes the facts about a run, and its rows."""
    content = {**facts, "rows": [dataclasses.asdict(row) for row in rows]}
    path.write_text(json.dumps(content, indent=2) + "\n")


def write_results(
    path: Path, facts: Mapping[str, object], failures: Sequence[str], **results: Sequence[Mapping[str, Any]]
) -> None:
    """Writes what a benchmark of several worlds has found so far: the facts about it, what failed, and its results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"facts": facts, "failures": failures, **results}, indent=1) + "\n")


def read_rows(path: Path) -> list[Row]:
    """Returns the rows that `write_json` wrote."""
    rows = json.loads(path.read_text())["rows"]
    return [Row(**row | {"times": {name: Times(**t) for name, t in row["times"].items()}}) for row in rows]


def print_steps(
    head: str, row: Row, titles: Mapping[str, str], column: str, share: Callable[[str], float | None]
) -> None:
    """Prints the times of training steps.

    Args:
        head: What was trained.
        row: The times.
        titles: Of the systems.
        column: The heading of the last column.
        share: What the last column has for a system; None for a dash.
    """
    print(f"\n{head}, {row.iterations} turns")
    print(f"{'':36}{'ms a step':>11}{'quartiles':>20}{'steps/s':>9}{column:>10}")
    for name, times in row.times.items():
        quartiles = f"{times.lower:.2f} - {times.upper:.2f}"
        ratio = share(name)
        shown = "-" if ratio is None else f"{ratio:.3f}"
        title = titles.get(name, name)
        print(
            f"{title:36}{times.median:>11.2f}{quartiles:>20}{1e3 / times.median:>9.1f}{shown:>10}", flush=True
        )


def print_shares(head: str, row: Row, titles: Mapping[str, str], names: Iterable[str], least: float) -> None:
    """Prints which systems reach so much of the speed of the system "none"."""
    shares = {name: share for name in names if (share := row.ratio("none", name)) is not None}
    if not shares:
        return
    print(f"\nGoal, {head}: at least {least:.1%} of the steps of {titles['none']!r}")
    for verdict, is_met in (("met", True), ("missed", False)):
        those = [f"{titles[name]} ({x:.1%})" for name, x in shares.items() if (x >= least) == is_met]
        if those:
            print(f"  {verdict}: {'; '.join(those)}")
