"""WAGMA-SGD against its recursion, for all ranks at once in NumPy: groups, late ranks, averages of all, checkpoints.

Ranks act in phases, with barriers between their forward passes and their steps, so that who is late is known. A phase
names the ranks that make a step in it; the others do nothing, as a rank does that is late.
"""

from __future__ import annotations

import io
import warnings
from typing import Any

import fogdist
import numpy as np
import pytest
import torch
from fogdist import algorithms
from harness import on_ranks
from test_algorithms import Quadratic, data, noise, start_of

RATE = 0.2
Phases = list[list[int]]


def gradient(rank: int, x: np.ndarray, step: int) -> np.ndarray:
    A, b = data(rank)
    return A.T @ (A @ x - b) + noise(rank, step)


def make(**options: Any) -> tuple[Quadratic, Any]:
    fogdist.init()
    model = Quadratic(fogdist.rank(), fogdist.rank())
    base = torch.optim.SGD(model.parameters(), lr=RATE)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ranks start from")
        return model, algorithms.WAGMA(base, model, **options)


def act(model: Quadratic, optimizer: Any, phases: Phases, begin: int = 0) -> list[np.ndarray]:
    """Makes the steps of this rank; returns x after each phase."""
    step, path = begin, []
    for ranks in phases:
        loss = None
        if model.rank in ranks:
            optimizer.zero_grad()
            loss = model(step)
        fogdist.barrier()
        if loss is not None:
            loss.backward()
            optimizer.step()
            step += 1
        fogdist.barrier()
        path.append(model.x().detach().numpy().copy())
    return path


class Recursion:
    """The same of all ranks. A slot is the parameters that came last and the number of their round."""

    def __init__(self, size: int, group_size: int, period: int) -> None:
        self.size, self.group_size, self.period = size, group_size, period
        self.X = np.stack([start_of(rank) for rank in range(size)])
        self.steps = [0] * size  # as many as rounds
        self.slots: list[dict[int, tuple[np.ndarray, int]]] = [{} for _ in range(size)]

    def phase(self, ranks: list[int]) -> None:
        groups = {}
        for rank in ranks:
            number = self.steps[rank] + 1
            groups[rank] = members_by_hand(self.size, self.group_size, rank, number)
            if number % self.period:
                for peer in groups[rank]:
                    self.slots[peer][rank] = self.X[rank].copy(), number
        mean, new = self.X.mean(axis=0), self.X.copy()
        for rank, members in groups.items():
            number = self.steps[rank] + 1
            if number % self.period == 0:
                assert len(ranks) == self.size
                new[rank] = mean
            else:
                last = (number - 1) // self.period * self.period
                sent = [self.slots[rank][member] for member in members if member in self.slots[rank]]
                new[rank] = np.mean([self.X[rank], *(x for x, of in sent if of > last)], axis=0)
            new[rank] -= RATE * gradient(rank, self.X[rank], self.steps[rank])
        self.X = new
        for rank in ranks:
            self.steps[rank] += 1


# Of 4 ranks in twos, 8 in twos and in fours: the partners in rounds 1, 2, ...
GROUPS = {
    (2, 2): [[[0, 1]]],
    (4, 2): [[[0, 1], [2, 3]], [[0, 2], [1, 3]]],
    (4, 4): [[[0, 1, 2, 3]]],
    (8, 2): [
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        [[0, 2], [1, 3], [4, 6], [5, 7]],
        [[0, 4], [1, 5], [2, 6], [3, 7]],
    ],
    (8, 4): [
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[0, 1, 4, 5], [2, 3, 6, 7]],
        [[0, 2, 4, 6], [1, 3, 5, 7]],
    ],
}


def members_by_hand(size: int, group_size: int, rank: int, number: int) -> list[int]:
    groups = GROUPS[size, group_size]
    found = next(group for group in groups[(number - 1) % len(groups)] if rank in group)
    return [member for member in found if member != rank]


def train(phases: Phases, options: dict[str, Any]) -> tuple[list[np.ndarray], int]:
    model, optimizer = make(**options)
    path = act(model, optimizer, phases)
    assert optimizer.rounds == optimizer.steps
    steps = optimizer.steps
    fogdist.barrier()
    optimizer.unregister_window()
    optimizer.unregister_window()  # does nothing
    return path, steps


def check(results: list[Any], recursion: Recursion, phases: Phases) -> None:
    for place, ranks in enumerate(phases):
        recursion.phase(ranks)
        got = np.stack([path[place] for path, _ in results])
        np.testing.assert_allclose(got, recursion.X, rtol=0, atol=1e-12, err_msg=f"phase {place}")
    assert [steps for _, steps in results] == recursion.steps


@pytest.mark.parametrize(
    ("size", "group_size", "period"), [(2, 2, 3), (4, 2, 3), (4, 4, 5), (8, 2, 10), (8, 4, 4)]
)
@pytest.mark.parametrize("bucket_cap_mb", [4.0, 1e-5])
def test_with_no_late_rank_it_is_the_average_of_each_group(worlds, size, group_size, period, bucket_cap_mb):
    phases = [list(range(size))] * 11
    options = {"group_size": group_size, "period": period, "bucket_cap_mb": bucket_cap_mb}
    results = worlds(size).run(train, phases, options)
    check(results, Recursion(size, group_size, period), phases)


ALL = [0, 1, 2, 3]
OTHERS = [0, 1, 2]


@pytest.mark.parametrize(
    ("group_size", "period", "phases"),
    [
        # Rank 3 makes none of the first steps; then it makes what it has missed, and comes to the average of all.
        (2, 8, [*[OTHERS] * 5, ALL, *[[3]] * 5, ALL, ALL, ALL]),
        (4, 8, [*[OTHERS] * 5, ALL, ALL, *[[3]] * 5, ALL, ALL]),
        # At half of the others' speed: its old parameters count.
        (2, 6, [ALL, OTHERS, ALL, OTHERS, ALL, [3], [3], ALL, ALL, OTHERS, ALL, ALL]),
        # The others are just before the average of all when it makes its first step.
        (2, 4, [*[OTHERS] * 3, *[[3]] * 3, *[ALL] * 3, OTHERS, [3], ALL, ALL]),
        # Two are late; what they sent before the average of all does not count after it.
        (2, 3, [ALL, [0, 1], [2, 3], ALL, [0, 1], [0, 1], [2, 3], [2, 3], ALL, [0, 2], [1, 3]]),
    ],
)
def test_a_late_rank_holds_nobody_up(worlds, group_size, period, phases):
    """The others make their steps while it does nothing."""
    results = worlds(4).run(train, phases, {"group_size": group_size, "period": period})
    check(results, Recursion(4, group_size, period), phases)


@on_ranks(4)
def test_the_average_of_all_waits_for_a_late_rank() -> None:
    """Rank 1 comes to the average of all when the others have long been there; its phases are apart from theirs."""
    model, optimizer = make(group_size=2, period=3)
    act(model, optimizer, [[0, 2, 3]] * 2)
    for step in range(2 if model.rank == 1 else 0):
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()
    optimizer.zero_grad()
    model(2)  # the others begin it here, and wait in `synchronize`
    before = model.x().detach().numpy().copy()
    optimizer.synchronize()
    mean = np.mean(fogdist.allgather(torch.from_numpy(before)[None]).numpy(), axis=0)
    np.testing.assert_allclose(model.x().detach().numpy(), mean, rtol=0, atol=1e-12)


def save_and_go_on(phases: Phases, late: Phases) -> tuple[list[np.ndarray], list[np.ndarray], int]:
    """Goes on, and again from a checkpoint of before in a new algorithm, and in the same one."""
    model, optimizer = make(group_size=2, period=5)
    act(model, optimizer, phases)
    saved = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], saved)
    expected = act(model, optimizer, late, 50)
    paths = []
    for is_new in (False, True):
        if is_new:
            optimizer.unregister_window()
            optimizer = algorithms.WAGMA(
                torch.optim.SGD(model.parameters(), lr=1.0), model, group_size=2, period=5
            )
        saved.seek(0)
        weights, state = torch.load(saved)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        fogdist.barrier()
        paths.append(act(model, optimizer, late, 50))
    return expected, paths, optimizer.rounds


def test_training_continues_from_a_checkpoint(worlds):
    # The last phase before was an average of all, or else what neighbors sent before would count without the checkpoint.
    results = worlds(4).run(save_and_go_on, [ALL] * 5, [ALL, OTHERS, [3], *[ALL] * 5])
    for expected, paths, rounds in results:
        for path in paths:
            np.testing.assert_array_equal(path, expected)
        assert rounds == 12


@on_ranks([1, 3, 4])
def test_what_it_refuses() -> None:
    fogdist.init()
    size = fogdist.size()
    model = Quadratic(0, 0)
    base = torch.optim.SGD(model.parameters(), lr=RATE)
    if size == 3:
        with pytest.raises(ValueError, match=r"number of ranks.*power of 2, got 3"):
            algorithms.WAGMA(base, model)
        return
    optimizer = algorithms.WAGMA(base, model)
    model(0).backward()
    optimizer.step()
    if size == 1:
        np.testing.assert_allclose(
            model.x().detach().numpy(), start_of(0) - RATE * gradient(0, start_of(0), 0), atol=1e-12
        )
        return
    optimizer.self_weight = 0.5
    with pytest.raises(ValueError, match="self_weight must stay None"):
        optimizer.step()
    optimizer.self_weight = None
    model.weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match="unregister_window"):
        model(1)
    fogdist.barrier()
    optimizer.unregister_window()
    model(1).backward()
    optimizer.step()


@on_ranks(4)
def test_local_steps_and_steps_without_a_pass() -> None:
    model, optimizer = make(local_steps=3, period=2)
    x = model.x().detach().numpy().copy()
    act(model, optimizer, [ALL] * 2)
    assert optimizer.rounds == 0
    for step in range(2):
        x -= RATE * gradient(model.rank, x, step)
    np.testing.assert_allclose(model.x().detach().numpy(), x, rtol=0, atol=1e-12)
    optimizer.zero_grad()
    optimizer.step()  # without data it still takes part
    assert optimizer.rounds == 1
    fogdist.barrier()
    act(model, optimizer, [ALL] * 3)
    assert optimizer.rounds == 2  # that was an average of all
