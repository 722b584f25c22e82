"""Tests of BlueFog's optimizers by puts and by push-sum: exact if ranks go in step; puts at uneven speeds, and their ends."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import fogdist.bluefog.torch as bf
import networkx as nx
import numpy as np
import pytest
import torch
import torch.distributed as dist
from fogdist import topology as topologies
from harness import on_ranks, sizes
from reference import Checks
from test_optimizers import Run, matrices, simulate
from torch import Tensor, nn
from training_cases import (
    BLUEFOGS,
    EXACT,
    OPTIMIZERS,
    WINDOWS,
    loss_of,
    make_net,
    snapshot,
    start,
    train_step,
)
from window_interfaces import WAYS

KINDS: dict[str, Any] = {**WINDOWS, "push-sum": BLUEFOGS["push-sum"]}


def distribute(
    kind: str,
    model: nn.Module,
    make: Callable[[Any], torch.optim.Optimizer],
    in_step: bool = True,
    **options: Any,
) -> Any:
    optimizer = KINDS[kind](make(model.parameters()), model, **options)
    optimizer.force_barrier = in_step
    return optimizer


# --- in step ------------------------------------------------------------------------------------------------


def set_weights(kind: str, optimizer: Any, matrix: np.ndarray, rank: int) -> None:
    """Sets one iteration's weights as attributes, with only the peers of this iteration."""
    others = [r for r in range(len(matrix)) if r != rank]
    if kind == "push-sum":
        optimizer.self_weight = float(matrix[rank, rank])
        optimizer.dst_weights = {r: float(matrix[rank, r]) for r in others if matrix[rank, r] != 0}
        return
    optimizer.self_weight = float(matrix[rank, rank])
    optimizer.src_weights = {r: float(matrix[r, rank]) for r in others if matrix[r, rank] != 0}
    optimizer.dst_weights = [r for r in others if matrix[rank, r] != 0]


def train(kind: str, run: Run, bucket_cap_mb: float = 8) -> Tensor:
    star = run.mixing == "weighted"
    rank, size = start(topologies.star if star else None)
    model = make_net(rank)
    options = {"num_steps_per_communication": run.every, "bucket_cap_mb": bucket_cap_mb}
    if run.mixing == "random":  # other neighbors in each round
        options["topology"] = topologies.Topology("rounds", matrices(run, size))
    optimizer = distribute(kind, model, OPTIMIZERS[run.optimizer], **options)
    windows = len(bf.get_current_created_window_names())
    if run.mixing == "random" or kind == "push-sum":
        assert windows == 0  # the group does not know of them, and push-sum has none
    else:
        assert windows > 1 if bucket_cap_mb < 8 else windows == int(size > 1)
    trajectory, number = [], 0
    for matrix in matrices(run, size):
        if run.mixing == "dynamic":
            set_weights(kind, optimizer, matrix, rank)
        optimizer.zero_grad()
        for _ in range(run.passes):
            loss_of(model, rank, number).backward()
            number += 1
        optimizer.step()
        trajectory.append(snapshot(model))
    optimizer.unregister_window()
    return torch.stack(trajectory)


RUNS = [
    *(Run("awc", optimizer) for optimizer in OPTIMIZERS),
    Run("awc", "adam", every=3, passes=3),  # accumulate gradients, then take one step
    Run("awc", "sgd", every=3),  # with local steps
    Run("awc", "sgd", mixing="weighted"),
    Run("awc", "adam", mixing="dynamic"),
]
# Push-sum averages as the others do on graphs on which its p stays 1.
BALANCED = [Run("awc", "sgd"), RUNS[-1]]
# The number of ranks, the kind, the run and bucket_cap_mb. Small buckets are windows of their own.
TRAJECTORIES = [
    *((4, "put", run, 8) for run in [*RUNS, Run("awc", "sgd", mixing="random")]),
    *((4, "push-sum", run, 8) for run in BALANCED),
    *((4, kind, RUNS[-1], 1e-4) for kind in KINDS),
    (1, "put", RUNS[-1], 8),
]


@pytest.mark.parametrize("kind", KINDS)
def test_in_step_they_average_as_adapt_with_combine(worlds, kind):
    for size, _, run, bucket in [each for each in TRAJECTORIES if each[1] == kind]:
        for got, expected in zip(worlds(size).run(train, kind, run, bucket), simulate(run, size)):
            what = f"{size} ranks, {kind}, {run}, buckets {bucket}: "
            torch.testing.assert_close(got, expected, **EXACT, msg=lambda text, what=what: what + text)


@pytest.mark.parametrize("kind", KINDS)
def test_between_hosts(new_world, kind):
    """Ranks only send messages."""
    run = Run("awc", "adam", every=2, passes=1, steps=6)
    results = new_world(3, environment=WAYS["tcp"]).run(train, kind, run)
    for got, expected in zip(results, simulate(run, 3), strict=True):
        torch.testing.assert_close(got, expected, **EXACT)


# --- push-sum -----------------------------------------------------------------------------------------------


def unbalanced(size: int) -> nx.DiGraph:
    """Returns a directed ring with edges from rank 0 to all, which has no simple doubly stochastic weights."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(size))
    graph.add_edges_from((r, (r + 1) % size) for r in range(size))
    graph.add_edges_from((0, r) for r in range(1, size))
    return graph


@dataclasses.dataclass(frozen=True)
class Quadratics:
    """Rank i has f_i(z) = |A_i z - b_i|^2 / 2 with parameters that are cut in two pieces."""

    size: int
    dimension: int = 6
    rows: int = 4
    is_consistent: bool = False

    def data(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng([rank, self.dimension])
        a = random.standard_normal((self.rows, self.dimension))
        b = a @ self.solution() if self.is_consistent else random.standard_normal(self.rows)
        return a, b

    def begin(self, rank: int) -> np.ndarray:
        return np.random.default_rng([rank, 7]).standard_normal(self.dimension)

    def solution(self) -> np.ndarray:
        return np.random.default_rng(3).standard_normal(self.dimension)


class Pieces(nn.Module):
    """Holds z in two pieces, one of them in the module itself."""

    def __init__(self, problem: Quadratics, rank: int) -> None:
        super().__init__()
        z = torch.from_numpy(problem.begin(rank))
        self.head = nn.Parameter(z[:2].clone())
        self.rest = nn.Module()
        self.rest.tail = nn.Parameter(z[2:].clone().view(2, -1))
        a, b = problem.data(rank)
        self.register_buffer("a", torch.from_numpy(a))
        self.register_buffer("b", torch.from_numpy(b))

    def z(self) -> Tensor:
        return torch.cat([self.head, self.rest.tail.flatten()])

    def forward(self) -> Tensor:
        return (self.a @ self.z() - self.b).square().sum() / 2


def push_sum_trajectory(problem: Quadratics, every: int, steps: int) -> tuple[np.ndarray, list[float]]:
    rank, _ = start(unbalanced)
    model = Pieces(problem, rank)
    optimizer = distribute(
        "push-sum",
        model,
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.5, weight_decay=0.1),
        num_steps_per_communication=every,
    )
    trajectory, weights = [], []
    for step in range(steps):
        optimizer.zero_grad()
        if every == 1 and step == 3:  # wrong weights, which are put right
            given, optimizer.dst_weights = optimizer.dst_weights, {}
            with pytest.raises(ValueError, match="add up to 1"):
                model()
            optimizer.dst_weights = given
        model().backward()
        optimizer.step()
        trajectory.append(model.z().detach().numpy().copy())
        weights.append(optimizer.p)
    optimizer.unregister_window()
    return np.stack(trajectory), weights


def push_sum_reference(problem: Quadratics, every: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns x+ = mix(x) - step(grad f(x / p)) and p+ = mix(p) for all ranks, one row each."""
    size = problem.size
    share = nx.to_numpy_array(unbalanced(size)) + np.eye(size)
    share /= share.sum(axis=1, keepdims=True)  # shares of the sender's mass, so rows sum to 1
    x, p, momentum = np.stack([problem.begin(r) for r in range(size)]), np.ones(size), 0.0
    trajectory, weights = [], []
    for step in range(steps):
        z = x / p[:, None]
        gradients = np.stack(
            [a.T @ (a @ z[r] - b) for r, (a, b) in enumerate(map(problem.data, range(size)))]
        )
        if (step + 1) % every == 0:
            x, p = share.T @ x, share.T @ p
        gradients += 0.1 * x  # weight decay applies to the values on which the optimizer steps
        momentum = gradients if step == 0 else 0.5 * momentum + gradients
        x = x - 0.05 * momentum
        trajectory.append(x / p[:, None])
        weights.append(p)
    return np.stack(trajectory), np.stack(weights)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("size", sizes([4], [2, 5]))
def test_push_sum_follows_its_recursion_on_a_directed_graph(worlds, size, every):
    problem, steps = Quadratics(size), 25
    expected, weights = push_sum_reference(problem, every, steps)
    # p must be far from 1, or the test would show little
    assert size == 2 or abs(weights[-1] - 1).max() > 0.2
    for rank, (got, p) in enumerate(worlds(size).run(push_sum_trajectory, problem, every, steps)):
        np.testing.assert_allclose(got, expected[:, rank], rtol=1e-9, atol=1e-10)
        np.testing.assert_allclose(p, weights[:, rank], rtol=1e-12)


# --- at uneven speeds ---------------------------------------------------------------------------------------


def solve_at_uneven_speeds(kind: str, problem: Quadratics, slow: int) -> tuple[int, float, float]:
    """Returns the number of steps, and the distance to the common solution at the start and at the end."""
    rank, _ = start(unbalanced)
    model = Pieces(problem, rank)
    solution = torch.from_numpy(problem.solution())
    before = (model.z() - solution).norm().item()
    pace = {"max_staleness": None} if kind == "put" else {}  # by default no rank is ahead of the slowest one
    optimizer = distribute(kind, model, lambda p: torch.optim.SGD(p, lr=0.03), in_step=False, **pace)
    done, everybody = 0, None
    while everybody is None or not bf.poll(everybody):
        time.sleep(0.008 if rank == slow else 0.001)
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
        done += 1
        if done == 150:  # only the slowest rank is done; the others go on meanwhile
            everybody = bf.allreduce_nonblocking(torch.zeros(1))
    bf.wait(everybody)
    dist.barrier()
    optimizer.unregister_window()
    return done, before, (model.z() - solution).norm().item()


@pytest.mark.parametrize("kind", WINDOWS)
def test_convergence_with_one_slow_rank(worlds, kind):
    # No rank can find the solution from its own data, with 4 equations for 6 unknowns.
    problem = Quadratics(4, is_consistent=True)
    results = worlds(4).run(solve_at_uneven_speeds, kind, problem, 1)
    steps = [result[0] for result in results]
    assert min(steps) == steps[1] and max(steps) > 1.2 * steps[1], steps
    for _, before, after in results:
        assert after < 2e-2 * before, results


# --- the first exchanges ------------------------------------------------------------------------------------


@on_ranks(3)
def test_the_first_exchange_before_anything_has_come() -> None:
    """Each rank receives from the left and sends to the right; rank 0 writes nothing before rank 1 has stepped."""
    rank, _ = start(partial(topologies.ring, connect_style=2))
    model = nn.Linear(2, 1, bias=False)
    optimizer = distribute("put", model, lambda p: torch.optim.SGD(p, lr=0.0), in_step=False)
    # As in scripts, this comes after the windows were made, so the slots hold copies of the values before.
    nn.init.constant_(model.weight, 10.0 + rank)

    def value_after_a_step() -> list[float]:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return model.weight.detach().flatten().tolist()

    with Checks() as checks:
        dist.barrier()
        if rank == 1:
            checks.equal("nobody has written", value_after_a_step(), [11.0, 11.0])
        dist.barrier()
        if rank == 2:  # the mean with rank 1's value
            checks.equal("the left one has", value_after_a_step(), [11.5, 11.5])
        dist.barrier()
    optimizer.unregister_window()


@on_ranks(3, kind=KINDS)
def test_a_rank_without_neighbors_trains_alone(kind: str) -> None:
    graph = nx.DiGraph([(0, 1), (1, 0)])
    graph.add_node(2)  # has no neighbors
    rank, _ = start(lambda _: graph)
    model, plain = make_net(rank), make_net(rank)
    optimizer = distribute(kind, model, OPTIMIZERS["adam"], in_step=False)
    base = OPTIMIZERS["adam"](plain.parameters())
    for number in range(3):
        for each, net in ((optimizer, model), (base, plain)):
            each.zero_grad()
            loss_of(net, rank, number).backward()
            dist.barrier()  # lets the other two see each other's values
            each.step()
    assert (rank == 2) == torch.allclose(snapshot(model), snapshot(plain), rtol=1e-12)
    optimizer.unregister_window()


# --- the user's optimizer and model -------------------------------------------------------------------------


@on_ranks([1, 2], kind=WINDOWS)
def test_windows_come_and_go(kind: str) -> None:
    rank, size = start()
    with Checks() as checks, warnings.catch_warnings():
        warnings.simplefilter("error")
        model = make_net(rank)
        base = OPTIMIZERS["adam"](model.parameters())
        with pytest.raises(TypeError, match="window_prefix must be a string, got int"):
            WINDOWS[kind](base, model, window_prefix=3)
        for _ in range(2):
            optimizer = WINDOWS[kind](base, model, window_prefix="mine")
            optimizer.force_barrier = True
            loss_of(model, rank, 0).backward()
            optimizer.step()  # the second optimizer's forward pass no longer reaches the first optimizer
            names = bf.get_current_created_window_names()
            checks.equal("windows", names, ["mine.0"] if size > 1 else [])
            if size > 1:
                net = nn.Linear(2, 2)
                with pytest.raises(ValueError, match="mine.0"):
                    WINDOWS[kind](OPTIMIZERS["sgd"](net.parameters()), net, window_prefix="mine")
            optimizer.unregister_window()
            checks.equal("no windows", bf.get_current_created_window_names(), [])
            optimizer.unregister_window()
            if size > 1:
                with pytest.raises(RuntimeError, match="was closed"):
                    optimizer.step()


@on_ranks(2, kind=KINDS)
def test_weights_of_any_sum(kind: str) -> None:
    """They are used where BlueFog's graphs have them; push-sum divides its weights by their sum."""
    rank, size = start()
    graph = nx.DiGraph()
    graph.add_weighted_edges_from([(i, j, 0.25) for i in range(size) for j in range(size)])
    bf.set_topology(graph, is_weighted=True)
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, rank + 1.0)
    optimizer = distribute(kind, net, partial(torch.optim.SGD, lr=1.0))
    (0 * net(torch.ones(1))).backward()
    optimizer.step()
    expected = 1.5 if kind == "push-sum" else 0.75
    assert net.weight.item() == pytest.approx(expected, abs=1e-6)
    optimizer.unregister_window()


@on_ranks(2)
def test_bad_attributes() -> None:
    rank, _ = start()
    peer = 1 - rank
    for kind, attributes, error, message in [
        ("put", {"dst_weights": [rank]}, ValueError, "dst_weights"),
        ("put", {"src_weights": {peer: 1.0}}, ValueError, "set together"),
        ("put", {"self_weight": 0.5}, TypeError, "src_weights must be a dict"),
        ("put", {"self_weight": 0.5, "src_weights": {rank: 0.5}}, ValueError, "neighbor_weights"),
        ("push-sum", {"self_weight": 1.0}, ValueError, "add up to 1, got 1.0"),
        ("push-sum", {"dst_weights": {rank: 0.5}}, ValueError, "out-neighbors only"),
        ("push-sum", {"self_weight": 0.0, "dst_weights": {peer: 1.0}}, ValueError, "above 0"),
        ("push-sum", {"self_weight": 1.5, "dst_weights": {peer: -0.5}}, ValueError, "above 0"),
        ("push-sum", {"dst_weights": [peer]}, TypeError, "dst_weights must be a dict"),
    ]:
        model = make_net(rank)
        optimizer = distribute(kind, model, OPTIMIZERS["sgd"], in_step=False)
        for name, value in attributes.items():
            setattr(optimizer, name, value)
        before = snapshot(model)
        with pytest.raises(error, match=message):
            loss_of(model, rank, 0).backward()
            optimizer.step()
        assert torch.equal(snapshot(model), before)
        optimizer.unregister_window()
    for kind, name in [("put", "communication_type"), ("push-sum", "skip_lost")]:
        optimizer = distribute(kind, model, OPTIMIZERS["sgd"])
        with pytest.raises(AttributeError, match=f"has an attribute '{name}'"):
            setattr(optimizer, name, {})
        optimizer.unregister_window()


# --- ends ---------------------------------------------------------------------------------------------------


def lose_a_neighbor(kind: str) -> None:
    rank, _ = start(topologies.fully_connected)
    model = make_net(rank)
    optimizer = distribute(kind, model, OPTIMIZERS["sgd"], in_step=False)

    def forward_and_step() -> None:
        train_step(model, optimizer, rank, 0)

    forward_and_step()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + 20
    with pytest.raises(dist.DistBackendError, match=r"rank 1\b"):
        while time.monotonic() < deadline:  # until the loss is known
            forward_and_step()
            time.sleep(0.01)
    optimizer.skip_lost = True
    for _ in range(5):
        forward_and_step()
    assert torch.isfinite(snapshot(model)).all()
    optimizer.unregister_window()


def test_a_lost_neighbor(new_world):
    for kind in WINDOWS:
        outcomes = new_world(3).run_raw(lose_a_neighbor, kind)
        states = [outcome.state for outcome in outcomes]
        assert states == ["returned", "died", "returned"], (kind, outcomes[0], outcomes[2])
