"""`bluefog.common.topology_util`: `fogdist.topology`, by all names that its functions had."""

from __future__ import annotations

from typing import Any

import networkx as nx

import fogdist
from fogdist import legacy, topology

InferDestinationFromSourceRanks = fogdist.InferDestinationFromSourceRanks
InferSourceFromDestinationRanks = fogdist.InferSourceFromDestinationRanks

__all__ = [  # noqa: PLE0604  strings, all of them
    "InferDestinationFromSourceRanks",
    "InferSourceFromDestinationRanks",
    "isPowerOf",
    *topology.__all__,
]


def RingGraph(size: int, connect_style: int = 0, *, left_connect: bool | None = None) -> nx.DiGraph:
    """As `fogdist.topology.RingGraph`; with `left_connect`, by position too, the ring of BlueFog 0.1 in one direction."""
    if isinstance(connect_style, bool):
        left_connect = connect_style
    return topology.RingGraph(size, connect_style if left_connect is None else 1 if left_connect else 2)


def isPowerOf(x: int, base: int) -> bool:
    """Returns whether `x` is a power of an integer `base` of at least 2."""
    while x > 1 and x % base == 0:
        x //= base
    return x == 1


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(topology, name)
    return legacy.find(name, "bluefog.common.topology_util", vars(topology))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
