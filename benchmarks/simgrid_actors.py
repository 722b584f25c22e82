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
import heapq
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
    """The tasks of a graph, who waits for them, and the actors that do them.

    All that changes numbers of tasks is between two calls of SimGrid, so that no other actor sees a half of it.
    """

    def __init__(self, simgrid, content, skip_lost):
        self.simgrid = simgrid
        self.parameters = content["parameters"]
        self.tasks = content["tasks"]
        self.places = content["hosts"]
        self.skip_lost = skip_lost
        self.missing = [len(task[3]) for task in self.tasks]
        self.needed_by = [[] for _ in self.tasks]
        for place, task in enumerate(self.tasks):
            for required in task[3]:
                self.needed_by[required].append(place)
        self.done = [None] * len(self.tasks)
        self.left = len(self.tasks)
        self.begun, self.flying, self.lost = set(), set(), set()
        self.gone, self.cut = None, None  # a host that is off, one without links
        ranks = range(len(self.places))
        self.hosts = {rank: simgrid.Host.by_name(f"rank{rank}") for rank in ranks}
        self.queues = {rank: deque() for rank in ranks}
        self.waiting = {rank: simgrid.Semaphore(0) for rank in ranks}
        self.timers, self.earlier = [], simgrid.Semaphore(0)

    def begin(self, *places):
        """All that these tasks require is done, and their ranks are there."""
        computes = False
        for place in places:
            rank, to, seconds = self.tasks[place][:3]
            self.begun.add(place)
            if to < 0:
                heapq.heappush(self.timers, (self.simgrid.Engine.clock + seconds, place))
                computes = True
            else:
                self.queues[rank].append(place)
        for place in places:
            if self.tasks[place][1] >= 0:
                self.waiting[self.tasks[place][0]].release()
        if computes:
            self.earlier.release()

    def finish(self, *places):
        """Tasks are done, or passed over: what requires them may begin."""
        ended, ready = list(places), []
        while ended:
            place = ended.pop()
            if self.done[place] is not None:
                continue
            self.done[place] = self.simgrid.Engine.clock
            self.left -= 1
            for other in self.needed_by[place]:
                self.missing[other] -= 1
                if self.missing[other]:
                    continue
                if self.places[self.tasks[other][0]] != self.gone:
                    ready.append(other)
                elif self.note_lost(other):
                    ended.append(other)
        self.begin(*ready)

    def is_gone(self, place):
        """Whether a task's rank, or its receiver, is on a host that is off."""
        rank, to = self.tasks[place][:2]
        return self.gone is not None and self.gone in (
            self.places[rank],
            self.places[to] if to >= 0 else None,
        )

    def is_cut(self, place):
        """Whether a message needs links that are off."""
        rank, to, _, _, leaves = self.tasks[place][:5]
        return self.cut is not None and bool(leaves) and self.cut in (self.places[rank], self.places[to])

    def note_lost(self, place):
        """A message does not come, or a rank that is gone does not compute; whether it is passed over."""
        if self.tasks[place][1] >= 0 and self.done[place] is None:
            self.lost.add(place)
        return self.skip_lost

    def lose(self, *places):
        """The same, and goes on."""
        for place in places:
            self.note_lost(place)
        if self.skip_lost:
            self.finish(*places)

    def work(self, place):
        """Seconds of a processor for a message."""
        _, _, size, _, _, rounds = self.tasks[place]
        return rounds * self.parameters["o"] + size * self.parameters["O"]

    def put(self, place):
        """Sends a message; its rank's actor calls this."""
        if self.is_gone(place) or self.is_cut(place):
            self.lose(place)
            return
        self.flying.add(place)
        box = self.simgrid.Mailbox.by_name(f"rank{self.tasks[place][1]}")
        # A transfer of nothing would take no time at all, so it has a byte.
        box.put_init(place, max(1, round(self.tasks[place][2]))).detach()

    # --- actors ---

    def clock(self):
        """Ends computations, which go on beside all else that their ranks do."""
        while True:
            if self.timers:
                self.earlier.acquire_timeout(max(0.0, self.timers[0][0] - self.simgrid.Engine.clock))
            else:
                self.earlier.acquire()
            ended = []
            while self.timers and self.timers[0][0] <= self.simgrid.Engine.clock + 1e-12:
                place = heapq.heappop(self.timers)[1]
                if not self.is_gone(place):
                    ended.append(place)
            self.finish(*ended)

    def sender(self, rank):
        """Sends what is ready, in turn."""
        while True:
            self.waiting[rank].acquire()
            place = self.queues[rank].popleft()
            _, _, size, _, leaves, rounds = self.tasks[place]
            self.simgrid.this_actor.execute(self.work(place))
            later = (rounds - 1) * (self.parameters["L"] if leaves else self.parameters["l"])
            if self.parameters["S"] is not None and leaves and size >= self.parameters["S"] * rounds:
                later += 2 * self.parameters["L"] * rounds
            if later:
                self.simgrid.Actor.create(
                    f"wire{place}", self.hosts[rank], self.wire, place, later
                ).daemonize()
            else:
                self.put(place)

    def wire(self, place, seconds):
        """Keeps a message for a while before it leaves."""
        self.simgrid.this_actor.sleep_for(seconds)
        self.put(place)

    def receiver(self, rank):
        """Takes what comes, in turn."""
        box = self.simgrid.Mailbox.by_name(f"rank{rank}")
        box.set_receiver(self.simgrid.Actor.self())
        while True:
            try:
                place = box.get()
            except self.simgrid.NetworkFailureException:
                continue  # `lose_links` knows of it
            self.flying.discard(place)
            self.simgrid.this_actor.execute(self.work(place))
            if not self.is_gone(place) and place not in self.lost:
                self.finish(place)

    def watch(self, timeout):
        """Begins all, and ends the simulation."""
        self.begin(*(place for place, count in enumerate(self.missing) if count == 0))
        while self.left and (timeout is None or self.simgrid.Engine.clock < timeout):
            self.simgrid.this_actor.sleep_for(LOOK if timeout is None else min(LOOK, timeout / 10))

    def lose_links(self, host, when):
        """Turns the links of a host off."""
        self.simgrid.this_actor.sleep_for(when)
        self.cut = host
        lost = [place for place in sorted(self.flying) if self.is_cut(place)]
        self.flying -= set(lost)
        for way in ("out", "in"):
            self.simgrid.Link.by_name(f"{way}{host}").turn_off()
        self.lose(*lost)

    def lose_host(self, host, when):
        """Its ranks are gone, with what they were doing and what was on its way to them or from them."""
        self.simgrid.this_actor.sleep_for(when)
        self.gone = host
        lost = [place for place in sorted(self.begun) if self.done[place] is None and self.is_gone(place)]
        self.flying -= set(lost)
        for way in ("out", "in"):
            self.simgrid.Link.by_name(f"{way}{host}").turn_off()
        self.lose(*lost)


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
    simgrid.Actor.create("clock", simgrid.Host.by_name("watch"), replay.clock).daemonize()
    watcher = simgrid.Host.by_name("watch")
    simgrid.Actor.create("watch", watcher, replay.watch, arguments.timeout)
    for option, actor in ((arguments.lose_host, replay.lose_host), (arguments.lose_link, replay.lose_links)):
        if option:
            simgrid.Actor.create("lose", watcher, actor, int(option[0]), option[1])
    engine.run()

    ends = [
        [
            None
            if replay.gone == content["hosts"][rank] and (replay.done[place] or 0) >= arguments.lose_host[1]
            else replay.done[place]
            for rank, place in enumerate(step)
        ]
        for step in content["ends"]
    ]
    last, period = [max(step) for step in ends if None not in step], content["period"]
    if len(last) > period:
        step_s = (last[-1] - last[period - 1]) / (len(last) - period)
    else:
        step_s = last[-1] / len(last) if last else None
    print(json.dumps({"step_s": step_s, "ends": ends, "lost": len(replay.lost)}))


if __name__ == "__main__":
    main()
