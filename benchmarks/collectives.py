"""Times fog's operations beside Gloo's in one interleaved run: torchrun --nproc_per_node=4 benchmarks/collectives.py

Both backends live in the same processes and take turns, round by round, so that whatever else the machine does meets both.
A measurement is the longest time over the ranks, after a barrier; the table shows medians over the rounds, and their ratio.
The noise of a busy machine is far above a few percent: ratios near 1 mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import fogdist


@dataclass
class Row:
    """Medians of one operation at one size, in milliseconds."""

    operation: str
    bytes: int
    fog_ms: float
    gloo_ms: float
    rounds: int


def gloo_one_peer(group: dist.ProcessGroup, x: torch.Tensor, out: torch.Tensor) -> None:
    """What a user of Gloo would write for neighbor_allreduce on a directed ring."""
    rank, size = dist.get_rank(), dist.get_world_size()
    work = dist.isend(x, (rank + 1) % size, group=group)
    dist.recv(out, (rank - 1) % size, group=group)
    work.wait()
    out.add_(x).mul_(0.5)


def operations(gloo: dist.ProcessGroup, fog: dist.ProcessGroup, numel: int) -> dict[str, tuple[Callable[[], object], ...]]:
    """By name, the same operation on fog and on Gloo, both on tensors of ``numel`` float32."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x, out = torch.ones(numel), torch.empty(numel)
    whole = torch.empty(numel * size)
    peer = {"self_weight": 0.5, "src_weights": {(rank - 1) % size: 0.5}, "dst_weights": [(rank + 1) % size]}

    def on(group: dist.ProcessGroup, call: Callable[[dist.ProcessGroup], object]) -> Callable[[], object]:
        return lambda: call(group)

    def both(call: Callable[[dist.ProcessGroup], object]) -> tuple[Callable[[], object], Callable[[], object]]:
        return on(fog, call), on(gloo, call)

    return {
        "allreduce": both(lambda group: dist.all_reduce(x, dist.ReduceOp.MAX, group=group)),
        "broadcast": both(lambda group: dist.broadcast(x, 0, group=group)),
        "allgather": both(lambda group: dist.all_gather_into_tensor(whole, x, group=group)),
        "neighbor, one peer": (
            lambda: fogdist.neighbor_allreduce(x, enable_topo_check=False, **peer),
            lambda: gloo_one_peer(gloo, x, out),
        ),
    }


def longest(call: Callable[[], object], gloo: dist.ProcessGroup) -> float:
    """Milliseconds until the last rank has finished ``call``."""
    dist.barrier(group=gloo)
    begin = time.perf_counter()
    call()
    elapsed = torch.tensor([1e3 * (time.perf_counter() - begin)], dtype=torch.float64)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX, group=gloo)
    return elapsed.item()


def measure(name: str, calls: tuple[Callable[[], object], ...], bytes_: int, rounds: int, gloo: dist.ProcessGroup) -> Row:
    times: list[list[float]] = [[], []]
    for turn in range(rounds + 2):
        for index, call in enumerate(calls):
            milliseconds = longest(call, gloo)
            if turn >= 2:  # the first two warm up
                times[index].append(milliseconds)
    return Row(name, bytes_, statistics.median(times[0]), statistics.median(times[1]), rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="measurements of each operation and size")
    parser.add_argument("--sizes", type=int, nargs="+", default=[4 << 10, 64 << 10, 1 << 20, 16 << 20], metavar="BYTES")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    fogdist.init()
    fog = dist.group.WORLD
    gloo = dist.new_group(backend="gloo")
    rows = []
    for size in arguments.sizes:
        for name, calls in operations(gloo, fog, max(1, size // 4)).items():
            rows.append(measure(name, calls, size, arguments.rounds, gloo))
    if fogdist.rank() == 0:
        print(f"{fogdist.size()} ranks, medians of {arguments.rounds} rounds, milliseconds")
        print(f"{'operation':20}{'bytes':>10}{'fog':>10}{'Gloo':>10}{'Gloo / fog':>12}")
        for row in rows:
            print(f"{row.operation:20}{row.bytes:>10}{row.fog_ms:>10.3f}{row.gloo_ms:>10.3f}{row.gloo_ms / row.fog_ms:>12.2f}")
        if arguments.json:
            arguments.json.write_text(json.dumps({"ranks": fogdist.size(), "rows": [asdict(row) for row in rows]}, indent=2))
    fogdist.shutdown()


if __name__ == "__main__":
    main()
