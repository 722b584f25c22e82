"""BlueFog's functions about its build and its background thread, which fogdist does not have."""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Callable
from typing import Any

import networkx as nx
import torch.distributed as dist

import fogdist
from fog_pg import environment
from fogdist.bluefog import handles
from fogdist.bluefog.common import env
from fogdist.bluefog.torch.collectives import barrier
from fogdist.context import assign_topology, current, start
from fogdist.machines import assign_machine_topology, machines_are_homogeneous
from fogdist.topology.validation import check_flags

_log = logging.getLogger("fogdist")
_skips_negotiation = False


def init(
    topology_fn: Callable[[int], nx.DiGraph] | nx.DiGraph | None = None,
    is_weighted: bool = False,
    *,
    topology: nx.DiGraph | None = None,
) -> None:
    """As `fogdist.init`; reads BLUEFOG_NODES_PER_MACHINE and BLUEFOG_LOG_LEVEL where fog's own are not set.

    At its end a rank waits for the others, as `shutdown` does, unless it ends by an exception.

    The machine topology is the complete graph at first: BlueFog's scripts exchange with machines of their choice and set none.
    BlueFog 0.1 and 0.2.0 took a graph, 0.1 also as `topology`.
    """
    if topology_fn is not None and topology is not None:
        raise TypeError("topology_fn and topology must not both be given")
    check_flags(is_weighted=is_weighted)
    graph = topology_fn if topology is None else topology
    make = (lambda size: graph) if isinstance(graph, nx.DiGraph) else graph
    level = environment.BLUEFOG_LOG_LEVEL.get()
    values: dict[environment.Variable[Any], str] = {
        environment.NODES_PER_MACHINE: str(environment.BLUEFOG_NODES_PER_MACHINE.get() or ""),
        environment.LOG_LEVEL: {"trace": "debug", "fatal": "error"}.get(level, level),
    }
    with env(**{each.name: None if each.is_set() else value or None for each, value in values.items()}):
        start(make, is_weighted)
    if is_homogeneous() and fogdist.machine_size() > 1:
        set_machine_topology(fogdist.topology.fully_connected(fogdist.machine_size()))
    atexit.unregister(end)  # each call registers it, and it is to be called once
    atexit.register(end)


def shutdown() -> None:
    """As `fogdist.shutdown`, once all ranks have called it or are at their end: until then others may put here.

    It waits up to the group's timeout, and no longer once a rank is lost; then it says so in the log.
    """
    if fogdist.is_initialized():
        try:
            barrier()
        except (RuntimeError, ValueError) as error:
            _log.warning("this rank does not wait for the others any longer: %s", error)
    fogdist.shutdown()
    handles.forget_all()


def end() -> None:
    """Ends a script: `shutdown`, unless an exception ends it. A rank that has failed waits for no other one."""
    if getattr(sys, "last_value", None) is None:
        shutdown()


def set_topology(
    topology: nx.DiGraph | None = None, is_weighted: bool = False, *, group: dist.ProcessGroup | None = None
) -> bool:
    """As `fogdist.set_topology`, but the graph's weights, which may have any sum, are used with `is_weighted` only.

    Returns True; or False, with a line in the log, if the group has windows and this is another topology than theirs.
    """
    check_flags(is_weighted=is_weighted)
    current(group)  # raises after `shutdown`
    try:
        assign_topology(topology, is_weighted, group)
    except dist.DistError:
        raise
    except RuntimeError as error:  # there are windows
        _log.error("%s; bf.win_free() frees them", error)
        return False
    return True


def set_machine_topology(
    topology: nx.DiGraph, is_weighted: bool = False, *, group: dist.ProcessGroup | None = None
) -> bool:
    """As `fogdist.set_machine_topology`, but the weights are used with `is_weighted` only; returns True."""
    check_flags(is_weighted=is_weighted)
    assign_machine_topology(topology, is_weighted, group)
    return True


def is_topo_weighted(*, group: dist.ProcessGroup | None = None) -> bool:
    """Returns whether the weights of the current topology are used."""
    return current(group).topology.is_weighted


def is_machine_topo_weighted(*, group: dist.ProcessGroup | None = None) -> bool:
    """Returns whether a machine topology is set and its weights are used."""
    topology = current(group).machine_topology
    return topology is not None and topology.is_weighted


def is_homogeneous(*, group: dist.ProcessGroup | None = None) -> bool:
    """Returns whether all machines hold equally many ranks, each consecutive ones."""
    return machines_are_homogeneous(current(group).machine_of)


def set_skip_negotiate_stage(value: bool) -> None:
    """Keeps the value for `get_skip_negotiate_stage`. It changes nothing: no operation of fogdist negotiates."""
    global _skips_negotiation
    _skips_negotiation = bool(value)


def get_skip_negotiate_stage() -> bool:
    """Returns the last argument of `set_skip_negotiate_stage`, False before."""
    return _skips_negotiation


def mpi_threads_supported() -> bool:
    """Returns False: fog starts MPI for one caller at a time. fogdist itself may be called from any thread."""
    return False


def unified_mpi_window_model_supported() -> bool:
    """Returns whether a neighbor's writes into a window are visible without a further call: True on all machines."""
    return True


def suspend() -> None:
    """Does nothing: there is no background thread that would use the cores while a notebook is idle."""


resume = suspend
