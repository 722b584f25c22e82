"""Fits a model of time to an emulated cluster, checks it on other host counts and by a second simulator, and extrapolates.

    python benchmarks/model.py                         # reads benchmarks/results/cluster.json, writes model.json beside it
    python benchmarks/model.py --fit-hosts 2 4 --plot scaling.png

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
the work per byte and message stays that of its dilation.

SimGrid replays the same graphs, with the same parameters, up to --simgrid-hosts hosts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from loggops import Parameters
from training_model import WAYS, Cluster, Workload, graph_of, seconds_of, work_seconds
from workloads import MODELS, SCENARIOS, Dilation, sizes_of

RESULTS = Path(__file__).resolve().parent / "results"
SIMGRID = Path(__file__).resolve().parent / "simgrid_actors.py"
MEASURED = ("a", "b", "c", "a strong")
CENTERS = {"c": 2}
HOSTS = (2, 4, 8, 16, 32, 64, 128, 1024, 16384)
# Of held-out points, and of SimGrid to the model.
GOAL, SIMGRID_GOAL = 0.05, 0.10
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


def simgrid_seconds(
    python: str, way: str, cluster: Cluster, workload: Workload, parameters: Parameters, most_tasks: int
) -> float | None:
    """Seconds of a step by SimGrid; None where that would take too long."""
    graph = graph_of(way, cluster, workload, whole=True)
    if len(graph.tasks) > most_tasks:
        return None
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        graph.write(Path(file.name), parameters)
        run = subprocess.run([python, str(SIMGRID), file.name], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise RuntimeError(f"simgrid_actors.py: {run.stderr.strip()[-500:]}")
    seconds: float = json.loads(run.stdout)["step_s"]
    return seconds / (workload.local_steps if way in ("local_sgd", "gossip_diloco") else 1)


def simgrid_python() -> str | None:
    """A Python that has simgrid."""
    for python in (sys.executable, "/usr/bin/python3"):
        if (
            Path(python).exists()
            and subprocess.run([python, "-c", "import simgrid"], capture_output=True, check=False).returncode
            == 0
        ):
            return python
    return None


def table(title: str, rows: dict[str, dict[int, str]]) -> None:
    """Prints rows by hosts."""
    columns = sorted({hosts for row in rows.values() for hosts in row})
    width = max(8, *(len(text) + 2 for row in rows.values() for text in row.values()))
    print(f"\n{title}\n{'hosts':22}" + "".join(f"{hosts:>{width}}" for hosts in columns))
    for way, row in rows.items():
        print(f"{way:22}" + "".join(f"{row.get(hosts, '-'):>{width}}" for hosts in columns))
    sys.stdout.flush()


def extrapolate(
    points: Sequence[dict[str, Any]],
    fitted: Fitted,
    hosts: Sequence[int],
    simulated: Callable[..., float | None] | None,
    simgrid_hosts: int,
) -> list[dict[str, Any]]:
    """Models each scenario's ways on any number of hosts, and asks the second simulator where it can."""
    examples: dict[tuple[str, str], dict[str, Any]] = {}
    # The cluster whose time is dilated the least is the nearest to a real one; of these the largest.
    for point in sorted(points, key=lambda point: (point["dilation"]["time"], -point["hosts"])):
        if point["scaling"] == "weak":
            examples.setdefault((point["scenario"], point["way"]), point)
    results, asked = [], []
    for (scenario, way), example in sorted(examples.items()):
        for count in hosts:
            cluster, workload, parameters = extrapolated(example, count, fitted)
            seconds = seconds_of(way, cluster, workload, parameters)
            results.append(
                {
                    "scenario": scenario,
                    "way": way,
                    "hosts": count,
                    "ranks": cluster.ranks,
                    "step_s": seconds,
                    "efficiency": workload.compute / seconds,
                    "modelled": True,
                    "simgrid_step_s": None,
                }
            )
            if simulated and count <= simgrid_hosts:
                asked.append((results[-1], way, cluster, workload, parameters))
    if simulated:
        with ThreadPoolExecutor(2) as pool:
            answers = pool.map(lambda question: simulated(*question[1:]), asked)
            for (result, *_), answer in zip(asked, answers, strict=True):
                result["simgrid_step_s"] = answer
    return results


def main() -> None:
    """Fits, checks, extrapolates, prints and writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--cluster", type=Path, default=RESULTS / "cluster.json", help="what benchmarks/cluster.py measured")
    add("--json", type=Path, default=RESULTS / "model.json", help="file for the numbers")
    add("--plot", type=Path, help="file for a picture of both, see cluster_plots.py")
    add(
        "--fit-hosts",
        type=int,
        nargs="+",
        help="host counts to fit on (default: the lowest three, but not all)",
    )
    add("--cpu-bound", action="store_true", help="use points whose processor was short, too")
    add("--hosts", type=int, nargs="+", default=list(HOSTS), help="host counts to extrapolate to")
    add("--simgrid-hosts", type=int, default=16, help="the most hosts that SimGrid replays")
    add("--simgrid-tasks", type=int, default=8000, help="the most tasks of a graph that it replays")
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
    rows: dict[str, dict[str, dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
    for point in points:
        # What a step takes is held against the model, not its efficiency: that has the processor's work in both.
        held_out = not is_to_fit(point, fit_hosts)
        error = error_of(point, fitted, cores)
        errors.append(
            {key: point[key] for key in ("scenario", "way", "scaling", "hosts")}
            | {"held_out": held_out, "measured_s": point["step_s"]["median"], "error": error}
        )
        title = f"{point['scenario']}, {point['scaling']}"
        rows[title][point["way"]][point["hosts"]] = f"{100 * error:+.1f}{'*' if held_out else ''}"
    for title, row in sorted(rows.items()):
        table(f"Error of the model, %: {title} scaling; * was not fitted", row)
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

    python = simgrid_python()
    if python is None:
        print("SimGrid: not installed (apt-get install python3-simgrid); the model stands alone")

    def simulated(way: str, cluster: Cluster, workload: Workload, parameters: Parameters) -> float | None:
        return simgrid_seconds(str(python), way, cluster, workload, parameters, arguments.simgrid_tasks)

    # Of a cluster to extrapolate only its sizes, rates and compute count, not what was measured.
    results = extrapolate(
        usable(content["points"], True),
        fitted,
        arguments.hosts,
        simulated if python else None,
        arguments.simgrid_hosts,
    )
    for scenario in dict.fromkeys(result["scenario"] for result in results):
        efficiencies: dict[str, dict[int, str]] = defaultdict(dict)
        differences: dict[str, dict[int, str]] = defaultdict(dict)
        for result in results:
            if result["scenario"] == scenario:
                efficiencies[result["way"]][result["hosts"]] = f"{100 * result['efficiency']:.1f}"
                if result["simgrid_step_s"] is not None:
                    apart = result["simgrid_step_s"] / result["step_s"] - 1
                    differences[result["way"]][result["hosts"]] = f"{100 * apart:+.1f}"
        table(f"Scenario {scenario}, weak scaling: modelled efficiency, %", efficiencies)
        if differences:
            table(f"Scenario {scenario}: SimGrid's step over the model's, %", differences)
    apart = [abs(r["simgrid_step_s"] / r["step_s"] - 1) for r in results if r["simgrid_step_s"] is not None]
    if apart:
        summary["simgrid"] = {
            "points": len(apart),
            "median": statistics.median(apart),
            "largest": max(apart),
            "within_goal": sum(a <= SIMGRID_GOAL for a in apart),
        }
        print(
            f"SimGrid and the model: {len(apart)} points, at most {100 * max(apart):.1f} % apart;"
            f" {summary['simgrid']['within_goal']} within the goal of {100 * SIMGRID_GOAL:.0f} %"
        )
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(
        json.dumps(
            {
                "facts": {
                    "measured": content["facts"],
                    "fit_hosts": fit_hosts,
                    "with_cpu_bound": arguments.cpu_bound,
                    "cores": cores,
                    "simgrid": python is not None,
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
    if arguments.plot:
        from cluster_plots import draw_efficiency

        draw_efficiency(arguments.plot, content["points"], results)


if __name__ == "__main__":
    main()
