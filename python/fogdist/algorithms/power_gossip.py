"""PowerGossip: neighbors exchange a low-rank approximation of the difference of their parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from fogdist.context import Context, current
from fogdist.exchange import RANKS, Exchange
from fogdist.shards import is_sharded
from fogdist.training.algorithm import Algorithm, check_count
from fogdist.training.compressed import check_share
from fogdist.training.continuing import repeated
from fogdist.training.mixing import Finish, Neighbors, Round, as_mixing
from fogdist.training.plans import Plans
from fogdist.training.view import Models

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fogdist.training.algorithm import AlgorithmOptions

# How many rounds of an endless topology are checked for symmetry.
_CHECKED_ROUNDS = 64
# A column that keeps less than this share of its length next to earlier ones is their rounding.
_DEPENDENT = 1e-6


class PowerGossip(Algorithm):
    """PowerGossip: each edge moves its two ranks by a low-rank part of their difference.

    A parameter of two and more dimensions is a matrix X of n rows and m columns, all dimensions but the first in one.
    Each edge of ranks i < j keeps a matrix Q of m rows and `matrix_rank` columns, which both ranks know, and makes a step
    of power iteration on the difference ``M = X_i - X_j``::

        P   = orthonormal columns of M Q
        Q+  = M^T P,    with columns of length 1 in the next round
        X_i = X_i - gamma w_ij P Q+^T,    X_j = X_j + gamma w_ij P Q+^T

    (Vogels, Karimireddy and Jaggi, "Practical Low-Rank Communication Compression in Decentralized Deep Learning", NeurIPS
    2020, arXiv 2008.01425; the iteration is that of PowerSGD, by the same authors, NeurIPS 2019, arXiv 1905.13727.) Neither
    rank needs the other's parameters for M Q and M^T P: each sends its own product. ``P Q+^T`` is the projection of M, so
    no step size has to be found: gamma is 1. The mean of all ranks is conserved, and with a learning rate of 0 the ranks
    agree on it exactly. Q changes slowly, so over rounds P Q+^T comes to the largest singular values of M. The local step
    comes before, as in `DecentralizedSGD`.

    A message of an edge has ``iterations matrix_rank (n + m)`` numbers for a matrix. Vectors, and matrices for which that
    is no less than n m, are averaged as they are. So of a model of L square matrices of n rows, a rank sends each neighbor
    ``2 iterations matrix_rank / n`` of the bytes, and the vectors.

    Both ranks of an edge draw the same random numbers for Q at first, after a loss of ranks, and for a column of which
    nothing was left. If a checkpoint is loaded by other ranks, an edge may have two different Q; that costs some accuracy
    of the first round, and no more.

    Args:
        optimizer: As in `Algorithm`.
        model: As in `Algorithm`. The parameters must be on the CPU.
        matrix_rank: The number of columns of P and Q, at most n and m.
        iterations: Steps of power iteration in a round, the first ones without a move.
        gamma: More than 0, at most 1.
        seed: Of the random numbers; the same on all ranks.
        **options: As in `Algorithm`. `mixing` must be a graph, a topology or None, with symmetric weights in each round.
            Weights cannot be set for a step.

    Raises:
        TypeError: As `Algorithm`.
        ValueError: As `Algorithm`; a number is out of its range, the weights are not symmetric, the mixing is another one
            or compresses; virtual ranks. In `step`: the parameters are not on the CPU.
    """

    state_pieces: ClassVar[tuple[str, ...]] = ("peers", "factors")
    takes_compression: ClassVar[bool] = False

    matrix_rank: int
    iterations: int
    gamma: float
    seed: int
    _neighbors: Neighbors
    _plans: tuple[object, Plans]
    # Q of the last round, by the other rank of the edge and the parameter.
    _factors: dict[int, dict[Tensor, Tensor]]

    def __init__(
        self,
        optimizer: Optimizer,
        model: Models,
        *,
        matrix_rank: int = 1,
        iterations: int = 1,
        gamma: float = 1.0,
        seed: int = 0,
        **options: Unpack[AlgorithmOptions],
    ) -> None:
        check_count(matrix_rank, "matrix_rank")
        check_count(iterations, "iterations")
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise TypeError(f"seed must be an int, got {type(seed).__name__}")
        self.matrix_rank, self.iterations, self.seed = matrix_rank, iterations, seed
        self.gamma = check_share(gamma, "gamma")
        given = as_mixing(options.get("mixing"), current(options.get("group")))
        if type(given) is not Neighbors or given.compression is not None:
            raise ValueError(
                f"mixing must be a topology, a graph or None, without compression, for PowerGossip, got {given!r}"
            )
        self._neighbors = Neighbors(given.topology)
        self._neighbors.weights = ()  # none can be set for a step
        context = current(options.get("group"))
        if context.carried_out(self._neighbors) is not self._neighbors:
            raise ValueError("group must be of real ranks for PowerGossip, got virtual ranks")
        self._plans = (None, Plans(given.topology, context, "mixing"))
        self._plans_in(context)  # checks the weights
        self._factors = {}
        options["mixing"] = self._neighbors
        options["compare"] = {
            **options.get("compare", {}),
            "matrix_rank": matrix_rank,
            "iterations": iterations,
            "gamma": self.gamma,
            "seed": seed,
        }
        super().__init__(optimizer, model, **options)

    def combine(self) -> None:
        """See the class."""
        if self.is_alone:
            return
        for vector in self.values:
            if vector.device.type != "cpu":
                raise ValueError(
                    f"model must be on the CPU for PowerGossip, got parameters on {vector.device}"
                )
        round = self.this_round()
        matrices, rest = self._parts()
        moves: list[_Move] = []
        means: list[Tensor] = []

        def begin(context: Context) -> Finish:
            def finish() -> list[Tensor]:
                of_attempt = replace(round, context=context)
                self._plans_in(context)  # checks the weights before anything is sent
                wait = self._neighbors.begin(rest, of_attempt) if rest else list
                moves[:] = self._iterated(matrices, of_attempt) if matrices else []
                means[:] = wait()
                return []

            return finish

        results = begin(self.context)() if self._seat is None else repeated(self._seat, begin)()
        if results is None:  # given up after a loss, because other ranks had completed it
            return
        for matrix, move in zip(matrices, moves, strict=False):
            for left, right, share in zip(move.lefts, move.rights, move.shares, strict=True):
                matrix.values.addmm_(left, right.mT, alpha=-self.gamma * share)
            matrix.write()
            for peer, right in zip(move.peers, move.rights, strict=True):
                self._factors.setdefault(peer, {})[matrix.parameter] = right
        for x, mean in zip(rest, means, strict=True):
            x.add_(mean.sub_(x), alpha=self.gamma)

    def members_changed(self) -> None:
        """Ranks have other numbers now, and may have made different numbers of rounds."""
        self._factors.clear()

    def refresh(self) -> None:
        """See `Algorithm.refresh`."""
        loaded = self._loaded
        super().refresh()
        for parameter, peers in loaded.get("peers", {}).items():
            for peer, factor in zip(peers.tolist(), loaded["factors"][parameter], strict=True):
                self._factors.setdefault(peer, {})[parameter] = factor

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `Algorithm.load_state_dict`."""
        super().load_state_dict(state_dict)
        self._factors.clear()

    def _pieces(self) -> dict[str, dict[Tensor, Tensor]]:
        if self._loaded:
            return self._loaded
        pieces: dict[str, dict[Tensor, Tensor]] = {}
        for parameter in self.buckets.tensors:
            known = {peer: of[parameter] for peer, of in sorted(self._factors.items()) if parameter in of}
            if known and not is_sharded(parameter):
                pieces.setdefault("peers", {})[parameter] = torch.tensor(list(known), dtype=torch.int64)
                pieces.setdefault("factors", {})[parameter] = torch.stack(list(known.values()))
        return pieces

    def _parts(self) -> tuple[list[_Matrix], list[Tensor]]:
        """Returns the parameters that are sent as matrices, and those that are sent as they are."""
        matrices, rest = [], []
        for parameter, piece in self.buckets.pieces(self.values):
            values = torch.view_as_real(piece) if piece.is_complex() else piece
            rows = piece.shape[0] if piece.dim() > 1 else 1
            columns = values.numel() // max(rows, 1)
            width = min(self.matrix_rank, rows, columns)
            if rows > 1 and self.iterations * width * (rows + columns) < rows * columns:
                matrices.append(_Matrix(parameter, self.buckets.label_of(parameter), width, values))
            elif piece.numel() > 0:
                rest.append(piece)
        return matrices, rest

    def _iterated(self, matrices: Sequence[_Matrix], round: Round) -> list[_Move]:
        """Returns the low-rank part of each matrix's difference from that of each neighbor."""
        context, plan = round.context, self._plans_in(round.context).plan(round.number)
        peers = [peer for peer, _ in plan.sources]
        # The signs make both ranks of an edge compute the same numbers, those of the lower rank minus the higher one's.
        signs = [1.0 if context.rank < peer else -1.0 for peer in peers]
        unit = 1 / (len(peers) + 1) if plan.mean else 1.0  # the weights of a plain mean are 1
        shares = [sign * weight * unit for sign, (_, weight) in zip(signs, plan.sources, strict=True)]
        edges = [(min(context.rank, peer), max(context.rank, peer)) for peer in peers]
        exchanges = [
            Exchange(RANKS, context.rank, context.size, sign, ((peer, -sign),), ((peer, 1.0),)).plan
            for peer, sign in zip(peers, signs, strict=True)
        ]

        def differences(products: list[Tensor], number: int) -> list[Tensor]:
            """Returns the differences of all ranks' products; the first dimension is that of the edges."""
            results = [torch.empty_like(product) for product in products]
            works = [
                context.backend.neighbor_allreduce(
                    [product[place] for product in products],
                    exchange,
                    output=[result[place] for result in results],
                    name=f"{round.name} {low}-{high}.{number}",
                )
                for place, (exchange, (low, high)) in enumerate(zip(exchanges, edges, strict=True))
            ]
            for work in works:
                work.wait()
            return results

        if not peers:
            return []
        rights = [torch.stack([self._kept(matrix, peer) for peer in peers]) for matrix in matrices]
        for number in range(self.iterations):
            factors = [
                self._of_length_one(right, matrix, edges)
                for matrix, right in zip(matrices, rights, strict=True)
            ]
            products = [
                _times(matrix.values, factor) for matrix, factor in zip(matrices, factors, strict=True)
            ]
            lefts = [orthonormal(each) for each in differences(products, 2 * number)]
            products = [_times(matrix.values.mT, left) for matrix, left in zip(matrices, lefts, strict=True)]
            rights = differences(products, 2 * number + 1)
        return [_Move(peers, shares, *each) for each in zip(lefts, rights, strict=True)]

    def _kept(self, matrix: _Matrix, peer: int) -> Tensor:
        """Returns the columns that an edge had at the end of its last round; zeros if there was none."""
        shape = (matrix.values.shape[1], matrix.width)
        known = self._factors.get(peer, {}).get(matrix.parameter)
        if known is None or known.shape != shape:
            return matrix.values.new_zeros(shape)
        return known.to(matrix.values.dtype)

    def _of_length_one(self, rights: Tensor, matrix: _Matrix, edges: Sequence[tuple[int, int]]) -> Tensor:
        """Returns the columns with length 1; random ones for those that are zero or not finite."""
        lengths = rights.double().norm(dim=1, keepdim=True)
        good = (lengths > 0) & lengths.isfinite()
        units: Tensor = (rights.double() / lengths).to(rights.dtype)
        for place, edge in enumerate(edges):
            if not good[place].all():
                random = drawn((rights.shape[1], rights.shape[2]), self.seed, matrix.label, edge, self.rounds)
                units[place] = torch.where(good[place], units[place], random.to(units.dtype))
        return units

    def _plans_in(self, context: Context) -> Plans:
        """Returns the plans in a group, whose weights must be symmetric."""
        known, plans = self._plans
        if plans.context is not context or (
            known is not context.topology and self._neighbors.topology is None
        ):
            plans = Plans(self._neighbors.topology, context, "mixing")
            known = None
        if known is None:
            topology = self._neighbors.topology_in(context)
            for number in range(min(topology.period or _CHECKED_ROUNDS, _CHECKED_ROUNDS)):
                matrix = topology.matrix(number)
                if not np.allclose(matrix, matrix.T, rtol=0, atol=1e-12):
                    raise ValueError(
                        f"mixing must have symmetric weights for PowerGossip, got {topology.name!r}, whose round {number} "
                        "has others"
                    )
            self._plans = (context.topology, plans)
        return plans


class _Matrix:
    """A parameter as a matrix, of float32 at least.

    Args:
        parameter: The parameter.
        label: Its name.
        width: The number of columns of its factors.
        target: Its values, of real numbers.
    """

    def __init__(self, parameter: Tensor, label: str, width: int, target: Tensor) -> None:
        self.parameter, self.label, self.width = parameter, label, width
        self._target = target
        values = target.reshape(target.shape[0], -1)
        self.values = values.float() if values.itemsize < 4 else values

    def write(self) -> None:
        """Gives the parameter its values, if they are not in its own memory."""
        if self.values.data_ptr() != self._target.data_ptr():
            self._target.copy_(self.values.view(self._target.shape))


@dataclass
class _Move:
    """The low-rank parts of one matrix: ``lefts[e] rights[e]^T`` times ``shares[e]`` is what edge e takes from it."""

    peers: list[int]
    shares: list[float]
    lefts: Tensor
    rights: Tensor


def _times(matrix: Tensor, factors: Tensor) -> Tensor:
    """Returns the products of a matrix and factors of shape (edges, rows, columns), in one pass over the matrix."""
    edges, rows, columns = factors.shape
    wide = matrix @ factors.transpose(0, 1).reshape(rows, edges * columns)
    return wide.view(-1, edges, columns).transpose(0, 1).contiguous()


def orthonormal(factors: Tensor) -> Tensor:
    """Returns orthonormal columns that span what columns span; zero for those that depend on earlier ones.

    Args:
        factors: Shape (edges, rows, columns).
    """
    wide = factors.to(torch.float64, copy=True)
    for column in range(wide.shape[2]):
        vector, basis = wide[:, :, column : column + 1].clone(), wide[:, :, :column]
        before = vector.norm(dim=1, keepdim=True)
        for _ in range(2):  # once leaves too much rounding if little is left
            vector -= basis @ (basis.mT @ vector)
        after = vector.norm(dim=1, keepdim=True)
        # Not of NaN, which stays.
        wide[:, :, column : column + 1] = torch.where(after <= _DEPENDENT * before, 0.0, vector / after)
    result: Tensor = wide.to(factors.dtype)
    return result


def drawn(shape: tuple[int, int], seed: int, label: str, edge: tuple[int, int], round: int) -> Tensor:
    """Returns random numbers that both ranks of an edge draw for a matrix, in float64."""
    text = f"{seed} {label} {edge[0]} {edge[1]} {round}"
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
