"""Exchanges of flat buckets that leave late neighbors out: the argument `patience` of algorithms that go in step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from fogdist.compression import Codec
from fogdist.context import Context
from fogdist.observe.timeline import shown_as
from fogdist.training.buckets import FlatBuckets
from fogdist.training.continuing import Watch
from fogdist.training.mixer import Mixer
from fogdist.training.mixing import Mixing, MixingLike, Neighbors, Round, as_mixing
from fogdist.training.mutual_rounds import MutualRounds
from fogdist.training.plans import Plans, edges_of, neighbors_of, topology_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fog_pg._C import NeighborPlan, Window
    from fogdist.elastic.seat import Seat


class PatientMixer(Mixer):
    """Successive exchanges of flat buckets, each without the neighbors that are late.

    A rank puts its values into windows of its neighbors, whose slots know the number of the round, and averages those of
    its own round. The weight of a neighbor that is left out goes to the rank's own values. `MutualRounds` sees to it that
    the neighbor leaves this rank out in the same round: with symmetric weights, the mean of all ranks stays as it is.
    There are two windows for each bucket, for even and odd rounds, because a neighbor may be one round ahead.

    Args:
        name: The same on all ranks, and unique among the mixers of the group.
        patience: Of `Deadlines`.
        seat: To go on without lost neighbors, as without late ones. Once the topology falls apart without them, all ranks
            that are left meet before their next exchange, and go on along what `Topology.among` makes of it.
    """

    def __init__(self, name: str, patience: float, seat: Seat | None = None) -> None:
        super().__init__()
        self._name = name
        self._patience = patience
        self._seat = seat
        self._watch = None if seat is None else Watch(seat, self._edges)
        self._generation: tuple[dist.ProcessGroup | None, int] = (
            None,
            0,
        )  # how many times it began anew, in a group
        self._opened: tuple[FlatBuckets, Mixing, dist.ProcessGroup] | None = None
        self._rounds: MutualRounds | None = None
        self._plans: Plans | None = None
        self._windows: tuple[list[Window], list[Window]] = [], []
        self._plan: NeighborPlan | None = None  # of the exchange in flight
        self._puts: dict[int, list[dist.Work]] = {}
        self._left_out: list[int] = []

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
            self._plan = plans.plan(number)
            self._puts = {rank: [] for rank, _ in self._plan.destinations}
            buckets.load()
            for place in buckets.sending_order:
                window = self._windows[rounds.number % 2][place]
                window.p = float(rounds.number)
                for rank, puts in self._puts.items():
                    if rank in rounds.in_step:
                        puts.append(
                            window.put(buckets.flats[place], [(rank, 1.0)], with_p=True, skip_lost=True)
                        )
        rounds.tell()
        self._changes.begin(buckets)
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
            self._changes.end(buckets)
            neighbors = [(rank, weight) for rank, weight in plan.sources if rank in counted]
            own = plan.self_weight
            for rank, weight in plan.sources:
                own += 0.0 if rank in counted else weight
            if neighbors:
                for window in self._windows[self._number % 2]:
                    window.update(own, neighbors)
        buckets.write_back()

    def discard(self) -> None:
        """See `Mixer.discard`."""
        self._changes.forget()
        if self._plan is not None:
            with self._named():
                self._settle()

    def restart(self) -> None:
        """See `Mixer.restart`."""
        self._opened = None

    def renew(self) -> None:
        """See `Mixer.renew`. It gives up an exchange in flight, and opens windows among the ranks that are left.

        This is the first that all of them do after a meeting, wherever they are.
        """
        if self._opened is None or self._seat is None:
            return
        buckets, mixing, _ = self._opened
        self._buckets, self._plan = None, None
        # If another rank is lost now, the new group fails, and the ranks meet again before their next exchange.
        with contextlib.suppress(dist.DistBackendError):
            self._open(buckets, mixing, self._seat.context)
            self._opened = buckets, mixing, self._seat.context.group

    def close(self) -> None:
        """See `Mixer.close`."""
        if self._rounds is not None:
            self._rounds.end()
        self._opened = self._rounds = self._plans = None
        self._windows = [], []

    # --- inside ---

    @property
    def _number(self) -> int:
        assert self._rounds is not None
        return self._rounds.number

    def _edges(self) -> NDArray[np.bool_]:
        """Returns whether there is an edge in any round; before windows are open, all ranks wait for each other."""
        if self._plans is None or self._plans.topology is None:
            size = 1 if self._seat is None else self._seat.context.size
            return np.ones((size, size), dtype=bool)
        return edges_of(self._plans.topology)

    def _make_ready(self, buckets: FlatBuckets, mixing: Mixing, context: Context) -> Context:
        """Opens windows if those that are open are others. Returns the group, or what is left of it."""
        while True:
            if self._watch is not None and self._seat is not None:
                self._watch.meet_if_needed()
                context = self._seat.context
            wanted = buckets, mixing, context.group
            if self._opened is not None and all(
                now is before for now, before in zip(wanted, self._opened, strict=True)
            ):
                return context
            try:
                self._open(buckets, mixing, context)
            except dist.DistBackendError:
                if self._seat is None or not context.backend.failure:
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
        self._windows = even, odd
        self._rounds = MutualRounds(
            context, name, {*sources, *destinations}, self._patience, gives_way=self._seat is not None
        )
        self._plans = plans

    def _settle(self) -> frozenset[int]:
        """Waits for the exchange in flight, and returns the neighbors whose values count."""
        rounds, plan, puts = self._rounds, self._plan, self._puts
        assert rounds is not None and plan is not None
        self._buckets, self._plan, self._puts = None, None, {}
        windows, number = self._windows[rounds.number % 2], float(rounds.number)
        sources = [rank for rank, _ in plan.sources]
        counted = rounds.settle(
            sources,
            list(puts),
            lambda rank: all(window.slot_p(rank) == number for window in windows),
            lambda rank: _are_there(puts[rank]),
        )
        self._left_out = sorted({*sources} - counted)
        if self._left_out:
            self._raise_losses()
        return counted

    def _raise_losses(self) -> None:
        """Raises the error of a lost neighbor. One that has ended in good order has made all its rounds."""
        assert self._rounds is not None and self._round is not None
        gone = self._rounds.gone() if self._seat is None else []
        lost = self._round.context.backend.lost_ranks() if gone else []
        for rank in gone:
            if rank in lost:
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
    given = as_mixing(topology, context, compression)
    if type(given) is not Neighbors:
        raise ValueError(f"topology must be a topology, a graph or None with patience, got {given!r}")
    if given.compression is not None:
        raise ValueError(f"compression must be None with patience, got {given.compression!r}")
    if context.held != 1:
        raise ValueError("patience must be None for virtual ranks, of which none is late")
    rounds = topology_of(context) if given.topology is None else given.topology
    if rounds.period is None:
        raise ValueError(f"topology must have a period with patience, got {rounds!r}")
    return Neighbors(rounds)


def _are_there(puts: list[dist.Work]) -> bool:
    if not puts or not all(put.is_completed() for put in puts):
        return False
    try:
        for put in puts:
            put.wait()
    except dist.DistBackendError:  # the neighbor is gone, or has closed its windows
        return False
    return True
