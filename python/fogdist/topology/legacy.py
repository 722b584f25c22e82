"""Names of BlueFog 0.1 and 0.2 for what is in `fogdist.topology`.

PowerTwoRingGraph, PowerGraph, GetWeights and GetDynamicSendRecvRanks were only renamed. BiRingGraph was a
function of its own before `RingGraph` became bidirectional by default.
"""

from __future__ import annotations

from typing import SupportsIndex

import networkx as nx

from fogdist.topology.dynamic import GetDynamicOnePeerSendRecvRanks as GetDynamicSendRecvRanks
from fogdist.topology.graphs import ExponentialGraph as PowerGraph
from fogdist.topology.graphs import ExponentialTwoGraph as PowerTwoRingGraph
from fogdist.topology.graphs import RingGraph
from fogdist.topology.weights import GetRecvWeights as GetWeights

__all__ = ["BiRingGraph", "GetDynamicSendRecvRanks", "GetWeights", "PowerGraph", "PowerTwoRingGraph"]


def BiRingGraph(size: SupportsIndex) -> nx.DiGraph:
    """Returns the bidirectional ring: `RingGraph(size)`."""
    return RingGraph(size)
