"""Checkpoints: means on other numbers of ranks, whole or absent under kills and full disks.

test_training_frame.py has the same bits on as many ranks, with every kind of optimizer.
"""

from __future__ import annotations

import os
import resource
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import fogdist
import fogdist.bluefog.torch as bf
import numpy as np
import pytest
import torch
import torch.distributed as dist
from fogdist import algorithms, checkpoint
from fogdist.checkpoint import pieces
from harness import World, WorldPool, on_ranks
from torch import nn
from training_cases import Net, distributed, make_net, sgd, snapshot, start, train_step


def go_on(called: Any, optimizer: Any, rank: int, first: int, last: int) -> None:
    for number in range(first, last):
        train_step(called, optimizer, rank, number)
    optimizer.zero_grad()


def names_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


# --- other numbers of ranks ---------------------------------------------------------------------------------

LINEAR = ["DecentralizedSGD", "ExactDiffusion", "GradientTracking", "PushSumSGD", "DiLoCo", "wrapper"]


def state_of(model: Net, optimizer: Any) -> dict[str, Any]:
    """Returns all that the tests of means look at, as NumPy's."""
    state: dict[str, Any] = {"model": snapshot(model).detach().numpy()}
    base = optimizer.state_dict()["state"]
    state["momenta"] = [
        entry["momentum_buffer"].numpy().copy() for entry in base.values() if "momentum_buffer" in entry
    ]
    if isinstance(optimizer, algorithms.Algorithm):
        saved = optimizer.state_dict()
        for name in optimizer.state_vectors:
            own = [entry[f"fog_{name}"] for entry in saved["state"].values() if f"fog_{name}" in entry]
            state[name] = np.concatenate([each.reshape(-1).numpy() for each in own])
        state["numbers"] = {name: saved["param_groups"][0][f"fog_{name}"] for name in optimizer.state_numbers}
    return state


def star(size: int) -> Any:
    return fogdist.topology.star(size) if size > 1 else fogdist.topology.exponential(size)


def train_and_save(path: Path, kind: str) -> dict[str, Any]:
    # On a star, push-sum's weights differ between ranks.
    rank, _ = start(star if kind == "PushSumSGD" else None)
    model = make_net(rank)
    model.register_buffer("phase", torch.zeros(1, dtype=torch.complex64))
    with distributed(kind, sgd(model, momentum=0.5), model) as (called, optimizer):
        go_on(called, optimizer, rank, 0, 5)
        model.phase = torch.tensor([complex(rank, -1.0)])
        checkpoint.save(path, called, optimizer, step=5, extra=rank)
        return state_of(model, optimizer) | {"phase": model.phase.numpy()}


def load_and_train(path: Path, kind: str, is_mean: bool, saved_by: int) -> dict[str, Any]:
    rank, _ = start(star if kind == "PushSumSGD" else None)
    model = make_net(20 + rank)
    model.register_buffer("phase", torch.zeros(1, dtype=torch.complex64))
    with distributed(kind, sgd(model, momentum=0.5), model) as (called, optimizer):
        loaded = checkpoint.load(path, called, optimizer)
        assert loaded == checkpoint.Loaded(5, saved_by, is_mean, loaded.extra)
        state = state_of(model, optimizer) | {"phase": model.phase.numpy()}
        state["extra"] = loaded.extra
        go_on(called, optimizer, rank, 5, 7)
        state["later"] = state_of(model, optimizer)
        return state


@pytest.mark.parametrize("kind", LINEAR)
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (4, 1)])
def test_other_numbers_of_ranks_go_on_from_the_mean(
    worlds: WorldPool, tmp_path: Path, kind: str, before: int, after: int
) -> None:
    saved = worlds(before).run(train_and_save, tmp_path, kind)
    loaded = worlds(after).run(load_and_train, tmp_path, kind, True, before)
    weights = np.array([state.get("numbers", {}).get("p", 1.0) for state in saved])
    if kind == "PushSumSGD" and before > 2:
        assert weights.std() > 0.1  # otherwise the test would not see that they count
    mean = np.average([state["model"] for state in saved], axis=0, weights=weights)
    phase = np.average([state["phase"] for state in saved], axis=0, weights=weights)
    vectors = [name for name in saved[0] if name not in ("model", "momenta", "numbers", "phase")]
    for rank, state in enumerate(loaded):
        np.testing.assert_allclose(state["model"], mean, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(state["phase"], phase, rtol=1e-6)
        assert state["momenta"]
        for place, momentum in enumerate(state["momenta"]):
            expected = np.mean([each["momenta"][place] for each in saved], axis=0)
            np.testing.assert_allclose(momentum, expected, rtol=1e-5, atol=1e-7)
        for name in vectors:
            expected = np.mean([each[name] for each in saved], axis=0)
            np.testing.assert_allclose(state[name], expected, rtol=1e-5, atol=1e-7)
        assert state.get("numbers", {}).get("p", 1.0) == 1.0
        assert state["extra"] == rank % before
        for other in loaded:
            np.testing.assert_array_equal(state["model"], other["model"])
    _check_sums(kind, loaded)
    _check_sums(kind, [state["later"] for state in loaded])


def _check_sums(kind: str, states: list[dict[str, Any]]) -> None:
    """Checks what must hold for the sums over all ranks."""
    if kind == "GradientTracking":
        trackers, gradients = (np.sum([each[n] for each in states], axis=0) for n in ("tracker", "gradient"))
        np.testing.assert_allclose(trackers, gradients, rtol=1e-4, atol=1e-6)
    if kind == "ExactDiffusion":
        np.testing.assert_allclose(np.sum([each["correction"] for each in states], axis=0), 0.0, atol=1e-4)
    if kind == "PushSumSGD":
        assert abs(sum(each["numbers"]["p"] for each in states) - len(states)) < 1e-9


@on_ranks(2)
def test_torch_reads_the_state_of_a_rank(tmp_path: Path) -> None:
    """Also torch.distributed.checkpoint alone, in a program without fog."""
    import torch.distributed.checkpoint as dcp

    rank, _ = start()
    model = make_net(rank)
    folder = checkpoint.save(tmp_path, model, step=2)
    own = {"model": make_net(9).state_dict()}
    dcp.load(own, checkpoint_id=folder / f"rank{rank}", no_dist=True)
    for name, value in own["model"].items():
        assert torch.equal(value, model.state_dict()[name])


# --- whole or absent ----------------------------------------------------------------------------------------


def kill_myself(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before_it(function: Callable[..., Any]) -> Callable[..., Any]:
    return kill_myself


def after_it(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        function(*arguments, **options)
        kill_myself()

    return call


def before_completing(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(context: Any, what: str, action: Callable[[], Any]) -> Any:
        return kill_myself() if what.startswith("complete") else function(context, what, action)

    return call


# The place where a rank is killed, whether it is killed after it, and whether the new checkpoint is there then; None if
# either may be.
PHASES: dict[str, tuple[str, Callable[..., Any], bool | None]] = {
    "folder": ("begin", after_it, False),
    "files without metadata": ("writer", before_it, False),
    "files": ("write", after_it, False),
    "all files": ("together", before_completing, None),
    "nearly whole": ("rename", before_it, False),
    "name": ("rename", after_it, True),
}


def save_and_die(path: Path, victim: int, phase: str) -> str:
    rank, _ = start()
    model = make_net(rank)
    optimizer = sgd(model)
    checkpoint.save(path, model, optimizer, step=1)
    go_on(model, optimizer, rank, 0, 2)
    if rank == victim:
        place, wrapper, _ = PHASES[phase]
        if place == "writer":
            from torch.distributed.checkpoint import FileSystemWriter

            FileSystemWriter.finish = wrapper(FileSystemWriter.finish)
        elif place == "rename":
            complete = checkpoint.folders.complete

            def renaming(*arguments: Any) -> Any:
                Path.rename = wrapper(Path.rename)  # type: ignore[method-assign]
                return complete(*arguments)

            checkpoint.folders.complete = renaming
        else:
            module = checkpoint.folders if place == "begin" else checkpoint
            setattr(module, place, wrapper(getattr(module, place)))
    try:
        checkpoint.save(path, model, optimizer, step=2, keep=1)
    except dist.DistBackendError as error:
        return str(error)
    return "saved"


def load_and_save_again(path: Path, step: int) -> tuple[int, bool]:
    rank, _ = start()
    expected = make_net(rank)
    if step == 2:
        go_on(expected, sgd(expected), rank, 0, 2)
    model = make_net(7)
    loaded = checkpoint.load(path, model, sgd(model))
    checkpoint.save(path, model, sgd(model), step=3)
    return loaded.step, torch.equal(snapshot(model), snapshot(expected))


@pytest.mark.parametrize(
    ("phase", "victim"),
    [
        ("folder", 0),
        pytest.param("files without metadata", 0, marks=pytest.mark.long),
        ("files without metadata", 2),
        pytest.param("files", 0, marks=pytest.mark.long),
        ("files", 2),
        ("all files", 0),
        ("all files", 2),
        ("nearly whole", 0),
        ("name", 0),
    ],
)
def test_a_rank_is_killed_while_it_saves(
    worlds: WorldPool, new_world: Callable[..., World], tmp_path: Path, phase: str, victim: int
) -> None:
    outcomes = new_world(3, timeout=20).run_raw(save_and_die, tmp_path, victim, phase)
    assert [outcome.state for outcome in outcomes] == [
        "died" if rank == victim else "returned" for rank in range(3)
    ], outcomes
    for outcome in outcomes:
        if outcome.rank != victim:
            assert "checkpoint of step 2" in outcome.value and f"rank {victim}" in outcome.value, (
                outcome.value
            )
    is_there = PHASES[phase][2]
    found = checkpoint.steps(tmp_path)
    assert found in ([[1, 2]] if is_there else [[1]] if is_there is False else [[1], [1, 2]])
    last = found[-1]
    assert worlds(3).run(load_and_save_again, tmp_path, last) == [(last, True)] * 3
    assert names_in(tmp_path) == [f"step-{step:08d}" for step in (*found, 3)]  # nothing hidden is left


@on_ranks(3)
def test_a_full_disk_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    rank, _ = start()
    model = nn.Linear(200, 100)
    checkpoint.save(tmp_path, model, step=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        for _ in range(2):
            with pytest.raises(OSError, match="step 2.*rank 1.*File too large") as caught:
                checkpoint.save(tmp_path, model, step=2, keep=1)
            assert caught.value.errno
            dist.barrier()
            assert names_in(tmp_path) == ["step-00000001"]
            dist.barrier()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    checkpoint.save(tmp_path, model, step=2, keep=1)
    dist.barrier()
    assert names_in(tmp_path) == ["step-00000002"]


@on_ranks(2)
def test_a_folder_that_ranks_do_not_share_is_an_error(tmp_path: Path) -> None:
    """Rank 1 writes elsewhere, as on a disk of another host."""
    rank, _ = start()
    write = checkpoint.write
    if rank == 1:
        checkpoint.write = lambda folder, *state: write(tmp_path / "elsewhere" / folder.name, *state)
    shared = tmp_path / "checkpoints"
    try:
        with pytest.raises(FileNotFoundError, match="rank 0.*all ranks share.*does not see.*rank1/"):
            checkpoint.save(shared, make_net(0), step=1)
    finally:
        checkpoint.write = write
    dist.barrier()
    assert checkpoint.latest(shared) is None


@on_ranks(2)
def test_old_checkpoints_go_when_the_new_one_is_there(tmp_path: Path) -> None:
    start()
    model = make_net(0)
    for step in (1, 5, 3, 7, 8):
        checkpoint.save(tmp_path, model, step=step, keep=None if step < 7 else 3)
        dist.barrier()
        if step == 3:
            assert checkpoint.steps(tmp_path) == [1, 3, 5]
            assert checkpoint.latest(tmp_path) == tmp_path / "step-00000005"
        dist.barrier()
    assert checkpoint.steps(tmp_path) == [5, 7, 8]
    assert names_in(tmp_path) == [f"step-{step:08d}" for step in (5, 7, 8)]
    dist.barrier()
    checkpoint.save(tmp_path, model, step=2, keep=1)  # never the one that was just saved
    dist.barrier()
    assert checkpoint.steps(tmp_path) == [2]
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        patch.setattr("shutil.rmtree", Mock(side_effect=PermissionError("read-only")))
        checkpoint.save(tmp_path, model, step=9, keep=1)
    assert any(
        "an old checkpoint could not be removed: read-only" in str(each.message) for each in warned
    ) == (dist.get_rank() == 0)


def test_a_folder_without_checkpoints(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        assert checkpoint.steps(path) == []
        assert checkpoint.latest(path) is None
    (tmp_path / "step-00000004").mkdir()  # not a checkpoint
    assert checkpoint.steps(str(tmp_path)) == []


def test_names_with_dots_are_told_apart() -> None:
    tensors: dict[str, torch.Tensor] = {}
    state = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}
    put = pieces.put_together(pieces.take_apart(state, "model", tensors), tensors)
    assert len(tensors) == 2 and put == state


# --- beside the training ------------------------------------------------------------------------------------


@on_ranks(4)
def test_what_gossip_has_in_flight_is_saved(tmp_path: Path) -> None:
    """With a learning rate of 0, the mean of all parameters stays; moves in inboxes are a part of it."""
    rank, _ = start(fogdist.topology.ring)
    model = make_net(rank)
    first = bf.allreduce(snapshot(model).double())
    base = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = algorithms.AsynchronousGossip(base, model, broadcast=False)
    for part in range(2):
        go_on(model, optimizer, rank, 0, 3 + 5 * rank)  # ranks make different numbers of steps
        checkpoint.save(tmp_path, model, optimizer, step=part)
        mean = bf.allreduce(snapshot(model).double())
        torch.testing.assert_close(mean, first, rtol=0, atol=1e-6)
    kept = snapshot(model)
    optimizer.close()
    other = make_net(9)
    base = torch.optim.SGD(other.parameters(), lr=0.0)
    checkpoint.load(tmp_path, other, base)
    assert torch.equal(snapshot(other), kept)
    optimizer = algorithms.AsynchronousGossip(base, other, broadcast=False)
    go_on(other, optimizer, rank, 0, 2)
    optimizer.close()


@on_ranks(2)
def test_a_rank_ahead_does_not_wait_for_one_that_saves(tmp_path: Path) -> None:
    rank, _ = start()
    model = make_net(rank)
    wrapper = fogdist.DecentralizedDataParallel(
        model, sgd(model), fogdist.topology.ring(2), mode="async", max_staleness=1
    )
    go_on(wrapper, wrapper.optimizer, rank, 0, 2 if rank == 0 else 12)
    checkpoint.save(tmp_path, wrapper, wrapper.optimizer, step=0)
    kept = snapshot(model)
    go_on(wrapper, wrapper.optimizer, rank, 0, 2)
    checkpoint.load(tmp_path, wrapper, wrapper.optimizer)
    assert torch.equal(snapshot(model), kept)
    wrapper.close()


# --- refusals -----------------------------------------------------------------------------------------------


class Renamed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


@on_ranks(2)
def test_another_model_or_optimizer_is_refused(tmp_path: Path) -> None:
    """All ranks refuse if one does, so that none is left waiting, and nothing has changed."""
    rank, _ = start()
    model = make_net(rank)
    checkpoint.save(tmp_path, model, sgd(model), step=4)
    checkpoint.save(tmp_path, model, algorithms.GradientTracking(sgd(model), model), step=5)
    checkpoint.save(tmp_path, model, step=6)
    wider = make_net(rank)
    wider.head = nn.Linear(1, 1)
    diffusion = algorithms.ExactDiffusion(sgd(model), model)
    turned = torch.optim.SGD(reversed(list(model.parameters())), lr=0.1)
    adam = torch.optim.Adam(model.parameters())
    for step, other, optimizer, message in [
        (4, make_net(rank).float(), None, "torch.float32 of shape .* and was saved as torch.float64"),
        (4, wider, None, r"'head.weight' is torch.float32 of shape \(1, 1\) and was saved as"),
        (4, Renamed(make_net(rank)), None, "only in the model: inner.*only in the checkpoint: "),
        (4, make_net(rank) if rank == 0 else wider, None, "rank 1: model must be that of the checkpoint"),
        (4, model, adam, "optimizer must be a SGD, as in the checkpoint, got a Adam"),
        (4, model, turned, "optimizer must have.*the same order"),
        (5, model, diffusion, "state_dict must be of ExactDiffusion.*got one of GradientTracking"),
        (6, model, diffusion, "optimizer must be None.*without an optimizer"),
    ]:
        before = snapshot(other)
        with pytest.raises(ValueError, match=f"(?s)step {step}.*{message}"):
            checkpoint.load(tmp_path, other, optimizer, step=step)
        assert torch.equal(snapshot(other), before)
    with pytest.raises(
        FileNotFoundError, match=r"a checkpoint of step 9, got .* with those of steps \[4, 5, 6\]"
    ):
        checkpoint.load(tmp_path, model, step=9)
    with pytest.raises(FileExistsError, match="no checkpoint of step 4 yet"):
        checkpoint.save(tmp_path, model, step=4)
    for arguments, message in [
        (("model",), "model must be a torch.nn.Module, got str"),
        ((model, "sgd"), "optimizer must be a torch.optim.Optimizer or None, got str"),
    ]:
        with pytest.raises(TypeError, match=message):
            checkpoint.load(tmp_path, *arguments)
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(TypeError, match="got the DTensor 'position'"),
    ):
        patch.setattr(checkpoint.states, "is_sharded", lambda _: True)
        checkpoint.load(tmp_path, model)
    assert checkpoint.load(tmp_path, model, diffusion, step=4).step == 4  # of the plain optimizer
    assert checkpoint.load(tmp_path, model, step=5).step == 5


@on_ranks(2)
def test_damaged_and_newer_checkpoints_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank, _ = start()
    model = make_net(0)
    folder = checkpoint.save(tmp_path, model, step=1)
    data = folder / "rank1" / "__0_0.distcp"
    whole = data.read_bytes()
    dist.barrier()
    if rank == 0:
        data.write_bytes(whole[:-1])
    dist.barrier()
    with pytest.raises(FileNotFoundError, match="rank 1: .*damaged: rank1/__0_0.distcp"):
        checkpoint.load(tmp_path, model)
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "_FORMAT", 3)
        checkpoint.save(tmp_path, model, step=2)
    with pytest.raises(ValueError, match="format 2, got one of format 3"):
        checkpoint.load(tmp_path, model)
