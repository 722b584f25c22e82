"""Counts the bytes of exchanges with neighbors, and of sums, on this host's link; tests/test_wire_bytes.py runs it.

On a busy machine TCP sends late data again, so each exchange runs a few times and the least count is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import fogdist
import torch
import torch.distributed as dist
from fogdist import topology
from fogdist.bluefog.common import topology_util
from fogdist.compression import Float16, Int8, TopK
from torch import Tensor

REPETITIONS = 10


def link_bytes() -> tuple[int, int]:
    """Returns the bytes that this host has received and sent so far on its link."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    fields = next(line.partition(":")[2].split() for line in lines if line.strip().startswith("eth0:"))
    return int(fields[0]), int(fields[8])


def counted(exchange: Callable[[], Tensor]) -> tuple[Tensor, list[int]]:
    """Returns the result of an exchange, and the bytes that the host received and sent for it."""
    dist.barrier()
    received, sent = link_bytes()
    dist.barrier()  # no rank sends before all have read the counters
    result = exchange()
    dist.barrier()
    received_after, sent_after = link_bytes()
    dist.barrier()
    return result, [received_after - received, sent_after - sent]


def least(exchange: Callable[[], Tensor], expected: Tensor | None = None) -> list[int]:
    """Returns the least bytes that the host received and sent in several exchanges, whose results are checked."""
    seen = []
    for _ in range(REPETITIONS):
        result, found = counted(exchange)
        if expected is not None:
            torch.testing.assert_close(result, expected)
        seen.append(found)
    return [min(each) for each in zip(*seen, strict=True)]


def exchanges_of_ranks(x: Tensor) -> Iterator[tuple[str, Callable[[], Tensor], float]]:
    """Yields name, call, and the mean of the ranks whose tensors are summed on this one."""
    rank, size = fogdist.rank(), fogdist.size()
    fogdist.set_topology(topology.exponential(size))
    terms = [rank, *fogdist.in_neighbor_ranks()]
    yield "exp2", lambda: fogdist.neighbor_allreduce(x), sum(terms) / len(terms)
    generator = topology_util.GetDynamicOnePeerSendRecvRanks(fogdist.load_topology(), rank)
    for step in range((size - 1).bit_length()):
        destinations, sources = next(generator)

        def one_peer(sources: list[int] = sources, destinations: list[int] = destinations) -> Tensor:
            return fogdist.neighbor_allreduce(
                x,
                self_weight=0.5,
                src_weights=dict.fromkeys(sources, 0.5),
                dst_weights=destinations,
                enable_topo_check=False,
            )

        yield f"one-peer {step}", one_peer, (rank + sources[0]) / 2


def exchanges_of_machines(x: Tensor) -> Iterator[tuple[str, Callable[[], Tensor], float]]:
    """Yields the same for machines, each with all others as neighbors."""
    fogdist.set_machine_topology(topology.fully_connected(fogdist.machine_size()))
    mean = (fogdist.size() - 1) / 2
    yield "hierarchical", lambda: fogdist.hierarchical_neighbor_allreduce(x), mean


def measure(nbytes: int, machines: bool) -> dict[str, list[int]]:
    """Returns the received and sent bytes of each exchange of ranks, or of machines, for tensors of a size in bytes."""
    fogdist.init()
    x = torch.full((nbytes // 4,), float(fogdist.rank()))
    counts = {}
    for name, exchange, mean in (exchanges_of_machines if machines else exchanges_of_ranks)(x):
        counts[name] = least(exchange, torch.full_like(x, mean))
    return counts


def measure_compressed(nbytes: int) -> dict[str, tuple[int, list[int]]]:
    """Returns, for codecs on a graph with one in-neighbor each, the bytes that they promise, and those received and sent."""
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    x = torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(rank))
    counts = {}
    for codec in (Float16(), Int8(), TopK(0.01)):
        call = functools.partial(
            fogdist.neighbor_allreduce,
            x,
            self_weight=0.5,
            src_weights={(rank - 1) % size: 0.5},
            dst_weights=[(rank + 1) % size],
            enable_topo_check=False,
            compression=codec,
        )
        counts[repr(codec)] = codec.bytes(x.numel()), least(call)
    return counts


def measure_algorithms(rows: int) -> dict[str, tuple[int, list[int]]]:
    """Returns the same for a round of `SparseLoCo`, with a square matrix of float32 as the model."""
    fogdist.init()
    codec = TopK(0.02, bits=2)
    model = torch.nn.Linear(rows, rows, bias=False)
    model.weight.data = torch.ones(rows, rows)
    base = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = fogdist.algorithms.SparseLoCo(base, model, compression=codec, local_steps=1, broadcast=False)
    generator = torch.Generator().manual_seed(fogdist.rank())

    def make_a_step() -> Tensor:
        model.weight.grad = torch.randn(rows, rows, generator=generator)
        optimizer.step()
        return torch.empty(0)

    return {"SparseLoCo": (codec.bytes(rows * rows), least(make_a_step))}


def measure_sums(nbytes: int) -> dict[str, list[int]]:
    """Returns the same for sums of all ranks, and of every second rank."""
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    counts = {}
    for name, ranks in (("all", list(range(size))), ("part", list(range(0, size, 2)))):
        group = dist.new_group(ranks)
        x = torch.full((nbytes // 4,), float(rank))

        def allreduce(group: dist.ProcessGroup = group, x: Tensor = x, ranks: list[int] = ranks) -> Tensor:
            result = x.clone()
            if rank in ranks:
                dist.all_reduce(result, group=group)
            return result

        counts[name] = least(allreduce, torch.full_like(x, sum(ranks)) if rank in ranks else x)
    return counts
