"""The output of a benchmark: a table with ratios, and JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
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
        bytes: Size of a rank's larger buffer.
        iterations: Number of iterations, whose medians the row has.
        times: Times of each system.
    """

    operation: str
    ranks: int
    bytes: int
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
        size = size_text(row.bytes) if row.bytes else ""
        medians = [row.times[system].median if system in row.times else None for system in self.systems]
        words = ["-" if median is None else f"{median:.4f}" for median in medians]
        words += ["-" if ratio is None else f"{ratio:.2f}" for ratio in (row.ratio(*r) for r in self.ratios)]
        columns = zip(words, self._columns(), strict=True)
        return f"{row.operation:21}{size:>9}" + "".join(f"{word:>{width}}" for word, (_, width) in columns)

    def _columns(self) -> list[tuple[str, int]]:
        """Returns title and width of each column."""
        titles = [f"{self.systems[a]} / {self.systems[b]}" for a, b in self.ratios]
        columns = [(title, max(11, len(title) + 2)) for title in self.systems.values()]
        return columns + [(title, max(15, len(title) + 2)) for title in titles]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Returns the median and the quartiles of some values."""
    lower, _, upper = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return {"median": statistics.median(values), "lower": lower, "upper": upper}


def write(path: Path, **content: Any) -> None:
    """Writes results, a row of a list a line; a run that is ended meanwhile leaves the file before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = ",\n".join(
        f'"{key}": {json.dumps(value)}' if not isinstance(value, list)
        else f'"{key}": [\n' + ",\n".join(map(json.dumps, value)) + "\n]"
        for key, value in content.items()
    )  # fmt: skip
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text("{\n" + parts + "\n}\n")
    unfinished.replace(path)
