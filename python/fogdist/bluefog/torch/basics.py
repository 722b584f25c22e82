"""What BlueFog says about itself and its background thread, of which there is none here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import networkx as nx
import torch.distributed as dist

import fogdist
from fogdist.bluefog.common.util import env

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

# Of each machine's ranks, where BlueFog's tests say so; fogdist's variable goes before it.
_MACHINES = "NODES_PER_MACHINE"

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
    machines = None if f"FOG_{_MACHINES}" in os.environ else os.environ.get(f"BLUEFOG_{_MACHINES}")
    with env(**{f"FOG_{_MACHINES}": machines}):
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
    """Returns what `set_skip_negotiate_stage` was given last, False before."""
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
    """Returns whether what a neighbor writes into a window is seen without a further call: True on all machines."""
    return True


def suspend() -> None:
    """Does nothing: there is no background thread that would use the cores while a notebook is idle.

    `fogdist.interactive.Cluster.suspend` stops ranks that compute.
    """


def resume() -> None:
    """Does nothing, as `suspend`."""


def timeline_start_activity(tensor_name: str, activity_name: str) -> bool:
    """Returns False: there is no timeline file. Operations are in the traces of ``torch.profiler``.

    Args:
        tensor_name: Not used.
        activity_name: Not used.
    """
    return False


def timeline_end_activity(tensor_name: str) -> bool:
    """Returns False, as `timeline_start_activity`."""
    return False


@contextmanager
def timeline_context(tensor_name: str, activity_name: str) -> Iterator[None]:
    """A block that marks nothing, as `timeline_start_activity`."""
    yield
