"""Rounds that leave late neighbors out: who is late, and that nothing of the sums is lost, whoever is."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fogdist
import numpy as np
import pytest
import torch
from fogdist import algorithms
from fogdist.training import arrivals
from fogdist.training.arrivals import Arrivals
from harness import World, WorldPool, on_ranks
from test_window_optimizers import Pieces, Quadratics, unbalanced
from torch import nn
from training_cases import make_net, sgd, start

# --- who is late --------------------------------------------------------------------------------------------


class Clock:
    """A clock, and in-neighbors whose numbers change at given times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, patience: float, neighbors: int = 1) -> None:
        self.now = 0.0
        self.told: list[float] = []
        self._numbers: dict[int, list[tuple[float, int]]] = {rank: [] for rank in range(neighbors)}
        self.gone: set[int] = set()
        self.p = 0.0
        self.tensor = torch.zeros(1)
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(arrivals, "time", clock)
        options = SimpleNamespace(_timeout=timedelta(seconds=100))
        backend = SimpleNamespace(options=options, create_window=lambda *_, **__: self)
        context: Any = SimpleNamespace(backend=backend)
        self.arrivals = Arrivals(context, "x", range(neighbors), range(neighbors), patience)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def send(self, rank: int, after: float, number: int) -> None:
        """Makes a neighbor's number known some time from now."""
        self._numbers[rank].append((self.now + after, number))

    def slot_p(self, rank: int) -> float:
        return float(max((number for at, number in self._numbers[rank] if at <= self.now), default=0))

    def is_gone(self, rank: int) -> bool:
        return rank in self.gone

    def put(self, *_: Any, **__: Any) -> None:
        self.told.append(self.p)

    def wait(self) -> float:
        """Returns the time of a wait of the arrivals."""
        begin = self.now
        self.arrivals.wait()
        return self.now - begin


def test_the_deadline_is_median_and_deviations(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Clock(monkeypatch, patience=3.0)
    waits = [0.10, 0.14, 0.20, 0.12, 0.11]
    for number, wait in enumerate(waits, 1):
        world.send(0, wait, number)
        assert world.wait() == pytest.approx(wait, abs=2e-3)
        assert world.arrivals.late == frozenset()
        world.now += 0.05  # a round is short, so that 5 % of it do not count
    usual = np.median(waits)
    deadline = usual + 3.0 * np.median(np.abs(np.array(waits) - usual))
    assert world.wait() == pytest.approx(deadline, abs=4e-3)
    assert world.arrivals.late == {0}
    # Nobody waits for it until it has sent what was due, and the wait that ended so does not count.
    for _ in range(3):
        assert world.wait() == 0.0
    world.send(0, 0.0, 6)
    assert world.wait() == 0.0
    assert world.arrivals.late == frozenset()
    assert world.wait() == pytest.approx(deadline, abs=4e-3)


def test_a_neighbor_that_is_always_there_has_leeway(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Clock(monkeypatch, patience=4.0)
    for number in range(1, 9):
        world.send(0, 0.0, number)
        assert world.wait() == 0.0
        world.now += 2.0
    assert world.wait() == pytest.approx(4.0 * 0.05 * 2.0, abs=2e-3)


def test_the_first_rounds_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Clock(monkeypatch, patience=0.0)
    for number, wait in enumerate([5.0, 0.0, 40.0], 1):
        world.send(0, wait, number)
        assert world.wait() == pytest.approx(wait, abs=2e-3)
    assert world.wait() == pytest.approx(100.0, abs=2e-3)  # the group's timeout
    assert world.arrivals.late == {0}


def test_who_was_late_itself_is_in_step_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The neighbor is ahead by many rounds: it is waited for all the same from the second round on."""
    world = Clock(monkeypatch, patience=1.0)
    for number in range(1, 6):
        world.send(0, 0.1, number)
        world.wait()
    world.send(0, 0.0, 50)
    assert world.wait() == 0.0
    assert world.wait() == 0.0  # a neighbor may be one round ahead
    world.send(0, 0.1, 51)
    assert world.wait() == pytest.approx(0.1, abs=2e-3)
    world.arrivals.tell()
    world.arrivals.tell()
    assert world.told == [1.0, 2.0]


def test_a_stopped_process_does_not_blame_its_neighbors(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Clock(monkeypatch, patience=1.0, neighbors=2)
    for number in range(1, 6):
        world.send(0, 0.1, number)
        world.send(1, 0.1, number)
        world.wait()
    world.send(0, 0.05, 6)
    world.gone.add(1)
    ordinary = world.sleep
    monkeypatch.setattr(arrivals.time, "sleep", lambda seconds: ordinary(30.0))
    assert world.wait() >= 30.0
    assert world.arrivals.late == {1}  # it has ended


# --- training -----------------------------------------------------------------------------------------------


def mean_with_a_late_rank(graph: str, signal: Path) -> dict[str, Any]:
    """Push-sum without gradients; the last rank stands still until the others have made 40 rounds without it."""
    rank, size = start(unbalanced if graph == "unbalanced" else fogdist.RingGraph)
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).double()
    first = fogdist.allreduce(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))  # the mean
    optimizer = algorithms.WindowPushSum(torch.optim.SGD(model.parameters(), lr=0.0), model, patience=5.0)
    found: dict[str, Any] = {"late": set(), "p": 1.0}

    def rounds(number: int) -> None:
        for _ in range(number):
            optimizer.zero_grad()
            model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
            optimizer.step()
            found["late"].update(optimizer.late_neighbors())
            found["p"] = min(found["p"], *optimizer.push_sum_weights())

    def own() -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    rounds(10)
    found["late"].clear()
    if rank == size - 1:
        while not signal.exists():
            time.sleep(0.002)
    else:
        rounds(40)
        if rank == 0:
            signal.touch()
    rounds(10)
    optimizer.settle()
    (weight,) = optimizer.push_sum_weights()
    total = fogdist.allreduce(torch.tensor([weight], dtype=torch.float64), average=False)
    found["errors"] = float((fogdist.allreduce(weight * own()) - first).abs().max()), abs(float(total) - size)
    fogdist.barrier()
    optimizer.force_barrier = True
    rounds(40)
    found["distance"] = float((own() - first).abs().max())
    optimizer.unregister_window()
    return found


@pytest.mark.parametrize("graph", ["ring", "unbalanced"])
def test_others_go_on_and_the_mean_stays(worlds: WorldPool, tmp_path: Path, graph: str) -> None:
    check_mean(worlds(4), tmp_path, graph)


def test_between_hosts(new_world: Callable[..., World], tmp_path: Path) -> None:
    """By messages of MPI, in which values and numbers come one after the other."""
    check_mean(new_world(4, environment={"FOG_LOCAL_LINKS": "0"}), tmp_path, "ring")


def check_mean(world: World, tmp_path: Path, graph: str) -> None:
    results = world.run(mean_with_a_late_rank, graph, tmp_path / "signal")
    senders = [2, 0] if graph == "ring" else [0]  # the ranks that rank 3 sends to
    for rank in senders:
        assert 3 in results[rank]["late"]
    for result in results:
        assert max(result["errors"]) < 1e-12
        assert result["distance"] < 1e-9
        assert result["p"] > 0.05


def solve_with_a_late_rank(problem: Quadratics, late: int) -> tuple[float, float, int]:
    """Returns the distances to the common solution before and after, and how often a neighbor was left out."""
    rank, _ = start(fogdist.RingGraph)
    model = Pieces(problem, rank)
    solution = torch.from_numpy(problem.solution())
    before = (model.z() - solution).norm().item()
    base = torch.optim.SGD(model.parameters(), lr=0.03)
    optimizer = algorithms.WindowPushSum(base, model, patience=5.0)
    done, left_out, everybody = 0, 0, None
    while everybody is None or not fogdist.poll(everybody):
        time.sleep(0.04 if rank == late and done % 10 == 9 else 0.001)
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
        left_out += len(optimizer.late_neighbors())
        done += 1
        if done == 150:  # the others go on until the late rank is there, too
            everybody = fogdist.allreduce_nonblocking(torch.zeros(1))
    fogdist.wait(everybody)
    optimizer.settle()
    optimizer.unregister_window()
    return before, (model.z() - solution).norm().item(), left_out


def test_the_loss_stays_right(worlds: WorldPool) -> None:
    # No rank can find the solution from its own data, with 4 equations for 6 unknowns.
    results = worlds(4).run(solve_with_a_late_rank, Quadratics(4, is_consistent=True), 1)
    assert sum(left_out for _, _, left_out in results) > 0
    for before, after, _ in results:
        assert after < 2e-2 * before, results


@on_ranks(2)
def test_what_patience_refuses() -> None:
    rank, _ = start(fogdist.RingGraph)
    model = make_net(rank)
    for patience, error, message in [
        (-1.0, ValueError, "patience must be at least 0, got -1.0"),
        ("5", TypeError, "patience must be a number, got str"),
        (True, TypeError, "patience"),
    ]:
        with pytest.raises(error, match=message):
            algorithms.WindowPushSum(sgd(model), model, patience=patience)
    with pytest.raises(ValueError, match="must be the same on all ranks"):
        algorithms.WindowPushSum(sgd(model), model, patience=1.0 + rank)
    optimizer = algorithms.WindowPushSum(sgd(model), model)
    assert optimizer.late_neighbors() == []
    optimizer.unregister_window()
