"""AWC, adapt with combine: neighbors' parameters travel while the gradient is computed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fogdist.context import current
from fogdist.optim.combining import CombiningOptimizer
from fogdist.optim.parameter_average import CommunicationType, ParameterAverage
from fogdist.optim.pass_counter import warn_too_many_passes
from fogdist.optim.wrapper import Models, reject_lbfgs, wrap


def DistributedAdaptWithCombineOptimizer(
    optimizer: Optimizer,
    model: Models,
    communication_type: CommunicationType = CommunicationType.neighbor_allreduce,
    num_steps_per_communication: int = 1,
) -> AdaptWithCombineOptimizer:
    """Returns an optimizer that adapts with combine: ``w+ = Avg(w) - step(grad f(w))``.

    The average starts at the end of a forward pass, of the parameters as they were in it, travels during the
    backward pass, and is awaited in `step`, which then makes the optimizer's own step from the average with
    the gradient of the old parameters. (The consensus or diffusion strategy with the gradient off the
    average: Sayed, "Adaptation, learning, and optimization over networks", Foundations and Trends in Machine
    Learning 7, 2014; overlapped as in BlueFog, Ying et al. 2021.)

    Only forward passes in training mode with gradients enabled count, and the model must be called as a
    function, not by its `forward` method; a step without any such pass averages on the spot. A gradient
    scaler must skip steps on all ranks alike.

    Args:
        optimizer: Any torch optimizer that evaluates its closure once a step; it keeps its state.
        model: The model, or a list of models, that hold its parameters. All trained parameters are averaged,
            buffers are not.
        communication_type: Whom to average with.
        num_steps_per_communication: J: an average every J forward passes of the model. With J = 3 both three
            passes and one step, and three passes with a step after each, make one average.

    Returns:
        An instance of the optimizer's class with `step` as above, `synchronize`, `skip_synchronize`, and the
        attributes `self_weight`, `src_weights`, `dst_weights`, `enable_topo_check`, `communication_type`.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: `optimizer` is an LBFGS, is distributed already or has a parameter that is not in the
            model; two parameters have the same name; `num_steps_per_communication` is below 1; before `init`.
        RuntimeError: After `shutdown`.
    """
    context = current()
    distributed = wrap(AdaptWithCombineOptimizer, optimizer, model, num_steps_per_communication)
    reject_lbfgs(optimizer)
    distributed.communication_type = communication_type
    distributed._fog_start(is_alone=context.size == 1)
    return distributed


class AdaptWithCombineOptimizer(CombiningOptimizer):
    """See `DistributedAdaptWithCombineOptimizer`, which makes it."""

    _fog_averages: list[ParameterAverage]
    _fog_passes: list[int]
    _fog_saw_forward: bool
    _fog_has_warned: bool
    _fog_is_alone: bool

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Waits for the average, if one is due, and makes the optimizer's step from it.

        Args:
            closure: Evaluated once, before the average is awaited.

        Returns:
            What the closure returned, else what the optimizer's own step returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._fog_is_alone:
            self._fog_catch_up()
            self.synchronize()
        result = self._fog_wrapped.step()
        return result if closure is None else loss

    def synchronize(self) -> None:
        """Waits for an average in flight and writes it into the parameters; `step` does so by itself."""
        for place, average in enumerate(self._fog_averages):
            if average.is_started:
                average.finish()
                self._fog_passes[place] = 0

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Around a `step` after `synchronize`, as scripts for Horovod and BlueFog have it.

        `step` knows by itself that nothing is in flight any more, so this only checks that `synchronize` was
        called.

        Raises:
            RuntimeError: An average is in flight.
        """
        if any(average.is_started for average in self._fog_averages):
            raise RuntimeError(
                "skip_synchronize() needs a call of synchronize() before it: an average is in flight"
            )
        yield

    def _fog_start(self, is_alone: bool) -> None:
        count = len(self._fog_models)
        self._fog_is_alone = is_alone
        self._fog_passes = [0] * count
        self._fog_averages = [
            ParameterAverage(f"fogdist.awc.{self._fog_number}.{place}") for place in range(count)
        ]
        self._fog_saw_forward = False
        self._fog_has_warned = False
        if not is_alone:
            for place, model in enumerate(self._fog_models):
                weakref.finalize(self, _hook(model, place, self).remove).atexit = False

    def _fog_after_forward(self, place: int) -> None:
        self._fog_saw_forward = True
        self._fog_passes[place] += 1
        if self._fog_passes[place] > self._fog_steps and not self._fog_has_warned:
            self._fog_has_warned = True
            warn_too_many_passes("forward", self._fog_steps)
        self._fog_average_if_due(place)

    def _fog_catch_up(self) -> None:
        """A step that no forward pass led to counts as a pass of every model.

        So a rank without data for one step still answers the others.
        """
        if not self._fog_saw_forward:
            for place in range(len(self._fog_models)):
                self._fog_passes[place] += 1
                self._fog_average_if_due(place)
        self._fog_saw_forward = False

    def _fog_average_if_due(self, place: int) -> None:
        average = self._fog_averages[place]
        if self._fog_passes[place] >= self._fog_steps and not average.is_started:
            average.start(self._fog_parameters(place), self.communication_type, self._fog_weights())


def _hook(model: Module, place: int, optimizer: AdaptWithCombineOptimizer) -> RemovableHandle:
    # The model outlives its optimizer: its hook must not keep the optimizer alive.
    reference = weakref.ref(optimizer)

    def after_forward(module: Module, args: Any, output: Any) -> None:
        alive = reference()
        if alive is not None and module.training and torch.is_grad_enabled():
            alive._fog_after_forward(place)

    return model.register_forward_hook(after_forward)
