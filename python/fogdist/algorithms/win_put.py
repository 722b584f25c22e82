"""Asynchronous diffusion over one-sided windows: averages with values that neighbors put, at each rank's pace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch.optim import Optimizer
from typing_extensions import Unpack

from fogdist.context import current
from fogdist.topology import Topology
from fogdist.training.algorithm import AlgorithmOptions, check_count
from fogdist.training.continuing import Watch
from fogdist.training.mixing import Plans, edges_of, rounds_of
from fogdist.training.overlapping import OverlappingAlgorithm
from fogdist.training.pace import MAX_STALENESS, Pace
from fogdist.training.view import Models
from fogdist.windows import Window


class WinPut(OverlappingAlgorithm):
    """Asynchronous diffusion by puts: ``x+ = w_ii x + sum_j w_ji slot_j + d(x)``.

    At the end of a forward pass a rank puts its parameters into its slots at its out-neighbors, which take no part.
    `step` averages the parameters with the current values of the slots and then makes the optimizer's own step with the
    gradient of the old parameters. No rank waits for another one: the neighbors of a slow rank use its old parameters.
    A neighbor whose values have not arrived yet, or which has paused or is lost, does not count: its weight is added to that
    of this rank's own x. (Zhao and Sayed, "Asynchronous adaptation and learning over networks", IEEE Transactions on Signal
    Processing 63, 2015.)

    Ranks wait for each other in the constructor, in `close`, in each exchange with `force_barrier`, and if a rank would run away
    from one that gets no core (`max_staleness`). Each bucket of parameters is the tensor of a window. Windows are between the
    neighbors of all rounds of `topology`. Without one they are along the group's topology, which cannot change meanwhile;
    dropping the object does not free these. `close` frees the windows, and another algorithm that takes over the model ends
    them. Parameters that are frozen at construction cannot be trained later.

    With ``on_loss="continue"`` a rank goes on without lost ranks; and once the topology falls apart without them, all ranks
    that are left agree in their next steps and go on along what `Topology.among` makes of it.

    Args:
        optimizer: As in `Algorithm`.
        model: As in `Algorithm`.
        window_prefix: The prefix of the names of the windows, the same on all ranks; by default a new name.
        max_staleness: The largest number of exchanges that a rank makes without news of an in-neighbor that has made
            fewer; then it waits for it. None for any number. A rank does not wait for a neighbor that is lost, or that
            has been quiet for 0.1 s and five times as long as the longest of that rank's last 64 exchanges. (As the bound of
            stale synchronous parallel, Ho et al., NeurIPS 2013, but for news instead of progress: a rank may always be
            slower.)
        **options: As in `Algorithm`, but `compression` must have its default.

    Attributes:
        dst_weights: {out-neighbor: weight} of the next put, or out-neighbors that all weigh 1; None for those
            of the round. The slots at the others keep their values.
        self_weight, src_weights: Weights of the next average, both or none of them: of this rank's parameters
            and {in-neighbor: weight} of the slots. None for the topology's.
        force_barrier: True to exchange in step with the others: each rank's exchange is in the same iteration
            of all. It must then be the same on all ranks.
        max_staleness: As above; can be changed at any time.
        skip_lost: True to go on without neighbors that are lost. By default `step` raises.

    Raises:
        TypeError: As `Algorithm`; `window_prefix` is not a string, or `max_staleness` no integer.
        ValueError: As `Algorithm`; there are windows of this prefix; `max_staleness` is below 1.
        RuntimeError: As `Algorithm`.
    """

    runs_alone: ClassVar[bool] = False
    saves_state: ClassVar[bool] = False
    takes_compression: ClassVar[bool] = False
    # Whether `max_staleness` bounds the exchanges that a rank is ahead of a neighbor, instead of those without news of it.
    _bounds_lead: ClassVar[bool] = False

    force_barrier: bool
    max_staleness: int | None
    skip_lost: bool
    windows: list[Window]
    _heard: set[tuple[Window, int]]
    _pace: Pace | None
    _prefix: str
    _in_flight: list[dist.Work]
    _topology: Topology | None  # of all ranks that there were; None for the group's
    _plans: Plans
    _watch: Watch | None
    _generation: tuple[dist.ProcessGroup | None, int]  # of the windows, in a group
    # The number of the exchange of `_ends` in which ranks agree to end their windows, once this one has come to it.
    _closing: int | None

    def __init__(
        self,
        optimizer: Optimizer,
        model: Models,
        *,
        window_prefix: str | None = None,
        max_staleness: int | None = MAX_STALENESS,
        **options: Unpack[AlgorithmOptions],
    ) -> None:
        if window_prefix is not None and not isinstance(window_prefix, str):
            raise TypeError(f"window_prefix must be a string, got {type(window_prefix).__name__}")
        if max_staleness is not None:
            check_count(max_staleness, "max_staleness")
        self.max_staleness = max_staleness
        self.force_barrier = self.skip_lost = False
        self.windows, self._in_flight, self._pace, self._watch = [], [], None, None
        self._topology, self._generation, self._closing = None, (None, 0), None
        if options.get("topology") is not None or options.get("on_loss") == "continue":
            self._topology = rounds_of(
                options.get("topology"), current(options.get("group")), f"for {self.algorithm_name}"
            )
            options["topology"] = self._topology
        super().__init__(optimizer, model, **options)
        # Weights that users set may name lost ranks.
        names = ("dst_weights", "self_weight", "src_weights")
        self.mixing.weights = names if self._participant is None else ()
        self._prefix = window_prefix or self.name
        if self.is_running:
            if self._participant is not None:
                self._watch = Watch(self._participant, self._edges)
            if not self.context.is_joining:  # else it opens windows when it has joined the others
                with self.buckets.released_on_error():
                    self._open()
        self.watch_forward("after forward")

    def keeps_copies(self) -> bool:
        """See `Algorithm.keeps_copies`: what has arrived counts, which is another thing on each rank."""
        return False

    def _fog_finish(self) -> None:
        super()._fog_finish()
        self._end()

    def _fog_give_up(self) -> None:
        """Also closes the windows without waiting: ranks have agreed on the new owner, so no rank sends any more."""
        super()._fog_give_up()
        self._in_flight, self._pace = [], None
        for window in self.windows:
            window.abandon("ended when another distributed optimizer took over the model")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises ValueError where there are windows, which are those of the parameters at construction."""
        self._fog_check_not_replaced()
        if self.is_running:
            raise ValueError(
                f"a parameter group must be there when {self.algorithm_name} is made, as it has no window else: make it anew"
            )
        super().add_param_group(param_group)

    # --- a round ---

    def refresh(self) -> None:
        """See `Algorithm.refresh`.

        Raises:
            ValueError: A parameter has no window.
        """
        if self.is_in_round:
            return
        for parameter in self._trained()[0]:
            if parameter not in self.buckets:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} was frozen when the optimizer was made, so it "
                    "has no window: unfreeze it before, or make the optimizer anew"
                )
        self.buckets.load()

    def begin(self) -> None:
        """Puts the values of this round into the slots at the neighbors."""
        self.weights().check_taken(self.mixing)
        self._given_weights()  # raises before anything is sent, and before a barrier that others would wait in
        if self.force_barrier:
            # All ranks have completed the previous exchange, so values that are sent now cannot get into it.
            self.await_all()
        peers = dict(self.destinations()) if self.dst_weights is None else self.dst_weights
        for window in self.windows:
            self._in_flight.append(self._put(window, peers))
        if self._pace is not None:
            self._pace.advance()

    def finish(self) -> None:
        """Waits for in-neighbors that are too far behind, and averages with the values of the slots."""
        self._keep_pace()
        self.discard()
        if self.force_barrier:
            self.await_all()  # all ranks have sent their values
        self.buckets.values()  # which the averages change
        for window in self.windows:
            self._take(window)
        if self._participant is not None:
            self._participant.completed = self.rounds + 1

    def discard(self) -> None:
        """Waits until the put values have left: from then on the buckets' buffers may change.

        For buffers on a device, work that is enqueued after this call may change them; the host does not wait.
        """
        if (error := self._wait()) is not None:
            raise error

    def destinations(self) -> list[tuple[int, float]]:
        """Returns the ranks that a round's values are put to, each with the weight 1."""
        if self._plans.topology is None:
            return [(rank, 1.0) for rank in self.context.topology.out_neighbors]
        return self._plans.plan(self.rounds).destinations

    def put_to_all(self) -> None:
        """Puts the parameters into the slots at all out-neighbors, and shows the count of iterations."""
        self.buckets.load()
        self._in_flight += [self._put(window, window.out_neighbors) for window in self.windows]
        if self._pace is not None:
            self._pace.advance(self.rounds)

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

    # --- inside ---

    def _put(self, window: Window, peers: Iterable[int] | Mapping[int, float]) -> dist.Work:
        """Begins to put the parameters into the slots at some neighbors, with the number of their iteration as p."""
        window.p = self.rounds + 1.0  # 0 means that no values have arrived
        # Neighbors that are lost, and may not be missed, end the next step.
        work: dist.Work = window.put(
            window.tensor, async_op=True, dst_weights=peers, with_p=True, skip_lost=True
        )
        return work

    def _keep_pace(self) -> None:
        """Waits for in-neighbors without news, unless ranks go in step anyway; raises for a lost one that may not be missed."""
        if self._watch is not None:
            self._watch.meet_if_needed()
        if self._pace is None:
            return
        if not self.force_barrier:
            self._pace.wait(self.max_staleness)
        for rank in self._pace.peers:
            if self._pace.is_gone(rank) and not self._may_miss(rank):
                self._pace.raise_loss(rank)

    def _take(self, window: Window) -> None:
        """Writes the average with the slots of the neighbors that count into the window's tensor."""
        own, weights = self._given_weights() or self._weights_of_round()
        missing = {rank for rank in window.in_neighbors if not self._counts(window, rank)}
        window.update(
            self_weight=own + sum(weight for rank, weight in weights.items() if rank in missing),
            neighbor_weights={rank: weight for rank, weight in weights.items() if rank not in missing},
        )

    def _given_weights(self) -> tuple[float, dict[int, float]] | None:
        """Returns the weights that the user has set for the average, if any.

        Raises:
            TypeError: `src_weights` is not a dict.
            ValueError: `src_weights` is set alone.
        """
        if self.self_weight is None:
            if self.src_weights is not None:
                raise ValueError("self_weight and src_weights must be set together, got src_weights alone")
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
        if (window, rank) not in self._heard and window.version(rank) > 0:
            self._heard.add((window, rank))  # an update sets versions to 0
        return (window, rank) in self._heard and (self.force_barrier or self._takes_part(rank))

    def _takes_part(self, rank: int) -> bool:
        return self._pace is not None and self._pace.takes_part(rank) and not self._pace.is_gone(rank)

    def _may_miss(self, rank: int) -> bool:
        # A rank that has paused may have finished its work, and its process may end.
        is_paused = self._pace is not None and not self._pace.takes_part(rank)
        return is_paused or self.skip_lost or self.on_loss == "continue"

    def _edges(self) -> NDArray[np.bool_]:
        """Returns whether there is an edge in any round of a period."""
        assert self._plans.topology is not None
        return edges_of(self._plans.topology)

    def _open(self) -> None:
        """Opens windows along the topology, or what is left of it. Collective among neighbors."""
        context = self.context
        self._plans = Plans(self._topology, context)
        group, times = self._generation
        times = times + 1 if group is context.group else 0
        self._generation = context.group, times
        if self._topology is not None:
            context = context.along(self._edges())
        prefix = f"{self._prefix}.{times}" if times else self._prefix
        self.windows, self._heard = [], set()
        for number, flat in enumerate(self.buckets.flats):
            self.windows.append(Window(flat, context, name=f"{prefix}.{number}", zero_init=True))
        sources, destinations = sorted(context.topology.in_neighbors), sorted(context.topology.out_neighbors)
        gives_way = self._participant is not None
        self._pace = Pace(
            context, prefix, sources, destinations, gives_way=gives_way, bounds_lead=self._bounds_lead
        )

    def _end(self) -> None:
        """Ends the windows; collective among neighbors, and among all ranks if they go on after losses."""
        pace = self._pace
        if pace is None:
            return
        pace.pause()  # so that neighbors do not wait for this rank, which waits for them
        error = self._wait()
        ends: list[Pace | Window] = [*self.windows, pace]
        if self._watch is not None and self._ends is not None:
            # A rank that waited for its neighbors in `free` would not hear of an agreement round in which they wait for it.
            # Once all ranks have come here, nobody writes or reads any more, so nobody has to wait.
            self._closing = self._ends.completed
            self._watch.meet_if_needed()
            self.await_all()
            ends = []
            for window in self.windows:
                window.abandon("was freed")
            if self._pace is not None:  # the agreement may have opened another one
                self._pace.abandon()
        self._pace = None
        for each in ends:
            try:
                each.free()
            except RuntimeError as failure:
                error = error or failure
        if error is not None:
            raise error

    def _wait(self) -> RuntimeError | None:
        """Waits for all puts in flight and returns the first error, unless it is of neighbors that may be missed."""
        in_flight, self._in_flight = self._in_flight, []
        error = None
        for work in in_flight:
            try:
                work.wait()
            except RuntimeError as failure:
                error = error or failure
        if isinstance(error, dist.DistBackendError) and self._pace is not None:
            peers = self._pace.peers
            gone = [rank for rank in peers if self._pace.is_gone(rank)]
            # Without a loss, those that have paused may be about to end; a neighbor that takes part has failed to answer.
            may_go_on = self.on_loss == "continue" or not any(map(self._pace.takes_part, peers))
            return None if (all(map(self._may_miss, gone)) if gone else may_go_on) else error
        return error
