"""Compressed differences to replicas: ranks send only how far parameters are from what their neighbors know of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from fogdist.compression import Codec
from fogdist.context import Context, current
from fogdist.training.algorithm import Algorithm, check_factor
from fogdist.training.continuing import highest, repeated
from fogdist.training.mixing import Finish, Neighbors, as_mixing
from fogdist.training.view import Models

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fogdist.training.algorithm import AlgorithmOptions

# Numbers in place of that of the weights: nothing is known of the other ranks' replicas yet, or no longer. The same on all
# ranks, because the first exchange has one more operation.
_FRESH = 0
_STALE = 1


class ReplicaAlgorithm(Algorithm):
    """Base of the algorithms that send compressed differences.

    Rank i and its out-neighbors have the same replica h_i of the vector x_i that rank i exchanges. In a round, rank i
    sends ``q_i = C(x_i - h_i)``, where C is the codec, and all of them add q_i to h_i. What the codec loses stays in
    the next difference, so replicas come as near to the vectors as the numbers allow, with any codec whose error is
    less than what it is given. A rank keeps h_i and, in place of its neighbors' replicas, their pull ``p_i = sum_j
    w_ij (h_j - h_i)``, to which a round adds ``sum_j w_ij q_j - q_i``: two vectors, however many neighbors it has.
    Sums of small differences lose less to rounding than the sum of the replicas would. `follow` makes such a round.

    The pull is right for one set of weights, so the mixing must be the same in all rounds. (With changing weights, a
    rank would need a replica of each neighbor, and of itself at each.) Where the weights do change, by a loss of ranks,
    by `fogdist.set_topology` or between a checkpoint and its loading, all ranks see that the weights are not those of
    their pulls. The next exchange then sends the vectors themselves, uncompressed, from which replicas and pulls begin
    anew. So it is if parameters are added, and at the first exchange, unless all ranks begin with the same values, which
    they compare by the largest of their numbers.

    Complex numbers are sent as pairs of real ones, and numbers of 16 bits as float32, in which replicas of them are kept too.

    Args:
        optimizer: As in `Algorithm`.
        model: As in `Algorithm`.
        gamma: The step size of the mixing, more than 0 and at most 1.
        **options: As in `Algorithm`. `compression`, the codec, must be given. `topology` must be a graph, a topology or
            None, without a codec of its own.

    Raises:
        TypeError: `compression` is no codec; `gamma` is no number; and as `Algorithm`.
        ValueError: `gamma` is out of its range; the mixing does not fit; the group is one of virtual ranks; and as
            `Algorithm`.
    """

    takes_compression: ClassVar[bool] = False
    state_vectors: ClassVar[tuple[str, ...]] = ("replica", "replica_pull")
    state_numbers: ClassVar[Mapping[str, float]] = {"replica_graph": _FRESH}
    rank_numbers: ClassVar[tuple[str, ...]] = ("replica_graph",)

    compared: ClassVar[tuple[str, ...]] = ("compression", "gamma")

    compression: Codec
    gamma: float
    _neighbors: Neighbors
    # What the number of the weights was computed of, the number, and whether the weights are the exact average.
    _graph: tuple[tuple[object, ...], int, bool]

    def __init__(
        self,
        optimizer: Optimizer,
        model: Models,
        *,
        gamma: float,
        **options: Unpack[AlgorithmOptions],
    ) -> None:
        compression = options.pop("compression", None)
        if not isinstance(compression, Codec):
            raise TypeError(f"compression must be a codec of fogdist.compression, got {compression!r}")
        self.compression = compression
        self.gamma = check_factor(gamma, "gamma", positive=True)
        if self.gamma > 1.0:
            raise ValueError(f"gamma must be more than 0 and at most 1, got {gamma}")
        context = current(options.get("group"))
        given = as_mixing(options.get("topology"), context)
        if type(given) is not Neighbors:
            raise ValueError(
                f"topology must be a topology, a graph or None for {self.algorithm_name}, got {given!r}"
            )
        # A sequence of rounds may have one round on few ranks, but has several once others have joined.
        if given.topology is not None and given.topology.grown(2 * given.topology.size + 1).period != 1:
            raise ValueError(
                f"topology must have the same weights in all rounds for {self.algorithm_name}, which keeps a weighted "
                f"sum of its neighbors' replicas: a graph, or a name such as 'exp2'; got {given!r}, a sequence of rounds"
            )
        if given.compression is None and context.carried_out(given) is not given:
            raise ValueError(f"group must be of real ranks for {self.algorithm_name}, got virtual ranks")
        self._neighbors = Neighbors(given.topology, compression=given.compression)
        self._neighbors.weights = ()  # none can be set for a step
        self._graph = ((), _STALE, False)
        options["topology"] = self._neighbors
        super().__init__(optimizer, model, **options)

    def keeps_copies(self) -> bool:
        """See `Algorithm.keeps_copies`: not with its codec, which takes all vectors as one."""
        return False

    def initial(self, name: str) -> list[Tensor]:
        """Returns copies of the parameters for "replica", and zeros for all else."""
        vectors = self.buckets.copies() if name == "replica" else self.buckets.zeros()
        return [_at_least_32_bits(vector) for vector in vectors]

    def refresh(self) -> None:
        """See `Algorithm.refresh`; replicas of other parameters are stale."""
        before = self.buckets
        super().refresh()
        # The weights alone do not show it if parameters are frozen and unfrozen between two exchanges: their replicas
        # begin at this rank's own values then.
        if self.buckets is not before:
            self._make_stale()

    def members_changed(self) -> None:
        """Replicas of lost ranks are in the pulls, and ranks may have made different numbers of exchanges: all is stale."""
        self._make_stale()
        for pull in self.vectors["replica_pull"]:
            pull.zero_()

    def follow(self, vectors: Sequence[Tensor], *, merges: bool = False) -> list[Tensor] | None:
        """Sends the compressed differences of vectors to their replicas; arguments and result of `begin_following`."""
        return self.begin_following(vectors, range(len(vectors)), merges=merges)()

    def begin_following(
        self, vectors: Sequence[Tensor], places: Sequence[int], *, merges: bool = False
    ) -> Callable[[], list[Tensor] | None]:
        """Begins to send the compressed differences of vectors to their replicas.

        Args:
            vectors: Like some of `values`. They must not change before the exchange has ended.
            places: The indices of these.
            merges: Where the weights are the exact average, each rank's replica becomes that of all, ``h = h + sum_j w_ij
                q_j``, the same on all ranks, and pulls stay 0. The result is that without this.

        Returns:
            A function that waits, and returns the pulls of the replicas with the decoded differences added, which are the
            kept ones if nothing is merged; None if the exchange was given up after a loss.
        """
        replicas = [self.vectors["replica"][place] for place in places]
        pulls = [self.vectors["replica_pull"][place] for place in places]
        round = self.this_round()
        self.compare_replicas()
        # Of the last attempt: the number of its weights, whether these are the exact average, and whether it sent the vectors.
        graph, is_exact, is_whole = 0, False, False

        # Its results are the weighted sums of what is decoded, and then what is decoded of this rank.
        def begin(context: Context) -> Finish:
            nonlocal graph, is_exact, is_whole
            of_attempt = replace(round, context=context)
            is_whole = self.are_stale(context)
            graph, is_exact = self._graph_of(context), self._averages_exactly(context)
            if is_whole:
                own = sent = [_as_sent(x) for x in vectors]
                finish = self._neighbors.begin(sent, of_attempt)
            else:
                sent = [_as_sent(x.sub(h)) for x, h in zip(vectors, replicas, strict=True)]
                own = [torch.empty_like(each) for each in sent]
                finish = self._neighbors.begin_decoded(sent, of_attempt, self.compression, own)
            return lambda: [
                _as_kept(each, x) for each, x in zip([*finish(), *own], [*vectors, *vectors], strict=True)
            ]

        end = begin(self.context) if self._participant is None else repeated(self._participant, begin)

        def finish() -> list[Tensor] | None:
            results = end()
            if results is None:
                return None
            is_merged = merges and is_exact
            full = []
            sums, decoded = results[: len(vectors)], results[len(vectors) :]
            for x, h, p, total, own in zip(vectors, replicas, pulls, sums, decoded, strict=True):
                if is_merged:
                    if is_whole:
                        h.zero_()
                    h.add_(total)
                    p.zero_()
                    full.append(total.sub_(own))
                    continue
                moved = total.sub_(own)
                if is_whole:
                    h.copy_(x)
                    p.copy_(moved)
                else:
                    h.add_(own)
                    p.add_(moved)
                full.append(p)
            # After a part of the vectors the others are as they were: stale, or of these weights.
            if len(places) == len(self.vectors["replica"]):
                self.numbers["replica_graph"] = graph
            return full

        return finish

    def compare_replicas(self) -> None:
        """Compares the ranks' replicas before the first exchange, of which nothing is known. Collective then."""
        if self.numbers["replica_graph"] == _FRESH:
            self._begin_anew(f"{self.this_round().name}.first")

    def are_stale(self, context: Context) -> bool:
        """Returns whether the kept vectors are of other weights or parameters, so that ranks send the vectors themselves."""
        return bool(self.numbers["replica_graph"] != self._graph_of(context))

    def _averages_exactly(self, context: Context) -> bool:
        """Returns whether the mixing is the exact average of all ranks of a group."""
        self._graph_of(context)
        return self._graph[2]

    def _begin_anew(self, title: str) -> None:
        """Finds out whether all ranks have the same replicas, which then pull nowhere; if not, they are stale. Collective."""
        mark = _number_of(_as_sent(each).view(torch.uint8).cpu().numpy() for each in self.vectors["replica"])
        is_alike = highest(self.context, self._participant, [mark, -mark], title) == [mark, -mark]
        self.numbers["replica_graph"] = self._graph_of(self.context) if is_alike else _STALE
        for pull in self.vectors["replica_pull"]:
            pull.zero_()

    def _graph_of(self, context: Context) -> int:
        """Returns a number of the weights and of the layout of the vectors, the same on all ranks."""
        of: tuple[Any, ...] = (context, context.topology, self.buckets)
        if len(self._graph[0]) != len(of) or any(a is not b for a, b in zip(self._graph[0], of, strict=True)):
            matrix = self._neighbors.topology_in(context).matrix(0)
            number = _number_of([matrix.tobytes(), "\n".join(self.buckets.layout()).encode()])
            is_exact = bool(np.allclose(matrix, 1 / len(matrix), rtol=0, atol=1e-12))
            self._graph = (of, number + 2, is_exact)  # neither fresh nor stale
        return self._graph[1]

    def _make_stale(self) -> None:
        if self.numbers["replica_graph"] != _FRESH:
            self.numbers["replica_graph"] = _STALE


def _at_least_32_bits(vector: Tensor) -> Tensor:
    return vector.float() if vector.dtype in (torch.float16, torch.bfloat16) else vector


def _as_sent(vector: Tensor) -> Tensor:
    """Returns a contiguous vector as real numbers of at least 32 bits, in its own memory where that is possible."""
    if vector.is_complex():
        return torch.view_as_real(vector).reshape(-1)
    return _at_least_32_bits(vector)


def _as_kept(sent: Tensor, vector: Tensor) -> Tensor:
    """Returns what was sent, or received, for a vector in the form of the vectors that are kept."""
    return torch.view_as_complex(sent.view(-1, 2)) if vector.is_complex() else sent


def _number_of(parts: Iterable[Any]) -> int:
    """Returns a number of 48 bits for the bytes of several buffers: a float has it exactly."""
    hashed = hashlib.blake2b(digest_size=6)
    for part in parts:
        hashed.update(part)
    return int.from_bytes(hashed.digest(), "little")
