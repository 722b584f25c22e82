"""The group this process belongs to, its ranks and hosts, and the current topology.

There is one context in a process, from `init` to `shutdown`. Everything above asks it for the backend and for
the neighbors; only `init` and `shutdown` create or destroy process groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import networkx as nx
import torch
import torch.distributed as dist

from fogdist import launch
from fogdist.handles import HandleTable
from fogdist.topology import ExponentialGraph, GetRecvWeights, check_topology

if TYPE_CHECKING:
    from fog_pg._C import NeighborPlan, ProcessGroupFog


class PreconditionError(ValueError, AssertionError):
    """A call that its arguments or the layout of the ranks do not allow.

    It is a ValueError, as every bad argument value in fogdist, and an AssertionError too because BlueFog
    checked these conditions with ``assert``: scripts and tests written for it keep working.
    """


@dataclass(frozen=True)
class StaticTopology:
    """The topology that exchanges without weights of their own follow, seen from this rank.

    Attributes:
        graph: A private copy of what the user gave.
        is_weighted: Whether the graph's weights are used; if not, a rank takes the plain mean of itself and
            its in-neighbors.
        in_neighbors: Predecessors of this rank without itself, in the graph's order.
        out_neighbors: Successors of this rank without itself, in the graph's order.
        plan: The exchange with all of them.
    """

    graph: nx.DiGraph
    is_weighted: bool
    in_neighbors: list[int]
    out_neighbors: list[int]
    plan: NeighborPlan


@dataclass
class Context:
    """What `init` made or found."""

    group: dist.ProcessGroup
    backend: ProcessGroupFog
    rank: int
    size: int
    owns_group: bool
    topology: StaticTopology
    handles: HandleTable = field(default_factory=HandleTable)


_context: Context | None = None
_was_shut_down = False


def current() -> Context:
    """Returns the context of this process.

    Raises:
        ValueError: `init` was never called.
        RuntimeError: The context was shut down, or its process group destroyed.
    """
    if _context is None:
        if _was_shut_down:
            raise RuntimeError("fogdist has been shut down; call fogdist.init() to start it again")
        raise ValueError("fogdist has not been initialized; call fogdist.init() first")
    if not _is_registered(_context.group):
        raise RuntimeError(
            "the process group of fogdist was destroyed; call fogdist.init() to start it again"
        )
    return _context


def init(topology_fn: Callable[[int], nx.DiGraph] | None = None, is_weighted: bool = False) -> None:
    """Connects this process to the group and sets the topology. Collective.

    A default process group that exists is adopted; if it has no fog backend for CPU tensors, a fog group of
    the same ranks is made beside it. Without one, the default process group is made from the environment of
    torchrun, mpiexec or srun. Calling `init` again keeps the group and sets the topology anew.

    Args:
        topology_fn: Returns the topology for a number of ranks; by default `ExponentialGraph`.
        is_weighted: As in `set_topology`.

    Raises:
        TypeError: `topology_fn` is not callable, or as in `set_topology`.
        ValueError: As in `set_topology`, or the environment does not say which rank this is.
    """
    global _context, _was_shut_down
    if topology_fn is not None and not callable(topology_fn):
        raise TypeError(
            f"topology_fn must be a callable of the number of ranks, got {type(topology_fn).__name__}"
        )
    make = topology_fn or ExponentialGraph
    if _context is not None and _is_registered(_context.group):
        _context.topology = _static_topology(make(_context.size), is_weighted, _context.rank, _context.size)
        return
    group, backend, owns_group = _connect()
    try:
        topology = _static_topology(make(backend.size()), is_weighted, backend.rank(), backend.size())
    except BaseException:
        if owns_group:
            dist.destroy_process_group(group)
        raise
    _context = Context(group, backend, backend.rank(), backend.size(), owns_group, topology)
    _was_shut_down = False


def shutdown() -> None:
    """Forgets the topology and all handles, and destroys the process group if `init` made it.

    A group that the user made stays. Operations raise RuntimeError from now on, until `init` is called again.
    Without a context it does nothing.
    """
    global _context, _was_shut_down
    if _context is None:
        return
    context, _context, _was_shut_down = _context, None, True
    if context.owns_group and _is_registered(context.group):
        dist.destroy_process_group(context.group)


def is_initialized() -> bool:
    """Returns whether operations can be called: after `init`, and before `shutdown`."""
    return _context is not None and _is_registered(_context.group)


def rank() -> int:
    """Returns the rank of this process in the group.

    Raises:
        ValueError: Before `init`.
        RuntimeError: After `shutdown`.
    """
    return current().rank


def size() -> int:
    """Returns the number of ranks in the group; raises as `rank`."""
    return current().size


def local_rank() -> int:
    """Returns the place of this rank among those on its host, counted from 0; raises as `rank`."""
    context = current()
    return list(context.backend.local_ranks).index(context.rank)


def local_size() -> int:
    """Returns the number of ranks on this host; raises as `rank`."""
    return len(current().backend.local_ranks)


def is_homogeneous() -> bool:
    """Returns whether all hosts hold equally many ranks, each consecutive ones; raises as `rank`."""
    return hosts_are_homogeneous(current().backend.hosts)


def machine_rank() -> int:
    """Returns the number of this host, counted in order of ranks.

    Raises:
        PreconditionError: The ranks are not spread homogeneously over the hosts.
        ValueError: Before `init`.
        RuntimeError: After `shutdown`.
    """
    return rank() // _homogeneous_local_size()


def machine_size() -> int:
    """Returns the number of hosts; raises as `machine_rank`."""
    return size() // _homogeneous_local_size()


def set_topology(topology: nx.DiGraph | None = None, is_weighted: bool = False) -> bool:
    """Sets the topology that exchanges without weights of their own follow. Every rank must set the same one.

    Args:
        topology: A graph whose nodes are the ranks 0 ... n-1; an edge i -> j means that i sends to j. It is
            copied. By default `ExponentialGraph(size())`.
        is_weighted: True to use the graph's weights: rank j gets ``sum_i W[i, j] * x_i``. False for the plain
            mean of a rank and its in-neighbors, whatever the graph's weights are.

    Returns:
        True.

    Raises:
        TypeError: Not a networkx.DiGraph, or not as many nodes as ranks.
        ValueError: The nodes are not the ranks, a weight is not finite, or before `init`.
        RuntimeError: After `shutdown`.
    """
    context = current()
    graph = ExponentialGraph(context.size) if topology is None else topology
    context.topology = _static_topology(graph, is_weighted, context.rank, context.size)
    return True


def load_topology() -> nx.DiGraph:
    """Returns a copy of the current topology; raises as `rank`."""
    return current().topology.graph.copy()


def is_topo_weighted() -> bool:
    """Returns whether the weights of the current topology are used; raises as `rank`."""
    return current().topology.is_weighted


def in_neighbor_ranks() -> list[int]:
    """Returns the ranks this one receives from in the current topology, without itself; raises as `rank`."""
    return list(current().topology.in_neighbors)


def out_neighbor_ranks() -> list[int]:
    """Returns the ranks this one sends to in the current topology, without itself; raises as `rank`."""
    return list(current().topology.out_neighbors)


def hosts_are_homogeneous(hosts: Sequence[int]) -> bool:
    """Returns whether equally many, consecutive ranks live on each host.

    Args:
        hosts: The host of every rank, as any number that is the same for ranks of one host.
    """
    per_host = len(hosts) // len(set(hosts))
    if per_host * len(set(hosts)) != len(hosts):
        return False
    return all(host == hosts[place - place % per_host] for place, host in enumerate(hosts))


def _homogeneous_local_size() -> int:
    hosts = current().backend.hosts
    if not hosts_are_homogeneous(hosts):
        raise PreconditionError(
            f"ranks must be spread homogeneously over the hosts, got the hosts {list(hosts)} by rank"
        )
    return local_size()


def _is_registered(group: dist.ProcessGroup) -> bool:
    """Whether torch still knows the group: the user may have destroyed it."""
    try:
        dist.get_backend(group)
    except ValueError:
        return False
    return True


def _connect() -> tuple[dist.ProcessGroup, ProcessGroupFog, bool]:
    """Returns a group with a fog backend, that backend, and whether the group was made here."""
    owns_group = not dist.is_initialized()
    if owns_group:
        launch.connect()
    world = dist.group.WORLD
    assert world is not None  # it is initialized
    backend = _fog_backend(world)
    if backend is not None:
        return world, backend, owns_group
    beside = dist.new_group(backend="fog")
    backend = _fog_backend(beside)
    if backend is None:
        raise RuntimeError(f"the backend of a new fog group must be a ProcessGroupFog, got {beside}")
    return beside, backend, True


def _fog_backend(group: dist.ProcessGroup) -> ProcessGroupFog | None:
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # no backend for CPU tensors
        return None
    # TORCH_DISTRIBUTED_DEBUG=DETAIL hides the backend, and the operations only it has, in a wrapper.
    while hasattr(backend, "wrapped_pg"):
        backend = backend.wrapped_pg
    return cast("ProcessGroupFog", backend) if backend.name() == "fog" else None


def _static_topology(graph: nx.DiGraph, is_weighted: bool, rank: int, size: int) -> StaticTopology:
    # Not at the top: a program may import fogdist only for its topologies, and this loads the extension.
    from fog_pg._C import NeighborPlan

    if isinstance(graph, nx.DiGraph) and graph.number_of_nodes() != size:
        raise TypeError(f"topology must have as many nodes as ranks, {size}, got {graph.number_of_nodes()}")
    check_topology(graph)
    in_neighbors = [source for source in graph.predecessors(rank) if source != rank]
    out_neighbors = [destination for destination in graph.successors(rank) if destination != rank]
    destinations = [(destination, 1.0) for destination in sorted(out_neighbors)]
    if is_weighted:
        self_weight, source_weights = GetRecvWeights(graph, rank)
        plan = NeighborPlan(rank, size, self_weight, list(source_weights.items()), destinations)
    else:
        sources = [(source, 1.0) for source in sorted(in_neighbors)]
        plan = NeighborPlan(rank, size, 1.0, sources, destinations, mean=True)
    return StaticTopology(graph.copy(), bool(is_weighted), in_neighbors, out_neighbors, plan)
