"""The examples as a user starts them, and the comparison of the demo with DistributedDataParallel on Gloo."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from scripts import ROOT, Job, launcher_command, run_script

TRAIN_DIGITS = ROOT / "examples" / "train_digits.py"
AVERAGE_CONSENSUS = ROOT / "examples" / "average_consensus.py"
PUSH_SUM = ROOT / "examples" / "push_sum.py"
OPTIMIZATION = ROOT / "examples" / "optimization.py"
TRAIN_GPT = ROOT / "examples" / "train_gpt.py"
TRAIN_MNIST = ROOT / "examples" / "train_mnist.py"
# Seconds after a rank is lost. Its peers notice at once; the rest is torchrun's shutdown on a busy machine.
LOST_RANK_TIMEOUT = 30.0


@dataclass(frozen=True)
class Table:
    """The closing table of train_digits.py, a value for each rank."""

    accuracies: list[float]
    distances: list[float]
    rates: list[float]
    consensus_distance: float


def read_table(output: str, ranks: int) -> Table:
    rows = re.findall(r"^ +(\d+) +(\d\.\d{4}) +(\d\.\d\de[+-]\d\d) +([\d,]+)$", output, re.MULTILINE)
    assert [int(row[0]) for row in rows] == list(range(ranks)), output
    consensus = re.search(r"^consensus distance: (\S+)$", output, re.MULTILINE)
    assert consensus, output
    return Table(
        accuracies=[float(row[1]) for row in rows],
        distances=[float(row[2]) for row in rows],
        rates=[float(row[3].replace(",", "")) for row in rows],
        consensus_distance=float(consensus[1]),
    )


def train(folder: Path, ranks: int, *arguments: str, launcher: str = "torchrun") -> Table:
    picture = folder / "picture.png"
    script = [TRAIN_DIGITS, *arguments, "--output", picture]
    output = run_script(script, ranks, folder / "log.txt", launcher, timeout=120)
    check_picture(picture)
    return read_table(output, ranks)


def check_picture(path: Path) -> None:
    from matplotlib import image

    pixels = image.imread(path)
    height, width = pixels.shape[:2]
    assert height >= 300 and width >= 600
    # Curves, axes and text on white: neither blank nor noise.
    drawn = (pixels[..., :3] < 0.9).any(axis=-1).mean()
    assert 0.01 < drawn < 0.5, f"{drawn:.3f} of the picture is not white"


def test_demo_is_as_accurate_as_ddp_on_gloo(tmp_path: Path) -> None:
    """The demo at its defaults; the two runs have the same data, initial parameters and order of samples."""
    for name in ("fog", "gloo"):
        (tmp_path / name).mkdir()
    ours = train(tmp_path / "fog", 4)
    reference = train(tmp_path / "gloo", 4, "--optimizer", "ddp", "--backend", "gloo")
    assert min(ours.accuracies) > 0.95
    assert len(set(reference.accuracies)) == 1
    assert max(abs(accuracy - reference.accuracies[0]) for accuracy in ours.accuracies) <= 0.01
    # The ranks mix, so they are close, and they have data of their own, so they are not equal.
    assert 0 < ours.consensus_distance < 0.01
    assert reference.consensus_distance < 1e-6
    assert min(ours.rates) > 0


@pytest.mark.parametrize(
    "arguments, launcher",
    [
        (("--optimizer", "atc", "--topology", "ring", "--dynamic"), "torchrun"),
        (("--optimizer", "gradient"), "mpiexec"),
    ],
    ids=["atc-torchrun", "gradient-mpiexec"],
)
def test_demo_in_short(tmp_path: Path, arguments: tuple[str, ...], launcher: str) -> None:
    table = train(tmp_path, 2, *arguments, "--epochs", "8", launcher=launcher)
    assert min(table.accuracies) > 0.93
    if "gradient" in arguments:
        assert table.consensus_distance < 1e-6


def test_lost_rank_ends_the_demo_with_its_name(tmp_path: Path) -> None:
    # The agent ends all ranks once it has noticed: not before these have had time to say what they noticed.
    launcher = [*launcher_command("torchrun", 3), "--monitor-interval", "5"]
    job = Job([TRAIN_DIGITS, "--epochs", "100000"], 3, tmp_path / "log.txt", launcher)
    try:
        job.wait_for(lambda output: len(re.findall(r"^training: .* \d+/\d+ ", output, re.MULTILINE)) > 3, 60)
        os.kill(job.worker(1), signal.SIGKILL)
        killed = time.monotonic()
        status = job.wait(LOST_RANK_TIMEOUT)
        seconds = time.monotonic() - killed
    finally:
        job.stop()
    assert status != 0
    errors = [line for line in job.output.splitlines() if "DistBackendError" in line]
    assert any(re.search(r"rank 1\b", line) for line in errors), f"after {seconds:.1f} s:\n{job.output}"


@pytest.mark.parametrize("arguments", [(), ("--dynamic",)], ids=["static", "dynamic"])
def test_average_consensus(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    output = run_script([AVERAGE_CONSENSUS, *arguments], 4, tmp_path / "log.txt")
    errors = [float(error) for error in re.findall(r"^ +\d+ +(\S+)$", output, re.MULTILINE)]
    assert errors[0] == 1.5 and errors[-1] == 0.0
    assert re.findall(r"^rank (\d): (\S+) ", output, re.MULTILINE) == [(str(r), "1.5") for r in range(4)]


@pytest.mark.parametrize(
    "arguments", [(), ("--topology", "ring-right", "--slow-rank", "2")], ids=["exp2", "ring"]
)
def test_push_sum(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    output = run_script([PUSH_SUM, *arguments], 4, tmp_path / "log.txt")
    errors = [float(error) for error in re.findall(r"^ +\d+ +(\S+)$", output, re.MULTILINE)]
    assert errors[0] == 1.5 and errors[-1] < 1e-6
    ranks = re.findall(r"^rank (\d): (\S+) after (\d+) rounds", output, re.MULTILINE)
    assert [(rank, estimate) for rank, estimate, _ in ranks] == [(str(r), "1.5") for r in range(4)]
    assert all(int(rounds) >= 100 for _, _, rounds in ranks)
    assert "sum of p: 4\n" in output


@pytest.mark.parametrize(
    "arguments",
    [("--lr", "0.4"), ("--task", "linear_regression", "--lr", "0.2")],
    ids=["logistic", "linear"],
)
def test_optimization_finds_the_optimum(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    picture = tmp_path / "errors.png"
    script = [OPTIMIZATION, *arguments, "--max-iter", "300", "--save-plot-file", picture]
    output = run_script(script, 4, tmp_path / "log.txt")
    rows = re.findall(r"^ +\d+ +(\S+) +(\S+) +(\S+) +(\S+)$", output, re.MULTILINE)
    first, last = ([float(error) for error in row] for row in (rows[0], rows[-1]))
    assert len(set(first)) == 1 and first[0] > 0.3, output
    diffusion, *exact = last
    # Diffusion has a bias, as data differ; the others have none.
    assert 1e-3 < diffusion < 0.8 * first[0], output
    assert max(exact) < 1e-8, output
    check_picture(picture)


def test_push_diging_alone(tmp_path: Path) -> None:
    output = run_script(
        [
            OPTIMIZATION,
            "--method",
            "push_diging",
            "--topology",
            "unbalanced",
            "--max-iter",
            "200",
            "--lr",
            "0.4",
        ],
        3,
        tmp_path / "log.txt",
    )
    errors = [float(error) for error in re.findall(r"^ +\d+ +(\S+)$", output, re.MULTILINE)]
    assert errors[0] > 0.3 and errors[-1] < 1e-5, output


@pytest.mark.parametrize(
    "arguments",
    [
        ("--mode", "ddp", "--backend", "gloo"),
        ("--mode", "awc", "--dynamic"),
        ("--mode", "ddp_async", "--slow-rank", "1", "--slowdown", "3"),
    ],
    ids=["ddp-gloo", "awc-dynamic", "ddp-async-slow"],
)
def test_digits_split_by_labels(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """Each rank sees half of the labels, so alone it is right in half of the cases at most."""
    picture, results = tmp_path / "loss.png", tmp_path / "results.json"
    script = [TRAIN_MNIST, *arguments, "--steps", "400", "--lr", "0.1", "--momentum", "0.5"]
    output = run_script([*script, "--save-plot-file", picture, "--json", results], 2, tmp_path / "log.txt")
    found = json.loads(results.read_text())
    assert found["final"] > 0.65, output
    assert f"{found['final']:.4f}" in output and len(found["ranks"]) == 2
    if "--slow-rank" in arguments:
        # The steps are shared, and the rank that is not slow makes more of them.
        fast, slow = found["steps"]
        assert fast > slow and fast + slow in (800, 801), output
    else:
        assert found["steps"] == [400, 400]
    check_picture(picture)


def test_gpt_learns(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    flags = ["--mode", "awc", "--steps", "40", "--width", "32", "--context", "32", "--text-bytes", "200000"]
    run_script([TRAIN_GPT, *flags, "--lr", "0.01", "--json", results], 2, tmp_path / "log.txt")
    # Nothing learned: ln 256 = 5.5; how often each byte occurs: about 3.2.
    assert json.loads(results.read_text())["final"] < 4.0
