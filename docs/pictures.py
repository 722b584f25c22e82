"""Draws the pictures of the documentation into docs/pictures, with fogdist.topology.plot.

Run it after a change of the drawing or of a topology: python docs/pictures.py
"""

from __future__ import annotations

import os
from pathlib import Path

# The same files in every run, so that git shows real changes only.
os.environ["SOURCE_DATE_EPOCH"] = "0"

import matplotlib as mpl
from fogdist import topology
from fogdist.topology import Topology
from matplotlib.figure import Figure

FOLDER = Path(__file__).resolve().parent / "pictures"
RANKS = 16
ROUNDS = 40


def compare(path: Path) -> None:
    """Draws how fast the ranks agree on several topologies of 16 ranks."""
    topologies = [
        Topology.from_graph("ring", topology.ring(RANKS)),
        Topology.from_graph("mesh", topology.mesh(RANKS)),
        Topology.from_graph("exp2 (static)", topology.exponential(RANKS)),
        topology.random_matching(RANKS),
        topology.one_peer_exponential(RANKS),
    ]
    figure = Figure(figsize=(8.0, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for one in topologies:
        distance = one.consensus_distance(ROUNDS).clip(min=1e-16)
        tensors = one.bytes_per_step(1)
        label = f"{one.name}: {tensors:.3g} tensor{'s' * (tensors != 1)} a round"
        axes.semilogy(distance, marker="o", markersize=3, label=label)
    axes.set(
        xlabel="rounds",
        ylabel="consensus distance\n(relative to the start)",
        ylim=(1e-8, 3),
        xlim=(0, ROUNDS),
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def main() -> None:
    mpl.rcParams["svg.hashsalt"] = "fog"
    FOLDER.mkdir(exist_ok=True)
    topology.plot(Topology.from_graph("exp2", topology.exponential(8)), FOLDER / "exp2.svg")
    topology.plot(topology.one_peer_exponential(8), FOLDER / "one_peer_exponential.svg")
    compare(FOLDER / "comparison.svg")


if __name__ == "__main__":
    main()
