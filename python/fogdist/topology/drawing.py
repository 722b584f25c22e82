"""A picture of a topology: its graphs, and how fast ranks agree. Needs matplotlib."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, SupportsIndex

import numpy as np

from fogdist.topology.topology import Topology
from fogdist.topology.validation import check_int

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_GRAPHS = 8
_GRAPHS_A_ROW = 4
_MOST_ROUNDS = 200
_MOST_LABELS = 32

# Distances below this are rounding errors of an exact average, and are drawn at the bottom.
_FLOOR = 1e-16


def plot(
    topology: Topology, path: str | os.PathLike[str] | None = None, *, rounds: SupportsIndex | None = None
) -> Figure:
    """Draws the graph of each round of a topology, up to 8, and the decay of the consensus distance.

    Args:
        topology: The topology to draw.
        path: File to write, in the format that its ending names; None to write none.
        rounds: How many rounds of the decay to show; by default until it is below 1e-6, from 4 to 200.

    Returns:
        The matplotlib figure.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError: `topology` is not a Topology, or `rounds` not an integer.
        TopologyError: `rounds` is below 1.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("fogdist.topology.plot needs matplotlib: pip install matplotlib") from error
    if not isinstance(topology, Topology):
        raise TypeError(f"topology must be a fogdist.topology.Topology, got {type(topology).__name__}")
    if rounds is None:
        needed = topology.rounds_to(1e-6, _MOST_ROUNDS)
        rounds = _MOST_ROUNDS if needed is None else min(max(needed + 1, 4), _MOST_ROUNDS)
    rounds = check_int(rounds, "rounds", minimum=1)

    graphs = min(topology.period or _MOST_GRAPHS, _MOST_GRAPHS)
    across = min(graphs, _GRAPHS_A_ROW)
    rows = math.ceil(graphs / across)
    figure = Figure(figsize=(max(3.0 * across, 6.0), 3.2 * rows + 3.4), layout="constrained")
    grid = figure.add_gridspec(rows + 1, across, height_ratios=[3.2] * rows + [3.4])
    period = "endless" if topology.period is None else f"period {topology.period}"
    degree = topology.max_degree
    peers = f"{degree} peer{'s' * (degree != 1)}"
    figure.suptitle(f"{topology.name}: {topology.size} ranks, {period}, sends to {peers} at most")
    for t in range(graphs):
        axes = figure.add_subplot(grid[t // across, t % across])
        axes.set_title(f"round {t}" if topology.period != 1 else "every round", fontsize=10)
        _draw_graph(axes, topology.matrix(t))
    _draw_decay(figure.add_subplot(grid[rows, :]), topology, rounds)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def _draw_graph(axes: Axes, W: np.ndarray) -> None:
    """Ranks on a circle, clockwise from the top; a line for a pair that exchanges, an arrow for one way."""
    size = len(W)
    angles = np.pi / 2 - 2 * np.pi * np.arange(size) / size
    places = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    # The area in points squared, small enough that ranks on the circle do not overlap.
    area = min(260.0, (330.0 / size) ** 2)
    for i, j in np.argwhere(W):
        if i == j or (W[j, i] and i > j):
            continue
        # Shorter lines are bent more towards the middle, so that they do not cross the ranks in between.
        clockwise = (j - i) % size / size
        bend = 0.3 * (1 - 2 * clockwise)
        axes.annotate(
            "",
            places[j],
            places[i],
            arrowprops={
                "arrowstyle": "-" if W[j, i] else "-|>",
                "color": "tab:blue",
                "alpha": 0.8,
                "connectionstyle": f"arc3,rad={bend}",
                "shrinkA": math.sqrt(area) / 2,
                "shrinkB": math.sqrt(area) / 2,
            },
        )
    axes.scatter(places[:, 0], places[:, 1], s=area, color="white", edgecolors="black", zorder=3)
    if size <= _MOST_LABELS:
        for rank, (x, y) in enumerate(places):
            axes.text(x, y, str(rank), ha="center", va="center", fontsize=9 if size <= 20 else 6, zorder=4)
    axes.set(xlim=(-1.25, 1.25), ylim=(-1.25, 1.25), aspect="equal")
    axes.axis("off")


def _draw_decay(axes: Axes, topology: Topology, rounds: int) -> None:
    from matplotlib.ticker import MaxNLocator

    distance = np.maximum(topology.consensus_distance(rounds), _FLOOR)
    axes.semilogy(distance, marker="o" if rounds <= 40 else "", markersize=4)
    exact = topology.rounds_to_exact_consensus
    if exact is not None and exact <= rounds:
        axes.axvline(exact, color="tab:green", linestyle="--")
        axes.set_title(
            f"exact average after {exact} round{'s' * (exact != 1)}", color="tab:green", fontsize=10
        )
    axes.set(
        xlabel="rounds",
        ylabel="consensus distance\n(relative to the start)",
        ylim=(min(float(distance[-1]) / 5, 1e-3), 3.0),
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
