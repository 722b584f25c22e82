"""How long one operation takes: milliseconds and bytes per second of each rank, results checked.

    torchrun --nproc_per_node=4 examples/single_operation.py
    torchrun --nproc_per_node=4 examples/single_operation.py --operation win_put --topology ring --data-size 1000000

A first look at a machine or a network; `benchmarks/` measures them with care.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import devices
import fogdist
import ranks
import torch
import torch.distributed as dist
from fogdist.topology import TOPOLOGY_NAMES, by_name
from torch import Tensor

TIMES_SIGMA = 1.96  # for what 95 of 100 measurements differ from their mean at most


def operations(window: fogdist.Window) -> dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]]:
    """Returns by name what to time, and what it makes of the numbers of the ranks it hears of.

    Args:
        window: Of this rank's tensor, whose elements are the rank's number.
    """
    data = window.tensor
    neighbors = sorted(fogdist.in_neighbor_ranks())

    def put() -> Tensor:
        window.put(data)
        return data

    def error_of_mean(result: Tensor) -> Tensor:
        return result - (near.sum() + data[0]) / (len(neighbors) + 1)

    def error_of_puts(_: Tensor) -> Tensor:
        dist.barrier()  # all have put
        return error_of_mean(window.update(clone=True))

    everybody = torch.arange(fogdist.size(), dtype=data.dtype, device=data.device)
    near = torch.tensor(neighbors, dtype=data.dtype, device=data.device)
    return {
        "neighbor_allreduce": (lambda: fogdist.neighbor_allreduce(data), error_of_mean),
        "neighbor_allgather": (
            lambda: fogdist.neighbor_allgather(data),
            lambda result: result.reshape(len(neighbors), -1).mean(dim=1) - near,
        ),
        "allreduce": (lambda: ranks.mean(data), lambda result: result - everybody.mean()),
        "allgather": (
            lambda: ranks.gathered(data),
            lambda result: result.reshape(len(everybody), -1).mean(dim=1) - everybody,
        ),
        "put": (put, error_of_puts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Time one operation.")
    parser.add_argument("--operation", default="neighbor_allreduce")
    parser.add_argument("--topology", choices=TOPOLOGY_NAMES, default="exp2", help="who is whose neighbor")
    parser.add_argument("--data-size", type=int, default=100_000, help="elements of float32")
    parser.add_argument("--num-warmup", type=int, default=10, help="calls before the first iteration")
    parser.add_argument("--num-iters", type=int, default=10)
    parser.add_argument("--num-per-iter", type=int, default=20, help="calls in each iteration")
    args = devices.parse(parser, "data_size", "num_warmup", "num_iters", "num_per_iter")

    fogdist.init(lambda size: by_name(args.topology, size))
    data = torch.full((args.data_size,), float(fogdist.rank()), device=devices.use(args.device))
    window = fogdist.Window(data)
    known = operations(window)
    if args.operation not in known:
        fogdist.shutdown()
        raise SystemExit(f"error: --operation must be one of {', '.join(known)}, got {args.operation}")
    call, error = known[args.operation]
    for _ in range(args.num_warmup):
        result = call()
    worst = error(result).abs().max().item()
    seconds = []
    for _ in range(args.num_iters):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(args.num_per_iter):
            result = call()
        result.sum().item()  # a GPU has done it then
        seconds.append((time.perf_counter() - begin) / args.num_per_iter)
    spread = TIMES_SIGMA * statistics.pstdev(seconds)
    row = torch.tensor([[statistics.mean(seconds), spread, worst]], dtype=torch.float64)
    rows = ranks.gathered(row).tolist()
    if fogdist.rank() == 0:
        print(f"{args.operation} of {data.nbytes:,} bytes, {args.topology}, {fogdist.size()} ranks")
        for rank, (mean, deviation, off) in enumerate(rows):
            print(
                f"rank {rank}: {1e3 * mean:.3f} +- {1e3 * deviation:.3f} ms a call, "
                f"{data.nbytes / mean / 1e6:.0f} MB/s, largest error {off:.1e}"
            )
    window.free()
    fogdist.shutdown()


if __name__ == "__main__":
    main()
