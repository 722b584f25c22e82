"""Static topologies by a short name, for command lines (``--topology ring``)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import SupportsIndex

from fogdist.lazy import nx
from fogdist.topology import graphs
from fogdist.topology.errors import TopologyError

_GRAPHS: dict[str, Callable[[SupportsIndex], nx.DiGraph]] = {
    "exp": graphs.ExponentialGraph,
    "exp2": graphs.ExponentialTwoGraph,
    "exp3": partial(graphs.ExponentialGraph, base=3),
    "exp4": partial(graphs.ExponentialGraph, base=4),
    "symexp": graphs.SymmetricExponentialGraph,
    "ring": graphs.RingGraph,
    "ring-left": partial(graphs.RingGraph, connect_style=1),
    "ring-right": partial(graphs.RingGraph, connect_style=2),
    "mesh": graphs.MeshGrid2DGraph,
    "torus": graphs.Torus2DGraph,
    "star": graphs.StarGraph,
    "full": graphs.FullyConnectedGraph,
}

TOPOLOGY_NAMES: tuple[str, ...] = tuple(_GRAPHS)
"""The names that `by_name` knows; fit for argparse's `choices`."""


def by_name(name: str, size: SupportsIndex) -> nx.DiGraph:
    """Returns the static topology of a short name.

    Args:
        name: One of `TOPOLOGY_NAMES`.
        size: Number of ranks, at least 1.

    Raises:
        TypeError: `name` is not a string, or `size` not an integer.
        TopologyError: No topology has this name, or `size` is below 1.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {name!r} of type {type(name).__name__}")
    if name not in _GRAPHS:
        raise TopologyError(f"name must be one of {', '.join(TOPOLOGY_NAMES)}, got {name!r}")
    return _GRAPHS[name](size)
