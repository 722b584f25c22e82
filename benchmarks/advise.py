"""Whether `fog advise` chooses well: its choice beside all settings of a grid, each measured on emulated clusters.

    python benchmarks/advise.py                       # some 8 minutes, as root
    python benchmarks/advise.py --clusters fast --hosts 2 --local-steps 1 4

Run it as root on Linux: hosts are network namespaces (emulated_hosts.py), with one rank each and real TCP. The
accelerator is a sleep, and the model is ResNet-50 by the sizes of its layers, dilated (workloads.py). Clusters:

    fast       25 Gbit/s a host, as in scenario a of benchmarks/cluster.py
    slow       3 Gbit/s a host
    two sites  25 Gbit/s a host, and 1 Gbit/s between two sites

In each, the ranks first measure their links and a step without exchange, as `fog advise` has them do, and the choice is
made from that. Then each setting of the grid (topology x local steps x bucket size) trains by
DecentralizedSGD(order="awc"), in a random order. Its step is the mean over whole rounds of an exchange and its local
steps. The choice is made from the same grid.

The choice is judged twice against the best of the grid: by its measured step, against the fastest of all settings; and by
the rule of `fog advise` with measured steps in the place of predicted ones: the time to a tenth of the disagreement,
against the least of all settings that are within the tolerance. The next larger number of local steps of the grid is a
factor of four in the second number. Where the processor was short, most of what was measured is the processor's.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))

import networkx  # noqa: F401  before ranks are forked
import program
import torch
from cluster import LEAST_IDLE
from cluster_ranks import (
    ClusterRank,
    Job,
    Trainer,
    core_time,
    emulated_model,
    emulated_world,
    idle_since,
    prepare,
)
from emulated_hosts import Unavailable, rate_text
from fog_cli.programs.advise_ranks import measure
from fogdist import algorithms, topology
from fogdist.tuning.decision import best, longest_step, settings
from fogdist.tuning.network import Network
from forked_ranks import WorldFailed
from performance_tables import advice_table
from report import write
from workloads import FLOAT_BYTES, MODELS, SCENARIOS, Dilation, Scenario, emulated, sizes_of

REAL = SCENARIOS["a"]
CLUSTERS: dict[str, Scenario] = {
    "fast": REAL,
    "slow": replace(REAL, rate=3e9),
    "two sites": replace(REAL, between=1e9),
}
LEAST_STEPS = 8
LOCAL_STEPS = [1, 4, 16]
# MiB of the real model; dilated like its parameters.
BUCKETS_MB = [4.0, 25.0]
TOLERANCE = 0.05
PHASE_SECONDS = 120.0
# Long beside what the limited link between sites lets pass at once: 40 ms at its rate.
TRANSFER_SECONDS = 0.4


class AdvisedRank(ClusterRank):
    """A rank; the parent calls its methods by name."""

    def links(self) -> dict[str, Any]:
        """Measures the links; collective."""
        return measure(TRANSFER_SECONDS)

    def train(self, code: str | None, local_steps: int, bucket_mb: float, rounds: int) -> float:
        """Makes a setting, one round that does not count, and so many rounds; returns seconds of a step, their mean.

        Args:
            code: The argument `topology`, as `fog advise` prints it; None for no exchange.
            local_steps: Of the setting.
            bucket_mb: Of the setting.
            rounds: Exchanges, each with its local steps.
        """
        model = emulated_model(self.job, self.device, 1.0)
        sgd = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        optimizer: torch.optim.Optimizer = sgd
        if code is not None:
            mixing = eval(code, {"topology": topology, "GlobalAverage": algorithms.GlobalAverage})
            options: dict[str, Any] = {"local_steps": local_steps, "bucket_cap_mb": bucket_mb}
            optimizer = algorithms.DecentralizedSGD(sgd, model, order="awc", topology=mixing, **options)
        trainer = Trainer(model, optimizer)
        if local_steps > 1:
            # The local steps of the round that does not count need not be computed: they exchange nothing.
            for _ in range(local_steps - 1):
                optimizer.step()
        self._step(trainer)
        begin = time.perf_counter()
        for _ in range(rounds * local_steps):
            self._step(trainer)
        return (time.perf_counter() - begin) / (rounds * local_steps)


def sweep(name: str, hosts: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measures one cluster: its links, the choice, and the grid."""
    scenario = CLUSTERS[name]
    dilation: Dilation = emulated(scenario, options.compute)
    between = None if scenario.between is None else rate_text(dilation.rate(scenario.between))
    job = Job(scenario.model, dilation, options.compute, timeout=PHASE_SECONDS)
    rate = rate_text(dilation.rate(scenario.rate))
    sites: dict[str, Any] = {"centers": 2 if between else 1, "between": between}
    world = emulated_world(name, hosts, rate, PHASE_SECONDS, AdvisedRank, job, **sites)
    with world as (ranks, _):
        measured = ranks.ask("links")[1][0]
        compute = max(ranks.ask("train", None, 1, 1.0, LEAST_STEPS)[1])
        network = Network.of(measured)
        size = FLOAT_BYTES * sum(sizes_of(MODELS[scenario.model], dilation))
        found = settings(
            network,
            compute,
            size,
            local_steps=options.local_steps,
            buckets_mb=[dilation.cap_mb(each) for each in options.buckets],
        )
        choice = best(found, compute, TOLERANCE)
        points = []
        for each in random.Random(f"{options.seed} {name}").sample(found, len(found)):
            rounds = max(options.rounds, LEAST_STEPS // each.local_steps)
            cores = core_time()
            took = ranks.ask(
                "train",
                each.way.code,
                each.local_steps,
                each.bucket_mb,
                rounds,
                patience=20 * rounds * each.local_steps * options.compute,
            )[1]
            share = idle_since(cores)
            points.append(
                {
                    "topology": each.way.name,
                    "rounds": each.way.rounds,
                    "local_steps": each.local_steps,
                    "bucket_mb": each.bucket_mb,
                    "predicted_step_s": each.step,
                    "step_s": max(took),
                    "cpu_idle": share,
                    "cpu_bound": share < LEAST_IDLE,
                    "is_choice": each is choice,
                }
            )
    return {
        "cluster": name,
        "hosts": hosts,
        "between_bits_per_s": scenario.between and dilation.rate(scenario.between),
        "parameter_bytes": size,
        "compute_s": compute,
        "measured": {
            "sites": list(network.site_of),
            "host_bits_per_s": [8 * each for each in network.host_rates],
            "between_bits_per_s": [8 * each for each in network.trunks.values()],
            "latency_s": network.latency,
        },
        **judged(points, compute),
        "points": points,
    }


def judged(points: list[dict[str, Any]], compute: float) -> dict[str, Any]:
    """Compares the choice with the best of the grid, by measured steps."""
    (choice,) = (point for point in points if point["is_choice"])

    def agreement(point: dict[str, Any]) -> float:
        seconds: float = point["rounds"] * point["local_steps"] * point["step_s"]
        return seconds

    fastest = min(points, key=lambda point: point["step_s"])
    allowed = longest_step(fastest["step_s"], compute, TOLERANCE)
    within = [point for point in points if point["step_s"] <= allowed]
    soonest = min(within, key=agreement)
    errors = [abs(point["predicted_step_s"] / point["step_s"] - 1) for point in points]
    keys = ("topology", "local_steps", "bucket_mb", "predicted_step_s", "step_s")
    step, by_rule = choice["step_s"] / fastest["step_s"] - 1, agreement(choice) / agreement(soonest) - 1
    return {
        "choice": {key: choice[key] for key in keys},
        "fastest": {key: fastest[key] for key in keys},
        "best_by_rule": {key: soonest[key] for key in keys},
        "step_over_fastest": step,
        "time_to_agreement_over_best": by_rule,
        "prediction_error": {"median": statistics.median(errors), "largest": max(errors)},
    }


def parse_arguments() -> argparse.Namespace:
    """Returns the checked command line."""
    parser = program.parser_of(__doc__)
    add = parser.add_argument
    program.add_names(parser, "--clusters", CLUSTERS)
    add("--hosts", type=int, choices=range(2, 33, 2), default=4, metavar="N", help="number of hosts, even")
    add("--rounds", type=program.at_least(1), default=2, help="least number of exchanges of a setting")
    add("--local-steps", type=program.at_least(1), nargs="+", default=LOCAL_STEPS, help="of the grid")
    add(
        "--buckets",
        type=program.positive,
        nargs="+",
        default=BUCKETS_MB,
        help="MiB of the real model, of the grid",
    )
    add("--compute", type=program.positive, default=0.2, metavar="SECONDS", help="of an emulated step")
    add("--seed", type=int, default=0, help="of the order of the settings")
    add("--json", type=Path, help="file for the results")
    return parser.parse_args()


def main() -> None:
    """Measures one cluster after the other, and writes the results after each."""
    options = parse_arguments()
    prepare()
    about = program.facts() | {"seed": options.seed, "rounds": options.rounds, "tolerance": TOLERANCE}
    results: list[dict[str, Any]] = []
    failures: list[str] = []
    for name in options.clusters:
        try:
            found = sweep(name, options.hosts, options)
        except Unavailable as error:
            sys.exit(f"emulated hosts: {error}")
        except WorldFailed as failure:
            failures.append(str(failure))
            print(failure, file=sys.stderr)
            continue
        print(advice_table({"clusters": [found]}))
        print(f"{name}: predictions off by {found['prediction_error']['largest']:.0%} at most", flush=True)
        results.append(found)
        if options.json is not None:
            write(options.json, facts=about, failures=failures, clusters=results)
    if failures:
        sys.exit("\n".join(["These clusters failed:", *failures]))


if __name__ == "__main__":
    main()
