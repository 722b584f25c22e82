"""Fills the tables of docs/measurements from the files in benchmarks/results, and draws their pictures.

    python benchmarks/performance_tables.py            # writes the pages, and their pictures in docs/pictures, anew
    python benchmarks/performance_tables.py --check    # fails if a page says anything else than the files

A table stands between the comments ``<!-- table NAME -->`` and ``<!-- end -->``. In the picture of scaling, measured points are filled
and have bars from quartile to quartile, and are small and pale if the processor was short; modelled ones are hollow, on
dashed lines. The other picture is the course of `tune=True` along a trace of link rates.
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
from paired import median_steps

# At the end, so modules of the benchmarks come before modules of the tests with the same name.
sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from soak_totals import FAILURES, next_steps, percentile, throughput

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "docs" / "measurements" / name
    for name in ("scaling.md", "training.md", "compression.md", "faults.md")
]
RESULTS = ROOT / "benchmarks" / "results"
TITLES = {
    "a": "(a) ResNet-50, 8 V100 a host, 25 Gbit/s",
    "b": "(b) GPT-2 124M, 8 H100 a host, 100 Gbit/s",
    "c": "(c) GPT-2 124M, two data centers, 1 Gbit/s between",
}
# By way, as cluster_ranks.py and time_to_loss.py call it: its name, and in the picture, color, marker.
WAYS = {
    "ddp_gloo": ("DDP on Gloo", "tab:red", "s"),
    "ddp_fog": ("DDP on fog", "tab:orange", "D"),
    "one_peer_exp": ("one-peer exponential", "tab:blue", "o"),
    "sites": ("one peer, sites known", "tab:blue", "p"),
    "static_exp": ("static exponential", "tab:cyan", "^"),
    "base_k": ("Base-3", "tab:olive", "v"),
    "hierarchical": ("hierarchical", "tab:green", "P"),
    "async_win": ("asynchronous windows", "tab:purple", "X"),
    "win_put": ("win-put", "tab:pink", "<"),
    "async_gossip": ("AD-PSGD", "tab:gray", ">"),
    "local_sgd": ("local SGD", "tab:brown", "h"),
    "gossip_diloco": ("gossip DiLoCo", "black", "*"),
}
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


def by_way(
    points: Sequence[Point],
    column: str,
    cell: Callable[[Point | None], str],
    heads: Iterable[Any] | None = None,
) -> str:
    """Returns a table of a row for each way.

    Args:
        points: Of several points with a way and a column the last one counts.
        column: The name of what the columns differ in.
        cell: Makes the text of a point.
        heads: The columns; by default all, ascending.
    """
    found = {(point["way"], point[column]): point for point in points}
    columns_ = list(heads or sorted({point[column] for point in points}))
    shown = [f"{head:,}" if isinstance(head, int) else head for head in columns_]
    first = "way" if column == "scenario" else column
    rows = ([NAMES[way], *(cell(found.get((way, each))) for each in columns_)] for way in ways_of(points))
    return table([first, *shown], rows)


def efficiency_table(scenario: str, points: Sequence[Point]) -> str:
    """Returns the efficiencies of a scenario, by way and hosts."""
    chosen = [point for point in points if point["scenario"] == scenario]
    # Of two worlds with a way, the one with one rank a host; "hierarchical" has two.
    return by_way(sorted(chosen, key=lambda p: -p["ranks_per_host"]), "hosts", efficiency_cell)


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
    chosen = [p for p in points if p["scenario"] in STRAGGLERS and p["way"] != "none"]
    return by_way(chosen, "scenario", efficiency_cell, STRAGGLERS)


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
    chosen = [p for p in model["points"] if p["scenario"] == scenario and p["way"] != "none"]
    return by_way(chosen, "hosts", lambda p: percent(p["efficiency"]) if p else "", FAR_HOSTS)


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


def interval(row: Mapping[str, Any]) -> str:
    """Returns a difference in percent and its interval; nothing for one seed."""
    if "lower" not in row:
        return ""
    return f"{signed(row['mean'])} [{signed(row['lower'])}, {signed(row['upper'])}]"


def loss_table(loss: Mapping[str, Any]) -> str:
    """Returns losses at equal samples relative to DDP's, and steps to the target, of the runs with several seeds."""
    found = {(row["way"], row["split"]): row for row in loss["differences"] if "lower" in row}
    splits = list(dict.fromkeys(split for _, split in found))
    ranks = next(row["ranks"] for row in found.values())
    counts = median_steps(loss["points"], loss["facts"]["target"], ("way", "ranks", "split"))

    def cell(way: str, split: str) -> str:
        return interval(found[way, split])

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


def settings_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Returns the losses of settings beside DDP's."""
    return columns(
        rows,
        {
            "task": lambda row: row["task"],
            "way": lambda row: row["way"],
            "seeds": lambda row: str(row["seeds"]),
            "rate": lambda row: f"{row['rate']:g}",
            "test loss": lambda row: f"{row['loss']:.4f}",
            "loss, % [95 % interval]": lambda row: "" if row["way"] == "DDP" else interval(row),
        },
    )


def many_ranks_table(loss: Mapping[str, Any]) -> str:
    """Returns losses at equal samples of one seed, by way and number of ranks."""
    rows = [row for row in loss["differences"] if row["seeds"] == 1]
    return by_way(rows, "ranks", lambda row: signed(row["mean"]) if row else "")


def time_table(points: Sequence[Point], loss: Mapping[str, Any]) -> str:
    """Returns steps to the loss times the time of a step of scenario a, relative to DDP on Gloo."""
    ranks, split = 16, "iid"
    chosen = {
        p["way"]: p
        for p in points
        if (p["scenario"], p["hosts"], p["ranks_per_host"], p["scaling"]) == ("a", ranks, 1, "weak")
    }
    counts = median_steps(loss["points"], loss["facts"]["target"], ("way", "ranks", "split"))
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
    return columns(
        rows,
        {
            "task": lambda row: row["task"],
            "way": lambda row: row["way"],
            "bytes a step": lambda row: f"{row['bytes a step']:,}",
            "times fewer": lambda row: f"{row['fewer bytes']:.1f}",
            "rate": lambda row: f"{row['rate']:g}",
            "test loss": lambda row: f"{row['loss']:.4f}",
            "loss, % [95 % interval]": lambda row: "" if row["fewer bytes"] == 1 else interval(row),
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


def draw_efficiency(
    path: Path, measured: Sequence[dict[str, Any]], modelled: Sequence[dict[str, Any]]
) -> None:
    """Draws efficiency over hosts under weak scaling, a panel for each scenario.

    Args:
        path: Of the picture.
        measured: Points of cluster.json; those whose processor was short are small and pale.
        modelled: Points of model.json.
    """
    from matplotlib.figure import Figure

    weak = [p for p in measured if p["scaling"] == "weak"]
    # By the entry of the legend: the points, and how they look.
    kinds: dict[str, tuple[Sequence[dict[str, Any]], dict[str, Any]]] = {
        "measured, with quartiles": (
            [p for p in weak if not p["cpu_bound"]],
            {"linestyle": "", "markersize": 8, "capsize": 2},
        ),
        "the processor was short": (
            [p for p in weak if p["cpu_bound"]],
            {"linestyle": "", "markersize": 5, "alpha": 0.25},
        ),
        "modelled": (
            modelled,
            {"linestyle": "--", "linewidth": 1, "markersize": 6, "markerfacecolor": "white"},
        ),
    }
    scenarios = [s for s in TITLES if any(p["scenario"] == s for p in [*weak, *modelled])]
    figure = Figure(figsize=(5.4 * len(scenarios), 5.6), layout="constrained")
    panels = figure.subplots(1, len(scenarios), squeeze=False, sharey=True)[0]
    for panel, scenario in zip(panels, scenarios, strict=True):
        for (title, color, marker), (points, looks), way in (
            (drawn, kind, way) for way, drawn in WAYS.items() for kind in kinds.values()
        ):
            own = [p for p in points if p["scenario"] == scenario and p["way"] == way]
            own.sort(key=lambda p: p["hosts"])
            heights = [100 * p["efficiency"] for p in own]
            bars = None
            if own and "capsize" in looks:
                steps = [p["step_s"] for p in own]
                below = [h * (1 - s["median"] / s["upper"]) for h, s in zip(heights, steps, strict=True)]
                above = [h * (s["median"] / s["lower"] - 1) for h, s in zip(heights, steps, strict=True)]
                bars = [below, above]
            hosts = [p["hosts"] for p in own]
            panel.errorbar(hosts, heights, yerr=bars, color=color, marker=marker, **looks)
            panel.plot([], [], color=color, marker=marker, linestyle="", label=title)
        panel.axhline(95, color="0.6", linewidth=0.8, linestyle=":")
        panel.set_xscale("log", base=2)
        counts = sorted({p["hosts"] for p in [*weak, *modelled] if p["scenario"] == scenario})
        panel.set_xticks(counts, [f"{count:,}" for count in counts], rotation=45)
        panel.minorticks_off()
        panel.set_xlabel("hosts")
        panel.set_title(TITLES[scenario], fontsize="medium")
        panel.set_ylim(0, 104)
        panel.grid(alpha=0.25)
    panels[0].set_ylabel("scaling efficiency: compute of a step over its time, %")
    for name, (_, looks) in kinds.items():
        panels[0].errorbar([], [], color="0.3", marker="o", label=name, **looks)
    handles, labels = panels[0].get_legend_handles_labels()
    entries = dict(zip(labels, handles, strict=True))
    columns = 2 * len(scenarios)
    figure.legend(entries.values(), entries, loc="outside lower center", ncols=columns, fontsize="small")
    figure.savefig(path, dpi=110)


def trace_table(found: Mapping[str, Any]) -> str:
    """Returns the shares of compute along each trace, and their means, with the best fixed setting of each trace."""
    share = {(point["way"], point["trace"]): point for point in found["points"]}
    traces = sorted({point["trace"] for point in found["points"]})
    fixed = [way for way in dict.fromkeys(way for way, _ in share) if way[0].isdigit()]
    titles = {"tune": "`tune=True`"} | {way: " local steps, ".join(way.split(" ")) for way in fixed}
    titles |= {"ddp_gloo": "DDP on Gloo", "torchft": "torchft, Streaming DiLoCo"}

    def row(title: str, chosen: Sequence[Point]) -> list[str]:
        cells = [f"{percent(each['share'])}{MARK if each['cpu_bound'] else ''}" for each in chosen]
        return [title, *cells, percent(statistics.fmean(each["share"] for each in chosen))]

    best = [max((share[way, trace] for way in fixed), key=lambda each: each["share"]) for trace in traces]
    rows = [row(title, [share[way, trace] for trace in traces]) for way, title in titles.items()]
    rows.insert(1, row("the best fixed setting of each trace", best))
    return table(["way", *map(str, traces), "mean"], rows)


def draw_trace(path: Path, found: Mapping[str, Any]) -> None:
    """Draws the course of tune along the first trace: rate, setting, throughput, and distance of the ranks."""
    from matplotlib.figure import Figure

    course, seconds = found["course"], found["facts"]["seconds"]
    (point,) = (each for each in found["points"] if each["way"] == "tune" and each["trace"] == 1)
    changes = json.loads((RESULTS.parent / "traces" / "1.json").read_text())["changes"]
    settings = point["settings"]
    figure = Figure(figsize=(9, 8), layout="constrained")
    rate, setting, share, distance = figure.subplots(4, 1, sharex=True)
    rate.step([*(at for at, _ in changes), seconds], [*(r for _, r in changes), changes[-1][1]], where="post")
    rate.set(yscale="log", ylabel="rate of each link,\nMbit/s", ylim=(15, 1200))
    times = [*(each["time"] for each in settings), seconds]
    for codec, color in (("None", "tab:gray"), ("Int8(block=256)", "tab:green")):
        label = "no codec" if codec == "None" else "int8"
        setting.plot([], [], color=color, linewidth=4, label=label)
        for each, begin, end in zip(settings, times, times[1:], strict=False):
            if each["codec"] == codec:
                setting.hlines(each["local_steps"], begin, end, color=color, linewidth=4)
    setting.set(yscale="log", ylabel="local steps", ylim=(0.7, 24), yticks=[1, 2, 4, 8, 16])
    setting.set_yticklabels(["1", "2", "4", "8", "16"])
    setting.minorticks_off()
    setting.legend(loc="upper right", fontsize="small")
    width = seconds / len(course["shares"])
    edges = [width * place for place in range(len(course["shares"]) + 1)]
    share.stairs([100 * each for each in course["shares"]], edges, fill=True, alpha=0.6)
    share.axhline(95, color="0.4", linewidth=0.8, linestyle=":")
    share.set(ylabel="throughput, % of that\nwithout communication", ylim=(0, 110))
    distance.plot(course["ends"], [100 * each for each in course["distances"]], color="tab:purple")
    distance.set(ylabel="distance of the ranks\nfrom their mean, %", xlabel="seconds", xlim=(0, seconds))
    distance.set_ylim(bottom=0)
    for panel in (rate, setting, share, distance):
        panel.grid(alpha=0.25)
    figure.savefig(path, dpi=110)


def read(name: str) -> Any:
    """Returns what a file in benchmarks/results holds."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def points() -> list[dict[str, Any]]:
    """Returns the measured points of emulated clusters."""
    found: list[dict[str, Any]] = read("cluster")["points"]
    return found


def tables() -> dict[str, Callable[[], str]]:
    """Returns what makes each table, by name."""

    return {
        "a": lambda: efficiency_table("a", points()),
        "b": lambda: efficiency_table("b", points()),
        "a strong": lambda: efficiency_table("a strong", points()),
        "c": lambda: step_table("c", points()),
        "stragglers": lambda: straggler_table(points()),
        "errors": lambda: error_table(read("model")),
        "modelled a": lambda: extrapolated_table("a", read("model")),
        "modelled c": lambda: extrapolated_table("c", read("model")),
        "link traces": lambda: trace_table(read("traces")),
        "advice": lambda: advice_table(read("advise")),
        "loss": lambda: loss_table(read("loss")),
        "loss of long runs": lambda: loss_table(read("loss_long")),
        "loss of many ranks": lambda: many_ranks_table(read("loss")),
        "losses of settings": lambda: settings_table(read("loss_of_settings")["differences"]),
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
    """Writes the pages and the picture, or checks the pages."""
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
    if not arguments.check:
        pictures = ROOT / "docs" / "pictures"
        draw_efficiency(pictures / "scaling.png", points(), read("model")["points"])
        draw_trace(pictures / "link_trace.png", read("traces"))


if __name__ == "__main__":
    main()
