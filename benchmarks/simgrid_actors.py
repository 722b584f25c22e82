"""Replays a graph of computations and messages by SimGrid, whose links are shared as flows share them.

    /usr/bin/python3 benchmarks/simgrid_actors.py graph.json
    /usr/bin/python3 benchmarks/simgrid_actors.py graph.json --lose-host 3 0.5 --timeout 10
    /usr/bin/python3 benchmarks/simgrid_actors.py graph.json --lose-link 3 0.5 --timeout 10 --skip-lost

A second opinion on loggops.py, of which it has no line: it reads the file that loggops.Graph.write makes, under any
Python that has the package simgrid (Debian: apt-get install python3-simgrid, then /usr/bin/python3; or pip install
simgrid, which compiles it). Each rank has two actors, which send and receive, and one for each computation. What differs
from the model: messages that use a link at the same time share it, where the model has them one after the other.

With a host or a link lost, at a time, messages that need it are lost. What requires them never begins (or begins all
the same, with --skip-lost, as where a lost neighbor is passed over), and whoever waits gives up after --timeout.

Prints JSON: the seconds of a step, when each rank ended each step (null: never), and how many messages were lost.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import deque
from pathlib import Path

NEEDED = """simgrid is not installed for {executable}. On Debian or Ubuntu
    apt-get install python3-simgrid
and run this program by /usr/bin/python3; elsewhere "pip install simgrid" (it needs SimGrid, cmake and a compiler)."""
# A link without a limit, in bytes per second.
ENDLESS = 1e15
# Seconds between two looks of the simulation whether all is done.
LOOK = 0.05


class Replay:
    """The tasks of a graph, and who waits for them."""

    def __init__(self, simgrid, content, skip_lost):
        self.simgrid = simgrid
        self.parameters = content["parameters"]
        self.tasks = content["tasks"]
        self.skip_lost = skip_lost
        self.missing = [len(task[3]) for task in self.tasks]
        self.needed_by = [[] for _ in self.tasks]
        for place, task in enumerate(self.tasks):
            for required in task[3]:
                self.needed_by[required].append(place)
        self.done = [None] * len(self.tasks)
        self.lost = 0
        self.gone = {}  # ranks, and when their host is turned off
        ranks = range(len(content["hosts"]))
        self.hosts = {rank: simgrid.Host.by_name(f"rank{rank}") for rank in ranks}
        self.queues = {rank: deque() for rank in ranks}
        self.waiting = {rank: simgrid.Semaphore(0) for rank in ranks}
        self.left = len(self.tasks)

    def begin(self, place):
        """All that a task requires is done."""
        rank, to = self.tasks[place][:2]
        if rank in self.gone and self.simgrid.Engine.clock >= self.gone[rank]:
            return
        if to < 0:
            self.simgrid.Actor.create(f"compute{place}", self.hosts[rank], self.compute, place)
        else:
            self.queues[rank].append(place)
            self.waiting[rank].release()

    def finish(self, place):
        """A task is done: what requires it may begin."""
        self.done[place] = self.simgrid.Engine.clock
        self.left -= 1
        for other in self.needed_by[place]:
            self.missing[other] -= 1
            if self.missing[other] == 0:
                self.begin(other)

    def lose(self, place):
        """A message does not come."""
        self.lost += 1
        if self.skip_lost:
            self.finish(place)

    def work(self, place):
        """Seconds of a processor for a message."""
        _, _, size, _, _, rounds = self.tasks[place]
        return rounds * self.parameters["o"] + size * self.parameters["O"]

    # --- actors ---

    def compute(self, place):
        """Computes, beside all else that its rank does."""
        self.simgrid.this_actor.sleep_for(self.tasks[place][2])
        self.finish(place)

    def sender(self, rank):
        """Sends what is ready, in turn."""
        while True:
            self.waiting[rank].acquire()
            place = self.queues[rank].popleft()
            _, to, size, _, leaves, rounds = self.tasks[place]
            self.simgrid.this_actor.execute(self.work(place))
            extra = (rounds - 1) * (self.parameters["L"] if leaves else self.parameters["l"])
            if self.parameters["S"] is not None and leaves and size >= self.parameters["S"] * rounds:
                extra += 2 * self.parameters["L"] * rounds
            actor = self.simgrid.Actor.create(f"wire{place}", self.hosts[rank], self.wire, place, to, extra)
            actor.daemonize()

    def wire(self, place, to, extra):
        """Is on the way with a message."""
        self.simgrid.this_actor.sleep_for(extra)
        box = self.simgrid.Mailbox.by_name(f"rank{to}")
        try:
            # A transfer of nothing takes no time at all, so it has a byte.
            box.put(place, max(1, round(self.tasks[place][2])))
        except self.simgrid.NetworkFailureException:
            self.lose(place)

    def receiver(self, rank):
        """Takes what comes, in turn."""
        box = self.simgrid.Mailbox.by_name(f"rank{rank}")
        box.set_receiver(self.simgrid.Actor.self())
        while True:
            try:
                place = box.get()
            except self.simgrid.NetworkFailureException:
                continue  # its sender says so
            self.simgrid.this_actor.execute(self.work(place))
            self.finish(place)

    def watch(self, timeout):
        """Begins all, and ends the simulation."""
        for place, count in enumerate(list(self.missing)):
            if count == 0:
                self.begin(place)
        while self.left and (timeout is None or self.simgrid.Engine.clock < timeout):
            self.simgrid.this_actor.sleep_for(LOOK if timeout is None else min(LOOK, timeout / 10))


def platform(content) -> str:
    """The hosts and links, as SimGrid reads them: two links a host, one to each direction, and its memory."""
    p = content["parameters"]
    hosts, centers = content["hosts"], content["centers"]
    rate = 1 / p["G"] if p["G"] > 0 else ENDLESS
    memory = 1 / p["M"] if p["M"] > 0 else ENDLESS
    lines = [
        '<?xml version="1.0"?>',
        '<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">',
        '<platform version="4.1"><zone id="all" routing="Full">',
    ]
    lines += [f'<host id="rank{rank}" speed="1f"/>' for rank in range(len(hosts))]
    lines.append('<host id="watch" speed="1f"/>')

    def link(name, bandwidth, latency, policy="SHARED"):
        lines.append(
            f'<link id="{name}" bandwidth="{bandwidth:.9g}Bps" latency="{latency:.9g}s" sharing_policy="{policy}"/>'
        )

    for host in sorted(set(hosts)):
        link(f"out{host}", rate, p["L"])
        link(f"in{host}", rate, 0)
        link(f"memory{host}", memory, p["l"], "FATPIPE")
    if len(set(centers)) > 1:
        for center in sorted(set(centers)):
            link(f"line{center}", 1 / p["W"] if p["W"] > 0 else ENDLESS, 0)
    for one, home in enumerate(hosts):
        for other, there in enumerate(hosts):
            if one == other:
                continue
            if home == there:
                names = [f"memory{home}"]
            else:
                crossing = [f"line{centers[home]}"] if centers[home] != centers[there] else []
                names = [f"out{home}", *crossing, f"in{there}"]
            route = "".join(f'<link_ctn id="{name}"/>' for name in names)
            lines.append(f'<route src="rank{one}" dst="rank{other}" symmetrical="NO">{route}</route>')
    return "\n".join([*lines, "</zone></platform>"])


def main() -> None:
    """Reads the graph and replays it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("graph", type=Path)
    parser.add_argument("--lose-host", nargs=2, type=float, metavar=("HOST", "SECOND"))
    parser.add_argument("--lose-link", nargs=2, type=float, metavar=("HOST", "SECOND"), help="both ways")
    parser.add_argument("--timeout", type=float, help="seconds after which whoever waits gives up")
    parser.add_argument("--skip-lost", action="store_true", help="lost messages are passed over")
    arguments = parser.parse_args()
    if (arguments.lose_host or arguments.lose_link) and arguments.timeout is None:
        parser.error("--lose-host and --lose-link need --timeout")
    try:
        import simgrid
    except ImportError:
        sys.exit(NEEDED.format(executable=sys.executable))

    content = json.loads(arguments.graph.read_text())
    engine = simgrid.Engine(
        [
            sys.argv[0],
            "--log=root.thresh:critical",
            # Shares of links and nothing else: no factors of a TCP that was measured elsewhere.
            "--cfg=network/model:CM02",
            "--cfg=network/TCP-gamma:0",
            "--cfg=network/crosstraffic:0",
        ]
    )
    with tempfile.NamedTemporaryFile("w", suffix=".xml") as file:
        file.write(platform(content))
        file.flush()
        engine.load_platform(file.name)
    replay = Replay(simgrid, content, arguments.skip_lost)
    for rank, host in replay.hosts.items():
        simgrid.Actor.create(f"receive{rank}", host, replay.receiver, rank).daemonize()
        simgrid.Actor.create(f"send{rank}", host, replay.sender, rank).daemonize()
    simgrid.Actor.create("watch", simgrid.Host.by_name("watch"), replay.watch, arguments.timeout)
    if arguments.lose_host:
        number, when = int(arguments.lose_host[0]), arguments.lose_host[1]
        replay.gone = {rank: when for rank, host in enumerate(content["hosts"]) if host == number}
        for rank in replay.gone:
            replay.hosts[rank].set_state_profile(f"{when} 0\n", -1)
    if arguments.lose_link:
        number, when = int(arguments.lose_link[0]), arguments.lose_link[1]
        for way in ("out", "in"):
            simgrid.Link.by_name(f"{way}{number}").set_state_profile(f"{when} 0\n", -1)
    engine.run()

    ends = [[replay.done[place] for place in step] for step in content["ends"]]
    last, period = [max(step) for step in ends if None not in step], content["period"]
    if len(last) > period:
        step_s = (last[-1] - last[period - 1]) / (len(last) - period)
    else:
        step_s = last[-1] / len(last) if last else None
    print(json.dumps({"step_s": step_s, "ends": ends, "lost": replay.lost}))


if __name__ == "__main__":
    main()
