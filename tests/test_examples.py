"""Runs the examples as a user starts them, and compares the demo with DistributedDataParallel on Gloo."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import pickle
import re
import shutil
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
from harness import WorldPool
from scripts import ROOT, run_script

EXAMPLES = ROOT / "examples"
TRAINING = ["train_digits", "train_gpt", "train_resnet", "synthetic_resnet50"]
OTHERS = ["average_consensus", "push_sum", "optimization", "resource_allocation", "svrg", "linear_speedup"]
OTHERS += ["single_operation", "train_imagenet", "train_sharded"]


def check_picture(path: Path) -> None:
    from matplotlib import image

    pixels = image.imread(path)
    height, width = pixels.shape[:2]
    assert height >= 300 and width >= 600
    # The picture has curves, axes and text on white, so it is neither blank nor noise.
    drawn = (pixels[..., :3] < 0.9).any(axis=-1).mean()
    assert 0.01 < drawn < 0.5, f"{drawn:.3f} of the picture is not white"


def train(folder: Path, ranks: int, command: str, launcher: WorldPool) -> tuple[dict[str, Any], str]:
    """Runs a training example; returns the results of --json and the output."""
    script, *flags = command.split()
    results, picture = folder / "results.json", folder / "picture.png"
    arguments = [EXAMPLES / script, *flags, "--json", results, "--save-plot-file", picture]
    output = run_script(arguments, ranks, folder / "log.txt", launcher, timeout=120)
    check_picture(picture)
    return json.loads(results.read_text()), output


@pytest.mark.long
def test_demo_is_as_accurate_as_ddp_on_gloo(tmp_path: Path, script_worlds: WorldPool) -> None:
    """Runs the demo with its defaults; both runs have the same data, initial parameters and order of samples."""
    for name in ("fog", "gloo"):
        (tmp_path / name).mkdir()
    ours, _ = train(tmp_path / "fog", 4, "train_digits.py", script_worlds)
    gloo = "train_digits.py --mode ddp --backend gloo"
    reference, _ = train(tmp_path / "gloo", 4, gloo, script_worlds)
    assert min(ours["ranks"]) > 0.95
    assert len(set(reference["ranks"])) == 1
    assert max(abs(accuracy - reference["ranks"][0]) for accuracy in ours["ranks"]) <= 0.01
    # The ranks mix, so they are close; their data differs, so they are not equal.
    assert 0 < ours["consensus distance"] < 0.01 and reference["consensus distance"] < 1e-6


# Of each training: the least accuracy at the end. Of digits by labels each rank has half of the labels, so alone it would be
# right in at most half of the cases; the residual network is to tell ten equally frequent classes.
DIGITS = "train_digits.py --steps 330"
BY_LABELS = "train_digits.py --model convolutional --split labels --steps 400 --batch-size 32 --momentum 0.5"
RESNET = "train_resnet.py --depth 8 --steps 72 --batch-size 16"
TRAININGS = [
    (f"{DIGITS} --mode atc --topology ring --dynamic", 0.93),
    (f"{BY_LABELS} --mode awc --dynamic", 0.65),
    (f"{BY_LABELS} --mode ddp_async --slow-rank 1 --slowdown 3", 0.65),
    *(
        pytest.param(command, least, marks=pytest.mark.long)
        for command, least in (
            (f"{BY_LABELS} --mode ddp --backend gloo", 0.65),
            (f"{RESNET} --mode atc --dynamic", 0.3),
        )
    ),
]


@pytest.mark.parametrize(("command", "least"), TRAININGS)
def test_training_learns(tmp_path: Path, script_worlds: WorldPool, command: str, least: float) -> None:
    found, output = train(tmp_path, 2, command, script_worlds)
    assert found["final"] > least and f"{found['final']:.4f}" in output, output
    first, second = found["steps"]
    if "--slow-rank" in command:  # the ranks share the steps, and the fast rank takes more of them
        assert first > second and first + second in (800, 801), output
    else:
        assert first == second == int(command.split("--steps ")[1].split()[0])
    # With two ranks in step, each takes the mean of both.
    assert found["consensus distance"] < 1e-6 or "--slow-rank" in command or "awc" in command


def test_gpt_learns(tmp_path: Path, script_worlds: WorldPool) -> None:
    flags = "--mode awc --steps 40 --width 32 --context 32 --text-bytes 200000 --lr 0.01"
    found, _ = train(tmp_path, 2, f"train_gpt.py {flags}", script_worlds)
    # A model without training has ln 256 = 5.5; the frequencies of bytes alone give about 3.2.
    assert found["final"] < 4.0


@pytest.mark.long
def test_resnet50_benchmark(tmp_path: Path, script_worlds: WorldPool) -> None:
    flags = "--image-size 32 --batch-size 2 --num-warmup-batches 1 --num-iters 2 --num-batches-per-iter 1"
    found, output = train(tmp_path, 2, f"synthetic_resnet50.py {flags} --mode awc", script_worlds)
    assert found["steps"] == [3, 3]
    means = [sum(of_rank) / 2 for of_rank in found["images per second"]]
    assert f"images per second of all 2 ranks: {sum(means):.1f} +- " in output


# Of each example with a table of errors: its flags, its ranks, and between what the last row's columns are.
TABLES: list[tuple[str, str, int, list[tuple[float, float]]]] = [
    ("average_consensus", "", 4, [(0, 0)]),
    ("average_consensus", "--dynamic", 4, [(0, 0)]),
    ("push_sum", "", 4, [(0, 1e-6)]),
    ("push_sum", "--topology ring-right --slow-rank 2", 4, [(0, 1e-6)]),
    # Diffusion has a bias because the ranks' data differ; the other methods have none.
    ("optimization", "--lr 0.4 --max-iter 300", 4, [(1e-3, 0.3), *[(0, 1e-8)] * 3]),
    (
        "optimization",
        "--task linear_regression --lr 0.2 --max-iter 300",
        4,
        [(1e-3, 0.8), *[(0, 1e-8)] * 3],
    ),
    (
        "optimization",
        "--method push_diging --topology unbalanced --max-iter 200 --lr 0.4",
        3,
        [(0, 1e-5)],
    ),
    ("resource_allocation", "--topology mesh --max-iter 200", 4, [(0, 1e-10)] * 4),
    # Only variance reduction finds the optimum.
    ("svrg", "--task linear_regression --epochs 12", 4, [*[(1e-2, 10)] * 3, (0, 1e-5)]),
]


def rows_of(output: str) -> list[list[float]]:
    """Returns the numbers of a table's rows after their first column."""
    rows = re.findall(r"^ +\d+((?: +[-+\d.e]+)+)$", output, re.MULTILINE)
    return [[float(value) for value in row.split()] for row in rows]


@pytest.mark.parametrize(("name", "flags", "ranks", "limits"), TABLES, ids=lambda value: str(value))
def test_errors_become_small(
    tmp_path: Path,
    script_worlds: WorldPool,
    name: str,
    flags: str,
    ranks: int,
    limits: list[tuple[float, float]],
) -> None:
    script: list[str | Path] = [EXAMPLES / f"{name}.py", *flags.split()]
    if name == "optimization":
        script += ["--save-plot-file", tmp_path / "errors.png"]
    output = run_script(script, ranks, tmp_path / "log.txt", script_worlds)
    first, *_, last = rows_of(output)
    assert len(last) == len(limits) and min(first) > 0.3, output
    assert all(low <= error <= high for (low, high), error in zip(limits, last, strict=True)), output
    if name == "optimization":
        check_picture(tmp_path / "errors.png")
    if name == "push_sum":
        assert "sum of p: 4\n" in output


def test_linear_speedup(tmp_path: Path, script_worlds: WorldPool) -> None:
    script = [EXAMPLES / "linear_speedup.py", "--rows", "500", "--features", "20"]
    output = run_script(script, 2, tmp_path / "log.txt", script_worlds)
    (start, end), *_ = re.findall(r"samples: (\S+) at first, (\S+) at the end", output)
    assert float(end) < 1e-4 * float(start), output
    for name in ("as it is", "computation alone", "communication alone"):
        ((total, first, second),) = re.findall(rf"^ *{name}: +(\S+) = (\S+), (\S+)$", output, re.MULTILINE)
        whole, *parts = (int(value.replace(",", "")) for value in (total, first, second))
        assert min(parts) > 0 and whole == pytest.approx(sum(parts), abs=2)


@pytest.mark.parametrize(
    "operation", ["neighbor_allreduce", "neighbor_allgather", "allreduce", "allgather", "put"]
)
def test_single_operation(tmp_path: Path, script_worlds: WorldPool, operation: str) -> None:
    flags = ["--operation", operation, "--topology", "ring", "--data-size", "1000", "--num-iters", "2"]
    output = run_script([EXAMPLES / "single_operation.py", *flags], 3, tmp_path / "log.txt", script_worlds)
    lines = re.findall(
        r"^rank (\d): (\S+) \+- \S+ ms a call, (\d+) MB/s, largest error (\S+)$", output, re.MULTILINE
    )
    assert [rank for rank, *_ in lines] == ["0", "1", "2"], output
    assert all(float(time) > 0 and float(error) < 1e-6 for _, time, _, error in lines), output


def test_what_needs_ranks_to_be_refused(tmp_path: Path, script_worlds: WorldPool) -> None:
    for script, message in (
        ("single_operation.py --operation pit", "--operation must be one of .*put, got pit"),
        ("train_digits.py --slow-rank 2", "--slow-rank must be below 2, the number of ranks, got 2"),
        ("average_consensus.py --topology inner-outer", "local_size must be at least 3 .*, got 2"),
    ):
        name, *flags = script.split()
        with pytest.raises(AssertionError, match=rf"(?s)^exit statuses \[[12], [12]\]:\n.*{message}"):
            run_script([EXAMPLES / name, *flags], 2, tmp_path / name, script_worlds)


def test_inner_and_outer_peers(tmp_path: Path) -> None:
    pool = WorldPool(initialize=False, environment={"FOG_NODES_PER_MACHINE": "3"})
    try:
        script = [EXAMPLES / "average_consensus.py", "--topology", "inner-outer"]
        output = run_script(script, 6, tmp_path / "log.txt", pool)
    finally:
        pool.close()
    ((error,),) = rows_of(output)[-1:]
    assert error < 1e-6, output


def test_sharded_llama_goes_on_from_a_checkpoint(tmp_path: Path, script_worlds: WorldPool) -> None:
    folder = tmp_path / "checkpoints"
    flags = "--steps 20 --every 10 --width 32 --context 32 --text-bytes 200000 --how diloco --checkpoints"
    script = [EXAMPLES / "train_sharded.py", *flags.split(), folder]
    first, again = "", ""
    for log in ("first.txt", "again.txt"):
        first, again = again, run_script(script, 4, tmp_path / log, script_worlds)
        shutil.rmtree(folder / "step-000020")
    assert "from the beginning\nstep 10: loss" in first and "going on after step 10\nstep 20: loss" in again
    (expected, found) = (re.findall(r"loss of the average: (\S+)", output) for output in (first, again))
    assert found == expected and 3.0 < float(found[0]) < 5.5, again  # a model without training has ln 256


@pytest.mark.long
def test_imagenet_recipe_goes_on_from_a_checkpoint(tmp_path: Path, script_worlds: WorldPool) -> None:
    folder, logs = tmp_path / "checkpoints", tmp_path / "logs"
    flags = ["--images", "512", "--batch-size", "16", "--checkpoints", folder, "--log-dir", logs]
    output = run_script(
        [EXAMPLES / "train_imagenet.py", *flags, "--epochs", "1"],
        2,
        tmp_path / "log.txt",
        script_worlds,
        timeout=180,
    )
    assert "going on" not in output.replace("going on without", "")
    has_tensorboard = importlib.util.find_spec("tensorboard") is not None
    assert ("TensorBoard is not installed" in output) != has_tensorboard
    assert (len(list(logs.glob("events.*"))) if has_tensorboard else 0) == has_tensorboard
    flags += ["--epochs", "3", "--batches-per-step", "2", "--base-lr", "0.1"]
    output = run_script(
        [EXAMPLES / "train_imagenet.py", *flags], 2, tmp_path / "more.txt", script_worlds, timeout=180
    )
    assert "going on after epoch 1\n" in output
    found = re.findall(r"^epoch (\d) of 3, .* test loss \S+, accuracy (\S+)$", output, re.MULTILINE)
    assert [epoch for epoch, _ in found] == ["2", "3"], output
    assert float(found[-1][1]) > 0.25, output  # there are ten classes
    names = sorted(path.name for path in folder.iterdir())
    assert names == [f"step-0000000{number}" for number in (1, 2, 3)]


# --- parts of the examples, in this process


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports modules of examples/ and removes them afterwards, because benchmarks/ has modules of the same names."""
    monkeypatch.syspath_prepend(EXAMPLES)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if EXAMPLES in Path(getattr(sys.modules[name], "__file__", None) or "/").parents:
            del sys.modules[name]


def run_main(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> Any:
    """Calls main(), which must end before it needs other ranks; returns the exit status."""
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    try:
        module.main.__wrapped__()  # torch's `record`, which wraps main, is for whole processes
    except SystemExit as exit_:
        return exit_.code
    raise AssertionError("main() came to its end")


@pytest.mark.parametrize(
    "script, arguments, word",
    [
        ("train_digits", "--mode gossip", "--mode"),
        ("train_digits", "--data nowhere", "nowhere"),
        ("train_digits", "--mode awc --backend gloo", "--backend"),
        ("train_digits", "--mode ddp --backend nccl", "--device cuda"),
        ("train_digits", "--mode ddp --topology ring", "--topology"),
        ("train_digits", "--mode exact_diffusion --dynamic", "--dynamic"),
        ("train_digits", "--mode awc --local-steps 4", "--local-steps"),
        ("train_digits", "--steps 0", "--steps"),
        ("train_digits", "--lr nan", "--lr"),
        ("train_digits", "--slowdown 0.5", "--slowdown"),
        ("train_digits", "--save-plot-file nowhere/a.png", "--save-plot-file"),
        ("train_digits", "--json .", "--json"),
        ("train_resnet", "--data nowhere", "data_batch_1"),
        ("train_resnet", "--depth 21", "--depth"),
        ("synthetic_resnet50", "--image-size 31", "--image-size"),
    ],
)
def test_wrong_flags_are_named_in_one_line(
    script: str,
    arguments: str,
    word: str,
    load: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_main(load(script), monkeypatch, *arguments.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "error: " in line and word in line and arguments.split()[-1] in line


@pytest.mark.parametrize("script", [*TRAINING, *OTHERS])
def test_cuda_without_a_gpu_ends_before_anything_starts(
    script: str,
    load: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    module = load(script)
    main = getattr(module.main, "__wrapped__", module.main)
    monkeypatch.setattr(sys, "argv", [script, "--device", "cuda"])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    printed = capsys.readouterr()
    assert "--device cuda needs a" in printed.err.splitlines()[-1] and not printed.out
    assert not dist.is_initialized()


def test_ranks_that_share_a_gpu(load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulates machines with different GPUs, ranks, NCCL versions and environments."""
    devices = load("devices")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    for gpus, ranks, version, variable, words in (
        (2, 2, None, "", None),
        (1, 1, (2, 27, 3), "", None),
        (1, 2, None, "1", "no NCCL is loaded"),
        (1, 2, (2, 29, 7), "1", "2.29.7 is loaded, which refuses two ranks on one GPU"),
        (1, 2, (2, 30, 7), "", "needs NCCL_MULTI_RANK_GPU_ENABLE=1 and a small NCCL_MAX_CTAS"),
        (1, 2, (2, 30, 3), "1", None),
        (3, 4, (2, 30, 2), "1", "4 ranks on a machine with 3 GPUs needs NCCL 2.30.3"),
        (0, 1, (2, 30, 3), "1", "needs a GPU"),
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        monkeypatch.setattr(devices, "nccl_version", lambda version=version: version)
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


def test_resnet50_is_that_of_the_paper(load: Callable[[str], ModuleType]) -> None:
    model = load("models").resnet50()
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032
    model.eval()
    with torch.no_grad():
        assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 1000)
        assert model[:-3](torch.zeros(1, 3, 224, 224)).shape == (1, 2048, 7, 7)


# --- all modes in one start -----


def train_digits_in_modes() -> dict[str, dict[str, Any]]:
    """Returns the report of train_digits.py for each mode; complete on rank 0."""
    sys.path.insert(0, str(EXAMPLES))
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
        fogdist.set_topology(args.topology)  # raises if the previous mode has left a window open
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
            if mode.takes_adamw_only:
                continue
            with mock.patch.object(sys, "argv", ["train_digits.py", "--mode", name, "--steps", "60"]):
                example.main.__wrapped__()
            gc.collect()  # on all ranks, the trained model goes together with its windows
    return found


def test_every_mode_learns(worlds: WorldPool) -> None:
    """With an odd number of ranks, pairs leave one rank over."""
    found, *_ = worlds(3).run(train_digits_in_modes, timeout=240)
    assert len(found) > 16
    for name, results in found.items():
        assert results["final"] > 0.7, (name, results)
        if results["is asynchronous"]:  # the ranks share the steps, and two ranks may each take one more
            assert 180 <= sum(results["steps"]) <= 182, (name, results)
        else:
            assert results["steps"] == [60] * 3, (name, results)
    equal = {name for name, results in found.items() if results["consensus distance"] < 1e-6}
    assert "ddp" in equal and "none" not in equal
