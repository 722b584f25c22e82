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


def plot(path: Path, rows: Sequence[Row], systems: Mapping[str, str], over: str = "bytes") -> None:
    """Draws the times of each operation, a panel for each: lines over its sizes, or bars where it has one size only.

    Args:
        path: Path of the picture; its ending selects the format.
        rows: Rows to draw; lines over sizes leave rows without a size out.
        systems: As in `Table`.
        over: What lines are over: "bytes", with new panels for each number of ranks, or "ranks", with new ones for sizes.
    """
    from matplotlib.figure import Figure

    panels: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: getattr(row, over)):
        kind = "" if row.dtype == "float32" else f" {row.dtype}"
        size = f" {size_text(row.bytes)}" if row.bytes else ""
        place = f", {row.ranks} ranks" if over == "bytes" else size
        panels.setdefault(f"{row.operation}{kind}{place}", []).append(row)
    if not panels:
        return
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(5 * columns, 3.4 * lines), layout="constrained")
    for number, (title, shown) in enumerate(panels.items(), 1):
        panel = figure.add_subplot(lines, columns, number)
        panel.set_title(title, fontsize="medium")
        panel.grid(alpha=0.3)
        if len(shown) == 1:
            times = {systems.get(name, name): shown[0].times[name] for name in reversed(shown[0].times)}
            errors = [[t.median - t.lower, t.upper - t.median] for t in times.values()]
            medians = [t.median for t in times.values()]
            panel.barh(list(times), medians, xerr=list(zip(*errors, strict=True)), ecolor="0.3")
            continue
        for color, (system, label) in enumerate(systems.items()):
            drawn = [row for row in shown if system in row.times and getattr(row, over)]
            if drawn:
                x = [getattr(row, over) for row in drawn]
                times_of = [row.times[system] for row in drawn]
                panel.loglog(x, [t.median for t in times_of], marker=".", color=f"C{color}", label=label)
                bounds = [t.lower for t in times_of], [t.upper for t in times_of]
                panel.fill_between(x, *bounds, color=f"C{color}", alpha=0.2)
        panel.legend(fontsize="x-small")
    figure.savefig(path, dpi=120)
