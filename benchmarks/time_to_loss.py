"""Steps to a target loss, and the loss at equal samples beside DDP's, of 8 to 4,096 virtual ranks.

The task: MNIST in 7 x 7 pixels, or scikit-learn's digits where there is no MNIST, and a perceptron with one hidden layer.
All ways have the same model, start, batches, local optimizer, number of samples in a run, and schedule: a cosine from the
learning rate to 0. Each way and split has the rate of a grid with which its loss ended lowest for seeds that are not used
after. Runs of one seed are paired. performance_tables.py multiplies steps by the time of a step, which cluster.py measures.
The loss is that of the mean of the ranks' models on test images. Ranks' data are alike ("iid"), or their labels are in
proportions of a Dirichlet distribution ("dirichlet 0.1"). Nothing here takes time into account: a slow link costs nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import program
import torch
from fogdist import algorithms
from fogdist import topology as topologies
from fogdist.topology import Topology
from paired import best_rates, compared, difference, finite
from performance_tables import loss_table, many_ranks_table  # which adds the folder of tests to sys.path
from report import write
from shards import Shards
from torch import Tensor, nn
from virtual_training import GradientAverage, StackedModel, train

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT / "examples"))

MNIST = ROOT.parent / "shared" / "data" / "mnist"
PIXELS, HIDDEN, CLASSES = 7, 16, 10
# With fewer samples than that on a rank, a batch has all of them.
BATCH = 8
MOMENTUM, LOCAL_STEPS = 0.9, 8
RATES = (0.025, 0.05, 0.1, 0.2, 0.4, 0.8)
TUNING_RANKS, TUNING_SEEDS = 16, (101,)
EVERY = 10
RANKS_PER_MACHINE = 2
# With more ranks only these run, to save time: a step of 1,024 ranks takes 25 ms. Topologies are kept as dense matrices:
# one of 12 rounds of 4,096 ranks takes 1.6 GB, and 16 s to make.
MANY_RANKS = 256
MANY_RANKS_WAYS = ("ddp_fog", "one_peer_exp", "static_exp", "local_sgd")
SPLITS: dict[str, Any] = {"iid": "iid", "dirichlet 0.1": 0.1, "sorted": "sorted"}


@dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        algorithm: Makes the distributed optimizer.
        topology: Makes its mixing of the number of ranks; None for the algorithm's own.
    """

    algorithm: Callable[..., Any]
    topology: Callable[[int], Topology] | None = None


def static(graph: str) -> Callable[[int], Topology]:
    return lambda ranks: Topology.from_graph(graph, topologies.by_name(graph, ranks))


def hierarchical(ranks: int) -> Topology:
    """Means within machines, and the one-peer exponential graph between them."""
    machines = topologies.one_peer_exponential(ranks // RANKS_PER_MACHINE)
    within = np.full((RANKS_PER_MACHINE, RANKS_PER_MACHINE), 1 / RANKS_PER_MACHINE)
    return Topology("hierarchical", [np.kron(machines.matrix(t), within) for t in range(machines.period)])


_awc = partial(algorithms.DecentralizedSGD, order="awc")
# The names and topologies are those of benchmarks/cluster.py where it has the way, as the time of a step is joined by name.
WAYS: dict[str, Way] = {
    "ddp_fog": Way(GradientAverage),
    "one_peer_exp": Way(_awc, topologies.one_peer_exponential),
    "static_exp": Way(_awc, static("exp2")),
    "hierarchical": Way(_awc, hierarchical),
    # At powers of two its rounds are those of a hypercube, a peer each.
    "base_k": Way(_awc, lambda ranks: topologies.base_graph(ranks, 2)),
    "local_sgd": Way(partial(algorithms.LocalSGD, local_steps=LOCAL_STEPS)),
    "gossip_diloco": Way(
        partial(algorithms.GASLoC, local_steps=LOCAL_STEPS, outer_momentum=0.5),
        topologies.random_matching,
    ),
    "exact_diffusion": Way(algorithms.ExactDiffusion, static("symexp")),
    "gradient_tracking": Way(algorithms.GradientTracking, static("exp2")),
}
REFERENCE = "ddp_fog"


def load() -> tuple[str, Tensor, Tensor, Tensor, Tensor]:
    """Returns the task's name, training inputs and labels, and those of the test."""
    from images import load_digits, load_mnist

    images: Any = load_mnist(MNIST) if MNIST.is_dir() else load_digits()

    def small(pictures: Tensor) -> Tensor:
        pooled: Tensor = nn.functional.adaptive_avg_pool2d(pictures.unsqueeze(1), PIXELS)
        return pooled.flatten(1)

    train, test = small(images.train_images), small(images.test_images)
    mean, deviation = train.mean(), train.std()
    return (
        images.name,
        (train - mean) / deviation,
        images.train_labels,
        (test - mean) / deviation,
        images.test_labels,
    )


def make_model(seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(PIXELS**2, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))


def run(
    name: str, ranks: int, split: str, seed: int, steps: int, task: Sequence[Any], rate: float = 0.1
) -> dict[str, Any]:
    """Trains in one way; returns a point of the results."""
    _, inputs, labels, test, answers = task
    way = WAYS[name]

    def evaluate(stacked: StackedModel) -> float:
        return float(nn.functional.cross_entropy(stacked.model_of()(test), answers))

    begin = time.perf_counter()
    batch = min(BATCH, len(inputs) // ranks)
    result = train(
        make_model(seed),
        nn.functional.cross_entropy,
        Shards(inputs, labels, ranks=ranks, batch=batch, split=SPLITS[split], seed=seed),
        ranks=ranks,
        steps=steps,
        topology=None if way.topology is None else way.topology(ranks),
        algorithm=way.algorithm,
        optimizer=partial(torch.optim.SGD, lr=rate, momentum=MOMENTUM),
        schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
        evaluate=evaluate,
        every=EVERY,
        seed=seed,
    )
    return {
        "way": name,
        "ranks": ranks,
        "split": split,
        "seed": seed,
        "rate": rate,
        "batch": batch,
        "steps": [step for step, _ in result.evaluated],
        "losses": [round(value, 5) for _, value in result.evaluated],
        "consensus": float(f"{float(result.consensus[-1]):.4g}"),
        "seconds": round(time.perf_counter() - begin, 2),
    }


def differences(points: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the loss at equal samples relative to DDP's, of paired seeds, for each way, split and number of ranks."""
    return [
        {"way": way, "ranks": ranks, "split": split, **difference(pairs)}
        for (way, ranks, split), pairs in compared(points, REFERENCE, ("ranks", "split")).items()
        if way != REFERENCE
    ]


def read_options() -> argparse.Namespace:
    """Returns the command line."""
    parser = program.parser_of(__doc__)
    add = parser.add_argument
    program.add_names(parser, "--ways", WAYS)
    add("--ranks", nargs="*", type=int, default=[16], help="runs with all seeds and splits")
    more = [8, 64, 256, 1024, 4096]
    add("--more-ranks", nargs="*", type=int, default=more, help="runs with the first seed, iid")
    program.add_names(parser, "--splits", SPLITS, ["iid", "dirichlet 0.1"])
    add("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    add("--steps", type=int, default=400)
    add("--target", type=float, default=0.4)
    add("--json", type=Path, metavar="FILE", default=RESULTS / "loss.json")
    return parser.parse_args()


def train_all(options: argparse.Namespace) -> dict[str, Any]:
    """Makes all runs, and writes the file after each."""
    task = load()
    facts = program.facts() | {
        "task": task[0], "model": f"MLP {PIXELS**2}-{HIDDEN}-{CLASSES}", "batch": BATCH, "momentum": MOMENTUM,
        "local_steps": LOCAL_STEPS, "steps": options.steps, "schedule": "cosine to 0", "rates": list(RATES),
        "tuning_ranks": TUNING_RANKS, "tuning_seeds": list(TUNING_SEEDS), "target": options.target,
    }  # fmt: skip
    content: dict[str, Any] = {"facts": facts, "tuning": [], "points": []}
    tuning, points = content["tuning"], content["points"]

    def ended(point: dict[str, Any]) -> float:
        """Writes what there is, and prints a run; returns its loss."""
        write(options.json, **content)
        last: float = point["losses"][-1]
        words = ", ".join(f"{name} {point[name]}" for name in ("way", "ranks", "split", "seed", "rate"))
        print(f"{point['seconds']:6.1f} s: {words}: loss {last:.4f}", flush=True)
        return last

    for way, split, seed, rate in product(options.ways, options.splits, TUNING_SEEDS, RATES):
        point = run(way, TUNING_RANKS, split, seed, options.steps, task, rate)
        kept = {name: point[name] for name in ("way", "ranks", "split", "seed", "rate")}
        tuning.append({**kept, "loss": finite(ended(point))})
    rates = best_rates(tuning, ("way", "split"))
    jobs = [(r, s, seed) for r in options.ranks for s in options.splits for seed in options.seeds]
    jobs += [(r, options.splits[0], options.seeds[0]) for r in options.more_ranks if r not in options.ranks]
    for (ranks, split, seed), way in product(jobs, options.ways):
        if ranks > MANY_RANKS and way not in MANY_RANKS_WAYS:
            continue
        points.append(run(way, ranks, split, seed, options.steps, task, rates[way, split]))
        ended(points[-1])
    return content


def main() -> None:
    """Makes all runs, and prints the tables: losses beside DDP's with and without intervals, and steps to the target."""
    options = read_options()
    torch.set_num_threads(1)
    content = train_all(options)
    rows = content["differences"] = differences(content["points"])
    write(options.json, **content)
    if any("lower" in row for row in rows):
        print(f"\n{loss_table(content)}")
    if any("lower" not in row for row in rows):
        print(f"\n{many_ranks_table(content)}")


if __name__ == "__main__":
    main()
