"""The peers and weights of the averages of an algorithm, round by round: its argument `topology`."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fogdist.agreement import digest
from fogdist.compression import Codec, encoding_of
from fogdist.context import Context, require_session
from fogdist.exchange import GATHERING_RANKS, RANKS, Exchange
from fogdist.lazy import nx
from fogdist.memory import empty_flat
from fogdist.operations import begin_average, begin_between_machines
from fogdist.topology import Topology, named
from fogdist.topology.validation import no_topology
from fogdist.topology.weights import SUM_TOLERANCE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fog_pg._C import NeighborPlan

# The types of the argument `topology`, which `as_topology` converts.
TopologyLike: TypeAlias = "nx.DiGraph | Sequence[nx.DiGraph] | Topology | str | None"

# The most rounds of a topology that ranks compare and that are cached. Periods are mostly a few rounds, and
# topologies that differ usually differ in an early round.
_COMPARED_ROUNDS = 64
_KEPT_PLANS = 1024
# A function that waits for an exchange in flight and returns its results, one for each given tensor.
Finish: TypeAlias = Callable[[], list[Tensor]]

# The backend remembers every name, so the names of rounds repeat.
_ROUND_NAMES = 64


class Samples:
    """How many samples the ranks have used since their last exchange: the weights of their values in the mean.

    Args:
        count: This rank's.
        name: The same on all ranks, as of a round.
    """

    def __init__(self, count: float, name: str) -> None:
        self.count = count
        self._name = f"{name} samples"
        # A round may have several exchanges; in each group the ranks tell their counts once.
        self._told: tuple[Context, list[float]] | None = None

    def share(self, context: Context) -> float:
        """Returns this rank's count relative to the mean of all ranks; 1 if all have none. Collective and blocking."""

        def begin(counts: Tensor) -> dist.Work:
            return context.backend.allreduce_named(counts, dist.ReduceOp.SUM, name=self._name)

        total = self._tell(context, begin)[0]
        return self.count * context.size / total if total else 1.0

    def shares_of(self, context: Context, W: NDArray[np.float64]) -> dict[int, float]:
        """Returns the weights of the neighbors' values at this rank. Blocking; neighbors call it together.

        They are those of Hastings' rule: with the counts n, rank i gives to rank j the weight ``W[j, i]`` of the topology
        times ``min(1, n_j / n_i)``. So ``n_i`` times the weight is the same at both ends of an edge, and an average keeps the
        sum of all ``n_i x_i`` (Hastings, Biometrika 57, 1970; for averages among neighbors: Zhao and Sayed, "Performance
        Limits for Distributed Estimation Over LMS Adaptive Networks", IEEE Transactions on Signal Processing 60, 2012). If all
        counts are equal, the weights are the topology's.

        Args:
            context: The group.
            W: The symmetric matrix of the round.
        """
        own = context.rank
        neighbors = [int(j) for j in np.flatnonzero(W[own]) if j != own]
        peers = tuple((j, 1.0) for j in neighbors)

        def begin(counts: Tensor) -> dist.Work:
            plan = Exchange(GATHERING_RANKS, own, context.size, 1.0, peers, peers).plan
            return context.backend.neighbor_allgather(counts, plan, name=self._name)

        counts = dict(zip(neighbors, self._tell(context, begin), strict=True))
        return {
            j: float(W[j, own] if self.count <= count else W[own, j] * (count / self.count))
            for j, count in counts.items()
        }

    def _tell(self, context: Context, begin: Callable[[Tensor], dist.Work]) -> list[float]:
        """Returns what an exchange of the counts gives, which is made once."""
        if self._told is None or self._told[0] is not context:
            counts = torch.tensor([self.count], dtype=torch.float64, device="cpu")
            work = begin(counts)
            work.wait()
            self._told = context, work.get_future().value()[0].tolist()
        return self._told[1]


class Plans:
    """The exchanges of one rank: round t is `plan(t)`.

    Args:
        topology: As `as_topology`; None for the group's topology at the time of each round.
        context: The group.

    If the group is what is left of a larger one, a topology of the larger one stands for what is left of it.

    Attributes:
        topology: The argument as rounds; None for the group's topology.
        context: The group.

    Raises:
        TypeError: As `as_topology`.
        ValueError: Its nodes are not the group's ranks; and as `as_topology`.
    """

    def __init__(self, topology: TopologyLike, context: Context) -> None:
        self.topology = as_topology(topology, context.size)
        self.context = context
        survivors = context.survivors
        if survivors and self.topology is not None and self.topology.size == survivors.size:
            self.topology = self.topology.grown(survivors.numbers).among(survivors.living)
        if self.topology is not None and self.topology.size != context.size:
            raise ValueError(
                f"topology must have as many nodes as ranks, {context.size}, got {self.topology.size}"
            )
        # Short sequences repeat often, so the plan of each round is computed once.
        self._plans: dict[tuple[int, bool], NeighborPlan] = {}

    def items(self) -> list[str]:
        """Returns the items that must be the same on all ranks."""
        topology = self.topology
        if topology is None:
            return ["topology: the group's topology"]
        count = min(topology.period, _COMPARED_ROUNDS)
        rounds = (digest(topology.matrix(t).tobytes().hex()) for t in range(count))
        return [
            f"topology: {topology.name!r} of period {topology.period}",
            *(f"topology: round {t} has the matrix {matrix}" for t, matrix in enumerate(rounds)),
        ]

    def plan(self, t: int, is_push: bool = False) -> NeighborPlan:
        """Returns this rank's weighted average in round t, or its sums of push-sum.

        In sums of push-sum the rank keeps and sends equal shares, which add up to 1. A topology defines only the ranks to
        send to then. Its weights are those of receivers and do not count.
        """
        if self.topology is None:
            static = self.context.topology
            return self._push(static.in_neighbors, static.out_neighbors) if is_push else static.along.plan
        key = t % self.topology.period, is_push
        if key not in self._plans:
            if len(self._plans) >= _KEPT_PLANS:
                self._plans.clear()
            peers = self.topology.peers(self.context.rank, key[0])
            sources, destinations = peers["src_weights"], peers["dst_weights"]
            if is_push:
                self._plans[key] = self._push(sources, destinations)
            else:  # the receivers hold the weights
                self._plans[key] = self._made(
                    peers["self_weight"], sorted(sources.items()), [(rank, 1.0) for rank in destinations]
                )
        return self._plans[key]

    def by_samples(self, t: int, samples: Samples) -> NeighborPlan:
        """Returns this rank's weighted average in round t, with weights by the ranks' samples; see `Samples.shares_of`.

        Raises:
            ValueError: The edges of this rank have other weights in the one direction than in the other.
        """
        topology = self.topology or self.context.topology.as_topology()
        W, own = topology.matrix(t), self.context.rank
        _check_equal(topology, W[own], W[:, own])
        shares = samples.shares_of(self.context, W)
        kept = float(W[own, own]) + sum(float(W[j, own]) - share for j, share in shares.items())
        return self._made(kept, sorted(shares.items()), [(rank, 1.0) for rank in shares])

    def check_symmetric(self) -> None:
        """Raises ValueError if the edges of a round, of the first ones of a long period, have two weights."""
        topology = self.topology or self.context.topology.as_topology()
        for t in range(min(topology.period, _COMPARED_ROUNDS)):
            _check_equal(topology, topology.matrix(t), topology.matrix(t).T)

    def _push(self, sources: Iterable[int], destinations: Iterable[int]) -> NeighborPlan:
        receivers = sorted(destinations)
        share = 1.0 / (len(receivers) + 1)
        return self._made(share, [(rank, 1.0) for rank in sorted(sources)], [(r, share) for r in receivers])

    def _made(
        self, own: float, sources: list[tuple[int, float]], destinations: list[tuple[int, float]]
    ) -> NeighborPlan:
        size = self.context.size
        return Exchange(RANKS, self.context.rank, size, own, tuple(sources), tuple(destinations)).plan


@dataclass(frozen=True)
class DynamicWeights:
    """The weights that a user sets before a round, as arguments of the two neighbor operations; None for the topology's."""

    self_weight: float | None = None
    src_weights: Mapping[int, float] | None = None
    dst_weights: Iterable[int] | Mapping[int, float] | None = None
    src_machine_weights: Mapping[int, float] | None = None
    dst_machine_weights: Iterable[int] | Mapping[int, float] | None = None
    enable_topo_check: bool = False

    def check_taken(self, mixing: Mixing) -> None:
        """Raises ValueError if weights are set that a mixing would not use."""
        for field in fields(self):
            value = getattr(self, field.name)
            is_set = bool(value) if field.default is False else value is not None
            if is_set and field.name not in mixing.weights:
                raise ValueError(
                    f"{field.name} must stay {field.default} with topology={mixing!r}, which takes "
                    f"{', '.join(mixing.weights) or 'no weights'}, got {value!r}"
                )

    def taken_by(self, mixing: Mixing) -> DynamicWeights:
        """Returns the weights that a mixing uses, without the others."""
        return DynamicWeights(**{name: getattr(self, name) for name in mixing.weights})


@dataclass(frozen=True)
class Round:
    """One round of an algorithm.

    Attributes:
        context: The group.
        number: From 0.
        name: The name of its exchange, the same on all ranks and unique among the exchanges in flight.
        weights: The user's dynamic weights.
        samples: This rank's samples since the last exchange, where ranks weigh by them; None where all weigh the same.
        watch: Is given each operation of an exchange with neighbors that has begun.
    """

    context: Context
    number: int
    name: str
    weights: DynamicWeights = DynamicWeights()
    samples: Samples | None = None
    watch: Callable[[dist.Work], None] | None = None

    @classmethod
    def of(
        cls, context: Context, number: int, owner: str, weights: DynamicWeights = DynamicWeights()
    ) -> Round:
        """Returns a round of the object with the name `owner`, which is the same on all ranks.

        The names of messages contain the round, so a rank never mixes with the values of another round.
        """
        return cls(context, number, f"{owner} round {number % _ROUND_NAMES}", weights)

    def part(self, place: int) -> Round:
        """Returns the same round for one of several exchanges."""
        return replace(self, name=f"{self.name}.{place}")


class Mixing(abc.ABC):
    """One exchange per round. All ranks must give an algorithm the same mixing.

    A user's own mixing overrides `begin`, and `__repr__`, which the ranks compare.

    Attributes:
        exchanges: Whether ranks communicate at all.
        weights: The attributes of `Round.weights` that it uses. A step with another attribute set raises ValueError,
            because the attribute would have no effect.
        weighs: Whether ranks can weigh by `Round.samples`.
    """

    exchanges: ClassVar[bool] = True
    weights: Collection[str] = ()
    weighs: ClassVar[bool] = False

    @abc.abstractmethod
    def begin(self, tensors: Sequence[Tensor], round: Round, in_place: bool = False) -> Finish:
        """Begins the weighted averages of a round.

        Args:
            tensors: This rank's values, on any devices; they must not change before the exchange is finished.
            round: The round, with its group.
            in_place: Whether the averages are written into the tensors themselves.

        Returns:
            A function that waits for the averages and returns them: the tensors themselves with `in_place`, else new
            ones, which may be changed.
        """

    def begin_push(self, tensors: Sequence[Tensor], round: Round, in_place: bool = False) -> Finish:
        """Begins the sums of push-sum of a round: each rank sends shares that add up to its own values.

        Arguments and result are those of `begin`. By default it calls `begin`, whose averages are such sums.
        """
        return self.begin(tensors, round, in_place)

    def items(self, context: Context) -> list[str]:
        """Returns the lines of text that must be the same on all ranks of a group, which compare them.

        Raises:
            ValueError: The mixing does not fit the group.
        """
        return [f"topology: {self!r}"]


# The types that algorithms accept as `topology`.
MixingLike: TypeAlias = "Mixing | TopologyLike"


class Neighbors(Mixing):
    """Averages with the neighbors of a topology's rounds, of the user's dynamic weights, or of the group's topology.

    Args:
        topology: Round t of the algorithm is round t of the topology; a graph is used in all rounds. None for the
            dynamic weights of `Round.weights` or, if these are None, for the group's topology.
        compression: A codec of `fogdist.compression`. An exchange is then ``x + sum_j w_j d_j - (1 - self_weight) d``,
            where d_j are the decoded tensors of other ranks and d is that of this rank: what other ranks gain is what
            this rank loses. So the mean of all ranks is conserved wherever the weights conserve it, whatever the
            codec's error (scheme Q2-G in Koloskova, Stich and Jaggi, ICML 2019). Ranks come as near to each other as
            the codec's error allows, and no nearer.

    Attributes:
        topology: The same as rounds, or None.
        compression: The codec, or None.

    Raises:
        TypeError: `topology` is none of these, a weight not a real number, or `compression` no codec.
        ValueError: A rank's weights in a graph do not sum to 1.
    """

    weighs: ClassVar[bool] = True

    def __init__(self, topology: TopologyLike = None, *, compression: Codec | None = None) -> None:
        self.topology = as_topology(topology)
        self.compression = compression
        self._encoding = encoding_of(compression, conserve=True)
        if self.topology is None:
            self.weights = ("self_weight", "src_weights", "dst_weights", "enable_topo_check")
        self._plans: Plans | None = None

    def __repr__(self) -> str:
        given = [] if self.topology is None else [self.topology.name]
        if self.compression is not None:
            given.append(f"compression={self.compression!r}")
        return f"Neighbors({', '.join(given)})"

    def items(self, context: Context) -> list[str]:
        """See `Mixing.items`. The items are the weights of all rounds, or of the first ones of a long period."""
        return [*self._of(context).items(), f"compression: {self.compression!r}"]

    def begin(self, tensors: Sequence[Tensor], round: Round, in_place: bool = False) -> Finish:
        """See `Mixing.begin`."""
        return self._begin(tensors, round, in_place, self._encoding)

    def begin_decoded(
        self, tensors: Sequence[Tensor], round: Round, codec: Codec, own: Sequence[Tensor]
    ) -> Finish:
        """Begins the weighted averages of what a codec makes of the tensors, that of this rank included.

        Args:
            tensors: As in `begin`.
            round: As in `begin`.
            codec: In place of `compression`.
            own: Tensors like `tensors`, which get this rank's decoded ones.
        """
        return self._begin(tensors, round, False, {"compression": codec.backend, "decoded": list(own)})

    def begin_push(self, tensors: Sequence[Tensor], round: Round, in_place: bool = False) -> Finish:
        """See `Mixing.begin_push`: a rank and its out-neighbors get equal shares of its values.

        A topology defines only the ranks to send to. Its weights are those of receivers and do not count here.
        Dynamic weights are used as they are: `self_weight` and `dst_weights` must sum to 1.
        """
        return self._begin(tensors, round, in_place, self._encoding, is_push=True)

    def topology_in(self, context: Context) -> Topology:
        """Returns the topology whose rounds a group's exchanges follow, if no weights are set."""
        return self._of(context).topology or context.topology.as_topology()

    def check_symmetric(self, context: Context) -> None:
        """Raises ValueError if weights in a group differ between the two directions of an edge."""
        self._of(context).check_symmetric()

    def _begin(
        self,
        tensors: Sequence[Tensor],
        round: Round,
        in_place: bool,
        encoding: Mapping[str, Any],
        is_push: bool = False,
    ) -> Finish:
        context, weights = round.context, round.weights
        plan: NeighborPlan | None = None
        has_none = weights == DynamicWeights() or (
            is_push and weights == DynamicWeights(enable_topo_check=True)
        )
        if round.samples is not None:
            if not has_none:
                raise ValueError(f"weights of a step must not be set with by_samples=True, got {weights}")
            plan = self._of(context).by_samples(round.number, round.samples)
        elif self.topology is not None or has_none:
            plan = self._of(context).plan(round.number, is_push)

        def start(those: list[Tensor], output: list[Tensor] | None, name: str) -> dist.Work:
            given = _encoding_for(those, encoding)
            if plan is not None:
                work = context.backend.neighbor_allreduce(those, plan, output=output, name=name, **given)
                if round.watch is not None:
                    round.watch(work)
                return work
            exchange = context.topology.exchanges.weighted(
                weights.self_weight, weights.src_weights, weights.dst_weights, weights.enable_topo_check
            )
            return begin_average(context, those, exchange, name, output, given)

        return _by_device(tensors, in_place, round.name, start)

    def _of(self, context: Context) -> Plans:
        """Returns the plans of a group. A mixing may be used in several groups, one after the other."""
        if self._plans is None or self._plans.context is not context:
            self._plans = Plans(self.topology, context)
        return self._plans


class Machines(Mixing):
    """The average over the ranks of this machine and of the neighbor machines.

    Neighbor machines are those of the machine topology (`fogdist.set_machine_topology`), or of the user's dynamic
    weights `self_weight`, `src_machine_weights` and `dst_machine_weights`.

    All machines have the same number of ranks, and more than one; so ``on_loss="continue"`` is not possible.

    Args:
        compression: As in `Neighbors`, for the messages between machines.

    Attributes:
        compression: The codec, or None.

    Raises:
        TypeError: `compression` is no codec.
    """

    weights = ("self_weight", "src_machine_weights", "dst_machine_weights", "enable_topo_check")

    def __init__(self, *, compression: Codec | None = None) -> None:
        self.compression = compression
        self._encoding = encoding_of(compression, conserve=True)

    def __repr__(self) -> str:
        return "Machines()" if self.compression is None else f"Machines(compression={self.compression!r})"

    def begin(self, tensors: Sequence[Tensor], round: Round, in_place: bool = False) -> Finish:
        """See `Mixing.begin`."""
        weights = round.weights
        given = weights.self_weight, weights.src_machine_weights, weights.dst_machine_weights

        def start(those: list[Tensor], output: list[Tensor] | None, name: str) -> dist.Work:
            return begin_between_machines(
                round.context, those, given, weights.enable_topo_check, name, output, self._encoding
            )

        return _by_device(tensors, in_place, round.name, start)


class GlobalAverage(Mixing):
    """The exact average of all ranks."""

    weighs: ClassVar[bool] = True

    def __repr__(self) -> str:
        return "GlobalAverage()"

    def begin(self, tensors: Sequence[Tensor], round: Round, in_place: bool = False) -> Finish:
        """See `Mixing.begin`."""
        if not in_place:
            # Copies in memory that may become the parameters' memory.
            tensors = [
                empty_flat(each.numel(), each.dtype, each.device).view(each.shape).copy_(each)
                for each in tensors
            ]
        if round.samples is not None and (share := round.samples.share(round.context)) != 1.0:
            for each in tensors:
                each.mul_(share)
        pending = [
            round.context.backend.allreduce_named(each, dist.ReduceOp.AVG, name=f"{round.name}.all.{place}")
            for place, each in enumerate(tensors)
        ]

        def finish() -> list[Tensor]:
            for work in pending:
                work.wait()
            return list(tensors)

        return finish


class NoMixing(Mixing):
    """No exchange."""

    exchanges: ClassVar[bool] = False
    weighs: ClassVar[bool] = True

    def __repr__(self) -> str:
        return "NoMixing()"

    def begin(self, tensors: Sequence[Tensor], round: Round, in_place: bool = False) -> Finish:
        """See `Mixing.begin`."""
        return lambda: list(tensors) if in_place else [tensor.clone() for tensor in tensors]


def as_topology(value: TopologyLike, size: int | None = None) -> Topology | None:
    """Returns a user's argument `topology` as rounds; topologies and None unchanged.

    Args:
        value: A topology; a graph, whose weights are used and must sum to 1 at each receiver; a sequence of graphs, one a
            round; or a name that `fog topology` lists.
        size: The number of ranks, for a name; None if it is not known, so that there can be none.

    Raises:
        TypeError: It is none of these, or a weight is not a real number.
        ValueError: A rank's weights do not sum to 1; no topology of this name exists for this many ranks.
    """
    if isinstance(value, str):
        if size is None:
            call = f"fogdist.topology.named({value!r}, fogdist.size())"
            raise TypeError(f"topology must be no name where the number of ranks is not known; write {call}")
        return named(value, size)
    if isinstance(value, nx.DiGraph):
        return Topology.from_graph("graph", value)
    if isinstance(value, (list, tuple)) and value and all(isinstance(graph, nx.DiGraph) for graph in value):
        return Topology("graphs", [Topology.from_graph("graph", graph).matrix() for graph in value])
    if value is not None and not isinstance(value, Topology):
        kinds = "a fogdist.topology.Topology, a networkx.DiGraph, a sequence of graphs, a name that `fog topology` lists"
        raise no_topology(value, f"{kinds}, None or, for an optimizer, a fogdist.algorithms.Mixing")
    return value


def rounds_of(topology: MixingLike, context: Context, what: str) -> Topology:
    """Returns the rounds of an argument `topology`; None is the group's topology of now.

    Args:
        topology: The argument.
        context: The group.
        what: What needs rounds, for messages: "with ..." or "for ...".

    Raises:
        TypeError: As `as_mixing`.
        ValueError: It is no topology.
    """
    given = as_mixing(topology, context)
    if type(given) is not Neighbors or given.compression is not None:
        raise ValueError(f"topology must be a topology, a graph or None {what}, got {given!r}")
    return context.topology.as_topology() if given.topology is None else given.topology


def edges_of(topology: Topology) -> NDArray[np.bool_]:
    """Returns, as a matrix, whether there is an edge in any round of a topology."""
    return np.asarray(np.any([topology.matrix(t) != 0 for t in range(topology.period)], axis=0))


def neighbors_of(topology: Topology, rank: int) -> tuple[list[int], list[int]]:
    """Returns a rank's in-neighbors and out-neighbors in any round of a topology."""
    union = edges_of(topology)
    others = [r for r in range(topology.size) if r != rank]
    return [r for r in others if union[r, rank]], [r for r in others if union[rank, r]]


def as_mixing(topology: MixingLike, context: Context, compression: Codec | None = None) -> Mixing:
    """Returns the user's argument `topology` as a Mixing.

    Args:
        topology: The argument.
        context: The group, for the topology of a name.
        compression: The codec of its messages, if it has none of its own.

    Raises:
        TypeError: It is no mixing, and as `as_topology`.
        ValueError: As `as_topology`; a codec is given beside a mixing that takes none.
    """
    if not isinstance(topology, Mixing):
        return Neighbors(as_topology(topology, context.size), compression=compression)
    if compression is None:
        return topology
    if type(topology) is Neighbors and topology.compression is None:
        return Neighbors(topology.topology, compression=compression)
    if type(topology) is Machines and topology.compression is None:
        return Machines(compression=compression)
    raise ValueError(f"compression must be None with topology={topology!r}, got {compression!r}")


def _check_equal(topology: Topology, given: NDArray[np.float64], taken: NDArray[np.float64]) -> None:
    """Raises ValueError unless two parts of a topology's matrix, of which one is that of the other's edges back, are equal."""
    if not np.allclose(given, taken, rtol=0.0, atol=SUM_TOLERANCE):
        raise ValueError(
            "topology must be symmetric in each round with by_samples=True, as 'ring', 'symexp' and 'random-matching' are, "
            f"got {topology.name!r}"
        )


def _encoding_for(those: Sequence[Tensor], encoding: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the encoding of an exchange of the tensors of one device, of all that it was made for."""
    if "decoded" not in encoding:
        return encoding
    return {**encoding, "decoded": [own for own in encoding["decoded"] if own.device == those[0].device]}


def _by_device(
    tensors: Sequence[Tensor],
    in_place: bool,
    name: str,
    start: Callable[[list[Tensor], list[Tensor] | None, str], dist.Work],
) -> Finish:
    """Starts one exchange per device, for example for numbers on the CPU and parameters on another device."""
    places: dict[torch.device, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(place)
    pending = [
        start(
            (those := [tensors[place] for place in mine]),
            those if in_place else None,
            f"{name}.{number}" if number else name,
        )
        for number, mine in enumerate(places.values())
    ]

    def finish() -> list[Tensor]:
        require_session()
        results = list(tensors)
        for mine, work in zip(places.values(), pending, strict=True):
            work.wait()
            if not in_place:
                for place, result in zip(mine, work.get_future().value(), strict=True):
                    results[place] = result
        return results

    return finish
