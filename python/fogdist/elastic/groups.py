"""The group of the ranks that are left, made without a message, and what its topology is."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import distributed_c10d

from fog_pg import Part
from fogdist.context import Context, Survivors
from fogdist.exchange import RANKS, Nodes
from fogdist.lazy import nx
from fogdist.static_topology import StaticTopology, see_topology
from fogdist.topology import TopologyError


def healed(topology: StaticTopology, survivors: Survivors, node: int, nodes: Nodes = RANKS) -> StaticTopology:
    """Returns the topology of the nodes that are there, from the point of view of one of them."""
    living = survivors.living
    try:
        left = topology.as_topology().grown(survivors.numbers).among(living).graph()
    except TopologyError:
        # Nobody else can say what the user's weights mean for fewer ranks; more are refused.
        numbers = {old: new for new, old in enumerate(living)}
        left = nx.relabel_nodes(topology.graph.subgraph(living), numbers)
    return see_topology(left, True, node, len(living), nodes=nodes)


def new_group(whole: Context, ranks: list[int], epoch: int, name: str) -> dist.ProcessGroup:
    """Creates torch's group of some ranks of a group, or of ranks that have come later, without a message.

    Its name is that of the epoch.

    torch's `new_group` takes no rank that is not below the number of ranks at the start, and no two groups of one kind whose
    ranks are the same, as those of two epochs may be. What it calls does.
    """
    first = dist.get_process_group_ranks(whole.group)
    numbers = [first[rank] if rank < len(first) else rank for rank in ranks]
    group: dist.ProcessGroup
    group, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        ranks.index(whole.rank),
        numbers,
        distributed_c10d.Backend("fog"),
        distributed_c10d._get_default_store(),
        f"{whole.group.group_name}, {name}",  # type: ignore[arg-type]  # a type of its own in some versions
        backend_options=Part(whole.backend, ranks, epoch),
        timeout=whole.backend.options._timeout,
        device_id=distributed_c10d._get_default_group().bound_device_id,
        group_desc=name,
    )
    distributed_c10d._world.pg_group_ranks[group] = {number: place for place, number in enumerate(numbers)}
    return group
