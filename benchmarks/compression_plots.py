"""Draws loss over bytes, and time to a loss over the speed of links: of the results of benchmarks/compression.py."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Of ways, in the order in which they stand in the results: readable side by side, also for the color-blind.
COLORS = ("black", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def draw(path: Path, results: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Draws a panel for each task, and one for the links, if there are such results.

    Args:
        path: Of the picture; its ending selects the format.
        results: Of the file: "points", "links" and "crossings".
    """
    from matplotlib.figure import Figure

    points, links = results.get("points", []), results.get("links", [])
    tasks = list(dict.fromkeys(p["task"] for p in points))
    ways = list(dict.fromkeys(row["way"] for row in [*points, *links]))
    looks = {
        way: {"color": COLORS[place % len(COLORS)], "marker": MARKERS[place % len(MARKERS)], "markersize": 4}
        for place, way in enumerate(ways)
    }
    count = max(1, len(tasks) + bool(links))
    columns = min(2, count)
    lines = -(-count // columns)
    figure = Figure(figsize=(5.6 * columns, 4.4 * lines + 0.4), layout="constrained")
    panels = list(figure.subplots(lines, columns, squeeze=False).flat)
    for panel in panels[count:]:
        panel.set_visible(False)
    panels = panels[:count]
    for panel, task in zip(panels, tasks, strict=False):
        ends = []
        for way in ways:
            runs = [p for p in points if (p["task"], p["way"]) == (task, way)]
            if runs:
                losses = [statistics.fmean(each) for each in zip(*(p["losses"] for p in runs), strict=False)]
                much = [
                    statistics.fmean(each) / 1e6 for each in zip(*(p["bytes"] for p in runs), strict=False)
                ]
                panel.plot(much, losses, linewidth=1.3, label=way, **looks[way])
                ends.append(losses[-1])
        panel.set_xscale("log")
        # The start would hide how the ways differ in the end.
        panel.set_ylim(0.95 * min(ends), 1.6 * min(ends))
        panel.set(title=task, xlabel="MB that a host has sent", ylabel="test loss of the mean model")
    if links:
        panel = panels[-1]
        for way in ways[1:]:
            for slowness, style in ((1, "-"), (10, "--"), (100, "-.")):
                rows = sorted(
                    (r for r in links if (r["way"], r["slowness"]) == (way, slowness)),
                    key=lambda r: float(r["bits_per_s"]),
                )
                known = [r for r in rows if r["of no codec"] is not None]
                panel.plot(
                    [r["bits_per_s"] / 1e9 for r in known],
                    [r["of no codec"] for r in known],
                    linestyle=style,
                    linewidth=1.3,
                    **looks[way],
                )
        panel.axhline(1.0, color="black", linewidth=1.0)
        for each in results.get("crossings", []):
            if each["where"] == "at":
                panel.axvline(
                    each["bits_per_s"] / 1e9, linestyle=":", linewidth=1.2, color=looks[each["way"]]["color"]
                )
        panel.set_xscale("log")
        speeds = sorted({r["bits_per_s"] / 1e9 for r in links})
        panel.set_xticks(speeds, [f"{speed:g}" for speed in speeds])
        panel.minorticks_off()
        panel.set_ylim(0, None)
        panel.set(
            title=f"{links[0]['task']} (dashed: dilated; dotted: saves 5 %)",
            xlabel="Gbit/s of a host's link",
            ylabel="time to the loss, over that without a codec",
        )
    for panel in panels:
        panel.grid(alpha=0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(2, max(1, len(labels))), frameon=False
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
