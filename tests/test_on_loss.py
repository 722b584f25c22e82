"""`on_loss="continue"`: ranks die while others train, in every kind; the others agree on who is left, and go on.

Ranks are killed in known places while the others wait for them, so that what the others have can be compared with the
recursion in NumPy: of all ranks up to the loss, and of the ranks that are left from then on.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fogdist
import fogdist.bluefog.torch as bf
import numpy as np
import pytest
import torch
import torch.distributed as dist
from fogdist import algorithms, membership
from fogdist.context import current
from fogdist.elastic.membership import Membership
from fogdist.topology import Topology, uniform_weights
from harness import World
from hosts import run_on_hosts
from numpy.linalg import matrix_power
from test_membership import TIMEOUT, Vector, make, survivors_of

# Where a rank is killed: before the forward pass of a step, after it, or after the backward pass.
PHASES = ["forward", "backward", "step"]
# By rank: the step, and the place in it.
Deaths = dict[int, tuple[int, str]]

EXACT = {"rtol": 0.0, "atol": 1e-12}
# The time that the other ranks have to come as far as they can without one that is killed then.
PAUSE = 0.3


def spread(ends: list[list[float]]) -> float:
    """Returns the largest difference between ranks."""
    return float((np.max(ends, axis=0) - np.min(ends, axis=0)).max())


def die_in(deaths: Deaths, step: int, phase: str) -> None:
    when, place = deaths.get(dist.get_rank(), (-1, ""))
    if when == step and place == phase:
        time.sleep(PAUSE)
        os.kill(os.getpid(), signal.SIGKILL)
    if when == step and place == "soon":
        threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGKILL)).start()


def is_whole(kind: str) -> bool:
    """Returns whether all elements of a bucket are mixed at once."""
    return not kind.startswith(("AsynchronousGossip", "SparseLoCo"))


def end(called: Any, optimizer: Any) -> None:
    if isinstance(called, fogdist.DecentralizedDataParallel):
        called.average()
    elif isinstance(optimizer, algorithms.AsynchronousGossip):
        optimizer.close()
    elif isinstance(optimizer, algorithms.WinPut):
        optimizer.average()


def train(
    kind: str, graph: str, deaths: Deaths, steps: int, rate: float = 0.0, pause: float = 0.0
) -> tuple[Membership, list[float], list[float]]:
    """Trains on each rank, of which some die.

    Args:
        kind: Of `make`.
        graph: The group's topology, a function of fogdist.
        deaths: Who dies, and when.
        steps: The number of steps.
        rate: The learning rate.
        pause: The time of a step's computation.

    Returns:
        The membership, the values of the two buckets, and the values after the end: the wrapper averages them.
    """
    fogdist.init(lambda size: uniform_weights(getattr(fogdist.topology, graph)(size)))
    rank = dist.get_rank()
    model = Vector(float(rank))
    called, optimizer = make(kind, model, rate)
    if kind == "WinPut/ring":
        optimizer.force_barrier = True
    for step in range(steps):
        die_in(deaths, step, "forward")
        optimizer.zero_grad()
        loss = called(float(rank))
        die_in(deaths, step, "backward")
        loss.backward()
        die_in(deaths, step, "step")
        optimizer.step()
        time.sleep(pause)
    values = model.both(is_whole(kind))
    end(called, optimizer)
    return membership.current(), values, model.both(is_whole(kind))


def come(name: str, count: int) -> None:
    """Waits until so many ranks have come, by the Store, which works without a lost rank."""
    store = dist.distributed_c10d._get_default_store()
    store.add(name, 1)
    while store.add(name, 0) < count:
        time.sleep(0.002)


def buckets_of(outcomes: list[Any], deaths: Deaths) -> np.ndarray:
    """Checks what all survivors know, and returns their values at the end, a row for each of them."""
    living = tuple(outcome.rank for outcome in outcomes if outcome.rank not in deaths)
    values = []
    for outcome in survivors_of(outcomes, deaths):
        members, buckets = outcome.value[:2]
        assert members.living == living and members.lost == frozenset(deaths), members
        assert 1 <= members.epoch <= len(deaths)
        values.append(buckets)
    return np.array(values)


def topology(graph: str, size: int) -> Topology:
    return Topology.from_graph(graph, uniform_weights(getattr(fogdist.topology, graph)(size)))


@pytest.mark.parametrize(
    ("kind", "phase"),
    [
        ("DecentralizedSGD", "forward"),
        ("DecentralizedSGD", "backward"),
        ("DecentralizedSGD", "step"),
        ("wrapper", "forward"),
    ],
)
def test_in_step_the_living_repeat_the_round(new_world: Callable[..., World], kind: str, phase: str) -> None:
    """Each round up to the loss is one of all ranks, and each later one of the living: all of them wait for the hub."""
    size, steps, victim, step, graph = 5, 12, 0, 4, "star"
    deaths = {victim: (step, phase)}
    outcomes = new_world(size, timeout=TIMEOUT).run_raw(train, kind, graph, deaths, steps)
    living = [rank for rank in range(size) if rank != victim]
    every = topology(graph, size)
    x = matrix_power(every.matrix().T, step) @ np.arange(size)
    mix = every.among(living).matrix().T
    expected = matrix_power(mix, steps - step) @ x[living]
    for bucket in buckets_of(outcomes, deaths).T:
        np.testing.assert_allclose(bucket, expected, rtol=0, atol=EXACT["atol"])


# --- those who are left agree -------------------------------------------------------------------------------

MIXES = [
    "wrapper/ring",
    "wrapper/one-peer",
    "wrapper/matching",
    "DecentralizedSGD/ring",
    "DecentralizedSGD/star/awc",
    "DecentralizedSGD/base/cta",
    "DecentralizedSGD",  # the group's topology
    "LocalSGD",
    "PushSumSGD/star",
    "GradientTracking/ring",
    "ExactDiffusion/ring",
    "DecentralizedAdamW/one-peer",
    "DiLoCo",
    "SparseLoCo/ring",
]
# The kind, the number of ranks, the group's topology, and who dies.
Case = tuple[str, int, str, Deaths]
TWO_LOSSES: Deaths = {1: (5, "backward"), 3: (9, "step")}
AGREE: list[Case] = [
    *(
        (kind, 4, "exponential", {place % 4: (10, "soon" if place % 2 else "forward")})
        for place, kind in enumerate(MIXES)
    ),
    ("wrapper/ring", 5, "ring", {1: (8, "forward"), 2: (8, "forward")}),
    ("DecentralizedSGD/one-peer/awc", 5, "ring", {1: (8, "forward"), 2: (8, "soon")}),
    ("LocalSGD", 5, "ring", {0: (8, "forward"), 4: (20, "forward")}),
    ("wrapper/ring", 3, "ring", {0: (5, "forward"), 1: (12, "forward")}),  # one rank is left
    ("wrapper/async/ring", 5, "ring", {1: (10, "forward")}),  # a line is left, until the average of all
    (
        "wrapper/async/ring",
        5,
        "ring",
        {1: (10, "forward"), 3: (20, "soon")},
    ),  # then 2 alone, apart from 4 and 0
    ("PushSumSGD/star/awc", 4, "exponential", {1: (10, "backward")}),
    ("WinPut/star", 5, "ring", {0: (10, "soon")}),
    ("WinPut/ring", 4, "ring", {1: (10, "forward"), 3: (20, "step")}),  # with a barrier in each step
    ("AsynchronousGossip", 5, "ring", TWO_LOSSES),
    ("AsynchronousGossip", 4, "ring", {0: (8, "forward")}),
    ("AsynchronousGossip", 4, "star", {0: (8, "soon")}),
]


def check_that_the_living_agree(new_world: Callable[..., World], case: Case) -> None:
    """Parameters that only mix end in agreement of the living ranks, within what they began with."""
    kind, size, graph, deaths = case
    steps, pause = (40, 0.005) if kind in (*MIXES, "DecentralizedSGD/one-peer/awc") else (150, 0.004)
    outcomes = new_world(size, timeout=TIMEOUT).run_raw(train, kind, graph, deaths, steps, 0.0, pause)
    ends = buckets_of(outcomes, deaths)
    assert np.ptp(ends, axis=0).max() < (0.1 if "async/" in kind or "WinPut" in kind else 0.02), ends
    assert ends.min() >= 0.0 and ends.max() <= size - 1, ends
    if kind.startswith("wrapper/"):
        averages = [outcome.value[2] for outcome in survivors_of(outcomes, deaths)]
        assert all(each == averages[0] for each in averages), averages


@pytest.mark.parametrize("case", AGREE, ids=str)
def test_the_living_agree(new_world: Callable[..., World], case: Case) -> None:
    check_that_the_living_agree(new_world, case)


@pytest.mark.parametrize(
    "kind", ["wrapper/ring", "DecentralizedSGD/one-peer", "GradientTracking/ring", "LocalSGD"]
)
def test_training_ends_at_the_optimum_of_the_living(new_world: Callable[..., World], kind: str) -> None:
    deaths: Deaths = {3: (5, "forward")}
    outcomes = new_world(4, timeout=TIMEOUT).run_raw(train, kind, "exponential", deaths, 40, 0.2, 0.005)
    # The mean of the targets 0, 1 and 2; rank 3's would make it 1.5.
    assert buckets_of(outcomes, deaths).mean() == pytest.approx(1.0, abs=0.05)


def close_while_others_meet(graph: str, victim: int, closes_later: bool) -> tuple[Membership, float]:
    """Rank 3 comes to the end of its training while the others meet after a loss, or the others meet while it ends it.

    Args:
        graph: The topology: without the victim it falls apart.
        victim: The rank that is lost.
        closes_later: Whether rank 3 closes only once it knows of the loss; otherwise it waits for the others at the loss.
    """
    fogdist.init()
    rank = dist.get_rank()
    wrapper, optimizer = make(f"wrapper/async/{graph}", Vector(float(rank)))
    for _ in range(10):
        optimizer.step()
    # After a barrier others may still wait for a message of the victim.
    come("trained", dist.get_world_size())
    if rank == victim:
        time.sleep(0.0 if closes_later else PAUSE)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank != 3 or closes_later:
        while victim not in current().backend.lost_ranks():
            time.sleep(0.01)
    for _ in range(60 if rank != 3 else 0):
        optimizer.step()
        time.sleep(0.002)
    wrapper.close()
    mean = bf.allreduce(torch.ones(1), group=fogdist.reconfigure())
    return membership.current(), float(mean)


@pytest.mark.parametrize("closes_later", [True, False])
@pytest.mark.parametrize(("graph", "victim"), [("star", 0), ("ring", 1)])
def test_a_rank_closes_while_others_meet(
    new_world: Callable[..., World], graph: str, victim: int, closes_later: bool
) -> None:
    outcomes = new_world(4, timeout=TIMEOUT).run_raw(close_while_others_meet, graph, victim, closes_later)
    living = tuple(rank for rank in range(4) if rank != victim)
    for outcome in survivors_of(outcomes, {victim: (0, "")}):
        members, mean = outcome.value
        assert members.living == living and mean == 1.0, members


def keep_the_sum(kind: str, graph: str, victim: int) -> tuple[Any, ...]:
    """A rank ends before the first step; the others keep their own sum, through an agreement round with shares on their way."""
    fogdist.init(lambda size: uniform_weights(getattr(fogdist.topology, graph)(size)))
    rank = dist.get_rank()
    model = Vector(float(rank))
    called, optimizer = make(kind, model)
    die_in({victim: (0, "forward")}, 0, "forward")
    while victim not in current().backend.lost_ranks():
        time.sleep(0.01)
    found = []
    for step in range(90):
        time.sleep(0.002 * rank)
        optimizer.zero_grad()
        model(0.0).backward()
        optimizer.step()
        if step % 30 == 10:
            optimizer.settle()
            # Each element by itself: what a neighbor reads may be older in some elements than in others.
            found.append([each.tolist() for each in (model.x, model.y)])
            come(f"settled {step}", dist.get_world_size() - 1)  # nobody sends before all have looked
    end(called, optimizer)
    return membership.current(), found, model.both(is_whole(kind))


@pytest.mark.parametrize(
    ("kind", "graph"),
    [
        ("AsynchronousGossip", "ring"),
        ("AsynchronousGossip", "star"),
    ],
)
def test_nothing_between_the_living_gets_lost(new_world: Callable[..., World], kind: str, graph: str) -> None:
    victim, size = 0, 5
    outcomes = new_world(size, timeout=TIMEOUT).run_raw(keep_the_sum, kind, graph, victim)
    survivors = survivors_of(outcomes, {victim: (0, "")})
    living = np.arange(1, size)
    for sums in zip(*(outcome.value[1] for outcome in survivors), strict=True):
        for bucket in zip(*sums, strict=True):
            np.testing.assert_allclose(np.sum(bucket, axis=0), living.sum(), rtol=0.0, atol=1e-11)
    for outcome in survivors:
        members, _, values = outcome.value
        assert members == Membership(1, tuple(living), frozenset({victim}))
        np.testing.assert_allclose(values, living.mean(), rtol=0.0, atol=0.05)


# --- anywhere -----------------------------------------------------------------------------------------------

KINDS = ["AsynchronousGossip", "wrapper/async", *MIXES]


def train_until_killed(kind: str, steps: int, deaths: dict[int, float]) -> tuple[Membership, list[float]]:
    """Ranks die by a timer, anywhere."""
    fogdist.init(fogdist.topology.ring)
    rank = dist.get_rank()
    model = Vector(float(rank))
    called, optimizer = make(kind, model)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    if rank in deaths:
        signal.setitimer(signal.ITIMER_REAL, deaths[rank])
    for _ in range(steps):
        optimizer.zero_grad()
        called(float(rank)).backward()
        optimizer.step()
        time.sleep(0.004)
    while rank in deaths:
        time.sleep(1.0)
    end(called, optimizer)
    return membership.current(), model.both(is_whole(kind))


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(6, 120))]
)
def test_random_deaths(new_world: Callable[..., World], seed: int) -> None:
    draw = random.Random(seed)
    kind = KINDS[5 * seed % len(KINDS)]
    size = draw.randint(3, 6)
    victims = draw.sample(range(size), draw.randint(1, size - 1))
    deaths = {victim: draw.uniform(0.01, 0.4) for victim in victims}
    outcomes = new_world(size, timeout=TIMEOUT).run_raw(train_until_killed, kind, 150, deaths)
    ends = []
    for outcome in survivors_of(outcomes, deaths):
        members, values = outcome.value
        # A rank may have made all its steps before another one died.
        assert members.lost <= set(deaths), members
        ends.append(values)
    # The momentum of DiLoCo goes on in the direction in which a loss has moved the mean.
    assert kind == "DiLoCo" or (np.min(ends) >= 0.0 and np.max(ends) <= size - 1)
    assert spread(ends) < 0.1, (kind, deaths, ends)


PLACEMENTS: dict[str, tuple[list[int], Deaths]] = {
    "another host": ([0, 0, 1, 1], {3: (8, "backward")}),
    "a host of its own": ([0, 1, 1, 2], {3: (8, "step")}),
    "two hosts": ([0, 1, 1, 2, 2], {1: (8, "forward"), 3: (8, "soon")}),
}
ON_HOSTS = [
    ("AsynchronousGossip", "another host"),
    ("wrapper/ring", "another host"),
    ("DecentralizedSGD/one-peer", "a host of its own"),
    ("LocalSGD", "two hosts"),
]


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        pytest.param(kind, case, marks=[] if (kind, case) in ON_HOSTS else [pytest.mark.long])
        for kind in KINDS
        for case in PLACEMENTS
    ],
)
def test_on_several_hosts(tmp_path: Path, kind: str, case: str) -> None:
    placement, deaths = PLACEMENTS[case]
    found = run_on_hosts(
        tmp_path,
        placement,
        "test_on_loss",
        [("train", [kind, "ring", deaths, 150, 0.0, 0.004])],
        killed=[*deaths],
    )
    ends = []
    for rank, values in enumerate(found):
        if rank not in deaths:
            members, last, *_ = values[0]
            assert members.lost == frozenset(deaths)
            ends.append(last)
    assert spread(ends) < 0.1, ends
