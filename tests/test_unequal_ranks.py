"""Tests of ranks that differ: averages weighted by samples, against NumPy, and batches of which each rank gets a part by its speed."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import time
from collections import deque
from typing import Any

import fogdist
import numpy as np
import pytest
import torch
import torch.distributed as dist
from fogdist import algorithms
from fogdist import topology as topologies
from fogdist.compression import Int8
from fogdist.training.algorithm import _State
from fogdist.training.shared_batches import parts
from harness import on_ranks
from test_algorithms import (
    OUTER,
    STEPS,
    Case,
    Quadratic,
    Simulation,
    begin,
    check,
    data,
    make,
    mixing_matrix,
    noise,
    reference,
    saved,
    start_of,
    step_of,
)
from training_cases import start

SIZE = 4
BY_SAMPLES = ("by_samples", True)


# --- averages by samples ------------------------------------------------------------------------------------


def count_of(rank: int, step: int) -> int:
    """Returns how many samples a rank uses in a step; some ranks have none in some steps."""
    return [0, 3, 8, 1, 5][(3 * rank + 2 * step) % 5]


def weighted(W: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Returns the matrix of weighted averages, a row for each receiver, whose left eigenvector is n."""
    M = np.zeros_like(W)
    for i, j in itertools.permutations(range(len(n)), 2):
        M[i, j] = W[j, i] * (1.0 if n[i] <= n[j] else n[j] / n[i])
    return M + np.diag(1.0 - M.sum(axis=1))


class ByRank(Simulation):
    """A simulation whose averages weigh by the samples since the last exchange."""

    def used(self, step: int) -> np.ndarray:
        """Returns the samples that count in the average of a step: if it comes before the gradient, without that."""
        end = step + (self.option.get("order", "atc") == "atc")
        steps = range(max(0, end - self.every), end)
        return np.array([sum(count_of(rank, k) for k in steps) for rank in range(self.size)], dtype=float)

    def mix(self, step: int) -> np.ndarray:
        if not self.is_due(step):
            return np.eye(self.size)
        n = self.used(step)
        W = mixing_matrix(self.case.graph, self.size, step // self.every)
        M = weighted(W, n)
        np.testing.assert_allclose(n @ M, n, rtol=0, atol=1e-12 * n.sum())  # keeps the weighted mean
        return M

    def is_due(self, step: int) -> bool:
        self.step = step
        return super().is_due(step)

    def mean(self, X: np.ndarray) -> np.ndarray:
        return np.broadcast_to(np.average(X, axis=0, weights=self.used(self.step)), X.shape)


CASES = [
    *(
        Case("DecentralizedSGD", g, "momentum", (("order", o), BY_SAMPLES))
        for o in ("atc", "awc", "cta")
        for g in ("ring", "pairs")
    ),
    *(
        Case("DecentralizedSGD", "star", "adamw", (("order", o), BY_SAMPLES), every=3)
        for o in ("atc", "awc", "cta")
    ),
    Case("LocalSGD", "all", "adamw", (BY_SAMPLES,), every=4),
    Case("LocalSGD", "all", "momentum", (BY_SAMPLES,), decays=True),
    Case("DiLoCo", "all", "adamw", (*OUTER, BY_SAMPLES), every=3, together=True),
    Case("DiLoCo", "base", "sgd", (*OUTER, BY_SAMPLES), every=3),
    Case("GASLoC", "pairs", "sgd", (*OUTER, BY_SAMPLES), every=3),
    Case("DecentralizedAdamW", "ring", "adamw", (BY_SAMPLES,)),
]


def train(case: Case) -> np.ndarray:
    """Returns a rank's trajectory, after a check that it goes on from a state dict, also between two rounds."""
    rank, _ = begin(case.graph)
    parts_of = make(case, rank)

    def advance(model: Quadratic, optimizer: Any, scheduler: Any, steps: range) -> list[np.ndarray]:
        path = []
        for k in steps:
            optimizer.samples = count_of(rank, k)
            step_of(model, optimizer, k)
            scheduler.step()
            path.append(model.x().detach().numpy().copy())
        return path

    path = advance(*parts_of, range(5))
    state = saved([each.state_dict() for each in parts_of])
    later = advance(*parts_of, range(5, STEPS))
    restored = make(case, rank, begin=100)
    advance(*restored, range(3))
    for each, value in zip(restored, state, strict=True):
        each.load_state_dict(copy.deepcopy(value))
    np.testing.assert_array_equal(np.stack(advance(*restored, range(5, STEPS))), np.stack(later), str(case))
    return np.stack([*path, *later])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_weighted_trajectories(worlds: Any, case: Case) -> None:
    got = worlds(SIZE).run(train, case)
    check(np.stack(got, axis=1), reference(case, SIZE, ByRank), case)


def train_equally(case: Case) -> np.ndarray:
    rank, _ = begin(case.graph)
    model, optimizer, _ = make(case, rank)
    for k in range(STEPS):
        if optimizer.by_samples:
            optimizer.samples = 7
        step_of(model, optimizer, k)
    return model.x().detach().numpy().copy()


@pytest.mark.parametrize("case", [CASES[1], CASES[9]], ids=str)
def test_equal_samples_change_no_bit(worlds: Any, case: Case) -> None:
    plain = dataclasses.replace(case, options=tuple(each for each in case.options if each != BY_SAMPLES))
    of_samples = worlds(SIZE).run(train_equally, case)
    np.testing.assert_array_equal(of_samples, worlds(SIZE).run(train_equally, plain))


@on_ranks(SIZE, topology=[None, "ring"])
def test_a_slow_rank_makes_fewer_steps(topology: str | None) -> None:
    rank, _ = start()
    local, rounds = [6, 6, 2, 4], 5
    model = Quadratic(rank, 0)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"topology": topology, "local_steps": local[rank], "by_samples": True}
    optimizer = algorithms.LocalSGD(base, model, broadcast=False, **options)
    optimizer.samples = 8
    for k in range(rounds * local[rank]):
        step_of(model, optimizer, k)
    assert (optimizer.steps, optimizer.rounds) == (rounds * local[rank], rounds)
    n = 8.0 * np.array(local)
    X = np.tile(start_of(0), (SIZE, 1))
    for number in range(rounds):
        for r, (A, b) in enumerate(map(data, range(SIZE))):
            for k in range(number * local[r], (number + 1) * local[r]):
                X[r] -= 0.1 * (A.T @ (A @ X[r] - b) + noise(r, k))
        W = topologies.mixing_matrix(topologies.ring(SIZE))
        X = np.tile(n / n.sum() @ X, (SIZE, 1)) if topology is None else weighted(W, n) @ X
    np.testing.assert_allclose(model.x().detach().numpy(), X[rank], rtol=0, atol=1e-12)
    optimizer.average()
    np.testing.assert_allclose(model.x().detach().numpy(), n / n.sum() @ X, rtol=0, atol=1e-12)


@on_ranks(SIZE, codec=[None, Int8(block=8)])
def test_gossip_keeps_the_weighted_mean(codec: Any) -> None:
    """Without learning, also where a codec loses much; and a rank without samples takes, and gives nothing."""
    rank, _ = start()
    n = np.array([5.0, 0.0, 2.0, 9.0])
    model = Quadratic(rank, rank)
    base = torch.optim.SGD(model.parameters(), lr=0.0)
    options = {"topology": "random-matching", "compression": codec, "by_samples": True}
    optimizer = algorithms.DecentralizedSGD(base, model, broadcast=False, **options)
    optimizer.samples = n[rank]
    mean = n / n.sum() @ np.stack([start_of(r) for r in range(SIZE)])
    for k in range(40):
        step_of(model, optimizer, k)
        X: list[Any] = [None] * SIZE
        dist.all_gather_object(X, model.x().detach().numpy())
        np.testing.assert_allclose(n / n.sum() @ np.stack(X), mean, rtol=0, atol=1e-12)
    np.testing.assert_allclose(X[1], mean, rtol=0, atol=1e-2)
    optimizer.samples = 0  # on all ranks: all weigh the same
    for k in range(2):
        step_of(model, optimizer, k)
    optimizer.average()
    assert np.isfinite(model.x().detach().numpy()).all()
    optimizer.close()
    model = Quadratic(rank, rank)
    base = torch.optim.SGD(model.parameters(), lr=0.0)
    everyone = algorithms.LocalSGD(base, model, local_steps=1, by_samples=True, broadcast=False)
    everyone.samples = 0
    step_of(model, everyone, 0)
    plain = np.stack([start_of(r) for r in range(SIZE)]).mean(axis=0)
    np.testing.assert_allclose(model.x().detach().numpy(), plain, rtol=0, atol=1e-12)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("DecentralizedSGD", {"topology": "one-peer-exp2"}, "topology must be symmetric .*'one-peer-exp2'"),
    ("DecentralizedSGD", {}, "topology must be symmetric"),
    ("DecentralizedSGD", {"topology": algorithms.Machines()}, r"by_samples .*Machines\(\)"),
    ("DecentralizedSGD", {"topology": "ring", "patience": 5.0}, "by_samples .*patience"),
    *(
        (name, {"topology": "ring"}, f"by_samples must be False for {name}")
        for name in ("PushSumSGD", "GradientTracking", "ExactDiffusion", "WinPut", "AsynchronousGossip")
    ),
    ("SparseLoCo", {}, "by_samples must be False for SparseLoCo"),
    ("ChocoSGD", {"topology": "ring", "compression": Int8(), "gamma": 0.5}, "by_samples .*ChocoSGD"),
]


@on_ranks(SIZE)
def test_what_cannot_be_weighted_is_refused() -> None:
    """On all ranks, before anything is sent."""
    rank, _ = start()
    model = Quadratic(rank, 0)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    for name, options, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            getattr(algorithms, name)(base, model, by_samples=True, **options)
    with pytest.raises(ValueError, match=r"(?s)ranks \[0\] and \[1, 2, 3\].*by_samples=True"):
        algorithms.LocalSGD(base, model, by_samples=rank == 0)
    optimizer: Any = algorithms.LocalSGD(base, model, local_steps=1, by_samples=True)
    for value, error in [(None, ValueError), (-1, ValueError), (float("nan"), ValueError), ("8", TypeError)]:
        optimizer.samples = value
        with pytest.raises(error, match="samples must be"):
            step_of(model, optimizer, 0)
    assert (optimizer.steps, optimizer.rounds) == (0, 0)
    optimizer.close()
    fogdist.set_topology("ring")
    optimizer = algorithms.DecentralizedSGD(base, model, by_samples=True)
    optimizer.samples = 1
    step_of(model, optimizer, 0)
    optimizer.self_weight, optimizer.src_weights = 1.0, {}
    with pytest.raises(ValueError, match="weights of a step"):
        step_of(model, optimizer, 1)
    optimizer.self_weight = optimizer.src_weights = None
    fogdist.set_topology(topologies.exponential(SIZE))
    with pytest.raises(ValueError, match="topology must be symmetric"):
        step_of(model, optimizer, 1)


# --- batches by speed ---------------------------------------------------------------------------------------


def test_parts_are_in_proportion_and_within_their_bounds() -> None:
    assert parts(256, (1, 1, 1, 1), 1, 256) == [64] * 4
    assert parts(10, (2, 1, 2), 1, 10) == [4, 2, 4]
    assert parts(10, (2, 0, 2), 1, 10) == [5, 0, 5]
    assert parts(10, (98, 1, 1), 2, 10) == [6, 2, 2]
    assert parts(10, (98, 1, 1), 1, 5) == [5, 3, 2]
    assert parts(10, (1, 1, 1), 1, 3) == [3, 3, 3]  # the rest is left
    assert parts(4, (5, 5, 1), 2, 10) == [2, 1, 1]  # not enough for all
    random = np.random.default_rng(5)
    for _ in range(200):
        ranks, total = int(random.integers(1, 9)), int(random.integers(9, 400))
        shares = tuple(int(share) for share in random.integers(1, 1000, ranks))
        sizes = np.array(parts(total, shares, 0, total))
        ideal = total * np.array(shares) / sum(shares)
        assert sizes.sum() == total and np.abs(sizes - ideal).max() < 1.5
        smallest, largest = total // ranks // 2, -(-total // ranks) + 3
        bounded = np.array(parts(total, shares, smallest, largest))
        assert bounded.sum() == total and smallest <= bounded.min() and bounded.max() <= largest


LENGTH, BATCH, EVERY = 230, 32, 3
PER_EPOCH = 8


def make_batches(rank: int, **options: Any) -> tuple[Quadratic, Any, fogdist.SharedBatches]:
    model = Quadratic(rank, 0)
    base = torch.optim.SGD(model.parameters(), lr=0.01)
    chosen = {"order": "atc"} | options.pop("algorithm", {})
    optimizer = algorithms.DecentralizedSGD(base, model, topology="ring", by_samples=True, **chosen)
    return model, optimizer, fogdist.SharedBatches(optimizer, LENGTH, BATCH, every=EVERY, **options)


def gathered(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


@on_ranks(3, order=["atc", "awc"], ahead=[0, 2])
def test_each_sample_is_used_once_by_a_rank_as_fast_as_its_part(order: str, ahead: int) -> None:
    """Rank 1 needs three times as long for a sample; a loader with workers draws some batches ahead."""
    rank, size = start()
    model, optimizer, batches = make_batches(rank, smallest=2, algorithm={"order": order})
    assert len(batches) == PER_EPOCH
    sizes = []
    for epoch in range(3):
        used: list[int] = []
        drawn: deque[list[int]] = deque()
        source = iter(batches)
        drawn.extend(itertools.islice(source, ahead))
        while drawn or ahead == 0:
            drawn.extend(itertools.islice(source, 1))
            if not drawn:
                break
            part = drawn.popleft()
            time.sleep(0.0006 * len(part) * (3 if rank == 1 else 1))
            assert optimizer._samples_of_step() == len(part)
            step_of(model, optimizer, optimizer.steps)
            used += part
            sizes.append(len(part))
        of_all = gathered(used)
        assert sorted(itertools.chain(*of_all)) == list(range(LENGTH)), epoch
        assert optimizer.steps == PER_EPOCH * (epoch + 1)
    every = np.array(gathered(sizes))
    totals = every.sum(axis=0)
    assert set(totals) <= {LENGTH // PER_EPOCH, LENGTH // PER_EPOCH + 1}
    assert np.ptp(every[:, 0]) <= 1
    # In proportion 3 : 1 : 3 there are 4 of 29.
    assert every[1, -PER_EPOCH:].max() <= 7 and every[1].min() >= 2, every
    assert min(every[0, -1], every[2, -1]) >= 10, every
    # Shuffled anew in each epoch, and the ranks know the same shares.
    assert batches._part(0) != sorted(batches._part(0))
    assert gathered(optimizer.shares) == [optimizer.shares] * size


@on_ranks(2)
def test_a_loader_with_worker_processes() -> None:
    """They draw batches ahead, with the parts that are known then."""
    rank, _ = start()
    model, optimizer, batches = make_batches(rank)
    loader: Any = torch.utils.data.DataLoader(range(LENGTH), batch_sampler=batches, num_workers=2)  # type: ignore[arg-type]
    for epoch in range(2):
        used: list[int] = []
        for part in loader:
            assert optimizer._samples_of_step() == len(part)
            step_of(model, optimizer, optimizer.steps)
            used += part.tolist()
        assert sorted(itertools.chain(*gathered(used))) == list(range(LENGTH)), epoch
    assert len(optimizer.shares) > 0


@on_ranks(3)
def test_the_position_in_the_data_goes_with_the_optimizer() -> None:
    rank, _ = start()

    def advance(model: Quadratic, optimizer: Any, batches: Any, steps: int) -> list[list[int]]:
        path = []
        while len(path) < steps:
            for part in batches:
                path.append(part)
                step_of(model, optimizer, optimizer.steps)
                if len(path) == steps:
                    break
        return path

    made = make_batches(rank)
    first = advance(*made, 11)
    state = saved(made[1].state_dict())
    optimizer = made[1]
    optimizer.batches._every = 1000  # the speeds differ from now on
    rest = advance(*made, 10)
    again = make_batches(rank)
    again[1].load_state_dict(state)
    again[1].batches._every = 1000
    assert again[1].shares == state["param_groups"][0]["fog_shares"] != []
    assert advance(*again, 10) == rest
    whole = gathered((first + rest)[: 2 * PER_EPOCH])
    for epoch in range(2):
        of_epoch = [part[epoch * PER_EPOCH : (epoch + 1) * PER_EPOCH] for part in whole]
        assert sorted(itertools.chain(*itertools.chain(*of_epoch))) == list(range(LENGTH))
    # A new loop begins at the step of the optimizer, whatever the last one had drawn.
    source = iter(again[2])
    drawn = [next(source) for _ in range(3)]
    assert next(iter(again[2])) == drawn[0]


@on_ranks(2)
def test_what_a_process_that_joins_is_told() -> None:
    """The parts, which the ranks may have changed since they sent their state; and a step in which its own round is due."""
    rank, _ = start()
    _, optimizer, _ = make_batches(rank)
    optimizer.steps, optimizer.rounds = 7, 2
    optimizer.shares = [[0, *range(12)], [9, *range(20, 32)]]
    told = json.loads(json.dumps(_State(optimizer).counts(), sort_keys=True))
    _, joining, batches = make_batches(rank, algorithm={"local_steps": 5})
    _State(joining).set_counts(told)
    assert (joining.steps, joining.rounds) == (9, 2) and joining.is_round_due()
    assert joining.shares == optimizer.shares
    assert batches._rounds == 2
    _State(joining).set_counts({"steps": 1, "rounds": 1, "shares": 0})
    assert (joining.steps, joining.shares) == (4, [])


@on_ranks(2)
def test_wrong_batches() -> None:
    rank, _ = start()
    model = Quadratic(rank, 0)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = algorithms.LocalSGD(base, model)
    rows: list[tuple[tuple[Any, ...], dict[str, Any], Any, str]] = [
        ((base, 100, 10), {}, TypeError, "optimizer must be of"),
        ((optimizer, 1, 10), {}, ValueError, "length must be"),
        ((optimizer, 100, 1), {}, ValueError, "batch must be"),
        ((optimizer, 100, 2.5), {}, TypeError, "batch must be"),
        (
            (optimizer, 100, 10),
            {"smallest": 6},
            ValueError,
            "smallest must be at most 5, .*batches of 10, got 6",
        ),
        (
            (optimizer, 100, 10),
            {"largest": 4},
            ValueError,
            "largest must be at least 5, .*batches of 10, got 4",
        ),
        ((optimizer, 100, 10), {"every": 0}, ValueError, "every must be"),
        ((optimizer, 100, 10), {"seed": -1}, ValueError, "seed must be"),
        ((optimizer, 100, 10), {"seed": rank}, ValueError, r"ranks \[0\] and \[1\]"),
    ]
    for arguments, options, error, message in rows:
        with pytest.raises(error, match=f"(?s){message}"):
            fogdist.SharedBatches(*arguments, **options)
    fogdist.SharedBatches(optimizer, 100, 10)
    with pytest.raises(ValueError, match="no SharedBatches yet"):
        fogdist.SharedBatches(optimizer, 100, 10)


def test_one_rank_gets_all(worlds: Any) -> None:
    worlds(1).run(train_alone)


def train_alone() -> None:
    start()
    model, optimizer, batches = make_batches(0)
    used = []
    for part in batches:
        step_of(model, optimizer, optimizer.steps)
        used += part
    assert sorted(used) == list(range(LENGTH))
