"""Fits a model of time to an emulated cluster, checks it on other host counts, and extrapolates.

    python benchmarks/model.py                         # reads benchmarks/results/cluster.json, writes model.json beside it

What a host needs for an exchange of a bucket of b bytes, beside compute:

    messages x (L + o) + max(t b G, c b W)

with t tensors that leave each host and c that cross the line between two data centers, each way; see `Load`. Then

    DDP                     buckets follow each other, and one begins when its last gradient is there; the step ends with
                            the last one
    neighbors, windows      the exchange goes on beside the compute of a step, and the longer of both counts
    local steps             the exchange comes between two steps, once in so many

A rank's main thread works `host_s` in a step in addition, another time for each way, and each further rank on a core of the
machine that emulates them makes a step `wait_s` longer. G is the time of a byte on a host's link, with heads of 5 %, and W
the same of the line: they are known. L is a measured ping. Fitted are o, of fog and of Gloo, host_s and wait_s, on the
medians of weak scaling on the lowest three counts of hosts in one data center, without points whose processor was short
(`cpu_bound`). They are held against all others: more hosts, strong scaling, two data centers.

Then HOSTS are modelled, as they would be if each host had a processor of its own: with neither the wait_s nor the part
of host_s that a step without any exchange has as well. Sizes, rates and compute stay those of the emulated cluster, so
the work per message stays that of its dilation. performance_tables.py makes the tables of all numbers.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import program
from fogdist.tuning.prediction import near_first
from performance_tables import error_table
from report import write
from workloads import MODELS, Dilation, sizes_of

Point = dict[str, Any]

RESULTS = Path(__file__).resolve().parent / "results"
MEASURED = ("a", "b", "c", "a strong")
CENTERS = {"c": 2}
HOSTS = (2, 4, 8, 16, 32, 64, 128, 1024, 16384)
ALLREDUCED = ("ddp_gloo", "ddp_fog", "local_sgd")
LOCAL = ("local_sgd", "gossip_diloco")
WAYS = (
    "none", *ALLREDUCED, "gossip_diloco", "one_peer_exp", "static_exp", "base_k", "hierarchical", "async_win",
    "win_put", "async_gossip",
)  # fmt: skip
# Of held-out points.
GOAL = 0.05
# Bytes on a link over those of tensors.
HEADS = 1.05
# Peers of a rank in a round of the Base graph.
BASE_DEGREE = 2
# Seconds from which the search begins, and where it ends; it begins at 0.
BEGIN = {"o_fog": 3e-4, "o_gloo": 3e-4, "wait_s": 1e-3}
MOST = {"o_fog": 1e-2, "o_gloo": 1e-2, "wait_s": 2e-2}


@dataclass(frozen=True)
class Load:
    """What an exchange of a tensor costs a host.

    Attributes:
        messages: One after the other.
        sent: Tensors that leave the host.
        crossing: Tensors that cross the line between two data centers, each way; 0 in one center.
    """

    messages: int
    sent: float
    crossing: float

    @classmethod
    def of(cls, way: str, hosts: int, centers: int = 1) -> Load:
        """Returns the load of a way among so many hosts, in data centers with equally many of them."""
        hops = [1 << power for power in range(max(1, (hosts - 1).bit_length()))]
        if way in ALLREDUCED:
            sent = 2 * (hosts - 1) / hosts
            if way == "ddp_gloo":
                return cls(2 * (hosts - 1), sent, sent if centers > 1 else 0.0)
            return cls(2 * len(hops), sent, halved_crossing(hosts, centers))
        # With the rank that is `hop` further, `hop` messages cross the line, at most those of half of the ranks.
        across = [min(hop, hosts - hop) if centers > 1 else 0 for hop in hops]
        if way == "static_exp":
            return cls(len(hops), len(hops), sum(across))
        if way == "gossip_diloco":  # of a center's ranks one talks to the next center in a round
            return cls(1, 1, float(centers > 1))
        # At powers of two the rounds of the Base graph are those of a hypercube, with one peer.
        peers = BASE_DEGREE if way == "base_k" and hosts & (hosts - 1) else 1
        return cls(peers, peers, statistics.fmean(across))


def halved_crossing(hosts: int, centers: int) -> float:
    """Returns the tensors that cross a line between two centers in fog's sums without a ring: collectives/circulant.cpp.

    The measured runs are older than fog's ring, so all sums went this way.
    """
    center = [host * centers // hosts for host in near_first(hosts)]
    crossing, left = 0.0, hosts
    while left > 1:
        hop = (left + 1) // 2
        pairs = [(one, center[(place + hop) % hosts]) for place, one in enumerate(center)]
        # The sums one way, and the results the other.
        crossing += (pairs.count((0, 1)) + pairs.count((1, 0))) * (left - hop) / hosts
        left = hop
    return crossing


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


def dilation_of(point: Point) -> Dilation:
    """How a point's cluster was made small and slow."""
    return Dilation(point["dilation"]["size"], point["dilation"]["time"])


def ready_shares(point: Point) -> list[float]:
    """Returns when the gradients of each bucket are there, as a part of the backward pass."""
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
        ready.append(min(1.0, next((part for bytes_, part in curve if bytes_ >= 0.999 * need), 1.0)))
    return ready


def step_seconds(point: Point, fitted: Fitted, hosts: int | None = None) -> float:
    """Returns the seconds of a step without those of the main thread.

    Args:
        point: A measured point: its way, sizes, rates and compute.
        fitted: The parameters.
        hosts: As if there were so many; by default the point's.
    """
    way, compute, forward = point["way"], point["compute_s"], point["forward_s"]
    load = Load.of(way, hosts or point["hosts"], CENTERS.get(point["scenario"], 1))
    message = point["latency_s"] + fitted.shared["o_gloo" if way == "ddp_gloo" else "o_fog"]
    line = point.get("between_bits_per_s")

    def exchange(size: float) -> float:
        on_link = load.sent * size / point["rate_bits_per_s"]
        over_line = load.crossing * size / line if line else 0.0
        return load.messages * message + 8 * HEADS * max(on_link, over_line)

    buckets = point["bucket_bytes"]
    if way.startswith("ddp_"):
        end = 0.0
        for size, share in zip(buckets, ready_shares(point), strict=True):
            end = max(end, forward + (compute - forward) * share) + exchange(size)
        return max(compute, end)
    together = sum(map(exchange, buckets))
    return compute + together / point["local_steps"] if way in LOCAL else max(compute, together)


def modelled(point: Point, fitted: Fitted, cores: int) -> float:
    """Seconds of a step of an emulated cluster."""
    crowd = max(0.0, point["hosts"] * point["ranks_per_host"] / cores - 1)
    own = fitted.host_seconds(point["way"])
    return step_seconds(point, fitted) + own + fitted.shared["wait_s"] * crowd


def with_host_seconds(points: Sequence[Point], shared: dict[str, float], cores: int) -> Fitted:
    """Fits what is left to each way's main thread: the median of what it takes longer, at least nothing."""
    bare = Fitted(shared)
    left = defaultdict(list)
    for point in points:
        left[point["way"]].append(point["step_s"]["median"] - modelled(point, bare, cores))
    return Fitted(shared, {way: max(0.0, statistics.median(values)) for way, values in left.items()})


def fit(points: Sequence[Point], cores: int) -> Fitted:
    """Returns the parameters with the least sum of squares of relative errors."""
    from scipy.optimize import least_squares

    begins = np.array(list(BEGIN.values()))

    # Values are in units of where it begins.
    def shared_of(values: np.ndarray) -> dict[str, float]:
        return dict(zip(BEGIN, (begins * values).tolist(), strict=True))

    def errors(values: np.ndarray) -> list[float]:
        fitted = with_host_seconds(points, shared_of(values), cores)
        found = [np.log(1 + error_of(point, fitted, cores)) for point in points]
        # Host work is paid for as well, a little: of two explanations the one with less of it is taken.
        return [*found, *(0.05 * seconds for seconds in fitted.host_s.values())]

    bounds = np.zeros_like(begins), np.array(list(MOST.values())) / begins
    options: Any = {"diff_step": 0.05, "loss": "soft_l1", "f_scale": 0.03}
    found = least_squares(errors, np.ones_like(begins), bounds=bounds, **options)
    return with_host_seconds(points, shared_of(found.x), cores)


def error_of(point: Point, fitted: Fitted, cores: int) -> float:
    """The modelled step over the measured one, minus 1."""
    return modelled(point, fitted, cores) / float(point["step_s"]["median"]) - 1


def modelled_points(points: Iterable[Point]) -> list[Point]:
    """Points that the model is for."""
    return [p for p in points if p["scenario"] in MEASURED and p["way"] in WAYS and p["hosts"] > 1]


def is_to_fit(point: Point, hosts: Sequence[int]) -> bool:
    """Whether it is one of those that the parameters come from: one data center, weak scaling, these hosts."""
    return point["hosts"] in hosts and point["scenario"] not in CENTERS and point["scaling"] == "weak"


def extrapolate(points: Sequence[Point], fitted: Fitted, hosts: Sequence[int]) -> list[Point]:
    """Models each scenario's ways on any number of hosts, each with a processor of its own."""
    examples: dict[tuple[str, str], Point] = {}
    # The cluster whose time is dilated the least is the nearest to a real one; of these the largest.
    for point in sorted(points, key=lambda point: (point["dilation"]["time"], -point["hosts"])):
        if point["scaling"] == "weak":
            examples.setdefault((point["scenario"], point["way"]), point)
    results = []
    for (scenario, way), example in sorted(examples.items()):
        beside = max(0.0, fitted.host_seconds(way) - fitted.host_seconds("none"))
        for count in hosts:
            seconds = step_seconds(example, fitted, count) + beside
            about = {"scenario": scenario, "way": way, "hosts": count}
            about["ranks"] = count * example["ranks_per_host"]
            results.append(about | {"step_s": seconds, "efficiency": example["compute_s"] / seconds})
    return results


def main() -> None:
    """Fits, checks, extrapolates, prints and writes."""
    parser = program.parser_of(__doc__)
    add = parser.add_argument
    add("--cluster", type=Path, default=RESULTS / "cluster.json", help="what benchmarks/cluster.py measured")
    add("--json", type=Path, default=RESULTS / "model.json", help="file for the numbers")
    arguments = parser.parse_args()
    content = json.loads(arguments.cluster.read_text())
    all_points = modelled_points(content["points"])
    points = [point for point in all_points if not point["cpu_bound"]]
    counts = sorted({point["hosts"] for point in points})
    fit_hosts = counts[: max(1, min(3, len(counts) - 1))]
    chosen = [point for point in points if is_to_fit(point, fit_hosts)]
    if not chosen:
        sys.exit(f"{arguments.cluster} has no point with {fit_hosts} hosts that can be used")
    cores = content["facts"]["cores"]
    print(f"{len(points)} of {len(all_points)} points can be used, {len(chosen)} to fit, hosts {fit_hosts}")
    fitted = fit(chosen, cores)
    print("fitted: " + ", ".join(f"{name} {value:.3g}" for name, value in fitted.shared.items()))
    print("host_s, ms: " + ", ".join(f"{way} {1e3 * s:.1f}" for way, s in sorted(fitted.host_s.items())))

    # What a step takes is held against the model, not its efficiency: that has the processor's work in both.
    errors = [
        {key: point[key] for key in ("scenario", "way", "scaling", "hosts")}
        | {"held_out": not is_to_fit(point, fit_hosts), "measured_s": point["step_s"]["median"]}
        | {"error": error_of(point, fitted, cores)}
        for point in points
    ]
    summary: dict[str, Any] = {}
    for is_held, name in ((False, "fitted"), (True, "held out")):
        found = [abs(entry["error"]) for entry in errors if entry["held_out"] is is_held]
        if found:
            within = sum(error <= GOAL for error in found)
            summary[name] = {"points": len(found), "median": statistics.median(found)}
            summary[name] |= {"largest": max(found), "within_goal": within}
    print(error_table({"errors": errors, "summary": summary}))

    # Of a cluster to extrapolate only its sizes, rates and compute count, not what was measured.
    results = extrapolate(all_points, fitted, HOSTS)
    facts = {"measured": content["facts"], "fit_hosts": fit_hosts, "cores": cores}
    parameters = {**fitted.shared, "host_s": fitted.host_s}
    kept = {"facts": facts, "parameters": parameters, "errors": errors, "summary": summary, "points": results}
    write(arguments.json, **kept)


if __name__ == "__main__":
    main()
