"""Many ranks on one machine: compares start, small operations, end, memory and descriptors of fog and Gloo.

    python benchmarks/scale.py                                  # 4, 16 and 32 ranks, several minutes
    python benchmarks/scale.py --ranks 64 --rounds 3 --json scale.json

Ranks are forked from this process after it has imported torch, fogdist and fog's extension, so no time has imports. In
each round a world of each system starts, works and ends, in random order. The results are the median and the
quartiles over the rounds. Each phase of a world has a time limit: a world that exceeds it is ended and reported, its
earlier results count, and the program continues. The rows, in milliseconds except for the last three:

    start           from the command to begin until the last rank has completed its first allreduce (8 B)
    group           from new_group of all ranks until the last one has completed its first allreduce in it
    barrier, allreduce, neighbors
                    the time of one of several calls in a row; neighbors is the mean with the two adjacent ranks, with
                    Gloo by sends and receives
    end             from the command to end until the last process has ended: destroy_process_group and exit
                    handlers, without the finalization of Python, which is the same for both systems
    private MiB     private memory, without pages that are still shared after the fork; the largest of all ranks
    mapped MiB      mapped shared memory without fog's arenas, which only reserve addresses
    descriptors     the open descriptors, without those that existed at the fork

Ranks outnumber the cores and share them, so the times are those of the whole machine.

Each rank has its connection to the Store before the fork. A TCPStore looks up the name of each host that connects. If
the name server does not answer, each lookup takes seconds and would dominate `start` in both systems. For the same
reason Gloo listens at 127.0.0.1 (GLOO_SOCKET_IFNAME=lo unless it is set), so that it looks up no name.
"""

from __future__ import annotations

import os

# Thread pools do not survive a fork.
os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import fogdist
import networkx  # noqa: F401  fogdist imports it at the first topology, which would be in each rank
import numpy as np
import program
import torch
import torch.distributed as dist
from forked_ranks import ForkedWorld, WorldFailed, die_with_parent, keep_store, obey
from interleaved import Times
from report import Row, Table, parse_size, spread, write

SYSTEMS = {"fog": "fog", "gloo": "Gloo"}
TABLE = Table(SYSTEMS, [("fog", "gloo")])
SIZES = [8, 4 << 10, 1 << 20]
# The time of the operations in a row, in seconds, and their least and largest number.
ROW_SECONDS, LEAST, MOST = 2.0, 2, 20
# The default time limit of a phase.
PHASE_SECONDS = 60.0

# The prefixes of the names of shared memory: anonymous files except fog's arenas, files of MPI, System V segments.
_SHARED = ("/memfd:fog_inbox", "/dev/shm/", "/dev/zero", "/SYSV")

# An operation and the bytes of its tensor.
Key = tuple[str, int]


class Rank:
    """The phases that a forked process runs on command. Each returns the times of its begin and end, in seconds."""

    def __init__(self, system: str, rank: int, size: int, store: dist.TCPStore, timeout: timedelta) -> None:
        self.system, self.rank, self.size, self.store, self.timeout = system, rank, size, store, timeout
        self.descriptors = len(os.listdir("/proc/self/fd"))

    def ready(self) -> list[float]:
        """Does nothing; its answer shows that the fork is done."""
        return []

    def start(self) -> list[float]:
        """Joins the group."""
        dist.init_process_group(
            self.system, store=self.store, rank=self.rank, world_size=self.size, timeout=self.timeout
        )
        dist.all_reduce(torch.ones(2))
        return [0.0, time.perf_counter()]  # it began with the command

    def group(self) -> list[float]:
        """Makes a group of all ranks."""
        begin = time.perf_counter()
        group = dist.new_group(timeout=self.timeout)
        dist.all_reduce(torch.ones(2), group=group)
        return [begin, time.perf_counter()]

    def call(self, operation: str, x: torch.Tensor) -> Callable[[], object]:
        """Returns a function that runs the operation on `x`, a tensor of ones."""
        if operation == "barrier":
            return dist.barrier
        if operation == "allreduce":
            return lambda: dist.all_reduce(x.fill_(1))
        ring = {(self.rank + hop) % self.size: 1 / 3 for hop in (1, -1)}
        if self.system != "fog":
            return lambda: exchange(x, list(ring))
        fogdist.init()
        return lambda: fogdist.neighbor_allreduce(
            x, self_weight=1 / 3, src_weights=ring, dst_weights=list(ring), enable_topo_check=False
        )

    def repeat(self, operation: str, size: int, count: int) -> list[float]:
        """Runs a number of operations in a row, on tensors of a given size in bytes."""
        x = torch.ones(size // 4)
        call = self.call(operation, x)
        result = call()
        expected = torch.ones_like(x) * (self.size if operation == "allreduce" else 1)
        # torch.testing would import sympy, which is 500 modules, on each rank.
        if not torch.allclose(x if operation != "neighbors" else result, expected):
            raise AssertionError(f"{operation} of {size} bytes: wrong result on rank {self.rank}")
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        end = time.perf_counter()
        return [begin / count, end / count]

    def memory(self) -> list[float]:
        """Returns the private and mapped MiB, and the number of descriptors."""
        rollup = dict(
            line.split()[:2] for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
        )
        mapped = 0
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, permissions, _, _, _, *name = line.split()
            if permissions.endswith("s") and name and name[0].startswith(_SHARED):
                first, last = (int(address, 16) for address in addresses.split("-"))
                mapped += last - first
        private = sum(int(rollup[name]) for name in ("Private_Clean:", "Private_Dirty:"))
        return [private / 1024, mapped / 2**20, len(os.listdir("/proc/self/fd")) - self.descriptors]


def exchange(x: torch.Tensor, peers: Sequence[int]) -> torch.Tensor:
    """Computes the mean with these ranks, which do the same, by sends and receives."""
    others = [torch.empty_like(x) for _ in peers]
    work = [dist.irecv(other, peer) for other, peer in zip(others, peers, strict=True)]
    work += [dist.isend(x, peer) for peer in peers]
    for each in work:
        each.wait()
    return torch.stack([x, *others]).mean(0)


def serve(
    connection: Connection, system: str, rank: int, size: int, store: dist.TCPStore, timeout: timedelta
) -> None:
    """Runs a forked rank from its begin to its end."""
    die_with_parent()
    torch.set_num_threads(1)
    obey(connection, rank, Rank(system, rank, size, store, timeout))


class World(ForkedWorld):
    """The ranks of one system, from their fork to their end; the title is that of the system.

    Args:
        system: The backend's name in torch.distributed.
        size: The number of ranks.
        limit: The time limit of a phase in seconds.
    """

    def __init__(self, system: str, size: int, limit: float) -> None:
        super().__init__(SYSTEMS[system], size, limit)
        self.system = system

    def fork_all(self) -> None:
        """Starts the Store and the ranks, each with its connection."""
        self.fork(keep_store)
        port = self.port()
        timeout = timedelta(seconds=self.limit)
        for rank in range(self.size):
            try:
                store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
            except dist.DistError as error:
                raise self.failed(f"connection {rank} with the Store", str(error)) from error
            self.fork(serve, self.system, rank, self.size, store, timeout)

    def time(self, *word: object) -> float:
        """Runs a phase on all ranks and returns its milliseconds."""
        told, times = self.ask(*word)
        begins, ends = np.array(times).T
        return 1e3 * (ends.max() - (begins.min() if begins.any() else told))


def measure(world: World, sizes: Sequence[int], found: dict[Key, float]) -> None:
    """Runs one world and adds its results to `found`, including those from before a failure."""
    world.fork_all()
    world.ask("ready")
    found["start", 0] = world.time("start")
    found["group", 0] = world.time("group")
    keys: list[Key] = [
        ("barrier", 0),
        *((name, each) for name in ("allreduce", "neighbors") for each in sizes),
    ]
    for key in keys:
        once = world.time("repeat", *key, LEAST)
        count = min(MOST, int(1e3 * ROW_SECONDS / once))
        found[key] = world.time("repeat", *key, count) if count > LEAST else once
    memory = np.max(world.ask("memory")[1], 0)
    for name, value in zip(("private MiB", "mapped MiB", "descriptors"), memory, strict=True):
        found[name, 0] = float(value)
    found["end", 0] = world.end()


def rows_of(size: int, sizes: Sequence[int], rounds: int, limit: float, failures: list[str]) -> list[Row]:
    """Runs the rounds of both systems' worlds in turn; failures are added to `failures`."""
    samples: dict[str, list[dict[Key, float]]] = {system: [] for system in SYSTEMS}
    draw = random.Random(size)
    for number in range(rounds):
        for system in draw.sample(list(SYSTEMS), len(SYSTEMS)):
            found: dict[Key, float] = {}
            begin = time.perf_counter()
            try:
                with World(system, size, limit) as world:
                    measure(world, sizes, found)
            except WorldFailed as failure:
                failures.append(str(failure))
                print(failure, file=sys.stderr)
            samples[system].append(found)
            print(
                f"{size} ranks, round {number + 1} of {rounds}, {SYSTEMS[system]}: start {found.get(('start', 0), np.nan):.0f} ms, "
                f"{time.perf_counter() - begin:.0f} s in all",
                file=sys.stderr,
                flush=True,
            )

    def row(name: str, count: int) -> Row:
        times = {}
        for system in SYSTEMS:
            values = [sample[name, count] for sample in samples[system] if (name, count) in sample]
            if values and np.median(values) > 0:  # otherwise the system has no such value
                times[system] = Times(**spread(values))
        return Row(name, size, count, rounds, times)

    keys = dict.fromkeys(
        key for each in zip(*samples.values(), strict=True) for sample in each for key in sample
    )
    return [row(*key) for key in keys]


def main() -> None:
    """Runs the benchmark."""
    parser = program.parser_of(__doc__)
    add = parser.add_argument
    add("--ranks", type=program.at_least(3), nargs="+", default=[4, 16, 32], help="numbers of ranks")
    add("--sizes", type=parse_size, nargs="+", metavar="BYTES", default=SIZES, help="such as 8, 4K, 1M")
    add("--rounds", type=program.at_least(1), default=5, help="worlds of each system")
    limit = "seconds that a phase of a world may take"
    add("--limit", type=program.positive, default=PHASE_SECONDS, metavar="SECONDS", help=limit)
    add("--json", type=Path, help="file for the numbers")
    arguments = parser.parse_args()
    about = program.facts()
    rows: list[Row] = []
    failures: list[str] = []
    for ranks in arguments.ranks:
        found = rows_of(ranks, arguments.sizes, arguments.rounds, arguments.limit, failures)
        print(f"\n{ranks} ranks on {os.cpu_count()} cores\n{TABLE.heading()}")
        print("\n".join(map(TABLE.line, found)), flush=True)
        rows += found
    if arguments.json:
        write(arguments.json, facts=about, failures=failures, rows=list(map(asdict, rows)))
    if failures:
        sys.exit(f"{len(failures)} worlds did not come to their end:\n" + "\n".join(failures))


if __name__ == "__main__":
    main()
