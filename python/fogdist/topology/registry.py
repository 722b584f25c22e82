"""Topologies by a short name, as for command lines (``--topology ring``), and a table that compares them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import SupportsIndex

from fogdist.lazy import nx
from fogdist.topology import graphs, sequences
from fogdist.topology.base_graph import base_graph
from fogdist.topology.topology import Topology
from fogdist.topology.validation import TopologyError, check_int

_GRAPHS: dict[str, Callable[[SupportsIndex], nx.DiGraph]] = {
    "ring": graphs.ring,
    "ring-right": partial(graphs.ring, connect_style=2),
    "mesh": graphs.mesh,
    "star": graphs.star,
    "symexp": graphs.symmetric_exponential,
    "exp2": graphs.exponential,
    "full": graphs.fully_connected,
}
_SEQUENCES: dict[str, Callable[[SupportsIndex], Topology]] = {
    "one-peer-exp2": sequences.one_peer_exponential,
    "base-2": base_graph,
    "base-3": partial(base_graph, degree=2),
    "random-matching": sequences.random_matching,
}

TOPOLOGY_NAMES: tuple[str, ...] = tuple(_GRAPHS)
"""The names that `by_name` knows; fit for argparse's `choices`."""

# The consensus distance, relative to the start, to which rounds are counted, and the most that are.
TOLERANCE, MOST_ROUNDS = 1e-6, 1000


def named(name: str, size: SupportsIndex) -> Topology:
    """Returns a static topology or a sequence of rounds by its short name, as `fog topology` lists them.

    Args:
        name: One of `TOPOLOGY_NAMES`, "one-peer-exp2", "base-2", "base-3" or "random-matching".
        size: Number of ranks, at least 1.

    Raises:
        TypeError: `name` is not a string, or `size` not an integer.
        TopologyError: No topology has this name, or it does not exist for this number of ranks.
    """
    if isinstance(name, str) and name in _SEQUENCES:
        return _SEQUENCES[name](size)
    return Topology.from_graph(name, _graph(name, size, (*_GRAPHS, *_SEQUENCES)))


def by_name(name: str, size: SupportsIndex) -> nx.DiGraph:
    """Returns the static topology of a short name.

    Args:
        name: One of `TOPOLOGY_NAMES`.
        size: Number of ranks, at least 1.

    Raises:
        TypeError: `name` is not a string, or `size` not an integer.
        TopologyError: No topology has this name, or `size` is below 1.
    """
    return _graph(name, size, TOPOLOGY_NAMES)


def _graph(name: str, size: SupportsIndex, names: tuple[str, ...]) -> nx.DiGraph:
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {name!r} of type {type(name).__name__}")
    if name not in _GRAPHS:
        raise TopologyError(f"topology name must be one of {', '.join(names)}, got {name!r}")
    return _GRAPHS[name](size)


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
    for topology in (
        [named(name, size) for name in (*_GRAPHS, *_SEQUENCES)] if topologies is None else topologies
    ):
        if topology.size != size:
            raise TopologyError(f"topologies must have size = {size}, got {topology}")
        exact, near = topology.rounds_to_exact_consensus, topology.rounds_to(TOLERANCE, MOST_ROUNDS)
        degrees = [topology.degrees(t) for t in range(topology.period)]
        sent = sum(float(degrees[t % topology.period].mean()) for t in range(near or 0))
        lines.append(
            (
                topology.name,
                str(topology.period),
                str(max(int(each.max()) for each in degrees)),
                f"{sum(float(each.mean()) for each in degrees) / topology.period:.2f}",
                f"{topology.spectral_gap:.4f}",
                "-" if exact is None else str(exact),
                f"> {MOST_ROUNDS}" if near is None else str(near),
                "-" if near is None else f"{sent:.1f}",
            )
        )
    from fog_cli import table  # not needed by a training

    return "\n".join(table(lines))
