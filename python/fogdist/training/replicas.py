"""Compressed differences to replicas: ranks send only how far a vector is from what their neighbors know of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from fogdist.compression import Codec
from fogdist.context import Context, current
from fogdist.training.compressed import CompressedAlgorithm, Decoded, as_kept, as_sent, is_wide
from fogdist.training.continuing import repeated
from fogdist.training.mixing import Finish, Neighbors, as_mixing
from fogdist.training.view import Models

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fogdist.training.algorithm import AlgorithmOptions

# Numbers in place of that of the weights: nothing is known of the other ranks' replicas yet, or no longer. The same on all
# ranks, because the first exchange has one more operation.
_FRESH = 0
_STALE = 1


class ReplicaAlgorithm(CompressedAlgorithm):
    """Base of the algorithms that send compressed differences.

    Rank i and its out-neighbors have the same replica h_i of a vector x_i of rank i. In a round, rank i sends ``q_i =
    C(x_i - h_i)``, where C is the codec, and all of them add q_i to h_i. What the codec loses stays in the next
    difference, so replicas come as near to the vectors as the numbers allow, with any codec whose error is less than
    what it is given. A rank keeps h_i and, in place of its neighbors' replicas, their pull ``p_i = sum_j w_ij (h_j -
    h_i)``, to which a round adds ``sum_j w_ij q_j - q_i``: two vectors, however many neighbors it has. Sums of small
    differences lose less to rounding than the sum of the replicas would. `follow` makes such a round.

    The pull is right for one set of weights, so the mixing must be the same in all rounds. (With changing weights, a
    rank would need a replica of each neighbor, and of itself at each.) Where the weights do change, by a loss of ranks,
    by `fogdist.set_topology` or between a checkpoint and its loading, all ranks see that the weights are not those of
    their pulls. The next exchange then sends the vectors themselves, uncompressed, from which replicas and pulls begin
    anew. So it is if parameters are added, and at the first exchange, unless all ranks begin with the same values, which
    they compare by the largest of their numbers.

    A subclass names its replicas by `replicas`, and for each replica "x" the entries "x" and "x_pull" in `state_vectors`
    and "x_graph" in `state_numbers` and `rank_numbers`.
    """

    replicas: ClassVar[tuple[str, ...]] = ("replica",)
    state_vectors: ClassVar[tuple[str, ...]] = ("replica", "replica_pull")
    state_numbers: ClassVar[Mapping[str, float]] = {"replica_graph": _FRESH}
    rank_numbers: ClassVar[tuple[str, ...]] = ("replica_graph",)

    # What the number of the weights was computed of, the number, and whether the weights are the exact average.
    _graph: tuple[tuple[object, ...], int, bool]

    def __init__(
        self,
        optimizer: Optimizer,
        model: Models,
        *,
        compression: Codec,
        gamma: float,
        **options: Unpack[AlgorithmOptions],
    ) -> None:
        mixing = as_mixing(options.get("mixing"), current(options.get("group")))
        if type(mixing) is Neighbors:
            if mixing.topology is not None and mixing.topology.period != 1:
                raise ValueError(
                    f"mixing must have the same weights in all rounds for {self.algorithm_name}, which keeps a weighted "
                    f"sum of its neighbors' replicas, got {mixing!r}; DeepSqueeze takes any topology"
                )
            mixing = Neighbors(mixing.topology, compression=mixing.compression)
            mixing.weights = ()  # none can be set for a step
        self._graph = ((), _STALE, False)
        options["mixing"] = mixing
        super().__init__(optimizer, model, compression=compression, gamma=gamma, **options)

    def initial(self, name: str) -> list[Tensor]:
        """Returns copies of the parameters for "replica", and zeros for all else."""
        vectors = self.buckets.copies() if name == "replica" else self.buckets.zeros()
        return [vector if is_wide(vector) else vector.float() for vector in vectors]

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
        for name in self.replicas:
            for pull in self.vectors[f"{name}_pull"]:
                pull.zero_()

    def follow(
        self,
        name: str,
        vectors: Sequence[Tensor],
        *,
        part: int = 0,
        share: float = 1.0,
        merges: bool = False,
    ) -> list[Tensor] | None:
        """Sends the compressed differences of vectors to their replicas.

        Args:
            name: The replicas' name.
            vectors: Like `values`. If ranks are lost meanwhile, `members_changed` may change them.
            part: The place of this exchange in its round, from 0, if the round has several.
            share: The part of the decoded difference that is added to replicas and pulls.
            merges: Where the weights are the exact average, each rank's replica becomes that of all, ``h = h + sum_j w_ij
                q_j``, the same on all ranks, and pulls stay 0. The result is that without this. `share` must be 1.

        Returns:
            The pulls of the replicas with all of the decoded difference added, which are the kept ones if `share` is 1 and
            nothing is merged; None if the exchange was given up after a loss.
        """
        replicas, pulls, key = self.vectors[name], self.vectors[f"{name}_pull"], f"{name}_graph"
        round = self.this_round().part(part)
        counter = self.rounds * len(self.replicas) + part
        if self.numbers[key] == _FRESH:
            self._begin_anew(name, f"{round.name}.first")
        is_whole = is_merged = False  # whether the latest attempt sends the vectors themselves, and merges
        graph = _STALE

        def begin(context: Context) -> Callable[[], Decoded]:
            nonlocal is_whole, is_merged, graph
            graph = self._graph_of(context)
            is_merged = merges and self._averages_exactly(context)
            is_whole = self.numbers[key] != graph
            of_attempt = replace(round, context=context)
            if not is_whole:
                differences = [x.sub(h) for x, h in zip(vectors, replicas, strict=True)]
                return self.begin_vectors(differences, of_attempt, counter)
            sent = [as_sent(x) for x in vectors]
            finish = self._neighbors.begin(sent, of_attempt)
            return lambda: (_kept(finish(), vectors), _kept(sent, vectors))

        results = self.through_losses(begin)
        if results is None:
            return None
        full = []
        for x, h, p, total, own in zip(vectors, replicas, pulls, *results, strict=True):
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
                h.add_(own, alpha=share)
                p.add_(moved, alpha=share)
            full.append(p if is_whole or share == 1.0 else p.add(moved, alpha=1.0 - share))
        self.numbers[key] = graph
        return full

    def _averages_exactly(self, context: Context) -> bool:
        """Returns whether the mixing is the exact average of all ranks of a group."""
        self._graph_of(context)
        return self._graph[2]

    def _begin_anew(self, name: str, title: str) -> None:
        """Finds out whether all ranks have the same replicas, which then pull nowhere; if not, they are stale. Collective."""
        pulls, key = self.vectors[f"{name}_pull"], f"{name}_graph"
        mark = _number_of(as_sent(each).view(torch.uint8).cpu().numpy() for each in self.vectors[name])
        graph = _STALE

        def begin(context: Context) -> Finish:
            nonlocal graph
            graph = self._graph_of(context)
            most = torch.tensor([mark, -mark], dtype=torch.int64, device="cpu")
            work = context.backend.allreduce_named(most, dist.ReduceOp.MAX, name=title)

            def finish() -> list[Tensor]:
                work.wait()
                return [most]

            return finish

        results = begin(self.context)() if self._seat is None else repeated(self._seat, begin)()
        is_alike = results is not None and results[0].tolist() == [mark, -mark]
        self.numbers[key] = graph if is_alike else _STALE
        for pull in pulls:
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
        for name in self.replicas:
            if self.numbers[f"{name}_graph"] != _FRESH:
                self.numbers[f"{name}_graph"] = _STALE


def _kept(sent: Sequence[Tensor], vectors: Sequence[Tensor]) -> list[Tensor]:
    return [as_kept(each, vector) for each, vector in zip(sent, vectors, strict=True)]


def _number_of(parts: Iterable[Any]) -> int:
    """Returns a number of 48 bits for the bytes of several buffers: a float has it exactly."""
    hashed = hashlib.blake2b(digest_size=6)
    for part in parts:
        hashed.update(part)
    return int.from_bytes(hashed.digest(), "little")
