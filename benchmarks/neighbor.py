"""Compares exchanges with neighbors on fog with raw MPI, Gloo, allreduce and the limit of memory, in one run.

    python benchmarks/neighbor.py                               # 2, 4 and 8 ranks, about five minutes
    python benchmarks/neighbor.py --ranks 4 --exchanges exp2 one-peer --sizes 4K 16M

Run it without a launcher: it starts its ranks itself, under mpiexec (see side_by_side.py). The systems take turns for
each exchange and size (see interleaved.py). The exchanges, all with uniform weights:

    exp2           static exponential-2 graph: all ranks at distance 1, 2, 4, ...
    one-peer       dynamic one-peer exponential graph: in each call one rank, at distance 1, 2, 4, ... in turn
    ring           static ring: both sides
    complete       every rank with every other rank
    hierarchical   two emulated machines, which exchange their means (with an even number of 4 or more ranks)

The size is that of a rank's float32 tensor. The columns, in milliseconds:

    fog mem        fog with tensor and result in fog's memory (fogdist.empty); the result tensor is reused
    fog            the same with ordinary tensors
    fog new        fogdist.neighbor_allreduce(x) with an ordinary x: the operation allocates its result
    MPI            raw MPI: mpi4py's Irecv, Isend and Waitall on the MPICH that fog uses, then sums of numpy
    Gloo           irecv and isend of torch.distributed on Gloo, then sums of torch
    fog all        fog's allreduce of a tensor of this size, in place, in ordinary memory
    Gloo all       Gloo's allreduce
    memory         each rank sums d + 1 private arrays into one, all ranks at once (see memory_limit.py)

MPI, Gloo and the columns "fog mem" and "fog" use existing buffers; these two call the backend's operation with a
prepared plan and an output. "fog new" calls fogdist as a training loop does: each call looks up its weights
(one-peer also advances the generator of peers) and returns a new tensor, which is freed within the measurement.
There one-peer exchanges run without the check of the topology, as in fogdist's optimizers, and static exchanges with
their default, which makes a sender wait until its receivers have agreed.

d is the number of ranks that a rank receives from. An exchange must read at least d + 1 tensors and write one on each
rank. The inputs of "memory" are d + 1 different arrays on each rank, but the n ranks of an exchange together read only
n tensors. If these fit into a shared cache, an exchange can be faster than "memory". A hierarchical exchange must read
and write each tensor at least once, so its "memory" is a copy. In "complete", sharing the sums among ranks, as an
allreduce does, can be faster too. Raw MPI and Gloo exchange hierarchically through one rank of each machine: reduce,
exchange, broadcast.

The first results of every system, for one-peer of all steps, are checked against the float64 mixing matrix. A barrier
precedes each measurement, so the time of a small exchange includes ranks that leave the barrier late, especially if
ranks outnumber cores. --back-to-back 100 measures an exchange in a loop. --pause 5 measures the time after all ranks
have slept for 5 ms, from the last rank's call.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import fogdist
import memory_limit
import numpy as np
import program
import side_by_side
import torch
import torch.distributed as dist
from fogdist import topology
from fogdist.topology import Topology
from interleaved import take_turns
from numpy.typing import NDArray
from report import Row, Table
from side_by_side import Systems
from torch import Tensor

from fog_pg._C import NeighborPlan

if TYPE_CHECKING:
    from mpi4py import MPI

EXCHANGES = ["exp2", "one-peer", "ring", "complete", "hierarchical"]
SIZES = [4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
# Fewer sizes for many ranks on few cores, where each size takes long.
FEWER_SIZES = [4 << 10, 1 << 20, 16 << 20]
MANY_RANKS = 8
MACHINES = 2
SYSTEMS = {
    "fog_memory": "fog mem",
    "fog": "fog",
    "fog_new": "fog new",
    "mpi": "MPI",
    "gloo": "Gloo",
    "fog_allreduce": "fog all",
    "gloo_allreduce": "Gloo all",
    "memory": "memory",
}
TABLE = Table(
    SYSTEMS,
    [
        ("fog_memory", "memory"),
        ("fog", "memory"),
        ("fog_memory", "mpi"),
        ("fog", "mpi"),
        ("fog_allreduce", "fog_memory"),
    ],
)
# Relative tolerance: the inputs are positive, and their sums are rounded a few times in float32.
TOLERANCE = 2e-6


@dataclass(frozen=True)
class Exchange:
    """The edges and weights of an exchange.

    Attributes:
        name: One of EXCHANGES.
        topology: Of ranks, or of machines if it is hierarchical, with uniform weights; calls go through its rounds in turn.
        ranks_per_node: 1, or the number of ranks of a machine.
    """

    name: str
    topology: Topology
    ranks_per_node: int = 1

    @property
    def steps(self) -> int:
        """The number of different rounds."""
        return self.topology.period

    def matrix(self, step: int) -> NDArray[np.float64]:
        """Returns the mixing matrix of the ranks at a step."""
        inside = np.full((self.ranks_per_node, self.ranks_per_node), 1 / self.ranks_per_node)
        return np.kron(self.topology.matrix(step), inside)

    def peers(self, rank: int) -> Iterator[dict[str, Any]]:
        """Yields the self_weight, src_weights and dst_weights of a rank's node, without end."""
        node = rank // self.ranks_per_node
        return itertools.cycle([self.topology.peers(node, step) for step in range(self.steps)])


def make_exchange(name: str, size: int) -> Exchange | str:
    """Returns an exchange among `size` ranks, or the reason why there is none."""

    def static(graph: str, nodes: int) -> Topology:
        return topology.Topology.from_graph(graph, topology.by_name(graph, nodes))

    if name == "one-peer":
        return Exchange(name, topology.one_peer_exponential(size))
    if name == "hierarchical":
        if size < 2 * MACHINES or size % MACHINES:
            return f"it takes a multiple of {MACHINES} ranks, and {2 * MACHINES} at least"
        return Exchange(name, static("full", MACHINES), size // MACHINES)
    if size == 2 and name != "exp2":
        return "between two ranks it is exp2"
    return Exchange(name, static({"complete": "full"}.get(name, name), size))


@dataclass(frozen=True)
class World:
    """The state of a rank for all exchanges.

    Attributes:
        systems: The systems of this run.
        machine: Communicator of raw MPI among this rank's emulated machine; None if ranks do not divide.
        gloo_machine: Group of Gloo of the same ranks.
    """

    systems: Systems
    machine: MPI.Comm | None
    gloo_machine: dist.ProcessGroup | None


def join() -> World:
    """Starts all systems on a rank."""
    systems = side_by_side.join()
    n, machine, gloo_machine = systems.size, None, None
    if n % MACHINES == 0:
        per_machine = n // MACHINES
        os.environ["FOG_NODES_PER_MACHINE"] = str(per_machine)
        machine = systems.mpi.Split(systems.rank // per_machine, systems.rank)
        for first in range(0, n, per_machine):
            ranks = list(range(first, first + per_machine))
            group = dist.new_group(ranks, backend="gloo", timeout=side_by_side.TIMEOUT)
            if systems.rank in ranks:
                gloo_machine = group
    fogdist.init()
    return World(systems, machine, gloo_machine)


Way = Callable[[], Tensor]


def on_backend(world: World, exchange: Exchange, x: Tensor, y: Tensor) -> Way:
    """Returns the backend's operation with an existing output."""
    nodes = exchange.topology.size

    def plan(step: int) -> NeighborPlan:
        node = world.systems.rank // exchange.ranks_per_node
        peers = exchange.topology.peers(node, step)
        sources, destinations = ([(p, 1.0) for p in peers[side]] for side in ("src_weights", "dst_weights"))
        return NeighborPlan(node, nodes, 1.0, sources, destinations, mean=True)

    plans = itertools.cycle([plan(step) for step in range(exchange.steps)])
    backend, n, per_machine = world.systems.backend, world.systems.size, exchange.ranks_per_node
    machines = [list(range(first, first + per_machine)) for first in range(0, n, per_machine)]

    def way() -> Tensor:
        if per_machine > 1:
            backend.hierarchical_neighbor_allreduce(x, machines, next(plans), output=y).wait()
        else:
            backend.neighbor_allreduce(x, next(plans), output=y).wait()
        return y

    return way


def on_fogdist(world: World, exchange: Exchange, x: Tensor) -> Way:
    """Returns the call of a training loop."""
    if exchange.ranks_per_node > 1:
        return lambda: fogdist.hierarchical_neighbor_allreduce(x)
    if exchange.name != "one-peer":
        return lambda: fogdist.neighbor_allreduce(x)
    peers = exchange.peers(world.systems.rank)
    return lambda: fogdist.neighbor_allreduce(x, **next(peers), enable_topo_check=False)


def on_messages(
    world: World, exchange: Exchange, x: Tensor, y: Tensor, received: list[Tensor], system: str
) -> Way:
    """Raw MPI with numpy, or Gloo with torch: receives and sends, then a sum; of machines through their first ranks."""
    from mpi4py import MPI

    per_node, mpi, gloo = exchange.ranks_per_node, world.systems.mpi, world.systems.gloo
    steps = exchange.peers(mpi.rank)
    is_mpi = system == "mpi"
    own, out, buffers = (x.numpy(), y.numpy(), [b.numpy() for b in received]) if is_mpi else (x, y, received)
    add, multiply = (np.add, np.multiply) if is_mpi else (torch.add, torch.mul)

    def exchange_with(peers: dict[str, Any], tensor: Any) -> None:
        """Exchanges between ranks, or between the first ranks of machines."""
        sources, destinations = (
            [p * per_node for p in peers[side]] for side in ("src_weights", "dst_weights")
        )
        arrived = buffers[: len(sources)]
        if is_mpi:
            requests = [mpi.Irecv(b, s) for b, s in zip(arrived, sources, strict=True)]
            MPI.Request.Waitall(requests + [mpi.Isend(tensor, to) for to in destinations])
        else:
            works: list[Any] = [
                dist.irecv(b, group=gloo, group_src=s) for b, s in zip(arrived, sources, strict=True)
            ]
            for work in works + [dist.isend(tensor, group=gloo, group_dst=to) for to in destinations]:
                work.wait()
        total = tensor
        for array in arrived:
            total = add(total, array, out=out)
        multiply(total, peers["self_weight"] / per_node, out=out)

    def flat() -> Tensor:
        exchange_with(next(steps), own)
        return y

    def hierarchical() -> Tensor:
        assert world.machine is not None
        peers = next(steps)
        if is_mpi:
            world.machine.Reduce(own, out, MPI.SUM, 0)
        else:
            dist.reduce(y.copy_(x), group=world.gloo_machine, group_dst=0)
        if world.machine.rank == 0:
            exchange_with(peers, out)
        if is_mpi:
            world.machine.Bcast(out, 0)
        else:
            dist.broadcast(y, group=world.gloo_machine, group_src=0)
        return y

    return hierarchical if per_node > 1 else flat


def measure_one(exchange: Exchange, world: World, size: int, arguments: argparse.Namespace) -> Row:
    """Checks and times one exchange at one size on all systems."""
    systems, n, rank = world.systems, world.systems.size, world.systems.rank
    elements = max(1, size // torch.float32.itemsize)
    # Rank r's tensor is base + r, exactly: 10 random bits, the same on all ranks, and r.
    base = torch.randint(0, 1 << 10, (elements,), generator=torch.Generator().manual_seed(elements))
    base = base.to(torch.float32).div_(1 << 10).add_(1)

    def tensor() -> Tensor:
        return torch.zeros(elements).fill_(0)  # as pages of torch.zeros are allocated at the first write

    x, y, z = base + rank, tensor(), tensor()
    in_degree = max(len(exchange.topology.peers(0, step)["src_weights"]) for step in range(exchange.steps))
    received = [tensor() for _ in range(in_degree)]
    ways: dict[str, Way] = {}
    x_memory, y_memory = fogdist.empty(elements).copy_(x), fogdist.empty(elements).zero_()
    ways["fog_memory"] = on_backend(world, exchange, x_memory, y_memory)
    ways["fog"] = on_backend(world, exchange, x, y)
    ways["fog_new"] = on_fogdist(world, exchange, x)
    for system in ("mpi", "gloo"):
        ways[system] = on_messages(world, exchange, x, y, received, system)

    def all_reduce(group: dist.ProcessGroup) -> Way:
        def way() -> Tensor:
            dist.all_reduce(z, group=group)
            return z

        return way

    ways["fog_allreduce"] = all_reduce(systems.fog)
    ways["gloo_allreduce"] = all_reduce(systems.gloo)

    if exchange.ranks_per_node > 1:
        fogdist.set_machine_topology(exchange.topology.graph())
    elif exchange.steps == 1:
        fogdist.set_topology(exchange.topology.graph())
    everything = np.ones((n, n))
    wide = base.to(torch.float64)
    for name, way in ways.items():
        for step in range(exchange.steps):
            is_allreduce = name in ("fog_allreduce", "gloo_allreduce")
            weights = (everything if is_allreduce else exchange.matrix(step))[:, rank]
            y.fill_(float("nan"))
            z.copy_(x)
            y_memory.fill_(float("nan"))
            systems.mpi.Barrier()  # no tensor may change while other ranks read it
            got = way()
            expected = wide * weights.sum() + float(weights @ np.arange(n))
            if not torch.allclose(got.to(torch.float64), expected, rtol=TOLERANCE, atol=0):
                raise RuntimeError(
                    f"{exchange.name} of {size} bytes, step {step}: wrong result of {name} on rank {rank}"
                )
            systems.mpi.Barrier()
    if not (torch.equal(x, base + rank) and torch.equal(x_memory, x)):
        raise RuntimeError(f"{exchange.name} of {size} bytes: a system changed the tensor of rank {rank}")
    del wide, base
    z.zero_()  # so that repeated sums do not grow

    # A hierarchical exchange must read each tensor once and write each once.
    read = [x] if exchange.ranks_per_node > 1 else [x, *received]
    limit = memory_limit.sum_of([array.numpy() for array in read], y.numpy())
    everyone: dict[str, Callable[[], object]] = {**ways, "memory": limit}
    times, iterations = take_turns(everyone, systems.mpi, arguments)
    return Row(exchange.name, n, elements * torch.float32.itemsize, iterations, times)


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Measures on a rank."""
    world = join()
    size = world.systems.size
    for name in arguments.exchanges:
        exchange = make_exchange(name, size)
        if isinstance(exchange, Exchange):
            for bytes_ in arguments.sizes or (SIZES if size < MANY_RANKS else FEWER_SIZES):
                yield measure_one(exchange, world, bytes_, arguments)
        elif world.systems.rank == 0:
            print(f"{name:21}left out: {exchange}", flush=True)


def main() -> None:
    """Starts the ranks of each world in turn; on a rank, measures."""
    parser = program.parser_of(__doc__)
    program.add_options(parser, ranks=[2, 4, 8], seconds=1.5, sizes=[])
    program.add_pause(parser)
    program.add_names(parser, "--exchanges", EXCHANGES)
    arguments = parser.parse_args()
    if min(arguments.ranks) < 2:
        parser.error(f"--ranks: {min(arguments.ranks)}; an exchange takes 2 or more")
    program.run(__file__, arguments, measure, TABLE.line, TABLE.heading())


if __name__ == "__main__":
    main()
