"""The output of a benchmark: a table with ratios, JSON, a plot."""

from __future__ import annotations

import dataclasses
import json
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


def plot(path: Path, rows: Sequence[Row], systems: Mapping[str, str]) -> None:
    """Draws time over size, with one panel per operation, three in a line, and new lines for each number of ranks.

    Args:
        path: Path of the picture; its ending selects the format.
        rows: Rows to draw; rows without a size are left out.
        systems: As in `Table`.
    """
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    shown = [row for row in rows if row.elements and row.dtype == "float32"]
    if not shown:
        return
    # The lines of panels: each number of ranks begins a new line.
    lines: list[list[tuple[int, str]]] = []
    for ranks in sorted({row.ranks for row in shown}):
        operations = list(dict.fromkeys(row.operation for row in shown if row.ranks == ranks))
        lines += [[(ranks, name) for name in operations[i : i + 3]] for i in range(0, len(operations), 3)]
    columns = max(len(line) for line in lines)
    figure, panels = plt.subplots(
        len(lines),
        columns,
        figsize=(4.6 * columns, 3.2 * len(lines)),
        squeeze=False,
        layout="constrained",
    )
    for panel in panels.flat:
        panel.set_visible(False)
    legend = {}
    drawings = (
        (panel, key)
        for places, line in zip(panels, lines, strict=True)
        for panel, key in zip(places, line, strict=False)  # the last places of a line may be empty
    )
    for place, (ranks, operation) in drawings:
        place.set_visible(True)
        place.set_title(f"{operation}, {ranks} ranks")
        series = sorted(
            (row for row in shown if row.ranks == ranks and row.operation == operation), key=lambda r: r.bytes
        )
        for number, (system, title) in enumerate(systems.items()):
            drawn = [row for row in series if system in row.times]
            if not drawn:
                continue
            x = [row.bytes for row in drawn]
            times = [row.times[system] for row in drawn]
            color = f"C{number}"
            (legend[title],) = place.loglog(x, [t.median for t in times], marker=".", color=color)
            place.fill_between(x, [t.lower for t in times], [t.upper for t in times], color=color, alpha=0.2)
        ticks = [row.bytes for row in series]
        place.set_xticks(ticks, [size_text(tick) for tick in ticks], rotation=45, fontsize="x-small")
        place.minorticks_off()
        place.set_ylabel("ms")
        place.grid(alpha=0.3)
    titles = [title for title in systems.values() if title in legend]
    figure.legend([legend[title] for title in titles], titles, loc="outside upper center", ncols=5)
    figure.savefig(path, dpi=120)
