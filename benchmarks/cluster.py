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

Points that the file of --json has of other worlds stay there. docs/measurements/scaling.md says when a point is marked as
short of processor, and what all of this cannot show.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))

import networkx  # noqa: F401  fogdist imports it at the first topology, which would be in each rank
import program
from cluster_ranks import (
    ASYNCHRONOUS,
    LOCAL,
    ClusterRank,
    Job,
    core_time,
    emulated_world,
    idle_since,
    prepare,
)
from emulated_hosts import Unavailable, rate_text, traffic
from forked_ranks import ForkedWorld, WorldFailed
from performance_tables import step_table
from report import spread, write
from workloads import MODELS, SCENARIOS, Scenario, emulated

# Seconds of compute of an emulated step, so long that two cores are mostly idle. Scenario c has a tenth, as its exchanges
# take several steps.
COMPUTE_SECONDS = 0.6
# At least so much for each rank, as the cores serve one after the other.
SECONDS_A_RANK = 0.06
# Below this share of idle time the processor is a bottleneck, and if steps without an exchange are late by such a part
# of a way's step.
LEAST_IDLE = 0.25
MOST_LATE = 0.05
EMULATED_LOCAL_STEPS = 10
HOSTS = [2, 4, 8, 16]
STRAGGLER = 1  # the host
SLOW_LINK = 0.1
PHASE_SECONDS = 90.0
SYNCHRONOUS = ["none", "ddp_gloo", "ddp_fog", "one_peer_exp", "static_exp", "base_k"]
SCALING_WAYS = [*SYNCHRONOUS, "async_win", "local_sgd", "gossip_diloco"]
CENTER_WAYS = ["none", "ddp_gloo", "ddp_fog", "one_peer_exp", "sites", "local_sgd", "gossip_diloco"]
STRAGGLER_WAYS = ["none", "ddp_gloo", "one_peer_exp", "async_win", "win_put", "async_gossip"]
WAYS = list(dict.fromkeys([*SCALING_WAYS, *STRAGGLER_WAYS, "hierarchical", "sites"]))
# By the name of a scenario: its cluster, its ways, and what its worlds have.
KINDS: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "a": ("a", SCALING_WAYS, {}),
    "b": ("b", SCALING_WAYS, {}),
    "c": ("c", CENTER_WAYS, {"grouped": 500 // EMULATED_LOCAL_STEPS, "local_steps": EMULATED_LOCAL_STEPS}),
    "a strong": ("a", SYNCHRONOUS, {}),
    "slow host": ("a", STRAGGLER_WAYS, {"slow": {STRAGGLER: 2.0}}),
    "slow link": ("a", STRAGGLER_WAYS, {"slow_link": STRAGGLER}),
    "pauses": ("a", STRAGGLER_WAYS, {"pause_probability": 0.05}),
}


@dataclass(frozen=True)
class World:
    """A world to measure.

    Attributes:
        name: Of the scenario, as in the module's docstring.
        scenario: The cluster.
        hosts: Number of hosts.
        ways: Keys of WAYS.
        job: What its ranks are told.
    """

    name: str
    scenario: Scenario
    hosts: int
    ways: Sequence[str]
    job: Job

    @property
    def title(self) -> str:
        """The world's name in reports; no other world's begins with it."""
        return f"{self.name}, {self.hosts} hosts x {self.job.ranks_per_host}"

    @property
    def is_uneven(self) -> bool:
        """Whether ranks need different times for a step."""
        return self.name in ("slow host", "slow link", "pauses")

    def grouped(self, way: str) -> int:
        """The real steps that a step of a way stands for."""
        return self.job.grouped if way in LOCAL else 1


def worlds_of(
    names: Sequence[str], hosts: Sequence[int], ways: Sequence[str] | None, seconds: float, seed: int
) -> list[World]:
    """Returns the worlds of some scenarios; those of one host count stand together.

    Args:
        names: Of scenarios.
        hosts: Host counts of a and b; the others, whose turns are long, have the largest one up to 16.
        ways: Only these, where the scenario has them; None for all.
        seconds: Emulated compute of a step, of up to ten ranks; scenario c has a tenth.
        seed: Of pauses.
    """
    found: list[World] = []
    largest = max((count for count in hosts if count <= 16), default=hosts[0])
    for name in names:
        letter, chosen, options = KINDS[name]
        kept = [way for way in chosen if ways is None or way in ways or way == "none"]
        for count in hosts if name in ("a", "b", "a strong") else [largest]:
            scenario = SCENARIOS[letter]
            if name == "c" and count % 2:
                continue
            if name == "a strong":
                scenario = replace(scenario, compute=scenario.compute * 2 / count)
            compute = seconds / 10 if name == "c" else seconds
            compute *= max(1.0, SECONDS_A_RANK / COMPUTE_SECONDS * count)
            options |= {
                "centers": 1 if scenario.between is None else 2,
                "seed": seed,
                "timeout": PHASE_SECONDS,
            }
            job = Job(scenario.model, emulated(scenario, compute), compute, **options)
            if len(kept) > 1:
                found.append(World(name, scenario, count, kept, job))
            if name in ("a", "b") and (ways is None or "hierarchical" in ways) and count <= 8:
                both = {"compute": 2 * compute, "dilation": emulated(scenario, 2 * compute)}
                of_two = replace(job, ranks_per_host=2, **both)
                found.append(World(name, scenario, count, ["none", "hierarchical"], of_two))
    return found


def running(world: World) -> AbstractContextManager[tuple[ForkedWorld, list[str]]]:
    """Makes the hosts and starts the ranks; both are gone afterwards."""
    job, scenario = world.job, world.scenario
    rate = job.dilation.rate(scenario.rate)
    options: dict[str, Any] = {"centers": job.centers, "ranks_per_host": job.ranks_per_host}
    if scenario.between is not None:
        options["between"] = rate_text(job.dilation.rate(scenario.between))
    if job.slow_link is not None:
        options["rates"] = {job.slow_link: rate_text(SLOW_LINK * rate)}
    return emulated_world(
        world.title, world.hosts, rate_text(rate), PHASE_SECONDS, ClusterRank, job, **options
    )


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
    latency, buckets = 0.0, {}
    draw = random.Random(f"{seed} {world.name} {world.hosts}")
    try:
        with running(world) as (ranks, hosts):
            latency = max(ranks.ask("latency")[1])
            # First the one that makes its graph the group's for a while, which nobody can where others have windows.
            for way in sorted(world.ways, key=lambda way: way != "async_gossip"):
                buckets[way] = ranks.ask("make", way)[1][0]
                ranks.ask("run", way, 1)
            for number in range(rounds):
                print(f"{ranks.title}: turn {number + 1} of {rounds}", file=sys.stderr, flush=True)
                for way in draw.sample(list(world.ways), len(world.ways)):
                    turns[way].append(turn(world, ranks, hosts, way, steps))
    except WorldFailed as failure:
        failures.append(str(failure))
        print(failure, file=sys.stderr, flush=True)
    turns = {way: made for way, made in turns.items() if made}
    if "none" not in turns:
        return []
    # The mean of the ranks' rates counts where these differ.
    job = world.job
    expected = job.compute * world.hosts / (world.hosts - sum(1 - 1 / each for each in job.slow.values()))
    alone = statistics.median(each["step_s"] for each in turns["none"])
    late = 0.0 if job.pause_probability else max(0.0, alone - expected)
    rate, between = world.scenario.rate, world.scenario.between
    points = []
    for way, made in turns.items():
        step = spread([each["step_s"] for each in made])
        idle, wire = (statistics.median(each[name] for each in made) for name in ("idle", "bytes"))
        compute = job.compute * world.grouped(way)
        local_steps = job.local_steps if way in LOCAL else 1
        points.append(
            {
                "scenario": world.name,
                "model": world.scenario.model,
                "way": way,
                "scaling": "strong" if "strong" in world.name else "weak",
                "hosts": world.hosts,
                "ranks_per_host": job.ranks_per_host,
                "rate_bits_per_s": job.dilation.rate(rate),
                "between_bits_per_s": between and job.dilation.rate(between),
                "latency_s": latency,
                "compute_s": compute,
                "forward_s": compute / 3,
                "bucket_bytes": buckets[way],
                "local_steps": local_steps,
                "local_steps_real": local_steps * world.grouped(way),
                "dilation": asdict(job.dilation),
                "step_s": step,
                "efficiency": (alone if world.is_uneven else compute) / step["median"],
                "wire_bytes_per_host_per_step": wire,
                "cpu_idle": idle,
                "cpu_bound": late > MOST_LATE * step["median"] or idle < LEAST_IDLE,
                "date": time.strftime("%Y-%m-%d"),
            }
        )
    return points


def turn(world: World, ranks: ForkedWorld, hosts: Sequence[str], way: str, steps: int) -> dict[str, Any]:
    """Returns the measurements of one turn of a way."""
    if way in LOCAL:
        steps = world.job.local_steps
    # Ranks at a pace of their own run for a time, as long as the others' steps take.
    seconds = steps * world.job.compute if way in ASYNCHRONOUS and world.is_uneven else None
    cores, sent = core_time(), traffic(hosts)
    patience = 20 * steps * world.job.compute * world.grouped(way)
    answers = ranks.ask("run", way, steps, seconds, patience=patience)[1]
    idle, sent_end = idle_since(cores), traffic(hosts)
    rates = [each["steps"] / (each["end"] - each["begin"]) for each in answers]
    # All that was sent in the turn counts here, in the step that does not count too.
    sent_steps = statistics.fmean(each["sent"] for each in answers)
    wire = [max(b[0] - a[0], b[1] - a[1]) for a, b in zip(sent, sent_end, strict=True)]
    # Of a fixed number of steps the last rank counts: far from a slow rank the first steps do not feel it yet.
    return {
        "step_s": 1 / min(rates) if seconds is None else len(rates) / sum(rates),
        "idle": idle,
        "bytes": statistics.fmean(wire) / max(1.0, sent_steps),
    }


def print_points(points: Sequence[dict[str, Any]]) -> None:
    """Prints the points of one world."""
    first = points[0]
    print(
        f"\nscenario {first['scenario']}: {first['hosts']} hosts x {first['ranks_per_host']}, {first['scaling']} scaling, "
        f"{first['model']}, {first['rate_bits_per_s'] / 1e6:.0f} Mbit/s a host, compute {1e3 * first['compute_s']:.0f} ms"
    )
    print(step_table(first["scenario"], points), flush=True)


def parse_arguments() -> argparse.Namespace:
    """Returns the checked command line."""
    parser = program.parser_of(__doc__)
    add = parser.add_argument
    program.add_names(parser, "--scenarios", KINDS)
    add(
        "--hosts",
        type=int,
        choices=range(2, 33),
        nargs="+",
        default=HOSTS,
        metavar="N",
        help="numbers of hosts",
    )
    add("--ways", nargs="+", choices=WAYS, metavar="NAME", help=", ".join(WAYS))
    add("--rounds", type=program.at_least(1), default=3, help="turns of each way in a world")
    add("--steps", type=program.at_least(1), default=4, help="steps of a turn")
    compute = "emulated compute of a step, more with over ten ranks (default: %(default)s)"
    add("--compute", type=program.positive, default=COMPUTE_SECONDS, metavar="SECONDS", help=compute)
    add("--seed", type=int, default=0, help="of the order of the turns and of pauses")
    add("--json", type=Path, help="file for the points; those of other worlds stay")
    return parser.parse_args()


def main() -> None:
    """Measures one world after the other, and writes the points after each."""
    arguments = parse_arguments()
    prepare()
    about = program.facts() | {
        "seed": arguments.seed,
        "rounds": arguments.rounds,
        "compute": {name: scenario.compute_is_of for name, scenario in SCENARIOS.items()},
        "parameters": {name: sum(model.sizes) for name, model in MODELS.items()},
    }
    options = arguments.scenarios, arguments.hosts, arguments.ways, arguments.compute, arguments.seed
    worlds = worlds_of(*options)
    if not worlds:
        sys.exit("no scenario has these ways on these numbers of hosts")
    points: list[dict[str, Any]] = []
    failures: list[str] = []
    if arguments.json is not None and arguments.json.exists():
        before = json.loads(arguments.json.read_text())
        points, failures = before["points"], before["failures"]
    for world in worlds:
        begin = time.perf_counter()
        failures = [each for each in failures if not each.startswith(world.title)]
        try:
            found = measure(world, arguments.rounds, arguments.steps, arguments.seed, failures)
        except Unavailable as error:
            sys.exit(f"emulated hosts: {error}")
        if found:
            print_points(found)
        print(f"{time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
        own = {"scenario": world.name, "hosts": world.hosts, "ranks_per_host": world.job.ranks_per_host}
        points = [point for point in points if not own.items() <= point.items()] + found
        if arguments.json is not None:
            write(arguments.json, facts=about, failures=failures, points=points)
    if failures:
        sys.exit("\n".join(["These worlds failed:", *failures]))


if __name__ == "__main__":
    main()
