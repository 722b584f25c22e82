"""AWC, adapt with combine: neighbors' parameters travel while the gradient is computed."""

from __future__ import annotations

from typing import ClassVar

from torch.optim import Optimizer

from fogdist.buckets import BUCKET_CAP_MB
from fogdist.context import current
from fogdist.optim.combining import CombiningOptimizer
from fogdist.optim.overlapping import OverlappingOptimizer
from fogdist.optim.parameter_average import CommunicationType, ParameterAverage
from fogdist.optim.wrapper import Models, reject_lbfgs, wrap


def DistributedAdaptWithCombineOptimizer(
    optimizer: Optimizer,
    model: Models,
    communication_type: CommunicationType = CommunicationType.neighbor_allreduce,
    num_steps_per_communication: int = 1,
    bucket_cap_mb: float = BUCKET_CAP_MB,
) -> AdaptWithCombineOptimizer:
    """Returns an optimizer that adapts with combine: ``w+ = Avg(w) - step(grad f(w))``.

    The average starts with a forward pass, of the parameters as they are then, travels during that and the
    backward pass, and is awaited in `step`, which then makes the optimizer's own step from the average with
    the gradient of the old parameters. In between parameters must not be changed: the neighbors read them
    where they are. (Where a forward pass itself changes them, by an embedding's `max_norm`, the average
    starts at its end.) (The consensus or diffusion strategy with the gradient off the
    average: Sayed, "Adaptation, learning, and optimization over networks", Foundations and Trends in Machine
    Learning 7, 2014; overlapped as in BlueFog, Ying et al. 2021.)

    The parameters move into flat buffers, of which they are views from then on: the same tensors with their
    values, strides and state, but no longer in memory that they shared with others, such as a NumPy array. A
    parameter may get other values in any way; its dtype, device and shape stay. On the CPU `step` moves large
    ones into the memory of the average, which saves a copy, unless something else is in theirs, such as a
    state dict in hand or a NumPy array: then it copies. So do not keep a bare ``data_ptr()``. Once made, and
    whenever parameters are added, frozen or unfrozen, which all ranks must do alike, ranks compare what they
    hold.

    Only forward passes in training mode with gradients enabled count, and the model must be called as a
    function, not by its `forward` method; a step without any such pass averages on the spot. Where a
    gradient scaler finds an overflow, the rank leaves out its own step but not the average.

    Args:
        optimizer: Any torch optimizer that evaluates its closure once a step; it keeps its state.
        model: The model, or a list of models, that hold its parameters. All trained parameters are averaged,
            buffers are not. Of a list, all ranks run the same models between two steps: each model has its
            own average, which begins with its own forward pass, and ranks that run others wait in vain, until
            the group's timeout.
        communication_type: Whom to average with.
        num_steps_per_communication: J: an average every J forward passes of the model. With J = 3 both three
            passes and one step, and three passes with a step after each, make one average.
        bucket_cap_mb: MiB of the buffers that the parameters live in, each of which is one message. A larger
            parameter has one for itself.

    Returns:
        An instance of the optimizer's class with `step` as above, `synchronize`, `skip_synchronize`, and the
        attributes `self_weight`, `src_weights`, `dst_weights`, `src_machine_weights`, `dst_machine_weights`,
        `enable_topo_check`, `communication_type`.

    Raises:
        TypeError: An argument has a wrong type; a parameter is not an ordinary dense tensor.
        ValueError: `optimizer` is an LBFGS, is distributed already or has a parameter that is not in the
            model; two parameters have the same name or overlap in memory; one is held by another living
            optimizer or wrapper; `num_steps_per_communication` is below 1, or `bucket_cap_mb` not above 0;
            ranks hold different parameters (on all ranks alike); before `init`.
        RuntimeError: After `shutdown`.
    """
    context = current()
    distributed = wrap(
        AdaptWithCombineOptimizer, optimizer, model, num_steps_per_communication, bucket_cap_mb
    )
    reject_lbfgs(optimizer)
    distributed.communication_type = communication_type
    distributed._fog_start(is_alone=context.is_alone)
    return distributed


class AdaptWithCombineOptimizer(OverlappingOptimizer, CombiningOptimizer):
    """See `DistributedAdaptWithCombineOptimizer`, which makes it."""

    _begins_with_forward: ClassVar[bool] = True

    _fog_averages: list[ParameterAverage]

    def _fog_start(self, is_alone: bool) -> None:
        self._fog_averages = [
            ParameterAverage(
                f"fogdist.awc.{self._fog_number}.{place}", self._fog_names, self._fog_bucket_bytes
            )
            for place in range(len(self._fog_models))
        ]
        if not is_alone:
            for place, average in enumerate(self._fog_averages):
                average.hold(self._fog_parameters(place))
        super()._fog_start(is_alone)

    def _fog_begin(self, place: int) -> None:
        self._fog_averages[place].start(
            self._fog_parameters(place), self.communication_type, self._fog_weights()
        )

    def _fog_end(self, place: int) -> None:
        self._fog_averages[place].finish()

    def _fog_is_begun(self, place: int) -> bool:
        return self._fog_averages[place].is_started
