"""The recursions with compression, in NumPy over all ranks, for test_algorithms.py.

They are written with the replicas of all ranks and products with W, as in the papers, and not with sums of differences.
Codecs are those of fogdist, whose own tests are in test_compression.py; each rank's message is encoded and decoded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from fogdist.algorithms.power_gossip import drawn
from fogdist.compression import Codec

if TYPE_CHECKING:
    from test_algorithms import Simulation

STEPS = 13


def decoded(codec: Codec, D: np.ndarray, counter: int, near: np.ndarray | None = None) -> np.ndarray:
    """Returns what is decoded of the messages of all ranks, whose vectors are rows."""
    rows = []
    for rank, row in enumerate(D):
        message = codec.encode(torch.tensor(row), counter=counter, rank=rank)
        close = None if near is None else torch.from_numpy(near)
        rows.append(codec.decode(message, row.shape, torch.float64, near=close).numpy())
    return np.stack(rows)


class Replicas:
    """The replicas of a vector of all ranks."""

    def __init__(self, s: Simulation, begin: np.ndarray, share: float = 1.0) -> None:
        self.codec: Codec = s.option["compression"]
        self.H = begin
        self.share = share
        # Ranks that begin with different replicas send everything in their first round.
        self.is_known = bool((begin == begin[0]).all())

    def begin_anew(self) -> None:
        """All ranks send everything in the next round."""
        self.is_known = False

    def follow(self, X: np.ndarray, counter: int) -> np.ndarray:
        """Returns the replicas with all of the differences; only a share of these stays in them."""
        if not self.is_known:
            self.is_known = True
            self.H = X
            return X
        Q = decoded(self.codec, X - self.H, counter)
        full = self.H + Q
        self.H = self.H + self.share * Q
        return full


def choco_sgd(s: Simulation) -> Iterator[np.ndarray]:
    """Koloskova et al., algorithm 2."""
    X, gamma, t = s.X, s.option["gamma"], 0
    replicas = Replicas(s, X)
    for k in range(STEPS):
        X = X + s.base(X, s.gradient(X, k), s.rates(k))
        if s.is_due(k):
            if s.begins_anew(k):
                replicas.begin_anew()
            H = replicas.follow(X, t)
            X = X + gamma * (s.mix(k) @ H - H)
            t += 1
        yield X


def deep_squeeze(s: Simulation) -> Iterator[np.ndarray]:
    """Tang et al., algorithm 1."""
    X, gamma, t = s.X, s.option["gamma"], 0
    E = np.zeros_like(X)
    for k in range(STEPS):
        X = X + s.base(X, s.gradient(X, k), s.rates(k))
        if s.is_due(k):
            V = X + E
            D = decoded(s.option["compression"], V, t)
            E = V - D
            X = X + gamma * (s.mix(k) @ D - D)
            t += 1
        yield X


def sparse_loco(s: Simulation) -> Iterator[np.ndarray]:
    """Sarfi et al., algorithm 1, where all ranks average; else by gossip, and with Nesterov momentum."""
    X, t = s.X, 0
    momentum, gamma = s.option.get("outer_momentum", 0.0), s.option.get("gamma", 0.1)
    E = V = U = np.zeros_like(X)
    replicas = Replicas(s, X)
    H, mixed = X, X  # before the first round, ranks know nothing of each other
    share = 0.0
    for k in range(STEPS):
        X = X + s.base(X, s.gradient(X, k), s.rates(k))
        if s.is_due(k):
            W = np.full((s.size, s.size), 1 / s.size) if s.case.graph == "all" else s.mix(k)
            if s.begins_anew(k):
                replicas.begin_anew()
            if not s.loses(k):  # what is sent when a rank is lost was made before
                share = 0.0 if np.allclose(W, 1 / s.size) else gamma
            M = s.option.get("error_decay", 0.95) * E + s.option.get("outer_lr", 1.0) * (X - mixed - U)
            M = M + share * (mixed - H)
            T = H + M
            H = replicas.follow(T, t)
            E = T - H
            V = momentum * V + W @ H - mixed
            U = U + momentum * V
            mixed = W @ H
            if np.allclose(W, 1 / s.size):
                replicas.H = H = mixed  # all merge
            X = mixed + U
            t += 1
        yield X


def power_gossip(s: Simulation) -> Iterator[np.ndarray]:
    """Vogels et al.: steps of power iteration on each edge, for one matrix of 2 x 3, and averages of a vector."""
    X = s.X
    known: dict[tuple[int, int], np.ndarray] = {}
    t = 0
    for k in range(STEPS):
        X = X + s.base(X, s.gradient(X, k), s.rates(k))
        if s.is_due(k):
            W, gamma = s.mix(k), s.option.get("gamma", 1.0)
            if s.loses(k):
                known = {}
            moved = X + gamma * (W @ X - X)
            moved[:, :6] = X[:, :6]
            for i, j in itertools.combinations(range(s.size), 2):
                if W[i, j]:
                    M = (X[i] - X[j])[:6].reshape(2, 3)
                    start = drawn((3, 1), 0, "'weight'", (s.number_of(i, k), s.number_of(j, k)), t).numpy()
                    Q = M.T @ (P := np.linalg.qr(M @ known.get((i, j), start))[0])
                    known[i, j] = Q
                    moved[i, :6] -= gamma * W[i, j] * (P @ Q.T).reshape(-1)
                    moved[j, :6] += gamma * W[i, j] * (P @ Q.T).reshape(-1)
            X = moved
            t += 1
        yield X


def beer(s: Simulation) -> Iterator[np.ndarray]:
    """Zhao et al., algorithm 1, with the tracker's first exchange in the first round."""
    X, gamma, t = s.X, s.option["gamma"], 0
    before = np.zeros_like(X)
    Y = np.zeros_like(X)
    of_x, of_y = Replicas(s, X), Replicas(s, Y)
    # As long as ranks know nothing of each other, they are pulled nowhere.
    pull_x = pull_y = np.zeros_like(X)
    for k in range(STEPS):
        G = s.gradient(X, k)
        Y, before = Y + G - before, G
        if s.is_due(k):
            Y = Y + gamma * pull_y
            if s.loses(k):
                Y, pull_x = G, np.zeros_like(X)
            if s.begins_anew(k):
                of_x.begin_anew()
                of_y.begin_anew()
            g = of_y.follow(Y, 2 * t)
            pull_y = s.mix(k) @ g - g
        X = X + s.base(X, Y, s.rates(k))
        if s.is_due(k):
            X = X + gamma * pull_x
            H = of_x.follow(X, 2 * t + 1)
            pull_x = s.mix(k) @ H - H
            t += 1
        yield X


def lead(s: Simulation) -> Iterator[np.ndarray]:
    """Liu et al., algorithm 1, with the dual variable D = eta times theirs where the learning rate changes."""
    X, gamma, t = s.X, s.option["gamma"], 0
    D = np.zeros_like(X)
    replicas = Replicas(s, X, s.option.get("alpha", 0.5))
    for k in range(STEPS):
        rates = s.rates(k)
        step = s.base(X, s.gradient(X, k), rates)
        X = X + step
        if s.is_due(k):
            if s.loses(k):
                D = np.zeros_like(D)
            if s.begins_anew(k):
                replicas.begin_anew()
            full = replicas.follow(X - rates * D, t)
            D = D + gamma / (2 * rates) * (full - s.mix(k) @ full)
            X = X - rates * D
            t += 1
        yield X


def moniqua_sgd(s: Simulation) -> Iterator[np.ndarray]:
    """Lu and De Sa, algorithm 1: each receiver decodes with its own values."""
    X, gamma, t = s.X, s.option["gamma"], 0
    for k in range(STEPS):
        G = s.gradient(X, k)
        if s.is_due(k):
            W = s.mix(k)
            seen = np.stack(
                [decoded(s.option["compression"], X, t, near) for near in X]
            )  # [receiver, sender]
            own = np.stack([seen[rank, rank] for rank in range(s.size)])
            X = X + gamma * (np.einsum("ij,ijd->id", W, seen) - own)
            t += 1
        X = X + s.base(X, G, s.rates(k))
        yield X


COMPRESSED: dict[str, Callable[[Any], Iterator[np.ndarray]]] = {
    "ChocoSGD": choco_sgd,
    "DeepSqueeze": deep_squeeze,
    "BEER": beer,
    "LEAD": lead,
    "MoniquaSGD": moniqua_sgd,
}
