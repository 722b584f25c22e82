"""Algorithms that send compressed values: what they agree on, what they begin anew, and what they refuse.

test_algorithms.py compares them with their recursions step by step.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fogdist
import fogdist.bluefog.torch as bf
import numpy as np
import pytest
import test_algorithms
import torch
import torch.distributed as dist
from compressed_recursions import choco_sgd, sparse_loco
from fogdist import algorithms, checkpoint, membership, topology
from fogdist.compression import Codec, Float16, Int8, TopK
from harness import World, WorldPool, on_ranks
from reference import Checks, make_input
from test_algorithms import Case, Simulation, advance, make, sent
from test_membership import TIMEOUT, survivors_of
from torch import Tensor, nn
from training_cases import start

# Codecs, each with a consensus step size that is small enough for its error.
CODECS: list[tuple[Codec, float]] = [
    (Float16(), 1.0),
    (Int8(), 1.0),
    (TopK(0.1), 0.25),
]


SHAPES = [(0,), (1,), (7,), (301,)]  # none, one, fewer than a block, and more than one that no block divides


class Weights(nn.Module):
    """Parameters of several sizes."""

    def __init__(self, rank: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        values = [make_input(rank, torch.float64, shape, seed=3).to(dtype) for shape in SHAPES]
        self.each = nn.ParameterList(values)

    def flat(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.each]).clone()


def made(name: str, model: nn.Module, rate: float = 0.0, **options: Any) -> Any:
    return getattr(algorithms, name)(
        torch.optim.SGD(model.parameters(), lr=rate), model, broadcast=False, **options
    )


def steps(optimizer: Any, count: int) -> None:
    """Makes steps with gradients of zero."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    for _ in range(count):
        optimizer.step()


def choco(model: nn.Module, codec: Codec, gamma: float, rate: float = 0.0, **options: Any) -> Any:
    return made("ChocoSGD", model, rate, compression=codec, gamma=gamma, **options)


def mean_of(size: int) -> Tensor:
    return torch.stack([Weights(rank).flat() for rank in range(size)]).mean(0)


# --- consensus ----------------------------------------------------------------------------------------------


@on_ranks(4, which=range(len(CODECS)))
def test_ranks_agree_on_the_exact_mean(which: int) -> None:
    """With a learning rate of 0 nothing but the codec keeps ranks apart, and what it loses is sent later.

    The mean stays what it was up to rounding. In float32, the rounding of the first, large differences stays in the
    pulls, and moves the mean in each round.
    """
    rank, size = start(topology.ring)
    (codec, gamma), mean = CODECS[which], mean_of(size)
    in_float64, in_float32 = (torch.float64, 1e-6, 1e-12), (torch.float32, 1e-5, 1e-4)
    also_float32 = isinstance(codec, Int8)
    with Checks() as checks:
        for dtype, apart, off in (in_float64, *([in_float32] if also_float32 else [])):
            model = Weights(rank, dtype)
            optimizer = choco(model, codec, gamma)
            distance = float("inf")
            for _ in range(20):
                steps(optimizer, 30)
                distance = fogdist.consensus_distance(model)
                if distance < apart / 2:
                    break
            error = float((model.flat().double() - mean).abs().max())
            checks.true(f"{dtype}: {distance}, {error}", distance < apart and error < max(apart, off))
            moved = (bf.allreduce(model.flat().double(), average=True) - mean).abs().max()
            checks.true(f"{dtype}: the mean moved by {moved}", moved < off)


# --- what is sent uncompressed ------------------------------------------------------------------------------


def counted(optimizer: Any) -> list[int]:
    """Returns a list to which each uncompressed exchange of the optimizer adds its round."""
    whole: list[int] = []
    begin = optimizer._neighbors.begin

    def counting(*arguments: Any, **options: Any) -> Any:
        whole.append(optimizer.rounds)
        return begin(*arguments, **options)

    optimizer._neighbors.begin = counting
    return whole


@on_ranks(4)
def test_only_what_neighbors_do_not_know_is_sent_uncompressed() -> None:
    rank, _ = start(topology.ring)
    for apart in (False, True):
        fogdist.set_topology(topology.ring(4))
        model = Weights(rank if apart else 0)
        optimizer = choco(model, Int8(), 0.5, 0.1)
        whole = counted(optimizer)
        steps(optimizer, 3)
        first = [0] if apart else []
        assert whole == first
        fogdist.set_topology(topology.ring(4))  # the same one
        steps(optimizer, 1)
        assert whole == first
        fogdist.set_topology(topology.star(4))
        steps(optimizer, 2)
        assert whole == [*first, 4]
        model.each[3].requires_grad_(False)  # other buckets
        steps(optimizer, 2)
        assert whole == [*first, 4, 6]


@on_ranks(3)
def test_parameters_that_are_frozen_between_two_exchanges() -> None:
    """The replicas of a parameter are lost when it is frozen; if it is unfrozen at once, the layout does not show it."""
    rank, _ = start(topology.ring)
    model = Weights(rank)
    optimizer = choco(model, Int8(), 0.5, local_steps=2)
    steps(optimizer, 4)
    model.each[3].requires_grad_(False)
    steps(optimizer, 1)
    model.each[3].requires_grad_(True)
    whole = counted(optimizer)
    steps(optimizer, 1)
    assert whole == [2]
    steps(optimizer, 300)
    assert whole == [2]
    assert fogdist.consensus_distance(model) < 1e-9


@dataclasses.dataclass
class Changing(Simulation):
    """A simulation in which the graph changes from the ring to another one before a step."""

    at: int = 5
    after: np.ndarray = dataclasses.field(default_factory=lambda: np.eye(0))

    def mix(self, step: int) -> np.ndarray:
        return super().mix(step) if step < self.at else self.after

    def begins_anew(self, step: int) -> bool:
        return step == self.at


class Losing(Changing):
    """A simulation in which rank 1 is lost before a step; from then on its row goes its own way."""

    def loses(self, step: int) -> bool:
        return step == self.at


RECURSIONS = {"ChocoSGD": choco_sgd, "SparseLoCo": sparse_loco}
GOSSIP_CASE = Case("SparseLoCo", "ring", "sgd", test_algorithms.GOSSIP)


def change_the_topology(case: Case, at: int) -> np.ndarray:
    rank, size = start(topology.ring)
    parts = make(case, rank)
    path = advance(case, *parts, range(at))
    fogdist.set_topology(topology.uniform_weights(topology.star(size)))
    return np.stack([*path, *advance(case, *parts, range(at, test_algorithms.STEPS))])


@pytest.mark.parametrize(
    "case",
    [Case("ChocoSGD", "ring", "sgd", sent(TopK(0.3), 0.3)), GOSSIP_CASE],
    ids=str,
)
def test_another_topology_between_two_rounds(worlds: WorldPool, case: Case) -> None:
    size, at, recursion = 4, 5, RECURSIONS[case.name]
    got = np.stack(worlds(size).run(change_the_topology, case, at), axis=1)
    star = topology.mixing_matrix(topology.uniform_weights(topology.star(size))).T
    expected = np.stack(list(itertools.islice(recursion(Changing(case, size, at, star)), len(got))))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-11)
    unaware = np.stack(list(recursion(Simulation(case, size))))
    assert np.abs(unaware[at:] - expected[at:]).max() > 1e-3


# --- losses -------------------------------------------------------------------------------------------------


def lose_a_rank(case: Case, victim: int, at: int) -> tuple[membership.Membership, np.ndarray]:
    rank, _ = start(topology.fully_connected)
    model, optimizer, scheduler = make(
        dataclasses.replace(case, options=(*case.options, ("on_loss", "continue"))), rank
    )
    path = []
    for step in range(test_algorithms.STEPS):
        if (rank, step) == (victim, at):
            time.sleep(0.2)  # the others come as far as they can without it
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()
        scheduler.step()
        path.append(model.x().detach().numpy().copy())
    return membership.current(), np.stack(path)


LOSSES = [
    Case("ChocoSGD", "full", "sgd", sent(Int8(block=8), 0.5)),
    *(dataclasses.replace(GOSSIP_CASE, graph="full", every=every) for every in (1, 2)),
]


@pytest.mark.parametrize("case", LOSSES, ids=str)
def test_the_living_go_on_after_a_loss(new_world: Callable[..., World], case: Case) -> None:
    """On the complete graph no rank makes a round without all others, so it is known which one the loss is in."""
    size, victim, at = 4, 1, 6
    outcomes = new_world(size, timeout=TIMEOUT).run_raw(lose_a_rank, case, victim, at)
    living = [rank for rank in range(size) if rank != victim]
    every_rank = topology.uniform_weights(topology.fully_connected(size))
    after = np.eye(size)
    after[np.ix_(living, living)] = topology.Topology.from_graph("full", every_rank).among(living).matrix().T
    first = -(-at // case.every) * case.every + case.every - 1  # the first exchange without the lost rank
    expected = np.stack(list(RECURSIONS[case.name](Losing(case, size, first, after))))
    for outcome in survivors_of(outcomes, {victim: 0.0}):
        members, path = outcome.value
        assert members.living == tuple(living)
        np.testing.assert_allclose(path, expected[:, outcome.rank], rtol=0, atol=1e-11)


def lose_ranks_in_turn(deaths: dict[int, float]) -> Tensor:
    rank, _ = start(topology.ring)
    model = Weights(rank)
    optimizer = choco(model, Int8(block=8), 1.0, on_loss="continue")
    for step in range(100):
        if int(deaths.get(rank, -1.0)) == step:
            time.sleep(deaths[rank] % 1.0)
            os.kill(os.getpid(), signal.SIGKILL)
        steps(optimizer, 1)
    return model.flat()


@pytest.mark.parametrize("deaths", [{2: 3.0}, {0: 5.1, 3: 5.0}, {1: 0.1}])
def test_the_living_agree(new_world: Callable[..., World], deaths: dict[int, float]) -> None:
    """On a ring ranks hear of a loss in different rounds, and some give a round up."""
    outcomes = new_world(5, timeout=TIMEOUT).run_raw(lose_ranks_in_turn, deaths)
    ends = [outcome.value for outcome in survivors_of(outcomes, deaths)]
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=0, atol=1e-4)


# --- SparseLoCo ---------------------------------------------------------------------------------------------


@on_ranks(3)
def test_sparse_loco_of_data_that_differ_stays_the_same_on_all_ranks() -> None:
    """Changes that cancel out in the mean must not add up in the replicas of float32, where the mean would drown."""
    rank, _ = start()
    model = Weights(0, torch.float32)
    optimizer = made("SparseLoCo", model, 1.0, compression=TopK(0.25, bits=2), local_steps=1)
    for _ in range(400):
        for parameter in model.each:  # towards far places, whose mean is 0
            parameter.grad = 0.1 * (parameter.detach() - 8.0 * (rank - 1))
        optimizer.step()
    first = bf.broadcast(model.flat(), 0)
    torch.testing.assert_close(model.flat(), first, rtol=0, atol=2e-7)  # a third may be rounded another way
    assert optimizer.vectors["replica"][0].abs().max() < 16.0


# --- checkpoints --------------------------------------------------------------------------------------------


def train_on(path: Path) -> np.ndarray:
    rank, _ = start(topology.ring)
    model = Weights(rank)
    optimizer = choco(model, TopK(0.3), 0.3)
    steps(optimizer, 5)
    checkpoint.save(path, model, optimizer, step=5)
    return model.flat().numpy()


def load_on(path: Path) -> tuple[np.ndarray, np.ndarray, list[int]]:
    rank, _ = start(topology.ring)
    model = Weights(10 + rank)
    optimizer = choco(model, TopK(0.3), 0.3)
    checkpoint.load(path, model, optimizer)
    whole = counted(optimizer)
    with torch.no_grad():
        model.each[3][rank] += 1.0  # ranks go on from different values
    begin = model.flat().numpy()
    steps(optimizer, 200)
    return begin, model.flat().numpy(), whole


def test_a_checkpoint_goes_on_from_the_mean(worlds: WorldPool, tmp_path: Path) -> None:
    """On another number of ranks replicas are what all ranks know: nothing is sent for it."""
    saved = worlds(4).run(train_on, tmp_path)
    loaded = worlds(3).run(load_on, tmp_path)
    begins = np.stack([begin for begin, _, _ in loaded])
    np.testing.assert_allclose(begins.mean(0)[:8], np.mean(saved, axis=0)[:8], rtol=0, atol=1e-14)
    for _, end, whole in loaded:
        np.testing.assert_allclose(end, begins.mean(0), rtol=0, atol=1e-6)
        assert whole == []


# --- NaN and infinity ---------------------------------------------------------------------------------------


@on_ranks(4, name=RECURSIONS)
def test_what_is_not_finite_is_carried(name: str) -> None:
    """A rank's NaN and infinities never become finite on it, and its neighbors' become no others' numbers in silence."""
    rank, _ = start(topology.ring)
    # The last one sends fewer elements than are not finite.
    codecs = [*CODECS, (TopK(k=2), 0.1)]
    for (codec, gamma), bad in itertools.product(codecs, (float("nan"), float("inf"))):
        model = Weights(0)
        optimizer = made(name, model, compression=codec, gamma=gamma, local_steps=1)
        steps(optimizer, 2)
        if rank == 1:
            with torch.no_grad():
                model.each[3][5:9] = bad
        steps(optimizer, 12)
        finite = model.flat().isfinite()
        if rank == 1:
            assert not finite[13:17].any(), (codec, bad)
        elif rank in (0, 2):
            assert not finite[13:17].all(), (codec, bad)
        if not hasattr(codec, "block"):
            assert finite[:13].all() and finite[17:].all()
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)  # it can be saved and loaded
        dist.barrier()


@on_ranks(2)
def test_numbers_of_16_bits_are_compressed_as_float32() -> None:
    rank, _ = start(topology.ring)
    for dtype in (torch.float16, torch.bfloat16):
        model = Weights(rank, dtype)
        optimizer = choco(model, Int8(), 0.7, 0.01)
        steps(optimizer, 30)
        assert {v.dtype for vectors in optimizer.vectors.values() for v in vectors} == {torch.float32}
        other = fogdist.neighbor_allgather(model.flat()[None])[0]
        torch.testing.assert_close(model.flat(), other, rtol=0, atol=0.02)
