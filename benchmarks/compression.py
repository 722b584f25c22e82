"""What compression costs and saves: codecs, exchanges over a link, losses over bytes, and time to a loss over links.

    make benchmark-compression                                  # as root: all parts, some 20 minutes
    python benchmarks/compression.py --parts codecs             # anywhere
    python benchmarks/compression.py --parts links --keep       # what else the file has stays

With --keep, trainings that the file has are not repeated, so a stopped run can go on, and ways can be added later.

Codecs: encode and decode of 16 MiB of float32 on one core, in GB/s of bytes read and written, beside memcpy of the same
tensor. They take turns. The goal is half of memcpy's bytes per second for int8.

Exchanges: two ranks on two emulated hosts (emulated_hosts.py) average a tensor over a link of a given rate, with each
codec in turn, and without. For each, the median time, its ratio to the exchange without compression, and the bytes that
a host sends, beside those that the codec promises. The goals are 3.5 times the speed with int8, and bytes within 2 % of
the promised ones.

Training and links: compression_training.py.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import program
from emulated_hosts import Unavailable, address, traffic
from performance_tables import codec_table, exchange_table
from report import parse_size, size_text, write_results

if TYPE_CHECKING:
    from fogdist.compression import Codec

SIZE = 16 << 20
TIMEOUT = timedelta(minutes=2)
# The least that a codec must reach: of memcpy's bytes per second, and of the speed without compression.
GOAL_OF_MEMCPY = 0.5
GOAL_OF_SPEED = 3.5
# By how much more than the promised bytes a link may carry.
GOAL_OF_BYTES = 0.02
PARTS = ["codecs", "exchanges", "training", "links"]
RESULTS = Path(__file__).resolve().parent / "results" / "compression.json"


def codecs() -> dict[str, Codec]:
    """Returns the measured codecs by name."""
    from fogdist.compression import BFloat16, Float16, Int8, TopK

    return {
        "float16": Float16(),
        "bfloat16": BFloat16(),
        "int8": Int8(),
        "top-k 1 %": TopK(0.01),
        "top-k 1 %, 2 bits": TopK(0.01, bits=2),
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
    import torch

    torch.set_num_threads(1)
    x = torch.randn(size // 4, generator=torch.Generator().manual_seed(0))
    target = torch.empty_like(x)
    calls: dict[str, tuple[Callable[[], object], int]] = {"memcpy": (lambda: target.copy_(x), 2 * size)}
    for name, codec in codecs().items():
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


def print_codecs(rows: list[dict[str, Any]]) -> None:
    """Prints the rows of `measure_codecs`."""
    print(codec_table(rows))
    for row in rows:
        if row["codec"] in ("int8 encode", "int8 decode"):
            met = "met" if row["of memcpy"] >= GOAL_OF_MEMCPY else "missed"
            print(f"goal: {row['codec']} at {GOAL_OF_MEMCPY} of memcpy: {row['of memcpy']:.2f}, {met}")


# --- exchanges ------------------------------------------------------------------------------------------------


class ExchangeRank:
    """A rank; the parent calls its methods by name.

    Args:
        rank: Its number.
        size: The number of ranks.
        bytes_: Of the tensor.
    """

    def __init__(self, rank: int, size: int, bytes_: int) -> None:
        import torch

        self.rank, self.size = rank, size
        self.x = torch.randn(bytes_ // 4, generator=torch.Generator().manual_seed(rank))

    def start(self) -> None:
        """Joins the others."""
        import fogdist
        import torch.distributed as dist
        from cluster_ranks import PORT

        store = dist.TCPStore(address(0), PORT, is_master=False, timeout=TIMEOUT)
        dist.init_process_group("fog", store=store, rank=self.rank, world_size=self.size, timeout=TIMEOUT)
        fogdist.init(lambda n: fogdist.topology.by_name("full", n))

    def exchange(self, name: str) -> float:
        """Averages the tensor with the other rank, encoded by a codec; returns the seconds."""
        import fogdist
        import torch.distributed as dist

        codec = codecs().get(name)
        dist.barrier()
        return seconds_of(functools.partial(fogdist.neighbor_allreduce, self.x, compression=codec))

    def leave(self) -> None:
        """Meets the other before the end."""
        import torch.distributed as dist

        dist.barrier()


def measure_exchanges(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row for each codec, measured on two emulated hosts."""
    from cluster_ranks import emulated_world

    from fog_pg._extension import load as load_extension

    load_extension()
    names = ["none", *EXCHANGED]
    times: dict[str, list[float]] = {name: [] for name in names}
    rows: list[dict[str, Any]] = []
    limit = TIMEOUT.total_seconds()
    with emulated_world("exchanges", 2, arguments.rate, limit, ExchangeRank, arguments.size) as (
        ranks,
        hosts,
    ):
        for repetition, name in itertools.product(range(arguments.repetitions + 1), names):
            seconds = max(ranks.ask("exchange", name)[1])
            if repetition > 0:  # the first ones make connections
                times[name].append(seconds)
        for name in names:
            before = traffic(hosts)[0][0]
            for _ in range(3):
                ranks.ask("exchange", name)
            sent = (traffic(hosts)[0][0] - before) // 3
            promised = (
                codecs()[name].bytes(arguments.size // 4) if name != "none" else arguments.size // 4 * 4
            )
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


def print_exchanges(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Prints the rows of `measure_exchanges`."""
    print(f"exchange of {size_text(arguments.size)} between 2 hosts at {arguments.rate}")
    print(exchange_table(rows))
    (speed,) = (row["speed"] for row in rows if row["codec"] == "int8")
    print(
        f"goal: int8 {GOAL_OF_SPEED} times as fast: {speed:.2f}, {'met' if speed >= GOAL_OF_SPEED else 'missed'}"
    )
    most = max(abs(row["of promised"] - 1) for row in rows)
    outcome = "met" if most <= GOAL_OF_BYTES else "missed"
    print(f"goal: bytes within {GOAL_OF_BYTES:.0%} of the promised ones: {most:.2%}, {outcome}")


# --- the program ----------------------------------------------------------------------------------------------


def facts() -> dict[str, Any]:
    """Returns facts about the run of a part for readers of the numbers."""
    import torch

    return {
        "date": datetime.date.today().isoformat(),
        "load average before": round(os.getloadavg()[0], 2),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "torch": torch.__version__,
    }


def parse_arguments() -> argparse.Namespace:
    """Returns the checked command line."""
    parser = program.parser_of(__doc__)
    add = parser.add_argument
    program.add_names(parser, "--parts", PARTS, help="which to measure (default: all)")
    add("--size", type=parse_size, default=SIZE, metavar="BYTES", help="of the tensor, such as 16M")
    add("--rate", default="1gbit", help="of each host's link in exchanges, in the words of tc")
    add("--repetitions", type=int, default=15, help="of codecs and exchanges")
    add("--tasks", nargs="+", metavar="NAME", help="of the training (default: all)")
    add("--ways", nargs="+", metavar="NAME", help="of training and links (default: all)")
    add("--seeds", type=int, nargs="+", metavar="N", help="of the training (default: 1 2 3)")
    add("--steps", type=int, help="of a training (default: each task's own)")
    add("--links", nargs="+", metavar="RATE", help="of the links, in the words of tc (default: all)")
    add("--link-steps", type=int, default=40, help="of a turn over a link (default: %(default)s)")
    add("--turns", type=int, default=3, help="of each way over a link (default: %(default)s)")
    add("--json", type=Path, help=f"file for the numbers (default for all parts or with --keep: {RESULTS})")
    add("--keep", action="store_true", help="go on with the file: parts and trainings that it has stay")
    arguments = parser.parse_args()
    if arguments.size < 4:
        parser.error(f"--size: got {arguments.size}; must be 4 or more")
    for name in ("repetitions", "link_steps", "turns", "steps"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')}: got {value}; must be 1 or more")
    if arguments.json is None and (arguments.keep or arguments.parts == PARTS):
        arguments.json = RESULTS
    return arguments


class Results:
    """What the file holds: facts by part, and the rows of all parts.

    Args:
        path: The file; None to keep them in memory only.
        keep: Whether to begin with what it holds.
    """

    def __init__(self, path: Path | None, keep: bool) -> None:
        self._path = path
        self.facts: dict[str, Any] = {}
        self.rows: dict[str, Any] = {}
        if keep and path is not None and path.exists():
            content = json.loads(path.read_text())
            self.facts = content.pop("facts")
            content.pop("failures")
            self.rows = content

    def add(self, part: str, about: dict[str, Any], **rows: Any) -> None:
        """Takes the results of a part, and writes the file."""
        self.facts[part] = about
        self.rows |= rows
        if self._path is not None:
            write_results(self._path, self.facts, [], **self.rows)


def measure_training_and_links(arguments: argparse.Namespace, results: Results) -> None:
    """Measures these two parts, as far as they are asked for."""
    import compression_training as parts

    ways = chosen(arguments.ways, list(parts.WAYS), "--ways")
    if "training" in arguments.parts:
        about = facts()
        tasks = parts.tasks_of(chosen(arguments.tasks, list(parts.TASKS), "--tasks"))
        before = results.facts.get("training", {}).get("tasks", {})
        seeds = arguments.seeds or list(parts.SEEDS)
        about |= {
            "ranks": parts.RANKS,
            "goal": parts.GOAL,
            "tasks": {
                name: {
                    "about": task.about,
                    "steps": arguments.steps or task.steps,
                    "rates": list(task.rates),
                    "target": task.target,
                    "tuning_seeds": list(task.tuning_seeds),
                }
                for name, task in tasks.items()
            },
        }
        about["tasks"] = before | about["tasks"]

        tuning, points = (results.rows.get(name, []) for name in ("tuning", "points"))

        def tell() -> None:
            results.add("training", about, tuning=tuning, points=points, compared=parts.compared(points))

        parts.measure_training(tasks, ways, seeds, arguments.steps, tuning, points, tell)
        parts.print_training(results.rows["compared"])
    if "links" in arguments.parts:
        about = facts()
        (task,) = parts.tasks_of([parts.LINKS_TASK]).values()
        links = chosen(arguments.links, list(parts.LINKS), "--links")
        measured = parts.measure_links(task, ways, links, arguments.link_steps, arguments.turns)
        targets = {parts.LINKS_TASK: task.target}
        known = [p for p in results.rows.get("points", []) if p["task"] == parts.LINKS_TASK]
        rows = parts.times_to_loss(measured, known, targets)
        found = parts.crossings(rows)
        about |= {"turns": arguments.turns, "steps of a turn": arguments.link_steps, "pays": parts.PAYS}
        results.add("links", about, links=rows, crossings=found)
        parts.print_links(rows, found)


def chosen(names: list[str] | None, known: list[str], option: str) -> list[str]:
    """Returns the names that were given, or all; ends the program if one is not known."""
    for name in names or ():
        if name not in known:
            sys.exit(f"{option}: got {name!r}; allowed are {', '.join(map(repr, known))}")
    return names or known


def main() -> None:
    """Measures the parts one after the other, and writes the results after each."""
    arguments = parse_arguments()
    program.load_before()
    results = Results(arguments.json, arguments.keep)
    if "codecs" in arguments.parts:
        about = facts() | {"size": arguments.size}
        rows = measure_codecs(arguments.size, arguments.repetitions)
        results.add("codecs", about, codecs=rows)
        print_codecs(rows)
    try:
        if "exchanges" in arguments.parts:
            about = facts() | {"size": arguments.size, "rate": arguments.rate}
            rows = measure_exchanges(arguments)
            results.add("exchanges", about, exchanges=rows)
            print_exchanges(rows, arguments)
        if {"training", "links"} & set(arguments.parts):
            measure_training_and_links(arguments, results)
    except Unavailable as reason:
        print(f"exchanges, training and links: not measured: {reason}")


if __name__ == "__main__":
    main()
