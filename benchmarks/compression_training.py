"""The parts "training" and "links" of benchmarks/compression.py: loss over bytes, and time to a loss over links.

docs/measurements/compression.md says how both are measured. A training in step makes the same steps on any link, bit for
bit, so its time to a loss is the steps of the first part times the seconds of a step of the second. The codec's time in a
*dilated* world is added after the step as a whole, although a large part of it would hide behind the link.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise, product
from typing import Any

import networkx  # noqa: F401  fogdist imports it at the first topology, which would be in each rank
import torch
from cluster_ranks import core_time, emulated_world, idle_since
from compression_ranks import PHASE_SECONDS, REFERENCE, WAYS, Task, TrainingRank
from emulated_hosts import traffic
from forked_ranks import ForkedWorld
from paired import best_rates, compared, difference, finite, key_of, median_steps
from report import spread
from torch import nn

RANKS = 4
SEEDS = (1, 2, 3)
# By tc's words: bits per second.
LINKS = {"100mbit": 1e8, "300mbit": 3e8, "1gbit": 1e9}
SLOWNESS = (1.0, 10.0, 100.0)
LINKS_TASK = "MNIST by labels"
# A way pays where it takes at most this part of the time without a codec.
PAYS = 0.95

Row = dict[str, Any]


def running(
    rate: str | None, tasks: dict[str, Task]
) -> AbstractContextManager[tuple[ForkedWorld, list[str]]]:
    """Makes the hosts and starts the ranks; both are gone afterwards.

    Raises:
        Unavailable: Hosts cannot be emulated here.
    """
    title = f"compression at {rate or 'any rate'}"
    return emulated_world(title, RANKS, rate, PHASE_SECONDS, TrainingRank, tasks)


# --- training -------------------------------------------------------------------------------------------------


def sent(hosts: Sequence[str]) -> float:
    """Returns the bytes that a host has sent so far, the mean over the hosts."""
    return statistics.fmean(out for out, _ in traffic(hosts))


def train(
    ranks: ForkedWorld,
    hosts: Sequence[str],
    tasks: Mapping[str, Task],
    names: tuple[str, str],
    seed: int,
    rate: float,
    held_out: str,
    steps: int | None,
) -> Row:
    """Trains in one way; returns a point of the results.

    Args:
        ranks: The world.
        hosts: Its hosts.
        tasks: By name.
        names: Of the task and the way.
        seed: Of the run.
        rate: The highest learning rate.
        held_out: On what the loss is taken: "validation" or "test".
        steps: Of the run; None for the task's own.
    """
    task = tasks[names[0]]
    inputs, targets = task.held_out[held_out]
    model = task.model()
    steps = steps or task.steps
    losses, counted, made = [], [], []

    @torch.no_grad()
    def evaluate() -> float:
        mean = torch.from_numpy(sum(ranks.ask("parameters")[1]) / RANKS)
        nn.utils.vector_to_parameters(mean, model.parameters())
        return float(task.loss(model(inputs), targets))

    begin = time.perf_counter()
    promised = ranks.ask("make", *names, seed, rate, steps)[1][0]
    total = 0.0
    for number in range(0, steps, task.every):
        part = min(task.every, steps - number)
        before = sent(hosts)
        ranks.ask("run", part, patience=part)
        total += sent(hosts) - before
        made.append(number + part)
        counted.append(round(total))
        losses.append(round(evaluate(), 5))
        if not math.isfinite(losses[-1]):
            break
    return {
        "task": names[0],
        "way": names[1],
        "seed": seed,
        "rate": rate,
        "steps": made,
        "losses": losses,
        "bytes": counted,
        "promised bytes a step": round(promised["promised"], 1),
        "plain bytes a step": promised["plain"],
        "seconds": round(time.perf_counter() - begin, 2),
    }


def measure_training(
    tasks: Mapping[str, Task],
    ways: Sequence[str],
    seeds: Sequence[int],
    steps: int | None,
    tuning: list[Row],
    points: list[Row],
    tell: Callable[[], None],
) -> None:
    """Chooses learning rates, and trains with each way and seed.

    Args:
        tasks: By name.
        ways: Keys of WAYS; the reference is added.
        seeds: Of the runs that count.
        steps: Of a run; None for each task's own.
        tuning: Takes the losses by which rates were chosen; runs that it has are not repeated.
        points: Takes the points; the same, if their rate is the one that is chosen.
        tell: Called after each run.
    """
    ways = [REFERENCE, *(way for way in ways if way != REFERENCE)]

    key = ("task", "way", "seed", "rate")
    made = [{key_of(row, key) for row in rows} for rows in (tuning, points)]
    with running(None, dict(tasks)) as (ranks, hosts):

        def point(name: str, way: str, seed: int, rate: float, held_out: str) -> Row:
            found = train(ranks, hosts, tasks, (name, way), seed, rate, held_out, steps)
            last, much = found["losses"][-1], found["bytes"][-1]
            words = f"{name}, {way}, seed {seed}, rate {rate}: {held_out} {last:.4f}, {much:,} bytes"
            print(f"{found['seconds']:6.1f} s: {words}", flush=True)
            return found

        for name, way in product(tasks, ways):
            for rate, seed in product(tasks[name].rates, tasks[name].tuning_seeds):
                if (name, way, seed, rate) not in made[0]:
                    found = point(name, way, seed, rate, "validation")
                    loss = finite(found["losses"][-1])
                    tuning.append({"task": name, "way": way, "seed": seed, "rate": rate, "loss": loss})
                    tell()
            rate = best_rates(tuning, ("task", "way"))[name, way]
            points[:] = [p for p in points if (p["task"], p["way"]) != (name, way) or p["rate"] == rate]
            for seed in seeds:
                if (name, way, seed, rate) not in made[1]:
                    points.append(point(name, way, seed, rate, "test"))
                    tell()


def compared_ways(points: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Returns for each task and way: the loss relative to that without a codec, of paired seeds, and bytes saved."""
    rows = []
    for (way, task), pairs in compared(points, REFERENCE, ("task",)).items():
        last = pairs[0][0]
        fewer = statistics.fmean(its["bytes"][-1] / mine["bytes"][-1] for mine, its in pairs)
        row: Row = {
            "task": task,
            "way": way,
            "rate": last["rate"],
            "loss": round(statistics.fmean(mine["losses"][-1] for mine, _ in pairs), 5),
            "bytes a step": round(last["bytes"][-1] / last["steps"][-1]),
            "promised bytes a step": last["promised bytes a step"],
            "fewer bytes": round(fewer, 2),
            "fewer bytes, promised": round(last["plain bytes a step"] / last["promised bytes a step"], 2),
        }
        rows.append(row | difference(pairs))
    return rows


# --- links ----------------------------------------------------------------------------------------------------


def measure_links(task: Task, ways: Sequence[str], links: Sequence[str], steps: int, turns: int) -> list[Row]:
    """Returns the seconds of a step of each way, link and dilation.

    Args:
        task: What is trained.
        ways: Keys of WAYS; the reference is added.
        links: Keys of LINKS.
        steps: Of a turn, about; rounds of local steps are not cut.
        turns: Of each way.
    """
    ways = [REFERENCE, *(way for way in ways if way != REFERENCE)]
    rows: list[Row] = []
    draw = random.Random(0)
    for link in links:
        with running(link, {LINKS_TASK: task}) as (ranks, hosts):
            for slowness in SLOWNESS:
                seconds, idle = ({way: list[float]() for way in ways} for _ in range(2))
                codec: dict[str, float] = {}
                counted: dict[str, float] = {}
                for _ in range(turns):
                    for way in draw.sample(ways, len(ways)):
                        period = WAYS[way].local_steps
                        length = period * math.ceil(steps / period)
                        made = ranks.ask("make", LINKS_TASK, way, 0, task.rates[0], task.steps)[1]
                        codec[way] = max(each["codec_s"] for each in made)
                        ranks.ask("run", period, slowness)  # makes connections and memory
                        cores, before = core_time(), sent(hosts)
                        took = ranks.ask("run", length, slowness, patience=length)[1]
                        counted[way] = (sent(hosts) - before) / length
                        idle[way].append(idle_since(cores))
                        seconds[way].append(max(took) / length / slowness)
                for way, times in seconds.items():
                    step = spread(times)
                    row = {"task": LINKS_TASK, "way": way, "link": link, "slowness": slowness, "step_s": step}
                    row |= {"bits_per_s": LINKS[link] * slowness, "codec_s": codec[way]}
                    row |= {"bytes a step": round(counted[way])}
                    rows.append(row | {"cpu_idle": statistics.median(idle[way])})
                    print(f"{link} x {slowness:g}: {way}: {1e3 * step['median']:.2f} ms a step", flush=True)
    return rows


def times_to_loss(
    links: Iterable[Mapping[str, Any]], points: Iterable[Mapping[str, Any]], target: float
) -> list[Row]:
    """Returns the rows of `measure_links` with the steps to the target, the median of the seeds, and their product.

    Args:
        links: Rows of `measure_links`.
        points: Of the training of that task.
        target: The loss to which steps are counted.
    """
    counts = median_steps(points, target, ("way",))
    rows: list[Row] = []
    for row in links:
        count = finite(counts.get((row["way"],), math.inf))
        seconds = None if count is None else count * row["step_s"]["median"]
        rows.append({**row, "target": target, "steps": count, "seconds": seconds})
    plain = {(r["bits_per_s"], r["slowness"]): r["seconds"] for r in rows if r["way"] == REFERENCE}
    for row in rows:
        reference = plain[row["bits_per_s"], row["slowness"]]
        known = row["seconds"] is not None and reference is not None
        row["of no codec"] = row["seconds"] / reference if known else None
    return rows


def crossing(rows: Iterable[Mapping[str, Any]], way: str) -> tuple[str, float]:
    """Returns the link speed up to which a way pays, in bits per second, by its rows of `times_to_loss`.

    Returns:
        "at" and the speed, interpolated between two measured ones; "above" and the largest measured speed, if the way
        pays there; "below" and the smallest one, if it does not pay anywhere.
    """
    undilated = {r["bits_per_s"]: r for r in rows if r["way"] == way and r["slowness"] == 1}
    fastest = max(undilated, default=0.0)
    dilated = {r["bits_per_s"]: r for r in rows if r["way"] == way and r["bits_per_s"] > fastest}
    known = {
        speed: math.inf if row["of no codec"] is None else float(row["of no codec"])
        for speed, row in sorted((undilated | dilated).items())
    }
    speeds = list(known)
    if known[speeds[0]] > PAYS:
        return "below", speeds[0]
    for slow, fast in pairwise(speeds):
        if known[fast] > PAYS:
            share = (PAYS - known[slow]) / (known[fast] - known[slow]) if math.isfinite(known[fast]) else 0.0
            return "at", math.exp(math.log(slow) + share * (math.log(fast) - math.log(slow)))
    return "above", speeds[-1]


def crossings(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Returns the `crossing` of each way."""
    ways = dict.fromkeys(row["way"] for row in rows if row["way"] != REFERENCE)
    return [
        {"way": way, "where": where, "bits_per_s": speed}
        for way, (where, speed) in ((way, crossing(rows, way)) for way in ways)
    ]
