"""What `DecentralizedDataParallel` drives: algorithms around steps that the user's optimizer makes by itself."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fogdist.algorithms.decentralized_sgd import DecentralizedSGD
from fogdist.compression import Codec, backend_of
from fogdist.elastic.seat import Seat
from fogdist.packing import cap_bytes
from fogdist.streams import wait_until_complete
from fogdist.training.algorithm import Algorithm, check_count, check_factor
from fogdist.training.buckets import FlatBuckets
from fogdist.training.continuing import Continuing, Watch, await_all, highest, take_seat
from fogdist.training.mixing import Finish, Neighbors
from fogdist.training.pace import Pace
from fogdist.training.plans import Plans, edges_of, neighbors_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fog_pg._C import Window


class Driver(Algorithm):
    """Base of both.

    The wrapper calls `notice_forward` at each training forward pass (before it, or after one that changes parameters),
    `before_step` before each step of the optimizer that takes part, and `after_step` after it. `discard` waits for what is
    in flight and drops its result; `follow` changes the topology, collectively.

    Args:
        optimizer: The user's.
        module: The wrapped module.
        wrapper: The owner of the parameters, which this does not keep alive.
        rounds: The peers of each round.
        compression: A codec of `fogdist.compression`, or None.
        parameters: The parameters to mix, by name.
        buffers: The module's buffers to mix, by name.
        **options: As in `Algorithm`.
    """

    mode: ClassVar[str]
    compared: ClassVar[tuple[str, ...]] = ("mode",)

    extra: FlatBuckets  # the buffers
    compression: Codec | None
    _owner: weakref.ref[nn.Module]
    _parameters: list[Tensor]
    _ends: Seat | None  # of averages of all ranks, which ranks begin after different exchanges

    def __init__(
        self,
        optimizer: Optimizer,
        module: nn.Module,
        *,
        wrapper: nn.Module,
        rounds: Plans,
        compression: Codec | None,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        **options: Any,
    ) -> None:
        self._owner, self._parameters = weakref.ref(wrapper), list(parameters.values())
        self.compression, self._ends = compression, None
        size = cap_bytes(options.get("bucket_cap_mb"))
        self.extra = FlatBuckets(list(buffers.values()), size, names=list(buffers), owner=wrapper)
        with self.extra.released_on_error():
            super().__init__(optimizer, module, topology=rounds.topology, compression=compression, **options)

    @property
    def algorithm_name(self) -> str:
        """See `Algorithm.algorithm_name`."""
        return "DecentralizedDataParallel"

    def after_step(self) -> None:
        """Called after the optimizer's step."""

    def synchronize(self) -> None:
        """Mixes in place of a step that would complete an exchange."""

    def accept_changes(self) -> None:
        """Accepts the changes of the parameters since an exchange began."""

    def set_round(self, value: int) -> None:
        """Sets the round of the next exchange."""
        self.rounds = value

    def staleness(self) -> dict[int, int | None]:
        """Returns, for each in-neighbor, how many iterations its last values are behind this rank's own."""
        return {}

    def pause(self) -> None:
        """Tells the neighbors to go on without this rank until its next step."""

    def _fog_owner(self) -> object:
        return self._owner()

    def _fog_last_seat(self) -> Seat | None:
        return self._ends

    def _trained(self) -> tuple[list[Tensor], list[int]]:
        return self._parameters, [0] * len(self._parameters)

    def _hold(self) -> None:
        if self.on_loss == "continue":
            self._ends = take_seat(self._group, f"{self.name} global")
        super()._hold()

    def _agree_on(self, buckets: FlatBuckets) -> None:
        self._described += [f"buffer {line}" for line in self.extra.layout()]
        super()._agree_on(buckets)

    def _fog_give_up(self) -> None:
        super()._fog_give_up()
        self.extra.release()


class InStep(Driver, DecentralizedSGD):
    """One exchange per iteration, which runs during forward and backward.

    Parameters must not change between its begin and `before_step`. Buffers do change in a forward pass: the change that mixing makes
    to the values that were sent is added to them.
    """

    mode: ClassVar[str] = "sync"
    compared: ClassVar[tuple[str, ...]] = (*Driver.compared, *DecentralizedSGD.compared)

    _changes_in_forward: bool
    _sent: list[Finish]

    def __init__(self, optimizer: Optimizer, module: nn.Module, *, late_begin: bool, **options: Any) -> None:
        self._changes_in_forward, self._sent = late_begin, []
        super().__init__(optimizer, module, order="awc", **options)

    def is_joinable(self) -> bool:
        """See `Algorithm.is_joinable`: a backward pass needs the parameters that its forward pass has changed."""
        return super().is_joinable() and not self._changes_in_forward

    def watch_forward(self, when: Any) -> None:
        """The wrapper calls `notice_forward` instead."""

    def notice_forward(self) -> None:
        """See `Driver`."""
        self._count_forward(0)

    def begin(self) -> None:
        """See `OverlappingAlgorithm.begin`."""
        super().begin()
        self.extra.load()
        round = self.this_round()
        flats = enumerate(self.extra.flats)
        self._sent = [self.mixing.begin([flat], round.part(-1 - place)) for place, flat in flats]

    def finish(self) -> None:
        """See `OverlappingAlgorithm.finish`."""
        sent, self._sent = self._sent, []
        try:
            super().finish()
        finally:
            averages = [finish()[0] for finish in sent]
        changes = [average.sub_(flat) for flat, average in zip(self.extra.flats, averages, strict=True)]
        self.extra.load()
        for flat, change in zip(self.extra.flats, changes, strict=True):
            flat.add_(change)
        self.extra.write_back()

    @torch.no_grad()
    def before_step(self) -> None:
        """waits for the exchange in flight, or for a new one, and writes it into the tensors."""
        self.overflowed = False
        self.complete_round()

    def synchronize(self) -> None:
        """See `Driver.synchronize`."""
        DecentralizedSGD.synchronize(self)
        self._saw_forward = False

    def accept_changes(self) -> None:
        """See `Driver.accept_changes`."""
        self._mixer.accept_changes()

    def set_round(self, value: int) -> None:
        """See `Driver.set_round`."""
        super().set_round(value)
        self._mixer.restart()

    @torch.no_grad()
    def settle(self) -> None:
        """Completes the exchange that this rank or only other ranks have begun, if any. Collective."""
        # Ranks of whom some were left out of rounds have begun different numbers of them, and each completes its own.
        most = begun = self.rounds + self.is_in_round
        if self.patience is None:
            # A rank that gives this up has learned of the others' exchanges by the meeting already.
            most = highest(self.context, self._ends, begun, f"{self.name}.begun")
        while self.is_in_round or self.rounds < most:
            self.before_step()

    def discard(self) -> None:
        """See `Driver`."""
        if self.is_in_round:
            self.is_in_round = self._saw_forward = False
            self.rounds += 1
            self._mixer.discard()
            sent, self._sent = self._sent, []
            for finish in sent:
                finish()

    def follow(self, rounds: Plans) -> None:
        """See `Driver`."""
        self.mixing = Neighbors(rounds.topology, compression=self.compression)
        if self._seat is not None and self.patience is None:  # a patient mixer goes on by itself
            self.mixing = Continuing(self.mixing, self._seat)
        self.rounds = -int(self.is_in_round)
        self._mixer.restart()

    def _fog_finish(self) -> None:
        self.discard()
        self._mixer.close()


class AtOwnPace(Driver):
    """Mixing through one-sided windows, which hold the neighbors' last values.

    In each iteration a rank replaces x by ``w_ii x + sum_j w_ji slot_j`` with the weights of its round, makes
    the optimizer's step, and puts the result to its out-neighbors of round t. The weight of a neighbor whose
    values have not arrived yet, or which is paused or lost, is added to the weight of this rank's own x. The p of the values
    is the number of their iteration, so a neighbor knows their age.

    With a codec a rank adds ``sum_j w_ji (slot_j - d)`` to x, where d is what others decode of its own x, so the codec does not
    change x if all ranks agree.

    With ``on_loss="continue"`` a rank goes on without lost ranks; and once the topology falls apart without them, all ranks
    that are left meet in their next steps and go on along what `Topology.among` makes of it.

    Args:
        optimizer: As in `Driver`.
        module: As in `Driver`.
        max_staleness: As in `fogdist.training.WindowAlgorithm`.
        damping: Exponent a in the weight ``w_ji (1 + staleness)^-a``.
        skip_lost: Whether to go on without neighbors that are lost. The loss of a paused neighbor is no error.
        rounds: As in `Driver`; of a topology with a period.
        **options: As in `Driver`.
    """

    mode: ClassVar[str] = "async"
    state_numbers: ClassVar[Mapping[str, float]] = {"first_round": 0}
    rank_numbers: ClassVar[tuple[str, ...]] = ("first_round",)
    runs_alone: ClassVar[bool] = False
    can_be_joined: ClassVar[bool] = True

    is_in_round: bool = False  # no step has an exchange to wait for
    _iteration: int
    _rounds: Plans
    _whole: Plans  # of all ranks that there were
    _watch: Watch | None
    _pace: Pace
    _windows: list[Window]
    _decoded: list[
        Tensor
    ]  # what others decode of each buffer as it was put last; empty before, or without a codec
    _in: list[int]
    _out: list[int]
    _puts: list[dist.Work]
    _is_counted: bool  # whether neighbors can see the last iteration in the count
    _generation: tuple[dist.ProcessGroup | None, int]  # of the windows, in a group
    # The number of the exchange of the second seat in which ranks agree to close, once this one has come to it.
    _closing: int | None
    _max_staleness: int | None
    _damping: float
    _skip_lost: bool
    _codec: Any

    def __init__(
        self,
        optimizer: Optimizer,
        module: nn.Module,
        *,
        max_staleness: int | None,
        damping: float,
        skip_lost: bool,
        rounds: Plans,
        **options: Any,
    ) -> None:
        if max_staleness is not None:
            check_count(max_staleness, "max_staleness")
        self._max_staleness, self._damping = max_staleness, check_factor(damping, "staleness_damping")
        self._skip_lost = skip_lost or options.get("on_loss") == "continue"
        self._iteration, self._is_counted = 0, True
        self._closing, self._generation = None, (None, 0)
        self._windows, self._decoded, self._in, self._out, self._puts = [], [], [], [], []
        self._whole = self._rounds = rounds
        super().__init__(optimizer, module, rounds=rounds, **options)
        self._codec = backend_of(self.compression)
        if not self.context.is_joining:
            self._open(rounds)
        self._watch = None if self._seat is None else Watch(self._seat, self._edges)

    @property
    def rounds(self) -> int:
        """The round of the next iteration."""
        return int(self.numbers["first_round"]) + self._iteration

    @rounds.setter
    def rounds(self, value: int) -> None:
        self.numbers["first_round"] = value - self._iteration

    def notice_forward(self) -> None:
        """Counts the last iteration as soon as possible, if its puts to other hosts have arrived there."""
        if all(put.is_completed() for put in self._puts):
            self.discard()

    @torch.no_grad()
    def before_step(self) -> None:
        """mixes with the values that neighbors have put; waits for neighbors without news."""
        self.overflowed = self.enter()
        if self._watch is not None:
            self._watch.meet_if_needed()
        self.discard()
        if self._pace.is_paused:
            # The neighbors continued during the pause. They should not wait until this rank has caught up.
            self._iteration = self._pace.catch_up()
        for rank in self._in:
            if self._windows[0].is_gone(rank) and not self._may_miss(rank):
                self._windows[0].get([(rank, 1.0)]).wait()  # raises the error of the lost neighbor
        self._pace.wait(self._max_staleness)
        plan = self._rounds.plan(self.rounds)
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
            self._load()
            for window in self._windows:
                window.update(own if self._codec is None else 1.0, neighbors)
            for flat, decoded in zip(self._flats, self._decoded, strict=False):
                flat.add_(decoded, alpha=own - 1.0)
            self.buckets.write_back()
            self.extra.write_back()

    @torch.no_grad()
    def after_step(self) -> None:
        """See `Driver.after_step`: puts the values to the out-neighbors."""
        destinations = [rank for rank, _ in self._rounds.plan(self.rounds).destinations]
        self._iteration += 1
        if self._seat is not None:
            self._seat.completed = self._iteration
        self._put(destinations)
        self.notice_forward()  # on one host all puts have arrived already

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

    def settle(self) -> None:
        """Waits until the put values have left, and tells the neighbors to go on without this rank until its next step."""
        if self._windows:
            self.discard()
            self._pace.pause()

    pause = settle

    @torch.no_grad()
    def average(self, buffers: bool = True) -> None:
        """See `Algorithm.average`. Then it puts to all out-neighbors, and sets all ranks' iterations to one number."""
        super().average(buffers)
        self._come_together()

    def late_neighbors(self) -> list[int]:
        """Returns nobody: no rank waits for a late one."""
        return []

    def staleness(self) -> dict[int, int | None]:
        """See `Driver.staleness`."""
        return {rank: self._staleness(rank) for rank in self._in}

    def follow(self, rounds: Plans) -> None:
        """See `Driver`."""
        self._end()
        self._whole, self._closing = rounds, None
        self._open(Plans(rounds.topology, self.context))
        self._come_together()
        self.rounds = 0

    def members_changed(self) -> None:
        """Opens windows among the ranks of an epoch: the first that all of them do after a meeting, wherever they are."""
        assert self._seat is not None and self._ends is not None
        if self._closing is not None and max(self._ends.completed, self._ends.resume) > self._closing:
            return  # all ranks have come to `close`, as this one or another one knows
        with contextlib.suppress(dist.DistBackendError):  # of neighbors that are gone
            self.discard()
        self._iteration = max(self._iteration, self._seat.resume)
        # If another rank is lost now, the new group fails, and the ranks meet again in their next steps. The old windows
        # end when the last neighbor has left them.
        with contextlib.suppress(dist.DistBackendError):
            self._open(Plans(self._whole.topology, self.context))
            self._put(self._out)
        if self._closing is not None:
            self.pause()

    # --- inside ---

    def _fog_finish(self) -> None:
        self._end()

    def _come_together(self) -> None:
        """Puts to all out-neighbors, and sets all ranks' counts of iterations to one number. Collective."""
        self._iteration = highest(self.context, self._ends, self._iteration, f"{self.name}.done")
        self._put(self._out)
        wait_until_complete(self._puts)
        self.discard()
        highest(self.context, self._ends, 0, f"{self.name}.all have put")

    def _end(self) -> None:
        """Ends the windows; collective among neighbors, and among all ranks if they go on after losses."""
        if not self._windows:
            return
        self.pause()
        if self._ends is None:
            self._pace.free()
            for window in self._windows:
                window.free()
            self._windows = []
            return
        # A rank that waited for its neighbors in `free` would not hear of a meeting in which they wait for it. Once all
        # ranks have come here, nobody writes or reads any more, so nobody has to wait.
        self._closing = self._ends.completed
        assert self._watch is not None
        self._watch.meet_if_needed()
        await_all(self._ends)
        self._pace.abandon()
        self._windows = []

    @property
    def _flats(self) -> Sequence[Tensor]:
        return [*self.buckets.flats, *self.extra.flats]

    def _load(self) -> None:
        self.buckets.load()
        self.extra.load()

    def _edges(self) -> NDArray[np.bool_]:
        """Returns whether there is an edge in any round of a period."""
        assert self._rounds.topology is not None
        return edges_of(self._rounds.topology)

    def _open(self, rounds: Plans) -> None:
        assert rounds.topology is not None  # the wrapper checks it
        self._rounds = rounds
        self._in, self._out = neighbors_of(rounds.topology, self.context.rank)
        group, times = self._generation
        self._generation = self.context.group, times + 1 if group is self.context.group else 0
        name = f"{self.name}.{self._generation[1]}"
        create = self.context.backend.create_window
        self._windows = [
            create(flat, f"{name}.{i}", self._in, self._out, zero_init=True)
            for i, flat in enumerate(self._flats)
        ]
        gives_way = self._seat is not None
        self._pace = Pace(self.context, name, self._in, self._out, gives_way=gives_way)

    def _put(self, destinations: list[int]) -> None:
        self._is_counted = False
        self._load()
        for window in self._windows:
            window.p = self._iteration + 1.0  # 0 means that no values have arrived
        if self._codec is not None and not self._decoded:
            self._decoded = [torch.empty_like(flat) for flat in self._flats]
        # with a codec in any case, because `before_step` needs what this rank has put last
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
