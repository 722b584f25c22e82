"""Decentralized training for PyTorch: averaging with neighbors on the process group backend "fog".

`fogdist.topology` defines the neighbors of each rank; the other public names are here. `fogdist.legacy` has the names
of older BlueFog versions.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fogdist import algorithms, checkpoint, compression, legacy
from fogdist import ops as _ops  # noqa: F401  registers torch.ops.fog
from fogdist.collectives import (
    allgather,
    allgather_nonblocking,
    allreduce,
    allreduce_,
    allreduce_nonblocking,
    allreduce_nonblocking_,
    barrier,
    broadcast,
    broadcast_,
    broadcast_nonblocking,
    broadcast_nonblocking_,
    poll,
    synchronize,
    wait,
)
from fogdist.consensus import consensus_distance
from fogdist.context import (
    in_neighbor_ranks,
    init,
    is_initialized,
    is_topo_weighted,
    load_topology,
    out_neighbor_ranks,
    rank,
    set_topology,
    shutdown,
    size,
)
from fogdist.ddp import DecentralizedDataParallel
from fogdist.decentralized_optimizer import DecentralizedOptimizer
from fogdist.deprecated_optimizers import (
    DistributedAllreduceOptimizer,
    DistributedHierarchicalNeighborAllreduceOptimizer,
    DistributedNeighborAllreduceOptimizer,
)
from fogdist.elastic import membership
from fogdist.elastic.membership import reconfigure
from fogdist.hierarchical import (
    hierarchical_neighbor_allreduce,
    hierarchical_neighbor_allreduce_,
    hierarchical_neighbor_allreduce_nonblocking,
    hierarchical_neighbor_allreduce_nonblocking_,
)
from fogdist.hook import Gossip, GossipState, gossip_hook
from fogdist.inference import InferDestinationFromSourceRanks, InferSourceFromDestinationRanks
from fogdist.machines import (
    in_neighbor_machine_ranks,
    is_homogeneous,
    is_machine_topo_weighted,
    load_machine_topology,
    local_rank,
    local_size,
    machine_rank,
    machine_size,
    out_neighbor_machine_ranks,
    set_machine_topology,
    transport,
)
from fogdist.memory import empty, share_
from fogdist.neighbor_collectives import (
    neighbor_allgather,
    neighbor_allgather_nonblocking,
    neighbor_allreduce,
    neighbor_allreduce_,
    neighbor_allreduce_nonblocking,
    neighbor_allreduce_nonblocking_,
    pair_gossip,
    pair_gossip_nonblocking,
)
from fogdist.observe import flight_record, metrics, timeline
from fogdist.observe.detection import suspend_detection
from fogdist.observe.timeline import timeline_context, timeline_end_activity, timeline_start_activity
from fogdist.optimizers import (
    CommunicationType,
    DistributedAdaptThenCombineOptimizer,
    DistributedAdaptWithCombineOptimizer,
    DistributedGradientAllreduceOptimizer,
    DistributedPullGetOptimizer,
    DistributedPushSumOptimizer,
    DistributedWinPutOptimizer,
)
from fogdist.parameters import allreduce_parameters, broadcast_optimizer_state, broadcast_parameters
from fogdist.topology import (
    ExponentialGraph,
    ExponentialTwoGraph,
    FullyConnectedGraph,
    GetDynamicOnePeerSendRecvRanks,
    GetExp2DynamicSendRecvMachineRanks,
    GetInnerOuterExpo2DynamicSendRecvRanks,
    GetInnerOuterRingDynamicSendRecvRanks,
    GetRecvWeights,
    GetSendWeights,
    IsRegularGraph,
    IsTopologyEquivalent,
    MeshGrid2DGraph,
    RingGraph,
    StarGraph,
    SymmetricExponentialGraph,
)
from fogdist.windows import (
    Window,
    get_current_created_window_names,
    get_win_version,
    neighbor_win_accumulate,
    neighbor_win_accumulate_nonblocking,
    neighbor_win_get,
    neighbor_win_get_nonblocking,
    neighbor_win_put,
    neighbor_win_put_nonblocking,
    turn_off_win_ops_with_associated_p,
    turn_on_win_ops_with_associated_p,
    win_accumulate,
    win_accumulate_nonblocking,
    win_associated_p,
    win_create,
    win_free,
    win_get,
    win_get_nonblocking,
    win_lock,
    win_mutex,
    win_poll,
    win_put,
    win_put_nonblocking,
    win_update,
    win_update_then_collect,
    win_wait,
)

try:
    from fog_pg._build_info import VERSION as __version__
except ImportError:  # the extension is not built; fogdist.init() raises the error
    __version__ = "0+not.built"

__all__ = [
    "CommunicationType",
    "DecentralizedDataParallel",
    "DecentralizedOptimizer",
    "DistributedAdaptThenCombineOptimizer",
    "DistributedAdaptWithCombineOptimizer",
    "DistributedAllreduceOptimizer",
    "DistributedGradientAllreduceOptimizer",
    "DistributedHierarchicalNeighborAllreduceOptimizer",
    "DistributedNeighborAllreduceOptimizer",
    "DistributedPullGetOptimizer",
    "DistributedPushSumOptimizer",
    "DistributedWinPutOptimizer",
    "ExponentialGraph",
    "ExponentialTwoGraph",
    "FullyConnectedGraph",
    "GetDynamicOnePeerSendRecvRanks",
    "GetExp2DynamicSendRecvMachineRanks",
    "GetInnerOuterExpo2DynamicSendRecvRanks",
    "GetInnerOuterRingDynamicSendRecvRanks",
    "GetRecvWeights",
    "GetSendWeights",
    "Gossip",
    "GossipState",
    "InferDestinationFromSourceRanks",
    "InferSourceFromDestinationRanks",
    "IsRegularGraph",
    "IsTopologyEquivalent",
    "MeshGrid2DGraph",
    "RingGraph",
    "StarGraph",
    "SymmetricExponentialGraph",
    "Window",
    "algorithms",
    "allgather",
    "allgather_nonblocking",
    "allreduce",
    "allreduce_",
    "allreduce_nonblocking",
    "allreduce_nonblocking_",
    "allreduce_parameters",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_nonblocking",
    "broadcast_nonblocking_",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "checkpoint",
    "compression",
    "consensus_distance",
    "empty",
    "flight_record",
    "get_current_created_window_names",
    "get_win_version",
    "gossip_hook",
    "hierarchical_neighbor_allreduce",
    "hierarchical_neighbor_allreduce_",
    "hierarchical_neighbor_allreduce_nonblocking",
    "hierarchical_neighbor_allreduce_nonblocking_",
    "in_neighbor_machine_ranks",
    "in_neighbor_ranks",
    "init",
    "is_homogeneous",
    "is_initialized",
    "is_machine_topo_weighted",
    "is_topo_weighted",
    "load_machine_topology",
    "load_topology",
    "local_rank",
    "local_size",
    "machine_rank",
    "machine_size",
    "membership",
    "metrics",
    "neighbor_allgather",
    "neighbor_allgather_nonblocking",
    "neighbor_allreduce",
    "neighbor_allreduce_",
    "neighbor_allreduce_nonblocking",
    "neighbor_allreduce_nonblocking_",
    "neighbor_win_accumulate",
    "neighbor_win_accumulate_nonblocking",
    "neighbor_win_get",
    "neighbor_win_get_nonblocking",
    "neighbor_win_put",
    "neighbor_win_put_nonblocking",
    "out_neighbor_machine_ranks",
    "out_neighbor_ranks",
    "pair_gossip",
    "pair_gossip_nonblocking",
    "poll",
    "rank",
    "reconfigure",
    "set_machine_topology",
    "set_topology",
    "share_",
    "shutdown",
    "simulate",
    "size",
    "suspend_detection",
    "synchronize",
    "timeline",
    "timeline_context",
    "timeline_end_activity",
    "timeline_start_activity",
    "transport",
    "turn_off_win_ops_with_associated_p",
    "turn_on_win_ops_with_associated_p",
    "wait",
    "win_accumulate",
    "win_accumulate_nonblocking",
    "win_associated_p",
    "win_create",
    "win_free",
    "win_get",
    "win_get_nonblocking",
    "win_lock",
    "win_mutex",
    "win_poll",
    "win_put",
    "win_put_nonblocking",
    "win_update",
    "win_update_then_collect",
    "win_wait",
]

if TYPE_CHECKING:
    from fogdist import simulate
else:  # a type checker is to find misspelt names

    def __getattr__(name: str) -> Any:
        if name == "simulate":  # most scripts do not use it
            return importlib.import_module("fogdist.simulate")
        return legacy.find(name, __name__, globals())

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
