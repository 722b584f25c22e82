"""Compares algorithms with their published recursions, written here in NumPy as matrices over all ranks.

A row of X holds a rank's parameters, in float64. Ranks have random quadratic losses, noise in each step and different
starting points, so a wrong weight, an exchange of wrong values or a state that is one step late shows at once.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import itertools
import os
import re
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fogdist
import fogdist.bluefog.torch as bf
import networkx as nx
import numpy as np
import pytest
import torch
import torch.distributed as dist
from compressed_recursions import choco_sgd, sparse_loco
from fogdist import algorithms
from fogdist import topology as topologies
from fogdist.compression import Codec, Int8, TopK
from harness import ALL, on_ranks
from reference import top_k
from torch import Tensor, nn
from training_cases import EXACT, IN_STEP, snapshot, start
from virtual_training import VirtualRanks

SHAPES = [(2, 3), (4,)]
DIMENSION = 10
RATES = np.repeat([0.2, 0.1], [6, 4])  # one learning rate per parameter; the two tensors are in two groups
STEPS = 13
DECAY = 0.9


# --- the problem --------------------------------------------------------------------------------------------


@functools.cache
def data(rank: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng([17, rank])
    return random.normal(size=(12, DIMENSION)) / np.sqrt(12), random.normal(size=12)


@functools.cache
def noise(rank: int, step: int) -> np.ndarray:
    return 0.1 * np.random.default_rng([23, rank, step]).normal(size=DIMENSION)


def start_of(rank: int) -> np.ndarray:
    return np.random.default_rng([29, rank]).normal(size=DIMENSION)


class Quadratic(nn.Module):
    """A rank's loss ``|A x - b|^2 / 2 + noise x``, where x consists of two parameters."""

    def __init__(self, rank: int, begin: int) -> None:
        super().__init__()
        x = torch.from_numpy(start_of(begin))
        self.weight = nn.Parameter(x[:6].reshape(2, 3).clone())
        self.bias = nn.Parameter(x[6:].clone())
        self.rank = rank
        self.A, self.b = map(torch.from_numpy, data(rank))

    def x(self) -> Tensor:
        return torch.cat([self.weight.reshape(-1), self.bias])

    def forward(self, step: int) -> Tensor:
        x = self.x()
        return (self.A @ x - self.b).square().sum() / 2 + torch.from_numpy(noise(self.rank, step)) @ x


BASES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups),
    "momentum": lambda groups: torch.optim.SGD(groups, momentum=0.8, weight_decay=0.01),
    "adamw": lambda groups: torch.optim.AdamW(groups, betas=(0.8, 0.9), weight_decay=0.1),
}


class Base:
    """The change that an optimizer adds to X, for all ranks at once."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.first: Any = 0.0
        self.second: Any = 0.0
        self.count = 0

    def __call__(self, X: np.ndarray, G: np.ndarray, rates: np.ndarray) -> np.ndarray:
        self.count += 1
        if self.kind == "sgd":
            return -rates * G
        if self.kind == "momentum":
            G = G + 0.01 * X
            self.first = G if self.count == 1 else 0.8 * self.first + G
            return -rates * self.first
        self.first = 0.8 * self.first + 0.2 * G
        self.second = 0.9 * self.second + 0.1 * G * G
        root = np.sqrt(self.second / (1 - 0.9**self.count)) + 1e-8
        return -rates * (0.1 * X + self.first / (1 - 0.8**self.count) / root)


# --- graphs -------------------------------------------------------------------------------------------------


def lopsided(size: int) -> nx.DiGraph:
    """Returns a strongly connected directed graph of unequal degrees: a one-way ring and edges from rank 0 to all."""
    graph = nx.DiGraph((i, (i + 1) % size) for i in range(size))
    graph.add_edges_from((0, j) for j in range(1, size))
    return graph


def sequence(graph: str, size: int) -> topologies.Topology | None:
    """Returns the argument `topology`, or None if the graph is not a sequence."""
    if graph == "one-peer":
        return topologies.one_peer_exponential(size)
    if graph == "pairs":
        return topologies.random_matching(size, seed=3)
    if graph == "base":
        return topologies.base_graph(size)
    if graph == "lopsided rounds":
        return topologies.one_peer(lopsided(size))
    return None


def static(graph: str, size: int) -> nx.DiGraph:
    """Returns the argument of set_topology, with weights."""
    if graph == "star":
        return topologies.metropolis_hastings_weights(topologies.star(size))
    if graph == "lopsided":
        return topologies.uniform_weights(lopsided(size))
    return topologies.by_name(graph if graph in ("ring", "full") else "exp2", size)


def one_peer_columns(size: int, step: int) -> np.ndarray:
    """Returns W of a step for the dynamic attributes: each rank has one peer of the ring, the next one in each step."""
    W = np.eye(size) / 2
    for i in range(size):
        W[i, (i + 1 + step % (size - 1)) % size] += 0.5
    return W


def mixing_matrix(graph: str, size: int, t: int) -> np.ndarray:
    if graph == "attributes":
        return one_peer_columns(size, t)
    if graph == "graph":
        return mixing_matrix("star", size, t)
    rounds = sequence(graph, size)
    if rounds is not None:
        return rounds.matrix(t)
    return topologies.mixing_matrix(static(graph, size))


def shares(graph: str, size: int, t: int) -> np.ndarray:
    """Returns push-sum's matrix: each row is a sender, which gives equal shares."""
    P = (mixing_matrix(graph, size, t) != 0) | np.eye(size, dtype=bool)
    return P / P.sum(axis=1, keepdims=True)


# --- the recursions -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A run of an algorithm.

    Attributes:
        name: Name of the class in fogdist.algorithms.
        graph: Name of the graph of the exchanges; see `sequence` and `static`.
        base: Name in BASES.
        options: More keyword arguments.
        every: local_steps; None for the algorithm's default.
        decays: Whether a scheduler multiplies the learning rate by DECAY after each step.
        together: Whether all ranks start from the same parameters.
    """

    name: str
    graph: str
    base: str = "sgd"
    options: tuple[tuple[str, Any], ...] = ()
    every: int = 1
    decays: bool = False
    together: bool = False

    def __str__(self) -> str:
        options = ",".join(f"{key}={value}" for key, value in self.options)
        flags = f"{'-decays' if self.decays else ''}{'-together' if self.together else ''}"
        return f"{self.name}({options})-{self.graph}-{self.base}-every{self.every}{flags}"


@dataclasses.dataclass
class Simulation:
    """All ranks of a case: X before a step, gradients, rates and matrices."""

    case: Case
    size: int

    def __post_init__(self) -> None:
        self.X = np.stack([start_of(0 if self.case.together else r) for r in range(self.size)])
        self.base = Base(self.case.base)
        self.option = dict(self.case.options)
        self.every = self.case.every

    def gradient(self, X: np.ndarray, step: int) -> np.ndarray:
        rows = []
        for rank in range(self.size):
            A, b = data(rank)
            rows.append(A.T @ (A @ X[rank] - b) + noise(rank, step))
        return np.stack(rows)

    def rates(self, step: int) -> np.ndarray:
        return RATES * (DECAY**step if self.case.decays else 1.0)

    def is_due(self, step: int) -> bool:
        return (step + 1) % self.every == 0

    def begins_anew(self, step: int) -> bool:
        """Returns whether the graph has changed since the last step."""
        return False

    def loses(self, step: int) -> bool:
        """Returns whether a rank is lost before this step."""
        return False

    def mix(self, step: int) -> np.ndarray:
        """Returns the matrix that multiplies X in a step: the identity in a local step."""
        if not self.is_due(step):
            return np.eye(self.size)
        # Attributes are set for each step; a sequence advances by one round per exchange.
        t = step if self.case.graph == "attributes" else step // self.every
        return mixing_matrix(self.case.graph, self.size, t).T

    def mean(self, X: np.ndarray) -> np.ndarray:
        return np.broadcast_to(X.mean(axis=0), X.shape)


def decentralized_sgd(s: Simulation) -> Iterator[np.ndarray]:
    X = s.X
    for k in range(STEPS):
        if s.option.get("order", "atc") == "atc":
            X = s.mix(k) @ (X + s.base(X, s.gradient(X, k), s.rates(k)))
        elif s.option["order"] == "awc":
            mixed = s.mix(k) @ X
            X = mixed + s.base(mixed, s.gradient(X, k), s.rates(k))
        else:
            Y = s.mix(k) @ X
            X = Y + s.base(Y, s.gradient(Y, k), s.rates(k))
        yield X


def local_sgd(s: Simulation) -> Iterator[np.ndarray]:
    X = s.X
    for k in range(STEPS):
        X = X + s.base(X, s.gradient(X, k), s.rates(k))
        if s.is_due(k):
            X = s.mean(X)
        yield X


def exact_diffusion(s: Simulation) -> Iterator[np.ndarray]:
    """Yuan et al., algorithm 1: adapt, correct, combine; the correction scales with the learning rate."""
    X, psi, before, anchor = s.X, s.X, s.rates(0), s.X
    for k in range(STEPS):
        X = X + s.base(X, s.gradient(X, k), s.rates(k))
        if s.is_due(k):
            phi = X + s.rates(k) / before * (anchor - psi)
            psi, before = X, s.rates(k)
            X = anchor = (phi + s.mix(k) @ phi) / 2
        yield X


def gradient_tracking(s: Simulation) -> Iterator[np.ndarray]:
    X, order = s.X, s.option.get("order", "atc")
    G = Y = s.gradient(X, 0)
    for k in range(STEPS):
        W = s.mix(k)
        if order == "atc":
            X = W @ (X + s.base(X, Y, s.rates(k)))
        else:
            X = W @ X
            X = X + s.base(X, Y, s.rates(k))
        Y = W @ Y
        yield X
        new = s.gradient(X, k + 1)
        Y, G = Y + new - G, new


def push_sum(s: Simulation) -> Iterator[np.ndarray]:
    Z, p = s.X, np.ones((s.size, 1))
    X = Z
    for k in range(STEPS):
        X = X + s.base(X, s.gradient(Z, k), s.rates(k))
        if s.is_due(k):
            t = k if s.case.graph == "attributes" else k // s.every
            P = shares(s.case.graph, s.size, t).T
            X, p = P @ X, P @ p
        Z = X / p
        yield Z


def diloco(s: Simulation) -> Iterator[np.ndarray]:
    """Douillard et al., algorithm 1, with torch's SGD(nesterov=True) as the outer optimizer."""
    X = outer = s.X
    velocity: Any = None
    for k in range(STEPS):
        X = X + s.base(X, s.gradient(X, k), s.rates(k))
        if s.is_due(k):
            delta = s.mean(outer - X)
            velocity = delta if velocity is None else 0.8 * velocity + delta
            X = outer = outer - 0.6 * (delta + 0.8 * velocity)
        yield X


def gossip_diloco(s: Simulation) -> Iterator[np.ndarray]:
    X = outer = before = s.X
    for k in range(STEPS):
        X = X + s.base(X, s.gradient(X, k), s.rates(k))
        if s.is_due(k):
            mixed = s.mix(k) @ (outer + s.option["outer_lr"] * (X - outer))
            X = outer = mixed + s.option.get("outer_momentum", 0.0) * (mixed - before)
            before = mixed
        yield X


def gasloc(s: Simulation) -> Iterator[np.ndarray]:
    """Cagnasso et al.: theta+ = v - Laplacian v + momentum (v - v-), v = theta + lr drift."""
    theta = X = before = s.X
    for k in range(STEPS):
        X = X + s.base(X, s.gradient(X, k), s.rates(k))
        if s.is_due(k):
            v = theta + 0.6 * (X - theta)
            laplacian = np.eye(s.size) - s.mix(k)
            X = theta = v - laplacian @ v + 0.8 * (v - before)
            before = v
        yield X


def published_sparse_loco(s: Simulation) -> Iterator[np.ndarray]:
    """Sarfi et al., algorithm 1, with an outer learning rate of 1."""
    X = theta = s.X
    m = np.zeros_like(X)
    for k in range(STEPS):
        X = X + s.base(X, s.gradient(X, k), s.rates(k))
        if s.is_due(k):
            m = 0.9 * m + (theta - X)
            sent = np.stack([top_k(row, s.option["compression"].k, 2) for row in m])
            m = m - sent
            X = theta = theta - s.mean(sent)
        yield X


def decentralized_adamw(s: Simulation) -> Iterator[np.ndarray]:
    X, m, v, own = s.X, *(np.zeros_like(s.X) for _ in range(3))
    for k in itertools.count():
        G, W, rates = s.gradient(X, k), s.mix(k), s.rates(k)
        m, v = W @ (0.8 * m + 0.2 * G), W @ (0.9 * v + 0.1 * G * G)
        mean = m / (1 - 0.8 ** (k + 1))
        own = 0.9 * own + 0.1 * mean**2
        square = (v / s.size + (1 - 1 / s.size) * own) / (1 - 0.9 ** (k + 1))
        X = W @ (X - rates * (0.1 * X + mean / (np.sqrt(square) + 1e-8)))
        yield X


def decentlam(s: Simulation) -> Iterator[np.ndarray]:
    X, momentum = s.X, np.zeros_like(s.X)
    for k in itertools.count():
        rates = s.rates(k)
        mixed = s.mix(k) @ (X + s.base(X, s.gradient(X, k), rates))
        momentum = 0.9 * momentum + (X - mixed) / rates
        X = X - rates * momentum
        yield X


REFERENCES: dict[str, Callable[[Simulation], Iterator[np.ndarray]]] = {
    "DecentralizedSGD": decentralized_sgd,
    "LocalSGD": local_sgd,
    "ExactDiffusion": exact_diffusion,
    "GradientTracking": gradient_tracking,
    "PushSumSGD": push_sum,
    "DiLoCo": diloco,
    "GASLoC": gasloc,
    "SparseLoCo": sparse_loco,
    "DecentLaM": decentlam,
    "DecentralizedAdamW": decentralized_adamw,
    "ChocoSGD": choco_sgd,
}


def class_of(name: str) -> Any:
    """Returns a class of fogdist.algorithms, or DecentLaM as docs/howto/write_an_algorithm.md writes it."""
    if name != "DecentLaM":
        return getattr(algorithms, name)
    page = (Path(__file__).parent.parent / "docs" / "howto" / "write_an_algorithm.md").read_text()
    code = page[page.index("This one keeps state") :].split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {"__name__": __name__}
    exec(code, names)
    return names[name]


def reference(case: Case, size: int, kind: type[Simulation] = Simulation) -> np.ndarray:
    """Returns X after each step, with shape (steps, ranks, dimension)."""
    simulate = REFERENCES[case.name]
    if case.name == "DiLoCo" and case.graph not in ("all", "full"):
        simulate = gossip_diloco
    if case.name == "SparseLoCo" and case.graph == "all":
        simulate = published_sparse_loco
    if case.name == "SparseLoCo" and ("compression", TopK(1.0)) in case.options:
        simulate = gossip_diloco
    return np.stack(list(itertools.islice(simulate(kind(case, size)), STEPS)))


# --- ranks --------------------------------------------------------------------------------------------------


def make(case: Case, rank: int, begin: int | None = None) -> tuple[Quadratic, Any, Any]:
    """Returns a rank's model, algorithm and scheduler."""
    size = fogdist.size()
    model = Quadratic(rank, (0 if case.together else rank) if begin is None else begin)
    groups = [
        {"params": [model.weight], "lr": float(RATES[0])},
        {"params": [model.bias], "lr": float(RATES[-1])},
    ]
    base = BASES[case.base](groups)
    options: dict[str, Any] = dict(case.options)
    if sequence(case.graph, size) is not None:
        options["topology"] = sequence(case.graph, size)
    elif case.graph == "graph":  # independent of the group's topology
        options["topology"] = static("star", size)
    elif case.graph != "all":
        options["topology"] = algorithms.Neighbors()
    optimizer = class_of(case.name)(base, model, local_steps=case.every, broadcast=False, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY if case.decays else 1.0)
    return model, optimizer, scheduler


def step_of(model: Quadratic, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    model(number).backward()
    optimizer.step()


def advance(case: Case, model: Quadratic, optimizer: Any, scheduler: Any, steps: range) -> list[np.ndarray]:
    rank, size = fogdist.rank(), fogdist.size()
    trajectory = []
    for k in steps:
        if case.graph == "attributes":
            W = shares("attributes", size, k) if case.name == "PushSumSGD" else one_peer_columns(size, k)
            others = [r for r in range(size) if r != rank]
            optimizer.self_weight = W[rank, rank]
            if case.name == "PushSumSGD":
                optimizer.src_weights = {r: 1.0 for r in others if W[r, rank]}
                optimizer.dst_weights = {r: W[rank, r] for r in others if W[rank, r]}
            else:
                optimizer.src_weights = {r: W[r, rank] for r in others if W[r, rank]}
                optimizer.dst_weights = [r for r in others if W[rank, r]]
            optimizer.enable_topo_check = k % 2 == 0
        step_of(model, optimizer, k)
        scheduler.step()
        trajectory.append(model.x().detach().numpy().copy())
    return trajectory


def begin(graph: str) -> tuple[int, int]:
    return start(lambda size: static(graph, size))


def saved(value: Any) -> Any:
    """Returns `value` after saving it to a file and loading it."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def train(case: Case) -> np.ndarray:
    """Returns a rank's trajectory, after a check that a run from a state dict is the same bit for bit."""
    rank, _ = begin(case.graph)
    parts = make(case, rank)
    path = advance(case, *parts, range(5))
    state = saved([each.state_dict() for each in parts])
    later = advance(case, *parts, range(5, STEPS))
    restored = make(case, rank, begin=100)
    advance(case, *restored, range(3))  # loading must replace the state of these steps
    for each, value in zip(restored, state, strict=True):
        each.load_state_dict(copy.deepcopy(value))
    assert str(saved(restored[1].state_dict())) == str(state[1]), case  # it can be saved again at once
    again = advance(case, *restored, range(5, STEPS))
    np.testing.assert_array_equal(np.stack(again), np.stack(later), err_msg=str(case))
    return np.stack([*path, *later])


OUTER = (("outer_lr", 0.6), ("outer_momentum", 0.8))
SPARSE = (("compression", TopK(k=3, bits=2)), ("error_decay", 0.9))
GOSSIP = (*SPARSE, ("outer_lr", 0.7), ("gamma", 0.3))
# What is exact, and brings ranks together at once, is DiLoCo by gossip.
WHOLE = (("compression", TopK(1.0)), ("outer_lr", 0.6), ("gamma", 1.0))


def sent(codec: Codec, gamma: float, **more: Any) -> tuple[tuple[str, Any], ...]:
    return (("compression", codec), ("gamma", gamma), *more.items())


def order(name: str) -> tuple[tuple[str, str], ...]:
    return (("order", name),)


CASES = [
    *(
        Case("DecentralizedSGD", g, "momentum", order(o))
        for o in ("atc", "awc", "cta")
        for g in ("exp", "pairs")
    ),
    *(Case("DecentralizedSGD", "attributes", "adamw", order(o)) for o in ("atc", "awc", "cta")),
    *(Case("DecentralizedSGD", "one-peer", "sgd", order(o), every=3) for o in ("atc", "awc", "cta")),
    Case("DecentralizedSGD", "star", "sgd", decays=True),
    Case("DecentralizedSGD", "graph", "momentum"),
    Case("LocalSGD", "all", "adamw", every=4),
    Case("LocalSGD", "all", "momentum", every=1, decays=True),
    *(Case("ExactDiffusion", g) for g in ("star", "ring", "pairs", "attributes")),
    Case("ExactDiffusion", "ring", "momentum", decays=True),
    Case("ExactDiffusion", "star", "adamw"),
    Case("ExactDiffusion", "ring", "sgd", every=3),
    *(
        Case("GradientTracking", g, "sgd", order(o))
        for o in ("atc", "awc")
        for g in ("star", "exp", "base", "attributes")
    ),
    *(
        Case("GradientTracking", "pairs", b, order(o), decays=True)
        for o in ("atc", "awc")
        for b in ("momentum", "adamw")
    ),
    *(Case("GradientTracking", "ring", "sgd", order(o), every=3) for o in ("atc", "awc")),
    *(Case("PushSumSGD", g, b) for g in ("exp", "lopsided", "lopsided rounds") for b in ("sgd", "momentum")),
    Case("PushSumSGD", "lopsided", "adamw", every=3, decays=True),
    Case("PushSumSGD", "attributes", "sgd"),
    Case("PushSumSGD", "graph", "momentum"),
    Case("DiLoCo", "all", "adamw", OUTER, every=3, together=True),
    Case("DiLoCo", "all", "momentum", OUTER, every=1, together=True, decays=True),
    Case("DiLoCo", "full", "adamw", OUTER, every=3, together=True),  # on the complete graph, gossip is DiLoCo
    *(Case("DiLoCo", g, "sgd", OUTER, every=3) for g in ("star", "base", "attributes")),
    *(Case("GASLoC", g, b, OUTER, every=3) for g in ("ring", "pairs") for b in ("momentum", "adamw")),
    Case("GASLoC", "attributes", "sgd", OUTER),
    *(Case("SparseLoCo", "all", b, SPARSE, every=3, together=True) for b in ("momentum", "adamw")),
    Case("SparseLoCo", "full", "sgd", SPARSE, every=2, together=True),
    *(Case("SparseLoCo", g, "sgd", GOSSIP, every=2, together=True) for g in ("ring", "star", "graph")),
    Case("SparseLoCo", "ring", "momentum", GOSSIP),
    Case("SparseLoCo", "full", "sgd", (("compression", Int8(block=8)),), every=2),
    Case("SparseLoCo", "ring", "adamw", WHOLE, every=3, together=True),
    *(Case("DecentralizedAdamW", g, "adamw") for g in ("ring", "pairs", "attributes")),
    Case("DecentralizedAdamW", "one-peer", "adamw", every=2, decays=True),
    *(Case("ChocoSGD", g, "sgd", sent(Int8(block=8), 0.9)) for g in ("star", "exp", "graph")),
    Case("ChocoSGD", "ring", "momentum", sent(TopK(0.3), 0.3), together=True),
    Case("ChocoSGD", "ring", "adamw", sent(Int8(block=8), 1.0), decays=True),
    Case("ChocoSGD", "star", "sgd", sent(TopK(0.4), 0.2), every=3),
    *(Case("DecentLaM", g) for g in ("ring", "pairs")),
    Case("DecentLaM", "exp", "sgd", every=2, decays=True),
]


def cases_of(name: str, size: int) -> list[Case]:
    """Returns an algorithm's cases; with an odd number of ranks, pairs leave one rank over."""
    cases = [case for case in CASES if case.name == name]
    if size % 2 == 0 or ALL:
        return cases
    of_rounds = ("pairs", "base", "one-peer", "lopsided rounds", "all")
    return [*{case.graph: case for case in reversed(cases) if case.graph in of_rounds}.values()]


def train_each(cases: list[Case]) -> list[np.ndarray]:
    return [train(case) for case in cases]


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("size", [4, 5])
def test_trajectories(worlds, size, name):
    """One run on real ranks an algorithm."""
    cases = cases_of(name, size)
    for case, got in zip(cases, zip(*worlds(size).run(train_each, cases), strict=True), strict=True):
        check(np.stack(got, axis=1), reference(case, size), case)


def check(got: np.ndarray, expected: np.ndarray, case: Case) -> None:
    bound = 1e-11 * max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(got, expected, rtol=0, atol=bound, err_msg=str(case))


def test_one_rank_alone(worlds):
    """The recursions hold for W = 1: only the optimizer remains and, for some algorithms, the outer optimizer."""
    for case in STATEFUL:
        alone = case if case.graph == "all" else dataclasses.replace(case, graph="exp")
        check(worlds(1).run(train, alone)[0], reference(alone, 1)[:, 0], alone)


class Rows(nn.Module):
    """All ranks' parameters as the rows of one tensor, padded to whole blocks of a bucket, and the sum of their losses."""

    def __init__(self, X: np.ndarray) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.from_numpy(np.pad(X, ((0, 0), (0, 16 - DIMENSION)))))
        self.A, self.b = (torch.from_numpy(np.stack(parts)) for parts in zip(*map(data, range(len(X)))))

    def forward(self, step: int) -> Tensor:
        x = self.x[:, :DIMENSION]
        drift = torch.from_numpy(np.stack([noise(rank, step) for rank in range(len(x))]))
        return (torch.einsum("rij,rj->ri", self.A, x) - self.b).square().sum() / 2 + (drift * x).sum()


class OneRate(Simulation):
    def rates(self, step: int) -> np.ndarray:
        return 0.2 * super().rates(step) / RATES


def train_virtual(case: Case, size: int) -> np.ndarray:
    rows = Rows(Simulation(case, size).X)
    options: dict[str, Any] = dict(case.options)
    graph = "star" if case.graph == "graph" else case.graph
    if graph != "all":
        options["topology"] = sequence(graph, size) or static(graph, size)
    base = BASES[case.base]([{"params": [rows.x], "lr": 0.2}])
    group = VirtualRanks(size)
    optimizer = class_of(case.name)(base, rows, local_steps=case.every, group=group, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY if case.decays else 1.0)
    trajectory = []
    for k in range(STEPS):
        optimizer.zero_grad()
        rows(k).backward()
        optimizer.step()
        scheduler.step()
        trajectory.append(rows.x.detach().numpy()[:, :DIMENSION].copy())
    return np.stack(trajectory)


# Virtual ranks send nothing, and have no attributes of their own.
VIRTUAL = [name for name in REFERENCES if name not in ("ChocoSGD", "SparseLoCo")]


@pytest.mark.parametrize("name", VIRTUAL)
def test_virtual_ranks_have_the_same_trajectories(name):
    for size, case in itertools.product((1, 5, 8), cases_of(name, 4)):
        if case.graph != "attributes":
            check(train_virtual(case, size), reference(case, size, OneRate), case)


# --- state --------------------------------------------------------------------------------------------------

# Of each algorithm and form the last case of the table whose graph is not set by attributes.
STATEFUL = [*{(c.name, dict(c.options).get("order")): c for c in CASES if c.graph != "attributes"}.values()]


@on_ranks(4)
def test_with_the_state_of_a_plain_optimizer_an_algorithm_begins_anew() -> None:
    for case in STATEFUL:
        rank, _ = begin(case.graph)
        model = Quadratic(rank, 0)
        groups = [{"params": [p], "lr": lr} for p, lr in ((model.weight, 0.2), (model.bias, 0.1))]
        plain = BASES[case.base](groups)
        anew, fresh = make(case, rank), make(case, rank)
        advance(case, *anew, range(4))
        anew[0].load_state_dict(fresh[0].state_dict())
        anew[1].load_state_dict(plain.state_dict())
        runs = [np.stack(advance(case, *parts, range(1))) for parts in (anew, fresh)]
        np.testing.assert_array_equal(*runs, err_msg=str(case))


@on_ranks(4)
def test_the_state_of_another_algorithm_is_refused() -> None:
    rank, _ = start()
    _, tracking, _ = make(Case("GradientTracking", "exp"), rank)
    _, diffusion, _ = make(Case("ExactDiffusion", "exp"), rank)
    with pytest.raises(ValueError, match="ExactDiffusion.*GradientTracking"):
        diffusion.load_state_dict(tracking.state_dict())


# --- algorithms that make the step themselves ---------------------------------------------------------------


def hooked_adamw(by_hook: bool) -> Tensor:
    """Halves the gradients and replaces the parameters' memory before each step, in a hook of the step or by hand."""
    rank, _ = start()
    model = Quadratic(rank, rank)
    base = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(base, 1, 0.5)
    seen: list[Tensor] = []

    def halve(*_: Any) -> None:
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)
            parameter.data = parameter.data.clone()

    if by_hook:
        base.register_step_pre_hook(halve)
        base.register_step_post_hook(lambda *_: seen.append(model.x().clone()))
    optimizer = algorithms.DecentralizedAdamW(base, model, broadcast=False)
    for step in range(3):
        optimizer.zero_grad()
        model(step).backward()
        if not by_hook:
            halve()
        optimizer.step()
        scheduler.step()
        # The hook sees the rank's own step, before the average.
        assert len(seen) == (step + 1) * by_hook and not (
            seen and step == 0 and torch.equal(seen[0], model.x())
        )
    with pytest.raises(TypeError, match="unknown"):
        optimizer.step(unknown=1)
    return model.x().clone()


@on_ranks(2)
def test_hooks_of_a_step_that_decentralized_adamw_makes_itself() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a scheduler warns if it does not see the steps
        assert torch.equal(hooked_adamw(True), hooked_adamw(False))


# --- weights ------------------------------------------------------------------------------------------------

FULL = topologies.fully_connected(2)
# Each row has an algorithm, its options, and an attribute that its mixing does not use, with a value.
UNUSED_WEIGHTS: list[tuple[str, dict[str, Any], str, Any]] = [
    ("DecentralizedSGD", {"topology": FULL}, "self_weight", 0.5),
    ("DecentralizedSGD", {"topology": FULL, "order": "awc"}, "src_weights", {1: 0.5}),
    ("DecentralizedSGD", {"topology": FULL, "order": "cta"}, "dst_weights", [1]),
    ("DecentralizedSGD", {}, "dst_machine_weights", []),
    ("LocalSGD", {"local_steps": 3}, "enable_topo_check", True),
    ("PushSumSGD", {}, "src_machine_weights", {}),
    ("DecentralizedAdamW", {"topology": FULL}, "enable_topo_check", True),
    ("ChocoSGD", {"compression": Int8(), "gamma": 0.5}, "self_weight", 0.5),
]


@on_ranks(2, case=UNUSED_WEIGHTS)
def test_weights_that_would_change_nothing_are_refused(case: tuple[str, dict[str, Any], str, Any]) -> None:
    """The error comes before anything is sent or changed, so the step can be repeated."""
    name, options, attribute, value = case
    rank, _ = start()
    ends = []
    for wrongly in (True, False):
        model = Quadratic(rank, 0)
        optimizer = getattr(algorithms, name)(torch.optim.AdamW(model.parameters(), lr=0.1), model, **options)
        for number in range(4):
            if number == 1 and rank == 0 and wrongly:
                before, kept = model.x().clone(), getattr(optimizer, attribute)
                setattr(optimizer, attribute, value)
                with pytest.raises(ValueError, match=f"^{attribute} must stay {kept} with topology=.*which"):
                    step_of(model, optimizer, number)
                assert torch.equal(model.x(), before)
                setattr(optimizer, attribute, kept)
            step_of(model, optimizer, number)
        ends.append(model.x().clone())
    assert torch.equal(*ends)


# --- parameters ---------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Parameters of several dtypes and layouts: complex, frozen, tied, unused, and unused on odd ranks.

    Args:
        is_plain: Whether the same values are stored as contiguous float64, and complex numbers as pairs.
    """

    def __init__(self, is_plain: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=torch.float64, generator=generator)

        pairs, single, convolution = random(3, 2, 2), random(2, 3).float(), random(2, 3, 2, 2)
        self.complex = nn.Parameter(pairs if is_plain else torch.view_as_complex(pairs))
        self.single = nn.Parameter(single.double() if is_plain else single)
        layout = torch.contiguous_format if is_plain else torch.channels_last
        self.convolution = nn.Parameter(convolution.to(memory_format=layout))
        self.frozen = nn.Parameter(random(4), requires_grad=False)
        self.tied = self.single
        self.unused = nn.Parameter(random(3))
        self.even = nn.Parameter(random(3))
        self.scalar = nn.Parameter(random())

    def forward(self, rank: int) -> Tensor:
        values = torch.view_as_real(self.complex) if self.complex.is_complex() else self.complex
        total = (values - rank).square().sum() + (self.single - rank).square().sum()
        total = total + (self.tied * self.convolution[:, :, 0, 0] * 0.1).sum() + (self.scalar - rank) ** 2
        total = total + (self.convolution - rank).square().sum() + self.frozen.sum()
        return total + ((self.even - 3.0).square().sum() if rank % 2 == 0 else 0.0)


def train_mixed(name: str, model: Mixed) -> None:
    rank, size = fogdist.rank(), fogdist.size()
    options = IN_STEP.get(name, {})
    if name == "ChocoSGD":
        options = {"compression": TopK(1.0), "gamma": 0.7}
    optimizer = getattr(algorithms, name)(torch.optim.SGD(model.parameters(), lr=0.05), model, **options)
    for _ in range(5):
        # All runs need the same schedule; a rank reads its neighbor from the forward pass on.
        for turn in range(size if name == "AsynchronousGossip" else 1):
            if turn == rank or name != "AsynchronousGossip":
                optimizer.zero_grad()
                model(rank).backward()
                optimizer.step()
            dist.barrier()
    if name == "AsynchronousGossip":
        optimizer.close()


@on_ranks([1, 4], name=[*IN_STEP, "ChocoSGD", "AsynchronousGossip"])
def test_all_kinds_of_parameters(name: str) -> None:
    start(topologies.ring)
    model, plain = Mixed(False), Mixed(True)
    begin = copy.deepcopy(model.state_dict())
    train_mixed(name, model)
    train_mixed(name, plain)
    for label in ("single", "convolution", "even", "scalar", "complex"):
        got, expected = getattr(model, label).detach(), getattr(plain, label).detach()
        assert not torch.equal(got, begin[label])
        got = torch.view_as_real(got) if got.is_complex() else got.double()
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert model.convolution.is_contiguous(memory_format=torch.channels_last)
    for label in ("frozen", "unused"):
        # What is compressed may take part in rounding.
        off = 1e-5 if name == "ChocoSGD" else 1e-14
        torch.testing.assert_close(getattr(model, label).detach(), begin[label], rtol=0, atol=off)
    assert model.unused.grad is None
    assert (model.even.grad is None) == (fogdist.rank() % 2 == 1)


# --- asynchronous gossip ------------------------------------------------------------------------------------


def gossip(**options: Any) -> tuple[Quadratic, Any]:
    rank, _ = start(topologies.ring)
    model = Quadratic(rank, rank)
    groups = [
        {"params": [model.weight], "lr": float(RATES[0])},
        {"params": [model.bias], "lr": float(RATES[-1])},
    ]
    return model, algorithms.AsynchronousGossip(torch.optim.SGD(groups), model, broadcast=False, **options)


def one_after_the_other() -> tuple[np.ndarray, np.ndarray]:
    """Ranks take steps in turn, rank 0 three times as often. Returns this rank's x after its steps, and at the end."""
    model, optimizer = gossip(seed=7)
    rank = fogdist.rank()
    trajectory = []
    for turn, step in schedule(fogdist.size()):
        dist.barrier()
        if turn == rank:
            step_of(model, optimizer, step)
            trajectory.append(model.x().detach().numpy().copy())
    optimizer.close()
    optimizer.close()  # the second call does nothing
    assert not bf.get_current_created_window_names()
    return np.stack(trajectory), model.x().detach().numpy()


def schedule(size: int) -> list[tuple[int, int]]:
    """Returns pairs of a rank and the number of its step, in the order in which they run."""
    counts = [0] * size
    result = []
    for turn in [0, 0, 0, *range(1, size)] * 6:
        result.append((turn, counts[turn]))
        counts[turn] += 1
    return result


@pytest.mark.parametrize("size", [2, 4, 5])
def test_asynchronous_gossip_of_a_known_schedule(worlds, size):
    got = worlds(size).run(one_after_the_other)
    X = np.stack([start_of(r) for r in range(size)])
    inbox = np.zeros_like(X)
    peers = [sorted({(r - 1) % size, (r + 1) % size}) for r in range(size)]
    pending: list[set[int]] = [set() for _ in range(size)]  # ranks that have a move in the inbox
    met = set()
    for rank, step in schedule(size):
        A, b = data(rank)
        X[rank] -= RATES * (A.T @ (A @ X[rank] - b) + noise(rank, step))
        X[rank] += inbox[rank]
        inbox[rank] = 0
        pending[rank].clear()
        # The result shows the peer that a rank has met: a random one of its neighbors, or none if all are behind.
        ready = [peer for peer in peers[rank] if rank not in pending[peer]]
        moves = {peer: (X[peer] - X[rank]) / 3 for peer in ready}
        if ready:
            peer = min(moves, key=lambda peer: np.abs(got[rank][0][step] - X[rank] - moves[peer]).max())
            X[rank] += moves[peer]
            inbox[peer] -= moves[peer]
            pending[peer].add(rank)
            met.add((rank, peer))
        np.testing.assert_allclose(got[rank][0][step], X[rank], rtol=0, atol=1e-12)
    assert met == {(rank, peer) for rank in range(size) for peer in peers[rank]}
    np.testing.assert_allclose([last for _, last in got], X + inbox, rtol=0, atol=1e-12)


def stand_still(optimizer: Any) -> None:
    """Ranks take no steps of their own any more; gossip goes on."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0


@on_ranks([2, 4])
def test_asynchronous_gossip_loses_nothing_at_any_speed() -> None:
    """With any schedule the moves of gossip cancel each other, so all come to the mean of the local steps."""
    model, optimizer = gossip()
    is_slow = fogdist.rank() == 1
    own = model.x().detach().clone()
    for k in range(25 if is_slow else 100):
        optimizer.zero_grad()
        model(k).backward()
        own -= torch.from_numpy(RATES) * torch.cat([model.weight.grad.reshape(-1), model.bias.grad])
        time.sleep(0.008 if is_slow else 0.002)
        optimizer.step()
    stand_still(optimizer)
    for _ in range(200):
        dist.barrier()
        optimizer.step()
    dist.barrier()
    optimizer.close()
    mean, x = bf.allreduce(own.clone()), model.x().detach()
    torch.testing.assert_close(bf.allreduce(x.clone()), mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(x, mean, rtol=0, atol=1e-6)
    assert fogdist.consensus_distance(own) > 0.1  # each alone would end elsewhere


def lose_a_gossiping_neighbor() -> np.ndarray:
    model, optimizer = gossip()
    model(0).backward()
    optimizer.step()
    dist.barrier()
    if fogdist.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    stand_still(optimizer)
    for _ in range(100):
        optimizer.step()
        fogdist.pair_gossip(torch.zeros(1), 2 - fogdist.rank())  # keeps the two ranks at the same pace
    with pytest.raises(dist.DistBackendError, match=r"rank 1\b"):
        optimizer.close()
    return model.x().detach().numpy()


def test_asynchronous_gossip_passes_over_a_lost_neighbor(new_world):
    outcomes = new_world(3).run_raw(lose_a_gossiping_neighbor)
    assert [outcome.state for outcome in outcomes] == ["returned", "died", "returned"], outcomes[0]
    # The two remaining ranks still gossip, and agree.
    np.testing.assert_allclose(outcomes[0].value, outcomes[2].value, rtol=0, atol=1e-6)


@on_ranks([1, 2, 3, 4, 5])
def test_asynchronous_gossip_along_any_connected_topology() -> None:
    """Its own neighbors may be those of edges in one direction, and those of all rounds."""
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    line = nx.DiGraph([(0, 0), *((i, i + 1) for i in range(size - 1))])
    for topology in (None, "one-peer-exp2", "ring", "ring-right", line):
        model = Quadratic(rank, rank)
        base = torch.optim.SGD(model.parameters(), lr=0.0)
        with algorithms.AsynchronousGossip(base, model, topology=topology, broadcast=False) as optimizer:
            for k in range(100):
                step_of(model, optimizer, k)
                dist.barrier()
        # Ranks of a line are apart for longer.
        assert fogdist.consensus_distance(model) < (0.1 if topology is line else 1e-3)


@on_ranks(4)
def test_asynchronous_gossip_says_what_it_cannot_do() -> None:
    fogdist.init()
    model = Quadratic(0, 0)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    fogdist.set_topology(nx.DiGraph([(0, 1), (1, 0), (2, 3)]))
    with pytest.raises(ValueError, match=r"topology must connect all ranks .*, got one of 2 parts"):
        algorithms.AsynchronousGossip(base, model)
    fogdist.set_topology(topologies.ring(fogdist.size()))
    optimizer = algorithms.AsynchronousGossip(base, model)
    optimizer.self_weight = 0.5
    with pytest.raises(ValueError, match="self_weight must stay None"):
        optimizer.step()
    optimizer.self_weight = None
    model.bias.requires_grad_(False)
    model(0).backward()
    with pytest.raises(RuntimeError, match="make it anew"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="before the algorithm is made"):
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.close()


# --- where the algorithms end -------------------------------------------------------------------------------


def converge(name: str, options: dict[str, Any]) -> np.ndarray:
    rank, _ = start(lambda size: static("star", size))
    model = Quadratic(rank, 0)
    optimizer = getattr(algorithms, name)(torch.optim.SGD(model.parameters(), lr=0.2), model, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 200, 0.7)
    for _ in range(800):
        optimizer.zero_grad()
        (model(0) - torch.from_numpy(noise(rank, 0)) @ model.x()).backward()
        optimizer.step()
        scheduler.step()
    return model.x().detach().numpy()


@pytest.mark.parametrize(
    ("name", "options", "is_exact"),
    [
        ("DecentralizedSGD", {}, False),
        ("ExactDiffusion", {}, True),
        ("GradientTracking", {}, True),
        ("ChocoSGD", {"compression": Int8(block=8), "gamma": 0.9}, False),
    ],
)
def test_what_is_exact_ends_at_the_optimum_whatever_the_scheduler_did(worlds, name, options, is_exact):
    A, b = (np.concatenate(parts) for parts in zip(*map(data, range(4)), strict=True))
    optimum = np.linalg.lstsq(A, b, rcond=None)[0]
    errors = [float(np.linalg.norm(x - optimum)) for x in worlds(4).run(converge, name, options)]
    assert (max(errors) < 1e-6) == is_exact, errors


# --- wrong arguments ----------------------------------------------------------------------------------------


@on_ranks(2)
def test_wrong_arguments() -> None:
    """Among them are arguments that differ between ranks, which all ranks refuse."""
    rank, size = start()
    model = Quadratic(0, 0)
    parameters = list(model.parameters())
    # Learning rates may differ between ranks.
    base = torch.optim.SGD(parameters, lr=0.1 + rank)
    rateless = torch.optim.Optimizer(parameters, {"depth": 2})
    larger, rounds = topologies.one_peer_exponential(size + 1), topologies.random_matching(size)
    compressed = algorithms.Neighbors(compression=Int8())
    everyone, machines = algorithms.GlobalAverage(), algorithms.Machines()
    parts = nx.DiGraph([(0, 0), (1, 1)])
    # Two graphs with the same name and different weights; those of the second are not symmetric.
    pairs = [nx.DiGraph(), nx.DiGraph()]
    for graph, own in zip(pairs, (0.5, 0.75), strict=True):
        graph.add_weighted_edges_from([(0, 0, 0.5), (1, 0, 0.5), (1, 1, own), (0, 1, 1 - own)])
    rows: list[tuple[str, Any, dict[str, Any], Any, str]] = [
        ("DecentralizedSGD", base, {"order": "act"}, ValueError, "order.*'cta'.*'act'"),
        ("DecentralizedSGD", base, {"mixing": "ring"}, TypeError, r"^Dec.*SGD\(\) got .*'mixing'; it"),
        ("ExactDiffusion", base, {"mixing": "ring"}, TypeError, r"^ExactDiffusion\(\) got.*it takes"),
        (
            "AsynchronousGossip",
            base,
            {"topology": machines},
            ValueError,
            r"topology must be .* a graph or None for AsynchronousGossip, got Machines\(\)",
        ),
        ("AsynchronousGossip", base, {"topology": larger}, ValueError, "topology.*as ranks, 2, got 3"),
        ("AsynchronousGossip", base, {"topology": parts}, ValueError, "'ring' and 'symexp' do, .* 2 parts"),
        ("AsynchronousGossip", base, {"topology": ["ring", "exp2"][rank]}, ValueError, "topology: 'exp2'"),
        ("WinPut", base, {"topology": everyone}, ValueError, "a graph or None for WinPut, got GlobalAverage"),
        (
            "DecentralizedSGD",
            base,
            {"topology": compressed, "compression": Int8()},
            ValueError,
            r"compression must be None with topology=Neighbors\(compression=",
        ),
        ("DecentralizedSGD", base, {"topology": 3}, TypeError, "topology.*Topology.*int"),
        ("LocalSGD", base, {"topology": larger}, ValueError, "topology.*as many nodes as ranks, 2, got 3"),
        (
            "LocalSGD",
            base,
            {"topology": algorithms.Neighbors(larger)},
            ValueError,
            "topology.*ranks, 2, got 3",
        ),
        ("LocalSGD", base, {"topology": rounds if rank else None}, ValueError, "random-matching"),
        ("LocalSGD", base, {"topology": pairs[rank]}, ValueError, "topology: round 0 has the matrix"),
        ("GradientTracking", base, {"order": "cta"}, ValueError, "order.*'cta'"),
        ("LocalSGD" if rank else "DiLoCo", base, {}, ValueError, "DiLoCo"),
        ("DiLoCo", base, {"outer_lr": "1"}, TypeError, "outer_lr.*str"),
        ("GASLoC", base, {"outer_momentum": 1.5}, ValueError, "outer_momentum.*1.5"),
        ("SparseLoCo", base, {"compression": "int8"}, TypeError, "compression.*codec.*'int8'"),
        ("SparseLoCo", base, {"error_decay": 1.1}, ValueError, "error_decay must be at most 1, got 1.1"),
        ("SparseLoCo", base, {"gamma": -1.0}, ValueError, "gamma.*-1"),
        ("SparseLoCo", base, {"topology": everyone}, ValueError, "topology.*GlobalAverage"),
        ("SparseLoCo", base, {"topology": compressed}, ValueError, "compression must be None for .*Int8"),
        ("SparseLoCo", base, {"topology": rounds}, ValueError, "topology.*same weights in all rounds"),
        ("SparseLoCo", base, {"topology": "one-peer-exp2"}, ValueError, "a name such as 'exp2'; .*one-peer"),
        ("AsynchronousGossip", base, {"seed": 0.5}, TypeError, "seed.*float"),
        ("DecentralizedAdamW", base, {}, TypeError, "AdamW or Adam, got SGD"),
        ("DecentralizedAdamW", torch.optim.AdamW(parameters, amsgrad=True), {}, ValueError, "amsgrad"),
        (
            "DecentralizedAdamW",
            torch.optim.Adam(parameters, weight_decay=0.1),
            {},
            ValueError,
            "must be an AdamW",
        ),
    ]
    codecs = [Int8(), TopK(0.1)]
    of_both = "(?s)" + ".*".join(re.escape(f"compression={codec!r}") for codec in codecs)
    both = {"compression": Int8(), "gamma": 0.5}
    rows += [
        ("ExactDiffusion", rateless, {}, ValueError, "'lr'.*ExactDiffusion"),
        ("ChocoSGD", base, {"compression": None}, TypeError, "compression must be a.*None"),
        ("ChocoSGD", base, {"compression": Int8}, TypeError, "compression must be a.*Int8"),
        ("ChocoSGD", base, {"compression": codecs[rank]}, ValueError, of_both),
        ("ChocoSGD", base, {"gamma": 1.5}, ValueError, "gamma must be .*1.5"),
        ("ChocoSGD", base, {"gamma": float("nan")}, ValueError, "gamma must be .*nan"),
        ("ChocoSGD", base, {"gamma": "1"}, TypeError, "gamma must be a number, got str"),
        ("ChocoSGD", base, {"gamma": [0.5, 0.25][rank]}, ValueError, "gamma=0.25"),
        ("ChocoSGD", base, {"topology": machines}, ValueError, "topology must be a topology.*Machines"),
        ("ChocoSGD", base, {"topology": compressed}, ValueError, "compression must be None for .*Int8"),
        (
            "ChocoSGD",
            base,
            {"topology": rounds},
            ValueError,
            "topology must have the same weights in all rounds",
        ),
        ("ChocoSGD", base, {"group": VirtualRanks(2)}, ValueError, "group must be of real ranks"),
    ]
    for name, optimizer, options, error, message in rows:
        with pytest.raises(error, match=message):
            getattr(algorithms, name)(optimizer, model, **{**(both if name == "ChocoSGD" else {}), **options})
    for missing in both:
        with pytest.raises(TypeError, match=missing):
            algorithms.ChocoSGD(base, model, **{key: both[key] for key in both if key != missing})
    with pytest.raises(TypeError, match=r"^ChocoSGD\(\) missing .*'gamma'; it takes .*gamma, topology"):
        algorithms.ChocoSGD(base, model, compression=Int8())
    with pytest.raises(TypeError, match=r"^LocalSGD\(\) missing .*'model'"):
        algorithms.LocalSGD(base)
    with pytest.raises(TypeError, match=r"^WinPut\(\) too many positional arguments"):
        algorithms.WinPut(base, model, "ring")
    with pytest.raises(TypeError, match="topology.*DiGraph.*int"):
        algorithms.Neighbors(3)
    with pytest.raises(ValueError, match="must not be called .'steps'.: the frame saves these"):
        type("Mine", (algorithms.Algorithm,), {"state_vectors": ("steps",)})
    for mixing in (algorithms.Neighbors(), algorithms.Machines()):
        optimizer = algorithms.LocalSGD(base, model, topology=mixing, compression=Int8())
        assert repr(optimizer.mixing) == repr(type(mixing)(compression=Int8()))
    with pytest.raises(ZeroDivisionError), algorithms.LocalSGD(base, model) as optimizer:
        1 / 0  # noqa: B018
    with pytest.raises(RuntimeError, match="was closed"):
        optimizer.step()
    embedding = nn.Embedding(4, 2, sparse=True)
    tracking = algorithms.GradientTracking(torch.optim.SGD(embedding.parameters(), lr=0.1), embedding)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="dense"):
        tracking.step()


class Failing(torch.optim.SGD):
    """Fails in its second step, before it changes anything."""

    calls = 0

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.calls += 1
        if self.calls == 2:
            raise ZeroDivisionError
        super().step()


@on_ranks(2)
def test_push_sum_has_its_estimates_again_if_a_step_fails() -> None:
    rank, _ = start(lambda size: nx.DiGraph([(0, 1)]))
    model = nn.Linear(3, 2).double()
    optimizer = algorithms.PushSumSGD(Failing(model.parameters(), lr=0.1), model)
    loss = model(torch.ones(1, 3, dtype=torch.float64)).sum()
    loss.backward()
    optimizer.step()
    before = snapshot(model)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert optimizer.p == (1.5 if rank else 0.5)
    torch.testing.assert_close(snapshot(model), before, **EXACT)


# --- consensus distance -------------------------------------------------------------------------------------


@on_ranks([1, 4])
def test_consensus_distance() -> None:
    rank, size = start()
    model = Quadratic(rank, rank)
    model.bias.requires_grad_(False)  # frozen parameters count too
    before = model.x().clone()
    X = np.stack([start_of(r) for r in range(size)])
    expected = np.sqrt(np.mean(np.sum((X - X.mean(axis=0)) ** 2, axis=1)))
    assert fogdist.consensus_distance(model) == pytest.approx(expected, rel=1e-14)
    assert torch.equal(model.x(), before)
    values = [torch.tensor([rank * (3 + 4j)]), torch.ones(2)]
    assert fogdist.consensus_distance(values) == pytest.approx((5 * np.arange(size)).std(), rel=1e-14)
    assert fogdist.consensus_distance(torch.full((3,), 0.1, dtype=torch.bfloat16)) == 0.0
    assert fogdist.consensus_distance([]) == 0.0
    pair = dist.new_group(list(range(min(2, size))), backend="fog")
    if size > 1 > rank // 2:
        assert fogdist.consensus_distance(torch.tensor(float(rank)), group=pair) == 0.5
    with pytest.raises(TypeError, match="model.*generator"):
        fogdist.consensus_distance(model.parameters())
    with pytest.raises(ValueError, match="int64"):
        fogdist.consensus_distance(torch.tensor([1]))
    if size > 1:
        with pytest.raises(ValueError, match="model must be the same"):
            fogdist.consensus_distance(torch.zeros(1 + (rank == 0)))
