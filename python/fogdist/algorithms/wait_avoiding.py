"""WAGMA-SGD: averages in groups that change in every round, and that do not wait for a late rank."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist
from torch.optim import Optimizer

from fogdist.context import current
from fogdist.training.algorithm import check_count
from fogdist.training.continuing import Continuing, OnLoss, Watch
from fogdist.training.mixing import Finish, GlobalAverage, Mixing, NoMixing, Round
from fogdist.training.overlapping import OverlappingAlgorithm
from fogdist.training.view import Models

if TYPE_CHECKING:
    from fog_pg._C import Window


class WAGMA(OverlappingAlgorithm):
    """Wait-avoiding group model averaging: means of S ranks that wait for nobody, and every tau rounds the mean of all.

    ::

        x+ = mean(x_j : j in the group of this round) + d(x),      in round tau, 2 tau, ...:  x+ = mean(all x) + d(x)

    (Li, Ben-Nun, Nadiradze, Di Girolamo, Dryden, Alistarh and Hoefler, "Breaking (Global) Barriers in Parallel
    Stochastic Optimization with Wait-Avoiding Group Averaging", IEEE TPDS 2021, arXiv 2005.00124.) The groups are those
    of the paper: with ranks as numbers of log2(n) bits, the members of a group differ in log2(S) neighboring bits, which
    move on by log2(S) each round. So what one rank knows reaches all in about log2(n) / log2(S) rounds.

    At the end of a forward pass a rank puts its parameters into windows of its group's members, which take no part, and
    `step` averages with what is there then. If a member's parameters of this round have not come, its last ones count
    instead. A member whose last ones are from before the last average of all ranks does not count. So no rank waits for a
    late one until the next average of all. All ranks make all rounds, so there they wait for the last one: a rank that is
    late now and then holds up nobody, but one that is always slow holds up the others every tau rounds.

    This differs from the paper in two points. There the mean is that of the new parameters; here the exchange runs during
    the backward pass, so members have this time to come. And there a late rank gets a sum with its own old parameters,
    adds its new ones and divides by S + 1; here it averages by itself, with its new ones only.

    If no rank is late, averages keep the mean of all ranks. With late ones they keep it only in rounds tau, 2 tau, ...
    If a rank is lost, `step` raises. With ``on_loss="continue"`` a lost member does not count, and nobody waits for it. At
    the next average of all the ranks that are left agree on who that is, and make groups among themselves: of their first
    m, m being the largest power of 2 that is not above their number, as before. Each of the others, m + i, belongs to the
    groups of i. So groups then have S to 2 S members, each average is still one of a whole group, and values
    reach all ranks in as many rounds as with m ranks. If fewer than S are left, S is m.

    Args:
        optimizer: As in `Algorithm`.
        model: As in `Algorithm`; the trained parameters must stay the same ones. There are windows of them until
            `unregister_window`.
        group_size: S, a power of 2 from 2 to the number of ranks; by default about the square root of it.
        period: tau, counted in rounds. All ranks must make the same number of rounds, or some wait for the others there.
        local_steps: J: an exchange every J forward passes of the model.
        group: As in `Algorithm`; its size must be a power of 2.
        bucket_cap_mb: As in `Algorithm`; each bucket is a window, with a slot for each rank that is ever in a group with
            this one.
        on_loss: As in `Algorithm`.

    Raises:
        TypeError: As `Algorithm`.
        ValueError: The number of ranks or `group_size` is no power of 2; and as `Algorithm`.
    """

    runs_alone: ClassVar[bool] = False
    counts_passes: ClassVar[bool] = True

    group_size: int
    period: int
    _rank: int
    _size: int
    _puts: list[dist.Work]
    _must_forget: bool
    _has_sent: bool  # whether puts of the round have been made, and the round has not ended
    _watch: Watch | None
    _is_closed: bool  # after a loss, until windows of the ranks that are left are open

    def __init__(
        self,
        optimizer: Optimizer,
        model: Models,
        *,
        group_size: int | None = None,
        period: int = 10,
        local_steps: int = 1,
        group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        on_loss: OnLoss = "raise",
    ) -> None:
        context = current(group)
        self._rank, self._size = context.rank, context.size
        self.group_size = _checked_group_size(group_size, self._size)
        check_count(period, "period")
        self.period = period
        # Annotated here: the hints of the class must resolve where the extension is not loaded.
        self._windows: list[Window] = []
        self._puts = []
        self._global: Finish | None = None
        self._must_forget = self._has_sent = self._is_closed = False
        self._watch = None
        super().__init__(
            optimizer,
            model,
            mixing=NoMixing(),
            local_steps=local_steps,
            group=group,
            bucket_cap_mb=bucket_cap_mb,
            on_loss=on_loss,
            compare={"group_size": self.group_size, "period": period},
        )
        if self.is_running:
            with self.buckets.released_on_error():
                self._windows = self._opened()
            if self._seat is not None:
                self._watch = Watch(self._seat)  # at the next average of all the ranks meet anyway
        self.watch_forward("after forward")

    # --- what users call ---

    def unregister_window(self) -> None:
        """Ends a round in flight and frees the windows; collective. Steps are local ones from then on.

        Raises:
            torch.distributed.DistBackendError: A rank does not come.
        """
        self.synchronize()
        for watch in self._watches:
            watch.remove()
        if self._seat is not None and self._windows:
            self.await_all()  # so that no other rank waits in a meeting while this one waits in `free`
        windows, self._windows = self._windows, []
        for window in windows:
            window.free()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `Algorithm.load_state_dict`. All ranks load one: the next exchange waits for all of them."""
        super().load_state_dict(state_dict)
        self._must_forget = self.is_running

    # --- a round ---

    def begin(self) -> None:
        """Sends the parameters to the group's members, or begins the average of all."""
        if self._must_forget:
            self._forget()
        self.buckets.load()
        if self._windows and (self.rounds + 1) % self.period == 0:
            round = Round.of(self.context, self.rounds, self.name)
            mixing: Mixing = GlobalAverage()
            if self._seat is not None:
                mixing = Continuing(mixing, self._seat)
            self._global = mixing.begin(self.buckets.flats, round)
            return
        self._has_sent = True
        self._send()

    def finish(self) -> None:
        """Averages with what is here, or waits for the average of all."""
        if self._watch is not None and self._windows:
            self._watch.meet_if_needed()
        self._has_sent = False
        self._end_puts()
        average, self._global = self._global, None
        averages = average() if average is not None else None
        if averages is not None:
            self.write(averages)
        else:
            for window in self._windows:
                self._take(window)
        self.buckets.write_back()

    def refresh(self) -> None:
        """See `Algorithm.refresh`."""
        if self._windows and not self.is_in_round and not self._holds(*self._trained()):
            raise RuntimeError("parameters must not be added, frozen or unfrozen before unregister_window()")
        super().refresh()

    # --- inside ---

    def members_changed(self) -> None:
        """See `Algorithm.members_changed`: opens windows among the ranks that are left, and sends again."""
        if not self._windows:
            return
        with contextlib.suppress(dist.DistBackendError):  # of members that are gone
            self._end_puts()
        self._rank, self._size = self.context.rank, self.context.size
        # If another rank is lost now, the new group fails, and the ranks meet again before they use a window. The old ones
        # end when the last neighbor has left them.
        self._is_closed = True
        with contextlib.suppress(dist.DistBackendError):
            self._windows = self._opened()
            self._is_closed = False
        if self._has_sent:
            self._send()

    def _opened(self) -> list[Window]:
        # After as many rounds as a rank has bits the groups are the first ones again, if not before.
        rounds = range(self._size.bit_length())
        peers = sorted({peer for round in rounds for peer in self._members(round)})
        create = self.context.backend.create_window
        return [
            create(flat, f"{self.name}.{place}", peers, peers, zero_init=True)
            for place, flat in enumerate(self.values)
        ]

    def _members(self, round: int) -> list[int]:
        return group_of(self._rank, self._size, self.group_size, round)

    def _send(self) -> None:
        """Puts the parameters to the members of the round that begins or is in flight."""
        if self._is_closed:
            return
        members = [(peer, 1.0) for peer in self._members(self.rounds)]
        for window in self._windows:
            # Tells the members which round this is; the weights of a put are for it, too.
            window.p = float(self.rounds + 1)
            self._puts.append(
                window.put(window.tensor, members, with_p=True, skip_lost=self._seat is not None)
            )

    def _end_puts(self) -> None:
        puts, self._puts = self._puts, []
        for put in puts:
            try:
                put.wait()
            except dist.DistBackendError:
                gone = any(self._windows[0].is_gone(peer) for peer in self._windows[0].out_neighbors)
                if self._seat is None or not gone:
                    raise

    def _take(self, window: Window) -> None:
        """Averages with the members that have sent since the last average of all."""
        last = self.rounds // self.period * self.period
        here = [
            peer
            for peer in self._members(self.rounds)
            if window.slot_p(peer) > last and not (self._seat is not None and window.is_gone(peer))
        ]
        weight = 1.0 / (1 + len(here))
        window.update(weight, [(peer, weight) for peer in here])

    def _forget(self) -> None:
        """Empties the slots: what was sent before a state was loaded may have numbers of later rounds. Collective."""
        self.await_all()
        for window in self._windows:
            window.update(
                0.0, [(peer, 0.0) for peer in window.in_neighbors], reset=True, clone=True, with_p=True
            )
        self.await_all()
        self._must_forget = False

    def _fog_give_up(self) -> None:
        """Ends the windows, each rank for itself."""
        super()._fog_give_up()
        self._windows, self._puts, self._global = [], [], None


def group_of(rank: int, size: int, group_size: int, round: int) -> list[int]:
    """Returns the other members of a rank's group in a round.

    Args:
        rank: The rank.
        size: The number of ranks. If it is no power of 2, those above the largest power m belong to the groups of the
            ranks that are m less.
        group_size: S, a power of 2; if it is larger than m, m counts.
        round: Counted from 0.
    """
    bits = size.bit_length() - 1
    m = 1 << bits
    width = min(group_size.bit_length() - 1, bits)
    members = [rank % m]
    for bit in range(width):
        flipped = 1 << (round * width + bit) % bits
        members += [member ^ flipped for member in members]
    members += [member + m for member in members if member + m < size]
    return sorted(member for member in members if member != rank)


def _checked_group_size(group_size: int | None, size: int) -> int:
    """Returns S.

    Raises:
        TypeError: It is no int.
        ValueError: It or the number of ranks is no power of 2, or it is out of its range.
    """
    if size & (size - 1):
        raise ValueError(f"WAGMA needs a number of ranks that is a power of 2, got {size}")
    if group_size is None:
        return 1 << size.bit_length() // 2
    check_count(group_size, "group_size")
    if group_size & (group_size - 1) or not min(2, size) <= group_size <= size:
        raise ValueError(
            f"group_size must be a power of 2 from {min(2, size)} to the number of ranks, {size}, got {group_size}"
        )
    return group_size
