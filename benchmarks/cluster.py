"""Scaling efficiency on an emulated cluster: gossip beside all-reduce, from 2 to 32 hosts, with stragglers and slow links.

    make benchmark-cluster                                          # as root, tens of minutes
    python benchmarks/cluster.py --scenarios a --hosts 2 4 --ways none ddp_gloo one_peer_exp --rounds 1

Run it as root on Linux. Each host is a network namespace with one rank (two for the way "hierarchical"). The hosts are
joined by a bridge, and tc limits what each link carries, both ways (emulated_hosts.py). Processes, TCP and tensors are
real. The accelerator is a sleep of a set duration, and the model, the bandwidth and the compute are *dilated*: the
transfer of each bucket takes the same share of the compute as in the real cluster (workloads.py has the formulas).

Scenarios:
    a             ResNet-50 on hosts of 8 V100 with 25 Gbit/s a host, as in BlueFog's claim (95 % for 128 GPUs)
    b             GPT-2 124M on hosts of 8 H100 with 100 Gbit/s
    c             the same in two data centers joined by 1 Gbit/s
    a strong      a with a fixed global batch: n hosts compute 2/n of the time of two hosts
    slow host     a, and the accelerator of one host needs twice the time
    slow link     a, and the link of one host has a tenth of the rate
    pauses        a, and each step of each rank stands still with a probability of 5 %, for the time of a step

All ways of a world take turns in a random order. A turn begins with one step that does not count, so that no exchange
of an earlier turn counts. Kept are the median and the quartiles over the turns of the time of a step, which is the
longest of all ranks if each makes a fixed number of steps. `efficiency` is the compute of a step over its time. Where
ranks differ in speed, in the last three scenarios, it is the share of the sum of solo speeds: the throughput of all ranks
over that of the same ranks without any exchange, measured in the same world, for which ways that let ranks go at their
own pace run for a fixed time.

In scenario c ways with local steps make 500 of them. Each emulated one stands for 50, with 50 times the compute.

"idle" is the share of the cores' time in which nothing ran, of this program or another one. A point with less than 25 %
is marked, and so is one whose step would be more than 5 % shorter if steps without an exchange took their compute only.
Marked points are used neither for goals nor for the model. `cpu_waited` in the file is the time in which threads of a rank
could run and had no core, over that of the step: an upper bound of what more cores would save, as most of it is beside
the accelerator's work.

The bytes that the hosts' links carried prove that data went over the wire.

This can show what the links, the topology and the software cost. It cannot show an accelerator's contention for
memory with the network, NVLink, congestion in the switches of a real network, or latencies below those of this kernel:
a message takes some 50 us here, which the dilation of time makes small beside a step.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import random
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))

import networkx  # noqa: F401  fogdist imports it at the first topology, which would be in each rank
import program
from cluster_ranks import ASYNCHRONOUS, LOCAL, ClusterRank, Job, emulated_world
from emulated_hosts import Unavailable, missing, rate_text, traffic
from forked_ranks import ForkedWorld, WorldFailed
from performance_tables import NAMES, step_table
from report import write_results
from workloads import MODELS, SCENARIOS, Dilation, Scenario, emulated

from fog_pg._extension import load as load_extension

RESULTS = Path(__file__).parent / "results" / "cluster.json"
# Seconds of compute of an emulated step, so long that two cores are mostly idle. Scenario c has a tenth, as its exchanges
# take several steps.
COMPUTE_SECONDS = 0.6
# At least so much for each rank, as the cores serve one after the other.
SECONDS_A_RANK = 0.06
# Below this share of idle time the processor is a bottleneck, and if steps without an exchange are late by such a part
# of a way's step.
LEAST_IDLE = 0.25
MOST_LATE = 0.05
LOCAL_STEPS, EMULATED_LOCAL_STEPS = 8, 10
PAUSES = 0.05
SLOW_HOST, SLOW_LINK = 2.0, 0.1
HOSTS = [2, 4, 8, 16]
STRAGGLER = 1  # the host
PHASE_SECONDS = 90.0
SYNCHRONOUS = ["none", "ddp_gloo", "ddp_fog", "one_peer_exp", "static_exp", "base_k"]
SCALING_WAYS = [*SYNCHRONOUS, "async_win", "local_sgd", "gossip_diloco"]
STRAGGLER_WAYS = ["none", "ddp_gloo", "one_peer_exp", "async_win", "win_put", "async_gossip"]
WAYS = list(dict.fromkeys([*SCALING_WAYS, *STRAGGLER_WAYS, "hierarchical", "sites"]))
# Goals: the least efficiency, by scenario, hosts and way.
GOALS = {
    ("a", 16, "one_peer_exp"): 0.95,
    ("c", 16, "gossip_diloco"): 0.90,
    ("slow host", 16, "async_win"): 0.95,
    ("slow host", 16, "win_put"): 0.95,
    ("slow host", 16, "async_gossip"): 0.90,
}


@dataclass(frozen=True)
class World:
    """A world to measure.

    Attributes:
        name: Of the scenario, as in the module's docstring.
        scenario: The cluster.
        hosts: Number of hosts.
        ways: Keys of WAYS.
        compute: Emulated seconds of a step.
        ranks_per_host: Consecutive ranks that share a host.
        scaling: "weak" or "strong".
        slow: What the compute of a host is multiplied with.
        slow_link: Host whose link is slow.
        pauses: Probability of a pause in a step.
        group: Real local steps that an emulated one stands for.
    """

    name: str
    scenario: Scenario
    hosts: int
    ways: Sequence[str]
    compute: float
    ranks_per_host: int = 1
    scaling: str = "weak"
    slow: Mapping[int, float] = field(default_factory=dict)
    slow_link: int | None = None
    pauses: float = 0.0
    group: int = 1

    @property
    def dilation(self) -> Dilation:
        """How much smaller and slower than the real cluster it is."""
        return emulated(self.scenario, self.compute)

    @property
    def local_steps(self) -> int:
        """Emulated steps between two exchanges, of the ways with local steps."""
        return LOCAL_STEPS if self.group == 1 else EMULATED_LOCAL_STEPS


def worlds_of(
    names: Sequence[str], hosts: Sequence[int], ways: Sequence[str] | None, seconds: float
) -> list[World]:
    """Returns the worlds of some scenarios; those of one host count stand together.

    Args:
        names: Of scenarios.
        hosts: Host counts of a and b; the others, whose turns are long, have the largest one up to 16.
        ways: Only these, where the scenario has them; None for all.
        seconds: Emulated compute of a step, of up to ten ranks; scenario c has a tenth.
    """
    found: list[World] = []
    largest = max((count for count in hosts if count <= 16), default=hosts[0])
    for name in names:
        for count in hosts if name in ("a", "b", "a strong") else [largest]:
            letter = name[0] if name in ("a", "b", "c", "a strong") else "a"
            scenario = SCENARIOS[letter]
            options: dict[str, Any] = {}
            chosen, compute = SCALING_WAYS, seconds
            if name == "c":
                if count < 2 or count % 2:
                    continue
                compute, options = seconds / 10, {"group": 500 // EMULATED_LOCAL_STEPS}
                chosen = [
                    "none",
                    "ddp_gloo",
                    "ddp_fog",
                    "one_peer_exp",
                    "sites",
                    "local_sgd",
                    "gossip_diloco",
                ]
            elif name == "a strong":
                real = scenario.compute * 2 / count
                scenario = Scenario(**{**asdict(scenario), "compute": real})
                options = {"scaling": "strong"}
                chosen = SYNCHRONOUS
            elif name == "slow host":
                chosen, options = STRAGGLER_WAYS, {"slow": {STRAGGLER: SLOW_HOST}}
            elif name == "slow link":
                chosen, options = STRAGGLER_WAYS, {"slow_link": STRAGGLER}
            elif name == "pauses":
                chosen, options = STRAGGLER_WAYS, {"pauses": PAUSES}
            compute = max(compute, compute * SECONDS_A_RANK / COMPUTE_SECONDS * count)
            kept = [way for way in chosen if ways is None or way in ways or way == "none"]
            if len(kept) > 1:
                found.append(World(name, scenario, count, kept, compute, **options))
            if name in ("a", "b") and (ways is None or "hierarchical" in ways) and count <= 8:
                both = ["none", "hierarchical"]
                found.append(World(name, scenario, count, both, 2 * compute, ranks_per_host=2))
    return found


def running(world: World, seed: int, limit: float) -> AbstractContextManager[tuple[ForkedWorld, list[str]]]:
    """Makes the hosts and starts the ranks; both are gone afterwards."""
    dilation, scenario = world.dilation, world.scenario
    rate = dilation.rate(scenario.rate)
    options: dict[str, Any] = {}
    if scenario.between is not None:
        options = {"centers": 2, "between": rate_text(dilation.rate(scenario.between))}
    if world.slow_link is not None:
        options["rates"] = {world.slow_link: rate_text(SLOW_LINK * rate)}
    job = Job(
        scenario.model,
        dilation,
        world.compute,
        local_steps=world.local_steps,
        grouped=world.group,
        centers=options.get("centers", 1),
        ranks_per_host=world.ranks_per_host,
        slow=world.slow,
        pause_probability=world.pauses,
        seed=seed,
        timeout=limit,
    )
    options["ranks_per_host"] = world.ranks_per_host
    return emulated_world(title_of(world), world.hosts, rate_text(rate), limit, ClusterRank, job, **options)


def title_of(world: World) -> str:
    """Returns the world's name in reports; no other world's begins with it."""
    return f"{world.name}, {world.hosts} hosts x {world.ranks_per_host}"


def size_of(world: World) -> int:
    """Returns the number of ranks."""
    return world.hosts * world.ranks_per_host


def core_time() -> tuple[float, float]:
    """Returns the time of all cores so far, in ticks: that in which nothing ran, and all."""
    _, *fields = Path("/proc/stat").read_text().splitlines()[0].split()[:9]
    _, _, _, idle, waiting, *_ = times = [float(each) for each in fields]
    return idle + waiting, sum(times)


def measure(world: World, rounds: int, steps: int, seed: int, failures: list[str]) -> list[dict[str, Any]]:
    """Returns the points of one world; where it failed, those of the turns before.

    Args:
        world: What to measure.
        rounds: Turns of each way.
        steps: Counted steps of a turn, of ways without local steps.
        seed: Of the order of the turns, and of pauses.
        failures: Takes a line if ranks fail or do not answer in time, which names them.

    Raises:
        Unavailable: Hosts cannot be emulated here.
    """
    turns: dict[str, list[dict[str, Any]]] = {way: [] for way in world.ways}
    facts: dict[str, Any] = {}
    try:
        measure_turns(world, rounds, steps, seed, facts, turns)
    except WorldFailed as failure:
        failures.append(str(failure))
        print(failure, file=sys.stderr, flush=True)
    turns = {way: made for way, made in turns.items() if made}
    if "none" not in turns:
        return []
    # The mean of the ranks' rates counts where these differ.
    expected = world.compute * world.hosts / (world.hosts - sum(1 - 1 / each for each in world.slow.values()))
    alone = statistics.median(each["step_s"] for each in turns["none"])
    late = 0.0 if world.pauses else max(0.0, alone - expected)
    points = []
    for way, made in turns.items():
        times = [each["step_s"] for each in made]
        lower, _, upper = statistics.quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
        idle = statistics.median(each["idle"] for each in made)
        median = statistics.median(times)
        grouped = world.group if way in LOCAL else 1
        points.append(
            {
                "scenario": world.name,
                "model": world.scenario.model,
                "way": way,
                "scaling": world.scaling,
                "hosts": world.hosts,
                "ranks_per_host": world.ranks_per_host,
                "rate_bits_per_s": world.dilation.rate(world.scenario.rate),
                "between_bits_per_s": world.scenario.between and world.dilation.rate(world.scenario.between),
                "latency_s": facts["latency_s"],
                "compute_s": world.compute * grouped,
                "forward_s": world.compute * grouped / 3,
                "bucket_bytes": facts["buckets"][way],
                "local_steps": world.local_steps if way in LOCAL else 1,
                "local_steps_real": world.local_steps * world.group if way in LOCAL else 1,
                "dilation": asdict(world.dilation),
                "steps": sum(each["steps"] for each in made),
                "turns": len(made),
                "step_s": {"median": median, "lower": lower, "upper": upper},
                "efficiency": (alone if is_uneven(world) else world.compute * grouped) / median,
                "wire_bytes_per_host_per_step": statistics.median(each["bytes"] for each in made),
                "cpu_s_per_rank_per_step": statistics.median(each["cpu"] for each in made),
                "cpu_idle": idle,
                "cpu_waited": statistics.median(each["waited"] for each in made),
                "cpu_bound": late > MOST_LATE * median or idle < LEAST_IDLE,
                "seed": seed,
                "slow": {str(host): slowness for host, slowness in world.slow.items()},
                "slow_link": world.slow_link,
                "pauses": world.pauses,
                "facts": facts["run"],
            }
        )
    return points


def measure_turns(
    world: World,
    rounds: int,
    steps: int,
    seed: int,
    facts: dict[str, Any],
    turns: dict[str, list[dict[str, Any]]],
) -> None:
    """Adds the turns of a world to `turns`, and what else is known of it to `facts`."""
    draw = random.Random(f"{seed} {world.name} {world.hosts}")
    with running(world, seed, PHASE_SECONDS) as (ranks, hosts):
        facts |= {"latency_s": max(ranks.ask("latency")[1]), "run": ranks.ask("facts")[1][0], "buckets": {}}
        # First the one that makes its graph the group's for a while, which nobody can where others have windows.
        for way in sorted(world.ways, key=lambda way: way != "async_gossip"):
            facts["buckets"][way] = ranks.ask("make", way)[1][0]
            ranks.ask("run", way, 1)
        for number in range(rounds):
            print(
                f"{ranks.title}, {size_of(world)} ranks: turn {number + 1} of {rounds}",
                file=sys.stderr,
                flush=True,
            )
            for way in draw.sample(list(world.ways), len(world.ways)):
                turns[way].append(turn(world, ranks, hosts, way, steps))


def turn(world: World, ranks: ForkedWorld, hosts: Sequence[str], way: str, steps: int) -> dict[str, Any]:
    """Returns the measurements of one turn of a way."""
    if way in LOCAL:
        steps = world.local_steps
    # Ranks at a pace of their own run for a time, as long as the others' steps take.
    seconds = steps * world.compute if way in ASYNCHRONOUS and is_uneven(world) else None
    grouped = world.group if way in LOCAL else 1
    cores, sent = core_time(), traffic(hosts)
    answers = ranks.ask("run", way, steps, seconds, patience=20 * steps * world.compute * grouped)[1]
    cores_end, sent_end = core_time(), traffic(hosts)
    idle, whole = (after - before for before, after in zip(cores, cores_end, strict=True))
    durations = [each["end"] - each["begin"] for each in answers]
    rates = [each["steps"] / duration for each, duration in zip(answers, durations, strict=True)]
    # All that was sent in the turn counts here, in the step that does not count too.
    sent_steps = statistics.fmean(each["sent"] for each in answers)
    made = statistics.fmean(each["steps"] + 1 for each in answers)
    wire = [max(b[0] - a[0], b[1] - a[1]) for a, b in zip(sent, sent_end, strict=True)]
    # Of a fixed number of steps the last rank counts: far from a slow rank the first steps do not feel it yet.
    return {
        "step_s": 1 / min(rates) if seconds is None else len(rates) / sum(rates),
        "steps": max(each["steps"] for each in answers),
        "idle": idle / whole,
        "waited": max(each["waited"] / duration for each, duration in zip(answers, durations, strict=True)),
        "bytes": statistics.fmean(wire) / max(1.0, sent_steps),
        "cpu": statistics.fmean(each["cpu"] for each in answers) / made,
    }


def is_uneven(world: World) -> bool:
    """Returns whether ranks need different times for a step."""
    return bool(world.slow) or world.slow_link is not None or world.pauses > 0


def world_of(point: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns what the points of a world have in common."""
    return tuple(point[name] for name in ("scenario", "hosts", "ranks_per_host"))


def print_points(points: Sequence[dict[str, Any]]) -> None:
    """Prints the points of one world."""
    first = points[0]
    print(
        f"\nscenario {first['scenario']}: {first['hosts']} hosts x {first['ranks_per_host']}, {first['scaling']} scaling, "
        f"{first['model']}, {first['rate_bits_per_s'] / 1e6:.0f} Mbit/s a host, compute {1e3 * first['compute_s']:.0f} ms"
    )
    print(step_table(first["scenario"], points), flush=True)


def print_goals(points: Sequence[dict[str, Any]]) -> None:
    """Prints which goals the points meet."""
    lines = []
    for point in points:
        least = GOALS.get((point["scenario"], point["hosts"], point["way"]))
        if least is None:
            continue
        verdict = "met" if point["efficiency"] >= least else "missed"
        if point["cpu_bound"]:
            verdict = f"not shown: the processor was short ({verdict} by the number)"
        lines.append(
            f"  {point['scenario']}, {point['hosts']} hosts, {NAMES[point['way']]}: {point['efficiency']:.1%}, "
            f"at least {least:.0%}: {verdict}"
        )
    if lines:
        print("\nGoals\n" + "\n".join(lines))


def parse_arguments() -> argparse.Namespace:
    """Returns the checked command line."""
    parser = program.parser_of(__doc__)
    names = ["a", "b", "c", "a strong", "slow host", "slow link", "pauses"]
    add = parser.add_argument
    program.add_names(parser, "--scenarios", names)
    add("--hosts", type=int, nargs="+", default=HOSTS, help="numbers of hosts, 2 to 32")
    add("--ways", nargs="+", choices=WAYS, metavar="NAME", help=", ".join(WAYS))
    add("--rounds", type=int, default=3, help="turns of each way in a world")
    add("--steps", type=int, default=4, help="steps of a turn")
    add(
        "--compute",
        type=float,
        default=COMPUTE_SECONDS,
        metavar="SECONDS",
        help="emulated compute of a step, more with over ten ranks (default: %(default)s)",
    )
    add("--seed", type=int, default=0, help="of the order of the turns and of pauses")
    add("--json", type=Path, help=f"file for the points (default for a whole run or with --keep: {RESULTS})")
    add("--keep", action="store_true", help="keep the points of the file that are of other worlds")
    arguments = parser.parse_args()
    is_whole = (arguments.scenarios, arguments.hosts, arguments.ways) == (names, HOSTS, None)
    if arguments.json is None and (is_whole or arguments.keep):
        arguments.json = RESULTS
    for name in ("rounds", "steps"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name}: got {getattr(arguments, name)}; must be 1 or more")
    if not arguments.compute > 0:
        parser.error(f"--compute: got {arguments.compute}; must be positive")
    if not all(2 <= count <= 32 for count in arguments.hosts):
        parser.error(f"--hosts: got {arguments.hosts}; each must be from 2 to 32")
    return arguments


def prepare(seed: int, rounds: int) -> dict[str, Any]:
    """Makes this process ready to fork ranks, or exits where hosts cannot be emulated; returns facts of the run."""
    if reason := missing():
        sys.exit(f"emulated hosts: {reason}")
    # So that the hosts are removed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    load_extension()
    # Forked processes then neither traverse nor copy these objects.
    gc.collect()
    gc.freeze()
    return {
        "date": datetime.date.today().isoformat(),
        "kernel": platform.release(),
        "load average before": os.getloadavg()[0],
        "seed": seed,
        "rounds": rounds,
    }


def main() -> None:
    """Measures one world after the other, and writes the points after each."""
    arguments = parse_arguments()
    about = prepare(arguments.seed, arguments.rounds) | {
        "compute": {name: scenario.compute_is_of for name, scenario in SCENARIOS.items()},
        "parameters": {name: sum(model.sizes) for name, model in MODELS.items()},
    }
    worlds = worlds_of(arguments.scenarios, arguments.hosts, arguments.ways, arguments.compute)
    if not worlds:
        sys.exit("no scenario has these ways on these numbers of hosts")
    points: list[dict[str, Any]] = []
    failures: list[str] = []
    if arguments.keep and arguments.json is not None and arguments.json.exists():
        before = json.loads(arguments.json.read_text())
        points, failures = before["points"], before["failures"]
    for world in worlds:
        begin = time.perf_counter()
        failures = [each for each in failures if not each.startswith(title_of(world))]
        try:
            found = measure(world, arguments.rounds, arguments.steps, arguments.seed, failures)
        except Unavailable as error:
            sys.exit(f"emulated hosts: {error}")
        for point in found:
            about |= point.pop("facts")
            point |= {"date": about["date"], "load average before": about["load average before"]}
        if found:
            print_points(found)
        print(f"{time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
        measured_now = (world.name, world.hosts, world.ranks_per_host)
        points = [point for point in points if world_of(point) != measured_now] + found
        if arguments.json is not None:
            write_results(arguments.json, about, failures, points=points)
    print_goals(points)
    if failures:
        sys.exit("\n".join(["These worlds failed:", *failures]))


if __name__ == "__main__":
    main()
