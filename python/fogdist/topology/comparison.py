"""A table that compares topologies on the same number of ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import SupportsIndex

from fogdist.topology.errors import TopologyError
from fogdist.topology.registry import named
from fogdist.topology.topology import Topology
from fogdist.topology.validation import check_int

_COMPARED = (
    *("ring", "ring-right", "mesh", "star", "symexp", "exp2", "full"),
    *("one-peer-exp2", "base-2", "base-3", "random-matching"),
)
# The consensus distance, relative to the start, to which rounds are counted, and the most that are.
TOLERANCE, MOST_ROUNDS = 1e-6, 1000


def summary(size: SupportsIndex, topologies: Iterable[Topology] | None = None) -> str:
    """Returns a table that compares topologies, as text; docs/topologies.md explains its columns.

    Args:
        size: Number of ranks, at least 1.
        topologies: The topologies to compare, all of `size` ranks. By default those that `named` knows.

    Raises:
        TypeError: `size` is not an integer.
        TopologyError: `size` is below 1, or a topology has another size.
    """
    size = check_int(size, "size", minimum=1)
    goal = f"{TOLERANCE:.0e}".replace("e-0", "e-")
    lines = [
        (
            f"{size} ranks", "period", "degree", "tensors sent a step", "spectral gap",
            "rounds to exact", f"rounds to {goal}", f"tensors to {goal}",
        )
    ]  # fmt: skip
    for topology in [named(name, size) for name in _COMPARED] if topologies is None else topologies:
        if topology.size != size:
            raise TopologyError(f"topologies must have size = {size}, got {topology}")
        exact, near = topology.rounds_to_exact_consensus, topology.rounds_to(TOLERANCE, MOST_ROUNDS)
        sent = sum(topology.bytes_per_step(1.0, t) for t in range(near or 0))
        lines.append(
            (
                topology.name,
                str(topology.period),
                str(topology.max_degree),
                f"{topology.bytes_per_step(1.0):.2f}",
                f"{topology.spectral_gap:.4f}",
                "-" if exact is None else str(exact),
                f"> {MOST_ROUNDS}" if near is None else str(near),
                "-" if near is None else f"{sent:.1f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines
    )
