"""Algorithms over one-sided windows: parameters in buckets, each of which is the tensor of a window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist
from torch.optim import Optimizer

from fogdist.context import current
from fogdist.topology import Topology
from fogdist.training.algorithm import AlgorithmOptions, check_count
from fogdist.training.continuing import Watch, await_all
from fogdist.training.mixing import Plans, edges_of, rounds_of
from fogdist.training.overlapping import OverlappingAlgorithm
from fogdist.training.pace import MAX_STALENESS, Pace
from fogdist.training.view import Models, setting
from fogdist.windows import Window

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Unpack


class WindowAlgorithm(OverlappingAlgorithm):
    """Base of the algorithms over windows, which hold the parameters' values. Neighbors write beside them.

    A round begins at the end of a forward pass. Ranks wait for each other in the constructor, in `unregister_window`, in
    each exchange with `force_barrier`, and if a rank would run away from one that gets no core
    (`max_staleness`). Windows are between the neighbors of all rounds of `topology`. Without one they are along the group's
    topology, which cannot change meanwhile; dropping the object does not free these. `unregister_window`, which is
    collective, frees the windows, and another algorithm that takes over the model ends them. Parameters that are frozen at
    construction cannot be trained later.

    Args:
        optimizer: As in `Algorithm`.
        model: As in `Algorithm`.
        window_prefix: The prefix of the names of the windows, the same on all ranks; by default a new name.
        max_staleness: The largest number of exchanges that a rank makes without news of an in-neighbor that has made
            fewer; then it waits for it. None for any number. A rank does not wait for a neighbor that is lost, or that
            has been quiet for 0.1 s and five times as long as the longest of that rank's last 64 exchanges. (As the bound of
            stale synchronous parallel, Ho et al., NeurIPS 2013, but for news instead of progress: a rank may always be
            slower.)
        **options: As in `Algorithm`, but `topology` must have a period, and `compression` and, for some, `on_loss` no other
            value than their default. Each bucket is a window.

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
    goes_on_after_losses: ClassVar[bool] = False
    own_weights: ClassVar[tuple[str, ...]] = ()
    """The attributes that users set before an exchange and that this algorithm uses."""

    force_barrier: bool = setting(False)
    max_staleness: int | None = setting(MAX_STALENESS)
    windows: list[Window]
    _pace: Pace | None
    _prefix: str
    _in_flight: list[dist.Work]
    _topology: Topology | None  # of all ranks that there were; None for the group's
    _plans: Plans
    _watch: Watch | None
    _generation: tuple[dist.ProcessGroup | None, int]  # of the windows, in a group
    # The number of the exchange of `_ends` in which ranks agree to end their windows, once this one has come to it.
    _closing: int | None

    def __init__(
        self,
        optimizer: Optimizer,
        model: Models,
        *,
        window_prefix: str | None = None,
        max_staleness: int | None = MAX_STALENESS,
        **options: Unpack[AlgorithmOptions],
    ) -> None:
        if window_prefix is not None and not isinstance(window_prefix, str):
            raise TypeError(f"window_prefix must be a string, got {type(window_prefix).__name__}")
        if max_staleness is not None:
            check_count(max_staleness, "max_staleness")
        self.max_staleness = max_staleness
        self.windows, self._in_flight, self._pace, self._watch = [], [], None, None
        self._topology, self._generation, self._closing = None, (None, 0), None
        if options.get("topology") is not None or options.get("on_loss") == "continue":
            self._topology = rounds_of(
                options.get("topology"), current(options.get("group")), f"for {self.algorithm_name}"
            )
            options["topology"] = self._topology
        super().__init__(optimizer, model, **options)
        self.mixing.weights = (
            self.own_weights if self._participant is None else ()
        )  # these may name lost ranks
        self._prefix = window_prefix or self.name
        if self.is_running:
            if self._participant is not None:
                self._watch = Watch(self._participant, self._edges)
            if not self.context.is_joining:  # else it opens windows when it has joined the others
                with self.buckets.released_on_error():
                    self._open()
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

    # --- for users to call ---

    def unregister_window(self) -> None:
        """Frees the windows and takes the algorithm off the model; collective.

        The parameters keep their values. A `step` that would exchange raises RuntimeError from now on.

        Raises:
            torch.distributed.DistBackendError: A neighbor did not come in time. All windows are freed all the
                same.
        """
        for watch in self._watches:
            watch.remove()
        if self.windows:
            self.buckets.release()
        self._end()

    def _fog_finish(self) -> None:
        super()._fog_finish()
        self.unregister_window()

    def _fog_give_up(self) -> None:
        """Also closes the windows without waiting: ranks have agreed on the new owner, so no rank sends any more."""
        super()._fog_give_up()
        self._in_flight, self._pace = [], None
        for window in self.windows:
            window.abandon("ended when another distributed optimizer took over the model")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises ValueError where there are windows, which are those of the parameters at construction."""
        self._fog_check_not_replaced()
        if self.is_running:
            raise ValueError(
                f"a parameter group must be there when {self.algorithm_name} is made, as it has no window else: make it anew"
            )
        super().add_param_group(param_group)

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
        for window in self.windows:
            self._in_flight.append(self.send(window))
        if self._pace is not None:
            self._pace.advance()

    def finish(self) -> None:
        """Waits for the round's exchange and takes the received values."""
        self.keep_pace()
        self.take_all()

    def take_all(self) -> None:
        """Waits for the exchanges in flight, and takes the received values."""
        error = self._wait()
        if error is not None:
            raise error
        if self.force_barrier:
            self.await_all()  # all ranks have sent their values
        self.buckets.values()  # which `take` changes
        for window in self.windows:
            self.take(window)

    def keep_pace(self) -> None:
        """Waits for in-neighbors that are too far behind, unless ranks exchange in step anyway."""
        if self._watch is not None:
            self._watch.meet_if_needed()
        if self._pace is not None and not self.force_barrier:
            self._pace.wait(self.max_staleness)

    # --- inside ---

    def _edges(self) -> NDArray[np.bool_]:
        """Returns whether there is an edge in any round of a period."""
        assert self._plans.topology is not None
        return edges_of(self._plans.topology)

    def _open(self) -> None:
        """Opens windows along the topology, or what is left of it. Collective among neighbors."""
        context = self.context
        self._plans = Plans(self._topology, context)
        group, times = self._generation
        times = times + 1 if group is context.group else 0
        self._generation = context.group, times
        if self._topology is not None:
            context = context.along(self._edges())
        prefix = f"{self._prefix}.{times}" if times else self._prefix
        self.windows = []
        for number, flat in enumerate(self.buckets.flats):
            self.windows.append(Window(flat, context, name=f"{prefix}.{number}", zero_init=True))
        sources, destinations = sorted(context.topology.in_neighbors), sorted(context.topology.out_neighbors)
        self._pace = Pace(context, prefix, sources, destinations, gives_way=self._participant is not None)

    def _end(self) -> None:
        """Ends the windows; collective among neighbors, and among all ranks if they go on after losses."""
        pace = self._pace
        if pace is None:
            return
        pace.pause()  # so that neighbors do not wait for this rank, which waits for them
        error = self._wait()
        ends: list[Pace | Window] = [*self.windows, pace]
        if self._watch is not None and self._ends is not None:
            # A rank that waited for its neighbors in `free` would not hear of an agreement round in which they wait for it.
            # Once all ranks have come here, nobody writes or reads any more, so nobody has to wait.
            self._closing = self._ends.completed
            self._watch.meet_if_needed()
            await_all(self._ends)
            ends = []
            for window in self.windows:
                window.abandon("was freed")
            if self._pace is not None:  # the agreement may have opened another one
                self._pace.abandon()
        self._pace = None
        for each in ends:
            try:
                each.free()
            except RuntimeError as failure:
                error = error or failure
        if error is not None:
            raise error

    def _wait(self) -> RuntimeError | None:
        """Waits for all operations in flight and returns the first error."""
        in_flight, self._in_flight = self._in_flight, []
        error = None
        for work in in_flight:
            try:
                work.wait()
            except RuntimeError as failure:
                error = error or failure
        return error
