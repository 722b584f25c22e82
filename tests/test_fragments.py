"""Algorithms that exchange the model in fragments while training goes on, against their recursions in NumPy.

The problem, graphs and optimizers are those of test_algorithms.py; the model has five layers.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import fogdist
import numpy as np
import pytest
import torch
import torch.distributed as dist
from compressed_recursions import Replicas, is_exact_average
from fogdist import algorithms, membership
from fogdist import topology as topologies
from fogdist.compression import Int8, TopK
from fogdist.training import Algorithm, FlatBuckets, GlobalAverage
from fogdist.training.algorithm import _State
from fogdist.training.fragments import _divided, layer_of
from harness import World, WorldPool, on_ranks
from test_algorithms import (
    BASES,
    DIMENSION,
    Base,
    begin,
    data,
    mixing_matrix,
    noise,
    saved,
    sequence,
    start_of,
    static,
)
from test_membership import TIMEOUT, survivors_of
from test_unequal_ranks import BY_SAMPLES, count_of, weighted
from torch import Tensor, nn
from training_cases import start

# The elements of the layers, and the fragment of each layer for each number of fragments.
SIZES = [3, 2, 2, 2, 1]
INTERLEAVED = {1: [0] * 5, 2: [0, 1, 1, 0, 1], 4: [0, 1, 2, 3, 1]}
IN_ORDER = {1: [0] * 5, 2: [0, 0, 1, 1, 1], 4: [0, 1, 2, 3, 3]}
FRAGMENTS = {"interleaved": INTERLEAVED, "in-order": IN_ORDER}
# By the number of fragments: local steps that leave room for a delay of 3 steps, and mostly are no multiple.
LOCAL_STEPS = {1: 4, 2: 7, 4: 13}
STEPS = 34
SAVED_AFTER = 5  # steps; each case with a delay of 3 has an exchange in flight then
RATE = 0.1


class Layers(nn.Module):
    """A rank's loss ``|A x - b|^2 / 2 + noise x``, where x consists of five layers."""

    def __init__(self, rank: int, begin: int) -> None:
        super().__init__()
        parts = np.split(start_of(begin), np.cumsum(SIZES)[:-1])
        self.layers = nn.ParameterList(torch.from_numpy(part.copy()) for part in parts)
        self.rank = rank
        self.A, self.b = map(torch.from_numpy, data(rank))

    def x(self) -> Tensor:
        return torch.cat(list(self.layers))

    def forward(self, step: int) -> Tensor:
        x = self.x()
        return (self.A @ x - self.b).square().sum() / 2 + torch.from_numpy(noise(self.rank, step)) @ x


@dataclasses.dataclass(frozen=True)
class Case:
    """A run: a class of fogdist.algorithms, the graph of its exchanges, and its options."""

    name: str
    graph: str
    fragments: int = 1
    delay: int = 0
    order: str = "interleaved"
    share: float = 0.5
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def local_steps(self) -> int:
        return LOCAL_STEPS[self.fragments]

    def begins(self) -> dict[int, int]:
        """Returns the fragment whose exchange begins after a number of steps."""
        H, P = self.local_steps, self.fragments
        offsets = {math.ceil((p + 1) * H / P): p for p in range(P)}
        return {first + k * H: p for first, p in offsets.items() for k in range(STEPS)}

    @property
    def by_samples(self) -> bool:
        return BY_SAMPLES in self.options


# --- the recursions -----------------------------------------------------------------------------------------

# Of one fragment: takes its columns of X, and the matrix of the round; returns what they become.
Exchange = Callable[[np.ndarray, np.ndarray], np.ndarray]


def local_sgd(case: Case, X: np.ndarray, replicas: Replicas) -> Exchange:
    return lambda X, W: W @ X


def diloco(case: Case, X: np.ndarray, replicas: Replicas) -> Exchange:
    """With torch's SGD(nesterov=True) as the outer optimizer where all ranks average."""
    outer, before, velocity = X, X, None

    def exchange(X: np.ndarray, W: np.ndarray) -> np.ndarray:
        nonlocal outer, before, velocity
        if case.graph == "all":
            delta = W @ (outer - X)
            velocity = delta if velocity is None else 0.8 * velocity + delta
            outer = outer - 0.6 * (delta + 0.8 * velocity)
        else:
            mixed = W @ (outer + 0.6 * (X - outer))
            outer, before = mixed + 0.8 * (mixed - before), mixed
        return outer

    return exchange


def gasloc(case: Case, X: np.ndarray, replicas: Replicas) -> Exchange:
    outer, before = X, X

    def exchange(X: np.ndarray, W: np.ndarray) -> np.ndarray:
        nonlocal outer, before
        v = outer + 0.6 * (X - outer)
        outer, before = W @ v + 0.8 * (v - before), v
        return outer

    return exchange


def sparse_loco(case: Case, X: np.ndarray, replicas: Replicas) -> Exchange:
    E, mixed = np.zeros_like(X), X

    def exchange(X: np.ndarray, W: np.ndarray) -> np.ndarray:
        nonlocal E, mixed
        share = 0.0 if is_exact_average(W) else 0.3
        T = replicas.H + 0.9 * E + 0.7 * (X - mixed) + share * (mixed - replicas.H)
        H = replicas.follow(T)
        E, mixed = T - H, W @ H
        if is_exact_average(W):
            replicas.H = mixed  # all merge
        return mixed

    return exchange


RECURSIONS = {"LocalSGD": local_sgd, "DiLoCo": diloco, "GASLoC": gasloc, "SparseLoCo": sparse_loco}


def reference(case: Case, size: int, lost: tuple[int, int] | None = None) -> Iterator[np.ndarray]:
    """Yields X after each step; a row holds a rank's parameters.

    Args:
        case: The run.
        size: The number of ranks.
        lost: The rank that is lost, whose row then goes its own way, and the last step that it makes. It is not in exchanges
            that begin later. Of the first of these, replicas begin anew; and in the second one those of all fragments.
    """
    X = np.stack([start_of(0 if is_together(case) else rank) for rank in range(size)])
    number_of = np.repeat(FRAGMENTS[case.order][case.fragments], SIZES)
    columns = [np.flatnonzero(number_of == p) for p in range(case.fragments)]
    coded: Any = SimpleNamespace(option={"compression": TopK(0.5, bits=2)})
    replicas = [Replicas(coded, X[:, each]) for each in columns]
    exchanges = [RECURSIONS[case.name](case, X[:, each], its) for each, its in zip(columns, replicas)]
    done, since = [0] * case.fragments, 0
    used = np.zeros((case.fragments, size))  # samples since the last exchange of each fragment
    begins, base = case.begins(), Base("momentum")
    flights: list[tuple[int, np.ndarray, np.ndarray]] = []
    for k in range(STEPS):
        G = np.stack([(A := data(r)[0]).T @ (A @ X[r] - data(r)[1]) + noise(r, k) for r in range(size)])
        X = X + base(X, G, np.full(DIMENSION, RATE))
        used += [count_of(rank, k) for rank in range(size)]
        if flights and flights[0][0] == k + 1:
            X, flights = arrived(case, X, flights), []
        p = begins.get(k + 1)
        if p is not None:
            W, chosen = matrix_of(case, size, done[p], None), [p]
            if case.by_samples:
                n = used[p]
                W = np.tile(n / n.sum(), (size, 1)) if case.graph == "all" else weighted(W, n)
                np.testing.assert_allclose(n @ W, n, rtol=0, atol=1e-12 * n.sum())
                used[p] = 0.0
            if lost and k + 1 > lost[1]:
                W, since = matrix_of(case, size, done[p], lost[0]), since + 1
                if case.name == "SparseLoCo" and since <= 2:
                    chosen = [p] if since == 1 else list(range(case.fragments))
                    for each in chosen:
                        replicas[each].begin_anew()
            for each in chosen:
                outer = exchanges[each](X[:, columns[each]], W)
                flights.append((k + 1 + case.delay, columns[each], outer))
            done[p] += 1
        if case.delay == 0 or (k + 1 == SAVED_AFTER and lost is None):
            X, flights = arrived(case, X, flights), []
        yield X


def matrix_of(case: Case, size: int, number: int, lost: int | None) -> np.ndarray:
    """Returns W of the exchange of a fragment with this number; of a static graph, also without a lost rank."""
    if lost is not None:
        living = [rank for rank in range(size) if rank != lost]
        W = np.eye(size)
        W[np.ix_(living, living)] = (
            topologies.Topology.from_graph(case.graph, static(case.graph, size)).among(living).matrix().T
        )
        return W
    return (
        np.full((size, size), 1 / size) if case.graph == "all" else mixing_matrix(case.graph, size, number).T
    )


def arrived(case: Case, X: np.ndarray, flights: list[tuple[int, np.ndarray, np.ndarray]]) -> np.ndarray:
    share = case.share if case.delay else 0.0
    X = X.copy()
    for _, columns, outer in flights:
        X[:, columns] = share * X[:, columns] + (1 - share) * outer
    return X


def is_together(case: Case) -> bool:
    """Returns whether the ranks begin alike: the published DiLoCo and SparseLoCo do."""
    return case.graph == "all" or case.name == "SparseLoCo"


# --- the ranks ----------------------------------------------------------------------------------------------

OUTER = (("outer_lr", 0.6), ("outer_momentum", 0.8))
SPARSE = (("compression", TopK(0.5, bits=2)), ("outer_lr", 0.7), ("error_decay", 0.9), ("gamma", 0.3))
OPTIONS = {"DiLoCo": OUTER, "GASLoC": OUTER, "SparseLoCo": SPARSE}


def make(case: Case, rank: int, begin: int | None = None, **more: Any) -> tuple[Layers, Any]:
    """Returns a rank's model and algorithm."""
    size = fogdist.size()
    model = Layers(rank, (0 if is_together(case) else rank) if begin is None else begin)
    groups = [{"params": list(model.layers), "lr": RATE}]
    graph: Any = sequence(case.graph, size) or algorithms.Neighbors()
    if case.graph == "all":
        graph = None if case.name == "SparseLoCo" else GlobalAverage()
    options = {"local_steps": case.local_steps, "broadcast": False, **dict(case.options), **more}
    return model, getattr(algorithms, case.name)(
        BASES["momentum"](groups),
        model,
        topology=graph,
        fragments=case.fragments,
        fragment_order=case.order,
        delay=case.delay,
        local_share=case.share,
        **options,
    )


def advance(model: Layers, optimizer: Any, steps: range) -> list[np.ndarray]:
    path = []
    for k in steps:
        optimizer.zero_grad()
        model(k).backward()
        if optimizer.by_samples:
            optimizer.samples = count_of(model.rank, k)
        optimizer.step()
        path.append(model.x().detach().numpy().copy())
    return path


def train(case: Case) -> np.ndarray:
    """Returns a rank's trajectory, after a check that a run from a state dict is the same bit for bit."""
    rank, _ = begin(case.graph)
    parts = make(case, rank)
    path = advance(*parts, range(SAVED_AFTER))
    parts[1].settle()
    state = saved([each.state_dict() for each in parts])
    path[-1] = parts[0].x().detach().numpy().copy()
    later = advance(*parts, range(SAVED_AFTER, STEPS))
    restored = make(case, rank, begin=100)
    advance(*restored, range(SAVED_AFTER))  # its exchange in flight is dropped
    for each, value in zip(restored, state, strict=True):
        each.load_state_dict(value)
    again = advance(*restored, range(SAVED_AFTER, STEPS))
    np.testing.assert_array_equal(np.stack(again), np.stack(later), err_msg=str(case))
    return np.stack([*path, *later])


def train_each(cases: list[Case]) -> list[np.ndarray]:
    return [train(case) for case in cases]


def cases_of(name: str) -> list[Case]:
    neighbors = "ring" if name == "SparseLoCo" else "pairs"
    grid = itertools.product((neighbors, "all"), FRAGMENTS["interleaved"], (0, 1, 3))
    cases = [Case(name, graph, count, delay, options=OPTIONS.get(name, ())) for graph, count, delay in grid]
    if name != "SparseLoCo":
        weighing = [each for each in cases if each.delay == 3 and each.fragments > 1]
        cases += [dataclasses.replace(each, options=(*each.options, BY_SAMPLES)) for each in weighing]
    # One arrives in the step in which the next one begins.
    cases.append(dataclasses.replace(cases[0], delay=4))
    return [*cases, dataclasses.replace(cases[17], order="in-order", share=0.2)]


@pytest.mark.parametrize("name", RECURSIONS)
def test_trajectories(worlds: WorldPool, name: str) -> None:
    size, cases = 4, cases_of(name)
    for case, got in zip(cases, zip(*worlds(size).run(train_each, cases), strict=True), strict=True):
        expected = np.stack(list(reference(case, size)))
        scale = max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(
            np.stack(got, axis=1), expected, rtol=0, atol=1e-12 * scale, err_msg=str(case)
        )


@on_ranks(3, graph=["all", "ring"])
def test_a_slow_rank_makes_fewer_steps(graph: str) -> None:
    """A fragment weighs by the samples since its own last exchange, and `average` by those of the next one."""
    rank, size = begin(graph)
    case, local, rounds = Case("LocalSGD", graph, 2, options=(BY_SAMPLES,)), [7, 4, 6], 7
    model, optimizer = make(case, rank, begin=rank, local_steps=local[rank])
    made = np.array([[-(-k * H // 2) for H in local] for k in range(rounds + 1)])  # steps before a round
    advance(model, optimizer, range(made[-1, rank]))
    assert optimizer.rounds == rounds
    X, bases = np.stack([start_of(r) for r in range(size)]), [Base("momentum") for _ in range(size)]
    columns = [np.flatnonzero(np.repeat(INTERLEAVED[2], SIZES) == p) for p in range(2)]

    def move(r: int, steps: range) -> float:
        for k in steps:
            A, b = data(r)
            X[r] += bases[r](X[r], A.T @ (A @ X[r] - b) + noise(r, k), np.full(DIMENSION, RATE))
        return float(sum(count_of(r, k) for k in steps))

    used = np.zeros((rounds, size))
    for number, (first, last) in enumerate(itertools.pairwise(made)):
        used[number] = [move(r, range(first[r], last[r])) for r in range(size)]
        n = used[max(0, number - 1) : number + 1].sum(axis=0)
        W = np.tile(n / n.sum(), (size, 1)) if graph == "all" else weighted(mixing_matrix(graph, size, 0), n)
        X[:, columns[number % 2]] = W @ X[:, columns[number % 2]]
    np.testing.assert_allclose(model.x().detach().numpy(), X[rank], rtol=0, atol=1e-12)
    more = range(made[-1, rank], made[-1, rank] + rank)  # some ranks are between two rounds
    advance(model, optimizer, more)
    for r in range(size):
        after = move(r, range(made[-1, r], made[-1, r] + r))
        n[r] = used[-1, r] + (after if r else used[-2, r])
    optimizer.average()
    np.testing.assert_allclose(model.x().detach().numpy(), n / n.sum() @ X, rtol=0, atol=1e-12)
    optimizer.reschedule(local_steps=8 + rank, delay=1)  # these, and the steps, may differ


# --- the form without fragments -----------------------------------------------------------------------------


class Plain(Algorithm):
    """The recursions as the frame has them: an exchange of the whole model within the step."""

    def combine(self) -> None:
        self.mix(self.values, in_place=True)


class PlainDiLoCo(Algorithm):
    state_vectors = ("anchor", "previous")

    def initial(self, name: str) -> list[Tensor]:
        return self.buckets.copies()

    def combine(self) -> None:
        anchors, befores = self.vectors["anchor"], self.vectors["previous"]
        mixed = self.mix([a.lerp(x, 0.6) for a, x in zip(anchors, self.values, strict=True)])
        for x, v, before in zip(self.values, mixed, befores, strict=True):
            x.copy_(torch.sub(v, before.sub_(v), alpha=0.8))
        self.vectors = {"anchor": self.buckets.copies(), "previous": mixed}


@on_ranks(3, name=["LocalSGD", "DiLoCo"], graph=["all", "pairs"])
def test_one_fragment_without_delay_is_the_plain_form(name: str, graph: str) -> None:
    """Bit for bit."""
    rank, size = begin(graph)
    case = Case(name, graph, options=OPTIONS.get(name, ()))
    model = Layers(rank, 0 if is_together(case) else rank)
    optimizer = BASES["momentum"]([{"params": list(model.layers), "lr": RATE}])
    topology: Any = GlobalAverage() if graph == "all" else sequence(graph, size)
    kind = PlainDiLoCo if name == "DiLoCo" else Plain
    plain = kind(optimizer, model, topology=topology, local_steps=case.local_steps, broadcast=False)
    expected = advance(model, plain, range(STEPS))
    np.testing.assert_array_equal(advance(*make(case, rank), range(STEPS)), expected)


# --- what ends an exchange, and what changes meanwhile ------------------------------------------------------

STREAMING = Case("DiLoCo", "pairs", 2, 3, options=OUTER)


def in_flight(case: Case, rank: int, **more: Any) -> tuple[Layers, Any]:
    """Returns parts with an exchange in flight."""
    parts = make(case, rank, **more)
    advance(*parts, range(SAVED_AFTER))
    assert parts[1]._in_flight is not None
    return parts


@on_ranks(3)
def test_the_end_of_training_has_what_is_in_flight() -> None:
    rank, _ = begin("pairs")
    ends = {}
    for how in ("settle", "average", "close", "with", "no end"):
        model, optimizer = in_flight(STREAMING, rank)
        if how == "with":
            with optimizer:
                pass
        elif how != "no end":
            getattr(optimizer, how)()
        ends[how] = model.x().detach().clone()
        optimizer.close()
    assert torch.equal(ends["settle"], ends["close"]) and torch.equal(ends["settle"], ends["with"])
    assert not torch.equal(ends["settle"], ends["no end"])
    mean = ends["settle"]
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    torch.testing.assert_close(ends["average"], mean, rtol=0, atol=1e-14)


@on_ranks(2)
def test_an_exchange_in_flight_that_another_optimizer_or_a_shutdown_ends() -> None:
    rank, _ = begin("pairs")
    model, first = in_flight(STREAMING, rank)
    second = algorithms.LocalSGD(torch.optim.SGD(model.parameters(), lr=RATE), model)
    with pytest.raises(RuntimeError, match="DiLoCo .* was replaced"):
        first.step()
    kept = model.x().detach().clone()
    first.settle()  # it is forgotten
    assert torch.equal(model.x(), kept)
    advance(model, second, range(8))
    model, optimizer = in_flight(STREAMING, rank)
    fogdist.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        advance(model, optimizer, range(STREAMING.delay))
    assert model.x().isfinite().all()


@on_ranks(2)
def test_parameters_that_are_frozen_during_an_exchange() -> None:
    """The exchange ends first: what is frozen has its result too."""
    rank, _ = begin("pairs")
    settled, changed = in_flight(STREAMING, rank), in_flight(STREAMING, rank)
    settled[1].settle()
    for model, optimizer in (settled, changed):
        for layer in model.layers[:2]:
            layer.requires_grad_(False)
        advance(model, optimizer, range(SAVED_AFTER, STEPS))
    assert all(map(torch.equal, settled[0].layers[:2], changed[0].layers[:2]))
    assert not torch.equal(settled[0].layers[2], changed[0].layers[2])
    changed[0].layers[2 + rank].requires_grad_(False)
    with pytest.raises(ValueError, match="model must be the same on all ranks"):
        advance(*changed, range(1))


@on_ranks(3)
def test_the_schedule_changes_between_two_steps() -> None:
    """Where the first steps make no exchange, training with the new schedule is that with it from the beginning."""
    rank, _ = begin("pairs")
    later = make(dataclasses.replace(STREAMING, fragments=4), rank)
    expected = advance(*later, range(3)) + advance(*later, range(3, STEPS))
    model, optimizer = make(STREAMING, rank)
    path = advance(model, optimizer, range(3))
    optimizer.reschedule(local_steps=LOCAL_STEPS[4], fragments=4)
    np.testing.assert_array_equal(path + advance(model, optimizer, range(3, STEPS)), expected)


@on_ranks(3)
def test_a_change_of_the_schedule_ends_the_exchange_in_flight() -> None:
    """As the schedule was when it began. What is not given stays, and with what is wrong nothing changes."""
    rank, _ = begin("pairs")
    for changed in (
        {"delay": 0},
        {"local_steps": 13},
        {"fragments": 1},
        {"local_steps": 1, "fragments": 1, "delay": 0},
    ):
        model, optimizer = in_flight(STREAMING, rank)
        other, settled = in_flight(STREAMING, rank)
        settled.settle()
        for name, value in changed.items():
            setattr(settled, name, value)
        before = optimizer.rounds
        optimizer.reschedule(**changed)
        assert optimizer._in_flight is None and optimizer.rounds == before
        assert optimizer.round_schedule() == {"local_steps": 7, "fragments": 2, "delay": 3, **changed}
        steps = range(SAVED_AFTER, STEPS)
        np.testing.assert_array_equal(advance(model, optimizer, steps), advance(other, settled, steps))
    model, optimizer = in_flight(STREAMING, rank)
    with pytest.raises(ValueError, match="delay must be .* at most 3, .* got 4"):
        optimizer.reschedule(delay=4)
    for wrong in ({"delay": rank}, {"local_steps": 8 + rank}, {"fragments": 1 + (rank == 1)}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be the same on all ranks, got"):
            optimizer.reschedule(**wrong)
    if rank == 1:
        optimizer.steps += 1
    with pytest.raises(ValueError, match="number of steps must be the same on all ranks, got 5 to 6"):
        optimizer.reschedule(delay=0)
    assert optimizer.round_schedule() == {"local_steps": 7, "fragments": 2, "delay": 3}
    assert optimizer._in_flight is not None


@on_ranks(3, by_samples=[False, True])
def test_a_process_that_joins_takes_the_schedule(by_samples: bool) -> None:
    """It is made as the ranks were. With samples, the number of local steps is each rank's own."""
    rank, _ = begin("pairs")
    model, optimizer = in_flight(STREAMING, rank, by_samples=by_samples)
    optimizer.reschedule(local_steps=9, fragments=4, delay=2)
    other, joining = make(STREAMING, rank, by_samples=by_samples, begin=100)
    advance(model, optimizer, range(SAVED_AFTER, 20))
    optimizer.settle()
    _State(joining).load(saved(_State(optimizer).save()))
    _State(joining).set_counts(json.loads(json.dumps(_State(optimizer).counts())))
    assert joining.buckets.group_of == optimizer.buckets.group_of  # at once, as its first exchange follows
    if by_samples:
        assert joining.round_schedule() == {"fragments": 4, "delay": 2} and joining.local_steps == 7
        assert joining.is_round_due() and joining.steps >= optimizer.steps == 20
        assert joining.own_weight > 1.0
        joining._participant = Mock(**{"enter.return_value": True})
        assert joining.enter() and joining.own_weight < 1.0  # what the other rank has used is not its own
        return
    assert joining.round_schedule() == {"local_steps": 9, "fragments": 4, "delay": 2}
    steps = range(20, STEPS)
    np.testing.assert_array_equal(advance(other, joining, steps), advance(model, optimizer, steps))


@on_ranks(3)
def test_an_exchange_that_is_due_ends_the_one_before() -> None:
    """Where the user sets fewer local steps than the delay."""
    rank, _ = begin("pairs")
    model, optimizer = in_flight(STREAMING, rank)
    other, settled = in_flight(STREAMING, rank)
    optimizer.local_steps = 2
    for parts in ((model, optimizer), (other, settled)):
        advance(*parts, range(SAVED_AFTER, SAVED_AFTER + 1))
    settled.settle()
    assert (optimizer.rounds, settled.rounds) == (2, 1)
    assert torch.equal(model.x(), other.x())


@on_ranks(3)
def test_ranks_take_turns_with_codecs() -> None:
    """Fragments are compressed like whole models: by a codec that loses little, with nearly the same values."""
    rank, _ = begin("ring")
    case = Case("DiLoCo", "ring", 2, 3, options=OUTER)
    exact = advance(*make(case, rank), range(STEPS))
    close = advance(*make(case, rank, compression=Int8(block=8)), range(STEPS))
    difference = np.abs(np.stack(exact) - np.stack(close)).max()
    assert 0.0 < difference < 0.1, difference


# --- losses -------------------------------------------------------------------------------------------------


def lose_a_rank(case: Case, victim: int, at: int) -> tuple[membership.Membership, np.ndarray]:
    rank, _ = start(topologies.fully_connected)
    model, optimizer = make(case, rank, on_loss="continue")
    path = []
    for step in range(STEPS):
        if (rank, step) == (victim, at):
            time.sleep(0.2)  # the others come as far as they can without it
            os.kill(os.getpid(), signal.SIGKILL)
        path += advance(model, optimizer, range(step, step + 1))
    optimizer.average()
    return membership.current(), np.stack([*path, model.x().detach().numpy()])


@pytest.mark.parametrize("name", RECURSIONS)
def test_a_rank_is_lost_while_a_fragment_travels(new_world: Callable[..., World], name: str) -> None:
    """No rank makes an exchange without all others, so it is known which one the loss is in: that which begins after step 7.

    The one that began after step 4, and has arrived from all ranks, counts, although it is applied after the same step.
    """
    victim, at, size = 1, 5, 4
    case = Case(name, "full", 2, 3, options=OPTIONS.get(name, ()))
    outcomes = new_world(size, timeout=TIMEOUT).run_raw(lose_a_rank, case, victim, at)
    expected = np.stack(list(reference(case, size, (victim, at))))
    averages = []
    for outcome in survivors_of(outcomes, {victim: 0.0}):
        members, path = outcome.value
        assert members.living == (0, 2, 3)
        np.testing.assert_allclose(
            path[:-1], expected[:, outcome.rank], rtol=0, atol=1e-12 * np.abs(expected).max()
        )
        averages.append(path[-1])
    assert np.ptp(averages, axis=0).max() == 0.0


# --- fragments ----------------------------------------------------------------------------------------------


def test_layers_have_the_names_up_to_the_first_number() -> None:
    names = {
        "blocks.3.attention.weight": "blocks.3",
        "layer1.0.conv1.weight": "layer1.0",
        "module.head.weight": "module.head",
        "layers.2": "layers.2",
        "bias": "",
    }
    assert {name: layer_of(name) for name in names} == names


def test_fragments_are_about_equally_large() -> None:
    """And none is without a layer, whatever the sizes."""
    rows = [
        ([5, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1]),
        ([1, 1, 1, 5], [0, 1, 0, 1], [0, 0, 0, 1]),
        ([3, 2, 3], [0, 1, 1], [0, 0, 1]),
        ([4, 4, 4, 4], [0, 1, 0, 1], [0, 0, 1, 1]),
        ([2, 2, 2, 3, 3], [0, 1, 0, 1, 0], [0, 0, 0, 1, 1]),
    ]
    for sizes, interleaved, in_order in rows:
        assert _divided(sizes, 2, "interleaved") == interleaved, sizes
        assert _divided(sizes, 2, "in-order") == in_order, sizes
    for *sizes, count in itertools.product([0, 1, 4], [0, 1, 4], [0, 1, 4], [0, 1, 4], [1, 2, 3, 4]):
        assert set(_divided(sizes, count, "interleaved")) == set(range(count)), (sizes, count)
        numbers = _divided(sizes, count, "in-order")
        assert set(numbers) == set(range(count)) and numbers == sorted(numbers), (sizes, count)


@on_ranks(2, order=list(FRAGMENTS))
def test_each_layer_is_in_one_fragment(order: str) -> None:
    rank, _ = start()
    for count in FRAGMENTS[order]:
        model, optimizer = make(Case("LocalSGD", "all", count, order=order), rank)
        buckets: FlatBuckets = optimizer.buckets
        marked = [torch.full_like(flat, number) for number, flat in zip(buckets.group_of, buckets.flats)]
        numbers = {id(parameter): piece for parameter, piece in buckets.pieces(marked)}
        for layer, number in zip(model.layers, FRAGMENTS[order][count], strict=True):
            assert (numbers[id(layer)] == number).all(), (order, count)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"fragments": 6, "local_steps": 8},
        ValueError,
        "fragments must be at most the number of layers, 5, got 6",
    ),
    ({"fragments": 4, "local_steps": 3}, ValueError, "fragments must be at most local_steps, 3, got 4"),
    ({"fragments": 0}, ValueError, "fragments must be at least 1, got 0"),
    ({"fragments": 2.0}, TypeError, "fragments must be an int, got float"),
    ({"delay": -1}, ValueError, "delay must be at least 0 and at most 8, .* got -1"),
    ({"fragments": 3, "delay": 3, "local_steps": 8}, ValueError, "delay must be .* at most 2, .* got 3"),
    ({"delay": True}, TypeError, "delay must be an int, got bool"),
    ({"local_share": 1.0}, ValueError, "local_share must be at least 0 and below 1, got 1.0"),
    ({"local_share": "half"}, TypeError, "local_share must be a number, got str"),
    ({"fragment_order": "random"}, ValueError, "fragment_order must be .*random"),
    ({"local_steps": 0}, ValueError, "local_steps must be at least 1, got 0"),
]


@on_ranks(2)
def test_wrong_arguments() -> None:
    """One rank alone raises them, so nothing was sent; ranks that disagree raise alike."""
    rank, _ = start()
    model = Layers(rank, 0)

    def make(**options: Any) -> Any:
        return algorithms.LocalSGD(torch.optim.SGD(model.parameters(), lr=RATE), model, **options)

    for options, kind, message in WRONG if rank == 1 else ():
        with pytest.raises(kind, match=message):
            make(**options)
    dist.barrier()
    for options in ({"fragments": 1 + rank}, {"delay": rank}, {"local_share": 0.25 * rank}):
        with pytest.raises(ValueError, match="same on all ranks"):
            make(**options)
    orders: Any = list(FRAGMENTS)
    with pytest.raises(ValueError, match="same on all ranks"):
        make(fragments=2, fragment_order=orders[rank])
    make(fragments=2, delay=4).close()
    model.requires_grad_(False)
    make().close()
