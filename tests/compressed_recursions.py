"""The recursions with compression, in NumPy over all ranks, for test_algorithms.py.

They are written with the replicas of all ranks and products with W, as in the papers, and not with sums of differences.
Codecs are those of fogdist, whose own tests are in test_compression.py; each rank's message is encoded and decoded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from fogdist.compression import Codec

if TYPE_CHECKING:
    from test_algorithms import Simulation

STEPS = 13


def decoded(codec: Codec, D: np.ndarray) -> np.ndarray:
    """Returns what is decoded of the messages of all ranks, whose vectors are rows."""
    rows = []
    for row in D:
        message = codec.encode(torch.tensor(row))
        rows.append(codec.decode(message, row.shape, torch.float64).numpy())
    return np.stack(rows)


class Replicas:
    """The replicas of a vector of all ranks."""

    def __init__(self, s: Simulation, begin: np.ndarray) -> None:
        self.codec: Codec = s.option["compression"]
        self.H = begin
        # Ranks that begin with different replicas send everything in their first round.
        self.is_known = bool((begin == begin[0]).all())

    def begin_anew(self) -> None:
        """All ranks send everything in the next round."""
        self.is_known = False

    def follow(self, X: np.ndarray) -> np.ndarray:
        """Returns the replicas with the differences."""
        if not self.is_known:
            self.is_known = True
            self.H = X
            return X
        self.H = self.H + decoded(self.codec, X - self.H)
        return self.H


def choco_sgd(s: Simulation) -> Iterator[np.ndarray]:
    """Koloskova et al., algorithm 2."""
    X, gamma = s.X, s.option["gamma"]
    replicas = Replicas(s, X)
    for k in range(STEPS):
        X = X + s.base(X, s.gradient(X, k), s.rates(k))
        if s.is_due(k):
            if s.begins_anew(k):
                replicas.begin_anew()
            H = replicas.follow(X)
            X = X + gamma * (s.mix(k) @ H - H)
        yield X


def is_exact_average(W: np.ndarray) -> bool:
    """Returns whether W is the exact average of all ranks but those that are lost, whose rows are of the identity."""
    living = np.diag(W) < 1
    return np.allclose(W[np.ix_(living, living)], 1 / living.sum())


def sparse_loco(s: Simulation) -> Iterator[np.ndarray]:
    """Sarfi et al., algorithm 1, where all ranks average; else by gossip."""
    X = s.X
    gamma = s.option.get("gamma", 0.1)
    E = np.zeros_like(X)
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
                share = 0.0 if is_exact_average(W) else gamma
            M = s.option.get("error_decay", 0.95) * E + s.option.get("outer_lr", 1.0) * (X - mixed)
            M = M + share * (mixed - H)
            T = H + M
            H = replicas.follow(T)
            E = T - H
            mixed = W @ H
            if is_exact_average(W):
                replicas.H = H = mixed  # all merge
            X = mixed
        yield X
