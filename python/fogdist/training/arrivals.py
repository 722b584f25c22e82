"""Rounds that a late neighbor does not hold up: whom a rank waits for, and how long.

`Deadlines` is the rule, for all that has a `patience`. `Arrivals` are rounds in which each rank decides for itself;
`fogdist.training.mutual_rounds` are those in which both ends of an edge decide the same.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from statistics import median

import torch
import torch.distributed as dist

from fogdist.context import Context

# The number of waits that the deadline of a neighbor is computed from, and the least number: before, there is none.
_REMEMBERED = 32
_FEW = 4
# The longest first waits, in seconds, where ranks are in different rounds from the beginning: a neighbor may have made its
# last round already.
_UNKNOWN_SECONDS = 1.0
# The least deviation that the deadline counts with, relative to the time of a round: a neighbor that always came at the
# same time would otherwise have no leeway.
_LEAST_DEVIATION = 0.05
# The sleeps between two looks at the neighbors' numbers, in seconds, doubled from the first to the last.
_FIRST_SLEEP = 50e-6
_LAST_SLEEP = 1e-3
# The number of a rank that makes no more rounds; exact in the window's float64.
_NO_MORE = 1 << 52


class Deadlines:
    """How long a rank waits for each of its neighbors.

    A neighbor is late after ``median + patience * deviation`` of the times that this rank had to wait for it lately, where
    the deviation is the median absolute one, but at least 5 % of a round. Waits that ended by lateness do not count as
    times, and the first rounds have no deadline but the group's timeout. (The engine judges whole programs by the same
    rule: `engine/call_gaps`.)

    Args:
        patience: As above; at least 0.
        most: The longest wait, in seconds.
        first: The longest wait for a neighbor of which little is known; by default `most`.
    """

    def __init__(self, patience: float, most: float, first: float | None = None) -> None:
        self._patience = patience
        self._first = most if first is None else min(first, most)
        self.most = most
        self._waits: dict[int, deque[float]] = {}
        self._rounds = deque[float](maxlen=_REMEMBERED)
        self._last: float | None = None

    def wait(
        self,
        ranks: Iterable[int],
        look: Callable[[int], bool | None],
        must_give_way: Callable[[], bool] = lambda: False,
    ) -> set[int]:
        """Waits for neighbors, and returns those that did not come.

        Args:
            ranks: The neighbors.
            look: Returns whether a neighbor has come; False if it will not come; None if it may come yet.
            must_give_way: Returns whether to end the wait now; those that may come yet are not returned then.
        """
        begin = time.monotonic()
        waiting = list(ranks)
        deadlines = {rank: self._deadline(rank) for rank in waiting}
        missing: set[int] = set()
        sleep = _FIRST_SLEEP
        while True:
            passed = time.monotonic() - begin  # before the looks: this process may have been stopped
            for rank in list(waiting):
                has_come = look(rank)
                if has_come:
                    self._waits.setdefault(rank, deque(maxlen=_REMEMBERED)).append(passed)
                elif has_come is False or passed > deadlines[rank]:
                    missing.add(rank)
                else:
                    continue
                waiting.remove(rank)
            if not waiting or must_give_way():
                return missing
            time.sleep(sleep)
            sleep = min(2 * sleep, _LAST_SLEEP)

    def end_round(self) -> None:
        """Notes the time of a round, at its end."""
        now = time.monotonic()
        if self._last is not None:
            self._rounds.append(now - self._last)
        self._last = now

    def _deadline(self, rank: int) -> float:
        waits = self._waits.get(rank, ())
        if len(waits) < _FEW:
            return self._first
        usual = median(waits)
        deviation = median(abs(each - usual) for each in waits)
        least = _LEAST_DEVIATION * median(self._rounds)
        return min(usual + self._patience * max(deviation, least), self.most)


class Arrivals:
    """The in-neighbors' rounds, by the numbers that they put here, and a wait for those that are not late.

    Nobody waits for a late neighbor until it has sent again; the rounds that it missed are not made up for.

    The two ends of an edge do not agree on who is late. So this is for exchanges that stay right if only one end leaves
    the other one out, as those of push-sum do: a value that comes too late has its weight with it, and counts later.

    Args:
        context: The group. The construction is collective among neighbors.
        name: The same on all ranks.
        in_neighbors: The ranks to wait for.
        out_neighbors: The ranks that wait for this one.
        patience: Of `Deadlines`.
        gives_way: As of `Pace`.
        is_apart: Whether ranks may be in different rounds at the beginning; then the first one waits for nobody, and none
            waits long for a neighbor of which little is known.
    """

    def __init__(
        self,
        context: Context,
        name: str,
        in_neighbors: Iterable[int],
        out_neighbors: Iterable[int],
        patience: float,
        *,
        gives_way: bool = False,
        is_apart: bool = False,
    ) -> None:
        self._backend = context.backend
        self._gives_way = gives_way
        self._in = sorted(in_neighbors)
        self._peers = [(rank, 1.0) for rank in sorted(out_neighbors)]
        most = context.backend.options._timeout.total_seconds()
        self._deadlines = Deadlines(patience, most, _UNKNOWN_SECONDS if is_apart else None)
        empty = torch.zeros(1, dtype=torch.float64, device="cpu")
        self._window = context.backend.create_window(
            empty, f"{name}.arrivals", self._in, [rank for rank, _ in self._peers], zero_init=True
        )
        self._made = 0
        # The number that means that a neighbor has come to this round.
        self._due = dict.fromkeys(self._in, 0 if is_apart else 1)
        self._late: set[int] = set()

    @property
    def late(self) -> frozenset[int]:
        """The in-neighbors that were late in the last round, or before and have not sent since."""
        return frozenset(self._late)

    def tell(self) -> None:
        """Tells the out-neighbors that this rank has sent its values of another round; call it after that."""
        self._say(self._made + 1)

    def leave(self) -> None:
        """Tells the out-neighbors that this rank makes no more rounds, so that they do not wait for it."""
        self._say(_NO_MORE)

    def wait(self) -> None:
        """Waits until the in-neighbors have come to this round, except for late ones."""
        self._late = {rank for rank in self._late if not self._has_come(rank)}
        waited_for = [rank for rank in self._in if rank not in self._late and self._due[rank] > 0]
        self._late |= self._deadlines.wait(waited_for, self._look, self._must_give_way)
        for rank in filter(self._has_come, set(self._in) - self._late):
            # A neighbor that is further ahead, because this rank was late, is expected to go on from there.
            self._due[rank] = min(max(self._due[rank] + 1, self._number(rank)), _NO_MORE)
        self._deadlines.end_round()

    def free(self) -> None:
        """Frees the window; collective among neighbors."""
        self._window.free()

    def _say(self, made: int) -> None:
        self._made = made
        self._window.p = float(made)
        # If a neighbor is lost, the values' own messages report it.
        with contextlib.suppress(dist.DistBackendError):
            self._window.put(self._window.tensor, self._peers, with_p=True, skip_lost=True)

    def _look(self, rank: int) -> bool | None:
        if self._has_come(rank):
            return True
        return False if self._window.is_gone(rank) else None

    def _must_give_way(self) -> bool:
        return self._gives_way and bool(self._backend.failure)

    def _has_come(self, rank: int) -> bool:
        return self._number(rank) >= self._due[rank]

    def _number(self, rank: int) -> int:
        return int(self._window.slot_p(rank))
