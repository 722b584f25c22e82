"""The machines that the ranks of a group run on, and the topology of machines.

A machine is a host, or as many ranks as FOG_NODES_PER_MACHINE specifies: see `fogdist.init`. Most functions need ranks
that are spread homogeneously: the same number of consecutive ranks on each machine.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch.distributed as dist

from fogdist.agreement import check_same_everywhere
from fogdist.context import Context, PreconditionError, current
from fogdist.exchange import MACHINES, Exchanges
from fogdist.lazy import nx
from fogdist.static_topology import one_graph, see_topology
from fogdist.topology import Topology


def local_rank(*, group: dist.ProcessGroup | None = None) -> int:
    """Returns the place of this rank among those on its machine, counted from 0; as `fogdist.rank`."""
    context = current(group)
    return context.machines[context.machine_of[context.rank]].index(context.rank)


def local_size(*, group: dist.ProcessGroup | None = None) -> int:
    """Returns the number of ranks on this machine; argument and errors as of `fogdist.rank`."""
    context = current(group)
    return context.machine_of.count(context.machine_of[context.rank])


def transport(rank: int, *, group: dist.ProcessGroup | None = None) -> str:
    """Returns how large data goes from this rank to another one.

    Args:
        rank: The other rank, of the group.
        group: As of `fogdist.rank`.

    Returns:
        "shared memory" on one host; "rma" where it is put into the other rank's memory by MPI RMA, which takes a
        fabric that moves data by itself; "rma, exchanges only" where the other rank has to call MPI meanwhile, so the
        data of windows goes by messages; "tcp" over fog's own connections elsewhere, with more words where it takes
        several of them: "tcp: 2 connections, round trip 40.1 ms, 930 Mbit/s". FOG_BETWEEN_HOSTS chooses between these
        three. Tensors of devices go as their device's backend sends them.

    Raises:
        TypeError: `rank` is not an integer.
        ValueError: It is no other rank of the group, or as of `fogdist.rank`.
    """
    return current(group).backend.transport(operator.index(rank))


def machine_rank(*, group: dist.ProcessGroup | None = None) -> int:
    """Returns the number of this machine, counted in order of ranks.

    Args:
        group: As in `fogdist.rank`.

    Raises:
        PreconditionError: The ranks are not spread homogeneously over the machines.
        TypeError: As `fogdist.rank`.
        ValueError: As `fogdist.rank`.
        RuntimeError: As `fogdist.rank`.
    """
    context = homogeneous(current(group))
    return context.machine_of[context.rank]


def machine_size(*, group: dist.ProcessGroup | None = None) -> int:
    """Returns the number of machines; argument and errors as of `machine_rank`."""
    return len(homogeneous(current(group)).machines)


def set_machine_topology(
    topology: nx.DiGraph | Topology | str | None, *, group: dist.ProcessGroup | None = None
) -> None:
    """Sets the topology that `hierarchical_neighbor_allreduce` follows. Collective; all ranks compare theirs.

    Args:
        topology: As in `fogdist.set_topology`, of the machines 0 ... m-1.
        group: As in `fogdist.rank`. Each group has a machine topology of its own, none at first.

    Raises:
        PreconditionError: The ranks are not spread homogeneously over the machines.
        TypeError: As `fogdist.set_topology`.
        ValueError: `topology` is None; else as `fogdist.set_topology`.
        RuntimeError: After `shutdown`; torch.distributed.DistBackendError if a rank does not come.
    """
    assign_machine_topology(topology, None, group)


def assign_machine_topology(
    topology: nx.DiGraph | Topology | str | None, is_weighted: bool | None, group: dist.ProcessGroup | None
) -> None:
    """See `set_machine_topology`; `is_weighted` is that of `see_topology`."""
    context = homogeneous(current(group))
    if topology is None:
        raise ValueError("topology must be a topology of the machines, got None")
    seen = see_topology(
        one_graph(topology, len(context.machines)),
        is_weighted,
        context.machine_of[context.viewpoint],
        len(context.machines),
        nodes=MACHINES,
    )
    if not context.is_joining:
        check_same_everywhere(context.backend, "machine topology", seen.items())
    context.machine_topology = seen


def load_machine_topology(*, group: dist.ProcessGroup | None = None) -> nx.DiGraph | None:
    """Returns a copy of the machine topology, or None if none was set; as `fogdist.rank`."""
    topology = current(group).machine_topology
    return None if topology is None else topology.graph.copy()


def in_neighbor_machine_ranks(*, group: dist.ProcessGroup | None = None) -> list[int]:
    """Returns the machines this one receives from, without itself; none if no machine topology is set.

    Argument and errors as of `machine_rank`.
    """
    topology = homogeneous(current(group)).machine_topology
    return [] if topology is None else list(topology.in_neighbors)


def out_neighbor_machine_ranks(*, group: dist.ProcessGroup | None = None) -> list[int]:
    """Returns the machines this one sends to, without itself; none if no machine topology is set.

    Argument and errors as of `machine_rank`.
    """
    topology = homogeneous(current(group)).machine_topology
    return [] if topology is None else list(topology.out_neighbors)


def machines_are_homogeneous(machine_of: Sequence[int]) -> bool:
    """Returns whether equally many, consecutive ranks live on each machine.

    Args:
        machine_of: The machine of every rank, as any number that is the same for ranks of one machine.
    """
    per_machine = len(machine_of) // len(set(machine_of))
    if per_machine * len(set(machine_of)) != len(machine_of):
        return False
    return all(machine == machine_of[place - place % per_machine] for place, machine in enumerate(machine_of))


def homogeneous(context: Context) -> Context:
    """Returns the context itself.

    Raises:
        PreconditionError: Its ranks are not spread homogeneously over the machines.
    """
    if not machines_are_homogeneous(context.machine_of):
        raise PreconditionError(
            "ranks must be spread homogeneously over the machines, got the machines "
            f"{context.machine_of} by rank"
        )
    return context


def machine_exchanges(context: Context) -> Exchanges:
    """Returns the exchanges of this rank's machine: along the machine topology, if one is set."""
    if context.machine_topology is not None:
        return context.machine_topology.exchanges
    return Exchanges(MACHINES, context.machine_of[context.rank], len(context.machines), [], [], None)
