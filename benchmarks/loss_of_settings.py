"""The loss beside DDP's, at equal samples, of fragments, of the settings that `tune=True` moves to, and with a slow rank.

    make benchmark-loss-settings                                # both tasks, an hour of one core
    python benchmarks/loss_of_settings.py --tasks MNIST --seeds 1 2 3 --json FILE

Eight virtual ranks train an MLP on MNIST, or scikit-learn's digits where there is no MNIST, and the GPT of
examples/train_gpt.py in a smaller size. Each has a part of the data, any samples of it. All ways have the same model, start,
samples in a step of all ranks, steps, and schedule: a warm-up and a cosine to 0. Each way has the rate of a grid with which
its loss on validation data ended lowest, for a seed that is not used after. The loss that counts is that of the mean of the
ranks' models on test data. Runs of one seed are paired.

The settings of `tune=True` are forced, as time is no part of virtual ranks. A rank of half speed has half as many samples in
a step as the others, and ranks weigh by samples.

Runs that the file has are not repeated, so a stopped program can go on, and seeds can be added later.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import program
import torch
from compression_ranks import Task, classification, gpt, load_images, rate_factor
from fogdist import DecentralizedOptimizer
from fogdist.algorithms import DiLoCo
from fogdist.compression import Int8
from paired import best_rates, compared, difference, finite, key_of
from performance_tables import settings_table  # which adds the folder of tests to sys.path
from report import write
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, cross_entropy
from torch.optim import SGD
from virtual_training import GradientAverage, StackedModel, train

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
RANKS, BATCH, PIXELS = 8, 8, 14
# Samples in a step of ranks of which the first has half the speed of the others: together as many as of equal ranks.
HALF_SPEED = (4, 9, 8, 9, 8, 9, 8, 9)
IGNORED = -100  # a target that torch's cross-entropy leaves out


@dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        make: Makes the distributed optimizer.
        fragments: Of the algorithm.
        samples: Of each rank in a step, if they are not all alike.
        rate_of: The way whose learning rate it takes; None for one of its own.
    """

    make: Callable[..., Any]
    fragments: int = 1
    samples: Sequence[int] | None = None
    rate_of: str | None = None


REFERENCE = "DDP"
_tuned = partial(DecentralizedOptimizer, topology="one-peer-exp2")
_int8 = partial(_tuned, order="awc", compression=Int8())
# Weighted averages need a symmetric topology.
_pairs = partial(DecentralizedOptimizer, topology="random-matching")
_diloco = partial(DiLoCo, local_steps=16)
WAYS: dict[str, Way] = {
    REFERENCE: Way(GradientAverage),
    "one peer": Way(_tuned),
    "one peer, 4 local steps": Way(partial(_tuned, local_steps=4), rate_of="one peer"),
    "one peer, int8": Way(_int8),
    "one peer, int8, 4 local steps": Way(partial(_int8, local_steps=4), rate_of="one peer, int8"),
    "one peer, int8, 16 local steps": Way(partial(_int8, local_steps=16), rate_of="one peer, int8"),
    "DiLoCo": Way(_diloco),
    "DiLoCo, 4 fragments, delay 2": Way(partial(_diloco, delay=2), fragments=4, rate_of="DiLoCo"),
    "random pairs": Way(_pairs, rate_of="one peer"),
    "random pairs, a rank of half speed": Way(_pairs, samples=HALF_SPEED, rate_of="one peer"),
    "DiLoCo, a rank of half speed": Way(_diloco, samples=HALF_SPEED, rate_of="DiLoCo"),
}


def mnist() -> Task:
    """Returns MNIST in 14 x 14 pixels and an MLP of four layers, so that there are four fragments."""
    images = load_images()
    mean, deviation = images.train_images.mean(), images.train_images.std()

    def prepared(pictures: Tensor) -> Tensor:
        return adaptive_avg_pool2d((pictures.unsqueeze(1) - mean) / deviation, PIXELS).flatten(1)

    def model() -> nn.Module:
        layers: list[nn.Module] = []
        for inputs in (PIXELS**2, 64, 64):
            layers += [nn.Linear(inputs, 64), nn.Tanh()]
        return nn.Sequential(*layers, nn.Linear(64, 10))

    return classification(
        images,
        prepared,
        BATCH,
        "iid",
        model=model,
        optimizer=lambda parameters, rate: SGD(parameters, lr=rate, momentum=0.9, weight_decay=1e-3),
        loss=cross_entropy,
        steps=800,
        every=800,
        rates=(0.025, 0.05, 0.1, 0.2),
        target=math.nan,
        about=f"{images.name} in {PIXELS} x {PIXELS} pixels; an MLP with three hidden layers of 64 and tanh; SGD with "
        "momentum 0.9 and weight decay 0.001",
    )


def small_gpt() -> Task:
    """Returns the GPT with a width of 32: 34,688 parameters."""
    from models import GPT

    about = "the GPT of examples/train_gpt.py with a width of 32 and 32 bytes of context, on sources of Python; AdamW"
    return replace(
        gpt(), model=lambda: GPT(256, 32, 32, 4, 2), steps=320, rates=(1.6e-2, 3.2e-2, 6.4e-2), about=about
    )


TASKS: dict[str, Callable[[], Task]] = {"MNIST": mnist, "GPT": small_gpt}


def parts_of(batches: Iterator[tuple[Tensor, Tensor]], size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the same samples in batches of another size."""
    inputs, targets = next(batches)
    while True:
        while len(inputs) < size:
            more = next(batches)
            inputs, targets = torch.cat([inputs, more[0]]), torch.cat([targets, more[1]])
        yield inputs[:size], targets[:size]
        inputs, targets = inputs[size:], targets[size:]


def batches_of(task: Task, seed: int, samples: Sequence[int]) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Returns what makes the batches of all ranks: of one size, filled with samples whose targets are left out."""
    sources = [parts_of(task.batches(rank, RANKS, seed), size) for rank, size in enumerate(samples)]

    def filled(tensors: Sequence[Tensor], value: int) -> Tensor:
        whole = torch.full((RANKS, max(samples), *tensors[0].shape[1:]), value, dtype=tensors[0].dtype)
        for row, tensor in zip(whole, tensors, strict=True):
            row[: len(tensor)] = tensor
        return whole

    def data(step: int) -> tuple[Tensor, Tensor]:
        inputs, targets = zip(*map(next, sources), strict=True)
        return filled(inputs, 0), filled(targets, IGNORED)

    return data


def run(name: str, task: Task, way_name: str, seed: int, rate: float, held_out: str) -> dict[str, Any]:
    """Trains in one way; returns a row of the results, with the loss on "validation" or "test" data."""
    way = WAYS[way_name]
    inputs, targets = task.held_out[held_out]

    def evaluate(stacked: StackedModel) -> float:
        return float(task.loss(stacked.model_of()(inputs), targets))

    begin = time.perf_counter()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = task.model()
    result = train(
        model,
        task.loss,
        batches_of(task, seed, way.samples or (BATCH,) * RANKS),
        ranks=RANKS,
        steps=task.steps,
        algorithm=way.make,
        optimizer=lambda parameters: task.optimizer(parameters, rate),
        schedule=lambda view: torch.optim.lr_scheduler.LambdaLR(view, partial(rate_factor, steps=task.steps)),
        evaluate=evaluate,
        every=task.steps,
        fragments=way.fragments,
        samples=way.samples,
    )
    loss, seconds = result.evaluated[-1][1], time.perf_counter() - begin
    print(
        f"{seconds:6.1f} s: {name}, {way_name}, seed {seed}, rate {rate}: {held_out} {loss:.4f}", flush=True
    )
    row = {"task": name, "way": way_name, "seed": seed, "rate": rate, "loss": finite(round(loss, 5))}
    return row | {"consensus": float(f"{float(result.consensus[-1]):.3g}"), "seconds": round(seconds, 1)}


def differences(points: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns for each task and way the rate, the mean loss, and the loss relative to DDP's, of paired seeds."""
    pairs_of = compared(({**point, "losses": [point["loss"]]} for point in points), REFERENCE, ("task",))
    return [
        {
            "task": task,
            "way": way,
            "rate": pairs[0][0]["rate"],
            "loss": round(statistics.fmean(mine["loss"] for mine, _ in pairs), 5),
            **difference(pairs),
        }
        for (way, task), pairs in pairs_of.items()
    ]


def read_options() -> argparse.Namespace:
    """Returns the command line."""
    parser = program.parser_of(__doc__)
    add = parser.add_argument
    program.add_names(parser, "--tasks", TASKS)
    program.add_names(parser, "--ways", WAYS)
    add("--seeds", type=int, nargs="*", default=[1, 2, 3], metavar="N", help="of the runs that count")
    add("--tuning-seeds", type=int, nargs="+", default=[101], metavar="N", help="by which rates are chosen")
    add("--steps", type=program.at_least(1), help="of a run (default: each task's own)")
    add("--json", type=Path, metavar="FILE", default=RESULTS / "loss_of_settings.json")
    return parser.parse_args()


def main() -> None:
    """Makes the runs that the file lacks, writes the file after each, and prints the table."""
    options = read_options()
    torch.set_num_threads(1)
    content: dict[str, Any] = {"facts": {}, "tuning": [], "points": [], "differences": []}
    if options.json.exists():
        content = json.loads(options.json.read_text())
    tuning, points = content["tuning"], content["points"]
    content["facts"] |= program.facts() | {"ranks": RANKS, "batch": BATCH, "half speed": HALF_SPEED}
    tasks = {name: TASKS[name]() for name in options.tasks}
    if options.steps:
        tasks = {name: replace(task, steps=options.steps) for name, task in tasks.items()}
    for name, task in tasks.items():
        content["facts"][name] = {"about": task.about, "steps": task.steps, "rates": task.rates}
    made = {key_of(row, ("task", "way", "seed", "rate")) for row in (*tuning, *points)}

    def keep(rows: list[dict[str, Any]], name: str, way: str, seed: int, rate: float, held_out: str) -> None:
        if (name, way, seed, rate) not in made:
            rows.append(run(name, tasks[name], way, seed, rate, held_out))
            content["differences"] = differences(points)
            write(options.json, **content)

    tuned = dict.fromkeys(WAYS[way].rate_of or way for way in options.ways)
    for name, way, seed in product(tasks, tuned, options.tuning_seeds):
        for rate in tasks[name].rates:
            keep(tuning, name, way, seed, rate, "validation")
    rates = best_rates(tuning, ("task", "way"))
    for seed, name, way in product(options.seeds, tasks, options.ways):
        keep(points, name, way, seed, rates[name, WAYS[way].rate_of or way], "test")
    print(f"\n{settings_table(content['differences'])}")


if __name__ == "__main__":
    main()
