"""Asynchronous average consensus: push-sum on one-sided windows, each rank at its own speed.

    torchrun --nproc_per_node=4 examples/push_sum.py
    torchrun --nproc_per_node=4 examples/push_sum.py --topology ring-right --slow-rank 2
    torchrun --nproc_per_node=4 examples/push_sum.py --dynamic

Rank i starts with the value x = i and the weight p = 1. In each of its rounds a rank keeps a share of both
and adds the others to its out-neighbors' slots, then collects the values in its own slots; no rank waits for
another one. The sums of x and of p over all ranks, slots included, stay as they are, so x / p goes to the average
of all on every directed graph that is strongly connected, however uneven the speeds (Kempe, Dobra and Gehrke,
"Gossip-based computation of aggregate information", FOCS 2003).
"""

from __future__ import annotations

import argparse
import time

import devices
import fogdist
import ranks
import torch
import torch.distributed as dist
from fogdist.topology import TOPOLOGY_NAMES, by_name, one_peer


def main() -> None:
    parser = argparse.ArgumentParser(description="Asynchronous push-sum with a window.")
    parser.add_argument("--topology", choices=TOPOLOGY_NAMES, default="exp2", help="who writes to whom")
    parser.add_argument("--dynamic", action="store_true", help="one peer a round, in turn")
    parser.add_argument(
        "--rounds", type=int, default=100, help="of the slowest rank; the others go on meanwhile"
    )
    parser.add_argument("--slow-rank", type=int, default=0, help="the rank that takes ten times as long")
    args = devices.parse(parser, "rounds")

    fogdist.init(lambda size: by_name(args.topology, size))
    rank, size = fogdist.rank(), fogdist.size()
    if not 0 <= args.slow_rank < size:
        fogdist.shutdown()
        raise SystemExit(f"error: --slow-rank must be one of 0 to {size - 1}, got {args.slow_rank}")
    neighbors = fogdist.out_neighbor_ranks()
    sequence = one_peer(fogdist.load_topology()) if args.dynamic and size > 1 else None

    x = torch.tensor([float(rank)], dtype=torch.float64, device=devices.use(args.device))
    average = ranks.mean(x)
    window = fogdist.Window(x, zero_init=True)
    rounds, all_done = 0, None
    errors = [abs(x.item() - average.item())]
    # A rank that stops early only receives, so all continue until the slowest has done its rounds.
    while all_done is None or not all_done.is_completed():
        destinations = neighbors if sequence is None else sequence.peers(rank, rounds)["dst_weights"]
        share = 1.0 / (len(destinations) + 1)
        window.accumulate(x, self_weight=share, dst_weights={d: share for d in destinations}, with_p=True)
        time.sleep(1e-3 if rank == args.slow_rank else 1e-4)
        window.collect(with_p=True)
        rounds += 1
        errors.append(abs(x.item() / window.p - average.item()))
        if rounds == args.rounds:
            all_done = dist.barrier(async_op=True)
    all_done.wait()
    dist.barrier()
    window.collect(with_p=True)  # the values that came after the last round
    p = window.p

    # One row a rank: its rounds, its share of the weight, its estimate.
    rows = ranks.gathered(torch.tensor([[rounds, p, x.item() / p]], dtype=torch.float64))
    all_errors = ranks.gathered(torch.tensor([errors[: args.rounds + 1]], dtype=torch.float64))
    if rank == 0:
        print(f"{'round':>6}{'largest error':>16}")
        for round_, error in enumerate(all_errors.max(dim=0).values.tolist()):
            if round_ < 10 or round_ % 10 == 0 or round_ == args.rounds:
                print(f"{round_:>6}{error:>16.2e}")
        for r, (count, weight, estimate) in enumerate(rows.tolist()):
            print(f"rank {r}: {estimate:.12g} after {count:.0f} rounds, p = {weight:.3f}")
        print(f"average of all ranks: {average.item()}; sum of p: {rows[:, 1].sum().item():.12g}")
    window.free()
    fogdist.shutdown()


if __name__ == "__main__":
    main()
