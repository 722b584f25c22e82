"""Compares fog's one-sided windows with those of raw MPI and the limit of memory, in one run.

    python benchmarks/windows.py                                # 2 and 4 ranks, about five minutes
    python benchmarks/windows.py --ranks 2 --operations put "put alone" --sizes 4K 1M

Run it without a launcher: it starts its ranks itself, under mpiexec (see side_by_side.py). The systems take turns for
each operation and size (see interleaved.py). The neighbors are those of the static exponential-2 graph: d = 1 with 2
ranks, d = 2 with 4. The operations:

    put            writes each rank's tensor into its slots at its d out-neighbors
    get            copies the tensors of the d in-neighbors into their slots
    accumulate     as put, but adds the tensor to the slot
    update         the mean of a rank's tensor and its d slots, in place
    put+update     one after the other, as a step of decentralized training does; ranks do not wait for each other

All ranks do this at the same time, so they share the memory bandwidth. In "put alone" and similar rows only rank 0 does
it and the others sleep. The size is that of a rank's float32 tensor. The columns, in milliseconds:

    fog        fogdist.Window, with default arguments
    fog_pg     the backend's own methods with prepared lists of neighbors, which excludes the Python code of fogdist;
               up to 1 MiB
    MPI        raw MPI: mpi4py's Put, Get, Accumulate in a window of MPI_Win_allocate (shared memory, too), under
               one MPI_Win_lock_all, each with a flush; sums of numpy. Unlike fog, it does not prevent sums from
               reading a half-written put
    memory     the least memory traffic: d copies; for accumulate d sums of two arrays; for update a sum of d + 1
               arrays; always of the same private arrays of the rank (see memory_limit.py)
    one place  the same for put and get, but each copy goes to the same array each time

fog replaces the value of a slot atomically, so it writes each put or get to another buffer than the previous one,
mostly to two in turn. "memory" does so too, so its target is equally cold in the cache. "one place" copies to an array
that was written just before, which is faster if it is still in a cache. MPI has one buffer per slot.

The first results of every system are checked. If all ranks take part, a barrier precedes each measurement.
--back-to-back 100 measures an operation in a loop.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import fogdist
import memory_limit
import numpy as np
import program
import side_by_side
import torch
from fogdist import topology
from interleaved import Times, sleep_until_all_come, take_turns
from numpy.typing import NDArray
from report import Row, Table
from side_by_side import Systems

from fog_pg._C import Window as BackendWindow

if TYPE_CHECKING:
    from mpi4py import MPI

SINGLE = ["put", "get", "accumulate", "update"]
TOGETHER = [*SINGLE, "put+update"]
ALONE = {f"{name} alone": name for name in TOGETHER}
OPERATIONS = [*TOGETHER, *ALONE]
SIZES = [4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
# Above this size the time of Python does not matter.
LARGEST_OF_BACKEND = 1 << 20
SYSTEMS = {
    "fog": "fog",
    "fog_pg": "fog_pg",
    "mpi": "MPI",
    "memory": "memory",
    "one_place": "one place",
}
TABLE = Table(SYSTEMS, [("fog", "memory"), ("mpi", "memory"), ("fog", "mpi")])
# The number of buffers that successive writes to a slot use in turn.
BUFFERS = 2
# The seconds between two checks of a sleeping rank.
NAP = 0.02
# Relative tolerance: the inputs are positive, and their sums are rounded a few times in float32.
TOLERANCE = 2e-6

Array = NDArray[np.float32]
Way = Callable[[], object]


@dataclass(frozen=True)
class Place:
    """A rank in the graph.

    Attributes:
        rank: This rank.
        sources: Its in-neighbors, ascending.
        destinations: Its out-neighbors, ascending.
        slots: For each of these the number of this rank's slot there.
    """

    rank: int
    sources: list[int]
    destinations: list[int]
    slots: list[int]

    @property
    def weight(self) -> float:
        """Of each term of an update."""
        return 1 / (len(self.sources) + 1)


def place_of(rank: int, size: int) -> Place:
    """Sets the topology; returns what it is for this rank."""
    graph = topology.by_name("exp2", size)
    fogdist.set_topology(graph)

    def others(ranks: Sequence[int], but: int) -> list[int]:
        return sorted(other for other in ranks if other != but)

    destinations = others(list(graph.successors(rank)), rank)
    slots = [others(list(graph.predecessors(there)), there).index(rank) for there in destinations]
    return Place(rank, others(list(graph.predecessors(rank)), rank), destinations, slots)


@dataclass(frozen=True)
class Side:
    """A system's window in this rank.

    Attributes:
        tensor: This rank's.
        ways: The operations of `SINGLE`, by name.
        slot: The value of a source's slot.
        free: Ends the window; collective.
    """

    tensor: Array
    ways: Mapping[str, Way]
    slot: Callable[[int], Array]
    free: Way

    def way(self, operation: str) -> Way:
        """What does an operation of `TOGETHER`."""
        return in_turn([self.ways[part] for part in operation.split("+")])


def in_turn(ways: Sequence[Way]) -> Way:
    """One way that goes all of these."""
    if len(ways) == 1:
        return ways[0]

    def each() -> None:
        for way in ways:
            way()

    return each


def on_fogdist(window: fogdist.Window) -> Side:
    """fog as users call it."""
    tensor = window.tensor
    return Side(
        tensor.numpy(),
        {
            "put": lambda: window.put(tensor),
            "get": lambda: window.get(),
            "accumulate": lambda: window.accumulate(tensor),
            "update": lambda: window.update(),
        },
        lambda source: window.update(self_weight=0.0, neighbor_weights={source: 1.0}, clone=True).numpy(),
        window.free,
    )


def on_backend(window: BackendWindow, weight: float) -> Side:
    """The backend's methods."""
    tensor = window.tensor
    to, of = ([(peer, 1.0) for peer in peers] for peers in (window.out_neighbors, window.in_neighbors))
    mean = [(peer, weight) for peer in window.in_neighbors]
    return Side(
        tensor.numpy(),
        {
            "put": lambda: window.put(tensor, to).wait(),
            "get": lambda: window.get(of).wait(),
            "accumulate": lambda: window.accumulate(tensor, to).wait(),
            "update": lambda: window.update(weight, mean),
        },
        lambda source: window.update(0.0, [(source, 1.0)], clone=True).numpy(),
        window.free,
    )


def on_mpi(mpi: MPI.Intracomm, place: Place, elements: int) -> Side:
    """Raw MPI: a window of the tensor and, behind it, the slots."""
    from mpi4py import MPI

    d, itemsize = len(place.sources), np.dtype(np.float32).itemsize
    window = MPI.Win.Allocate((1 + d) * elements * itemsize, itemsize, comm=mpi)
    memory = np.frombuffer(window.tomemory(), np.float32)  # type: ignore[call-overload]  # a buffer it is
    memory[:] = 0  # pages are allocated at the first write
    tensor, *slots = np.split(memory, 1 + d)
    targets = [
        (there, ((1 + slot) * elements, elements, MPI.FLOAT))
        for there, slot in zip(place.destinations, place.slots, strict=True)
    ]
    window.Lock_all()

    def put() -> None:
        for there, part in targets:
            window.Put(tensor, there, part)
        for there, _ in targets:
            window.Flush(there)

    def accumulate() -> None:
        for there, part in targets:
            window.Accumulate(tensor, there, part, MPI.SUM)
        for there, _ in targets:
            window.Flush(there)

    def get() -> None:
        for source, slot in zip(place.sources, slots, strict=True):
            window.Get(slot, source, (0, elements, MPI.FLOAT))
        for source in place.sources:
            window.Flush(source)

    def update() -> None:
        window.Sync()
        for slot in slots:
            np.add(tensor, slot, out=tensor)
        np.multiply(tensor, place.weight, out=tensor)
        window.Sync()

    def slot_of(source: int) -> Array:
        window.Sync()
        return slots[place.sources.index(source)]

    def free() -> None:
        window.Unlock_all()
        window.Free()

    ways = {"put": put, "get": get, "accumulate": accumulate, "update": update}
    return Side(tensor, ways, slot_of, free)


def in_memory(operation: str, d: int, elements: int, buffers: int = BUFFERS) -> Way:
    """Returns what memory must at least carry, with arrays of its own, as each system has.

    Args:
        operation: One of `TOGETHER`.
        d: Number of neighbors.
        elements: Of a tensor.
        buffers: For each neighbor, that copies go to in turn.
    """
    x, total = array(elements), array(elements)
    slots = [[array(elements) for _ in range(d)] for _ in range(buffers)]
    puts = [in_turn([memory_limit.sum_of([x], to) for to in slot]) for slot in slots]
    updates = [memory_limit.sum_of([x, *slot], total) for slot in slots]
    if operation in ("put", "get"):
        return _by_turns(puts)
    if operation == "accumulate":
        pairs = [
            zip(slot, last, strict=True) for slot, last in zip(slots, [slots[-1], *slots[:-1]], strict=True)
        ]
        return _by_turns([in_turn([memory_limit.sum_of([old, x], to) for to, old in pair]) for pair in pairs])
    if operation == "update":
        return updates[0]
    return _by_turns([in_turn([put, update]) for put, update in zip(puts, updates, strict=True)])


def array(elements: int) -> Array:
    """Filled, as what has not been written has no memory of its own yet."""
    return np.full(elements, 1, np.float32)


def _by_turns(ways: Sequence[Way]) -> Way:
    """With each call the next of these."""
    if len(ways) == 1:
        return ways[0]
    turns = itertools.cycle(ways)
    return lambda: next(turns)()


def check(system: str, side: Side, mpi: MPI.Intracomm, place: Place) -> None:
    """Does each operation once and compares what it did; leaves means of the ranks' tensors behind."""
    # Rank r's tensor is base + r, exactly: 10 random bits, the same on all ranks, and r.
    elements = len(side.tensor)
    base = np.random.default_rng(elements).integers(0, 1 << 10, elements).astype(np.float32) / (1 << 10) + 1
    side.tensor[:] = base + place.rank

    def do(operation: str, factor: float) -> None:
        mpi.Barrier()
        side.ways[operation]()
        mpi.Barrier()
        for source in place.sources:
            if not np.array_equal(side.slot(source), factor * (base + source)):
                raise RuntimeError(
                    f"{operation} of {elements} elements: {system} has a wrong slot of rank {source} on rank {place.rank}"
                )

    do("put", 1)
    do("accumulate", 2)
    do("get", 1)
    mpi.Barrier()  # no tensor may change while other ranks get it
    side.ways["update"]()
    mean = base + np.mean([place.rank, *place.sources])
    if not np.allclose(side.tensor, mean, rtol=TOLERANCE, atol=0):
        raise RuntimeError(f"update of {elements} elements: wrong result of {system} on rank {place.rank}")
    mpi.Barrier()


def turns_of_rank_0(
    ways: Mapping[str, Way], mpi: MPI.Intracomm, arguments: argparse.Namespace
) -> tuple[dict[str, Times], int]:
    """Times them on rank 0 while the others sleep."""
    from mpi4py import MPI

    measured = take_turns(ways, MPI.COMM_SELF, arguments) if mpi.rank == 0 else None
    sleep_until_all_come(mpi, NAP)
    result: tuple[dict[str, Times], int] = mpi.bcast(measured)
    return result


def measure_size(size: int, systems: Systems, place: Place, arguments: argparse.Namespace) -> Iterator[Row]:
    """Checks and times all operations at one size."""
    d, mpi = len(place.sources), systems.mpi
    elements = max(1, size // torch.float32.itemsize)
    bytes_ = elements * torch.float32.itemsize
    sides = {"fog": on_fogdist(fogdist.Window(torch.zeros(elements)))}
    if bytes_ <= LARGEST_OF_BACKEND:
        window = systems.backend.create_window(
            torch.zeros(elements), "of the backend", place.sources, place.destinations
        )
        sides["fog_pg"] = on_backend(window, place.weight)
    sides["mpi"] = on_mpi(mpi, place, elements)
    for system, side in sides.items():
        check(system, side, mpi, place)
    for name in arguments.operations:
        operation = ALONE.get(name, name)
        ways = {system: side.way(operation) for system, side in sides.items()}
        ways["memory"] = in_memory(operation, d, elements)
        if operation in ("put", "get"):
            ways["one_place"] = in_memory(operation, d, elements, buffers=1)
        times, iterations = (turns_of_rank_0 if name in ALONE else take_turns)(ways, mpi, arguments)
        del ways  # their arrays
        yield Row(name, systems.size, bytes_, iterations, times)
        for side in sides.values():
            side.tensor.fill(1.0)  # sums do not grow beyond what float32 has
            mpi.Barrier()
            side.ways["put"]()
    for side in sides.values():
        mpi.Barrier()
        side.free()


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Measures on a rank."""
    systems = side_by_side.join()
    fogdist.init()
    place = place_of(systems.rank, systems.size)
    for size in arguments.sizes:
        yield from measure_size(size, systems, place, arguments)


def main() -> None:
    """Starts the ranks of each world in turn; on a rank, measures."""
    parser = program.parser_of(__doc__)
    program.add_options(parser, ranks=[2, 4], seconds=1.5, sizes=SIZES)
    program.add_names(parser, "--operations", OPERATIONS)
    arguments = parser.parse_args()
    if min(arguments.ranks) < 2:
        parser.error(f"--ranks: {min(arguments.ranks)}; a window takes 2 or more")
    program.run(__file__, arguments, measure, TABLE.line, TABLE.heading())


if __name__ == "__main__":
    main()
