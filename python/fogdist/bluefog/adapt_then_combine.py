"""Adapt then combine with rounds that are counted in backward passes, and optionally steps within these passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from fogdist.algorithms.decentralized_sgd import DecentralizedSGD
from fogdist.bluefog.backward_passes import BackwardPasses
from fogdist.bluefog.backward_steps import BackwardSteps, step_of
from fogdist.training.view import Models, reject_lbfgs

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fogdist.training.algorithm import AlgorithmOptions


class AdaptThenCombine(DecentralizedSGD):
    """Adapt then combine, ``x+ = W (x + d(x))``, in the step that completes J backward passes since the last average.

    J = 3 gives one average for three passes, with one step or with a step after each pass. A step counts as at least one
    pass, and so does a closure, even if it is evaluated several times.

    Args:
        optimizer: As in `DecentralizedSGD`.
        model: As in `Algorithm`.
        step_in_backward: Whether a bucket's step is made, and its average started, as soon as the J-th
            backward pass has given all its parameters their gradients, so that the rest of the pass hides
            it. `step` handles the remaining buckets, and waits. For an optimizer that treats each parameter by
            itself, the values are the same if nothing changes gradients after that pass. Clipping and gradient
            scalers do, and both raise. Hooks of the optimizer's step are called for each bucket.
        **options: As in `Algorithm`; `local_steps` is J.

    Raises:
        TypeError: As `Algorithm`.
        ValueError: As `Algorithm`, with `step_in_backward` also for an LBFGS.
    """

    can_be_joined: ClassVar[bool] = False

    _in_backward: bool
    _local_steps: int
    _counter: BackwardPasses
    _backward: BackwardSteps | None

    def __init__(
        self,
        optimizer: Optimizer,
        model: Models,
        *,
        step_in_backward: bool = False,
        **options: Unpack[AlgorithmOptions],
    ) -> None:
        if not isinstance(step_in_backward, bool):
            raise TypeError(f"step_in_backward must be a bool, got {type(step_in_backward).__name__}")
        if step_in_backward:
            reject_lbfgs(optimizer)
        self._in_backward = step_in_backward
        super().__init__(optimizer, model, order="atc", **options)
        self._backward = None
        self._counter = BackwardPasses(self._after_gradient)
        self._watch()

    @property
    def local_steps(self) -> int:
        """J."""
        return self._local_steps

    @local_steps.setter
    def local_steps(self, value: int) -> None:
        self._local_steps = value
        if "_counter" in vars(self):
            self._watch()

    def step(self, *arguments: Any, **options: Any) -> Any:
        """Makes the optimizer's step and then the average, if one is due.

        Args:
            *arguments: A closure, or nothing. LBFGS may evaluate it several times; all other optimizers evaluate it
                once, at the beginning.
            **options: The closure as `closure`, and other options of the optimizer's own step. No other options are
                allowed with `step_in_backward`, which makes steps before the options are known.

        Returns:
            The result of the closure if there is one, otherwise the result of the optimizer's own step.

        Raises:
            TypeError: With `step_in_backward`, there are other options than the closure.
            RuntimeError: With `step_in_backward`, gradients were changed after the backward pass. Steps that were not
                made in that pass are skipped, but parameters are averaged, so training can continue.
        """
        others = sorted(set(options) - {"closure"})
        if self._in_backward and others:
            raise TypeError(
                f"step() takes a closure only with step_in_backward=True, got {', '.join(others)}"
            )
        return super().step(*arguments, **options)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `Algorithm.no_sync`."""
        with super().no_sync(), self._counter.paused():
            yield

    def adapt(self) -> Any:
        """Makes the step of all parameters that the backward pass did not update."""
        if self._backward is None:
            if not isinstance(self._fog_wrapped, LBFGS):
                return super().adapt()
            with self._counter.paused():
                return super().adapt()
        try:
            if getattr(self, "found_inf", None) is not None:
                raise RuntimeError("a gradient scaler must not be used with step_in_backward=True")
            self._backward.check()
        except RuntimeError:
            # The next iteration starts from a clean state, and no rank waits for the rest of the average.
            self.count_step()
            self.combine()
            self.rounds += 1
            raise
        applied = self._backward.applied
        groups = self._fog_wrapped.param_groups
        return step_of(
            self._fog_wrapped, {p for group in groups for p in group["params"] if p not in applied}
        )

    def count_step(self) -> bool:
        """Counts a step's passes and returns whether ranks are to communicate in it."""
        self.steps += 1
        return self._counter.count_step() >= self.local_steps

    def combine(self) -> None:
        """Averages all buckets that are not in flight already."""
        backward, self._backward = self._backward, None
        if backward is None:
            super().combine()
        else:
            for number in backward.left:
                self._mix(number)
            self._mixer.finish()
        self._counter.reset()

    def refresh(self) -> None:
        """See `Algorithm.refresh`."""
        super().refresh()
        self._watch()

    def _fog_give_up(self) -> None:
        """Also stops counting backward passes."""
        super()._fog_give_up()
        self._counter.stop()
        self._backward = None

    def _watch(self) -> None:
        # A step counts as a pass anyway, so it completes a round of one pass whatever hooks would count.
        if self.is_running and (self._in_backward or self.local_steps > 1):
            self._counter.watch(self.buckets.tensors)

    def _after_gradient(self, parameter: Tensor) -> None:
        passes = self._counter.passes_of(parameter)
        # The check of a dynamic topology waits for all ranks, which may complete their buckets in any order.
        if self._in_backward and passes >= self.local_steps and not self.enable_topo_check:
            with torch.no_grad():
                self._complete(parameter)

    def _complete(self, parameter: Tensor) -> None:
        """Makes the step of the bucket that the gradient of `parameter` completes, and starts its average."""
        if self._backward is None:
            self.weights().check_taken(
                self.mixing
            )  # checked before a step is made that could not be averaged
            self.refresh()
            self._backward = BackwardSteps(self.buckets)
        for number in self._backward.complete(parameter):
            self._backward.step(self._fog_wrapped, number)
            self._mix(number)

    def _mix(self, number: int) -> None:
        """Begins the exchange of a bucket."""
        self._mixer.add(self.buckets, number, self.mixing, self.this_round())
