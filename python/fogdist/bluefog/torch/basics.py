"""BlueFog's functions about its build and its background thread, which fogdist does not have."""

from __future__ import annotations

from collections.abc import Callable

import networkx as nx
import torch.distributed as dist

import fogdist
from fog_pg import environment
from fogdist.bluefog.common.util import env
from fogdist.timeline import timeline_context, timeline_end_activity, timeline_start_activity

__all__ = [
    "get_skip_negotiate_stage",
    "init",
    "mpi_threads_supported",
    "nccl_built",
    "resume",
    "set_skip_negotiate_stage",
    "suspend",
    "timeline_context",
    "timeline_end_activity",
    "timeline_start_activity",
    "unified_mpi_window_model_supported",
]

_skips_negotiation = False


def init(
    topology_fn: Callable[[int], nx.DiGraph] | nx.DiGraph | None = None, is_weighted: bool = False
) -> None:
    """As `fogdist.init`; reads BLUEFOG_NODES_PER_MACHINE where FOG_NODES_PER_MACHINE is not set.

    The machine topology is the complete graph at first: BlueFog's scripts exchange with machines of their choice and set none.

    Args:
        topology_fn: As there, or a graph itself, as in BlueFog 0.1 and 0.2.0.
        is_weighted: As there.

    Raises:
        TypeError: As there.
        ValueError: As there.
    """
    graph = topology_fn
    make = (lambda size: graph) if isinstance(graph, nx.DiGraph) else graph
    ranks = environment.BLUEFOG_NODES_PER_MACHINE.get()
    machines = None if environment.NODES_PER_MACHINE.is_set() or not ranks else str(ranks)
    with env(**{environment.NODES_PER_MACHINE.name: machines}):
        fogdist.init(make, is_weighted)
    if fogdist.is_homogeneous() and fogdist.machine_size() > 1:
        fogdist.set_machine_topology(fogdist.FullyConnectedGraph(fogdist.machine_size()))


def set_skip_negotiate_stage(value: bool) -> None:
    """Keeps the value for `get_skip_negotiate_stage`. It changes nothing: no operation of fogdist negotiates.

    BlueFog's rank 0 looked first whether all ranks had come to an operation of the same name, and asynchronous windows
    needed that turned off.
    """
    global _skips_negotiation
    _skips_negotiation = bool(value)


def get_skip_negotiate_stage() -> bool:
    """Returns the last argument of `set_skip_negotiate_stage`, False before."""
    return _skips_negotiation


def nccl_built() -> bool:
    """Returns whether torch has NCCL, which serves CUDA tensors here."""
    return dist.is_nccl_available()


def mpi_threads_supported() -> bool:
    """Returns whether several threads may call MPI at once: False, as fog starts MPI for one caller at a time.

    fogdist itself may be called from any thread.
    """
    return False


def unified_mpi_window_model_supported() -> bool:
    """Returns whether a neighbor's writes into a window are visible without a further call: True on all machines."""
    return True


def suspend() -> None:
    """Does nothing: there is no background thread that would use the cores while a notebook is idle.

    `fogdist.interactive.Cluster.suspend` stops ranks that compute.
    """


def resume() -> None:
    """Does nothing, as `suspend`."""
