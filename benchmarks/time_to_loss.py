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
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import fogdist
import numpy as np
import torch
from fogdist import algorithms
from fogdist import topology as topologies
from fogdist.topology import Topology
from performance_tables import loss_table, many_ranks_table  # which adds the folder of tests to sys.path
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
# Relative to DDP's loss.
GOAL = 0.01
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


def static_exponential(ranks: int) -> Topology:
    return Topology.from_graph("exp2", topologies.by_name("exp2", ranks))


def symmetric(ranks: int) -> Topology:
    return Topology.from_graph("symexp", topologies.by_name("symexp", ranks))


def hierarchical(ranks: int) -> Topology:
    """Means within machines, and the one-peer exponential graph between them."""
    machines = topologies.one_peer_exponential(ranks // RANKS_PER_MACHINE)
    within = np.full((RANKS_PER_MACHINE, RANKS_PER_MACHINE), 1 / RANKS_PER_MACHINE)
    return Topology("hierarchical", [np.kron(machines.matrix(t), within) for t in range(machines.period)])


def base_3(ranks: int) -> Topology:
    """Base-3, as in benchmarks/cluster.py; at powers of two its rounds are those of a hypercube, a peer each."""
    return topologies.base_graph(ranks, 2)


_awc = partial(algorithms.DecentralizedSGD, order="awc")
# The names and topologies are those of benchmarks/cluster.py where it has the way, as the time of a step is joined by name.
WAYS: dict[str, Way] = {
    "ddp_fog": Way(GradientAverage),
    "one_peer_exp": Way(_awc, topologies.one_peer_exponential),
    "static_exp": Way(_awc, static_exponential),
    "hierarchical": Way(_awc, hierarchical),
    "base_k": Way(_awc, base_3),
    "local_sgd": Way(partial(algorithms.LocalSGD, local_steps=LOCAL_STEPS)),
    "gossip_diloco": Way(
        partial(algorithms.GASLoC, local_steps=LOCAL_STEPS, outer_momentum=0.5),
        lambda ranks: topologies.random_matching(ranks),
    ),
    "exact_diffusion": Way(algorithms.ExactDiffusion, symmetric),
    "gradient_tracking": Way(algorithms.GradientTracking, static_exponential),
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


def best_rates(tuning: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], float]:
    """Returns the learning rate of each way and split whose loss ended lowest in the mean of the tuning seeds."""
    found: dict[tuple[str, str], dict[float, list[float]]] = {}
    for row in tuning:
        losses = found.setdefault((row["way"], row["split"]), {})
        losses.setdefault(row["rate"], []).append(math.inf if row["loss"] is None else row["loss"])
    return {
        key: min(losses, key=lambda rate: statistics.fmean(losses[rate])) for key, losses in found.items()
    }


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns the mean and the 95 % t-interval of it."""
    from scipy import stats

    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, -math.inf, math.inf
    half = float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def differences(points: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the loss at equal samples relative to DDP's, of paired seeds, for each way, split and number of ranks."""
    final = {(p["way"], p["ranks"], p["split"], p["seed"]): p["losses"][-1] for p in points}
    groups: dict[tuple[str, int, str], list[float]] = {}
    for (way, ranks, split, seed), loss in final.items():
        reference = final.get((REFERENCE, ranks, split, seed))
        if way != REFERENCE and reference is not None:
            groups.setdefault((way, ranks, split), []).append(loss / reference - 1)
    rows = []
    for (way, ranks, split), values in groups.items():
        row = {"way": way, "ranks": ranks, "split": split, "seeds": len(values)}
        mean, lower, upper = interval(values)
        row["mean"] = round(mean, 6)
        if len(values) > 1:  # one seed has no interval
            row |= {"lower": round(lower, 6), "upper": round(upper, 6), "within_goal": upper <= GOAL}
        rows.append(row)
    return rows


def show(content: Mapping[str, Any]) -> None:
    """Prints the tables: losses at equal samples relative to DDP's, with and without intervals, and steps to the target."""
    rows = content["differences"]
    if any("lower" in row for row in rows):
        print(f"\n{loss_table(content)}")
    if any("lower" not in row for row in rows):
        print(f"\n{many_ranks_table(content)}")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Steps to a loss, and the loss at equal samples, of virtual ranks."
    )
    add = parser.add_argument
    add("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    add("--ranks", nargs="*", type=int, default=[16], help="runs with all seeds and splits")
    add(
        "--more-ranks",
        nargs="*",
        type=int,
        default=[8, 64, 256, 1024, 4096],
        help="runs with the first seed, iid",
    )
    add("--splits", nargs="+", choices=list(SPLITS), default=["iid", "dirichlet 0.1"])
    add("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    add("--steps", type=int, default=400)
    add("--target", type=float, default=0.4)
    add("--json", type=Path, metavar="FILE", default=RESULTS / "loss.json")
    return parser.parse_args()


def train_all(options: argparse.Namespace) -> dict[str, Any]:
    """Makes all runs, and writes the file after each."""
    task = load()
    facts = {
        "task": task[0], "model": f"MLP {PIXELS**2}-{HIDDEN}-{CLASSES}", "batch": BATCH, "momentum": MOMENTUM,
        "local_steps": LOCAL_STEPS, "steps": options.steps, "schedule": "cosine to 0", "rates": list(RATES),
        "tuning_ranks": TUNING_RANKS, "tuning_seeds": list(TUNING_SEEDS), "target": options.target, "goal": GOAL,
        "machine": platform.machine(), "python": platform.python_version(),
        "torch": torch.__version__, "fogdist": fogdist.__version__, "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    content: dict[str, Any] = {"facts": facts, "tuning": [], "points": []}
    tuning, points = content["tuning"], content["points"]
    for way, split, seed, rate in product(options.ways, options.splits, TUNING_SEEDS, RATES):
        point = run(way, TUNING_RANKS, split, seed, options.steps, task, rate)
        last = point["losses"][-1]
        kept = {name: point[name] for name in ("way", "ranks", "split", "seed", "rate")}
        # JSON has no numbers for what runs that diverge come to.
        tuning.append({**kept, "loss": last if math.isfinite(last) else None})
        write(content, options.json)
        print(f"{point['seconds']:6.1f} s: {way}, {split}, rate {rate}: loss {last:.4f}", flush=True)
    rates = best_rates(tuning)
    jobs = [(r, s, seed) for r in options.ranks for s in options.splits for seed in options.seeds]
    jobs += [(r, options.splits[0], options.seeds[0]) for r in options.more_ranks if r not in options.ranks]
    for (ranks, split, seed), way in product(jobs, options.ways):
        if ranks > MANY_RANKS and way not in MANY_RANKS_WAYS:
            continue
        point = run(way, ranks, split, seed, options.steps, task, rates[way, split])
        points.append(point)
        write(content, options.json)
        last = point["losses"][-1]
        print(
            f"{point['seconds']:6.1f} s: {way}, {ranks} ranks, {split}, seed {seed}: loss {last:.4f}",
            flush=True,
        )
    return content


def write(content: Mapping[str, Any], path: Path) -> None:
    """Writes the results, a row a line; a run that is ended meanwhile leaves the file before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = ",\n".join(
        f'"{key}": {json.dumps(value)}' if not isinstance(value, list)
        else f'"{key}": [\n' + ",\n".join(map(json.dumps, value)) + "\n]"
        for key, value in content.items()
    )  # fmt: skip
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text("{\n" + parts + "\n}\n")
    unfinished.replace(path)


def main() -> None:
    options = read_options()
    torch.set_num_threads(1)
    content = train_all(options)
    content["differences"] = differences(content["points"])
    write(content, options.json)
    show(content)


if __name__ == "__main__":
    main()
