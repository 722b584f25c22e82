"""Ranks that are late: whom a rank waits for, and how long.

`Notes` has what ranks tell each other of themselves.
`Pace` is the limit up to which a rank continues without news of its in-neighbors, where ranks go at their own pace.
`Deadlines` is the rule for all that has a `patience`, by which the ranks of `fogdist.training.patient_mixer` are late.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from statistics import median

import torch
import torch.distributed as dist

from fog_pg import _extension
from fogdist.context import Context
from fogdist.observe.metrics import has_staleness

# The default bound of exchanges without news of a neighbor. Ranks with their own cores do not reach it unless a
# neighbor is about 8 times slower. Where ranks share cores, a rank that gets none for a while delays its neighbors
# before they have run far ahead of it: docs/measurements/training.md.
MAX_STALENESS = 8
# The sleeps between two checks of a waiting rank, in seconds, doubled from the first to the last.
_FIRST_SLEEP = 50e-6
_LAST_SLEEP = 2e-3
# A rank stops waiting for a neighbor that has made no exchange for this time, and for _QUIET_TIMES times the longest of
# its last _REMEMBERED exchanges: it may be evaluating, have ended or be stuck. It is waited for again after its next
# exchange. So one that often gets no core is waited for, and one that has always been in time holds nobody up for long.
_QUIET_SECONDS = 0.1
_QUIET_TIMES = 5.0
_QUIET_MOST_SECONDS = 15.0
_REMEMBERED = 64
# The same for a neighbor of which no exchange is known, and for an answer of one on another host.
_UNKNOWN_SECONDS = 1.0
# The number of waits that the deadline of a neighbor is computed from, and the least number: before, there is none.
_WAITS = 32
_FEW = 4
# The least deviation that the deadline counts with, relative to the time of a round: a neighbor that always came at the
# same time would otherwise have no leeway.
_LEAST_DEVIATION = 0.05


class Notes:
    """A few numbers that a rank puts into its neighbors' memory, where they find them whatever its program does.

    Args:
        context: The group. The construction is collective among neighbors.
        name: The same on all ranks.
        peers: The neighbors, in either direction.
        length: How many numbers.
        gives_way: Whether waits for neighbors end when the group has failed: they may be in the agreement round that follows.

    Attributes:
        context: The group.
        peers: The neighbors, in ascending order.
    """

    def __init__(
        self, context: Context, name: str, peers: Iterable[int], length: int = 1, *, gives_way: bool = False
    ) -> None:
        self.context = context
        self.peers = sorted(set(peers))
        self._gives_way = gives_way
        self._window = context.backend.create_window(
            torch.zeros(length, dtype=torch.float64, device="cpu"),
            name,
            self.peers,
            self.peers,
            zero_init=True,
        )

    def heard(self, rank: int) -> list[float]:
        """Returns what a neighbor has put here last."""
        heard: list[float] = self._window.update(0.0, [(rank, 1.0)], clone=True).tolist()
        return heard

    def tell(self, rank: int, numbers: list[float]) -> dist.Work:
        """Begins to put numbers into a neighbor's memory."""
        told = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        return self._window.put(told, [(rank, 1.0)], skip_lost=True)

    def is_gone(self, rank: int) -> bool:
        """Returns whether a neighbor takes no further part: it is lost, or has ended."""
        return self._window.is_gone(rank)

    def must_give_way(self) -> bool:
        """Returns whether waits end; see the class."""
        return self._gives_way and bool(self.context.backend.failure)

    def raise_loss(self, rank: int) -> None:
        """Raises the error of a neighbor that is lost, if it is."""
        self._window.get([(rank, 1.0)]).wait()

    def free(self) -> None:
        """Frees the memory. Collective among neighbors."""
        self._window.free()


class Pace(Notes):
    """Counts a rank's exchanges, shows them to neighbors, and waits for those that fall too far behind.

    The staleness of a neighbor is the number of exchanges that this rank has made since it saw the neighbor make one, and
    0 for a neighbor that has made as many. So a neighbor that is s times slower has a staleness of about s throughout the
    training, and the staleness of a neighbor that gets no core grows. With `bounds_lead` it is the number of exchanges that
    this rank has made more than the neighbor since it last waited for it in vain, so no rank is faster than the slowest
    one. A rank waits only for ranks with fewer exchanges, so there is always a rank that does not wait, and ranks cannot
    wait in a circle.

    A rank does not wait for a neighbor that has been quiet for much longer than its longest recent exchange (at least 0.1
    s, at most 15 s): scripts do not announce that a rank ends its training, evaluates, or waits in a collective for the
    ranks that would wait for it here. This class does not handle lost ranks; the exchange itself reports them.

    A rank writes its count into its own memory. A neighbor reads it only when, by its own information, this rank may be
    too far behind. Between two reads the information is old, so the last exchange of a neighbor may have been up to twice
    as long ago. Only a pause is sent as a message, because a rank that has paused may end.

    Args:
        context: As in `Notes`.
        name: As in `Notes`.
        in_neighbors: The ranks whose exchanges this rank watches.
        out_neighbors: The ranks that watch this rank's exchanges.
        gives_way: As in `Notes`.
        bounds_lead: As above.

    Attributes:
        in_neighbors: As above.
    """

    def __init__(
        self,
        context: Context,
        name: str,
        in_neighbors: list[int],
        out_neighbors: list[int],
        *,
        gives_way: bool = False,
        bounds_lead: bool = False,
    ) -> None:
        super().__init__(context, f"{name}.pace", [*in_neighbors, *out_neighbors], 2, gives_way=gives_way)
        self._window.p = 0.0  # 1 while this rank is paused
        # What neighbors see: the number of exchanges, and the longest recent time between two of them.
        self._shown = self._window.tensor.numpy()
        self._made = 0
        self._last = time.monotonic()
        self._times = deque[float](maxlen=_REMEMBERED)
        self.in_neighbors = in_neighbors
        self._bounds_lead = bounds_lead
        self._job_ranks = dist.get_process_group_ranks(context.group)
        self._counts = dict.fromkeys(self.peers, 0)  # the neighbors' exchanges, as last seen
        # This rank's exchanges when it saw the neighbor's last one; with bounds_lead, one of them for each of the neighbor's.
        self._seen = dict.fromkeys(self.peers, 0)
        self._longest = dict.fromkeys(self.peers, 0.0)  # seconds between two exchanges of the neighbor
        self._asked: dict[int, dist.Work] = {}  # gets that have not completed yet
        self._passed_over: set[int] = set()
        has_staleness.add(self)

    @property
    def is_paused(self) -> bool:
        """Whether this rank has paused."""
        return self._window.p > 0.0

    def takes_part(self, rank: int) -> bool:
        """Returns False if a neighbor has said that it paused."""
        return self._window.slot_p(rank) == 0.0

    def staleness(self) -> dict[int, int]:
        """By in-neighbor, how many exchanges this rank has made since it saw that neighbor make one, at most."""
        return {
            rank: 0 if self._counts[rank] >= self._made else self._made - self._seen[rank]
            for rank in self.in_neighbors
            if self.takes_part(rank)
        }

    def advance(self, made: int | None = None) -> None:
        """Counts an exchange after its data was sent. A rank that had paused takes part again.

        Args:
            made: The new number of exchanges; by default one more than before.
        """
        now = time.monotonic()
        if self._made:
            self._times.append(now - self._last)
            self._shown[1] = max(self._times)
        self._last = now
        self._made = self._made + 1 if made is None else made
        self._shown[0] = self._made
        shown = [(self._job_ranks[rank], count) for rank, count in self.staleness().items()]
        _extension.load().note_staleness(shown)  # for `fog top`
        if self.is_paused:
            self._say(paused=False)

    def wait(self, max_staleness: int | None) -> None:
        """Waits for neighbors that are too far behind; called before their values are used.

        Args:
            max_staleness: The largest staleness at which this rank does not wait; None for no bound.
        """
        if max_staleness is not None:
            for rank in self.in_neighbors:
                if self._made - self._counts[rank] > max_staleness:
                    self._wait_for(rank, max_staleness)

    def pause(self) -> None:
        """Tells the neighbors not to wait for this rank until its next exchange. The process may end after it."""
        self._say(paused=True)

    def catch_up(self) -> int:
        """Sets this rank's count to the largest count of its own and its neighbors', and returns it."""
        for rank in self.peers:
            self._look(rank, _UNKNOWN_SECONDS)
        self._made = max([self._made, *self._counts.values()])
        return self._made

    def free(self) -> None:
        """Frees the window; no rank waits for this rank from now on. Collective among neighbors."""
        self.pause()
        has_staleness.discard(self)
        super().free()

    def abandon(self) -> None:
        """Ends the use of the window without waiting, once no rank of the group uses it any more."""
        has_staleness.discard(self)
        del self._window

    def _say(self, *, paused: bool) -> None:
        self._window.p = 1.0 if paused else 0.0
        with contextlib.suppress(dist.DistBackendError):  # a neighbor is lost
            peers = [(rank, 1.0) for rank in self.peers]
            # A copy: a count that changed on its way could be there before the exchange that it counts.
            told = self._window.put(self._window.tensor.clone(), peers, with_p=True, skip_lost=True)
            if paused:
                told.wait()

    def _look(self, rank: int, seconds: float) -> None:
        """Reads a neighbor's count. If the get does not complete in this time, the next call waits for it again."""
        asked = self._asked.pop(rank, None) or self._window.get([(rank, 1.0)])
        if not wait_until(asked.is_completed, seconds):
            self._asked[rank] = asked
            return
        try:
            asked.wait()
        except dist.DistBackendError:  # the neighbor is lost, or did not answer
            return
        count, longest = self.heard(rank)
        if count > self._counts[rank]:
            seen = self._made
            if self._bounds_lead and rank not in self._passed_over:
                seen = min(seen, self._seen[rank] + int(count) - self._counts[rank])
            self._counts[rank], self._seen[rank], self._longest[rank] = int(count), seen, longest
            self._passed_over.discard(rank)

    def _wait_for(self, rank: int, bound: int) -> None:
        begin, sleep = time.monotonic(), _FIRST_SLEEP
        while self.takes_part(rank) and not self.is_gone(rank):
            if self.must_give_way():
                return
            least = _QUIET_SECONDS if self._longest[rank] else _UNKNOWN_SECONDS
            most = min(max(least, _QUIET_TIMES * self._longest[rank]), _QUIET_MOST_SECONDS)
            if rank in self._passed_over:  # does not wait, but notices its next exchange
                most = 0.0
            left = begin + most - time.monotonic()
            self._look(rank, max(left, 0.0))
            if self._made - max(self._seen[rank], self._counts[rank]) <= bound:
                return
            if left <= 0.0:
                self._passed_over.add(rank)
                return
            time.sleep(sleep)
            sleep = min(2 * sleep, _LAST_SLEEP)
            self._last = (
                time.monotonic()
            )  # so that this wait does not count as the duration of this rank's exchange


class Deadlines:
    """How long a rank waits for each of its neighbors.

    A neighbor is late after ``median + patience * deviation`` of the times that this rank had to wait for it lately, where
    the deviation is the median absolute one, but at least 5 % of a round. Waits that ended by lateness do not count as
    times, and the first rounds have no deadline but half of the group's timeout. (The engine judges whole programs by the
    same rule: `engine/call_gaps`.)

    Args:
        patience: As above; at least 0.
        most: The longest wait, in seconds.
    """

    def __init__(self, patience: float, most: float) -> None:
        self._patience = patience
        self.most = most
        self._waits: dict[int, deque[float]] = {}
        self._rounds = deque[float](maxlen=_WAITS)
        self._last: float | None = None

    def wait(self, ranks: Iterable[int], look: Callable[[int], bool | None]) -> set[int]:
        """Waits for neighbors, and returns those that did not come.

        Args:
            ranks: The neighbors.
            look: Returns whether a neighbor has come; False if it will not come; None if it may come yet.
        """
        begin = time.monotonic()
        waiting = list(ranks)
        deadlines = {rank: self._deadline(rank) for rank in waiting}
        missing: set[int] = set()

        def is_settled() -> bool:
            passed = time.monotonic() - begin  # before the looks: this process may have been stopped
            for rank in list(waiting):
                has_come = look(rank)
                if has_come:
                    self._waits.setdefault(rank, deque(maxlen=_WAITS)).append(passed)
                elif has_come is False or passed > deadlines[rank]:
                    missing.add(rank)
                else:
                    continue
                waiting.remove(rank)
            return not waiting

        wait_until(is_settled, math.inf)
        return missing

    def end_round(self) -> None:
        """Notes the time of a round, at its end."""
        now = time.monotonic()
        if self._last is not None:
            self._rounds.append(now - self._last)
        self._last = now

    def _deadline(self, rank: int) -> float:
        waits = self._waits.get(rank, ())
        if len(waits) < _FEW:
            return self.most
        usual = median(waits)
        deviation = median(abs(each - usual) for each in waits)
        least = _LEAST_DEVIATION * median(self._rounds)
        return min(usual + self._patience * max(deviation, least), self.most)


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Waits for a condition, but not longer than so many seconds; returns whether it holds."""
    deadline, sleep = time.monotonic() + seconds, _FIRST_SLEEP
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(sleep)
        sleep = min(2 * sleep, _LAST_SLEEP)
    return True
