"""Times fog, Gloo, raw MPI and the limit of memory in one run of the same processes.

    python benchmarks/collectives.py                              # 2 and 4 ranks, about five minutes
    python benchmarks/collectives.py --ranks 4 --ops allreduce --sizes 4K 64M
    python benchmarks/collectives.py --ranks 4 --hosts 2 --ops allreduce     # as root: two ranks on each emulated host

Run it without a launcher: it starts its ranks itself, under mpiexec (see side_by_side.py). The systems take turns for
each operation and size (see interleaved.py). The columns, in milliseconds:

    fog      torch.distributed on fog
    MPI      raw MPI: mpi4py on the MPICH that fog uses
    Gloo     torch.distributed on Gloo
    torch    torch.distributed on a backend that sends nothing: the time of torch's own layers
             (allgather and all_to_all still copy the rank's own part)
    memory   all ranks at once copy the least number of bytes that the operation must move

The size is that of the larger buffer of a rank: the whole input of reduce_scatter, the whole output of allgather. With
n ranks and size S, an operation must read each input and write each output at least once, so all ranks together move

    allreduce        n S + n S        all_to_all    n S + n S
    broadcast        S + (n - 1) S    allgather     S + n S        reduce_scatter    n S + S
    send/recv        n/2 S + n/2 S    one way, between n/2 pairs at once; half the time of a round trip

In the column "memory" each rank copies 1/n of half of these bytes. No algorithm through memory is faster, unless data
stay in a cache. All systems use the same tensors, and the result of each is checked first.

With --hosts the ranks are on emulated hosts (emulated_hosts.py), whose links tc limits to --rate. All three systems
then use TCP between hosts. Raw MPI also uses it within a host, because it cannot be told which ranks share one.

A barrier precedes each measurement, so the time of a small operation includes ranks that leave the barrier late,
especially if ranks outnumber cores. --back-to-back 100 measures an operation in a loop, in which the root of a
broadcast may run ahead. --pause 5 measures the time after all ranks have slept for 5 ms, from the last rank's call.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import program
import side_by_side
import torch
import torch.distributed as dist
from emulated_hosts import ACROSS, INTERFACE, Unavailable, address, emulated_hosts
from interleaved import take_turns
from report import Row, Table
from side_by_side import Systems

OPERATIONS = ["allreduce", "broadcast", "allgather", "reduce_scatter", "all_to_all", "send/recv", "barrier"]
ITEMSIZE = 4  # of float32
SIZES = [4, 256, 4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
SYSTEMS = {"fog": "fog", "mpi": "MPI", "gloo": "Gloo", "nothing": "torch", "memory": "memory"}
TABLE = Table(SYSTEMS, [("fog", "mpi"), ("gloo", "fog"), ("fog", "memory")])
# Raw MPI treats all ranks of this machine as one host, in spite of their network namespaces.
ON_HOSTS = {
    **ACROSS["UCX"],
    "MPIR_CVAR_NOLOCAL": "1",
    "FOG_BETWEEN_HOSTS": "tcp",
    "GLOO_SOCKET_IFNAME": INTERFACE,
}

Way = Callable[[], object]


class Case(NamedTuple):
    """One operation at one size on this rank.

    Attributes:
        moved: How many tensors of the larger buffer's size all ranks together must read and write.
        on_group: The operation on a group of torch.distributed.
        on_mpi: The operation on raw MPI.
        fill: Sets the buffers before the check.
        holds: Returns whether the buffers hold the result.
    """

    moved: int
    on_group: Callable[[dist.ProcessGroup], object]
    on_mpi: Way
    fill: Way = lambda: None
    holds: Callable[[], bool] = lambda: True


def make_case(operation: str, systems: Systems, size: int) -> tuple[int, Case]:
    """Prepares an operation on about `size` bytes, with at least one element for each rank that gets a part.

    Returns:
        The bytes of the larger buffer, and the operation.
    """
    from mpi4py import MPI

    mpi, rank, n = systems.mpi, systems.rank, systems.size
    if operation == "barrier":
        return 0, Case(0, lambda g: dist.barrier(g), mpi.Barrier)
    wanted = size // ITEMSIZE
    split = operation in ("allgather", "reduce_scatter", "all_to_all")
    block = max(1, wanted // n)
    elements = block * n if split else max(1, wanted)
    # The value of rank r; sums of these values are exact.
    mark, total = float(rank + 1), n * (n + 1) / 2
    marks = torch.arange(1, n + 1, dtype=torch.float32)

    def tensor(count: int) -> torch.Tensor:
        # filled, because pages of torch.zeros are allocated at the first write
        return torch.zeros(count).fill_(0)

    def filled(of: torch.Tensor, value: float) -> bool:
        return bool((of == value).all())

    x, y = tensor(elements), tensor(elements if operation in ("all_to_all", "send/recv") else block)
    a, b = x.numpy(), y.numpy()  # they share the memory
    peer = rank ^ 1

    def there_and_back(send: Way, receive: Way) -> None:
        for way in (send, receive) if rank < peer else (receive, send):
            way()

    def fill(target: torch.Tensor, source: torch.Tensor, values: torch.Tensor | float = mark) -> None:
        target.zero_()
        source.copy_(torch.as_tensor(values).expand_as(source))

    parts = marks.repeat_interleave(block) if split else marks
    cases = {
        "allreduce": Case(
            2 * n,
            lambda g: dist.all_reduce(x, group=g),
            lambda: mpi.Allreduce(MPI.IN_PLACE, a),
            lambda: fill(y, x),
            lambda: filled(x, total),
        ),
        "broadcast": Case(
            n,
            lambda g: dist.broadcast(x, group=g, group_src=0),
            lambda: mpi.Bcast(a, 0),
            lambda: fill(y, x),
            lambda: filled(x, 1),
        ),
        "allgather": Case(
            n + 1,
            lambda g: dist.all_gather_into_tensor(x, y, group=g),
            lambda: mpi.Allgather(b, a),
            lambda: fill(x, y),
            lambda: torch.equal(x, parts),
        ),
        "reduce_scatter": Case(
            n + 1,
            lambda g: dist.reduce_scatter_tensor(y, x, group=g),
            lambda: mpi.Reduce_scatter_block(a, b),
            lambda: fill(y, x, parts * mark),
            lambda: filled(y, mark * total),
        ),
        "all_to_all": Case(
            2 * n,
            lambda g: dist.all_to_all_single(y, x, group=g),
            lambda: mpi.Alltoall(a, b),
            lambda: fill(y, x, parts * mark),
            lambda: torch.equal(y, parts * mark),
        ),
        "send/recv": Case(
            n,
            lambda g: there_and_back(
                lambda: dist.send(x, group=g, group_dst=peer), lambda: dist.recv(y, group=g, group_src=peer)
            ),
            lambda: there_and_back(lambda: mpi.Send(a, peer), lambda: mpi.Recv(b, peer)),
            lambda: fill(y, x),
            lambda: filled(y, peer + 1),
        ),
    }
    return elements * ITEMSIZE, cases[operation]


def measure_one(operation: str, systems: Systems, size: int, arguments: argparse.Namespace) -> Row:
    """Checks and times one operation at one size on all systems."""
    bytes_, case = make_case(operation, systems, size)
    ways: dict[str, Way] = {"fog": lambda: case.on_group(systems.fog), "mpi": case.on_mpi}
    ways["gloo"] = lambda: case.on_group(systems.gloo)
    for name, way in ways.items():
        case.fill()
        way()
        if not case.holds():
            raise RuntimeError(f"{operation} of {size} bytes: wrong result of {name} on rank {systems.rank}")
        systems.mpi.Barrier()
    case.fill()
    ways["nothing"] = lambda: case.on_group(systems.nothing)
    calls = 2 if operation == "send/recv" else 1  # there and back
    if case.moved:
        copied = max(1, calls * case.moved * bytes_ // (2 * systems.size))
        source, destination = np.full(copied, 1, np.uint8), np.full(copied, 2, np.uint8)
        ways["memory"] = lambda: np.copyto(destination, source)
    times, iterations = take_turns(ways, systems.mpi, arguments)
    of_one = {name: each.divided(calls) for name, each in times.items()}
    return Row(operation, systems.size, bytes_, iterations, of_one)


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Measures on a rank."""
    systems = side_by_side.join(address(0)) if arguments.hosts else side_by_side.join()
    for operation in arguments.ops:
        for size in [0] if operation == "barrier" else arguments.sizes:
            yield measure_one(operation, systems, size, arguments)


def parse_arguments() -> argparse.Namespace:
    """Returns the checked command line."""
    parser = program.parser_of(__doc__)
    program.add_options(parser, ranks=[2, 4], seconds=1.5, sizes=SIZES)
    program.add_pause(parser)
    program.add_names(parser, "--ops", OPERATIONS)
    add = parser.add_argument
    add("--hosts", type=program.at_least(1), help="emulated hosts, each with as many ranks")
    add("--rate", default="10gbit", help="of each host's link, in the words of tc: 400mbit")
    arguments = parser.parse_args()
    for ranks in arguments.ranks:
        if ranks % 2 and "send/recv" in arguments.ops:
            parser.error(f"--ranks: {ranks}; send/recv needs an even number")
        if arguments.hosts and ranks % arguments.hosts:
            parser.error(f"--hosts: {arguments.hosts}; {ranks} ranks must be a multiple of it")
    return arguments


def run_on_hosts(number: int, rate: str, ranks: int, script: Path, words: Sequence[str]) -> None:
    """Runs the ranks on emulated hosts, the first ones on the first one; ends the program where there can be none."""
    try:
        with emulated_hosts(number, rate) as names:
            places = [names[rank * number // ranks] for rank in range(ranks)]
            side_by_side.run_ranks(ranks, script, words, places, ON_HOSTS)
    except Unavailable as reason:
        sys.exit(f"emulated hosts: {reason}")


def main() -> None:
    """Starts the ranks of each world in turn; on a rank, measures."""
    arguments = parse_arguments()
    start = side_by_side.run_ranks
    if arguments.hosts:
        start = partial(run_on_hosts, arguments.hosts, arguments.rate)
    program.run(__file__, arguments, measure, TABLE.line, TABLE.heading(), start)


if __name__ == "__main__":
    main()
