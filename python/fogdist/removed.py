"""What to write in place of public names that fogdist no longer has."""

from __future__ import annotations

_CODECS = "Int8 sends about as many bytes, and TopK sends fewer"
_FEW_BITS = "Int8 loses less, and TopK with bits=2 sends fewer bytes"
_REPLICAS = "ChocoSGD takes the same codecs"
_DIFFERENT_DATA = "GradientTracking and ExactDiffusion are for data that differ between ranks"


def _read(lines: str) -> dict[str, str]:
    """Returns what each name is replaced by, of lines "name name ...: instead"."""
    pairs = (line.strip().split(": ", 1) for line in lines.strip().splitlines())
    return {name: instead for names, instead in pairs for name in names.split()}


_GRAPHS = _read("""
    ExponentialGraph ExponentialTwoGraph: fogdist.topology.exponential
    FullyConnectedGraph: fogdist.topology.fully_connected
    GetDynamicOnePeerSendRecvRanks: fogdist.topology.one_peer
    GetExp2DynamicSendRecvMachineRanks: fogdist.topology.one_peer of a graph of machines
    GetInnerOuterExpo2DynamicSendRecvRanks: fogdist.topology.inner_outer_exponential
    GetInnerOuterRingDynamicSendRecvRanks: fogdist.topology.inner_outer_exponential
    GetRecvWeights: fogdist.topology.recv_weights
    GetSendWeights: the row of a rank in fogdist.topology.mixing_matrix
    IsRegularGraph: fogdist.topology.is_regular
    IsTopologyEquivalent: fogdist.topology.is_equivalent
    MeshGrid2DGraph: fogdist.topology.mesh
    RingGraph: fogdist.topology.ring
    StarGraph: fogdist.topology.star
    SymmetricExponentialGraph: fogdist.topology.symmetric_exponential
""")

# Names of BlueFog, which `fogdist.bluefog.torch` has, and what a new script writes.
_OF_BLUEFOG = _GRAPHS | _read("""
    neighbor_allreduce_: neighbor_allreduce(x, out=x)
    neighbor_allreduce_nonblocking: neighbor_allreduce(x, async_op=True)
    neighbor_allreduce_nonblocking_: neighbor_allreduce(x, out=x, async_op=True)
    hierarchical_neighbor_allreduce_: hierarchical_neighbor_allreduce(x, out=x)
    hierarchical_neighbor_allreduce_nonblocking: hierarchical_neighbor_allreduce(x, async_op=True)
    hierarchical_neighbor_allreduce_nonblocking_: hierarchical_neighbor_allreduce(x, out=x, async_op=True)
    neighbor_allgather_nonblocking: neighbor_allgather(x, async_op=True)
    pair_gossip_nonblocking: pair_gossip(x, rank, async_op=True)
    allreduce allreduce_ allreduce_nonblocking allreduce_nonblocking_: torch.distributed.all_reduce
    broadcast broadcast_ broadcast_nonblocking broadcast_nonblocking_: torch.distributed.broadcast
    allgather allgather_nonblocking: torch.distributed.all_gather
    barrier: torch.distributed.barrier
    poll win_poll: is_completed() of a Work, which async_op=True returns
    wait synchronize win_wait: wait() of a Work, which async_op=True returns
    InferDestinationFromSourceRanks: an all-gather of the ranks' lists, in which each rank looks for its own number
    InferSourceFromDestinationRanks: an all-gather of the ranks' lists, in which each rank looks for its own number
    is_homogeneous: fogdist.machine_size, which raises PreconditionError if the machines differ
    is_topo_weighted is_machine_topo_weighted: load_topology(), whose weights are used
    win_put neighbor_win_put: fogdist.Window.put
    win_get neighbor_win_get: fogdist.Window.get
    win_accumulate neighbor_win_accumulate: fogdist.Window.accumulate
    win_put_nonblocking neighbor_win_put_nonblocking: fogdist.Window.put(async_op=True)
    win_get_nonblocking neighbor_win_get_nonblocking: fogdist.Window.get(async_op=True)
    win_accumulate_nonblocking neighbor_win_accumulate_nonblocking: fogdist.Window.accumulate(async_op=True)
    win_create: fogdist.Window(tensor)
    win_free: fogdist.Window.free
    win_update: fogdist.Window.update
    win_update_then_collect: fogdist.Window.collect
    win_mutex: fogdist.Window.mutex
    win_lock: fogdist.Window.lock
    get_win_version: fogdist.Window.version
    get_current_created_window_names: fogdist.Window objects of your own
    win_associated_p: fogdist.Window.p
    turn_on_win_ops_with_associated_p turn_off_win_ops_with_associated_p: with_p= of the methods of fogdist.Window
    DistributedAdaptWithCombineOptimizer: fogdist.DecentralizedOptimizer(optimizer, model, order="awc")
    DistributedNeighborAllreduceOptimizer: fogdist.DecentralizedOptimizer(optimizer, model, order="awc")
    DistributedHierarchicalNeighborAllreduceOptimizer: fogdist.DecentralizedOptimizer(optimizer, model, order="awc")
    CommunicationType DistributedAllreduceOptimizer: fogdist.DecentralizedOptimizer(optimizer, model, order="awc")
    DistributedAdaptThenCombineOptimizer: fogdist.DecentralizedOptimizer(optimizer, model, order="atc")
    DistributedGradientAllreduceOptimizer: torch.nn.parallel.DistributedDataParallel
    DistributedWinPutOptimizer: fogdist.algorithms.WinPut
    DistributedPullGetOptimizer: fogdist.algorithms.WinPut
    DistributedPushSumOptimizer: fogdist.algorithms.PushSumSGD(optimizer, model, order="awc")
    timeline_context: fogdist.timeline.timeline_context
    timeline_start_activity: fogdist.timeline.timeline_start_activity
    timeline_end_activity: fogdist.timeline.timeline_end_activity
""")

_OF_FOGDIST = {
    **{
        name: f"write {instead}; `import fogdist.bluefog.torch as bf` has BlueFog's {name}"
        for name, instead in _OF_BLUEFOG.items()
    },
    "Gossip": "gossip_hook averages parameters; torch's DistributedDataParallel averages gradients, over all ranks",
}

# By module: the name, and what to use instead. docs/algorithms.md has the measurements.
REMOVED: dict[str, dict[str, str]] = {
    "fogdist": _OF_FOGDIST
    | {
        "simulate": "fog's own tests train virtual ranks, and benchmarks/time_to_loss.py counts steps to a loss with them",
        "testing": "fog's own tests inject faults",
    },
    "fogdist.algorithms": {
        "AdaptThenCombine": 'DecentralizedSGD has order="atc", and no_sync() for passes of an accumulated batch',
        "BEER": f"{_REPLICAS}, GradientTracking has compression=Int8()",
        "D2": "ExactDiffusion has the same fixed point, with any symmetric graph",
        "DeepSqueeze": _REPLICAS,
        "GradientAllreduce": 'torch.nn.parallel.DistributedDataParallel averages gradients on the backend "fog"',
        "GossipPGA": "GradientTracking and ExactDiffusion ended nearer to DDP",
        "LEAD": f"{_REPLICAS}, ExactDiffusion has compression=Int8()",
        "MoniquaSGD": _REPLICAS,
        "NoLoCo": "DiLoCo, or GASLoC in random pairs",
        "PowerGossip": "ChocoSGD with TopK sends few bytes too",
        "PullGet": "WinPut averages with neighbors' values too, and no rank reads another one's memory in a step",
        "QuasiGlobalMomentum": _DIFFERENT_DATA,
        "SlowMo": "DiLoCo makes local steps and an outer step with momentum",
        "WAGMA": "AsynchronousGossip and WinPut wait for no late rank",
        "WindowPushSum": 'PushSumSGD has order="awc", whose exchange is hidden behind the passes',
    },
    "fogdist.checkpoint": dict.fromkeys(
        ("save_nonblocking", "Saving"), "save waits until its files are written"
    ),
    "fogdist.compression": {
        "Float8": _CODECS,
        "Int4": _FEW_BITS,
        "Moniqua": _CODECS,
        "RandomK": "TopK sends as many elements, the largest ones",
        "Sign": _FEW_BITS,
    },
    "fogdist.topology": {
        **{
            name: f"write {instead}; `fogdist.bluefog.common.topology_util` has BlueFog's {name}"
            for name, instead in _GRAPHS.items()
        },
        **dict.fromkeys(("Torus2DGraph", "torus"), "mesh and exp2 are graphs of few neighbors"),
        "SEQUENCE_NAMES": "named(name, size) lists the names in its error",
        **dict.fromkeys(
            ("matrix_from_destinations", "matrix_from_sources", "transpose_neighbor_ranks"),
            "mixing_matrix(uniform_weights(graph)) is the matrix of the plain mean along a graph's edges",
        ),
        "send_weights": "the row of a rank in mixing_matrix(graph)",
        "graph_from_matrix": "Topology(name, [W]).graph() is the graph of a matrix W",
        "plot": "networkx draws the graph of a round, Topology.graph(t)",
        "inner_outer_ring": "inner_outer_exponential(size, local_size) averages in fewer rounds",
        "one_peer_hypercube": "base_graph(size) has the same rounds for powers of two",
        **dict.fromkeys(("Summary", "SummaryRow"), "a Topology has the numbers; summary(size) is a text"),
        "EquiStaticGraph": 'by_name("exp2", size) is a graph of few edges',
        "equi_dynamic": "base_graph(size) sends as little and reaches the exact average",
        "hyper_hypercube": "base_graph(size, degree) is the same where there is one",
        "simple_base_graph": "base_graph(size, degree) takes no more rounds",
    },
    "fogdist.training": {
        "CompressedAlgorithm": "ReplicaAlgorithm is the base of algorithms that need a codec",
        "WindowAlgorithm": "fogdist.algorithms.WinPut is the algorithm over windows",
    },
    "fogdist.windows": {
        **{name: instead for name, instead in _OF_FOGDIST.items() if "win" in name},
        "UnknownWindowError": "only fogdist.bluefog.torch gives windows by their names",
    },
}


def missing(module: str, name: str) -> AttributeError:
    """Returns the error for a name that a module does not have; a module raises it from its ``__getattr__``."""
    instead = REMOVED.get(module, {}).get(name)
    text = f"module {module!r} has no attribute {name!r}"
    return AttributeError(text if instead is None else f"{text} any more: {instead}")
