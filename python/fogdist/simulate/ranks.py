"""A group whose ranks are rows of tensors in one process, and averages of rows in place of exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fogdist.context import Context, VirtualGroup
from fogdist.static_topology import see_topology
from fogdist.topology import Topology, exponential
from fogdist.training.algorithm import check_count
from fogdist.training.mixing import Finish, GlobalAverage, Mixing, Neighbors, NoMixing, Round, topology_of

# A matrix with more than this share of nonzero entries is multiplied as it is. For a sparse one, each entry costs a pass
# over two rows; the library's product of dense matrices is some times faster for each entry.
_DENSE_ABOVE = 0.25
# How many rounds' matrices are kept: periods of sequences are shorter mostly.
_KEPT_ROUNDS = 64


class VirtualRanks(VirtualGroup):
    """A group of ranks that this process holds all: give it to an algorithm as `group`.

    No process group, and no `fogdist.init`, is needed. The algorithms are those of `fogdist.algorithms`, unchanged. Their
    parameters, and all vectors that they keep and average, must have one row for each rank, as `StackedModel` has them.
    A mixing then multiplies the rows by its matrix. Algorithms with windows are refused, as is a user's own `Mixing`.

    Args:
        size: Number of ranks, at least 1.

    Raises:
        TypeError: `size` is not an int.
        ValueError: `size` is below 1.
    """

    def __init__(self, size: int) -> None:
        check_count(size, "size")
        make: Any = super().__init__
        make(0, size)  # of no store: nothing is sent
        static = see_topology(exponential(size), None, 0, size)
        backend: Any = _OneProcess()
        self.context = _AllRanks(self, backend, 0, size, [0] * size, static)


class _AllRanks(Context):
    """The context of virtual ranks."""

    @property
    def is_alone(self) -> bool:
        """See `Context.is_alone`."""
        return self.size == 1

    @property
    def held(self) -> int:
        """See `Context.held`."""
        return self.size

    def carried_out(self, mixing: Any) -> Any:
        """See `Context.carried_out`."""
        return mixing if isinstance(mixing, RowMixing) else RowMixing(mixing, self.size)


class _OneProcess:
    """What virtual ranks have for a backend: their one process agrees with itself, and sends nothing."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def __getattr__(self, name: str) -> Any:
        raise ValueError(
            f"group must be of real ranks for {name}: virtual ranks (fogdist.simulate) have neither messages nor windows, "
            "only the averages of algorithms that go in step"
        )

    def agree(self, sums: Tensor, *, name: str = "") -> _Done:
        return _Done()


class _Done:
    """Work that is done."""

    def wait(self) -> None:
        """Returns at once."""


class RowMixing(Mixing):
    """What a mixing does to ranks that are rows: in each round the product with its matrix.

    Args:
        mixing: `Neighbors`, `GlobalAverage` or `NoMixing`.
        size: Number of ranks.

    Raises:
        TypeError: `mixing` is another one, whose matrix is not known here.
        ValueError: A topology of another number of ranks; compression.
    """

    def __init__(self, mixing: Any, size: int) -> None:
        if type(mixing) not in (Neighbors, GlobalAverage, NoMixing):
            raise TypeError(
                "topology must be a fogdist.topology.Topology, a networkx.DiGraph, GlobalAverage(), NoMixing() or None "
                f"for virtual ranks, got {mixing!r}"
            )
        if isinstance(mixing, Neighbors) and mixing.compression is not None:
            raise ValueError(
                f"compression must be None for virtual ranks, which send nothing, got {mixing.compression!r}"
            )
        self._mixing = mixing
        self._size = size
        self._topology: Topology | None = mixing.topology if isinstance(mixing, Neighbors) else None
        if self._topology is not None and self._topology.size != size:
            raise ValueError(f"topology must have as many nodes as ranks, {size}, got {self._topology.size}")
        self._kept: dict[tuple[int, bool, torch.dtype, torch.device], Tensor] = {}

    def __repr__(self) -> str:
        return repr(self._mixing)

    def items(self, context: Context) -> list[str]:
        """See `Mixing.items`: one process has nobody to compare with."""
        return []

    def begin(self, tensors: Sequence[Tensor], round: Round, in_place: bool = False) -> Finish:
        """See `Mixing.begin`; all is done at once."""
        return self._products(tensors, round, in_place, is_push=False)

    def begin_push(self, tensors: Sequence[Tensor], round: Round, in_place: bool = False) -> Finish:
        """See `Mixing.begin_push`."""
        return self._products(tensors, round, in_place, is_push=True)

    def _products(self, tensors: Sequence[Tensor], round: Round, in_place: bool, *, is_push: bool) -> Finish:
        mixed = [self._product(tensor, round, is_push) for tensor in tensors]
        if not in_place:
            return lambda: mixed

        def finish() -> list[Tensor]:
            for tensor, result in zip(tensors, mixed, strict=True):
                tensor.copy_(result)
            return list(tensors)

        return finish

    def _product(self, tensor: Tensor, round: Round, is_push: bool) -> Tensor:
        if tensor.numel() % self._size:
            raise ValueError(
                f"tensors must have a row for each of {self._size} ranks, got one of shape {tuple(tensor.shape)}"
            )
        if isinstance(self._mixing, NoMixing):
            return tensor.clone()
        rows = tensor.view(self._size, -1)
        if isinstance(self._mixing, GlobalAverage):
            return rows.mean(dim=0, keepdim=True).expand_as(rows).reshape(tensor.shape)
        return (self._operator(round, is_push, tensor) @ rows).view(tensor.shape)

    def _operator(self, round: Round, is_push: bool, like: Tensor) -> Tensor:
        """The transposed matrix of a round, as `like` needs it: a row is a receiver."""
        topology = self._topology
        if topology is None:
            # Which the user may set anew at any time.
            return as_operator(_pushed(topology_of(round.context).matrix(), is_push), like)
        number = round.number if topology.period is None else round.number % topology.period
        key = (number, is_push, like.dtype, like.device)
        if key not in self._kept:
            if len(self._kept) >= _KEPT_ROUNDS:
                self._kept.clear()
            self._kept[key] = as_operator(_pushed(topology.matrix(number), is_push), like)
        return self._kept[key]


def as_operator(matrix: np.ndarray[Any, Any], like: Tensor) -> Tensor:
    """Returns the transpose of a mixing matrix, sparse if it is: ``as_operator(W, X) @ X`` are all ranks' averages.

    Args:
        matrix: Of shape (n, n), a row a sender.
        like: Tensor whose dtype and device the result has.

    Returns:
        A dense or a sparse tensor of shape (n, n), a row a receiver.
    """
    senders, receivers = np.nonzero(matrix)
    if len(senders) > _DENSE_ABOVE * matrix.size:
        return torch.tensor(matrix.T, dtype=like.dtype, device=like.device)
    weights = torch.tensor(matrix[senders, receivers], dtype=like.dtype)
    places = torch.tensor(np.stack([receivers, senders]))
    made = torch.sparse_coo_tensor(places, weights, matrix.shape, device=like.device, check_invariants=False)
    return made.coalesce()


def _pushed(matrix: np.ndarray[Any, Any], is_push: bool) -> np.ndarray[Any, Any]:
    """The matrix of push-sum along the edges of another one: a rank and its out-neighbors get equal shares."""
    if not is_push:
        return matrix
    edges = matrix != 0
    np.fill_diagonal(edges, True)
    shares: np.ndarray[Any, Any] = edges / edges.sum(axis=1, keepdims=True)
    return shares
