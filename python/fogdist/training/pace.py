"""How far a rank goes on without news of its in-neighbors, where ranks go at their own pace."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from fogdist.context import Context

# Exchanges without news of a neighbor, by default. Ranks on cores of their own do not meet it unless a neighbor is some 8
# times slower; where ranks share cores, one that gets none for a while holds its neighbors up before they have run far
# away from it: docs/training.md.
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


class Pace:
    """Counts a rank's exchanges, shows them to neighbors, and waits for those that fall too far behind.

    A neighbor's staleness is how many exchanges this rank has made since it saw that neighbor make one, and 0 for one
    that has made as many. So a neighbor that is s times slower has a staleness of about s, however long the training is,
    and one that got no core for a while has one that grows. Only a rank with fewer exchanges is waited for, so
    there always is one that waits for nobody, and ranks cannot wait in a circle.

    A neighbor that has been quiet for much longer than its longest exchange of late, 15 s at most, is not waited for:
    scripts do not say when a rank ends its training, evaluates, or waits in a collective for those that would wait for it
    here. One that is lost is none of this class's business: the exchange itself says so.

    Nothing is sent: a rank writes its count into its own memory, and a neighbor gets it from there, when this rank may be
    too far behind as far as the neighbor knows, and else never. As nobody looks in between, the last exchange of a
    neighbor may have been up to twice as long ago.

    Args:
        context: The group. Collective among neighbors: the topology's, as of windows.
        name: What all ranks call it.
        in_neighbors: Whose exchanges this rank watches.
        out_neighbors: Who watches this rank's.
    """

    def __init__(
        self, context: Context, name: str, in_neighbors: list[int], out_neighbors: list[int]
    ) -> None:
        shown = torch.zeros(3, dtype=torch.float64, device="cpu")
        self._window = context.backend.create_window(
            shown, f"{name}.pace", in_neighbors, out_neighbors, zero_init=True
        )
        # What neighbors see: how many exchanges, the longest time between two of late, and whether it takes part.
        self._shown = shown.numpy()
        self._shown[2] = 1.0
        self._made = 0
        self._last = time.monotonic()
        self._counts = dict.fromkeys(in_neighbors, 0)  # of the neighbors' exchanges, as last seen
        self._seen = dict.fromkeys(in_neighbors, 0)  # this rank's own, when it saw the last of these
        self._passed_over: set[int] = set()

    def advance(self) -> None:
        """Counts an exchange, once what it sends is on its way."""
        now = time.monotonic()
        if self._made:
            self._shown[1] = max(_FORGETTING * self._shown[1], now - self._last)
        self._last = now
        self._made += 1
        self._shown[2] = 1.0
        self._shown[0] = self._made

    def wait(self, max_staleness: int | None) -> None:
        """Waits for neighbors that are too far behind; called before their values are used.

        Args:
            max_staleness: The largest staleness that is not waited for; None for no bound.
        """
        if max_staleness is None:
            return
        for rank, count in self._counts.items():
            if self._made - count > max_staleness and self._look(rank)[0] > max_staleness:
                self._wait_for(rank, max_staleness)
                self._last = (
                    time.monotonic()
                )  # neighbors need not think that this rank's own steps are so long

    def pause(self) -> None:
        """Tells the neighbors not to wait for this rank until its next exchange."""
        self._shown[2] = 0.0

    def free(self) -> None:
        """Ends it: nobody waits for this rank from now on. Collective among neighbors."""
        self.pause()
        self._window.free()

    def _look(self, rank: int) -> tuple[int, float]:
        """Returns a neighbor's staleness, which is 0 if it takes no part, and how long its exchanges take in seconds."""
        try:
            self._window.get([(rank, 1.0)]).wait()
        except dist.DistBackendError:  # it is lost
            return 0, 0.0
        count, longest, takes_part = self._window.update(0.0, [(rank, 1.0)], clone=True).tolist()
        if count > self._counts[rank]:
            self._counts[rank], self._seen[rank] = int(count), self._made
            self._passed_over.discard(rank)
        if not takes_part or rank in self._passed_over:
            return 0, longest
        return self._made - max(self._seen[rank], self._counts[rank]), longest

    def _wait_for(self, rank: int, bound: int) -> None:
        begin, sleep = time.monotonic(), _FIRST_SLEEP
        while True:
            staleness, longest = self._look(rank)
            if staleness <= bound:
                return
            patience = min(max(_QUIET_SECONDS, _QUIET_TIMES * longest), _QUIET_MOST_SECONDS)
            if time.monotonic() - begin > patience:
                self._passed_over.add(rank)
            time.sleep(sleep)
            sleep = min(2 * sleep, _LAST_SLEEP)
