"""Fills the tables of docs/measurements from the files in benchmarks/results.

    python benchmarks/performance_tables.py            # writes the pages anew
    python benchmarks/performance_tables.py --check    # fails if a page says anything else than the files

A table stands between the comments ``<!-- table NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import program

# By the names of cluster_ranks.py and time_to_loss.py.
from cluster_plots import WAYS
from loss_steps import median_steps

# At the end, so modules of the benchmarks come before modules of the tests with the same name.
sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from soak_totals import FAILURES, next_steps, percentile, throughput

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "docs" / "measurements" / name for name in ("scaling.md", "compression.md", "faults.md")]
RESULTS = ROOT / "benchmarks" / "results"
NAMES = {
    "none": "no exchange",
    **{way: title for way, (title, _, _) in WAYS.items()},
    "gossip_pga": "Gossip-PGA",
    "exact_diffusion": "exact diffusion",
    "gradient_tracking": "gradient tracking",
}
MARK = " (s)"
# By the names of tests/soak_faults.py and tests/soak_torchft.py.
TRAININGS = {
    "neighbors": '`DecentralizedDataParallel`, mode "sync", `on_loss="continue"`',
    "asynchronous-on-loss": 'the same, mode "async"',
    "asynchronous": 'mode "async", `skip_lost=True`',
    "collectives": "allreduce; a new group of those left, which the test knows",
    "reconfigured": "allreduce; `fogdist.reconfigure`",
    "operations": "each operation in turn; `fogdist.reconfigure`",
    "torchft": "torchft with the waits of its README (10 s for replicas, 5 s for heartbeats)",
    "torchft-tuned": "torchft with short waits (0.1 s and 1 s)",
}
# Of the model's errors.
GOAL = 0.05
STRAGGLERS = ("slow host", "slow link", "pauses")
FAR_HOSTS = (16, 128, 1024, 16384)
TABLE = re.compile(r"(<!-- table ([\w -]+) -->\n).*?(<!-- end -->)", re.DOTALL)

Point = Mapping[str, Any]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def columns(rows: Iterable[Point], cells: Mapping[str, Callable[[Any], str]]) -> str:
    """Returns a table of a row for each of some results; what the columns have of a result, by their heads."""
    return table(list(cells), ([cell(row) for cell in cells.values()] for row in rows))


def percent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f}"


def signed(value: float, digits: int = 1) -> str:
    return f"{100 * value:+.{digits}f}"


def ways_of(points: Iterable[Point]) -> list[str]:
    """Returns the ways of some points, in the order of NAMES."""
    found = {point["way"] for point in points}
    return [way for way in NAMES if way in found]


def efficiency_cell(point: Point | None) -> str:
    """Returns a point's efficiency and the idle time of the cores beside it."""
    if point is None:
        return ""
    return f"{percent(point['efficiency'])} ({percent(point['cpu_idle'], 0)}){MARK if point['cpu_bound'] else ''}"


def efficiency_table(scenario: str, points: Sequence[Point]) -> str:
    """Returns the efficiencies of a scenario, by way and hosts."""
    chosen = [point for point in points if point["scenario"] == scenario]
    # Of two worlds with a way, the one with one rank a host; "hierarchical" has two.
    found = {(p["way"], p["hosts"]): p for p in sorted(chosen, key=lambda p: -p["ranks_per_host"])}
    hosts = sorted({point["hosts"] for point in chosen})
    rows = [
        [NAMES[way], *(efficiency_cell(found.get((way, count))) for count in hosts)]
        for way in ways_of(chosen)
    ]
    return table(["hosts", *map(str, hosts)], rows)


def step_table(scenario: str, points: Sequence[Point]) -> str:
    """Returns the steps of a scenario with one number of hosts."""
    chosen = {point["way"]: point for point in points if point["scenario"] == scenario}

    def way(point: Point) -> str:
        local = point["local_steps_real"]
        return NAMES[point["way"]] + (f", {local} local steps" if local > 1 else "")

    def times(step: Mapping[str, float]) -> str:
        return f"{1e3 * step['median']:.0f} [{1e3 * step['lower']:.0f}, {1e3 * step['upper']:.0f}]"

    return columns(
        [chosen[each] for each in ways_of(chosen.values())],
        {
            "way": way,
            "ms a step, quartiles": lambda point: times(point["step_s"]),
            "ms of compute": lambda point: f"{1e3 * point['compute_s']:.0f}",
            "efficiency, % (idle)": efficiency_cell,
            "MB a host and emulated step": lambda p: f"{p['wire_bytes_per_host_per_step'] / 1e6:.2f}",
        },
    )


def straggler_table(points: Sequence[Point]) -> str:
    """Returns the share of the sum of solo speeds, by way and scenario."""
    found = {(point["scenario"], point["way"]): point for point in points}
    kinds = [kind for kind in STRAGGLERS if any(scenario == kind for scenario, _ in found)]
    ways = ways_of(point for (scenario, _), point in found.items() if scenario in kinds)
    rows = [
        [NAMES[way], *(efficiency_cell(found.get((kind, way))) for kind in kinds)]
        for way in ways
        if way != "none"
    ]
    return table(["way", *kinds], rows)


def error_table(model: Mapping[str, Any]) -> str:
    """Returns the model's errors, by scenario, scaling and hosts."""
    groups: dict[tuple[str, str, int, bool], list[float]] = {}
    for entry in model["errors"]:
        key = (entry["scenario"], entry["scaling"], entry["hosts"], entry["held_out"])
        groups.setdefault(key, []).append(abs(entry["error"]))
    rows = []
    for (scenario, scaling, hosts, is_held), errors in sorted(groups.items()):
        kind = scenario if scaling in scenario else f"{scenario} {scaling}"
        rows.append(
            [
                kind, str(hosts), "held out" if is_held else "fitted", str(len(errors)),
                percent(statistics.median(errors)), percent(max(errors)), str(sum(e <= GOAL for e in errors)),
            ]
        )  # fmt: skip
    for title, of in model["summary"].items():
        shown = [percent(of["median"]), percent(of["largest"]), str(of["within_goal"])]
        rows.append(["all", "", title, str(of["points"]), *shown])
    return table(
        ["scenario", "hosts", "", "points", "median error, %", "largest, %", "within the goal"], rows
    )


def extrapolated_table(scenario: str, model: Mapping[str, Any]) -> str:
    """Returns modelled efficiencies far beyond what was measured."""
    chosen = [point for point in model["points"] if point["scenario"] == scenario]
    found = {(point["way"], point["hosts"]): percent(point["efficiency"]) for point in chosen}
    rows = [
        [NAMES[way], *(found.get((way, count), "") for count in FAR_HOSTS)]
        for way in ways_of(chosen)
        if way != "none"
    ]
    return table(["hosts", *(f"{count:,}" for count in FAR_HOSTS)], rows)


def advice_table(advice: Mapping[str, Any]) -> str:
    """Returns the choice of `fog advise` beside the best of the grid."""

    def setting(each: Mapping[str, Any]) -> str:
        return f"{each['topology']}, J = {each['local_steps']}, {each['bucket_mb']:.2g} MiB: {1e3 * each['step_s']:.0f}"

    def count(cluster: Mapping[str, Any]) -> str:
        short = sum(point["cpu_bound"] for point in cluster["points"])
        return str(len(cluster["points"])) + (f", {short} short" if short else "")

    return columns(
        advice["clusters"],
        {
            "cluster": lambda each: f"{each['cluster']}, {each['hosts']} hosts",
            "settings": count,
            "chosen: ms a step": lambda each: setting(each["choice"]),
            "fastest": lambda each: setting(each["fastest"]),
            "step, %": lambda each: signed(each["step_over_fastest"]),
            "best by the rule": lambda each: setting(each["best_by_rule"]),
            "time to agreement, %": lambda each: signed(each["time_to_agreement_over_best"]),
            "median error of the predictions, %": lambda each: percent(each["prediction_error"]["median"]),
        },
    )


def loss_table(loss: Mapping[str, Any]) -> str:
    """Returns losses at equal samples relative to DDP's, and steps to the target, of the runs with several seeds."""
    found = {(row["way"], row["split"]): row for row in loss["differences"] if "lower" in row}
    splits = list(dict.fromkeys(split for _, split in found))
    ranks = next(row["ranks"] for row in found.values())
    counts = median_steps(loss["points"], loss["facts"]["target"])

    def cell(way: str, split: str) -> str:
        row = found[way, split]
        return f"{signed(row['mean'])} [{signed(row['lower'])}, {signed(row['upper'])}]"

    def steps(way: str, split: str) -> str:
        count = counts[way, ranks, split]
        return f"{count:.0f}" if math.isfinite(count) else ">"

    ways = sorted({way for way, _ in found}, key=lambda way: float(found[way, splits[0]]["mean"]))
    rows = [["DDP", *("0" for _ in splits), *(steps("ddp_fog", split) for split in splits)]]
    rows += [
        [NAMES[way], *(cell(way, split) for split in splits), *(steps(way, split) for split in splits)]
        for way in ways
    ]
    return table(["way", *(f"{s}, %" for s in splits), *(f"steps, {s}" for s in splits)], rows)


def many_ranks_table(loss: Mapping[str, Any]) -> str:
    """Returns losses at equal samples of one seed, by way and number of ranks."""
    found = {
        (row["way"], row["ranks"]): signed(row["mean"]) for row in loss["differences"] if row["seeds"] == 1
    }
    counts = sorted({ranks for _, ranks in found})
    rows = [
        [NAMES[way], *(found.get((way, count), "") for count in counts)]
        for way in NAMES
        if any((way, count) in found for count in counts)
    ]
    return table(["ranks", *(f"{count:,}" for count in counts)], rows)


def time_table(points: Sequence[Point], loss: Mapping[str, Any]) -> str:
    """Returns steps to the loss times the time of a step of scenario a, relative to DDP on Gloo."""
    ranks, split = 16, "iid"
    chosen = {
        p["way"]: p
        for p in points
        if (p["scenario"], p["hosts"], p["ranks_per_host"], p["scaling"]) == ("a", ranks, 1, "weak")
    }
    counts = median_steps(loss["points"], loss["facts"]["target"])
    # Both DDPs make the same steps.
    steps = {way: counts.get((way.replace("ddp_gloo", "ddp_fog"), ranks, split)) for way in chosen}
    rows = []
    for way in ways_of(chosen.values()):
        count, step = steps[way], float(chosen[way]["step_s"]["median"])
        if count is not None:
            ratio = count * step / (steps["ddp_gloo"] * float(chosen["ddp_gloo"]["step_s"]["median"]))
            rows.append(
                [
                    NAMES[way],
                    f"{count:.0f}" if math.isfinite(count) else ">",
                    f"{1e3 * step:.0f}{MARK if chosen[way]['cpu_bound'] else ''}",
                    f"{ratio:.2f}" if math.isfinite(ratio) else ">",
                ]
            )
    return table(["way", "steps", "ms a step", "time, DDP on Gloo = 1"], rows)


def faults_table(runs: Iterable[Mapping[str, Any]], place: str) -> str:
    """Returns what soaks with faults have shown on one host, or on several, by the way of training.

    Faults and failures are those of all runs. Throughput, loss and times are those of runs on an idle machine, if there
    are any of this way.
    """
    found: dict[str, list[Mapping[str, Any]]] = {}
    idle: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        for mode, values in run["modes"].items() if run["place"] == place else ():
            if values["faults"]:
                found.setdefault(mode, []).append(values)
                if run.get("idle"):
                    idle.setdefault(mode, []).append(values)

    def times(parts: Sequence[Mapping[str, Any]], ends: bool) -> str:
        seconds = [second for part in parts for second in next_steps(part, ends=ends)]
        shown = [f"{percentile(seconds, p):.2f}" for p in (50, 99)] if seconds else []
        return " / ".join(shown)

    rows = []
    for mode in (mode for mode in TRAININGS if mode in found):
        parts = found[mode]
        sums = {name: sum(part[name] for part in parts) for name in FAILURES}
        measured = idle.get(mode, parts)
        share = throughput(measured)
        ratios = [ratio for part in measured for ratio in part["loss_ratios"]]
        failures = [f"{sums[name]} {name}" for name in FAILURES if sums[name]]
        rows.append(
            [
                TRAININGS[mode] + ("" if mode in idle else " (busy)"),
                str(sum(sum(part["faults"].values()) for part in parts)),
                ", ".join(failures) or "0",
                "" if share is None else percent(share),
                f"{signed(statistics.median(ratios) - 1, 2)} ({len(ratios)} pairs)" if ratios else "",
                times(measured, True),
                times(measured, False),
            ]
        )
    head = ["training", "faults", "failures", "throughput, %", "loss, %", "next step, s", "after a cut, s"]
    return table(head, rows)


def moments_of(runs: Iterable[Mapping[str, Any]]) -> str:
    """Returns at how many moments of operations ranks were killed, of how many, and which were never hit."""
    parts = [part for run in runs for part in run["modes"].values() if part["possible_moments"]]
    hit = {moment for part in parts for moment in part["moments"]}
    ends = sum(sum(part["moments"].values()) for part in parts)
    possible = max(part["possible_moments"] for part in parts)
    missed = {moment for part in parts for moment in part.get("missed_moments", ())} - hit
    names = f"; never hit: {', '.join(map(repr, sorted(missed)))}" if missed else ""
    return f"{ends} kills at {len(hit)} of {possible} moments{names}\n"


def codec_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns how fast codecs encode and decode, in GB/s and as a part of memcpy."""
    found = {row["codec"]: row for row in rows}

    def cell(row: Mapping[str, Any]) -> str:
        return f"{row['GB/s']:.1f} ({row['of memcpy']:.2f})"

    names = [name.removesuffix(" encode") for name in found if name.endswith(" encode")]
    memcpy = cell(found["memcpy"])
    return table(
        ["codec", "encodes, GB/s (of memcpy)", "decodes, GB/s (of memcpy)"],
        [
            ["memcpy", memcpy, memcpy],
            *([n, cell(found[f"{n} encode"]), cell(found[f"{n} decode"])] for n in names),
        ],
    )


def exchange_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Returns times and bytes of compressed exchanges between two hosts."""
    return columns(
        rows,
        {
            "codec": lambda row: row["codec"],
            "bytes promised": lambda row: f"{row['promised bytes']:,}",
            "bytes of the link, over the promised": lambda row: f"{row['of promised']:.3f}",
            "ms, median": lambda row: f"{row['ms']:.1f}",
            "ms, least": lambda row: f"{row['least ms']:.1f}",
            "times as fast": lambda row: f"{row['speed']:.2f}",
        },
    )


def compressed_loss_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Returns bytes and losses of compressed trainings, beside those without a codec."""

    def difference(row: Mapping[str, Any]) -> str:
        if "lower" not in row or row["fewer bytes"] == 1:
            return ""
        return f"{signed(row['mean'])} [{signed(row['lower'])}, {signed(row['upper'])}]"

    return columns(
        rows,
        {
            "task": lambda row: row["task"],
            "way": lambda row: row["way"],
            "bytes a step": lambda row: f"{row['bytes a step']:,}",
            "times fewer": lambda row: f"{row['fewer bytes']:.1f}",
            "rate": lambda row: f"{row['rate']:g}",
            "test loss": lambda row: f"{row['loss']:.4f}",
            "loss, % [95 % interval]": difference,
        },
    )


def compressed_time_table(rows: Sequence[Mapping[str, Any]], crossings: Iterable[Mapping[str, Any]]) -> str:
    """Returns times to a loss over links, in seconds and of that without a codec, and up to which speed a way pays."""
    found = {(row["way"], row["bits_per_s"], row["slowness"]): row for row in rows}
    places = sorted({(speed, slowness) for _, speed, slowness in found})
    limits = {each["way"]: each for each in crossings}

    def cell(row: Mapping[str, Any]) -> str:
        if row["seconds"] is None:
            return ">"
        return f"{row['seconds']:.2f}" + (
            "" if row["of no codec"] in (1, None) else f" ({row['of no codec']:.2f})"
        )

    def limit(way: str) -> str:
        each = limits.get(way)
        words = {"at": "", "above": "> ", "below": "< "}
        return "" if each is None else f"{words[each['where']]}{each['bits_per_s'] / 1e9:.2g}"

    def steps(way: str) -> str:
        counts = {row["steps"] for (name, _, _), row in found.items() if name == way}
        return ", ".join(">" if each is None else str(each) for each in counts)

    heads = [
        f"{speed / 1e9:g}{f', dilated {slowness:g}' if slowness > 1 else ''}" for speed, slowness in places
    ]
    return table(
        ["Gbit/s", "steps", *heads, "saves 5 % up to, Gbit/s"],
        [
            [way, steps(way), *(cell(found[way, speed, slowness]) for speed, slowness in places), limit(way)]
            for way in dict.fromkeys(row["way"] for row in rows)
        ],
    )


def tables() -> dict[str, Callable[[], str]]:
    """Returns what makes each table, by name."""

    def read(name: str) -> Any:
        return json.loads((RESULTS / f"{name}.json").read_text())

    def points() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = read("cluster")["points"]
        return found

    return {
        "a": lambda: efficiency_table("a", points()),
        "b": lambda: efficiency_table("b", points()),
        "a strong": lambda: efficiency_table("a strong", points()),
        "c": lambda: step_table("c", points()),
        "stragglers": lambda: straggler_table(points()),
        "errors": lambda: error_table(read("model")),
        "modelled a": lambda: extrapolated_table("a", read("model")),
        "modelled c": lambda: extrapolated_table("c", read("model")),
        "advice": lambda: advice_table(read("advise")),
        "loss": lambda: loss_table(read("loss")),
        "loss of long runs": lambda: loss_table(read("loss_long")),
        "loss of many ranks": lambda: many_ranks_table(read("loss")),
        "time to loss": lambda: time_table(points(), read("loss")),
        "codecs": lambda: codec_table(read("compression")["codecs"]),
        "compressed exchanges": lambda: exchange_table(read("compression")["exchanges"]),
        "compressed losses": lambda: compressed_loss_table(read("compression")["compared"]),
        "compressed times": lambda: compressed_time_table(
            read("compression")["links"], read("compression")["crossings"]
        ),
        "faults on one host": lambda: faults_table(read("faults")["runs"], "one host"),
        "faults on hosts": lambda: faults_table(read("faults")["runs"], "hosts"),
        "moments": lambda: moments_of(read("faults")["runs"]),
    }


def filled(page: str) -> str:
    """Returns the page with its tables made anew.

    Raises:
        KeyError: The page has a table that is not known.
    """
    makers = tables()
    return TABLE.sub(lambda found: f"{found[1]}\n{makers[found[2]]()}\n{found[3]}", page)


def main() -> None:
    """Writes the pages, or checks them."""
    parser = program.parser_of(__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a page differs, and leave it as it is")
    arguments = parser.parse_args()
    for path in PAGES:
        before = path.read_text()
        after = filled(before)
        if arguments.check and after != before:
            sys.exit(
                f"{path.relative_to(ROOT)} is not what the files in benchmarks/results say: run {Path(__file__).name}"
            )
        if not arguments.check:
            path.write_text(after)


if __name__ == "__main__":
    main()
