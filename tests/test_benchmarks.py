"""Runs the benchmarks with tiny sizes, and checks the results that they write. The numbers themselves are not judged.

Ranks are new interpreters, started by mpiexec, so all but one of these runs are in test-all only.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import run_script

ROOT = Path(__file__).resolve().parent.parent


def run_benchmark(script: str, directory: Path, *options: str) -> list[dict[str, Any]]:
    """Runs a benchmark; returns its rows."""
    numbers = directory / "numbers.json"
    command = [ROOT / "benchmarks" / script, *options, "--json", numbers]
    printed = run_script(command, 1, directory / "log", [sys.executable])
    rows: list[dict[str, Any]] = json.loads(numbers.read_text())["rows"]
    assert len(printed.splitlines()) >= len(rows) + 2
    for row in rows:
        for times in row["times"].values():
            assert 0 < times["lower"] <= times["median"] <= times["upper"], row
    return rows


NEIGHBOR = "fog, fog_new, mpi, gloo, fog_allreduce, gloo_allreduce, fog_memory, memory"
WINDOW = "fog, fog_pg, mpi, memory"
ONE_PLACE = f"{WINDOW}, one_place"
MODES = "none, ddp gloo, ddp, awc, awc one-peer, awc timeline, ddp_async, win_put one-peer, diloco"
# Of each run: the script with its options, the number of its rows, and the systems of each operation.
RUNS: list[tuple[str, int, dict[str, str]]] = [
    (
        "collectives.py --ranks 2 --sizes 4 64K --iterations 3",
        6 * 2 + 1,
        {
            **dict.fromkeys(
                ["allreduce", "broadcast", "allgather", "reduce_scatter", "all_to_all", "send/recv"],
                "fog, gloo, nothing, mpi, memory",
            ),
            "barrier": "fog, gloo, nothing, mpi",
        },
    ),
    (
        "neighbor.py --ranks 4 --sizes 4K 64K --iterations 3",
        5 * 2,
        dict.fromkeys(["exp2", "one-peer", "ring", "complete", "hierarchical"], NEIGHBOR),
    ),
    (
        "windows.py --ranks 3 --sizes 4K 2M --iterations 3",
        10 * 2,
        {
            **{name + alone: ONE_PLACE for name in ("put", "get") for alone in ("", " alone")},
            **{n + alone: WINDOW for n in ("accumulate", "update", "put+update") for alone in ("", " alone")},
        },
    ),
    (
        "rma.py --sizes 64K 1M --iterations 3",
        5 * 2,
        {
            **dict.fromkeys(["put, stopped", "put, computing"], "rma, raw"),
            "exchange": "rma, tcp, raw",
            **dict.fromkeys(["exchange, computing", "one-way, computing"], "rma, tcp, raw, compute"),
        },
    ),
    (
        "scale.py --ranks 3 --rounds 1 --sizes 8 4K",
        3 + 2 * 2 + 4,
        {
            **dict.fromkeys(["start", "group", "barrier", "allreduce", "neighbors"], "fog, gloo"),
            **dict.fromkeys(["private MiB", "descriptors", "end"], "fog, gloo"),
            "mapped MiB": "fog",
        },
    ),
    (
        # Alone, modes that need a second rank are left out.
        "training.py --ranks 1 2 --models mlp --iterations 1 --back-to-back 2 --traces traces --modes",
        2,
        {"MLP of 2.9 M parameters, batch 32": MODES},
    ),
]


@pytest.mark.long
@pytest.mark.parametrize(("command", "count", "expected"), RUNS, ids=lambda v: str(v).split(" ")[0])
def test_rows(tmp_path: Path, command: str, count: int, expected: dict[str, str]) -> None:
    script, *options = command.replace("traces traces", f"traces {tmp_path / 'traces'}").split()
    if options[-1] == "--modes":
        options += MODES.split(", ")
    rows = run_benchmark(script, tmp_path, *options)
    assert len(rows) == count
    systems: dict[str, set[str]] = {}
    for row in rows:
        systems.setdefault(row["operation"], set()).update(row["times"])
    assert systems == {name: set(each.split(", ")) for name, each in expected.items()}
    for trace in tmp_path.glob("traces/mlp-awc-2ranks-*.gz"):
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        assert any(event.get("name") == "fog:neighbor_allreduce" for event in events), trace
    assert script != "training.py" or len(list(tmp_path.glob("traces/mlp-awc-*.gz"))) == 3


def test_training_without_a_gpu(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = [ROOT / "benchmarks" / "training.py", "--device", "cuda", "--json", tmp_path / "numbers.json"]
    ended = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == 2
    assert "--device cuda needs a" in ended.stderr.splitlines()[-1] and not ended.stdout
    assert not (tmp_path / "numbers.json").exists()


def run_compression(directory: Path, *options: str) -> tuple[dict[str, Any], str]:
    """Runs benchmarks/compression.py with options; returns what it wrote, and its output."""
    numbers = directory / "numbers.json"
    command = [ROOT / "benchmarks" / "compression.py", "--json", numbers, *options]
    printed = run_script(command, 1, directory / "log", [sys.executable], timeout=200)
    return json.loads(numbers.read_text()), printed


@pytest.mark.long
def test_compression(tmp_path: Path) -> None:
    options = ["--parts", "codecs", "exchanges", "--size", "1M", "--repetitions", "2"]
    found, _ = run_compression(tmp_path, *options)
    assert set(found["facts"]) == {"codecs", "exchanges"}
    names = [row["codec"] for row in found["codecs"]]
    assert names[0] == "memcpy" and "int8 encode" in names and "top-k 1 % decode" in names
    codecs = ["none", "float16", "int8", "top-k 1 %"]
    assert [row["codec"] for row in found["exchanges"]] == codecs
    for row in found["exchanges"]:
        assert row["promised bytes"] < row["sent bytes"] < 1.1 * row["promised bytes"] + (16 << 10)


@pytest.mark.long
def test_compressed_training(tmp_path: Path) -> None:
    options = ["--tasks", "MNIST by labels", "--ways", "int8", "--steps", "3", "--seeds", "1", "2"]
    options += ["--links", "1gbit", "--link-steps", "2", "--turns", "1"]
    found, printed = run_compression(tmp_path, "--parts", "training", "links", *options)
    assert set(found["facts"]) == {"training", "links"}
    runs = [(point["way"], point["seed"]) for point in found["points"]]
    assert runs == [(way, seed) for way in ("no codec", "int8") for seed in (1, 2)]
    for point in found["points"]:
        # Two neighbors, 101,770 parameters: links carry the promised bytes and headers.
        plain = 2 * 4 * 101_770
        promised = plain if point["way"] == "no codec" else plain / 4 + 2 * 4 * 398
        assert (point["plain bytes a step"], point["promised bytes a step"]) == (plain, promised)
        assert 1 < point["bytes"][-1] / (3 * promised) < 1.1
    assert 3.5 < found["compared"][1]["fewer bytes"] < 4
    places = [(row["way"], row["bits_per_s"]) for row in found["links"]]
    assert places == [(way, speed) for speed in (1e9, 1e10, 1e11) for way in ("no codec", "int8")]
    # Three steps do not reach the loss.
    assert all(row["steps"] is row["seconds"] is None for row in found["links"])
    assert found["crossings"][0]["where"] == "below" and "\ntime to a loss" in printed
