"""Fits a model of time to an emulated cluster, checks it on other host counts, and extrapolates.

    python benchmarks/model.py                         # reads benchmarks/results/cluster.json, writes model.json beside it
    python benchmarks/model.py --fit-hosts 2 4

The model is that of loggops.py; training_model.py says what a step of each way is. Of its parameters

    G       8 bits over the link's rate, times `frame`, for the heads of packets and the pauses of TCP: fitted
    L       what a ping of the cluster measured
    o, O    the processor's work for a message and for a byte, of fog and of Gloo: fitted
    W       as G, of the line between data centers: known from its rate
    host_s  what a way's main thread does in a step: fitted, one number a way
    wait_s  what a step takes longer for each further rank on a core of the machine that emulates them: fitted, one for all
    S, g    not identified: without latency on the links an agreement before large messages costs nothing that can be seen,
            and a gap between messages looks as o does
    l, M    not identified: memory is so much faster than these links

Fitted on the medians of weak scaling on --fit-hosts in one data center, without points whose processor was short
(`cpu_bound`), and held against all others: more hosts, strong scaling, two data centers.
Then --hosts are modelled, as they would be if each host had a processor of its own: with neither the wait_s nor the part
of host_s that a step without any exchange has as well. Sizes, rates and compute stay those of the emulated cluster, so
the work per byte and message stays that of its dilation. performance_tables.py makes the tables of all numbers.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import program
from loggops import Parameters
from training_model import WAYS, Cluster, Workload, seconds_of, work_seconds
from workloads import MODELS, SCENARIOS, Dilation, sizes_of

RESULTS = Path(__file__).resolve().parent / "results"
MEASURED = ("a", "b", "c", "a strong")
CENTERS = {"c": 2}
HOSTS = (2, 4, 8, 16, 32, 64, 128, 1024, 16384)
# Of held-out points.
GOAL = 0.05
# Of an error of the processor's time beside one of a step's, and so many seconds of it do not matter.
CPU_WEIGHT, LEAST_WORK = 0.1, 5e-3
# Where the search begins, and from where to where it goes: frame; seconds; seconds a byte.
BEGIN = {"frame": 1.06, "o_fog": 3e-4, "O_fog": 1e-9, "o_gloo": 3e-4, "O_gloo": 1e-9, "wait_s": 1e-3}
LEAST = {"frame": 1.0, "o_fog": 0.0, "O_fog": 0.0, "o_gloo": 0.0, "O_gloo": 0.0, "wait_s": 0.0}
MOST = {"frame": 1.6, "o_fog": 1e-2, "O_fog": 1e-7, "o_gloo": 1e-2, "O_gloo": 1e-7, "wait_s": 2e-2}


@dataclass(frozen=True)
class Fitted:
    """The numbers that come from measurements.

    Attributes:
        shared: Of all ways, by the names of BEGIN.
        host_s: By way.
    """

    shared: dict[str, float]
    host_s: dict[str, float] = field(default_factory=dict)

    def host_seconds(self, way: str) -> float:
        """Of a way; of one that was not among those that were fitted the median of the others."""
        others = [seconds for name, seconds in self.host_s.items() if name != "none"]
        return self.host_s.get(way, statistics.median(others) if others and way != "none" else 0.0)

    def parameters(self, way: str, point: dict[str, Any], cores: int | None) -> Parameters:
        """Those of a way on a point's cluster."""
        kind = "gloo" if way == "ddp_gloo" else "fog"
        frame = self.shared["frame"]
        between = point.get("between_bits_per_s") or line_rate(point)
        return Parameters(
            L=point["latency_s"],
            o=self.shared[f"o_{kind}"],
            O=self.shared[f"O_{kind}"],
            G=8 * frame / point["rate_bits_per_s"],
            W=8 * frame / between if between else 0.0,
            cores=cores,
        )


def dilation_of(point: dict[str, Any]) -> Dilation:
    """How a point's cluster was made small and slow."""
    return Dilation(point["dilation"]["size"], point["dilation"]["time"])


def line_rate(point: dict[str, Any]) -> float | None:
    """Bits per second between data centers, where a point does not say it."""
    between = SCENARIOS[point["scenario"][0]].between
    return None if between is None else dilation_of(point).rate(between)


def workload_of(point: dict[str, Any]) -> Workload:
    """What a rank does in a step of a measured point."""
    model = MODELS[point["model"]]
    sizes = iter(sizes_of(model, dilation_of(point)))
    # From the last layer to the first: the bytes that are there, and the part of the backward pass that it took.
    layers = [4 * sum(next(sizes) for _ in layer.sizes) for layer in model.layers]
    have, passed, curve = 0, 0.0, []
    for size, share in zip(reversed(layers), reversed(model.shares), strict=True):
        have, passed = have + size, passed + share
        curve.append((have, passed))
    ready, need = [], 0
    for size in point["bucket_bytes"]:
        need += size
        # Buckets may hold a little more than their tensors.
        ready.append(next((part for bytes_, part in curve if bytes_ >= 0.999 * need), 1.0))
    return Workload(
        point["compute_s"],
        point["forward_s"],
        tuple(point["bucket_bytes"]),
        tuple(min(1.0, part) for part in ready),
        point["local_steps"],
    )


def cluster_of(point: dict[str, Any]) -> Cluster:
    """The hosts of a point."""
    return Cluster(point["hosts"], point["ranks_per_host"], CENTERS.get(point["scenario"], 1))


def crowd(point: dict[str, Any], cores: int) -> float:
    """The ranks on a core of the emulating machine, beyond one."""
    return max(0.0, point["hosts"] * point["ranks_per_host"] / cores - 1)


def modelled(point: dict[str, Any], fitted: Fitted, cores: int) -> float:
    """Seconds of a step of an emulated cluster."""
    way = point["way"]
    return (
        seconds_of(way, cluster_of(point), workload_of(point), fitted.parameters(way, point, cores))
        + fitted.host_seconds(way)
        + fitted.shared["wait_s"] * crowd(point, cores)
    )


def worked(point: dict[str, Any], fitted: Fitted) -> float:
    """Seconds of a rank's processor in a step, beyond those of a step without an exchange."""
    way = point["way"]
    messages = work_seconds(way, cluster_of(point), workload_of(point), fitted.parameters(way, point, None))
    return messages + max(0.0, fitted.host_seconds(way) - fitted.host_seconds("none"))


def add_work(points: Sequence[dict[str, Any]]) -> None:
    """Gives points what their exchange took of a rank's processor: more than a step without one in the same cluster."""
    keys = ("scenario", "scaling", "hosts", "ranks_per_host")
    alone = {
        tuple(p[k] for k in keys): p["cpu_s_per_rank_per_step"]
        for p in points
        if p["way"] == "none" and "cpu_s_per_rank_per_step" in p
    }
    for point in points:
        key = tuple(point[k] for k in keys)
        if point["way"] != "none" and key in alone:
            point["work_s"] = max(0.0, point["cpu_s_per_rank_per_step"] - alone[key])


def with_host_seconds(points: Sequence[dict[str, Any]], shared: dict[str, float], cores: int) -> Fitted:
    """Fits what is left to each way's main thread: the median of what it takes longer, at least nothing."""
    bare = Fitted(shared)
    left = defaultdict(list)
    for point in points:
        left[point["way"]].append(point["step_s"]["median"] - modelled(point, bare, cores))
    return Fitted(shared, {way: max(0.0, statistics.median(values)) for way, values in left.items()})


def fit(points: Sequence[dict[str, Any]], cores: int) -> Fitted:
    """Returns the parameters with the least sum of squares of relative errors."""
    from scipy.optimize import least_squares

    names = list(BEGIN)

    def shared_of(values: np.ndarray) -> dict[str, float]:
        return {
            name: LEAST[name] + (BEGIN[name] - LEAST[name]) * float(value)
            for name, value in zip(names, values, strict=True)
        }

    def errors(values: np.ndarray) -> list[float]:
        fitted = with_host_seconds(points, shared_of(values), cores)
        found = [np.log(modelled(point, fitted, cores) / point["step_s"]["median"]) for point in points]
        # What the ranks' processors took tells work from waiting, which step times alone do not.
        found += [
            CPU_WEIGHT * np.log((worked(point, fitted) + LEAST_WORK) / (point["work_s"] + LEAST_WORK))
            for point in points
            if "work_s" in point
        ]
        # Host work is paid for as well, a little: of two explanations the one with less of it is taken.
        return [*found, *(0.05 * seconds for seconds in fitted.host_s.values())]

    # In units of where it begins, from `least` on.
    most = [(MOST[name] - LEAST[name]) / (BEGIN[name] - LEAST[name]) for name in names]
    found = least_squares(
        errors,
        [1.0] * len(names),
        bounds=([0.0] * len(names), most),
        diff_step=0.05,
        loss="soft_l1",
        f_scale=0.03,
        ftol=1e-4,
        xtol=1e-3,
        max_nfev=20,
    )
    return with_host_seconds(points, shared_of(found.x), cores)


def error_of(point: dict[str, Any], fitted: Fitted, cores: int) -> float:
    """The modelled step over the measured one, minus 1."""
    return modelled(point, fitted, cores) / point["step_s"]["median"] - 1


def usable(points: Iterable[dict[str, Any]], with_cpu_bound: bool) -> list[dict[str, Any]]:
    """Points that the model is for; with those whose processor was short, or without."""
    return [
        point
        for point in points
        if point["scenario"] in MEASURED
        and point["way"] in WAYS
        and (with_cpu_bound or not point["cpu_bound"])
        and point["hosts"] > 1
    ]


def is_to_fit(point: dict[str, Any], hosts: Sequence[int]) -> bool:
    """Whether it is one of those that the parameters come from: one data center, weak scaling, these hosts."""
    return point["hosts"] in hosts and point["scenario"] not in CENTERS and point["scaling"] == "weak"


def extrapolated(point: dict[str, Any], hosts: int, fitted: Fitted) -> tuple[Cluster, Workload, Parameters]:
    """The cluster of a measured point with other hosts, each with a processor of its own."""
    way = point["way"]
    beside = max(0.0, fitted.host_seconds(way) - fitted.host_seconds("none"))
    cluster = replace(cluster_of(point), hosts=hosts)
    workload = replace(workload_of(point), host_s=beside)
    return cluster, workload, fitted.parameters(way, point, None)


def extrapolate(
    points: Sequence[dict[str, Any]], fitted: Fitted, hosts: Sequence[int]
) -> list[dict[str, Any]]:
    """Models each scenario's ways on any number of hosts."""
    examples: dict[tuple[str, str], dict[str, Any]] = {}
    # The cluster whose time is dilated the least is the nearest to a real one; of these the largest.
    for point in sorted(points, key=lambda point: (point["dilation"]["time"], -point["hosts"])):
        if point["scaling"] == "weak":
            examples.setdefault((point["scenario"], point["way"]), point)
    results = []
    for (scenario, way), example in sorted(examples.items()):
        for count in hosts:
            cluster, workload, parameters = extrapolated(example, count, fitted)
            seconds = seconds_of(way, cluster, workload, parameters)
            about = {"scenario": scenario, "way": way, "hosts": count, "ranks": cluster.ranks}
            efficiency = workload.compute / seconds
            results.append(about | {"step_s": seconds, "efficiency": efficiency, "modelled": True})
    return results


def main() -> None:
    """Fits, checks, extrapolates, prints and writes."""
    parser = program.parser_of(__doc__)
    add = parser.add_argument
    add("--cluster", type=Path, default=RESULTS / "cluster.json", help="what benchmarks/cluster.py measured")
    add("--json", type=Path, default=RESULTS / "model.json", help="file for the numbers")
    add(
        "--fit-hosts",
        type=int,
        nargs="+",
        help="host counts to fit on (default: the lowest three, but not all)",
    )
    add("--cpu-bound", action="store_true", help="use points whose processor was short, too")
    add("--hosts", type=int, nargs="+", default=list(HOSTS), help="host counts to extrapolate to")
    arguments = parser.parse_args()
    if not arguments.cluster.exists():
        sys.exit(
            f"{arguments.cluster} is not there: run benchmarks/cluster.py (make benchmark-cluster) first"
        )

    content = json.loads(arguments.cluster.read_text())
    points = usable(content["points"], arguments.cpu_bound)
    if not points:
        sys.exit(
            f"{arguments.cluster} has no point that can be used; --cpu-bound takes those too whose processor was short"
        )
    if arguments.cpu_bound:
        short = sum(point["cpu_bound"] for point in points)
        print(f"the processor was short in {short} of these points: the errors are those of that, too")
    add_work(points)
    counts = sorted({point["hosts"] for point in points})
    fit_hosts = arguments.fit_hosts or counts[: max(1, min(3, len(counts) - 1))]
    chosen = [point for point in points if is_to_fit(point, fit_hosts)]
    if not chosen:
        sys.exit(f"{arguments.cluster} has no point with {fit_hosts} hosts that can be used")
    cores = content["facts"]["cores"]
    print(
        f"{len(points)} of {len(content['points'])} measured points can be used, {len(chosen)} to fit, hosts {fit_hosts}"
    )
    fitted = fit(chosen, cores)
    print("fitted: " + ", ".join(f"{name} {value:.3g}" for name, value in fitted.shared.items()))
    print("host_s, ms: " + ", ".join(f"{way} {1e3 * s:.1f}" for way, s in sorted(fitted.host_s.items())))

    errors = []
    for point in points:
        # What a step takes is held against the model, not its efficiency: that has the processor's work in both.
        errors.append(
            {key: point[key] for key in ("scenario", "way", "scaling", "hosts")}
            | {"held_out": not is_to_fit(point, fit_hosts), "measured_s": point["step_s"]["median"]}
            | {"error": error_of(point, fitted, cores)}
        )
    summary: dict[str, Any] = {}
    for is_held, name in ((False, "fitted"), (True, "held out")):
        found = [abs(entry["error"]) for entry in errors if entry["held_out"] is is_held]
        if found:
            within = sum(error <= GOAL for error in found)
            summary[name] = {
                "points": len(found),
                "median": statistics.median(found),
                "largest": max(found),
                "within_goal": within,
            }
            print(
                f"{name}: {len(found)} points, median error {100 * statistics.median(found):.1f} %, largest"
                f" {100 * max(found):.1f} %; {within} within the goal of {100 * GOAL:.0f} %"
            )

    # Of a cluster to extrapolate only its sizes, rates and compute count, not what was measured.
    results = extrapolate(usable(content["points"], True), fitted, arguments.hosts)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(
        json.dumps(
            {
                "facts": {
                    "measured": content["facts"],
                    "fit_hosts": fit_hosts,
                    "with_cpu_bound": arguments.cpu_bound,
                    "cores": cores,
                },
                "parameters": {**fitted.shared, "host_s": fitted.host_s},
                "errors": errors,
                "summary": summary,
                "points": results,
            },
            indent=1,
        )
        + "\n"
    )
    print(f"written: {arguments.json}")


if __name__ == "__main__":
    main()
