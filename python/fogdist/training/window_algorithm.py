"""Algorithms over one-sided windows: parameters in buckets, each of which is the tensor of a window."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch.optim import Optimizer

from fogdist.agreement import check_same_everywhere
from fogdist.packing import signature_of
from fogdist.shards import local_of
from fogdist.training.algorithm import WEIGHTS, AlgorithmOptions, check_count
from fogdist.training.continuing import Watch
from fogdist.training.overlapping import OverlappingAlgorithm
from fogdist.training.pace import MAX_STALENESS, Pace
from fogdist.training.view import Models, setting
from fogdist.windows import Window

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Unpack

# The attributes that users may set. An algorithm uses some; setting one of the others raises, as it would have no
# effect.
_ATTRIBUTES = WEIGHTS | {"skip_lost"}


class WindowAlgorithm(OverlappingAlgorithm):
    """Base of the algorithms over windows, which hold the parameters' values. Neighbors write beside them.

    A round begins at the end of a forward pass. Ranks wait for each other in the constructor, in `add_param_group` and
    `unregister_window`, in each exchange with `force_barrier`, and if a rank would run away from one that gets no core
    (`max_staleness`). While there are windows the topology cannot change. `unregister_window`, which is collective, and
    `fogdist.shutdown` free the windows, and so does another algorithm that takes over the model; dropping the object
    does not. Parameters that are frozen at construction cannot be trained later.

    Args:
        optimizer: As in `Algorithm`.
        model: As in `Algorithm`.
        window_prefix: The prefix of the names of the windows, the same on all ranks; by default a new name.
        max_staleness: The largest number of exchanges that a rank makes without news of an in-neighbor that has made
            fewer; then it waits for it. None for any number. A rank does not wait for a neighbor that is lost, or that
            has been quiet for 0.1 s and five times as long as the longest of that rank's last 64 exchanges. (As the bound of
            stale synchronous parallel, Ho et al., NeurIPS 2013, but for news instead of progress: a rank may always be
            slower.)
        **options: As in `Algorithm`. Each bucket is a window; `topology` must be None. With ``on_loss="continue"``, neighbors
            that are lost are left out at once, and their weights return to the rank itself. Ranks that exchange in step then
            agree on who is left and repeat the round; others do so once the topology would fall apart. They go on along what
            is left of the topology, in new windows. Weights for a dynamic topology are not possible then.

    Attributes:
        force_barrier: True to exchange in step with the others: each rank's exchange is in the same iteration
            of all. It must then be the same on all ranks.
        max_staleness: As above; can be changed at any time.

    Raises:
        TypeError: As `Algorithm`; `window_prefix` is not a string, or `max_staleness` no integer.
        ValueError: As `Algorithm`; there are windows of this prefix; `max_staleness` is below 1.
        RuntimeError: As `Algorithm`.
    """

    runs_alone: ClassVar[bool] = False
    saves_state: ClassVar[bool] = False
    takes_compression: ClassVar[bool] = False
    zero_init: ClassVar[bool] = False
    """Whether slots start as zeros; otherwise they start as the parameters."""

    force_barrier: bool = setting(False)
    max_staleness: int | None = setting(MAX_STALENESS)
    windows: list[Window]
    has_sent: bool
    """Whether values of the round have been sent or requested, and not been taken."""
    _pace: Pace | None
    _watch: Watch | None
    _is_closed: bool  # after a loss, until windows of the ranks that are left are open
    _is_ending: bool  # this rank makes no more rounds
    _is_joining: bool  # this process has no windows until it has joined the others
    _prefix: str
    _in_flight: list[dist.Work]

    def __init__(
        self,
        optimizer: Optimizer,
        model: Models,
        *,
        window_prefix: str | None = None,
        max_staleness: int | None = MAX_STALENESS,
        **options: Unpack[AlgorithmOptions],
    ) -> None:
        if options.get("topology") is not None:
            raise ValueError(
                f"topology must be None for {self.algorithm_name}, whose windows follow the group's: set_topology"
            )
        if window_prefix is not None and not isinstance(window_prefix, str):
            raise TypeError(f"window_prefix must be a string, got {type(window_prefix).__name__}")
        if max_staleness is not None:
            check_count(max_staleness, "max_staleness")
        self.max_staleness = max_staleness
        self.windows = []
        self._in_flight = []
        self._pace = self._watch = None
        self._is_closed = self._is_ending = self._is_joining = self.has_sent = False
        super().__init__(optimizer, model, **options)
        self._prefix = window_prefix or self.name
        if self.is_running:
            if self.context.is_joining:
                from fogdist.training.pass_watch import PassWatch

                self._is_joining = True
                # A backward pass needs the parameters that its forward pass has had.
                for model in self._fog_models:
                    self._watches.append(PassWatch(model, "before", self._join_before_forward))
            else:
                with self.buckets.released_on_error():
                    self._open_all()
            if self._seat is not None:
                self._watch = Watch(self._seat, self._edges)
        self.watch_forward("after forward")

    # --- for subclasses to override ---

    def send(self, window: Window) -> dist.Work:
        """Begins the exchange of one window."""
        raise NotImplementedError

    def take(self, window: Window) -> None:
        """Writes the received values into the window's tensor."""
        raise NotImplementedError

    def check_weights(self) -> None:
        """Raises ValueError or TypeError for weights that `send` or `take` would refuse."""

    def keep(self, window: Window) -> None:
        """Saves what has arrived in a window, which is closed then, after a loss; default: nothing."""

    def reopened(self, window: Window) -> None:
        """Sends again in a new window what was on its way in the old one; default: nothing."""

    # --- for users to call ---

    def unregister_window(self) -> None:
        """Frees the windows and takes the algorithm off the model; collective.

        The parameters keep their values. A `step` that would exchange raises RuntimeError from now on.

        Raises:
            torch.distributed.DistBackendError: A neighbor did not come in time. All windows are freed all the
                same.
        """
        self._is_ending = True
        self._stand_aside()
        for watch in self._watches:
            watch.remove()
        if self._seat is not None and self._pace is not None:
            try:
                self.meet_if_needed()
                self.await_all()  # so that no other rank waits in a meeting while this one waits in `free`
            except dist.DistBackendError:
                self._abandon("ended because the ranks that are left could not agree")
                raise
        error = self._wait()
        if self.windows:
            self.buckets.release()
        opened: list[Pace | Window] = [*self.windows]
        if self._pace is not None:
            opened.append(self._pace)
            self._pace = None
        for each in opened:
            try:
                each.free()
            except RuntimeError as failure:
                error = error or failure
        if error is not None:
            raise error

    def members_changed(self) -> None:
        """See `Algorithm.members_changed`: opens windows among the ranks of an epoch, wherever the program is.

        The parameters stay as they are, because a backward pass may need them.
        """
        if self._pace is None and not self._is_joining:
            return
        self._wait()
        closed, self.windows = self.windows, []
        # Once all ranks have opened the new windows, what they have sent in the old ones is there. If another rank is lost
        # now, the new group fails, and the ranks meet again.
        self._is_closed = True
        with contextlib.suppress(dist.DistBackendError):
            self._open_all()
            self._is_closed = self._is_joining = False
        for window in closed:
            self.keep(window)
            window.abandon("ended when the ranks that are left opened new windows")
        if self._is_closed:
            for window in self.windows:
                window.abandon("ended because a rank was lost")
            self.windows = []
        for window in self.windows:
            self.reopened(window)
        self._wait()
        if self._is_ending:
            self._stand_aside()

    def _fog_finish(self) -> None:
        super()._fog_finish()
        self.unregister_window()

    def _fog_give_up(self) -> None:
        """Also closes the windows without waiting: ranks have agreed on the new owner, so no rank sends any more."""
        super()._fog_give_up()
        self._abandon("ended when another distributed optimizer took over the model")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group whose parameters belong to the model; collective, as it makes windows for them.

        Raises:
            ValueError: A parameter is not in the model, or as when the object was made.
        """
        super().add_param_group(param_group)
        if not self.is_running:
            return
        missing = [parameter for parameter in self._trained()[0] if parameter not in self.buckets]
        names = [self._fog_names[parameter] for parameter in missing]
        # If these items are the same on all ranks, the layout of the buckets is too.
        items = [
            f"{name!r}: {signature_of(local_of(each))}" for name, each in zip(names, missing, strict=True)
        ]
        try:
            check_same_everywhere(self.context.backend, "model", items)
        except ValueError:
            self._fog_wrapped.param_groups.pop()
            raise
        self.buckets.extend(missing, names=names)
        self._agree_on(self.buckets)  # a process that joins without these parameters is refused
        self._open()

    # --- a round ---

    def refresh(self) -> None:
        """See `Algorithm.refresh`.

        Raises:
            ValueError: A parameter has no window.
        """
        if self.is_in_round:
            return
        for parameter in self._trained()[0]:
            if parameter not in self.buckets:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} was frozen when the optimizer was made, so it "
                    "has no window: unfreeze it before, or make the optimizer anew"
                )
        self.buckets.load()

    def begin(self) -> None:
        """Sends or requests the values of this round."""
        self.weights().check_taken(self.mixing)
        self.check_weights()  # before anything is sent, and before a barrier that others would wait in
        if self.force_barrier:
            # All ranks have completed the previous exchange, so values that are sent now cannot get into it.
            self.await_all()
        self.has_sent = True
        for window in self.windows:
            self._in_flight.append(self.send(window))
        if self._pace is not None and not self._is_closed:
            self._pace.advance()

    def finish(self) -> None:
        """Waits for the round's exchange and takes the received values."""
        self.meet_if_needed()
        self.keep_pace()
        self.take_all()

    def take_all(self) -> None:
        """Waits for the exchanges in flight, and takes the received values."""
        try:
            error = self._wait()
            if error is not None:
                raise error
            if self.force_barrier:
                self.await_all()  # all ranks have sent their values
        finally:
            self.has_sent = False
        self.buckets.values()  # which `take` changes
        for window in self.windows:
            self.take(window)

    def keep_pace(self) -> None:
        """Waits for in-neighbors that are too far behind, unless ranks exchange in step anyway."""
        if self._pace is not None and not self.force_barrier:
            self._pace.wait(self.max_staleness)

    def _stand_aside(self) -> None:
        """Tells the neighbors not to wait for this rank, which waits for them."""
        if self._pace is not None and not self._is_closed:
            self._pace.pause()

    def meet_if_needed(self) -> None:
        """With ``on_loss="continue"``, agrees with the others on who is left if they can no longer go on without it."""
        # One that has just joined may have no windows yet, because another rank was lost.
        has_joined = self._is_joining and not self.context.is_joining
        if self._watch is not None and (self._pace is not None or has_joined):
            self._watch.meet_if_needed()

    # --- inside ---

    @torch.no_grad()
    def _join_before_forward(self) -> None:
        if self._is_joining:
            self.refresh()
            self.enter()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _ATTRIBUTES and name not in self.own_weights:
            allowed = ", ".join(sorted(self.own_weights))
            raise AttributeError(f"{self.algorithm_name} has no attribute {name!r}, but {allowed}")
        super().__setattr__(name, value)

    own_weights: ClassVar[frozenset[str]] = frozenset()
    """The attributes that users set before an exchange and that this algorithm uses."""

    def _open(self) -> None:
        """Makes windows for the buckets that have none."""
        group = self.context.group
        for number, flat in list(enumerate(self.buckets.flats))[len(self.windows) :]:
            window = Window(flat, group, name=f"{self._prefix}.{number}", zero_init=self.zero_init)
            self.windows.append(window)

    def _open_all(self) -> None:
        """Makes the windows of the buckets, and what goes with them."""
        self._open()
        topology, gives_way = self.context.topology, self._seat is not None
        neighbors = sorted(topology.in_neighbors), sorted(topology.out_neighbors)
        self._pace = Pace(self.context, self._prefix, *neighbors, gives_way=gives_way)

    def _edges(self) -> NDArray[np.bool_]:
        """Returns whether the group's topology has an edge from each rank to each other one."""
        edges = np.zeros((self.context.size, self.context.size), dtype=bool)
        for source, destination in self.context.topology.graph.edges:
            edges[source, destination] = True
        return edges

    def _abandon(self, reason: str) -> None:
        """Ends the windows without waiting for other ranks."""
        self._in_flight, self._pace = [], None
        for window in self.windows:
            window.abandon(reason)

    def _may_fail(self) -> bool:
        """Returns whether an operation may have failed because of a neighbor that is left out."""
        return self._seat is not None and self._pace is not None and self._pace.is_any_gone()

    def _wait(self) -> RuntimeError | None:
        """Waits for all operations in flight and returns the first error."""
        in_flight, self._in_flight = self._in_flight, []
        error = None
        for work in in_flight:
            try:
                work.wait()
            except RuntimeError as failure:
                if not self._may_fail():
                    error = error or failure
        return error
