"""Exchanges that begin with or after a forward pass and end in `step`: the passes hide them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

from torch.utils.hooks import RemovableHandle

from fogdist.optim.pass_counter import warn_too_many_passes
from fogdist.optim.wrapper import DistributedOptimizer, closure_of, evaluated, only_makes_state


class OverlappingOptimizer(DistributedOptimizer):
    """Base of the optimizers that exchange parameters while the gradient is computed.

    A subclass says what begins and what ends, for the parameters of one model each.
    """

    # Whether an exchange begins with the forward pass; else it begins after it.
    _begins_with_forward: ClassVar[bool] = False
    # Asks a gradient scaler to call step() whether gradients overflowed or not; see _fog_local_step.
    _step_supports_amp_scaling: ClassVar[bool] = True

    _fog_passes: list[int]
    _fog_saw_forward: bool
    _fog_has_warned: bool
    _fog_is_alone: bool
    _fog_hooks: list[RemovableHandle]

    def step(self, *arguments: Any, **options: Any) -> Any:
        """Ends the exchange, if one is due, and makes the optimizer's step from what it gave.

        Args:
            *arguments: A closure, evaluated once, before the exchange is awaited; or nothing.
            **options: The closure as `closure`, and what else the optimizer's own step takes.

        Returns:
            What the closure returned, else what the optimizer's own step returns.
        """
        closure, others = closure_of(arguments, options)
        loss = evaluated(closure)
        with self._fog_scaler_forgotten_on_error():
            if self._fog_is_alone or only_makes_state(self._fog_wrapped, arguments, options):
                result = self._fog_local_step(**others)
            else:
                self._fog_catch_up()
                self._fog_end_all()
                with self._fog_stepping():
                    result = self._fog_local_step(**others)
        return result if closure is None else loss

    def synchronize(self) -> None:
        """Ends an exchange in flight, parameters included; `step` does so by itself."""
        if any(self._fog_is_begun(place) for place in range(len(self._fog_passes))):
            self._fog_end_all()
            with self._fog_stepping():
                pass

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Around a `step` after `synchronize`, as scripts for Horovod and BlueFog have it.

        `step` knows by itself that nothing is in flight any more, so this only checks that `synchronize` was
        called.

        Raises:
            RuntimeError: An exchange is in flight.
        """
        if any(self._fog_is_begun(place) for place in range(len(self._fog_passes))):
            raise RuntimeError(
                "skip_synchronize() needs a call of synchronize() before it: an exchange is in flight"
            )
        yield

    def _fog_begin(self, place: int) -> None:
        """Begins the exchange of the parameters of the model at `place`."""
        raise NotImplementedError

    def _fog_end(self, place: int) -> None:
        """Waits for it and writes what it gave into the parameters."""
        raise NotImplementedError

    def _fog_is_begun(self, place: int) -> bool:
        """Whether it has begun and not ended."""
        raise NotImplementedError

    def _fog_stepping(self) -> AbstractContextManager[None]:
        """What the optimizer's own step is made in."""
        return nullcontext()

    def _fog_start(self, is_alone: bool) -> None:
        self._fog_is_alone = is_alone
        self._fog_passes = [0] * (0 if is_alone else len(self._fog_models))
        self._fog_saw_forward = False
        self._fog_has_warned = False
        self._fog_hooks = []
        if not is_alone:
            self._fog_hooks = [self._fog_hook(place) for place in range(len(self._fog_models))]
            for hook in self._fog_hooks:
                weakref.finalize(self, hook.remove).atexit = False

    def _fog_hook(self, place: int) -> RemovableHandle:
        from fogdist.optim.forward_hook import ForwardHook, register_before_forward

        model, hook = self._fog_models[place], ForwardHook(self._fog_count_forward, place)
        if self._begins_with_forward:
            return register_before_forward(model, hook)
        return model.register_forward_hook(hook)

    def _fog_count_forward(self, place: int) -> None:
        self._fog_saw_forward = True
        self._fog_passes[place] += 1
        if self._fog_passes[place] > self._fog_steps and not self._fog_has_warned:
            self._fog_has_warned = True
            warn_too_many_passes("forward", self._fog_steps)
        self._fog_begin_if_due(place)

    def _fog_catch_up(self) -> None:
        """A step that no forward pass led to counts as a pass of every model.

        So a rank without data for one step still answers the others.
        """
        if not self._fog_saw_forward:
            for place in range(len(self._fog_models)):
                self._fog_passes[place] += 1
                self._fog_begin_if_due(place)
        self._fog_saw_forward = False

    def _fog_begin_if_due(self, place: int) -> None:
        if self._fog_passes[place] >= self._fog_steps and not self._fog_is_begun(place):
            self._fog_begin(place)

    def _fog_end_all(self) -> None:
        for place in range(len(self._fog_passes)):
            if self._fog_is_begun(place):
                self._fog_passes[place] = 0
                self._fog_end(place)
