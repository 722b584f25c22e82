"""Training over links whose rates change, with one slow host: `tune=True` beside fixed settings, DDP and torchft.

    python benchmarks/link_traces.py --json benchmarks/results/traces.json     # as root, some 40 minutes
    python benchmarks/link_traces.py --traces 1 --ways tune "4 Int8" --seconds 20

Run it as root on Linux: hosts are network namespaces (emulated_hosts.py) with one rank each. The accelerator is a sleep, and
the model is GPT-2 by the sizes of its layers, dilated (workloads.py).

Part "traces": 8 hosts, of which one needs twice the time for a sample. All links have the rate of a trace of benchmarks/traces,
which `make_trace` has made: between 20 Mbit/s and 1 Gbit/s, another one after 10 to 30 s. Each way trains along each trace:

    none          each rank by itself, for a short time
    tune          `DecentralizedOptimizer(tune=True)`
    4 Int8        a fixed setting: one peer a round, 4 local steps, codec Int8; "4 None" is the same without a codec
    ddp_gloo      DistributedDataParallel on Gloo
    torchft       Streaming DiLoCo of torchft where that is installed: 4 fragments, each every 16 steps, 3 steps delayed

A rank gets a part of the batch by its speed: by `SharedBatches`, and for DDP and torchft, which have nothing like it, by the
true speeds. A way is one job that sees all traces; while it stands still others have their turn. The share of compute is the
samples that all ranks have used in the time of the trace, over those of "none".

Part "sites": 8 hosts with equal accelerators in two sites, joined by 100 Mbit/s and then by 10 Mbit/s.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))

import fogdist
import networkx  # noqa: F401  before ranks are forked
import numpy as np
import program
import torch
import torch.distributed as dist
from cluster import LEAST_IDLE, MOST_LATE
from cluster_ranks import (
    PORT,
    ClusterRank,
    Device,
    EmulatedLayer,
    Job,
    Trainer,
    core_time,
    emulated_world,
    idle_since,
    prepare,
)
from emulated_hosts import Unavailable, address, change_between, change_rate, inside, rate_text
from fogdist.compression import Int8
from forked_ranks import ForkedWorld, WorldFailed
from report import write
from torch import nn
from workloads import DDP_CAP_MB, SCENARIOS, emulated

ROOT = Path(__file__).resolve().parent
TRACES = range(1, 6)
HOSTS, SLOW_HOST = 8, 1
LIGHTHOUSE_PORT = PORT + 2
SLOWEST, FASTEST = 20e6, 1e9
LEAST_SECONDS, MOST_SECONDS = 10.0, 30.0
FIXED = [f"{steps} {codec}" for steps in (1, 4, 16) for codec in ("None", "Int8")]
WAYS = ["none", "tune", *FIXED, "ddp_gloo", "torchft"]
# Samples of an equal part of the batch, and of the data set, which is long enough for one epoch.
BATCH, DATA = 64, 1 << 22
# Steps after which ranks that began with equal parts have others.
MEASURED_STEPS = 16
ALONE_SECONDS = 6.0
COMPUTE_SECONDS = 0.2
PHASE_SECONDS = 120.0
BETWEEN = ("100mbit", "10mbit")
# Of the picture: seconds of one value of throughput.
BIN_SECONDS = 2.0


def make_trace(seed: int, seconds: float) -> list[list[float]]:
    """Returns when the rate changes, and the rate from then on in Mbit/s, whose logarithm is distributed evenly."""
    draw, changes, begin = random.Random(seed), [], 0.0
    while begin < seconds:
        rate = SLOWEST * (FASTEST / SLOWEST) ** draw.random()
        changes.append([round(begin, 1), round(rate / 1e6, 1)])
        begin += draw.uniform(LEAST_SECONDS, MOST_SECONDS)
    return changes


class PartialDevice(Device):
    """An accelerator that computes a part of the batch for which layers have their seconds."""

    part = 1.0

    def compute(self, seconds: float) -> None:
        """Is given work."""
        super().compute(self.part * seconds)


class Ending:
    """Lets ranks end after equally many steps: the most that any of them has begun when the time is over."""

    def __init__(self) -> None:
        # The steps that each rank has begun, and the last step, or 0.
        self._begun = multiprocessing.get_context("fork").Array("q", HOSTS + 1)

    def clear(self) -> None:
        """Called before a turn."""
        self._begun[:] = [0] * (HOSTS + 1)

    def may_begin(self, rank: int, step: int, is_over: bool) -> bool:
        """Returns whether a rank begins its next step, counted from 1."""
        with self._begun.get_lock():
            if is_over and not self._begun[HOSTS]:
                self._begun[HOSTS] = max(self._begun)
            last = self._begun[HOSTS]
            if last and step > last:
                return False
            self._begun[rank] = step
            return True


class TraceRank(ClusterRank):
    """A rank; the parent calls its methods by name."""

    def __init__(self, ending: Ending, rank: int, size: int, job: Job) -> None:
        super().__init__(rank, size, job)
        self.device: PartialDevice = PartialDevice()
        self.ending = ending
        self.parts: dict[str, Iterator[list[int]]] = {}
        self.draw = random.Random(f"{job.seed} {rank}")

    def follow(self, way: str, begin: float, seconds: float) -> dict[str, Any]:
        """Trains from a time on for so many seconds.

        Returns:
            The time after each step, the samples of each step, some elements of each parameter after it, and with tune
            the moves: steps of this turn, topology, local steps, codec, reason.
        """
        trainer = self.trainers[way]
        optimizer: Any = trainer.optimizer
        moves = len(optimizer.tuning.history) if way == "tune" else 0
        first = trainer.steps
        ends: list[float] = []
        samples: list[int] = []
        elements: list[np.ndarray] = []
        time.sleep(max(0.0, begin - time.perf_counter()))
        while True:
            is_over = time.perf_counter() - begin >= seconds
            if is_over if way == "none" else not self.ending.may_begin(self.rank, len(ends) + 1, is_over):
                break
            samples.append(self._samples(way))
            self.device.part = samples[-1] / BATCH
            self._change_gradients(trainer.module)
            self._step(trainer)
            ends.append(time.perf_counter() - begin)
            some = [each.detach().flatten()[:2] for each in trainer.module.parameters()]
            elements.append(torch.cat(some).numpy())
        answer = {"ends": ends, "samples": samples, "elements": np.stack(elements), "moves": []}
        if way == "tune":
            answer["moves"] = [
                (max(0, each.step - first), each.topology, each.local_steps, str(each.compression), each.reason)
                for each in optimizer.tuning.history[max(0, moves - 1) :]  # that of the beginning too
            ]
        return answer

    # --- inside ---

    def _samples(self, way: str) -> int:
        if way == "none":
            return BATCH
        if way in self.parts:
            return len(next(self.parts[way]))
        speeds = [1 / self.job.slow.get(host, 1.0) for host in range(self.size)]
        return round(BATCH * self.size * speeds[self.rank] / sum(speeds))

    def _change_gradients(self, module: nn.Module) -> None:
        """Gives each layer's gradients another sign at random, on each rank for itself."""
        for layer in module.modules():
            if isinstance(layer, EmulatedLayer) and self.draw.random() < 0.5:
                for each in layer.gradients:
                    each.neg_()

    def _trainer(self, way: str, model: nn.Sequential) -> Trainer:
        # Otherwise all weights are 0 and all gradients alike, and ranks do not come to differ.
        alike, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1 + self.rank)
        for layer in model:
            assert isinstance(layer, EmulatedLayer)
            for weight, gradient in zip(layer.weights, layer.gradients, strict=True):
                weight.data.normal_(0.0, 0.02, generator=alike)
                gradient.normal_(0.0, 1e-3, generator=own)
        if way in ("none", "ddp_gloo"):
            return super()._trainer(way, model)
        sgd = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        if way == "torchft":
            return Trainer(model, self._streaming(model, sgd))
        # Of accelerators that are not the CPU.
        options: dict[str, Any] = {"bucket_cap_mb": self.job.dilation.cap_mb(DDP_CAP_MB)}
        local_steps = 1
        if way == "tune":
            options["tune"] = True
        else:
            local_steps, codec = int(way.split()[0]), way.split()[1]
            options |= {
                "topology": "one-peer-exp2",
                "local_steps": local_steps,
                "compression": Int8() if codec == "Int8" else None,
            }
        optimizer = fogdist.DecentralizedOptimizer(sgd, model, **options)
        every = max(1, MEASURED_STEPS // local_steps)
        batches = fogdist.SharedBatches(optimizer, DATA, BATCH * self.size, seed=None, every=every)
        self.parts[way] = iter(batches)
        return Trainer(model, optimizer)

    def _streaming(self, model: nn.Sequential, inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Returns the optimizer, of whose steps torchft's Streaming DiLoCo knows."""
        from torchft import Manager, ProcessGroupGloo
        from torchft.local_sgd import DiLoCo

        own = address(self.rank)
        self.store = dist.TCPStore(own, 0, is_master=True, wait_for_workers=False)
        manager = Manager(
            pg=ProcessGroupGloo(timeout=self.timeout),
            load_state_dict=lambda state: None,
            state_dict=lambda: {"nothing": torch.zeros(1)},
            min_replica_size=self.size,
            use_async_quorum=False,
            timeout=self.timeout,
            quorum_timeout=self.timeout,
            rank=0,
            world_size=1,
            store_addr=own,
            store_port=self.store.port,
            lighthouse_addr=f"http://{address(0)}:{LIGHTHOUSE_PORT}",
            replica_id=str(self.rank),
            hostname=own,
            init_sync=False,
        )
        # The embeddings, which are a third of the parameters, and three times 8 layers.
        fragments = [model[:1], *(model[place : place + 8] for place in (1, 9)), model[17:]]
        outer = [
            torch.optim.SGD(each.parameters(), lr=0.7, momentum=0.9, nesterov=True) for each in fragments
        ]
        about = {"fragment_sync_delay": 3, "fragment_update_alpha": 0.5, "pin_memory": False}
        self.streaming = DiLoCo(manager, fragments, inner, outer, sync_every=16, **about)
        self.streaming.__enter__()
        return inner


@contextlib.contextmanager
def lighthouse(host: str) -> Iterator[None]:
    """Runs the server by which torchft's ranks find each other on a host."""
    words = ["torchft_lighthouse", "--bind", f"[::]:{LIGHTHOUSE_PORT}", "--min_replicas", str(HOSTS)]
    server = subprocess.Popen([*inside(host), *words])
    try:
        yield
    finally:
        server.kill()
        server.wait()


def play(changes: Sequence[tuple[float, str]], change: Callable[[str], None], begin: float) -> None:
    """Calls `change` with each rate when it begins."""
    for at, rate in changes:
        time.sleep(max(0.0, begin + at - time.perf_counter()))
        change(rate)


@dataclass
class Turn:
    """What a way did in a turn.

    Attributes:
        answers: Of the ranks, see `TraceRank.follow`.
        seconds: That count.
        idle: Share of the cores' time in which nothing ran.
    """

    answers: list[dict[str, Any]]
    seconds: float
    idle: float

    def samples(self, times: Sequence[float]) -> np.ndarray:
        """Returns how many samples all ranks had used by some times; of a step a part."""
        return sum(
            np.interp(times, [0.0, *each["ends"]], [0, *np.cumsum(each["samples"])]) for each in self.answers
        )

    @property
    def rate(self) -> float:
        """Samples per second."""
        return float(self.samples([self.seconds])[0]) / self.seconds

    def moves(self, alone: float) -> list[dict[str, Any]]:
        """Returns the settings of the turn, and the share of the compute with each."""
        ends = [0.0, *self.answers[0]["ends"]]
        found = [each for each in self.answers[0]["moves"] if ends[each[0]] < self.seconds]
        times = [*(ends[step] for step, *_ in found), self.seconds]
        rates = np.diff(self.samples(times)) / np.maximum(np.diff(times), 1e-9)
        keys = ("step", "topology", "local_steps", "codec", "reason")
        return [
            dict(zip(keys, each, strict=True)) | {"time": round(at, 2), "share": round(float(rate) / alone, 4)}
            for each, at, rate in zip(found, times, rates, strict=False)
        ]

    def distances(self) -> list[float]:
        """Returns after each step how far ranks are from their mean, relative to it, at equal numbers of steps."""
        elements = np.stack([each["elements"] for each in self.answers])
        mean = elements.mean(0)
        off = np.sqrt(((elements - mean) ** 2).sum(2).mean(0))
        return list(off / np.linalg.norm(mean, axis=1))


def turn(
    ranks: ForkedWorld,
    ending: Ending,
    way: str,
    seconds: float,
    changes: Sequence[tuple[float, str]] = (),
    change: Callable[[str], None] = str,
) -> Turn:
    """Lets ranks train in a way, while rates change."""
    ending.clear()
    begin = time.perf_counter() + 0.2
    cores = core_time()
    with ThreadPoolExecutor(1) as other:
        playing = other.submit(play, changes, change, begin)
        answers = ranks.ask("follow", way, begin, seconds, patience=seconds)[1]
        idle = idle_since(cores)
        playing.result()
    return Turn(answers, seconds, idle)


def measure_traces(numbers: Sequence[int], ways: Sequence[str], job: Job, seconds: float) -> dict[str, Any]:
    """Returns a point for each way and trace, and the course of tune along the first trace."""
    ending = Ending()
    points: list[dict[str, Any]] = []
    picture: dict[str, Any] = {}
    expected = BATCH / job.compute * (HOSTS - 1 + 1 / job.slow[SLOW_HOST])
    world = emulated_world(
        "traces", HOSTS, rate_text(FASTEST), PHASE_SECONDS, partial(TraceRank, ending), job
    )
    with world as (ranks, hosts), lighthouse(hosts[0]) if "torchft" in ways else contextlib.nullcontext():
        change = partial(change_rate, hosts)
        for way in ways:
            ranks.ask("make", way)
            turn(ranks, ending, way, 2.5 * MEASURED_STEPS * job.compute)  # equal parts take twice the time
        for number in numbers:
            kept = json.loads((ROOT / "traces" / f"{number}.json").read_text())["changes"]
            changes = [(at, rate_text(1e6 * rate)) for at, rate in kept]
            alone = turn(ranks, ending, "none", ALONE_SECONDS)
            for way in ways[1:]:
                made = turn(ranks, ending, way, seconds, changes, change)
                is_bound = min(alone.idle, made.idle) < LEAST_IDLE or alone.rate < (1 - MOST_LATE) * expected
                point = {
                    "trace": number,
                    "way": way,
                    "share": round(made.rate / alone.rate, 4),
                    "samples_per_s": round(made.rate, 1),
                    "alone_samples_per_s": round(alone.rate, 1),
                    "steps": len(made.answers[0]["ends"]),
                    "cpu_idle": round(made.idle, 3),
                    "cpu_bound": is_bound,
                    "date": time.strftime("%Y-%m-%d"),
                }
                print(point, flush=True)
                points.append(point)
                if way == "tune":
                    point["moves"] = made.moves(alone.rate)
                    for move in point["moves"]:
                        print("   ", move, flush=True)
                    picture = picture or course(number, kept, made, alone.rate) | {"moves": point["moves"]}
    return {"points": points, "picture": picture}


def course(number: int, changes: list[list[float]], made: Turn, alone: float) -> dict[str, Any]:
    """Returns the data of the picture."""
    edges = np.arange(0.0, made.seconds + 1e-9, BIN_SECONDS)
    ends, distances = made.answers[0]["ends"], made.distances()
    return {
        "trace": number,
        "seconds": made.seconds,
        "rates": changes,
        "shares": [[float(at), round(float(n) / BIN_SECONDS / alone, 4)] for at, n in zip(edges, np.diff(made.samples(edges)), strict=False)],
        "distances": [[round(at, 2), float(f"{off:.3g}")] for at, off in zip(ends, distances, strict=True)],
    }


def measure_sites(job: Job, seconds: float) -> list[dict[str, Any]]:
    """Returns what tune does in two sites, with each rate between them."""
    ending = Ending()
    found = []
    options = {"centers": 2, "between": BETWEEN[0]}
    kind = partial(TraceRank, ending)
    with emulated_world("sites", HOSTS, rate_text(FASTEST), PHASE_SECONDS, kind, job, **options) as (ranks, hosts):
        for way in ("none", "tune"):
            ranks.ask("make", way)
        alone = turn(ranks, ending, "none", ALONE_SECONDS)
        for rate in BETWEEN:
            change_between(hosts, rate)
            made = turn(ranks, ending, "tune", seconds)
            point = {
                "between": rate,
                "share": round(made.rate / alone.rate, 4),
                "cpu_idle": round(made.idle, 3),
                "date": time.strftime("%Y-%m-%d"),
                "moves": made.moves(alone.rate),
            }
            print(rate, point["share"], point["cpu_idle"], *point["moves"], sep="\n    ", flush=True)
            found.append(point)
    return found


def parse_arguments() -> argparse.Namespace:
    """Returns the checked command line."""
    parser = program.parser_of(__doc__)
    add = parser.add_argument
    program.add_names(parser, "--parts", ["traces", "sites"])
    add("--traces", type=int, nargs="+", choices=TRACES, default=TRACES, metavar="N", help="their numbers")
    has_torchft = importlib.util.find_spec("torchft") is not None
    program.add_names(parser, "--ways", WAYS, WAYS if has_torchft else WAYS[:-1])
    add("--seconds", type=program.positive, default=60.0, help="of a trace")
    add("--compute", type=program.positive, default=COMPUTE_SECONDS, metavar="SECONDS", help="of an emulated step")
    add("--json", type=Path, help="file for the results; those of other parts, and of other traces and ways, stay")
    add("--make", action="store_true", help="write the traces anew and end")
    return parser.parse_args()


def main() -> None:
    """Measures, and writes the results of each part."""
    options = parse_arguments()
    if options.make:
        for number in TRACES:
            write(ROOT / "traces" / f"{number}.json", seed=number, changes=make_trace(number, options.seconds))
        return
    prepare()
    dilation = emulated(SCENARIOS["b"], options.compute)
    job = Job("gpt2", dilation, options.compute, timeout=PHASE_SECONDS)
    content: dict[str, Any] = {"points": []}
    if options.json is not None and options.json.exists():
        content = json.loads(options.json.read_text())
    content["facts"] = program.facts() | {"seconds": options.seconds, "compute_s": options.compute, "dilation": asdict(dilation)}
    try:
        for part in options.parts:
            if part == "sites":
                content["sites"] = measure_sites(job, options.seconds)
            else:
                ways = ["none", *(each for each in options.ways if each != "none")]
                slow = replace(job, slow={SLOW_HOST: 2.0})
                found = measure_traces(options.traces, ways, slow, options.seconds)
                again = {(each["trace"], each["way"]) for each in found["points"]}
                kept = [each for each in content["points"] if (each["trace"], each["way"]) not in again]
                content["points"] = kept + found["points"]
                if found["picture"]:
                    content["picture"] = found["picture"]
            if options.json is not None:
                write(options.json, **content)
    except (Unavailable, WorldFailed) as error:
        sys.exit(f"emulated hosts: {error}")


if __name__ == "__main__":
    main()
