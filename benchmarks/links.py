"""Exchanges where links are slow: which share of a link's rate they use, and how many steps they make.

    python benchmarks/links.py                                        # as root, some minutes
    python benchmarks/links.py --world 8 100mbit 16x128K 1x4M --ways one-peer gloo --turns 5
    python benchmarks/links.py --world 8 100mbit 16x128K --ways one-peer allreduce gloo --cut 2
    python benchmarks/links.py --world 4 100mbit 16x128K --ways one-peer allreduce gloo --delay 20

Run it as root on Linux. Each host is a network namespace with one rank, and tc limits what its link carries, both ways
(emulated_hosts.py). A step exchanges some tensors, all in flight at the same time, as the buckets of a training are.
All ways of a world take turns in a random order; a turn begins with one step that does not count, and the others follow
without a barrier, so ranks may drift apart as in a training. Kept are the median and the quartiles, over the turns, of
the time of a step, from when the first rank begins until the last one ends.

"used" is the number of bytes that an exchange must send from each host, over those that its link could carry in that
time. That is the tensors once for one peer a step, twice for the ring, and 2 (n - 1) / n times for an allreduce of n
hosts: so one peer a step can make at most 2 (n - 1) / n as many steps as an allreduce. Headers take 4 to 5 % of a link.

Plain sockets show what the network itself allows in the same pattern: they send when they like, or once the receiver
has said that it has come to this step ("asked").

With --delay, the hosts are in two data centers, and the line between these takes so many milliseconds each way.

With --cut, the link of one host drops all packets for so many seconds in each turn. "back" says how long after its return
a second begins in which the ranks end at least 90 % as many steps as in a second before the cut.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import math
import os
import random
import select
import socket
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))

import fogdist
import program
import torch
import torch.distributed as dist
from cluster_ranks import PORT, ClusterRank, Job, emulated_world, prepare
from emulated_hosts import INTERFACE, Unavailable, address, cut_link, parse_rate, traffic
from fogdist import topology
from forked_ranks import ForkedWorld
from report import parse_size, size_text, spread, write
from torch import Tensor
from workloads import FLOAT_BYTES, Dilation

PHASE_SECONDS = 60.0
TURN_SECONDS = 2.0
# Of a turn, in seconds, before a link is cut.
BEFORE_CUT = 2.0
LEAST_STEPS, MOST_STEPS = 3, 200
# Of plain sockets: the largest piece that is sent or received at once.
PIECE = 256 << 10
ALLREDUCES = ["allreduce", "gloo"]
# By name: the heading.
WAYS = {
    "one-peer": "fog, one peer a step",
    "ring": "fog, ring",
    "allreduce": "fog, allreduce",
    "gloo": "Gloo, allreduce",
    "sockets one-peer": "sockets, one peer a step",
    "sockets one-peer, asked": "sockets, one peer, asked",
    "sockets ring": "sockets, ring",
}


@dataclass(frozen=True)
class World:
    """Hosts, the rate of their links, and what a step exchanges: so many tensors of so many bytes."""

    hosts: int
    rate: str
    tensors: int
    bytes: int


WORLDS = [
    World(4, "200mbit", 8, 1 << 20),
    World(8, "100mbit", 16, 128 << 10),
    World(8, "34mbit", 32, 128 << 10),
    World(16, "50mbit", 16, 128 << 10),
]


def volume(way: str, hosts: int) -> float:
    """How many times the tensors leave each host in a step."""
    if "one-peer" in way:
        return 1.0
    if "ring" in way:
        return min(2, hosts - 1)
    return 2 * (hosts - 1) / hosts


class LinkRank(ClusterRank):
    """A rank; the parent calls its methods by name."""

    def connect(self) -> None:
        """Connects plain sockets with all other ranks: one to send to each, and one to receive from each."""
        self.to: dict[int, socket.socket] = {}
        self.source: dict[int, socket.socket] = {}
        others = [other for other in range(self.size) if other != self.rank]
        with socket.create_server((address(self.rank), PORT + 2), backlog=self.size) as server:
            dist.barrier()
            for other in others:
                self.to[other] = socket.create_connection((address(other), PORT + 2), timeout=PHASE_SECONDS)
                self.to[other].sendall(bytes([self.rank]))
            for _ in others:
                connection, _ = server.accept()
                self.source[connection.recv(1)[0]] = connection
        for each in [*self.to.values(), *self.source.values()]:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            each.setblocking(False)
        self.graphs = {
            "one-peer": topology.one_peer_exponential(self.size),
            "ring": topology.Topology.from_graph("ring", topology.by_name("ring", self.size)),
        }
        self.buffer = bytearray(PIECE)

    def turn(self, way: str, world: World, steps: int) -> list[float]:
        """Makes one step, and then so many more; returns when each of these began, and when the last one ended."""
        numel = world.bytes // FLOAT_BYTES
        data = [torch.full((numel,), float(self.rank)) for _ in range(world.tensors)]
        dist.barrier()
        self._step(way, data, 0)
        times = [time.perf_counter()]
        for step in range(1, steps + 1):
            self._step(way, data, step)
            times.append(time.perf_counter())
        mean = (self.size - 1) / 2
        if way in ALLREDUCES and not all(torch.allclose(each, torch.tensor(mean)) for each in data):
            raise AssertionError(f"{way}: a wrong average")
        return times

    def _step(self, way: str, data: list[Tensor], step: int) -> None:
        system, _, name = way.removesuffix(", asked").rpartition(" ")
        if name in self.graphs:
            peers = self.graphs[name].peers(self.rank, step)
            if system == "sockets":
                size = sum(FLOAT_BYTES * each.numel() for each in data)
                self._by_sockets(list(peers["dst_weights"]), list(peers["src_weights"]), size, "asked" in way)
            else:
                works = [
                    fogdist.neighbor_allreduce(
                        each, out=each, async_op=True, enable_topo_check=False, **peers
                    )
                    for each in data
                ]
                for work in works:
                    work.wait()
            return
        group = self.gloo if way == "gloo" else None
        works = [dist.all_reduce(each, group=group, async_op=True) for each in data]
        for work, each in zip(works, data, strict=True):
            work.wait()
            each.div_(self.size)

    def _by_sockets(self, to: Sequence[int], source: Sequence[int], size: int, asked: bool) -> None:
        sending = {self.to[other]: size for other in to}
        coming = {self.source[other]: size for other in source}
        unasked = set(sending) if asked else set()
        for each in coming if asked else ():
            each.send(b"!")
        piece = memoryview(self.buffer)
        while sending or coming:
            readable, writable, _ = select.select(
                [*coming, *unasked], [each for each in sending if each not in unasked], [], PHASE_SECONDS
            )
            for each in readable:
                if each in unasked:
                    each.recv(1)
                    unasked.discard(each)
                    continue
                coming[each] -= each.recv_into(piece[: min(PIECE, coming[each])])
                if coming[each] == 0:
                    del coming[each]
            for each in writable:
                sending[each] -= each.send(piece[: min(PIECE, sending[each])])
                if sending[each] == 0:
                    del sending[each]


@contextlib.contextmanager
def cut_for(seconds: float, host: str) -> Iterator[list[float]]:
    """Cuts a host's link once during the block, for so long; the list then has when that began and ended."""
    moments: list[float] = []

    def cut() -> None:
        time.sleep(BEFORE_CUT)
        with cut_link(INTERFACE, namespace=host):
            moments.append(time.perf_counter())
            time.sleep(seconds)
        moments.append(time.perf_counter())

    if not seconds:
        yield moments
        return
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        cutting = thread.submit(cut)
        yield moments
        cutting.result()


def seconds_until_back(ends: Sequence[float], begin: float, cut: float, returned: float) -> float:
    """How long after a link's return the ranks again end 90 % as many steps in a second as before.

    Args:
        ends: When each step of each rank ended.
        begin: When the first one began.
        cut: When the link was cut.
        returned: When it returned.
    """
    usual = sum(end < cut for end in ends) / (cut - begin)
    for moment in sorted([returned, *ends]):
        if moment >= returned and sum(moment <= end < moment + 1 for end in ends) >= 0.9 * usual:
            return moment - returned
    return math.inf


def measure(world: World, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the points of one world, by way."""
    job = Job("", Dilation(1.0, 1.0), 0.0, timeout=PHASE_SECONDS)
    title = f"{world.hosts} hosts, {world.rate}"
    network = {"centers": 2, "delay": 1e-3 * arguments.delay} if arguments.delay else {}
    running = emulated_world(title, world.hosts, world.rate, PHASE_SECONDS, LinkRank, job, **network)
    with running as (ranks, hosts):
        ranks.ask("connect")
        return measure_turns(world, arguments, ranks, hosts)


def measure_turns(
    world: World, arguments: argparse.Namespace, ranks: ForkedWorld, hosts: Sequence[str]
) -> list[dict[str, Any]]:
    """Returns the points of one world that runs."""
    ways, turns = arguments.ways, arguments.turns
    link = parse_rate(world.rate) / 8
    seconds = arguments.seconds + (BEFORE_CUT + 3 if arguments.cut else 0)
    least = {way: volume(way, world.hosts) * world.tensors * world.bytes for way in ways}
    most = math.inf if arguments.cut else MOST_STEPS
    steps = {way: int(min(max(round(seconds * link / least[way]), LEAST_STEPS), most)) for way in ways}
    times, back = ({way: list[float]() for way in ways} for _ in range(2))
    sent: dict[str, float] = {}
    draw = random.Random(arguments.seed)
    for _ in range(turns):
        for way in draw.sample(list(ways), len(ways)):
            before = traffic(hosts)
            with cut_for(arguments.cut, hosts[-1]) as of_cut:
                ended = ranks.ask("turn", way, world, steps[way])[1]
            begin, end = min(each[0] for each in ended), max(each[-1] for each in ended)
            times[way].append((end - begin) / steps[way])
            if of_cut:
                back[way].append(
                    seconds_until_back([time for each in ended for time in each[1:]], begin, *of_cut)
                )
            after = traffic(hosts)
            carried = statistics.fmean(a[0] - b[0] for a, b in zip(after, before, strict=True))
            sent[way] = carried / (steps[way] + 1)
    points = []
    for way in ways:
        step = spread(times[way])
        points.append(
            {
                "hosts": world.hosts,
                "bits_per_s": 8 * link,
                "tensors": world.tensors,
                "bytes": world.bytes,
                "way": way,
                "steps": steps[way],
                "step_s": step,
                "used": least[way] / link / step["median"],
                "sent": sent[way] / least[way],
                **({"back_s": statistics.median(back[way])} if back[way] else {}),
            }
        )
    return points


def print_points(points: Sequence[Mapping[str, Any]]) -> None:
    """Prints the points of one world."""
    first, hosts = points[0], points[0]["hosts"]
    tensors = f"{first['tensors']} x {size_text(first['bytes'])}"
    print(f"\n{hosts} hosts, {first['bits_per_s'] / 1e6:g} Mbit/s, {tensors}")
    print(f"{'':28}{'ms a step':>10}{'quartiles':>18}{'steps/s':>9}{'used':>7}{'sent':>7}")
    for point in points:
        step = point["step_s"]
        quartiles = f"{1e3 * step['lower']:.1f} - {1e3 * step['upper']:.1f}"
        print(
            f"{WAYS[point['way']]:28}{1e3 * step['median']:>10.1f}{quartiles:>18}{1 / step['median']:>9.2f}"
            f"{point['used']:>7.1%}{point['sent']:>7.2f}"
            + (f"  back {point['back_s']:.2f} s" if "back_s" in point else "")
        )
    medians = {point["way"]: point["step_s"]["median"] for point in points}
    sums = [medians[way] for way in ALLREDUCES if way in medians]
    if "one-peer" in medians and sums:
        ahead, bound = min(sums) / medians["one-peer"], volume("allreduce", hosts)
        print(f"one peer a step / best allreduce: {ahead:.2f} steps, bound {bound:.2f}", flush=True)


def parse_worlds(words: Sequence[str]) -> list[World]:
    """Returns the worlds of "8 100mbit 16x128K 1x4M"."""
    hosts, rate, *tensors = words
    parse_rate(rate)
    if not 2 <= int(hosts) <= 32 or not tensors:
        raise ValueError("it needs 2 to 32 hosts, a rate and tensors, such as 16x128K")
    pairs = (each.partition("x") for each in tensors)
    return [World(int(hosts), rate, int(count), parse_size(size)) for count, _, size in pairs]


def parse_arguments() -> argparse.Namespace:
    """Returns the checked command line."""
    parser = program.parser_of(__doc__)
    add = parser.add_argument
    world = "hosts, rate and tensors, instead of the default's"
    add("--world", nargs="+", action="append", metavar="WORD", help=world)
    program.add_names(parser, "--ways", WAYS)
    add("--turns", type=program.at_least(1), default=7, help="of each way")
    add("--seconds", type=program.positive, default=TURN_SECONDS, help="of a turn at the link's rate")
    add("--delay", type=float, default=0, metavar="MS", help="from one half of the hosts to the other")
    add("--cut", type=float, default=0, metavar="SECONDS", help="cut a host's link in each turn")
    add("--seed", type=int, default=0, help="of the order of the turns")
    add("--json", type=Path, help="file for the points")
    arguments = parser.parse_args()
    try:
        arguments.worlds = [w for words in arguments.world or () for w in parse_worlds(words)] or WORLDS
    except ValueError as error:
        parser.error(f"--world: {error}")
    if not 0 <= arguments.cut <= PHASE_SECONDS / 6:
        parser.error("--cut must be from 0 to 10")
    if arguments.delay < 0 or (arguments.delay and any(world.hosts % 2 for world in arguments.worlds)):
        parser.error("--delay must not be negative, and needs an even number of hosts")
    return arguments


def main() -> None:
    """Measures one world after the other, and writes the points after each."""
    arguments = parse_arguments()
    prepare()
    about = program.facts()
    points: list[dict[str, Any]] = []
    for world in arguments.worlds:
        try:
            found = measure(world, arguments)
        except Unavailable as error:
            sys.exit(f"emulated hosts: {error}")
        print_points(found)
        points += found
        if arguments.json:
            write(arguments.json, facts=about, points=points)


if __name__ == "__main__":
    main()
