"""Average consensus on machines: most exchanges stay inside a machine, and in each round one rank of it goes outside.

    FOG_NODES_PER_MACHINE=4 torchrun --nproc_per_node=8 examples/inner_outer.py
    FOG_NODES_PER_MACHINE=4 torchrun --nproc_per_node=8 examples/inner_outer.py --rounds 60

FOG_NODES_PER_MACHINE makes this number of consecutive ranks a machine, on any hosts; without it each host is one. Networks between
machines are slower than memory inside, so a round that sends one tensor from each machine costs less than one in which
all ranks send outside. Each rank talks to one peer a round:

- inner_outer_ring: the ranks of a machine are a ring, and so are the machines; one rank of each takes its turn outside.
- inner_outer_exp2: the same with distances of 1, 2, 4, ... on both.
- one_peer_exp2: the exponential graph over all ranks, machines or not.
- hierarchical: the ranks of a machine take their mean, and the machines average along an exponential graph; one tensor a machine
  goes outside in each round.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import count

import devices
import fogdist
import ranks
import torch
from fogdist.topology import Topology, exponential, inner_outer_exponential, inner_outer_ring, one_peer
from torch import Tensor


def along(topology: Topology) -> Callable[[Tensor], Tensor]:
    """Returns a function that mixes a tensor along the next round of a topology."""
    rounds = count()
    return lambda x: fogdist.neighbor_allreduce(x, **topology.peers(fogdist.rank(), next(rounds)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Consensus inside and between machines.")
    parser.add_argument("--rounds", type=int, default=40)
    devices.add_flag(parser)
    args = parser.parse_args()
    if problem := devices.problem(args.device):
        parser.error(problem)
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")

    fogdist.init()
    rank, size, local_size = fogdist.rank(), fogdist.size(), fogdist.local_size()
    machines = fogdist.machine_size()
    if local_size < 3 or machines < 2:
        fogdist.shutdown()
        raise SystemExit(
            f"error: this needs machines of equally many ranks, 3 or more, got {machines} of {local_size}; "
            "FOG_NODES_PER_MACHINE makes so many ranks a machine"
        )
    fogdist.set_machine_topology(exponential(machines))
    rounds: dict[str, Callable[[Tensor], Tensor]] = {
        "inner_outer_ring": along(inner_outer_ring(size, local_size)),
        "inner_outer_exp2": along(inner_outer_exponential(size, local_size)),
        "one_peer_exp2": along(one_peer(exponential(size))),
        "hierarchical": fogdist.hierarchical_neighbor_allreduce,
    }
    start = torch.tensor([float(rank)], dtype=torch.float64, device=devices.use(args.device))
    average = ranks.mean(start)
    curves = {}
    for name, round_ in rounds.items():
        x, errors = start, [(start - average).abs()]
        for _ in range(args.rounds):
            x = round_(x)
            errors.append((x - average).abs())
        # One row a rank, one column a round.
        curves[name] = ranks.gathered(torch.cat(errors).unsqueeze(0)).max(dim=0).values
    if rank == 0:
        print(f"{machines} machines of {local_size} ranks: largest distance of a rank to the average")
        print("".join([f"{'round':>6}", *(f"{name:>18}" for name in curves)]))
        for t in sorted({*range(0, args.rounds, max(1, args.rounds // 10)), args.rounds}):
            print("".join([f"{t:>6}", *(f"{curve[t].item():>18.2e}" for curve in curves.values())]))
    fogdist.shutdown()


if __name__ == "__main__":
    main()
