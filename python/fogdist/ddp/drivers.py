"""What `DecentralizedDataParallel` drives: algorithms around steps that the user's optimizer makes by itself."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fogdist.algorithms.decentralized_sgd import DecentralizedSGD
from fogdist.compression import Codec
from fogdist.elastic.membership import members_of
from fogdist.elastic.participant import Participant
from fogdist.streams import wait_until_complete
from fogdist.training.algorithm import Algorithm, check_count
from fogdist.training.continuing import Continuing, Watch, await_all, highest
from fogdist.training.mixing import Neighbors, Plans, edges_of, neighbors_of
from fogdist.training.overlapping import When, forward_changes_parameters
from fogdist.training.pace import Pace

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fog_pg._C import Window
    from fogdist.ddp.data_parallel import DecentralizedDataParallel


class Driver(Algorithm):
    """Base of both. It takes the place of the `step` of the user's optimizer, which the script calls as before.

    Args:
        optimizer: The user's.
        module: The wrapped module.
        wrapper: The owner of the parameters, which this does not keep alive.
        parameters: The parameters to mix.
        **options: As in `Algorithm`.
    """

    mode: ClassVar[str]
    compared: ClassVar[tuple[str, ...]] = ("mode",)

    is_in_round: bool
    _owner: weakref.ref[DecentralizedDataParallel]
    _parameters: list[Tensor]
    _ends: Participant | None  # of averages of all ranks, which ranks begin after different exchanges
    _plain_step: Callable[..., Any]

    def __init__(
        self,
        optimizer: Optimizer,
        module: nn.Module,
        *,
        wrapper: DecentralizedDataParallel,
        parameters: list[Tensor],
        **options: Any,
    ) -> None:
        self._owner, self._parameters, self._ends = weakref.ref(wrapper), parameters, None
        self._plain_step = optimizer.step
        super().__init__(optimizer, module, **options)

    @property
    def algorithm_name(self) -> str:
        """See `Algorithm.algorithm_name`."""
        return "DecentralizedDataParallel"

    @property
    def is_running(self) -> bool:
        """See `Algorithm.is_running`: within `no_sync` steps are local, unless an exchange has begun before."""
        return super().is_running and (self.is_syncing or self.is_in_round)

    def step(self, *arguments: Any, **options: Any) -> Any:
        """See `Algorithm.step`. A gradient scaler sets its attributes on the user's optimizer, and deletes them itself."""
        held = vars(self._fog_wrapped)
        marks = {name: held.pop(name) for name in self._scaler_marks if name in held}
        vars(self).update(marks)
        result = super().step(*arguments, **options)
        for name, value in marks.items():
            del vars(self)[name]
            held[name] = value
        return result

    def refresh(self) -> None:
        """See `Algorithm.refresh`."""
        self._check_places()
        super().refresh()

    def set_round(self, value: int) -> None:
        """Sets the round of the next exchange."""
        self.rounds = value

    def discard(self) -> None:
        """Waits for what is in flight and drops its result."""

    def _check_places(self) -> None:
        wrapper = self._owner()
        assert wrapper is not None  # it drives this
        wrapper._check_places()

    def _check_syncing(self) -> None:
        pass

    def _fog_own_step(self, **options: Any) -> Any:
        return self._plain_step(**options)

    def _fog_owner(self) -> object:
        return self._owner()

    def _fog_last_seat(self) -> Participant | None:
        return self._ends

    def _trained(self) -> tuple[list[Tensor], list[int]]:
        return self._parameters, [0] * len(self._parameters)

    def _hold(self) -> None:
        if self.on_loss == "continue":
            self._ends = members_of(self._group).participant(f"{self.name} global", None)
        super()._hold()


class InStep(Driver, DecentralizedSGD):
    """One exchange per iteration, which runs during forward and backward."""

    mode: ClassVar[str] = "sync"
    compared: ClassVar[tuple[str, ...]] = (*Driver.compared, *DecentralizedSGD.compared)

    _codec: Codec | None
    _changes_in_forward: bool

    def __init__(self, optimizer: Optimizer, module: nn.Module, **options: Any) -> None:
        self._codec, self._changes_in_forward = options["compression"], forward_changes_parameters(module)
        super().__init__(optimizer, module, order="awc", **options)

    def is_joinable(self) -> bool:
        """See `Algorithm.is_joinable`: a backward pass needs the parameters that its forward pass has changed."""
        return super().is_joinable() and not self._changes_in_forward

    def watch_forward(self, when: When) -> None:
        """See `OverlappingAlgorithm.watch_forward`. Passes of the wrapper count, and not those of the module by itself."""
        from fogdist.training.pass_watch import is_training_pass

        wrapper = self._owner()
        assert wrapper is not None  # it makes this

        # The wrapper keeps this hook, so a hook that named the wrapper would keep it alive.
        def notice(called: nn.Module, *_: Any) -> None:
            if is_training_pass(called):
                self.notice_forward(0)

        register = (
            wrapper.register_forward_hook if self._changes_in_forward else wrapper.register_forward_pre_hook
        )
        self._watches.append(register(notice))

    def synchronize(self) -> None:
        """Mixes in place of a step that would complete an exchange."""
        super().synchronize()
        self._saw_forward = False

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
            self.complete_round()

    def discard(self) -> None:
        """See `Driver`."""
        if self.is_in_round:
            self.is_in_round = self._saw_forward = False
            self.rounds += 1
            self._mixer.discard()

    def follow(self, rounds: Plans) -> None:
        """Changes the topology; collective."""
        self.mixing = Neighbors(rounds.topology, compression=self._codec)
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

    With ``on_loss="continue"`` a rank goes on without lost ranks; and once the topology falls apart without them, all ranks
    that are left meet in their next steps and go on along what `Topology.among` makes of it.

    Args:
        optimizer: As in `Driver`.
        module: As in `Driver`.
        max_staleness: As in `fogdist.training.WindowAlgorithm`.
        skip_lost: Whether to go on without neighbors that are lost. The loss of a paused neighbor is no error.
        rounds: The peers of each round, of a topology with a period.
        **options: As in `Driver`.
    """

    mode: ClassVar[str] = "async"
    state_numbers: ClassVar[Mapping[str, float]] = {"first_round": 0}
    rank_numbers: ClassVar[tuple[str, ...]] = ("first_round",)
    runs_alone: ClassVar[bool] = False
    can_be_joined: ClassVar[bool] = True
    takes_compression: ClassVar[bool] = False

    is_in_round: bool = False  # no step has an exchange to wait for
    _iteration: int
    _rounds: Plans
    _whole: Plans  # of all ranks that there were
    _watch: Watch | None
    _pace: Pace
    _windows: list[Window]
    _in: list[int]
    _out: list[int]
    _puts: list[dist.Work]
    _is_counted: bool  # whether neighbors can see the last iteration in the count
    _generation: tuple[dist.ProcessGroup | None, int]  # of the windows, in a group
    # The number of the exchange of the second seat in which ranks agree to close, once this one has come to it.
    _closing: int | None
    _max_staleness: int | None
    _skip_lost: bool

    def __init__(
        self,
        optimizer: Optimizer,
        module: nn.Module,
        *,
        max_staleness: int | None,
        skip_lost: bool,
        rounds: Plans,
        **options: Any,
    ) -> None:
        if max_staleness is not None:
            check_count(max_staleness, "max_staleness")
        self._max_staleness = max_staleness
        self._skip_lost = skip_lost or options.get("on_loss") == "continue"
        self._iteration, self._is_counted = 0, True
        self._closing, self._generation = None, (None, 0)
        self._windows, self._in, self._out, self._puts = [], [], [], []
        self._whole = self._rounds = rounds
        super().__init__(optimizer, module, **options)
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

    def refresh(self) -> None:
        """See `Algorithm.refresh`. Each exchange loads the buckets anew."""
        self._check_places()

    def advance(self) -> Any:
        """Mixes with the values that neighbors have put, waiting for those without news; makes the step, and puts the result."""
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
        heard = [rank for rank, _ in plan.sources if self._staleness(rank) is not None]
        neighbors = [(rank, weight) for rank, weight in plan.sources if rank in heard]
        own = plan.self_weight + sum(weight for rank, weight in plan.sources if rank not in heard)
        if neighbors:
            self.buckets.load()
            for window in self._windows:
                window.update(own, neighbors)
            self.buckets.write_back()
        result = self.adapt()
        self.steps += 1
        destinations = [rank for rank, _ in plan.destinations]
        self._iteration += 1
        if self._seat is not None:
            self._seat.completed = self._iteration
        self._put(destinations)
        if all(put.is_completed() for put in self._puts):  # as on one host
            self.discard()
        return result

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

    def staleness(self) -> dict[int, int | None]:
        """Returns, for each in-neighbor, how many iterations its last values are behind this rank's own."""
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

    def _fog_own_step(self, **options: Any) -> Any:
        self.discard()  # of what is in flight, where parameters are views of the buffers
        return super()._fog_own_step(**options)

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
            for i, flat in enumerate(self.buckets.flats)
        ]
        gives_way = self._seat is not None
        self._pace = Pace(self.context, name, self._in, self._out, gives_way=gives_way)

    def _put(self, destinations: list[int]) -> None:
        self._is_counted = False
        self.buckets.load()
        for window, flat in zip(self._windows, self.buckets.flats, strict=True):
            window.p = self._iteration + 1.0  # 0 means that no values have arrived
            for skip_lost in (False, True):
                peers = [(rank, 1.0) for rank in destinations if self._may_miss(rank) == skip_lost]
                if peers:
                    self._puts.append(window.put(flat, peers, with_p=True, skip_lost=skip_lost))

    def _may_miss(self, rank: int) -> bool:
        # A rank that has paused may have finished its work, and its process may end.
        return self._skip_lost or not self._pace.takes_part(rank)

    def _staleness(self, rank: int) -> int | None:
        """Returns how many iterations an in-neighbor's values are behind; None if it is paused or lost."""
        put = min(window.slot_p(rank) for window in self._windows)
        if put == 0.0 or not self._pace.takes_part(rank) or self._windows[0].is_gone(rank):
            return None
        return self._iteration - (int(put) - 1)
