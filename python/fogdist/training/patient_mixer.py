"""Exchanges of flat buckets that leave late neighbors out: the argument `patience` of algorithms that go in step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from fogdist.compression import Codec
from fogdist.context import Context
from fogdist.observe.timeline import shown_as
from fogdist.training.buckets import FlatBuckets
from fogdist.training.continuing import Watch
from fogdist.training.mixing import (
    Mixing,
    MixingLike,
    Neighbors,
    Plans,
    Round,
    edges_of,
    neighbors_of,
    rounds_of,
)
from fogdist.training.overlapping import Mixer
from fogdist.training.pace import Deadlines, Notes, wait_until

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fog_pg._C import NeighborPlan, Window
    from fogdist.elastic.participant import Participant

# What a rank tells a neighbor: the number of its round; a round in which it is about to leave the neighbor out, 0 for none;
# and the first and the last round that are left out, one after the other.
_ROUND, _CLOSING, _FIRST, _LAST, _ENDED = range(5)
# The longest wait, in seconds, until a late neighbor's process has been told that it is left out. On one host it knows at
# once. On another host its engine answers, whatever its program does, unless the whole process is stopped.
_ANSWER = 0.5


class MutualRounds(Notes):
    """The rounds of a rank and its neighbors: with whom it exchanges values in each.

    Rounds have numbers, and a value counts in the round of its number only. A rank sends a round's values to the neighbors
    that have come at least to the round before, so at most one value for each of two successive rounds waits at a neighbor.
    Then it waits for the neighbors, each up to its deadline (`Deadlines`).

    Averages keep the mean of all ranks only if an edge counts at both of its ends, or at none. So a rank that does not want
    to wait any longer tells the neighbor that it is about to leave it out, and looks for its values once more: if they
    have come meanwhile, they count after all. A neighbor that has sent its values looks what it was told, and waits for the
    answer if there is none yet. Each end writes before it looks, so at least one of them sees the other, and the last
    word is that of the rank that did not want to wait.

    A rank that was left out goes on with the round that its neighbors are in. It is waited for again when they see that.

    Args:
        context: As in `Notes`.
        name: As in `Notes`.
        peers: The neighbors, in any round and either direction.
        patience: Of `Deadlines`.
        gives_way: As in `Notes`.

    Attributes:
        number: Of this rank's round, from 1 on; 0 before the first one.
        in_step: The neighbors that values of this round are sent to.
    """

    def __init__(
        self, context: Context, name: str, peers: Collection[int], patience: float, *, gives_way: bool = False
    ) -> None:
        super().__init__(context, f"{name}.rounds", peers, _ENDED + 1, gives_way=gives_way)
        # Half of the timeout: a neighbor may be in a collective that waits for this rank, and that has begun before.
        self._deadlines = Deadlines(patience, context.backend.options._timeout.total_seconds() / 2)
        self._told = {rank: [0.0] * (_ENDED + 1) for rank in self.peers}
        self.number = 0
        self._before = 0
        self._came: frozenset[int] = frozenset()  # to the last round
        self.in_step: frozenset[int] = frozenset()

    def begin(self, least: int) -> None:
        """Begins the next round: that of this number, or the one that neighbors are in, if they are ahead."""
        for told in self._told.values():
            told[_ENDED] = 0.0
        heard = {rank: self.heard(rank) for rank in self.peers}
        self._before, self.number = self.number, max([least, *(int(each[_ROUND]) for each in heard.values())])
        # Nobody has come to a round before the first one. Values of the last one may be here before their rank's word.
        came = {rank for rank, each in heard.items() if not self._before or each[_ROUND] >= self.number - 1}
        if self.number == self._before + 1:
            came |= self._came
        self.in_step = frozenset(rank for rank in came if not heard[rank][_ENDED] and not self.is_gone(rank))
        for rank in set(self.peers) - self.in_step:
            self._leave_out(rank)

    def tell_all(self) -> None:
        """Tells all neighbors of the round, after its values were sent."""
        for rank in self.peers:
            self._tell(rank)

    def settle(
        self,
        sources: Collection[int],
        destinations: Collection[int],
        is_here: Callable[[int], bool],
        is_there: Callable[[int], bool],
    ) -> frozenset[int]:
        """Waits for the neighbors, and returns the sources whose values count in this round.

        Args:
            sources: The neighbors whose values this rank averages.
            destinations: The neighbors that this rank has sent values to.
            is_here: Whether a source's values of this round are in this rank's memory.
            is_there: Whether this rank's values of this round are in a destination's memory.
        """

        def look(rank: int) -> bool | None:
            if rank not in sources:
                has_come = self.heard(rank)[_ROUND] >= self.number
            else:
                has_come = is_here(rank)
            if has_come and (rank not in destinations or is_there(rank)):
                return True
            heard = self.heard(rank)
            # A neighbor sends its values of a round before it tells of the next one.
            will_not = rank in sources and heard[_ROUND] > self.number and not is_here(rank)
            if will_not or self._is_left_out(heard) or heard[_ENDED] or self._will_not_answer(rank):
                return False
            return None

        missing = self._deadlines.wait(sorted(self.in_step), look)
        counted = self.in_step.intersection(sources) - missing
        both = missing.intersection(sources).intersection(destinations)
        crossed = self._close(sorted(both), is_here, is_there)
        self._came = (self.in_step - missing) | crossed
        for rank in missing - crossed:
            # Also where this round has no edge both ways, so that the rounds that are left out have no gap.
            self._leave_out(rank)
        counted = frozenset(rank for rank in sorted(counted | crossed) if self._has_answered(rank))
        self._deadlines.end_round()
        return counted

    def end(self) -> None:
        """Tells the neighbors that this rank makes no more rounds, until `begin`."""
        for rank in self.peers:
            self._told[rank][_ENDED] = 1.0
            self._tell(rank)

    # --- inside ---

    def _close(
        self, late: list[int], is_here: Callable[[int], bool], is_there: Callable[[int], bool]
    ) -> set[int]:
        """Leaves neighbors out, except for those whose values have come after all; returns these."""
        tellings = {}
        for rank in late:
            self._told[rank][_CLOSING] = self.number
            tellings[rank] = self._tell(rank)
        wait_until(lambda: all(telling.is_completed() for telling in tellings.values()), _ANSWER)
        came = {rank for rank in late if tellings[rank].is_completed() and is_here(rank)}
        # Whether they leave this rank out can be seen only after its own values are there.
        wait_until(lambda: all(is_there(rank) for rank in came), _ANSWER)
        came = {rank for rank in came if is_there(rank)}
        for rank in late:
            if rank not in came:
                self._leave_out(rank)
            self._told[rank][_CLOSING] = 0.0
            self._tell(rank)
        return came

    def _has_answered(self, rank: int) -> bool:
        """Returns whether a neighbor whose values have come counts this rank's values, too; waits for its word."""
        wait_until(
            lambda: self.heard(rank)[_CLOSING] != self.number or self._will_not_answer(rank),
            self._deadlines.most,
        )
        heard = self.heard(rank)
        if heard[_CLOSING] == self.number:
            self._leave_out(rank)
            self._tell(rank)
            return False
        return not self._is_left_out(heard)

    def _is_left_out(self, heard: list[float]) -> bool:
        """Returns whether a neighbor has said that it leaves this rank out of this round."""
        return heard[_FIRST] <= self.number <= heard[_LAST]

    def _will_not_answer(self, rank: int) -> bool:
        return self.is_gone(rank) or self.must_give_way()

    def _leave_out(self, rank: int) -> None:
        told = self._told[rank]
        if told[_LAST] < self._before or told[_LAST] == 0.0:
            told[_FIRST] = self.number
        told[_LAST] = self.number

    def _tell(self, rank: int) -> dist.Work:
        told = self._told[rank]
        told[_ROUND] = self.number
        return self.tell(rank, told)


class PatientMixer(Mixer):
    """Successive exchanges of flat buckets, each without the neighbors that are late.

    A rank puts its values into windows of its neighbors, whose slots know the number of the round, and averages those of
    its own round. The weight of a neighbor that is left out goes to the rank's own values. `MutualRounds` sees to it that
    the neighbor leaves this rank out in the same round: with symmetric weights, the mean of all ranks stays as it is.
    There are two windows for each bucket, for even and odd rounds, because a neighbor may be one round ahead.

    Args:
        name: The same on all ranks, and unique among the mixers of the group.
        patience: Of `Deadlines`.
        participant: To go on without lost neighbors, as without late ones. Once the topology falls apart without them, all ranks
            that are left agree before their next exchange, and go on along what `Topology.among` makes of it.
    """

    def __init__(self, name: str, patience: float, participant: Participant | None = None) -> None:
        super().__init__()
        self._name = name
        self._patience = patience
        self._participant = participant
        self._watch = None if participant is None else Watch(participant, self._edges)
        # The group of the windows, and how many times they were opened anew in it.
        self._generation: tuple[dist.ProcessGroup | None, int] = None, 0
        self._opened: tuple[FlatBuckets, Mixing, dist.ProcessGroup] | None = None
        self._rounds: MutualRounds | None = None
        self._plans: Plans | None = None
        self._windows: tuple[list[Window], list[Window]] = [], []
        # Of the exchange in flight.
        self._current: list[Window] = []
        self._plan: NeighborPlan | None = None
        self._puts: dict[int, list[dist.Work]] = {}
        self._left_out: list[int] = []
        self._is_away = False

    @property
    def left_out(self) -> list[int]:
        """See `Mixer.left_out`."""
        return list(self._left_out)

    @shown_as("begin of an exchange")
    @torch.no_grad()
    def begin(self, buckets: FlatBuckets, mixing: Mixing, round: Round) -> int:
        """See `Mixer.begin`. The first exchange of other buckets, or along another mixing, is collective."""
        context = self._make_ready(buckets, mixing, round.context)
        rounds, plans = self._rounds, self._plans
        assert rounds is not None and plans is not None
        rounds.begin(round.number + 1)
        number = rounds.number - 1
        self._buckets, self._round = buckets, Round(context, number, self._name)
        with self._named():
            self._raise_losses()
            self._plan, self._current = plans.plan(number), self._windows[rounds.number % 2]
            self._puts = {rank: [] for rank, _ in self._plan.destinations}
            buckets.load()
            for place in buckets.sending_order:
                window = self._current[place]
                window.p = float(rounds.number)
                for rank, puts in self._puts.items():
                    if rank in rounds.in_step:
                        puts.append(
                            window.put(buckets.flats[place], [(rank, 1.0)], with_p=True, skip_lost=True)
                        )
        rounds.tell_all()
        self.accept_changes()
        return number

    @shown_as("end of an exchange")
    @torch.no_grad()
    def finish(self) -> None:
        """See `Mixer.finish`."""
        buckets, plan = self._buckets, self._plan
        if buckets is None or plan is None:
            return
        with self._named():
            counted = self._settle()
            self._warn_of_changes(buckets)
            neighbors = [(rank, weight) for rank, weight in plan.sources if rank in counted]
            own = plan.self_weight
            for rank, weight in plan.sources:
                own += 0.0 if rank in counted else weight
            if neighbors:
                for window in self._current:
                    window.update(own, neighbors)
        buckets.write_back()

    def discard(self) -> None:
        """See `Mixer.discard`."""
        self._versions = None
        if self._plan is not None:
            with self._named():
                self._settle()

    def restart(self) -> None:
        """See `Mixer.restart`."""
        self._opened = None

    def renew(self) -> None:
        """See `Mixer.renew`. It gives up an exchange in flight, and opens windows among the ranks that are left.

        This is the first that all of them do after an agreement round, wherever they are.
        """
        if self._opened is None or self._participant is None:
            return
        buckets, mixing, _ = self._opened
        self._buckets, self._plan = None, None
        # If another rank is lost now, the new group fails, and the ranks agree again before their next exchange.
        with contextlib.suppress(dist.DistBackendError):
            self._open(buckets, mixing, self._participant.context)
            self._opened = buckets, mixing, self._participant.context.group

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """See `Mixer.away`.

        After a loss, which the ranks in an average of all notice there, those that have not come to it yet would wait for
        their neighbors' first rounds in the new windows, and these for them in the average.
        """
        self._is_away = True
        try:
            yield
        finally:
            self._is_away = False

    def close(self) -> None:
        """See `Mixer.close`."""
        if self._rounds is not None:
            self._rounds.end()
        self._opened = self._rounds = self._plans = None
        self._windows, self._current = ([], []), []

    # --- inside ---

    def _edges(self) -> NDArray[np.bool_]:
        """Returns whether there is an edge in any round; before windows are open, all ranks wait for each other."""
        if self._plans is None or self._plans.topology is None:
            size = 1 if self._participant is None else self._participant.context.size
            return np.ones((size, size), dtype=bool)
        return edges_of(self._plans.topology)

    def _make_ready(self, buckets: FlatBuckets, mixing: Mixing, context: Context) -> Context:
        """Opens windows if those that are open are others. Returns the group, or what is left of it."""
        while True:
            if self._watch is not None and self._participant is not None:
                self._watch.meet_if_needed()
                context = self._participant.context
            wanted = buckets, mixing, context.group
            if self._opened is not None and all(
                now is before for now, before in zip(wanted, self._opened, strict=True)
            ):
                return context
            try:
                self._open(buckets, mixing, context)
            except dist.DistBackendError:
                if self._participant is None or not context.backend.failure:
                    raise
                continue  # a rank was lost meanwhile
            self._opened = wanted
            return context

    def _open(self, buckets: FlatBuckets, mixing: Mixing, context: Context) -> None:
        """Opens windows for the buckets, among the ranks that are neighbors in any round; collective."""
        plans = Plans(patient_mixing(mixing, context).topology, context)
        assert plans.topology is not None
        if (before := self._rounds) is not None:
            self._rounds = None  # if a rank is lost before windows are open, its group is gone when they are opened again
            before.end()
        sources, destinations = neighbors_of(plans.topology, context.rank)
        group, times = self._generation
        self._generation = context.group, times + 1 if group is context.group else 0
        name = f"{self._name}.{self._generation[1]}"
        create = context.backend.create_window
        even, odd = (
            [
                create(flat, f"{name}.{parity}.{place}", sources, destinations, zero_init=True)
                for place, flat in enumerate(buckets.flats)
            ]
            for parity in ("even", "odd")
        )
        self._windows, self._current = (even, odd), []
        self._rounds = MutualRounds(
            context, name, {*sources, *destinations}, self._patience, gives_way=self._participant is not None
        )
        self._plans = plans
        if self._is_away:
            self._rounds.end()

    def _settle(self) -> frozenset[int]:
        """Waits for the exchange in flight, and returns the neighbors whose values count."""
        rounds, plan, puts = self._rounds, self._plan, self._puts
        assert rounds is not None and plan is not None
        self._buckets, self._plan, self._puts = None, None, {}
        sources = [rank for rank, _ in plan.sources]
        counted = rounds.settle(
            sources,
            list(puts),
            lambda rank: all(window.slot_p(rank) == float(rounds.number) for window in self._current),
            lambda rank: _are_there(puts[rank]),
        )
        self._left_out = sorted({*sources} - counted)
        if self._left_out:
            self._raise_losses()
        return counted

    def _raise_losses(self) -> None:
        """Raises the error of a lost neighbor. One that has ended in good order has made all its rounds."""
        assert self._rounds is not None and self._round is not None
        if self._participant is not None:
            return
        gone = [rank for rank in self._rounds.peers if self._rounds.is_gone(rank)]
        lost = self._round.context.backend.lost_ranks() if gone else []
        for rank in sorted({*gone} & {*lost}):
            self._rounds.raise_loss(rank)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Names the round in the errors of its exchange."""
        assert self._round is not None
        number = self._round.number
        try:
            yield
        except dist.DistBackendError as failure:
            self._buckets, self._plan = None, None
            raise dist.DistBackendError(f"in round {number} of {self._name}: {failure}") from failure


def patient_mixing(topology: MixingLike, context: Context, compression: Codec | None = None) -> Neighbors:
    """Returns the user's argument `topology` of an algorithm with `patience`; None is the group's topology of now.

    Raises:
        TypeError: As `as_mixing`.
        ValueError: It is no topology, or one without a period; virtual ranks.
    """
    codec = getattr(topology, "compression", None) if compression is None else compression
    if codec is not None:
        raise ValueError(f"compression must be None with patience, got {codec!r}")
    if context.held != 1:
        raise ValueError("patience must be None for virtual ranks, of which none is late")
    return Neighbors(rounds_of(topology, context, "with patience"))


def _are_there(puts: list[dist.Work]) -> bool:
    if not puts or not all(put.is_completed() for put in puts):
        return False
    try:
        for put in puts:
            put.wait()
    except dist.DistBackendError:  # the neighbor is gone, or has closed its windows
        return False
    return True
