"""Asynchronous diffusion: averages with values that neighbors put, or that a rank gets from them, at each rank's pace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fogdist.training.view import setting
from fogdist.training.window_algorithm import WindowAlgorithm
from fogdist.windows import Window


class AsynchronousDiffusion(WindowAlgorithm):
    """Base of both: ``x+ = w_ii x + sum_j w_ji slot_j + d(x)``, with the current values of the slots.

    A neighbor whose values have not arrived yet, or which has paused or is lost, does not count: its weight is added to that
    of this rank's own x. (Zhao and Sayed, "Asynchronous adaptation and learning over networks", IEEE Transactions on Signal
    Processing 63, 2015.)

    Attributes:
        skip_lost: True to go on without neighbors that are lost. By default `step` raises.
    """

    skip_lost: bool = setting(False)
    _heard: WeakKeyDictionary[Window, set[int]]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._heard = WeakKeyDictionary()
        super().__init__(*arguments, **options)

    def keep_pace(self) -> None:
        """See `WindowAlgorithm.keep_pace`. Raises the error of a neighbor that is lost, and may not be missed."""
        super().keep_pace()
        if self._pace is not None:
            for rank in self._pace.peers:
                if self._pace.is_gone(rank) and not self._may_miss(rank):
                    self._pace.raise_loss(rank)

    def take(self, window: Window) -> None:
        """See `WindowAlgorithm`."""
        own, weights = self._given_weights() or self._weights_of_round()
        missing = {rank for rank in window.in_neighbors if not self._counts(window, rank)}
        window.update(
            self_weight=own + sum(weight for rank, weight in weights.items() if rank in missing),
            neighbor_weights={rank: weight for rank, weight in weights.items() if rank not in missing},
        )

    def check_weights(self) -> None:
        """See `WindowAlgorithm.check_weights`."""
        self._given_weights()

    def _given_weights(self) -> tuple[float, dict[int, float]] | None:
        """Returns the weights that the user has set for the average, if any.

        Raises:
            TypeError: `src_weights` is not a dict.
        """
        if self.self_weight is None:
            return None
        if not isinstance(self.src_weights, Mapping):
            raise TypeError(
                "with self_weight, src_weights must be a dict of ranks to weights, got "
                f"{type(self.src_weights).__name__}"
            )
        return self.self_weight, dict(self.src_weights)

    def _weights_of_round(self) -> tuple[float, dict[int, float]]:
        if self._plans.topology is None:  # the group's, whose weights may have any sum
            return self.context.topology.mean_weights
        plan = self._plans.plan(self.rounds)
        return plan.self_weight, dict(plan.sources)

    def _counts(self, window: Window, rank: int) -> bool:
        """Returns whether the slot of an in-neighbor has values of a rank that takes part."""
        heard = self._heard.setdefault(window, set())
        if rank not in heard and window.version(rank) > 0:
            heard.add(rank)  # an update sets versions to 0, so ranks that were heard once are remembered
        return rank in heard and (self.force_barrier or self._takes_part(rank))

    def _takes_part(self, rank: int) -> bool:
        return self._pace is not None and self._pace.takes_part(rank) and not self._pace.is_gone(rank)

    def _may_miss(self, rank: int) -> bool:
        # A rank that has paused may have finished its work, and its process may end.
        is_paused = self._pace is not None and not self._pace.takes_part(rank)
        return is_paused or self.skip_lost or self.on_loss == "continue"

    def _wait(self) -> RuntimeError | None:
        error = super()._wait()
        if isinstance(error, dist.DistBackendError) and self._pace is not None:
            peers = self._pace.peers
            gone = [rank for rank in peers if self._pace.is_gone(rank)]
            # Without a loss, those that have paused may be about to end; a neighbor that takes part has failed to answer.
            may_go_on = self.on_loss == "continue" or not any(map(self._pace.takes_part, peers))
            return None if (all(map(self._may_miss, gone)) if gone else may_go_on) else error
        return error


class WinPut(AsynchronousDiffusion):
    """Asynchronous diffusion by puts: a rank writes its parameters to its neighbors and averages its slots.

    At the end of a forward pass a rank puts its parameters into its slots at its out-neighbors, which take no part.
    `step` averages the parameters with the current values of the slots and then makes the optimizer's own step with the
    gradient of the old parameters. No rank waits for another one: the neighbors of a slow rank use its old parameters.

    With ``on_loss="continue"`` a rank goes on without lost ranks; and once the topology falls apart without them, all ranks
    that are left agree in their next steps and go on along what `Topology.among` makes of it.

    The arguments are those of `WindowAlgorithm`.

    Attributes:
        dst_weights: {out-neighbor: weight} of the next put, or out-neighbors that all weigh 1; None for those
            of the round. The slots at the others keep their values.
        self_weight, src_weights: Weights of the next average, both or none of them: of this rank's parameters
            and {in-neighbor: weight} of the slots. None for the topology's.
        force_barrier: As in `WindowAlgorithm`.
        skip_lost: As in `AsynchronousDiffusion`.
    """

    own_weights: ClassVar[tuple[str, ...]] = ("dst_weights", "self_weight", "src_weights")
    goes_on_after_losses: ClassVar[bool] = True

    def send(self, window: Window) -> dist.Work:
        """See `WindowAlgorithm`."""
        return self.put(window, dict(self.destinations()) if self.dst_weights is None else self.dst_weights)

    def put(self, window: Window, peers: Iterable[int] | Mapping[int, float]) -> dist.Work:
        """Begins to put the parameters into the slots at some neighbors, with the number of their iteration as p."""
        window.p = self.rounds + 1.0  # 0 means that no values have arrived
        # Neighbors that are lost, and may not be missed, end the next step.
        return window.put(window.tensor, async_op=True, dst_weights=peers, with_p=True, skip_lost=True)

    def put_to_all(self) -> None:
        """Puts the parameters into the slots at all out-neighbors, and shows the count of iterations."""
        self.buckets.load()
        self._in_flight += [self.put(window, window.out_neighbors) for window in self.windows]
        if self._pace is not None:
            self._pace.advance(self.rounds)

    def destinations(self) -> list[tuple[int, float]]:
        """Returns the ranks that a round's values are put to, each with the weight 1."""
        if self._plans.topology is None:
            return [(rank, 1.0) for rank in self.context.topology.out_neighbors]
        return self._plans.plan(self.rounds).destinations

    def take_all(self) -> None:
        """See `WindowAlgorithm.take_all`."""
        super().take_all()
        if self._participant is not None:
            self._participant.completed = self.rounds + 1

    def members_changed(self) -> None:
        """Opens windows among the ranks of an epoch: what all of them do first after an agreement round."""
        assert self._participant is not None and self._ends is not None
        if self._fog_ended:  # another optimizer has taken over the model on all ranks
            return
        if self._closing is not None and max(self._ends.completed, self._ends.resume) > self._closing:
            return  # all ranks have come to `close`, as this one or another one knows
        self._wait()
        self.rounds = max(self.rounds, self._participant.resume)
        # If another rank is lost now, the new group fails, and the ranks agree again in their next steps. The old windows
        # end when the last neighbor has left them.
        with contextlib.suppress(dist.DistBackendError):
            self._open()
            self.put_to_all()
        if self._closing is not None and self._pace is not None:
            self._wait()
            self._pace.pause()

    def _given_weights(self) -> tuple[float, dict[int, float]] | None:
        if self.self_weight is None and self.src_weights is not None:
            raise ValueError("self_weight and src_weights must be set together, got src_weights alone")
        return super()._given_weights()


class PullGet(AsynchronousDiffusion):
    """Asynchronous diffusion by gets: a rank reads its neighbors' parameters when it needs them.

    `step` gets the current parameters of the in-neighbors, which take no part, averages with them, and then makes the
    optimizer's own step with the gradient of the old parameters. Unlike `WinPut`, it does not use old parameters of the
    neighbors. (A get at the forward pass would make them older by a backward pass, which may be several steps of a
    neighbor.) A rank holds the mutexes of its windows while its optimizer changes the parameters, so no neighbor gets
    them half changed.

    The arguments are those of `WindowAlgorithm`.

    Attributes:
        src_weights: In-neighbors of the next get; None for all of them. Without `self_weight` a dict gives the factors
            by which the parameters are multiplied when they are fetched, and the topology's weights follow, as in
            BlueFog; an in-neighbor that is not in it counts with its values of an earlier get. With `self_weight` it is
            {in-neighbor: weight} of the average, and other in-neighbors do not count.
        self_weight: Weight of this rank's parameters in the next average; None for the topology's.
        force_barrier: As in `WindowAlgorithm`.
        skip_lost: As in `AsynchronousDiffusion`.
    """

    own_weights: ClassVar[tuple[str, ...]] = ("self_weight", "src_weights")

    def send(self, window: Window) -> dist.Work:
        """See `WindowAlgorithm`."""
        sources: Iterable[int] | Mapping[int, float] | None = self.src_weights
        given = self._given_weights()
        if sources is None or given is not None:
            sources = list((given or self._weights_of_round())[1])
        return window.get(src_weights=sources, require_mutex=True, skip_lost=True, async_op=True)

    def begin(self) -> None:
        """Only checks the weights. Values from a get at this time would be outdated in `step`."""
        self.check_weights()

    def finish(self) -> None:
        """Gets the current values of the neighbors and averages with them."""
        self.keep_pace()
        super().begin()
        self.take_all()

    def stepping(self) -> AbstractContextManager[None]:
        """Holds the mutexes of the windows."""
        return self._locking()

    @contextmanager
    def _locking(self) -> Iterator[None]:
        # This cannot deadlock: a rank that gets holds one mutex and waits for nothing else.
        with ExitStack() as stack:
            for window in self.windows if self._pace is not None else []:  # which are freed otherwise
                stack.enter_context(window.lock())
            yield
            self.buckets.write_changes()
            self.buckets.load()  # releasing a lock waits for the device of the parameters
