"""Runs the examples as a user starts them, and compares the demo with DistributedDataParallel on Gloo."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import pickle
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import fogdist
import numpy as np
import pytest
import torch
import torch.distributed as dist
from fogdist.topology import by_name
from harness import WorldPool
from scripts import ROOT, Job, run_script, started

TRAIN_DIGITS = ROOT / "examples" / "train_digits.py"
AVERAGE_CONSENSUS = ROOT / "examples" / "average_consensus.py"
PUSH_SUM = ROOT / "examples" / "push_sum.py"
OPTIMIZATION = ROOT / "examples" / "optimization.py"
TRAIN_GPT = ROOT / "examples" / "train_gpt.py"
TRAIN_MNIST = ROOT / "examples" / "train_mnist.py"
TRAIN_RESNET = ROOT / "examples" / "train_resnet.py"
RESOURCE_ALLOCATION = ROOT / "examples" / "resource_allocation.py"
SVRG = ROOT / "examples" / "svrg.py"
LINEAR_SPEEDUP = ROOT / "examples" / "linear_speedup.py"
SINGLE_OPERATION = ROOT / "examples" / "single_operation.py"
INNER_OUTER = ROOT / "examples" / "inner_outer.py"
TRAIN_IMAGENET = ROOT / "examples" / "train_imagenet.py"
SYNTHETIC_RESNET50 = ROOT / "examples" / "synthetic_resnet50.py"
TRAINING = [TRAIN_DIGITS, TRAIN_MNIST, TRAIN_GPT, TRAIN_RESNET, SYNTHETIC_RESNET50]
OTHERS = [
    AVERAGE_CONSENSUS,
    PUSH_SUM,
    OPTIMIZATION,
    RESOURCE_ALLOCATION,
    SVRG,
    LINEAR_SPEEDUP,
    SINGLE_OPERATION,
]
OTHERS += [INNER_OUTER, TRAIN_IMAGENET]

Results = dict[str, Any]


def train(folder: Path, ranks: int, *script: str | Path, launcher: str | WorldPool) -> tuple[Results, str]:
    """Runs a training example; returns the results of --json and the output."""
    results, picture = folder / "results.json", folder / "picture.png"
    arguments = [*script, "--json", results, "--save-plot-file", picture]
    output = run_script(arguments, ranks, folder / "log.txt", launcher, timeout=120)
    check_picture(picture)
    return json.loads(results.read_text()), output


def check_picture(path: Path) -> None:
    from matplotlib import image

    pixels = image.imread(path)
    height, width = pixels.shape[:2]
    assert height >= 300 and width >= 600
    # The picture has curves, axes and text on white, so it is neither blank nor noise.
    drawn = (pixels[..., :3] < 0.9).any(axis=-1).mean()
    assert 0.01 < drawn < 0.5, f"{drawn:.3f} of the picture is not white"


@pytest.mark.long
def test_demo_is_as_accurate_as_ddp_on_gloo(tmp_path: Path, script_worlds: WorldPool) -> None:
    """Runs the demo with its defaults; both runs have the same data, initial parameters and order of samples."""
    for name in ("fog", "gloo"):
        (tmp_path / name).mkdir()
    ours, output = train(tmp_path / "fog", 4, TRAIN_DIGITS, launcher=script_worlds)
    flags = ["--mode", "ddp", "--backend", "gloo"]
    reference, _ = train(tmp_path / "gloo", 4, TRAIN_DIGITS, *flags, launcher=script_worlds)
    assert min(ours["ranks"]) > 0.95
    assert len(set(reference["ranks"])) == 1
    assert max(abs(accuracy - reference["ranks"][0]) for accuracy in ours["ranks"]) <= 0.01
    # The ranks mix, so they are close; their data differs, so they are not equal.
    assert 0 < ours["consensus distance"] < 0.01
    assert reference["consensus distance"] < 1e-6
    assert min(ours["samples per second"]) > 0
    # An epoch has 21 steps; the last measurement is of the trained models.
    for rank, measured in enumerate(ours["measurements"]):
        assert [found["step"] for found in measured] == list(range(21, 631, 21))
        assert measured[-1]["value"] == ours["ranks"][rank]
        assert measured[-1]["consensus_distance"] == pytest.approx(ours["consensus distance"])
    assert all(f"{accuracy:.4f}" in output for accuracy in ours["ranks"])


@pytest.mark.parametrize(
    "arguments, launcher",
    [
        (("--mode", "atc", "--topology", "ring", "--dynamic"), "world"),
        (("--mode", "gradient_allreduce"), "world"),
        pytest.param(("--mode", "atc", "--topology", "ring"), "torchrun", marks=pytest.mark.long),
        pytest.param(("--mode", "gradient_allreduce"), "mpiexec", marks=pytest.mark.long),
    ],
    ids=["atc", "gradient", "atc-torchrun", "gradient-mpiexec"],
)
def test_demo_in_short(
    tmp_path: Path, script_worlds: WorldPool, arguments: tuple[str, ...], launcher: str
) -> None:
    how = script_worlds if launcher == "world" else launcher
    found, _ = train(tmp_path, 2, TRAIN_DIGITS, *arguments, "--steps", "330", launcher=how)
    assert min(found["ranks"]) > 0.93
    if "gradient_allreduce" in arguments:
        assert found["consensus distance"] < 1e-6


@pytest.mark.long
def test_lost_rank_ends_the_demo_with_its_name(tmp_path: Path) -> None:
    with started([Job([TRAIN_DIGITS, "--steps", "1000000"], 2, tmp_path / "log.txt")]) as (job,):
        job.wait_for(lambda output: "epoch 3, " in output, 120)
        victim = job.worker(1)
        os.kill(job.pid, signal.SIGSTOP)  # torchrun, which would end rank 0 once it has noticed the loss
        os.kill(victim, signal.SIGKILL)
        job.wait_for(lambda output: re.search(r"DistBackendError.*rank 1\b", output) is not None, 120)
        os.kill(job.pid, signal.SIGCONT)
        assert job.wait(120) != 0


@pytest.mark.parametrize("arguments", [(), ("--dynamic",)], ids=["static", "dynamic"])
def test_average_consensus(tmp_path: Path, script_worlds: WorldPool, arguments: tuple[str, ...]) -> None:
    output = run_script([AVERAGE_CONSENSUS, *arguments], 4, tmp_path / "log.txt", script_worlds)
    errors = [float(error) for error in re.findall(r"^ +\d+ +(\S+)$", output, re.MULTILINE)]
    assert errors[0] == 1.5 and errors[-1] == 0.0
    assert re.findall(r"^rank (\d): (\S+) ", output, re.MULTILINE) == [(str(r), "1.5") for r in range(4)]


@pytest.mark.parametrize(
    "arguments", [(), ("--topology", "ring-right", "--slow-rank", "2")], ids=["exp2", "ring"]
)
def test_push_sum(tmp_path: Path, script_worlds: WorldPool, arguments: tuple[str, ...]) -> None:
    output = run_script([PUSH_SUM, *arguments], 4, tmp_path / "log.txt", script_worlds)
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
def test_optimization_finds_the_optimum(
    tmp_path: Path, script_worlds: WorldPool, arguments: tuple[str, ...]
) -> None:
    picture = tmp_path / "errors.png"
    script = [OPTIMIZATION, *arguments, "--max-iter", "300", "--save-plot-file", picture]
    output = run_script(script, 4, tmp_path / "log.txt", script_worlds)
    rows = re.findall(r"^ +\d+ +(\S+) +(\S+) +(\S+) +(\S+)$", output, re.MULTILINE)
    first, last = ([float(error) for error in row] for row in (rows[0], rows[-1]))
    assert len(set(first)) == 1 and first[0] > 0.3, output
    diffusion, *exact = last
    # Diffusion has a bias because the ranks' data differ; the other methods have none.
    assert 1e-3 < diffusion < 0.8 * first[0], output
    assert max(exact) < 1e-8, output
    check_picture(picture)


def test_push_diging_alone(tmp_path: Path, script_worlds: WorldPool) -> None:
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
        script_worlds,
    )
    errors = [float(error) for error in re.findall(r"^ +\d+ +(\S+)$", output, re.MULTILINE)]
    assert errors[0] > 0.3 and errors[-1] < 1e-5, output


def last_row(output: str) -> list[float]:
    """Returns the numbers of the last row of a table."""
    *_, row = re.findall(r"^ +\d+((?: +\S+e[+-]\d+)+)$", output, re.MULTILINE)
    return [float(value) for value in row.split()]


def test_resources_are_allocated_at_the_least_cost(tmp_path: Path, script_worlds: WorldPool) -> None:
    script = [RESOURCE_ALLOCATION, "--topology", "mesh", "--max-iter", "200"]
    output = run_script(script, 4, tmp_path / "log.txt", script_worlds)
    assert len(last_row(output)) == 4 and max(last_row(output)) < 1e-10, output
    (missing,) = re.findall(r"^ *missing(.*)$", output, re.MULTILINE)
    assert max(map(float, missing.split())) < 1e-9, output


def test_only_variance_reduction_finds_the_optimum(tmp_path: Path, script_worlds: WorldPool) -> None:
    script = [SVRG, "--task", "linear_regression", "--epochs", "12"]
    output = run_script(script, 4, tmp_path / "log.txt", script_worlds)
    *others, exact = last_row(output)
    assert exact < 1e-5 and min(others) > 1e-2, output


def test_linear_speedup(tmp_path: Path, script_worlds: WorldPool) -> None:
    script = [LINEAR_SPEEDUP, "--rows", "500", "--features", "20"]
    output = run_script(script, 2, tmp_path / "log.txt", script_worlds)
    (start, end), *_ = re.findall(r"samples: (\S+) at first, (\S+) at the end", output)
    assert float(end) < 1e-4 * float(start), output
    for name in ("as it is", "computation alone", "communication alone"):
        ((total, each),) = re.findall(rf"^ *{name}: +(\S+) = (.*)$", output, re.MULTILINE)
        parts = [int(value.replace(",", "")) for value in each.split(", ")]
        assert len(parts) == 2 and min(parts) > 0
        assert int(total.replace(",", "")) == pytest.approx(sum(parts), abs=2)


@pytest.mark.parametrize(
    "operation", ["neighbor_allreduce", "neighbor_allgather", "allreduce", "allgather", "win_put"]
)
def test_single_operation(tmp_path: Path, script_worlds: WorldPool, operation: str) -> None:
    flags = ["--operation", operation, "--topology", "ring", "--data-size", "1000", "--num-iters", "2"]
    output = run_script([SINGLE_OPERATION, *flags], 3, tmp_path / "log.txt", script_worlds)
    lines = re.findall(
        r"^rank (\d): (\S+) \+- \S+ ms a call, (\d+) MB/s, largest error (\S+)$", output, re.MULTILINE
    )
    assert [rank for rank, *_ in lines] == ["0", "1", "2"], output
    assert all(float(time) > 0 and float(error) < 1e-6 for _, time, _, error in lines), output


def test_operation_that_is_not_there(tmp_path: Path, script_worlds: WorldPool) -> None:
    with pytest.raises(AssertionError, match="--operation must be one of .*win_put, got win_pit"):
        run_script([SINGLE_OPERATION, "--operation", "win_pit"], 2, tmp_path / "log.txt", script_worlds)


def test_inner_and_outer_peers(
    tmp_path: Path, script_worlds: WorldPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AssertionError, match="needs machines of equally many ranks, 3 or more, got 1 of 2"):
        run_script([INNER_OUTER], 2, tmp_path / "alone.txt", script_worlds)
    pool = WorldPool(initialize=False, environment={"FOG_NODES_PER_MACHINE": "3"})
    try:
        output = run_script([INNER_OUTER], 6, tmp_path / "log.txt", pool)
    finally:
        pool.close()
    assert "2 machines of 3 ranks" in output
    ring, exponential, flat, hierarchical = last_row(output)
    assert max(ring, exponential) < 1e-10 and flat < 1e-6 and hierarchical == 0, output


@pytest.mark.long
def test_imagenet_recipe_goes_on_from_a_checkpoint(tmp_path: Path, script_worlds: WorldPool) -> None:
    folder, logs = tmp_path / "checkpoints", tmp_path / "logs"
    flags = ["--images", "512", "--batch-size", "16", "--checkpoints", folder, "--log-dir", logs]
    output = run_script(
        [TRAIN_IMAGENET, *flags, "--epochs", "1"], 2, tmp_path / "log.txt", script_worlds, timeout=180
    )
    assert "going on" not in output.replace("going on without", "")
    has_tensorboard = importlib.util.find_spec("tensorboard") is not None
    assert ("TensorBoard is not installed" in output) != has_tensorboard
    assert (len(list(logs.glob("events.*"))) if has_tensorboard else 0) == has_tensorboard
    flags += ["--epochs", "3", "--batches-per-step", "2", "--base-lr", "0.1"]
    output = run_script([TRAIN_IMAGENET, *flags], 2, tmp_path / "more.txt", script_worlds, timeout=180)
    assert "going on after epoch 1\n" in output
    found = re.findall(r"^epoch (\d) of 3, .* test loss \S+, accuracy (\S+)$", output, re.MULTILINE)
    assert [epoch for epoch, _ in found] == ["2", "3"], output
    assert float(found[-1][1]) > 0.25, output  # there are ten classes
    names = sorted(path.name for path in folder.iterdir())
    assert names == [f"epoch-00{number}.pt" for number in (1, 2, 3)]


def test_learning_rate_of_the_imagenet_recipe(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    example = load("train_imagenet")
    monkeypatch.setattr(example.fogdist, "size", lambda: 8)
    rates = [example.learning_rate(0.1, epoch, 90, 5) for epoch in (0, 2.5, 5, 29.9, 30, 60, 80, 89)]
    assert rates == pytest.approx([0.1, 0.45, 0.8, 0.8, 0.08, 0.008, 0.0008, 0.0008])
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(SystemExit, match="needs torchvision"):
        example.load(Path("nowhere"), None)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("--mode", "ddp", "--backend", "gloo"), marks=pytest.mark.long),
        ("--mode", "awc", "--dynamic"),
        ("--mode", "ddp_async", "--slow-rank", "1", "--slowdown", "3"),
    ],
    ids=["ddp-gloo", "awc-dynamic", "ddp-async-slow"],
)
def test_digits_split_by_labels(tmp_path: Path, script_worlds: WorldPool, arguments: tuple[str, ...]) -> None:
    """Each rank has half of the labels, so alone it would be right in at most half of the cases."""
    picture, results = tmp_path / "loss.png", tmp_path / "results.json"
    script = [TRAIN_MNIST, *arguments, "--steps", "400", "--lr", "0.1", "--momentum", "0.5"]
    script += ["--save-plot-file", picture, "--json", results]
    output = run_script(script, 2, tmp_path / "log.txt", script_worlds)
    found = json.loads(results.read_text())
    assert found["final"] > 0.65, output
    assert f"{found['final']:.4f}" in output and len(found["ranks"]) == 2
    if "--slow-rank" in arguments:
        # The ranks share the steps, and the fast rank takes more of them.
        fast, slow = found["steps"]
        assert fast > slow and fast + slow in (800, 801), output
    else:
        assert found["steps"] == [400, 400]
    check_picture(picture)


def test_gpt_learns(tmp_path: Path, script_worlds: WorldPool) -> None:
    results = tmp_path / "results.json"
    flags = ["--mode", "awc", "--steps", "40", "--width", "32", "--context", "32", "--text-bytes", "200000"]
    run_script([TRAIN_GPT, *flags, "--lr", "0.01", "--json", results], 2, tmp_path / "log.txt", script_worlds)
    # A model without training has ln 256 = 5.5; the frequencies of bytes alone give about 3.2.
    assert json.loads(results.read_text())["final"] < 4.0


# --- parts of the examples, in this process


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports modules of examples/ and removes them afterwards, because benchmarks/ has modules of the same names."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if (ROOT / "examples") in Path(getattr(sys.modules[name], "__file__", None) or "/").parents:
            del sys.modules[name]


def run_main(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> Any:
    """Calls main(), which must end before it needs other ranks; returns the exit status."""
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    try:
        module.main.__wrapped__()  # torch's `record`, which wraps main, is for whole processes
    except SystemExit as exit_:
        return exit_.code
    raise AssertionError("main() came to its end")


def test_training_examples_take_the_same_flags(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The flags have the same names and help texts, except for their defaults."""
    helps = {}
    for script in TRAINING:
        assert run_main(load(script.stem), monkeypatch, "--help") == 0
        options = capsys.readouterr().out.partition("options:")[2].partition("\nmodes:")
        entries = re.split(r"\n  (?=-)", re.sub(r"\(default:[^)]*\)", "", options[0]))
        helps[script.stem] = {" ".join(entry.split()) for entry in entries}
        assert "--mode MODE" in options[0] and options[2], script
    common = set.intersection(*helps.values())
    expected = (
        "mode device backend topology dynamic local-steps batch-size lr seed slow-rank slowdown save-plot-file "
        "json"
    )
    names = {entry.split()[0] for entry in common if entry.startswith("--")}
    assert names == {f"--{name}" for name in expected.split()}
    # The benchmark counts steps in iterations, by flags of its own.
    steps = [any(entry.startswith("--steps N") for entry in options) for options in helps.values()]
    assert steps == [script != SYNTHETIC_RESNET50 for script in TRAINING]


@pytest.mark.parametrize(
    "script, arguments, word",
    [
        ("train_digits", ("--mode", "gossip"), "--mode"),
        ("train_digits", ("--data", "nowhere"), "nowhere"),
        ("train_digits", ("--mode", "awc", "--backend", "gloo"), "--backend"),
        ("train_digits", ("--mode", "awc", "--device", "cuda", "--backend", "nccl"), "--backend"),
        ("train_digits", ("--mode", "ddp", "--backend", "nccl"), "--device cuda"),
        ("train_digits", ("--device", "tpu"), "--device"),
        ("train_digits", ("--mode", "ddp", "--topology", "ring"), "--topology"),
        ("train_digits", ("--mode", "d2", "--dynamic"), "--dynamic"),
        ("train_digits", ("--mode", "diloco", "--local-steps", "0"), "--local-steps"),
        ("train_digits", ("--mode", "awc", "--local-steps", "4"), "--local-steps"),
        ("train_digits", ("--steps", "0"), "--steps"),
        ("train_digits", ("--lr", "nan"), "--lr"),
        ("train_digits", ("--slow-rank", "-1"), "--slow-rank"),
        ("train_digits", ("--slowdown", "0.5"), "--slowdown"),
        ("train_digits", ("--save-plot-file", "nowhere/a.png"), "--save-plot-file"),
        ("train_digits", ("--json", "."), "--json"),
        ("train_digits", ("--mode", "quasi_global_momentum", "--momentum", "0.9"), "--momentum"),
        ("train_resnet", ("--data", "nowhere"), "data_batch_1"),
        ("train_resnet", ("--depth", "21"), "--depth"),
        ("synthetic_resnet50", ("--image-size", "31"), "--image-size"),
        ("synthetic_resnet50", ("--num-iters", "0"), "--num-iters"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_wrong_flags_are_named_in_one_line(
    script: str,
    arguments: tuple[str, ...],
    word: str,
    load: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_main(load(script), monkeypatch, *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "error: " in line and word in line and arguments[-1] in line


@pytest.mark.parametrize("script", [*TRAINING, *OTHERS], ids=lambda s: s.stem)
def test_cuda_without_a_gpu_ends_before_anything_starts(
    script: Path,
    load: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    module = load(script.stem)
    main = getattr(module.main, "__wrapped__", module.main)
    monkeypatch.setattr(sys, "argv", [script.name, "--device", "cuda"])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    printed = capsys.readouterr()
    assert "--device cuda needs a" in printed.err.splitlines()[-1] and not printed.out
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    "gpus, ranks, version, variable, words",
    [
        (2, 2, None, "", None),
        (1, 1, (2, 27, 3), "", None),
        (1, 2, None, "1", "no NCCL is loaded"),
        (1, 2, (2, 29, 7), "1", "2.29.7 is loaded, which refuses two ranks on one GPU"),
        (1, 2, (2, 30, 7), "", "needs NCCL_MULTI_RANK_GPU_ENABLE=1 and a small NCCL_MAX_CTAS"),
        (1, 2, (2, 30, 3), "1", None),
        (3, 4, (2, 30, 2), "1", "4 ranks on a machine with 3 GPUs needs NCCL 2.30.3"),
        (0, 1, (2, 30, 3), "1", "needs a GPU"),
    ],
)
def test_ranks_that_share_a_gpu(
    gpus: int,
    ranks: int,
    version: tuple[int, int, int] | None,
    variable: str,
    words: str | None,
    load: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Emulates machines with different GPUs, ranks, NCCL versions and environments."""
    devices = load("devices")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(devices, "nccl_version", lambda: version)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", variable)
    problem = devices.problem("cuda")
    assert problem is None if words is None else words in problem
    assert devices.problem("cpu") is None


def test_local_rank_chooses_the_gpu(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = load("devices")
    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for name in ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    assert devices.use("cpu") == torch.device("cpu") and not chosen
    assert devices.use("cuda") == torch.device("cuda", 0)
    monkeypatch.setenv("MPI_LOCALRANKID", "1")
    assert devices.use("cuda") == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")  # two ranks share a GPU
    assert devices.use("cuda") == torch.device("cuda", 0)
    assert chosen == [torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cuda", 0)]


def write_cifar(folder: Path, images: int) -> dict[str, tuple[np.ndarray, list[int]]]:
    """Writes files in the format of CIFAR-10's Python version, with `images` each, and returns their contents."""
    rng = np.random.default_rng(0)
    held = {}
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        rows = rng.integers(0, 256, (images, 3 * 32 * 32), dtype=np.uint8)
        labels = rng.integers(0, 10, images).tolist()
        batch = {b"batch_label": name.encode(), b"data": rows, b"labels": labels, b"filenames": [b"a.png"]}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
        held[name] = rows, labels
    return held


def test_cifar_files(load: Callable[[str], ModuleType], tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    held = write_cifar(folder, 6)
    images = load("images")
    for named in (folder, tmp_path):
        data = images.load_cifar10(named)
        assert data.train_images.shape == (30, 3, 32, 32) and data.test_images.shape == (6, 3, 32, 32)
        # A row holds the red plane, then the green and the blue one, each row by row.
        rows, labels = held["data_batch_2"]
        assert data.train_images[7, 2, 5, 9] == rows[1, 2 * 1024 + 5 * 32 + 9]
        assert data.train_labels[6:12].tolist() == labels
        assert data.test_labels.tolist() == held["test_batch"][1]

    (folder / "data_batch_3").write_bytes(pickle.dumps({b"data": rows[:3], b"labels": labels}, protocol=2))
    with pytest.raises(ValueError, match=r"data_batch_3 .*6 labels.*\(3, 3072\)"):
        images.load_cifar10(folder)
    # A pickle that would call a function is not a batch.
    (folder / "data_batch_3").write_bytes(pickle.dumps({b"data": os.getcwd, b"labels": labels}, protocol=2))
    with pytest.raises(ValueError, match="getcwd"):
        images.load_cifar10(folder)
    (folder / "data_batch_3").unlink()
    with pytest.raises(FileNotFoundError, match="data_batch_3"):
        images.load_cifar10(folder)


def test_augmented_images_are_shifted_and_flipped(load: Callable[[str], ModuleType]) -> None:
    example = load("train_resnet")
    images = 1 + torch.arange(64 * 3 * 32 * 32, dtype=torch.float32).reshape(64, 3, 32, 32)
    augmented = example.augment(images, torch.Generator().manual_seed(0))
    assert augmented.shape == images.shape
    seen = set()
    for image, result in zip(images, augmented, strict=True):
        padded = torch.nn.functional.pad(image, (4, 4, 4, 4))
        (found,) = [
            (top, left, flipped)
            for top in range(9)
            for left in range(9)
            for flipped in (False, True)
            if torch.equal(result.flip(2) if flipped else result, padded[:, top : top + 32, left : left + 32])
        ]
        seen.add(found)
    assert {top for top, _, _ in seen} == {left for _, left, _ in seen} == set(range(9))
    assert {flipped for _, _, flipped in seen} == {False, True}


def test_resnet50_is_that_of_the_paper(load: Callable[[str], ModuleType]) -> None:
    model = load("models").resnet50()
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032
    model.eval()
    with torch.no_grad():
        assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 1000)
        assert model[:-3](torch.zeros(1, 3, 224, 224)).shape == (1, 2048, 7, 7)


def test_images_per_second_of_iterations(load: Callable[[str], ModuleType]) -> None:
    example = load("synthetic_resnet50")
    # The seconds at which steps end: one step warms up, two make an iteration, and the last one is left over.
    assert example.iteration_rates([9.0, 10.0, 12.0, 13.0, 14.0, 20.0], 3, 1, 2) == [2.0, 3.0]
    assert example.iteration_rates([2.0, 4.0], 4, 0, 1) == [2.0, 2.0]
    assert example.show([1.0, 3.0]) == "2.0 +- 2.0 (2 iterations)"


# --- all modes in one start -----


def train_digits_in_modes(is_wagma: bool) -> dict[str, dict[str, Any]]:
    """Returns the report of train_digits.py for each mode, or for wagma alone; complete on rank 0."""
    sys.path.insert(0, str(ROOT / "examples"))
    training, modes, example = map(importlib.import_module, ("training", "modes", "train_digits"))
    found: dict[str, dict[str, Any]] = {}
    advance = training.Progress.advance

    def advance_together(progress: Any) -> None:
        # 60 steps take only a few time slices of the scheduler. At their own pace, one rank could take nearly all of
        # them, while the untrained parameters of another are averaged again and again. So no rank may be more than 10
        # steps ahead.
        advance(progress)
        done[name] = done.get(name, 0) + 1
        if modes.MODES[name].is_asynchronous and done[name] <= 60 and done[name] % 10 == 0:
            dist.barrier()

    def start(args: Any) -> tuple[int, int]:
        if not found:
            return training.start(args)
        # This is False if the previous mode has left a window open.
        assert fogdist.set_topology(by_name(args.topology, dist.get_world_size()), is_weighted=True)
        torch.manual_seed(args.seed)
        return dist.get_rank(), dist.get_world_size()

    def report(args: Any, *rest: Any) -> None:
        args.save_plot_file = None
        found[name] = {**training.report(args, *rest), "is asynchronous": modes.MODES[name].is_asynchronous}

    done: dict[str, int] = {}
    with (
        mock.patch.multiple(example, start=start, report=report, end=lambda args: None),
        mock.patch.object(training.Progress, "advance", advance_together),
    ):
        for name, mode in modes.MODES.items():
            if mode.takes_adamw_only or (name == "wagma") != is_wagma:
                continue
            with mock.patch.object(sys, "argv", ["train_digits.py", "--mode", name, "--steps", "60"]):
                example.main.__wrapped__()
            gc.collect()  # on all ranks, the trained model goes together with its windows
    return found


def test_every_mode_learns(worlds: WorldPool) -> None:
    """With an odd number of ranks, pairs leave one rank over."""
    found, *_ = worlds(3).run(train_digits_in_modes, False, timeout=240)
    assert len(found) > 20
    for name, results in found.items():
        assert results["final"] > 0.7, (name, results)
        if results["is asynchronous"]:  # the ranks share the steps, and two ranks may each take one more
            assert 180 <= sum(results["steps"]) <= 182, (name, results)
        else:
            assert results["steps"] == [60] * 3, (name, results)
    equal = {name for name, results in found.items() if results["consensus distance"] < 1e-6}
    assert {"ddp", "gradient_allreduce"} <= equal and "none" not in equal


def test_wagma_learns(worlds: WorldPool) -> None:
    """Its number of ranks is a power of 2."""
    found, *_ = worlds(4).run(train_digits_in_modes, True, timeout=240)
    assert found["wagma"]["final"] > 0.7 and found["wagma"]["steps"] == [60] * 4, found


# --- residual networks ---


@pytest.mark.long
def test_resnet_learns(tmp_path: Path, script_worlds: WorldPool) -> None:
    flags = ["--depth", "8", "--steps", "72", "--batch-size", "16", "--mode", "atc", "--dynamic"]
    found, output = train(tmp_path, 2, TRAIN_RESNET, *flags, launcher=script_worlds)
    # There are ten equally frequent classes.
    assert found["final"] > 0.3, output
    assert [measured["step"] for measured in found["measurements"][0]] == [64, 72]
    assert found["consensus distance"] < 1e-6  # with two ranks, each takes the mean of both
    assert (
        len(re.findall(r"^epoch [12], .*test accuracy 0\.\d+, consensus distance ", output, re.MULTILINE))
        == 2
    )


@pytest.mark.long
def test_resnet50_benchmark(tmp_path: Path, script_worlds: WorldPool) -> None:
    flags = "--image-size 32 --batch-size 2 --num-warmup-batches 1 --num-iters 2 --num-batches-per-iter 1"
    found, output = train(
        tmp_path, 2, SYNTHETIC_RESNET50, *flags.split(), "--mode", "awc", launcher=script_worlds
    )
    assert found["steps"] == [3, 3]
    rates = found["images per second"]
    assert [len(of_rank) for of_rank in rates] == [2, 2] and min(map(min, rates)) > 0
    means = [sum(of_rank) / 2 for of_rank in rates]
    for name, mean in (("rank 0", means[0]), ("rank 1", means[1]), ("all 2 ranks", sum(means))):
        assert f"images per second of {name}: {mean:.1f} +- " in output


def test_slow_rank_that_is_not_there(tmp_path: Path, script_worlds: WorldPool) -> None:
    with pytest.raises(AssertionError) as failure:
        run_script([TRAIN_DIGITS, "--slow-rank", "2"], 2, tmp_path / "log.txt", script_worlds)
    printed = str(failure.value)
    assert printed.startswith("exit statuses [1, 1]:\n")
    assert "--slow-rank must be below 2, the number of ranks, got 2" in printed
