"""Rounds that leave late neighbors out: who is late, that both ends decide the same, and that the mean of all ranks stays,
whoever is late, stopped or killed.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fogdist
import fogdist.bluefog.torch as bf
import numpy as np
import pytest
import torch
import torch.distributed as dist
from fogdist import algorithms
from fogdist import topology as topologies
from fogdist.training import pace
from fogdist.training.patient_mixer import PatientMixer
from harness import RUN_TIMEOUT, World, WorldPool, on_ranks
from torch import nn
from training_cases import EXACT, make_net, sgd, snapshot, start, train_step, trained
from window_interfaces import has_stopped

TOPOLOGIES: dict[str, Callable[[int], Any]] = {
    "ring": lambda n: topologies.Topology.from_graph("ring", topologies.uniform_weights(topologies.ring(n))),
    "full": lambda n: topologies.Topology.from_graph(
        "full", topologies.uniform_weights(topologies.fully_connected(n))
    ),
    "one-peer": topologies.one_peer_exponential,
    "hypercube": topologies.base_graph,
    "one-way": lambda n: topologies.Topology.from_graph(
        "one-way", topologies.uniform_weights(topologies.ring(n, connect_style=2))
    ),
}

# --- nobody is late --------------------------------------------------------------------------------------------

APART = {"_FOG_LOCAL_LINKS": "0", "FOG_BETWEEN_HOSTS": "tcp"}
FOREVER = 1e9  # a patience that is not used up


def mixing_by(kind: str, base: Any, model: nn.Module, graph: str, **options: Any) -> tuple[Any, Any, Any]:
    """Returns what is called for a model, what makes a step, and what averages: of the wrapper, or an order."""
    mixing = None if graph == "group" else TOPOLOGIES[graph](dist.get_world_size())
    if kind == "wrapper":
        wrapper = fogdist.DecentralizedDataParallel(model, base, mixing, broadcast=False, **options)
        return wrapper, base, wrapper
    options = {"bucket_cap_mb": 1e-4, "broadcast": False, **options}
    optimizer = algorithms.DecentralizedSGD(base, model, order=kind, topology=mixing, **options)
    return model, optimizer, optimizer


def rounds_of(mixer: Any) -> int:
    return mixer.round if isinstance(mixer, fogdist.DecentralizedDataParallel) else mixer.rounds


def average(mixer: Any, model: nn.Module) -> None:
    if isinstance(mixer, fogdist.DecentralizedDataParallel):
        mixer.average()
        mixer.close()
    else:
        fogdist.allreduce_parameters(dict(model.named_parameters()))


def train(kind: str, graph: str, patience: float | None) -> tuple[torch.Tensor, list[int]]:
    rank, _ = start(topologies.ring)
    model = make_net(rank)
    called, optimizer, mixer = mixing_by(kind, sgd(model), model, graph, patience=patience)
    for number in range(8):
        train_step(called, optimizer, rank, number)
    assert rounds_of(mixer) == 8
    late = mixer.late_neighbors()
    if kind == "wrapper":
        average(mixer, model)
    return snapshot(model), late


@pytest.mark.parametrize(
    ("kind", "graph"), [("atc", "group"), ("awc", "one-peer"), ("cta", "ring"), ("wrapper", "group")]
)
def test_if_nobody_is_late_averages_are_as_without(worlds: WorldPool, kind: str, graph: str) -> None:
    ours, theirs = (worlds(4).run(train, kind, graph, patience) for patience in (FOREVER, None))
    for (values, late), (others, _) in zip(ours, theirs, strict=True):
        assert late == []
        torch.testing.assert_close(values, others, **EXACT)


@on_ranks(3)
def test_training_goes_on_from_a_state_dict() -> None:
    rank, size = start(topologies.ring)
    model = make_net(rank)
    optimizer = algorithms.DecentralizedSGD(
        sgd(model), model, topology=topologies.one_peer_exponential(size), patience=FOREVER, broadcast=False
    )
    for number in range(5):
        train_step(model, optimizer, rank, number)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    ends = []
    for _ in range(2):
        for number in range(5, 9):
            train_step(model, optimizer, rank, number)
        ends.append(snapshot(model))
        assert optimizer.rounds == 9
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    assert torch.equal(*ends)


# --- one is late --------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Training:
    """What a rank did.

    Attributes:
        rounds: For each round: the neighbors that were left out, and the parameters before and after it.
        phases: How many rounds were made before the late rank stood still, and while it did.
        averaged: The parameters after an average of all ranks at the end.
    """

    rounds: dict[int, tuple[list[int], np.ndarray, np.ndarray]]
    phases: list[int]
    averaged: np.ndarray


def train_with_a_late_rank(
    kind: str, graph: str, how: str, folder: Path, patience: float, late: int = 3
) -> Training:
    """The late rank stands still until the others have made 30 rounds. Parameters only mix."""
    rank, size = start(topologies.ring)
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).double()
    base = torch.optim.SGD(model.parameters(), lr=0.0)
    called, optimizer, mixer = mixing_by(kind, base, model, graph, patience=patience)
    dice = random.Random(rank)
    done: dict[int, tuple[list[int], np.ndarray, np.ndarray]] = {}

    def own() -> np.ndarray:
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy().copy()

    def rounds(number: int) -> None:
        for _ in range(number):
            before = own()
            optimizer.zero_grad()
            called(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
            if patience == 0.0:
                time.sleep(dice.choice([0.0, 0.0, 0.001, 0.002]) if dice.random() > 0.03 else 0.05)
            optimizer.step()
            done[rounds_of(mixer) - 1] = mixer.late_neighbors(), before, own()

    phases = []
    pid = bf.allgather(torch.tensor([os.getpid()]))[late]
    rounds(8)
    dist.barrier()
    phases.append(len(done))
    if rank == late and how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif rank == late:
        while not (folder / "go on").exists():
            time.sleep(0.002)
    else:
        if how == "stopped":
            while not has_stopped(int(pid)):
                time.sleep(0.002)
        rounds(30)
        (folder / f"done {rank}").touch()
        while len(list(folder.glob("done *"))) < size - 1:
            time.sleep(0.002)
        if rank == 0 and how == "stopped":
            os.kill(int(pid), signal.SIGCONT)
        elif rank == 0:
            (folder / "go on").touch()
    phases.append(len(done))
    dist.barrier()
    rounds(30)
    # Until all that hear of the late rank have counted it again, which takes it long on a busy machine.
    weights = TOPOLOGIES[graph](size)
    hears = [
        other
        for other in range(size)
        if other != late and any(weights.matrix(t)[late, other] for t in range(weights.period))
    ]
    store = dist.distributed_c10d._get_default_store()
    while not store.check([f"{folder}: {other}" for other in hears]):
        rounds(1)
        number, (left_out, *_) = list(done.items())[-1]
        if rank in hears and weights.matrix(number)[late, rank] and late not in left_out:
            store.set(f"{folder}: {rank}", "")
    average(mixer, model)
    return Training(done, phases, own())


def check_late_rank(
    world: World, kind: str, graph: str, how: str, folder: Path, patience: float = 5.0
) -> None:
    """Compares each round with the average of the values that ranks had in it, with the weights that NumPy computes."""
    late, size = 3, 4
    # Beside eight busy processes it took 40 s between hosts.
    results = world.run(train_with_a_late_rank, kind, graph, how, folder, patience, timeout=4 * RUN_TIMEOUT)
    topology = TOPOLOGIES[graph](size)
    is_symmetric = all(
        np.array_equal(topology.matrix(t), topology.matrix(t).T) for t in range(topology.period)
    )
    for rank, result in enumerate(results):
        again = 0
        for place, (number, (left_out, before, after)) in enumerate(result.rounds.items()):
            weights = topology.matrix(number)[:, rank].copy()
            sources = [peer for peer in np.flatnonzero(weights) if peer != rank]
            assert set(left_out) <= set(sources)
            for peer in left_out:
                weights[rank] += weights[peer]
                weights[peer] = 0.0
            assert weights.sum() == pytest.approx(1.0, abs=1e-15)
            expected = weights[rank] * before
            for peer in set(sources).difference(left_out):
                expected = expected + weights[peer] * results[peer].rounds[number][1]
            np.testing.assert_allclose(after, expected, rtol=1e-14, atol=1e-15)
            for peer in sources:
                if weights[peer] == 0.0 and topology.matrix(number)[rank, peer] != 0.0:
                    other = results[peer].rounds.get(number)
                    assert other is None or rank in other[0], (rank, peer, number)
            if rank != late and late in sources:
                # Up to two rounds may pass until a rank that was behind the late one before is where that stands.
                if result.phases[0] + 2 <= place < result.phases[1]:
                    assert late in left_out
                again += place >= result.phases[1] and late not in left_out
        assert result.phases[1] - result.phases[0] == (0 if rank == late else 30)
        if rank != late and any(topology.matrix(t)[late, rank] for t in range(topology.period)):
            assert again > 0
        np.testing.assert_allclose(result.averaged, results[0].averaged, rtol=1e-14, atol=1e-15)
    if is_symmetric:
        firsts = [result.rounds[min(result.rounds)][1] for result in results]
        np.testing.assert_allclose(results[0].averaged, np.mean(firsts, axis=0), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("kind", "graph", "patience"),
    [
        ("wrapper", "ring", 5.0),
        ("atc", "full", 5.0),
        ("awc", "hypercube", 5.0),
        ("cta", "one-peer", 5.0),
        ("awc", "one-way", 5.0),
        # About every second wait is too long, and some ranks are late by chance.
        ("atc", "full", 0.0),
        ("awc", "hypercube", 0.0),
    ],
)
def test_a_late_rank_is_left_out_and_comes_back(
    worlds: WorldPool, tmp_path: Path, kind: str, graph: str, patience: float
) -> None:
    check_late_rank(worlds(4), kind, graph, "asleep", tmp_path, patience)


def test_a_stopped_rank_is_left_out(worlds: WorldPool, tmp_path: Path) -> None:
    check_late_rank(worlds(4), "awc", "ring", "stopped", tmp_path)


@pytest.mark.parametrize("how", ["stopped", pytest.param("asleep", marks=pytest.mark.long)])
def test_between_hosts(new_world: Callable[..., World], tmp_path: Path, how: str) -> None:
    check_late_rank(new_world(4, environment=APART), "awc", "ring", how, tmp_path)


# --- one ends --------------------------------------------------------------------------------------------


def train_until_one_dies(kind: str) -> tuple[str, int]:
    rank, _ = start(topologies.ring)
    model = make_net(rank)
    called, optimizer, _ = mixing_by(kind, sgd(model), model, "group", patience=5.0)
    number = 0
    while True:
        if rank == 1 and number == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            train_step(called, optimizer, rank, number)
        except dist.DistBackendError as error:
            return str(error), number
        number += 1


@pytest.mark.parametrize("kind", ["wrapper", "atc"])
def test_a_killed_neighbor_raises(new_world: Callable[..., World], kind: str) -> None:
    outcomes = new_world(3, timeout=4 * RUN_TIMEOUT).run_raw(train_until_one_dies, kind)
    assert outcomes[1].state == "died"
    for rank in (0, 2):
        message, number = outcomes[rank].value
        assert "rank 1 " in message and "in round " in message
        assert number >= 6


def end_at_once(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train_on(
    graph: str, victims: list[int], while_they_reopen: bool = False, is_behind: bool = False
) -> tuple[tuple[int, ...], np.ndarray, np.ndarray, int]:
    """Some ranks are killed one after the other, or the last one while the others open windows after the loss before.

    Returns the membership, parameters before and after, and rounds.
    """
    rank, _ = start(topologies.ring)
    model = make_net(rank)
    if while_they_reopen and rank == victims[-1]:
        # In the second agreement round: the group of the first one is destroyed then.
        renew, rounds_of_agreement = PatientMixer.renew, itertools.count()
        PatientMixer.renew = lambda mixer: end_at_once() if next(rounds_of_agreement) else renew(mixer)  # type: ignore[method-assign]
        victims = victims[:-1]
    base = torch.optim.SGD(model.parameters(), lr=0.0)
    wrapper, *_ = mixing_by("wrapper", base, model, graph, patience=5.0, on_loss="continue")

    def own() -> np.ndarray:
        return torch.cat([p.detach().reshape(-1) for p in trained(model)]).numpy().copy()

    before = own()
    for number in range(60):
        place = victims.index(rank) if rank in victims else number
        # Each loss has its own agreement round, if the last victim is to end in the second one.
        if number >= 10 * (1 + place) and fogdist.membership.current().epoch >= place * while_they_reopen:
            end_at_once()
        if is_behind and rank == 3 and number == 40:
            time.sleep(2.0)  # the others are in the average of all, where they notice the loss
        train_step(wrapper, base, rank, number)
        time.sleep(0.002)
    made = wrapper.round
    between = own()
    wrapper.average()
    after = own()
    for number in range(5):
        train_step(wrapper, base, rank, number)
    np.testing.assert_allclose(own(), after, rtol=1e-12, atol=1e-13)
    return fogdist.membership.current().living, np.stack([before, between]), after, made


@pytest.mark.parametrize(
    ("graph", "victims", "while_they_reopen", "is_behind"),
    [
        ("ring", [1], False, False),
        ("ring", [1], False, True),
        ("ring", [1, 3], False, False),
        ("one-way", [2], False, False),
        ("one-way", [2, 0, 3], True, False),
        ("hypercube", [0], False, False),
    ],
)
def test_training_goes_on_without_lost_ranks(
    new_world: Callable[..., World], graph: str, victims: list[int], while_they_reopen: bool, is_behind: bool
) -> None:
    """Where the topology holds together, nobody meets before the average of all; where it does not, it is healed."""
    size = 2 + len(victims) if while_they_reopen else 4
    # A rank that has met a neighbor in few rounds waits for it up to half of the timeout, also while it is in the average of all.
    outcomes = new_world(size, timeout=20.0).run_raw(train_on, graph, victims, while_they_reopen, is_behind)
    living = [rank for rank in range(size) if rank not in victims]
    states = [outcome.state for outcome in outcomes]
    expected = ["died" if rank in victims else "returned" for rank in range(size)]
    assert states == expected, "\n".join(map(str, outcomes))
    values = {rank: outcomes[rank].value for rank in living}
    between = np.mean([each[1][1] for each in values.values()], axis=0)
    for members, (_, own), after, made in values.values():
        assert members == tuple(living)
        assert made >= 60
        np.testing.assert_allclose(after, between, rtol=1e-12, atol=1e-13)
        spread = max(np.abs(each[1][0] - between).max() for each in values.values())
        assert np.abs(own - between).max() < 1e-2 * spread  # the ranks that are left went on to mix


def close_early() -> list[int]:
    """Rank 2 makes fewer steps; the others go on until they have averaged without it. Returns whom that left out."""
    rank, _ = start(fogdist.topology.ring)
    model = make_net(0)
    base = sgd(model)
    wrapper, *_ = mixing_by("wrapper", base, model, "group", patience=5.0)
    for number in range(10):
        train_step(wrapper, base, rank, number)
    if rank == 2:
        wrapper.close()
    dist.barrier()
    late: list[int] = []
    while rank != 2 and late != [2]:
        train_step(wrapper, base, rank, 10)
        late = wrapper.late_neighbors()
    wrapper.close()
    return late


def test_a_rank_that_ends_early_holds_up_nobody(worlds: WorldPool) -> None:
    assert worlds(3).run(close_early)[:2] == [[2], [2]]


# --- how long a rank waits -------------------------------------------------------------------------------------


class Clock:
    """A clock, and neighbors that come at given times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, patience: float, neighbors: int = 1) -> None:
        self.now = 0.0
        self._neighbors = range(neighbors)
        self._times: dict[int, float] = {}
        self.gone: set[int] = set()
        self.late: set[int] = set()
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(pace, "time", clock)
        self._deadlines = pace.Deadlines(patience, 100.0)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def send(self, rank: int, after: float) -> None:
        """Makes a neighbor come to this round some time from now."""
        self._times[rank] = self.now + after

    def wait(self) -> float:
        """Returns the time of a wait, and ends the round."""

        def look(rank: int) -> bool | None:
            return False if rank in self.gone else self._times.get(rank, np.inf) <= self.now or None

        begin = self.now
        self.late = self._deadlines.wait(self._neighbors, look)
        self._deadlines.end_round()
        self._times.clear()
        return self.now - begin


def test_the_deadline_is_median_and_deviations(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Clock(monkeypatch, patience=3.0)
    waits = [0.10, 0.14, 0.20, 0.12, 0.11]
    for wait in waits:
        world.send(0, wait)
        assert world.wait() == pytest.approx(wait, abs=2e-3)
        assert world.late == set()
        world.now += 0.05  # a round is short, so that 5 % of it do not count
    usual = np.median(waits)
    deadline = usual + 3.0 * np.median(np.abs(np.array(waits) - usual))
    for _ in range(2):  # a wait that ended so does not count
        assert world.wait() == pytest.approx(deadline, abs=4e-3)
        assert world.late == {0}


def test_a_neighbor_that_is_always_there_has_leeway(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Clock(monkeypatch, patience=4.0)
    for _ in range(8):
        world.send(0, 0.0)
        assert world.wait() == 0.0
        world.now += 2.0
    assert world.wait() == pytest.approx(4.0 * 0.05 * 2.0, abs=2e-3)


def test_the_first_rounds_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Clock(monkeypatch, patience=0.0)
    for wait in [5.0, 0.0, 40.0]:
        world.send(0, wait)
        assert world.wait() == pytest.approx(wait, abs=2e-3)
    assert world.wait() == pytest.approx(100.0, abs=2e-3)  # the group's timeout
    assert world.late == {0}


def test_a_stopped_process_does_not_blame_its_neighbors(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Clock(monkeypatch, patience=1.0, neighbors=2)
    for _ in range(5):
        world.send(0, 0.1)
        world.send(1, 0.1)
        world.wait()
    world.send(0, 0.05)
    world.gone.add(1)
    ordinary = world.sleep
    monkeypatch.setattr(pace.time, "sleep", lambda seconds: ordinary(30.0))
    assert world.wait() >= 30.0
    assert world.late == {1}  # it has ended


# --- what it refuses --------------------------------------------------------------------------------------------


@on_ranks(2)
def test_what_patience_refuses() -> None:
    rank, _ = start(fogdist.topology.ring)
    model = make_net(0)
    decentralized = algorithms.DecentralizedSGD

    def wrapper(base: Any, model: nn.Module, **options: Any) -> None:
        fogdist.DecentralizedDataParallel(model, base, **options)

    no_topology = "topology must be a topology, a graph or None with patience"
    for kinds, options, error, message in [
        ((decentralized, wrapper), {"patience": -1.0}, ValueError, "must be at least 0, got -1.0"),
        ((decentralized, wrapper), {"patience": "5"}, TypeError, "patience must be a number, got str"),
        ((decentralized, wrapper), {"patience": True}, TypeError, "patience"),
        ((decentralized,), {"patience": 1.0 + rank}, ValueError, "must be the same on all ranks"),
        ((decentralized,), {"patience": 5, "topology": algorithms.GlobalAverage()}, ValueError, no_topology),
        ((decentralized,), {"patience": 5, "topology": algorithms.Machines()}, ValueError, no_topology),
        (
            (wrapper,),
            {"patience": 5, "mode": "async"},
            ValueError,
            "patience must not be given in mode 'async'",
        ),
        ((algorithms.LocalSGD,), {"patience": 5}, TypeError, "unexpected keyword argument 'patience'"),
    ]:
        for kind in kinds:
            with pytest.raises(error, match=message):
                kind(sgd(model), model, **options)
    optimizer = decentralized(sgd(model), model, patience=5)
    optimizer.self_weight, optimizer.src_weights = 0.5, {1 - rank: 0.5}
    model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    with pytest.raises(ValueError, match="self_weight"):
        optimizer.step()
    assert decentralized(sgd(model), model).late_neighbors() == []
