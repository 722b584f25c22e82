"""Average consensus: every rank ends with the mean of all values, and talks to its neighbors only.

    torchrun --nproc_per_node=4 examples/average_consensus.py
    torchrun --nproc_per_node=4 examples/average_consensus.py --topology ring
    torchrun --nproc_per_node=4 examples/average_consensus.py --dynamic
    FOG_NODES_PER_MACHINE=4 torchrun --nproc_per_node=8 examples/average_consensus.py --topology inner-outer

Rank i starts with the value i. In each round it replaces its value by a weighted mean of its own and those of
its in-neighbors. The weights that reach a rank sum to 1, and so do those that leave it: the mean of all ranks
stays as it is, and the distance to it shrinks, the faster the better the topology is connected.

With inner-outer, most exchanges stay inside a machine, and in each round one rank of each goes outside, as networks
between machines are slower than memory. FOG_NODES_PER_MACHINE makes this number of consecutive ranks a machine, on any
hosts; without it each host is one.
"""

from __future__ import annotations

import argparse

import devices
import fogdist
import ranks
import torch
from fogdist.topology import TOPOLOGY_NAMES, TopologyError, by_name, inner_outer_exponential, one_peer

INNER_OUTER = "inner-outer"


def main() -> None:
    parser = argparse.ArgumentParser(description="Average consensus with neighbor_allreduce.")
    names = (*TOPOLOGY_NAMES, INNER_OUTER)
    parser.add_argument("--topology", choices=names, default="exp2", help="who is whose neighbor")
    parser.add_argument("--dynamic", action="store_true", help="one peer a round, in turn")
    parser.add_argument("--rounds", type=int, default=100)
    args = devices.parse(parser, "rounds")
    if args.dynamic and args.topology in ("mesh", "star", INNER_OUTER):
        # A rank could receive from several peers at once, and the weights that leave a rank not sum to 1.
        parser.error(f"--dynamic needs a topology that looks the same from each rank, not {args.topology}")

    is_inner_outer = args.topology == INNER_OUTER
    fogdist.init(None if is_inner_outer else lambda size: by_name(args.topology, size))
    rank, size = fogdist.rank(), fogdist.size()
    sequence = one_peer(fogdist.load_topology()) if args.dynamic and size > 1 else None
    if is_inner_outer:
        try:
            sequence = inner_outer_exponential(size, fogdist.local_size())
        except TopologyError as error:
            fogdist.shutdown()
            raise SystemExit(f"error: {error}; FOG_NODES_PER_MACHINE makes so many ranks a machine") from None

    x = torch.tensor([float(rank)], device=devices.use(args.device))
    average = ranks.mean(x)
    errors = [(x - average).abs()]
    for t in range(args.rounds):
        peers = {} if sequence is None else sequence.peers(rank, t)
        x = fogdist.neighbor_allreduce(x, **peers)
        errors.append((x - average).abs())

    # One row a rank, one column a round.
    all_errors = ranks.gathered(torch.cat(errors).unsqueeze(0))
    values = ranks.gathered(x)
    if rank == 0:
        print(f"{'round':>6}{'largest error':>16}")
        for round_, error in enumerate(all_errors.max(dim=0).values.tolist()):
            if round_ < 10 or round_ % 10 == 0 or round_ == args.rounds:
                print(f"{round_:>6}{error:>16.2e}")
        for r, value in enumerate(values.tolist()):
            print(f"rank {r}: {value} (average of all ranks: {average.item()})")
    fogdist.shutdown()


if __name__ == "__main__":
    main()
