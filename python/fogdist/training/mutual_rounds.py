"""Rounds that leave late neighbors out, where both ends of an edge decide the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from fogdist.context import Context
from fogdist.training.arrivals import Deadlines

if TYPE_CHECKING:
    from fog_pg._C import Window

# What a rank tells a neighbor: the number of its round; a round in which it is about to leave the neighbor out, 0 for none;
# and the first and the last round that are left out, one after the other.
_ROUND, _CLOSING, _FIRST, _LAST, _ENDED = range(5)
# The longest wait, in seconds, until a late neighbor's process has been told that it is left out. On one host it knows at
# once. On another host its engine answers, whatever its program does, unless the whole process is stopped.
_ANSWER = 0.5
_SLEEP = 50e-6


class MutualRounds:
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
        context: The group. The construction is collective.
        name: The same on all ranks.
        peers: The neighbors, in any round and either direction.
        patience: Of `Deadlines`.
        gives_way: Whether a wait ends when the group has failed: the neighbor may be in the meeting that follows.

    Attributes:
        number: Of this rank's round, from 1 on; 0 before the first one.
        in_step: The neighbors that values of this round are sent to.
    """

    def __init__(
        self, context: Context, name: str, peers: Collection[int], patience: float, *, gives_way: bool = False
    ) -> None:
        self._backend = context.backend
        self._peers = sorted(peers)
        self._gives_way = gives_way
        self._deadlines = Deadlines(patience, context.backend.options._timeout.total_seconds())
        self._told = {rank: [0.0] * (_ENDED + 1) for rank in self._peers}
        told = torch.zeros(_ENDED + 1, dtype=torch.float64, device="cpu")
        self._window: Window = context.backend.create_window(
            told, f"{name}.rounds", self._peers, self._peers, zero_init=True
        )
        self.number = 0
        self._before = 0
        self._came: frozenset[int] = frozenset()  # to the last round
        self.in_step: frozenset[int] = frozenset()

    def begin(self, least: int) -> None:
        """Begins the next round: that of this number, or the one that neighbors are in, if they are ahead."""
        heard = {rank: self._heard(rank) for rank in self._peers}
        self._before, self.number = self.number, max([least, *(int(each[_ROUND]) for each in heard.values())])
        # Nobody has come to a round before the first one. Values of the last one may be here before their rank's word.
        came = {rank for rank, each in heard.items() if not self._before or each[_ROUND] >= self.number - 1}
        if self.number == self._before + 1:
            came |= self._came
        self.in_step = frozenset(
            rank for rank in came if not heard[rank][_ENDED] and not self._window.is_gone(rank)
        )
        for rank in set(self._peers) - self.in_step:
            self._leave_out(rank)

    def tell(self) -> None:
        """Tells all neighbors of the round, after its values were sent."""
        for rank in self._peers:
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
                has_come = self._heard(rank)[_ROUND] >= self.number
            else:
                has_come = is_here(rank)
            if has_come and (rank not in destinations or is_there(rank)):
                return True
            heard = self._heard(rank)
            # A neighbor sends its values of a round before it tells of the next one.
            will_not = rank in sources and heard[_ROUND] > self.number and not is_here(rank)
            if will_not or self._is_left_out(heard) or heard[_ENDED] or self._is_gone(rank):
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
        """Tells the neighbors that this rank makes no more rounds."""
        for rank in self._peers:
            self._told[rank][_ENDED] = 1.0
            self._tell(rank)

    def gone(self) -> list[int]:
        """Returns the neighbors that take no further part: they are lost, or have ended."""
        return [rank for rank in self._peers if self._window.is_gone(rank)]

    def raise_loss(self, rank: int) -> None:
        """Raises the error of a neighbor that is lost.

        Raises:
            torch.distributed.DistBackendError: Always, if it is.
        """
        self._window.get([(rank, 1.0)]).wait()

    # --- inside ---

    def _close(
        self, late: list[int], is_here: Callable[[int], bool], is_there: Callable[[int], bool]
    ) -> set[int]:
        """Leaves neighbors out, except for those whose values have come after all; returns these."""
        tellings = {}
        for rank in late:
            self._told[rank][_CLOSING] = self.number
            tellings[rank] = self._tell(rank)
        _wait_until(lambda: all(telling.is_completed() for telling in tellings.values()))
        came = {rank for rank in late if tellings[rank].is_completed() and is_here(rank)}
        # Whether they leave this rank out can be seen only after its own values are there.
        _wait_until(lambda: all(is_there(rank) for rank in came))
        came = {rank for rank in came if is_there(rank)}
        for rank in late:
            if rank not in came:
                self._leave_out(rank)
            self._told[rank][_CLOSING] = 0.0
            self._tell(rank)
        return came

    def _has_answered(self, rank: int) -> bool:
        """Returns whether a neighbor whose values have come counts this rank's values, too; waits for its word."""
        deadline = time.monotonic() + self._deadlines.most
        while (heard := self._heard(rank))[_CLOSING] == self.number:
            if self._is_gone(rank) or time.monotonic() >= deadline:
                self._leave_out(rank)
                self._tell(rank)
                return False
            time.sleep(_SLEEP)
        return not self._is_left_out(heard)

    def _is_left_out(self, heard: list[float]) -> bool:
        """Returns whether a neighbor has said that it leaves this rank out of this round."""
        return heard[_FIRST] <= self.number <= heard[_LAST]

    def _is_gone(self, rank: int) -> bool:
        return self._window.is_gone(rank) or bool(self._gives_way and self._backend.failure)

    def _leave_out(self, rank: int) -> None:
        told = self._told[rank]
        if told[_LAST] < self._before or told[_LAST] == 0.0:
            told[_FIRST] = self.number
        told[_LAST] = self.number

    def _heard(self, rank: int) -> list[float]:
        heard: list[float] = self._window.update(0.0, [(rank, 1.0)], clone=True).tolist()
        return heard

    def _tell(self, rank: int) -> dist.Work:
        told = self._told[rank]
        told[_ROUND] = self.number
        telling = torch.tensor(told, dtype=torch.float64, device="cpu")
        return self._window.put(telling, [(rank, 1.0)], skip_lost=True)


def _wait_until(condition: Callable[[], bool]) -> None:
    """Waits for the answer of neighbors' processes, but not for long."""
    deadline = time.monotonic() + _ANSWER
    while not condition() and time.monotonic() < deadline:
        time.sleep(_SLEEP)
