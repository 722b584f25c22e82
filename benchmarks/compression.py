"""What compression costs and saves: codecs, exchanges over a link, losses over bytes, and time to a loss over links.

    make benchmark-compression                                  # as root: all parts, some 20 minutes
    python benchmarks/compression.py --parts codecs             # anywhere
    python benchmarks/compression.py --parts training --keep --json FILE    # goes on with a run that was stopped

The file keeps what it has of other parts. With --keep, trainings that it has are not repeated, so a stopped run can go on,
and ways can be added later.

docs/measurements/benchmarks.md has the parts, and compression_training.py the last two of them.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import compression_training as parts
import fogdist
import program
import torch
import torch.distributed as dist
from cluster_ranks import HostRank, emulated_world
from compression_ranks import TASKS, WAYS
from emulated_hosts import Unavailable, traffic
from fogdist.compression import BFloat16, Codec, Float16, Int8, TopK
from performance_tables import codec_table, compressed_loss_table, compressed_time_table, exchange_table
from report import parse_size, size_text, write

SIZE = 16 << 20
LIMIT = 120.0  # seconds of a phase
PARTS = ["codecs", "exchanges", "training", "links"]
CODECS: dict[str, Codec] = {
    "float16": Float16(),
    "bfloat16": BFloat16(),
    "int8": Int8(),
    "top-k 1 %": TopK(0.01),
}
EXCHANGED = ["float16", "int8", "top-k 1 %"]


# --- codecs ---------------------------------------------------------------------------------------------------


def seconds_of(call: Callable[[], object]) -> float:
    """Returns the time of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def measure_codecs(size: int, repetitions: int) -> list[dict[str, Any]]:
    """Returns a row for memcpy and each codec."""
    torch.set_num_threads(1)
    x = torch.randn(size // 4, generator=torch.Generator().manual_seed(0))
    target = torch.empty_like(x)
    calls: dict[str, tuple[Callable[[], object], int]] = {"memcpy": (lambda: target.copy_(x), 2 * size)}
    for name, codec in CODECS.items():
        backend = codec.backend
        message = codec.encode(x)
        moved = size + message.numel()
        calls[f"{name} encode"] = functools.partial(backend.encode, x, message), moved
        calls[f"{name} decode"] = functools.partial(backend.decode, message, target), moved
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repetitions):
        for name, (call, _) in calls.items():
            times[name].append(seconds_of(call))
    rows = []
    for name, (_, moved) in calls.items():
        median = statistics.median(times[name])
        rows.append({"codec": name, "ms": 1e3 * median, "GB/s": moved / median / 1e9})
    for row in rows:
        row["of memcpy"] = row["GB/s"] / rows[0]["GB/s"]
    return rows


# --- exchanges ------------------------------------------------------------------------------------------------


class ExchangeRank(HostRank):
    """A rank with a tensor of so many bytes."""

    def __init__(self, rank: int, size: int, bytes_: int) -> None:
        super().__init__(rank, size, LIMIT)
        self.x = torch.randn(bytes_ // 4, generator=torch.Generator().manual_seed(rank))

    def exchange(self, name: str) -> float:
        """Averages the tensor with the other rank, encoded by a codec; returns the seconds."""
        codec = CODECS.get(name)
        dist.barrier()
        return seconds_of(functools.partial(fogdist.neighbor_allreduce, self.x, compression=codec))


def measure_exchanges(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row for each codec, measured on two emulated hosts."""
    names = ["none", *EXCHANGED]
    times: dict[str, list[float]] = {name: [] for name in names}
    rows: list[dict[str, Any]] = []
    world = emulated_world("exchanges", 2, arguments.rate, LIMIT, ExchangeRank, arguments.size)
    with world as (ranks, hosts):
        for repetition, name in itertools.product(range(arguments.repetitions + 1), names):
            seconds = max(ranks.ask("exchange", name)[1])
            if repetition > 0:  # the first ones make connections
                times[name].append(seconds)
        for name in names:
            before = traffic(hosts)[0][0]
            for _ in range(3):
                ranks.ask("exchange", name)
            sent = (traffic(hosts)[0][0] - before) // 3
            elements = arguments.size // 4
            promised = CODECS[name].bytes(elements) if name != "none" else 4 * elements
            median, least = statistics.median(times[name]), min(times[name])
            rows.append(
                {
                    "codec": name,
                    "ms": 1e3 * median,
                    "least ms": 1e3 * least,
                    "promised bytes": promised,
                    "sent bytes": sent,
                    "speed": statistics.median(times["none"]) / median,
                    "of promised": sent / promised,
                }
            )
    return rows


# --- the program ----------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    """Returns the checked command line."""
    parser = program.parser_of(__doc__)
    add, count = parser.add_argument, program.at_least(1)
    program.add_names(parser, "--parts", PARTS)
    add("--size", type=parse_size, default=SIZE, metavar="BYTES", help="of the tensor, such as 16M")
    add("--rate", default="1gbit", help="of each host's link in exchanges, in the words of tc")
    add("--repetitions", type=count, default=15, help="of codecs and exchanges")
    program.add_names(parser, "--tasks", TASKS)
    program.add_names(parser, "--ways", WAYS)
    add("--seeds", type=int, nargs="+", default=list(parts.SEEDS), metavar="N", help="of the training")
    add("--steps", type=count, help="of a training (default: each task's own)")
    program.add_names(parser, "--links", parts.LINKS)
    add("--link-steps", type=count, default=40, help="of a turn over a link (default: %(default)s)")
    add("--turns", type=count, default=3, help="of each way over a link (default: %(default)s)")
    add("--json", type=Path, help="file for the numbers; parts that are not measured now stay")
    add("--keep", action="store_true", help="do not repeat trainings that the file has")
    arguments = parser.parse_args()
    if arguments.size < 4:
        parser.error(f"--size: got {arguments.size}; must be 4 or more")
    return arguments


class Results:
    """What the file holds, if there is to be one: facts by part, and the rows of all parts."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.rows: dict[str, Any] = {}
        if path is not None and path.exists():
            self.rows = json.loads(path.read_text())
        self.facts: dict[str, Any] = self.rows.pop("facts", {})

    def add(self, part: str, about: dict[str, Any], **rows: Any) -> None:
        """Takes the results of a part, and writes the file."""
        self.facts[part] = about
        self.rows |= rows
        if self._path is not None:
            write(self._path, facts=self.facts, **self.rows)


def measure_training(arguments: argparse.Namespace, results: Results) -> None:
    """Measures the part "training"."""
    tasks = {name: TASKS[name]() for name in arguments.tasks}
    about = program.facts() | {"ranks": parts.RANKS}
    before = results.facts.get("training", {}).get("tasks", {}) if arguments.keep else {}
    about["tasks"] = before | {
        name: {
            "about": task.about,
            "steps": arguments.steps or task.steps,
            "rates": list(task.rates),
            "target": task.target,
            "tuning_seeds": list(task.tuning_seeds),
        }
        for name, task in tasks.items()
    }
    tuning, points = (results.rows.get(name, []) if arguments.keep else [] for name in ("tuning", "points"))

    def tell() -> None:
        results.add("training", about, tuning=tuning, points=points, compared=parts.compared_ways(points))

    parts.measure_training(tasks, arguments.ways, arguments.seeds, arguments.steps, tuning, points, tell)
    print(f"\n{compressed_loss_table(results.rows['compared'])}")


def measure_links(arguments: argparse.Namespace, results: Results) -> None:
    """Measures the part "links"."""
    task = TASKS[parts.LINKS_TASK]()
    steps, turns = arguments.link_steps, arguments.turns
    about = program.facts() | {"turns": turns, "steps of a turn": steps, "pays": parts.PAYS}
    measured = parts.measure_links(task, arguments.ways, arguments.links, steps, turns)
    known = [p for p in results.rows.get("points", []) if p["task"] == parts.LINKS_TASK]
    rows = parts.times_to_loss(measured, known, task.target)
    found = parts.crossings(rows)
    results.add("links", about, links=rows, crossings=found)
    print(f"\ntime to a loss of {task.target}: {parts.LINKS_TASK}\n{compressed_time_table(rows, found)}")


def main() -> None:
    """Measures the parts one after the other, and writes the results after each."""
    arguments = parse_arguments()
    results = Results(arguments.json)
    if "codecs" in arguments.parts:
        about = program.facts() | {"size": arguments.size}
        rows = measure_codecs(arguments.size, arguments.repetitions)
        results.add("codecs", about, codecs=rows)
        print(codec_table(rows))
    try:
        if "exchanges" in arguments.parts:
            about = program.facts() | {"size": arguments.size, "rate": arguments.rate}
            rows = measure_exchanges(arguments)
            results.add("exchanges", about, exchanges=rows)
            print(f"exchange of {size_text(arguments.size)} between 2 hosts at {arguments.rate}")
            print(exchange_table(rows))
        if "training" in arguments.parts:
            measure_training(arguments, results)
        if "links" in arguments.parts:
            measure_links(arguments, results)
    except Unavailable as reason:
        print(f"exchanges, training and links: not measured: {reason}")


if __name__ == "__main__":
    main()
