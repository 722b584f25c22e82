"""Mixing at each rank's own pace: neighbors' last values lie in one-sided windows, nobody is waited for.

Beside the windows of the model there is one of a few numbers, the signs: which iteration's values a rank has
put to this neighbor, and how far it is. A sign is put when the values that it speaks of have arrived, so
values are never older than their sign says. Signs go both ways along each edge, so that a rank learns too
when one that it only receives from is lost. They are on the CPU, also where the model is not: there the host looks
at each step what the device has done by then, and goes on; it waits in `pause` and in global averages only.
"""

from __future__ import annotations

import enum
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fogdist.context import Context
from fogdist.topology import Topology
from fogdist.training.pace import MAX_STALENESS, Pace
from fogdist.training.plans import Plans

if TYPE_CHECKING:
    from fog_pg._C import Window

# While a rank waits for a neighbor: the sleeps between two looks, doubled from the first to the last, and how
# often it makes sure that the neighbor is alive. All in seconds.
_FIRST_SLEEP = 50e-6
_LAST_SLEEP = 2e-3
_ALIVE_EVERY = 0.1


class _State(enum.IntEnum):
    SILENT = 0  # no sign yet: slots start as zeros
    ACTIVE = 1
    PAUSED = 2


class _Sign(NamedTuple):
    """What a rank tells a neighbor.

    Attributes:
        put: The iteration after which the last values were put to this neighbor; -1 for none.
        done: How many iterations it has done.
        state: A _State.
    """

    put: int
    done: int
    state: int


class _Landing(NamedTuple):
    """Puts that the flat buffers need not wait for any more, and that may not have arrived."""

    iteration: int
    destinations: list[int]
    puts: list[dist.Work]


class AsynchronousMixing:
    """Windows of the flat buffers of a model, and when this rank reads and writes them.

    In each iteration a rank replaces x by ``w_ii x + sum_j w_ji slot_j`` with the weights of its round, makes
    the optimizer's step, and puts the result to its out-neighbors of round t. The weight of a neighbor whose
    values have not arrived yet, who is paused or lost, goes to this rank's own x.

    Args:
        context: The group.
        flats: What is mixed; their memory stays where it is.
        rounds: Whom to mix with; of a topology with a period.
        name: What all ranks call it; no other mixing of the group has the same.
        max_staleness: How many iterations this rank may be ahead of an in-neighbor; None for any number; "auto" for
            any number as long as there is news of it (`Pace`).
        damping: Exponent a in the weight ``w_ji (1 + staleness)^-a``.
        skip_lost: Whether to go on without neighbors that are lost. Those that had paused are never missed.
        timeout: Of windows, and of waiting for a neighbor.
    """

    def __init__(
        self,
        context: Context,
        flats: list[Tensor],
        rounds: Plans,
        name: str,
        *,
        max_staleness: int | Literal["auto"] | None,
        damping: float,
        skip_lost: bool,
        timeout: timedelta | None,
    ) -> None:
        self._context = context
        self._flats = flats
        self._name = name
        self._max_staleness = None if max_staleness == "auto" else max_staleness
        self._paces = max_staleness == "auto"
        self._damping = damping
        self._skip_lost = skip_lost
        self._timeout = timeout
        self._patience = (timeout or context.backend.options._timeout).total_seconds()
        self._iteration = 0
        self._first_round = 0
        self._generation = 0
        self._is_paused = False
        self._lost: set[int] = set()
        self._puts: list[dist.Work] = []
        self._put_to: list[int] = []
        self._landing: list[_Landing] = []
        self._windows: list[Window] = []
        self._open(rounds)

    @property
    def has_begun(self) -> bool:
        """No: there is nothing that the next step has to wait for."""
        return False

    @property
    def round(self) -> int:
        """The round of the next iteration."""
        return self._first_round + self._iteration

    @round.setter
    def round(self, value: int) -> None:
        self._first_round = value - self._iteration

    def begin(self) -> None:
        """Tells neighbors on other hosts as soon as may be what has arrived there."""
        self._sign_if_put()

    def accept_changes(self) -> None:
        """Nothing: parameters may change at any time."""

    @torch.no_grad()
    def mix(self) -> None:
        """Mixes with what neighbors have put; waits for neighbors that are too far behind."""
        self.discard()
        if self._is_paused:  # neighbors went on meanwhile, and need not wait until this rank has caught up
            self._is_paused = False
            self._iteration = max([self._iteration, *(self._read(rank).done for rank in self._peers)])
        if self._pace is not None:
            self._pace.wait(MAX_STALENESS)
        self._wait_for_neighbors()
        plan = self._rounds.plan(self.round)
        own, neighbors = plan.self_weight, []
        for rank, weight in plan.sources:
            staleness = self._staleness(rank)
            share = 0.0 if staleness is None else weight * (1.0 + max(staleness, 0)) ** -self._damping
            own += weight - share
            if share != 0.0:
                neighbors.append((rank, share))
        if neighbors:
            for window in self._windows:
                window.update(own, neighbors, timeout=self._timeout)

    def finish(self) -> None:
        """Nothing: no rank waits for another one's step."""

    def after_step(self) -> None:
        """Puts the flat buffers to the out-neighbors."""
        destinations = [rank for rank, _ in self._rounds.plan(self.round).destinations]
        self._iteration += 1
        self._put(destinations)
        if self._pace is not None:
            self._pace.advance()

    def discard(self) -> None:
        """Waits until what was put has left: from then on the flat buffers may change.

        Flat buffers on a device may be changed by what the device is given then; the host goes on at once.
        """
        if self._puts:
            puts, self._puts = self._puts, []
            for put in puts:
                try:
                    put.wait()
                except dist.DistBackendError:
                    # Of someone who has paused and ended meanwhile; others have got their values, and one who
                    # is lost besides fails the next put too.
                    if not any(map(self._may_lose, self._put_to)):
                        raise
            self._landing.append(_Landing(self._iteration, self._put_to, puts))
        self._sign_landed()

    def pause(self) -> None:
        """Tells the neighbors to go on without this rank until its next step."""
        self._arrive()
        self._is_paused = True
        if self._pace is not None:
            self._pace.pause()
        self._sign()
        self._wait_for_signs()  # this rank may end now

    def staleness(self) -> dict[int, int | None]:
        """Returns, for each in-neighbor, how many iterations its last values are behind this rank's own."""
        self._sign_if_put()
        return {rank: self._staleness(rank) for rank in self._in}

    def follow(self, rounds: Plans) -> None:
        """Mixes along another topology from now on; collective."""
        self.close()
        self._open(rounds)
        self.after_global_average()
        self.round = 0

    def after_global_average(self) -> None:
        """Puts to all out-neighbors, and sets all ranks' counts of iterations to one number; collective."""
        done = torch.tensor([self._iteration], device="cpu")
        self._context.backend.allreduce_named(done, dist.ReduceOp.MAX, name=f"{self._name}.done").wait()
        self._iteration = int(done)
        self._is_paused = False
        self._put(self._out)
        self._arrive()
        self._context.group.barrier().wait()

    def close(self) -> None:
        """Ends the windows; collective among neighbors."""
        self.pause()
        windows, self._windows = [*self._windows, self._signs], []
        if self._pace is not None:
            self._pace.free()
        for window in windows:
            window.free() if self._timeout is None else window.free(self._timeout)

    # --- inside ---

    def _open(self, rounds: Plans) -> None:
        topology = rounds.topology
        if topology is None or topology.period is None:
            raise ValueError(f"topology must have a period in mode 'async', got {topology!r}")
        self._rounds = rounds
        self._in, self._out = _neighbors(topology, self._context.rank)
        self._peers = sorted({*self._in, *self._out})
        name = f"{self._name}.{self._generation}"
        self._generation += 1
        create = self._context.backend.create_window
        self._windows = [
            create(flat, f"{name}.{i}", self._in, self._out, zero_init=True, timeout=self._timeout)
            for i, flat in enumerate(self._flats)
        ]
        numbers = torch.zeros(len(_Sign._fields), dtype=torch.int64, device="cpu")
        self._signs: Window = create(
            numbers, f"{name}.signs", self._peers, self._peers, zero_init=True, timeout=self._timeout
        )
        self._pace = Pace(self._context, name, self._in, self._out) if self._paces else None
        self._last_put = dict.fromkeys(self._peers, -1)
        self._signing: list[tuple[int, dist.Work]] = []

    def _put(self, destinations: list[int]) -> None:
        self._put_to = destinations
        self._puts = []
        alive = [rank for rank in destinations if rank not in self._lost]
        for skip_lost in (False, True):
            peers = [(rank, 1.0) for rank in alive if self._may_lose(rank) == skip_lost]
            if peers:
                self._puts += [
                    window.put(flat, peers, skip_lost=skip_lost, timeout=self._timeout)
                    for window, flat in zip(self._windows, self._flats, strict=True)
                ]
        self._sign_if_put()  # on one host everything is there already

    def _sign_if_put(self) -> None:
        if all(put.is_completed() for put in self._puts):
            self.discard()
        else:
            self._sign_landed()

    def _sign_landed(self) -> None:
        """Signs what has arrived by now."""
        landed = False
        while self._landing and all(put.is_completed() for put in self._landing[0].puts):
            landing = self._landing.pop(0)
            for rank in landing.destinations:
                self._last_put[rank] = landing.iteration
            landed = True
        if landed:
            self._sign()

    def _arrive(self) -> None:
        """As `discard`, and returns when what was put has arrived."""
        self.discard()
        while self._landing:
            time.sleep(_FIRST_SLEEP)
            self._sign_landed()

    def _sign(self) -> None:
        """Tells all neighbors how far this rank is, and learns who of them is lost."""
        state = _State.PAUSED if self._is_paused else _State.ACTIVE
        done = self._landing[0].iteration - 1 if self._landing else self._iteration
        for rank in self._peers:
            if rank not in self._lost:
                sign = torch.tensor(_Sign(self._last_put[rank], done, state), device="cpu")
                try:
                    self._signing.append((rank, self._signs.put(sign, [(rank, 1.0)], timeout=self._timeout)))
                except dist.DistBackendError as error:
                    self._lose(rank, error)
        self._wait_for_signs([(rank, work) for rank, work in self._signing if work.is_completed()])

    def _wait_for_signs(self, signing: list[tuple[int, dist.Work]] | None = None) -> None:
        for rank, work in list(self._signing) if signing is None else signing:
            self._signing.remove((rank, work))
            try:
                work.wait()
            except dist.DistBackendError as error:
                self._lose(rank, error)

    def _may_lose(self, rank: int) -> bool:
        # Who has paused may be through with its work, and end.
        return self._skip_lost or self._read(rank).state == _State.PAUSED

    def _lose(self, rank: int, error: Exception) -> None:
        if not self._may_lose(rank):
            raise error
        self._lost.add(rank)

    def _read(self, rank: int) -> _Sign:
        return _Sign(*self._signs.update(0.0, [(rank, 1.0)], clone=True, timeout=self._timeout).tolist())

    def _staleness(self, rank: int) -> int | None:
        """Iterations that an in-neighbor's values are behind; None if it takes no part now."""
        sign = self._read(rank)
        if sign.state != _State.ACTIVE or sign.put < 0 or rank in self._lost:
            return None
        return self._iteration - sign.put

    def _wait_for_neighbors(self) -> None:
        if self._max_staleness is None:
            return
        deadline = time.monotonic() + self._patience
        for rank in self._in:
            sleep, look = _FIRST_SLEEP, time.monotonic() + _ALIVE_EVERY
            while rank not in self._lost:
                self._sign_landed()
                sign = self._read(rank)
                if sign.state == _State.PAUSED or self._iteration - sign.done <= self._max_staleness:
                    break
                now = time.monotonic()
                if now > deadline:
                    raise dist.DistBackendError(
                        f"{self._name} on rank {self._context.rank} timed out after {self._patience:g} s: "
                        f"rank {rank} has done {sign.done} iterations and this rank {self._iteration}, which "
                        f"is more than max_staleness={self._max_staleness} ahead"
                    )
                if now > look:
                    look = now + _ALIVE_EVERY
                    self._sign()
                time.sleep(sleep)
                sleep = min(2 * sleep, _LAST_SLEEP)


def _neighbors(topology: Topology, rank: int) -> tuple[list[int], list[int]]:
    """Returns a rank's in-neighbors and out-neighbors in any round of a period."""
    union = np.any([topology.matrix(t) != 0 for t in range(topology.period or 1)], axis=0)
    others = [r for r in range(topology.size) if r != rank]
    return [r for r in others if union[r, rank]], [r for r in others if union[rank, r]]
