"""Draws scaling efficiency, measured and modelled.

    python benchmarks/cluster_plots.py     # docs/pictures/scaling.png, of benchmarks/results/cluster.json and model.json

Measured points are filled and have bars from quartile to quartile, and are small and pale if the processor
was short; modelled ones are hollow, on dashed lines.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import program

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
GOAL = 0.95


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
        panel.axhline(100 * GOAL, color="0.6", linewidth=0.8, linestyle=":")
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


def main() -> None:
    """Draws it from the files."""
    program.parser_of(__doc__).parse_args()
    measured, modelled = (
        json.loads((RESULTS / f"{name}.json").read_text())["points"] for name in ("cluster", "model")
    )
    draw_efficiency(RESULTS.parents[1] / "docs" / "pictures" / "scaling.png", measured, modelled)


if __name__ == "__main__":
    main()
