"""Compares fog's one-sided transfers between hosts (MPI RMA) with raw MPI and fog's TCP, in one run.

    python benchmarks/rma.py                                   # some minutes
    python benchmarks/rma.py --operations exchange --sizes 1M 16M

Run it without a launcher: it starts its ranks itself, under mpiexec (see side_by_side.py). MPI treats every rank as a
separate node, which is checked, and reaches the others by UCX over shared memory. Like RDMA, which it represents, that
moves data without help of the target. The operations are of 2 ranks:

    put, stopped          rank 0 puts into a window; rank 1 is stopped (SIGSTOP)
    put, computing        the same; rank 1 multiplies matrices
    exchange              neighbor_allreduce: both ranks send their tensor, and both get the mean
    exchange, computing   both start it, multiply matrices for some ms (COMPUTE_MS) in the main thread, then wait for
                          it; columns have the time in excess of the matrices alone
    one-way, computing    the same, but rank 0 only sends and waits, and rank 1 receives and computes

The size is that of a rank's float32 tensor. The columns, in milliseconds:

    fog rma        fog with FOG_BETWEEN_HOSTS=rma
    fog tcp        fog with FOG_BETWEEN_HOSTS=tcp: its own connections, without MPI
    raw MPI        mpi4py on the same MPICH and the same fabric. put: MPI_Put and MPI_Win_flush. exchange: MPI_Put in
                   pieces of 1 MiB, flush, an 8-byte version by MPI_Put, flush; the receiver polls the version without
                   sleep, then a sum of numpy; two buffers in turn

A process cannot change fog's setting, so there are two pairs of ranks, one for each setting. The systems take
turns (see interleaved.py), and a pair sleeps during the turn of the other one. Raw MPI runs in the processes of the
first pair. The time of a put is that of rank 0, the time of an exchange the longer one of the two ranks. The first
results of every system are checked.

The numbers do not include a network card: the time is that of copies by the CPU, and both ranks share the
machine's memory. Raw MPI has no headers, no checks that ranks agree, no timeouts and no handling of lost ranks. It
copies all data before the matrices are multiplied, while fog's thread works at the same time.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import fogdist
import numpy as np
import program
import side_by_side
import torch
from fogdist import topology
from interleaved import LONG_NAP, Times, sleep_until_all_come, take_turns
from numpy.typing import NDArray
from report import Row, Table
from side_by_side import Systems

from fog_pg._C import NeighborPlan

if TYPE_CHECKING:
    from mpi4py import MPI


# The values of FOG_BETWEEN_HOSTS, one for each pair of ranks, which are also the transports that fog must then use.
TRANSPORTS = ["rma", "tcp"]
# MPI and fog treat every rank as a separate node.
ENVIRONMENT = {"UCX_TLS": "shm,self", "MPIR_CVAR_NOLOCAL": "1", "_FOG_LOCAL_LINKS": "0"}
OPERATIONS = ["put, stopped", "put, computing", "exchange", "exchange, computing", "one-way, computing"]
SIZES = [64 << 10, 256 << 10, 1 << 20, 16 << 20]
RANKS = 2
SYSTEMS = {"rma": "fog rma", "tcp": "fog tcp", "raw": "raw MPI"}
TABLE = Table(SYSTEMS, [("rma", "raw"), ("tcp", "rma")])
COMPUTE = "compute"
# The size of the pieces in which raw MPI puts.
PIECE = 1 << 20
# The number of rows and columns of the matrices.
MATRIX = 256
COMPUTE_MS = 5.0
# The least difference, in milliseconds, between exchanges and compute: the difference of two medians may be negative.
LEAST = 1e-3
# Relative tolerance: the inputs are positive, and their sums are rounded a few times in float32.
TOLERANCE = 2e-6
# Seconds within which a process stops.
STOP_TIMEOUT = 10.0

Array = NDArray[np.float32]
Way = Callable[[], object]


@dataclass(frozen=True)
class World:
    """The state of a rank.

    Attributes:
        everyone: Raw MPI's communicator of all pairs.
        number: The number of this rank's pair, from 0.
        systems: The systems of this pair.
        pids: The process IDs of the pair.
        compute: Multiplies matrices for about COMPUTE_MS.
        signals: The number of times that the other rank of the pair has told this one to continue.
    """

    everyone: MPI.Intracomm
    number: int
    systems: Systems
    pids: Sequence[int]
    compute: Way
    signals: list[int]

    @property
    def rank(self) -> int:
        """This rank, in its pair."""
        return self.systems.rank

    @property
    def other(self) -> int:
        """The other one."""
        return 1 - self.rank

    def pair(self, number: int) -> MPI.Intracomm | None:
        """Raw MPI's communicator of a pair, None if this rank is not in it."""
        return self.systems.mpi if number == self.number else None


def join() -> World:
    """Starts raw MPI and fog in this process, and checks that they use the expected transports.

    Raises:
        RuntimeError: They use another transport.
    """
    from mpi4py import MPI  # the import initializes MPI

    signals: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: signals.append(number))
    everyone = MPI.COMM_WORLD
    number = everyone.rank // RANKS
    if (on_node := everyone.Split_type(MPI.COMM_TYPE_SHARED).size) != 1:
        raise RuntimeError(
            f"raw MPI takes {on_node} ranks for one node: its data would not go over the fabric"
        )
    os.environ["FOG_BETWEEN_HOSTS"] = TRANSPORTS[number]
    systems = side_by_side.join(ranks=everyone.Split(number))  # type: ignore[arg-type]

    fogdist.init()
    fogdist.set_topology(topology.by_name("exp2", RANKS))
    if (transport := fogdist.transport(1 - systems.rank)) != TRANSPORTS[number]:
        raise RuntimeError(f"fog reaches the other rank by {transport}, not by {TRANSPORTS[number]}")
    pids = systems.mpi.allgather(os.getpid())
    return World(everyone, number, systems, pids, matrices(everyone), signals)


def matrices(everyone: MPI.Intracomm) -> Way:
    """What multiplies matrices for about COMPUTE_MS, as many on all ranks."""
    a = torch.rand(MATRIX, MATRIX)
    product = torch.empty_like(a)

    def some(count: int) -> None:
        for _ in range(count):
            torch.mm(a, a, out=product)

    some(10)
    begin = time.perf_counter()
    some(100)
    one = 1e3 * (time.perf_counter() - begin) / 100
    return partial(some, everyone.bcast(max(1, round(COMPUTE_MS / one))))


class RawWindow:
    """A window of raw MPI: two buffers of a tensor's size that are used in turn, and the number of the last exchange.

    Args:
        mpi: Of both ranks.
        elements: Of a tensor.
    """

    def __init__(self, mpi: MPI.Intracomm, elements: int) -> None:
        from mpi4py import MPI

        self._other = 1 - mpi.rank
        self._bytes = elements * np.dtype(np.float32).itemsize
        self._at_version = -(-2 * self._bytes // 64) * 64
        self._window = MPI.Win.Allocate(self._at_version + 8, 1, comm=mpi)
        memory = np.frombuffer(self._window.tomemory(), np.uint8)  # type: ignore[call-overload]  # a buffer it is
        memory[:] = 0  # pages are allocated at the first write
        self.buffers: list[Array] = list(memory[: 2 * self._bytes].view(np.float32).reshape(2, elements))
        self._version = memory[self._at_version :].view(np.int64)
        self._window.Lock_all(MPI.MODE_NOCHECK)
        mpi.Barrier()

    def put(self, tensor: Array) -> None:
        """MPI_Put and MPI_Win_flush."""
        self._window.Put(tensor, self._other, 0)
        self._window.Flush(self._other)

    def notified_put(self, tensor: Array, number: int) -> None:
        """Puts a tensor in pieces, then its number."""
        data, to = tensor.view(np.uint8), (number % 2) * self._bytes
        for first in range(0, self._bytes, PIECE):
            self._window.Put(data[first : first + PIECE], self._other, to + first)
        self._window.Flush(self._other)
        self._window.Put(np.array([number], np.int64), self._other, self._at_version)
        self._window.Flush(self._other)

    def wait_for(self, number: int) -> Array:
        """The tensor with that number, once it is here."""
        while self._version[0] < number:
            self._window.Sync()
        return self.buffers[number % 2]

    def free(self) -> None:
        """The end; collective."""
        self._window.Unlock_all()
        self._window.Free()


class Peers(NamedTuple):
    """Whether this rank receives in an exchange, and whether it sends."""

    receives: bool
    sends: bool


@dataclass(frozen=True)
class Exchange:
    """A system's exchange.

    Attributes:
        start: Begins one; what it returns is for `finish`.
        finish: Waits for it.
        result: Where the mean is then.
    """

    start: Callable[[], Any]
    finish: Callable[[Any], object]
    result: Array

    def way(self, compute: Way | None = None) -> Way:
        """What exchanges, and computes meanwhile."""

        def go() -> None:
            pending = self.start()
            if compute is not None:
                compute()
            self.finish(pending)

        return go


def exchange_of_fog(world: World, x: Array, peers: Peers) -> Exchange:
    """The backend's operation, with a plan that is there, into an output that is there."""
    there = [(world.other, 1.0)]
    plan = NeighborPlan(
        world.rank, RANKS, 1.0, there if peers.receives else [], there if peers.sends else [], mean=True
    )
    tensor, output = torch.from_numpy(x), torch.full((x.size,), float("nan"))
    return Exchange(
        lambda: world.systems.backend.neighbor_allreduce(tensor, plan, output=output),
        lambda work: work.wait(),
        output.numpy(),
    )


def mean_of(x: Array, received: Array, out: Array) -> None:
    """What neighbor_allreduce of two ranks makes."""
    np.add(x, received, out=out)
    np.multiply(out, 0.5, out=out)


def exchange_by_puts(window: RawWindow, x: Array, peers: Peers) -> Exchange:
    """Raw MPI over a window."""
    out = np.full_like(x, np.nan)
    numbers = itertools.count(1)

    def start() -> int:
        number = next(numbers)
        if peers.sends:
            window.notified_put(x, number)
        return number

    def finish(number: int) -> None:
        if peers.receives:
            mean_of(x, window.wait_for(number), out)
        else:
            np.copyto(out, x)

    return Exchange(start, finish, out)


def input_of(rank: int, elements: int) -> Array:
    """Rank r's tensor is base + r, exactly: 10 random bits, the same on all ranks, and r."""
    base = np.random.default_rng(elements).integers(0, 1 << 10, elements).astype(np.float32)
    return np.asarray(base / (1 << 10) + 1 + rank, np.float32)


def check(world: World, what: str, got: Array, expected: Array) -> None:
    """Raises RuntimeError if a system's result is not what it should be."""
    if not np.allclose(got, expected, rtol=TOLERANCE, atol=0):
        raise RuntimeError(f"{what}: wrong result on rank {world.rank} of pair {world.number}")


def measure_exchange(world: World, operation: str, elements: int, arguments: argparse.Namespace) -> Row:
    """Checks and times an exchange at one size; all pairs call this together."""
    x, mpi = input_of(world.rank, elements), world.systems.mpi
    computes = operation.endswith("computing")
    one_way = operation.startswith("one-way")
    peers = Peers(receives=not one_way or world.rank == 1, sends=not one_way or world.rank == 0)
    mean = x.copy()
    if peers.receives:
        mean_of(x, input_of(world.other, elements), mean)
    exchanges: dict[str, Exchange] = {}
    window = None
    exchanges[TRANSPORTS[world.number]] = exchange_of_fog(world, x, peers)
    if world.number == 0:
        window = RawWindow(mpi, elements)
        exchanges["raw"] = exchange_by_puts(window, x, peers)
    for name, exchange in exchanges.items():
        for _ in range(3):  # each of the buffers once, and the first one again
            exchange.result.fill(np.nan)
            mpi.Barrier()
            exchange.way()()
            check(world, f"{operation} of {elements} elements, {SYSTEMS[name]}", exchange.result, mean)
    pairs = {"rma": 0, "tcp": 1, "raw": 0}
    compute = world.compute if computes and peers.receives else None
    ways = {name: exchanges[name].way(compute) if name in exchanges else _nothing for name in pairs}
    if computes:
        pairs[COMPUTE], ways[COMPUTE] = 0, compute or _nothing
    times, iterations = take_turns(
        ways,
        world.everyone,
        arguments,
        apart={name: world.pair(pair) for name, pair in pairs.items()},
    )
    if computes:
        times = beyond_compute(times)
    if window is not None:
        window.free()
    return Row(operation, RANKS, 4 * elements, iterations, times)


def _nothing() -> None:
    """What a rank does that has no part."""


def beyond_compute(times: Mapping[str, Times]) -> dict[str, Times]:
    """Takes the median of compute from all others."""
    alone = times[COMPUTE].median
    beyond = {
        name: Times(*(max(time_ - alone, LEAST) for time_ in (of.median, of.lower, of.upper)))
        for name, of in times.items()
        if name != COMPUTE
    }
    return {**beyond, COMPUTE: times[COMPUTE]}


def measure_put(world: World, operation: str, elements: int, arguments: argparse.Namespace) -> Row | None:
    """Checks and times puts at one size on rank 0 of the first pair, while its rank 1 is busy otherwise.

    All pairs call this together; the others sleep.

    Returns:
        The row; None on all ranks but rank 0.
    """
    row = _put_in_pair(world, operation, elements, arguments) if world.number == 0 else None
    sleep_until_all_come(world.everyone, LONG_NAP)
    return row


def _put_in_pair(world: World, operation: str, elements: int, arguments: argparse.Namespace) -> Row | None:
    from mpi4py import MPI

    mpi, x = world.systems.mpi, input_of(0, elements)
    tensor = torch.from_numpy(x)
    fog: fogdist.Window = fogdist.Window(torch.zeros(elements))
    raw = RawWindow(mpi, elements)
    ways: dict[str, Way] = {"rma": lambda: fog.put(tensor), "raw": lambda: raw.put(x)}
    if world.rank == 0:
        for way in ways.values():
            way()
    mpi.Barrier()
    what = f"put of {elements} elements"
    if world.rank == 1:
        slot = fog.update(self_weight=0.0, neighbor_weights={0: 1.0}, clone=True)
        check(world, f"{what}, {SYSTEMS['rma']}", slot.numpy(), x)
        check(world, f"{what}, {SYSTEMS['raw']}", raw.buffers[0], x)
    row = None
    until = len(world.signals) + 1
    mpi.Barrier()
    if world.rank == 0:
        with busy(world.pids[1], operation.endswith("stopped")):
            times, iterations = take_turns(ways, MPI.COMM_SELF, arguments)
        row = Row(operation, RANKS, 4 * elements, iterations, times)
    else:
        while len(world.signals) < until:
            if operation.endswith("computing"):
                world.compute()
            else:
                time.sleep(LONG_NAP)
    mpi.Barrier()
    fog.free()
    raw.free()
    return row


@contextlib.contextmanager
def busy(pid: int, is_stopped: bool) -> Iterator[None]:
    """Tells a process at the end to go on: it multiplies matrices until then, or is stopped."""
    try:
        if is_stopped:
            os.kill(pid, signal.SIGSTOP)
            end = time.monotonic() + STOP_TIMEOUT
            while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
                if time.monotonic() > end:
                    raise RuntimeError(f"process {pid} did not stop")
                time.sleep(LONG_NAP)
        yield
    finally:
        os.kill(pid, signal.SIGUSR1)  # comes when it goes on
        os.kill(pid, signal.SIGCONT)


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Measures on a rank."""
    world = join()
    for operation, size in itertools.product(arguments.operations, arguments.sizes):
        of_kind = measure_put if operation.startswith("put") else measure_exchange
        row = of_kind(world, operation, max(1, size // 4), arguments)
        if row is not None:
            yield row


def run_pairs(ranks: int, script: Path, words: Sequence[str]) -> None:
    """Runs a pair of ranks for each transport."""
    side_by_side.run_ranks(ranks * len(TRANSPORTS), script, words, environment=ENVIRONMENT)


def main() -> None:
    """Starts the ranks; on a rank, measures."""
    parser = program.parser_of(__doc__)
    program.add_options(parser, ranks=[RANKS], seconds=3.0, sizes=SIZES)
    program.add_names(parser, "--operations", OPERATIONS)
    arguments = parser.parse_args()
    if arguments.ranks != [RANKS]:
        parser.error(f"--ranks: {' '.join(map(str, arguments.ranks))}; this benchmark has {RANKS} ranks")
    program.run(__file__, arguments, measure, TABLE.line, TABLE.heading(), run_pairs)


if __name__ == "__main__":
    main()
