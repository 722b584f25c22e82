"""Many ranks on one machine: start, small operations and end, memory and descriptors, fog beside Gloo.

    python benchmarks/scale.py                                  # 4, 16 and 32 ranks, some minutes
    python benchmarks/scale.py --ranks 64 --rounds 3 --json scale.json --plot scale.png

Ranks are forked from this process, which has imported torch, fogdist and fog's extension: imports count nowhere. In each
round a world of each system starts, works and ends, in an order drawn anew; kept are the median and the quartiles over
the rounds. Each phase of a world has its time: a world that does not keep it is ended and named, its rows so far count, and the
program goes on. Rows, in milliseconds but for the last three:

    start           from the word to begin, given to all ranks, until the last one has its first allreduce (8 B)
    group           new_group of all ranks until the last one has its first allreduce in it
    barrier, allreduce, neighbors
                    one of several in a row; neighbors is the mean with the two ranks beside this one, in Gloo's world
                    by its sends and receives
    end             from the word to end until the last process has gone: destroy_process_group and what is
                    registered for the exit, without the finalization of Python, which is the same for all
    private MiB     memory of a rank that is its own, the largest of all ranks: what fork has not had to copy is not
    mapped MiB      shared memory that it maps, but for fog's arenas, which are addresses only
    descriptors     open ones, but for those that it was forked with

Ranks outnumber the cores, so times are those of the whole machine: n ranks of two cores take turns.

Each rank is forked with a connection of its own to the Store. A TCPStore looks up the name of whoever connects, and on a machine whose name
server does not answer each lookup takes seconds, in both systems: `start` would tell of that alone. Gloo listens at 127.0.0.1
(GLOO_SOCKET_IFNAME=lo unless it is set), so that it looks up no name either.
"""

from __future__ import annotations

import argparse
import os

# Pools of threads would not outlive a fork.
os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import gc
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import fogdist
import networkx  # noqa: F401  fogdist imports it at the first topology, which would be in each rank
import numpy as np
import program
import torch
import torch.distributed as dist
from forked_ranks import ForkedWorld, WorldFailed, die_with_parent, obey
from goals import Goal, print_goals
from interleaved import Times
from report import Row, Table, size_text, write_json

from fog_pg._extension import load as load_extension

SYSTEMS = {"fog": "fog", "gloo": "Gloo"}
TABLE = Table(SYSTEMS, [("fog", "gloo")])
GOALS = [Goal("start", ranks, 0, "fog", "gloo", 1.5) for ranks in (32, 64)]
SIZES = [8, 4 << 10, 1 << 20]
# Operations in a row: as many as take that long, at least and at most so many.
ROW_SECONDS, LEAST, MOST = 2.0, 2, 20
# What a phase may take by default.
PHASE_SECONDS = 60.0

# How names of shared memory begin: anonymous files but for fog's arenas, files of MPI, segments of System V.
_SHARED = ("/memfd:fog_inbox", "/dev/shm/", "/dev/zero", "/SYSV")

# An operation and the bytes of its tensor.
Key = tuple[str, int]


class Rank:
    """What a forked process does when it is told to; each phase returns when it began and ended, in seconds."""

    def __init__(self, system: str, rank: int, size: int, store: dist.TCPStore, timeout: timedelta) -> None:
        self.system, self.rank, self.size, self.store, self.timeout = system, rank, size, store, timeout
        self.descriptors = len(os.listdir("/proc/self/fd"))

    def ready(self) -> list[float]:
        """The fork is done."""
        return []

    def start(self) -> list[float]:
        """Joins the others."""
        dist.init_process_group(
            self.system, store=self.store, rank=self.rank, world_size=self.size, timeout=self.timeout
        )
        dist.all_reduce(torch.ones(2))
        return [0.0, time.perf_counter()]  # it began with the word

    def group(self) -> list[float]:
        """Makes a group of all ranks."""
        begin = time.perf_counter()
        group = dist.new_group(timeout=self.timeout)
        dist.all_reduce(torch.ones(2), group=group)
        return [begin, time.perf_counter()]

    def call(self, operation: str, x: torch.Tensor) -> Callable[[], object]:
        """The operation, on ones."""
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
        """So many operations in a row, on tensors of so many bytes."""
        x = torch.ones(size // 4)
        call = self.call(operation, x)
        result = call()
        expected = torch.ones_like(x) * (self.size if operation == "allreduce" else 1)
        # Not by torch.testing, which would import sympy, 500 modules, in each rank.
        if not torch.allclose(x if operation != "neighbors" else result, expected):
            raise AssertionError(f"{operation} of {size} bytes: wrong result on rank {self.rank}")
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        end = time.perf_counter()
        return [begin / count, end / count]

    def facts(self) -> dict[str, object]:
        """About the run."""
        return program.facts()

    def memory(self) -> list[float]:
        """Private and mapped MiB, and descriptors."""
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
    """The mean with these ranks, who do the same, by sends and receives."""
    others = [torch.empty_like(x) for _ in peers]
    work = [dist.irecv(other, peer) for other, peer in zip(others, peers, strict=True)]
    work += [dist.isend(x, peer) for peer in peers]
    for each in work:
        each.wait()
    return torch.stack([x, *others]).mean(0)


def serve(
    connection: Connection, system: str, rank: int, size: int, store: dist.TCPStore, timeout: timedelta
) -> None:
    """The life of a forked rank."""
    die_with_parent()
    torch.set_num_threads(1)
    obey(connection, rank, Rank(system, rank, size, store, timeout))


def keep_store(connection: Connection) -> None:
    """The process that has the Store, as torchrun does: no rank waits for another one to make it."""
    die_with_parent()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connection.send(store.port)
    connection.recv()
    os._exit(0)


class World(ForkedWorld):
    """Ranks of one system, from their fork to their end.

    Args:
        system: Of torch.distributed.
        size: The number of ranks.
        limit: Seconds that a phase may take.
    """

    def __init__(self, system: str, size: int, limit: float) -> None:
        super().__init__(SYSTEMS[system], size, limit)
        self.system = system

    def fork_all(self) -> None:
        """Makes the Store and the ranks, each with its connection."""
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
        """Milliseconds of a phase of all ranks together."""
        told, times = self.ask(*word)
        begins, ends = np.array(times).T
        return 1e3 * (ends.max() - (begins.min() if begins.any() else told))


@contextmanager
def world_of(system: str, size: int, limit: float) -> Iterator[World]:
    """A world that is gone afterwards, whatever happens."""
    world = World(system, size, limit)
    try:
        world.fork_all()
        yield world
    finally:
        world.close()


def facts(limit: float) -> dict[str, object]:
    """About the run, from ranks of fog: this process must not load MPI."""
    with world_of("fog", 3, limit) as world:
        world.ask("start")
        return world.ask("facts")[1][0]


def measure(world: World, sizes: Sequence[int], found: dict[Key, float]) -> None:
    """One world's life, into `found`; what came before a failure is there as well."""
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
    """Rounds of both systems' worlds, one after the other; what went wrong is added to `failures`."""
    samples: dict[str, list[dict[Key, float]]] = {system: [] for system in SYSTEMS}
    draw = random.Random(size)
    for number in range(rounds):
        for system in draw.sample(list(SYSTEMS), len(SYSTEMS)):
            found: dict[Key, float] = {}
            begin = time.perf_counter()
            try:
                with world_of(system, size, limit) as world:
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
            if values and np.median(values) > 0:  # else it has none
                lower, median, upper = np.percentile(values, [25, 50, 75])
                times[system] = Times(float(median), float(lower), float(upper))
        return Row(name, size, "float32", count // 4, count, 0, rounds, times)

    keys = dict.fromkeys(
        key for each in zip(*samples.values(), strict=True) for sample in each for key in sample
    )
    return [row(*key) for key in keys]


def plot(path: Path, rows: Sequence[Row], systems: Mapping[str, str]) -> None:
    """Draws each operation over the number of ranks."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    keys = list(dict.fromkeys((row.operation, row.bytes) for row in rows))
    columns = 4
    lines = -(-len(keys) // columns)
    figure, panels = plt.subplots(
        lines, columns, figsize=(4 * columns, 3 * lines), squeeze=False, layout="constrained"
    )
    for panel, (name, count) in zip(panels.flat, keys, strict=False):
        shown = sorted(
            (row for row in rows if (row.operation, row.bytes) == (name, count)), key=lambda r: r.ranks
        )
        x = [row.ranks for row in shown]
        for system, title in systems.items():
            each = [row.times[system] for row in shown if system in row.times]
            if len(each) < len(x):
                continue
            (line,) = panel.plot(x, [t.median for t in each], marker=".", label=title)
            panel.fill_between(
                x, [t.lower for t in each], [t.upper for t in each], color=line.get_color(), alpha=0.2
            )
        panel.set_title(f"{name} {size_text(count)}" if count else name)
        panel.set_xscale("log", base=2)
        panel.set_xticks(x, list(map(str, x)))
        panel.set_ylim(bottom=0)
        panel.set_ylabel("" if name.startswith(("private", "mapped", "descriptors")) else "ms")
        panel.grid(alpha=0.3)
    for panel in panels.flat[len(keys) :]:
        panel.set_visible(False)
    panels.flat[0].legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[4, 16, 32], help="numbers of ranks")
    add(
        "--sizes",
        type=program.parse_size,
        nargs="+",
        metavar="BYTES",
        default=SIZES,
        help="such as 8, 4K, 1M",
    )
    add("--rounds", type=int, default=5, help="worlds of each system")
    add(
        "--limit",
        type=float,
        default=PHASE_SECONDS,
        metavar="SECONDS",
        help="what a phase of a world may take",
    )
    add("--json", type=Path, help="file for the numbers")
    add("--plot", type=Path, help="file for a picture")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or min(arguments.ranks) < 3 or not arguments.limit > 0:
        parser.error("--rounds must be 1 or more, --ranks 3 or more, --limit more than 0")
    load = os.getloadavg()[0]
    if load > program.BUSY:
        print(f"load average {load:.1f} before the start: other programs run, and these numbers contain them")
    load_extension()
    # Forked processes then neither traverse nor copy these objects.
    gc.collect()
    gc.freeze()
    about = facts(arguments.limit) if arguments.json else {}
    rows: list[Row] = []
    failures: list[str] = []
    for ranks in arguments.ranks:
        found = rows_of(ranks, arguments.sizes, arguments.rounds, arguments.limit, failures)
        print(f"\n{ranks} ranks on {os.cpu_count()} cores\n{TABLE.heading()}")
        print("\n".join(map(TABLE.line, found)), flush=True)
        rows += found
    print_goals(GOALS, rows, SYSTEMS)
    if arguments.json:
        write_json(arguments.json, {**about, "load average before": load, "failures": failures}, rows)
    if arguments.plot:
        plot(arguments.plot, rows, SYSTEMS)
    if failures:
        sys.exit(f"{len(failures)} worlds did not come to their end:\n" + "\n".join(failures))


if __name__ == "__main__":
    main()
