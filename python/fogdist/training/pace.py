"""The limit up to which a rank continues without news of its in-neighbors, where ranks go at their own pace."""

from __future__ import annotations

import contextlib
import time
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

from fogdist.context import Context

# The default bound of exchanges without news of a neighbor. Ranks with their own cores do not reach it unless a
# neighbor is about 8 times slower. Where ranks share cores, a rank that gets none for a while delays its neighbors
# before they have run far ahead of it: docs/training.md.
MAX_STALENESS = 8
# While a rank waits: the sleeps between two looks, doubled from the first to the last. In seconds.
_FIRST_SLEEP = 50e-6
_LAST_SLEEP = 2e-3
# A neighbor that has been quiet for so long, and for so many times as long as its own exchanges take, is not waited for
# any more: it evaluates, has come to its end, or is stuck. Its next exchange brings it back.
_QUIET_SECONDS = 1.0
# What is left of the longest exchange after one more: an evaluation between two of them is forgotten soon.
_FORGETTING = 0.9
_QUIET_TIMES = 5.0
_QUIET_MOST_SECONDS = 15.0
# Those that are in use, for whoever asks how old neighbors' values are.
_in_use: weakref.WeakSet[Pace] = weakref.WeakSet()


def staleness_of(context: Context) -> dict[int, int]:
    """By in-neighbor, how many exchanges this rank has made since it saw that neighbor make one, at most."""
    staleness: dict[int, int] = {}
    for pace in _in_use:
        if pace.context is context:
            for rank, exchanges in pace.staleness().items():
                staleness[rank] = max(exchanges, staleness.get(rank, 0))
    return staleness


class Pace:
    """Counts a rank's exchanges, shows them to neighbors, and waits for those that fall too far behind.

    The staleness of a neighbor is the number of exchanges that this rank has made since it saw the neighbor make one, and
    0 for a neighbor that has made as many. So a neighbor that is s times slower has a staleness of about s throughout the
    training, and the staleness of a neighbor that gets no core grows. A rank waits only for ranks with fewer exchanges,
    so there is always a rank that does not wait, and ranks cannot wait in a circle.

    A rank does not wait for a neighbor that has been quiet for much longer than its longest recent exchange (at most 15
    s): scripts do not announce that a rank ends its training, evaluates, or waits in a collective for the ranks that
    would wait for it here. This class does not handle lost ranks; the exchange itself reports them.

    A rank writes its count into its own memory. A neighbor reads it only when, by its own information, this rank may be
    too far behind. Between two reads the information is old, so the last exchange of a neighbor may have been up to twice
    as long ago. Only a pause is sent as a message, because a rank that has paused may end.

    Args:
        context: The group. Collective among neighbors: the topology's, as of windows.
        name: The same on all ranks.
        in_neighbors: The ranks whose exchanges this rank watches.
        out_neighbors: The ranks that watch this rank's exchanges.
        timeout: For the construction and for news; by default the group's.
    """

    def __init__(
        self,
        context: Context,
        name: str,
        in_neighbors: list[int],
        out_neighbors: list[int],
        timeout: timedelta | None = None,
    ) -> None:
        self.context = context
        self._peers = sorted({*in_neighbors, *out_neighbors})
        self._name = f"{name} on rank {context.rank}"
        self._timeout = timeout
        # What neighbors see: how many exchanges, and the longest time between two of late.
        shown = torch.zeros(2, dtype=torch.float64, device="cpu")
        self._window = context.backend.create_window(
            shown, f"{name}.pace", self._peers, self._peers, zero_init=True, timeout=timeout
        )
        self._window.p = 0.0  # 1 while it is paused
        self._shown = shown.numpy()
        self._made = 0
        self._last = time.monotonic()
        self._in = in_neighbors
        self._counts = dict.fromkeys(self._peers, 0)  # of the neighbors' exchanges, as last seen
        self._seen = dict.fromkeys(self._peers, 0)  # this rank's own, when it saw the last of these
        self._longest = dict.fromkeys(self._peers, 0.0)  # seconds between two of them
        self._asked: dict[int, dist.Work] = {}  # for news that has not come yet
        self._passed_over: set[int] = set()
        _in_use.add(self)

    @property
    def is_paused(self) -> bool:
        """Whether this rank takes no part now."""
        return self._window.p > 0.0

    def takes_part(self, rank: int) -> bool:
        """Whether a neighbor has not paused, as far as it has said."""
        return self._window.slot_p(rank) == 0.0

    def staleness(self) -> dict[int, int]:
        """By in-neighbor, how many exchanges this rank has made since it saw that neighbor make one, at most."""
        return {
            rank: 0 if self._counts[rank] >= self._made else self._made - self._seen[rank]
            for rank in self._in
            if self.takes_part(rank)
        }

    def advance(self, made: int | None = None) -> None:
        """Counts an exchange, once its data is on its way; a rank that has paused takes part again.

        Args:
            made: How many there are now; by default one more.
        """
        now = time.monotonic()
        if self._made:
            self._shown[1] = max(_FORGETTING * self._shown[1], now - self._last)
        self._last = now
        self._made = self._made + 1 if made is None else made
        self._shown[0] = self._made
        if self.is_paused:
            self._say(paused=False)

    def wait(self, max_staleness: int | None, patience: float | None = None) -> None:
        """Waits for neighbors that are too far behind; called before their values are used.

        Args:
            max_staleness: The largest staleness that is not waited for; None for no bound.
            patience: Where given, it bounds by how many exchanges a neighbor is behind, news or not, and nobody is
                passed over: seconds after which that is an error.

        Raises:
            torch.distributed.DistBackendError: A neighbor stays behind for `patience` seconds.
        """
        if max_staleness is not None:
            for rank in self._in:
                if self._made - self._counts[rank] > max_staleness:
                    self._wait_for(rank, max_staleness, patience)

    def pause(self) -> None:
        """Tells the neighbors not to wait for this rank until its next exchange; it may end then."""
        self._say(paused=True)

    def catch_up(self) -> int:
        """Counts as many exchanges as whoever of this rank and its neighbors has made most; returns how many."""
        for rank in self._peers:
            self._look(rank, _QUIET_SECONDS)
        self._made = max([self._made, *self._counts.values()])
        return self._made

    def free(self) -> None:
        """Ends it: no rank waits for this rank from now on. Collective among neighbors."""
        self.pause()
        _in_use.discard(self)
        self._window.free(self._timeout)

    def _say(self, *, paused: bool) -> None:
        self._window.p = 1.0 if paused else 0.0
        with contextlib.suppress(dist.DistBackendError):  # of a neighbor that is lost
            peers = [(rank, 1.0) for rank in self._peers]
            self._window.put(
                self._window.tensor, peers, with_p=True, skip_lost=True, timeout=self._timeout
            ).wait()

    def _look(self, rank: int, seconds: float) -> None:
        """Gets news of a neighbor, if it comes within so many seconds; else the next look may find it."""
        asked = self._asked.pop(rank, None) or self._window.get([(rank, 1.0)], timeout=self._timeout)
        deadline = time.monotonic() + seconds
        while not asked.is_completed():
            if time.monotonic() >= deadline:
                self._asked[rank] = asked
                return
            time.sleep(_FIRST_SLEEP)
        try:
            asked.wait()
        except dist.DistBackendError:  # it is lost, or did not answer
            return
        count, longest = self._window.update(0.0, [(rank, 1.0)], clone=True).tolist()
        if count > self._counts[rank]:
            self._counts[rank], self._seen[rank], self._longest[rank] = int(count), self._made, longest
            self._passed_over.discard(rank)

    def _wait_for(self, rank: int, bound: int, patience: float | None) -> None:
        begin, sleep = time.monotonic(), _FIRST_SLEEP
        while self.takes_part(rank) and not self._window.is_gone(rank):
            most = patience
            if most is None:
                most = min(max(_QUIET_SECONDS, _QUIET_TIMES * self._longest[rank]), _QUIET_MOST_SECONDS)
                if rank in self._passed_over:  # nothing is waited for, but its next exchange is noticed
                    most = 0.0
            left = begin + most - time.monotonic()
            self._look(rank, max(left, 0.0))
            since = self._counts[rank] if patience is not None else max(self._seen[rank], self._counts[rank])
            if self._made - since <= bound:
                return
            if left <= 0.0 and patience is None:
                self._passed_over.add(rank)
                return
            if left <= 0.0:
                raise dist.DistBackendError(
                    f"{self._name} timed out after {patience:g} s: rank {rank} has done {self._counts[rank]} "
                    f"iterations, as far as it has said, and this rank {self._made}, which is more than "
                    f"max_staleness={bound} ahead"
                )
            time.sleep(sleep)
            sleep = min(2 * sleep, _LAST_SLEEP)
            self._last = time.monotonic()  # neighbors need not think that this rank's own steps are so long
