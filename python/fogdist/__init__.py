"""Decentralized training for PyTorch: averaging with neighbors on the process group backend "fog".

`fogdist.topology` defines the neighbors of each rank. `import fogdist.bluefog.torch as bf` has the names and call forms of
BlueFog, which are not here.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fogdist import algorithms, checkpoint, compression, topology
from fogdist import ops as _ops  # noqa: F401  registers torch.ops.fog
from fogdist.consensus import consensus_distance
from fogdist.context import (
    in_neighbor_ranks,
    init,
    is_initialized,
    load_topology,
    out_neighbor_ranks,
    rank,
    set_topology,
    shutdown,
    size,
)
from fogdist.ddp import DecentralizedDataParallel
from fogdist.decentralized_optimizer import DecentralizedOptimizer
from fogdist.elastic import membership
from fogdist.elastic.membership import reconfigure
from fogdist.hook import GossipState, gossip_hook
from fogdist.machines import (
    in_neighbor_machine_ranks,
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
from fogdist.observe import flight_record, metrics, timeline
from fogdist.observe.detection import suspend_detection
from fogdist.operations import (
    hierarchical_neighbor_allreduce,
    neighbor_allgather,
    neighbor_allreduce,
    pair_gossip,
)
from fogdist.parameters import allreduce_parameters, broadcast_optimizer_state, broadcast_parameters
from fogdist.removed import missing as _missing
from fogdist.training.shared_batches import SharedBatches
from fogdist.tuning.tuner import Tune
from fogdist.windows import Window

try:
    from fog_pg._build_info import VERSION as __version__
except ImportError:  # the extension is not built; fogdist.init() raises the error
    __version__ = "0+not.built"

__all__ = [
    "DecentralizedDataParallel",
    "DecentralizedOptimizer",
    "GossipState",
    "SharedBatches",
    "Tune",
    "Window",
    "algorithms",
    "allreduce_parameters",
    "bluefog",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "checkpoint",
    "compression",
    "consensus_distance",
    "empty",
    "flight_record",
    "gossip_hook",
    "hierarchical_neighbor_allreduce",
    "in_neighbor_machine_ranks",
    "in_neighbor_ranks",
    "init",
    "is_initialized",
    "load_machine_topology",
    "load_topology",
    "local_rank",
    "local_size",
    "machine_rank",
    "machine_size",
    "membership",
    "metrics",
    "neighbor_allgather",
    "neighbor_allreduce",
    "out_neighbor_machine_ranks",
    "out_neighbor_ranks",
    "pair_gossip",
    "rank",
    "reconfigure",
    "set_machine_topology",
    "set_topology",
    "share_",
    "shutdown",
    "size",
    "suspend_detection",
    "timeline",
    "topology",
    "transport",
]

if TYPE_CHECKING:
    bluefog: ModuleType  # which imports this module
else:  # a type checker is to find misspelt names

    def __getattr__(name: str) -> Any:
        if name == "bluefog":  # most scripts do not use it
            return importlib.import_module("fogdist.bluefog")
        raise _missing(__name__, name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
