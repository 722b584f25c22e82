"""What to write in place of public names that fogdist no longer has."""

from __future__ import annotations

import sys
from opcode import opmap

_CODECS = "write Int8(), which sends about as many bytes, or TopK(0.02), which sends fewer"
_FEW_BITS = "write Int8(), which loses less, or TopK(0.02, bits=2), which sends fewer bytes"
_REPLICAS = "write ChocoSGD, which takes the same codecs"
_DIFFERENT_DATA = "write GradientTracking or ExactDiffusion, which are for data that differ between ranks"


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
    DistributedWinPutOptimizer DistributedPullGetOptimizer DistributedBluefogOptimizer: fogdist.algorithms.WinPut
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
    "Gossip": "write gossip_hook, or torch's DistributedDataParallel without a hook to average gradients of all ranks",
}

# By module: the name, and what to use instead. docs/algorithms.md has the measurements.
REMOVED: dict[str, dict[str, str]] = {
    "fogdist": _OF_FOGDIST
    | {
        "optim": "write fogdist.DecentralizedOptimizer, or a class of fogdist.algorithms",
        "simulate": "write Topology.rounds_to for consensus; benchmarks/time_to_loss.py trains ranks in one process",
        "testing": "nothing takes its place: only fog's own tests inject faults, by tests/injected_faults.py",
    },
    "fogdist.algorithms": {
        "AdaptThenCombine": 'write DecentralizedSGD(optimizer, model, order="atc"); no_sync() is for accumulated batches',
        "AllRanks": "write fogdist.training.GlobalAverage(), the average over all ranks",
        "BEER": f"{_REPLICAS}, or GradientTracking with compression=Int8()",
        "D2": "write ExactDiffusion, which has the same fixed point, with any symmetric graph",
        "DeepSqueeze": _REPLICAS,
        "GradientAllreduce": 'write torch.nn.parallel.DistributedDataParallel, which runs on the backend "fog"',
        "GossipPGA": "write GradientTracking or ExactDiffusion, which ended nearer to DDP",
        "LEAD": f"{_REPLICAS}, or ExactDiffusion with compression=Int8()",
        "MoniquaSGD": _REPLICAS,
        "NoLoCo": "write DiLoCo, or GASLoC, which averages in random pairs",
        "Nobody": "write fogdist.training.NoMixing(), which averages with no rank",
        "PowerGossip": "write ChocoSGD with compression=TopK(0.02), which sends few bytes too",
        "PullGet": "write WinPut(optimizer, model), in which the neighbors put what PullGet would read",
        "QuasiGlobalMomentum": _DIFFERENT_DATA,
        "SlowMo": "write DiLoCo, which makes local steps and an outer step with momentum",
        "WAGMA": "write AsynchronousGossip or WinPut, which wait for no late rank",
        "WindowPushSum": 'write PushSumSGD(optimizer, model, order="awc"), whose exchange is hidden behind the passes',
    },
    "fogdist.checkpoint": dict.fromkeys(
        ("save_nonblocking", "Saving"), "write save(...), which waits until its files are written"
    ),
    "fogdist.compression": {
        "Float8": _CODECS,
        "Int4": _FEW_BITS,
        "Moniqua": _CODECS,
        "RandomK": "write TopK(share), which sends as many elements, the largest ones",
        "Sign": _FEW_BITS,
    },
    "fogdist.topology": {
        **{
            name: f"write {instead}; `fogdist.bluefog.common.topology_util` has BlueFog's {name}"
            for name, instead in _GRAPHS.items()
        },
        **dict.fromkeys(
            ("Torus2DGraph", "torus"), "write mesh(size) or exponential(size), graphs of few neighbors"
        ),
        "SEQUENCE_NAMES": "write the names themselves, which `fog topology` and the docstring of `named` list",
        **dict.fromkeys(
            ("matrix_from_destinations", "matrix_from_sources", "transpose_neighbor_ranks"),
            "write mixing_matrix(uniform_weights(graph)), the matrix of the plain mean along a graph's edges",
        ),
        "send_weights": "write mixing_matrix(graph)[rank], the weights of the edges from a rank",
        "graph_from_matrix": "write Topology(name, [W]).graph(), the graph of a matrix W",
        "plot": "write networkx.draw(topology.graph(t)), which draws round t",
        "inner_outer_ring": "write inner_outer_exponential(size, local_size), which averages in fewer rounds",
        "one_peer_hypercube": "write base_graph(size), which has the same rounds for powers of two",
        **dict.fromkeys(("Summary", "SummaryRow"), "write summary(size), a text; a Topology has the numbers"),
        "EquiStaticGraph": "write exponential(size), a graph of few edges",
        "equi_dynamic": "write base_graph(size), which sends as little and reaches the exact average",
        "hyper_hypercube": "write base_graph(size, degree), which is the same where there is one",
        "simple_base_graph": "write base_graph(size, degree), which takes no more rounds",
    },
    "fogdist.training": {
        "CompressedAlgorithm": "derive from ReplicaAlgorithm, the base of algorithms that need a codec",
        "WindowAlgorithm": "derive from fogdist.algorithms.WinPut, the algorithm over windows",
    },
    "fogdist.windows": {
        **{name: instead for name, instead in _OF_FOGDIST.items() if "win" in name},
        "UnknownWindowError": "catch that of fogdist.bluefog.torch, which alone gives windows by their names",
    },
}


def missing(module: str, name: str) -> AttributeError | ImportError:
    """Returns the error for a name that a module does not have; a module raises it from its ``__getattr__``.

    For ``from module import name`` it is an ImportError, as Python replaces an AttributeError by one without the hint.
    """
    text = f"module {module!r} has no attribute {name!r}"
    instead = REMOVED.get(module, {}).get(name)
    if instead is None:
        return AttributeError(text)
    caller = sys._getframe(2)  # below __getattr__
    is_import = caller.f_code.co_code[caller.f_lasti] == opmap["IMPORT_FROM"]
    return (ImportError if is_import else AttributeError)(f"{text} any more: {instead}")
