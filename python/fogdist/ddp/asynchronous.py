"""Mixing at each rank's own pace: one-sided windows hold the neighbors' last values.

The p of the values is the number of their iteration, so a neighbor knows their age. `Pace` tells the neighbors
whether a rank has paused and how many iterations it has made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from fogdist.compression import Codec, backend_of
from fogdist.context import Context
from fogdist.streams import wait_until_complete
from fogdist.training.buckets import FlatBuckets
from fogdist.training.continuing import Continuing, OnLoss, Watch, await_all, highest, take_seat
from fogdist.training.joining_state import MixingState, WrapperState
from fogdist.training.mixing import GlobalAverage, Mixing, Round
from fogdist.training.pace import MAX_STALENESS, Pace
from fogdist.training.plans import Plans, edges_of, neighbors_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fog_pg._C import Window
    from fogdist.elastic.seat import Seat


class AsynchronousMixing:
    """Mixes the tensors of a model through windows.

    In each iteration a rank replaces x by ``w_ii x + sum_j w_ji slot_j`` with the weights of its round, makes
    the optimizer's step, and puts the result to its out-neighbors of round t. The weight of a neighbor whose
    values have not arrived yet, or which is paused or lost, is added to the weight of this rank's own x.

    Args:
        context: The group.
        buckets: The tensors to mix.
        rounds: The peers of each round, of a topology with a period.
        name: The same on all ranks, and unique among the mixings of the group.
        max_staleness: The number of iterations that this rank may be ahead of an in-neighbor; None for any number;
            "auto" for any number as long as there is news of it (`Pace`).
        damping: Exponent a in the weight ``w_ji (1 + staleness)^-a``.
        skip_lost: Whether to go on without neighbors that are lost. The loss of a paused neighbor is no error.
        timeout: Of windows, and of waiting for a neighbor.
        codec: The codec of the puts, or None. A rank then adds ``sum_j w_ji (slot_j - d)`` to x, where d is what others decode
            of its own x, so the codec does not change x if all ranks agree.
        on_loss: "continue" as `skip_lost`; and once the topology falls apart without the lost ranks, all ranks that are left
            meet in their next steps and go on along what `Topology.among` makes of it.
        state: What a process that joins gets in addition, with ``on_loss="continue"``.
    """

    def __init__(
        self,
        context: Context,
        buckets: Sequence[FlatBuckets],
        rounds: Plans,
        name: str,
        *,
        max_staleness: int | Literal["auto"] | None,
        damping: float,
        skip_lost: bool,
        timeout: timedelta | None,
        codec: Codec | None = None,
        on_loss: OnLoss = "raise",
        state: WrapperState | None = None,
    ) -> None:
        self.context = context
        self._buckets = buckets
        self._flats = [flat for each in buckets for flat in each.flats]
        self._name = name
        self._bound = MAX_STALENESS if max_staleness == "auto" else max_staleness
        patience = (timeout or context.backend.options._timeout).total_seconds()
        self._patience = None if max_staleness == "auto" else patience
        self._damping = damping
        self._skip_lost = skip_lost or on_loss == "continue"
        # Averages of all ranks have a seat of their own.
        self._seats: tuple[Seat, Seat] | None = None
        if on_loss == "continue":
            joinable = None if state is None else MixingState(self, state)
            self._seats = take_seat(context.group, name, joinable), take_seat(context.group, f"{name} global")
            self._seats[0].on_change(self._renew)
        self._watch: Watch | None = None
        self._timeout = timeout
        self._codec = backend_of(codec)
        # What others decode of each buffer as it was put last; nothing before the first put, or without a codec.
        self._decoded: list[Tensor] = []
        self._iteration = 0
        self._first_round = 0
        self._generation: tuple[dist.ProcessGroup | None, int] = None, 0  # of the windows, in a group
        self._state = state
        self._windows: list[Window] = []
        self._in: list[int] = []
        self._out: list[int] = []
        self._puts: list[dist.Work] = []
        self._is_counted = True  # whether neighbors can see the last iteration in the count
        # The number of the exchange of the second seat in which ranks agree to close, once this one has come to it.
        self._closing: int | None = None
        self._whole = self._rounds = rounds
        if not context.is_joining:
            self._open(rounds)
        if self._seats is not None:
            self._watch = Watch(self._seats[0], self._edges)

    @property
    def has_begun(self) -> bool:
        """Always False: the next step has no exchange to wait for."""
        return False

    @property
    def round(self) -> int:
        """The round of the next iteration."""
        return self._first_round + self._iteration

    @round.setter
    def round(self, value: int) -> None:
        self._first_round = value - self._iteration

    def begin(self) -> None:
        """Counts the last iteration as soon as possible, if its puts to other hosts have arrived there."""
        if all(put.is_completed() for put in self._puts):
            self.discard()

    def accept_changes(self) -> None:
        """Does nothing, because parameters may change at any time."""

    @torch.no_grad()
    def mix(self) -> None:
        """Mixes with the values that neighbors have put; waits for neighbors that are too far behind."""
        if self._watch is not None and self._seats is not None:
            if self._state is not None and self._seats[0].enter():
                self._state.drop_gradients()
            self._watch.meet_if_needed()
        self.discard()
        if self._pace.is_paused:
            # The neighbors continued during the pause. They should not wait until this rank has caught up.
            self._iteration = self._pace.catch_up()
        for rank in self._in:
            if self._windows[0].is_gone(rank) and not self._may_miss(rank):
                self._windows[0].get([(rank, 1.0)]).wait()  # raises the error of the lost neighbor
        self._pace.wait(self._bound, self._patience)
        plan = self._rounds.plan(self.round)
        own, neighbors = plan.self_weight, []
        for rank, weight in plan.sources:
            staleness = self._staleness(rank)
            share = 0.0 if staleness is None else weight * (1.0 + max(staleness, 0)) ** -self._damping
            own += weight - share
            if share != 0.0:
                neighbors.append((rank, share))
        if self._codec is not None and not self._decoded:
            return  # neighbors do not have this rank's values yet
        if neighbors:
            for each in self._buckets:
                each.load()
            for window in self._windows:
                window.update(own if self._codec is None else 1.0, neighbors, timeout=self._timeout)
            for flat, decoded in zip(self._flats, self._decoded, strict=False):
                flat.add_(decoded, alpha=own - 1.0)
            for each in self._buckets:
                each.write_back()

    def finish(self) -> None:
        """Does nothing, because no rank waits for the step of another one."""

    def after_step(self) -> None:
        """Puts the values to the out-neighbors."""
        destinations = [rank for rank, _ in self._rounds.plan(self.round).destinations]
        self._iteration += 1
        if self._seats is not None:
            self._seats[0].completed = self._iteration
        self._put(destinations)
        self.begin()  # on one host all puts have arrived already

    def discard(self) -> None:
        """Waits until the put values have left: from then on the buckets' buffers may change.

        For buffers on a device, work that is enqueued after this call may change them; the host does not wait.
        """
        puts, self._puts = self._puts, []
        for put in puts:
            try:
                put.wait()
            except dist.DistBackendError:
                gone = [rank for rank in self._out if self._windows[0].is_gone(rank)]
                if not all(map(self._may_miss, gone or self._out)):
                    raise
        if not self._is_counted:
            self._is_counted = True
            self._pace.advance(self._iteration)

    def average_everywhere(self, flats: list[Tensor]) -> None:
        """Overwrites tensors with their averages over all ranks; collective."""
        mixing: Mixing = GlobalAverage()
        if self._seats is not None:
            mixing = Continuing(mixing, self._seats[1])
        # The ranks may be in different rounds.
        mixing.begin(flats, Round(self.context, 0, f"{self._name} global"), in_place=True)()

    def pause(self) -> None:
        """Tells the neighbors to go on without this rank until its next step."""
        if not self._windows:  # this process has not joined the others
            return
        self.discard()
        self._pace.pause()

    def staleness(self) -> dict[int, int | None]:
        """Returns, for each in-neighbor, how many iterations its last values are behind this rank's own."""
        return {rank: self._staleness(rank) for rank in self._in}

    def follow(self, rounds: Plans) -> None:
        """Mixes along another topology from now on; collective."""
        self.close()
        self._whole, self._closing = rounds, None
        self._open(Plans(rounds.topology, self.context))
        self.after_global_average()
        self.round = 0

    def after_global_average(self) -> None:
        """Puts to all out-neighbors, and sets all ranks' counts of iterations to one number; collective."""
        seat = None if self._seats is None else self._seats[1]
        self._iteration = highest(self.context, seat, self._iteration, f"{self._name}.done")
        self._put(self._out)
        wait_until_complete(self._puts)
        self.discard()
        highest(self.context, seat, 0, f"{self._name}.all have put")

    def close(self) -> None:
        """Ends the windows; collective among neighbors, and among all ranks if they go on after losses."""
        if not self._windows:
            return
        self.pause()
        if self._seats is None:
            self._pace.free()
            for window in self._windows:
                window.free(self._timeout)
            return
        # A rank that waited for its neighbors in `free` would not hear of a meeting in which they wait for it. Once all
        # ranks have come here, nobody writes or reads any more, so nobody has to wait.
        self._closing = self._seats[1].completed
        assert self._watch is not None
        self._watch.meet_if_needed()
        await_all(self._seats[1])
        self._pace.abandon()
        self._windows.clear()

    def counts(self) -> dict[str, int]:
        """Returns the numbers that a process which joins begins with."""
        return {"first_round": self._first_round}

    def set_counts(self, counts: dict[str, int]) -> None:
        """Sets these numbers to those of another rank."""
        self._first_round = counts["first_round"]

    # --- inside ---

    def _renew(self) -> None:
        """Opens windows among the ranks of an epoch: the first that all of them do after a meeting, wherever they are."""
        assert self._seats is not None
        if self._closing is not None and max(self._seats[1].completed, self._seats[1].resume) > self._closing:
            return  # all ranks have come to `close`, as this one or another one knows
        with contextlib.suppress(dist.DistBackendError):  # of neighbors that are gone
            self.discard()
        seat = self._seats[0]
        self._iteration = max(self._iteration, seat.resume)
        self.context = seat.context
        # If another rank is lost now, the new group fails, and the ranks meet again in their next steps. The old windows
        # end when the last neighbor has left them.
        with contextlib.suppress(dist.DistBackendError):
            self._open(Plans(self._whole.topology, self.context))
            self._put(self._out)
        if self._closing is not None:
            self.pause()

    def _edges(self) -> NDArray[np.bool_]:
        """Returns whether there is an edge in any round of a period."""
        assert self._rounds.topology is not None  # checked when the windows were opened
        return edges_of(self._rounds.topology)

    def _open(self, rounds: Plans) -> None:
        topology = rounds.topology
        if topology is None or topology.period is None:
            raise ValueError(f"topology must have a period in mode 'async', got {topology!r}")
        self._rounds = rounds
        self._in, self._out = neighbors_of(topology, self.context.rank)
        group, times = self._generation
        self._generation = self.context.group, times + 1 if group is self.context.group else 0
        name = f"{self._name}.{self._generation[1]}"
        create = self.context.backend.create_window
        self._windows = [
            create(flat, f"{name}.{i}", self._in, self._out, zero_init=True, timeout=self._timeout)
            for i, flat in enumerate(self._flats)
        ]
        gives_way = self._seats is not None
        self._pace = Pace(self.context, name, self._in, self._out, self._timeout, gives_way=gives_way)

    def _put(self, destinations: list[int]) -> None:
        self._is_counted = False
        for each in self._buckets:
            each.load()
        for window in self._windows:
            window.p = self._iteration + 1.0  # 0 means that no values have arrived
        if self._codec is not None and not self._decoded:
            self._decoded = [torch.empty_like(flat) for flat in self._flats]
        # with a codec in any case, because `mix` needs what this rank has put last
        has_decoded = self._codec is None
        for skip_lost in (False, True):
            peers = [(rank, 1.0) for rank in destinations if self._may_miss(rank) == skip_lost]
            if peers or not (has_decoded or skip_lost):
                self._puts += [
                    window.put(
                        flat,
                        peers,
                        with_p=True,
                        skip_lost=skip_lost,
                        timeout=self._timeout,
                        compression=self._codec,
                        decoded=None if has_decoded else self._decoded[place],
                    )
                    for place, (window, flat) in enumerate(zip(self._windows, self._flats, strict=True))
                ]
                has_decoded = True

    def _may_miss(self, rank: int) -> bool:
        # A rank that has paused may have finished its work, and its process may end.
        return self._skip_lost or not self._pace.takes_part(rank)

    def _staleness(self, rank: int) -> int | None:
        """Returns how many iterations an in-neighbor's values are behind; None if it is paused or lost."""
        put = min(window.slot_p(rank) for window in self._windows)
        if put == 0.0 or not self._pace.takes_part(rank) or self._windows[0].is_gone(rank):
            return None
        return self._iteration - (int(put) - 1)
