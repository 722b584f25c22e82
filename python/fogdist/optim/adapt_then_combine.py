"""ATC, adapt then combine: a local step, then the average of its results."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from fogdist.buckets import BUCKET_CAP_MB
from fogdist.context import current
from fogdist.optim.backward_steps import BackwardSteps, step_of
from fogdist.optim.combining import CombiningOptimizer
from fogdist.optim.parameter_average import CommunicationType, ParameterAverage
from fogdist.optim.pass_counter import PassCounter, warn_too_many_passes
from fogdist.optim.wrapper import Models, closure_of, evaluated, only_makes_state, reject_lbfgs, wrap


def DistributedAdaptThenCombineOptimizer(
    optimizer: Optimizer,
    model: Models,
    communication_type: CommunicationType = CommunicationType.neighbor_allreduce,
    num_steps_per_communication: int = 1,
    bucket_cap_mb: float = BUCKET_CAP_MB,
    step_in_backward: bool = False,
) -> AdaptThenCombineOptimizer:
    """Returns an optimizer that adapts, then combines: ``w+ = Avg(w - step(grad f(w)))``.

    `step` makes the optimizer's own step, with whatever was done to the gradients before (accumulation,
    clipping, unscaling), and then averages the parameters. (Chen and Sayed, "Diffusion adaptation strategies
    for distributed optimization and learning over networks", IEEE Transactions on Signal Processing 60,
    2012.) Where a gradient scaler finds an overflow, the rank leaves out its own step but not the average.

    The parameters move into flat buffers, of which they are views from then on: the same tensors with their
    values, strides and state, but no longer in memory that they shared with others, such as a NumPy array. A
    parameter may get other values in any way; its dtype, device and shape stay. On the CPU `step` moves large
    ones into the memory of the average, which saves a copy, unless something else is in theirs, such as a
    state dict in hand or a NumPy array: then it copies. So do not keep a bare ``data_ptr()``. Once made, and
    whenever parameters are added, frozen or unfrozen, which all ranks must do alike, ranks compare what they
    hold.

    Args:
        optimizer: Any torch optimizer; it keeps its state.
        model: The model, or a list of models, that hold its parameters. All trained parameters are averaged,
            buffers are not.
        communication_type: Whom to average with.
        num_steps_per_communication: J: the average is in the step that completes J backward passes since the
            last one. With J = 3 both three passes and one step, and three passes with a step after each, make
            one average. A step counts as one pass at least.
        bucket_cap_mb: MiB of the buffers that the parameters live in, each of which is one message. A larger
            parameter has one for itself.
        step_in_backward: Whether a bucket's step is made, and its average started, as soon as the J-th
            backward pass has given all its parameters their gradients, so that the rest of the pass hides
            it. `step` does what is left, and waits. It gives the same values, for an optimizer that treats each
            parameter by itself, if nothing changes gradients after that pass: no clipping, no gradient
            scaler, both of which raise. Hooks of the optimizer's step are called for each bucket.

    Returns:
        An instance of the optimizer's class with `step` as above and the attributes `self_weight`,
        `src_weights`, `dst_weights`, `src_machine_weights`, `dst_machine_weights`, `enable_topo_check`,
        `communication_type`.

    Raises:
        TypeError: An argument has a wrong type; a parameter is not an ordinary dense tensor.
        ValueError: `optimizer` is distributed already, an LBFGS with `step_in_backward`, or has a parameter
            that is not in the model; two parameters have the same name or overlap in memory; one is held by
            another living optimizer or wrapper; `num_steps_per_communication` is below 1, or
            `bucket_cap_mb` not above 0; ranks hold different parameters (on all ranks alike); before
            `init`.
        RuntimeError: After `shutdown`.
    """
    context = current()
    distributed = wrap(
        AdaptThenCombineOptimizer, optimizer, model, num_steps_per_communication, bucket_cap_mb
    )
    if not isinstance(step_in_backward, bool):
        raise TypeError(f"step_in_backward must be a bool, got {type(step_in_backward).__name__}")
    if step_in_backward:
        reject_lbfgs(optimizer)
    distributed.communication_type = communication_type
    distributed._fog_step_in_backward = step_in_backward
    distributed._fog_start(is_alone=context.is_alone)
    return distributed


class AdaptThenCombineOptimizer(CombiningOptimizer):
    """See `DistributedAdaptThenCombineOptimizer`, which makes it."""

    # Asks a gradient scaler to call step() whether gradients overflowed or not; see _fog_local_step.
    _step_supports_amp_scaling: ClassVar[bool] = True

    _fog_average: ParameterAverage
    _fog_counter: PassCounter
    _fog_has_warned: bool
    _fog_is_alone: bool
    _fog_step_in_backward: bool
    _fog_backward: BackwardSteps | None

    def step(self, *arguments: Any, **options: Any) -> Any:
        """Makes the optimizer's step and then the average, if one is due.

        Args:
            *arguments: A closure, given to the optimizer, or nothing. It counts as one pass, however often it is
                evaluated. With `step_in_backward` it is evaluated once, before the rest.
            **options: The closure as `closure`, and what else the optimizer's own step takes; with
                `step_in_backward`, which makes steps before they are known, nothing else.

        Returns:
            What the optimizer's own step returns, or the closure with `step_in_backward`.

        Raises:
            TypeError: With `step_in_backward`, there are other options than the closure.
            RuntimeError: With `step_in_backward`, gradients were changed after the backward pass. Where the step
                was not made in that pass it is left out, but parameters are averaged; training may go on.
        """
        closure, others = closure_of(arguments, options)
        if self._fog_step_in_backward and others:
            raise TypeError(
                f"step() takes a closure only with step_in_backward=True, got {', '.join(sorted(others))}"
            )
        with self._fog_scaler_forgotten_on_error():
            if self._fog_is_alone or only_makes_state(self._fog_wrapped, arguments, options):
                return self._fog_local_step(*arguments, **options)
            if closure is None:
                result = self._fog_adapt(others)
            elif self._fog_step_in_backward:
                result = evaluated(closure)
                self._fog_adapt({})
            else:
                with self._fog_counter.paused():
                    result = self._fog_local_step(*arguments, **options)
            passes = self._fog_counter.count_step()
            parameters = self._fog_parameters()
            if passes >= self._fog_steps:
                self._fog_combine(parameters)
                self._fog_counter.reset()
            self._fog_counter.watch(parameters)
            return result

    def _fog_adapt(self, options: dict[str, Any]) -> Any:
        """Makes the optimizer's step for all parameters whose step the backward pass has not made."""
        if self._fog_backward is None:
            return self._fog_local_step(**options)
        try:
            if getattr(self, "found_inf", None) is not None:
                raise RuntimeError("a gradient scaler must not be used with step_in_backward=True")
            self._fog_backward.check()
        except RuntimeError:
            # The next iteration begins anew, and no rank waits for the rest of the average.
            self._fog_forget_scaler()
            self._fog_combine(self._fog_parameters())
            self._fog_counter.reset()
            raise
        applied = self._fog_backward.applied
        groups = self._fog_wrapped.param_groups
        return step_of(
            self._fog_wrapped, {p for group in groups for p in group["params"] if p not in applied}
        )

    def _fog_combine(self, parameters: list[Tensor]) -> None:
        """Averages all parameters, or those buckets of them that are not on their way."""
        kind, weights = self.communication_type, self._fog_weights()
        if self._fog_backward is None:
            self._fog_average.start(parameters, kind, weights)
        else:
            for number in self._fog_backward.left:
                self._fog_average.add(number, kind, weights)
        self._fog_backward = None
        self._fog_average.finish()

    def _fog_start(self, is_alone: bool) -> None:
        self._fog_is_alone = is_alone
        self._fog_has_warned = False
        self._fog_backward = None
        self._fog_average = ParameterAverage(
            f"fogdist.atc.{self._fog_number}", self._fog_names, self._fog_bucket_bytes
        )
        self._fog_counter = PassCounter(self._fog_after_gradient)
        if not is_alone:
            self._fog_average.hold(self._fog_parameters())
            self._fog_counter.watch(self._fog_parameters())

    def _fog_after_gradient(self, parameter: Tensor) -> None:
        passes = self._fog_counter.passes_of(parameter)
        # The check of a dynamic topology waits for all ranks, which may complete their buckets in any order.
        if self._fog_step_in_backward and passes >= self._fog_steps and not self.enable_topo_check:
            self._fog_complete(parameter)
        elif passes > self._fog_steps and not self._fog_has_warned:
            self._fog_has_warned = True
            warn_too_many_passes("backward", self._fog_steps)

    def _fog_complete(self, parameter: Tensor) -> None:
        """Makes the step of a bucket whose last gradient is that of `parameter`, and starts its average."""
        if self._fog_backward is None:
            self._fog_backward = BackwardSteps(self._fog_average.hold(self._fog_parameters()))
        for number in self._fog_backward.complete(parameter):
            self._fog_backward.step(self._fog_wrapped, number)
            self._fog_average.add(number, self.communication_type, self._fog_weights())
