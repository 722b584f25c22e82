"""Draws scaling efficiency, measured and modelled, and what stragglers cost.

    python benchmarks/cluster_plots.py --directory docs/pictures     # of benchmarks/results/cluster.json and model.json

Measured points are filled and have bars from quartile to quartile, and are small and pale, or hatched, if the processor
was short; modelled ones are hollow, on dashed lines.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
TITLES = {
    "a": "(a) ResNet-50, 8 V100 a host, 25 Gbit/s",
    "b": "(b) GPT-2 124M, 8 H100 a host, 100 Gbit/s",
    "c": "(c) GPT-2 124M, two data centers, 1 Gbit/s between",
}
# By way: its name in the legend, color, marker.
WAYS = {
    "ddp_gloo": ("DDP on Gloo", "tab:red", "s"),
    "ddp_fog": ("DDP on fog", "tab:orange", "D"),
    "one_peer_exp": ("one-peer exponential", "tab:blue", "o"),
    "static_exp": ("static exponential", "tab:cyan", "^"),
    "base_k": ("Base-3", "tab:olive", "v"),
    "hierarchical": ("hierarchical", "tab:green", "P"),
    "async_win": ("asynchronous windows", "tab:purple", "X"),
    "win_put": ("win-put", "tab:pink", "<"),
    "async_gossip": ("AD-PSGD", "tab:gray", ">"),
    "local_sgd": ("local SGD", "tab:brown", "h"),
    "gossip_diloco": ("gossip DiLoCo", "black", "*"),
}
GOAL = 0.95


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    return plt


def draw_efficiency(
    path: Path, measured: Sequence[dict[str, Any]], modelled: Sequence[dict[str, Any]]
) -> None:
    """Draws efficiency over hosts under weak scaling, a panel for each scenario.

    Args:
        path: Of the picture.
        measured: Points of cluster.json; those whose processor was short are small and pale.
        modelled: Points of model.json.
    """
    plt = _pyplot()
    weak = [p for p in measured if p["scaling"] == "weak"]
    usable = [p for p in weak if not p.get("cpu_bound")]
    scenarios = [s for s in TITLES if any(p["scenario"] == s for p in [*weak, *modelled])]
    figure, panels = plt.subplots(
        1,
        len(scenarios),
        figsize=(5.4 * len(scenarios), 5.6),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    for panel, scenario in zip(panels[0], scenarios, strict=True):
        for way, (title, color, marker) in WAYS.items():
            known = sorted(
                (p for p in usable if p["scenario"] == scenario and p["way"] == way), key=lambda p: p["hosts"]
            )
            guessed = sorted(
                (p for p in modelled if p["scenario"] == scenario and p["way"] == way),
                key=lambda p: p["hosts"],
            )
            short = [p for p in weak if p.get("cpu_bound") and p["scenario"] == scenario and p["way"] == way]
            panel.plot(
                [p["hosts"] for p in short],
                [100 * p["efficiency"] for p in short],
                color=color,
                marker=marker,
                linestyle="",
                alpha=0.25,
                markersize=5,
            )
            if guessed:
                panel.plot(
                    [p["hosts"] for p in guessed],
                    [100 * p["efficiency"] for p in guessed],
                    color=color,
                    marker=marker,
                    markerfacecolor="white",
                    linestyle="--",
                    linewidth=1,
                    markersize=6,
                )
            if known:
                middle = [100 * p["efficiency"] for p in known]
                steps = [p["step_s"] for p in known]
                lower = [m * s["median"] / s["upper"] for m, s in zip(middle, steps, strict=True)]
                upper = [m * s["median"] / s["lower"] for m, s in zip(middle, steps, strict=True)]
                bars = [
                    [max(0.0, m - low) for m, low in zip(middle, lower, strict=True)],
                    [max(0.0, up - m) for m, up in zip(middle, upper, strict=True)],
                ]
                panel.errorbar(
                    [p["hosts"] for p in known],
                    middle,
                    yerr=bars,
                    color=color,
                    marker=marker,
                    linestyle="",
                    capsize=2,
                    markersize=8,
                )
            if known or guessed:
                panel.plot([], [], color=color, marker=marker, linestyle="", label=title)
        panel.axhline(100 * GOAL, color="0.6", linewidth=0.8, linestyle=":")
        panel.set_xscale("log", base=2)
        hosts = sorted({p["hosts"] for p in [*weak, *modelled] if p["scenario"] == scenario})
        panel.set_xticks(hosts, [f"{count:,}" for count in hosts], rotation=45)
        panel.minorticks_off()
        panel.set_xlabel("hosts")
        panel.set_title(TITLES[scenario], fontsize="medium")
        panel.set_ylim(0, 104)
        panel.grid(alpha=0.25)
    panels[0][0].set_ylabel("scaling efficiency: compute of a step over its time, %")
    handles, labels = [], []
    for panel in panels[0]:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            if label not in labels:
                handles.append(handle)
                labels.append(label)
    filled = plt.Line2D([], [], color="0.3", marker="o", linestyle="", markersize=8)
    hollow = plt.Line2D([], [], color="0.3", marker="o", markerfacecolor="white", linestyle="--", linewidth=1)
    pale = plt.Line2D([], [], color="0.3", marker="o", linestyle="", markersize=5, alpha=0.25)
    figure.legend(
        [filled, pale, hollow, *handles],
        ["measured, with quartiles", "the processor was short", "modelled", *labels],
        loc="outside lower center",
        ncols=2 * len(scenarios),
        fontsize="small",
        frameon=False,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_stragglers(path: Path, measured: Sequence[dict[str, Any]]) -> bool:
    """Draws throughput with stragglers and slow links as bars; returns False where no such point was measured.

    Args:
        path: Of the picture.
        measured: Points of cluster.json.
    """
    points = [p for p in measured if p["scaling"] == "weak" and p["scenario"] not in TITLES]
    if not points:
        return False
    plt = _pyplot()
    by_scenario: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for point in points:
        by_scenario[point["scenario"]].append(point)
    figure, panels = plt.subplots(
        1,
        len(by_scenario),
        figsize=(1.5 + 4.0 * len(by_scenario), 4.2),
        squeeze=False,
        sharex=True,
        layout="constrained",
    )
    for panel, (scenario, known) in zip(panels[0], by_scenario.items(), strict=True):
        own = sorted((p for p in known if p["way"] in WAYS), key=lambda p: p["efficiency"])
        bars = panel.barh(
            [WAYS[p["way"]][0] for p in own],
            [100 * p["efficiency"] for p in own],
            color=[WAYS[p["way"]][1] for p in own],
        )
        panel.bar_label(bars, fmt="%.0f", padding=2, fontsize="small")
        for bar, point in zip(bars, own, strict=True):
            if point.get("cpu_bound"):
                bar.set(alpha=0.35, hatch="//")
        panel.axvline(95, color="0.4", linestyle=":", linewidth=0.9)
        panel.axvline(90, color="0.7", linestyle=":", linewidth=0.9)
        panel.set_title(scenario.replace("_", " "), fontsize="medium")
        panel.grid(axis="x", alpha=0.25)
    panels[0][0].set_xlim(0, 112)
    figure.supxlabel(
        "throughput of all ranks, % of the sum of their solo speeds (dotted: 90 and 95; hatched: the processor was short)",
        fontsize="medium",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True


def main() -> None:
    """Draws both from the files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cluster", type=Path, default=RESULTS / "cluster.json")
    parser.add_argument("--model", type=Path, default=RESULTS / "model.json")
    parser.add_argument("--directory", type=Path, default=Path("docs/pictures"))
    arguments = parser.parse_args()
    measured = json.loads(arguments.cluster.read_text())["points"]
    modelled = json.loads(arguments.model.read_text())["points"] if arguments.model.exists() else []
    efficiency, stragglers = arguments.directory / "scaling.png", arguments.directory / "stragglers.png"
    draw_efficiency(efficiency, measured, modelled)
    print(f"written: {efficiency}")
    if draw_stragglers(stragglers, measured):
        print(f"written: {stragglers}")


if __name__ == "__main__":
    main()
