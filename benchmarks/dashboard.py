"""Runs a job with losses, joins and a slow rank, scraped by a real Prometheus, and draws docs/dashboard.json with its data.

    python benchmarks/dashboard.py         # 8 minutes; writes docs/pictures/dashboard.png. Needs prometheus on PATH

Each query of the dashboard goes to Prometheus as Grafana sends it, and must return data; matplotlib draws the answers in the
layout of the dashboard. The job trains in step first, then again at its ranks' own pace. Each time rank 2 is slow for a while,
and ranks 1 and 3 are killed; `fog run` starts them again, and they join the others.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import fogdist
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parent.parent / "docs"
PORT = 9400  # of rank 0; Prometheus takes the one before
SCRAPE_SECONDS = 2
STEPS = 2000
SLOW = range(300, 450)  # steps in which rank 2 computes for longer
DEATHS = {1: 725, 3: 1075}  # at which step a rank ends by SIGKILL
UNITS = {"ops": "per second", "Bps": "bytes per second", "percentunit": "share of the time", "short": ""}


def train(mode: str) -> None:
    """Is a rank of the job."""
    is_new = os.environ.get("FOG_JOIN") == "1"
    time.sleep(15 if is_new else 0)  # so that the loss stands in several scrapes
    fogdist.init(lambda size: fogdist.topology.ring(size))
    fogdist.metrics.Exporter(port=PORT, address="127.0.0.1")
    rank = fogdist.rank()
    network = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02)
    model = fogdist.DecentralizedDataParallel(network, optimizer, mode=mode, on_loss="continue")
    generator = torch.Generator().manual_seed(rank)
    while model.round < STEPS:
        if not is_new and model.round == DEATHS.get(rank):
            os.kill(os.getpid(), signal.SIGKILL)
        inputs = torch.randn(32, 64, generator=generator)
        optimizer.zero_grad()
        (model(inputs).squeeze() - inputs.sin().sum(1)).square().mean().backward()
        optimizer.step()
        time.sleep(0.25 if rank == 2 and model.round in SLOW else 0.08)
        # Until the first loss, which ends the group of all ranks.
        if mode == "sync" and model.round < min(DEATHS.values()) and model.round % 50 == 0:
            fogdist.consensus_distance(network)


def ask(query: str, begin: int, end: int) -> list[dict[str, Any]]:
    """Returns the series that Prometheus has for a query of the dashboard."""
    for name, value in {"$job": "fog", "$rank": ".*", "$__rate_interval": f"{4 * SCRAPE_SECONDS}s"}.items():
        query = query.replace(name, value)
    fields = urllib.parse.urlencode({"query": query, "start": begin, "end": end, "step": SCRAPE_SECONDS})
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT - 1}/api/v1/query_range?{fields}") as answer:
        if series := json.load(answer)["data"]["result"]:
            return series  # type: ignore[no-any-return]
    raise SystemExit(f"Prometheus has no data for {query}")


def draw(panels: list[dict[str, Any]], begin: int, end: int) -> None:
    """Draws each panel at its place, with the lines that its queries return."""
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = Figure(figsize=(14, rows / 2.7), layout="constrained")
    grid, colors = figure.add_gridspec(rows, 24), colormaps["tab20"].colors
    times = range(0, end - begin + 1, SCRAPE_SECONDS)
    for panel in panels:
        at = panel["gridPos"]
        axes = figure.add_subplot(grid[at["y"] : at["y"] + at["h"], at["x"] : at["x"] + at["w"]])
        axes.set_prop_cycle(color=[*colors[::2], *colors[1::2]])  # strong ones first
        for target in panel["targets"]:
            for series in ask(target["expr"], begin, end):
                labels = series["metric"]
                name = re.sub(r"\{\{(\w+)\}\}", lambda found: labels[found[1]], target["legendFormat"])
                known = dict(series["values"])
                values = [float(known.get(begin + at, "nan")) for at in times]
                axes.plot(times, values, linewidth=1, label=name)
        unit = UNITS[panel["fieldConfig"]["defaults"]["unit"]]
        axes.set(title=panel["title"], xlim=(0, end - begin), ylim=(0, None), ylabel=unit)
        axes.grid(alpha=0.25)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="x-small")
    figure.supxlabel("seconds", fontsize="medium")
    figure.savefig(DOCS / "pictures" / "dashboard.png", dpi=80)


def main() -> None:
    """Runs Prometheus and the jobs, and draws."""
    targets = [f"127.0.0.1:{PORT + rank}" for rank in range(4)]
    scrape = {"job_name": "fog", "static_configs": [{"targets": targets}]}
    configuration = {"global": {"scrape_interval": f"{SCRAPE_SECONDS}s"}, "scrape_configs": [scrape]}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "prometheus.yml").write_text(json.dumps(configuration))  # YAML contains JSON
        flags = [f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{PORT - 1}"]
        prometheus = subprocess.Popen(["prometheus", f"--config.file={folder}/prometheus.yml", *flags])
        try:
            begin = int(time.time())
            for mode in ("sync", "async"):
                run = ["-m", "fogdist", "run", "--keep-going", "--max-restarts", "1", "-np", "4"]
                subprocess.run([sys.executable, *run, __file__, mode], check=False)
            draw(json.loads((DOCS / "dashboard.json").read_text())["panels"], begin, int(time.time()))
        finally:
            prometheus.terminate()
            prometheus.wait()


if __name__ == "__main__":
    train(sys.argv[1]) if sys.argv[1:] else main()
