"""Training over links whose rates change, with one slow host: `tune=True` beside fixed settings, DDP and torchft.

    python benchmarks/link_traces.py --json benchmarks/results/traces.json     # as root, some 40 minutes
    python benchmarks/link_traces.py --parts traces --traces 1 --ways tune "4 Int8" --seconds 20

Hosts are network namespaces with one rank each, the accelerator is a sleep, and the model is GPT-2 by the sizes of its
layers, dilated, as in cluster.py. Part "traces": 8 hosts, of which one needs twice the time for a sample. All links have the
rate that a file of benchmarks/traces says: between 20 Mbit/s and 1 Gbit/s, another one after 10 to 30 s. Ways:

    none          each rank by itself, for a short time
    tune          `DecentralizedOptimizer(tune=True)`
    4 Int8        a fixed setting: one peer a round, 4 local steps, codec Int8; "4 None" is the same without a codec
    ddp_gloo      DistributedDataParallel on Gloo
    torchft       its Streaming DiLoCo, where it is installed: 4 fragments, each every 16 steps, 3 steps delayed

Each rank gets a part of the batch by its speed: from `SharedBatches`, and with DDP and torchft, which have nothing like it, by
the true speeds. A way is one job along all traces, which stands still while others have their turn. The share of compute is
the samples that all ranks have used during the trace, over those of "none".

Part "sites": 8 equal hosts in two sites, joined by 100 Mbit/s, and then by 10.
"""

from __future__ import annotations

import argparse
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

TRACES = Path(__file__).resolve().parent / "traces"
NUMBERS = range(1, 6)
SLOWEST, FASTEST = 20e6, 1e9
SECONDS = 40.0
LEAST_SECONDS, MOST_SECONDS = 10.0, 30.0
HOSTS, SLOW_HOST = 8, 1
FIXED = [f"{steps} {codec}" for steps in (1, 4, 16) for codec in ("None", "Int8")]
WAYS = ["none", "tune", *FIXED, "ddp_gloo", "torchft"]
COMPUTE_SECONDS = 0.2
# Samples of an equal part of the batch, and of a data set that is not used up.
BATCH, DATA = 64, 1 << 22
# After so many steps ranks have other parts, and turns begin that count.
MEASURED_STEPS = 16
ALONE_SECONDS = 6.0
PHASE_SECONDS = 120.0
BETWEEN = ("100mbit", "10mbit")
LIGHTHOUSE_PORT = PORT + 2
# In memory of all ranks: the steps that each has begun in a turn; then the last step of the turn, or 0.
BEGUN: Any = multiprocessing.get_context("fork").Array("q", HOSTS + 1)
# Of one value of throughput in the picture.
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
    """An accelerator that computes only a part of the batch."""

    part = 1.0

    def compute(self, seconds: float) -> None:
        """Is given work."""
        super().compute(self.part * seconds)


class TraceRank(ClusterRank):
    """A rank; the parent calls its methods by name."""

    def __init__(self, rank: int, size: int, job: Job) -> None:
        super().__init__(rank, size, job)
        self.device: PartialDevice = PartialDevice()
        self.parts: dict[str, Iterator[list[int]]] = {}
        self.draw = random.Random(rank)

    def follow(self, way: str, begin: float, seconds: float) -> dict[str, Any]:
        """Trains from a time on for so many seconds.

        Returns:
            When each step ended, its samples, and two elements of each parameter after it; cores that the rank used; with tune
            the settings that there were: since which step of this turn, topology, local steps, codec, reason.
        """
        trainer = self.trainers[way]
        tuning: Any = getattr(trainer.optimizer, "tuning", None)
        known, first = len(tuning.history) if tuning else 0, trainer.steps
        ends: list[float] = []
        samples: list[int] = []
        elements: list[Any] = []
        time.sleep(max(0.0, begin - time.perf_counter()))
        cpu = time.process_time()
        while self._may_begin(way, len(ends) + 1, time.perf_counter() - begin >= seconds):
            samples.append(self._samples(way))
            self.device.part = samples[-1] / BATCH
            for layer in trainer.module.modules():
                if isinstance(layer, EmulatedLayer) and self.draw.random() < 0.5:
                    for gradient in layer.gradients:
                        gradient.neg_()
            self._step(trainer)
            ends.append(time.perf_counter() - begin)
            elements.append(
                torch.cat([each.detach().flatten()[:2] for each in trainer.module.parameters()]).numpy()
            )
        settings = [
            (max(0, each.step - first), each.topology, each.local_steps, repr(each.compression), each.reason)
            for each in (tuning.history[known - 1 :] if tuning else ())
        ]
        cpu = (time.process_time() - cpu) / ends[-1]
        return {
            "ends": ends,
            "samples": samples,
            "elements": np.stack(elements),
            "settings": settings,
            "cpu": cpu,
        }

    # --- inside ---

    def _may_begin(self, way: str, step: int, is_over: bool) -> bool:
        """Returns whether the turn has another step: ranks that wait for each other end after equally many."""
        if way == "none":
            return not is_over
        with BEGUN.get_lock():
            if is_over and not BEGUN[-1]:
                BEGUN[-1] = max(BEGUN)
            BEGUN[self.rank] = step
            return not BEGUN[-1] or step <= BEGUN[-1]

    def _samples(self, way: str) -> int:
        if way == "none":
            return BATCH
        if way in self.parts:
            return len(next(self.parts[way]))
        speeds = [1 / self.job.slow.get(host, 1.0) for host in range(self.size)]
        return round(BATCH * self.size * speeds[self.rank] / sum(speeds))

    def _trainer(self, way: str, model: nn.Sequential) -> Trainer:
        # Random, as ranks would not come to differ from each other otherwise.
        alike, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1 + self.rank)
        for layer in model:
            for weight, gradient in zip(layer.weights, layer.gradients, strict=True):
                weight.data.normal_(0.0, 0.02, generator=alike)
                gradient.normal_(0.0, 1e-3, generator=own)
        if way in ("none", "ddp_gloo"):
            return super()._trainer(way, model)
        sgd = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        if way == "torchft":
            return Trainer(model, self._streaming(model, sgd))
        options: dict[str, Any] = {"tune": True}
        if way != "tune":
            steps, codec = way.split()
            options = {"topology": "one-peer-exp2", "local_steps": int(steps)}
            options["compression"] = Int8() if codec == "Int8" else None
        # The default of accelerators.
        cap = self.job.dilation.cap_mb(DDP_CAP_MB)
        optimizer = fogdist.DecentralizedOptimizer(sgd, model, bucket_cap_mb=cap, **options)
        every = MEASURED_STEPS // optimizer.local_steps
        batches = fogdist.SharedBatches(optimizer, DATA, BATCH * self.size, seed=None, every=every)
        self.parts[way] = iter(batches)
        return Trainer(model, optimizer)

    def _streaming(self, model: nn.Sequential, sgd: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Returns the optimizer, whose steps are then those of torchft's Streaming DiLoCo."""
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
            rank=0,
            world_size=1,
            store_addr=own,
            store_port=self.store.port,
            lighthouse_addr=f"http://{address(0)}:{LIGHTHOUSE_PORT}",
            replica_id=str(self.rank),
            hostname=own,
            init_sync=False,
        )
        # The embeddings are a third of the parameters.
        fragments = [model[:1], model[1:9], model[9:17], model[17:]]
        outer = [
            torch.optim.SGD(each.parameters(), lr=0.7, momentum=0.9, nesterov=True) for each in fragments
        ]
        options = {"fragment_sync_delay": 3, "fragment_update_alpha": 0.5, "pin_memory": False}
        self.streaming = DiLoCo(manager, fragments, sgd, outer, sync_every=16, **options)
        self.streaming.__enter__()
        return sgd


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

    def samples(self, times: Sequence[float]) -> Any:
        """Returns how many samples all ranks had used by some times; of a step its part."""
        return sum(
            np.interp(times, [0, *each["ends"]], [0, *np.cumsum(each["samples"])]) for each in self.answers
        )

    def point(self, alone: Turn, expected: float) -> dict[str, Any]:
        """Returns the result beside that of ranks that trained alone; with tune, each setting with its share.

        Args:
            alone: Of the way "none".
            expected: Samples per second of that, as set.
        """
        rate = float(alone.samples([alone.seconds])[0]) / alone.seconds
        ends, settings = [0.0, *self.answers[0]["ends"]], self.answers[0]["settings"]
        times = np.minimum([*(ends[step] for step, *_ in settings), self.seconds], self.seconds)
        shares = np.diff(self.samples(times)) / np.maximum(np.diff(times), 1e-9) / rate
        used = sum(each["cpu"] for each in self.answers) / (os.cpu_count() or 1)
        keys = ("time", "share", "step", "topology", "local_steps", "codec", "reason")
        return {
            "share": round(float(self.samples([self.seconds])[0]) / self.seconds / rate, 4),
            "alone_samples_per_s": round(float(rate), 1),
            "steps": len(ends) - 1,
            "cpu_idle": round(self.idle, 3),
            "cpu_used": round(used, 3),
            # What other programs take does not count, as ranks go before them, unless steps alone are late by it.
            "cpu_bound": used > 1 - LEAST_IDLE or rate < (1 - MOST_LATE) * expected,
            "settings": [
                dict(zip(keys, (round(at, 2), round(share, 4), *each), strict=True))
                for at, share, each in zip(times.tolist(), shares.tolist(), settings, strict=False)
            ],
            "date": time.strftime("%Y-%m-%d"),
        }

    def course(self, alone: Turn) -> dict[str, Any]:
        """Returns throughput, as a share, and distance of the ranks from their mean relative to it, over the time."""
        edges = np.arange(0.0, self.seconds + BIN_SECONDS / 2, BIN_SECONDS)
        rate = float(alone.samples([alone.seconds])[0]) / alone.seconds
        elements = np.stack([each["elements"] for each in self.answers])
        mean = elements.mean(0)
        off = np.sqrt(((elements - mean) ** 2).sum(2).mean(0)) / np.linalg.norm(mean, axis=1)
        return {
            "shares": (np.diff(self.samples(edges)) / BIN_SECONDS / rate).round(4).tolist(),
            "ends": np.round(self.answers[0]["ends"], 2).tolist(),
            "distances": [float(f"{each:.3g}") for each in off],
        }


def turn(
    ranks: ForkedWorld,
    way: str,
    seconds: float,
    changes: Sequence[Sequence[float]] = (),
    change: Callable[[str], None] = str,
) -> Turn:
    """Lets ranks train in a way, while `change` is called with each rate."""
    BEGUN[:] = [0] * len(BEGUN)
    begin = time.perf_counter() + 0.2

    def play() -> None:
        for at, rate in (each for each in changes if each[0] < seconds):
            time.sleep(max(0.0, begin + at - time.perf_counter()))
            change(rate_text(1e6 * rate))

    cores = core_time()
    with ThreadPoolExecutor(1) as other:
        playing = other.submit(play)
        answers = ranks.ask("follow", way, begin, seconds, patience=seconds)[1]
        playing.result()
    return Turn(answers, seconds, idle_since(cores))


def measure_traces(options: argparse.Namespace, job: Job, content: dict[str, Any]) -> Iterator[Any]:
    """Adds a point for each way and trace to the results and yields it; adds the course of tune along the first trace."""
    ways = [each for each in options.ways if each != "none"]
    expected = BATCH / job.compute * (HOSTS - 1 + 1 / job.slow[SLOW_HOST])
    with emulated_world("traces", HOSTS, rate_text(FASTEST), PHASE_SECONDS, TraceRank, job) as (ranks, hosts):
        if "torchft" in ways:  # its server ends with its host
            words = ["torchft_lighthouse", "--bind", f"[::]:{LIGHTHOUSE_PORT}", "--min_replicas", str(HOSTS)]
            subprocess.Popen([*inside(hosts[0]), *words])
        for way in ["none", *ways]:
            ranks.ask("make", way)
            turn(ranks, way, 2.2 * MEASURED_STEPS * job.compute)  # equal parts take twice the time
        for number in options.traces:
            changes = json.loads((TRACES / f"{number}.json").read_text())["changes"]
            alone = turn(ranks, "none", min(ALONE_SECONDS, options.seconds))
            for way in ways:
                made = turn(ranks, way, options.seconds, changes, partial(change_rate, hosts))
                same = {"trace": number, "way": way}
                point = same | made.point(alone, expected)
                kept = [each for each in content["points"] if not same.items() <= each.items()]
                content["points"] = [*kept, point]
                if (number, way) == (NUMBERS[0], "tune"):
                    content["course"] = made.course(alone)
                yield point


def measure_sites(options: argparse.Namespace, job: Job, content: dict[str, Any]) -> Iterator[Any]:
    """Adds what tune does in two sites, a point for each rate between them, and yields it."""
    network = {"centers": 2, "between": BETWEEN[0]}
    world = emulated_world("sites", HOSTS, rate_text(FASTEST), PHASE_SECONDS, TraceRank, job, **network)
    content["sites"] = []
    expected = BATCH / job.compute * HOSTS
    with world as (ranks, hosts):
        for way in ("none", "tune"):
            ranks.ask("make", way)
        alone = turn(ranks, "none", min(ALONE_SECONDS, options.seconds))
        for rate in BETWEEN:
            change_between(hosts, rate)
            point = {"between": rate} | turn(ranks, "tune", options.seconds).point(alone, expected)
            content["sites"].append(point)
            yield point


PARTS = {"traces": measure_traces, "sites": measure_sites}


def parse_arguments() -> argparse.Namespace:
    """Returns the checked command line."""
    parser = program.parser_of(__doc__)
    add = parser.add_argument
    program.add_names(parser, "--parts", PARTS)
    add("--traces", type=int, nargs="+", choices=NUMBERS, default=NUMBERS, metavar="N", help="their numbers")
    installed = WAYS if importlib.util.find_spec("torchft") else WAYS[:-1]
    program.add_names(parser, "--ways", WAYS, installed)
    add("--seconds", type=program.positive, default=SECONDS, help="of a trace (default: %(default)s)")
    add("--compute", type=program.positive, default=COMPUTE_SECONDS, metavar="SECONDS", help="of a step")
    add("--json", type=Path, help="file for the results; those of other ways, traces and parts stay")
    add("--make", action="store_true", help="only write the traces anew")
    return parser.parse_args()


def main() -> None:
    """Measures, and writes the results after each point."""
    options = parse_arguments()
    if options.make:
        for number in NUMBERS:
            write(TRACES / f"{number}.json", seed=number, changes=make_trace(number, SECONDS))
        return
    prepare()
    dilation = emulated(SCENARIOS["b"], options.compute)
    job = Job("gpt2", dilation, options.compute, timeout=PHASE_SECONDS)
    content: dict[str, Any] = {"points": []}
    if options.json is not None and options.json.exists():
        content = json.loads(options.json.read_text())
    about = {"seconds": options.seconds, "compute_s": options.compute, "dilation": asdict(dilation)}
    content["facts"] = program.facts() | about
    try:
        for part in options.parts:
            slow = {SLOW_HOST: 2.0} if part == "traces" else {}
            for point in PARTS[part](options, replace(job, slow=slow), content):
                print(point, flush=True)
                if options.json is not None:
                    write(options.json, **content)
    except (Unavailable, WorldFailed) as error:
        sys.exit(f"emulated hosts: {error}")


if __name__ == "__main__":
    main()
