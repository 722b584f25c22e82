"""What the optimizers on one-sided windows have in common: windows over the parameters, and when to use them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from fogdist.collectives import barrier, wait
from fogdist.context import current
from fogdist.optim.bucket_windows import BucketWindows, SlotsHeardOf
from fogdist.optim.overlapping import OverlappingOptimizer
from fogdist.optim.wrapper import Models, reject_lbfgs, setting, wrap
from fogdist.windows import Window

# Which of them an optimizer has; the others raise, as they would change nothing.
_ATTRIBUTES = frozenset({"self_weight", "src_weights", "dst_weights", "skip_lost"})


class WindowOptimizer(OverlappingOptimizer):
    """Base of the optimizers on one-sided windows.

    Nothing waits for other ranks but the making of the optimizer, `add_param_group`, `unregister_window`, and,
    with `force_barrier`, each exchange.

    Attributes:
        force_barrier: True to exchange in step with the others: each rank's exchange is in the same iteration
            of all. It must then be the same on all ranks.
    """

    _public: ClassVar[frozenset[str]] = frozenset({"force_barrier"})
    _kind: ClassVar[str]
    _zero_init: ClassVar[bool] = False

    force_barrier: bool = setting(False)
    _fog_prefix: str
    _fog_buckets: list[list[BucketWindows]]
    _fog_handles: list[list[int]]
    _fog_begun: list[bool]
    _fog_known: set[torch.Tensor]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _ATTRIBUTES and name not in self._public:
            allowed = ", ".join(sorted(_ATTRIBUTES & self._public))
            raise AttributeError(f"{self._kind} optimizers have no attribute {name!r}, but {allowed}")
        super().__setattr__(name, value)

    def unregister_window(self) -> None:
        """Frees the windows and takes the optimizer off the model; collective.

        The parameters keep their values. A `step` that would exchange raises RuntimeError from now on.

        Raises:
            torch.distributed.DistBackendError: A neighbor did not come in time. All windows are freed all the
                same.
        """
        for hook in self._fog_hooks:
            hook.remove()
        error = None
        for place in range(len(self._fog_handles)):
            error = self._fog_wait(place) or error
        for buckets in self._fog_each():
            try:
                buckets.free()
            except RuntimeError as failure:
                error = failure
        if error is not None:
            raise error

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group whose parameters belong to the model; collective, as it makes windows for them.

        Raises:
            ValueError: A parameter is not in the model, or as when the optimizer was made.
        """
        super().add_param_group(param_group)
        if not self._fog_is_alone:
            self._fog_make_windows()

    # --- what a subclass says ---

    @abstractmethod
    def _fog_send(self, window: Window) -> int:
        """Begins the exchange of one window; returns its handle."""

    @abstractmethod
    def _fog_combine(self, window: Window) -> None:
        """Writes what has come into the window's tensor."""

    # --- inside ---

    def _fog_start(self, is_alone: bool) -> None:
        count = len(self._fog_models)
        self._fog_buckets = [[] for _ in range(count)]
        self._fog_handles = [[] for _ in range(count)]
        self._fog_begun = [False] * count
        self._fog_known = set()
        if not is_alone:
            self._fog_make_windows()
        super()._fog_start(is_alone)

    def _fog_make_windows(self) -> None:
        """Makes windows of the parameters that are not in one: trained ones, of each model by itself."""
        for place, buckets in enumerate(self._fog_buckets):
            missing = [p for p in self._fog_parameters(place) if p not in self._fog_known]
            first = sum(len(each.windows) for each in self._fog_each())
            made = BucketWindows(
                missing,
                [self._fog_names[p] for p in missing],
                self._fog_prefix,
                first,
                zero_init=self._zero_init,
                bucket_bytes=self._fog_bucket_bytes,
            )
            self._fog_known.update(missing)
            buckets.append(made)
            for window in made.windows:
                self._fog_adopt(window)

    def _fog_adopt(self, window: Window) -> None:
        """Called with each new window."""

    def _fog_each(self) -> Iterator[BucketWindows]:
        for buckets in self._fog_buckets:
            yield from buckets

    def _fog_begin(self, place: int) -> None:
        for parameter in self._fog_parameters(place):
            if parameter not in self._fog_known:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} was frozen when the optimizer was made, so it "
                    "has no window: unfreeze it before, or make the optimizer anew"
                )
        if self.force_barrier:
            barrier()  # all have ended their last exchange: what is sent now cannot get into it
        for buckets in self._fog_buckets[place]:
            buckets.flats.rehome()
            for window in buckets.windows:
                self._fog_handles[place].append(self._fog_send(window))
        self._fog_begun[place] = True

    def _fog_end(self, place: int) -> None:
        self._fog_begun[place] = False
        error = self._fog_wait(place)
        if error is not None:
            raise error
        if self.force_barrier:
            barrier()  # all have been sent
        for buckets in self._fog_buckets[place]:
            buckets.flats.rehome()
            for window in buckets.windows:
                self._fog_combine(window)

    def _fog_is_begun(self, place: int) -> bool:
        return self._fog_begun[place]

    def _fog_wait(self, place: int) -> RuntimeError | None:
        """Waits for what was begun, all of it; returns the first error."""
        handles, self._fog_handles[place] = self._fog_handles[place], []
        error = None
        for handle in handles:
            try:
                wait(handle)
            except RuntimeError as failure:
                error = error or failure
        return error


class MixingOptimizer(WindowOptimizer):
    """Base of those that average their parameters with what is in the slots.

    Attributes:
        skip_lost: True to leave out neighbors that are known to be lost, whose last parameters still count unless
            the weights of the average say otherwise. By default they make `step` raise.
    """

    skip_lost: bool = setting(False)
    self_weight: float | None = setting(None)
    src_weights: Iterable[int] | Mapping[int, float] | None = setting(None)
    _fog_mean: tuple[float, dict[int, float]]
    _fog_heard: SlotsHeardOf

    def _fog_start(self, is_alone: bool) -> None:
        self._fog_heard = SlotsHeardOf()
        self._fog_mean = current().topology.mean_weights  # windows keep the topology as it is
        super()._fog_start(is_alone)

    def _fog_given_weights(self) -> tuple[float, dict[int, float]] | None:
        """The attributes of the average, if they are set.

        Raises:
            TypeError: `src_weights` is no dict.
        """
        if self.self_weight is None:
            return None
        if not isinstance(self.src_weights, Mapping):
            raise TypeError(
                "with self_weight, src_weights must be a dict of ranks to weights, got "
                f"{type(self.src_weights).__name__}"
            )
        return self.self_weight, dict(self.src_weights)

    def _fog_combine(self, window: Window) -> None:
        own, others = self._fog_given_weights() or self._fog_mean
        own, others = self._fog_heard.shift(window, own, others)
        window.update(self_weight=own, neighbor_weights=others)


def make(
    view: type[WindowOptimizer],
    optimizer: Optimizer,
    model: Models,
    num_steps_per_communication: int,
    window_prefix: str | None,
    bucket_cap_mb: float,
) -> Any:
    """Returns a distributed optimizer of class `view`, with its windows; collective.

    Args:
        view: A subclass of WindowOptimizer.
        optimizer, model, num_steps_per_communication, bucket_cap_mb: As for `wrap`.
        window_prefix: What the windows' names begin with; by default a new name.

    Raises:
        TypeError: As `wrap`; `window_prefix` is not a string.
        ValueError: As `wrap` and `BucketWindows`; `optimizer` is an LBFGS; before `init`.
        RuntimeError: After `shutdown`.
    """
    context = current()
    if window_prefix is not None and not isinstance(window_prefix, str):
        raise TypeError(f"window_prefix must be a string, got {type(window_prefix).__name__}")
    distributed = wrap(view, optimizer, model, num_steps_per_communication, bucket_cap_mb)
    reject_lbfgs(optimizer)
    distributed._fog_prefix = window_prefix or f"fogdist.{view._kind}.{distributed._fog_number}"
    distributed._fog_start(is_alone=context.is_alone)
    return distributed
